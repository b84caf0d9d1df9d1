/* One request's way from logits to a token: what it has seen, what it bans, and what it reports. How a token is drawn is in
 * sampler_draw.c. */
#include "sampler.h"

#include "mem.h"
#include "rng.h"
#include "sampler_math.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define SEEN_SLOTS_MIN 64

struct seen {      /* a token that penalties apply to */
    int32_t token; /* -1 = empty slot */
    int32_t n_out; /* times in the output; 0 = in the prompt only */
};

struct tl_sampler {
    struct tl_sampling p; /* its pointers are the two copies below */
    struct tl_logit_bias *bias;
    int32_t *stop_ids;
    int vocab_size;
    int64_t n_out;
    struct seen *seen; /* open addressing, at most half full; NULL where no penalty is set */
    size_t n_slots, n_seen;
};

/* ---- parameters -------------------------------------------------------------------------------------------------- */

void tl_sampling_default(struct tl_sampling *s)
{
    memset(s, 0, sizeof(*s));
    s->temperature = 1;
    s->top_p = 1;
    s->repetition_penalty = 1;
    s->n_top_logprobs = -1;
}

static enum tl_status bad_field(struct tl_error *err, const char *field, const char *range, double value)
{
    enum tl_status st = tl_fail(err, TL_ERR_OUT_OF_RANGE, "%s must be %s, it is %g", field, range, value);
    tl_error_param(err, field);
    return st;
}

static enum tl_status check_token(struct tl_error *err, const char *field, int i, int32_t token, int vocab_size)
{
    enum tl_status st = TL_OK;
    if (token < 0 || token >= vocab_size) {
        st = tl_fail(err, TL_ERR_TOKEN_OUT_OF_VOCAB, "%s[%d] is token %d, the vocabulary has %d", field, i, (int)token,
                     vocab_size);
        tl_error_param(err, field);
        tl_error_num(err, "index", i);
        tl_error_num(err, "value", token);
        tl_error_num(err, "vocab_size", vocab_size);
    }
    return st;
}

/* Comparisons are written so that a NaN is out of range. */
enum tl_status tl_sampling_check(const struct tl_sampling *s, int vocab_size, struct tl_error *err)
{
    enum tl_status st = TL_OK;

    if (vocab_size < 1 || vocab_size > TL_SAMPLER_VOCAB_MAX)
        return bad_field(err, "vocab_size", "1 to 16777216", vocab_size);
    if (!(s->temperature >= 0 && s->temperature <= FLT_MAX))
        return bad_field(err, "temperature", "at least 0 and finite", s->temperature);
    if (s->top_k < 0)
        return bad_field(err, "top_k", "at least 0", s->top_k);
    if (!(s->top_p > 0 && s->top_p <= 1))
        return bad_field(err, "top_p", "above 0 and at most 1", s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return bad_field(err, "min_p", "0 to 1", s->min_p);
    if (!(s->repetition_penalty > 0 && s->repetition_penalty <= FLT_MAX))
        return bad_field(err, "repetition_penalty", "above 0 and finite", s->repetition_penalty);
    if (!(s->presence_penalty >= -2 && s->presence_penalty <= 2))
        return bad_field(err, "presence_penalty", "-2 to 2", s->presence_penalty);
    if (!(s->frequency_penalty >= -2 && s->frequency_penalty <= 2))
        return bad_field(err, "frequency_penalty", "-2 to 2", s->frequency_penalty);
    if (s->min_tokens < 0)
        return bad_field(err, "min_tokens", "at least 0", s->min_tokens);
    if (s->n_top_logprobs < -1 || s->n_top_logprobs > TL_TOP_LOGPROBS_MAX)
        return bad_field(err, "top_logprobs", "0 to 20", s->n_top_logprobs);
    if (s->n_logit_bias < 0 || s->n_logit_bias > TL_LOGIT_BIAS_MAX)
        return bad_field(err, "logit_bias", "a list of at most 1024 entries", s->n_logit_bias);
    for (int i = 0; i < s->n_logit_bias && st == TL_OK; i++) {
        st = check_token(err, "logit_bias", i, s->logit_bias[i].token, vocab_size);
        if (st == TL_OK && !(s->logit_bias[i].bias >= -FLT_MAX && s->logit_bias[i].bias <= FLT_MAX))
            st = bad_field(err, "logit_bias", "finite", s->logit_bias[i].bias);
    }
    if (st != TL_OK)
        return st;
    if (s->n_stop_ids < 0 || s->n_stop_ids > TL_SAMPLER_STOP_IDS_MAX)
        return bad_field(err, "stop_token_ids", "a list of at most 64 entries", s->n_stop_ids);
    for (int i = 0; i < s->n_stop_ids && st == TL_OK; i++)
        st = check_token(err, "stop_token_ids", i, s->stop_ids[i], vocab_size);
    return st;
}

/* ---- tokens seen, for the penalties ------------------------------------------------------------------------------- */

static bool has_penalties(const struct tl_sampling *p)
{
    return p->repetition_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0;
}

/* The slot of token, or the empty one where it belongs. */
static struct seen *seen_slot(struct seen *slots, size_t n_slots, int32_t token)
{
    size_t i = (size_t)((uint32_t)token * 2654435761u) & (n_slots - 1);
    while (slots[i].token != -1 && slots[i].token != token)
        i = (i + 1) & (n_slots - 1);
    return &slots[i];
}

static enum tl_status seen_grow(struct tl_sampler *sp, struct tl_error *err)
{
    size_t n_slots = sp->n_slots ? sp->n_slots * 2 : SEEN_SLOTS_MIN;
    struct seen *slots = tl_array(n_slots, sizeof(*slots));
    if (!slots)
        return tl_fail_host_memory(err, n_slots * sizeof(*slots));
    for (size_t i = 0; i < n_slots; i++)
        slots[i] = (struct seen){.token = -1};
    for (size_t i = 0; i < sp->n_slots; i++)
        if (sp->seen[i].token != -1)
            *seen_slot(slots, n_slots, sp->seen[i].token) = sp->seen[i];
    tl_free(sp->seen);
    sp->seen = slots;
    sp->n_slots = n_slots;
    return TL_OK;
}

static enum tl_status seen_add(struct tl_sampler *sp, int32_t token, int n_out, struct tl_error *err)
{
    struct seen *slot;
    if (2 * (sp->n_seen + 1) > sp->n_slots) {
        enum tl_status st = seen_grow(sp, err);
        if (st != TL_OK)
            return st;
    }
    slot = seen_slot(sp->seen, sp->n_slots, token);
    if (slot->token == -1) {
        slot->token = token;
        sp->n_seen++;
    }
    slot->n_out += n_out;
    return TL_OK;
}

/* ---- life ---------------------------------------------------------------------------------------------------------- */

enum tl_status tl_sampler_create(struct tl_sampler **out, const struct tl_sampling *s, int vocab_size,
                                 const int32_t *prompt, int n_prompt, struct tl_error *err)
{
    struct tl_sampler *sp = NULL;
    enum tl_status st;

    *out = NULL;
    st = tl_sampling_check(s, vocab_size, err);
    if (st != TL_OK)
        return st;
    sp = tl_calloc(1, sizeof(*sp));
    if (!sp)
        return tl_fail_host_memory(err, sizeof(*sp));
    sp->p = *s;
    sp->p.logit_bias = NULL;
    sp->p.stop_ids = NULL;
    sp->vocab_size = vocab_size;
    if (s->n_logit_bias > 0) {
        size_t bytes = (size_t)s->n_logit_bias * sizeof(*sp->bias);
        sp->bias = tl_malloc(bytes);
        if (!sp->bias) {
            st = tl_fail_host_memory(err, bytes);
            goto out;
        }
        sp->p.logit_bias = memcpy(sp->bias, s->logit_bias, bytes);
    }
    if (s->n_stop_ids > 0) {
        size_t bytes = (size_t)s->n_stop_ids * sizeof(*sp->stop_ids);
        sp->stop_ids = tl_malloc(bytes);
        if (!sp->stop_ids) {
            st = tl_fail_host_memory(err, bytes);
            goto out;
        }
        sp->p.stop_ids = memcpy(sp->stop_ids, s->stop_ids, bytes);
    }
    if (s->repetition_penalty != 1) {
        for (int i = 0; i < n_prompt; i++) {
            st = check_token(err, "prompt", i, prompt[i], vocab_size);
            if (st == TL_OK)
                st = seen_add(sp, prompt[i], 0, err);
            if (st != TL_OK)
                goto out;
        }
    }
    *out = sp;
    sp = NULL;
out:
    tl_sampler_free(sp);
    return st;
}

void tl_sampler_free(struct tl_sampler *sp)
{
    if (!sp)
        return;
    tl_free(sp->bias);
    tl_free(sp->stop_ids);
    tl_free(sp->seen);
    tl_free(sp);
}

static bool is_stop_id(const struct tl_sampler *sp, int32_t token)
{
    for (int i = 0; i < sp->p.n_stop_ids; i++)
        if (sp->stop_ids[i] == token)
            return true;
    return false;
}

static struct tl_draw_params draw_at(const struct tl_sampling *p, int pos)
{
    return (struct tl_draw_params){.temperature = p->temperature,
                                   .top_k = p->top_k,
                                   .top_p = p->top_p,
                                   .min_p = p->min_p,
                                   .random = tl_rng_u64(p->seed, p->choice, (uint64_t)(int64_t)pos)};
}

bool tl_sampler_is_plain(const struct tl_sampler *sp, int pos, struct tl_draw_params *how)
{
    const struct tl_sampling *p = &sp->p;
    if (how)
        *how = draw_at(p, pos);
    return p->n_logit_bias == 0 && !has_penalties(p) && p->n_top_logprobs < 0 &&
           (p->n_stop_ids == 0 || (!p->ignore_eos && p->min_tokens == 0)); /* else stop ids are banned for a while */
}

enum tl_status tl_sampler_take(const struct tl_sampler *sp, int32_t token, int pos, struct tl_sampled *out,
                               struct tl_error *err)
{
    struct tl_sampled result = {.token = token};
    if (token < 0) {
        enum tl_status st = tl_fail(err, TL_ERR_NON_FINITE, "the logits for position %d are not finite", pos);
        tl_error_num(err, "position", pos);
        return st;
    }
    result.is_stop = is_stop_id(sp, token);
    *out = result;
    return TL_OK;
}

enum tl_status tl_sampler_accept(struct tl_sampler *sp, int32_t token, struct tl_error *err)
{
    enum tl_status st = check_token(err, "output", (int)sp->n_out, token, sp->vocab_size);
    if (st == TL_OK && has_penalties(&sp->p))
        st = seen_add(sp, token, 1, err);
    if (st == TL_OK)
        sp->n_out++;
    return st;
}

/* ---- from raw to adjusted logits ----------------------------------------------------------------------------------- */

/* pos < 0: not known. Blocks of a fixed length, so that the compiler makes vector code of the inner loop. */
static enum tl_status check_finite(const float *logits, int n, int pos, struct tl_error *err)
{
    enum tl_status st;
    int i = 0;

    for (; i + TL_LOGIT_BLOCK <= n; i += TL_LOGIT_BLOCK) {
        uint32_t bad = 0;
        for (int j = 0; j < TL_LOGIT_BLOCK; j++) {
            uint32_t bits;
            memcpy(&bits, &logits[i + j], sizeof(bits));
            /* An exponent of all ones carries into the sign. */
            bad |= ((bits & 0x7f800000u) + 0x00800000u) & 0x80000000u;
        }
        if (bad)
            break;
    }
    while (i < n && isfinite(logits[i]))
        i++;
    if (i == n)
        return TL_OK;
    if (pos >= 0)
        st = tl_fail(err, TL_ERR_NON_FINITE, "the logits for position %d are not finite: token %d has %f", pos, i,
                     logits[i]);
    else
        st = tl_fail(err, TL_ERR_NON_FINITE, "the logits are not finite: token %d has %f", i, logits[i]);
    if (pos >= 0)
        tl_error_num(err, "position", pos);
    tl_error_num(err, "token", i);
    return st;
}

static float clamped(float x) /* a finite sum or product that ran over stays finite */
{
    return x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x;
}

/* Banned tokens become -inf, everything else stays finite. */
static void adjust(const struct tl_sampler *sp, float *logits, const uint32_t *mask)
{
    const struct tl_sampling *p = &sp->p;

    for (int i = 0; i < p->n_logit_bias; i++)
        logits[sp->bias[i].token] = clamped(logits[sp->bias[i].token] + sp->bias[i].bias);
    for (size_t i = 0; i < sp->n_slots; i++) {
        const struct seen *seen = &sp->seen[i];
        float *x = seen->token == -1 ? NULL : &logits[seen->token];
        if (!x)
            continue;
        *x = clamped(*x > 0 ? *x / p->repetition_penalty : *x * p->repetition_penalty);
        if (seen->n_out > 0)
            *x = clamped(*x - p->presence_penalty - p->frequency_penalty * (float)seen->n_out);
    }
    /* Bans come last so that the clamps above cannot undo one. */
    for (int i = 0; i < p->n_logit_bias; i++)
        if (sp->bias[i].bias <= -100)
            logits[sp->bias[i].token] = -INFINITY;
    if (p->ignore_eos || sp->n_out < p->min_tokens)
        for (int i = 0; i < p->n_stop_ids; i++)
            logits[sp->stop_ids[i]] = -INFINITY;
    for (int i = 0; mask && i < sp->vocab_size; i += 32) {
        uint32_t banned = ~mask[i / 32];
        if (sp->vocab_size - i < 32)
            banned &= (1u << (sp->vocab_size - i)) - 1;
        for (; banned; banned &= banned - 1)
            logits[i + __builtin_ctz(banned)] = -INFINITY;
    }
}

static int argmax(const float *logits, int n)
{
    int best = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

/* ---- log-probabilities --------------------------------------------------------------------------------------------- */

static float logprob_of(double logit, double log_total)
{
    double lp = logit - log_total;
    return lp < -(double)FLT_MAX ? -FLT_MAX : (float)lp;
}

/* out->token is set; at least one logit is above -inf. Sums in order of ids. */
static void report_logprobs(const float *logits, int n, int n_top, struct tl_sampled *out)
{
    double max = logits[argmax(logits, n)], sum = 0, log_total, e[TL_LOGIT_BLOCK];
    float pad[TL_LOGIT_BLOCK];
    int n_found = 0;

    for (int first = 0; first < n; first += TL_LOGIT_BLOCK) {
        tl_exp_block(tl_logit_block(logits, n, first, pad), max, 1, e);
        for (int j = 0; j < TL_LOGIT_BLOCK; j++)
            sum += e[j];
    }
    for (int i = 0; i < n && n_top > 0; i++)
        if (logits[i] > -INFINITY && (n_found < n_top || logits[i] > out->top[n_found - 1].logprob)) {
            int at = n_found < n_top ? n_found++ : n_found - 1;
            for (; at > 0 && logits[i] > out->top[at - 1].logprob; at--)
                out->top[at] = out->top[at - 1];
            out->top[at] = (struct tl_token_logprob){.token = i, .logprob = logits[i]};
        }
    log_total = max + tl_log_pos(sum);
    for (int i = 0; i < n_found; i++)
        out->top[i].logprob = logprob_of(out->top[i].logprob, log_total);
    out->n_top = n_found;
    out->logprob = logprob_of(logits[out->token], log_total);
}

enum tl_status tl_logprob_of(const float *logits, int vocab_size, int32_t token, int n_top, struct tl_sampled *out,
                             struct tl_error *err)
{
    struct tl_sampled result = {.token = token};
    enum tl_status st;

    if (vocab_size < 1 || vocab_size > TL_SAMPLER_VOCAB_MAX)
        return bad_field(err, "vocab_size", "1 to 16777216", vocab_size);
    if (n_top < 0 || n_top > TL_TOP_LOGPROBS_MAX)
        return bad_field(err, "top_logprobs", "0 to 20", n_top);
    st = check_token(err, "prompt", 0, token, vocab_size);
    if (st == TL_OK)
        st = check_finite(logits, vocab_size, -1, err);
    if (st != TL_OK)
        return st;
    report_logprobs(logits, vocab_size, n_top, &result);
    *out = result;
    return TL_OK;
}

enum tl_status tl_sampler_sample(struct tl_sampler *sp, float *logits, int pos, const uint32_t *mask,
                                 struct tl_sampled *out, struct tl_error *err)
{
    const struct tl_sampling *p = &sp->p;
    struct tl_sampled result = {0};
    enum tl_status st = check_finite(logits, sp->vocab_size, pos, err);
    int best;

    if (st != TL_OK)
        return st;
    adjust(sp, logits, mask);
    best = argmax(logits, sp->vocab_size);
    if (logits[best] == -INFINITY) {
        st = tl_fail(err, TL_ERR_BAD_PARAM,
                     "no token is allowed at position %d: all %d are banned by logit_bias, "
                     "min_tokens, ignore_eos or the grammar",
                     pos, sp->vocab_size);
        tl_error_num(err, "position", pos);
        return st;
    }
    result.token = best;
    if (p->temperature > 0) {
        struct tl_draw_params how = draw_at(p, pos);
        result.token = tl_draw(logits, sp->vocab_size, best, &how);
    }
    result.is_stop = is_stop_id(sp, result.token);
    if (p->n_top_logprobs >= 0)
        report_logprobs(logits, sp->vocab_size, p->n_top_logprobs, &result);
    *out = result;
    return TL_OK;
}
