/* The option parser that all commands share. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "args.h"

static struct {
    bool flag;
    const char *text, *first, *second;
    int count;
    uint64_t big;
    double ratio;
    struct tl_arg_list list;
} got;

static const struct tl_arg rows[] = {
    {"flag", TL_ARG_FLAG, &got.flag, NULL, "a flag", false, 0, 0},
    {"text", TL_ARG_STR, &got.text, "TEXT", "a string", false, 0, 0},
    {"count", TL_ARG_INT, &got.count, "N", "a number", false, 1, 9},
    {"big", TL_ARG_U64, &got.big, "N", "a large number", false, 0, 0},
    {"ratio", TL_ARG_FLOAT, &got.ratio, "X", "a fraction", false, 0, 1},
    {"list", TL_ARG_LIST, &got.list, "ITEM", "items", false, 0, 0},
    {"FIRST", TL_ARG_POS, &got.first, NULL, "an argument", true, 0, 0},
    {"SECOND", TL_ARG_POS, &got.second, NULL, "another one", false, 0, 0},
};
static const struct tl_args args = {"test", "About.", "test --flag x", rows, sizeof(rows) / sizeof(rows[0])};

static int parse(const char *const *words)
{
    char *argv[16] = {"test"};
    int n = 1;
    for (; words[n - 1]; n++)
        argv[n] = (char *)words[n - 1];
    memset(&got, 0, sizeof(got));
    got.count = 5;
    ck_assert(freopen("/dev/null", "w", stdout) && freopen("/dev/null", "w", stderr));
    return tl_args_parse(&args, n, argv);
}
#define PARSE(...) parse((const char *const[]){__VA_ARGS__, NULL})

START_TEST(options_take_their_values_in_both_spellings)
{
    ck_assert_int_eq(PARSE("--text", "a=b", "x", "--count=7", "--big", "18446744073709551615", "--list", "1",
                           "--ratio=0.5", "--list=2", "--flag", "y"),
                     TL_ARGS_GO);
    ck_assert_str_eq(got.text, "a=b");
    ck_assert_int_eq(got.count, 7);
    ck_assert_uint_eq(got.big, UINT64_MAX);
    ck_assert(got.ratio == 0.5 && got.flag);
    ck_assert_int_eq(got.list.n, 2);
    ck_assert_str_eq(got.list.item[1], "2");
    ck_assert_str_eq(got.first, "x");
    ck_assert_str_eq(got.second, "y");
}
END_TEST

START_TEST(values_that_are_not_given_stay_as_they_were)
{
    ck_assert_int_eq(PARSE("x"), TL_ARGS_GO);
    ck_assert_int_eq(got.count, 5);
    ck_assert_ptr_null(got.text);
    ck_assert_ptr_null(got.second);
}
END_TEST

START_TEST(a_value_may_begin_with_a_dash_and_two_dashes_end_the_options)
{
    ck_assert_int_eq(PARSE("--text", "-1", "--", "--flag"), TL_ARGS_GO);
    ck_assert_str_eq(got.text, "-1");
    ck_assert_str_eq(got.first, "--flag");
    ck_assert(!got.flag);
}
END_TEST

START_TEST(every_mistake_is_refused)
{
    ck_assert_int_eq(PARSE("x", "--colour"), TL_EXIT_USAGE);
    ck_assert_int_eq(PARSE("x", "-flag"), TL_EXIT_USAGE);
    ck_assert_int_eq(PARSE("x", "--tex", "a"), TL_EXIT_USAGE);
    ck_assert_int_eq(PARSE("x", "--text"), TL_EXIT_USAGE);
    ck_assert_int_eq(PARSE("x", "--flag=1"), TL_EXIT_USAGE);
    ck_assert_int_eq(PARSE("x", "--count", "0"), TL_EXIT_USAGE);
    ck_assert_int_eq(PARSE("x", "--count", "10"), TL_EXIT_USAGE);
    ck_assert_int_eq(PARSE("x", "--count", "5x"), TL_EXIT_USAGE);
    ck_assert_int_eq(PARSE("x", "--count", ""), TL_EXIT_USAGE);
    ck_assert_int_eq(PARSE("x", "--count", "99999999999999999999"), TL_EXIT_USAGE);
    ck_assert_int_eq(PARSE("x", "--big", "-1"), TL_EXIT_USAGE);
    ck_assert_int_eq(PARSE("x", "--ratio", "nan"), TL_EXIT_USAGE);
    ck_assert_int_eq(PARSE("x", "--ratio", "1.5"), TL_EXIT_USAGE);
    ck_assert_int_eq(PARSE("x", "y", "z"), TL_EXIT_USAGE);
    ck_assert_int_eq(PARSE("--flag"), TL_EXIT_USAGE); /* FIRST is missing */
}
END_TEST

START_TEST(help_wins_and_is_no_failure)
{
    ck_assert_int_eq(PARSE("--help"), TL_EXIT_OK);
    ck_assert_int_eq(PARSE("-h"), TL_EXIT_OK);
}
END_TEST

START_TEST(lists_of_numbers_are_checked_one_by_one)
{
    int out[3];
    ck_assert_int_eq(PARSE("x"), TL_ARGS_GO);
    ck_assert_int_eq(tl_args_int_list(&args, "list", "1,2,8", 1, 8, out, 3), 3);
    ck_assert_int_eq(out[2], 8);
    ck_assert_int_eq(tl_args_int_list(&args, "list", "1,9", 1, 8, out, 3), -1);
    ck_assert_int_eq(tl_args_int_list(&args, "list", "1,,2", 1, 8, out, 3), -1);
    ck_assert_int_eq(tl_args_int_list(&args, "list", "1,2,3,4", 1, 8, out, 3), -1);
    ck_assert_int_eq(tl_args_int_list(&args, "list", "", 1, 8, out, 3), -1);
    ck_assert_int_eq(tl_args_int_list(&args, "list", "1;2", 1, 8, out, 3), -1);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("args");
    TCase *tc = tcase_create("args");
    tcase_add_test(tc, options_take_their_values_in_both_spellings);
    tcase_add_test(tc, values_that_are_not_given_stay_as_they_were);
    tcase_add_test(tc, a_value_may_begin_with_a_dash_and_two_dashes_end_the_options);
    tcase_add_test(tc, every_mistake_is_refused);
    tcase_add_test(tc, help_wins_and_is_no_failure);
    tcase_add_test(tc, lists_of_numbers_are_checked_one_by_one);
    suite_add_tcase(suite, tc);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int n_failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return n_failed ? 1 : 0;
}
