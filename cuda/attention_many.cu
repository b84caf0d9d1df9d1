/* Attention of single rows of many sequences, as in decode of a batch: a block per row and kv head, at most 8 queries.
 * There, reading K and V once is what takes time, so pages must be on their way all the time:
 *
 * Three pairs of warps take the pages of the row in turns, each with room for one page of its own. A pair waits for
 * nothing but its page, and asks for its next one as soon as it has read it. Terms are folded in order by handing the
 * state (M, L, O) from pair to pair. Inside a page the work is that of attention_row.cu: queries are the 8 columns of
 * the products, a warp has the scores of 32 keys and half of the columns of the values.
 *
 * Outputs are made ready for the product behind by a kernel of their own. Blocks of a row that do it here, as a cluster that shares
 * its largest value, save 2 us, but clusters leave multiprocessors without a block: the last 2 of 64 rows began when all others had
 * ended, 13 us later. */
#include "attention_heads.cuh"

#define PAIRS   3
#define THREADS (64 * PAIRS)
#define WARPS   (THREADS / 32)

template <int D> struct shared_data {
    __half k[PAIRS][TLC_PAGE][D], v[PAIRS][TLC_PAGE][D]; /* pieces of 16 bytes exchanged: see piece() */
    __half q[TLC_ROW_Q][D + 8];
    __half k_new[D], v_new[D]; /* of the row itself */
    float4 scores[PAIRS][2][2][32];
    float4 o[D / 32][64];    /* the state that is handed on: [fragment][thread of the pair] */
    float2 ml[2][TLC_ROW_Q]; /* M and L of pages in turns */
};

struct work {
    struct tlc_attn_item x;
    const int32_t *pages;
    int kv, head0, n_q;
};

static __device__ __forceinline__ int lane_id() { return (int)threadIdx.x & 31; }
static __device__ __forceinline__ int warp_id() { return (int)threadIdx.x / 32; }
static __device__ __forceinline__ int pair_id() { return (int)threadIdx.x / 64; }
template <int D> static __device__ __forceinline__ struct shared_data<D> *shared_of() {
    return (struct shared_data<D> *)tlc_shared();
}

/* Byte of piece c (16 bytes) of row r of a page: one piece of 8 successive rows covers all banks. */
template <int D>
static __device__ __forceinline__ unsigned piece(int r, int c)
{
    return (unsigned)(r * D * 2 + ((c ^ (r & 7)) << 4));
}

/* ---- pages ---- */

template <int D>
static __device__ __forceinline__ const __half *page_at(const struct tlc_attn_args *a, const struct work *w, int block)
{
    return tlc_page_k<const __half>(&a->step, w->pages[block], w->kv, D);
}

/* Keys or values (part 0 or 1) of this pair's next page. Those of keys that the row does not see become zeros; its own is put in its
 * place later. */
template <int D>
static __device__ __forceinline__ void fetch(const struct tlc_attn_args *a, const struct work *w, int block, int part)
{
    struct shared_data<D> *s = shared_of<D>();
    const __half *from = page_at<D>(a, w, block) + part * (int64_t)a->n_kv_heads * TLC_PAGE * D;
    unsigned to = tlc_shared_address(part ? s->v[pair_id()] : s->k[pair_id()]);
    int own = a->fused ? w->x.pos : -1;
#pragma unroll
    for (int i = 0; i < TLC_PAGE * D / 8 / 64; i++) {
        int c = ((int)threadIdx.x & 63) + 64 * i, row = c / (D / 8), key = block * TLC_PAGE + row;
        if (key != own)
            tlc_copy16(to + piece<D>(row, c % (D / 8)), from + c * 8, key >= w->x.lo && key <= w->x.pos);
    }
    tlc_copy_commit();
}

/* Not all keys that are read of this page are of earlier steps. */
static __device__ __forceinline__ bool late(const struct tlc_attn_args *a, const struct work *w, int block)
{
    return min((block + 1) * TLC_PAGE, w->x.pos + (a->fused ? 0 : 1)) > w->x.safe;
}

/* The row's own key and value into their page. */
template <int D> static __device__ __forceinline__ void put_own(const struct work *w)
{
    struct shared_data<D> *s = shared_of<D>();
    int t = (int)threadIdx.x & 63, c = t % (D / 8);
    if (t < D / 4)
        *(uint4 *)((uint8_t *)(t < D / 8 ? s->k[pair_id()] : s->v[pair_id()]) + piece<D>(w->x.pos % TLC_PAGE, c)) =
            *(const uint4 *)&(t < D / 8 ? s->k_new : s->v_new)[c * 8];
}

/* ---- the heads of the row: the queries, then its own k, then v ---- */

static __device__ __forceinline__ int number_of(const struct tlc_attn_args *a, const struct work *w, int task)
{
    return task < w->n_q ? w->head0 + task : a->n_heads + (task > w->n_q ? a->n_kv_heads : 0) + w->kv;
}

/* Where a head comes from and goes to. */
struct head_way {
    const float *from; /* this lane's first value */
    __half *to, *page; /* page: of k and v */
};

/* Found out before the kernel in front has ended; asked for, if in vain, so that it is. */
template <int D>
static __device__ __forceinline__ struct head_way way_of(const struct tlc_attn_args *a, const struct work *w, int task)
{
    struct shared_data<D> *s = shared_of<D>();
    struct head_way y = {};
    y.from = a->qkv + w->x.place * a->ld + number_of(a, w, task) * D + lane_id();
    y.to = task < w->n_q ? s->q[task] : task > w->n_q ? s->v_new : s->k_new;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(y.from) : "memory");
    if (task >= w->n_q) {
        y.page = tlc_page_k<__half>(&a->step, w->pages[w->x.pos / TLC_PAGE], w->kv, D) + w->x.pos % TLC_PAGE * D +
                 (task > w->n_q ? (int64_t)a->n_kv_heads * TLC_PAGE * D : 0);
        asm volatile("prefetch.global.L2 [%0];" ::"l"(y.page) : "memory");
    }
    return y;
}

template <int D>
static __device__ __forceinline__ void ready_head(const struct tlc_attn_args *a, const struct work *w,
                                                  const struct tlc_head<D> *h, const struct head_way *y, int task)
{
    tlc_head_take_from<D>(a, h, y->from, task <= w->n_q, y->to, y->page, nullptr);
}

/* ---- the term of a page, by a pair of warps ---- */

/* acc: [16 columns of the values][8 queries] fragments of this warp's half; of queries t2 and t2 + 1 also m and l. */
template <int D> struct term {
    float acc[D / 32][4];
    float m[2], l[2];
};

/* next: the page that this pair has after this one; its keys are asked for as soon as these have been read. */
template <int D>
static __device__ __forceinline__ void make_term(struct term<D> *out, const struct tlc_attn_args *a,
                                                 const struct work *w, int block, int next)
{
    struct shared_data<D> *s = shared_of<D>();
    int half = warp_id() & 1, lane = lane_id(), g = lane / 4;
    int k_row = half * 32 + (lane & 15), v_row = (lane >> 4) * 8 + (lane & 7);
    unsigned q_at = tlc_at_k(tlc_shared_address(s->q), lane, D + 8);
    unsigned k_at = tlc_shared_address(s->k[pair_id()]), v_at = tlc_shared_address(s->v[pair_id()]);
    float c[2][4] = {}, all[4][4], l[4] = {};
    uint32_t p[4][2];
    const uint32_t ones[4] = {TLC_ONES, TLC_ONES, TLC_ONES, TLC_ONES};
#pragma unroll
    for (int kk = 0; kk < D / 32; kk++) {
        uint32_t q[4];
        tlc_ldmatrix(q, q_at + kk * 64);
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t k[4];
                tlc_ldmatrix(k, k_at + piece<D>(k_row + i * 16, (2 * kk + h) * 2 + (lane >> 4)));
                tlc_mma_f16(c[i], k, q[2 * h], q[2 * h + 1]);
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
        s->scores[pair_id()][half][i][lane] = make_float4(c[i][0], c[i][1], c[i][2], c[i][3]);
    }
    tlc_meet_pair();
    if (next < w->x.block1)
        fetch<D>(a, w, next, 0);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float4 x = s->scores[pair_id()][i / 2][i % 2][lane];
        all[i][0] = x.x, all[i][1] = x.y, all[i][2] = x.z, all[i][3] = x.w;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) { /* over the keys of this lane, then over g */
        float m = fmaxf(all[0][j], all[0][2 + j]);
#pragma unroll
        for (int i = 1; i < 4; i++)
            m = fmaxf(m, fmaxf(all[i][j], all[i][2 + j]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 4));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 8));
        out->m[j] = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 16));
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        p[i / 2][i % 2] = tlc_transpose(tlc_pack_half(tlc_weight(all[i / 2][i % 2 * 2], out->m[0]),
                                                      tlc_weight(all[i / 2][i % 2 * 2 + 1], out->m[1])));
#pragma unroll
    for (int i = 0; i < 4; i++)
        tlc_mma_f16(l, ones, p[i][0], p[i][1]);
    out->l[0] = l[0];
    out->l[1] = l[1];
#pragma unroll
    for (int n = 0; n < D / 32; n++) {
        uint32_t v[4][4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            out->acc[n][j] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++)
            tlc_ldmatrix_t(v[i], v_at + piece<D>(i * 16 + v_row, half * (D / 16) + n * 2 + (lane >> 3 & 1)));
#pragma unroll
        for (int i = 0; i < 4; i++)
            tlc_mma_f16(out->acc[n], v[i], p[i][0], p[i][1]);
    }
}

/* ---- the fold: threads of all pairs have the same queries and columns ---- */

template <int D> struct state {
    float o[D / 32][4]; /* as term.acc */
    float m[2], l[2];
};

template <int D> static __device__ __forceinline__ void fold(struct state<D> *z, const struct term<D> *x)
{
    float e0[2], e1[2];
#pragma unroll
    for (int j = 0; j < 2; j++)
        tlc_fold(&z->m[j], &z->l[j], x->m[j], x->l[j], &e0[j], &e1[j]);
#pragma unroll
    for (int i = 0; i < D / 8; i++)
        z->o[i / 4][i % 4] = tlc_fold_o(z->o[i / 4][i % 4], x->acc[i / 4][i % 4], e0[i % 2], e1[i % 2]);
}

template <int D> static __device__ __forceinline__ struct state<D> nothing() {
    struct state<D> z = {
    };
    z.m[0] = z.m[1] = tlc_minus_inf();
    return z;
}

/* Column of fragment n's values 0 and 1 in this thread; values 2 and 3 are 8 further. */
template <int D>
static __device__ __forceinline__ int column(int n)
{
    return (warp_id() & 1) * (D / 2) + n * 16 + lane_id() / 4;
}

/* The state after page `block` to the pair of the next one, and from the pair of the one before. */
template <int D> static __device__ __forceinline__ void hand_on(const struct state<D> *z, int block)
{
    struct shared_data<D> *s = shared_of<D>();
    int lane = lane_id(), t = (int)threadIdx.x & 63;
#pragma unroll
    for (int n = 0; n < D / 32; n++)
        s->o[n][t] = make_float4(z->o[n][0], z->o[n][1], z->o[n][2], z->o[n][3]);
    if (t < 4)
        *(float4 *)&s->ml[block & 1][lane * 2] = make_float4(z->m[0], z->l[0], z->m[1], z->l[1]);
    tlc_meet_give(PAIRS + 1 + (pair_id() + 1) % PAIRS, 128);
}
template <int D> static __device__ __forceinline__ struct state<D> take_over(int block) {
    struct shared_data<D> *s = shared_of<D>();
    struct state<D> z;
    tlc_meet_take(PAIRS + 1 + pair_id(), 128);
#pragma unroll
    for (int n = 0; n < D / 32; n++) {
        float4 o = s->o[n][threadIdx.x & 63];
        z.o[n][0] = o.x, z.o[n][1] = o.y, z.o[n][2] = o.z, z.o[n][3] = o.w;
    }
    float4 ml = *(const float4 *)&s->ml[block & 1][lane_id() % 4 * 2];
    z.m[0] = ml.x, z.l[0] = ml.y, z.m[1] = ml.z, z.l[1] = ml.w;
    return z;
}

/* The outputs, [query][D] */
template <int D>
static __device__ __forceinline__ void put_out(const struct state<D> *z, float *to, int n_q)
{
    int t2 = lane_id() % 4 * 2;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float inv = __fdiv_rn(1.0f, z->l[j]);
        if (t2 + j >= n_q)
            continue;
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            to[(t2 + j) * D + column<D>(i / 2) + i % 2 * 8] = tlc_fold_end(z->o[i / 2][i % 2 * 2 + j], inv);
    }
}

/* ---- the kernel ---- */

/* Fills *out in the pair that comes last, and returns whether this one did. */
template <int D>
static __device__ __forceinline__ bool run_item(struct state<D> *out, const struct tlc_attn_args *a,
                                                const struct work *w)
{
    struct shared_data<D> *s = shared_of<D>();
    struct tlc_head<D> h;
    struct head_way y;
    int block = w->x.block0 + pair_id(), task = warp_id(), tasks = w->n_q + (a->fused ? 2 : 0);
    bool ready = block < w->x.block1 && !late(a, w, block);
    if (ready) {
        fetch<D>(a, w, block, 0);
        fetch<D>(a, w, block, 1);
    }
    if (task < tasks) {
        h = tlc_head_of<D>(a, number_of(a, w, task), w->x.pos);
        y = way_of<D>(a, w, task);
    }
    for (int i = w->n_q * D + (int)threadIdx.x; i < TLC_ROW_Q * D; i += THREADS)
        s->q[i / D][i % D] = __float2half_rn(0.0f);
    tlc_wait();
    if (task < tasks)
        ready_head<D>(a, w, &h, &y, task);
    for (task += WARPS; task < tasks; task += WARPS) {
        h = tlc_head_of<D>(a, number_of(a, w, task), w->x.pos);
        y = way_of<D>(a, w, task);
        ready_head<D>(a, w, &h, &y, task);
    }
    if (block < w->x.block1 && !ready) {
        fetch<D>(a, w, block, 0);
        fetch<D>(a, w, block, 1);
    }
    __syncthreads();
    for (; block < w->x.block1; block += PAIRS) {
        struct term<D> x;
        struct state<D> z = nothing<D>();
        tlc_copy_wait<0>();
        if (a->fused && block + 1 == w->x.block1)
            put_own<D>(w);
        tlc_meet_pair();
        make_term<D>(&x, a, w, block, block + PAIRS);
        tlc_meet_pair(); /* both have read the page */
        if (block + PAIRS < w->x.block1)
            fetch<D>(a, w, block + PAIRS, 1);
        if (block > w->x.block0)
            z = take_over<D>(block - 1);
        fold<D>(&z, &x);
        if (block + 1 < w->x.block1) {
            hand_on<D>(&z, block);
        } else {
            *out = z;
            return true;
        }
    }
    return false;
}

template <int D> __global__ void __launch_bounds__(THREADS, 2) many_kernel(struct tlc_attn_args a)
{
    struct work w;
    struct state<D> z;
    int item = (int)blockIdx.x / a.n_kv_heads;
    tlc_go();
    if (item >= a.plan->n[TLC_SEG_ROW]) { /* all of its blocks */
        tlc_wait();
        return;
    }
    w.x = tlc_plan_items(a.plan)[a.plan->first[TLC_SEG_ROW] + item];
    w.pages = tlc_page_table(&a.step, w.x.seq, a.slot);
    w.kv = (int)blockIdx.x % a.n_kv_heads;
    w.head0 = w.kv * a.per_row;
    w.n_q = a.per_row;
    if (run_item<D>(&z, &a, &w))
        put_out<D>(&z, a.att + ((int64_t)w.x.place * a.n_heads + w.head0) * D, w.n_q);
}

/* ---- host ---- */

size_t tlc_attn_many_bytes(int d) { return d == 64 ? sizeof(struct shared_data<64>) : sizeof(struct shared_data<128>); }

cudaError_t tlc_attn_many_init(int d)
{
    return d == 64 ? tlc_attn_allow(many_kernel<64>, sizeof(struct shared_data<64>))
                   : tlc_attn_allow(many_kernel<128>, sizeof(struct shared_data<128>));
}

cudaError_t tlc_attn_many(const struct tlc_launch *l, struct tlc_attn_args a, int items)
{
    dim3 grid((unsigned)(items * a.n_kv_heads)), block(THREADS);
    return a.finish.d == 64 ? tlc_launch(l, many_kernel<64>, grid, block, sizeof(struct shared_data<64>), a)
                            : tlc_launch(l, many_kernel<128>, grid, block, sizeof(struct shared_data<128>), a);
}
