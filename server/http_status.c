#include "http_status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "registry.h"

static const struct tl_code_row rows[TL_CODE_COUNT] = {
    [TL_ERR_BAD_PARAM] = {"bad_param", 400, TL_RETRY_NO},
    [TL_ERR_OUT_OF_RANGE] = {"out_of_range", 400, TL_RETRY_NO},
    [TL_ERR_EMPTY_PROMPT] = {"empty_prompt", 400, TL_RETRY_NO},
    [TL_ERR_TOKEN_OUT_OF_VOCAB] = {"token_out_of_vocab", 400, TL_RETRY_NO},
    [TL_ERR_CONTEXT_LENGTH] = {"context_length_exceeded", 400, TL_RETRY_NO},
    [TL_ERR_LOOPS_RANGE] = {"loops_out_of_range", 400, TL_RETRY_NO},
    [TL_ERR_LOOP_DEPTH] = {"loop_depth_mismatch", 422, TL_RETRY_NO},
    [TL_ERR_LOOPS_USED_RANGE] = {"loops_used_out_of_range", 400, TL_RETRY_NO},
    [TL_ERR_MAX_LOOPS] = {"max_loops_exceeded", 400, TL_RETRY_NO},
    [TL_ERR_RESUME_DEPTH] = {"resume_depth_out_of_range", 422, TL_RETRY_NO},
    [TL_ERR_DECODE_DEPTH] = {"decode_depth_unpopulated", 422, TL_RETRY_NO},
    [TL_ERR_WINDOW_RANGE] = {"cache_window_out_of_range", 400, TL_RETRY_NO},
    [TL_ERR_WINDOW_MISMATCH] = {"cache_window_mismatch", 422, TL_RETRY_NO},
    [TL_ERR_MODEL_MISMATCH] = {"model_mismatch", 422, TL_RETRY_NO},
    [TL_ERR_NO_POOL_MATCH] = {"no_pool_match", 422, TL_RETRY_NO},
    [TL_ERR_EXCEEDS_MEMORY] = {"request_exceeds_memory", 400, TL_RETRY_NO},
    [TL_ERR_NO_DEVICE_MEMORY] = {"out_of_device_memory", 507, TL_RETRY_NEVER},
    [TL_ERR_NO_HOST_MEMORY] = {"out_of_host_memory", 503, TL_RETRY_LATER},
    [TL_ERR_OVERLOADED] = {"server_overloaded", 503, TL_RETRY_LATER},
    [TL_ERR_CANCELLED] = {"request_cancelled", 409, TL_RETRY_NEVER},
    [TL_ERR_NON_FINITE] = {"non_finite_logits", 500, TL_RETRY_NEVER},
    [TL_ERR_NOT_FOUND] = {"not_found", 404, TL_RETRY_NO},
    [TL_ERR_BAD_FILE] = {"bad_file", 500, TL_RETRY_NEVER},
    [TL_ERR_UNSUPPORTED] = {"unsupported", 400, TL_RETRY_NO},
    [TL_ERR_IO] = {"io_error", 500, TL_RETRY_NEVER},
    [TL_ERR_DEVICE] = {"gpu_failed", 503, TL_RETRY_LATER},
    [TL_ERR_INVALID_GRAMMAR] = {"invalid_grammar", 400, TL_RETRY_NO},
    [TL_ERR_UNSUPPORTED_SCHEMA] = {"unsupported_schema", 400, TL_RETRY_NO},
    [TL_ERR_GRAMMAR_PREFIX_CONFLICT] = {"grammar_prefix_conflict", 422, TL_RETRY_NO},
    [TL_ERR_GRAMMAR_NO_CONTINUATION] = {"grammar_no_continuation", 500, TL_RETRY_NEVER},
    [TL_ERR_INTERNAL] = {"internal_error", 500, TL_RETRY_NEVER},

    [TL_CODE_INVALID_JSON] = {"invalid_json", 400, TL_RETRY_NO},
    [TL_CODE_INVALID_TYPE] = {"invalid_type", 400, TL_RETRY_NO},
    [TL_CODE_UNKNOWN_FIELD] = {"unknown_field", 400, TL_RETRY_NO},
    [TL_CODE_UNSUPPORTED_PARAMETER] = {"unsupported_parameter", 400, TL_RETRY_NO},
    [TL_CODE_INVALID_TOKEN] = {"invalid_token", 400, TL_RETRY_NO},
    [TL_CODE_CONFLICTING_REUSE] = {"conflicting_reuse", 400, TL_RETRY_NO},
    [TL_CODE_INVALID_REQUEST] = {"invalid_request", 400, TL_RETRY_NO},
    [TL_CODE_INVALID_HOST] = {"invalid_host", 400, TL_RETRY_NO},
    [TL_CODE_INVALID_API_KEY] = {"invalid_api_key", 401, TL_RETRY_NO},
    [TL_CODE_INSUFFICIENT_ROLE] = {"insufficient_role", 403, TL_RETRY_NO},
    [TL_CODE_ROUTE_NOT_FOUND] = {"route_not_found", 404, TL_RETRY_NO},
    [TL_CODE_MODEL_NOT_FOUND] = {"model_not_found", 404, TL_RETRY_NO},
    [TL_CODE_REQUEST_NOT_FOUND] = {"request_not_found", 404, TL_RETRY_NO},
    [TL_CODE_METHOD_NOT_ALLOWED] = {"method_not_allowed", 405, TL_RETRY_NO},
    [TL_CODE_REQUEST_TIMEOUT] = {"request_timeout", 408, TL_RETRY_LATER},
    [TL_CODE_REQUEST_TOO_LARGE] = {"request_too_large", 413, TL_RETRY_NO},
    [TL_CODE_URI_TOO_LONG] = {"uri_too_long", 414, TL_RETRY_NO},
    [TL_CODE_HEADERS_TOO_LARGE] = {"headers_too_large", 431, TL_RETRY_NO},
    [TL_CODE_UNSUPPORTED_MEDIA_TYPE] = {"unsupported_media_type", 415, TL_RETRY_NO},
    [TL_CODE_EXPECTATION_FAILED] = {"expectation_failed", 417, TL_RETRY_NO},
    [TL_CODE_RATE_LIMIT] = {"rate_limit_exceeded", 429, TL_RETRY_LATER},
    [TL_CODE_NOT_IMPLEMENTED] = {"not_implemented", 501, TL_RETRY_NEVER},
    [TL_CODE_QUEUE_TIMEOUT] = {"queue_timeout", 503, TL_RETRY_LATER},
    [TL_CODE_MODEL_LOADING] = {"model_loading", 503, TL_RETRY_LATER},
    [TL_CODE_SERVER_DRAINING] = {"server_draining", 503, TL_RETRY_LATER},
    [TL_CODE_GENERATION_MEMORY] = {"out_of_device_memory", 503, TL_RETRY_LATER},
    [TL_CODE_PREFIX_CACHE_NOT_FOUND] = {"prefix_cache_not_found", 404, TL_RETRY_NO},
    [TL_CODE_RESUME_HANDLE_NOT_FOUND] = {"resume_handle_not_found", 404, TL_RETRY_NO},
    [TL_CODE_POOL_ENTRY_NOT_FOUND] = {"pool_entry_not_found", 404, TL_RETRY_NO},
    [TL_CODE_RESOURCE_GONE] = {"resource_gone", 410, TL_RETRY_NO},
    [TL_CODE_RESOURCE_BUILDING] = {"resource_building", 409, TL_RETRY_LATER},
    [TL_CODE_RESOURCE_IN_USE] = {"resource_in_use", 409, TL_RETRY_LATER},
    [TL_CODE_ID_EXISTS] = {"id_already_exists", 409, TL_RETRY_NEVER},
    [TL_CODE_ENTRY_QUOTA] = {"entry_quota_exceeded", 429, TL_RETRY_NEVER},
    [TL_CODE_IMMUTABLE_FIELD] = {"immutable_field", 422, TL_RETRY_NO},
    [TL_CODE_INVALID_ID] = {"invalid_id", 400, TL_RETRY_NO},
    [TL_CODE_PRECONDITION_FAILED] = {"precondition_failed", 412, TL_RETRY_NO},
    [TL_CODE_PREFIX_MISMATCH] = {"prefix_mismatch", 422, TL_RETRY_NO},
    [TL_CODE_IDEMPOTENCY_REUSED] = {"idempotency_key_reused", 422, TL_RETRY_NO},
    [TL_CODE_IDEMPOTENCY_IN_PROGRESS] = {"idempotency_in_progress", 409, TL_RETRY_LATER},
};

const struct tl_code_row *tl_code_row(int code)
{
    if (code <= 0 || code >= TL_CODE_COUNT || !rows[code].name)
        return &rows[TL_ERR_INTERNAL];
    return &rows[code];
}

const char *tl_code_type(int http)
{
    switch (http) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 409: return "conflict_error";
    case 429: return "rate_limit_error";
    case 503: return "unavailable_error";
    case 507: return "insufficient_storage_error";
    default: return http >= 500 ? "server_error" : "invalid_request_error";
    }
}

const char *tl_http_reason(int http)
{
    switch (http) {
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 409: return "Conflict";
    case 410: return "Gone";
    case 412: return "Precondition Failed";
    case 413: return "Content Too Large";
    case 414: return "URI Too Long";
    case 415: return "Unsupported Media Type";
    case 417: return "Expectation Failed";
    case 422: return "Unprocessable Content";
    case 429: return "Too Many Requests";
    case 431: return "Request Header Fields Too Large";
    case 501: return "Not Implemented";
    case 503: return "Service Unavailable";
    case 507: return "Insufficient Storage";
    default: return "Internal Server Error";
    }
}

int tl_refuse(struct tl_error *err, int code, const char *param, const char *fmt, ...)
{
    char msg[sizeof(err->msg)];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof(msg), fmt, ap);
    va_end(ap);
    tl_fail(err, (enum tl_status)code, "%s", msg);
    if (param)
        tl_error_param(err, param);
    return code;
}

/* A number under "reason" stands for a word. */
static void write_num(struct tl_jw *w, const struct tl_error *err, int i)
{
    const char *key = err->num[i].key;
    if (strcmp(key, "reason") == 0)
        tl_jw_str(w, key, tl_gone_name((int)err->num[i].value));
    else
        tl_jw_int(w, key, err->num[i].value);
}

void tl_error_json(struct tl_jw *w, const char *key, const struct tl_error *err, const char *request_id)
{
    const struct tl_code_row *row = tl_code_row((int)err->status);
    tl_jw_obj(w, key);
    tl_jw_str(w, "message", err->msg);
    tl_jw_str(w, "type", tl_code_type(row->http));
    tl_jw_str(w, "param", err->param[0] ? err->param : NULL);
    tl_jw_str(w, "code", row->name);
    if (err->n_nums > 0) {
        tl_jw_obj(w, "details");
        for (int i = 0; i < err->n_nums; i++)
            write_num(w, err, i);
        tl_jw_obj_end(w);
    }
    if (request_id)
        tl_jw_str(w, "request_id", request_id);
    tl_jw_obj_end(w);
}

void tl_error_problem(struct tl_jw *w, const struct tl_error *err, const char *request_id)
{
    const struct tl_code_row *row = tl_code_row((int)err->status);
    char type[96];
    snprintf(type, sizeof(type), "urn:tinyloop:error:%s", row->name);
    tl_jw_obj(w, NULL);
    tl_jw_str(w, "type", type);
    tl_jw_str(w, "title", tl_http_reason(row->http));
    tl_jw_int(w, "status", row->http);
    tl_jw_str(w, "detail", err->msg);
    tl_jw_str(w, "instance", request_id);
    tl_jw_str(w, "code", row->name);
    if (err->param[0])
        tl_jw_str(w, "param", err->param);
    for (int i = 0; i < err->n_nums; i++)
        write_num(w, err, i);
    tl_jw_obj_end(w);
}
