/* cuda/solo_row.cuh - the row of a product, by the row warps: values of others, residual, norm, quantising; each block of
 * the cluster has a part of it. */
#ifndef TLC_SOLO_ROW_CUH
#define TLC_SOLO_ROW_CUH

#include "rows.cuh"
#include "solo.cuh"

/* What a thread of the row warps keeps. It has the quadruples thread + 512 q, q < Q; the stream's stay with it. */
template <int QX> struct solo_maker {
    int thread; /* of the 512 of rows.cuh */
    float4 x[QX];
    uint32_t far[SOLO_CLUSTER],
        far_lane; /* what a shared address is further on in each block of the cluster; in block `lane` */
    uint32_t parts, told, row, ready, scale; /* row, ready, scale: of the row that is made */
    int tells;                               /* before: reductions */
    float mean_part;                         /* 1 / d_model */
};

/* This thread's quadruples of n published values (a multiple of 4), as soon as they are of `epoch`; 0 where there are none. nap: ns
 * between two looks. What it compares with is 0 for what nobody asks for, so that a look is checked without a branch. */
template <int Q>
__device__ static __forceinline__ void solo_take(const uint64_t *from, int n, uint32_t epoch, int thread, float4 *v,
                                                 int nap)
{
    uint64_t w[Q][4] = {};
    uint32_t expected[Q], wrong;
    int looks = 0, left = n - 4 * thread;
    from += solo_place(4 * thread);
#pragma unroll
    for (int q = 0; q < Q; q++)
        expected[q] = 2048 * q < left ? epoch : 0;
    if (Q > 1) { /* as long as the first of the last ones are not there, no look at all of them */
        const uint64_t *last = from + (2048 * (Q - 1) < left ? 2048 * (Q - 1) : 0);
        do {
            if (left > 0)
                solo_look2(last, &w[0][0], &w[0][1]);
            solo_patience(&looks);
        } while (__any_sync(0xffffffffu, (uint32_t)w[0][0] != expected[0]));
    }
    for (;;) {
#pragma unroll
        for (int q = 0; q < Q; q++)
            if (2048 * q < left) {
                solo_look2(from + 2048 * q, &w[q][0], &w[q][1]);
                solo_look2(from + 2048 * q + 64, &w[q][2], &w[q][3]);
            }
        wrong = 0;
#pragma unroll
        for (int q = 0; q < Q; q++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                wrong |= (uint32_t)w[q][c] ^ expected[q];
        if (__all_sync(0xffffffffu, wrong == 0))
            break;
        if (nap)
            __nanosleep((unsigned)nap);
        solo_patience(&looks);
    }
#pragma unroll
    for (int q = 0; q < Q; q++)
        v[q] = make_float4(solo_value(w[q][0]), solo_value(w[q][1]), solo_value(w[q][2]), solo_value(w[q][3]));
}

/* The norm's factor, the bits of tlc_row_whole(). part: 1 / n, and the quotient is the one of a division, for its remainder corrects
 * the product (tried for every mantissa and every n that a row may have); then come the steps of __frsqrt_rn(). Sums so small or large
 * that these may lose bits go the long way. */
__device__ static __forceinline__ float solo_norm_inv(float sum, int n, float part, float eps)
{
    float mean = __fmul_rn(sum, part), y, t, e;
    if (__float_as_uint(sum) - 0x21800000u >= 0x3c000000u) /* outside of 2^-60 .. 2^60 */
        return __frsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)n), eps));
    mean = __fadd_rn(__fmaf_rn(__fmaf_rn(-(float)n, mean, sum), part, mean), eps);
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(mean));
    t = __fmul_rn(y, y);
    e = __fmaf_rn(-mean, __fmaf_rn(y, y, -t), __fmaf_rn(-mean, t, 1.0f));
    return __fmaf_rn(__fmaf_rn(e, 0.375f, 0.5f), __fmul_rn(y, e), y);
}

/* Of the whole row, as tlc_row_reduce(). NORM: with sums, or for its top alone. tops: is the top asked for? (It is 0 else.) */
template <int QX, bool NORM>
__device__ static __forceinline__ unsigned solo_reduce(struct solo_maker<QX> *m, float sum, unsigned top, bool norm,
                                                       bool tops, int n, float eps, float *inv)
{
    /* By turns: blocks that are ahead may tell of the next row while others still read this one's parts. */
    int lane = threadIdx.x & 31, turn = m->tells & 1, at = turn * 128;
    uint32_t told = m->told + (uint32_t)turn * 8;
    if (threadIdx.x == SOLO_SUMS)
        solo_expect(told, NORM ? 128 : 64);
    if (tops)
        top = __reduce_max_sync(0xffffffffu, top);
    *inv = 1.0f;
    if (!NORM) { /* side by side */
        if (lane < SOLO_CLUSTER)
            tlc_far_put(m->far_lane + m->parts + (uint32_t)(at + m->thread / 32 * 4), m->far_lane + told, top);
        solo_wait(told, (uint32_t)m->tells++ / 2 & 1);
        top = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint4 four = solo_load16(m->parts + (uint32_t)(at + 16 * i));
            top = max(top, max(max(four.x, four.y), max(four.z, four.w)));
        }
        return top;
    }
    if (norm)
        sum = tlc_warp_sum(sum);
    if (lane < SOLO_CLUSTER)
        tlc_far_put(m->far_lane + m->parts + (uint32_t)(at + m->thread / 32 * 8), m->far_lane + told,
                    make_float2(sum, __uint_as_float(top)));
    solo_wait(told, (uint32_t)m->tells++ / 2 & 1);
    /* Each lane has all parts and adds them as the lanes of tlc_row_whole() do. */
    float part[16];
    unsigned high[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint4 two = solo_load16(m->parts + (uint32_t)(at + 16 * i));
        part[2 * i] = __uint_as_float(two.x);
        part[2 * i + 1] = __uint_as_float(two.z);
        high[i] = max(two.y, two.w);
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        part[i] = __fadd_rn(part[i], part[i + 8]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        part[i] = __fadd_rn(part[i], part[i + 4]);
        high[i] = max(high[i], high[i + 4]);
    }
    sum = __fadd_rn(__fadd_rn(part[0], part[2]), __fadd_rn(part[1], part[3]));
    top = max(max(high[0], high[1]), max(high[2], high[3]));
    if (!norm)
        return top;
    *inv = solo_norm_inv(sum, n, m->mean_part, eps);
    return __float_as_uint(__fmul_rn(__uint_as_float(top), *inv));
}

/* As solo_make(), for BF16 weights: solo_float.cuh. */
template <int Q, int QX>
__device__ static __forceinline__ void float_make(struct solo_maker<QX> *m, const float4 *v, float sum, bool norm,
                                                  float eps, int n, int k_pad);

/* v, products with the norm's weights, becomes the row, as int8 with its scale, padded with zeros to k_pad, in all blocks. */
template <int Q, int QX, bool NORM>
__device__ static __forceinline__ void solo_make(struct solo_maker<QX> *m, const float4 *v, float sum, bool norm,
                                                 float eps, int n, int k_pad)
{
    float norm_inv, sc, inv;
    unsigned top = 0;
#pragma unroll
    for (int q = 0; q < Q; q++)
        top = max(top, tlc_top4(v[q]));
    sc = tlc_quant_scale(solo_reduce<QX, NORM>(m, sum, top, norm, true, n, eps, &norm_inv));
    inv = tlc_quant_inv(sc);
    /* The row before is complete: the others could not have told us of this one else. */
    if (threadIdx.x == SOLO_SUMS) { /* the scale before has been read: the sum warps have met these since */
        solo_store1(m->scale, __float_as_int(sc));
        solo_expect(m->ready, k_pad);
    }
    float far = 0.0f;
    uint32_t word[Q];
    float4 y[Q];
#pragma unroll
    for (int q = 0; q < Q; q++) {
        y[q] = norm ? tlc_times(v[q], norm_inv) : v[q];
        word[q] = tlc_quant4_near(y[q], inv, &far); /* of 0: 0 */
    }
    if (far > TLC_TIE) { /* one way out for all: they need not wait for each other */
#pragma unroll
        for (int q = 0; q < Q; q++)
            word[q] = tlc_quant4_tie(y[q], sc);
    }
#pragma unroll
    for (int q = 0; q < Q; q++) {
        int j = 4 * m->thread + 2048 * q;
        word[q] = inv == 0.0f ? 0 : word[q];
        if (j < k_pad) {
#pragma unroll
            for (int rank = 0; rank < SOLO_CLUSTER; rank++)
                tlc_far_put(m->far[rank] + m->row + (uint32_t)j, m->far[rank] + m->ready, word[q]);
        }
    }
}

__device__ static __forceinline__ float4 plus(float4 a, float4 b)
{
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

/* The norm's weights, asked for before the values are there; NULL: ones. */
template <int Q> __device__ static __forceinline__ void ask_weights(const float *norm, int n, int thread, float4 *w)
{
#pragma unroll
    for (int q = 0; q < Q; q++) {
        int j = 4 * thread + 2048 * q;
        w[q] = norm && j < n ? solo_ask4(norm + j) : make_float4(1, 1, 1, 1);
    }
}

/* The row of the head, or of a qkv or an up product: the stream, after it took in the values published before, which have a norm of
 * their own if `before` is not NULL. */
struct solo_norms {
    const float *before, *norm;
    bool has_norm;
    float eps;
    const float *loop; /* NULL, or that of the loop that ends here */
};
template <int QX, bool F>
__device__ static __forceinline__ void solo_stream_row(struct solo_maker<QX> *m, const uint64_t *from, uint32_t epoch,
                                                       const struct solo_norms *norms, int n, int k_pad, bool adds)
{
    float4 w[QX], v[QX];
    float sum = 0.0f, inv;
    ask_weights<QX>(norms->norm, n, m->thread, w);
    if (adds) {
        float4 before[QX];
        if (norms->before)
            ask_weights<QX>(norms->before, n, m->thread, before);
        solo_take<QX>(from, n, epoch, m->thread, v, 0);
        if (norms->before) {
#pragma unroll
            for (int q = 0; q < QX; q++)
                v[q] = tlc_weighted(true, v[q], before[q], &sum);
            solo_reduce<QX, true>(m, sum, 0, true, false, n, norms->eps, &inv);
#pragma unroll
            for (int q = 0; q < QX; q++)
                v[q] = tlc_times(v[q], inv);
            sum = 0.0f;
        }
#pragma unroll
        for (int q = 0; q < QX; q++)
            m->x[q] = plus(m->x[q], v[q]);
        if (norms->loop) {
            float4 loop[QX];
            ask_weights<QX>(norms->loop, n, m->thread, loop);
#pragma unroll
            for (int q = 0; q < QX; q++)
                v[q] = tlc_weighted(true, m->x[q], loop[q], &sum);
            solo_reduce<QX, true>(m, sum, 0, true, false, n, norms->eps, &inv);
#pragma unroll
            for (int q = 0; q < QX; q++)
                m->x[q] = tlc_times(v[q], inv);
            sum = 0.0f;
        }
    }
    if (k_pad == 0) /* x is what remains */
        return;
#pragma unroll
    for (int q = 0; q < QX; q++)
        v[q] = tlc_weighted(norms->has_norm, m->x[q], w[q], &sum);
    if (F)
        float_make<QX, QX>(m, v, sum, norms->has_norm, norms->eps, n, k_pad);
    else
        solo_make<QX, QX, true>(m, v, sum, norms->has_norm, norms->eps, n, k_pad);
}

/* The row of an o or a down product: the values themselves. */
template <int Q, int QX, bool F>
__device__ static __forceinline__ void solo_value_row(struct solo_maker<QX> *m, const uint64_t *from, uint32_t epoch,
                                                      int n, int k_pad, int nap)
{
    float4 v[Q];
    solo_take<Q>(from, n, epoch, m->thread, v, nap);
    if (F)
        float_make<Q, QX>(m, v, 0.0f, false, 0.0f, n, k_pad);
    else
        solo_make<Q, QX, false>(m, v, 0.0f, false, 0.0f, n, k_pad);
}

#endif
