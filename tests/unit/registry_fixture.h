/* A registry over a small random model, with a clock that tests set, and short words for its calls. For tests of named entries;
 * include once per program. */
#ifndef REGISTRY_FIXTURE_H
#define REGISTRY_FIXTURE_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "http_status.h"
#include "registry.h"
#include "suite.h"
#include "tiny_model.h"

static const char *dir; /* made once, before the tests fork */
static struct tiny t;
static struct tl_registry *reg;
static int64_t clock_now = 1000000;
static int n_dropped;
static int32_t prompt[512];

static inline int64_t fake_clock(void) { return clock_now; }
static inline void on_dropped(void *arg, const struct tl_definition *d)
{
    (void)arg;
    (void)d;
    n_dropped++;
}

static inline void open_registry(int pages, int capacity, int tenant_entries)
{
    struct tl_error err = {0};
    struct tl_registry_params p = {.pool_capacity = capacity,
                                   .entries_max = 100,
                                   .tenant_entries_max = tenant_entries,
                                   .now = fake_clock,
                                   .dropped = on_dropped};
    tiny_open(&t, dir, pages);
    p.model = t.m;
    p.sched = t.s;
    ck_assert_msg(tl_registry_create(&reg, &p, &err) == TL_OK, "%s", err.msg);
}

static inline void setup(void)
{
    for (int i = 0; i < 512; i++)
        prompt[i] = (i * 37 + 11) % 300;
    open_registry(0, 4, 50);
}

static inline void teardown(void)
{
    tl_sched_free(t.s);
    t.s = NULL;
    tl_registry_free(reg);
    tiny_close(&t);
}

static inline void turn(void)
{
    struct tl_error err = {0};
    bool busy;
    ck_assert_msg(tl_sched_step(t.s, &busy, &err) == TL_OK, "%s", err.msg);
    tl_registry_tick(reg);
}

static inline struct tl_definition *define(enum tl_entry_kind kind, const char *tenant, const char *id, int n,
                                           int loops)
{
    struct tl_definition *d = calloc(1, sizeof(*d));
    d->kind = kind;
    snprintf(d->id, sizeof(d->id), "%s", id);
    snprintf(d->tenant, sizeof(d->tenant), "%s", tenant);
    snprintf(d->fingerprint, sizeof(d->fingerprint), "%s", tl_model_info(t.m)->fingerprint);
    d->tokens = malloc((size_t)n * sizeof(int32_t));
    memcpy(d->tokens, prompt, (size_t)n * sizeof(int32_t));
    d->n_tokens = n;
    d->loops = loops;
    d->max_loops = kind == TL_ENTRY_RESUME ? 8 : loops;
    ck_assert(tl_definition_digest(d));
    return d;
}

/* To its end: 0, or the code. */
static inline int make(struct tl_making *m)
{
    struct tl_error err = {0};
    int code = tl_registry_make(reg, m, &err);
    for (int i = 0; !code && m->state == TL_MAKING_WAITS && i < 1000; i++)
        turn();
    if (!code && m->state == TL_MAKING_MADE)
        tl_registry_commit(reg, m);
    if (!code)
        ck_assert(m->state == TL_MAKING_DONE || m->state == TL_MAKING_FAILED);
    return code ? code : m->state == TL_MAKING_FAILED ? m->code : 0;
}

static inline int put(enum tl_entry_kind kind, const char *tenant, const char *id, int n, int loops)
{
    struct tl_making m = {.def = define(kind, tenant, id, n, loops)};
    return make(&m);
}

static inline uint64_t generation_of(enum tl_entry_kind kind, const char *tenant, const char *id)
{
    struct tl_view v;
    struct tl_error err = {0};
    ck_assert_int_eq(tl_registry_view(reg, kind, tenant, id, &v, &err), 0);
    uint64_t g = v.def.generation;
    tl_view_clear(&v);
    return g;
}

static inline int code_of(enum tl_entry_kind kind, const char *tenant, const char *id, int64_t *reason)
{
    struct tl_view v;
    struct tl_error err = {0};
    int code = tl_registry_view(reg, kind, tenant, id, &v, &err);
    if (reason)
        *reason = -1;
    for (int i = 0; i < err.n_nums && reason; i++)
        if (strcmp(err.num[i].key, "reason") == 0)
            *reason = err.num[i].value;
    tl_view_clear(&v);
    return code;
}

static inline int drop(enum tl_entry_kind kind, const char *tenant, const char *id, struct tl_deletion *d)
{
    struct tl_deletion plain = {0};
    struct tl_error err = {0};
    return tl_registry_delete(reg, kind, tenant, id, d ? d : &plain, &err);
}

static inline struct tl_registry_counters counters(void)
{
    struct tl_registry_counters c;
    tl_registry_counters(reg, &c);
    return c;
}

#define PC TL_ENTRY_PREFIX
#define RH TL_ENTRY_RESUME
#define PE TL_ENTRY_POOL

#endif
