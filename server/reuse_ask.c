#include "reuse_ask.h"

#include <cjson/cJSON.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "http_status.h"
#include "ids.h"
#include "server.h"

#define STORE_TTL_DEFAULT 300

static void copy_id(struct tl_fields *f, const char *name, const char *id, char out[TL_ENTRY_ID_MAX + 1])
{
    if (f->code)
        return;
    if (!tl_entry_id_ok(id))
        tl_field_fail(f, TL_CODE_INVALID_ID, name, "is no id: 1..%d of [A-Za-z0-9._-].", TL_ENTRY_ID_MAX);
    else
        memcpy(out, id, strlen(id) + 1);
}

static void parse_prefix(struct tl_fields *f, struct tl_reuse_ask *r)
{
    static const char *const known[] = {"id", "if_missing", NULL};
    const cJSON *v = tl_field(f, "prefix_cache");
    struct tl_fields o;
    if (!v)
        return;
    r->named = TL_REUSE_PREFIX_CACHE;
    r->id_field = cJSON_IsString(v) ? "prefix_cache" : "prefix_cache.id";
    if (cJSON_IsString(v)) {
        copy_id(f, "prefix_cache", v->valuestring, r->id);
        return;
    }
    if (!tl_field_object(f, "prefix_cache", "prefix_cache.", &o))
        return;
    tl_fields_only(&o, known);
    copy_id(&o, "id", tl_field_str(&o, "id", ""), r->id);
    const char *missing = tl_field_str(&o, "if_missing", "error");
    if (!o.code && strcmp(missing, "error") != 0 && strcmp(missing, "plain") != 0)
        tl_field_fail(&o, TL_ERR_OUT_OF_RANGE, "if_missing", "must be \"error\" or \"plain\".");
    r->plain_if_missing = !o.code && strcmp(missing, "plain") == 0;
    if (r->plain_if_missing && !r->prompt_is_full)
        tl_field_fail(&o, TL_ERR_BAD_PARAM, "if_missing", "\"plain\" needs prompt_is_full: true and the whole prompt.");
    if (o.code)
        f->code = o.code;
}

static void parse_resume(struct tl_fields *f, struct tl_reuse_ask *r)
{
    static const char *const known[] = {"handle", "loops", NULL};
    struct tl_fields o;
    if (!tl_field_object(f, "resume", "resume.", &o))
        return;
    r->named = TL_REUSE_RESUME_HANDLE;
    r->id_field = "resume.handle";
    tl_fields_only(&o, known);
    copy_id(&o, "handle", tl_field_str(&o, "handle", ""), r->id);
    int64_t loops = 0;
    const cJSON *v = tl_field(&o, "loops");
    if (!o.code && (!v || !tl_json_whole(v, -TL_JSON_INT_MAX, TL_JSON_INT_MAX, &loops)))
        tl_field_fail(&o, TL_CODE_INVALID_TYPE, "loops", "must be a whole number: the depth to go on to.");
    r->new_L = loops < INT_MIN ? INT_MIN : loops > INT_MAX ? INT_MAX : (int)loops;
    if (o.code)
        f->code = o.code;
}

static void parse_pool_word(struct tl_fields *f, const char *name, const char *word, struct tl_reuse_ask *r)
{
    if (f->code)
        return;
    if (strcmp(word, "auto") == 0)
        r->pool = TL_POOL_AUTO;
    else if (strcmp(word, "off") == 0)
        r->pool = TL_POOL_OFF;
    else if (strcmp(word, "require") == 0)
        r->pool = TL_POOL_REQUIRE;
    else
        tl_field_fail(f, TL_ERR_OUT_OF_RANGE, name, "must be \"auto\", \"off\" or \"require\".");
}

static void parse_pool(struct tl_fields *f, const struct tl_facts *facts, struct tl_reuse_ask *r)
{
    static const char *const known[] = {"mode", "register_tokens", NULL};
    const cJSON *v = tl_field(f, "pool");
    struct tl_fields o;
    if (!v)
        return;
    if (cJSON_IsString(v)) {
        parse_pool_word(f, "pool", v->valuestring, r);
        return;
    }
    if (!tl_field_object(f, "pool", "pool.", &o))
        return;
    tl_fields_only(&o, known);
    parse_pool_word(&o, "mode", tl_field_str(&o, "mode", "auto"), r);
    r->register_tokens = (int)tl_field_int(&o, "register_tokens", 1, facts->info->max_seq_len, 0);
    if (o.code)
        f->code = o.code;
}

int tl_resume_max_loops(const struct tl_facts *facts, int64_t loops_used)
{
    int limit = facts->info->max_loops, usual = limit < TL_RESUME_LOOPS ? limit : TL_RESUME_LOOPS;
    return loops_used <= usual ? usual : loops_used < limit ? (int)loops_used : limit;
}

static void parse_store(struct tl_fields *f, const struct tl_facts *facts, struct tl_reuse_ask *r)
{
    static const char *const known[] = {"max_loops", "ttl_seconds", "persist", NULL};
    int limit = facts->info->max_loops < TL_LOOPS_MAX ? facts->info->max_loops : TL_LOOPS_MAX;
    struct tl_fields o;
    if (!tl_field_object(f, "store_resume", "store_resume.", &o))
        return;
    tl_fields_only(&o, known);
    r->store = true;
    int64_t loops = facts->info->spec->loops_default, max;
    if (cJSON_IsNumber(tl_field(f, "loops")))
        tl_json_whole(tl_field(f, "loops"), 1, limit, &loops);
    max = tl_field_int(&o, "max_loops", 1, TL_JSON_INT_MAX, tl_resume_max_loops(facts, loops));
    if (!o.code && max > limit) {
        tl_field_fail(&o, TL_ERR_MAX_LOOPS, "max_loops", "is %lld; the limit is %d.", (long long)max, limit);
        tl_error_num(o.err, "limit", limit);
        tl_error_num(o.err, "got", max);
    }
    r->store_max_loops = (int)max;
    r->store_ttl = tl_field_int(&o, "ttl_seconds", 1, 315360000, STORE_TTL_DEFAULT);
    const char *persist = tl_field_str(&o, "persist", facts->cfg->state_dir[0] ? "definition" : "none");
    r->store_persist = !o.code && strcmp(persist, "definition") == 0;
    if (!o.code && !r->store_persist && strcmp(persist, "none") != 0)
        tl_field_fail(&o, TL_ERR_OUT_OF_RANGE, "persist", "must be \"definition\" or \"none\".");
    if (r->store_persist && !facts->cfg->state_dir[0])
        tl_field_fail(&o, TL_ERR_BAD_PARAM, "persist", "needs a state directory, which this server has not.");
    memcpy(r->store_id, "rh_", 3);
    tl_ulid(r->store_id + 3);
    if (o.code)
        f->code = o.code;
}

static void check_together(struct tl_fields *f, const struct tl_reuse_ask *r)
{
    bool prefix = tl_field(f, "prefix_cache"), resume = tl_field(f, "resume"), require = r->pool == TL_POOL_REQUIRE;
    if (prefix + resume + require > 1)
        tl_field_fail(f, TL_CODE_CONFLICTING_REUSE, prefix ? "prefix_cache" : "resume",
                      "and %s cannot both be the start.", prefix && resume ? "resume" : "pool: \"require\"");
    if (r->store && r->named)
        tl_field_fail(f, TL_CODE_CONFLICTING_REUSE, "store_resume",
                      "needs the whole prompt computed: no prefix_cache, no resume.");
    if (r->store && require)
        tl_field_fail(f, TL_CODE_CONFLICTING_REUSE, "store_resume",
                      "needs the whole prompt computed: no pool: \"require\".");
    if (r->store && cJSON_IsString(tl_field(f, "loops")))
        tl_field_fail(f, TL_CODE_CONFLICTING_REUSE, "store_resume",
                      "needs one depth for all tokens: not loops \"auto\".");
    if (r->prompt_is_full && r->named != TL_REUSE_PREFIX_CACHE)
        tl_field_fail(f, TL_ERR_BAD_PARAM, "prompt_is_full", "is about a prefix_cache.");
    if (r->register_tokens && r->named)
        tl_field_fail(f, TL_CODE_CONFLICTING_REUSE, "pool",
                      "registers tokens of a whole prompt: no prefix_cache, no resume.");
}

void tl_reuse_parse(struct tl_fields *f, const struct tl_facts *facts, struct tl_reuse_ask *r)
{
    const char *salt = tl_field_str(f, "cache_salt", tl_field_str(f, "prompt_cache_key", ""));
    if (!f->code && strlen(salt) > TL_ENTRY_ID_MAX)
        tl_field_fail(f, TL_ERR_OUT_OF_RANGE, "cache_salt", "may have %d bytes.", TL_ENTRY_ID_MAX);
    if (!f->code)
        memcpy(r->salt, salt, strlen(salt) + 1);
    r->prompt_is_full = tl_field_bool(f, "prompt_is_full", false);
    r->keep_automatic = facts->cfg->pool_auto;
    parse_prefix(f, r);
    parse_resume(f, r);
    parse_pool(f, facts, r);
    parse_store(f, facts, r);
    check_together(f, r);
}

bool tl_reuse_needs_cache_role(const struct tl_reuse_ask *r) { return r->store || r->register_tokens > 0; }
