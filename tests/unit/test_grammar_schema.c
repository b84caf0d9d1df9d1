/* JSON schemas as grammars. The wide net is tests/grammar; here is what it cannot know: refusals, limits, liberties. */
#include <check.h>

#include "grammar_check.h"
#include "suite.h"

#include <stdio.h>
#include <time.h>

#define SCHEMA TL_GRAMMAR_JSON_SCHEMA

START_TEST(objects_keep_order_and_hold_what_they_declare)
{
    check_texts(SCHEMA,
                "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{\"type\":[\"string\","
                "\"null\"]},\"c\":true},\"required\":[\"b\"]}",
                TEXTS("{\"b\":null}", "{\"a\":1,\"b\":\"x\"}", " {\n  \"b\": \"\",\n  \"c\": [1, {}]\n}", NULL, "{}",
                      "{\"a\":1}", "{\"b\":null,\"a\":1}", "{\"b\":null,\"d\":1}", "{\"b\":null,\"b\":null}",
                      "{\"b\":null,}", "{\"a\":1.0,\"b\":null}"));
    check_texts(SCHEMA, "{\"properties\":{\"ab\":{\"const\":1}},\"additionalProperties\":{\"const\":2}}",
                TEXTS("{}", "{\"ab\":1}", "{\"ab\":1,\"a\":2,\"abc\":2,\"\":2}", "{\"x\\u0041\":2}", NULL, "{\"ab\":2}",
                      "{\"\\u0061b\":2}", "{\"a\\u0062\":2}"));
    check_texts(SCHEMA, "{\"type\":\"object\"}", TEXTS("{}", "{\"a\":{\"b\":[]}}", NULL, "[]", "1"));
    check_texts(
        SCHEMA,
        "{\"allOf\":[{\"$ref\":\"#/$defs/"
        "x\"},{\"properties\":{\"b\":{\"const\":2}},\"required\":[\"b\"]}],\"$defs\":{\"x\":{\"type\":\"object\","
        "\"properties\":{\"a\":{\"const\":1}}}}}",
        TEXTS("{\"a\":1,\"b\":2}", "{\"b\":2}", NULL, "{\"a\":1}", "{}"));
}
END_TEST

START_TEST(arrays_count_their_items)
{
    check_texts(SCHEMA, "{\"type\":\"array\",\"items\":{\"enum\":[1,2]},\"minItems\":2,\"maxItems\":3}",
                TEXTS("[1,2]", "[1, 1, 1]", NULL, "[]", "[1]", "[1,1,1,1]", "[3,1]", "[1 ,2]"));
    check_texts(SCHEMA,
                "{\"type\":\"array\",\"prefixItems\":[{\"const\":\"a\"},{\"const\":\"b\"}],\"items\":{\"type\":"
                "\"null\"},\"minItems\":1}",
                TEXTS("[\"a\"]", "[\"a\",\"b\"]", "[\"a\",\"b\",null,null]", NULL, "[]", "[\"b\"]", "[\"a\",null]"));
    check_texts(SCHEMA, "{\"type\":\"array\",\"items\":[{\"const\":1}],\"additionalItems\":false}",
                TEXTS("[]", "[1]", NULL, "[1,1]", "[2]"));
    check_texts(SCHEMA, "{\"type\":\"array\",\"maxItems\":0}", TEXTS("[]", "[ ]", NULL, "[1]"));
}
END_TEST

START_TEST(integers_keep_their_bounds)
{
    static const int bounds[][2] = {{0, 0},      {1, 9},    {-5, 5}, {7, 123},  {100, 999},
                                    {-1000, -3}, {95, 105}, {-9, 0}, {0, 1000}, {98, 2001}};
    for (size_t b = 0; b < sizeof(bounds) / sizeof(bounds[0]); b++) {
        char source[128], text[16];
        struct tl_grammar *g;
        snprintf(source, sizeof(source), "{\"type\":\"integer\",\"minimum\":%d,\"maximum\":%d}", bounds[b][0],
                 bounds[b][1]);
        g = must_compile(SCHEMA, source);
        for (int i = -1100; i <= 2100; i += i > -20 && i < 140 ? 1 : 7) {
            snprintf(text, sizeof(text), "%d", i);
            ck_assert_msg((judge(g, text) == 'y') == (i >= bounds[b][0] && i <= bounds[b][1]), "%s in %s", text,
                          source);
        }
        tl_grammar_free(g);
    }
    check_texts(SCHEMA, "{\"type\":\"integer\",\"format\":\"int32\",\"minimum\":-7}",
                TEXTS("-7", "2147483647", NULL, "-8", "2147483648"));
    check_texts(SCHEMA, "{\"type\":\"integer\",\"format\":\"int64\"}",
                TEXTS("-9223372036854775807", "9223372036854775807", NULL, "9223372036854775808"));
    check_texts(SCHEMA, "{\"type\":\"integer\",\"exclusiveMinimum\":2.5}",
                TEXTS("3", "10", "123456789012", NULL, "2", "-3", "0", "3.0"));
    check_texts(SCHEMA, "{\"type\":\"number\",\"exclusiveMinimum\":0,\"maximum\":10}",
                TEXTS("0.5", "0.001", "10", "9.999", "1.0", NULL, "0", "0.0", "10.5", "-1", "11", "1e1"));
    check_texts(SCHEMA, "{\"type\":\"number\",\"minimum\":-1}",
                TEXTS("-1", "-0.5", "0", "7.25", "1000000", NULL, "-1.5", "-2", "-0"));
}
END_TEST

START_TEST(strings_keep_pattern_format_and_length)
{
    check_texts(
        SCHEMA, "{\"type\":\"string\",\"minLength\":2,\"maxLength\":3}",
        TEXTS("\"ab\"", "\"é😀\"", "\"\\n\\u00e9x\"", "\"\\ud83d\\ude00a\"", NULL, "\"a\"", "\"abcd\"", "\"a\\ud83d\""));
    check_texts(SCHEMA, "{\"type\":\"string\",\"pattern\":\"^a\\\\d*\\\"?$\"}",
                TEXTS("\"a12\"", "\"a\\\"\"", NULL, "\"a\"\"", "\"xa\"", "\"a1x\""));
    check_texts(SCHEMA, "{\"type\":\"string\",\"pattern\":\"^[a-z]+$\",\"maxLength\":3}",
                TEXTS("\"a\"", "\"abc\"", NULL, "\"\"", "\"abcd\""));
    check_texts(SCHEMA, "{\"type\":\"string\",\"pattern\":\"b\"}", TEXTS("\"b\"", "\"abc\"", NULL, "\"\"", "\"ac\""));
    check_texts(SCHEMA, "{\"type\":\"string\",\"format\":\"date\"}",
                TEXTS("\"2024-02-29\"", "\"1999-12-31\"", NULL, "\"2023-02-29\"", "\"1900-02-29\"", "\"2024-04-31\"",
                      "\"0000-01-01\"", "\"2024-13-01\""));
    check_texts(SCHEMA, "{\"type\":\"string\",\"format\":\"date-time\"}",
                TEXTS("\"2024-02-29T23:59:59.123Z\"", "\"2024-01-01T00:00:00+01:00\"", NULL, "\"2024-01-01 00:00:00Z\"",
                      "\"2024-01-01T24:00:00Z\""));
}
END_TEST

START_TEST(alternatives_references_and_constants)
{
    check_texts(SCHEMA, "{\"anyOf\":[{\"type\":\"integer\"},{\"oneOf\":[{\"const\":\"x\"},{\"type\":\"boolean\"}]}]}",
                TEXTS("1", "\"x\"", "true", NULL, "\"y\"", "null"));
    check_texts(
        SCHEMA, "{\"enum\":[\"a\\\"b\",1.5,null,{\"k\":[1]},\"a\"],\"nullable\":true}",
        TEXTS("\"a\\\"b\"", "1.5", "null", "{\"k\":[1]}", "{ \"k\": [ 1 ] }", "\"a\"", NULL, "\"\"", "{\"k\":[2]}"));
    check_texts(SCHEMA, "{\"type\":\"string\",\"enum\":[\"a\",1]}", TEXTS("\"a\"", NULL, "1"));
    check_texts(SCHEMA,
                "{\"type\":\"object\",\"properties\":{\"v\":{\"type\":\"integer\"},\"next\":{\"anyOf\":[{\"$ref\":\"#"
                "\"},{\"type\":\"null\"}]}},\"required\":["
                "\"v\",\"next\"]}",
                TEXTS("{\"v\":1,\"next\":{\"v\":2,\"next\":null}}", NULL, "{\"v\":1}", "{\"v\":1,\"next\":{}}"));
    check_texts(
        SCHEMA,
        "{\"properties\":{\"a/b\":{\"type\":\"null\"},\"c\":{\"$ref\":\"#/properties/a~1b\"}},\"required\":[\"c\"]}",
        TEXTS("{\"c\":null}", NULL, "{\"c\":1}"));
}
END_TEST

START_TEST(nothing_is_ignored_silently)
{
    static const char *const cases[][2] = {
        {"{\"type\":\"object\",\"properties\":{\"a\":{\"if\":{}}}}", "#/properties/a/if"},
        {"{\"anyOf\":[{\"type\":\"string\"},{\"type\":\"array\",\"contains\":{}}]}", "#/anyOf/1/contains"},
        {"{\"type\":\"object\",\"properties\":{\"a~b/c\":{\"format\":\"regex\"}}}", "#/properties/a~0b~1c/format"},
        {"{\"type\":\"string\",\"minLength\":-1}", "#/minLength"},
        {"{\"type\":\"frog\"}", "#/type"},
        {"{\"type\":\"object\",\"additionalProperties\":false,\"required\":[\"a\"]}", "#/required"},
        {"{\"type\":\"object\",\"properties\":{\"a\":{}},\"minProperties\":2}", "#/minProperties"},
        {"{\"type\":\"number\",\"minimum\":0.5}", "#/minimum"},
        {"{\"const\":9007199254740995}", "2^53"},
        {"{\"properties\":{\"p\":{\"type\":\"string\",\"maxLength\":65536}}}", "'#/properties/p'"},
        {"{\"type\":\"integer\",\"format\":\"uint8\"}", "#/format"},
        {"{\"$ref\":\"#/a\",\"type\":\"string\"}", "#/type"},
        {"{\"minLength\":1,\"minItems\":1}", "more than one"},
        {"{\"anyOf\":[{\"type\":\"object\"}],\"required\":[\"a\"]}", "#/required"},
        {"{\"$defs\":{\"a\":{\"allOf\":[{\"$ref\":\"#/$defs/a\"},{}]}},\"$ref\":\"#/$defs/a\"}", "deeper"},
        {"{\"allOf\":[{\"properties\":{\"a\":{}}},{}],\"additionalProperties\":false}", "#/additionalProperties"},
        {"{\"$ref\":\"#/$defs/a\",\"additionalProperties\":{\"type\":\"null\"},"
         "\"$defs\":{\"a\":{\"properties\":{\"b\":{}}}}}",
         "#/additionalProperties"},
        {"{\"properties\":{\"a\":{\"$id\":\"http://a.b/c\",\"$ref\":\"#/$defs/x\"}},\"$defs\":{\"x\":{}}}",
         "#/properties/a/$id"},
        {"{\"$defs\":{\"a\":{\"properties\":{\"b\":{\"allOf\":[],\"$ref\":\"#/$defs/a\"}},\"required\":[]}},"
         "\"$ref\":\"#/$defs/a\",\"maxProperties\":9}",
         "#/properties/b"},
        {"{\"$defs\":{\"a\":{\"id\":\"c\",\"$defs\":{\"b\":{}}}},\"items\":{\"$ref\":\"#/$defs/a/$defs/b\"}}",
         "#/items/$ref"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        check_refused(SCHEMA, cases[i][0], TL_ERR_UNSUPPORTED_SCHEMA, cases[i][1]);
    check_refused(SCHEMA, "{\"type\":", TL_ERR_INVALID_GRAMMAR, "json_schema");
    check_refused(SCHEMA, "{\"type\":\"string\",\"type\":\"null\"}", TL_ERR_INVALID_GRAMMAR, "json_schema");
}
END_TEST

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

START_TEST(counts_follow_one_rule_at_every_depth)
{
    static const char *const forms[] = {"{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"maxItems\":",
                                        "{\"type\":\"string\",\"maxLength\":"};
    static const int counts[] = {1999, 2000, 10000, 65537};
    for (int f = 0; f < 2; f++)
        for (int c = 0; c < 4; c++)
            for (int depth = 0; depth < 3; depth++) {
                char source[512], inner[512];
                struct tl_grammar *g = NULL;
                double t = now_ms();
                snprintf(source, sizeof(source), "%s%d}", forms[f], counts[c]);
                for (int i = 0; i < depth; i++) {
                    strcpy(inner, source);
                    snprintf(source, sizeof(source), "{\"type\":\"object\",\"properties\":{\"p\":%.400s}}", inner);
                }
                ck_assert_int_eq(compile(&g, SCHEMA, source, NULL, NULL),
                                 counts[c] <= 65536 ? TL_OK : TL_ERR_UNSUPPORTED_SCHEMA);
                ck_assert(now_ms() - t < 2000);
                ck_assert(!g || tl_grammar_bytes(g) < 32u << 20);
                tl_grammar_free(g);
            }
}
END_TEST

START_TEST(wide_schemas_compile_and_run)
{
    char *source = malloc(1 << 20), *p = source, text[64];
    struct tl_grammar *g;
    p += sprintf(p, "{\"enum\":[");
    for (int i = 0; i < 10000; i++)
        p += sprintf(p, "%s\"value number %d\"", i ? "," : "", i * 7);
    strcpy(p, "]}");
    g = must_compile(SCHEMA, source);
    ck_assert_int_eq(judge(g, "\"value number 69993\""), 'y');
    ck_assert_int_eq(judge(g, "\"value number 69994\""), 'n');
    tl_grammar_free(g);
    p = source + sprintf(source, "{\"type\":\"object\",\"properties\":{");
    for (int i = 0; i < 200; i++)
        p += sprintf(p, "%s\"p%d\":{\"type\":\"integer\"}", i ? "," : "", i);
    strcpy(p, "}}");
    g = must_compile(SCHEMA, source);
    snprintf(text, sizeof(text), "{\"p3\":1,\"p77\":2,\"p199\":3}");
    ck_assert_int_eq(judge(g, text), 'y');
    ck_assert_int_eq(judge(g, "{\"p77\":1,\"p3\":2}"), 'n');
    tl_grammar_free(g);
    free(source);
}
END_TEST

START_TEST(hostile_schemas_are_refused_in_time)
{
    char *source = malloc(1 << 20), *p;
    double t = now_ms();
    p = source + sprintf(source, "{\"type\":\"object\",\"properties\":{");
    for (int i = 0; i < 40000; i++)
        p += sprintf(p, "%s\"%d\":true", i ? "," : "", i);
    strcpy(p, "}}");
    check_refused(SCHEMA, source, TL_ERR_UNSUPPORTED_SCHEMA, "too many names");
    p = source + sprintf(source, "{\"$defs\":{");
    for (int i = 0; i < 10000; i++)
        p += sprintf(p, "%s\"%d\":true", i ? "," : "", i);
    p += sprintf(p, "},\"anyOf\":[");
    for (int i = 0; i < 10000; i++)
        p += sprintf(p, "%s{\"$ref\":\"#/$defs/9999\"}", i ? "," : "");
    strcpy(p, "]}");
    check_refused(SCHEMA, source, TL_ERR_UNSUPPORTED_SCHEMA, "too many names");
    ck_assert_msg(now_ms() - t < 2000, "%.0f ms", now_ms() - t);
    free(source);
}
END_TEST

START_TEST(blanks_are_capped_wherever_they_may_stand)
{
    static const char text[] = "{\"a\":[1,{\"b\":\"x\"}],\"c\":{}}";
    static const enum tl_grammar_kind kinds[] = {TL_GRAMMAR_JSON_OBJECT, SCHEMA};
    struct tl_vocab_trie *v = test_vocab();
    for (int k = 0; k < 2; k++) {
        struct tl_grammar *g =
            must_compile(kinds[k], k ? "{\"type\":\"object\",\"properties\":{\"a\":{},\"c\":{}}}" : "");
        for (size_t i = 0; i <= sizeof(text) - 1; i++) {
            struct tl_matcher *m;
            int n = 0;
            ck_assert_int_eq(tl_matcher_create(&m, g, v, NULL), TL_OK);
            ck_assert_int_eq(tl_matcher_accept_bytes(m, text, i, NULL), TL_OK);
            if (i == 18) { /* inside "x" blanks are text */
                tl_matcher_free(m);
                continue;
            }
            while (n < 1000 && (tl_matcher_accept(m, '\n', NULL) == TL_OK || tl_matcher_accept(m, ' ', NULL) == TL_OK ||
                                tl_matcher_accept(m, '\t', NULL) == TL_OK))
                n++;
            ck_assert_msg(n <= 41 || strchr("\"abcx", text[i - 1]), "%d blanks after %.*s", n, (int)i, text);
            tl_matcher_free(m);
        }
        tl_grammar_free(g);
    }
    tl_vocab_trie_free(v);
}
END_TEST

START_TEST(masks_of_schemas_are_exact)
{
    static const char source[] = "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\",\"maxLength\":60},"
                                 "\"tags\":{\"type\":\"array\",\"items\":{\"$ref\":\"#\"}},"
                                 "\"n\":{\"type\":\"number\"}},\"additionalProperties\":{\"type\":\"boolean\"}}";
    static const char text[] =
        "{\"name\": \"some text of more than a few characters\",\"tags\":[{\"n\":1.5},{}],\n\"n\":-2e5,\"nam\":true}";
    struct tl_vocab_trie *v = test_vocab();
    struct tl_grammar *g = must_compile(SCHEMA, source);
    struct tl_matcher *m;
    uint32_t mask[N_WORDS];
    ck_assert_int_eq(tl_matcher_create(&m, g, v, NULL), TL_OK);
    for (size_t i = 0; i < sizeof(text) - 1; i++) {
        exact_mask(m, mask);
        ck_assert_int_eq(tl_matcher_accept_bytes(m, text + i, 1, NULL), TL_OK);
    }
    ck_assert(tl_matcher_is_done(m));
    tl_matcher_free(m);
    tl_grammar_free(g);
    tl_vocab_trie_free(v);
}
END_TEST

int main(void)
{
    const TTest *const cases[] = {objects_keep_order_and_hold_what_they_declare,
                                  arrays_count_their_items,
                                  integers_keep_their_bounds,
                                  strings_keep_pattern_format_and_length,
                                  alternatives_references_and_constants,
                                  nothing_is_ignored_silently,
                                  counts_follow_one_rule_at_every_depth,
                                  wide_schemas_compile_and_run,
                                  hostile_schemas_are_refused_in_time,
                                  blanks_are_capped_wherever_they_may_stand,
                                  masks_of_schemas_are_exact};
    return suite_main("grammar_schema", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL, 60);
}
