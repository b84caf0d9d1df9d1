/* From a draft to a checked automaton: what no text can complete is cut off, left recursion is refused. */
#include "grammar_build.h"

#include "mem.h"

#include <string.h>

static uint32_t kind_of(uint32_t what) { return what & TL_EDGE_KIND; }
static uint32_t rule_of(uint32_t what) { return what & ~TL_EDGE_KIND; }

void tl_net_clear(struct tl_net *net)
{
    tl_free(net->first);
    tl_free(net->edges);
    tl_free(net->same);
    tl_free(net->rule_of);
    tl_free(net->rules);
    memset(net, 0, sizeof(*net));
}

/* Sort edges by the state at `key_from ? from : to`; order[first[s] .. first[s + 1]) are the numbers of those of s. */
static bool group_edges(const struct tl_draft_edge *edges, uint32_t n, uint32_t n_states, bool key_from,
                        uint32_t **first, uint32_t **order)
{
    uint32_t *f = tl_calloc((size_t)n_states + 2, sizeof(*f)), *o = tl_array((size_t)n + 1, sizeof(*o));

    if (!f || !o) {
        tl_free(f);
        tl_free(o);
        return false;
    }
    for (uint32_t i = 0; i < n; i++)
        f[(key_from ? edges[i].from : edges[i].to) + 2]++;
    for (uint32_t s = 0; s <= n_states; s++)
        f[s + 1] += f[s];
    for (uint32_t i = 0; i < n; i++)
        o[f[(key_from ? edges[i].from : edges[i].to) + 1]++] = i;
    *first = f;
    *order = o;
    return true;
}

/* ---- which states reach the end of their rule ---- */

struct reach {
    const struct tl_build *b;
    const struct tl_net_rule *rules;
    uint32_t *first, *order; /* edges by their end */
    uint32_t *queue, n_queue;
    uint32_t *waiting; /* [rules]: a chain of rule edges whose rule has not reached its end yet */
    uint32_t *chain;   /* [edges] */
};

static void mark(struct reach *r, bool *ok, uint32_t s)
{
    if (!ok[s]) {
        ok[s] = true;
        r->queue[r->n_queue++] = s;
    }
}

/* ok[s]: from s its rule's end can be reached; with_bytes false: without reading anything. Linear in the edges. */
static void find_reach(struct reach *r, bool *ok, bool with_bytes)
{
    const struct tl_draft_edge *edges = r->b->edges.at;
    uint32_t n_rules = r->b->d->rules.n;

    memset(ok, 0, r->b->n_states);
    r->n_queue = 0;
    for (uint32_t i = 0; i < n_rules; i++) {
        r->waiting[i] = TL_UNKNOWN;
        mark(r, ok, r->rules[i].end);
    }
    while (r->n_queue) {
        uint32_t s = r->queue[--r->n_queue], rule = r->b->rule_of.at[s];
        for (uint32_t k = r->first[s]; k < r->first[s + 1]; k++) {
            uint32_t e = r->order[k], kind = kind_of(edges[e].what);
            if (kind == TL_EDGE_NOTHING || (kind == TL_EDGE_BYTES && with_bytes)) {
                mark(r, ok, edges[e].from);
            } else if (kind == TL_EDGE_RULE) {
                uint32_t callee = rule_of(edges[e].what);
                if (ok[r->rules[callee].start]) {
                    mark(r, ok, edges[e].from);
                } else {
                    r->chain[e] = r->waiting[callee];
                    r->waiting[callee] = e;
                }
            }
        }
        if (s == r->rules[rule].start) {
            for (uint32_t e = r->waiting[rule]; e != TL_UNKNOWN; e = r->chain[e])
                mark(r, ok, edges[e].from);
            r->waiting[rule] = TL_UNKNOWN;
        }
    }
}

/* ---- left recursion ---- */

struct lefts {                    /* rules with which a rule may begin */
    TL_VEC(struct tl_pair) found; /* (rule, callee), by rule */
    uint32_t *first;              /* [rules + 1] into found */
};

static bool find_lefts(const struct tl_build *b, const struct tl_net_rule *rules, const uint32_t *first,
                       const uint32_t *order, uint32_t *queue, bool *seen, struct lefts *out)
{
    memset(seen, 0, b->n_states);
    for (uint32_t r = 0; r < b->d->rules.n; r++) {
        uint32_t n = 0;
        out->first[r] = out->found.n;
        queue[n++] = rules[r].start;
        seen[rules[r].start] = true;
        while (n) {
            uint32_t s = queue[--n];
            for (uint32_t k = first[s]; k < first[s + 1]; k++) {
                const struct tl_draft_edge *e = &b->edges.at[order[k]];
                if (kind_of(e->what) == TL_EDGE_BYTES)
                    continue;
                if (kind_of(e->what) == TL_EDGE_RULE) {
                    if (!TL_VEC_ROOM(&out->found, 1))
                        return false;
                    out->found.at[out->found.n++] = (struct tl_pair){r, rule_of(e->what)};
                    if (!rules[rule_of(e->what)].nullable)
                        continue;
                }
                if (!seen[e->to]) {
                    seen[e->to] = true;
                    queue[n++] = e->to;
                }
            }
        }
    }
    out->first[b->d->rules.n] = out->found.n;
    return true;
}

/* Number the rules so that one that another may begin with comes after it. Depth first, without recursion.
 * Returns a rule that may begin with itself, or TL_UNKNOWN. */
static uint32_t rank_rules(struct tl_net_rule *rules, uint32_t n, const struct lefts *l, uint32_t *at, uint32_t *path,
                           bool *open)
{
    uint32_t rank = n, n_path = 0;

    for (uint32_t i = 0; i < n; i++) {
        at[i] = TL_UNKNOWN;
        open[i] = false;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (at[i] != TL_UNKNOWN)
            continue;
        path[n_path++] = i;
        at[i] = l->first[i];
        open[i] = true;
        while (n_path) {
            uint32_t r = path[n_path - 1], next;
            if (at[r] == l->first[r + 1]) {
                rules[r].rank = --rank;
                open[r] = false;
                n_path--;
                continue;
            }
            next = l->found.at[at[r]++].node;
            if (open[next])
                return next;
            if (at[next] == TL_UNKNOWN) {
                path[n_path++] = next;
                at[next] = l->first[next];
                open[next] = true;
            }
        }
    }
    return TL_UNKNOWN;
}

/* ---- packing ---- */

static void find_classes(struct tl_net *net)
{
    bool cut[257] = {[0] = true};
    int n = 0;

    for (uint32_t i = 0; i < net->n_edges; i++)
        if (kind_of(net->edges[i].what) == TL_EDGE_BYTES) {
            cut[net->edges[i].what >> 8 & 0xFF] = true;
            cut[(net->edges[i].what & 0xFF) + 1] = true;
        }
    for (int c = 0; c < 256; c++) {
        if (cut[c]) {
            net->byte_of[n] = (uint8_t)c;
            n++;
        }
        net->class_of[c] = (uint8_t)(n - 1);
    }
    for (int k = 0; k < n; k++)
        net->class_size_1[k] = (k + 1 < n ? net->byte_of[k + 1] : 256) - net->byte_of[k] == 1;
    net->n_classes = n;
}

static bool pack(struct tl_net *net, const struct tl_build *b, const struct tl_net_rule *rules, const bool *live,
                 const uint32_t *first, const uint32_t *order)
{
    net->n_states = b->n_states;
    net->first = tl_array((size_t)net->n_states + 1, sizeof(*net->first));
    net->edges = tl_array((size_t)b->edges.n + 1, sizeof(*net->edges));
    if (!net->first || !net->edges)
        return false;
    for (uint32_t s = 0; s < net->n_states; s++) {
        net->first[s] = net->n_edges;
        for (uint32_t k = first[s]; k < first[s + 1]; k++) {
            const struct tl_draft_edge *e = &b->edges.at[order[k]];
            if (live[e->to] && (kind_of(e->what) != TL_EDGE_RULE || live[rules[rule_of(e->what)].start]))
                net->edges[net->n_edges++] = (struct tl_edge){e->to, e->what};
        }
    }
    net->first[net->n_states] = net->n_edges;
    find_classes(net);
    net->bytes = (size_t)net->n_states * 3 * sizeof(uint32_t) + (size_t)b->edges.n * sizeof(*net->edges) +
                 (size_t)net->n_rules * sizeof(*net->rules);
    return true;
}

static enum tl_status check_and_pack(struct tl_net *net, struct tl_build *b, struct tl_net_rule *rules)
{
    struct tl_draft *d = b->d;
    uint32_t n_states = b->n_states, n_edges = b->edges.n, n_rules = d->rules.n, bad;
    struct reach r = {.b = b, .rules = rules};
    struct lefts lefts = {.first = tl_array((size_t)n_rules + 1, sizeof(uint32_t))};
    uint32_t *first = NULL, *order = NULL;
    bool *ok = tl_calloc((size_t)n_states + n_rules, 1);

    r.queue = tl_array((size_t)n_states + n_rules, sizeof(uint32_t));
    r.waiting = tl_array((size_t)n_rules * 2, sizeof(uint32_t));
    r.chain = tl_array((size_t)n_edges + 1, sizeof(uint32_t));
    if (!lefts.first || !ok || !r.queue || !r.waiting || !r.chain ||
        !group_edges(b->edges.at, n_edges, n_states, false, &r.first, &r.order) ||
        !group_edges(b->edges.at, n_edges, n_states, true, &first, &order)) {
        tl_draft_no_memory(d);
        goto out;
    }
    find_reach(&r, ok, false);
    for (uint32_t i = 0; i < n_rules; i++)
        rules[i].nullable = ok[rules[i].start];
    if (!find_lefts(b, rules, first, order, r.queue, ok, &lefts)) {
        tl_draft_no_memory(d);
        goto out;
    }
    bad = rank_rules(rules, n_rules, &lefts, r.waiting, r.queue, ok);
    if (bad != TL_UNKNOWN) {
        tl_draft_fail(d, d->st_bad, "rule '%.*s' may begin with itself: left recursion has no end",
                      (int)d->rules.at[bad].n_name, d->bytes.at + d->rules.at[bad].name);
        goto out;
    }
    find_reach(&r, ok, true);
    if (!ok[rules[d->root].start]) {
        tl_draft_fail(d, d->st_bad, "the grammar accepts no text at all: rule '%.*s' cannot be completed",
                      (int)d->rules.at[d->root].n_name, d->bytes.at + d->rules.at[d->root].name);
        goto out;
    }
    if (!pack(net, b, rules, ok, first, order))
        tl_draft_no_memory(d);
out:
    tl_free(lefts.found.at);
    tl_free(lefts.first);
    tl_free(first);
    tl_free(order);
    tl_free(r.first);
    tl_free(r.order);
    tl_free(r.queue);
    tl_free(r.waiting);
    tl_free(r.chain);
    tl_free(ok);
    return d->st;
}

enum tl_status tl_net_build(struct tl_net *net, struct tl_draft *d, struct tl_error *err)
{
    struct tl_build b = {.d = d};
    struct tl_net_rule *rules = tl_calloc(d->rules.n, sizeof(*rules));

    memset(net, 0, sizeof(*net));
    if (!rules)
        return tl_fail_host_memory(err, d->rules.n * sizeof(*rules));
    for (uint32_t i = 0; i < d->rules.n && d->st == TL_OK; i++) {
        b.rule = i;
        rules[i].start = tl_build_state(&b);
        rules[i].end = tl_build_state(&b);
        tl_build_expr(&b, d->rules.at[i].body, rules[i].start, rules[i].end);
    }
    net->n_rules = d->rules.n;
    net->root = d->root;
    net->rules = rules;
    if (d->st == TL_OK && check_and_pack(net, &b, rules) == TL_OK) {
        net->same = b.same.at;
        net->rule_of = b.rule_of.at;
        b.same.at = b.rule_of.at = NULL;
    }
    tl_free(b.edges.at);
    tl_free(b.same.at);
    tl_free(b.rule_of.at);
    if (d->st != TL_OK)
        tl_net_clear(net);
    return d->st;
}
