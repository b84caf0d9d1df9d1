/* Attention of 64 queries of one kv head, 16 per warp, over their pages, for many rows of one sequence; the next page is
 * on its way while one is computed. */
#include "attention_impl.cuh"

#define THREADS 128
#define GROUP   4 /* chains of products that a warp has in flight */

template <int D> struct shared_data {
    __half k[2][TLC_PAGE][D + 8], v[2][TLC_PAGE][D + 8];
    __half q[TLC_LONG_Q][D + 8];
};

struct work {
    struct tlc_attn_item x;
    const struct tlc_attn_entry *entries;
    const int32_t *pages;
    int kv, head0, heads, n_q;
    struct tlc_keys keys;
    int all_lo, all_hi; /* keys that every row sees: [all_lo, all_hi) */
    int lo[2], pos[2];  /* of this thread's two queries */
};

/* The 16 queries of this warp, and this thread's first one; the other one is 8 further. */
static __device__ __forceinline__ int first_query() { return (int)threadIdx.x / 32 * 16; }
static __device__ __forceinline__ int query() { return first_query() + ((int)threadIdx.x & 31) / 4; }

/* item: times kv heads, times tiles of heads */
static __device__ __forceinline__ struct work work_of(const struct tlc_attn_args *a, int item)
{
    struct work w;
    int per_item = a->n_kv_heads * a->head_tiles, tile = item % a->head_tiles;
    w.x = tlc_plan_items(a->plan)[a->plan->first[TLC_SEG_LONG] + item / per_item];
    w.entries = tlc_plan_entries(a->plan) + w.x.entry0;
    w.pages = tlc_page_table(&a->step, w.x.seq, a->slot);
    w.kv = item % per_item / a->head_tiles;
    w.head0 = w.kv * a->per_row + tile * a->heads;
    w.heads = min(a->heads, a->per_row - tile * a->heads);
    w.n_q = w.x.n * w.heads;
    w.keys.lo = w.entries[0].lo;
    w.keys.hi = w.entries[w.x.n - 1].pos + 1;
    w.keys.skip = -1;
    w.all_lo = w.entries[w.x.n - 1].lo;
    w.all_hi = w.entries[0].pos + 1;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        struct tlc_attn_entry e = w.entries[min((query() + 8 * h) / w.heads, w.x.n - 1)];
        w.lo[h] = e.lo;
        w.pos[h] = e.pos;
    }
    return w;
}

template <int D>
static __device__ __forceinline__ void fetch(const struct tlc_attn_args *a, const struct work *w, int block, int stage)
{
    struct shared_data<D> *s = (struct shared_data<D> *)tlc_shared();
    tlc_page_copy<D, THREADS>(tlc_shared_address(s->k[stage]), tlc_shared_address(s->v[stage]),
                              tlc_page_k<const __half>(&a->step, w->pages[block], w->kv, D),
                              (int64_t)a->n_kv_heads * TLC_PAGE * D, block, w->keys, (int)threadIdx.x);
    tlc_copy_commit();
}

template <int D>
static __device__ __forceinline__ void load_queries(const struct tlc_attn_args *a, const struct work *w)
{
    struct shared_data<D> *s = (struct shared_data<D> *)tlc_shared();
#pragma unroll 4
    for (int i = threadIdx.x; i < TLC_LONG_Q * D / 4; i += THREADS) {
        int q = i / (D / 4), col = i % (D / 4) * 4;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        __half h[4];
        if (q < w->n_q)
            x = *(const float4 *)(a->qkv + w->entries[q / w->heads].place * a->ld +
                                  (int64_t)(w->head0 + q % w->heads) * D + col);
        h[0] = tlc_half(x.x);
        h[1] = tlc_half(x.y);
        h[2] = tlc_half(x.z);
        h[3] = tlc_half(x.w);
        *(uint2 *)&s->q[q][col] = make_uint2((uint32_t)__half_as_ushort(h[0]) | (uint32_t)__half_as_ushort(h[1]) << 16,
                                             (uint32_t)__half_as_ushort(h[2]) | (uint32_t)__half_as_ushort(h[3]) << 16);
    }
}

template <int D> struct result {
    float o[D / 8][4];
    float m[2], l[2];
};

/* The queries of a warp stay in registers where there is room for them. */
template <int D> struct queries {
    enum { KEEP = D <= 128 };
    uint32_t q[KEEP ? D / 16 : 1][4];
};
template <int D> static __device__ __forceinline__ void load_q(uint32_t q[4], int step)
{
    struct shared_data<D> *s = (struct shared_data<D> *)tlc_shared();
    tlc_ldmatrix(q, tlc_at_a(tlc_shared_address(s->q[first_query()]), (int)threadIdx.x & 31, D + 8) + step * 32);
}
template <int D> static __device__ __forceinline__ void keep_q(struct queries<D> *keep)
{
    if (!keep->KEEP)
        return;
#pragma unroll
    for (int i = 0; i < (int)(sizeof(keep->q) / sizeof(keep->q[0])); i++)
        load_q<D>(keep->q[i], i);
}

/* Of one page the weights, as the A operand of the second product; m and l of this thread's two queries. */
struct weights {
    uint32_t p[4][4];
    float m[2], l[2];
};

template <int D>
static __device__ __forceinline__ struct weights weigh(const struct tlc_attn_args *a, const struct work *w,
                                                       const struct queries<D> *keep, int block, int stage)
{
    struct shared_data<D> *s = (struct shared_data<D> *)tlc_shared();
    int lane = threadIdx.x & 31, t2 = lane % 4 * 2;
    unsigned k_at = tlc_at_k(tlc_shared_address(s->k[stage]), lane, D + 8);
    float c[8][4] = {}, l[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    struct weights x;
#pragma unroll
    for (int kk = 0; kk < D / 32; kk++) {
        uint32_t q0[4], q1[4];
        if (!keep->KEEP) {
            load_q<D>(q0, 2 * kk);
            load_q<D>(q1, 2 * kk + 1);
        }
#pragma unroll
        for (int n = 0; n < 8; n += GROUP) { /* GROUP chains side by side */
            uint32_t b[GROUP][4];
#pragma unroll
            for (int i = 0; i < GROUP; i++)
                tlc_ldmatrix(b[i], k_at + (unsigned)((n + i) * 8 * (D + 8) + kk * 32) * 2);
#pragma unroll
            for (int i = 0; i < GROUP; i++)
                tlc_mma_f16(c[n + i], keep->KEEP ? keep->q[keep->KEEP ? 2 * kk : 0] : q0, b[i][0], b[i][1]);
#pragma unroll
            for (int i = 0; i < GROUP; i++)
                tlc_mma_f16(c[n + i], keep->KEEP ? keep->q[keep->KEEP ? 2 * kk + 1 : 0] : q1, b[i][2], b[i][3]);
        }
    }
    if (block * TLC_PAGE >= w->all_lo && (block + 1) * TLC_PAGE <= w->all_hi) {
#pragma unroll
        for (int i = 0; i < 32; i++)
            c[i / 4][i % 4] = __fmul_rn(c[i / 4][i % 4], a->scale);
    } else {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            int key = block * TLC_PAGE + i / 4 * 8 + t2 + i % 2, h = i % 4 / 2;
            c[i / 4][i % 4] =
                key >= w->lo[h] && key <= w->pos[h] ? __fmul_rn(c[i / 4][i % 4], a->scale) : tlc_minus_inf();
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float m = tlc_minus_inf();
#pragma unroll
        for (int n = 0; n < 8; n++)
            m = fmaxf(m, fmaxf(c[n][2 * h], c[n][2 * h + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        x.m[h] = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
    }
#pragma unroll
    for (int i = 0; i < 16; i++) { /* key step i / 4, register i % 4 */
        int n = i / 4 * 2 + i % 4 / 2, h = i % 2;
        x.p[i / 4][i % 4] = tlc_pack_half(tlc_weight(c[n][2 * h], x.m[h]), tlc_weight(c[n][2 * h + 1], x.m[h]));
    }
#pragma unroll
    for (int kk = 0; kk < 4; kk++)
        tlc_mma_f16(l, x.p[kk], TLC_ONES, TLC_ONES);
    x.l[0] = l[0];
    x.l[1] = l[2];
    return x;
}

/* acc of GROUP tiles of 8 columns of the values, from tile n on; v_at: tlc_at_v of the page. */
template <int D>
static __device__ __forceinline__ void values(float acc[GROUP][4], const struct weights *x, unsigned v_at, int n)
{
#pragma unroll
    for (int i = 0; i < 4 * GROUP; i++)
        acc[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int kk = 0; kk < 2; kk++) {
        uint32_t b[GROUP][4];
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            tlc_ldmatrix_t(b[i], v_at + (unsigned)(kk * 32 * (D + 8) + (n + i) * 8) * 2);
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            tlc_mma_f16(acc[i], x->p[2 * kk], b[i][0], b[i][1]);
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            tlc_mma_f16(acc[i], x->p[2 * kk + 1], b[i][2], b[i][3]);
    }
}

/* One page: its term and the fold. */
template <int D>
static __device__ __forceinline__ void take_page(struct result<D> *r, const struct tlc_attn_args *a,
                                                 const struct work *w, const struct queries<D> *keep, int block,
                                                 int stage)
{
    struct shared_data<D> *s = (struct shared_data<D> *)tlc_shared();
    unsigned v_at = tlc_at_v(tlc_shared_address(s->v[stage]), (int)threadIdx.x & 31, D + 8);
    struct weights x = weigh<D>(a, w, keep, block, stage);
    float e0[2], e1[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        tlc_fold(&r->m[h], &r->l[h], x.m[h], x.l[h], &e0[h], &e1[h]);
#pragma unroll
    for (int n = 0; n < D / 8; n += GROUP) {
        float acc[GROUP][4];
        values<D>(acc, &x, v_at, n);
#pragma unroll
        for (int i = 0; i < 4 * GROUP; i++)
            r->o[n + i / 4][i % 4] =
                tlc_fold_o(r->o[n + i / 4][i % 4], acc[i / 4][i % 4], e0[i % 4 / 2], e1[i % 4 / 2]);
    }
}

template <int D>
static __device__ __forceinline__ void finish(const struct result<D> *r, const struct tlc_attn_args *a,
                                              const struct work *w)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int q = query() + 8 * h;
        if (q >= w->n_q)
            continue;
        float inv = __fdiv_rn(1.0f, r->l[h]);
        float *out = a->att + ((int64_t)w->entries[q / w->heads].place * a->n_heads + w->head0 + q % w->heads) * D +
                     ((int)threadIdx.x & 3) * 2;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            *(float2 *)(out + n * 8) =
                make_float2(tlc_fold_end(r->o[n][2 * h], inv), tlc_fold_end(r->o[n][2 * h + 1], inv));
    }
}

template <int D> static __device__ __forceinline__ void run_item(const struct tlc_attn_args *a, const struct work *w)
{
    struct result<D> r = {
    };
    struct queries<D> keep;
    r.m[0] = r.m[1] = tlc_minus_inf();
    fetch<D>(a, w, w->x.block0, 0);
    load_queries<D>(a, w);
    __syncthreads();
    keep_q<D>(&keep);
    for (int block = w->x.block0, stage = 0; block < w->x.block1; block++, stage ^= 1) {
        tlc_copy_wait<0>();
        __syncthreads(); /* the page is there, and nobody reads the other stage any more */
        if (block + 1 < w->x.block1)
            fetch<D>(a, w, block + 1, stage ^ 1);
        take_page<D>(&r, a, w, &keep, block, stage);
    }
    finish<D>(&r, a, w);
    __syncthreads();
}

template <int D> __global__ void __launch_bounds__(THREADS, D <= 128 ? 2 : 1) long_kernel(struct tlc_attn_args a)
{
    int n = a.plan->n[TLC_SEG_LONG] * a.n_kv_heads * a.head_tiles;
    tlc_go();
    tlc_wait();
    for (int item = (int)blockIdx.x; item < n; item += (int)gridDim.x) {
        struct work w = work_of(&a, item);
        run_item<D>(&a, &w);
    }
}

/* ---- host ---- */

template <int D> static cudaError_t allow()
{
    return cudaFuncSetAttribute(long_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                (int)sizeof(struct shared_data<D>));
}

template <int D> static cudaError_t launch(const struct tlc_launch *l, const struct tlc_attn_args *a, dim3 grid)
{
    return tlc_launch(l, long_kernel<D>, grid, dim3(THREADS), sizeof(struct shared_data<D>), *a);
}

#define BYTES(D)  sizeof(struct shared_data<D>)
#define ALLOW(D)  allow<D>()
#define LAUNCH(D) launch<D>(l, &a, grid)

size_t tlc_attn_long_bytes(int d) { return TLC_BY_WIDTH(d, BYTES); }

cudaError_t tlc_attn_long_init(int d) { return TLC_BY_WIDTH(d, ALLOW); }

cudaError_t tlc_attn_long(const struct tlc_launch *l, struct tlc_attn_args a, int items)
{
    a.heads = tlc_tile_heads(a.per_row, TLC_LONG_Q);
    a.head_tiles = (a.per_row + a.heads - 1) / a.heads;
    dim3 grid((unsigned)(items * a.n_kv_heads * a.head_tiles));
    return TLC_BY_WIDTH(a.finish.d, LAUNCH);
}
