/* The AVX-512 level, with VNNI. vpdpbusd adds four products of unsigned by signed bytes to 32 bits without saturation, modulo
 * 2^32, so an offset on the unsigned side is exact and is taken back as a multiple of the sum of the activations:
 *   one row INT4   q + 8 times a, a group starts from -8 * sum(a) and so ends as the signed sum, |sum| <= 32 * 7 * 127 < 2^15;
 *                  vpdpwssd multiplies its low half by the group's scale
 *   one row INT8, many rows of both   w + 128 times a, an output starts from -128 * sum(a); for INT4 w = scale * q, |w| <= 120 */
#if defined(__x86_64__)
#include "v16_avx512.h"

#include "float_kernels.h"

#define PREFETCH_BYTES 4096
#define K_BLOCK        512 /* inputs of a panel of 32 outputs: 16 KB */
#define ROWS           8   /* x 32 outputs: 16 sums in registers */

V16_OP __m512i load64(const void *p) { return _mm512_load_si512(p); }

V16_OP __m512i slice_of(const int8_t *q) /* the same 4 inputs for 16 outputs */
{
    int32_t v;
    memcpy(&v, q, 4);
    return _mm512_set1_epi32(v);
}

/* y = (float)acc * (s * S) for the outputs of a tile that exist. */
V16_OP void finish_tile(const struct tl_mat *m, int64_t t, __m512i acc, float s, float *y)
{
    int64_t o = t * TL_CPU_TILE, n = m->n_out - o;
    struct v16 r = {_mm512_cvtepi32_ps(acc)};
    r = v_mul(r, v_mul(v_set1(s), v_load(m->row_scale + o)));
    _mm512_mask_storeu_ps(y + o, n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1), r.v);
}

/* What an offset of 128 on all weights adds, negated, modulo 2^32. */
static int32_t take_back(int32_t sum) { return (int32_t)(0u - 128u * (uint32_t)sum); }

/* ---- one row ---- */

V16_OP __m512i q4_group(const uint8_t *p, const int8_t *q, int32_t start, __m512i scale, __m512i acc)
{
    const __m512i low = _mm512_set1_epi8(15);
    __m512i g = _mm512_madd_epi16(_mm512_set1_epi32(start), _mm512_set1_epi16(1));
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512i w = load64(p + c * 64);
        g = _mm512_dpbusd_epi32(g, _mm512_and_si512(w, low), slice_of(q + c * 8));
        g = _mm512_dpbusd_epi32(g, _mm512_and_si512(_mm512_srli_epi16(w, 4), low), slice_of(q + c * 8 + 4));
    }
    return _mm512_dpwssd_epi32(acc, g, scale);
}

KERNEL void q4_row(const struct tl_mat *m, const int8_t *q, const int32_t *group, float s, int64_t t0, int64_t t1,
                   float *y)
{
    for (int64_t t = t0; t < t1; t++) {
        const uint8_t *p = m->data + (size_t)t * m->tile_bytes;
        __m512i acc0 = _mm512_setzero_si512(), acc1 = acc0;
        for (int64_t k = 0; k < m->k_pad;) {
            const uint8_t *line = p;
            int64_t end = m->k_pad - k < 256 ? m->k_pad : k + 256;
            p += 64;
            for (; k < end; k += 64, line += 16, p += TL_CPU_Q4_PAIR) {
                __m512i scales = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)line));
#pragma GCC unroll 8
                for (int c = 0; c < 8; c++)
                    _mm_prefetch((const char *)p + PREFETCH_BYTES + c * 64, _MM_HINT_T0);
                acc0 = q4_group(p, q + k, group[k / 32], _mm512_and_si512(scales, _mm512_set1_epi32(15)), acc0);
                acc1 = q4_group(p + 256, q + k + 32, group[k / 32 + 1], _mm512_srli_epi32(scales, 4), acc1);
            }
        }
        finish_tile(m, t, _mm512_add_epi32(acc0, acc1), s, y);
    }
}

KERNEL void q8_row(const struct tl_mat *m, const int8_t *q, int32_t sum, float s, int64_t t0, int64_t t1, float *y)
{
    const __m512i flip = _mm512_set1_epi8((char)0x80);
    for (int64_t t = t0; t < t1; t++) {
        const uint8_t *p = m->data + (size_t)t * m->tile_bytes;
        __m512i acc[4] = {_mm512_set1_epi32(take_back(sum)), _mm512_setzero_si512(), _mm512_setzero_si512(),
                          _mm512_setzero_si512()};
        for (int64_t k = 0; k < m->k_pad; k += 16, p += 256) {
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                _mm_prefetch((const char *)p + PREFETCH_BYTES + c * 64, _MM_HINT_T0);
                acc[c] =
                    _mm512_dpbusd_epi32(acc[c], _mm512_xor_si512(load64(p + c * 64), flip), slice_of(q + k + c * 4));
            }
        }
        acc[0] = _mm512_add_epi32(_mm512_add_epi32(acc[0], acc[1]), _mm512_add_epi32(acc[2], acc[3]));
        finish_tile(m, t, acc[0], s, y);
    }
}

/* ---- many rows: a panel of up to 2 tiles of w + 128, 8 rows x 32 outputs at a time ---- */

/* dst[c] = chunk c of the tile from input k on, with strides of n_tiles chunks. */
KERNEL void unpack_q4(const uint8_t *tile, int64_t k, int n_k, __m512i *dst, int n_tiles)
{
    const __m512i low = _mm512_set1_epi8(15), eight = _mm512_set1_epi16(8), byte = _mm512_set1_epi16(255),
                  flip = _mm512_set1_epi8((char)0x80);
    for (int i = 0; i < n_k; i += 32) {
        const uint8_t *block = tile + (k + i) / 256 * TL_CPU_Q4_BLOCK;
        const uint8_t *p = block + 64 + i % 256 / 32 * (TL_CPU_Q4_PAIR / 2);
        __m512i s = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)(block + i % 256 / 64 * 16)));
        s = i % 64 ? _mm512_srli_epi32(s, 4) : _mm512_and_si512(s, _mm512_set1_epi32(15));
        s = _mm512_or_si512(s, _mm512_slli_epi32(s, 16));
        for (int c = 0; c < 8; c++) {
            __m512i w = load64(p + c / 2 * 64);
            __m512i u = _mm512_and_si512(c % 2 ? _mm512_srli_epi16(w, 4) : w, low);
            __m512i even = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_and_si512(u, byte), eight), s);
            __m512i odd = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_srli_epi16(u, 8), eight), s);
            u = _mm512_or_si512(_mm512_and_si512(even, byte), _mm512_slli_epi16(odd, 8));
            dst[(i / 4 + c) * n_tiles] = _mm512_xor_si512(u, flip);
        }
    }
}

KERNEL void unpack_q8(const uint8_t *tile, int64_t k, int n_k, __m512i *dst, int n_tiles)
{
    const __m512i flip = _mm512_set1_epi8((char)0x80);
    for (int c = 0; c < n_k / 4; c++)
        dst[c * n_tiles] = _mm512_xor_si512(load64(tile + (k / 4 + c) * 64), flip);
}

V16_OP void panel_tile(const int rows, const int tiles, const __m512i *panel, int n_k, const int8_t *q, int64_t ldq,
                       __m512i *sums)
{
    __m512i acc[2 * ROWS]; /* rows * tiles of them */
#pragma GCC unroll 16
    for (int i = 0; i < rows * tiles; i++)
        acc[i] = sums[i];
    for (int c = 0; c < n_k / 4; c++) {
        __m512i w0 = panel[c * tiles], w1 = panel[c * tiles + tiles - 1];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            __m512i a = slice_of(q + r * ldq + c * 4);
            acc[r * tiles] = _mm512_dpbusd_epi32(acc[r * tiles], w0, a);
            if (tiles == 2)
                acc[r * tiles + 1] = _mm512_dpbusd_epi32(acc[r * tiles + 1], w1, a);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows * tiles; i++)
        sums[i] = acc[i];
}

V16_OP void panel_rows(const int tiles, const __m512i *panel, int n_k, const int8_t *q, int64_t ldq, int rows,
                       __m512i *sums)
{
    int i = 0;
    for (; i + ROWS <= rows; i += ROWS)
        panel_tile(ROWS, tiles, panel, n_k, q + i * ldq, ldq, sums + i * tiles);
    for (; i + 2 <= rows; i += 2)
        panel_tile(2, tiles, panel, n_k, q + i * ldq, ldq, sums + i * tiles);
    if (i < rows)
        panel_tile(1, tiles, panel, n_k, q + i * ldq, ldq, sums + i * tiles);
}

/* Rows that share one unpacking: as many as stay in the second-level cache over the whole width. */
static int rows_per_block(int64_t k_pad)
{
    int64_t rows = 512 * 1024 / k_pad / ROWS * ROWS;
    return (int)(rows < 32 ? 32 : rows > TL_CPU_ROW_BLOCK ? TL_CPU_ROW_BLOCK : rows);
}

KERNEL void linear_rows(const struct tl_mat *m, const struct tl_cpu_acts *a, int n, int64_t t0, int64_t t1, float *y,
                        int64_t ldy, struct tl_cpu_linear_scratch *tmp)
{
    __m512i *sums = (__m512i *)tmp->sums, *panel = (__m512i *)tmp->panel;
    int block = rows_per_block(m->k_pad);
    for (int i0 = 0; i0 < n; i0 += block) {
        int rows = n - i0 < block ? n - i0 : block;
        int tiles;
        for (int64_t t = t0; t < t1; t += tiles) {
            tiles = t1 - t > 1 ? 2 : 1;
            for (int i = 0; i < rows * tiles; i++)
                sums[i] = _mm512_set1_epi32(take_back(a->sum[i0 + i / tiles]));
            for (int64_t k = 0; k < m->k_pad; k += K_BLOCK) {
                int n_k = (int)(m->k_pad - k < K_BLOCK ? m->k_pad - k : K_BLOCK);
                const int8_t *q = a->q + (int64_t)i0 * a->k_max + k;
                for (int j = 0; j < tiles; j++)
                    (m->wtype == TL_W_INT4 ? unpack_q4 : unpack_q8)(m->data + (size_t)(t + j) * m->tile_bytes, k, n_k,
                                                                    panel + j, tiles);
                if (tiles == 2)
                    panel_rows(2, panel, n_k, q, a->k_max, rows, sums);
                else
                    panel_rows(1, panel, n_k, q, a->k_max, rows, sums);
            }
            for (int i = 0; i < rows * tiles; i++)
                finish_tile(m, t + i % tiles, sums[i], a->scale[i0 + i / tiles], y + (i0 + i / tiles) * ldy);
        }
    }
}

KERNEL void linear_q4(const struct tl_mat *m, const struct tl_cpu_acts *a, int n, int64_t t0, int64_t t1, float *y,
                      int64_t ldy, struct tl_cpu_linear_scratch *tmp)
{
    if (n == 1)
        q4_row(m, a->q, a->group, a->scale[0], t0, t1, y);
    else
        linear_rows(m, a, n, t0, t1, y, ldy, tmp);
}

KERNEL void linear_q8(const struct tl_mat *m, const struct tl_cpu_acts *a, int n, int64_t t0, int64_t t1, float *y,
                      int64_t ldy, struct tl_cpu_linear_scratch *tmp)
{
    if (n == 1)
        q8_row(m, a->q, a->sum[0], a->scale[0], t0, t1, y);
    else
        linear_rows(m, a, n, t0, t1, y, ldy, tmp);
}

const struct tl_cpu_kernels tl_cpu_kernels_avx512 = {
    .name = "avx512", .linear_q4 = linear_q4, .linear_q8 = linear_q8, FLOAT_KERNELS};
#else
extern const int tl_cpu_no_avx512; /* an empty file is not C */
#endif
