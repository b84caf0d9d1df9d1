#include "random_net.h"

#include "mem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEAD_ROWS 64

uint64_t rng_next(struct rng *r)
{
    uint64_t z = (r->state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

int rng_below(struct rng *r, int n) { return (int)(rng_next(r) % (uint64_t)n); }
float rng_uniform(struct rng *r) { return (float)(rng_next(r) >> 40) * 0x1p-23f - 1.0f; }

void must(enum tl_status st, const struct tl_error *err, const char *what)
{
    if (st == TL_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, err->msg);
    exit(1);
}

static void *room(size_t n, size_t bytes)
{
    void *p = tl_calloc(n ? n : 1, bytes);
    if (!p) {
        fprintf(stderr, "no memory for %zu x %zu bytes\n", n, bytes);
        exit(1);
    }
    return p;
}

/* ---- weights ---- */

static struct tl_buf *put_buf(struct net *n, const float *x, int64_t count)
{
    struct tl_error err;
    struct tl_buf *b = NULL;
    must(n->be->ops->buf_alloc(n->be, (size_t)count * sizeof(*x), &b, &err), &err, "buf_alloc");
    must(n->be->ops->buf_write(n->be, b, 0, x, (size_t)count * sizeof(*x), &err), &err, "buf_write");
    n->bufs[n->n_bufs++] = b;
    return b;
}

static struct tl_buf *draw_buf(struct net *n, int64_t count, float middle, float half)
{
    float *x = room((size_t)count, sizeof(*x));
    struct tl_buf *b;
    for (int64_t i = 0; i < count; i++)
        x[i] = middle + half * rng_uniform(&n->rng);
    b = put_buf(n, x, count);
    tl_free(x);
    return b;
}

/* One part of a matrix; its arrays are released by draw_mat. */
static struct tl_mat_part draw_part(struct net *n, enum tl_wtype t, int64_t rows, int64_t n_in)
{
    int64_t groups = (n_in + 31) / 32, values = rows * n_in;
    size_t gs_row = (size_t)((groups + 1) / 2);
    float amp = 1.5f / sqrtf((float)n_in), *scale = NULL;
    uint8_t *data = room((size_t)values, t == TL_W_F32 ? 4 : t == TL_W_BF16 ? 2 : 1), *gs = NULL;
    if (t >= TL_W_INT8) {
        scale = room((size_t)rows, sizeof(*scale));
        for (int64_t i = 0; i < rows; i++)
            scale[i] = amp * (1.0f + 0.5f * rng_uniform(&n->rng)) / (t == TL_W_INT4 ? 60.0f : 127.0f);
    }
    if (t == TL_W_INT4) {
        gs = room((size_t)rows * gs_row, 1);
        for (int64_t i = 0; i < rows * groups; i++)
            gs[(i / groups) * (int64_t)gs_row + i % groups / 2] |=
                (uint8_t)((1 + rng_below(&n->rng, 15)) << (i % groups % 2 ? 4 : 0));
    }
    for (int64_t i = 0; i < values; i++) {
        float x = t < TL_W_INT8 ? rng_uniform(&n->rng) * amp : 0;
        uint32_t bits;
        memcpy(&bits, &x, sizeof(bits));
        switch (t) {
        case TL_W_F32: memcpy(data + 4 * i, &x, 4); break;
        case TL_W_BF16: memcpy(data + 2 * i, (uint8_t *)&bits + 2, 2); break;
        case TL_W_INT8: data[i] = (uint8_t)(rng_below(&n->rng, 255) - 127); break;
        default: data[i / 2] |= (uint8_t)(((rng_below(&n->rng, 15) - 7) & 15) << (i & 1 ? 4 : 0)); break;
        }
    }
    return (struct tl_mat_part){data, scale, gs, rows};
}

/* A matrix of up to three parts; a part of 0 rows is left out. */
static struct tl_mat *draw_parts(struct net *n, enum tl_wtype t, int64_t n_in, bool gated, int64_t a, int64_t b,
                                 int64_t c)
{
    const int64_t rows[3] = {a, b, c};
    struct tl_mat_src src = {.wtype = t == TL_W_INT4 && n_in % 32 ? TL_W_INT8 : t, .n_in = n_in, .gated = gated};
    struct tl_error err;
    struct tl_mat *m = NULL;
    for (int i = 0; i < 3; i++)
        if (rows[i])
            src.part[src.n_parts++] = draw_part(n, src.wtype, rows[i], n_in);
    must(n->be->ops->mat_create(n->be, &src, &m, &err), &err, "mat_create");
    for (int i = 0; i < src.n_parts; i++) {
        tl_free((void *)(uintptr_t)src.part[i].data);
        tl_free((void *)(uintptr_t)src.part[i].row_scale);
        tl_free((void *)(uintptr_t)src.part[i].group_scale);
    }
    n->mats[n->n_mats++] = m;
    return m;
}

static struct tl_mat *draw_mat(struct net *n, enum tl_wtype t, int64_t n_in, int64_t rows)
{
    return draw_parts(n, t, n_in, false, rows, 0, 0);
}

static void draw_layer(struct net *n, struct tl_layer *l, enum tl_wtype t)
{
    const struct tl_arch_spec *s = &n->net.spec;
    int d = s->d_model, q = tl_q_dim(s), kv = tl_kv_dim(s);
    bool gated = s->mlp == TL_MLP_SILU_GATED;
    for (int i = 0; i < 6; i++)
        l->norm[i] = s->norms >> i & 1 ? draw_buf(n, d, 1.0f, 0.3f) : NULL;
    l->qkv = draw_parts(n, t, d, false, q, kv, kv);
    l->o = draw_mat(n, t, q, d);
    l->up = draw_parts(n, t, d, gated, s->d_ff, gated ? s->d_ff : 0, 0);
    l->down = draw_mat(n, t, s->d_ff, d);
    if (s->qk_norm == TL_QKNORM_FULL || s->qk_norm == TL_QKNORM_HEAD) {
        bool full = s->qk_norm == TL_QKNORM_FULL;
        l->q_norm = draw_buf(n, full ? q : s->d_head, 1.0f, 0.3f);
        l->k_norm = draw_buf(n, full ? kv : s->d_head, 1.0f, 0.3f);
    }
    l->qk_bias = s->qk_bias ? draw_buf(n, q + kv, 0, 0.5f) : NULL;
    l->qkv_bias = s->qkv_bias ? draw_buf(n, q + 2 * kv, 0, 0.5f) : NULL;
    if (tl_has_value_embed(s, (int)(l - n->net.layers))) {
        l->value_embed = draw_mat(n, t == TL_W_INT4 ? TL_W_INT8 : t, kv, s->vocab_size);
        l->value_gate = draw_buf(n, (int64_t)s->n_kv_heads * TL_VALUE_GATE_IN, 0, 0.3f);
    }
}

static struct tl_buf *rope_table(struct net *n)
{
    int d = n->net.spec.d_head;
    float *t = room((size_t)(NET_POSITIONS * d), sizeof(*t));
    struct tl_buf *b;
    for (int p = 0; p < NET_POSITIONS; p++)
        for (int j = 0; j < d / 2; j++) {
            double a = p * pow(10000.0, -2.0 * j / d);
            t[p * d + j] = (float)cos(a);
            t[p * d + d / 2 + j] = (float)sin(a);
        }
    b = put_buf(n, t, (int64_t)NET_POSITIONS * d);
    tl_free(t);
    return b;
}

static void draw_around(struct net *n, enum tl_wtype t)
{
    struct tl_net *net = &n->net;
    const struct tl_arch_spec *s = &net->spec;
    int d = s->d_model;
    /* The loader makes embedding and head of INT4 models INT8 unless it is told otherwise: both kinds occur. */
    enum tl_wtype outer = t == TL_W_INT4 && rng_below(&n->rng, 2) ? TL_W_INT8 : t;
    net->embed = draw_mat(n, outer, d, s->vocab_size);
    net->head = s->tied_head ? net->embed : draw_mat(n, outer, d, s->vocab_size);
    if (s->inject == TL_INJECT_CONCAT_LINEAR)
        net->adapter = draw_mat(n, t, 2 * d, d);
    if (s->inject == TL_INJECT_DIAG) {
        net->inject_b = draw_mat(n, t, d, d);
        net->inject_decay = draw_buf(n, d, 0.5f, 0.4f);
        net->inject_gain = draw_buf(n, d, 0.5f, 0.4f);
    }
    if (s->core_to_coda == TL_C2C_LINEAR)
        net->coda_in = draw_mat(n, t, d, d);
    net->final_norm = s->final_norm || s->c2c_is_final_norm ? draw_buf(n, d, 1.0f, 0.3f) : NULL;
    net->loop_norm = s->loop_end_norm ? draw_buf(n, d, 1.0f, 0.3f) : NULL;
    net->inject_norm = s->inject_norm ? draw_buf(n, d, 1.0f, 0.3f) : NULL;
    net->coda_norm = s->core_to_coda == TL_C2C_NORM && !s->c2c_is_final_norm ? draw_buf(n, d, 1.0f, 0.3f) : NULL;
    net->gate_w = s->exit == TL_EXIT_GATE_CDF ? draw_buf(n, d, 0, 0.3f) : NULL;
    net->gate_b = 0.25f;
    net->rope = s->rope == TL_ROPE_NONE ? NULL : rope_table(n);
    net->rope_positions = NET_POSITIONS;
}

/* ---- KV ---- */

static int state_pages(const struct net *n)
{
    return (NET_POSITIONS + n->kv.state_rows_per_page - 1) / n->kv.state_rows_per_page;
}

static void open_arena(struct net *n, enum tl_wtype t)
{
    const struct tl_arch_spec *s = &n->net.spec;
    size_t state_row = (size_t)s->d_model * 4 * (s->inject == TL_INJECT_NONE ? 1 : 2), bytes;
    struct tl_error err;
    void *nan_bytes;
    n->kv.format = t == TL_W_F32 ? TL_KV_F32 : TL_KV_F16;
    bytes = (size_t)(2 * tl_kv_dim(s)) * TL_BLOCK_TOKENS * (n->kv.format == TL_KV_F32 ? 4 : 2);
    bytes = bytes < state_row ? state_row : bytes;
    n->kv.page_bytes = (bytes + 63) / 64 * 64;
    n->kv.state_rows_per_page = (int)(n->kv.page_bytes / state_row);
    n->n_slots = tl_n_slots(s, NET_LOOPS);
    n->n_pages = 3 + NET_SEQS_MAX * (n->n_slots * NET_BLOCKS + state_pages(n));
    must(n->be->ops->buf_alloc(n->be, n->kv.page_bytes * (size_t)n->n_pages, &n->kv.arena, &err), &err, "buf_alloc");
    nan_bytes = tl_malloc(n->kv.page_bytes);
    if (!nan_bytes)
        exit(1);
    memset(nan_bytes, 0xff, n->kv.page_bytes);
    for (int p = 0; p < n->n_pages; p++)
        must(n->be->ops->buf_write(n->be, n->kv.arena, (size_t)p * n->kv.page_bytes, nan_bytes, n->kv.page_bytes, &err),
             &err, "buf_write");
    tl_free(nan_bytes);
}

void net_pages(const struct net *n, struct seq_pages *s, int n_seqs)
{
    int at = 3;
    memset(s, 0, (size_t)n_seqs * sizeof(*s));
    for (int b = 0; b < NET_BLOCKS; b++)
        for (int i = 0; i < n_seqs; i++)
            for (int slot = 0; slot < n->n_slots; slot++)
                s[i].pages[slot * NET_BLOCKS + b] = at++;
    for (int b = 0; b < state_pages(n); b++)
        for (int i = 0; i < n_seqs; i++)
            s[i].state_pages[b] = at++;
}

void net_release(const struct net *n, struct seq_pages *s, int pos)
{
    for (int b = 0; s->window && (b + 1) * TL_BLOCK_TOKENS <= pos - s->window + 1; b++)
        for (int slot = 0; slot < n->n_slots; slot++)
            s->pages[slot * NET_BLOCKS + b] = -1;
}

/* ---- life ---- */

void net_open(struct net *n, const char *device, const struct tl_arch_spec *spec, enum tl_wtype t, int rows_max,
              uint64_t seed)
{
    struct tl_error err;
    memset(n, 0, sizeof(*n));
    must(tl_backend_open(&n->be, device, 2, &err), &err, device);
    n->rng.state = seed;
    n->net = (struct tl_net){.spec = *spec, .wtype = t, .layers = n->layers};
    for (int i = 0; i < spec->n_prelude + spec->n_core + spec->n_coda; i++)
        draw_layer(n, &n->layers[i], t);
    draw_around(n, t);
    open_arena(n, t);
    must(n->be->ops->prepare(n->be, &n->net, rows_max, &err), &err, "prepare");
}

void net_close(struct net *n)
{
    for (int i = 0; i < n->n_mats; i++)
        n->be->ops->mat_free(n->be, n->mats[i]);
    for (int i = 0; i < n->n_bufs; i++)
        n->be->ops->buf_free(n->be, n->bufs[i]);
    n->be->ops->buf_free(n->be, n->kv.arena);
    n->be->ops->host_free(n->be, n->host);
    n->be->ops->close(n->be);
}

/* ---- running ---- */

/* What an op reads from or writes to the host, in floats. */
static size_t host_floats(const struct tl_step *step, const struct tl_op *op)
{
    size_t n = (size_t)step->sets[op->set].n;
    if (!op->host_in && !op->host_out)
        return 0;
    return n * (op->kind == TL_OP_GATE   ? 1
                : op->kind == TL_OP_HEAD ? (size_t)step->net->spec.vocab_size
                                         : (size_t)step->net->spec.d_model);
}

/* One run of ops that take host rows at most once and give them back at most once. */
static void run_part(struct net *n, const struct tl_step *step, const struct tl_op *ops, int n_ops)
{
    struct tl_op own[NET_OPS_MAX];
    struct tl_step s = *step;
    struct tl_error err;
    float *host[NET_OPS_MAX];
    size_t total = 0, at = 0;
    for (int i = 0; i < n_ops; i++)
        total += host_floats(step, &ops[i]);
    if (total > n->host_size) {
        n->be->ops->host_free(n->be, n->host);
        n->host = n->be->ops->host_alloc(n->be, total * sizeof(float));
        n->host_size = total;
        if (!n->host)
            exit(1);
    }
    for (int i = 0; i < n_ops; i++) {
        size_t size = host_floats(step, &ops[i]);
        host[i] = n->host + at;
        own[i] = ops[i];
        if (ops[i].host_in) {
            memcpy(host[i], ops[i].host_in, size * sizeof(float));
            own[i].host_in = host[i];
        } else if (size) {
            memset(host[i], 0xff, size * sizeof(float));
            own[i].host_out = host[i];
        }
        at += size;
    }
    s.ops = own;
    s.n_ops = n_ops;
    must(n->be->ops->run(n->be, &s, &err), &err, "run");
    must(n->be->ops->sync(n->be, &err), &err, "sync");
    for (int i = 0; i < n_ops; i++)
        if (ops[i].host_out)
            memcpy(ops[i].host_out, host[i], host_floats(step, &ops[i]) * sizeof(float));
}

/* A head of many rows, HEAD_ROWS at a time as the engine asks for them. */
static void run_heads(struct net *n, const struct tl_step *step, const struct tl_op *op)
{
    const struct tl_row_set *all = &step->sets[op->set];
    for (int i = 0; i < all->n; i += HEAD_ROWS) {
        struct tl_row_set set = {all->rows + i, all->n - i < HEAD_ROWS ? all->n - i : HEAD_ROWS};
        struct tl_op part = *op;
        struct tl_step s = *step;
        s.sets = &set;
        s.n_sets = 1;
        part.set = 0;
        part.host_out = op->host_out + (int64_t)i * step->net->spec.vocab_size;
        run_part(n, &s, &part, 1);
    }
}

void net_run(struct net *n, const struct tl_step *step)
{
    int first = 0;
    for (int i = 0; i < step->n_ops; i++) {
        const struct tl_op *op = &step->ops[i];
        bool heads = op->kind == TL_OP_HEAD && step->sets[op->set].n > HEAD_ROWS;
        if (i > first && (op->host_in || heads)) { /* what is in front, by itself */
            run_part(n, step, step->ops + first, i - first);
            first = i;
        }
        if (heads)
            run_heads(n, step, op);
        else if (op->kind == TL_OP_SAVE_ROWS || op->kind == TL_OP_HEAD || i + 1 == step->n_ops)
            run_part(n, step, step->ops + first, i + 1 - first);
        else
            continue;
        first = i + 1;
    }
}
