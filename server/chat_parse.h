/* server/chat_parse.h - the body of POST /v1/chat/completions, and its conversation as a prompt.
 *
 * The fields that completions have, too, are read by completion_parse.c. A conversation becomes one prompt whose text is the
 * JSON of the chat template's variables; rendering and encoding come later, as for any text, perhaps in a helper thread. */
#ifndef TL_SERVER_CHAT_PARSE_H
#define TL_SERVER_CHAT_PARSE_H

#include "generate.h"
#include "json.h"
#include "server.h"

/* As tl_completion_parse. */
int tl_chat_parse(struct tl_ask *ask, const char *body, size_t bytes, const struct tl_facts *facts,
                  struct tl_error *err);
/* "messages" and what else the template may see, as the JSON text of its variables. answer: without
 * "add_generation_prompt" in the request, the beginning of an answer follows. NULL: f says why. Owner: caller. */
char *tl_chat_parse_messages(struct tl_fields *f, const struct tl_facts *facts, bool answer);
/* Render and encode that; special tokens in what the client wrote stay text. *ids: malloc'ed. *think_open (may be NULL): the
 * prompt ends inside <think>. Any thread. Returns 0 or an enum tl_code. */
int tl_chat_encode(const struct tl_facts *facts, const char *variables, size_t n_variables, int32_t **ids, int *n_ids,
                   bool *think_open, struct tl_error *err);

#endif
