/* engine/chat_template_parse.h - what statements (chat_template_parse.c) and expressions (chat_template_expr.c) of a chat
 * template share while it is parsed; nobody else includes this.
 *
 * The first error sticks in the parser; every function then returns 0 or false and looks at the end of the text. */
#ifndef TL_CHAT_TEMPLATE_PARSE_H
#define TL_CHAT_TEMPLATE_PARSE_H

#include "chat_template_impl.h"

struct tl_ct_parser {
    struct tl_chat_template *t;
    struct tl_ct_lexer lx;
    struct tl_ct_token tok; /* the one to look at */
    int depth, loops;
    enum tl_status st;
    struct tl_error *err;
};

/* An error: outside of the subset, or no Jinja. Both return 0. */
uint32_t tl_ct_refuse(struct tl_ct_parser *p, int line, const char *kind, const char *name, size_t n);
uint32_t tl_ct_bad(struct tl_ct_parser *p, const char *what);

/* Tokens. "take" goes on if this one is looked at, "want" demands it. */
void tl_ct_advance(struct tl_ct_parser *p);
bool tl_ct_is_op(const struct tl_ct_parser *p, const char *op);
bool tl_ct_is_name(const struct tl_ct_parser *p, const char *name);
bool tl_ct_take_op(struct tl_ct_parser *p, const char *op);
bool tl_ct_take_name(struct tl_ct_parser *p, const char *name);
void tl_ct_want_op(struct tl_ct_parser *p, const char *op);
struct tl_ct_token tl_ct_take_word(struct tl_ct_parser *p, const char *what); /* what: the message if there is none */
bool tl_ct_enter(struct tl_ct_parser *p);                                     /* one level deeper; false: too deep */

/* Nodes by index; 0 with p->st set when there is no room. */
uint32_t tl_ct_add(struct tl_ct_parser *p, enum tl_ct_kind kind, int line);
uint32_t tl_ct_add_pair(struct tl_ct_parser *p, enum tl_ct_kind kind, int line, uint32_t a, uint32_t b);
uint32_t tl_ct_add_named(struct tl_ct_parser *p, enum tl_ct_kind kind, const struct tl_ct_token *name);
void tl_ct_link(struct tl_ct_parser *p, uint32_t *first, uint32_t *last, uint32_t i); /* append to a list, by next */
static inline struct tl_ct_node *tl_ct_at(struct tl_ct_parser *p, uint32_t i) { return &p->t->nodes[i]; }

uint32_t tl_ct_expression(struct tl_ct_parser *p);
uint32_t tl_ct_logic(struct tl_ct_parser *p, bool or); /* one without "if": or, and below it */

#endif
