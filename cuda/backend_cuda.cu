/* The CUDA backend's life, memory and scratch. Every CUDA call is checked; an error that the process cannot survive marks the
 * backend as failed, and every later call says so. Device memory is taken by buf_alloc, mat_create and prepare alone: a step
 * allocates nothing. */
#include "backend_impl.cuh"

#include <stdio.h>
#include <string.h>

#define HEADS_MAX 256 /* rows of logits of one step */
#define MIN_CC    80

enum tl_status tlc_check(struct tlc_backend *c, cudaError_t e, const char *what, struct tl_error *err)
{
    if (e == cudaSuccess)
        return TL_OK;
    (void)cudaGetLastError(); /* an error of one call is not for the next one to find */
    if (e == cudaErrorMemoryAllocation) {
        size_t bytes_free = 0, bytes_total = 0;
        (void)cudaMemGetInfo(&bytes_free, &bytes_total);
        return tl_fail(err, TL_ERR_NO_DEVICE_MEMORY, "%s: the GPU has %zu of %zu bytes free, which is not enough", what,
                       bytes_free, bytes_total);
    }
    c->failed = true;
    return tl_fail(err, TL_ERR_DEVICE, "%s: the GPU failed: %s", what, cudaGetErrorString(e));
}

static enum tl_status alive(const struct tlc_backend *c, struct tl_error *err)
{
    return c->failed ? tl_fail(err, TL_ERR_DEVICE, "the GPU failed earlier; the process must be started again") : TL_OK;
}

/* ---- life ---- */

static void cuda_close(struct tl_backend *be)
{
    struct tlc_backend *c = tlc_of(be);
    if (!c)
        return;
    tlc_graphs_free(c->graphs);
    tlc_solo_free(c->solo);
    cudaFree(c->s.slab);
    if (c->stream)
        cudaStreamDestroy(c->stream);
    tl_free(c);
}

static enum tl_status find_device(struct tlc_backend *c, struct tl_error *err)
{
    struct cudaDeviceProp p;
    int n = 0, driver = 0;
    cudaError_t e = cudaDriverGetVersion(&driver);
    if (e == cudaSuccess && driver == 0)
        return tl_fail(err, TL_ERR_UNSUPPORTED, "no NVIDIA driver is installed, so CUDA cannot be used");
    e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n == 0) {
        (void)cudaGetLastError();
        return tl_fail(err, TL_ERR_UNSUPPORTED, "CUDA finds no usable GPU: %s",
                       e == cudaSuccess ? "none is visible" : cudaGetErrorString(e));
    }
    e = cudaGetDevice(&c->device);
    if (e == cudaSuccess)
        e = cudaGetDeviceProperties(&p, c->device);
    if (e != cudaSuccess)
        return tlc_check(c, e, "looking at the GPU", err);
    c->cc = p.major * 10 + p.minor;
    c->sms = p.multiProcessorCount;
    c->shared_max = p.sharedMemPerBlockOptin;
    if (c->cc < MIN_CC)
        return tl_fail(err, TL_ERR_UNSUPPORTED,
                       "the GPU (%.60s) has compute capability %d.%d, at least %d.%d is needed", p.name, p.major,
                       p.minor, MIN_CC / 10, MIN_CC % 10);
    snprintf(c->describe, sizeof(c->describe), "cuda %.80s, compute capability %d.%d, %d multiprocessors, %zu MiB",
             p.name, p.major, p.minor, c->sms, p.totalGlobalMem >> 20);
    return TL_OK;
}

static enum tl_status cuda_open(struct tl_backend **out, int n_threads, struct tl_error *err)
{
    struct tlc_backend *c = (struct tlc_backend *)tl_calloc(1, sizeof(*c));
    enum tl_status st;
    (void)n_threads;
    *out = NULL;
    if (!c)
        return tl_fail_host_memory(err, sizeof(*c));
    c->base.ops = &tl_backend_cuda;
    st = find_device(c, err);
    if (st == TL_OK)
        st = tlc_check(c, cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking), "opening a stream", err);
    if (st == TL_OK)
        st = tlc_check(c, tlc_linear_one_init(), "loading kernels", err);
    if (st == TL_OK)
        st = tlc_check(c, tlc_linear_few_init(c->shared_max), "loading kernels", err);
    if (st != TL_OK) {
        cuda_close(&c->base);
        return st;
    }
    *out = &c->base;
    return TL_OK;
}

static const char *cuda_describe(const struct tl_backend *be) { return ((const struct tlc_backend *)be)->describe; }

/* ---- memory ---- */

static enum tl_status buf_alloc(struct tl_backend *be, size_t bytes, struct tl_buf **out, struct tl_error *err)
{
    struct tl_buf *b = (struct tl_buf *)tl_calloc(1, sizeof(*b));
    enum tl_status st = alive(tlc_of(be), err);
    char what[64];
    snprintf(what, sizeof(what), "taking %zu bytes of device memory", bytes);
    *out = NULL;
    if (!b)
        return tl_fail_host_memory(err, sizeof(*b));
    if (st == TL_OK)
        st = tlc_check(tlc_of(be), cudaMalloc((void **)&b->data, bytes ? bytes : 1), what, err);
    if (st != TL_OK) {
        tl_free(b);
        return st;
    }
    b->bytes = bytes;
    *out = b;
    return TL_OK;
}

static void buf_free(struct tl_backend *be, struct tl_buf *b)
{
    (void)be;
    if (b)
        cudaFree(b->data);
    tl_free(b);
}

static enum tl_status check_range(struct tlc_backend *c, const struct tl_buf *b, size_t off, size_t bytes,
                                  struct tl_error *err)
{
    if (off > b->bytes || bytes > b->bytes - off)
        return tl_fail(err, TL_ERR_INTERNAL, "bytes %zu + %zu lie outside a buffer of %zu", off, bytes, b->bytes);
    return alive(c, err);
}

static enum tl_status buf_write(struct tl_backend *be, struct tl_buf *dst, size_t off, const void *src, size_t bytes,
                                struct tl_error *err)
{
    struct tlc_backend *c = tlc_of(be);
    enum tl_status st = check_range(c, dst, off, bytes, err);
    if (st != TL_OK || !bytes)
        return st;
    cudaError_t e = cudaMemcpyAsync(dst->data + off, src, bytes, cudaMemcpyHostToDevice, c->stream);
    return tlc_check(c, e == cudaSuccess ? cudaStreamSynchronize(c->stream) : e, "writing device memory", err);
}

static enum tl_status buf_read(struct tl_backend *be, const struct tl_buf *src, size_t off, void *dst, size_t bytes,
                               struct tl_error *err)
{
    struct tlc_backend *c = tlc_of(be);
    enum tl_status st = check_range(c, src, off, bytes, err);
    if (st != TL_OK || !bytes)
        return st;
    cudaError_t e = cudaMemcpyAsync(dst, src->data + off, bytes, cudaMemcpyDeviceToHost, c->stream);
    return tlc_check(c, e == cudaSuccess ? cudaStreamSynchronize(c->stream) : e, "reading device memory", err);
}

static enum tl_status buf_copy(struct tl_backend *be, struct tl_buf *dst, size_t dst_off, const struct tl_buf *src,
                               size_t src_off, size_t bytes, struct tl_error *err)
{
    struct tlc_backend *c = tlc_of(be);
    enum tl_status st = check_range(c, dst, dst_off, bytes, err);
    if (st == TL_OK)
        st = check_range(c, src, src_off, bytes, err);
    if (st != TL_OK || !bytes)
        return st;
    return tlc_check(
        c, cudaMemcpyAsync(dst->data + dst_off, src->data + src_off, bytes, cudaMemcpyDeviceToDevice, c->stream),
        "copying device memory", err);
}

static void *host_alloc(struct tl_backend *be, size_t bytes)
{
    struct tlc_backend *c = tlc_of(be);
    void *p = NULL;
    if (cudaMallocHost(&p, bytes ? bytes : 1) != cudaSuccess) {
        (void)cudaGetLastError();
        return NULL;
    }
    for (int i = 0; i < TLC_MAPPED_MAX; i++)
        if (!c->mapped[i].data) {
            c->mapped[i].data = (uint8_t *)p;
            c->mapped[i].bytes = bytes;
            break;
        }
    return p;
}

static void host_free(struct tl_backend *be, void *p)
{
    struct tlc_backend *c = tlc_of(be);
    for (int i = 0; p && i < TLC_MAPPED_MAX; i++)
        if (c->mapped[i].data == p)
            c->mapped[i].data = NULL;
    if (p)
        cudaFreeHost(p);
}

static void mem_info(const struct tl_backend *be, size_t *bytes_free, size_t *bytes_total)
{
    (void)be;
    if (cudaMemGetInfo(bytes_free, bytes_total) == cudaSuccess)
        return;
    (void)cudaGetLastError();
    *bytes_free = *bytes_total = 0;
}

static size_t mat_bytes(const struct tl_mat *m) { return m->bytes; }

/* ---- scratch ---- */

struct wants { /* over all matrices of a net */
    int64_t k_max;
    bool ints, bf16, f32;
};

static enum tl_status want(void *ctx, const char *name, const struct tl_mat *m, int64_t n_out, int64_t n_in,
                           struct tl_error *err)
{
    struct wants *w = (struct wants *)ctx;
    if (!m || m->n_out != n_out || m->n_in != n_in)
        return tl_fail_shape(err, name, m ? m->n_out : 0, m ? m->n_in : 0, n_out, n_in);
    w->k_max = m->k_pad > w->k_max ? m->k_pad : w->k_max;
    w->ints = w->ints || m->wtype == TL_W_INT8 || m->wtype == TL_W_INT4;
    w->bf16 = w->bf16 || m->wtype == TL_W_BF16;
    w->f32 = w->f32 || m->wtype == TL_W_F32;
    return TL_OK;
}

/* A gated matrix is packed otherwise: an `up` that is packed for another kind of MLP would give wrong sums. */
static enum tl_status check_gates(const struct tl_net *net, struct tl_error *err)
{
    const struct tl_arch_spec *s = &net->spec;
    for (int i = 0; i < s->n_prelude + s->n_core + s->n_coda; i++)
        if (net->layers[i].up->gated != (s->mlp == TL_MLP_SILU_GATED))
            return tl_fail(err, TL_ERR_BAD_PARAM, "matrix up of layer %d is %s a gated one", i,
                           net->layers[i].up->gated ? "packed as" : "not packed as");
    return TL_OK;
}

/* Hand out the next `n` x `bytes` of a slab; with base NULL only count. */
struct slab {
    uint8_t *base;
    size_t used;
    bool overflow;
};

template <typename T> static void take(struct slab *s, T **out, int64_t n)
{
    size_t at = s->used, size;
    *out = NULL;
    if (__builtin_mul_overflow((size_t)n, sizeof(T), &size) || size > SIZE_MAX / 4 || at > SIZE_MAX / 4) {
        s->overflow = true;
        return;
    }
    s->used = (at + size + 255) / 256 * 256;
    if (s->base && n)
        *out = (T *)(s->base + at);
}

static void lay_out(struct tlc_scratch *s, struct slab *slab, const struct tl_net *net, const struct wants *w,
                    int64_t rows)
{
    const struct tl_arch_spec *spec = &net->spec;
    int64_t qkv = (tl_q_dim(spec) + 2 * (int64_t)tl_kv_dim(spec) + 3) / 4 * 4, d = spec->d_model;
    int64_t heads = rows < HEADS_MAX ? rows : HEADS_MAX;
    s->results_max = heads * spec->vocab_size + rows * d + TL_LOOPS_MAX * rows + 64 * TLC_SETS_MAX;
    s->acts.ld = w->k_max;
    take(slab, &s->x, rows * d);
    take(slab, &s->e, spec->inject == TL_INJECT_NONE ? 0 : rows * d);
    take(slab, &s->host_in, rows * d);
    take(slab, &s->wide, rows * (qkv > spec->d_ff ? qkv : spec->d_ff));
    take(slab, &s->att, rows * tl_q_dim(spec));
    take(slab, &s->y, rows * d);
    take(slab, &s->acts.q, w->ints ? rows * w->k_max : 0);
    take(slab, &s->acts.scale, rows);
    take(slab, &s->acts.b, w->bf16 ? rows * w->k_max : 0);
    take(slab, &s->acts.f, w->f32 ? rows * w->k_max : 0);
    take(slab, &s->best, rows);
    take(slab, &s->best_parts, heads * TLC_BEST_PARTS);
    take(slab, &s->results, s->results_max);
}

static enum tl_status cuda_prepare(struct tl_backend *be, const struct tl_net *net, int rows_max, struct tl_error *err)
{
    struct tlc_backend *c = tlc_of(be);
    struct wants w = {};
    struct slab slab = {};
    struct tlc_scratch s = {};
    char what[80];
    enum tl_status st = alive(c, err);
    if (st == TL_OK && rows_max < 1)
        st = tl_fail(err, TL_ERR_BAD_PARAM, "rows_max is %d, it must be at least 1", rows_max);
    if (st == TL_OK)
        st = tl_net_check(net, want, &w, err);
    if (st == TL_OK)
        st = check_gates(net, err);
    if (st == TL_OK)
        st = tlc_check(c, tlc_attn_init(&net->spec, c->shared_max), "loading kernels", err);
    if (st != TL_OK)
        return st;
    tlc_graphs_free(c->graphs);
    c->graphs = NULL;
    tlc_solo_free(c->solo);
    c->solo = NULL;
    cudaFree(c->s.slab);
    memset(&c->s, 0, sizeof(c->s));
    s.rows_max = rows_max;
    lay_out(&s, &slab, net, &w, rows_max);
    s.bytes = slab.used;
    if (slab.overflow)
        return tl_fail(err, TL_ERR_NO_DEVICE_MEMORY, "the scratch for steps of %d rows is too large to count",
                       rows_max);
    snprintf(what, sizeof(what), "taking %zu bytes of scratch for steps of %d rows", slab.used, rows_max);
    st = tlc_check(c, cudaMalloc((void **)&s.slab, slab.used), what, err);
    if (st != TL_OK)
        return st;
    slab.base = s.slab;
    slab.used = 0;
    lay_out(&s, &slab, net, &w, rows_max);
    c->s = s;
    /* In the stream of the steps: any other would not be waited for by the first of them. */
    st = tlc_check(c, cudaMemsetAsync(s.slab, 0, s.bytes, c->stream), "clearing scratch memory", err);
    if (st == TL_OK)
        st = tlc_check(c, tlc_solo_create(c, net, &c->solo), "preparing steps of one row", err);
    return st == TL_OK ? tlc_graphs_create(c, err) : st;
}

static size_t scratch_bytes(const struct tl_backend *be) { return ((const struct tlc_backend *)be)->s.bytes; }

static enum tl_status cuda_run(struct tl_backend *be, const struct tl_step *step, struct tl_error *err)
{
    struct tlc_backend *c = tlc_of(be);
    enum tl_status st = alive(c, err);
    if (st == TL_OK && step->n_rows > c->s.rows_max)
        st = tl_fail(err, TL_ERR_INTERNAL, "a step has %d rows, the scratch is for %d", step->n_rows, c->s.rows_max);
    return st == TL_OK ? tlc_run(c, step, err) : st;
}

static enum tl_status cuda_sync(struct tl_backend *be, struct tl_error *err)
{
    struct tlc_backend *c = tlc_of(be);
    enum tl_status st = alive(c, err);
    return st == TL_OK ? tlc_wait_for_run(c, 0, err) : st;
}

static enum tl_status cuda_wait(struct tl_backend *be, int runs_left, struct tl_error *err)
{
    struct tlc_backend *c = tlc_of(be);
    enum tl_status st = alive(c, err);
    return st == TL_OK ? tlc_wait_for_run(c, runs_left, err) : st;
}

static constexpr struct tl_backend_ops make_ops()
{
    struct tl_backend_ops o = {};
    o.name = "cuda";
    o.runs_ahead = true;
    o.open = cuda_open;
    o.close = cuda_close;
    o.buf_alloc = buf_alloc;
    o.buf_free = buf_free;
    o.buf_write = buf_write;
    o.buf_read = buf_read;
    o.buf_copy = buf_copy;
    o.host_alloc = host_alloc;
    o.host_free = host_free;
    o.mat_create = tlc_mat_create;
    o.mat_free = tlc_mat_free;
    o.mat_bytes = mat_bytes;
    o.prepare = cuda_prepare;
    o.scratch_bytes = scratch_bytes;
    o.run = cuda_run;
    o.sync = cuda_sync;
    o.wait = cuda_wait;
    o.mem_info = mem_info;
    o.describe = cuda_describe;
    return o;
}

extern "C" {
extern const struct tl_backend_ops tl_backend_cuda = make_ops();
}
