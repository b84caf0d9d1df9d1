/* server/completion_render.h - the answer of POST /v1/completions: one JSON object, or a stream of them. Thread: loop. */
#ifndef TL_SERVER_COMPLETION_RENDER_H
#define TL_SERVER_COMPLETION_RENDER_H

#include "flight.h"

extern const struct tl_renderer tl_completion_renderer;
/* What the renderer keeps, for a flight of this request. NULL: no memory. */
void *tl_completion_render_new(const struct tl_ask *ask);

/* Parts that other routes share. */
void tl_render_usage(struct tl_jw *w, const char *key, const struct tl_flight *f);
void tl_render_tinyloop(struct tl_jw *w, const char *key, const struct tl_flight *f, const char *stop_detail);
/* The text of a token: its piece, or "bytes:\xNN..." where that is no whole character. */
void tl_render_piece(struct tl_bytes *out, const struct tl_tokenizer *tk, int32_t token);

#endif
