/* What a template may call, one table per kind. Each row says how many arguments it takes; the names of those that may be
 * given by keyword stand in order. */
#include "chat_template_impl.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "tokenizer_utf8.h"

typedef struct tl_ct_value value_fn(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a);

struct callable {
    const char *name;
    value_fn *fn;
    int min, max;
    const char *keywords[TL_CT_ARGS_MAX];
};

static struct tl_ct_value undefined(void) { return (struct tl_ct_value){.type = TL_CT_UNDEFINED}; }

/* Argument i (by position or keyword) moved to its place; whether all is as the row says. */
static bool arrange(struct tl_ct_run *r, const struct callable *c, const struct tl_ct_args *in, struct tl_ct_args *out)
{
    bool set[TL_CT_ARGS_MAX] = {false};
    *out = (struct tl_ct_args){.line = in->line};
    for (int i = 0; i < in->n; i++) {
        const struct tl_ct_node *n = in->node[i];
        int to = i;
        if (n->keyword)
            for (to = 0; to < c->max; to++)
                if (c->keywords[to] && strlen(c->keywords[to]) == n->keyword_bytes &&
                    memcmp(c->keywords[to], n->keyword, n->keyword_bytes) == 0)
                    break;
        if (to >= c->max || set[to]) {
            tl_ct_fail(r, in->line, "%s does not take these arguments", c->name);
            return false;
        }
        set[to] = true;
        out->v[to] = in->v[i];
        if (to + 1 > out->n)
            out->n = to + 1;
    }
    for (int i = 0; i < c->min; i++)
        if (!set[i]) {
            tl_ct_fail(r, in->line, "%s lacks an argument", c->name);
            return false;
        }
    return r->st == TL_OK;
}

/* v as a string; else an error that names the caller. */
static bool string(struct tl_ct_run *r, int line, const char *who, struct tl_ct_value v)
{
    if (v.type != TL_CT_STR)
        tl_ct_fail(r, line, "%s wants a string, not %s", who, tl_ct_type_name(v.type));
    return r->st == TL_OK;
}

/* ---- strings ------------------------------------------------------------------------------------------------------- */

static bool in_set(const struct tl_ct_value *set, const char *s, size_t n, int len)
{
    int l;
    if (!set)
        return tl_ct_is_space(tl_ct_get_char(s, n, &l));
    for (size_t i = 0; i < set->n; i += (size_t)l) {
        tl_ct_get_char(set->s + i, set->n - i, &l);
        if (l == len && memcmp(set->s + i, s, (size_t)l) == 0)
            return true;
    }
    return false;
}

static struct tl_ct_value strip_sides(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a, bool left,
                                      bool right, const char *who)
{
    const struct tl_ct_value *set = a->n > 0 && a->v[0].type != TL_CT_NONE ? &a->v[0] : NULL;
    size_t from = 0, to = v.n;
    int len;
    if (!string(r, a->line, who, v) || (set && !string(r, a->line, who, *set)))
        return undefined();
    while (left && from < to && tl_ct_step(r, 0)) {
        tl_ct_get_char(v.s + from, to - from, &len);
        if (!in_set(set, v.s + from, to - from, len))
            break;
        from += (size_t)len;
    }
    while (right && from < to && tl_ct_step(r, 0)) {
        size_t i = to - 1;
        while (i > from && ((unsigned char)v.s[i] & 0xC0) == 0x80)
            i--;
        tl_ct_get_char(v.s + i, to - i, &len);
        if (!in_set(set, v.s + i, to - i, len))
            break;
        to = i;
    }
    return tl_ct_part(v, from, to);
}

static struct tl_ct_value m_strip(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    return strip_sides(r, v, a, true, true, "strip");
}
static struct tl_ct_value m_lstrip(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    return strip_sides(r, v, a, true, false, "lstrip");
}
static struct tl_ct_value m_rstrip(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    return strip_sides(r, v, a, false, true, "rstrip");
}
static struct tl_ct_value f_trim(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    return strip_sides(r, tl_ct_to_str(r, a->line, v), a, true, true, "trim");
}

static struct tl_ct_value m_startswith(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    if (!string(r, a->line, "startswith", v) || !string(r, a->line, "startswith", a->v[0]))
        return undefined();
    return tl_ct_bool(v.n >= a->v[0].n && memcmp(v.s, a->v[0].s, a->v[0].n) == 0);
}
static struct tl_ct_value m_endswith(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    if (!string(r, a->line, "endswith", v) || !string(r, a->line, "endswith", a->v[0]))
        return undefined();
    return tl_ct_bool(v.n >= a->v[0].n && memcmp(v.s + v.n - a->v[0].n, a->v[0].s, a->v[0].n) == 0);
}

/* Byte offset of what in v from on; v.n + 1 if it is not there. */
static size_t find_from(struct tl_ct_run *r, struct tl_ct_value v, struct tl_ct_value what, size_t from)
{
    const char *hit = what.n <= v.n - from ? memmem(v.s + from, v.n - from, what.s, what.n) : NULL;
    tl_ct_step(r, hit ? (size_t)(hit - v.s - from) / 64 : (v.n - from) / 64);
    return hit ? (size_t)(hit - v.s) : v.n + 1;
}

/* Pieces between the separators, at most max + 1; without a separator between runs of blanks. */
static struct tl_ct_value split(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    bool blanks = a->n == 0 || a->v[0].type == TL_CT_NONE;
    int64_t max = a->n > 1 && a->v[1].type == TL_CT_INTEGER && a->v[1].i >= 0 ? a->v[1].i : INT64_MAX;
    struct tl_ct_value out = undefined();
    if (!string(r, a->line, "split", v) || (!blanks && !string(r, a->line, "split", a->v[0])))
        return out;
    if (!blanks && a->v[0].n == 0) {
        tl_ct_fail(r, a->line, "split wants a separator that is not empty");
        return out;
    }
    /* once to count, once to fill */
    for (int fill = 0; fill < 2 && r->st == TL_OK; fill++) {
        size_t n = 0, pos = 0;
        while (r->st == TL_OK) {
            size_t end = v.n, next = v.n + 1;
            int len;
            if (blanks) {
                while (pos < v.n && tl_ct_is_space(tl_ct_get_char(v.s + pos, v.n - pos, &len)) && tl_ct_step(r, 0))
                    pos += (size_t)len;
                if (pos >= v.n)
                    break;
                if ((int64_t)n < max) {
                    for (end = pos; end < v.n && !tl_ct_is_space(tl_ct_get_char(v.s + end, v.n - end, &len));
                         end += (size_t)len)
                        if (!tl_ct_step(r, 0))
                            break;
                    next = end < v.n ? end : v.n + 1;
                }
            } else if ((int64_t)n < max) {
                size_t hit = find_from(r, v, a->v[0], pos);
                if (hit <= v.n) {
                    end = hit;
                    next = hit + a->v[0].n;
                }
            }
            if (fill)
                out.items[n] = tl_ct_part(v, pos, end);
            n++;
            if (next > v.n)
                break;
            pos = next;
        }
        if (!fill)
            out = tl_ct_seq(r, n);
    }
    return out;
}

static struct tl_ct_value replace(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    struct tl_ct_value out = tl_ct_str("", 0, NULL), what = a->v[0], by = a->v[1];
    int64_t left = a->n > 2 && a->v[2].type == TL_CT_INTEGER && a->v[2].i >= 0 ? a->v[2].i : INT64_MAX;
    size_t pos = 0, hits = 0, total, at = 0;
    if (!string(r, a->line, "replace", v) || !string(r, a->line, "replace", what) || !string(r, a->line, "replace", by))
        return undefined();
    if (what.n == 0) {
        tl_ct_fail(r, a->line, "replace wants a text to look for that is not empty");
        return undefined();
    }
    for (size_t hit; (int64_t)hits < left && (hit = find_from(r, v, what, pos)) <= v.n && r->st == TL_OK;
         pos = hit + what.n)
        hits++;
    if (hits == 0)
        return v;
    if (by.n > what.n && (by.n - what.n) > TL_CHAT_MEMORY_MAX / hits)
        total = (size_t)TL_CHAT_MEMORY_MAX + 1;
    else
        total = v.n - hits * what.n + hits * by.n;
    char *s = tl_ct_alloc(r, total + 1);
    unsigned char *plain = s ? tl_ct_alloc(r, total + 1) : NULL;
    if (!plain)
        return undefined();
    out = tl_ct_str(s, total, plain);
    pos = 0;
    for (; hits > 0 && tl_ct_step(r, 0); hits--) {
        size_t hit = find_from(r, v, what, pos), n = hit - pos;
        memcpy(s + at, v.s + pos, n);
        if (v.plain)
            memcpy(plain + at, v.plain + pos, n);
        memcpy(s + at + n, by.s, by.n);
        if (by.plain)
            memcpy(plain + at + n, by.plain, by.n);
        at += n + by.n;
        pos = hit + what.n;
    }
    if (r->st != TL_OK)
        return undefined();
    memcpy(s + at, v.s + pos, v.n - pos);
    if (v.plain)
        memcpy(plain + at, v.plain + pos, v.n - pos);
    return out;
}

/* How: 'u' upper, 'l' lower, 'c' first upper and the rest lower. Character by character. */
static struct tl_ct_value change_case(struct tl_ct_run *r, struct tl_ct_value v, int line, char how)
{
    v = tl_ct_to_str(r, line, v);
    char *s = tl_ct_alloc(r, v.n * 2 + 4);
    unsigned char *plain = v.plain && s ? tl_ct_alloc(r, v.n * 2 + 4) : NULL;
    size_t n = 0;
    int len;
    if (r->st != TL_OK || !tl_ct_step(r, v.n / 16))
        return undefined();
    for (size_t i = 0; i < v.n; i += (size_t)len) {
        utf8proc_int32_t cp = (utf8proc_int32_t)tl_ct_get_char(v.s + i, v.n - i, &len);
        bool up = how == 'u' || (how == 'c' && i == 0);
        int put = tl_utf8_put((uint32_t)(up ? utf8proc_toupper(cp) : utf8proc_tolower(cp)), s + n);
        if (plain)
            memset(plain + n, v.plain[i], (size_t)put);
        n += (size_t)put;
    }
    return tl_ct_str(s, n, plain);
}

static struct tl_ct_value upper(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    return change_case(r, v, a->line, 'u');
}
static struct tl_ct_value lower(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    return change_case(r, v, a->line, 'l');
}
static struct tl_ct_value capitalize(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    return change_case(r, v, a->line, 'c');
}

static struct tl_ct_value m_find(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    if (!string(r, a->line, "find", v) || !string(r, a->line, "find", a->v[0]))
        return undefined();
    size_t hit = find_from(r, v, a->v[0], 0);
    return tl_ct_int(hit > v.n ? -1 : (int64_t)tl_ct_chars(tl_ct_part(v, 0, hit)));
}

static struct tl_ct_value join_items(struct tl_ct_run *r, int line, struct tl_ct_value over, struct tl_ct_value by)
{
    struct tl_ct_value list = tl_ct_items(r, line, over), out;
    size_t total = 0, at = 0;
    for (size_t i = 0; i < list.n && tl_ct_step(r, 0); i++)
        total += tl_ct_to_str(r, line, list.items[i]).n + (i ? by.n : 0);
    char *s = tl_ct_alloc(r, total + 1);
    unsigned char *plain = s ? tl_ct_alloc(r, total + 1) : NULL;
    if (!plain)
        return undefined();
    out = tl_ct_str(s, total, plain);
    for (size_t i = 0; i < list.n; i++)
        for (int k = i ? 0 : 1; k < 2; k++) {
            struct tl_ct_value part = k ? tl_ct_to_str(r, line, list.items[i]) : by;
            if (r->st != TL_OK)
                return undefined();
            memcpy(s + at, part.s, part.n);
            if (part.plain)
                memcpy(plain + at, part.plain, part.n);
            at += part.n;
        }
    return out;
}

static struct tl_ct_value m_join(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    return string(r, a->line, "join", v) ? join_items(r, a->line, a->v[0], v) : undefined();
}
static struct tl_ct_value f_join(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    return join_items(r, a->line, v, a->n > 0 ? tl_ct_to_str(r, a->line, a->v[0]) : tl_ct_str("", 0, NULL));
}

/* ---- dicts --------------------------------------------------------------------------------------------------------- */

static bool dict(struct tl_ct_run *r, int line, const char *who, struct tl_ct_value v)
{
    if (v.type != TL_CT_MAP)
        tl_ct_fail(r, line, "%s wants a dict, not %s", who, tl_ct_type_name(v.type));
    return r->st == TL_OK;
}

static struct tl_ct_value pairs(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    if (v.type == TL_CT_UNDEFINED)
        return tl_ct_seq(r, 0);
    if (!dict(r, a->line, "items", v))
        return undefined();
    struct tl_ct_value out = tl_ct_seq(r, v.map->n);
    for (size_t i = 0; out.type == TL_CT_SEQ && i < v.map->n && tl_ct_step(r, 0); i++) {
        out.items[i] = tl_ct_seq(r, 2);
        if (out.items[i].type != TL_CT_SEQ)
            return undefined();
        out.items[i].items[0] = v.map->keys[i];
        out.items[i].items[1] = v.map->values[i];
    }
    return out;
}
static struct tl_ct_value m_keys(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    return dict(r, a->line, "keys", v) ? tl_ct_items(r, a->line, v) : undefined();
}
static struct tl_ct_value m_values(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    if (!dict(r, a->line, "values", v))
        return undefined();
    struct tl_ct_value out = tl_ct_seq(r, v.map->n);
    if (out.type == TL_CT_SEQ && v.map->n)
        memcpy(out.items, v.map->values, v.map->n * sizeof(*out.items));
    return out;
}
static struct tl_ct_value m_get(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    if (!dict(r, a->line, "get", v) || !string(r, a->line, "get", a->v[0]))
        return undefined();
    const struct tl_ct_value *found = tl_ct_map_get(r, v.map, a->v[0].s, a->v[0].n);
    return found ? *found : a->n > 1 ? a->v[1] : (struct tl_ct_value){.type = TL_CT_NONE};
}

/* ---- filters ------------------------------------------------------------------------------------------------------- */

static struct tl_ct_value f_length(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    switch (v.type) {
    case TL_CT_STR: return tl_ct_int(tl_ct_step(r, v.n / 64) ? (int64_t)tl_ct_chars(v) : 0);
    case TL_CT_SEQ: return tl_ct_int((int64_t)v.n);
    case TL_CT_MAP: return tl_ct_int((int64_t)v.map->n);
    case TL_CT_UNDEFINED: return tl_ct_int(0);
    default: tl_ct_fail(r, a->line, "length wants a string, a list or a dict, not %s", tl_ct_type_name(v.type));
    }
    return undefined();
}
static struct tl_ct_value f_default(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    bool falsy = a->n > 1 && tl_ct_truth(a->v[1]);
    (void)r;
    if (v.type != TL_CT_UNDEFINED && !(falsy && !tl_ct_truth(v)))
        return v;
    return a->n > 0 ? a->v[0] : tl_ct_str("", 0, NULL);
}
static struct tl_ct_value f_tojson(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    int64_t indent = -1;
    if (a->n > 0 && a->v[0].type == TL_CT_INTEGER)
        indent = a->v[0].i;
    else if (a->n > 0 && a->v[0].type != TL_CT_NONE && a->v[0].type != TL_CT_UNDEFINED)
        tl_ct_fail(r, a->line, "tojson wants a whole number as indent");
    if (a->n > 1 && tl_ct_truth(a->v[1]))
        tl_ct_fail(r, a->line, "tojson cannot write ASCII alone");
    return tl_ct_to_json(r, a->line, v, (int)(indent > 16 ? 16 : indent));
}
static struct tl_ct_value f_string(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    return tl_ct_to_str(r, a->line, v);
}
static struct tl_ct_value f_safe(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    (void)r;
    (void)a;
    return v;
}
static struct tl_ct_value f_list(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    return tl_ct_items(r, a->line, v);
}
static struct tl_ct_value f_first(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    struct tl_ct_value list = tl_ct_items(r, a->line, v);
    return list.n > 0 && r->st == TL_OK ? list.items[0] : undefined();
}
static struct tl_ct_value f_last(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    struct tl_ct_value list = tl_ct_items(r, a->line, v);
    return list.n > 0 && r->st == TL_OK ? list.items[list.n - 1] : undefined();
}
static struct tl_ct_value f_int(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    struct tl_ct_value s =
        v.type == TL_CT_STR ? strip_sides(r, v, &(struct tl_ct_args){.line = a->line}, true, true, "int") : v;
    int64_t i = 0;
    size_t k = 0;
    if (v.type == TL_CT_INTEGER || v.type == TL_CT_BOOL)
        return tl_ct_int(v.type == TL_CT_BOOL ? v.b : v.i);
    if (v.type == TL_CT_FRACTION && v.f > -9e15 && v.f < 9e15)
        return tl_ct_int((int64_t)v.f);
    if (v.type == TL_CT_STR && s.n > 0 && s.n < 18) {
        bool minus = s.s[0] == '-';
        for (k = minus || s.s[0] == '+'; k < s.n && s.s[k] >= '0' && s.s[k] <= '9'; k++)
            i = i * 10 + (s.s[k] - '0');
        if (k == s.n && s.s[k - 1] >= '0')
            return tl_ct_int(minus ? -i : i);
    }
    return a->n > 0 ? a->v[0] : tl_ct_int(0);
}
static struct tl_ct_value f_reverse(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    struct tl_ct_value list = tl_ct_items(r, a->line, v), out = tl_ct_seq(r, list.n);
    if (v.type == TL_CT_STR)
        tl_ct_fail(r, a->line, "reverse is for lists here");
    for (size_t i = 0; out.type == TL_CT_SEQ && i < list.n && tl_ct_step(r, 0); i++)
        out.items[i] = list.items[list.n - 1 - i];
    return out;
}

/* Items for which the named test says keep. */
static struct tl_ct_value pick(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a, bool keep)
{
    struct tl_ct_value list = tl_ct_items(r, a->line, v), out = tl_ct_seq(r, list.n);
    struct tl_ct_args rest = {.line = a->line, .n = a->n > 1 ? 1 : 0, .v = {a->v[1]}};
    static const struct tl_ct_node by_position = {.keyword = NULL};
    int which;
    rest.node[0] = &by_position;
    if (!string(r, a->line, "select", a->v[0]) || out.type != TL_CT_SEQ)
        return undefined();
    which = tl_ct_find_test(a->v[0].s, a->v[0].n);
    if (which < 0)
        tl_ct_fail(r, a->line, "the test '%.*s' is not supported", TL_CT_SHOWN(a->v[0].n), a->v[0].s);
    out.n = 0;
    for (size_t i = 0; r->st == TL_OK && i < list.n && tl_ct_step(r, 0); i++)
        if (tl_ct_test(r, which, list.items[i], &rest) == keep)
            out.items[out.n++] = list.items[i];
    return out;
}
static struct tl_ct_value f_select(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    return pick(r, v, a, true);
}
static struct tl_ct_value f_reject(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    return pick(r, v, a, false);
}
static struct tl_ct_value f_replace(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    return replace(r, tl_ct_to_str(r, a->line, v), a);
}

static const struct callable filters[] = {
    {"trim", f_trim, 0, 1, {"chars"}},
    {"tojson", f_tojson, 0, 2, {"indent", "ensure_ascii"}},
    {"length", f_length, 0, 0, {NULL}},
    {"count", f_length, 0, 0, {NULL}},
    {"default", f_default, 0, 2, {"default_value", "boolean"}},
    {"d", f_default, 0, 2, {"default_value", "boolean"}},
    {"upper", upper, 0, 0, {NULL}},
    {"lower", lower, 0, 0, {NULL}},
    {"capitalize", capitalize, 0, 0, {NULL}},
    {"string", f_string, 0, 0, {NULL}},
    {"safe", f_safe, 0, 0, {NULL}},
    {"list", f_list, 0, 0, {NULL}},
    {"first", f_first, 0, 0, {NULL}},
    {"last", f_last, 0, 0, {NULL}},
    {"int", f_int, 0, 1, {"default"}},
    {"join", f_join, 0, 1, {"d"}},
    {"items", pairs, 0, 0, {NULL}},
    {"replace", f_replace, 2, 3, {"old", "new", "count"}},
    {"reverse", f_reverse, 0, 0, {NULL}},
    {"select", f_select, 1, 2, {NULL}},
    {"reject", f_reject, 1, 2, {NULL}},
};

static const struct callable methods[] = {
    {"strip", m_strip, 0, 1, {NULL}},       {"lstrip", m_lstrip, 0, 1, {NULL}},
    {"rstrip", m_rstrip, 0, 1, {NULL}},     {"startswith", m_startswith, 1, 1, {NULL}},
    {"endswith", m_endswith, 1, 1, {NULL}}, {"split", split, 0, 2, {"sep", "maxsplit"}},
    {"replace", replace, 2, 3, {NULL}},     {"upper", upper, 0, 0, {NULL}},
    {"lower", lower, 0, 0, {NULL}},         {"capitalize", capitalize, 0, 0, {NULL}},
    {"find", m_find, 1, 1, {NULL}},         {"join", m_join, 1, 1, {NULL}},
    {"items", pairs, 0, 0, {NULL}},         {"keys", m_keys, 0, 0, {NULL}},
    {"values", m_values, 0, 0, {NULL}},     {"get", m_get, 1, 2, {NULL}},
};

/* ---- tests --------------------------------------------------------------------------------------------------------- */

enum test_name {
    T_DEFINED,
    T_UNDEFINED,
    T_NONE,
    T_STRING,
    T_NUMBER,
    T_INTEGER,
    T_FLOAT,
    T_BOOLEAN,
    T_TRUE,
    T_FALSE,
    T_MAPPING,
    T_SEQUENCE,
    T_ITERABLE,
    T_EQUAL,
    T_UNEQUAL,
    T_IN,
    T_ODD,
    T_EVEN
};
static const struct {
    const char *name;
    enum test_name test;
    int n_args;
} tests[] = {
    {"defined", T_DEFINED, 0},
    {"undefined", T_UNDEFINED, 0},
    {"none", T_NONE, 0},
    {"string", T_STRING, 0},
    {"number", T_NUMBER, 0},
    {"integer", T_INTEGER, 0},
    {"float", T_FLOAT, 0},
    {"boolean", T_BOOLEAN, 0},
    {"true", T_TRUE, 0},
    {"false", T_FALSE, 0},
    {"mapping", T_MAPPING, 0},
    {"sequence", T_SEQUENCE, 0},
    {"iterable", T_ITERABLE, 0},
    {"equalto", T_EQUAL, 1},
    {"eq", T_EQUAL, 1},
    {"ne", T_UNEQUAL, 1},
    {"in", T_IN, 1},
    {"odd", T_ODD, 0},
    {"even", T_EVEN, 0},
};

bool tl_ct_contains(struct tl_ct_run *r, int line, struct tl_ct_value what, struct tl_ct_value in)
{
    if (in.type == TL_CT_STR)
        return string(r, line, "in", what) && find_from(r, in, what, 0) <= in.n;
    if (in.type == TL_CT_MAP && (what.type == TL_CT_SEQ || what.type == TL_CT_MAP))
        tl_ct_fail(r, line, "%s cannot be a key", tl_ct_type_name(what.type));
    if (in.type == TL_CT_MAP)
        return what.type == TL_CT_STR && tl_ct_map_get(r, in.map, what.s, what.n) != NULL;
    struct tl_ct_value list = tl_ct_items(r, line, in);
    for (size_t i = 0; r->st == TL_OK && i < list.n && tl_ct_step(r, 0); i++)
        if (tl_ct_equal(r, list.items[i], what))
            return true;
    return false;
}

bool tl_ct_test(struct tl_ct_run *r, int which, struct tl_ct_value v, const struct tl_ct_args *a)
{
    if (a->n != tests[which].n_args) {
        tl_ct_fail(r, a->line, "the test '%s' does not take these arguments", tests[which].name);
        return false;
    }
    switch (tests[which].test) {
    case T_DEFINED: return v.type != TL_CT_UNDEFINED;
    case T_UNDEFINED: return v.type == TL_CT_UNDEFINED;
    case T_NONE: return v.type == TL_CT_NONE;
    case T_STRING: return v.type == TL_CT_STR;
    case T_NUMBER: return v.type == TL_CT_INTEGER || v.type == TL_CT_FRACTION || v.type == TL_CT_BOOL;
    case T_INTEGER: return v.type == TL_CT_INTEGER;
    case T_FLOAT: return v.type == TL_CT_FRACTION;
    case T_BOOLEAN: return v.type == TL_CT_BOOL;
    case T_TRUE: return v.type == TL_CT_BOOL && v.b;
    case T_FALSE: return v.type == TL_CT_BOOL && !v.b;
    case T_MAPPING: return v.type == TL_CT_MAP;
    case T_SEQUENCE:
    case T_ITERABLE:
        return v.type == TL_CT_STR || v.type == TL_CT_SEQ || v.type == TL_CT_MAP || v.type == TL_CT_UNDEFINED;
    case T_EQUAL: return tl_ct_equal(r, v, a->v[0]);
    case T_UNEQUAL: return !tl_ct_equal(r, v, a->v[0]);
    case T_IN: return tl_ct_contains(r, a->line, v, a->v[0]);
    case T_ODD:
    case T_EVEN:
        if (v.type != TL_CT_INTEGER)
            tl_ct_fail(r, a->line, "odd and even want a whole number");
        return v.type == TL_CT_INTEGER && (v.i % 2 != 0) == (tests[which].test == T_ODD);
    }
    return false;
}

/* ---- functions ----------------------------------------------------------------------------------------------------- */

static struct tl_ct_value raise(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    struct tl_ct_value s = tl_ct_to_str(r, a->line, a->v[0]);
    (void)v;
    if (r->st == TL_OK)
        r->st = tl_fail(r->err, TL_ERR_BAD_PARAM, "the chat template refuses this conversation: %.*s",
                        (int)(s.n < 200 ? s.n : 200), s.s);
    return undefined();
}

static struct tl_ct_value range(struct tl_ct_run *r, struct tl_ct_value v, const struct tl_ct_args *a)
{
    int64_t from = a->n > 1 ? a->v[0].i : 0, to = a->n > 1 ? a->v[1].i : a->v[0].i, step = a->n > 2 ? a->v[2].i : 1,
            n = 0;
    (void)v;
    for (int i = 0; i < a->n; i++)
        if (a->v[i].type != TL_CT_INTEGER || a->v[i].i > 1000000 || a->v[i].i < -1000000 ||
            (i == 2 && a->v[i].i == 0)) {
            tl_ct_fail(r, a->line, "range wants whole numbers of at most a million");
            return undefined();
        }
    if (step > 0 && to > from)
        n = (to - from + step - 1) / step;
    if (step < 0 && to < from)
        n = (from - to - step - 1) / -step;
    struct tl_ct_value out = tl_ct_seq(r, (size_t)n);
    for (int64_t i = 0; out.type == TL_CT_SEQ && i < n && tl_ct_step(r, 0); i++)
        out.items[i] = tl_ct_int(from + i * step);
    return out;
}

/* namespace takes any names: chat_template_run.c makes it. */
static const struct callable functions[] = {
    {"namespace", NULL, 0, 0, {NULL}},
    {"raise_exception", raise, 1, 1, {"message"}},
    {"range", range, 1, 3, {NULL}},
    {"strftime_now", NULL, 0, 0, {NULL}}, /* may stand in a branch that asks first whether it is defined */
};

/* ---- finding and calling ------------------------------------------------------------------------------------------- */

#define FIND(table, s, n)                                                                                              \
    for (size_t i = 0; i < sizeof(table) / sizeof((table)[0]); i++)                                                    \
        if (strlen((table)[i].name) == (n) && memcmp((table)[i].name, (s), (n)) == 0)                                  \
            return (int)i;                                                                                             \
    return -1

int tl_ct_find_filter(const char *s, size_t n) { FIND(filters, s, n); }
int tl_ct_find_method(const char *s, size_t n) { FIND(methods, s, n); }
int tl_ct_find_test(const char *s, size_t n) { FIND(tests, s, n); }
int tl_ct_find_function(const char *s, size_t n) { FIND(functions, s, n); }

static struct tl_ct_value call(struct tl_ct_run *r, const struct callable *c, struct tl_ct_value v,
                               const struct tl_ct_args *a)
{
    struct tl_ct_args args;
    return arrange(r, c, a, &args) ? c->fn(r, v, &args) : undefined();
}

struct tl_ct_value tl_ct_filter(struct tl_ct_run *r, int which, struct tl_ct_value v, const struct tl_ct_args *a)
{
    return call(r, &filters[which], v, a);
}

struct tl_ct_value tl_ct_method(struct tl_ct_run *r, int which, struct tl_ct_value v, const struct tl_ct_args *a)
{
    if (v.type != TL_CT_STR && v.type != TL_CT_MAP)
        tl_ct_fail(r, a->line, "%s is called on %s", methods[which].name, tl_ct_type_name(v.type));
    return r->st == TL_OK ? call(r, &methods[which], v, a) : undefined();
}

struct tl_ct_value tl_ct_function(struct tl_ct_run *r, int which, const struct tl_ct_args *a)
{
    if (functions[which].fn)
        return call(r, &functions[which], undefined(), a);
    tl_ct_fail(r, a->line, "%s is not defined", functions[which].name);
    return undefined();
}
