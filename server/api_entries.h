/* server/api_entries.h - what the routes of all named entries share. Thread: loop. */
#ifndef TL_SERVER_API_ENTRIES_H
#define TL_SERVER_API_ENTRIES_H

#include "definitions.h"
#include "http.h"

void tl_api_entry_make(struct tl_exchange *x, enum tl_entry_kind kind); /* PUT with {id}, POST without */
void tl_api_entry_read(struct tl_exchange *x, enum tl_entry_kind kind);
void tl_api_entry_patch(struct tl_exchange *x, enum tl_entry_kind kind);
void tl_api_entry_delete(struct tl_exchange *x, enum tl_entry_kind kind);
void tl_api_entry_list(struct tl_exchange *x, enum tl_entry_kind kind);
void tl_api_entry_verify(struct tl_exchange *x, enum tl_entry_kind kind);

#endif
