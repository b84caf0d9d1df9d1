/* tests/unit/test_tokenizer.c - encoding and decoding on small files written here; test_tokenizer_equal.py compares large
 * ones with the reference library. */
#include "tokenizer_files.h"

#include <pthread.h>

/* ---- encoding ---- */

START_TEST(merges_apply_by_rank_and_from_the_left)
{
    struct tl_tokenizer *tk = open_file(&(struct file){.vocab = VOCAB_AB, .merges = MERGES_AB});
    ck_ids(tk, "", "");
    ck_ids(tk, "a", "97");
    ck_ids(tk, "ab", "256");
    ck_ids(tk, "abc", "257");
    ck_ids(tk, "bc", "258");
    ck_ids(tk, "aaab", "259,256");
    ck_ids(tk, "aaa", "259,97");
    ck_ids(tk, "ab ab", "256,32,256");
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(ignore_merges_takes_a_whole_piece_from_the_vocabulary)
{
    struct file f = {.vocab = VOCAB_AB ",\"cab\":260", .merges = MERGES_AB};
    struct tl_tokenizer *tk = open_file(&f);
    ck_ids(tk, "cab", "99,256");
    tl_tokenizer_free(tk);
    f.model = "\"ignore_merges\":true,";
    tk = open_file(&f);
    ck_ids(tk, "cab", "260");
    ck_ids(tk, "cabc", "99,257");
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(each_split_behavior_cuts_its_own_way)
{
    /* "ab" merges only if it stays in one piece. */
    static const struct {
        const char *pre, *text, *want;
    } cases[] = {
        {SEQUENCE(SPLIT("{\"String\":\"a\"}", "Isolated", "false"), NO_WORDS), "abab", "97,98,97,98"},
        {SEQUENCE(SPLIT("{\"String\":\"a\"}", "MergedWithNext", "false"), NO_WORDS), "abab", "256,256"},
        {SEQUENCE(SPLIT("{\"String\":\"a\"}", "MergedWithPrevious", "false"), NO_WORDS), "abab", "97,98,97,98"},
        {SEQUENCE(SPLIT("{\"String\":\"b\"}", "MergedWithPrevious", "false"), NO_WORDS), "abab", "256,256"},
        {SEQUENCE(SPLIT("{\"String\":\"b\"}", "Removed", "false"), NO_WORDS), "abab", "97,97"},
        {SEQUENCE(SPLIT("{\"String\":\"b\"}", "Removed", "true"), NO_WORDS), "abab", "98,98"},
        {SEQUENCE(SPLIT("{\"Regex\":\"[ab]\"}", "Isolated", "false"), NO_WORDS), "abcab", "97,98,99,97,98"},
        {SEQUENCE(SPLIT("{\"Regex\":\"[ab]\"}", "Contiguous", "false"), NO_WORDS), "abcab", "256,99,256"},
        {SEQUENCE(SPLIT("{\"Regex\":\"(?=b)\"}", "Isolated", "false"), NO_WORDS), "aab", "259,98"},
        {SEQUENCE("{\"type\":\"Digits\",\"individual_digits\":true}", NO_WORDS), "ab12", "256,49,50"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct tl_tokenizer *tk =
            open_file(&(struct file){.vocab = VOCAB_AB, .merges = MERGES_AB, .pre = cases[i].pre});
        ck_assert_msg(strcmp(ids_of(tk, cases[i].text, false, true), cases[i].want) == 0, "case %zu: got %s, want %s",
                      i, ids_of(tk, cases[i].text, false, true), cases[i].want);
        tl_tokenizer_free(tk);
    }
}
END_TEST

START_TEST(a_prefix_blank_is_added_only_where_there_is_none)
{
    struct tl_tokenizer *tk = open_file(&(struct file){.pre = "{\"type\":\"ByteLevel\",\"add_prefix_space\":true}"});
    ck_ids(tk, "a", "32,97");
    ck_ids(tk, " a", "32,97");
    ck_ids(tk, "", "");
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(special_tokens_in_a_text_are_text_unless_asked_for)
{
    struct tl_tokenizer *tk = open_file(&(struct file){
        .added = "[" ADDED(300, "<s>", ",\"special\":true") "," ADDED(301, "<s>x", ",\"special\":false") "]"});
    ck_assert_str_eq(ids_of(tk, "a<s>", false, true), "97,300");
    ck_assert_str_eq(ids_of(tk, "a<s>", false, false), "97,60,115,62");
    ck_assert_str_eq(ids_of(tk, "<s", false, true), "60,115");
    ck_assert_int_eq(tl_tokenizer_vocab_size(tk), 302);
    ck_assert(tl_tokenizer_is_special(tk, 300));
    ck_assert(!tl_tokenizer_is_special(tk, 301));
    ck_assert(!tl_tokenizer_is_special(tk, 97));
    ck_assert(!tl_tokenizer_is_special(tk, -1));
    ck_assert(!tl_tokenizer_is_special(tk, 302));
    ck_assert_int_eq(tl_tokenizer_find(tk, "<s>"), 300);
    ck_assert_int_eq(tl_tokenizer_find(tk, "<s>x"), 301);
    ck_assert_int_eq(tl_tokenizer_find(tk, "<s"), -1);
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(the_longest_added_token_at_the_leftmost_place_wins)
{
    struct tl_tokenizer *tk = open_file(
        &(struct file){.added = "[" ADDED(300, "ab", ",\"normalized\":false") "," ADDED(
                           301, "abcd", ",\"normalized\":false") "," ADDED(302, "bcdef", ",\"normalized\":false") "]"});
    ck_ids(tk, "abcdef", "301,101,102");
    ck_ids(tk, "abc", "300,99");
    ck_ids(tk, "xbcdef", "120,302");
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(added_tokens_strip_blanks_and_respect_words)
{
    struct tl_tokenizer *tk = open_file(
        &(struct file){.added = "[" ADDED(300, "[L]", ",\"lstrip\":true") "," ADDED(
                           301, "[R]", ",\"rstrip\":true") "," ADDED(302, "word", ",\"single_word\":true") "]"});
    ck_ids(tk, "a  [L]  b", "97,300,32,32,98");
    ck_ids(tk, "a\xc2\xa0[L]", "97,300"); /* a no-break space is a blank */
    ck_ids(tk, "a [R] \n b", "97,32,301,98");
    ck_ids(tk, "[R]  [L]", "301,300");
    ck_ids(tk, "word", "302");
    ck_ids(tk, "a word.", "97,32,302,46");
    ck_ids(tk, "wordy", "119,111,114,100,121");
    ck_ids(tk, "\xc3\xa9word", "195,169,119,111,114,100"); /* a letter before it */
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(a_template_adds_its_tokens_and_a_second_one_goes_around_it)
{
    static const char post[] =
        "{\"type\":\"Sequence\",\"processors\":[{\"type\":\"ByteLevel\",\"trim_offsets\":false},"
        "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\",\"type_id\":0}},"
        "{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}],\"pair\":[],\"special_tokens\":{\"<s>\":{\"id\":\"<s>\",\"ids\":["
        "300],"
        "\"tokens\":[\"<s>\"]}}},"
        "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"t\",\"type_id\":0}},"
        "{\"Sequence\":{\"id\":\"A\",\"type_id\":0}},{\"SpecialToken\":{\"id\":\"t\",\"type_id\":0}}],"
        "\"special_tokens\":{\"t\":{\"id\":\"t\",\"ids\":[301,97],\"tokens\":[\"t\",\"a\"]}}}]}";
    struct tl_tokenizer *tk = open_file(&(struct file){
        .post = post,
        .added = "[" ADDED(300, "<s>", ",\"special\":true") "," ADDED(301, "<t>", ",\"special\":true") "]"});
    ck_assert_str_eq(ids_of(tk, "b", true, true), "301,97,300,98,301,97");
    ck_assert_str_eq(ids_of(tk, "", true, true), "301,97,300,301,97");
    ck_assert_str_eq(ids_of(tk, "b", false, true), "98");
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(nfc_composes_and_orders_marks)
{
    static char many[600002];
    struct tl_tokenizer *tk = open_file(&(struct file){.normalizer = "{\"type\":\"NFC\"}", .pre = NO_WORDS});
    ck_ids(tk, "e\xcc\x81", "195,169");                     /* e + acute */
    ck_ids(tk, "a\xcc\x87\xcc\xa3", "225,186,161,204,135"); /* marks change places, then a + dot below */
    ck_ids(tk, "\xe1\x84\x80\xe1\x85\xa1", "234,176,128");  /* Hangul */
    ck_ids(tk, "\xe2\x84\xab", "195,133");                  /* Angstrom sign */
    /* Marks in the wrong order all along: the sort must not be quadratic. */
    for (size_t i = 0; i + 4 <= 600000; i += 4)
        memcpy(many + i, "\xcc\x81\xcc\xa3", 4);
    struct tl_encode_params p = {.text = many, .text_bytes = 600000};
    int32_t *ids;
    size_t n;
    ck_assert_int_eq(tl_tokenizer_encode(tk, &p, &ids, &n, NULL), TL_OK);
    ck_assert_uint_eq(n, 600000);
    ck_assert_int_eq(ids[0], 0xCC);
    ck_assert_int_eq(ids[1], 0xA3);
    tl_free(ids);
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(unknown_characters_become_bytes_or_the_unknown_token)
{
    struct tl_tokenizer *tk = open_llama("\"byte_fallback\":true,\"fuse_unk\":true,", "null", LLAMA_NORMALIZER);
    ck_ids(tk, "a b", "7,4,6");
    ck_ids(tk, "\xc3\xa9", "4,2,3");
    ck_ids(tk, "\xc3\xa8\xc3\xa8z", "4,0"); /* no token for the byte A8 */
    ck_ids(tk, "b<s>b", "4,6,1,4,6");
    tl_tokenizer_free(tk);
    tk = open_llama("\"byte_fallback\":true,\"fuse_unk\":false,", "null", LLAMA_NORMALIZER);
    ck_ids(tk, "xyza", "4,0,0,0,5");
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(metaspace_marks_the_beginning_as_its_scheme_says)
{
    struct tl_tokenizer *tk = open_llama("", METASPACE("first"), "null");
    ck_ids(tk, "a<s>a b", "7,1,5,4,6");
    ck_ids(tk, "<s>a", "1,5");
    ck_ids(tk, " a", "7");
    tl_tokenizer_free(tk);
    tk = open_llama("", METASPACE("always"), "null");
    ck_ids(tk, "a<s>a", "7,1,7");
    tl_tokenizer_free(tk);
    tk = open_llama("", METASPACE("never"), "null");
    ck_ids(tk, "a<s>a a", "5,1,5,7");
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(invalid_utf8_is_an_error_that_names_the_byte)
{
    static const struct {
        const char *text;
        int offset;
    } cases[] = {{"\xff", 0},
                 {"ab\x80", 2},
                 {"a\xe2\x82", 1},
                 {"\xc0\xaf", 0},
                 {"\xed\xa0\x80", 0},
                 {"\xf4\x90\x80\x80", 0},
                 {"\xf0\x9f\x91\x8d\xf8", 4},
                 {"\xe0\x9f\xbf", 0},
                 {"\xf0\x8f\xbf\xbf", 0},
                 {"\xc3(", 0}};
    struct tl_tokenizer *tk = open_file(&(struct file){0});
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct tl_encode_params p = {.text = cases[i].text, .text_bytes = strlen(cases[i].text)};
        struct tl_error err = {0};
        int32_t *ids = (int32_t *)&p;
        size_t n = 9;
        ck_assert_int_eq(tl_tokenizer_encode(tk, &p, &ids, &n, &err), TL_ERR_BAD_PARAM);
        ck_assert_ptr_null(ids);
        ck_assert_uint_eq(n, 0);
        ck_assert_int_eq((int)err.num[0].value, cases[i].offset);
    }
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(nul_is_a_character_like_any_other)
{
    struct tl_tokenizer *tk = open_file(&(struct file){0});
    struct tl_encode_params p = {.text = "a\0b", .text_bytes = 3};
    int32_t *ids;
    size_t n;
    ck_assert_int_eq(tl_tokenizer_encode(tk, &p, &ids, &n, NULL), TL_OK);
    ck_assert_uint_eq(n, 3);
    ck_assert_int_eq(ids[1], 0);
    tl_free(ids);
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(more_tokens_than_allowed_are_an_error)
{
    struct tl_tokenizer *tk = open_file(&(struct file){0});
    struct tl_encode_params p = {.text = "abcd", .text_bytes = 4, .max_tokens = 4};
    struct tl_error err = {0};
    int32_t *ids;
    size_t n;
    ck_assert_int_eq(tl_tokenizer_encode(tk, &p, &ids, &n, &err), TL_OK);
    tl_free(ids);
    p.max_tokens = 3;
    ck_assert_int_eq(tl_tokenizer_encode(tk, &p, &ids, &n, &err), TL_ERR_CONTEXT_LENGTH);
    ck_assert_ptr_null(ids);
    p.text_bytes = TL_TOKENIZER_TEXT_BYTES_MAX + 1u;
    ck_assert_int_eq(tl_tokenizer_encode(tk, &p, &ids, &n, &err), TL_ERR_BAD_PARAM);
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(a_mebibyte_of_anything_is_no_trouble)
{
    static const char *const units[] = {" ",   "a",  ".",  "\n", "9",        "ab",
                                        "<s>", "<s", " a", "'s", "\xcc\x81", "\xf0\x9f\x91\x8d"};
    struct tl_tokenizer *tk =
        open_file(&(struct file){.vocab = VOCAB_AB ",\"\u0120\u0120\":260,\"..\":261",
                                 .merges = "[\"a b\",\"ab c\",\"b c\",\"a a\",\"\u0120 \u0120\",\". .\"]",
                                 .normalizer = "{\"type\":\"NFC\"}",
                                 .added = "[" ADDED(300, "<s>", ",\"lstrip\":true") "]"});
    size_t bytes = 1 << 20;
    char *text = malloc(bytes);
    for (size_t k = 0; k < sizeof(units) / sizeof(units[0]); k++) {
        size_t unit = strlen(units[k]), n = 0, n_text;
        struct tl_encode_params p = {.text = text, .parse_special = true};
        int32_t *ids;
        char *back;
        while (p.text_bytes + unit <= bytes) {
            memcpy(text + p.text_bytes, units[k], unit);
            p.text_bytes += unit;
        }
        ck_assert_int_eq(tl_tokenizer_encode(tk, &p, &ids, &n, NULL), TL_OK);
        ck_assert_int_eq(tl_tokenizer_decode(tk, ids, n, NULL, &back, &n_text, NULL), TL_OK);
        ck_assert_uint_eq(n_text, p.text_bytes);
        ck_assert(memcmp(text, back, n_text) == 0);
        tl_free(back);
        tl_free(ids);
    }
    free(text);
    tl_tokenizer_free(tk);
}
END_TEST

/* One of several threads that encode with the same tokenizer. */
static void *encode_often(void *arg)
{
    static const char text[] = "ab  abc, aab 12 <s> e\xcc\x81";
    const struct tl_tokenizer *tk = arg;
    struct tl_encode_params p = {.text = text, .text_bytes = sizeof(text) - 1, .parse_special = true};
    uintptr_t sum = 0;
    for (int k = 0; k < 300; k++) {
        int32_t *ids;
        char *back;
        size_t n, bytes;
        if (tl_tokenizer_encode(tk, &p, &ids, &n, NULL) != TL_OK)
            return NULL;
        for (size_t i = 0; i < n; i++)
            sum = sum * 31 + (uintptr_t)ids[i];
        if (tl_tokenizer_decode(tk, ids, n, NULL, &back, &bytes, NULL) == TL_OK)
            sum += bytes;
        tl_free(back);
        tl_free(ids);
    }
    return (void *)sum;
}

START_TEST(threads_share_a_tokenizer)
{
    struct tl_tokenizer *tk = open_file(&(struct file){.vocab = VOCAB_AB,
                                                       .merges = MERGES_AB,
                                                       .normalizer = "{\"type\":\"NFC\"}",
                                                       .added = "[" ADDED(300, "<s>", ",\"lstrip\":true") "]"});
    pthread_t thread[3];
    void *want = encode_often(tk), *got;
    ck_assert_ptr_nonnull(want);
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(pthread_create(&thread[i], NULL, encode_often, tk), 0);
    for (int i = 0; i < 3; i++) {
        pthread_join(thread[i], &got);
        ck_assert_ptr_eq(got, want);
    }
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(interpreted_patterns_give_the_same_ids)
{
    static const char *const texts[] = {"Hello  world, it's 12345 \n\n\t x",
                                        "\xe4\xbd\xa0\xe5\xa5\xbd '\xd7\xa9 \xc2\xa0",
                                        "a\xe1\xa0\x8e"
                                        "b",
                                        ""};
    const char *json = file_text(&(struct file){.vocab = VOCAB_AB, .merges = MERGES_AB});
    struct tl_tokenizer *jit, *plain;
    char want[4096];
    ck_assert_int_eq(tl_tokenizer_open_memory(&jit, json, strlen(json), false, NULL), TL_OK);
    ck_assert_int_eq(tl_tokenizer_open_memory(&plain, json, strlen(json), true, NULL), TL_OK);
    for (size_t i = 0; i < 4; i++) {
        snprintf(want, sizeof(want), "%s", ids_of(jit, texts[i], false, true));
        ck_ids(plain, texts[i], want);
    }
    tl_tokenizer_free(jit);
    tl_tokenizer_free(plain);
}
END_TEST

/* ---- decoding ---- */

START_TEST(every_byte_has_its_token_and_comes_back)
{
    struct tl_tokenizer *tk = open_file(&(struct file){0});
    for (int32_t b = 0; b < 256; b++) {
        const char *piece;
        size_t n;
        ck_assert(tl_tokenizer_piece(tk, b, &piece, &n));
        ck_assert_uint_eq(n, 1);
        ck_assert_int_eq((unsigned char)*piece, b);
    }
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(no_such_id_has_no_piece_and_cannot_be_decoded)
{
    struct tl_tokenizer *tk = open_file(&(struct file){.vocab = "\"ab\":400"});
    struct tl_detok d;
    struct tl_error err = {0};
    const char *piece;
    char *text = NULL;
    size_t n;
    static const int32_t ids[] = {97, 399};
    ck_assert_int_eq(tl_tokenizer_vocab_size(tk), 401);
    ck_assert(tl_tokenizer_piece(tk, 400, &piece, &n));
    ck_assert(!tl_tokenizer_piece(tk, 399, &piece, &n));
    ck_assert(!tl_tokenizer_piece(tk, 401, &piece, &n));
    ck_assert(!tl_tokenizer_piece(tk, -1, &piece, &n));
    ck_assert_int_eq(tl_tokenizer_decode(tk, ids, 2, NULL, &text, &n, &err), TL_ERR_TOKEN_OUT_OF_VOCAB);
    ck_assert_ptr_null(text);
    ck_assert_int_eq((int)err.num[0].value, 399);
    ck_assert_int_eq(tl_detok_init(&d, tk, NULL, &err), TL_OK);
    ck_assert_int_eq(tl_detok_push(&d, 399, &piece, &n, &err), TL_ERR_TOKEN_OUT_OF_VOCAB);
    ck_assert_int_eq(tl_detok_push(&d, 97, &piece, &n, &err), TL_OK);
    ck_assert_uint_eq(n, 1);
    tl_detok_free(&d);
    tl_tokenizer_free(tk);
}
END_TEST

/* What each push gives, with '|' behind it; the flush comes last. */
static const char *stream(const struct tl_tokenizer *tk, const struct tl_detok_params *params, const int32_t *ids,
                          size_t n)
{
    static char out[256];
    struct tl_detok d;
    const char *text;
    size_t at = 0, bytes;
    ck_assert_int_eq(tl_detok_init(&d, tk, params, NULL), TL_OK);
    for (size_t i = 0; i <= n; i++) {
        if (i < n)
            ck_assert_int_eq(tl_detok_push(&d, ids[i], &text, &bytes, NULL), TL_OK);
        else
            tl_detok_flush(&d, &text, &bytes);
        at += (size_t)snprintf(out + at, sizeof(out) - at, "%.*s|", (int)bytes, text);
    }
    tl_detok_free(&d);
    return out;
}

START_TEST(a_character_waits_until_it_is_whole_or_hopeless)
{
    struct tl_tokenizer *tk = open_file(&(struct file){.vocab = "\"\u00f0\u0141\":256"}); /* the bytes F0 9F */
    static const int32_t emoji[] = {256, 0x91, 0x8D}, cut[] = {256, 0x91, 97}, bad[] = {0xFF, 0xE2, 0xE2, 0x82, 0xAC},
                         end[] = {97, 0xE2, 0x82}, surrogate[] = {0xED, 0xA0, 0x80};
    ck_assert_str_eq(stream(tk, NULL, emoji, 3), "||\xf0\x9f\x91\x8d||");
    ck_assert_str_eq(stream(tk, NULL, cut, 3), "||\ufffd"
                                               "a||");
    ck_assert_str_eq(stream(tk, NULL, bad, 5), "\ufffd||\ufffd||\u20ac||");
    ck_assert_str_eq(stream(tk, NULL, end, 3), "a|||\ufffd|");
    ck_assert_str_eq(stream(tk, NULL, surrogate, 3), "|\ufffd\ufffd|\ufffd||");
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(special_tokens_are_skipped_unless_kept)
{
    struct tl_tokenizer *tk = open_file(&(struct file){.added = "[" ADDED(300, "<s>", ",\"special\":true") "]"});
    static const int32_t ids[] = {300, 97, 300};
    ck_assert_str_eq(stream(tk, NULL, ids, 3), "|a|||");
    ck_assert_str_eq(stream(tk, &(struct tl_detok_params){.keep_special = true}, ids, 3), "<s>|a|<s>||");
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(the_blank_at_the_start_is_stripped_once_and_not_in_mid_text)
{
    struct tl_tokenizer *tk = open_llama("\"byte_fallback\":true,", "null", LLAMA_NORMALIZER);
    static const int32_t ids[] = {1, 7, 4, 2, 3, 7};
    const char *piece;
    size_t n;
    ck_assert_str_eq(stream(tk, NULL, ids, 6), "|a| ||\u00e9| a||");
    ck_assert_str_eq(stream(tk, &(struct tl_detok_params){.mid_text = true}, ids, 6), "| a| ||\u00e9| a||");
    ck_assert(tl_tokenizer_piece(tk, 7, &piece, &n));
    ck_assert(n == 2 && memcmp(piece, " a", 2) == 0);
    ck_assert(tl_tokenizer_piece(tk, 2, &piece, &n));
    ck_assert(n == 1 && *piece == '\xc3');
    ck_assert(!tl_tokenizer_piece(tk, 8, &piece, &n));
    tl_tokenizer_free(tk);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("tokenizer");
    TCase *tc = tcase_create("tokenizer");
    SRunner *runner;
    int n_failed;
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, merges_apply_by_rank_and_from_the_left);
    tcase_add_test(tc, ignore_merges_takes_a_whole_piece_from_the_vocabulary);
    tcase_add_test(tc, each_split_behavior_cuts_its_own_way);
    tcase_add_test(tc, a_prefix_blank_is_added_only_where_there_is_none);
    tcase_add_test(tc, special_tokens_in_a_text_are_text_unless_asked_for);
    tcase_add_test(tc, the_longest_added_token_at_the_leftmost_place_wins);
    tcase_add_test(tc, added_tokens_strip_blanks_and_respect_words);
    tcase_add_test(tc, a_template_adds_its_tokens_and_a_second_one_goes_around_it);
    tcase_add_test(tc, nfc_composes_and_orders_marks);
    tcase_add_test(tc, unknown_characters_become_bytes_or_the_unknown_token);
    tcase_add_test(tc, metaspace_marks_the_beginning_as_its_scheme_says);
    tcase_add_test(tc, invalid_utf8_is_an_error_that_names_the_byte);
    tcase_add_test(tc, nul_is_a_character_like_any_other);
    tcase_add_test(tc, more_tokens_than_allowed_are_an_error);
    tcase_add_test(tc, a_mebibyte_of_anything_is_no_trouble);
    tcase_add_test(tc, threads_share_a_tokenizer);
    tcase_add_test(tc, interpreted_patterns_give_the_same_ids);
    tcase_add_test(tc, every_byte_has_its_token_and_comes_back);
    tcase_add_test(tc, no_such_id_has_no_piece_and_cannot_be_decoded);
    tcase_add_test(tc, a_character_waits_until_it_is_whole_or_hopeless);
    tcase_add_test(tc, special_tokens_are_skipped_unless_kept);
    tcase_add_test(tc, the_blank_at_the_start_is_stripped_once_and_not_in_mid_text);
    suite_add_tcase(suite, tc);
    runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    n_failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return n_failed ? 1 : 0;
}
