/* The automata of the rules, made deterministic one state and one move at a time, when first needed.
 *
 * A local state is a set of net states of one rule that the same bytes lead to; it holds those with something to tell: bytes
 * to read, a rule to enter, the end of the rule. States are never dropped while the grammar lives, since positions refer to
 * them; a grammar that would need more of them than the cache holds ends its request. */
#include "grammar_impl.h"

#include "mem.h"

#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* ---- index --------------------------------------------------------------------------------------------------------- */

uint32_t tl_index_find(const struct tl_index *x, uint64_t h, tl_index_eq *eq, const void *arg, uint32_t *at)
{
    uint32_t i = (uint32_t)h & (x->n_slots - 1);

    while (x->slots[i] != TL_UNKNOWN && !eq(arg, x->slots[i]))
        i = (i + 1) & (x->n_slots - 1);
    *at = i;
    return x->slots[i];
}

void tl_index_put(struct tl_index *x, uint32_t at, uint32_t n)
{
    x->slots[at] = n;
    x->n_used++;
}

bool tl_index_room(struct tl_index *x, uint64_t (*hash)(const void *arg, uint32_t n), const void *arg)
{
    struct tl_index next = {.n_slots = x->n_slots ? x->n_slots * 2 : 64, .n_used = x->n_used};

    if (x->n_slots && x->n_used < x->n_slots / 2)
        return true;
    next.slots = tl_array(next.n_slots, sizeof(*next.slots));
    if (!next.slots)
        return false;
    memset(next.slots, 0xFF, next.n_slots * sizeof(*next.slots));
    for (uint32_t i = 0; i < x->n_slots; i++) {
        uint32_t at;
        if (x->slots[i] == TL_UNKNOWN)
            continue;
        at = (uint32_t)hash(arg, x->slots[i]) & (next.n_slots - 1);
        while (next.slots[at] != TL_UNKNOWN)
            at = (at + 1) & (next.n_slots - 1);
        next.slots[at] = x->slots[i];
    }
    tl_free(x->slots);
    *x = next;
    return true;
}

/* ---- effort -------------------------------------------------------------------------------------------------------- */

enum tl_status tl_effort_spent(const struct tl_effort *e)
{
    long long max = (long long)e->limits->work_per_token_max;

    return tl_fail(e->err, TL_ERR_INVALID_GRAMMAR,
                   "the grammar needs more than %lld steps of work for one token, or %lld for each of many", max,
                   max / TL_WORK_SHARES);
}

static enum tl_status no_memory(const struct tl_effort *e)
{
    return tl_fail(e->err, TL_ERR_NO_HOST_MEMORY, "the host has no memory left for the grammar");
}

/* ---- states -------------------------------------------------------------------------------------------------------- */

void tl_local_clear(struct tl_local *l)
{
    tl_free(l->states.at);
    tl_free(l->sets.at);
    tl_free(l->calls.at);
    tl_free(l->moves.at);
    tl_free(l->todo.at);
    tl_free(l->found.at);
    tl_free(l->index.slots);
    tl_free(l->seen);
    tl_free(l->start_of);
    memset(l, 0, sizeof(*l));
}

static bool add_moves(struct tl_local *l)
{
    uint32_t n = (uint32_t)l->net->n_classes;

    if (!TL_VEC_ROOM(&l->moves, n))
        return false;
    memset(l->moves.at + l->moves.n, 0xFF, n * sizeof(*l->moves.at));
    l->moves.n += n;
    return true;
}

enum tl_status tl_local_init(struct tl_local *l, const struct tl_net *net, struct tl_error *err)
{
    memset(l, 0, sizeof(*l));
    l->net = net;
    l->seen = tl_calloc(net->n_states, sizeof(*l->seen));
    l->start_of = tl_array(net->n_rules, sizeof(*l->start_of));
    if (!l->seen || !l->start_of || !TL_VEC_ROOM(&l->states, 16) || !add_moves(l)) {
        tl_local_clear(l);
        return tl_fail_host_memory(err, net->n_states * sizeof(*l->seen));
    }
    memset(l->start_of, 0xFF, net->n_rules * sizeof(*l->start_of));
    memset(l->moves.at, 0, (size_t)net->n_classes * sizeof(*l->moves.at)); /* no state moves nowhere */
    l->states.at[l->states.n++] = (struct tl_local_state){.n_calls = 0};
    return TL_OK;
}

size_t tl_local_bytes(const struct tl_local *l)
{
    return (size_t)l->states.cap * sizeof(*l->states.at) + (size_t)l->sets.cap * sizeof(*l->sets.at) +
           (size_t)l->calls.cap * sizeof(*l->calls.at) + (size_t)l->moves.cap * sizeof(*l->moves.at) +
           (size_t)l->index.n_slots * sizeof(*l->index.slots);
}

static uint64_t hash_set(const uint32_t *set, uint32_t n) { return XXH3_64bits(set, n * sizeof(*set)); }

static uint64_t hash_state(const void *arg, uint32_t s)
{
    const struct tl_local *l = arg;
    return hash_set(l->sets.at + l->states.at[s].set, l->states.at[s].n_set);
}

static bool same_set(const void *arg, uint32_t s)
{
    const struct tl_local *l = arg;
    const struct tl_local_state *x = &l->states.at[s];
    return x->n_set == l->found.n && memcmp(l->sets.at + x->set, l->found.at, x->n_set * sizeof(*l->found.at)) == 0;
}

static int by_number(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* The state of the set in l->found, which is sorted. */
static enum tl_status intern(struct tl_local *l, uint32_t *state, struct tl_effort *e)
{
    struct tl_local_state s = {.set = l->sets.n, .n_set = l->found.n, .n_calls = TL_UNKNOWN, .same = TL_UNKNOWN};
    const struct tl_net *net = l->net;
    uint32_t at, end;
    bool goes_on = false;

    if (l->found.n == 0) {
        *state = TL_NONE;
        return TL_OK;
    }
    if (!tl_index_room(&l->index, hash_state, l))
        return no_memory(e);
    *state = tl_index_find(&l->index, hash_set(l->found.at, l->found.n), same_set, l, &at);
    if (*state != TL_UNKNOWN)
        return TL_OK;
    if (tl_local_bytes(l) > e->limits->cache_bytes_max)
        return tl_fail(e->err, TL_ERR_INVALID_GRAMMAR, "the grammar has grown past %zu bytes while it ran",
                       e->limits->cache_bytes_max);
    if (!TL_VEC_ROOM(&l->states, 1) || !TL_VEC_ROOM(&l->sets, l->found.n) || !add_moves(l))
        return no_memory(e);
    memcpy(l->sets.at + l->sets.n, l->found.at, l->found.n * sizeof(*l->found.at));
    l->sets.n += l->found.n;
    end = net->rules[net->rule_of[l->found.at[0]]].end;
    for (uint32_t i = 0; i < l->found.n; i++) {
        s.accepts = s.accepts || l->found.at[i] == end;
        goes_on = goes_on || l->found.at[i] != end;
    }
    s.only_accepts = s.accepts && !goes_on;
    *state = l->states.n;
    l->states.at[l->states.n++] = s;
    tl_index_put(&l->index, at, *state);
    return TL_OK;
}

static void next_stamp(struct tl_local *l)
{
    if (++l->stamp == 0) { /* all old marks would look new */
        memset(l->seen, 0, l->net->n_states * sizeof(*l->seen));
        l->stamp = 1;
    }
    l->todo.n = l->found.n = 0;
}

static bool add_todo(struct tl_local *l, uint32_t s)
{
    if (l->seen[s] == l->stamp)
        return true;
    l->seen[s] = l->stamp;
    if (!TL_VEC_ROOM(&l->todo, 1))
        return false;
    l->todo.at[l->todo.n++] = s;
    return true;
}

/* From the states in l->todo to all that nothing or an empty rule leads to; those that tell something go to l->found. */
static enum tl_status close_set(struct tl_local *l, uint32_t *state, struct tl_effort *e)
{
    const struct tl_net *net = l->net;

    while (l->todo.n) {
        uint32_t s = l->todo.at[--l->todo.n];
        bool tells = s == net->rules[net->rule_of[s]].end;
        if (!tl_effort_take(e, 1 + net->first[s + 1] - net->first[s]))
            return tl_effort_spent(e);
        for (uint32_t k = net->first[s]; k < net->first[s + 1]; k++) {
            const struct tl_edge *x = &net->edges[k];
            uint32_t kind = x->what & TL_EDGE_KIND;
            if (kind != TL_EDGE_NOTHING)
                tells = true;
            if ((kind == TL_EDGE_NOTHING || (kind == TL_EDGE_RULE && net->rules[x->what & ~TL_EDGE_KIND].nullable)) &&
                !add_todo(l, x->to))
                return no_memory(e);
        }
        if (tells) {
            if (!TL_VEC_ROOM(&l->found, 1))
                return no_memory(e);
            l->found.at[l->found.n++] = s;
        }
    }
    if (l->found.n > 1)
        qsort(l->found.at, l->found.n, sizeof(*l->found.at), by_number);
    return intern(l, state, e);
}

enum tl_status tl_local_start(struct tl_local *l, uint32_t rule, uint32_t *state, struct tl_effort *e)
{
    enum tl_status st = TL_OK;

    if (l->start_of[rule] == TL_UNKNOWN) {
        next_stamp(l);
        if (!add_todo(l, l->net->rules[rule].start))
            return no_memory(e);
        st = close_set(l, &l->start_of[rule], e);
        if (st != TL_OK)
            l->start_of[rule] = TL_UNKNOWN;
    }
    *state = l->start_of[rule];
    return st;
}

enum tl_status tl_local_move(struct tl_local *l, uint32_t state, int cls, uint32_t *to, struct tl_effort *e)
{
    const struct tl_net *net = l->net;
    const struct tl_local_state s = l->states.at[state];
    size_t at = (size_t)state * (size_t)net->n_classes + (size_t)cls;
    uint32_t byte = net->byte_of[cls];
    enum tl_status st;

    *to = l->moves.at[at];
    if (*to != TL_UNKNOWN)
        return TL_OK;
    next_stamp(l);
    for (uint32_t i = 0; i < s.n_set; i++) {
        uint32_t q = l->sets.at[s.set + i];
        if (!tl_effort_take(e, 1 + net->first[q + 1] - net->first[q]))
            return tl_effort_spent(e);
        for (uint32_t k = net->first[q]; k < net->first[q + 1]; k++) {
            uint32_t what = net->edges[k].what;
            if ((what & TL_EDGE_KIND) == TL_EDGE_BYTES && (what >> 8 & 0xFF) <= byte && byte <= (what & 0xFF) &&
                !add_todo(l, net->edges[k].to))
                return no_memory(e);
        }
    }
    st = close_set(l, to, e);
    if (st == TL_OK)
        l->moves.at[at] = *to;
    return st;
}

static int by_rule(const void *a, const void *b)
{
    const struct tl_local_call *x = a, *y = b;
    return x->rule != y->rule ? (x->rule > y->rule) - (x->rule < y->rule) : (x->back > y->back) - (x->back < y->back);
}

/* Calls of one rule from several states of the set return to one local state. */
enum tl_status tl_local_need_calls(struct tl_local *l, uint32_t state, struct tl_effort *e)
{
    const struct tl_net *net = l->net;
    const struct tl_local_state s = l->states.at[state];
    struct tl_local_call *raw;
    uint32_t n = 0, first = l->calls.n, n_calls = 0;
    enum tl_status st = TL_OK;

    if (s.n_calls != TL_UNKNOWN)
        return TL_OK;
    for (uint32_t i = 0; i < s.n_set; i++)
        n += net->first[l->sets.at[s.set + i] + 1] - net->first[l->sets.at[s.set + i]];
    if (!tl_effort_take(e, 1 + n))
        return tl_effort_spent(e);
    raw = tl_array(n, sizeof(*raw));
    if (!raw || !TL_VEC_ROOM(&l->calls, n)) {
        tl_free(raw);
        return no_memory(e);
    }
    n = 0;
    for (uint32_t i = 0; i < s.n_set; i++) {
        uint32_t q = l->sets.at[s.set + i];
        for (uint32_t k = net->first[q]; k < net->first[q + 1]; k++)
            if ((net->edges[k].what & TL_EDGE_KIND) == TL_EDGE_RULE)
                raw[n++] = (struct tl_local_call){net->edges[k].what & ~TL_EDGE_KIND, net->edges[k].to};
    }
    qsort(raw, n, sizeof(*raw), by_rule);
    for (uint32_t i = 0, k; i < n && st == TL_OK; i = k) {
        struct tl_local_call c = {.rule = raw[i].rule};
        next_stamp(l);
        for (k = i; k < n && raw[k].rule == c.rule && st == TL_OK; k++)
            if (!add_todo(l, raw[k].back))
                st = no_memory(e);
        if (st == TL_OK)
            st = close_set(l, &c.back, e);
        if (st == TL_OK)
            l->calls.at[first + n_calls++] = c;
    }
    if (st == TL_OK) {
        l->calls.n = first + n_calls;
        l->states.at[state].calls = first;
        l->states.at[state].n_calls = n_calls;
    }
    tl_free(raw);
    return st;
}

enum tl_status tl_local_same(struct tl_local *l, uint32_t state, uint32_t *same, struct tl_effort *e)
{
    const struct tl_local_state s = l->states.at[state];
    uint32_t n = 0;
    enum tl_status st;

    *same = s.same;
    if (s.same != TL_UNKNOWN)
        return TL_OK;
    if (!tl_effort_take(e, 1 + s.n_set))
        return tl_effort_spent(e);
    l->found.n = 0;
    if (!TL_VEC_ROOM(&l->found, s.n_set))
        return no_memory(e);
    for (uint32_t i = 0; i < s.n_set; i++)
        l->found.at[i] = l->net->same[l->sets.at[s.set + i]];
    qsort(l->found.at, s.n_set, sizeof(*l->found.at), by_number);
    for (uint32_t i = 0; i < s.n_set; i++)
        if (n == 0 || l->found.at[n - 1] != l->found.at[i])
            l->found.at[n++] = l->found.at[i];
    l->found.n = n;
    st = intern(l, same, e);
    if (st == TL_OK)
        l->states.at[state].same = *same;
    return st;
}
