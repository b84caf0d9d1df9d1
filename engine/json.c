#include "json.h"

#include "mem.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- strict scan: cJSON accepts much that JSON does not, so the grammar is checked first ---- */

struct scan {
    const unsigned char *p, *end;
    const char *why; /* NULL while all is well */
    int64_t n_values;
};

static bool wrong(struct scan *s, const char *why)
{
    if (!s->why)
        s->why = why;
    return false;
}

static void skip_space(struct scan *s)
{
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\t' || *s->p == '\n' || *s->p == '\r'))
        s->p++;
}

/* One multi-byte character: no overlong forms, no surrogates, nothing past U+10FFFF. */
static bool scan_utf8(struct scan *s)
{
    unsigned c = *s->p;
    int n = c >= 0xC2 && c <= 0xDF ? 1 : c >= 0xE0 && c <= 0xEF ? 2 : c >= 0xF0 && c <= 0xF4 ? 3 : 0;
    if (!n || s->end - s->p <= n)
        return wrong(s, "text is not UTF-8");
    unsigned lo = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80, hi = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
    for (int i = 1; i <= n; i++) {
        if (s->p[i] < lo || s->p[i] > hi)
            return wrong(s, "text is not UTF-8");
        lo = 0x80;
        hi = 0xBF;
    }
    s->p += n + 1;
    return true;
}

/* Four hex digits at p; -1 if not there. */
static int hex4(const struct scan *s, const unsigned char *p)
{
    int v = 0;
    if (s->end - p < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        int c = p[i] | 0x20, d = p[i] >= '0' && p[i] <= '9' ? p[i] - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (d < 0)
            return -1;
        v = v * 16 + d;
    }
    return v;
}

static bool scan_escape(struct scan *s)
{
    if (s->end - s->p < 2)
        return wrong(s, "string has no end");
    if (s->p[1] != 'u') {
        if (!memchr("\"\\/bfnrt", s->p[1], 8))
            return wrong(s, "string has an unknown escape");
        s->p += 2;
        return true;
    }
    int v = hex4(s, s->p + 2);
    if (v < 0)
        return wrong(s, "string has a bad \\u escape");
    if (v == 0)
        return wrong(s, "string holds a NUL character");
    s->p += 6;
    if (v >= 0xDC00 && v <= 0xDFFF)
        return wrong(s, "string has half a surrogate pair");
    if (v >= 0xD800 && v <= 0xDBFF) {
        int low = s->end - s->p >= 6 && s->p[0] == '\\' && s->p[1] == 'u' ? hex4(s, s->p + 2) : -1;
        if (low < 0xDC00 || low > 0xDFFF)
            return wrong(s, "string has half a surrogate pair");
        s->p += 6;
    }
    return true;
}

static bool scan_string(struct scan *s)
{
    s->p++;
    while (s->p < s->end) {
        unsigned c = *s->p;
        if (c == '"') {
            s->p++;
            return true;
        }
        if (c == 0)
            return wrong(s, "string holds a NUL character");
        if (c < 0x20)
            return wrong(s, "string holds a raw control character");
        if (c == '\\' ? !scan_escape(s) : c >= 0x80 ? !scan_utf8(s) : (s->p++, false))
            return false;
    }
    return wrong(s, "string has no end");
}

static bool scan_digits(struct scan *s)
{
    const unsigned char *from = s->p;
    while (s->p < s->end && *s->p >= '0' && *s->p <= '9')
        s->p++;
    return s->p > from || wrong(s, "number is malformed");
}

static bool scan_number(struct scan *s)
{
    const unsigned char *from = s->p;
    if (*s->p == '-')
        s->p++;
    if (s->p < s->end && *s->p == '0')
        s->p++;
    else if (!scan_digits(s))
        return false;
    if (s->p < s->end && *s->p == '.') {
        s->p++;
        if (!scan_digits(s))
            return false;
    }
    if (s->p < s->end && (*s->p | 0x20) == 'e') {
        s->p++;
        if (s->p < s->end && (*s->p == '+' || *s->p == '-'))
            s->p++;
        if (!scan_digits(s))
            return false;
    }
    /* cJSON reads numbers of up to 63 characters and silently cuts longer ones. */
    return s->p - from < 60 || wrong(s, "number has more than 60 characters");
}

static bool scan_word(struct scan *s, const char *word)
{
    size_t n = strlen(word);
    if ((size_t)(s->end - s->p) < n || memcmp(s->p, word, n) != 0)
        return wrong(s, "value is malformed");
    s->p += n;
    return true;
}

static bool scan_value(struct scan *s, int depth)
{
    if (++s->n_values > TL_JSON_VALUES_MAX)
        return wrong(s, "more than 2000000 values");
    if (s->p >= s->end)
        return wrong(s, "value is missing");
    switch (*s->p) {
    case '"': return scan_string(s);
    case 't': return scan_word(s, "true");
    case 'f': return scan_word(s, "false");
    case 'n': return scan_word(s, "null");
    case '{':
    case '[': break;
    default: return *s->p == '-' || (*s->p >= '0' && *s->p <= '9') ? scan_number(s) : wrong(s, "value is malformed");
    }
    bool object = *s->p == '{';
    unsigned close = object ? '}' : ']';
    if (depth >= TL_JSON_DEPTH_MAX)
        return wrong(s, "nested deeper than 32");
    s->p++;
    skip_space(s);
    if (s->p < s->end && *s->p == close) {
        s->p++;
        return true;
    }
    for (;;) {
        if (object) {
            if (s->p >= s->end || *s->p != '"')
                return wrong(s, "key is missing");
            if (!scan_string(s))
                return false;
            skip_space(s);
            if (s->p >= s->end || *s->p != ':')
                return wrong(s, "':' is missing after a key");
            s->p++;
            skip_space(s);
        }
        if (!scan_value(s, depth + 1))
            return false;
        skip_space(s);
        if (s->p < s->end && *s->p == close) {
            s->p++;
            return true;
        }
        if (s->p >= s->end || *s->p != ',')
            return wrong(s, object ? "object is not closed" : "array is not closed");
        s->p++;
        skip_space(s);
    }
}

static int by_key(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

static enum tl_status refuse_duplicates(const cJSON *json, const char *what, struct tl_error *err)
{
    const cJSON *child;
    enum tl_status st = TL_OK;
    size_t n = 0, i = 0;
    cJSON_ArrayForEach(child, json) n++;
    if (cJSON_IsObject(json) && n > 1) {
        const char **keys = tl_array(n, sizeof(*keys));
        if (!keys)
            return tl_fail_host_memory(err, n * sizeof(*keys));
        cJSON_ArrayForEach(child, json) keys[i++] = child->string;
        qsort(keys, n, sizeof(*keys), by_key);
        for (i = 1; i < n && st == TL_OK; i++)
            if (!strcmp(keys[i - 1], keys[i]))
                st = tl_fail(err, TL_ERR_BAD_FILE, "%s: key '%.80s' is there twice", what, keys[i]);
        tl_free(keys);
    }
    cJSON_ArrayForEach(child, json) if (st == TL_OK && (cJSON_IsObject(child) || cJSON_IsArray(child))) st =
        refuse_duplicates(child, what, err);
    return st;
}

enum tl_status tl_json_parse(struct cJSON **out, const char *text, size_t bytes, const char *what, struct tl_error *err)
{
    struct scan s = {(const unsigned char *)text, (const unsigned char *)text + bytes, NULL, 0};
    cJSON *json = NULL;
    enum tl_status st;
    *out = NULL;
    skip_space(&s);
    if (scan_value(&s, 0)) {
        skip_space(&s);
        if (s.p != s.end)
            wrong(&s, "something follows the value");
    }
    if (s.why)
        return tl_fail(err, TL_ERR_BAD_FILE, "%s is not valid JSON: %s (byte %zu of %zu)", what, s.why,
                       (size_t)(s.p - (const unsigned char *)text), bytes);
    json = cJSON_ParseWithLength(text, bytes);
    if (!json) /* the grammar holds, so only memory can be missing */
        return tl_fail_host_memory(err, bytes);
    st = refuse_duplicates(json, what, err);
    if (st == TL_OK)
        *out = json;
    else
        cJSON_Delete(json);
    return st;
}

void tl_json_free(struct cJSON *json) { cJSON_Delete(json); }

enum tl_status tl_file_read(char **out, size_t *out_bytes, const char *path, size_t bytes_max, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    struct stat sb;
    char *text = NULL;
    size_t have = 0;
    *out = NULL;
    *out_bytes = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* no waiting for the writer of a pipe */
    if (fd < 0)
        return errno == ENOENT ? tl_fail(err, TL_ERR_NOT_FOUND, "there is no file '%s'", path)
                               : tl_fail_errno(err, "open", path, errno);
    if (fstat(fd, &sb) != 0) {
        st = tl_fail_errno(err, "read", path, errno);
    } else if (!S_ISREG(sb.st_mode)) {
        st = tl_fail(err, TL_ERR_BAD_FILE, "'%s' is not a regular file", path);
    } else if ((uint64_t)sb.st_size > bytes_max) {
        st = tl_fail(err, TL_ERR_BAD_FILE, "'%s' has %lld bytes, allowed are %zu", path, (long long)sb.st_size,
                     bytes_max);
    } else if (!(text = tl_malloc((size_t)sb.st_size + 1))) {
        st = tl_fail_host_memory(err, (size_t)sb.st_size + 1);
    }
    while (st == TL_OK && have < (size_t)sb.st_size) {
        ssize_t n = read(fd, text + have, (size_t)sb.st_size - have);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            st = tl_fail_errno(err, "read", path, errno);
        else if (n == 0)
            break; /* shrank while being read: what is there is judged by its content */
        else
            have += (size_t)n;
    }
    close(fd);
    if (st == TL_OK) {
        text[have] = 0;
        *out = text;
        *out_bytes = have;
        text = NULL;
    }
    tl_free(text);
    return st;
}

/* ---- typed getters ---- */

void tl_json_reader_init(struct tl_json_reader *r, const struct cJSON *json, const char *what, struct tl_error *err)
{
    r->obj = json;
    r->what = what;
    r->err = err;
    r->st = TL_OK;
    if (!cJSON_IsObject(json))
        r->st = tl_fail(err, TL_ERR_BAD_FILE, "%s is not a JSON object", what);
}

void tl_json_fail(struct tl_json_reader *r, const char *key, const char *fmt, ...)
{
    char text[200];
    va_list ap;
    if (r->st != TL_OK)
        return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    r->st = tl_fail(r->err, TL_ERR_BAD_FILE, "%s: '%s' %s", r->what, key, text);
    tl_error_param(r->err, key);
}

const struct cJSON *tl_json_value(const struct tl_json_reader *r, const char *key)
{
    const cJSON *v = r->st == TL_OK ? cJSON_GetObjectItemCaseSensitive(r->obj, key) : NULL;
    return v && !cJSON_IsNull(v) ? v : NULL;
}

bool tl_json_has(const struct tl_json_reader *r, const char *key) { return tl_json_value(r, key) != NULL; }

static const cJSON *need(struct tl_json_reader *r, const char *key)
{
    const cJSON *v = tl_json_value(r, key);
    if (!v)
        tl_json_fail(r, key, "is missing");
    return v;
}

/* Doubles hold every whole number up to 2^53; cJSON keeps nothing more. */
static bool whole(const cJSON *v)
{
    double d = v->valuedouble;
    return cJSON_IsNumber(v) && d >= -9007199254740992.0 && d <= 9007199254740992.0 && d == (double)(int64_t)d;
}

const char *tl_json_shown(const struct cJSON *v, char *buf, size_t n)
{
    if (cJSON_IsString(v))
        snprintf(buf, n, "\"%.40s\"", v->valuestring);
    else if (cJSON_IsNumber(v))
        snprintf(buf, n, "%.15g", v->valuedouble);
    else
        snprintf(buf, n, "%s",
                 cJSON_IsBool(v)    ? cJSON_IsTrue(v) ? "true" : "false"
                 : cJSON_IsArray(v) ? "a list"
                 : cJSON_IsNull(v)  ? "null"
                                    : "an object");
    return buf;
}

static int64_t int_of(struct tl_json_reader *r, const char *key, const cJSON *v, int64_t min, int64_t max)
{
    char buf[64];
    if (!whole(v)) {
        tl_json_fail(r, key, "is %s, allowed are whole numbers from %lld to %lld", tl_json_shown(v, buf, sizeof(buf)),
                     (long long)min, (long long)max);
        return 0;
    }
    int64_t i = (int64_t)v->valuedouble;
    if (i < min || i > max) {
        tl_json_fail(r, key, "is %lld, allowed are %lld to %lld", (long long)i, (long long)min, (long long)max);
        tl_error_num(r->err, key, i);
        return 0;
    }
    return i;
}

int64_t tl_json_int(struct tl_json_reader *r, const char *key, int64_t min, int64_t max)
{
    const cJSON *v = need(r, key);
    return v ? int_of(r, key, v, min, max) : 0;
}

int64_t tl_json_int_or(struct tl_json_reader *r, const char *key, int64_t min, int64_t max, int64_t otherwise)
{
    return tl_json_has(r, key) ? tl_json_int(r, key, min, max) : otherwise;
}

double tl_json_num(struct tl_json_reader *r, const char *key, double min, double max)
{
    const cJSON *v = need(r, key);
    char buf[64];
    if (!v)
        return 0;
    if (!cJSON_IsNumber(v) || !(v->valuedouble >= min && v->valuedouble <= max)) {
        tl_json_fail(r, key, "is %s, allowed are numbers from %g to %g", tl_json_shown(v, buf, sizeof(buf)), min, max);
        return 0;
    }
    return v->valuedouble;
}

double tl_json_num_or(struct tl_json_reader *r, const char *key, double min, double max, double otherwise)
{
    return tl_json_has(r, key) ? tl_json_num(r, key, min, max) : otherwise;
}

bool tl_json_bool(struct tl_json_reader *r, const char *key)
{
    const cJSON *v = need(r, key);
    char buf[64];
    if (v && !cJSON_IsBool(v))
        tl_json_fail(r, key, "is %s, allowed are true and false", tl_json_shown(v, buf, sizeof(buf)));
    return v && cJSON_IsTrue(v);
}

bool tl_json_bool_or(struct tl_json_reader *r, const char *key, bool otherwise)
{
    return tl_json_has(r, key) ? tl_json_bool(r, key) : otherwise;
}

const char *tl_json_str(struct tl_json_reader *r, const char *key)
{
    const cJSON *v = need(r, key);
    char buf[64];
    if (v && !cJSON_IsString(v)) {
        tl_json_fail(r, key, "is %s, allowed are strings", tl_json_shown(v, buf, sizeof(buf)));
        return "";
    }
    return v ? v->valuestring : "";
}

const char *tl_json_str_or(struct tl_json_reader *r, const char *key, const char *otherwise)
{
    return tl_json_has(r, key) ? tl_json_str(r, key) : otherwise;
}

int tl_json_enum(struct tl_json_reader *r, const char *key, const char *const *names, int n)
{
    const char *text = tl_json_str(r, key);
    char all[160] = "";
    size_t len = 0;
    if (r->st != TL_OK)
        return -1;
    for (int i = 0; i < n; i++) {
        if (!strcmp(text, names[i]))
            return i;
        if (len < sizeof(all))
            len += (size_t)snprintf(all + len, sizeof(all) - len, "%s\"%s\"", i ? ", " : "", names[i]);
    }
    tl_json_fail(r, key, "is \"%.40s\", allowed are %s", text, all);
    return -1;
}

int tl_json_ints(struct tl_json_reader *r, const char *key, int64_t min, int64_t max, int64_t *out, int n_max)
{
    const cJSON *v = tl_json_value(r, key), *item;
    int n = 0;
    if (!v)
        return 0;
    if (cJSON_IsNumber(v)) {
        out[0] = int_of(r, key, v, min, max);
        return r->st == TL_OK;
    }
    if (!cJSON_IsArray(v)) {
        char buf[64];
        tl_json_fail(r, key, "is %s, allowed are a number and a list of numbers", tl_json_shown(v, buf, sizeof(buf)));
        return 0;
    }
    cJSON_ArrayForEach(item, v)
    {
        if (n == n_max) {
            tl_json_fail(r, key, "has more than %d entries", n_max);
            return 0;
        }
        out[n++] = int_of(r, key, item, min, max);
    }
    return r->st == TL_OK ? n : 0;
}

bool tl_json_object(struct tl_json_reader *r, const char *key, struct tl_json_reader *out)
{
    const cJSON *v = tl_json_value(r, key);
    if (v && !cJSON_IsObject(v))
        tl_json_fail(r, key, "is not an object");
    if (!v || r->st != TL_OK)
        return false;
    tl_json_reader_init(out, v, r->what, r->err);
    return true;
}
