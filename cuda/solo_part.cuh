/* cuda/solo_part.cuh - tiles that are left over when every block has as many tiles of an o or a down product as the others: of INT4,
 * one for a cluster at most. It would be a second one for its block, and all would wait for that. So each block of the cluster has the
 * sums of an eighth of its inputs, by the row warps, which have nothing else to do between a row and the values of the next one (or, of
 * several rows, by a warp that is there for that). The sums go to one block of the cluster, which adds and publishes. Sums of
 * integers: in any order the same.
 *
 * A tile has a turn in each layer, so the layer's number is the parity of its barriers. The weights have a place of their own, one
 * layer ahead. Sums, and the row, are not written again too early: whoever writes there has the values of all blocks that came
 * after, and they are published behind their use. */
#ifndef TLC_SOLO_PART_CUH
#define TLC_SOLO_PART_CUH

#include "solo_product.cuh"

/* The first chunk (of 64 inputs) of a block. */
__device__ static __forceinline__ int part_chunk(int k_pad, int rank) { return k_pad / 64 * rank / SOLO_CLUSTER; }

/* The weights of this block's chunks, then their scales, by the feeder. layer: of the launch's. */
template <int D>
__device__ static __forceinline__ void feed_part(struct solo_shared<D> *s, const struct solo_mat *m, int which,
                                                 int layer)
{
#if __CUDA_ARCH__ >= 900
    struct solo_parts *p = solo_parts_of<D>(s);
    int lane = threadIdx.x & 31, rank = (int)blockIdx.x % SOLO_CLUSTER, chunks = m->k_pad / 64;
    int first = part_chunk(m->k_pad, rank), end = part_chunk(m->k_pad, rank + 1);
    /* pack.cu: units of 16 chunks' weights, then their scales; two lanes for each unit that these are in */
    int unit = first / 16 + lane / 2, from = max(first, unit * 16), to = min(end, unit * 16 + 16);
    int size = lane % 2 ? 16 : 512;
    const uint8_t *w = m->w + (int64_t)(m->n_tiles + (int)blockIdx.x / SOLO_CLUSTER) * chunks * 528 + unit * 8448 +
                       (lane % 2 ? min(chunks - unit * 16, 16) * 512 : 0) + (from - unit * 16) * size;
    uint32_t at = shared_at(part_weights(p) + m->part_at) +
                  (uint32_t)((lane % 2 ? (end - first) * 512 : 0) + (from - first) * size);
    uint32_t full = shared_at(p->full + SOLO_PART(which));
    solo_wait(shared_at(p->empty + SOLO_PART(which)), (layer & 1) ^ 1);
    if (lane == 0)
        solo_expect(full, (end - first) * 528);
    __syncwarp();
    if (from < to)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(at), "l"(w),
            "r"((to - from) * size), "r"(full)
            : "memory");
    __syncwarp();
#endif
}

/* Chunks number warp, warp + W, ... of the block's n are this warp's: four a set. w: where they are. */
template <int W> __device__ static __forceinline__ void part_load(struct set_q4 *set, uint32_t w, int i, int n)
{
    int lane = threadIdx.x & 31, warp = (int)threadIdx.x / 32 % W;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int chunk = warp + W * (4 * i + j / 2 * 2 + (lane & 3) / 2);
        uint32_t at = w + (uint32_t)(n * 512 + chunk * 16 + lane / 4 * 2 + j % 2);
        set->scales[j / 2][j % 2] = chunk < n ? solo_load_byte(at) : 0;
    }
#pragma unroll
    for (int u = 0; u < 4; u++) {
        int chunk = warp + W * (4 * i + u);
        set->w[u] = chunk < n ? solo_load16(w + (uint32_t)(chunk * 512 + lane * 16)) : make_uint4(0, 0, 0, 0);
    }
}

/* The cluster's tile of the product t for row r, by W warps: the row warps, which have sent their part of it, or, of several rows, the
 * last warp of the block. */
template <int D, int W>
__device__ static __forceinline__ void solo_part(const struct solo_args *a, struct solo_shared<D> *s,
                                                 const struct solo_turn *t, const struct solo_shape *shape, int r)
{
    enum { SETS = W == 1 ? 3 : 2, ALL = SOLO_CLUSTER * W, HALF = ALL / 2 };
    static_assert(4 * SETS * W * SOLO_CLUSTER * 64 >= SOLO_ROW, "chunks of a block");
    struct solo_parts *p = solo_parts_of<D>(s);
    int lane = threadIdx.x & 31, warp = (int)threadIdx.x / 32 % W, row = lane & 15;
    int rank = (int)blockIdx.x % SOLO_CLUSTER, part = SOLO_PART(t->which), n = shape->n_chunks, lo = 0, hi = 0, sum = 0;
    uint32_t w = shared_at(part_weights(p) + shape->part_at), sums = shared_at(p->sums[r * ALL]),
             inbox = shared_at(p->inbox + r);
    uint32_t at = shared_at((struct solo_common *)s) + (W > 1 ? SOLO_AT(row) : (uint32_t)a->row_at[r]);
    bool ends = rank == 4 * part;
    float scale = ends ? solo_ask(s->brief[s->ops[t->layer] >> 16].row_scale[t->which] + shape->part * 16 + row) : 0.0f;
    struct set_q4 set[SETS];
    solo_wait(shared_at(p->full + part), t->layer & 1);
#pragma unroll
    for (int i = 0; i < SETS; i++)
        part_load<W>(&set[i], w, i, n);
    __syncwarp();
    if (lane == 0)
        solo_arrive(shared_at(p->empty + part));
    if (ends && warp == 0 && lane == 0)
        solo_expect(inbox, ALL * (int)sizeof(p->sums[0]));
    struct row_q4 x[SETS];
    struct from_q4 from[SETS];
    struct lane_q4 has = lane_of_q4();
#pragma unroll
    for (int i = 0; i < SETS; i++)
        from[i] = from_of_q4(at, (shape->part_chunk + warp + W * 4 * i) * 64, W * 64, (shape->part_chunk + n) * 64,
                             shared_at(s->zero));
    solo_wait(shared_at(s->ready + r), (uint32_t)t->i & 1);
    row_of_q4<SETS>(x, from, &has);
#pragma unroll
    for (int i = 0; i < SETS; i++)
        sum_q4(&set[i], &x[i], &lo, &hi);
    int mine = row_sum(lo, hi, shift_q4());
    if ((lane & 1) == 0) {
        uint32_t to = sums + (uint32_t)((rank * W + warp) * 64 + (lane / 4 + 4 * (lane & 2)) * 4);
        tlc_far_put(solo_far(to, 4 * part), solo_far(inbox, 4 * part), (uint32_t)mine);
    }
    if (!ends || warp > 0)
        return;
    solo_wait(inbox, t->layer & 1);
#pragma unroll
    for (int i = 0; i < HALF; i++)
        sum += solo_load1(sums + (uint32_t)((lane / 16 * HALF + i) * 64 + row * 4));
    sum += __shfl_xor_sync(0xffffffffu, sum, 16);
    float y = tlc_scaled(sum, __int_as_float(solo_load1(shared_at(s->scale + r))), scale);
    if (lane < 16 && shape->part * 16 + row < shape->n_out)
        solo_publish(a->board.y + r * a->steps[STEP_Y] + solo_place(shape->part * 16 + row), y,
                     t->epoch + 2 + (uint32_t)t->which);
}

#endif
