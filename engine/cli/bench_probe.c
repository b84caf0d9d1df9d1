/* The device's steps seen from the host: what lies between two of them is time in which the device has nothing to do. */
#include "bench_impl.h"
#include "mem.h"

#include <string.h>

/* run() has no argument of its own to find the probe by; there is one at a time. */
static struct tl_bench_probe *current;

static enum tl_status probed_run(struct tl_backend *be, const struct tl_step *step, struct tl_error *err)
{
    struct tl_bench_probe *p = current;
    double t = tl_bench_now();
    enum tl_status st = p->real->run(be, step, err);
    double handed_over = tl_bench_now();

    if (!p->real->runs_ahead)
        p->waited_s += handed_over - t;
    if (p->n_under_way == 0)
        p->busy_since = t;
    if ((p->n_under_way == 0 || p->real->runs_ahead) && p->n < p->n_max) /* else a later part of the same step */
        p->idle_s[p->n++] =
            p->n_under_way || p->ended_at <= 0 ? 0 : (p->real->runs_ahead ? handed_over : t) - p->ended_at;
    p->n_under_way++;
    if (p->first_run_at <= 0) {
        p->first_run_at = t;
        p->first_handed_over_at = handed_over;
    }
    return st;
}

/* The device has ended all runs but n; the host waited for that from `since` on. */
static void left(struct tl_bench_probe *p, int n, double since)
{
    double t = tl_bench_now();
    p->waited_s += t - since;
    if (p->n_under_way > n)
        p->n_under_way = n;
    if (p->n_under_way == 0) {
        p->busy_s += p->busy_since > 0 ? t - p->busy_since : 0;
        p->busy_since = 0;
        p->ended_at = t;
    }
}

static enum tl_status probed_sync(struct tl_backend *be, struct tl_error *err)
{
    double t = tl_bench_now();
    enum tl_status st = current->real->sync(be, err);
    left(current, 0, t);
    return st;
}

static enum tl_status probed_wait(struct tl_backend *be, int runs_left, struct tl_error *err)
{
    double t = tl_bench_now();
    enum tl_status st = current->real->wait(be, runs_left, err);
    left(current, runs_left, t);
    return st;
}

void tl_bench_probe_reset(struct tl_bench_probe *p)
{
    p->first_run_at = p->first_handed_over_at = p->ended_at = p->busy_since = p->busy_s = p->waited_s = 0;
    p->n = p->n_under_way = 0;
}

enum tl_status tl_bench_probe_open(struct tl_bench_probe *p, struct tl_model *m, int n_max, struct tl_error *err)
{
    memset(p, 0, sizeof(*p));
    p->idle_s = tl_array((size_t)n_max, sizeof(double));
    if (!p->idle_s)
        return tl_fail_host_memory(err, (size_t)n_max * sizeof(double));
    p->n_max = n_max;
    p->real = m->be->ops;
    p->ops = *p->real;
    p->ops.run = probed_run;
    p->ops.sync = probed_sync;
    p->ops.wait = p->real->wait ? probed_wait : NULL;
    m->be->ops = &p->ops;
    current = p;
    return TL_OK;
}

void tl_bench_probe_close(struct tl_bench_probe *p, struct tl_model *m)
{
    if (p->real)
        m->be->ops = p->real;
    tl_free(p->idle_s);
    memset(p, 0, sizeof(*p));
    current = NULL;
}
