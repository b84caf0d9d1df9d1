/* Every allocation and every device call of every path fails once (the CPU's device memory is host memory). After each failure nothing is held, and the next try works. */
#include <string.h>

#include "fault_backend.h"
#include "mem.h"
#include "suite.h"
#include "tiny_model.h"

#define N_PROMPT 70

static const char *dir;
static struct tiny t, adaptive; /* adaptive: a model with an exit gate */
static int32_t prompt[N_PROMPT];

static struct tl_model_params params(void)
{
    return (struct tl_model_params){.dir = dir, .device = "test", .n_threads = 1, .step_rows_max = 32};
}

static void setup(void)
{
    struct tl_model_params p = params();
    for (int i = 0; i < N_PROMPT; i++)
        prompt[i] = (i * 29 + 3) % 97;
    fault_install();
    fault_reset();
    tiny_open_with(&t, &p, NULL);
    p.dir = "tests/golden/ouro-tiny";
    tiny_open_with(&adaptive, &p, NULL);
}
static void teardown(void)
{
    tiny_close(&t);
    tiny_close(&adaptive);
}

/* One path: TL_OK or an error; whatever it made is released before it returns. */
typedef enum tl_status path_fn(struct tl_error *err);

static enum tl_status do_generate(struct tl_error *err)
{
    struct tl_request r;
    struct tl_result res;
    enum tl_status st;
    struct tl_logit_bias bias = {.token = 3, .bias = 1};
    int32_t stop = 299;
    tl_request_default(&r);
    r.tokens = prompt;
    r.n_tokens = N_PROMPT;
    r.max_tokens = 3;
    r.sampling.repetition_penalty = 1.1f;
    r.sampling.logit_bias = &bias;
    r.sampling.n_logit_bias = 1;
    r.sampling.stop_ids = &stop;
    r.sampling.n_stop_ids = 1;
    r.keep_all = true;
    st = tl_generate(t.s, &r, &res, err);
    if (st == TL_OK)
        tl_result_clear(&res);
    return st;
}

static enum tl_status do_prefix(struct tl_error *err)
{
    struct tl_handle *h = NULL;
    struct tl_request r;
    struct tl_result res;
    struct tl_prefix_params p = {.tokens = prompt, .seq_len = N_PROMPT - 10};
    enum tl_status st = tl_prefix_cache_build(&h, t.s, &p, err);
    if (st == TL_OK) {
        tl_request_default(&r);
        r.handle = h;
        r.tokens = prompt + N_PROMPT - 10;
        r.n_tokens = 10;
        r.max_tokens = 2;
        st = tl_generate(t.s, &r, &res, err);
        if (st == TL_OK)
            tl_result_clear(&res);
    } else {
        ck_assert_ptr_null(h);
    }
    tl_handle_free(h);
    return st;
}

static enum tl_status do_resume(struct tl_error *err)
{
    struct tl_handle *h = NULL, *deep = NULL;
    struct tl_request r;
    struct tl_result res;
    struct tl_prefix_params p = {.tokens = prompt, .seq_len = N_PROMPT, .n_loops = 1};
    enum tl_status st = tl_resume_handle_build(&h, t.s, &p, 4, err);
    if (st == TL_OK) {
        tl_request_default(&r);
        r.handle = h;
        r.new_L = 3;
        r.max_tokens = 2;
        st = tl_generate(t.s, &r, &res, err);
        if (st == TL_OK) {
            tl_result_clear(&res);
            st = tl_resume_handle_promote(&deep, t.s, h, 4, err);
        }
    }
    tl_handle_free(deep);
    tl_handle_free(h);
    return st;
}

static enum tl_status do_pool(struct tl_error *err)
{
    struct tl_pool *pool = NULL;
    struct tl_handle *h = NULL;
    struct tl_prefix_params p = {.tokens = prompt, .seq_len = 40};
    struct tl_request r;
    struct tl_result res;
    enum tl_status st = tl_pool_create(&pool, t.m, 2, 0, err);
    if (st == TL_OK)
        st = tl_prefix_cache_build(&h, t.s, &p, err);
    if (st == TL_OK)
        st = tl_pool_add(pool, h, 0, false, err);
    tl_handle_free(h);
    if (st == TL_OK) {
        tl_request_default(&r);
        r.pool = pool;
        r.tokens = prompt;
        r.n_tokens = N_PROMPT;
        r.max_tokens = 2;
        st = tl_generate(t.s, &r, &res, err);
        if (st == TL_OK)
            tl_result_clear(&res);
    }
    tl_pool_free(pool);
    return st;
}

static enum tl_status do_adaptive(struct tl_error *err)
{
    struct tl_request r;
    struct tl_result res;
    enum tl_status st;
    tl_request_default(&r);
    r.tokens = prompt;
    r.n_tokens = 40;
    r.max_tokens = 3;
    r.adaptive = true;
    st = tl_generate(adaptive.s, &r, &res, err);
    if (st == TL_OK)
        tl_result_clear(&res);
    return st;
}

static enum tl_status do_logits(struct tl_error *err)
{
    float row[300];
    struct tl_logits_params p = {.tokens = prompt, .n_tokens = N_PROMPT, .n_loops = 2, .n_rows = 1, .logits = row};
    return tl_logits(t.m, &p, err);
}

static enum tl_status do_open(struct tl_error *err)
{
    struct tl_model *m;
    struct tl_model_params p = params();
    enum tl_status st = tl_model_open(&m, &p, err);
    if (st == TL_OK)
        tl_model_free(m);
    else
        ck_assert_ptr_null(m);
    return st;
}

/* Fail call 1, 2, 3 ... until a whole run goes through. arm(0) takes the fault back. */
static void every_call(path_fn *path, void (*arm)(int64_t n), enum tl_status expected)
{
    struct tl_error err = {0};
    int64_t live;
    uint64_t used;
    int n = 0;

    ck_assert_msg(path(&err) == TL_OK, "%s", err.msg);
    live = tl_mem_live();
    used = tiny_kv_used(&t);
    for (n = 1;; n++) {
        enum tl_status st;
        arm(n);
        st = path(&err);
        arm(0);
        ck_assert_int_eq(tl_mem_live(), live);
        ck_assert_uint_eq(tiny_kv_used(&t), used);
        if (st == TL_OK && n > 1)
            break; /* either the fault was past the end, or it hit something that is allowed to be missing */
        if (st != TL_OK) {
            ck_assert_msg(st == expected || st == TL_ERR_NO_DEVICE_MEMORY, "call %d: %s: %s", n, tl_status_name(st),
                          err.msg);
            ck_assert(err.msg[0] != 0);
        }
    }
    ck_assert_int_gt(n, 2);
    ck_assert_msg(path(&err) == TL_OK, "afterwards: %s", err.msg);
}

#define FAULT_CASES(name)                                                                                              \
    START_TEST(name##_survives_every_failed_allocation)                                                                \
    {                                                                                                                  \
        every_call(do_##name, tl_mem_fail_at, TL_ERR_NO_HOST_MEMORY);                                                  \
    }                                                                                                                  \
    END_TEST                                                                                                           \
    START_TEST(name##_survives_every_failed_device_call) { every_call(do_##name, fault_fail_call, TL_ERR_DEVICE); }    \
    END_TEST

FAULT_CASES(open)
FAULT_CASES(generate)
FAULT_CASES(prefix)
FAULT_CASES(resume)
FAULT_CASES(pool)
FAULT_CASES(logits)
FAULT_CASES(adaptive)

int main(void)
{
    const TTest *const cases[] = {
        open_survives_every_failed_allocation,     open_survives_every_failed_device_call,
        generate_survives_every_failed_allocation, generate_survives_every_failed_device_call,
        prefix_survives_every_failed_allocation,   prefix_survives_every_failed_device_call,
        resume_survives_every_failed_allocation,   resume_survives_every_failed_device_call,
        pool_survives_every_failed_allocation,     pool_survives_every_failed_device_call,
        logits_survives_every_failed_allocation,   logits_survives_every_failed_device_call,
        adaptive_survives_every_failed_allocation, adaptive_survives_every_failed_device_call,
    };
    dir = tiny_model_dir("tiny", "int4");
    if (!dir)
        return 1;
    return suite_main("faults", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown, 120);
}
