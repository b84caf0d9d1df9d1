/* cuda/solo_feed.cuh - the feeder, one warp: it copies weights, keys and values to the ring, a layer or so ahead of the others. */
#ifndef TLC_SOLO_FEED_CUH
#define TLC_SOLO_FEED_CUH

#include "solo_float.cuh"
#include "solo_part.cuh"
#include "solo_product.cuh"

#define FEED_DEPTH 3 /* copies of a block under way; more stand in the way of the values that blocks exchange */
#define PAGE_DEPTH 6 /* of which pages, where a block has many, wait for nothing else */
#define HEAD_DEPTH 8 /* of the head's tiles: nobody exchanges values by then; the most of all */

static_assert(SOLO_WARPS + 1 + HEAD_DEPTH <= 2 * SOLO_SLOTS, "the copy of two turns before is there (solo_float.cuh)");

template <int D> struct feeder {
    struct solo_shared<D> *s;
    uint8_t *ring;
    struct solo_at at, landed; /* landed: the first slot that may still be under way */
    int under_way, depth;      /* so many of them; at most */
};

template <int D, bool F> __device__ static __forceinline__ uint8_t *room(struct feeder<D> *f)
{
    for (; f->under_way >= f->depth; f->under_way--) {
        solo_wait_slot<D, F>(f->s, f->landed);
        solo_next<F>(&f->landed);
    }
    f->under_way++;
    bar_wait(f->s->empty + f->at.slot, (f->at.turn ^ 1) & (F ? 1 : ~0u));
    return f->ring + f->at.slot * SOLO_SLOT;
}

/* The barrier of the slot that is filled next. */
template <int D, bool F> __device__ static __forceinline__ uint64_t *filled(struct feeder<D> *f)
{
    return (F && f->at.turn & 1 ? solo_odd_of<D>(f->s)->full : f->s->full) + f->at.slot;
}

/* Tiles of BF16, from tile `first` on. */
template <int D>
__device__ static __forceinline__ void feed_rows(struct feeder<D> *f, const struct solo_mat *m, int first)
{
    for (int tile = first; tile < m->n_tiles; tile += (int)gridDim.x)
        for (int k = 0; k < m->k_pad; k += FLOAT_STEP, solo_next<true>(&f->at)) {
            int half = k / FLOAT_STEP % 2, first = k - half * FLOAT_STEP, n = m->k_pad - first;
            uint32_t to = shared_at(room<D, true>(f)), full = shared_at(filled<D, true>(f));
            const uint8_t *w = m->w + ((int64_t)tile * 16 * m->k_pad + first) * 2;
            if (n <= FLOAT_STEP)
                float_copy(to, FLOAT_ROW, w, m->k_pad * 2, 16, n * 2, full);
            else
                float_copy(to, FLOAT_LONG, w + (int64_t)half * 16 * m->k_pad, m->k_pad * 2, 8,
                           min(2 * FLOAT_STEP, n) * 2, full);
        }
}

template <int D, bool F> __device__ static void feed_tiles(struct feeder<D> *f, const struct solo_mat *m, int first)
{
    if (F) {
        feed_rows<D>(f, m, first);
        return;
    }
    bool q4 = m->wtype == TL_W_INT4;
    int slots = slots_of(q4, m->k_pad), tile_bytes = m->k_pad / 64 * 528;
    for (int tile = first; tile < m->n_tiles; tile += (int)gridDim.x)
        for (int i = 0; i < slots; i++, solo_next(&f->at)) {
            uint8_t *to = room<D, F>(f);
            if (q4)
                copy_rows(to, 0, m->w + (int64_t)tile * tile_bytes + i * INT4_SLOT, 0, 1,
                          min(INT4_SLOT, tile_bytes - i * INT4_SLOT), f->s->full + f->at.slot);
            else {
                int k = i / 2 * 2 * INT8_STEP, n = m->k_pad - k;
                const uint8_t *w = m->w + (int64_t)tile * 16 * m->k_pad + k;
                if (n <= INT8_STEP)
                    copy_rows(to, INT8_ROW, w, m->k_pad, 16, n, f->s->full + f->at.slot);
                else
                    copy_rows(to, INT8_HALF, w + (int64_t)(i % 2) * 8 * m->k_pad, m->k_pad, 8, min(n, 2 * INT8_STEP),
                              f->s->full + f->at.slot);
            }
        }
}

/* Rows [0, n) of one kv head's K or V of a page. */
template <int D, bool F> __device__ static void feed_page_rows(struct feeder<D> *f, const __half *from, int n)
{
    int lane = threadIdx.x & 31;
    uint8_t *to = room<D, F>(f);
    uint64_t *full = filled<D, F>(f);
    if (F) {
        float_copy(shared_at(to), (D + 8) * 2, (const uint8_t *)from, D * 2, n, D * 2, shared_at(full));
        solo_next<F>(&f->at);
        return;
    }
#if __CUDA_ARCH__ >= 900
    if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_at(full)), "r"(n * D * 2)
                     : "memory");
    __syncwarp();
    for (int row = lane; row < n; row += 32)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_at(to + row * (D + 8) * 2)),
                     "l"(from + row * D), "r"(D * 2), "r"(shared_at(full))
                     : "memory");
#endif
    solo_next<F>(&f->at);
}

template <int D, bool F>
__device__ static void feed_pages(struct feeder<D> *f, const struct solo_args *a, const struct solo_pages *p, int slot)
{
    const int32_t *pages = p->pages + (int64_t)slot * p->stride;
    int depth = f->depth;
    if (p->mine > 1)
        f->depth = PAGE_DEPTH;
    for (int block = p->block0 + p->rank; block < p->block1; block += p->shares) {
        const __half *k = tlc_page_k<const __half>(&a->step, pages[block], p->kv, D);
        int n = min(p->pos - block * TLC_PAGE, TLC_PAGE); /* the row's own come later */
        feed_page_rows<D, F>(f, k, n);
        feed_page_rows<D, F>(f, k + (int64_t)a->n_kv_heads * TLC_PAGE * D, n);
    }
    f->depth = depth;
}

/* Waits for the cluster, and for what ran before, only behind the first weights. */
template <int D, bool F, int R>
__device__ static __forceinline__ void feed(const struct solo_args *a, struct solo_shared<D> *s, uint8_t *ring)
{
    struct feeder<D> f = {
        s, ring, {0, 0}, {0, 0}, 0, F ? FLOAT_DEPTH : FEED_DEPTH
    };
    struct solo_pages p = {};
    struct solo_mat m = a->first, next;
    int n = a->n_ops * SOLO_MATS;
    for (int i = 0; i < n; i++, m = next) {
        uint32_t op = a->ops[i / SOLO_MATS];
        int j = min(i + 1, n - 1); /* asked for a product ahead: it comes from memory */
        next = a->layers[a->ops[j / SOLO_MATS] >> 16].mat[j % SOLO_MATS];
        feed_tiles<D, F>(&f, &m, solo_first(a, i % SOLO_MATS));
        if (!F && (int)blockIdx.x / SOLO_CLUSTER < m.parts)
            feed_part<D>(s, &m, i % SOLO_MATS, i / SOLO_MATS);
        if (i == 0) {
            tlc_cluster_wait();
            tlc_wait();
            p = solo_pages_of<R>(a);
        }
        if (i % SOLO_MATS == SOLO_QKV && p.kv >= 0)
            feed_pages<D, F>(&f, a, &p, (int)(op & 0xffff));
    }
    if (a->ends.head.n_tiles) {
        f.depth = HEAD_DEPTH;
        feed_tiles<D, F>(&f, &a->ends.head, solo_first(a, SOLO_MATS));
    }
}

#endif
