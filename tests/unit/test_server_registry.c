/* Named entries against the real engine: every rule of their life has a case. */
#include "registry_fixture.h"

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
    while (a.state == TL_MAKING_WAITS || c.state == TL_MAKING_WAITS || d.state == TL_MAKING_WAITS)
        turn();
    ck_assert_int_eq(b.state, TL_MAKING_WAITS); /* it waits for a's commit, not for the computation alone */
    tl_registry_commit(reg, &a);
    tl_registry_commit(reg, &c);
    tl_registry_commit(reg, &d);
    tl_registry_tick(reg);
    if (b.state == TL_MAKING_WAITS)
        turn();
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
    struct tl_making fixed = {.def = define(PC, "a", "fixed", 40, 3)},
                     sliding = {.def = define(PC, "a", "sliding", 40, 2)};
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

static int matched(const char *salt, struct tl_match *m)
{
    tl_registry_match(reg, prompt, 100, 3, 0, tl_registry_scope(reg, "a", salt), m);
    return m->n_matched;
}

START_TEST(equal_entries_of_two_salts_live_and_die_alone)
{
    struct tl_making salted = {.def = define(PE, "a", "pe_s", 60, 3)};
    struct tl_deletion d = {.if_idle = true};
    struct tl_match m;
    int64_t reason;
    strcpy(salted.def->salt, "s");
    ck_assert_int_eq(put(PE, "a", "pe_1", 60, 3), 0);
    ck_assert_int_eq(make(&salted), 0);
    ck_assert_uint_eq(counters().built[PE], 1); /* one copy */
    ck_assert_int_eq(matched("s", &m), 60);
    ck_assert_str_eq(m.entry, "pe_s");
    ck_assert_int_eq(drop(PE, "a", "pe_s", &d), 0); /* idle: the other entry is no user */
    ck_assert_int_eq(matched("s", &m), 0);
    ck_assert_int_eq(matched("", &m), 60);
    ck_assert_str_eq(m.entry, "pe_1");
    salted = (struct tl_making){.def = define(PE, "a", "pe_t", 60, 3)};
    strcpy(salted.def->salt, "s");
    ck_assert_int_eq(make(&salted), 0);
    ck_assert(tl_pool_evict_one(tl_registry_pool(reg)));
    ck_assert_int_eq(code_of(PE, "a", "pe_t", &reason), TL_CODE_RESOURCE_GONE);
    ck_assert_int_eq(reason, TL_GONE_EVICTED);
    ck_assert_int_eq(code_of(PE, "a", "pe_1", NULL), TL_CODE_RESOURCE_GONE);
    ck_assert_int_eq(matched("s", &m) + matched("", &m), 0);
    ck_assert_uint_eq(tiny_kv_used(&t), 0);
}
END_TEST

START_TEST(a_pool_entry_that_a_named_one_equals_is_not_in_use)
{
    struct tl_deletion d = {.if_idle = true};
    struct tl_view v;
    struct tl_error err = {0};
    ck_assert_int_eq(put(PC, "a", "x", 60, 3), 0);
    ck_assert_int_eq(put(PE, "a", "pe_1", 60, 3), 0);
    ck_assert_int_eq(tl_registry_view(reg, PE, "a", "pe_1", &v, &err), 0);
    ck_assert_int_eq(v.in_flight, 0);
    tl_view_clear(&v);
    ck_assert_int_eq(drop(PE, "a", "pe_1", &d), 0);
    ck_assert_int_eq(code_of(PC, "a", "x", NULL), 0);
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

START_TEST(bytes_count_while_they_are_computed_and_when_they_replace)
{
    struct tl_making slow = {.def = define(PC, "a", "slow", 200, 3)}, big = {.must_match = true, .match_any = true};
    struct tl_error err = {0};
    struct tl_view v;
    ck_assert_int_eq(put(PC, "a", "small", 20, 1), 0);
    ck_assert_int_eq(put(PC, "b", "twin", 200, 3), 0);
    ck_assert_int_eq(tl_registry_view(reg, PC, "b", "twin", &v, &err), 0);
    ck_assert(tl_registry_quota_set(reg, "a", 0, v.bytes + v.bytes / 2));
    tl_view_clear(&v);
    ck_assert_int_eq(tl_registry_make(reg, &slow, &err), 0);
    ck_assert_int_eq(slow.state, TL_MAKING_WAITS);
    ck_assert_int_eq(put(PC, "a", "second", 199, 3), TL_CODE_ENTRY_QUOTA);
    big.def = define(PC, "a", "small", 198, 3);
    ck_assert_int_eq(make(&big), TL_CODE_ENTRY_QUOTA);
    while (slow.state == TL_MAKING_WAITS)
        turn();
    tl_registry_commit(reg, &slow);
    big.def = define(PC, "a", "slow", 197, 3); /* in its place there is room */
    ck_assert_int_eq(make(&big), 0);
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
        if (code == 0)
            ck_assert_str_eq(m.entry, id);
        else
            ck_assert_int_eq(code, TL_CODE_RESOURCE_GONE);
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
    for (int i = 0; i < 5; i++)
        turn();
    ck_assert_uint_eq(counters().built[PC], 0);
    ck_assert_int_eq(tl_registry_claim(reg, PC, "a", "x", &a, &err), 0);
    ck_assert_int_eq(tl_registry_claim(reg, PC, "a", "x", &b, &err), 0); /* a rebuild is waited for, not refused */
    ck_assert(!a.ready && !b.ready);
    for (int i = 0; i < 10 && !a.ready; i++)
        turn();
    ck_assert(a.ready && b.ready);
    ck_assert_ptr_eq(a.handle, b.handle);
    ck_assert_uint_eq(counters().built[PC], 1);
    tl_registry_release(reg, &a);
    tl_registry_release(reg, &b);
}
END_TEST

START_TEST(a_pool_that_became_smaller_takes_no_name_away)
{
    struct tl_claim c[2];
    struct tl_patch into_pool = {.set_pool = true, .pool = true};
    struct tl_definition *d, *changed;
    struct tl_error err = {0};
    char id[16];
    teardown();
    open_registry(0, 1, 50);
    for (int i = 0; i < 2; i++) {
        snprintf(id, sizeof(id), "x%d", i);
        d = define(PC, "a", id, 40 + i, 3);
        d->in_pool = true;
        tl_registry_restore(reg, d);
    }
    for (int i = 0; i < 2; i++) {
        snprintf(id, sizeof(id), "x%d", i);
        ck_assert_int_eq(tl_registry_claim(reg, PC, "a", id, &c[i], &err), 0);
        for (int k = 0; k < 10 && !c[i].ready; k++)
            turn();
        ck_assert(c[i].ready);
        tl_registry_release(reg, &c[i]);
    }
    ck_assert_int_eq(counters().pool.n_entries, 1);
    ck_assert_int_eq(put(PC, "a", "y", 30, 3), 0);
    ck_assert_int_eq(tl_registry_patch(reg, PC, "a", "y", &into_pool, &changed, &err), TL_CODE_ENTRY_QUOTA);
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
    for (int i = 0; i < 5; i++)
        turn();
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

int main(void)
{
    const TTest *cases[] = {
        the_same_content_again_is_no_work,
        other_content_needs_the_tag,
        identical_builds_are_one_build,
        one_copy_for_equal_entries_of_a_tenant,
        deleting_a_claimed_name_waits,
        a_replaced_entry_serves_those_who_had_it,
        time_runs_out_fixed_and_sliding,
        tombstones_are_a_ring,
        tenants_do_not_see_each_other,
        pool_matches_stay_in_their_tenant,
        equal_entries_of_two_salts_live_and_die_alone,
        a_pool_entry_that_a_named_one_equals_is_not_in_use,
        limits_of_a_tenant,
        bytes_count_while_they_are_computed_and_when_they_replace,
        an_evicted_pool_entry_leaves_its_reason,
        old_ids_never_name_new_content,
        a_prefix_cache_in_the_pool_has_one_copy_and_is_never_evicted,
        a_stored_entry_is_computed_at_its_first_use,
        a_pool_that_became_smaller_takes_no_name_away,
        deleting_during_a_build_stops_it,
        out_of_memory_is_an_answer_and_leaves_nothing,
        entity_tags_read_back,
    };
    dir = tiny_model_dir("tiny", "f32");
    return dir ? suite_main("server_registry", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown, 300) : 1;
}
