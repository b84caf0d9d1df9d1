/* The AVX2 level. vpmaddubsw multiplies unsigned by signed bytes and adds neighbours in 16 bits with saturation; nothing here
 * can saturate:
 *   INT4  unsigned q + 8 (0..15) times a: a pair is at most 2 * 15 * 127. A group's 8 slices are added in 16 bits, starting from
 *         -8 * sum(a), so the final value is the signed sum, |sum| <= 16 * 8 * 127 per half, whatever wraps on the way; one
 *         vpmaddwd applies the group's scale and widens. That is 2.25 instructions per 32 products.
 *   INT8  |w| times a with w's sign: a pair is at most 2 * 127 * 127 = 32258. */
#if defined(__x86_64__)
#include "v16_avx2.h"

#include "float_kernels.h"

#define PREFETCH_BYTES 1024 /* ahead in the weight stream of a single row */

/* Keep v in a register and its sum as written: left alone, GCC regroups exact sums into trees whose leaves spill. */
#define PIN(v) __asm__("" : "+x"(v))

V16_OP __m256i load32(const void *p) { return _mm256_load_si256((const __m256i *)p); }

V16_OP __m256i slice_of(const int8_t *q) /* the same 4 inputs for 8 outputs */
{
    int32_t v;
    memcpy(&v, q, 4);
    return _mm256_set1_epi32(v);
}

/* Bytes r of a pair's scales, r = 0..7 or 8..15, each to both 16-bit halves of output r. */
V16_OP __m256i spread_scales(__m128i line, int half)
{
    const __m256i lo = _mm256_setr_epi8(0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1, 4, -1, 4, -1, 5, -1, 5,
                                        -1, 6, -1, 6, -1, 7, -1, 7, -1);
    __m256i idx = half ? _mm256_add_epi8(lo, _mm256_set1_epi16(8)) : lo;
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(line), idx);
}

/* y = (float)acc * (s * S) for the outputs of a tile that exist. */
V16_OP void finish_tile(const struct tl_mat *m, int64_t t, __m256i acc0, __m256i acc1, float s, float *y)
{
    int64_t o = t * TL_CPU_TILE;
    struct v16 r = {_mm256_cvtepi32_ps(acc0), _mm256_cvtepi32_ps(acc1)};
    r = v_mul(r, v_mul(v_set1(s), v_load(m->row_scale + o)));
    if (m->n_out - o >= TL_CPU_TILE)
        v_store(y + o, r);
    else
        store_part(y + o, r, m->n_out - o);
}

/* ---- one row: the weights are streamed once ---- */

V16_OP void q4_group(const uint8_t *p, const int8_t *q, int32_t start, __m256i s0, __m256i s1, __m256i *acc0,
                     __m256i *acc1)
{
    const __m256i low = _mm256_set1_epi8(15);
    __m256i g0 = _mm256_set1_epi32(start), g1 = g0;
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m256i w0 = load32(p + c * 64), w1 = load32(p + c * 64 + 32);
        __m256i a0 = slice_of(q + c * 8), a1 = slice_of(q + c * 8 + 4);
        g0 = _mm256_add_epi16(g0, _mm256_maddubs_epi16(_mm256_and_si256(w0, low), a0));
        g1 = _mm256_add_epi16(g1, _mm256_maddubs_epi16(_mm256_and_si256(w1, low), a0));
        g0 = _mm256_add_epi16(g0, _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(w0, 4), low), a1));
        g1 = _mm256_add_epi16(g1, _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(w1, 4), low), a1));
        PIN(g0);
        PIN(g1);
    }
    *acc0 = _mm256_add_epi32(*acc0, _mm256_madd_epi16(g0, s0));
    *acc1 = _mm256_add_epi32(*acc1, _mm256_madd_epi16(g1, s1));
}

KERNEL void q4_row(const struct tl_mat *m, const int8_t *q, const int32_t *group, float s, int64_t t0, int64_t t1,
                   float *y)
{
    const __m256i nibble = _mm256_set1_epi16(15);
    for (int64_t t = t0; t < t1; t++) {
        const uint8_t *p = m->data + (size_t)t * m->tile_bytes;
        __m256i acc0 = _mm256_setzero_si256(), acc1 = acc0;
        for (int64_t k = 0; k < m->k_pad;) {
            const uint8_t *line = p;
            int64_t end = m->k_pad - k < 256 ? m->k_pad : k + 256;
            p += 64;
            for (; k < end; k += 64, line += 16, p += TL_CPU_Q4_PAIR) {
                __m128i bytes = _mm_load_si128((const __m128i *)line);
                __m256i s0 = spread_scales(bytes, 0), s1 = spread_scales(bytes, 1);
#pragma GCC unroll 8
                for (int c = 0; c < 8; c++)
                    _mm_prefetch((const char *)p + PREFETCH_BYTES + c * 64, _MM_HINT_T0);
                q4_group(p, q + k, group[k / 32], _mm256_and_si256(s0, nibble), _mm256_and_si256(s1, nibble), &acc0,
                         &acc1);
                q4_group(p + 256, q + k + 32, group[k / 32 + 1], _mm256_srli_epi16(s0, 4), _mm256_srli_epi16(s1, 4),
                         &acc0, &acc1);
            }
        }
        finish_tile(m, t, acc0, acc1, s, y);
    }
}

V16_OP __m256i q8_step(__m256i acc, __m256i w, __m256i w_abs, __m256i a)
{
    __m256i pairs = _mm256_maddubs_epi16(w_abs, _mm256_sign_epi8(a, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

KERNEL void q8_row(const struct tl_mat *m, const int8_t *q, float s, int64_t t0, int64_t t1, float *y)
{
    for (int64_t t = t0; t < t1; t++) {
        const uint8_t *p = m->data + (size_t)t * m->tile_bytes;
        __m256i acc0 = _mm256_setzero_si256(), acc1 = acc0;
        for (int64_t k = 0; k < m->k_pad; k += 16, p += 256) {
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                __m256i w0 = load32(p + c * 64), w1 = load32(p + c * 64 + 32), a = slice_of(q + k + c * 4);
                _mm_prefetch((const char *)p + PREFETCH_BYTES + c * 64, _MM_HINT_T0);
                acc0 = q8_step(acc0, w0, _mm256_abs_epi8(w0), a);
                acc1 = q8_step(acc1, w1, _mm256_abs_epi8(w1), a);
            }
        }
        finish_tile(m, t, acc0, acc1, s, y);
    }
}

/* ---- many rows: a panel of unpacked weights in the first-level cache, 4 rows x 16 outputs at a time ---- */

/* Nibbles as bytes 0..15, 64 bytes a slice; scales as pairs of int16, 64 bytes a group. */
KERNEL void unpack_q4(const uint8_t *tile, int64_t k, int n_k, uint8_t *panel, uint8_t *scales)
{
    const __m256i low = _mm256_set1_epi8(15), nibble = _mm256_set1_epi16(15);
    for (int i = 0; i < n_k; i += 64) {
        const uint8_t *block = tile + (k + i) / 256 * TL_CPU_Q4_BLOCK;
        const uint8_t *p = block + 64 + i % 256 / 64 * TL_CPU_Q4_PAIR;
        __m128i line = _mm_load_si128((const __m128i *)(block + i % 256 / 64 * 16));
        __m256i s0 = spread_scales(line, 0), s1 = spread_scales(line, 1);
        __m256i *sc = (__m256i *)(scales + i / 32 * 64);
        __m256i *out = (__m256i *)(panel + i * 16);
        for (int c = 0; c < 8; c++) /* the next panel, for few rows */
            _mm_prefetch((const char *)p + TL_CPU_K_BLOCK / 256 * TL_CPU_Q4_BLOCK + c * 64, _MM_HINT_T0);
        sc[0] = _mm256_and_si256(s0, nibble);
        sc[1] = _mm256_and_si256(s1, nibble);
        sc[2] = _mm256_srli_epi16(s0, 4);
        sc[3] = _mm256_srli_epi16(s1, 4);
        for (int c = 0; c < 8; c++) {
            __m256i w0 = load32(p + c * 64), w1 = load32(p + c * 64 + 32);
            out[c * 4] = _mm256_and_si256(w0, low);
            out[c * 4 + 1] = _mm256_and_si256(w1, low);
            out[c * 4 + 2] = _mm256_and_si256(_mm256_srli_epi16(w0, 4), low);
            out[c * 4 + 3] = _mm256_and_si256(_mm256_srli_epi16(w1, 4), low);
        }
    }
}

/* sums[r][16] += panel times rows r of q, over n_k inputs. */
V16_OP void q4_tile(const int rows, const uint8_t *panel, const uint8_t *scales, int n_k, const int8_t *q, int64_t ldq,
                    const int32_t *group, int64_t ldg, int32_t *sums)
{
    for (int g = 0; g < n_k / 32; g++) {
        __m256i acc[8], s0 = load32(scales + g * 64), s1 = load32(scales + g * 64 + 32);
        const uint8_t *p = panel + g * 512;
        const int8_t *a = q + g * 32;
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            acc[2 * r] = acc[2 * r + 1] = _mm256_set1_epi32(group[r * ldg + g]);
#pragma GCC unroll 8
        for (int c = 0; c < 8; c++) {
            __m256i w0 = load32(p + c * 64), w1 = load32(p + c * 64 + 32);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                __m256i b = slice_of(a + r * ldq + c * 4);
                acc[2 * r] = _mm256_add_epi16(acc[2 * r], _mm256_maddubs_epi16(w0, b));
                acc[2 * r + 1] = _mm256_add_epi16(acc[2 * r + 1], _mm256_maddubs_epi16(w1, b));
                PIN(acc[2 * r]);
                PIN(acc[2 * r + 1]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m256i *y = (__m256i *)(sums + r * 16);
            y[0] = _mm256_add_epi32(y[0], _mm256_madd_epi16(acc[2 * r], s0));
            y[1] = _mm256_add_epi32(y[1], _mm256_madd_epi16(acc[2 * r + 1], s1));
        }
    }
}

V16_OP void q8_tile(const int rows, const uint8_t *panel, int n_k, const int8_t *q, int64_t ldq, int32_t *sums)
{
    __m256i acc[8];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        acc[2 * r] = load32(sums + r * 16);
        acc[2 * r + 1] = load32(sums + r * 16 + 8);
    }
    for (int c = 0; c < n_k / 4; c++) {
        __m256i w0 = load32(panel + c * 64), w1 = load32(panel + c * 64 + 32);
        __m256i w0_abs = _mm256_abs_epi8(w0), w1_abs = _mm256_abs_epi8(w1);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m256i b = slice_of(q + r * ldq + c * 4);
            acc[2 * r] = q8_step(acc[2 * r], w0, w0_abs, b);
            acc[2 * r + 1] = q8_step(acc[2 * r + 1], w1, w1_abs, b);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        _mm256_store_si256((__m256i *)(sums + r * 16), acc[2 * r]);
        _mm256_store_si256((__m256i *)(sums + r * 16 + 8), acc[2 * r + 1]);
    }
}

/* Rows that share one unpacking: as many as stay in the second-level cache over the whole width. */
static int rows_per_block(int64_t k_pad)
{
    int64_t rows = 384 * 1024 / k_pad / 4 * 4;
    return (int)(rows < 32 ? 32 : rows > TL_CPU_ROW_BLOCK ? TL_CPU_ROW_BLOCK : rows);
}

KERNEL void panel_rows(bool q4, const struct tl_cpu_acts *a, int i0, int rows, int64_t k, int n_k, const uint8_t *panel,
                       const uint8_t *scales, int32_t *sums)
{
    int64_t ldg = a->k_max / 32, ldq = a->k_max;
    for (int i = 0, n; i < rows; i += n) {
        const int8_t *q = a->q + (i0 + i) * ldq + k;
        const int32_t *group = a->group + (i0 + i) * ldg + k / 32;
        n = rows - i >= 4 ? 4 : rows - i >= 2 ? 2 : 1;
        if (!q4 && n == 4)
            q8_tile(4, panel, n_k, q, ldq, sums + i * 16);
        else if (!q4 && n == 2)
            q8_tile(2, panel, n_k, q, ldq, sums + i * 16);
        else if (!q4)
            q8_tile(1, panel, n_k, q, ldq, sums + i * 16);
        else if (n == 4)
            q4_tile(4, panel, scales, n_k, q, ldq, group, ldg, sums + i * 16);
        else if (n == 2)
            q4_tile(2, panel, scales, n_k, q, ldq, group, ldg, sums + i * 16);
        else
            q4_tile(1, panel, scales, n_k, q, ldq, group, ldg, sums + i * 16);
    }
}

KERNEL void linear_rows(bool q4, const struct tl_mat *m, const struct tl_cpu_acts *a, int n, int64_t t0, int64_t t1,
                        float *y, int64_t ldy, struct tl_cpu_linear_scratch *tmp)
{
    int32_t *sums = (int32_t *)tmp->sums;
    uint8_t *scales = tmp->panel + TL_CPU_TILE * TL_CPU_K_BLOCK;
    int block = rows_per_block(m->k_pad);
    for (int i0 = 0; i0 < n; i0 += block) {
        int rows = n - i0 < block ? n - i0 : block;
        for (int64_t t = t0; t < t1; t++) {
            const uint8_t *tile = m->data + (size_t)t * m->tile_bytes;
            memset(sums, 0, (size_t)rows * 64);
            for (int64_t k = 0; k < m->k_pad; k += TL_CPU_K_BLOCK) {
                int n_k = (int)(m->k_pad - k < TL_CPU_K_BLOCK ? m->k_pad - k : TL_CPU_K_BLOCK);
                const uint8_t *panel = tile + k * TL_CPU_TILE;
                if (q4) {
                    unpack_q4(tile, k, n_k, tmp->panel, scales);
                    panel = tmp->panel;
                }
                panel_rows(q4, a, i0, rows, k, n_k, panel, scales, sums);
            }
            for (int i = 0; i < rows; i++)
                finish_tile(m, t, load32(sums + i * 16), load32(sums + i * 16 + 8), a->scale[i0 + i],
                            y + (i0 + i) * ldy);
        }
    }
}

KERNEL void linear_q4(const struct tl_mat *m, const struct tl_cpu_acts *a, int n, int64_t t0, int64_t t1, float *y,
                      int64_t ldy, struct tl_cpu_linear_scratch *tmp)
{
    if (n == 1)
        q4_row(m, a->q, a->group, a->scale[0], t0, t1, y);
    else
        linear_rows(true, m, a, n, t0, t1, y, ldy, tmp);
}

KERNEL void linear_q8(const struct tl_mat *m, const struct tl_cpu_acts *a, int n, int64_t t0, int64_t t1, float *y,
                      int64_t ldy, struct tl_cpu_linear_scratch *tmp)
{
    if (n == 1)
        q8_row(m, a->q, a->scale[0], t0, t1, y);
    else
        linear_rows(false, m, a, n, t0, t1, y, ldy, tmp);
}

const struct tl_cpu_kernels tl_cpu_kernels_avx2 = {
    .name = "avx2", .linear_q4 = linear_q4, .linear_q8 = linear_q8, FLOAT_KERNELS};
#else
extern const int tl_cpu_no_avx2; /* an empty file is not C */
#endif
