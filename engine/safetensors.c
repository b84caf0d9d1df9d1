/* The header of a file is JSON and can be large, so its names are copied into our own memory and the tree is released before
 * weights are read. tensors[] is sorted by name once; look-up is a binary search. */
#include "safetensors.h"

#include "json.h"
#include "mem.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SHARDS_MAX  1024
#define TENSORS_MAX 1000000

struct shard {
    char *path;
    const uint8_t *bytes;
    size_t n_bytes;
    bool mapped;
};

struct tl_tensors {
    struct shard *shards;
    int n_shards;
    struct tl_tensor *tensors;
    int n_tensors;
};

static const struct {
    const char *name;
    enum tl_dtype dtype;
    int bits;
} dtypes[] = {
    {"F32", TL_DT_F32, 32},   {"BF16", TL_DT_BF16, 16},    {"F16", TL_DT_F16, 16},      {"I8", TL_DT_I8, 8},
    {"U8", TL_DT_U8, 8},      {"F64", TL_DT_OTHER, 64},    {"I64", TL_DT_OTHER, 64},    {"U64", TL_DT_OTHER, 64},
    {"I32", TL_DT_OTHER, 32}, {"U32", TL_DT_OTHER, 32},    {"I16", TL_DT_OTHER, 16},    {"U16", TL_DT_OTHER, 16},
    {"BOOL", TL_DT_OTHER, 8}, {"F8_E4M3", TL_DT_OTHER, 8}, {"F8_E5M2", TL_DT_OTHER, 8},
};

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct tl_tensor *)a)->name, ((const struct tl_tensor *)b)->name);
}

static int by_place(const void *a, const void *b)
{
    const struct tl_tensor *x = a, *y = b;
    return x->offset != y->offset ? (x->offset > y->offset) - (x->offset < y->offset)
                                  : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* ---- one entry of a header ---- */

/* A whole number from 0 to 2^53; -1 if item is anything else. */
static int64_t whole(const cJSON *item)
{
    double d = cJSON_IsNumber(item) ? item->valuedouble : -1;
    return d >= 0 && d <= 9007199254740992.0 && d == (double)(int64_t)d ? (int64_t)d : -1;
}

static enum tl_status read_shape(struct tl_tensor *t, const cJSON *shape, const char *path, struct tl_error *err)
{
    const cJSON *item;
    char text[64];
    if (!cJSON_IsArray(shape))
        return tl_fail(err, TL_ERR_BAD_FILE, "%s: tensor '%s' has no shape", path, t->name);
    t->n_elements = 1;
    cJSON_ArrayForEach(item, shape)
    {
        int64_t d = whole(item);
        if (t->n_dims == TL_TENSOR_DIMS_MAX)
            return tl_fail(err, TL_ERR_BAD_FILE, "%s: tensor '%s' has more than %d dimensions", path, t->name,
                           TL_TENSOR_DIMS_MAX);
        if (d < 0)
            return tl_fail(err, TL_ERR_BAD_FILE,
                           "%s: dimension %d of tensor '%s' is %s, allowed are whole numbers from 0 to 2^53", path,
                           t->n_dims, t->name, tl_json_shown(item, text, sizeof(text)));
        t->dim[t->n_dims] = d;
        if (__builtin_mul_overflow(t->n_elements, t->dim[t->n_dims], &t->n_elements))
            return tl_fail(err, TL_ERR_BAD_FILE, "%s: tensor '%s' has a shape of more than 2^63 elements", path,
                           t->name);
        t->n_dims++;
    }
    return TL_OK;
}

static enum tl_status read_dtype(struct tl_tensor *t, const cJSON *dtype, int *bits, const char *path,
                                 struct tl_error *err)
{
    if (!cJSON_IsString(dtype))
        return tl_fail(err, TL_ERR_BAD_FILE, "%s: tensor '%s' has no dtype", path, t->name);
    t->dtype = TL_DT_OTHER;
    *bits = 0; /* unknown: its size cannot be checked, only its place */
    snprintf(t->dtype_name, sizeof(t->dtype_name), "%s", dtype->valuestring);
    for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++)
        if (!strcmp(dtype->valuestring, dtypes[i].name)) {
            t->dtype = dtypes[i].dtype;
            *bits = dtypes[i].bits;
        }
    return TL_OK;
}

/* data_off: where the shard's data section begins. */
static enum tl_status read_entry(struct tl_tensor *t, const cJSON *entry, const struct shard *sh, int shard_idx,
                                 size_t data_off, struct tl_error *err)
{
    size_t n_data = sh->n_bytes - data_off;
    int64_t at[2] = {-1, -1}, expected;
    char from[64], to[64];
    int bits = 0, n = 0;
    const cJSON *item, *offsets = cJSON_GetObjectItemCaseSensitive(entry, "data_offsets");
    enum tl_status st;
    if (strlen(entry->string) > 500)
        return tl_fail(err, TL_ERR_BAD_FILE, "%s: a tensor name has %zu characters, allowed are 500", sh->path,
                       strlen(entry->string));
    t->name = tl_strdup(entry->string);
    if (!t->name)
        return tl_fail_host_memory(err, strlen(entry->string) + 1);
    if (!cJSON_IsObject(entry))
        return tl_fail(err, TL_ERR_BAD_FILE, "%s: the entry of tensor '%s' is not an object", sh->path, t->name);
    st = read_dtype(t, cJSON_GetObjectItemCaseSensitive(entry, "dtype"), &bits, sh->path, err);
    if (st == TL_OK)
        st = read_shape(t, cJSON_GetObjectItemCaseSensitive(entry, "shape"), sh->path, err);
    if (st != TL_OK)
        return st;
    if (cJSON_IsArray(offsets))
        cJSON_ArrayForEach(item, offsets)
        {
            if (n < 2)
                at[n] = whole(item);
            n++;
        }
    if (n != 2)
        return tl_fail(err, TL_ERR_BAD_FILE, "%s: tensor '%s' has %d data_offsets, expected are 2", sh->path, t->name,
                       n);
    if (at[0] < 0 || at[1] < at[0])
        return tl_fail(err, TL_ERR_BAD_FILE,
                       "%s: tensor '%s' has data_offsets [%s, %s], expected are two whole numbers from 0 in order",
                       sh->path, t->name, tl_json_shown(offsets->child, from, sizeof(from)),
                       tl_json_shown(offsets->child->next, to, sizeof(to)));
    if ((uint64_t)at[1] > n_data)
        return tl_fail(err, TL_ERR_BAD_FILE, "%s: tensor '%s' ends at byte %lld of the data, but only %zu are there",
                       sh->path, t->name, (long long)at[1], n_data);
    t->bytes = (size_t)(at[1] - at[0]);
    t->offset = data_off + (size_t)at[0];
    t->data = sh->bytes + t->offset;
    t->file = shard_idx;
    if (bits &&
        (__builtin_mul_overflow(t->n_elements, (int64_t)(bits / 8), &expected) || (uint64_t)expected != t->bytes))
        return tl_fail(err, TL_ERR_BAD_FILE,
                       "%s: tensor '%s' has %zu bytes, but its shape has %lld elements of %d bytes", sh->path, t->name,
                       t->bytes, (long long)t->n_elements, bits / 8);
    return TL_OK;
}

/* The tensors of one shard fill its data section exactly. */
static enum tl_status check_places(struct tl_tensor *t, int n, const struct shard *sh, size_t data_off,
                                   struct tl_error *err)
{
    size_t at = data_off;
    qsort(t, (size_t)n, sizeof(*t), by_place);
    for (int i = 0; i < n; i++) {
        if (t[i].offset != at)
            return tl_fail(err, TL_ERR_BAD_FILE,
                           "%s: tensor '%s' begins at byte %zu of the data, but the one before ends at %zu", sh->path,
                           t[i].name, t[i].offset - data_off, at - data_off);
        at = t[i].offset + t[i].bytes;
    }
    if (at != sh->n_bytes)
        return tl_fail(err, TL_ERR_BAD_FILE, "%s: the tensors end at byte %zu, but the file has %zu", sh->path, at,
                       sh->n_bytes);
    return TL_OK;
}

static enum tl_status read_header(struct tl_tensors *ts, int shard_idx, struct tl_error *err)
{
    const struct shard *sh = &ts->shards[shard_idx];
    uint64_t header = 0;
    struct cJSON *json = NULL;
    const cJSON *entry;
    char what[4200];
    static const char lfs[] = "version https://git-lfs";
    int n_new = 0, first = ts->n_tensors;
    enum tl_status st;
    if (sh->n_bytes < 8)
        return tl_fail(err, TL_ERR_BAD_FILE, "%s has %zu bytes, a safetensors file has at least 8", sh->path,
                       sh->n_bytes);
    for (int i = 7; i >= 0; i--)
        header = header << 8 | sh->bytes[i];
    if (sh->n_bytes >= sizeof(lfs) - 1 && !memcmp(sh->bytes, lfs, sizeof(lfs) - 1))
        return tl_fail(err, TL_ERR_BAD_FILE,
                       "%s is no weights but a Git LFS pointer of %zu bytes to them: fetch the file itself", sh->path,
                       sh->n_bytes);
    if (header > sh->n_bytes - 8)
        return tl_fail(err, TL_ERR_BAD_FILE, "%s says that its header has %llu bytes, but only %zu follow", sh->path,
                       (unsigned long long)header, sh->n_bytes - 8);
    if (header > TL_TENSOR_HEADER_MAX)
        return tl_fail(err, TL_ERR_BAD_FILE, "%s says that its header has %llu bytes, allowed are %u", sh->path,
                       (unsigned long long)header, TL_TENSOR_HEADER_MAX);
    snprintf(what, sizeof(what), "the header of %s", sh->path);
    st = tl_json_parse(&json, (const char *)sh->bytes + 8, (size_t)header, what, err);
    if (st != TL_OK)
        return st;
    if (!cJSON_IsObject(json)) {
        st = tl_fail(err, TL_ERR_BAD_FILE, "%s is not a JSON object", what);
        goto out;
    }
    cJSON_ArrayForEach(entry, json) n_new++;
    if (n_new > TENSORS_MAX - ts->n_tensors) {
        st = tl_fail(err, TL_ERR_BAD_FILE, "%s: more than %d tensors", sh->path, TENSORS_MAX);
        goto out;
    }
    struct tl_tensor *grown = tl_realloc(ts->tensors, (size_t)(ts->n_tensors + n_new + 1) * sizeof(*grown));
    if (!grown) {
        st = tl_fail_host_memory(err, (size_t)(ts->n_tensors + n_new + 1) * sizeof(*grown));
        goto out;
    }
    ts->tensors = grown;
    cJSON_ArrayForEach(entry, json)
    {
        if (!strcmp(entry->string, "__metadata__"))
            continue;
        struct tl_tensor *t = &ts->tensors[ts->n_tensors++];
        memset(t, 0, sizeof(*t));
        st = read_entry(t, entry, sh, shard_idx, 8 + (size_t)header, err);
        if (st != TL_OK)
            goto out;
    }
    st = check_places(ts->tensors + first, ts->n_tensors - first, sh, 8 + (size_t)header, err);
out:
    tl_json_free(json);
    return st;
}

/* ---- files ---- */

static enum tl_status map_shard(struct shard *sh, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    struct stat sb;
    int fd = open(sh->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* no waiting for the writer of a pipe */
    if (fd < 0)
        return errno == ENOENT ? tl_fail(err, TL_ERR_NOT_FOUND,
                                         lstat(sh->path, &sb) == 0 ? "'%s' links to a file that is not there"
                                                                   : "there is no file '%s'",
                                         sh->path)
                               : tl_fail_errno(err, "open", sh->path, errno);
    if (fstat(fd, &sb) != 0) {
        st = tl_fail_errno(err, "read", sh->path, errno);
    } else if (!S_ISREG(sb.st_mode)) {
        st = tl_fail(err, TL_ERR_BAD_FILE, "'%s' is not a regular file", sh->path);
    } else if (sb.st_size < 8) {
        st = tl_fail(err, TL_ERR_BAD_FILE, "%s has %lld bytes, a safetensors file has at least 8", sh->path,
                     (long long)sb.st_size);
    } else {
        void *p = mmap(NULL, (size_t)sb.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED) {
            st = tl_fail_errno(err, "map", sh->path, errno);
        } else {
            sh->bytes = p;
            sh->n_bytes = (size_t)sb.st_size;
            sh->mapped = true;
            (void)madvise(p, sh->n_bytes, MADV_SEQUENTIAL);
        }
    }
    close(fd);
    return st;
}

/* Append a shard by file name (kept as a path); its header is not read yet. */
static enum tl_status add_shard(struct tl_tensors *ts, const char *dir, const char *name, struct tl_error *err)
{
    size_t n = strlen(dir) + strlen(name) + 2;
    struct shard *grown = tl_realloc(ts->shards, (size_t)(ts->n_shards + 1) * sizeof(*grown));
    if (!grown)
        return tl_fail_host_memory(err, (size_t)(ts->n_shards + 1) * sizeof(*grown));
    ts->shards = grown;
    struct shard *sh = &grown[ts->n_shards];
    memset(sh, 0, sizeof(*sh));
    sh->path = tl_malloc(n);
    if (!sh->path)
        return tl_fail_host_memory(err, n);
    snprintf(sh->path, n, "%s%s%s", dir, *dir ? "/" : "", name);
    ts->n_shards++;
    return TL_OK;
}

static int by_text(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

/* The shards that the index names, each once, in order of name. */
static enum tl_status add_indexed(struct tl_tensors *ts, const cJSON *map, const char *dir, const char *path,
                                  struct tl_error *err)
{
    const cJSON *entry;
    enum tl_status st = TL_OK;
    size_t n = 0, i = 0;
    cJSON_ArrayForEach(entry, map) n++;
    const char **names = tl_array(n, sizeof(*names));
    if (!names)
        return tl_fail_host_memory(err, n * sizeof(*names));
    cJSON_ArrayForEach(entry, map)
    {
        const char *name = cJSON_IsString(entry) ? entry->valuestring : "";
        if (!*name || strchr(name, '/') || name[0] == '.' || strlen(name) > 255) {
            st = tl_fail(err, TL_ERR_BAD_FILE, "%s: the shard of tensor '%.100s' is not a plain file name", path,
                         entry->string);
            goto out;
        }
        names[i++] = name;
    }
    qsort(names, n, sizeof(*names), by_text);
    for (i = 0; i < n && st == TL_OK; i++) {
        if (i && !strcmp(names[i], names[i - 1]))
            continue;
        if (ts->n_shards == SHARDS_MAX)
            st = tl_fail(err, TL_ERR_BAD_FILE, "%s names more than %d shards", path, SHARDS_MAX);
        else
            st = add_shard(ts, dir, names[i], err);
    }
out:
    tl_free(names);
    return st;
}

/* Every tensor of the index is in the shard that it names. */
static enum tl_status check_indexed(const struct tl_tensors *ts, const cJSON *map, const char *path,
                                    struct tl_error *err)
{
    const cJSON *entry;
    cJSON_ArrayForEach(entry, map)
    {
        const struct tl_tensor *t = tl_tensors_find(ts, entry->string);
        const char *file = t ? strrchr(ts->shards[t->file].path, '/') : NULL;
        if (!t || strcmp(file ? file + 1 : ts->shards[t->file].path, entry->valuestring) != 0)
            return tl_fail(err, TL_ERR_BAD_FILE, "%s: tensor '%.100s' is not in '%.100s'", path, entry->string,
                           entry->valuestring);
    }
    return TL_OK;
}

static enum tl_status read_shards(struct tl_tensors *ts, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    for (int i = 0; i < ts->n_shards && st == TL_OK; i++) {
        if (!ts->shards[i].bytes)
            st = map_shard(&ts->shards[i], err);
        if (st == TL_OK)
            st = read_header(ts, i, err);
    }
    if (st != TL_OK || !ts->n_tensors)
        return st;
    qsort(ts->tensors, (size_t)ts->n_tensors, sizeof(*ts->tensors), by_name);
    for (int i = 1; i < ts->n_tensors; i++)
        if (!strcmp(ts->tensors[i - 1].name, ts->tensors[i].name))
            return tl_fail(err, TL_ERR_BAD_FILE, "tensor '%s' is in both '%s' and '%s'", ts->tensors[i].name,
                           ts->shards[ts->tensors[i - 1].file].path, ts->shards[ts->tensors[i].file].path);
    return TL_OK;
}

static bool has_pickle(const char *dir)
{
    char path[3600];
    snprintf(path, sizeof(path), "%s/pytorch_model.bin", dir);
    if (access(path, F_OK) == 0)
        return true;
    snprintf(path, sizeof(path), "%s/pytorch_model.bin.index.json", dir);
    return access(path, F_OK) == 0;
}

enum tl_status tl_tensors_open(struct tl_tensors **out, const char *dir, struct tl_error *err)
{
    char path[3600], index[3700];
    char *text = NULL;
    size_t n_text = 0;
    struct cJSON *json = NULL;
    const cJSON *map = NULL;
    enum tl_status st;
    struct tl_tensors *ts = NULL;
    struct stat sb;
    *out = NULL;
    if (strlen(dir) > 3500)
        return tl_fail(err, TL_ERR_BAD_PARAM, "the directory name has %zu characters, allowed are 3500", strlen(dir));
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    snprintf(index, sizeof(index), "%s.index.json", path);
    ts = tl_calloc(1, sizeof(*ts));
    if (!ts)
        return tl_fail_host_memory(err, sizeof(*ts));
    if (lstat(path, &sb) == 0) { /* a link to nowhere counts */
        st = add_shard(ts, dir, "model.safetensors", err);
    } else if (lstat(index, &sb) == 0) {
        st = tl_file_read(&text, &n_text, index, TL_TENSOR_HEADER_MAX, err);
        if (st == TL_OK)
            st = tl_json_parse(&json, text, n_text, index, err);
        if (st == TL_OK) {
            map = cJSON_IsObject(json) ? cJSON_GetObjectItemCaseSensitive(json, "weight_map") : NULL;
            if (!cJSON_IsObject(map) || !map->child)
                st = tl_fail(err, TL_ERR_BAD_FILE, "%s: 'weight_map' is missing", index);
            else
                st = add_indexed(ts, map, dir, index, err);
        }
    } else {
        st = tl_fail(err, TL_ERR_NOT_FOUND, "'%s' has neither model.safetensors nor model.safetensors.index.json%s",
                     dir, has_pickle(dir) ? ", only pickled weights (pytorch_model.bin), which are not read" : "");
    }
    if (st == TL_OK)
        st = read_shards(ts, err);
    if (st == TL_OK && map)
        st = check_indexed(ts, map, index, err);
    if (st == TL_OK) {
        *out = ts;
        ts = NULL;
    }
    tl_json_free(json);
    tl_free(text);
    tl_tensors_free(ts);
    return st;
}

enum tl_status tl_tensors_open_bytes(struct tl_tensors **out, const uint8_t *bytes, size_t n_bytes,
                                     struct tl_error *err)
{
    enum tl_status st;
    struct tl_tensors *ts = tl_calloc(1, sizeof(*ts));
    *out = NULL;
    if (!ts)
        return tl_fail_host_memory(err, sizeof(*ts));
    st = add_shard(ts, "", "(memory)", err);
    if (st == TL_OK) {
        ts->shards[0].bytes = bytes;
        ts->shards[0].n_bytes = n_bytes;
        st = read_shards(ts, err);
    }
    if (st == TL_OK) {
        *out = ts;
        ts = NULL;
    }
    tl_tensors_free(ts);
    return st;
}

void tl_tensors_free(struct tl_tensors *ts)
{
    if (!ts)
        return;
    for (int i = 0; i < ts->n_tensors; i++)
        tl_free((char *)ts->tensors[i].name);
    for (int i = 0; i < ts->n_shards; i++) {
        if (ts->shards[i].mapped)
            munmap((void *)ts->shards[i].bytes, ts->shards[i].n_bytes);
        tl_free(ts->shards[i].path);
    }
    tl_free(ts->tensors);
    tl_free(ts->shards);
    tl_free(ts);
}

int tl_tensors_count(const struct tl_tensors *ts) { return ts->n_tensors; }
const struct tl_tensor *tl_tensors_at(const struct tl_tensors *ts, int i) { return &ts->tensors[i]; }
const char *tl_tensors_file(const struct tl_tensors *ts, int file) { return ts->shards[file].path; }

const struct tl_tensor *tl_tensors_find(const struct tl_tensors *ts, const char *name)
{
    struct tl_tensor key = {.name = name};
    return ts->n_tensors ? bsearch(&key, ts->tensors, (size_t)ts->n_tensors, sizeof(key), by_name) : NULL;
}

uint64_t tl_tensors_file_bytes(const struct tl_tensors *ts)
{
    uint64_t n = 0;
    for (int i = 0; i < ts->n_shards; i++)
        n += ts->shards[i].n_bytes;
    return n;
}

void tl_tensors_drop(const struct tl_tensors *ts, const struct tl_tensor *t)
{
    /* Whole pages inside the tensor: those at its ends belong to its neighbours, too. */
    size_t page = (size_t)sysconf(_SC_PAGESIZE), from = (t->offset + page - 1) / page * page;
    size_t to = (t->offset + t->bytes) / page * page;
    if (ts->shards[t->file].mapped && to > from)
        (void)madvise((void *)(ts->shards[t->file].bytes + from), to - from, MADV_DONTNEED);
}

const char *tl_tensor_shape(const struct tl_tensor *t, char *buf, size_t n)
{
    size_t len = (size_t)snprintf(buf, n, "[");
    for (int i = 0; i < t->n_dims && len < n; i++)
        len += (size_t)snprintf(buf + len, n - len, "%s%lld", i ? ", " : "", (long long)t->dim[i]);
    if (len < n)
        snprintf(buf + len, n - len, "]");
    return buf;
}
