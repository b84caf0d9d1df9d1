#include "chat_template_impl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mem.h"
#include "tokenizer_json.h"
#include "tokenizer_utf8.h"

/* ---- memory of a run: nothing is given back before its end --------------------------------------------------------- */

#define CHUNK_BYTES 16384

struct tl_ct_chunk {
    struct tl_ct_chunk *next;
    size_t used, cap;
    _Alignas(16) char data[];
};

void *tl_ct_alloc(struct tl_ct_run *r, size_t bytes)
{
    struct tl_ct_chunk *c = r->chunks;
    bytes = (bytes + 15) & ~(size_t)15;
    if (r->st != TL_OK)
        return NULL;
    if (bytes > TL_CHAT_MEMORY_MAX || r->memory + bytes > TL_CHAT_MEMORY_MAX) {
        r->st = tl_fail(r->err, TL_ERR_OUT_OF_RANGE, "the chat template needs more than %u bytes for this conversation",
                        TL_CHAT_MEMORY_MAX);
        return NULL;
    }
    if (!c || c->cap - c->used < bytes) {
        size_t cap = bytes > CHUNK_BYTES ? bytes : CHUNK_BYTES;
        c = tl_malloc(sizeof(*c) + cap);
        if (!c) {
            r->st = tl_fail_host_memory(r->err, sizeof(*c) + cap);
            return NULL;
        }
        c->used = 0;
        c->cap = cap;
        c->next = r->chunks;
        r->chunks = c;
    }
    char *p = c->data + c->used;
    c->used += bytes;
    r->memory += bytes;
    return memset(p, 0, bytes);
}

void tl_ct_release(struct tl_ct_run *r)
{
    while (r->chunks) {
        struct tl_ct_chunk *next = r->chunks->next;
        tl_free(r->chunks);
        r->chunks = next;
    }
}

bool tl_ct_step(struct tl_ct_run *r, size_t cost)
{
    r->steps += 1 + (int64_t)cost;
    if (r->st == TL_OK && r->steps > TL_CHAT_STEPS_MAX)
        r->st = tl_fail(r->err, TL_ERR_OUT_OF_RANGE, "the chat template takes more than %d steps for this conversation",
                        TL_CHAT_STEPS_MAX);
    return r->st == TL_OK;
}

void tl_ct_fail(struct tl_ct_run *r, int line, const char *fmt, ...)
{
    char text[200];
    va_list ap;
    if (r->st != TL_OK)
        return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    r->st = tl_fail(r->err, TL_ERR_BAD_PARAM, "line %d of the chat template: %s", line, text);
}

/* ---- making values ------------------------------------------------------------------------------------------------- */

struct tl_ct_value tl_ct_str(const char *s, size_t n, const unsigned char *plain)
{
    return (struct tl_ct_value){.type = TL_CT_STR, .n = n, .s = s ? s : "", .plain = plain};
}

struct tl_ct_value tl_ct_int(int64_t i) { return (struct tl_ct_value){.type = TL_CT_INTEGER, .i = i}; }
struct tl_ct_value tl_ct_bool(bool b) { return (struct tl_ct_value){.type = TL_CT_BOOL, .b = b}; }

struct tl_ct_value tl_ct_seq(struct tl_ct_run *r, size_t n)
{
    struct tl_ct_value v = {.type = TL_CT_SEQ, .n = n};
    if (n > TL_CHAT_MEMORY_MAX / sizeof(*v.items))
        n = TL_CHAT_MEMORY_MAX;
    v.items = tl_ct_alloc(r, (n ? n : 1) * sizeof(*v.items));
    return v.items ? v : (struct tl_ct_value){.type = TL_CT_UNDEFINED};
}

struct tl_ct_value tl_ct_new_map(struct tl_ct_run *r, enum tl_ct_type type)
{
    struct tl_ct_value v = {.type = type};
    v.map = tl_ct_alloc(r, sizeof(*v.map));
    return v.map ? v : (struct tl_ct_value){.type = TL_CT_UNDEFINED};
}

const struct tl_ct_value *tl_ct_map_get(struct tl_ct_run *r, const struct tl_ct_map *m, const char *key, size_t n)
{
    for (size_t i = 0; i < m->n && tl_ct_step(r, 0); i++)
        if (m->keys[i].n == n && memcmp(m->keys[i].s, key, n) == 0)
            return &m->values[i];
    return NULL;
}

void tl_ct_map_set(struct tl_ct_run *r, struct tl_ct_map *m, struct tl_ct_value key, struct tl_ct_value v)
{
    const struct tl_ct_value *old = tl_ct_map_get(r, m, key.s, key.n);
    if (r->st != TL_OK)
        return;
    if (old) {
        m->values[old - m->values] = v;
        return;
    }
    if (m->n == m->cap) {
        size_t cap = m->cap ? m->cap * 2 : 8;
        struct tl_ct_value *keys = tl_ct_alloc(r, cap * sizeof(*keys)), *values = tl_ct_alloc(r, cap * sizeof(*values));
        if (!keys || !values)
            return;
        if (m->n > 0) {
            memcpy(keys, m->keys, m->n * sizeof(*keys));
            memcpy(values, m->values, m->n * sizeof(*values));
        }
        m->keys = keys;
        m->values = values;
        m->cap = cap;
    }
    m->keys[m->n] = key;
    m->values[m->n++] = v;
}

struct tl_ct_value tl_ct_part(struct tl_ct_value s, size_t from, size_t to)
{
    if (to > s.n)
        to = s.n;
    if (from > to)
        from = to;
    return tl_ct_str(s.s + from, to - from, s.plain ? s.plain + from : NULL);
}

struct tl_ct_value tl_ct_concat(struct tl_ct_run *r, struct tl_ct_value a, struct tl_ct_value b)
{
    size_t n = a.n + b.n;
    unsigned char *plain = NULL;
    if (a.n == 0 || b.n == 0)
        return a.n ? a : b;
    char *s = tl_ct_alloc(r, n);
    if (s && (a.plain || b.plain))
        plain = tl_ct_alloc(r, n);
    if (r->st != TL_OK || !tl_ct_step(r, n / 64))
        return tl_ct_str("", 0, NULL);
    memcpy(s, a.s, a.n);
    memcpy(s + a.n, b.s, b.n);
    if (a.plain)
        memcpy(plain, a.plain, a.n);
    if (b.plain)
        memcpy(plain + a.n, b.plain, b.n);
    return tl_ct_str(s, n, plain);
}

/* ---- questions ----------------------------------------------------------------------------------------------------- */

const char *tl_ct_type_name(enum tl_ct_type t)
{
    static const char *const names[] = {"an undefined value", "none",   "true or false", "a whole number", "a fraction",
                                        "a string",           "a list", "a dict",        "a namespace"};
    return names[t];
}

bool tl_ct_truth(struct tl_ct_value v)
{
    switch (v.type) {
    case TL_CT_UNDEFINED:
    case TL_CT_NONE: return false;
    case TL_CT_BOOL: return v.b;
    case TL_CT_INTEGER: return v.i != 0;
    case TL_CT_FRACTION: return v.f != 0;
    case TL_CT_STR:
    case TL_CT_SEQ: return v.n > 0;
    case TL_CT_MAP: return v.map->n > 0;
    case TL_CT_SPACE: return true;
    }
    return false;
}

static double as_double(struct tl_ct_value v)
{
    return v.type == TL_CT_FRACTION ? v.f : v.type == TL_CT_BOOL ? v.b : (double)v.i;
}

static bool equal_depth(struct tl_ct_run *r, struct tl_ct_value a, struct tl_ct_value b, int depth)
{
    bool na = a.type >= TL_CT_BOOL && a.type <= TL_CT_FRACTION, nb = b.type >= TL_CT_BOOL && b.type <= TL_CT_FRACTION;
    if (na && nb)
        return a.type == TL_CT_INTEGER && b.type == TL_CT_INTEGER ? a.i == b.i : as_double(a) == as_double(b);
    if (a.type != b.type || depth > TL_CT_DEPTH_MAX)
        return false;
    switch (a.type) {
    case TL_CT_STR: return a.n == b.n && tl_ct_step(r, a.n / 64) && memcmp(a.s, b.s, a.n) == 0;
    case TL_CT_SEQ:
        for (size_t i = 0; i < a.n && a.n == b.n && tl_ct_step(r, 0); i++)
            if (!equal_depth(r, a.items[i], b.items[i], depth + 1))
                return false;
        return a.n == b.n;
    case TL_CT_MAP:
        if (a.map->n != b.map->n)
            return false;
        for (size_t i = 0; i < a.map->n; i++) {
            const struct tl_ct_value *other = tl_ct_map_get(r, b.map, a.map->keys[i].s, a.map->keys[i].n);
            if (!other || !equal_depth(r, a.map->values[i], *other, depth + 1))
                return false;
        }
        return true;
    case TL_CT_SPACE: return a.map == b.map;
    default: return true; /* none, undefined */
    }
}

bool tl_ct_equal(struct tl_ct_run *r, struct tl_ct_value a, struct tl_ct_value b) { return equal_depth(r, a, b, 0); }

uint32_t tl_ct_get_char(const char *s, size_t n, int *len)
{
    size_t have = n < 4 ? n : 4;
    *len = 1;
    for (size_t i = 1; i <= have; i++)
        if (tl_utf8_valid(s, i) == i)
            return tl_utf8_get(s, len);
    return 0xFFFD;
}

size_t tl_ct_chars(struct tl_ct_value s)
{
    size_t c = 0;
    for (size_t i = 0; i < s.n; i++)
        c += ((unsigned char)s.s[i] & 0xC0) != 0x80;
    return c;
}

size_t tl_ct_char_at(struct tl_ct_value s, size_t chars)
{
    size_t i = 0;
    while (i < s.n) {
        if (((unsigned char)s.s[i] & 0xC0) != 0x80 && chars-- == 0)
            break;
        i++;
    }
    return i;
}

bool tl_ct_is_space(uint32_t cp)
{
    return (cp >= 9 && cp <= 13) || (cp >= 28 && cp <= 32) || cp == 0x85 || (cp > 0x85 && tl_unicode_is_space(cp));
}

/* ---- text ---------------------------------------------------------------------------------------------------------- */

/* The shortest decimal that reads back as f, as Python prints it. */
static int print_fraction(char out[40], double f)
{
    char text[40];
    int precision = 1, e;
    if (f != f || f - f != 0)
        return snprintf(out, 40, "%s", f != f ? "nan" : f > 0 ? "inf" : "-inf");
    for (; precision < 17; precision++) {
        snprintf(text, sizeof(text), "%.*e", precision - 1, f);
        if (strtod(text, NULL) == f)
            break;
    }
    snprintf(text, sizeof(text), "%.*e", precision - 1, f);
    e = atoi(strchr(text, 'e') + 1);
    if (e >= -4 && e < 16)
        return snprintf(out, 40, "%.*f", precision - 1 - e > 1 ? precision - 1 - e : 1, f);
    return snprintf(out, 40, "%s", text);
}

static struct tl_ct_value copy(struct tl_ct_run *r, const char *s, size_t n)
{
    char *p = tl_ct_alloc(r, n + 1);
    return p ? tl_ct_str(memcpy(p, s, n), n, NULL) : tl_ct_str("", 0, NULL);
}

struct tl_ct_value tl_ct_to_str(struct tl_ct_run *r, int line, struct tl_ct_value v)
{
    char text[40];
    switch (v.type) {
    case TL_CT_STR: return v;
    case TL_CT_UNDEFINED: return tl_ct_str("", 0, NULL);
    case TL_CT_NONE: return tl_ct_str("None", 4, NULL);
    case TL_CT_BOOL: return v.b ? tl_ct_str("True", 4, NULL) : tl_ct_str("False", 5, NULL);
    case TL_CT_INTEGER: return copy(r, text, (size_t)snprintf(text, sizeof(text), "%lld", (long long)v.i));
    case TL_CT_FRACTION: return copy(r, text, (size_t)print_fraction(text, v.f));
    default: tl_ct_fail(r, line, "%s cannot be written as text (tojson can)", tl_ct_type_name(v.type));
    }
    return tl_ct_str("", 0, NULL);
}

struct writer {
    struct tl_ct_run *r;
    int line, indent;
    char *s; /* in the run's memory: doubles, the old one stays behind */
    size_t n, cap;
};

static void put(struct writer *w, const char *s, size_t n)
{
    if (w->cap - w->n < n) {
        size_t cap = w->cap * 2 + n + 64;
        char *p = tl_ct_alloc(w->r, cap);
        if (!p)
            return;
        if (w->n)
            memcpy(p, w->s, w->n);
        w->s = p;
        w->cap = cap;
    }
    memcpy(w->s + w->n, s, n);
    w->n += n;
}

static void put_string(struct writer *w, const char *s, size_t n)
{
    put(w, "\"", 1);
    for (size_t i = 0, from = 0; i <= n; i++) {
        static const char special[] = "\"\\\n\r\t\b\f", as[] = "\"\\nrtbf";
        char text[8] = "\\";
        const char *hit = i < n && s[i] ? strchr(special, s[i]) : NULL;
        bool control = i < n && (unsigned char)s[i] < 0x20;
        if (i < n && !hit && !control)
            continue;
        put(w, s + from, i - from);
        from = i + 1;
        if (hit)
            text[1] = as[hit - special];
        else if (control)
            snprintf(text, sizeof(text), "\\u%04x", (unsigned char)s[i]);
        if (i < n)
            put(w, text, strlen(text));
    }
    put(w, "\"", 1);
}

static void new_line(struct writer *w, int depth)
{
    if (w->indent < 0)
        return;
    put(w, "\n", 1);
    for (int i = 0; i < depth * w->indent; i++)
        put(w, " ", 1);
}

static void put_json(struct writer *w, struct tl_ct_value v, int depth)
{
    const char *comma = w->indent < 0 ? ", " : ",";
    size_t n = v.type == TL_CT_MAP ? v.map->n : v.n;
    if (!tl_ct_step(w->r, v.type == TL_CT_STR ? v.n / 64 : 0))
        return;
    if (depth > TL_CT_DEPTH_MAX) {
        tl_ct_fail(w->r, w->line, "a value of tojson is nested too deep");
        return;
    }
    if (v.type == TL_CT_STR) {
        put_string(w, v.s, v.n);
    } else if (v.type == TL_CT_SEQ || v.type == TL_CT_MAP) {
        bool map = v.type == TL_CT_MAP;
        put(w, map ? "{" : "[", 1);
        for (size_t i = 0; i < n && w->r->st == TL_OK; i++) {
            if (i > 0)
                put(w, comma, strlen(comma));
            new_line(w, depth + 1);
            if (map) {
                put_string(w, v.map->keys[i].s, v.map->keys[i].n);
                put(w, ": ", 2);
            }
            put_json(w, map ? v.map->values[i] : v.items[i], depth + 1);
        }
        if (n > 0)
            new_line(w, depth);
        put(w, map ? "}" : "]", 1);
    } else if (v.type == TL_CT_NONE) {
        put(w, "null", 4);
    } else if (v.type == TL_CT_BOOL) {
        put(w, v.b ? "true" : "false", v.b ? 4 : 5);
    } else if (v.type == TL_CT_INTEGER || v.type == TL_CT_FRACTION) {
        struct tl_ct_value s = tl_ct_to_str(w->r, w->line, v);
        put(w, s.s, s.n);
    } else {
        tl_ct_fail(w->r, w->line, "tojson cannot write %s", tl_ct_type_name(v.type));
    }
}

struct tl_ct_value tl_ct_to_json(struct tl_ct_run *r, int line, struct tl_ct_value v, int indent)
{
    struct writer w = {.r = r, .line = line, .indent = indent};
    put_json(&w, v, 0);
    unsigned char *plain = w.n ? tl_ct_alloc(r, w.n) : NULL;
    if (!plain)
        return tl_ct_str("", 0, NULL);
    memset(plain, 1, w.n);
    return tl_ct_str(w.s, w.n, plain);
}

struct tl_ct_value tl_ct_items(struct tl_ct_run *r, int line, struct tl_ct_value v)
{
    struct tl_ct_value out;
    size_t at = 0;
    switch (v.type) {
    case TL_CT_SEQ: return v;
    case TL_CT_UNDEFINED: return tl_ct_seq(r, 0);
    case TL_CT_MAP:
        out = tl_ct_seq(r, v.map->n);
        if (out.type == TL_CT_SEQ && v.map->n)
            memcpy(out.items, v.map->keys, v.map->n * sizeof(*out.items));
        return out;
    case TL_CT_STR:
        out = tl_ct_seq(r, tl_ct_chars(v));
        for (size_t i = 0; out.type == TL_CT_SEQ && i < out.n && tl_ct_step(r, 0); i++) {
            int len;
            tl_ct_get_char(v.s + at, v.n - at, &len);
            out.items[i] = tl_ct_part(v, at, at + (size_t)len);
            at += (size_t)len;
        }
        return out;
    default: tl_ct_fail(r, line, "%s cannot be gone over", tl_ct_type_name(v.type));
    }
    return tl_ct_seq(r, 0);
}

/* ---- JSON to values ------------------------------------------------------------------------------------------------ */

static struct tl_ct_value load_string(struct tl_ct_run *r, const char *s, size_t n, bool user)
{
    unsigned char *plain = user && n ? tl_ct_alloc(r, n) : NULL;
    if (plain)
        memset(plain, 1, n);
    return tl_ct_str(s, n, plain);
}

/* Recursion is bounded by the reader's own limit of depth. */
static struct tl_ct_value load(struct tl_ct_run *r, const struct tl_tkjson *js, uint32_t i, bool user)
{
    const struct tl_tkjson_node *n = &js->nodes[i];
    struct tl_ct_value v = {.type = TL_CT_NONE};
    char text[64];
    if (!tl_ct_step(r, 0))
        return v;
    switch (n->type) {
    case TL_TKJSON_NULL: break;
    case TL_TKJSON_TRUE:
    case TL_TKJSON_FALSE: return tl_ct_bool(n->type == TL_TKJSON_TRUE);
    case TL_TKJSON_STRING: return load_string(r, n->text, n->n, user);
    case TL_TKJSON_NUMBER:
        if (tl_tkjson_int(n, INT64_MIN / 2, INT64_MAX / 2, &v.i) && !memchr(n->text, '.', n->n) &&
            !memchr(n->text, 'e', n->n) && !memchr(n->text, 'E', n->n))
            return tl_ct_int(v.i);
        snprintf(text, sizeof(text), "%.*s", (int)(n->n < 60 ? n->n : 60), n->text);
        return (struct tl_ct_value){.type = TL_CT_FRACTION, .f = strtod(text, NULL)};
    case TL_TKJSON_ARRAY:
        v = tl_ct_seq(r, n->n);
        i++;
        for (size_t k = 0; v.type == TL_CT_SEQ && k < n->n; k++, i = js->nodes[i].next)
            v.items[k] = load(r, js, i, user);
        return v;
    case TL_TKJSON_OBJECT:
        v = tl_ct_new_map(r, TL_CT_MAP);
        i++;
        for (size_t k = 0; v.type == TL_CT_MAP && k < n->n; k++, i = js->nodes[i].next)
            tl_ct_map_set(r, v.map, load_string(r, js->nodes[i].key, js->nodes[i].key_bytes, user),
                          load(r, js, i, user));
        return v;
    }
    return v;
}

void tl_ct_load(struct tl_ct_run *r, char *text, size_t bytes, bool user, const char *what)
{
    struct tl_tkjson js = {0};
    if (r->st != TL_OK)
        return;
    r->st = tl_tkjson_parse(&js, text, bytes, r->err);
    if (r->st == TL_ERR_BAD_FILE)
        r->st = tl_fail(r->err, TL_ERR_BAD_PARAM, "%s are not JSON", what);
    else if (r->st == TL_OK && js.nodes[0].type != TL_TKJSON_OBJECT)
        r->st = tl_fail(r->err, TL_ERR_BAD_PARAM, "%s are not a JSON object", what);
    for (uint32_t i = 1; r->st == TL_OK && i < js.n_nodes; i = js.nodes[i].next)
        tl_ct_define(r, js.nodes[i].key, js.nodes[i].key_bytes, load(r, &js, i, user));
    tl_tkjson_free(&js);
}
