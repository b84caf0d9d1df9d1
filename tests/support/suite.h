/* tests/support/suite.h - run a list of Check cases as one suite. Include after <check.h>; returns main's exit code. */
#ifndef TL_SUITE_H
#define TL_SUITE_H

#include <check.h>
#include <stddef.h>

/* setup and teardown (may be NULL) run around every case, in its own process. */
static inline int suite_main(const char *name, const TTest *const *cases, size_t n, void (*setup)(void),
                             void (*teardown)(void), double timeout_seconds)
{
    Suite *suite = suite_create(name);
    TCase *tc = tcase_create(name);
    SRunner *sr;
    int failed;

    if (setup)
        tcase_add_checked_fixture(tc, setup, teardown);
    tcase_set_timeout(tc, timeout_seconds);
    for (size_t i = 0; i < n; i++)
        tcase_add_test(tc, cases[i]);
    suite_add_tcase(suite, tc);
    sr = srunner_create(suite);
    srunner_run_all(sr, CK_NORMAL);
    failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed != 0;
}

#endif
