/* server/http_refusal.h - requests that the HTTP library cannot parse get an answer of ours.
 *
 * The library knows no hook for its own refusals (a request line or headers beyond its memory, malformed lengths and chunks):
 * it queues a page of HTML by its public function. Within this program that name is ours (http_refusal.c), so that such a
 * refusal comes by here; our own answers take tl_http_queue. Thread: loop. */
#ifndef TL_SERVER_HTTP_REFUSAL_H
#define TL_SERVER_HTTP_REFUSAL_H

#include <microhttpd.h>
#include <stdbool.h>

#if MHD_VERSION >= 0x00097002
#define MHD_ANSWER enum MHD_Result
#else
#define MHD_ANSWER int
#endif

/* The library's MHD_queue_response. */
MHD_ANSWER tl_http_queue(struct MHD_Connection *mhd, unsigned status, struct MHD_Response *r);
/* http.c: the library wants to refuse with this status. True: answered; the connection is to be closed. */
bool tl_http_refused(struct MHD_Connection *mhd, unsigned status);

#endif
