/* How the library is driven, and why:
 * - It runs without threads of its own; its epoll descriptor is one handle of our loop, pump() lets it work. A zero timeout
 *   is an idle handle: a zero timer that restarts itself starves I/O in this generation of the loop library.
 * - At its connection limit the library takes the listening socket out of its set and only looks again in the next run:
 *   pump() runs once more when a place became free.
 * - It never looks at a suspended connection. A poll handle for hang-up, armed once per request, does that for it.
 * - Its timeout counts idle time alone and not for suspended connections; the deadlines here are our own timer, one per
 *   connection, that is only ever moved when it fires.
 * - Answering in the first handler call closes the connection, with the body unread; and closing with input unread resets it,
 *   which can overtake the answer. So only what a client waits for before its body, or what is too large, is refused there.
 * - The reader of a stream must suspend when it has nothing, or the library spins.
 * - What it cannot parse it refuses by itself; http_refusal.c says how that becomes an answer of ours. */
#include "http.h"

#include <errno.h>
#include <microhttpd.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "config.h"
#include "http_refusal.h"
#include "http_status.h"
#include "log.h"
#include "server.h"

/* The body of a refused request is read on, unkept, so that the client gets to reading; beyond this multiple of the limit the
 * connection is cut off. */
#define SWALLOW_FACTOR 4

enum phase { PHASE_HEADERS, PHASE_BODY, PHASE_ANSWER, PHASE_IDLE };

struct tl_conn {
    struct tl_http *h;
    struct MHD_Connection *mhd;
    int fd;
    enum phase phase;
    double since;      /* start of the phase */
    double armed;      /* when the timer fires; 0 = not armed */
    size_t body_bytes; /* of this request, kept or not */
    bool suspended, watching, broken;
    int n_handles; /* uv handles not closed yet, plus 1 for the library */
    uv_timer_t timer;
    uv_poll_t poll;
    bool poll_made;
    struct tl_exchange *x; /* the request being served */
    struct tl_conn *prev, *next;
};

struct tl_http {
    struct tl_server *srv;
    struct MHD_Daemon *daemon;
    uv_loop_t *loop;
    uv_poll_t epoll;
    uv_timer_t timer;
    uv_idle_t idle;
    bool admin_side, running, again, quiesced;
    struct tl_conn *conns;
    int n_conns, conns_max;
};

static void on_idle(uv_idle_t *idle);

/* Let pump() run soon; from inside it, once more. */
static void wake(struct tl_http *h)
{
    if (h->running)
        h->again = true;
    else
        uv_idle_start(&h->idle, on_idle);
}

/* ---- connections and their deadline ------------------------------------------------------------------------------- */

static void on_deadline(uv_timer_t *timer);

static void conn_arm(struct tl_conn *c, double due)
{
    if (due <= 0 || (c->armed > 0 && c->armed <= due) || c->broken)
        return;
    double wait = due - tl_now_mono();
    c->armed = due;
    uv_update_time(c->h->loop);
    uv_timer_start(&c->timer, on_deadline, wait > 0 ? (uint64_t)(wait * 1000.0) + 1 : 1, 0);
}

/* When something has to happen at this connection; 0 = never. */
static double conn_due(const struct tl_conn *c)
{
    const struct tl_config *cfg = c->h->srv->cfg;
    const struct tl_exchange *x = c->x;
    switch (c->phase) {
    case PHASE_HEADERS: return c->since + cfg->header_seconds;
    case PHASE_BODY: return c->since + cfg->body_seconds;
    case PHASE_IDLE: return c->since + cfg->idle_seconds;
    case PHASE_ANSWER: break;
    }
    double due = x ? x->due : 0;
    if (x && x->state == TL_X_STREAMING && x->out.n > x->out_pos) {
        double slow = x->taken_at + cfg->slow_reader_seconds;
        if (due == 0 || slow < due)
            due = slow;
    }
    return due;
}

static void set_phase(struct tl_conn *c, enum phase phase)
{
    c->phase = phase;
    c->since = tl_now_mono();
    conn_arm(c, conn_due(c));
}

static void conn_free_later(uv_handle_t *handle)
{
    struct tl_conn *c = handle->data;
    if (--c->n_handles == 0)
        free(c);
}

static void watch_stop(struct tl_conn *c)
{
    if (c->watching)
        uv_poll_stop(&c->poll);
    c->watching = false;
}

static void conn_resume(struct tl_conn *c)
{
    if (!c->suspended)
        return;
    c->suspended = false;
    MHD_resume_connection(c->mhd);
    wake(c->h);
}

/* Both directions end; the library notices and closes the connection. */
static void conn_break(struct tl_conn *c)
{
    if (c->broken)
        return;
    c->broken = true;
    watch_stop(c);
    uv_timer_stop(&c->timer);
    shutdown(c->fd, SHUT_RDWR);
    conn_resume(c);
    wake(c->h);
}

/* The client is gone while somebody works for it. */
static void client_gone(struct tl_conn *c)
{
    struct tl_exchange *x = c->x;
    const struct tl_exchange_ops *ops = x ? x->ops : NULL;
    if (ops) {
        x->ops = NULL;
        ops->gone(x);
    }
    conn_break(c);
}

static void on_hangup(uv_poll_t *poll, int status, int events)
{
    struct tl_conn *c = poll->data;
    (void)events;
    if (status == 0 && (c->phase == PHASE_BODY || !c->h->srv->cfg->half_close_cancels)) {
        /* Half-closed or closed? Only an error says the latter; a plain end of input may be either. While a body is
         * awaited, what was sent before the end still counts: the end itself is looked at again once it is complete. */
        char byte;
        ssize_t n = recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        if (n > 0 || (n == 0 && c->phase != PHASE_BODY) || (n < 0 && errno == EAGAIN)) {
            watch_stop(c);
            return;
        }
    }
    client_gone(c);
}

static void watch_start(struct tl_conn *c)
{
    if (c->watching || c->broken)
        return;
    if (!c->poll_made) {
        if (uv_poll_init(c->h->loop, &c->poll, c->fd) != 0)
            return;
        c->poll.data = c;
        c->poll_made = true;
        c->n_handles++;
    }
    c->watching = uv_poll_start(&c->poll, UV_DISCONNECT, on_hangup) == 0;
}

static void refuse_unread(struct tl_conn *c, unsigned status);

static void on_deadline(uv_timer_t *timer)
{
    struct tl_conn *c = timer->data;
    struct tl_exchange *x = c->x;
    double now = tl_now_mono(), due = conn_due(c);
    c->armed = 0;
    if (due > now) {
        conn_arm(c, due);
        return;
    }
    if (due == 0)
        return;
    if (c->phase == PHASE_HEADERS || c->phase == PHASE_BODY) {
        refuse_unread(c, 408); /* the library cannot answer outside its handler */
    } else if (c->phase == PHASE_IDLE) {
        conn_break(c);
    } else if (x && x->state == TL_X_STREAMING && x->out.n > x->out_pos &&
               now >= x->taken_at + c->h->srv->cfg->slow_reader_seconds) {
        x->note.finish = "slow_reader";
        client_gone(c);
    } else if (x && x->ops && x->due > 0 && x->due <= now) {
        x->due = 0;
        x->ops->due(x); /* may answer, which may end x in a later pump, not here */
        conn_arm(c, conn_due(c));
    }
}

static void on_connection(void *arg, struct MHD_Connection *mhd, void **slot, enum MHD_ConnectionNotificationCode code)
{
    struct tl_http *h = arg;
    struct tl_conn *c = *slot;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CONNECTION_FD);
        c = calloc(1, sizeof(*c));
        *slot = c;
        if (!c || !info) {
            free(c);
            *slot = NULL; /* the handler refuses such a connection */
            return;
        }
        c->h = h;
        c->mhd = mhd;
        c->fd = info->connect_fd;
        c->n_handles = 2;
        uv_timer_init(h->loop, &c->timer);
        c->timer.data = c;
        c->next = h->conns;
        if (h->conns)
            h->conns->prev = c;
        h->conns = c;
        h->n_conns++;
        set_phase(c, PHASE_HEADERS);
        return;
    }
    if (!c)
        return;
    if (c->prev)
        c->prev->next = c->next;
    else
        h->conns = c->next;
    if (c->next)
        c->next->prev = c->prev;
    h->n_conns--;
    watch_stop(c);
    c->broken = true;
    uv_close((uv_handle_t *)&c->timer, conn_free_later);
    if (c->poll_made)
        uv_close((uv_handle_t *)&c->poll, conn_free_later);
    if (--c->n_handles == 0)
        free(c);
    *slot = NULL;
}

/* ---- requests ----------------------------------------------------------------------------------------------------- */

static bool is_token(const char *s)
{
    if (!s[0])
        return false;
    for (; *s; s++) {
        unsigned char ch = (unsigned char)*s;
        if (ch <= 0x20 || ch >= 0x7F || strchr("()<>@,;:\\\"/[]?={}", ch))
            return false;
    }
    return true;
}

static MHD_ANSWER take_header(void *arg, enum MHD_ValueKind kind, const char *name, const char *value)
{
    struct tl_headers *h = arg;
    const struct {
        const char *name;
        const char **value;
        int *count;
    } known[] = {
        {"Host", &h->host, &h->n_host},
        {"Content-Type", &h->content_type, NULL},
        {"Content-Length", &h->content_length, &h->n_content_length},
        {"Content-Encoding", &h->content_encoding, NULL},
        {"Transfer-Encoding", &h->transfer_encoding, &h->n_transfer_encoding},
        {"Expect", &h->expect, NULL},
        {"Authorization", &h->authorization, NULL},
        {"Accept", &h->accept, NULL},
        {"Origin", &h->origin, NULL},
        {"X-Request-Id", &h->request_id, NULL},
        {"traceparent", &h->traceparent, NULL},
        {"Access-Control-Request-Method", &h->acr_method, NULL},
        {"If-Match", &h->if_match, NULL},
        {"If-None-Match", &h->if_none_match, NULL},
        {"Prefer", &h->prefer, NULL},
        {"Idempotency-Key", &h->idempotency_key, NULL},
    };
    (void)kind;
    if (!is_token(name))
        h->bad_name = true;
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (strcasecmp(name, known[i].name) != 0)
            continue;
        *known[i].value = value ? value : "";
        if (known[i].count)
            ++*known[i].count;
        break;
    }
    return MHD_YES;
}

static struct tl_exchange *exchange_new(struct tl_conn *c, const char *url, const char *method, const char *version)
{
    struct tl_exchange *x = calloc(1, sizeof(*x));
    if (!x)
        return NULL;
    x->srv = c->h->srv;
    x->conn = c;
    x->admin_side = c->h->admin_side;
    x->t_start = tl_now_mono();
    x->version = version;
    snprintf(x->method, sizeof(x->method), "%s", method);
    x->path_len = strlen(url);
    x->path = malloc(x->path_len + 1);
    if (!x->path) {
        free(x);
        return NULL;
    }
    memcpy(x->path, url, x->path_len + 1);
    MHD_get_connection_values(c->mhd, MHD_HEADER_KIND, (MHD_KeyValueIterator)take_header, &x->h);
    return x;
}

/* The body has been read by its handler, or will never be; the answer has left, or will not. */
static void body_done(struct tl_exchange *x)
{
    x->srv->body_bytes -= x->body_counted;
    x->srv->large_freed |= x->body_counted >= TL_LARGE_BODY;
    x->body_counted = 0;
}

static void exchange_free(struct tl_exchange *x)
{
    body_done(x);
    if (x->key)
        x->key->n_users--;
    tl_bytes_free(&x->body);
    tl_bytes_free(&x->out);
    free(x->path);
    free(x);
}

static ssize_t read_stream(void *arg, uint64_t pos, char *buf, size_t max)
{
    struct tl_exchange *x = arg;
    (void)pos;
    if (x->conn->broken)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    if (x->out.n == x->out_pos && !x->ended && x->ops)
        x->ops->writable(x);
    if (x->out.n > x->out_pos) {
        size_t n = x->out.n - x->out_pos;
        if (n > max)
            n = max;
        memcpy(buf, x->out.data + x->out_pos, n);
        x->out_pos += n;
        x->taken_at = tl_now_mono();
        if (x->out_pos == x->out.n)
            x->out.n = x->out_pos = 0;
        return (ssize_t)n;
    }
    if (x->ended)
        return x->failed ? MHD_CONTENT_READER_END_WITH_ERROR : MHD_CONTENT_READER_END_OF_STREAM;
    x->conn->suspended = true;
    MHD_suspend_connection(x->conn->mhd);
    return 0;
}

static struct MHD_Response *make_response(struct tl_exchange *x)
{
    struct MHD_Response *r;
    if (x->state == TL_X_STREAMING) {
        r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 32768, read_stream, x, NULL);
    } else {
        r = MHD_create_response_from_buffer(x->out.n, x->out.data, MHD_RESPMEM_MUST_FREE);
        if (r) { /* the response owns it now */
            x->srv->body_bytes += x->out.n;
            x->body_counted += x->out.n;
            memset(&x->out, 0, sizeof(x->out));
        }
    }
    if (!r)
        return NULL;
    if (x->content_type)
        MHD_add_response_header(r, "Content-Type", x->content_type);
    MHD_add_response_header(r, "X-Request-Id", x->request_id);
    MHD_add_response_header(r, "Cache-Control", "no-store");
    if (x->state == TL_X_STREAMING)
        MHD_add_response_header(r, "X-Accel-Buffering", "no");
    for (int i = 0; i < x->n_extra; i++)
        MHD_add_response_header(r, x->extra[i].name, x->extra[i].value);
    if (x->close || x->srv->state == TL_SERVER_DRAINING)
        MHD_add_response_header(r, "Connection", "close");
    return r;
}

static MHD_ANSWER send_answer(struct tl_conn *c, struct tl_exchange *x)
{
    struct MHD_Response *r = x->out.failed ? NULL : make_response(x);
    if (!r)
        return MHD_NO;
    set_phase(c, PHASE_ANSWER);
    MHD_ANSWER rc = tl_http_queue(c->mhd, (unsigned)x->status, r);
    MHD_destroy_response(r);
    return rc;
}

static MHD_ANSWER on_first_call(struct tl_conn *c, const char *url, const char *method, const char *version,
                                void **slot)
{
    struct tl_exchange *x = exchange_new(c, url, method, version);
    if (!x)
        return MHD_NO;
    *slot = x;
    c->x = x;
    c->body_bytes = 0;
    set_phase(c, PHASE_BODY);
    tl_exchange_begin(x);
    bool has_body = x->h.transfer_encoding || (x->h.content_length && strcmp(x->h.content_length, "0") != 0);
    /* The library may miss the end of input that comes together with data, and would wait for the rest of the body. */
    if (has_body && x->state != TL_X_REPLIED)
        watch_start(c);
    if (x->state != TL_X_REPLIED || !has_body)
        return MHD_YES; /* answered at the second call */
    bool endless =
        x->h.content_length && strtoll(x->h.content_length, NULL, 10) / SWALLOW_FACTOR > x->srv->cfg->max_body_bytes;
    if (!x->close && !x->h.expect && !endless)
        return MHD_YES; /* its body first */
    x->close = true;
    return send_answer(c, x);
}

static MHD_ANSWER on_request(void *arg, struct MHD_Connection *mhd, const char *url, const char *method,
                             const char *version, const char *data, size_t *n_data, void **slot)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    struct tl_conn *c = info ? info->socket_context : NULL;
    struct tl_exchange *x = *slot;
    (void)arg;
    if (!c || c->broken)
        return MHD_NO;
    if (!x)
        return on_first_call(c, url, method, version, slot);
    if (*n_data > 0) {
        size_t limit = (size_t)x->srv->cfg->max_body_bytes;
        if (x->state == TL_X_READING && x->body.n + *n_data > limit) {
            tl_exchange_too_large(x);
        } else if (x->state == TL_X_READING && x->srv->body_bytes >= (size_t)x->srv->cfg->max_bodies_bytes) {
            tl_exchange_too_many(x);
        } else if (x->state == TL_X_READING) {
            tl_bytes_add(&x->body, data, *n_data);
            x->srv->body_bytes += *n_data;
            x->body_counted += *n_data;
        }
        if (x->state == TL_X_REPLIED) { /* refused in the middle: the rest is read on, unkept */
            tl_bytes_free(&x->body);
            body_done(x);
            x->close = true;
        }
        c->body_bytes += *n_data;
        if (c->body_bytes / SWALLOW_FACTOR > limit)
            conn_break(c);
        *n_data = 0; /* always consumed: what is left would be offered again at once, for ever */
        return MHD_YES;
    }
    if (x->state == TL_X_READING) {
        set_phase(c, PHASE_ANSWER);
        tl_exchange_dispatch(x);
        body_done(x);
    }
    if (x->state == TL_X_WAITING) {
        watch_start(c);
        c->suspended = true;
        MHD_suspend_connection(mhd);
        conn_arm(c, conn_due(c));
        return MHD_YES;
    }
    if (x->state == TL_X_READING)
        return MHD_NO;
    return send_answer(c, x);
}

static void on_completed(void *arg, struct MHD_Connection *mhd, void **slot, enum MHD_RequestTerminationCode code)
{
    struct tl_exchange *x = *slot;
    (void)arg;
    (void)mhd;
    (void)code;
    if (!x)
        return;
    struct tl_conn *c = x->conn;
    const struct tl_exchange_ops *ops = x->ops;
    x->ops = NULL;
    if (ops)
        ops->gone(x);
    watch_stop(c);
    tl_exchange_done(x);
    bool close_after = x->close;
    c->x = NULL;
    *slot = NULL;
    exchange_free(x);
    set_phase(c, PHASE_IDLE);
    char byte; /* an end of input that came together with the request, which the library may have missed */
    if (close_after || c->h->quiesced || recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0)
        conn_break(c);
}

/* ---- refusals without the library ---------------------------------------------------------------------------------- */

/* The head that make_response would give, and the body; the connection ends with it. */
static void write_answer(struct tl_bytes *b, const struct tl_exchange *x)
{
    char date[40];
    time_t now = time(NULL);
    struct tm tm;
    strftime(date, sizeof(date), "%a, %d %b %Y %H:%M:%S GMT", gmtime_r(&now, &tm));
    tl_bytes_fmt(b, "HTTP/1.1 %d %s\r\nDate: %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n", x->status,
                 tl_http_reason(x->status), date, x->content_type, x->out.n);
    tl_bytes_fmt(b, "X-Request-Id: %s\r\nCache-Control: no-store\r\n", x->request_id);
    for (int i = 0; i < x->n_extra; i++)
        tl_bytes_fmt(b, "%s: %s\r\n", x->extra[i].name, x->extra[i].value);
    tl_bytes_str(b, "Connection: close\r\n\r\n");
    if (strcmp(x->method, "HEAD") != 0)
        tl_bytes_add(b, x->out.data, x->out.n);
    b->failed = b->failed || x->out.failed;
}

/* The request cannot be read to its end: nothing was sent for it yet, so the answer goes straight to the socket. */
static void refuse_unread(struct tl_conn *c, unsigned status)
{
    struct tl_exchange nameless = {
        .srv = c->h->srv, .conn = c, .admin_side = c->h->admin_side, .t_start = c->since, .method = "-"};
    struct tl_exchange *x = c->x ? c->x : &nameless;
    struct tl_bytes text = {0};
    char rest[4096];
    if (x->state == TL_X_READING) /* else it is refused already, and only the rest of its body was to be read */
        tl_exchange_unreadable(x, (int)status);
    write_answer(&text, x);
    if (!text.failed && send(c->fd, text.data, text.n, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
        tl_log(TL_LOG_DEBUG, "a client did not take its refusal");
    tl_bytes_free(&text);
    /* Closing with input left unread resets the connection, which can overtake the answer. */
    shutdown(c->fd, SHUT_WR);
    for (int i = 0; i < 256 && recv(c->fd, rest, sizeof(rest), MSG_DONTWAIT) > 0; i++)
        continue;
    if (x == &nameless) {
        tl_exchange_done(x);
        tl_bytes_free(&x->out);
    }
    conn_break(c);
}

bool tl_http_refused(struct MHD_Connection *mhd, unsigned status)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    struct tl_conn *c = info ? info->socket_context : NULL;
    if (!c || c->broken || c->phase == PHASE_ANSWER)
        return false;
    refuse_unread(c, status);
    return true;
}

/* ---- what handlers call ------------------------------------------------------------------------------------------- */

void tl_http_header(struct tl_exchange *x, const char *name, const char *fmt, ...)
{
    if (x->n_extra == TL_EXTRA_HEADERS)
        return;
    va_list ap;
    va_start(ap, fmt);
    x->extra[x->n_extra].name = name;
    vsnprintf(x->extra[x->n_extra].value, sizeof(x->extra[0].value), fmt, ap);
    va_end(ap);
    x->n_extra++;
}

void tl_http_wait(struct tl_exchange *x, const struct tl_exchange_ops *ops, void *user)
{
    x->state = TL_X_WAITING;
    x->ops = ops;
    x->user = user;
}

void tl_http_set_due(struct tl_exchange *x, double due)
{
    x->due = due;
    if (x->conn->phase == PHASE_ANSWER)
        conn_arm(x->conn, conn_due(x->conn));
}

void tl_http_reply(struct tl_exchange *x, int status, const char *content_type)
{
    x->state = TL_X_REPLIED;
    x->status = status;
    x->content_type = content_type;
    conn_resume(x->conn);
}

void tl_http_stream(struct tl_exchange *x)
{
    x->state = TL_X_STREAMING;
    x->status = 200;
    x->content_type = "text/event-stream; charset=utf-8";
    x->taken_at = tl_now_mono();
    conn_resume(x->conn);
}

void tl_http_stream_flush(struct tl_exchange *x)
{
    if (x->conn->suspended) {
        x->taken_at = tl_now_mono(); /* it waited for us until now */
        conn_resume(x->conn);
    }
    conn_arm(x->conn, conn_due(x->conn));
}

void tl_http_stream_end(struct tl_exchange *x, bool ok)
{
    x->ended = true;
    x->failed = !ok;
    tl_http_stream_flush(x);
}

const char *tl_http_query(struct tl_exchange *x, const char *name)
{
    return MHD_lookup_connection_value(x->conn->mhd, MHD_GET_ARGUMENT_KIND, name);
}

/* ---- the daemon in the loop --------------------------------------------------------------------------------------- */

static void on_timer(uv_timer_t *timer) { tl_http_pump(timer->data); }
static void on_idle(uv_idle_t *idle) { tl_http_pump(idle->data); }
static void on_epoll(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    tl_http_pump(poll->data);
}

void tl_http_pump(struct tl_http *h)
{
    MHD_UNSIGNED_LONG_LONG wait;
    if (h->running) {
        h->again = true;
        return;
    }
    h->running = true;
    do {
        h->again = false;
        bool was_full = h->n_conns >= h->conns_max;
        MHD_run(h->daemon);
        if (was_full && h->n_conns < h->conns_max)
            MHD_run(h->daemon);
    } while (h->again);
    h->running = false;
    if (MHD_get_timeout(h->daemon, &wait) != MHD_YES) {
        uv_idle_stop(&h->idle);
        uv_timer_stop(&h->timer);
    } else if (wait == 0) {
        uv_idle_start(&h->idle, on_idle);
    } else {
        uv_idle_stop(&h->idle);
        uv_timer_start(&h->timer, on_timer, wait, 0);
    }
}

static void on_library_log(void *arg, const char *fmt, va_list ap)
{
    char text[300];
    (void)arg;
    if (!tl_log_on(TL_LOG_DEBUG))
        return; /* it has a line for every client that leaves */
    vsnprintf(text, sizeof(text), fmt, ap);
    text[strcspn(text, "\n")] = '\0';
    tl_log(TL_LOG_DEBUG, "http: %s", text);
}

/* Paths stay raw: they are routed on the bytes that came, and a decoded NUL could cut them. */
static size_t keep_raw(void *arg, struct MHD_Connection *mhd, char *s)
{
    (void)arg;
    (void)mhd;
    return strlen(s);
}

enum tl_status tl_http_create(struct tl_http **out, struct tl_server *srv, uv_loop_t *loop, int fd, bool admin_side,
                              struct tl_error *err)
{
    const struct tl_config *cfg = srv->cfg;
    *out = NULL;
    struct tl_http *h = calloc(1, sizeof(*h));
    if (!h)
        return tl_fail_host_memory(err, sizeof(*h));
    h->srv = srv;
    h->loop = loop;
    h->admin_side = admin_side;
    h->conns_max = (int)cfg->max_connections;
    double backstop = cfg->idle_seconds > cfg->slow_reader_seconds ? cfg->idle_seconds : cfg->slow_reader_seconds;
    h->daemon = MHD_start_daemon(
        MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG, 0, NULL, NULL, on_request, h,
        MHD_OPTION_EXTERNAL_LOGGER, on_library_log, NULL, MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT,
        (unsigned)h->conns_max, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)backstop + 5,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)cfg->connection_bytes, MHD_OPTION_NOTIFY_COMPLETED, on_completed, h,
        MHD_OPTION_NOTIFY_CONNECTION, on_connection, h, MHD_OPTION_UNESCAPE_CALLBACK, keep_raw, NULL, MHD_OPTION_END);
    const union MHD_DaemonInfo *info = h->daemon ? MHD_get_daemon_info(h->daemon, MHD_DAEMON_INFO_EPOLL_FD) : NULL;
    if (!info || uv_poll_init(loop, &h->epoll, info->epoll_fd) != 0) {
        if (h->daemon)
            MHD_stop_daemon(h->daemon);
        free(h);
        return tl_fail(err, TL_ERR_INTERNAL, "the HTTP library did not start");
    }
    uv_timer_init(loop, &h->timer);
    uv_idle_init(loop, &h->idle);
    h->epoll.data = h->timer.data = h->idle.data = h;
    uv_poll_start(&h->epoll, UV_READABLE, on_epoll);
    wake(h);
    *out = h;
    return TL_OK;
}

void tl_http_quiesce(struct tl_http *h)
{
    if (h->quiesced)
        return;
    h->quiesced = true;
    int fd = MHD_quiesce_daemon(h->daemon);
    if (fd >= 0)
        close(fd);
    struct tl_conn *next;
    for (struct tl_conn *c = h->conns; c; c = next) {
        next = c->next;
        if (c->phase == PHASE_HEADERS || c->phase == PHASE_IDLE)
            conn_break(c);
        else if (c->phase == PHASE_BODY) { /* half a request: one more second */
            c->since = tl_now_mono() + 1 - h->srv->cfg->body_seconds;
            conn_arm(c, conn_due(c));
        }
    }
}

void tl_http_abort(struct tl_http *h)
{
    struct tl_conn *next;
    for (struct tl_conn *c = h->conns; c; c = next) {
        next = c->next;
        client_gone(c);
    }
}

int tl_http_connections(const struct tl_http *h) { return h->n_conns; }

void tl_http_free(struct tl_http *h)
{
    if (!h)
        return;
    uv_close((uv_handle_t *)&h->epoll, NULL); /* before the library closes the descriptor */
    uv_close((uv_handle_t *)&h->timer, NULL);
    uv_close((uv_handle_t *)&h->idle, NULL);
    if (!h->quiesced) {
        int fd = MHD_quiesce_daemon(h->daemon);
        if (fd >= 0)
            close(fd);
    }
    MHD_stop_daemon(h->daemon);
    h->daemon = NULL;
}

void tl_http_forget(struct tl_http *h) { free(h); }
