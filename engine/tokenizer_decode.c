/* Ids to text. What a file's decoder does to each token is done once, when the tokenizer opens: every token has a piece of
 * raw bytes. Decoding then only joins pieces, strips blanks at the start and repairs invalid UTF-8. */
#include "tokenizer_impl.h"

#include "mem.h"
#include "tokenizer_utf8.h"

#include <string.h>

/* ---- pieces ------------------------------------------------------------------------------------------------------ */

/* Byte-level text shows printable Latin-1 as itself and gives the other bytes, in order, the characters from U+0100 on. */
static bool shown_as_itself(unsigned c) { return (c >= 0x21 && c <= 0x7E) || (c >= 0xA1 && c <= 0xFF && c != 0xAD); }

uint32_t tl_tk_byte_char(unsigned char byte)
{
    if (shown_as_itself(byte))
        return byte;
    if (byte <= 0x20)
        return 0x100u + byte;
    return byte <= 0xA0 ? 0x100u + 0x21 + (byte - 0x7Fu) : 0x143; /* 7F..A0, then AD */
}

static int char_byte(uint32_t cp)
{
    if (cp < 0x100)
        return shown_as_itself(cp) ? (int)cp : -1;
    if (cp <= 0x120)
        return (int)(cp - 0x100);
    return cp <= 0x142 ? (int)(cp - 0x121 + 0x7F) : cp == 0x143 ? 0xAD : -1;
}

/* A text with any other character in it stands for itself. */
static enum tl_status from_byte_level(const char *s, size_t n, struct tl_tk_buf *out, struct tl_error *err)
{
    enum tl_status st = tl_tk_buf_reserve(out, n, err);
    size_t before = out->n;
    for (size_t i = 0; i < n && st == TL_OK;) {
        int len, byte = char_byte(tl_utf8_get(s + i, &len));
        if (byte < 0) {
            out->n = before;
            return tl_tk_buf_add(out, s, n, err);
        }
        out->p[out->n++] = (char)byte;
        i += (size_t)len;
    }
    return st;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* "<0x0A>" is the byte 0A. */
static enum tl_status from_byte_fallback(const char *s, size_t n, struct tl_tk_buf *out, struct tl_error *err)
{
    if (n == 6 && memcmp(s, "<0x", 3) == 0 && s[5] == '>' && hex_digit(s[3]) >= 0 && hex_digit(s[4]) >= 0) {
        char byte = (char)(hex_digit(s[3]) * 16 + hex_digit(s[4]));
        return tl_tk_buf_add(out, &byte, 1, err);
    }
    return tl_tk_buf_add(out, s, n, err);
}

static enum tl_status strip(const struct tl_tk_decoder *d, const char *s, size_t n, struct tl_tk_buf *out,
                            struct tl_error *err)
{
    size_t c = d->content_bytes;
    for (int i = 0; i < d->start && n >= c && memcmp(s, d->content, c) == 0; i++) {
        s += c;
        n -= c;
    }
    for (int i = 0; i < d->stop && n >= c && memcmp(s + n - c, d->content, c) == 0; i++)
        n -= c;
    return tl_tk_buf_add(out, s, n, err);
}

enum tl_status tl_tk_make_pieces(struct tl_tokenizer *tk, struct tl_error *err)
{
    struct tl_tk_search search = {0};
    struct tl_tk_buf buf[2] = {{0}};
    enum tl_status st = tl_tk_buf_reserve(&tk->pieces, tk->texts.n, err);
    for (int32_t id = 0; id < tk->n_tokens && st == TL_OK; id++) {
        struct tl_tk_token *t = &tk->tokens[id];
        const char *s = tk->texts.p + t->text;
        size_t n = t->text_bytes;
        for (int k = 0; k < tk->n_decoders && st == TL_OK && t->flags & TL_TK_PRESENT; k++) {
            const struct tl_tk_decoder *d = &tk->decoders[k];
            struct tl_tk_buf *out = &buf[k & 1];
            out->n = 0;
            if (d->kind == TL_TK_DEC_REPLACE)
                st = tl_tk_replace(&search, &d->pattern, d->content, d->content_bytes, s, n, out, err);
            else if (d->kind == TL_TK_DEC_STRIP)
                st = strip(d, s, n, out, err);
            else if (d->kind == TL_TK_DEC_BYTE_FALLBACK)
                st = from_byte_fallback(s, n, out, err);
            else if (t->flags & TL_TK_ADDED) /* its text is not byte-level text */
                st = tl_tk_buf_add(out, s, n, err);
            else
                st = from_byte_level(s, n, out, err);
            s = out->p ? out->p : "";
            n = out->n;
        }
        t->piece = (uint32_t)tk->pieces.n;
        t->piece_bytes = (uint32_t)n;
        if (n > tk->piece_bytes_max)
            tk->piece_bytes_max = n;
        if (st == TL_OK)
            st = tl_tk_buf_add(&tk->pieces, s, n, err);
    }
    tl_free(buf[0].p);
    tl_free(buf[1].p);
    tl_tk_search_free(&search);
    return st;
}

/* ---- streaming --------------------------------------------------------------------------------------------------- */

enum tl_status tl_detok_init(struct tl_detok *d, const struct tl_tokenizer *tk, const struct tl_detok_params *params,
                             struct tl_error *err)
{
    /* Every byte of a piece, and the character held before it, may become U+FFFD of three bytes. */
    size_t cap = 3 * (tk->piece_bytes_max + 1);
    memset(d, 0, sizeof(*d));
    d->tk = tk;
    if (params)
        d->params = *params;
    d->n_strip = d->params.mid_text ? 0 : tk->n_strip;
    d->out = tl_malloc(cap);
    return d->out ? TL_OK : tl_fail_host_memory(err, cap);
}

void tl_detok_free(struct tl_detok *d)
{
    if (!d)
        return;
    tl_free(d->out);
    memset(d, 0, sizeof(*d));
}

static size_t put_replacement(char *out)
{
    memcpy(out, "\xEF\xBF\xBD", 3);
    return 3;
}

/* Append byte to the held character; returns the bytes written to out. */
static size_t feed(struct tl_detok *d, unsigned char byte, char *out)
{
    size_t n = 0;
    int r = tl_utf8_step(d->held, d->n_held, byte);
    if (r < 0 && d->n_held > 0) { /* what was held can never be completed; the byte may begin a new character */
        n = put_replacement(out);
        d->n_held = 0;
        r = tl_utf8_step(d->held, 0, byte);
    }
    if (r < 0)
        return n + put_replacement(out + n);
    d->held[d->n_held++] = byte;
    if (r == 1) {
        memcpy(out + n, d->held, (size_t)d->n_held);
        n += (size_t)d->n_held;
        d->n_held = 0;
    }
    return n;
}

/* Decode one token to out, which has room. false: no such id. */
static bool decode_token(struct tl_detok *d, int32_t id, char *out, size_t *n_out)
{
    const char *s;
    size_t n;
    *n_out = 0;
    if (!tl_tokenizer_piece(d->tk, id, &s, &n))
        return false;
    if (!d->params.keep_special && tl_tokenizer_is_special(d->tk, id))
        return true;
    for (; d->n_strip > 0 && n > 0; d->n_strip--) {
        if (*s != ' ') {
            d->n_strip = 0;
            break;
        }
        s++;
        n--;
    }
    for (size_t i = 0; i < n; i++)
        *n_out += feed(d, (unsigned char)s[i], out + *n_out);
    return true;
}

static enum tl_status no_such_token(const struct tl_tokenizer *tk, int32_t id, struct tl_error *err)
{
    enum tl_status st = tl_fail(err, TL_ERR_TOKEN_OUT_OF_VOCAB,
                                "the tokenizer has no token %d, its vocabulary size is %d", (int)id, (int)tk->n_tokens);
    tl_error_num(err, "value", id);
    tl_error_num(err, "vocab_size", tk->n_tokens);
    return st;
}

enum tl_status tl_detok_push(struct tl_detok *d, int32_t id, const char **text, size_t *n_bytes, struct tl_error *err)
{
    *text = d->out;
    return decode_token(d, id, d->out, n_bytes) ? TL_OK : no_such_token(d->tk, id, err);
}

void tl_detok_flush(struct tl_detok *d, const char **text, size_t *n_bytes)
{
    *text = d->out;
    *n_bytes = d->n_held > 0 ? put_replacement(d->out) : 0;
    d->n_held = 0;
}

enum tl_status tl_tokenizer_decode(const struct tl_tokenizer *tk, const int32_t *ids, size_t n,
                                   const struct tl_detok_params *params, char **text, size_t *n_bytes,
                                   struct tl_error *err)
{
    struct tl_detok d;
    struct tl_tk_buf out = {0};
    const char *part;
    size_t part_bytes;
    enum tl_status st = tl_detok_init(&d, tk, params, err);
    *text = NULL;
    *n_bytes = 0;
    for (size_t i = 0; i < n && st == TL_OK; i++) {
        st = tl_detok_push(&d, ids[i], &part, &part_bytes, err);
        if (st == TL_OK)
            st = tl_tk_buf_add(&out, part, part_bytes, err);
        else
            tl_error_num(err, "index", (int64_t)i);
    }
    if (st == TL_OK) {
        tl_detok_flush(&d, &part, &part_bytes);
        st = tl_tk_buf_add(&out, part, part_bytes, err);
    }
    if (st == TL_OK) {
        *n_bytes = out.n;
        st = tl_tk_buf_add(&out, "", 1, err);
    }
    if (st == TL_OK) {
        *text = out.p;
        out.p = NULL;
    } else {
        *n_bytes = 0;
    }
    tl_free(out.p);
    tl_detok_free(&d);
    return st;
}
