/* cuda/rows.cuh - operations on one row, as device functions: every kernel that needs one uses these, so that a row's bits do not
 * depend on which kernel it went through. 256 threads work on a row in tlc_row_*; one warp works on a head in tlc_head_*. */
#ifndef TLC_ROWS_CUH
#define TLC_ROWS_CUH

#include "device.cuh"

#define TLC_ROW_THREADS 256

/* Meets the 256 threads that work on rows; a kernel may have other warps beside them. */
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

/* Over 256 threads (all of threads 0 .. 255 of the block); the same value in all of them. red: shared, 8 words that nobody
 * else touches before the barrier after next. */
__device__ static __forceinline__ float tlc_row_sum(float v, float *red)
{
    v = tlc_warp_sum(v);
    if ((threadIdx.x & 31) == 0)
        red[threadIdx.x >> 5] = v;
    tlc_row_barrier();
    return ((red[0] + red[1]) + (red[2] + red[3])) + ((red[4] + red[5]) + (red[6] + red[7]));
}

__device__ static __forceinline__ unsigned tlc_row_max(unsigned v, unsigned *red)
{
    v = __reduce_max_sync(0xffffffffu, v);
    if ((threadIdx.x & 31) == 0)
        red[threadIdx.x >> 5] = v;
    tlc_row_barrier();
    return max(max(max(red[0], red[1]), max(red[2], red[3])), max(max(red[4], red[5]), max(red[6], red[7])));
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
 * all its q are 0. */
__device__ static __forceinline__ float tlc_quant_scale(unsigned abs_bits)
{
    float m = __uint_as_float(abs_bits);
    return abs_bits >= 0x7f800000u ? m : __fdiv_rn(fmaxf(m, 1e-8f), 127.0f);
}

/* round-to-even(x / s) in -127 .. 127; inv = 1 / s. The product decides except near a tie, where the division does: the same
 * integer for less work. */
__device__ static __forceinline__ int tlc_quant(float x, float s, float inv)
{
    float y = __fmul_rn(x, inv), q = rintf(y);
    if (fabsf(fabsf(y - q) - 0.5f) < 1e-3f)
        q = rintf(__fdiv_rn(x, s));
    return __float_as_uint(s) >= 0x7f800000u ? 0 : (int)fminf(fmaxf(q, -127.0f), 127.0f);
}

/* ---- a row made ready for a linear layer, by 256 threads ---- */

/* Where a row comes from: a[0 .. n_a), then b; norm: RMS norm over all of it with weights w (NULL = none). */
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
        v = make_float4(__fmul_rn(v.x, inv), __fmul_rn(v.y, inv), __fmul_rn(v.z, inv), __fmul_rn(v.w, inv));
        if (s->w && s->n % 4 == 0) {
            float4 w = __ldg((const float4 *)(s->w + j));
            v = make_float4(__fmul_rn(v.x, w.x), __fmul_rn(v.y, w.y), __fmul_rn(v.z, w.z), __fmul_rn(v.w, w.w));
        } else if (s->w) {
            v.x = __fmul_rn(v.x, s->w[j]);
            v.y = j + 1 < s->n ? __fmul_rn(v.y, s->w[j + 1]) : 0.0f;
            v.z = j + 2 < s->n ? __fmul_rn(v.z, s->w[j + 2]) : 0.0f;
            v.w = j + 3 < s->n ? __fmul_rn(v.w, s->w[j + 3]) : 0.0f;
        }
        top = max(max(top, max(tlc_abs_bits(v.x), tlc_abs_bits(v.y))), max(tlc_abs_bits(v.z), tlc_abs_bits(v.w)));
        *(float4 *)(buf + j) = v;
    }
    return top;
}

/* The row as int8 with its scale; q is padded with zeros to k_pad (a multiple of 64). */
__device__ static __forceinline__ void tlc_row_quantise(const struct tlc_source *s, int k_pad, float *buf, float *red,
                                                        int8_t *q, float *scale)
{
    int t = threadIdx.x & 255;
    unsigned top = tlc_row_max(tlc_row_load(s, buf, red), (unsigned *)red + 8);
    float sc = tlc_quant_scale(top), inv = __fdiv_rn(1.0f, sc);
    for (int j = 4 * t; j < k_pad; j += 4 * TLC_ROW_THREADS) {
        char4 c = make_char4(0, 0, 0, 0);
        if (j < s->n) {
            float4 v = *(const float4 *)(buf + j);
            c = make_char4((signed char)tlc_quant(v.x, sc, inv), (signed char)tlc_quant(v.y, sc, inv),
                           (signed char)tlc_quant(v.z, sc, inv), (signed char)tlc_quant(v.w, sc, inv));
        }
        *(char4 *)(q + j) = c;
    }
    if (t == 0)
        *scale = sc;
}

/* The row rounded to BF16, padded with zeros to k_pad. */
__device__ static __forceinline__ void tlc_row_bf16(const struct tlc_source *s, int k_pad, float *buf, float *red,
                                                    __nv_bfloat16 *out)
{
    int t = threadIdx.x & 255;
    tlc_row_load(s, buf, red);
    for (int j = 4 * t; j < k_pad; j += 4 * TLC_ROW_THREADS) {
        float4 v = j < s->n ? *(const float4 *)(buf + j) : make_float4(0, 0, 0, 0);
        __nv_bfloat162 lo = __floats2bfloat162_rn(v.x, v.y), hi = __floats2bfloat162_rn(v.z, v.w);
        *(__nv_bfloat162 *)(out + j) = lo;
        *(__nv_bfloat162 *)(out + j + 2) = hi;
    }
}

__device__ static __forceinline__ void tlc_row_f32(const struct tlc_source *s, int k_pad, float *buf, float *red, float *out)
{
    int t = threadIdx.x & 255;
    tlc_row_load(s, buf, red);
    for (int j = 4 * t; j < k_pad; j += 4 * TLC_ROW_THREADS)
        *(float4 *)(out + j) = j < s->n ? *(const float4 *)(buf + j) : make_float4(0, 0, 0, 0);
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
__device__ static __forceinline__ void tlc_head_finish_qk(float *x, const float *bias, const float *w, const float *table,
                                                          struct tlc_head_finish f)
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
