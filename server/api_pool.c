/* /v1/pool, and the administrator's view of it and of entries. */
#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

#include "api_entries.h"
#include "entry_parse.h"
#include "entry_render.h"
#include "render.h"
#include "http_status.h"
#include "json.h"
#include "routes.h"

void tl_api_pool_entry_make(struct tl_exchange *x) { tl_api_entry_make(x, TL_ENTRY_POOL); }
void tl_api_pool_entry_read(struct tl_exchange *x) { tl_api_entry_read(x, TL_ENTRY_POOL); }
void tl_api_pool_entry_delete(struct tl_exchange *x) { tl_api_entry_delete(x, TL_ENTRY_POOL); }
void tl_api_pool_entry_list(struct tl_exchange *x) { tl_api_entry_list(x, TL_ENTRY_POOL); }

/* ---- state -------------------------------------------------------------------------------------------------------- */

static void reply_pool(struct tl_call *c)
{
    struct tl_exchange *x = c->x;
    const struct tl_pool_stats *p = &c->counters.pool;
    char depth[16];
    struct tl_jw w = {.b = &x->out};
    tl_jw_obj(&w, NULL);
    tl_jw_str(&w, "object", "pool");
    tl_jw_int(&w, "capacity", p->capacity);
    tl_jw_int(&w, "entries", c->share.entries);
    if (c->all_tenants) { /* counts over all tenants would tell one what the others do */
        tl_jw_int(&w, "automatic_entries", p->n_automatic);
        tl_jw_uint(&w, "bytes", p->bytes);
        tl_jw_uint(&w, "queries", p->queries);
        tl_jw_uint(&w, "hits", p->hits);
        tl_jw_uint(&w, "evictions", p->evictions);
    } else {
        tl_jw_uint(&w, "bytes", c->share.bytes);
        tl_jw_uint(&w, "hits", c->share.hits);
    }
    tl_jw_bool(&w, "auto", c->srv->cfg->pool_auto);
    tl_jw_obj(&w, "by_loops");
    for (int i = 0; i <= TL_LOOPS_MAX; i++) {
        snprintf(depth, sizeof(depth), "%d", i);
        if (c->share.by_loops[i] > 0)
            tl_jw_int(&w, depth, c->share.by_loops[i]);
    }
    tl_jw_obj_end(&w);
    tl_jw_obj_end(&w);
    tl_reply_json(x, 200);
}

void tl_api_pool(struct tl_exchange *x)
{
    struct tl_call *c = tl_call_new(x, TL_CALL_COUNTERS, TL_ENTRY_POOL, reply_pool);
    if (c)
        tl_call_send(c);
}

void tl_api_admin_pool(struct tl_exchange *x)
{
    static const char *const known[] = {"capacity", "bytes", NULL};
    struct tl_call *c = tl_call_new(x, TL_CALL_POOL_LIMITS, TL_ENTRY_POOL, reply_pool);
    struct tl_error err;
    struct tl_fields f;
    if (!c)
        return;
    int code = tl_fields_open(&f, x->body.data, x->body.n, &err);
    if (!code) {
        tl_fields_only(&f, known);
        c->limits.set = true;
        c->limits.capacity = (int)tl_field_int(&f, "capacity", 1, 65536, x->srv->cfg->pool_capacity);
        c->limits.bytes = tl_field_int(&f, "bytes", 0, TL_JSON_INT_MAX, x->srv->cfg->pool_bytes);
        tl_fields_close(&f);
        code = f.code;
    }
    if (code)
        tl_call_refuse(c, &err);
    else
        tl_call_send(c);
}

/* ---- match -------------------------------------------------------------------------------------------------------- */

static void write_token(struct tl_jw *w, const char *key, const struct tl_facts *facts, int token)
{
    struct tl_bytes piece = {0};
    if (token < 0) {
        tl_jw_null(w, key);
        return;
    }
    tl_render_piece(&piece, facts->tokenizer, token);
    tl_jw_obj(w, key);
    tl_jw_int(w, "id", token);
    tl_jw_strn(w, "piece", piece.data ? piece.data : "", piece.n);
    tl_jw_obj_end(w);
    tl_bytes_free(&piece);
}

static void reply_match(struct tl_call *c)
{
    static const char *const reasons[] = {"none", "token_mismatch", "prompt_shorter", "loops_differ", "window_differs"};
    const struct tl_match *m = &c->match;
    struct tl_exchange *x = c->x;
    struct tl_jw w = {.b = &x->out};
    tl_jw_obj(&w, NULL);
    tl_jw_bool(&w, "matched", m->n_matched > 0);
    tl_jw_str(&w, "entry", m->entry[0] ? m->entry : NULL);
    tl_jw_bool(&w, "automatic", m->automatic);
    tl_jw_int(&w, "matched_tokens", m->n_matched);
    tl_jw_int(&w, "suffix_tokens", c->n_ids - m->n_matched);
    tl_jw_bool(&w, "deepens", m->deepen);
    if (c->explain && m->reason != TL_MISS_NONE) {
        tl_jw_obj(&w, "nearest_miss");
        tl_jw_str(&w, "entry", m->nearest[0] ? m->nearest : NULL);
        tl_jw_int(&w, "common_tokens", m->n_common);
        tl_jw_int(&w, "diverges_at", m->n_common);
        write_token(&w, "expected", &c->srv->facts, m->expected);
        write_token(&w, "got", &c->srv->facts, m->got);
        tl_jw_str(&w, "reason", reasons[m->reason]);
        tl_jw_obj_end(&w);
    } else {
        tl_jw_null(&w, "nearest_miss");
    }
    tl_jw_obj_end(&w);
    tl_reply_json(x, 200);
}

void tl_api_pool_match(struct tl_exchange *x)
{
    struct tl_call *c = tl_call_new(x, TL_CALL_MATCH, TL_ENTRY_POOL, reply_match);
    struct tl_error err;
    if (!c)
        return;
    if (tl_parse_match(c, &err))
        tl_call_refuse(c, &err);
    else
        tl_call_send(c);
}

/* ---- purge and quotas --------------------------------------------------------------------------------------------- */

static void reply_purged(struct tl_call *c)
{
    struct tl_jw w = {.b = &c->x->out};
    tl_jw_obj(&w, NULL);
    tl_jw_int(&w, "freed", c->purge.freed);
    tl_jw_uint(&w, "bytes", c->purge.bytes);
    tl_jw_int(&w, "busy", c->purge.busy);
    tl_jw_obj_end(&w);
    tl_reply_json(c->x, 200);
}

static unsigned parse_kinds(struct tl_fields *f)
{
    static const char *const names[] = {"prefix_cache", "resume_handle", "pool_entry", "automatic"};
    const cJSON *v = tl_field(f, "kinds"), *e;
    unsigned kinds = 0;
    if (!v)
        return 15;
    if (!cJSON_IsArray(v))
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "kinds", "must be a list.");
    cJSON_ArrayForEach(e, v)
    {
        unsigned bit = 0;
        for (int i = 0; i < 4 && cJSON_IsString(e); i++)
            if (strcmp(e->valuestring, names[i]) == 0)
                bit = 1u << i;
        if (!bit)
            tl_field_fail(f, TL_ERR_OUT_OF_RANGE, "kinds",
                          "are prefix_cache, resume_handle, pool_entry and automatic.");
        kinds |= bit;
    }
    return kinds;
}

void tl_api_admin_purge(struct tl_exchange *x)
{
    static const char *const known[] = {"kinds", "tenant", "force", NULL};
    struct tl_call *c = tl_call_new(x, TL_CALL_PURGE, TL_ENTRY_POOL, reply_purged);
    struct tl_error err;
    struct tl_fields f;
    if (!c)
        return;
    int code = x->body.n > 0 ? tl_fields_open(&f, x->body.data, x->body.n, &err) : tl_fields_open(&f, "{}", 2, &err);
    if (!code) {
        tl_fields_only(&f, known);
        c->purge.kinds = parse_kinds(&f);
        c->purge.force = tl_field_bool(&f, "force", false);
        const char *tenant = tl_field_str(&f, "tenant", NULL);
        if (tenant && strlen(tenant) > TL_TENANT_MAX)
            tl_field_fail(&f, TL_ERR_OUT_OF_RANGE, "tenant", "is too long.");
        if (tenant && !f.code) {
            memcpy(c->tenant, tenant, strlen(tenant) + 1);
            c->purge.tenant = c->tenant;
        }
        tl_fields_close(&f);
        code = f.code;
    }
    if (code)
        tl_call_refuse(c, &err);
    else
        tl_call_send(c);
}

static void reply_quota(struct tl_call *c)
{
    struct tl_jw w = {.b = &c->x->out};
    tl_jw_obj(&w, NULL);
    tl_jw_str(&w, "tenant", c->id);
    tl_jw_int(&w, "entries", c->quota.entries);
    if (c->quota.bytes)
        tl_jw_uint(&w, "bytes", c->quota.bytes);
    else
        tl_jw_null(&w, "bytes");
    tl_jw_int(&w, "entries_used", c->quota.used);
    tl_jw_uint(&w, "bytes_used", c->quota.bytes_used);
    tl_jw_obj_end(&w);
    tl_reply_json(c->x, 200);
}

void tl_api_admin_quota(struct tl_exchange *x)
{
    static const char *const known[] = {"entries", "bytes", NULL};
    struct tl_call *c = tl_call_new(x, TL_CALL_QUOTA, TL_ENTRY_POOL, reply_quota);
    struct tl_error err;
    struct tl_fields f;
    int code = 0;
    if (!c)
        return;
    c->quota.set = strcmp(x->method, "PUT") == 0 || strcmp(x->method, "DELETE") == 0; /* deleted: the defaults again */
    if (strcmp(x->method, "PUT") == 0 && !(code = tl_fields_open(&f, x->body.data, x->body.n, &err))) {
        tl_fields_only(&f, known);
        c->quota.entries = (int)tl_field_int(&f, "entries", 1, 65536, 0);
        c->quota.bytes = (uint64_t)tl_field_int(&f, "bytes", 1, TL_JSON_INT_MAX, 0);
        tl_fields_close(&f);
        code = f.code;
    }
    if (!code && strlen(x->param) > TL_TENANT_MAX)
        code = tl_refuse(&err, TL_CODE_INVALID_ID, "tenant", "The tenant's name is too long.");
    if (code)
        tl_call_refuse(c, &err);
    else
        tl_call_send(c);
}
