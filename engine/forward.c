#include "forward.h"

#include <string.h>

#include "arch_bind.h"
#include "mem.h"

/* A call under way: what the device reads from and writes to host memory, and whose it is. */
struct flight {
    bool busy;
    uint64_t serial; /* a later call has a larger one */
    struct tl_forward_row *rows;
    int n_rows;
    bool best, any_gates;
    float *host_in;                   /* [rows_max][d_model]: start states, or last rows */
    float *logits;                    /* [heads_max][vocab] */
    int32_t *tokens;                  /* [heads_max] chosen tokens */
    struct tl_draw_params *draws;     /* [heads_max] and how */
    float *hidden;                    /* [rows_max][d_model] */
    float *gates;                     /* [loops_max][rows_max] */
    int32_t *gate_rows;               /* [loops_max][rows_max] whose they are; a row may be cancelled in between */
    int *n_gates;                     /* [loops_max] */
    int32_t *head_rows, *hidden_rows; /* [rows_max] */
    int n_heads, n_hidden;
};

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
    struct tl_step step;
    struct flight flights[TL_FLIGHTS_MAX];
    uint64_t serial;
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

static void free_flight(struct tl_backend *be, struct flight *l)
{
    be->ops->host_free(be, l->host_in);
    be->ops->host_free(be, l->logits);
    be->ops->host_free(be, l->tokens);
    be->ops->host_free(be, l->hidden);
    be->ops->host_free(be, l->gates);
    tl_free(l->draws);
    tl_free(l->gate_rows);
    tl_free(l->n_gates);
    tl_free(l->head_rows);
    tl_free(l->hidden_rows);
}

/* Calls under way that were started after the one of this serial. */
static int later_flights(const struct tl_forward *f, uint64_t serial)
{
    int n = 0;
    for (int i = 0; i < TL_FLIGHTS_MAX; i++)
        n += f->flights[i].busy && f->flights[i].serial > serial;
    return n;
}

void tl_forward_free(struct tl_forward *f)
{
    if (!f)
        return;
    if (later_flights(f, 0)) /* the device may still write to what goes now */
        (void)f->be->ops->sync(f->be, NULL);
    tl_free(f->rows);
    tl_free(f->seqs);
    tl_free(f->set_rows);
    tl_free(f->sets);
    tl_free(f->ops);
    for (int i = 0; i < TL_FLIGHTS_MAX; i++)
        free_flight(f->be, &f->flights[i]);
    tl_free(f);
}

/* Memory that the device copies from and to: n x width values of 4 bytes. */
static void *host_words(struct tl_backend *be, size_t n, size_t width)
{
    size_t bytes;
    if (__builtin_mul_overflow(n, width * 4, &bytes))
        return NULL;
    return be->ops->host_alloc(be, bytes);
}

static bool make_flight(struct tl_forward *f, struct flight *l)
{
    size_t rows = (size_t)f->p.rows_max, heads = (size_t)f->p.heads_max, loops = (size_t)f->p.loops_max;
    size_t d = (size_t)f->net->spec.d_model;
    l->host_in = host_words(f->be, rows, d);
    l->logits = host_words(f->be, heads, (size_t)f->net->spec.vocab_size);
    l->tokens = host_words(f->be, heads, 1);
    l->hidden = host_words(f->be, rows, d);
    l->gates = host_words(f->be, loops, rows);
    l->draws = tl_array(heads, sizeof(*l->draws));
    l->gate_rows = tl_array(loops * rows, sizeof(*l->gate_rows));
    l->n_gates = tl_array(loops, sizeof(*l->n_gates));
    l->head_rows = tl_array(rows, sizeof(*l->head_rows));
    l->hidden_rows = tl_array(rows, sizeof(*l->hidden_rows));
    return l->host_in && l->logits && l->tokens && l->draws && l->hidden && l->gates && l->gate_rows && l->n_gates &&
           l->head_rows && l->hidden_rows;
}

enum tl_status tl_forward_create(struct tl_forward **out, struct tl_backend *be, const struct tl_net *net,
                                 const struct tl_kv *kv, const struct tl_forward_params *p, struct tl_error *err)
{
    const struct tl_arch_spec *spec = &net->spec;
    struct tl_forward *f = tl_calloc(1, sizeof(*f));
    size_t rows = (size_t)p->rows_max;
    bool ok;

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
    ok = f->rows && f->seqs && f->set_rows && f->sets && f->ops;
    for (int i = 0; ok && i < tl_forward_flights_max(f); i++)
        ok = make_flight(f, &f->flights[i]);
    if (!ok) {
        tl_forward_free(f);
        return tl_fail_host_memory(err, rows * (size_t)spec->d_model * 2 * sizeof(float));
    }
    *out = f;
    return TL_OK;
}

int tl_forward_rows_max(const struct tl_forward *f) { return f->p.rows_max; }
int tl_forward_heads_max(const struct tl_forward *f) { return f->p.heads_max; }
int tl_forward_flights_max(const struct tl_forward *f) { return f->be->ops->runs_ahead ? TL_FLIGHTS_MAX : 1; }

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
        f->rows[i].token = rows[i].chained ? TL_TOKEN_CHAINED(rows[i].token) : rows[i].token;
    }
    f->step.n_rows = n_rows;
}

static void add_start(struct tl_forward *f, const struct flight *l, int set)
{
    const struct tl_arch_spec *spec = &f->net->spec;
    const struct tl_row_set *rs = &f->sets[set];
    const struct tl_forward_row *rows = l->rows;
    bool given = spec->state_init == TL_STATE_TRUNCNORM;

    for (int i = 0; i < rs->n; i++)
        given |= rows[rs->rows[i]].start_state != NULL;
    if (spec->inject == TL_INJECT_NONE && !given && spec->state_init == TL_STATE_PRELUDE)
        return; /* the stream just goes on */
    for (int i = 0; given && i < rs->n; i++) {
        const struct tl_forward_row *r = &rows[rs->rows[i]];
        float *dst = l->host_in + (size_t)i * (size_t)spec->d_model;
        if (r->start_state)
            memcpy(dst, r->start_state, (size_t)spec->d_model * sizeof(float));
        else if (spec->state_init == TL_STATE_TRUNCNORM)
            tl_start_state(spec, f->p.start_seed, r->pos, dst);
        else
            memset(dst, 0, (size_t)spec->d_model * sizeof(float));
    }
    add_op(f, TL_OP_START, set)->host_in = given ? l->host_in : NULL;
}

static void add_gate(struct tl_forward *f, struct flight *l, int set, int loop)
{
    size_t at = (size_t)loop * (size_t)f->p.rows_max;
    l->n_gates[loop] = f->sets[set].n;
    memcpy(l->gate_rows + at, f->sets[set].rows, (size_t)f->sets[set].n * sizeof(*l->gate_rows));
    add_op(f, TL_OP_GATE, set)->host_out = l->gates + at;
}

static enum tl_status run_stages(struct tl_forward *f, struct flight *l, int loops_max, struct tl_error *err)
{
    struct tl_forward_row *rows = l->rows;
    int n_rows = l->n_rows;
    const struct tl_net *net = f->net;
    const struct tl_arch_spec *spec = &net->spec;
    const struct tl_layer *core = net->layers + spec->n_prelude, *coda = core + spec->n_core;
    enum tl_status st;
    int set;

    if ((set = set_of(f, rows, n_rows, SEL_PRELUDE, 0)) >= 0) {
        add_op(f, TL_OP_EMBED, set);
        add_layers(f, set, net->layers, spec->n_prelude, tl_slot_prelude(spec, 0));
        add_start(f, l, set);
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
            add_gate(f, l, set, loop);
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

/* Is only a token wanted of every row that has a head, and can the device choose it? */
static bool token_will_do(const struct tl_forward *f, const struct flight *l)
{
    for (int i = 0; i < l->n_rows; i++)
        if (l->rows[i].head && !l->rows[i].chosen)
            return false;
    return f->be->ops->runs_ahead;
}

static void add_choice(struct tl_forward *f, struct flight *l, int set)
{
    const struct tl_row_set *rs = &f->sets[set];
    bool draws = false;
    struct tl_op *op;
    for (int i = 0; i < rs->n; i++) {
        l->draws[i] = l->rows[rs->rows[i]].draw;
        draws |= l->draws[i].temperature > 0;
    }
    op = add_op(f, draws ? TL_OP_DRAW : TL_OP_BEST, set);
    op->host_tokens = l->tokens;
    op->draws = draws ? l->draws : NULL;
}

static void keep_set(int32_t *rows, int *n, const struct tl_row_set *set)
{
    memcpy(rows, set->rows, (size_t)set->n * sizeof(*rows));
    *n = set->n;
}

/* Head-only rows, kept rows, logits or tokens. */
static enum tl_status run_readout(struct tl_forward *f, struct flight *l, struct tl_error *err)
{
    struct tl_forward_row *rows = l->rows;
    size_t d = (size_t)f->net->spec.d_model;
    enum tl_status st;
    int set;

    if ((set = set_of(f, rows, l->n_rows, SEL_LAST, 0)) >= 0) {
        st = flush(f, err); /* host_in is free again only after the start states were read */
        if (st == TL_OK && f->be->ops->runs_ahead)
            st = f->be->ops->sync(f->be, err);
        if (st != TL_OK)
            return st;
        set = set_of(f, rows, l->n_rows, SEL_LAST, 0);
        for (int i = 0; set >= 0 && i < f->sets[set].n; i++)
            memcpy(l->host_in + (size_t)i * d, rows[f->sets[set].rows[i]].last_row, d * sizeof(float));
        if (set >= 0)
            add_op(f, TL_OP_LOAD_ROWS, set)->host_in = l->host_in;
    }
    if ((set = set_of(f, rows, l->n_rows, SEL_HIDDEN, 0)) >= 0) {
        add_op(f, TL_OP_SAVE_ROWS, set)->host_out = l->hidden;
        keep_set(l->hidden_rows, &l->n_hidden, &f->sets[set]);
    }
    if ((set = set_of(f, rows, l->n_rows, SEL_HEAD, 0)) >= 0) {
        l->best = token_will_do(f, l);
        add_op(f, TL_OP_HEAD, set)->host_out = l->best ? NULL : l->logits;
        TL_ASSERT(f->sets[set].n <= f->p.heads_max);
        if (l->best)
            add_choice(f, l, set);
        keep_set(l->head_rows, &l->n_heads, &f->sets[set]);
    }
    return flush(f, err);
}

enum tl_status tl_forward_start(struct tl_forward *f, struct tl_forward_row *rows, int n_rows, int *flight,
                                struct tl_error *err)
{
    struct flight *l = f->flights;
    int loops_max = 0;
    enum tl_status st;

    while (l->busy && l < f->flights + tl_forward_flights_max(f))
        l++;
    TL_ASSERT(n_rows > 0 && n_rows <= f->p.rows_max && l < f->flights + tl_forward_flights_max(f));
    memset(&f->step, 0, sizeof(f->step));
    f->step.net = f->net;
    f->step.kv = f->kv->view;
    f->step.rows = f->rows;
    f->step.seqs = f->seqs;
    f->step.sets = f->sets;
    f->step.ops = f->ops;
    l->rows = rows;
    l->n_rows = n_rows;
    l->n_heads = l->n_hidden = 0;
    l->best = l->any_gates = false;
    fill_rows(f, rows, n_rows);
    for (int i = 0; i < n_rows; i++) {
        rows[i].logits = NULL;
        rows[i].hidden = NULL;
        rows[i].best = -1;
        l->any_gates |= rows[i].gates != NULL;
        if (!rows[i].last_row && rows[i].to_loop > loops_max)
            loops_max = rows[i].to_loop;
    }
    TL_ASSERT(loops_max <= f->p.loops_max);
    memset(l->n_gates, 0, (size_t)f->p.loops_max * sizeof(*l->n_gates));
    st = run_stages(f, l, loops_max, err);
    if (st == TL_OK)
        st = run_readout(f, l, err);
    l->busy = st == TL_OK;
    l->serial = ++f->serial;
    *flight = (int)(l - f->flights);
    return st;
}

enum tl_status tl_forward_finish(struct tl_forward *f, int flight, struct tl_error *err)
{
    struct flight *l = &f->flights[flight];
    int left = later_flights(f, l->serial);
    size_t d = (size_t)f->net->spec.d_model, vocab = (size_t)f->net->spec.vocab_size;
    enum tl_status st;

    TL_ASSERT(l->busy);
    st = left ? f->be->ops->wait(f->be, left, err) : f->be->ops->sync(f->be, err);
    l->busy = false;
    if (st != TL_OK)
        return st;
    for (int i = 0; i < l->n_hidden; i++)
        l->rows[l->hidden_rows[i]].hidden = l->hidden + (size_t)i * d;
    for (int i = 0; i < l->n_heads; i++) {
        struct tl_forward_row *r = &l->rows[l->head_rows[i]];
        if (l->best)
            r->best = l->tokens[i];
        else
            r->logits = l->logits + (size_t)i * vocab;
    }
    for (int loop = 0; l->any_gates && loop < f->p.loops_max; loop++)
        for (int i = 0; i < l->n_gates[loop]; i++) {
            size_t at = (size_t)loop * (size_t)f->p.rows_max + (size_t)i;
            const struct tl_forward_row *r = &l->rows[l->gate_rows[at]];
            r->gates[loop * r->gate_stride] = l->gates[at];
        }
    return TL_OK;
}

enum tl_status tl_forward_run(struct tl_forward *f, struct tl_forward_row *rows, int n_rows, struct tl_error *err)
{
    int flight;
    enum tl_status st = tl_forward_start(f, rows, n_rows, &flight, err);
    return st == TL_OK ? tl_forward_finish(f, flight, err) : st;
}
