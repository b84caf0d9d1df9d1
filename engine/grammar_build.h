/* engine/grammar_build.h - between grammar_build.c, which writes a draft out as states and edges, and grammar_net.c, which
 * checks and packs them. */
#ifndef TL_GRAMMAR_BUILD_H
#define TL_GRAMMAR_BUILD_H

#include "grammar_impl.h"

struct tl_draft_edge {
    uint32_t from, to, what;
};
struct tl_build {
    struct tl_draft *d;
    uint32_t n_states, rule;
    TL_VEC(struct tl_draft_edge) edges;
    TL_VEC(uint32_t) same;    /* [n_states] */
    TL_VEC(uint32_t) rule_of; /* [n_states] */
};

/* States and edges from `from` to `to` that read expression x. Adds no edge into `from` and none out of `to`.
 * Failures are left in b->d->st. The depth of the C stack is that of the expression, which the sources bound. */
void tl_build_expr(struct tl_build *b, uint32_t x, uint32_t from, uint32_t to);
uint32_t tl_build_state(struct tl_build *b);

#endif
