/* Requests with a grammar: the text keeps to it, the same tokens come out whatever was reused, and others are left alone. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "mem.h"
#include "suite.h"
#include "tiny_model.h"

static const char *dir; /* made once, before the tests fork */
static struct tiny t;
static int32_t prompt[200];
static struct tl_vocab_trie *vocab;
static struct tl_grammar *grammar; /* lists of small sums in brackets */
static int vocab_size;

#define OPEN  '['
#define CLOSE ']'

static struct tl_grammar *compile(const char *text)
{
    struct tl_grammar_source src = {.kind = TL_GRAMMAR_GBNF, .text = text, .text_bytes = strlen(text)};
    struct tl_grammar *g;
    struct tl_error err = {0};
    ck_assert_msg(tl_grammar_compile(&g, &src, NULL, &err) == TL_OK, "%s", err.msg);
    return g;
}

static void setup(void)
{
    static char bytes[256];
    struct tl_vocab_piece *pieces;
    tiny_open(&t, dir, 0);
    vocab_size = tl_model_info(t.m)->vocab_size;
    ck_assert_int_gt(vocab_size, 256);
    pieces = tl_calloc((size_t)vocab_size, sizeof(*pieces));
    for (int i = 0; i < 256; i++) {
        bytes[i] = (char)i;
        pieces[i] = (struct tl_vocab_piece){&bytes[i], 1};
    }
    pieces[256] = (struct tl_vocab_piece){"12", 2};
    pieces[257] = (struct tl_vocab_piece){"],[", 3};
    for (int i = 0; i < 200; i++)
        prompt[i] = (i * 37 + 11) % 300;
    ck_assert_int_eq(tl_vocab_trie_create(&vocab, pieces, vocab_size, NULL), TL_OK);
    tl_free(pieces);
    grammar = compile("root ::= \"[\" (root (\",\" root)* | sum) \"]\"\nsum ::= [0-9]+ (\"+\" [0-9]+)*");
}

static void teardown(void)
{
    tiny_close(&t);
    tl_grammar_free(grammar);
    tl_vocab_trie_free(vocab);
}

static void ask(struct tl_request *r, int max_tokens, float temperature)
{
    tl_request_default(r);
    r->tokens = prompt;
    r->n_tokens = 130;
    r->max_tokens = max_tokens;
    r->sampling.temperature = temperature;
    r->sampling.seed = 5;
    r->grammar = grammar;
    r->vocab = vocab;
}

static struct tl_result generate(const struct tl_request *r)
{
    struct tl_result res;
    struct tl_error err = {0};
    ck_assert_msg(tl_generate(t.s, r, &res, &err) == TL_OK, "%s", err.msg);
    return res;
}

/* Whether the tokens are the beginning of a text; *whole: all of one. */
static bool keeps_to(const struct tl_grammar *g, const struct tl_result *res, bool *whole)
{
    struct tl_matcher *m;
    bool good;
    ck_assert_int_eq(tl_matcher_create(&m, g, vocab, NULL), TL_OK);
    good = tl_matcher_accept_prompt(m, res->tokens, res->n_tokens, NULL) == TL_OK;
    *whole = tl_matcher_can_end(m);
    tl_matcher_free(m);
    return good;
}

static void check_same(const struct tl_result *a, const struct tl_request *r)
{
    struct tl_result b = generate(r);
    ck_assert_int_eq(a->n_tokens, b.n_tokens);
    ck_assert_mem_eq(a->tokens, b.tokens, (size_t)a->n_tokens * sizeof(int32_t));
    ck_assert_int_eq(a->finish, b.finish);
    ck_assert_int_gt(b.usage.n_reused, 0);
    tl_result_clear(&b);
}

START_TEST(the_same_tokens_fresh_and_reused)
{
    struct tl_prefix_params p = {.tokens = prompt, .seq_len = 100};
    struct tl_handle *plain, *resumable;
    struct tl_pool *pool;
    int full;
    struct tl_request r;
    struct tl_error err = {0};
    ck_assert_int_eq(tl_prefix_cache_build(&plain, t.s, &p, &err), TL_OK);
    full = plain ? tl_model_info(t.m)->spec->loops_default : 0;
    p.n_loops = full > 1 ? full - 1 : 1;
    ck_assert_int_eq(tl_resume_handle_build(&resumable, t.s, &p, full, &err), TL_OK);
    ck_assert_int_eq(tl_pool_create(&pool, t.m, 4, 1u << 30, &err), TL_OK);
    ck_assert_int_eq(tl_pool_add(pool, plain, 0, false, &err), TL_OK);
    for (int hot = 0; hot < 2; hot++) {
        struct tl_result fresh;
        bool whole;
        ask(&r, 40, hot ? 1.5f : 0);
        fresh = generate(&r);
        ck_assert(keeps_to(grammar, &fresh, &whole));
        ck_assert_int_eq(whole, fresh.finish == TL_FINISH_STOP);
        r.pool = pool;
        check_same(&fresh, &r);
        r.pool = NULL;
        r.tokens = prompt + 100;
        r.n_tokens = 30;
        r.handle = plain;
        check_same(&fresh, &r);
        r.handle = resumable;
        r.new_L = full;
        check_same(&fresh, &r);
        tl_result_clear(&fresh);
    }
    tl_pool_free(pool);
    tl_handle_free(plain);
    tl_handle_free(resumable);
}
END_TEST

START_TEST(a_complete_text_stops_and_a_cut_one_says_so)
{
    struct tl_grammar *date = compile("root ::= [0-9]{4} \"-\" [0-9]{2}"), *endless = compile("root ::= [a-z]+ \"!\"");
    struct tl_logit_bias no_end = {.token = '!', .bias = -100};
    struct tl_request r;
    struct tl_result res;
    bool whole;
    ask(&r, 40, 1);
    r.grammar = date;
    res = generate(&r);
    ck_assert(keeps_to(date, &res, &whole) && whole);
    ck_assert_int_eq(res.finish, TL_FINISH_STOP);
    ck_assert_int_le(res.n_tokens, 7);
    tl_result_clear(&res);
    ask(&r, 10, 1);
    r.grammar = endless;
    r.sampling.logit_bias = &no_end;
    r.sampling.n_logit_bias = 1;
    res = generate(&r);
    ck_assert(keeps_to(endless, &res, &whole) && !whole);
    ck_assert_int_eq(res.finish, TL_FINISH_LENGTH);
    tl_result_clear(&res);
    tl_grammar_free(date);
    tl_grammar_free(endless);
}
END_TEST

START_TEST(stop_ids_are_allowed_only_where_the_text_may_end)
{
    struct tl_grammar *words = compile("root ::= \"abc\" | \"abcde\"");
    int32_t stop = 299;
    struct tl_logit_bias wish = {.token = 299, .bias = 1000};
    struct tl_request r;
    struct tl_result res;
    ask(&r, 10, 0);
    r.grammar = words;
    r.sampling.stop_ids = &stop;
    r.sampling.n_stop_ids = 1;
    r.sampling.logit_bias = &wish;
    r.sampling.n_logit_bias = 1;
    res = generate(&r);
    ck_assert_int_eq(res.n_tokens, 3); /* "abc", and the wish comes true */
    ck_assert_int_eq(res.finish, TL_FINISH_STOP);
    tl_result_clear(&res);
    r.sampling.logit_bias = NULL;
    r.sampling.n_logit_bias = 0;
    r.sampling.ignore_eos = true;
    res = generate(&r);
    ck_assert_int_eq(res.n_tokens, 5);
    tl_result_clear(&res);
    tl_grammar_free(words);
}
END_TEST

START_TEST(a_full_grammar_reads_the_prompt_first)
{
    static const int32_t start[] = {OPEN, OPEN, '1', '+'}, wrong[] = {OPEN, '1', CLOSE, CLOSE};
    struct tl_request r;
    struct tl_result res;
    struct tl_error err = {0};
    ask(&r, 4, 0);
    r.grammar_full = true;
    r.tokens = start;
    r.n_tokens = 4;
    res = generate(&r);
    ck_assert(res.tokens[0] == 256 || (res.tokens[0] >= '0' && res.tokens[0] <= '9'));
    tl_result_clear(&res);
    r.tokens = wrong;
    ck_assert_int_eq(tl_generate(t.s, &r, &res, &err), TL_ERR_GRAMMAR_PREFIX_CONFLICT);
    ck_assert_int_eq(err.num[0].value, 3);
    r.n_tokens = 3; /* whole already, and nothing can follow */
    res = generate(&r);
    ck_assert_int_eq(res.n_tokens, 0);
    ck_assert_int_eq(res.finish, TL_FINISH_STOP);
    tl_result_clear(&res);
}
END_TEST

START_TEST(a_dead_end_is_an_error_of_its_own)
{
    struct tl_grammar *only = compile("root ::= \"x\" \"y\"");
    struct tl_logit_bias ban = {.token = 'y', .bias = -100};
    struct tl_request r;
    struct tl_result res;
    struct tl_error err = {0};
    ask(&r, 10, 0);
    r.grammar = only;
    r.sampling.logit_bias = &ban;
    r.sampling.n_logit_bias = 1;
    ck_assert_int_eq(tl_generate(t.s, &r, &res, &err), TL_ERR_GRAMMAR_NO_CONTINUATION);
    r.vocab = NULL;
    ck_assert_int_eq(tl_generate(t.s, &r, &res, &err), TL_ERR_BAD_PARAM);
    tl_grammar_free(only);
}
END_TEST

/* ---- forced text ---- */

#define RUN_MAX 128

struct run { /* what a request said, token by token */
    struct {
        int32_t token;
        int pos, n_loops, n_top;
        float logprob, top[3];
    } tokens[RUN_MAX];
    int n, pause_every, stop_at;
    enum tl_finish finish;
    struct tl_job *job;
};

static enum tl_verdict watch(void *arg, const struct tl_event *ev)
{
    struct run *r = arg;
    if (ev->kind == TL_EVENT_DONE)
        r->finish = ev->finish;
    if (ev->kind != TL_EVENT_TOKEN)
        return TL_GO_ON;
    ck_assert_int_lt(r->n, RUN_MAX);
    r->tokens[r->n].token = ev->sampled->token;
    r->tokens[r->n].pos = ev->pos;
    r->tokens[r->n].n_loops = ev->n_loops;
    r->tokens[r->n].n_top = ev->sampled->n_top;
    r->tokens[r->n].logprob = ev->sampled->logprob;
    for (int i = 0; i < 3 && i < ev->sampled->n_top; i++)
        r->tokens[r->n].top[i] = ev->sampled->top[i].logprob;
    r->n++;
    if (r->n == r->stop_at)
        return TL_STOP_HERE;
    return r->pause_every && r->n % r->pause_every == 0 ? TL_PAUSE : TL_GO_ON;
}

/* Steps that the request took. */
static int64_t run_it(struct tl_request q, struct run *r, int pause_every, int stop_at)
{
    struct tl_sched_stats before, after;
    struct tl_error err = {0};
    bool busy = true;
    memset(r, 0, sizeof(*r));
    r->pause_every = pause_every;
    r->stop_at = stop_at;
    r->finish = TL_FINISH_ERROR;
    q.on_event = watch;
    q.arg = r;
    tl_sched_stats(t.s, &before);
    ck_assert_msg(tl_sched_submit(t.s, &q, &r->job, &err) == TL_OK, "%s", err.msg);
    do {
        ck_assert_int_eq(tl_sched_step(t.s, &busy, &err), TL_OK);
        tl_sched_stats(t.s, &after);
        if (!busy && after.n_running > 0)
            tl_job_resume(r->job);
    } while (busy || after.n_running > 0);
    ck_assert_int_ne(r->finish, TL_FINISH_ERROR);
    return after.steps - before.steps;
}

static const char form_text[] =
    "root ::= \"{\\\"name\\\":\\\"\" [a-c]{1,9} \"\\\", \\\"number of it\\\": \" [0-9]{1,3} "
    "\", \\\"a longer name than others\\\": \" (\"true\" | \"false\") \"}\"";

START_TEST(forced_text_is_run_at_once_and_is_the_same)
{
    struct tl_grammar *form = compile(form_text);
    struct tl_prefix_params p = {.tokens = prompt, .seq_len = 100};
    struct tl_handle *plain, *resumable;
    struct tl_pool *pool;
    struct tl_error err = {0};
    int full = tl_model_info(t.m)->spec->loops_default;
    ck_assert_int_eq(tl_prefix_cache_build(&plain, t.s, &p, &err), TL_OK);
    p.n_loops = full > 1 ? full - 1 : 1;
    ck_assert_int_eq(tl_resume_handle_build(&resumable, t.s, &p, full, &err), TL_OK);
    ck_assert_int_eq(tl_pool_create(&pool, t.m, 4, 1u << 30, &err), TL_OK);
    ck_assert_int_eq(tl_pool_add(pool, plain, 0, false, &err), TL_OK);
    for (int kind = 0; kind < 12; kind++) {
        struct run slow, quick;
        struct tl_request r;
        int64_t slow_steps, quick_steps;
        ask(&r, kind == 4 ? 21 : 120, kind ? 1.3f : 0);
        r.grammar = form;
        r.sampling.seed = (uint64_t)kind;
        r.sampling.n_top_logprobs = kind % 4;
        r.sampling.repetition_penalty = kind == 5 ? 1.5f : 1;
        r.sampling.frequency_penalty = kind == 6 ? 1 : 0;
        r.decode_loops = kind == 7 ? 1 : 0;
        r.cache_window = kind == 8 ? 70 : -1;
        r.want_logits_hash = true; /* one by one */
        slow_steps = run_it(r, &slow, 0, kind == 3 ? 25 : 0);
        r.want_logits_hash = false;
        quick_steps = run_it(r, &quick, 0, kind == 3 ? 25 : 0);
        ck_assert_int_lt(quick_steps, slow_steps - slow.n / 3);
        ck_assert_mem_eq(&slow.tokens, &quick.tokens, sizeof(slow.tokens));
        ck_assert_int_eq(slow.n, quick.n);
        ck_assert_int_eq(slow.finish, quick.finish);
        ck_assert_int_eq(quick.n, kind == 3 ? 25 : kind == 4 ? 21 : quick.n);
        (void)run_it(r, &quick, 1 + kind % 3, kind == 3 ? 25 : 0);
        ck_assert_mem_eq(&slow.tokens, &quick.tokens, sizeof(slow.tokens));
        if (kind == 8)
            continue; /* the prefixes have no window */
        r.pool = pool;
        (void)run_it(r, &quick, 0, kind == 3 ? 25 : 0);
        ck_assert_mem_eq(&slow.tokens, &quick.tokens, sizeof(slow.tokens));
        r.pool = NULL;
        r.tokens = prompt + 100;
        r.n_tokens = 30;
        r.handle = kind % 2 ? plain : resumable;
        r.new_L = kind % 2 ? 0 : full;
        (void)run_it(r, &quick, 0, kind == 3 ? 25 : 0);
        ck_assert_mem_eq(&slow.tokens, &quick.tokens, sizeof(slow.tokens));
    }
    tl_pool_free(pool);
    tl_handle_free(plain);
    tl_handle_free(resumable);
    tl_grammar_free(form);
}
END_TEST

START_TEST(forced_text_comes_in_the_longest_pieces)
{
    static const int32_t want[] = {'x', 256, 257, 257};
    struct tl_grammar *fixed = compile("root ::= \"x12],[],[\" [0-9]"),
                      *beyond = compile("root ::= \"],\" ([[] | [(])");
    struct tl_logit_bias bias = {.token = '1', .bias = 100};
    int32_t stop = 256;
    struct tl_request r;
    struct tl_result res;
    ask(&r, 20, 1);
    r.grammar = fixed;
    res = generate(&r);
    ck_assert_int_eq(res.n_tokens, 5);
    ck_assert_mem_eq(res.tokens, want, sizeof(want));
    tl_result_clear(&res);
    r.sampling.stop_ids = &stop; /* ends the text, so it is no piece of it */
    r.sampling.n_stop_ids = 1;
    res = generate(&r);
    ck_assert_int_eq(res.n_tokens, 6);
    ck_assert_int_eq(res.tokens[1], '1');
    tl_result_clear(&res);
    r.sampling.n_stop_ids = 0;
    r.sampling.logit_bias = &bias; /* has its way */
    r.sampling.n_logit_bias = 1;
    r.sampling.temperature = 0;
    res = generate(&r);
    ck_assert_int_eq(res.tokens[1], '1');
    tl_result_clear(&res);
    bias.token = 257;
    r.grammar = beyond; /* a piece goes past what is forced: a choice */
    r.sampling.n_logit_bias = 0;
    for (int seed = 0, whole = 0, parts = 0; !whole || !parts; seed++) {
        ck_assert_int_lt(seed, 200);
        r.sampling.temperature = 2;
        r.sampling.seed = (uint64_t)seed;
        res = generate(&r);
        whole += res.tokens[0] == 257;
        parts += res.tokens[0] == ']';
        tl_result_clear(&res);
    }
    tl_grammar_free(fixed);
    tl_grammar_free(beyond);
}
END_TEST

/* The answer ends within text that was forced and not run any more: what is kept is what was run. */
START_TEST(what_is_kept_beside_forced_text_can_be_used)
{
    struct tl_grammar *form = compile("root ::= [a-c]{3} \"and so it ends\"");
    struct tl_handle_info info;
    struct tl_request r;
    struct tl_result said, again, fresh;
    int32_t all[200];
    ask(&r, 40, 1);
    r.grammar = form;
    r.keep_all = true;
    said = generate(&r);
    ck_assert_int_eq(said.finish, TL_FINISH_STOP);
    ck_assert_ptr_ne(said.kept, NULL);
    tl_handle_info(said.kept, &info);
    ck_assert_int_ge(info.n_tokens, 132);
    ck_assert_int_lt(info.n_tokens, 130 + said.n_tokens);
    memcpy(all, prompt, 130 * sizeof(int32_t));
    memcpy(all + 130, said.tokens, (size_t)said.n_tokens * sizeof(int32_t));
    ck_assert_mem_eq(all, info.tokens, (size_t)info.n_tokens * sizeof(int32_t));
    ask(&r, 20, 0);
    r.grammar = NULL;
    r.tokens = all;
    r.n_tokens = 130 + said.n_tokens;
    fresh = generate(&r);
    r.handle = said.kept;
    r.tokens = all + info.n_tokens;
    r.n_tokens -= info.n_tokens;
    again = generate(&r);
    ck_assert_int_eq(fresh.n_tokens, again.n_tokens);
    ck_assert_mem_eq(fresh.tokens, again.tokens, (size_t)fresh.n_tokens * sizeof(int32_t));
    tl_result_clear(&said);
    tl_result_clear(&again);
    tl_result_clear(&fresh);
    tl_grammar_free(form);
}
END_TEST

START_TEST(forced_text_of_many_requests_at_once)
{
    struct tl_grammar *form = compile(form_text);
    struct run alone[6], together[6];
    struct tl_request r;
    struct tl_job *job;
    struct tl_error err = {0};
    bool busy = true;
    for (int i = 0; i < 6; i++) {
        ask(&r, 120, 1.2f);
        r.grammar = i % 3 ? form : NULL;
        r.max_tokens = i % 3 ? 120 : 40;
        r.sampling.choice = (uint32_t)i;
        (void)run_it(r, &alone[i], 0, 0);
    }
    memset(together, 0, sizeof(together));
    for (int i = 0; i < 6; i++) {
        r.grammar = i % 3 ? form : NULL;
        r.max_tokens = i % 3 ? 120 : 40;
        r.sampling.choice = (uint32_t)i;
        r.on_event = watch;
        r.arg = &together[i];
        ck_assert_int_eq(tl_sched_submit(t.s, &r, &job, &err), TL_OK);
    }
    while (busy)
        ck_assert_int_eq(tl_sched_step(t.s, &busy, &err), TL_OK);
    for (int i = 0; i < 6; i++) {
        ck_assert_int_eq(alone[i].n, together[i].n);
        ck_assert_mem_eq(alone[i].tokens, together[i].tokens, sizeof(alone[i].tokens));
    }
    tl_grammar_free(form);
}
END_TEST

struct seen {
    int32_t tokens[256];
    int n;
    enum tl_finish finish;
    enum tl_status status;
};

static enum tl_verdict note(void *arg, const struct tl_event *ev)
{
    struct seen *s = arg;
    if (ev->kind == TL_EVENT_TOKEN)
        s->tokens[s->n++] = ev->sampled->token;
    if (ev->kind == TL_EVENT_DONE) {
        s->finish = ev->finish;
        s->status = ev->error ? ev->error->status : TL_OK;
    }
    return TL_GO_ON;
}

START_TEST(a_grammar_over_its_limits_fails_alone)
{
    struct tl_grammar_source src = {
        .kind = TL_GRAMMAR_GBNF, .text = "root ::= \"a\" root \"b\" | \"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!\""};
    struct tl_grammar_limits small = {.stack_max = 10};
    struct tl_grammar *hostile;
    struct seen seen[2] = {0};
    struct tl_request plain, bad;
    struct tl_result alone;
    struct tl_job *job;
    struct tl_error err = {0};
    bool busy = true;
    src.text_bytes = strlen(src.text);
    ck_assert_int_eq(tl_grammar_compile(&hostile, &src, &small, &err), TL_OK);
    ask(&plain, 20, 0);
    plain.grammar = NULL;
    alone = generate(&plain);
    ask(&bad, 60, 0);
    bad.grammar = hostile;
    plain.on_event = bad.on_event = note;
    plain.arg = &seen[0];
    bad.arg = &seen[1];
    ck_assert_int_eq(tl_sched_submit(t.s, &bad, &job, &err), TL_OK);
    ck_assert_int_eq(tl_sched_submit(t.s, &plain, &job, &err), TL_OK);
    while (busy)
        ck_assert_int_eq(tl_sched_step(t.s, &busy, &err), TL_OK);
    ck_assert_int_eq(seen[1].finish, TL_FINISH_ERROR);
    ck_assert_int_eq(seen[1].status, TL_ERR_INVALID_GRAMMAR);
    ck_assert_int_eq(seen[0].n, alone.n_tokens);
    ck_assert_mem_eq(seen[0].tokens, alone.tokens, (size_t)alone.n_tokens * sizeof(int32_t));
    tl_result_clear(&alone);
    tl_grammar_free(hostile);
}
END_TEST

static double now_ms(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (double)ts.tv_sec * 1e3 + (double)ts.tv_nsec * 1e-6;
}

/* Requests whose grammars are as dear as the limits let them be run beside a plain one: it says the same, and no step of it
 * gets long. */
START_TEST(dear_grammars_make_no_step_long)
{
    static const char *const sources[] = {
        "root ::= ([a]{0,1500} [b]?){50} \"c\"", "root ::= [ab]* \"a\" [ab]{30} \"c\"",
        "root ::= \"a\" root \"b\" | \"a\" root root \"c\" | \"a\"", "root ::= ([^a]? [^b]? [^c]? [^d]?){2000}"};
    struct tl_grammar *dear[4];
    struct tl_logit_bias bias = {.token = 'a', .bias = 100};
    struct seen plain_seen = {0}, dear_seen[4] = {0};
    struct tl_request plain, bad;
    struct tl_result alone;
    struct tl_job *job;
    struct tl_error err = {0};
    double worst = 0;
    bool busy = true;
    ask(&plain, 60, 0);
    plain.grammar = NULL;
    alone = generate(&plain);
    ask(&bad, 60, 1);
    bad.sampling.logit_bias = &bias;
    bad.sampling.n_logit_bias = 1;
    plain.on_event = bad.on_event = note;
    plain.arg = &plain_seen;
    ck_assert_int_eq(tl_sched_submit(t.s, &plain, &job, &err), TL_OK);
    for (int i = 0; i < 4; i++) {
        double start = now_ms();
        bad.grammar = dear[i] = compile(sources[i]);
        bad.arg = &dear_seen[i];
        ck_assert_int_eq(tl_sched_submit(t.s, &bad, &job, &err), TL_OK);
        worst = now_ms() - start > worst ? now_ms() - start : worst;
    }
    while (busy) {
        double start = now_ms();
        ck_assert_int_eq(tl_sched_step(t.s, &busy, &err), TL_OK);
        worst = now_ms() - start > worst ? now_ms() - start : worst;
    }
    ck_assert_msg(worst < 500, "%.1f ms", worst); /* some 20 of them are seen */
    ck_assert_int_eq(plain_seen.n, alone.n_tokens);
    ck_assert_mem_eq(plain_seen.tokens, alone.tokens, (size_t)alone.n_tokens * sizeof(int32_t));
    for (int i = 0; i < 4; i++)
        tl_grammar_free(dear[i]);
    tl_result_clear(&alone);
}
END_TEST

static enum tl_verdict count(void *arg, const struct tl_event *ev)
{
    *(int *)arg += ev->kind == TL_EVENT_TOKEN || ev->kind == TL_EVENT_DONE;
    return TL_GO_ON;
}

static bool step(void)
{
    struct tl_error err = {0};
    bool busy;
    ck_assert_msg(tl_sched_step(t.s, &busy, &err) == TL_OK, "%s", err.msg);
    return busy;
}

/* Each of these spends the work of a whole step on its first mask, and all of them come to it in the same step. */
START_TEST(dear_masks_take_turns)
{
    enum { N = 8 };
    struct tl_grammar *dear[N];
    struct seen plain_seen = {0};
    struct tl_request plain, bad;
    struct tl_result alone;
    struct tl_job *job;
    int n = 0, before, most = 0, during = 0;
    bool busy = true;
    ask(&plain, 60, 0);
    plain.grammar = NULL;
    alone = generate(&plain);
    plain.on_event = note;
    plain.arg = &plain_seen;
    ck_assert_int_eq(tl_sched_submit(t.s, &plain, &job, NULL), TL_OK);
    while (plain_seen.n == 0)
        step();
    ask(&bad, 60, 0);
    bad.n_tokens = 1;
    bad.on_event = count;
    bad.arg = &n;
    for (int i = 0; i < N; i++) {
        char source[80];
        snprintf(source, sizeof(source), "root ::= ([^a]? [^b]? [^c]? [^d]?){%d}", 2000 + i);
        bad.grammar = dear[i] = compile(source);
        ck_assert_int_eq(tl_sched_submit(t.s, &bad, &job, NULL), TL_OK);
    }
    while (busy) {
        before = n;
        busy = step();
        most = n - before > most ? n - before : most;
        during = n < N ? plain_seen.n : during;
    }
    ck_assert_int_eq(n, N); /* none of them is let through */
    ck_assert_int_le(most, 2);
    ck_assert_int_ge(during, N / 2);
    ck_assert_int_eq(plain_seen.n, alone.n_tokens);
    ck_assert_mem_eq(plain_seen.tokens, alone.tokens, (size_t)alone.n_tokens * sizeof(int32_t));
    for (int i = 0; i < N; i++)
        tl_grammar_free(dear[i]);
    tl_result_clear(&alone);
}
END_TEST

/* Masks and forced text that are left for later steps are the same as found at once, whatever kind of row is run again. */
START_TEST(dear_requests_say_the_same_beside_each_other)
{
    enum { N = 10 };
    struct tl_prefix_params p = {.tokens = prompt, .seq_len = 30, .n_loops = 1};
    int full = tl_model_info(t.m)->spec->loops_default;
    struct tl_handle *plain, *resumable;
    struct tl_sched *wide = t.s;
    static const char *const sources[] = {"root ::= (\"a\"?){300} \"aaaaaaaaaa\" \"a\"{400} [bc]",
                                          "root ::= ([a]{0,1500} [b]?){50} \"c\""};
    struct tl_grammar *dear[N];
    struct seen seen[N] = {0};
    struct tl_request r[N];
    struct tl_job *job;
    int most = 0;
    bool busy = true;
    ck_assert_int_eq(tl_resume_handle_build(&resumable, t.s, &p, full, NULL), TL_OK);
    p.n_loops = 0;
    ck_assert_int_eq(tl_prefix_cache_build(&plain, t.s, &p, NULL), TL_OK);
    ck_assert_int_eq(tl_sched_create(&t.s, t.m, &(struct tl_sched_params){.grammar_work = 300}, NULL), TL_OK);
    for (int i = 0; i < N; i++) {
        dear[i] = compile(sources[i % 2]);
        ask(&r[i], 150, 1);
        r[i].sampling.seed = (uint64_t)i;
        r[i].n_tokens = i >= 8 ? 0 : 20 + i;
        r[i].grammar = dear[i];
        r[i].handle = i == 6 || i == 8 ? plain : i == 7 || i == 9 ? resumable : NULL;
        r[i].new_L = i == 7 || i == 9 ? full : 0;
        r[i].on_event = note;
        r[i].arg = &seen[i];
        ck_assert_int_eq(tl_sched_submit(t.s, &r[i], &job, NULL), TL_OK);
    }
    while (busy) {
        int before[N];
        for (int i = 0; i < N; i++)
            before[i] = seen[i].n;
        busy = step();
        for (int i = 0; i < N; i++)
            most = seen[i].n - before[i] > most ? seen[i].n - before[i] : most;
    }
    ck_assert_int_le(most, 2); /* one that was forced, and then the budget is spent */
    tl_sched_free(t.s);
    t.s = wide;
    for (int i = 0; i < N; i++) {
        struct tl_result alone;
        r[i].on_event = NULL;
        r[i].want_logits_hash = i < 2; /* one by one */
        alone = generate(&r[i]);
        ck_assert_int_gt(alone.n_tokens, 0);
        ck_assert_int_eq(seen[i].n, alone.n_tokens);
        ck_assert_mem_eq(seen[i].tokens, alone.tokens, (size_t)alone.n_tokens * sizeof(int32_t));
        ck_assert_int_eq(seen[i].finish, alone.finish);
        tl_result_clear(&alone);
        tl_grammar_free(dear[i]);
    }
    tl_handle_free(plain);
    tl_handle_free(resumable);
}
END_TEST

START_TEST(a_prompt_that_is_part_of_the_text_is_read_beside_others)
{
    static const char source[] = "root ::= x{150} [ab]*\nx ::= [ab]{0,300} \"c\"?";
    struct tl_grammar *known = compile(source), *dear = compile(source), *dear_too = compile(source);
    struct seen plain_seen = {0}, dear_seen = {0};
    struct tl_request plain, bad;
    struct tl_result alone, res;
    struct tl_error err = {0};
    struct tl_job *job;
    int32_t text[150];
    int n_steps = 0;
    for (int i = 0; i < 150; i++)
        text[i] = prompt[i] % 3 ? 'a' : 'b';
    ask(&bad, 3, 0);
    bad.grammar = known;
    bad.grammar_full = true;
    bad.tokens = text;
    bad.n_tokens = 150;
    alone = generate(&bad);
    bad.grammar = dear; /* what a grammar has found out stays with it */
    bad.on_event = note;
    bad.arg = &dear_seen;
    ck_assert_int_eq(tl_sched_submit(t.s, &bad, &job, NULL), TL_OK);
    ask(&plain, 12, 0);
    plain.grammar = NULL;
    plain.n_tokens = 1;
    plain.on_event = note;
    plain.arg = &plain_seen;
    ck_assert_int_eq(tl_sched_submit(t.s, &plain, &(struct tl_job *){NULL}, NULL), TL_OK);
    for (; tl_job_position(job) > 0; n_steps++) /* it waits, and who came later does not */
        ck_assert(step());
    ck_assert_int_ge(n_steps, 4);
    ck_assert_int_ge(plain_seen.n, n_steps < 12 ? n_steps - 1 : 12);
    while (step())
        ;
    ck_assert_int_eq(dear_seen.n, alone.n_tokens);
    ck_assert_mem_eq(dear_seen.tokens, alone.tokens, (size_t)alone.n_tokens * sizeof(int32_t));
    dear_seen = (struct seen){.n = 0};
    bad.grammar = dear_too;
    ck_assert_int_eq(tl_sched_submit(t.s, &bad, &job, NULL), TL_OK);
    ck_assert(step());
    tl_job_cancel(job); /* while it is read */
    step();
    ck_assert_int_eq(dear_seen.finish, TL_FINISH_CANCELLED);
    text[140] = '!';
    bad.on_event = NULL;
    ck_assert_int_eq(tl_generate(t.s, &bad, &res, &err), TL_ERR_GRAMMAR_PREFIX_CONFLICT);
    ck_assert_int_eq(err.num[0].value, 140);
    tl_result_clear(&alone);
    tl_grammar_free(known);
    tl_grammar_free(dear);
    tl_grammar_free(dear_too);
}
END_TEST

START_TEST(a_failed_allocation_costs_only_the_request)
{
    int64_t live = tl_mem_live();
    enum tl_status st = TL_ERR_NO_HOST_MEMORY;
    struct tl_request r;
    struct tl_result res;
    struct tl_error err = {0};
    for (int64_t n = 1; st == TL_ERR_NO_HOST_MEMORY; n++) {
        struct tl_grammar *fresh = compile("root ::= \"(\" root? \")\" | [a-c]{2,40} \"!\"");
        ask(&r, 12, 1);
        r.grammar = fresh;
        tl_mem_fail_at(n);
        st = tl_generate(t.s, &r, &res, &err);
        tl_mem_fail_at(0);
        tl_grammar_free(fresh);
        if (st == TL_OK)
            tl_result_clear(&res);
        ck_assert_msg(st == TL_OK || st == TL_ERR_NO_HOST_MEMORY, "%s", err.msg);
        ck_assert_int_eq(tl_mem_live(), live);
        ck_assert_int_lt(n, 2000);
    }
}
END_TEST

int main(void)
{
    const TTest *const cases[] = {the_same_tokens_fresh_and_reused,
                                  a_complete_text_stops_and_a_cut_one_says_so,
                                  stop_ids_are_allowed_only_where_the_text_may_end,
                                  a_full_grammar_reads_the_prompt_first,
                                  a_dead_end_is_an_error_of_its_own,
                                  forced_text_is_run_at_once_and_is_the_same,
                                  forced_text_comes_in_the_longest_pieces,
                                  what_is_kept_beside_forced_text_can_be_used,
                                  forced_text_of_many_requests_at_once,
                                  a_grammar_over_its_limits_fails_alone,
                                  dear_grammars_make_no_step_long,
                                  dear_masks_take_turns,
                                  dear_requests_say_the_same_beside_each_other,
                                  a_prompt_that_is_part_of_the_text_is_read_beside_others,
                                  a_failed_allocation_costs_only_the_request};
    dir = tiny_model_dir("tiny", "int8");
    if (!dir)
        return 1;
    return suite_main("grammar_requests", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown, 60);
}
