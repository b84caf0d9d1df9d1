/* tests/cuda/check_draw.c - tokens drawn by a device against tl_draw() on the logits that it gives out.
 *
 * Rows of a net whose head is all there is to it: vocabularies of 61 to 152,064, logits from all alike to far apart, with ties and
 * with a NaN, each row with its own temperature, top_k, top_p, min_p and random number; 1 to 64 rows, many shapes often enough to
 * be run as a graph. Then times, beside those of choosing the best. Ends with "check_draw: N checks, M failed". */
#include "random_net.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define D    64
#define ROWS 64

struct lot {
    struct net n;
    struct tl_step step;
    struct tl_row rows[ROWS];
    int32_t places[ROWS];
    struct tl_row_set set;
    struct tl_draw_params draws[ROWS];
    float *in, *logits; /* pinned: [ROWS][D], [ROWS][vocab] */
    int32_t *tokens;
    int vocab;
};

static int checks, failed;

static void run(struct lot *l, int n, enum tl_op_kind choice)
{
    struct tl_op ops[3] = {{.kind = TL_OP_LOAD_ROWS, .host_in = l->in}, {.kind = TL_OP_HEAD}, {.kind = choice}};
    struct tl_error err;
    l->set = (struct tl_row_set){l->places, n};
    l->step.n_rows = n;
    l->step.ops = ops;
    l->step.n_ops = choice == TL_OP_HEAD ? 2 : 3;
    ops[1].host_out = choice == TL_OP_HEAD ? l->logits : NULL;
    ops[2].host_tokens = l->tokens;
    ops[2].draws = l->draws;
    must(l->n.be->ops->run(l->n.be, &l->step, &err), &err, "run");
    must(l->n.be->ops->sync(l->n.be, &err), &err, "sync");
}

/* Rows as different as rows can be. */
static void fill(struct lot *l, struct rng *r)
{
    static const float spread[] = {0, 1e-6f, 0.1f, 1, 4, 30, 1e30f}, temperature[] = {1, 0.7f, 0.1f, 2, 100, 1e-3f, 0};
    static const float top_p[] = {1, 1, 0.95f, 0.9f, 0.5f, 0.01f, 0.9999999f, 1e-7f}, min_p[] = {0, 0, 0.05f, 0.5f, 1};
    static const int top_k[] = {0, 0, 0, 1, 2, 5, 40, 1000, 3000, 1 << 20};
    for (int i = 0; i < ROWS; i++) {
        float s = spread[rng_below(r, 7)];
        for (int j = 0; j < D; j++)
            l->in[i * D + j] = s * rng_uniform(r) + (rng_below(r, 400) == 0 ? NAN : 0);
        l->draws[i] =
            (struct tl_draw_params){temperature[rng_below(r, 7)], top_k[rng_below(r, 10)], top_p[rng_below(r, 8)],
                                    min_p[rng_below(r, 5)], rng_below(r, 8) ? rng_next(r) : ~(uint64_t)0};
    }
}

static int32_t expected(const float *x, int n, const struct tl_draw_params *p)
{
    int best = 0;
    for (int i = 0; i < n; i++) {
        if (!isfinite(x[i]))
            return -1;
        best = x[i] > x[best] ? i : best;
    }
    return p->temperature > 0 ? tl_draw(x, n, best, p) : best;
}

static void compare(struct lot *l, int n)
{
    run(l, n, TL_OP_HEAD);
    for (int again = 0; again < 2; again++) {
        memset(l->tokens, 0x55, ROWS * sizeof(*l->tokens));
        run(l, n, TL_OP_DRAW);
        for (int i = 0; i < n; i++) {
            const struct tl_draw_params *p = &l->draws[i];
            int32_t want = expected(l->logits + (int64_t)i * l->vocab, l->vocab, p);
            checks++;
            if (l->tokens[i] == want)
                continue;
            if (failed++ < 20)
                printf("FAILED vocabulary %d, row %d of %d, temperature %g, top_k %d, top_p %g, min_p %g: %d, tl_draw "
                       "%d\n",
                       l->vocab, i, n, (double)p->temperature, p->top_k, (double)p->top_p, (double)p->min_p,
                       l->tokens[i], want);
        }
    }
}

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static double time_of(struct lot *l, int n, enum tl_op_kind choice)
{
    double best = INFINITY;
    for (int i = 0; i < 60; i++) {
        double t = now_us();
        run(l, n, choice);
        t = now_us() - t;
        best = t < best ? t : best;
    }
    return best;
}

static void times(struct lot *l, struct rng *r)
{
    static const struct tl_draw_params ways[] = {{1, 0, 1, 0, 0}, {1, 0, 0.95f, 0, 0}, {0.8f, 40, 0.95f, 0, 0}};
    for (int n = 1; n <= ROWS; n *= ROWS) {
        double best = time_of(l, n, TL_OP_BEST);
        for (int i = 0; i < n * D; i++)
            l->in[i] = 2 * rng_uniform(r);
        printf("vocabulary %6d, %2d rows: best %.1f us", l->vocab, n, best);
        for (int w = 0; w < 3; w++) {
            for (int i = 0; i < n; i++) {
                l->draws[i] = ways[w];
                l->draws[i].random = rng_next(r);
            }
            printf(w == 0   ? ", drawn + %.1f us"
                   : w == 1 ? ", top_p + %.1f us"
                            : ", top_k, top_p + %.1f us\n",
                   time_of(l, n, TL_OP_DRAW) - best);
        }
    }
}

static void lot_of(int vocab, int rounds)
{
    struct tl_arch_spec spec = {.d_model = D,
                                .n_heads = 1,
                                .n_kv_heads = 1,
                                .d_head = 64,
                                .d_ff = 64,
                                .vocab_size = vocab,
                                .n_core = 1,
                                .loops_default = 1,
                                .loops_trained = 1,
                                .loops_max = 2,
                                .max_positions = NET_POSITIONS,
                                .norm_eps = 1e-5f,
                                .embed_scale = 1};
    struct lot *l = calloc(1, sizeof(*l));
    struct rng r = {(uint64_t)vocab};
    if (!l)
        exit(1);
    l->vocab = vocab;
    net_open(&l->n, "cuda", &spec, TL_W_F32, ROWS, 1);
    l->in = l->n.be->ops->host_alloc(l->n.be, ROWS * D * sizeof(float));
    l->logits = l->n.be->ops->host_alloc(l->n.be, (size_t)ROWS * (size_t)vocab * sizeof(float));
    l->tokens = l->n.be->ops->host_alloc(l->n.be, ROWS * sizeof(int32_t));
    if (!l->in || !l->logits || !l->tokens)
        exit(1);
    for (int i = 0; i < ROWS; i++) {
        l->places[i] = i;
        l->rows[i] = (struct tl_row){-1, i, 0};
    }
    l->step = (struct tl_step){.net = &l->n.net, .kv = l->n.kv, .rows = l->rows, .sets = &l->set, .n_sets = 1};
    for (int round = 0; round < rounds; round++) {
        fill(l, &r);
        compare(l, round % 4 == 0 ? ROWS : round % 4 == 1 ? 1 : 1 + rng_below(&r, ROWS));
    }
    times(l, &r);
    l->n.be->ops->host_free(l->n.be, l->in);
    l->n.be->ops->host_free(l->n.be, l->logits);
    l->n.be->ops->host_free(l->n.be, l->tokens);
    net_close(&l->n);
    free(l);
}

int main(void)
{
    lot_of(61, 60);
    lot_of(2000, 40);
    lot_of(49152, 12);
    lot_of(152064, 6);
    printf("check_draw: %d checks, %d failed\n", checks, failed);
    return failed || !checks;
}
