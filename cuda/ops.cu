/* What kernels an op of a step is. */
#include "step.cuh"

int64_t tlc_result_width(const struct running *r, enum tl_op_kind kind)
{
    return kind == TL_OP_HEAD        ? r->spec->vocab_size
           : kind == TL_OP_SAVE_ROWS ? r->spec->d_model
           : kind == TL_OP_GATE      ? 1
                                     : 0;
}

bool tlc_direct(const struct running *r, const struct tl_op *op)
{
    const uint8_t *to = (const uint8_t *)op->host_out;
    size_t bytes = (size_t)r->caps[op->set] * 4 * (size_t)tlc_result_width(r, op->kind);
    if (!to || op->kind == TL_OP_HEAD || r->caps[op->set] > TLC_DIRECT_ROWS)
        return false;
    for (int i = 0; i < TLC_MAPPED_MAX; i++) {
        const uint8_t *from = r->c->mapped[i].data;
        if (from && to >= from && to + bytes <= from + r->c->mapped[i].bytes)
            return true;
    }
    return false;
}

static const float *f32(const struct tl_buf *b) { return b ? (const float *)b->data : NULL; }

static struct tlc_set set_of(const struct running *r, int set)
{
    const uint8_t *block = r->block;
    struct tlc_set s = {(const int32_t *)(block + r->at.set_rows[set]), (const int32_t *)(block + r->at.counts) + set,
                        r->caps[set]};
    return s;
}

static void linear(struct running *r, const struct tl_mat *m, const struct tlc_input *in, const struct tlc_set *set,
                   struct tlc_out out)
{
    const struct tlc_acts *acts = &r->c->s.acts;
    if (set->n_cap == 1 && tlc_linear_one_fits(r->c, m, in)) {
        DO(r, tlc_linear_one(&r->launch, m, in, set, out));
        return;
    }
    bool few = tlc_linear_few_fits(&r->launch, m, set->n_cap);
    DO(r, tlc_rows_ready(&r->launch, m, in, !few, acts, set));
    if (few)
        DO(r, tlc_linear_few(&r->launch, m, acts, set, out));
    else
        DO(r, tlc_linear_large(&r->launch, m, acts, set, out));
}

/* The stream's row of the step, normed where the model has this norm. */
static struct tlc_input stream(const struct running *r, bool norm, const struct tl_buf *w)
{
    int d = r->spec->d_model;
    struct tlc_input in = {r->c->s.x, NULL, d, 0, true, false, f32(w), d, d, norm, r->spec->norm_eps};
    return in;
}

/* A row by its place in the set. */
static struct tlc_input placed(const float *data, int n)
{
    struct tlc_input in = {data, NULL, n, 0, false, false, NULL, n, n, false, 0.0f};
    return in;
}

static struct tlc_out to(enum tlc_epi epi, float *data, int64_t ld)
{
    struct tlc_out out = {epi, data, ld};
    return out;
}

/* x = after( x + before( m in ) ) */
static void residual(struct running *r, const struct tl_mat *m, const struct tlc_input *in, const struct tlc_set *set,
                     const struct tl_buf *before, const struct tl_buf *after)
{
    struct tlc_scratch *s = &r->c->s;
    int d = r->spec->d_model;
    if (!before && !after) {
        linear(r, m, in, set, to(TLC_EPI_RESIDUAL, s->x, d));
        return;
    }
    linear(r, m, in, set, to(TLC_EPI_STORE, s->y, d));
    DO(r, tlc_rows_residual(&r->launch, s->x, s->y, d, f32(before), f32(after), r->spec->norm_eps, set));
}

static void op_layer(struct running *r, const struct tl_op *op, const struct tlc_set *set)
{
    const struct tl_layer *l = op->layer;
    const struct tl_arch_spec *spec = r->spec;
    struct tlc_scratch *s = &r->c->s;
    int q_dim = tl_q_dim(spec);
    int64_t qkv_ld = (q_dim + 2 * tl_kv_dim(spec) + 3) / 4 * 4;
    struct tlc_input in = stream(r, l->norm[0] != NULL, l->norm[0]);
    linear(r, l->qkv, &in, set, to(TLC_EPI_STORE, s->wide, qkv_ld));
    if (l->value_embed)
        DO(r, tlc_rows_values(&r->launch, l, spec, &in, &r->view, s->best, s->wide + q_dim + tl_kv_dim(spec), qkv_ld,
                              set));
    struct tlc_attn_call call = {};
    call.spec = spec;
    call.layer = l;
    call.rope = spec->rope == TL_ROPE_NONE ? NULL : f32(r->net->rope);
    call.step = r->view;
    call.set = *set;
    call.plan = r->block + r->at.plans[op->set];
    call.cls = r->cls[op->set];
    call.slot = op->slot;
    call.qkv = s->wide;
    call.ld = qkv_ld;
    call.att = s->att;
    DO(r, tlc_attention(&r->launch, &call));
    in = placed(s->att, q_dim);
    residual(r, l->o, &in, set, l->norm[1], l->norm[2]);
    in = stream(r, l->norm[3] != NULL, l->norm[3]);
    linear(r, l->up, &in, set,
           to(spec->mlp == TL_MLP_SILU_GATED ? TLC_EPI_SILU_MUL : TLC_EPI_RELU2, s->wide, spec->d_ff));
    in = placed(s->wide, spec->d_ff);
    residual(r, l->down, &in, set, l->norm[4], l->norm[5]);
}

static void op_start(struct running *r, const struct tl_op *op, const struct tlc_set *set)
{
    const struct tl_arch_spec *spec = r->spec;
    struct tlc_scratch *s = &r->c->s;
    int d = spec->d_model;
    if (spec->inject != TL_INJECT_NONE) {
        if (spec->inject_norm)
            DO(r, tlc_rows_norm(&r->launch, s->e, s->x, d, f32(r->net->inject_norm), spec->norm_eps, set));
        else
            DO(r, tlc_rows_put(&r->launch, s->e, s->x, true, d, set));
    }
    if (op->host_in)
        DO(r, tlc_rows_put(&r->launch, s->x, s->host_in, false, d, set));
    else if (spec->state_init != TL_STATE_PRELUDE)
        DO(r, tlc_rows_put(&r->launch, s->x, NULL, false, d, set));
}

static void op_inject(struct running *r, const struct tlc_set *set)
{
    const struct tl_arch_spec *spec = r->spec;
    struct tlc_scratch *s = &r->c->s;
    int d = spec->d_model;
    if (spec->inject == TL_INJECT_DIAG) {
        struct tlc_input in = {s->e, NULL, d, 0, true, false, NULL, d, d, false, 0.0f};
        linear(r, r->net->inject_b, &in, set, to(TLC_EPI_STORE, s->y, d));
        DO(r, tlc_rows_diag(&r->launch, s->x, s->y, f32(r->net->inject_decay), f32(r->net->inject_gain), d, set));
    } else if (spec->inject == TL_INJECT_CONCAT_LINEAR) {
        struct tlc_input in = {s->x, s->e, d, d, true, true, NULL, d, 2 * d, false, 0.0f};
        linear(r, r->net->adapter, &in, set, to(TLC_EPI_STORE, s->y, d));
        DO(r, tlc_rows_put(&r->launch, s->x, s->y, false, d, set));
    }
}

static void op_to_coda(struct running *r, const struct tlc_set *set)
{
    const struct tl_arch_spec *spec = r->spec;
    struct tlc_scratch *s = &r->c->s;
    int d = spec->d_model;
    if (spec->core_to_coda == TL_C2C_NORM) {
        const struct tl_buf *w = spec->c2c_is_final_norm ? r->net->final_norm : r->net->coda_norm;
        DO(r, tlc_rows_norm(&r->launch, s->x, s->x, d, f32(w), spec->norm_eps, set));
    } else if (spec->core_to_coda == TL_C2C_LINEAR) {
        struct tlc_input in = stream(r, false, NULL);
        linear(r, r->net->coda_in, &in, set, to(TLC_EPI_STORE, s->y, d));
        DO(r, tlc_rows_put(&r->launch, s->x, s->y, false, d, set));
    }
}

float *tlc_result(struct running *r, int64_t n)
{
    float *at = r->c->s.results + r->results_used;
    r->results_used += (n + 63) / 64 * 64;
    return at;
}

static void run_op(struct running *r, const struct tl_op *op)
{
    struct tlc_set set = set_of(r, op->set);
    const struct tl_arch_spec *spec = r->spec;
    struct tlc_scratch *s = &r->c->s;
    int d = spec->d_model;
    struct tlc_input in;
    float *out = tlc_result(r, tlc_result_width(r, op->kind) * set.n_cap);
    if (tlc_direct(r, op))
        out = op->host_out;
    switch (op->kind) {
    case TL_OP_EMBED:
        DO(r, tlc_rows_embed(&r->launch, r->net->embed, &r->view, s->best, spec->embed_scale, s->x, d, &set));
        break;
    case TL_OP_START: op_start(r, op, &set); break;
    case TL_OP_INJECT: op_inject(r, &set); break;
    case TL_OP_LAYER: op_layer(r, op, &set); break;
    case TL_OP_LOOP_NORM:
        DO(r, tlc_rows_norm(&r->launch, s->x, s->x, d, f32(r->net->loop_norm), spec->norm_eps, &set));
        break;
    case TL_OP_TO_CODA: op_to_coda(r, &set); break;
    case TL_OP_GATE: DO(r, tlc_rows_gate(&r->launch, out, s->x, f32(r->net->gate_w), r->net->gate_b, d, &set)); break;
    case TL_OP_LOAD_STATE:
    case TL_OP_SAVE_STATE:
        DO(r, tlc_rows_state(&r->launch, &r->view, op->kind == TL_OP_SAVE_STATE, s->x, s->e, d,
                             r->step->kv.state_rows_per_page, &set));
        break;
    case TL_OP_LOAD_ROWS: DO(r, tlc_rows_put(&r->launch, s->x, s->host_in, false, d, &set)); break;
    case TL_OP_SAVE_ROWS: DO(r, tlc_rows_take(&r->launch, out, s->x, d, &set)); break;
    case TL_OP_HEAD:
        in = stream(r, spec->final_norm, r->net->final_norm);
        linear(r, r->net->head, &in, &set, to(TLC_EPI_STORE, out, spec->vocab_size));
        r->logits = out;
        break;
    case TL_OP_BEST:
        DO(r, tlc_rows_best(&r->launch, s->best, s->best_parts, r->logits, spec->vocab_size,
                            &((const struct header *)r->block)->report, &set));
        break;
    case TL_OP_DRAW:
        DO(r, tlc_rows_draw(&r->launch, s->best, s->best_parts, r->logits, spec->vocab_size,
                            (const struct tlc_draw *)(r->block + r->at.draws),
                            &((const struct header *)r->block)->report, &set));
        break;
    }
}

/* The layers from op i on, and the HEAD behind them, as one kernel; returns how many ops that is. */
static int run_solo(struct running *r, int i)
{
    int n = 1;
    bool has_head = false;
    int64_t used = r->results_used;
    struct tlc_set set = set_of(r, r->step->ops[i].set);
    float *logits = tlc_result(r, tlc_result_width(r, TL_OP_HEAD) * set.n_cap);
    struct tlc_solo_call call = {r->step, i, r->view, set, r->c->s.x, logits};
    DO(r, tlc_solo_layers(&r->launch, r->c->solo, &call, &n, &has_head));
    if (has_head)
        r->logits = logits;
    else
        r->results_used = used;
    return n;
}

void tlc_run_ops(struct running *r)
{
    r->results_used = 0;
    for (int i = 0, n; i < r->step->n_ops; i += n) {
        const struct tl_op *op = &r->step->ops[i];
        n = 1;
        if (r->step->sets[op->set].n == 0)
            continue;
        if (r->solo && op->kind == TL_OP_LAYER)
            n = run_solo(r, i);
        else
            run_op(r, op);
    }
}
