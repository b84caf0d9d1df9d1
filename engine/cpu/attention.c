/* Attention over stored keys and values.
 *
 * Formula, for a row at position p and a q head (all in F32):
 *   score[key] = (sum over d ascending, one fma chain from +0, of q[d] k[d][key]) * (1 / sqrtf(d_head))
 *   per split of 256 keys at absolute positions, visible keys only:
 *     m = max score, p[key] = exp(score - m), l = sum of p in 16 lanes of key mod 16, folded,
 *     acc[d] = fma chain from +0 over keys ascending of p[key] v[key][d]
 *   splits ascending, from M, L, A = m, l, acc of the first:
 *     M' = max(M, m), o = exp(M - M'), n = exp(m - M'), L = fma(l, n, L * o), A[d] = fma(acc[d], n, A[d] * o)
 *   result A[d] * (1 / L)
 *
 * Nothing in it depends on which rows are computed together, or on who computes a split: where a step has fewer pieces than
 * there are threads, the splits of a piece are shared out and folded together after a barrier, in the same order. A piece of work is one kv head and up to TL_CPU_QUERIES queries of
 * neighbouring rows of one sequence; they share the reading and widening of each split. Masked keys are skipped, never
 * multiplied by zero, so what lies in them (a later row's infinity, stale memory) cannot reach a row. */
#include "backend_impl.h"

#include <math.h>
#include <string.h>

/* One piece of work. Row i of it has queries [i * per_row, (i + 1) * per_row). */
struct piece {
    const struct tl_cpu_kernels *k;
    const struct tl_cpu_attn_scratch *t;
    const struct tl_step *step;
    const struct tl_step_seq *seq;
    const int32_t *pages; /* of the slot */
    const int32_t *rows;  /* step rows */
    int n_rows, per_row, g, d, d16;
    bool direct; /* read pages in place: few queries, whole vectors */
};

static int key_lo(const struct piece *w, int i)
{
    int pos = w->step->rows[w->rows[i]].pos, win = w->seq->window;
    return win > 0 && pos >= win ? pos - win + 1 : 0;
}

static int key_hi(const struct piece *w, int i) { return w->step->rows[w->rows[i]].pos + 1; }

static int clip(int key, int base) { return key < base ? 0 : key > base + TL_SPLIT_KEYS ? TL_SPLIT_KEYS : key - base; }

static size_t elem_bytes(const struct tl_step *step) { return step->kv.format == TL_KV_F16 ? 2 : 4; }

static uint8_t *page_at(const struct tl_step *step, const int32_t *pages, int key)
{
    return step->kv.arena->data + (size_t)pages[key / TL_BLOCK_TOKENS] * step->kv.page_bytes;
}

/* K [d][64] of this head from `key` on; V [64][d] from `key` and column `c` on. */
static const uint8_t *k_at(const struct piece *w, int key)
{
    size_t at = (size_t)w->g * (size_t)w->d * TL_BLOCK_TOKENS + (size_t)(key % TL_BLOCK_TOKENS);
    return page_at(w->step, w->pages, key) + at * elem_bytes(w->step);
}

static const uint8_t *v_at(const struct piece *w, int key, int c)
{
    size_t n_kv = (size_t)w->step->net->spec.n_kv_heads;
    size_t row = (size_t)w->g * TL_BLOCK_TOKENS + (size_t)(key % TL_BLOCK_TOKENS);
    size_t at = (n_kv * TL_BLOCK_TOKENS + row) * (size_t)w->d + (size_t)c;
    return page_at(w->step, w->pages, key) + at * elem_bytes(w->step);
}

static void panel(const struct piece *w, float *dst, const uint8_t *src, int64_t ld, int n_t, int n_c)
{
    if (w->step->kv.format == TL_KV_F16)
        w->k->panel_f16(dst, (const uint16_t *)src, ld, n_t, n_c);
    else
        w->k->panel_f32(dst, (const float *)src, ld, n_t, n_c);
}

/* c[q] (+)= a[q] times page data read in place. */
static void mm_page(const struct piece *w, int n_q, const float *a, int64_t lda, const uint8_t *b, int64_t ldb, int n_t,
                    float *c, int64_t ldc, bool first, int blocks)
{
    if (w->step->kv.format == TL_KV_F16)
        w->k->mm_f16(n_q, a, lda, (const uint16_t *)b, ldb, n_t, c, ldc, first, blocks);
    else
        w->k->mm(n_q, a, lda, (const float *)b, ldb, n_t, c, ldc, first, blocks);
}

/* The end of the page that `key` is in, or hi. */
static int page_end(int key, int hi)
{
    int end = (key / TL_BLOCK_TOKENS + 1) * TL_BLOCK_TOKENS;
    return end < hi ? end : hi;
}

/* Scores of queries [q0, q1) with keys base + [lo, hi), in whole blocks of 16 keys. */
static void scores(const struct piece *w, int q0, int q1, int base, int lo, int hi)
{
    const struct tl_cpu_attn_scratch *t = w->t;
    int kb = lo / 16 * 16, end;
    for (; w->direct && kb < hi; kb = end) {
        end = page_end(kb, (hi + 15) / 16 * 16);
        mm_page(w, q1 - q0, t->q + q0 * w->d, w->d, k_at(w, base + kb), TL_BLOCK_TOKENS, w->d,
                t->s + q0 * TL_SPLIT_KEYS + kb, TL_SPLIT_KEYS, true, (end - kb) / 16);
    }
    for (; kb < hi; kb += 16) {
        panel(w, t->panel, k_at(w, base + kb), TL_BLOCK_TOKENS, w->d, 16);
        for (int q = q0; q < q1; q += w->k->mm_rows)
            w->k->mm(q1 - q < w->k->mm_rows ? q1 - q : w->k->mm_rows, t->q + q * w->d, w->d, t->panel, 16, w->d,
                     t->s + q * TL_SPLIT_KEYS + kb, TL_SPLIT_KEYS, true, 1);
    }
}

/* acc[q..q+n_q)[c..] (+)= probabilities of keys [lo, hi) times V: 16 columns out of the panel, or all of them in place. */
static void values_range(const struct piece *w, int q, int n_q, int base, int lo, int hi, int c, bool first)
{
    const struct tl_cpu_attn_scratch *t = w->t;
    float *acc = t->acc + q * w->d16 + c;
    const float *p = t->s + q * TL_SPLIT_KEYS;
    if (!w->direct && lo < hi)
        w->k->mm(n_q, p + lo, TL_SPLIT_KEYS, t->panel + lo * 16, 16, hi - lo, acc, w->d16, first, 1);
    while (w->direct && lo < hi) {
        int end = page_end(lo, hi);
        mm_page(w, n_q, p + lo, TL_SPLIT_KEYS, v_at(w, base + lo, c), w->d, end - lo, acc, w->d16, first, w->d / 16);
        first = false;
        lo = end;
    }
}

/* The same for a group of queries whose ranges differ: each alone before and after the keys that all of them see. */
static void values_group(const struct piece *w, int q, int n_q, int base, int c)
{
    int lo[16], hi[16], lo_max = 0, hi_min = TL_SPLIT_KEYS;
    bool same = true;
    for (int i = 0; i < n_q; i++) {
        lo[i] = clip(key_lo(w, (q + i) / w->per_row), base);
        hi[i] = clip(key_hi(w, (q + i) / w->per_row), base);
        lo_max = lo[i] > lo_max ? lo[i] : lo_max;
        hi_min = hi[i] < hi_min ? hi[i] : hi_min;
        same = same && lo[i] == lo[0] && hi[i] == hi[0];
    }
    if (same) {
        values_range(w, q, n_q, base, lo[0], hi[0], c, true);
        return;
    }
    for (int i = 0; i < n_q; i++)
        values_range(w, q + i, 1, base, lo[i], lo_max < hi_min ? lo_max : hi[i], c, true);
    if (lo_max >= hi_min)
        return;
    for (int i = 0; i < n_q; i++) /* who had nothing before starts from zero */
        if (lo[i] == lo_max)
            memset(w->t->acc + (q + i) * w->d16 + c, 0, (size_t)(w->direct ? w->d : 16) * sizeof(float));
    values_range(w, q, n_q, base, lo_max, hi_min, c, false);
    for (int i = 0; i < n_q; i++)
        values_range(w, q + i, 1, base, hi_min, hi[i], c, false);
}

static void values(const struct piece *w, int q0, int q1, int base, int lo, int hi)
{
    for (int c = 0; c < w->d; c += w->direct ? w->d : 16) {
        for (int key = lo, end; key < hi && !w->direct; key = end) {
            end = page_end(key, hi);
            panel(w, w->t->panel + key * 16, v_at(w, base + key, c), w->d, end - key, w->d - c < 16 ? w->d - c : 16);
        }
        for (int q = q0; q < q1; q += w->k->mm_rows)
            values_group(w, q, q1 - q < w->k->mm_rows ? q1 - q : w->k->mm_rows, base, c);
    }
}

/* Fold a split's (m, l, acc) into the result of query q. */
static void combine(const struct piece *w, int q, bool first, float m, float l, const float *acc)
{
    const struct tl_cpu_attn_scratch *t = w->t;
    float *out = t->out + q * w->d16, e[2];
    if (first) {
        t->m[q] = m;
        t->l[q] = l;
        memcpy(out, acc, (size_t)w->d16 * sizeof(float));
        return;
    }
    e[0] = t->m[q];
    e[1] = m;
    t->m[q] = m > e[0] ? m : e[0];
    e[0] -= t->m[q];
    e[1] -= t->m[q];
    w->k->exp(e, e, 2);
    t->l[q] = fmaf(l, e[1], t->l[q] * e[0]);
    w->k->merge(out, e[0], acc, e[1], w->d16);
}

static void finish_query(const struct piece *w, int q, float *att)
{
    float inv = 1.0f / w->t->l[q];
    for (int c = 0; c < w->d; c++)
        att[c] = w->t->out[q * w->d16 + c] * inv;
}

/* (m, l, acc) of one split for the queries [*q0, *q1) that see keys of it, in the scratch. */
static void run_split(const struct piece *w, int split, int *q0, int *q1)
{
    float scale = 1.0f / sqrtf((float)w->d);
    int base = split * TL_SPLIT_KEYS, a = 0, b = w->n_rows; /* rows */
    while (a < b && key_hi(w, a) <= base)
        a++;
    while (b > a && key_lo(w, b - 1) >= base + TL_SPLIT_KEYS)
        b--;
    *q0 = a * w->per_row;
    *q1 = b * w->per_row;
    if (a == b)
        return;
    scores(w, *q0, *q1, base, clip(key_lo(w, a), base), clip(key_hi(w, b - 1), base));
    for (int q = *q0; q < *q1; q++)
        w->k->softmax(w->t->s + q * TL_SPLIT_KEYS, clip(key_lo(w, q / w->per_row), base),
                      clip(key_hi(w, q / w->per_row), base), scale, &w->t->m_split[q], &w->t->l_split[q]);
    values(w, *q0, *q1, base, clip(key_lo(w, a), base), clip(key_hi(w, b - 1), base));
}

static int split_first(const struct piece *w, int i) { return key_lo(w, i) / TL_SPLIT_KEYS; }
static int split_last(const struct piece *w, int i) { return (key_hi(w, i) - 1) / TL_SPLIT_KEYS; }

static void run_piece(const struct piece *w)
{
    for (int split = split_first(w, 0), q0, q1; split <= split_last(w, w->n_rows - 1); split++) {
        run_split(w, split, &q0, &q1);
        for (int q = q0; q < q1; q++)
            combine(w, q, split == split_first(w, q / w->per_row), w->t->m_split[q], w->t->l_split[q],
                    w->t->acc + q * w->d16);
    }
}

/* ---- the pieces of a call ---- */

struct call {
    const struct tl_cpu_run *r;
    const struct tl_row_set *set;
    int slot;
    const float *qkv;
    int64_t ld;
    float *att;
};

/* The piece of rows [i, i + n) of the set and kv head g. */
static struct piece piece_of(const struct call *c, int i, int n, int g)
{
    const struct tl_arch_spec *spec = &c->r->step->net->spec;
    struct piece w = {.k = c->r->be->k, .t = &c->r->be->s.attn[c->r->tid], .step = c->r->step, .g = g, .n_rows = n};
    w.seq = &w.step->seqs[w.step->rows[c->set->rows[i]].seq];
    w.pages = w.seq->pages + (int64_t)c->slot * w.seq->stride;
    w.rows = c->set->rows + i;
    w.per_row = spec->n_heads / spec->n_kv_heads;
    w.d = spec->d_head;
    w.d16 = (w.d + 15) / 16 * 16;
    w.direct = n * w.per_row <= w.k->mm_rows && w.d % 16 == 0;
    return w;
}

static void load_queries(const struct call *c, const struct piece *w, int i)
{
    for (int q = 0; q < w->n_rows * w->per_row; q++)
        memcpy(w->t->q + q * w->d, c->qkv + (i + q / w->per_row) * c->ld + (w->g * w->per_row + q % w->per_row) * w->d,
               (size_t)w->d * sizeof(float));
}

/* Rows from i on that make a piece: neighbours of one sequence. */
static int piece_rows(const struct call *c, int i)
{
    const struct tl_arch_spec *spec = &c->r->step->net->spec;
    int per_row = spec->n_heads / spec->n_kv_heads, max = per_row < TL_CPU_QUERIES ? TL_CPU_QUERIES / per_row : 1,
        n = 1;
    const struct tl_row *rows = c->r->step->rows;
    while (n < max && i + n < c->set->n && rows[c->set->rows[i + n]].seq == rows[c->set->rows[i]].seq)
        n++;
    return n;
}

/* m, l and acc of a split of a query whose piece is shared out. */
static float *part_at(const struct call *c, int i, int head, int split)
{
    const struct tl_cpu_scratch *s = &c->r->be->s;
    int n_heads = c->r->step->net->spec.n_heads;
    return s->parts + (((int64_t)i * n_heads + head) * s->part_splits + split) * s->part_floats;
}

/* Share out splits where whole pieces would leave threads idle. The same answer on every thread. */
static bool share_splits(const struct call *c)
{
    int pieces = 0;
    if (!c->r->be->s.parts || c->set->n > TL_CPU_PART_ROWS)
        return false;
    for (int i = 0; i < c->set->n; i += piece_rows(c, i)) {
        pieces += c->r->step->net->spec.n_kv_heads;
        for (int j = 0; j < piece_rows(c, i); j++)
            if (c->r->step->rows[c->set->rows[i + j]].pos / TL_SPLIT_KEYS >= c->r->be->s.part_splits)
                return false;
    }
    return pieces < c->r->be->n_threads;
}

static void share_piece(const struct call *c, const struct piece *w, int i, int *item)
{
    bool loaded = false;
    for (int split = split_first(w, 0), q0, q1; split <= split_last(w, w->n_rows - 1); split++) {
        if ((*item)++ % c->r->be->n_threads != c->r->tid)
            continue;
        if (!loaded)
            load_queries(c, w, i);
        loaded = true;
        run_split(w, split, &q0, &q1);
        for (int q = q0; q < q1; q++) {
            float *part = part_at(c, i + q / w->per_row, w->g * w->per_row + q % w->per_row, split);
            part[0] = w->t->m_split[q];
            part[1] = w->t->l_split[q];
            memcpy(part + 2, w->t->acc + q * w->d16, (size_t)w->d16 * sizeof(float));
        }
    }
}

static void fold_parts(const struct call *c)
{
    int n_heads = c->r->step->net->spec.n_heads;
    int64_t j, end;
    tl_cpu_share((int64_t)c->set->n * n_heads, c->r->tid, c->r->be->n_threads, &j, &end);
    for (; j < end; j++) {
        int i = (int)(j / n_heads), head = (int)(j % n_heads);
        struct piece w = piece_of(c, i, 1, 0);
        for (int split = split_first(&w, 0); split <= split_last(&w, 0); split++) {
            const float *part = part_at(c, i, head, split);
            combine(&w, 0, split == split_first(&w, 0), part[0], part[1], part + 2);
        }
        finish_query(&w, 0, c->att + j * w.d);
    }
}

void tl_cpu_attention(const struct tl_cpu_run *r, const struct tl_row_set *set, int slot, const float *qkv, int64_t ld,
                      float *att)
{
    struct call c = {r, set, slot, qkv, ld, att};
    const struct tl_arch_spec *spec = &r->step->net->spec;
    bool shared = share_splits(&c);
    int item = 0;
    for (int i = 0, n; i < set->n; i += n) {
        n = piece_rows(&c, i);
        for (int g = 0; g < spec->n_kv_heads; g++) {
            struct piece w = piece_of(&c, i, n, g);
            if (shared) {
                share_piece(&c, &w, i, &item);
                continue;
            }
            if (item++ % r->be->n_threads != r->tid)
                continue;
            load_queries(&c, &w, i);
            run_piece(&w);
            for (int q = 0; q < n * w.per_row; q++)
                finish_query(
                    &w, q, att + ((int64_t)(i + q / w.per_row) * spec->n_heads + g * w.per_row + q % w.per_row) * w.d);
        }
    }
    if (!shared)
        return;
    tl_cpu_pool_barrier(r->be->pool);
    fold_parts(&c);
}

void tl_cpu_kv_store(const struct tl_cpu_run *r, const struct tl_row *row, int slot, int g, const float *k,
                     const float *v)
{
    const struct tl_arch_spec *spec = &r->step->net->spec;
    const struct tl_step_seq *seq = &r->step->seqs[row->seq];
    uint8_t *page = page_at(r->step, seq->pages + (int64_t)slot * seq->stride, row->pos);
    size_t d = (size_t)spec->d_head, tok = (size_t)(row->pos % TL_BLOCK_TOKENS);
    size_t k_off = (size_t)g * d * TL_BLOCK_TOKENS + tok;
    size_t v_off = (size_t)spec->n_kv_heads * d * TL_BLOCK_TOKENS + ((size_t)g * TL_BLOCK_TOKENS + tok) * d;
    if (r->step->kv.format == TL_KV_F16) {
        uint16_t half[TL_HEAD_DIM_MAX], *h = (uint16_t *)page;
        r->be->k->narrow(half, k, (int64_t)d);
        for (size_t i = 0; i < d; i++)
            h[k_off + i * TL_BLOCK_TOKENS] = half[i];
        r->be->k->narrow(h + v_off, v, (int64_t)d);
    } else {
        float *f = (float *)page;
        for (size_t i = 0; i < d; i++)
            f[k_off + i * TL_BLOCK_TOKENS] = k[i];
        memcpy(f + v_off, v, d * sizeof(float));
    }
}
