#include "weights.h"

#include "mem.h"
#include "quant.h"
#include "rope.h"
#include "sha256.h"

#include <stdlib.h>
#include <string.h>

/* ---- values as F32 ---- */

static float load_f32(const uint8_t *p)
{
    float f;
    memcpy(&f, p, sizeof(f));
    return f;
}

static uint16_t load_u16(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}

static uint32_t load_u32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}

static void to_f32(const struct tl_tensor *t, int64_t from, int64_t n, float *out)
{
    if (t->dtype == TL_DT_F32)
        memcpy(out, t->data + 4 * from, (size_t)n * 4);
    else if (t->dtype == TL_DT_BF16)
        for (int64_t i = 0; i < n; i++)
            out[i] = tl_bf16_to_f32(load_u16(t->data + 2 * (from + i)));
    else
        for (int64_t i = 0; i < n; i++)
            out[i] = tl_f16_to_f32(load_u16(t->data + 2 * (from + i)));
}

static void read_part(const struct tl_bind *w, const struct tl_bind_part *p, int64_t row, int64_t n, float *out)
{
    int64_t n_in = w->n_in ? w->n_in : 1;
    if (!w->n_in || w->wtype == TL_W_F32 || w->wtype == TL_W_BF16) {
        to_f32(p->t, row * n_in, n * n_in, out);
        return;
    }
    for (int64_t i = row; i < row + n; i++, out += n_in) {
        float scale = load_f32(p->row_scale->data + 4 * i);
        if (w->wtype == TL_W_INT8)
            tl_unpack_int8_row((const int8_t *)p->t->data + i * n_in, scale, n_in, out);
        else
            tl_unpack_int4_row(p->t->data + (size_t)i * tl_q4_row_bytes(n_in),
                               p->group_scale->data + (size_t)i * tl_q4_gscale_bytes(n_in), scale, n_in, out);
    }
}

void tl_bind_read(const struct tl_bind *w, int64_t row, int64_t n, float *out)
{
    int64_t first = 0;
    for (int i = 0; i < w->n_parts && n; first += w->part[i].rows, i++) {
        const struct tl_bind_part *p = &w->part[i];
        if (row >= first + p->rows)
            continue;
        int64_t take = first + p->rows - row < n ? first + p->rows - row : n;
        read_part(w, p, row - first, take, out);
        out += take * (w->n_in ? w->n_in : 1);
        row += take;
        n -= take;
    }
}

/* ---- checks: fast over blocks, exact about the first offender ---- */

#define CHECK_BLOCK ((size_t)16384) /* bytes; a multiple of 16 */

typedef uint32_t u32x4 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t u16x8 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint8_t u8x16 __attribute__((vector_size(16), aligned(1), may_alias));

/* Whether any element of `width` bytes (1, 2, 4) in a block has these bits under mask. */
static bool block_holds(const uint8_t *p, size_t bytes, int width, uint32_t mask, uint32_t bits)
{
    u8x16 found = {0};
    size_t i = 0;
    if (width == 4)
        for (; i + 16 <= bytes; i += 16)
            found |= (u8x16)((*(const u32x4 *)(p + i) & mask) == bits);
    else if (width == 2)
        for (; i + 16 <= bytes; i += 16)
            found |= (u8x16)((*(const u16x8 *)(p + i) & (uint16_t)mask) == (uint16_t)bits);
    else
        for (; i + 16 <= bytes; i += 16)
            found |= (u8x16)((*(const u8x16 *)(p + i) & (uint8_t)mask) == (uint8_t)bits);
    for (; i < bytes; i += (size_t)width) {
        uint32_t v = width == 1 ? p[i] : width == 2 ? load_u16(p + i) : load_u32(p + i);
        found[0] |= (v & mask) == bits;
    }
    for (i = 1; i < 16; i++)
        found[0] |= found[i];
    return found[0];
}

/* Index of the first such element of a tensor's data, or -1. */
static int64_t find_bits(const struct tl_tensor *t, int width, uint32_t mask, uint32_t bits)
{
    for (size_t from = 0; from < t->bytes; from += CHECK_BLOCK) {
        size_t n = t->bytes - from < CHECK_BLOCK ? t->bytes - from : CHECK_BLOCK;
        if (!block_holds(t->data + from, n, width, mask, bits))
            continue;
        for (size_t i = from;; i += (size_t)width)
            if (block_holds(t->data + i, (size_t)width, width, mask, bits))
                return (int64_t)(i / (size_t)width);
    }
    return -1;
}

/* Infinities and NaNs are the values with all exponent bits set. */
static enum tl_status check_floats(const struct tl_tensor *t, struct tl_error *err)
{
    int width = t->dtype == TL_DT_F32 ? 4 : 2;
    uint32_t mask = t->dtype == TL_DT_F32 ? 0x7F800000u : t->dtype == TL_DT_BF16 ? 0x7F80u : 0x7C00u;
    int64_t at = find_bits(t, width, mask, mask);
    float v;
    if (at < 0)
        return TL_OK;
    to_f32(t, at, 1, &v);
    tl_fail(err, TL_ERR_BAD_FILE, "tensor '%s' has the value %g at index %lld", t->name, (double)v, (long long)at);
    tl_error_num(err, "index", at);
    return TL_ERR_BAD_FILE;
}

static enum tl_status check_int8(const struct tl_tensor *t, struct tl_error *err)
{
    const void *at = memchr(t->data, 0x80, t->bytes);
    return at ? tl_fail(err, TL_ERR_BAD_FILE, "tensor '%s' has the value -128 at index %lld, allowed are -127 to 127",
                        t->name, (long long)((const uint8_t *)at - t->data))
              : TL_OK;
}

static enum tl_status check_int4(const struct tl_tensor *t, struct tl_error *err)
{
    int64_t low = find_bits(t, 1, 0x0F, 0x08), high = find_bits(t, 1, 0xF0, 0x80);
    int64_t at = low >= 0 && (high < 0 || low <= high) ? 2 * low : 2 * high + 1;
    return low < 0 && high < 0
               ? TL_OK
               : tl_fail(err, TL_ERR_BAD_FILE, "tensor '%s' has the value -8 at index %lld, allowed are -7 to 7",
                         t->name, (long long)at);
}

static enum tl_status check_group_scales(const struct tl_tensor *t, int64_t rows, int64_t n_groups,
                                         struct tl_error *err)
{
    int64_t row_bytes = (n_groups + 1) / 2;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t g = 0; g < n_groups; g++)
            if (!(t->data[r * row_bytes + g / 2] >> (g % 2 * 4) & 15))
                return tl_fail(err, TL_ERR_BAD_FILE,
                               "tensor '%s' has the group scale 0 in row %lld, group %lld, allowed are 1 to 15",
                               t->name, (long long)r, (long long)g);
    return TL_OK;
}

static enum tl_status check_row_scales(const struct tl_tensor *t, struct tl_error *err)
{
    for (int64_t i = 0; i < t->n_elements; i++) {
        float v = load_f32(t->data + 4 * i);
        if (!(v >= 0 && v <= 3e38f))
            return tl_fail(err, TL_ERR_BAD_FILE,
                           "tensor '%s' has the scale %g at index %lld, allowed are finite ones from 0", t->name,
                           (double)v, (long long)i);
    }
    return TL_OK;
}

/* A tied model may store its matrix under both names; then both are the same. */
static enum tl_status check_tied(const struct tl_arch_binding *b, struct tl_error *err)
{
    if (!b->head_copy)
        return TL_OK;
    bool same = b->embed->dtype == b->head_copy->dtype && b->embed->bytes == b->head_copy->bytes &&
                memcmp(b->embed->data, b->head_copy->data, b->embed->bytes) == 0;
    tl_tensors_drop(b->tensors, b->head_copy);
    return same ? TL_OK
                : tl_fail(err, TL_ERR_BAD_FILE, "the config ties head and embedding, but '%s' and '%s' differ",
                          b->head_copy->name, b->embed->name);
}

enum tl_status tl_bind_check(const struct tl_arch_binding *b, const struct tl_bind *w, struct tl_error *err)
{
    enum tl_status st = w->weight == TL_WT_EMBED ? check_tied(b, err) : TL_OK;
    for (int i = 0; i < w->n_parts && st == TL_OK; i++) {
        const struct tl_bind_part *p = &w->part[i];
        if (!w->n_in || w->wtype == TL_W_F32 || w->wtype == TL_W_BF16)
            st = check_floats(p->t, err);
        else
            st = w->wtype == TL_W_INT8 ? check_int8(p->t, err) : check_int4(p->t, err);
        if (st == TL_OK && p->row_scale)
            st = check_row_scales(p->row_scale, err);
        if (st == TL_OK && p->group_scale)
            st = check_group_scales(p->group_scale, p->rows, w->n_in / TL_Q4_GROUP, err);
    }
    return st;
}

/* ---- fingerprint: a digest per tensor, joined in order of name, so that sharding and file order do not matter ---- */

struct digests {
    const struct tl_tensors *tensors;
    uint8_t (*of)[TL_SHA256_BYTES];
    bool *done;
};

static enum tl_status digests_open(struct digests *d, const struct tl_tensors *ts, struct tl_error *err)
{
    size_t n = (size_t)tl_tensors_count(ts);
    d->tensors = ts;
    d->of = tl_calloc(n, sizeof(*d->of));
    d->done = tl_calloc(n, sizeof(*d->done));
    return d->of && d->done ? TL_OK : tl_fail_host_memory(err, n * (sizeof(*d->of) + sizeof(*d->done)));
}

static void digests_close(struct digests *d)
{
    tl_free(d->of);
    tl_free(d->done);
}

static enum tl_status digest_tensor(struct digests *d, const struct tl_tensor *t, struct tl_error *err)
{
    size_t i = t ? (size_t)(t - tl_tensors_at(d->tensors, 0)) : 0;
    if (!t || d->done[i])
        return TL_OK;
    d->done[i] = true;
    return tl_sha256_of(t->data, t->bytes, d->of[i], err);
}

static enum tl_status digest_weight(struct digests *d, const struct tl_bind *w, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    for (int i = 0; i < w->n_parts && st == TL_OK; i++) {
        st = digest_tensor(d, w->part[i].t, err);
        if (st == TL_OK)
            st = digest_tensor(d, w->part[i].row_scale, err);
        if (st == TL_OK)
            st = digest_tensor(d, w->part[i].group_scale, err);
    }
    return st;
}

static void add_u64(struct tl_sha256 *s, uint64_t v)
{
    uint8_t bytes[8];
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(v >> (8 * i));
    tl_sha256_add(s, bytes, sizeof(bytes));
}

static enum tl_status digests_join(const struct digests *d, const struct tl_arch_binding *b, uint64_t start_seed,
                                   char hex[65], struct tl_error *err)
{
    bool random = b->spec.state_init == TL_STATE_TRUNCNORM;
    uint8_t digest[TL_SHA256_BYTES];
    struct tl_sha256 *s;
    enum tl_status st = tl_sha256_start(&s, err);
    if (st != TL_OK)
        return st;
    add_u64(s, b->config_bytes);
    tl_sha256_add(s, b->config, b->config_bytes);
    for (int i = 0; i < tl_tensors_count(d->tensors); i++) {
        const struct tl_tensor *t = tl_tensors_at(d->tensors, i);
        if (!d->done[i])
            continue;
        tl_sha256_add(s, t->name, strlen(t->name) + 1);
        tl_sha256_add(s, t->dtype_name, strlen(t->dtype_name) + 1);
        add_u64(s, (uint64_t)t->n_dims);
        for (int j = 0; j < t->n_dims; j++)
            add_u64(s, (uint64_t)t->dim[j]);
        tl_sha256_add(s, d->of[i], TL_SHA256_BYTES);
    }
    add_u64(s, random);
    add_u64(s, random ? start_seed : 0);
    tl_sha256_finish(s, digest);
    tl_sha256_hex(digest, hex);
    return TL_OK;
}

static void drop_pages(const struct tl_arch_binding *b, const struct tl_bind *w)
{
    for (int i = 0; i < w->n_parts; i++) {
        tl_tensors_drop(b->tensors, w->part[i].t);
        if (w->part[i].group_scale)
            tl_tensors_drop(b->tensors, w->part[i].group_scale);
    }
}

enum tl_status tl_weights_fingerprint(const struct tl_arch_binding *b, uint64_t start_seed, char hex[65],
                                      struct tl_error *err)
{
    struct digests d = {0};
    enum tl_status st = digests_open(&d, b->tensors, err);
    for (int i = 0; i < b->n_binds && st == TL_OK; i++) {
        st = digest_weight(&d, &b->binds[i], err);
        drop_pages(b, &b->binds[i]);
    }
    if (st == TL_OK)
        st = digests_join(&d, b, start_seed, hex, err);
    digests_close(&d);
    return st;
}

/* ---- upload ---- */

static struct tl_mat **mat_slot(struct tl_net *net, const struct tl_bind *w)
{
    struct tl_layer *l = w->layer >= 0 ? &net->layers[w->layer] : NULL;
    switch (w->weight) {
    case TL_WT_QKV: return &l->qkv;
    case TL_WT_O: return &l->o;
    case TL_WT_UP: return &l->up;
    case TL_WT_DOWN: return &l->down;
    case TL_WT_VALUE_EMBED: return &l->value_embed;
    case TL_WT_EMBED: return &net->embed;
    case TL_WT_HEAD: return &net->head;
    case TL_WT_ADAPTER: return &net->adapter;
    case TL_WT_INJECT_B: return &net->inject_b;
    default: return &net->coda_in;
    }
}

static struct tl_buf **vec_slot(struct tl_net *net, const struct tl_bind *w)
{
    struct tl_layer *l = w->layer >= 0 ? &net->layers[w->layer] : NULL;
    switch (w->weight) {
    case TL_WT_Q_NORM: return &l->q_norm;
    case TL_WT_K_NORM: return &l->k_norm;
    case TL_WT_QK_BIAS: return &l->qk_bias;
    case TL_WT_QKV_BIAS: return &l->qkv_bias;
    case TL_WT_VALUE_GATE: return &l->value_gate;
    case TL_WT_INJECT_NORM: return &net->inject_norm;
    case TL_WT_INJECT_DECAY: return &net->inject_decay;
    case TL_WT_INJECT_GAIN: return &net->inject_gain;
    case TL_WT_LOOP_NORM: return &net->loop_norm;
    case TL_WT_GATE_W: return &net->gate_w;
    case TL_WT_CODA_NORM: return &net->coda_norm;
    case TL_WT_FINAL_NORM: return &net->final_norm;
    default: return &l->norm[w->weight - TL_WT_N1];
    }
}

/* Data at an address that suits its type: the mapped bytes where they lie well, else a copy in *copy. */
static enum tl_status aligned(const void **out, void **copy, const uint8_t *data, size_t bytes, size_t alignment,
                              struct tl_error *err)
{
    *out = data;
    if ((uintptr_t)data % alignment == 0)
        return TL_OK;
    *copy = tl_malloc(bytes);
    if (!*copy)
        return tl_fail_host_memory(err, bytes);
    memcpy(*copy, data, bytes);
    *out = *copy;
    return TL_OK;
}

static enum tl_status load_matrix(struct tl_net *net, struct tl_backend *be, const struct tl_bind *w,
                                  uint64_t *device_bytes, struct tl_error *err)
{
    struct tl_mat_src src = {.wtype = w->wtype,
                             .n_in = w->n_in,
                             .gated = w->weight == TL_WT_UP && net->spec.mlp == TL_MLP_SILU_GATED,
                             .n_parts = w->n_parts};
    void *copy[6] = {NULL};
    enum tl_status st = TL_OK;
    struct tl_mat **slot = mat_slot(net, w);
    for (int i = 0; i < w->n_parts && st == TL_OK; i++) {
        const struct tl_bind_part *p = &w->part[i];
        const void *scale = NULL;
        src.part[i].rows = p->rows;
        if (p->t->dtype == TL_DT_F16) {                              /* widened: no backend knows F16 weights */
            size_t bytes = (size_t)p->t->n_elements * sizeof(float); /* cannot overflow: the file holds half of it */
            copy[i] = tl_malloc(bytes);
            if (copy[i])
                to_f32(p->t, 0, p->t->n_elements, copy[i]);
            else
                st = tl_fail_host_memory(err, bytes);
            src.part[i].data = copy[i];
        } else {
            size_t alignment = w->wtype == TL_W_F32 ? 4 : w->wtype == TL_W_BF16 ? 2 : 1;
            st = aligned(&src.part[i].data, &copy[i], p->t->data, p->t->bytes, alignment, err);
        }
        if (st == TL_OK && p->row_scale)
            st = aligned(&scale, &copy[3 + i], p->row_scale->data, p->row_scale->bytes, 4, err);
        src.part[i].row_scale = scale;
        src.part[i].group_scale = p->group_scale ? p->group_scale->data : NULL;
    }
    if (st == TL_OK)
        st = be->ops->mat_create(be, &src, slot, err);
    if (st == TL_OK)
        *device_bytes += be->ops->mat_bytes(*slot);
    for (int i = 0; i < 6; i++)
        tl_free(copy[i]);
    return st;
}

static enum tl_status load_vector(struct tl_net *net, struct tl_backend *be, const struct tl_bind *w,
                                  uint64_t *device_bytes, struct tl_error *err)
{
    size_t bytes = (size_t)w->rows * sizeof(float);
    float *v = tl_malloc(bytes);
    struct tl_buf **slot;
    enum tl_status st;
    if (!v)
        return tl_fail_host_memory(err, bytes);
    tl_bind_read(w, 0, w->rows, v);
    if (w->weight == TL_WT_GATE_B) {
        net->gate_b = v[0];
        st = TL_OK;
    } else {
        slot = vec_slot(net, w);
        st = be->ops->buf_alloc(be, bytes, slot, err);
        if (st == TL_OK)
            st = be->ops->buf_write(be, *slot, 0, v, bytes, err);
        *device_bytes += bytes;
    }
    tl_free(v);
    return st;
}

#define ROPE_CHUNK 256

static enum tl_status load_rope(struct tl_net *net, struct tl_backend *be, int positions, uint64_t *device_bytes,
                                struct tl_error *err)
{
    size_t row = (size_t)net->spec.d_head * sizeof(float);
    float inv_freq[TL_HEAD_DIM_MAX / 2], *rows;
    enum tl_status st;
    net->rope_positions = positions;
    if (net->spec.rope == TL_ROPE_NONE)
        return TL_OK;
    rows = tl_malloc(ROPE_CHUNK * row);
    if (!rows)
        return tl_fail_host_memory(err, ROPE_CHUNK * row);
    tl_rope_inv_freq(&net->spec, inv_freq);
    st = be->ops->buf_alloc(be, (size_t)positions * row, &net->rope, err);
    for (int pos = 0; pos < positions && st == TL_OK; pos += ROPE_CHUNK) {
        int n = positions - pos < ROPE_CHUNK ? positions - pos : ROPE_CHUNK;
        tl_rope_fill(&net->spec, inv_freq, pos, n, rows);
        st = be->ops->buf_write(be, net->rope, (size_t)pos * row, rows, (size_t)n * row, err);
    }
    *device_bytes += (size_t)positions * row;
    tl_free(rows);
    return st;
}

/* The weight type that most of the layers' parameters have. */
static enum tl_wtype common_wtype(const struct tl_arch_binding *b)
{
    int64_t n[TL_W_COUNT] = {0};
    int best = 0;
    for (int i = 0; i < b->n_binds; i++)
        if (b->binds[i].layer >= 0 && b->binds[i].n_in && b->binds[i].weight != TL_WT_VALUE_EMBED)
            n[b->binds[i].wtype] += b->binds[i].rows * b->binds[i].n_in;
    for (int t = 1; t < TL_W_COUNT; t++)
        if (n[t] > n[best])
            best = t;
    return (enum tl_wtype)best;
}

enum tl_status tl_weights_load(struct tl_net *net, struct tl_backend *be, const struct tl_arch_binding *b,
                               const struct tl_weights_params *p, struct tl_weights_info *info, struct tl_error *err)
{
    int n_layers = tl_n_layers(&b->spec), positions = p->rope_positions ? p->rope_positions : b->spec.max_positions;
    struct tl_weights_info got = {.n_parameters = 0};
    struct digests d = {0};
    enum tl_status st;
    memset(net, 0, sizeof(*net));
    net->spec = b->spec;
    net->wtype = common_wtype(b);
    if (positions < 1 || positions > b->spec.max_positions)
        return tl_fail(err, TL_ERR_BAD_PARAM, "the rope table has %d positions, the model has %d", positions,
                       b->spec.max_positions);
    net->layers = tl_calloc((size_t)n_layers, sizeof(*net->layers));
    st = net->layers ? digests_open(&d, b->tensors, err)
                     : tl_fail_host_memory(err, (size_t)n_layers * sizeof(*net->layers));
    for (int i = 0; i < b->n_binds && st == TL_OK; i++) {
        const struct tl_bind *w = &b->binds[i];
        st = tl_bind_check(b, w, err);
        if (st == TL_OK)
            st = digest_weight(&d, w, err);
        if (st == TL_OK)
            st = w->n_in ? load_matrix(net, be, w, &got.device_bytes, err)
                         : load_vector(net, be, w, &got.device_bytes, err);
        drop_pages(b, w);
        if (w->weight != TL_WT_CODA_NORM || !b->spec.c2c_is_final_norm) /* not the same tensor twice */
            got.n_parameters += (uint64_t)w->rows * (uint64_t)(w->n_in ? w->n_in : 1);
        if (p->progress)
            p->progress(p->progress_arg, (double)(i + 1) / b->n_binds);
    }
    if (st == TL_OK)
        st = load_rope(net, be, positions, &got.device_bytes, err);
    if (st == TL_OK)
        st = digests_join(&d, b, p->start_seed, got.fingerprint, err);
    if (b->spec.tied_head)
        net->head = net->embed;
    digests_close(&d);
    if (st != TL_OK)
        tl_net_free(net, be);
    else if (info)
        *info = got;
    return st;
}

void tl_net_free(struct tl_net *net, struct tl_backend *be)
{
    const struct tl_backend_ops *ops = be->ops;
    struct tl_buf *bufs[] = {net->final_norm,   net->loop_norm,   net->inject_norm, net->coda_norm,
                             net->inject_decay, net->inject_gain, net->gate_w,      net->rope};
    for (int i = 0; net->layers && i < tl_n_layers(&net->spec); i++) {
        struct tl_layer *l = &net->layers[i];
        for (int j = 0; j < 6; j++)
            ops->buf_free(be, l->norm[j]);
        ops->buf_free(be, l->q_norm);
        ops->buf_free(be, l->k_norm);
        ops->buf_free(be, l->qk_bias);
        ops->buf_free(be, l->qkv_bias);
        ops->buf_free(be, l->value_gate);
        ops->mat_free(be, l->qkv);
        ops->mat_free(be, l->o);
        ops->mat_free(be, l->up);
        ops->mat_free(be, l->down);
        ops->mat_free(be, l->value_embed);
    }
    for (size_t i = 0; i < sizeof(bufs) / sizeof(bufs[0]); i++)
        ops->buf_free(be, bufs[i]);
    if (net->head != net->embed)
        ops->mat_free(be, net->head);
    ops->mat_free(be, net->embed);
    ops->mat_free(be, net->adapter);
    ops->mat_free(be, net->inject_b);
    ops->mat_free(be, net->coda_in);
    tl_free(net->layers);
    memset(net, 0, sizeof(*net));
}
