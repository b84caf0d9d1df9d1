/* server/metrics.h - counters and histograms, and their Prometheus text.
 *
 * All live on the loop thread; what the worker knows arrives with results or in its published figures. Label sets are
 * bounded: routes and codes come from tables, never from a client. Thread: loop. */
#ifndef TL_SERVER_METRICS_H
#define TL_SERVER_METRICS_H

#include "../engine/tinyloop.h"
#include "bytes.h"
#include "registry.h"

#define TL_HIST_BUCKETS_MAX     20
#define TL_REQUEST_COUNTERS_MAX 1024
#define TL_ROUTES_MAX           64

struct tl_hist {
    uint64_t bucket[TL_HIST_BUCKETS_MAX + 1]; /* the last one: above all bounds */
    uint64_t n;
    double sum;
};

enum tl_reuse { TL_REUSE_NONE, TL_REUSE_PREFIX_CACHE, TL_REUSE_RESUME_HANDLE, TL_REUSE_POOL, TL_REUSE_COUNT };
const char *tl_reuse_name(enum tl_reuse r);

enum tl_stage { TL_STAGE_QUEUED, TL_STAGE_PREFILL, TL_STAGE_DECODE, TL_STAGE_COUNT };
const char *tl_stage_name(enum tl_stage s);

struct tl_metrics {
    struct {
        int route, status;  /* route -1: none matched */
        const char *finish; /* static; "" = no generation */
        uint64_t n;
    } requests[TL_REQUEST_COUNTERS_MAX];
    int n_requests;
    uint64_t rejected[128]; /* by enum tl_code */
    uint64_t cancelled[TL_STAGE_COUNT];
    uint64_t prompt_tokens, generation_tokens;
    uint64_t cached_tokens[TL_REUSE_COUNT];
    uint64_t loops_run, loops_skipped; /* rows x iterations */
    struct tl_hist ttft[TL_REUSE_COUNT], prefill[TL_REUSE_COUNT], inter_token, queue, clone, resume;
    struct tl_hist duration[TL_ROUTES_MAX]; /* generations only */
};

/* What is asked for at the moment of a scrape. */
struct tl_gauges {
    const char *model, *fingerprint; /* NULL while loading */
    int running, waiting, connections;
    bool has_memory;
    struct tl_memory memory;
    double busy_s, uptime_s;
    int64_t steps;
    struct tl_registry_counters registry;
};

enum tl_hist_kind { TL_HIST_FIRST_TOKEN, TL_HIST_INTER_TOKEN, TL_HIST_DURATION };
void tl_hist_add(struct tl_hist *h, enum tl_hist_kind kind, double seconds);
void tl_metrics_request(struct tl_metrics *m, int route, int status, const char *finish);
void tl_metrics_write(const struct tl_metrics *m, const struct tl_gauges *g, struct tl_bytes *out);

#endif
