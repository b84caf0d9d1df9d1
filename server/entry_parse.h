/* server/entry_parse.h - request bodies and headers about named entries. Thread: loop. */
#ifndef TL_SERVER_ENTRY_PARSE_H
#define TL_SERVER_ENTRY_PARSE_H

#include "entry_call.h"

/* The body of a creation into c (its making's definition, text or ids). Returns 0 or the code. */
int tl_parse_definition(struct tl_call *c, struct tl_error *err);
int tl_parse_patch(struct tl_call *c, struct tl_error *err);
/* {"prompt", "loops", "cache_window", "explain"} of a pool match. */
int tl_parse_match(struct tl_call *c, struct tl_error *err);
int tl_parse_estimate(struct tl_call *c, struct tl_error *err);
int tl_parse_promote(struct tl_call *c, struct tl_error *err);
int tl_parse_verify(struct tl_call *c, struct tl_error *err);
/* If-Match, If-None-Match: *, Prefer, Idempotency-Key of a creation. */
int tl_parse_making_headers(struct tl_call *c, struct tl_error *err);
/* If-Match of a change: *must, *any, *generation. */
int tl_parse_if_match(const struct tl_exchange *x, bool *must, bool *any, uint64_t *generation, struct tl_error *err);
int tl_parse_listing(struct tl_call *c, struct tl_error *err);

#endif
