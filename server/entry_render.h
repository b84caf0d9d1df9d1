/* server/entry_render.h - named entries as JSON, with their entity tags. Thread: loop. */
#ifndef TL_SERVER_ENTRY_RENDER_H
#define TL_SERVER_ENTRY_RENDER_H

#include "entry_call.h"

const char *tl_entry_path(enum tl_entry_kind k); /* "/v1/prefix_caches" ... */
void tl_entry_json(struct tl_jw *w, const struct tl_view *v, const struct tl_facts *facts);
/* Answers of calls. */
void tl_reply_made(struct tl_call *c);    /* 201, 200 or 202, with Location and ETag */
void tl_reply_entry(struct tl_call *c);   /* 200, or 304 */
void tl_reply_deleted(struct tl_call *c); /* 204, or 202 while in use */
void tl_reply_listing(struct tl_call *c);
void tl_reply_verified(struct tl_call *c);

#endif
