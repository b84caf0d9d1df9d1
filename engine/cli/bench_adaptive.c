/* Tokens that choose their depth, against all loops for each: what is saved in passes over the weights, in iterations of rows
 * (tokens that stopped are taken along when a later one goes deeper), and in time. */
#include "bench_impl.h"

#include <stdio.h>

struct decode {
    double seconds, depth, iterations; /* per token; iterations: rows times loops, all of them */
};

/* One request of n tokens; per token all but the first are measured. */
static enum tl_status decode_once(struct bench *b, float threshold, int n, struct tl_result *res, struct tl_error *err)
{
    struct tl_request r;
    tl_bench_request(b, &r, 1, n); /* a prompt would be taken along, too */
    r.adaptive = threshold > 0;
    r.exit_threshold = threshold;
    return tl_generate(b->s, &r, res, err);
}

static enum tl_status measure(struct bench *b, float threshold, struct decode *out, struct tl_error *err)
{
    struct tl_result res;
    int64_t first = 0;
    enum tl_status st = decode_once(b, threshold, 1, &res, err);
    if (st == TL_OK) {
        first = res.usage.row_loops_run;
        tl_result_clear(&res);
    }
    for (int i = -TL_BENCH_WARM_UP; st == TL_OK && i < b->runs; i++) {
        st = decode_once(b, threshold, b->tokens, &res, err);
        if (st != TL_OK)
            break;
        b->times[i < 0 ? 0 : i] = res.usage.decode_s / (res.n_tokens - 1);
        out->depth = threshold > 0 ? res.usage.mean_loops : b->loops;
        out->iterations = (double)(res.usage.row_loops_run - first) / (res.n_tokens - 1);
        tl_result_clear(&res);
    }
    out->seconds = st == TL_OK ? tl_bench_median(b->times, b->runs) : 0;
    return st;
}

static void report(const struct bench *b, float threshold, const char *what, double value, const char *unit)
{
    char name[64];
    snprintf(name, sizeof(name), "auto_%.2f_%s", (double)threshold, what);
    tl_bench_report(b, name, value, unit, NULL, 0);
}

enum tl_status tl_bench_adaptive(struct bench *b, struct tl_error *err)
{
    static const float gate[] = {0.1f, 0.2f, 0.3f, 0.5f, 0.8f}, latent[] = {0.3f, 0.1f, 0.03f, 0.01f, 0.003f};
    const float *thresholds = b->info->spec->exit == TL_EXIT_LATENT_DIFF ? latent : gate;
    struct decode all = {0}, some = {0};
    if (b->info->spec->exit == TL_EXIT_NONE)
        return tl_fail(err, TL_ERR_UNSUPPORTED,
                       "this model has no exit criterion: there is no adaptive depth to measure");
    enum tl_status st = measure(b, 0, &all, err);
    if (st == TL_OK)
        tl_bench_report(b, "all_loops", 1 / all.seconds, "tokens/s", NULL, 0);
    for (size_t i = 0; st == TL_OK && i < sizeof(gate) / sizeof(gate[0]); i++) {
        float q = thresholds[i];
        st = measure(b, q, &some, err);
        if (st != TL_OK)
            break;
        report(b, q, "depth", some.depth, "loops");
        report(b, q, "passes_saved", 100 * (1 - some.depth / all.depth), "%");
        report(b, q, "iterations_saved", 100 * (1 - some.iterations / all.iterations), "%");
        report(b, q, "time_saved", 100 * (1 - some.seconds / all.seconds), "%");
    }
    return st;
}
