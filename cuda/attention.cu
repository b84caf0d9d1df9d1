/* Attention of a layer: the kernel that finishes q, k and v where that is not done on the fly, the plain kernel,
 * and the launches. */
#include "attention_impl.cuh"

#include <math.h>

/* ---- biases, norms, rope, and the store of K and V: a block per row, or for some of its heads ---- */

/* Norm over n values by 256 threads, in place: one sum of squares per thread, ascending, then the fixed tree. */
static __device__ void full_norm(float *x, const float *b0, const float *b1, const float *w, int n, float eps,
                                 float *red)
{
    float sum = 0.0f, inv;
    for (int j = threadIdx.x; j < n; j += TLC_ROW_THREADS) {
        float v = x[j];
        v = b0 ? __fadd_rn(v, b0[j]) : v;
        v = b1 ? __fadd_rn(v, b1[j]) : v;
        x[j] = v;
        sum = __fmaf_rn(v, v, sum);
    }
    sum = tlc_row_sum(sum, red);
    inv = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)n), eps)));
    for (int j = threadIdx.x; j < n; j += TLC_ROW_THREADS)
        x[j] = __fmul_rn(__fmul_rn(x[j], inv), w[j]);
    __syncthreads();
}

static __device__ __forceinline__ void store_page(const struct tlc_attn_args *a, const float *x, int page, int pos,
                                                  int kv, bool is_v)
{
    int d = a->finish.d;
    int64_t at = (int64_t)(pos % TLC_PAGE) * d + (is_v ? (int64_t)a->n_kv_heads * TLC_PAGE * d : 0);
    for (int j = threadIdx.x & 31; j < d; j += 32) {
        if (a->step.kv_f32)
            tlc_page_k<float>(&a->step, page, kv, d)[at + j] = x[j];
        else
            tlc_page_k<__half>(&a->step, page, kv, d)[at + j] = tlc_half(x[j]);
    }
}

static __global__ void __launch_bounds__(TLC_ROW_THREADS) finish_kernel(struct tlc_attn_args a)
{
    __shared__ float heads[TLC_ROW_THREADS / 32][TL_HEAD_DIM_MAX], red[8];
    int warp = threadIdx.x / 32, i = (int)blockIdx.x, d = a.finish.d;
    int n_qk = a.n_heads + a.n_kv_heads, kd = a.n_kv_heads * d, qd = a.n_heads * d;
    tlc_go();
    tlc_wait();
    for (; i < *a.set.n; i += (int)gridDim.x) {
        struct tlc_row row = a.step.rows[a.set.rows[i]];
        int page = tlc_page_table(&a.step, row.seq, a.slot)[row.pos / TLC_PAGE];
        float *q = a.qkv + i * a.ld, *x = heads[warp];
        struct tlc_attn_args f = a;
        if (a.finish.qk_norm == TL_QKNORM_FULL) { /* with the biases; what follows has none left but v's */
            full_norm(q, a.qkv_bias, a.qk_bias, a.q_norm, qd, a.finish.eps, red);
            full_norm(q + qd, a.qkv_bias ? a.qkv_bias + qd : nullptr, a.qk_bias ? a.qk_bias + qd : nullptr, a.k_norm,
                      kd, a.finish.eps, red);
        }
        for (int h = warp + (int)blockIdx.y * (TLC_ROW_THREADS / 32); h < n_qk + a.n_kv_heads;
             h += (int)gridDim.y * (TLC_ROW_THREADS / 32)) {
            bool done = a.finish.qk_norm == TL_QKNORM_FULL && h < n_qk;
            f.qkv_bias = done ? nullptr : a.qkv_bias;
            f.qk_bias = done ? nullptr : a.qk_bias;
            tlc_head_ready(&f, x, d, i, h, tlc_head_tables_of(&a, row.pos));
            if (h < a.n_heads) {
                for (int j = threadIdx.x & 31; j < d; j += 32)
                    q[(int64_t)h * d + j] = x[j];
            } else {
                store_page(&a, x, page, row.pos, (h - a.n_heads) % a.n_kv_heads, h >= n_qk);
            }
            __syncwarp();
        }
        __syncthreads();
    }
}

/* ---- the plain kernel: one warp per row and head, any width, F32 or F16 pages ---- */

struct plain_row {
    float q[TL_HEAD_DIM_MAX], p[TLC_PAGE];
};

static __device__ __forceinline__ float page_value(const struct tlc_attn_args *a, int page, int kv, int64_t at)
{
    int d = a->finish.d;
    return a->step.kv_f32 ? tlc_page_k<float>(&a->step, page, kv, d)[at]
                          : __half2float(tlc_page_k<__half>(&a->step, page, kv, d)[at]);
}

/* One page for a warp: o, M, L take in keys [k0, k1) of it. Lane i has columns i, i + 32, ... of the output. */
static __device__ void plain_page(const struct tlc_attn_args *a, struct plain_row *s, int page, int kv, int k0, int k1,
                                  float o[TL_HEAD_DIM_MAX / 32], float *M, float *L)
{
    int lane = threadIdx.x & 31, d = a->finish.d;
    int64_t v_at = (int64_t)a->n_kv_heads * TLC_PAGE * d;
    float c[2], m, l, e0, e1;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int key = lane + 32 * h;
        float dot = 0.0f;
        for (int j = 0; j < d && key >= k0 && key < k1; j++)
            dot = __fmaf_rn(s->q[j], page_value(a, page, kv, (int64_t)key * d + j), dot);
        c[h] = key >= k0 && key < k1 ? __fmul_rn(dot, a->scale) : tlc_minus_inf();
    }
    m = fmaxf(c[0], c[1]);
    for (int i = 16; i > 0; i >>= 1)
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, i));
#pragma unroll
    for (int h = 0; h < 2; h++) {
        c[h] = tlc_weight(c[h], m);
        if (!a->step.kv_f32)
            c[h] = __half2float(tlc_half(c[h]));
        s->p[lane + 32 * h] = c[h];
    }
    l = tlc_warp_sum(__fadd_rn(c[0], c[1]));
    __syncwarp();
    tlc_fold(M, L, m, l, &e0, &e1);
#pragma unroll
    for (int i = 0; i < TL_HEAD_DIM_MAX / 32; i++) {
        int col = lane + 32 * i;
        float acc = 0.0f;
        if (col >= d)
            continue;
        for (int key = k0; key < k1; key++)
            acc = __fmaf_rn(s->p[key], page_value(a, page, kv, v_at + (int64_t)key * d + col), acc);
        o[i] = tlc_fold_o(o[i], acc, e0, e1);
    }
    __syncwarp();
}

static __global__ void __launch_bounds__(TLC_ROW_THREADS) plain_kernel(struct tlc_attn_args a)
{
    __shared__ struct plain_row warps[TLC_ROW_THREADS / 32];
    struct plain_row *s = &warps[threadIdx.x / 32];
    int lane = threadIdx.x & 31, d = a.finish.d, per_grid = (int)gridDim.x * (TLC_ROW_THREADS / 32);
    tlc_go();
    tlc_wait();
    for (int w = (int)blockIdx.x * (TLC_ROW_THREADS / 32) + threadIdx.x / 32; w < *a.set.n * a.n_heads; w += per_grid) {
        int i = w / a.n_heads, head = w % a.n_heads;
        struct tlc_row row = a.step.rows[a.set.rows[i]];
        int window = a.step.seqs[row.seq].window, lo = window > 0 && row.pos >= window ? row.pos - window + 1 : 0;
        const int32_t *pages = tlc_page_table(&a.step, row.seq, a.slot);
        float o[TL_HEAD_DIM_MAX / 32] = {}, M = tlc_minus_inf(), L = 0.0f, inv;
        for (int j = lane; j < d; j += 32) {
            float x = a.qkv[i * a.ld + (int64_t)head * d + j];
            s->q[j] = a.step.kv_f32 ? x : __half2float(tlc_half(x));
        }
        __syncwarp();
        for (int b = lo / TLC_PAGE; b <= row.pos / TLC_PAGE; b++)
            plain_page(&a, s, pages[b], head / a.per_row, max(lo - b * TLC_PAGE, 0),
                       min(row.pos + 1 - b * TLC_PAGE, TLC_PAGE), o, &M, &L);
        inv = __fdiv_rn(1.0f, L);
#pragma unroll
        for (int j = 0; j < TL_HEAD_DIM_MAX / 32; j++)
            if (lane + 32 * j < d)
                a.att[((int64_t)i * a.n_heads + head) * d + lane + 32 * j] = tlc_fold_end(o[j], inv);
        __syncwarp();
    }
}

/* ---- host ---- */

cudaError_t tlc_attn_allow(void (*kernel)(struct tlc_attn_args), size_t shared)
{
    int major = 0, device = 0;
    cudaError_t e =
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (e == cudaSuccess)
        e = cudaGetDevice(&device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (e == cudaSuccess && major >= 9)
        e = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    return e;
}

cudaError_t tlc_attn_init(const struct tl_arch_spec *spec, size_t shared_max)
{
    cudaError_t e;
    if (!tlc_tiles_fit(spec->d_head, shared_max))
        return cudaSuccess; /* the plain kernel is for all rows */
    e = tlc_attn_short_init(spec->d_head);
    if (e == cudaSuccess)
        e = tlc_attn_row_init(spec->d_head, shared_max);
    if (e == cudaSuccess && tlc_many_fits(spec->n_heads / spec->n_kv_heads, spec->d_head, shared_max))
        e = tlc_attn_many_init(spec->d_head, shared_max);
    if (e == cudaSuccess)
        e = tlc_attn_long_init(spec->d_head);
    return e;
}

static const float *floats(const struct tl_buf *b) { return b ? (const float *)b->data : NULL; }

static struct tlc_attn_args args_of(const struct tlc_attn_call *c)
{
    const struct tl_arch_spec *s = c->spec;
    struct tlc_attn_args a = {};
    a.plan = (const struct tlc_attn_head *)c->plan;
    a.step = c->step;
    a.set = c->set;
    a.slot = c->slot;
    a.n_heads = s->n_heads;
    a.n_kv_heads = s->n_kv_heads;
    a.per_row = s->n_heads / s->n_kv_heads;
    a.fused = c->cls & TLC_CLS_FUSED;
    a.scale = 1.0f / sqrtf((float)s->d_head);
    a.qkv = c->qkv;
    a.ld = c->ld;
    a.att = c->att;
    a.qkv_bias = floats(c->layer->qkv_bias);
    a.qk_bias = floats(c->layer->qk_bias);
    a.q_norm = floats(c->layer->q_norm);
    a.k_norm = floats(c->layer->k_norm);
    a.rope = c->rope;
    a.finish = {s->d_head, s->qk_norm, s->rope, s->norm_eps};
    return a;
}

static int items_of(uint32_t cls, int segment)
{
    uint32_t b = tlc_cls_items(cls, segment);
    return b ? 1 << (b - 1) : 0;
}

cudaError_t tlc_attention(const struct tlc_launch *l, const struct tlc_attn_call *call)
{
    struct tlc_attn_args a = args_of(call);
    unsigned rows = (unsigned)call->set.n_cap;
    cudaError_t e = cudaSuccess;
    if (!a.fused) { /* heads side by side, but for a norm over all of them */
        unsigned warps = TLC_ROW_THREADS / 32, heads = (unsigned)(a.n_heads + 2 * a.n_kv_heads);
        unsigned parts = a.finish.qk_norm == TL_QKNORM_FULL || rows > TLC_LONG_Q ? 1 : (heads + warps - 1) / warps;
        e = tlc_launch(l, finish_kernel, dim3(rows, parts), dim3(TLC_ROW_THREADS), 0, a);
    }
    if (e == cudaSuccess && (call->cls & TLC_CLS_PLAIN))
        e = tlc_launch(l, plain_kernel, dim3((rows * (unsigned)a.n_heads + 7) / 8), dim3(TLC_ROW_THREADS), 0, a);
    for (int seg = 0; seg < TLC_SEGS && e == cudaSuccess; seg++) {
        int items = items_of(call->cls, seg);
        if (items == 0)
            continue;
        a.cluster = seg == TLC_SEG_LONG || l->cc < 90 ? 1 : tlc_cluster_size(tlc_cls_cluster(call->cls, seg));
        a.page_bits = (int)tlc_cls_pages(call->cls);
        e = seg == TLC_SEG_LONG ? tlc_attn_long(l, a, items)
            : seg == TLC_SEG_ROW && tlc_cls_pages(call->cls) == TLC_CLS_MANY
                ? tlc_attn_many(l, a, items, call->cls & TLC_CLS_SHARED)
            : seg == TLC_SEG_ROW ? tlc_attn_row(l, a, items)
                                 : tlc_attn_short(l, a, items);
    }
    return e;
}
