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
/* "messages" and what else the template may see, into ask->prompts[0].text. */
void tl_chat_parse_messages(struct tl_fields *f, const struct tl_facts *facts, struct tl_ask *ask);
/* Render and encode that; special tokens in what the client wrote stay text. Any thread. Returns 0 or an enum tl_code. */
int tl_chat_encode(struct tl_ask *ask, const struct tl_facts *facts, struct tl_error *err);

#endif
