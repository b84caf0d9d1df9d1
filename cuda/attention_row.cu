/* Attention of single rows, as in decode: at most 8 queries of one kv head, up to 4 pages of it side by side per block,
 * and more over the blocks of a cluster.
 *
 * Two warps work on a page: each has the scores of 32 keys and half of the columns of the values. Queries are the 8
 * columns of the products, so keys are their rows: S^T = K Q^T, O^T = V^T P^T. Pages of earlier steps, and the first
 * one's keys even in registers, are there before tlc_wait(); behind it lie the finish of the heads, the products, and
 * the fold. A short call waits for its first page: between the plan's item and that there is one product, and no division. */
#include "attention_heads.cuh"

#include <stddef.h>

#define THREADS 256
#define WARPS   (THREADS / 32)

#define PAGES(D) ((D) <= 128 ? 4 : 2) /* most pages of a block in one round */
#define TERMS(D) (PAGES(D) << TLC_CLUSTER_LOG2)

template <int D> struct term {
    float acc[TLC_ROW_Q][D + 4];
    float2 ml[TLC_ROW_Q];
};

/* The small part of a block's shared memory; behind it lie the pages. */
template <int D> struct shared_data {
    __half q[TLC_ROW_Q][D + 8];
    __half k_new[D], v_new[D]; /* of the row itself */
    float work[WARPS][D];
    float4 scores[PAGES(D)][2][2][32];
    struct term<D> term[PAGES(D)];
    /* of all blocks of a cluster: */
    uint64_t inbox;
    float2 ml[TERMS(D)][TLC_ROW_Q];
    float2 acc[PAGES(D) * (TLC_ROW_Q * D / 2 + TLC_CLUSTER_LEFT)]; /* [terms of a round][pairs of this block] */
    float4 weights[TLC_ROW_Q][TERMS(D)];                           /* e0, e1, l */
};
template <int D> struct page_data {
    __half k[TLC_PAGE][D + 8], v[TLC_PAGE][D + 8];
};

struct work {
    struct tlc_attn_item x;
    const int32_t *pages;
    int kv, head0, n_q;
    int rank, step; /* this block's place in the cluster; pages of a round of the cluster */
    int rounds;
    int mine;   /* of them, those that this warp has a page in */
    int block;  /* this warp's page in the first of them */
    bool home;  /* this block finishes the row's own k and v */
    bool owner; /* and this warp's last page is theirs */
};

static __device__ __forceinline__ int lane_id() { return (int)threadIdx.x & 31; }
static __device__ __forceinline__ int warp_id() { return (int)threadIdx.x / 32; }

template <int D> static __device__ __forceinline__ struct shared_data<D> *shared_of() {
    return (struct shared_data<D> *)tlc_shared();
} template <int D> static __device__ __forceinline__ struct page_data<D> *page_of() {
    return (struct page_data<D> *)(tlc_shared() + sizeof(struct shared_data<D>)) + warp_id() / 2;
}

static __device__ __forceinline__ struct work
work_of(const struct tlc_attn_args *a, int item, int rank)
{
    struct work w;
    int pair = warp_id() / 2, first = (rank << a->page_bits) + pair, last, full;
    w.x = tlc_plan_items(a->plan)[a->plan->first[TLC_SEG_ROW] + item];
    w.pages = tlc_page_table(&a->step, w.x.seq, a->slot);
    w.kv = (int)blockIdx.y;
    w.head0 = w.kv * a->per_row;
    w.n_q = a->per_row;
    w.rank = rank;
    w.step = a->cluster << a->page_bits;
    last = w.x.block1 - 1 - w.x.block0;
    full = (int)((uint64_t)(uint32_t)last * a->step_inverse >> 31);
    last -= full * w.step; /* the last page's place in its round */
    w.rounds = full + 1;
    w.block = w.x.block0 + first;
    w.mine = pair < 1 << a->page_bits ? full + (first <= last) : 0;
    w.home = a->fused && last >> a->page_bits == rank;
    w.owner = a->fused && w.mine > 0 && first == last;
    return w;
}

template <int D>
static __device__ __forceinline__ void fetch(const struct tlc_attn_args *a, const struct work *w, int block)
{
    struct page_data<D> *p = page_of<D>();
    struct tlc_keys keys = {w->x.lo, w->x.pos + 1, a->fused ? w->x.pos : -1};
    tlc_page_copy<D, 64>(tlc_shared_address(p->k), tlc_shared_address(p->v),
                         tlc_page_k<const __half>(&a->step, w->pages[block], w->kv, D),
                         (int64_t)a->n_kv_heads * TLC_PAGE * D, block, keys, (int)threadIdx.x & 63);
    tlc_copy_commit();
}

/* Not all keys that are read of this page are of earlier steps. */
static __device__ __forceinline__ bool late(const struct tlc_attn_args *a, const struct work *w, int block)
{
    return min((block + 1) * TLC_PAGE, w->x.pos + (a->fused ? 0 : 1)) > w->x.safe;
}

/* ---- operands of the products ---- */

/* Keys of this warp: 2 tiles of 16. The row's own key lies apart: lanes that want it read it there. */
template <int D> struct keys {
    enum { KEEP = D <= 128, STEPS = D / 16 };
    uint32_t a[KEEP ? 2 : 1][KEEP ? STEPS : 1][4];
};

/* Shared address of this lane's row of the A operand of keys [key, key + 16), at d = 0. */
template <int D> static __device__ __forceinline__ unsigned k_address(int key, int own)
{
    int row = key + (lane_id() & 15), col = (lane_id() >> 4) * 8;
    return tlc_shared_address(row == own ? &shared_of<D>()->k_new[col] : &page_of<D>()->k[row][col]);
}
/* And of V^T: columns [0, 16) of d, keys [key, key + 16), transposed. */
template <int D> static __device__ __forceinline__ unsigned v_address(int key, int own)
{
    int row = key + (lane_id() >> 4) * 8 + (lane_id() & 7), col = (lane_id() >> 3 & 1) * 8;
    return tlc_shared_address(row == own ? &shared_of<D>()->v_new[col] : &page_of<D>()->v[row][col]);
}

/* only: of 16 keys from there on; -1 = of all */
template <int D> static __device__ __forceinline__ void load_keys(struct keys<D> *k, int own, int only)
{
    if (!k->KEEP)
        return;
#pragma unroll
    for (int i = 0; i < (int)(sizeof(k->a) / sizeof(k->a[0])); i++) {
        int key = (warp_id() & 1) * 32 + i * 16;
        if (only >= 0 && only / 16 != key / 16)
            continue;
        unsigned at = k_address<D>(key, own);
#pragma unroll
        for (int s = 0; s < (int)(sizeof(k->a[0]) / sizeof(k->a[0][0])); s++)
            tlc_ldmatrix(k->a[i][s], at + s * 32);
    }
}

/* ---- the heads of the row ---- */

/* Tasks: the query heads, then the row's own k, then v. */
static __device__ __forceinline__ int number_of(const struct tlc_attn_args *a, const struct work *w, int task)
{
    return task < w->n_q ? w->head0 + task : a->n_heads + (task > w->n_q ? a->n_kv_heads : 0) + w->kv;
}

template <int D>
static __device__ __forceinline__ void ready_head(const struct tlc_attn_args *a, const struct work *w,
                                                  const struct tlc_head<D> *h, int task)
{
    struct shared_data<D> *s = shared_of<D>();
    __half *page = nullptr;
    if (task >= w->n_q)
        page = tlc_page_k<__half>(&a->step, w->pages[w->x.pos / TLC_PAGE], w->kv, D) + w->x.pos % TLC_PAGE * D +
               (task > w->n_q ? (int64_t)a->n_kv_heads * TLC_PAGE * D : 0);
    tlc_head_take<D>(a, h, w->x.place, number_of(a, w, task),
                     task < w->n_q   ? s->q[task]
                     : task > w->n_q ? s->v_new
                                     : s->k_new,
                     page, s->work[warp_id()]);
}

/* ---- the term of a page, by its two warps ---- */

/* Values of all keys for some tiles of 16 of this warp's columns */
template <int D> struct values {
    enum { TILES = D % 64 ? 1 : 2 };
    uint32_t a[TILES][4][4];
};
template <int D> static __device__ __forceinline__ void load_values(struct values<D> *v, int tile, int own)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        unsigned at = v_address<D>(i * 16, own) + (unsigned)((warp_id() & 1) * (D / 2) + tile * 16) * 2;
#pragma unroll
        for (int j = 0; j < v->TILES; j++)
            tlc_ldmatrix_t(v->a[j][i], at + j * 32);
    }
}

template <int D>
static __device__ __forceinline__ void make_term(const struct tlc_attn_args *a, const struct work *w, struct keys<D> *k,
                                                 int block, int own)
{
    struct shared_data<D> *s = shared_of<D>();
    struct term<D> *out = &s->term[warp_id() / 2];
    int half = warp_id() & 1, lane = lane_id(), g = lane / 4, t2 = lane % 4 * 2;
    unsigned q_at = tlc_at_k(tlc_shared_address(s->q), lane, D + 8);
    unsigned k_at[2] = {k_address<D>(half * 32, own), k_address<D>(half * 32 + 16, own)};
    float c[2][4] = {}, all[4][4], m[2], l[4] = {};
    uint32_t p[4][2];
    struct values<D> v;
#pragma unroll
    for (int kk = 0; kk < D / 32; kk++) {
        uint32_t q[4];
        tlc_ldmatrix(q, q_at + kk * 64);
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t far[4];
                if (!k->KEEP)
                    tlc_ldmatrix(far, k_at[i] + (2 * kk + h) * 32);
                tlc_mma_f16(c[i], k->KEEP ? k->a[k->KEEP ? i : 0][k->KEEP ? 2 * kk + h : 0] : far, q[2 * h],
                            q[2 * h + 1]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int key = block * TLC_PAGE + half * 32 + i * 16 + g + j / 2 * 8;
            c[i][j] = key >= w->x.lo && key <= w->x.pos ? __fmul_rn(c[i][j], a->scale) : tlc_minus_inf();
        }
        s->scores[warp_id() / 2][half][i][lane] = make_float4(c[i][0], c[i][1], c[i][2], c[i][3]);
    }
    load_values<D>(&v, 0, own); /* on their way while the scores are exchanged */
    tlc_meet_pair();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float4 x = s->scores[warp_id() / 2][i / 2][i % 2][lane];
        all[i][0] = x.x, all[i][1] = x.y, all[i][2] = x.z, all[i][3] = x.w;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) { /* queries t2 + j: over the keys of this lane, then over g */
        m[j] = fmaxf(all[0][j], all[0][2 + j]);
#pragma unroll
        for (int i = 1; i < 4; i++)
            m[j] = fmaxf(m[j], fmaxf(all[i][j], all[i][2 + j]));
        m[j] = fmaxf(m[j], __shfl_xor_sync(0xffffffffu, m[j], 4));
        m[j] = fmaxf(m[j], __shfl_xor_sync(0xffffffffu, m[j], 8));
        m[j] = fmaxf(m[j], __shfl_xor_sync(0xffffffffu, m[j], 16));
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        p[i / 2][i % 2] = tlc_transpose(
            tlc_pack_half(tlc_weight(all[i / 2][i % 2 * 2], m[0]), tlc_weight(all[i / 2][i % 2 * 2 + 1], m[1])));
    if (half == 0) {
        const uint32_t ones[4] = {TLC_ONES, TLC_ONES, TLC_ONES, TLC_ONES};
#pragma unroll
        for (int i = 0; i < 4; i++)
            tlc_mma_f16(l, ones, p[i][0], p[i][1]);
        if (g == 0) {
            out->ml[t2] = make_float2(m[0], l[0]);
            out->ml[t2 + 1] = make_float2(m[1], l[1]);
        }
    }
#pragma unroll
    for (int n = 0; n < D / 32; n += v.TILES) {
        if (n > 0)
            load_values<D>(&v, n, own);
#pragma unroll
        for (int j = 0; j < v.TILES; j++) {
            float acc[4] = {}, *to = &out->acc[t2][half * (D / 2) + (n + j) * 16 + g];
#pragma unroll
            for (int i = 0; i < 4; i++)
                tlc_mma_f16(acc, v.a[j][i], p[i][0], p[i][1]);
            to[0] = acc[0];
            to[D + 4] = acc[1];
            to[8] = acc[2];
            to[D + 4 + 8] = acc[3];
        }
    }
}

/* ---- the fold ---- */

/* The output is n_q * D / 2 pairs; thread t of rank r has pair r * share + t + i * THREADS, where share is what comes
 * on a block (on the last one what is left). */
template <int D> struct result {
    enum { N = (TLC_ROW_Q * D / 2 + THREADS - 1) / THREADS };
    float m[N], l[N];
    float2 o[N];
    float top; /* M of query warp_id(), where blocks of a cluster fold together */
};

template <int D> static __device__ __forceinline__ void start(struct result<D> *r)
{
    r->top = tlc_minus_inf();
#pragma unroll
    for (int i = 0; i < r->N; i++) {
        r->m[i] = tlc_minus_inf();
        r->l[i] = 0.0f;
        r->o[i] = make_float2(0.0f, 0.0f);
    }
}

/* Pairs that this block folds */
template <int D> static __device__ __forceinline__ int here(const struct tlc_attn_args *a, const struct work *w)
{
    return max(0, min(a->share, w->n_q * (D / 2) - w->rank * a->share));
}

/* Take in the n terms of this block, alone. */
template <int D> static __device__ __forceinline__ void fold_near(struct result<D> *r, int share, int n)
{
    struct shared_data<D> *s = shared_of<D>();
#pragma unroll
    for (int i = 0; i < r->N; i++) {
        int p = (int)threadIdx.x + i * THREADS, q = p / (D / 2), col = p % (D / 2) * 2;
        float2 ml[PAGES(D)];
        float2 acc[PAGES(D)];
        if (p >= share)
            continue;
#pragma unroll
        for (int j = 0; j < PAGES(D); j++) {
            ml[j] = make_float2(tlc_minus_inf(), 0.0f);
            acc[j] = make_float2(0.0f, 0.0f);
            if (j < n) {
                ml[j] = s->term[j].ml[q];
                acc[j] = *(const float2 *)&s->term[j].acc[q][col];
            }
        }
#pragma unroll
        for (int j = 0; j < PAGES(D); j++) { /* a term that is not there is like a page without visible keys */
            float e0, e1;
            tlc_fold(&r->m[i], &r->l[i], ml[j].x, ml[j].y, &e0, &e1);
            r->o[i].x = tlc_fold_o(r->o[i].x, acc[j].x, e0, e1);
            r->o[i].y = tlc_fold_o(r->o[i].y, acc[j].y, e0, e1);
        }
    }
}

/* The term of this warp and its partner to the blocks that fold it. */
template <int D> static __device__ __forceinline__ void send(const struct tlc_attn_args *a, const struct work *w)
{
    struct shared_data<D> *s = shared_of<D>();
    const struct term<D> *from = &s->term[warp_id() / 2];
    int t = (w->rank << a->page_bits) + warp_id() / 2, thread = (int)threadIdx.x & 63;
#pragma unroll 4
    for (int p = thread; p < w->n_q * (D / 2); p += 64) {
        int rank = p * a->share_inverse >> 20;
        tlc_far_store(&s->acc[t * a->share + p - rank * a->share], &s->inbox, rank,
                      *(const float2 *)&from->acc[p / (D / 2)][p % (D / 2) * 2]);
    }
    for (int rank = thread / TLC_ROW_Q; rank < a->cluster; rank += 64 / TLC_ROW_Q)
        tlc_far_store(&s->ml[t][thread % TLC_ROW_Q], &s->inbox, rank, from->ml[thread % TLC_ROW_Q]);
}

/* Bytes that a block gets in a round of n terms */
template <int D> static __device__ __forceinline__ int sent(const struct tlc_attn_args *a, const struct work *w, int n)
{
    return n * (here<D>(a, w) + TLC_ROW_Q) * 8;
}

/* m and l of a query's terms become e0, e1 and l; by one warp. The largest of any set is exact, so the running maxima
 * can be had in any order. */
template <int D> static __device__ __forceinline__ void weigh(struct result<D> *r, int n)
{
    struct shared_data<D> *s = shared_of<D>();
    int lane = lane_id();
    for (int first = 0; first < n; first += 32) {
        float2 ml = first + lane < n ? s->ml[first + lane][warp_id()] : make_float2(tlc_minus_inf(), 0.0f);
        float top = ml.x, before, sum = 0.0f, e0, e1;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            float y = __shfl_up_sync(0xffffffffu, top, d);
            top = lane >= d ? fmaxf(top, y) : top;
        }
        before = __shfl_up_sync(0xffffffffu, top, 1);
        before = lane > 0 ? fmaxf(before, r->top) : r->top;
        tlc_fold(&before, &sum, ml.x, 0.0f, &e0, &e1);
        if (first + lane < n)
            s->weights[warp_id()][first + lane] = make_float4(e0, e1, ml.y, 0.0f);
        r->top = fmaxf(r->top, __shfl_sync(0xffffffffu, top, 31));
    }
}

template <int D>
static __device__ __forceinline__ void fold_far(struct result<D> *r, const struct tlc_attn_args *a,
                                                const struct work *w, int n)
{
    struct shared_data<D> *s = shared_of<D>();
#pragma unroll
    for (int i = 0; i < r->N; i++) {
        int t = (int)threadIdx.x + i * THREADS, q = (w->rank * a->share + t) / (D / 2);
        if (t >= here<D>(a, w))
            continue;
#pragma unroll 4
        for (int j = 0; j < n; j++) {
            float4 e = s->weights[q][j];
            float2 acc = s->acc[j * a->share + t];
            r->l[i] = __fmaf_rn(e.z, e.y, __fmul_rn(r->l[i], e.x));
            r->o[i].x = tlc_fold_o(r->o[i].x, acc.x, e.x, e.y);
            r->o[i].y = tlc_fold_o(r->o[i].y, acc.y, e.x, e.y);
        }
    }
}

template <int D>
static __device__ __forceinline__ void finish(const struct result<D> *r, const struct tlc_attn_args *a,
                                              const struct work *w)
{
#pragma unroll
    for (int i = 0; i < r->N; i++) {
        int t = (int)threadIdx.x + i * THREADS, p = w->rank * a->share + t;
        if (t >= here<D>(a, w))
            continue;
        float inv = __fdiv_rn(1.0f, r->l[i]);
        *(float2 *)(a->att + ((int64_t)w->x.place * a->n_heads + w->head0) * D + p * 2) =
            make_float2(tlc_fold_end(r->o[i].x, inv), tlc_fold_end(r->o[i].y, inv));
    }
}

/* ---- the kernel ---- */

template <int D> static __device__ __forceinline__ void run_item(const struct tlc_attn_args *a, const struct work *w)
{
    struct shared_data<D> *s = shared_of<D>();
    struct result<D> r;
    struct keys<D> k;
    struct tlc_head<D> h;
    int n_blocks = w->x.block1 - w->x.block0;
    int task = warp_id(), tasks = w->n_q + (w->home ? 2 : 0), own = w->x.pos % TLC_PAGE;
    bool ready = w->mine > 0 && !late(a, w, w->block);
    if (ready)
        fetch<D>(a, w, w->block);
    if (a->cluster > 1) {
        if (threadIdx.x == 0) {
            tlc_inbox_init(&s->inbox);
            tlc_inbox_expect(&s->inbox, sent<D>(a, w, min(n_blocks, w->step)));
        }
        tlc_cluster_arrive();
    }
    if (task < tasks)
        h = tlc_head_of<D>(a, number_of(a, w, task), w->x.pos);
    for (int i = w->n_q * D + threadIdx.x; i < TLC_ROW_Q * D; i += THREADS)
        s->q[i / D][i % D] = __float2half_rn(0.0f);
    if (ready && k.KEEP) {
        tlc_copy_wait<0>();
        tlc_meet_pair();
        load_keys<D>(&k, -1, -1);
    }
    if (a->cluster > 1)
        tlc_cluster_wait(); /* all inboxes are open */
    tlc_wait();
    if (task < tasks)
        ready_head<D>(a, w, &h, task);
    for (task += WARPS; task < tasks; task += WARPS) {
        h = tlc_head_of<D>(a, number_of(a, w, task), w->x.pos);
        ready_head<D>(a, w, &h, task);
    }
    start<D>(&r);
    if (w->mine > 0 && !ready)
        fetch<D>(a, w, w->block);
    __syncthreads();
    for (int round = 0; round < w->rounds; round++) {
        int block = w->block + round * w->step, n = min(n_blocks - round * w->step, w->step);
        if (round < w->mine) {
            int self = w->owner && round + 1 == w->mine ? own : -1;
            if (round > 0 || !ready || !k.KEEP) {
                tlc_copy_wait<0>();
                tlc_meet_pair();
                load_keys<D>(&k, self, -1);
            } else if (self >= 0) {
                load_keys<D>(&k, self, self);
            }
            make_term<D>(a, w, &k, block, self);
            if (a->cluster > 1) {
                tlc_meet_pair();
                send<D>(a, w);
            }
            if (round + 1 < w->mine) {
                tlc_meet_pair(); /* both have read the page */
                fetch<D>(a, w, block + w->step);
            }
        }
        if (a->cluster == 1) {
            __syncthreads();
            fold_near<D>(&r, a->share, n);
            if (round + 1 < w->rounds)
                __syncthreads();
            continue;
        }
        tlc_inbox_wait(&s->inbox, round);
        if (warp_id() < w->n_q)
            weigh<D>(&r, n);
        __syncthreads();
        fold_far<D>(&r, a, w, n);
        if (round + 1 < w->rounds) {
            if (threadIdx.x == 0)
                tlc_inbox_expect(&s->inbox, sent<D>(a, w, min(n_blocks - (round + 1) * w->step, w->step)));
            __syncthreads();
            tlc_cluster_arrive(); /* the terms may be overwritten */
            tlc_cluster_wait();
        }
    }
    finish<D>(&r, a, w);
}

template <int D> __global__ void __launch_bounds__(THREADS, D <= 64 ? 2 : 1) row_kernel(struct tlc_attn_args a)
{
    int rank = tlc_cluster_rank(), item = tlc_cluster_number();
    tlc_go();
    if (item < a.plan->n[TLC_SEG_ROW]) {
        struct work w = work_of(&a, item, rank);
        run_item<D>(&a, &w);
    } else {
        tlc_wait();
    }
}

/* ---- host ---- */

template <int D> static size_t shared_bytes(int pages)
{
    return sizeof(struct shared_data<D>) + (size_t)pages * sizeof(struct page_data<D>);
}

template <int D> static cudaError_t allow(size_t shared_max)
{
    int pages = PAGES(D);
    while (shared_bytes<D>(pages) > shared_max)
        pages /= 2;
    return tlc_attn_allow(row_kernel<D>, shared_bytes<D>(pages));
}

template <int D> static cudaError_t launch(const struct tlc_launch *l, struct tlc_attn_args *a, dim3 grid)
{
    while (1 << a->page_bits > PAGES(D) || shared_bytes<D>(1 << a->page_bits) > l->shared_max)
        a->page_bits--;
    a->share = (a->per_row * (D / 2) + a->cluster - 1) / a->cluster;
    a->share_inverse = ((1 << 20) + a->share - 1) / a->share;
    a->step_inverse = ((1u << 31) - 1) / (uint32_t)(a->cluster << a->page_bits) + 1;
    return tlc_launch_cluster(l, row_kernel<D>, a->cluster, grid, dim3(THREADS), shared_bytes<D>(1 << a->page_bits),
                              *a);
}

#define BYTES(D)  shared_bytes<D>(pages)
#define ALLOW(D)  allow<D>(shared_max)
#define LAUNCH(D) launch<D>(l, &a, grid)

size_t tlc_attn_row_bytes(int d, int pages) { return TLC_BY_WIDTH(d, BYTES); }

cudaError_t tlc_attn_row_init(int d, size_t shared_max) { return TLC_BY_WIDTH(d, ALLOW); }

cudaError_t tlc_attn_row(const struct tlc_launch *l, struct tlc_attn_args a, int items)
{
    dim3 grid((unsigned)(items * a.cluster), (unsigned)a.n_kv_heads);
    return TLC_BY_WIDTH(a.finish.d, LAUNCH);
}
