/* server/server.h - what the rooms of the daemon share. One instance, made by main.c. Thread: loop. */
#ifndef TL_SERVER_SERVER_H
#define TL_SERVER_SERVER_H

#include <uv.h>

#include "../engine/tinyloop.h"
#include "config.h"
#include "keys.h"
#include "metrics.h"

struct tl_http;
struct tl_worker;
struct tl_flight;
struct tl_store;

enum tl_server_state { TL_SERVER_LOADING, TL_SERVER_READY, TL_SERVER_DRAINING, TL_SERVER_FAILED };

/* What the loop knows of the model once it is loaded; immutable then. */
struct tl_facts {
    const struct tl_model_info *info;
    const struct tl_tokenizer *tokenizer; /* NULL: token ids only */
    const struct tl_chat_template *chat;  /* NULL: no chat */
    const struct tl_error *no_chat;       /* why not, or NULL */
    char name[128];
    int64_t created;
    const struct tl_config *cfg;
};

#define TL_LARGE_BODY (128 << 10) /* bytes */

struct tl_server {
    const struct tl_config *cfg;
    uv_loop_t loop;
    enum tl_server_state state;
    bool held;               /* /admin/drain: ready to serve, but asked not to */
    struct tl_error failure; /* why FAILED */
    double load_fraction;    /* while LOADING */
    char load_step[64];
    struct tl_facts facts;
    struct tl_http *public_side, *admin_side;
    struct tl_worker *worker;
    struct tl_store *store; /* definitions on disk; NULL without a state directory */
    int state_lock;         /* descriptor of the state directory's lock; -1 = none */
    struct tl_keys keys;
    bool local_hosts_only; /* no keys, on loopback: refuse foreign Host names and web pages (rebinding, forgery) */
    bool admin_local_hosts_only;
    size_t body_bytes; /* of request bodies that arrive or wait to be tokenised, and of answers that leave */
    bool large_freed;  /* a large one of them is over: what the heaps kept of it goes back to the system soon */
    struct tl_metrics metrics;
    struct tl_flight *flights; /* generations, oldest first: flight.h */
    int n_waiting;             /* requests not started yet */
    int64_t waiting_tokens;
    double seconds_per_request; /* running mean, for Retry-After */
    double t_start;
};

/* Is the worker making progress? Seconds since its last sign of life in *age. */
bool tl_server_worker_alive(const struct tl_server *s, double *age);
/* Read the API keys anew (SIGHUP, /admin/reload). On error the old ones stay. */
enum tl_status tl_server_reload(struct tl_server *s, struct tl_error *err);
/* Seconds until a new request would probably start: an honest Retry-After. */
double tl_server_wait_s(const struct tl_server *s);

#endif
