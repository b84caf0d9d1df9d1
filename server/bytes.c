#include "bytes.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void tl_bytes_free(struct tl_bytes *b)
{
    free(b->data);
    memset(b, 0, sizeof(*b));
}

bool tl_bytes_reserve(struct tl_bytes *b, size_t more)
{
    if (b->failed)
        return false;
    if (b->cap - b->n >= more)
        return true;
    size_t cap = b->cap ? b->cap : 256;
    while (cap - b->n < more) {
        if (cap > SIZE_MAX / 2)
            goto fail;
        cap *= 2;
    }
    char *data = realloc(b->data, cap);
    if (!data)
        goto fail;
    b->data = data;
    b->cap = cap;
    return true;
fail:
    b->failed = true;
    return false;
}

void tl_bytes_add(struct tl_bytes *b, const void *data, size_t n)
{
    if (n == 0 || !tl_bytes_reserve(b, n))
        return;
    memcpy(b->data + b->n, data, n);
    b->n += n;
}

void tl_bytes_str(struct tl_bytes *b, const char *s) { tl_bytes_add(b, s, strlen(s)); }

void tl_bytes_fmt(struct tl_bytes *b, const char *fmt, ...)
{
    char small[256];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(small, sizeof(small), fmt, ap);
    va_end(ap);
    if (n < 0)
        return;
    if ((size_t)n < sizeof(small)) {
        tl_bytes_add(b, small, (size_t)n);
        return;
    }
    if (!tl_bytes_reserve(b, (size_t)n + 1))
        return;
    va_start(ap, fmt);
    vsnprintf(b->data + b->n, (size_t)n + 1, fmt, ap);
    va_end(ap);
    b->n += (size_t)n;
}

void tl_bytes_drop_front(struct tl_bytes *b, size_t n)
{
    if (n >= b->n) {
        b->n = 0;
        return;
    }
    memmove(b->data, b->data + n, b->n - n);
    b->n -= n;
}

const char *tl_bytes_cstr(struct tl_bytes *b)
{
    if (!tl_bytes_reserve(b, 1))
        return "";
    b->data[b->n] = '\0';
    return b->data;
}

int tl_utf8_len(const char *s, size_t n)
{
    const unsigned char *p = (const unsigned char *)s;
    if (n == 0)
        return 0;
    if (p[0] < 0x80)
        return 1;
    int len = p[0] >= 0xC2 && p[0] <= 0xDF   ? 2
              : p[0] >= 0xE0 && p[0] <= 0xEF ? 3
              : p[0] >= 0xF0 && p[0] <= 0xF4 ? 4
                                             : 0;
    if (len == 0 || n < (size_t)len)
        return 0;
    for (int i = 1; i < len; i++)
        if ((p[i] & 0xC0) != 0x80)
            return 0;
    if (p[0] == 0xE0 && p[1] < 0xA0)
        return 0; /* overlong */
    if (p[0] == 0xED && p[1] > 0x9F)
        return 0; /* surrogates */
    if (p[0] == 0xF0 && p[1] < 0x90)
        return 0; /* overlong */
    if (p[0] == 0xF4 && p[1] > 0x8F)
        return 0; /* above U+10FFFF */
    return len;
}

void tl_bytes_json(struct tl_bytes *b, const char *s, size_t n)
{
    size_t from = 0, i = 0;
    while (i < n) {
        unsigned char c = (unsigned char)s[i];
        int len = tl_utf8_len(s + i, n - i);
        if (len > 1 || (len == 1 && c >= 0x20 && c != '"' && c != '\\' && c != 0x7F)) {
            i += (size_t)len;
            continue;
        }
        tl_bytes_add(b, s + from, i - from);
        if (len == 0)
            tl_bytes_str(b, "\xEF\xBF\xBD");
        else if (c == '"')
            tl_bytes_str(b, "\\\"");
        else if (c == '\\')
            tl_bytes_str(b, "\\\\");
        else if (c == '\n')
            tl_bytes_str(b, "\\n");
        else if (c == '\r')
            tl_bytes_str(b, "\\r");
        else if (c == '\t')
            tl_bytes_str(b, "\\t");
        else
            tl_bytes_fmt(b, "\\u%04x", c);
        from = ++i;
    }
    tl_bytes_add(b, s + from, n - from);
}

static void before_value(struct tl_jw *w, const char *key)
{
    if (w->comma)
        tl_bytes_add(w->b, ",", 1);
    w->comma = true;
    if (!key)
        return;
    tl_bytes_add(w->b, "\"", 1);
    tl_bytes_json(w->b, key, strlen(key));
    tl_bytes_add(w->b, "\":", 2);
}

static void open_level(struct tl_jw *w, const char *key, const char *bracket)
{
    before_value(w, key);
    tl_bytes_add(w->b, bracket, 1);
    w->comma = false;
}

static void close_level(struct tl_jw *w, const char *bracket)
{
    tl_bytes_add(w->b, bracket, 1);
    w->comma = true;
}

void tl_jw_obj(struct tl_jw *w, const char *key) { open_level(w, key, "{"); }
void tl_jw_obj_end(struct tl_jw *w) { close_level(w, "}"); }
void tl_jw_arr(struct tl_jw *w, const char *key) { open_level(w, key, "["); }
void tl_jw_arr_end(struct tl_jw *w) { close_level(w, "]"); }

void tl_jw_strn(struct tl_jw *w, const char *key, const char *s, size_t n)
{
    before_value(w, key);
    tl_bytes_add(w->b, "\"", 1);
    tl_bytes_json(w->b, s, n);
    tl_bytes_add(w->b, "\"", 1);
}

void tl_jw_str(struct tl_jw *w, const char *key, const char *s)
{
    if (s)
        tl_jw_strn(w, key, s, strlen(s));
    else
        tl_jw_null(w, key);
}

void tl_jw_raw(struct tl_jw *w, const char *key, const char *json, size_t n)
{
    before_value(w, key);
    tl_bytes_add(w->b, json, n);
}

void tl_jw_uint(struct tl_jw *w, const char *key, uint64_t v)
{
    char digits[20];
    size_t at = sizeof(digits);
    do
        digits[--at] = (char)('0' + v % 10);
    while ((v /= 10) > 0);
    before_value(w, key);
    tl_bytes_add(w->b, digits + at, sizeof(digits) - at);
}

void tl_jw_int(struct tl_jw *w, const char *key, int64_t v)
{
    char text[24];
    int n = snprintf(text, sizeof(text), "%lld", (long long)v);
    tl_jw_raw(w, key, text, (size_t)n);
}

void tl_jw_num(struct tl_jw *w, const char *key, double v, int decimals)
{
    char text[64];
    if (!isfinite(v) || fabs(v) > 1e30) {
        tl_jw_null(w, key);
        return;
    }
    int n = snprintf(text, sizeof(text), "%.*f", decimals, v);
    tl_jw_raw(w, key, text, (size_t)n);
}

void tl_jw_bool(struct tl_jw *w, const char *key, bool v) { tl_jw_raw(w, key, v ? "true" : "false", v ? 4 : 5); }

void tl_jw_null(struct tl_jw *w, const char *key) { tl_jw_raw(w, key, "null", 4); }
