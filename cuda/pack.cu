/* Weight matrices in the layouts of device.cuh, packed on the device from a staged copy of the source.
 *
 * An INT4 tile holds 16 stored rows, chunk by chunk of 64 inputs, in units of up to 16 chunks (1,024 inputs): the unit's chunks,
 * 512 bytes each, then 16 bytes of group scales per chunk. In a chunk, lane = 4 g + t of a warp finds its 16 bytes at 16 * lane,
 * one word for each of (row g, group 0), (row g + 8, group 0), (row g, group 1), (row g + 8, group 1): byte j of a word has input
 * 32 * group + 8 t + j in its low nibble, plus 8, and input 8 t + 4 + j in its high one, in two's complement: as a signed byte, 16
 * times the high one's weight plus a number from 1 to 15. So one 16-byte load is the weight operand of two m16n8k32 products. The
 * scales of a chunk: 16-bit word g has nibbles (row g, group 0), (row g, group 1), (row g + 8, group 0), (row g + 8, group 1), lowest
 * first. */
#include "backend_impl.cuh"

#define K_MAX 133144 /* inputs of an integer matrix: 127 * 127 * this < 2^31 */

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* The source row of a stored row, or -1. */
__device__ static int64_t source_row(int64_t stored, int64_t n_out, bool gated)
{
    int64_t half = n_out / 2, o = stored / 16 * 8 + stored % 8;
    if (!gated)
        return stored < n_out ? stored : -1;
    return o >= half ? -1 : stored % 16 < 8 ? o : half + o;
}

struct packing {
    const uint8_t *src, *gscale; /* staged: rows in source order */
    const float *scale;
    int64_t n_out, n_in, k_pad, n_rows; /* n_rows: stored */
    bool gated;
    int *bad; /* set to 1 + source row of a weight that is out of range */
};

__device__ static int q4_at(const struct packing *p, int64_t r, int64_t k)
{
    if (r < 0 || k >= p->n_in)
        return 0;
    int b = p->src[r * (p->n_in / 2) + k / 2] >> (k & 1 ? 4 : 0) & 15;
    if (b == 8)
        *p->bad = (int)r + 1;
    return b; /* two's complement nibble */
}

__device__ static int gscale_at(const struct packing *p, int64_t r, int64_t group)
{
    int64_t groups = (p->n_in + 31) / 32;
    if (r < 0 || group >= groups)
        return 0;
    return p->gscale[r * ((groups + 1) / 2) + group / 2] >> (group & 1 ? 4 : 0) & 15;
}

__global__ static void pack_q4_tiles(struct packing p, uint8_t *tiles, int64_t tile_bytes, int64_t n_words)
{
    int64_t id = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t chunks = p.k_pad / 64, chunk = id / 132 % chunks, tile = id / 132 / chunks;
    int w = (int)(id % 132);
    if (id >= n_words)
        return;
    int64_t unit = chunk / 16, in_unit = chunk % 16, unit_chunks = min((int64_t)16, chunks - unit * 16);
    uint8_t *at = tiles + tile * tile_bytes + unit * 16 * 528;
    if (w < 128) {
        int lane = w / 4, g = lane / 4, t = lane % 4, row = g + (w & 1 ? 8 : 0), group = w % 4 / 2;
        int64_t r = source_row(tile * 16 + row, p.n_out, p.gated), k = chunk * 64 + group * 32 + 8 * t;
        uint32_t v = 0;
        for (int j = 0; j < 4; j++)
            v |= (uint32_t)((q4_at(&p, r, k + j) ^ 8) | q4_at(&p, r, k + 4 + j) << 4) << (8 * j);
        *(uint32_t *)(at + in_unit * 512 + w * 4) = v;
    } else {
        uint32_t v = 0;
        for (int j = 0; j < 2; j++) {
            int g = (w - 128) * 2 + j;
            int64_t lo = source_row(tile * 16 + g, p.n_out, p.gated),
                    hi = source_row(tile * 16 + g + 8, p.n_out, p.gated);
            v |= (uint32_t)(gscale_at(&p, lo, chunk * 2) | gscale_at(&p, lo, chunk * 2 + 1) << 4 |
                            gscale_at(&p, hi, chunk * 2) << 8 | gscale_at(&p, hi, chunk * 2 + 1) << 12)
                 << (16 * j);
        }
        *(uint32_t *)(at + unit_chunks * 512 + in_unit * 16 + (w - 128) * 4) = v;
    }
}

__global__ static void pack_rows(struct packing p, enum tl_wtype wtype, void *rows, float *row_scale)
{
    int64_t stored = blockIdx.x, r = source_row(stored, p.n_out, p.gated);
    for (int64_t k = threadIdx.x; k < p.k_pad; k += blockDim.x) {
        bool in = r >= 0 && k < p.n_in;
        int64_t to = stored * p.k_pad + k, from = r * p.n_in + k;
        int q;
        switch (wtype) {
        case TL_W_F32: ((float *)rows)[to] = in ? ((const float *)p.src)[from] : 0.0f; break;
        case TL_W_BF16: ((uint16_t *)rows)[to] = in ? ((const uint16_t *)p.src)[from] : 0; break;
        case TL_W_INT8:
            q = in ? ((const int8_t *)p.src)[from] : 0;
            if (q == -128)
                *p.bad = (int)r + 1;
            ((int8_t *)rows)[to] = (int8_t)q;
            break;
        default:
            q = in ? (int)(q4_at(&p, r, k) ^ 8) - 8 : 0;
            ((int8_t *)rows)[to] = (int8_t)(q * (in ? gscale_at(&p, r, k / 32) : 0));
        }
    }
    if (row_scale && threadIdx.x == 0)
        row_scale[stored] = r >= 0 ? p.scale[r] : 0.0f;
}

static enum tl_status check_source(const struct tl_mat_src *src, int64_t *n_out, struct tl_error *err)
{
    bool is_int = src->wtype == TL_W_INT8 || src->wtype == TL_W_INT4;
    *n_out = 0;
    if ((unsigned)src->wtype >= TL_W_COUNT || src->n_parts < 1 || src->n_parts > 3)
        return tl_fail(err, TL_ERR_BAD_PARAM, "a matrix has weight type %d and %d parts", (int)src->wtype,
                       src->n_parts);
    if (src->n_in < 1 || src->n_in > INT32_MAX / 64)
        return tl_fail(err, TL_ERR_BAD_PARAM, "a matrix has %lld inputs", (long long)src->n_in);
    if (is_int && src->n_in > K_MAX)
        return tl_fail(err, TL_ERR_UNSUPPORTED,
                       "an integer matrix has %lld inputs; sums of more than %d can exceed 32 bits",
                       (long long)src->n_in, K_MAX);
    if (src->wtype == TL_W_INT4 && src->n_in % 2 != 0)
        return tl_fail(err, TL_ERR_UNSUPPORTED, "an INT4 matrix has %lld inputs, which is not even",
                       (long long)src->n_in);
    for (int i = 0; i < src->n_parts; i++) {
        if (src->part[i].rows < 1 || src->part[i].rows > INT32_MAX / 64)
            return tl_fail(err, TL_ERR_BAD_PARAM, "part %d of a matrix has %lld rows", i, (long long)src->part[i].rows);
        *n_out += src->part[i].rows;
    }
    if (src->gated && *n_out % 2 != 0)
        return tl_fail(err, TL_ERR_BAD_PARAM, "a gated matrix has %lld rows, which is not even", (long long)*n_out);
    return TL_OK;
}

/* Device memory of one matrix, and the staged source behind it. */
struct staging {
    uint8_t *data, *gscale;
    float *scale;
    int *bad;
};

static void staging_free(struct staging *s)
{
    cudaFree(s->data);
    cudaFree(s->gscale);
    cudaFree(s->scale);
    cudaFree(s->bad);
}

static cudaError_t take(void **out, size_t bytes, size_t *total)
{
    if (total)
        *total += bytes;
    return cudaMalloc(out, bytes ? bytes : 1);
}

static cudaError_t stage(struct staging *s, const struct tl_mat_src *src, int64_t n_out)
{
    static const int bits[] = {32, 16, 8, 4};
    size_t row = (size_t)src->n_in * (size_t)bits[src->wtype] / 8, g_row = ((size_t)src->n_in + 63) / 64, at = 0;
    cudaError_t e = take((void **)&s->data, row * (size_t)n_out, NULL);
    if (e == cudaSuccess)
        e = take((void **)&s->bad, sizeof(int), NULL);
    if (e == cudaSuccess)
        e = cudaMemset(s->bad, 0, sizeof(int));
    if (e == cudaSuccess && src->part[0].row_scale)
        e = take((void **)&s->scale, (size_t)n_out * sizeof(float), NULL);
    if (e == cudaSuccess && src->part[0].group_scale)
        e = take((void **)&s->gscale, g_row * (size_t)n_out, NULL);
    for (int i = 0; i < src->n_parts && e == cudaSuccess; i++) {
        const struct tl_mat_part *p = &src->part[i];
        size_t n = (size_t)p->rows;
        e = cudaMemcpy(s->data + at * row, p->data, n * row, cudaMemcpyHostToDevice);
        if (e == cudaSuccess && p->row_scale)
            e = cudaMemcpy(s->scale + at, p->row_scale, n * sizeof(float), cudaMemcpyHostToDevice);
        if (e == cudaSuccess && p->group_scale)
            e = cudaMemcpy(s->gscale + at * g_row, p->group_scale, n * g_row, cudaMemcpyHostToDevice);
        at += n;
    }
    return e;
}

static cudaError_t pack(struct tl_mat *m, const struct staging *s, int *bad)
{
    struct packing p = {s->data, s->gscale, s->scale, m->n_out, m->n_in, m->k_pad, m->n_tiles * 16, m->gated, s->bad};
    size_t n = (size_t)p.n_rows * (size_t)m->k_pad;
    bool is_int = m->wtype == TL_W_INT8 || m->wtype == TL_W_INT4;
    void *rows = NULL;
    cudaError_t e = take(&rows, n * (is_int ? 1 : m->wtype == TL_W_BF16 ? 2 : 4), &m->bytes);
    if (m->wtype == TL_W_F32)
        m->rows32 = (float *)rows;
    else if (m->wtype == TL_W_BF16)
        m->rows16 = (uint16_t *)rows;
    else
        m->rows8 = (int8_t *)rows;
    if (e == cudaSuccess && is_int)
        e = take((void **)&m->row_scale, (size_t)p.n_rows * sizeof(float), &m->bytes);
    if (e == cudaSuccess && m->wtype == TL_W_INT4) {
        int64_t words = m->n_tiles * (m->k_pad / 64) * 132;
        m->tile_bytes = (size_t)(m->k_pad / 64) * 528;
        e = take((void **)&m->tiles, (size_t)m->n_tiles * m->tile_bytes, &m->bytes);
        if (e == cudaSuccess)
            pack_q4_tiles<<<(unsigned)((words + 255) / 256), 256>>>(p, m->tiles, (int64_t)m->tile_bytes, words);
    }
    if (e == cudaSuccess)
        pack_rows<<<(unsigned)p.n_rows, 256>>>(p, m->wtype, rows, m->row_scale);
    if (e == cudaSuccess)
        e = cudaGetLastError();
    if (e == cudaSuccess)
        e = cudaMemcpy(bad, s->bad, sizeof(int), cudaMemcpyDeviceToHost);
    return e;
}

enum tl_status tlc_mat_create(struct tl_backend *be, const struct tl_mat_src *src, struct tl_mat **out,
                              struct tl_error *err)
{
    struct staging s = {};
    struct tl_mat *m;
    int64_t n_out;
    int bad = 0;
    enum tl_status st = check_source(src, &n_out, err);
    *out = NULL;
    if (st != TL_OK)
        return st;
    m = (struct tl_mat *)tl_calloc(1, sizeof(*m));
    if (!m)
        return tl_fail_host_memory(err, sizeof(*m));
    m->wtype = src->wtype;
    m->gated = src->gated;
    m->n_out = n_out;
    m->n_in = src->n_in;
    m->k_pad = round_up(src->n_in, 64);
    m->n_tiles = src->gated ? (n_out / 2 + 7) / 8 : (n_out + 15) / 16;
    cudaError_t e = stage(&s, src, n_out);
    if (e == cudaSuccess)
        e = pack(m, &s, &bad);
    staging_free(&s);
    if (e != cudaSuccess)
        st = tlc_check(tlc_of(be), e, "loading a matrix", err);
    else if (bad)
        st = tl_fail(err, TL_ERR_BAD_PARAM, "row %d of an %s matrix has a weight of %d; the range is %d to %d", bad - 1,
                     m->wtype == TL_W_INT4 ? "INT4" : "INT8", m->wtype == TL_W_INT4 ? -8 : -128,
                     m->wtype == TL_W_INT4 ? -7 : -127, m->wtype == TL_W_INT4 ? 7 : 127);
    if (st != TL_OK) {
        tlc_mat_free(be, m);
        return st;
    }
    *out = m;
    return TL_OK;
}

void tlc_mat_free(struct tl_backend *be, struct tl_mat *m)
{
    (void)be;
    if (!m)
        return;
    cudaFree(m->tiles);
    cudaFree(m->rows8);
    cudaFree(m->rows16);
    cudaFree(m->rows32);
    cudaFree(m->row_scale);
    tl_free(m);
}
