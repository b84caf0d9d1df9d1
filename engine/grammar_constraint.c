#include "grammar_constraint.h"

#include "mem.h"

#include <string.h>

struct tl_constraint {
    struct tl_matcher *matcher;
    uint32_t *mask;
    size_t n_words;
    int32_t *stop_ids;
    int n_stop_ids;
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
    if ((st = tl_matcher_create(&c->matcher, p->grammar, p->vocab, err)) != TL_OK ||
        (st = tl_matcher_accept_prompt(c->matcher, p->history, p->n_history, err)) != TL_OK)
        goto out;
    *out = c;
    c = NULL;
out:
    tl_constraint_free(c);
    return st;
}

enum tl_status tl_constraint_mask(struct tl_constraint *c, const uint32_t **mask, bool *complete, struct tl_error *err)
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
    *complete = !any;
    *mask = c->mask;
    return TL_OK;
}

enum tl_status tl_constraint_accept(struct tl_constraint *c, int32_t token, bool *complete, struct tl_error *err)
{
    enum tl_status st = tl_matcher_accept(c->matcher, token, err);

    *complete = tl_matcher_is_done(c->matcher);
    return st;
}
