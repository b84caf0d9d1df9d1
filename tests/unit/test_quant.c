/* Number formats: exact conversions, quantisers within their bounds, and the INT4 search better than plain rounding. */
#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gram.h"
#include "mem.h"
#include "quant.h"
#include "rng.h"

/* About normal numbers of deviation s: the sum of 12 uniforms. */
static void fill(float *x, int64_t n, float s, uint64_t seed)
{
    for (int64_t i = 0; i < n; i++) {
        float sum = 0;
        for (int k = 0; k < 6; k++) {
            uint64_t z = tl_rng_u64(seed, (uint64_t)i, (uint64_t)k);
            sum += (float)(uint32_t)z / 4294967296.0f + (float)(uint32_t)(z >> 32) / 4294967296.0f;
        }
        x[i] = (sum - 6) * s;
    }
}

START_TEST(bf16_and_f16_convert_exactly_and_bf16_rounds_to_even)
{
    ck_assert(tl_bf16_to_f32(0x3F80) == 1 && tl_bf16_to_f32(0xC000) == -2);
    ck_assert_uint_eq(tl_f32_to_bf16(1.0f), 0x3F80);
    ck_assert_uint_eq(tl_f32_to_bf16(1.00390625f), 0x3F80); /* half way: to even, down */
    ck_assert_uint_eq(tl_f32_to_bf16(1.01171875f), 0x3F82); /* half way: to even, up */
    ck_assert_uint_eq(tl_f32_to_bf16(1.00390637f), 0x3F81);
    for (uint32_t v = 0; v < 65536; v++) {
        float f = tl_bf16_to_f32((uint16_t)v);
        if (isfinite(f))
            ck_assert_uint_eq(tl_f32_to_bf16(f), v);
    }
    ck_assert(tl_f16_to_f32(0x3C00) == 1 && tl_f16_to_f32(0xC000) == -2 && tl_f16_to_f32(0x7BFF) == 65504);
    ck_assert(tl_f16_to_f32(0x0001) == 0x1p-24f && tl_f16_to_f32(0x8001) == -0x1p-24f &&
              tl_f16_to_f32(0x0400) == 0x1p-14f);
    ck_assert(isinf(tl_f16_to_f32(0x7C00)) && isnan(tl_f16_to_f32(0x7E00)) && signbit(tl_f16_to_f32(0x8000)));
    for (uint32_t v = 0; v < 0x7C00; v++) /* value by definition */
        ck_assert(tl_f16_to_f32((uint16_t)v) ==
                  (v < 1024 ? ldexpf((float)v, -24) : ldexpf((float)(1024 + v % 1024), (int)(v / 1024) - 25)));
}
END_TEST

START_TEST(int8_errs_by_half_a_step_at_most_and_uses_the_whole_range)
{
    enum { N = 77 }; /* not a multiple of a vector */
    float x[N], back[N], scale, most = 0;
    int8_t q[N];
    struct tl_quant_error e = {0};
    fill(x, N, 0.03f, 1);
    tl_quant_int8_row(x, N, q, &scale, &e);
    tl_unpack_int8_row(q, scale, N, back);
    double sum = 0;
    int top = 0;
    for (int i = 0; i < N; i++) {
        float d = fabsf(x[i] - back[i]);
        ck_assert_msg(d <= 0.5001f * scale, "value %d errs by %g steps", i, (double)(d / scale));
        most = d > most ? d : most;
        sum += (double)d * (double)d;
        top = abs(q[i]) > top ? abs(q[i]) : top;
    }
    ck_assert_int_eq(top, 127);
    ck_assert(e.max_error == most);
    ck_assert_double_eq_tol(e.sum_sq_error, sum, 1e-5 * sum);
}
END_TEST

START_TEST(zero_rows_and_tiny_rows_stay_harmless)
{
    float zero[64] = {0}, tiny[64], back[64], scale;
    int8_t q[64];
    uint8_t q4[32], g[1];
    for (int i = 0; i < 64; i++)
        tiny[i] = i % 2 ? 1e-42f : -1e-40f;
    const float *rows[] = {zero, tiny};
    for (int r = 0; r < 2; r++) {
        tl_quant_int8_row(rows[r], 64, q, &scale, NULL);
        ck_assert(scale >= 0 && isfinite(scale));
        tl_quant_int4_row(rows[r], NULL, 64, q4, g, &scale, NULL);
        ck_assert(scale >= 0 && isfinite(scale));
        ck_assert((g[0] & 15) >= 1 && g[0] >> 4 >= 1);
        tl_unpack_int4_row(q4, g, scale, 64, back);
        for (int i = 0; i < 64; i++)
            ck_assert(fabsf(back[i]) <= 2e-40f);
    }
}
END_TEST

/* The plain way: S = absmax / 105, the covering group scale, no search. */
static double plain_int4_error(const float *x, int n)
{
    float peak = 0, s;
    double sum = 0;
    for (int i = 0; i < n; i++)
        peak = fmaxf(peak, fabsf(x[i]));
    s = peak / 105;
    for (int i = 0; i < n; i += 32) {
        float m = 0;
        for (int j = 0; j < 32; j++)
            m = fmaxf(m, fabsf(x[i + j]));
        float g = fminf(15, fmaxf(1, ceilf(m / (7 * s))));
        for (int j = 0; j < 32; j++) {
            float q = fminf(7, fmaxf(-7, rintf(x[i + j] / (s * g))));
            sum += (double)(x[i + j] - q * s * g) * (double)(x[i + j] - q * s * g);
        }
    }
    return sum;
}

START_TEST(the_int4_search_beats_plain_rounding_and_stays_in_range)
{
    enum { N = 2048, ROWS = 16 };
    static float x[N], back[N];
    uint8_t q4[N / 2], g[N / 64];
    struct tl_quant_error e = {0};
    double plain = 0;
    for (int r = 0; r < ROWS; r++) {
        float scale;
        fill(x, N, 0.02f, (uint64_t)r);
        x[r * 100] *= 4; /* outliers, as real weights have them */
        plain += plain_int4_error(x, N);
        double before = e.sum_sq_error, sum = 0;
        tl_quant_int4_row(x, NULL, N, q4, g, &scale, &e);
        tl_unpack_int4_row(q4, g, scale, N, back);
        for (int i = 0; i < N; i++) {
            int nibble = q4[i / 2] >> (i % 2 * 4) & 15;
            ck_assert_int_ne(nibble, 8);
            ck_assert_int_ge(g[i / 64] >> (i / 32 % 2 * 4) & 15, 1);
            sum += (double)(x[i] - back[i]) * (double)(x[i] - back[i]);
        }
        ck_assert_double_eq_tol(e.sum_sq_error - before, sum, 1e-4 * sum);
    }
    ck_assert_msg(e.sum_sq_error < 0.92 * plain, "search %g, plain %g", e.sum_sq_error, plain);
    /* Normal weights in groups of 32 lose about 9 % of their deviation. */
    ck_assert(sqrt(e.sum_sq_error / e.sum_sq) < 0.1);
}
END_TEST

START_TEST(int4_errs_less_where_errors_count_more)
{
    enum { N = 512, ROWS = 16 };
    static float x[N], weight[N], back[N];
    uint8_t q4[N / 2], g[N / 64];
    double sums[2] = {0};
    for (int i = 0; i < N; i++)
        weight[i] = i % 4 ? 0.1f : 10;
    for (int r = 0; r < ROWS; r++) {
        fill(x, N, 0.02f, (uint64_t)r);
        for (int weighted = 0; weighted < 2; weighted++) {
            float scale;
            tl_quant_int4_row(x, weighted ? weight : NULL, N, q4, g, &scale, NULL);
            tl_unpack_int4_row(q4, g, scale, N, back);
            for (int i = 0; i < N; i++)
                sums[weighted] += (double)weight[i] * (double)(x[i] - back[i]) * (double)(x[i] - back[i]);
        }
    }
    ck_assert_msg(sums[1] < 0.9 * sums[0], "weighted %g, plain %g", sums[1], sums[0]);
}
END_TEST

/* Rows whose values go together, as activations do: a few directions and some noise. */
static void fill_rows(float *rows, int n_rows, int n, float noise)
{
    enum { DIRECTIONS = 24 };
    static float direction[DIRECTIONS][1024], by[DIRECTIONS];
    for (int d = 0; d < DIRECTIONS; d++)
        fill(direction[d], n, 1, (uint64_t)(100 + d));
    for (int r = 0; r < n_rows; r++) {
        fill(rows + r * n, n, noise, (uint64_t)(1000 + r));
        fill(by, DIRECTIONS, 1, (uint64_t)(5000 + r));
        for (int d = 0; d < DIRECTIONS; d++)
            for (int i = 0; i < n; i++)
                rows[r * n + i] += by[d] * direction[d][i];
    }
}

/* What the products with the rows lose, over what they are. */
static double lost_products(const float *rows, int n_rows, int n, const float *w, const float *back)
{
    double lost = 0, all = 0;
    for (int r = 0; r < n_rows; r++) {
        double a = 0, b = 0;
        for (int i = 0; i < n; i++) {
            a += (double)rows[r * n + i] * (double)w[i];
            b += (double)rows[r * n + i] * (double)back[i];
        }
        all += a * a;
        lost += (a - b) * (a - b);
    }
    return lost / all;
}

/* n inputs, scaled before they are used; how much less of the products is lost than by plain rounding. */
static double gain_of_compensation(int n, int width_max, const float *scale)
{
    enum { ROWS = 300 };
    static float rows[ROWS * 1024], w[1024], left[1024], back[1024];
    uint8_t q4[512], g[16];
    struct tl_gram *gram;
    struct tl_compensation *c;
    struct tl_quant_error e = {0};
    struct tl_error err = {0};
    double plain = 0, compensated = 0, lost = 0;
    fill_rows(rows, ROWS, n, 0.3f);
    ck_assert_int_eq(tl_gram_create(&gram, n, tl_gram_width(n, width_max), &err), TL_OK);
    for (int r = 0; r < ROWS; r++)
        tl_gram_add(gram, rows + r * n);
    ck_assert_msg(tl_gram_compensation(gram, scale, &c, &err) == TL_OK, "%s", err.msg);
    for (int r = 0; scale && r < ROWS; r++)
        for (int i = 0; i < n; i++)
            rows[r * n + i] /= scale[i];
    for (int k = 0; k < 8; k++) {
        float s;
        fill(w, n, 0.02f, (uint64_t)k);
        tl_quant_int4_row(w, c->importance, n, q4, g, &s, NULL);
        tl_unpack_int4_row(q4, g, s, n, back);
        plain += lost_products(rows, ROWS, n, w, back);
        tl_quant_int4_row_compensated(w, c, n, left, q4, g, &s, &e);
        tl_unpack_int4_row(q4, g, s, n, back);
        compensated += lost_products(rows, ROWS, n, w, back);
        for (int i = 0; i < n; i++) {
            ck_assert_int_ne(q4[i / 2] >> (i % 2 * 4) & 15, 8);
            ck_assert_int_ge(g[i / 64] >> (i / 32 % 2 * 4) & 15, 1);
            lost += (double)(w[i] - back[i]) * (double)(w[i] - back[i]);
        }
    }
    ck_assert_double_eq_tol(e.sum_sq_error, lost, 1e-4 * lost); /* counted against the weights as they were */
    tl_compensation_free(c);
    tl_gram_free(gram);
    return plain / compensated;
}

START_TEST(int4_makes_errors_good_by_the_weights_after_them)
{
    float scale[1024];
    for (int i = 0; i < 1024; i++)
        scale[i] = i % 5 ? 1.5f : 0.25f;
    ck_assert_int_eq(tl_gram_width(576, 512), 288);
    ck_assert_int_eq(tl_gram_width(5632, 512), 512);
    ck_assert_int_eq(tl_gram_width(64, 512), 64);
    static const int shapes[][2] = {{512, 512}, {512, 128}, {96, 512}, {160, 64}}; /* the last has a short block */
    for (int i = 0; i < 4; i++)
        for (int scaled = 0; scaled < 2; scaled++) {
            double gain = gain_of_compensation(shapes[i][0], shapes[i][1], scaled ? scale : NULL);
            ck_assert_msg(gain > 1.5, "%d inputs in blocks of %d: %.2f times better", shapes[i][0], shapes[i][1], gain);
        }
}
END_TEST

START_TEST(compensation_stands_dead_equal_and_wild_inputs)
{
    enum { N = 64 };
    float x[N], w[N], left[N], back[N], s;
    uint8_t q4[N / 2], g[1];
    struct tl_gram *gram;
    struct tl_compensation *c;
    struct tl_error err = {0};
    fill(w, N, 0.02f, 1);
    for (int kind = 0; kind < 4;
         kind++) { /* no rows; one row of zeros; all inputs the same; one far above all others */
        ck_assert_int_eq(tl_gram_create(&gram, N, N, &err), TL_OK);
        for (int r = 0; kind && r < 40; r++) {
            for (int i = 0; i < N; i++)
                x[i] = kind == 1 ? 0 : kind == 2 ? (float)(r + 1) : i == 7 ? 1e9f : 1e-9f * (float)(r % 7);
            tl_gram_add(gram, x);
        }
        ck_assert_msg(tl_gram_compensation(gram, NULL, &c, &err) == TL_OK, "%s", err.msg);
        tl_quant_int4_row_compensated(w, c, N, left, q4, g, &s, NULL);
        tl_unpack_int4_row(q4, g, s, N, back);
        for (int i = 0; i < N; i++)
            ck_assert(isfinite(back[i]) && fabsf(back[i]) < 1);
        tl_compensation_free(c);
        tl_gram_free(gram);
    }
    ck_assert_int_eq(tl_gram_create(&gram, N, N, &err), TL_OK);
    x[3] = INFINITY;
    tl_gram_add(gram, x);
    ck_assert_int_eq(tl_gram_compensation(gram, NULL, &c, &err), TL_ERR_BAD_FILE);
    tl_gram_free(gram);
}
END_TEST

START_TEST(int4_represents_its_own_values_exactly)
{
    enum { N = 128 };
    float x[N], back[N], scale;
    uint8_t q4[N / 2], g[2];
    static const int scales[4] = {15, 3, 8, 1};
    for (int i = 0; i < N; i++)
        x[i] = 0.001f * (float)(scales[i / 32] * (i % 15 - 7));
    tl_quant_int4_row(x, NULL, N, q4, g, &scale, NULL);
    tl_unpack_int4_row(q4, g, scale, N, back);
    for (int i = 0; i < N; i++)
        ck_assert(fabsf(x[i] - back[i]) < 1e-6f);
    ck_assert_uint_eq(g[0], 0x3F);
    ck_assert_uint_eq(g[1], 0x18);
    ck_assert_int_eq(q4[0] & 15, 9);  /* -7, even input in the low nibble */
    ck_assert_int_eq(q4[0] >> 4, 10); /* -6 */
}
END_TEST

START_TEST(an_odd_number_of_groups_leaves_the_last_nibble_empty)
{
    float x[96], scale;
    uint8_t q4[48], g[2] = {0xFF, 0xFF};
    fill(x, 96, 1, 3);
    ck_assert_uint_eq(tl_q4_gscale_bytes(96), 2);
    ck_assert_uint_eq(tl_q4_gscale_bytes(64), 1);
    tl_quant_int4_row(x, NULL, 96, q4, g, &scale, NULL);
    ck_assert_int_eq(g[1] >> 4, 0);
    ck_assert_int_ge(g[1] & 15, 1);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("quant");
    TCase *tc = tcase_create("quant");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, bf16_and_f16_convert_exactly_and_bf16_rounds_to_even);
    tcase_add_test(tc, int8_errs_by_half_a_step_at_most_and_uses_the_whole_range);
    tcase_add_test(tc, zero_rows_and_tiny_rows_stay_harmless);
    tcase_add_test(tc, the_int4_search_beats_plain_rounding_and_stays_in_range);
    tcase_add_test(tc, int4_errs_less_where_errors_count_more);
    tcase_add_test(tc, int4_makes_errors_good_by_the_weights_after_them);
    tcase_add_test(tc, compensation_stands_dead_equal_and_wild_inputs);
    tcase_add_test(tc, int4_represents_its_own_values_exactly);
    tcase_add_test(tc, an_odd_number_of_groups_leaves_the_last_nibble_empty);
    suite_add_tcase(suite, tc);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int n_failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return n_failed ? 1 : 0;
}
