/* Bodies: the strict scan, the writer, the typed getters. */
#include "suite.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "http_status.h"
#include "ids.h"
#include "../../server/json.h" /* the engine has one of this name, too */
#include "prescan.h"

static enum tl_status scan(const char *text)
{
    struct tl_error err;
    return tl_prescan(text, strlen(text), 1000, &err);
}

START_TEST(one_object_of_the_grammar_passes)
{
    static const char *const good[] = {
        "{}",
        " {\t}\r\n",
        "{\"a\":1}",
        "{\"a\":[]}",
        "{\"a\":[1,2.5,-0,1e5,1E-5,-1.5e+3]}",
        "{\"a\":{\"a\":{}}}",
        "{\"a\":\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\ud83d\\ude00\"}",
        "{\"\":null,\"b\":true,\"c\":false}",
        "{\"\xc3\xa4\":\"\xf0\x9f\x98\x80\xe2\x82\xac\x7f\"}",
    };
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
        ck_assert_msg(scan(good[i]) == TL_OK, "%s", good[i]);
}
END_TEST

START_TEST(anything_else_is_refused)
{
    static const char *const bad[] = {
        "",
        " ",
        "[]",
        "1",
        "null",
        "\"x\"",
        "{",
        "}",
        "{}}",
        "{}x",
        "{}{}",
        "{\"a\"}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{,}",
        "{a:1}",
        "{'a':1}",
        "{\"a\":1 \"b\":2}",
        "{\"a\":[1,]}",
        "{\"a\":[1}",
        "{\"a\":[1 2]}",
        "{\"a\":01}",
        "{\"a\":1.}",
        "{\"a\":.1}",
        "{\"a\":+1}",
        "{\"a\":1e}",
        "{\"a\":-}",
        "{\"a\":0x1}",
        "{\"a\":NaN}",
        "{\"a\":Infinity}",
        "{\"a\":tru}",
        "{\"a\":nul}",
        "{\"a\":\"}",
        "{\"a\":\"\\\"}",
        "{\"a\":\"\\x\"}",
        "{\"a\":\"\\u12\"}",
        "{\"a\":\"\\u00g0\"}",
        "{\"a\":\"\\u0000\"}",
        "{\"a\":\"\\ud800\"}",
        "{\"a\":\"\\ud800\\u0041\"}",
        "{\"a\":\"\\udc00\"}",
        "{\"a\":\"\n\"}",
        "{\"a\":\"\xff\"}",
        "{\"a\":\"\xc0\xaf\"}",
        "{\"a\":\"\xe2\x82\"}",
        "{\"a\":\"\xed\xa0\x80\"}",
        "{\"a\":\"\xf4\x90\x80\x80\"}",
        "\xef\xbb\xbf{}",
        "{\"a\":1,\"a\":2}",
        "{\"a\":1,\"\\u0061\":2}",
        "{\"x\":{\"a\":1,\"a\":1}}",
        "/**/{}",
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        ck_assert_msg(scan(bad[i]) == TL_ERR_BAD_PARAM, "%s", bad[i]);
    ck_assert_int_eq(scan("{\"a\":{\"b\":1},\"c\":{\"b\":1}}"), TL_OK); /* the same key in two objects */
}
END_TEST

START_TEST(a_nul_byte_is_refused_anywhere)
{
    static const char text[] = "{\"ab\":\"cd\",\"e\":[1, true]}";
    char copy[sizeof(text)];
    struct tl_error err;
    for (size_t i = 0; i < sizeof(text) - 1; i++) {
        memcpy(copy, text, sizeof(text));
        copy[i] = '\0';
        ck_assert_msg(tl_prescan(copy, sizeof(text) - 1, 1000, &err) != TL_OK, "at %zu", i);
    }
}
END_TEST

START_TEST(every_cut_of_a_good_body_is_refused)
{
    static const char text[] = "{\"ab\":\"c\\u00e4\xc3\xa4\",\"e\":[1.5e3,true,{}],\"f\":null}";
    struct tl_error err;
    for (size_t n = 0; n < sizeof(text) - 1; n++) {
        char *exact = malloc(n ? n : 1); /* so that a sanitizer sees a read past the end */
        memcpy(exact, text, n);
        ck_assert_msg(tl_prescan(exact, n, 1000, &err) != TL_OK, "%zu bytes", n);
        free(exact);
    }
    ck_assert_int_eq(tl_prescan(text, sizeof(text) - 1, 1000, &err), TL_OK);
}
END_TEST

START_TEST(depth_values_and_numbers_are_bounded)
{
    struct tl_error err;
    struct tl_bytes b = {0};
    for (int depth = 1; depth <= 40; depth++) {
        b.n = 0;
        tl_bytes_str(&b, "{\"a\":");
        for (int i = 1; i < depth; i++)
            tl_bytes_str(&b, "[");
        tl_bytes_str(&b, "1");
        for (int i = 1; i < depth; i++)
            tl_bytes_str(&b, "]");
        tl_bytes_str(&b, "}");
        ck_assert_int_eq(tl_prescan(b.data, b.n, 1000, &err) == TL_OK, depth <= TL_PRESCAN_DEPTH_MAX);
    }
    ck_assert_int_eq(tl_prescan("{\"a\":[1,2]}", 11, 4, &err), TL_OK);
    ck_assert_int_eq(tl_prescan("{\"a\":[1,2]}", 11, 3, &err), TL_ERR_BAD_PARAM);
    b.n = 0;
    tl_bytes_str(&b, "{\"a\":1");
    for (int i = 0; i < 60; i++)
        tl_bytes_str(&b, "0");
    tl_bytes_str(&b, "}");
    ck_assert_int_eq(tl_prescan(b.data, b.n, 1000, &err), TL_ERR_BAD_PARAM);
    tl_bytes_free(&b);
}
END_TEST

START_TEST(many_keys_are_compared_quickly)
{
    struct tl_bytes b = {0};
    struct tl_error err;
    tl_bytes_str(&b, "{");
    for (int i = 0; i < 100000; i++)
        tl_bytes_fmt(&b, "\"%d\":0,", i);
    tl_bytes_str(&b, "\"99999\":1}");
    double t = tl_now_mono();
    ck_assert_int_eq(tl_prescan(b.data, b.n, 1000000, &err), TL_ERR_BAD_PARAM);
    ck_assert_msg(strstr(err.msg, "duplicate") != NULL, "%s", err.msg);
    ck_assert(tl_now_mono() - t < 1.0);
    tl_bytes_free(&b);
}
END_TEST

START_TEST(what_is_written_is_valid_json)
{
    struct tl_bytes b = {0};
    struct tl_jw w = {.b = &b};
    struct tl_error err;
    char all[256];
    for (int i = 0; i < 256; i++)
        all[i] = (char)i;
    tl_jw_obj(&w, NULL);
    tl_jw_strn(&w, "all", all + 1, 255);
    tl_jw_strn(&w, "k\"\\\n", "\xe2\x82\xac\xe2\x82", 5);
    tl_jw_uint(&w, "u", UINT64_MAX);
    tl_jw_int(&w, "i", INT64_MIN);
    tl_jw_num(&w, "nan", (double)NAN, 3);
    tl_jw_num(&w, "inf", (double)INFINITY, 3);
    tl_jw_num(&w, "big", 1e300, 3);
    tl_jw_num(&w, "x", 1.5, 3);
    tl_jw_arr(&w, "a");
    tl_jw_null(&w, NULL);
    tl_jw_bool(&w, NULL, true);
    tl_jw_obj(&w, NULL);
    tl_jw_obj_end(&w);
    tl_jw_arr_end(&w);
    tl_jw_str(&w, "none", NULL);
    tl_jw_obj_end(&w);
    ck_assert_msg(tl_prescan(b.data, b.n, 1000, &err) == TL_OK, "%s in %s", err.msg, tl_bytes_cstr(&b));
    ck_assert_ptr_nonnull(strstr(b.data, "\"u\":18446744073709551615,\"i\":-9223372036854775808"));
    ck_assert_ptr_nonnull(strstr(b.data, "\"nan\":null,\"inf\":null,\"big\":null,\"x\":1.500"));
    ck_assert_ptr_nonnull(strstr(b.data, "\xe2\x82\xac\xef\xbf\xbd"));
    tl_bytes_free(&b);
}
END_TEST

static struct tl_fields fields;
static struct tl_error error;

static void open_fields(const char *text)
{
    tl_fields_close(&fields);
    ck_assert_int_eq(tl_fields_open(&fields, text, strlen(text), &error), 0);
}

START_TEST(getters_name_the_field_and_stick)
{
    open_fields(
        "{\"i\":5,\"f\":1.5,\"big\":9007199254740993,\"huge\":1e400,\"s\":\"x\",\"n\":null,\"o\":{\"i\":\"y\"}}");
    ck_assert_int_eq(tl_field_int(&fields, "i", 0, 10, -1), 5);
    ck_assert_int_eq(tl_field_int(&fields, "n", 0, 10, -1), -1);
    ck_assert_int_eq(tl_field_int(&fields, "absent", 0, 10, -1), -1);
    ck_assert_str_eq(tl_field_str(&fields, "s", ""), "x");
    ck_assert_int_eq(fields.code, 0);
    tl_field_int(&fields, "i", 6, 10, -1);
    ck_assert_int_eq(fields.code, TL_ERR_OUT_OF_RANGE);
    ck_assert_str_eq(error.param, "i");
    tl_field_str(&fields, "f", NULL); /* the first mistake stays */
    ck_assert_str_eq(error.param, "i");

    static const struct {
        const char *name;
        int code;
    } wrong[] = {{"f", TL_CODE_INVALID_TYPE},
                 {"s", TL_CODE_INVALID_TYPE},
                 {"big", TL_ERR_OUT_OF_RANGE},
                 {"huge", TL_ERR_OUT_OF_RANGE},
                 {"o", TL_CODE_INVALID_TYPE}};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        fields.code = 0;
        tl_field_int(&fields, wrong[i].name, 0, 1000, 0);
        ck_assert_msg(fields.code == wrong[i].code, "%s: %d", wrong[i].name, fields.code);
        ck_assert_str_eq(error.param, wrong[i].name);
    }
    fields.code = 0;
    tl_field_num(&fields, "huge", -1e300, 1e300, 0);
    ck_assert_int_eq(fields.code, TL_ERR_OUT_OF_RANGE);
    fields.code = 0;
    struct tl_fields inner;
    ck_assert(tl_field_object(&fields, "o", "o.", &inner));
    tl_field_int(&inner, "i", 0, 1, 0);
    ck_assert_str_eq(error.param, "o.i");
    tl_fields_close(&fields);
}
END_TEST

START_TEST(request_ids_and_trace_contexts_are_checked)
{
    char id[TL_ULID_CHARS + 1], other[TL_ULID_CHARS + 1], trace[33], parent[17];
    tl_ulid(id);
    tl_ulid(other);
    ck_assert_int_eq(strlen(id), TL_ULID_CHARS);
    ck_assert_str_ne(id, other);
    ck_assert(tl_request_id_ok("a-B_9.:"));
    ck_assert(!tl_request_id_ok("") && !tl_request_id_ok("a b") && !tl_request_id_ok("\xc3\xa4") &&
              !tl_request_id_ok("a\n"));
    ck_assert(tl_traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", trace, parent));
    ck_assert_str_eq(trace, "4bf92f3577b34da6a3ce929d0e0e4736");
    ck_assert_str_eq(parent, "00f067aa0ba902b7");
    static const char *const bad[] = {"",
                                      "00-",
                                      "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0",
                                      "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
                                      "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
                                      "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                                      "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
                                      "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x",
                                      "00 4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        ck_assert_msg(!tl_traceparent(bad[i], trace, parent), "%s", bad[i]);
}
END_TEST

int main(void)
{
    const TTest *const cases[] = {
        one_object_of_the_grammar_passes,
        anything_else_is_refused,
        a_nul_byte_is_refused_anywhere,
        every_cut_of_a_good_body_is_refused,
        depth_values_and_numbers_are_bounded,
        many_keys_are_compared_quickly,
        what_is_written_is_valid_json,
        getters_name_the_field_and_stick,
        request_ids_and_trace_contexts_are_checked,
    };
    return suite_main("server_json", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL, 30);
}
