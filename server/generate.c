#include "generate.h"

#include <stdlib.h>
#include <string.h>

#include "http_status.h"
#include "ids.h"
#include "worker.h"

/* One sequence of the scheduler. Worker only, except job and paused, which the lock guards. */
struct tl_choice {
    struct tl_generation *g;
    int idx;
    int leader;         /* index of the choice whose prompt state this one starts from; its own: it computes it */
    struct tl_job *job; /* NULL before submission and after its end */
    bool paused, submitted, ended;
    bool by_deadline;
    enum { KEEPS_FOR_FOLLOWERS, KEEPS_AUTOMATIC, KEEPS_RESUME } keeps; /* what a KEPT event is for */
    enum tl_reuse reuse;                                               /* what it began from */
    char reuse_id[TL_ENTRY_ID_MAX + 1];
    struct tl_text_stream *text;
    struct tl_handle *kept; /* leader: the state of its prompt, until the others have it */
    uint64_t logits_hash;
    int store_code; /* the resume handle that was asked for could not be kept; store_err says why */
    struct tl_error store_err;
    struct tl_out_end end; /* once ended: followers that never ran share their leader's */
};

void tl_ask_clear(struct tl_ask *a)
{
    for (int i = 0; i < a->n_prompts; i++) {
        free(a->prompts[i].text);
        free(a->prompts[i].ids);
    }
    free(a->prompts);
    free(a->bias);
    tl_form_clear(&a->form);
    for (int i = 0; i < a->n_stops; i++)
        free(a->stops[i]);
    memset(a, 0, sizeof(*a));
}

/* ---- outbox ------------------------------------------------------------------------------------------------------- */

size_t tl_batch_bytes(const struct tl_batch *b)
{
    return b->n_tokens * sizeof(*b->token) + b->text.n + b->n_top * sizeof(*b->top);
}

void tl_batch_clear(struct tl_batch *b)
{
    b->n_tokens = b->n_top = b->text.n = 0;
    b->n_ends = b->rows_done = b->rows_total = 0;
    b->started = b->done = b->failed = false;
    b->reuse = TL_REUSE_NONE;
    b->reuse_id[0] = '\0';
}

void tl_batch_free(struct tl_batch *b)
{
    free(b->token);
    free(b->top);
    free(b->end);
    tl_bytes_free(&b->text);
    memset(b, 0, sizeof(*b));
}

/* Room for one more of `size` bytes each; false sets failed. */
static bool grow(struct tl_batch *b, void **array, size_t *cap, size_t n, size_t more, size_t size)
{
    if (n + more <= *cap)
        return true;
    size_t want = *cap ? *cap * 2 : 16;
    while (want < n + more)
        want *= 2;
    void *p = realloc(*array, want * size);
    if (!p) {
        b->failed = true;
        return false;
    }
    *array = p;
    *cap = want;
    return true;
}

static void batch_token(struct tl_batch *b, int choice, const struct tl_sampled *s, bool prompt, const char *text,
                        size_t n_text)
{
    int n_top = s ? s->n_top : 0;
    if (!grow(b, (void **)&b->token, &b->cap_tokens, b->n_tokens, 1, sizeof(*b->token)) ||
        !grow(b, (void **)&b->top, &b->cap_top, b->n_top, (size_t)n_top, sizeof(*b->top)))
        return;
    b->token[b->n_tokens++] = (struct tl_out_token){
        .choice = choice,
        .token = s ? s->token : -1,
        .prompt = prompt,
        .logprob = s ? s->logprob : 0,
        .n_top = n_top,
        .top_at = b->n_top,
        .n_text = n_text,
        .at = tl_now_mono(),
    };
    if (n_top > 0)
        memcpy(b->top + b->n_top, s->top, (size_t)n_top * sizeof(*b->top));
    b->n_top += (size_t)n_top;
    tl_bytes_add(&b->text, text, n_text);
    b->failed = b->failed || b->text.failed;
}

static void batch_end(struct tl_batch *b, const struct tl_out_end *end)
{
    size_t cap = (size_t)b->cap_ends;
    if (!grow(b, (void **)&b->end, &cap, (size_t)b->n_ends, 1, sizeof(*b->end)))
        return;
    b->cap_ends = (int)cap;
    b->end[b->n_ends++] = *end;
}

/* ---- events of the scheduler (worker) ----------------------------------------------------------------------------- */

static void end_choice(struct tl_choice *c, struct tl_out_end *end)
{
    struct tl_generation *g = c->g;
    end->choice = c->idx;
    end->logits_hash = c->logits_hash;
    end->leader = c->leader == c->idx;
    c->end = *end;
    c->ended = true; /* what it kept waits for its followers: it may end before they are submitted */
    pthread_mutex_lock(&g->lock);
    c->job = NULL;
    if (c->paused)
        g->n_paused--;
    c->paused = false;
    batch_end(&g->out, end);
    bool last = --g->n_live == 0;
    if (last)
        g->out.done = true;
    pthread_mutex_unlock(&g->lock);
    if (!last && g->ask.stream)
        tl_worker_post(g->worker, &g->task);
    tl_worker_attend_soon(g->worker); /* to end the task, or the followers of a leader that failed */
}

static void end_with_error(struct tl_choice *c, const struct tl_error *err)
{
    struct tl_out_end end = {.finish = TL_FINISH_ERROR, .error = *err};
    end_choice(c, &end);
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
        end_with_error(c, failure);
        return;
    }
    if (c->store_code) {
        end_with_error(c, &c->store_err);
        return;
    }
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
            batch_token(&g->out, c->idx, NULL, false, text, n);
            pthread_mutex_unlock(&g->lock);
            if (tl_text_stream_stopped(c->text) >= 0) { /* completed by the replacement of a cut character */
                end.finish = TL_FINISH_STOP;
                end.detail = "stop_sequence";
            }
        }
    }
    end_choice(c, &end);
}

static enum tl_verdict on_token(struct tl_choice *c, const struct tl_event *ev)
{
    struct tl_generation *g = c->g;
    enum tl_verdict verdict = c->store_code ? TL_STOP_HERE : TL_GO_ON;
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
    batch_token(&g->out, c->idx, ev->sampled, false, text, n);
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
        const char *id = tl_registry_pool_hit(tl_worker_registry(g->worker), ev->handle);
        c->reuse = TL_REUSE_POOL;
        memcpy(c->reuse_id, id, strlen(id) + 1);
    }
}

/* A resume handle that the request asked for, or the state for the next turn. Takes h over. */
static void keep_for_later(struct tl_choice *c, struct tl_handle *h)
{
    struct tl_registry *r = tl_worker_registry(c->g->worker);
    const struct tl_reuse_ask *a = &c->g->ask.reuse;
    if (c->keeps == KEEPS_AUTOMATIC)
        tl_registry_keep_automatic(r, h, tl_registry_scope(r, a->tenant, a->salt));
    else
        c->store_code = tl_registry_store_resume(r, a->tenant, a->store_id, a->store_ttl, h, &c->store_err);
}

static enum tl_verdict on_event(void *arg, const struct tl_event *ev)
{
    struct tl_choice *c = arg;
    struct tl_generation *g = c->g;
    switch (ev->kind) {
    case TL_EVENT_TOKEN: return on_token(c, ev);
    case TL_EVENT_DONE: on_done(c, ev); break;
    case TL_EVENT_STARTED:
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
        batch_token(&g->out, c->idx, ev->sampled, true, NULL, 0);
        pthread_mutex_unlock(&g->lock);
        break;
    case TL_EVENT_KEPT:
        if (c->keeps != KEEPS_FOR_FOLLOWERS) {
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

/* ---- submission (worker) ------------------------------------------------------------------------------------------ */

static bool has_followers(const struct tl_generation *g, int leader)
{
    for (int i = leader + 1; i < g->n_choices; i++)
        if (g->choices[i].leader == leader)
            return true;
    return false;
}

/* What a choice leaves behind besides its answer. A resume leaves nothing: it lives on memory that its handle lends. */
static void ask_to_keep(struct tl_choice *c, struct tl_request *r, bool follows)
{
    struct tl_generation *g = c->g;
    const struct tl_reuse_ask *a = &g->ask.reuse;
    struct tl_handle_info info = {0};
    if (follows || r->adaptive)
        return;
    if (a->store && c->idx == 0) {
        c->keeps = KEEPS_RESUME;
        r->keep = TL_KEEP_RESUME;
        r->keep_max_loops = a->store_max_loops;
        r->pool = NULL;
    } else if (has_followers(g, c->idx) && r->max_tokens > 0) {
        r->keep = TL_KEEP_PREFIX;
    } else if (a->keep_automatic && a->pool != TL_POOL_OFF && r->max_tokens > 0 && r->cache_window <= 0 && !r->new_L) {
        if (r->handle)
            tl_handle_info(r->handle, &info);
        c->keeps = KEEPS_AUTOMATIC;
        r->keep_all = info.cache_window == 0 && r->decode_loops == 0;
    }
}

/* Where a choice begins: a named entry, the pool, or nothing. */
static void ask_to_reuse(struct tl_choice *c, struct tl_request *r)
{
    struct tl_generation *g = c->g;
    const struct tl_reuse_ask *a = &g->ask.reuse;
    struct tl_registry *reg = tl_worker_registry(g->worker);
    struct tl_handle_info info;
    if (a->named && !g->plain) {
        r->handle = g->claim.handle;
        tl_handle_info(r->handle, &info);
        if (a->prompt_is_full) {
            r->tokens += info.n_tokens;
            r->n_tokens -= info.n_tokens;
        }
        if (a->named == TL_REUSE_RESUME_HANDLE) {
            r->new_L = a->new_L;
            r->decode_loops = g->ask.loops == a->new_L ? 0 : g->ask.loops;
            r->loops = 0;
        }
        if (!g->ask.max_tokens_given) { /* now that the length of the prefix is known */
            int room = g->max_seq_len - info.n_tokens - r->n_tokens;
            r->max_tokens = room < r->max_tokens ? room > 1 ? room : 1 : r->max_tokens;
        }
    } else if (a->pool != TL_POOL_OFF && !r->want_prompt_logprobs) {
        r->pool = tl_registry_pool(reg);
        r->pool_scope = tl_registry_scope(reg, a->tenant, a->salt);
        r->pool_require = a->pool == TL_POOL_REQUIRE;
    }
}

/* handle NULL: begin at the prompt's start or where the request says; else go on from the leader's state. */
static void submit_choice(struct tl_choice *c, struct tl_handle *handle)
{
    struct tl_generation *g = c->g;
    const struct tl_ask *a = &g->ask;
    const struct tl_prompt *p = &a->prompts[c->idx / a->n];
    struct tl_request r;
    struct tl_error err = {0};
    struct tl_job *job = NULL;
    tl_request_default(&r);
    r.handle = handle;
    r.tokens = handle ? NULL : p->ids;
    r.n_tokens = handle ? 0 : p->n_ids;
    r.loops = a->loops;
    r.cache_window = a->cache_window;
    r.max_tokens = a->max_tokens;
    r.sampling = a->sampling;
    /* With a seed a prompt must get in a batch what it gets alone; without one, equal prompts should differ. */
    r.sampling.choice = (uint32_t)(a->seed_given ? c->idx % a->n : c->idx);
    r.want_prompt_logprobs = !handle && a->echo && a->logprobs;
    r.want_logits_hash = a->return_logits_hash;
    r.adaptive = a->adaptive;
    r.exit_threshold = a->exit_threshold;
    r.grammar = g->grammar;
    r.vocab = g->vocab;
    r.grammar_full = a->form.full;
    if (!handle) {
        ask_to_reuse(c, &r);
    } else if (a->reuse.named == TL_REUSE_RESUME_HANDLE) {
        r.loops = 0;
        r.decode_loops = a->loops == a->reuse.new_L ? 0 : a->loops;
    }
    ask_to_keep(c, &r, handle != NULL);
    r.on_event = on_event;
    r.arg = c;
    c->submitted = true;
    enum tl_status st = tl_sched_submit(tl_worker_sched(g->worker), &r, &job, &err);
    if (st != TL_OK) {
        end_with_error(c, &err);
        return;
    }
    pthread_mutex_lock(&g->lock);
    c->job = job;
    pthread_mutex_unlock(&g->lock);
    if (atomic_load(&g->cancel))
        tl_job_cancel(job); /* the flag may have come before the job was there to be told */
}

static void finish_if_done(struct tl_generation *g)
{
    if (g->n_live == 0) {
        g->n_live = -1;
        for (int i = 0; i < g->n_choices; i++) { /* cancelled before the followers took it */
            tl_handle_free(g->choices[i].kept);
            g->choices[i].kept = NULL;
        }
        if (g->claim.entry)
            tl_registry_release(tl_worker_registry(g->worker), &g->claim);
        tl_worker_done(g->worker, &g->task);
    }
}

/* Start followers whose prompt state is there; end those whose leader has ended without leaving one. */
static void submit_followers(struct tl_generation *g)
{
    for (int l = 0; l < g->n_choices; l++) {
        struct tl_choice *leader = &g->choices[l];
        if (leader->leader != l || (!leader->kept && !leader->ended))
            continue;
        struct tl_handle *kept = leader->kept;
        leader->kept = NULL;
        for (int i = l + 1; i < g->n_choices; i++) {
            struct tl_choice *c = &g->choices[i];
            if (c->leader != l || c->submitted || c->ended)
                continue;
            if (kept) {
                submit_choice(c, kept);
                continue;
            }
            c->submitted = true;
            struct tl_out_end end = leader->end;
            memset(&end.usage, 0, sizeof(end.usage));
            end_choice(c, &end);
        }
        tl_handle_free(kept);
    }
}

/* Everything that has no job of its own ends with this error. */
static void end_all(struct tl_generation *g, const struct tl_error *err)
{
    for (int i = 0; i < g->n_choices; i++)
        if (!g->choices[i].submitted && !g->choices[i].ended)
            end_with_error(&g->choices[i], err);
}

/* Does every prompt begin with the tokens of the entry? */
static int check_full_prompts(const struct tl_generation *g, struct tl_error *err)
{
    struct tl_handle_info info;
    tl_handle_info(g->claim.handle, &info);
    for (int i = 0; i < g->ask.n_prompts; i++) {
        const struct tl_prompt *p = &g->ask.prompts[i];
        int n = 0;
        while (n < info.n_tokens && n < p->n_ids && p->ids[n] == info.tokens[n])
            n++;
        if (n == info.n_tokens)
            continue;
        int code = tl_refuse(err, TL_CODE_PREFIX_MISMATCH, "prompt",
                             "The prompt does not begin with the %d tokens of '%s': "
                             "token %d differs.",
                             info.n_tokens, g->ask.reuse.id, n);
        tl_error_num(err, "common_tokens", n);
        tl_error_num(err, "entry_tokens", info.n_tokens);
        return code;
    }
    return 0;
}

/* Take hold of what the request names. */
static int claim_start(struct tl_generation *g, struct tl_error *err)
{
    const struct tl_reuse_ask *a = &g->ask.reuse;
    struct tl_registry *r = tl_worker_registry(g->worker);
    enum tl_entry_kind kind = a->named == TL_REUSE_RESUME_HANDLE ? TL_ENTRY_RESUME : TL_ENTRY_PREFIX;
    int code;
    if (a->store && (code = tl_registry_check_room(r, a->tenant, err)) != 0)
        return code;
    if (!a->named)
        return 0;
    code = tl_registry_claim(r, kind, a->tenant, a->id, &g->claim, err);
    if (a->plain_if_missing && (code == TL_CODE_PREFIX_CACHE_NOT_FOUND || code == TL_CODE_RESOURCE_GONE)) {
        g->plain = true;
        return 0;
    }
    return code;
}

/* After a restart an entry of the pool may have to be computed again before it can be matched. One is waited for at a time. */
static bool wait_for_pool(struct tl_generation *g)
{
    const struct tl_ask *a = &g->ask;
    struct tl_registry *r = tl_worker_registry(g->worker);
    if ((a->reuse.named && !g->plain) || a->reuse.pool == TL_POOL_OFF)
        return false;
    tl_registry_release(r, &g->claim);
    for (int i = 0; i < a->n_prompts && g->n_stored < a->n_prompts; i++) {
        const struct tl_prompt *p = &a->prompts[i];
        if (!tl_registry_claim_stored(r, p->ids, p->n_ids, a->loops ? a->loops : g->default_loops,
                                      a->cache_window > 0 ? a->cache_window : 0,
                                      tl_registry_scope(r, a->reuse.tenant, a->reuse.salt), &g->claim))
            continue;
        g->n_stored++;
        return !g->claim.ready;
    }
    return false;
}

/* Submit the leaders once what they begin from is there. */
static void begin(struct tl_generation *g)
{
    struct tl_error err;
    struct tl_claim *claim = &g->claim;
    bool named = g->ask.reuse.named && !g->plain;
    g->waits_for_claim = claim->entry && !claim->ready && !claim->code;
    if (g->waits_for_claim)
        return;
    if (named && claim->code) {
        end_all(g, &claim->err);
        return;
    }
    if (wait_for_pool(g)) {
        g->waits_for_claim = true;
        return;
    }
    if (named && g->ask.reuse.prompt_is_full && check_full_prompts(g, &err) != 0) {
        end_all(g, &err);
        return;
    }
    if (g->ask.form.set && !g->grammar &&
        tl_forms_get(tl_worker_forms(g->worker), &g->ask.form, &g->grammar, &g->vocab, &err) != TL_OK) {
        end_all(g, &err);
        return;
    }
    for (int i = 0; i < g->n_choices; i++)
        if (g->choices[i].leader == i)
            submit_choice(&g->choices[i], NULL);
    submit_followers(g);
}

static void generation_work(struct tl_task *t, struct tl_worker *w)
{
    struct tl_generation *g = (struct tl_generation *)t;
    const struct tl_error *failure = tl_worker_failure(w);
    struct tl_error err;
    bool cancelled = atomic_load(&g->cancel) != TL_CANCEL_NO;
    if (failure)
        err = *failure;
    else
        tl_fail(&err, TL_ERR_CANCELLED, "The request was cancelled while it waited.");
    int code = failure || cancelled ? (int)err.status : claim_start(g, &err);
    if (code)
        end_all(g, &err);
    else
        begin(g);
    finish_if_done(g);
}

static void generation_attend(struct tl_task *t, struct tl_worker *w)
{
    struct tl_generation *g = (struct tl_generation *)t;
    const struct tl_error *failure = tl_worker_failure(w);
    bool cancel = atomic_load(&g->cancel) != TL_CANCEL_NO;
    pthread_mutex_lock(&g->lock);
    for (int i = 0; i < g->n_choices && (cancel || g->want_resume); i++) {
        struct tl_choice *c = &g->choices[i];
        if (!c->job)
            continue;
        if (cancel)
            tl_job_cancel(c->job);
        if (!c->paused)
            continue;
        c->paused = false;
        g->n_paused--;
        tl_job_resume(c->job);
    }
    g->want_resume = false;
    pthread_mutex_unlock(&g->lock);
    if (failure || cancel) {
        struct tl_error err;
        if (failure)
            err = *failure;
        else
            tl_fail(&err, TL_ERR_CANCELLED, "The request was cancelled.");
        bool late = !failure && atomic_load(&g->cancel) == TL_CANCEL_DEADLINE;
        for (int i = 0; i < g->n_choices; i++) { /* those that wait for a leader have no job that could end */
            struct tl_out_end end = {.finish = TL_FINISH_LENGTH, .detail = "deadline"};
            if (g->choices[i].submitted || g->choices[i].ended)
                continue;
            if (late)
                end_choice(&g->choices[i], &end);
            else
                end_with_error(&g->choices[i], &err);
        }
    } else if (g->waits_for_claim) {
        begin(g);
    } else {
        submit_followers(g);
    }
    finish_if_done(g);
}

static void generation_deliver(struct tl_task *t)
{
    struct tl_generation *g = (struct tl_generation *)t;
    if (g->owner)
        g->deliver(g->owner);
}

static void generation_free(struct tl_task *t)
{
    struct tl_generation *g = (struct tl_generation *)t;
    for (int i = 0; i < g->n_choices; i++)
        tl_text_stream_free(g->choices[i].text);
    free(g->choices);
    tl_grammar_free(g->grammar);
    tl_ask_clear(&g->ask);
    tl_batch_free(&g->out);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

static const struct tl_task_ops generation_ops = {generation_work, generation_attend, generation_deliver,
                                                  generation_free};

/* ---- from the loop ------------------------------------------------------------------------------------------------ */

static enum tl_status make_text_streams(struct tl_generation *g, const struct tl_tokenizer *tk, struct tl_error *err)
{
    struct tl_stop_string stops[TL_STOPS_MAX];
    for (int i = 0; i < g->ask.n_stops; i++)
        stops[i] = (struct tl_stop_string){g->ask.stops[i], strlen(g->ask.stops[i])};
    struct tl_text_stream_params p = {
        .tokenizer = tk, .detok = {.mid_text = true}, .stops = stops, .n_stops = g->ask.n_stops};
    for (int i = 0; i < g->n_choices; i++) {
        enum tl_status st = tl_text_stream_create(&g->choices[i].text, &p, err);
        if (st != TL_OK)
            return st;
    }
    return TL_OK;
}

enum tl_status tl_generation_create(struct tl_generation **out, struct tl_ask *ask, const struct tl_tokenizer *tk,
                                    struct tl_worker *w, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    *out = NULL;
    struct tl_generation *g = calloc(1, sizeof(*g));
    if (!g) {
        tl_ask_clear(ask);
        return tl_fail_host_memory(err, sizeof(*g));
    }
    tl_task_init(&g->task, &generation_ops);
    pthread_mutex_init(&g->lock, NULL);
    g->worker = w;
    g->ask = *ask;
    memset(ask, 0, sizeof(*ask));
    g->ask.sampling.stop_ids = g->ask.stop_ids;
    int n = g->ask.n_prompts * g->ask.n;
    g->choices = calloc((size_t)n, sizeof(*g->choices));
    if (!g->choices) {
        st = tl_fail_host_memory(err, (size_t)n * sizeof(*g->choices));
        goto out;
    }
    g->n_choices = g->n_live = n;
    for (int i = 0; i < n; i++) { /* a prompt read at a depth of its own leaves no state that others could start from */
        int leader = g->ask.adaptive ? i : g->ask.prompts[i / g->ask.n].same_as * g->ask.n;
        g->choices[i] = (struct tl_choice){.g = g, .idx = i, .leader = leader};
    }
    st = make_text_streams(g, tk, err);
    if (st != TL_OK)
        goto out;
    *out = g;
    g = NULL;
out:
    if (g)
        tl_task_drop(&g->task);
    return st;
}

void tl_generation_take(struct tl_generation *g, struct tl_batch *into)
{
    bool poke = false;
    tl_batch_clear(into);
    pthread_mutex_lock(&g->lock);
    struct tl_batch mine = g->out;
    g->out = *into;
    *into = mine;
    if (g->n_paused > 0)
        poke = g->want_resume = true;
    pthread_mutex_unlock(&g->lock);
    if (poke)
        tl_worker_poke(g->worker);
}

void tl_generation_cancel(struct tl_generation *g, enum tl_cancel why)
{
    int no = TL_CANCEL_NO;
    if (!atomic_compare_exchange_strong(&g->cancel, &no, (int)why))
        return;
    pthread_mutex_lock(&g->lock);
    for (int i = 0; i < g->n_choices; i++)
        if (g->choices[i].job)
            tl_job_cancel(g->choices[i].job);
    pthread_mutex_unlock(&g->lock);
    tl_worker_poke(g->worker);
}
