/* server/completion_parse.h - the body of POST /v1/completions as a typed request. Pure: no server, no thread. */
#ifndef TL_SERVER_COMPLETION_PARSE_H
#define TL_SERVER_COMPLETION_PARSE_H

#include "generate.h"
#include "server.h"

/* Fill *ask (cleared first; the caller clears it whatever happens). Text prompts are not encoded yet. Returns 0 or an
 * enum tl_code, with err filled. */
int tl_completion_parse(struct tl_ask *ask, const char *body, size_t bytes, const struct tl_facts *facts,
                        struct tl_error *err);

/* Encode what came as text (any thread), then check lengths, set the default of max_tokens and group equal prompts. */
int tl_ask_encode(struct tl_ask *ask, const struct tl_facts *facts, struct tl_error *err);
size_t tl_ask_text_bytes(const struct tl_ask *ask);
int64_t tl_ask_tokens(const struct tl_ask *ask); /* of distinct prompts */

#endif
