/* engine/cpu/v16_avx2.h - sixteen floats as two AVX2 vectors; the meaning of each operation is in v16_scalar.h. */
#ifndef TL_CPU_V16_H
#define TL_CPU_V16_H

#include <immintrin.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define TL_TARGET __attribute__((target("avx2,fma,f16c")))
#define V16_OP    static inline __attribute__((always_inline)) TL_TARGET

#define DOT_ROWS   4 /* float linear: rows x outputs of a register tile */
#define DOT_OUTS   1
#define DOT_OUTS_1 4
#define MM_ROWS    6

struct v16 {
    __m256 lo, hi;
};
struct v16i {
    __m256i lo, hi;
};

V16_OP struct v16 v_set1(float x) { return (struct v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
V16_OP struct v16 v_load(const float *p) { return (struct v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }

V16_OP void v_store(float *p, struct v16 a)
{
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}

#define V16_ELEMENTWISE(name, op)                                                                                      \
    V16_OP struct v16 name(struct v16 a, struct v16 b) { return (struct v16){op(a.lo, b.lo), op(a.hi, b.hi)}; }
V16_ELEMENTWISE(v_add, _mm256_add_ps)
V16_ELEMENTWISE(v_sub, _mm256_sub_ps)
V16_ELEMENTWISE(v_mul, _mm256_mul_ps)
V16_ELEMENTWISE(v_div, _mm256_div_ps)
V16_ELEMENTWISE(v_max, _mm256_max_ps)
V16_ELEMENTWISE(v_min, _mm256_min_ps)
#undef V16_ELEMENTWISE

V16_OP struct v16 v_fma(struct v16 a, struct v16 b, struct v16 c)
{
    return (struct v16){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

V16_OP float v_fold(struct v16 a)
{
    __m256 s8 = _mm256_add_ps(a.lo, a.hi);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

V16_OP __m256 scale2_8(__m256 p, __m256 t)
{
    __m256i n = _mm256_sub_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(0x4b400000));
    __m256i n1 = _mm256_srai_epi32(n, 1), n2 = _mm256_sub_epi32(n, n1), bias = _mm256_set1_epi32(127);
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n1, bias), 23)));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n2, bias), 23)));
}

V16_OP struct v16 v_scale2(struct v16 p, struct v16 t)
{
    return (struct v16){scale2_8(p.lo, t.lo), scale2_8(p.hi, t.hi)};
}

V16_OP __m256 outside_8(__m256 a, __m256i idx, int lo, int hi, float x)
{
    __m256i in = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), idx),
                                     _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), idx));
    return _mm256_blendv_ps(_mm256_set1_ps(x), a, _mm256_castsi256_ps(in));
}

V16_OP struct v16 v_outside(struct v16 a, int lo, int hi, float x)
{
    return (struct v16){outside_8(a.lo, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), lo, hi, x),
                        outside_8(a.hi, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15), lo, hi, x)};
}

V16_OP struct v16i v_izero(void) { return (struct v16i){_mm256_setzero_si256(), _mm256_setzero_si256()}; }

V16_OP struct v16i v_absmax(struct v16i m, struct v16 x)
{
    __m256i abs = _mm256_set1_epi32(0x7fffffff);
    return (struct v16i){_mm256_max_epi32(m.lo, _mm256_and_si256(_mm256_castps_si256(x.lo), abs)),
                         _mm256_max_epi32(m.hi, _mm256_and_si256(_mm256_castps_si256(x.hi), abs))};
}

V16_OP void v_istore(int32_t *p, struct v16i a)
{
    _mm256_storeu_si256((__m256i *)p, a.lo);
    _mm256_storeu_si256((__m256i *)(p + 8), a.hi);
}

V16_OP void v_store_q8(int8_t *q, struct v16 x)
{
    __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi));
    __m128i b;
    w = _mm256_permute4x64_epi64(w, 0xd8);
    w = _mm256_max_epi16(_mm256_min_epi16(w, _mm256_set1_epi16(127)), _mm256_set1_epi16(-127));
    b = _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
    _mm_storeu_si128((__m128i *)q, b);
}

V16_OP __m256 bf16_8(__m256 x)
{
    __m256i b = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_or_si256(b, _mm256_set1_epi32(0x400000)), nan);
    return _mm256_castsi256_ps(_mm256_and_si256(r, _mm256_set1_epi32((int)0xffff0000u)));
}

V16_OP struct v16 v_bf16(struct v16 x) { return (struct v16){bf16_8(x.lo), bf16_8(x.hi)}; }

V16_OP __m256 load_bf16_8(const uint16_t *p)
{
    __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}

V16_OP struct v16 v_load_bf16(const uint16_t *p) { return (struct v16){load_bf16_8(p), load_bf16_8(p + 8)}; }

V16_OP struct v16 v_load_f16(const uint16_t *p)
{
    return (struct v16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                        _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}

V16_OP void v_store_f16(uint16_t *p, struct v16 a)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}

#endif
