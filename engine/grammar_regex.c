/* Regular expressions as ECMA-262 and most others have them, without what needs more than an automaton.
 *
 *   characters, . [class] [^class] \d \D \w \W \s \S, escapes \n \r \t \f \v \xHH \uHHHH \u{H...} and \ before punctuation,
 *   (group) (?:group) (?<name>group), alternatives, * + ? {n} {n,} {n,m} (also lazy: the texts are the same), ^ and $ at the
 *   ends of the expression or of an alternative that stands in no group
 *
 * Refused by name: look-around, back-references, \b, \p, flags, possessive repetition, anchors elsewhere. \d \w \s mean ASCII;
 * '.' is anything but a line end. Lengths are known while reading, for bounds given beside a pattern. */
#include "grammar_impl.h"

#include "mem.h"

#include <stdio.h>
#include <string.h>

struct part {
    uint32_t expr;
    int64_t min, max; /* characters; max -1 = any number */
    bool is_repeat;   /* of something one character long */
};

struct regex {
    struct tl_draft *d;
    const struct tl_regex_params *params;
    const char *p, *end;
    TL_VEC(uint32_t) items;
    TL_VEC(struct tl_range) ranges;
};

#define CHARS_MAX (1 << 30) /* lengths past it count as it */

static void fail_at(struct regex *r, const char *at, const char *what)
{
    if (r->d->st != TL_OK)
        return;
    tl_draft_fail(r->d, r->d->st_bad, "%s at offset %td: %s", r->params->json ? "pattern" : "regex",
                  at - r->params->text, what);
    tl_error_param(r->d->err, r->params->json ? "pattern" : "regex");
    tl_error_num(r->d->err, "offset", at - r->params->text);
}

static bool at(const struct regex *r, char c) { return r->p < r->end && *r->p == c; }

static int64_t bounded(int64_t n) { return n > CHARS_MAX ? CHARS_MAX : n; }

/* ---- characters ---- */

static const struct tl_range digits[] = {{'0', '9'}};
static const struct tl_range word[] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
static const struct tl_range blank[] = {{'\t', '\r'}, {' ', ' '}};
/* what "not blank" leaves out: all that anybody counts as blank */
static const struct tl_range any_blank[] = {{'\t', '\r'},     {0x1C, 0x20},     {0x85, 0x85},     {0xA0, 0xA0},
                                            {0x1680, 0x1680}, {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F},
                                            {0x205F, 0x205F}, {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
static const struct tl_range line_ends[] = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

static bool add_ranges(struct regex *r, const struct tl_range *from, uint32_t n, bool negate)
{
    if (!TL_VEC_ROOM(&r->ranges, n + 1)) {
        tl_draft_no_memory(r->d);
        return false;
    }
    r->ranges.n += tl_ranges_tidy(r->ranges.at + r->ranges.n, from, n, negate);
    return true;
}

static uint32_t hex(struct regex *r, const char *from, int n_min, int n_max)
{
    uint32_t v = 0;
    int n = 0;

    for (; n < n_max && r->p < r->end; n++, r->p++) {
        char c = *r->p, low = (char)(c | 32);
        if (c >= '0' && c <= '9')
            v = v << 4 | (uint32_t)(c - '0');
        else if (low >= 'a' && low <= 'f')
            v = v << 4 | (uint32_t)(low - 'a' + 10);
        else
            break;
    }
    if (n < n_min || v > TL_UNICODE_MAX || (v >= 0xD800 && v <= 0xDFFF))
        fail_at(r, from, "the escape names no character");
    return v;
}

/* Behind a backslash: adds what it stands for to r->ranges. *one: it is one character, and *cp which. */
static void escape(struct regex *r, bool in_class, bool *one, uint32_t *cp)
{
    const char *from = r->p - 1;
    char c, what[80];

    *one = true;
    *cp = 0;
    if (r->p >= r->end) {
        fail_at(r, from, "the escape has no end");
        return;
    }
    c = *r->p++;
    switch (c) {
    case 'd':
        add_ranges(r, digits, 1, false);
        *one = false;
        return;
    case 'D':
        add_ranges(r, digits, 1, true);
        *one = false;
        return;
    case 'w':
        add_ranges(r, word, 4, false);
        *one = false;
        return;
    case 'W':
        add_ranges(r, word, 4, true);
        *one = false;
        return;
    case 's':
        add_ranges(r, blank, 2, false);
        *one = false;
        return;
    case 'S':
        add_ranges(r, any_blank, sizeof(any_blank) / sizeof(any_blank[0]), true);
        *one = false;
        return;
    case 'n': *cp = '\n'; break;
    case 'r': *cp = '\r'; break;
    case 't': *cp = '\t'; break;
    case 'f': *cp = '\f'; break;
    case 'v': *cp = '\v'; break;
    case 'x': *cp = hex(r, from, 2, 2); break;
    case 'u':
        if (at(r, '{')) {
            r->p++;
            *cp = hex(r, from, 1, 6);
            if (!at(r, '}'))
                fail_at(r, from, "the escape has no closing brace");
            r->p++;
        } else {
            *cp = hex(r, from, 4, 4);
        }
        break;
    case 'b':
        if (in_class) {
            *cp = '\b';
            break;
        }
        /* fall through */
    default:
        if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || (c & 0x80)) {
            snprintf(what, sizeof(what),
                     c >= '1' && c <= '9' ? "back-references (\\%c) are not supported" : "\\%c is not supported",
                     (c & 0x80) ? '?' : c);
            fail_at(r, from, what);
        }
        *cp = (unsigned char)c;
        break;
    }
    add_ranges(r, &(struct tl_range){*cp, *cp}, 1, false);
}

static uint32_t plain(struct regex *r)
{
    uint32_t cp = 0;
    int n = tl_utf8_read(r->p, r->end, &cp);

    if (n == 0)
        fail_at(r, r->p, "the text is not UTF-8");
    r->p += n ? n : 1;
    return cp;
}

static void class(struct regex *r, bool *negate)
{
    const char *from = r->p++;

    *negate = at(r, '^');
    r->p += *negate;
    while (!at(r, ']') && r->d->st == TL_OK) {
        uint32_t lo, hi, n_before = r->ranges.n;
        const char *start = r->p;
        bool one = true;
        if (r->p >= r->end) {
            fail_at(r, from, "the class has no closing bracket");
            return;
        }
        if (*r->p == '[' && r->end - r->p > 1 && strchr(":.=", r->p[1]) && r->p[1]) {
            fail_at(r, r->p, "named classes are not supported");
            return;
        }
        if (*r->p == '\\') {
            r->p++;
            escape(r, true, &one, &lo);
        } else {
            lo = plain(r);
            add_ranges(r, &(struct tl_range){lo, lo}, 1, false);
        }
        if (!at(r, '-') || r->end - r->p < 2 || r->p[1] == ']' || r->d->st != TL_OK)
            continue;
        r->p++;
        r->ranges.n = n_before;
        if (one && *r->p == '\\') {
            r->p++;
            escape(r, true, &one, &hi);
            r->ranges.n = n_before;
        } else {
            hi = plain(r);
        }
        if (!one || hi < lo)
            fail_at(r, start, "the range of the class ends before it begins, or at no character");
        add_ranges(r, &(struct tl_range){lo, hi}, 1, false);
    }
    r->p++;
}

/* The set of r->ranges from `first` on, which are dropped. */
static uint32_t set_of(struct regex *r, uint32_t first, bool negate)
{
    uint32_t n, x = 0;

    if (r->d->st == TL_OK && !TL_VEC_ROOM(&r->ranges, 1))
        tl_draft_no_memory(r->d);
    if (r->d->st != TL_OK)
        return 0;
    n = tl_ranges_tidy(r->ranges.at + first, r->ranges.at + first, r->ranges.n - first, negate);
    x = r->params->json ? tl_json_set(r->d, r->ranges.at + first, n)
                        : tl_draft_set(r->d, r->ranges.at + first, n, false);
    r->ranges.n = first;
    return x;
}

/* ---- structure ---- */

static struct part alternatives(struct regex *r, int depth);

static void group(struct regex *r, int depth, struct part *out)
{
    const char *from = r->p++;

    if (depth >= r->d->limits.depth_max) {
        fail_at(r, from, "groups are nested deeper than the limit");
        return;
    }
    if (at(r, '?')) {
        const char *q = r->p + 1;
        char c = q < r->end ? *q : '\0', c2 = r->end - q > 1 ? q[1] : '\0';
        if (c == 'P' && c2 == '<') {
            q++;
            c = '<';
            c2 = r->end - q > 1 ? q[1] : '\0';
        }
        if (c == '=' || c == '!' || (c == '<' && (c2 == '=' || c2 == '!'))) {
            fail_at(r, from, "look-around is not supported");
            return;
        }
        if (c == '<') {
            while (q < r->end && *q != '>')
                q++;
        } else if (c != ':') {
            fail_at(r, from, "flags and special groups are not supported");
            return;
        }
        r->p = q < r->end ? q + 1 : q;
    }
    *out = alternatives(r, depth + 1);
    if (!at(r, ')'))
        fail_at(r, from, "the group has no closing parenthesis");
    r->p++;
}

/* A count in braces at r->p; false: this is no repetition. */
static bool counts(struct regex *r, int *min, int *max)
{
    const char *q = r->p + 1;
    int64_t v[2] = {-1, -1};
    int k = 0;

    for (; q < r->end && *q != '}'; q++) {
        if (*q == ',' && k == 0 && v[0] >= 0) {
            k = 1;
        } else if (*q >= '0' && *q <= '9') {
            v[k] = bounded((v[k] < 0 ? 0 : v[k]) * 10 + (*q - '0'));
        } else {
            return false;
        }
    }
    if (q == r->end || v[0] < 0)
        return false;
    *min = (int)v[0];
    *max = k ? (int)v[1] : *min;
    r->p = q + 1;
    return true;
}

static void repetition(struct regex *r, struct part *x)
{
    const char *from = r->p;
    int min = 0, max = -1;

    if (r->p >= r->end)
        return;
    switch (*r->p) {
    case '*': r->p++; break;
    case '+':
        r->p++;
        min = 1;
        break;
    case '?':
        r->p++;
        max = 1;
        break;
    case '{':
        if (counts(r, &min, &max))
            break;
        return; /* a brace like any character */
    default: return;
    }
    if (max >= 0 && max < min)
        fail_at(r, from, "the repetition ends before it begins");
    if (min > r->d->limits.repeat_max || max > r->d->limits.repeat_max)
        fail_at(r, from, "a repetition count is over the limit");
    if (at(r, '?'))
        r->p++;
    else if (at(r, '+') || at(r, '*'))
        fail_at(r, r->p, "repetition of a repetition is not supported");
    x->is_repeat = x->min == 1 && x->max == 1;
    x->expr = tl_draft_repeat(r->d, x->expr, min, max);
    x->min = bounded(x->min * min);
    x->max = x->max == 0 || max == 0 ? 0 : x->max < 0 || max < 0 ? -1 : bounded(x->max * max);
}

/* false: no atom stands here. */
static bool atom(struct regex *r, int depth, struct part *out)
{
    uint32_t first = r->ranges.n, cp;
    bool one;

    *out = (struct part){.min = 1, .max = 1};
    if (r->p >= r->end || *r->p == '|' || *r->p == ')' || r->d->st != TL_OK)
        return false;
    switch (*r->p) {
    case '(': group(r, depth, out); break;
    case '[':
        class(r, &one);
        out->expr = set_of(r, first, one);
        break;
    case '.':
        r->p++;
        if (add_ranges(r, line_ends, 3, true))
            out->expr = set_of(r, first, false);
        break;
    case '\\':
        r->p++;
        escape(r, false, &one, &cp);
        out->expr = set_of(r, first, false);
        break;
    case '^':
    case '$': fail_at(r, r->p, "an anchor is supported only at the ends of the expression"); break;
    case '*':
    case '+':
    case '?': fail_at(r, r->p, "there is nothing to repeat"); break;
    default:
        cp = plain(r);
        add_ranges(r, &(struct tl_range){cp, cp}, 1, false);
        out->expr = set_of(r, first, false);
        break;
    }
    if (r->d->st == TL_OK)
        repetition(r, out);
    return r->d->st == TL_OK;
}

static bool push(struct regex *r, uint32_t x)
{
    if (!TL_VEC_ROOM(&r->items, 1)) {
        tl_draft_no_memory(r->d);
        return false;
    }
    r->items.at[r->items.n++] = x;
    return true;
}

/* n: items so far belong to someone else. At depth 0 '$' ends the alternative. */
static struct part sequence(struct regex *r, int depth, bool *ends_anchored)
{
    struct part all = {0}, x;
    uint32_t first = r->items.n;

    *ends_anchored = false;
    for (;;) {
        if (depth == 0 && at(r, '$') && (r->p + 1 == r->end || r->p[1] == '|')) {
            r->p++;
            *ends_anchored = true;
            break;
        }
        if (!atom(r, depth, &x) || !push(r, x.expr))
            break;
        all.is_repeat = x.is_repeat && r->items.n == first + 1;
        all.min = bounded(all.min + x.min);
        all.max = all.max < 0 || x.max < 0 ? -1 : bounded(all.max + x.max);
    }
    all.expr = tl_draft_cat(r->d, r->items.at + first, r->items.n - first);
    r->items.n = first;
    return all;
}

static uint32_t any(struct regex *r, int64_t min, int64_t max)
{
    struct tl_range all;
    uint32_t n = tl_ranges_tidy(&all, NULL, 0, true);
    uint32_t x = r->params->json ? tl_json_set(r->d, &all, n) : tl_draft_set(r->d, &all, n, false);
    return tl_draft_repeat(r->d, x, (int)min, (int)max);
}

/* Characters all around that an expression without anchors leaves open, so that the length is within bounds if it can be kept:
 * a repetition of single characters is cut to fit, and so are open ends round a text of fixed length. */
static void fit(struct regex *r, struct part *x, bool open_start, bool open_end, const char *from)
{
    const struct tl_regex_params *p = r->params;
    uint32_t parts[3] = {0, x->expr, 0};
    bool bound = p->min > 0 || p->max >= 0;

    if (r->d->st != TL_OK)
        return;
    if (open_start != open_end && x->min == x->max && bound) {
        int64_t min = p->min > x->min ? p->min - x->min : 0, max = p->max < 0 ? -1 : p->max - x->max;
        if (p->max >= 0 && max < min)
            fail_at(r, from, "no text fits both the pattern and its bounds of length");
        parts[open_start ? 0 : 2] = any(r, min, max);
        x->min += min;
        x->max = max < 0 ? -1 : x->max + max;
    } else if (open_start || open_end) {
        parts[0] = open_start ? any(r, 0, -1) : 0;
        parts[2] = open_end ? any(r, 0, -1) : 0;
        x->max = -1;
    } else if (x->is_repeat && bound && r->d->exprs.at[x->expr].kind == TL_EXPR_REPEAT) {
        struct tl_expr *e = &r->d->exprs.at[x->expr];
        int min = e->min > p->min ? e->min : p->min,
            max = e->max < 0 || (p->max >= 0 && p->max < e->max) ? p->max : e->max;
        if (max >= 0 && max < min)
            fail_at(r, from, "no text fits both the pattern and its bounds of length");
        x->min = min;
        x->max = max;
        parts[1] = tl_draft_repeat(r->d, e->a, min, max);
    }
    if (x->min < p->min || (p->max >= 0 && (x->max < 0 || x->max > p->max)))
        fail_at(r, from, "bounds of length beside this pattern are not supported: they cannot be read off it");
    x->expr = tl_draft_cat(r->d, parts, 3);
}

static struct part alternatives(struct regex *r, int depth)
{
    struct part all = {.min = CHARS_MAX}, x;
    uint32_t first = r->items.n;

    for (;;) {
        const char *from = r->p;
        bool start = depth == 0 && at(r, '^'), ends;
        r->p += start;
        x = sequence(r, depth, &ends);
        if (depth == 0)
            fit(r, &x, r->params->search && !start, r->params->search && !ends, from);
        if (!push(r, x.expr) || r->d->st != TL_OK)
            return (struct part){0};
        all.is_repeat = x.is_repeat && r->items.n == first + 1;
        all.min = x.min < all.min ? x.min : all.min;
        all.max = all.max < 0 || x.max < 0 ? -1 : x.max > all.max ? x.max : all.max;
        if (!at(r, '|'))
            break;
        r->p++;
    }
    all.expr = tl_draft_alt(r->d, r->items.at + first, r->items.n - first);
    r->items.n = first;
    return all;
}

uint32_t tl_regex_read(struct tl_draft *d, const struct tl_regex_params *params)
{
    struct regex r = {.d = d, .params = params, .p = params->text, .end = params->text + params->n};
    struct part x = {0};

    if (TL_VEC_ROOM(&r.items, 16) && TL_VEC_ROOM(&r.ranges, 16))
        x = alternatives(&r, 0);
    else
        tl_draft_no_memory(d);
    if (d->st == TL_OK && r.p < r.end)
        fail_at(&r, r.p, "the parenthesis closes no group");
    tl_free(r.items.at);
    tl_free(r.ranges.at);
    return x.expr;
}
