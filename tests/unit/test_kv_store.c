/* Pages, promises and sequences: what is counted, shared, copied and given back. */
#include <stdlib.h>
#include <string.h>

#include "kv_store.h"
#include "seq.h"
#include "suite.h"

static struct tl_backend *be;
static struct tl_kv *kv;
static struct tl_arch_spec spec = {.d_model = 16,
                                   .n_heads = 2,
                                   .n_kv_heads = 1,
                                   .d_head = 8,
                                   .n_prelude = 1,
                                   .n_core = 2,
                                   .n_coda = 1,
                                   .inject = TL_INJECT_CONCAT_LINEAR};

static void setup(void)
{
    ck_assert_int_eq(tl_backend_cpu.open(&be, 1, NULL), TL_OK);
    ck_assert_int_eq(tl_kv_create(&kv, be, &spec, TL_KV_F16, 200, 32, NULL), TL_OK);
}

static void teardown(void)
{
    ck_assert_int_eq(kv->n_free, 200);
    ck_assert_int_eq(kv->n_reserved, 0);
    ck_assert_int_eq(kv->n_held, 0);
    tl_kv_free(kv);
    be->ops->close(be);
}

static void start(struct tl_seq *s, struct tl_seq_plan *p)
{
    int64_t lent, need = tl_seq_need(kv, p, &lent);
    ck_assert(tl_kv_reserve(kv, need));
    ck_assert_int_eq(tl_seq_start(s, kv, p, need, false, NULL), TL_OK);
}

static void grow(struct tl_seq *s, int len)
{
    ck_assert_int_eq(tl_seq_extend(s, len, NULL), TL_OK);
    tl_seq_commit(s, len);
}

static struct tl_handle *freeze(struct tl_seq *s)
{
    static const int32_t tokens[300];
    static const float row[16];
    struct tl_handle_make mk = {.kind = TL_HANDLE_PREFIX, .tokens = tokens, .last_row = row};
    struct tl_handle *h;
    ck_assert_int_eq(tl_seq_to_handle(s, &mk, &h, NULL), TL_OK);
    return h;
}

START_TEST(a_promise_cannot_exceed_what_is_free)
{
    int64_t mine = 150;
    ck_assert(tl_kv_reserve(kv, 150));
    ck_assert(!tl_kv_reserve(kv, 51));
    ck_assert_int_eq(tl_kv_available(kv), 50);
    ck_assert_int_ge(tl_kv_take(kv, &mine), 0);
    ck_assert_int_eq(mine, 149);
    ck_assert_int_eq(tl_kv_available(kv), 50);
    tl_kv_unreserve(kv, mine);
    ck_assert(tl_kv_unref(kv, 0));
}
END_TEST

START_TEST(a_page_holds_at_least_one_row_of_state)
{
    struct tl_arch_spec wide = spec;
    wide.d_model = 8192;
    ck_assert_int_ge(tl_kv_state_rows_per_page(&wide, tl_kv_page_bytes(&wide, TL_KV_F16)), 1);
    ck_assert_uint_eq(tl_kv_page_bytes(&spec, TL_KV_F16), 2 * 8 * 64 * 2);
    ck_assert_uint_eq(tl_kv_page_bytes(&spec, TL_KV_F32), 2 * 8 * 64 * 4);
}
END_TEST

START_TEST(a_sequence_takes_one_page_per_slot_and_block)
{
    struct tl_seq s;
    struct tl_seq_plan p = {.n_loops = 3, .len_max = 130};
    start(&s, &p);
    ck_assert_int_eq(kv->n_free, 200);
    grow(&s, 1);
    ck_assert_int_eq(200 - kv->n_free, 8); /* prelude 1, coda 1, 3 loops of 2 */
    grow(&s, 64);
    ck_assert_int_eq(200 - kv->n_free, 8);
    grow(&s, 65);
    ck_assert_int_eq(200 - kv->n_free, 16);
    tl_seq_truncate(&s, 10);
    ck_assert_int_eq(s.len, 10);
    grow(&s, 130);
    ck_assert_int_eq(200 - kv->n_free, 24);
    ck_assert_int_eq(s.reserved, 0);
    tl_seq_end(&s);
    tl_seq_end(&s); /* twice is fine */
}
END_TEST

START_TEST(a_clone_copies_the_tail_block_only_and_only_once)
{
    struct tl_seq s, c;
    struct tl_seq_plan p = {.n_loops = 1, .len_max = 100};
    struct tl_handle *h;
    start(&s, &p);
    grow(&s, 100);
    h = freeze(&s);
    tl_seq_end(&s);
    ck_assert_int_eq(200 - kv->n_free, 8); /* 4 slots of 2 blocks */
    ck_assert_int_eq(kv->n_held, 8);
    p = (struct tl_seq_plan){.base = h, .base_len = 100, .n_loops = 1, .len_max = 140};
    start(&c, &p);
    ck_assert_int_eq(200 - kv->n_free, 8);
    grow(&c, 101);
    ck_assert_int_eq(200 - kv->n_free, 12);
    grow(&c, 128);
    ck_assert_int_eq(200 - kv->n_free, 12);
    grow(&c, 140);
    ck_assert_int_eq(200 - kv->n_free, 16);
    for (int slot = 0; slot < 4; slot++) {
        ck_assert_int_eq(c.pages[slot * c.stride], h->pages[slot * h->n_blocks]);
        ck_assert_int_ne(c.pages[slot * c.stride + 1], h->pages[slot * h->n_blocks + 1]);
    }
    tl_handle_free(h); /* the clone still needs it */
    ck_assert_int_eq(200 - kv->n_free, 16);
    tl_seq_end(&c);
}
END_TEST

START_TEST(a_handle_on_a_handle_shares_its_pages)
{
    struct tl_seq s;
    struct tl_seq_plan p = {.n_loops = 1, .len_max = 64};
    struct tl_handle *a, *b;
    start(&s, &p);
    grow(&s, 64);
    a = freeze(&s);
    tl_seq_end(&s);
    p = (struct tl_seq_plan){.base = a, .base_len = 64, .n_loops = 1, .len_max = 70};
    start(&s, &p);
    grow(&s, 70);
    b = freeze(&s);
    tl_seq_end(&s);
    ck_assert_int_eq(200 - kv->n_free, 8);
    ck_assert_int_eq(kv->n_held, 8);
    tl_handle_free(a); /* its pages live on in b */
    ck_assert_int_eq(200 - kv->n_free, 8);
    tl_handle_free(b);
}
END_TEST

START_TEST(a_resumed_sequence_writes_new_loops_and_its_own_coda)
{
    struct tl_seq s;
    struct tl_seq_plan p = {.n_loops = 1, .len_max = 64};
    struct tl_handle *h;
    start(&s, &p);
    grow(&s, 64);
    h = freeze(&s);
    tl_seq_end(&s);
    p = (struct tl_seq_plan){.base = h, .base_len = 64, .n_loops = 3, .len_max = 64};
    start(&s, &p);
    tl_seq_resume_to(&s, 64);
    ck_assert_int_eq(200 - kv->n_free, 4 + 1 + 4); /* coda, two loops of two layers */
    ck_assert_int_eq(s.reserved, 0);
    tl_seq_end(&s);
    tl_handle_free(h);
}
END_TEST

START_TEST(a_window_returns_pages_to_the_sequence_that_grows)
{
    struct tl_seq s;
    struct tl_seq_plan p = {.n_loops = 1, .len_max = 1000, .window = 64};
    int64_t lent;
    ck_assert_int_eq(tl_seq_need(kv, &p, &lent), 4 * ((64 + 32) / 64 + 2));
    start(&s, &p);
    for (int len = 32; len <= 960; len += 32)
        grow(&s, len);
    ck_assert_int_le(200 - kv->n_free, 4 * 3);
    tl_seq_end(&s);
}
END_TEST

int main(void)
{
    const TTest *const cases[] = {
        a_promise_cannot_exceed_what_is_free,
        a_page_holds_at_least_one_row_of_state,
        a_sequence_takes_one_page_per_slot_and_block,
        a_clone_copies_the_tail_block_only_and_only_once,
        a_handle_on_a_handle_shares_its_pages,
        a_resumed_sequence_writes_new_loops_and_its_own_coda,
        a_window_returns_pages_to_the_sequence_that_grows,
    };
    return suite_main("kv_store", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown, 20);
}
