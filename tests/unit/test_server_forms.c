/* Grammars to be compiled wait for their turn: one between two steps, in order of arrival. */
#include "suite.h"

#include <stdio.h>
#include <string.h>

#include "form_ask.h"
#include "tiny_model.h"

#define N 6

static const char *dir; /* made once, before the tests fork */
static struct tiny t;
static struct tl_forms *forms;
static char texts[N][32];
static struct tl_form_ask asks[N];
static struct tl_form_wait waits[N];
static struct tl_grammar *got[N];

static void setup(void)
{
    tiny_open(&t, dir, 0);
    ck_assert_int_eq(tl_forms_create(&forms, t.m, NULL), TL_OK);
    memset(waits, 0, sizeof(waits));
    memset(got, 0, sizeof(got));
    for (int i = 0; i < N; i++) {
        snprintf(texts[i], sizeof(texts[i]), "[a-c]{%d}", i + 1);
        asks[i] = (struct tl_form_ask){.set = true, .kind = TL_GRAMMAR_REGEX, .text = texts[i]};
    }
}

static void teardown(void)
{
    for (int i = 0; i < N; i++) {
        tl_forms_leave(forms, &waits[i]);
        tl_grammar_free(got[i]);
    }
    tl_forms_free(forms);
    tiny_close(&t);
}

static enum tl_status get(int i, int64_t turn)
{
    const struct tl_vocab_trie *vocab;
    struct tl_error err;
    return tl_forms_get(forms, &asks[i], &waits[i], turn, &got[i], &vocab, &err);
}

/* All that wait ask, the newest first. Returns how many were answered. */
static int ask_all(int64_t turn)
{
    int n = 0;
    for (int i = N; i-- > 0;)
        if (waits[i].waits) {
            ck_assert_int_eq(get(i, turn), TL_OK);
            n += got[i] != NULL;
        }
    return n;
}

START_TEST(one_is_compiled_in_a_turn_in_order_of_arrival)
{
    for (int i = 0; i < N; i++)
        ck_assert_int_eq(get(i, 0), TL_OK);
    for (int turn = 0; turn < N; turn++) {
        ck_assert_int_eq(ask_all(turn), turn > 0);
        for (int i = 0; i < N; i++) {
            ck_assert_int_eq(got[i] != NULL, i <= turn);
            ck_assert_int_eq(waits[i].waits, i > turn);
        }
        ck_assert_int_eq(ask_all(turn), 0); /* the turn is used up */
    }
}
END_TEST

START_TEST(who_leaves_holds_up_nobody)
{
    for (int i = 0; i < N - 1; i++)
        ck_assert_int_eq(get(i, 0), TL_OK);
    tl_forms_leave(forms, &waits[0]); /* does not wait */
    tl_forms_leave(forms, &waits[1]); /* the first */
    tl_forms_leave(forms, &waits[3]); /* within */
    tl_forms_leave(forms, &waits[4]); /* the last */
    tl_forms_leave(forms, &waits[4]);
    ck_assert_int_eq(ask_all(1), 1);
    ck_assert_ptr_nonnull(got[2]);
    ck_assert_int_eq(get(5, 1), TL_OK);
    ck_assert_int_eq(get(3, 1), TL_OK); /* comes back, behind it */
    ck_assert(waits[5].waits && waits[3].waits);
    ck_assert_int_eq(ask_all(2), 1);
    ck_assert_ptr_nonnull(got[5]);
    ck_assert_int_eq(ask_all(3), 1);
    ck_assert_ptr_nonnull(got[3]);
}
END_TEST

START_TEST(the_same_grammar_is_there_for_all_at_once)
{
    for (int i = 1; i < N; i++)
        asks[i].text = texts[1];
    for (int i = 0; i < N; i++)
        ck_assert_int_eq(get(i, 0), TL_OK);
    ck_assert_int_eq(get(1, 1), TL_OK);
    ck_assert_ptr_nonnull(got[1]);
    ck_assert_int_eq(ask_all(1), N - 2);
    for (int i = 2; i < N; i++)
        ck_assert_ptr_eq(got[i], got[1]);
}
END_TEST

START_TEST(one_that_is_known_does_not_wait_for_others)
{
    ck_assert_int_eq(get(0, 0), TL_OK);
    ck_assert_int_eq(get(1, 0), TL_OK);
    asks[2].text = texts[0];
    ck_assert_int_eq(get(2, 0), TL_OK);
    ck_assert_ptr_eq(got[2], got[0]);
    ck_assert(waits[1].waits);
}
END_TEST

START_TEST(a_refused_one_uses_its_turn)
{
    asks[0].text = strcpy(texts[0], "(a?){65000}");
    asks[1].text = strcpy(texts[1], "(");
    ck_assert_int_eq(get(0, 0), TL_ERR_INVALID_GRAMMAR);
    ck_assert_int_eq(get(1, 0), TL_OK);
    ck_assert_int_eq(get(2, 0), TL_OK);
    ck_assert(!waits[0].waits && waits[1].waits && waits[2].waits);
    ck_assert_int_eq(get(1, 1), TL_ERR_INVALID_GRAMMAR);
    ck_assert_int_eq(get(2, 1), TL_OK);
    ck_assert_ptr_null(got[2]);
    ck_assert_int_eq(get(2, 2), TL_OK);
    ck_assert_ptr_nonnull(got[2]);
}
END_TEST

int main(void)
{
    const TTest *const cases[] = {one_is_compiled_in_a_turn_in_order_of_arrival, who_leaves_holds_up_nobody,
                                  the_same_grammar_is_there_for_all_at_once, one_that_is_known_does_not_wait_for_others,
                                  a_refused_one_uses_its_turn};
    dir = tiny_model_dir("tiny", "int8");
    if (!dir)
        return 1;
    return suite_main("server_forms", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown, 30);
}
