/* server/http_status.h - every error a client can see: its code, HTTP status and whether a retry helps. One table.
 *
 * Codes of the engine (enum tl_status) come first, the daemon's own codes continue the count, so one struct tl_error
 * carries both. Thread: any. */
#ifndef TL_SERVER_HTTP_STATUS_H
#define TL_SERVER_HTTP_STATUS_H

#include "../engine/tinyloop.h"
#include "bytes.h"

enum tl_code {
    TL_CODE_INVALID_JSON = TL_STATUS_COUNT,
    TL_CODE_INVALID_TYPE,
    TL_CODE_UNKNOWN_FIELD,
    TL_CODE_UNSUPPORTED_PARAMETER,
    TL_CODE_INVALID_TOKEN,
    TL_CODE_CONFLICTING_REUSE,
    TL_CODE_INVALID_REQUEST, /* broken HTTP framing */
    TL_CODE_INVALID_HOST,
    TL_CODE_INVALID_API_KEY,
    TL_CODE_INSUFFICIENT_ROLE,
    TL_CODE_ROUTE_NOT_FOUND,
    TL_CODE_MODEL_NOT_FOUND,
    TL_CODE_REQUEST_NOT_FOUND,
    TL_CODE_METHOD_NOT_ALLOWED,
    TL_CODE_REQUEST_TIMEOUT,
    TL_CODE_REQUEST_TOO_LARGE,
    TL_CODE_URI_TOO_LONG,
    TL_CODE_HEADERS_TOO_LARGE,
    TL_CODE_UNSUPPORTED_MEDIA_TYPE,
    TL_CODE_EXPECTATION_FAILED,
    TL_CODE_RATE_LIMIT,
    TL_CODE_NOT_IMPLEMENTED, /* unknown transfer coding */
    TL_CODE_QUEUE_TIMEOUT,
    TL_CODE_MODEL_LOADING,
    TL_CODE_SERVER_DRAINING,
    TL_CODE_GENERATION_MEMORY,      /* memory refused to an admitted generation, which may be tried again */
    TL_CODE_PREFIX_CACHE_NOT_FOUND, /* in the order of enum tl_entry_kind */
    TL_CODE_RESUME_HANDLE_NOT_FOUND,
    TL_CODE_POOL_ENTRY_NOT_FOUND,
    TL_CODE_RESOURCE_GONE,
    TL_CODE_RESOURCE_BUILDING,
    TL_CODE_RESOURCE_IN_USE,
    TL_CODE_ID_EXISTS,
    TL_CODE_ENTRY_QUOTA,
    TL_CODE_IMMUTABLE_FIELD,
    TL_CODE_INVALID_ID,
    TL_CODE_PRECONDITION_FAILED,
    TL_CODE_PREFIX_MISMATCH, /* prompt_is_full: the prompt does not begin with the entry's tokens */
    TL_CODE_IDEMPOTENCY_REUSED,
    TL_CODE_IDEMPOTENCY_IN_PROGRESS,
    TL_CODE_COUNT
};

enum tl_retry {
    TL_RETRY_NO,    /* the client's clients do not retry this HTTP status anyway */
    TL_RETRY_NEVER, /* they would: "x-should-retry: false" */
    TL_RETRY_LATER  /* "Retry-After" */
};

struct tl_code_row {
    const char *name;
    int http;
    enum tl_retry retry;
};
const struct tl_code_row *tl_code_row(int code); /* TL_OK and unknown numbers: the row of internal_error */
const char *tl_code_type(int http);              /* "invalid_request_error" ... */
const char *tl_http_reason(int http);

/* The daemon's tl_fail: also for its own codes. Returns code. */
int tl_refuse(struct tl_error *err, int code, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* {"error":{...}} of one error. */
void tl_error_json(struct tl_jw *w, const char *key, const struct tl_error *err, const char *request_id);
/* RFC 9457. */
void tl_error_problem(struct tl_jw *w, const struct tl_error *err, const char *request_id);

#endif
