/* Attention for few queries: a tile of 16 queries of one kv head, its pages dealt out to the blocks of a cluster.
 *
 * A block takes one page of each round: 8 warps have 8 keys each for the scores, and d / 8 columns each for the
 * values. The terms of a round lie in the shared memory of their blocks; after a cluster barrier every block folds
 * its own slice of the output over all of them, in ascending order. Pages of earlier steps are on their way before
 * tlc_wait(). */
#include "attention_impl.cuh"

#include <stddef.h>

#define THREADS 256
#define WARPS   (THREADS / 32)
#define LD_P    (TLC_PAGE + 8)

template <int D> struct term {
    float acc[TLC_TILE_Q][D + 8];
    float2 ml[TLC_TILE_Q]; /* m, l */
};

template <int D> struct shared_data {
    __half k[2][TLC_PAGE][D + 8], v[2][TLC_PAGE][D + 8];
    __half q[TLC_TILE_Q][D + 8];
    __half p[TLC_TILE_Q][LD_P];
    __half k_new[D], v_new[D];
    float rope[D], q_norm[D], k_norm[D]; /* of an item of one row */
    float max[WARPS][TLC_TILE_Q];
    struct term<D> term[2]; /* term[1] is also the work space of the finish */
};

/* What a block needs to know of its item. */
struct work {
    struct tlc_attn_item x;
    const struct tlc_attn_entry *entries;
    const int32_t *pages;
    int kv, head0, heads; /* q heads head0 .. head0 + heads - 1 of each row */
    int n_q, rank, rounds;
    int lo[2], pos[2]; /* of the queries lane / 4 and 8 more */
    struct tlc_keys keys;
    bool owner; /* fused, and this block has the page of the row itself */
};

static __device__ __forceinline__ int block_of(const struct work *w, int cluster, int round)
{
    return w->x.block0 + round * cluster + w->rank;
}

static __device__ __forceinline__ struct work work_of(const struct tlc_attn_args *a, int item, int rank)
{
    struct work w;
    int tile = (int)blockIdx.y % a->head_tiles, n_blocks, last;
    w.x = tlc_plan_items(a->plan)[a->plan->first[TLC_SEG_OWN] + item];
    w.entries = tlc_plan_entries(a->plan) + w.x.entry0;
    w.pages = tlc_page_table(&a->step, w.x.seq, a->slot);
    w.kv = (int)blockIdx.y / a->head_tiles;
    w.head0 = w.kv * a->per_row + tile * a->heads;
    w.heads = min(a->heads, a->per_row - tile * a->heads);
    w.n_q = w.x.n * w.heads;
    w.rank = rank;
    n_blocks = w.x.block1 - w.x.block0;
    w.rounds = (n_blocks + a->cluster - 1) / a->cluster;
    last = w.entries[w.x.n - 1].pos;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        struct tlc_attn_entry e = w.entries[min((((int)threadIdx.x & 31) / 4 + 8 * h) / w.heads, w.x.n - 1)];
        w.lo[h] = e.lo;
        w.pos[h] = e.pos;
    }
    w.owner = a->fused && rank == (n_blocks - 1) % a->cluster;
    w.keys.lo = w.entries[0].lo;
    w.keys.hi = min(last + 1, w.x.block1 * TLC_PAGE);
    w.keys.skip = w.owner ? last : -1;
    return w;
}

template <int D>
static __device__ __forceinline__ void fetch(const struct tlc_attn_args *a, const struct work *w, int round)
{
    struct shared_data<D> *s = (struct shared_data<D> *)tlc_shared();
    int block = block_of(w, a->cluster, round);
    tlc_page_copy<D, THREADS>(tlc_shared_address(s->k[round & 1]), tlc_shared_address(s->v[round & 1]),
                              tlc_page_k<const __half>(&a->step, w->pages[block], w->kv, D),
                              (int64_t)a->n_kv_heads * TLC_PAGE * D, block, w->keys, (int)threadIdx.x);
}

/* All keys that are read of this page are of earlier steps. */
static __device__ __forceinline__ bool early(const struct work *w, int block)
{
    return min((block + 1) * TLC_PAGE, w->keys.hi - (w->owner ? 1 : 0)) <= w->x.safe;
}

/* What the finish of an item of one row reads, on its way before the row is there. */
template <int D>
static __device__ __forceinline__ void fetch_tables(const struct tlc_attn_args *a, const struct work *w)
{
    struct shared_data<D> *s = (struct shared_data<D> *)tlc_shared();
    struct tlc_head_tables t = tlc_head_tables_of(a, w->entries[0].pos);
    for (int j = threadIdx.x; j < D; j += THREADS) {
        s->rope[j] = a->finish.rope != TL_ROPE_NONE ? t.rope[j] : 0.0f;
        s->q_norm[j] = a->finish.qk_norm == TL_QKNORM_HEAD ? t.q_norm[j] : 0.0f;
        s->k_norm[j] = a->finish.qk_norm == TL_QKNORM_HEAD ? t.k_norm[j] : 0.0f;
    }
}

/* The queries into q, rounded; in a fused launch straight from the product, and the row's own k and v as well. */
template <int D> static __device__ __forceinline__ void ready_heads(const struct tlc_attn_args *a, const struct work *w)
{
    struct shared_data<D> *s = (struct shared_data<D> *)tlc_shared();
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, n = w->n_q + (w->owner ? 2 : 0);
    float *x = (float *)&s->term[1] + warp * D;
    struct tlc_head_tables near = {s->rope, s->q_norm, s->k_norm};
    for (int i = w->n_q * D + threadIdx.x; i < TLC_TILE_Q * D; i += THREADS)
        s->q[i / D][i % D] = __float2half_rn(0.0f);
#pragma unroll 1
    for (int t = warp; t < n; t += WARPS) {
        bool own = t >= w->n_q, is_v = t > w->n_q;
        struct tlc_attn_entry e = w->entries[own ? w->x.n - 1 : t / w->heads];
        int head = own ? a->n_heads + (is_v ? a->n_kv_heads : 0) + w->kv : w->head0 + t % w->heads;
        __half *to = !own ? s->q[t] : is_v ? s->v_new : s->k_new;
        if (a->fused)
            tlc_head_ready(a, x, D, e.place, head, w->x.n == 1 ? near : tlc_head_tables_of(a, e.pos));
        else
            tlc_head_load(x, a->qkv + e.place * a->ld + (int64_t)head * D, nullptr, D);
        for (int j = lane; j < D; j += 32)
            to[j] = tlc_half(x[j]);
        if (own) {
            __half *page = tlc_page_k<__half>(&a->step, w->pages[e.pos / TLC_PAGE], w->kv, D) + e.pos % TLC_PAGE * D +
                           (is_v ? (int64_t)a->n_kv_heads * TLC_PAGE * D : 0);
            for (int j = lane; j < D; j += 32)
                page[j] = tlc_half(x[j]);
        }
        __syncwarp();
    }
    __syncthreads();
}

/* The row's own key and value into its page's place in shared memory. */
template <int D> static __device__ __forceinline__ void put_own(const struct work *w, int stage)
{
    struct shared_data<D> *s = (struct shared_data<D> *)tlc_shared();
    int row = w->keys.skip % TLC_PAGE, t = threadIdx.x;
    if (t < D / 8)
        *(uint4 *)&s->k[stage][row][t * 8] = *(const uint4 *)&s->k_new[t * 8];
    else if (t < D / 4)
        *(uint4 *)&s->v[stage][row][t * 8 - D] = *(const uint4 *)&s->v_new[t * 8 - D];
}

/* The term of one page, into s->term[stage]. */
template <int D>
static __device__ __forceinline__ void make_term(const struct tlc_attn_args *a, const struct work *w, int block,
                                                 int stage)
{
    struct shared_data<D> *s = (struct shared_data<D> *)tlc_shared();
    struct term<D> *out = &s->term[stage];
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t2 = lane % 4 * 2;
    unsigned q_at = tlc_at_a(tlc_shared_address(s->q), lane, D + 8);
    unsigned k_at = tlc_at_k(tlc_shared_address(s->k[stage][warp * 8]), lane, D + 8);
    unsigned p_at = tlc_at_a(tlc_shared_address(s->p), lane, LD_P);
    unsigned v_at = tlc_at_v(tlc_shared_address(s->v[stage]), lane, D + 8);
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, m[2];
    uint32_t p[4][4];
#pragma unroll
    for (int kk = 0; kk < D / 32; kk++) {
        uint32_t b[4], q[4];
        tlc_ldmatrix(b, k_at + kk * 64);
        tlc_ldmatrix(q, q_at + kk * 64);
        tlc_mma_f16(c, q, b[0], b[1]);
        tlc_ldmatrix(q, q_at + kk * 64 + 32);
        tlc_mma_f16(c, q, b[2], b[3]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int q = g + 8 * h, key = block * TLC_PAGE + warp * 8 + t2;
        int lo = w->lo[h], pos = w->pos[h];
        c[2 * h] = key >= lo && key <= pos ? __fmul_rn(c[2 * h], a->scale) : tlc_minus_inf();
        c[2 * h + 1] = key + 1 >= lo && key + 1 <= pos ? __fmul_rn(c[2 * h + 1], a->scale) : tlc_minus_inf();
        m[h] = fmaxf(c[2 * h], c[2 * h + 1]);
        m[h] = fmaxf(m[h], __shfl_xor_sync(0xffffffffu, m[h], 1));
        m[h] = fmaxf(m[h], __shfl_xor_sync(0xffffffffu, m[h], 2));
        if (t2 == 0)
            s->max[warp][q] = m[h];
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int q = g + 8 * h;
        m[h] = s->max[0][q];
#pragma unroll
        for (int i = 1; i < WARPS; i++)
            m[h] = fmaxf(m[h], s->max[i][q]);
        if (warp == 0 && t2 == 0)
            out->ml[q].x = m[h];
        *(uint32_t *)&s->p[q][warp * 8 + t2] =
            tlc_pack_half(tlc_weight(c[2 * h], m[h]), tlc_weight(c[2 * h + 1], m[h]));
    }
    __syncthreads();
#pragma unroll
    for (int kk = 0; kk < 4; kk++)
        tlc_ldmatrix(p[kk], p_at + kk * 32);
#pragma unroll
    for (int n = warp; n < D / 8; n += WARPS) {
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int kk = 0; kk < 2; kk++) {
            uint32_t b[4];
            tlc_ldmatrix_t(b, v_at + (unsigned)(kk * 32 * (D + 8) + n * 8) * 2);
            tlc_mma_f16(acc, p[2 * kk], b[0], b[1]);
            tlc_mma_f16(acc, p[2 * kk + 1], b[2], b[3]);
        }
        *(float2 *)&out->acc[g][n * 8 + t2] = make_float2(acc[0], acc[1]);
        *(float2 *)&out->acc[g + 8][n * 8 + t2] = make_float2(acc[2], acc[3]);
    }
    if (warp == WARPS - 1) {
        float l[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int kk = 0; kk < 4; kk++)
            tlc_mma_f16(l, p[kk], TLC_ONES, TLC_ONES);
        if (t2 == 0) {
            out->ml[g].y = l[0];
            out->ml[g + 8].y = l[2];
        }
    }
}

/* The output is 8 * D pairs of floats; this block has pair (i * cluster + rank) * THREADS + thread, i = 0, 1, ... */
template <int D> struct result {
    enum { N = 8 * D <= THREADS ? 1 : 8 * D / THREADS };
    float m[N], l[N];
    float2 o[N];
};

static __device__ __forceinline__ int pair_of(int cluster, int rank, int i)
{
    return (i * cluster + rank) * THREADS + (int)threadIdx.x;
}

template <int D>
static __device__ __forceinline__ void start(struct result<D> *r, const struct tlc_attn_args *a, const struct work *w)
{
#pragma unroll
    for (int i = 0; i < r->N; i++) {
        int p = pair_of(a->cluster, w->rank, i), q = p / (D / 2);
        r->m[i] = tlc_minus_inf();
        r->l[i] = 0.0f;
        r->o[i] = make_float2(0.0f, 0.0f);
        for (int j = 0; j < w->x.terms && q < w->n_q; j++) { /* of common pages; the item has one row */
            const float *term = tlc_stored_term<D>(a, w->x.term0 + j, w->head0 + q);
            float2 acc = *(const float2 *)(term + p % (D / 2) * 2);
            float e0, e1;
            tlc_fold(&r->m[i], &r->l[i], term[D], term[D + 1], &e0, &e1);
            r->o[i].x = tlc_fold_o(r->o[i].x, acc.x, e0, e1);
            r->o[i].y = tlc_fold_o(r->o[i].y, acc.y, e0, e1);
        }
    }
}

/* Take in the n terms of a round, of ranks 0 .. n - 1. */
template <int D>
static __device__ __forceinline__ void fold(struct result<D> *r, const struct tlc_attn_args *a, const struct work *w,
                                            int stage, int n)
{
    struct shared_data<D> *s = (struct shared_data<D> *)tlc_shared();
#pragma unroll
    for (int i = 0; i < r->N; i++) {
        int p = pair_of(a->cluster, w->rank, i), q = p / (D / 2), col = p % (D / 2) * 2;
        float e0, e1;
        if (q >= w->n_q)
            continue;
        if (a->cluster == 1) {
            const struct term<D> *t = &s->term[stage];
            float2 acc = *(const float2 *)&t->acc[q][col];
            tlc_fold(&r->m[i], &r->l[i], t->ml[q].x, t->ml[q].y, &e0, &e1);
            r->o[i].x = tlc_fold_o(r->o[i].x, acc.x, e0, e1);
            r->o[i].y = tlc_fold_o(r->o[i].y, acc.y, e0, e1);
            continue;
        }
#pragma unroll 1
        for (int first = 0; first < n; first += 8) { /* far loads together, then the chain */
            float2 ml[8], acc[8];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                struct tlc_far t = tlc_far_at(&s->term[stage], min(first + j, n - 1));
                ml[j] = tlc_far_load(t, (int)offsetof(struct term<D>, ml) + q * 8);
                acc[j] = tlc_far_load(t, (q * (D + 8) + col) * 4);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (first + j >= n)
                    break;
                tlc_fold(&r->m[i], &r->l[i], ml[j].x, ml[j].y, &e0, &e1);
                r->o[i].x = tlc_fold_o(r->o[i].x, acc[j].x, e0, e1);
                r->o[i].y = tlc_fold_o(r->o[i].y, acc[j].y, e0, e1);
            }
        }
    }
}

template <int D>
static __device__ __forceinline__ void finish(const struct result<D> *r, const struct tlc_attn_args *a,
                                              const struct work *w)
{
#pragma unroll
    for (int i = 0; i < r->N; i++) {
        int p = pair_of(a->cluster, w->rank, i), q = p / (D / 2), col = p % (D / 2) * 2;
        if (q >= w->n_q)
            continue;
        float inv = __fdiv_rn(1.0f, r->l[i]);
        int64_t row = w->entries[q / w->heads].place, head = w->head0 + q % w->heads;
        *(float2 *)(a->att + (row * a->n_heads + head) * D + col) =
            make_float2(tlc_fold_end(r->o[i].x, inv), tlc_fold_end(r->o[i].y, inv));
    }
}

static __device__ __forceinline__ void meet(int cluster)
{
    if (cluster > 1)
        tlc_cluster_sync();
    else
        __syncthreads();
}

template <int D>
static __device__ __forceinline__ void run_item(const struct tlc_attn_args *a, const struct work *w, bool first_item)
{
    struct result<D> r;
    int n_blocks = w->x.block1 - w->x.block0;
    int mine = (n_blocks - w->rank + a->cluster - 1) / a->cluster; /* rounds with a page of this block */
    bool late[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        late[i] = i < mine && first_item && !early(w, block_of(w, a->cluster, i));
        if (i < mine && !late[i])
            fetch<D>(a, w, i);
        tlc_copy_commit();
    }
    if (a->fused && w->x.n == 1)
        fetch_tables<D>(a, w);
    __syncthreads();
    if (first_item)
        tlc_wait();
    if (late[0] || late[1]) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (late[i])
                fetch<D>(a, w, i);
        tlc_copy_commit();
    }
    start<D>(&r, a, w);
    if (mine > 0)
        ready_heads<D>(a, w);
    for (int round = 0; round < w->rounds; round++) {
        int block = block_of(w, a->cluster, round);
        if (round < mine) {
            if (late[0] || late[1] || round + 1 >= mine)
                tlc_copy_wait<0>();
            else
                tlc_copy_wait<1>();
            if (w->owner && block == w->x.block1 - 1)
                put_own<D>(w, round & 1);
            __syncthreads();
            make_term<D>(a, w, block, round & 1);
        }
        meet(a->cluster);
        if (round + 2 < mine)
            fetch<D>(a, w, round + 2);
        tlc_copy_commit();
        fold<D>(&r, a, w, round & 1, min(a->cluster, n_blocks - round * a->cluster));
    }
    finish<D>(&r, a, w);
    if (a->cluster > 1) { /* others may still read this block's terms */
        tlc_cluster_arrive();
        tlc_cluster_wait();
    } else {
        __syncthreads();
    }
}

template <int D> __global__ void __launch_bounds__(THREADS, D <= 128 ? 2 : 1) short_kernel(struct tlc_attn_args a)
{
    int rank = (int)blockIdx.x % a.cluster, item = (int)blockIdx.x / a.cluster, n = a.plan->n[TLC_SEG_OWN];
    bool first = true;
    tlc_go();
    for (; item < n; item += (int)gridDim.x / a.cluster) {
        struct work w = work_of(&a, item, rank);
        run_item<D>(&a, &w, first);
        first = false;
    }
    if (first)
        tlc_wait();
}

/* ---- host ---- */

template <int D> static cudaError_t allow() { return tlc_attn_allow(short_kernel<D>, sizeof(struct shared_data<D>)); }

template <int D> static cudaError_t launch(const struct tlc_launch *l, const struct tlc_attn_args *a, dim3 grid)
{
    return tlc_launch_cluster(l, short_kernel<D>, a->cluster, grid, dim3(THREADS), sizeof(struct shared_data<D>), *a);
}

#define BYTES(D)  sizeof(struct shared_data<D>)
#define ALLOW(D)  allow<D>()
#define LAUNCH(D) launch<D>(l, &a, grid)

size_t tlc_attn_short_bytes(int d) { return TLC_BY_WIDTH(d, BYTES); }

cudaError_t tlc_attn_short_init(int d) { return TLC_BY_WIDTH(d, ALLOW); }

cudaError_t tlc_attn_short(const struct tlc_launch *l, struct tlc_attn_args a, int items)
{
    a.heads = tlc_tile_heads(a.per_row, TLC_TILE_Q);
    a.head_tiles = (a.per_row + a.heads - 1) / a.heads;
    dim3 grid((unsigned)(items * a.cluster), (unsigned)(a.n_kv_heads * a.head_tiles));
    return TLC_BY_WIDTH(a.finish.d, LAUNCH);
}
