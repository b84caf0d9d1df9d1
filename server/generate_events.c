/* What the scheduler tells of a choice: tokens into the outbox, states that are kept, ends. */
#include <stdlib.h>
#include <string.h>

#include "generate_impl.h"
#include "http_status.h"
#include "ids.h"
#include "worker.h"

void tl_gen_end(struct tl_choice *c, struct tl_out_end *end)
{
    struct tl_generation *g = c->g;
    end->choice = c->idx;
    end->logits_hash = c->logits_hash;
    end->leader = c->leader == c->idx;
    end->reuse = c->reuse;
    memcpy(end->reuse_id, c->reuse_id, sizeof(end->reuse_id));
    end->durable = c->idx == 0 && g->durable;
    c->end = *end;
    c->held = c->idx == 0 && g->stores;
    c->ended = !c->held; /* what it kept waits for its followers: it may end before they are submitted */
    /* The loop may look at once: it was woken for the start, perhaps in the same turn. */
    tl_worker_show_work(g->worker);
    pthread_mutex_lock(&g->lock);
    c->job = NULL;
    if (c->paused)
        g->n_paused--;
    c->paused = false;
    if (!c->held)
        tl_batch_end(&g->out, end);
    bool last = !c->held && --g->n_live == 0;
    if (last)
        g->out.done = true;
    pthread_mutex_unlock(&g->lock);
    if (!last && !c->held && g->ask.stream)
        tl_worker_post(g->worker, &g->task);
    tl_worker_attend_soon(g->worker); /* to end the task, or the followers of a leader that failed */
}

void tl_gen_fail(struct tl_choice *c, const struct tl_error *err)
{
    struct tl_out_end end = {.finish = TL_FINISH_ERROR, .error = *err};
    tl_gen_end(c, &end);
}

/* What a job leaves behind is a wish of ours: where there is no memory for it the answer is computed all the same, and every
 * choice for itself, so that a resume can live on what its handle lends. */
static bool go_without_keeping(struct tl_choice *c, const struct tl_event *ev)
{
    struct tl_generation *g = c->g;
    bool no_memory = ev->finish == TL_FINISH_ERROR && ev->error && ev->error->status == TL_ERR_NO_DEVICE_MEMORY;
    if (!no_memory || c->started || c->keeps_nothing || !c->keeps_something || c->keeps == TL_KEEPS_RESUME)
        return false;
    for (int i = c->idx; i < g->n_choices; i++) {
        struct tl_choice *o = &g->choices[i];
        if (o->leader != c->idx)
            continue;
        o->leader = i;
        o->keeps_nothing = true;
    }
    pthread_mutex_lock(&g->lock);
    c->job = NULL;
    pthread_mutex_unlock(&g->lock);
    c->submitted = false;
    tl_worker_attend_soon(g->worker); /* submitting is not for inside a step */
    return true;
}

/* The end that was held up, now that it is known what became of the handle. */
static void release_held(struct tl_generation *g)
{
    struct tl_choice *c = &g->choices[0];
    struct tl_out_end end = c->end;
    if (!c->held)
        return;
    if (g->store_code)
        tl_gen_fail(c, &g->store_err);
    else
        tl_gen_end(c, &end);
}

/* The file of a handle that will not be. */
static void drop_file(struct tl_generation *g)
{
    if (!g->put_asked)
        return;
    pthread_mutex_lock(&g->lock);
    bool written = g->put == NULL;
    tl_definition_free(g->put);
    g->put = NULL;
    pthread_mutex_unlock(&g->lock);
    struct tl_definition d = {.kind = TL_ENTRY_RESUME};
    memcpy(d.tenant, g->ask.reuse.tenant, sizeof(d.tenant));
    memcpy(d.id, g->ask.reuse.store_id, sizeof(d.id));
    if (written)
        tl_worker_drop_file(g->worker, &d);
}

void tl_gen_settle_store(struct tl_generation *g)
{
    struct tl_registry *r = tl_worker_registry(g->worker);
    struct tl_making *m = &g->storing;
    if (!g->stores)
        return;
    if (m->state == TL_MAKING_MADE && tl_making_definition(m)->persist && !g->put_asked) {
        struct tl_definition *d = tl_definition_copy(tl_making_definition(m));
        pthread_mutex_lock(&g->lock);
        g->put = d;
        g->put_asked = true;
        pthread_mutex_unlock(&g->lock);
        if (d) {
            tl_worker_post(g->worker, &g->task);
            return;
        }
        atomic_store(&g->stored, -1);
    }
    int stored = atomic_load(&g->stored);
    if (m->state == TL_MAKING_MADE && ((g->put_asked && stored == 0) || !g->choices[0].held))
        return; /* before the answer is whole nobody knows its name, and a client that leaves takes it along */
    if (m->state == TL_MAKING_MADE && stored < 0)
        tl_making_not_durable(m);
    if (m->state == TL_MAKING_MADE)
        tl_registry_commit(r, m);
    g->stores = false;
    g->durable = m->state == TL_MAKING_DONE && stored > 0;
    if (m->state == TL_MAKING_FAILED)
        drop_file(g);
    if (m->state == TL_MAKING_FAILED && !g->store_code &&
        m->code != TL_ERR_CANCELLED) { /* deleted by somebody is fine */
        g->store_code = m->code;
        g->store_err = m->err;
    }
    release_held(g);
}

void tl_gen_give_up_store(struct tl_generation *g, const struct tl_error *why)
{
    if (!g->stores)
        return;
    tl_registry_abandon(tl_worker_registry(g->worker), &g->storing);
    g->store_err = why ? *why : g->storing.err;
    g->store_code = (int)g->store_err.status;
    tl_gen_settle_store(g);
}

/* The end of a job: what it means for the client. */
static void on_done(struct tl_choice *c, const struct tl_event *ev)
{
    struct tl_generation *g = c->g;
    struct tl_out_end end = {.finish = ev->finish, .detail = "max_tokens"};
    int why = atomic_load(&g->cancel);
    const struct tl_error *failure = tl_worker_failure(g->worker);
    if (ev->usage)
        end.usage = *ev->usage;
    if (ev->finish == TL_FINISH_CANCELLED && why == TL_CANCEL_NO && failure) { /* not the client's doing */
        tl_gen_fail(c, failure);
        return;
    }
    if (c->idx == 0 && g->store_code) {
        tl_gen_fail(c, &g->store_err);
        return;
    }
    if (go_without_keeping(c, ev))
        return;
    if (ev->finish == TL_FINISH_ERROR && ev->error)
        end.error = *ev->error;
    if (ev->finish == TL_FINISH_CANCELLED)
        end.detail = "cancelled";
    if (c->by_deadline || (ev->finish == TL_FINISH_CANCELLED && why == TL_CANCEL_DEADLINE)) {
        end.finish = TL_FINISH_LENGTH;
        end.detail = "deadline";
    } else if (tl_text_stream_stopped(c->text) >= 0) {
        end.finish = TL_FINISH_STOP;
        end.detail = "stop_sequence";
    } else if (ev->finish == TL_FINISH_STOP) {
        /* which id it was, where the event says so; else it is sure only if the request's own are the only ones */
        bool user = !ev->sampled && g->ask.sampling.n_stop_ids == g->ask.n_user_stop_ids;
        for (int i = 0; i < g->ask.n_user_stop_ids && ev->sampled; i++)
            user = user || g->ask.stop_ids[i] == ev->sampled->token;
        end.detail = g->grammar && !ev->sampled ? "grammar_complete" : user ? "stop_token" : "eos";
    }
    if (end.finish != TL_FINISH_ERROR) {
        const char *text;
        size_t n;
        if (tl_text_stream_flush(c->text, &text, &n, NULL) == TL_OK && n > 0) {
            pthread_mutex_lock(&g->lock);
            tl_batch_token(&g->out, c->idx, NULL, false, text, n);
            pthread_mutex_unlock(&g->lock);
            if (tl_text_stream_stopped(c->text) >= 0) { /* completed by the replacement of a cut character */
                end.finish = TL_FINISH_STOP;
                end.detail = "stop_sequence";
            }
        }
    }
    if (c->idx == 0 && (end.finish == TL_FINISH_ERROR || end.finish == TL_FINISH_CANCELLED))
        tl_gen_give_up_store(g, NULL); /* nobody would hear of it */
    tl_gen_end(c, &end);
}

static enum tl_verdict on_token(struct tl_choice *c, const struct tl_event *ev)
{
    struct tl_generation *g = c->g;
    enum tl_verdict verdict = g->store_code ? TL_STOP_HERE : TL_GO_ON;
    const char *text = NULL;
    size_t n = 0;
    enum tl_status st = tl_text_stream_push(c->text, ev->sampled->token, &text, &n, NULL);
    c->logits_hash = (c->logits_hash ^ ev->logits_hash) * 0x9E3779B97F4A7C15u;
    if (st != TL_OK)
        n = 0; /* an id that the tokenizer does not know has no text; the model may well choose it */
    if (tl_text_stream_stopped(c->text) >= 0)
        verdict = TL_STOP_HERE;
    if (g->deadline > 0 && tl_now_mono() >= g->deadline) {
        c->by_deadline = verdict == TL_GO_ON;
        verdict = TL_STOP_HERE;
    }
    pthread_mutex_lock(&g->lock);
    tl_batch_token(&g->out, c->idx, ev->sampled, false, text, n);
    g->out.failed = g->out.failed || st == TL_ERR_NO_HOST_MEMORY;
    if (g->out.failed)
        verdict = TL_STOP_HERE;
    if (verdict == TL_GO_ON && g->ask.stream && tl_batch_bytes(&g->out) > g->outbox_bytes) {
        c->paused = true;
        g->n_paused++;
        verdict = TL_PAUSE;
    }
    pthread_mutex_unlock(&g->lock);
    if (g->ask.stream)
        tl_worker_post(g->worker, &g->task);
    return verdict;
}

/* What the job begins from; of the pool only now is known which entry it is. */
static void on_started(struct tl_choice *c, const struct tl_event *ev)
{
    struct tl_generation *g = c->g;
    if (g->ask.reuse.named && !g->plain) {
        c->reuse = g->ask.reuse.named;
        memcpy(c->reuse_id, g->ask.reuse.id, sizeof(c->reuse_id));
    } else if (ev->handle && c->leader == c->idx) {
        struct tl_registry *r = tl_worker_registry(g->worker);
        uint64_t scope = tl_registry_scope(r, g->ask.reuse.tenant, g->ask.reuse.salt);
        const char *id = tl_registry_pool_hit(r, ev->handle, scope);
        c->reuse = TL_REUSE_POOL;
        memcpy(c->reuse_id, id, strlen(id) + 1);
    }
}

/* A resume handle that the request asked for, or the state for the next turn. Takes h over. */
static void keep_for_later(struct tl_choice *c, struct tl_handle *h)
{
    struct tl_generation *g = c->g;
    struct tl_registry *r = tl_worker_registry(g->worker);
    const struct tl_reuse_ask *a = &g->ask.reuse;
    if (c->keeps == TL_KEEPS_AUTOMATIC) {
        tl_registry_keep_automatic(r, h, tl_registry_scope(r, a->tenant, a->salt));
        return;
    }
    struct tl_stored_name name = {a->tenant, a->store_id, a->store_ttl, a->store_persist};
    g->store_code = tl_registry_store_resume(r, &g->storing, &name, h, &g->store_err);
    g->stores = g->store_code == 0;
    tl_gen_settle_store(g);
}

enum tl_verdict tl_gen_on_event(void *arg, const struct tl_event *ev)
{
    struct tl_choice *c = arg;
    struct tl_generation *g = c->g;
    switch (ev->kind) {
    case TL_EVENT_TOKEN: return on_token(c, ev);
    case TL_EVENT_DONE: on_done(c, ev); break;
    case TL_EVENT_STARTED:
        c->started = true;
        on_started(c, ev);
        if (g->told_started)
            break;
        g->told_started = true;
        pthread_mutex_lock(&g->lock);
        g->out.started = true;
        g->out.reuse = c->reuse;
        memcpy(g->out.reuse_id, c->reuse_id, sizeof(g->out.reuse_id));
        pthread_mutex_unlock(&g->lock);
        tl_worker_post(g->worker, &g->task);
        break;
    case TL_EVENT_PROGRESS:
        if (!g->ask.return_progress || !g->ask.stream)
            break;
        pthread_mutex_lock(&g->lock);
        g->out.rows_done = ev->pos;
        g->out.rows_total = ev->n_total;
        pthread_mutex_unlock(&g->lock);
        tl_worker_post(g->worker, &g->task);
        break;
    case TL_EVENT_PROMPT_LOGPROB:
        pthread_mutex_lock(&g->lock);
        tl_batch_token(&g->out, c->idx, ev->sampled, true, NULL, 0);
        pthread_mutex_unlock(&g->lock);
        break;
    case TL_EVENT_KEPT:
        if (c->keeps != TL_KEEPS_FOR_FOLLOWERS) {
            keep_for_later(c, ev->handle);
            break;
        }
        tl_handle_free(c->kept);
        c->kept = ev->handle;
        tl_worker_attend_soon(g->worker); /* submitting is not for inside a step */
        break;
    }
    return TL_GO_ON;
}
