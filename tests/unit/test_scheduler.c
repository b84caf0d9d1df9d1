/* The scheduler: who runs, who waits, what is given back, and what happens when the device or a row goes wrong. */
#include <stdatomic.h>
#include <string.h>

#include "fault_backend.h"
#include "suite.h"
#include "tiny_model.h"

static const char *dir;
static int32_t prompt[512];

struct seen { /* what a request's events said */
    int n_tokens, n_progress;
    int32_t tokens[64];
    bool started, done;
    enum tl_finish finish;
    enum tl_status st;
    int pause_after, stop_after; /* tokens; 0 = never */
    struct tl_handle *kept;
};

static enum tl_verdict watch(void *arg, const struct tl_event *ev)
{
    struct seen *s = arg;
    switch (ev->kind) {
    case TL_EVENT_STARTED: s->started = true; break;
    case TL_EVENT_PROGRESS: s->n_progress++; break;
    case TL_EVENT_TOKEN:
        s->tokens[s->n_tokens++] = ev->sampled->token;
        if (s->n_tokens == s->stop_after)
            return TL_STOP_HERE;
        if (s->n_tokens == s->pause_after)
            return TL_PAUSE;
        break;
    case TL_EVENT_KEPT: s->kept = ev->handle; break;
    case TL_EVENT_DONE:
        s->done = true;
        s->finish = ev->finish;
        s->st = ev->error ? ev->error->status : TL_OK;
        break;
    case TL_EVENT_PROMPT_LOGPROB: break;
    }
    return TL_GO_ON;
}

static struct tl_request request(struct seen *s, int n_tokens, int max_tokens)
{
    struct tl_request r;
    memset(s, 0, sizeof(*s));
    tl_request_default(&r);
    r.tokens = prompt;
    r.n_tokens = n_tokens;
    r.max_tokens = max_tokens;
    r.sampling.temperature = 0;
    r.on_event = watch;
    r.arg = s;
    return r;
}

static void fill(void)
{
    for (int i = 0; i < 512; i++)
        prompt[i] = (i * 41 + 7) % 300;
}

START_TEST(a_short_prompt_is_served_during_a_long_prefill)
{
    struct tiny t;
    struct seen lng, shrt;
    struct tl_request r;
    int steps = 0;
    tiny_open(&t, dir, 0); /* 64 rows a step */
    r = request(&lng, 500, 1);
    tiny_submit(&t, &r);
    tiny_step(&t);
    r = request(&shrt, 10, 1);
    tiny_submit(&t, &r);
    while (!shrt.done) {
        tiny_step(&t);
        steps++;
    }
    ck_assert_int_le(steps, 2);
    ck_assert(!lng.done);
    tiny_run(&t);
    ck_assert(lng.done);
    tiny_close(&t);
}
END_TEST

START_TEST(a_cancelled_request_stops_at_the_next_iteration_and_frees_all)
{
    struct tiny t;
    struct seen a, b;
    struct tl_request r;
    struct tl_job *j;
    tiny_open(&t, dir, 0);
    r = request(&a, 500, 5);
    j = tiny_submit(&t, &r);
    r = request(&b, 100, 5);
    tiny_submit(&t, &r);
    tiny_step(&t);
    tl_job_cancel(j);
    tiny_step(&t);
    ck_assert(a.done);
    ck_assert_int_eq(a.finish, TL_FINISH_CANCELLED);
    ck_assert_int_eq(a.n_tokens, 0);
    tiny_run(&t);
    ck_assert_int_eq(b.finish, TL_FINISH_LENGTH);
    ck_assert_int_eq(b.n_tokens, 5);
    tiny_close(&t);
}
END_TEST

static void cancel_it(void *job) { tl_job_cancel(*(struct tl_job **)job); }

START_TEST(a_cancel_between_loop_iterations_drops_the_rows_at_once)
{
    struct tiny t;
    struct seen a, b, alone;
    struct tl_request r;
    static struct tl_job *j;
    struct tl_model_params p = {.dir = dir, .device = "test", .n_threads = 1, .step_rows_max = 64};
    fault_install();
    tiny_open_with(&t, &p, NULL);
    r = request(&alone, 30, 3);
    tiny_submit(&t, &r);
    tiny_run(&t);
    r = request(&a, 30, 3);
    j = tiny_submit(&t, &r);
    r = request(&b, 30, 3);
    tiny_submit(&t, &r);
    fault_reset();
    fault_before_run(3, cancel_it, &j); /* inside the first step: prelude, loop 0, then this */
    tiny_step(&t);
    tiny_step(&t);
    ck_assert_int_eq(a.finish, TL_FINISH_CANCELLED);
    ck_assert_int_eq(a.n_tokens, 0);
    tiny_run(&t);
    ck_assert_mem_eq(b.tokens, alone.tokens, 3 * sizeof(int32_t));
    tiny_close(&t);
}
END_TEST

START_TEST(a_queued_request_is_cancelled_without_waiting_its_turn)
{
    struct tiny t;
    struct seen a, b;
    struct tl_request r;
    struct tl_job *j;
    struct tl_sched_params sp = {.n_running_max = 1};
    struct tl_model_params p = {.dir = dir, .device = "cpu", .n_threads = 1, .step_rows_max = 64};
    tiny_open_with(&t, &p, &sp);
    r = request(&a, 400, 2);
    tiny_submit(&t, &r);
    r = request(&b, 10, 2);
    j = tiny_submit(&t, &r);
    tiny_step(&t);
    ck_assert(!b.started);
    ck_assert_int_eq(tl_job_position(j), 1);
    tl_job_cancel(j);
    tiny_step(&t);
    ck_assert(b.done);
    ck_assert(!a.done);
    tiny_run(&t);
    tiny_close(&t);
}
END_TEST

START_TEST(a_paused_request_stops_alone_and_goes_on)
{
    struct tiny t;
    struct seen a, b, plain;
    struct tl_request r;
    struct tl_job *j;
    tiny_open(&t, dir, 0);
    r = request(&plain, 20, 6);
    tiny_submit(&t, &r);
    tiny_run(&t);
    r = request(&a, 20, 6);
    a.pause_after = 2;
    j = tiny_submit(&t, &r);
    r = request(&b, 20, 6);
    tiny_submit(&t, &r);
    tiny_run(&t); /* not busy any more: b is done, a is paused */
    ck_assert(b.done);
    ck_assert(!a.done);
    ck_assert_int_eq(a.n_tokens, 2);
    tl_job_resume(j);
    tiny_run(&t);
    ck_assert_int_eq(a.n_tokens, 6);
    ck_assert_mem_eq(a.tokens, plain.tokens, 6 * sizeof(int32_t));
    tiny_close(&t);
}
END_TEST

START_TEST(the_caller_may_stop_at_any_token)
{
    struct tiny t;
    struct seen a;
    struct tl_request r;
    tiny_open(&t, dir, 0);
    r = request(&a, 20, 6);
    a.stop_after = 3;
    tiny_submit(&t, &r);
    tiny_run(&t);
    ck_assert_int_eq(a.n_tokens, 3);
    ck_assert_int_eq(a.finish, TL_FINISH_STOP);
    tiny_close(&t);
}
END_TEST

START_TEST(requests_wait_for_memory_in_order_and_all_finish)
{
    enum { N = 12 };
    struct tiny t;
    struct seen s[N];
    struct tl_request r;
    int n_slots, at_once = 0;
    tiny_open(&t, dir, 0);
    n_slots = tl_n_slots(tl_model_info(t.m)->spec, tl_model_info(t.m)->spec->loops_default);
    tiny_close(&t);
    tiny_open(&t, dir, 5 * n_slots); /* room for two requests of two blocks */
    for (int i = 0; i < N; i++) {
        r = request(&s[i], 100, 10);
        tiny_submit(&t, &r);
    }
    tiny_step(&t);
    for (int i = 0; i < N; i++)
        at_once += s[i].started;
    ck_assert_int_eq(at_once, 2);
    tiny_run(&t);
    for (int i = 0; i < N; i++) {
        ck_assert_int_eq(s[i].finish, TL_FINISH_LENGTH);
        ck_assert_mem_eq(s[i].tokens, s[0].tokens, 10 * sizeof(int32_t));
    }
    tiny_close(&t);
}
END_TEST

START_TEST(what_can_never_fit_is_refused_with_both_numbers)
{
    struct tiny t;
    struct seen a;
    struct tl_request r;
    struct tl_job *j;
    struct tl_error err;
    int n_slots;
    tiny_open(&t, dir, 0);
    n_slots = tl_n_slots(tl_model_info(t.m)->spec, tl_model_info(t.m)->spec->loops_default);
    tiny_close(&t);
    tiny_open(&t, dir, 4 * n_slots);
    r = request(&a, 100, 10);
    r.loops = tl_model_info(t.m)->max_loops;
    ck_assert_int_eq(tl_sched_submit(t.s, &r, &j, &err), TL_ERR_EXCEEDS_MEMORY);
    ck_assert_int_eq(err.n_nums, 2);
    ck_assert_int_gt(err.num[0].value, err.num[1].value);
    tiny_close(&t);
}
END_TEST

START_TEST(named_entries_leave_room_for_one_longest_sequence)
{
    struct tiny t;
    struct tl_handle *h[64] = {0};
    struct tl_error err = {0};
    struct seen a;
    struct tl_request r;
    enum tl_status st = TL_OK;
    int n = 0, n_slots;
    tiny_open(&t, dir, 0);
    n_slots = tl_n_slots(tl_model_info(t.m)->spec, tl_model_info(t.m)->spec->loops_default);
    tiny_close(&t);
    tiny_open(&t, dir, 16 * n_slots);
    for (; st == TL_OK; n++) {
        struct tl_prefix_params p = {.tokens = prompt, .seq_len = 100};
        ck_assert_int_lt(n, 64);
        prompt[0] = n;
        st = tl_prefix_cache_build(&h[n], t.s, &p, &err);
    }
    ck_assert_int_eq(st, TL_ERR_NO_DEVICE_MEMORY);
    ck_assert_int_gt(n, 2);
    r = request(&a, tl_model_info(t.m)->max_seq_len - 10, 10);
    tiny_submit(&t, &r);
    tiny_run(&t);
    ck_assert_int_eq(a.finish, TL_FINISH_LENGTH);
    for (int i = 0; i < n; i++)
        tl_handle_free(h[i]);
    tiny_close(&t);
}
END_TEST

START_TEST(a_window_bounds_the_memory_of_a_sequence)
{
    struct tiny t;
    struct seen a;
    struct tl_request r;
    uint64_t most = 0, full;
    tiny_open(&t, dir, 0);
    full = (uint64_t)tl_n_slots(tl_model_info(t.m)->spec, tl_model_info(t.m)->spec->loops_default) * 8 *
           tl_model_info(t.m)->page_bytes;
    r = request(&a, 500, 10);
    r.cache_window = 64;
    tiny_submit(&t, &r);
    while (tiny_step(&t))
        most = tiny_kv_used(&t) > most ? tiny_kv_used(&t) : most;
    ck_assert_int_eq(a.finish, TL_FINISH_LENGTH);
    ck_assert_uint_le(most, full / 2);
    tiny_close(&t);
}
END_TEST

START_TEST(nan_logits_end_one_request_and_no_other)
{
    struct tiny t;
    struct seen a, b;
    struct tl_request r;
    struct tl_model_params p = {.dir = dir, .device = "test", .n_threads = 1, .step_rows_max = 64};
    fault_install();
    tiny_open_with(&t, &p, NULL);
    fault_reset();
    fault_nan_at(3); /* rows of logits come a, b, a, b ... */
    r = request(&a, 20, 5);
    tiny_submit(&t, &r);
    r = request(&b, 20, 5);
    tiny_submit(&t, &r);
    tiny_run(&t);
    ck_assert_int_eq(a.finish, TL_FINISH_ERROR);
    ck_assert_int_eq(a.st, TL_ERR_NON_FINITE);
    ck_assert_int_eq(b.finish, TL_FINISH_LENGTH);
    ck_assert_int_eq(b.n_tokens, 5);
    tiny_close(&t);
}
END_TEST

START_TEST(a_failed_device_ends_every_request_with_its_error)
{
    struct tiny t;
    struct seen a, b;
    struct tl_request r;
    struct tl_error err;
    bool busy;
    struct tl_model_params p = {.dir = dir, .device = "test", .n_threads = 1, .step_rows_max = 64};
    fault_install();
    tiny_open_with(&t, &p, &(struct tl_sched_params){.n_running_max = 1});
    r = request(&a, 20, 5);
    tiny_submit(&t, &r);
    r = request(&b, 20, 5);
    tiny_submit(&t, &r);
    tiny_step(&t);
    fault_reset();
    fault_fail_call(2);
    ck_assert_int_eq(tl_sched_step(t.s, &busy, &err), TL_ERR_DEVICE);
    ck_assert_int_eq(a.st, TL_ERR_DEVICE);
    ck_assert_int_eq(b.st, TL_ERR_DEVICE);
    tiny_close(&t);
}
END_TEST

START_TEST(too_many_waiting_requests_are_refused)
{
    struct tiny t;
    struct seen s[4];
    struct tl_request r;
    struct tl_job *j;
    struct tl_error err;
    struct tl_model_params p = {.dir = dir, .device = "cpu", .n_threads = 1, .step_rows_max = 64};
    tiny_open_with(&t, &p, &(struct tl_sched_params){.n_running_max = 1, .n_waiting_max = 2});
    for (int i = 0; i < 2; i++) {
        r = request(&s[i], 10, 2);
        tiny_submit(&t, &r);
    }
    r = request(&s[2], 10, 2);
    ck_assert_int_eq(tl_sched_submit(t.s, &r, &j, &err), TL_ERR_OVERLOADED);
    tiny_run(&t);
    tiny_close(&t);
}
END_TEST

START_TEST(closing_the_scheduler_ends_what_still_runs)
{
    struct tiny t;
    struct seen a, b;
    struct tl_request r;
    tiny_open(&t, dir, 0);
    r = request(&a, 20, 50);
    tiny_submit(&t, &r);
    tiny_step(&t);
    r = request(&b, 20, 50);
    tiny_submit(&t, &r);
    tiny_close(&t);
    ck_assert_int_eq(a.finish, TL_FINISH_CANCELLED);
    ck_assert_int_eq(b.finish, TL_FINISH_CANCELLED);
}
END_TEST

int main(void)
{
    const TTest *const cases[] = {
        a_short_prompt_is_served_during_a_long_prefill,
        a_cancelled_request_stops_at_the_next_iteration_and_frees_all,
        a_cancel_between_loop_iterations_drops_the_rows_at_once,
        a_queued_request_is_cancelled_without_waiting_its_turn,
        a_paused_request_stops_alone_and_goes_on,
        the_caller_may_stop_at_any_token,
        requests_wait_for_memory_in_order_and_all_finish,
        what_can_never_fit_is_refused_with_both_numbers,
        named_entries_leave_room_for_one_longest_sequence,
        a_window_bounds_the_memory_of_a_sequence,
        nan_logits_end_one_request_and_no_other,
        a_failed_device_ends_every_request_with_its_error,
        too_many_waiting_requests_are_refused,
        closing_the_scheduler_ends_what_still_runs,
    };
    fill();
    dir = tiny_model_dir("tiny", "int8");
    if (!dir)
        return 1;
    return suite_main("scheduler", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL, 60);
}
