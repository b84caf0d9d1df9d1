/* server/chat_render.h - the answer of POST /v1/chat/completions: one JSON object, or a stream of chunks. Thread: loop. */
#ifndef TL_SERVER_CHAT_RENDER_H
#define TL_SERVER_CHAT_RENDER_H

#include "flight.h"

extern const struct tl_renderer tl_chat_renderer;
/* What the renderer keeps, for a flight of this request. NULL: no memory. */
void *tl_chat_render_new(const struct tl_ask *ask, const struct tl_facts *facts);

#endif
