/* The pieces of a vocabulary as two trees of bytes, laid out so that a walk reads memory forward. */
#include "grammar_impl.h"

#include "mem.h"

#include <stdlib.h>
#include <string.h>

void tl_vocab_trie_free(struct tl_vocab_trie *v)
{
    if (!v)
        return;
    tl_free(v->brief.nodes);
    tl_free(v->brief.tokens);
    tl_free(v->lengthy.nodes);
    tl_free(v->lengthy.tokens);
    tl_free(v->piece);
    tl_free(v->bytes);
    tl_free(v);
}

int tl_vocab_trie_size(const struct tl_vocab_trie *v) { return v->vocab_size; }

static int by_piece(const void *a, const void *b, void *arg)
{
    const struct tl_vocab_trie *v = arg;
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    uint32_t nx = v->piece[x + 1] - v->piece[x], ny = v->piece[y + 1] - v->piece[y];
    int c = memcmp(v->bytes + v->piece[x], v->bytes + v->piece[y], nx < ny ? nx : ny);
    if (c)
        return c;
    return nx != ny ? (nx > ny) - (nx < ny) : (x > y) - (x < y);
}

/* A tree of the tokens whose pieces have bytes_min to bytes_max bytes. */
static bool make_trie(struct tl_trie *t, struct tl_vocab_trie *v, uint32_t bytes_min, uint32_t bytes_max)
{
    uint32_t n_tokens = 0, n_nodes = 1, open[TL_PIECE_MAX + 1] = {0},
             depth = 0; /* open[d]: the node at depth d on the way */

    for (int i = 0; i < v->vocab_size; i++) {
        uint32_t n = v->piece[i + 1] - v->piece[i];
        n_tokens += n >= bytes_min && n <= bytes_max;
    }
    t->tokens = tl_array((size_t)n_tokens + 1, sizeof(*t->tokens));
    if (!t->tokens)
        return false;
    n_tokens = 0;
    for (int i = 0; i < v->vocab_size; i++) {
        uint32_t n = v->piece[i + 1] - v->piece[i];
        if (n >= bytes_min && n <= bytes_max)
            t->tokens[n_tokens++] = i;
    }
    qsort_r(t->tokens, n_tokens, sizeof(*t->tokens), by_piece, v);
    for (int pass = 0; pass < 2; pass++) { /* count, then fill */
        const char *before = NULL;
        uint32_t n_before = 0;
        n_nodes = 1;
        depth = 0;
        for (uint32_t i = 0; i < n_tokens; i++) {
            const char *p = v->bytes + v->piece[t->tokens[i]];
            uint32_t n = v->piece[t->tokens[i] + 1] - v->piece[t->tokens[i]], k = 0;
            while (k < n && k < n_before && p[k] == before[k])
                k++;
            if (pass)
                for (; depth > k; depth--)
                    t->nodes[open[depth]].end = n_nodes;
            for (; k < n; k++, n_nodes++)
                if (pass) {
                    t->nodes[n_nodes] =
                        (struct tl_trie_node){.token = i, .byte = (uint8_t)p[k], .depth = (uint8_t)(k + 1)};
                    open[++depth] = n_nodes;
                }
            before = p;
            n_before = n;
        }
        if (!pass) {
            t->nodes = tl_calloc((size_t)n_nodes + 1, sizeof(*t->nodes));
            if (!t->nodes)
                return false;
            continue;
        }
        for (; depth > 0; depth--)
            t->nodes[open[depth]].end = n_nodes;
        t->nodes[0].end = n_nodes;
        t->nodes[n_nodes].token = n_tokens;
    }
    t->n_nodes = n_nodes;
    return true;
}

enum tl_status tl_vocab_trie_create(struct tl_vocab_trie **out, const struct tl_vocab_piece *pieces, int vocab_size,
                                    struct tl_error *err)
{
    static atomic_uint_least64_t serial;
    struct tl_vocab_trie *v = NULL;
    size_t n_bytes = 0;
    enum tl_status st = TL_ERR_NO_HOST_MEMORY;

    *out = NULL;
    if (vocab_size < 1 || vocab_size > TL_TOKENIZER_ID_MAX + 1)
        return tl_fail(err, TL_ERR_BAD_PARAM, "vocab_size is %d, it must be 1 to %d", vocab_size,
                       TL_TOKENIZER_ID_MAX + 1);
    for (int i = 0; i < vocab_size; i++)
        n_bytes += pieces[i].n_bytes <= TL_PIECE_MAX ? pieces[i].n_bytes : 0;
    if (n_bytes > UINT32_MAX / 2)
        return tl_fail(err, TL_ERR_BAD_PARAM, "the vocabulary has %zu bytes, the limit is %u", n_bytes, UINT32_MAX / 2);
    v = tl_calloc(1, sizeof(*v));
    if (!v)
        goto out;
    v->vocab_size = vocab_size;
    v->serial = atomic_fetch_add(&serial, 1) + 1;
    v->piece = tl_array((size_t)vocab_size + 1, sizeof(*v->piece));
    v->bytes = tl_malloc(n_bytes);
    if (!v->piece || !v->bytes)
        goto out;
    n_bytes = 0;
    for (int i = 0; i < vocab_size; i++) {
        uint32_t n = pieces[i].n_bytes <= TL_PIECE_MAX ? pieces[i].n_bytes : 0;
        v->piece[i] = (uint32_t)n_bytes;
        if (n)
            memcpy(v->bytes + n_bytes, pieces[i].bytes, n);
        n_bytes += n;
    }
    v->piece[vocab_size] = (uint32_t)n_bytes;
    if (!make_trie(&v->brief, v, 1, TL_SHORT_PIECE) || !make_trie(&v->lengthy, v, TL_SHORT_PIECE + 1, TL_PIECE_MAX))
        goto out;
    *out = v;
    v = NULL;
    st = TL_OK;
out:
    tl_vocab_trie_free(v);
    return st == TL_OK ? st : tl_fail(err, st, "the host has no memory left for the tree of the vocabulary");
}

enum tl_status tl_vocab_trie_of(struct tl_vocab_trie **out, const struct tl_tokenizer *tk, int vocab_size,
                                struct tl_error *err)
{
    struct tl_vocab_piece *pieces;
    enum tl_status st;

    *out = NULL;
    if (vocab_size < 1 || vocab_size > TL_TOKENIZER_ID_MAX + 1)
        return tl_fail(err, TL_ERR_BAD_PARAM, "vocab_size is %d, it must be 1 to %d", vocab_size,
                       TL_TOKENIZER_ID_MAX + 1);
    pieces = tl_calloc((size_t)vocab_size, sizeof(*pieces));
    if (!pieces)
        return tl_fail_host_memory(err, (size_t)vocab_size * sizeof(*pieces));
    for (int i = 0; i < vocab_size; i++) {
        size_t n = 0;
        if (!tl_tokenizer_is_special(tk, i) && tl_tokenizer_piece(tk, i, &pieces[i].bytes, &n))
            pieces[i].n_bytes = n > UINT32_MAX ? UINT32_MAX : (uint32_t)n;
    }
    st = tl_vocab_trie_create(out, pieces, vocab_size, err);
    if (st == TL_OK)
        (*out)->tk = tk;
    tl_free(pieces);
    return st;
}
