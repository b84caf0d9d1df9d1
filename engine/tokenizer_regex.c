/* Patterns of tokenizer files are written for Oniguruma (Ruby syntax). Most of them mean the same in PCRE2; this file
 * rewrites what does not and refuses, by name, what it cannot rewrite:
 *
 *   \s \S       White_Space, without U+180E that PCRE2 counts as a blank
 *   \w \W \b \B letters, marks, decimal digits, connectors; outside of a set Oniguruma also takes the small digits
 *               and fractions of Latin-1
 *   \p{Han}     a script, where PCRE2 would also take characters that other scripts share
 *   \uHHHH      \x{HHHH}
 *   {,n}        {0,n}
 *   ^ $         at every line: an option
 *   refused     sets in sets and && (literal in PCRE2), possessive or lazy counts ({2}+ means something else), \h, \K, \X,
 *               \g, \k, POSIX classes, (?m and (?x, bytes \xHH above 7F */
#include "tokenizer_impl.h"

#include "mem.h"
#include "tokenizer_utf8.h"

#include <ctype.h>
#include <string.h>

#define SPACE_SET     "\\t-\\r\\x{85}\\p{Z}"
#define WORD_IN_SET   "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}"
#define WORD_SET      WORD_IN_SET "\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}"
#define WORD_LEFT     "(?<=[" WORD_SET "])"
#define NO_WORD_LEFT  "(?<![" WORD_SET "])"
#define WORD_RIGHT    "(?=[" WORD_SET "])"
#define NO_WORD_RIGHT "(?![" WORD_SET "])"

struct translator {
    const char *src;
    size_t n, pos;
    bool in_set;
    struct tl_tk_buf *out;
    struct tl_error *err;
};

static enum tl_status refuse(const struct translator *t, const char *what)
{
    return tl_fail(t->err, TL_ERR_UNSUPPORTED, "the pattern '%.*s' uses %s (at byte %zu), which is not supported",
                   (int)(t->n < 100 ? t->n : 100), t->src, what, t->pos);
}

static enum tl_status put(struct translator *t, const char *s) { return tl_tk_buf_add(t->out, s, strlen(s), t->err); }

/* Copy n source bytes and step over them. */
static enum tl_status copy(struct translator *t, size_t n)
{
    enum tl_status st;
    if (n > t->n - t->pos)
        return tl_fail(t->err, TL_ERR_BAD_FILE, "the pattern '%.*s' ends too early", (int)(t->n < 100 ? t->n : 100),
                       t->src);
    st = tl_tk_buf_add(t->out, t->src + t->pos, n, t->err);
    t->pos += n;
    return st;
}

static char at(const struct translator *t, size_t ahead)
{
    return t->pos + ahead < t->n ? t->src[t->pos + ahead] : '\0';
}

/* \p{Name} or \P{Name}: one or two letters are a general category; a longer name is a script, but for two. */
static enum tl_status property(struct translator *t)
{
    size_t end = t->pos + 3, name;
    enum tl_status st;
    if (at(t, 2) != '{')
        return refuse(t, "\\p without {}");
    if (at(t, 3) == '^')
        end++;
    name = end;
    while (end < t->n && t->src[end] != '}')
        end++;
    if (end == t->n)
        return refuse(t, "\\p{ without an end");
    if (end - name <= 2 || (end - name == 10 && memcmp(t->src + name, "Alphabetic", 10) == 0) ||
        (end - name == 3 && memcmp(t->src + name, "Any", 3) == 0))
        return copy(t, end + 1 - t->pos);
    st = copy(t, name - t->pos);
    if (st == TL_OK)
        st = put(t, "sc:");
    return st == TL_OK ? copy(t, end + 1 - t->pos) : st;
}

static enum tl_status escaped(struct translator *t)
{
    char c = at(t, 1);
    char name[3] = {'\\', c, '\0'};
    const char *to = NULL;
    enum tl_status st;
    switch (c) {
    case 's': to = t->in_set ? SPACE_SET : "[" SPACE_SET "]"; break;
    case 'S': to = t->in_set ? "\\S\\x{180E}" : "[^" SPACE_SET "]"; break;
    case 'w': to = t->in_set ? WORD_IN_SET : "[" WORD_SET "]"; break;
    case 'W': to = t->in_set ? NULL : "[^" WORD_SET "]"; break;
    case 'b': to = t->in_set ? "\\x{08}" : "(?:" WORD_LEFT NO_WORD_RIGHT "|" NO_WORD_LEFT WORD_RIGHT ")"; break;
    case 'B': to = t->in_set ? NULL : "(?:" WORD_LEFT WORD_RIGHT "|" NO_WORD_LEFT NO_WORD_RIGHT ")"; break;
    case 'p':
    case 'P': return property(t);
    case 'u':
        st = put(t, "\\x{");
        t->pos += 2;
        if (st == TL_OK)
            st = copy(t, 4);
        return st == TL_OK ? put(t, "}") : st;
    case 'x':
        if (at(t, 2) != '{' && at(t, 2) > '7')
            return refuse(t, "\\x of a single byte above 7F");
        return copy(t, 2);
    case 'v': to = "\\x{0B}"; break; /* in PCRE2 any vertical blank */
    default:
        if (c == '\0' || (isalnum((unsigned char)c) && !strchr("tnrfaedD", c) && (t->in_set || !strchr("AzZG", c))))
            return refuse(t, name);
        return copy(t, 2); /* the same in both, or a sign that stands for itself, or the first byte of a character */
    }
    if (!to)
        return refuse(t, name);
    t->pos += 2;
    return put(t, to);
}

/* {n}, {n,}, {n,m}, {,m}; any other brace is a literal in both languages. */
static enum tl_status braces(struct translator *t)
{
    size_t i = 1, n_low, n_high = 0;
    bool comma, from_zero;
    enum tl_status st = TL_OK;
    while (at(t, i) >= '0' && at(t, i) <= '9')
        i++;
    n_low = i - 1;
    comma = at(t, i) == ',';
    if (comma)
        for (i++; at(t, i) >= '0' && at(t, i) <= '9'; i++)
            n_high++;
    if (at(t, i) != '}' || n_low + n_high == 0) {
        st = put(t, "\\{");
        t->pos++;
        return st;
    }
    if (at(t, i + 1) == '+' || (at(t, i + 1) == '?' && !comma))
        return refuse(t, "a count with + or ? after it");
    from_zero = n_low == 0;
    st = put(t, from_zero ? "{0" : "{");
    t->pos++;
    return st == TL_OK ? copy(t, i) : st;
}

/* After "(?": flags i only, or a known kind of group. */
static enum tl_status group(struct translator *t)
{
    size_t i = 2;
    if (strchr(":=!>", at(t, 2)) && at(t, 2))
        return copy(t, 3);
    if (at(t, 2) == '<' && (at(t, 3) == '=' || at(t, 3) == '!'))
        return copy(t, 4);
    while (at(t, i) == 'i' || at(t, i) == '-')
        i++;
    if (i == 2 || (at(t, i) != ':' && at(t, i) != ')'))
        return refuse(t, "a group of a kind other than (?: (?= (?! (?<= (?<! (?> (?i");
    return copy(t, i + 1);
}

static enum tl_status set_begin(struct translator *t)
{
    enum tl_status st = copy(t, at(t, 1) == '^' ? 2 : 1);
    t->in_set = true;
    if (at(t, 0) == ']')
        return refuse(t, "']' as the first of a set");
    return st;
}

static enum tl_status translate(struct translator *t)
{
    enum tl_status st = TL_OK;
    while (t->pos < t->n && st == TL_OK) {
        char c = at(t, 0);
        if (c == '\\')
            st = escaped(t);
        else if (t->in_set && c == '[')
            st = refuse(t, "a set in a set");
        else if (t->in_set && c == '&' && at(t, 1) == '&')
            st = refuse(t, "&& in a set");
        else if (t->in_set) {
            t->in_set = c != ']';
            st = copy(t, 1);
        } else if (c == '[')
            st = set_begin(t);
        else if (c == '{')
            st = braces(t);
        else if (c == '(' && at(t, 1) == '?')
            st = group(t);
        else if (c == '(' && at(t, 1) == '*')
            st = refuse(t, "(*");
        else
            st = copy(t, 1);
    }
    return st;
}

static void *gc_malloc(size_t bytes, void *arg)
{
    (void)arg;
    return tl_malloc(bytes);
}

static void gc_free(void *p, void *arg)
{
    (void)arg;
    tl_free(p);
}

enum tl_status tl_tk_regex_compile(pcre2_code **out, const char *regex, size_t bytes, bool no_jit, struct tl_error *err)
{
    /* ^ and $ match at line ends, as in Ruby; \C would look into characters. */
    const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C | PCRE2_NO_AUTO_CAPTURE;
    struct tl_tk_buf text = {0};
    struct translator t = {.src = regex, .n = bytes, .out = &text, .err = err};
    pcre2_general_context *gc = NULL;
    pcre2_compile_context *cc = NULL;
    pcre2_code *code = NULL;
    PCRE2_UCHAR why[128];
    PCRE2_SIZE where = 0;
    int rc = 0;
    enum tl_status st = translate(&t);
    if (st != TL_OK)
        goto out;
    st = TL_ERR_NO_HOST_MEMORY;
    gc = pcre2_general_context_create(gc_malloc, gc_free, NULL);
    cc = gc ? pcre2_compile_context_create(gc) : NULL;
    if (!cc) {
        tl_fail_host_memory(err, bytes);
        goto out;
    }
    pcre2_set_newline(cc, PCRE2_NEWLINE_LF);
    code = pcre2_compile((PCRE2_SPTR)(text.n ? text.p : ""), text.n, options, &rc, &where, cc);
    if (!code && rc == PCRE2_ERROR_HEAP_FAILED) {
        tl_fail_host_memory(err, bytes);
        goto out;
    }
    if (!code) {
        pcre2_get_error_message(rc, why, sizeof(why));
        st = tl_fail(err, TL_ERR_BAD_FILE, "the pattern '%.*s' cannot be compiled: %s",
                     (int)(bytes < 100 ? bytes : 100), regex, (const char *)why);
        goto out;
    }
    if (!no_jit)
        pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); /* if this machine forbids it, matching is interpreted */
    *out = code;
    st = TL_OK;
out:
    pcre2_compile_context_free(cc);
    pcre2_general_context_free(gc);
    tl_free(text.p);
    return st;
}

/* ---- search ------------------------------------------------------------------------------------------------------ */

void tl_tk_search_free(struct tl_tk_search *s)
{
    pcre2_match_data_free(s->data);
    pcre2_match_context_free(s->context);
}

static enum tl_status search_prepare(struct tl_tk_search *s, struct tl_error *err)
{
    pcre2_general_context *gc = pcre2_general_context_create(gc_malloc, gc_free, NULL);
    if (gc && !s->context)
        s->context = pcre2_match_context_create(gc);
    if (gc && !s->data)
        s->data = pcre2_match_data_create(1, gc);
    pcre2_general_context_free(gc);
    if (!s->context || !s->data)
        return tl_fail_host_memory(err, 1024);
    /* Enough for backtracking through the whole text a few times; a pattern that explodes is cut off. */
    pcre2_set_match_limit(s->context, 10000000u + 8u * (uint32_t)s->text_bytes);
    pcre2_set_heap_limit(s->context, 64 * 1024); /* KiB */
    return TL_OK;
}

static enum tl_status regex_next(struct tl_tk_search *s, const struct tl_tk_pattern *p, const char *text, size_t n,
                                 size_t from, bool *found, size_t *start, size_t *end, struct tl_error *err)
{
    const PCRE2_SIZE *range;
    PCRE2_UCHAR why[128];
    int rc;
    if (!s->data) {
        enum tl_status st = search_prepare(s, err);
        if (st != TL_OK)
            return st;
    }
    rc = pcre2_match(p->code, (PCRE2_SPTR)text, n, from, PCRE2_NO_UTF_CHECK, s->data, s->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter keeps its stack in the heap */
        rc = pcre2_match(p->code, (PCRE2_SPTR)text, n, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, s->data, s->context);
    *found = rc >= 0;
    if (rc >= 0) {
        range = pcre2_get_ovector_pointer(s->data);
        *start = range[0];
        *end = range[1];
    }
    if (rc >= 0 || rc == PCRE2_ERROR_NOMATCH)
        return TL_OK;
    if (rc == PCRE2_ERROR_NOMEMORY)
        return tl_fail_host_memory(err, n);
    pcre2_get_error_message(rc, why, sizeof(why));
    return tl_fail(err, TL_ERR_UNSUPPORTED, "a pattern of the tokenizer file cannot be matched to this text: %s",
                   (const char *)why);
}

enum tl_status tl_tk_search_next(struct tl_tk_search *s, const struct tl_tk_pattern *p, const char *text, size_t n,
                                 size_t from, bool *found, size_t *start, size_t *end, struct tl_error *err)
{
    *found = false;
    if (p->kind == TL_TK_REGEX)
        return regex_next(s, p, text, n, from, found, start, end, err);
    if (p->kind == TL_TK_LITERAL) {
        const char *hit = memmem(text + from, n - from, p->literal, p->literal_bytes);
        *found = hit != NULL;
        if (hit) {
            *start = (size_t)(hit - text);
            *end = *start + p->literal_bytes;
        }
        return TL_OK;
    }
    for (size_t i = from; i < n && !*found;) {
        int len;
        *found = tl_unicode_is_numeric(tl_utf8_get(text + i, &len));
        *start = i;
        i += (size_t)len;
        *end = i;
    }
    return TL_OK;
}
