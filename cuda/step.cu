/* A step on the device. What changes from step to step (rows, page tables, sets, plans of attention) is one block of bytes,
 * copied to a fixed place; what stays (the ops, how many rows they must be able to take) is the step's shape. Launches depend on
 * the shape alone, so the second time a shape is seen they are captured as a graph, and from then on a step is a copy, a graph
 * launch, and copies of results that are large. Small results (tokens, gates, kept rows) are written to the host's memory by the
 * kernels, tokens with the step's number beside them: nobody has to ask the driver whether a step has ended. (Kernels that read
 * the host's memory were tried for the block: 70 us instead of 10, each read is a round trip.) */
#include "backend_impl.cuh"

#include <string.h>

#define STAGINGS   2   /* host copies of the block, so that one can be written while the device reads the other */
#define GRAPHS_MAX 192 /* shapes that are remembered; the one not used for longest goes */
#define PAGES_FIRST ((size_t)1 << 20) /* bytes of page tables there is room for at first */

struct graph {
    int32_t *key;
    int n_key;
    uint64_t hash, used;
    cudaGraphExec_t exec; /* NULL: seen once */
};

struct report { /* of a run that writes its tokens to the host as they are chosen; n 0: it does not */
    int n;
    int32_t *tokens;   /* where they are wanted */
    uint64_t *written; /* [rows_max] mapped host memory: the run's number in the high half, the token in the low one */
};

struct tlc_graphs {
    uint8_t *block; /* device */
    size_t block_bytes;
    uint8_t *staging[STAGINGS];  /* mapped host memory */
    cudaEvent_t ended[STAGINGS]; /* the run that used it has ended */
    uint64_t number;             /* of the last run */
    struct report reports[STAGINGS];
    int32_t *key; /* of the step at hand */
    int n_key, key_max;
    int32_t *seq_slots, *seq_blocks, *seq_states; /* [rows_max]: what of each sequence's tables this step needs */
    struct graph graphs[GRAPHS_MAX];
    uint64_t clock;
};

/* Where the parts of the block are; all of it but the page tables follows from the shape. */
struct header { /* at its start */
    uint64_t number;
};

struct layout {
    size_t rows, seqs, counts, pages;
    size_t set_rows[TLC_SETS_MAX], plans[TLC_SETS_MAX];
    size_t end; /* of the page tables */
};

struct running {
    struct tlc_backend *c;
    const struct tl_step *step;
    const struct tl_net *net;
    const struct tl_arch_spec *spec;
    struct layout at;
    int caps[TLC_SETS_MAX];
    bool attends[TLC_SETS_MAX];
    uint32_t cls[TLC_SETS_MAX];
    struct tlc_step view;
    struct tlc_launch launch;
    int64_t results_used;
    const float *logits; /* of the last HEAD */
    int staging;
    bool reports;    /* the tokens are all there is to say of the step, or the rest is written before them */
    bool keeps_rows; /* by kernels, to the host's memory */
    cudaError_t e; /* the first error of a launch; launches after it are skipped */
};

static size_t up(size_t n) { return (n + 255) / 256 * 256; }

/* The count that launches for n rows are made for: a power of two. */
static int cap_of(int n, int rows_max)
{
    int cap = 1;
    while (cap < n)
        cap *= 2;
    return cap < rows_max ? cap : rows_max;
}

/* ---- memory ---- */

void tlc_graphs_free(struct tlc_graphs *g)
{
    if (!g)
        return;
    for (int i = 0; i < GRAPHS_MAX; i++) {
        if (g->graphs[i].exec)
            cudaGraphExecDestroy(g->graphs[i].exec);
        tl_free(g->graphs[i].key);
    }
    for (int i = 0; i < STAGINGS; i++) {
        if (g->staging[i])
            cudaFreeHost(g->staging[i]);
        if (g->ended[i])
            cudaEventDestroy(g->ended[i]);
    }
    for (int i = 0; i < STAGINGS; i++)
        if (g->reports[i].written)
            cudaFreeHost(g->reports[i].written);
    cudaFree(g->block);
    tl_free(g->key);
    tl_free(g->seq_slots);
    tl_free(g->seq_blocks);
    tl_free(g->seq_states);
    tl_free(g);
}

static cudaError_t take_block(struct tlc_graphs *g, size_t bytes)
{
    cudaError_t e = cudaMalloc((void **)&g->block, bytes);
    for (int i = 0; i < STAGINGS && e == cudaSuccess; i++)
        e = cudaMallocHost((void **)&g->staging[i], bytes);
    g->block_bytes = e == cudaSuccess ? bytes : 0;
    return e;
}

enum tl_status tlc_graphs_create(struct tlc_backend *c, struct tl_error *err)
{
    struct tlc_graphs *g = (struct tlc_graphs *)tl_calloc(1, sizeof(*g));
    size_t rows = (size_t)c->s.rows_max;
    cudaError_t e;
    if (!g)
        return tl_fail_host_memory(err, sizeof(*g));
    c->graphs = g;
    g->seq_slots = (int32_t *)tl_array(rows, sizeof(int32_t));
    g->seq_blocks = (int32_t *)tl_array(rows, sizeof(int32_t));
    g->seq_states = (int32_t *)tl_array(rows, sizeof(int32_t));
    if (!g->seq_slots || !g->seq_blocks || !g->seq_states)
        return tl_fail_host_memory(err, rows * sizeof(int32_t));
    e = take_block(g, up(rows * 64) + PAGES_FIRST);
    for (int i = 0; i < STAGINGS && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&g->ended[i], cudaEventDisableTiming);
    for (int i = 0; i < STAGINGS && e == cudaSuccess; i++) {
        e = cudaMallocHost((void **)&g->reports[i].written, rows * sizeof(uint64_t));
        if (e == cudaSuccess)
            memset(g->reports[i].written, 0, rows * sizeof(uint64_t));
    }
    return tlc_check(c, e, "taking memory for steps", err);
}

/* A step with more page tables than any before: take a larger block. Every graph holds the old address and goes. Long contexts of
 * many sequences lead here a few times in a process's life. */
static cudaError_t grow(struct tlc_graphs *g, cudaStream_t stream, size_t bytes)
{
    cudaError_t e = cudaStreamSynchronize(stream);
    if (e != cudaSuccess)
        return e;
    for (int i = 0; i < GRAPHS_MAX; i++) {
        if (g->graphs[i].exec)
            cudaGraphExecDestroy(g->graphs[i].exec);
        tl_free(g->graphs[i].key);
    }
    memset(g->graphs, 0, sizeof(g->graphs));
    for (int i = 0; i < STAGINGS; i++) { /* all copies have ended */
        cudaFreeHost(g->staging[i]);
        g->staging[i] = NULL;
    }
    cudaFree(g->block);
    g->block = NULL;
    return take_block(g, up(bytes + bytes / 2));
}

/* ---- the shape ---- */

static void put_key(struct tlc_graphs *g, int32_t v) { g->key[g->n_key++] = v; }

static void put_key64(struct tlc_graphs *g, const void *p)
{
    uint64_t v = (uint64_t)(uintptr_t)p;
    put_key(g, (int32_t)(v & 0xffffffffu));
    put_key(g, (int32_t)(v >> 32));
}

static int64_t result_width(const struct running *r, enum tl_op_kind kind)
{
    return kind == TL_OP_HEAD        ? r->spec->vocab_size
           : kind == TL_OP_SAVE_ROWS ? r->spec->d_model
           : kind == TL_OP_GATE      ? 1
                                     : 0;
}

/* Is the result small, and does its place in host memory take a kernel's writes? */
static bool direct(const struct running *r, const struct tl_op *op)
{
    const uint8_t *to = (const uint8_t *)op->host_out;
    size_t bytes = (size_t)r->caps[op->set] * 4 * (size_t)result_width(r, op->kind);
    if (!to || op->kind == TL_OP_HEAD || r->caps[op->set] > TLC_DIRECT_ROWS)
        return false;
    for (int i = 0; i < TLC_MAPPED_MAX; i++) {
        const uint8_t *from = r->c->mapped[i].data;
        if (from && to >= from && to + bytes <= from + r->c->mapped[i].bytes)
            return true;
    }
    return false;
}

static enum tl_status make_key(struct running *r, struct tl_error *err)
{
    struct tlc_graphs *g = r->c->graphs;
    const struct tl_step *step = r->step;
    int need = 32 + 2 * step->n_sets + 7 * step->n_ops;
    if (need > g->key_max) {
        tl_free(g->key);
        g->key = (int32_t *)tl_array((size_t)need * 2, sizeof(int32_t));
        g->key_max = g->key ? need * 2 : 0;
        if (!g->key)
            return tl_fail_host_memory(err, (size_t)need * 2 * sizeof(int32_t));
    }
    g->n_key = 0;
    put_key64(g, r->net);
    put_key64(g, r->net->layers);
    put_key64(g, step->kv.arena);
    put_key(g, r->reports ? 1 + r->staging : 0);
    put_key(g, cap_of(step->n_rows, r->c->s.rows_max));
    put_key(g, cap_of(step->n_seqs ? step->n_seqs : 1, r->c->s.rows_max));
    put_key(g, step->n_sets);
    for (int i = 0; i < step->n_sets; i++) {
        put_key(g, r->caps[i]);
        put_key(g, (int32_t)r->cls[i]);
    }
    for (int i = 0; i < step->n_ops; i++) {
        const struct tl_op *op = &step->ops[i];
        put_key(g, op->kind);
        put_key(g, op->set);
        put_key(g, op->layer ? (int32_t)(op->layer - r->net->layers) : -1);
        put_key(g, op->slot);
        put_key(g, op->host_in != NULL);
        put_key64(g, direct(r, op) ? op->host_out : NULL);
    }
    return TL_OK;
}

static uint64_t hash_of(const int32_t *key, int n)
{
    uint64_t h = 1469598103934665603u;
    for (int i = 0; i < n; i++)
        h = (h ^ (uint32_t)key[i]) * 1099511628211u;
    return h;
}

/* The entry of this shape, made new where there is none. *seen: it was there. NULL: no memory. */
static struct graph *find_graph(struct tlc_graphs *g, bool *seen)
{
    uint64_t hash = hash_of(g->key, g->n_key);
    struct graph *oldest = &g->graphs[0];
    *seen = true;
    for (int i = 0; i < GRAPHS_MAX; i++) {
        struct graph *e = &g->graphs[i];
        if (e->key && e->hash == hash && e->n_key == g->n_key &&
            !memcmp(e->key, g->key, (size_t)g->n_key * sizeof(*g->key))) {
            e->used = ++g->clock;
            return e;
        }
        if (e->used < oldest->used)
            oldest = e;
    }
    *seen = false;
    if (oldest->exec)
        cudaGraphExecDestroy(oldest->exec);
    tl_free(oldest->key);
    memset(oldest, 0, sizeof(*oldest));
    oldest->key = (int32_t *)tl_array((size_t)g->n_key, sizeof(*g->key));
    if (!oldest->key)
        return NULL;
    memcpy(oldest->key, g->key, (size_t)g->n_key * sizeof(*g->key));
    oldest->n_key = g->n_key;
    oldest->hash = hash;
    oldest->used = ++g->clock;
    return oldest;
}

/* ---- the block ---- */

/* What of the sequences' tables the ops read: slots, blocks of tokens, blocks of states. */
static void needs_of_seqs(const struct running *r)
{
    struct tlc_graphs *g = r->c->graphs;
    const struct tl_step *step = r->step;
    int slots[TLC_SETS_MAX] = {0};
    bool states[TLC_SETS_MAX] = {false};
    for (int i = 0; i < step->n_seqs; i++)
        g->seq_slots[i] = g->seq_blocks[i] = g->seq_states[i] = 0;
    for (int i = 0; i < step->n_ops; i++) {
        const struct tl_op *op = &step->ops[i];
        if (op->kind == TL_OP_LAYER && op->slot >= slots[op->set])
            slots[op->set] = op->slot + 1;
        states[op->set] |= op->kind == TL_OP_LOAD_STATE || op->kind == TL_OP_SAVE_STATE;
    }
    for (int s = 0; s < step->n_sets; s++)
        for (int i = 0; (slots[s] || states[s]) && i < step->sets[s].n; i++) {
            const struct tl_row *row = &step->rows[step->sets[s].rows[i]];
            if (slots[s] > g->seq_slots[row->seq])
                g->seq_slots[row->seq] = slots[s];
            if (slots[s] && row->pos / TL_BLOCK_TOKENS >= g->seq_blocks[row->seq])
                g->seq_blocks[row->seq] = row->pos / TL_BLOCK_TOKENS + 1;
            if (states[s] && row->pos / step->kv.state_rows_per_page >= g->seq_states[row->seq])
                g->seq_states[row->seq] = row->pos / step->kv.state_rows_per_page + 1;
        }
}

static void lay_out(struct running *r)
{
    const struct tl_step *step = r->step;
    struct layout *at = &r->at;
    int rows_max = r->c->s.rows_max;
    size_t end = up(sizeof(struct header));
    at->rows = end;
    end = up(end + (size_t)cap_of(step->n_rows, rows_max) * sizeof(struct tlc_row));
    at->seqs = end;
    end = up(end + (size_t)cap_of(step->n_seqs ? step->n_seqs : 1, rows_max) * sizeof(struct tlc_seq));
    at->counts = end;
    end = up(end + (size_t)step->n_sets * sizeof(int32_t));
    for (int i = 0; i < step->n_sets; i++) {
        at->set_rows[i] = end;
        end = up(end + (size_t)r->caps[i] * sizeof(int32_t));
        at->plans[i] = end;
        if (r->attends[i])
            end = up(end + tlc_attn_plan_bytes(r->spec, r->caps[i]));
    }
    at->pages = end;
    for (int i = 0; i < step->n_seqs; i++)
        end += ((size_t)r->c->graphs->seq_slots[i] * (size_t)r->c->graphs->seq_blocks[i] +
                (size_t)r->c->graphs->seq_states[i]) *
               sizeof(int32_t);
    at->end = end;
}

static void write_seqs(const struct running *r, uint8_t *host)
{
    const struct tlc_graphs *g = r->c->graphs;
    struct tlc_seq *seqs = (struct tlc_seq *)(host + r->at.seqs);
    int32_t *pages = (int32_t *)(host + r->at.pages), n = 0;
    for (int i = 0; i < r->step->n_seqs; i++) {
        const struct tl_step_seq *s = &r->step->seqs[i];
        size_t blocks = (size_t)g->seq_blocks[i];
        seqs[i].pages_at = n;
        seqs[i].stride = (int32_t)blocks;
        seqs[i].window = s->window;
        for (int slot = 0; slot < g->seq_slots[i]; slot++, n += (int32_t)blocks)
            memcpy(pages + n, s->pages + (int64_t)slot * s->stride, blocks * sizeof(int32_t));
        seqs[i].state_at = g->seq_states[i] ? n : -1;
        if (g->seq_states[i])
            memcpy(pages + n, s->state_pages, (size_t)g->seq_states[i] * sizeof(int32_t));
        n += g->seq_states[i];
    }
}

/* Everything of the block but the plans, which were written before. */
static void write_block(const struct running *r, uint8_t *host)
{
    const struct tl_step *step = r->step;
    struct header *header = (struct header *)host;
    struct tlc_row *rows = (struct tlc_row *)(host + r->at.rows);
    int32_t *counts = (int32_t *)(host + r->at.counts);
    for (int i = 0; i < step->n_rows; i++) {
        rows[i].seq = step->rows[i].seq;
        rows[i].pos = step->rows[i].pos;
        rows[i].token = step->rows[i].token;
        rows[i].reserved = 0;
    }
    for (int i = 0; i < step->n_sets; i++) {
        counts[i] = step->sets[i].n;
        memcpy(host + r->at.set_rows[i], step->sets[i].rows, (size_t)step->sets[i].n * sizeof(int32_t));
    }
    write_seqs(r, host);
    header->number = r->c->graphs->number;
}

/* ---- ops ---- */

#define DO(r, call)                                                                                                    \
    do {                                                                                                               \
        if ((r)->e == cudaSuccess)                                                                                     \
            (r)->e = (call);                                                                                           \
    } while (0)

static const float *f32(const struct tl_buf *b) { return b ? (const float *)b->data : NULL; }

static struct tlc_set set_of(const struct running *r, int set)
{
    const uint8_t *block = r->c->graphs->block;
    struct tlc_set s = {(const int32_t *)(block + r->at.set_rows[set]), (const int32_t *)(block + r->at.counts) + set,
                        r->caps[set]};
    return s;
}

static void linear(struct running *r, const struct tl_mat *m, const struct tlc_input *in, const struct tlc_set *set,
                   struct tlc_out out)
{
    const struct tlc_acts *acts = &r->c->s.acts;
    enum tlc_ready kind = m->wtype == TL_W_F32    ? TLC_READY_F32
                          : m->wtype == TL_W_BF16 ? TLC_READY_BF16
                                                  : TLC_READY_INT8;
    if (set->n_cap == 1 && tlc_linear_one_fits(r->c, m, in)) {
        DO(r, tlc_linear_one(&r->launch, m, in, set, out));
        return;
    }
    DO(r, tlc_rows_ready(&r->launch, kind, in, (int)m->k_pad, acts, set));
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
    struct tlc_attn_call call = {};
    call.spec = spec;
    call.layer = l;
    call.rope = spec->rope == TL_ROPE_NONE ? NULL : f32(r->net->rope);
    call.step = r->view;
    call.set = *set;
    call.plan = r->c->graphs->block + r->at.plans[op->set];
    call.cls = r->cls[op->set];
    call.scratch = s->attn;
    call.slot = op->slot;
    call.qkv = s->wide;
    call.ld = qkv_ld;
    call.att = s->att;
    DO(r, tlc_attention(&r->launch, &call));
    in = placed(s->att, q_dim);
    residual(r, l->o, &in, set, l->norm[1], l->norm[2]);
    in = stream(r, l->norm[3] != NULL, l->norm[3]);
    linear(r, l->up, &in, set, to(spec->mlp == TL_MLP_SILU_GATED ? TLC_EPI_SILU_MUL : TLC_EPI_RELU2, s->wide, spec->d_ff));
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

/* Device floats of a result; its place depends on the shape alone. */
static float *result(struct running *r, int64_t n)
{
    float *at = r->c->s.results + r->results_used;
    r->results_used += (n + 63) / 64 * 64;
    return at;
}

static void op_best(struct running *r, const struct tlc_set *set)
{
    struct tlc_graphs *g = r->c->graphs;
    struct tlc_report report = {r->reports ? g->reports[r->staging].written : NULL,
                                &((const struct header *)g->block)->number, r->keeps_rows};
    DO(r, tlc_rows_best(&r->launch, r->c->s.best, r->c->s.best_parts, r->logits, r->spec->vocab_size, &report, set));
}

static void run_op(struct running *r, const struct tl_op *op)
{
    struct tlc_set set = set_of(r, op->set);
    const struct tl_arch_spec *spec = r->spec;
    struct tlc_scratch *s = &r->c->s;
    int d = spec->d_model;
    struct tlc_input in;
    float *out = result(r, result_width(r, op->kind) * set.n_cap);
    if (direct(r, op))
        out = op->host_out;
    switch (op->kind) {
    case TL_OP_EMBED: DO(r, tlc_rows_embed(&r->launch, r->net->embed, &r->view, s->best, spec->embed_scale, s->x, d, &set)); break;
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
    case TL_OP_BEST: op_best(r, &set); break;
    }
}

static void run_ops(struct running *r)
{
    r->results_used = 0;
    for (int i = 0; i < r->step->n_ops; i++)
        if (r->step->sets[r->step->ops[i].set].n > 0)
            run_op(r, &r->step->ops[i]);
}

/* ---- the step ---- */

static cudaError_t capture(struct running *r, cudaGraphExec_t *exec)
{
    cudaGraph_t graph = NULL;
    cudaStream_t stream = r->c->stream;
    cudaError_t e = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), end;
    if (e != cudaSuccess)
        return e;
    run_ops(r);
    end = cudaStreamEndCapture(stream, &graph);
    e = r->e != cudaSuccess ? r->e : end;
    if (e == cudaSuccess)
        e = cudaGraphInstantiate(exec, graph, 0);
    if (graph)
        cudaGraphDestroy(graph);
    return e;
}

static void copy_inputs(struct running *r)
{
    const struct tlc_graphs *g = r->c->graphs;
    DO(r, cudaMemcpyAsync(g->block, g->staging[r->staging], r->at.end, cudaMemcpyHostToDevice, r->c->stream));
    for (int i = 0; i < r->step->n_ops; i++) {
        const struct tl_op *op = &r->step->ops[i];
        if (op->host_in)
            DO(r, cudaMemcpyAsync(r->c->s.host_in, op->host_in,
                                  (size_t)r->step->sets[op->set].n * (size_t)r->spec->d_model * sizeof(float),
                                  cudaMemcpyHostToDevice, r->c->stream));
    }
}

static void copy_results(struct running *r)
{
    r->results_used = 0;
    for (int i = 0; i < r->step->n_ops; i++) {
        const struct tl_op *op = &r->step->ops[i];
        int64_t width = result_width(r, op->kind);
        if (r->step->sets[op->set].n == 0)
            continue;
        const float *from = result(r, width * r->caps[op->set]);
        if (direct(r, op))
            continue;
        if (op->kind == TL_OP_BEST && !r->reports)
            DO(r, cudaMemcpyAsync(op->host_tokens, r->c->s.best, (size_t)r->step->sets[op->set].n * sizeof(int32_t),
                                  cudaMemcpyDeviceToHost, r->c->stream));
        if (width && op->host_out)
            DO(r, cudaMemcpyAsync(op->host_out, from, (size_t)(r->step->sets[op->set].n * width) * sizeof(float),
                                  cudaMemcpyDeviceToHost, r->c->stream));
    }
}

static enum tl_status look_at(struct running *r, struct tl_error *err)
{
    const struct tl_step *step = r->step;
    int64_t results = 0;
    int inputs = 0;
    bool best = false, copies = false;
    if (step->n_sets > TLC_SETS_MAX)
        return tl_fail(err, TL_ERR_INTERNAL, "a step has %d sets of rows, the CUDA backend takes %d", step->n_sets,
                       TLC_SETS_MAX);
    for (int i = 0; i < step->n_sets; i++)
        r->caps[i] = cap_of(step->sets[i].n, r->c->s.rows_max);
    for (int i = 0; i < step->n_ops; i++) {
        const struct tl_op *op = &step->ops[i];
        r->attends[op->set] |= op->kind == TL_OP_LAYER;
        results += (result_width(r, op->kind) * r->caps[op->set] + 63) / 64 * 64;
        inputs += op->host_in != NULL;
        best |= op->kind == TL_OP_BEST;
        copies |= op->host_out && !direct(r, op);
        r->keeps_rows |= direct(r, op);
    }
    r->reports = best && !copies;
    if (inputs > 1)
        return tl_fail(err, TL_ERR_INTERNAL, "a step reads rows of the host %d times, the CUDA backend does once", inputs);
    if (results > r->c->s.results_max)
        return tl_fail(err, TL_ERR_INTERNAL, "a step has %lld result values, the CUDA backend has room for %lld",
                       (long long)results, (long long)r->c->s.results_max);
    return TL_OK;
}

static enum tl_status write_step(struct running *r, struct tl_error *err)
{
    struct tlc_graphs *g = r->c->graphs;
    const struct tl_step *step = r->step;
    needs_of_seqs(r);
    lay_out(r);
    if (r->at.end > g->block_bytes) {
        enum tl_status st = tlc_check(r->c, grow(g, r->c->stream, r->at.end), "taking memory for page tables", err);
        if (st != TL_OK)
            return st;
    }
    for (int i = 0; i < step->n_sets; i++) {
        size_t used;
        if (r->attends[i] && step->sets[i].n > 0)
            r->cls[i] = tlc_attn_plan(r->spec, step, i, r->c->sms, g->staging[r->staging] + r->at.plans[i], &used);
    }
    write_block(r, g->staging[r->staging]);
    r->view.rows = (const struct tlc_row *)(g->block + r->at.rows);
    r->view.seqs = (const struct tlc_seq *)(g->block + r->at.seqs);
    r->view.pages = (const int32_t *)(g->block + r->at.pages);
    r->view.arena = step->kv.arena ? step->kv.arena->data : NULL;
    r->view.page_bytes = (int64_t)step->kv.page_bytes;
    r->view.kv_f32 = step->kv.format == TL_KV_F32;
    return make_key(r, err);
}

#define LOOKS 4096 /* at a token between two questions to the driver */

/* The run of this number, one of the last STAGINGS, has ended, and its tokens are where they are wanted. */
static enum tl_status wait_for(struct tlc_backend *c, uint64_t number, struct tl_error *err)
{
    struct tlc_graphs *g = c->graphs;
    struct report *r = &g->reports[number % STAGINGS];
    if (r->n == 0)
        return tlc_check(c, cudaEventSynchronize(g->ended[number % STAGINGS]), "running a step", err);
    for (int i = 0, looks = 0; i < r->n; looks++) {
        uint64_t word = __atomic_load_n(&r->written[i], __ATOMIC_ACQUIRE);
        if (word >> 32 == (number & 0xffffffffu)) {
            r->tokens[i++] = (int32_t)(word & 0xffffffffu);
        } else if (looks % LOOKS == LOOKS - 1) { /* a device that failed writes no token */
            cudaError_t e = cudaStreamQuery(c->stream);
            if (e != cudaSuccess && e != cudaErrorNotReady)
                return tlc_check(c, e, "running a step", err);
        }
    }
    return TL_OK;
}

enum tl_status tlc_run(struct tlc_backend *c, const struct tl_step *step, struct tl_error *err)
{
    struct running r = {};
    struct tlc_graphs *g = c->graphs;
    struct graph *graph;
    bool seen;
    enum tl_status st;
    if (!g)
        return tl_fail(err, TL_ERR_INTERNAL, "a step was run before its scratch was prepared");
    g->number++;
    r.c = c;
    r.step = step;
    r.net = step->net;
    r.spec = &step->net->spec;
    r.launch.stream = c->stream;
    r.launch.dependent = c->cc >= 90;
    r.launch.sms = c->sms;
    r.launch.cc = c->cc;
    r.staging = (int)(g->number % STAGINGS);
    if (g->number > STAGINGS && (st = wait_for(c, g->number - STAGINGS, err)) != TL_OK) /* whoever read it last */
        return st;
    if ((st = look_at(&r, err)) != TL_OK || (st = write_step(&r, err)) != TL_OK)
        return st;
    graph = find_graph(g, &seen);
    if (!graph)
        return tl_fail_host_memory(err, (size_t)g->n_key * sizeof(*g->key));
    if (seen && !graph->exec)
        DO(&r, capture(&r, &graph->exec));
    copy_inputs(&r);
    if (graph->exec)
        DO(&r, cudaGraphLaunch(graph->exec, c->stream));
    else
        run_ops(&r);
    copy_results(&r);
    g->reports[r.staging].n = 0;
    for (int i = 0; i < step->n_ops; i++)
        if (r.reports && step->ops[i].kind == TL_OP_BEST) {
            g->reports[r.staging].n = step->sets[step->ops[i].set].n;
            g->reports[r.staging].tokens = step->ops[i].host_tokens;
        }
    if (!r.reports)
        DO(&r, cudaEventRecord(g->ended[r.staging], c->stream));
    return tlc_check(c, r.e, "starting a step", err);
}

enum tl_status tlc_wait_for_run(struct tlc_backend *c, int runs_left, struct tl_error *err)
{
    struct tlc_graphs *g = c->graphs;
    if (!g || g->number == 0)
        return TL_OK;
    if (runs_left < 0 || runs_left >= STAGINGS)
        return tl_fail(err, TL_ERR_INTERNAL, "%d runs are to go on, at most %d can", runs_left, STAGINGS - 1);
    return g->number > (uint64_t)runs_left ? wait_for(c, g->number - (uint64_t)runs_left, err) : TL_OK;
}
