/* server/verify.h - the live proof: the same continuation computed from scratch and from an entry, compared token by token and by
 * the hash of every row of logits. Thread: worker, but for the results once it is over. */
#ifndef TL_SERVER_VERIFY_H
#define TL_SERVER_VERIFY_H

#include "registry.h"

#define TL_VERIFY_TOKENS_MAX 256

struct tl_verify_run {
    struct tl_verify *v;
    struct tl_job *job;
    bool done;
    int n;
    int32_t token[TL_VERIFY_TOKENS_MAX];
    uint64_t hash[TL_VERIFY_TOKENS_MAX];
    struct tl_usage usage;
};

struct tl_verify {
    int n_tokens, loops; /* in: to generate; depth to resume to, 0 = the entry's */
    struct tl_claim claim;
    struct tl_verify_run fresh, reused;
    bool submitted;
    int code;
    struct tl_error err;
    void (*changed)(void *arg);
    void *arg;
    /* out */
    bool equal;
    int n_compared, first_difference; /* -1 = none */
};

int tl_verify_begin(struct tl_verify *v, struct tl_registry *r, enum tl_entry_kind kind, const char *tenant,
                    const char *id, struct tl_error *err);
/* Between steps: submit what can be submitted. True: over (v->code, or the results); the claim is released. */
bool tl_verify_attend(struct tl_verify *v, struct tl_registry *r, struct tl_sched *s, const struct tl_error *stop);

#endif
