/* The reuse primitives: what they share, what they refuse, what they give back. That the bits are equal is proved at length in
 * tests/exactness; here every rule of the contract has a case. */
#include <stdlib.h>
#include <string.h>

#include "suite.h"
#include "tiny_model.h"

static const char *dir; /* made once, before the tests fork */
static struct tiny t;
static int32_t prompt[512];

static void setup(void)
{
    for (int i = 0; i < 512; i++)
        prompt[i] = (i * 37 + 11) % 300;
    tiny_open(&t, dir, 0);
}
static void teardown(void) { tiny_close(&t); }

static struct tl_handle *prefix(int n, int loops)
{
    struct tl_handle *h;
    struct tl_error err = {0};
    struct tl_prefix_params p = {.tokens = prompt, .seq_len = n, .n_loops = loops};
    ck_assert_msg(tl_prefix_cache_build(&h, t.s, &p, &err) == TL_OK, "%s", err.msg);
    return h;
}

static struct tl_handle *resumable(int n, int loops, int max)
{
    struct tl_handle *h;
    struct tl_error err = {0};
    struct tl_prefix_params p = {.tokens = prompt, .seq_len = n, .n_loops = loops};
    ck_assert_msg(tl_resume_handle_build(&h, t.s, &p, max, &err) == TL_OK, "%s", err.msg);
    return h;
}

static void greedy(struct tl_request *r, int n_tokens, int max_tokens)
{
    tl_request_default(r);
    r->tokens = prompt;
    r->n_tokens = n_tokens;
    r->max_tokens = max_tokens;
    r->sampling.temperature = 0;
}

static struct tl_result generate(const struct tl_request *r)
{
    struct tl_result res;
    struct tl_error err = {0};
    ck_assert_msg(tl_generate(t.s, r, &res, &err) == TL_OK, "%s", err.msg);
    return res;
}

/* The request must be refused with this status, and leave nothing behind. */
static struct tl_error refused(const struct tl_request *r, enum tl_status st)
{
    struct tl_result res;
    struct tl_error err = {0};
    uint64_t used = tiny_kv_used(&t);
    ck_assert_msg(tl_generate(t.s, r, &res, &err) == st, "expected %s, got %s: %s", tl_status_name(st),
                  tl_status_name(err.status), err.msg);
    ck_assert(err.msg[0] != 0);
    ck_assert_ptr_null(res.tokens);
    ck_assert_uint_eq(tiny_kv_used(&t), used);
    return err;
}

START_TEST(a_prefix_hit_prefills_only_the_suffix)
{
    struct tl_handle *h = prefix(100, 0);
    struct tl_request r;
    struct tl_result a, b;
    greedy(&r, 130, 6);
    a = generate(&r);
    r.handle = h;
    r.tokens = prompt + 100;
    r.n_tokens = 30;
    b = generate(&r);
    ck_assert_int_eq(b.usage.n_reused, 100);
    ck_assert_int_eq(b.usage.n_prefilled, 30);
    ck_assert_int_eq(a.usage.n_prefilled, 130);
    ck_assert_int_eq(a.n_tokens, b.n_tokens);
    ck_assert_mem_eq(a.tokens, b.tokens, (size_t)a.n_tokens * sizeof(int32_t));
    tl_result_clear(&a);
    tl_result_clear(&b);
    tl_handle_free(h);
}
END_TEST

START_TEST(an_empty_suffix_needs_no_forward_pass)
{
    struct tl_handle *h = prefix(77, 0);
    struct tl_request r;
    struct tl_result a, b;
    greedy(&r, 77, 1);
    a = generate(&r);
    r.handle = h;
    r.n_tokens = 0;
    b = generate(&r);
    ck_assert_int_eq(b.usage.row_loops_run, 0);
    ck_assert_int_eq(a.tokens[0], b.tokens[0]);
    tl_result_clear(&a);
    tl_result_clear(&b);
    tl_handle_free(h);
}
END_TEST

START_TEST(clones_share_one_copy_until_they_write)
{
    enum { N = 64 };
    struct tl_handle *h = prefix(192, 0);
    uint64_t one = tiny_kv_used(&t);
    struct tl_request r;
    struct tl_job *job;
    struct tl_error err;
    bool busy;
    greedy(&r, 0, 4);
    r.handle = h;
    for (int i = 0; i < N; i++)
        ck_assert_int_eq(tl_sched_submit(t.s, &r, &job, &err), TL_OK);
    ck_assert_int_eq(tl_sched_step(t.s, &busy, &err), TL_OK); /* first tokens: nothing is written yet */
    ck_assert_uint_eq(tiny_kv_used(&t), one);
    while (busy)
        ck_assert_int_eq(tl_sched_step(t.s, &busy, &err), TL_OK);
    ck_assert_uint_eq(tiny_kv_used(&t), one);
    tl_handle_free(h);
}
END_TEST

START_TEST(the_first_write_copies_one_block_per_slot_at_most)
{
    struct tl_handle *h = prefix(190, 0); /* ends inside a block */
    const struct tl_model_info *info = tl_model_info(t.m);
    uint64_t before = tiny_kv_used(&t);
    struct tl_memory mem;
    struct tl_request r;
    struct tl_result res;
    greedy(&r, 0, 2);
    r.handle = h;
    res = generate(&r);
    tl_model_memory(t.m, &mem);
    ck_assert_uint_le(mem.kv_used_peak - before,
                      (uint64_t)tl_n_slots(info->spec, info->spec->loops_default) * info->page_bytes);
    tl_result_clear(&res);
    tl_handle_free(h);
}
END_TEST

START_TEST(resume_runs_only_the_missing_iterations)
{
    struct tl_handle *h = resumable(100, 2, 6);
    struct tl_request r;
    struct tl_result a, b;
    greedy(&r, 100, 5);
    r.loops = 6;
    a = generate(&r);
    greedy(&r, 0, 5);
    r.handle = h;
    r.new_L = 6;
    b = generate(&r);
    ck_assert_int_eq(b.usage.iterations_run, 4);
    ck_assert_int_eq(b.usage.iterations_skipped, 2);
    ck_assert_int_eq(b.usage.row_loops_run, 100 * 4 + 4 * 6); /* prefix rows by 4 loops, then 4 decode rows by 6 */
    ck_assert_int_eq(a.usage.row_loops_run, 100 * 6 + 4 * 6);
    ck_assert_mem_eq(a.tokens, b.tokens, 5 * sizeof(int32_t));
    tl_result_clear(&a);
    tl_result_clear(&b);
    tl_handle_free(h);
}
END_TEST

START_TEST(a_resume_at_the_same_depth_is_a_prefix_hit)
{
    struct tl_handle *h = resumable(64, 3, 6);
    struct tl_request r;
    struct tl_result b;
    greedy(&r, 0, 1);
    r.handle = h;
    r.new_L = 3;
    b = generate(&r);
    ck_assert_int_eq(b.usage.iterations_run, 0);
    ck_assert_int_eq(b.usage.row_loops_run, 0);
    tl_result_clear(&b);
    tl_handle_free(h);
}
END_TEST

START_TEST(decoding_below_the_prefix_depth_is_allowed_and_not_exact)
{
    struct tl_handle *h = resumable(40, 2, 6);
    struct tl_request r;
    struct tl_result b;
    greedy(&r, 0, 3);
    r.handle = h;
    r.new_L = 5;
    r.loops = 3;
    b = generate(&r);
    ck_assert(!b.usage.exact);
    tl_result_clear(&b);
    r.loops = 6;
    ck_assert_str_eq(refused(&r, TL_ERR_DECODE_DEPTH).param, "loops");
    tl_handle_free(h);
}
END_TEST

START_TEST(every_abort_of_the_contract_is_an_answer)
{
    struct tl_handle *pc = prefix(50, 4), *rh = resumable(50, 2, 6), *none;
    struct tl_prefix_params p = {.tokens = prompt, .seq_len = 0};
    struct tl_error err;
    struct tl_request r;
    int max = tl_model_info(t.m)->max_seq_len;

    greedy(&r, 1, 1);
    r.handle = pc;
    r.loops = 5;
    err = refused(&r, TL_ERR_LOOP_DEPTH);
    ck_assert_int_eq(err.num[0].value, 4);
    ck_assert_int_eq(err.num[1].value, 5);
    r.loops = 0;
    r.cache_window = 8;
    refused(&r, TL_ERR_WINDOW_MISMATCH);
    greedy(&r, 1, 1);
    r.handle = rh;
    r.new_L = 1;
    refused(&r, TL_ERR_RESUME_DEPTH);
    r.new_L = 7;
    err = refused(&r, TL_ERR_RESUME_DEPTH);
    ck_assert_int_eq(err.num[2].value, 7);
    r.handle = pc;
    r.new_L = 5;
    refused(&r, TL_ERR_RESUME_DEPTH);
    greedy(&r, 0, 1);
    refused(&r, TL_ERR_EMPTY_PROMPT);
    greedy(&r, 10, max);
    err = refused(&r, TL_ERR_CONTEXT_LENGTH);
    ck_assert_str_eq(err.param, "max_tokens");
    greedy(&r, 10, 1);
    r.loops = tl_model_info(t.m)->max_loops + 1;
    refused(&r, TL_ERR_LOOPS_RANGE);
    r.loops = -1;
    refused(&r, TL_ERR_LOOPS_RANGE);
    greedy(&r, 10, 1);
    prompt[3] = 300;
    err = refused(&r, TL_ERR_TOKEN_OUT_OF_VOCAB);
    ck_assert_int_eq(err.num[0].value, 3);
    prompt[3] = -1;
    refused(&r, TL_ERR_TOKEN_OUT_OF_VOCAB);
    prompt[3] = 5;
    r.cache_window = max + 1;
    refused(&r, TL_ERR_WINDOW_RANGE);
    ck_assert_int_eq(tl_prefix_cache_build(&none, t.s, &p, &err), TL_ERR_EMPTY_PROMPT);
    ck_assert_ptr_null(none);
    p.seq_len = 5;
    p.n_loops = 6;
    ck_assert_int_eq(tl_resume_handle_build(&none, t.s, &p, 4, &err), TL_ERR_LOOPS_USED_RANGE);
    ck_assert_int_eq(tl_resume_handle_build(&none, t.s, &p, 65, &err), TL_ERR_MAX_LOOPS);
    tl_handle_free(pc);
    tl_handle_free(rh);
}
END_TEST

START_TEST(a_handle_freed_in_use_lives_until_its_last_request)
{
    struct tl_handle *h = prefix(100, 0);
    struct tl_request r;
    struct tl_job *job;
    struct tl_error err;
    bool busy = true;
    greedy(&r, 0, 8);
    r.handle = h;
    ck_assert_int_eq(tl_sched_submit(t.s, &r, &job, &err), TL_OK);
    ck_assert_int_eq(tl_sched_step(t.s, &busy, &err), TL_OK);
    tl_handle_free(h);
    ck_assert_uint_gt(tiny_kv_used(&t), 0);
    while (busy)
        ck_assert_int_eq(tl_sched_step(t.s, &busy, &err), TL_OK);
    ck_assert_uint_eq(tiny_kv_used(&t), 0);
}
END_TEST

static struct tl_pool *pool_of(int capacity)
{
    struct tl_pool *p;
    ck_assert_int_eq(tl_pool_create(&p, t.m, capacity, 0, NULL), TL_OK);
    return p;
}

static void add(struct tl_pool *p, struct tl_handle *h, uint64_t scope, bool automatic)
{
    struct tl_error err = {0};
    ck_assert_msg(tl_pool_add(p, h, scope, automatic, &err) == TL_OK, "%s", err.msg);
    tl_handle_free(h);
}

START_TEST(the_longest_registered_prefix_wins)
{
    struct tl_pool *p = pool_of(8);
    struct tl_request r;
    struct tl_result a;
    add(p, prefix(20, 0), 0, false);
    add(p, prefix(70, 0), 0, false);
    add(p, prefix(40, 0), 0, false);
    greedy(&r, 100, 1);
    r.pool = p;
    a = generate(&r);
    ck_assert_int_eq(a.usage.n_reused, 70);
    tl_result_clear(&a);
    tl_pool_free(p);
}
END_TEST

START_TEST(one_wrong_token_is_a_miss_and_says_where)
{
    struct tl_pool *p = pool_of(8);
    struct tl_pool_match match;
    struct tl_request r;
    struct tl_result a;
    int loops = tl_model_info(t.m)->spec->loops_default;
    add(p, prefix(70, 0), 0, false);
    prompt[69]++;
    tl_pool_find(p, prompt, 100, loops, 0, 0, &match);
    ck_assert_ptr_null(match.handle);
    ck_assert_int_eq(match.n_common, 69);
    ck_assert_int_eq(match.reason, TL_MISS_TOKEN);
    greedy(&r, 100, 1);
    r.pool = p;
    a = generate(&r);
    ck_assert_int_eq(a.usage.n_reused, 0);
    tl_result_clear(&a);
    r.pool_require = true;
    refused(&r, TL_ERR_NO_POOL_MATCH);
    prompt[69]--;
    r.keep = TL_KEEP_RESUME; /* has to be computed whole, so no entry can serve it */
    refused(&r, TL_ERR_NO_POOL_MATCH);
    tl_pool_find(p, prompt, 60, loops, 0, 0, &match);
    ck_assert_int_eq(match.reason, TL_MISS_PROMPT_SHORTER);
    tl_pool_find(p, prompt, 100, loops + 1, 0, 0, &match);
    ck_assert_int_eq(match.reason, TL_MISS_LOOPS);
    tl_pool_find(p, prompt, 100, loops, 5, 0, &match);
    ck_assert_int_eq(match.reason, TL_MISS_WINDOW);
    tl_pool_free(p);
}
END_TEST

START_TEST(a_scope_never_sees_anothers_entries)
{
    struct tl_pool *p = pool_of(8);
    struct tl_pool_match match;
    int loops = tl_model_info(t.m)->spec->loops_default;
    add(p, prefix(30, 0), 7, false);
    tl_pool_find(p, prompt, 100, loops, 0, 8, &match);
    ck_assert_ptr_null(match.handle);
    ck_assert_int_eq(match.n_common, 0);
    tl_pool_find(p, prompt, 100, loops, 0, 7, &match);
    ck_assert_int_eq(match.n_matched, 30);
    add(p, prefix(40, 0), 0, false); /* shared */
    tl_pool_find(p, prompt, 100, loops, 0, 8, &match);
    ck_assert_int_eq(match.n_matched, 40);
    tl_pool_free(p);
}
END_TEST

START_TEST(an_automatic_entry_counts_in_full_blocks)
{
    struct tl_pool *p = pool_of(1);
    struct tl_pool_match match;
    int loops = tl_model_info(t.m)->spec->loops_default;
    add(p, prefix(200, 0), 0, true);
    prompt[150]++;
    tl_pool_find(p, prompt, 300, loops, 0, 0, &match);
    ck_assert_int_eq(match.n_matched, 128);
    prompt[150]--;
    tl_pool_find(p, prompt, 128, loops, 0, 0, &match); /* at most all but the last token */
    ck_assert_int_eq(match.n_matched, 64);
    tl_pool_free(p);
}
END_TEST

START_TEST(a_shallower_entry_with_its_state_is_deepened)
{
    struct tl_pool *p = pool_of(4);
    struct tl_request r;
    struct tl_result a;
    add(p, resumable(90, 2, 6), 0, false);
    greedy(&r, 100, 1);
    r.pool = p;
    r.loops = 5;
    a = generate(&r);
    ck_assert_int_eq(a.usage.n_reused, 90);
    ck_assert_int_eq(a.usage.iterations_run, 3);
    ck_assert_int_eq(a.usage.iterations_skipped, 2);
    tl_result_clear(&a);
    tl_pool_free(p);
}
END_TEST

/* Entries over two tokens, so that most begin alike: what is found is what comparing with each of them finds. */
START_TEST(the_longest_of_many_alike_is_found)
{
    struct tl_handle *h[12];
    struct tl_error err = {0};
    unsigned seed = 5;
    for (int round = 0; round < 40; round++) {
        struct tl_pool *p = pool_of(12);
        int32_t text[12][9], whole[9];
        int len[12], loops[12], best = 0, near = 0;
        for (int i = 0; i < 12; i++) {
            len[i] = 1 + (int)(rand_r(&seed) % 8);
            loops[i] = 2 + (int)(rand_r(&seed) % 2);
            for (int k = 0; k < 9; k++)
                text[i][k] = whole[k] = (int)(rand_r(&seed) % 2);
            struct tl_prefix_params params = {.tokens = text[i], .seq_len = len[i], .n_loops = loops[i]};
            ck_assert_int_eq(tl_prefix_cache_build(&h[i], t.s, &params, &err), TL_OK);
            ck_assert_int_eq(tl_pool_add(p, h[i], 1, false, NULL), TL_OK);
        }
        for (int i = 0; i < 12; i++) {
            int same = 0;
            while (same < len[i] && text[i][same] == whole[same])
                same++;
            if (loops[i] == 3 && same == len[i])
                best = same > best ? same : best;
            else
                near = same > near ? same : near;
            tl_handle_free(h[i]);
        }
        struct tl_pool_match m;
        tl_pool_find(p, whole, 9, 3, 0, 1, &m);
        ck_assert_int_eq(m.n_matched, best);
        ck_assert_int_eq(m.n_common, near > best ? near : 0);
        tl_pool_free(p);
    }
}
END_TEST

START_TEST(the_pool_evicts_the_least_recently_used_idle_entry)
{
    struct tl_pool *p = pool_of(2);
    struct tl_handle *held = prefix(10, 0), *b = prefix(20, 0);
    struct tl_pool_stats st;
    ck_assert_int_eq(tl_pool_add(p, held, 0, false, NULL), TL_OK); /* our own reference keeps it busy */
    add(p, b, 0, false);
    add(p, prefix(30, 0), 0, false); /* evicts the 20 */
    tl_pool_stats(p, &st);
    ck_assert_int_eq(st.n_entries, 2);
    ck_assert_uint_eq(st.evictions, 1);
    ck_assert(!tl_pool_remove(p, held, 1));
    ck_assert(tl_pool_remove(p, held, 0));
    ck_assert(!tl_pool_remove(p, held, 0));
    tl_handle_free(held);
    tl_pool_free(p);
}
END_TEST

static void count_eviction(void *arg, const struct tl_handle *h)
{
    struct tl_handle_info info;
    tl_handle_info(h, &info);
    *(int *)arg += info.n_tokens;
}

START_TEST(one_handle_in_two_scopes_goes_from_both_at_once)
{
    struct tl_pool *p = pool_of(4);
    struct tl_pool_match m;
    struct tl_handle *h = prefix(10, 3);
    struct tl_pool_stats st;
    ck_assert_int_eq(tl_pool_add(p, h, 7, false, NULL), TL_OK);
    ck_assert_uint_eq(tl_pool_idle_bytes(p), 0);
    add(p, h, 8, false);
    ck_assert_uint_eq(tl_pool_idle_bytes(p), tiny_kv_used(&t));
    ck_assert(tl_pool_remove(p, h, 8));
    tl_pool_find(p, prompt, 20, 3, 0, 8, &m);
    ck_assert_ptr_null(m.handle);
    tl_pool_find(p, prompt, 20, 3, 0, 7, &m);
    ck_assert_ptr_eq(m.handle, h);
    ck_assert_int_eq(tl_pool_add(p, h, 8, false, NULL), TL_OK);
    ck_assert(tl_pool_evict_one(p)); /* idle, though two entries hold it */
    tl_pool_stats(p, &st);
    ck_assert_int_eq(st.n_entries, 0);
    ck_assert_uint_eq(tiny_kv_used(&t), 0);
    tl_pool_free(p);
}
END_TEST

START_TEST(a_smaller_limit_evicts_and_tells)
{
    struct tl_pool *p = pool_of(4);
    struct tl_handle *twin = prefix(20, 0);
    struct tl_pool_stats st;
    int evicted = 0;
    tl_pool_on_evict(p, count_eviction, &evicted);
    add(p, prefix(10, 0), 0, false);
    add(p, prefix(20, 0), 0, false);
    add(p, prefix(128, 0), 0, true);
    ck_assert_ptr_nonnull(tl_pool_holds(p, twin, 0));
    ck_assert_ptr_null(tl_pool_holds(p, twin, 1));
    tl_handle_free(twin);
    tl_pool_limits(p, 1, 0);
    ck_assert_int_eq(evicted, 10);
    tl_pool_drop_automatic(p);
    tl_pool_stats(p, &st);
    ck_assert_int_eq(st.n_entries, 1);
    ck_assert_int_eq(evicted, 10);
    tl_pool_free(p);
}
END_TEST

START_TEST(an_estimate_is_what_the_handle_then_takes)
{
    struct tl_handle *h[3] = {prefix(100, 3), resumable(65, 2, 6), NULL};
    struct tl_prefix_params p = {.tokens = prompt, .seq_len = 300, .n_loops = 2, .cache_window = 70};
    struct tl_error err;
    ck_assert_int_eq(tl_prefix_cache_build(&h[2], t.s, &p, &err), TL_OK);
    for (int i = 0; i < 3; i++) {
        struct tl_handle_info info;
        struct tl_prefix_shape shape;
        uint64_t bytes, reserved;
        tl_handle_info(h[i], &info);
        shape = (struct tl_prefix_shape){info.n_tokens, info.n_loops, info.max_loops, info.cache_window};
        tl_handle_estimate(t.m, info.kind, &shape, &bytes, &reserved);
        ck_assert_uint_eq(bytes, info.bytes);
        ck_assert_uint_eq(reserved, info.bytes_reserved);
        tl_handle_free(h[i]);
    }
}
END_TEST

START_TEST(a_finished_conversation_can_be_kept_whole)
{
    struct tl_request r;
    struct tl_result a;
    struct tl_handle_info info;
    greedy(&r, 50, 20);
    r.keep_all = true;
    a = generate(&r);
    ck_assert_ptr_nonnull(a.kept);
    tl_handle_info(a.kept, &info);
    ck_assert_int_eq(info.n_tokens, 50 + 19); /* the last token was never run */
    ck_assert_mem_eq(info.tokens + 50, a.tokens, 19 * sizeof(int32_t));
    tl_result_clear(&a);
}
END_TEST

START_TEST(a_resume_promise_is_lent_and_comes_back)
{
    struct tl_handle *h = resumable(100, 2, 6);
    struct tl_handle_info info;
    struct tl_request r;
    struct tl_memory mem;
    uint64_t reserved;
    tl_handle_info(h, &info);
    ck_assert_uint_gt(info.bytes_reserved, 0);
    tl_model_memory(t.m, &mem);
    reserved = mem.kv_reserved;
    for (int i = 0; i < 3; i++) {
        struct tl_result a;
        greedy(&r, 0, 2);
        r.handle = h;
        r.new_L = 4 + i;
        a = generate(&r);
        tl_result_clear(&a);
        tl_model_memory(t.m, &mem);
        ck_assert_uint_eq(mem.kv_reserved, reserved);
    }
    tl_handle_free(h);
}
END_TEST

int main(void)
{
    const TTest *const cases[] = {
        a_prefix_hit_prefills_only_the_suffix,
        an_empty_suffix_needs_no_forward_pass,
        clones_share_one_copy_until_they_write,
        the_first_write_copies_one_block_per_slot_at_most,
        resume_runs_only_the_missing_iterations,
        a_resume_at_the_same_depth_is_a_prefix_hit,
        decoding_below_the_prefix_depth_is_allowed_and_not_exact,
        every_abort_of_the_contract_is_an_answer,
        a_handle_freed_in_use_lives_until_its_last_request,
        the_longest_registered_prefix_wins,
        one_wrong_token_is_a_miss_and_says_where,
        a_scope_never_sees_anothers_entries,
        an_automatic_entry_counts_in_full_blocks,
        a_shallower_entry_with_its_state_is_deepened,
        the_longest_of_many_alike_is_found,
        the_pool_evicts_the_least_recently_used_idle_entry,
        one_handle_in_two_scopes_goes_from_both_at_once,
        a_smaller_limit_evicts_and_tells,
        an_estimate_is_what_the_handle_then_takes,
        a_finished_conversation_can_be_kept_whole,
        a_resume_promise_is_lent_and_comes_back,
    };
    dir = tiny_model_dir("tiny", "int4");
    if (!dir)
        return 1;
    return suite_main("reuse", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown, 60);
}
