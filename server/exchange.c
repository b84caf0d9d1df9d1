/* The rules of a request: what the HTTP library lets through and must not pass, who may call what, and how answers and
 * errors look. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "http.h"
#include "http_status.h"
#include "log.h"
#include "routes.h"
#include "server.h"

#define STATUS_CLIENT_GONE 499 /* for the log and the metrics: nobody was there to be answered */

/* ---- answers ------------------------------------------------------------------------------------------------------ */

void tl_reply_json(struct tl_exchange *x, int status) { tl_http_reply(x, status, "application/json"); }

static double default_retry_s(const struct tl_exchange *x, int code)
{
    switch (code) {
    case TL_ERR_OVERLOADED:
    case TL_CODE_QUEUE_TIMEOUT:
    case TL_CODE_GENERATION_MEMORY: return tl_server_wait_s(x->srv);
    case TL_CODE_MODEL_LOADING: return 2;
    default: return 5;
    }
}

void tl_reply_error(struct tl_exchange *x, const struct tl_error *err)
{
    int code = (int)err->status;
    const struct tl_code_row *row = tl_code_row(code);
    struct tl_jw w = {.b = &x->out};
    bool problem = x->h.accept && strstr(x->h.accept, "application/problem+json");
    if (row->retry == TL_RETRY_LATER) {
        double wait = x->retry_s > 0 ? x->retry_s : default_retry_s(x, code);
        if (wait < 0.05)
            wait = 0.05;
        if (wait > 60)
            wait = 60; /* clients give up above two minutes instead of waiting */
        tl_http_header(x, "Retry-After", "%d", (int)(wait + 0.999));
        tl_http_header(x, "retry-after-ms", "%d", (int)(wait * 1000));
    } else if (row->retry == TL_RETRY_NEVER) {
        tl_http_header(x, "x-should-retry", "false");
    }
    if (row->http == 401)
        tl_http_header(x, "WWW-Authenticate", "Bearer");
    if (code == TL_CODE_SERVER_DRAINING)
        x->close = true;
    if (code > 0 && code < TL_CODE_COUNT)
        x->srv->metrics.rejected[code]++;
    x->out.n = 0;
    if (problem) {
        tl_error_problem(&w, err, x->request_id);
    } else {
        tl_jw_obj(&w, NULL);
        tl_error_json(&w, "error", err, x->request_id);
        tl_jw_obj_end(&w);
    }
    tl_http_reply(x, row->http, problem ? "application/problem+json" : "application/json");
}

#define REFUSE(x, code, param, ...)                                                                                    \
    do {                                                                                                               \
        struct tl_error refusal;                                                                                       \
        tl_refuse(&refusal, code, param, __VA_ARGS__);                                                                 \
        tl_reply_error(x, &refusal);                                                                                   \
        return false;                                                                                                  \
    } while (0)

void tl_exchange_too_large(struct tl_exchange *x)
{
    struct tl_error err;
    tl_refuse(&err, TL_CODE_REQUEST_TOO_LARGE, NULL, "The body is larger than %lld bytes.",
              (long long)x->srv->cfg->max_body_bytes);
    tl_error_num(&err, "limit", x->srv->cfg->max_body_bytes);
    tl_reply_error(x, &err);
}

void tl_exchange_too_many(struct tl_exchange *x)
{
    struct tl_error err;
    tl_refuse(&err, TL_ERR_OVERLOADED, NULL, "Too many request bodies are arriving at once; try again later.");
    x->retry_s = 1;
    tl_reply_error(x, &err);
}

static void name_request(struct tl_exchange *x)
{
    memcpy(x->request_id, "req_", 4);
    tl_ulid(x->request_id + 4);
}

void tl_exchange_unreadable(struct tl_exchange *x, int http)
{
    long long bytes = (long long)x->srv->cfg->connection_bytes;
    struct tl_error err;
    int code = TL_CODE_INVALID_REQUEST;
    if (!x->request_id[0])
        name_request(x);
    switch (http) {
    case 408:
        code = tl_refuse(&err, TL_CODE_REQUEST_TIMEOUT, NULL, "The request did not arrive in time.");
        x->retry_s = 1;
        break;
    case 413: code = tl_refuse(&err, TL_CODE_REQUEST_TOO_LARGE, NULL, "A chunk of the body is too large."); break;
    case 414:
        code = tl_refuse(&err, TL_CODE_URI_TOO_LONG, NULL, "The request line does not fit into %lld bytes.", bytes);
        break;
    case 431:
        code = tl_refuse(&err, TL_CODE_HEADERS_TOO_LARGE, NULL, "The headers do not fit into %lld bytes.", bytes);
        break;
    case 500: code = tl_refuse(&err, TL_ERR_INTERNAL, NULL, "The request could not be taken in."); break;
    default: tl_refuse(&err, code, NULL, "The request is not well-formed HTTP."); break;
    }
    if (code == TL_CODE_URI_TOO_LONG || code == TL_CODE_HEADERS_TOO_LARGE)
        tl_error_num(&err, "limit", bytes);
    tl_reply_error(x, &err);
}

/* ---- checks ------------------------------------------------------------------------------------------------------- */

static bool all_digits(const char *s)
{
    size_t n = strlen(s);
    return n > 0 && n < 19 && strspn(s, "0123456789") == n;
}

/* Framing that two parsers could read in two ways must not pass. */
static bool check_framing(struct tl_exchange *x)
{
    const struct tl_headers *h = &x->h;
    x->close = true; /* for all refusals here: what follows on the connection cannot be trusted */
    if (strncmp(x->version, "HTTP/1.", 7) != 0)
        REFUSE(x, TL_CODE_INVALID_REQUEST, NULL, "Only HTTP/1.1 and HTTP/1.0 are spoken here.");
    if (h->bad_name)
        REFUSE(x, TL_CODE_INVALID_REQUEST, NULL, "A header has a malformed name.");
    if (h->n_transfer_encoding > 0 && h->n_content_length > 0)
        REFUSE(x, TL_CODE_INVALID_REQUEST, NULL, "Transfer-Encoding and Content-Length exclude each other.");
    if (h->n_content_length > 1 || h->n_transfer_encoding > 1)
        REFUSE(x, TL_CODE_INVALID_REQUEST, NULL, "A length header is there more than once.");
    if (h->content_length && !all_digits(h->content_length))
        REFUSE(x, TL_CODE_INVALID_REQUEST, NULL, "Content-Length is not a number of bytes.");
    if (h->transfer_encoding && strcasecmp(h->transfer_encoding, "chunked") != 0)
        REFUSE(x, TL_CODE_NOT_IMPLEMENTED, NULL, "The only transfer coding known here is chunked.");
    if (h->expect && strcasecmp(h->expect, "100-continue") != 0)
        REFUSE(x, TL_CODE_EXPECTATION_FAILED, NULL, "The only expectation met here is 100-continue.");
    x->close = false;
    return true;
}

/* Does the comma-separated list hold exactly s[0..n)? */
static bool in_list(const char *list, const char *s, size_t n)
{
    while (*list) {
        list += strspn(list, ", ");
        size_t len = strcspn(list, ", ");
        if (len == n && n > 0 && strncasecmp(list, s, n) == 0)
            return true;
        list += len;
    }
    return false;
}

static bool local_only(const struct tl_exchange *x)
{
    return x->admin_side ? x->srv->admin_local_hosts_only : x->srv->local_hosts_only;
}

/* Where no key is asked for, any web page could have the browser of somebody on this machine change things here. */
static bool check_origin(struct tl_exchange *x)
{
    const char *origin = x->h.origin;
    bool reads = strcmp(x->method, "GET") == 0 || strcmp(x->method, "HEAD") == 0 || strcmp(x->method, "OPTIONS") == 0;
    if (!origin || reads || !local_only(x) || in_list(x->srv->cfg->cors_origins, origin, strlen(origin)))
        return true;
    REFUSE(x, TL_CODE_INSUFFICIENT_ROLE, NULL, "Web pages of this origin may not call (see cors_origins).");
}

static bool check_host(struct tl_exchange *x)
{
    const char *host = x->h.host, *allowed = x->srv->cfg->allowed_hosts;
    bool required = strcmp(x->version, "HTTP/1.0") != 0;
    if ((!host && required) || x->h.n_host > 1)
        REFUSE(x, TL_CODE_INVALID_HOST, NULL, "One Host header is required.");
    if (!host)
        return true;
    size_t n = strlen(host);
    if (n > 255 || strspn(host, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_:[]%") != n)
        REFUSE(x, TL_CODE_INVALID_HOST, NULL, "The Host header is malformed.");
    const char *colon = strrchr(host, ':'), *bracket = strchr(host, ']');
    if (colon && (!bracket || colon > bracket))
        n = (size_t)(colon - host); /* without the port */
    if (allowed[0] && !in_list(allowed, host, n))
        REFUSE(x, TL_CODE_INVALID_HOST, NULL, "This Host is not served here.");
    if (allowed[0] || !local_only(x))
        return true;
    bool number = strspn(host, "0123456789.") == n || host[0] == '[' || n == 0;
    if (!number && !(n == 9 && strncasecmp(host, "localhost", 9) == 0))
        REFUSE(x, TL_CODE_INVALID_HOST, NULL, "Without API keys only local names are served (see allowed_hosts).");
    return true;
}

static bool check_key(struct tl_exchange *x, const struct tl_route *route)
{
    const char *auth = x->h.authorization;
    if (x->srv->keys.n == 0 || (route && route->role == TL_ROLE_NONE))
        return true;
    if (auth && strncasecmp(auth, "Bearer ", 7) == 0)
        x->key = tl_keys_find(&x->srv->keys, auth + 7 + strspn(auth + 7, " "));
    if (!x->key)
        REFUSE(x, TL_CODE_INVALID_API_KEY, NULL, "%s", auth ? "This API key is not known." : "An API key is required.");
    x->key->n_users++;
    if (route && !(x->key->roles & route->role))
        REFUSE(x, TL_CODE_INSUFFICIENT_ROLE, NULL, "This API key may not do that.");
    return true;
}

static bool check_media(struct tl_exchange *x)
{
    const char *type = x->h.content_type, *params;
    bool body = strcmp(x->method, "POST") == 0 || strcmp(x->method, "PUT") == 0 || strcmp(x->method, "PATCH") == 0;
    if (!body || !x->route->generates)
        return true;
    if (x->h.content_encoding && strcasecmp(x->h.content_encoding, "identity") != 0)
        REFUSE(x, TL_CODE_UNSUPPORTED_MEDIA_TYPE, NULL, "Bodies with a content encoding are not read.");
    if (!type)
        return true;
    size_t n = strcspn(type, "; ");
    if (n != 16 || strncasecmp(type, "application/json", 16) != 0)
        REFUSE(x, TL_CODE_UNSUPPORTED_MEDIA_TYPE, NULL, "The Content-Type must be application/json.");
    params = strcasestr(type, "charset=");
    if (!params)
        return true;
    params += 8;
    params += *params == '"';
    if (strncasecmp(params, "utf-8", 5) != 0 && strncasecmp(params, "utf8", 4) != 0)
        REFUSE(x, TL_CODE_UNSUPPORTED_MEDIA_TYPE, NULL, "The charset must be utf-8.");
    return true;
}

/* May work start now? */
static bool check_state(struct tl_exchange *x)
{
    struct tl_server *s = x->srv;
    if (!x->route->generates)
        return true;
    if (s->state == TL_SERVER_LOADING)
        REFUSE(x, TL_CODE_MODEL_LOADING, NULL, "The model is being loaded (%d %%).", (int)(s->load_fraction * 100));
    if (s->state == TL_SERVER_FAILED)
        REFUSE(x, TL_ERR_DEVICE, NULL, "The device has failed: %s", s->failure.msg);
    if (s->state == TL_SERVER_DRAINING || s->held)
        REFUSE(x, TL_CODE_SERVER_DRAINING, NULL, "The server takes no new work.");
    return true;
}

static bool check_rate(struct tl_exchange *x)
{
    double wait = 0;
    if (!x->route->generates)
        return true;
    if (x->key && !tl_key_take(x->key, x->t_start, &wait)) {
        x->retry_s = wait;
        REFUSE(x, TL_CODE_RATE_LIMIT, NULL, "This API key may send %d requests a minute.", x->key->rpm);
    }
    return true;
}

static bool find_route(struct tl_exchange *x)
{
    char allow[128];
    unsigned side = x->admin_side ? TL_SIDE_ADMIN : TL_SIDE_PUBLIC;
    if (memmem(x->path, x->path_len, "%00", 3))
        REFUSE(x, TL_CODE_INVALID_REQUEST, NULL, "The path holds a NUL.");
    x->route = tl_route_find(x->method, x->path, x->path_len, side, x->param, sizeof(x->param), allow);
    if (!check_key(x, x->route))
        return false;
    if (x->route)
        return true;
    if (!allow[0])
        REFUSE(x, TL_CODE_ROUTE_NOT_FOUND, NULL, "There is nothing at this path.");
    tl_http_header(x, "Allow", "%s", allow);
    REFUSE(x, TL_CODE_METHOD_NOT_ALLOWED, NULL, "This path answers to: %s.", allow);
}

/* Browsers: only origins on the list, never with credentials. True if the request was a preflight and is answered. */
static bool cors(struct tl_exchange *x)
{
    const char *origin = x->h.origin;
    if (!origin || !in_list(x->srv->cfg->cors_origins, origin, strlen(origin)) || strlen(origin) > 200)
        return false;
    tl_http_header(x, "Access-Control-Allow-Origin", "%s", origin);
    tl_http_header(x, "Vary", "Origin");
    if (strcmp(x->method, "OPTIONS") != 0 || !x->h.acr_method) {
        tl_http_header(x, "Access-Control-Expose-Headers", "X-Request-Id, ETag, Location, Retry-After");
        return false;
    }
    tl_http_header(x, "Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE");
    tl_http_header(x, "Access-Control-Allow-Headers",
                   "Authorization, Content-Type, X-Request-Id, traceparent, If-Match, "
                   "If-None-Match, Prefer, Idempotency-Key");
    tl_http_reply(x, 204, NULL);
    return true;
}

void tl_exchange_begin(struct tl_exchange *x)
{
    if (x->h.request_id && tl_request_id_ok(x->h.request_id)) {
        memcpy(x->request_id, x->h.request_id, strlen(x->h.request_id) + 1);
    } else {
        name_request(x);
    }
    if (x->h.traceparent && !tl_traceparent(x->h.traceparent, x->trace_id, x->parent_id))
        x->trace_id[0] = '\0';
    if (strncasecmp(x->path, "http://", 7) == 0) { /* absolute form, as sent to proxies */
        char *slash = strchr(x->path + 7, '/');
        x->path_len = slash ? x->path_len - (size_t)(slash - x->path) : 1;
        if (slash)
            memmove(x->path, slash, x->path_len + 1);
        else
            memcpy(x->path, "/", 2);
    }
    if (!check_framing(x) || !check_host(x) || cors(x) || !check_origin(x) || !find_route(x) || !check_media(x) ||
        !check_state(x) || !check_rate(x))
        return;
    if (x->h.content_length && strtoll(x->h.content_length, NULL, 10) > x->srv->cfg->max_body_bytes)
        tl_exchange_too_large(x);
}

void tl_exchange_dispatch(struct tl_exchange *x)
{
    if (x->body.failed) {
        struct tl_error err;
        tl_fail_host_memory(&err, x->body.n);
        tl_reply_error(x, &err);
        return;
    }
    if (check_state(x))
        x->route->handle(x); /* the state may have changed while the body came */
}

/* ---- the end ------------------------------------------------------------------------------------------------------ */

void tl_exchange_done(struct tl_exchange *x)
{
    const struct tl_note *n = &x->note;
    struct tl_log_line l;
    int status = x->status ? x->status : STATUS_CLIENT_GONE;
    double seconds = tl_now_mono() - x->t_start;
    tl_metrics_request(&x->srv->metrics, tl_route_index(x->route), status, n->finish);
    if (n->finish && x->route)
        tl_hist_add(&x->srv->metrics.duration[tl_route_index(x->route)], TL_HIST_DURATION, seconds);
    bool health = x->route && x->route->role == TL_ROLE_NONE;
    enum tl_log_level level = (health || x->admin_side) && !x->srv->cfg->log_health ? TL_LOG_DEBUG : TL_LOG_INFO;
    if (!tl_log_on(level))
        return;
    tl_log_begin(&l, level, "request");
    tl_log_str(&l, "id", x->request_id);
    tl_log_str(&l, "method", x->method);
    tl_log_str(&l, "route", x->route ? x->route->path : "none");
    tl_log_int(&l, "status", status);
    tl_log_num(&l, "ms", seconds * 1e3);
    if (x->key)
        tl_log_str(&l, "key", x->key->name);
    if (x->trace_id[0]) {
        tl_log_str(&l, "trace_id", x->trace_id);
        tl_log_str(&l, "parent_id", x->parent_id);
    }
    if (n->finish) {
        tl_log_str(&l, "finish", n->finish);
        tl_log_int(&l, "prompt_tokens", n->n_prompt);
        tl_log_int(&l, "reused_tokens", n->n_cached);
        tl_log_int(&l, "tokens", n->n_generated);
        tl_log_num(&l, "queue_ms", n->queue_s * 1e3);
        tl_log_num(&l, "ttft_ms", n->ttft_s * 1e3);
    }
    tl_log_end(&l);
}
