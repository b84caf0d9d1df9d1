/* server/flight.h - generations in flight, as the loop sees them: admission, deadlines, cancelling, delivery.
 *
 * A flight begins with a parsed request and ends when the worker has let go of it, which may be after its client did. Its
 * states and who changes them:
 *   encoding  text goes to ids, at once or in a helper thread      -> tl_flight_start, on_encoded
 *   waiting   submitted, no sequence has left the queue            -> deliver (started)
 *   running   results come                                         -> deliver
 *   done      the last result is taken; the flight is freed        -> deliver (done)
 * The answer is written by a renderer, so that routes which differ in form alone share all of this. Thread: loop. */
#ifndef TL_SERVER_FLIGHT_H
#define TL_SERVER_FLIGHT_H

#include "aside.h"
#include "generate.h"
#include "http.h"
#include "server.h"

struct tl_flight;

struct tl_renderer {
    /* Results to keep, or as events into x->out (a stream whose headers are out). */
    void (*take)(struct tl_flight *f, const struct tl_batch *b);
    /* All is there and no error: the JSON body into x->out, or the last events. */
    void (*finish)(struct tl_flight *f);
    void (*free)(struct tl_flight *f); /* f->render */
};

/* What a prompt of a batch began from. */
struct tl_prompt_start {
    enum tl_reuse reuse;
    char id[TL_ENTRY_ID_MAX + 1];
    struct tl_usage usage;
};

struct tl_flight {
    struct tl_flight *prev, *next;
    struct tl_server *srv;
    struct tl_exchange *x;   /* NULL once the client is gone or answered */
    struct tl_generation *g; /* NULL while encoding */
    struct tl_ask ask;       /* until g has it */
    int encode_code;
    struct tl_error encode_err;
    struct tl_aside encoding;
    bool given_up; /* cancelled while it was encoded */
    const struct tl_renderer *renderer;
    void *render;
    const struct tl_ask *asked; /* &ask or &g->ask */
    char id[TL_ULID_CHARS + 1]; /* req_<id>, cmpl-<id> */
    char request_id[TL_REQUEST_ID_MAX + 1];
    char tenant[64];
    struct tl_key *key;
    const char *route;
    int64_t created;                                                /* seconds since 1970 */
    double t_start, t_started, t_first, t_ping, queue_until, until; /* monotonic; 0 = not yet or never */
    enum tl_stage stage;
    int64_t n_tokens_waiting; /* counted in srv->waiting_tokens */
    bool counted_waiting;
    struct tl_batch batch; /* as taken last */
    bool backlog;          /* results wait until the client has read what it has */
    double *token_at;      /* per choice: time of its last token */
    /* sums over the choices that ended */
    int n_ended, n_prompt, n_cached, n_prefilled, n_generated, n_errors;
    int n_reasoning;                /* of the generated tokens, those before the answer: chat_render.c counts them */
    struct tl_usage usage;          /* of the first choice */
    struct tl_prompt_start *starts; /* [n_prompts] */
    bool stored_durable;            /* the resume handle it left is on disk */
    struct tl_error error;          /* the first one */
    int progress_done, progress_total;
    enum tl_reuse reuse; /* what the first choice to start began from (once it has ended: the first one), and its id */
    char reuse_id[TL_ENTRY_ID_MAX + 1];
};

/* Take over *ask and *render and answer x in the end. */
void tl_flight_start(struct tl_exchange *x, struct tl_ask *ask, const struct tl_renderer *r, void *render);
void tl_flight_cancel(struct tl_flight *f, enum tl_cancel why);
/* All that wait are refused; with running also the others end. For draining. */
void tl_flights_refuse(struct tl_server *s, bool running);
int tl_flight_position(const struct tl_flight *f); /* 1 = next to start; 0 = started */
bool tl_flight_named(const struct tl_flight *f,
                     const char *name); /* req_<id>, cmpl-<id>, chatcmpl-<id> or the client's request id */
int tl_flights_running(const struct tl_server *s);

#endif
