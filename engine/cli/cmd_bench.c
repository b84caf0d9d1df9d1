/* tinyloop bench: figures of this model on this machine, each with its ratio to a ceiling measured in the same run. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "../cpu/ceilings.h"
#include "bench_impl.h"
#include "commands.h"
#include "mem.h"

#define CEILING_BYTES   ((size_t)1 << 30)
#define CEILING_SECONDS 0.7

double tl_bench_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

double tl_bench_median(double *v, int n)
{
    for (int i = 1; i < n; i++) {
        double x = v[i];
        int j = i;
        for (; j > 0 && v[j - 1] > x; j--)
            v[j] = v[j - 1];
        v[j] = x;
    }
    return n % 2 ? v[n / 2] : 0.5 * (v[n / 2 - 1] + v[n / 2]);
}

void tl_bench_report(const struct bench *b, const char *name, double value, const char *unit, const char *of,
                     double ratio)
{
    if (b->json) {
        printf("{\"bench\":\"%s\",\"model\":", name);
        tl_cli_json_string(b->info->name, strlen(b->info->name));
        printf(",\"weights\":\"%s\",\"loops\":%d,\"value\":%.6g,\"unit\":\"%s\"", b->info->weights, b->loops, value,
               unit);
        if (of)
            printf(",\"ratio\":%.4f,\"of\":\"%s\"", ratio, of);
        puts("}");
    } else {
        printf("%-34s %12.4g %-12s", name, value, unit);
        if (of)
            printf(" %6.1f %% of %s", ratio * 100, of);
        putchar('\n');
    }
    fflush(stdout);
}

double tl_bench_row_macs(const struct bench *b)
{
    const struct tl_arch_spec *s = b->info->spec;
    double layer = (double)s->d_model * (tl_q_dim(s) + 2 * tl_kv_dim(s)) + (double)s->d_model * tl_q_dim(s) +
                   (double)s->d_model * s->d_ff * (s->mlp == TL_MLP_SILU_GATED ? 3 : 2);
    double inject = s->inject == TL_INJECT_CONCAT_LINEAR ? 2.0 * s->d_model * s->d_model
                    : s->inject == TL_INJECT_DIAG        ? (double)s->d_model * s->d_model
                                                         : 0;
    return layer * (s->n_prelude + s->n_coda + (double)s->n_core * b->loops) + inject * b->loops;
}

double tl_bench_step_bytes(const struct bench *b)
{
    const struct tl_arch_spec *s = b->info->spec;
    double head = (double)s->vocab_size * s->d_model, bits;
    const char *w = b->info->weights;
    bits = !strcmp(w, "int4") ? 4.125 : !strcmp(w, "int8") ? 8 : !strcmp(w, "bf16") ? 16 : 32;
    return tl_bench_row_macs(b) * bits / 8 + head * (bits < 8 ? 8 : bits) / 8;
}

void tl_bench_request(const struct bench *b, struct tl_request *r, int n_tokens, int max_tokens)
{
    tl_request_default(r);
    r->tokens = b->ids;
    r->n_tokens = n_tokens;
    r->max_tokens = max_tokens;
    r->loops = b->loops;
    r->sampling.temperature = 0;
    r->sampling.ignore_eos = true;
}

static enum tl_status timed(const struct bench *b, const struct tl_request *r, double *seconds, struct tl_result *res,
                            struct tl_error *err)
{
    double t = tl_bench_now();
    enum tl_status st = tl_generate(b->s, r, res, err);
    *seconds = tl_bench_now() - t;
    return st;
}

static enum tl_status bench_decode(struct bench *b, struct tl_error *err)
{
    struct tl_request r;
    struct tl_result res;
    struct tl_bench_probe p = {0};
    enum tl_status st = tl_bench_probe_open(&p, b->m, 1, err);
    double seconds, rate, host = 0;

    tl_bench_request(b, &r, b->prompt < 32 ? b->prompt : 32, b->tokens);
    for (int i = -TL_BENCH_WARM_UP; st == TL_OK && i < b->runs; i++) {
        tl_bench_probe_reset(&p);
        st = timed(b, &r, &seconds, &res, err);
        if (st != TL_OK)
            break;
        if (i >= 0) {
            b->times[i] = res.usage.decode_s / (res.n_tokens - 1);
            host += (seconds - p.waited_s) / res.n_tokens / b->runs;
        }
        tl_result_clear(&res);
    }
    tl_bench_probe_close(&p, b->m);
    if (st != TL_OK)
        return st;
    seconds = tl_bench_median(b->times, b->runs);
    rate = tl_bench_step_bytes(b) / seconds;
    tl_bench_report(b, "decode", 1 / seconds, "tokens/s", NULL, 0);
    tl_bench_report(b, "decode_weight_stream", rate * 1e-9, "GB/s", b->read_bytes_s > 0 ? "read bandwidth" : NULL,
                    rate / b->read_bytes_s);
    tl_bench_report(b, "decode_host_work", host * 1e6, "us", "a token", host / seconds);
    return TL_OK;
}

static enum tl_status bench_prefill(struct bench *b, struct tl_error *err)
{
    struct tl_request r;
    struct tl_result res;
    enum tl_status st = TL_OK;
    double seconds, ops;

    tl_bench_request(b, &r, b->prompt, 0);
    for (int i = -TL_BENCH_WARM_UP; st == TL_OK && i < b->runs; i++) {
        st = timed(b, &r, &seconds, &res, err);
        if (st == TL_OK && i >= 0)
            b->times[i] = seconds;
        if (st == TL_OK)
            tl_result_clear(&res);
    }
    if (st != TL_OK)
        return st;
    seconds = tl_bench_median(b->times, b->runs);
    ops = 2 * tl_bench_row_macs(b) * b->prompt / seconds;
    tl_bench_report(b, "prefill", b->prompt / seconds, "tokens/s", NULL, 0);
    tl_bench_report(b, "prefill_linear_rate", ops * 1e-9, "Gop/s", b->int8_ops_s > 0 ? "int8 multiply-add rate" : NULL,
                    ops / b->int8_ops_s);
    return TL_OK;
}

/* Clone cost of a prefix hit: from submission to the start event, queue time taken off, and memory of clones. */
static enum tl_status bench_clone(struct bench *b, int n_tokens, struct tl_error *err)
{
    enum { CLONES = 64 };
    struct tl_prefix_params p = {.tokens = b->ids, .seq_len = n_tokens, .n_loops = b->loops};
    struct tl_handle *h = NULL;
    struct tl_request r;
    struct tl_result res;
    struct tl_memory one, many;
    struct tl_job *job;
    char name[64];
    bool busy;
    double us[CLONES];
    enum tl_status st = tl_prefix_cache_build(&h, b->s, &p, err);

    tl_bench_request(b, &r, 0, 1);
    r.handle = h;
    for (int i = 0; st == TL_OK && i < CLONES; i++) {
        st = tl_generate(b->s, &r, &res, err);
        if (st == TL_OK) {
            us[i] = res.usage.clone_s * 1e6;
            tl_result_clear(&res);
        }
    }
    tl_model_memory(b->m, &one);
    r.max_tokens = 2;
    for (int i = 0; st == TL_OK && i < CLONES; i++)
        st = tl_sched_submit(b->s, &r, &job, err);
    if (st == TL_OK)
        st = tl_sched_step(b->s, &busy, err); /* every clone has its first token, none has written */
    tl_model_memory(b->m, &many);
    for (busy = st == TL_OK; st == TL_OK && busy;)
        st = tl_sched_step(b->s, &busy, err);
    tl_handle_free(h);
    if (st != TL_OK)
        return st;
    snprintf(name, sizeof(name), "clone_of_%d_tokens", n_tokens);
    tl_bench_report(b, name, tl_bench_median(us, CLONES), "us", NULL, 0);
    snprintf(name, sizeof(name), "memory_of_64_clones_of_%d", n_tokens);
    tl_bench_report(b, name, (double)many.kv_used / (double)one.kv_used, "x one", NULL, 0);
    return TL_OK;
}

static enum tl_status bench_reuse(struct bench *b, struct tl_error *err)
{
    struct tl_prefix_params p = {.tokens = b->ids, .seq_len = b->prompt, .n_loops = b->from_loops};
    struct tl_handle *h = NULL;
    struct tl_request r;
    struct tl_result res;
    uint64_t fresh_hash = 0, resumed_hash = 0;
    double fresh = 0, resumed = 0;
    enum tl_status st = TL_OK;

    for (int n = 64; st == TL_OK && n <= b->prompt; n *= 8)
        st = bench_clone(b, n, err);
    if (st == TL_OK)
        st = tl_resume_handle_build(&h, b->s, &p, b->loops, err);
    for (int pass = 0; st == TL_OK && pass < 2; pass++) {
        for (int i = -TL_BENCH_WARM_UP; st == TL_OK && i < b->runs; i++) {
            double seconds;
            tl_bench_request(b, &r, pass ? 0 : b->prompt, 1);
            r.want_logits_hash = true;
            if (pass) {
                r.handle = h;
                r.loops = 0;
                r.new_L = b->loops;
            }
            st = timed(b, &r, &seconds, &res, err);
            if (st == TL_OK) {
                b->times[i < 0 ? 0 : i] = seconds;
                *(pass ? &resumed_hash : &fresh_hash) = res.last_hash;
                tl_result_clear(&res);
            }
        }
        *(pass ? &resumed : &fresh) = st == TL_OK ? tl_bench_median(b->times, b->runs) : 0;
    }
    tl_handle_free(h);
    if (st != TL_OK)
        return st;
    tl_bench_report(b, "fresh_prompt", fresh * 1e3, "ms", NULL, 0);
    tl_bench_report(b, "resumed_prompt", resumed * 1e3, "ms", "a fresh prompt", resumed / fresh);
    tl_bench_report(b, "resume_saves", (1 - resumed / fresh) * 100, "%", NULL, 0);
    tl_bench_report(b, "resume_equal_bits", fresh_hash == resumed_hash, "1=yes", NULL, 0);
    return TL_OK;
}

/* The same rows in one call, in chunks and token by token: equal bits, and what the chunking costs. */
static enum tl_status bench_exact(struct bench *b, struct tl_error *err)
{
    static const int chunks[] = {0, 17, 1};
    size_t vocab = (size_t)b->info->vocab_size;
    float *logits = tl_array(2 * vocab, sizeof(float));
    enum tl_status st = logits ? TL_OK : tl_fail_host_memory(err, 2 * vocab * sizeof(float));
    int n = b->prompt < 128 ? b->prompt : 128, equal = 0;

    for (int i = 0; st == TL_OK && i < 3; i++) {
        double t = tl_bench_now();
        char name[64];
        float *row = logits + (i ? vocab : 0);
        st = tl_logits(
            b->m,
            &(struct tl_logits_params){
                .tokens = b->ids, .n_tokens = n, .n_loops = b->loops, .n_rows = 1, .chunk = chunks[i], .logits = row},
            err);
        snprintf(name, sizeof(name), chunks[i] ? "exact_chunks_of_%d" : "exact_one_call", chunks[i]);
        if (st == TL_OK)
            tl_bench_report(b, name, (tl_bench_now() - t) * 1e3, "ms", NULL, 0);
        equal += st == TL_OK && !memcmp(logits, row, vocab * sizeof(float));
    }
    if (st == TL_OK)
        tl_bench_report(b, "exact_equal_bits", equal == 3, "1=yes", NULL, 0);
    tl_free(logits);
    return st;
}

static enum tl_status bench_streams(struct bench *b, struct tl_error *err) { return tl_bench_streams(b, false, err); }
static enum tl_status bench_clones(struct bench *b, struct tl_error *err) { return tl_bench_streams(b, true, err); }

static const struct {
    const char *name;
    enum tl_status (*run)(struct bench *b, struct tl_error *err);
} benchmarks[] = {{"decode", bench_decode},  {"prefill", bench_prefill},     {"reuse", bench_reuse},
                  {"exact", bench_exact},    {"streams", bench_streams},     {"clones", bench_clones},
                  {"steps", tl_bench_steps}, {"adaptive", tl_bench_adaptive}};
enum { N_BENCHMARKS = sizeof(benchmarks) / sizeof(benchmarks[0]) };

/* Which one the first word of a list names; -1 = none. *rest is what follows the comma. */
static int benchmark_of(const char *list, const char **rest)
{
    size_t n = strcspn(list, ",");
    *rest = list + n + (list[n] == ',');
    for (int i = 0; i < N_BENCHMARKS; i++)
        if (strlen(benchmarks[i].name) == n && !memcmp(benchmarks[i].name, list, n))
            return i;
    return -1;
}

/* What the ratios are to: measured where the model is on the CPU, else as given. */
static enum tl_status find_ceilings(struct bench *b, int threads, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    if (strncmp(b->info->device, "cpu", 3) != 0)
        return TL_OK;
    if (b->read_bytes_s <= 0)
        st = tl_cpu_read_bandwidth(threads, CEILING_BYTES, CEILING_SECONDS, &b->read_bytes_s, err);
    if (st == TL_OK && b->int8_ops_s <= 0)
        st = tl_cpu_int8_rate(threads, CEILING_SECONDS, &b->int8_ops_s, err);
    return st;
}

int tl_cmd_bench(int argc, char **argv)
{
    struct tl_model_opts o = {0};
    struct bench b = {.prompt = 512, .tokens = 64, .runs = 5, .from_loops = 4, .streams = 64, .context = 512};
    const char *what = NULL, *rest;
    int code, read_gb_s = 0, int8_gop_s = 0;
    const struct tl_arg table[] = {
        {"WHAT", TL_ARG_POS, &what, NULL,
         "decode, prefill, reuse, exact, streams, clones, steps or adaptive, or several: decode,streams", true, 0, 0},
        TL_MODEL_ARGS(o),
        {"loops", TL_ARG_INT, &b.loops, "N", "depth; 0 = the model's default", false, 0, TL_LOOPS_MAX},
        {"prompt", TL_ARG_INT, &b.prompt, "N", "prompt tokens (default 512)", false, 1, 1 << 20},
        {"tokens", TL_ARG_INT, &b.tokens, "N", "tokens to decode (default 64)", false, 2, 1 << 20},
        {"runs", TL_ARG_INT, &b.runs, "N", "runs, the median counts (default 5)", false, 1, 100},
        {"from-loops", TL_ARG_INT, &b.from_loops, "N", "reuse: depth of the resume handle (default 4)", false, 1,
         TL_LOOPS_MAX},
        {"streams", TL_ARG_INT, &b.streams, "N", "streams, clones: sequences at once (default 64)", false, 1, 64},
        {"context", TL_ARG_INT, &b.context, "N", "streams, clones, steps: tokens before the first (default 512)", false,
         1, 1 << 20},
        {"read-ceiling", TL_ARG_INT, &read_gb_s, "N", "GB/s that the device can read; 0 = measured (CPU) or unknown",
         false, 0, 1 << 20},
        {"int8-ceiling", TL_ARG_INT, &int8_gop_s, "N", "int8 Gop/s of the device; 0 = measured (CPU) or unknown", false,
         0, 1 << 30},
        {"json", TL_ARG_FLAG, &b.json, NULL, "one JSON object a line", false, 0, 0},
    };
    const struct tl_args args = {
        "tinyloop bench",
        "Measure a model on this machine. Ratios are to ceilings measured in the same run, or given.\n\n"
        "  decode   one stream, a token at a time; what of a token's time the host works, beside the device or before "
        "it\n"
        "  prefill  a prompt\n"
        "  reuse    clones of prefixes, and a resume from --from-loops to --loops against a fresh prompt\n"
        "  exact    one call, chunks and single tokens: equal bits, and what that costs\n"
        "  streams  --streams sequences of --context different tokens, a token of each a step\n"
        "  clones   the same, all from one prefix\n"
        "  steps    a step of 1 and of 16 tokens, the pause between two, and from a hit to the first launch\n"
        "  adaptive tokens that choose their depth: passes, iterations and time saved, for five thresholds",
        "tinyloop bench decode --model loop-407m --loops 8", table, sizeof(table) / sizeof(table[0])};
    struct tl_error err;
    enum tl_status st;

    if ((code = tl_args_parse(&args, argc, argv)) != TL_ARGS_GO)
        return code;
    for (rest = what; *rest;)
        if (benchmark_of(rest, &rest) < 0)
            return tl_args_wrong(&args, "there is no benchmark like one of '%s'; --help lists them", what);
    if (!tl_cli_open(&b.m, &o))
        return TL_EXIT_FAILED;
    b.info = tl_model_info(b.m);
    b.loops = b.loops ? b.loops : b.info->spec->loops_default;
    b.read_bytes_s = read_gb_s * 1e9;
    b.int8_ops_s = int8_gop_s * 1e9;
    b.n_ids = (b.prompt > b.context ? b.prompt : b.context) + b.streams;
    b.ids = tl_array((size_t)b.n_ids, sizeof(*b.ids));
    b.times = tl_array((size_t)b.runs, sizeof(*b.times));
    st = b.ids && b.times ? tl_sched_create(&b.s, b.m, NULL, &err)
                          : tl_fail_host_memory(&err, (size_t)b.n_ids * sizeof(*b.ids));
    if (st == TL_OK)
        st = find_ceilings(&b, o.threads, &err);
    if (st == TL_OK && !b.json) {
        printf("%s, %s, loops %d, on %s", b.info->name, b.info->weights, b.loops, b.info->device);
        if (b.read_bytes_s > 0)
            printf("; ceilings: read %.0f GB/s, int8 %.0f Gop/s", b.read_bytes_s * 1e-9, b.int8_ops_s * 1e-9);
        putchar('\n');
    }
    for (int i = 0; st == TL_OK && i < b.n_ids; i++)
        b.ids[i] = (int32_t)((uint32_t)i * 2654435761u % (uint32_t)b.info->vocab_size);
    for (rest = what; st == TL_OK && *rest;)
        st = benchmarks[benchmark_of(rest, &rest)].run(&b, &err);
    code = st == TL_OK ? TL_EXIT_OK : tl_cli_fail(&err);
    tl_sched_free(b.s);
    tl_free(b.ids);
    tl_free(b.times);
    tl_model_free(b.m);
    return code;
}
