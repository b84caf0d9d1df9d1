/* engine/sampler_draw.h - drawing one of many tokens by their logits. Internal to the sampler.
 * A logit of -inf is banned; all others are finite, and at least one is. Thread: any. */
#ifndef TL_SAMPLER_DRAW_H
#define TL_SAMPLER_DRAW_H

#include <stdint.h>

struct tl_draw_params {
    float temperature;  /* > 0 */
    int top_k;          /* 0 = off */
    float top_p, min_p; /* 1, 0 = off */
    uint64_t random;    /* 64 uniformly distributed bits */
};

/* best: the lowest id of the highest of logits[n], n <= 2^24. */
int tl_draw(const float *logits, int n, int best, const struct tl_draw_params *p);

/* Logits are looked at in blocks of a fixed length, so that the compiler makes vector code of the inner loops. */
#define TL_LOGIT_BLOCK 64

/* The block that begins at first; pad[TL_LOGIT_BLOCK] is used where it reaches past the end, with -inf there. */
const float *tl_logit_block(const float *logits, int n, int first, float *pad);
/* e[j] = e^((x[j] - max) * inv_temperature) for a block; no x is above max. */
void tl_exp_block(const float *x, double max, double inv_temperature, double *e);

#endif
