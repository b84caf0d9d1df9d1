#include "fake_backend.h"

#include "mem.h"
#include "quant.h"

#include <stdlib.h>
#include <string.h>

struct tl_buf {
    size_t bytes;
    float data[]; /* aligned for any use */
};

struct tl_mat {
    enum tl_wtype wtype;
    int64_t n_in, rows;
    size_t row_bytes, bytes;
    uint8_t *data;
    float *row_scale;
    uint8_t *group_scale;
};

static int64_t g_requests, g_fail_at, g_live, g_live_bytes, g_runs;

void fake_fail_at(int64_t n)
{
    g_requests = 0;
    g_fail_at = n;
}

int64_t fake_requests(void) { return g_requests; }
int64_t fake_live_objects(void) { return g_live; }
int64_t fake_live_bytes(void) { return g_live_bytes; }
int64_t fake_runs(void) { return g_runs; }

static enum tl_status request(struct tl_error *err, size_t bytes)
{
    if (++g_requests == g_fail_at)
        return tl_fail(err, TL_ERR_NO_DEVICE_MEMORY, "the fake device has no memory left for %zu bytes", bytes);
    return TL_OK;
}

/* Memory of the test itself: never refused. */
static void *must(void *p)
{
    if (!p)
        abort();
    return p;
}

static enum tl_status fake_open(struct tl_backend **out, int n_threads, struct tl_error *err)
{
    struct tl_backend *be = must(calloc(1, sizeof(*be)));
    (void)n_threads;
    (void)err;
    be->ops = &fake_backend_ops;
    *out = be;
    return TL_OK;
}

static void fake_close(struct tl_backend *be) { free(be); }

struct tl_backend *fake_backend_open(void)
{
    struct tl_backend *be = NULL;
    (void)fake_open(&be, 0, NULL);
    return be;
}

static enum tl_status fake_buf_alloc(struct tl_backend *be, size_t bytes, struct tl_buf **out, struct tl_error *err)
{
    enum tl_status st = request(err, bytes);
    (void)be;
    *out = NULL;
    if (st != TL_OK)
        return st;
    *out = must(calloc(1, sizeof(**out) + bytes));
    (*out)->bytes = bytes;
    g_live++;
    g_live_bytes += (int64_t)bytes;
    return TL_OK;
}

static void fake_buf_free(struct tl_backend *be, struct tl_buf *b)
{
    (void)be;
    if (!b)
        return;
    g_live--;
    g_live_bytes -= (int64_t)b->bytes;
    free(b);
}

static enum tl_status fake_buf_write(struct tl_backend *be, struct tl_buf *dst, size_t off, const void *src,
                                     size_t bytes, struct tl_error *err)
{
    enum tl_status st = request(err, bytes);
    (void)be;
    if (st != TL_OK)
        return st;
    if (off > dst->bytes || bytes > dst->bytes - off)
        return tl_fail(err, TL_ERR_INTERNAL, "a write of %zu bytes at %zu into a buffer of %zu", bytes, off,
                       dst->bytes);
    memcpy((char *)dst->data + off, src, bytes);
    return TL_OK;
}

static enum tl_status fake_buf_read(struct tl_backend *be, const struct tl_buf *src, size_t off, void *dst,
                                    size_t bytes, struct tl_error *err)
{
    (void)be;
    if (off > src->bytes || bytes > src->bytes - off)
        return tl_fail(err, TL_ERR_INTERNAL, "a read of %zu bytes at %zu from a buffer of %zu", bytes, off, src->bytes);
    memcpy(dst, (const char *)src->data + off, bytes);
    return TL_OK;
}

static void *fake_host_alloc(struct tl_backend *be, size_t bytes)
{
    (void)be;
    return tl_malloc(bytes);
}

static void fake_host_free(struct tl_backend *be, void *p)
{
    (void)be;
    tl_free(p);
}

static enum tl_status fake_buf_copy(struct tl_backend *be, struct tl_buf *dst, size_t dst_off, const struct tl_buf *src,
                                    size_t src_off, size_t bytes, struct tl_error *err)
{
    (void)be;
    if (src_off > src->bytes || bytes > src->bytes - src_off || dst_off > dst->bytes || bytes > dst->bytes - dst_off)
        return tl_fail(err, TL_ERR_INTERNAL, "a copy of %zu bytes leaves a buffer", bytes);
    memmove((char *)dst->data + dst_off, (const char *)src->data + src_off, bytes);
    return TL_OK;
}

static size_t row_bytes(enum tl_wtype t, int64_t n_in)
{
    size_t n = (size_t)n_in;
    return t == TL_W_F32 ? 4 * n : t == TL_W_BF16 ? 2 * n : t == TL_W_INT8 ? n : n / 2;
}

static enum tl_status fake_mat_create(struct tl_backend *be, const struct tl_mat_src *src, struct tl_mat **out,
                                      struct tl_error *err)
{
    struct tl_mat *m;
    int64_t rows = 0, at = 0;
    size_t gbytes = tl_q4_gscale_bytes(src->n_in);
    enum tl_status st = request(err, 0);
    (void)be;
    *out = NULL;
    if (st != TL_OK)
        return st;
    for (int i = 0; i < src->n_parts; i++)
        rows += src->part[i].rows;
    m = must(calloc(1, sizeof(*m)));
    m->wtype = src->wtype;
    m->n_in = src->n_in;
    m->rows = rows;
    m->row_bytes = row_bytes(src->wtype, src->n_in);
    m->data = must(malloc((size_t)rows * m->row_bytes));
    m->bytes = (size_t)rows * m->row_bytes;
    if (src->wtype >= TL_W_INT8)
        m->row_scale = must(malloc((size_t)rows * sizeof(float)));
    if (src->wtype == TL_W_INT4)
        m->group_scale = must(malloc((size_t)rows * gbytes));
    for (int i = 0; i < src->n_parts; i++) {
        const struct tl_mat_part *p = &src->part[i];
        size_t n = (size_t)p->rows;
        memcpy(m->data + (size_t)at * m->row_bytes, p->data, n * m->row_bytes);
        if (m->row_scale)
            memcpy(m->row_scale + at, p->row_scale, n * sizeof(float));
        if (m->group_scale)
            memcpy(m->group_scale + (size_t)at * gbytes, p->group_scale, n * gbytes);
        at += p->rows;
    }
    g_live++;
    g_live_bytes += (int64_t)m->bytes;
    *out = m;
    return TL_OK;
}

static void fake_mat_free(struct tl_backend *be, struct tl_mat *m)
{
    (void)be;
    if (!m)
        return;
    g_live--;
    g_live_bytes -= (int64_t)m->bytes;
    free(m->data);
    free(m->row_scale);
    free(m->group_scale);
    free(m);
}

static size_t fake_mat_bytes(const struct tl_mat *m) { return m->bytes; }

static enum tl_status fake_prepare(struct tl_backend *be, const struct tl_net *net, int rows_max, struct tl_error *err)
{
    (void)be;
    (void)net;
    (void)rows_max;
    return request(err, 0);
}

static size_t fake_scratch_bytes(const struct tl_backend *be)
{
    (void)be;
    return 0;
}

/* Every number asked for is zero, but the logit of token (pos % vocab) is 1, so that something can be sampled. */
static enum tl_status fake_run(struct tl_backend *be, const struct tl_step *step, struct tl_error *err)
{
    enum tl_status st = request(err, 0);
    (void)be;
    if (st != TL_OK)
        return st;
    g_runs++;
    for (int i = 0; i < step->n_ops; i++) {
        const struct tl_op *op = &step->ops[i];
        const struct tl_row_set *set = &step->sets[op->set];
        size_t width = op->kind == TL_OP_HEAD        ? (size_t)step->net->spec.vocab_size
                       : op->kind == TL_OP_GATE      ? 1
                       : op->kind == TL_OP_SAVE_ROWS ? (size_t)step->net->spec.d_model
                                                     : 0;
        if (!op->host_out || !width)
            continue;
        memset(op->host_out, 0, (size_t)set->n * width * sizeof(float));
        for (int r = 0; r < set->n && op->kind == TL_OP_HEAD; r++)
            op->host_out[(size_t)r * width + (size_t)step->rows[set->rows[r]].pos % width] = 1;
    }
    return TL_OK;
}

static enum tl_status fake_sync(struct tl_backend *be, struct tl_error *err)
{
    (void)be;
    (void)err;
    return TL_OK;
}

static void fake_mem_info(const struct tl_backend *be, size_t *bytes_free, size_t *bytes_total)
{
    (void)be;
    *bytes_free = *bytes_total = (size_t)1 << 32;
}

static const char *fake_describe(const struct tl_backend *be)
{
    (void)be;
    return "fake";
}

const struct tl_backend_ops fake_backend_ops = {
    .name = "fake",
    .open = fake_open,
    .close = fake_close,
    .buf_alloc = fake_buf_alloc,
    .buf_free = fake_buf_free,
    .buf_write = fake_buf_write,
    .buf_read = fake_buf_read,
    .buf_copy = fake_buf_copy,
    .host_alloc = fake_host_alloc,
    .host_free = fake_host_free,
    .mat_create = fake_mat_create,
    .mat_free = fake_mat_free,
    .mat_bytes = fake_mat_bytes,
    .prepare = fake_prepare,
    .scratch_bytes = fake_scratch_bytes,
    .run = fake_run,
    .sync = fake_sync,
    .mem_info = fake_mem_info,
    .describe = fake_describe,
};

void fake_mat_row(const struct tl_mat *m, int64_t row, float *out)
{
    const uint8_t *p = m->data + (size_t)row * m->row_bytes;
    if (m->wtype == TL_W_F32) {
        memcpy(out, p, m->row_bytes);
    } else if (m->wtype == TL_W_BF16) {
        for (int64_t i = 0; i < m->n_in; i++) {
            uint16_t v;
            memcpy(&v, p + 2 * i, 2);
            out[i] = tl_bf16_to_f32(v);
        }
    } else if (m->wtype == TL_W_INT8) {
        tl_unpack_int8_row((const int8_t *)p, m->row_scale[row], m->n_in, out);
    } else {
        tl_unpack_int4_row(p, m->group_scale + (size_t)row * tl_q4_gscale_bytes(m->n_in), m->row_scale[row], m->n_in,
                           out);
    }
}

int64_t fake_mat_rows(const struct tl_mat *m) { return m->rows; }
int64_t fake_mat_n_in(const struct tl_mat *m) { return m->n_in; }
enum tl_wtype fake_mat_wtype(const struct tl_mat *m) { return m->wtype; }
const float *fake_buf_floats(const struct tl_buf *b) { return b->data; }
size_t fake_buf_bytes(const struct tl_buf *b) { return b->bytes; }
