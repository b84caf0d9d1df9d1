#include "evloop.h"

#include <errno.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "flight.h"
#include "entry_call.h"
#include "http.h"
#include "ids.h"
#include "listen.h"
#include "log.h"
#include "systemd.h"
#include "worker.h"

#define TICK_MS        1000
#define DRAIN_TICK_MS  20
#define FAILED_GRACE_S 2.0 /* probes should see that they are red before the sockets close */
#define FORCED_GRACE_S 5.0 /* for the worker to notice that everything is cancelled */

enum { EXIT_LOAD = 2, EXIT_FAILED = 3 };

struct evloop {
    struct tl_server *s;
    uv_async_t news;
    uv_signal_t term, interrupt, hangup;
    uv_timer_t tick;
    int exit_code;
    bool forced, stopping;
    double drain_until, drain_from, watchdog_s, watchdog_at;
};

bool tl_server_worker_alive(const struct tl_server *s, double *age)
{
    struct tl_worker_figures fig;
    tl_worker_figures(s->worker, &fig);
    *age = tl_now_mono() - fig.alive_at;
    return s->state == TL_SERVER_LOADING || *age < s->cfg->worker_stall_seconds;
}

static void pump(struct tl_server *s)
{
    tl_http_pump(s->public_side);
    if (s->admin_side)
        tl_http_pump(s->admin_side);
}

/* ---- the end ------------------------------------------------------------------------------------------------------ */

static void stop(struct evloop *ev)
{
    struct tl_server *s = ev->s;
    if (ev->stopping)
        return;
    ev->stopping = true;
    tl_http_abort(s->public_side);
    if (s->admin_side) {
        tl_http_quiesce(s->admin_side);
        tl_http_abort(s->admin_side);
    }
    uv_stop(&s->loop);
}

/* Called in short turns while draining. */
static void drain_step(struct evloop *ev)
{
    struct tl_server *s = ev->s;
    double now = tl_now_mono();
    if (now < ev->drain_from)
        return;
    tl_http_quiesce(s->public_side);
    if (!s->flights && tl_http_connections(s->public_side) == 0) {
        stop(ev);
        return;
    }
    if (now < ev->drain_until)
        return;
    if (!ev->forced) {
        ev->forced = true;
        ev->drain_until = now + FORCED_GRACE_S;
        tl_log(TL_LOG_WARN, "shutdown timeout: %d requests are cut off", tl_flights_running(s) + s->n_waiting);
        tl_flights_refuse(s, true);
        pump(s);
        return;
    }
    if (s->flights) {
        tl_log(TL_LOG_ERROR, "the worker did not let go of its requests; ending without it");
        _exit(EXIT_FAILED);
    }
    stop(ev);
}

static void on_tick(uv_timer_t *timer);

static void drain(struct evloop *ev, double wait_s)
{
    struct tl_server *s = ev->s;
    if (ev->drain_until > 0)
        return;
    ev->drain_from = tl_now_mono() + wait_s;
    ev->drain_until = ev->drain_from + s->cfg->shutdown_timeout;
    tl_systemd_notify("STOPPING=1");
    tl_flights_refuse(s, false);
    pump(s);
    uv_timer_start(&ev->tick, on_tick, 1, DRAIN_TICK_MS);
}

static void on_signal(uv_signal_t *handle, int number)
{
    struct evloop *ev = handle->data;
    struct tl_server *s = ev->s;
    if (ev->drain_until > 0) {
        tl_log(TL_LOG_WARN, "second signal: ending at once");
        _exit(128 + number);
    }
    tl_log(TL_LOG_INFO, "signal %d: draining, for %.0f seconds at most", number, s->cfg->shutdown_timeout);
    if (s->state == TL_SERVER_LOADING)
        _exit(0); /* nothing was promised to anybody, and loading cannot be stopped */
    if (s->state == TL_SERVER_READY)
        s->state = TL_SERVER_DRAINING;
    drain(ev, 0);
}

enum tl_status tl_server_reload(struct tl_server *s, struct tl_error *err)
{
    enum tl_status st = s->cfg->api_keys[0] ? tl_keys_reload(&s->keys, s->cfg->api_keys, err) : TL_OK;
    if (st == TL_OK)
        tl_log(TL_LOG_INFO, "reloaded: %d API keys", s->keys.n);
    else
        tl_log(TL_LOG_ERROR, "not reloaded, the old API keys stay: %s", err->msg);
    return st;
}

static void on_hangup(uv_signal_t *handle, int number)
{
    struct evloop *ev = handle->data;
    struct tl_error err;
    (void)number;
    (void)tl_server_reload(ev->s, &err);
}

/* ---- news from the worker ----------------------------------------------------------------------------------------- */

static void on_ready(struct evloop *ev, const struct tl_worker_figures *fig)
{
    struct tl_server *s = ev->s;
    struct tl_log_line l;
    struct tl_facts *facts = &s->facts;
    facts->tokenizer = fig->tokenizer;
    facts->chat = fig->chat;
    facts->no_chat = fig->no_chat;
    facts->created = (int64_t)tl_now_wall();
    facts->cfg = s->cfg;
    snprintf(facts->name, sizeof(facts->name), "%s", s->cfg->model_name[0] ? s->cfg->model_name : fig->info->name);
    facts->info = fig->info;
    s->state = TL_SERVER_READY;
    tl_log_begin(&l, TL_LOG_INFO, "ready");
    tl_log_str(&l, "model", facts->name);
    tl_log_str(&l, "weights", fig->info->weights);
    tl_log_str(&l, "device", fig->info->device);
    if (fig->info->passed_over[0])
        tl_log_str(&l, "passed_over", fig->info->passed_over);
    tl_log_str(&l, "fingerprint", fig->info->fingerprint);
    tl_log_int(&l, "max_seq_len", fig->info->max_seq_len);
    tl_log_int(&l, "max_loops", fig->info->max_loops);
    tl_log_int(&l, "memory_bytes", (int64_t)fig->memory.budget);
    tl_log_num(&l, "seconds", tl_now_mono() - s->t_start);
    if (!facts->tokenizer)
        tl_log_str(&l, "tokenizer", "none: token ids only");
    else if (tl_tokenizer_vocab_size(facts->tokenizer) < fig->info->vocab_size) /* padded, or another model's */
        tl_log_int(&l, "ids_without_text", fig->info->vocab_size - tl_tokenizer_vocab_size(facts->tokenizer));
    tl_log_end(&l);
    tl_systemd_notify("READY=1\nSTATUS=serving %s", facts->name);
}

static void on_failed(struct evloop *ev, const struct tl_worker_figures *fig)
{
    struct tl_server *s = ev->s;
    s->failure = fig->error;
    if (fig->failed_loading) {
        tl_log(TL_LOG_ERROR, "cannot load %s: %s", s->cfg->model, fig->error.msg);
        ev->exit_code = EXIT_LOAD;
        ev->drain_until = 1;
        stop(ev);
        return;
    }
    tl_log(TL_LOG_ERROR, "the worker has failed: %s", fig->error.msg);
    tl_systemd_notify("STATUS=failed: %.150s", fig->error.msg);
    s->state = TL_SERVER_FAILED;
    ev->exit_code = EXIT_FAILED;
    drain(ev, FAILED_GRACE_S);
}

static void look_at_worker(struct evloop *ev)
{
    struct tl_server *s = ev->s;
    struct tl_worker_figures fig;
    tl_worker_figures(s->worker, &fig);
    if (s->state == TL_SERVER_LOADING && fig.state == TL_WORKER_LOADING) {
        if ((int)(fig.load_fraction * 10) != (int)(s->load_fraction * 10) || strcmp(fig.load_step, s->load_step) != 0) {
            tl_log(TL_LOG_INFO, "loading: %s, %d %%", fig.load_step, (int)(fig.load_fraction * 100));
            tl_systemd_notify("EXTEND_TIMEOUT_USEC=60000000\nSTATUS=loading, %d %%", (int)(fig.load_fraction * 100));
        }
        snprintf(s->load_step, sizeof(s->load_step), "%s", fig.load_step);
        s->load_fraction = fig.load_fraction;
    }
    if (s->state == TL_SERVER_LOADING && fig.state == TL_WORKER_READY)
        on_ready(ev, &fig);
    if (fig.state == TL_WORKER_FAILED && s->state != TL_SERVER_FAILED && !ev->stopping)
        on_failed(ev, &fig);
}

/* Wake-ups coalesce: one callback may stand for many results, so all are taken. */
static void on_news(uv_async_t *async)
{
    struct evloop *ev = async->data;
    tl_entry_files_drop(ev->s);
    tl_worker_deliver(ev->s->worker);
    look_at_worker(ev);
    pump(ev->s);
}

static void wake(void *arg) { uv_async_send(arg); }

static void on_tick(uv_timer_t *timer)
{
    struct evloop *ev = timer->data;
    double now = tl_now_mono(), age;
    if (ev->watchdog_s > 0 && now >= ev->watchdog_at && tl_server_worker_alive(ev->s, &age)) {
        ev->watchdog_at = now + ev->watchdog_s;
        tl_systemd_notify("WATCHDOG=1");
    }
    if (ev->s->large_freed) { /* many small pieces, with something that lives above them */
        ev->s->large_freed = false;
        malloc_trim(0);
    }
    if (ev->drain_until > 0)
        drain_step(ev);
}

/* ---- start -------------------------------------------------------------------------------------------------------- */

static void announce(const char *what, int fd)
{
    char name[80];
    tl_listen_name(fd, name, sizeof(name));
    tl_log(TL_LOG_INFO, "%s on http://%s", what, name);
}

static enum tl_status start(struct evloop *ev, int public_fd, int admin_fd, struct tl_error *err)
{
    struct tl_server *s = ev->s;
    enum tl_status st = tl_http_create(&s->public_side, s, &s->loop, public_fd, false, err);
    if (st == TL_OK && admin_fd >= 0)
        st = tl_http_create(&s->admin_side, s, &s->loop, admin_fd, true, err);
    if (st == TL_OK && s->cfg->state_dir[0])
        st = tl_store_create(&s->store, &s->loop, s->cfg->state_dir, err);
    if (st == TL_OK)
        st = tl_worker_create(&s->worker, s->cfg, wake, &ev->news, err);
    if (st != TL_OK)
        return st;
    announce("listening", public_fd);
    if (admin_fd >= 0)
        announce("metrics and admin", admin_fd);
    uv_signal_start(&ev->term, on_signal, SIGTERM);
    uv_signal_start(&ev->interrupt, on_signal, SIGINT);
    uv_signal_start(&ev->hangup, on_hangup, SIGHUP);
    double every = ev->watchdog_s > 0 && ev->watchdog_s * 1000 < TICK_MS ? ev->watchdog_s * 1000 : TICK_MS;
    uv_timer_start(&ev->tick, on_tick, (uint64_t)every, (uint64_t)every);
    return TL_OK;
}

static void finish(struct evloop *ev)
{
    struct tl_server *s = ev->s;
    if (s->worker) {
        tl_worker_stop(s->worker);
        tl_worker_deliver(s->worker);
    }
    /* Suspended connections were resumed by the abort; the library must see every one off before it may stop. */
    while (s->public_side &&
           (tl_http_connections(s->public_side) > 0 || (s->admin_side && tl_http_connections(s->admin_side) > 0))) {
        pump(s);
        uv_run(&s->loop, UV_RUN_NOWAIT);
    }
    tl_http_free(s->public_side);
    tl_http_free(s->admin_side);
    uv_close((uv_handle_t *)&ev->news, NULL);
    uv_close((uv_handle_t *)&ev->term, NULL);
    uv_close((uv_handle_t *)&ev->interrupt, NULL);
    uv_close((uv_handle_t *)&ev->hangup, NULL);
    uv_close((uv_handle_t *)&ev->tick, NULL);
    uv_run(&s->loop, UV_RUN_DEFAULT);
    tl_http_forget(s->public_side);
    tl_http_forget(s->admin_side);
    tl_store_free(s->store);
    tl_worker_free(s->worker);
    int rc = uv_loop_close(&s->loop);
    if (rc != 0)
        tl_log(TL_LOG_ERROR, "the event loop did not close: %s", uv_strerror(rc));
    uv_library_shutdown();
}

/* A large buffer goes back to the system when it is freed. Left to itself the C library raises both bounds with every large one
 * that it sees, until the heap of each thread keeps tens of megabytes for good. */
static void bound_heaps(void)
{
    mallopt(M_MMAP_THRESHOLD, 256 << 10);
    mallopt(M_TRIM_THRESHOLD, 512 << 10);
}

int tl_evloop_run(struct tl_server *s, int public_fd, int admin_fd)
{
    struct evloop ev = {.s = s, .watchdog_s = tl_systemd_watchdog_s()};
    struct tl_error err;
    s->t_start = tl_now_mono();
    bound_heaps();
    uv_loop_init(&s->loop);
    uv_async_init(&s->loop, &ev.news, on_news);
    uv_signal_init(&s->loop, &ev.term);
    uv_signal_init(&s->loop, &ev.interrupt);
    uv_signal_init(&s->loop, &ev.hangup);
    uv_timer_init(&s->loop, &ev.tick);
    ev.news.data = ev.term.data = ev.interrupt.data = ev.hangup.data = ev.tick.data = &ev;
    if (start(&ev, public_fd, admin_fd, &err) == TL_OK) {
        uv_run(&s->loop, UV_RUN_DEFAULT);
    } else {
        tl_log(TL_LOG_ERROR, "%s", err.msg);
        ev.exit_code = 1;
    }
    finish(&ev);
    tl_log(TL_LOG_INFO, "ended, exit code %d", ev.exit_code);
    return ev.exit_code;
}
