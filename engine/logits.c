/* Logits of given tokens, outside any request: for tests, tools and evaluation. */
#include <string.h>

#include "mem.h"
#include "model.h"
#include "sampler_math.h"

static enum tl_status check(const struct tl_model *m, const struct tl_logits_params *p, struct tl_error *err)
{
    if (p->n_tokens < 1)
        return tl_fail(err, TL_ERR_EMPTY_PROMPT, "the prompt has no tokens");
    if (p->n_tokens > m->info.max_seq_len)
        return tl_fail(err, TL_ERR_CONTEXT_LENGTH, "the prompt has %d tokens, the limit is %d", p->n_tokens,
                       m->info.max_seq_len);
    if (p->n_loops < 1 || p->n_loops > m->info.max_loops)
        return tl_fail(err, TL_ERR_LOOPS_RANGE, "loops is %d, it must be 1 to %d", p->n_loops, m->info.max_loops);
    if (p->n_rows < 1 || p->n_rows > p->n_tokens)
        return tl_fail(err, TL_ERR_BAD_PARAM, "rows is %d, it must be 1 to %d", p->n_rows, p->n_tokens);
    if (p->cache_window < 0 || p->cache_window > m->info.max_seq_len)
        return tl_fail(err, TL_ERR_WINDOW_RANGE, "cache_window is %d, it must be 0 to %d", p->cache_window,
                       m->info.max_seq_len);
    if (p->gates && !m->net.gate_w)
        return tl_fail(err, TL_ERR_UNSUPPORTED, "this model has no exit gate");
    for (int i = 0; i < p->n_tokens; i++)
        if (p->tokens[i] < 0 || p->tokens[i] >= m->info.vocab_size)
            return tl_fail(err, TL_ERR_TOKEN_OUT_OF_VOCAB,
                           "token %d of the prompt is %d, the vocabulary has ids 0 to %d", i, p->tokens[i],
                           m->info.vocab_size - 1);
    return TL_OK;
}

static enum tl_status run_chunks(struct tl_model *m, const struct tl_logits_params *p, struct tl_seq *seq,
                                 struct tl_forward_row *rows, struct tl_error *err)
{
    size_t d = (size_t)m->info.spec->d_model, vocab = (size_t)m->info.vocab_size;
    int chunk = p->chunk > 0 ? p->chunk : m->info.step_rows_max, first = p->n_tokens - p->n_rows, n;
    enum tl_status st = TL_OK;

    if (chunk > m->info.step_rows_max)
        chunk = m->info.step_rows_max;
    for (int at = 0; st == TL_OK && at < p->n_tokens; at += n) {
        int heads = 0;
        st = TL_OK;
        for (n = 0; n < chunk && at + n < p->n_tokens; n++) {
            struct tl_forward_row *r = &rows[n];
            bool wanted = at + n >= first;
            if (wanted && p->logits && heads == tl_forward_heads_max(m->fwd))
                break;
            heads += wanted && p->logits;
            memset(r, 0, sizeof(*r));
            r->seq = seq;
            r->pos = at + n;
            r->token = p->tokens[at + n];
            r->from_loop = -1;
            r->to_loop = p->n_loops;
            r->head = wanted && p->logits;
            r->keep_hidden = wanted && p->hidden;
            r->start_state = p->start_states ? p->start_states + (size_t)(at + n) * d : NULL;
            r->gates = wanted && p->gates ? p->gates + (at + n - first) : NULL;
            r->gate_stride = p->n_rows;
        }
        st = tl_seq_extend(seq, at + n, err);
        if (st == TL_OK)
            st = tl_forward_run(m->fwd, rows, n, err);
        for (int i = 0; st == TL_OK && i < n; i++) {
            size_t row = (size_t)(at + i - first);
            if (rows[i].logits)
                memcpy(p->logits + row * vocab, rows[i].logits, vocab * sizeof(float));
            if (rows[i].hidden)
                memcpy(p->hidden + row * d, rows[i].hidden, d * sizeof(float));
        }
        if (st == TL_OK)
            tl_seq_commit(seq, at + n);
    }
    return st;
}

enum tl_status tl_logits(struct tl_model *m, const struct tl_logits_params *p, struct tl_error *err)
{
    struct tl_seq_plan plan = {.n_loops = p->n_loops, .window = p->cache_window, .len_max = p->n_tokens};
    struct tl_seq seq = {0};
    struct tl_forward_row *rows = NULL;
    int64_t need, lent;
    enum tl_status st = check(m, p, err);

    if (st != TL_OK)
        return st;
    need = tl_seq_need(m->kv, &plan, &lent);
    if (!tl_model_reserve(m, need))
        return tl_fail(err, TL_ERR_NO_DEVICE_MEMORY,
                       "%d tokens at depth %d need %lld bytes of KV memory, %lld are free", p->n_tokens, p->n_loops,
                       (long long)need * (long long)m->kv->view.page_bytes,
                       (long long)tl_kv_available(m->kv) * (long long)m->kv->view.page_bytes);
    st = tl_seq_start(&seq, m->kv, &plan, need, false, err);
    if (st != TL_OK) {
        tl_kv_unreserve(m->kv, need);
        return st;
    }
    rows = tl_array((size_t)m->info.step_rows_max, sizeof(*rows));
    st = rows ? run_chunks(m, p, &seq, rows, err)
              : tl_fail_host_memory(err, (size_t)m->info.step_rows_max * sizeof(*rows));
    tl_seq_end(&seq);
    tl_free(rows);
    return st;
}

int tl_exit_step(const float *gate_logits, int stride, int n_loops, float q)
{
    double alive = 1, sum = 0;
    for (int t = 0; t < n_loops - 1; t++) {
        double lambda = tl_sigmoid((double)gate_logits[t * stride]);
        sum += lambda * alive;
        alive *= 1 - lambda;
        if (sum >= (double)q)
            return t;
    }
    return n_loops - 1;
}
