/* A position in a text of a grammar. */
#include "grammar_impl.h"

#include "mem.h"

#include <stdio.h>
#include <string.h>

/* A position's own space is made anew, with what is still needed, when it has grown past this. */
#define SPACE_BYTES_MAX (512u << 10)
/* So many nodes of the trie may be left to the matcher before a mask with more of the stack is made. */
#define POP_COST_MAX 2048

struct tl_matcher {
    const struct tl_grammar *g;
    const struct tl_vocab_trie *v;
    struct tl_space space;
    uint32_t place;
    int64_t work_left; /* saved up to work_per_token_max; every token adds its share */
    int64_t work_done;
    size_t tidy_bytes; /* the size at which the space is made anew */
};

static struct tl_effort effort_of(const struct tl_matcher *m, struct tl_error *err)
{
    return (struct tl_effort){.left = m->work_left, .given = m->work_left, .limits = &m->g->limits, .err = err};
}

/* What is left after some work, and the share of so many tokens. */
static void settle(struct tl_matcher *m, const struct tl_effort *e, int64_t n_tokens)
{
    int64_t max = m->g->limits.work_per_token_max, left = e->left > 0 ? e->left : 0;
    m->work_done += e->given - e->left;
    m->work_left = n_tokens > TL_WORK_SHARES || left + n_tokens * (max / TL_WORK_SHARES) > max
                       ? max
                       : left + n_tokens * (max / TL_WORK_SHARES);
}

void tl_matcher_free(struct tl_matcher *m)
{
    if (!m)
        return;
    tl_space_clear(&m->space);
    tl_grammar_free(m->g);
    tl_free(m);
}

static enum tl_status make(struct tl_matcher **out, const struct tl_grammar *g, const struct tl_vocab_trie *v,
                           struct tl_error *err)
{
    struct tl_matcher *m = tl_calloc(1, sizeof(*m));
    enum tl_status st;

    if (!m)
        return tl_fail_host_memory(err, sizeof(*m));
    tl_grammar_ref(g);
    m->g = g;
    m->v = v;
    m->work_left = g->limits.work_per_token_max;
    m->tidy_bytes = SPACE_BYTES_MAX;
    st = tl_space_init(&m->space, &g->room->local, err);
    if (st != TL_OK) {
        tl_matcher_free(m);
        return st;
    }
    *out = m;
    return TL_OK;
}

enum tl_status tl_matcher_create(struct tl_matcher **out, const struct tl_grammar *g, const struct tl_vocab_trie *v,
                                 struct tl_error *err)
{
    struct tl_matcher *m = NULL;
    struct tl_effort e;
    uint32_t start;
    enum tl_status st;

    *out = NULL;
    if ((st = make(&m, g, v, err)) != TL_OK)
        return st;
    e = effort_of(m, err);
    st = tl_local_start(&g->room->local, g->net.root, &start, &e);
    if (st == TL_OK)
        st = tl_space_begin(&m->space, start, &m->place, &e);
    if (st == TL_OK) {
        *out = m;
        m = NULL;
    }
    tl_matcher_free(m);
    return st;
}

enum tl_status tl_matcher_clone(struct tl_matcher **out, const struct tl_matcher *m, struct tl_error *err)
{
    struct tl_matcher *copy = NULL;
    struct tl_effort e = effort_of(m, err);
    enum tl_status st;

    *out = NULL;
    if ((st = make(&copy, m->g, m->v, err)) != TL_OK)
        return st;
    e.left = m->g->limits.work_per_token_max;
    copy->work_left = m->work_left;
    st = tl_space_copy(&copy->space, &m->space, m->place, &copy->place, &e);
    if (st == TL_OK) {
        *out = copy;
        copy = NULL;
    }
    tl_matcher_free(copy);
    return st;
}

/* ---- the mask ------------------------------------------------------------------------------------------------------ */

static void merge(uint32_t *mask, uint32_t n_words, const struct tl_masks *ms, const struct tl_mask *k)
{
    if (k->bits != TL_UNKNOWN)
        for (uint32_t i = 0; i < n_words; i++)
            mask[i] |= ms->words.at[k->bits + i];
    else
        for (uint32_t i = 0; i < k->n_ids; i++)
            mask[ms->words.at[k->ids + i] >> 5] |= 1u << (ms->words.at[k->ids + i] & 31);
}

/* Tokens that pair p allows. */
static enum tl_status add_pair(struct tl_matcher *m, struct tl_pair p, uint32_t *mask, struct tl_effort *e)
{
    struct tl_masks *ms = &m->g->room->masks;
    struct tl_local *local = &m->g->room->local;
    struct tl_walk w = {.space = &m->space, .trie = &m->v->brief, .mask = mask};
    uint32_t key[TL_MASK_FRAMES], n_key = 0, number, below, state = p.state;
    enum tl_status st;

    for (;;) {
        struct tl_node node = m->space.nodes.at[p.node];
        struct tl_pair next;
        if ((st = tl_local_same(local, state, &key[n_key++], e)) != TL_OK ||
            (st = tl_masks_get(ms, local, m->v, key, n_key, &number, e)) != TL_OK)
            return st;
        next = m->space.pairs.at[node.first];
        if (ms->masks.at[number].pop_cost <= POP_COST_MAX || n_key == TL_MASK_FRAMES || node.n != 1 ||
            next.state == TL_BOTTOM)
            break;
        state = next.state;
        p.node = next.node;
    }
    merge(mask, ((uint32_t)m->v->vocab_size + 31) / 32, ms, &ms->masks.at[number]);
    if (ms->masks.at[number].n_pops == 0)
        return TL_OK;
    if ((st = tl_space_return(&m->space, p.node, &below, e)) != TL_OK || m->space.places.at[below].n == 0)
        return st;
    for (uint32_t i = 0; i < ms->masks.at[number].n_pops && st == TL_OK; i++)
        st = tl_walk_below(&w, ms->words.at[ms->masks.at[number].pops + i], below, e);
    return st;
}

enum tl_status tl_matcher_mask(struct tl_matcher *m, uint32_t *mask, struct tl_error *err)
{
    struct tl_effort e = effort_of(m, err);
    struct tl_walk lengthy = {.space = &m->space, .trie = &m->v->lengthy, .mask = mask};
    uint32_t n_words = ((uint32_t)m->v->vocab_size + 31) / 32, any = 0;
    struct tl_place x = m->space.places.at[m->place];
    enum tl_status st = TL_OK;

    memset(mask, 0, n_words * sizeof(*mask));
    for (uint32_t i = 0; i < x.n && st == TL_OK; i++)
        st = add_pair(m, m->space.pairs.at[x.first + i], mask, &e);
    if (st == TL_OK)
        st = tl_walk_below(&lengthy, 0, m->place, &e);
    settle(m, &e, 0);
    if (st != TL_OK)
        return st;
    for (uint32_t i = 0; i < n_words && !any; i++)
        any |= mask[i];
    if (!any && !x.through)
        return tl_fail(err, TL_ERR_GRAMMAR_NO_CONTINUATION,
                       "the grammar allows none of the %d tokens here, and the text may not end", m->v->vocab_size);
    return TL_OK;
}

/* ---- moving on ----------------------------------------------------------------------------------------------------- */

/* Drop what no position needs any more. If there is no memory for that, the space just stays as it is. What is still needed may
 * be large itself: the next time is when the space has doubled, so that a token bears only a small part of it. */
static void tidy(struct tl_matcher *m)
{
    int64_t most = m->g->limits.work_per_token_max;
    struct tl_effort e = {.left = most, .limits = &m->g->limits};
    struct tl_space fresh;
    uint32_t place;

    if (tl_space_bytes(&m->space) <= m->tidy_bytes || tl_space_init(&fresh, m->space.local, NULL) != TL_OK)
        return;
    if (tl_space_copy(&fresh, &m->space, m->place, &place, &e) == TL_OK) {
        tl_space_clear(&m->space);
        m->space = fresh;
        m->place = place;
    } else {
        tl_space_clear(&fresh);
    }
    m->work_done += most - e.left;
    m->tidy_bytes = 2 * tl_space_bytes(&m->space) > SPACE_BYTES_MAX ? 2 * tl_space_bytes(&m->space) : SPACE_BYTES_MAX;
}

static enum tl_status advance(struct tl_matcher *m, const char *bytes, size_t n, size_t *n_done, struct tl_effort *e)
{
    uint32_t place = m->place;

    for (size_t i = 0; i < n; i++) {
        enum tl_status st = tl_space_move(&m->space, place, m->g->net.class_of[(uint8_t)bytes[i]], &place, e);
        *n_done = i;
        if (st != TL_OK)
            return st;
        if (place == 0)
            return tl_fail(e->err, TL_ERR_GRAMMAR_NO_CONTINUATION, "the grammar does not allow byte 0x%02X here",
                           (uint8_t)bytes[i]);
    }
    m->place = place;
    tidy(m);
    return TL_OK;
}

enum tl_status tl_matcher_accept_bytes(struct tl_matcher *m, const char *bytes, size_t n, struct tl_error *err)
{
    struct tl_effort e = effort_of(m, err);
    size_t n_done;
    enum tl_status st;

    /* Long text gets the allowance of many tokens. */
    if (n > 64)
        e.left = m->g->limits.work_per_token_max > INT64_MAX / (int64_t)(n / 64 + 1)
                     ? INT64_MAX
                     : m->g->limits.work_per_token_max * (int64_t)(n / 64 + 1);
    e.given = e.left;
    st = advance(m, bytes, n, &n_done, &e);
    settle(m, &e, (int64_t)(n / 64) + 1);
    if (st == TL_ERR_GRAMMAR_NO_CONTINUATION) {
        tl_fail(err, st, "the grammar does not allow byte %zu, 0x%02X", n_done, (uint8_t)bytes[n_done]);
        tl_error_num(err, "offset", (int64_t)n_done);
    }
    return st;
}

enum tl_status tl_matcher_accept(struct tl_matcher *m, int32_t token, struct tl_error *err)
{
    struct tl_effort e = effort_of(m, err);
    const struct tl_vocab_trie *v = m->v;
    size_t n_done;
    enum tl_status st;

    if (token < 0 || token >= v->vocab_size || v->piece[token] == v->piece[token + 1])
        return tl_fail(err, TL_ERR_GRAMMAR_NO_CONTINUATION, "token %d has no text that a grammar could allow", token);
    st = advance(m, v->bytes + v->piece[token], v->piece[token + 1] - v->piece[token], &n_done, &e);
    settle(m, &e, 1);
    return st;
}

/* The piece as it can stand in a message. */
static void show_piece(char out[64], const char *bytes, uint32_t n)
{
    size_t k = 0;

    for (uint32_t i = 0; i < n && k < 56; i++) {
        unsigned c = (unsigned char)bytes[i];
        if (c >= 0x20 && c < 0x7F)
            out[k++] = (char)c;
        else
            k += (size_t)snprintf(out + k, 64 - k, "\\x%02X", c);
    }
    out[k] = '\0';
}

int64_t tl_matcher_work(const struct tl_matcher *m) { return m->work_done; }

enum tl_status tl_matcher_accept_prompt(struct tl_matcher *m, const int32_t *tokens, int n, struct tl_error *err)
{
    int at = 0;

    return tl_matcher_accept_part(m, tokens, n, INT64_MAX, &at, err);
}

enum tl_status tl_matcher_accept_part(struct tl_matcher *m, const int32_t *tokens, int n, int64_t work, int *at,
                                      struct tl_error *err)
{
    const struct tl_vocab_trie *v = m->v;
    int64_t start = m->work_done;

    for (; *at < n && m->work_done - start < work; ++*at) {
        int i = *at;
        enum tl_status st;
        char piece[64];
        if (tokens[i] >= 0 && tokens[i] < v->vocab_size && v->piece[tokens[i]] == v->piece[tokens[i] + 1])
            continue;
        st = tl_matcher_accept(m, tokens[i], err);
        if (st == TL_OK)
            continue;
        if (st != TL_ERR_GRAMMAR_NO_CONTINUATION || tokens[i] < 0 || tokens[i] >= v->vocab_size)
            return st;
        show_piece(piece, v->bytes + v->piece[tokens[i]], v->piece[tokens[i] + 1] - v->piece[tokens[i]]);
        tl_fail(err, TL_ERR_GRAMMAR_PREFIX_CONFLICT, "the grammar does not accept the prompt: token %d is '%s'", i,
                piece);
        tl_error_param(err, "grammar_scope");
        tl_error_num(err, "token_index", i);
        tl_error_num(err, "token", tokens[i]);
        return TL_ERR_GRAMMAR_PREFIX_CONFLICT;
    }
    return TL_OK;
}

bool tl_matcher_can_end(const struct tl_matcher *m) { return m->space.places.at[m->place].through; }

bool tl_matcher_is_done(const struct tl_matcher *m)
{
    return tl_matcher_can_end(m) && m->space.places.at[m->place].n == 0;
}

enum tl_status tl_matcher_forced(struct tl_matcher *m, char *bytes, size_t cap, size_t *n, struct tl_error *err)
{
    struct tl_effort e = effort_of(m, err);
    uint32_t place = m->place;
    enum tl_status st = TL_OK;

    for (*n = 0; *n < cap && !m->space.places.at[place].through; ++*n) {
        int byte;
        st = tl_space_only_byte(&m->space, place, &byte, &e);
        if (st == TL_OK && byte >= 0)
            st = tl_space_move(&m->space, place, m->g->net.class_of[byte], &place, &e);
        if (st != TL_OK || byte < 0)
            break;
        bytes[*n] = (char)byte;
    }
    settle(m, &e, 0);
    return st;
}
