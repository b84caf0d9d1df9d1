/* cuda/solo_product.cuh - the products of the one row: what a slot of the ring holds of a tile, its sums, and what becomes of
 * them. */
#ifndef TLC_SOLO_PRODUCT_CUH
#define TLC_SOLO_PRODUCT_CUH

#include "solo.cuh"

#define FEED_DEPTH                                                                                                     \
    2 /* copies of a block under way; more would only stand in the way of the values that blocks exchange */
#define INT4_SLOT (32 * 528) /* bytes of 32 chunks of a tile */
#define INT8_STEP 1024       /* inputs of a tile in a slot */
#define INT8_ROW  (INT8_STEP + 32)

__device__ static __forceinline__ int slots_of(bool q4, int k_pad)
{
    return q4 ? (k_pad + 2047) / 2048 : (k_pad + INT8_STEP - 1) / INT8_STEP;
}

/* Blocks with attention come first, and last at second tiles. */
__device__ static __forceinline__ int first_tile() { return (int)(gridDim.x - 1 - blockIdx.x); }
__device__ static __forceinline__ int tiles_of(const struct solo_mat *m) { return m->each + (first_tile() < m->more); }

/* ---- products: by the sum warps, in groups ----
 *
 * A group of G warps has a tile, warp w of it the chunks w, w + G, ...; its first warp puts the sums together and ends the tile. As
 * many tiles as that makes groups are at work side by side: what costs is how long the chain of instructions of a warp is. */

enum solo_end { END_PLAIN, END_PUBLISH, END_SILU_MUL, END_RELU2, END_LOGITS }; /* PLAIN: published in order */

struct solo_product {
    const float *row_scale;
    void *out;                     /* as `end` says */
    uint32_t epoch;                /* of what is published */
    int k_pad, n_out, tiles, turn; /* tiles: of this block; turn: of the row's barrier */
    enum solo_end end;
    bool q4;
};

/* Shared addresses. */
struct solo_places {
    uint32_t ring, full, empty, ready, row, scale, sums;
};

/* How many warps a tile gets. No more slots may be at work than the ring has, less those that are under way: who has read one slot
 * knows that all but so many before it have come, and must not wait for a slot's turn before the one before is there. */
__device__ static __forceinline__ int solo_group_of(int tiles, int slots)
{
    int group = SOLO_WARPS;
    while (group > 1 && SOLO_WARPS / group < tiles && 2 * SOLO_WARPS / group * slots <= SOLO_SLOTS - FEED_DEPTH)
        group /= 2;
    return group;
}

/* Four chunks of a warp are one set: number e of a slot has chunks w + G (4 e + u), u < 4. A product of the matrix unit has eight
 * columns, and the row is but one: so group j of the set's eight is column j, with zeros in the others, and eight products leave the
 * sums of eight groups side by side, where each lane scales four of them: of rows g and g + 8, groups 2 t and 2 t + 1. */
struct set_q4 {
    uint4 w[4];
    uint32_t s;
    uint2 x; /* of this lane's column, g */
};

/* Where a lane finds its parts of set 0 in a slot and in the row. */
struct lane_q4 {
    uint32_t w, s, x;
};
template <int G> __device__ static __forceinline__ struct lane_q4 lane_of(int w)
{
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    struct lane_q4 l;
    l.w = (uint32_t)(w * 512 + lane * 16);
    l.s = (uint32_t)(G * t / 16 * 8448 + (G * t % 16 + w) * 16 + g * 2);
    l.x = (uint32_t)((w + g / 2 * G) * 64 + g % 2 * 32 + 8 * t);
    return l;
}

/* n: chunks of the slot, in units of up to 16 as pack.cu says. */
template <int G>
__device__ static __forceinline__ void load_set(struct set_q4 *set, const struct lane_q4 *l, uint32_t slot, int e,
                                                int n, int w)
{
    int t = threadIdx.x & 3, first = G * 4 * e;
    uint32_t at = slot + (uint32_t)(first / 16 * 8448 + first % 16 * 16);
    int unit = (first + G * t) / 16, in_unit = min(n - unit * 16, 16);
    set->s = 0;
    if (w + first + G * t < n)
        set->s = solo_load2(at + l->s + (uint32_t)in_unit * 512);
#pragma unroll
    for (int u = 0; u < 4; u++) {
        int c = first + G * u;
        set->w[u] = make_uint4(0, 0, 0, 0);
        if (w + c < n)
            set->w[u] = solo_load16(slot + l->w + (uint32_t)(c / 16 * 8448 + c % 16 * 512));
    }
}

/* What is read behind the row's end meets weights that are 0. */
template <int G>
__device__ static __forceinline__ void load_row(struct set_q4 *set, const struct lane_q4 *l, uint32_t row, int e)
{
    set->x = solo_load8(row + l->x + (uint32_t)(G * e * 256));
}

/* 16 times the sums, added to lo and hi. */
__device__ static __forceinline__ void sum_set(const struct set_q4 *set, int *lo, int *hi)
{
    int g = (threadIdx.x & 31) >> 2;
    int even[4] = {}, odd[4] = {}; /* groups; the columns of the others are 0 */
#pragma unroll
    for (int u = 0; u < 4; u++) {
        uint4 w = set->w[u];
        const uint32_t a0[4] = {w.x << 4 & HIGH, w.y << 4 & HIGH, w.x & HIGH, w.y & HIGH};
        const uint32_t a1[4] = {w.z << 4 & HIGH, w.w << 4 & HIGH, w.z & HIGH, w.w & HIGH};
        bool e = g == 2 * u, d = g == 2 * u + 1;
        mma_s8(even, a0, e ? set->x.x : 0, e ? set->x.y : 0, even);
        mma_s8(odd, a1, d ? set->x.x : 0, d ? set->x.y : 0, odd);
    }
    *lo += (int)(set->s & 15) * even[0] + (int)(set->s >> 4 & 15) * odd[1];
    *hi += (int)(set->s >> 8 & 15) * even[2] + (int)(set->s >> 12) * odd[3];
}

/* A tile of INT4: its slots start at `at`. The first set's weights are asked for before the row is there. */
template <int G>
__device__ static __forceinline__ void tile_q4(const struct solo_places *p, struct solo_at at, int k_pad, int w,
                                               int turn, int *lo, int *hi)
{
    struct lane_q4 l = lane_of<G>(w);
    int chunks = k_pad / 64;
    uint32_t row = p->row;
#pragma unroll 1
    for (; chunks > 0; chunks -= 32, row += 2048, solo_next(&at)) {
        uint32_t slot = p->ring + (uint32_t)at.slot * SOLO_SLOT;
        int n = min(chunks, 32);
        solo_wait(p->full + (uint32_t)at.slot * 8, at.turn);
        struct set_q4 set[2];
        load_set<G>(&set[0], &l, slot, 0, n, w);
        if (turn >= 0) {
            solo_wait(p->ready, (uint32_t)turn & 1);
            turn = -1;
        }
        load_row<G>(&set[0], &l, row, 0);
#pragma unroll(2) /* more keep so many loads under way that registers spill */
        for (int e = 0; e < 8 / G; e++) {
            if (e + 1 < 8 / G) {
                load_set<G>(&set[(e + 1) % 2], &l, slot, e + 1, n, w);
                load_row<G>(&set[(e + 1) % 2], &l, row, e + 1);
            }
            sum_set(&set[e % 2], lo, hi);
        }
    }
    *lo += __shfl_xor_sync(0xffffffffu, *lo, 1);
    *hi += __shfl_xor_sync(0xffffffffu, *hi, 1);
    *lo = (*lo + __shfl_xor_sync(0xffffffffu, *lo, 2)) >> 4; /* the shift is exact */
    *hi = (*hi + __shfl_xor_sync(0xffffffffu, *hi, 2)) >> 4;
}

/* A tile of INT8, in groups of 32 inputs. */
__device__ static __forceinline__ void tile_q8(const struct solo_places *p, struct solo_at at, int k_pad, int group,
                                               int w, int turn, int *lo, int *hi)
{
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int sum[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int k0 = 0; k0 < k_pad; k0 += INT8_STEP, solo_next(&at)) {
        uint32_t slot = p->ring + (uint32_t)at.slot * SOLO_SLOT, row = p->row + (uint32_t)k0;
        solo_wait(p->full + (uint32_t)at.slot * 8, at.turn);
        if (k0 == 0 && turn >= 0)
            solo_wait(p->ready, (uint32_t)turn & 1);
#pragma unroll 4
        for (int k = w * 32 + 8 * t; k < min(INT8_STEP, k_pad - k0); k += group * 32) {
            uint2 top = solo_load8(slot + (uint32_t)(g * INT8_ROW + k)),
                  low = solo_load8(slot + (uint32_t)((g + 8) * INT8_ROW + k)), b = solo_load8(row + (uint32_t)k);
            const uint32_t a[4] = {top.x, low.x, top.y, low.y};
            mma_s8(sum, a, b.x, b.y, sum);
        }
    }
    *lo = sum[0];
    *hi = sum[2];
}

/* Meets the warps of a group. */
__device__ static __forceinline__ void meet(int group, int number)
{
    asm volatile("bar.sync %0, %1;" ::"r"(8 + number), "r"(32 * group) : "memory");
}

/* A product with the row, which comes while this is at it; *at: the ring's place of its first tile, and then of what follows. best: of
 * this lane. */
__device__ static __forceinline__ void solo_multiply(const struct solo_places *p, struct solo_at *at,
                                                     const struct solo_product *m, unsigned long long *best)
{
    int lane = threadIdx.x & 31, r = lane & 15, slots = slots_of(m->q4, m->k_pad),
        group = solo_group_of(m->tiles, slots);
    int number = (int)threadIdx.x / 32 / group, w = (int)threadIdx.x / 32 % group, groups = SOLO_WARPS / group;
    bool gated = m->end == END_SILU_MUL;
    uint32_t sums = p->sums + (uint32_t)(number * group * 64);
    struct solo_at tile_at = *at;
    solo_next(&tile_at, number * slots);
#pragma unroll 1
    for (int i = number, round = 0; i < m->tiles; i += groups, round ^= 1, solo_next(&tile_at, groups * slots)) {
        int tile = first_tile() + i * (int)gridDim.x, lo = 0, hi = 0, turn = i == number ? m->turn : -1;
        float scale = w == 0 ? __ldg(m->row_scale + tile * 16 + r) : 0.0f;
        if (!m->q4)
            tile_q8(p, tile_at, m->k_pad, group, w, turn, &lo, &hi);
        else if (group == 1)
            tile_q4<1>(p, tile_at, m->k_pad, w, turn, &lo, &hi);
        else if (group == 2)
            tile_q4<2>(p, tile_at, m->k_pad, w, turn, &lo, &hi);
        else if (group == 4)
            tile_q4<4>(p, tile_at, m->k_pad, w, turn, &lo, &hi);
        else
            tile_q4<8>(p, tile_at, m->k_pad, w, turn, &lo, &hi);
        uint32_t to = sums + (uint32_t)(round * SOLO_WARPS * 64);
        if ((lane & 3) == 0) {
            solo_store1(to + (uint32_t)(w * 64 + (lane >> 2) * 4), lo);
            solo_store1(to + (uint32_t)(w * 64 + (lane >> 2) * 4 + 32), hi);
        }
        if (group > 1)
            meet(group, number);
        else
            __syncwarp();
        if (w > 0)
            continue;
        int sum = 0;
        for (int j = 0; j < group; j++)
            sum += solo_load1(to + (uint32_t)(j * 64 + r * 4));
        float row_scale = __int_as_float(solo_load1(p->scale));
        float y = tlc_scaled(sum, row_scale, scale);
        int o = gated ? tile * 8 + r : tile * 16 + r;
        if (gated)
            y = tlc_silu_mul(y, __shfl_down_sync(0xffffffffu, y, 8));
        else if (m->end == END_RELU2)
            y = tlc_relu2(y);
        if (lane < (gated ? 8 : 16) && o < m->n_out) {
            if (m->end == END_LOGITS) {
                ((float *)m->out)[o] = y;
                *best = max(*best, tlc_best_key(y, o));
            } else {
                solo_publish((uint64_t *)m->out + (m->end == END_PLAIN ? o : solo_place(o)), y, m->epoch);
            }
        }
        struct solo_at free = tile_at; /* all warps of the group have read them */
        if (lane == 0)
            for (int j = 0; j < slots; j++, solo_next(&free))
                solo_arrive(p->empty + (uint32_t)free.slot * 8);
    }
    solo_next(at, m->tiles * slots);
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
