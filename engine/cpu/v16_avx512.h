/* engine/cpu/v16_avx512.h - sixteen floats as one AVX-512 vector; the meaning of each operation is in v16_scalar.h. */
#ifndef TL_CPU_V16_H
#define TL_CPU_V16_H

#include <immintrin.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define TL_TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define V16_OP    static inline __attribute__((always_inline)) TL_TARGET

#define DOT_ROWS   4
#define DOT_OUTS   4
#define DOT_OUTS_1 8
#define MM_ROWS    8

struct v16 {
    __m512 v;
};
struct v16i {
    __m512i v;
};

V16_OP struct v16 v_set1(float x) { return (struct v16){_mm512_set1_ps(x)}; }
V16_OP struct v16 v_load(const float *p) { return (struct v16){_mm512_loadu_ps(p)}; }
V16_OP void v_store(float *p, struct v16 a) { _mm512_storeu_ps(p, a.v); }

#define V16_ELEMENTWISE(name, op)                                                                                      \
    V16_OP struct v16 name(struct v16 a, struct v16 b) { return (struct v16){op(a.v, b.v)}; }
V16_ELEMENTWISE(v_add, _mm512_add_ps)
V16_ELEMENTWISE(v_sub, _mm512_sub_ps)
V16_ELEMENTWISE(v_mul, _mm512_mul_ps)
V16_ELEMENTWISE(v_div, _mm512_div_ps)
V16_ELEMENTWISE(v_max, _mm512_max_ps)
V16_ELEMENTWISE(v_min, _mm512_min_ps)
#undef V16_ELEMENTWISE

V16_OP struct v16 v_fma(struct v16 a, struct v16 b, struct v16 c)
{
    return (struct v16){_mm512_fmadd_ps(a.v, b.v, c.v)};
}

V16_OP float v_fold(struct v16 a)
{
    __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

V16_OP struct v16 v_scale2(struct v16 p, struct v16 t)
{
    __m512i n = _mm512_sub_epi32(_mm512_castps_si512(t.v), _mm512_set1_epi32(0x4b400000));
    __m512i n1 = _mm512_srai_epi32(n, 1), n2 = _mm512_sub_epi32(n, n1), bias = _mm512_set1_epi32(127);
    __m512 r = _mm512_mul_ps(p.v, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n1, bias), 23)));
    return (struct v16){_mm512_mul_ps(r, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n2, bias), 23)))};
}

V16_OP struct v16 v_outside(struct v16 a, int lo, int hi, float x)
{
    unsigned below = lo <= 0    ? 0
                     : lo >= 16 ? 0xffffu
                                : (1u << lo) - 1,
             upto = hi <= 0    ? 0
                    : hi >= 16 ? 0xffffu
                               : (1u << hi) - 1;
    return (struct v16){_mm512_mask_blend_ps((__mmask16)(upto & ~below), _mm512_set1_ps(x), a.v)};
}

V16_OP struct v16i v_izero(void) { return (struct v16i){_mm512_setzero_si512()}; }

V16_OP struct v16i v_absmax(struct v16i m, struct v16 x)
{
    __m512i bits = _mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff));
    return (struct v16i){_mm512_max_epi32(m.v, bits)};
}

V16_OP void v_istore(int32_t *p, struct v16i a) { _mm512_storeu_si512(p, a.v); }

V16_OP void v_store_q8(int8_t *q, struct v16 x)
{
    __m512i w = _mm512_cvtps_epi32(x.v);
    w = _mm512_max_epi32(_mm512_min_epi32(w, _mm512_set1_epi32(127)), _mm512_set1_epi32(-127));
    _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8(w));
}

V16_OP struct v16 v_bf16(struct v16 x)
{
    __m512i b = _mm512_castps_si512(x.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    r = _mm512_mask_or_epi32(r, nan, b, _mm512_set1_epi32(0x400000));
    return (struct v16){_mm512_castsi512_ps(_mm512_and_si512(r, _mm512_set1_epi32((int)0xffff0000u)))};
}

V16_OP struct v16 v_load_bf16(const uint16_t *p)
{
    __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return (struct v16){_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}

V16_OP struct v16 v_load_f16(const uint16_t *p)
{
    return (struct v16){_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))};
}

V16_OP void v_store_f16(uint16_t *p, struct v16 a)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

#endif
