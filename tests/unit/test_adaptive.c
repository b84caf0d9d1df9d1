/* Adaptive depth: tokens stop where the original says they do, and what they skip changes nothing that is computed. */
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "json.h"
#include "suite.h"
#include "tiny_model.h"

#include <cjson/cJSON.h>

#define OURO   "tests/golden/ouro-tiny"
#define HUGINN "tests/golden/huginn-tiny"
#define VOCAB  97

struct seen {
    int n, loops[64];
    int32_t token[64];
    uint64_t hash[64];
    struct tl_usage usage;
    enum tl_finish finish;
};

static enum tl_verdict watch(void *arg, const struct tl_event *ev)
{
    struct seen *s = arg;
    if (ev->kind == TL_EVENT_TOKEN) {
        s->loops[s->n] = ev->n_loops;
        s->token[s->n] = ev->sampled->token;
        s->hash[s->n++] = ev->logits_hash;
    } else if (ev->kind == TL_EVENT_DONE) {
        s->usage = *ev->usage;
        s->finish = ev->finish;
    }
    return TL_GO_ON;
}

static void open_at(struct tiny *t, const char *dir, int step_rows)
{
    struct tl_model_params p = {.dir = dir, .device = "cpu", .n_threads = 1, .step_rows_max = step_rows};
    tiny_open_with(t, &p, NULL);
}

static struct tl_request request(struct seen *s, const int32_t *tokens, int n, int max_tokens, float threshold)
{
    struct tl_request r;
    memset(s, 0, sizeof(*s));
    tl_request_default(&r);
    r.tokens = tokens;
    r.n_tokens = n;
    r.max_tokens = max_tokens;
    r.adaptive = true;
    r.exit_threshold = threshold;
    r.sampling.temperature = 0;
    r.want_logits_hash = true;
    r.on_event = watch;
    r.arg = s;
    return r;
}

static void run(struct tiny *t, const struct tl_request *r)
{
    struct tl_job *j;
    struct tl_error err = {0};
    bool busy = true;
    ck_assert_msg(tl_sched_submit(t->s, r, &j, &err) == TL_OK, "%s", err.msg);
    while (busy)
        ck_assert_msg(tl_sched_step(t->s, &busy, &err) == TL_OK, "%s", err.msg);
}

static uint64_t hash_at(struct tiny *t, const int32_t *tokens, int n, int loops)
{
    float row[VOCAB];
    struct tl_error err;
    struct tl_logits_params p = {.tokens = tokens, .n_tokens = n, .n_loops = loops, .n_rows = 1, .logits = row};
    ck_assert_int_eq(tl_logits(t->m, &p, &err), TL_OK);
    return XXH3_64bits(row, sizeof(row));
}

START_TEST(exit_steps_are_those_of_the_original)
{
    static const char *const q_names[] = {"0.2", "0.5", "0.8", "1.0"};
    struct cJSON *g = NULL;
    char *text;
    size_t n_text;
    struct tiny t;
    int32_t tokens[8];
    ck_assert_int_eq(tl_file_read(&text, &n_text, OURO "/golden.json", 1 << 20, NULL), TL_OK);
    ck_assert_int_eq(tl_json_parse(&g, text, n_text, "golden.json", NULL), TL_OK);
    open_at(&t, OURO, 64);
    for (int i = 0; i < 8; i++)
        tokens[i] = cJSON_GetArrayItem(cJSON_GetObjectItem(g, "tokens"), i)->valueint;
    for (int q = 0; q < 4; q++) {
        const cJSON *want =
            cJSON_GetObjectItem(cJSON_GetObjectItem(cJSON_GetObjectItem(g, "q_exit"), q_names[q]), "exit_step_0based");
        for (int n = 1; n <= 8; n++) {
            struct seen s;
            struct tl_request r = request(&s, tokens, n, 1, (float)atof(q_names[q]));
            run(&t, &r);
            ck_assert_int_eq(s.loops[0], cJSON_GetArrayItem(want, n - 1)->valueint + 1);
        }
    }
    tl_json_free(g);
    tl_free(text);
    tiny_close(&t);
}
END_TEST

/* The reference computes everything: all loops of all tokens, then reads out where the gate says. */
static void check_against_everything(struct tiny *t, const int32_t *prompt, int n, float q, const struct seen *s)
{
    int32_t tokens[128];
    int loops = tl_model_info(t->m)->spec->loops_default;
    memcpy(tokens, prompt, (size_t)n * sizeof(*tokens));
    for (int i = 0; i < s->n; i++) {
        float gates[64];
        struct tl_error err;
        struct tl_logits_params p = {
            .tokens = tokens, .n_tokens = n + i, .n_loops = loops, .n_rows = 1, .gates = gates};
        int exit;
        ck_assert_int_eq(tl_logits(t->m, &p, &err), TL_OK);
        exit = tl_exit_step(gates, 1, loops, q) + 1;
        ck_assert_int_eq(s->loops[i], exit);
        ck_assert_uint_eq(s->hash[i], hash_at(t, tokens, n + i, exit));
        tokens[n + i] = s->token[i];
    }
}

START_TEST(skipped_work_changes_no_bit)
{
    static const float q[] = {0.3f, 0.5f, 0.6f, 0.8f, 1.0f};
    int32_t prompt[40];
    int64_t all, run_loops = 0, full = 0;
    for (int i = 0; i < 40; i++)
        prompt[i] = (i * 31 + 5) % VOCAB;
    for (int i = 0; i < 5; i++) {
        struct tiny t;
        struct seen s;
        struct tl_request r;
        open_at(&t, OURO, i == 2 ? 7 : 64); /* also in small chunks */
        r = request(&s, prompt, 20 + 4 * i, 40, q[i]);
        run(&t, &r);
        ck_assert_int_eq(s.n, 40);
        check_against_everything(&t, prompt, 20 + 4 * i, q[i], &s);
        all = (int64_t)(20 + 4 * i + 39) * tl_model_info(t.m)->spec->loops_default;
        ck_assert_int_le(s.usage.row_loops_run, all);
        run_loops += s.usage.row_loops_run;
        full += all;
        tiny_close(&t);
    }
    ck_assert_int_lt(run_loops, full); /* something was skipped */
}
END_TEST

START_TEST(a_batch_of_mixed_requests_changes_nothing)
{
    enum { N = 6 };
    struct tiny t;
    struct seen alone[N], together[N];
    struct tl_request r;
    struct tl_job *j;
    struct tl_error err;
    bool busy = true;
    int32_t prompt[60];
    for (int i = 0; i < 60; i++)
        prompt[i] = (i * 17 + 3) % VOCAB;
    for (int model = 0; model < 2; model++) {
        open_at(&t, model ? HUGINN : OURO, 32);
        for (int i = 0; i < N; i++) {
            r = request(&alone[i], prompt + i, 5 + 9 * i, 12, model ? 0.3f : 0.4f + 0.1f * (float)(i % 3));
            r.adaptive = i != 2; /* one of them at full depth */
            run(&t, &r);
        }
        for (int i = 0; i < N; i++) {
            r = request(&together[i], prompt + i, 5 + 9 * i, 12, model ? 0.3f : 0.4f + 0.1f * (float)(i % 3));
            r.adaptive = i != 2;
            ck_assert_int_eq(tl_sched_submit(t.s, &r, &j, &err), TL_OK);
        }
        for (busy = true; busy;)
            ck_assert_int_eq(tl_sched_step(t.s, &busy, &err), TL_OK);
        for (int i = 0; i < N; i++) {
            ck_assert_int_eq(together[i].n, 12);
            ck_assert_mem_eq(alone[i].hash, together[i].hash, 12 * sizeof(uint64_t));
            ck_assert_mem_eq(alone[i].loops, together[i].loops, 12 * sizeof(int));
        }
        tiny_close(&t);
    }
}
END_TEST

START_TEST(a_prefix_at_full_depth_gives_the_same_answer)
{
    struct tiny t;
    struct seen fresh, reused;
    struct tl_request r;
    struct tl_handle *h;
    struct tl_error err = {0};
    int32_t prompt[80];
    for (int i = 0; i < 80; i++)
        prompt[i] = (i * 7 + 1) % VOCAB;
    open_at(&t, OURO, 64);
    for (int cut = 30; cut <= 80; cut += 17) {
        struct tl_prefix_params p = {.tokens = prompt, .seq_len = cut > 64 ? 80 : cut};
        ck_assert_int_eq(tl_prefix_cache_build(&h, t.s, &p, &err), TL_OK);
        r = request(&fresh, prompt, 80, 10, 0.5f);
        run(&t, &r);
        r = request(&reused, prompt + p.seq_len, 80 - p.seq_len, 10, 0.5f);
        r.handle = h;
        run(&t, &r);
        ck_assert_mem_eq(fresh.hash, reused.hash, 10 * sizeof(uint64_t));
        ck_assert_int_gt(reused.usage.n_reused, cut - 18);
        tl_handle_free(h);
    }
    tiny_close(&t);
}
END_TEST

START_TEST(the_first_token_of_a_model_with_a_coda_is_that_of_its_depth)
{
    struct tiny t;
    int32_t prompt[50];
    for (int i = 0; i < 50; i++)
        prompt[i] = (i * 13 + 2) % VOCAB;
    open_at(&t, HUGINN, 16);
    for (int n = 1; n < 50; n += 12) {
        struct seen s;
        struct tl_request r = request(&s, prompt, n, 1, 0.5f);
        run(&t, &r);
        ck_assert_uint_eq(s.hash[0], hash_at(&t, prompt, n, s.loops[0]));
    }
    tiny_close(&t);
}
END_TEST

START_TEST(what_cannot_be_combined_is_refused)
{
    struct tiny t;
    struct seen s;
    struct tl_job *j;
    struct tl_error err;
    int32_t prompt[3] = {1, 2, 3};
    struct tl_request r;
    open_at(&t, OURO, 16);
    r = request(&s, prompt, 3, 1, 1.5f);
    ck_assert_int_eq(tl_sched_submit(t.s, &r, &j, &err), TL_ERR_OUT_OF_RANGE);
    ck_assert_str_eq(err.param, "exit_threshold");
    r = request(&s, prompt, 3, 1, 0.5f);
    r.cache_window = 10;
    ck_assert_int_eq(tl_sched_submit(t.s, &r, &j, &err), TL_ERR_BAD_PARAM);
    r = request(&s, prompt, 3, 1, 0.5f);
    r.keep = TL_KEEP_PREFIX;
    ck_assert_int_eq(tl_sched_submit(t.s, &r, &j, &err), TL_ERR_BAD_PARAM);
    tiny_close(&t);
}
END_TEST

int main(void)
{
    const TTest *const cases[] = {
        exit_steps_are_those_of_the_original,
        skipped_work_changes_no_bit,
        a_batch_of_mixed_requests_changes_nothing,
        a_prefix_at_full_depth_gives_the_same_answer,
        the_first_token_of_a_model_with_a_coda_is_that_of_its_depth,
        what_cannot_be_combined_is_refused,
    };
    return suite_main("adaptive", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL, 60);
}
