/* server/ids.h - identifiers: request ids, trace ids, random numbers. Thread: loop. */
#ifndef TL_SERVER_IDS_H
#define TL_SERVER_IDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TL_ULID_CHARS     26
#define TL_REQUEST_ID_MAX 128

uint64_t tl_random64(void);
void tl_ulid(char out[TL_ULID_CHARS + 1]);

/* 1..TL_REQUEST_ID_MAX characters of [A-Za-z0-9._:-] : safe in headers, logs and JSON. */
bool tl_request_id_ok(const char *s);

/* W3C traceparent "00-<32 hex>-<16 hex>-<2 hex>": copies the trace id; false if it is malformed or all zeros. */
bool tl_traceparent(const char *s, char trace_id[33], char parent_id[17]);

double tl_now_mono(void); /* seconds, monotonic */
double tl_now_wall(void); /* seconds since 1970 */

#endif
