/* Tables that must be whole: codes, routes, options, keys. */
#include "suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config.h"
#include "http_status.h"
#include "keys.h"
#include "routes.h"

START_TEST(every_code_has_a_row)
{
    for (int code = 1; code < TL_CODE_COUNT; code++) {
        const struct tl_code_row *row = tl_code_row(code);
        ck_assert_msg(row != tl_code_row(TL_ERR_INTERNAL) || code == TL_ERR_INTERNAL, "code %d has no row", code);
        ck_assert_msg(row->name && row->name[0], "code %d has no name", code);
        ck_assert_msg(row->http >= 400 && row->http < 600, "%s: %d", row->name, row->http);
        if (code < TL_STATUS_COUNT)
            ck_assert_str_eq(row->name, tl_status_name((enum tl_status)code));
    }
    ck_assert_ptr_eq(tl_code_row(0), tl_code_row(TL_ERR_INTERNAL));
    ck_assert_ptr_eq(tl_code_row(-5), tl_code_row(TL_ERR_INTERNAL));
    ck_assert_ptr_eq(tl_code_row(TL_CODE_COUNT), tl_code_row(TL_ERR_INTERNAL));
}
END_TEST

/* Clients of this API retry 408, 409, 429 and everything from 500 on by themselves: those rows must say what to do. */
START_TEST(what_clients_would_retry_says_whether_to)
{
    for (int code = 1; code < TL_CODE_COUNT; code++) {
        const struct tl_code_row *row = tl_code_row(code);
        bool retried = row->http == 408 || row->http == 409 || row->http == 429 || row->http >= 500;
        ck_assert_msg(retried == (row->retry != TL_RETRY_NO), "%s, HTTP %d", row->name, row->http);
    }
}
END_TEST

START_TEST(codes_that_clients_rely_on_keep_their_status)
{
    static const struct {
        int code;
        const char *name;
        int http;
        const char *type;
    } fixed[] = {
        {TL_ERR_CONTEXT_LENGTH, "context_length_exceeded", 400, "invalid_request_error"},
        {TL_ERR_LOOP_DEPTH, "loop_depth_mismatch", 422, "invalid_request_error"},
        {TL_ERR_NO_DEVICE_MEMORY, "out_of_device_memory", 507, "insufficient_storage_error"},
        {TL_CODE_GENERATION_MEMORY, "out_of_device_memory", 503, "unavailable_error"},
        {TL_ERR_OVERLOADED, "server_overloaded", 503, "unavailable_error"},
        {TL_ERR_DEVICE, "gpu_failed", 503, "unavailable_error"},
        {TL_ERR_CANCELLED, "request_cancelled", 409, "conflict_error"},
        {TL_CODE_INVALID_API_KEY, "invalid_api_key", 401, "authentication_error"},
        {TL_CODE_INSUFFICIENT_ROLE, "insufficient_role", 403, "permission_error"},
        {TL_CODE_MODEL_NOT_FOUND, "model_not_found", 404, "not_found_error"},
        {TL_CODE_RATE_LIMIT, "rate_limit_exceeded", 429, "rate_limit_error"},
        {TL_ERR_INTERNAL, "internal_error", 500, "server_error"},
    };
    for (size_t i = 0; i < sizeof(fixed) / sizeof(fixed[0]); i++) {
        const struct tl_code_row *row = tl_code_row(fixed[i].code);
        ck_assert_str_eq(row->name, fixed[i].name);
        ck_assert_int_eq(row->http, fixed[i].http);
        ck_assert_str_eq(tl_code_type(row->http), fixed[i].type);
    }
}
END_TEST

START_TEST(routes_are_found_by_path_and_method)
{
    char id[72], allow[128];
    const struct tl_route *r;
    for (int i = 0; (r = tl_route_at(i)); i++) {
        unsigned side = r->sides & TL_SIDE_PUBLIC ? TL_SIDE_PUBLIC : TL_SIDE_ADMIN;
        ck_assert_ptr_eq(tl_route_find(r->method, r->path, strlen(r->path), side, id, sizeof(id), allow), r);
        ck_assert_int_eq(tl_route_index(r), i);
        ck_assert(r->handle && r->help && r->help[0]);
        if (strncmp(r->path, "/admin", 6) == 0)
            ck_assert(r->sides == TL_SIDE_ADMIN && r->role == TL_ROLE_ADMIN);
    }
    ck_assert_ptr_nonnull(tl_route_find("GET", "/v1/models/a.b", 14, TL_SIDE_PUBLIC, id, sizeof(id), allow));
    ck_assert_str_eq(id, "a.b");
    ck_assert_ptr_nonnull(tl_route_find("HEAD", "/livez", 6, TL_SIDE_ADMIN, id, sizeof(id), allow));
    ck_assert_ptr_null(tl_route_find("GET", "/v1/models/", 11, TL_SIDE_PUBLIC, id, sizeof(id), allow));
    ck_assert_ptr_null(tl_route_find("GET", "/v1/models/a/b", 14, TL_SIDE_PUBLIC, id, sizeof(id), allow));
    ck_assert_ptr_null(tl_route_find("GET", "/metrics", 8, TL_SIDE_PUBLIC, id, sizeof(id), allow));
    ck_assert_ptr_null(tl_route_find("PUT", "/v1/requests/x", 14, TL_SIDE_PUBLIC, id, sizeof(id), allow));
    ck_assert_str_eq(allow, "GET, HEAD, DELETE");
}
END_TEST

static struct tl_config cfg;
static struct tl_error err;

static enum tl_status read_text(const char *text)
{
    tl_config_clear(&cfg);
    ck_assert_int_eq(tl_config_defaults(&cfg, &err), TL_OK);
    return tl_config_file_text(&cfg, text, strlen(text), "f", &err);
}

START_TEST(settings_are_read_and_checked)
{
    ck_assert_int_eq(
        read_text(
            "[limits]\nmax_body_bytes = 2M ; a comment\nheader_seconds = 1.5\n[server]\nhost = ::1\ninsecure = yes\n"),
        TL_OK);
    ck_assert_int_eq(cfg.max_body_bytes, 2 << 20);
    ck_assert_double_eq(cfg.header_seconds, 1.5);
    ck_assert_str_eq(cfg.host, "::1");
    ck_assert(cfg.insecure);
    static const char *const bad[] = {"[server]\nport = 1K\n",
                                      "[server]\nport = 99999999999999999999\n",
                                      "[server]\nport = 1 2\n",
                                      "[server]\nport = -\n",
                                      "[limits]\nmax_body_bytes = 1\n",
                                      "[limits]\nmax_body_bytes = 1T\n",
                                      "[limits]\nheader_seconds = 1e2\n",
                                      "[limits]\nheader_seconds = 1.2.3\n",
                                      "[x]\nport = 1\n",
                                      "[server\nport = 1\n",
                                      "[process]\nlog_level = in\n",
                                      "[process]\nlog_level = info|warn\n"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ck_assert_msg(read_text(bad[i]) != TL_OK, "%s", bad[i]);
        ck_assert_msg(strncmp(err.msg, "f:", 2) == 0, "%s", err.msg);
    }
    tl_config_clear(&cfg);
}
END_TEST

START_TEST(printed_settings_read_back)
{
    char *text = NULL, *again = NULL;
    size_t n = 0, m = 0;
    ck_assert_int_eq(read_text("[limits]\nmax_body_bytes = 5000\nidle_seconds = 0.25\n[model]\nmodel = /a b/c\n"),
                     TL_OK);
    FILE *f = open_memstream(&text, &n);
    tl_config_print(&cfg, f);
    fclose(f);
    ck_assert_msg(read_text(text) == TL_OK, "%s", err.msg);
    f = open_memstream(&again, &m);
    tl_config_print(&cfg, f);
    fclose(f);
    ck_assert_str_eq(text, again);
    free(text);
    free(again);
    tl_config_clear(&cfg);
}
END_TEST

/* SHA-256 of "test" */
#define HASH "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

START_TEST(keys_are_found_by_what_is_presented)
{
    struct tl_keys keys;
    double wait = 0;
    static const char text[] = "# people\n\nweb:" HASH ":acme:infer,cache:concurrent=3,rpm=60\r\n";
    ck_assert_msg(tl_keys_parse(&keys, text, sizeof(text) - 1, "k", &err) == TL_OK, "%s", err.msg);
    struct tl_key *key = tl_keys_find(&keys, "test");
    ck_assert_ptr_nonnull(key);
    ck_assert_str_eq(key->tenant, "acme");
    ck_assert_uint_eq(key->roles, TL_ROLE_INFER | TL_ROLE_CACHE);
    ck_assert_int_eq(key->concurrent, 3);
    ck_assert_ptr_null(tl_keys_find(&keys, "Test"));
    ck_assert_ptr_null(tl_keys_find(&keys, ""));
    int taken = 0;
    while (tl_key_take(key, 100, &wait))
        taken++;
    ck_assert_int_eq(taken, 10); /* a sixth of a minute's worth at once */
    ck_assert(wait > 0 && wait <= 1);
    ck_assert(tl_key_take(key, 101.1, &wait) && !tl_key_take(key, 101.1, &wait));
    tl_keys_free(&keys);
}
END_TEST

START_TEST(wrong_key_lines_name_their_place)
{
    static const char *const bad[] = {"a:b:c:d",
                                      "a:" HASH ":t:infer",
                                      ":" HASH ":t:infer:",
                                      "a:" HASH "0:t:infer:",
                                      "a:" HASH "::infer:",
                                      "a:" HASH ":t::",
                                      "a:" HASH ":t:infer,:x=1",
                                      "a:" HASH ":t:infer:rpm=",
                                      "a:" HASH ":t:infer:rpm=99999999",
                                      "a:" HASH ":t:infer:rpm=-1",
                                      "a:" HASH ":t:infer:\na:" HASH ":t:infer:",
                                      ""};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct tl_keys keys;
        ck_assert_msg(tl_keys_parse(&keys, bad[i], strlen(bad[i]), "k", &err) == TL_ERR_BAD_PARAM, "%s", bad[i]);
        ck_assert_int_eq(keys.n, 0);
        ck_assert(err.msg[0] == 'k' && strstr(err.msg, "9f86") == NULL);
    }
}
END_TEST

int main(void)
{
    const TTest *const cases[] = {
        every_code_has_a_row,
        what_clients_would_retry_says_whether_to,
        codes_that_clients_rely_on_keep_their_status,
        routes_are_found_by_path_and_method,
        settings_are_read_and_checked,
        printed_settings_read_back,
        keys_are_found_by_what_is_presented,
        wrong_key_lines_name_their_place,
    };
    return suite_main("server_tables", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL, 30);
}
