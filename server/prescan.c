#include "prescan.h"

#include <stdlib.h>
#include <string.h>

#include "bytes.h"

/* The library behind this scan copies a number into a buffer of 64 characters and silently ends it there. */
#define NUMBER_CHARS_MAX 60

/* Hashes of (object, key) met so far; open addressing, 0 = free. A false hit needs a 64-bit collision and costs the sender
 * of such a body a refusal, nothing more. */
struct key_set {
    uint64_t *slots;
    size_t cap, n;
};

struct scan {
    const char *p, *end, *start;
    size_t values, values_max;
    struct key_set keys;
    struct tl_error *err;
};

static enum tl_status refuse(struct scan *s, const char *what)
{
    enum tl_status st = tl_fail(s->err, TL_ERR_BAD_PARAM, "The body is not valid JSON: %s at byte %zu.", what,
                                (size_t)(s->p - s->start));
    tl_error_num(s->err, "offset", (int64_t)(s->p - s->start));
    return st;
}

static uint64_t mix(uint64_t h, uint64_t v)
{
    h = (h ^ v) * 0x9E3779B97F4A7C15u;
    return h ^ (h >> 32);
}

/* 1 = new, 0 = seen before, -1 = no memory */
static int key_add(struct key_set *k, uint64_t hash)
{
    if (hash == 0)
        hash = 1;
    if (k->n * 2 >= k->cap) {
        size_t cap = k->cap ? k->cap * 2 : 64;
        uint64_t *slots = calloc(cap, sizeof(*slots));
        if (!slots)
            return -1;
        for (size_t i = 0; i < k->cap; i++) {
            if (k->slots[i] == 0)
                continue;
            size_t at = k->slots[i] & (cap - 1);
            while (slots[at])
                at = (at + 1) & (cap - 1);
            slots[at] = k->slots[i];
        }
        free(k->slots);
        k->slots = slots;
        k->cap = cap;
    }
    size_t at = hash & (k->cap - 1);
    while (k->slots[at]) {
        if (k->slots[at] == hash)
            return 0;
        at = (at + 1) & (k->cap - 1);
    }
    k->slots[at] = hash;
    k->n++;
    return 1;
}

static void skip_space(struct scan *s)
{
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\t' || *s->p == '\n' || *s->p == '\r'))
        s->p++;
}

static bool hex4(const char *p, const char *end, unsigned *out)
{
    unsigned v = 0;
    if (end - p < 4)
        return false;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        unsigned d;
        if (c >= '0' && c <= '9')
            d = (unsigned)(c - '0');
        else if (c >= 'a' && c <= 'f')
            d = (unsigned)(c - 'a') + 10;
        else if (c >= 'A' && c <= 'F')
            d = (unsigned)(c - 'A') + 10;
        else
            return false;
        v = v * 16 + d;
    }
    *out = v;
    return true;
}

/* One escape after the backslash; *code is the character it stands for. */
static enum tl_status scan_escape(struct scan *s, uint32_t *code)
{
    static const char plain[] = "\"\\/bfnrt", means[] = "\"\\/\b\f\n\r\t";
    if (s->p >= s->end)
        return refuse(s, "an unfinished escape");
    const char *at = *s->p ? strchr(plain, *s->p) : NULL;
    if (at) {
        *code = (unsigned char)means[at - plain];
        s->p++;
        return TL_OK;
    }
    unsigned hi, lo;
    if (*s->p != 'u' || !hex4(s->p + 1, s->end, &hi))
        return refuse(s, "a bad escape");
    if (hi == 0)
        return refuse(s, "a NUL character (\\u0000)");
    if (hi >= 0xDC00 && hi <= 0xDFFF)
        return refuse(s, "half a surrogate pair");
    s->p += 5;
    *code = hi;
    if (hi < 0xD800 || hi > 0xDBFF)
        return TL_OK;
    if (s->end - s->p < 6 || s->p[0] != '\\' || s->p[1] != 'u' || !hex4(s->p + 2, s->end, &lo) || lo < 0xDC00 ||
        lo > 0xDFFF)
        return refuse(s, "half a surrogate pair");
    s->p += 6;
    *code = 0x10000u + ((hi - 0xD800u) << 10) + (lo - 0xDC00u);
    return TL_OK;
}

/* A string from its opening quote to after its closing one; *hash over its characters. */
static enum tl_status scan_string(struct scan *s, uint64_t *hash)
{
    uint64_t h = *hash;
    s->p++;
    for (;;) {
        if (s->p >= s->end)
            return refuse(s, "an unfinished string");
        unsigned char c = (unsigned char)*s->p;
        uint32_t code = c;
        if (c == '"')
            break;
        if (c < 0x20)
            return refuse(s, c == 0 ? "a NUL byte" : "a raw control character in a string");
        if (c == '\\') {
            s->p++;
            enum tl_status st = scan_escape(s, &code);
            if (st != TL_OK)
                return st;
        } else if (c < 0x80) {
            s->p++;
        } else {
            int len = tl_utf8_len(s->p, (size_t)(s->end - s->p));
            if (len == 0)
                return refuse(s, "a byte that is not UTF-8");
            code = len == 2 ? c & 0x1Fu : len == 3 ? c & 0x0Fu : c & 0x07u;
            for (int i = 1; i < len; i++)
                code = (code << 6) | ((unsigned char)s->p[i] & 0x3Fu);
            s->p += len;
        }
        h = mix(h, code + 1);
    }
    s->p++;
    *hash = h;
    return TL_OK;
}

static bool digit(const struct scan *s) { return s->p < s->end && *s->p >= '0' && *s->p <= '9'; }

static enum tl_status scan_number(struct scan *s)
{
    const char *start = s->p;
    if (*s->p == '-')
        s->p++;
    if (!digit(s))
        return refuse(s, "a bad number");
    if (*s->p == '0') {
        s->p++;
        if (digit(s))
            return refuse(s, "a number with a leading zero");
    }
    while (digit(s))
        s->p++;
    if (s->p < s->end && *s->p == '.') {
        s->p++;
        if (!digit(s))
            return refuse(s, "a bad number");
        while (digit(s))
            s->p++;
    }
    if (s->p < s->end && (*s->p == 'e' || *s->p == 'E')) {
        s->p++;
        if (s->p < s->end && (*s->p == '+' || *s->p == '-'))
            s->p++;
        if (!digit(s))
            return refuse(s, "a bad number");
        while (digit(s))
            s->p++;
    }
    return s->p - start > NUMBER_CHARS_MAX ? refuse(s, "a number of more than 60 characters") : TL_OK;
}

static enum tl_status scan_word(struct scan *s)
{
    static const char *const words[] = {"true", "false", "null"};
    for (int i = 0; i < 3; i++) {
        size_t n = strlen(words[i]);
        if ((size_t)(s->end - s->p) >= n && memcmp(s->p, words[i], n) == 0) {
            s->p += n;
            return TL_OK;
        }
    }
    return refuse(s, *s->p == '\0' ? "a NUL byte" : "an unexpected character");
}

struct level {
    char close;      /* '}' or ']' */
    uint64_t object; /* number of this object in the text, 1 up */
};

/* A key and its colon. */
static enum tl_status scan_key(struct scan *s, const struct level *l)
{
    if (s->p >= s->end || *s->p != '"')
        return refuse(s, "a missing key");
    uint64_t hash = mix(0x7469, l->object);
    enum tl_status st = scan_string(s, &hash);
    if (st != TL_OK)
        return st;
    int added = key_add(&s->keys, hash);
    if (added < 0)
        return tl_fail(s->err, TL_ERR_NO_HOST_MEMORY, "No memory to check the body.");
    if (added == 0)
        return refuse(s, "a duplicate key");
    skip_space(s);
    if (s->p >= s->end || *s->p != ':')
        return refuse(s, "a missing colon");
    s->p++;
    skip_space(s);
    return TL_OK;
}

static enum tl_status scan_document(struct scan *s)
{
    struct level stack[TL_PRESCAN_DEPTH_MAX];
    int depth = 0;
    uint64_t n_objects = 0;
    enum tl_status st = TL_OK;

    skip_space(s);
    if (s->p >= s->end)
        return refuse(s, "nothing there");
    if (*s->p != '{')
        return refuse(s, "something other than an object");
    do {
        /* a value starts here */
        if (s->p >= s->end)
            return refuse(s, "an unexpected end");
        if (++s->values > s->values_max)
            return tl_fail(s->err, TL_ERR_BAD_PARAM, "The body holds more than %zu JSON values.", s->values_max);
        if (*s->p == '{' || *s->p == '[') {
            if (depth == TL_PRESCAN_DEPTH_MAX)
                return tl_fail(s->err, TL_ERR_BAD_PARAM, "The body is nested deeper than %d levels.",
                               TL_PRESCAN_DEPTH_MAX);
            bool object = *s->p == '{';
            stack[depth++] = (struct level){object ? '}' : ']', object ? ++n_objects : 0};
            s->p++;
            skip_space(s);
            if (s->p >= s->end || *s->p != stack[depth - 1].close) {
                if (object)
                    st = scan_key(s, &stack[depth - 1]);
                if (st != TL_OK)
                    return st;
                continue;
            }
        } else {
            uint64_t unused = 0;
            if (*s->p == '"')
                st = scan_string(s, &unused);
            else if (*s->p == '-' || (*s->p >= '0' && *s->p <= '9'))
                st = scan_number(s);
            else
                st = scan_word(s);
            if (st != TL_OK)
                return st;
            skip_space(s);
        }
        /* a value ended: close levels, or go on to the next one */
        while (depth > 0 && s->p < s->end && *s->p == stack[depth - 1].close) {
            s->p++;
            depth--;
            skip_space(s);
        }
        if (depth == 0)
            break;
        if (s->p >= s->end)
            return refuse(s, "an unexpected end");
        if (*s->p != ',')
            return refuse(s, "an unexpected character");
        s->p++;
        skip_space(s);
        if (stack[depth - 1].close == '}')
            st = scan_key(s, &stack[depth - 1]);
        if (st != TL_OK)
            return st;
    } while (depth > 0);
    return s->p == s->end ? TL_OK : refuse(s, "something after the object");
}

enum tl_status tl_prescan(const char *text, size_t bytes, size_t values_max, struct tl_error *err)
{
    struct scan s = {.p = text, .start = text, .end = text + bytes, .values_max = values_max, .err = err};
    enum tl_status st = scan_document(&s);
    free(s.keys.slots);
    return st;
}
