/* JSON as expressions. Blanks are capped, so that no text can go on in blanks for ever; so are the digits of numbers. */
#include "grammar_json.h"

#include "mem.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N(a) ((uint32_t)(sizeof(a) / sizeof((a)[0])))

static uint32_t set(struct tl_draft *d, const char *pairs) /* "azAZ": ranges a-z and A-Z */
{
    struct tl_range r[8];
    uint32_t n = 0;

    for (; pairs[0] && pairs[1]; pairs += 2)
        r[n++] = (struct tl_range){(unsigned char)pairs[0], (unsigned char)pairs[1]};
    return tl_draft_set(d, r, n, false);
}

static uint32_t cat(struct tl_draft *d, uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t kids[3] = {a, b, c};
    return tl_draft_cat(d, kids, 3);
}

static uint32_t either(struct tl_draft *d, uint32_t a, uint32_t b)
{
    uint32_t kids[2] = {a, b};
    return tl_draft_alt(d, kids, 2);
}

/* ---- characters of strings ---- */

static void escaped(char out[8], uint32_t cp, bool upper)
{
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    const char *p = cp ? memchr(from, (int)cp, 7) : NULL;

    if (p)
        snprintf(out, 8, "\\%c", to[p - from]);
    else
        snprintf(out, 8, upper ? "\\u%04X" : "\\u%04x", cp);
}

static bool needs_escape(uint32_t cp) { return cp < 0x20 || cp == '"' || cp == '\\'; }

uint32_t tl_json_set(struct tl_draft *d, const struct tl_range *ranges, uint32_t n)
{
    static const struct tl_range raw[] = {{0x20, 0x21}, {0x23, 0x5B}, {0x5D, TL_UNICODE_MAX}};
    TL_VEC(struct tl_range) plain = {0};
    uint32_t first = d->words.n, parts[2], n_parts = 0, x;

    for (uint32_t i = 0; i < n; i++) {
        if (!TL_VEC_ROOM(&plain, N(raw))) {
            tl_draft_no_memory(d);
            break;
        }
        for (uint32_t k = 0; k < N(raw); k++) {
            struct tl_range r = {ranges[i].lo > raw[k].lo ? ranges[i].lo : raw[k].lo,
                                 ranges[i].hi < raw[k].hi ? ranges[i].hi : raw[k].hi};
            if (r.lo <= r.hi)
                plain.at[plain.n++] = r;
        }
        for (uint32_t cp = ranges[i].lo; cp <= ranges[i].hi && cp <= '\\'; cp++)
            for (int upper = 0; upper < 2 && needs_escape(cp); upper++) {
                char text[8];
                escaped(text, cp, upper);
                tl_draft_add_word(d, text, strlen(text));
            }
    }
    if (d->words.n > first)
        parts[n_parts++] = tl_draft_words(d, first);
    if (plain.n || n_parts == 0)
        parts[n_parts++] = tl_draft_set(d, plain.at, plain.n, false);
    x = tl_draft_alt(d, parts, n_parts);
    tl_free(plain.at);
    return x;
}

/* What may stand behind a backslash. No half of a surrogate pair. */
static uint32_t escape(struct tl_draft *d)
{
    uint32_t hex = set(d, "09afAF"), hex2 = tl_draft_repeat(d, hex, 2, 2), hex3 = tl_draft_repeat(d, hex, 3, 3);
    uint32_t u = tl_draft_text(d, "u"), u2 = tl_draft_text(d, "\\u"), D = set(d, "DDdd");
    uint32_t low = cat(d, u2, D, cat(d, set(d, "CFcf"), hex2, 0));
    uint32_t coded[] = {
        cat(d, set(d, "09ACEFacef"), hex3, 0),            /* no surrogate */
        cat(d, D, set(d, "07"), hex2),                    /* U+D000 to U+D7FF */
        cat(d, D, set(d, "89ABab"), cat(d, hex2, low, 0)) /* a pair */
    };
    return either(d, set(d, "\"\"\\\\//bbffnnrrtt"), cat(d, u, tl_draft_alt(d, coded, N(coded)), 0));
}

/* Counted strings hold many of them, so most of it is a rule. */
uint32_t tl_json_char(struct tl_json_writer *w)
{
    static const struct tl_range raw[] = {{0x20, 0x21}, {0x23, 0x5B}, {0x5D, TL_UNICODE_MAX}};
    struct tl_draft *d = w->d;
    return either(d, tl_draft_set(d, raw, N(raw), false),
                  cat(d, tl_draft_text(d, "\\"), tl_json_call(w, TL_JSON_ESCAPE), 0));
}

/* ---- rules ---- */

static uint32_t number(struct tl_draft *d)
{
    uint32_t digit = set(d, "09");
    uint32_t whole =
        either(d, tl_draft_text(d, "0"), cat(d, set(d, "19"), tl_draft_repeat(d, digit, 0, TL_JSON_INT_DIGITS - 1), 0));
    uint32_t fraction = cat(d, tl_draft_text(d, "."), tl_draft_repeat(d, digit, 1, TL_JSON_INT_DIGITS), 0);
    /* up to 279, so that no number is past what a double holds */
    uint32_t powers[] = {tl_draft_repeat(d, digit, 1, 2), cat(d, tl_draft_text(d, "1"), digit, digit),
                         cat(d, tl_draft_text(d, "2"), set(d, "07"), digit)};
    uint32_t power =
        cat(d, set(d, "eeEE"), tl_draft_repeat(d, set(d, "++--"), 0, 1), tl_draft_alt(d, powers, N(powers)));
    return cat(d, tl_draft_repeat(d, tl_draft_text(d, "-"), 0, 1), whole,
               cat(d, tl_draft_repeat(d, fraction, 0, 1), tl_draft_repeat(d, power, 0, 1), 0));
}

static uint32_t integer(struct tl_draft *d)
{
    uint32_t rest = tl_draft_repeat(d, set(d, "09"), 0, TL_JSON_INT_DIGITS - 1);
    return either(d, tl_draft_text(d, "0"),
                  cat(d, tl_draft_repeat(d, tl_draft_text(d, "-"), 0, 1), set(d, "19"), rest));
}

static uint32_t body(struct tl_json_writer *w, enum tl_json_rule rule)
{
    struct tl_draft *d = w->d;
    uint32_t quote, list, words;

    switch (rule) {
    case TL_JSON_BLANKS: {
        uint32_t kids[] = {0, tl_draft_text(d, " "),
                           cat(d, tl_draft_text(d, "\n"), tl_draft_repeat(d, set(d, "  \t\t"), 0, 40), 0)};
        return tl_draft_alt(d, kids, N(kids));
    }
    case TL_JSON_ESCAPE: return escape(d);
    case TL_JSON_STRING:
        quote = tl_draft_text(d, "\"");
        return cat(d, quote, tl_draft_repeat(d, tl_json_char(w), 0, -1), quote);
    case TL_JSON_NUMBER: return number(d);
    case TL_JSON_INTEGER: return integer(d);
    case TL_JSON_ANY: {
        uint32_t kids[5] = {tl_json_call(w, TL_JSON_OBJECT), tl_json_call(w, TL_JSON_ARRAY),
                            tl_json_call(w, TL_JSON_STRING), tl_json_call(w, TL_JSON_NUMBER)};
        words = d->words.n;
        tl_draft_add_word(d, "true", 4);
        tl_draft_add_word(d, "false", 5);
        tl_draft_add_word(d, "null", 4);
        kids[4] = tl_draft_words(d, words);
        return tl_draft_alt(d, kids, N(kids));
    }
    case TL_JSON_OBJECT:
        list = cat(d, tl_json_call(w, TL_JSON_STRING), tl_draft_text(d, ":"),
                   cat(d, tl_json_call(w, TL_JSON_BLANKS), tl_json_call(w, TL_JSON_ANY), 0));
        list = tl_draft_list(d, tl_json_comma(w), list, -1, NULL, 0, false);
        return tl_json_bracketed(w, "{", list, true, true, "}");
    case TL_JSON_ARRAY:
        list = tl_draft_list(d, tl_json_comma(w), tl_json_call(w, TL_JSON_ANY), -1, NULL, 0, false);
        return tl_json_bracketed(w, "[", list, true, true, "]");
    case TL_JSON_RULES: break;
    }
    return 0;
}

uint32_t tl_json_call(struct tl_json_writer *w, enum tl_json_rule rule)
{
    static const char *const names[] = {"json-blanks",  "json-escape", "json-string", "json-number",
                                        "json-integer", "json-value",  "json-object", "json-array"};

    if (!w->made[rule]) { /* before its body, which may call it */
        w->made[rule] = true;
        w->rule[rule] = tl_draft_rule(w->d, names[rule], strlen(names[rule]));
        tl_draft_define(w->d, w->rule[rule], body(w, rule));
    }
    return tl_draft_call(w->d, w->rule[rule]);
}

uint32_t tl_json_comma(struct tl_json_writer *w)
{
    return cat(w->d, tl_draft_text(w->d, ","), tl_json_call(w, TL_JSON_BLANKS), 0);
}

uint32_t tl_json_bracketed(struct tl_json_writer *w, const char *open, uint32_t inside, bool has_body,
                           bool may_be_empty, const char *close)
{
    struct tl_draft *d = w->d;
    uint32_t blanks = tl_json_call(w, TL_JSON_BLANKS), kids[2], n = 0;

    if (has_body)
        kids[n++] = cat(d, inside, blanks, 0);
    if (may_be_empty)
        kids[n++] = 0;
    return cat(d, cat(d, tl_draft_text(d, open), blanks, 0), tl_draft_alt(d, kids, n), tl_draft_text(d, close));
}

uint32_t tl_json_object_rule(struct tl_draft *d)
{
    struct tl_json_writer w = {.d = d};
    uint32_t root = tl_draft_rule(d, "root", 4);

    tl_draft_define(d, root, cat(d, tl_json_call(&w, TL_JSON_BLANKS), tl_json_call(&w, TL_JSON_OBJECT), 0));
    return root;
}

/* ---- constants ---- */

static void add_string_word(struct tl_draft *d, const char *text, const char *tail)
{
    uint32_t at = d->bytes.n;

    if (d->st != TL_OK)
        return;
    if (strlen(text) > (1u << 28) || !TL_VEC_ROOM(&d->bytes, (uint32_t)(strlen(text) * 6 + strlen(tail) + 2)) ||
        !TL_VEC_ROOM(&d->words, 1)) {
        tl_draft_no_memory(d);
        return;
    }
    d->bytes.at[d->bytes.n++] = '"';
    for (; *text; text++) {
        char code[8];
        if (needs_escape((unsigned char)*text)) {
            escaped(code, (unsigned char)*text, false);
            memcpy(d->bytes.at + d->bytes.n, code, strlen(code));
            d->bytes.n += (uint32_t)strlen(code);
        } else {
            d->bytes.at[d->bytes.n++] = *text;
        }
    }
    d->bytes.at[d->bytes.n++] = '"';
    memcpy(d->bytes.at + d->bytes.n, tail, strlen(tail));
    d->bytes.n += (uint32_t)strlen(tail);
    d->words.at[d->words.n++] = (struct tl_word){at, d->bytes.n - at};
}

uint32_t tl_json_key(struct tl_json_writer *w, const char *name)
{
    uint32_t first = w->d->words.n;

    add_string_word(w->d, name, ":");
    return cat(w->d, tl_draft_words(w->d, first), tl_json_call(w, TL_JSON_BLANKS), 0);
}

void tl_json_add_scalar(struct tl_draft *d, const struct cJSON *v)
{
    char text[64] = "";

    if (cJSON_IsString(v)) {
        add_string_word(d, v->valuestring, "");
        return;
    }
    if (cJSON_IsNumber(v)) {
        double x = v->valuedouble;
        if (x > 0x1p53 || x < -0x1p53)
            tl_draft_fail(d, d->st_bad,
                          "a number of an enum or const is past 2^53, beyond which not all numbers can be told apart");
        else if (x == (double)(int64_t)x)
            snprintf(text, sizeof(text), "%lld", (long long)x);
        else
            for (int digits = 15; digits <= 17; digits++) { /* the shortest that reads back as the same */
                snprintf(text, sizeof(text), "%.*g", digits, x);
                if (strtod(text, NULL) == x)
                    break;
            }
    } else {
        snprintf(text, sizeof(text), "%s", cJSON_IsNull(v) ? "null" : cJSON_IsTrue(v) ? "true" : "false");
    }
    tl_draft_add_word(d, text, strlen(text));
}

/* Nests as deep as the JSON text, which tl_json_parse bounds. */
uint32_t tl_json_const(struct tl_json_writer *w, const struct cJSON *v)
{
    struct tl_draft *d = w->d;
    bool object = cJSON_IsObject(v);
    uint32_t first = d->words.n, list;
    TL_VEC(uint32_t) members = {0};
    const cJSON *kid;

    if (!object && !cJSON_IsArray(v)) {
        tl_json_add_scalar(d, v);
        return tl_draft_words(d, first);
    }
    cJSON_ArrayForEach(kid, v)
    {
        uint32_t member = tl_json_const(w, kid);
        if (object)
            member = cat(d, tl_json_key(w, kid->string), member, 0);
        if (!TL_VEC_ROOM(&members, 2)) {
            tl_draft_no_memory(d);
            break;
        }
        members.at[members.n++] = member;
        members.at[members.n++] = 1;
    }
    list = tl_draft_list(d, tl_json_comma(w), 0, 0, members.at, members.n / 2, false);
    list = tl_json_bracketed(w, object ? "{" : "[", list, members.n > 0, members.n == 0, object ? "}" : "]");
    tl_free(members.at);
    return list;
}
