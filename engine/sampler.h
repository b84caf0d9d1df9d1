/* engine/sampler.h - from one row of logits to one token.
 *
 * The random number of a token is a pure function of (seed, choice index, absolute position), so a token does not depend on
 * what was reused or on who else is served. Ties go to the lowest id, everywhere.
 * top_k keeps exactly k tokens; top_p, of these, the fewest of the best whose share reaches it (at least one); min_p, of these,
 * the ones at least min_p times as likely as the best.
 * Order: logit_bias, penalties, min_tokens/ignore_eos masks, caller's mask, temperature, top_k, top_p, min_p, draw.
 * Thread: worker; a sampler belongs to one request. */
#ifndef TL_SAMPLER_H
#define TL_SAMPLER_H

#include "sampler_draw.h"
#include "status.h"

#define TL_TOP_LOGPROBS_MAX     20
#define TL_LOGIT_BIAS_MAX       1024
#define TL_SAMPLER_STOP_IDS_MAX 64
#define TL_SAMPLER_VOCAB_MAX    (1 << 24)

struct tl_logit_bias {
    int32_t token;
    float bias; /* added to the logit; -100 or less bans */
};

struct tl_sampling {
    float temperature;        /* >= 0; 0 = greedy */
    int top_k;                /* 0 = off */
    float top_p;              /* (0, 1]; 1 = off */
    float min_p;              /* [0, 1]; 0 = off */
    float repetition_penalty; /* > 0; 1 = off; over prompt and output */
    float presence_penalty;   /* [-2, 2], over the output */
    float frequency_penalty;  /* [-2, 2], over the output */
    uint64_t seed;
    uint32_t choice;    /* index among n choices of one request */
    int min_tokens;     /* stop ids are banned before this many output tokens */
    bool ignore_eos;    /* stop ids are banned */
    int n_top_logprobs; /* 0..TL_TOP_LOGPROBS_MAX alternatives reported per token; -1 = no logprobs at all */
    const struct tl_logit_bias *logit_bias; /* copied */
    int n_logit_bias;
    const int32_t *stop_ids; /* copied; ends the output and is not part of it */
    int n_stop_ids;
};
/* temperature 1, everything else off, seed 0, no logprobs. */
void tl_sampling_default(struct tl_sampling *s);
/* Every field against its range; names the field. */
enum tl_status tl_sampling_check(const struct tl_sampling *s, int vocab_size, struct tl_error *err);

struct tl_token_logprob {
    int32_t token;
    float logprob; /* natural log of the softmax of the logits after bias, penalties and masks, before temperature */
};

struct tl_sampled {
    int32_t token;
    bool is_stop;  /* token is one of the stop ids */
    float logprob; /* as above; 0 if not asked for */
    int n_top;
    struct tl_token_logprob top[TL_TOP_LOGPROBS_MAX]; /* highest first */
};

struct tl_sampler;
/* Copies what it needs. prompt (for the repetition penalty) is borrowed for the call. */
enum tl_status tl_sampler_create(struct tl_sampler **out, const struct tl_sampling *s, int vocab_size,
                                 const int32_t *prompt, int n_prompt, struct tl_error *err);
void tl_sampler_free(struct tl_sampler *sp); /* NULL is fine */

/* Choose the token for absolute position pos (that of the new token) from logits[vocab_size], which is overwritten.
 * mask (may be NULL): one bit per token, 1 = allowed. Errors: TL_ERR_NON_FINITE (NaN, +-inf in the raw logits; position
 * in the numbers), TL_ERR_BAD_PARAM when everything is masked. On error nothing is recorded. Does not record the token. */
enum tl_status tl_sampler_sample(struct tl_sampler *sp, float *logits, int pos, const uint32_t *mask,
                                 struct tl_sampled *out, struct tl_error *err);
/* Does the token for position pos follow from the raw logits and pos alone, whatever came before, so that somebody else may choose
 * it? how (may be NULL): by tl_draw() with this; temperature 0 = the best. */
bool tl_sampler_is_plain(const struct tl_sampler *sp, int pos, struct tl_draw_params *how);
/* As tl_sampler_sample() for such a sampler when the token is known already; -1 = a logit was not finite. */
enum tl_status tl_sampler_take(const struct tl_sampler *sp, int32_t token, int pos, struct tl_sampled *out,
                               struct tl_error *err);
/* The token joined the output: counts towards penalties and min_tokens. */
enum tl_status tl_sampler_accept(struct tl_sampler *sp, int32_t token, struct tl_error *err);

/* Log-probability of token (and alternatives) in untouched logits, for scoring a prompt. */
enum tl_status tl_logprob_of(const float *logits, int vocab_size, int32_t token, int n_top, struct tl_sampled *out,
                             struct tl_error *err);

#endif
