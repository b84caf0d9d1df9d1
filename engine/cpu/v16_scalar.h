/* engine/cpu/v16_scalar.h - sixteen floats in plain C: the meaning of every operation of the vector levels. */
#ifndef TL_CPU_V16_H
#define TL_CPU_V16_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define TL_TARGET
#define V16_OP static inline __attribute__((always_inline))

#define DOT_ROWS   2 /* float linear: rows x outputs of a register tile */
#define DOT_OUTS   2
#define DOT_OUTS_1 4 /* outputs side by side for a single row */
#define MM_ROWS    6

struct v16 {
    float v[16];
};

#define EACH for (int i_ = 0; i_ < 16; i_++)

V16_OP uint32_t f32_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

V16_OP float f32_from(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

V16_OP struct v16 v_set1(float x)
{
    struct v16 r;
    EACH r.v[i_] = x;
    return r;
}

V16_OP struct v16 v_load(const float *p)
{
    struct v16 r;
    memcpy(r.v, p, sizeof(r.v));
    return r;
}

V16_OP void v_store(float *p, struct v16 a) { memcpy(p, a.v, sizeof(a.v)); }

#define V16_ELEMENTWISE(name, expr)                                                                                    \
    V16_OP struct v16 name(struct v16 a, struct v16 b)                                                                 \
    {                                                                                                                  \
        EACH                                                                                                           \
        {                                                                                                              \
            float x = a.v[i_], y = b.v[i_];                                                                            \
            a.v[i_] = (expr);                                                                                          \
        }                                                                                                              \
        return a;                                                                                                      \
    }
V16_ELEMENTWISE(v_add, x + y)
V16_ELEMENTWISE(v_sub, x - y)
V16_ELEMENTWISE(v_mul, x *y)
V16_ELEMENTWISE(v_div, x / y)
V16_ELEMENTWISE(v_max, x > y ? x : y) /* y where either is NaN */
V16_ELEMENTWISE(v_min, x < y ? x : y)
#undef V16_ELEMENTWISE

V16_OP struct v16 v_fma(struct v16 a, struct v16 b, struct v16 c)
{
    EACH c.v[i_] = fmaf(a.v[i_], b.v[i_], c.v[i_]);
    return c;
}

/* Lanes folded +8, +4, +2, +1. */
V16_OP float v_fold(struct v16 a)
{
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            a.v[i] = a.v[i] + a.v[i + half];
    return a.v[0];
}

/* p * 2^n, n = t - 1.5 * 2^23 an integer in -152..130; in two steps, so that results below the normal range are rounded once. */
V16_OP struct v16 v_scale2(struct v16 p, struct v16 t)
{
    EACH
    {
        int32_t n = (int32_t)(f32_bits(t.v[i_]) - 0x4b400000u);
        int32_t n1 = n >> 1;
        uint32_t n2 = (uint32_t)n - (uint32_t)n1;
        p.v[i_] = p.v[i_] * f32_from(((uint32_t)n1 + 127u) << 23) * f32_from((n2 + 127u) << 23);
    }
    return p;
}

/* Lanes outside [lo, hi) become x. */
V16_OP struct v16 v_outside(struct v16 a, int lo, int hi, float x)
{
    EACH a.v[i_] = i_ >= lo && i_ < hi ? a.v[i_] : x;
    return a;
}

/* Running maximum of |x| as bits, so that NaN stays the largest. */
struct v16i {
    int32_t v[16];
};
V16_OP struct v16i v_izero(void)
{
    struct v16i r;
    EACH r.v[i_] = 0;
    return r;
}
V16_OP struct v16i v_absmax(struct v16i m, struct v16 x)
{
    EACH
    {
        int32_t b = (int32_t)(f32_bits(x.v[i_]) & 0x7fffffffu);
        m.v[i_] = b > m.v[i_] ? b : m.v[i_];
    }
    return m;
}
V16_OP void v_istore(int32_t *p, struct v16i a) { memcpy(p, a.v, sizeof(a.v)); }

/* Nearest even integers, cut to -127..127. x is finite. */
V16_OP void v_store_q8(int8_t *q, struct v16 x)
{
    EACH
    {
        float r = (x.v[i_] + 12582912.0f) - 12582912.0f;
        r = r < -127.0f ? -127.0f : r > 127.0f ? 127.0f : r;
        q[i_] = (int8_t)r;
    }
}

/* BF16, nearest even, as F32. NaN stays NaN. */
V16_OP struct v16 v_bf16(struct v16 x)
{
    EACH
    {
        uint32_t b = f32_bits(x.v[i_]);
        uint32_t r = x.v[i_] != x.v[i_] ? b | 0x400000u : b + 0x7fffu + ((b >> 16) & 1u);
        x.v[i_] = f32_from(r & 0xffff0000u);
    }
    return x;
}

V16_OP struct v16 v_load_bf16(const uint16_t *p)
{
    struct v16 r;
    EACH r.v[i_] = f32_from((uint32_t)p[i_] << 16);
    return r;
}

static inline float f16_widen(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, e = (h >> 10) & 31u, m = h & 0x3ffu;
    if (e == 31)
        return f32_from(sign | 0x7f800000u | m << 13 | (m ? 0x400000u : 0u));
    if (e == 0) { /* m * 2^-24, exact */
        float x = (float)m * 0x1p-24f;
        return f32_from(sign | f32_bits(x));
    }
    return f32_from(sign | (e + 112u) << 23 | m << 13);
}

static inline uint16_t f16_narrow(float x)
{
    uint32_t b = f32_bits(x), sign = (b >> 16) & 0x8000u, a = b & 0x7fffffffu;
    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((a >> 13) & 0x1ffu));
    if (a >= 0x477ff000u) /* rounds to 2^16 or more */
        return (uint16_t)(sign | 0x7c00u);
    if (a < 0x38800000u) { /* below 2^-14: 0.5 has steps of 2^-24, so the addition rounds for us */
        float r = f32_from(a) + 0.5f;
        return (uint16_t)(sign | (f32_bits(r) - 0x3f000000u));
    }
    a += 0xfffu + ((a >> 13) & 1u);
    return (uint16_t)(sign | ((a - 0x38000000u) >> 13));
}

V16_OP struct v16 v_load_f16(const uint16_t *p)
{
    struct v16 r;
    EACH r.v[i_] = f16_widen(p[i_]);
    return r;
}

V16_OP void v_store_f16(uint16_t *p, struct v16 a) { EACH p[i_] = f16_narrow(a.v[i_]); }

#endif
