/* Positions in a text: sets of (local state, stack), and what a byte does to them.
 *
 * A stack is a node: the set of (return state, node below). Nodes and places are interned by content, so equal positions have
 * equal numbers and a move is computed once. In a place each local state stands once, over a node that joins all its stacks;
 * that keeps ambiguous grammars from multiplying. A node's number is higher than those below it.
 *
 * A move: rules that may begin here are entered first (`wide`), in the order of their rank, so that all callers of a rule are
 * known when it is entered; then every state moves on its own; then rules that have ended return, until nothing is new.
 * A rule that is empty is passed over in the caller's own states, so one that was just entered never returns at once. */
#include "grammar_impl.h"

#include "mem.h"

#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

static enum tl_status no_memory(const struct tl_effort *e)
{
    return tl_fail(e->err, TL_ERR_NO_HOST_MEMORY, "the host has no memory left for the grammar");
}

void tl_space_clear(struct tl_space *s)
{
    tl_free(s->pairs.at);
    tl_free(s->nodes.at);
    tl_free(s->places.at);
    tl_free(s->moves.at);
    tl_free(s->node_index.slots);
    tl_free(s->place_index.slots);
    tl_free(s->work.at);
    tl_free(s->kept.at);
    tl_free(s->entries.at);
    tl_free(s->calls.at);
    memset(s, 0, sizeof(*s));
}

size_t tl_space_bytes(const struct tl_space *s)
{
    return (size_t)s->pairs.cap * sizeof(*s->pairs.at) + (size_t)s->nodes.cap * sizeof(*s->nodes.at) +
           (size_t)s->places.cap * sizeof(*s->places.at) + (size_t)s->moves.cap * sizeof(*s->moves.at) +
           ((size_t)s->node_index.n_slots + s->place_index.n_slots) * sizeof(uint32_t);
}

static int by_pair(const void *a, const void *b)
{
    const struct tl_pair *x = a, *y = b;
    return x->state != y->state ? (x->state > y->state) - (x->state < y->state)
                                : (x->node > y->node) - (x->node < y->node);
}

static uint64_t hash_pairs(const struct tl_pair *p, uint32_t n, bool through)
{
    return XXH3_64bits_withSeed(p, n * sizeof(*p), through);
}

static uint64_t hash_node(const void *arg, uint32_t n)
{
    const struct tl_space *s = arg;
    return hash_pairs(s->pairs.at + s->nodes.at[n].first, s->nodes.at[n].n, false);
}

static bool same_node(const void *arg, uint32_t n)
{
    const struct tl_space *s = arg;
    const struct tl_node *x = &s->nodes.at[n];
    return x->n == s->entries.n && memcmp(s->pairs.at + x->first, s->entries.at, x->n * sizeof(*s->entries.at)) == 0;
}

/* The node whose entries are s->entries, which are sorted here. */
enum tl_status tl_space_node(struct tl_space *s, uint32_t *node, struct tl_effort *e)
{
    struct tl_node x = {.first = s->pairs.n};
    uint32_t at, n = 0;

    if (!tl_effort_take(e, 4 + 4 * (int64_t)s->entries.n)) /* they are sorted */
        return tl_effort_spent(e);
    if (s->entries.n > 1)
        qsort(s->entries.at, s->entries.n, sizeof(*s->entries.at), by_pair);
    for (uint32_t i = 0; i < s->entries.n; i++)
        if (n == 0 || by_pair(&s->entries.at[n - 1], &s->entries.at[i]) != 0)
            s->entries.at[n++] = s->entries.at[i];
    s->entries.n = x.n = n;
    if (!tl_index_room(&s->node_index, hash_node, s))
        return no_memory(e);
    *node = tl_index_find(&s->node_index, hash_pairs(s->entries.at, n, false), same_node, s, &at);
    if (*node != TL_UNKNOWN)
        return TL_OK;
    for (uint32_t i = 0; i < n; i++)
        if (s->entries.at[i].state != TL_BOTTOM && s->nodes.at[s->entries.at[i].node].depth + 1 > x.depth)
            x.depth = s->nodes.at[s->entries.at[i].node].depth + 1;
    if ((int64_t)x.depth > e->limits->stack_max)
        return tl_fail(e->err, TL_ERR_INVALID_GRAMMAR, "the text nests more than %d rules of the grammar",
                       e->limits->stack_max);
    if (!TL_VEC_ROOM(&s->nodes, 1) || !TL_VEC_ROOM(&s->pairs, n))
        return no_memory(e);
    memcpy(s->pairs.at + s->pairs.n, s->entries.at, n * sizeof(*s->entries.at));
    s->pairs.n += n;
    *node = s->nodes.n;
    s->nodes.at[s->nodes.n++] = x;
    tl_index_put(&s->node_index, at, *node);
    return TL_OK;
}

static bool add_place(struct tl_space *s, const struct tl_place *p)
{
    uint32_t n = (uint32_t)s->local->net->n_classes;

    if (!TL_VEC_ROOM(&s->places, 1) || !TL_VEC_ROOM(&s->moves, n))
        return false;
    s->places.at[s->places.n++] = *p;
    memset(s->moves.at + s->moves.n, p->n ? 0xFF : 0, n * sizeof(*s->moves.at)); /* without a pair: no way on */
    s->moves.n += n;
    return true;
}

enum tl_status tl_space_init(struct tl_space *s, struct tl_local *local, struct tl_error *err)
{
    struct tl_effort e = {.left = 1000, .err = err};
    uint32_t bottom;

    memset(s, 0, sizeof(*s));
    s->local = local;
    if (!TL_VEC_ROOM(&s->entries, 8) || !add_place(s, &(struct tl_place){0})) {
        tl_space_clear(s);
        return no_memory(&e);
    }
    e.limits = &(struct tl_grammar_limits){.stack_max = 1};
    s->entries.at[s->entries.n++] = (struct tl_pair){TL_BOTTOM, TL_BOTTOM};
    if (tl_space_node(s, &bottom, &e) != TL_OK) {
        tl_space_clear(s);
        return TL_ERR_NO_HOST_MEMORY;
    }
    return TL_OK;
}

static uint64_t hash_place(const void *arg, uint32_t p)
{
    const struct tl_space *s = arg;
    const struct tl_place *x = &s->places.at[p];
    return hash_pairs(s->pairs.at + x->first, x->n, x->through);
}

struct wanted {
    const struct tl_space *s;
    bool through;
};

static bool same_place(const void *arg, uint32_t p)
{
    const struct wanted *w = arg;
    const struct tl_place *x = &w->s->places.at[p];
    return x->n == w->s->kept.n && x->through == w->through &&
           memcmp(w->s->pairs.at + x->first, w->s->kept.at, x->n * sizeof(struct tl_pair)) == 0;
}

/* The place of the pairs in s->kept, sorted, each state once. */
static enum tl_status intern_place(struct tl_space *s, bool through, uint32_t *place, struct tl_effort *e)
{
    struct tl_place x = {.first = s->pairs.n, .n = s->kept.n, .wide = TL_UNKNOWN, .through = through};
    struct wanted w = {s, through};
    uint32_t at;

    if (!tl_effort_take(e, 4 + s->kept.n))
        return tl_effort_spent(e);
    if (s->kept.n == 0 && !through) {
        *place = 0;
        return TL_OK;
    }
    if (!tl_index_room(&s->place_index, hash_place, s))
        return no_memory(e);
    *place = tl_index_find(&s->place_index, hash_pairs(s->kept.at, s->kept.n, through), same_place, &w, &at);
    if (*place != TL_UNKNOWN)
        return TL_OK;
    if (!TL_VEC_ROOM(&s->pairs, s->kept.n) || !add_place(s, &x))
        return no_memory(e);
    if (s->kept.n)
        memcpy(s->pairs.at + s->pairs.n, s->kept.at, s->kept.n * sizeof(*s->kept.at));
    s->pairs.n += s->kept.n;
    *place = s->places.n - 1;
    tl_index_put(&s->place_index, at, *place);
    return TL_OK;
}

enum tl_status tl_space_place_of(struct tl_space *s, uint32_t state, uint32_t node, uint32_t *place,
                                 struct tl_effort *e)
{
    s->kept.n = 0;
    if (!TL_VEC_ROOM(&s->kept, 1))
        return no_memory(e);
    s->kept.at[s->kept.n++] = (struct tl_pair){state, node};
    return intern_place(s, false, place, e);
}

/* ---- returns ---- */

static enum tl_status add_work(struct tl_space *s, struct tl_pair p, struct tl_effort *e)
{
    if (!tl_effort_take(e, 1 + s->work.n / 32))
        return tl_effort_spent(e);
    for (uint32_t i = 0; i < s->work.n; i++)
        if (s->work.at[i].state == p.state && s->work.at[i].node == p.node)
            return TL_OK;
    if ((int64_t)s->work.n >= e->limits->threads_max)
        return tl_fail(e->err, TL_ERR_INVALID_GRAMMAR,
                       "the grammar is too ambiguous: a text can be read in more than %d ways at once",
                       e->limits->threads_max);
    if (!TL_VEC_ROOM(&s->work, 1))
        return no_memory(e);
    s->work.at[s->work.n++] = p;
    return TL_OK;
}

static enum tl_status add_entries(struct tl_space *s, uint32_t node, bool *through, struct tl_effort *e)
{
    const struct tl_node x = s->nodes.at[node];
    enum tl_status st = TL_OK;

    for (uint32_t i = 0; i < x.n && st == TL_OK; i++) {
        struct tl_pair p = s->pairs.at[x.first + i];
        if (p.state == TL_BOTTOM)
            *through = true;
        else
            st = add_work(s, p, e);
    }
    return st;
}

/* s->work are pairs after a byte: let ended rules return, join the stacks of equal states, intern. */
static enum tl_status settle(struct tl_space *s, bool through, uint32_t *place, struct tl_effort *e)
{
    const struct tl_local *l = s->local;
    enum tl_status st = TL_OK;

    for (uint32_t i = 0; i < s->work.n && st == TL_OK; i++) /* grows while we go */
        if (l->states.at[s->work.at[i].state].accepts)
            st = add_entries(s, s->work.at[i].node, &through, e);
    if (st != TL_OK)
        return st;
    if (s->work.n > 1)
        qsort(s->work.at, s->work.n, sizeof(*s->work.at), by_pair);
    s->kept.n = 0;
    if (!TL_VEC_ROOM(&s->kept, s->work.n))
        return no_memory(e);
    for (uint32_t i = 0, k; i < s->work.n && st == TL_OK; i = k) {
        struct tl_pair p = s->work.at[i];
        for (k = i + 1; k < s->work.n && s->work.at[k].state == p.state; k++)
            ;
        if (l->states.at[p.state].only_accepts)
            continue;
        if (k > i + 1) {
            s->entries.n = 0;
            for (uint32_t m = i; m < k; m++) {
                const struct tl_node *x = &s->nodes.at[s->work.at[m].node];
                if (!tl_effort_take(e, x->n))
                    return tl_effort_spent(e);
                if (!TL_VEC_ROOM(&s->entries, x->n))
                    return no_memory(e);
                memcpy(s->entries.at + s->entries.n, s->pairs.at + x->first, x->n * sizeof(*s->entries.at));
                s->entries.n += x->n;
            }
            st = tl_space_node(s, &p.node, e);
        }
        s->kept.at[s->kept.n++] = p;
    }
    return st == TL_OK ? intern_place(s, through, place, e) : st;
}

enum tl_status tl_space_return(struct tl_space *s, uint32_t node, uint32_t *place, struct tl_effort *e)
{
    bool through = false;
    enum tl_status st;

    s->work.n = 0;
    st = add_entries(s, node, &through, e);
    return st == TL_OK ? settle(s, through, place, e) : st;
}

/* ---- entering rules ---- */

/* s->calls is a heap: the least rank on top. */
static bool add_call(struct tl_space *s, uint32_t rule, struct tl_pair entry)
{
    struct tl_space_call c = {s->local->net->rules[rule].rank, rule, entry}, *h;
    uint32_t i = s->calls.n;

    if (!TL_VEC_ROOM(&s->calls, 1))
        return false;
    h = s->calls.at;
    s->calls.n++;
    for (; i > 0 && c.rank < h[(i - 1) / 2].rank; i = (i - 1) / 2)
        h[i] = h[(i - 1) / 2];
    h[i] = c;
    return true;
}

static struct tl_space_call take_call(struct tl_space *s)
{
    struct tl_space_call *h = s->calls.at, top = h[0], last = h[--s->calls.n];
    uint32_t n = s->calls.n, i = 0, k;

    for (; (k = 2 * i + 1) < n; i = k) {
        if (k + 1 < n && h[k + 1].rank < h[k].rank)
            k++;
        if (h[k].rank >= last.rank)
            break;
        h[i] = h[k];
    }
    h[i] = last; /* with none left this is the old top, out of the heap */
    return top;
}

/* The calls that pair p can make. A call at the very end of its rule returns to where that rule would. */
static enum tl_status find_calls(struct tl_space *s, struct tl_pair p, struct tl_effort *e)
{
    struct tl_local *l = s->local;
    enum tl_status st = tl_local_need_calls(l, p.state, e);

    for (uint32_t i = 0; st == TL_OK && i < l->states.at[p.state].n_calls; i++) {
        struct tl_local_call c = l->calls.at[l->states.at[p.state].calls + i];
        struct tl_node below = s->nodes.at[p.node];
        bool last = l->states.at[c.back].only_accepts, ok = true;
        if (!tl_effort_take(e, last ? 4 + 4 * (int64_t)below.n : 4))
            return tl_effort_spent(e);
        if (!last)
            ok = add_call(s, c.rule, (struct tl_pair){c.back, p.node});
        for (uint32_t k = 0; last && ok && k < below.n; k++)
            ok = add_call(s, c.rule, s->pairs.at[below.first + k]);
        if (!ok)
            return no_memory(e);
    }
    return st;
}

static enum tl_status widen(struct tl_space *s, uint32_t place, struct tl_effort *e)
{
    struct tl_place x = s->places.at[place];
    enum tl_status st = TL_OK;

    s->kept.n = s->calls.n = 0;
    if (!TL_VEC_ROOM(&s->kept, x.n))
        return no_memory(e);
    memcpy(s->kept.at, s->pairs.at + x.first, x.n * sizeof(*s->kept.at));
    s->kept.n = x.n;
    for (uint32_t i = 0; st == TL_OK && i < x.n; i++)
        st = find_calls(s, s->kept.at[i], e);
    while (st == TL_OK && s->calls.n) {
        uint32_t rule = s->calls.at[0].rule;
        struct tl_pair p;
        s->entries.n = 0;
        while (s->calls.n && s->calls.at[0].rule == rule) {
            if (!TL_VEC_ROOM(&s->entries, 1))
                return no_memory(e);
            s->entries.at[s->entries.n++] = take_call(s).entry;
        }
        if ((st = tl_local_start(s->local, rule, &p.state, e)) != TL_OK || (st = tl_space_node(s, &p.node, e)) != TL_OK)
            return st;
        if (!TL_VEC_ROOM(&s->kept, 1))
            return no_memory(e);
        s->kept.at[s->kept.n++] = p;
        st = find_calls(s, p, e);
    }
    if (st != TL_OK)
        return st;
    if (!TL_VEC_ROOM(&s->pairs, s->kept.n))
        return no_memory(e);
    x.wide = s->pairs.n;
    x.n_wide = s->kept.n;
    memcpy(s->pairs.at + s->pairs.n, s->kept.at, s->kept.n * sizeof(*s->kept.at));
    s->pairs.n += s->kept.n;
    s->places.at[place] = x;
    return TL_OK;
}

enum tl_status tl_space_begin(struct tl_space *s, uint32_t state, uint32_t *place, struct tl_effort *e)
{
    s->work.n = 0;
    if (!TL_VEC_ROOM(&s->work, 1))
        return no_memory(e);
    s->work.at[s->work.n++] = (struct tl_pair){state, TL_BOTTOM};
    return settle(s, false, place, e);
}

enum tl_status tl_space_move(struct tl_space *s, uint32_t place, int cls, uint32_t *to, struct tl_effort *e)
{
    size_t at = (size_t)place * (size_t)s->local->net->n_classes + (size_t)cls;
    enum tl_status st = TL_OK;
    struct tl_place x;

    *to = s->moves.at[at];
    if (*to != TL_UNKNOWN)
        return TL_OK;
    if (s->places.at[place].wide == TL_UNKNOWN && (st = widen(s, place, e)) != TL_OK)
        return st;
    x = s->places.at[place];
    s->work.n = 0;
    for (uint32_t i = 0; i < x.n_wide && st == TL_OK; i++) {
        struct tl_pair p = s->pairs.at[x.wide + i];
        if (!tl_effort_take(e, 1))
            return tl_effort_spent(e);
        st = tl_local_move(s->local, p.state, cls, &p.state, e);
        if (st == TL_OK && p.state != TL_NONE)
            st = add_work(s, p, e);
    }
    if (st == TL_OK)
        st = settle(s, false, to, e);
    if (st == TL_OK)
        s->moves.at[at] = *to;
    return st;
}

enum tl_status tl_space_only_byte(struct tl_space *s, uint32_t place, int *byte, struct tl_effort *e)
{
    const struct tl_local *l = s->local;
    const struct tl_net *net = l->net;
    enum tl_status st = TL_OK;
    struct tl_place x;
    int found = -1;

    *byte = -1;
    if (s->places.at[place].wide == TL_UNKNOWN && (st = widen(s, place, e)) != TL_OK)
        return st;
    x = s->places.at[place];
    for (uint32_t i = 0; i < x.n_wide; i++) {
        const struct tl_local_state *local = &l->states.at[s->pairs.at[x.wide + i].state];
        if (!tl_effort_take(e, 1 + local->n_set))
            return tl_effort_spent(e);
        for (uint32_t m = 0; m < local->n_set; m++) {
            uint32_t q = l->sets.at[local->set + m];
            for (uint32_t k = net->first[q]; k < net->first[q + 1]; k++) {
                uint32_t what = net->edges[k].what;
                int lo = what >> 8 & 0xFF, hi = what & 0xFF;
                if ((what & TL_EDGE_KIND) != TL_EDGE_BYTES)
                    continue;
                if (lo != hi || (found >= 0 && found != lo))
                    return TL_OK;
                found = lo;
            }
        }
    }
    *byte = found;
    return TL_OK;
}

/* ---- copying ---- */

enum tl_status tl_space_copy(struct tl_space *s, const struct tl_space *from, uint32_t place, uint32_t *copy,
                             struct tl_effort *e)
{
    struct tl_place x = from->places.at[place];
    uint32_t *map = tl_array(from->nodes.n, sizeof(*map));
    enum tl_status st = TL_OK;

    *copy = 0;
    if (!map)
        return no_memory(e);
    memset(map, 0xFF, from->nodes.n * sizeof(*map));
    for (uint32_t i = 0; i < x.n; i++)
        map[from->pairs.at[x.first + i].node] = 0; /* 0: wanted */
    for (uint32_t n = from->nodes.n; n-- > 1;)     /* those below have lower numbers */
        for (uint32_t i = 0; map[n] == 0 && i < from->nodes.at[n].n; i++)
            map[from->pairs.at[from->nodes.at[n].first + i].node] = 0;
    map[TL_BOTTOM] = TL_BOTTOM;
    for (uint32_t n = 1; n < from->nodes.n && st == TL_OK; n++) {
        struct tl_node node = from->nodes.at[n];
        if (map[n] == TL_UNKNOWN)
            continue;
        s->entries.n = 0;
        if (!TL_VEC_ROOM(&s->entries, node.n)) {
            st = no_memory(e);
            break;
        }
        for (uint32_t i = 0; i < node.n; i++) {
            struct tl_pair p = from->pairs.at[node.first + i];
            s->entries.at[s->entries.n++] = (struct tl_pair){p.state, map[p.node]};
        }
        st = tl_space_node(s, &map[n], e);
    }
    s->kept.n = 0;
    if (st == TL_OK && !TL_VEC_ROOM(&s->kept, x.n))
        st = no_memory(e);
    for (uint32_t i = 0; st == TL_OK && i < x.n; i++)
        s->kept.at[s->kept.n++] =
            (struct tl_pair){from->pairs.at[x.first + i].state, map[from->pairs.at[x.first + i].node]};
    if (st == TL_OK)
        st = intern_place(s, x.through, copy, e);
    tl_free(map);
    return st;
}
