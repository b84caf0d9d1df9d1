/* How well a model predicts a text, and how far it is from another one. */
#include <string.h>

#include "mem.h"
#include "model.h"
#include "sampler_math.h"

#define WINDOW 512

static double exp_of(double x) { return x < -700 ? 0 : tl_exp_neg(x); }

/* log of the sum of e^x, and the index of the largest (the lowest one). */
static double log_sum(const float *x, int n, int *best)
{
    double sum = 0, max;
    *best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[*best])
            *best = i;
    max = (double)x[*best];
    for (int i = 0; i < n; i++)
        sum += exp_of((double)x[i] - max);
    return max + tl_log_pos(sum);
}

/* One predicted token: row of the model, row of the reference (or NULL). Sums in nats. */
static void score(const float *x, const float *ref, int vocab, int32_t next, struct tl_eval *e)
{
    int best, ref_best;
    double z = log_sum(x, vocab, &best), zr, kl = 0;
    e->n_tokens++;
    e->bits_per_byte += z - (double)x[next];
    if (!ref)
        return;
    zr = log_sum(ref, vocab, &ref_best);
    e->ref_bits_per_byte += zr - (double)ref[next];
    e->top1_agreement += best == ref_best;
    for (int i = 0; i < vocab; i++) {
        double lr = (double)ref[i] - zr;
        kl += exp_of(lr) * (lr - ((double)x[i] - z));
    }
    e->kl += kl;
}

static enum tl_status check_pair(const struct tl_model *m, const struct tl_model *ref, struct tl_error *err)
{
    if (!tl_model_tokenizer(m))
        return tl_fail(err, TL_ERR_UNSUPPORTED, "the model has no tokenizer, so text cannot be scored");
    if (ref && ref->info.vocab_size != m->info.vocab_size)
        return tl_fail(err, TL_ERR_MODEL_MISMATCH, "the models have vocabularies of %d and %d tokens",
                       m->info.vocab_size, ref->info.vocab_size);
    return TL_OK;
}

enum tl_status tl_eval_text(struct tl_model *m, struct tl_model *ref, const char *text, size_t text_bytes, int n_loops,
                            struct tl_eval *out, struct tl_error *err)
{
    struct tl_encode_params ep = {.text = text, .text_bytes = text_bytes};
    struct tl_logits_params p = {.n_loops = n_loops}, pr;
    struct tl_eval e = {0};
    int32_t *ids = NULL;
    float *logits = NULL, *ref_logits = NULL;
    size_t n_ids = 0, vocab = (size_t)m->info.vocab_size;
    int window = m->info.max_seq_len < WINDOW ? m->info.max_seq_len : WINDOW;
    enum tl_status st = check_pair(m, ref, err);

    if (ref && ref->info.max_seq_len < window)
        window = ref->info.max_seq_len;
    if (st == TL_OK)
        st = tl_tokenizer_encode(tl_model_tokenizer(m), &ep, &ids, &n_ids, err);
    if (st != TL_OK)
        return st;
    logits = tl_array((size_t)window * vocab, sizeof(float));
    ref_logits = ref ? tl_array((size_t)window * vocab, sizeof(float)) : NULL;
    if (!logits || (ref && !ref_logits))
        st = tl_fail_host_memory(err, (size_t)window * vocab * sizeof(float));
    else if (n_ids < 2)
        st = tl_fail(err, TL_ERR_EMPTY_PROMPT, "the text has %zu tokens, scoring needs at least 2", n_ids);
    for (size_t at = 0; st == TL_OK && at + 1 < n_ids; at += (size_t)p.n_tokens - 1) {
        p.tokens = ids + at;
        p.n_tokens = p.n_rows = n_ids - at < (size_t)window ? (int)(n_ids - at) : window;
        p.logits = logits;
        pr = p;
        pr.logits = ref_logits;
        st = tl_logits(m, &p, err);
        if (st == TL_OK && ref)
            st = tl_logits(ref, &pr, err);
        for (int i = 0; st == TL_OK && i + 1 < p.n_tokens; i++)
            score(logits + (size_t)i * vocab, ref ? ref_logits + (size_t)i * vocab : NULL, (int)vocab, p.tokens[i + 1],
                  &e);
    }
    if (st == TL_OK) {
        double bytes = (double)text_bytes * 0.693147180559945309417, n = (double)e.n_tokens;
        e.bits_per_byte /= bytes;
        e.ref_bits_per_byte /= bytes;
        e.top1_agreement /= n;
        e.kl /= n;
        *out = e;
    }
    tl_free(ref_logits);
    tl_free(logits);
    tl_free(ids);
    return st;
}
