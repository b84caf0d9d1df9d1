/* Whole steps of the CPU backend on tiny random nets: one call with all rows, any cut of them, row by row, with any number of
 * threads and at every instruction set level give the same bits; and a float net gives what plain formulas in double give. */
#include "backend.h"
#include "cpu/cpu.h"
#include "mem.h"

#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint64_t g_seed;

static uint64_t next(void)
{
    uint64_t z = (g_seed += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static int below(int n) { return (int)(next() % (uint64_t)n); }
static float uniform(void) { return (float)(next() >> 40) * 0x1p-23f - 1.0f; }

/* ---- a random net ---- */

#define N_LAYERS  2
#define MATS_MAX  16
#define BUFS_MAX  48
#define POSITIONS 700

struct world {
    struct tl_backend *be;
    struct tl_net net;
    struct tl_layer layers[N_LAYERS];
    struct tl_mat *mats[MATS_MAX];
    float *w[MATS_MAX]; /* the values of mats, for the reference */
    struct tl_buf *bufs[BUFS_MAX];
    float *f[BUFS_MAX]; /* the values of bufs */
    int n_mats, n_bufs;
    struct tl_kv_view kv;
    int n_pages;
};

static struct tl_buf *buf_of(struct world *w, int64_t n, float base, float amp)
{
    struct tl_buf *b = NULL;
    float *x = tl_array((size_t)n, 4);
    for (int64_t i = 0; i < n; i++)
        x[i] = base + amp * uniform();
    ck_assert_int_eq(w->be->ops->buf_alloc(w->be, (size_t)n * 4, &b, NULL), TL_OK);
    ck_assert_int_eq(w->be->ops->buf_write(w->be, b, 0, x, (size_t)n * 4, NULL), TL_OK);
    w->f[w->n_bufs] = x;
    w->bufs[w->n_bufs++] = b;
    return b;
}

static const float *values_of(const struct world *w, const void *p)
{
    for (int i = 0; i < w->n_bufs; i++)
        if (w->bufs[i] == p)
            return w->f[i];
    for (int i = 0; i < w->n_mats; i++)
        if (w->mats[i] == p)
            return w->w[i];
    return NULL;
}

static struct tl_mat *mat_of(struct world *w, enum tl_wtype t, int64_t n_out, int64_t n_in)
{
    int64_t n = n_out * n_in, groups = (n_in + 31) / 32;
    struct tl_mat_src src = {.wtype = t, .n_in = n_in, .n_parts = 1};
    uint8_t *data = tl_calloc((size_t)n, 4), *gs = tl_calloc((size_t)(n_out * groups), 1);
    float *scale = tl_array((size_t)n_out, 4), amp = 1.5f / sqrtf((float)n_in);
    struct tl_mat *m = NULL;
    float *v = tl_array((size_t)n, 4);
    if (t == TL_W_INT4 && n_in % 32)
        t = src.wtype = TL_W_INT8;
    for (int64_t i = 0; i < n_out; i++)
        scale[i] = amp / (t == TL_W_INT4 ? 60.0f : 127.0f);
    for (int64_t i = 0; i < n_out * groups; i++)
        gs[i] = (uint8_t)(0x11 * (1 + below(15)));
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        float x = uniform() * amp;
        memcpy(&bits, &x, 4);
        if (t == TL_W_BF16) {
            ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
            bits &= 0xffff0000u;
            memcpy(&x, &bits, 4);
        } else if (t == TL_W_INT8) {
            ((int8_t *)data)[i] = (int8_t)(below(255) - 127);
        } else if (t == TL_W_INT4) {
            data[i / 2] |= (uint8_t)(((below(15) - 7) & 15) << (i & 1 ? 4 : 0));
        } else {
            ((float *)data)[i] = x;
        }
        v[i] = x;
    }
    src.part[0] = (struct tl_mat_part){data, scale, gs, n_out};
    ck_assert_int_eq(w->be->ops->mat_create(w->be, &src, &m, NULL), TL_OK);
    tl_free(data);
    tl_free(gs);
    tl_free(scale);
    w->w[w->n_mats] = v;
    w->mats[w->n_mats++] = m;
    return m;
}

/* A net and a KV arena of n_pages pages; pages after the KV ones hold states. */
static void world_open(struct world *w, const struct tl_arch_spec *spec, enum tl_wtype t, int threads, uint64_t seed)
{
    int d = spec->d_model, q = tl_q_dim(spec), kv = tl_kv_dim(spec),
        up = spec->d_ff * (spec->mlp == TL_MLP_SILU_GATED ? 2 : 1);
    float *table;
    memset(w, 0, sizeof(*w));
    g_seed = seed;
    ck_assert_int_eq(tl_backend_cpu.open(&w->be, threads, NULL), TL_OK);
    w->net =
        (struct tl_net){.spec = *spec, .wtype = t, .layers = w->layers, .rope_positions = POSITIONS, .gate_b = 0.25f};
    for (int i = 0; i < N_LAYERS; i++) {
        struct tl_layer *l = &w->layers[i];
        for (int n = 0; n < 6; n++)
            l->norm[n] = spec->norms >> n & 1 ? buf_of(w, d, 1.0f, 0.3f) : NULL;
        l->qkv = mat_of(w, t, q + 2 * kv, d);
        l->o = mat_of(w, t, d, q);
        l->up = mat_of(w, t, up, d);
        l->down = mat_of(w, t, d, spec->d_ff);
        if (spec->qk_norm == TL_QKNORM_FULL || spec->qk_norm == TL_QKNORM_HEAD) {
            l->q_norm = buf_of(w, spec->qk_norm == TL_QKNORM_FULL ? q : spec->d_head, 1.0f, 0.3f);
            l->k_norm = buf_of(w, spec->qk_norm == TL_QKNORM_FULL ? kv : spec->d_head, 1.0f, 0.3f);
        }
        l->qk_bias = spec->qk_bias ? buf_of(w, q + kv, 0, 0.5f) : NULL;
        l->qkv_bias = spec->qkv_bias ? buf_of(w, q + 2 * kv, 0, 0.5f) : NULL;
    }
    w->net.embed = mat_of(w, t == TL_W_INT4 ? TL_W_INT8 : t, spec->vocab_size, d);
    w->net.head = w->net.embed;
    if (spec->inject == TL_INJECT_CONCAT_LINEAR)
        w->net.adapter = mat_of(w, t, d, 2 * d);
    if (spec->inject == TL_INJECT_DIAG) {
        w->net.inject_b = mat_of(w, t, d, d);
        w->net.inject_decay = buf_of(w, d, 0.5f, 0.4f);
        w->net.inject_gain = buf_of(w, d, 0.5f, 0.4f);
    }
    if (spec->core_to_coda == TL_C2C_LINEAR)
        w->net.coda_in = mat_of(w, t, d, d);
    w->net.final_norm = buf_of(w, d, 1.0f, 0.3f);
    w->net.loop_norm = buf_of(w, d, 1.0f, 0.3f);
    w->net.inject_norm = buf_of(w, d, 1.0f, 0.3f);
    w->net.coda_norm = buf_of(w, d, 1.0f, 0.3f);
    w->net.gate_w = buf_of(w, d, 0, 0.3f);
    w->net.rope = buf_of(w, POSITIONS * spec->d_head, 0, 1);
    table = w->f[w->n_bufs - 1];
    for (int p = 0; p < POSITIONS; p++)
        for (int j = 0; j < spec->d_head / 2; j++) {
            double a = p * pow(10000.0, -2.0 * j / spec->d_head);
            table[p * spec->d_head + j] = (float)cos(a);
            table[p * spec->d_head + spec->d_head / 2 + j] = (float)sin(a);
        }
    ck_assert_int_eq(w->be->ops->buf_write(w->be, w->net.rope, 0, table, (size_t)(POSITIONS * spec->d_head) * 4, NULL),
                     TL_OK);
    w->kv.format = t == TL_W_F32 ? TL_KV_F32 : TL_KV_F16;
    w->kv.page_bytes = (size_t)(2 * kv) * TL_BLOCK_TOKENS * (w->kv.format == TL_KV_F32 ? 4 : 2);
    w->kv.state_rows_per_page = (int)(w->kv.page_bytes / ((size_t)d * 8));
    w->n_pages = 3 * 2 * N_LAYERS * (POSITIONS / TL_BLOCK_TOKENS + 1) + 2 * POSITIONS / w->kv.state_rows_per_page + 4;
    ck_assert_int_eq(w->be->ops->buf_alloc(w->be, w->kv.page_bytes * (size_t)w->n_pages, &w->kv.arena, NULL), TL_OK);
    memset(w->kv.arena->data, 0xff, w->kv.arena->bytes); /* NaN: what was never written must never matter */
}

static void world_close(struct world *w)
{
    for (int i = 0; i < w->n_mats; i++) {
        w->be->ops->mat_free(w->be, w->mats[i]);
        tl_free(w->w[i]);
    }
    for (int i = 0; i < w->n_bufs; i++) {
        w->be->ops->buf_free(w->be, w->bufs[i]);
        tl_free(w->f[i]);
    }
    w->be->ops->buf_free(w->be, w->kv.arena);
    w->be->ops->close(w->be);
}

/* ---- steps ---- */

struct seq_plan {
    int len, window;
    int32_t pages[4 * (POSITIONS / TL_BLOCK_TOKENS + 1)], state_pages[POSITIONS];
};

/* Scatter the pages of two sequences over the arena; slots = 2 per layer (two loops). */
static void plan_pages(struct world *w, struct seq_plan *p, int n)
{
    int at = 3;
    for (int b = 0; b <= POSITIONS / TL_BLOCK_TOKENS; b++)
        for (int s = 0; s < n; s++)
            for (int slot = 0; slot < 4; slot++)
                p[s].pages[slot * (POSITIONS / TL_BLOCK_TOKENS + 1) + b] = at++;
    for (int b = 0; b <= (POSITIONS - 1) / w->kv.state_rows_per_page; b++)
        for (int s = 0; s < n; s++)
            p[s].state_pages[b] = at++;
    ck_assert_int_le(at, w->n_pages);
}

/* Blocks that rows from position pos on can no longer see are gone. */
static void release_blocks(struct seq_plan *p, int pos)
{
    for (int b = 0; p->window && (b + 1) * TL_BLOCK_TOKENS <= pos - p->window + 1; b++)
        for (int slot = 0; slot < 4; slot++)
            p->pages[slot * (POSITIONS / TL_BLOCK_TOKENS + 1) + b] = -1;
}

static int token_at(const struct tl_arch_spec *s, int seq, int pos)
{
    return (pos * 31 + seq * 17 + pos / 7) % s->vocab_size;
}

/* All stages with two loops over the same two layers for rows of positions [from[s], to[s]). logits: [rows][vocab] in the order
 * of rows; gate: [rows]. The state is saved and loaded between the loops: it must come back as it was. */
static void run_rows(struct world *w, struct seq_plan *plan, int n_seqs, const int *from, const int *to, float *logits,
                     float *gate)
{
    const struct tl_arch_spec *spec = &w->net.spec;
    struct tl_step_seq seqs[2];
    struct tl_row rows[2 * POSITIONS];
    int32_t all[2 * POSITIONS], odd[2 * POSITIONS], even[2 * POSITIONS];
    struct tl_row_set sets[3] = {{all, 0}, {odd, 0}, {even, 0}};
    struct tl_op ops[64] = {{0}};
    struct tl_step step = {.net = &w->net,
                           .kv = w->kv,
                           .rows = rows,
                           .seqs = seqs,
                           .n_seqs = n_seqs,
                           .sets = sets,
                           .n_sets = 3,
                           .ops = ops};
    struct tl_error err;
    int n = 0, o = 0;
    float *host = NULL;
    for (int s = 0; s < n_seqs; s++) {
        release_blocks(&plan[s], from[s]);
        seqs[s] =
            (struct tl_step_seq){plan[s].pages, POSITIONS / TL_BLOCK_TOKENS + 1, plan[s].window, plan[s].state_pages};
        for (int p = from[s]; p < to[s]; p++) {
            rows[n] = (struct tl_row){s, p, token_at(spec, s, p)};
            all[n] = n;
            if (p % 2)
                odd[sets[1].n++] = n;
            else
                even[sets[2].n++] = n;
            n++;
        }
    }
    if (n == 0)
        return;
    step.n_rows = sets[0].n = n;
    ops[o++] = (struct tl_op){.kind = TL_OP_EMBED};
    ops[o++] = (struct tl_op){.kind = TL_OP_START};
    for (int loop = 0; loop < 2; loop++) {
        ops[o++] = (struct tl_op){.kind = TL_OP_INJECT};
        for (int l = 0; l < N_LAYERS; l++)
            ops[o++] = (struct tl_op){.kind = TL_OP_LAYER, .layer = &w->layers[l], .slot = 2 * loop + l};
        ops[o++] = (struct tl_op){.kind = TL_OP_LOOP_NORM, .set = 1}; /* in two halves, as if depths differed */
        ops[o++] = (struct tl_op){.kind = TL_OP_LOOP_NORM, .set = 2};
        ops[o++] = (struct tl_op){.kind = TL_OP_SAVE_STATE};
        if (loop == 0)
            ops[o++] = (struct tl_op){.kind = TL_OP_EMBED}; /* spoils x */
        ops[o++] = (struct tl_op){.kind = TL_OP_LOAD_STATE};
    }
    host = tl_array((size_t)(n * spec->d_model), 4);
    ops[o++] = (struct tl_op){.kind = TL_OP_GATE, .host_out = gate};
    ops[o++] = (struct tl_op){.kind = TL_OP_TO_CODA};
    ops[o++] = (struct tl_op){.kind = TL_OP_SAVE_ROWS, .host_out = host};
    ops[o++] = (struct tl_op){.kind = TL_OP_LOAD_ROWS, .host_in = host};
    ops[o++] = (struct tl_op){.kind = TL_OP_HEAD, .host_out = logits};
    step.n_ops = o;
    ck_assert_msg(w->be->ops->run(w->be, &step, &err) == TL_OK, "%s", err.msg);
    ck_assert_int_eq(w->be->ops->sync(w->be, &err), TL_OK);
    tl_free(host);
}

enum cut { WHOLE, CHUNKS, TOKENS };

/* Logits and gates of two sequences, indexed by (sequence, position). */
static void run_all(struct world *w, const int *len, const int *window, enum cut cut, float *logits, float *gates)
{
    int v = w->net.spec.vocab_size, at[2] = {0, 0}, to[2];
    struct seq_plan *plan = tl_calloc(2, sizeof(*plan));
    float *l = tl_array((size_t)(2 * POSITIONS * v), 4), *g = tl_array(2 * POSITIONS, 4);
    plan_pages(w, plan, 2);
    for (int s = 0; s < 2; s++)
        plan[s].window = window[s];
    while (at[0] < len[0] || at[1] < len[1]) {
        int n = 0;
        for (int s = 0; s < 2; s++) {
            int left = len[s] - at[s], step = cut == WHOLE    ? left
                                              : cut == TOKENS ? (s == 1 && below(3) == 0 ? 0 : 1)
                                                              : below(90);
            to[s] = at[s] + (step < left ? step : left);
        }
        run_rows(w, plan, 2, at, to, l, g);
        for (int s = 0; s < 2; s++)
            for (int p = at[s]; p < to[s]; p++, n++) {
                memcpy(logits + (s * POSITIONS + p) * v, l + n * v, (size_t)v * 4);
                gates[s * POSITIONS + p] = g[n];
            }
        memcpy(at, to, sizeof(at));
    }
    tl_free(plan);
    tl_free(l);
    tl_free(g);
}

static void assert_equal_runs(const struct world *w, const int *len, const float *a, const float *b, const char *what)
{
    int v = w->net.spec.vocab_size;
    for (int s = 0; s < 2; s++)
        for (int p = 0; p < len[s]; p++)
            for (int i = 0; i < v; i++) {
                float x = a[(s * POSITIONS + p) * v + i], y = b[(s * POSITIONS + p) * v + i];
                ck_assert_msg(isfinite(x), "sequence %d, position %d: a logit is not finite", s, p);
                ck_assert_msg(memcmp(&x, &y, 4) == 0, "%s: sequence %d, position %d, logit %d: %a and %a", what, s, p,
                              i, x, y);
            }
}

/* One spec for each case index: all norm masks, ropes, norms of q and k, injections, MLPs and odd widths come up. */
static struct tl_arch_spec spec_of(int i)
{
    static const unsigned masks[] = {
        TL_N1 | TL_N4, TL_N1 | TL_N2 | TL_N4 | TL_N5, TL_N1 | TL_N3 | TL_N4 | TL_N6, TL_N2 | TL_N5, TL_N1 | TL_N4, 63};
    static const int kv_heads[] = {4, 2, 1, 4};
    struct tl_arch_spec s = {.d_model = i % 2 ? 64 : 32,
                             .n_heads = 4,
                             .n_kv_heads = kv_heads[i % 4],
                             .d_head = i % 3 ? 8 : 16,
                             .d_ff = i % 2 ? 40 : 64,
                             .vocab_size = 97,
                             .n_core = N_LAYERS,
                             .norm_eps = 1e-5f,
                             .embed_scale = 1.5f,
                             .norms = masks[i % 6],
                             .max_positions = POSITIONS};
    s.rope = i % 3 == 0 ? TL_ROPE_PAIR : i % 3 == 1 ? TL_ROPE_HALF : i % 2 ? TL_ROPE_NONE : TL_ROPE_HALF;
    s.qk_norm = (enum tl_qk_norm)(i % 4);
    s.inject = (enum tl_inject)(i % 3);
    s.inject_norm = i % 2;
    s.state_init = i % 3 ? TL_STATE_ZERO : TL_STATE_PRELUDE;
    s.core_to_coda = (enum tl_core_to_coda)((i + 1) % 3);
    s.c2c_is_final_norm = i % 2;
    s.final_norm = i % 5 != 0;
    s.mlp = i % 4 == 1 ? TL_MLP_RELU2 : TL_MLP_SILU_GATED;
    s.qk_bias = i % 4 == 2;
    s.qkv_bias = i % 4 == 3;
    return s;
}

START_TEST(cuts_threads_and_levels_do_not_change_a_bit)
{
    struct tl_arch_spec spec = spec_of(_i);
    enum tl_wtype t = (enum tl_wtype)(_i % TL_W_COUNT);
    int len[2] = {_i % 3 == 0 ? 290 : 110, 70}, window[2] = {_i % 2 ? 0 : 80, _i % 3 ? 0 : 9};
    size_t n = (size_t)(2 * POSITIONS * spec.vocab_size);
    float *want = tl_calloc(n, 4), *got = tl_calloc(n, 4), *gw = tl_calloc(2 * POSITIONS, 4),
          *gg = tl_calloc(2 * POSITIONS, 4);
    struct world w;
    int best = tl_cpu_level();
    for (int level = 0; level < TL_CPU_LEVELS; level++)
        for (int threads = 1; threads <= 3 && tl_cpu_has_level((enum tl_cpu_level)level); threads += 2) {
            bool first = level == 0 && threads == 1;
            tl_cpu_force_level((enum tl_cpu_level)level);
            world_open(&w, &spec, t, threads, 42 + (uint64_t)_i);
            ck_assert_ptr_nonnull(strstr(w.be->ops->describe(w.be), tl_cpu_kernels_of((enum tl_cpu_level)level)->name));
            ck_assert_int_eq(w.be->ops->prepare(w.be, &w.net, len[0] + len[1], NULL), TL_OK);
            ck_assert_uint_gt(w.be->ops->scratch_bytes(w.be), 0);
            run_all(&w, len, window, WHOLE, first ? want : got, first ? gw : gg);
            if (!first)
                assert_equal_runs(&w, len, want, got, w.be->ops->describe(w.be));
            /* One by one only at one level, and with many threads (all waiting) only where few kv heads make them share
             * the splits of a row. */
            bool tokens = level == best && (threads == 1 || _i == 6 || _i == 9);
            for (int cut = CHUNKS; cut <= (tokens ? TOKENS : CHUNKS); cut++) {
                memset(got, 0, n * 4);
                run_all(&w, len, window, (enum cut)cut, got, gg);
                assert_equal_runs(&w, len, want, got, cut == CHUNKS ? "chunks" : "tokens");
                ck_assert_mem_eq(gw, gg, 2 * POSITIONS * 4);
            }
            world_close(&w);
        }
    tl_cpu_force_level(TL_CPU_LEVELS);
    tl_free(want);
    tl_free(got);
    tl_free(gw);
    tl_free(gg);
}
END_TEST

/* ---- the same in double, from the formulas of arch.h ---- */

struct ref {
    const struct world *w;
    const struct tl_arch_spec *s;
    int len, window;
    double *x, *e, *k[4], *v[4]; /* [len][d_model]; keys and values [len][kv] of each slot */
};

static void ref_matmul(const struct ref *r, const struct tl_mat *m, const double *x, double *y)
{
    const float *w = values_of(r->w, m);
    for (int64_t o = 0; o < m->n_out; o++) {
        y[o] = 0;
        for (int64_t i = 0; i < m->n_in; i++)
            y[o] += x[i] * (double)w[o * m->n_in + i];
    }
}

static void ref_norm(const struct ref *r, const struct tl_buf *b, double *y, const double *x, int n, double eps,
                     bool plain)
{
    const float *w = b ? values_of(r->w, b) : NULL;
    double sq = 0;
    for (int i = 0; i < n; i++)
        sq += x[i] * x[i];
    sq = w || plain ? 1 / sqrt(sq / n + eps) : 1;
    for (int i = 0; i < n; i++)
        y[i] = x[i] * sq * (w ? (double)w[i] : 1);
}

static void ref_head(const struct ref *r, double *x, int pos, const struct tl_buf *w)
{
    const struct tl_arch_spec *s = r->s;
    int h = s->d_head / 2;
    if (s->qk_norm == TL_QKNORM_HEAD)
        ref_norm(r, w, x, x, s->d_head, (double)s->norm_eps, false);
    for (int j = 0; j < h && s->rope != TL_ROPE_NONE; j++) {
        double t = pos * pow(10000.0, -2.0 * j / s->d_head), *a = s->rope == TL_ROPE_PAIR ? x + 2 * j : x + j,
               *b = s->rope == TL_ROPE_PAIR ? a + 1 : a + h, a0 = *a;
        *a = a0 * cos(t) - *b * sin(t);
        *b = *b * cos(t) + a0 * sin(t);
    }
    if (s->qk_norm == TL_QKNORM_HEAD_AFTER_ROPE)
        ref_norm(r, NULL, x, x, s->d_head, 1.1920929e-07, true);
}

static void ref_attend(const struct ref *r, int slot, int pos, const double *q, double *out)
{
    const struct tl_arch_spec *s = r->s;
    int d = s->d_head, kv = tl_kv_dim(s), lo = r->window && pos >= r->window ? pos - r->window + 1 : 0;
    double p[POSITIONS];
    for (int h = 0; h < s->n_heads; h++) {
        int g = h / (s->n_heads / s->n_kv_heads);
        double sum = 0;
        for (int t = lo; t <= pos; t++) {
            p[t] = 0;
            for (int j = 0; j < d; j++)
                p[t] += q[h * d + j] * r->k[slot][t * kv + g * d + j];
            p[t] = exp(p[t] / sqrt(d));
            sum += p[t];
        }
        for (int j = 0; j < d; j++) {
            out[h * d + j] = 0;
            for (int t = lo; t <= pos; t++)
                out[h * d + j] += p[t] / sum * r->v[slot][t * kv + g * d + j];
        }
    }
}

static void ref_layer(struct ref *r, const struct tl_layer *l, int slot)
{
    const struct tl_arch_spec *s = r->s;
    int d = s->d_model, qd = tl_q_dim(s), kv = tl_kv_dim(s), ff = s->d_ff;
    const float *b3 = l->qkv_bias ? values_of(r->w, l->qkv_bias) : NULL,
                *b2 = l->qk_bias ? values_of(r->w, l->qk_bias) : NULL;
    double eps = (double)s->norm_eps, t[256], u[512], y[256];
    for (int p = 0; p < r->len; p++) {
        double *x = r->x + p * d;
        ref_norm(r, l->norm[0], t, x, d, eps, false);
        ref_matmul(r, l->qkv, t, u);
        for (int i = 0; i < qd + 2 * kv; i++)
            u[i] += (b3 ? (double)b3[i] : 0) + (b2 && i < qd + kv ? (double)b2[i] : 0);
        if (s->qk_norm == TL_QKNORM_FULL) {
            ref_norm(r, l->q_norm, u, u, qd, eps, false);
            ref_norm(r, l->k_norm, u + qd, u + qd, kv, eps, false);
        }
        for (int h = 0; h < s->n_heads + s->n_kv_heads; h++)
            ref_head(r, u + h * s->d_head, p, h < s->n_heads ? l->q_norm : l->k_norm);
        memcpy(r->k[slot] + p * kv, u + qd, (size_t)kv * 8);
        memcpy(r->v[slot] + p * kv, u + qd + kv, (size_t)kv * 8);
        ref_attend(r, slot, p, u, t);
        ref_matmul(r, l->o, t, y);
        ref_norm(r, l->norm[1], y, y, d, eps, false);
        for (int i = 0; i < d; i++)
            x[i] += y[i];
        ref_norm(r, l->norm[2], x, x, d, eps, false);
        ref_norm(r, l->norm[3], t, x, d, eps, false);
        ref_matmul(r, l->up, t, u);
        for (int i = 0; i < ff; i++)
            t[i] = s->mlp == TL_MLP_SILU_GATED ? u[i] / (1 + exp(-u[i])) * u[ff + i] : u[i] > 0 ? 0.5 * u[i] * u[i] : 0;
        ref_matmul(r, l->down, t, y);
        ref_norm(r, l->norm[4], y, y, d, eps, false);
        for (int i = 0; i < d; i++)
            x[i] += y[i];
        ref_norm(r, l->norm[5], x, x, d, eps, false);
    }
}

static void ref_inject(const struct ref *r, int p)
{
    const struct tl_net *net = &r->w->net;
    int d = r->s->d_model;
    double *x = r->x + p * d, in[256], y[256];
    if (r->s->inject == TL_INJECT_CONCAT_LINEAR) {
        memcpy(in, x, (size_t)d * 8);
        memcpy(in + d, r->e + p * d, (size_t)d * 8);
        ref_matmul(r, net->adapter, in, x);
    } else if (r->s->inject == TL_INJECT_DIAG) {
        ref_matmul(r, net->inject_b, r->e + p * d, y);
        for (int i = 0; i < d; i++)
            x[i] = (double)values_of(r->w, net->inject_decay)[i] * x[i] +
                   (double)values_of(r->w, net->inject_gain)[i] * y[i];
    }
}

static void ref_run(struct ref *r, int seq)
{
    const struct tl_net *net = &r->w->net;
    int d = r->s->d_model;
    double eps = (double)r->s->norm_eps;
    for (int p = 0; p < r->len; p++)
        for (int i = 0; i < d; i++)
            r->x[p * d + i] =
                (double)values_of(r->w, net->embed)[token_at(r->s, seq, p) * d + i] * (double)r->s->embed_scale;
    for (int p = 0; p < r->len && r->s->inject != TL_INJECT_NONE; p++)
        ref_norm(r, r->s->inject_norm ? net->inject_norm : NULL, r->e + p * d, r->x + p * d, d, eps, false);
    if (r->s->state_init == TL_STATE_ZERO)
        memset(r->x, 0, (size_t)(r->len * d) * 8);
    for (int loop = 0; loop < 2; loop++) {
        for (int p = 0; p < r->len; p++)
            ref_inject(r, p);
        for (int l = 0; l < N_LAYERS; l++)
            ref_layer(r, &r->w->layers[l], 2 * loop + l);
        for (int p = 0; p < r->len; p++)
            ref_norm(r, net->loop_norm, r->x + p * d, r->x + p * d, d, eps, false);
    }
}

/* F32 weights and F32 KV: 4 layers of sums of up to 128 terms; 2e-5 of the largest logit is 300 roundings of it. */
START_TEST(a_float_net_is_near_the_formulas_in_double)
{
    struct tl_arch_spec spec = spec_of(_i);
    int len[2] = {_i % 3 == 0 ? 290 : 60, 40}, window[2] = {_i % 2 ? 0 : 33, 0}, v = spec.vocab_size, d = spec.d_model;
    float *got = tl_calloc((size_t)(2 * POSITIONS * v), 4), *gate = tl_calloc(2 * POSITIONS, 4);
    struct world w;
    world_open(&w, &spec, TL_W_F32, 2, 7 + (uint64_t)_i);
    ck_assert_int_eq(w.be->ops->prepare(w.be, &w.net, 512, NULL), TL_OK);
    run_all(&w, len, window, WHOLE, got, gate);
    for (int s = 0; s < 2; s++) {
        struct ref r = {.w = &w, .s = &w.net.spec, .len = len[s], .window = window[s]};
        r.x = tl_calloc((size_t)(len[s] * d), 8);
        r.e = tl_calloc((size_t)(len[s] * d), 8);
        for (int i = 0; i < 4; i++) {
            r.k[i] = tl_calloc((size_t)(len[s] * tl_kv_dim(&spec)), 8);
            r.v[i] = tl_calloc((size_t)(len[s] * tl_kv_dim(&spec)), 8);
        }
        ref_run(&r, s);
        for (int p = 0; p < len[s]; p++) {
            double *x = r.x + p * d, g = (double)w.net.gate_b, y[128], top = 0;
            for (int i = 0; i < d; i++)
                g += x[i] * (double)values_of(&w, w.net.gate_w)[i];
            ck_assert_double_le(fabs(g - (double)gate[s * POSITIONS + p]), 1e-4);
            if (spec.core_to_coda == TL_C2C_NORM)
                ref_norm(&r, spec.c2c_is_final_norm ? w.net.final_norm : w.net.coda_norm, x, x, d,
                         (double)spec.norm_eps, false);
            if (spec.core_to_coda == TL_C2C_LINEAR) {
                ref_matmul(&r, w.net.coda_in, x, y);
                memcpy(x, y, (size_t)d * 8);
            }
            ref_norm(&r, spec.final_norm ? w.net.final_norm : NULL, x, x, d, (double)spec.norm_eps, false);
            ref_matmul(&r, w.net.head, x, y);
            for (int i = 0; i < v; i++)
                top = fabs(y[i]) > top ? fabs(y[i]) : top;
            for (int i = 0; i < v; i++)
                ck_assert_msg(fabs(y[i] - (double)got[(s * POSITIONS + p) * v + i]) <= 2e-5 * top,
                              "sequence %d, position %d, logit %d: %g, not %g", s, p, i,
                              (double)got[(s * POSITIONS + p) * v + i], y[i]);
        }
        for (int i = 0; i < 4; i++) {
            tl_free(r.k[i]);
            tl_free(r.v[i]);
        }
        tl_free(r.x);
        tl_free(r.e);
    }
    world_close(&w);
    tl_free(got);
    tl_free(gate);
}
END_TEST

/* ---- the rest of the vtable ---- */

START_TEST(a_start_state_from_the_host_is_taken)
{
    struct tl_arch_spec spec = spec_of(1);
    float given[128], back[128];
    int32_t rows[2] = {0, 1};
    struct tl_row r[2] = {{0, 0, 5}, {0, 1, 6}};
    struct tl_row_set set = {rows, 2};
    struct tl_op ops[3] = {
        {.kind = TL_OP_EMBED}, {.kind = TL_OP_START, .host_in = given}, {.kind = TL_OP_SAVE_ROWS, .host_out = back}};
    struct world w;
    struct tl_step step = {.net = &w.net, .rows = r, .n_rows = 2, .sets = &set, .n_sets = 1, .ops = ops, .n_ops = 3};
    for (int i = 0; i < 128; i++)
        given[i] = (float)i;
    world_open(&w, &spec, TL_W_INT4, 2, 1);
    ck_assert_int_eq(w.be->ops->prepare(w.be, &w.net, 2, NULL), TL_OK);
    ck_assert_int_eq(w.be->ops->run(w.be, &step, NULL), TL_OK);
    ck_assert_mem_eq(given, back, sizeof(given));
    step.n_rows = 3;
    ck_assert_int_eq(w.be->ops->run(w.be, &step, NULL), TL_ERR_INTERNAL);
    world_close(&w);
}
END_TEST

START_TEST(a_net_that_does_not_fit_its_spec_is_refused)
{
    struct tl_arch_spec spec = spec_of(1);
    struct tl_error err;
    struct world w;
    world_open(&w, &spec, TL_W_INT8, 1, 1);
    w.layers[1].down = w.layers[1].up;
    ck_assert_int_eq(w.be->ops->prepare(w.be, &w.net, 4, &err), TL_ERR_BAD_PARAM);
    ck_assert_ptr_nonnull(strstr(err.msg, "matrix down"));
    ck_assert_int_eq(w.be->ops->prepare(w.be, &w.net, 0, &err), TL_ERR_BAD_PARAM);
    world_close(&w);
}
END_TEST

START_TEST(buffers_keep_to_their_bounds)
{
    struct tl_backend *be;
    struct tl_buf *b;
    char text[8] = "abcdefg";
    size_t free_bytes, total;
    ck_assert_int_eq(tl_backend_cpu.open(&be, 1, NULL), TL_OK);
    ck_assert_int_eq(be->ops->buf_alloc(be, 16, &b, NULL), TL_OK);
    ck_assert_int_eq(be->ops->buf_write(be, b, 8, text, 8, NULL), TL_OK);
    ck_assert_int_eq(be->ops->buf_write(be, b, 9, text, 8, NULL), TL_ERR_INTERNAL);
    ck_assert_int_eq(be->ops->buf_copy(be, b, 0, b, 8, 8, NULL), TL_OK);
    ck_assert_int_eq(be->ops->buf_copy(be, b, 0, b, SIZE_MAX, 8, NULL), TL_ERR_INTERNAL);
    ck_assert_int_eq(be->ops->buf_read(be, b, 0, text, 8, NULL), TL_OK);
    ck_assert_str_eq(text, "abcdefg");
    be->ops->mem_info(be, &free_bytes, &total);
    ck_assert_uint_gt(free_bytes, 0);
    ck_assert_uint_le(free_bytes, total);
    be->ops->buf_free(be, b);
    be->ops->close(be);
}
END_TEST

#ifdef TL_TEST_HOOKS
/* Fail the first, second, third ... allocation until all goes well: every failure is an answer and leaves nothing behind. */
START_TEST(running_out_of_memory_anywhere_is_an_answer)
{
    struct tl_arch_spec spec = spec_of(1);
    int64_t live = 0;
    struct world w;
    for (int fail = 1, done = 0; !done; fail++) {
        struct tl_backend *be = NULL;
        struct tl_mat *m = NULL;
        struct tl_buf *b = NULL;
        static const float weights[64 * 64];
        struct tl_mat_src src = {.wtype = TL_W_F32, .n_in = 64, .n_parts = 1, .part = {{weights, NULL, NULL, 64}}};
        enum tl_status st;
        world_open(&w, &spec, TL_W_INT8, 1, 1);
        live = tl_mem_live();
        tl_mem_fail_at(fail);
        st = tl_backend_cpu.open(&be, 2, NULL);
        if (st == TL_OK)
            st = be->ops->mat_create(be, &src, &m, NULL);
        if (st == TL_OK)
            st = be->ops->buf_alloc(be, 100, &b, NULL);
        if (st == TL_OK)
            st = be->ops->prepare(be, &w.net, 8, NULL);
        done = st == TL_OK;
        tl_mem_fail_at(0);
        if (be) {
            be->ops->mat_free(be, m);
            be->ops->buf_free(be, b);
            be->ops->close(be);
        }
        if (!done)
            ck_assert(st == TL_ERR_NO_HOST_MEMORY || st == TL_ERR_NO_DEVICE_MEMORY);
        ck_assert_int_eq(tl_mem_live(), live);
        ck_assert_int_lt(fail, 30);
        world_close(&w);
    }
}
END_TEST
#endif

int main(void)
{
    Suite *s = suite_create("cpu steps");
    TCase *t = tcase_create("all");
    SRunner *r;
    int failed;
    tcase_set_timeout(t, 240);
    tcase_add_loop_test(t, a_float_net_is_near_the_formulas_in_double, 0, 12);
    tcase_add_loop_test(t, cuts_threads_and_levels_do_not_change_a_bit, 0, 12);
    tcase_add_test(t, a_start_state_from_the_host_is_taken);
    tcase_add_test(t, a_net_that_does_not_fit_its_spec_is_refused);
    tcase_add_test(t, buffers_keep_to_their_bounds);
#ifdef TL_TEST_HOOKS
    tcase_add_test(t, running_out_of_memory_anywhere_is_an_answer);
#endif
    suite_add_tcase(s, t);
    r = srunner_create(s);
    srunner_run_all(r, CK_ENV);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
