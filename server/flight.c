#include "flight.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "completion_parse.h"
#include "entry_call.h"
#include "http_status.h"
#include "log.h"
#include "routes.h"
#include "worker.h"

static const struct tl_exchange_ops flight_ops;

int tl_flight_position(const struct tl_flight *f)
{
    int n = 1;
    if (f->t_started > 0)
        return 0;
    for (const struct tl_flight *o = f->srv->flights; o && o != f; o = o->next)
        n += o->t_started == 0;
    return n;
}

int tl_flights_running(const struct tl_server *s)
{
    int n = 0;
    for (const struct tl_flight *f = s->flights; f; f = f->next)
        n += f->t_started > 0;
    return n;
}

bool tl_flight_named(const struct tl_flight *f, const char *name)
{
    if (strcmp(name, f->request_id) == 0)
        return true;
    if (strncmp(name, "req_", 4) == 0)
        return strcmp(name + 4, f->id) == 0;
    if (strncmp(name, "chat", 4) == 0)
        name += 4;
    return strncmp(name, "cmpl-", 5) == 0 && strcmp(name + 5, f->id) == 0;
}

/* An honest guess: how long requests take, times how many are before a new one, over how many run at a time. */
double tl_server_wait_s(const struct tl_server *s)
{
    int running = tl_flights_running(s);
    double each = s->seconds_per_request > 0 ? s->seconds_per_request : 1;
    return each * (s->n_waiting + 1) / (running > 0 ? running : 1);
}

/* ---- books -------------------------------------------------------------------------------------------------------- */

static void flight_link(struct tl_flight *f)
{
    struct tl_flight **end = &f->srv->flights, *last = NULL;
    while (*end) {
        last = *end;
        end = &(*end)->next;
    }
    f->prev = last;
    *end = f;
    if (f->key) {
        f->key->n_running++;
        f->key->n_users++;
    }
}

static void leave_waiting(struct tl_flight *f)
{
    if (!f->counted_waiting)
        return;
    f->counted_waiting = false;
    f->srv->n_waiting--;
    f->srv->waiting_tokens -= f->n_tokens_waiting;
}

static void flight_free(struct tl_flight *f)
{
    leave_waiting(f);
    if (f->x)
        f->x->ops = NULL;
    if (f->prev)
        f->prev->next = f->next;
    else
        f->srv->flights = f->next;
    if (f->next)
        f->next->prev = f->prev;
    if (f->key) {
        f->key->n_running--;
        f->key->n_users--;
    }
    f->renderer->free(f);
    if (f->g) {
        f->g->owner = NULL;
        tl_task_drop(&f->g->task);
    }
    tl_ask_clear(&f->ask);
    tl_batch_free(&f->batch);
    free(f->token_at);
    free(f->starts);
    free(f);
}

/* x needs no more from us. */
static void let_go(struct tl_flight *f)
{
    if (!f->x)
        return;
    f->x->ops = NULL;
    f->x->user = NULL;
    f->x = NULL;
}

static void note(struct tl_flight *f, const char *finish)
{
    if (!f->x)
        return;
    struct tl_note *n = &f->x->note;
    n->finish = finish;
    n->n_prompt = f->n_prompt;
    n->n_cached = f->n_cached;
    n->n_generated = f->n_generated;
    n->queue_s = f->t_started > 0 ? f->t_started - f->t_start : 0;
    n->ttft_s = f->t_first > 0 ? f->t_first - f->t_start : 0;
}

/* Answer with an error, in whatever form is still possible, and let go of the exchange. */
static void answer_error(struct tl_flight *f, const struct tl_error *err)
{
    struct tl_exchange *x = f->x;
    if (!x)
        return;
    note(f, "error");
    if (x->state == TL_X_STREAMING) {
        struct tl_jw w = {.b = &x->out};
        int code = (int)err->status;
        if (code > 0 && code < TL_CODE_COUNT)
            f->srv->metrics.rejected[code]++;
        tl_bytes_str(&x->out, "data: ");
        tl_jw_obj(&w, NULL);
        tl_error_json(&w, "error", err, x->request_id);
        tl_jw_obj_end(&w);
        tl_bytes_str(&x->out, "\n\n");
        x->close = true;
        let_go(f);
        tl_http_stream_end(x, true);
        return;
    }
    let_go(f);
    tl_reply_error(x, err);
}

void tl_flight_cancel(struct tl_flight *f, enum tl_cancel why)
{
    if (!f->g) { /* still encoding: it ends in on_encoded */
        if (f->given_up)
            return;
        f->given_up = true;
        f->srv->metrics.cancelled[f->stage]++;
        if (why == TL_CANCEL_API) {
            struct tl_error err;
            tl_refuse(&err, TL_ERR_CANCELLED, NULL, "The request was cancelled through the API.");
            tl_error_num(&err, "tokens_done", 0);
            answer_error(f, &err);
        }
        tl_aside_give_up(&f->encoding);
        return;
    }
    if (atomic_load(&f->g->cancel) == TL_CANCEL_NO && why != TL_CANCEL_DEADLINE)
        f->srv->metrics.cancelled[f->stage]++;
    tl_generation_cancel(f->g, why);
}

static void answer_now(struct tl_flight *f, int code, enum tl_cancel why, const char *msg)
{
    struct tl_error err;
    tl_refuse(&err, code, NULL, "%s", msg);
    if (code == TL_CODE_QUEUE_TIMEOUT) {
        tl_error_num(&err, "position", tl_flight_position(f));
        tl_error_num(&err, "est_ms", (int64_t)(tl_server_wait_s(f->srv) * 1e3));
    }
    answer_error(f, &err);
    tl_flight_cancel(f, why);
}

void tl_flights_refuse(struct tl_server *s, bool running)
{
    for (struct tl_flight *f = s->flights; f; f = f->next)
        if (f->t_started == 0)
            answer_now(f, TL_CODE_SERVER_DRAINING, TL_CANCEL_SHUTDOWN, "The server takes no new work.");
        else if (running)
            answer_now(f, TL_CODE_SERVER_DRAINING, TL_CANCEL_SHUTDOWN, "The server is shutting down.");
}

/* ---- streams ------------------------------------------------------------------------------------------------------ */

static void open_stream(struct tl_flight *f)
{
    struct tl_exchange *x = f->x;
    if (!f->asked->stream || x->state != TL_X_WAITING)
        return;
    tl_http_stream(x);
    if (f->t_started == 0)
        tl_bytes_fmt(&x->out, ": queued position=%d\n\n", tl_flight_position(f));
    f->t_ping = tl_now_mono();
}

static void write_progress(struct tl_flight *f)
{
    if (f->progress_total == 0 || !f->x || f->x->state != TL_X_STREAMING)
        return;
    tl_bytes_fmt(&f->x->out, ": prefill %d/%d\n\n", f->progress_done, f->progress_total);
    f->progress_total = 0;
    f->t_ping = tl_now_mono();
}

/* ---- deadlines ---------------------------------------------------------------------------------------------------- */

static double earliest(double a, double b) { return a == 0 || (b > 0 && b < a) ? b : a; }

static void set_due(struct tl_flight *f)
{
    const struct tl_config *cfg = f->srv->cfg;
    double due = f->until;
    if (!f->x)
        return;
    if (f->t_started == 0)
        due = earliest(due, f->queue_until);
    if (f->asked->stream && f->x->state == TL_X_WAITING)
        due = earliest(due, f->t_start + cfg->stream_hold_seconds);
    if (f->x->state == TL_X_STREAMING)
        due = earliest(due, f->t_ping + cfg->ping_seconds);
    tl_http_set_due(f->x, due);
}

static void flight_due(struct tl_exchange *x)
{
    struct tl_flight *f = x->user;
    double now = tl_now_mono();
    if (f->t_started == 0 && f->queue_until > 0 && now >= f->queue_until) {
        answer_now(f, TL_CODE_QUEUE_TIMEOUT, TL_CANCEL_QUEUE, "The request waited longer than it wanted to.");
        return;
    }
    if (f->until > 0 && now >= f->until) {
        if (f->t_started == 0) {
            answer_now(f, TL_CODE_QUEUE_TIMEOUT, TL_CANCEL_QUEUE, "The deadline passed while the request waited.");
            return;
        }
        tl_flight_cancel(f, TL_CANCEL_DEADLINE);
        f->until = 0;
    }
    if (x->state == TL_X_WAITING && f->asked->stream && now >= f->t_start + f->srv->cfg->stream_hold_seconds) {
        open_stream(f);
        tl_http_stream_flush(x);
    } else if (x->state == TL_X_STREAMING && now >= f->t_ping + f->srv->cfg->ping_seconds) {
        f->t_ping = now;
        if (x->out.n == x->out_pos)
            tl_bytes_str(&x->out, ": ping\n\n"); /* else it reads slowly; more would not help */
        tl_http_stream_flush(x);
    }
    set_due(f);
}

/* ---- results ------------------------------------------------------------------------------------------------------ */

static void count_tokens(struct tl_flight *f, const struct tl_batch *b)
{
    struct tl_metrics *m = &f->srv->metrics;
    for (size_t i = 0; i < b->n_tokens; i++) {
        const struct tl_out_token *t = &b->token[i];
        if (t->token < 0 || t->prompt)
            continue;
        if (f->t_first == 0) {
            f->t_first = t->at;
            tl_hist_add(&m->ttft[f->reuse], TL_HIST_FIRST_TOKEN, t->at - f->t_start);
        }
        if (f->token_at[t->choice] > 0)
            tl_hist_add(&m->inter_token, TL_HIST_INTER_TOKEN, t->at - f->token_at[t->choice]);
        f->token_at[t->choice] = t->at;
        f->stage = TL_STAGE_DECODE;
    }
}

static void count_ends(struct tl_flight *f, const struct tl_batch *b)
{
    struct tl_metrics *m = &f->srv->metrics;
    for (int i = 0; i < b->n_ends; i++) {
        const struct tl_out_end *e = &b->end[i];
        const struct tl_usage *u = &e->usage;
        f->n_ended++;
        if (e->choice == 0) {
            f->usage = *u;
            f->reuse = e->reuse;
            memcpy(f->reuse_id, e->reuse_id, sizeof(f->reuse_id));
            f->stored_durable = e->durable;
        }
        if (e->choice % f->asked->n == 0) {
            struct tl_prompt_start *start = &f->starts[e->choice / f->asked->n];
            *start = (struct tl_prompt_start){.reuse = e->reuse, .usage = *u};
            memcpy(start->id, e->reuse_id, sizeof(start->id));
        }
        f->n_generated += u->n_generated;
        m->generation_tokens += (uint64_t)u->n_generated;
        m->loops_run += (uint64_t)u->row_loops_run;
        if (e->leader && u->n_prefilled + u->n_reused > 0) { /* one that never started counts for nothing */
            f->n_prompt += u->n_prompt;
            f->n_cached += u->n_reused;
            f->n_prefilled += u->n_prefilled;
            m->prompt_tokens += (uint64_t)u->n_prompt;
            if (u->n_prefilled > 0)
                tl_hist_add(&m->prefill[e->reuse], TL_HIST_FIRST_TOKEN, u->prefill_s);
            m->cached_tokens[e->reuse] += (uint64_t)u->n_reused;
            m->loops_skipped += (uint64_t)u->n_reused * (uint64_t)u->iterations_skipped;
            if (u->n_reused > 0)
                tl_hist_add(&m->clone, TL_HIST_FIRST_TOKEN, u->clone_s);
            if (u->iterations_run > 0)
                tl_hist_add(&m->resume, TL_HIST_FIRST_TOKEN, u->resume_s);
        }
        if (e->finish == TL_FINISH_ERROR || e->finish == TL_FINISH_CANCELLED) {
            if (f->n_errors++ > 0)
                continue;
            if (e->finish == TL_FINISH_ERROR)
                f->error = e->error;
            else
                tl_refuse(&f->error, TL_ERR_CANCELLED, NULL, "The request was cancelled.");
            if (f->error.status == TL_ERR_NO_DEVICE_MEMORY)
                f->error.status = (enum tl_status)TL_CODE_GENERATION_MEMORY;
        }
    }
}

static void finish_answer(struct tl_flight *f)
{
    struct tl_exchange *x = f->x;
    static const char *const names[] = {"stop", "length", "cancelled", "error"};
    enum tl_finish finish = f->batch.n_ends > 0 ? f->batch.end[f->batch.n_ends - 1].finish : TL_FINISH_STOP;
    if (f->n_errors > 0) {
        if (f->g && atomic_load(&f->g->cancel) == TL_CANCEL_API) {
            tl_refuse(&f->error, TL_ERR_CANCELLED, NULL, "The request was cancelled through the API.");
            tl_error_num(&f->error, "tokens_done", f->n_generated);
        }
        answer_error(f, &f->error);
        return;
    }
    if (f->batch.failed || x->out.failed) {
        struct tl_error err;
        tl_fail_host_memory(&err, tl_batch_bytes(&f->batch));
        answer_error(f, &err);
        return;
    }
    f->renderer->finish(f);
    note(f, names[finish]);
    if (x->state == TL_X_STREAMING) {
        let_go(f);
        tl_http_stream_end(x, true);
        return;
    }
    tl_http_header(x, "Server-Timing", "queue;dur=%.1f, clone;dur=%.1f, prefill;dur=%.1f, resume;dur=%.1f",
                   f->usage.queue_s * 1e3, f->usage.clone_s * 1e3, f->usage.prefill_s * 1e3, f->usage.resume_s * 1e3);
    let_go(f);
    tl_reply_json(x, 200);
}

static void on_started(struct tl_flight *f)
{
    f->reuse = f->batch.reuse;
    memcpy(f->reuse_id, f->batch.reuse_id, sizeof(f->reuse_id));
    f->t_started = tl_now_mono();
    f->stage = TL_STAGE_PREFILL;
    leave_waiting(f);
    tl_hist_add(&f->srv->metrics.queue, TL_HIST_FIRST_TOKEN, f->t_started - f->t_start);
    if (f->x)
        open_stream(f);
}

/* pool.register_tokens: the first tokens of the prompt become an entry of the pool; nobody waits for it. */
static void register_prompt(struct tl_flight *f)
{
    const struct tl_reuse_ask *a = &f->asked->reuse;
    const struct tl_prompt *p = &f->asked->prompts[0];
    if (a->register_tokens == 0)
        return;
    struct tl_definition *d = calloc(1, sizeof(*d));
    int n = a->register_tokens < p->n_ids ? a->register_tokens : p->n_ids;
    if (d)
        d->tokens = malloc((size_t)n * sizeof(*d->tokens));
    if (!d || !d->tokens) {
        tl_definition_free(d);
        return;
    }
    memcpy(d->tokens, p->ids, (size_t)n * sizeof(*d->tokens));
    d->n_tokens = n;
    d->kind = TL_ENTRY_POOL;
    memcpy(d->tenant, a->tenant, sizeof(d->tenant));
    memcpy(d->salt, a->salt, sizeof(d->salt));
    d->loops = d->max_loops = f->usage.n_loops;
    d->cache_window = f->asked->cache_window > 0 ? f->asked->cache_window : 0;
    d->ttl_seconds = f->srv->cfg->default_ttl_seconds;
    d->persist = f->srv->store != NULL;
    tl_call_make(f->srv, d);
}

/* The definition of a resume handle that the answer will name is on disk, or not. */
static void on_stored(void *arg, const struct tl_error *err)
{
    struct tl_generation *g = arg;
    if (err)
        tl_log(TL_LOG_WARN, "a resume handle will not outlast this process: %s", err->msg);
    tl_generation_stored(g, !err);
    tl_task_drop(&g->task);
}

static void flight_deliver(void *owner)
{
    struct tl_flight *f = owner;
    struct tl_exchange *x = f->x;
    struct tl_definition *d = tl_generation_definition(f->g);
    if (d) {
        tl_task_ref(&f->g->task);
        tl_store_put(f->srv->store, d, on_stored, f->g);
    }
    /* A client that has not read what it was given gets no more; the rest waits with the worker, which pauses in time. */
    f->backlog = x && x->state == TL_X_STREAMING && x->out.n - x->out_pos > f->g->outbox_bytes / 4;
    if (f->backlog)
        return;
    struct tl_batch *b = &f->batch;
    tl_generation_take(f->g, b);
    if (b->started && f->t_started == 0)
        on_started(f);
    if (b->rows_total > 0) {
        f->progress_done = b->rows_done;
        f->progress_total = b->rows_total;
    }
    count_tokens(f, b);
    count_ends(f, b);
    if (f->x && f->n_errors == 0) {
        write_progress(f);
        f->renderer->take(f, b);
        if (b->n_tokens > 0)
            f->t_ping = tl_now_mono();
        if (!b->done && f->x->state == TL_X_STREAMING) {
            tl_http_stream_flush(f->x);
            set_due(f);
        }
    }
    if (!b->done)
        return;
    double seconds = tl_now_mono() - f->t_start;
    double *mean = &f->srv->seconds_per_request;
    if (f->t_started > 0)
        *mean = *mean > 0 ? *mean * 0.9 + seconds * 0.1 : seconds;
    if (f->n_errors == 0)
        register_prompt(f);
    if (f->x)
        finish_answer(f);
    flight_free(f);
}

static void flight_writable(struct tl_exchange *x)
{
    struct tl_flight *f = x->user;
    if (f->backlog)
        flight_deliver(f);
}

static void flight_gone(struct tl_exchange *x)
{
    struct tl_flight *f = x->user;
    note(f, f->x->note.finish ? f->x->note.finish : "client_gone");
    let_go(f);
    tl_flight_cancel(f, TL_CANCEL_CLIENT);
    if (f->backlog)
        flight_deliver(f);
}

static const struct tl_exchange_ops flight_ops = {flight_gone, flight_due, flight_writable};

/* ---- start -------------------------------------------------------------------------------------------------------- */

/* Refused before any costly work. */
static int admit(struct tl_flight *f, struct tl_error *err)
{
    struct tl_server *s = f->srv;
    int64_t tokens = tl_ask_tokens(&f->ask);
    bool full = s->n_waiting >= s->cfg->max_waiting;
    if (full || (s->n_waiting > 0 && s->waiting_tokens + tokens > s->cfg->max_waiting_tokens)) {
        int code =
            tl_refuse(err, TL_ERR_OVERLOADED, NULL, "%d requests with %lld prompt tokens are waiting; try again later.",
                      s->n_waiting, (long long)s->waiting_tokens);
        tl_error_num(err, "position", s->n_waiting + 1);
        tl_error_num(err, "est_ms", (int64_t)(tl_server_wait_s(s) * 1e3));
        return code;
    }
    f->n_tokens_waiting = tokens;
    return 0;
}

static void submit(struct tl_flight *f)
{
    struct tl_server *s = f->srv;
    struct tl_error err;
    int code = f->encode_code ? f->encode_code : admit(f, &err);
    if (f->encode_code)
        err = f->encode_err;
    if (code == 0 && (s->state != TL_SERVER_READY || s->held))
        code = tl_refuse(&err, TL_CODE_SERVER_DRAINING, NULL, "The server takes no new work.");
    int n = f->ask.n_prompts * f->ask.n;
    f->token_at = calloc((size_t)n, sizeof(*f->token_at));
    f->starts = calloc((size_t)f->ask.n_prompts, sizeof(*f->starts));
    if (code == 0 && (!f->token_at || !f->starts))
        code = (int)tl_fail_host_memory(&err, (size_t)n * sizeof(*f->starts));
    if (code == 0)
        code = (int)tl_generation_create(&f->g, &f->ask, s->facts.tokenizer, s->worker, &err);
    if (code == 0) {
        f->asked = &f->g->ask;
        f->g->deliver = flight_deliver;
        f->g->owner = f;
        f->g->outbox_bytes = (size_t)s->cfg->outbox_bytes;
        f->g->max_seq_len = s->facts.info->max_seq_len;
        f->g->default_loops = s->facts.info->spec->loops_default;
        f->g->deadline = f->until;
        if (!tl_worker_submit(s->worker, &f->g->task))
            code = tl_refuse(&err, TL_ERR_OVERLOADED, NULL, "The queue is full; try again later.");
    }
    if (code != 0) {
        answer_error(f, &err);
        flight_free(f);
        return;
    }
    f->counted_waiting = true;
    s->n_waiting++;
    s->waiting_tokens += f->n_tokens_waiting;
    set_due(f);
}

static void encode(void *user)
{
    struct tl_flight *f = user;
    f->encode_code = tl_ask_encode(&f->ask, &f->srv->facts, &f->encode_err);
}

static void on_encoded(void *user, bool ran)
{
    struct tl_flight *f = user;
    if (ran && !f->given_up)
        submit(f);
    else
        flight_free(f);
}

void tl_flight_start(struct tl_exchange *x, struct tl_ask *ask, const struct tl_renderer *r, void *render)
{
    struct tl_server *s = x->srv;
    struct tl_error err;
    struct tl_flight *f = NULL;
    if (x->key && x->key->concurrent > 0 && x->key->n_running >= x->key->concurrent) {
        tl_refuse(&err, TL_CODE_RATE_LIMIT, NULL, "This API key may have %d requests in flight.", x->key->concurrent);
        x->retry_s = tl_server_wait_s(s);
    } else if (!(f = calloc(1, sizeof(*f)))) {
        tl_fail_host_memory(&err, sizeof(*f));
    }
    if (!f) {
        struct tl_flight orphan = {.render = render};
        r->free(&orphan);
        tl_ask_clear(ask);
        tl_reply_error(x, &err);
        return;
    }
    f->srv = s;
    f->x = x;
    f->renderer = r;
    f->render = render;
    f->ask = *ask;
    memset(ask, 0, sizeof(*ask));
    f->asked = &f->ask;
    f->key = x->key;
    f->route = x->route->path;
    f->t_start = x->t_start;
    f->created = (int64_t)tl_now_wall();
    tl_ulid(f->id);
    snprintf(f->request_id, sizeof(f->request_id), "%s", x->request_id);
    snprintf(f->tenant, sizeof(f->tenant), "%s", x->key ? x->key->tenant : "");
    memcpy(f->ask.reuse.tenant, f->tenant, sizeof(f->tenant));
    double limit = s->cfg->request_seconds;
    if (f->ask.timeout_s > 0 && f->ask.timeout_s < limit)
        limit = f->ask.timeout_s;
    f->until = f->t_start + limit;
    if (f->ask.max_queue_s > 0)
        f->queue_until = f->t_start + f->ask.max_queue_s;
    flight_link(f);
    tl_http_wait(x, &flight_ops, f);
    size_t bytes = tl_ask_text_bytes(&f->ask);
    if (bytes > (size_t)s->cfg->max_prompt_bytes_inline &&
        tl_aside_start(&f->encoding, s, bytes, encode, on_encoded, f))
        return;
    encode(f);
    submit(f);
}
