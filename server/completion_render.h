/* server/completion_render.h - the answer of POST /v1/completions: one JSON object, or a stream of them. Thread: loop. */
#ifndef TL_SERVER_COMPLETION_RENDER_H
#define TL_SERVER_COMPLETION_RENDER_H

#include "flight.h"

extern const struct tl_renderer tl_completion_renderer;
/* What the renderer keeps, for a flight of this request. NULL: no memory. */
void *tl_completion_render_new(const struct tl_ask *ask);

#endif
