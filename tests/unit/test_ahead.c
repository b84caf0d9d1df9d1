/* The scheduler on a device that runs ahead: the step after a step may start before the tokens of the first are known. What a
 * request gets must not depend on it. */
#include <string.h>

#include "ahead_backend.h"
#include "suite.h"
#include "tiny_model.h"

static const char *dir;
static int32_t prompt[512];

struct seen {
    int n_tokens, stop_after, pause_after;
    int32_t tokens[128];
    bool done;
    enum tl_finish finish;
    struct tl_handle *kept;
};

static enum tl_verdict watch(void *arg, const struct tl_event *ev)
{
    struct seen *s = arg;
    if (ev->kind == TL_EVENT_TOKEN) {
        s->tokens[s->n_tokens++] = ev->sampled->token;
        if (s->n_tokens == s->stop_after)
            return TL_STOP_HERE;
        if (s->n_tokens == s->pause_after)
            return TL_PAUSE;
    } else if (ev->kind == TL_EVENT_KEPT) {
        s->kept = ev->handle;
    } else if (ev->kind == TL_EVENT_DONE) {
        s->done = true;
        s->finish = ev->finish;
    }
    return TL_GO_ON;
}

static struct tl_request request(struct seen *s, int from, int n_tokens, int max_tokens)
{
    struct tl_request r;
    memset(s, 0, sizeof(*s));
    tl_request_default(&r);
    r.tokens = prompt + from;
    r.n_tokens = n_tokens;
    r.max_tokens = max_tokens;
    r.sampling.temperature = 0;
    r.on_event = watch;
    r.arg = s;
    return r;
}

static void open_on(struct tiny *t, const char *device)
{
    struct tl_model_params p = {.dir = dir, .device = device, .n_threads = 1, .step_rows_max = 64};
    tiny_open_with(t, &p, NULL);
}

/* Five requests: two that arrive late, one that samples, one that stops early, one whose end is a stop id. */
static void traffic(const char *device, struct seen seen[5], int32_t stop_id)
{
    struct tiny t;
    struct tl_request r;
    open_on(&t, device);
    r = request(&seen[0], 0, 30, 70);
    tiny_submit(&t, &r);
    r = request(&seen[1], 40, 5, 20);
    seen[1].stop_after = 7;
    tiny_submit(&t, &r);
    for (int i = 0; i < 6; i++)
        tiny_step(&t);
    r = request(&seen[2], 80, 90, 64);
    tiny_submit(&t, &r);
    for (int i = 0; i < 9; i++)
        tiny_step(&t);
    r = request(&seen[3], 7, 20, 10);
    r.sampling.temperature = 1;
    r.sampling.seed = 5;
    tiny_submit(&t, &r);
    tiny_run(&t);
    r = request(&seen[4], 0, 30, 70);
    r.sampling.stop_ids = &stop_id;
    r.sampling.n_stop_ids = 1;
    tiny_submit(&t, &r);
    tiny_run(&t);
    tiny_close(&t);
}

START_TEST(running_ahead_changes_no_token)
{
    struct seen here[5], ahead[5];
    traffic("cpu", here, 0);
    traffic("cpu", here, here[0].tokens[33]);
    ahead_install();
    traffic("test", ahead, here[0].tokens[33]);
    ck_assert_int_gt(ahead_chained_rows(), 100);
    for (int i = 0; i < 5; i++) {
        ck_assert_int_eq(ahead[i].n_tokens, here[i].n_tokens);
        ck_assert_mem_eq(ahead[i].tokens, here[i].tokens, (size_t)here[i].n_tokens * sizeof(int32_t));
        ck_assert_int_eq(ahead[i].finish, here[i].finish);
    }
    ck_assert_int_eq(here[1].n_tokens, 7);
    ck_assert_int_lt(here[4].n_tokens, 34);
    ck_assert_int_eq(here[4].finish, TL_FINISH_STOP);
}
END_TEST

/* Requests side by side of which all but one are drawn, each in its own way; one of them keeps its logits from the device. */
static void lottery(const char *device, struct seen seen[6])
{
    static const struct tl_sampling ways[6] = {
        {.temperature = 1, .top_p = 1},
        {.temperature = 0.7f, .top_p = 0.9f},
        {.temperature = 2, .top_k = 7, .top_p = 1},
        {.temperature = 0, .top_p = 1},
        {.temperature = 1.3f, .top_k = 30, .top_p = 0.8f, .min_p = 0.05f},
        {.temperature = 1, .top_p = 1, .presence_penalty = 0.5f},
    };
    struct tiny t;
    struct tl_request r;
    open_on(&t, device);
    for (int i = 0; i < 6; i++) {
        r = request(&seen[i], 11 * i, 20 + i, i == 5 ? 20 : 60 + i);
        r.sampling = ways[i];
        r.sampling.repetition_penalty = 1;
        r.sampling.n_top_logprobs = -1;
        r.sampling.seed = 3 + (uint64_t)i;
        tiny_submit(&t, &r);
    }
    tiny_run(&t);
    tiny_close(&t);
}

START_TEST(a_device_draws_the_same_tokens)
{
    struct seen here[6], ahead[6];
    lottery("cpu", here);
    ahead_install();
    lottery("test", ahead);
    ck_assert_int_gt(ahead_drawn_tokens(), 100); /* once the sixth request has ended */
    ck_assert_int_gt(ahead_chained_rows(), 100);
    for (int i = 0; i < 6; i++) {
        ck_assert_int_eq(ahead[i].n_tokens, i == 5 ? 20 : 60 + i);
        ck_assert_mem_eq(ahead[i].tokens, here[i].tokens, (size_t)here[i].n_tokens * sizeof(int32_t));
    }
}
END_TEST

START_TEST(a_cancelled_request_leaves_nothing_behind_a_step_under_way)
{
    struct tiny t;
    struct seen a, b;
    struct tl_request r;
    struct tl_job *j;
    ahead_install();
    open_on(&t, "test");
    r = request(&a, 0, 20, 100);
    j = tiny_submit(&t, &r);
    r = request(&b, 40, 20, 60);
    tiny_submit(&t, &r);
    for (int i = 0; i < 10; i++)
        tiny_step(&t);
    tl_job_cancel(j);
    tiny_run(&t);
    ck_assert_int_eq(a.finish, TL_FINISH_CANCELLED);
    ck_assert_int_eq(b.n_tokens, 60);
    tiny_close(&t); /* asserts that all KV memory is back */
}
END_TEST

START_TEST(a_paused_request_goes_on_where_it_stopped)
{
    struct tiny t;
    struct seen whole, paused;
    struct tl_request r;
    struct tl_job *j;
    ahead_install();
    open_on(&t, "test");
    r = request(&whole, 0, 20, 40);
    tiny_submit(&t, &r);
    tiny_run(&t);
    r = request(&paused, 0, 20, 40);
    paused.pause_after = 9;
    j = tiny_submit(&t, &r);
    tiny_run(&t);
    ck_assert_int_le(paused.n_tokens, 10); /* the one that was under way */
    tl_job_resume(j);
    tiny_run(&t);
    ck_assert_int_eq(paused.n_tokens, 40);
    ck_assert_mem_eq(paused.tokens, whole.tokens, 40 * sizeof(int32_t));
    tiny_close(&t);
}
END_TEST

START_TEST(what_is_kept_at_the_end_holds_the_tokens_that_were_sent)
{
    struct tiny t;
    struct seen first, again, fresh;
    struct tl_request r;
    int32_t all[128];
    ahead_install();
    open_on(&t, "test");
    r = request(&first, 0, 50, 30); /* crosses a block of 64 */
    r.keep_all = true;
    tiny_submit(&t, &r);
    tiny_run(&t);
    ck_assert_ptr_nonnull(first.kept);
    r = request(&again, 0, 0, 20);
    r.handle = first.kept;
    tiny_submit(&t, &r);
    tiny_run(&t);
    memcpy(all, prompt, 50 * sizeof(int32_t));
    memcpy(all + 50, first.tokens, 30 * sizeof(int32_t));
    r = request(&fresh, 0, 79, 20);
    r.tokens = all;
    tiny_submit(&t, &r);
    tiny_run(&t);
    ck_assert_int_eq(fresh.tokens[0], first.tokens[29]); /* the last token sent was never run */
    ck_assert_mem_eq(again.tokens, fresh.tokens, 20 * sizeof(int32_t));
    tl_handle_free(first.kept);
    tiny_close(&t);
}
END_TEST

START_TEST(warming_up_leaves_nothing_behind)
{
    struct tiny t;
    struct tl_memory before, after;
    struct tl_error err;
    struct seen seen;
    struct tl_request r = request(&seen, 0, 30, 20);
    int64_t chained;
    ahead_install();
    open_on(&t, "test");
    tl_model_memory(t.m, &before);
    chained = ahead_chained_rows();
    ck_assert_int_eq(tl_model_warm(t.m, 8, &err), TL_OK);
    ck_assert_int_gt(ahead_chained_rows(), chained);
    tl_model_memory(t.m, &after);
    ck_assert_uint_eq(before.kv_used, after.kv_used);
    ck_assert_uint_eq(before.kv_reserved, after.kv_reserved);
    tiny_submit(&t, &r);
    tiny_run(&t);
    ck_assert_int_eq(seen.n_tokens, 20);
    tiny_close(&t);
}
END_TEST

int main(void)
{
    const TTest *const cases[] = {
        running_ahead_changes_no_token,
        a_device_draws_the_same_tokens,
        a_cancelled_request_leaves_nothing_behind_a_step_under_way,
        a_paused_request_goes_on_where_it_stopped,
        what_is_kept_at_the_end_holds_the_tokens_that_were_sent,
        warming_up_leaves_nothing_behind,
    };
    for (int i = 0; i < 512; i++)
        prompt[i] = (i * 41 + 7) % 300;
    dir = tiny_model_dir("tiny", "int8");
    if (!dir)
        return 1;
    return suite_main("ahead", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL, 60);
}
