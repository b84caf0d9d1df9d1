/* engine/sampler_draw.h - drawing one of many tokens by their logits. Internal to the sampler.
 * A logit of -inf is banned; all others are finite, and at least one is. Thread: any. */
#ifndef TL_SAMPLER_DRAW_H
#define TL_SAMPLER_DRAW_H

#include <stdint.h>

#include "sampler_math.h"

struct tl_draw_params {
    float temperature;  /* > 0; 0, where nothing is drawn: the best */
    int top_k;          /* 0 = off */
    float top_p, min_p; /* 1, 0 = off */
    uint64_t random;    /* 64 uniformly distributed bits */
};

/* best: the lowest id of the highest of logits[n], n <= 2^24. */
int tl_draw(const float *logits, int n, int best, const struct tl_draw_params *p);

/* ---- what a device that draws by itself shares: it counts the same tokens with the same weights ---- */

#define TL_WEIGHT_ONE (1ull << 39) /* of the best token; 2^24 of them are below 2^64 */

/* Orders as logits do; -0 ties with +0. */
static TL_ANYWHERE inline uint32_t tl_logit_key(float x)
{
    uint32_t bits;
    x += 0.0f; /* -0 becomes +0 */
    memcpy(&bits, &x, sizeof(bits));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static TL_ANYWHERE inline uint64_t tl_rank_of(uint32_t key, int32_t id) { return (uint64_t)key << 32 | ~(uint32_t)id; }

/* e^z for z <= 0, -inf included: magnitudes above 700 count as 700, compared as integers, which needs no branch. */
static TL_ANYWHERE inline __attribute__((always_inline)) double tl_exp_clamped(double z)
{
    const int64_t most = 0x4085e00000000000; /* 700.0 */
    int64_t bits;
    memcpy(&bits, &z, sizeof(bits));
    bits &= INT64_MAX;
    bits = bits > most ? most : bits;
    memcpy(&z, &bits, sizeof(z));
    return tl_exp_neg(-z);
}

/* To the nearest unit: adding 2^52 to a smaller number leaves its integer in the low bits. */
static TL_ANYWHERE inline uint64_t tl_to_weight(double e)
{
    double shifted = e * (double)TL_WEIGHT_ONE + 0x1p52;
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof(bits));
    return bits & 0x000fffffffffffffu;
}

/* top_p < 1 as a share in units of 2^-64, not 0; the least weight that min_p leaves. */
static inline uint64_t tl_draw_share(float top_p) { return (uint64_t)((double)top_p * 0x1p64) | 1; }
static inline uint64_t tl_draw_weight_min(float min_p) { return (uint64_t)((double)min_p * (double)TL_WEIGHT_ONE); }

/* Logits are looked at in blocks of a fixed length, so that the compiler makes vector code of the inner loops. */
#define TL_LOGIT_BLOCK 64

/* The block that begins at first; pad[TL_LOGIT_BLOCK] is used where it reaches past the end, with -inf there. */
const float *tl_logit_block(const float *logits, int n, int first, float *pad);
/* e[j] = e^((x[j] - max) * inv_temperature) for a block; no x is above max. */
void tl_exp_block(const float *x, double max, double inv_temperature, double *e);

#endif
