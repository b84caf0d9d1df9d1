#include "definitions.h"

#include <cjson/cJSON.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <gnutls/crypto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bytes.h"
#include "json.h"
#include "log.h"

#define FILE_BYTES_MAX (64 << 20)
#define FILE_MAGIC     "tinyloop-definition 1 " /* then the SHA-256 of all after the first line */
#define NAME_CHARS     96

static const char *const kind_names[TL_ENTRY_KINDS] = {"prefix_cache", "resume_handle", "pool_entry"};

const char *tl_entry_kind_name(enum tl_entry_kind k) { return kind_names[k]; }

bool tl_entry_id_ok(const char *id)
{
    size_t n = strlen(id);
    if (n < 1 || n > TL_ENTRY_ID_MAX)
        return false;
    for (size_t i = 0; i < n; i++) {
        char c = id[i];
        bool alnum = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
        if (!alnum && (i == 0 || (c != '.' && c != '_' && c != '-')))
            return false;
    }
    return true;
}

void tl_definition_free(struct tl_definition *d)
{
    if (!d)
        return;
    free(d->tokens);
    free(d->metadata);
    free(d);
}

struct tl_definition *tl_definition_copy(const struct tl_definition *d)
{
    struct tl_definition *c = malloc(sizeof(*c));
    if (!c)
        return NULL;
    *c = *d;
    c->tokens = malloc(((size_t)d->n_tokens + 1) * sizeof(*d->tokens));
    c->metadata = d->metadata ? strdup(d->metadata) : NULL;
    if (!c->tokens || (d->metadata && !c->metadata)) {
        tl_definition_free(c);
        return NULL;
    }
    if (d->n_tokens > 0)
        memcpy(c->tokens, d->tokens, (size_t)d->n_tokens * sizeof(*d->tokens));
    return c;
}

static void hex_of(const unsigned char hash[32], char out[65])
{
    for (int i = 0; i < 32; i++)
        snprintf(out + 2 * i, 3, "%02x", hash[i]);
}

bool tl_definition_digest(struct tl_definition *d)
{
    struct tl_bytes b = {0};
    unsigned char hash[32];
    tl_bytes_fmt(&b, "%s\n%s\n%d %d %d %d\n", kind_names[d->kind], d->fingerprint, d->loops, d->max_loops,
                 d->cache_window, d->n_tokens);
    for (int i = 0; i < d->n_tokens; i++) { /* the same on any byte order */
        unsigned char le[4] = {(unsigned char)d->tokens[i], (unsigned char)(d->tokens[i] >> 8),
                               (unsigned char)(d->tokens[i] >> 16), (unsigned char)(d->tokens[i] >> 24)};
        tl_bytes_add(&b, le, 4);
    }
    bool ok = !b.failed && gnutls_hash_fast(GNUTLS_DIG_SHA256, b.data, b.n, hash) == 0;
    if (ok)
        hex_of(hash, d->digest);
    tl_bytes_free(&b);
    return ok;
}

bool tl_definition_keeps_state(const struct tl_definition *d)
{
    return d->kind == TL_ENTRY_RESUME || d->max_loops > d->loops;
}

bool tl_definition_in_pool(const struct tl_definition *d) { return d->kind == TL_ENTRY_POOL || d->in_pool; }

bool tl_definition_same_state(const struct tl_definition *a, const struct tl_definition *b)
{
    return tl_definition_keeps_state(a) == tl_definition_keeps_state(b) && a->loops == b->loops &&
           a->max_loops == b->max_loops && a->cache_window == b->cache_window && a->n_tokens == b->n_tokens &&
           memcmp(a->tokens, b->tokens, (size_t)a->n_tokens * sizeof(*a->tokens)) == 0;
}

/* ---- one file ----------------------------------------------------------------------------------------------------- */

/* Ids may differ in case alone, which not every file system keeps apart, so names are hashes. */
static bool file_name(char out[NAME_CHARS], enum tl_entry_kind kind, const char *tenant, const char *id)
{
    char key[TL_TENANT_MAX + TL_ENTRY_ID_MAX + 8], hex[65];
    unsigned char hash[32];
    int n = snprintf(key, sizeof(key), "%s/%s", tenant, id);
    if (gnutls_hash_fast(GNUTLS_DIG_SHA256, key, (size_t)n, hash) != 0)
        return false;
    hex_of(hash, hex);
    snprintf(out, NAME_CHARS, "%s-%.40s.def", kind_names[kind], hex);
    return true;
}

static void write_json(struct tl_bytes *b, const struct tl_definition *d)
{
    struct tl_jw w = {.b = b};
    tl_jw_obj(&w, NULL);
    tl_jw_str(&w, "kind", kind_names[d->kind]);
    tl_jw_str(&w, "id", d->id);
    tl_jw_str(&w, "tenant", d->tenant);
    tl_jw_str(&w, "salt", d->salt);
    tl_jw_str(&w, "fingerprint", d->fingerprint);
    tl_jw_int(&w, "loops", d->loops);
    tl_jw_int(&w, "max_loops", d->max_loops);
    tl_jw_int(&w, "cache_window", d->cache_window);
    tl_jw_bool(&w, "pool", d->in_pool);
    tl_jw_bool(&w, "shared", d->shared);
    tl_jw_bool(&w, "sliding", d->sliding);
    tl_jw_int(&w, "ttl_seconds", d->ttl_seconds);
    tl_jw_int(&w, "created_at", d->created_at);
    tl_jw_int(&w, "expires_at", d->expires_at);
    tl_jw_uint(&w, "generation", d->generation);
    if (d->idempotency[0])
        tl_jw_str(&w, "idempotency", d->idempotency);
    if (d->metadata)
        tl_jw_raw(&w, "metadata", d->metadata, strlen(d->metadata));
    tl_jw_arr(&w, "tokens");
    for (int i = 0; i < d->n_tokens; i++)
        tl_jw_int(&w, NULL, d->tokens[i]);
    tl_jw_arr_end(&w);
    tl_jw_obj_end(&w);
    tl_bytes_str(b, "\n");
}

static enum tl_status write_synced(const char *path, const struct tl_bytes *head, const struct tl_bytes *body,
                                   struct tl_error *err)
{
    const struct tl_bytes *part[2] = {head, body};
    enum tl_status st = TL_OK;
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return tl_fail_errno(err, "create", path, errno);
    for (int i = 0; i < 2 && st == TL_OK; i++)
        for (size_t at = 0; at < part[i]->n;) {
            ssize_t n = write(fd, part[i]->data + at, part[i]->n - at);
            if (n < 0 && errno == EINTR)
                continue;
            if (n <= 0) {
                st = tl_fail_errno(err, "write", path, errno);
                break;
            }
            at += (size_t)n;
        }
    if (st == TL_OK && fsync(fd) != 0)
        st = tl_fail_errno(err, "sync", path, errno);
    if (close(fd) != 0 && st == TL_OK)
        st = tl_fail_errno(err, "close", path, errno);
    return st;
}

enum tl_status tl_definition_write(const char *dir, const struct tl_definition *d, struct tl_error *err)
{
    struct tl_bytes head = {0}, body = {0};
    char name[NAME_CHARS], hex[65], path[4096], temp[4112];
    unsigned char hash[32];
    enum tl_status st;
    write_json(&body, d);
    if (!file_name(name, d->kind, d->tenant, d->id) || body.failed ||
        gnutls_hash_fast(GNUTLS_DIG_SHA256, body.data, body.n, hash) != 0) {
        st = tl_fail_host_memory(err, body.n);
        goto out;
    }
    hex_of(hash, hex);
    tl_bytes_fmt(&head, FILE_MAGIC "%s\n", hex);
    if (head.failed) {
        st = tl_fail_host_memory(err, 128);
        goto out;
    }
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    snprintf(temp, sizeof(temp), "%s.tmp", path);
    st = write_synced(temp, &head, &body, err);
    if (st == TL_OK && rename(temp, path) != 0)
        st = tl_fail_errno(err, "rename to", path, errno);
    if (st != TL_OK)
        unlink(temp);
out:
    tl_bytes_free(&head);
    tl_bytes_free(&body);
    return st;
}

enum tl_status tl_definition_remove(const char *dir, enum tl_entry_kind kind, const char *tenant, const char *id,
                                    struct tl_error *err)
{
    char name[NAME_CHARS], path[4096];
    if (!file_name(name, kind, tenant, id))
        return tl_fail_host_memory(err, sizeof(name));
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    if (unlink(path) != 0 && errno != ENOENT)
        return tl_fail_errno(err, "delete", path, errno);
    return TL_OK;
}

enum tl_status tl_state_dir_sync(const char *dir, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return tl_fail_errno(err, "open", dir, errno);
    if (fsync(fd) != 0)
        st = tl_fail_errno(err, "sync", dir, errno);
    close(fd);
    return st;
}

enum tl_status tl_state_dir_open(const char *dir, int *lock_fd, struct tl_error *err)
{
    char path[4096];
    *lock_fd = -1;
    if (mkdir(dir, 0700) != 0 && errno != EEXIST)
        return tl_fail_errno(err, "make the state directory", dir, errno);
    snprintf(path, sizeof(path), "%s/lock", dir);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return tl_fail_errno(err, "use the state directory", path, errno);
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        close(fd);
        return tl_fail(err, TL_ERR_IO, "the state directory %s is in use by another server", dir);
    }
    *lock_fd = fd;
    return TL_OK;
}

/* ---- reading ------------------------------------------------------------------------------------------------------ */

static bool get_text(const cJSON *o, const char *key, char *out, size_t cap)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, key);
    if (!cJSON_IsString(v) || strlen(v->valuestring) >= cap)
        return false;
    memcpy(out, v->valuestring, strlen(v->valuestring) + 1);
    return true;
}

static bool get_int(const cJSON *o, const char *key, int64_t min, int64_t max, int64_t *out)
{
    return tl_json_whole(cJSON_GetObjectItemCaseSensitive(o, key), min, max, out);
}

static bool get_tokens(const cJSON *o, struct tl_definition *d)
{
    const cJSON *a = cJSON_GetObjectItemCaseSensitive(o, "tokens"), *v;
    int n = cJSON_GetArraySize(a), i = 0;
    if (!cJSON_IsArray(a) || n < 1 || !(d->tokens = malloc((size_t)n * sizeof(*d->tokens))))
        return false;
    cJSON_ArrayForEach(v, a)
    {
        int64_t id;
        if (!tl_json_whole(v, 0, INT32_MAX, &id))
            return false;
        d->tokens[i++] = (int32_t)id;
    }
    d->n_tokens = n;
    return true;
}

static bool from_json(const cJSON *o, struct tl_definition *d)
{
    char kind[32];
    int64_t loops, max_loops, window, generation;
    const cJSON *meta = cJSON_GetObjectItemCaseSensitive(o, "metadata");
    bool repeatable = cJSON_GetObjectItemCaseSensitive(o, "idempotency") != NULL;
    if (!get_text(o, "kind", kind, sizeof(kind)))
        return false;
    int k = 0;
    while (k < TL_ENTRY_KINDS && strcmp(kind, kind_names[k]) != 0)
        k++;
    if (k == TL_ENTRY_KINDS)
        return false;
    d->kind = (enum tl_entry_kind)k;
    if (!get_text(o, "id", d->id, sizeof(d->id)) || !tl_entry_id_ok(d->id) ||
        !get_text(o, "tenant", d->tenant, sizeof(d->tenant)) || !get_text(o, "salt", d->salt, sizeof(d->salt)) ||
        !get_text(o, "fingerprint", d->fingerprint, sizeof(d->fingerprint)) ||
        !get_int(o, "loops", 1, TL_LOOPS_MAX, &loops) || !get_int(o, "max_loops", loops, TL_LOOPS_MAX, &max_loops) ||
        !get_int(o, "cache_window", 0, INT32_MAX, &window) ||
        !get_int(o, "ttl_seconds", 0, TL_JSON_INT_MAX, &d->ttl_seconds) ||
        !get_int(o, "created_at", 0, TL_JSON_INT_MAX, &d->created_at) ||
        !get_int(o, "expires_at", 0, TL_JSON_INT_MAX, &d->expires_at) ||
        !get_int(o, "generation", 0, TL_JSON_INT_MAX, &generation) || !get_tokens(o, d))
        return false;
    if (repeatable && !get_text(o, "idempotency", d->idempotency, sizeof(d->idempotency)))
        return false;
    d->loops = (int)loops;
    d->max_loops = (int)max_loops;
    d->cache_window = (int)window;
    d->generation = (uint64_t)generation;
    d->in_pool = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(o, "pool"));
    d->shared = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(o, "shared"));
    d->sliding = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(o, "sliding"));
    d->persist = true;
    if (meta && !(d->metadata = cJSON_PrintUnformatted(meta)))
        return false;
    return tl_definition_digest(d);
}

/* NULL: no definition, *why says what is wrong. */
static struct tl_definition *parse_file(const char *text, size_t n, const char *name, const char **why)
{
    const char *nl = memchr(text, '\n', n);
    size_t magic = strlen(FILE_MAGIC);
    char hex[65], own[NAME_CHARS];
    unsigned char hash[32];
    *why = "it does not begin like a definition";
    if (!nl || (size_t)(nl - text) != magic + 64 || memcmp(text, FILE_MAGIC, magic) != 0)
        return NULL;
    const char *body = nl + 1;
    size_t n_body = n - (size_t)(body - text);
    *why = "its checksum is wrong";
    if (gnutls_hash_fast(GNUTLS_DIG_SHA256, body, n_body, hash) != 0)
        return NULL;
    hex_of(hash, hex);
    if (memcmp(hex, text + magic, 64) != 0)
        return NULL;
    struct tl_definition *d = calloc(1, sizeof(*d));
    cJSON *o = cJSON_ParseWithLength(body, n_body);
    *why = "its fields are not those of a definition";
    bool ok = d && o && from_json(o, d);
    cJSON_Delete(o);
    if (ok && (!file_name(own, d->kind, d->tenant, d->id) || strcmp(own, name) != 0)) {
        *why = "it has the name of another one";
        ok = false;
    }
    if (ok)
        return d;
    tl_definition_free(d);
    return NULL;
}

static char *read_whole(const char *path, size_t *n)
{
    struct stat st;
    char *text = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK); /* a pipe must not hold up the start */
    *n = 0;
    if (fd < 0)
        return NULL;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0 && st.st_size <= FILE_BYTES_MAX)
        text = malloc((size_t)st.st_size);
    while (text && *n < (size_t)st.st_size) {
        ssize_t got = read(fd, text + *n, (size_t)st.st_size - *n);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        *n += (size_t)got;
    }
    close(fd);
    return text;
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

enum tl_status tl_definitions_load(const char *dir, void (*take)(void *arg, struct tl_definition *d), void *arg,
                                   struct tl_error *err)
{
    char path[4096], aside[4112];
    const struct dirent *e;
    DIR *d = opendir(dir);
    if (!d)
        return tl_fail_errno(err, "read the state directory", dir, errno);
    while ((e = readdir(d))) {
        const char *why = "it cannot be read";
        size_t n;
        if (strlen(e->d_name) > 200)
            continue;
        snprintf(path, sizeof(path), "%.3800s/%s", dir, e->d_name);
        if (ends_with(e->d_name, ".def.tmp"))
            unlink(path);
        if (!ends_with(e->d_name, ".def"))
            continue;
        char *text = read_whole(path, &n);
        struct tl_definition *def = text ? parse_file(text, n, e->d_name, &why) : NULL;
        free(text);
        if (def) {
            take(arg, def);
            continue;
        }
        snprintf(aside, sizeof(aside), "%s.bad", path);
        bool moved = rename(path, aside) == 0;
        tl_log(TL_LOG_WARN, "state file %s is %s: %s", e->d_name, moved ? "set aside" : "ignored", why);
    }
    closedir(d);
    return TL_OK;
}

/* ---- the store ---------------------------------------------------------------------------------------------------- */

struct op {
    struct op *next;
    struct tl_definition *put; /* NULL: remove */
    enum tl_entry_kind kind;
    char tenant[TL_TENANT_MAX + 1], id[TL_ENTRY_ID_MAX + 1];
    tl_stored_fn *done;
    void *arg;
    enum tl_status st;
    struct tl_error err;
};

struct tl_store {
    uv_loop_t *loop;
    const char *dir;
    uv_work_t work;
    bool working;
    struct op *head, **tail; /* not begun */
    struct op *batch;        /* in the thread pool */
};

enum tl_status tl_store_create(struct tl_store **out, uv_loop_t *loop, const char *dir, struct tl_error *err)
{
    struct tl_store *s = calloc(1, sizeof(*s));
    *out = s;
    if (!s)
        return tl_fail_host_memory(err, sizeof(*s));
    s->loop = loop;
    s->dir = dir;
    s->tail = &s->head;
    s->work.data = s;
    return TL_OK;
}

void tl_store_free(struct tl_store *s) { free(s); }

static void run_batch(uv_work_t *work)
{
    struct tl_store *s = work->data;
    struct tl_error err;
    for (struct op *o = s->batch; o; o = o->next)
        o->st = o->put ? tl_definition_write(s->dir, o->put, &o->err)
                       : tl_definition_remove(s->dir, o->kind, o->tenant, o->id, &o->err);
    if (tl_state_dir_sync(s->dir, &err) == TL_OK)
        return;
    for (struct op *o = s->batch; o; o = o->next)
        if (o->st == TL_OK) {
            o->st = err.status;
            o->err = err;
        }
}

static void start_batch(struct tl_store *s);

static void batch_done(uv_work_t *work, int status)
{
    struct tl_store *s = work->data;
    struct op *next, *o = s->batch;
    s->batch = NULL;
    s->working = false;
    for (; o; o = next) {
        next = o->next;
        if (status != 0)
            o->st = tl_fail(&o->err, TL_ERR_IO, "The state directory was not written: %s", uv_strerror(status));
        if (o->st != TL_OK)
            tl_log(TL_LOG_ERROR, "%s", o->err.msg);
        if (o->done)
            o->done(o->arg, o->st == TL_OK ? NULL : &o->err);
        tl_definition_free(o->put);
        free(o);
    }
    start_batch(s);
}

static void start_batch(struct tl_store *s)
{
    if (s->working || !s->head)
        return;
    s->batch = s->head;
    s->head = NULL;
    s->tail = &s->head;
    s->working = true;
    if (uv_queue_work(s->loop, &s->work, run_batch, batch_done) == 0)
        return;
    run_batch(&s->work);
    batch_done(&s->work, 0);
}

static void enqueue(struct tl_store *s, struct op *o, struct tl_definition *put, tl_stored_fn *done, void *arg)
{
    if (!o) {
        struct tl_error err;
        tl_fail_host_memory(&err, sizeof(*o));
        tl_definition_free(put);
        if (done)
            done(arg, &err);
        return;
    }
    o->put = put;
    o->done = done;
    o->arg = arg;
    *s->tail = o;
    s->tail = &o->next;
    start_batch(s);
}

void tl_store_put(struct tl_store *s, struct tl_definition *d, tl_stored_fn *done, void *arg)
{
    enqueue(s, calloc(1, sizeof(struct op)), d, done, arg);
}

void tl_store_remove(struct tl_store *s, enum tl_entry_kind kind, const char *tenant, const char *id,
                     tl_stored_fn *done, void *arg)
{
    struct op *o = calloc(1, sizeof(*o));
    if (o) {
        o->kind = kind;
        snprintf(o->tenant, sizeof(o->tenant), "%s", tenant);
        snprintf(o->id, sizeof(o->id), "%s", id);
    }
    enqueue(s, o, NULL, done, arg);
}
