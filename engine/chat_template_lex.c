/* Text outside tags comes whole, after whitespace control: a '-' beside a tag takes all blanks there; else a block tag or a
 * comment alone on its line leaves nothing of that line (lstrip_blocks, trim_blocks). */
#include "chat_template_impl.h"

#include <stdlib.h>
#include <string.h>

#include "tokenizer_utf8.h"

static bool is_alpha(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
static bool is_digit(char c) { return c >= '0' && c <= '9'; }
static bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

static char at(const struct tl_ct_lexer *lx, size_t i) { return i < lx->n ? lx->s[i] : '\0'; }
static bool here(const struct tl_ct_lexer *lx, size_t i, const char *what)
{
    size_t n = strlen(what);
    return lx->n - i >= n && memcmp(lx->s + i, what, n) == 0;
}

static void move_to(struct tl_ct_lexer *lx, size_t to)
{
    for (; lx->pos < to; lx->pos++)
        lx->line += lx->s[lx->pos] == '\n';
}

static enum tl_status bad(const struct tl_ct_lexer *lx, const char *what)
{
    return tl_fail(lx->err, TL_ERR_BAD_FILE, "line %d of the chat template: %s", lx->line, what);
}

/* After a tag that ends at i with the given sign before it. */
static void leave_tag(struct tl_ct_lexer *lx, size_t i, char sign, bool trims_newline)
{
    if (sign == '-')
        while (is_blank(at(lx, i)))
            i++;
    else if (trims_newline && sign != '+' && at(lx, i) == '\n')
        i++;
    move_to(lx, i);
    lx->line_starting = i > 0 && lx->s[i - 1] == '\n';
}

static enum tl_status skip_comment(struct tl_ct_lexer *lx)
{
    size_t i = lx->pos + 2;
    while (i < lx->n && !here(lx, i, "#}"))
        i++;
    if (i >= lx->n)
        return bad(lx, "a comment has no end");
    char sign = i > lx->pos + 2 ? lx->s[i - 1] : '\0';
    leave_tag(lx, i + 2, sign, true);
    return TL_OK;
}

/* Text up to the next tag; empty pieces are possible. */
static enum tl_status data(struct tl_ct_lexer *lx, struct tl_ct_token *out)
{
    size_t start = lx->pos, i = start, end;
    while (i < lx->n && !here(lx, i, "{{") && !here(lx, i, "{%") && !here(lx, i, "{#"))
        i++;
    end = i;
    out->kind = TL_CT_DATA;
    out->line = lx->line;
    out->s = lx->s + start;
    if (i < lx->n) {
        char sign = at(lx, i + 2);
        if (sign == '-') {
            while (end > start && is_blank(lx->s[end - 1]))
                end--;
        } else if (sign != '+' && lx->s[i + 1] != '{') {
            size_t line = end;
            while (line > start && is_blank(lx->s[line - 1]) && lx->s[line - 1] != '\n')
                line--;
            if (line > start ? lx->s[line - 1] == '\n' : lx->line_starting)
                end = line;
        }
    }
    out->n = end - start;
    move_to(lx, i);
    return TL_OK;
}

static enum tl_status open_tag(struct tl_ct_lexer *lx, struct tl_ct_token *out)
{
    bool var = lx->s[lx->pos + 1] == '{';
    char sign = at(lx, lx->pos + 2);
    out->kind = var ? TL_CT_VAR_BEGIN : TL_CT_BLOCK_BEGIN;
    out->line = lx->line;
    lx->state = var ? TL_CT_IN_VAR : TL_CT_IN_BLOCK;
    lx->depth = 0;
    lx->pos += sign == '-' || (sign == '+' && !var) ? 3 : 2;
    return TL_OK;
}

static int hex(const char *s, int n)
{
    int v = 0;
    for (int i = 0; i < n; i++) {
        char c = s[i];
        int d = is_digit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (d < 0)
            return -1;
        v = v * 16 + d;
    }
    return v;
}

/* One escape at s[i] == '\\'; appends to dst and returns the bytes read. An unknown one stands for itself. */
static size_t escape(const struct tl_ct_lexer *lx, size_t i, size_t end, char *dst, size_t *n)
{
    static const char from[] = "nrtabfv\\'\"", to[] = "\n\r\t\a\b\f\v\\'\"";
    char c = lx->s[i + 1];
    const char *known = strchr(from, c);
    int digits = c == 'x' ? 2 : c == 'u' ? 4 : 0, v = -1;
    if (known && c) {
        dst[(*n)++] = to[known - from];
        return 2;
    }
    if (c == '\n')
        return 2;
    if (digits && i + 2 + (size_t)digits <= end)
        v = hex(lx->s + i + 2, digits);
    if (v >= 0 && !(v >= 0xD800 && v < 0xE000)) {
        *n += (size_t)tl_utf8_put((uint32_t)v, dst + *n);
        return 2 + (size_t)digits;
    }
    dst[(*n)++] = '\\';
    return 1;
}

static enum tl_status string(struct tl_ct_lexer *lx, struct tl_ct_token *out)
{
    char quote = lx->s[lx->pos];
    size_t i = lx->pos + 1, end = i, n = 0;
    char *dst = lx->strings + lx->strings_used;
    while (end < lx->n && lx->s[end] != quote)
        end += lx->s[end] == '\\' ? 2 : 1;
    if (end >= lx->n)
        return bad(lx, "a string has no end");
    while (i < end) {
        if (lx->s[i] == '\\')
            i += escape(lx, i, end, dst, &n);
        else
            dst[n++] = lx->s[i++];
    }
    out->kind = TL_CT_STRING;
    out->s = dst;
    out->n = n;
    lx->strings_used += n;
    move_to(lx, end + 1);
    return TL_OK;
}

static enum tl_status number(struct tl_ct_lexer *lx, struct tl_ct_token *out)
{
    char text[32];
    size_t i = lx->pos, n;
    bool fraction = false;
    while (is_digit(at(lx, i)))
        i++;
    if (at(lx, i) == '.' && is_digit(at(lx, i + 1))) {
        fraction = true;
        for (i++; is_digit(at(lx, i)); i++)
            ;
    }
    n = i - lx->pos;
    if (n > 18 || is_alpha(at(lx, i)))
        return bad(lx, "a number is too long or not a plain decimal one");
    memcpy(text, lx->s + lx->pos, n);
    text[n] = '\0';
    out->kind = fraction ? TL_CT_FLOAT : TL_CT_INT;
    out->i = strtoll(text, NULL, 10);
    out->f = strtod(text, NULL);
    lx->pos = i;
    return TL_OK;
}

static enum tl_status operator(struct tl_ct_lexer *lx, struct tl_ct_token *out) {
    static const char *const two[] = {"==", "!=", "<=", ">=", "//", "**"}; char c = lx->s[lx->pos]; size_t n = 1;
    for (size_t i = 0; i < sizeof(two) / sizeof(two[0]); i++) if (here(lx, lx->pos, two[i])) n = 2;
    if (n == 1 && (!c || !strchr("+-*/%=<>()[]{},.:|~", c))) return bad(lx, "a character that no expression has");
    if (strchr("([{", c)) lx->depth++;
    if (strchr(")]}", c)) lx->depth--;
    if (lx->depth > TL_CT_DEPTH_MAX) return bad(lx, "brackets are nested too deep");
    out->kind = TL_CT_OP;
    memcpy(out->op, lx->s + lx->pos, n);
    lx->pos += n;
    return TL_OK;
}

/* Inside a tag. */
static enum tl_status inside(struct tl_ct_lexer *lx, struct tl_ct_token *out)
{
    const char *close = lx->state == TL_CT_IN_VAR ? "}}" : "%}";
    while (is_blank(at(lx, lx->pos)) && lx->pos < lx->n)
        move_to(lx, lx->pos + 1);
    out->line = lx->line;
    if (lx->pos >= lx->n)
        return bad(lx, "a tag has no end");
    char c = lx->s[lx->pos], sign = c == '-' || (c == '+' && lx->state == TL_CT_IN_BLOCK) ? c : '\0';
    if (lx->depth <= 0 && here(lx, lx->pos + (sign != 0), close)) {
        out->kind = lx->state == TL_CT_IN_VAR ? TL_CT_VAR_END : TL_CT_BLOCK_END;
        leave_tag(lx, lx->pos + 2 + (sign != 0), sign, lx->state == TL_CT_IN_BLOCK);
        lx->state = TL_CT_IN_DATA;
        return TL_OK;
    }
    if (c == '\'' || c == '"')
        return string(lx, out);
    if (is_digit(c))
        return number(lx, out);
    if (!is_alpha(c))
        return operator(lx, out);
    out->kind = TL_CT_NAME;
    out->s = lx->s + lx->pos;
    while (is_alpha(at(lx, lx->pos)) || is_digit(at(lx, lx->pos)))
        lx->pos++;
    out->n = (size_t)(lx->s + lx->pos - out->s);
    return TL_OK;
}

enum tl_status tl_ct_next(struct tl_ct_lexer *lx, struct tl_ct_token *out)
{
    memset(out, 0, sizeof(*out));
    out->line = lx->line;
    if (lx->state != TL_CT_IN_DATA)
        return inside(lx, out);
    while (lx->pos < lx->n && here(lx, lx->pos, "{#")) {
        enum tl_status st = skip_comment(lx);
        if (st != TL_OK)
            return st;
    }
    if (lx->pos >= lx->n)
        return TL_OK; /* END */
    if (here(lx, lx->pos, "{{") || here(lx, lx->pos, "{%"))
        return open_tag(lx, out);
    return data(lx, out);
}
