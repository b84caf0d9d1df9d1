/* GBNF: rules "name ::= alternatives", as llama.cpp users write them.
 *
 *   "text"  [class] [^class]  .  rule-name  (group)   each perhaps followed by  * + ? {n} {n,} {,m} {n,m}
 *   escapes in texts and classes: \n \r \t \\ \" \[ \] \xHH \uHHHH \UHHHHHHHH;   # starts a comment
 *
 * A rule ends at the line end, unless a group is open or the line ended in '|' or '::='. Characters are those of UTF-8; NUL is
 * in no negated class. Rules may be used before they stand. References to tokens (<...>) are refused: a grammar is about text. */
#include "grammar_impl.h"

#include "mem.h"

#include <stdio.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

struct gbnf {
    struct tl_draft *d;
    const char *start, *p, *end;
    struct tl_index names;
    TL_VEC(uint32_t) used_at; /* [rules]: where a name stands first */
    TL_VEC(uint32_t) items;   /* expressions of the groups that are open */
    TL_VEC(struct tl_range) ranges;
};

static void fail_at(struct gbnf *g, const char *at, const char *what)
{
    int line = 1, column = 1;

    if (g->d->st != TL_OK)
        return;
    for (const char *p = g->start; p < at; p++) {
        bool line_end = *p == '\n';
        line += line_end;
        column = line_end ? 1 : column + ((*p & 0xC0) != 0x80);
    }
    tl_draft_fail(g->d, g->d->st_bad, "line %d, column %d: %s", line, column, what);
    tl_error_param(g->d->err, "grammar");
    tl_error_num(g->d->err, "line", line);
    tl_error_num(g->d->err, "column", column);
}

/* false: the end, or not the character c. */
static bool at(const struct gbnf *g, char c) { return g->p < g->end && *g->p == c; }

static bool is_name(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

static void skip(struct gbnf *g, bool lines)
{
    for (; g->p < g->end; g->p++) {
        if (*g->p == '#') {
            while (g->p < g->end && *g->p != '\n' && *g->p != '\r')
                g->p++;
            if (g->p == g->end)
                return;
        }
        if (*g->p != ' ' && *g->p != '\t' && !(lines && (*g->p == '\n' || *g->p == '\r')))
            return;
    }
}

/* ---- names ---- */

struct name {
    const struct tl_draft *d;
    const char *p;
    uint32_t n;
};

static uint64_t hash_rule(const void *arg, uint32_t r)
{
    const struct tl_draft *d = arg;
    return XXH3_64bits(d->bytes.at + d->rules.at[r].name, d->rules.at[r].n_name);
}

static bool same_name(const void *arg, uint32_t r)
{
    const struct name *x = arg;
    const struct tl_draft_rule *rule = &x->d->rules.at[r];
    return rule->n_name == x->n && memcmp(x->d->bytes.at + rule->name, x->p, x->n) == 0;
}

static uint32_t rule_named(struct gbnf *g)
{
    struct tl_draft *d = g->d;
    struct name x = {d, g->p, 0};
    uint32_t slot, r;

    while (g->p < g->end && is_name(*g->p))
        g->p++;
    x.n = (uint32_t)(g->p - x.p);
    if (!tl_index_room(&g->names, hash_rule, d) || !TL_VEC_ROOM(&g->used_at, 1)) {
        tl_draft_no_memory(d);
        return 0;
    }
    r = tl_index_find(&g->names, XXH3_64bits(x.p, x.n), same_name, &x, &slot);
    if (r != TL_UNKNOWN)
        return r;
    r = tl_draft_rule(d, x.p, x.n);
    if (d->st != TL_OK)
        return 0;
    tl_index_put(&g->names, slot, r);
    g->used_at.at[g->used_at.n++] = (uint32_t)(x.p - g->start);
    return r;
}

/* ---- characters ---- */

static int hex(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

/* One character of a text or class, escapes resolved. */
static uint32_t character(struct gbnf *g)
{
    const char *from = g->p;
    uint32_t cp = 0;
    int n_digits;

    if (*g->p != '\\') {
        int n = tl_utf8_read(g->p, g->end, &cp);
        if (n == 0)
            fail_at(g, from, "the text is not UTF-8");
        g->p += n ? n : 1;
        return cp;
    }
    g->p++;
    if (g->p == g->end) {
        fail_at(g, from, "an escape has no end");
        return 0;
    }
    switch (*g->p++) {
    case 'n': return '\n';
    case 'r': return '\r';
    case 't': return '\t';
    case '\\': return '\\';
    case '"': return '"';
    case '[': return '[';
    case ']': return ']';
    case '-': return '-';
    case '^': return '^';
    case 'x': n_digits = 2; break;
    case 'u': n_digits = 4; break;
    case 'U': n_digits = 8; break;
    default: fail_at(g, from, "unknown escape; known are \\n \\r \\t \\\\ \\\" \\[ \\] \\x \\u \\U"); return 0;
    }
    for (int i = 0; i < n_digits; i++) {
        int v = g->p < g->end ? hex(*g->p) : -1;
        if (v < 0) {
            fail_at(g, from, "an escape lacks hexadecimal digits");
            return 0;
        }
        cp = cp << 4 | (uint32_t)v;
        g->p++;
    }
    if (cp > TL_UNICODE_MAX || (cp >= 0xD800 && cp <= 0xDFFF))
        fail_at(g, from, "an escape names no character");
    return cp;
}

static uint32_t text(struct gbnf *g)
{
    const char *from = g->p++;
    uint32_t at_byte = g->d->bytes.n, first = g->d->words.n;

    while (!at(g, '"') && g->d->st == TL_OK) {
        char utf8[4];
        uint32_t cp;
        if (g->p >= g->end || *g->p == '\n' || *g->p == '\r') {
            fail_at(g, from, "a text has no closing quote");
            return 0;
        }
        cp = character(g);
        if (!TL_VEC_ROOM(&g->d->bytes, 4)) {
            tl_draft_no_memory(g->d);
            return 0;
        }
        int n = tl_utf8_write(utf8, cp);
        memcpy(g->d->bytes.at + g->d->bytes.n, utf8, (size_t)n);
        g->d->bytes.n += (uint32_t)n;
    }
    g->p++;
    if (g->d->st != TL_OK || g->d->bytes.n == at_byte)
        return 0;
    if (!TL_VEC_ROOM(&g->d->words, 1)) {
        tl_draft_no_memory(g->d);
        return 0;
    }
    g->d->words.at[g->d->words.n++] = (struct tl_word){at_byte, g->d->bytes.n - at_byte};
    return tl_draft_words(g->d, first);
}

static uint32_t class(struct gbnf *g)
{
    const char *from = g->p++;
    bool negate = at(g, '^');

    g->p += negate;
    g->ranges.n = 0;
    while (!at(g, ']') && g->d->st == TL_OK) {
        struct tl_range r;
        if (g->p >= g->end || *g->p == '\n' || *g->p == '\r') {
            fail_at(g, from, "a class has no closing bracket");
            return 0;
        }
        r.lo = r.hi = character(g);
        if (at(g, '-') && g->end - g->p > 1 && g->p[1] != ']') {
            g->p++;
            r.hi = character(g);
        }
        if (r.hi < r.lo)
            fail_at(g, from, "a range of a class ends before it begins");
        if (!TL_VEC_ROOM(&g->ranges, 1)) {
            tl_draft_no_memory(g->d);
            return 0;
        }
        g->ranges.at[g->ranges.n++] = r;
    }
    g->p++;
    return tl_draft_set(g->d, g->ranges.at, g->ranges.n, negate);
}

/* ---- rules ---- */

static int number(struct gbnf *g, int otherwise)
{
    int64_t v = 0;
    const char *from = g->p;

    for (; g->p < g->end && *g->p >= '0' && *g->p <= '9'; g->p++)
        v = v < INT32_MAX / 20 ? v * 10 + (*g->p - '0') : INT32_MAX / 2;
    return g->p == from ? otherwise : (int)v;
}

/* The item with all the repetitions that stand behind it. */
static uint32_t repeated(struct gbnf *g, uint32_t item)
{
    for (int n = 0; g->d->st == TL_OK; n++) {
        const char *from = g->p;
        int min = 0, max = -1;
        if (g->p >= g->end || !strchr("*+?{", *g->p) || *g->p == '\0')
            return item;
        if (n >= 3) { /* so that expressions nest no deeper than groups allow */
            fail_at(g, from, "too many repetitions of a repetition");
            return 0;
        }
        switch (*g->p++) {
        case '+': min = 1; break;
        case '?': max = 1; break;
        case '{':
            skip(g, false);
            min = number(g, -1);
            skip(g, false);
            max = min;
            if (at(g, ',')) {
                g->p++;
                skip(g, false);
                max = number(g, -1);
                skip(g, false);
            } else if (min < 0) {
                fail_at(g, from, "a repetition lacks its count");
            }
            if (!at(g, '}'))
                fail_at(g, from, "a repetition has no closing brace");
            min = min < 0 ? 0 : min;
            g->p++;
            if (max >= 0 && max < min)
                fail_at(g, from, "a repetition ends before it begins");
            if (min > g->d->limits.repeat_max || max > g->d->limits.repeat_max)
                fail_at(g, from, "a repetition count is over the limit");
            break;
        default: break;
        }
        item = tl_draft_repeat(g->d, item, min, max);
        skip(g, false);
    }
    return 0;
}

static bool push(struct gbnf *g, uint32_t item)
{
    if (!TL_VEC_ROOM(&g->items, 1)) {
        tl_draft_no_memory(g->d);
        return false;
    }
    g->items.at[g->items.n++] = item;
    return true;
}

static uint32_t alternatives(struct gbnf *g, int depth);

/* false: no item begins here. */
static bool item(struct gbnf *g, int depth, uint32_t *out)
{
    const char *from = g->p;

    if (g->p >= g->end)
        return false;
    if (*g->p == '"') {
        *out = text(g);
    } else if (*g->p == '[') {
        *out = class(g);
    } else if (*g->p == '.') {
        g->p++;
        *out = tl_draft_set(g->d, NULL, 0, true);
    } else if (*g->p == '(') {
        if (depth >= g->d->limits.depth_max) {
            fail_at(g, from, "groups are nested deeper than the limit");
            return false;
        }
        g->p++;
        skip(g, true);
        *out = alternatives(g, depth + 1);
        if (g->d->st == TL_OK && !at(g, ')'))
            fail_at(g, g->p < g->end ? g->p : from,
                    g->p < g->end ? "this cannot stand in a group" : "a group has no closing parenthesis");
        g->p++;
    } else if (is_name(*g->p)) {
        *out = tl_draft_call(g->d, rule_named(g));
    } else {
        return false;
    }
    return g->d->st == TL_OK;
}

static uint32_t sequence(struct gbnf *g, int depth)
{
    uint32_t first = g->items.n, x = 0;

    while (item(g, depth, &x)) {
        skip(g, depth > 0);
        if (!push(g, repeated(g, x)))
            return 0;
        skip(g, depth > 0);
    }
    x = tl_draft_cat(g->d, g->items.at + first, g->items.n - first);
    g->items.n = first;
    return x;
}

static uint32_t alternatives(struct gbnf *g, int depth)
{
    uint32_t first = g->items.n, x;

    for (;;) {
        if (!push(g, sequence(g, depth)) || g->d->st != TL_OK)
            return 0;
        if (!at(g, '|'))
            break;
        g->p++;
        skip(g, true);
    }
    x = tl_draft_alt(g->d, g->items.at + first, g->items.n - first);
    g->items.n = first;
    return x;
}

static void rule(struct gbnf *g)
{
    const char *from = g->p;
    uint32_t r, body;

    if (!is_name(*g->p)) {
        fail_at(g, from, "a rule must begin with its name");
        return;
    }
    r = rule_named(g);
    skip(g, false);
    if (g->end - g->p < 3 || memcmp(g->p, "::=", 3) != 0) {
        fail_at(g, g->p, "'::=' is missing behind the name of a rule");
        return;
    }
    g->p += 3;
    skip(g, true);
    if (g->d->st == TL_OK && g->d->rules.at[r].defined)
        fail_at(g, from, "this rule stands twice");
    body = alternatives(g, 0);
    if (g->d->st != TL_OK)
        return;
    if (g->p < g->end && *g->p != '\n' && *g->p != '\r') {
        fail_at(g, g->p,
                *g->p == '<' || *g->p == '!' ? "tokens cannot be named in a grammar, only text"
                                             : "this cannot stand in a rule");
        return;
    }
    tl_draft_define(g->d, r, body);
    skip(g, true);
}

void tl_gbnf_read(struct tl_draft *d, const char *source, size_t n)
{
    struct gbnf g = {.d = d, .start = source, .p = source, .end = source + n};
    struct tl_draft_rule *missing = NULL;

    if (!TL_VEC_ROOM(&g.items, 16) || !TL_VEC_ROOM(&g.ranges, 16))
        tl_draft_no_memory(d);
    skip(&g, true);
    while (g.p < g.end && d->st == TL_OK)
        rule(&g);
    for (uint32_t i = 0; i < d->rules.n && d->st == TL_OK; i++)
        if (!d->rules.at[i].defined) {
            char what[128];
            missing = &d->rules.at[i];
            snprintf(what, sizeof(what), "rule '%.*s' is used and stands nowhere",
                     missing->n_name > 60 ? 60 : (int)missing->n_name, d->bytes.at + missing->name);
            fail_at(&g, source + g.used_at.at[i], what);
        }
    if (d->st == TL_OK) {
        struct name root = {d, "root", 4};
        uint32_t slot;
        d->root =
            g.names.n_slots ? tl_index_find(&g.names, XXH3_64bits("root", 4), same_name, &root, &slot) : TL_UNKNOWN;
        if (d->root == TL_UNKNOWN)
            fail_at(&g, source, "there is no rule 'root'");
    }
    tl_free(g.names.slots);
    tl_free(g.used_at.at);
    tl_free(g.items.at);
    tl_free(g.ranges.at);
}
