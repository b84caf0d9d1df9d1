/* cuda/attention_heads.cuh - a q, k or v head of a row in the registers of a warp, value lane + 32 i in v[i]: the same
 * operations in the same order as tlc_head_ready. */
#ifndef TLC_ATTENTION_HEADS_CUH
#define TLC_ATTENTION_HEADS_CUH

#include "attention_impl.cuh"

/* What the finish of a head needs besides the product, read before that is there. */
template <int D> struct tlc_head {
    enum { N = D / 32 };
    float b0[N], b1[N], w[N], c[N], s[N]; /* both biases, norm, cosines, sines */
};

/* Cosine and sine of the angle that value j of a head is turned by. */
template <int D>
static __device__ __forceinline__ void tlc_head_angles(const struct tlc_attn_args *a, int pos, float *c, float *s)
{
    const float *rope = a->rope + (int64_t)pos * D;
    bool pair = a->finish.rope == TL_ROPE_PAIR, some = a->finish.rope != TL_ROPE_NONE && a->fused;
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        int j = ((int)threadIdx.x & 31) + 32 * i, angle = pair ? j / 2 : j < D / 2 ? j : j - D / 2;
        c[i] = some ? rope[angle] : 0.0f;
        s[i] = some ? rope[D / 2 + angle] : 0.0f;
    }
}

/* number counts q heads, then k heads, then v heads. */
template <int D>
static __device__ __forceinline__ struct tlc_head<D> tlc_head_of(const struct tlc_attn_args *a, int number, int pos) {
    struct tlc_head<D> h = {
    };
    bool turned = number < a->n_heads + a->n_kv_heads;
    const float *norm = number < a->n_heads ? a->q_norm : a->k_norm;
#pragma unroll
    for (int i = 0; i < h.N; i++) {
        int j = ((int)threadIdx.x & 31) + 32 * i;
        h.b0[i] = a->qkv_bias && a->fused ? a->qkv_bias[number * D + j] : 0.0f;
        h.b1[i] = a->qk_bias && a->fused && turned ? a->qk_bias[number * D + j] : 0.0f;
        h.w[i] = a->finish.qk_norm == TL_QKNORM_HEAD && a->fused && turned ? norm[j] : 0.0f;
    }
    if (turned)
        tlc_head_angles<D>(a, pos, h.c, h.s);
    return h;
}

/* tlc_head_norm */
template <int D>
static __device__ __forceinline__ void tlc_head_norm_held(float *v, const float *w, float eps)
{
    float sum = 0.0f, inv;
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        sum = __fmaf_rn(v[i], v[i], sum);
    sum = tlc_warp_sum(sum);
    inv = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)D), eps)));
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        v[i] = w ? __fmul_rn(__fmul_rn(v[i], inv), w[i]) : __fmul_rn(v[i], inv);
}

/* tlc_head_rope. The value that turns with another one lies in the same thread or in the neighbour's; where it does not, x (D
 * floats of the warp's own) is the way. */
template <int D>
static __device__ __forceinline__ void tlc_head_rope_held(float *v, const float *c, const float *s, bool pair, float *x)
{
    enum { N = D / 32, WHOLE = D % 64 == 0 };
    int lane = (int)threadIdx.x & 31;
    float other[N];
    if (pair) {
#pragma unroll
        for (int i = 0; i < N; i++)
            other[i] = __shfl_xor_sync(0xffffffffu, v[i], 1);
    } else if (WHOLE) {
#pragma unroll
        for (int i = 0; i < N; i++)
            other[i] = v[(i + N / 2) % N];
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            x[lane + 32 * i] = v[i];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < N; i++)
            other[i] = x[lane + 32 * i < D / 2 ? lane + 32 * i + D / 2 : lane + 32 * i - D / 2];
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        bool second = pair ? lane & 1 : lane + 32 * i >= D / 2;
        v[i] = second ? __fadd_rn(__fmul_rn(v[i], c[i]), __fmul_rn(other[i], s[i]))
                      : __fsub_rn(__fmul_rn(v[i], c[i]), __fmul_rn(other[i], s[i]));
    }
}

/* From the product to what attention takes; turned: it is no v head. Arrays of what the model does not have are not read. */
template <int D>
static __device__ __forceinline__ void tlc_head_finish_held(const struct tlc_attn_args *a, float *v, bool turned,
                                                            const float *b0, const float *b1, const float *w,
                                                            const float *c, const float *s, float *x)
{
    if (a->fused && a->qkv_bias) {
#pragma unroll
        for (int i = 0; i < D / 32; i++)
            v[i] = __fadd_rn(v[i], b0[i]);
    }
    if (!a->fused || !turned)
        return;
    if (a->qk_bias) {
#pragma unroll
        for (int i = 0; i < D / 32; i++)
            v[i] = __fadd_rn(v[i], b1[i]);
    }
    if (a->finish.qk_norm == TL_QKNORM_HEAD)
        tlc_head_norm_held<D>(v, w, a->finish.eps);
    if (a->finish.rope != TL_ROPE_NONE)
        tlc_head_rope_held<D>(v, c, s, a->finish.rope == TL_ROPE_PAIR, x);
    if (a->finish.qk_norm == TL_QKNORM_HEAD_AFTER_ROPE)
        tlc_head_norm_held<D>(v, nullptr, 1.1920929e-07f);
}

/* A head, read from where this lane's first value is, finished and rounded: to shared memory, and, page not NULL, to its page. turned: it
 * is no v head. */
template <int D>
static __device__ __forceinline__ void tlc_head_take_from(const struct tlc_attn_args *a, const struct tlc_head<D> *h,
                                                          const float *src, bool turned, __half *to, __half *page,
                                                          float *x)
{
    int lane = (int)threadIdx.x & 31;
    float v[D / 32];
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        v[i] = src[32 * i];
    tlc_head_finish_held<D>(a, v, turned, h->b0, h->b1, h->w, h->c, h->s, x);
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        to[lane + 32 * i] = tlc_half(v[i]);
        if (page)
            page[lane + 32 * i] = tlc_half(v[i]);
    }
}

/* The same of the row at `place`. */
template <int D>
static __device__ __forceinline__ void tlc_head_take(const struct tlc_attn_args *a, const struct tlc_head<D> *h,
                                                     int place, int number, __half *to, __half *page, float *x)
{
    tlc_head_take_from<D>(a, h, a->qkv + place * a->ld + number * D + ((int)threadIdx.x & 31),
                          number < a->n_heads + a->n_kv_heads, to, page, x);
}

#endif
