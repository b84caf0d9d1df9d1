#include "verify.h"

#include <string.h>

static enum tl_verdict on_event(void *arg, const struct tl_event *ev)
{
    struct tl_verify_run *run = arg;
    struct tl_verify *v = run->v;
    if (ev->kind == TL_EVENT_TOKEN && run->n < TL_VERIFY_TOKENS_MAX) {
        run->token[run->n] = ev->sampled->token;
        run->hash[run->n++] = ev->logits_hash;
    } else if (ev->kind == TL_EVENT_DONE) {
        run->done = true;
        run->job = NULL;
        run->usage = *ev->usage;
        if (ev->finish == TL_FINISH_ERROR && !v->code) {
            v->err = *ev->error;
            v->code = (int)ev->error->status;
        } else if (ev->finish == TL_FINISH_CANCELLED && !v->code) {
            v->code = (int)tl_fail(&v->err, TL_ERR_CANCELLED, "The comparison was stopped.");
        }
        v->changed(v->arg);
    }
    return TL_GO_ON;
}

static enum tl_status submit(struct tl_verify *v, struct tl_verify_run *run, struct tl_sched *s, bool reused)
{
    struct tl_request q;
    struct tl_handle_info info;
    tl_handle_info(v->claim.handle, &info);
    tl_request_default(&q);
    if (reused) {
        q.handle = v->claim.handle;
        q.new_L = info.kind == TL_HANDLE_RESUME ? v->loops ? v->loops : info.n_loops : 0;
    } else {
        q.tokens = info.tokens;
        q.n_tokens = info.n_tokens;
        q.loops = info.kind == TL_HANDLE_RESUME && v->loops ? v->loops : info.n_loops;
        q.cache_window = info.cache_window;
    }
    q.max_tokens = v->n_tokens;
    q.sampling.temperature = 0;
    q.want_logits_hash = true;
    q.on_event = on_event;
    q.arg = run;
    run->v = v;
    return tl_sched_submit(s, &q, &run->job, &v->err);
}

int tl_verify_begin(struct tl_verify *v, struct tl_registry *r, enum tl_entry_kind kind, const char *tenant,
                    const char *id, struct tl_error *err)
{
    return tl_registry_claim(r, kind, tenant, id, &v->claim, err);
}

static void stop_run(struct tl_verify_run *run)
{
    if (run->job)
        tl_job_cancel(run->job);
}

static void compare(struct tl_verify *v)
{
    const struct tl_verify_run *a = &v->fresh, *b = &v->reused;
    v->n_compared = a->n < b->n ? a->n : b->n;
    v->first_difference = -1;
    for (int i = 0; i < v->n_compared && v->first_difference < 0; i++)
        if (a->token[i] != b->token[i] || a->hash[i] != b->hash[i])
            v->first_difference = i;
    if (v->first_difference < 0 && a->n != b->n)
        v->first_difference = v->n_compared;
    v->equal = v->first_difference < 0;
}

bool tl_verify_attend(struct tl_verify *v, struct tl_registry *r, struct tl_sched *s, const struct tl_error *stop)
{
    if (stop && !v->code) {
        v->err = *stop;
        v->code = (int)stop->status;
    }
    if (v->claim.code && !v->code) {
        v->err = v->claim.err;
        v->code = v->claim.code;
    }
    if (!v->code && !v->submitted && v->claim.ready) {
        enum tl_status st = submit(v, &v->fresh, s, false);
        if (st == TL_OK)
            st = submit(v, &v->reused, s, true);
        v->submitted = true;
        v->code = (int)st;
    }
    if (v->code) {
        stop_run(&v->fresh);
        stop_run(&v->reused);
    }
    if (v->fresh.job || v->reused.job || (!v->code && !v->submitted))
        return false;
    tl_registry_release(r, &v->claim);
    if (!v->code)
        compare(v);
    return true;
}
