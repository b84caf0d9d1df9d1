#include "tokenizer_json.h"

#include "mem.h"
#include "tokenizer_utf8.h"

#include <string.h>

struct reader {
    struct tl_tkjson *js;
    char *text;
    size_t pos, n;
    struct tl_error *err;
};

static enum tl_status bad(struct reader *r, size_t at, const char *what)
{
    enum tl_status st = tl_fail(r->err, TL_ERR_BAD_FILE, "not valid JSON: %s at byte %zu", what, at);
    tl_error_num(r->err, "offset", (int64_t)at);
    return st;
}

static int peek(const struct reader *r) { return r->pos < r->n ? (unsigned char)r->text[r->pos] : -1; }

static void skip_blanks(struct reader *r)
{
    while (r->pos < r->n && strchr(" \t\r\n", r->text[r->pos]) && r->text[r->pos])
        r->pos++;
}

static bool hex4(const struct reader *r, uint32_t *out)
{
    uint32_t v = 0;
    if (r->n - r->pos < 4)
        return false;
    for (int i = 0; i < 4; i++) {
        char c = r->text[r->pos + (size_t)i];
        if (c >= '0' && c <= '9')
            v = v * 16 + (uint32_t)(c - '0');
        else if ((c | 32) >= 'a' && (c | 32) <= 'f')
            v = v * 16 + (uint32_t)((c | 32) - 'a' + 10);
        else
            return false;
    }
    *out = v;
    return true;
}

/* After a backslash: the unescaped bytes go to dst, which is never ahead of the source (six bytes become at most three). */
static bool escape(struct reader *r, char **dst)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    uint32_t cp, low;
    int c = peek(r);
    const char *at = c > 0 ? strchr(from, c) : NULL;
    r->pos++;
    if (at) {
        *(*dst)++ = to[at - from];
        return true;
    }
    if (c != 'u' || !hex4(r, &cp))
        return false;
    r->pos += 4;
    if (cp >= 0xDC00 && cp <= 0xDFFF)
        return false;
    if (cp >= 0xD800 && cp <= 0xDBFF) {
        if (r->n - r->pos < 6 || r->text[r->pos] != '\\' || r->text[r->pos + 1] != 'u')
            return false;
        r->pos += 2;
        if (!hex4(r, &low) || low < 0xDC00 || low > 0xDFFF)
            return false;
        r->pos += 4;
        cp = 0x10000 + ((cp - 0xD800) << 10) + (low - 0xDC00);
    }
    *dst += tl_utf8_put(cp, *dst);
    return true;
}

static enum tl_status string(struct reader *r, const char **out, uint32_t *bytes)
{
    size_t start = r->pos++;
    char *begin = r->text + r->pos, *dst = begin;
    for (;;) {
        int c = peek(r);
        if (c < 0)
            return bad(r, start, "a string without an end");
        if (c == '"')
            break;
        if (c < 0x20)
            return bad(r, r->pos, "a control character in a string");
        r->pos++;
        if (c != '\\')
            *dst++ = (char)c;
        else if (!escape(r, &dst))
            return bad(r, r->pos - 1, "a bad escape");
    }
    r->pos++;
    *out = begin;
    *bytes = (uint32_t)(dst - begin);
    return TL_OK;
}

static size_t digits(struct reader *r)
{
    size_t from = r->pos;
    while (peek(r) >= '0' && peek(r) <= '9')
        r->pos++;
    return r->pos - from;
}

static bool number(struct reader *r)
{
    size_t start;
    if (peek(r) == '-')
        r->pos++;
    start = r->pos;
    if (digits(r) == 0 || (r->text[start] == '0' && r->pos - start > 1))
        return false;
    if (peek(r) == '.') {
        r->pos++;
        if (digits(r) == 0)
            return false;
    }
    if (peek(r) == 'e' || peek(r) == 'E') {
        r->pos++;
        if (peek(r) == '+' || peek(r) == '-')
            r->pos++;
        if (digits(r) == 0)
            return false;
    }
    return true;
}

static bool word(struct reader *r, const char *w)
{
    size_t n = strlen(w);
    if (r->n - r->pos < n || memcmp(r->text + r->pos, w, n) != 0)
        return false;
    r->pos += n;
    return true;
}

static struct tl_tkjson_node *add_node(struct reader *r)
{
    struct tl_tkjson *js = r->js;
    if (js->n_nodes == js->cap) {
        uint32_t cap = js->cap ? js->cap * 2 : 256;
        struct tl_tkjson_node *p = cap > js->cap ? tl_realloc(js->nodes, cap * sizeof(*p)) : NULL;
        if (!p) {
            tl_fail_host_memory(r->err, cap * sizeof(*p));
            return NULL;
        }
        js->nodes = p;
        js->cap = cap;
    }
    js->nodes[js->n_nodes] = (struct tl_tkjson_node){.type = TL_TKJSON_NULL};
    return &js->nodes[js->n_nodes++];
}

static enum tl_status value(struct reader *r, const char *key, uint32_t key_bytes, int depth);

/* The members after '[' or '{'; self is an index because the array of nodes may move. */
static enum tl_status children(struct reader *r, uint32_t self, bool object, int depth)
{
    int end = object ? '}' : ']';
    enum tl_status st;
    if (depth == TL_TKJSON_DEPTH_MAX)
        return bad(r, r->pos, "too deep a nesting");
    r->pos++;
    skip_blanks(r);
    if (peek(r) == end) {
        r->pos++;
        return TL_OK;
    }
    for (;;) {
        const char *key = NULL;
        uint32_t key_bytes = 0;
        skip_blanks(r);
        if (object) {
            if (peek(r) != '"')
                return bad(r, r->pos, "no name of a member");
            st = string(r, &key, &key_bytes);
            if (st != TL_OK)
                return st;
            skip_blanks(r);
            if (peek(r) != ':')
                return bad(r, r->pos, "no ':'");
            r->pos++;
        }
        st = value(r, key, key_bytes, depth + 1);
        if (st != TL_OK)
            return st;
        r->js->nodes[self].n++;
        skip_blanks(r);
        if (peek(r) == end)
            break;
        if (peek(r) != ',')
            return bad(r, r->pos, "no ',' and no end of a list");
        r->pos++;
    }
    r->pos++;
    return TL_OK;
}

static enum tl_status value(struct reader *r, const char *key, uint32_t key_bytes, int depth)
{
    struct tl_tkjson_node *node;
    uint32_t self = r->js->n_nodes;
    enum tl_status st = TL_OK;
    size_t start;
    int c;
    skip_blanks(r);
    start = r->pos;
    node = add_node(r);
    if (!node)
        return TL_ERR_NO_HOST_MEMORY;
    node->key = key;
    node->key_bytes = key_bytes;
    c = peek(r);
    if (c == '{' || c == '[') {
        node->type = c == '{' ? TL_TKJSON_OBJECT : TL_TKJSON_ARRAY;
        st = children(r, self, c == '{', depth);
    } else if (c == '"') {
        node->type = TL_TKJSON_STRING;
        st = string(r, &node->text, &node->n);
    } else if (word(r, "true")) {
        node->type = TL_TKJSON_TRUE;
    } else if (word(r, "false")) {
        node->type = TL_TKJSON_FALSE;
    } else if (!word(r, "null")) {
        if (!number(r))
            return bad(r, start, "no value");
        node->type = TL_TKJSON_NUMBER;
        node->text = r->text + start;
        node->n = (uint32_t)(r->pos - start);
    }
    if (st == TL_OK)
        r->js->nodes[self].next = r->js->n_nodes;
    return st;
}

enum tl_status tl_tkjson_parse(struct tl_tkjson *js, char *text, size_t bytes, struct tl_error *err)
{
    struct reader r = {.js = js, .text = text, .n = bytes, .err = err};
    size_t good = tl_utf8_valid(text, bytes);
    enum tl_status st;
    memset(js, 0, sizeof(*js));
    st = good < bytes ? bad(&r, good, "invalid UTF-8") : value(&r, NULL, 0, 0);
    if (st == TL_OK) {
        skip_blanks(&r);
        if (r.pos < bytes)
            st = bad(&r, r.pos, "text after the end");
    }
    if (st != TL_OK)
        tl_tkjson_free(js);
    return st;
}

void tl_tkjson_free(struct tl_tkjson *js)
{
    if (!js)
        return;
    tl_free(js->nodes);
    memset(js, 0, sizeof(*js));
}

const struct tl_tkjson_node *tl_tkjson_get(const struct tl_tkjson *js, const struct tl_tkjson_node *obj,
                                           const char *key)
{
    size_t n = strlen(key);
    uint32_t i;
    if (!obj || obj->type != TL_TKJSON_OBJECT)
        return NULL;
    i = (uint32_t)(obj - js->nodes) + 1;
    for (uint32_t k = 0; k < obj->n; k++, i = js->nodes[i].next)
        if (js->nodes[i].key_bytes == n && memcmp(js->nodes[i].key, key, n) == 0)
            return &js->nodes[i];
    return NULL;
}

bool tl_tkjson_is(const struct tl_tkjson_node *n, const char *s)
{
    return n && n->type == TL_TKJSON_STRING && n->n == strlen(s) && memcmp(n->text, s, n->n) == 0;
}

bool tl_tkjson_int(const struct tl_tkjson_node *n, int64_t lo, int64_t hi, int64_t *out)
{
    bool negative;
    int64_t v = 0;
    if (!n || n->type != TL_TKJSON_NUMBER || n->n > 18)
        return false;
    negative = n->text[0] == '-';
    for (uint32_t i = negative; i < n->n; i++) {
        if (n->text[i] < '0' || n->text[i] > '9')
            return false;
        v = v * 10 + (n->text[i] - '0');
    }
    v = negative ? -v : v;
    if (v < lo || v > hi)
        return false;
    *out = v;
    return true;
}
