/* Expressions: what every input language is translated to. */
#include "grammar_impl.h"

#include "mem.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool tl_vec_grow(void *data_ptr, uint32_t n_used, uint32_t n_more, uint32_t *cap, size_t elem_bytes)
{
    uint64_t need = (uint64_t)n_used + n_more, next = *cap;
    void *p;

    if (need <= *cap)
        return true;
    next = next * 2 > need ? next * 2 : need + 8;
    if (next > INT32_MAX)
        return false;
    memcpy(&p, data_ptr, sizeof(p));
    p = tl_realloc(p, (size_t)next * elem_bytes);
    if (!p)
        return false;
    memcpy(data_ptr, &p, sizeof(p));
    *cap = (uint32_t)next;
    return true;
}

enum tl_status tl_draft_init(struct tl_draft *d, const struct tl_grammar_limits *limits, struct tl_error *err)
{
    memset(d, 0, sizeof(*d));
    d->limits = *limits;
    d->err = err;
    d->st_bad = TL_ERR_INVALID_GRAMMAR;
    if (!TL_VEC_ROOM(&d->exprs, 64) || !TL_VEC_ROOM(&d->kids, 64) || !TL_VEC_ROOM(&d->ranges, 16) ||
        !TL_VEC_ROOM(&d->words, 16) || !TL_VEC_ROOM(&d->bytes, 256)) {
        tl_draft_no_memory(d);
        return d->st;
    }
    d->exprs.at[d->exprs.n++] = (struct tl_expr){.kind = TL_EXPR_EMPTY};
    return TL_OK;
}

void tl_draft_clear(struct tl_draft *d)
{
    tl_free(d->exprs.at);
    tl_free(d->kids.at);
    tl_free(d->ranges.at);
    tl_free(d->words.at);
    tl_free(d->bytes.at);
    tl_free(d->rules.at);
    memset(d, 0, sizeof(*d));
}

void tl_draft_fail(struct tl_draft *d, enum tl_status st, const char *fmt, ...)
{
    char msg[sizeof(d->err->msg)];
    va_list ap;

    if (d->st != TL_OK)
        return;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof(msg), fmt, ap);
    va_end(ap);
    d->st = tl_fail(d->err, st, "%s", msg);
}

void tl_draft_no_memory(struct tl_draft *d)
{
    if (d->st == TL_OK)
        d->st = tl_fail(d->err, TL_ERR_NO_HOST_MEMORY, "the host has no memory left for the grammar");
}

static uint32_t add_expr(struct tl_draft *d, const struct tl_expr *x)
{
    if (d->st != TL_OK)
        return 0;
    /* An expression stands for a state at least, so one limit does for both. */
    if ((int64_t)d->exprs.n >= (int64_t)d->limits.states_max) {
        tl_draft_fail(d, d->st_bad, "the grammar has more than %d parts", d->limits.states_max);
        return 0;
    }
    if (!TL_VEC_ROOM(&d->exprs, 1)) {
        tl_draft_no_memory(d);
        return 0;
    }
    d->exprs.at[d->exprs.n] = *x;
    return d->exprs.n++;
}

static int by_lo(const void *a, const void *b)
{
    const struct tl_range *x = a, *y = b;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

uint32_t tl_ranges_tidy(struct tl_range *out, const struct tl_range *in, uint32_t n, bool negate)
{
    uint32_t k = 0, lo = 1; /* NUL is in no set: it has no place in a text */

    if (n)
        memmove(out, in, n * sizeof(*out));
    qsort(out, n, sizeof(*out), by_lo);
    for (uint32_t i = 0; i < n; i++) {
        if (out[i].lo > out[i].hi)
            continue;
        if (k > 0 && out[i].lo <= out[k - 1].hi + 1) {
            if (out[i].hi > out[k - 1].hi)
                out[k - 1].hi = out[i].hi;
        } else {
            out[k++] = out[i];
        }
    }
    if (!negate)
        return k;
    n = k;
    k = 0;
    for (uint32_t i = 0; i < n; i++) { /* in place: gap i lies before range i, so nothing unread is overwritten */
        struct tl_range r = out[i];
        if (r.lo > lo)
            out[k++] = (struct tl_range){lo, r.lo - 1};
        if (r.hi + 1 > lo)
            lo = r.hi + 1;
    }
    if (lo <= TL_UNICODE_MAX)
        out[k++] = (struct tl_range){lo, TL_UNICODE_MAX};
    return k;
}

uint32_t tl_draft_set(struct tl_draft *d, const struct tl_range *ranges, uint32_t n, bool negate)
{
    struct tl_expr x = {.kind = TL_EXPR_SET, .a = d->ranges.n};

    if (d->st != TL_OK)
        return 0;
    if (!TL_VEC_ROOM(&d->ranges, n + 1)) {
        tl_draft_no_memory(d);
        return 0;
    }
    x.n = tl_ranges_tidy(d->ranges.at + d->ranges.n, ranges, n, negate);
    d->ranges.n += x.n;
    return add_expr(d, &x);
}

static uint32_t add_bytes(struct tl_draft *d, const char *bytes, size_t n)
{
    uint32_t at = d->bytes.n;

    if (d->st != TL_OK)
        return 0;
    if (n > UINT32_MAX / 2 || !TL_VEC_ROOM(&d->bytes, (uint32_t)n + 1)) {
        tl_draft_no_memory(d);
        return 0;
    }
    if (n)
        memcpy(d->bytes.at + at, bytes, n);
    d->bytes.n += (uint32_t)n;
    return at;
}

void tl_draft_add_word(struct tl_draft *d, const char *bytes, size_t n)
{
    struct tl_word w = {add_bytes(d, bytes, n), (uint32_t)n};

    if (d->st != TL_OK)
        return;
    if (!TL_VEC_ROOM(&d->words, 1))
        tl_draft_no_memory(d);
    else
        d->words.at[d->words.n++] = w;
}

uint32_t tl_draft_words(struct tl_draft *d, uint32_t first_word)
{
    return add_expr(d, &(struct tl_expr){.kind = TL_EXPR_WORDS, .a = first_word, .n = d->words.n - first_word});
}

uint32_t tl_draft_literal(struct tl_draft *d, const char *bytes, size_t n)
{
    uint32_t first = d->words.n;

    if (n == 0)
        return 0;
    tl_draft_add_word(d, bytes, n);
    return tl_draft_words(d, first);
}

uint32_t tl_draft_text(struct tl_draft *d, const char *text) { return tl_draft_literal(d, text, strlen(text)); }

uint32_t tl_draft_cat(struct tl_draft *d, const uint32_t *kids, uint32_t n)
{
    uint32_t first = d->kids.n, k = 0, last = 0;

    if (d->st != TL_OK)
        return 0;
    if (!TL_VEC_ROOM(&d->kids, n + 1)) {
        tl_draft_no_memory(d);
        return 0;
    }
    for (uint32_t i = 0; i < n; i++)
        if (kids[i]) /* not the empty text */
            d->kids.at[first + k++] = last = kids[i];
    if (k < 2)
        return last;
    d->kids.n += k;
    return add_expr(d, &(struct tl_expr){.kind = TL_EXPR_CAT, .a = first, .n = k});
}

uint32_t tl_draft_alt(struct tl_draft *d, const uint32_t *kids, uint32_t n)
{
    struct tl_expr x = {.kind = TL_EXPR_ALT, .a = d->kids.n, .n = n};

    if (d->st != TL_OK || n == 1)
        return d->st == TL_OK ? kids[0] : 0;
    if (!TL_VEC_ROOM(&d->kids, n + 1)) {
        tl_draft_no_memory(d);
        return 0;
    }
    if (n)
        memcpy(d->kids.at + d->kids.n, kids, n * sizeof(*kids));
    d->kids.n += n;
    return add_expr(d, &x);
}

uint32_t tl_draft_repeat(struct tl_draft *d, uint32_t kid, int min, int max)
{
    int most = max < 0 ? min : max;

    if (most > d->limits.repeat_max) {
        tl_draft_fail(d, d->st_bad, "a repetition count is %d, the limit is %d", most, d->limits.repeat_max);
        return 0;
    }
    if (max == 0)
        return 0;
    return min == 1 && max == 1
               ? kid
               : add_expr(d, &(struct tl_expr){.kind = TL_EXPR_REPEAT, .a = kid, .min = min, .max = max});
}

uint32_t tl_draft_call(struct tl_draft *d, uint32_t rule)
{
    return add_expr(d, &(struct tl_expr){.kind = TL_EXPR_RULE, .a = rule});
}

uint32_t tl_draft_list(struct tl_draft *d, uint32_t sep, uint32_t tail, int tail_max, const uint32_t *pairs,
                       uint32_t n_members, bool may_be_empty)
{
    struct tl_expr x = {
        .kind = TL_EXPR_LIST, .a = d->kids.n, .n = n_members, .min = may_be_empty ? 0 : 1, .max = tail_max};

    if (d->st != TL_OK)
        return 0;
    if (tail_max > d->limits.repeat_max) {
        tl_draft_fail(d, d->st_bad, "a repetition count is %d, the limit is %d", tail_max, d->limits.repeat_max);
        return 0;
    }
    if (!TL_VEC_ROOM(&d->kids, 2 * n_members + 2)) {
        tl_draft_no_memory(d);
        return 0;
    }
    d->kids.at[d->kids.n++] = sep;
    d->kids.at[d->kids.n++] = tail;
    if (n_members)
        memcpy(d->kids.at + d->kids.n, pairs, 2 * n_members * sizeof(*pairs));
    d->kids.n += 2 * n_members;
    return add_expr(d, &x);
}

uint32_t tl_draft_rule(struct tl_draft *d, const char *name, size_t n_name)
{
    struct tl_draft_rule r = {.name = add_bytes(d, name, n_name), .n_name = (uint32_t)n_name};

    if (d->st != TL_OK)
        return 0;
    if ((int64_t)d->rules.n >= d->limits.rules_max) {
        tl_draft_fail(d, d->st_bad, "the grammar has more than %d rules", d->limits.rules_max);
        return 0;
    }
    if (!TL_VEC_ROOM(&d->rules, 1)) {
        tl_draft_no_memory(d);
        return 0;
    }
    d->rules.at[d->rules.n] = r;
    return d->rules.n++;
}

void tl_draft_define(struct tl_draft *d, uint32_t rule, uint32_t body)
{
    if (d->st != TL_OK)
        return;
    d->rules.at[rule].body = body;
    d->rules.at[rule].defined = true;
}

/* ---- UTF-8 --------------------------------------------------------------------------------------------------------- */

int tl_utf8_read(const char *p, const char *end, uint32_t *cp)
{
    const unsigned char *s = (const unsigned char *)p;
    unsigned c = s[0];
    int n = c < 0x80 ? 1 : c >= 0xC2 && c <= 0xDF ? 2 : c >= 0xE0 && c <= 0xEF ? 3 : c >= 0xF0 && c <= 0xF4 ? 4 : 0;
    uint32_t v = n == 1 ? c : c & (0x7Fu >> n);

    if (!n || end - p < n)
        return 0;
    for (int i = 1; i < n; i++) {
        if ((s[i] & 0xC0) != 0x80)
            return 0;
        v = v << 6 | (s[i] & 0x3Fu);
    }
    if ((n == 3 && v < 0x800) || (n == 4 && v < 0x10000) || v > TL_UNICODE_MAX || (v >= 0xD800 && v <= 0xDFFF))
        return 0;
    *cp = v;
    return n;
}

int tl_utf8_write(char out[4], uint32_t cp)
{
    int n = cp < 0x80 ? 1 : cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;

    if (n == 1) {
        out[0] = (char)cp;
        return 1;
    }
    for (int i = n - 1; i > 0; i--) {
        out[i] = (char)(0x80 | (cp & 0x3F));
        cp >>= 6;
    }
    out[0] = (char)((0xF00u >> n & 0xFF) | cp);
    return n;
}
