/* cuda/solo_float.cuh - what is different with BF16 weights: where weights are under way, how a row is made, what a sum is.
 *
 * A layer's weights are many times the ring, and what counts is that they never stop coming. A warp has 512 inputs of a tile, two
 * slices, whose chains of matrix products run side by side. A short copy takes the copy engine as long as a longer one, so two slots
 * have 1,024 inputs together, one of the upper rows of the tile and one of the lower: two warps read both, and give both back. A last
 * slot of up to 512 inputs has all rows, and one warp gives it back for two, as it does with pages.
 *
 * A slot's turn may not have come when a warp asks for the next one, and a barrier tells a turn from the next but not from the one
 * after that. So a slot has two barriers, for even turns and for odd ones. Who asks for a turn must know that the copy of two turns, 2
 * SOLO_SLOTS slots, before is there. A warp knows of one that is SOLO_WARPS + 1 slots before at most: its own, or, behind a group's
 * barrier, solo_meet() or the terms of attention, any. And that one began when all further back than the copies under way were there.
 *
 * Rows of bytes tell each other their largest value first, and so hear that the row before is complete everywhere. These need not,
 * where there is no norm: even rows and odd ones have a place and a barrier each, and every block says that it is there (FLOAT_HERE).
 * Whoever has a whole row knows that all of its cluster had the one before, and have used the one before that. */
#ifndef TLC_SOLO_FLOAT_CUH
#define TLC_SOLO_FLOAT_CUH

#include "solo_product.cuh"
#include "solo_row.cuh"

#define FLOAT_DEPTH 3 /* copies of a block under way; more stand in the way of the values that blocks exchange */
#define FLOAT_STEP  (2 * FLOAT_SLICE) /* inputs that a warp has of a tile */
#define FLOAT_ROW   (FLOAT_STEP * 2 + 16)
#define FLOAT_LONG  (2 * FLOAT_STEP * 2 + 16) /* a row of two slots */
#define FLOAT_X     2048                      /* inputs of an even row at most: of the stream */
#define FLOAT_SUMS  (SOLO_ROW / FLOAT_SLICE)  /* slices of all tiles at work at most; two by turns */

static_assert(16 * FLOAT_ROW <= SOLO_SLOT && 8 * FLOAT_LONG <= SOLO_SLOT, "a slot");
static_assert(FLOAT_X * 2 + FLOAT_HERE <= SOLO_ROW, "an even row");
static_assert(2 * SOLO_WARPS <= FLOAT_SUMS && 2 * FLOAT_SUMS * 64 <= sizeof(solo_common::sums), "sums");

/* ---- the ring ---- */

/* One lane of a warp, when all have come here; the compiler knows that it is one, and starts its copies without a loop over lanes. */
__device__ static __forceinline__ bool float_elect()
{
    uint32_t yes = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(yes));
#endif
    return yes;
}

/* n rows; the barrier counts one arrival and the bytes. */
__device__ static __forceinline__ void float_copy(uint32_t to, int to_step, const uint8_t *from, int64_t step, int n,
                                                  int bytes, uint32_t bar)
{
#if __CUDA_ARCH__ >= 900
    if (float_elect()) {
        solo_expect(bar, n * bytes);
#pragma unroll 8
        for (int r = 0; r < n; r++)
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                    to + (uint32_t)(r * to_step)),
                "l"(from + r * step), "r"(bytes), "r"(bar)
                : "memory");
    }
    __syncwarp();
#endif
}

/* ---- rows ---- */

/* v, products with the norm's weights, becomes the row, rounded to BF16, padded with zeros to k_pad, in all blocks. */
template <int Q, int QX>
__device__ static __forceinline__ void float_make(struct solo_maker<QX> *m, const float4 *v, float sum, bool norm,
                                                  float eps, int n, int k_pad)
{
    float inv = 1.0f;
    if (norm)
        solo_reduce<QX, true>(m, sum, 0, true, false, n, eps, &inv);
    if (threadIdx.x == SOLO_SUMS)
        solo_expect(m->ready, FLOAT_HERE + k_pad * 2);
#pragma unroll
    for (int q = 0; q < Q; q++) {
        int j = 4 * m->thread + 2048 * q;
        float4 y = j >= n ? make_float4(0, 0, 0, 0) : norm ? tlc_times(v[q], inv) : v[q];
        __nv_bfloat162 lo = __floats2bfloat162_rn(y.x, y.y), hi = __floats2bfloat162_rn(y.z, y.w);
        float2 words = make_float2(*(const float *)&lo, *(const float *)&hi);
        if (j < k_pad) {
#pragma unroll
            for (int rank = 0; rank < SOLO_CLUSTER; rank++)
                tlc_far_put(m->far[rank] + m->row + (uint32_t)(FLOAT_HERE + 2 * j), m->far[rank] + m->ready, words);
        }
    }
    if (threadIdx.x - SOLO_SUMS < SOLO_CLUSTER)
        tlc_far_put(m->far_lane + m->row + (uint32_t)(m->thread / (32 * SOLO_ROW_WARPS) * 4), m->far_lane + m->ready,
                    0u);
}

/* ---- products ---- */

/* Shared addresses; odd: of odd turns. */
struct float_places {
    uint32_t ring, full, full_odd, empty, ready, ready_odd, row, row_odd, sums;
};

/* How many warps a tile gets: one a slot, as far as there are. */
__device__ static __forceinline__ int float_group_of(int slots)
{
    return slots > 4 ? SOLO_WARPS : slots > 2 ? 4 : slots;
}

/* One warp: n inputs, of the tile's row lane % 16 from `slot` on, of the row from x on. Sums of rows g and g + 8 of the first slice are
 * in lo[0], lo[2], of the second in hi. */
__device__ static __forceinline__ void float_slot(uint32_t slot, uint32_t x, int n, float lo[4], float hi[4])
{
    int lane = threadIdx.x & 31;
    slot += (uint32_t)(lane >> 4) * 16;
    x += (uint32_t)(lane >> 3) * 16; /* all columns of a product are the row */
    if (n == FLOAT_STEP) {
#pragma unroll 4
        for (int k = 0; k < FLOAT_SLICE; k += 32) {
            uint32_t a[4][4], b[2][4];
            tlc_ldmatrix(b[0], x + (uint32_t)k * 2);
            tlc_ldmatrix(b[1], x + (uint32_t)(k + FLOAT_SLICE) * 2);
#pragma unroll
            for (int i = 0; i < 4; i++)
                tlc_ldmatrix(a[i], slot + (uint32_t)(k + i % 2 * FLOAT_SLICE + i / 2 * 16) * 2);
#pragma unroll
            for (int i = 0; i < 4; i++)
                mma_bf16(i % 2 ? hi : lo, a[i], b[i % 2][i / 2 * 2], b[i % 2][i / 2 * 2 + 1]);
        }
        return;
    }
#pragma unroll 1
    for (int k = 0; k < n; k += 32) { /* of a multiple of 64 */
        uint32_t a[2][4], b[4];
        tlc_ldmatrix(b, x + (uint32_t)k * 2);
        tlc_ldmatrix(a[0], slot + (uint32_t)k * 2);
        tlc_ldmatrix(a[1], slot + (uint32_t)k * 2 + 32);
        if (k < FLOAT_SLICE) {
            mma_bf16(lo, a[0], b[0], b[1]);
            mma_bf16(lo, a[1], b[2], b[3]);
        } else {
            mma_bf16(hi, a[0], b[0], b[1]);
            mma_bf16(hi, a[1], b[2], b[3]);
        }
    }
}

/* Meets the warps of a group. */
__device__ static __forceinline__ void meet(int group, int number)
{
    asm volatile("bar.sync %0, %1;" ::"r"(8 + number), "r"(32 * group) : "memory");
}

/* The slot before. */
__device__ static __forceinline__ void float_before(struct solo_at *at)
{
    if (at->slot-- == 0) {
        at->slot = SOLO_SLOTS - 1;
        at->turn--;
    }
}
__device__ static __forceinline__ void float_wait_slot(const struct float_places *p, struct solo_at at)
{
    float_wait((at.turn & 1 ? p->full_odd : p->full) + (uint32_t)at.slot * 8, at.turn);
}

/* As solo_multiply(). A group of warps has a tile, warp w of it the inputs of the slots w, w + group, ... */
__device__ static __forceinline__ void float_multiply(const struct float_places *p, struct solo_at *at,
                                                      const struct solo_product *m, unsigned long long *best)
{
    int lane = threadIdx.x & 31, r = lane & 15, slots = (m->k_pad + FLOAT_STEP - 1) / FLOAT_STEP,
        group = float_group_of(slots);
    int number = (int)threadIdx.x / 32 / group, w = (int)threadIdx.x / 32 % group, groups = SOLO_WARPS / group;
    bool waits = true;
    uint32_t sums = p->sums + (uint32_t)(number * group * 128), ready = m->turn & 1 ? p->ready_odd : p->ready,
             row = (m->turn & 1 ? p->row_odd : p->row) + FLOAT_HERE;
    struct solo_at tile_at = *at;
    solo_next<true>(&tile_at, number * slots);
    if (m->tiles == 0) /* nobody leaves before what is sent to it is there */
        float_wait(ready, (uint32_t)m->turn);
#pragma unroll 1
    for (int i = number, round = 0; i < m->tiles; i += groups, round ^= 1, solo_next<true>(&tile_at, groups * slots)) {
        uint32_t to = sums + (uint32_t)(round * FLOAT_SUMS * 64);
        struct solo_at slot_at = tile_at;
        solo_next<true>(&slot_at, w);
#pragma unroll 1
        for (int s = w; s < slots; s += group, solo_next<true>(&slot_at, group)) {
            float lo[4] = {}, hi[4] = {};
            int k0 = s * FLOAT_STEP;
            bool two = m->k_pad > k0 / (2 * FLOAT_STEP) * 2 * FLOAT_STEP + FLOAT_STEP;
            struct solo_at upper = slot_at, lower = slot_at;
            if (two) {
                if (s % 2)
                    float_before(&upper);
                else
                    solo_next<true>(&lower);
                float_wait_slot(p, lower);
            }
            float_wait_slot(p, upper);
            if (waits)
                float_wait(ready, (uint32_t)m->turn);
            waits = false;
            uint32_t a = p->ring + (uint32_t)((lane & 8 ? lower.slot : upper.slot) * SOLO_SLOT);
            a += (uint32_t)(two ? (lane & 7) * FLOAT_LONG + s % 2 * FLOAT_STEP * 2 : (lane & 15) * FLOAT_ROW);
            float_slot(a, row + (uint32_t)k0 * 2, min(FLOAT_STEP, m->k_pad - k0), lo, hi);
            __syncwarp();
            if (lane < 2) /* for a slot that is no other warp's, two arrivals */
                solo_arrive(p->empty + (uint32_t)(lane ? lower.slot : upper.slot) * 8);
            if ((lane & 3) == 0) {
                uint32_t mine = to + (uint32_t)(s * 128 + (lane >> 2) * 4);
                solo_store1(mine, __float_as_int(lo[0]));
                solo_store1(mine + 32, __float_as_int(lo[2]));
                solo_store1(mine + 64, __float_as_int(hi[0]));
                solo_store1(mine + 96, __float_as_int(hi[2]));
            }
        }
        if (group > 1)
            meet(group, number);
        else
            __syncwarp();
        if (w > 0)
            continue;
        float y = __int_as_float(solo_load1(to + (uint32_t)r * 4));
#pragma unroll 4
        for (int k = FLOAT_SLICE; k < m->k_pad; k += FLOAT_SLICE)
            y = __fadd_rn(y, __int_as_float(solo_load1(to + (uint32_t)(k / FLOAT_SLICE * 64 + r * 4))));
        end_row(m, end_of(m, m->first + i * (int)gridDim.x), y, best);
    }
    solo_next<true>(at, m->tiles * slots);
}

#endif
