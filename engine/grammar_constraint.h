/* engine/grammar_constraint.h - a grammar at work on one sequence: the matcher, its mask, and which ids end the text.
 *
 * Where the grammar leaves only one way for the text to go on, it leaves only one token too: the first one that the tokenizer
 * makes of that text; if that one is not allowed, the longest piece within the text (of equal ones the lowest id). Where an
 * allowed piece goes beyond that text, there is a choice again. So forced tokens need no logits, and they follow from the
 * text alone, whatever was reused or computed ahead.
 * Owner: the job. Thread: worker. */
#ifndef TL_GRAMMAR_CONSTRAINT_H
#define TL_GRAMMAR_CONSTRAINT_H

#include "grammar.h"

struct tl_constraint;

struct tl_constraint_params {
    const struct tl_grammar *grammar;  /* a reference is taken */
    const struct tl_vocab_trie *vocab; /* must outlive the constraint */
    const int32_t *stop_ids;           /* copied; allowed exactly when the text may end, whatever their own text is */
    int n_stop_ids;
    /* Tokens that are part of the text already; borrowed until all are read. None: the text begins with the completion. */
    const int32_t *history;
    int n_history;
    /* Elementary steps of work that all who share it may still do now; NULL = any number. It must outlive the constraint. */
    int64_t *budget;
    bool any_piece; /* forced text in any pieces, as a bias may want it: no token is forced */
};
/* Errors: TL_ERR_BAD_PARAM, TL_ERR_INVALID_GRAMMAR (over a limit), TL_ERR_NO_HOST_MEMORY. On error *out is NULL. */
enum tl_status tl_constraint_create(struct tl_constraint **out, const struct tl_constraint_params *p,
                                    struct tl_error *err);
void tl_constraint_free(struct tl_constraint *c); /* NULL is fine */

/* Read on in the history, for about so much work. *all: it is read, and the functions below may be called.
 * Errors: TL_ERR_GRAMMAR_PREFIX_CONFLICT (number "token_index"), and as above. */
enum tl_status tl_constraint_read(struct tl_constraint *c, int64_t work, bool *all, struct tl_error *err);
bool tl_constraint_has_read(const struct tl_constraint *c); /* all of the history */

/* Find the mask of the next token ahead of its use: while the device is busy with the logits. What fails here fails again
 * in tl_constraint_mask. false: not tried, the budget is spent. */
bool tl_constraint_prepare(struct tl_constraint *c);
/* The only token that may come next, found without its logits; -1 = there is a choice, or the text may end, or the budget is
 * spent: the mask has it then.
 * Errors: as tl_matcher_mask. */
enum tl_status tl_constraint_forced(struct tl_constraint *c, int32_t *token, struct tl_error *err);
/* *mask: one bit per token, valid until the next call. *complete: the text is whole and no token can follow it; do not sample.
 * Errors: as tl_matcher_mask. */
enum tl_status tl_constraint_mask(struct tl_constraint *c, const uint32_t **mask, bool *complete, struct tl_error *err);
/* The token, which is no stop id, joined the text. *complete as above, as far as the grammar alone can tell. */
enum tl_status tl_constraint_accept(struct tl_constraint *c, int32_t token, bool *complete, struct tl_error *err);

#endif
