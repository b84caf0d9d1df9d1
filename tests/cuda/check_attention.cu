/* Attention of the CUDA backend: values against a double-precision reference, equal bits over every way to cut the
 * same rows into steps and to plan them, no stray writes, and times. Needs no model and no daemon:
 *   nvcc -std=c++17 -O3 --fmad=false -gencode arch=compute_90a,code=sm_90a -Iengine -Icuda
 *       tests/cuda/check_attention.cu cuda/attention*.cu -o check_attention
 * check_attention [check | times [part of a name] | part of a case's name]; without: both */
#include "attention_cases.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <thread>
#include <vector>

#define N_SLOTS 2
static int checks, failed;
static uint32_t classes; /* all launch classes that were run, or'ed */
static bool many_rows;   /* the kernel of many rows was among them, ... */
static bool apart;       /* ... and tiles of rows of several sequences, ... */
static bool shared;      /* ... and blocks of the kernel of many rows */

static void expect(bool ok, const char *name, const char *what, double got, double limit)
{
    checks++;
    if (ok)
        return;
    failed++;
    if (failed < 40)
        printf("FAILED %s: %s, got %g, limit %g\n", name, what, got, limit);
}

static void must(cudaError_t e, const char *what)
{
    if (e == cudaSuccess)
        return;
    printf("check_attention: %s: %s\n", what, cudaGetErrorString(e));
    exit(2);
}

/* ---- random numbers ---- */

static uint64_t seed = 1;
static uint32_t draw(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33);
}
static float uniform(void) { return (float)(draw() % 65536) / 32768.0f - 1.0f; }
static float normal(void)
{
    float s = 0.0f;
    for (int i = 0; i < 6; i++)
        s += uniform();
    return s * 0.7071f;
}

static double halves[1 << 15]; /* by their bits without the sign; from main() on */
static void fill_halves(void)
{
    for (int h = 0; h < 1 << 15; h++) {
        int e = h >> 10, f = h & 1023;
        halves[h] = e == 31 ? (f ? NAN : INFINITY) : e ? ldexp(1024 + f, e - 25) : ldexp(f, -24);
    }
}
static double from_half(uint16_t h) { return h & 0x8000 ? -halves[h & 0x7fff] : halves[h]; }
static uint16_t half_of(float x)
{
    __half h = __float2half_rn(x);
    uint16_t u;
    memcpy(&u, &h, 2);
    return u;
}
static double rounded(double x) { return from_half(half_of((float)x)); }

struct world {
    struct kase c;
    struct tl_arch_spec spec;
    int n_rows, stride, n_pages;
    struct tl_row *rows; /* all rows, ascending by sequence and position */
    int32_t *pages;      /* [n_seqs][N_SLOTS][stride] */
    uint8_t *arena;      /* host, before any row */
    size_t page_bytes;
    float *qkv, *bias[2], *norm_w[2], *rope;
    double *want; /* [n_rows][heads * d] */
    /* device */
    uint8_t *d_arena, *d_clean, *d_first; /* clean: before any row; first: after the first way */
    int *d_bad;
    float *d_qkv, *d_att, *d_bias[2], *d_norm[2], *d_rope;
    int32_t *d_pages;
    struct tlc_row *d_rows;
    struct tlc_seq *d_seqs;
    int32_t *d_set;
    void *d_plan, *plan;
};

static int q_dim(const struct world *w) { return w->c.heads * w->c.d; }
static int qkv_dim(const struct world *w) { return (w->c.heads + 2 * w->c.kv) * w->c.d; }
static int32_t *page_of(const struct world *w, int seq, int slot, int block)
{
    return &w->pages[((int64_t)seq * N_SLOTS + slot) * w->stride + block];
}

/* Byte offset of one element of K (or V) in the arena. */
static size_t at(const struct world *w, int seq, int slot, int pos, int g, int j, bool v)
{
    size_t e =
        (((size_t)(v ? w->c.kv : 0) + (size_t)g) * TL_BLOCK_TOKENS + (size_t)(pos % TL_BLOCK_TOKENS)) * (size_t)w->c.d +
        (size_t)j;
    return (size_t)*page_of(w, seq, slot, pos / TL_BLOCK_TOKENS) * w->page_bytes + e * (w->c.kv_f32 ? 4 : 2);
}
/* d elements from there on */
static void stored(const struct world *w, size_t off, double *x)
{
    for (int j = 0; j < w->c.d; j++) {
        float f;
        uint16_t h;
        if (w->c.kv_f32)
            memcpy(&f, w->arena + off + j * 4, 4);
        else
            memcpy(&h, w->arena + off + j * 2, 2);
        x[j] = w->c.kv_f32 ? (double)f : from_half(h);
    }
}
static void put(struct world *w, size_t off, float x)
{
    uint16_t h = half_of(x);
    if (w->c.kv_f32)
        memcpy(w->arena + off, &x, 4);
    else
        memcpy(w->arena + off, &h, 2);
}

static void *take(size_t bytes)
{
    void *p = calloc(1, bytes + 256);
    if (!p)
        exit(2);
    return p;
}
static float *floats(int64_t n, float scale, float base)
{
    float *p = (float *)take((size_t)n * sizeof(*p));
    for (int64_t i = 0; i < n; i++)
        p[i] = base + scale * normal();
    return p;
}
static void *device(size_t bytes, const void *src)
{
    void *p;
    must(cudaMalloc(&p, bytes + 256), "cudaMalloc");
    if (src)
        must(cudaMemcpy(p, src, bytes, cudaMemcpyHostToDevice), "copy");
    return p;
}

/* The first sequence that this one has its prefix in common with */
static int leader_of(const struct world *w, int s)
{
    int n = w->c.prefixes, i = n > 1 ? s % (n + 1) : 0;
    return n > 1 && i == n ? s : i;
}

static void lay_pages(struct world *w)
{
    int next = 1;
    for (int s = 0; s < w->c.n_seqs; s++)
        for (int slot = 0, leader = leader_of(w, s); slot < N_SLOTS; slot++)
            for (int b = 0; b < w->stride; b++)
                *page_of(w, s, slot, b) = b < w->c.prefix_blocks && s != leader ? *page_of(w, leader, slot, b) : next++;
    w->n_pages = next;
}

/* Poison everywhere (NaN and infinity in turn), then the keys and values before the rows, in the slot that is looked at. */
static void fill_arena(struct world *w)
{
    w->arena = (uint8_t *)take((size_t)w->n_pages * w->page_bytes);
    uint16_t *half = (uint16_t *)w->arena;
    for (size_t i = 0; i < (size_t)w->n_pages * w->page_bytes / 2; i++)
        half[i] = i % 3 ? 0x7fff : 0x7c00;
    for (int s = 0; s < w->c.n_seqs; s++)
        for (int p = s != leader_of(w, s) ? w->c.prefix_blocks * TL_BLOCK_TOKENS : 0; p < w->c.first[s % 16]; p++)
            for (int i = 0; i < w->c.kv * w->c.d * 2; i++)
                put(w, at(w, s, 1, p, i / 2 / w->c.d, i / 2 % w->c.d, i % 2), normal());
}

#define SMALL_SHARED 101376 /* bytes a block may have on the smallest cards */

static struct tlc_launch the_launch(int cluster)
{
    struct tlc_launch l = {};
    int major, minor, shared;
    must(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "device");
    must(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "device");
    must(cudaDeviceGetAttribute(&l.sms, cudaDevAttrMultiProcessorCount, 0), "device");
    must(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), "device");
    l.shared_max = (size_t)shared;
    l.cc = cluster ? 10 * major + minor : 80;
    l.dependent = major >= 9;
    return l;
}

static void build(struct world *w, const struct kase *c)
{
    int max_pos = 0, qd, n = 0;
    memset(w, 0, sizeof(*w));
    w->c = *c;
    w->spec.n_heads = c->heads;
    w->spec.n_kv_heads = c->kv;
    w->spec.d_head = c->d;
    w->spec.norm_eps = 1e-5f;
    w->spec.rope = c->rope;
    w->spec.qk_norm = c->norm;
    for (int s = 0; s < c->n_seqs; s++) {
        int end = c->first[s % 16] + c->rows[s % 16];
        max_pos = end > max_pos ? end : max_pos;
        w->n_rows += c->rows[s % 16];
    }
    w->stride = max_pos / TL_BLOCK_TOKENS + 1;
    w->page_bytes = (size_t)c->kv * TL_BLOCK_TOKENS * (size_t)c->d * 2 * (c->kv_f32 ? 4 : 2);
    w->rows = (struct tl_row *)take((size_t)w->n_rows * sizeof(*w->rows));
    for (int s = 0; s < c->n_seqs; s++)
        for (int i = 0; i < c->rows[s % 16]; i++)
            w->rows[n++] = {s, c->first[s % 16] + i, 0};
    w->pages = (int32_t *)take((size_t)c->n_seqs * N_SLOTS * (size_t)w->stride * sizeof(int32_t));
    lay_pages(w);
    fill_arena(w);
    qd = qkv_dim(w);
    w->qkv = floats((int64_t)w->n_rows * qd, 1.0f, 0.0f);
    w->bias[0] = floats(qd, 0.2f, 0.0f);
    w->bias[1] = floats(qd, 0.2f, 0.0f);
    w->norm_w[0] = floats(qd, 0.2f, 1.0f);
    w->norm_w[1] = floats(qd, 0.2f, 1.0f);
    w->rope = (float *)take((size_t)max_pos * (size_t)c->d * sizeof(float));
    for (int p = 0; p < max_pos; p++)
        for (int j = 0; j < c->d / 2; j++) {
            double a = p * pow(10000.0, -2.0 * j / c->d);
            w->rope[(int64_t)p * c->d + j] = (float)cos(a);
            w->rope[(int64_t)p * c->d + c->d / 2 + j] = (float)sin(a);
        }
    w->d_arena = (uint8_t *)device((size_t)w->n_pages * w->page_bytes, w->arena);
    w->d_clean = (uint8_t *)device((size_t)w->n_pages * w->page_bytes, w->arena);
    w->d_first = (uint8_t *)device((size_t)w->n_pages * w->page_bytes, NULL);
    w->d_bad = (int *)device(sizeof(int), NULL);
    w->d_qkv = (float *)device((size_t)w->n_rows * (size_t)qd * 4, NULL);
    w->d_att = (float *)device((size_t)w->n_rows * (size_t)q_dim(w) * 4, NULL);
    for (int i = 0; i < 2; i++) {
        w->d_bias[i] = (float *)device((size_t)qd * 4, w->bias[i]);
        w->d_norm[i] = (float *)device((size_t)qd * 4, w->norm_w[i]);
    }
    w->d_rope = (float *)device((size_t)max_pos * (size_t)c->d * 4, w->rope);
    w->d_pages = (int32_t *)device((size_t)c->n_seqs * N_SLOTS * (size_t)w->stride * 4, w->pages);
    w->d_rows = (struct tlc_row *)device((size_t)w->n_rows * sizeof(struct tlc_row), NULL);
    w->d_seqs = (struct tlc_seq *)device((size_t)w->n_rows * sizeof(struct tlc_seq), NULL);
    w->d_set = (int32_t *)device((size_t)(w->n_rows + 1) * 4, NULL);
    w->plan = take(tlc_attn_plan_bytes(&w->spec, w->n_rows));
    w->d_plan = device(tlc_attn_plan_bytes(&w->spec, w->n_rows), NULL);
    must(tlc_attn_init(&w->spec, the_launch(1).shared_max), "init");
}

static void drop(struct world *w)
{
    void *d[] = {w->d_arena,   w->d_clean,   w->d_first, w->d_bad,   w->d_qkv,  w->d_att,  w->d_bias[0], w->d_bias[1],
                 w->d_norm[0], w->d_norm[1], w->d_rope,  w->d_pages, w->d_rows, w->d_seqs, w->d_set,     w->d_plan};
    void *h[] = {w->rows,      w->pages,     w->arena, w->qkv,  w->bias[0], w->bias[1],
                 w->norm_w[0], w->norm_w[1], w->rope,  w->plan, w->want};
    for (size_t i = 0; i < sizeof(d) / sizeof(d[0]); i++)
        cudaFree(d[i]);
    for (size_t i = 0; i < sizeof(h) / sizeof(h[0]); i++)
        free(h[i]);
}

/* ---- the reference ---- */

static void norm_ref(double *x, const float *w, int n, double eps)
{
    double sum = 0.0;
    for (int i = 0; i < n; i++)
        sum += x[i] * x[i];
    for (int i = 0; i < n; i++)
        x[i] = x[i] / sqrt(sum / n + eps) * (w ? (double)w[i] : 1.0);
}

static void head_ref(const struct world *w, double *x, const float *norm, int pos)
{
    int d = w->c.d, half = d / 2;
    const float *table = w->rope + (int64_t)pos * d;
    if (w->c.norm == TL_QKNORM_HEAD)
        norm_ref(x, norm, d, w->spec.norm_eps);
    for (int j = 0; j < half && w->c.rope != TL_ROPE_NONE; j++) {
        int ia = w->c.rope == TL_ROPE_PAIR ? 2 * j : j, ib = w->c.rope == TL_ROPE_PAIR ? ia + 1 : j + half;
        double a = x[ia], b = x[ib], c = table[j], s = table[half + j];
        x[ia] = a * c - b * s;
        x[ib] = b * c + a * s;
    }
    if (w->c.norm == TL_QKNORM_HEAD_AFTER_ROPE)
        norm_ref(x, NULL, d, 1.1920929e-07);
}

/* Row r in x: q, k and v heads. */
static void finish_ref(const struct world *w, int r, double *x)
{
    int d = w->c.d, qd = q_dim(w), kd = w->c.kv * d;
    for (int i = 0; i < qkv_dim(w); i++)
        x[i] = (double)w->qkv[(int64_t)r * qkv_dim(w) + i] + (w->c.qkv_bias ? w->bias[0][i] : 0.0f) +
               (w->c.qk_bias && i < qd + kd ? w->bias[1][i] : 0.0f);
    if (w->c.norm == TL_QKNORM_FULL) {
        norm_ref(x, w->norm_w[0], qd, w->spec.norm_eps);
        norm_ref(x + qd, w->norm_w[1], kd, w->spec.norm_eps);
    }
    for (int h = 0; h < w->c.heads + w->c.kv; h++)
        head_ref(w, x + h * d, w->norm_w[h >= w->c.heads], w->rows[r].pos);
}

/* Attention of a kv head's queries x of row r, by the same key after key. */
static void attend_ref(const struct world *w, int r, int g, const double *x)
{
    int d = w->c.d, per = w->c.heads / w->c.kv, pos = w->rows[r].pos, seq = w->rows[r].seq, win = w->c.window;
    int lo = win > 0 && pos >= win ? pos - win + 1 : 0;
    double *out = w->want + (int64_t)r * q_dim(w) + g * per * d;
    std::vector<double> p((size_t)per * (size_t)(pos + 1)), top((size_t)per, -INFINITY), sum((size_t)per),
        q(x, x + per * d), y((size_t)d);
    for (double &v : q)
        v = w->c.kv_f32 ? v : rounded(v);
    for (int k = lo; k <= pos; k++) {
        stored(w, at(w, seq, 1, k, g, 0, false), y.data());
        for (int h = 0; h < per; h++) {
            double s = 0.0;
            for (int j = 0; j < d; j++)
                s += q[h * d + j] * y[j];
            p[(size_t)k * per + h] = s / sqrt((double)d);
            top[h] = fmax(top[h], s / sqrt((double)d));
        }
    }
    for (int k = lo; k <= pos; k++) {
        stored(w, at(w, seq, 1, k, g, 0, true), y.data());
        for (int h = 0; h < per; h++) {
            double e = exp(p[(size_t)k * per + h] - top[h]);
            sum[h] += e;
            for (int j = 0; j < d; j++)
                out[h * d + j] += e * y[j];
        }
    }
    for (int i = 0; i < per * d; i++)
        out[i] /= sum[i / d];
}

/* All rows stored in a copy of the arena, then attended to, on all cores: a row sees none behind it. */
static void reference(struct world *w)
{
    int kd = w->c.kv * w->c.d, all = qkv_dim(w), n_threads = (int)std::thread::hardware_concurrency();
    std::vector<double> x((size_t)w->n_rows * all);
    std::vector<std::thread> threads;
    uint8_t *clean = w->arena;
    size_t bytes = (size_t)w->n_pages * w->page_bytes;
    w->arena = (uint8_t *)take(bytes);
    memcpy(w->arena, clean, bytes);
    w->want = (double *)take((size_t)w->n_rows * (size_t)q_dim(w) * sizeof(double));
    for (int r = 0; r < w->n_rows; r++) {
        finish_ref(w, r, &x[(size_t)r * all]);
        for (int i = 0; i < 2 * kd; i++)
            put(w, at(w, w->rows[r].seq, 1, w->rows[r].pos, i % kd / w->c.d, i % w->c.d, i >= kd),
                (float)x[(size_t)r * all + q_dim(w) + i]);
    }
    n_threads = n_threads < 1 ? 1 : n_threads > 16 ? 16 : n_threads;
    for (int t = 0; t < n_threads; t++)
        threads.emplace_back([=, &x] {
            for (int i = t; i < w->n_rows * w->c.kv; i += n_threads)
                attend_ref(w, i / w->c.kv, i % w->c.kv,
                           &x[(size_t)(i / w->c.kv) * all + i % w->c.kv * (q_dim(w) / w->c.kv)]);
        });
    for (std::thread &t : threads)
        t.join();
    free(w->arena);
    w->arena = clean;
}

/* ---- running steps ---- */

struct host_step {
    struct tl_step step;
    struct tl_row_set set;
    struct tl_step_seq *seqs;
    struct tlc_seq *dseqs;
    struct tl_op op;
};

/* One step over rows[first .. first + n): builds, plans and uploads it. Returns the class. */
static uint32_t upload(struct world *w, struct host_step *h, const int *which, int n, const struct tlc_launch *l)
{
    struct tl_row *rows = (struct tl_row *)take((size_t)n * sizeof(*rows));
    struct tlc_row *drows = (struct tlc_row *)take((size_t)n * sizeof(*drows));
    int32_t *set = (int32_t *)take((size_t)(n + 1) * sizeof(*set));
    const struct tlc_attn_head *head;
    const struct tlc_attn_item *items;
    size_t used;
    uint32_t cls;
    memset(h, 0, sizeof(*h));
    h->seqs = (struct tl_step_seq *)take((size_t)n * sizeof(*h->seqs));
    h->dseqs = (struct tlc_seq *)take((size_t)n * sizeof(*h->dseqs));
    for (int i = 0; i < n; i++) {
        int s = w->rows[which[i]].seq;
        if (i == 0 || w->rows[which[i - 1]].seq != s) {
            h->seqs[h->step.n_seqs] = {page_of(w, s, 0, 0), w->stride, w->c.window, NULL};
            h->dseqs[h->step.n_seqs++] = {(int32_t)(page_of(w, s, 0, 0) - w->pages), w->stride, w->c.window, -1};
        }
        rows[i] = {h->step.n_seqs - 1, w->rows[which[i]].pos, 0};
        drows[i] = {rows[i].seq, rows[i].pos, 0, 0};
        set[i] = i;
    }
    set[n] = n;
    h->set = {set, n};
    h->op.kind = TL_OP_LAYER;
    h->op.slot = 1;
    h->step.kv.format = w->c.kv_f32 ? TL_KV_F32 : TL_KV_F16;
    h->step.rows = rows;
    h->step.n_rows = n;
    h->step.seqs = h->seqs;
    h->step.sets = &h->set;
    h->step.n_sets = 1;
    h->step.ops = &h->op;
    h->step.n_ops = 1;
    cls = tlc_attn_plan(&w->spec, &h->step, 0, l, w->plan, &used);
    head = (const struct tlc_attn_head *)w->plan;
    items = (const struct tlc_attn_item *)((const uint8_t *)w->plan + head->items_at);
    for (int i = 0; i < head->n[TLC_SEG_TILE]; i++)
        apart |= items[head->first[TLC_SEG_TILE] + i].apart && items[head->first[TLC_SEG_TILE] + i].n > 1;
    for (int i = 0; i < head->n[TLC_SEG_ROW]; i++)
        shared |= items[head->first[TLC_SEG_ROW] + i].n > 1;
    expect(used <= tlc_attn_plan_bytes(&w->spec, w->n_rows), w->c.name, "plan bytes", (double)used, 0);
    must(cudaMemcpy(w->d_plan, w->plan, used, cudaMemcpyHostToDevice), "plan");
    must(cudaMemcpy(w->d_rows, drows, (size_t)n * sizeof(*drows), cudaMemcpyHostToDevice), "rows");
    must(cudaMemcpy(w->d_seqs, h->dseqs, (size_t)h->step.n_seqs * sizeof(*h->dseqs), cudaMemcpyHostToDevice), "seqs");
    must(cudaMemcpy(w->d_set, set, (size_t)(n + 1) * 4, cudaMemcpyHostToDevice), "set");
    free(rows);
    free(drows);
    free(set);
    free(h->seqs);
    free(h->dseqs);
    return cls;
}

static cudaError_t attend(struct world *w, const struct tlc_launch *l, uint32_t cls, int n, int slot)
{
    struct tl_buf b[4];
    struct tl_layer layer = {};
    struct tlc_attn_call c = {};
    for (int i = 0; i < 2; i++) {
        b[i] = {(uint8_t *)w->d_bias[i], 0};
        b[2 + i] = {(uint8_t *)w->d_norm[i], 0};
    }
    layer.qkv_bias = w->c.qkv_bias ? &b[0] : NULL;
    layer.qk_bias = w->c.qk_bias ? &b[1] : NULL;
    layer.q_norm = w->c.norm == TL_QKNORM_FULL || w->c.norm == TL_QKNORM_HEAD ? &b[2] : NULL;
    layer.k_norm = layer.q_norm ? &b[3] : NULL;
    c.spec = &w->spec;
    c.layer = &layer;
    c.rope = w->c.rope == TL_ROPE_NONE ? NULL : w->d_rope;
    c.step = {w->d_rows, w->d_seqs, w->d_pages, w->d_arena, (int64_t)w->page_bytes, w->c.kv_f32};
    c.set = {w->d_set, w->d_set + n, n};
    c.plan = w->d_plan;
    c.cls = cls;
    c.slot = slot;
    c.qkv = w->d_qkv;
    c.ld = qkv_dim(w);
    c.att = w->d_att;
    return tlc_attention(l, &c);
}

/* Vectors of n rows, `width` floats each, to the device one behind the other, and back. */
static void put_rows(float *to, const float *from, const int *which, int n, int width)
{
    std::vector<float> x((size_t)n * width);
    for (int i = 0; i < n; i++)
        memcpy(&x[(size_t)i * width], from + (int64_t)which[i] * width, (size_t)width * 4);
    must(cudaMemcpy(to, x.data(), x.size() * 4, cudaMemcpyHostToDevice), "rows in");
}
static void get_rows(float *to, const float *from, const int *which, int n, int width)
{
    std::vector<float> x((size_t)n * width);
    must(cudaMemcpy(x.data(), from, x.size() * 4, cudaMemcpyDeviceToHost), "rows out");
    for (int i = 0; i < n; i++)
        memcpy(to + (int64_t)which[i] * width, &x[(size_t)i * width], (size_t)width * 4);
}

/* All rows, in steps of random size up to `most` (rows of one sequence in order), planned for so many
 * multiprocessors; many: single rows go to the kernel of many rows, however few they are. */
static void run_all(struct world *w, int most, int sms, int cluster, int many, float *att)
{
    int *which = (int *)take((size_t)w->n_rows * sizeof(int)), qd = q_dim(w);
    size_t bytes = (size_t)w->n_pages * w->page_bytes;
    struct tlc_launch l = the_launch(cluster);
    uint8_t *done = (uint8_t *)take((size_t)w->n_rows);
    if (!cluster && tlc_tiles_fit(w->c.d, SMALL_SHARED))
        l.shared_max = SMALL_SHARED;
    l.sms = sms; /* of which few do not leave blocks of the kernel of many rows one each */
    must(cudaMemcpy(w->d_arena, w->d_clean, bytes, cudaMemcpyDeviceToDevice), "arena");
    memset(att, 0xff, (size_t)w->n_rows * (size_t)qd * 4);
    for (int left = w->n_rows; left > 0;) {
        int n = 0, limit = most == 1 ? 1 : most >= w->n_rows ? most : 1 + (int)(draw() % (uint32_t)most), blocked = -1;
        for (int r = 0; r < w->n_rows && n < limit; r++) { /* skip a sequence now and then, from some row on */
            if (done[r] || w->rows[r].seq == blocked)
                continue;
            if (most < w->n_rows && most > 1 && draw() % 8 == 0) {
                blocked = w->rows[r].seq;
                continue;
            }
            which[n++] = r;
        }
        if (n == 0)
            continue;
        put_rows(w->d_qkv, w->qkv, which, n, qkv_dim(w));
        must(cudaMemset(w->d_att, 0xff, (size_t)n * (size_t)qd * 4), "poison");
        struct host_step h;
        uint32_t cls = upload(w, &h, which, n, &l);
        if (many && tlc_cls_items(cls, TLC_SEG_ROW) && tlc_many_fits(w->c.heads / w->c.kv, w->c.d, l.shared_max))
            cls |= TLC_CLS_MANY << TLC_CLS_PAGES;
        classes |= cls;
        many_rows |= tlc_cls_pages(cls) == TLC_CLS_MANY;
        must(attend(w, &l, cls, n, 1), "attention");
        must(cudaDeviceSynchronize(), "attention");
        get_rows(att, w->d_att, which, n, qd);
        for (int i = 0; i < n; i++)
            done[which[i]] = 1;
        left -= n;
    }
    free(which);
    free(done);
}

static __global__ void differ(const uint32_t *a, const uint32_t *b, int64_t n, int *bad)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        if (a[i] != b[i])
            *bad = 1;
}
/* The pages are what they were after the first way. */
static bool same_pages(struct world *w)
{
    int bad = 0;
    must(cudaMemset(w->d_bad, 0, sizeof(bad)), "compare");
    differ<<<264, 256>>>((const uint32_t *)w->d_arena, (const uint32_t *)w->d_first,
                         (int64_t)w->n_pages * (int64_t)w->page_bytes / 4, w->d_bad);
    must(cudaMemcpy(&bad, w->d_bad, sizeof(bad), cudaMemcpyDeviceToHost), "compare");
    return !bad;
}

static void check_case(const struct kase *c)
{
    static const int ways[][4] = {{1, 132, 1, 0},       {1, 132, 1, 1},     {1 << 30, 1, 1, 0}, {1 << 30, 100000, 1, 0},
                                  {1 << 30, 132, 0, 0}, {40, 132, 1, 1},    {9, 300, 1, 0},     {40, 132, 1, 0},
                                  {40, 1, 1, 0},        {1 << 30, 40, 1, 0}};
    struct world w;
    float *first, *att;
    uint8_t *arena0, *arena;
    double err = 0.0, ref = 0.0, worst = 0.0;
    size_t bytes;
    int64_t n;
    build(&w, c);
    reference(&w);
    bytes = (size_t)w.n_pages * w.page_bytes;
    n = (int64_t)w.n_rows * q_dim(&w);
    first = (float *)take((size_t)n * 4);
    att = (float *)take((size_t)n * 4);
    arena0 = (uint8_t *)take(bytes);
    arena = (uint8_t *)take(bytes);
    run_all(&w, 1 << 30, 132, 1, 0, first);
    must(cudaMemcpy(w.d_first, w.d_arena, bytes, cudaMemcpyDeviceToDevice), "arena");
    must(cudaMemcpy(arena0, w.d_arena, bytes, cudaMemcpyDeviceToHost), "arena");
    for (int64_t i = 0; i < n; i++) {
        double e = fabs((double)first[i] - w.want[i]);
        err += e * e;
        ref += w.want[i] * w.want[i];
        worst = e > worst || e != e ? e : worst;
    }
    expect(sqrt(err / ref) < (c->kv_f32 ? 1e-5 : 2e-3), c->name, "relative error", sqrt(err / ref),
           c->kv_f32 ? 1e-5 : 2e-3);
    expect(worst < (c->kv_f32 ? 1e-4 : 2e-2), c->name, "largest error", worst, c->kv_f32 ? 1e-4 : 2e-2);
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
        char what[80];
        int64_t bad = 0;
        run_all(&w, ways[i][0], ways[i][1], ways[i][2], ways[i][3], att);
        for (int64_t j = 0; j < n; j++)
            bad += memcmp(&att[j], &first[j], 4) != 0;
        snprintf(what, sizeof(what), "values that differ, steps of %d, planned for %d", ways[i][0], ways[i][1]);
        expect(bad == 0, c->name, what, (double)bad, 0);
        expect(same_pages(&w), c->name, "pages differ", (double)i, 0);
    }
    /* nothing but the rows' keys and values was written */
    {
        int64_t bad = 0;
        memcpy(arena, w.arena, bytes);
        for (int r = 0; r < w.n_rows; r++)
            for (int j = 0; j < c->kv * 2; j++) {
                size_t off = at(&w, w.rows[r].seq, 1, w.rows[r].pos, j / 2, 0, j % 2);
                memcpy(arena + off, arena0 + off, (size_t)c->d * (c->kv_f32 ? 4 : 2));
            }
        for (size_t i = 0; i < bytes; i++)
            bad += arena[i] != arena0[i];
        expect(bad == 0, c->name, "stray bytes written", (double)bad, 0);
    }
    printf("%-44s error %.2e, largest %.2e\n", c->name, sqrt(err / ref), worst);
    free(first);
    free(att);
    free(arena0);
    free(arena);
    drop(&w);
}

#ifndef TLC_NO_TIMES
/* Median time of one call in a graph of `n` calls, in microseconds. */
static double time_calls(struct world *w, uint32_t cls, int rows, int n)
{
    struct tlc_launch l = the_launch(1);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t t[2];
    float ms[15];
    must(cudaStreamCreate(&l.stream), "stream");
    must(cudaStreamBeginCapture(l.stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < n; i++)
        must(attend(w, &l, cls, rows, i % N_SLOTS), "attention");
    must(cudaStreamEndCapture(l.stream, &graph), "capture");
    must(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    must(cudaEventCreate(&t[0]), "event");
    must(cudaEventCreate(&t[1]), "event");
    for (int i = 0; i < 18; i++) {
        must(cudaEventRecord(t[0], l.stream), "event");
        must(cudaGraphLaunch(exec, l.stream), "graph");
        must(cudaEventRecord(t[1], l.stream), "event");
        must(cudaEventSynchronize(t[1]), "graph");
        if (i >= 3)
            must(cudaEventElapsedTime(&ms[i - 3], t[0], t[1]), "event");
    }
    for (int i = 0; i < 15; i++)
        for (int j = i + 1; j < 15; j++)
            if (ms[j] < ms[i]) {
                float x = ms[i];
                ms[i] = ms[j];
                ms[j] = x;
            }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(l.stream);
    return ms[7] * 1000.0 / n;
}

static const char *times_of = ""; /* part of a name */
static int time_kv = 4;           /* of 16 heads */

static void time_case(const char *name, int n_seqs, int first, int rows, int prefix_blocks, int n, int many)
{
    struct kase c = {name,          16, time_kv, 128, TL_QKNORM_HEAD, TL_ROPE_HALF, false, false, false, n_seqs,
                     prefix_blocks, {}, {},      0};
    struct world w;
    struct host_step h;
    struct tlc_launch l = the_launch(1);
    int *which;
    double us, bytes, flops = 0.0, own;
    uint32_t cls;
    if (!strstr(name, times_of))
        return;
    for (int i = 0; i < 16; i++) {
        c.first[i] = first;
        c.rows[i] = rows;
    }
    build(&w, &c);
    which = (int *)take((size_t)w.n_rows * sizeof(int));
    for (int i = 0; i < w.n_rows; i++) {
        which[i] = i;
        flops += 4.0 * 16 * 128 * (w.rows[i].pos + 1);
    }
    must(cudaMemcpy(w.d_qkv, w.qkv, (size_t)w.n_rows * (size_t)qkv_dim(&w) * 4, cudaMemcpyHostToDevice), "qkv");
    own = first + rows - prefix_blocks * 64;
    bytes = (n_seqs * own + prefix_blocks * 64) * time_kv * 128 * 2 * 2;
    cls = upload(&w, &h, which, w.n_rows, &l);
    if (many)
        cls |= TLC_CLS_MANY << TLC_CLS_PAGES;
    us = time_calls(&w, cls, w.n_rows, n);
    printf("%-34s class %08x %9.2f us, %6.2f TB/s of KV (%5.1f %% of 4.66), %6.1f TFLOP/s\n", name, cls, us,
           bytes / us * 1e-6, bytes / us * 1e-6 / 4.66 * 100, flops / us * 1e-6);
    free(which);
    drop(&w);
}

static void times(void)
{
    time_case("1 row, ctx 1", 1, 0, 1, 0, 200, 0);
    time_case("1 row, ctx 64", 1, 63, 1, 0, 200, 0);
    time_case("1 row, ctx 256", 1, 255, 1, 0, 200, 0);
    time_case("1 row, ctx 512", 1, 511, 1, 0, 200, 0);
    time_case("1 row, ctx 4096", 1, 4095, 1, 0, 100, 0);
    time_case("1 row, ctx 16384", 1, 16383, 1, 0, 50, 0);
    time_case("4 rows, ctx 512", 4, 511, 1, 0, 100, 0);
    time_case("16 rows, ctx 512", 16, 511, 1, 0, 100, 0);
    time_case("64 rows, ctx 512", 64, 511, 1, 0, 50, 0);
    time_case("64 clones of 512, ctx 544", 64, 543, 1, 8, 50, 0);
    time_case("64 rows, ctx 576", 64, 575, 1, 0, 50, 0);
    time_case("64 rows, ctx 4096", 64, 4095, 1, 0, 10, 0);
    time_case("64 clones of 512, ctx 576", 64, 575, 1, 8, 50, 0);
    time_case("64 clones of 4096, ctx 4128", 64, 4127, 1, 64, 20, 0);
    time_case("8 clones of 512, ctx 544", 8, 543, 1, 8, 50, 0);
    time_case("32 clones of 512, ctx 544", 32, 543, 1, 8, 50, 0);
    time_case("40 clones of 512, ctx 544", 40, 543, 1, 8, 50, 0);
    time_case("128 clones of 512, ctx 544", 128, 543, 1, 8, 20, 0);
    time_case("64 clones of 128, ctx 160", 64, 159, 1, 2, 50, 0);
    time_case("64 clones of 512, ctx 640", 64, 639, 1, 8, 50, 0);
    time_case("32 clones of 2048, ctx 2080", 32, 2079, 1, 32, 20, 0);
    time_case("64 clones of 2048, ctx 2080", 64, 2079, 1, 32, 20, 0);
    time_kv = 16;
    time_case("16 clones of 512, 16 kv heads", 16, 543, 1, 8, 20, 0);
    time_case("32 clones of 512, 16 kv heads", 32, 543, 1, 8, 20, 0);
    time_case("64 clones of 512, 16 kv heads", 64, 543, 1, 8, 20, 0);
    time_case("64 clones of 128, 16 kv heads", 64, 159, 1, 2, 20, 0);
    time_case("32 clones of 2048, 16 kv heads", 32, 2079, 1, 32, 20, 0);
    time_kv = 8;
    time_case("16 clones of 2048, 8 kv heads", 16, 2079, 1, 32, 20, 0);
    time_case("64 clones of 512, 8 kv heads", 64, 543, 1, 8, 20, 0);
    time_kv = 4;
    time_case("4 rows, ctx 512, many", 4, 511, 1, 0, 100, 1);
    time_case("16 rows, ctx 512, many", 16, 511, 1, 0, 100, 1);
    time_case("32 rows, ctx 512", 32, 511, 1, 0, 100, 0);
    time_case("32 rows, ctx 512, many", 32, 511, 1, 0, 100, 1);
    time_case("16 rows of one prompt, ctx 512", 1, 496, 16, 0, 50, 0);
    time_case("64 rows of one prompt, ctx 512", 1, 448, 64, 0, 50, 0);
    time_case("512 rows of one prompt", 1, 0, 512, 0, 20, 0);
    time_case("4096 rows of one prompt", 1, 0, 4096, 0, 4, 0);
    time_case("512 rows, ctx 4096", 1, 3584, 512, 0, 10, 0);
}
#endif

int main(int argc, char **argv)
{
    const char *part = argc > 1 ? argv[1] : "";
    fill_halves();
    bool all = !*part || !strcmp(part, "check");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        if (all || strstr(cases[i].name, part))
            check_case(&cases[i]);
    for (int i = 0; i < 5 && all; i++) { /* fused, plain, row, short, long: every path was taken */
        static const uint32_t masks[] = {TLC_CLS_FUSED, TLC_CLS_PLAIN, 15u << TLC_CLS_ITEMS(TLC_SEG_ROW),
                                         15u << TLC_CLS_ITEMS(TLC_SEG_TILE), 15u << TLC_CLS_ITEMS(TLC_SEG_LONG)};
        expect((classes & masks[i]) != 0, "paths", "not taken, path", i, 0);
    }
    if (all) {
        expect(many_rows, "paths", "kernel of many rows not taken", 0, 0);
        expect(apart, "paths", "no tile had rows of several sequences", 0, 0);
        expect(shared, "paths", "no block of the kernel of many rows had several", 0, 0);
    }
#ifndef TLC_NO_TIMES
    if (argc > 2)
        times_of = argv[2];
    if (!*part || !strcmp(part, "times"))
        times();
#endif
    printf("check_attention: %d checks, %d failed\n", checks, failed);
    return failed ? 1 : 0;
}
