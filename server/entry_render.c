#include "entry_render.h"

#include <stdio.h>
#include <string.h>

#include "render.h"

const char *tl_entry_path(enum tl_entry_kind k)
{
    static const char *const paths[TL_ENTRY_KINDS] = {"/v1/prefix_caches", "/v1/resume_handles", "/v1/pool/entries"};
    return paths[k];
}

static void time_or_null(struct tl_jw *w, const char *key, int64_t t)
{
    if (t > 0)
        tl_jw_int(w, key, t);
    else
        tl_jw_null(w, key);
}

void tl_entry_json(struct tl_jw *w, const struct tl_view *v, const struct tl_facts *facts)
{
    const struct tl_definition *d = &v->def;
    char text[80], etag[TL_ETAG_CHARS];
    tl_jw_obj(w, NULL);
    tl_jw_str(w, "id", d->id);
    tl_jw_str(w, "object", tl_entry_kind_name(d->kind));
    tl_jw_str(w, "status", tl_entry_state_name(v->state));
    tl_jw_str(w, "model", facts->name);
    snprintf(text, sizeof(text), "sha256:%s", d->fingerprint);
    tl_jw_str(w, "model_fingerprint", text);
    snprintf(text, sizeof(text), "sha256:%s", d->digest);
    tl_jw_str(w, "content_digest", text);
    tl_etag(etag, d);
    tl_jw_str(w, "etag", etag);
    tl_jw_int(w, "tokens", d->n_tokens);
    if (d->kind == TL_ENTRY_RESUME) {
        tl_jw_int(w, "loops_used", d->loops);
        tl_jw_int(w, "max_loops", d->max_loops);
    } else {
        tl_jw_int(w, "loops", d->loops);
        if (d->max_loops > d->loops)
            tl_jw_int(w, "max_loops", d->max_loops);
    }
    tl_render_warnings(w, d->loops, facts->info);
    tl_jw_int(w, "cache_window", d->cache_window);
    tl_jw_uint(w, "bytes", v->bytes);
    if (d->kind == TL_ENTRY_RESUME)
        tl_jw_uint(w, "bytes_unused", v->bytes_reserved);
    tl_jw_int(w, "created_at", d->created_at);
    time_or_null(w, "expires_at", d->expires_at);
    time_or_null(w, "ttl_seconds", d->ttl_seconds);
    tl_jw_str(w, "ttl_mode", d->sliding ? "sliding" : "fixed");
    time_or_null(w, "last_used_at", v->last_used_at);
    tl_jw_uint(w, d->kind == TL_ENTRY_RESUME ? "resumes" : "uses", v->uses);
    tl_jw_int(w, "in_flight", v->in_flight);
    if (d->kind != TL_ENTRY_POOL)
        tl_jw_bool(w, "pool", d->in_pool);
    if (d->kind != TL_ENTRY_RESUME)
        tl_jw_bool(w, "shared", d->shared);
    tl_jw_str(w, "persist", d->persist ? "definition" : "none");
    if (d->metadata)
        tl_jw_raw(w, "metadata", d->metadata, strlen(d->metadata));
    else
        tl_jw_raw(w, "metadata", "{}", 2);
    tl_jw_obj(w, "timings");
    tl_jw_num(w, "queue_ms", v->queue_ms, 3);
    tl_jw_num(w, "prefill_ms", v->prefill_ms, 3);
    tl_jw_num(w, "resume_ms", v->resume_ms, 3);
    tl_jw_obj_end(w);
}

static void etag_header(struct tl_exchange *x, const struct tl_view *v)
{
    char etag[TL_ETAG_CHARS];
    tl_etag(etag, &v->def);
    tl_http_header(x, "ETag", "%s", etag);
}

static void write_entry(struct tl_call *c, const struct tl_view *v)
{
    struct tl_jw w = {.b = &c->x->out};
    tl_entry_json(&w, v, &c->srv->facts);
}

void tl_reply_made(struct tl_call *c)
{
    struct tl_exchange *x = c->x;
    const struct tl_view *v = c->shown;
    struct tl_jw w = {.b = &x->out};
    bool accepted = v == &c->accepted, made = !accepted && c->outcome != TL_MADE_BEFORE;
    tl_http_header(x, "Location", "%s/%s", tl_entry_path(v->def.kind), v->def.id);
    etag_header(x, v);
    if (accepted)
        tl_http_header(x, "Preference-Applied", "respond-async");
    tl_entry_json(&w, v, &c->srv->facts);
    if (v->def.kind == TL_ENTRY_POOL)
        tl_jw_bool(&w, "created", made);
    tl_jw_obj_end(&w);
    tl_reply_json(x, accepted ? 202 : made ? 201 : 200);
}

/* Is the tag in the list, weakly compared? */
static bool names_tag(const char *list, const char *etag)
{
    return strcmp(list, "*") == 0 || strstr(list, etag) != NULL;
}

void tl_reply_entry(struct tl_call *c)
{
    struct tl_exchange *x = c->x;
    struct tl_jw w = {.b = &x->out};
    char etag[TL_ETAG_CHARS];
    tl_etag(etag, &c->shown->def);
    etag_header(x, c->shown);
    if (c->op == TL_CALL_VIEW && x->h.if_none_match && names_tag(x->h.if_none_match, etag)) {
        tl_http_reply(x, 304, NULL);
        return;
    }
    write_entry(c, c->shown);
    w.comma = true;
    tl_jw_obj_end(&w);
    tl_reply_json(x, 200);
}

void tl_reply_deleted(struct tl_call *c)
{
    struct tl_exchange *x = c->x;
    struct tl_jw w = {.b = &x->out};
    if (c->deletion.in_flight == 0) {
        tl_http_reply(x, 204, NULL);
        return;
    }
    tl_jw_obj(&w, NULL);
    tl_jw_str(&w, "id", c->id);
    tl_jw_str(&w, "status", "deleting");
    tl_jw_int(&w, "in_flight", c->deletion.in_flight);
    tl_jw_obj_end(&w);
    tl_reply_json(x, 202);
}

void tl_reply_listing(struct tl_call *c)
{
    struct tl_exchange *x = c->x;
    const struct tl_listing *l = &c->listing;
    struct tl_jw w = {.b = &x->out};
    tl_jw_obj(&w, NULL);
    tl_jw_str(&w, "object", "list");
    tl_jw_arr(&w, "data");
    for (int i = 0; i < l->n; i++) {
        tl_entry_json(&w, &l->views[i], &c->srv->facts);
        tl_jw_obj_end(&w);
    }
    tl_jw_arr_end(&w);
    tl_jw_str(&w, "first_id", l->n > 0 ? l->views[0].def.id : NULL);
    tl_jw_str(&w, "last_id", l->n > 0 ? l->views[l->n - 1].def.id : NULL);
    tl_jw_bool(&w, "has_more", l->has_more);
    tl_jw_obj_end(&w);
    tl_reply_json(x, 200);
}

static void write_run(struct tl_jw *w, const char *key, const struct tl_verify_run *run)
{
    tl_jw_obj(w, key);
    tl_jw_int(w, "prefilled_tokens", run->usage.n_prefilled);
    tl_jw_int(w, "reused_tokens", run->usage.n_reused);
    tl_jw_int(w, "iterations_run", run->usage.iterations_run);
    tl_jw_int(w, "row_loops", run->usage.row_loops_run);
    tl_jw_num(w, "ttft_ms", run->usage.ttft_s * 1e3, 3);
    tl_jw_obj_end(w);
}

void tl_reply_verified(struct tl_call *c)
{
    const struct tl_verify *v = &c->verify;
    struct tl_exchange *x = c->x;
    struct tl_jw w = {.b = &x->out};
    tl_jw_obj(&w, NULL);
    tl_jw_str(&w, "id", c->id);
    tl_jw_bool(&w, "equal", v->equal);
    tl_jw_int(&w, "tokens_compared", v->n_compared);
    if (v->first_difference >= 0)
        tl_jw_int(&w, "first_difference", v->first_difference);
    else
        tl_jw_null(&w, "first_difference");
    tl_jw_str(&w, "compared", "token ids and the bits of every row of logits");
    write_run(&w, "fresh", &v->fresh);
    write_run(&w, "reused", &v->reused);
    tl_jw_obj_end(&w);
    tl_reply_json(x, 200);
}
