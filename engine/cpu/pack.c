/* Repacking of weight matrices into the layouts of cpu.h. One pass over the source, row by row. */
#include "cpu.h"

#include "../mem.h"

#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)

void *tl_cpu_pages(size_t bytes)
{
    uint8_t *p = tl_aligned(bytes);
    if (p && bytes >= 2 * HUGE_PAGE) { /* advice only: with small pages everything works, only slower */
        uintptr_t lo = ((uintptr_t)p + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1);
        uintptr_t hi = ((uintptr_t)p + bytes) & ~(uintptr_t)(HUGE_PAGE - 1);
        if (hi > lo)
            (void)madvise((void *)lo, hi - lo, MADV_HUGEPAGE);
    }
    return p;
}

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static bool is_int(enum tl_wtype t) { return t == TL_W_INT8 || t == TL_W_INT4; }

static enum tl_status check_source(const struct tl_mat_src *src, int64_t *n_out, struct tl_error *err)
{
    *n_out = 0;
    if ((unsigned)src->wtype >= TL_W_COUNT || src->n_parts < 1 || src->n_parts > 3)
        return tl_fail(err, TL_ERR_BAD_PARAM, "a matrix has weight type %d and %d parts", (int)src->wtype,
                       src->n_parts);
    if (src->n_in < 1 || src->n_in > INT64_MAX / 64 / TL_CPU_TILE)
        return tl_fail(err, TL_ERR_BAD_PARAM, "a matrix has %lld inputs", (long long)src->n_in);
    if (is_int(src->wtype) && src->n_in > TL_CPU_K_MAX)
        return tl_fail(err, TL_ERR_UNSUPPORTED,
                       "an integer matrix has %lld inputs; sums of more than %d can exceed 32 bits",
                       (long long)src->n_in, TL_CPU_K_MAX);
    if (src->wtype == TL_W_INT4 && src->n_in % 2 != 0)
        return tl_fail(err, TL_ERR_UNSUPPORTED, "an INT4 matrix has %lld inputs, which is not even",
                       (long long)src->n_in);
    for (int i = 0; i < src->n_parts; i++) {
        if (src->part[i].rows < 1 || src->part[i].rows > INT32_MAX)
            return tl_fail(err, TL_ERR_BAD_PARAM, "part %d of a matrix has %lld rows", i, (long long)src->part[i].rows);
        *n_out += src->part[i].rows;
    }
    return TL_OK;
}

/* Where output o of input k lies: the byte of its chunk. */
static int64_t q8_at(int64_t o, int64_t k) { return k / 4 * 64 + o % TL_CPU_TILE * 4 + k % 4; }

static int64_t q4_pair_at(int64_t k) /* offset of the pair of groups that k is in */
{
    return k / 256 * TL_CPU_Q4_BLOCK + 64 + k % 256 / 64 * TL_CPU_Q4_PAIR;
}

static int64_t q4_at(int64_t o, int64_t k) /* the byte; the nibble is high where k & 4 */
{
    return q4_pair_at(k) + k % 64 / 8 * 64 + o % TL_CPU_TILE * 4 + k % 4;
}

static int64_t q4_scale_at(int64_t o, int64_t k) /* the byte; the nibble is high where k & 32 */
{
    return k / 256 * TL_CPU_Q4_BLOCK + k % 256 / 64 * 16 + o % TL_CPU_TILE;
}

static uint32_t word_at(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* Bytes of `unit` (0x01010101) or nibbles (0x11111111): is one of them zero? */
static bool has_zero(uint32_t v, uint32_t unit, uint32_t top) { return ((v - unit) & ~v & top) != 0; }

static enum tl_status pack_q8(uint8_t *tile, int64_t o, const int8_t *w, int64_t n_in, struct tl_error *err)
{
    uint8_t last[4] = {0};
    bool bad = false;
    for (int64_t k = 0; k < n_in; k += 4) {
        uint32_t v;
        if (n_in - k < 4)
            memcpy(last, w + k, (size_t)(n_in - k));
        v = word_at(n_in - k < 4 ? last : (const uint8_t *)w + k);
        bad |= has_zero(v ^ 0x80808080u, 0x01010101u, 0x80808080u);
        memcpy(tile + q8_at(o, k), &v, 4);
    }
    if (bad)
        return tl_fail(err, TL_ERR_BAD_PARAM,
                       "row %lld of an INT8 matrix has a weight of -128; the range is -127 to 127", (long long)o);
    return TL_OK;
}

/* The low 4 nibbles of v as bytes. */
static uint32_t nibbles(uint32_t v)
{
    v = (v | v << 8) & 0x00ff00ffu;
    return (v | v << 4) & 0x0f0f0f0fu;
}

static enum tl_status pack_q4(uint8_t *tile, int64_t o, const uint8_t *w, const uint8_t *gscale, int64_t n_in,
                              struct tl_error *err)
{
    uint8_t last[4] = {0};
    bool bad = false;
    for (int64_t k = 0; k < n_in; k += 8) { /* 4 source bytes: one packed word */
        uint32_t v;
        if (n_in - k < 8)
            memcpy(last, w + k / 2, (size_t)((n_in - k) / 2));
        v = word_at(n_in - k < 8 ? last : w + k / 2) ^ 0x88888888u; /* two's complement + 8 */
        bad |= has_zero(v, 0x11111111u, 0x88888888u);
        v = nibbles(v & 0xffffu) | nibbles(v >> 16) << 4;
        memcpy(tile + q4_at(o, k), &v, 4);
    }
    for (int64_t g = 0; g * 32 < n_in; g += 2) /* the source's pairing is ours */
        tile[q4_scale_at(o, g * 32)] = (g + 1) * 32 < n_in ? gscale[g / 2] : gscale[g / 2] & 15;
    if (bad)
        return tl_fail(err, TL_ERR_BAD_PARAM, "row %lld of an INT4 matrix has a weight of -8; the range is -7 to 7",
                       (long long)o);
    return TL_OK;
}

static enum tl_status pack_part(struct tl_mat *m, const struct tl_mat_part *p, int64_t o_first, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    for (int64_t r = 0; r < p->rows && st == TL_OK; r++) {
        int64_t o = o_first + r;
        uint8_t *tile = m->data + (size_t)(o / TL_CPU_TILE) * m->tile_bytes;
        size_t elem = m->wtype == TL_W_F32 ? 4 : 2;
        if (o % TL_CPU_TILE == 0)
            memset(tile, 0, m->tile_bytes);
        switch (m->wtype) {
        case TL_W_INT8: st = pack_q8(tile, o, (const int8_t *)p->data + r * m->n_in, m->n_in, err); break;
        case TL_W_INT4:
            st = pack_q4(tile, o, (const uint8_t *)p->data + r * (m->n_in / 2),
                         p->group_scale + r * (((m->n_in + 31) / 32 + 1) / 2), m->n_in, err);
            break;
        default:
            memcpy(m->data + (size_t)(o * m->k_pad) * elem, (const uint8_t *)p->data + (size_t)(r * m->n_in) * elem,
                   (size_t)m->n_in * elem);
        }
        if (m->row_scale)
            m->row_scale[o] = p->row_scale[r];
    }
    return st;
}

enum tl_status tl_cpu_mat_create(struct tl_backend *be, const struct tl_mat_src *src, struct tl_mat **out,
                                 struct tl_error *err)
{
    struct tl_mat *m = NULL;
    int64_t n_out, o = 0;
    size_t data_bytes, scale_bytes;
    enum tl_status st = check_source(src, &n_out, err);
    (void)be;
    *out = NULL;
    if (st != TL_OK)
        return st;
    m = tl_calloc(1, sizeof(*m));
    if (!m)
        return tl_fail_host_memory(err, sizeof(*m));
    m->wtype = src->wtype;
    m->n_out = n_out;
    m->n_in = src->n_in;
    m->k_pad = round_up(m->n_in, is_int(m->wtype) ? 64 : 16);
    m->n_tiles = round_up(n_out, TL_CPU_TILE) / TL_CPU_TILE;
    switch (m->wtype) {
    case TL_W_INT4:
        m->tile_bytes = (size_t)(round_up(m->k_pad, 256) / 256 * 64 + m->k_pad / 64 * TL_CPU_Q4_PAIR);
        break;
    case TL_W_INT8: m->tile_bytes = (size_t)(TL_CPU_TILE * m->k_pad); break;
    default: m->tile_bytes = (size_t)(TL_CPU_TILE * m->k_pad * (m->wtype == TL_W_F32 ? 4 : 2));
    }
    scale_bytes = is_int(m->wtype) ? (size_t)(m->n_tiles * TL_CPU_TILE) * sizeof(float) : 0;
    if (__builtin_mul_overflow(m->tile_bytes, (size_t)m->n_tiles, &data_bytes)) {
        st = tl_fail_host_memory(err, SIZE_MAX);
        goto out;
    }
    m->data = tl_cpu_pages(data_bytes);
    m->row_scale = scale_bytes ? tl_calloc(scale_bytes, 1) : NULL;
    if (!m->data || (scale_bytes && !m->row_scale)) {
        st = tl_fail_host_memory(err, data_bytes + scale_bytes);
        goto out;
    }
    m->bytes = sizeof(*m) + data_bytes + scale_bytes;
    for (int i = 0; i < src->n_parts; i++) {
        st = pack_part(m, &src->part[i], o, err);
        if (st != TL_OK)
            goto out;
        o += src->part[i].rows;
    }
    *out = m;
    m = NULL;
out:
    tl_cpu_mat_free(be, m);
    return st;
}

void tl_cpu_mat_free(struct tl_backend *be, struct tl_mat *m)
{
    (void)be;
    if (!m)
        return;
    tl_free(m->data);
    tl_free(m->row_scale);
    tl_free(m);
}

void tl_cpu_mat_row(const struct tl_mat *m, int64_t row, float *w)
{
    const uint8_t *tile = m->data + (size_t)(row / TL_CPU_TILE) * m->tile_bytes;
    for (int64_t k = 0; k < m->n_in; k++) {
        uint32_t bits;
        int q, s;
        switch (m->wtype) {
        case TL_W_F32: w[k] = ((const float *)m->data)[row * m->k_pad + k]; break;
        case TL_W_BF16:
            bits = (uint32_t)((const uint16_t *)m->data)[row * m->k_pad + k] << 16;
            memcpy(&w[k], &bits, 4);
            break;
        case TL_W_INT8: w[k] = m->row_scale[row] * (float)(int8_t)tile[q8_at(row, k)]; break;
        default:
            q = (tile[q4_at(row, k)] >> (k & 4)) & 15;
            s = (tile[q4_scale_at(row, k)] >> (k & 32 ? 4 : 0)) & 15;
            w[k] = m->row_scale[row] * (float)(s * (q - 8));
        }
    }
}
