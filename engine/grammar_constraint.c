#include "grammar_constraint.h"

#include "grammar_impl.h"
#include "mem.h"

#include <string.h>

#define AHEAD_BYTES 64 /* of forced text that is looked at; a longer piece goes beyond it */
#define TOKEN_WORK                                                                                                     \
    2000 /* what a forced token costs besides the matcher's work: the tokenizer, the walk over the mask */

struct tl_constraint {
    struct tl_matcher *matcher;
    const struct tl_vocab_trie *vocab;
    uint32_t *mask;
    size_t n_words;
    int32_t *stop_ids;
    int n_stop_ids;
    bool any_piece;
    const int32_t *history;
    int n_history, n_read;
    int64_t *budget, work_seen; /* seen: of the matcher's, taken off the budget */
    /* of the position at hand */
    bool ready, complete; /* the mask was found; no token can follow */
    int32_t forced;       /* the only token; -1 = none. Once ready */
};

void tl_constraint_free(struct tl_constraint *c)
{
    if (!c)
        return;
    tl_matcher_free(c->matcher);
    tl_free(c->mask);
    tl_free(c->stop_ids);
    tl_free(c);
}

enum tl_status tl_constraint_create(struct tl_constraint **out, const struct tl_constraint_params *p,
                                    struct tl_error *err)
{
    int vocab_size = tl_vocab_trie_size(p->vocab);
    struct tl_constraint *c = NULL;
    enum tl_status st = TL_OK;

    *out = NULL;
    for (int i = 0; i < p->n_stop_ids; i++)
        if (p->stop_ids[i] < 0 || p->stop_ids[i] >= vocab_size)
            return tl_fail(err, TL_ERR_BAD_PARAM, "stop id %d is %d, the vocabulary has ids 0 to %d", i, p->stop_ids[i],
                           vocab_size - 1);
    c = tl_calloc(1, sizeof(*c));
    if (!c)
        return tl_fail_host_memory(err, sizeof(*c));
    c->vocab = p->vocab;
    c->any_piece = p->any_piece;
    c->history = p->history;
    c->n_history = p->n_history;
    c->budget = p->budget;
    c->n_words = ((size_t)vocab_size + 31) / 32;
    c->mask = tl_array(c->n_words, sizeof(*c->mask));
    c->n_stop_ids = p->n_stop_ids;
    c->stop_ids = tl_array((size_t)p->n_stop_ids, sizeof(*c->stop_ids));
    if (!c->mask || !c->stop_ids) {
        st = tl_fail_host_memory(err, c->n_words * sizeof(*c->mask));
        goto out;
    }
    if (p->n_stop_ids)
        memcpy(c->stop_ids, p->stop_ids, (size_t)p->n_stop_ids * sizeof(*c->stop_ids));
    if ((st = tl_matcher_create(&c->matcher, p->grammar, p->vocab, err)) != TL_OK)
        goto out;
    *out = c;
    c = NULL;
out:
    tl_constraint_free(c);
    return st;
}

/* Take work off the budget: the matcher's since the last time, and some more. */
static void charge(struct tl_constraint *c, int64_t more)
{
    int64_t done = tl_matcher_work(c->matcher);

    if (c->budget)
        *c->budget -= done - c->work_seen + more;
    c->work_seen = done;
}

static bool is_spent(const struct tl_constraint *c) { return c->budget && *c->budget <= 0; }

bool tl_constraint_has_read(const struct tl_constraint *c) { return c->n_read == c->n_history; }

enum tl_status tl_constraint_read(struct tl_constraint *c, int64_t work, bool *all, struct tl_error *err)
{
    enum tl_status st = tl_matcher_accept_part(c->matcher, c->history, c->n_history, work, &c->n_read, err);

    charge(c, 0);
    *all = tl_constraint_has_read(c);
    return st;
}

static bool allows(const struct tl_constraint *c, int32_t token) { return c->mask[token >> 5] >> (token & 31) & 1; }

/* Leave one token of those that begin the text which has to follow, as far as it is known: n bytes of it. */
static enum tl_status narrow(struct tl_constraint *c, const char *text, size_t n, struct tl_error *err)
{
    uint32_t longest = 0;
    int32_t *ids = NULL;
    size_t n_ids = 0;
    enum tl_status st;

    for (size_t i = 0; i < c->n_words; i++)
        for (uint32_t w = c->mask[i]; w; w &= w - 1) {
            int32_t token = (int32_t)(i * 32) + __builtin_ctz(w);
            uint32_t bytes = c->vocab->piece[token + 1] - c->vocab->piece[token];
            if (bytes > n) {
                c->forced = -1;
                return TL_OK;
            }
            if (bytes > longest) {
                longest = bytes;
                c->forced = token;
            }
        }
    if (longest > 1 && c->vocab->tk) {
        st = tl_tokenizer_encode(c->vocab->tk, &(struct tl_encode_params){.text = text, .text_bytes = n}, &ids, &n_ids,
                                 err);
        if (st == TL_ERR_NO_HOST_MEMORY)
            return st;
        if (n_ids > 0 && allows(c, ids[0])) /* none where the text begins or breaks off within a character */
            c->forced = ids[0];
        tl_free(ids);
    }
    memset(c->mask, 0, c->n_words * sizeof(*c->mask));
    c->mask[c->forced >> 5] = 1u << (c->forced & 31);
    return TL_OK;
}

/* The mask, narrowed where the next n bytes have to be those of text. */
static enum tl_status find_mask(struct tl_constraint *c, const char *text, size_t n, struct tl_error *err)
{
    enum tl_status st = tl_matcher_mask(c->matcher, c->mask, err);
    bool may_end = tl_matcher_can_end(c->matcher);
    uint32_t any = 0;

    if (st != TL_OK)
        return st;
    for (int i = 0; i < c->n_stop_ids; i++)
        c->mask[c->stop_ids[i] >> 5] &= ~(1u << (c->stop_ids[i] & 31));
    for (size_t i = 0; i < c->n_words && !any; i++)
        any = c->mask[i];
    if (!any && !may_end)
        return tl_fail(err, TL_ERR_GRAMMAR_NO_CONTINUATION,
                       "the grammar allows only stop ids here, and the text may not end");
    for (int i = 0; i < c->n_stop_ids && may_end; i++)
        c->mask[c->stop_ids[i] >> 5] |= 1u << (c->stop_ids[i] & 31);
    c->complete = !any;
    c->forced = -1;
    if (n > 0 && (st = narrow(c, text, n, err)) != TL_OK)
        return st;
    c->ready = true;
    return TL_OK;
}

/* Text that has to follow. */
static enum tl_status look_ahead(struct tl_constraint *c, char text[AHEAD_BYTES], size_t *n, struct tl_error *err)
{
    *n = 0;
    return c->any_piece ? TL_OK : tl_matcher_forced(c->matcher, text, AHEAD_BYTES, n, err);
}

enum tl_status tl_constraint_forced(struct tl_constraint *c, int32_t *token, struct tl_error *err)
{
    char text[AHEAD_BYTES];
    size_t n;
    enum tl_status st = TL_OK;

    *token = -1;
    if (!c->ready) {
        if (is_spent(c))
            return TL_OK;
        st = look_ahead(c, text, &n, err);
        if (st == TL_OK && n > 0)
            st = find_mask(c, text, n, err);
        charge(c, TOKEN_WORK);
        if (st != TL_OK || n == 0) /* the mask is left to whoever has time for it */
            return st;
    }
    *token = c->forced;
    return TL_OK;
}

enum tl_status tl_constraint_mask(struct tl_constraint *c, const uint32_t **mask, bool *complete, struct tl_error *err)
{
    char text[AHEAD_BYTES];
    size_t n;
    enum tl_status st = TL_OK;

    if (!c->ready) {
        if ((st = look_ahead(c, text, &n, err)) == TL_OK)
            st = find_mask(c, text, n, err);
        charge(c, 0);
    }
    if (st != TL_OK)
        return st;
    *complete = c->complete;
    *mask = c->mask;
    return TL_OK;
}

bool tl_constraint_prepare(struct tl_constraint *c)
{
    const uint32_t *mask;
    bool complete;

    if (!c->ready && is_spent(c))
        return false;
    (void)tl_constraint_mask(c, &mask, &complete, NULL);
    return true;
}

enum tl_status tl_constraint_accept(struct tl_constraint *c, int32_t token, bool *complete, struct tl_error *err)
{
    enum tl_status st = tl_matcher_accept(c->matcher, token, err);

    charge(c, 0);
    c->ready = false;
    *complete = tl_matcher_is_done(c->matcher);
    return st;
}
