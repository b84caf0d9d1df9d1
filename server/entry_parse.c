#include "entry_parse.h"

#include <cjson/cJSON.h>
#include <gnutls/crypto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chat_parse.h"
#include "http_status.h"
#include "json.h"
#include "reuse_ask.h"

#define TTL_SECONDS_MAX       315360000 /* ten years */
#define VERIFY_TOKENS_DEFAULT 64

static int open_body(struct tl_call *c, struct tl_fields *f, struct tl_error *err)
{
    int code = tl_fields_open(f, c->x->body.data, c->x->body.n, err);
    tl_bytes_free(&c->x->body);
    return code;
}

/* A body that may be left out. */
static int open_optional(struct tl_call *c, struct tl_fields *f, struct tl_error *err)
{
    if (c->x->body.n > 0)
        return open_body(c, f, err);
    return tl_fields_open(f, "{}", 2, err);
}

static void parse_model(struct tl_fields *f, const struct tl_facts *facts)
{
    const char *model = tl_field_str(f, "model", NULL);
    if (!model || f->code || strcmp(model, facts->name) == 0)
        return;
    f->code = tl_refuse(f->err, TL_CODE_MODEL_NOT_FOUND, "model", "The model '%.80s' is not served here; '%s' is.",
                        model, facts->name);
}

static void parse_prompt(struct tl_fields *f, struct tl_call *c)
{
    const struct tl_facts *facts = &c->srv->facts;
    const cJSON *v = tl_field(f, "prompt");
    if (cJSON_IsString(v)) {
        if (!facts->tokenizer) {
            tl_field_fail(f, TL_ERR_UNSUPPORTED, "prompt", "must be token ids: this model came without a tokenizer.");
            return;
        }
        c->n_text = strlen(v->valuestring);
        c->text = strdup(v->valuestring);
        if (!c->text)
            tl_field_fail(f, TL_ERR_NO_HOST_MEMORY, "prompt", "does not fit into memory.");
    } else if (cJSON_IsArray(v)) {
        tl_field_tokens(f, "prompt", v, facts->info->vocab_size, &c->ids, &c->n_ids);
    } else {
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "prompt", "must be a string or a list of token ids.");
    }
}

static void range_fail(struct tl_fields *f, int code, const char *name, int64_t got, int64_t min, int64_t max)
{
    if (!tl_field_fail(f, code, name, "is %lld; it must be %lld..%lld.", (long long)got, (long long)min,
                       (long long)max))
        return;
    tl_error_num(f->err, "min", min);
    tl_error_num(f->err, "max", max);
    tl_error_num(f->err, "got", got);
}

/* A whole number that must be in [min, max], else `code`. */
static int parse_bounded(struct tl_fields *f, const char *name, int code, int min, int max, int otherwise)
{
    int64_t v = otherwise;
    const cJSON *field = tl_field(f, name);
    if (!field)
        return otherwise;
    if (!tl_json_whole(field, -TL_JSON_INT_MAX, TL_JSON_INT_MAX, &v)) {
        bool number = cJSON_IsNumber(field),
             whole = number && (field->valuedouble > 1e15 || field->valuedouble < -1e15);
        tl_field_fail(f, whole ? code : TL_CODE_INVALID_TYPE, name, "must be a whole number (%d..%d).", min, max);
    } else if (v < min || v > max) {
        range_fail(f, code, name, v, min, max);
    }
    return f->code ? otherwise : (int)v;
}

static int parse_loops(struct tl_fields *f, const struct tl_facts *facts)
{
    return parse_bounded(f, "loops", TL_ERR_LOOPS_RANGE, 1, facts->info->max_loops, facts->info->spec->loops_default);
}

static int parse_window(struct tl_fields *f, const struct tl_facts *facts)
{
    return parse_bounded(f, "cache_window", TL_ERR_WINDOW_RANGE, 0, facts->info->max_seq_len, 0);
}

/* loops_used and max_loops of a resume handle; the reference names each mistake. */
static void parse_depths(struct tl_fields *f, const struct tl_facts *facts, int *used, int *max)
{
    int limit = facts->info->max_loops < TL_LOOPS_MAX ? facts->info->max_loops : TL_LOOPS_MAX;
    int64_t m, u = facts->info->spec->loops_default;
    const cJSON *vm = tl_field(f, "max_loops"), *vu = tl_field(f, "loops_used");
    if ((vm && !cJSON_IsNumber(vm)) || (vu && !cJSON_IsNumber(vu))) {
        tl_field_fail(f, TL_CODE_INVALID_TYPE, vm && !cJSON_IsNumber(vm) ? "max_loops" : "loops_used",
                      "must be a whole number.");
        return;
    }
    bool whole = !vu || tl_json_whole(vu, -TL_JSON_INT_MAX, TL_JSON_INT_MAX, &u);
    m = tl_resume_max_loops(facts, u);
    if (vm && !tl_json_whole(vm, -TL_JSON_INT_MAX, TL_JSON_INT_MAX, &m)) {
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "max_loops", "must be a whole number.");
    } else if (m > limit) {
        if (tl_field_fail(f, TL_ERR_MAX_LOOPS, "max_loops", "is %lld; the limit is %d.", (long long)m, limit)) {
            tl_error_num(f->err, "limit", limit);
            tl_error_num(f->err, "got", m);
        }
    } else if (!whole) {
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "loops_used", "must be a whole number.");
    } else if (u < 1 || u > m) {
        range_fail(f, TL_ERR_LOOPS_USED_RANGE, vu ? "loops_used" : "max_loops", vu ? u : m, 1, vu ? m : limit);
    }
    *used = (int)u;
    *max = (int)m;
}

static void may_not_expire(struct tl_fields *f, const struct tl_exchange *x)
{
    if (x->key && !(x->key->roles & TL_ROLE_ADMIN))
        tl_field_fail(f, TL_CODE_INSUFFICIENT_ROLE, "ttl_seconds", "may be null for administrators alone.");
}

/* Absent is the server's default, null is never. */
static int64_t parse_ttl(struct tl_fields *f, const struct tl_exchange *x)
{
    const struct tl_config *cfg = x->srv->cfg;
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(f->obj, "ttl_seconds");
    if (!v)
        return cfg->default_ttl_seconds;
    if (cJSON_IsNull(v)) {
        may_not_expire(f, x);
        return 0;
    }
    return tl_field_int(f, "ttl_seconds", 1, TTL_SECONDS_MAX, 1);
}

static bool parse_mode(struct tl_fields *f)
{
    const char *mode = tl_field_str(f, "ttl_mode", "fixed");
    if (!f->code && strcmp(mode, "fixed") != 0 && strcmp(mode, "sliding") != 0)
        tl_field_fail(f, TL_ERR_OUT_OF_RANGE, "ttl_mode", "must be \"fixed\" or \"sliding\".");
    return !f->code && strcmp(mode, "sliding") == 0;
}

/* Up to 16 pairs of strings, as JSON text; NULL if there are none. */
static char *parse_metadata(struct tl_fields *f)
{
    const cJSON *v = tl_field(f, "metadata"), *e;
    int n = 0;
    if (!v)
        return NULL;
    if (!cJSON_IsObject(v)) {
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "metadata", "must be an object of strings.");
        return NULL;
    }
    cJSON_ArrayForEach(e, v)
    {
        if (!cJSON_IsString(e))
            tl_field_fail(f, TL_CODE_INVALID_TYPE, "metadata", "must hold strings alone.");
        else if (++n > TL_METADATA_PAIRS_MAX || strlen(e->string) > TL_METADATA_KEY_MAX ||
                 strlen(e->valuestring) > TL_METADATA_VALUE_MAX)
            tl_field_fail(f, TL_ERR_OUT_OF_RANGE, "metadata", "may hold %d pairs of %d and %d bytes.",
                          TL_METADATA_PAIRS_MAX, TL_METADATA_KEY_MAX, TL_METADATA_VALUE_MAX);
        if (f->code)
            return NULL;
    }
    if (n == 0)
        return NULL;
    char *text = cJSON_PrintUnformatted(v);
    if (!text)
        tl_field_fail(f, TL_ERR_NO_HOST_MEMORY, "metadata", "does not fit into memory.");
    return text;
}

static bool parse_persist(struct tl_fields *f, const struct tl_server *s)
{
    const char *persist = tl_field_str(f, "persist", NULL);
    if (!persist || f->code)
        return s->store != NULL;
    if (strcmp(persist, "none") == 0)
        return false;
    if (strcmp(persist, "definition") != 0)
        tl_field_fail(f, TL_ERR_OUT_OF_RANGE, "persist", "must be \"definition\" or \"none\".");
    else if (!s->store)
        tl_field_fail(f, TL_ERR_BAD_PARAM, "persist", "needs a state directory, which this server has not.");
    return true;
}

static void parse_salt(struct tl_fields *f, char *out)
{
    const char *salt = tl_field_str(f, "cache_salt", tl_field_str(f, "prompt_cache_key", ""));
    if (!f->code && strlen(salt) > TL_ENTRY_ID_MAX)
        tl_field_fail(f, TL_ERR_OUT_OF_RANGE, "cache_salt", "may have %d bytes.", TL_ENTRY_ID_MAX);
    if (!f->code)
        memcpy(out, salt, strlen(salt) + 1);
}

/* Exactly one of prompt, messages and from. A conversation is the beginning of longer ones: without an answer's beginning,
 * unless asked for. */
static void parse_source(struct tl_fields *f, struct tl_call *c)
{
    struct tl_fields from;
    static const char *const known[] = {"pool_entry", NULL};
    bool messages = tl_field(f, "messages") != NULL;
    if (messages && (tl_field(f, "prompt") || tl_field(f, "from")))
        tl_field_fail(f, TL_CODE_CONFLICTING_REUSE, "messages", "and %s exclude each other.",
                      tl_field(f, "prompt") ? "prompt" : "from");
    if (!messages && (tl_field(f, "add_generation_prompt") || tl_field(f, "chat_template_kwargs")))
        tl_field_fail(f, TL_ERR_BAD_PARAM, "messages", "must be there for a chat template to be of use.");
    if (f->code)
        return;
    if (messages) {
        c->chat = true;
        c->text = tl_chat_parse_messages(f, &c->srv->facts, false);
        c->n_text = c->text ? strlen(c->text) : 0;
        return;
    }
    if (!tl_field_object(f, "from", "from.", &from)) {
        parse_prompt(f, c);
        return;
    }
    tl_fields_only(&from, known);
    const char *entry = tl_field_str(&from, "pool_entry", "");
    if (!from.code && !tl_entry_id_ok(entry))
        tl_field_fail(&from, TL_CODE_INVALID_ID, "pool_entry", "is no id.");
    if (!from.code && (tl_field(f, "prompt") || tl_field(f, "loops") || tl_field(f, "cache_window")))
        tl_field_fail(&from, TL_CODE_CONFLICTING_REUSE, "pool_entry",
                      "brings the prompt, loops and cache_window with it.");
    if (from.code) {
        f->code = from.code;
        return;
    }
    c->op = TL_CALL_FROM_POOL;
    snprintf(c->other, sizeof(c->other), "%s", entry);
}

int tl_parse_definition(struct tl_call *c, struct tl_error *err)
{
    static const char *const fields[TL_ENTRY_KINDS][20] = {
        {"model", "prompt", "messages", "add_generation_prompt", "chat_template_kwargs", "from", "loops",
         "cache_window", "ttl_seconds", "ttl_mode", "pool", "metadata", "persist", "shared", "cache_salt",
         "prompt_cache_key", NULL},
        {"model", "prompt", "messages", "add_generation_prompt", "chat_template_kwargs", "loops_used", "max_loops",
         "cache_window", "ttl_seconds", "ttl_mode", "pool", "metadata", "persist", "cache_salt", "prompt_cache_key",
         NULL},
        {"model", "prompt", "loops", "max_loops", "cache_window", "ttl_seconds", "ttl_mode", "metadata", "persist",
         "shared", "cache_salt", "prompt_cache_key", NULL},
    };
    const struct tl_facts *facts = &c->srv->facts;
    struct tl_definition *d = calloc(1, sizeof(*d));
    struct tl_fields f;
    c->making.def = d;
    if (!d)
        return (int)tl_fail_host_memory(err, sizeof(*d));
    if (open_body(c, &f, err))
        return f.code;
    tl_fields_only(&f, fields[c->kind]);
    parse_model(&f, facts);
    d->kind = c->kind;
    snprintf(d->id, sizeof(d->id), "%s", c->id);
    snprintf(d->tenant, sizeof(d->tenant), "%s", c->tenant);
    snprintf(d->fingerprint, sizeof(d->fingerprint), "%s", facts->info->fingerprint);
    if (c->kind == TL_ENTRY_RESUME)
        parse_depths(&f, facts, &d->loops, &d->max_loops);
    else
        d->loops = d->max_loops = parse_loops(&f, facts);
    d->cache_window = parse_window(&f, facts);
    if (c->kind == TL_ENTRY_POOL) { /* with max_loops it keeps its state for deeper requests */
        int limit = facts->info->max_loops < TL_LOOPS_MAX ? facts->info->max_loops : TL_LOOPS_MAX;
        d->max_loops = parse_bounded(&f, "max_loops", TL_ERR_MAX_LOOPS, d->loops, limit, d->loops);
    }
    d->in_pool = tl_field_bool(&f, "pool", false);
    d->shared = tl_field_bool(&f, "shared", false);
    if (d->shared && c->x->key && !(c->x->key->roles & TL_ROLE_ADMIN))
        tl_field_fail(&f, TL_CODE_INSUFFICIENT_ROLE, "shared", "is for administrators.");
    d->ttl_seconds = parse_ttl(&f, c->x);
    d->sliding = parse_mode(&f);
    d->persist = parse_persist(&f, c->srv);
    parse_salt(&f, d->salt);
    d->metadata = parse_metadata(&f);
    if (!f.code)
        parse_source(&f, c);
    tl_fields_close(&f);
    return f.code;
}

int tl_parse_patch(struct tl_call *c, struct tl_error *err)
{
    static const char *const mutable_fields[] = {"ttl_seconds", "expires_at", "ttl_mode", "metadata", "pool"};
    struct tl_patch *p = &c->patch;
    struct tl_fields f;
    const cJSON *v;
    if (open_body(c, &f, err))
        return f.code;
    cJSON_ArrayForEach(v, f.obj)
    {
        bool known = false;
        for (size_t i = 0; i < sizeof(mutable_fields) / sizeof(mutable_fields[0]); i++)
            known = known || strcmp(v->string, mutable_fields[i]) == 0;
        if (known && !(strcmp(v->string, "pool") == 0 && c->kind == TL_ENTRY_POOL))
            continue;
        char name[40];
        snprintf(name, sizeof(name), "%.36s", v->string);
        tl_field_fail(&f, TL_CODE_IMMUTABLE_FIELD, name,
                      "cannot be changed: only the time to live, metadata and pool can.");
    }
    p->set_ttl = cJSON_HasObjectItem(f.obj, "ttl_seconds");
    if (p->set_ttl && !f.code)
        p->ttl_seconds = parse_ttl(&f, c->x);
    p->set_expires = tl_field(&f, "expires_at") != NULL;
    p->expires_at = tl_field_int(&f, "expires_at", 1, TL_JSON_INT_MAX, 0);
    if (p->set_ttl && p->set_expires)
        tl_field_fail(&f, TL_ERR_BAD_PARAM, "expires_at", "and ttl_seconds exclude each other.");
    p->set_mode = tl_field(&f, "ttl_mode") != NULL;
    p->sliding = parse_mode(&f);
    p->set_metadata = cJSON_HasObjectItem(f.obj, "metadata");
    p->metadata = c->patch_metadata = parse_metadata(&f);
    p->set_pool = tl_field(&f, "pool") != NULL;
    p->pool = tl_field_bool(&f, "pool", false);
    tl_fields_close(&f);
    return f.code ? f.code : tl_parse_if_match(c->x, &p->must_match, &p->match_any, &p->match, err);
}

int tl_parse_match(struct tl_call *c, struct tl_error *err)
{
    static const char *const known[] = {"model",      "prompt",           "loops", "cache_window", "explain",
                                        "cache_salt", "prompt_cache_key", NULL};
    struct tl_fields f;
    if (open_body(c, &f, err))
        return f.code;
    tl_fields_only(&f, known);
    parse_model(&f, &c->srv->facts);
    c->loops = parse_loops(&f, &c->srv->facts);
    c->cache_window = parse_window(&f, &c->srv->facts);
    c->explain = tl_field_bool(&f, "explain", true);
    parse_salt(&f, c->salt);
    if (!f.code)
        parse_prompt(&f, c);
    tl_fields_close(&f);
    return f.code;
}

int tl_parse_estimate(struct tl_call *c, struct tl_error *err)
{
    static const char *const flat[] = {"model", "kind", "prompt", "tokens", "loops", "cache_window", NULL};
    static const char *const deep[] = {"model",      "kind",      "prompt",       "tokens",
                                       "loops_used", "max_loops", "cache_window", NULL};
    const struct tl_facts *facts = &c->srv->facts;
    struct tl_fields f;
    if (open_body(c, &f, err))
        return f.code;
    const char *kind = tl_field_str(&f, "kind", "prefix_cache");
    c->estimate.resume = strcmp(kind, "resume_handle") == 0;
    tl_fields_only(&f, c->estimate.resume ? deep : flat);
    parse_model(&f, facts);
    if (!f.code && !c->estimate.resume && strcmp(kind, "prefix_cache") != 0 && strcmp(kind, "pool_entry") != 0)
        tl_field_fail(&f, TL_ERR_OUT_OF_RANGE, "kind",
                      "must be \"prefix_cache\", \"resume_handle\" or \"pool_entry\".");
    if (c->estimate.resume)
        parse_depths(&f, facts, &c->estimate.loops, &c->estimate.max_loops);
    else
        c->estimate.loops = parse_loops(&f, facts);
    c->estimate.cache_window = parse_window(&f, facts);
    if (!f.code && tl_field(&f, "tokens")) {
        c->n_ids = (int)tl_field_int(&f, "tokens", 1, facts->info->max_seq_len, 1);
        if (tl_field(&f, "prompt"))
            tl_field_fail(&f, TL_ERR_BAD_PARAM, "tokens", "and prompt exclude each other.");
    } else if (!f.code) {
        parse_prompt(&f, c);
    }
    tl_fields_close(&f);
    return f.code;
}

int tl_parse_promote(struct tl_call *c, struct tl_error *err)
{
    static const char *const known[] = {"loops", "id", "ttl_seconds", "ttl_mode", "pool", "metadata", "persist", NULL};
    struct tl_definition *d = calloc(1, sizeof(*d));
    struct tl_fields f;
    c->making.def = d;
    if (!d)
        return (int)tl_fail_host_memory(err, sizeof(*d));
    if (open_body(c, &f, err))
        return f.code;
    tl_fields_only(&f, known);
    d->kind = TL_ENTRY_PREFIX;
    snprintf(c->other, sizeof(c->other), "%s", c->id);
    const char *id = tl_field_str(&f, "id", "");
    if (!f.code && id[0] && !tl_entry_id_ok(id))
        tl_field_fail(&f, TL_CODE_INVALID_ID, "id", "is no id ([A-Za-z0-9._-]{1,64}).");
    if (f.code || !id[0]) {
        memcpy(c->id, "pc_", 3);
        tl_ulid(c->id + 3);
    } else {
        snprintf(c->id, sizeof(c->id), "%s", id);
    }
    snprintf(d->id, sizeof(d->id), "%s", c->id);
    snprintf(d->tenant, sizeof(d->tenant), "%s", c->tenant);
    snprintf(d->fingerprint, sizeof(d->fingerprint), "%s", c->srv->facts.info->fingerprint);
    d->loops = (int)tl_field_int(&f, "loops", INT32_MIN, INT32_MAX, 0);
    if (!tl_field(&f, "loops"))
        tl_field_fail(&f, TL_CODE_INVALID_TYPE, "loops", "must be there: the depth to go on to.");
    d->in_pool = tl_field_bool(&f, "pool", false);
    d->ttl_seconds = parse_ttl(&f, c->x);
    d->sliding = parse_mode(&f);
    d->persist = parse_persist(&f, c->srv);
    d->metadata = parse_metadata(&f);
    tl_fields_close(&f);
    return f.code;
}

int tl_parse_verify(struct tl_call *c, struct tl_error *err)
{
    static const char *const known[] = {"max_tokens", "loops", NULL};
    struct tl_fields f;
    if (open_optional(c, &f, err))
        return f.code;
    tl_fields_only(&f, known);
    c->verify.n_tokens = (int)tl_field_int(&f, "max_tokens", 1, TL_VERIFY_TOKENS_MAX, VERIFY_TOKENS_DEFAULT);
    c->verify.loops = (int)tl_field_int(&f, "loops", 1, TL_LOOPS_MAX, 0);
    if (c->kind != TL_ENTRY_RESUME && tl_field(&f, "loops"))
        tl_field_fail(&f, TL_ERR_BAD_PARAM, "loops", "is for resume handles; a prefix cache has one depth.");
    tl_fields_close(&f);
    return f.code;
}

/* ---- headers and query -------------------------------------------------------------------------------------------- */

int tl_parse_if_match(const struct tl_exchange *x, bool *must, bool *any, uint64_t *generation, struct tl_error *err)
{
    const char *h = x->h.if_match;
    *must = h != NULL;
    *any = h && strcmp(h, "*") == 0;
    if (!h || *any)
        return 0;
    if (tl_etag_parse(h, generation))
        return 0;
    *generation = 0; /* no tag of ours has that */
    return strchr(h, '"') ? 0
                          : tl_refuse(err, TL_ERR_BAD_PARAM, NULL, "If-Match must be * or an entity tag in quotes.");
}

int tl_parse_making_headers(struct tl_call *c, struct tl_error *err)
{
    const struct tl_headers *h = &c->x->h;
    struct tl_making *m = &c->making;
    m->must_be_new = h->if_none_match && strcmp(h->if_none_match, "*") == 0;
    c->async = h->prefer && strcasestr(h->prefer, "respond-async");
    if (h->idempotency_key && strcmp(c->x->method, "POST") == 0) {
        unsigned char hash[32];
        if (gnutls_hash_fast(GNUTLS_DIG_SHA256, h->idempotency_key, strlen(h->idempotency_key), hash) != 0)
            return (int)tl_fail_host_memory(err, sizeof(hash));
        for (int i = 0; i < 32; i++)
            snprintf(m->idempotency + 2 * i, 3, "%02x", hash[i]);
    }
    return tl_parse_if_match(c->x, &m->must_match, &m->match_any, &m->match, err);
}

static int query_fail(struct tl_error *err, const char *name, const char *what)
{
    return tl_refuse(err, TL_ERR_OUT_OF_RANGE, name, "%s must be %s.", name, what);
}

static int query_int(struct tl_exchange *x, const char *name, int min, int max, int *out, struct tl_error *err)
{
    const char *v = tl_http_query(x, name);
    if (!v)
        return 0;
    size_t n = strlen(v);
    int value = n > 0 && n < 9 && strspn(v, "0123456789") == n ? atoi(v) : -1;
    if (value < min || value > max)
        return tl_refuse(err, TL_ERR_OUT_OF_RANGE, name, "%s must be %d..%d.", name, min, max);
    *out = value;
    return 0;
}

int tl_parse_listing(struct tl_call *c, struct tl_error *err)
{
    static const char *const states[] = {"stored", "building", "", "ready", "deleting"};
    struct tl_listing *l = &c->listing;
    struct tl_exchange *x = c->x;
    const char *after = tl_http_query(x, "after"), *order = tl_http_query(x, "order"),
               *status = tl_http_query(x, "status");
    l->kind = c->kind;
    l->tenant = c->tenant;
    l->limit = 20;
    l->state = -1;
    int code = query_int(x, "limit", 1, 100, &l->limit, err);
    if (!code)
        code = query_int(x, "loops", 1, TL_LOOPS_MAX, &l->loops, err);
    if (!code && after && !tl_entry_id_ok(after))
        code = tl_refuse(err, TL_CODE_INVALID_ID, "after", "after is no id.");
    if (code)
        return code;
    if (after)
        snprintf(c->after, sizeof(c->after), "%s", after);
    l->after = c->after;
    if (order && strcmp(order, "asc") != 0 && strcmp(order, "desc") != 0)
        return query_fail(err, "order", "asc or desc");
    l->descending = order && strcmp(order, "desc") == 0;
    for (int s = 0; status && s < TL_ENTRY_STATES && l->state < 0; s++)
        if (states[s][0] && strcmp(status, states[s]) == 0)
            l->state = s;
    return status && l->state < 0 ? query_fail(err, "status", "stored, building, ready or deleting") : 0;
}
