#include "entry_call.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chat_parse.h"
#include "http_status.h"
#include "worker.h"

enum { NEWS_ACCEPTED = 1, NEWS_STORE = 2, NEWS_DONE = 4 };

/* ---- worker ------------------------------------------------------------------------------------------------------- */

static void tell(struct tl_call *c, struct tl_worker *w, int news)
{
    atomic_fetch_or(&c->news, news);
    tl_worker_post(w, &c->task);
}

static void finish(struct tl_call *c, struct tl_worker *w)
{
    c->over = true;
    atomic_fetch_or(&c->news, NEWS_DONE);
    tl_worker_done(w, &c->task);
}

static void fail(struct tl_call *c, struct tl_worker *w, int code, const struct tl_error *err)
{
    c->code = code;
    if (err != &c->err)
        c->err = *err;
    finish(c, w);
}

static void look_at_entry(struct tl_call *c, const struct tl_entry *e, struct tl_view *v)
{
    if (!tl_entry_view(e, v))
        c->code = (int)tl_fail_host_memory(&c->err, sizeof(*v));
}

/* After a failed commit the file must say what stands under the name now. */
static void undo_file(struct tl_call *c, struct tl_registry *r)
{
    if (!c->asked || !c->srv->store)
        return;
    c->put = tl_registry_definition(r, c->kind, c->tenant, c->id);
    c->remove = !c->put;
}

/* A making has moved, or not. */
static void attend_making(struct tl_call *c, struct tl_worker *w)
{
    struct tl_registry *r = tl_worker_registry(w);
    struct tl_making *m = &c->making;
    const struct tl_error *failure = tl_worker_failure(w);
    if (m->state != TL_MAKING_FAILED && (failure || atomic_load(&c->cancel) || atomic_load(&c->stored) < 0)) {
        struct tl_error why;
        if (failure)
            why = *failure;
        else if (atomic_load(&c->stored) < 0)
            why = c->store_err;
        else
            tl_fail(&why, TL_ERR_CANCELLED, "The request was cancelled.");
        tl_registry_abandon(r, m);
        tl_registry_release(r, &c->source);
        if (!failure)
            undo_file(c, r);
        fail(c, w, (int)why.status, &why);
        return;
    }
    if (m->state == TL_MAKING_MADE) {
        const struct tl_definition *d = tl_making_definition(m);
        if (d && d->persist && c->srv->store && !c->asked) {
            c->put = tl_definition_copy(d);
            c->asked = c->put != NULL;
            if (!c->asked)
                atomic_store(&c->stored, -1), tl_fail_host_memory(&c->store_err, sizeof(*d));
            if (c->asked)
                tell(c, w, NEWS_STORE);
            else
                tl_worker_attend_soon(w);
            return;
        }
        if (c->asked && atomic_load(&c->stored) == 0)
            return;
        tl_registry_commit(r, m);
        if (m->state == TL_MAKING_FAILED)
            undo_file(c, r);
    }
    if (m->state == TL_MAKING_WAITS)
        return;
    tl_registry_release(r, &c->source);
    c->outcome = m->outcome;
    if (m->state == TL_MAKING_FAILED) {
        fail(c, w, m->code, &m->err);
        return;
    }
    finish(c, w);
}

static void begin_making(struct tl_call *c, struct tl_worker *w)
{
    struct tl_registry *r = tl_worker_registry(w);
    c->making.seen = &c->view;
    int code = tl_registry_make(r, &c->making, &c->err);
    if (code) {
        tl_registry_release(r, &c->source);
        fail(c, w, code, &c->err);
        return;
    }
    if (c->async && c->making.state == TL_MAKING_WAITS && c->making.fresh) {
        look_at_entry(c, c->making.fresh, &c->accepted);
        tell(c, w, NEWS_ACCEPTED);
    }
    attend_making(c, w);
}

/* The registry speaks of an "id": that of a pool entry stood in the body. */
static void name_source(struct tl_call *c)
{
    if (c->op == TL_CALL_FROM_POOL && strcmp(c->err.param, "id") == 0)
        tl_error_param(&c->err, "from.pool_entry");
}

/* The source of a promotion, or of a prefix cache made from a pool entry, may have to be computed first. */
static void attend_source(struct tl_call *c, struct tl_worker *w)
{
    struct tl_registry *r = tl_worker_registry(w);
    const struct tl_error *failure = tl_worker_failure(w);
    struct tl_claim *s = &c->source;
    struct tl_definition *d = c->making.def;
    struct tl_handle_info info;
    if (!s->ready && !s->code && !failure)
        return;
    int code = failure ? (int)failure->status : s->code;
    if (code) {
        c->err = failure ? *failure : s->err;
        name_source(c);
    } else {
        tl_handle_info(s->handle, &info);
        d->tokens = malloc((size_t)info.n_tokens * sizeof(*d->tokens));
        d->n_tokens = info.n_tokens;
        d->cache_window = info.cache_window;
        if (c->op == TL_CALL_FROM_POOL)
            d->loops = info.n_loops;
        d->max_loops = d->loops;
        if (d->tokens)
            memcpy(d->tokens, info.tokens, (size_t)info.n_tokens * sizeof(*d->tokens));
        if (!d->tokens || !tl_definition_digest(d))
            code = (int)tl_fail_host_memory(&c->err, sizeof(*d));
        if (!code && c->op == TL_CALL_PROMOTE)
            code = tl_registry_check_resume(s->handle, d->loops, "loops", &c->err);
    }
    if (code) {
        tl_registry_release(r, s);
        fail(c, w, code, &c->err);
        return;
    }
    c->making.from = s->handle;
    c->making.deepen = c->op == TL_CALL_PROMOTE;
    c->op = TL_CALL_MAKE;
    begin_making(c, w);
}

static void registry_changed(void *arg) { tl_worker_attend_soon(arg); }

static void attend_verify(struct tl_call *c, struct tl_worker *w)
{
    if (!tl_verify_attend(&c->verify, tl_worker_registry(w), tl_worker_sched(w), tl_worker_failure(w)))
        return;
    if (c->verify.code)
        fail(c, w, c->verify.code, &c->verify.err);
    else
        finish(c, w);
}

/* Whether it fits says to an administrator what is so now. To others it says what their own entries and the whole budget
 * allow, for what is free would tell what other tenants do. */
static void estimate(struct tl_call *c, struct tl_worker *w)
{
    struct tl_registry *r = tl_worker_registry(w);
    struct tl_memory mem;
    uint64_t limit, pinned, own, own_used;
    int entries, entries_used;
    struct tl_prefix_shape shape = {.n_tokens = c->n_ids,
                                    .n_loops = c->estimate.loops,
                                    .max_loops = c->estimate.max_loops,
                                    .cache_window = c->estimate.cache_window};
    tl_handle_estimate(tl_worker_model(w), c->estimate.resume ? TL_HANDLE_RESUME : TL_HANDLE_PREFIX, &shape,
                       &c->estimate.bytes, &c->estimate.reserved);
    tl_model_memory(tl_worker_model(w), &mem);
    limit = mem.kv_total - mem.kv_seq_reserve; /* for entries of all kinds */
    c->estimate.free = limit > mem.kv_held ? limit - mem.kv_held : 0;
    if (c->all_tenants) {
        c->estimate.evictable = tl_pool_idle_bytes(tl_registry_pool(r));
        pinned = mem.kv_held - c->estimate.evictable;
        limit = limit > pinned ? limit - pinned : 0;
    }
    tl_registry_quota_get(r, c->tenant, &entries, &own, &entries_used, &own_used);
    c->estimate.fits = c->estimate.bytes <= limit && entries_used < entries &&
                       (!own || (own_used <= own && c->estimate.bytes <= own - own_used));
    tl_registry_counters(r, &c->counters);
}

static void work_now(struct tl_call *c, struct tl_worker *w)
{
    struct tl_registry *r = tl_worker_registry(w);
    struct tl_error *err = &c->err;
    switch (c->op) {
    case TL_CALL_VIEW: c->code = tl_registry_view(r, c->kind, c->tenant, c->id, &c->view, err); break;
    case TL_CALL_PATCH:
        c->code = tl_registry_patch(r, c->kind, c->tenant, c->id, &c->patch, &c->put, err);
        if (!c->code)
            c->code = tl_registry_view(r, c->kind, c->tenant, c->id, &c->view, err);
        break;
    case TL_CALL_DELETE:
        c->code = tl_registry_delete(r, c->kind, c->tenant, c->id, &c->deletion, err);
        c->remove = !c->code && c->deletion.had_file;
        break;
    case TL_CALL_LIST: c->code = tl_registry_list(r, &c->listing, err); break;
    case TL_CALL_MATCH:
        tl_registry_match(r, c->ids, c->n_ids, c->loops, c->cache_window, tl_registry_scope(r, c->tenant, c->salt),
                          &c->match);
        break;
    case TL_CALL_ESTIMATE: estimate(c, w); break;
    case TL_CALL_PURGE:
        tl_registry_purge(r, &c->purge);
        if (c->purge.freed == 0 && c->purge.busy > 0) {
            c->code = tl_refuse(err, TL_CODE_RESOURCE_IN_USE, NULL, "Nothing could be freed: %d entries are in use.",
                                c->purge.busy);
            tl_error_num(err, "busy", c->purge.busy);
        }
        break;
    case TL_CALL_QUOTA:
        if (c->quota.set && !tl_registry_quota_set(r, c->id, c->quota.entries, c->quota.bytes))
            c->code =
                tl_refuse(err, TL_ERR_OVERLOADED, NULL, "No more tenants with limits of their own can be remembered.");
        tl_registry_quota_get(r, c->id, &c->quota.entries, &c->quota.bytes, &c->quota.used, &c->quota.bytes_used);
        break;
    case TL_CALL_POOL_LIMITS:
        if (c->limits.set)
            tl_pool_limits(tl_registry_pool(r), c->limits.capacity, (uint64_t)c->limits.bytes);
        tl_registry_counters(r, &c->counters);
        tl_registry_pool_share(r, NULL, &c->share);
        break;
    case TL_CALL_COUNTERS:
        tl_registry_counters(r, &c->counters);
        tl_registry_pool_share(r, c->all_tenants ? NULL : c->tenant, &c->share);
        break;
    case TL_CALL_MAKE:
    case TL_CALL_PROMOTE:
    case TL_CALL_FROM_POOL:
    case TL_CALL_VERIFY: break;
    }
    finish(c, w);
}

static void call_work(struct tl_task *t, struct tl_worker *w)
{
    struct tl_call *c = (struct tl_call *)t;
    const struct tl_error *failure = tl_worker_failure(w);
    if (failure) {
        fail(c, w, (int)failure->status, failure);
    } else if (c->op == TL_CALL_MAKE) {
        begin_making(c, w);
    } else if (c->op == TL_CALL_PROMOTE || c->op == TL_CALL_FROM_POOL) {
        enum tl_entry_kind kind = c->op == TL_CALL_PROMOTE ? TL_ENTRY_RESUME : TL_ENTRY_POOL;
        int code = tl_registry_claim(tl_worker_registry(w), kind, c->tenant, c->other, &c->source, &c->err);
        if (code) {
            name_source(c);
            fail(c, w, code, &c->err);
        } else {
            attend_source(c, w);
        }
    } else if (c->op == TL_CALL_VERIFY) {
        c->verify.changed = registry_changed;
        c->verify.arg = w;
        int code = tl_verify_begin(&c->verify, tl_worker_registry(w), c->kind, c->tenant, c->id, &c->err);
        if (code)
            fail(c, w, code, &c->err);
        else
            attend_verify(c, w);
    } else {
        work_now(c, w);
    }
}

static void call_attend(struct tl_task *t, struct tl_worker *w)
{
    struct tl_call *c = (struct tl_call *)t;
    if (c->over)
        return;
    if (c->op == TL_CALL_MAKE)
        attend_making(c, w);
    else if (c->op == TL_CALL_VERIFY)
        attend_verify(c, w);
    else
        attend_source(c, w);
}

/* ---- loop --------------------------------------------------------------------------------------------------------- */

static void call_free(struct tl_task *t)
{
    struct tl_call *c = (struct tl_call *)t;
    tl_definition_free(c->making.def);
    tl_definition_free(c->put);
    tl_view_clear(&c->view);
    tl_view_clear(&c->accepted);
    for (int i = 0; i < c->listing.n; i++)
        tl_view_clear(&c->listing.views[i]);
    free(c->listing.views);
    free(c->patch_metadata);
    free(c->text);
    free(c->ids);
    free(c);
}

static void answer(struct tl_call *c)
{
    struct tl_exchange *x = c->x;
    if (!x)
        return;
    x->ops = NULL;
    c->x = NULL;
    if (c->code) {
        if (c->code == TL_CODE_RESOURCE_BUILDING || c->code == TL_CODE_IDEMPOTENCY_IN_PROGRESS)
            x->retry_s = 0.5;
        tl_reply_error(x, &c->err);
        return;
    }
    c->x = x;
    c->shown = &c->view;
    c->reply(c);
    c->x = NULL;
}

static void on_settled(void *arg, const struct tl_error *err)
{
    struct tl_call *c = arg;
    if (err && !c->code) {
        c->code = (int)err->status;
        c->err = *err;
    }
    answer(c);
    tl_task_drop(&c->task);
}

static void on_stored(void *arg, const struct tl_error *err)
{
    struct tl_call *c = arg;
    if (err)
        c->store_err = *err;
    atomic_store(&c->stored, err ? -1 : 1);
    tl_worker_poke(c->srv->worker);
    tl_task_drop(&c->task);
}

void tl_entry_files_drop(struct tl_server *s)
{
    struct tl_definition *d;
    while (s->worker && (d = tl_worker_dropped(s->worker))) {
        if (s->store)
            tl_store_remove(s->store, d->kind, d->tenant, d->id, NULL, NULL);
        tl_definition_free(d);
    }
}

static void call_deliver(struct tl_task *t)
{
    struct tl_call *c = (struct tl_call *)t;
    struct tl_store *store = c->srv->store;
    int news = atomic_exchange(&c->news, 0);
    tl_entry_files_drop(c->srv);
    if ((news & NEWS_ACCEPTED) && c->x) {
        struct tl_exchange *x = c->x;
        x->ops = NULL;
        c->shown = &c->accepted;
        c->reply(c);
        c->x = NULL;
    }
    if ((news & NEWS_STORE) && c->put) {
        struct tl_definition *d = c->put;
        c->put = NULL;
        tl_task_ref(t);
        tl_store_put(store, d, on_stored, c);
    }
    if (!(news & NEWS_DONE))
        return;
    if (store && c->put) {
        struct tl_definition *d = c->put;
        c->put = NULL;
        tl_task_ref(t);
        tl_store_put(store, d, on_settled, c);
    } else if (store && c->remove) {
        tl_task_ref(t);
        tl_store_remove(store, c->kind, c->tenant, c->id, on_settled, c);
    } else {
        answer(c);
    }
}

static const struct tl_task_ops call_ops = {call_work, call_attend, call_deliver, call_free};

static void on_gone(struct tl_exchange *x)
{
    struct tl_call *c = x->user;
    c->x = NULL;
    if (c->give_up || c->op != TL_CALL_MAKE)
        tl_aside_give_up(&c->encoding);
    if (!c->give_up)
        return;
    atomic_store(&c->cancel, true);
    tl_worker_poke(c->srv->worker);
}

static void on_nothing(struct tl_exchange *x) { (void)x; }
static const struct tl_exchange_ops call_exchange_ops = {on_gone, on_nothing, on_nothing};

struct tl_call *tl_call_new(struct tl_exchange *x, enum tl_call_op op, enum tl_entry_kind kind,
                            void (*reply)(struct tl_call *))
{
    struct tl_error err;
    struct tl_call *c = NULL;
    if (!x->srv->facts.info) {
        tl_refuse(&err, TL_CODE_MODEL_LOADING, NULL, "The model is being loaded (%d %%).",
                  (int)(x->srv->load_fraction * 100));
    } else if (x->param[0] && op != TL_CALL_QUOTA && !tl_entry_id_ok(x->param)) {
        tl_refuse(&err, TL_CODE_INVALID_ID, "id",
                  "An id is 1..%d characters of [A-Za-z0-9._-] and begins with a letter or digit.", TL_ENTRY_ID_MAX);
    } else if (!(c = calloc(1, sizeof(*c)))) {
        tl_fail_host_memory(&err, sizeof(*c));
    }
    if (!c) {
        tl_reply_error(x, &err);
        return NULL;
    }
    tl_task_init(&c->task, &call_ops);
    c->srv = x->srv;
    c->x = x;
    c->reply = reply;
    c->op = op;
    c->kind = kind;
    c->all_tenants = !x->key || (x->key->roles & TL_ROLE_ADMIN);
    snprintf(c->tenant, sizeof(c->tenant), "%s", x->key ? x->key->tenant : "");
    snprintf(c->id, sizeof(c->id), "%.64s", x->param);
    return c;
}

void tl_call_drop(struct tl_call *c) { tl_task_drop(&c->task); }

void tl_call_refuse(struct tl_call *c, const struct tl_error *err)
{
    tl_reply_error(c->x, err);
    tl_call_drop(c);
}

static void submit(struct tl_call *c)
{
    struct tl_error err;
    if (tl_worker_submit(c->srv->worker, &c->task)) {
        tl_call_drop(c); /* the worker's reference is left */
        return;
    }
    tl_refuse(&err, TL_ERR_OVERLOADED, NULL, "The queue is full; try again later.");
    if (c->x) {
        c->x->ops = NULL;
        tl_reply_error(c->x, &err);
    }
    tl_call_drop(c);
}

static int check_prompt(struct tl_call *c, struct tl_error *err)
{
    int max = c->srv->facts.info->max_seq_len;
    if (c->n_ids < 1)
        return tl_refuse(err, TL_ERR_EMPTY_PROMPT, "prompt", "The prompt has no tokens.");
    if (c->n_ids <= max)
        return 0;
    int code =
        tl_refuse(err, TL_ERR_CONTEXT_LENGTH, "prompt", "The prompt has %d tokens; the limit is %d.", c->n_ids, max);
    tl_error_num(err, "prompt_tokens", c->n_ids);
    tl_error_num(err, "cached_tokens", 0);
    tl_error_num(err, "max_tokens", 0);
    tl_error_num(err, "max_seq_len", max);
    return code;
}

/* The prompt is ids now. */
static void with_ids(struct tl_call *c)
{
    struct tl_definition *d = c->making.def;
    int code = c->code ? c->code : check_prompt(c, &c->err);
    if (!code && d) {
        d->tokens = c->ids;
        d->n_tokens = c->n_ids;
        c->ids = NULL;
        if (!tl_definition_digest(d))
            code = (int)tl_fail_host_memory(&c->err, sizeof(*d));
    }
    if (!code) {
        submit(c);
        return;
    }
    c->code = code;
    answer(c);
    tl_call_drop(c);
}

static void encode(void *user)
{
    struct tl_call *c = user;
    struct tl_encode_params p = {.text = c->text, .text_bytes = c->n_text, .add_special = true, .parse_special = true};
    int32_t *ids = NULL;
    size_t n = 0;
    if (c->chat) {
        c->code = tl_chat_encode(&c->srv->facts, c->text, c->n_text, &c->ids, &c->n_ids, NULL, &c->err);
        return;
    }
    c->code = (int)tl_tokenizer_encode(c->srv->facts.tokenizer, &p, &ids, &n, &c->err);
    if (c->code) {
        tl_error_param(&c->err, "prompt");
        return;
    }
    c->ids = n < INT32_MAX ? malloc((n + 1) * sizeof(*ids)) : NULL;
    if (c->ids)
        memcpy(c->ids, ids, n * sizeof(*ids));
    else
        c->code = (int)tl_fail_host_memory(&c->err, n * sizeof(*ids));
    c->n_ids = (int)n;
    tl_free(ids);
}

static void on_encoded(void *user, bool ran)
{
    struct tl_call *c = user;
    if (!ran)
        c->code = (int)tl_fail(&c->err, TL_ERR_CANCELLED, "The request was cancelled.");
    with_ids(c);
}

void tl_call_send(struct tl_call *c)
{
    bool has_prompt = c->text || c->ids;
    tl_http_wait(c->x, &call_exchange_ops, c);
    if (!has_prompt) {
        submit(c);
    } else if (!c->text) {
        with_ids(c);
    } else if (c->n_text > (size_t)c->srv->cfg->max_prompt_bytes_inline &&
               tl_aside_start(&c->encoding, c->srv, c->n_text, encode, on_encoded, c)) {
        return;
    } else {
        encode(c);
        with_ids(c);
    }
}

void tl_call_make(struct tl_server *s, struct tl_definition *d)
{
    static const char *const prefixes[TL_ENTRY_KINDS] = {"pc_", "rh_", "pe_"};
    struct tl_call *c = calloc(1, sizeof(*c));
    if (!c) {
        tl_definition_free(d);
        return;
    }
    tl_task_init(&c->task, &call_ops);
    c->srv = s;
    c->op = TL_CALL_MAKE;
    c->kind = d->kind;
    memcpy(c->id, prefixes[d->kind], 3);
    tl_ulid(c->id + 3);
    memcpy(d->id, c->id, sizeof(d->id));
    memcpy(c->tenant, d->tenant, sizeof(c->tenant));
    snprintf(d->fingerprint, sizeof(d->fingerprint), "%s", s->facts.info->fingerprint);
    c->making.def = d;
    if (tl_definition_digest(d))
        submit(c);
    else
        tl_call_drop(c);
}
