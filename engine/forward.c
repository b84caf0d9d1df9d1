#include "forward.h"

#include <string.h>

#include "arch_bind.h"
#include "mem.h"

struct tl_forward {
    struct tl_backend *be;
    const struct tl_net *net;
    const struct tl_kv *kv;
    struct tl_forward_params p;
    struct tl_row *rows;      /* [rows_max] */
    struct tl_step_seq *seqs; /* [rows_max] */
    int32_t *set_rows;        /* room for n_sets_max sets of rows_max */
    struct tl_row_set *sets;
    int n_sets_max;
    struct tl_op *ops;
    int n_ops_max;
    float *logits;      /* [heads_max][vocab] */
    float *hidden;      /* [rows_max][d_model] */
    float *host_in;     /* [rows_max][d_model]: start states, or last rows */
    float *gates;       /* [loops_max][rows_max] */
    int32_t *gate_rows; /* [loops_max][rows_max] whose they are; a row may be cancelled in between */
    int *n_gates;       /* [loops_max] */
    struct tl_step step;
};

/* Which rows an op is for. */
enum select {
    SEL_PRELUDE,
    SEL_START,
    SEL_RESUMED,
    SEL_LOOP,
    SEL_GATE,
    SEL_SAVE,
    SEL_CODA,
    SEL_LAST,
    SEL_HIDDEN,
    SEL_HEAD
};

static bool selects(const struct tl_forward_row *r, enum select sel, int loop)
{
    bool in_loop = !r->last_row && loop >= r->from_loop && loop < r->to_loop;
    if (r->cancelled && atomic_load_explicit(r->cancelled, memory_order_relaxed))
        return false;
    switch (sel) {
    case SEL_PRELUDE:
    case SEL_START: return !r->last_row && r->from_loop < 0;
    case SEL_RESUMED: return !r->last_row && r->from_loop >= 0;
    case SEL_LOOP: return in_loop;
    case SEL_GATE: return in_loop && r->gates;
    case SEL_SAVE: return r->save_state;
    case SEL_CODA: return !r->last_row && !r->no_coda;
    case SEL_LAST: return r->last_row != NULL;
    case SEL_HIDDEN: return r->keep_hidden;
    case SEL_HEAD: return r->head;
    }
    return false;
}

void tl_forward_free(struct tl_forward *f)
{
    if (!f)
        return;
    tl_free(f->rows);
    tl_free(f->seqs);
    tl_free(f->set_rows);
    tl_free(f->sets);
    tl_free(f->ops);
    tl_free(f->logits);
    tl_free(f->hidden);
    tl_free(f->host_in);
    tl_free(f->gates);
    tl_free(f->gate_rows);
    tl_free(f->n_gates);
    tl_free(f);
}

enum tl_status tl_forward_create(struct tl_forward **out, struct tl_backend *be, const struct tl_net *net,
                                 const struct tl_kv *kv, const struct tl_forward_params *p, struct tl_error *err)
{
    const struct tl_arch_spec *spec = &net->spec;
    struct tl_forward *f = tl_calloc(1, sizeof(*f));
    size_t rows = (size_t)p->rows_max, d = (size_t)spec->d_model;

    *out = NULL;
    if (!f)
        return tl_fail_host_memory(err, sizeof(*f));
    f->be = be;
    f->net = net;
    f->kv = kv;
    f->p = *p;
    f->n_sets_max = 2 * p->loops_max + 16;
    f->n_ops_max = tl_n_slots(spec, p->loops_max) + 4 * p->loops_max + 16;
    f->rows = tl_array(rows, sizeof(*f->rows));
    f->seqs = tl_array(rows, sizeof(*f->seqs));
    f->set_rows = tl_array((size_t)f->n_sets_max * rows, sizeof(*f->set_rows));
    f->sets = tl_array((size_t)f->n_sets_max, sizeof(*f->sets));
    f->ops = tl_array((size_t)f->n_ops_max, sizeof(*f->ops));
    f->logits = tl_array((size_t)p->heads_max * (size_t)spec->vocab_size, sizeof(float));
    f->hidden = tl_array(rows * d, sizeof(float));
    f->host_in = tl_array(rows * d, sizeof(float));
    f->gates = tl_array((size_t)p->loops_max * rows, sizeof(float));
    f->gate_rows = tl_array((size_t)p->loops_max * rows, sizeof(*f->gate_rows));
    f->n_gates = tl_array((size_t)p->loops_max, sizeof(*f->n_gates));
    if (!f->gate_rows || !f->n_gates || !f->rows || !f->seqs || !f->set_rows || !f->sets || !f->ops || !f->logits ||
        !f->hidden || !f->host_in || !f->gates) {
        tl_forward_free(f);
        return tl_fail_host_memory(err, rows * d * 2 * sizeof(float));
    }
    *out = f;
    return TL_OK;
}

int tl_forward_rows_max(const struct tl_forward *f) { return f->p.rows_max; }
int tl_forward_heads_max(const struct tl_forward *f) { return f->p.heads_max; }

/* The set of rows that `sel` picks now; the previous set again if it has the same rows. -1 if none. */
static int set_of(struct tl_forward *f, const struct tl_forward_row *rows, int n_rows, enum select sel, int loop)
{
    struct tl_step *st = &f->step;
    int32_t *at = f->set_rows + (size_t)st->n_sets * (size_t)f->p.rows_max;
    const struct tl_row_set *prev = st->n_sets ? &f->sets[st->n_sets - 1] : NULL;
    int n = 0;

    TL_ASSERT(st->n_sets < f->n_sets_max);
    for (int i = 0; i < n_rows; i++)
        if (selects(&rows[i], sel, loop))
            at[n++] = i;
    if (!n)
        return -1;
    if (prev && prev->n == n && !memcmp(prev->rows, at, (size_t)n * sizeof(*at)))
        return st->n_sets - 1;
    f->sets[st->n_sets].rows = at;
    f->sets[st->n_sets].n = n;
    return st->n_sets++;
}

static struct tl_op *add_op(struct tl_forward *f, enum tl_op_kind kind, int set)
{
    struct tl_op *op = &f->ops[f->step.n_ops++];
    TL_ASSERT(f->step.n_ops <= f->n_ops_max && set >= 0);
    memset(op, 0, sizeof(*op));
    op->kind = kind;
    op->set = set;
    return op;
}

static void add_layers(struct tl_forward *f, int set, const struct tl_layer *layers, int n, int slot)
{
    for (int i = 0; i < n; i++) {
        struct tl_op *op = add_op(f, TL_OP_LAYER, set);
        op->layer = &layers[i];
        op->slot = slot + i;
    }
}

/* Hand the ops made so far to the device and start a new list. */
static enum tl_status flush(struct tl_forward *f, struct tl_error *err)
{
    enum tl_status st = f->step.n_ops ? f->be->ops->run(f->be, &f->step, err) : TL_OK;
    f->step.n_ops = f->step.n_sets = 0;
    return st;
}

/* Between stages: a device that runs ahead gets one list, any other gets this stage now, so that the next one can leave
 * out rows that were cancelled meanwhile. */
static enum tl_status end_stage(struct tl_forward *f, struct tl_error *err)
{
    return f->be->ops->runs_ahead ? TL_OK : flush(f, err);
}

static void fill_rows(struct tl_forward *f, const struct tl_forward_row *rows, int n_rows)
{
    const struct tl_seq *prev = NULL;

    f->step.n_seqs = 0;
    for (int i = 0; i < n_rows; i++) {
        const struct tl_seq *s = rows[i].seq;
        if (s && s != prev) {
            struct tl_step_seq *d = &f->seqs[f->step.n_seqs++];
            d->pages = s->pages;
            d->stride = s->stride;
            d->window = s->window;
            d->state_pages = s->state_pages ? s->state_pages : s->base ? s->base->state_pages : NULL;
            prev = s;
        }
        f->rows[i].seq = s ? f->step.n_seqs - 1 : -1;
        f->rows[i].pos = rows[i].pos;
        f->rows[i].token = rows[i].token;
    }
    f->step.n_rows = n_rows;
}

static void add_start(struct tl_forward *f, const struct tl_forward_row *rows, int set)
{
    const struct tl_arch_spec *spec = &f->net->spec;
    const struct tl_row_set *rs = &f->sets[set];
    bool given = spec->state_init == TL_STATE_TRUNCNORM;

    for (int i = 0; i < rs->n; i++)
        given |= rows[rs->rows[i]].start_state != NULL;
    if (spec->inject == TL_INJECT_NONE && !given && spec->state_init == TL_STATE_PRELUDE)
        return; /* the stream just goes on */
    for (int i = 0; given && i < rs->n; i++) {
        const struct tl_forward_row *r = &rows[rs->rows[i]];
        float *dst = f->host_in + (size_t)i * (size_t)spec->d_model;
        if (r->start_state)
            memcpy(dst, r->start_state, (size_t)spec->d_model * sizeof(float));
        else if (spec->state_init == TL_STATE_TRUNCNORM)
            tl_start_state(spec, f->p.start_seed, r->pos, dst);
        else
            memset(dst, 0, (size_t)spec->d_model * sizeof(float));
    }
    add_op(f, TL_OP_START, set)->host_in = given ? f->host_in : NULL;
}

static void add_gate(struct tl_forward *f, int set, int loop)
{
    size_t at = (size_t)loop * (size_t)f->p.rows_max;
    f->n_gates[loop] = f->sets[set].n;
    memcpy(f->gate_rows + at, f->sets[set].rows, (size_t)f->sets[set].n * sizeof(*f->gate_rows));
    add_op(f, TL_OP_GATE, set)->host_out = f->gates + at;
}

static enum tl_status run_stages(struct tl_forward *f, struct tl_forward_row *rows, int n_rows, int loops_max,
                                 struct tl_error *err)
{
    const struct tl_net *net = f->net;
    const struct tl_arch_spec *spec = &net->spec;
    const struct tl_layer *core = net->layers + spec->n_prelude, *coda = core + spec->n_core;
    enum tl_status st;
    int set;

    if ((set = set_of(f, rows, n_rows, SEL_PRELUDE, 0)) >= 0) {
        add_op(f, TL_OP_EMBED, set);
        add_layers(f, set, net->layers, spec->n_prelude, tl_slot_prelude(spec, 0));
        add_start(f, rows, set);
    }
    if ((set = set_of(f, rows, n_rows, SEL_RESUMED, 0)) >= 0)
        add_op(f, TL_OP_LOAD_STATE, set);
    if ((st = end_stage(f, err)) != TL_OK)
        return st;

    for (int loop = 0; loop < loops_max; loop++) {
        if ((set = set_of(f, rows, n_rows, SEL_LOOP, loop)) < 0)
            continue;
        if (spec->inject != TL_INJECT_NONE && !(loop == 0 && spec->skip_first_inject))
            add_op(f, TL_OP_INJECT, set);
        add_layers(f, set, core, spec->n_core, tl_slot_core(spec, loop, 0));
        if (spec->loop_end_norm)
            add_op(f, TL_OP_LOOP_NORM, set);
        if (net->gate_w && (set = set_of(f, rows, n_rows, SEL_GATE, loop)) >= 0)
            add_gate(f, set, loop);
        if ((st = end_stage(f, err)) != TL_OK)
            return st;
    }

    if ((set = set_of(f, rows, n_rows, SEL_SAVE, 0)) >= 0)
        add_op(f, TL_OP_SAVE_STATE, set);
    if ((set = set_of(f, rows, n_rows, SEL_CODA, 0)) >= 0) {
        if (spec->core_to_coda != TL_C2C_NONE)
            add_op(f, TL_OP_TO_CODA, set);
        add_layers(f, set, coda, spec->n_coda, tl_slot_coda(spec, 0));
    }
    return end_stage(f, err);
}

/* Head-only rows, kept rows and logits. */
static enum tl_status run_readout(struct tl_forward *f, struct tl_forward_row *rows, int n_rows, struct tl_error *err)
{
    size_t d = (size_t)f->net->spec.d_model, vocab = (size_t)f->net->spec.vocab_size;
    struct tl_row_set hidden = {0}, head = {0};
    enum tl_status st;
    int set;

    if ((set = set_of(f, rows, n_rows, SEL_LAST, 0)) >= 0) {
        st = flush(f, err); /* host_in is free again only after the start states were read */
        if (st == TL_OK && f->be->ops->runs_ahead)
            st = f->be->ops->sync(f->be, err);
        if (st != TL_OK)
            return st;
        set = set_of(f, rows, n_rows, SEL_LAST, 0);
        for (int i = 0; set >= 0 && i < f->sets[set].n; i++)
            memcpy(f->host_in + (size_t)i * d, rows[f->sets[set].rows[i]].last_row, d * sizeof(float));
        if (set >= 0)
            add_op(f, TL_OP_LOAD_ROWS, set)->host_in = f->host_in;
    }
    if ((set = set_of(f, rows, n_rows, SEL_HIDDEN, 0)) >= 0) {
        add_op(f, TL_OP_SAVE_ROWS, set)->host_out = f->hidden;
        hidden = f->sets[set];
    }
    if ((set = set_of(f, rows, n_rows, SEL_HEAD, 0)) >= 0) {
        add_op(f, TL_OP_HEAD, set)->host_out = f->logits;
        head = f->sets[set];
        TL_ASSERT(head.n <= f->p.heads_max);
    }
    st = flush(f, err);
    if (st == TL_OK)
        st = f->be->ops->sync(f->be, err);
    if (st != TL_OK)
        return st;
    for (int i = 0; i < hidden.n; i++)
        rows[hidden.rows[i]].hidden = f->hidden + (size_t)i * d;
    for (int i = 0; i < head.n; i++)
        rows[head.rows[i]].logits = f->logits + (size_t)i * vocab;
    return TL_OK;
}

enum tl_status tl_forward_run(struct tl_forward *f, struct tl_forward_row *rows, int n_rows, struct tl_error *err)
{
    int loops_max = 0;
    bool gates = false;
    enum tl_status st;

    TL_ASSERT(n_rows > 0 && n_rows <= f->p.rows_max);
    memset(&f->step, 0, sizeof(f->step));
    f->step.net = f->net;
    f->step.kv = f->kv->view;
    f->step.rows = f->rows;
    f->step.seqs = f->seqs;
    f->step.sets = f->sets;
    f->step.ops = f->ops;
    fill_rows(f, rows, n_rows);
    for (int i = 0; i < n_rows; i++) {
        rows[i].logits = NULL;
        rows[i].hidden = NULL;
        gates |= rows[i].gates != NULL;
        if (!rows[i].last_row && rows[i].to_loop > loops_max)
            loops_max = rows[i].to_loop;
    }
    TL_ASSERT(loops_max <= f->p.loops_max);
    memset(f->n_gates, 0, (size_t)loops_max * sizeof(*f->n_gates));
    st = run_stages(f, rows, n_rows, loops_max, err);
    if (st == TL_OK)
        st = run_readout(f, rows, n_rows, err);
    if (st != TL_OK || !gates)
        return st;
    for (int loop = 0; loop < loops_max; loop++)
        for (int i = 0; i < f->n_gates[loop]; i++) {
            size_t at = (size_t)loop * (size_t)f->p.rows_max + (size_t)i;
            const struct tl_forward_row *r = &rows[f->gate_rows[at]];
            r->gates[loop * r->gate_stride] = f->gates[at];
        }
    return TL_OK;
}
