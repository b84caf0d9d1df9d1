/* GET /v1/requests, GET and DELETE /v1/requests/{id}: generations in flight. A tenant sees its own alone. */
#include <stdio.h>
#include <string.h>

#include "flight.h"
#include "http.h"
#include "http_status.h"
#include "routes.h"

static bool is_own(const struct tl_exchange *x, const struct tl_flight *f)
{
    return strcmp(f->tenant, x->key ? x->key->tenant : "") == 0;
}

static void write_flight(struct tl_jw *w, const struct tl_flight *f, bool with_tenant)
{
    char id[40];
    snprintf(id, sizeof(id), "req_%s", f->id);
    tl_jw_obj(w, NULL);
    tl_jw_str(w, "id", id);
    tl_jw_str(w, "object", "request");
    tl_jw_str(w, "request_id", f->request_id);
    tl_jw_str(w, "route", f->route);
    if (with_tenant)
        tl_jw_str(w, "tenant", f->tenant);
    tl_jw_str(w, "status",
              f->given_up || (f->g && atomic_load(&f->g->cancel)) ? "cancelling" : tl_stage_name(f->stage));
    tl_jw_int(w, "created_at", f->created);
    tl_jw_int(w, "age_ms", (int64_t)((tl_now_mono() - f->t_start) * 1e3));
    tl_jw_bool(w, "stream", f->asked->stream);
    tl_jw_int(w, "position", tl_flight_position(f));
    tl_jw_int(w, "choices", f->asked->n_prompts * f->asked->n);
    tl_jw_int(w, "max_tokens", f->asked->max_tokens);
    tl_jw_obj_end(w);
}

static void write_list(struct tl_exchange *x, bool all)
{
    struct tl_jw w = {.b = &x->out};
    tl_jw_obj(&w, NULL);
    tl_jw_str(&w, "object", "list");
    tl_jw_arr(&w, "data");
    for (const struct tl_flight *f = x->srv->flights; f; f = f->next)
        if (all || is_own(x, f))
            write_flight(&w, f, all);
    tl_jw_arr_end(&w);
    tl_jw_bool(&w, "has_more", false);
    tl_jw_obj_end(&w);
    tl_reply_json(x, 200);
}

void tl_api_requests(struct tl_exchange *x) { write_list(x, false); }
void tl_api_admin_requests(struct tl_exchange *x) { write_list(x, true); }

static void not_found(struct tl_exchange *x)
{
    struct tl_error err;
    tl_refuse(&err, TL_CODE_REQUEST_NOT_FOUND, "id", "No request of this name is in flight.");
    tl_reply_error(x, &err);
}

void tl_api_request(struct tl_exchange *x)
{
    struct tl_jw w = {.b = &x->out};
    const struct tl_flight *f = x->srv->flights;
    while (f && !(is_own(x, f) && tl_flight_named(f, x->param)))
        f = f->next;
    if (!f) {
        not_found(x);
        return;
    }
    write_flight(&w, f, false);
    tl_reply_json(x, 200);
}

/* A client's own request id may name several: it cancels them all. */
void tl_api_request_cancel(struct tl_exchange *x)
{
    struct tl_jw w = {.b = &x->out};
    int n = 0;
    for (struct tl_flight *f = x->srv->flights; f; f = f->next) {
        if (!is_own(x, f) || !tl_flight_named(f, x->param))
            continue;
        tl_flight_cancel(f, TL_CANCEL_API);
        n++;
    }
    if (n == 0) {
        not_found(x);
        return;
    }
    tl_jw_obj(&w, NULL);
    tl_jw_str(&w, "id", x->param);
    tl_jw_str(&w, "status", "cancelling");
    tl_jw_int(&w, "requests", n);
    tl_jw_obj_end(&w);
    tl_reply_json(x, 202);
}
