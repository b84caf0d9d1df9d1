/* A grammar at work on a sequence: stop ids, and forced text in tokens. */
#include "grammar_constraint.h"
#include "suite.h"
#include "tokenizer_files.h"

/* Ids 0..255 are the bytes. The tokenizer puts b and c together before it looks at a and b. */
enum { ID_BC = 256, ID_AB, ID_ABC, ID_QUOTE_A, N_IDS };

static struct tl_tokenizer *tk;
static struct tl_vocab_trie *of_tk, *of_nobody;

static void setup(void)
{
    struct tl_vocab_piece pieces[N_IDS] = {{NULL, 0}};
    tk = open_file(&(struct file){.vocab = "\"bc\":256,\"ab\":257,\"abc\":258,\"\\\"a\":259",
                                  .merges = "[\"b c\",\"a b\",\"ab c\",\"\\\" a\"]",
                                  .pre = "null"});
    ck_assert_int_eq(tl_vocab_trie_of(&of_tk, tk, N_IDS, NULL), TL_OK);
    for (int i = 0; i < N_IDS; i++) {
        size_t n;
        ck_assert(tl_tokenizer_piece(tk, i, &pieces[i].bytes, &n));
        pieces[i].n_bytes = (uint32_t)n;
    }
    ck_assert_int_eq(tl_vocab_trie_create(&of_nobody, pieces, N_IDS, NULL), TL_OK);
}

static void teardown(void)
{
    tl_vocab_trie_free(of_tk);
    tl_vocab_trie_free(of_nobody);
    tl_tokenizer_free(tk);
}

static struct tl_constraint *constrain(const char *gbnf, const struct tl_vocab_trie *v, int32_t stop_id, bool any_piece)
{
    struct tl_grammar_source src = {.kind = TL_GRAMMAR_GBNF, .text = gbnf, .text_bytes = strlen(gbnf)};
    struct tl_grammar *g;
    struct tl_constraint *c;
    struct tl_error err = {0};
    ck_assert_msg(tl_grammar_compile(&g, &src, NULL, &err) == TL_OK, "%s", err.msg);
    ck_assert_int_eq(
        tl_constraint_create(
            &c,
            &(struct tl_constraint_params){
                .grammar = g, .vocab = v, .stop_ids = &stop_id, .n_stop_ids = stop_id >= 0, .any_piece = any_piece},
            &err),
        TL_OK);
    tl_grammar_free(g);
    return c;
}

/* The forced tokens from here on, and how many the mask allows after them. A mask that was found ahead is the same. */
static void check_forced(struct tl_constraint *c, const int32_t *want, int n_want, int n_allowed)
{
    const uint32_t *mask;
    int32_t token;
    bool complete;
    int n = 0;
    for (int i = 0; i < n_want; i++) {
        if (i % 2)
            tl_constraint_prepare(c);
        ck_assert_int_eq(tl_constraint_forced(c, &token, NULL), TL_OK);
        ck_assert_int_eq(token, want[i]);
        ck_assert_int_eq(tl_constraint_mask(c, &mask, &complete, NULL), TL_OK);
        ck_assert(!complete);
        for (int k = 0; k < N_IDS; k++)
            ck_assert_int_eq(mask[k >> 5] >> (k & 31) & 1, k == want[i]);
        ck_assert_int_eq(tl_constraint_accept(c, token, &complete, NULL), TL_OK);
    }
    ck_assert_int_eq(tl_constraint_forced(c, &token, NULL), TL_OK);
    ck_assert_int_eq(token, -1);
    ck_assert_int_eq(tl_constraint_mask(c, &mask, &complete, NULL), TL_OK);
    for (int k = 0; k < N_IDS; k++)
        n += mask[k >> 5] >> (k & 31) & 1;
    ck_assert_int_eq(n, n_allowed);
}
#define IDS(...) (const int32_t[]){__VA_ARGS__}, (int)(sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

START_TEST(forced_text_is_split_as_the_tokenizer_does)
{
    struct tl_constraint *c = constrain("root ::= \"xabcab\" [xy]", of_tk, -1, false);
    ck_assert_str_eq(ids_of(tk, "xabcab", false, false), "120,97,256,257");
    check_forced(c, IDS('x', 'a', ID_BC, ID_AB), 2);
    tl_constraint_free(c);
    c = constrain("root ::= \"xabcab\" [xy]", of_nobody, -1, false);
    check_forced(c, IDS('x', ID_ABC, ID_AB), 2);
    tl_constraint_free(c);
}
END_TEST

START_TEST(a_piece_past_the_forced_text_is_a_choice)
{
    struct tl_constraint *c = constrain("root ::= \"x\\\"\" [ab]", of_tk, -1, false);
    check_forced(c, IDS('x'), 2); /* the quote alone, or with the a */
    tl_constraint_free(c);
    c = constrain("root ::= \"ab\" \"c\"? ", of_tk, -1, false); /* the text may end after b */
    check_forced(c, NULL, 0, 3);
    tl_constraint_free(c);
}
END_TEST

START_TEST(a_bias_or_a_stop_id_takes_no_part)
{
    struct tl_constraint *c = constrain("root ::= \"abc\"", of_tk, -1, true);
    check_forced(c, NULL, 0, 3);
    tl_constraint_free(c);
    c = constrain("root ::= \"abc\" [xy]", of_nobody, ID_ABC, false);
    check_forced(c, IDS(ID_AB, 'c'), 2);
    tl_constraint_free(c);
}
END_TEST

START_TEST(forced_halves_of_characters)
{
    /* Both begin with byte C3, and differ after it. */
    struct tl_constraint *c = constrain("root ::= (\"\u00e9\" | \"\u00e8\") \"\u00e9\" [xy]", of_tk, -1, false);
    bool complete;
    check_forced(c, IDS(0xC3), 2);
    ck_assert_int_eq(tl_constraint_accept(c, 0xA8, &complete, NULL), TL_OK);
    check_forced(c, IDS(0xC3, 0xA9), 2);
    tl_constraint_free(c);
}
END_TEST

START_TEST(a_long_forced_text_goes_on)
{
    char source[400] = "root ::= \"", *p = source + strlen(source);
    struct tl_constraint *c;
    int32_t token;
    bool complete = false;
    int n = 0;
    memset(p, 'z', 300);
    strcpy(p + 300, "\"");
    c = constrain(source, of_tk, -1, false);
    while (!complete) {
        ck_assert_int_eq(tl_constraint_forced(c, &token, NULL), TL_OK);
        ck_assert_int_eq(token, 'z');
        ck_assert_int_eq(tl_constraint_accept(c, token, &complete, NULL), TL_OK);
        n++;
    }
    ck_assert_int_eq(n, 300);
    tl_constraint_free(c);
}
END_TEST

START_TEST(a_failed_allocation_can_be_tried_again)
{
    enum tl_status st = TL_ERR_NO_HOST_MEMORY;
    for (int64_t n = 1; st == TL_ERR_NO_HOST_MEMORY; n++) {
        struct tl_constraint *c = constrain("root ::= \"xabcab\" [xy]", of_tk, -1, false);
        int64_t live;
        int32_t token = 0;
        bool complete;
        ck_assert_int_lt(n, 200);
        ck_assert_int_eq(tl_constraint_accept(c, 'x', &complete, NULL), TL_OK);
        live = tl_mem_live();
        tl_mem_fail_at(n);
        st = tl_constraint_forced(c, &token, NULL);
        tl_mem_fail_at(0);
        if (st != TL_OK) {
            ck_assert_int_eq(st, TL_ERR_NO_HOST_MEMORY);
            ck_assert_int_eq(token, -1);
            ck_assert_int_ge(tl_mem_live(), live);
        }
        check_forced(c, IDS('a', ID_BC, ID_AB), 2);
        tl_constraint_free(c);
    }
    ck_assert_int_eq(st, TL_OK);
}
END_TEST

int main(void)
{
    const TTest *const cases[] = {forced_text_is_split_as_the_tokenizer_does,
                                  a_piece_past_the_forced_text_is_a_choice,
                                  a_bias_or_a_stop_id_takes_no_part,
                                  forced_halves_of_characters,
                                  a_long_forced_text_goes_on,
                                  a_failed_allocation_can_be_tried_again};
    return suite_main("grammar_constraint", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown, 60);
}
