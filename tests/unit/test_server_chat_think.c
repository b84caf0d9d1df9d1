/* Thoughts and answer, however the text is cut. */
#include <stdlib.h>
#include <string.h>

#include "chat_think.h"
#include "suite.h"

struct parts {
    struct tl_bytes thought, answer;
};

static void collect(struct parts *p, const struct tl_think *t)
{
    tl_bytes_add(&p->thought, t->thought.data, t->thought.n);
    tl_bytes_add(&p->answer, t->answer.data, t->answer.n);
}

static void expect(const char *text, bool thinks, bool inside, const char *thought, const char *answer)
{
    size_t n = strlen(text);
    for (unsigned seed = 0; seed < 60; seed++) { /* seed 0: all at once; 1: byte by byte; else at random */
        struct tl_think t;
        struct parts got = {0};
        unsigned state = seed;
        tl_think_init(&t, NULL, thinks, inside);
        for (size_t at = 0, len; at < n; at += len) {
            state = state * 1664525u + 1013904223u;
            len = seed == 0 ? n : seed == 1 ? 1 : 1 + (state >> 16) % 6;
            if (len > n - at)
                len = n - at;
            tl_think_push(&t, -1, text + at, len);
            collect(&got, &t);
        }
        tl_think_flush(&t);
        collect(&got, &t);
        ck_assert_str_eq(tl_bytes_cstr(&got.thought), thought);
        ck_assert_str_eq(tl_bytes_cstr(&got.answer), answer);
        tl_bytes_free(&got.thought);
        tl_bytes_free(&got.answer);
        tl_think_free(&t);
    }
}

START_TEST(marks_part_the_text_and_blanks_around_them_are_gone)
{
    expect("<think>\nHm.\n</think>\n\nYes.", true, false, "Hm.", "Yes.");
    expect("\nHm. Hm.\n</think>\n\nYes.\n", true, true, "Hm. Hm.", "Yes.\n");
    expect(" \n<think></think>Yes.", true, false, "", "Yes.");
}
END_TEST

START_TEST(without_a_mark_all_is_answer_or_all_is_thought)
{
    expect("Yes <think> no.", true, false, "", "Yes <think> no.");
    expect(" <thin", true, false, "", " <thin");
    expect("Hm </thin", true, true, "Hm </thin", "");
    expect("<think>a</think>b", false, false, "", "<think>a</think>b");
    expect("", true, true, "", "");
}
END_TEST

START_TEST(only_the_first_thought_counts)
{
    expect("<think>a</think>b<think>c</think>", true, false, "a", "b<think>c</think>");
    expect("a < b </ c </think>d", true, true, "a < b </ c", "d");
}
END_TEST

int main(void)
{
    const TTest *const cases[] = {
        marks_part_the_text_and_blanks_around_them_are_gone,
        without_a_mark_all_is_answer_or_all_is_thought,
        only_the_first_thought_counts,
    };
    return suite_main("chat_think", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL, 30);
}
