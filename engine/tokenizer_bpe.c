/* Byte-pair encoding of one piece: symbols in a linked list, candidate merges in a heap ordered by (rank, position). One
 * piece may be the whole text, so every step is at most logarithmic: n symbols cost n log n. Words come again and again:
 * a small cache, one slot per hash, remembers their ids for the rest of the text. */
#include "tokenizer_impl.h"

#include "mem.h"
#include "tokenizer_utf8.h"

#include <string.h>

struct tl_tk_symbol {
    int32_t id;         /* -1 = swallowed by its left neighbour */
    int32_t prev, next; /* -1 = none */
};

#define WORDS           4096 /* slots of the cache */
#define WORDS_AFTER_IDS 512  /* a shorter text is not worth the memory */

struct tl_tk_word {
    uint32_t hash;
    uint8_t n_bytes, n_ids; /* n_bytes 0 = empty */
    char bytes[26];
    int32_t ids[8];
};

enum tl_status tl_tk_ids_add(struct tl_tk_ids *ids, int32_t id, struct tl_error *err)
{
    if (ids->max && ids->n == ids->max) {
        enum tl_status st = tl_fail(err, TL_ERR_CONTEXT_LENGTH, "the text has more than %zu tokens", ids->max);
        tl_error_num(err, "max_tokens", (int64_t)ids->max);
        return st;
    }
    if (ids->n == ids->cap) {
        size_t cap = ids->cap ? ids->cap * 2 : 64;
        int32_t *v = tl_realloc(ids->v, cap * sizeof(*v));
        if (!v)
            return tl_fail_host_memory(err, cap * sizeof(*v));
        ids->v = v;
        ids->cap = cap;
    }
    ids->v[ids->n++] = id;
    return TL_OK;
}

void tl_tk_bpe_free(struct tl_tk_bpe *b)
{
    tl_free(b->symbols);
    tl_free(b->heap);
    tl_free(b->words);
}

static enum tl_status reserve(struct tl_tk_bpe *b, size_t n, struct tl_error *err)
{
    struct tl_tk_symbol *symbols;
    uint64_t *heap;
    if (n <= b->cap)
        return TL_OK;
    n = n < 256 ? 256 : n;
    symbols = tl_realloc(b->symbols, n * sizeof(*symbols));
    if (!symbols)
        return tl_fail_host_memory(err, n * sizeof(*symbols));
    b->symbols = symbols;
    /* n - 1 candidates at first; a merge takes one out and puts at most two in, and there are at most n - 1 merges. */
    heap = tl_realloc(b->heap, 2 * n * sizeof(*heap));
    if (!heap)
        return tl_fail_host_memory(err, 2 * n * sizeof(*heap));
    b->heap = heap;
    b->cap = n;
    return TL_OK;
}

static int32_t char_id(const struct tl_tokenizer *tk, const char *s, int len, uint32_t cp)
{
    return cp < TL_TK_CHAR_IDS ? tk->char_ids[cp] : tl_tk_vocab_find(tk, s, (size_t)len);
}

/* One symbol per character, or per byte of a character that is not in the vocabulary. An unknown one is written when the
 * next known character arrives, so that a run of them can become one (fuse_unk). */
static size_t first_symbols(struct tl_tk_symbol *sym, const struct tl_tokenizer *tk, const char *s, size_t n)
{
    size_t count = 0;
    bool unk = false;
    for (size_t i = 0; i < n;) {
        int len;
        uint32_t cp = tl_utf8_get(s + i, &len);
        int32_t id = char_id(tk, s + i, len, cp);
        bool bytes = id < 0 && tk->byte_fallback;
        for (int k = 0; bytes && k < len; k++)
            bytes = tk->byte_ids[(unsigned char)s[i + (size_t)k]] >= 0;
        if (bytes) {
            for (int k = 0; k < len; k++)
                sym[count++].id = tk->byte_ids[(unsigned char)s[i + (size_t)k]];
        } else if (id >= 0) {
            if (unk)
                sym[count++].id = tk->unk_id;
            unk = false;
            sym[count++].id = id;
        } else if (tk->unk_id >= 0) {
            if (unk && !tk->fuse_unk)
                sym[count++].id = tk->unk_id;
            unk = true;
        }
        i += (size_t)len;
    }
    if (unk)
        sym[count++].id = tk->unk_id;
    for (size_t i = 0; i < count; i++) {
        sym[i].prev = (int32_t)i - 1;
        sym[i].next = i + 1 < count ? (int32_t)i + 1 : -1;
    }
    return count;
}

static void sift_down(uint64_t *heap, size_t n, size_t i)
{
    uint64_t v = heap[i];
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= v)
            break;
        heap[i] = heap[child];
    }
    heap[i] = v;
}

static void push(uint64_t *heap, size_t *n, uint64_t v)
{
    size_t i = (*n)++;
    for (; i > 0 && heap[(i - 1) / 2] > v; i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = v;
}

/* The candidate at symbol i and its right neighbour, if they merge. */
static bool candidate(const struct tl_tokenizer *tk, const struct tl_tk_symbol *sym, int32_t i, uint64_t *key)
{
    const struct tl_tk_merge *m;
    if (i < 0 || sym[i].next < 0)
        return false;
    m = tl_tk_merge_find(tk, sym[i].id, sym[sym[i].next].id);
    if (m)
        *key = (uint64_t)(uint32_t)m->rank << 32 | (uint32_t)i;
    return m != NULL;
}

static void merge_all(struct tl_tk_bpe *b, const struct tl_tokenizer *tk, size_t n)
{
    struct tl_tk_symbol *sym = b->symbols;
    uint64_t *heap = b->heap, key;
    size_t n_heap = 0;
    for (size_t i = 0; i + 1 < n; i++)
        if (candidate(tk, sym, (int32_t)i, &key))
            heap[n_heap++] = key;
    for (size_t i = n_heap / 2; i-- > 0;)
        sift_down(heap, n_heap, i);
    while (n_heap > 0) {
        int32_t at = (int32_t)(heap[0] & 0xFFFFFFFFu), right;
        int32_t rank = (int32_t)(heap[0] >> 32);
        const struct tl_tk_merge *m;
        heap[0] = heap[--n_heap];
        if (n_heap > 0)
            sift_down(heap, n_heap, 0);
        right = sym[at].next;
        if (sym[at].id < 0 || right < 0)
            continue;
        /* Out of date if a neighbour has merged meanwhile: then the pair is another one, with another rank. */
        m = tl_tk_merge_find(tk, sym[at].id, sym[right].id);
        if (!m || m->rank != rank)
            continue;
        sym[at].id = m->id;
        sym[at].next = sym[right].next;
        sym[right].id = -1;
        if (sym[right].next >= 0)
            sym[sym[right].next].prev = at;
        if (candidate(tk, sym, sym[at].prev, &key))
            push(heap, &n_heap, key);
        if (candidate(tk, sym, at, &key))
            push(heap, &n_heap, key);
    }
}

static enum tl_status encode_piece(struct tl_tk_bpe *b, const struct tl_tokenizer *tk, const char *s, size_t n,
                                   struct tl_tk_ids *ids, struct tl_error *err)
{
    enum tl_status st;
    size_t count;
    if (tk->ignore_merges) {
        int32_t id = tl_tk_vocab_find(tk, s, n);
        if (id >= 0)
            return tl_tk_ids_add(ids, id, err);
    }
    st = reserve(b, n, err);
    if (st != TL_OK)
        return st;
    count = first_symbols(b->symbols, tk, s, n);
    merge_all(b, tk, count);
    for (int32_t i = count > 0 ? 0 : -1; i >= 0 && st == TL_OK; i = b->symbols[i].next)
        st = tl_tk_ids_add(ids, b->symbols[i].id, err);
    return st;
}

enum tl_status tl_tk_bpe_run(struct tl_tk_bpe *b, const struct tl_tokenizer *tk, const char *s, size_t n,
                             struct tl_tk_ids *ids, struct tl_error *err)
{
    struct tl_tk_word *w;
    enum tl_status st = TL_OK;
    size_t before = ids->n;
    uint32_t hash;
    if (!b->words && ids->n >= WORDS_AFTER_IDS) {
        b->words = tl_calloc(WORDS, sizeof(*b->words));
        if (!b->words)
            return tl_fail_host_memory(err, WORDS * sizeof(*b->words));
    }
    if (!b->words || n > sizeof(w->bytes))
        return encode_piece(b, tk, s, n, ids, err);
    hash = tl_tk_hash(s, n);
    w = &b->words[hash % WORDS];
    if (w->hash == hash && w->n_bytes == n && memcmp(w->bytes, s, n) == 0) {
        for (int i = 0; i < w->n_ids && st == TL_OK; i++)
            st = tl_tk_ids_add(ids, w->ids[i], err);
        return st;
    }
    st = encode_piece(b, tk, s, n, ids, err);
    if (st == TL_OK && ids->n - before <= sizeof(w->ids) / sizeof(w->ids[0])) {
        w->hash = hash;
        w->n_bytes = (uint8_t)n;
        w->n_ids = (uint8_t)(ids->n - before);
        memcpy(w->bytes, s, n);
        memcpy(w->ids, ids->v + before, (ids->n - before) * sizeof(*w->ids));
    }
    return st;
}
