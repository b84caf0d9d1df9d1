#include "metrics.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "http_status.h"
#include "routes.h"

static const double first_token_bounds[] = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10};
static const double inter_token_bounds[] = {.0005, .001, .0025, .005, .01, .025, .05, .075, .1,
                                            .15,   .2,   .3,    .4,   .5,  .75,  1,   2.5};
static const double duration_bounds[] = {.01,  .02,  .04,  .08,   .16,   .32,   .64,
                                         1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92};

static const struct {
    const double *bound;
    int n;
} kinds[] = {
    {first_token_bounds, sizeof(first_token_bounds) / sizeof(double)},
    {inter_token_bounds, sizeof(inter_token_bounds) / sizeof(double)},
    {duration_bounds, sizeof(duration_bounds) / sizeof(double)},
};

const char *tl_reuse_name(enum tl_reuse r)
{
    static const char *const names[] = {"none", "prefix_cache", "resume_handle", "pool"};
    return names[r];
}

const char *tl_stage_name(enum tl_stage s)
{
    static const char *const names[] = {"queued", "prefill", "decode"};
    return names[s];
}

void tl_hist_add(struct tl_hist *h, enum tl_hist_kind kind, double seconds)
{
    int i = 0;
    if (!(seconds >= 0))
        seconds = 0;
    while (i < kinds[kind].n && seconds > kinds[kind].bound[i])
        i++;
    h->bucket[i]++;
    h->n++;
    h->sum += seconds;
}

void tl_metrics_request(struct tl_metrics *m, int route, int status, const char *finish)
{
    if (!finish)
        finish = "";
    for (int i = 0; i < m->n_requests; i++) {
        if (m->requests[i].route != route || m->requests[i].status != status ||
            strcmp(m->requests[i].finish, finish) != 0)
            continue;
        m->requests[i].n++;
        return;
    }
    if (m->n_requests == TL_REQUEST_COUNTERS_MAX)
        return;
    m->requests[m->n_requests].route = route;
    m->requests[m->n_requests].status = status;
    m->requests[m->n_requests].finish = finish;
    m->requests[m->n_requests++].n = 1;
}

/* ---- text --------------------------------------------------------------------------------------------------------- */

struct writer {
    struct tl_bytes *b;
    char model[300]; /* model="…", escaped, or "" */
};

static void head(struct writer *w, const char *name, const char *type, const char *help)
{
    tl_bytes_fmt(w->b, "# HELP tinyloop_%s %s\n# TYPE tinyloop_%s %s\n", name, help, name, type);
}

/* labels: "" or a="b",c="d" */
static void line(struct writer *w, const char *name, const char *labels, double v)
{
    bool both = w->model[0] && labels[0];
    tl_bytes_fmt(w->b, "tinyloop_%s{%s%s%s} %.17g\n", name, w->model, both ? "," : "", labels, v);
}

static void single(struct writer *w, const char *name, const char *type, const char *help, double v)
{
    head(w, name, type, help);
    line(w, name, "", v);
}

static void hist(struct writer *w, const char *name, const char *labels, const struct tl_hist *h,
                 enum tl_hist_kind kind)
{
    char full[160], with[200];
    uint64_t n = 0;
    for (int i = 0; i <= kinds[kind].n; i++) {
        n += h->bucket[i];
        snprintf(full, sizeof(full), "%s_bucket", name);
        if (i < kinds[kind].n)
            snprintf(with, sizeof(with), "%s%sle=\"%g\"", labels, labels[0] ? "," : "", kinds[kind].bound[i]);
        else
            snprintf(with, sizeof(with), "%s%sle=\"+Inf\"", labels, labels[0] ? "," : "");
        line(w, full, with, (double)n);
    }
    snprintf(full, sizeof(full), "%s_sum", name);
    line(w, full, labels, h->sum);
    snprintf(full, sizeof(full), "%s_count", name);
    line(w, full, labels, (double)h->n);
}

static void hist_by_reuse(struct writer *w, const char *name, const char *help, const struct tl_hist h[TL_REUSE_COUNT])
{
    char labels[64];
    head(w, name, "histogram", help);
    for (int r = 0; r < TL_REUSE_COUNT; r++) {
        snprintf(labels, sizeof(labels), "reuse=\"%s\"", tl_reuse_name((enum tl_reuse)r));
        hist(w, name, labels, &h[r], TL_HIST_FIRST_TOKEN);
    }
}

static bool same_series(const struct tl_metrics *m, int a, int b)
{
    return m->requests[a].status == m->requests[b].status &&
           strcmp(m->requests[a].finish, m->requests[b].finish) == 0 &&
           strcmp(tl_route_name(m->requests[a].route), tl_route_name(m->requests[b].route)) == 0;
}

static void write_requests(struct writer *w, const struct tl_metrics *m)
{
    char labels[200];
    head(w, "requests_total", "counter", "Requests answered.");
    for (int i = 0; i < m->n_requests; i++) {
        uint64_t n = 0;
        int first = -1;
        for (int k = 0; k < m->n_requests; k++) { /* rows of one path that differ in method are one series */
            if (!same_series(m, i, k))
                continue;
            if (first < 0)
                first = k;
            n += m->requests[k].n;
        }
        if (first != i)
            continue;
        snprintf(labels, sizeof(labels), "route=\"%s\",status=\"%d\",finish_reason=\"%s\"",
                 tl_route_name(m->requests[i].route), m->requests[i].status, m->requests[i].finish);
        line(w, "requests_total", labels, (double)n);
    }
    head(w, "requests_rejected_total", "counter", "Requests answered with an error.");
    for (int code = 1; code < TL_CODE_COUNT; code++) {
        if (m->rejected[code] == 0)
            continue;
        snprintf(labels, sizeof(labels), "reason=\"%s\"", tl_code_row(code)->name);
        if (code == TL_CODE_GENERATION_MEMORY)
            snprintf(labels, sizeof(labels), "reason=\"generation_memory\"");
        line(w, "requests_rejected_total", labels, (double)m->rejected[code]);
    }
    head(w, "requests_cancelled_total", "counter", "Generations cancelled, by how far they were.");
    for (int s = 0; s < TL_STAGE_COUNT; s++) {
        snprintf(labels, sizeof(labels), "stage=\"%s\"", tl_stage_name((enum tl_stage)s));
        line(w, "requests_cancelled_total", labels, (double)m->cancelled[s]);
    }
    head(w, "request_duration_seconds", "histogram", "Life of a generation request.");
    for (int r = 0; r < TL_ROUTES_MAX; r++) {
        if (m->duration[r].n == 0)
            continue;
        snprintf(labels, sizeof(labels), "route=\"%s\"", tl_route_name(r));
        hist(w, "request_duration_seconds", labels, &m->duration[r], TL_HIST_DURATION);
    }
}

static void write_tokens(struct writer *w, const struct tl_metrics *m)
{
    char labels[64];
    single(w, "prompt_tokens_total", "counter", "Prompt tokens of started generations.", (double)m->prompt_tokens);
    head(w, "prompt_tokens_cached_total", "counter", "Of these, taken from kept state.");
    for (int r = 1; r < TL_REUSE_COUNT; r++) {
        snprintf(labels, sizeof(labels), "kind=\"%s\"", tl_reuse_name((enum tl_reuse)r));
        line(w, "prompt_tokens_cached_total", labels, (double)m->cached_tokens[r]);
    }
    single(w, "generation_tokens_total", "counter", "Tokens generated.", (double)m->generation_tokens);
    head(w, "loop_iterations_total", "counter", "Loop iterations, one per row and loop.");
    line(w, "loop_iterations_total", "state=\"run\"", (double)m->loops_run);
    line(w, "loop_iterations_total", "state=\"skipped\"", (double)m->loops_skipped);
    hist_by_reuse(w, "time_to_first_token_seconds", "From arrival to the first token.", m->ttft);
    hist_by_reuse(w, "prefill_time_seconds", "Computing the prompt.", m->prefill);
    head(w, "inter_token_latency_seconds", "histogram", "Between two tokens of one sequence.");
    hist(w, "inter_token_latency_seconds", "", &m->inter_token, TL_HIST_INTER_TOKEN);
    head(w, "queue_time_seconds", "histogram", "From arrival to the start.");
    hist(w, "queue_time_seconds", "", &m->queue, TL_HIST_FIRST_TOKEN);
    head(w, "clone_time_seconds", "histogram", "Taking over kept state.");
    hist(w, "clone_time_seconds", "", &m->clone, TL_HIST_FIRST_TOKEN);
    head(w, "resume_time_seconds", "histogram", "Running the missing iterations of a resume.");
    hist(w, "resume_time_seconds", "", &m->resume, TL_HIST_FIRST_TOKEN);
}

static void write_memory(struct writer *w, const struct tl_memory *mem)
{
    head(w, "device_memory_bytes", "gauge", "Device memory.");
    line(w, "device_memory_bytes", "state=\"budget\"", (double)mem->budget);
    line(w, "device_memory_bytes", "state=\"used\"", (double)(mem->weights + mem->scratch + mem->kv_used));
    line(w, "device_memory_bytes", "state=\"reserved\"", (double)mem->kv_reserved);
    single(w, "kv_utilization_ratio", "gauge", "Share of the memory for state that is in use.",
           mem->kv_total ? (double)mem->kv_used / (double)mem->kv_total : 0);
}

static void by_kind(struct writer *w, const char *name, const char *extra, const uint64_t v[TL_ENTRY_KINDS])
{
    char labels[80];
    for (int k = 0; k < TL_ENTRY_KINDS; k++) {
        snprintf(labels, sizeof(labels), "kind=\"%s\"%s", tl_entry_kind_name((enum tl_entry_kind)k), extra);
        line(w, name, labels, (double)v[k]);
    }
}

static void write_entries(struct writer *w, const struct tl_registry_counters *r)
{
    static const enum tl_entry_state states[] = {TL_STORED, TL_BUILDING, TL_READY};
    char labels[80];
    single(w, "pool_queries_total", "counter", "Prompts that the pool was asked for.", (double)r->pool.queries);
    single(w, "pool_hits_total", "counter", "Of these, answered.", (double)r->pool.hits);
    single(w, "pool_evictions_total", "counter", "Entries that gave way to others.", (double)r->pool.evictions);
    head(w, "entries", "gauge", "Named entries.");
    for (int k = 0; k < TL_ENTRY_KINDS; k++)
        for (int i = 0; i < 3; i++) {
            int64_t n = r->entries[k][states[i]] + (states[i] == TL_BUILDING ? r->entries[k][TL_REBUILDING] : 0);
            snprintf(labels, sizeof(labels), "kind=\"%s\",state=\"%s\"", tl_entry_kind_name((enum tl_entry_kind)k),
                     tl_entry_state_name(states[i]));
            line(w, "entries", labels, (double)n);
        }
    single(w, "pool_automatic_entries", "gauge", "Entries left behind by finished conversations.", r->pool.n_automatic);
    head(w, "entry_bytes", "gauge", "Device memory of named entries; shared pages count for each.");
    by_kind(w, "entry_bytes", "", r->bytes);
    head(w, "builds_total", "counter", "State computed for named entries.");
    by_kind(w, "builds_total", ",result=\"built\"", r->built);
    by_kind(w, "builds_total", ",result=\"failed\"", r->build_failed);
    by_kind(w, "builds_total", ",result=\"shared\"", r->shared);
    head(w, "expired_total", "counter", "Entries whose time was over.");
    by_kind(w, "expired_total", "", r->expired);
}

static int open_descriptors(void)
{
    int n = -1; /* the directory's own */
    DIR *d = opendir("/proc/self/fd");
    if (!d)
        return 0;
    while (readdir(d))
        n++;
    closedir(d);
    return n - 2;
}

static void write_process(struct tl_bytes *b, const struct tl_gauges *g)
{
    struct rusage use;
    struct rlimit files = {0};
    long rss_pages = 0, vm_pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f) {
        if (fscanf(f, "%ld %ld", &vm_pages, &rss_pages) != 2)
            rss_pages = vm_pages = 0;
        fclose(f);
    }
    getrusage(RUSAGE_SELF, &use);
    getrlimit(RLIMIT_NOFILE, &files);
    double cpu = (double)use.ru_utime.tv_sec + (double)use.ru_stime.tv_sec +
                 ((double)use.ru_utime.tv_usec + (double)use.ru_stime.tv_usec) * 1e-6;
    double page = (double)sysconf(_SC_PAGESIZE);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    tl_bytes_fmt(b,
                 "# HELP process_cpu_seconds_total CPU time.\n# TYPE process_cpu_seconds_total counter\n"
                 "process_cpu_seconds_total %.6f\n",
                 cpu);
    tl_bytes_fmt(b,
                 "# HELP process_resident_memory_bytes Memory in use.\n# TYPE process_resident_memory_bytes gauge\n"
                 "process_resident_memory_bytes %.17g\n",
                 (double)rss_pages * page);
    tl_bytes_fmt(b,
                 "# HELP process_virtual_memory_bytes Address space.\n# TYPE process_virtual_memory_bytes gauge\n"
                 "process_virtual_memory_bytes %.17g\n",
                 (double)vm_pages * page);
    tl_bytes_fmt(b, "# HELP process_open_fds Open descriptors.\n# TYPE process_open_fds gauge\nprocess_open_fds %d\n",
                 open_descriptors());
    tl_bytes_fmt(b, "# HELP process_max_fds Most descriptors.\n# TYPE process_max_fds gauge\nprocess_max_fds %.17g\n",
                 (double)files.rlim_cur);
    tl_bytes_fmt(b,
                 "# HELP process_start_time_seconds Start.\n# TYPE process_start_time_seconds gauge\n"
                 "process_start_time_seconds %.3f\n",
                 (double)now.tv_sec + (double)now.tv_nsec * 1e-9 - g->uptime_s);
}

static void escape_label(char *out, size_t cap, const char *s)
{
    size_t n = 0;
    for (; *s && n + 3 < cap; s++) {
        if (*s == '"' || *s == '\\')
            out[n++] = '\\';
        out[n++] = *s == '\n' ? ' ' : *s;
    }
    out[n] = '\0';
}

void tl_metrics_write(const struct tl_metrics *m, const struct tl_gauges *g, struct tl_bytes *out)
{
    struct writer w = {.b = out};
    char labels[128], name[260];
    if (g->model) {
        escape_label(name, sizeof(name), g->model);
        snprintf(w.model, sizeof(w.model), "model=\"%s\"", name);
    }
    write_requests(&w, m);
    single(&w, "requests_running", "gauge", "Generations started and not finished.", g->running);
    single(&w, "requests_waiting", "gauge", "Generations not started yet.", g->waiting);
    single(&w, "connections", "gauge", "Open connections.", g->connections);
    write_tokens(&w, m);
    if (g->has_memory)
        write_memory(&w, &g->memory);
    if (g->has_memory)
        write_entries(&w, &g->registry);
    single(&w, "gpu_worker_busy_seconds_total", "counter", "Time that the worker computed.", g->busy_s);
    single(&w, "worker_steps_total", "counter", "Steps of the worker.", (double)g->steps);
    head(&w, "build_info", "gauge", "The program.");
    line(&w, "build_info", "version=\"" TL_VERSION "\"", 1);
    if (g->fingerprint) {
        snprintf(labels, sizeof(labels), "fingerprint=\"%s\"", g->fingerprint);
        head(&w, "model_info", "gauge", "The model.");
        line(&w, "model_info", labels, 1);
    }
    write_process(out, g);
}
