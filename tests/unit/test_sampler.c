/* tests/unit/test_sampler.c - the sampler against a plain sort-everything twin, and every promise of its header. */
#include "mem.h"
#include "rng.h"
#include "sampler.h"
#include "sampler_math.h"
#include "suite.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint64_t g_counter;

static double uniform(void) /* [0, 1) */ { return (double)(tl_rng_u64(12345, 6789, g_counter++) >> 11) * 0x1p-53; }

static void random_logits(float *x, int n, double spread)
{
    for (int i = 0; i < n; i++)
        x[i] = (float)((uniform() + uniform() + uniform() + uniform() - 2) * spread);
}

static struct tl_sampler *sampler_with(const struct tl_sampling *s, int vocab_size)
{
    struct tl_sampler *sp = NULL;
    struct tl_error err = {0};
    enum tl_status st = tl_sampler_create(&sp, s, vocab_size, NULL, 0, &err);
    ck_assert_msg(st == TL_OK, "%s", err.msg);
    return sp;
}

/* Sample from a copy, as the call overwrites its input. */
static struct tl_sampled sample_at(struct tl_sampler *sp, const float *logits, int n, int pos, const uint32_t *mask)
{
    float *copy = malloc((size_t)n * sizeof(*copy));
    struct tl_sampled out = {.token = -1};
    struct tl_error err = {0};
    memcpy(copy, logits, (size_t)n * sizeof(*copy));
    enum tl_status st = tl_sampler_sample(sp, copy, pos, mask, &out, &err);
    ck_assert_msg(st == TL_OK, "%s", err.msg);
    free(copy);
    return out;
}

static int sample_once(const struct tl_sampling *s, const float *logits, int n, int pos)
{
    struct tl_sampler *sp = sampler_with(s, n);
    struct tl_sampled out = sample_at(sp, logits, n, pos, NULL);
    tl_sampler_free(sp);
    return out.token;
}

/* ---- the twin: sort, then cut ---- */

struct cand {
    int id;
    float logit;
    double p;
};

static int by_rank(const void *a, const void *b)
{
    const struct cand *x = a, *y = b;
    return x->logit > y->logit ? -1 : x->logit < y->logit ? 1 : x->id - y->id;
}

/* Probabilities by id after temperature, top_k, top_p and min_p; returns how many survive. */
static int twin(const struct tl_sampling *s, const float *logits, int n, double *p)
{
    struct cand *c = malloc((size_t)n * sizeof(*c));
    double total = 0, cum = 0;
    int kept = s->top_k > 0 && s->top_k < n ? s->top_k : n, i;
    for (i = 0; i < n; i++)
        c[i] = (struct cand){.id = i, .logit = logits[i]};
    qsort(c, (size_t)n, sizeof(*c), by_rank);
    for (i = 0; i < kept; i++) {
        c[i].p = exp(((double)c[i].logit - (double)c[0].logit) / (double)s->temperature);
        total += c[i].p;
    }
    for (i = 0; i < kept && cum < (double)s->top_p * total * (1 - 1e-11); i++)
        cum += c[i].p;
    kept = s->top_p < 1 ? i : kept;
    while (kept > 1 && c[kept - 1].p < (double)s->min_p)
        kept--;
    total = 0;
    memset(p, 0, (size_t)n * sizeof(*p));
    for (i = 0; i < kept; i++)
        total += c[i].p;
    for (i = 0; i < kept; i++)
        p[c[i].id] = c[i].p / total;
    free(c);
    return kept;
}

/* Draw many times: never a token that the twin drops, every likely one, and about as often as it should. */
static void compare_with_twin(const struct tl_sampling *s, const float *logits, int n, int n_draws)
{
    double *p = malloc((size_t)n * sizeof(*p));
    int *hits = calloc((size_t)n, sizeof(*hits));
    struct tl_sampler *sp = sampler_with(s, n);
    twin(s, logits, n, p);
    for (int i = 0; i < n_draws; i++)
        hits[sample_at(sp, logits, n, i, NULL).token]++;
    for (int i = 0; i < n; i++) {
        double want = p[i] * n_draws, sigma = sqrt(want * (1 - p[i]));
        ck_assert_msg(p[i] > 0 || hits[i] == 0, "token %d was dropped, but drawn %d times", i, hits[i]);
        ck_assert_msg(fabs(hits[i] - want) <= 5.5 * sigma + 3, "token %d: %d draws, expected %.1f", i, hits[i], want);
    }
    tl_sampler_free(sp);
    free(hits);
    free(p);
}

/* ---- choosing ---- */

START_TEST(greedy_takes_the_highest_logit_and_ties_go_to_the_lowest_id)
{
    const float logits[] = {-1, 3, 2, 3, -0.0f, 3};
    const float zeros[] = {-0.0f, 0.0f, -0.0f};
    struct tl_sampling s;
    tl_sampling_default(&s);
    s.temperature = 0;
    ck_assert_int_eq(sample_once(&s, logits, 6, 0), 1);
    ck_assert_int_eq(sample_once(&s, zeros, 3, 0), 0);
}
END_TEST

START_TEST(top_k_1_and_a_tiny_top_p_and_min_p_1_equal_greedy)
{
    float logits[1000];
    for (int round = 0; round < 200; round++) {
        struct tl_sampling s;
        tl_sampling_default(&s);
        random_logits(logits, 1000, 5);
        logits[(int)(uniform() * 1000)] = logits[(int)(uniform() * 1000)] = 20; /* a tie at the top */
        s.temperature = 0;
        int greedy = sample_once(&s, logits, 1000, round);
        s.temperature = 1.3f;
        s.top_k = 1;
        ck_assert_int_eq(sample_once(&s, logits, 1000, round), greedy);
        s.top_k = 0;
        s.top_p = FLT_MIN;
        ck_assert_int_eq(sample_once(&s, logits, 1000, round), greedy);
    }
}
END_TEST

START_TEST(draws_follow_the_softmax)
{
    float logits[50];
    for (int round = 0; round < 5; round++) {
        struct tl_sampling s;
        tl_sampling_default(&s);
        random_logits(logits, 50, 3);
        s.temperature = 0.5f + 0.4f * (float)round;
        s.seed = (uint64_t)round;
        compare_with_twin(&s, logits, 50, 20000);
    }
}
END_TEST

START_TEST(top_k_top_p_and_min_p_keep_what_a_full_sort_keeps)
{
    for (int round = 0; round < 150; round++) {
        int n = 1 + (int)(uniform() * 3000);
        float *logits = malloc((size_t)n * sizeof(*logits));
        struct tl_sampling s;
        tl_sampling_default(&s);
        random_logits(logits, n, 1 + 8 * uniform());
        if (round % 3 == 0) /* few different values: ties everywhere */
            for (int i = 0; i < n; i++)
                logits[i] = floorf(logits[i]);
        s.temperature = (float)(0.3 + 2 * uniform());
        s.top_k = uniform() < 0.5 ? 0 : (int)(uniform() * n);
        s.top_p = uniform() < 0.4 ? 1 : (float)(0.02 + 0.97 * uniform());
        s.min_p = uniform() < 0.5 ? 0 : (float)(uniform() * 0.3);
        compare_with_twin(&s, logits, n, 150);
        free(logits);
    }
}
END_TEST

START_TEST(top_k_keeps_exactly_k_of_equal_tokens_the_lowest_ids)
{
    float logits[300];
    int seen[300] = {0};
    struct tl_sampling s;
    tl_sampling_default(&s);
    for (int i = 0; i < 300; i++)
        logits[i] = 1.5f;
    s.top_k = 7;
    for (int pos = 0; pos < 500; pos++)
        seen[sample_once(&s, logits, 300, pos)] = 1;
    for (int i = 0; i < 300; i++)
        ck_assert_int_eq(seen[i], i < 7);
}
END_TEST

START_TEST(top_p_keeps_the_token_that_reaches_the_share_and_no_more)
{
    const float logits[] = {0, 0, 0, 0}; /* a quarter each */
    const struct {
        float top_p;
        int kept;
    } cases[] = {{0.25f, 1}, {0.26f, 2}, {0.5f, 2}, {0.75f, 3}, {0.76f, 4}, {1, 4}};
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        int seen[4] = {0};
        struct tl_sampling s;
        tl_sampling_default(&s);
        s.top_p = cases[c].top_p;
        for (int pos = 0; pos < 200; pos++)
            seen[sample_once(&s, logits, 4, pos)] = 1;
        for (int i = 0; i < 4; i++)
            ck_assert_int_eq(seen[i], i < cases[c].kept);
    }
}
END_TEST

START_TEST(extreme_temperatures_and_logits_are_harmless)
{
    const float logits[] = {-FLT_MAX, FLT_MAX, 0, FLT_MAX / 2};
    const float temperatures[] = {0, FLT_TRUE_MIN, 1e-30f, 1, 1e30f, FLT_MAX};
    for (size_t t = 0; t < 6; t++) {
        struct tl_sampling s;
        tl_sampling_default(&s);
        s.temperature = temperatures[t];
        s.n_top_logprobs = 4;
        struct tl_sampler *sp = sampler_with(&s, 4);
        for (int pos = 0; pos < 50; pos++) {
            struct tl_sampled out = sample_at(sp, logits, 4, pos, NULL);
            ck_assert(out.token >= 0 && out.token < 4);
            ck_assert(t > 3 || out.token == 1);
            ck_assert(isfinite(out.top[0].logprob));
        }
        tl_sampler_free(sp);
    }
}
END_TEST

START_TEST(filters_find_their_cut_among_extreme_logits)
{
    float logits[130];
    for (int i = 0; i < 130; i++)
        logits[i] = i % 3 == 0 ? -FLT_MAX : i % 3 == 1 ? FLT_MAX : -0.0f;
    for (int k = 1; k < 130; k++) {
        struct tl_sampling s;
        tl_sampling_default(&s);
        s.temperature = FLT_MAX;
        s.top_k = k;
        compare_with_twin(&s, logits, 130, 30);
        s.top_k = 0;
        s.top_p = (float)k / 130;
        compare_with_twin(&s, logits, 130, 30);
    }
    for (int i = 0; i < 130; i++)
        logits[i] = -FLT_MAX;
    for (int k = 1; k < 130; k++) {
        struct tl_sampling s;
        tl_sampling_default(&s);
        s.top_k = k;
        compare_with_twin(&s, logits, 130, 10);
    }
}
END_TEST

START_TEST(a_token_depends_on_seed_choice_and_position_alone)
{
    float logits[500];
    struct tl_sampling s;
    int n_diff_seed = 0, n_diff_choice = 0, n_diff_pos = 0;
    tl_sampling_default(&s);
    random_logits(logits, 500, 1);
    struct tl_sampler *a = sampler_with(&s, 500);
    s.seed = 1;
    struct tl_sampler *b = sampler_with(&s, 500);
    s.seed = 0;
    s.choice = 1;
    struct tl_sampler *c = sampler_with(&s, 500);
    for (int pos = 0; pos < 100; pos++) {
        int x = sample_at(a, logits, 500, pos, NULL).token;
        sample_at(a, logits, 500, 99 - pos, NULL); /* other calls in between change nothing */
        ck_assert_int_eq(sample_at(a, logits, 500, pos, NULL).token, x);
        n_diff_seed += x != sample_at(b, logits, 500, pos, NULL).token;
        n_diff_choice += x != sample_at(c, logits, 500, pos, NULL).token;
        n_diff_pos += x != sample_at(a, logits, 500, pos + 1, NULL).token;
    }
    ck_assert(n_diff_seed > 80 && n_diff_choice > 80 && n_diff_pos > 80);
    tl_sampler_free(a);
    tl_sampler_free(b);
    tl_sampler_free(c);
}
END_TEST

/* The same bits on every machine: a change here means that seeded outputs change for users. */
START_TEST(known_seeds_give_known_tokens)
{
    static const int want[12] = {422, 106, 474, 404, 700, 369, 613, 875, 70, 598, 683, 595};
    float logits[997];
    struct tl_sampling s;
    tl_sampling_default(&s);
    for (int i = 0; i < 997; i++)
        logits[i] = (float)(i * 7919 % 997) / 128;
    s.seed = 42;
    s.temperature = 0.8f;
    s.top_k = 400;
    s.top_p = 0.9f;
    s.min_p = 0.01f;
    for (int pos = 0; pos < 12; pos++)
        ck_assert_int_eq(sample_once(&s, logits, 997, pos), want[pos]);
}
END_TEST

/* ---- logits adjusted ---- */

START_TEST(logit_bias_moves_and_bans)
{
    const float logits[] = {1, 2, 3};
    const struct tl_logit_bias bias[] = {{2, -100}, {0, 1.5f}, {2, 100}};
    struct tl_sampling s;
    tl_sampling_default(&s);
    s.temperature = 0;
    s.logit_bias = bias;
    s.n_logit_bias = 3;
    s.n_top_logprobs = 3;
    struct tl_sampler *sp = sampler_with(&s, 3);
    struct tl_sampled out = sample_at(sp, logits, 3, 0, NULL);
    ck_assert_int_eq(out.token, 0);
    ck_assert_int_eq(out.n_top, 2); /* a banned token is no alternative */
    ck_assert_float_eq_tol(out.logprob, (float)-log(1 + exp(-0.5)), 1e-6f);
    tl_sampler_free(sp);
}
END_TEST

START_TEST(penalties_count_prompt_and_output_as_documented)
{
    const int32_t prompt[] = {1, 1, 3};
    float logits[] = {0.5f, 4, -2, -1, 3};
    struct tl_sampling s;
    struct tl_sampler *sp = NULL;
    struct tl_sampled out;
    tl_sampling_default(&s);
    s.temperature = 0;
    s.repetition_penalty = 2;
    s.presence_penalty = 0.25f;
    s.frequency_penalty = 0.5f;
    ck_assert_int_eq(tl_sampler_create(&sp, &s, 5, prompt, 3, NULL), TL_OK);
    for (int i = 0; i < 2; i++)
        ck_assert_int_eq(tl_sampler_accept(sp, 4, NULL), TL_OK);
    ck_assert_int_eq(tl_sampler_accept(sp, 2, NULL), TL_OK);
    ck_assert_int_eq(tl_sampler_sample(sp, logits, 6, NULL, &out, NULL), TL_OK);
    ck_assert_int_eq(out.token, 1);
    ck_assert_float_eq(logits[0], 0.5f);
    ck_assert_float_eq(logits[1], 2); /* prompt only: halved, no presence */
    ck_assert_float_eq(logits[2], -4 - 0.25f - 0.5f);
    ck_assert_float_eq(logits[3], -2);
    ck_assert_float_eq(logits[4], 1.5f - 0.25f - 1);
    tl_sampler_free(sp);
}
END_TEST

START_TEST(penalties_remember_thousands_of_different_tokens)
{
    enum { N = 20000 };
    float *logits = calloc(N, sizeof(*logits));
    struct tl_sampling s;
    struct tl_sampled out;
    tl_sampling_default(&s);
    s.frequency_penalty = 1;
    struct tl_sampler *sp = sampler_with(&s, N);
    for (int i = 0; i < N; i++)
        for (int j = 0; j < i % 3; j++)
            ck_assert_int_eq(tl_sampler_accept(sp, i, NULL), TL_OK);
    ck_assert_int_eq(tl_sampler_sample(sp, logits, 0, NULL, &out, NULL), TL_OK);
    for (int i = 0; i < N; i++)
        ck_assert_float_eq(logits[i], -(float)(i % 3));
    tl_sampler_free(sp);
    free(logits);
}
END_TEST

START_TEST(stop_ids_wait_for_min_tokens_and_are_reported)
{
    const float logits[] = {1, 5, 2};
    const int32_t stops[] = {1};
    struct tl_sampling s;
    tl_sampling_default(&s);
    s.temperature = 0;
    s.stop_ids = stops;
    s.n_stop_ids = 1;
    s.min_tokens = 2;
    struct tl_sampler *sp = sampler_with(&s, 3);
    for (int i = 0; i < 2; i++) {
        struct tl_sampled out = sample_at(sp, logits, 3, i, NULL);
        ck_assert_int_eq(out.token, 2);
        ck_assert(!out.is_stop);
        ck_assert_int_eq(tl_sampler_accept(sp, out.token, NULL), TL_OK);
    }
    ck_assert(sample_at(sp, logits, 3, 2, NULL).is_stop);
    tl_sampler_free(sp);
    s.ignore_eos = true;
    ck_assert_int_eq(sample_once(&s, logits, 3, 100), 2);
}
END_TEST

START_TEST(a_mask_allows_only_its_tokens_and_ignores_bits_past_the_vocabulary)
{
    enum { N = 77 };
    float logits[N];
    uint32_t mask[3] = {0};
    struct tl_sampling s;
    struct tl_error err = {0};
    struct tl_sampled out;
    tl_sampling_default(&s);
    struct tl_sampler *sp = sampler_with(&s, N);
    random_logits(logits, N, 4);
    for (int i = 0; i < N; i += 5)
        mask[i / 32] |= 1u << (i % 32);
    for (int pos = 0; pos < 200; pos++)
        ck_assert_int_eq(sample_at(sp, logits, N, pos, mask).token % 5, 0);
    memset(mask, 0, sizeof(mask));
    mask[2] = 0xffffe000u; /* tokens 77.. do not exist */
    ck_assert_int_eq(tl_sampler_sample(sp, logits, 9, mask, &out, &err), TL_ERR_BAD_PARAM);
    ck_assert_int_eq(err.num[0].value, 9);
    tl_sampler_free(sp);
}
END_TEST

/* ---- log-probabilities ---- */

START_TEST(logprobs_are_the_log_softmax_and_do_not_see_the_temperature)
{
    float logits[5000];
    struct tl_sampling s;
    struct tl_sampled scored;
    double sum = 0;
    tl_sampling_default(&s);
    s.temperature = 0.3f;
    s.n_top_logprobs = 20;
    random_logits(logits, 5000, 10);
    logits[77] = logits[4000] = 19.5f;
    for (int i = 0; i < 5000; i++)
        sum += exp((double)logits[i]);
    struct tl_sampler *sp = sampler_with(&s, 5000);
    struct tl_sampled out = sample_at(sp, logits, 5000, 3, NULL);
    ck_assert_float_eq_tol(out.logprob, (float)((double)logits[out.token] - log(sum)), 1e-5f);
    ck_assert_int_eq(out.n_top, 20);
    ck_assert(out.top[0].token == 77 && out.top[1].token == 4000);
    for (int i = 0; i < 20; i++) {
        ck_assert_float_eq_tol(out.top[i].logprob, (float)((double)logits[out.top[i].token] - log(sum)), 1e-5f);
        ck_assert(i == 0 || out.top[i].logprob <= out.top[i - 1].logprob);
    }
    for (int i = 0, n_better = 0; i < 5000; i++) {
        n_better += logits[i] > logits[out.top[19].token];
        ck_assert_int_lt(n_better, 20);
    }
    ck_assert_int_eq(tl_logprob_of(logits, 5000, out.token, 20, &scored, NULL), TL_OK);
    ck_assert(scored.logprob == out.logprob && scored.n_top == 20);
    ck_assert_int_eq(memcmp(scored.top, out.top, sizeof(out.top)), 0);
    tl_sampler_free(sp);
}
END_TEST

START_TEST(own_exp_and_log_agree_with_libm)
{
    for (double x = -699; x <= 0; x += 0.0137)
        ck_assert_double_eq_tol(tl_exp_neg(x) / exp(x), 1, 1e-13);
    for (double x = 1e-6; x < 1e7; x *= 1.0037)
        ck_assert_double_eq_tol(tl_log_pos(x), log(x), 1e-13 * (1 + fabs(log(x))));
}
END_TEST

/* ---- errors ---- */

START_TEST(a_logit_that_is_not_finite_is_an_error_with_its_position)
{
    const float bad[] = {NAN, INFINITY, -INFINITY};
    float logits[200];
    for (int n = 1; n <= 200; n += 33)
        for (int at = 0; at < n; at += 7)
            for (int b = 0; b < 3; b++) {
                struct tl_sampling s;
                struct tl_error err = {0};
                struct tl_sampled out = {.token = -7};
                tl_sampling_default(&s);
                struct tl_sampler *sp = sampler_with(&s, n);
                random_logits(logits, n, 3);
                logits[at] = bad[b];
                ck_assert_int_eq(tl_logprob_of(logits, n, 0, 0, &out, &err), TL_ERR_NON_FINITE);
                ck_assert_int_eq(tl_sampler_sample(sp, logits, 31, NULL, &out, &err), TL_ERR_NON_FINITE);
                ck_assert(out.token == -7 && err.num[0].value == 31 && err.num[1].value == at);
                ck_assert_ptr_nonnull(strstr(err.msg, "position 31"));
                tl_sampler_free(sp);
            }
}
END_TEST

START_TEST(every_field_is_checked_and_named)
{
    const struct tl_logit_bias unknown = {10, 1}, infinite = {1, INFINITY};
    const int32_t stop = -1;
    static struct tl_logit_bias many[TL_LOGIT_BIAS_MAX + 1];
    struct tl_sampling good, cases[40];
    const char *field[40];
    struct tl_error err = {0};
    int n = 0;
    tl_sampling_default(&good);
    ck_assert_int_eq(tl_sampling_check(&good, 10, NULL), TL_OK);
#define BAD(f, set) (cases[n] = good, cases[n].set, field[n++] = f)
    BAD("temperature", temperature = -0.1f);
    BAD("temperature", temperature = NAN);
    BAD("temperature", temperature = INFINITY);
    BAD("top_k", top_k = -1);
    BAD("top_p", top_p = 0);
    BAD("top_p", top_p = 1.01f);
    BAD("top_p", top_p = NAN);
    BAD("min_p", min_p = -0.1f);
    BAD("min_p", min_p = 2);
    BAD("min_p", min_p = NAN);
    BAD("repetition_penalty", repetition_penalty = 0);
    BAD("repetition_penalty", repetition_penalty = INFINITY);
    BAD("repetition_penalty", repetition_penalty = NAN);
    BAD("presence_penalty", presence_penalty = 2.1f);
    BAD("presence_penalty", presence_penalty = NAN);
    BAD("frequency_penalty", frequency_penalty = -2.1f);
    BAD("min_tokens", min_tokens = -1);
    BAD("top_logprobs", n_top_logprobs = 21);
    BAD("top_logprobs", n_top_logprobs = -2);
    BAD("logit_bias", logit_bias = (cases[n].n_logit_bias = 1, &unknown));
    BAD("logit_bias", logit_bias = (cases[n].n_logit_bias = 1, &infinite));
    BAD("logit_bias", logit_bias = (cases[n].n_logit_bias = TL_LOGIT_BIAS_MAX + 1, many));
    BAD("stop_token_ids", stop_ids = (cases[n].n_stop_ids = 1, &stop));
    BAD("stop_token_ids", n_stop_ids = TL_SAMPLER_STOP_IDS_MAX + 1);
#undef BAD
    for (int i = 0; i < n; i++) {
        struct tl_sampler *sp = (void *)&err;
        ck_assert_int_ne(tl_sampler_create(&sp, &cases[i], 10, NULL, 0, &err), TL_OK);
        ck_assert_str_eq(err.param, field[i]);
        ck_assert_ptr_null(sp);
    }
    ck_assert_int_ne(tl_sampling_check(&good, 0, NULL), TL_OK);
    ck_assert_int_ne(tl_sampling_check(&good, TL_SAMPLER_VOCAB_MAX + 1, NULL), TL_OK);
}
END_TEST

START_TEST(tokens_outside_the_vocabulary_are_refused_everywhere)
{
    const int32_t prompt[] = {0, 10};
    struct tl_sampling s;
    struct tl_sampler *sp = NULL;
    struct tl_sampled out;
    const float logits[10] = {0};
    tl_sampling_default(&s);
    s.repetition_penalty = 1.1f;
    ck_assert_int_eq(tl_sampler_create(&sp, &s, 10, prompt, 2, NULL), TL_ERR_TOKEN_OUT_OF_VOCAB);
    sp = sampler_with(&s, 10);
    ck_assert_int_eq(tl_sampler_accept(sp, 10, NULL), TL_ERR_TOKEN_OUT_OF_VOCAB);
    ck_assert_int_eq(tl_sampler_accept(sp, -1, NULL), TL_ERR_TOKEN_OUT_OF_VOCAB);
    ck_assert_int_eq(tl_logprob_of(logits, 10, 10, 0, &out, NULL), TL_ERR_TOKEN_OUT_OF_VOCAB);
    tl_sampler_free(sp);
}
END_TEST

START_TEST(a_large_vocabulary_and_every_filter_work_together)
{
    enum { N = 200003 };
    float *logits = malloc(N * sizeof(*logits));
    struct tl_sampling s;
    tl_sampling_default(&s);
    random_logits(logits, N, 6);
    s.top_k = 1000;
    s.top_p = 0.5f;
    s.min_p = 0.001f;
    compare_with_twin(&s, logits, N, 15);
    s.top_k = 0;
    s.top_p = 0.99f;
    s.min_p = 0;
    compare_with_twin(&s, logits, N, 15);
    free(logits);
}
END_TEST

#ifdef TL_TEST_HOOKS
START_TEST(a_failed_allocation_leaves_nothing_behind)
{
    const struct tl_logit_bias bias[] = {{1, 2}};
    const int32_t stops[] = {3};
    int32_t prompt[400];
    const int64_t live = tl_mem_live();
    struct tl_sampling s;
    bool done = false;
    tl_sampling_default(&s);
    s.logit_bias = bias;
    s.n_logit_bias = 1;
    s.stop_ids = stops;
    s.n_stop_ids = 1;
    s.repetition_penalty = 1.2f;
    for (int i = 0; i < 400; i++)
        prompt[i] = i;
    for (int n = 1; !done; n++) {
        struct tl_sampler *sp = (void *)&s;
        struct tl_error err = {0};
        enum tl_status st;
        int n_accepted = 0;
        tl_mem_fail_at(n);
        st = tl_sampler_create(&sp, &s, 2000, prompt, 400, &err);
        if (st != TL_OK)
            ck_assert_ptr_null(sp);
        for (int i = 400; st == TL_OK && i < 2000; i++, n_accepted++)
            st = tl_sampler_accept(sp, i, &err);
        done = st == TL_OK;
        tl_mem_fail_at(0);
        if (!done)
            ck_assert_int_eq(st, TL_ERR_NO_HOST_MEMORY);
        if (sp && !done) /* the sampler is as it was: the same token can be accepted now */
            ck_assert_int_eq(tl_sampler_accept(sp, 400 + n_accepted, &err), TL_OK);
        tl_sampler_free(sp);
        ck_assert_int_eq(tl_mem_live(), live);
        ck_assert_int_lt(n, 100);
    }
}
END_TEST
#endif

int main(void)
{
    const TTest *const cases[] = {
        greedy_takes_the_highest_logit_and_ties_go_to_the_lowest_id,
        top_k_1_and_a_tiny_top_p_and_min_p_1_equal_greedy,
        draws_follow_the_softmax,
        top_k_top_p_and_min_p_keep_what_a_full_sort_keeps,
        top_k_keeps_exactly_k_of_equal_tokens_the_lowest_ids,
        top_p_keeps_the_token_that_reaches_the_share_and_no_more,
        extreme_temperatures_and_logits_are_harmless,
        filters_find_their_cut_among_extreme_logits,
        a_token_depends_on_seed_choice_and_position_alone,
        known_seeds_give_known_tokens,
        logit_bias_moves_and_bans,
        penalties_count_prompt_and_output_as_documented,
        penalties_remember_thousands_of_different_tokens,
        stop_ids_wait_for_min_tokens_and_are_reported,
        a_mask_allows_only_its_tokens_and_ignores_bits_past_the_vocabulary,
        logprobs_are_the_log_softmax_and_do_not_see_the_temperature,
        own_exp_and_log_agree_with_libm,
        a_logit_that_is_not_finite_is_an_error_with_its_position,
        every_field_is_checked_and_named,
        tokens_outside_the_vocabulary_are_refused_everywhere,
        a_large_vocabulary_and_every_filter_work_together,
#ifdef TL_TEST_HOOKS
        a_failed_allocation_leaves_nothing_behind,
#endif
    };
    return suite_main("sampler", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL, 120);
}
