/* The one-shot calls: submit one request, step the scheduler until it is done. */
#include <string.h>

#include "keep.h"
#include "mem.h"
#include "model.h"

struct one_shot {
    struct tl_result *out;
    tl_event_fn *on_event; /* the caller's */
    void *arg;
    int room;
    bool done;
    enum tl_status st;
    struct tl_error err;
};

static enum tl_verdict one_shot_event(void *arg, const struct tl_event *ev)
{
    struct one_shot *o = arg;
    struct tl_result *r = o->out;
    enum tl_verdict verdict = TL_GO_ON;

    switch (ev->kind) {
    case TL_EVENT_TOKEN:
        if (r->n_tokens == o->room) {
            int room = o->room ? 2 * o->room : 64;
            int32_t *t = tl_realloc(r->tokens, (size_t)room * sizeof(*t));
            if (!t) {
                o->st = tl_fail_host_memory(&o->err, (size_t)room * sizeof(*t));
                return TL_STOP_HERE;
            }
            r->tokens = t;
            o->room = room;
        }
        r->tokens[r->n_tokens++] = ev->sampled->token;
        r->last = *ev->sampled;
        r->last_hash = ev->logits_hash;
        break;
    case TL_EVENT_KEPT:
        tl_handle_free(r->kept);
        r->kept = ev->handle;
        return TL_GO_ON;
    case TL_EVENT_DONE:
        o->done = true;
        r->finish = ev->finish;
        r->usage = *ev->usage;
        if (ev->error && o->st == TL_OK) {
            o->err = *ev->error;
            o->st = ev->error->status;
        }
        break;
    case TL_EVENT_STARTED:
    case TL_EVENT_PROGRESS:
    case TL_EVENT_PROMPT_LOGPROB: break;
    }
    if (o->on_event)
        verdict = o->on_event(o->arg, ev);
    return verdict == TL_PAUSE ? TL_GO_ON : verdict; /* nobody is there to resume it */
}

enum tl_status tl_generate(struct tl_sched *s, const struct tl_request *r, struct tl_result *out, struct tl_error *err)
{
    struct tl_request req = *r;
    struct one_shot o = {.out = out, .on_event = r->on_event, .arg = r->arg};
    struct tl_job *job;
    enum tl_status st;
    bool busy = true;

    memset(out, 0, sizeof(*out));
    req.on_event = one_shot_event;
    req.arg = &o;
    st = tl_sched_submit(s, &req, &job, err);
    while (st == TL_OK && !o.done) {
        st = tl_sched_step(s, &busy, err);
        if (st == TL_OK && !busy && !o.done) { /* only paused jobs of others are left in front of it */
            tl_job_cancel(job);
            st = tl_sched_step(s, &busy, err);
            if (st == TL_OK)
                st = tl_fail(err, TL_ERR_OVERLOADED,
                             "the request cannot start: paused requests hold the memory it needs");
        }
    }
    if (st == TL_OK && o.st != TL_OK) {
        if (err)
            *err = o.err;
        st = o.st;
    }
    if (st == TL_OK && out->finish == TL_FINISH_CANCELLED)
        st = tl_fail(err, TL_ERR_CANCELLED, "the request was cancelled after %d tokens", out->n_tokens);
    if (st != TL_OK)
        tl_result_clear(out);
    return st;
}

void tl_result_clear(struct tl_result *r)
{
    tl_free(r->tokens);
    tl_handle_free(r->kept);
    memset(r, 0, sizeof(*r));
}

void tl_request_from_prefix(struct tl_request *r, const struct tl_prefix_params *p)
{
    tl_request_default(r);
    r->tokens = p->tokens;
    r->n_tokens = p->seq_len;
    r->loops = p->n_loops;
    r->cache_window = p->cache_window;
}

enum tl_status tl_run_and_keep(struct tl_handle **out, struct tl_sched *s, const struct tl_request *r,
                               struct tl_error *err)
{
    struct tl_result res;
    enum tl_status st;

    *out = NULL;
    st = tl_generate(s, r, &res, err);
    if (st != TL_OK)
        return st;
    *out = res.kept;
    res.kept = NULL;
    tl_result_clear(&res);
    return *out ? TL_OK : tl_fail(err, TL_ERR_INTERNAL, "the request ended without leaving its handle");
}

static enum tl_verdict warm_event(void *arg, const struct tl_event *ev)
{
    (void)arg;
    (void)ev;
    return TL_GO_ON;
}

enum tl_status tl_model_warm(struct tl_model *m, int n, struct tl_error *err)
{
    static const int32_t prompt[] = {0, 0};
    struct tl_sched *s = NULL; /* of its own: the figures of others stay as they are */
    struct tl_request r;
    enum tl_status st = TL_OK;

    if (tl_forward_flights_max(m->fwd) == 1)
        return TL_OK;
    tl_request_default(&r);
    r.tokens = prompt;
    r.n_tokens = 1;
    r.max_tokens = 5; /* a shape is launched the first time, made a graph the second, and used from then on */
    r.sampling.n_top_logprobs = -1;
    r.on_event = warm_event;
    st = tl_sched_create(&s, m, NULL, err);
    for (int size = 1; st == TL_OK && size <= n; size *= 2)
        for (int round = 0; st == TL_OK && round < 4; round++) { /* two each for the steps of the prompts */
            bool busy = true;
            r.sampling.temperature = round < 2 ? 0.0f : 1.0f; /* tokens chosen on the device, then on the host */
            for (int i = 0; st == TL_OK && i < size; i++) {
                struct tl_job *unused;
                st = tl_sched_submit(s, &r, &unused, err);
            }
            while (st == TL_OK && busy)
                st = tl_sched_step(s, &busy, err);
        }
    tl_sched_free(s);
    return st;
}
