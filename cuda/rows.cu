/* Kernels over the rows of a set: one block of 256 threads per row, blocks beyond the set's count end at once. */
#include "backend_impl.cuh"
#include "cluster.cuh"
#include "rows.cuh"

#define MY_ROW(set, i)                                                                                                 \
    int i = blockIdx.x;                                                                                                \
    tlc_go();                                                                                                          \
    tlc_wait();                                                                                                        \
    if (i >= *(set).n)                                                                                                 \
    return

static dim3 blocks(const struct tlc_set *set) { return dim3((unsigned)set->n_cap); }

/* ---- input of linear layers ---- */

/* Weights of the product that takes the rows, on their way into L2 meanwhile: of few rows, the reading of weights is what takes
 * time. */
#define AHEAD_ROWS 64                 /* more rows than this have enough else to do */
#define AHEAD_MAX  ((size_t)24 << 20) /* bytes; more would push others out */

#define SPREAD                                                                                                         \
    8 /* successive blocks that go to different multiprocessors: left alone, small ones gather on those least in use */

struct ahead {
    const uint8_t *data;
    int bytes; /* of each part, a multiple of 16; 0: nothing to do */
};

/* In so many parts. What tlc_linear_large() reads. */
static struct ahead ahead_of(const struct tlc_launch *l, const struct tl_mat *m, int n_rows, int parts)
{
    struct ahead a = {};
    size_t size = m->wtype == TL_W_F32 ? 4 : m->wtype == TL_W_BF16 ? 2 : 1;
    size_t bytes = (size_t)(m->n_tiles * 16 * m->k_pad) * size;
    if (l->cc < 90 || n_rows > AHEAD_ROWS)
        return a;
    a.data = m->wtype == TL_W_F32    ? (const uint8_t *)m->rows32
             : m->wtype == TL_W_BF16 ? (const uint8_t *)m->rows16
                                     : (const uint8_t *)m->rows8;
    bytes = bytes < AHEAD_MAX ? bytes : AHEAD_MAX;
    a.bytes = (int)(bytes / (size_t)parts / 16 * 16);
    return a;
}

/* By one thread. */
__device__ static __forceinline__ void fetch_ahead(const struct ahead &a, int part)
{
#if __CUDA_ARCH__ >= 900
    if (a.bytes > 0)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(a.data + (int64_t)part * a.bytes), "r"(a.bytes)
                     : "memory");
#endif
}

__device__ static struct tlc_source source_of(const struct tlc_input *in, const struct tlc_set *set, int i)
{
    int64_t row = set->rows[i];
    struct tlc_source s = {in->a + (in->a_by_row ? row : i) * in->lda, NULL, in->w, in->n_a, in->n, in->norm, in->eps};
    if (in->b)
        s.b = in->b + (in->b_by_row ? row : i) * in->ldb;
    return s;
}

/* Four values as int8 like tlc_quant4(), by the quotient itself where that one looks whether it needs it: some row of a batch always
 * does. refined: what a division makes of 1 / s. */
__device__ static __forceinline__ uint32_t quant4(float4 v, float s, float refined)
{
    float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float y = __fmul_rn(x[i], refined);
        x[i] = __fadd_rn(__fmaf_rn(refined, __fmaf_rn(-s, y, x[i]), y), TLC_ROUND);
    }
    return tlc_low_bytes(make_float4(x[0], x[1], x[2], x[3]));
}

/* tlc_ready_int8(), its bits: the row's reductions and quotients with less that waits for something else. red: 16 pairs of a warp's sum of
 * squares and largest |value|. */
template <int Q>
__device__ static __forceinline__ void ready_int8(const struct tlc_source *s, struct tlc_held<Q> *h, int k_pad,
                                                  float4 *red, int8_t *out, float *scale)
{
    float sum = 0.0f, norm_inv = 1.0f, eight[8], sc, inv;
    unsigned top = __reduce_max_sync(0xffffffffu, tlc_row_weigh<Q>(s, h, &sum));
    if (s->norm)
        sum = tlc_warp_sum(sum);
    if ((threadIdx.x & 31) == 0)
        ((float2 *)red)[threadIdx.x >> 5] = make_float2(sum, __uint_as_float(top));
    tlc_ready_barrier();
    top = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) { /* the tree of tlc_row_whole() */
        float4 a = red[i], b = red[i + 4];
        eight[2 * i] = __fadd_rn(a.x, b.x);
        eight[2 * i + 1] = __fadd_rn(a.z, b.z);
        top = max(max(top, max(__float_as_uint(a.y), __float_as_uint(a.w))),
                  max(__float_as_uint(b.y), __float_as_uint(b.w)));
    }
    if (s->norm) {
        sum = __fadd_rn(__fadd_rn(__fadd_rn(eight[0], eight[4]), __fadd_rn(eight[2], eight[6])),
                        __fadd_rn(__fadd_rn(eight[1], eight[5]), __fadd_rn(eight[3], eight[7])));
        norm_inv = __frsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)s->n), s->eps));
        top = __float_as_uint(__fmul_rn(__uint_as_float(top), norm_inv));
    }
    sc = tlc_quant_scale(top);
    inv = tlc_quant_inv(sc);
    float refined = __fmaf_rn(inv, __fmaf_rn(-sc, inv, 1.0f), inv);
    TLC_MY_QUADS(q, j, k_pad)
    *(uint32_t *)(out + j) = j < s->n && inv != 0.0f ? quant4(tlc_ready4<Q>(s, h, q, j, norm_inv), sc, refined) : 0;
    if (threadIdx.x == 0)
        *scale = sc;
}

/* Everything that does not come from the kernel in front is asked for before the wait. FEW: int8, of no more rows than there are
 * multiprocessors to wait on; with more, blocks that take less of a multiprocessor are faster. */
template <enum tl_wtype TYPE, int Q, bool FEW>
__global__ static void __launch_bounds__(TLC_READY_THREADS, FEW ? 2 : 1)
    rows_ready(const __grid_constant__ struct tlc_input in, int k_pad, struct tlc_acts acts, struct tlc_set set,
               struct ahead next)
{
    __shared__ float4 red[8];
    int i = blockIdx.x;
    struct tlc_held<Q> h;
    const float *at[Q ? Q : 1];
    tlc_go();
    if (threadIdx.x % 32 == 0)
        fetch_ahead(next, i * (TLC_READY_THREADS / 32) + (int)threadIdx.x / 32);
    bool mine = i < *set.n;
    struct tlc_source s = source_of(&in, &set, mine ? i : 0);
    tlc_hold_weights<Q>(&s, &h);
    if (FEW) {
#pragma unroll
        for (int q = 0; q < Q; q++) { /* asked for, if in vain, so that nothing has to be found out behind the wait */
            int j = 4 * (threadIdx.x + 512 * q);
            at[q] = j >= s.n ? NULL : j < s.n_a ? s.a + j : s.b + (j - s.n_a);
            if (at[q])
                asm volatile("prefetch.global.L2 [%0];" ::"l"(at[q]) : "memory");
        }
    }
    tlc_wait();
    if (!mine)
        return;
    if (FEW) {
#pragma unroll
        for (int q = 0; q < Q; q++)
            h.v[q] = at[q] ? *(const float4 *)at[q] : make_float4(0, 0, 0, 0);
        ready_int8<Q>(&s, &h, k_pad, red, acts.q + i * acts.ld, acts.scale + i);
        return;
    }
    tlc_hold_row<Q>(&s, &h);
    if (TYPE == TL_W_INT8)
        tlc_ready_int8<Q>(&s, &h, k_pad, (float2 *)red, acts.q + i * acts.ld, acts.scale + i);
    else if (TYPE == TL_W_BF16)
        tlc_ready_bf16<Q>(&s, &h, k_pad, (float2 *)red, acts.b + i * acts.ld);
    else
        tlc_ready_f32<Q>(&s, &h, k_pad, (float2 *)red, acts.f + i * acts.ld);
}

typedef void (*ready_fn)(struct tlc_input, int, struct tlc_acts, struct tlc_set, struct ahead);
template <enum tl_wtype TYPE, bool FEW> static ready_fn ready_of(int q)
{
    return q == 1 ? rows_ready<TYPE, 1, FEW> : q == 3 ? rows_ready<TYPE, 3, FEW> : rows_ready<TYPE, 0, FEW>;
}

template <enum tl_wtype TYPE>
static cudaError_t ready(const struct tlc_launch *l, const struct tl_mat *m, const struct tlc_input *in, bool ahead,
                         const struct tlc_acts *acts, const struct tlc_set *set)
{
    bool few = set->n_cap <= AHEAD_ROWS;
    int q = tlc_hold_of(in->n, in->n_a), spread = l->cc >= 90 && few && set->n_cap % SPREAD == 0 ? SPREAD : 1;
    struct ahead next = {};
    if (ahead)
        next = ahead_of(l, m, set->n_cap, set->n_cap * (TLC_READY_THREADS / 32));
    return tlc_launch_policy(l, few && TYPE == TL_W_INT8 ? ready_of<TL_W_INT8, true>(q) : ready_of<TYPE, false>(q),
                             spread, cudaClusterSchedulingPolicySpread, blocks(set), dim3(TLC_READY_THREADS), 0, *in,
                             (int)m->k_pad, *acts, *set, next);
}

cudaError_t tlc_rows_ready(const struct tlc_launch *l, const struct tl_mat *m, const struct tlc_input *in, bool ahead,
                           const struct tlc_acts *acts, const struct tlc_set *set)
{
    return m->wtype == TL_W_F32    ? ready<TL_W_F32>(l, m, in, ahead, acts, set)
           : m->wtype == TL_W_BF16 ? ready<TL_W_BF16>(l, m, in, ahead, acts, set)
                                   : ready<TL_W_INT8>(l, m, in, ahead, acts, set);
}

/* ---- the stream ---- */

struct table { /* a matrix as a table of rows */
    const int8_t *rows8;
    const uint16_t *rows16;
    const float *rows32, *row_scale;
    int64_t k_pad;
};

static struct table table_of(const struct tl_mat *m)
{
    struct table t = {m->rows8, m->rows16, m->rows32, m->row_scale, m->k_pad};
    return t;
}

__device__ static float table_value(const struct table *m, int64_t row, int j)
{
    int64_t at = row * m->k_pad + j;
    return m->rows8    ? __fmul_rn(m->row_scale[row], (float)m->rows8[at])
           : m->rows16 ? __uint_as_float((uint32_t)m->rows16[at] << 16)
                       : m->rows32[at];
}

__device__ static int token_of(const struct tlc_row *row, const int32_t *best)
{
    int token = row->token; /* chained where it is negative: after logits that were not finite any token will do, */
    return token < 0 ? max(best[-1 - token], 0) : token; /* nobody takes what follows */
}

__global__ static void __launch_bounds__(256)
    rows_embed(struct table m, const struct tlc_row *rows, const int32_t *best, float scale, float *x, int d,
               struct tlc_set set)
{
    MY_ROW(set, i);
    int64_t row = set.rows[i];
    int token = token_of(&rows[row], best);
    for (int j = threadIdx.x; j < d; j += 256)
        x[row * d + j] = __fmul_rn(table_value(&m, token, j), scale);
}

cudaError_t tlc_rows_embed(const struct tlc_launch *l, const struct tl_mat *m, const struct tlc_step *step,
                           const int32_t *best, float scale, float *x, int d, const struct tlc_set *set)
{
    return tlc_launch(l, rows_embed, blocks(set), dim3(256), 0, table_of(m), step->rows, best, scale, x, d, *set);
}

struct values {
    struct table m;
    struct tlc_input in; /* of qkv */
    const float *gate;   /* [heads][TL_VALUE_GATE_IN] */
    float *v;            /* [rows][ld] */
    int64_t ld;
    int heads, d_head;
};

/* The row is normed once more: only what the gates see of it is wanted, and it is nowhere as floats. A warp has a head. */
__global__ static void __launch_bounds__(256)
    rows_values(const __grid_constant__ struct values a, const struct tlc_row *rows, const int32_t *best,
                struct tlc_set set)
{
    extern __shared__ __align__(16) float buf[];
    __shared__ float red[8];
    MY_ROW(set, i);
    struct tlc_source s = source_of(&a.in, &set, i);
    int token = token_of(&rows[set.rows[i]], best), lane = threadIdx.x & 31;
    tlc_row_load(&s, buf, red);
    tlc_row_barrier();
    for (int g = threadIdx.x >> 5; g < a.heads; g += 8) {
        float sum = tlc_warp_sum(__fmul_rn(a.gate[g * TL_VALUE_GATE_IN + lane], buf[lane]));
        float gate = __fdiv_rn(2.0f, __fadd_rn(1.0f, tlc_exp(-sum)));
        float *v = a.v + i * a.ld + g * a.d_head;
        for (int j = lane; j < a.d_head; j += 32)
            v[j] = __fadd_rn(v[j], __fmul_rn(gate, table_value(&a.m, token, g * a.d_head + j)));
    }
}

cudaError_t tlc_rows_values(const struct tlc_launch *l, const struct tl_layer *layer, const struct tl_arch_spec *spec,
                            const struct tlc_input *in, const struct tlc_step *step, const int32_t *best, float *v,
                            int64_t ld, const struct tlc_set *set)
{
    static_assert(TL_VALUE_GATE_IN == 32, "a lane has an input of a gate");
    struct values a = {table_of(layer->value_embed),
                       *in,
                       (const float *)layer->value_gate->data,
                       v,
                       ld,
                       spec->n_kv_heads,
                       spec->d_head};
    size_t shared = (size_t)(in->n + 3) / 4 * 16;
    if (shared > 47 * 1024) {
        cudaError_t e =
            cudaFuncSetAttribute((const void *)rows_values, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
        if (e != cudaSuccess)
            return e;
    }
    return tlc_launch(l, rows_values, blocks(set), dim3(256), shared, a, step->rows, best, *set);
}

__global__ static void __launch_bounds__(256)
    rows_best(unsigned long long *parts, const float *logits, int vocab, struct tlc_set set)
{
    __shared__ unsigned long long top[8];
    MY_ROW(set, i);
    const float *row = logits + (int64_t)i * vocab;
    int per = (vocab + TLC_BEST_PARTS - 1) / TLC_BEST_PARTS, from = blockIdx.y * per, to = min(from + per, vocab);
    unsigned long long key = 0;
#pragma unroll 4
    for (int j = from + (int)threadIdx.x; j < to; j += 256)
        key = max(key, tlc_best_key(row[j], j));
    key = tlc_warp_top(key);
    if ((threadIdx.x & 31) == 0)
        top[threadIdx.x >> 5] = key;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 8; w++)
            key = max(key, top[w]);
        parts[i * TLC_BEST_PARTS + blockIdx.y] = key;
    }
}

/* One block: a warp folds the parts of a row. */
__global__ static void __launch_bounds__(256)
    rows_best_end(int32_t *best, const unsigned long long *parts, const struct tlc_report *to, struct tlc_set set)
{
    tlc_go();
    tlc_wait();
    int n = *set.n, lane = threadIdx.x & 31;
    struct tlc_report report = *to;
    for (int i = threadIdx.x >> 5; i < n; i += 8) {
        unsigned long long key = tlc_warp_top(lane < TLC_BEST_PARTS ? parts[i * TLC_BEST_PARTS + lane] : 0);
        if (lane == 0)
            tlc_report_best(&report, best, i, key);
    }
}

cudaError_t tlc_rows_best_parts(const struct tlc_launch *l, unsigned long long *parts, const float *logits, int vocab,
                                const struct tlc_set *set)
{
    return tlc_launch(l, rows_best, dim3((unsigned)set->n_cap, TLC_BEST_PARTS), dim3(256), 0, parts, logits, vocab,
                      *set);
}

cudaError_t tlc_rows_best(const struct tlc_launch *l, int32_t *best, unsigned long long *parts, const float *logits,
                          int vocab, const struct tlc_report *report, const struct tlc_set *set)
{
    cudaError_t e = tlc_rows_best_parts(l, parts, logits, vocab, set);
    return e != cudaSuccess ? e : tlc_launch(l, rows_best_end, dim3(1), dim3(256), 0, best, parts, report, *set);
}

/* A quadruple of a row of d values, as float4 where Q says that rows are made of those. */
template <int Q> __device__ static __forceinline__ void store4(float *row, int d, int j, float4 v)
{
    if (Q) {
        *(float4 *)(row + j) = v;
        return;
    }
    row[j] = v.x;
    if (j + 1 < d)
        row[j + 1] = v.y;
    if (j + 2 < d)
        row[j + 2] = v.z;
    if (j + 3 < d)
        row[j + 3] = v.w;
}

/* dst = norm(s): by the threads that own the quadruples, so dst may be the source. */
template <int Q>
__device__ static __forceinline__ void norm_row(float *dst, const struct tlc_source *s, struct tlc_held<Q> *h,
                                                float2 *red)
{
    float inv;
    tlc_row_measure<Q>(s, h, red, &inv);
    TLC_MY_QUADS(q, j, s->n)
    store4<Q>(dst, s->n, j, tlc_ready4<Q>(s, h, q, j, inv));
}

struct residual {
    float *x;
    const float *y, *before, *after;
    int d;
    float eps;
};

template <int Q>
__global__ static void __launch_bounds__(TLC_READY_THREADS) rows_residual(struct residual r, struct tlc_set set)
{
    __shared__ float2 red[2][16];
    int i = blockIdx.x;
    tlc_go();
    bool mine = i < *set.n; /* this and the weights before the wait: they are as far away as the rows */
    float *x = r.x + (int64_t)set.rows[mine ? i : 0] * r.d, inv = 1.0f;
    struct tlc_source s = {r.y + (int64_t)i * r.d, NULL, r.before, r.d, r.d, r.before != NULL, r.eps};
    struct tlc_source sx = {x, NULL, r.after, r.d, r.d, true, r.eps};
    struct tlc_held<Q> h, sum; /* sum: first x alone */
    tlc_hold_weights<Q>(&s, &h);
    tlc_hold_weights<Q>(&sx, &sum);
    tlc_wait();
    if (!mine)
        return;
    tlc_hold_row<Q>(&s, &h);
    tlc_hold_row<Q>(&sx, &sum);
    if (r.before)
        tlc_row_measure<Q>(&s, &h, red[0], &inv);
    TLC_MY_QUADS(q, j, r.d)
    {
        float4 v = tlc_ready4<Q>(&s, &h, q, j, inv), w = Q ? sum.v[Q ? q : 0] : tlc_ragged4(x, NULL, r.d, r.d, j);
        v = make_float4(__fadd_rn(w.x, v.x), __fadd_rn(w.y, v.y), __fadd_rn(w.z, v.z), __fadd_rn(w.w, v.w));
        sum.v[Q ? q : 0] = v;
        if (!Q || !r.after)
            store4<Q>(x, r.d, j, v);
    }
    if (r.after)
        norm_row<Q>(x, &sx, &sum, red[1]);
}

cudaError_t tlc_rows_residual(const struct tlc_launch *l, float *x, const float *y, int d, const float *before,
                              const float *after, float eps, const struct tlc_set *set)
{
    struct residual r = {x, y, before, after, d, eps};
    int q = tlc_hold_of(d, d);
    return tlc_launch(l,
                      q == 1   ? rows_residual<1>
                      : q == 3 ? rows_residual<3>
                               : rows_residual<0>,
                      blocks(set), dim3(TLC_READY_THREADS), 0, r, *set);
}

template <int Q>
__global__ static void __launch_bounds__(TLC_READY_THREADS)
    rows_norm(float *dst, const float *src, int d, const float *w, float eps, struct tlc_set set)
{
    __shared__ float2 red[16];
    MY_ROW(set, i);
    int64_t at = (int64_t)set.rows[i] * d;
    struct tlc_source s = {src + at, NULL, w, d, d, true, eps};
    struct tlc_held<Q> h;
    tlc_hold_weights<Q>(&s, &h);
    tlc_hold_row<Q>(&s, &h);
    norm_row<Q>(dst + at, &s, &h, red);
}

cudaError_t tlc_rows_norm(const struct tlc_launch *l, float *dst, const float *src, int d, const float *w, float eps,
                          const struct tlc_set *set)
{
    int q = tlc_hold_of(d, d);
    return tlc_launch(l,
                      q == 1   ? rows_norm<1>
                      : q == 3 ? rows_norm<3>
                               : rows_norm<0>,
                      blocks(set), dim3(TLC_READY_THREADS), 0, dst, src, d, w, eps, *set);
}

__global__ static void __launch_bounds__(256)
    rows_put(float *dst, const float *src, bool src_by_row, int d, struct tlc_set set)
{
    MY_ROW(set, i);
    int64_t to = (int64_t)set.rows[i] * d, from = src_by_row ? to : (int64_t)i * d;
    for (int j = threadIdx.x; j < d; j += 256)
        dst[to + j] = src ? src[from + j] : 0.0f;
}

cudaError_t tlc_rows_put(const struct tlc_launch *l, float *dst, const float *src, bool src_by_row, int d,
                         const struct tlc_set *set)
{
    return tlc_launch(l, rows_put, blocks(set), dim3(256), 0, dst, src, src_by_row, d, *set);
}

__global__ static void __launch_bounds__(256) rows_take(float *dst, const float *src, int d, struct tlc_set set)
{
    MY_ROW(set, i);
    for (int j = threadIdx.x; j < d; j += 256)
        dst[(int64_t)i * d + j] = src[(int64_t)set.rows[i] * d + j];
}

cudaError_t tlc_rows_take(const struct tlc_launch *l, float *dst, const float *src, int d, const struct tlc_set *set)
{
    return tlc_launch(l, rows_take, blocks(set), dim3(256), 0, dst, src, d, *set);
}

/* ---- around the loop ---- */

__global__ static void __launch_bounds__(256)
    rows_diag(float *x, const float *y, const float *decay, const float *gain, int d, struct tlc_set set)
{
    MY_ROW(set, i);
    for (int j = threadIdx.x; j < d; j += 256) {
        float *at = x + (int64_t)set.rows[i] * d + j;
        *at = __fadd_rn(__fmul_rn(decay[j], *at), __fmul_rn(gain[j], y[(int64_t)i * d + j]));
    }
}

cudaError_t tlc_rows_diag(const struct tlc_launch *l, float *x, const float *y, const float *decay, const float *gain,
                          int d, const struct tlc_set *set)
{
    return tlc_launch(l, rows_diag, blocks(set), dim3(256), 0, x, y, decay, gain, d, *set);
}

__global__ static void __launch_bounds__(256)
    rows_gate(float *out, const float *x, const float *w, float b, int d, struct tlc_set set)
{
    __shared__ float red[8];
    MY_ROW(set, i);
    float sum = 0.0f;
    for (int j = threadIdx.x; j < d; j += 256)
        sum = __fmaf_rn(w[j], x[(int64_t)set.rows[i] * d + j], sum);
    sum = tlc_row_sum(sum, red);
    if (threadIdx.x == 0)
        out[i] = __fadd_rn(sum, b);
}

cudaError_t tlc_rows_gate(const struct tlc_launch *l, float *out, const float *x, const float *w, float b, int d,
                          const struct tlc_set *set)
{
    return tlc_launch(l, rows_gate, blocks(set), dim3(256), 0, out, x, w, b, d, *set);
}

/* A state page holds rows of x, or of x then e, one per position of its block. */
__global__ static void __launch_bounds__(256)
    rows_state(struct tlc_step step, bool save, float *x, float *e, int d, int rows_per_page, struct tlc_set set)
{
    MY_ROW(set, i);
    struct tlc_row row = step.rows[set.rows[i]];
    int64_t width = e ? 2 * d : d;
    int32_t page = step.pages[step.seqs[row.seq].state_at + row.pos / rows_per_page];
    float *at = (float *)(step.arena + page * step.page_bytes) + row.pos % rows_per_page * width;
    for (int j = threadIdx.x; j < width; j += 256) {
        float *r = (j < d ? x + j : e + (j - d)) + (int64_t)set.rows[i] * d;
        if (save)
            at[j] = *r;
        else
            *r = at[j];
    }
}

cudaError_t tlc_rows_state(const struct tlc_launch *l, const struct tlc_step *step, bool save, float *x, float *e,
                           int d, int rows_per_page, const struct tlc_set *set)
{
    return tlc_launch(l, rows_state, blocks(set), dim3(256), 0, *step, save, x, e, d, rows_per_page, *set);
}
