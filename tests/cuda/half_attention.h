/* tests/cuda/half_attention.h - attention by the rule of CUDA, in double, in the place of the CPU backend's own.
 *
 * With F16 pages CUDA rounds queries and the weights of keys to F16 for its matrix units (the law in cuda/attention.cuh); the CPU
 * keeps them in F32. Rows then differ by 2^-11 of themselves, and of a few hundred inputs of the next INT8 layer one or two are
 * rounded the other way: a comparison of the two could not tell a wrong rule from the right one. So check_backend compares CUDA
 * with the CPU's layers around this attention: what is left are the last bits of F32, and limits are those of one rule.
 *
 * Include once per program: the CPU backend's attention.c is compiled in here, under another name, so that the backend's step finds
 * the function below. */
#ifndef HALF_ATTENTION_H
#define HALF_ATTENTION_H

#include "backend_impl.h"

void own_attention(const struct tl_cpu_run *r, const struct tl_row_set *set, int slot, const float *qkv, int64_t ld,
                   float *att);
#define tl_cpu_attention own_attention
#include "attention.c"
#undef tl_cpu_attention

static bool attend_in_halves; /* where pages hold F16 */

/* One head of row `at` of the step: q [d] in, att [d] out. */
static void half_head(const struct tl_cpu_run *r, int at, int slot, int g, const float *q, float *att)
{
    const struct tl_step *step = r->step;
    const struct tl_row *row = &step->rows[at];
    const struct tl_step_seq *seq = &step->seqs[row->seq];
    int d = step->net->spec.d_head, n_kv = step->net->spec.n_kv_heads;
    int lo = seq->window > 0 && row->pos >= seq->window ? row->pos - seq->window + 1 : 0;
    uint16_t half[TL_HEAD_DIM_MAX];
    float rounded[TL_HEAD_DIM_MAX], page[TL_BLOCK_TOKENS * TL_HEAD_DIM_MAX];
    double top = -INFINITY, total = 0, out[TL_HEAD_DIM_MAX] = {0};
    r->be->k->narrow(half, q, d);
    r->be->k->widen(rounded, half, d);
    for (int b = lo / TL_BLOCK_TOKENS; b <= row->pos / TL_BLOCK_TOKENS; b++) {
        const uint16_t *k =
            (const uint16_t *)(step->kv.arena->data + (size_t)seq->pages[slot * seq->stride + b] * step->kv.page_bytes);
        int64_t size = (int64_t)d * TL_BLOCK_TOKENS;
        int from = b * TL_BLOCK_TOKENS < lo ? lo - b * TL_BLOCK_TOKENS : 0,
            to = row->pos < (b + 1) * TL_BLOCK_TOKENS ? row->pos + 1 - b * TL_BLOCK_TOKENS : TL_BLOCK_TOKENS;
        double score[TL_BLOCK_TOKENS] = {0}, m = -INFINITY, both, keep, add, acc[TL_HEAD_DIM_MAX] = {0};
        float p[TL_BLOCK_TOKENS];
        uint16_t p_half[TL_BLOCK_TOKENS];
        r->be->k->widen(page, k + g * size, size);
        for (int j = 0; j < d; j++)
            for (int key = 0; key < TL_BLOCK_TOKENS; key++)
                score[key] += (double)rounded[j] * (double)page[j * TL_BLOCK_TOKENS + key];
        for (int key = from; key < to; key++) {
            score[key] /= sqrt(d);
            m = fmax(m, score[key]);
        }
        for (int key = from; key < to; key++)
            p[key] = (float)exp(score[key] - m);
        r->be->k->narrow(p_half + from, p + from, to - from);
        r->be->k->widen(p + from, p_half + from, to - from);
        both = fmax(top, m);
        keep = exp(top - both);
        add = exp(m - both);
        top = both;
        total *= keep;
        r->be->k->widen(page, k + (n_kv + g) * size, size);
        for (int key = from; key < to; key++) {
            total += (double)p[key] * add;
            for (int j = 0; j < d; j++)
                acc[j] += (double)p[key] * (double)page[key * d + j];
        }
        for (int j = 0; j < d; j++)
            out[j] = out[j] * keep + acc[j] * add;
    }
    for (int j = 0; j < d; j++)
        att[j] = (float)(out[j] / total);
}

void tl_cpu_attention(const struct tl_cpu_run *r, const struct tl_row_set *set, int slot, const float *qkv, int64_t ld,
                      float *att)
{
    const struct tl_arch_spec *spec = &r->step->net->spec;
    if (!attend_in_halves || r->step->kv.format != TL_KV_F16) {
        own_attention(r, set, slot, qkv, ld, att);
        return;
    }
    for (int i = r->tid; i < set->n; i += r->be->n_threads)
        for (int h = 0; h < spec->n_heads; h++)
            half_head(r, set->rows[i], slot, h / (spec->n_heads / spec->n_kv_heads), qkv + i * ld + h * spec->d_head,
                      att + ((int64_t)i * spec->n_heads + h) * spec->d_head);
}

#endif
