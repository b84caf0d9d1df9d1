/* Text to ids. The text is cut by added tokens, normalized, cut again by added tokens that are looked for in normalized
 * text, and each piece then goes depth first through the pre-tokenizers: stage k cuts its piece into smaller ones and hands
 * each to stage k + 1, the last one to BPE. No list of pieces is ever stored; a stage that changes its piece writes it to a
 * buffer of its own, which is in use until the piece is done. */
#include "tokenizer_impl.h"

#include "mem.h"
#include "tokenizer_utf8.h"

#include <string.h>
#include <utf8proc.h>

struct encoder {
    const struct tl_tokenizer *tk;
    bool parse_special;
    const char *text; /* as it came, for plain */
    const unsigned char *plain;
    struct tl_tk_search search;
    struct tl_tk_bpe bpe;
    struct tl_tk_buf normal[2];                  /* normalizers write by turns */
    struct tl_tk_buf prepared[TL_TK_STAGES_MAX]; /* by stage: the piece with its blanks replaced or prepended */
    struct tl_tk_buf mapped[TL_TK_STAGES_MAX];   /* by stage: a part of it in byte-level characters */
    struct tl_tk_ids ids;
    struct tl_error *err;
};

/* first: the piece begins where the whole text begins. */
static enum tl_status run_stage(struct encoder *e, int k, const char *s, size_t n, bool first);

/* ---- pre-tokenizers ---------------------------------------------------------------------------------------------- */

static char blank_text[] = " ";
static const struct tl_tk_pattern blank = {.kind = TL_TK_LITERAL, .literal = blank_text, .literal_bytes = 1};

static bool begins_with(const char *s, size_t n, const char *with, size_t with_bytes)
{
    return n >= with_bytes && memcmp(s, with, with_bytes) == 0;
}

/* The piece as stage k wants it: *s and *n may move to its buffer. */
static enum tl_status prepare(struct encoder *e, int k, const char **s, size_t *n, bool first)
{
    const struct tl_tk_stage *stage = &e->tk->stages[k];
    const struct tl_tk_pattern *mark = stage->kind == TL_TK_METASPACE ? &stage->pattern : &blank;
    struct tl_tk_buf *buf = &e->prepared[k];
    bool prepend = stage->prepend == TL_TK_PREPEND_ALWAYS || (stage->prepend == TL_TK_PREPEND_FIRST && first);
    enum tl_status st = TL_OK;
    if (begins_with(*s, *n, " ", 1) || begins_with(*s, *n, mark->literal, mark->literal_bytes))
        prepend = false;
    if (!prepend && stage->kind != TL_TK_METASPACE)
        return TL_OK;
    buf->n = 0;
    if (prepend)
        st = tl_tk_buf_add(buf, mark->literal, mark->literal_bytes, e->err);
    if (st == TL_OK && stage->kind == TL_TK_METASPACE)
        st = tl_tk_replace(&e->search, &blank, mark->literal, mark->literal_bytes, *s, *n, buf, e->err);
    else if (st == TL_OK)
        st = tl_tk_buf_add(buf, *s, *n, e->err);
    *s = buf->p;
    *n = buf->n;
    return st;
}

/* Stage k is done with a part of its piece. */
static enum tl_status emit(struct encoder *e, int k, const char *s, size_t n, bool first)
{
    struct tl_tk_buf *buf = &e->mapped[k];
    enum tl_status st;
    if (n == 0 || e->tk->stages[k].kind != TL_TK_BYTE_LEVEL)
        return n == 0 ? TL_OK : run_stage(e, k + 1, s, n, first);
    buf->n = 0;
    st = tl_tk_buf_reserve(buf, 2 * n, e->err);
    if (st != TL_OK)
        return st;
    for (size_t i = 0; i < n; i++)
        buf->n += (size_t)tl_utf8_put(tl_tk_byte_char((unsigned char)s[i]), buf->p + buf->n);
    return run_stage(e, k + 1, buf->p, buf->n, first);
}

/* Matches and the gaps between them arrive in order. Each either joins the part that is held back or replaces it. */
struct splitter {
    struct encoder *e;
    int k;
    const char *s;
    bool first, held, last_match;
    size_t start, end; /* of the held part */
};

static enum tl_status part_done(struct splitter *sp)
{
    if (!sp->held)
        return TL_OK;
    sp->held = false;
    return emit(sp->e, sp->k, sp->s + sp->start, sp->end - sp->start, sp->first && sp->start == 0);
}

static enum tl_status split_event(struct splitter *sp, size_t start, size_t end, bool match)
{
    const struct tl_tk_stage *stage = &sp->e->tk->stages[sp->k];
    bool last, join = false, keep = true;
    enum tl_status st = TL_OK;
    match ^= stage->invert;
    last = sp->last_match;
    sp->last_match = match;
    switch (stage->behavior) {
    case TL_TK_ISOLATED: break;
    case TL_TK_REMOVED: keep = !match; break;
    case TL_TK_MERGED_WITH_PREVIOUS: join = match && !last; break;
    case TL_TK_MERGED_WITH_NEXT: join = last && !match; break;
    case TL_TK_CONTIGUOUS: join = match == last; break;
    }
    if (join && sp->held) {
        sp->end = end;
        return TL_OK;
    }
    st = part_done(sp);
    sp->held = keep;
    sp->start = start;
    sp->end = end;
    return st;
}

static enum tl_status split(struct encoder *e, int k, const char *s, size_t n, bool first)
{
    struct splitter sp = {.e = e, .k = k, .s = s, .first = first};
    size_t from = 0, done = 0, start, end;
    bool found, any = false;
    enum tl_status st = TL_OK;
    while (st == TL_OK && from <= n) {
        st = tl_tk_search_next(&e->search, &e->tk->stages[k].pattern, s, n, from, &found, &start, &end, e->err);
        if (st != TL_OK || !found)
            break;
        if (start == end && any && end == done) { /* no empty match right after a match: look from the next character */
            int len = 1;
            if (from < n)
                tl_utf8_get(s + from, &len);
            from += (size_t)len;
            continue;
        }
        if (done != start)
            st = split_event(&sp, done, start, false);
        if (st == TL_OK)
            st = split_event(&sp, start, end, true);
        any = true;
        from = done = end;
    }
    if (st == TL_OK && done != n)
        st = split_event(&sp, done, n, false);
    return st == TL_OK ? part_done(&sp) : st;
}

static enum tl_status run_stage(struct encoder *e, int k, const char *s, size_t n, bool first)
{
    enum tl_status st;
    if (k == e->tk->n_stages)
        return tl_tk_bpe_run(&e->bpe, e->tk, s, n, &e->ids, e->err);
    st = prepare(e, k, &s, &n, first);
    if (st != TL_OK)
        return st;
    return e->tk->stages[k].has_split ? split(e, k, s, n, first) : emit(e, k, s, n, first);
}

/* ---- normalizers ------------------------------------------------------------------------------------------------- */

enum tl_status tl_tk_replace(struct tl_tk_search *search, const struct tl_tk_pattern *p, const char *content,
                             size_t content_bytes, const char *s, size_t n, struct tl_tk_buf *out, struct tl_error *err)
{
    size_t from = 0, done = 0, start, end;
    bool found, any = false;
    enum tl_status st = TL_OK;
    while (st == TL_OK && from <= n) {
        st = tl_tk_search_next(search, p, s, n, from, &found, &start, &end, err);
        if (st != TL_OK || !found)
            break;
        if (start == end && any && end == done) {
            int len = 1;
            if (from < n)
                tl_utf8_get(s + from, &len);
            from += (size_t)len;
            continue;
        }
        st = tl_tk_buf_add(out, s + done, start - done, err);
        if (st == TL_OK)
            st = tl_tk_buf_add(out, content, content_bytes, err);
        any = true;
        from = done = end;
    }
    return st == TL_OK ? tl_tk_buf_add(out, s + done, n - done, err) : st;
}

static int combining_class(int32_t cp) { return utf8proc_get_property(cp)->combining_class; }

/* Put each run of combining marks into canonical order: a stable counting sort, because a run may be the whole text. */
static void order_marks(int32_t *cp, size_t n, int32_t *scratch)
{
    for (size_t i = 0; i < n;) {
        size_t count[257] = {0}, end = i;
        if (combining_class(cp[i]) == 0) {
            i++;
            continue;
        }
        for (; end < n && combining_class(cp[end]) != 0; end++)
            count[combining_class(cp[end]) + 1]++;
        if (end - i > 1) {
            for (int k = 1; k < 257; k++)
                count[k] += count[k - 1];
            for (size_t k = i; k < end; k++)
                scratch[count[combining_class(cp[k])]++] = cp[k];
            memcpy(cp + i, scratch, (end - i) * sizeof(*cp));
        }
        i = end;
    }
}

enum tl_status tl_tk_nfc(const char *s, size_t n, struct tl_tk_buf *out, struct tl_error *err)
{
    int32_t *cp = NULL, *scratch = NULL;
    size_t i = 0, count = 0, cap;
    int boundclass = 0;
    enum tl_status st;
    /* Nothing below U+0300 combines or changes. */
    while (i < n && (unsigned char)s[i] < 0xCC)
        i++;
    if (i == n)
        return tl_tk_buf_add(out, s, n, err);
    /* The longest canonical decomposition per byte: four characters of a two-byte one (U+01D5 has three). */
    cap = 2 * n + 4;
    cp = tl_array(cap, sizeof(*cp));
    scratch = tl_array(cap, sizeof(*scratch));
    st = cp && scratch ? TL_OK : tl_fail_host_memory(err, cap * sizeof(*cp));
    for (i = 0; i < n && st == TL_OK;) {
        int len;
        uint32_t c = tl_utf8_get(s + i, &len);
        utf8proc_ssize_t k = utf8proc_decompose_char((int32_t)c, cp + count, (utf8proc_ssize_t)(cap - count),
                                                     UTF8PROC_STABLE | UTF8PROC_DECOMPOSE, &boundclass);
        if (k < 0 || (size_t)k > cap - count)
            st = tl_fail(err, TL_ERR_INTERNAL, "U+%04X has a decomposition that is too long", (unsigned)c);
        else
            count += (size_t)k;
        i += (size_t)len;
    }
    if (st == TL_OK) {
        utf8proc_ssize_t k;
        order_marks(cp, count, scratch);
        k = utf8proc_normalize_utf32(cp, (utf8proc_ssize_t)count, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
        count = k < 0 ? 0 : (size_t)k;
        st = k < 0 ? tl_fail(err, TL_ERR_INTERNAL, "%s", utf8proc_errmsg(k)) : tl_tk_buf_reserve(out, 4 * count, err);
    }
    for (i = 0; i < count && st == TL_OK; i++)
        out->n += (size_t)tl_utf8_put((uint32_t)cp[i], out->p + out->n);
    tl_free(cp);
    tl_free(scratch);
    return st;
}

static enum tl_status normalize(const struct tl_tokenizer *tk, struct tl_tk_search *search, struct tl_tk_buf buf[2],
                                const char **s, size_t *n, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    for (int k = 0; k < tk->n_normalizers && st == TL_OK; k++) {
        const struct tl_tk_normalizer *nz = &tk->normalizers[k];
        struct tl_tk_buf *out = &buf[k & 1];
        out->n = 0;
        switch (nz->kind) {
        case TL_TK_NFC: st = tl_tk_nfc(*s, *n, out, err); break;
        case TL_TK_PREPEND:
            if (*n > 0)
                st = tl_tk_buf_add(out, nz->content, nz->content_bytes, err);
            if (st == TL_OK)
                st = tl_tk_buf_add(out, *s, *n, err);
            break;
        case TL_TK_REPLACE:
            st = tl_tk_replace(search, &nz->pattern, nz->content, nz->content_bytes, *s, *n, out, err);
            break;
        }
        *s = out->p ? out->p : "";
        *n = out->n;
    }
    return st;
}

enum tl_status tl_tk_normalize_once(const struct tl_tokenizer *tk, const char *s, size_t n, struct tl_tk_buf *out,
                                    struct tl_error *err)
{
    struct tl_tk_search search = {0};
    struct tl_tk_buf buf[2] = {{0}};
    enum tl_status st = normalize(tk, &search, buf, &s, &n, err);
    if (st == TL_OK)
        st = tl_tk_buf_add(out, s, n, err);
    tl_free(buf[0].p);
    tl_free(buf[1].p);
    tl_tk_search_free(&search);
    return st;
}

/* ---- added tokens ------------------------------------------------------------------------------------------------ */

/* The longest match that begins at s, or NULL. Matches are sorted, so those that agree with s so far are a range. */
static const struct tl_tk_added *match_at(const struct tl_tk_added_set *set, const char *s, size_t n)
{
    const struct tl_tk_added *best = NULL;
    size_t lo = 0, hi = set->n;
    for (size_t d = 0; d < n; d++) {
        unsigned char c = (unsigned char)s[d];
        size_t a = lo, b = hi, mid;
        while (a < b) { /* the first that is not below c at d; an ended one is below everything */
            mid = a + (b - a) / 2;
            if (set->v[mid].match_bytes <= d || (unsigned char)set->v[mid].match[d] < c)
                a = mid + 1;
            else
                b = mid;
        }
        lo = a;
        for (b = hi; a < b;) { /* the first above c */
            mid = a + (b - a) / 2;
            if ((unsigned char)set->v[mid].match[d] <= c)
                a = mid + 1;
            else
                b = mid;
        }
        hi = a;
        if (lo == hi)
            break;
        if (set->v[lo].match_bytes == d + 1) /* equal ones are sorted by their order: the first counts */
            best = &set->v[lo];
    }
    return best;
}

/* The character that ends at s + end; *len is its bytes. */
static uint32_t char_before(const char *s, size_t end, int *len)
{
    size_t i = end - 1;
    while (i > 0 && ((unsigned char)s[i] & 0xC0) == 0x80)
        i--;
    return tl_utf8_get(s + i, len);
}

static bool is_single_word(const char *s, size_t n, size_t start, size_t stop)
{
    int len;
    return (start == 0 || !tl_unicode_is_word(char_before(s, start, &len))) &&
           (stop == n || !tl_unicode_is_word(tl_utf8_get(s + stop, &len)));
}

/* May a special token be at s[start, stop)? Where normalizers have moved the bytes, plain text anywhere says no to all. */
static bool special_allowed(const struct encoder *e, const struct tl_tk_added_set *set, const char *s, size_t start,
                            size_t stop)
{
    if (!e->parse_special || !e->plain)
        return e->parse_special;
    return set == &e->tk->added && !memchr(e->plain + (s - e->text) + start, 1, stop - start);
}

/* Write the added tokens found in s and hand what lies between to text. */
static enum tl_status split_added(struct encoder *e, const struct tl_tk_added_set *set, const char *s, size_t n,
                                  bool first,
                                  enum tl_status (*text)(struct encoder *e, const char *s, size_t n, bool first))
{
    size_t done = 0;
    enum tl_status st = TL_OK;
    for (size_t pos = 0; pos < n && st == TL_OK;) {
        const struct tl_tk_added *a = set->first[(unsigned char)s[pos]] ? match_at(set, s + pos, n - pos) : NULL;
        size_t start = pos, stop;
        int len;
        if (!a) {
            pos++;
            continue;
        }
        pos = stop = start + a->match_bytes;
        /* Blanks that the token before has swallowed are gone. */
        if (start < done || (a->special && !special_allowed(e, set, s, start, stop)) ||
            (a->single_word && !is_single_word(s, n, start, stop)))
            continue;
        if (a->lstrip)
            while (start > done && tl_unicode_is_space(char_before(s, start, &len)))
                start -= (size_t)len;
        if (a->rstrip)
            while (stop < n && tl_unicode_is_space(tl_utf8_get(s + stop, &len)))
                stop += (size_t)len;
        if (start > done)
            st = text(e, s + done, start - done, first && done == 0);
        if (st == TL_OK)
            st = tl_tk_ids_add(&e->ids, a->id, e->err);
        done = stop;
    }
    if (st == TL_OK && done < n)
        st = text(e, s + done, n - done, first && done == 0);
    return st;
}

static enum tl_status normalized_text(struct encoder *e, const char *s, size_t n, bool first)
{
    return run_stage(e, 0, s, n, first);
}

static enum tl_status raw_text(struct encoder *e, const char *s, size_t n, bool first)
{
    enum tl_status st = normalize(e->tk, &e->search, e->normal, &s, &n, e->err);
    return st == TL_OK ? split_added(e, &e->tk->added_normalized, s, n, first, normalized_text) : st;
}

/* ---- the whole --------------------------------------------------------------------------------------------------- */

static enum tl_status add_all(struct encoder *e, const int32_t *ids, size_t n)
{
    enum tl_status st = TL_OK;
    for (size_t i = 0; i < n && st == TL_OK; i++)
        st = tl_tk_ids_add(&e->ids, ids[i], e->err);
    return st;
}

static enum tl_status check_text(const struct tl_encode_params *p, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    size_t good;
    if (p->text_bytes > TL_TOKENIZER_TEXT_BYTES_MAX)
        return tl_fail(err, TL_ERR_BAD_PARAM, "the text has %zu bytes, the tokenizer takes at most %u", p->text_bytes,
                       TL_TOKENIZER_TEXT_BYTES_MAX);
    good = tl_utf8_valid(p->text, p->text_bytes);
    if (good < p->text_bytes) {
        st = tl_fail(err, TL_ERR_BAD_PARAM, "the text is not valid UTF-8 at byte %zu (0x%02X)", good,
                     (unsigned)(unsigned char)p->text[good]);
        tl_error_num(err, "offset", (int64_t)good);
    }
    return st;
}

enum tl_status tl_tokenizer_encode(const struct tl_tokenizer *tk, const struct tl_encode_params *p, int32_t **ids,
                                   size_t *n_ids, struct tl_error *err)
{
    struct encoder e = {.tk = tk,
                        .parse_special = p->parse_special,
                        .text = p->text,
                        .plain = p->plain,
                        .ids.max = p->max_tokens,
                        .search.text_bytes = p->text_bytes,
                        .err = err};
    enum tl_status st;
    *ids = NULL;
    *n_ids = 0;
    st = check_text(p, err);
    if (st == TL_OK && p->add_special)
        st = add_all(&e, tk->prefix, tk->n_prefix);
    if (st == TL_OK)
        st = split_added(&e, &tk->added, p->text, p->text_bytes, true, raw_text);
    if (st == TL_OK && p->add_special)
        st = add_all(&e, tk->suffix, tk->n_suffix);
    if (st == TL_OK && !e.ids.v) {
        e.ids.v = tl_malloc(sizeof(*e.ids.v));
        st = e.ids.v ? TL_OK : tl_fail_host_memory(err, sizeof(*e.ids.v));
    }
    if (st == TL_OK) {
        *ids = e.ids.v;
        *n_ids = e.ids.n;
        e.ids.v = NULL;
    }
    tl_free(e.ids.v);
    tl_tk_bpe_free(&e.bpe);
    tl_tk_search_free(&e.search);
    for (int k = 0; k < 2; k++)
        tl_free(e.normal[k].p);
    for (int k = 0; k < TL_TK_STAGES_MAX; k++) {
        tl_free(e.prepared[k].p);
        tl_free(e.mapped[k].p);
    }
    return st;
}
