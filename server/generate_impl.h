/* server/generate_impl.h - what generate.c (starting and ending choices) and generate_events.c (what the scheduler tells of them)
 * share. Thread: worker. */
#ifndef TL_SERVER_GENERATE_IMPL_H
#define TL_SERVER_GENERATE_IMPL_H

#include "generate.h"

/* One sequence of the scheduler. Worker only, except job and paused, which the lock guards. */
struct tl_choice {
    struct tl_generation *g;
    int idx;
    int leader;         /* index of the choice whose prompt state this one starts from; its own: it computes it */
    struct tl_job *job; /* NULL before submission and after its end */
    bool paused, submitted, started, ended;
    bool held; /* its end waits in `end` until the resume handle that it left is durable */
    bool by_deadline;
    bool keeps_something, keeps_nothing; /* its job leaves something behind; there was no memory for that */
    enum { TL_KEEPS_FOR_FOLLOWERS, TL_KEEPS_AUTOMATIC, TL_KEEPS_RESUME } keeps; /* what a KEPT event is for */
    enum tl_reuse reuse;                                                        /* what it began from */
    char reuse_id[TL_ENTRY_ID_MAX + 1];
    struct tl_text_stream *text;
    struct tl_handle *kept; /* leader: the state of its prompt, until the others have it */
    uint64_t logits_hash;
    struct tl_out_end end; /* once ended: followers that never ran share their leader's */
};

/* generate_events.c */
enum tl_verdict tl_gen_on_event(void *arg, const struct tl_event *ev); /* arg: the choice */
void tl_gen_end(struct tl_choice *c, struct tl_out_end *end);
void tl_gen_fail(struct tl_choice *c, const struct tl_error *err);
/* The resume handle that was asked for goes on towards being durable, as far as it can now. */
void tl_gen_settle_store(struct tl_generation *g);
/* It will not be named by the answer: why, or because that was cancelled (NULL). */
void tl_gen_give_up_store(struct tl_generation *g, const struct tl_error *why);

#endif
