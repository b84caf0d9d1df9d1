#include <stdlib.h>
#include <string.h>

#include "generate_impl.h"
#include "http_status.h"
#include "worker.h"

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
    if (follows || r->adaptive || c->keeps_nothing)
        return;
    if (a->store && c->idx == 0) {
        c->keeps = TL_KEEPS_RESUME;
        r->keep = TL_KEEP_RESUME;
        r->keep_max_loops = a->store_max_loops;
        r->pool = NULL;
    } else if (has_followers(g, c->idx) && r->max_tokens > 0) {
        r->keep = TL_KEEP_PREFIX;
    } else if (a->keep_automatic && a->pool != TL_POOL_OFF && r->max_tokens > 0 && r->cache_window <= 0 && !r->new_L) {
        if (r->handle)
            tl_handle_info(r->handle, &info);
        c->keeps = TL_KEEPS_AUTOMATIC;
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
    c->keeps_something = r.keep != TL_KEEP_NONE || r.keep_all;
    r.on_event = tl_gen_on_event;
    r.arg = c;
    c->submitted = true;
    enum tl_status st = tl_sched_submit(tl_worker_sched(g->worker), &r, &job, &err);
    if (st != TL_OK) {
        tl_gen_fail(c, &err);
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
        tl_forms_leave(tl_worker_forms(g->worker), &g->form_wait);
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
            tl_gen_end(c, &end);
        }
        tl_handle_free(kept);
    }
}

/* Everything that has no job of its own ends with this error. */
static void end_all(struct tl_generation *g, const struct tl_error *err)
{
    for (int i = 0; i < g->n_choices; i++)
        if (!g->choices[i].submitted && !g->choices[i].ended)
            tl_gen_fail(&g->choices[i], err);
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

/* The registry speaks of an "id": say which field of the request that was. */
static void name_field(const struct tl_generation *g, struct tl_error *err)
{
    if (strcmp(err->param, "id") == 0)
        tl_error_param(err, g->ask.reuse.id_field);
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
    if (code)
        name_field(g, err);
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

/* The tokens of the named start, for the echo of the whole prompt. */
static int copy_prefix(struct tl_generation *g, struct tl_error *err)
{
    struct tl_handle_info info;
    if (!g->ask.echo || g->ask.reuse.prompt_is_full)
        return 0;
    tl_handle_info(g->claim.handle, &info);
    g->prefix = malloc((size_t)info.n_tokens * sizeof(*g->prefix));
    if (!g->prefix)
        return (int)tl_fail_host_memory(err, (size_t)info.n_tokens * sizeof(*g->prefix));
    memcpy(g->prefix, info.tokens, (size_t)info.n_tokens * sizeof(*g->prefix));
    g->n_prefix = info.n_tokens;
    return 0;
}

/* Is the named start one that this request can go on from? */
static int check_start(struct tl_generation *g, struct tl_error *err)
{
    const struct tl_reuse_ask *a = &g->ask.reuse;
    int code = 0;
    if (a->named == TL_REUSE_RESUME_HANDLE)
        code = tl_registry_check_resume(g->claim.handle, a->new_L, "resume.loops", err);
    if (!code && a->prompt_is_full)
        code = check_full_prompts(g, err);
    return code ? code : copy_prefix(g, err);
}

/* Those that compute their prompt, or resume it, by themselves. */
static void submit_leaders(struct tl_generation *g)
{
    for (int i = 0; i < g->n_choices; i++) {
        struct tl_choice *c = &g->choices[i];
        if (c->leader == i && !c->submitted && !c->ended)
            submit_choice(c, NULL);
    }
}

/* Have the grammar compiled. *later: others are before it. */
static enum tl_status get_form(struct tl_generation *g, bool *later, struct tl_error *err)
{
    struct tl_sched_stats sched;
    enum tl_status st = TL_OK;
    if (g->ask.form.set && !g->grammar) {
        tl_sched_stats(tl_worker_sched(g->worker), &sched);
        st = tl_forms_get(tl_worker_forms(g->worker), &g->ask.form, &g->form_wait, sched.turns, &g->grammar, &g->vocab,
                          err);
    }
    *later = g->form_wait.waits;
    return st;
}

/* Submit the leaders once what they begin from is there, and the grammar they have to keep to. */
static void begin(struct tl_generation *g)
{
    struct tl_error err;
    struct tl_claim *claim = &g->claim;
    bool named = g->ask.reuse.named && !g->plain, later;
    if (get_form(g, &later, &err) != TL_OK) {
        end_all(g, &err);
        return;
    }
    if (later) {
        tl_worker_attend_soon(g->worker);
        return;
    }
    g->waits_for_claim = claim->entry && !claim->ready && !claim->code;
    if (g->waits_for_claim)
        return;
    if (named && claim->code) {
        name_field(g, &claim->err);
        end_all(g, &claim->err);
        return;
    }
    if (wait_for_pool(g)) {
        g->waits_for_claim = true;
        return;
    }
    if (named && check_start(g, &err) != 0) {
        end_all(g, &err);
        return;
    }
    g->begun = true;
    submit_leaders(g);
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
    bool late = !failure && atomic_load(&g->cancel) == TL_CANCEL_DEADLINE;
    if (failure || (cancel && !late))
        tl_gen_give_up_store(g, failure);
    tl_gen_settle_store(g);
    if (failure || cancel) {
        struct tl_error err;
        if (failure)
            err = *failure;
        else
            tl_fail(&err, TL_ERR_CANCELLED, "The request was cancelled.");
        for (int i = 0; i < g->n_choices; i++) { /* those that wait for a leader have no job that could end */
            struct tl_out_end end = {.finish = TL_FINISH_LENGTH, .detail = "deadline"};
            if (g->choices[i].submitted || g->choices[i].ended)
                continue;
            if (late)
                tl_gen_end(&g->choices[i], &end);
            else
                tl_gen_fail(&g->choices[i], &err);
        }
    } else if (g->waits_for_claim || g->form_wait.waits) {
        begin(g);
    } else if (g->begun) {
        submit_leaders(g);
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
    tl_definition_free(g->put);
    free(g->prefix);
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

struct tl_definition *tl_generation_definition(struct tl_generation *g)
{
    pthread_mutex_lock(&g->lock);
    struct tl_definition *d = g->put;
    g->put = NULL;
    pthread_mutex_unlock(&g->lock);
    return d;
}

void tl_generation_stored(struct tl_generation *g, bool ok)
{
    atomic_store(&g->stored, ok ? 1 : -1);
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
