/* The admin listener: metrics, state, memory, draining. */
#include "flight.h"
#include "http.h"
#include "log.h"
#include "routes.h"
#include "server.h"
#include "worker.h"

static int connections(const struct tl_server *s)
{
    return tl_http_connections(s->public_side) + (s->admin_side ? tl_http_connections(s->admin_side) : 0);
}

void tl_api_metrics(struct tl_exchange *x)
{
    const struct tl_server *s = x->srv;
    struct tl_worker_figures fig;
    tl_worker_figures(s->worker, &fig);
    struct tl_gauges g = {
        .model = s->facts.info ? s->facts.name : NULL,
        .fingerprint = s->facts.info ? s->facts.info->fingerprint : NULL,
        .running = tl_flights_running(s),
        .waiting = s->n_waiting,
        .connections = connections(s),
        .has_memory = s->facts.info != NULL,
        .memory = fig.memory,
        .busy_s = fig.busy_s,
        .uptime_s = tl_now_mono() - s->t_start,
        .steps = fig.sched.steps,
        .registry = fig.registry,
    };
    tl_metrics_write(&s->metrics, &g, &x->out);
    tl_http_reply(x, 200, "text/plain; version=0.0.4; charset=utf-8");
}

void tl_api_admin_status(struct tl_exchange *x)
{
    static const char *const names[] = {"loading", "ready", "draining", "gpu_failed"};
    const struct tl_server *s = x->srv;
    struct tl_worker_figures fig;
    struct tl_jw w = {.b = &x->out};
    double age;
    tl_worker_figures(s->worker, &fig);
    bool alive = tl_server_worker_alive(s, &age);
    tl_jw_obj(&w, NULL);
    tl_jw_str(&w, "version", TL_VERSION);
    tl_jw_str(&w, "state", s->held ? "held" : names[s->state]);
    tl_jw_str(&w, "model", s->facts.info ? s->facts.name : NULL);
    tl_jw_str(&w, "device", s->facts.info ? s->facts.info->device : NULL);
    tl_jw_num(&w, "uptime_seconds", tl_now_mono() - s->t_start, 3);
    tl_jw_int(&w, "connections", connections(s));
    tl_jw_int(&w, "requests_waiting", s->n_waiting);
    tl_jw_int(&w, "tokens_waiting", s->waiting_tokens);
    tl_jw_int(&w, "requests_running", tl_flights_running(s));
    tl_jw_obj(&w, "worker");
    tl_jw_bool(&w, "alive", alive);
    tl_jw_num(&w, "last_sign_seconds", age, 3);
    tl_jw_num(&w, "busy_seconds", fig.busy_s, 3);
    tl_jw_int(&w, "steps", fig.sched.steps);
    tl_jw_int(&w, "rows", fig.sched.rows);
    tl_jw_int(&w, "row_loops", fig.sched.row_loops);
    tl_jw_int(&w, "sequences_running", fig.sched.n_running);
    tl_jw_int(&w, "sequences_waiting", fig.sched.n_waiting);
    tl_jw_obj_end(&w);
    tl_jw_obj_end(&w);
    tl_reply_json(x, 200);
}

static void write_entries(struct tl_jw *w, const struct tl_registry_counters *r)
{
    tl_jw_obj(w, "entries");
    for (int k = 0; k < TL_ENTRY_KINDS; k++) {
        tl_jw_obj(w, tl_entry_kind_name((enum tl_entry_kind)k));
        tl_jw_int(w, "ready", r->entries[k][TL_READY]);
        tl_jw_int(w, "building", r->entries[k][TL_BUILDING] + r->entries[k][TL_REBUILDING]);
        tl_jw_int(w, "stored", r->entries[k][TL_STORED]);
        tl_jw_uint(w, "bytes", r->bytes[k]);
        tl_jw_obj_end(w);
    }
    tl_jw_obj(w, "automatic");
    tl_jw_int(w, "ready", r->pool.n_automatic);
    tl_jw_obj_end(w);
    tl_jw_uint(w, "pool_bytes", r->pool.bytes);
    tl_jw_obj_end(w);
}

void tl_api_admin_memory(struct tl_exchange *x)
{
    struct tl_worker_figures fig;
    struct tl_jw w = {.b = &x->out};
    tl_worker_figures(x->srv->worker, &fig);
    tl_jw_obj(&w, NULL);
    tl_jw_uint(&w, "budget", fig.memory.budget);
    tl_jw_uint(&w, "weights", fig.memory.weights);
    tl_jw_uint(&w, "scratch", fig.memory.scratch);
    tl_jw_uint(&w, "kv_total", fig.memory.kv_total);
    tl_jw_uint(&w, "kv_used", fig.memory.kv_used);
    tl_jw_uint(&w, "kv_reserved", fig.memory.kv_reserved);
    tl_jw_uint(&w, "kv_used_peak", fig.memory.kv_used_peak);
    tl_jw_uint(&w, "kv_held", fig.memory.kv_held);
    tl_jw_uint(&w, "kv_sequence_reserve", fig.memory.kv_seq_reserve);
    write_entries(&w, &fig.registry);
    tl_jw_uint(&w, "page_bytes", x->srv->facts.info ? x->srv->facts.info->page_bytes : 0);
    tl_jw_obj_end(&w);
    tl_reply_json(x, 200);
}

static void hold(struct tl_exchange *x, bool held)
{
    x->srv->held = held;
    tl_log(TL_LOG_INFO, held ? "held: no new work is taken" : "work is taken again");
    tl_bytes_fmt(&x->out, "{\"accepting\":%s,\"requests_running\":%d,\"requests_waiting\":%d}", held ? "false" : "true",
                 tl_flights_running(x->srv), x->srv->n_waiting);
    tl_reply_json(x, 200);
}

void tl_api_admin_drain(struct tl_exchange *x) { hold(x, true); }
void tl_api_admin_undrain(struct tl_exchange *x) { hold(x, false); }

void tl_api_admin_reload(struct tl_exchange *x)
{
    struct tl_error err;
    if (tl_server_reload(x->srv, &err) != TL_OK) {
        tl_reply_error(x, &err);
        return;
    }
    tl_bytes_fmt(&x->out, "{\"api_keys\":%d}", x->srv->keys.n);
    tl_reply_json(x, 200);
}
