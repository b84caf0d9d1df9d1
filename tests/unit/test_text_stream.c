/* tests/unit/test_text_stream.c - stop strings and deltas, against a plain search in the whole text. */
#include "mem.h"
#include "rng.h"
#include "suite.h"
#include "text_stream.h"
#include "tokenizer_files.h"

/* ---- a tokenizer whose ids 0..255 are the bytes, and some longer pieces ---- */

enum {
    ID_AB = 256,
    ID_BC,
    ID_AAB,
    ID_ABCAB,
    ID_X_HALF, /* x and the first byte of an e with acute accent */
    ID_HALF_Y, /* its second byte and y */
    ID_EMOJI_HALF,
    ID_CABX,
    ID_A8,
    ID_SPECIAL,
    N_IDS
};

static struct tl_tokenizer *g_tok;

static void open_tokenizer(void)
{
    g_tok = open_file(&(struct file){
        .vocab = "\"ab\":256,\"bc\":257,\"aab\":258,\"abcab\":259,\"x\u00c3\":260,\"\u00a9y\":261,"
                 "\"\u00f0\u0141\":262,\"cabx\":263,\"aaaaaaaa\":264",
        .added = "[{\"id\":265,\"content\":\"<|stop|>\",\"special\":true}]",
    });
}

static void close_tokenizer(void)
{
    tl_tokenizer_free(g_tok);
    g_tok = NULL;
}

/* ---- helpers ---- */

static struct tl_text_stream *stream_with(const char *const *stops, int n_stops, bool include_stop)
{
    struct tl_stop_string list[TL_STOP_STRINGS_MAX];
    struct tl_text_stream *ts = NULL;
    struct tl_error err = {0};
    for (int i = 0; i < n_stops; i++)
        list[i] = (struct tl_stop_string){stops[i], strlen(stops[i])};
    struct tl_text_stream_params p = {
        .tokenizer = g_tok, .stops = list, .n_stops = n_stops, .include_stop = include_stop};
    enum tl_status st = tl_text_stream_create(&ts, &p, &err);
    ck_assert_msg(st == TL_OK, "%s", err.msg);
    return ts;
}

static const char *push(struct tl_text_stream *ts, int32_t id)
{
    static char delta[4096];
    const char *text;
    size_t n;
    ck_assert_int_eq(tl_text_stream_push(ts, id, &text, &n, NULL), TL_OK);
    ck_assert_uint_lt(n, sizeof(delta));
    memcpy(delta, text, n);
    delta[n] = 0;
    return delta;
}

static const char *flush(struct tl_text_stream *ts)
{
    static char delta[4096];
    const char *text;
    size_t n;
    ck_assert_int_eq(tl_text_stream_flush(ts, &text, &n, NULL), TL_OK);
    memcpy(delta, text, n);
    delta[n] = 0;
    return delta;
}

/* Every byte of text through a stream; what came out, and which stop. */
static int run(const char *text, const char *const *stops, int n_stops, bool include_stop, char *out)
{
    struct tl_text_stream *ts = stream_with(stops, n_stops, include_stop);
    int stopped;
    *out = 0;
    for (; *text; text++)
        strcat(out, push(ts, (unsigned char)*text));
    strcat(out, flush(ts));
    stopped = tl_text_stream_stopped(ts);
    tl_text_stream_free(ts);
    return stopped;
}

/* ---- cases ---- */

START_TEST(a_stop_string_over_token_borders_is_cut_and_never_shown)
{
    const char *const stops[] = {"cabx"};
    struct tl_text_stream *ts = stream_with(stops, 1, false);
    ck_assert_str_eq(push(ts, ID_AB), "ab");
    ck_assert_str_eq(push(ts, 'c'), "");
    ck_assert_str_eq(push(ts, ID_AB), "");
    ck_assert_uint_eq(tl_text_stream_held(ts), 3);
    ck_assert_str_eq(push(ts, ID_X_HALF), "");
    ck_assert_int_eq(tl_text_stream_stopped(ts), 0);
    ck_assert_str_eq(push(ts, 'z'), "");
    ck_assert_str_eq(flush(ts), "");
    tl_text_stream_free(ts);
}
END_TEST

START_TEST(text_after_a_stop_inside_the_same_token_is_cut)
{
    const char *const stops[] = {"bc"};
    struct tl_text_stream *ts = stream_with(stops, 1, false);
    ck_assert_str_eq(push(ts, ID_ABCAB), "a");
    ck_assert_int_eq(tl_text_stream_stopped(ts), 0);
    tl_text_stream_free(ts);
}
END_TEST

START_TEST(only_a_real_beginning_of_a_stop_is_held_back)
{
    char stop[201], out[1000];
    const char *const stops[] = {stop};
    memset(stop, 'a', 200);
    stop[199] = 'Z';
    stop[200] = 0;
    struct tl_text_stream *ts = stream_with(stops, 1, false);
    for (int i = 0; i < 20; i++)
        ck_assert_str_eq(push(ts, 'b'), "b");
    for (int i = 0; i < 150; i++)
        ck_assert_str_eq(push(ts, 'a'), "");
    ck_assert_uint_eq(strlen(push(ts, 'b')), 151); /* all of it at once */
    for (int i = 0; i < 199; i++)
        ck_assert_str_eq(push(ts, 'a'), "");
    ck_assert_str_eq(push(ts, 'a'), "a"); /* 199 of 200 still fit */
    ck_assert_str_eq(push(ts, 'Z'), "");
    ck_assert_int_eq(tl_text_stream_stopped(ts), 0);
    tl_text_stream_free(ts);
    ck_assert_int_eq(run("aaaa", stops, 1, false, out), -1);
    ck_assert_str_eq(out, "aaaa"); /* what was held comes out at the end */
}
END_TEST

START_TEST(the_first_complete_stop_wins_and_of_equal_ends_the_longest)
{
    char out[100];
    ck_assert_int_eq(run("xabcd", (const char *[]){"abc", "ab"}, 2, false, out), 1);
    ck_assert_str_eq(out, "x");
    ck_assert_int_eq(run("xabcd", (const char *[]){"c", "bc", "abc", "abc"}, 4, false, out), 2);
    ck_assert_str_eq(out, "x");
    ck_assert_int_eq(run("aaab", (const char *[]){"aab"}, 1, false, out), 0);
    ck_assert_str_eq(out, "a");
    ck_assert_int_eq(run("a\n\nb", (const char *[]){"\n\n", "\n"}, 2, false, out), 1);
    ck_assert_str_eq(out, "a");
    ck_assert_int_eq(run("ababac", (const char *[]){"abac", "bb"}, 2, false, out), 0);
    ck_assert_str_eq(out, "ab");
}
END_TEST

START_TEST(with_include_stop_the_text_ends_behind_the_stop_and_nothing_waits)
{
    const char *const stops[] = {"cab"};
    struct tl_text_stream *ts = stream_with(stops, 1, true);
    ck_assert_str_eq(push(ts, 'c'), "c");
    ck_assert_str_eq(push(ts, 'a'), "a");
    ck_assert_str_eq(push(ts, ID_BC), "b");
    ck_assert_int_eq(tl_text_stream_stopped(ts), 0);
    tl_text_stream_free(ts);
}
END_TEST

START_TEST(characters_are_never_split_and_broken_ones_are_replaced)
{
    const char *const stops[] = {"\xC3\xA9y!"};
    struct tl_text_stream *ts = stream_with(stops, 1, false);
    ck_assert_str_eq(push(ts, ID_X_HALF), "x");
    ck_assert_str_eq(push(ts, ID_HALF_Y), ""); /* "e acute, y" begins the stop */
    ck_assert_str_eq(push(ts, '?'), "\xC3\xA9y?");
    ck_assert_str_eq(push(ts, ID_EMOJI_HALF), "");
    ck_assert_str_eq(push(ts, 'a'), "\xEF\xBF\xBD"
                                    "a");
    ck_assert_str_eq(push(ts, ID_EMOJI_HALF), "");
    ck_assert_str_eq(flush(ts), "\xEF\xBF\xBD");
    ck_assert_int_eq(tl_text_stream_stopped(ts), -1);
    tl_text_stream_free(ts);
}
END_TEST

START_TEST(a_replacement_made_by_the_flush_can_complete_a_stop)
{
    const char *const stops[] = {"a\xEF\xBF\xBD"};
    struct tl_text_stream *ts = stream_with(stops, 1, false);
    push(ts, 'a');
    ck_assert_str_eq(push(ts, ID_EMOJI_HALF), "");
    ck_assert_str_eq(flush(ts), "");
    ck_assert_int_eq(tl_text_stream_stopped(ts), 0);
    tl_text_stream_free(ts);
}
END_TEST

START_TEST(special_tokens_are_text_only_if_asked_for)
{
    struct tl_stop_string stop = {"stop|>", 6};
    struct tl_text_stream_params p = {.tokenizer = g_tok, .stops = &stop, .n_stops = 1};
    struct tl_text_stream *ts = NULL;
    ck_assert_int_eq(tl_text_stream_create(&ts, &p, NULL), TL_OK);
    ck_assert_str_eq(push(ts, ID_SPECIAL), "");
    ck_assert_int_eq(tl_text_stream_stopped(ts), -1);
    tl_text_stream_free(ts);
    p.detok.keep_special = true;
    ck_assert_int_eq(tl_text_stream_create(&ts, &p, NULL), TL_OK);
    ck_assert_str_eq(push(ts, ID_SPECIAL), "<|");
    ck_assert_int_eq(tl_text_stream_stopped(ts), 0);
    tl_text_stream_free(ts);
}
END_TEST

/* Random texts over few letters, random stops, random tokens: the same as a search in the whole text. */
START_TEST(deltas_equal_a_search_in_the_whole_text)
{
    static const int32_t ids[] = {'a',    'b',      'c',     'x',   ID_AB,     ID_BC,
                                  ID_AAB, ID_ABCAB, ID_CABX, ID_A8, ID_X_HALF, ID_HALF_Y};
    uint64_t r = 0;
    for (int round = 0; round < 6000; round++) {
        char stop_bytes[4][16], whole[2000] = "", got[2000] = "", want[2000];
        const char *stops[4];
        int32_t seq[60];
        int n_stops = (int)(tl_rng_u64(1, 2, r++) % 5), n = (int)(tl_rng_u64(1, 2, r++) % 60), stopped, best = -1;
        size_t end = SIZE_MAX, n_want;
        const bool include = tl_rng_u64(1, 2, r++) % 4 == 0;
        for (int i = 0; i < n_stops; i++) {
            int len = 1 + (int)(tl_rng_u64(1, 2, r++) % 7);
            for (int j = 0; j < len; j++)
                stop_bytes[i][j] = "abcx"[tl_rng_u64(1, 2, r++) % (round % 2 ? 4 : 2)];
            stop_bytes[i][len] = 0;
            stops[i] = stop_bytes[i];
        }
        struct tl_text_stream *plain = stream_with(NULL, 0, false), *ts = stream_with(stops, n_stops, include);
        for (int i = 0; i < n; i++) {
            seq[i] = ids[tl_rng_u64(1, 2, r++) % (sizeof(ids) / sizeof(ids[0]))];
            strcat(whole, push(plain, seq[i]));
        }
        strcat(whole, flush(plain));
        for (int i = 0; i < n_stops; i++) {
            const char *at = strstr(whole, stops[i]);
            size_t e = at ? (size_t)(at - whole) + strlen(stops[i]) : SIZE_MAX;
            if (at && (e < end || (e == end && strlen(stops[i]) > strlen(stops[best])))) {
                end = e;
                best = i;
            }
        }
        n_want = best < 0 ? strlen(whole) : end - (include ? 0 : strlen(stops[best]));
        memcpy(want, whole, n_want);
        want[n_want] = 0;
        for (int i = 0; i < n; i++) {
            strcat(got, push(ts, seq[i]));
            ck_assert_msg(strncmp(want, got, strlen(got)) == 0, "\"%s\" was shown of \"%s\"", got, want);
        }
        strcat(got, flush(ts));
        stopped = tl_text_stream_stopped(ts);
        ck_assert_str_eq(got, want);
        ck_assert_int_eq(stopped, best);
        tl_text_stream_free(plain);
        tl_text_stream_free(ts);
    }
}
END_TEST

START_TEST(without_a_tokenizer_there_are_ids_only)
{
    struct tl_stop_string stop = {"a", 1};
    struct tl_text_stream_params p = {0};
    struct tl_text_stream *ts = NULL;
    struct tl_error err = {0};
    ck_assert_int_eq(tl_text_stream_create(&ts, &p, NULL), TL_OK);
    ck_assert_str_eq(push(ts, 123456), "");
    ck_assert_str_eq(flush(ts), "");
    tl_text_stream_free(ts);
    p.stops = &stop;
    p.n_stops = 1;
    ts = (void *)&p;
    ck_assert_int_eq(tl_text_stream_create(&ts, &p, &err), TL_ERR_UNSUPPORTED);
    ck_assert_ptr_null(ts);
    ck_assert_str_eq(err.param, "stop");
}
END_TEST

START_TEST(bad_stops_are_refused_by_name)
{
    static char long_stop[TL_STOP_STRING_BYTES_MAX + 1];
    const struct tl_stop_string bad[] = {{"", 0}, {long_stop, sizeof(long_stop)}, {"a\xC3", 2}, {"\xFF", 1}};
    struct tl_stop_string many[TL_STOP_STRINGS_MAX + 1], fine[] = {{"a\0b", 3}, {long_stop, sizeof(long_stop) - 1}};
    struct tl_text_stream *ts = NULL;
    struct tl_error err = {0};
    for (int i = 0; i < 4; i++) {
        struct tl_text_stream_params p = {.tokenizer = g_tok, .stops = &bad[i], .n_stops = 1};
        ck_assert_int_eq(tl_text_stream_create(&ts, &p, &err), i < 2 ? TL_ERR_OUT_OF_RANGE : TL_ERR_BAD_PARAM);
        ck_assert_str_eq(err.param, "stop");
        ck_assert_ptr_null(ts);
    }
    for (int i = 0; i <= TL_STOP_STRINGS_MAX; i++)
        many[i] = fine[0];
    struct tl_text_stream_params p = {.tokenizer = g_tok, .stops = many, .n_stops = TL_STOP_STRINGS_MAX + 1};
    ck_assert_int_eq(tl_text_stream_check(&p, &err), TL_ERR_OUT_OF_RANGE);
    p.n_stops = TL_STOP_STRINGS_MAX;
    ck_assert_int_eq(tl_text_stream_check(&p, NULL), TL_OK);
    p.stops = fine;
    p.n_stops = 2;
    ck_assert_int_eq(tl_text_stream_create(&ts, &p, NULL), TL_OK);
    ck_assert_str_eq(push(ts, 'a'), "");
    push(ts, 0);
    push(ts, 'b');
    ck_assert_int_eq(tl_text_stream_stopped(ts), 0);
    tl_text_stream_free(ts);
}
END_TEST

START_TEST(an_unknown_token_changes_nothing)
{
    const char *text;
    size_t n;
    struct tl_text_stream *ts = stream_with((const char *[]){"abc"}, 1, false);
    push(ts, ID_AB);
    ck_assert_int_eq(tl_text_stream_push(ts, N_IDS + 5, &text, &n, NULL), TL_ERR_TOKEN_OUT_OF_VOCAB);
    ck_assert_uint_eq(n, 0);
    ck_assert_str_eq(push(ts, 'b'), "abb");
    tl_text_stream_free(ts);
}
END_TEST

#ifdef TL_TEST_HOOKS
START_TEST(a_failed_allocation_leaves_nothing_behind)
{
    const struct tl_stop_string stops[] = {{"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab", 48}};
    struct tl_text_stream_params p = {.tokenizer = g_tok, .stops = stops, .n_stops = 1};
    bool done = false;
    for (int n = 1; !done; n++) {
        struct tl_text_stream *ts = (void *)&p;
        const int64_t live = tl_mem_live();
        const char *text;
        size_t bytes;
        enum tl_status st;
        tl_mem_fail_at(n);
        st = tl_text_stream_create(&ts, &p, NULL);
        if (st != TL_OK)
            ck_assert_ptr_null(ts);
        for (int i = 0; st == TL_OK && i < 200; i++)
            st = tl_text_stream_push(ts, ID_A8, &text, &bytes, NULL);
        if (st == TL_OK)
            st = tl_text_stream_flush(ts, &text, &bytes, NULL);
        done = st == TL_OK;
        tl_mem_fail_at(0);
        ck_assert(done || st == TL_ERR_NO_HOST_MEMORY);
        tl_text_stream_free(ts);
        ck_assert_int_eq(tl_mem_live(), live);
        ck_assert_int_lt(n, 50);
    }
}
END_TEST
#endif

int main(void)
{
    const TTest *const cases[] = {
        a_stop_string_over_token_borders_is_cut_and_never_shown,
        text_after_a_stop_inside_the_same_token_is_cut,
        only_a_real_beginning_of_a_stop_is_held_back,
        the_first_complete_stop_wins_and_of_equal_ends_the_longest,
        with_include_stop_the_text_ends_behind_the_stop_and_nothing_waits,
        characters_are_never_split_and_broken_ones_are_replaced,
        a_replacement_made_by_the_flush_can_complete_a_stop,
        special_tokens_are_text_only_if_asked_for,
        deltas_equal_a_search_in_the_whole_text,
        without_a_tokenizer_there_are_ids_only,
        bad_stops_are_refused_by_name,
        an_unknown_token_changes_nothing,
#ifdef TL_TEST_HOOKS
        a_failed_allocation_leaves_nothing_behind,
#endif
    };
    return suite_main("text_stream", cases, sizeof(cases) / sizeof(cases[0]), open_tokenizer, close_tokenizer, 120);
}
