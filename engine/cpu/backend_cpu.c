/* The CPU backend: device memory is host memory, run() is a walk over the op list by all threads of the pool, sync() has
 * nothing to wait for. All scratch is one slab taken by prepare(); run() allocates nothing and cannot fail once its step has
 * been checked. */
#include "backend_impl.h"

#include "../mem.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static struct tl_cpu_backend *cpu_of(struct tl_backend *be) { return (struct tl_cpu_backend *)be; }

/* ---- life ---- */

static void cpu_close(struct tl_backend *be)
{
    struct tl_cpu_backend *c = cpu_of(be);
    if (!c)
        return;
    tl_cpu_pool_close(c->pool);
    tl_free(c->s.slab);
    tl_free(c);
}

static enum tl_status cpu_open(struct tl_backend **out, int n_threads, struct tl_error *err)
{
    struct tl_cpu_backend *c = tl_calloc(1, sizeof(*c));
    enum tl_status st;
    *out = NULL;
    if (!c)
        return tl_fail_host_memory(err, sizeof(*c));
    c->base.ops = &tl_backend_cpu;
    c->k = tl_cpu_kernels_of(tl_cpu_level());
    st = tl_cpu_pool_open(&c->pool, n_threads, err);
    if (st != TL_OK) {
        cpu_close(&c->base);
        return st;
    }
    c->n_threads = tl_cpu_pool_size(c->pool);
    snprintf(c->describe, sizeof(c->describe), "cpu %s, %d thread%s", c->k->name, c->n_threads,
             c->n_threads == 1 ? "" : "s");
    *out = &c->base;
    return TL_OK;
}

static const char *cpu_describe(const struct tl_backend *be) { return ((const struct tl_cpu_backend *)be)->describe; }

/* ---- memory ---- */

static enum tl_status buf_alloc(struct tl_backend *be, size_t bytes, struct tl_buf **out, struct tl_error *err)
{
    struct tl_buf *b = tl_calloc(1, sizeof(*b));
    (void)be;
    *out = NULL;
    if (b)
        b->data = tl_cpu_pages(bytes);
    if (!b || !b->data) {
        tl_free(b);
        return tl_fail(err, TL_ERR_NO_DEVICE_MEMORY, "the CPU backend has no memory left for %zu bytes", bytes);
    }
    b->bytes = bytes;
    *out = b;
    return TL_OK;
}

static void buf_free(struct tl_backend *be, struct tl_buf *b)
{
    (void)be;
    if (b)
        tl_free(b->data);
    tl_free(b);
}

static enum tl_status check_range(const struct tl_buf *b, size_t off, size_t bytes, struct tl_error *err)
{
    if (off <= b->bytes && bytes <= b->bytes - off)
        return TL_OK;
    return tl_fail(err, TL_ERR_INTERNAL, "bytes %zu + %zu lie outside a buffer of %zu", off, bytes, b->bytes);
}

static enum tl_status buf_write(struct tl_backend *be, struct tl_buf *dst, size_t off, const void *src, size_t bytes,
                                struct tl_error *err)
{
    enum tl_status st = check_range(dst, off, bytes, err);
    (void)be;
    if (st == TL_OK && bytes)
        memcpy(dst->data + off, src, bytes);
    return st;
}

static enum tl_status buf_read(struct tl_backend *be, const struct tl_buf *src, size_t off, void *dst, size_t bytes,
                               struct tl_error *err)
{
    enum tl_status st = check_range(src, off, bytes, err);
    (void)be;
    if (st == TL_OK && bytes)
        memcpy(dst, src->data + off, bytes);
    return st;
}

static enum tl_status buf_copy(struct tl_backend *be, struct tl_buf *dst, size_t dst_off, const struct tl_buf *src,
                               size_t src_off, size_t bytes, struct tl_error *err)
{
    enum tl_status st = check_range(dst, dst_off, bytes, err);
    (void)be;
    if (st == TL_OK)
        st = check_range(src, src_off, bytes, err);
    if (st == TL_OK && bytes)
        memcpy(dst->data + dst_off, src->data + src_off, bytes);
    return st;
}

static void *host_alloc(struct tl_backend *be, size_t bytes)
{
    (void)be;
    return tl_malloc(bytes);
}

static void host_free(struct tl_backend *be, void *p)
{
    (void)be;
    tl_free(p);
}

static size_t mat_bytes(const struct tl_mat *m) { return m->bytes; }

static size_t read_number(const char *path, const char *key)
{
    char line[128];
    size_t n = SIZE_MAX;
    FILE *f = fopen(path, "r");
    if (!f)
        return SIZE_MAX;
    while (fgets(line, sizeof(line), f))
        if (strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%zu", &n) == 1)
            break;
    fclose(f);
    return n;
}

/* What the machine has free, or the control group if that allows less. */
static void mem_info(const struct tl_backend *be, size_t *bytes_free, size_t *bytes_total)
{
    size_t limit = read_number("/sys/fs/cgroup/memory.max", ""),
           used = read_number("/sys/fs/cgroup/memory.current", "");
    size_t free_kb = read_number("/proc/meminfo", "MemAvailable:"),
           total_kb = read_number("/proc/meminfo", "MemTotal:");
    (void)be;
    *bytes_total = total_kb == SIZE_MAX ? 0 : total_kb * 1024;
    *bytes_free = free_kb == SIZE_MAX ? *bytes_total : free_kb * 1024;
    if (limit < *bytes_total) {
        size_t left = used < limit ? limit - used : 0;
        *bytes_total = limit;
        *bytes_free = left < *bytes_free ? left : *bytes_free;
    }
}

/* ---- scratch ---- */

struct wants { /* over all matrices of a net */
    int64_t k_max, positions;
    bool floats;
};

static enum tl_status want(void *ctx, const char *name, const struct tl_mat *m, int64_t n_out, int64_t n_in,
                           struct tl_error *err)
{
    struct wants *w = ctx;
    if (!m || m->n_out != n_out || m->n_in != n_in)
        return tl_fail_shape(err, name, m ? m->n_out : 0, m ? m->n_in : 0, n_out, n_in);
    w->k_max = m->k_pad > w->k_max ? m->k_pad : w->k_max;
    w->floats = w->floats || m->wtype == TL_W_F32 || m->wtype == TL_W_BF16;
    return TL_OK;
}

/* Hand out the next `n` x `bytes` of a slab; with base NULL only count. */
struct slab {
    uint8_t *base;
    size_t used;
    bool overflow;
};

static void *take(struct slab *s, int64_t n, size_t bytes)
{
    size_t at = s->used, size;
    if (__builtin_mul_overflow((size_t)n, bytes, &size) || size > SIZE_MAX / 2 || at > SIZE_MAX / 2 - size) {
        s->overflow = true;
        return NULL;
    }
    s->used = (at + size + 63) / 64 * 64;
    return s->base ? s->base + at : NULL;
}

static void lay_out(struct tl_cpu_scratch *s, struct slab *slab, const struct tl_arch_spec *spec, const struct wants *w,
                    int64_t rows, int threads)
{
    int64_t qkv = tl_q_dim(spec) + 2 * (int64_t)tl_kv_dim(spec);
    int64_t up = (spec->mlp == TL_MLP_SILU_GATED ? 2 : 1) * (int64_t)spec->d_ff;
    int64_t per_row = spec->n_heads / spec->n_kv_heads, d = spec->d_head, d16 = (d + 15) / 16 * 16;
    int64_t queries = per_row > TL_CPU_QUERIES ? per_row : TL_CPU_QUERIES;
    struct tl_cpu_acts *a = &s->acts;
    a->k_max = (w->k_max + 63) / 64 * 64;
    s->x = take(slab, rows * spec->d_model, 4);
    s->e = take(slab, spec->inject == TL_INJECT_NONE ? 0 : rows * spec->d_model, 4);
    s->wide = take(slab, rows * (qkv > up ? qkv : up), 4);
    s->att = take(slab, rows * tl_q_dim(spec), 4);
    s->y = take(slab, rows * spec->d_model, 4);
    a->q = take(slab, rows * a->k_max, 1);
    a->group = take(slab, rows * (a->k_max / 32), 4);
    a->sum = take(slab, rows, 4);
    a->scale = take(slab, rows, 4);
    a->f = take(slab, w->floats ? rows * a->k_max : 0, 4);
    s->row = take(slab, threads * a->k_max, 4);
    s->part_splits = (w->positions + TL_SPLIT_KEYS - 1) / TL_SPLIT_KEYS;
    s->part_floats = d16 + 2;
    if (threads > spec->n_kv_heads && s->part_splits > 1)
        s->parts = take(slab, (rows < TL_CPU_PART_ROWS ? rows : TL_CPU_PART_ROWS) * spec->n_heads * s->part_splits,
                        (size_t)s->part_floats * 4);
    s->linear = take(slab, threads, sizeof(*s->linear));
    for (int i = 0; i < threads; i++) {
        struct tl_cpu_attn_scratch *t = &s->attn[i];
        t->q = take(slab, queries * d, 4);
        t->s = take(slab, queries * TL_SPLIT_KEYS, 4);
        t->acc = take(slab, queries * d16, 4);
        t->out = take(slab, queries * d16, 4);
        t->m = take(slab, queries, 4);
        t->l = take(slab, queries, 4);
        t->m_split = take(slab, queries, 4);
        t->l_split = take(slab, queries, 4);
        t->panel = take(slab, 16 * (d > TL_SPLIT_KEYS ? d : TL_SPLIT_KEYS), 4);
    }
}

static enum tl_status cpu_prepare(struct tl_backend *be, const struct tl_net *net, int rows_max, struct tl_error *err)
{
    struct tl_cpu_backend *c = cpu_of(be);
    struct wants w = {.positions = net->rope ? net->rope_positions : net->spec.max_positions};
    struct slab slab = {0};
    enum tl_status st;
    if (rows_max < 1)
        return tl_fail(err, TL_ERR_BAD_PARAM, "rows_max is %d, it must be at least 1", rows_max);
    st = tl_net_check(net, want, &w, err);
    if (st != TL_OK)
        return st;
    tl_free(c->s.slab);
    memset(&c->s, 0, sizeof(c->s));
    lay_out(&c->s, &slab, &net->spec, &w, rows_max, c->n_threads);
    if (!slab.overflow)
        slab.base = tl_cpu_pages(slab.used);
    if (!slab.base) {
        memset(&c->s, 0, sizeof(c->s));
        return tl_fail(err, TL_ERR_NO_DEVICE_MEMORY, "no memory for %zu bytes of scratch for steps of %d rows",
                       slab.used, rows_max);
    }
    memset(slab.base, 0, slab.used); /* touched now, not in the first step */
    c->s.slab = slab.base;
    c->s.bytes = slab.used;
    c->s.rows_max = rows_max;
    slab.used = 0;
    lay_out(&c->s, &slab, &net->spec, &w, rows_max, c->n_threads);
    return TL_OK;
}

static size_t scratch_bytes(const struct tl_backend *be) { return ((const struct tl_cpu_backend *)be)->s.bytes; }

/* ---- run ---- */

struct job {
    struct tl_cpu_backend *be;
    const struct tl_step *step;
};

static void run_thread(void *ctx, int tid)
{
    struct job *j = ctx;
    struct tl_cpu_run r = {j->be, j->step, tid};
    tl_cpu_step(&r);
}

static enum tl_status cpu_run(struct tl_backend *be, const struct tl_step *step, struct tl_error *err)
{
    struct job j = {cpu_of(be), step};
    if (step->n_rows > j.be->s.rows_max)
        return tl_fail(err, TL_ERR_INTERNAL, "a step has %d rows, the scratch is for %d", step->n_rows,
                       j.be->s.rows_max);
    tl_cpu_pool_run(j.be->pool, run_thread, &j);
    return TL_OK;
}

static enum tl_status cpu_sync(struct tl_backend *be, struct tl_error *err)
{
    (void)be;
    (void)err;
    return TL_OK;
}

const struct tl_backend_ops tl_backend_cpu = {
    .name = "cpu",
    .runs_ahead = false,
    .open = cpu_open,
    .close = cpu_close,
    .buf_alloc = buf_alloc,
    .buf_free = buf_free,
    .buf_write = buf_write,
    .buf_read = buf_read,
    .buf_copy = buf_copy,
    .host_alloc = host_alloc,
    .host_free = host_free,
    .mat_create = tl_cpu_mat_create,
    .mat_free = tl_cpu_mat_free,
    .mat_bytes = mat_bytes,
    .prepare = cpu_prepare,
    .scratch_bytes = scratch_bytes,
    .run = cpu_run,
    .sync = cpu_sync,
    .mem_info = mem_info,
    .describe = cpu_describe,
};
