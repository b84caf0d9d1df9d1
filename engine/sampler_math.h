/* engine/sampler_math.h - exp and log whose bits are the same on every machine.
 *
 * What decides a token, and every reported log-probability, is made of these and of + - * / in double precision, in a
 * fixed order, without contraction. libm differs between versions and machines, so it is not used here.
 * Both are within 1e-13 (relative) of the exact value, far below the float logits they act on. Thread: any. */
#ifndef TL_SAMPLER_MATH_H
#define TL_SAMPLER_MATH_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__ /* where a GPU chooses a token */
#define TL_ANYWHERE __host__ __device__
#else
#define TL_ANYWHERE
#endif

/* e^x for x in [-700, 0]: x = k ln2 + r with |r| <= ln2 / 2, a Taylor polynomial for e^r, then 2^k put into the exponent. */
static TL_ANYWHERE inline double tl_exp_neg(double x)
{
    const double magic = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to an integer, left in the low bits */
    double shifted = x * 1.4426950408889634 + magic;
    double k = shifted - magic;
    double r =
        (x - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10; /* ln2 in two parts: k * high is exact */
    double p = 1.0 / 39916800;
    uint64_t bits, scale;
    double pow2;

    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    memcpy(&bits, &shifted, sizeof(bits));
    scale = (bits + 1023) << 52; /* the low bits of shifted hold k; all above the exponent field is shifted out */
    memcpy(&pow2, &scale, sizeof(pow2));
    return p * pow2;
}

/* 1 / (1 + e^-x), for any x that is not NaN. */
static inline double tl_sigmoid(double x)
{
    double e = tl_exp_neg(x < -700 || x > 700 ? -700 : x < 0 ? x : -x);
    return x < 0 ? e / (1 + e) : 1 / (1 + e);
}

/* Natural logarithm of a normal x > 0: x = 2^k m with m in [sqrt(1/2), sqrt(2)), then 2 atanh((m - 1) / (m + 1)). */
static inline double tl_log_pos(double x)
{
    uint64_t bits;
    double m, s, s2, p;
    int64_t k;

    memcpy(&bits, &x, sizeof(bits));
    k = (int64_t)(bits >> 52) - 1023;
    bits = (bits & 0x000fffffffffffffu) | 0x3ff0000000000000u;
    memcpy(&m, &bits, sizeof(m));
    if (m > 1.4142135623730951) {
        m *= 0.5;
        k++;
    }
    s = (m - 1.0) / (m + 1.0);
    s2 = s * s;
    p = 1.0 / 21;
    for (int i = 19; i >= 1; i -= 2)
        p = p * s2 + 1.0 / i;
    return (double)k * 1.90821492927058770002e-10 + 2.0 * s * p + (double)k * 0.693147180369123816490;
}

#endif
