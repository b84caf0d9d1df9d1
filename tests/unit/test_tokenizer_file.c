/* tests/unit/test_tokenizer_file.c - what a tokenizer file may hold and what is refused; its patterns; lack of memory. */
#include "tokenizer_files.h"

#include "tokenizer_json.h"

#include <unistd.h>

/* ---- patterns ---- */

START_TEST(patterns_mean_what_they_mean_to_oniguruma)
{
    static const struct {
        const char *regex, *text;
        bool match;
    } cases[] = {
        {"\\s", "\u00a0", true},      {"\\s", "\u180e", false},      {"[\\S]", "\u180e", true},
        {"\\S", "\xc2\x85", false},   {"\\w", "\u0301", true},       {"\\w", "\u200d", false},
        {"\\w", "\u00b2", true},      {"[\\w]", "\u00b2", false},    {"\\W", "-", true},
        {"\\p{Han}", "\u4e00", true}, {"\\p{Han}", "\u3002", false}, {"\\u4e00", "\u4e00", true},
        {"a{,2}b", "aab", true},      {"^b", "a\nb", true},          {"a$", "a\nb", true},
        {"a.b", "a\nb", false},       {"\\bb", "a b", true},         {"\\bb", "ab", false},
        {"(?i:k)", "\u212a", true},   {"{x}", "{x}", true},          {"\\v", "\u2028", false},
        {"(?<=a)b", "ab", true},      {"[^\\s\\p{L}]", "1", true},   {"\\B-\\B", "--", true},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct tl_tk_pattern p = {.kind = TL_TK_REGEX};
        struct tl_tk_search s = {0};
        struct tl_error err = {0};
        bool found;
        size_t start, end, n = strlen(cases[i].text);
        enum tl_status st = tl_tk_regex_compile(&p.code, cases[i].regex, strlen(cases[i].regex), false, &err);
        ck_assert_msg(st == TL_OK, "%s: %s", cases[i].regex, err.msg);
        ck_assert_int_eq(tl_tk_search_next(&s, &p, cases[i].text, n, 0, &found, &start, &end, &err), TL_OK);
        ck_assert_msg(found == cases[i].match, "case %zu: %s", i, cases[i].regex);
        tl_tk_search_free(&s);
        tl_tk_pattern_clear(&p);
    }
}
END_TEST

START_TEST(patterns_that_mean_something_else_here_are_refused)
{
    static const char *const refused[] = {"[a[b]]",    "[a&&b]", "\\h",    "\\K",    "\\X",     "\\R",   "a{1,2}+",
                                          "a{2}?",     "(?m:a)", "(?x) a", "(a)\\1", "(?<n>a)", "\\xff", "[[:alpha:]]",
                                          "(*ACCEPT)", "[\\W]",  "\\pL",   "[]a]",   "\\C"};
    static const char *const bad[] = {"(", "[a", "a\\", "a**b)", "\\p{Nosuch}", "\\u4e"};
    pcre2_code *code = NULL;
    struct tl_error err;
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++)
        ck_assert_msg(tl_tk_regex_compile(&code, refused[i], strlen(refused[i]), false, &err) == TL_ERR_UNSUPPORTED,
                      "%s", refused[i]);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        ck_assert_msg(tl_tk_regex_compile(&code, bad[i], strlen(bad[i]), false, &err) != TL_OK, "%s", bad[i]);
    ck_assert_ptr_null(code);
}
END_TEST

START_TEST(a_pattern_that_explodes_is_an_error_and_no_crash)
{
    struct tl_tokenizer *tk = open_file(
        &(struct file){.pre = SEQUENCE(SPLIT("{\"Regex\":\"(?:a|a|b)+[cd]\"}", "Isolated", "false"), NO_WORDS)});
    static char text[400000];
    struct tl_encode_params p = {.text = text, .text_bytes = 60};
    struct tl_error err = {0};
    int32_t *ids = NULL;
    size_t n;
    memset(text, 'a', sizeof(text));
    ck_assert_int_eq(tl_tokenizer_encode(tk, &p, &ids, &n, &err), TL_ERR_UNSUPPORTED);
    ck_assert_ptr_null(ids);
    tl_tokenizer_free(tk);
    /* A deep but harmless one outgrows the machine stack of JIT code and is matched another way. */
    tk = open_file(&(struct file){.pre = SEQUENCE(SPLIT("{\"Regex\":\"(?:a|b)+\"}", "Isolated", "false"), NO_WORDS)});
    p.text_bytes = 100000;
    ck_assert_msg(tl_tokenizer_encode(tk, &p, &ids, &n, &err) == TL_OK, "%s", err.msg);
    ck_assert_uint_eq(n, 100000);
    tl_free(ids);
    tl_tokenizer_free(tk);
}
END_TEST

/* ---- files ---- */

START_TEST(a_wrong_file_is_refused_with_a_sentence_that_names_the_part)
{
    static const struct {
        struct file file;
        enum tl_status st;
        const char *says;
    } cases[] = {
        {{.vocab = "\"ab\":256,\"ab\":257"}, TL_ERR_BAD_FILE, "'ab' twice"},
        {{.vocab = "\"ab\":97"}, TL_ERR_BAD_FILE, "id 97 belongs to two tokens"},
        {{.vocab = "\"ab\":-1"}, TL_ERR_BAD_FILE, "'ab'"},
        {{.vocab = "\"ab\":2.5"}, TL_ERR_BAD_FILE, "'ab'"},
        {{.vocab = "\"ab\":2097152"}, TL_ERR_BAD_FILE, "whole number from 0 to 2097151"},
        {{.merges = "[\"a b\"]"}, TL_ERR_BAD_FILE, "model.merges[0]: 'a' + 'b'"},
        {{.merges = "[\"a\"]"}, TL_ERR_BAD_FILE, "model.merges[0] is not a pair"},
        {{.merges = "[[\"a\",\"b\",\"c\"]]"}, TL_ERR_BAD_FILE, "model.merges[0] is not a pair"},
        {{.merges = "[[\"a\",1]]"}, TL_ERR_BAD_FILE, "model.merges[0] is not a pair"},
        {{.merges = "{}"}, TL_ERR_BAD_FILE, "model.merges"},
        {{.model = "\"dropout\":0.1,"}, TL_ERR_UNSUPPORTED, "dropout"},
        {{.model = "\"continuing_subword_prefix\":\"##\","}, TL_ERR_UNSUPPORTED, "continuing_subword_prefix"},
        {{.model = "\"end_of_word_suffix\":\"</w>\","}, TL_ERR_UNSUPPORTED, "end_of_word_suffix"},
        {{.model = "\"unk_token\":\"<unk>\","}, TL_ERR_BAD_FILE, "unk_token"},
        {{.model = "\"byte_fallback\":1,"}, TL_ERR_BAD_FILE, "model.byte_fallback"},
        {{.model = "\"novelty\":1,"}, TL_ERR_UNSUPPORTED, "'novelty'"},
        {{.model = "\"type\":\"BPE\","}, TL_ERR_BAD_FILE, "'type' twice"},
        {{.normalizer = "{\"type\":\"Lowercase\"}"}, TL_ERR_UNSUPPORTED, "normalizer of type 'Lowercase'"},
        {{.normalizer = "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFKC\"}]}"}, TL_ERR_UNSUPPORTED, "'NFKC'"},
        {{.normalizer = "{}"}, TL_ERR_BAD_FILE, "normalizer has no type"},
        {{.normalizer = "[]"}, TL_ERR_BAD_FILE, "normalizer has no type"},
        {{.pre = "{\"type\":\"Whitespace\"}"}, TL_ERR_UNSUPPORTED, "pre_tokenizer of type 'Whitespace'"},
        {{.pre = "{\"type\":\"Digits\",\"individual\":true}"}, TL_ERR_UNSUPPORTED, "'individual'"},
        {{.pre = SPLIT("{\"Regex\":\"(\"}", "Isolated", "false")}, TL_ERR_BAD_FILE, "cannot be compiled"},
        {{.pre = SPLIT("{\"Regex\":\"[a[b]]\"}", "Isolated", "false")}, TL_ERR_UNSUPPORTED, "a set in a set"},
        {{.pre = SPLIT("{\"String\":\"\"}", "Isolated", "false")}, TL_ERR_BAD_FILE, "pattern"},
        {{.pre = SPLIT("{}", "Isolated", "false")}, TL_ERR_BAD_FILE, "pattern"},
        {{.pre = SPLIT("{\"String\":\"a\"}", "Sideways", "false")}, TL_ERR_UNSUPPORTED, "'Sideways'"},
        {{.pre = SPLIT("{\"String\":\"a\"}", "Removed", "0")}, TL_ERR_BAD_FILE, "invert"},
        {{.pre = "{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"last\"}"},
         TL_ERR_UNSUPPORTED,
         "prepend_scheme"},
        {{.post = "{\"type\":\"BertProcessing\"}"}, TL_ERR_UNSUPPORTED, "post_processor of type 'BertProcessing'"},
        {{.post = "{\"type\":\"TemplateProcessing\",\"single\":[],\"special_tokens\":{}}"},
         TL_ERR_UNSUPPORTED,
         "0 times"},
        {{.post =
              "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"x\"}}],\"special_tokens\":{}}"},
         TL_ERR_BAD_FILE,
         "'x' has no ids"},
        {{.post = "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"x\"}}],"
                  "\"special_tokens\":{\"x\":{\"ids\":[999]}}}"},
         TL_ERR_BAD_FILE,
         "'x' is not in the vocabulary"},
        {{.decoder = "{\"type\":\"WordPiece\"}"}, TL_ERR_UNSUPPORTED, "decoder of type 'WordPiece'"},
        {{.decoder = "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Fuse\"},{\"type\":\"ByteFallback\"}]}"},
         TL_ERR_UNSUPPORTED,
         "after Fuse"},
        {{.decoder = "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Fuse\"},{\"type\":\"Strip\",\"content\":\" "
                     "\",\"start\":0,"
                     "\"stop\":1}]}"},
         TL_ERR_UNSUPPORTED,
         "Strip after Fuse"},
        {{.added = "[" ADDED(300, "", "") "]"}, TL_ERR_BAD_FILE, "no content"},
        {{.added = "[" ADDED(5, "a", "") "]"}, TL_ERR_BAD_FILE, "'a' has id 97 in model.vocab and id 5"},
        {{.added = "[" ADDED(97, "<s>", "") "]"}, TL_ERR_BAD_FILE, "id 97 belongs to two tokens"},
        {{.added = "[" ADDED(300, "<s>", "") "," ADDED(300, "<t>", "") "]"}, TL_ERR_BAD_FILE, "id 300 twice"},
        {{.added = "[" ADDED(300, "<s>", "") "," ADDED(301, "<s>", "") "]"}, TL_ERR_BAD_FILE, "'<s>' twice"},
        {{.added = "[{\"content\":\"<s>\"}]"}, TL_ERR_BAD_FILE, "id of token"},
        {{.added = "{}"}, TL_ERR_BAD_FILE, "added_tokens is not a list"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *text = file_text(&cases[i].file);
        struct tl_tokenizer *tk = (struct tl_tokenizer *)g_json;
        struct tl_error err = {0};
        enum tl_status st = tl_tokenizer_open_memory(&tk, text, strlen(text), false, &err);
        ck_assert_msg(st == cases[i].st && strstr(err.msg, cases[i].says), "case %zu: %s: '%s' lacks '%s'", i,
                      tl_status_name(st), err.msg, cases[i].says);
        ck_assert_ptr_null(tk);
    }
}
END_TEST

START_TEST(another_model_type_is_named)
{
    static const char json[] = "{\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[[\"a\",0]]}}";
    struct tl_tokenizer *tk;
    struct tl_error err = {0};
    ck_assert_int_eq(tl_tokenizer_open_memory(&tk, json, sizeof(json) - 1, false, &err), TL_ERR_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(err.msg, "'Unigram'"));
}
END_TEST

START_TEST(a_missing_file_and_a_damaged_one_are_told_apart)
{
    char path[] = "/tmp/tl_tokenizer_XXXXXX";
    struct tl_tokenizer *tk;
    struct tl_error err = {0};
    int fd = mkstemp(path);
    FILE *f = fdopen(fd, "w");
    ck_assert_int_eq(tl_tokenizer_open(&tk, "/no/such/tokenizer.json", &err), TL_ERR_NOT_FOUND);
    ck_assert_int_ne(tl_tokenizer_open(&tk, "/", &err), TL_OK);
    fputs("{\"model\":", f);
    fflush(f);
    ck_assert_int_eq(tl_tokenizer_open(&tk, path, &err), TL_ERR_BAD_FILE);
    ck_assert_ptr_nonnull(strstr(err.msg, path));
    ck_assert_ptr_nonnull(strstr(err.msg, "at byte 9"));
    ck_assert_ptr_null(tk);
    rewind(f);
    fputs(file_text(&(struct file){0}), f);
    fclose(f);
    ck_assert_int_eq(tl_tokenizer_open(&tk, path, &err), TL_OK);
    tl_tokenizer_free(tk);
    remove(path);
}
END_TEST

START_TEST(a_models_tokenizer_fits_its_vocabulary)
{
    char dir[] = "/tmp/tl_tokenizer_XXXXXX", path[64];
    const struct file f = {.vocab = "\"ab\":299"};
    struct tl_tokenizer *tk = (struct tl_tokenizer *)1;
    struct tl_error err = {0};
    ck_assert_ptr_nonnull(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/tokenizer.json", dir);
    ck_assert_int_eq(tl_tokenizer_of_model(&tk, dir, 300, &err), TL_OK);
    ck_assert_ptr_null(tk); /* none is no error */
    ck_assert_int_eq(symlink("gone", path), 0);
    ck_assert_int_eq(tl_tokenizer_of_model(&tk, dir, 300, &err), TL_ERR_NOT_FOUND); /* one that is lost is */
    ck_assert_int_eq(unlink(path), 0);
    FILE *out = fopen(path, "w");
    fputs(file_text(&f), out);
    fclose(out);
    ck_assert_int_eq(tl_tokenizer_of_model(&tk, dir, 299, &err), TL_ERR_BAD_FILE);
    ck_assert_ptr_nonnull(strstr(err.msg, "ids up to 299, but the model's vocabulary has 299: 0 to 298"));
    ck_assert_ptr_null(tk);
    for (int vocab = 300; vocab < 302; vocab++) { /* rows that pad the vocabulary are fine */
        ck_assert_int_eq(tl_tokenizer_of_model(&tk, dir, vocab, &err), TL_OK);
        tl_tokenizer_free(tk);
    }
    unlink(path);
    rmdir(dir);
}
END_TEST

START_TEST(json_is_read_strictly)
{
    static const char *const good[] = {"null", " [1,-2.5e+3,0] ", "{\"a\":{\"b\":[true,false]}}",
                                       "\"\\u00e9\\ud83d\\ude00\\u0000\"", "[]"};
    static const char *const bad[] = {"",
                                      "nul",
                                      "[1,]",
                                      "{\"a\":1,}",
                                      "{a:1}",
                                      "[01]",
                                      "[1.]",
                                      "[.5]",
                                      "[+1]",
                                      "[1e]",
                                      "\"\x01\"",
                                      "\"\\x\"",
                                      "\"\\ud800\"",
                                      "\"\\udc00\"",
                                      "\"\\ud800\\u0041\"",
                                      "\"\\u12g4\"",
                                      "\"",
                                      "\"\\",
                                      "[1] 2",
                                      "[1",
                                      "{\"a\"}",
                                      "[\"\xff\"]",
                                      "\xef\xbb\xbf[]",
                                      "[NaN]",
                                      "-",
                                      "[1 2]"};
    char text[64], deep[2 * (TL_TKJSON_DEPTH_MAX + 1) + 1];
    struct tl_tkjson js;
    struct tl_error err;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        strcpy(text, good[i]);
        ck_assert_msg(tl_tkjson_parse(&js, text, strlen(text), &err) == TL_OK, "%s: %s", good[i], err.msg);
        tl_tkjson_free(&js);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        strcpy(text, bad[i]);
        ck_assert_msg(tl_tkjson_parse(&js, text, strlen(text), &err) == TL_ERR_BAD_FILE, "%s", bad[i]);
        ck_assert_ptr_null(js.nodes);
    }
    for (int depth = TL_TKJSON_DEPTH_MAX; depth <= TL_TKJSON_DEPTH_MAX + 1; depth++) {
        memset(deep, '[', (size_t)depth);
        memset(deep + depth, ']', (size_t)depth);
        ck_assert_int_eq(tl_tkjson_parse(&js, deep, 2 * (size_t)depth, &err),
                         depth <= TL_TKJSON_DEPTH_MAX ? TL_OK : TL_ERR_BAD_FILE);
        tl_tkjson_free(&js);
    }
    strcpy(text, good[3]);
    ck_assert_int_eq(tl_tkjson_parse(&js, text, strlen(text), &err), TL_OK);
    ck_assert_uint_eq(js.nodes[0].n, 7);
    ck_assert(memcmp(js.nodes[0].text, "\u00e9\U0001f600\0", 7) == 0);
    tl_tkjson_free(&js);
}
END_TEST

#ifdef TL_TEST_HOOKS
/* Open, encode and decode; false if an allocation failed on the way. */
static bool open_and_use(const char *json, struct tl_error *err)
{
    static const char text[] = "ab e\xcc\x81 <s> 12 [N] abcabcabc";
    struct tl_encode_params p = {
        .text = text, .text_bytes = sizeof(text) - 1, .add_special = true, .parse_special = true};
    struct tl_tokenizer *tk = (struct tl_tokenizer *)g_json;
    int32_t *ids = (int32_t *)g_json;
    char *back = g_json;
    size_t n = 0, bytes;
    enum tl_status st = tl_tokenizer_open_memory(&tk, json, strlen(json), false, err);
    ck_assert(st == TL_OK || tk == NULL);
    if (st == TL_OK) {
        st = tl_tokenizer_encode(tk, &p, &ids, &n, err);
        ck_assert(st == TL_OK || ids == NULL);
    }
    if (st == TL_OK) {
        st = tl_tokenizer_decode(tk, ids, n, NULL, &back, &bytes, err);
        ck_assert(st == TL_OK || back == NULL);
        tl_free(back);
        tl_free(ids);
    }
    tl_tokenizer_free(tk);
    ck_assert(st == TL_OK || st == TL_ERR_NO_HOST_MEMORY);
    return st == TL_OK;
}

START_TEST(a_failed_allocation_leaves_nothing_behind)
{
    static const char post[] =
        "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\",\"type_id\":0}},"
        "{\"Sequence\":{\"id\":\"A\",\"type_id\":0}},{\"SpecialToken\":{\"id\":\"<s>\",\"type_id\":0}}],"
        "\"special_tokens\":{\"<s>\":{\"id\":\"<s>\",\"ids\":[300],\"tokens\":[\"<s>\"]}}}";
    const struct file files[] = {
        {.vocab = VOCAB_AB,
         .merges = MERGES_AB,
         .normalizer = "{\"type\":\"NFC\"}",
         .post = post,
         .pre = SEQUENCE(SPLIT("{\"Regex\":\"\\\\d\"}", "MergedWithNext", "false"),
                         "{\"type\":\"ByteLevel\",\"add_prefix_space\":true}"),
         .added = "[" ADDED(300, "<s>", ",\"special\":true") "," ADDED(301, "[N]", ",\"normalized\":true") "]"},
        {.vocab = VOCAB_AB ",\"\":260",
         .merges = MERGES_AB,
         .pre = METASPACE("always"),
         .post = post,
         .normalizer = "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"[0-9]\"},\"content\":\"#\"}",
         .added = "[" ADDED(300, "<s>", ",\"special\":true") "]",
         .decoder = "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},"
                    "\"content\":\"A\"},"
                    "{\"type\":\"ByteFallback\"},{\"type\":\"Strip\",\"content\":\"x\",\"start\":1,\"stop\":1},{"
                    "\"type\":\"Fuse\"},"
                    "{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}]}"},
    };
    for (int k = 0; k < 2; k++) {
        char *json = strdup(file_text(&files[k]));
        int64_t live = tl_mem_live(), n = 1;
        struct tl_error err = {0};
        for (bool done = false; !done; n++) {
            tl_mem_fail_at(n);
            /* A success need not be the end: without memory for machine code patterns are interpreted. */
            done = open_and_use(json, &err) && tl_mem_requests() < n;
            tl_mem_fail_at(0);
            ck_assert_msg(tl_mem_live() == live, "allocation %lld leaks", (long long)n);
            ck_assert_int_lt(n, 10000);
        }
        ck_assert_int_gt(n, 30);
        free(json);
    }
}
END_TEST
#endif

int main(void)
{
    Suite *suite = suite_create("tokenizer_file");
    TCase *tc = tcase_create("tokenizer_file");
    SRunner *runner;
    int n_failed;
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, patterns_mean_what_they_mean_to_oniguruma);
    tcase_add_test(tc, patterns_that_mean_something_else_here_are_refused);
    tcase_add_test(tc, a_pattern_that_explodes_is_an_error_and_no_crash);
    tcase_add_test(tc, a_wrong_file_is_refused_with_a_sentence_that_names_the_part);
    tcase_add_test(tc, another_model_type_is_named);
    tcase_add_test(tc, a_missing_file_and_a_damaged_one_are_told_apart);
    tcase_add_test(tc, a_models_tokenizer_fits_its_vocabulary);
    tcase_add_test(tc, json_is_read_strictly);
#ifdef TL_TEST_HOOKS
    tcase_add_test(tc, a_failed_allocation_leaves_nothing_behind);
#endif
    suite_add_tcase(suite, tc);
    runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    n_failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return n_failed ? 1 : 0;
}
