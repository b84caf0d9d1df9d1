#include "registry.h"

#include <gnutls/crypto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "log.h"
#include "registry_impl.h"

#define AUTOMATIC_TOKENS_MIN 64 /* automatic entries match in full blocks of this many tokens */

/* ---- small parts -------------------------------------------------------------------------------------------------- */

const char *tl_entry_state_name(enum tl_entry_state s)
{
    static const char *const names[TL_ENTRY_STATES] = {"stored", "building", "building", "ready", "deleting"};
    return names[s];
}

const char *tl_gone_name(int reason)
{
    static const char *const names[TL_GONE_REASONS] = {"deleted",       "expired",      "evicted", "replaced",
                                                       "model_changed", "build_failed", "deleting"};
    return reason >= 0 && reason < TL_GONE_REASONS ? names[reason] : "unknown";
}

int64_t tl_reg_now(const struct tl_registry *r) { return r->p.now ? r->p.now() : (int64_t)time(NULL); }
struct tl_pool *tl_registry_pool(struct tl_registry *r) { return r->pool; }

uint64_t tl_reg_generation(struct tl_registry *r) { return ++r->generation; }

void tl_etag(char out[TL_ETAG_CHARS], const struct tl_definition *d)
{
    snprintf(out, TL_ETAG_CHARS, "\"%.8s-%llx\"", d->digest, (unsigned long long)d->generation);
}

bool tl_etag_parse(const char *s, uint64_t *generation)
{
    unsigned long long v;
    char end;
    if (strncmp(s, "W/", 2) == 0)
        s += 2;
    if (strlen(s) > 60 || sscanf(s, "\"%*8[0-9a-f]-%llx%c", &v, &end) != 2 || end != '"')
        return false;
    *generation = v;
    return true;
}

uint64_t tl_registry_scope(const struct tl_registry *r, const char *tenant, const char *salt)
{
    char text[32 + TL_TENANT_MAX + TL_ENTRY_ID_MAX + 4];
    unsigned char hash[32] = {0};
    uint64_t scope;
    memcpy(text, r->scope_secret, 32);
    int n = snprintf(text + 32, sizeof(text) - 32, "%s/%s", tenant, salt ? salt : "");
    if (gnutls_hash_fast(GNUTLS_DIG_SHA256, text, 32 + (size_t)n, hash) != 0)
        return UINT64_MAX;
    memcpy(&scope, hash, sizeof(scope));
    return scope ? scope : 1;
}

uint64_t tl_reg_scope(const struct tl_registry *r, const struct tl_definition *d)
{
    return d->shared ? 0 : tl_registry_scope(r, d->tenant, d->salt);
}

/* ---- the table ---------------------------------------------------------------------------------------------------- */

static struct tl_entry *lookup(struct tl_registry *r, enum tl_entry_kind kind, const char *tenant, const char *id)
{
    for (struct tl_entry *e = r->first; e; e = e->next)
        if (e->def->kind == kind && strcmp(e->def->id, id) == 0 && (!tenant || strcmp(e->def->tenant, tenant) == 0))
            return e;
    return NULL;
}

static bool is_expired(const struct tl_entry *e, int64_t now)
{
    return e->def->expires_at > 0 && e->def->expires_at <= now && e->state != TL_BUILDING;
}

static void expire(struct tl_registry *r, struct tl_entry *e)
{
    r->counters.expired[e->def->kind]++;
    if (e->def->persist && r->p.dropped)
        r->p.dropped(r->p.arg, e->def);
    tl_reg_unlink(r, e, TL_GONE_EXPIRED);
}

struct tl_entry *tl_reg_find(struct tl_registry *r, enum tl_entry_kind kind, const char *tenant, const char *id)
{
    struct tl_entry *e = lookup(r, kind, tenant, id);
    if (!e || !is_expired(e, tl_reg_now(r)))
        return e;
    expire(r, e);
    return NULL;
}

static void bury(struct tl_registry *r, const struct tl_definition *d, enum tl_gone reason)
{
    struct tombstone *t = &r->tombs[r->tomb_next];
    r->tomb_next = (r->tomb_next + 1) % r->n_tombs;
    t->kind = d->kind;
    t->reason = reason;
    t->at = tl_reg_now(r);
    memcpy(t->tenant, d->tenant, sizeof(t->tenant));
    memcpy(t->id, d->id, sizeof(t->id));
}

/* The newest tombstone of a name, NULL if there is none young enough. */
static struct tombstone *grave(struct tl_registry *r, enum tl_entry_kind kind, const char *tenant, const char *id)
{
    int64_t oldest = tl_reg_now(r) - TL_TOMBSTONE_SECONDS;
    for (int i = 1; i <= r->n_tombs; i++) {
        struct tombstone *t = &r->tombs[(r->tomb_next + r->n_tombs - i) % r->n_tombs];
        if (!t->id[0] || t->at < oldest)
            return NULL;
        if (t->kind == kind && strcmp(t->id, id) == 0 && (!tenant || strcmp(t->tenant, tenant) == 0))
            return t;
    }
    return NULL;
}

int tl_reg_not_there(struct tl_registry *r, enum tl_entry_kind kind, const char *tenant, const char *id,
                     struct tl_error *err)
{
    static const char *const nouns[] = {"prefix cache", "resume handle", "pool entry"};
    const struct tombstone *t = grave(r, kind, tenant, id);
    if (!t)
        return tl_refuse(err, TL_CODE_PREFIX_CACHE_NOT_FOUND + (int)kind, "id", "There is no %s '%.64s'.", nouns[kind],
                         id);
    int code = tl_refuse(err, TL_CODE_RESOURCE_GONE, "id", "The %s '%.64s' is gone: %s.", nouns[kind], id,
                         tl_gone_name(t->reason));
    tl_error_num(err, "reason", t->reason);
    tl_error_num(err, "at", t->at);
    return code;
}

void tl_reg_link(struct tl_registry *r, struct tl_entry *e)
{
    e->prev = r->last;
    e->next = NULL;
    if (r->last)
        r->last->next = e;
    else
        r->first = e;
    r->last = e;
    e->linked = true;
    r->n_entries++;
}

static void unlink_only(struct tl_registry *r, struct tl_entry *e)
{
    if (!e->linked)
        return;
    if (e->prev)
        e->prev->next = e->next;
    else
        r->first = e->next;
    if (e->next)
        e->next->prev = e->prev;
    else
        r->last = e->prev;
    e->linked = false;
    r->n_entries--;
}

void tl_reg_entry_free(struct tl_registry *r, struct tl_entry *e)
{
    if (!e)
        return;
    unlink_only(r, e);
    tl_reg_pool_leave(r, e);
    tl_reg_unwant(r, e->build);
    tl_handle_free(e->handle);
    tl_definition_free(e->def);
    free(e);
}

/* Those who still wait for a rebuild get the reason; those who have the handle keep it. */
static void fail_claims(struct tl_entry *e, int code, const struct tl_error *err)
{
    for (struct tl_claim *c = e->claims; c; c = c->next) {
        if (c->ready || c->code)
            continue;
        c->code = code;
        c->err = *err;
    }
}

void tl_reg_unlink(struct tl_registry *r, struct tl_entry *e, enum tl_gone reason)
{
    struct tl_error err;
    if (!e->linked)
        return;
    unlink_only(r, e);
    if (reason != TL_GONE_REPLACED)
        bury(r, e->def, e->in_flight > 0 && reason == TL_GONE_DELETED ? TL_GONE_DELETING : reason);
    tl_reg_pool_leave(r, e);
    tl_reg_entry_lost(r, e);
    tl_refuse(&err, TL_CODE_RESOURCE_GONE, "id", "The entry '%s' went away while its state was computed: %s.",
              e->def->id, tl_gone_name(reason));
    tl_error_num(&err, "reason", (int64_t)reason);
    fail_claims(e, TL_CODE_RESOURCE_GONE, &err);
    tl_reg_unwant(r, e->build);
    e->build = NULL;
    e->state = TL_DELETING;
    if (e->in_flight == 0)
        tl_reg_entry_free(r, e);
    r->p.changed(r->p.arg);
}

void tl_reg_set_expiry(struct tl_registry *r, struct tl_entry *e)
{
    struct tl_definition *d = e->def;
    d->expires_at = d->ttl_seconds > 0 ? tl_reg_now(r) + d->ttl_seconds : 0;
    if (d->expires_at && (!r->expiry_next || d->expires_at < r->expiry_next))
        r->expiry_next = d->expires_at;
}

int tl_reg_check_match(const struct tl_entry *e, bool must, bool any, uint64_t generation, struct tl_error *err)
{
    char etag[TL_ETAG_CHARS] = "none";
    if (!must || (e && (any || e->def->generation == generation)))
        return 0;
    if (e)
        tl_etag(etag, e->def);
    int code = tl_refuse(err, TL_CODE_PRECONDITION_FAILED, NULL, "If-Match does not hold: the entity tag is %s.", etag);
    if (e)
        tl_error_num(err, "generation", (int64_t)e->def->generation);
    return code;
}

/* ---- quotas ------------------------------------------------------------------------------------------------------- */

bool tl_registry_quota_set(struct tl_registry *r, const char *tenant, int entries, uint64_t bytes)
{
    int i = 0;
    while (i < r->n_quotas && strcmp(r->quotas[i].tenant, tenant) != 0)
        i++;
    if (entries == 0 && bytes == 0) { /* the defaults need no place */
        if (i < r->n_quotas)
            r->quotas[i] = r->quotas[--r->n_quotas];
        return true;
    }
    if (i == QUOTAS_MAX)
        return false;
    if (i == r->n_quotas)
        snprintf(r->quotas[r->n_quotas++].tenant, sizeof(r->quotas[i].tenant), "%s", tenant);
    r->quotas[i].entries = entries;
    r->quotas[i].bytes = bytes;
    return true;
}

/* What an entry of this definition takes, before it is there. */
static uint64_t estimated_bytes(const struct tl_registry *r, const struct tl_definition *d)
{
    struct tl_prefix_shape shape = {
        .n_tokens = d->n_tokens, .n_loops = d->loops, .max_loops = d->max_loops, .cache_window = d->cache_window};
    uint64_t bytes, reserved;
    tl_handle_estimate(r->p.model, tl_definition_keeps_state(d) ? TL_HANDLE_RESUME : TL_HANDLE_PREFIX, &shape, &bytes,
                       &reserved);
    return bytes;
}

/* What an entry counts against its tenant's bytes: also while it is built, or waits for its first use after a restart. */
static uint64_t counted_bytes(const struct tl_registry *r, const struct tl_entry *e)
{
    return e->state == TL_READY ? e->bytes : estimated_bytes(r, e->def);
}

void tl_registry_quota_get(const struct tl_registry *r, const char *tenant, int *entries, uint64_t *bytes, int *used,
                           uint64_t *bytes_used)
{
    *entries = r->p.tenant_entries_max;
    *bytes = r->p.tenant_bytes_max;
    *used = 0;
    *bytes_used = 0;
    for (int i = 0; i < r->n_quotas; i++) {
        if (strcmp(r->quotas[i].tenant, tenant) != 0)
            continue;
        if (r->quotas[i].entries)
            *entries = r->quotas[i].entries;
        if (r->quotas[i].bytes)
            *bytes = r->quotas[i].bytes;
    }
    for (const struct tl_entry *e = r->first; e; e = e->next) {
        if (strcmp(e->def->tenant, tenant) != 0)
            continue;
        ++*used;
        *bytes_used += counted_bytes(r, e);
    }
}

static int over_quota(struct tl_error *err, const char *what, uint64_t limit, uint64_t used)
{
    int code =
        tl_refuse(err, TL_CODE_ENTRY_QUOTA, NULL, "The limit of %s is %llu and %llu are used; delete some first.", what,
                  (unsigned long long)limit, (unsigned long long)used);
    tl_error_num(err, "limit", (int64_t)limit);
    tl_error_num(err, "used", (int64_t)used);
    return code;
}

int tl_registry_check_room(struct tl_registry *r, const char *tenant, struct tl_error *err)
{
    int entries, used;
    uint64_t bytes, bytes_used;
    tl_registry_quota_get(r, tenant, &entries, &bytes, &used, &bytes_used);
    if (r->n_entries >= r->p.entries_max)
        return over_quota(err, "entries of the server", (uint64_t)r->p.entries_max, (uint64_t)r->n_entries);
    if (used >= entries)
        return over_quota(err, "entries", (uint64_t)entries, (uint64_t)used);
    return bytes && bytes_used >= bytes ? over_quota(err, "bytes", bytes, bytes_used) : 0;
}

int tl_reg_check_quota(struct tl_registry *r, const struct tl_definition *d, const struct tl_entry *old,
                       struct tl_error *err)
{
    int entries, used;
    uint64_t bytes, bytes_used;
    int code = old ? 0 : tl_registry_check_room(r, d->tenant, err);
    if (code)
        return code;
    tl_registry_quota_get(r, d->tenant, &entries, &bytes, &used, &bytes_used);
    if (old)
        bytes_used -= counted_bytes(r, old);
    return bytes && bytes_used + estimated_bytes(r, d) > bytes ? over_quota(err, "bytes", bytes, bytes_used) : 0;
}

/* ---- pool membership ---------------------------------------------------------------------------------------------- */

enum tl_status tl_reg_pool_join(struct tl_registry *r, struct tl_entry *e, struct tl_error *err)
{
    uint64_t scope = tl_reg_scope(r, e->def);
    if (e->pooled || !tl_definition_in_pool(e->def))
        return TL_OK;
    enum tl_status st = tl_pool_add(r->pool, e->handle, scope, false, err);
    if (st == TL_ERR_OVERLOADED) /* full of entries in use: a limit, not a moment */
        st = err->status = (enum tl_status)TL_CODE_ENTRY_QUOTA;
    if (st != TL_OK)
        return st;
    e->pooled = true;
    struct tl_handle *held = tl_pool_holds(r->pool, e->handle, scope);
    if (held && held != e->handle) { /* an equal one was there: one copy is enough */
        tl_handle_ref(held);
        tl_handle_free(e->handle);
        e->handle = held;
    }
    if (e->def->kind == TL_ENTRY_POOL)
        tl_handle_free(e->handle); /* from here on the pool alone holds it */
    return TL_OK;
}

/* Another entry in the same scope wants the same handle to stay findable. */
static bool pool_shared(const struct tl_registry *r, const struct tl_entry *e)
{
    for (const struct tl_entry *o = r->first; o; o = o->next)
        if (o != e && o->pooled && o->handle == e->handle && tl_reg_scope(r, o->def) == tl_reg_scope(r, e->def))
            return true;
    return false;
}

void tl_reg_pool_leave(struct tl_registry *r, struct tl_entry *e)
{
    if (!e->pooled)
        return;
    e->pooled = false;
    if (!pool_shared(r, e))
        tl_pool_remove(r->pool, e->handle, tl_reg_scope(r, e->def));
    if (e->def->kind == TL_ENTRY_POOL)
        e->handle = NULL;
}

/* The pool is about to drop h. Claims and running requests have their own references. */
static void on_evict(void *arg, const struct tl_handle *h)
{
    struct tl_registry *r = arg;
    struct tl_entry *next;
    for (struct tl_entry *e = r->first; e; e = next) {
        next = e->next;
        if (!e->pooled || e->handle != h)
            continue;
        e->pooled = false;
        if (e->def->kind != TL_ENTRY_POOL)
            continue;
        e->handle = NULL;
        r->counters.pool_evicted++;
        if (e->def->persist && r->p.dropped)
            r->p.dropped(r->p.arg, e->def);
        tl_reg_unlink(r, e, TL_GONE_EVICTED);
    }
}

enum tl_status tl_reg_ready(struct tl_registry *r, struct tl_entry *e, struct tl_handle *h, struct tl_error *err)
{
    e->handle = h;
    enum tl_status st = tl_reg_pool_join(r, e, err);
    if (st != TL_OK && e->state != TL_BUILDING && e->def->kind != TL_ENTRY_POOL) {
        tl_log(TL_LOG_WARN, "'%s' is ready, but the pool cannot take it: %s", e->def->id, err->msg);
        st = TL_OK; /* its name was promised; the pool's limit was lowered since */
    }
    if (st != TL_OK) {
        e->handle = NULL;
        tl_handle_free(h);
        return st;
    }
    struct tl_handle_info info;
    tl_handle_info(e->handle, &info);
    e->bytes = info.bytes;
    e->bytes_reserved = info.bytes_reserved;
    e->state = TL_READY;
    return TL_OK;
}

struct tl_entry *tl_reg_pooled(const struct tl_registry *r, const struct tl_handle *h, uint64_t scope)
{
    struct tl_entry *shared = NULL;
    for (struct tl_entry *e = r->first; e; e = e->next) {
        if (!e->pooled || e->handle != h)
            continue;
        uint64_t its = tl_reg_scope(r, e->def);
        if (its == scope)
            return e;
        if (its == 0 && !shared)
            shared = e;
    }
    return shared;
}

const char *tl_registry_pool_hit(struct tl_registry *r, const struct tl_handle *h, uint64_t scope)
{
    struct tl_entry *e = tl_reg_pooled(r, h, scope);
    if (!e)
        return "";
    e->uses++;
    e->last_used_at = tl_reg_now(r);
    if (e->def->sliding)
        tl_reg_set_expiry(r, e);
    return e->def->id;
}

void tl_registry_keep_automatic(struct tl_registry *r, struct tl_handle *h, uint64_t scope)
{
    struct tl_handle_info info;
    tl_handle_info(h, &info);
    if (info.n_tokens > AUTOMATIC_TOKENS_MIN)
        (void)tl_pool_add(r->pool, h, scope, true, NULL); /* no room for it: then not */
    tl_handle_free(h);
}

/* ---- claims ------------------------------------------------------------------------------------------------------- */

static void give(struct tl_entry *e, struct tl_claim *c)
{
    c->handle = e->handle;
    tl_handle_ref(c->handle);
    c->ready = true;
}

int tl_registry_claim(struct tl_registry *r, enum tl_entry_kind kind, const char *tenant, const char *id,
                      struct tl_claim *c, struct tl_error *err)
{
    struct tl_entry *e = tl_reg_find(r, kind, tenant, id);
    memset(c, 0, sizeof(*c));
    if (!e)
        return tl_reg_not_there(r, kind, tenant, id, err);
    if (e->state == TL_BUILDING)
        return tl_refuse(err, TL_CODE_RESOURCE_BUILDING, "id", "'%s' is still being built.", e->def->id);
    if (e->state == TL_STORED) {
        struct tl_handle *h = NULL;
        enum tl_status st = tl_reg_want(r, e->def, NULL, false, &h, &e->build, err);
        if (st == TL_OK && h)
            st = tl_reg_ready(r, e, h, err);
        else if (st == TL_OK)
            e->state = TL_REBUILDING;
        if (st != TL_OK)
            return (int)st;
    }
    c->entry = e;
    c->next = e->claims;
    if (e->claims)
        e->claims->prev = c;
    e->claims = c;
    e->in_flight++;
    e->uses++;
    e->last_used_at = tl_reg_now(r);
    if (e->def->sliding)
        tl_reg_set_expiry(r, e);
    if (e->state == TL_READY)
        give(e, c);
    return 0;
}

void tl_registry_release(struct tl_registry *r, struct tl_claim *c)
{
    struct tl_entry *e = c->entry;
    if (!e)
        return;
    if (c->prev)
        c->prev->next = c->next;
    else
        e->claims = c->next;
    if (c->next)
        c->next->prev = c->prev;
    tl_handle_free(c->handle);
    c->entry = NULL;
    c->handle = NULL;
    e->in_flight--;
    if (e->in_flight > 0 || e->linked)
        return;
    struct tombstone *t = grave(r, e->def->kind, e->def->tenant, e->def->id);
    if (t && t->reason == TL_GONE_DELETING)
        t->reason = TL_GONE_DELETED;
    tl_reg_entry_free(r, e);
}

/* ---- between steps ------------------------------------------------------------------------------------------------ */

static void finish_rebuild(struct tl_registry *r, struct tl_entry *e)
{
    struct tl_build *b = e->build;
    struct tl_error err = b->err;
    enum tl_status st = b->st;
    e->build = NULL;
    e->prefill_ms = b->usage.prefill_s * 1e3;
    e->queue_ms = b->usage.queue_s * 1e3;
    if (st == TL_OK) {
        tl_handle_ref(b->handle);
        st = tl_reg_ready(r, e, b->handle, &err);
    }
    tl_reg_unwant(r, b);
    if (st == TL_OK) {
        for (struct tl_claim *c = e->claims; c; c = c->next)
            give(e, c);
    } else {
        e->state = TL_STORED; /* the definition still holds; a later use tries again */
        fail_claims(e, (int)st, &err);
        tl_log(TL_LOG_WARN, "the state of %s '%s' could not be computed again: %s", tl_entry_kind_name(e->def->kind),
               e->def->id, err.msg);
    }
    r->p.changed(r->p.arg);
}

static void expire_all(struct tl_registry *r, int64_t now)
{
    struct tl_entry *next;
    r->expiry_next = 0;
    for (struct tl_entry *e = r->first; e; e = next) {
        next = e->next;
        if (is_expired(e, now)) {
            expire(r, e);
        } else if (e->def->expires_at && (!r->expiry_next || e->def->expires_at < r->expiry_next)) {
            r->expiry_next = e->def->expires_at;
        }
    }
}

/* One at a time, so that the first requests after a start are not behind all of them. */
static void rebuild_next(struct tl_registry *r)
{
    struct tl_entry *e = r->first;
    struct tl_handle *h = NULL;
    struct tl_error err;
    if (r->builds)
        return;
    while (e && e->state != TL_STORED)
        e = e->next;
    r->starting = e != NULL;
    if (!e)
        return;
    enum tl_status st = tl_reg_want(r, e->def, NULL, false, &h, &e->build, &err);
    if (st == TL_OK && h)
        st = tl_reg_ready(r, e, h, &err);
    else if (st == TL_OK)
        e->state = TL_REBUILDING;
    if (st != TL_OK)
        r->starting = false; /* no room: the rest waits for its use */
    r->p.changed(r->p.arg);
}

void tl_registry_tick(struct tl_registry *r)
{
    int64_t now = tl_reg_now(r);
    struct tl_entry *next;
    if (r->builds || r->makings) {
        for (struct tl_entry *e = r->first; e; e = next) {
            next = e->next;
            if (e->state == TL_REBUILDING && e->build->done) {
                finish_rebuild(r, e);
                next = r->first; /* joining the pool may have evicted others */
            }
        }
        tl_reg_makings_tick(r);
        tl_reg_builds_sweep(r);
    }
    if (r->expiry_next && r->expiry_next <= now)
        expire_all(r, now);
    if (r->starting)
        rebuild_next(r);
}

/* ---- life --------------------------------------------------------------------------------------------------------- */

static void nothing(void *arg) { (void)arg; }

enum tl_status tl_registry_create(struct tl_registry **out, const struct tl_registry_params *p, struct tl_error *err)
{
    struct tl_registry *r = calloc(1, sizeof(*r));
    enum tl_status st = TL_ERR_NO_HOST_MEMORY;
    *out = NULL;
    if (!r)
        return tl_fail_host_memory(err, sizeof(*r));
    r->p = *p;
    if (!r->p.changed)
        r->p.changed = nothing;
    r->n_tombs = p->tombstones_max > 0 ? p->tombstones_max : TL_TOMBSTONES;
    r->tombs = malloc((size_t)r->n_tombs * sizeof(*r->tombs));
    r->quotas = calloc(QUOTAS_MAX, sizeof(*r->quotas));
    if (!r->tombs || !r->quotas) {
        tl_fail_host_memory(err, (size_t)r->n_tombs * sizeof(*r->tombs));
        goto out;
    }
    for (int i = 0; i < r->n_tombs; i++) /* written, so that the memory is taken now and not while the ring fills */
        r->tombs[i] = (struct tombstone){.at = -1};
    for (size_t have = 0; have < sizeof(r->scope_secret);) {
        ssize_t n = getrandom(r->scope_secret + have, sizeof(r->scope_secret) - have, 0);
        if (n > 0)
            have += (size_t)n;
    }
    /* Tags of before a restart must not come again for something else. */
    r->generation = (uint64_t)tl_reg_now(r) << 16;
    r->starting = p->rebuild_at_start;
    st = tl_pool_create(&r->pool, p->model, p->pool_capacity, p->pool_bytes, err);
    if (st != TL_OK)
        goto out;
    tl_pool_on_evict(r->pool, on_evict, r);
    *out = r;
    r = NULL;
out:
    tl_registry_free(r);
    return st;
}

void tl_registry_free(struct tl_registry *r)
{
    if (!r)
        return;
    r->p.changed = nothing;
    r->p.dropped = NULL;
    while (r->makings)
        tl_registry_abandon(r, r->makings);
    while (r->first) {
        TL_ASSERT(r->first->in_flight == 0);
        tl_reg_entry_free(r, r->first);
    }
    tl_reg_builds_sweep(r);
    TL_ASSERT(!r->builds);
    tl_pool_free(r->pool);
    free(r->tombs);
    free(r->quotas);
    free(r);
}

void tl_registry_restore(struct tl_registry *r, struct tl_definition *d)
{
    const struct tl_model_info *info = tl_model_info(r->p.model);
    bool ours = strcmp(d->fingerprint, info->fingerprint) == 0 && d->n_tokens <= info->max_seq_len &&
                d->max_loops <= info->max_loops && d->cache_window <= info->max_seq_len;
    for (int i = 0; i < d->n_tokens && ours; i++)
        ours = d->tokens[i] < info->vocab_size;
    struct tl_entry *e = ours && !lookup(r, d->kind, d->tenant, d->id) ? calloc(1, sizeof(*e)) : NULL;
    if (!ours)
        bury(r, d, TL_GONE_MODEL_CHANGED);
    if (d->generation > r->generation)
        r->generation = d->generation;
    if (!e) {
        tl_definition_free(d);
        return;
    }
    e->def = d;
    e->state = TL_STORED;
    if (d->sliding)
        tl_reg_set_expiry(r, e); /* the file does not know of its last use */
    if (d->expires_at && (!r->expiry_next || d->expires_at < r->expiry_next))
        r->expiry_next = d->expires_at;
    tl_reg_link(r, e);
}

void tl_registry_counters(const struct tl_registry *r, struct tl_registry_counters *out)
{
    *out = r->counters;
    for (const struct tl_entry *e = r->first; e; e = e->next) {
        out->entries[e->def->kind][e->state]++;
        out->bytes[e->def->kind] += e->bytes;
    }
    tl_pool_stats(r->pool, &out->pool);
    out->row_loops_per_second = r->build_seconds > 0 ? r->build_row_loops / r->build_seconds : 0;
}
