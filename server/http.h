/* server/http.h - connections and their requests, on top of an embedded HTTP library that the event loop drives.
 *
 * http.c owns the connections: listening, deadlines of headers and bodies, body limits, suspending a connection while its
 * answer is computed, noticing that a client went away, feeding a stream. exchange.c owns the rules: which requests are
 * acceptable, which route serves them, how an answer looks. Handlers (api_*.c) see struct tl_exchange alone.
 *
 * Life of an exchange:
 *   READING    headers are here, the body is coming
 *   WAITING    the route's handler returned without an answer; the connection is suspended
 *   REPLIED    a complete answer stands in out: tl_http_reply
 *   STREAMING  the answer grows: tl_http_stream, then out is appended to, tl_http_stream_flush, tl_http_stream_end
 * It ends when the library has sent the answer or lost the client; whoever waits is told by ops->gone and must forget it.
 * Thread: loop, everything here. */
#ifndef TL_SERVER_HTTP_H
#define TL_SERVER_HTTP_H

#include <uv.h>

#include "../engine/tinyloop.h"
#include "bytes.h"
#include "ids.h"

struct tl_server;
struct tl_route;
struct tl_key;
struct tl_conn;
struct tl_http;
struct tl_exchange;

enum tl_exchange_state { TL_X_READING, TL_X_WAITING, TL_X_REPLIED, TL_X_STREAMING };

struct tl_exchange_ops {
    void (*gone)(struct tl_exchange *x);     /* the client left, or the answer is sent: x is freed after this returns */
    void (*due)(struct tl_exchange *x);      /* x->due has passed; set the next one */
    void (*writable)(struct tl_exchange *x); /* STREAMING: out was read empty */
};

/* Headers that somebody here reads; NULL = absent. Borrowed from the connection until the exchange ends. */
struct tl_headers {
    const char *host, *content_type, *content_length, *content_encoding, *transfer_encoding, *expect, *authorization;
    const char *accept, *origin, *request_id, *traceparent, *acr_method;
    const char *if_match, *if_none_match, *prefer, *idempotency_key;
    int n_host, n_content_length, n_transfer_encoding;
    bool bad_name; /* a header whose name is no token */
};

/* What the log line and the metrics say about a request besides its status. */
struct tl_note {
    const char *finish; /* static; NULL = no generation */
    int n_prompt, n_cached, n_generated;
    double queue_s, ttft_s;
};

#define TL_EXTRA_HEADERS 6

struct tl_exchange {
    struct tl_server *srv;
    struct tl_conn *conn;
    enum tl_exchange_state state;
    /* request */
    char method[16];
    char *path; /* raw, without the query */
    size_t path_len;
    const char *version;
    struct tl_headers h;
    bool admin_side; /* came in by the admin listener */
    const struct tl_route *route;
    char param[136];    /* the {id} of the route, as sent; "" = none */
    struct tl_key *key; /* NULL when the server has no keys */
    char request_id[TL_REQUEST_ID_MAX + 1];
    char trace_id[33], parent_id[17];
    struct tl_bytes body;
    size_t body_counted; /* bytes of it in srv->body_bytes */
    double t_start;
    /* answer */
    int status;
    const char *content_type;
    struct tl_bytes out;
    size_t out_pos;     /* STREAMING: bytes of out already read */
    double taken_at;    /* STREAMING: when bytes were last read, or when out stopped being empty */
    bool close;         /* end the connection after it */
    bool ended, failed; /* STREAMING: no more will come; it broke off */
    struct {
        const char *name; /* static */
        char value[256];
    } extra[TL_EXTRA_HEADERS];
    int n_extra;
    double retry_s; /* of an error that says "later"; 0 = the default */
    struct tl_note note;
    /* who waits */
    const struct tl_exchange_ops *ops;
    void *user;
    double due; /* when to call ops->due; 0 = never */
};

/* One listener. fd stays the caller's until this succeeds. Owner: caller, tl_http_free() once no connection
 * is left. */
enum tl_status tl_http_create(struct tl_http **out, struct tl_server *srv, uv_loop_t *loop, int fd, bool admin_side,
                              struct tl_error *err);
void tl_http_quiesce(struct tl_http *h); /* accept no more; close idle connections */
void tl_http_abort(struct tl_http *h);   /* break off every connection that is left */
int tl_http_connections(const struct tl_http *h);
void tl_http_pump(struct tl_http *h);   /* let the library work; after a batch of resumes */
void tl_http_free(struct tl_http *h);   /* handles close in the next turns of the loop. NULL is fine */
void tl_http_forget(struct tl_http *h); /* release the memory, after the loop has ended. NULL is fine */

void tl_http_header(struct tl_exchange *x, const char *name, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void tl_http_wait(struct tl_exchange *x, const struct tl_exchange_ops *ops, void *user); /* from a route's handler */
void tl_http_set_due(struct tl_exchange *x, double due);
/* out holds the whole answer. content_type is static. */
void tl_http_reply(struct tl_exchange *x, int status, const char *content_type);
void tl_http_stream(struct tl_exchange *x); /* 200 and the headers of an event stream */
void tl_http_stream_flush(struct tl_exchange *x);
void tl_http_stream_end(struct tl_exchange *x, bool ok);
const char *tl_http_query(struct tl_exchange *x, const char *name); /* raw value or NULL */

/* exchange.c, called by http.c */
void tl_exchange_begin(struct tl_exchange *x);    /* headers are complete; may answer (REPLIED) to refuse */
void tl_exchange_dispatch(struct tl_exchange *x); /* the body is complete */
void tl_exchange_too_large(struct tl_exchange *x);
void tl_exchange_too_many(struct tl_exchange *x); /* bodies at once */
void tl_exchange_done(struct tl_exchange *x);     /* before it is freed: log and count */
/* It could not be parsed, or did not come in time: answers with what the HTTP status stands for. */
void tl_exchange_unreadable(struct tl_exchange *x, int http);

/* exchange.c, for handlers */
void tl_reply_json(struct tl_exchange *x, int status);
void tl_reply_error(struct tl_exchange *x, const struct tl_error *err); /* Retry-After etc. included */

#endif
