/* Tensor files and the strict JSON reader below them: what is read, and every kind of damage has its own sentence. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "json.h"
#include "mem.h"
#include "safetensors.h"
#include "temp_dir.h"

#include <cjson/cJSON.h>

static char dir[TEMP_PATH];

static void setup(void) { temp_dir_make(dir); }
static void teardown(void) { temp_dir_remove(dir); }

static const char good[] = "{\"__metadata__\":{\"format\":\"pt\"},"
                           "\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
                           "\"a\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[24,32]},"
                           "\"empty\":{\"dtype\":\"F16\",\"shape\":[0,7],\"data_offsets\":[32,32]}}";

START_TEST(a_good_file_is_listed_by_name_with_shapes_and_places)
{
    struct tl_tensors *ts;
    struct tl_error err;
    char shape[64];
    float data[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    temp_safetensors(dir, "model.safetensors", good, data, sizeof(data));
    ck_assert_msg(tl_tensors_open(&ts, dir, &err) == TL_OK, "%s", err.msg);
    ck_assert_int_eq(tl_tensors_count(ts), 3);
    ck_assert_str_eq(tl_tensors_at(ts, 0)->name, "a");
    ck_assert_str_eq(tl_tensors_at(ts, 2)->name, "empty");
    const struct tl_tensor *b = tl_tensors_find(ts, "b");
    ck_assert_ptr_nonnull(b);
    ck_assert_int_eq(b->dtype, TL_DT_F32);
    ck_assert_int_eq(b->n_elements, 6);
    ck_assert_str_eq(tl_tensor_shape(b, shape, sizeof(shape)), "[2, 3]");
    float third;
    memcpy(&third, b->data + 8, 4);
    ck_assert(third == 3);
    tl_tensors_drop(ts, b); /* the pages come back when read again */
    memcpy(&third, b->data + 8, 4);
    ck_assert(third == 3);
    ck_assert_ptr_null(tl_tensors_find(ts, "c"));
    tl_tensors_free(ts);
}
END_TEST

static const struct {
    const char *header;
    size_t n_data;
    const char *says;
} damages[] = {
    {"", 0, "not valid JSON"},
    {"[]", 0, "not a JSON object"},
    {"{\"a\":1}", 0, "is not an object"},
    {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "tensor 'a' has no dtype"},
    {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "tensor 'a' has no shape"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "has 0 data_offsets, expected are 2"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4,
     "has data_offsets [4, 0], expected are two"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", 4, "has 3 data_offsets, expected are 2"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4,
     "has data_offsets [-4, 0], expected are two"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,1e300]}}", 4,
     "has data_offsets [0, 1e+300], expected are two"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0.5,4.5]}}", 8,
     "has data_offsets [0.5, 4.5], expected are two"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 4, "ends at byte 8 of the data, but only 4"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", 8,
     "has 8 bytes, but its shape has 3 elements of 4"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4,
     "dimension 0 of tensor 'a' is -1, allowed are whole numbers from 0 to 2^53"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[\"1\"],\"data_offsets\":[0,4]}}", 4, "is \"1\", allowed are whole numbers"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,4]}}", 4, "more than 2^63"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", 0,
     "is 4.61168601842739e+18, allowed"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4503599627370496,1024],\"data_offsets\":[0,0]}}", 0, "has 0 bytes"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4, "more than 8 dimensions"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_"
     "offsets\":[0,4]}}",
     4, "begins at byte 0 of the data, but the one before ends at 4"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8,
     "begins at byte 4 of the data, but the one before ends at 0"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 9, "the tensors end at byte"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_"
     "offsets\":[4,8]}}",
     8, "key 'a' is there twice"},
};

START_TEST(every_kind_of_damage_has_its_own_sentence)
{
    struct tl_tensors *ts = (struct tl_tensors *)1;
    struct tl_error err;
    size_t n;
    uint8_t *file = make_safetensors(damages[_i].header, NULL, damages[_i].n_data, &n);
    ck_assert_int_eq(tl_tensors_open_bytes(&ts, file, n, &err), TL_ERR_BAD_FILE);
    ck_assert_msg(strstr(err.msg, damages[_i].says) != NULL, "'%s' does not say '%s'", err.msg, damages[_i].says);
    ck_assert_ptr_null(ts);
    free(file);
}
END_TEST

START_TEST(a_file_cut_anywhere_is_refused)
{
    struct tl_tensors *ts;
    size_t n;
    uint8_t *file = make_safetensors(good, NULL, 32, &n);
    for (size_t cut = 0; cut < n; cut++) {
        uint8_t *part = malloc(cut ? cut : 1); /* of exactly this size, so that a sanitizer sees reads past the end */
        memcpy(part, file, cut);
        ck_assert_int_eq(tl_tensors_open_bytes(&ts, part, cut, NULL), TL_ERR_BAD_FILE);
        free(part);
    }
    free(file);
}
END_TEST

START_TEST(a_header_longer_than_the_file_or_the_limit_is_refused)
{
    struct tl_tensors *ts;
    struct tl_error err;
    uint8_t file[16] = {0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF};
    ck_assert_int_eq(tl_tensors_open_bytes(&ts, file, sizeof(file), &err), TL_ERR_BAD_FILE);
    ck_assert_ptr_nonnull(strstr(err.msg, "has 18446744073709551615 bytes, but only 8 follow"));
    memset(file, 0, 8);
    file[0] = 9;
    ck_assert_int_eq(tl_tensors_open_bytes(&ts, file, sizeof(file), &err), TL_ERR_BAD_FILE);
    ck_assert_ptr_nonnull(strstr(err.msg, "has 9 bytes, but only 8 follow"));
    char path[TEMP_PATH + 40];
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    temp_file(dir, "model.safetensors", "\1\0\0\4\0\0\0\0", 8); /* 64 MiB and 1, all of it there */
    ck_assert_int_eq(truncate(path, 8 + TL_TENSOR_HEADER_MAX + 1), 0);
    ck_assert_int_eq(tl_tensors_open(&ts, dir, &err), TL_ERR_BAD_FILE);
    ck_assert_ptr_nonnull(strstr(err.msg, "has 67108865 bytes, allowed are 67108864"));
}
END_TEST

START_TEST(an_unknown_dtype_is_no_error_until_it_is_used)
{
    struct tl_tensors *ts;
    struct tl_error err;
    size_t n;
    uint8_t *file =
        make_safetensors("{\"a\":{\"dtype\":\"F4_E2M1\",\"shape\":[3],\"data_offsets\":[0,2]}}", NULL, 2, &n);
    ck_assert_msg(tl_tensors_open_bytes(&ts, file, n, &err) == TL_OK, "%s", err.msg);
    ck_assert_int_eq(tl_tensors_at(ts, 0)->dtype, TL_DT_OTHER);
    ck_assert_str_eq(tl_tensors_at(ts, 0)->dtype_name, "F4_E2M1");
    tl_tensors_free(ts);
    free(file);
}
END_TEST

static const char one_a[] = "{\"a\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[0,4]}}";
static const char one_b[] = "{\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}";

static void write_index(const char *text) { temp_file(dir, "model.safetensors.index.json", text, strlen(text)); }

START_TEST(shards_are_found_through_the_index)
{
    struct tl_tensors *ts;
    struct tl_error err;
    temp_safetensors(dir, "m-1.safetensors", one_a, "abcd", 4);
    temp_safetensors(dir, "m-2.safetensors", one_b, "efgh", 4);
    write_index(
        "{\"metadata\":{\"total_size\":8},\"weight_map\":{\"b\":\"m-2.safetensors\",\"a\":\"m-1.safetensors\"}}");
    ck_assert_msg(tl_tensors_open(&ts, dir, &err) == TL_OK, "%s", err.msg);
    ck_assert_int_eq(tl_tensors_count(ts), 2);
    ck_assert_mem_eq(tl_tensors_find(ts, "b")->data, "efgh", 4);
    ck_assert_int_ne(tl_tensors_find(ts, "a")->file, tl_tensors_find(ts, "b")->file);
    tl_tensors_free(ts);
}
END_TEST

static const struct {
    const char *index;
    enum tl_status status;
    const char *says;
} bad_indexes[] = {
    {"{\"weight_map\":{\"a\":\"m-1.safetensors\",\"b\":\"m-3.safetensors\"}}", TL_ERR_NOT_FOUND, "m-3.safetensors"},
    {"{\"weight_map\":{\"a\":\"m-2.safetensors\"}}", TL_ERR_BAD_FILE, "tensor 'a' is not in 'm-2.safetensors'"},
    {"{\"weight_map\":{\"a\":\"m-1.safetensors\",\"c\":\"m-2.safetensors\"}}", TL_ERR_BAD_FILE, "tensor 'c' is not in"},
    {"{\"weight_map\":{\"a\":\"../m-1.safetensors\"}}", TL_ERR_BAD_FILE, "not a plain file name"},
    {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", TL_ERR_BAD_FILE, "not a plain file name"},
    {"{\"weight_map\":{\"a\":7}}", TL_ERR_BAD_FILE, "not a plain file name"},
    {"{\"weight_map\":{}}", TL_ERR_BAD_FILE, "'weight_map' is missing"},
    {"{}", TL_ERR_BAD_FILE, "'weight_map' is missing"},
    {"{\"weight_map\":{\"a\":\"m-1.safetensors\",\"b\":\"m-2.safetensors\",\"x\":\"m-4.safetensors\"}}",
     TL_ERR_BAD_FILE, "is in both"},
};

START_TEST(an_index_that_lies_is_refused)
{
    struct tl_tensors *ts;
    struct tl_error err;
    temp_safetensors(dir, "m-1.safetensors", one_a, "abcd", 4);
    temp_safetensors(dir, "m-2.safetensors", one_b, "efgh", 4);
    temp_safetensors(dir, "m-4.safetensors", one_b, "efgh", 4);
    write_index(bad_indexes[_i].index);
    ck_assert_int_eq(tl_tensors_open(&ts, dir, &err), bad_indexes[_i].status);
    ck_assert_msg(strstr(err.msg, bad_indexes[_i].says) != NULL, "'%s' does not say '%s'", err.msg,
                  bad_indexes[_i].says);
}
END_TEST

START_TEST(a_directory_without_tensors_says_what_was_looked_for)
{
    struct tl_tensors *ts;
    struct tl_error err;
    ck_assert_int_eq(tl_tensors_open(&ts, dir, &err), TL_ERR_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(err.msg, "neither model.safetensors nor"));
    temp_file(dir, "pytorch_model.bin", "PK", 2);
    ck_assert_int_eq(tl_tensors_open(&ts, dir, &err), TL_ERR_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(err.msg, "only pickled weights (pytorch_model.bin), which are not read"));
    temp_file(dir, "model.safetensors", "", 0);
    ck_assert_int_eq(tl_tensors_open(&ts, dir, &err), TL_ERR_BAD_FILE);
    ck_assert_ptr_nonnull(strstr(err.msg, "has 0 bytes"));
}
END_TEST

START_TEST(what_stands_in_for_weights_is_told_from_damage)
{
    static const char pointer[] = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n";
    struct tl_tensors *ts;
    struct tl_error err;
    char path[TEMP_PATH + 40];
    temp_file(dir, "model.safetensors", pointer, sizeof(pointer) - 1);
    ck_assert_int_eq(tl_tensors_open(&ts, dir, &err), TL_ERR_BAD_FILE);
    ck_assert_ptr_nonnull(strstr(err.msg, "a Git LFS pointer of"));
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    ck_assert_int_eq(unlink(path), 0);
    ck_assert_int_eq(symlink("../blobs/gone", path), 0);
    ck_assert_int_eq(tl_tensors_open(&ts, dir, &err), TL_ERR_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(err.msg, "links to a file that is not there"));
}
END_TEST

/* ---- JSON ---- */

static const struct {
    const char *text, *says;
} bad_json[] = {
    {"", "value is missing"},
    {"{} x", "something follows"},
    {"\xEF\xBB\xBF{}", "malformed"},
    {"[1,]", "malformed"},
    {"[01]", "not closed"},
    {"[1.]", "number is malformed"},
    {"[+1]", "malformed"},
    {"[1e]", "number is malformed"},
    {"[NaN]", "malformed"},
    {"[111111111111111111111111111111111111111111111111111111111111111]", "60 characters"},
    {"{\"a\":1,\"b\":{\"c\":1,\"c\":2}}", "key 'c' is there twice"},
    {"{\"a\\u0062\":1,\"ab\":2}", "key 'ab' is there twice"},
    {"{a:1}", "key is missing"},
    {"{\"a\" 1}", "':' is missing"},
    {"[\"\\u0000\"]", "NUL"},
    {"[\"\\uD800x\"]", "surrogate"},
    {"[\"\\uDC00\"]", "surrogate"},
    {"[\"\\uD83D\\uD83D\"]", "surrogate"},
    {"[\"\\uX000\"]", "bad \\u escape"},
    {"[\"\\q\"]", "unknown escape"},
    {"[\"a\nb\"]", "control character"},
    {"[\"\xC0\x80\"]", "not UTF-8"},
    {"[\"\xED\xA0\x80\"]", "not UTF-8"},
    {"[\"\xF4\x90\x80\x80\"]", "not UTF-8"},
    {"[\"\xE2\x82", "not UTF-8"},
    {"[\"abc", "no end"},
    {"[tru]", "malformed"},
    {"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]", "deeper than 32"},
};

START_TEST(json_that_a_lenient_parser_would_take_is_refused)
{
    struct cJSON *json = (struct cJSON *)1;
    struct tl_error err;
    ck_assert_int_eq(tl_json_parse(&json, bad_json[_i].text, strlen(bad_json[_i].text), "test", &err), TL_ERR_BAD_FILE);
    ck_assert_msg(strstr(err.msg, bad_json[_i].says) != NULL, "'%s' does not say '%s'", err.msg, bad_json[_i].says);
    ck_assert_ptr_null(json);
}
END_TEST

START_TEST(a_raw_nul_in_json_is_refused)
{
    struct cJSON *json;
    ck_assert_int_eq(tl_json_parse(&json, "[\"a\0b\"]", 7, "test", NULL), TL_ERR_BAD_FILE);
    ck_assert_int_eq(tl_json_parse(&json, "[1]\0", 4, "test", NULL), TL_ERR_BAD_FILE);
}
END_TEST

START_TEST(good_json_keeps_its_strings_whole)
{
    const char text[] = " {\"k\" : [\"\\uD83D\\uDE00\xE2\x82\xAC\\n\", -1.5e3, true, null, {}, []] } ";
    struct cJSON *json;
    struct tl_error err;
    ck_assert_msg(tl_json_parse(&json, text, sizeof(text) - 1, "test", &err) == TL_OK, "%s", err.msg);
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(json, "k");
    ck_assert_str_eq(list->child->valuestring, "\xF0\x9F\x98\x80\xE2\x82\xAC\n");
    ck_assert(list->child->next->valuedouble == -1500);
    tl_json_free(json);
}
END_TEST

START_TEST(getters_name_the_key_and_keep_the_first_mistake)
{
    const char text[] = "{\"i\":7,\"half\":0.5,\"big\":1e300,\"s\":\"x\",\"b\":true,\"null\":null,\"l\":[1,2]}";
    struct cJSON *json;
    struct tl_json_reader r;
    struct tl_error err;
    int64_t list[2];
    ck_assert_int_eq(tl_json_parse(&json, text, sizeof(text) - 1, "test", &err), TL_OK);
    tl_json_reader_init(&r, json, "test", &err);
    ck_assert_int_eq(tl_json_int(&r, "i", 0, 7), 7);
    ck_assert_int_eq(tl_json_int_or(&r, "null", 0, 7, 3), 3);
    ck_assert_int_eq(tl_json_int_or(&r, "absent", 0, 7, 4), 4);
    ck_assert_int_eq(tl_json_ints(&r, "l", 0, 9, list, 2), 2);
    ck_assert_int_eq(tl_json_ints(&r, "i", 0, 9, list, 2), 1);
    ck_assert(tl_json_num(&r, "half", 0, 1) == 0.5);
    ck_assert(tl_json_bool(&r, "b"));
    ck_assert_int_eq(r.st, TL_OK);
    tl_json_int(&r, "half", 0, 9);
    ck_assert_int_eq(r.st, TL_ERR_BAD_FILE);
    ck_assert_ptr_nonnull(strstr(err.msg, "'half' is 0.5, allowed are whole numbers"));
    ck_assert_str_eq(err.param, "half");
    tl_json_int(&r, "absent", 0, 9);
    ck_assert_ptr_nonnull(strstr(err.msg, "'half'"));

    tl_json_reader_init(&r, json, "test", &err);
    tl_json_int(&r, "i", 8, 9);
    ck_assert_ptr_nonnull(strstr(err.msg, "'i' is 7, allowed are 8 to 9"));
    tl_json_reader_init(&r, json, "test", &err);
    tl_json_int(&r, "big", 0, 9);
    ck_assert_ptr_nonnull(strstr(err.msg, "'big' is 1e+300, allowed are whole numbers"));
    tl_json_reader_init(&r, json, "test", &err);
    tl_json_str(&r, "i");
    ck_assert_ptr_nonnull(strstr(err.msg, "'i' is 7, allowed are strings"));
    tl_json_reader_init(&r, json, "test", &err);
    tl_json_ints(&r, "l", 0, 9, list, 1);
    ck_assert_ptr_nonnull(strstr(err.msg, "more than 1 entries"));
    tl_json_free(json);
}
END_TEST

#ifdef TL_TEST_HOOKS
START_TEST(a_failed_allocation_leaves_nothing_behind)
{
    struct tl_tensors *ts;
    cJSON_Hooks hooks = {tl_malloc, tl_free};
    enum tl_status st = TL_ERR_NO_HOST_MEMORY;
    temp_safetensors(dir, "m-1.safetensors", one_a, "abcd", 4);
    temp_safetensors(dir, "m-2.safetensors", one_b, "efgh", 4);
    write_index("{\"weight_map\":{\"b\":\"m-2.safetensors\",\"a\":\"m-1.safetensors\"}}");
    cJSON_InitHooks(&hooks);
    int64_t live = tl_mem_live();
    int n = 1;
    for (; st != TL_OK; n++) {
        tl_mem_fail_at(n);
        st = tl_tensors_open(&ts, dir, NULL);
        tl_mem_fail_at(0);
        if (st == TL_OK)
            break;
        ck_assert_int_eq(st, TL_ERR_NO_HOST_MEMORY);
        ck_assert_ptr_null(ts);
        ck_assert_int_eq(tl_mem_live(), live);
    }
    ck_assert_int_gt(n, 20);
    tl_tensors_free(ts);
    ck_assert_int_eq(tl_mem_live(), live);
    cJSON_InitHooks(NULL);
}
END_TEST
#endif

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

int main(void)
{
    Suite *suite = suite_create("safetensors");
    TCase *tc = tcase_create("safetensors");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, a_good_file_is_listed_by_name_with_shapes_and_places);
    tcase_add_loop_test(tc, every_kind_of_damage_has_its_own_sentence, 0, COUNT(damages));
    tcase_add_test(tc, a_file_cut_anywhere_is_refused);
    tcase_add_test(tc, a_header_longer_than_the_file_or_the_limit_is_refused);
    tcase_add_test(tc, an_unknown_dtype_is_no_error_until_it_is_used);
    tcase_add_test(tc, shards_are_found_through_the_index);
    tcase_add_loop_test(tc, an_index_that_lies_is_refused, 0, COUNT(bad_indexes));
    tcase_add_test(tc, a_directory_without_tensors_says_what_was_looked_for);
    tcase_add_test(tc, what_stands_in_for_weights_is_told_from_damage);
    tcase_add_loop_test(tc, json_that_a_lenient_parser_would_take_is_refused, 0, COUNT(bad_json));
    tcase_add_test(tc, a_raw_nul_in_json_is_refused);
    tcase_add_test(tc, good_json_keeps_its_strings_whole);
    tcase_add_test(tc, getters_name_the_key_and_keep_the_first_mistake);
#ifdef TL_TEST_HOOKS
    tcase_add_test(tc, a_failed_allocation_leaves_nothing_behind);
#endif
    suite_add_tcase(suite, tc);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int n_failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return n_failed ? 1 : 0;
}
