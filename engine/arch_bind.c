/* The binding: every weight that a spec needs, found in the files, with its shape and dtype checked, and no tensor left over. */
#include "arch_bind.h"

#include "mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME_BYTES       640
#define CONFIG_BYTES_MAX (1u << 20)

static const struct tl_weight_name *name_of(const struct tl_arch *a, enum tl_weight w)
{
    for (int i = 0; i < a->n_names; i++)
        if (a->names[i].weight == w)
            return &a->names[i];
    return NULL;
}

/* Full tensor name; layer counts through prelude, core and coda. */
static const char *full_name(const struct tl_arch *a, const struct tl_arch_spec *s, const struct tl_weight_name *row,
                             int layer, int part, char *buf, size_t n)
{
    int g = 0;
    if (row->weight == TL_WT_UP && s->mlp == TL_MLP_RELU2 && row->part[1])
        part = 1; /* without a gate the up rows are all there is */
    if (row->weight >= TL_WT_LAYER_COUNT) {
        snprintf(buf, n, "%s", row->part[part]);
        return buf;
    }
    if (layer >= s->n_prelude) {
        layer -= s->n_prelude;
        g = 1;
        if (layer >= s->n_core) {
            layer -= s->n_core;
            g = 2;
        }
    }
    snprintf(buf, n, "%s%d.%s", a->group[g], layer, row->part[part]);
    return buf;
}

const char *tl_arch_tensor_name(const struct tl_arch *a, const struct tl_arch_spec *s, enum tl_weight w, int layer,
                                int part, char *buf, size_t n)
{
    const struct tl_weight_name *row = name_of(a, w);
    return row ? full_name(a, s, row, layer, part, buf, n) : NULL;
}

bool tl_arch_fuses(const struct tl_arch *a, enum tl_weight w)
{
    const struct tl_weight_name *row = name_of(a, w);
    return row && !row->part[1];
}

static enum tl_status wrong_shape(const struct tl_tensor *t, const char *expected, struct tl_error *err)
{
    char shape[200];
    return tl_fail(err, TL_ERR_BAD_FILE, "tensor '%s' has shape %s, expected is %s", t->name,
                   tl_tensor_shape(t, shape, sizeof(shape)), expected);
}

static enum tl_status want_matrix(const struct tl_tensor *t, int64_t rows, int64_t cols, struct tl_error *err)
{
    char expected[64];
    if (t->n_dims == 2 && t->dim[0] == rows && t->dim[1] == cols)
        return TL_OK;
    snprintf(expected, sizeof(expected), "[%lld, %lld]", (long long)rows, (long long)cols);
    return wrong_shape(t, expected, err);
}

/* Vectors come in any shape (e.g. [2, 1, heads, width]), so only their length is compared. */
static enum tl_status want_vector(const struct tl_tensor *t, int64_t n, struct tl_error *err)
{
    char expected[64];
    if (t->dtype != TL_DT_F32 && t->dtype != TL_DT_BF16 && t->dtype != TL_DT_F16)
        return tl_fail(err, TL_ERR_BAD_FILE, "tensor '%s' has dtype %s, expected is F32, BF16 or F16", t->name,
                       t->dtype_name);
    if (t->n_elements == n)
        return TL_OK;
    snprintf(expected, sizeof(expected), "[%lld]", (long long)n);
    return wrong_shape(t, expected, err);
}

static enum tl_status find_companion(const struct tl_tensor **out, const struct tl_tensors *ts, const char *base,
                                     const char *suffix, enum tl_dtype dtype, struct tl_error *err)
{
    char name[NAME_BYTES];
    snprintf(name, sizeof(name), "%s%s", base, suffix);
    *out = tl_tensors_find(ts, name);
    if (!*out)
        return tl_fail(err, TL_ERR_BAD_FILE, "tensor '%s' is missing", name);
    if ((*out)->dtype != dtype)
        return tl_fail(err, TL_ERR_BAD_FILE, "tensor '%s' has dtype %s, expected is %s", name, (*out)->dtype_name,
                       dtype == TL_DT_U8 ? "U8" : "F32");
    return TL_OK;
}

/* Find the tensor(s) that store part of a matrix, whatever their weight type is. */
static enum tl_status bind_matrix_part(struct tl_bind_part *p, enum tl_wtype *wtype, const struct tl_tensors *ts,
                                       const char *name, int64_t n_in, struct tl_error *err)
{
    char q4[NAME_BYTES + 8];
    enum tl_status st;
    p->t = tl_tensors_find(ts, name);
    snprintf(q4, sizeof(q4), "%s_q4", name);
    if (!p->t && (p->t = tl_tensors_find(ts, q4))) {
        *wtype = TL_W_INT4;
        if (n_in % 32)
            return tl_fail(err, TL_ERR_BAD_FILE, "tensor '%s' is INT4, but its %lld inputs are no multiple of 32", q4,
                           (long long)n_in);
        if (p->t->dtype != TL_DT_U8)
            return tl_fail(err, TL_ERR_BAD_FILE, "tensor '%s' has dtype %s, expected is U8", q4, p->t->dtype_name);
        st = want_matrix(p->t, p->rows, n_in / 2, err);
        if (st == TL_OK)
            st = find_companion(&p->group_scale, ts, name, "_gscale", TL_DT_U8, err);
        if (st == TL_OK)
            st = want_matrix(p->group_scale, p->rows, (n_in + 63) / 64, err);
    } else if (!p->t) {
        return tl_fail(err, TL_ERR_BAD_FILE, "tensor '%s' is missing", name);
    } else {
        switch (p->t->dtype) {
        case TL_DT_F32:
        case TL_DT_F16: *wtype = TL_W_F32; break;
        case TL_DT_BF16: *wtype = TL_W_BF16; break;
        case TL_DT_I8: *wtype = TL_W_INT8; break;
        default:
            return tl_fail(err, TL_ERR_BAD_FILE, "tensor '%s' has dtype %s, which is no weight type", name,
                           p->t->dtype_name);
        }
        st = want_matrix(p->t, p->rows, n_in, err);
    }
    if (st == TL_OK && (*wtype == TL_W_INT8 || *wtype == TL_W_INT4))
        st = find_companion(&p->row_scale, ts, name, "_scale", TL_DT_F32, err);
    if (st == TL_OK && p->row_scale)
        st = want_vector(p->row_scale, p->rows, err);
    return st;
}

static enum tl_status bind_weight(struct tl_arch_binding *b, enum tl_weight w, int layer,
                                  const struct tl_weight_name *row, struct tl_error *err)
{
    struct tl_bind *bind = &b->binds[b->n_binds];
    struct tl_weight_shape shape = tl_weight_shape(&b->spec, w);
    char name[NAME_BYTES];
    enum tl_status st = TL_OK;
    memset(bind, 0, sizeof(*bind));
    bind->weight = w;
    bind->layer = layer;
    bind->n_in = shape.n_in;
    for (int i = 0; i < shape.n_parts; i++)
        bind->rows += shape.rows[i];
    bind->n_parts = row->part[1] ? shape.n_parts : 1;
    for (int i = 0; i < bind->n_parts && st == TL_OK; i++) {
        struct tl_bind_part *p = &bind->part[i];
        enum tl_wtype wtype = TL_W_F32;
        p->rows = bind->n_parts == 1 ? bind->rows : shape.rows[i];
        full_name(b->arch, &b->spec, row, layer, i, name, sizeof(name));
        if (bind->n_in) {
            st = bind_matrix_part(p, &wtype, b->tensors, name, bind->n_in, err);
        } else {
            p->t = tl_tensors_find(b->tensors, name);
            st = p->t ? want_vector(p->t, p->rows, err) : tl_fail(err, TL_ERR_BAD_FILE, "tensor '%s' is missing", name);
        }
        if (st == TL_OK && i && wtype != bind->wtype)
            st = tl_fail(err, TL_ERR_BAD_FILE, "tensors '%s' and '%s' belong together, but one is %s and the other %s",
                         bind->part[0].t->name, p->t->name, tl_wtype_name(bind->wtype), tl_wtype_name(wtype));
        bind->wtype = wtype;
    }
    if (st == TL_OK)
        b->n_binds++;
    return st;
}

/* A tied model keeps its embedding under either name, or under both. */
static const struct tl_weight_name *embed_name(struct tl_arch_binding *b, const struct tl_weight_name *embed)
{
    const struct tl_weight_name *head = name_of(b->arch, TL_WT_HEAD);
    if (!b->spec.tied_head || !head)
        return embed;
    b->embed = tl_tensors_find(b->tensors, embed->part[0]);
    b->head_copy = tl_tensors_find(b->tensors, head->part[0]);
    if (b->embed && b->head_copy)
        return embed;
    embed = !b->embed && b->head_copy ? head : embed;
    b->embed = b->head_copy = NULL;
    return embed;
}

static enum tl_status bind_all(struct tl_arch_binding *b, struct tl_error *err)
{
    int n_layers = tl_n_layers(&b->spec);
    size_t n = (size_t)n_layers * TL_WT_LAYER_COUNT + TL_WT_COUNT;
    enum tl_status st = TL_OK;
    b->binds = tl_array(n, sizeof(*b->binds));
    if (!b->binds)
        return tl_fail_host_memory(err, n * sizeof(*b->binds));
    for (int w = 0; w < TL_WT_COUNT && st == TL_OK; w++) {
        const struct tl_weight_name *row = name_of(b->arch, (enum tl_weight)w);
        bool in_layer = w < TL_WT_LAYER_COUNT;
        if (w == TL_WT_EMBED)
            row = embed_name(b, row);
        for (int layer = in_layer ? 0 : -1; layer < (in_layer ? n_layers : 0) && st == TL_OK; layer++) {
            if (!tl_weight_needed(&b->spec, (enum tl_weight)w, layer))
                continue;
            TL_ASSERT(row);
            st = bind_weight(b, (enum tl_weight)w, layer, row, err);
        }
    }
    return st;
}

static int by_place(const void *a, const void *b)
{
    const struct tl_bind *bx = a, *by = b;
    const struct tl_tensor *x = bx->part[0].t, *y = by->part[0].t;
    if (x->file != y->file)
        return x->file - y->file;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return (int)bx->weight - (int)by->weight; /* two weights out of one tensor */
}

static int by_pointer(const void *a, const void *b)
{
    const struct tl_tensor *x = *(const struct tl_tensor *const *)a, *y = *(const struct tl_tensor *const *)b;
    return (x > y) - (x < y);
}

/* A tensor that nothing uses means that the model is not what its config says. */
static enum tl_status refuse_leftovers(const struct tl_arch_binding *b, struct tl_error *err)
{
    int n_used = 0, n = tl_tensors_count(b->tensors);
    const struct tl_tensor **used = tl_array((size_t)b->n_binds * 9 + 1, sizeof(*used));
    enum tl_status st = TL_OK;
    if (!used)
        return tl_fail_host_memory(err, ((size_t)b->n_binds * 9 + 1) * sizeof(*used));
    for (int i = 0; i < b->n_binds; i++)
        for (int j = 0; j < b->binds[i].n_parts; j++) {
            const struct tl_bind_part *p = &b->binds[i].part[j];
            used[n_used++] = p->t;
            if (p->row_scale)
                used[n_used++] = p->row_scale;
            if (p->group_scale)
                used[n_used++] = p->group_scale;
        }
    if (b->head_copy)
        used[n_used++] = b->head_copy;
    qsort(used, (size_t)n_used, sizeof(*used), by_pointer);
    for (int i = 0; i < n && st == TL_OK; i++) {
        const struct tl_tensor *t = tl_tensors_at(b->tensors, i);
        if (!bsearch(&t, used, (size_t)n_used, sizeof(*used), by_pointer) && !tl_arch_tensor_ignored(b->arch, t->name))
            st = tl_fail(err, TL_ERR_BAD_FILE, "tensor '%s' has no place in a model of type '%s' with this config.json",
                         t->name, b->arch->model_type);
    }
    tl_free(used);
    return st;
}

enum tl_status tl_arch_bind(struct tl_arch_binding **out, const char *config, size_t config_bytes,
                            struct tl_tensors *ts, const struct tl_arch_params *params, struct tl_error *err)
{
    enum tl_status st;
    struct tl_arch_binding *b = tl_calloc(1, sizeof(*b));
    *out = NULL;
    if (!b) {
        tl_tensors_free(ts);
        return tl_fail_host_memory(err, sizeof(*b));
    }
    b->tensors = ts;
    st = tl_arch_read_config(&b->spec, &b->arch, config, config_bytes, ts, params, err);
    if (st != TL_OK)
        goto out;
    b->config = tl_malloc(config_bytes + 1);
    if (!b->config) {
        st = tl_fail_host_memory(err, config_bytes + 1);
        goto out;
    }
    memcpy(b->config, config, config_bytes);
    b->config[config_bytes] = 0;
    b->config_bytes = config_bytes;
    st = bind_all(b, err);
    if (st == TL_OK)
        st = refuse_leftovers(b, err);
    if (st != TL_OK)
        goto out;
    qsort(b->binds, (size_t)b->n_binds, sizeof(*b->binds), by_place);
    *out = b;
    b = NULL;
out:
    tl_arch_free(b);
    return st;
}

/* generation_config.json may name more ids that end an answer. */
static enum tl_status read_generation_config(struct tl_arch_spec *s, const char *dir, struct tl_error *err)
{
    char path[4096], *text = NULL;
    size_t n = 0;
    int64_t ids[TL_STOP_IDS_MAX];
    struct cJSON *json = NULL;
    struct tl_json_reader r;
    snprintf(path, sizeof(path), "%s/generation_config.json", dir);
    enum tl_status st = tl_file_read(&text, &n, path, CONFIG_BYTES_MAX, err);
    if (st == TL_ERR_NOT_FOUND)
        return TL_OK;
    if (st == TL_OK)
        st = tl_json_parse(&json, text, n, path, err);
    if (st == TL_OK) {
        tl_json_reader_init(&r, json, path, err);
        int n_ids = tl_json_ints(&r, "eos_token_id", 0, s->vocab_size - 1, ids, TL_STOP_IDS_MAX);
        for (int i = 0; i < n_ids; i++)
            tl_arch_add_stop_id(s, ids[i]);
        st = r.st;
    }
    tl_json_free(json);
    tl_free(text);
    return st;
}

enum tl_status tl_arch_open(struct tl_arch_binding **out, const char *dir, const struct tl_arch_params *params,
                            struct tl_error *err)
{
    char path[4096], *config = NULL;
    size_t n = 0;
    struct tl_tensors *ts = NULL;
    struct tl_arch_binding *b = NULL;
    *out = NULL;
    if (strlen(dir) > 3500)
        return tl_fail(err, TL_ERR_BAD_PARAM, "the directory name has %zu characters, allowed are 3500", strlen(dir));
    snprintf(path, sizeof(path), "%s/config.json", dir);
    enum tl_status st = tl_file_read(&config, &n, path, CONFIG_BYTES_MAX, err);
    if (st == TL_OK)
        st = tl_tensors_open(&ts, dir, err);
    if (st == TL_OK)
        st = tl_arch_bind(&b, config, n, ts, params, err);
    if (st == TL_OK)
        st = read_generation_config(&b->spec, dir, err);
    if (st == TL_OK) {
        *out = b;
        b = NULL;
    }
    tl_free(config);
    tl_arch_free(b);
    return st;
}

void tl_arch_free(struct tl_arch_binding *b)
{
    if (!b)
        return;
    tl_tensors_free(b->tensors);
    tl_free(b->config);
    tl_free(b->binds);
    tl_free(b);
}
