/* Many sequences in one step, from handles of their own or all from one; and the cost of a step by what it holds: one token,
 * sixteen prompt tokens, the first step after a prefix hit, and the pause between two steps. */
#include "bench_impl.h"
#include "mem.h"

#include <stdio.h>
#include <string.h>

#define MINI_TOKENS 16
#define FIRST_STEPS 16 /* at most, before all streams make tokens */

/* A handle of `n` tokens, different for every `which`. */
static enum tl_status build(struct bench *b, int which, int n, struct tl_handle **out, struct tl_error *err)
{
    struct tl_prefix_params p = {.tokens = b->ids + which, .seq_len = n, .n_loops = b->loops};
    return tl_prefix_cache_build(out, b->s, &p, err);
}

/* KV bytes that one step reads: one key and one value per position, sequence and layer execution. */
static double kv_bytes(const struct bench *b, double positions)
{
    double slots = tl_n_slots(b->info->spec, b->loops);
    return positions * slots * (double)b->m->kv->view.page_bytes / TL_BLOCK_TOKENS;
}

/* Seconds of a step in which every stream makes a token, over about `tokens` steps after all have begun. */
static enum tl_status time_streams(struct bench *b, struct tl_handle *const *h, bool clones, double *step_s,
                                   struct tl_error *err)
{
    struct tl_request r;
    struct tl_job *job;
    struct tl_sched_stats before = {0}, after = {0};
    bool busy = true;
    int settled = 0;
    double t;
    enum tl_status st = TL_OK;

    for (int i = 0; st == TL_OK && i < b->streams; i++) {
        tl_bench_request(b, &r, 1, b->tokens + FIRST_STEPS + 2);
        r.tokens = b->ids + i; /* every stream goes on with a token of its own */
        r.handle = h[clones ? 0 : i];
        r.cache_window = -1;
        st = tl_sched_submit(b->s, &r, &job, err);
    }
    before.n_waiting = b->streams;
    for (int i = 0; st == TL_OK && i < FIRST_STEPS && settled < 4; i++) { /* until all have their first tokens */
        st = tl_sched_step(b->s, &busy, err);
        tl_sched_stats(b->s, &before);
        settled += before.n_waiting == 0;
    }
    if (st == TL_OK && settled < 4)
        st = tl_fail(err, TL_ERR_EXCEEDS_MEMORY, "only %d of %d streams run at once", before.n_running, b->streams);
    t = tl_bench_now();
    for (int i = 0; st == TL_OK && i < b->tokens; i++)
        st = tl_sched_step(b->s, &busy, err);
    t = tl_bench_now() - t;
    tl_sched_stats(b->s, &after);
    if (st == TL_OK && after.rows - before.rows < b->streams)
        st = tl_fail(err, TL_ERR_INTERNAL, "%d streams made %lld rows", b->streams,
                     (long long)(after.rows - before.rows));
    if (st == TL_OK) /* a device that runs ahead may be a step in front: rows are what was done */
        *step_s = t * b->streams / (double)(after.rows - before.rows);
    for (busy = st == TL_OK; st == TL_OK && busy;)
        st = tl_sched_step(b->s, &busy, err);
    return st;
}

enum tl_status tl_bench_streams(struct bench *b, bool clones, struct tl_error *err)
{
    struct tl_handle **h = tl_calloc((size_t)b->streams, sizeof(struct tl_handle *));
    enum tl_status st = h ? TL_OK : tl_fail_host_memory(err, (size_t)b->streams * sizeof(struct tl_handle *));
    double step_s = 0, bytes, middle = b->context + 0.5 * b->tokens;
    char name[64];

    for (int i = 0; st == TL_OK && i < (clones ? 1 : b->streams); i++)
        st = build(b, i, b->context, &h[i], err);
    for (int i = -TL_BENCH_WARM_UP; st == TL_OK && i < b->runs; i++) {
        st = time_streams(b, h, clones, &step_s, err);
        if (i >= 0)
            b->times[i] = step_s;
    }
    for (int i = 0; h && i < b->streams; i++)
        tl_handle_free(h[i]);
    tl_free(h);
    if (st != TL_OK)
        return st;
    step_s = tl_bench_median(b->times, b->runs);
    bytes = tl_bench_step_bytes(b) +
            (clones ? kv_bytes(b, b->context + b->streams * (middle - b->context)) : kv_bytes(b, b->streams * middle));
    snprintf(name, sizeof(name), clones ? "clones_%d_of_%d_tokens" : "streams_%d_ctx_%d", b->streams, b->context);
    tl_bench_report(b, name, b->streams / step_s, "tokens/s", b->read_bytes_s > 0 ? "weights and KV read once" : NULL,
                    bytes / step_s / b->read_bytes_s);
    tl_bench_report(b, clones ? "clones_step" : "streams_step", step_s * 1e6, "us", NULL, 0);
    return TL_OK;
}

/* ---- steps of one sequence ---- */

/* Seconds from submission to the token, of n_tokens behind a handle. */
static enum tl_status time_suffix(struct bench *b, struct tl_handle *h, int n_tokens, double *s, struct tl_error *err)
{
    struct tl_request r;
    struct tl_result res;
    double t = tl_bench_now();
    enum tl_status st;

    tl_bench_request(b, &r, n_tokens, 1);
    r.handle = h;
    r.cache_window = -1;
    st = tl_generate(b->s, &r, &res, err);
    *s = tl_bench_now() - t;
    if (st == TL_OK)
        tl_result_clear(&res);
    return st;
}

static enum tl_status bench_mini(struct bench *b, struct tl_bench_probe *p, struct tl_error *err)
{
    static const int suffix[] = {1, MINI_TOKENS};
    struct tl_handle *h = NULL;
    double step[2] = {0}, whole;
    enum tl_status st = build(b, 0, b->context, &h, err);

    for (int k = 0; st == TL_OK && k < 2; k++) {
        for (int i = -TL_BENCH_WARM_UP; st == TL_OK && i < b->runs; i++) {
            tl_bench_probe_reset(p);
            st = time_suffix(b, h, suffix[k], &whole, err);
            if (st == TL_OK && p->n < 1)
                st = tl_fail(err, TL_ERR_INTERNAL, "a suffix of %d tokens ran no step", suffix[k]);
            if (st == TL_OK && i >= 0)
                b->times[i] = p->busy_s;
        }
        step[k] = st == TL_OK ? tl_bench_median(b->times, b->runs) : 0;
    }
    tl_handle_free(h);
    if (st != TL_OK)
        return st;
    tl_bench_report(b, "step_of_1_token", step[0] * 1e6, "us", NULL, 0);
    tl_bench_report(b, "step_of_16_tokens", step[1] * 1e6, "us", "a step of one token", step[1] / step[0]);
    return TL_OK;
}

/* From submission to the moment at which the first step of a clone is in the device's hands. */
static enum tl_status bench_hit(struct bench *b, struct tl_bench_probe *p, int n, struct tl_error *err)
{
    struct tl_handle *h = NULL;
    char name[64];
    double whole;
    enum tl_status st = build(b, 0, n, &h, err);

    for (int i = -TL_BENCH_WARM_UP; st == TL_OK && i < b->runs; i++) {
        double t = tl_bench_now();
        tl_bench_probe_reset(p);
        st = time_suffix(b, h, 1, &whole, err);
        if (i >= 0)
            b->times[i] = (p->real->runs_ahead ? p->first_handed_over_at : p->first_run_at) - t;
    }
    tl_handle_free(h);
    if (st != TL_OK)
        return st;
    snprintf(name, sizeof(name), "hit_to_launch_of_%d_tokens", n);
    tl_bench_report(b, name, tl_bench_median(b->times, b->runs) * 1e6, "us", NULL, 0);
    return TL_OK;
}

static enum tl_status bench_pause(struct bench *b, struct tl_bench_probe *p, struct tl_error *err)
{
    struct tl_request r;
    struct tl_result res;
    double step_s = 0;
    enum tl_status st = TL_OK;

    tl_bench_request(b, &r, b->prompt < 32 ? b->prompt : 32, b->tokens);
    for (int i = -TL_BENCH_WARM_UP; st == TL_OK && i <= 0; i++) {
        tl_bench_probe_reset(p);
        st = tl_generate(b->s, &r, &res, err);
        if (st != TL_OK)
            break;
        step_s = res.usage.decode_s / (res.n_tokens - 1);
        tl_result_clear(&res);
    }
    if (st != TL_OK)
        return st;
    if (p->n < 2)
        return tl_fail(err, TL_ERR_INTERNAL, "%d tokens were %d runs", b->tokens, p->n);
    tl_bench_report(b, "pause_between_tokens", tl_bench_median(p->idle_s + 1, p->n - 1) * 1e6, "us", "a step",
                    p->idle_s[(p->n + 1) / 2] / step_s);
    return TL_OK;
}

enum tl_status tl_bench_steps(struct bench *b, struct tl_error *err)
{
    struct tl_bench_probe p = {0};
    int steps = b->tokens > 64 ? b->tokens : 64;
    enum tl_status st = tl_bench_probe_open(&p, b->m, steps, err);

    if (st == TL_OK)
        st = bench_pause(b, &p, err);
    if (st == TL_OK)
        st = bench_mini(b, &p, err);
    for (int n = 64; st == TL_OK && n <= b->prompt; n *= 8)
        st = bench_hit(b, &p, n, err);
    tl_bench_probe_close(&p, b->m);
    return st;
}
