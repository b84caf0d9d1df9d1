/* cuda/solo_product.cuh - the products of the one row: what a slot of the ring holds of a tile, sums, and what becomes of them. */
#ifndef TLC_SOLO_PRODUCT_CUH
#define TLC_SOLO_PRODUCT_CUH

#include "solo.cuh"

#define INT4_SLOT (32 * 528) /* bytes of 32 chunks of a tile */
#define INT8_STEP 1024       /* inputs of a tile in a slot */
#define INT8_ROW  (INT8_STEP + 32)
#define SLOTS_MAX SOLO_SLOTS(1)

__device__ static __forceinline__ int slots_of(const struct solo_mat *m)
{
    return m->wtype == TL_W_INT4 ? (m->k_pad / 64 + 31) / 32 : (m->k_pad + INT8_STEP - 1) / INT8_STEP;
}

/* Blocks with attention come first, and last at second tiles. */
__device__ static __forceinline__ int first_tile() { return (int)(gridDim.x - 1 - blockIdx.x); }
__device__ static __forceinline__ int tiles_of(const struct solo_mat *m) { return m->each + (first_tile() < m->more); }

/* ---- products: by all warps that compute, warp w with the chunks w, w + 16, ... of every tile ---- */

/* 16 times the sums of stored rows g and g + 8 over this lane's inputs of a chunk of an INT4 tile, added to lo and hi. w: the lane's
 * weights, s: its scales, b: inputs 8 t .. 8 t + 8 of both groups. (A matrix unit would use one of its 8 columns, and takes 16 cycles
 * for what these do in 4.) */
__device__ static __forceinline__ void chunk_q4(uint4 w, uint32_t s, uint2 b, uint2 b2, int *lo, int *hi)
{
    int d0 = __dp4a((int)(w.x & HIGH), (int)b.y, __dp4a((int)(w.x << 4 & HIGH), (int)b.x, 0));
    int d1 = __dp4a((int)(w.y & HIGH), (int)b.y, __dp4a((int)(w.y << 4 & HIGH), (int)b.x, 0));
    int e0 = __dp4a((int)(w.z & HIGH), (int)b2.y, __dp4a((int)(w.z << 4 & HIGH), (int)b2.x, 0));
    int e1 = __dp4a((int)(w.w & HIGH), (int)b2.y, __dp4a((int)(w.w << 4 & HIGH), (int)b2.x, 0));
    *lo += (int)(s & 15) * d0 + (int)(s >> 4 & 15) * e0;
    *hi += (int)(s >> 8 & 15) * d1 + (int)(s >> 12) * e1;
}

/* Over the four lanes that have a row's inputs. */
__device__ static __forceinline__ int lane_sum(int v)
{
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

/* Groups of 32 inputs of an INT8 tile. */
__device__ static __forceinline__ void slot_q8(uint32_t w, uint32_t x, int n, int *lo, int *hi)
{
    int warp = (int)threadIdx.x / 32, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int sum[4] = {0, 0, 0, 0};
#pragma unroll 2
    for (int k = warp * 32 + 8 * t; k < n; k += SOLO_WARPS * 32) {
        uint2 top = solo_load8(w + (uint32_t)(g * INT8_ROW + k)),
              low = solo_load8(w + (uint32_t)((g + 8) * INT8_ROW + k));
        uint2 b = solo_load8(x + (uint32_t)k);
        const uint32_t a[4] = {top.x, low.x, top.y, low.y};
        mma_s8(sum, a, b.x, b.y, sum);
    }
    *lo += sum[0];
    *hi += sum[2];
}

/* Shared addresses of what products use. */
struct places {
    uint32_t ring, full, row, part;
};

/* Tiles that are summed up at once: all of this block's if the ring holds them, else what half of it holds. */
template <int SLOTS> __device__ static __forceinline__ int tiles_at_once(int left, int slots)
{
    return left * slots <= SLOTS && left <= SOLO_TILES ? left : min(left, SLOTS / 2 > slots ? SLOTS / 2 / slots : 1);
}

/* The next n slots are full; a warp for each. To be followed by a barrier. */
template <int SLOTS>
__device__ static __forceinline__ void wait_slots(const struct places *s, const struct solo_at *at, int n)
{
    struct solo_at mine = *at;
    int warp = (int)threadIdx.x / 32;
    solo_next<SLOTS>(&mine, warp);
    if (warp < n)
        solo_wait(s->full + (uint32_t)mine.slot * 8, mine.turn);
}

/* The next n slots have been read by all: give them back, by a warp that has nothing else to do. */
template <int SLOTS>
__device__ static __forceinline__ void release_slots(const struct places *s, struct solo_at *at, int n)
{
    struct solo_at mine = *at;
    int t = (int)threadIdx.x - (TLC_READY_THREADS - 32);
    solo_next<SLOTS>(&mine, t & 15);
    if (t >= 0 && t < n)
        solo_arrive(s->full + SLOTS_MAX * 8 + (uint32_t)mine.slot * 8);
    solo_next<SLOTS>(at, n);
}

/* The sums of n tiles, at most SOLO_TILES, whose slots are full. */
template <int SLOTS>
__device__ static __forceinline__ void sum_tiles(const struct places *s, struct solo_at at, bool q4, int k_pad, int n,
                                                 int slots)
{
    int warp = (int)threadIdx.x / 32, lane = threadIdx.x & 31, chunks = k_pad / 64;
    uint32_t x = s->row + (uint32_t)(warp * 64 + 8 * (lane & 3)), part = s->part + (uint32_t)(warp * SOLO_TILES * 64);
    uint32_t w_at = s->ring + (uint32_t)(warp * 512 + lane * 16),
             s_at = s->ring + (uint32_t)(warp * 16 + (lane >> 2) * 2);
    uint2 b[4] = {};
#pragma unroll 1
    for (int i = 0; i < n; i++, part += 64) {
        int lo = 0, hi = 0;
#pragma unroll 1
        for (int j = 0; j < slots; j++, solo_next<SLOTS>(&at)) {
            uint32_t to = (uint32_t)at.slot * SOLO_SLOT;
            if (q4) {
                int n0 = min(chunks - j * 32, 16), n1 = min(chunks - j * 32 - 16, 16);
                uint4 w = {}, w2 = {};
                uint32_t sc = 0, sc2 = 0;
                if (i == 0 || slots > 1) {
#pragma unroll
                    for (int u = 0; u < 4; u++)
                        b[u] = solo_load8(x + (uint32_t)(j * 2048 + u / 2 * 1024 + u % 2 * 32));
                }
                if (warp < n0) {
                    w = solo_load16(w_at + to);
                    sc = solo_load2(s_at + to + (uint32_t)n0 * 512);
                }
                if (warp < n1) {
                    w2 = solo_load16(w_at + to + 16 * 528);
                    sc2 = solo_load2(s_at + to + 16 * 528 + (uint32_t)n1 * 512);
                }
                chunk_q4(w, sc, b[0], b[1], &lo, &hi);
                chunk_q4(w2, sc2, b[2], b[3], &lo, &hi);
            } else {
                slot_q8(s->ring + to, s->row + (uint32_t)(j * INT8_STEP), min(INT8_STEP, k_pad - j * INT8_STEP), &lo,
                        &hi);
            }
        }
        if (q4) {
            lo = lane_sum(lo);
            hi = lane_sum(hi);
        }
        if ((lane & 3) == 0) { /* INT4 sums are 16 times what they stand for: the shift is exact */
            asm volatile("st.shared.s32 [%0], %1;" ::"r"(part + (uint32_t)(lane >> 2) * 4), "r"(q4 ? lo >> 4 : lo)
                         : "memory");
            asm volatile("st.shared.s32 [%0], %1;" ::"r"(part + (uint32_t)(lane >> 2) * 4 + 32), "r"(q4 ? hi >> 4 : hi)
                         : "memory");
        }
    }
}

template <int D> __device__ static __forceinline__ float sum_of(const struct solo_shared<D> *s, int i, float row_scale)
{
    int sum = 0;
#pragma unroll
    for (int warp = 0; warp < SOLO_WARPS; warp++)
        sum += s->part[warp][i];
    return tlc_scaled(sum, s->scale, row_scale);
}

enum solo_end { END_PUBLISH, END_SILU_MUL, END_RELU2, END_LOGITS };

/* A product as the warps that compute see it. */
struct work {
    const float *row_scale;
    int k_pad, n_out, left, slots; /* left: tiles of this block that are still to be done; slots: of a tile */
    bool q4;
    enum solo_end end;
    void *out;      /* where `end` says */
    uint32_t epoch; /* of what is published */
};

/* The scales of this thread's output among the first tiles, asked for before the row is there. */
__device__ static __forceinline__ void ask_scales(const struct work *w, bool gated, float *scale, float *up_scale)
{
    int t = threadIdx.x, at = (first_tile() + (t >> 4) * (int)gridDim.x) * 16 + (t & 15);
    bool mine = t < min(w->left, SOLO_TILES) * 16;
    *scale = mine ? __ldg(w->row_scale + at) : 0;
    *up_scale = mine && gated && (t & 15) < 8 ? __ldg(w->row_scale + at + 8) : 0;
}

/* The product of this block's tiles with s->row, which all warps have made, and the first tiles are there. scale, up_scale: of this
 * thread's output among the first tiles. */
template <int D, int SLOTS>
__device__ static __forceinline__ void product(struct solo_shared<D> *s, const struct places *places,
                                               struct solo_at *at, struct work w, float scale, float up_scale,
                                               unsigned long long *best)
{
    int t = threadIdx.x, r = t & 15, tile = first_tile() + (t >> 4) * (int)gridDim.x;
    int n = tiles_at_once<SLOTS>(w.left, w.slots);
    bool gated = w.end == END_SILU_MUL;
#pragma unroll 1
    while (true) {
        sum_tiles<SLOTS>(places, *at, w.q4, w.k_pad, n, w.slots);
        tlc_ready_barrier();
        release_slots<SLOTS>(places, at, n * w.slots);
        int o = gated ? tile * 8 + r : tile * 16 + r;
        if (t < n * 16 && o < w.n_out && !(gated && r >= 8)) {
            float y = sum_of<D>(s, t, scale);
            if (gated)
                y = tlc_silu_mul(y, sum_of<D>(s, t + 8, up_scale));
            else if (w.end == END_RELU2)
                y = tlc_relu2(y);
            if (w.end == END_LOGITS) {
                ((float *)w.out)[o] = y;
                *best = max(*best, tlc_best_key(y, o));
            } else {
                solo_publish((uint64_t *)w.out + o, y, w.epoch);
            }
        }
        w.left -= n;
        if (w.left == 0)
            return;
        tile += n * (int)gridDim.x;
        n = tiles_at_once<SLOTS>(w.left, w.slots);
        wait_slots<SLOTS>(places, at, n * w.slots);
        if (t < n * 16) {
            scale = __ldg(w.row_scale + tile * 16 + r);
            up_scale = gated && r < 8 ? __ldg(w.row_scale + tile * 16 + r + 8) : 0;
        }
        tlc_ready_barrier(); /* the slots are full, and the sums have been read */
    }
}

#endif
