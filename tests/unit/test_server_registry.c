/* Named entries against the real engine: every rule of their life has a case, and a thousand random interleavings show that
 * nothing that happens to a name disturbs what runs on it. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "http_status.h"
#include "registry.h"
#include "suite.h"
#include "tiny_model.h"

static const char *dir; /* made once, before the tests fork */
static struct tiny t;
static struct tl_registry *reg;
static int64_t clock_now = 1000000;
static int n_dropped;
static int32_t prompt[512];

static int64_t fake_clock(void) { return clock_now; }
static void on_dropped(void *arg, const struct tl_definition *d)
{
    (void)arg;
    (void)d;
    n_dropped++;
}

static void open_registry(int pages, int capacity, int tenant_entries)
{
    struct tl_error err = {0};
    struct tl_registry_params p = {.pool_capacity = capacity, .entries_max = 100, .tenant_entries_max = tenant_entries,
                                   .now = fake_clock, .dropped = on_dropped};
    tiny_open(&t, dir, pages);
    p.model = t.m;
    p.sched = t.s;
    ck_assert_msg(tl_registry_create(&reg, &p, &err) == TL_OK, "%s", err.msg);
}

static void setup(void)
{
    for (int i = 0; i < 512; i++) prompt[i] = (i * 37 + 11) % 300;
    open_registry(0, 4, 50);
}

static void teardown(void)
{
    tl_sched_free(t.s);
    t.s = NULL;
    tl_registry_free(reg);
    tiny_close(&t);
}

static void turn(void)
{
    struct tl_error err = {0};
    bool busy;
    ck_assert_msg(tl_sched_step(t.s, &busy, &err) == TL_OK, "%s", err.msg);
    tl_registry_tick(reg);
}

static struct tl_definition *define(enum tl_entry_kind kind, const char *tenant, const char *id, int n, int loops)
{
    struct tl_definition *d = calloc(1, sizeof(*d));
    d->kind = kind;
    snprintf(d->id, sizeof(d->id), "%s", id);
    snprintf(d->tenant, sizeof(d->tenant), "%s", tenant);
    snprintf(d->fingerprint, sizeof(d->fingerprint), "%s", tl_model_info(t.m)->fingerprint);
    d->tokens = malloc((size_t)n * sizeof(int32_t));
    memcpy(d->tokens, prompt, (size_t)n * sizeof(int32_t));
    d->n_tokens = n;
    d->loops = loops;
    d->max_loops = kind == TL_ENTRY_RESUME ? 8 : loops;
    ck_assert(tl_definition_digest(d));
    return d;
}

/* To its end: 0, or the code. */
static int make(struct tl_making *m)
{
    struct tl_error err = {0};
    int code = tl_registry_make(reg, m, &err);
    for (int i = 0; !code && m->state == TL_MAKING_WAITS && i < 1000; i++) turn();
    if (!code && m->state == TL_MAKING_MADE) tl_registry_commit(reg, m);
    if (!code) ck_assert(m->state == TL_MAKING_DONE || m->state == TL_MAKING_FAILED);
    return code ? code : m->state == TL_MAKING_FAILED ? m->code : 0;
}

static int put(enum tl_entry_kind kind, const char *tenant, const char *id, int n, int loops)
{
    struct tl_making m = {.def = define(kind, tenant, id, n, loops)};
    return make(&m);
}

static uint64_t generation_of(enum tl_entry_kind kind, const char *tenant, const char *id)
{
    struct tl_view v;
    struct tl_error err = {0};
    ck_assert_int_eq(tl_registry_view(reg, kind, tenant, id, &v, &err), 0);
    uint64_t g = v.def.generation;
    tl_view_clear(&v);
    return g;
}

static int code_of(enum tl_entry_kind kind, const char *tenant, const char *id, int64_t *reason)
{
    struct tl_view v;
    struct tl_error err = {0};
    int code = tl_registry_view(reg, kind, tenant, id, &v, &err);
    if (reason) *reason = -1;
    for (int i = 0; i < err.n_nums && reason; i++)
        if (strcmp(err.num[i].key, "reason") == 0) *reason = err.num[i].value;
    tl_view_clear(&v);
    return code;
}

static int drop(enum tl_entry_kind kind, const char *tenant, const char *id, struct tl_deletion *d)
{
    struct tl_deletion plain = {0};
    struct tl_error err = {0};
    return tl_registry_delete(reg, kind, tenant, id, d ? d : &plain, &err);
}

static struct tl_registry_counters counters(void)
{
    struct tl_registry_counters c;
    tl_registry_counters(reg, &c);
    return c;
}

#define PC TL_ENTRY_PREFIX
#define RH TL_ENTRY_RESUME
#define PE TL_ENTRY_POOL

START_TEST(the_same_content_again_is_no_work)
{
    struct tl_making again = {.def = define(PC, "a", "x", 40, 3)};
    ck_assert_int_eq(put(PC, "a", "x", 40, 3), 0);
    ck_assert_int_eq(make(&again), 0);
    ck_assert_int_eq(again.outcome, TL_MADE_BEFORE);
    ck_assert_uint_eq(counters().built[PC], 1);
}
END_TEST

START_TEST(other_content_needs_the_tag)
{
    ck_assert_int_eq(put(PC, "a", "x", 40, 3), 0);
    ck_assert_int_eq(put(PC, "a", "x", 41, 3), TL_CODE_ID_EXISTS);
    ck_assert_int_eq(put(PC, "a", "x", 40, 4), TL_CODE_ID_EXISTS);
    struct tl_making wrong = {.def = define(PC, "a", "x", 41, 3), .must_match = true, .match = 5};
    ck_assert_int_eq(make(&wrong), TL_CODE_PRECONDITION_FAILED);
    uint64_t before = generation_of(PC, "a", "x");
    struct tl_making right = {.def = define(PC, "a", "x", 41, 3), .must_match = true, .match = before};
    ck_assert_int_eq(make(&right), 0);
    ck_assert_int_eq(right.outcome, TL_MADE_REPLACED);
    ck_assert_uint_ne(generation_of(PC, "a", "x"), before);
    struct tl_making fresh = {.def = define(PC, "a", "x", 41, 3), .must_be_new = true};
    ck_assert_int_eq(make(&fresh), TL_CODE_PRECONDITION_FAILED);
    struct tl_making nobody = {.def = define(PC, "a", "y", 41, 3), .must_match = true, .match_any = true};
    ck_assert_int_eq(make(&nobody), TL_CODE_PRECONDITION_FAILED);
}
END_TEST

START_TEST(identical_builds_are_one_build)
{
    struct tl_making a = {.def = define(PC, "a", "x", 100, 3)}, b = {.def = define(PC, "a", "x", 100, 3)};
    struct tl_making c = {.def = define(PC, "a", "y", 100, 3)}, d = {.def = define(PC, "b", "y", 100, 3)};
    struct tl_error err = {0};
    ck_assert_int_eq(tl_registry_make(reg, &a, &err), 0);
    ck_assert_int_eq(tl_registry_make(reg, &b, &err), 0);
    ck_assert_int_eq(tl_registry_make(reg, &c, &err), 0);
    ck_assert_int_eq(tl_registry_make(reg, &d, &err), 0);
    ck_assert_int_eq(code_of(PC, "a", "x", NULL), 0);
    struct tl_claim claim;
    ck_assert_int_eq(tl_registry_claim(reg, PC, "a", "x", &claim, &err), TL_CODE_RESOURCE_BUILDING);
    ck_assert_int_eq(put(PC, "a", "x", 99, 3), TL_CODE_RESOURCE_BUILDING);
    while (a.state == TL_MAKING_WAITS || c.state == TL_MAKING_WAITS || d.state == TL_MAKING_WAITS) turn();
    ck_assert_int_eq(b.state, TL_MAKING_WAITS); /* it waits for a's commit, not for the computation alone */
    tl_registry_commit(reg, &a);
    tl_registry_commit(reg, &c);
    tl_registry_commit(reg, &d);
    tl_registry_tick(reg);
    if (b.state == TL_MAKING_WAITS) turn();
    ck_assert_int_eq(b.state, TL_MAKING_DONE);
    ck_assert_int_eq(b.outcome, TL_MADE_BEFORE);
    ck_assert_uint_eq(counters().built[PC], 2); /* one for each tenant: what others have must not show */
    ck_assert_uint_eq(counters().shared[PC], 1);
}
END_TEST

START_TEST(one_copy_for_equal_entries_of_a_tenant)
{
    ck_assert_int_eq(put(PC, "a", "x", 130, 3), 0);
    uint64_t used = tiny_kv_used(&t);
    ck_assert_int_eq(put(PC, "a", "y", 130, 3), 0);
    ck_assert_uint_eq(tiny_kv_used(&t), used);
    ck_assert_int_eq(put(RH, "a", "r", 130, 3), 0);
    ck_assert_int_eq(put(RH, "a", "s", 130, 3), 0);
    ck_assert_uint_eq(counters().built[RH], 2); /* each holds its own promise of a resume */
}
END_TEST

START_TEST(deleting_a_claimed_name_waits)
{
    struct tl_claim claim;
    struct tl_error err = {0};
    struct tl_deletion busy = {.if_idle = true}, soft = {0};
    int64_t reason;
    ck_assert_int_eq(put(PC, "a", "x", 40, 3), 0);
    ck_assert_int_eq(tl_registry_claim(reg, PC, "a", "x", &claim, &err), 0);
    ck_assert(claim.ready);
    ck_assert_int_eq(drop(PC, "a", "x", &busy), TL_CODE_RESOURCE_IN_USE);
    ck_assert_int_eq(drop(PC, "a", "x", &soft), 0);
    ck_assert_int_eq(soft.in_flight, 1);
    ck_assert_int_eq(code_of(PC, "a", "x", &reason), TL_CODE_RESOURCE_GONE);
    ck_assert_int_eq(reason, TL_GONE_DELETING);
    ck_assert_int_eq(drop(PC, "a", "x", NULL), TL_CODE_RESOURCE_GONE);
    ck_assert_uint_gt(tiny_kv_used(&t), 0);
    tl_registry_release(reg, &claim);
    tl_registry_release(reg, &claim);
    ck_assert_uint_eq(tiny_kv_used(&t), 0);
    ck_assert_int_eq(code_of(PC, "a", "x", &reason), TL_CODE_RESOURCE_GONE);
    ck_assert_int_eq(reason, TL_GONE_DELETED);
    ck_assert_int_eq(put(PC, "a", "x", 50, 2), 0); /* the name is free again */
}
END_TEST

START_TEST(a_replaced_entry_serves_those_who_had_it)
{
    struct tl_claim old, new;
    struct tl_handle_info info;
    struct tl_error err = {0};
    ck_assert_int_eq(put(PC, "a", "x", 40, 3), 0);
    ck_assert_int_eq(tl_registry_claim(reg, PC, "a", "x", &old, &err), 0);
    struct tl_making m = {.def = define(PC, "a", "x", 70, 3), .must_match = true, .match_any = true};
    ck_assert_int_eq(make(&m), 0);
    ck_assert_int_eq(tl_registry_claim(reg, PC, "a", "x", &new, &err), 0);
    tl_handle_info(old.handle, &info);
    ck_assert_int_eq(info.n_tokens, 40);
    tl_handle_info(new.handle, &info);
    ck_assert_int_eq(info.n_tokens, 70);
    tl_registry_release(reg, &old);
    ck_assert_int_eq(code_of(PC, "a", "x", NULL), 0);
    tl_registry_release(reg, &new);
}
END_TEST

START_TEST(time_runs_out_fixed_and_sliding)
{
    struct tl_claim claim;
    struct tl_error err = {0};
    int64_t reason;
    struct tl_making fixed = {.def = define(PC, "a", "fixed", 40, 3)}, sliding = {.def = define(PC, "a", "sliding", 40, 2)};
    fixed.def->ttl_seconds = sliding.def->ttl_seconds = 10;
    fixed.def->persist = true;
    sliding.def->sliding = true;
    ck_assert_int_eq(make(&fixed), 0);
    ck_assert_int_eq(make(&sliding), 0);
    clock_now += 9;
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(tl_registry_claim(reg, PC, "a", i ? "sliding" : "fixed", &claim, &err), 0);
        tl_registry_release(reg, &claim);
    }
    clock_now += 1;
    tl_registry_tick(reg);
    ck_assert_int_eq(n_dropped, 1);
    ck_assert_int_eq(code_of(PC, "a", "fixed", &reason), TL_CODE_RESOURCE_GONE);
    ck_assert_int_eq(reason, TL_GONE_EXPIRED);
    ck_assert_int_eq(code_of(PC, "a", "sliding", NULL), 0);
    clock_now += 9; /* nobody ticked: a look is enough */
    ck_assert_int_eq(code_of(PC, "a", "sliding", &reason), TL_CODE_RESOURCE_GONE);
    ck_assert_uint_eq(tiny_kv_used(&t), 0);
    clock_now += TL_TOMBSTONE_SECONDS + 1;
    ck_assert_int_eq(code_of(PC, "a", "sliding", NULL), TL_CODE_PREFIX_CACHE_NOT_FOUND);
}
END_TEST

START_TEST(tombstones_are_a_ring)
{
    char id[32];
    ck_assert_int_eq(put(PC, "a", "first", 20, 1), 0); /* one build, then shared */
    ck_assert_int_eq(put(PC, "a", "keep", 20, 1), 0);
    ck_assert_int_eq(drop(PC, "a", "first", NULL), 0);
    for (int i = 0; i < TL_TOMBSTONES; i++) {
        snprintf(id, sizeof(id), "id%d", i);
        ck_assert_int_eq(put(PC, "a", id, 20, 1), 0);
        ck_assert_int_eq(drop(PC, "a", id, NULL), 0);
    }
    ck_assert_int_eq(code_of(PC, "a", "first", NULL), TL_CODE_PREFIX_CACHE_NOT_FOUND);
    ck_assert_int_eq(code_of(PC, "a", "id0", NULL), TL_CODE_RESOURCE_GONE);
    ck_assert_int_eq(code_of(PC, "a", "id4095", NULL), TL_CODE_RESOURCE_GONE);
}
END_TEST

START_TEST(tenants_do_not_see_each_other)
{
    struct tl_listing l = {.kind = PC, .tenant = "b", .limit = 10, .state = -1};
    struct tl_error err = {0};
    ck_assert_int_eq(put(PC, "a", "x", 40, 3), 0);
    ck_assert_int_eq(code_of(PC, "b", "x", NULL), TL_CODE_PREFIX_CACHE_NOT_FOUND);
    ck_assert_int_eq(drop(PC, "b", "x", NULL), TL_CODE_PREFIX_CACHE_NOT_FOUND);
    ck_assert_int_eq(put(PC, "b", "x", 60, 3), 0); /* the same name, another thing */
    ck_assert_int_eq(tl_registry_list(reg, &l, &err), 0);
    ck_assert_int_eq(l.n, 1);
    ck_assert_int_eq(l.views[0].def.n_tokens, 60);
    tl_view_clear(&l.views[0]);
    free(l.views);
    ck_assert_uint_ne(tl_registry_scope(reg, "a", ""), tl_registry_scope(reg, "b", ""));
    ck_assert_uint_ne(tl_registry_scope(reg, "a", "s"), tl_registry_scope(reg, "a", ""));
}
END_TEST

START_TEST(pool_matches_stay_in_their_tenant)
{
    struct tl_match m;
    struct tl_making shared = {.def = define(PE, "root", "pe_s", 30, 3)};
    ck_assert_int_eq(put(PE, "a", "pe_1", 60, 3), 0);
    tl_registry_match(reg, prompt, 100, 3, 0, tl_registry_scope(reg, "b", ""), &m);
    ck_assert_int_eq(m.n_matched, 0);
    ck_assert_int_eq(m.n_common, 0); /* not even how near it was */
    tl_registry_match(reg, prompt, 100, 3, 0, tl_registry_scope(reg, "a", "other salt"), &m);
    ck_assert_int_eq(m.n_matched, 0);
    tl_registry_match(reg, prompt, 100, 3, 0, tl_registry_scope(reg, "a", ""), &m);
    ck_assert_int_eq(m.n_matched, 60);
    ck_assert_str_eq(m.entry, "pe_1");
    shared.def->shared = true;
    ck_assert_int_eq(make(&shared), 0);
    tl_registry_match(reg, prompt, 100, 3, 0, tl_registry_scope(reg, "b", ""), &m);
    ck_assert_int_eq(m.n_matched, 30);
}
END_TEST

START_TEST(limits_of_a_tenant)
{
    char id[16];
    struct tl_error err = {0};
    int entries, used;
    uint64_t bytes, bytes_used;
    ck_assert(tl_registry_quota_set(reg, "a", 3, 0));
    for (int i = 0; i < 3; i++) {
        snprintf(id, sizeof(id), "x%d", i);
        ck_assert_int_eq(put(PC, "a", id, 20 + i, 2), 0);
    }
    ck_assert_int_eq(put(PC, "a", "x3", 30, 2), TL_CODE_ENTRY_QUOTA);
    ck_assert_int_eq(put(PC, "b", "x3", 30, 2), 0);
    ck_assert_int_eq(put(PC, "a", "x2", 22, 2), 0); /* the same again takes no room */
    tl_registry_quota_get(reg, "a", &entries, &bytes, &used, &bytes_used);
    ck_assert_int_eq(entries, 3);
    ck_assert_int_eq(used, 3);
    ck_assert(tl_registry_quota_set(reg, "c", 0, 1000)); /* less than one page */
    ck_assert_int_eq(put(PC, "c", "x", 20, 2), TL_CODE_ENTRY_QUOTA);
    ck_assert_int_eq(tl_registry_check_room(reg, "a", &err), TL_CODE_ENTRY_QUOTA);
}
END_TEST

START_TEST(an_evicted_pool_entry_leaves_its_reason)
{
    char id[16];
    int64_t reason;
    for (int i = 0; i < 5; i++) { /* capacity 4 */
        snprintf(id, sizeof(id), "pe_%d", i);
        ck_assert_int_eq(put(PE, "a", id, 20 + i, 2), 0);
    }
    ck_assert_int_eq(code_of(PE, "a", "pe_0", &reason), TL_CODE_RESOURCE_GONE);
    ck_assert_int_eq(reason, TL_GONE_EVICTED);
    for (int i = 1; i < 5; i++) {
        snprintf(id, sizeof(id), "pe_%d", i);
        ck_assert_int_eq(code_of(PE, "a", id, NULL), 0);
    }
    ck_assert_int_eq(counters().pool.n_entries, 4);
    ck_assert_int_eq(drop(PE, "a", "pe_3", NULL), 0);
    ck_assert_int_eq(counters().pool.n_entries, 3);
    ck_assert_int_eq(code_of(PE, "a", "pe_3", &reason), TL_CODE_RESOURCE_GONE);
    ck_assert_int_eq(reason, TL_GONE_DELETED);
}
END_TEST

START_TEST(old_ids_never_name_new_content)
{
    char id[16];
    unsigned seed = 7;
    for (int i = 0; i < 1000; i++) {
        snprintf(id, sizeof(id), "pe_%d", i);
        prompt[0] = i % 300;
        ck_assert_int_eq(put(PE, "a", id, 12, 1), 0);
        int old = (int)(rand_r(&seed) % (unsigned)(i + 1));
        snprintf(id, sizeof(id), "pe_%d", old);
        int code = code_of(PE, "a", id, NULL);
        struct tl_match m;
        prompt[0] = old % 300;
        tl_registry_match(reg, prompt, 20, 1, 0, tl_registry_scope(reg, "a", ""), &m);
        if (code == 0) ck_assert_str_eq(m.entry, id);
        else ck_assert_int_eq(code, TL_CODE_RESOURCE_GONE);
    }
    ck_assert_int_eq(counters().pool.n_entries, 4);
}
END_TEST

START_TEST(a_prefix_cache_in_the_pool_has_one_copy_and_is_never_evicted)
{
    char id[16];
    struct tl_match m;
    struct tl_making x = {.def = define(PC, "a", "x", 40, 2)};
    x.def->in_pool = true;
    ck_assert_int_eq(make(&x), 0);
    uint64_t used = tiny_kv_used(&t);
    ck_assert_int_eq(put(PE, "a", "pe_same", 40, 2), 0); /* the same prefix, registered too */
    ck_assert_uint_eq(tiny_kv_used(&t), used);
    for (int i = 0; i < 10; i++) {
        snprintf(id, sizeof(id), "pe_%d", i);
        ck_assert_int_eq(put(PE, "a", id, 41 + i, 2), 0);
    }
    ck_assert_int_eq(code_of(PC, "a", "x", NULL), 0);
    tl_registry_match(reg, prompt, 40, 2, 0, tl_registry_scope(reg, "a", ""), &m);
    ck_assert_int_eq(m.n_matched, 40);
    ck_assert_str_eq(m.entry, "x");
    struct tl_patch patch = {.set_pool = true, .pool = false};
    struct tl_definition *changed;
    struct tl_error err = {0};
    ck_assert_int_eq(drop(PE, "a", "pe_same", NULL), 0);
    ck_assert_int_eq(tl_registry_patch(reg, PC, "a", "x", &patch, &changed, &err), 0);
    tl_registry_match(reg, prompt, 40, 2, 0, tl_registry_scope(reg, "a", ""), &m);
    ck_assert_int_eq(m.n_matched, 0);
}
END_TEST

START_TEST(a_stored_entry_is_computed_at_its_first_use)
{
    struct tl_claim a, b;
    struct tl_error err = {0};
    struct tl_definition *other = define(PC, "a", "other", 40, 3);
    int64_t reason;
    memset(other->fingerprint, 'f', 64);
    tl_registry_restore(reg, define(PC, "a", "x", 40, 3));
    tl_registry_restore(reg, other);
    ck_assert_int_eq(code_of(PC, "a", "other", &reason), TL_CODE_RESOURCE_GONE);
    ck_assert_int_eq(reason, TL_GONE_MODEL_CHANGED);
    for (int i = 0; i < 5; i++) turn();
    ck_assert_uint_eq(counters().built[PC], 0);
    ck_assert_int_eq(tl_registry_claim(reg, PC, "a", "x", &a, &err), 0);
    ck_assert_int_eq(tl_registry_claim(reg, PC, "a", "x", &b, &err), 0); /* a rebuild is waited for, not refused */
    ck_assert(!a.ready && !b.ready);
    for (int i = 0; i < 10 && !a.ready; i++) turn();
    ck_assert(a.ready && b.ready);
    ck_assert_ptr_eq(a.handle, b.handle);
    ck_assert_uint_eq(counters().built[PC], 1);
    tl_registry_release(reg, &a);
    tl_registry_release(reg, &b);
}
END_TEST

START_TEST(deleting_during_a_build_stops_it)
{
    struct tl_making m = {.def = define(PC, "a", "x", 200, 3)}, joined = {.def = define(PC, "a", "x", 200, 3)};
    struct tl_error err = {0};
    ck_assert_int_eq(tl_registry_make(reg, &m, &err), 0);
    ck_assert_int_eq(tl_registry_make(reg, &joined, &err), 0);
    turn();
    ck_assert_int_eq(drop(PC, "a", "x", NULL), 0);
    ck_assert_int_eq(m.state, TL_MAKING_FAILED);
    ck_assert_int_eq(joined.state, TL_MAKING_FAILED);
    ck_assert_int_eq(m.code, TL_ERR_CANCELLED);
    for (int i = 0; i < 5; i++) turn();
    ck_assert_uint_eq(tiny_kv_used(&t), 0);
}
END_TEST

START_TEST(out_of_memory_is_an_answer_and_leaves_nothing)
{
    teardown();
    open_registry(120, 4, 50);
    int code = 0, n = 0;
    char id[16];
    for (; !code && n < 40; n++) {
        snprintf(id, sizeof(id), "x%d", n);
        prompt[0] = n;
        code = put(PC, "a", id, 64, 2);
    }
    ck_assert_int_eq(code, TL_ERR_NO_DEVICE_MEMORY);
    int64_t reason;
    ck_assert_int_eq(code_of(PC, "a", id, &reason), TL_CODE_RESOURCE_GONE);
    ck_assert_int_eq(reason, TL_GONE_BUILD_FAILED);
    ck_assert_int_eq(drop(PC, "a", "x0", NULL), 0);
    ck_assert_int_eq(put(PC, "a", id, 64, 2), 0); /* there is room again */
}
END_TEST

START_TEST(entity_tags_read_back)
{
    struct tl_definition d = {.generation = 0x123456789abcu};
    uint64_t g;
    char tag[TL_ETAG_CHARS];
    strcpy(d.digest, "0123456789abcdef");
    tl_etag(tag, &d);
    ck_assert(tl_etag_parse(tag, &g));
    ck_assert_uint_eq(g, d.generation);
    ck_assert(!tl_etag_parse("\"x\"", &g));
    ck_assert(!tl_etag_parse("*", &g));
    ck_assert(!tl_etag_parse("\"01234567-12", &g));
}
END_TEST

/* ---- a thousand interleavings ------------------------------------------------------------------------------------- */

enum { CONTENTS = 4, DEPTHS = 2, IDS = 3, RUNS = 8, MAKINGS = 4, GENERATED = 4, SUFFIX = 3, DEEP = 4 };
static const int lengths[CONTENTS] = {9, 33, 64, 70};
static int32_t expected[CONTENTS][DEEP + 1][GENERATED]; /* after content c and the suffix, at a depth */
static int32_t contents[CONTENTS][80];

struct run {
    bool on, done;
    struct tl_claim claim;
    struct tl_job *job;
    int32_t out[GENERATED];
    int n, content, loops;
    enum tl_finish finish;
    bool submitted;
};

static struct run runs[RUNS];
static struct tl_making makings[MAKINGS];
static pthread_mutex_t jobs_lock = PTHREAD_MUTEX_INITIALIZER;
static bool cancelling;

/* Cancels from another thread, as the event loop does. */
static void *canceller(void *arg)
{
    unsigned seed = 99;
    (void)arg;
    for (;;) {
        struct timespec pause = {0, 200000};
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&jobs_lock);
        bool end = !cancelling;
        struct run *r = &runs[rand_r(&seed) % RUNS];
        if (r->job && rand_r(&seed) % 4 == 0) tl_job_cancel(r->job);
        pthread_mutex_unlock(&jobs_lock);
        if (end) return NULL;
    }
}

static enum tl_verdict on_run_event(void *arg, const struct tl_event *ev)
{
    struct run *r = arg;
    if (ev->kind == TL_EVENT_TOKEN) r->out[r->n++] = ev->sampled->token;
    if (ev->kind == TL_EVENT_KEPT) tl_registry_keep_automatic(reg, ev->handle, tl_registry_scope(reg, "a", ""));
    if (ev->kind == TL_EVENT_STARTED && ev->handle) tl_registry_pool_hit(reg, ev->handle);
    if (ev->kind == TL_EVENT_DONE) {
        pthread_mutex_lock(&jobs_lock);
        r->job = NULL;
        pthread_mutex_unlock(&jobs_lock);
        r->done = true;
        r->finish = ev->finish;
    }
    return TL_GO_ON;
}

static void full_prompt(int32_t *out, int content)
{
    memcpy(out, contents[content], (size_t)lengths[content] * sizeof(int32_t));
    for (int i = 0; i < SUFFIX; i++) out[lengths[content] + i] = 200 + i;
}

static void submit_run(struct run *r, struct tl_request *q)
{
    struct tl_error err = {0};
    struct tl_job *job;
    q->max_tokens = GENERATED;
    q->sampling.temperature = 0;
    q->sampling.ignore_eos = true;
    q->on_event = on_run_event;
    q->arg = r;
    r->submitted = true;
    ck_assert_msg(tl_sched_submit(t.s, q, &job, &err) == TL_OK, "%s", err.msg);
    pthread_mutex_lock(&jobs_lock);
    r->job = job;
    pthread_mutex_unlock(&jobs_lock);
}

/* The claimed state decides what the answer must be, whatever has happened to the name since. */
static void start_claimed(struct run *r)
{
    static const int32_t suffix[SUFFIX] = {200, 201, 202};
    struct tl_handle_info info;
    struct tl_request q;
    tl_handle_info(r->claim.handle, &info);
    r->content = 0;
    while (lengths[r->content] != info.n_tokens) r->content++;
    tl_request_default(&q);
    q.handle = r->claim.handle;
    q.tokens = suffix;
    q.n_tokens = SUFFIX;
    r->loops = info.n_loops;
    if (info.kind == TL_HANDLE_RESUME) q.new_L = r->loops = DEEP;
    submit_run(r, &q);
}

static void start_pooled(struct run *r, unsigned *seed)
{
    int32_t whole[96];
    struct tl_request q;
    r->content = (int)(rand_r(seed) % CONTENTS);
    r->loops = 1 + (int)(rand_r(seed) % DEPTHS);
    full_prompt(whole, r->content);
    tl_request_default(&q);
    q.tokens = whole;
    q.n_tokens = lengths[r->content] + SUFFIX;
    q.loops = r->loops;
    q.pool = tl_registry_pool(reg);
    q.pool_scope = tl_registry_scope(reg, "a", "");
    q.keep_all = rand_r(seed) % 2;
    submit_run(r, &q);
}

static void look_at_runs(void)
{
    for (int i = 0; i < RUNS; i++) {
        struct run *r = &runs[i];
        if (!r->on) continue;
        if (!r->submitted && r->claim.ready) start_claimed(r);
        bool lost = !r->submitted && r->claim.code; /* the name went away before its state was there again */
        if (!r->done && !lost) continue;
        if (r->done && r->finish != TL_FINISH_ERROR)
            ck_assert_mem_eq(r->out, expected[r->content][r->loops], (size_t)r->n * sizeof(int32_t));
        if (r->done && r->finish == TL_FINISH_LENGTH) ck_assert_int_eq(r->n, GENERATED);
        tl_registry_release(reg, &r->claim);
        r->on = false;
    }
}

static void look_at_makings(unsigned *seed, bool all)
{
    for (int i = 0; i < MAKINGS; i++)
        if (makings[i].state == TL_MAKING_MADE && (all || rand_r(seed) % 2)) tl_registry_commit(reg, &makings[i]);
}

static void random_make(unsigned *seed)
{
    static const enum tl_entry_kind kinds[] = {PC, PC, RH, PE};
    struct tl_error err = {0};
    struct tl_making *m = &makings[rand_r(seed) % MAKINGS];
    int content = (int)(rand_r(seed) % CONTENTS);
    char id[16];
    if (m->begun) return;
    memset(m, 0, sizeof(*m));
    snprintf(id, sizeof(id), "x%d", (int)(rand_r(seed) % IDS));
    memcpy(prompt, contents[content], sizeof(contents[content]));
    m->def = define(kinds[rand_r(seed) % 4], "a", id, lengths[content], 1 + (int)(rand_r(seed) % DEPTHS));
    if (m->def->kind == RH) m->def->max_loops = DEEP;
    if (m->def->kind == PE) snprintf(m->def->id, sizeof(m->def->id), "pe_%u", rand_r(seed));
    tl_definition_digest(m->def);
    m->def->in_pool = m->def->kind == PC && rand_r(seed) % 2;
    m->def->ttl_seconds = rand_r(seed) % 3 ? 0 : 1 + rand_r(seed) % 4;
    m->def->sliding = rand_r(seed) % 2;
    m->must_match = m->match_any = rand_r(seed) % 2;
    tl_registry_make(reg, m, &err); /* refusals are fine */
}

static void random_step(unsigned *seed)
{
    static const enum tl_entry_kind kinds[] = {PC, RH};
    struct tl_error err = {0};
    enum tl_entry_kind kind = kinds[rand_r(seed) % 2];
    struct run *r = &runs[rand_r(seed) % RUNS];
    struct tl_purge purge = {.kinds = 15, .force = rand_r(seed) % 2};
    char id[16];
    snprintf(id, sizeof(id), "x%d", (int)(rand_r(seed) % IDS));
    switch (rand_r(seed) % 12) {
    case 0: case 1: case 2: random_make(seed); break;
    case 3: case 4: case 5:
        if (r->on) break;
        memset(r, 0, sizeof(*r));
        r->on = tl_registry_claim(reg, kind, "a", id, &r->claim, &err) == 0;
        break;
    case 6: case 7:
        if (r->on) break;
        memset(r, 0, sizeof(*r));
        r->on = true;
        start_pooled(r, seed);
        break;
    case 8: drop(kind, "a", id, NULL); break;
    case 9: clock_now += rand_r(seed) % 3; break;
    case 10:
        if (rand_r(seed) % 4 == 0) tl_registry_abandon(reg, &makings[rand_r(seed) % MAKINGS]);
        else if (rand_r(seed) % 4 == 0) tl_registry_purge(reg, &purge);
        break;
    case 11: tl_pool_evict_one(tl_registry_pool(reg)); break;
    }
    if (rand_r(seed) % 2) turn();
    look_at_runs();
    look_at_makings(seed, false);
}

static void settle(unsigned *seed)
{
    struct tl_purge all = {.kinds = 15, .force = true};
    for (int i = 0;; i++) {
        bool busy = false;
        turn();
        look_at_makings(seed, true);
        look_at_runs();
        for (int k = 0; k < RUNS; k++) busy = busy || runs[k].on;
        for (int k = 0; k < MAKINGS; k++) busy = busy || makings[k].begun;
        if (!busy) break;
        ck_assert_int_lt(i, 5000);
    }
    tl_registry_purge(reg, &all);
    for (int i = 0; i < 4; i++) turn();
    ck_assert_uint_eq(tiny_kv_used(&t), 0);
}

static void make_expectations(void)
{
    for (int c = 0; c < CONTENTS; c++)
        for (int i = 0; i < 80; i++) contents[c][i] = i < 8 ? i + 1 : (i * 31 + c * 17) % 290;
    for (int c = 0; c < CONTENTS; c++)
        for (int loops = 1; loops <= DEEP; loops++) {
            int32_t whole[96];
            struct tl_request q;
            struct tl_result res;
            struct tl_error err = {0};
            full_prompt(whole, c);
            tl_request_default(&q);
            q.tokens = whole;
            q.n_tokens = lengths[c] + SUFFIX;
            q.loops = loops;
            q.max_tokens = GENERATED;
            q.sampling.temperature = 0;
            q.sampling.ignore_eos = true;
            ck_assert_msg(tl_generate(t.s, &q, &res, &err) == TL_OK, "%s", err.msg);
            memcpy(expected[c][loops], res.tokens, sizeof(expected[c][loops]));
            tl_result_clear(&res);
        }
}

START_TEST(nothing_that_happens_to_a_name_disturbs_what_runs)
{
    pthread_t thread;
    make_expectations();
    cancelling = true;
    ck_assert_int_eq(pthread_create(&thread, NULL, canceller, NULL), 0);
    for (unsigned i = 0; i < 1000; i++) {
        unsigned seed = i * 7919 + 1;
        for (int k = 0; k < 30; k++) random_step(&seed);
        settle(&seed);
    }
    pthread_mutex_lock(&jobs_lock);
    cancelling = false;
    pthread_mutex_unlock(&jobs_lock);
    pthread_join(thread, NULL);
}
END_TEST

int main(void)
{
    const TTest *cases[] = {
        the_same_content_again_is_no_work, other_content_needs_the_tag, identical_builds_are_one_build,
        one_copy_for_equal_entries_of_a_tenant, deleting_a_claimed_name_waits, a_replaced_entry_serves_those_who_had_it,
        time_runs_out_fixed_and_sliding, tombstones_are_a_ring, tenants_do_not_see_each_other, pool_matches_stay_in_their_tenant,
        limits_of_a_tenant, an_evicted_pool_entry_leaves_its_reason, old_ids_never_name_new_content,
        a_prefix_cache_in_the_pool_has_one_copy_and_is_never_evicted, a_stored_entry_is_computed_at_its_first_use,
        deleting_during_a_build_stops_it, out_of_memory_is_an_answer_and_leaves_nothing, entity_tags_read_back,
        nothing_that_happens_to_a_name_disturbs_what_runs,
    };
    dir = tiny_model_dir("tiny", "f32");
    return dir ? suite_main("server_registry", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown, 300) : 1;
}
