/* cuda/rows.cuh - operations on one row, as device functions: every kernel that needs one uses these, so that a row's bits do not
 * depend on which kernel it went through. 256 threads work on a row in tlc_row_*; one warp works on a head in tlc_head_*. */
#ifndef TLC_ROWS_CUH
#define TLC_ROWS_CUH

#include "device.cuh"

#define TLC_ROW_THREADS 256

/* Meets the 256 threads that work on a row. */
__device__ static __forceinline__ void tlc_row_barrier() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

/* ---- reductions in a fixed tree ---- */

__device__ static __forceinline__ float tlc_warp_sum(float v)
{
#pragma unroll
    for (int d = 16; d > 0; d >>= 1)
        v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, d));
    return v;
}

/* The largest |x|, as bits: NaN is above infinity, infinity above every number. */
__device__ static __forceinline__ unsigned tlc_abs_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

/* Over 256 threads (threads 0 .. 255 of the block); the same value in all of them. red: shared, 8 words that nobody else touches
 * before the barrier after next. */
__device__ static __forceinline__ float tlc_row_sum(float v, float *red)
{
    v = tlc_warp_sum(v);
    if ((threadIdx.x & 31) == 0)
        red[threadIdx.x >> 5] = v;
    tlc_row_barrier();
    return ((red[0] + red[1]) + (red[2] + red[3])) + ((red[4] + red[5]) + (red[6] + red[7]));
}

/* ---- elementwise ---- */

__device__ static __forceinline__ float tlc_exp(float x) /* of what is at most about 0 in attention; any x elsewhere */
{
    float y = __fmul_rn(x, 1.44269504f);
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(y));
    return y;
}

__device__ static __forceinline__ float tlc_silu_mul(float g, float u)
{
    return __fmul_rn(__fdiv_rn(g, __fadd_rn(1.0f, tlc_exp(-g))), u);
}

/* tlc_silu_mul() of N values, its bits, side by side: the quotients are made by the steps of a division (a reciprocal, refined, a
 * product, corrected by its remainder), without a branch for each. Where a value is so small or large that those steps may lose bits,
 * the thread divides. */
template <int N>
__device__ static __forceinline__ void tlc_silu_mul_all(float (&y)[N], const float (&g)[N], const float (&u)[N])
{
    bool plain = true;
#pragma unroll
    for (int i = 0; i < N; i++) {
        float d = __fadd_rn(1.0f, tlc_exp(-g[i])), size = fabsf(g[i]), r, q;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
        r = __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
        q = __fmul_rn(g[i], r);
        q = __fmaf_rn(r, __fmaf_rn(-d, q, g[i]), q);
        y[i] = __fmul_rn(size == 0.0f ? g[i] : q, u[i]);
        plain = plain && size <= 64.0f && (size >= 1e-18f || size == 0.0f);
    }
    if (plain)
        return;
#pragma unroll
    for (int i = 0; i < N; i++)
        y[i] = tlc_silu_mul(g[i], u[i]);
}

__device__ static __forceinline__ float tlc_relu2(float x)
{
    float r = fmaxf(x, 0.0f);
    return __fmul_rn(0.5f, __fmul_rn(r, r));
}

/* result = (float)acc * (s * S), unfused */
__device__ static __forceinline__ float tlc_scaled(int acc, float s, float row_scale)
{
    return __fmul_rn(__int2float_rn(acc), __fmul_rn(s, row_scale));
}

/* The scale of a row whose largest absolute value has these bits; not finite where the row holds a NaN or an infinity, and then
 * all its q are 0. The quotient is the one of a division: the remainder corrects the product (tried for every mantissa). */
__device__ static __forceinline__ float tlc_quant_scale(unsigned abs_bits)
{
    float m = fmaxf(__uint_as_float(abs_bits), 1e-8f), q = __fmul_rn(m, 1.0f / 127.0f);
    q = __fmaf_rn(__fmaf_rn(-127.0f, q, m), 1.0f / 127.0f, q);
    return abs_bits >= 0x7f800000u ? __uint_as_float(abs_bits) : q;
}

/* About 1 / s; 0 where s is not finite. */
__device__ static __forceinline__ float tlc_quant_inv(float s)
{
    float inv;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inv) : "f"(s));
    return __float_as_uint(s) >= 0x7f800000u ? 0.0f : inv;
}

/* Four values as int8: round-to-even(v / s), which is -127 .. 127 for the s above. inv: tlc_quant_inv(s). The
 * product decides except near a tie, where the division does: the same integers for less work. They differ by 2^-22 of themselves
 * at most (the reciprocal by 2^-23, the product and the quotient by 2^-24 each), which is added to the distance from the integer. */
#define TLC_ROUND 12582912.0f /* 1.5 * 2^23: what is added to it is rounded to an integer, in the low bits */
#define TLC_APART 2.5e-7f
#define TLC_TIE   (0.5f - 2e-7f)

__device__ static __forceinline__ uint32_t tlc_low_bytes(float4 q)
{
    uint32_t lo = __byte_perm(__float_as_uint(q.x), __float_as_uint(q.y), 0x0040);
    uint32_t hi = __byte_perm(__float_as_uint(q.z), __float_as_uint(q.w), 0x0040);
    return __byte_perm(lo, hi, 0x5410);
}

/* How far the quotient may be from the integer that the product makes. y: the product; q: the integer, plus TLC_ROUND. */
__device__ static __forceinline__ float tlc_quant_far(float y, float q)
{
    return __fmaf_rn(fabsf(y), TLC_APART, fabsf(__fsub_rn(y, __fsub_rn(q, TLC_ROUND))));
}

/* By the product; right unless *far, which is raised to the largest tlc_quant_far(), is above TLC_TIE. */
__device__ static __forceinline__ uint32_t tlc_quant4_near(float4 v, float inv, float *far)
{
    float4 y = make_float4(__fmul_rn(v.x, inv), __fmul_rn(v.y, inv), __fmul_rn(v.z, inv), __fmul_rn(v.w, inv));
    float4 q = make_float4(__fadd_rn(y.x, TLC_ROUND), __fadd_rn(y.y, TLC_ROUND), __fadd_rn(y.z, TLC_ROUND),
                           __fadd_rn(y.w, TLC_ROUND));
    float a = fmaxf(tlc_quant_far(y.x, q.x), tlc_quant_far(y.y, q.y));
    float b = fmaxf(tlc_quant_far(y.z, q.z), tlc_quant_far(y.w, q.w));
    *far = fmaxf(*far, fmaxf(a, b));
    return tlc_low_bytes(q);
}

/* By the quotient. */
__device__ static __forceinline__ uint32_t tlc_quant4_tie(float4 v, float s)
{
    return tlc_low_bytes(make_float4(__fadd_rn(__fdiv_rn(v.x, s), TLC_ROUND), __fadd_rn(__fdiv_rn(v.y, s), TLC_ROUND),
                                     __fadd_rn(__fdiv_rn(v.z, s), TLC_ROUND), __fadd_rn(__fdiv_rn(v.w, s), TLC_ROUND)));
}

__device__ static __forceinline__ uint32_t tlc_quant4(float4 v, float s, float inv)
{
    float far = 0.0f;
    uint32_t word = tlc_quant4_near(v, inv, &far);
    if (far > TLC_TIE)
        word = tlc_quant4_tie(v, s);
    return inv == 0.0f ? 0 : word;
}

/* ---- a row and its norm ---- */

/* Where a row comes from: a[0 .. n_a), then b; norm: RMS norm over all of it with weights w (NULL = none): (x * w) * inv, in
 * this order, so that the largest result is inv times the largest product and one reduction finds both. */
struct tlc_source {
    const float *a, *b;
    const float *w;
    int n_a, n; /* n: all of it */
    bool norm;
    float eps;
};

/* buf[j] = the row, normed; j < n rounded up to 4, ends with zeros. Thread t owns the quadruples t, t + 256, ... and nobody else
 * reads them before the caller's barrier. Returns the largest |value| as bits, of this thread alone. red: 8 shared words. */
__device__ static __forceinline__ unsigned tlc_row_load(const struct tlc_source *s, float *buf, float *red)
{
    int t = threadIdx.x & 255;
    unsigned top = 0;
    float sum = 0.0f, inv = 1.0f;
    for (int j = 4 * t; j < s->n; j += 4 * TLC_ROW_THREADS) {
        float v[4];
        if (j + 4 <= s->n_a && s->n_a % 4 == 0) {
            float4 q = *(const float4 *)(s->a + j);
            v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
        } else {
            for (int c = 0; c < 4; c++)
                v[c] = j + c < s->n_a ? s->a[j + c] : j + c < s->n ? s->b[j + c - s->n_a] : 0.0f;
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            sum = __fmaf_rn(v[c], v[c], sum);
            top = max(top, tlc_abs_bits(v[c]));
        }
        *(float4 *)(buf + j) = make_float4(v[0], v[1], v[2], v[3]);
    }
    if (!s->norm)
        return top;
    sum = tlc_row_sum(sum, red);
    inv = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)s->n), s->eps)));
    top = 0;
    for (int j = 4 * t; j < s->n; j += 4 * TLC_ROW_THREADS) {
        float4 v = *(const float4 *)(buf + j);
        if (s->w && s->n % 4 == 0) {
            float4 w = __ldg((const float4 *)(s->w + j));
            v = make_float4(__fmul_rn(v.x, w.x), __fmul_rn(v.y, w.y), __fmul_rn(v.z, w.z), __fmul_rn(v.w, w.w));
        } else if (s->w) {
            v.x = __fmul_rn(v.x, s->w[j]);
            v.y = j + 1 < s->n ? __fmul_rn(v.y, s->w[j + 1]) : 0.0f;
            v.z = j + 2 < s->n ? __fmul_rn(v.z, s->w[j + 2]) : 0.0f;
            v.w = j + 3 < s->n ? __fmul_rn(v.w, s->w[j + 3]) : 0.0f;
        }
        v = make_float4(__fmul_rn(v.x, inv), __fmul_rn(v.y, inv), __fmul_rn(v.z, inv), __fmul_rn(v.w, inv));
        top = max(max(top, max(tlc_abs_bits(v.x), tlc_abs_bits(v.y))), max(tlc_abs_bits(v.z), tlc_abs_bits(v.w)));
        *(float4 *)(buf + j) = v;
    }
    return top;
}

/* ---- a row made ready for a linear layer, by 512 threads ----
 * Thread t owns quadruples t, t + 512, ... With Q > 0 it holds up to Q of them in registers, all loads under way at once (rows of
 * up to 2048 Q values, widths that are multiples of 4); with Q = 0 it reads them as often as it needs them. The same operations in
 * the same order: the same bits. */

#define TLC_READY_THREADS 512

__device__ static __forceinline__ void tlc_ready_barrier() { asm volatile("bar.sync 2, 512;" ::: "memory"); }

template <int Q> struct tlc_held {
    float4 v[Q ? Q : 1], w[Q ? Q : 1];
};

__host__ __device__ static inline int tlc_hold_of(int n, int n_a)
{
    return n % 4 || n_a % 4 ? 0 : n <= 2048 ? 1 : n <= 6144 ? 3 : 0;
}

__device__ static __forceinline__ float4 tlc_ragged4(const float *a, const float *b, int n_a, int n, int j)
{
    float v[4];
    for (int c = 0; c < 4; c++)
        v[c] = j + c < n_a ? a[j + c] : j + c < n ? b[j + c - n_a] : 0.0f;
    return make_float4(v[0], v[1], v[2], v[3]);
}

/* The norm's weights: nobody writes them, so this may come before tlc_wait(). PLAIN: as a plain load, for __ldg() may be moved behind
 * the wait. (It is not in the integer kernels of one row, which keep it.) */
template <int Q, bool PLAIN = true>
__device__ static __forceinline__ void tlc_hold_weights(const struct tlc_source *s, struct tlc_held<Q> *h)
{
#pragma unroll
    for (int q = 0; q < Q; q++) {
        int j = 4 * (threadIdx.x + 512 * q);
        if (PLAIN)
            h->w[q] = s->norm && s->w && j < s->n ? *(const float4 *)(s->w + j) : make_float4(1, 1, 1, 1);
        else
            h->w[q] = s->norm && s->w && j < s->n ? __ldg((const float4 *)(s->w + j)) : make_float4(1, 1, 1, 1);
    }
}

template <int Q> __device__ static __forceinline__ void tlc_hold_row(const struct tlc_source *s, struct tlc_held<Q> *h)
{
#pragma unroll
    for (int q = 0; q < Q; q++) {
        int j = 4 * (threadIdx.x + 512 * q);
        h->v[q] = j < s->n ? *(const float4 *)(j < s->n_a ? s->a + j : s->b + (j - s->n_a)) : make_float4(0, 0, 0, 0);
    }
}

/* A quadruple times the norm's weights, its squares added to *sum. */
__device__ static __forceinline__ float4 tlc_weighted(bool norm, float4 v, float4 w, float *sum)
{
    if (!norm)
        return v;
    *sum = __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmaf_rn(v.x, v.x, *sum))));
    return make_float4(__fmul_rn(v.x, w.x), __fmul_rn(v.y, w.y), __fmul_rn(v.z, w.z), __fmul_rn(v.w, w.w));
}

__device__ static __forceinline__ unsigned tlc_top4(float4 v)
{
    return max(max(tlc_abs_bits(v.x), tlc_abs_bits(v.y)), max(tlc_abs_bits(v.z), tlc_abs_bits(v.w)));
}

__device__ static __forceinline__ float4 tlc_source4(const struct tlc_source *s, int j, float *sum)
{
    float4 w = s->norm && s->w ? tlc_ragged4(s->w, NULL, s->n, s->n, j) : make_float4(1, 1, 1, 1);
    return tlc_weighted(s->norm, tlc_ragged4(s->a, s->b, s->n_a, s->n, j), w, sum);
}

/* What a warp has of a sum of squares and of the bits of a largest |value|. */
__device__ static __forceinline__ float2 tlc_row_part(float sum, unsigned top, bool norm)
{
    if (norm)
        sum = tlc_warp_sum(sum);
    return make_float2(sum, __uint_as_float(__reduce_max_sync(0xffffffffu, top)));
}

/* Of all: lane i has warp i % 16's. *inv of the norm over n values (1 without), and the bits of the largest |value| after it. */
__device__ static __forceinline__ unsigned tlc_row_whole(float2 part, bool norm, int n, float eps, float *inv)
{
    float sum = part.x;
    unsigned top = __reduce_max_sync(0xffffffffu, __float_as_uint(part.y));
    *inv = 1.0f;
    if (!norm)
        return top;
#pragma unroll
    for (int d = 8; d > 0; d >>= 1)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, d));
    *inv = __frsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)n), eps));
    return __float_as_uint(__fmul_rn(__uint_as_float(top), *inv));
}

/* Both, over 512 threads. red: 32 shared words that nobody else touches before the barrier after next. */
__device__ static __forceinline__ unsigned tlc_row_reduce(float sum, unsigned top, bool norm, int n, float eps,
                                                          float2 *red, float *inv)
{
    float2 part = tlc_row_part(sum, top, norm);
    if ((threadIdx.x & 31) == 0)
        red[threadIdx.x >> 5] = part;
    tlc_ready_barrier();
    return tlc_row_whole(red[threadIdx.x & 15], norm, n, eps, inv);
}

/* This thread's part of a row's sum of squares, and the bits of its largest |value|. Held values become products with the norm's
 * weights. */
template <int Q>
__device__ static __forceinline__ unsigned tlc_row_weigh(const struct tlc_source *s, struct tlc_held<Q> *h, float *sum)
{
    unsigned top = 0;
#pragma unroll
    for (int q = 0; q < Q; q++) {
        h->v[q] = tlc_weighted(s->norm, h->v[q], h->w[q], sum);
        top = max(top, tlc_top4(h->v[q]));
    }
    for (int j = 4 * threadIdx.x; Q == 0 && j < s->n; j += 4 * 512)
        top = max(top, tlc_top4(tlc_source4(s, j, sum)));
    return top;
}

/* Both, of a whole row. */
template <int Q>
__device__ static __forceinline__ unsigned tlc_row_measure(const struct tlc_source *s, struct tlc_held<Q> *h,
                                                           float2 *red, float *inv)
{
    float sum = 0.0f;
    unsigned top = tlc_row_weigh<Q>(s, h, &sum);
    return tlc_row_reduce(sum, top, s->norm, s->n, s->eps, red, inv);
}

__device__ static __forceinline__ float4 tlc_times(float4 v, float f)
{
    return make_float4(__fmul_rn(v.x, f), __fmul_rn(v.y, f), __fmul_rn(v.z, f), __fmul_rn(v.w, f));
}

/* The quadruple at j after the norm, held as number q. */
template <int Q>
__device__ static __forceinline__ float4 tlc_ready4(const struct tlc_source *s, const struct tlc_held<Q> *h, int q,
                                                    int j, float inv)
{
    float unused = 0.0f;
    float4 v = Q ? h->v[Q ? q : 0] : tlc_source4(s, j, &unused);
    return s->norm ? tlc_times(v, inv) : v;
}

/* for each quadruple number q at j < end of this thread */
#define TLC_MY_QUADS(q, j, end)                                                                                        \
    _Pragma("unroll") for (int q = 0, j = 4 * threadIdx.x; (Q == 0 || q < Q) && j < (end); q++, j += 4 * 512)

/* The row as int8 with its scale; out is padded with zeros to k_pad (a multiple of 64). */
template <int Q>
__device__ static __forceinline__ void tlc_ready_int8(const struct tlc_source *s, struct tlc_held<Q> *h, int k_pad,
                                                      float2 *red, int8_t *out, float *scale)
{
    float norm_inv, sc, inv;
    sc = tlc_quant_scale(tlc_row_measure<Q>(s, h, red, &norm_inv));
    inv = tlc_quant_inv(sc);
    TLC_MY_QUADS(q, j, k_pad)
    *(uint32_t *)(out + j) = j < s->n ? tlc_quant4(tlc_ready4<Q>(s, h, q, j, norm_inv), sc, inv) : 0;
    if (threadIdx.x == 0)
        *scale = sc;
}

/* The row rounded to BF16, padded with zeros to k_pad. */
template <int Q>
__device__ static __forceinline__ void tlc_ready_bf16(const struct tlc_source *s, struct tlc_held<Q> *h, int k_pad,
                                                      float2 *red, __nv_bfloat16 *out)
{
    float inv = 1.0f;
    if (s->norm)
        tlc_row_measure<Q>(s, h, red, &inv);
    TLC_MY_QUADS(q, j, k_pad)
    {
        float4 v = j < s->n ? tlc_ready4<Q>(s, h, q, j, inv) : make_float4(0, 0, 0, 0);
        *(__nv_bfloat162 *)(out + j) = __floats2bfloat162_rn(v.x, v.y);
        *(__nv_bfloat162 *)(out + j + 2) = __floats2bfloat162_rn(v.z, v.w);
    }
}

template <int Q>
__device__ static __forceinline__ void tlc_ready_f32(const struct tlc_source *s, struct tlc_held<Q> *h, int k_pad,
                                                     float2 *red, float *out)
{
    float inv = 1.0f;
    if (s->norm)
        tlc_row_measure<Q>(s, h, red, &inv);
    TLC_MY_QUADS(q, j, k_pad)
    *(float4 *)(out + j) = j < s->n ? tlc_ready4<Q>(s, h, q, j, inv) : make_float4(0, 0, 0, 0);
}

/* ---- the best of logits ---- */

/* A logit as a number that orders like it, above the complement of its id: of equal logits the lowest id is the largest key, and
 * one that is not finite is above all. */
__device__ static __forceinline__ unsigned long long tlc_best_key(float v, int id)
{
    unsigned bits = __float_as_uint(__fadd_rn(v, 0.0f)); /* -0 becomes +0, which it is equal to */
    bits = (bits & 0x7fffffffu) >= 0x7f800000u ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (unsigned long long)bits << 32 | (unsigned)~id;
}

__device__ static __forceinline__ unsigned long long tlc_warp_top(unsigned long long key)
{
    unsigned high = __reduce_max_sync(0xffffffffu, (unsigned)(key >> 32));
    unsigned low = __reduce_max_sync(0xffffffffu, key >> 32 == high ? (unsigned)key : 0);
    return (unsigned long long)high << 32 | low;
}

/* Row i's best token, to the device and to the host that waits for it. */
__device__ static __forceinline__ void tlc_report_best(const struct tlc_report *to, int32_t *best, int i,
                                                       unsigned long long key)
{
    int32_t token = key >> 32 == 0xffffffffu ? -1 : (int)~(unsigned)key;
    best[i] = token;
    if (to->fence)
        __threadfence_system();
    if (to->written)
        *(volatile uint64_t *)(to->written + i) = to->number << 32 | (uint32_t)token;
}

/* ---- one head of d values, by one warp ---- */

/* x, y: d floats, shared or global; y may be x; w: d weights or NULL. d <= 256, even. Lane i owns values i, i + 32, ... */
__device__ static __forceinline__ void tlc_head_norm(float *y, const float *x, const float *w, int d, float eps)
{
    int lane = threadIdx.x & 31;
    float v[8], sum = 0.0f, inv;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int j = lane + 32 * i;
        v[i] = j < d ? x[j] : 0.0f;
        sum = __fmaf_rn(v[i], v[i], sum);
    }
    sum = tlc_warp_sum(sum);
    inv = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)d), eps)));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int j = lane + 32 * i;
        if (j < d)
            y[j] = w ? __fmul_rn(__fmul_rn(v[i], inv), w[j]) : __fmul_rn(v[i], inv);
    }
    __syncwarp();
}

/* Rotate in place; table: d/2 cosines, then d/2 sines of the position. */
__device__ static __forceinline__ void tlc_head_rope(float *x, const float *table, int d, bool pair)
{
    int lane = threadIdx.x & 31, half = d / 2;
    for (int j = lane; j < half; j += 32) {
        int ia = pair ? 2 * j : j, ib = pair ? 2 * j + 1 : j + half;
        float a = x[ia], b = x[ib], c = table[j], s = table[half + j];
        x[ia] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
        x[ib] = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
    }
    __syncwarp();
}

/* Everything between the qkv product and attention for one q or k head, in place: bias, norm, rope (in the order of
 * arch.h). Norms of TL_QKNORM_FULL are done before, over the whole row. */
struct tlc_head_finish {
    int d;
    enum tl_qk_norm qk_norm;
    enum tl_rope rope;
    float eps;
};
__device__ static __forceinline__ void tlc_head_finish_qk(float *x, const float *bias, const float *w,
                                                          const float *table, struct tlc_head_finish f)
{
    int lane = threadIdx.x & 31;
    if (bias) {
        for (int j = lane; j < f.d; j += 32)
            x[j] = __fadd_rn(x[j], bias[j]);
        __syncwarp();
    }
    if (f.qk_norm == TL_QKNORM_HEAD)
        tlc_head_norm(x, x, w, f.d, f.eps);
    if (f.rope != TL_ROPE_NONE)
        tlc_head_rope(x, table, f.d, f.rope == TL_ROPE_PAIR);
    if (f.qk_norm == TL_QKNORM_HEAD_AFTER_ROPE)
        tlc_head_norm(x, x, nullptr, f.d, 1.1920929e-07f);
}

/* F32 to the F16 that KV pages and attention hold: nearest even; an overflow becomes the largest finite value and NaN becomes 0,
 * so that a broken row cannot reach rows that mask it (0 * infinity is NaN in a matrix unit). */
__device__ static __forceinline__ __half tlc_half(float x)
{
    return __float2half_rn(x != x ? 0.0f : fminf(fmaxf(x, -65504.0f), 65504.0f));
}

#endif
