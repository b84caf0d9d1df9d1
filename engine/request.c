/* What a request may ask for. Every refusal names the field and the numbers that disagree. */
#include <string.h>

#include "job.h"

void tl_request_default(struct tl_request *r)
{
    memset(r, 0, sizeof(*r));
    r->cache_window = -1;
    tl_sampling_default(&r->sampling);
}

static enum tl_status fail_loops(struct tl_error *err, enum tl_status st, const char *param, int got, int min, int max)
{
    tl_fail(err, st, "%s is %d, it must be %d to %d", param, got, min, max);
    tl_error_param(err, param);
    tl_error_num(err, "min", min);
    tl_error_num(err, "max", max);
    tl_error_num(err, "got", got);
    return st;
}

static enum tl_status check_depth(const struct tl_model *m, const struct tl_request *r, int *loops, int *decode_loops,
                                  struct tl_error *err)
{
    const struct tl_handle *h = r->handle;
    int max = m->info.max_loops;

    *decode_loops = 0;
    *loops = r->new_L ? r->new_L : r->loops ? r->loops : h ? h->n_loops : m->info.spec->loops_default;
    if (r->new_L && !h)
        return tl_fail(err, TL_ERR_BAD_PARAM, "new_L is %d, but there is no handle to resume", r->new_L);
    if (r->new_L && (h->kind != TL_HANDLE_RESUME || r->new_L < h->n_loops || r->new_L > h->max_loops)) {
        tl_fail(err, TL_ERR_RESUME_DEPTH, "the depth to resume to is %d, this handle goes from %d to %d", r->new_L,
                h->n_loops, h->max_loops);
        tl_error_param(err, "resume.loops");
        tl_error_num(err, "loops_used", h->n_loops);
        tl_error_num(err, "max_loops", h->max_loops);
        tl_error_num(err, "got", r->new_L);
        return TL_ERR_RESUME_DEPTH;
    }
    if (h && !r->new_L && *loops != h->n_loops) {
        tl_fail(err, TL_ERR_LOOP_DEPTH, "loops is %d, this prefix was computed at %d", *loops, h->n_loops);
        tl_error_param(err, "loops");
        tl_error_num(err, "cache_loops", h->n_loops);
        tl_error_num(err, "requested_loops", *loops);
        return TL_ERR_LOOP_DEPTH;
    }
    if (*loops < 1 || *loops > max)
        return fail_loops(err, TL_ERR_LOOPS_RANGE, "loops", *loops, 1, max);
    *decode_loops = r->decode_loops ? r->decode_loops : r->new_L && r->loops ? r->loops : *loops;
    if (*decode_loops < 1)
        return fail_loops(err, TL_ERR_LOOPS_RANGE, "loops", *decode_loops, 1, *loops);
    if (*decode_loops > *loops) {
        tl_fail(err, TL_ERR_DECODE_DEPTH, "decode depth is %d, the prefix is computed to %d", *decode_loops, *loops);
        tl_error_param(err, "loops");
        tl_error_num(err, "available", *loops);
        tl_error_num(err, "got", *decode_loops);
        return TL_ERR_DECODE_DEPTH;
    }
    return TL_OK;
}

static enum tl_status check_window(const struct tl_model *m, const struct tl_request *r, int *window,
                                   struct tl_error *err)
{
    *window = r->cache_window >= 0 ? r->cache_window : r->handle ? r->handle->window : 0;
    if (r->cache_window < -1 || *window > m->info.max_seq_len) {
        tl_fail(err, TL_ERR_WINDOW_RANGE, "cache_window is %d, it must be 0 to %d", r->cache_window,
                m->info.max_seq_len);
        tl_error_param(err, "cache_window");
        return TL_ERR_WINDOW_RANGE;
    }
    if (r->handle && *window != r->handle->window) {
        tl_fail(err, TL_ERR_WINDOW_MISMATCH, "cache_window is %d, this prefix was computed with %d", *window,
                r->handle->window);
        tl_error_param(err, "cache_window");
        tl_error_num(err, "entry_window", r->handle->window);
        tl_error_num(err, "requested_window", *window);
        return TL_ERR_WINDOW_MISMATCH;
    }
    return TL_OK;
}

static enum tl_status check_tokens(const struct tl_model *m, const struct tl_request *r, struct tl_error *err)
{
    int64_t prefix = r->handle ? r->handle->n_tokens : 0, total;

    if (r->n_tokens < 0 || r->max_tokens < 0)
        return tl_fail(err, TL_ERR_BAD_PARAM, "%s is %d, it must be 0 or more",
                       r->n_tokens < 0 ? "n_tokens" : "max_tokens", r->n_tokens < 0 ? r->n_tokens : r->max_tokens);
    if (prefix + r->n_tokens < 1) {
        tl_fail(err, TL_ERR_EMPTY_PROMPT, "the prompt has no tokens");
        tl_error_param(err, "prompt");
        return TL_ERR_EMPTY_PROMPT;
    }
    total = prefix + r->n_tokens + r->max_tokens;
    if (total > m->info.max_seq_len) {
        tl_fail(err, TL_ERR_CONTEXT_LENGTH, "%lld prompt tokens and max_tokens %d are %lld positions, the limit is %d",
                (long long)(prefix + r->n_tokens), r->max_tokens, (long long)total, m->info.max_seq_len);
        tl_error_param(err, prefix + r->n_tokens > m->info.max_seq_len ? "prompt" : "max_tokens");
        tl_error_num(err, "prompt_tokens", prefix + r->n_tokens);
        tl_error_num(err, "cached_tokens", prefix);
        tl_error_num(err, "max_tokens", r->max_tokens);
        tl_error_num(err, "max_seq_len", m->info.max_seq_len);
        return TL_ERR_CONTEXT_LENGTH;
    }
    for (int i = 0; i < r->n_tokens; i++)
        if (r->tokens[i] < 0 || r->tokens[i] >= m->info.vocab_size) {
            tl_fail(err, TL_ERR_TOKEN_OUT_OF_VOCAB, "token %d of the prompt is %d, the vocabulary has ids 0 to %d", i,
                    r->tokens[i], m->info.vocab_size - 1);
            tl_error_param(err, "prompt");
            tl_error_num(err, "index", i);
            tl_error_num(err, "value", r->tokens[i]);
            tl_error_num(err, "vocab_size", m->info.vocab_size);
            return TL_ERR_TOKEN_OUT_OF_VOCAB;
        }
    return TL_OK;
}

static enum tl_status check_keep(const struct tl_model *m, const struct tl_request *r, int loops, int decode_loops,
                                 int window, struct tl_error *err)
{
    if (r->keep == TL_KEEP_RESUME) {
        int max = r->keep_max_loops ? r->keep_max_loops : m->info.max_loops;
        if (max > TL_LOOPS_MAX || max > m->info.max_loops) {
            int limit = m->info.max_loops < TL_LOOPS_MAX ? m->info.max_loops : TL_LOOPS_MAX;
            tl_fail(err, TL_ERR_MAX_LOOPS, "max_loops is %d, the limit is %d", max, limit);
            tl_error_param(err, "max_loops");
            tl_error_num(err, "limit", limit);
            tl_error_num(err, "got", max);
            return TL_ERR_MAX_LOOPS;
        }
        if (loops > max)
            return fail_loops(err, TL_ERR_LOOPS_USED_RANGE, "loops_used", loops, 1, max);
        if (r->handle)
            return tl_fail(err, TL_ERR_BAD_PARAM,
                           "a resume handle is built from a whole prompt, not from another handle");
    }
    if (r->keep_all && (window || decode_loops < loops || r->keep != TL_KEEP_NONE))
        return tl_fail(err, TL_ERR_BAD_PARAM,
                       "keep_all needs cache_window 0 (is %d), decode depth %d (is %d) and no other keep", window,
                       loops, decode_loops);
    if (r->want_prompt_logprobs && (r->handle || r->pool))
        return tl_fail(err, TL_ERR_BAD_PARAM, "log-probabilities of a prompt need it computed: no handle and no pool");
    return TL_OK;
}

static enum tl_status check_adaptive(const struct tl_model *m, const struct tl_request *r, int loops, int decode_loops,
                                     int window, struct tl_error *err)
{
    const struct tl_arch_spec *spec = m->info.spec;
    enum tl_status st = TL_OK;

    if (!r->adaptive)
        return TL_OK;
    if (spec->exit == TL_EXIT_NONE || (spec->exit == TL_EXIT_GATE_CDF && !m->net.gate_w))
        st = tl_fail(err, TL_ERR_UNSUPPORTED, "this model has no exit criterion, so loops cannot be chosen by itself");
    else if (!(r->exit_threshold >= 0 && r->exit_threshold <= 1))
        st = tl_fail(err, TL_ERR_OUT_OF_RANGE, "exit_threshold is %g, it must be above 0 and at most 1",
                     (double)r->exit_threshold);
    else if (window || decode_loops != loops || r->new_L || r->keep != TL_KEEP_NONE || r->keep_all ||
             r->want_prompt_logprobs)
        st = tl_fail(err, TL_ERR_BAD_PARAM,
                     "adaptive depth cannot be combined with cache_window %d, decode depth %d of %d, "
                     "a resume, a kept prefix or prompt log-probabilities",
                     window, decode_loops, loops);
    else if (r->handle && spec->n_coda)
        st = tl_fail(err, TL_ERR_BAD_PARAM,
                     "adaptive depth on a model with a coda starts from the whole prompt, not from a handle");
    if (st != TL_OK)
        tl_error_param(err, st == TL_ERR_OUT_OF_RANGE ? "exit_threshold" : "loops");
    return st;
}

enum tl_status tl_request_check(const struct tl_model *m, const struct tl_request *r, int *loops, int *decode_loops,
                                int *window, struct tl_error *err)
{
    enum tl_status st;

    if (r->handle && r->pool)
        return tl_fail(err, TL_ERR_BAD_PARAM, "a request starts from a handle or from the pool, not from both");
    if (r->handle && r->handle->model != m)
        return tl_fail(err, TL_ERR_MODEL_MISMATCH, "the handle was made by another model");
    if ((st = check_depth(m, r, loops, decode_loops, err)) != TL_OK ||
        (st = check_window(m, r, window, err)) != TL_OK || (st = check_tokens(m, r, err)) != TL_OK ||
        (st = check_keep(m, r, *loops, *decode_loops, *window, err)) != TL_OK ||
        (st = check_adaptive(m, r, *loops, *decode_loops, *window, err)) != TL_OK)
        return st;
    if (r->grammar && (!r->vocab || tl_vocab_trie_size(r->vocab) != m->info.vocab_size))
        return tl_fail(err, TL_ERR_BAD_PARAM, "a grammar needs the tree of a vocabulary of %d ids, this one has %d",
                       m->info.vocab_size, r->vocab ? tl_vocab_trie_size(r->vocab) : 0);
    return tl_sampling_check(&r->sampling, m->info.vocab_size, err);
}
