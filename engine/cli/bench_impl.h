/* engine/cli/bench_impl.h - what the files of `tinyloop bench` share. Thread: main. */
#ifndef TL_BENCH_IMPL_H
#define TL_BENCH_IMPL_H

#include "../model.h"
#include "tinyloop.h"

struct bench {
    struct tl_model *m;
    struct tl_sched *s;
    const struct tl_model_info *info;
    int loops, prompt, tokens, runs, from_loops, streams, context;
    bool json;
    double read_bytes_s, int8_ops_s; /* ceilings; 0 = not known */
    int32_t *ids;                    /* [n_ids]: made-up tokens */
    int n_ids;
    double *times; /* [runs] */
};

/* Runs before those that count. A shape of step is new to a device once, and may be recorded the second time it is seen. */
#define TL_BENCH_WARM_UP 2

double tl_bench_now(void);                /* seconds */
double tl_bench_median(double *v, int n); /* sorts v */
/* One figure: name, value, unit and, where `of` is not NULL, its ratio to a ceiling or to another figure. */
void tl_bench_report(const struct bench *b, const char *name, double value, const char *unit, const char *of,
                     double ratio);
/* A greedy request for n_tokens of b->ids, max_tokens long whatever they are. */
void tl_bench_request(const struct bench *b, struct tl_request *r, int n_tokens, int max_tokens);
/* Bytes of weights that one step streams in. */
double tl_bench_step_bytes(const struct bench *b);
/* Multiply-adds of one row through everything but the head. */
double tl_bench_row_macs(const struct bench *b);

/* bench_probe.c: the device's runs, seen from outside. While a probe is in place every run(), wait() and sync() is timed. */
struct tl_bench_probe {
    struct tl_backend_ops ops; /* those of the backend, but for these three */
    const struct tl_backend_ops *real;
    /* Since the last reset; seconds. */
    double first_run_at;         /* when the first run() was called */
    double first_handed_over_at; /* when it returned */
    double busy_s;               /* time with at least one run under way, as far as the host knows */
    double waited_s;             /* time in which the host did nothing but wait for the device */
    double *idle_s; /* [n]: how long the device had nothing to do before a run; 0 = others were under way */
    int n, n_max;
    int n_under_way;
    double busy_since, ended_at; /* 0 = not */
};
enum tl_status tl_bench_probe_open(struct tl_bench_probe *p, struct tl_model *m, int n_max, struct tl_error *err);
void tl_bench_probe_reset(struct tl_bench_probe *p);
void tl_bench_probe_close(struct tl_bench_probe *p, struct tl_model *m); /* a zeroed probe is fine */

/* bench_streams.c: many sequences at once, and the steps of one. */
enum tl_status tl_bench_streams(struct bench *b, bool clones, struct tl_error *err);
enum tl_status tl_bench_steps(struct bench *b, struct tl_error *err);

/* bench_adaptive.c: tokens that choose their depth. TL_ERR_UNSUPPORTED where the model has no criterion. */
enum tl_status tl_bench_adaptive(struct bench *b, struct tl_error *err);

#endif
