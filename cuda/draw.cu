/* The choice of a token on the device, with the result of engine/sampler_draw.c bit for bit: weights are made by the same inline
 * functions and are integers, so that sums do not depend on their order, and a cut is a rank, however it is found. One block
 * works on a row. */
#include "backend_impl.cuh"
#include "rows.cuh"

#define THREADS  1024
#define WARPS    (THREADS / 32)
#define BINS     2048 /* of a search: two for each thread */
#define LISTED   1024 /* tokens of one bin whose order is found by looking at all of them */
#define FARTHEST 28.0 /* e to the minus this is less than half a unit of weight */

/* Which tokens count, and how much. */
struct counting {
    const float *x;
    int n;
    double max, inv_temperature;
    unsigned long long lowest, weight_min; /* ranks and weights below count 0 */
    bool one;                              /* each counts 1 instead of its weight */
    bool tie;                              /* only those with this key, 1 each */
    uint32_t key;
};

struct search {
    unsigned long long bins[BINS], warps[WARPS];
    unsigned long long rank[LISTED], value[LISTED];
    unsigned long long above, found;
    uint32_t low, high; /* keys of the bin */
    int bin, n_listed, token;
};

static __device__ __forceinline__ double distance(const struct counting *c, float x)
{
    return ((double)x - c->max) * c->inv_temperature;
}

/* Tokens too far from the best to weigh anything count as little where each counts 1: a cut among them changes nothing. */
static __device__ __forceinline__ unsigned long long counts(const struct counting *c, int id)
{
    float x = c->x[id];
    double z = distance(c, x);
    if (c->tie)
        return tl_logit_key(x) == c->key && tl_rank_of(c->key, id) >= c->lowest;
    if (z < -FARTHEST || tl_rank_of(tl_logit_key(x), id) < c->lowest)
        return 0;
    unsigned long long w = c->one ? 1 : tl_to_weight(tl_exp_clamped(z));
    return w < c->weight_min ? 0 : w;
}

static __device__ __forceinline__ unsigned long long warp_scan(unsigned long long v)
{
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        unsigned long long left = __shfl_up_sync(0xffffffffu, v, d);
        v += lane >= d ? left : 0;
    }
    return v;
}

/* The sum of the first THREADS threads' values up to and with this one's; *total: of all. */
static __device__ unsigned long long block_scan(struct search *s, unsigned long long v, unsigned long long *total)
{
    int warp = threadIdx.x / 32;
    v = warp_scan(v);
    if ((threadIdx.x & 31) == 31)
        s->warps[warp] = v;
    __syncthreads();
    *total = 0;
    for (int w = 0; w < WARPS; w++) {
        v += w < warp ? s->warps[w] : 0;
        *total += s->warps[w];
    }
    __syncthreads();
    return v;
}

/* The first token, by id, with which the sum of what counts goes past `past`, or past this share of it (in units of 2^-64). */
static __device__ int walk(struct search *s, const struct counting *c, bool by_share, unsigned long long past)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, per = (c->n + THREADS - 1) / THREADS * 32;
    int from = warp * per, to = min(from + per, c->n), w = 0;
    unsigned long long sum = 0, total;
    for (int id = from + lane; id < to; id += 32)
        sum += counts(c, id);
    block_scan(s, sum, &total); /* and s->warps has the sums of the warps */
    past = by_share ? __umul64hi(total, past) : past;
    while (w < WARPS - 1 && past >= s->warps[w])
        past -= s->warps[w++];
    for (int id = from + lane; warp == w; id += 32) {
        sum = warp_scan(id < to ? counts(c, id) : 0);
        unsigned beyond = __ballot_sync(0xffffffffu, sum > past);
        if (beyond || id - lane + 32 >= to) {
            if (lane == 0)
                s->token = id + (beyond ? __ffs((int)beyond) - 1 : 0);
            break;
        }
        past -= __shfl_sync(0xffffffffu, sum, 31);
    }
    __syncthreads();
    return s->token;
}

/* Where a token falls in a search: higher logits first. At first by distance, which spreads most models' logits well, then by keys
 * low .. high; outside of them: -1. */
static __device__ __forceinline__ int bin_of(const struct counting *c, const struct search *s, int id, int shift)
{
    float x = c->x[id];
    uint32_t key = tl_logit_key(x);
    if (shift < 0)
        return min((int)(fmin(-distance(c, x), FARTHEST) * (BINS / FARTHEST)), BINS - 1);
    return key < s->low || key > s->high ? -1 : (int)((s->high - key) >> shift);
}

/* The tokens of a bin, as far as there is room, with the range of their keys. */
static __device__ void list_bin(struct search *s, const struct counting *c, int bin, int shift)
{
    uint32_t low = 0xffffffffu, high = 0;
    for (int id = threadIdx.x; id < c->n; id += THREADS) {
        if (bin_of(c, s, id, shift) != bin)
            continue;
        unsigned long long v = counts(c, id);
        if (!v)
            continue;
        uint32_t key = tl_logit_key(c->x[id]);
        int at = atomicAdd(&s->n_listed, 1);
        low = min(low, key);
        high = max(high, key);
        if (at < LISTED) {
            s->rank[at] = tl_rank_of(key, id);
            s->value[at] = v;
        }
    }
    __syncthreads(); /* bins by the old range are done with */
    if (threadIdx.x == 0) {
        s->low = 0xffffffffu;
        s->high = 0;
    }
    __syncthreads();
    atomicMin(&s->low, low);
    atomicMax(&s->high, high);
    __syncthreads();
}

/* The highest rank such that it and all above it count at least need, or this share of all (in units of 2^-64) where it is not 0;
 * c->lowest if there is not enough. */
static __device__ unsigned long long find_cut(struct search *s, const struct counting *c, unsigned long long need,
                                              unsigned long long share)
{
    unsigned long long above = 0, total;
    for (int shift = -1;; shift = max(21 - __clz((int)(s->high - s->low)), 0)) {
        int t = threadIdx.x;
        s->bins[2 * t] = s->bins[2 * t + 1] = 0;
        s->n_listed = 0;
        __syncthreads();
        for (int id = t; id < c->n; id += THREADS) {
            unsigned long long v = counts(c, id);
            int b = v ? bin_of(c, s, id, shift) : -1;
            if (b >= 0)
                atomicAdd(&s->bins[b], v);
        }
        __syncthreads();
        unsigned long long sum = block_scan(s, s->bins[2 * t] + s->bins[2 * t + 1], &total), before = above + sum;
        if (shift < 0) {
            need = share ? __umul64hi(total - 1, share) + 1 : need;
            if (need >= total)
                return c->lowest;
        }
        before -= s->bins[2 * t] + s->bins[2 * t + 1];
        for (int b = 2 * t; b < 2 * t + 2; b++) {
            if (before < need && before + s->bins[b] >= need) {
                s->bin = b;
                s->above = before;
            }
            before += s->bins[b];
        }
        __syncthreads();
        above = s->above;
        list_bin(s, c, s->bin, shift);
        int n = s->n_listed;
        bool tied = s->low == s->high;
        if (n <= LISTED) {
            unsigned long long with = above;
            for (int i = 0; t < n && i < n; i++)
                with += s->rank[i] >= s->rank[t] ? s->value[i] : 0;
            if (t < n && with >= need && with - s->value[t] < need)
                s->found = s->rank[t];
        }
        __syncthreads(); /* n_listed was read by all */
        if (n <= LISTED)
            return s->found;
        if (tied) { /* tokens that tie on the logit count the same: the lowest ids are taken */
            struct counting tie = *c;
            unsigned long long each = s->value[0];
            tie.tie = true;
            tie.key = s->low;
            return tl_rank_of(tie.key, walk(s, &tie, false, (need - above + each - 1) / each - 1));
        }
    }
}

static __device__ int draw(struct search *s, const float *x, int n, int best, const struct tlc_draw *d)
{
    struct counting c = {x, n, (double)x[best], d->inv_temperature, 0, 0, false, false, 0};
    if (d->top_k > 0) {
        c.one = true;
        c.lowest = find_cut(s, &c, (unsigned long long)d->top_k, 0);
        c.one = false;
    }
    if (d->top_p > 0)
        c.lowest = find_cut(s, &c, 0, d->top_p);
    c.weight_min = d->weight_min;
    return walk(s, &c, true, d->random);
}

static __global__ void __launch_bounds__(THREADS, 1)
    rows_draw(int32_t *best, const unsigned long long *parts, const float *logits, int vocab,
              const struct tlc_draw *draws, const struct tlc_report *to, struct tlc_set set)
{
    __shared__ struct search s;
    int i = (int)blockIdx.x, lane = threadIdx.x & 31;
    tlc_go();
    tlc_wait();
    if (i >= *set.n)
        return;
    unsigned long long key = tlc_warp_top(lane < TLC_BEST_PARTS ? parts[i * TLC_BEST_PARTS + lane] : 0);
    if (key >> 32 != 0xffffffffu && draws[i].inv_temperature > 0)
        key = (unsigned)~draw(&s, logits + (int64_t)i * vocab, vocab, (int)~(unsigned)key, &draws[i]);
    if (threadIdx.x == 0) {
        struct tlc_report report = *to;
        tlc_report_best(&report, best, i, key);
    }
}

struct tlc_draw tlc_draw_of(const struct tl_draw_params *p)
{
    struct tlc_draw d = {};
    if (p->temperature <= 0)
        return d;
    d.inv_temperature = 1.0 / (double)p->temperature;
    d.top_k = p->top_k;
    d.top_p = p->top_p < 1 ? tl_draw_share(p->top_p) : 0;
    d.weight_min = tl_draw_weight_min(p->min_p);
    d.random = p->random;
    return d;
}

cudaError_t tlc_rows_draw(const struct tlc_launch *l, int32_t *best, unsigned long long *parts, const float *logits,
                          int vocab, const struct tlc_draw *draws, const struct tlc_report *report,
                          const struct tlc_set *set)
{
    cudaError_t e = tlc_rows_best_parts(l, parts, logits, vocab, set);
    if (e != cudaSuccess)
        return e;
    return tlc_launch(l, rows_draw, dim3((unsigned)set->n_cap), dim3(THREADS), 0, best, parts, logits, vocab, draws,
                      report, *set);
}
