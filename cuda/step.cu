/* A step on the device. What changes from step to step (rows, page tables, sets, plans of attention) is one block of bytes,
 * copied to a fixed place; what stays (the ops, how many rows they must be able to take) is the step's shape. Launches depend on
 * the shape alone, so the second time a shape is seen they are captured as a graph, and from then on a step is a copy, a graph
 * launch, and copies of results that are large. Small results (tokens, gates, kept rows) are written to the host's memory by the
 * kernels, tokens with the step's number beside them: nobody has to ask the driver whether a step has ended. (Kernels that read
 * the host's memory were tried for the block: 70 us instead of 10, each read is a round trip.) */
#include "step.cuh"

#include <string.h>

#define STAGINGS    2   /* host copies of the block, so that one can be written while the device reads the other */
#define GRAPHS_MAX  192 /* shapes that are remembered; the one not used for longest goes */
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
    put_key(g, cap_of(step->n_rows, r->c->s.rows_max));
    put_key(g, cap_of(step->n_seqs ? step->n_seqs : 1, r->c->s.rows_max));
    put_key(g, r->solo);
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
        put_key64(g, tlc_direct(r, op) ? op->host_out : NULL);
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
    at->draws = end;
    for (int i = 0; i < step->n_ops; i++)
        if (step->ops[i].kind == TL_OP_DRAW) /* once */
            end = up(end + (size_t)r->caps[step->ops[i].set] * sizeof(struct tlc_draw));
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
    for (int i = 0; i < step->n_ops; i++)
        for (int j = 0; step->ops[i].kind == TL_OP_DRAW && j < step->sets[step->ops[i].set].n; j++)
            ((struct tlc_draw *)(host + r->at.draws))[j] = tlc_draw_of(&step->ops[i].draws[j]);
    write_seqs(r, host);
    header->report.number = r->c->graphs->number;
    header->report.written = r->reports ? r->c->graphs->reports[r->staging].written : NULL;
    header->report.fence = r->keeps_rows;
}

/* ---- the step ---- */

static cudaError_t capture(struct running *r, cudaGraphExec_t *exec)
{
    cudaGraph_t graph = NULL;
    cudaStream_t stream = r->c->stream;
    cudaError_t e = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), end;
    if (e != cudaSuccess)
        return e;
    tlc_run_ops(r);
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
        int64_t width = tlc_result_width(r, op->kind);
        if (r->step->sets[op->set].n == 0)
            continue;
        const float *from = tlc_result(r, width * r->caps[op->set]);
        if (tlc_direct(r, op))
            continue;
        if (tlc_chooses(op) && !r->reports)
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
    r->solo = tlc_solo_takes(r->c->solo, step);
    for (int i = 0; i < step->n_sets; i++) /* an empty set is a shape of its own: its ops are left out of the graph */
        r->caps[i] = step->sets[i].n ? cap_of(step->sets[i].n, r->c->s.rows_max) : 0;
    for (int i = 0; i < step->n_ops; i++) {
        const struct tl_op *op = &step->ops[i];
        r->attends[op->set] |= op->kind == TL_OP_LAYER && !r->solo;
        results += (tlc_result_width(r, op->kind) * r->caps[op->set] + 63) / 64 * 64;
        inputs += op->host_in != NULL;
        best |= tlc_chooses(op);
        copies |= op->host_out && !tlc_direct(r, op);
        r->keeps_rows |= tlc_direct(r, op);
    }
    r->reports = best && !copies;
    if (inputs > 1)
        return tl_fail(err, TL_ERR_INTERNAL, "a step reads rows of the host %d times, the CUDA backend does once",
                       inputs);
    if (results > r->c->s.results_max)
        return tl_fail(err, TL_ERR_INTERNAL, "a step has %lld result values, the CUDA backend has room for %lld",
                       (long long)results, (long long)r->c->s.results_max);
    return TL_OK;
}

static void see_arena(struct running *r)
{
    const struct tl_kv_view *kv = &r->step->kv;
    r->view.arena = kv->arena ? kv->arena->data : NULL;
    r->view.page_bytes = (int64_t)kv->page_bytes;
    r->view.kv_f32 = kv->format == TL_KV_F32;
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
            r->cls[i] = tlc_attn_plan(r->spec, step, i, &r->launch, g->staging[r->staging] + r->at.plans[i], &used);
    }
    write_block(r, g->staging[r->staging]);
    r->block = g->block;
    r->view.rows = (const struct tlc_row *)(g->block + r->at.rows);
    r->view.seqs = (const struct tlc_seq *)(g->block + r->at.seqs);
    r->view.pages = (const int32_t *)(g->block + r->at.pages);
    see_arena(r);
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
            if (e == cudaErrorNotReady)
                continue;
            if (e != cudaSuccess)
                return tlc_check(c, e, "running a step", err);
            word = __atomic_load_n(&r->written[i], __ATOMIC_ACQUIRE); /* it may have come between the two questions */
            if (word >> 32 != (number & 0xffffffffu)) {
                c->failed = true;
                return tl_fail(err, TL_ERR_DEVICE, "a step ended without its token %d of %d", i + 1, r->n);
            }
        }
    }
    return TL_OK;
}

/* A step that is nothing but the next tokens of the rows of the one-row kernel: all that it needs are arguments of one launch. */
static void run_alone(struct running *r)
{
    struct tlc_graphs *g = r->c->graphs;
    struct tlc_report report = {r->reports ? g->reports[r->staging].written : NULL, g->number, 0};
    float *logits = tlc_result(r, tlc_result_width(r, TL_OP_HEAD));
    see_arena(r);
    DO(r, tlc_solo_step(&r->launch, r->c->solo, r->step->n_rows, &r->view, r->c->s.x, logits, r->c->s.best, &report));
}

static enum tl_status run_graph(struct running *r, struct tl_error *err)
{
    struct graph *graph;
    bool seen;
    enum tl_status st = write_step(r, err);
    if (st != TL_OK)
        return st;
    graph = find_graph(r->c->graphs, &seen);
    if (!graph)
        return tl_fail_host_memory(err, (size_t)r->c->graphs->n_key * sizeof(int32_t));
    if (seen && !graph->exec)
        DO(r, capture(r, &graph->exec));
    copy_inputs(r);
    if (graph->exec)
        DO(r, cudaGraphLaunch(graph->exec, r->c->stream));
    else
        tlc_run_ops(r);
    return TL_OK;
}

enum tl_status tlc_run(struct tlc_backend *c, const struct tl_step *step, struct tl_error *err)
{
    struct running r = {};
    struct tlc_graphs *g = c->graphs;
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
    r.launch.shared_max = c->shared_max;
    r.staging = (int)(g->number % STAGINGS);
    if (g->number > STAGINGS && (st = wait_for(c, g->number - STAGINGS, err)) != TL_OK) /* whoever read it last */
        return st;
    if ((st = look_at(&r, err)) != TL_OK)
        return st;
    if (r.solo && tlc_solo_is_all(c->solo, step))
        run_alone(&r);
    else if ((st = run_graph(&r, err)) != TL_OK)
        return st;
    copy_results(&r);
    g->reports[r.staging].n = 0;
    for (int i = 0; i < step->n_ops; i++)
        if (r.reports && tlc_chooses(&step->ops[i])) {
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
