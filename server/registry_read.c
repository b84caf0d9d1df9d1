/* Looking at entries, changing what may change, taking them away; and what the pool would answer. */
#include <stdlib.h>
#include <string.h>

#include "registry_impl.h"

void tl_view_clear(struct tl_view *v)
{
    free(v->def.metadata);
    memset(v, 0, sizeof(*v));
}

/* Claims, and what began from it through the pool. */
static int entry_in_flight(const struct tl_entry *e)
{
    struct tl_handle_info info;
    if (!e->pooled)
        return e->in_flight;
    tl_handle_info(e->handle, &info);
    return info.n_users > e->in_flight ? info.n_users : e->in_flight;
}

bool tl_entry_view(const struct tl_entry *e, struct tl_view *v)
{
    memset(v, 0, sizeof(*v));
    v->def = *e->def;
    v->def.tokens = NULL;
    v->def.metadata = e->def->metadata ? strdup(e->def->metadata) : NULL;
    v->state = e->state;
    v->in_flight = entry_in_flight(e);
    v->last_used_at = e->last_used_at;
    v->uses = e->uses;
    v->queue_ms = e->queue_ms;
    v->prefill_ms = e->prefill_ms;
    v->resume_ms = e->resume_ms;
    v->bytes = e->bytes;
    v->bytes_reserved = e->bytes_reserved;
    return v->def.metadata || !e->def->metadata;
}

int tl_registry_view(struct tl_registry *r, enum tl_entry_kind kind, const char *tenant, const char *id,
                     struct tl_view *v, struct tl_error *err)
{
    struct tl_entry *e = tl_reg_find(r, kind, tenant, id);
    memset(v, 0, sizeof(*v));
    if (!e)
        return tl_reg_not_there(r, kind, tenant, id, err);
    return tl_entry_view(e, v) ? 0 : (int)tl_fail_host_memory(err, sizeof(*v));
}

struct tl_definition *tl_registry_definition(struct tl_registry *r, enum tl_entry_kind kind, const char *tenant,
                                             const char *id)
{
    struct tl_entry *e = tl_reg_find(r, kind, tenant, id);
    return e && e->def->persist && e->state != TL_BUILDING ? tl_definition_copy(e->def) : NULL;
}

int tl_registry_patch(struct tl_registry *r, enum tl_entry_kind kind, const char *tenant, const char *id,
                      const struct tl_patch *p, struct tl_definition **changed, struct tl_error *err)
{
    struct tl_entry *e = tl_reg_find(r, kind, tenant, id);
    *changed = NULL;
    if (!e)
        return tl_reg_not_there(r, kind, tenant, id, err);
    if (e->state == TL_BUILDING)
        return tl_refuse(err, TL_CODE_RESOURCE_BUILDING, "id", "'%s' is still being built.", e->def->id);
    int code = tl_reg_check_match(e, p->must_match, p->match_any, p->match, err);
    if (code)
        return code;
    struct tl_definition *d = e->def;
    char *metadata = p->set_metadata && p->metadata ? strdup(p->metadata) : NULL;
    if (p->set_metadata && p->metadata && !metadata)
        return (int)tl_fail_host_memory(err, strlen(p->metadata));
    if (p->set_pool && p->pool != d->in_pool) {
        if (!p->pool) {
            tl_reg_pool_leave(r, e);
            d->in_pool = false;
        } else {
            d->in_pool = true;
            enum tl_status st = e->handle ? tl_reg_pool_join(r, e, err) : TL_OK;
            if (st != TL_OK) {
                d->in_pool = false;
                free(metadata);
                return (int)st;
            }
        }
    }
    if (p->set_metadata) {
        free(d->metadata);
        d->metadata = metadata;
    }
    if (p->set_mode)
        d->sliding = p->sliding;
    if (p->set_ttl) {
        d->ttl_seconds = p->ttl_seconds;
        tl_reg_set_expiry(r, e);
    }
    if (p->set_expires) {
        d->expires_at = p->expires_at;
        if (d->expires_at && (!r->expiry_next || d->expires_at < r->expiry_next))
            r->expiry_next = d->expires_at;
    }
    d->generation = tl_reg_generation(r);
    if (d->persist && !(*changed = tl_definition_copy(d)))
        return (int)tl_fail_host_memory(err, sizeof(*d));
    return 0;
}

int tl_registry_delete(struct tl_registry *r, enum tl_entry_kind kind, const char *tenant, const char *id,
                       struct tl_deletion *d, struct tl_error *err)
{
    struct tl_entry *e = tl_reg_find(r, kind, tenant, id);
    if (!e)
        return tl_reg_not_there(r, kind, tenant, id, err);
    int code = tl_reg_check_match(e, d->must_match, d->match_any, d->match, err);
    if (code)
        return code;
    d->in_flight = entry_in_flight(e);
    d->had_file = e->def->persist;
    if (d->if_idle && d->in_flight > 0) {
        code = tl_refuse(err, TL_CODE_RESOURCE_IN_USE, "id", "'%s' is used by %d requests.", e->def->id, d->in_flight);
        tl_error_num(err, "in_flight", d->in_flight);
        return code;
    }
    tl_reg_unlink(r, e, TL_GONE_DELETED);
    return 0;
}

static bool as_seen(enum tl_entry_state s, int wanted)
{
    return wanted < 0 || (int)s == wanted || (s == TL_REBUILDING && wanted == TL_BUILDING);
}

int tl_registry_list(struct tl_registry *r, struct tl_listing *l, struct tl_error *err)
{
    bool skip = l->after && l->after[0];
    l->n = 0;
    l->has_more = false;
    l->views = calloc((size_t)l->limit, sizeof(*l->views));
    if (!l->views)
        return (int)tl_fail_host_memory(err, (size_t)l->limit * sizeof(*l->views));
    for (struct tl_entry *e = l->descending ? r->last : r->first; e; e = l->descending ? e->prev : e->next) {
        if (e->def->kind != l->kind || (l->tenant && strcmp(e->def->tenant, l->tenant) != 0))
            continue;
        if (skip) {
            skip = strcmp(e->def->id, l->after) != 0;
            continue;
        }
        if (!as_seen(e->state, l->state) || (l->loops && e->def->loops != l->loops) ||
            (e->def->expires_at && e->def->expires_at <= tl_reg_now(r)))
            continue;
        if (l->n == l->limit) {
            l->has_more = true;
            break;
        }
        if (!tl_entry_view(e, &l->views[l->n++]))
            return (int)tl_fail_host_memory(err, sizeof(*l->views));
    }
    return 0;
}

void tl_registry_purge(struct tl_registry *r, struct tl_purge *p)
{
    struct tl_entry *next;
    struct tl_view v;
    for (struct tl_entry *e = r->first; e; e = next) {
        next = e->next;
        if (!(p->kinds & 1u << e->def->kind) || (p->tenant && strcmp(e->def->tenant, p->tenant) != 0))
            continue;
        if (!p->force && entry_in_flight(e) > 0) {
            p->busy++;
            continue;
        }
        if (tl_entry_view(e, &v))
            p->bytes += v.bytes;
        tl_view_clear(&v);
        p->freed++;
        if (e->def->persist && r->p.dropped)
            r->p.dropped(r->p.arg, e->def);
        tl_reg_unlink(r, e, TL_GONE_DELETED);
    }
    if (p->tenant || !(p->kinds & 1u << TL_ENTRY_KINDS))
        return;
    struct tl_pool_stats before, after;
    tl_pool_stats(r->pool, &before);
    tl_pool_drop_automatic(r->pool);
    tl_pool_stats(r->pool, &after);
    p->freed += before.n_automatic - after.n_automatic;
    p->busy += after.n_automatic;
    p->bytes += before.bytes - after.bytes;
}

/* ---- pool --------------------------------------------------------------------------------------------------------- */

static const char *id_of(const struct tl_registry *r, const struct tl_handle *h, uint64_t scope)
{
    const struct tl_entry *e = tl_reg_pooled(r, h, scope);
    return e ? e->def->id : "";
}

void tl_registry_match(struct tl_registry *r, const int32_t *tokens, int n, int loops, int cache_window, uint64_t scope,
                       struct tl_match *out)
{
    struct tl_pool_match m;
    struct tl_handle_info info;
    memset(out, 0, sizeof(*out));
    out->expected = out->got = -1;
    tl_pool_find(r->pool, tokens, n, loops, cache_window, scope, &m);
    if (m.handle) {
        strcpy(out->entry, id_of(r, m.handle, scope)); /* the same room */
        out->n_matched = m.n_matched;
        out->deepen = m.deepen;
        out->automatic = !out->entry[0];
    }
    if (!m.nearest)
        return;
    tl_handle_info(m.nearest, &info);
    strcpy(out->nearest, id_of(r, m.nearest, scope));
    out->n_common = m.n_common;
    out->reason = m.reason;
    if (m.n_common < info.n_tokens)
        out->expected = info.tokens[m.n_common];
    if (m.n_common < n)
        out->got = tokens[m.n_common];
}

void tl_registry_pool_share(const struct tl_registry *r, const char *tenant, struct tl_pool_share *out)
{
    memset(out, 0, sizeof(*out));
    for (const struct tl_entry *e = r->first; e; e = e->next) {
        if (!e->pooled || (tenant && strcmp(e->def->tenant, tenant) != 0))
            continue;
        out->entries++;
        out->by_loops[e->def->loops]++;
        out->bytes += e->bytes;
        out->hits += e->uses;
    }
}

int tl_registry_check_resume(const struct tl_handle *h, int loops, const char *field, struct tl_error *err)
{
    struct tl_handle_info info;
    tl_handle_info(h, &info);
    if (loops >= info.n_loops && loops <= info.max_loops)
        return 0;
    int code = tl_refuse(err, TL_ERR_RESUME_DEPTH, field, "%s is %d; this handle goes from %d to %d.", field, loops,
                         info.n_loops, info.max_loops);
    tl_error_num(err, "loops_used", info.n_loops);
    tl_error_num(err, "max_loops", info.max_loops);
    tl_error_num(err, "got", loops);
    return code;
}

bool tl_registry_claim_stored(struct tl_registry *r, const int32_t *tokens, int n, int loops, int cache_window,
                              uint64_t scope, struct tl_claim *c)
{
    struct tl_entry *best = NULL;
    struct tl_error err;
    for (struct tl_entry *e = r->first; e; e = e->next) {
        const struct tl_definition *d = e->def;
        if ((e->state != TL_STORED && e->state != TL_REBUILDING) || d->loops > loops || d->max_loops < loops ||
            d->cache_window != cache_window || !tl_definition_in_pool(d) || d->n_tokens > n ||
            (best && d->n_tokens <= best->def->n_tokens))
            continue;
        if (!d->shared && tl_registry_scope(r, d->tenant, d->salt) != scope)
            continue;
        if (memcmp(d->tokens, tokens, (size_t)d->n_tokens * sizeof(*tokens)) == 0)
            best = e;
    }
    return best && tl_registry_claim(r, best->def->kind, best->def->tenant, best->def->id, c, &err) == 0;
}
