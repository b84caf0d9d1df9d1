/* Grammars as GBNF, regular expressions and choices; masks and positions; limits. */
#include <check.h>

#include "grammar_cache.h"
#include "grammar_check.h"
#include "suite.h"

#include <stdio.h>

#define GBNF TL_GRAMMAR_GBNF

/* ---- GBNF ---- */

START_TEST(sequences_alternatives_and_repetitions)
{
    check_texts(GBNF, "root ::= \"a\" b* (\"x\" | \"yy\")+ c?\nb ::= \"b\"\nc ::= [0-9]{2,3}",
                TEXTS("ax", "abbbx", "axyyx12", "ayy123", NULL, "a", "abx1", "ax1234", "bx", ""));
    check_texts(GBNF, "root ::= (\"ab\"){2} [x]{,2} \"z\"{1,}",
                TEXTS("ababz", "ababxxzzz", NULL, "abz", "ababxxxz", "abab"));
}
END_TEST

START_TEST(classes_escapes_and_characters)
{
    check_texts(GBNF, "root ::= [^a-cx\\n] [\\]\\-\\\\] \"\\x41\\u00e9\\U0001F600\\t\\\"\" .",
                TEXTS("d]Aé😀\t\"é", "é-Aé😀\t\"\n", "😀\\Aé😀\t\"x", NULL, "a]Aé😀\t\"x", "\n]Aé😀\t\"x", "d[Aé😀\t\"x",
                      "d]Aé😀\t\""));
    check_texts(GBNF, "root ::= [α-ωß]+ [-a] [a-]", TEXTS("αßω-a", "βa-", NULL, "a-a", "Ω-a"));
}
END_TEST

START_TEST(lines_comments_and_order_of_rules)
{
    check_texts(GBNF,
                "# a comment\r\nroot ::= a | # one\n  b |\n\n c # three\na ::=\n \"1\" ( # inside\n \"2\" \n | \"3\" "
                ")\nb ::= \"4\"\n\n\nc ::= | \"5\"",
                TEXTS("12", "13", "4", "", "5", NULL, "1", "45"));
}
END_TEST

START_TEST(rules_may_call_themselves_but_not_first)
{
    check_texts(GBNF, "root ::= \"(\" root* \")\"", TEXTS("()", "(()())", "((()))", NULL, "(", "())", ""));
    check_refused(GBNF, "root ::= root \"a\" | \"b\"", TL_ERR_INVALID_GRAMMAR, "'root'");
    check_refused(GBNF, "root ::= a\na ::= b \"x\"\nb ::= c\nc ::= a | \"y\"", TL_ERR_INVALID_GRAMMAR,
                  "left recursion");
    check_refused(GBNF, "root ::= \"r\" hidden\nhidden ::= blank? hidden \"x\" | \"z\"\nblank ::= \" \"",
                  TL_ERR_INVALID_GRAMMAR, "'hidden'");
    check_refused(GBNF, "root ::= (blank root)* \"x\"\nblank ::= \" \"*", TL_ERR_INVALID_GRAMMAR, "'root'");
    check_refused(GBNF, "root ::= \"x\"\nunused ::= unused", TL_ERR_INVALID_GRAMMAR, "'unused'");
}
END_TEST

START_TEST(loops_of_nothing_end)
{
    check_texts(GBNF, "root ::= ((e*)* | (e | \"\")+)* \"z\"\ne ::= \"\" | ( | e2 )\ne2 ::= \"x\"? \"\"",
                TEXTS("z", "xz", "xxxz", NULL, "x", "zz"));
    check_texts(GBNF, "root ::= \"\"", TEXTS("", NULL, "a"));
}
END_TEST

START_TEST(ambiguous_grammars_stay_small)
{
    char *text = repeated("", "a", 3000, ""), *word = repeated("", "ab", 1500, "");
    check_texts(GBNF, "root ::= (\"a\" | \"aa\" | \"a\" \"a\"? | [a-c]+)*", TEXTS(text, NULL, "aad"));
    check_texts(GBNF, "root ::= x | y\nx ::= p \"b\" x? | p \"b\"\ny ::= p \"b\" y? | q x?\np ::= \"a\"\nq ::= \"ab\"",
                TEXTS(word, NULL, "aba"));
    free(text);
    free(word);
}
END_TEST

START_TEST(long_lists_do_not_grow_the_stack)
{
    char *right = repeated("", "item,", 20000, "item"), *nested = repeated("", "(", 1000, "");
    check_texts(GBNF, "root ::= item (\",\" root)?\nitem ::= \"item\"", TEXTS(right, NULL, "item,"));
    struct tl_grammar *g = must_compile(GBNF, "root ::= \"(\" root \")\" | \"x\"");
    ck_assert_int_eq(judge(g, nested), 'p');
    tl_grammar_free(g);
    free(right);
    free(nested);
}
END_TEST

START_TEST(grammars_that_accept_nothing_are_refused)
{
    check_refused(GBNF, "root ::= \"a\" root", TL_ERR_INVALID_GRAMMAR, "accepts no text");
    check_refused(GBNF, "root ::= \"a\" []", TL_ERR_INVALID_GRAMMAR, "accepts no text");
    /* a part that cannot be completed is cut off, so that no text runs into it */
    check_texts(GBNF, "root ::= \"a\" | \"ab\" dead\ndead ::= \"x\" dead", TEXTS("a", NULL, "ab"));
    struct tl_grammar *g = must_compile(GBNF, "root ::= \"a\" | \"ab\" dead\ndead ::= \"x\" dead");
    ck_assert_int_eq(judge(g, "ab"), 'n');
    tl_grammar_free(g);
}
END_TEST

START_TEST(mistakes_are_named_with_line_and_column)
{
    static const struct {
        const char *source;
        int line, column;
        const char *what;
    } cases[] = {{"", 1, 1, "root"},
                 {"start ::= \"a\"", 1, 1, "root"},
                 {"root ::= \"a\"\n  b ::= c\n", 2, 9, "'c'"},
                 {"root ::= \"a\nb\"", 1, 10, "quote"},
                 {"root ::= [a", 1, 10, "bracket"},
                 {"root ::= \"é\" [z-a]", 1, 14, "ends before"},
                 {"root ::= (\"a\"", 1, 10, "parenthesis"},
                 {"root ::= \"a\")", 1, 13, "cannot stand"},
                 {"root = \"a\"", 1, 6, "::="},
                 {"root ::= \"\\q\"", 1, 11, "escape"},
                 {"root ::= \"a\"{3,1}", 1, 13, "ends before"},
                 {"root ::= \"a\"{x}", 1, 13, "count"},
                 {"root ::= \"a\"{99999999999999}", 1, 13, "limit"},
                 {"root ::= <think>", 1, 10, "tokens"},
                 {"root ::= \"a\"\nroot ::= \"b\"", 2, 1, "twice"},
                 {"root ::= \"\xff\"", 1, 11, "UTF-8"},
                 {"root ::= \"\\uD800\"", 1, 11, "character"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct tl_grammar *g;
        struct tl_error err = {.msg = ""};
        ck_assert_int_eq(compile(&g, GBNF, cases[i].source, NULL, &err), TL_ERR_INVALID_GRAMMAR);
        ck_assert_msg(strstr(err.msg, cases[i].what) && err.n_nums == 2 && err.num[0].value == cases[i].line &&
                          err.num[1].value == cases[i].column,
                      "%s: %s", cases[i].source, err.msg);
    }
}
END_TEST

START_TEST(noise_is_refused)
{
    char *noise = malloc(1 << 19);
    uint64_t z = 1;
    for (int i = 0; i < (1 << 19) - 1; i++) {
        z = z * 6364136223846793005u + 1442695040888963407u;
        noise[i] = (char)(32 + (z >> 33) % 95);
    }
    noise[(1 << 19) - 1] = '\0';
    check_refused(GBNF, noise, TL_ERR_INVALID_GRAMMAR, "line 1");
    check_refused(TL_GRAMMAR_REGEX, noise, TL_ERR_INVALID_GRAMMAR, "offset");
    free(noise);
}
END_TEST

START_TEST(nesting_past_the_limit_is_refused)
{
    static const int depths[] = {199, 1000, 60000};
    for (int i = 0; i < 3; i++) {
        char *open = repeated("root ::= ", "(", depths[i], "\"a\""), *gbnf = repeated(open, ")", depths[i], "");
        char *regex_open = repeated("", "(", depths[i], "a"), *regex = repeated(regex_open, ")", depths[i], "");
        if (i == 0) {
            check_texts(GBNF, gbnf, TEXTS("a", NULL, "aa"));
            check_texts(TL_GRAMMAR_REGEX, regex, TEXTS("a", NULL, "aa"));
        } else {
            check_refused(GBNF, gbnf, TL_ERR_INVALID_GRAMMAR, "nested deeper");
            check_refused(TL_GRAMMAR_REGEX, regex, TL_ERR_INVALID_GRAMMAR, "nested deeper");
        }
        free(open);
        free(gbnf);
        free(regex_open);
        free(regex);
    }
}
END_TEST

START_TEST(a_chain_of_5000_rules_works)
{
    char *source = malloc(5000 * 40), *p = source;
    p += sprintf(p, "root ::= r0\n");
    for (int i = 0; i < 5000; i++)
        p += sprintf(p, "r%d ::= r%d%s\n", i, i + 1, i % 7 ? "" : " \"x\"?");
    sprintf(p, "r5000 ::= \"end\"");
    check_texts(GBNF, source, TEXTS("end", "endx", "endxxxx", NULL, "en"));
    free(source);
}
END_TEST

/* ---- regular expressions and choices ---- */

START_TEST(regular_expressions_match_the_whole_text)
{
    check_texts(TL_GRAMMAR_REGEX, "^\\d{3}-(?:[a-f]+|\\w\\s)\\.?$",
                TEXTS("123-abc", "123-z .", "000-f.", NULL, "12-a", "123-g", "x123-a"));
    check_texts(TL_GRAMMAR_REGEX, "(?<year>[12]\\d{3})a*?b+?|x{2}y{,3}{",
                TEXTS("1999aab", "2000b", "xxy{,3}{", NULL, "3000b", "1999a", "xxyyy"));
    check_texts(TL_GRAMMAR_REGEX, "[^\\w\\-\\]]+[\\u00e0-\\u00ff][\\x41\\u{1F600}]",
                TEXTS(" é😀", "!?éA", NULL, "-éA", "éA", "aéA"));
    check_texts(TL_GRAMMAR_REGEX, "", TEXTS("", NULL, "a"));
    check_texts(TL_GRAMMAR_REGEX, ".*", TEXTS("", "any é text", NULL, "two\nlines"));
}
END_TEST

START_TEST(what_needs_more_than_an_automaton_is_refused_by_name)
{
    static const char *const cases[][2] = {{"a(?=b)", "look-around"},
                                           {"(?<!a)b", "look-around"},
                                           {"(a)\\1", "back-references"},
                                           {"\\bword", "\\b"},
                                           {"\\p{L}", "\\p"},
                                           {"(?i)a", "flags"},
                                           {"a++", "repetition"},
                                           {"a^b", "anchor"},
                                           {"(^a)", "anchor"},
                                           {"[[:alpha:]]", "named classes"},
                                           {"a{3,2}", "ends before"},
                                           {"*a", "nothing to repeat"},
                                           {"[z-a]", "range"},
                                           {"(a", "parenthesis"},
                                           {"a)", "parenthesis"},
                                           {"[a", "bracket"},
                                           {"a\\", "no end"},
                                           {"a{70000}", "limit"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        check_refused(TL_GRAMMAR_REGEX, cases[i][0], TL_ERR_INVALID_GRAMMAR, cases[i][1]);
}
END_TEST

START_TEST(a_choice_is_one_of_its_strings)
{
    static const char *const strings[] = {"yes", "no", "nobody", "é", "yes"};
    struct tl_grammar_source src = {.kind = TL_GRAMMAR_CHOICE, .choices = strings, .n_choices = 5};
    struct tl_grammar *g;
    ck_assert_int_eq(tl_grammar_compile(&g, &src, NULL, NULL), TL_OK);
    for (int i = 0; i < 5; i++)
        ck_assert_int_eq(judge(g, strings[i]), 'y');
    ck_assert_int_eq(judge(g, "nob"), 'p');
    ck_assert_int_eq(judge(g, "yesno"), 'n');
    tl_grammar_free(g);
    src.n_choices = 0;
    ck_assert_int_eq(tl_grammar_compile(&g, &src, NULL, NULL), TL_ERR_INVALID_GRAMMAR);
}
END_TEST

/* ---- masks and positions ---- */

static const char arithmetic[] =
    "root ::= sum\nsum ::= term ((\" + \" | \" - \") term)*\nterm ::= factor (\"*\" factor)*\n"
    "factor ::= [a-c]+ | [0-9]+ (\".\" [0-9]+)? | \"(\" sum \")\" | \"\\\"\" [^\"]* \"\\\"\"";

START_TEST(a_mask_is_what_each_token_alone_would_be)
{
    static const char *const sources[] = {
        arithmetic, "root ::= \"a\"{2,5} \"b\"", "root ::= (\"ab\" | \"abc\" \"d\")+ | [^a]{30,40} \"!\"",
        "root ::= word (\" \" word)*\nword ::= [a-z]+", "root ::= \"the quick \" [a-z]+ \" fox\" .*"};
    struct tl_vocab_trie *v = test_vocab();
    uint64_t z = 7;
    for (size_t i = 0; i < sizeof(sources) / sizeof(sources[0]); i++) {
        struct tl_grammar *g = must_compile(GBNF, sources[i]);
        for (int walk = 0; walk < 4; walk++) {
            struct tl_matcher *m;
            ck_assert_int_eq(tl_matcher_create(&m, g, v, NULL), TL_OK);
            for (int step = 0; step < 25 && !tl_matcher_is_done(m); step++) {
                uint32_t mask[N_WORDS];
                int pick = -1, n = 0;
                exact_mask(m, mask);
                for (int t = 0; t < N_VOCAB; t++) /* one of the allowed, all alike */
                    if (mask[t >> 5] >> (t & 31) & 1) {
                        z = z * 6364136223846793005u + 1442695040888963407u;
                        if ((z >> 33) % (uint64_t)++n == 0)
                            pick = t;
                    }
                if (pick < 0)
                    break;
                ck_assert_int_eq(tl_matcher_accept(m, pick, NULL), TL_OK);
            }
            tl_matcher_free(m);
        }
        tl_grammar_free(g);
    }
    tl_vocab_trie_free(v);
}
END_TEST

START_TEST(masks_do_not_depend_on_what_was_asked_before)
{
    static const char text[] = "abc + (1.5*\"any \xc3\xa9\" - aa)*(b + (c))";
    struct tl_grammar_limits small = {.cache_bytes_max = 30000}; /* so that masks are dropped all the time */
    struct tl_vocab_trie *v = test_vocab();
    struct tl_grammar *warm = must_compile(GBNF, arithmetic), *tight;
    struct tl_matcher *w, *t;
    ck_assert_int_eq(compile(&tight, GBNF, arithmetic, &small, NULL), TL_OK);
    for (int round = 0; round < 2; round++) {
        ck_assert_int_eq(tl_matcher_create(&w, warm, v, NULL), TL_OK);
        ck_assert_int_eq(tl_matcher_create(&t, tight, v, NULL), TL_OK);
        for (size_t i = 0; i < sizeof(text) - 1; i++) {
            struct tl_grammar *fresh = must_compile(GBNF, arithmetic);
            struct tl_matcher *f;
            uint32_t mask[3][N_WORDS];
            ck_assert_int_eq(tl_matcher_create(&f, fresh, v, NULL), TL_OK);
            ck_assert_int_eq(tl_matcher_accept_bytes(f, text, i, NULL), TL_OK);
            ck_assert_int_eq(tl_matcher_mask(f, mask[0], NULL), TL_OK);
            ck_assert_int_eq(tl_matcher_mask(w, mask[1], NULL), TL_OK);
            ck_assert_int_eq(tl_matcher_mask(t, mask[2], NULL), TL_OK);
            ck_assert_mem_eq(mask[0], mask[1], sizeof(mask[0]));
            ck_assert_mem_eq(mask[0], mask[2], sizeof(mask[0]));
            ck_assert_int_eq(tl_matcher_accept(w, (uint8_t)text[i], NULL), TL_OK);
            ck_assert_int_eq(tl_matcher_accept(t, (uint8_t)text[i], NULL), TL_OK);
            tl_matcher_free(f);
            tl_grammar_free(fresh);
        }
        ck_assert(tl_matcher_can_end(w) && tl_matcher_can_end(t));
        tl_matcher_free(w);
        tl_matcher_free(t);
    }
    tl_grammar_free(warm);
    tl_grammar_free(tight);
    tl_vocab_trie_free(v);
}
END_TEST

START_TEST(a_refused_token_changes_nothing)
{
    struct tl_vocab_trie *v = test_vocab();
    struct tl_grammar *g = must_compile(GBNF, "root ::= \"ab\" [0-9]");
    struct tl_matcher *m, *copy;
    struct tl_error err;
    ck_assert_int_eq(tl_matcher_create(&m, g, v, NULL), TL_OK);
    tl_grammar_free(g); /* the matcher holds it */
    ck_assert_int_eq(tl_matcher_accept(m, 'x', &err), TL_ERR_GRAMMAR_NO_CONTINUATION);
    ck_assert_int_eq(tl_matcher_accept_bytes(m, "abc", 3, &err), TL_ERR_GRAMMAR_NO_CONTINUATION);
    ck_assert_int_eq(err.num[0].value, 2);
    ck_assert_int_eq(tl_matcher_accept(m, NO_TEXT, &err), TL_ERR_GRAMMAR_NO_CONTINUATION);
    ck_assert_int_eq(tl_matcher_accept(m, -1, &err), TL_ERR_GRAMMAR_NO_CONTINUATION);
    ck_assert_int_eq(tl_matcher_accept(m, N_VOCAB, &err), TL_ERR_GRAMMAR_NO_CONTINUATION);
    ck_assert_int_eq(tl_matcher_accept_bytes(m, "ab", 2, &err), TL_OK);
    ck_assert_int_eq(tl_matcher_clone(&copy, m, NULL), TL_OK);
    ck_assert_int_eq(tl_matcher_accept(m, '7', &err), TL_OK);
    ck_assert(tl_matcher_is_done(m) && !tl_matcher_can_end(copy));
    ck_assert(!allows(m, '7') && allows(copy, '7'));
    ck_assert_int_eq(tl_matcher_accept(copy, '8', &err), TL_OK);
    tl_matcher_free(m);
    tl_matcher_free(copy);
    tl_vocab_trie_free(v);
}
END_TEST

START_TEST(a_vocabulary_without_the_bytes_is_a_dead_end)
{
    struct tl_vocab_piece pieces[] = {{"a", 1}, {"", 0}, {"bc", 2}};
    struct tl_vocab_trie *v;
    struct tl_grammar *g = must_compile(GBNF, "root ::= \"a\" (\"b\" | \"bcbc\")");
    struct tl_matcher *m;
    struct tl_error err;
    uint32_t mask;
    ck_assert_int_eq(tl_vocab_trie_create(&v, pieces, 3, NULL), TL_OK);
    ck_assert_int_eq(tl_matcher_create(&m, g, v, NULL), TL_OK);
    ck_assert_int_eq(tl_matcher_mask(m, &mask, NULL), TL_OK);
    ck_assert_uint_eq(mask, 1);
    ck_assert_int_eq(tl_matcher_accept(m, 0, NULL), TL_OK);
    ck_assert_int_eq(tl_matcher_mask(m, &mask, NULL), TL_OK);
    ck_assert_uint_eq(mask, 4);
    tl_matcher_free(m);
    tl_grammar_free(g);
    g = must_compile(GBNF, "root ::= \"a\" \"b\"");
    ck_assert_int_eq(tl_matcher_create(&m, g, v, NULL), TL_OK);
    ck_assert_int_eq(tl_matcher_accept(m, 0, NULL), TL_OK);
    ck_assert_int_eq(tl_matcher_mask(m, &mask, &err), TL_ERR_GRAMMAR_NO_CONTINUATION);
    tl_matcher_free(m);
    tl_grammar_free(g);
    tl_vocab_trie_free(v);
}
END_TEST

START_TEST(forced_bytes_are_those_without_a_choice)
{
    struct tl_vocab_trie *v = test_vocab();
    struct tl_grammar *g = must_compile(GBNF, "root ::= \"{key: \" [0-9] \"ab\" | \"{key: \" [x] \"a\"?");
    struct tl_matcher *m;
    char bytes[64];
    size_t n;
    ck_assert_int_eq(tl_matcher_create(&m, g, v, NULL), TL_OK);
    ck_assert_int_eq(tl_matcher_forced(m, bytes, sizeof(bytes), &n, NULL), TL_OK);
    ck_assert_uint_eq(n, 6);
    ck_assert_mem_eq(bytes, "{key: ", 6);
    ck_assert_int_eq(tl_matcher_forced(m, bytes, 3, &n, NULL), TL_OK);
    ck_assert_uint_eq(n, 3);
    ck_assert_int_eq(tl_matcher_accept_bytes(m, "{key: 5", 7, NULL), TL_OK);
    ck_assert_int_eq(tl_matcher_forced(m, bytes, sizeof(bytes), &n, NULL), TL_OK);
    ck_assert_uint_eq(n, 2);
    tl_matcher_free(m);
    ck_assert_int_eq(tl_matcher_create(&m, g, v, NULL), TL_OK);
    ck_assert_int_eq(tl_matcher_accept_bytes(m, "{key: x", 7, NULL), TL_OK);
    ck_assert_int_eq(tl_matcher_forced(m, bytes, sizeof(bytes), &n, NULL), TL_OK);
    ck_assert_uint_eq(n, 0); /* the text may end here */
    tl_matcher_free(m);
    tl_grammar_free(g);
    tl_vocab_trie_free(v);
}
END_TEST

START_TEST(a_prompt_that_does_not_fit_names_the_token)
{
    static const int32_t good[] = {NO_TEXT, 'a', 'b', NO_TEXT, '1'}, bad[] = {NO_TEXT, 'a', 256 + 9}; /* "ab" */
    struct tl_vocab_trie *v = test_vocab();
    struct tl_grammar *g = must_compile(GBNF, "root ::= \"ab\" [0-9]+");
    struct tl_matcher *m;
    struct tl_error err;
    ck_assert_int_eq(tl_matcher_create(&m, g, v, NULL), TL_OK);
    ck_assert_int_eq(tl_matcher_accept_prompt(m, good, 5, &err), TL_OK);
    ck_assert(tl_matcher_can_end(m) && allows(m, '7'));
    tl_matcher_free(m);
    ck_assert_int_eq(tl_matcher_create(&m, g, v, NULL), TL_OK);
    ck_assert_int_eq(tl_matcher_accept_prompt(m, bad, 3, &err), TL_ERR_GRAMMAR_PREFIX_CONFLICT);
    ck_assert(strstr(err.msg, "token 2") && strstr(err.msg, "'ab'"));
    ck_assert_str_eq(err.num[0].key, "token_index");
    ck_assert_int_eq(err.num[0].value, 2);
    tl_matcher_free(m);
    tl_grammar_free(g);
    tl_vocab_trie_free(v);
}
END_TEST

START_TEST(keys_tell_sources_apart)
{
    static const char *const ab[] = {"a", "b"}, *const joined[] = {"ab"};
    struct tl_grammar_source src[] = {{.kind = GBNF, .text = "x", .text_bytes = 1},
                                      {.kind = TL_GRAMMAR_REGEX, .text = "x", .text_bytes = 1},
                                      {.kind = TL_GRAMMAR_CHOICE, .choices = ab, .n_choices = 2},
                                      {.kind = TL_GRAMMAR_CHOICE, .choices = joined, .n_choices = 1},
                                      {.kind = TL_GRAMMAR_JSON_OBJECT}};
    uint64_t key[5][2], again[2];
    for (int i = 0; i < 5; i++) {
        tl_grammar_key(&src[i], key[i]);
        tl_grammar_key(&src[i], again);
        ck_assert_mem_eq(key[i], again, sizeof(again));
        for (int k = 0; k < i; k++)
            ck_assert_mem_ne(key[i], key[k], sizeof(again));
    }
}
END_TEST

START_TEST(a_cache_is_bounded_in_bytes)
{
    static const char *const texts[] = {"[ab]{900}", "[cd]{900}", "[ef]{900}"};
    struct tl_grammar_cache_params p = {.bytes_max = 60000};
    struct tl_grammar_cache *c;
    struct tl_grammar_cache_stats stats;
    struct tl_grammar *g;
    int64_t live = tl_mem_live();
    ck_assert_int_eq(tl_grammar_cache_create(&c, &p, NULL), TL_OK);
    for (int i = 0; i < 6; i++) {
        struct tl_grammar_source src = {.kind = TL_GRAMMAR_REGEX, .text = texts[i % 3], .text_bytes = 9};
        ck_assert_int_eq(tl_grammar_cache_get(c, &src, &g, NULL), TL_OK);
        ck_assert_uint_gt(tl_grammar_bytes(g), p.bytes_max / 3);
        tl_grammar_free(g);
        tl_grammar_cache_stats(c, &stats);
        ck_assert_int_ge(stats.n, 1);
        ck_assert_int_le(stats.n, 2);
    }
    ck_assert_uint_eq(stats.misses, 6);
    tl_grammar_cache_free(c);
    ck_assert_int_eq(tl_mem_live(), live);
}
END_TEST

START_TEST(a_cache_compiles_each_source_once)
{
    static const char *const texts[] = {"a", "b", "a", "c", "a", "b", "("};
    struct tl_grammar_cache_params p = {.n_max = 2};
    struct tl_grammar_cache *c;
    struct tl_grammar_cache_stats stats;
    struct tl_grammar *first = NULL, *g;
    int64_t live = tl_mem_live();
    ck_assert_int_eq(tl_grammar_cache_create(&c, &p, NULL), TL_OK);
    for (int i = 0; i < 7; i++) {
        struct tl_grammar_source src = {.kind = TL_GRAMMAR_REGEX, .text = texts[i], .text_bytes = 1};
        ck_assert_int_eq(tl_grammar_cache_get(c, &src, &g, NULL), i < 6 ? TL_OK : TL_ERR_INVALID_GRAMMAR);
        if (texts[i][0] == 'a') {
            ck_assert(!first || first == g);
            first = g;
        }
        ck_assert(!g || judge(g, texts[i]) == 'y');
        tl_grammar_free(g);
    }
    tl_grammar_cache_stats(c, &stats);
    ck_assert_int_eq(stats.n, 2);
    ck_assert_uint_eq(stats.hits, 2); /* "a" twice; "b" had to go for "c" */
    ck_assert_uint_eq(stats.misses, 5);
    tl_grammar_cache_free(c);
    ck_assert_int_eq(tl_mem_live(), live);
}
END_TEST

/* ---- limits ---- */

static void check_limit(const char *source, const struct tl_grammar_limits *limits, const char *part)
{
    struct tl_grammar *g;
    struct tl_error err = {.msg = ""};
    ck_assert_int_eq(compile(&g, GBNF, source, limits, &err), TL_ERR_INVALID_GRAMMAR);
    ck_assert_msg(strstr(err.msg, part), "%s", err.msg);
}

START_TEST(limits_of_compiling_have_names)
{
    check_limit("root ::= \"abcdefghij\"", &(struct tl_grammar_limits){.source_bytes_max = 10}, "the limit is 10");
    check_limit("root ::= a\na ::= b\nb ::= \"x\"", &(struct tl_grammar_limits){.rules_max = 2}, "more than 2 rules");
    check_limit("root ::= \"a\"{11}", &(struct tl_grammar_limits){.repeat_max = 10}, "over the limit");
    check_limit("root ::= (\"ab\"{100}){100}", &(struct tl_grammar_limits){.states_max = 9000}, "9000");
    check_limit("root ::= ((((\"a\"{1000}){1000}){1000}){1000})", NULL, "states");
    check_limit("root ::= \"a\"****", NULL, "repetitions of a repetition");
}
END_TEST

/* The text is fed until the grammar gives up; what the error says. */
static void check_gives_up(const char *source, const struct tl_grammar_limits *limits, const char *unit,
                           const char *part)
{
    struct tl_vocab_trie *v = test_vocab();
    struct tl_grammar *g;
    struct tl_matcher *m = NULL;
    struct tl_error err = {.msg = ""};
    uint32_t mask[N_WORDS];
    size_t n_unit = strlen(unit);
    enum tl_status st;
    ck_assert_int_eq(compile(&g, GBNF, source, limits, &err), TL_OK);
    st = tl_matcher_create(&m, g, v, &err);
    for (int i = 0; i < 100000 && st == TL_OK; i++) {
        if (i % 16 == 0)
            st = tl_matcher_mask(m, mask, &err);
        if (st == TL_OK)
            st = tl_matcher_accept(m, (uint8_t)unit[(size_t)i % n_unit], &err);
    }
    ck_assert_msg(st == TL_ERR_INVALID_GRAMMAR && strstr(err.msg, part), "%s: %d %s", source, (int)st, err.msg);
    tl_matcher_free(m);
    tl_grammar_free(g);
    tl_vocab_trie_free(v);
}

START_TEST(hostile_grammars_hit_a_limit_while_they_run)
{
    struct tl_grammar_limits small = {.cache_bytes_max = 1 << 20};
    char noise[50001] = "";
    uint64_t z = 3;
    for (int i = 0; i < 50000; i++) {
        z = z * 6364136223846793005u + 1442695040888963407u;
        noise[i] = z >> 60 & 1 ? 'a' : 'b';
    }
    /* which of the last 30 characters were 'a' would need 2^30 states */
    check_gives_up("root ::= [ab]* \"a\" [ab]{30} \"c\"", &small, noise, "has grown past");
    check_gives_up("root ::= \"(\" root \")\"+ | \"x\"", &(struct tl_grammar_limits){.stack_max = 100}, "(",
                   "nests more than 100");
    check_gives_up("root ::= [a]{0,5000} ([a]{0,5000} ([a]{0,5000} \"b\")*)*",
                   &(struct tl_grammar_limits){.work_per_token_max = 20000}, "a", "work");
}
END_TEST

/* Each token takes thousands of steps and makes a state that was not there before. That is within the limit for one token, but
 * not for one after the other. */
START_TEST(a_text_of_dear_tokens_ends)
{
    static const char source[] = "root ::= ([a]{0,1500} [b]?){50}";
    check_gives_up(source, &(struct tl_grammar_limits){.work_per_token_max = 40000}, "a", "or 2500 for each of many");
}
END_TEST

/* ---- memory ---- */

static enum tl_status whole_life(enum tl_grammar_kind kind, const char *source, const char *text)
{
    struct tl_vocab_trie *v = NULL;
    struct tl_vocab_piece pieces[] = {{"a", 1}, {"b", 1}, {"ab", 2}, {"the quick brown fox jumps over", 30}};
    struct tl_grammar_source src = {.kind = kind, .text = source, .text_bytes = strlen(source)};
    struct tl_grammar *g = NULL;
    struct tl_matcher *m = NULL, *copy = NULL;
    uint32_t mask;
    enum tl_status st = tl_vocab_trie_create(&v, pieces, 4, NULL);
    if (st == TL_OK)
        st = tl_grammar_compile(&g, &src, NULL, NULL);
    if (st == TL_OK)
        st = tl_matcher_create(&m, g, v, NULL);
    for (size_t i = 0; i < strlen(text) && st == TL_OK; i++) {
        st = tl_matcher_mask(m, &mask, NULL);
        if (st == TL_OK || st == TL_ERR_GRAMMAR_NO_CONTINUATION) /* these few tokens need not be enough */
            st = tl_matcher_accept_bytes(m, text + i, 1, NULL);
    }
    if (st == TL_OK)
        st = tl_matcher_clone(&copy, m, NULL);
    tl_matcher_free(copy);
    tl_matcher_free(m);
    tl_grammar_free(g);
    tl_vocab_trie_free(v);
    return st;
}

START_TEST(every_failed_allocation_is_survived)
{
    static const struct {
        enum tl_grammar_kind kind;
        const char *source, *text;
    } lives[] = {{GBNF, "root ::= (a | [^x]{2,4} \"b\"?)+\na ::= \"(\" root \")\" | \"ab\"", "ab(bbab)aa"},
                 {TL_GRAMMAR_REGEX, "(a|b[ab]{1,30})*", "abab"},
                 {TL_GRAMMAR_JSON_SCHEMA,
                  "{\"type\":\"object\",\"properties\":{\"a\":{\"enum\":[\"ab\",[1]]},\"b\":{\"$ref\":\"#\"}},"
                  "\"additionalProperties\":{\"type\":"
                  "\"string\",\"pattern\":\"^a+$\"}}",
                  "{\"a\":\"ab\",\"b\":{},\"ab\":\"aa\"}"}};
    for (int i = 0; i < 3; i++) {
        int64_t live = tl_mem_live();
        enum tl_status st = TL_ERR_NO_HOST_MEMORY;
        int64_t n = 0;
        while (st == TL_ERR_NO_HOST_MEMORY) {
            tl_mem_fail_at(++n);
            st = whole_life(lives[i].kind, lives[i].source, lives[i].text);
            tl_mem_fail_at(0);
            ck_assert_int_eq(tl_mem_live(), live);
            ck_assert_int_lt(n, 20000);
        }
        ck_assert_int_eq(st, TL_OK);
        ck_assert_int_gt(n, 20);
    }
}
END_TEST

int main(void)
{
    const TTest *const cases[] = {sequences_alternatives_and_repetitions,
                                  classes_escapes_and_characters,
                                  lines_comments_and_order_of_rules,
                                  rules_may_call_themselves_but_not_first,
                                  loops_of_nothing_end,
                                  ambiguous_grammars_stay_small,
                                  long_lists_do_not_grow_the_stack,
                                  grammars_that_accept_nothing_are_refused,
                                  mistakes_are_named_with_line_and_column,
                                  noise_is_refused,
                                  nesting_past_the_limit_is_refused,
                                  a_chain_of_5000_rules_works,
                                  regular_expressions_match_the_whole_text,
                                  what_needs_more_than_an_automaton_is_refused_by_name,
                                  a_choice_is_one_of_its_strings,
                                  a_mask_is_what_each_token_alone_would_be,
                                  masks_do_not_depend_on_what_was_asked_before,
                                  a_refused_token_changes_nothing,
                                  a_vocabulary_without_the_bytes_is_a_dead_end,
                                  forced_bytes_are_those_without_a_choice,
                                  a_prompt_that_does_not_fit_names_the_token,
                                  keys_tell_sources_apart,
                                  a_cache_is_bounded_in_bytes,
                                  a_cache_compiles_each_source_once,
                                  limits_of_compiling_have_names,
                                  hostile_grammars_hit_a_limit_while_they_run,
                                  a_text_of_dear_tokens_ends,
                                  every_failed_allocation_is_survived};
    return suite_main("grammar", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL, 60);
}
