/* How a token is chosen without sorting the vocabulary, and with the same result on every machine.
 *
 * Rank. A token's rank is its logit, mapped to an unsigned number that orders the same way, above the complement of its id.
 * Ranks are all different and a higher one is better, so ties go to the lowest id by construction, and what top_k and
 * top_p keep is one number: the lowest rank that survives (a cut).
 *
 * Weight. After temperature a token weighs e^((logit - highest) / temperature), as an integer in units of 2^-39. Sums of
 * integers are exact in any order; a token below 2^-40 of the best one weighs nothing.
 *
 * A cut is found by radix selection: weights (or counts) gathered by the upper 11 bits of the logit, then within the one
 * bucket that matters by the next 11, then by the last 10. That is one look at every logit and a few short ones, whatever
 * top_k and top_p are, without memory.
 *
 * The filters mean what they mean in other servers. top_k: exactly k tokens. top_p: of those, the fewest of the best whose
 * share of the weight reaches top_p, at least one. min_p: of those, the ones with at least min_p times the weight of the
 * best. The draw takes a 64-bit random number's share of the total weight and walks the ids upwards to it. */
#include "sampler_draw.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#define N_BUCKETS 2048

static float key_logit(uint32_t key) /* keys past those of the infinities count as these */
{
    uint32_t bits = key & 0x80000000u ? key ^ 0x80000000u : ~key;
    float x;
    if ((bits & 0x7f800000u) == 0x7f800000u)
        return key & 0x80000000u ? INFINITY : -INFINITY;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

struct filter { /* how much a token counts */
    double max, inv_temperature;
    bool count;          /* all that are not banned count 1; else their weight */
    uint64_t lowest;     /* ranks below it count 0; 0 = no cut */
    uint64_t weight_min; /* weights below it count 0 */
};

/* e^((x - max) * inv_temperature), for ids in blocks: this loop is where the time goes. */
static inline __attribute__((always_inline)) void exp_loop(const float *x, double max, double inv_temperature,
                                                           double *e)
{
    for (int j = 0; j < TL_LOGIT_BLOCK; j++) /* two loops: the compiler makes no vector code of both together */
        e[j] = ((double)x[j] - max) * inv_temperature;
    for (int j = 0; j < TL_LOGIT_BLOCK; j++)
        e[j] = tl_exp_clamped(e[j]);
}

#if defined(__x86_64__)
/* The same operations, four at a time: the same bits. (No fma: the target does not include it.) */
__attribute__((target("avx2"))) static void exp_block_avx2(const float *x, double max, double inv_temperature,
                                                           double *e)
{
    exp_loop(x, max, inv_temperature, e);
}
#endif

void tl_exp_block(const float *x, double max, double inv_temperature, double *e)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        exp_block_avx2(x, max, inv_temperature, e);
        return;
    }
#endif
    exp_loop(x, max, inv_temperature, e);
}

static uint64_t weight_of(const struct filter *f, float x)
{
    return tl_to_weight(tl_exp_clamped(((double)x - f->max) * f->inv_temperature));
}

const float *tl_logit_block(const float *logits, int n, int first, float *pad)
{
    if (n - first >= TL_LOGIT_BLOCK)
        return logits + first;
    for (int j = 0; j < TL_LOGIT_BLOCK; j++)
        pad[j] = first + j < n ? logits[first + j] : -INFINITY;
    return pad;
}

static bool any_within(const float *x, float low, float high)
{
    uint32_t any = 0;
    for (int j = 0; j < TL_LOGIT_BLOCK; j++)
        any |= (x[j] >= low) & (x[j] <= high);
    return any;
}

/* What each of a block of tokens counts. */
static void weigh(const struct filter *f, const float *x, int first, uint64_t *w)
{
    double e[TL_LOGIT_BLOCK];

    if (f->lowest && !any_within(x, key_logit((uint32_t)(f->lowest >> 32)), FLT_MAX)) {
        memset(w, 0, TL_LOGIT_BLOCK * sizeof(*w));
        return;
    }
    if (f->count) {
        for (int j = 0; j < TL_LOGIT_BLOCK; j++)
            w[j] = x[j] >= -FLT_MAX;
    } else {
        tl_exp_block(x, f->max, f->inv_temperature, e);
        for (int j = 0; j < TL_LOGIT_BLOCK; j++)
            w[j] = tl_to_weight(e[j]);
    }
    for (int j = 0; f->weight_min && j < TL_LOGIT_BLOCK; j++)
        w[j] = w[j] < f->weight_min ? 0 : w[j];
    for (int j = 0; f->lowest && j < TL_LOGIT_BLOCK; j++)
        if (tl_rank_of(tl_logit_key(x[j]), first + j) < f->lowest)
            w[j] = 0;
}

/* share of total, rounded down. share is in [0, 1) in units of 2^-64. */
static uint64_t share_of(uint64_t total, uint64_t share) { return (uint64_t)((unsigned __int128)total * share >> 64); }

/* Sums over the tokens whose key is `upper` above `shift` bits, by the next lower bits. */
static void tally_bucket(uint64_t *sums, const float *logits, int n, const struct filter *f, uint32_t upper, int shift)
{
    const int next = shift == 21 ? 10 : 0;
    const uint32_t mask = (1u << (shift - next)) - 1;
    const float low = key_logit(upper << shift), high = key_logit(upper << shift | ((1u << shift) - 1));
    float pad[TL_LOGIT_BLOCK];

    memset(sums, 0, N_BUCKETS * sizeof(*sums));
    for (int first = 0; first < n; first += TL_LOGIT_BLOCK) {
        const float *x = tl_logit_block(logits, n, first, pad);
        if (!any_within(x, low, high)) /* a quick look: few blocks have any */
            continue;
        for (int j = 0; j < TL_LOGIT_BLOCK; j++) {
            uint32_t key = tl_logit_key(x[j]);
            if (key >> shift == upper && tl_rank_of(key, first + j) >= f->lowest)
                sums[key >> next & mask] += f->count ? x[j] >= -FLT_MAX : weight_of(f, x[j]);
        }
    }
}

/* The highest rank such that it and all above it count at least need, or, where share is not 0, at least that share (in
 * units of 2^-64) of the sum of all. f->lowest if there is not enough. */
static uint64_t find_cut(uint64_t *sums, const float *logits, int n, const struct filter *f, uint64_t need,
                         uint64_t share)
{
    uint64_t w[TL_LOGIT_BLOCK], total = 0, above = 0; /* above: counted by keys above the current bucket */
    uint32_t key = 0;                                 /* its upper bits, as far as known */
    float pad[TL_LOGIT_BLOCK];
    int b;

    memset(sums, 0, N_BUCKETS * sizeof(*sums));
    for (int first = 0; first < n; first += TL_LOGIT_BLOCK) {
        const float *x = tl_logit_block(logits, n, first, pad);
        weigh(f, x, first, w);
        for (int j = 0; j < TL_LOGIT_BLOCK; j++) {
            sums[tl_logit_key(x[j]) >> 21] += w[j];
            total += w[j];
        }
    }
    if (share > 0)
        need = share_of(total - 1, share) + 1; /* rounded up, but for the last unit */
    if (need >= total)
        return f->lowest;
    for (int shift = 21;; shift = shift == 21 ? 10 : 0) {
        int n_buckets = shift == 0 ? 1024 : N_BUCKETS;
        for (b = n_buckets - 1; above + sums[b] < need; b--)
            above += sums[b];
        key = key * (uint32_t)n_buckets + (uint32_t)b;
        if (shift == 0)
            break;
        tally_bucket(sums, logits, n, f, key, shift);
    }
    /* Tokens that tie on the key count the same: take them by id until need is met. */
    for (int i = 0; i < n; i++) {
        if (logits[i] != key_logit(key) || tl_rank_of(key, i) < f->lowest)
            continue;
        above += f->count ? 1 : weight_of(f, logits[i]);
        if (above >= need)
            return tl_rank_of(key, i);
    }
    return f->lowest; /* not reached: the bucket held what was missing */
}

int tl_draw(const float *logits, int n, int best, const struct tl_draw_params *p)
{
    const int n_blocks = (n + TL_LOGIT_BLOCK - 1) / TL_LOGIT_BLOCK;
    const int stride = (n_blocks + N_BUCKETS - 1) / N_BUCKETS * TL_LOGIT_BLOCK;
    struct filter f = {.max = logits[best], .inv_temperature = 1.0 / (double)p->temperature};
    uint64_t sums[N_BUCKETS], w[TL_LOGIT_BLOCK], total = 0, target;
    float pad[TL_LOGIT_BLOCK];
    int b;

    f.count = true;
    if (p->top_k > 0 && p->top_k < n)
        f.lowest = find_cut(sums, logits, n, &f, (uint64_t)p->top_k, 0);
    f.count = false;
    if (p->top_p < 1)
        f.lowest = find_cut(sums, logits, n, &f, 0, tl_draw_share(p->top_p));
    f.weight_min = tl_draw_weight_min(p->min_p);
    memset(sums, 0, N_BUCKETS * sizeof(*sums));
    /* Sums by strides of ids, so that the walk has to redo one of them only. */
    for (int first = 0; first < n; first += TL_LOGIT_BLOCK) {
        weigh(&f, tl_logit_block(logits, n, first, pad), first, w);
        for (int j = 0; j < TL_LOGIT_BLOCK; j++)
            sums[first / stride] += w[j];
    }
    for (b = 0; b < N_BUCKETS; b++)
        total += sums[b];
    target = share_of(total, p->random);
    for (b = 0; target >= sums[b]; b++)
        target -= sums[b];
    for (int first = b * stride; first < n && first < (b + 1) * stride; first += TL_LOGIT_BLOCK) {
        weigh(&f, tl_logit_block(logits, n, first, pad), first, w);
        for (int j = 0; j < TL_LOGIT_BLOCK; j++) {
            if (target < w[j])
                return first + j;
            target -= w[j];
        }
    }
    return best; /* not reached: the stride held what was missing */
}
