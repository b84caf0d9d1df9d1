#include "boot_manifest.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "entry_parse.h"
#include "http_status.h"
#include "log.h"
#include "prescan.h"

#define FILE_BYTES_MAX (16 << 20)
#define VALUES_MAX     1000000
#define ENTRIES_MAX    65536

struct boot_entry {
    enum tl_entry_kind kind;
    char id[TL_ENTRY_ID_MAX + 1], tenant[TL_TENANT_MAX + 1];
    char *body;                /* what is left without kind, id and tenant: that of a creation request */
    struct tl_definition *def; /* from resolve to build */
};

struct tl_boot_manifest {
    char *path;
    struct boot_entry *entry;
    int n;
};

void tl_boot_manifest_free(struct tl_boot_manifest *b)
{
    if (!b)
        return;
    for (int i = 0; i < b->n; i++) {
        free(b->entry[i].body);
        tl_definition_free(b->entry[i].def);
    }
    free(b->entry);
    free(b->path);
    free(b);
}

/* Pool entries are found by what they hold, not by name. */
static bool same_content(const struct tl_definition *a, const struct tl_definition *b)
{
    return strcmp(a->digest, b->digest) == 0 && a->shared == b->shared && strcmp(a->tenant, b->tenant) == 0 &&
           strcmp(a->salt, b->salt) == 0;
}

/* "path: entry 2 ('rules'): what is wrong". */
static enum tl_status __attribute__((format(printf, 5, 6)))
entry_fail(const struct tl_boot_manifest *b, int i, enum tl_status st, struct tl_error *err, const char *fmt, ...)
{
    char what[200], name[TL_ENTRY_ID_MAX + 8] = "";
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    if (b->entry[i].id[0])
        snprintf(name, sizeof(name), " ('%s')", b->entry[i].id);
    return tl_fail(err, st, "%.100s: entry %d%s: %s", b->path, i + 1, name, what);
}

/* ---- the file ----------------------------------------------------------------------------------------------------- */

/* The scan that request bodies go through wants an object, so the list is read as the only member of one. */
#define WRAP_HEAD "{\"entries\":"
#define WRAP_TAIL "}"

static enum tl_status read_wrapped(const char *path, char **text, size_t *n, struct tl_error *err)
{
    const size_t head = sizeof(WRAP_HEAD) - 1, tail = sizeof(WRAP_TAIL) - 1;
    enum tl_status st = TL_OK;
    FILE *f = fopen(path, "rb");
    *text = NULL;
    if (!f)
        return tl_fail_errno(err, "read the boot manifest", path, errno);
    char *buf = malloc(head + FILE_BYTES_MAX + 1 + tail);
    size_t got = buf ? fread(buf + head, 1, FILE_BYTES_MAX + 1, f) : 0;
    if (!buf)
        st = tl_fail_host_memory(err, FILE_BYTES_MAX);
    else if (ferror(f))
        st = tl_fail_errno(err, "read the boot manifest", path, errno);
    else if (got > FILE_BYTES_MAX)
        st = tl_fail(err, TL_ERR_BAD_PARAM, "%s: larger than %d bytes", path, FILE_BYTES_MAX);
    fclose(f);
    if (st != TL_OK) {
        free(buf);
        return st;
    }
    memcpy(buf, WRAP_HEAD, head);
    memcpy(buf + head + got, WRAP_TAIL, tail);
    *text = buf;
    *n = head + got + tail;
    return TL_OK;
}

/* "path:line: what is wrong", where the scan tells a place. */
static enum tl_status scan_fail(const char *path, const char *text, struct tl_error *why, struct tl_error *err)
{
    char *place = strstr(why->msg, " at byte ");
    int line = 1;
    if (!place || why->n_nums < 1)
        return tl_fail(err, why->status, "%.100s: %.200s", path, why->msg);
    *place = '\0';
    for (int64_t i = 0; i < why->num[0].value; i++)
        line += text[i] == '\n';
    return tl_fail(err, why->status, "%.100s:%d: %.180s", path, line, why->msg);
}

static bool take_text(cJSON *o, const char *key, char *out, size_t cap)
{
    cJSON *v = cJSON_DetachItemFromObjectCaseSensitive(o, key);
    bool ok = !v || (cJSON_IsString(v) && strlen(v->valuestring) < cap);
    if (v && ok)
        memcpy(out, v->valuestring, strlen(v->valuestring) + 1);
    cJSON_Delete(v);
    return ok;
}

static enum tl_status read_entry(struct tl_boot_manifest *b, int i, cJSON *o, struct tl_error *err)
{
    struct boot_entry *e = &b->entry[i];
    char kind[32] = "";
    int k = 0;
    if (!cJSON_IsObject(o))
        return entry_fail(b, i, TL_ERR_BAD_PARAM, err, "it must be an object");
    if (!take_text(o, "id", e->id, sizeof(e->id)) || !tl_entry_id_ok(e->id)) {
        e->id[0] = '\0';
        return entry_fail(b, i, TL_ERR_BAD_PARAM, err,
                          "id must be 1..%d characters of [A-Za-z0-9._-] that begin with a letter or digit",
                          TL_ENTRY_ID_MAX);
    }
    if (!take_text(o, "kind", kind, sizeof(kind)))
        kind[0] = '\0';
    while (k < TL_ENTRY_KINDS && strcmp(kind, tl_entry_kind_name((enum tl_entry_kind)k)) != 0)
        k++;
    if (k == TL_ENTRY_KINDS)
        return entry_fail(b, i, TL_ERR_BAD_PARAM, err,
                          "kind must be \"prefix_cache\", \"resume_handle\" or \"pool_entry\"");
    e->kind = (enum tl_entry_kind)k;
    if (!take_text(o, "tenant", e->tenant, sizeof(e->tenant)))
        return entry_fail(b, i, TL_ERR_BAD_PARAM, err, "tenant must be a string of up to %d bytes", TL_TENANT_MAX);
    for (int j = 0; j < i; j++)
        if (b->entry[j].kind == e->kind && strcmp(b->entry[j].id, e->id) == 0 &&
            strcmp(b->entry[j].tenant, e->tenant) == 0)
            return entry_fail(b, i, TL_ERR_BAD_PARAM, err, "entry %d has that name already", j + 1);
    static const char *const elsewhere[] = {"persist", "from"};
    for (size_t j = 0; j < sizeof(elsewhere) / sizeof(elsewhere[0]); j++)
        if (cJSON_HasObjectItem(o, elsewhere[j]))
            return entry_fail(b, i, TL_ERR_BAD_PARAM, err, "%s has no meaning in a boot manifest", elsewhere[j]);
    e->body = cJSON_PrintUnformatted(o);
    return e->body ? TL_OK : tl_fail_host_memory(err, FILE_BYTES_MAX);
}

static enum tl_status read_entries(struct tl_boot_manifest *b, const cJSON *root, struct tl_error *err)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(root, "entries");
    int n = cJSON_GetArraySize(list), i = 0;
    cJSON *o;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(root) != 1 || n > ENTRIES_MAX)
        return tl_fail(err, TL_ERR_BAD_PARAM, "%s: a boot manifest is a JSON list of up to %d entries", b->path,
                       ENTRIES_MAX);
    b->entry = calloc((size_t)n + 1, sizeof(*b->entry));
    if (!b->entry)
        return tl_fail_host_memory(err, (size_t)n * sizeof(*b->entry));
    b->n = n;
    cJSON_ArrayForEach(o, list)
    {
        enum tl_status st = read_entry(b, i++, o, err);
        if (st != TL_OK)
            return st;
    }
    return TL_OK;
}

enum tl_status tl_boot_manifest_read(struct tl_boot_manifest **out, const char *path, struct tl_error *err)
{
    char *text = NULL;
    size_t n = 0;
    struct tl_error why;
    cJSON *root = NULL;
    struct tl_boot_manifest *b = calloc(1, sizeof(*b));
    *out = NULL;
    if (b)
        b->path = strdup(path);
    enum tl_status st = b && b->path ? read_wrapped(path, &text, &n, err) : tl_fail_host_memory(err, sizeof(*b));
    if (st == TL_OK && tl_prescan(text, n, VALUES_MAX, &why) != TL_OK)
        st = scan_fail(path, text, &why, err);
    if (st == TL_OK && !(root = cJSON_ParseWithLength(text, n)))
        st = tl_fail_host_memory(err, n);
    if (st == TL_OK)
        st = read_entries(b, root, err);
    cJSON_Delete(root);
    free(text);
    if (st == TL_OK)
        *out = b;
    else
        tl_boot_manifest_free(b);
    return st;
}

/* ---- against the model -------------------------------------------------------------------------------------------- */

static int encode(const struct tl_tokenizer *t, struct tl_call *c, struct tl_error *err)
{
    struct tl_encode_params p = {.text = c->text, .text_bytes = c->n_text, .add_special = true, .parse_special = true};
    int32_t *ids = NULL;
    size_t n = 0;
    enum tl_status st = tl_tokenizer_encode(t, &p, &ids, &n, err);
    if (st == TL_OK && n >= INT32_MAX)
        st = tl_fail(err, TL_ERR_CONTEXT_LENGTH, "The prompt has %zu tokens.", n);
    if (st == TL_OK && !(c->ids = malloc((n + 1) * sizeof(*ids))))
        st = tl_fail_host_memory(err, n * sizeof(*ids));
    if (st == TL_OK) {
        memcpy(c->ids, ids, n * sizeof(*ids));
        c->n_ids = (int)n;
    }
    tl_free(ids);
    return (int)st;
}

/* The tokens move from the call to its definition, which is complete then. */
static int finish_definition(struct tl_call *c, struct tl_error *err)
{
    struct tl_definition *d = c->making.def;
    int max = c->srv->facts.info->max_seq_len;
    if (c->n_ids < 1)
        return tl_refuse(err, TL_ERR_EMPTY_PROMPT, "prompt", "The prompt has no tokens.");
    if (c->n_ids > max)
        return tl_refuse(err, TL_ERR_CONTEXT_LENGTH, "prompt", "The prompt has %d tokens; the limit is %d.", c->n_ids,
                         max);
    d->tokens = c->ids;
    d->n_tokens = c->n_ids;
    c->ids = NULL;
    return tl_definition_digest(d) ? 0 : (int)tl_fail_host_memory(err, sizeof(*d));
}

/* An entry is a creation request that nobody sent: the same parser, the same refusals. */
static enum tl_status resolve_entry(struct tl_boot_manifest *b, int i, struct tl_server *srv, struct tl_error *err)
{
    struct boot_entry *e = &b->entry[i];
    struct tl_exchange *x = calloc(1, sizeof(*x));
    struct tl_call *c = calloc(1, sizeof(*c));
    struct tl_error why;
    enum tl_status st = TL_OK;
    if (!x || !c) {
        st = tl_fail_host_memory(err, sizeof(*x) + sizeof(*c));
        goto out;
    }
    x->srv = c->srv = srv;
    c->x = x;
    c->kind = e->kind;
    memcpy(c->id, e->id, sizeof(c->id));
    memcpy(c->tenant, e->tenant, sizeof(c->tenant));
    tl_bytes_str(&x->body, e->body);
    int code = x->body.failed ? (int)tl_fail_host_memory(&why, strlen(e->body)) : tl_parse_definition(c, &why);
    if (!code && c->text)
        code = encode(srv->facts.tokenizer, c, &why);
    if (!code)
        code = finish_definition(c, &why);
    if (code) {
        st = entry_fail(b, i, TL_ERR_BAD_PARAM, err, "%s", why.msg);
        goto out;
    }
    e->def = c->making.def;
    c->making.def = NULL;
    for (int j = 0; j < i && e->kind == TL_ENTRY_POOL; j++)
        if (same_content(e->def, b->entry[j].def)) {
            st = entry_fail(b, i, TL_ERR_BAD_PARAM, err, "the pool has the same from entry %d", j + 1);
            break;
        }
out:
    if (c) {
        tl_definition_free(c->making.def);
        free(c->text);
        free(c->ids);
    }
    if (x)
        tl_bytes_free(&x->body);
    free(c);
    free(x);
    return st;
}

enum tl_status tl_boot_manifest_resolve(struct tl_boot_manifest *b, const struct tl_config *cfg, struct tl_model *m,
                                        struct tl_error *err)
{
    struct tl_config own = *cfg; /* borrowed strings */
    struct tl_server *srv = calloc(1, sizeof(*srv));
    enum tl_status st = srv ? TL_OK : tl_fail_host_memory(err, sizeof(*srv));
    if (srv) {
        const struct tl_model_info *info = tl_model_info(m);
        own.default_ttl_seconds = 0;
        srv->cfg = srv->facts.cfg = &own;
        srv->facts.info = info;
        srv->facts.tokenizer = tl_model_tokenizer(m);
        snprintf(srv->facts.name, sizeof(srv->facts.name), "%s", cfg->model_name[0] ? cfg->model_name : info->name);
    }
    for (int i = 0; i < b->n && st == TL_OK; i++)
        st = resolve_entry(b, i, srv, err);
    free(srv);
    return st;
}

bool tl_boot_manifest_replaces(const struct tl_boot_manifest *b, const struct tl_definition *d)
{
    for (int i = 0; i < b->n; i++) {
        const struct boot_entry *e = &b->entry[i];
        if (e->kind == d->kind && strcmp(e->tenant, d->tenant) == 0 &&
            (strcmp(e->id, d->id) == 0 || (d->kind == TL_ENTRY_POOL && same_content(e->def, d))))
            return true;
    }
    return false;
}

/* ---- making ------------------------------------------------------------------------------------------------------- */

static enum tl_status build_entry(struct tl_boot_manifest *b, int i, struct tl_registry *r, struct tl_sched *s,
                                  struct tl_error *err)
{
    struct boot_entry *e = &b->entry[i];
    struct tl_making m = {.def = e->def};
    struct tl_error why;
    bool busy = true;
    e->def = NULL; /* the registry's now */
    int code = tl_registry_make(r, &m, &why);
    while (!code && m.state == TL_MAKING_WAITS) {
        if (!busy)
            code = (int)tl_fail(&why, TL_ERR_INTERNAL, "its computation does not go on");
        else
            code = (int)tl_sched_step(s, &busy, &why);
        tl_registry_tick(r);
    }
    if (!code)
        tl_registry_commit(r, &m);
    if (!code && m.state == TL_MAKING_FAILED) {
        code = m.code;
        why = m.err;
    }
    if (!code)
        return TL_OK;
    tl_registry_abandon(r, &m);
    return entry_fail(b, i, TL_ERR_BAD_PARAM, err, "%s", why.msg);
}

/* The pool lets the least used go when it is full: not what a manifest asks for. */
static enum tl_status check_there(const struct tl_boot_manifest *b, int i, struct tl_registry *r, struct tl_error *err)
{
    const struct boot_entry *e = &b->entry[i];
    struct tl_view v = {0};
    struct tl_error why;
    int code = tl_registry_view(r, e->kind, e->tenant, e->id, &v, &why);
    bool ready = !code && v.state == TL_READY;
    tl_view_clear(&v);
    return ready ? TL_OK
                 : entry_fail(b, i, TL_ERR_OUT_OF_RANGE, err,
                              "it gave way to later entries: raise pool_capacity, pool_bytes or ttl_seconds");
}

enum tl_status tl_boot_manifest_build(struct tl_boot_manifest *b, struct tl_registry *r, struct tl_sched *s,
                                      void (*progress)(void *arg, const char *what, double fraction), void *arg,
                                      struct tl_error *err)
{
    char what[TL_ENTRY_ID_MAX + 24];
    enum tl_status st = TL_OK;
    for (int i = 0; i < b->n && st == TL_OK; i++) {
        snprintf(what, sizeof(what), "boot entry %s", b->entry[i].id);
        if (progress)
            progress(arg, what, (double)i / b->n);
        st = build_entry(b, i, r, s, err);
    }
    for (int i = 0; i < b->n && st == TL_OK; i++)
        st = check_there(b, i, r, err);
    if (st == TL_OK)
        tl_log(TL_LOG_INFO, "%d entries of the boot manifest are ready", b->n);
    return st;
}
