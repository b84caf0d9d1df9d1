/* server/chat_think.h - tells thoughts from the answer in the output of a model that thinks in <think> ... </think>.
 *
 * The marks may be special tokens, which leave no text, or text over any number of tokens. Blanks around the marks are
 * nobody's. Text that may still become a mark is held back. Thread: one at a time. */
#ifndef TL_SERVER_CHAT_THINK_H
#define TL_SERVER_CHAT_THINK_H

#include "../engine/tinyloop.h"
#include "bytes.h"

struct tl_think {
    enum { TL_THINK_NOT_YET, TL_THINK_IN, TL_THINK_AFTER, TL_THINK_NEVER } state;
    bool trim;                 /* blanks that come next are dropped */
    int32_t open_id, close_id; /* of special tokens; -1 = the mark is text */
    struct tl_bytes held;
    struct tl_bytes thought, answer; /* what the last push made certain; failed tells of no memory */
};

/* thinks: the model has the marks at all. inside: the prompt has opened the thought. */
void tl_think_init(struct tl_think *t, const struct tl_tokenizer *tk, bool thinks, bool inside);
void tl_think_push(struct tl_think *t, int32_t token, const char *text, size_t n); /* token -1: text alone */
void tl_think_flush(struct tl_think *t);                                           /* the end: what was held back */
void tl_think_free(struct tl_think *t);

#endif
