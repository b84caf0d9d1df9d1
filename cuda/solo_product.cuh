/* cuda/solo_product.cuh - the products of the one row: what a slot of the ring holds of a tile, its sums, and what becomes of
 * them. */
#ifndef TLC_SOLO_PRODUCT_CUH
#define TLC_SOLO_PRODUCT_CUH

#include "solo.cuh"

#define INT4_SLOT (32 * 528) /* bytes of 32 chunks of a tile */
/* A slot has 1,024 inputs of a tile of INT8, or, where there are more, 2,048 of half of its rows: a short copy takes the copy engine as
 * long as a longer one. */
#define INT8_STEP 1024
#define INT8_ROW  (INT8_STEP + 32)
#define INT8_HALF (2 * INT8_STEP + 32)

__device__ static __forceinline__ int slots_of(bool q4, int k_pad)
{
    return q4 ? (k_pad + 2047) / 2048 : (k_pad + INT8_STEP - 1) / INT8_STEP;
}

/* ---- products: by the sum warps ----
 *
 * All warps work on each tile: warp w has the chunks w, w + 8, ..., four of 2,048 inputs, which is a set. What nobody has to wait for is
 * done in front of the row: before it comes, weights of the first tiles of a round lie in registers, and the others' in the ring. Then
 * the row's bytes are the same for all tiles of a lane. Sums of a round are put together in shared memory, and each warp ends one tile. */

enum solo_end { END_PLAIN, END_PUBLISH, END_SILU_MUL, END_RELU2, END_LOGITS }; /* PLAIN: published in order */

struct solo_product {
    const float *row_scale;
    void *out;                            /* as `end` says */
    uint32_t epoch;                       /* of what is published */
    int k_pad, n_out, tiles, first, turn; /* tiles: of this block, from `first` on; turn: of the row */
    enum solo_end end;
    int step;          /* elements of out from a row to the next one */
    bool meets;        /* row warps wait for each row */
    const int *row_at; /* of solo_args */
};

/* INT4. A byte of a tile is 16 h + u, of two weights h and l = u - 8. With v = 15 - u, one operation for four of them, the products of a
 * group of 32 inputs are
 *     p = sum v x_l,   q = sum v x_h + sum (16 h + u) x_h = 16 sum h x_h + 15 sum x_h,
 *     16 (sum l x_l + sum h x_h) = q - 16 p + 112 sum x_l - 15 sum x_h.
 * The matrix unit gets a chunk's bytes twice, as they lie there and as v, each time with both groups one behind the other. Of its eight
 * columns a chunk has four: x_l and x_h of group 0, x_l and x_h of group 1, with zeros where a column has nothing of the group, or is of
 * the other chunk. So the products of two chunks leave p in a column and, in two parts, q in the next one (as for what x_l makes of the
 * bytes as they lie there, nobody wants it), of one group each in lane 4 g + t, of rows g and g + 8; of the four chunks of a set, of
 * group t % 2 in chunks t / 2 and 2 + t / 2. */
struct set_q4 {
    uint4 w[4];
    uint32_t scales[2][2]; /* of these two chunks, rows g and g + 8: of both groups */
};

/* The row's part in that, the same for all tiles. */
struct row_q4 {
    uint32_t x[4][2]; /* [chunk][group] */
    int rest[2];      /* 112 sum x_l - 15 sum x_h of the lane's groups */
};

/* What a lane knows before the row is there: which of them it has, as masks, and where they come from. */
struct lane_q4 {
    uint32_t has[4], odd; /* [chunk % 2 * 2 + group]; odd: x_h, not x_l */
};
__device__ static __forceinline__ struct lane_q4 lane_of_q4()
{
    struct lane_q4 l;
    int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        l.has[j] = g / 2 == j ? ~0u : 0;
        solo_opaque(&l.has[j]); /* or it would be asked again for each of them */
    }
    l.odd = g & 1 ? ~0u : 0;
    solo_opaque(&l.odd);
    return l;
}
/* Of a set whose chunks begin at k, k + step, ... The row ends at `end`; zero: the address of a zero. */
struct from_q4 {
    uint32_t at[2];
};
__device__ static __forceinline__ struct from_q4 from_of_q4(uint32_t row, int k, int step, int end, uint32_t zero)
{
    struct from_q4 f;
    int lane = threadIdx.x & 31, g = lane >> 2;
    k += g / 4 * step + g / 2 % 2 * 32 + 8 * (lane & 3) + 4 * (g & 1);
#pragma unroll
    for (int i = 0; i < 2; i++, k += 2 * step) {
        f.at[i] = k < end ? row + (uint32_t)k : zero;
        solo_opaque(&f.at[i]);
    }
    return f;
}

/* n: chunks of the slot, in units of up to 16 as pack.cu says. For chunks that there are not any bytes will do: the row is 0 there. */
__device__ static __forceinline__ void load_q4(struct set_q4 *set, uint32_t slot, int n)
{
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = (int)threadIdx.x / 32;
    uint32_t at = slot + (uint32_t)(warp * 512 + lane * 16),
             scales = slot + (uint32_t)((t / 2 * 8 + warp) * 16 + g * 2);
#pragma unroll
    for (int i = 0; i < 4; i++)
        set->scales[i / 2][i % 2] =
            solo_load_byte(scales + (uint32_t)(min(n - i / 2 * 16, 16) * 512 + i / 2 * 8448 + i % 2));
#pragma unroll
    for (int u = 0; u < 4; u++)
        set->w[u] = solo_load16(at + (uint32_t)(u / 2 * 8448 + u % 2 * 4096));
}

template <int SETS>
__device__ static __forceinline__ void row_of_q4(struct row_q4 *x, const struct from_q4 *from, const struct lane_q4 *l)
{
    const uint32_t a[4] = {0x70707070, 0x70707070, 0x81818181, 0x81818181}; /* 112, -15 - 112 */
    const int zero[4] = {};
    uint32_t mine[SETS][2]; /* x_l or, in odd columns, x_h */
#pragma unroll
    for (int s = 0; s < SETS; s++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            mine[s][i] = (uint32_t)solo_load1(from[s].at[i]);
#pragma unroll
    for (int s = 0; s < SETS; s++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int d[4];
            mma_s8(d, a, mine[s][i], mine[s][i] & l->odd, zero);
            x[s].rest[i] = d[0] + d[1];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                x[s].x[2 * i + j / 2][j & 1] = mine[s][i] & l->has[j];
                solo_opaque(&x[s].x[2 * i + j / 2][j & 1]); /* or it would be made again for each tile */
            }
        }
}

/* The lane's part of the sums, 16 times or, in odd lanes, 256 times (scales lie there in high nibbles), is added to lo and hi. */
__device__ static __forceinline__ int shift_q4() { return threadIdx.x & 1 ? 8 : 4; }
__device__ static __forceinline__ void sum_q4(const struct set_q4 *set, const struct row_q4 *x, int *lo, int *hi)
{
    uint32_t mine = threadIdx.x & 1 ? 0xf0 : 0x0f;
    int d[2][4] = {}, e[2][4] = {};
#pragma unroll
    for (int u = 0; u < 4; u++) {
        uint4 w = set->w[u];
        const uint32_t raw[4] = {w.x, w.y, w.z, w.w};
        const uint32_t v[4] = {~w.x & 0x0f0f0f0f, ~w.y & 0x0f0f0f0f, ~w.z & 0x0f0f0f0f, ~w.w & 0x0f0f0f0f};
        mma_s8(d[u / 2], raw, x->x[u][0], x->x[u][1], d[u / 2]);
        mma_s8(e[u / 2], v, x->x[u][0], x->x[u][1], e[u / 2]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        *lo += (int)(set->scales[i][0] & mine) * (d[i][1] + e[i][1] + x->rest[i] - 16 * e[i][0]);
        *hi += (int)(set->scales[i][1] & mine) * (d[i][3] + e[i][3] + x->rest[i] - 16 * e[i][2]);
    }
}

/* INT8. The row as a lane multiplies it: of set s, eight values from number input_of(s) on. Column g of a product has group g of the
 * eight of four chunks, and zeros otherwise. */
template <int SETS, int R> struct solo_bytes {
    uint2 v[SETS][R];
};
__device__ static __forceinline__ int input_of(int set)
{
    int lane = threadIdx.x & 31, g = lane >> 2, warp = (int)threadIdx.x / 32;
    return set * 2048 + (warp + g / 2 * SOLO_WARPS) * 64 + g % 2 * 32 + 8 * (lane & 3);
}

/* Chunks of a set of INT8, of H * 1,024 inputs, for R rows. top, low: rows g and g + 8 of the tile; n: inputs that there are. */
template <int H, int R>
__device__ static __forceinline__ void sum_q8(uint32_t top, uint32_t low, int n, const uint2 x[R], int sum[R][2][4])
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
#pragma unroll
        for (int r = 0; r < R; r++)
            mma_s8(sum[r][i % 2], a, mine ? x[r].x : 0, mine ? x[r].y : 0, sum[r][i % 2]);
    }
}

/* The sums of a warp's lanes, of row g in lo, of g + 8 in hi, 2^shift times; lanes t and t + 2 have the same shift. Lanes 0 and 1 of
 * four get that of row g, the others of g + 8. Of 6,144 inputs a lane has at most 192: two lanes' sums times 256 are below 2^31. */
__device__ static __forceinline__ int row_sum(int lo, int hi, int shift)
{
    int second = threadIdx.x & 2, mine = second ? hi : lo, other = second ? lo : hi;
    mine = (mine + __shfl_xor_sync(0xffffffffu, other, 2)) >> shift; /* exact */
    return mine + __shfl_xor_sync(0xffffffffu, mine, 1);
}
__device__ static __forceinline__ void store_sums(uint32_t to, int lo, int hi, int shift)
{
    int lane = threadIdx.x & 31, mine = row_sum(lo, hi, shift);
    if ((lane & 1) == 0)
        solo_store1(to + (uint32_t)((lane >> 2) + 4 * (lane & 2)) * 4, mine);
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
    solo_step(at);
}

/* The rows of this product, once they are there. */
template <int SETS, int R>
__device__ static __forceinline__ void await_rows(uint32_t p, const struct solo_product *m,
                                                  struct solo_bytes<SETS, R> *x)
{
#pragma unroll
    for (int r = 0; r < R; r++) {
        solo_wait(p + SOLO_AT(ready) + (uint32_t)r * 8, (uint32_t)m->turn & 1);
        uint32_t row = p + (R == 1 ? SOLO_AT(row) : (uint32_t)m->row_at[r]);
#pragma unroll
        for (int s = 0; s < SETS; s++)
            x->v[s][r] = input_of(s) < m->k_pad ? solo_load8(row + (uint32_t)input_of(s)) : make_uint2(0, 0);
    }
}

/* The sums of N tiles with a row, the first AHEAD in registers, the others in the ring from `next` on. chunks: of the last set. */
template <int SETS, int N, int AHEAD>
__device__ static __forceinline__ void sums_q4(uint32_t p, struct set_q4 set[AHEAD][SETS], const struct row_q4 *x,
                                               struct solo_at *next, int chunks, int *lo, int *hi)
{
#pragma unroll
    for (int t = 0; t < N; t++)
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            sum_q4(&set[t % AHEAD][s], &x[s], &lo[t], &hi[t]);
            if (t + AHEAD < N) {
                load_q4(&set[t % AHEAD][s], slot_of(p, next), s + 1 < SETS ? 32 : chunks);
                solo_step(next);
            }
        }
}

/* The sums of N tiles of INT4 of SETS sets, of which AHEAD lie in registers before the row is there; that the others are in the ring is
 * waited for before, too. Without branches behind that, chains of instructions of all tiles run side by side. */
template <int SETS, int N, int AHEAD>
__device__ static __forceinline__ void tiles_q4(uint32_t p, const struct solo_product *m, struct solo_at *at)
{
    struct set_q4 set[AHEAD][SETS];
    struct row_q4 x[SETS];
    struct from_q4 from[SETS];
    struct lane_q4 lane = lane_of_q4();
    struct solo_at next = *at;
    int lo[N] = {}, hi[N] = {}, chunks = m->k_pad / 64 - 32 * (SETS - 1); /* of the last set */
    static_assert((N > AHEAD ? N - AHEAD : 0) * SETS < SOLO_SLOTS, "what the ring holds");
#pragma unroll
    for (int i = 0; i < N * SETS; i++) {
        solo_wait(p + SOLO_AT(full) + (uint32_t)next.slot * 8, next.turn);
        solo_step(&next);
        if (i < AHEAD * SETS) {
            load_q4(&set[i / SETS][i % SETS], slot_of(p, at), (i + 1) % SETS ? 32 : chunks);
            leave(p, at);
        }
    }
#pragma unroll
    for (int s = 0; s < SETS; s++)
        from[s] = from_of_q4(p + SOLO_AT(row), s * 2048 + (int)threadIdx.x / 32 * 64, SOLO_WARPS * 64, m->k_pad,
                             p + SOLO_AT(zero));
    next = *at;
    solo_wait(p + SOLO_AT(ready), (uint32_t)m->turn & 1);
    row_of_q4<SETS>(x, from, &lane);
    sums_q4<SETS, N, AHEAD>(p, set, x, &next, chunks, lo, hi);
#pragma unroll
    for (int i = AHEAD * SETS; i < N * SETS; i++)
        leave(p, at);
#pragma unroll
    for (int t = 0; t < N; t++)
        store_sums(sums_of(p, t, (int)threadIdx.x / 32), lo[t], hi[t], shift_q4());
}

/* The code for n tiles. */
template <int SETS, int N, int AHEAD>
__device__ static __forceinline__ void round_q4(uint32_t p, const struct solo_product *m, struct solo_at *at, int n)
{
    if constexpr (N > 1)
        if (n < N)
            return round_q4<SETS, N - 1, AHEAD>(p, m, at, n);
    tiles_q4<SETS, N, AHEAD>(p, m, at);
}

/* Sums of row r of tile t are number t * R + r. */
template <int SETS, int R>
__device__ static __forceinline__ void round_q8(uint32_t p, const struct solo_product *m, struct solo_at *at, int round,
                                                int n, struct solo_bytes<SETS, R> *x)
{
    if (round == 0)
        await_rows<SETS, R>(p, m, x);
#pragma unroll 1
    for (int t = 0; t < n; t++) {
        int sum[R][2][4] = {};
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            int left = m->k_pad - 2 * INT8_STEP * s;
            uint32_t row = (threadIdx.x & 31) >> 2;
            if (s > 0 && left <= 0)
                break;
            solo_wait(p + SOLO_AT(full) + (uint32_t)at->slot * 8, at->turn);
            uint32_t top = slot_of(p, at);
            if (left <= INT8_STEP) { /* all rows */
                sum_q8<1, R>(top + row * INT8_ROW, top + (row + 8) * INT8_ROW, left, x->v[s], sum);
                leave(p, at);
                continue;
            }
            struct solo_at second = *at;
            solo_next(&second);
            solo_wait(p + SOLO_AT(full) + (uint32_t)second.slot * 8, second.turn);
            sum_q8<2, R>(top + row * INT8_HALF, slot_of(p, &second) + row * INT8_HALF, left, x->v[s], sum);
            leave(p, at);
            leave(p, at);
        }
#pragma unroll
        for (int r = 0; r < R; r++)
            store_sums(sums_of(p, t * R + r, (int)threadIdx.x / 32),
                       sum[r][0][0] + sum[r][0][1] + sum[r][1][0] + sum[r][1][1],
                       sum[r][0][2] + sum[r][0][3] + sum[r][1][2] + sum[r][1][3], 0);
    }
}

/* Where the value of this lane's row of a tile goes, of one warp's; NULL: there is none. Found out before there is a value. */
__device__ static __forceinline__ void *end_of(const struct solo_product *m, int tile)
{
    int lane = threadIdx.x & 31, rows = m->end == END_SILU_MUL ? 8 : 16, o = tile * rows + lane;
    if (lane >= rows || o >= m->n_out)
        return NULL;
    return m->end == END_LOGITS ? (void *)((float *)m->out + o)
                                : (uint64_t *)m->out + (m->end == END_PLAIN ? o : solo_place(o));
}

/* What becomes of it, by that warp. best: of this lane. */
__device__ static __forceinline__ void end_row(const struct solo_product *m, void *to, float y,
                                               unsigned long long *best)
{
    if (m->end > END_PUBLISH) {
        if (m->end == END_LOGITS) {
            if (to) {
                *(float *)to = y;
                *best = max(*best, tlc_best_key(y, (int)((float *)to - (float *)m->out)));
            }
            return;
        }
        y = m->end == END_SILU_MUL ? tlc_silu_mul(y, __shfl_down_sync(0xffffffffu, y, 8)) : tlc_relu2(y);
    }
    if (to)
        solo_publish((uint64_t *)to, y, m->epoch);
}

/* A tile whose sums are there, by one warp. scale: of its rows, by lane % 16. */
__device__ static __forceinline__ void end_tile(const struct solo_product *m, uint32_t sums, void *to, float scale,
                                                float row_scale, unsigned long long *best)
{
    int lane = threadIdx.x & 31, sum = 0;
#pragma unroll
    for (int j = 0; j < SOLO_WARPS / 2; j++)
        sum += solo_load1(sums + (uint32_t)((lane / 16 * (SOLO_WARPS / 2) + j) * 64 + lane % 16 * 4));
    sum += __shfl_xor_sync(0xffffffffu, sum, 16);
    end_row(m, to, tlc_scaled(sum, row_scale, scale), best);
}

/* Behind each product but the head's, the sum warps meet each other and the row warps. These may look for values from then on: what
 * this block has published, others may have too. And no sum warp, with or without a tile, is further ahead of another than one
 * product: barriers tell even turns from odd ones, so who waits for a turn must know that the one before it is over; of the row,
 * because all have used it, and of the ring's slots, because all are behind them. */
template <int R> __device__ static __forceinline__ void solo_meet(int r)
{
    if (R == 1)
        asm volatile("bar.sync 6, %0;" ::"n"(SOLO_SUMS + 32 * SOLO_ROW_WARPS) : "memory");
    else
        asm volatile("bar.sync %0, %1;" ::"r"(6 + r), "n"(SOLO_THREADS(R) - 32) : "memory");
}
/* Of several rows, each has a barrier, and the sum warps do not wait: they cannot come to it twice, because the row of the next product is
 * made behind it. */
__device__ static __forceinline__ void solo_done(int r)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(6 + r), "n"(SOLO_THREADS(SOLO_MANY) - 32) : "memory");
}

/* end_tile() for row r. best: of each row. */
template <int R>
__device__ static __forceinline__ void end_tile_of(uint32_t p, const struct solo_product *m, uint32_t sums, void *to,
                                                   float scale, int r, unsigned long long *best)
{
    struct solo_product mine = *m;
    unsigned long long top = 0;
    float row_scale = __int_as_float(solo_load1(p + SOLO_AT(scale) + (uint32_t)r * 4));
    int64_t far = (int64_t)r * m->step;
    if (m->end == END_LOGITS) {
        mine.out = (float *)m->out + far;
        to = to ? (float *)to + far : NULL;
    } else {
        to = to ? (uint64_t *)to + far : NULL;
    }
    end_tile(&mine, sums, to, scale, row_scale, &top);
#pragma unroll
    for (int i = 0; i < R; i++)
        best[i] = i == r ? max(best[i], top) : best[i];
}

/* What becomes of a warp's tile of a round: see end_tile(). over: the row warps want to know of each row. */
struct solo_finish {
    void *to;
    float scale;
    bool mine, over;
    unsigned long long *best; /* of each row */
};

/* Sums of N tiles of INT4 for several rows, one after the other, and what becomes of them. The first AHEAD tiles are in registers when a
 * row comes, as in tiles_q4(); with more than those, all stay in the ring until the last row has them. */
template <int SETS, int N, int AHEAD, int R>
__device__ static __forceinline__ void rows_q4(uint32_t p, const struct solo_product *m, struct solo_at *at,
                                               const struct solo_finish *f)
{
    struct set_q4 set[AHEAD][SETS];
    struct from_q4 first[SETS];
    struct lane_q4 lane = lane_of_q4();
    struct solo_at next = *at;
    int chunks = m->k_pad / 64 - 32 * (SETS - 1), warp = (int)threadIdx.x / 32; /* of the last set */
    enum { STAY = N > AHEAD };
    static_assert(N * SETS < SOLO_SLOTS, "what the ring holds");
#pragma unroll
    for (int i = 0; i < N * SETS; i++) {
        solo_wait(p + SOLO_AT(full) + (uint32_t)next.slot * 8, next.turn);
        if (i < AHEAD * SETS)
            load_q4(&set[i / SETS][i % SETS], slot_of(p, &next), (i + 1) % SETS ? 32 : chunks);
        solo_step(&next);
        if (!STAY)
            leave(p, at);
    }
#pragma unroll
    for (int s = 0; s < SETS; s++)
        first[s] = from_of_q4(0, s * 2048 + warp * 64, SOLO_WARPS * 64, m->k_pad, ~0u);
#pragma unroll 1
    for (int r = 0; r < R; r++) {
        struct row_q4 x[SETS];
        struct from_q4 from[SETS];
        int lo[N] = {}, hi[N] = {};
#pragma unroll
        for (int i = 0; i < 2 * SETS; i++)
            from[i / 2].at[i % 2] =
                first[i / 2].at[i % 2] == ~0u ? p + SOLO_AT(zero) : p + (uint32_t)m->row_at[r] + first[i / 2].at[i % 2];
        next = *at;
        asm volatile("" : "+r"(next.slot), "+r"(chunks)); /* or addresses of all tiles would be kept, in memory */
        if (STAY) {
#pragma unroll
            for (int i = 0; i < AHEAD * SETS; i++)
                solo_step(&next);
        }
        solo_wait(p + SOLO_AT(ready) + (uint32_t)r * 8, (uint32_t)m->turn & 1);
        row_of_q4<SETS>(x, from, &lane);
        sums_q4<SETS, N, AHEAD>(p, set, x, &next, chunks, lo, hi);
        solo_barrier(); /* who ended a tile has read its sums */
#pragma unroll
        for (int t = 0; t < N; t++)
            store_sums(sums_of(p, t, warp), lo[t], hi[t], shift_q4());
        if (STAY && r + 1 == R) {
#pragma unroll
            for (int i = 0; i < N * SETS; i++)
                leave(p, at);
        }
        solo_barrier();
        if (f->mine)
            end_tile_of<R>(p, m, sums_of(p, warp, 0), f->to, f->scale, r, f->best);
        if (f->over)
            solo_done(r);
        if (STAY && r + 1 < R) {
            next = *at;
#pragma unroll
            for (int i = 0; i < AHEAD * SETS; i++) {
                load_q4(&set[i / SETS][i % SETS], slot_of(p, &next), (i + 1) % SETS ? 32 : chunks);
                solo_step(&next);
            }
        }
    }
}
template <int SETS, int N, int AHEAD, int R>
__device__ static __forceinline__ void rounds_q4(uint32_t p, const struct solo_product *m, struct solo_at *at, int n,
                                                 const struct solo_finish *f)
{
    if constexpr (N > 1)
        if (n < N)
            return rounds_q4<SETS, N - 1, AHEAD, R>(p, m, at, n, f);
    rows_q4<SETS, N, AHEAD, R>(p, m, at, f);
}

/* solo_multiply() for several rows. While the sums of one are made, the next ones come. */
template <int SETS, int TILES, int AHEAD, int R>
__device__ static __forceinline__ void multiply_rows(uint32_t p, struct solo_at *at, const struct solo_product *m,
                                                     unsigned long long *best)
{
    enum { EACH = AHEAD > 0 ? 1 : R, N = AHEAD > 0 ? TILES : SOLO_ROUND / R };
    int warp = (int)threadIdx.x / 32, mine = warp / EACH;
    struct solo_bytes<SETS, R> x = {
    };
    if (m->tiles == 0)
        await_rows<SETS, R>(p, m, &x);
#pragma unroll 1
    for (int first = 0, round = 0; first < m->tiles; first += N, round++) {
        int n = min(m->tiles - first, (int)N), tile = m->first + (first + mine) * (int)gridDim.x;
        bool over = m->meets && first + N >= m->tiles;
        struct solo_finish f = {end_of(m, tile), 0.0f, mine < n, over, best};
        if (f.mine)
            f.scale = solo_ask(m->row_scale + tile * 16 + (threadIdx.x & 15));
        if constexpr (AHEAD > 0) {
            rounds_q4<SETS, N, AHEAD, R>(p, m, at, n, &f);
        } else {
            solo_barrier();
            round_q8<SETS, R>(p, m, at, round, n, &x);
            solo_barrier();
            if (f.mine)
                end_tile_of<R>(p, m, sums_of(p, warp, 0), f.to, f.scale, warp % R, best);
        }
    }
    for (int r = 0; r < R && m->meets && (AHEAD == 0 || m->tiles == 0); r++)
        solo_done(r);
}

/* A product with the row, which comes while this is at it, TILES at a time; AHEAD: of tiles_q4, or 0 with INT8. p, as everywhere here:
 * the shared address of solo_common; *at: the ring's place of its first tile, and then of what follows. */
template <int SETS, int TILES, int AHEAD, int R>
__device__ static __forceinline__ void solo_multiply(uint32_t p, struct solo_at *at, const struct solo_product *m,
                                                     unsigned long long *best)
{
    if constexpr (R > 1)
        return multiply_rows<SETS, TILES, AHEAD, R>(p, at, m, best);
    int warp = (int)threadIdx.x / 32;
    struct solo_bytes<SETS, 1> x = {
    };
    if (m->tiles == 0) /* nobody leaves before what is sent to it is there */
        solo_wait(p + SOLO_AT(ready), (uint32_t)m->turn & 1);
#pragma unroll 1
    for (int first = 0, round = 0; first < m->tiles; first += TILES, round++) {
        int n = min(m->tiles - first, TILES), tile = m->first + (first + warp) * (int)gridDim.x;
        if (round > 0) /* who ends a tile of the one before has read its sums */
            solo_barrier();
        float scale = warp < n ? solo_ask(m->row_scale + tile * 16 + (threadIdx.x & 15)) : 0.0f;
        void *to = end_of(m, tile);
        if constexpr (AHEAD > 0)
            round_q4<SETS, TILES, AHEAD>(p, m, at, n);
        else
            round_q8<SETS, 1>(p, m, at, round, n, &x);
        float row_scale = __int_as_float(solo_load1(p + SOLO_AT(scale)));
        solo_barrier();
        if (warp < n)
            end_tile(m, sums_of(p, warp, 0), to, scale, row_scale, best);
    }
}

#endif
