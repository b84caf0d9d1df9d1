/* cuda/linear_ends.cuh - a many-rows product in the words of its kernels (linear_large.cu), and what becomes of its
 * sums. */
#ifndef TLC_LINEAR_ENDS_CUH
#define TLC_LINEAR_ENDS_CUH

#include "rows.cuh"

/* What a kernel needs of one product; pitches and k in bytes. */
struct linear {
    const uint8_t *w;     /* [n_stored][w_pitch] */
    const uint8_t *x;     /* [rows][x_pitch] */
    const float *w_scale; /* integers: [n_stored] */
    const float *x_scale; /* integers: [rows] */
    int64_t w_pitch, x_pitch;
    int k_bytes;
    int n_stored, n_out;
    bool gated;
    const int32_t *rows, *n; /* of the set */
    struct tlc_out out;
};

/* ---- what becomes of the sums ---- */

__device__ static __forceinline__ float value(int acc, float x_scale, float w_scale)
{
    return tlc_scaled(acc, x_scale, w_scale);
}
__device__ static __forceinline__ float value(float acc, float, float) { return acc; }

/* What a thread needs besides the sums to finish G fragments: 16 stored rows from row0 on, each fragment for 8 tokens,
 * from token0 on. */
template <int G> struct ends {
    float w_lo, w_hi;           /* scales of its stored rows */
    float scale[2 * G];         /* of its tokens */
    int at[2 * G];              /* their rows of out, -1 = none */
    float lo[2 * G], hi[2 * G]; /* TLC_EPI_RESIDUAL: what out holds */
};

/* The outputs of a thread's two stored rows: o and o + 8, if they exist. */
struct outputs {
    int o;
    bool lo, hi;
};
__device__ static __forceinline__ struct outputs outputs_of(const struct linear &p, int row0)
{
    struct outputs v;
    v.o = (p.gated ? row0 / 2 : row0) + ((threadIdx.x & 31) >> 2);
    v.lo = v.o < (p.gated ? p.n_out / 2 : p.n_out);
    v.hi = !p.gated && v.o + 8 < p.n_out;
    return v;
}

template <int G>
__device__ static __forceinline__ void ask_w_scales(const struct linear &p, struct ends<G> &e, int row0)
{
    e.w_lo = e.w_hi = 1.0f;
    if (p.w_scale && row0 < p.n_stored) {
        e.w_lo = p.w_scale[row0 + ((threadIdx.x & 31) >> 2)];
        e.w_hi = p.w_scale[row0 + ((threadIdx.x & 31) >> 2) + 8];
    }
}

/* The token of value i of a thread, counted from token0. */
__device__ static __forceinline__ int token_of(int i) { return 2 * (threadIdx.x & 3) + 8 * (i / 2) + i % 2; }

/* Where a token's results go. */
__device__ static __forceinline__ int row_of(const struct linear &p, int token, int n)
{
    return token >= n ? -1 : p.out.epi == TLC_EPI_RESIDUAL ? p.rows[token] : token;
}

template <int G>
__device__ static __forceinline__ void ask_residual(const struct linear &p, struct ends<G> &e, int row0)
{
    struct outputs v = outputs_of(p, row0);
    if (p.out.epi != TLC_EPI_RESIDUAL)
        return;
#pragma unroll
    for (int i = 0; i < 2 * G; i++) {
        const float *x = p.out.data + (int64_t)e.at[i] * p.out.ld + v.o;
        e.lo[i] = e.at[i] >= 0 && v.lo ? x[0] : 0.0f;
        e.hi[i] = e.at[i] >= 0 && v.hi ? x[8] : 0.0f;
    }
}

/* All of it, in two parts: before the wait and after. */
template <int G>
__device__ static __forceinline__ void ask_early(const struct linear &p, struct ends<G> &e, int row0, int token0, int n)
{
    ask_w_scales(p, e, row0);
#pragma unroll
    for (int i = 0; i < 2 * G; i++)
        e.at[i] = row0 < p.n_stored ? row_of(p, token0 + token_of(i), n) : -1;
}
template <int G>
__device__ static __forceinline__ void ask_late(const struct linear &p, struct ends<G> &e, int row0, int token0)
{
#pragma unroll
    for (int i = 0; i < 2 * G; i++)
        e.scale[i] = p.x_scale && e.at[i] >= 0 ? p.x_scale[token0 + token_of(i)] : 1.0f;
    ask_residual(p, e, row0);
}

template <int G, typename T>
__device__ static __forceinline__ void finish(const struct linear &p, const struct ends<G> &e, const T (*acc)[4],
                                              int row0)
{
    struct outputs v = outputs_of(p, row0);
    float a[2 * G], b[2 * G];
#pragma unroll
    for (int i = 0; i < 2 * G; i++) {
        a[i] = value(acc[i / 2][i % 2], e.scale[i], e.w_lo);
        b[i] = value(acc[i / 2][i % 2 + 2], e.scale[i], e.w_hi);
    }
    switch (p.out.epi) {
    case TLC_EPI_STORE: break;
    case TLC_EPI_SILU_MUL:
#pragma unroll
        for (int i = 0; i < 2 * G; i++)
            a[i] = tlc_silu_mul(a[i], b[i]);
        break;
    case TLC_EPI_RELU2:
#pragma unroll
        for (int i = 0; i < 2 * G; i++) {
            a[i] = tlc_relu2(a[i]);
            b[i] = tlc_relu2(b[i]);
        }
        break;
    case TLC_EPI_RESIDUAL:
#pragma unroll
        for (int i = 0; i < 2 * G; i++) {
            a[i] = __fadd_rn(e.lo[i], a[i]);
            b[i] = __fadd_rn(e.hi[i], b[i]);
        }
        break;
    }
#pragma unroll
    for (int i = 0; i < 2 * G; i++) {
        float *y = p.out.data + (int64_t)e.at[i] * p.out.ld + v.o;
        if (e.at[i] >= 0 && v.lo)
            y[0] = a[i];
        if (e.at[i] >= 0 && v.hi)
            y[8] = b[i];
    }
}

#endif
