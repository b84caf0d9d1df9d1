/* How entries come to be: one computation for all who want the same state, and the steps of a making:
 *
 *   tl_registry_make    the name is checked and taken; the state is there already (MADE) or computed (WAITS)
 *   makings_tick        the computation has ended: MADE or FAILED
 *   (the caller makes the definition durable)
 *   tl_registry_commit  the entry is READY for everybody; a replaced one is unlinked in the same moment
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "registry_impl.h"

/* ---- builds ------------------------------------------------------------------------------------------------------- */

static enum tl_verdict on_build_event(void *arg, const struct tl_event *ev)
{
    struct tl_build *b = arg;
    struct tl_registry *r = b->r;
    enum tl_entry_kind kind = b->def->kind;
    if (ev->kind == TL_EVENT_KEPT) {
        tl_handle_free(b->handle);
        b->handle = ev->handle;
    } else if (ev->kind == TL_EVENT_DONE) {
        b->done = true;
        b->job = NULL;
        b->usage = *ev->usage;
        b->st = TL_OK;
        if (ev->finish == TL_FINISH_ERROR && ev->error) {
            b->err = *ev->error;
            b->st = b->err.status;
        } else if (!b->handle) {
            b->st = tl_fail(&b->err, TL_ERR_CANCELLED, "The computation was stopped.");
        }
        if (b->st == TL_OK)
            r->counters.built[kind]++;
        else
            r->counters.build_failed[kind]++;
        if (b->st == TL_OK && b->usage.prefill_s > 0 && !b->deepen) {
            r->build_seconds += b->usage.prefill_s;
            r->build_row_loops += (double)b->usage.row_loops_run;
        }
        r->p.changed(r->p.arg);
    }
    return TL_GO_ON;
}

static void build_free(struct tl_build *b)
{
    tl_handle_free(b->handle);
    tl_definition_free(b->def);
    free(b);
}

void tl_reg_builds_sweep(struct tl_registry *r)
{
    for (struct tl_build **at = &r->builds; *at;) {
        struct tl_build *b = *at;
        if (!b->done || b->n_waiting > 0) {
            at = &b->next;
            continue;
        }
        *at = b->next;
        build_free(b);
    }
}

void tl_reg_unwant(struct tl_registry *r, struct tl_build *b)
{
    (void)r;
    if (b && --b->n_waiting == 0 && b->job)
        tl_job_cancel(b->job);
}

static enum tl_status start_build(struct tl_registry *r, const struct tl_definition *d, struct tl_handle *from,
                                  struct tl_build **out, struct tl_error *err)
{
    struct tl_request q;
    struct tl_build *b = calloc(1, sizeof(*b));
    if (b)
        b->def = tl_definition_copy(d);
    if (!b || !b->def) {
        free(b);
        return tl_fail_host_memory(err, sizeof(*b));
    }
    b->r = r;
    b->deepen = from != NULL;
    b->n_waiting = 1;
    tl_request_default(&q);
    q.handle = from;
    q.new_L = from ? d->loops : 0;
    if (!from) {
        q.tokens = b->def->tokens;
        q.n_tokens = d->n_tokens;
        q.loops = d->loops;
        q.cache_window = d->cache_window;
    }
    if (tl_definition_keeps_state(d)) {
        q.keep = TL_KEEP_RESUME;
        q.keep_max_loops = d->max_loops;
    } else {
        q.keep = TL_KEEP_PREFIX;
        if (!from) { /* a prefix of the prefix may be there */
            q.pool = r->pool;
            q.pool_scope = tl_registry_scope(r, d->tenant, d->salt);
        }
    }
    q.on_event = on_build_event;
    q.arg = b;
    enum tl_status st = tl_sched_submit(r->p.sched, &q, &b->job, err);
    if (st != TL_OK) {
        build_free(b);
        return st;
    }
    b->next = r->builds;
    r->builds = b;
    *out = b;
    return TL_OK;
}

enum tl_status tl_reg_want(struct tl_registry *r, const struct tl_definition *d, struct tl_handle *from, bool deepen,
                           struct tl_handle **h, struct tl_build **b, struct tl_error *err)
{
    *h = NULL;
    *b = NULL;
    if (from && !deepen) {
        *h = from;
        tl_handle_ref(from);
        return TL_OK;
    }
    if (!tl_definition_keeps_state(d)) { /* each of those holds a promise of its own */
        for (struct tl_entry *e = r->first; e; e = e->next)
            if (e->state == TL_READY && strcmp(e->def->tenant, d->tenant) == 0 && tl_definition_same_state(e->def, d)) {
                *h = e->handle;
                tl_handle_ref(e->handle);
                r->counters.shared[d->kind]++;
                return TL_OK;
            }
        for (struct tl_build *o = r->builds; o && !from; o = o->next)
            if (!o->deepen && o->n_waiting > 0 && (!o->done || o->st == TL_OK) &&
                strcmp(o->def->tenant, d->tenant) == 0 && strcmp(o->def->salt, d->salt) == 0 &&
                tl_definition_same_state(o->def, d)) {
                o->n_waiting++;
                *b = o;
                r->counters.shared[d->kind]++;
                return TL_OK;
            }
    }
    return start_build(r, d, from, b, err);
}

/* ---- makings ------------------------------------------------------------------------------------------------------ */

static void making_end(struct tl_registry *r, struct tl_making *m)
{
    if (!m->begun)
        return;
    if (m->prev)
        m->prev->next = m->next;
    else
        r->makings = m->next;
    if (m->next)
        m->next->prev = m->prev;
    m->begun = false;
    tl_reg_unwant(r, m->build);
    m->build = NULL;
}

static void making_fail(struct tl_registry *r, struct tl_making *m, int code, const struct tl_error *err)
{
    struct tl_entry *fresh = m->fresh;
    m->fresh = m->joined = NULL;
    m->state = TL_MAKING_FAILED;
    m->code = code;
    m->err = *err;
    making_end(r, m);
    if (fresh && fresh->linked)
        tl_reg_unlink(r, fresh, code == TL_ERR_CANCELLED ? TL_GONE_DELETED : TL_GONE_BUILD_FAILED);
    else if (fresh)
        tl_reg_entry_free(r, fresh);
    r->p.changed(r->p.arg);
}

static void making_done(struct tl_registry *r, struct tl_making *m, struct tl_entry *e, enum tl_making_outcome outcome)
{
    m->state = TL_MAKING_DONE;
    m->outcome = outcome;
    if (m->seen && !tl_entry_view(e, m->seen)) {
        m->state = TL_MAKING_FAILED;
        m->code = (int)tl_fail_host_memory(&m->err, sizeof(*m->seen));
    }
    m->fresh = m->joined = NULL;
    making_end(r, m);
}

void tl_reg_entry_lost(struct tl_registry *r, struct tl_entry *e)
{
    struct tl_error err;
    struct tl_making *next;
    for (struct tl_making *m = r->makings; m; m = next) {
        next = m->next;
        if (m->fresh != e && m->joined != e)
            continue;
        m->fresh = m->joined = NULL; /* e is the caller's to free */
        tl_refuse(&err, TL_ERR_CANCELLED, "id", "'%s' was deleted while it was made.", e->def->id);
        making_fail(r, m, TL_ERR_CANCELLED, &err);
    }
}

/* What stands where the new one would: by name, but pool entries by content. */
static struct tl_entry *same_place(struct tl_registry *r, const struct tl_definition *d)
{
    if (d->kind != TL_ENTRY_POOL)
        return tl_reg_find(r, d->kind, d->tenant, d->id);
    for (struct tl_entry *e = r->first; e; e = e->next)
        if (e->def->kind == TL_ENTRY_POOL && strcmp(e->def->digest, d->digest) == 0 && e->def->shared == d->shared &&
            strcmp(e->def->tenant, d->tenant) == 0 && strcmp(e->def->salt, d->salt) == 0)
            return tl_reg_find(r, TL_ENTRY_POOL, d->tenant, e->def->id);
    return NULL;
}

/* An earlier POST with the same key: 0 if there is none, -1 if it is the same request and done, else the code. */
static int seen_before(struct tl_registry *r, struct tl_making *m, struct tl_error *err)
{
    const struct tl_definition *d = m->def;
    struct tl_entry *e = m->idempotency[0] ? r->first : NULL;
    while (e && !(e->def->kind == d->kind && strcmp(e->def->idempotency, m->idempotency) == 0 &&
                  strcmp(e->def->tenant, d->tenant) == 0))
        e = e->next;
    if (!e)
        return 0;
    if (strcmp(e->def->digest, d->digest) != 0)
        return tl_refuse(err, TL_CODE_IDEMPOTENCY_REUSED, NULL, "This Idempotency-Key came with another body before.");
    if (e->state == TL_BUILDING)
        return tl_refuse(err, TL_CODE_IDEMPOTENCY_IN_PROGRESS, NULL,
                         "The first request with this Idempotency-Key still runs.");
    making_done(r, m, e, TL_MADE_BEFORE);
    return -1;
}

static int already_exists(const struct tl_entry *e, struct tl_error *err)
{
    char etag[TL_ETAG_CHARS];
    if (e->state == TL_BUILDING)
        return tl_refuse(err, TL_CODE_RESOURCE_BUILDING, "id", "'%s' is being built with other content.", e->def->id);
    tl_etag(etag, e->def);
    int code =
        tl_refuse(err, TL_CODE_ID_EXISTS, "id",
                  "'%s' exists with other content (digest %.16s, etag %s); send If-Match with its etag to replace it.",
                  e->def->id, e->def->digest, etag);
    tl_error_num(err, "tokens", e->def->n_tokens);
    tl_error_num(err, "loops", e->def->loops);
    return code;
}

static void making_begin(struct tl_registry *r, struct tl_making *m)
{
    m->begun = true;
    m->prev = NULL;
    m->next = r->makings;
    if (r->makings)
        r->makings->prev = m;
    r->makings = m;
}

/* The same again: only its time starts anew. */
static void refresh(struct tl_registry *r, struct tl_making *m, struct tl_entry *e)
{
    struct tl_definition *d = e->def;
    d->ttl_seconds = m->def->ttl_seconds;
    d->sliding = m->def->sliding;
    d->persist = d->persist || m->def->persist;
    tl_reg_set_expiry(r, e);
    making_begin(r, m);
    m->joined = e;
    m->state = TL_MAKING_MADE;
    m->outcome = TL_MADE_BEFORE;
}

/* old: the entry that it will replace, or NULL. */
static int make_fresh(struct tl_registry *r, struct tl_making *m, const struct tl_entry *old, struct tl_error *err)
{
    struct tl_handle *h = NULL;
    struct tl_entry *e = calloc(1, sizeof(*e));
    int code = e ? 0 : (int)tl_fail_host_memory(err, sizeof(*e));
    if (!code)
        code = tl_reg_check_quota(r, m->def, old, err);
    if (!code)
        code = (int)tl_reg_want(r, m->def, m->from, m->deepen, &h, &m->build, err);
    if (code) {
        free(e);
        return code;
    }
    e->def = m->def;
    m->def = NULL;
    e->state = TL_BUILDING;
    e->def->created_at = tl_reg_now(r);
    e->def->generation = tl_reg_generation(r);
    memcpy(e->def->idempotency, m->idempotency, sizeof(e->def->idempotency));
    m->fresh = e;
    m->outcome = old ? TL_MADE_REPLACED : TL_MADE_NEW;
    m->state = h ? TL_MAKING_MADE : TL_MAKING_WAITS;
    e->handle = h;
    tl_reg_set_expiry(r, e);
    making_begin(r, m);
    if (!old)
        tl_reg_link(r, e);
    return 0;
}

int tl_registry_make(struct tl_registry *r, struct tl_making *m, struct tl_error *err)
{
    int code = seen_before(r, m, err);
    struct tl_entry *e = code ? NULL : same_place(r, m->def);
    if (code) {
        code = code < 0 ? 0 : code;
    } else if (e && m->must_be_new) {
        code = tl_refuse(err, TL_CODE_PRECONDITION_FAILED, NULL, "'%s' exists and If-None-Match asks that it does not.",
                         e->def->id);
    } else if ((code = tl_reg_check_match(e, m->must_match, m->match_any, m->match, err)) != 0) {
        /* err says it */
    } else if (e && strcmp(e->def->digest, m->def->digest) == 0 && e->def->in_pool == m->def->in_pool) {
        if (e->state == TL_BUILDING) {
            making_begin(r, m);
            m->joined = e;
            m->state = TL_MAKING_WAITS;
        } else {
            refresh(r, m, e);
        }
    } else if (e && !m->must_match) {
        code = already_exists(e, err);
    } else {
        code = make_fresh(r, m, e, err);
    }
    tl_definition_free(m->def);
    m->def = NULL;
    return code;
}

const struct tl_definition *tl_making_definition(const struct tl_making *m)
{
    return m->fresh ? m->fresh->def : m->joined ? m->joined->def : NULL;
}

void tl_reg_makings_tick(struct tl_registry *r)
{
    struct tl_making *next;
    for (struct tl_making *m = r->makings; m; m = next) {
        next = m->next;
        if (m->state != TL_MAKING_WAITS)
            continue;
        if (m->joined && m->joined->state == TL_READY) {
            making_done(r, m, m->joined, TL_MADE_BEFORE);
            r->p.changed(r->p.arg);
        } else if (m->build && m->build->done) {
            struct tl_build *b = m->build;
            m->queue_ms = b->usage.queue_s * 1e3;
            m->prefill_ms = b->usage.prefill_s * 1e3;
            m->resume_ms = b->usage.resume_s * 1e3;
            if (b->st != TL_OK) {
                struct tl_error err = b->err;
                making_fail(r, m, (int)b->st, &err);
                next = r->makings; /* others may have ended with it */
                continue;
            }
            m->fresh->handle = b->handle;
            tl_handle_ref(b->handle);
            tl_reg_unwant(r, b);
            m->build = NULL;
            m->state = TL_MAKING_MADE;
            r->p.changed(r->p.arg);
        }
    }
}

void tl_registry_commit(struct tl_registry *r, struct tl_making *m)
{
    struct tl_error err;
    struct tl_entry *e = m->fresh, *old = NULL;
    int code = 0;
    if (m->state != TL_MAKING_MADE)
        return;
    if (!e) {
        making_done(r, m, m->joined, m->outcome);
        return;
    }
    if (m->outcome == TL_MADE_REPLACED) {
        old = tl_reg_find(r, e->def->kind, e->def->tenant, e->def->id);
        if ((code = tl_reg_check_match(old, true, m->match_any, m->match, &err)) != 0) {
            making_fail(r, m, code, &err);
            return;
        }
    }
    struct tl_handle *h = e->handle;
    enum tl_status st = tl_reg_ready(r, e, h, &err);
    if (st != TL_OK) {
        making_fail(r, m, (int)st, &err);
        return;
    }
    e->queue_ms = m->queue_ms;
    e->prefill_ms = m->prefill_ms;
    e->resume_ms = m->resume_ms;
    if (old) {
        tl_reg_link(r, e);
        tl_reg_unlink(r, old, TL_GONE_REPLACED);
    }
    making_done(r, m, e, m->outcome);
    r->p.changed(r->p.arg); /* for those who joined */
}

void tl_registry_abandon(struct tl_registry *r, struct tl_making *m)
{
    struct tl_error err;
    if (!m->begun)
        return;
    tl_refuse(&err, TL_ERR_CANCELLED, NULL, "The request was cancelled.");
    making_fail(r, m, TL_ERR_CANCELLED, &err);
}

void tl_making_not_durable(struct tl_making *m)
{
    if (m->fresh)
        m->fresh->def->persist = false;
}

int tl_registry_store_resume(struct tl_registry *r, struct tl_making *m, const struct tl_stored_name *name,
                             struct tl_handle *h, struct tl_error *err)
{
    struct tl_handle_info info;
    struct tl_definition *d = calloc(1, sizeof(*d));
    int code = (int)TL_ERR_NO_HOST_MEMORY;
    memset(m, 0, sizeof(*m));
    tl_handle_info(h, &info);
    if (d)
        d->tokens = malloc((size_t)info.n_tokens * sizeof(*d->tokens));
    if (!d || !d->tokens) {
        tl_fail_host_memory(err, (size_t)info.n_tokens * sizeof(*d->tokens));
        goto out;
    }
    d->kind = TL_ENTRY_RESUME;
    snprintf(d->id, sizeof(d->id), "%s", name->id);
    snprintf(d->tenant, sizeof(d->tenant), "%s", name->tenant);
    snprintf(d->fingerprint, sizeof(d->fingerprint), "%s", tl_model_info(r->p.model)->fingerprint);
    memcpy(d->tokens, info.tokens, (size_t)info.n_tokens * sizeof(*d->tokens));
    d->n_tokens = info.n_tokens;
    d->loops = info.n_loops;
    d->max_loops = info.max_loops;
    d->cache_window = info.cache_window;
    d->ttl_seconds = name->ttl_seconds;
    d->persist = name->persist;
    if (!tl_definition_digest(d)) {
        tl_fail_host_memory(err, sizeof(*d));
        goto out;
    }
    m->def = d;
    d = NULL;
    m->from = h; /* so that it is made at once */
    code = tl_registry_make(r, m, err);
    m->from = NULL;
out:
    tl_definition_free(d);
    tl_handle_free(h);
    return code;
}
