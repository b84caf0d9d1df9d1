#include "fault_backend.h"

#include <math.h>
#include <string.h>

#include "backend.h"

static struct tl_backend_ops ops;
static int64_t n_calls, fail_call, n_heads, nan_at, n_runs, run_at;
static void (*run_fn)(void *arg);
static void *run_arg;

static enum tl_status count(struct tl_error *err)
{
    return ++n_calls == fail_call ? tl_fail(err, TL_ERR_DEVICE, "device call %lld fails on order", (long long)n_calls)
                                  : TL_OK;
}

static enum tl_status f_open(struct tl_backend **out, int n_threads, struct tl_error *err)
{
    enum tl_status st = tl_backend_cpu.open(out, n_threads, err);
    if (st == TL_OK)
        (*out)->ops = &ops;
    return st;
}

static enum tl_status f_buf_alloc(struct tl_backend *be, size_t bytes, struct tl_buf **out, struct tl_error *err)
{
    enum tl_status st = count(err);
    *out = NULL;
    return st == TL_OK ? tl_backend_cpu.buf_alloc(be, bytes, out, err) : st;
}

static enum tl_status f_buf_write(struct tl_backend *be, struct tl_buf *dst, size_t off, const void *src, size_t bytes,
                                  struct tl_error *err)
{
    enum tl_status st = count(err);
    return st == TL_OK ? tl_backend_cpu.buf_write(be, dst, off, src, bytes, err) : st;
}

static enum tl_status f_buf_copy(struct tl_backend *be, struct tl_buf *dst, size_t dst_off, const struct tl_buf *src,
                                 size_t src_off, size_t bytes, struct tl_error *err)
{
    enum tl_status st = count(err);
    return st == TL_OK ? tl_backend_cpu.buf_copy(be, dst, dst_off, src, src_off, bytes, err) : st;
}

static enum tl_status f_mat_create(struct tl_backend *be, const struct tl_mat_src *src, struct tl_mat **out,
                                   struct tl_error *err)
{
    enum tl_status st = count(err);
    *out = NULL;
    return st == TL_OK ? tl_backend_cpu.mat_create(be, src, out, err) : st;
}

static enum tl_status f_prepare(struct tl_backend *be, const struct tl_net *net, int rows_max, struct tl_error *err)
{
    enum tl_status st = count(err);
    return st == TL_OK ? tl_backend_cpu.prepare(be, net, rows_max, err) : st;
}

static enum tl_status f_run(struct tl_backend *be, const struct tl_step *step, struct tl_error *err)
{
    enum tl_status st = count(err);
    if (++n_runs == run_at && run_fn)
        run_fn(run_arg);
    if (st == TL_OK)
        st = tl_backend_cpu.run(be, step, err);
    for (int i = 0; st == TL_OK && i < step->n_ops; i++)
        for (int r = 0; step->ops[i].kind == TL_OP_HEAD && r < step->sets[step->ops[i].set].n; r++)
            if (++n_heads == nan_at)
                step->ops[i].host_out[(size_t)r * (size_t)step->net->spec.vocab_size + 1] = NAN;
    return st;
}

static enum tl_status f_sync(struct tl_backend *be, struct tl_error *err)
{
    enum tl_status st = count(err);
    return st == TL_OK ? tl_backend_cpu.sync(be, err) : st;
}

void fault_install(void)
{
    ops = tl_backend_cpu;
    ops.name = "test";
    ops.open = f_open;
    ops.buf_alloc = f_buf_alloc;
    ops.buf_write = f_buf_write;
    ops.buf_copy = f_buf_copy;
    ops.mat_create = f_mat_create;
    ops.prepare = f_prepare;
    ops.run = f_run;
    ops.sync = f_sync;
    tl_backend_test = &ops;
}

void fault_reset(void)
{
    n_calls = fail_call = n_heads = nan_at = n_runs = run_at = 0;
    run_fn = NULL;
}

void fault_fail_call(int64_t n) { fail_call = n ? n_calls + n : 0; }

int64_t fault_calls(void) { return n_calls; }

void fault_nan_at(int64_t n) { nan_at = n ? n_heads + n : 0; }

void fault_before_run(int64_t n, void (*fn)(void *arg), void *arg)
{
    run_at = n_runs + n;
    run_fn = fn;
    run_arg = arg;
}
