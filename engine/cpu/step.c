/* The step interpreter: every thread walks the same list of ops and meets the others at barriers. An op is a few phases;
 * in a phase threads share rows (norms, quantising, activations), tiles of outputs (linear layers), (row, kv head) pairs (rope
 * and KV) or pieces of attention. A set's rows are gathered into dense buffers by the row phases and scattered back by the
 * residual ones, so that kernels see dense rows only. */
#include "backend_impl.h"

#include <math.h>
#include <string.h>

struct ctx {
    const struct tl_cpu_run *r;
    const struct tl_net *net;
    const struct tl_arch_spec *spec;
    const struct tl_cpu_kernels *k;
    struct tl_cpu_scratch *s;
    const struct tl_row_set *set;
    const struct tl_op *op;
    int64_t d;  /* d_model */
    float *row; /* this thread's temporary row */
};

static void meet(const struct ctx *c) { tl_cpu_pool_barrier(c->r->be->pool); }

static float *x_of(const struct ctx *c, int i) { return c->s->x + c->set->rows[i] * c->d; }
static float *e_of(const struct ctx *c, int i) { return c->s->e + c->set->rows[i] * c->d; }

#define MY_ROWS(c, i)                                                                                                  \
    int64_t i = 0, i##_end = 0;                                                                                        \
    tl_cpu_share((c)->set->n, (c)->r->tid, (c)->r->be->n_threads, &i, &i##_end);                                       \
    for (; i < i##_end; i++)

/* Row i of the dense input of matrix m. */
static void put_row(const struct ctx *c, const struct tl_mat *m, int64_t i, const float *x)
{
    struct tl_cpu_acts *a = &c->s->acts;
    const struct tl_backend *be = &c->r->be->base;
    float *f = a->f + i * a->k_max;
    if (be->observe)
        be->observe(be->observe_arg, m, x, m->n_in);
    switch (m->wtype) {
    case TL_W_F32: memcpy(f, x, (size_t)m->n_in * sizeof(float)); break;
    case TL_W_BF16: c->k->round_bf16(f, x, m->n_in); break;
    default:
        c->k->quantise(x, m->n_in, m->k_pad, a->q + i * a->k_max, a->group + i * (a->k_max / 32), a->sum + i,
                       a->scale + i);
        return;
    }
    memset(f + m->n_in, 0, (size_t)(m->k_pad - m->n_in) * sizeof(float));
}

/* y[i] = m times the row put at i, between two barriers. */
static void linear(const struct ctx *c, const struct tl_mat *m, float *y, int64_t ldy)
{
    int64_t t0, t1;
    struct tl_cpu_linear_scratch *tmp = &c->s->linear[c->r->tid];
    meet(c);
    tl_cpu_share(m->n_tiles, c->r->tid, c->r->be->n_threads, &t0, &t1);
    if (t0 < t1) {
        if (m->wtype == TL_W_INT4)
            c->k->linear_q4(m, &c->s->acts, c->set->n, t0, t1, y, ldy, tmp);
        else if (m->wtype == TL_W_INT8)
            c->k->linear_q8(m, &c->s->acts, c->set->n, t0, t1, y, ldy, tmp);
        else
            c->k->linear_f(m, &c->s->acts, c->set->n, t0, t1, y, ldy, tmp);
    }
    meet(c);
}

#ifdef TL_TEST_HOOKS
static bool planted;
void tl_cpu_plant_order_change(bool on) { planted = on; }

/* What the contract forbids: another order of summation as soon as a call has more than one row. */
static void norm_in_another_order(const struct ctx *c, float *y, const float *x, const float *w)
{
    float sum = 0, inv;
    for (int64_t j = 0; j < c->d; j++)
        sum = fmaf(x[j], x[j], sum);
    inv = 1.0f / sqrtf(sum / (float)c->d + c->spec->norm_eps);
    for (int64_t j = 0; j < c->d; j++)
        y[j] = x[j] * inv * w[j];
}
#endif

static void norm(const struct ctx *c, float *y, const float *x, const struct tl_buf *w)
{
#ifdef TL_TEST_HOOKS
    if (planted && c->set->n > 1) {
        norm_in_another_order(c, y, x, tl_cpu_f32(w));
        return;
    }
#endif
    c->k->rmsnorm(y, x, tl_cpu_f32(w), c->d, c->spec->norm_eps);
}

/* The row itself where the norm is absent, else the thread's temporary. */
static const float *normed(const struct ctx *c, const float *x, const struct tl_buf *w)
{
    if (!w)
        return x;
    norm(c, c->row, x, w);
    return c->row;
}

/* ---- between qkv and attention ---- */

static void rope(const struct tl_arch_spec *spec, float *x, const float *table)
{
    int half = spec->d_head / 2;
    const float *cos = table, *sin = table + half;
    int step = spec->rope == TL_ROPE_PAIR ? 2 : 1, other = spec->rope == TL_ROPE_PAIR ? 1 : half;
    for (int j = 0; j < half; j++) {
        float a = x[j * step], b = x[j * step + other];
        float ac = a * cos[j], bs = b * sin[j], bc = b * cos[j], as = a * sin[j];
        x[j * step] = ac - bs;
        x[j * step + other] = bc + as;
    }
}

static void finish_head(const struct ctx *c, float *x, const float *table, const struct tl_buf *w)
{
    const struct tl_arch_spec *spec = c->spec;
    if (spec->qk_norm == TL_QKNORM_HEAD)
        c->k->rmsnorm(x, x, tl_cpu_f32(w), spec->d_head, spec->norm_eps);
    if (spec->rope != TL_ROPE_NONE)
        rope(spec, x, table);
    if (spec->qk_norm == TL_QKNORM_HEAD_AFTER_ROPE)
        c->k->rmsnorm(x, x, NULL, spec->d_head, 1.1920929e-07f);
}

/* Gates of the value embedding, one per kv head, out of the input of qkv; y holds them until o's outputs take its place. */
static void gate_values(const struct ctx *c, int64_t i, const float *h)
{
    const float *w = tl_cpu_f32(c->op->layer->value_gate);
    float *gate = c->s->y + i * c->d;
    int n = c->spec->n_kv_heads;
    for (int g = 0; g < n; g++)
        gate[g] = -c->k->dot(w + g * TL_VALUE_GATE_IN, h, TL_VALUE_GATE_IN);
    c->k->exp(gate, gate, n);
    for (int g = 0; g < n; g++)
        gate[g] = 2.0f / (1.0f + gate[g]);
}

static void add_values(const struct ctx *c, int64_t i, float *v)
{
    int64_t d = c->spec->d_head;
    const float *gate = c->s->y + i * c->d;
    tl_cpu_mat_row(c->op->layer->value_embed, c->r->step->rows[c->set->rows[i]].token, c->row);
    for (int64_t j = 0; j < tl_kv_dim(c->spec); j++) {
        float more = gate[j / d] * c->row[j];
        v[j] += more;
    }
}

/* Biases, norms and rope on the q heads, the key and the value of kv heads [g0, g1) of row i; stores key and value. */
static void finish_qkv(const struct ctx *c, int64_t i, int g0, int g1)
{
    const struct tl_arch_spec *spec = c->spec;
    const struct tl_layer *layer = c->op->layer;
    const struct tl_row *row = &c->r->step->rows[c->set->rows[i]];
    int64_t d = spec->d_head, per = spec->n_heads / spec->n_kv_heads, qd = spec->n_heads * d, kd = spec->n_kv_heads * d;
    float *q = c->s->wide + i * (qd + 2 * kd), *k = q + qd, *v = k + kd;
    const float *table = spec->rope == TL_ROPE_NONE ? NULL : tl_cpu_f32(c->net->rope) + row->pos * d;
    if (layer->qkv_bias) {
        const float *b = tl_cpu_f32(layer->qkv_bias);
        c->k->add(q + g0 * per * d, b + g0 * per * d, (g1 - g0) * per * d);
        c->k->add(k + g0 * d, b + qd + g0 * d, (g1 - g0) * d);
        c->k->add(v + g0 * d, b + qd + kd + g0 * d, (g1 - g0) * d);
    }
    if (layer->qk_bias) {
        const float *b = tl_cpu_f32(layer->qk_bias);
        c->k->add(q + g0 * per * d, b + g0 * per * d, (g1 - g0) * per * d);
        c->k->add(k + g0 * d, b + qd + g0 * d, (g1 - g0) * d);
    }
    if (layer->value_embed) /* the whole row is one piece of work, here and below */
        add_values(c, i, v);
    if (spec->qk_norm == TL_QKNORM_FULL) {
        c->k->rmsnorm(q, q, tl_cpu_f32(layer->q_norm), qd, spec->norm_eps);
        c->k->rmsnorm(k, k, tl_cpu_f32(layer->k_norm), kd, spec->norm_eps);
    }
    for (int64_t h = g0 * per; h < g1 * per; h++)
        finish_head(c, q + h * d, table, layer->q_norm);
    for (int g = g0; g < g1; g++) {
        finish_head(c, k + g * d, table, layer->k_norm);
        tl_cpu_kv_store(c->r, row, c->op->slot, g, k + g * d, v + g * d);
    }
}

static void finish_all_qkv(const struct ctx *c)
{
    bool whole = c->spec->qk_norm == TL_QKNORM_FULL || c->op->layer->value_embed;
    int n_kv = c->spec->n_kv_heads, per_row = whole ? 1 : n_kv;
    int64_t i, end;
    tl_cpu_share((int64_t)c->set->n * per_row, c->r->tid, c->r->be->n_threads, &i, &end);
    for (; i < end; i++) {
        int g = per_row == 1 ? 0 : (int)(i % n_kv);
        finish_qkv(c, i / per_row, g, per_row == 1 ? n_kv : g + 1);
    }
}

/* ---- a layer ---- */

static void activate(const struct ctx *c, const float *u)
{
    if (c->spec->mlp == TL_MLP_SILU_GATED)
        c->k->silu_mul(c->row, u, u + c->spec->d_ff, c->spec->d_ff);
    else
        c->k->relu2(c->row, u, c->spec->d_ff);
}

/* x = after( x + before( y ) ) */
static void residual(const struct ctx *c, int64_t i, const struct tl_buf *before, const struct tl_buf *after)
{
    float *x = x_of(c, (int)i);
    c->k->add(x, normed(c, c->s->y + i * c->d, before), c->d);
    if (after)
        norm(c, x, x, after);
}

static void op_layer(const struct ctx *c)
{
    const struct tl_layer *l = c->op->layer;
    int64_t qd = tl_q_dim(c->spec), qkv = qd + 2 * tl_kv_dim(c->spec);
    int64_t up = l->up->n_out;
    MY_ROWS(c, a)
    {
        const float *h = normed(c, x_of(c, (int)a), l->norm[0]);
        put_row(c, l->qkv, a, h);
        if (l->value_embed)
            gate_values(c, a, h);
    }
    linear(c, l->qkv, c->s->wide, qkv);
    finish_all_qkv(c);
    meet(c);
    tl_cpu_attention(c->r, c->set, c->op->slot, c->s->wide, qkv, c->s->att);
    meet(c);
    MY_ROWS(c, b)
    put_row(c, l->o, b, c->s->att + b * qd);
    linear(c, l->o, c->s->y, c->d);
    MY_ROWS(c, e)
    {
        residual(c, e, l->norm[1], l->norm[2]);
        put_row(c, l->up, e, normed(c, x_of(c, (int)e), l->norm[3]));
    }
    linear(c, l->up, c->s->wide, up);
    MY_ROWS(c, f)
    {
        activate(c, c->s->wide + f * up);
        put_row(c, l->down, f, c->row);
    }
    linear(c, l->down, c->s->y, c->d);
    MY_ROWS(c, g)
    residual(c, g, l->norm[4], l->norm[5]);
}

/* ---- around the layers ---- */

static void op_embed(const struct ctx *c)
{
    float scale = c->spec->embed_scale;
    MY_ROWS(c, i)
    {
        float *x = x_of(c, (int)i);
        tl_cpu_mat_row(c->net->embed, c->r->step->rows[c->set->rows[i]].token, x);
        for (int64_t j = 0; j < c->d; j++)
            x[j] = x[j] * scale;
    }
}

static void op_start(const struct ctx *c)
{
    size_t bytes = (size_t)c->d * sizeof(float);
    MY_ROWS(c, i)
    {
        float *x = x_of(c, (int)i);
        if (c->spec->inject != TL_INJECT_NONE) {
            if (c->spec->inject_norm)
                norm(c, e_of(c, (int)i), x, c->net->inject_norm);
            else
                memcpy(e_of(c, (int)i), x, bytes);
        }
        if (c->op->host_in)
            memcpy(x, c->op->host_in + i * c->d, bytes);
        else if (c->spec->state_init != TL_STATE_PRELUDE)
            memset(x, 0, bytes);
    }
}

static void op_inject(const struct ctx *c)
{
    const struct tl_mat *m = c->spec->inject == TL_INJECT_DIAG ? c->net->inject_b : c->net->adapter;
    const float *decay = tl_cpu_f32(c->net->inject_decay), *gain = tl_cpu_f32(c->net->inject_gain);
    if (c->spec->inject == TL_INJECT_NONE)
        return;
    MY_ROWS(c, i)
    {
        if (c->spec->inject == TL_INJECT_DIAG) {
            put_row(c, m, i, e_of(c, (int)i));
        } else {
            memcpy(c->row, x_of(c, (int)i), (size_t)c->d * sizeof(float));
            memcpy(c->row + c->d, e_of(c, (int)i), (size_t)c->d * sizeof(float));
            put_row(c, m, i, c->row);
        }
    }
    linear(c, m, c->s->y, c->d);
    MY_ROWS(c, k)
    {
        float *x = x_of(c, (int)k);
        const float *y = c->s->y + k * c->d;
        if (c->spec->inject == TL_INJECT_CONCAT_LINEAR) {
            memcpy(x, y, (size_t)c->d * sizeof(float));
            continue;
        }
        for (int64_t j = 0; j < c->d; j++) {
            float kept = decay[j] * x[j], added = gain[j] * y[j];
            x[j] = kept + added;
        }
    }
}

static void norm_rows(const struct ctx *c, const struct tl_buf *w)
{
    MY_ROWS(c, i)
    norm(c, x_of(c, (int)i), x_of(c, (int)i), w);
}

static void op_to_coda(const struct ctx *c)
{
    if (c->spec->core_to_coda == TL_C2C_NORM) {
        norm_rows(c, c->spec->c2c_is_final_norm ? c->net->final_norm : c->net->coda_norm);
    } else if (c->spec->core_to_coda == TL_C2C_LINEAR) {
        MY_ROWS(c, i)
        put_row(c, c->net->coda_in, i, x_of(c, (int)i));
        linear(c, c->net->coda_in, c->s->y, c->d);
        MY_ROWS(c, k)
        memcpy(x_of(c, (int)k), c->s->y + k * c->d, (size_t)c->d * sizeof(float));
    }
}

static void op_head(const struct ctx *c)
{
    const struct tl_mat *m = c->net->head;
    MY_ROWS(c, i)
    put_row(c, m, i, normed(c, x_of(c, (int)i), c->spec->final_norm ? c->net->final_norm : NULL));
    linear(c, m, c->op->host_out, m->n_out);
}

static void op_gate(const struct ctx *c)
{
    MY_ROWS(c, i)
    c->op->host_out[i] = c->k->dot(tl_cpu_f32(c->net->gate_w), x_of(c, (int)i), c->d) + c->net->gate_b;
}

static void op_rows(const struct ctx *c)
{
    size_t bytes = (size_t)c->d * sizeof(float);
    MY_ROWS(c, i)
    {
        if (c->op->kind == TL_OP_LOAD_ROWS)
            memcpy(x_of(c, (int)i), c->op->host_in + i * c->d, bytes);
        else
            memcpy(c->op->host_out + i * c->d, x_of(c, (int)i), bytes);
    }
}

static void op_state(const struct ctx *c)
{
    const struct tl_kv_view *kv = &c->r->step->kv;
    bool load = c->op->kind == TL_OP_LOAD_STATE, with_e = c->spec->inject != TL_INJECT_NONE;
    size_t bytes = (size_t)c->d * sizeof(float);
    MY_ROWS(c, i)
    {
        const struct tl_row *row = &c->r->step->rows[c->set->rows[i]];
        int page = c->r->step->seqs[row->seq].state_pages[row->pos / kv->state_rows_per_page];
        uint8_t *at = kv->arena->data + (size_t)page * kv->page_bytes +
                      (size_t)(row->pos % kv->state_rows_per_page) * bytes * (with_e ? 2 : 1);
        if (load) {
            memcpy(x_of(c, (int)i), at, bytes);
            if (with_e)
                memcpy(e_of(c, (int)i), at + bytes, bytes);
        } else {
            memcpy(at, x_of(c, (int)i), bytes);
            if (with_e)
                memcpy(at + bytes, e_of(c, (int)i), bytes);
        }
    }
}

static void run_op(const struct ctx *c)
{
    switch (c->op->kind) {
    case TL_OP_EMBED: op_embed(c); break;
    case TL_OP_START: op_start(c); break;
    case TL_OP_INJECT: op_inject(c); break;
    case TL_OP_LAYER: op_layer(c); break;
    case TL_OP_LOOP_NORM: norm_rows(c, c->net->loop_norm); break;
    case TL_OP_TO_CODA: op_to_coda(c); break;
    case TL_OP_GATE: op_gate(c); break;
    case TL_OP_LOAD_STATE:
    case TL_OP_SAVE_STATE: op_state(c); break;
    case TL_OP_LOAD_ROWS:
    case TL_OP_SAVE_ROWS: op_rows(c); break;
    case TL_OP_HEAD: op_head(c); break;
    case TL_OP_BEST:
    case TL_OP_DRAW: TL_ASSERT(false); break; /* not for a device that does not run ahead */
    }
}

void tl_cpu_step(const struct tl_cpu_run *r)
{
    struct tl_cpu_scratch *s = &r->be->s;
    struct ctx c = {.r = r, .net = r->step->net, .spec = &r->step->net->spec, .k = r->be->k, .s = s};
    c.d = c.spec->d_model;
    c.row = s->row + (int64_t)r->tid * s->acts.k_max;
    for (int i = 0; i < r->step->n_ops; i++) {
        c.op = &r->step->ops[i];
        c.set = &r->step->sets[c.op->set];
        if (c.set->n == 0)
            continue;
        run_op(&c);
        meet(&c); /* the next op may share its rows differently */
    }
}
