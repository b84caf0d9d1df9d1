/* Strings and numbers of a schema. */
#include "grammar_json.h"

#include "mem.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

/* ---- strings ---- */

#define YEAR "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
#define LEAP "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
#define DATE                                                                                                           \
    "(" YEAR                                                                                                           \
    "-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))|" LEAP   \
    "-02-29)"
#define TIME  "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
#define LABEL "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define TOP   "[A-Za-z]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define PORT  "([1-5][0-9]{0,4}|[6-9][0-9]{0,3}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
#define OCTET "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
#define H     "[0-9A-Fa-f]{1,4}"
#define ATOM  "[A-Za-z0-9_+-]+"
#define PATH  "([A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*"

static const struct {
    const char *name, *regex;
} formats[] = {
    {"date", DATE},
    {"time", TIME},
    {"date-time", DATE "T" TIME},
    {"uuid", "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"},
    {"ipv4", OCTET "(\\." OCTET "){3}"},
    {"ipv6", "(" H ":){7}" H "|(" H ":){1,7}:|(" H ":){1,6}:" H "|(" H ":){1,5}(:" H "){2}|(" H ":){1,4}(:" H "){3}|(" H
             ":){1,3}(:" H "){4}|(" H ":){1,2}(:" H "){5}|" H ":(:" H "){6}|:((:" H "){1,7}|:)"},
    {"hostname", LABEL "(\\." LABEL "){0,3}"}, /* four labels keep below the 253 characters of a name */
    {"email", ATOM "(\\." ATOM ")*@" LABEL "(\\." LABEL "){1,3}"},
    /* a host that ends in a number is an address */
    {"uri", "https?://((" LABEL "\\.){0,3}" TOP "|" OCTET "(\\." OCTET "){3})(:" PORT ")?(/" PATH ")?(\\?" PATH
            ")?(#" PATH ")?"},
};

static uint32_t quoted(struct tl_schema *s, uint32_t inside)
{
    uint32_t quote = tl_draft_text(s->d, "\""), kids[3] = {quote, inside, quote};

    return tl_schema_rule(s, tl_draft_cat(s->d, kids, 3));
}

uint32_t tl_schema_string(struct tl_schema *s, const struct cJSON *node)
{
    const cJSON *pattern = cJSON_GetObjectItemCaseSensitive(node, "pattern"),
                *format = cJSON_GetObjectItemCaseSensitive(node, "format");
    struct tl_regex_params p = {.json = true, .search = true};
    struct tl_draft *d = s->d;
    uint32_t x;

    p.min = tl_schema_count(s, node, "minLength", 0);
    p.max = tl_schema_count(s, node, "maxLength", -1);
    if (p.max >= 0 && p.max < p.min)
        tl_schema_refuse(s, "maxLength", "it is less than minLength");
    if (pattern && format)
        tl_schema_refuse(s, "format", "this keyword is not supported beside pattern");
    if (pattern && !cJSON_IsString(pattern))
        tl_schema_refuse(s, "pattern", "it must be a string");
    if (d->st != TL_OK)
        return 0;
    if (!pattern && !format) {
        if (p.min == 0 && p.max < 0)
            return tl_json_call(&s->w, TL_JSON_STRING);
        return quoted(s, tl_draft_repeat(d, tl_json_char(&s->w), p.min, p.max));
    }
    if (pattern) {
        p.text = pattern->valuestring;
    } else {
        for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++)
            if (cJSON_IsString(format) && strcmp(format->valuestring, formats[i].name) == 0)
                p.text = formats[i].regex;
        if (!p.text) {
            tl_schema_refuse(s, "format",
                             "supported are date, time, date-time, uuid, ipv4, ipv6, hostname, email and uri");
            return 0;
        }
        p.search = false;
    }
    p.n = strlen(p.text);
    x = tl_regex_read(d, &p);
    if (d->st == TL_ERR_UNSUPPORTED_SCHEMA) { /* said about the expression; say where that stands */
        char why[256];
        snprintf(why, sizeof(why), "%.250s", d->err->msg);
        d->st = TL_OK;
        tl_schema_refuse(s, pattern ? "pattern" : "format", why);
    }
    return quoted(s, x);
}

/* ---- numbers ---- */

static uint32_t digits(struct tl_schema *s, char lo, char hi, int min, int max)
{
    struct tl_range r = {(unsigned char)lo, (unsigned char)hi};
    return tl_draft_repeat(s->d, tl_draft_set(s->d, &r, 1, false), min, max);
}

static uint32_t cat(struct tl_schema *s, uint32_t a, uint32_t b)
{
    uint32_t kids[2] = {a, b};
    return tl_draft_cat(s->d, kids, 2);
}

/* Numbers of n digits from lo to hi, both written with n digits. */
static uint32_t same_length(struct tl_schema *s, const char *lo, const char *hi, int n)
{
    uint32_t kids[3], k = 0;
    int zeros = (int)strspn(lo, "0"), nines = (int)strspn(hi, "9");
    char from = lo[0], to = hi[0];

    if (n == 0)
        return 0;
    if (zeros >= n && nines >= n)
        return digits(s, '0', '9', n, n);
    if (from == to)
        return cat(s, digits(s, from, from, 1, 1), same_length(s, lo + 1, hi + 1, n - 1));
    if (zeros < n && strspn(lo + 1, "0") < (size_t)(n - 1)) {
        kids[k++] =
            cat(s, digits(s, from, from, 1, 1), same_length(s, lo + 1, "99999999999999999999" + (20 - (n - 1)), n - 1));
        from++;
    }
    if (strspn(hi + 1, "9") < (size_t)(n - 1)) {
        kids[k++] =
            cat(s, digits(s, to, to, 1, 1), same_length(s, "00000000000000000000" + (20 - (n - 1)), hi + 1, n - 1));
        to--;
    }
    if (from <= to)
        kids[k++] = cat(s, digits(s, from, to, 1, 1), digits(s, '0', '9', n - 1, n - 1));
    return tl_draft_alt(s->d, kids, k);
}

/* Whole numbers from lo to hi, lo >= 0; hi -1 = any. No text if there are none. */
static uint32_t whole(struct tl_schema *s, int64_t lo, int64_t hi)
{
    uint32_t kids[32], k = 0;
    char a[24], b[24] = "";
    int n_lo, n_hi;

    if (hi >= 0 && hi < lo)
        return tl_draft_alt(s->d, NULL, 0);
    n_lo = snprintf(a, sizeof(a), "%lld", (long long)lo);
    n_hi = hi < 0 ? n_lo : snprintf(b, sizeof(b), "%lld", (long long)hi);
    for (int n = n_lo; n <= n_hi; n++) {
        char from[24], to[24];
        snprintf(from, sizeof(from), "%s", a);
        snprintf(to, sizeof(to), "%s", b);
        if (n > n_lo) {
            memset(from, '0', (size_t)n);
            from[0] = '1';
            from[n] = '\0';
        }
        if (n < n_hi || hi < 0) {
            memset(to, '9', (size_t)n);
            to[n] = '\0';
        }
        kids[k++] = same_length(s, from, to, n);
    }
    if (hi < 0 && n_lo < TL_JSON_INT_DIGITS)
        kids[k++] = cat(s, digits(s, '1', '9', 1, 1), digits(s, '0', '9', n_lo, TL_JSON_INT_DIGITS - 1));
    return tl_draft_alt(s->d, kids, k);
}

struct bounds { /* of a magnitude; hi -1 = none */
    int64_t lo, hi;
    bool lo_open, hi_open;
};

static uint32_t magnitude(struct tl_schema *s, struct bounds b, bool integer)
{
    struct tl_draft *d = s->d;
    uint32_t kids[3], k = 0, dot = tl_draft_text(d, "."), fraction, above;
    char text[24];
    int places; /* so many that a double tells apart what stands behind the point beside the bounds */

    if (integer)
        return whole(s, b.lo + b.lo_open, b.hi < 0 ? -1 : b.hi - b.hi_open);
    places = 15 - snprintf(text, sizeof(text), "%lld", (long long)(b.hi > b.lo ? b.hi : b.lo));
    if (places < 2)
        places = 2;
    fraction = tl_draft_repeat(d, cat(s, dot, digits(s, '0', '9', 1, places)), 0, 1);
    /* some digit is not 0: nought point noughts, one that is not, any */
    above = cat(s, cat(s, dot, digits(s, '0', '0', 0, places / 2 - 1)),
                cat(s, digits(s, '1', '9', 1, 1), digits(s, '0', '9', 0, places / 2)));
    if (b.hi >= 0 && b.hi < b.lo)
        return tl_draft_alt(d, NULL, 0);
    if (b.hi == b.lo)
        return b.lo_open || b.hi_open ? tl_draft_alt(d, NULL, 0) : whole(s, b.lo, b.lo);
    kids[k++] = cat(s, whole(s, b.lo, b.lo), b.lo_open ? above : fraction);
    if (b.hi < 0 || b.hi - 1 >= b.lo + 1)
        kids[k++] = cat(s, whole(s, b.lo + 1, b.hi < 0 ? -1 : b.hi - 1), fraction);
    if (b.hi >= 0 && !b.hi_open)
        kids[k++] = whole(s, b.hi, b.hi);
    return tl_draft_alt(d, kids, k);
}

/* One bound. false: there is none. open: the number itself is out. As integers bounds may have a fraction. */
static bool bound(struct tl_schema *s, const struct cJSON *node, const char *key, const char *open_key, bool integer,
                  bool upper, int64_t *out, bool *open)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(node, key), *o = cJSON_GetObjectItemCaseSensitive(node, open_key);
    double x;

    *open = false;
    if (cJSON_IsBool(o)) { /* as it was written up to draft 4 */
        *open = cJSON_IsTrue(o);
    } else if (o && v) {
        tl_schema_refuse(s, open_key, "two bounds on one side are not supported");
        return false;
    } else if (o) {
        v = o;
        key = open_key;
        *open = true;
    }
    if (!v)
        return false;
    if (!cJSON_IsNumber(v) || v->valuedouble > 0x1p53 || v->valuedouble < -0x1p53) {
        tl_schema_refuse(s, key, "it must be a number within 2^53");
        return false;
    }
    x = v->valuedouble;
    *out = (int64_t)x;
    if (x == (double)*out)
        return true;
    if (!integer) {
        tl_schema_refuse(s, key, "a bound with a fraction is supported for integers only");
        return false;
    }
    *out = upper ? (x < 0 ? *out - 1 : *out) : (x > 0 ? *out + 1 : *out); /* the next whole number inside */
    *open = false;
    return true;
}

/* Formats of numbers, which are bounds. One for strings is meant for another of the types, if there is another. */
static void check_format(struct tl_schema *s, const struct cJSON *node, bool integer, int64_t *limit)
{
    const cJSON *f = cJSON_GetObjectItemCaseSensitive(node, "format");
    const char *name = cJSON_IsString(f) ? f->valuestring : "";

    if (integer && strcmp(name, "int32") == 0)
        *limit = INT32_MAX;
    else if (integer && strcmp(name, "int64") == 0)
        *limit = INT64_MAX;
    else if (f && !cJSON_IsArray(cJSON_GetObjectItemCaseSensitive(node, "type")) && strcmp(name, "float") != 0 &&
             strcmp(name, "double") != 0)
        tl_schema_refuse(s, "format", "supported for numbers are int32, int64, float and double");
}

uint32_t tl_schema_number(struct tl_schema *s, const struct cJSON *node, bool integer)
{
    const cJSON *step = cJSON_GetObjectItemCaseSensitive(node, "multipleOf");
    struct tl_draft *d = s->d;
    int64_t lo = 0, hi = 0, limit = 0;
    bool lo_open, hi_open, has_lo, has_hi;
    uint32_t kids[2], k = 0;

    if (step && !(integer && cJSON_IsNumber(step) && step->valuedouble == 1))
        tl_schema_refuse(s, "multipleOf", "only 1 for integers is supported");
    has_lo = bound(s, node, "minimum", "exclusiveMinimum", integer, false, &lo, &lo_open);
    has_hi = bound(s, node, "maximum", "exclusiveMaximum", integer, true, &hi, &hi_open);
    check_format(s, node, integer, &limit);
    if (limit && (!has_lo || lo < -limit)) {
        lo = -limit;
        lo_open = false;
        has_lo = true;
    }
    if (limit && (!has_hi || hi > limit)) {
        hi = limit;
        hi_open = false;
        has_hi = true;
    }
    if (d->st != TL_OK)
        return 0;
    if (!has_lo && !has_hi)
        return tl_json_call(&s->w, integer ? TL_JSON_INTEGER : TL_JSON_NUMBER);
    if (integer) { /* whole bounds that are inside, from here on */
        lo += has_lo && lo_open;
        hi -= has_hi && hi_open;
        lo_open = hi_open = false;
    }
    if (has_lo && has_hi && (lo > hi || (lo == hi && (lo_open || hi_open)))) {
        tl_schema_refuse(s, "maximum", "no number lies between the bounds");
        return 0;
    }
    if (!has_hi || hi >= 0) {
        struct bounds b = {has_lo && lo > 0 ? lo : 0, has_hi ? hi : -1, has_lo && lo >= 0 && lo_open,
                           has_hi && hi_open};
        kids[k++] = magnitude(s, b, integer);
    }
    if (!has_lo || lo < 0) { /* below 0; -0 is left out */
        struct bounds b = {has_hi && hi < 0 ? -hi : 0, has_lo ? -lo : -1, !has_hi || hi >= 0 || hi_open,
                           has_lo && lo_open};
        kids[k++] = cat(s, tl_draft_text(d, "-"), magnitude(s, b, integer));
    }
    return tl_draft_alt(d, kids, k);
}
