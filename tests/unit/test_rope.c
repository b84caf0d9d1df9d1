/* Rope tables, the double-precision functions under them, the counter-based generator and random start states. */
#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "arch_bind.h"
#include "dmath.h"
#include "rng.h"
#include "rope.h"

START_TEST(own_functions_agree_with_libm)
{
    double worst_trig = 0, worst_exp = 0, worst_log = 0;
    for (int i = 0; i < 200000; i++) {
        uint64_t z = tl_rng_u64(1, (uint64_t)i, 0);
        double u = (double)(z >> 11) / 9007199254740992.0, s, c;
        double x = i % 2 ? u * 16777216.0 : (u - 0.5) * 20;
        tl_dsincos(x, &s, &c);
        worst_trig = fmax(worst_trig, fmax(fabs(s - sin(x)), fabs(c - cos(x))));
        x = (u - 0.5) * 200;
        worst_exp = fmax(worst_exp, fabs(tl_dexp2(x) / exp2(x) - 1));
        x = exp2(x) * (1 + u);
        worst_log = fmax(worst_log, fabs(tl_dlog2(x) - log2(x)));
    }
    ck_assert_msg(worst_trig < 1e-15, "sine and cosine err by %g", worst_trig);
    ck_assert_msg(worst_exp < 1e-13, "exp2 errs by %g", worst_exp);
    ck_assert_msg(worst_log < 1e-13, "log2 errs by %g", worst_log);
}
END_TEST

static const struct tl_arch_spec plain = {.d_head = 128, .rope = TL_ROPE_HALF, .rope_base = 1e6f};

START_TEST(frequencies_and_angles_follow_the_formula)
{
    float f[64], row[2 * 128];
    tl_rope_inv_freq(&plain, f);
    for (int j = 0; j < 64; j++)
        ck_assert(f[j] == (float)pow(1e6, -2.0 * j / 128));
    ck_assert(f[0] == 1);
    tl_rope_fill(&plain, f, 65534, 2, row);
    for (int j = 0; j < 64; j++) {
        double angle = (double)(65535.0f * f[j]);
        ck_assert_float_eq_tol(row[128 + j], (float)cos(angle), 1e-7f);
        ck_assert_float_eq_tol(row[128 + 64 + j], (float)sin(angle), 1e-7f);
    }
}
END_TEST

START_TEST(a_table_made_in_pieces_is_the_same_table)
{
    float f[64], *all = malloc(300 * 128 * sizeof(float)), *piece = malloc(300 * 128 * sizeof(float));
    tl_rope_inv_freq(&plain, f);
    tl_rope_fill(&plain, f, 0, 300, all);
    for (int pos = 0; pos < 300; pos += 7)
        tl_rope_fill(&plain, f, pos, 300 - pos < 7 ? 300 - pos : 7, piece + pos * 128);
    ck_assert_mem_eq(all, piece, 300 * 128 * sizeof(float));
    for (int j = 0; j < 64; j++)
        ck_assert(all[j] == 1 && all[64 + j] == 0);
    free(all);
    free(piece);
}
END_TEST

START_TEST(llama3_scaling_keeps_high_divides_low_and_blends_between)
{
    struct tl_arch_spec s = {.d_head = 64, .rope = TL_ROPE_HALF, .rope_base = 500000, .rope_scaling = {32, 1, 4, 8192}};
    float f[32], g[32];
    tl_rope_inv_freq(&s, g);
    s.rope_scaling.factor = 0;
    tl_rope_inv_freq(&s, f);
    int kept = 0, divided = 0, blended = 0;
    for (int j = 0; j < 32; j++) {
        double freq = pow(500000, -2.0 * j / 64), wavelength = 2 * M_PI / freq, expected;
        if (wavelength < 8192.0 / 4) {
            expected = freq;
            kept++;
        } else if (wavelength > 8192.0) {
            expected = freq / 32;
            divided++;
        } else {
            double smooth = (8192 / wavelength - 1) / (4 - 1);
            expected = (1 - smooth) * freq / 32 + smooth * freq;
            blended++;
        }
        ck_assert_double_eq_tol((double)g[j], expected, 1e-7 * expected);
    }
    ck_assert(kept > 5 && divided > 5 && blended > 1);
    ck_assert(g[0] == f[0]);
}
END_TEST

START_TEST(the_generator_gives_the_published_numbers)
{
    uint32_t w[4];
    tl_rng_block(0, 0, 0, w);
    ck_assert(w[0] == 0x6627e8d5 && w[1] == 0xe169c58d && w[2] == 0xbc57ac4c && w[3] == 0x9b00dbd8);
    tl_rng_block(UINT64_MAX, UINT64_MAX, UINT64_MAX, w);
    ck_assert(w[0] == 0x408f276d && w[1] == 0x41c83b0e && w[2] == 0xa20bc7c6 && w[3] == 0x6d5451fd);
    ck_assert(tl_rng_u64(0, 0, 0) == 0xe169c58d6627e8d5u);
}
END_TEST

START_TEST(start_states_are_cut_normals_that_depend_on_seed_and_position_alone)
{
    struct tl_arch_spec s = {.d_model = 4096, .state_init = TL_STATE_TRUNCNORM, .state_std = 0.5f};
    float *a = malloc(4096 * sizeof(float)), *b = malloc(4096 * sizeof(float));
    double sum = 0, sq = 0, most = 0;
    int beyond_two = 0;
    for (int pos = 0; pos < 64; pos++) {
        tl_start_state(&s, 7, pos, a);
        for (int c = 0; c < 4096; c++) {
            double z = (double)a[c] / 0.5;
            sum += z;
            sq += z * z;
            most = fmax(most, fabs(z));
            beyond_two += fabs(z) > 2;
        }
    }
    const double n = 64 * 4096;
    ck_assert_double_eq_tol(sum / n, 0, 0.01);
    ck_assert_double_eq_tol(sq / n, 0.9733, 0.01); /* variance of a normal cut at 3 deviations */
    ck_assert(most <= 3 && most > 2.9);
    ck_assert_double_eq_tol(beyond_two / n, 0.0429, 0.003); /* (0.0455 - 0.0027) / 0.9973 */
    tl_start_state(&s, 7, 5, a);
    tl_start_state(&s, 7, 5, b);
    ck_assert_mem_eq(a, b, 4096 * sizeof(float));
    tl_start_state(&s, 8, 5, b);
    ck_assert(memcmp(a, b, 4096 * sizeof(float)) != 0);
    tl_start_state(&s, 7, 6, b);
    ck_assert(memcmp(a, b, 4096 * sizeof(float)) != 0);
    s.state_init = TL_STATE_ZERO;
    tl_start_state(&s, 7, 5, b);
    for (int c = 0; c < 4096; c++)
        ck_assert(b[c] == 0);
    free(a);
    free(b);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("rope");
    TCase *tc = tcase_create("rope");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, own_functions_agree_with_libm);
    tcase_add_test(tc, frequencies_and_angles_follow_the_formula);
    tcase_add_test(tc, a_table_made_in_pieces_is_the_same_table);
    tcase_add_test(tc, llama3_scaling_keeps_high_divides_low_and_blends_between);
    tcase_add_test(tc, the_generator_gives_the_published_numbers);
    tcase_add_test(tc, start_states_are_cut_normals_that_depend_on_seed_and_position_alone);
    suite_add_tcase(suite, tc);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int n_failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return n_failed ? 1 : 0;
}
