/* GET /, /livez, /readyz, /version: open to all, also without a key. */
#include "http.h"
#include "http_status.h"
#include "routes.h"
#include "server.h"
#include "worker.h"

static const char *state_name(const struct tl_server *s, bool alive)
{
    switch (s->state) {
    case TL_SERVER_LOADING: return "loading";
    case TL_SERVER_DRAINING: return "draining";
    case TL_SERVER_FAILED: return "gpu_failed";
    case TL_SERVER_READY: break;
    }
    return !alive ? "stalled" : s->held ? "draining" : "ready";
}

void tl_api_root(struct tl_exchange *x)
{
    struct tl_jw w = {.b = &x->out};
    const struct tl_route *r;
    tl_jw_obj(&w, NULL);
    tl_jw_str(&w, "name", "tinyloopd");
    tl_jw_str(&w, "version", TL_VERSION);
    tl_jw_arr(&w, "endpoints");
    for (int i = 0; (r = tl_route_at(i)); i++) {
        if (!(r->sides & (x->admin_side ? TL_SIDE_ADMIN : TL_SIDE_PUBLIC)))
            continue;
        tl_jw_obj(&w, NULL);
        tl_jw_str(&w, "method", r->method);
        tl_jw_str(&w, "path", r->path);
        tl_jw_str(&w, "does", r->help);
        tl_jw_obj_end(&w);
    }
    tl_jw_arr_end(&w);
    tl_jw_obj_end(&w);
    tl_reply_json(x, 200);
}

void tl_api_version(struct tl_exchange *x)
{
    tl_bytes_str(&x->out, "{\"name\":\"tinyloopd\",\"version\":\"" TL_VERSION "\"}");
    tl_reply_json(x, 200);
}

/* Red when a restart would help: the device is lost, or the worker makes no progress. */
void tl_api_livez(struct tl_exchange *x)
{
    double age;
    bool alive = tl_server_worker_alive(x->srv, &age) && x->srv->state != TL_SERVER_FAILED;
    tl_bytes_fmt(&x->out, "{\"status\":\"%s\"}",
                 alive                               ? "alive"
                 : x->srv->state == TL_SERVER_FAILED ? "gpu_failed"
                                                     : "stalled");
    tl_reply_json(x, alive ? 200 : 503);
}

/* Red when requests should go elsewhere. A full queue does not count: that is what 503 answers are for. */
void tl_api_readyz(struct tl_exchange *x)
{
    const struct tl_server *s = x->srv;
    struct tl_jw w = {.b = &x->out};
    double age;
    bool alive = tl_server_worker_alive(s, &age);
    bool ready = s->state == TL_SERVER_READY && alive && !s->held;
    tl_jw_obj(&w, NULL);
    tl_jw_str(&w, "status", state_name(s, alive));
    tl_jw_obj(&w, "checks");
    tl_jw_bool(&w, "model_loaded", s->facts.info != NULL);
    tl_jw_bool(&w, "worker_alive", alive && s->state != TL_SERVER_FAILED);
    tl_jw_bool(&w, "accepting", s->state == TL_SERVER_READY && !s->held);
    tl_jw_obj_end(&w);
    if (s->state == TL_SERVER_LOADING) {
        tl_jw_str(&w, "step", s->load_step);
        tl_jw_num(&w, "percent", s->load_fraction * 100, 1);
    }
    if (s->state == TL_SERVER_FAILED)
        tl_jw_str(&w, "reason", s->failure.msg);
    tl_jw_obj_end(&w);
    if (!ready)
        tl_http_header(x, "Retry-After", "%d", 2);
    tl_reply_json(x, ready ? 200 : 503);
}
