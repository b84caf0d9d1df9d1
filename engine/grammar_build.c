/* Expressions written out as states and edges over bytes. */
#include "grammar_build.h"

#include "mem.h"

#include <stdlib.h>
#include <string.h>

/* Names the rule in which the limit was met: for a schema that is the JSON pointer. */
static void too_large(struct tl_build *b, long long limit, const char *what)
{
    const struct tl_draft_rule *r = &b->d->rules.at[b->rule];

    tl_draft_fail(b->d, b->d->st_bad, "the grammar needs more than %lld %s with its repetitions written out, at '%.*s'",
                  limit, what, r->n_name > 160 ? 160 : (int)r->n_name, b->d->bytes.at + r->name);
}

uint32_t tl_build_state(struct tl_build *b)
{
    struct tl_draft *d = b->d;

    if (d->st != TL_OK)
        return 0;
    if ((int64_t)b->n_states >= d->limits.states_max) {
        too_large(b, d->limits.states_max, "states");
        return 0;
    }
    if (!TL_VEC_ROOM(&b->same, 1) || !TL_VEC_ROOM(&b->rule_of, 1)) {
        tl_draft_no_memory(d);
        return 0;
    }
    b->same.at[b->same.n++] = b->n_states;
    b->rule_of.at[b->rule_of.n++] = b->rule;
    return b->n_states++;
}

static void edge(struct tl_build *b, uint32_t from, uint32_t to, uint32_t what)
{
    if (b->d->st != TL_OK)
        return;
    if ((int64_t)b->edges.n >= (int64_t)b->d->limits.states_max * 4)
        too_large(b, (long long)b->d->limits.states_max * 4, "moves");
    else if (!TL_VEC_ROOM(&b->edges, 1))
        tl_draft_no_memory(b->d);
    else
        b->edges.at[b->edges.n++] = (struct tl_draft_edge){from, to, what};
}

static void bytes_edge(struct tl_build *b, uint32_t from, uint32_t to, unsigned lo, unsigned hi)
{
    edge(b, from, to, TL_EDGE_BYTES | lo << 8 | hi);
}

/* ---- sets: characters as bytes ---- */

struct
    tails { /* states from which one, two, three arbitrary continuation bytes lead to the end: shared by all ranges */
    uint32_t state[4];
    bool made[4];
};

static uint32_t tail(struct tl_build *b, struct tails *t, int n)
{
    if (!t->made[n]) {
        t->state[n] = tl_build_state(b);
        t->made[n] = true;
        bytes_edge(b, t->state[n], n == 1 ? t->state[0] : tail(b, t, n - 1), 0x80, 0xBF);
    }
    return t->state[n];
}

/* lo and hi have the same length and differ so that each byte has a range of its own. */
static void sequence(struct tl_build *b, struct tails *t, uint32_t from, uint32_t lo, uint32_t hi)
{
    char lo_bytes[4], hi_bytes[4];
    int n = tl_utf8_write(lo_bytes, lo), n_free = 0;

    tl_utf8_write(hi_bytes, hi);
    while (n_free < n - 1 && (unsigned char)lo_bytes[n - 1 - n_free] == 0x80 &&
           (unsigned char)hi_bytes[n - 1 - n_free] == 0xBF)
        n_free++;
    for (int i = 0; i < n - n_free; i++) {
        int n_left = n - 1 - i;
        uint32_t to = n_left == 0 ? t->state[0] : n_left == n_free ? tail(b, t, n_left) : tl_build_state(b);
        bytes_edge(b, from, to, (unsigned char)lo_bytes[i], (unsigned char)hi_bytes[i]);
        from = to;
    }
}

/* At most a few levels: each cut leaves a smaller part of the same length. */
static void range(struct tl_build *b, struct tails *t, uint32_t from, uint32_t lo, uint32_t hi)
{
    static const uint32_t last[] = {0x7F, 0x7FF, 0xD7FF, 0xDFFF, 0xFFFF};

    for (size_t i = 0; i < sizeof(last) / sizeof(last[0]); i++)
        if (lo <= last[i] && hi > last[i]) {
            range(b, t, from, lo, last[i]);
            range(b, t, from, last[i] + 1, hi);
            return;
        }
    if (lo >= 0xD800 && hi <= 0xDFFF)
        return; /* no text holds half a pair */
    for (int i = 1; i < (lo < 0x80 ? 1 : lo < 0x800 ? 2 : lo < 0x10000 ? 3 : 4); i++) {
        uint32_t m = (1u << (6 * i)) - 1;
        if ((lo & ~m) == (hi & ~m))
            continue;
        if (lo & m) {
            range(b, t, from, lo, lo | m);
            range(b, t, from, (lo | m) + 1, hi);
            return;
        }
        if ((hi & m) != m) {
            range(b, t, from, lo, (hi & ~m) - 1);
            range(b, t, from, hi & ~m, hi);
            return;
        }
    }
    sequence(b, t, from, lo, hi);
}

static void build_set(struct tl_build *b, const struct tl_expr *x, uint32_t from, uint32_t to)
{
    struct tails t = {.state = {to}};

    for (uint32_t i = 0; i < x->n; i++) {
        struct tl_range r = b->d->ranges.at[x->a + i];
        range(b, &t, from, r.lo, r.hi);
    }
}

/* ---- words: a tree of bytes ---- */

static int by_bytes(const void *a, const void *b, void *bytes)
{
    const struct tl_word *x = a, *y = b;
    int c = memcmp((const char *)bytes + x->at, (const char *)bytes + y->at, x->n < y->n ? x->n : y->n);
    return c ? c : (x->n > y->n) - (x->n < y->n);
}

static void build_words(struct tl_build *b, const struct tl_expr *x, uint32_t from, uint32_t to)
{
    struct tl_draft *d = b->d;
    struct tl_word *words = d->words.at + x->a;
    uint32_t *path, n_path = 0, longest = 0; /* path[i]: state after i bytes of the word before */

    if (x->n > 1) /* so that words with a common beginning stand together; their order means nothing */
        qsort_r(words, x->n, sizeof(*words), by_bytes, d->bytes.at);
    for (uint32_t i = 0; i < x->n; i++)
        longest = words[i].n > longest ? words[i].n : longest;
    path = tl_array((size_t)longest + 1, sizeof(*path));
    if (!path) {
        tl_draft_no_memory(d);
        return;
    }
    path[0] = from;
    for (uint32_t i = 0; i < x->n && d->st == TL_OK; i++) {
        const char *w = d->bytes.at + words[i].at, *before = i ? d->bytes.at + words[i - 1].at : NULL;
        uint32_t k = 0;
        while (before && k < n_path && k < words[i].n && w[k] == before[k])
            k++;
        if (before && k == words[i].n && k == words[i - 1].n)
            continue; /* twice the same */
        for (; k < words[i].n; k++) {
            unsigned c = (unsigned char)w[k];
            path[k + 1] = x->n == 1 && k + 1 == words[i].n ? to : tl_build_state(b);
            bytes_edge(b, path[k], path[k + 1], c, c);
        }
        n_path = words[i].n;
        if (path[n_path] != to)
            edge(b, path[n_path], to, TL_EDGE_NOTHING);
    }
    tl_free(path);
}

/* ---- the rest ---- */

static int clamp(int64_t x) { return x < 0 ? 0 : x > TL_SHORT_PIECE + 2 ? TL_SHORT_PIECE + 2 : (int)x; }

/* Copy k of a repetition, far from both ends, reads short pieces like the first copy that is as far from them: at most
 * TL_SHORT_PIECE + 1 copies are left behind by one. (Only if a copy reads something; else the claim does not hold.) */
static void mark_same(struct tl_build *b, uint32_t first, uint32_t stride, int n_copies, int min, int max)
{
    int like = 0;

    for (int k = 1; k < n_copies; k++) {
        bool alike = clamp((int64_t)min - like - 1) == clamp((int64_t)min - k - 1) &&
                     (max < 0 || clamp((int64_t)max - like - 1) == clamp((int64_t)max - k - 1));
        if (!alike) {
            like = k;
            continue;
        }
        for (uint32_t i = 0; i < stride; i++)
            b->same.at[first + (uint32_t)k * stride + i] = b->same.at[first + (uint32_t)like * stride + i];
    }
}

/* Whether expression x surely reads a byte. Looks at few levels only: "no" is always safe. */
static bool reads(const struct tl_draft *d, uint32_t x, int depth)
{
    const struct tl_expr *e = &d->exprs.at[x];

    if (depth > 4)
        return false;
    switch (e->kind) {
    case TL_EXPR_SET: return true;
    case TL_EXPR_WORDS:
        for (uint32_t i = 0; i < e->n; i++)
            if (d->words.at[e->a + i].n == 0)
                return false;
        return true;
    case TL_EXPR_CAT:
        for (uint32_t i = 0; i < e->n && i < 8; i++)
            if (reads(d, d->kids.at[e->a + i], depth + 1))
                return true;
        return false;
    case TL_EXPR_ALT:
        for (uint32_t i = 0; i < e->n; i++)
            if (!reads(d, d->kids.at[e->a + i], depth + 1))
                return false;
        return true;
    case TL_EXPR_REPEAT: return e->min > 0 && reads(d, e->a, depth + 1);
    default: return false;
    }
}

static void build_repeat(struct tl_build *b, struct tl_expr x, uint32_t from, uint32_t to)
{
    struct tl_draft *d = b->d;
    int n_copies = x.max < 0 ? x.min : x.max;
    uint32_t s = tl_build_state(b), first = b->n_states;

    edge(b, from, s, TL_EDGE_NOTHING);
    for (int k = 0; k < n_copies && d->st == TL_OK; k++) {
        uint32_t next = tl_build_state(b);
        if (k >= x.min)
            edge(b, s, to, TL_EDGE_NOTHING);
        tl_build_expr(b, x.a, s, next);
        s = next;
    }
    if (d->st == TL_OK && n_copies > 2 && reads(d, x.a, 0))
        mark_same(b, first, (b->n_states - first) / (uint32_t)n_copies, n_copies, x.min, x.max);
    if (x.max < 0) {
        uint32_t next = tl_build_state(b);
        tl_build_expr(b, x.a, s, next);
        edge(b, next, s, TL_EDGE_NOTHING);
    }
    edge(b, s, to, TL_EDGE_NOTHING);
}

/* Two tracks side by side: `none` until the first member was written, `some` after it, where members need a separator. */
static void build_list(struct tl_build *b, struct tl_expr x, uint32_t from, uint32_t to)
{
    struct tl_draft *d = b->d;
    uint32_t sep = d->kids.at[x.a], tail_expr = d->kids.at[x.a + 1], some = 0, s;
    bool none_open = true, some_open = false;

    for (uint32_t i = 0; i < x.n && d->st == TL_OK; i++) {
        uint32_t member = d->kids.at[x.a + 2 + 2 * i], next = tl_build_state(b);
        bool required = d->kids.at[x.a + 3 + 2 * i];
        if (none_open)
            tl_build_expr(b, member, from, next);
        if (some_open) {
            s = tl_build_state(b);
            tl_build_expr(b, sep, some, s);
            tl_build_expr(b, member, s, next);
            if (!required)
                edge(b, some, next, TL_EDGE_NOTHING);
        }
        some = next;
        some_open = true;
        none_open = none_open && !required;
    }
    if (d->st != TL_OK)
        return;
    if (x.max != 0) {
        uint32_t pair[2] = {sep, tail_expr}, more = tl_draft_cat(d, pair, 2);
        uint32_t first[2] = {tail_expr, tl_draft_repeat(d, more, 0, x.max < 0 ? -1 : x.max - 1)};
        if (none_open)
            tl_build_expr(b, tl_draft_cat(d, first, 2), from, to);
        if (some_open)
            tl_build_expr(b, tl_draft_repeat(d, more, 0, x.max), some, to);
    } else if (some_open) {
        edge(b, some, to, TL_EDGE_NOTHING);
    }
    if (none_open && x.min == 0)
        edge(b, from, to, TL_EDGE_NOTHING);
}

void tl_build_expr(struct tl_build *b, uint32_t number, uint32_t from, uint32_t to)
{
    struct tl_draft *d = b->d;
    struct tl_expr x = d->exprs.at[number]; /* a copy: the array may move */

    if (d->st != TL_OK)
        return;
    switch (x.kind) {
    case TL_EXPR_EMPTY: edge(b, from, to, TL_EDGE_NOTHING); break;
    case TL_EXPR_SET: build_set(b, &x, from, to); break;
    case TL_EXPR_WORDS: build_words(b, &x, from, to); break;
    case TL_EXPR_CAT:
        for (uint32_t i = 0; i < x.n && d->st == TL_OK; i++) {
            uint32_t next = i + 1 == x.n ? to : tl_build_state(b);
            tl_build_expr(b, d->kids.at[x.a + i], from, next);
            from = next;
        }
        break;
    case TL_EXPR_ALT:
        for (uint32_t i = 0; i < x.n && d->st == TL_OK; i++)
            tl_build_expr(b, d->kids.at[x.a + i], from, to);
        break;
    case TL_EXPR_REPEAT: build_repeat(b, x, from, to); break;
    case TL_EXPR_RULE: edge(b, from, to, TL_EDGE_RULE | x.a); break;
    case TL_EXPR_LIST: build_list(b, x, from, to); break;
    }
}
