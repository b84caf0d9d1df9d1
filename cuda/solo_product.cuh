/* cuda/solo_product.cuh - the products of the one row: what a slot of the ring holds of a tile, its sums, and what becomes of
 * them. */
#ifndef TLC_SOLO_PRODUCT_CUH
#define TLC_SOLO_PRODUCT_CUH

#include "solo.cuh"

#define INT4_SLOT (32 * 528) /* bytes of 32 chunks of a tile */
#define INT8_STEP 1024       /* inputs of a tile in a slot */
#define INT8_ROW  (INT8_STEP + 32)
#define INT8_HALF (2 * INT8_STEP + 32) /* of twice as many of half of the rows */

__device__ static __forceinline__ int slots_of(bool q4, int k_pad)
{
    return q4 ? (k_pad + 2047) / 2048 : (k_pad + INT8_STEP - 1) / INT8_STEP;
}

/* ---- products: by the sum warps ----
 *
 * All warps work on each tile: warp w has the chunks w, w + 8, ..., four of 2,048 inputs, which is a set. What nobody has to wait for is
 * done in front of the row: weights of a round of tiles lie in registers, and the ring is free again, before it comes. Then the row's
 * bytes are the same for all tiles of a lane. Sums of a round are put together in shared memory, and each warp ends one tile. */

enum solo_end { END_PLAIN, END_PUBLISH, END_SILU_MUL, END_RELU2, END_LOGITS }; /* PLAIN: published in order */

struct solo_product {
    const float *row_scale;
    void *out;                            /* as `end` says */
    uint32_t epoch;                       /* of what is published */
    int k_pad, n_out, tiles, first, turn; /* tiles: of this block, from `first` on; turn: of the row */
    enum solo_end end;
    bool q4;
};

/* The row of a product as a lane multiplies it: of set s, eight values from number input_of(s) on. Column g of a product has group g of
 * the eight of four chunks. */
template <int SETS> struct solo_bytes {
    uint2 v[SETS];
};
__device__ static __forceinline__ int input_of(int set)
{
    int lane = threadIdx.x & 31, g = lane >> 2, warp = (int)threadIdx.x / 32;
    return set * 2048 + (warp + g / 2 * SOLO_WARPS) * 64 + g % 2 * 32 + 8 * (lane & 3);
}

/* A product of the matrix unit has eight columns, and the row is but one: so group j of the set's eight is column j, with zeros in the
 * others, and eight products leave the sums of eight groups side by side, where each lane scales four of them: of rows g and g + 8,
 * groups 2 t and 2 t + 1. Two chains, of chunks 0 and 1, and 2 and 3, are half as long as one. */
struct set_q4 {
    uint4 w[4];
    uint32_t s;
};

/* n: chunks of the slot, in units of up to 16 as pack.cu says. */
__device__ static __forceinline__ void load_q4(struct set_q4 *set, uint32_t slot, int n)
{
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = (int)threadIdx.x / 32;
    uint32_t at = slot + (uint32_t)(warp * 512 + lane * 16);
    set->s = 0;
    if (warp + 8 * t < n)
        set->s = solo_load2(slot +
                            (uint32_t)(t / 2 * 8448 + min(n - t / 2 * 16, 16) * 512 + (t % 2 * 8 + warp) * 16 + g * 2));
#pragma unroll
    for (int u = 0; u < 4; u++) {
        set->w[u] = make_uint4(0, 0, 0, 0);
        if (warp + 8 * u < n)
            set->w[u] = solo_load16(at + (uint32_t)(u / 2 * 8448 + u % 2 * 4096));
    }
}

/* 16 times the sums, added to lo and hi. */
__device__ static __forceinline__ void sum_q4(const struct set_q4 *set, uint2 x, int *lo, int *hi)
{
    int lane = threadIdx.x & 31, g = lane >> 2;
    int even[2][4] = {}, odd[2][4] = {}; /* groups; the columns of the others are 0 */
    bool second = lane & 2;
#pragma unroll
    for (int u = 0; u < 4; u++) {
        uint4 w = set->w[u];
        const uint32_t a0[4] = {w.x << 4 & HIGH, w.y << 4 & HIGH, w.x & HIGH, w.y & HIGH};
        const uint32_t a1[4] = {w.z << 4 & HIGH, w.w << 4 & HIGH, w.z & HIGH, w.w & HIGH};
        bool e = g == 2 * u, d = g == 2 * u + 1;
        mma_s8(even[u / 2], a0, e ? x.x : 0, e ? x.y : 0, even[u / 2]);
        mma_s8(odd[u / 2], a1, d ? x.x : 0, d ? x.y : 0, odd[u / 2]);
    }
    *lo += (int)(set->s & 15) * (second ? even[1][0] : even[0][0]) +
           (int)(set->s >> 4 & 15) * (second ? odd[1][1] : odd[0][1]);
    *hi += (int)(set->s >> 8 & 15) * (second ? even[1][2] : even[0][2]) +
           (int)(set->s >> 12) * (second ? odd[1][3] : odd[0][3]);
}

/* Chunks of a set of INT8, of H * 1,024 inputs. top, low: rows g and g + 8 of the tile; n: inputs that there are. */
template <int H>
__device__ static __forceinline__ void sum_q8(uint32_t top, uint32_t low, int n, uint2 x, int sum[2][4])
{
    int lane = threadIdx.x & 31, g = lane >> 2, warp = (int)threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 4 * H; i++) {
        int k = (warp + i / 2 * 8) * 64 + i % 2 * 32 + 8 * (lane & 3);
        uint2 t = make_uint2(0, 0), l = t;
        if (k < n) {
            t = solo_load8(top + (uint32_t)k);
            l = solo_load8(low + (uint32_t)k);
        }
        const uint32_t a[4] = {t.x, l.x, t.y, l.y};
        bool mine = g == i;
        mma_s8(sum[i % 2], a, mine ? x.x : 0, mine ? x.y : 0, sum[i % 2]);
    }
}

/* The sums of a warp's lanes: of row g in lo, of g + 8 in hi. An even lane gets that of row g, an odd one of g + 8. */
__device__ static __forceinline__ int row_sum(int lo, int hi)
{
    int odd = threadIdx.x & 1, mine = odd ? hi : lo, other = odd ? lo : hi;
    mine += __shfl_xor_sync(0xffffffffu, other, 1);
    return mine + __shfl_xor_sync(0xffffffffu, mine, 2);
}
__device__ static __forceinline__ void store_sums(uint32_t to, int lo, int hi)
{
    int lane = threadIdx.x & 31, odd = lane & 1, mine = row_sum(lo, hi);
    if ((lane & 2) == 0)
        solo_store1(to + (uint32_t)((lane >> 2) + 8 * odd) * 4, mine);
}

__device__ static __forceinline__ uint32_t sums_of(uint32_t p, int tile, int warp)
{
    return p + SOLO_AT(sums) + (uint32_t)((tile * SOLO_WARPS + warp) * 64);
}

__device__ static __forceinline__ uint32_t slot_of(uint32_t common, const struct solo_at *at)
{
    return common - (uint32_t)((SOLO_SLOTS - at->slot) * SOLO_SLOT);
}

/* This warp has read the slot. */
__device__ static __forceinline__ void leave(uint32_t p, struct solo_at *at)
{
    __syncwarp();
    if ((threadIdx.x & 31) == 0)
        solo_arrive(p + SOLO_AT(empty) + (uint32_t)at->slot * 8);
    solo_next(at);
}

/* The row of this product, once it is there. */
template <int SETS>
__device__ static __forceinline__ void await_row(uint32_t at, const struct solo_product *m, struct solo_bytes<SETS> *x)
{
    solo_wait(at + SOLO_AT(ready), (uint32_t)m->turn & 1);
#pragma unroll
    for (int s = 0; s < SETS; s++)
        x->v[s] = input_of(s) < m->k_pad ? solo_load8(at + SOLO_AT(row) + (uint32_t)input_of(s)) : make_uint2(0, 0);
}

/* Set s of a tile of INT4, if there is one: from the ring to registers. */
__device__ static __forceinline__ void take_set(uint32_t p, const struct solo_product *m, struct solo_at *at, int s,
                                                struct set_q4 *set)
{
    if (s > 0 && 2048 * s >= m->k_pad)
        return;
    solo_wait(p + SOLO_AT(full) + (uint32_t)at->slot * 8, at->turn);
    load_q4(set, slot_of(p, at), min(m->k_pad / 64 - 32 * s, 32));
    leave(p, at);
}

/* The sums of N tiles of INT4, of which AHEAD lie in registers ahead. The first round waits for the row. Without branches between tiles
 * their chains of instructions run side by side. */
template <int SETS, int N, int AHEAD>
__device__ static __forceinline__ void tiles_q4(uint32_t p, const struct solo_product *m, struct solo_at *at, int round,
                                                struct solo_bytes<SETS> *x)
{
    struct set_q4 set[AHEAD][SETS] = {}; /* or what is not loaded would be kept through the whole kernel */
    int lo[N] = {}, hi[N] = {};
#pragma unroll
    for (int t = 0; t < N && t < AHEAD; t++)
#pragma unroll
        for (int s = 0; s < SETS; s++)
            take_set(p, m, at, s, &set[t][s]);
    if (round == 0)
        await_row<SETS>(p, m, x);
#pragma unroll
    for (int t = 0; t < N; t++) {
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            if (s == 0 || 2048 * s < m->k_pad)
                sum_q4(&set[t % AHEAD][s], x->v[s], &lo[t], &hi[t]);
            if (t + AHEAD < N)
                take_set(p, m, at, s, &set[t % AHEAD][s]);
        }
    }
#pragma unroll
    for (int t = 0; t < N; t++)
        store_sums(sums_of(p, t, (int)threadIdx.x / 32), lo[t] >> 4, hi[t] >> 4); /* the shifts are exact */
}

/* The code for n tiles. */
#define SOLO_AHEAD 3
template <int SETS, int N>
__device__ static __forceinline__ void round_q4(uint32_t p, const struct solo_product *m, struct solo_at *at, int round,
                                                int n, struct solo_bytes<SETS> *x)
{
    if constexpr (N > 1)
        if (n < N)
            return round_q4<SETS, N - 1>(p, m, at, round, n, x);
    tiles_q4<SETS, N, SETS == 1 ? SOLO_AHEAD : 1>(p, m, at, round, x);
}

template <int SETS>
__device__ static __forceinline__ void round_q8(uint32_t p, const struct solo_product *m, struct solo_at *at, int round,
                                                int n, struct solo_bytes<SETS> *x)
{
    if (round == 0)
        await_row<SETS>(p, m, x);
#pragma unroll 1
    for (int t = 0; t < n; t++) {
        int sum[2][4] = {};
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            int n = m->k_pad - 2 * INT8_STEP * s;
            uint32_t row = (threadIdx.x & 31) >> 2;
            if (s > 0 && n <= 0)
                break;
            solo_wait(p + SOLO_AT(full) + (uint32_t)at->slot * 8, at->turn);
            uint32_t top = slot_of(p, at);
            if (n <= INT8_STEP) { /* all rows */
                sum_q8<1>(top + row * INT8_ROW, top + (row + 8) * INT8_ROW, n, x->v[s], sum);
                leave(p, at);
                continue;
            }
            struct solo_at second = *at;
            solo_next(&second);
            solo_wait(p + SOLO_AT(full) + (uint32_t)second.slot * 8, second.turn);
            sum_q8<2>(top + row * INT8_HALF, slot_of(p, &second) + row * INT8_HALF, n, x->v[s], sum);
            leave(p, at);
            leave(p, at);
        }
        store_sums(sums_of(p, t, (int)threadIdx.x / 32), sum[0][0] + sum[0][1] + sum[1][0] + sum[1][1],
                   sum[0][2] + sum[0][3] + sum[1][2] + sum[1][3]);
    }
}

/* What becomes of the value of this lane's row of a tile, by one warp; lanes 16 and on have none. best: of this lane. */
__device__ static __forceinline__ void end_rows(const struct solo_product *m, int tile, float y,
                                                unsigned long long *best)
{
    int lane = threadIdx.x & 31;
    bool gated = m->end == END_SILU_MUL;
    int o = gated ? tile * 8 + lane : tile * 16 + lane;
    if (gated)
        y = tlc_silu_mul(y, __shfl_down_sync(0xffffffffu, y, 8));
    else if (m->end == END_RELU2)
        y = tlc_relu2(y);
    if (lane >= (gated ? 8 : 16) || o >= m->n_out)
        return;
    if (m->end == END_LOGITS) {
        ((float *)m->out)[o] = y;
        *best = max(*best, tlc_best_key(y, o));
    } else {
        solo_publish((uint64_t *)m->out + (m->end == END_PLAIN ? o : solo_place(o)), y, m->epoch);
    }
}

/* A tile whose sums are there, by one warp. scale: of its rows, by lane % 16. */
__device__ static __forceinline__ void end_tile(const struct solo_product *m, uint32_t sums, int tile, float scale,
                                                float row_scale, unsigned long long *best)
{
    int lane = threadIdx.x & 31, sum = 0;
#pragma unroll
    for (int j = 0; j < SOLO_WARPS / 2; j++)
        sum += solo_load1(sums + (uint32_t)((lane / 16 * (SOLO_WARPS / 2) + j) * 64 + lane % 16 * 4));
    sum += __shfl_xor_sync(0xffffffffu, sum, 16);
    end_rows(m, tile, tlc_scaled(sum, row_scale, scale), best);
}

/* A product with the row, which comes while this is at it. p, as everywhere here: the shared address of solo_common; *at: the ring's place of its first tile, and then of what follows. */
template <int SETS, int TILES>
__device__ static __forceinline__ void solo_multiply(uint32_t p, struct solo_at *at, const struct solo_product *m,
                                                     unsigned long long *best)
{
    int warp = (int)threadIdx.x / 32, each = m->q4 ? TILES : SOLO_ROUND;
    struct solo_bytes<SETS> x = {
    };
    if (m->tiles == 0) /* nobody leaves before what is sent to it is there */
        await_row<SETS>(p, m, &x);
#pragma unroll 1
    for (int first = 0, round = 0; first < m->tiles; first += each, round++) {
        int n = min(m->tiles - first, each), tile = m->first + (first + warp) * (int)gridDim.x;
        if (round > 0) /* who ends a tile of the one before has read its sums */
            solo_barrier();
        float scale = warp < n ? solo_ask(m->row_scale + tile * 16 + (threadIdx.x & 15)) : 0.0f;
        if (m->q4)
            round_q4<SETS, TILES>(p, m, at, round, n, &x);
        else
            round_q8<SETS>(p, m, at, round, n, &x);
        float row_scale = __int_as_float(solo_load1(p + SOLO_AT(scale)));
        solo_barrier();
        if (warp < n)
            end_tile(m, sums_of(p, warp, 0), tile, scale, row_scale, best);
    }
}

/* Behind each product but the head's, the sum warps meet each other and the row warps. These may look for values from then on: what
 * this block has published, others may have too. And no sum warp, with or without a tile, is further ahead of another than one
 * product: barriers tell even turns from odd ones, so who waits for a turn must know that the one before it is over; of the row,
 * because all have used it, and of the ring's slots, because all are behind them. */
__device__ static __forceinline__ void solo_meet()
{
    asm volatile("bar.sync 6, %0;" ::"n"(SOLO_SUMS + 32 * SOLO_ROW_WARPS) : "memory");
}

#endif
