/* The scheduler: which rows run in the next step.
 *
 * A job goes waiting -> (resume) -> prefill -> decode -> gone. It is admitted in order of arrival, once the pages of its whole
 * life can be promised; from then on it cannot run out of memory. Every step takes one row of each decoding job and gives
 * the rest of the row budget to prompts, in equal shares, so that a short prompt is not stuck behind a long one. Tokens that
 * a grammar has forced are run like a prompt.
 * What grammars cost is bounded for each step, over all jobs: those whose turn has not come run again in the next one.
 * A cancelled job is dropped between loop iterations, chunks and tokens; what it held is free afterwards. */
#include <string.h>

#include "job.h"
#include "mem.h"
#include "prefix_pool.h"

#define RUNNING_MAX_DEFAULT  64
#define WAITING_MAX_DEFAULT  1024
#define GRAMMAR_WORK_DEFAULT 1000000
/* While somebody decodes, or a short prompt is about to get its first token, prompts get only one part in this of a step, so
 * that nobody who is near a token waits for a whole step of somebody else's prompt. */
#define SHARE_BESIDE_OTHERS 4

/* A step under way: whose rows it has. */
struct step {
    struct tl_forward_row *rows; /* [rows_max] */
    int n_rows, flight;
    struct tl_job **jobs; /* [n_running_max]; NULL: gone meanwhile, or left out */
    int *row_at, *n_rows_of;
    int n_jobs;
};

struct tl_sched {
    struct tl_model *m;
    struct tl_sched_params p;
    struct tl_job *head, **tail; /* waiting */
    int n_waiting;
    struct tl_job **running;     /* [n_running_max] */
    int n_running, turn;         /* turn: whose prompt comes first in the next step */
    struct tl_forward_row *rows; /* of the step being planned */
    struct step steps[TL_FLIGHTS_MAX];
    int n_ring;           /* of steps: how many can be under way */
    int first, n_steps;   /* the step that was started first, and how many are under way */
    int64_t grammar_left; /* of grammar_work */
    int mask_turn;        /* which job of a step has its mask found first */
    struct tl_sched_stats stats;
};

static bool make_step(const struct tl_sched *s, struct step *st)
{
    size_t n = (size_t)s->p.n_running_max;
    st->rows = tl_calloc((size_t)tl_forward_rows_max(s->m->fwd), sizeof(*st->rows));
    st->jobs = tl_calloc(n, sizeof(struct tl_job *));
    st->row_at = tl_array(n, sizeof(int));
    st->n_rows_of = tl_array(n, sizeof(int));
    return st->rows && st->jobs && st->row_at && st->n_rows_of;
}

static void free_lists(struct tl_sched *s)
{
    for (int i = 0; i < TL_FLIGHTS_MAX; i++) {
        tl_free(s->steps[i].rows);
        tl_free(s->steps[i].jobs);
        tl_free(s->steps[i].row_at);
        tl_free(s->steps[i].n_rows_of);
    }
    tl_free(s->running);
    tl_free(s);
}

enum tl_status tl_sched_create(struct tl_sched **out, struct tl_model *m, const struct tl_sched_params *params,
                               struct tl_error *err)
{
    struct tl_sched *s = tl_calloc(1, sizeof(*s));
    bool ok;

    *out = NULL;
    if (!s)
        return tl_fail_host_memory(err, sizeof(*s));
    s->m = m;
    if (params)
        s->p = *params;
    if (s->p.n_running_max <= 0)
        s->p.n_running_max = RUNNING_MAX_DEFAULT;
    if (s->p.n_running_max > tl_forward_heads_max(m->fwd))
        s->p.n_running_max = tl_forward_heads_max(m->fwd);
    if (s->p.n_waiting_max <= 0)
        s->p.n_waiting_max = WAITING_MAX_DEFAULT;
    if (s->p.grammar_work <= 0)
        s->p.grammar_work = GRAMMAR_WORK_DEFAULT;
    s->tail = &s->head;
    s->running = tl_calloc((size_t)s->p.n_running_max, sizeof(struct tl_job *));
    ok = s->running != NULL;
    s->n_ring = tl_forward_flights_max(m->fwd);
    for (int i = 0; ok && i < s->n_ring; i++)
        ok = make_step(s, &s->steps[i]);
    if (!ok) {
        free_lists(s);
        return tl_fail_host_memory(err, (size_t)s->p.n_running_max * sizeof(void *));
    }
    *out = s;
    return TL_OK;
}

/* Take the job at this place out of the queue. */
static struct tl_job *take_waiting(struct tl_sched *s, struct tl_job **at)
{
    struct tl_job *j = *at;
    *at = j->next;
    if (!j->next)
        s->tail = at;
    s->n_waiting--;
    return j;
}

/* Wait for the step that was started first. */
static enum tl_status finish_first(struct tl_sched *s, struct tl_error *err)
{
    enum tl_status st = tl_forward_finish(s->m->fwd, s->steps[s->first].flight, err);
    s->first = (s->first + 1) % s->n_ring;
    s->n_steps--;
    return st;
}

void tl_sched_free(struct tl_sched *s)
{
    if (!s)
        return;
    while (s->n_steps)
        (void)finish_first(s, NULL);
    for (int i = 0; i < s->n_running; i++) {
        tl_job_done(s->running[i], TL_FINISH_CANCELLED, NULL);
        tl_job_free(s->running[i]);
    }
    s->n_running = 0;
    while (s->head) {
        struct tl_job *j = take_waiting(s, &s->head);
        tl_job_done(j, TL_FINISH_CANCELLED, NULL);
        tl_job_free(j);
    }
    free_lists(s);
}

static void plan_of(const struct tl_job *j, struct tl_handle *base, int base_len, struct tl_seq_plan *p)
{
    memset(p, 0, sizeof(*p));
    p->base = base;
    p->base_len = base_len;
    p->n_loops = j->loops;
    p->window = j->window;
    p->len_max = j->n_prompt + j->req.max_tokens;
    p->keep_state = j->req.keep == TL_KEEP_RESUME || j->adaptive;
    p->n_state_rows = j->adaptive ? p->len_max : j->n_prompt;
    p->keep_then_grow = j->req.keep != TL_KEEP_NONE && j->req.max_tokens > 0;
}

/* Pages that the handle a job leaves behind goes on holding, beyond what its base holds already. */
static int64_t kept_pages(const struct tl_job *j, const struct tl_seq_plan *p)
{
    const struct tl_kv *kv = j->m->kv;
    struct tl_seq_plan alone = *p;
    int64_t lent, extra = 0;

    if (j->req.keep == TL_KEEP_NONE)
        return 0;
    alone.len_max = j->n_prompt;
    alone.keep_then_grow = false;
    if (j->req.keep == TL_KEEP_RESUME)
        extra = tl_resume_pages(kv, j->n_prompt, j->loops, j->req.keep_max_loops, j->window);
    return tl_seq_need(kv, &alone, &lent) + extra;
}

static enum tl_status check_memory(const struct tl_job *j, struct tl_error *err)
{
    const struct tl_kv *kv = j->m->kv;
    struct tl_seq_plan p;
    int64_t need, lent;

    plan_of(j, j->req.handle, j->base_len, &p);
    need = tl_seq_need(kv, &p, &lent);
    if (j->req.keep == TL_KEEP_RESUME)
        need += tl_resume_pages(kv, j->n_prompt, j->loops, j->req.keep_max_loops, j->window);
    if (need > kv->n_pages) {
        tl_fail(err, TL_ERR_EXCEEDS_MEMORY, "the request needs %lld bytes of KV memory, the whole budget is %lld",
                (long long)need * (long long)kv->view.page_bytes,
                (long long)kv->n_pages * (long long)kv->view.page_bytes);
        tl_error_num(err, "needed", need * (int64_t)kv->view.page_bytes);
        tl_error_num(err, "budget", (int64_t)kv->n_pages * (int64_t)kv->view.page_bytes);
        return TL_ERR_EXCEEDS_MEMORY;
    }
    return TL_OK;
}

enum tl_status tl_sched_submit(struct tl_sched *s, const struct tl_request *r, struct tl_job **out,
                               struct tl_error *err)
{
    struct tl_model *m = s->m;
    struct tl_job *j = NULL;
    int loops, decode_loops, window, prefix = r->handle ? r->handle->n_tokens : 0;
    enum tl_status st;

    *out = NULL;
    st = tl_request_check(m, r, &loops, &decode_loops, &window, err);
    if (st != TL_OK)
        return st;
    if (s->n_waiting >= s->p.n_waiting_max) {
        st = tl_fail(err, TL_ERR_OVERLOADED, "%d requests are waiting, the limit is %d", s->n_waiting,
                     s->p.n_waiting_max);
        tl_error_num(err, "position", s->n_waiting);
        return st;
    }

    j = tl_calloc(1, sizeof(*j));
    if (!j)
        return tl_fail_host_memory(err, sizeof(*j));
    j->m = m;
    j->sched = s;
    j->req = *r;
    if (r->handle)
        tl_handle_ref(r->handle);
    j->loops = loops;
    j->decode_loops = decode_loops;
    j->window = window;
    j->n_prompt = j->n_tokens = prefix + r->n_tokens;
    j->base_len = prefix;
    j->cap = j->n_prompt + r->max_tokens;
    if (j->req.keep == TL_KEEP_RESUME && !j->req.keep_max_loops)
        j->req.keep_max_loops = m->info.max_loops;
    j->tokens = tl_array((size_t)j->cap, sizeof(*j->tokens));
    if (r->keep_all)
        j->last_row = tl_array((size_t)m->info.spec->d_model, sizeof(float));
    if (!j->tokens || (r->keep_all && !j->last_row)) {
        st = tl_fail_host_memory(err, (size_t)j->cap * sizeof(*j->tokens));
        goto out;
    }
    if (prefix)
        memcpy(j->tokens, r->handle->tokens, (size_t)prefix * sizeof(*j->tokens));
    if (r->n_tokens)
        memcpy(j->tokens + prefix, r->tokens, (size_t)r->n_tokens * sizeof(*j->tokens));
    j->req.tokens = NULL; /* the caller's memory is not ours any more */
    if (r->adaptive) {
        bool gate = m->info.spec->exit == TL_EXIT_GATE_CDF;
        float threshold = r->exit_threshold > 0 ? r->exit_threshold
                          : gate                ? TL_EXIT_GATE_DEFAULT
                                                : TL_EXIT_LATENT_DEFAULT;
        if ((st = tl_adaptive_create(&j->adaptive, j, threshold, err)) != TL_OK)
            goto out;
    }
    if ((st = check_memory(j, err)) != TL_OK)
        goto out;
    st = tl_sampler_create(&j->sampler, &r->sampling, m->info.vocab_size, j->tokens, j->n_prompt, err);
    if (st != TL_OK)
        goto out;
    if (r->grammar) {
        struct tl_constraint_params cp = {.grammar = r->grammar,
                                          .vocab = r->vocab,
                                          .stop_ids = r->sampling.stop_ids,
                                          .n_stop_ids = r->sampling.n_stop_ids,
                                          .history = j->tokens,
                                          .n_history = r->grammar_full ? j->n_prompt : 0,
                                          .budget = &s->grammar_left,
                                          .any_piece = r->sampling.n_logit_bias > 0};
        if ((st = tl_constraint_create(&j->constraint, &cp, err)) != TL_OK)
            goto out;
        j->req.grammar = NULL; /* the constraint holds it */
    }
    j->req.sampling.logit_bias = NULL;
    j->req.sampling.stop_ids = NULL;
    atomic_init(&j->cancelled, false);
    atomic_init(&j->paused, false);
    j->usage.n_prompt = j->n_prompt;
    j->usage.n_loops = loops;
    j->usage.exact = decode_loops == loops;
    j->t_submit = tl_now();
    *s->tail = j;
    s->tail = &j->next;
    s->n_waiting++;
    *out = j;
    j = NULL;
out:
    tl_job_free(j);
    return st;
}

/* ---- admission ---- */

static void begin(struct tl_job *j, int base_n_loops, int matched, double t_clone)
{
    struct tl_event ev = {.kind = TL_EVENT_STARTED, .handle = j->seq.base};
    bool resumed = j->seq.base && j->loops > base_n_loops;

    j->t_start = tl_now();
    j->usage.queue_s = t_clone - j->t_submit;
    j->usage.clone_s = j->t_start - t_clone;
    j->t_phase = j->t_start;
    j->base_len = matched;
    j->usage.n_reused = matched;
    j->usage.n_prefilled = j->n_prompt - matched;
    if (matched) {
        j->usage.iterations_run = j->loops - base_n_loops;
        j->usage.iterations_skipped = base_n_loops;
    }
    if (j->adaptive)
        tl_adaptive_begin(j);
    j->phase = j->adaptive             ? TL_PHASE_ADAPTIVE
               : resumed               ? TL_PHASE_RESUME
               : matched < j->n_prompt ? TL_PHASE_PREFILL
                                       : TL_PHASE_READOUT;
    tl_job_emit(j, &ev);
}

/* Try to start the first waiting job. TL_OK and *started false: it has to wait. An error is the job's, not the scheduler's. */
static enum tl_status admit(struct tl_sched *s, struct tl_job *j, bool *started, struct tl_error *err)
{
    struct tl_model *m = s->m;
    struct tl_handle *base = j->req.handle;
    int matched = base ? base->n_tokens : 0, base_loops;
    struct tl_pool_match match = {0};
    struct tl_seq_plan p;
    int64_t need, lent;
    bool use_lender = false;
    enum tl_status st;
    double t = tl_now();

    *started = false;
    if (j->req.pool && j->req.keep != TL_KEEP_RESUME && !j->req.want_prompt_logprobs &&
        !(j->adaptive && m->info.spec->n_coda)) {
        tl_pool_find(j->req.pool, j->tokens, j->n_prompt, j->loops, j->window, j->req.pool_scope, &match);
        base = match.handle;
        matched = match.n_matched;
    }
    if (base && j->adaptive) { /* the last token is run, to find where it stops; a shallower prefix would have holes */
        if (base->n_loops < j->loops || j->n_prompt == 1)
            base = NULL, matched = 0;
        else if (matched == j->n_prompt)
            matched--;
    }
    if (j->req.pool && j->req.pool_require && !base) { /* also where the request is of a kind that no entry can serve */
        tl_fail(err, TL_ERR_NO_POOL_MATCH,
                "no registered prefix serves the prompt; the nearest one agrees in %d tokens", match.n_common);
        tl_error_num(err, "nearest_common_tokens", match.n_common);
        return TL_ERR_NO_POOL_MATCH;
    }
    base_loops = base ? base->n_loops : 0;
    if (base)
        tl_handle_ref(base); /* eviction below must not take it away */
    plan_of(j, base, matched, &p);
    need = tl_seq_need(m->kv, &p, &lent);
    if (lent && j->req.keep == TL_KEEP_NONE && !j->req.keep_all && base->resume_reserved == base->resume_pages) {
        use_lender = true; /* the handle promised one resume at a time that cannot fail */
        need -= lent;
    }
    if (j->req.keep == TL_KEEP_RESUME) /* promised again, to the handle, when it is made */
        need += tl_resume_pages(m->kv, j->n_prompt, j->loops, j->req.keep_max_loops, j->window);
    st = TL_OK;
    if (m->kv->n_held + kept_pages(j, &p) > m->kv->n_pages - m->seq_reserve_pages && j->req.keep != TL_KEEP_NONE) {
        while (m->kv->n_held + kept_pages(j, &p) > m->kv->n_pages - m->seq_reserve_pages && tl_pools_evict_one(m))
            ;
        if (m->kv->n_held + kept_pages(j, &p) > m->kv->n_pages - m->seq_reserve_pages) {
            int64_t bytes = (int64_t)m->kv->view.page_bytes;
            st = tl_fail(err, TL_ERR_NO_DEVICE_MEMORY,
                         "keeping this prefix needs %lld bytes, %lld are left beside the reserve for one sequence",
                         (long long)(kept_pages(j, &p) * bytes),
                         (long long)((m->kv->n_pages - m->seq_reserve_pages - m->kv->n_held) * bytes));
            tl_error_num(err, "needed", kept_pages(j, &p) * bytes);
            tl_error_num(err, "free", (m->kv->n_pages - m->seq_reserve_pages - m->kv->n_held) * bytes);
            goto out;
        }
    }
    if (!tl_model_reserve(m, need)) {
        if (s->n_running == 0) { /* nothing will come free by itself: named entries hold it */
            st = tl_fail(err, TL_ERR_NO_DEVICE_MEMORY, "the request needs %lld bytes of KV memory, %lld are free",
                         (long long)need * (long long)m->kv->view.page_bytes,
                         (long long)tl_kv_available(m->kv) * (long long)m->kv->view.page_bytes);
            tl_error_num(err, "needed", need * (int64_t)m->kv->view.page_bytes);
            tl_error_num(err, "free", tl_kv_available(m->kv) * (int64_t)m->kv->view.page_bytes);
        }
        goto out;
    }
    st = tl_seq_start(&j->seq, m->kv, &p, need, use_lender, err);
    if (st != TL_OK) {
        tl_kv_unreserve(m->kv, need);
        goto out;
    }
    *started = true;
    if (j->req.pool)
        tl_pool_used(j->req.pool, base);
    begin(j, base_loops, matched, t);
out:
    tl_handle_free(base);
    return st;
}

static bool is_reading(const struct tl_job *j) { return j->constraint && !tl_constraint_has_read(j->constraint); }

/* Anywhere in the queue cancelled jobs leave at once, not to wait for those before them, and prompts that have to be part of a
 * grammar's text are read on, each with its share of the work. Returns whether there is more to read. */
static bool tend_waiting(struct tl_sched *s)
{
    struct tl_job **at = &s->head;
    int n = 0, n_left = 0;
    for (const struct tl_job *j = s->head; j; j = j->next)
        n += is_reading(j);
    s->grammar_left = s->p.grammar_work;
    while (*at) {
        struct tl_job *j = *at;
        struct tl_error err;
        bool all = true, cancelled = atomic_load(&j->cancelled);
        enum tl_status st = TL_OK;
        if (!cancelled && is_reading(j))
            st = tl_constraint_read(j->constraint, s->grammar_left / n--, &all, &err);
        if (!cancelled && st == TL_OK) {
            n_left += !all;
            at = &j->next;
            continue;
        }
        take_waiting(s, at);
        tl_job_done(j, cancelled ? TL_FINISH_CANCELLED : TL_FINISH_ERROR, cancelled ? NULL : &err);
        tl_job_free(j);
    }
    return n_left > 0;
}

/* In order of arrival, but for those whose prompts are still read. */
static void admit_waiting(struct tl_sched *s)
{
    struct tl_job **at = &s->head;
    while (*at && s->n_running < s->p.n_running_max) {
        struct tl_job *j = *at;
        struct tl_error err;
        enum tl_status st = TL_OK;
        bool started = false;
        if (is_reading(j)) {
            at = &j->next;
            continue;
        }
        if (!atomic_load(&j->cancelled)) {
            st = admit(s, j, &started, &err);
            if (st == TL_OK && !started)
                return;
        }
        take_waiting(s, at);
        if (started) {
            s->running[s->n_running++] = j;
            continue;
        }
        tl_job_done(j, st == TL_OK ? TL_FINISH_CANCELLED : TL_FINISH_ERROR, st == TL_OK ? NULL : &err);
        tl_job_free(j);
    }
}

/* A job leaves while steps with rows of it are under way. What they write goes to pages that are free by then; whoever takes such a
 * page writes to it in a later step, and the device keeps the order. */
static void forget(struct tl_sched *s, const struct tl_job *j)
{
    for (int k = 0; k < TL_FLIGHTS_MAX; k++)
        for (int i = 0; i < s->steps[k].n_jobs; i++)
            if (s->steps[k].jobs[i] == j)
                s->steps[k].jobs[i] = NULL;
}

static void sweep_running(struct tl_sched *s)
{
    int n = 0;
    for (int i = 0; i < s->n_running; i++) {
        struct tl_job *j = s->running[i];
        if (!j->done && atomic_load(&j->cancelled))
            tl_job_done(j, TL_FINISH_CANCELLED, NULL);
        if (j->done) {
            forget(s, j);
            tl_job_free(j);
        } else {
            s->running[n++] = j;
        }
    }
    s->n_running = n;
}

/* ---- one step ---- */

static struct tl_forward_row *add_row(struct tl_sched *s, struct tl_job *j, int at, int pos)
{
    struct tl_forward_row *r = &s->rows[at];
    memset(r, 0, sizeof(*r));
    r->seq = &j->seq;
    r->pos = pos;
    r->token = j->tokens[pos];
    r->from_loop = -1;
    r->to_loop = j->loops;
    r->cancelled = &j->cancelled;
    return r;
}

static int rows_left(const struct tl_job *j)
{
    switch (j->phase) {
    case TL_PHASE_RESUME: return j->base_len - j->resume_pos;
    case TL_PHASE_PREFILL: return j->n_prompt - j->seq.len;
    case TL_PHASE_READOUT: return 1;
    case TL_PHASE_DECODE: return j->n_tokens - j->seq.len; /* more than one where a grammar forced some */
    case TL_PHASE_ADAPTIVE: return tl_adaptive_rows_left(j);
    case TL_PHASE_WAITING: break;
    }
    return 0;
}

/* Put n rows of j into the step, from row `at` on. */
static enum tl_status plan_rows(struct tl_sched *s, struct tl_job *j, int at, int n, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    bool keeps_row = j->req.keep != TL_KEEP_NONE || j->req.keep_all;

    j->row_at = at;
    j->n_rows = n;
    if (j->phase == TL_PHASE_ADAPTIVE)
        return tl_adaptive_plan(j, s->rows + at, n, err);
    if (j->phase == TL_PHASE_READOUT) {
        struct tl_forward_row *r = add_row(s, j, at, j->n_prompt - 1);
        r->last_row = j->seq.base->last_row;
        r->head = true;
        r->keep_hidden = keeps_row;
        return TL_OK;
    }
    if (j->phase == TL_PHASE_RESUME) {
        tl_seq_resume_to(&j->seq, j->resume_pos + n);
        for (int i = 0; i < n; i++) {
            struct tl_forward_row *r = add_row(s, j, at + i, j->resume_pos + i);
            r->from_loop = j->seq.base->n_loops;
            r->head = r->keep_hidden = j->resume_pos + i == j->n_prompt - 1;
        }
        return TL_OK;
    }
    st = tl_seq_extend(&j->seq, j->seq.len + n, err);
    for (int i = 0; st == TL_OK && i < n; i++) {
        int pos = j->seq.len + i;
        bool last = pos == j->n_tokens - 1;
        struct tl_forward_row *r = add_row(s, j, at + i, pos);
        if (j->phase == TL_PHASE_DECODE)
            r->to_loop = j->decode_loops;
        r->head = last || (j->req.want_prompt_logprobs && j->phase == TL_PHASE_PREFILL);
        r->chosen = r->head && !j->req.want_prompt_logprobs && tl_job_is_plain(j, pos + 1, &r->draw);
        r->keep_hidden = last && keeps_row;
        r->save_state = j->phase == TL_PHASE_PREFILL && j->req.keep == TL_KEEP_RESUME;
    }
    return st;
}

/* One row away from a token, or from its next loop: served first. */
static bool near_token(const struct tl_job *j)
{
    return j->phase == TL_PHASE_READOUT ||
           ((j->phase == TL_PHASE_DECODE || j->phase == TL_PHASE_ADAPTIVE) && rows_left(j) == 1);
}

static bool some_prompt_ends(const struct tl_sched *s, int share)
{
    for (int i = 0; i < s->n_running; i++) {
        const struct tl_job *j = s->running[i];
        if (!j->done && !atomic_load(&j->paused) && (j->phase == TL_PHASE_PREFILL || j->phase == TL_PHASE_DECODE) &&
            rows_left(j) <= share)
            return true;
    }
    return false;
}

/* Fill the step. Returns the number of rows; jobs that fail on the way get DONE. */
static int plan_step(struct tl_sched *s)
{
    int budget = tl_forward_rows_max(s->m->fwd), heads = tl_forward_heads_max(s->m->fwd), at = 0, n_prompts = 0;
    struct tl_error err;

    for (int i = 0; i < s->n_running; i++) {
        struct tl_job *j = s->running[i];
        j->n_rows = 0;
        if (j->done || atomic_load(&j->paused))
            continue;
        if (!near_token(j)) {
            n_prompts++;
            continue;
        }
        if (plan_rows(s, j, at, 1, &err) == TL_OK)
            at++;
        else
            tl_job_fail(j, &err);
    }
    heads -= at;
    if (!n_prompts || at >= budget)
        return at;
    if (at || (n_prompts > 1 && some_prompt_ends(s, (budget - at) / n_prompts)))
        budget = at + (budget - at) / SHARE_BESIDE_OTHERS;
    s->turn = (s->turn + 1) % s->n_running;
    for (int k = 0; k < s->n_running && at < budget && heads > 0; k++) {
        struct tl_job *j = s->running[(s->turn + k) % s->n_running];
        int n = (budget - at + n_prompts - 1) / (n_prompts ? n_prompts : 1), left = rows_left(j);
        if (j->done || atomic_load(&j->paused) || near_token(j))
            continue;
        n_prompts--;
        n = n < left ? n : left;
        if (j->req.want_prompt_logprobs && n > heads)
            n = heads;
        if (plan_rows(s, j, at, n, &err) != TL_OK) {
            tl_job_fail(j, &err);
            j->n_rows = 0;
            continue;
        }
        at += n;
        heads -= j->req.want_prompt_logprobs ? n : 1;
    }
    return at;
}

/* ---- steps under way ---- */

/* The step whose rows were just planned goes to the device. */
static enum tl_status start_step(struct tl_sched *s, struct step *st, int n_rows, struct tl_error *err)
{
    enum tl_status status = tl_forward_start(s->m->fwd, st->rows, n_rows, &st->flight, err);
    if (status != TL_OK)
        return status;
    st->n_rows = n_rows;
    st->n_jobs = 0;
    for (int i = 0; i < s->n_running; i++) {
        struct tl_job *j = s->running[i];
        if (j->done || j->n_rows == 0)
            continue;
        st->jobs[st->n_jobs] = j;
        st->row_at[st->n_jobs] = j->row_at;
        st->n_rows_of[st->n_jobs++] = j->n_rows;
    }
    s->n_steps++;
    s->stats.steps++;
    s->stats.rows += n_rows;
    for (int i = 0; i < n_rows; i++)
        s->stats.row_loops +=
            st->rows[i].last_row ? 0 : st->rows[i].to_loop - (st->rows[i].from_loop < 0 ? 0 : st->rows[i].from_loop);
    return TL_OK;
}

static struct step *step_at(struct tl_sched *s, int k) { return &s->steps[(s->first + k) % s->n_ring]; }

/* Can the step after `st` start before the tokens of `st` are known? Each of its rows is the next token of a row, chosen by its
 * logits alone, and nobody else has rows to run: they would miss it, and get only every second step. */
static bool can_go_ahead(const struct tl_sched *s, const struct step *st)
{
    for (int i = 0; i < s->n_running; i++) {
        const struct tl_job *j = s->running[i];
        bool under_way = false;
        for (int k = 0; k < st->n_jobs; k++)
            under_way |= st->jobs[k] == j && st->n_rows_of[k] == 1;
        if (!j->done && (!under_way || j->phase != TL_PHASE_DECODE || !tl_job_is_plain(j, 0, NULL) ||
                         atomic_load(&j->paused) || atomic_load(&j->cancelled)))
            return false;
    }
    return true;
}

/* Plan the step that follows `st`: rows of whoever has more than one token to go. Every row of `st` is then the only one of its
 * job and has a head, so its number among the rows is its number among the heads. */
static int plan_ahead(struct tl_sched *s, const struct step *st)
{
    int at = 0;
    struct tl_error err;
    for (int i = 0; i < s->n_running; i++)
        s->running[i]->n_rows = 0;
    for (int k = 0; k < st->n_jobs; k++) {
        struct tl_job *j = st->jobs[k];
        struct tl_forward_row *r;
        if (!j || j->done || j->n_tokens + 1 >= j->cap)
            continue;
        if (tl_seq_extend(&j->seq, j->seq.len + 2, &err) != TL_OK) {
            tl_job_fail(j, &err);
            continue;
        }
        r = add_row(s, j, at, j->seq.len + 1);
        r->token = st->row_at[k];
        r->chained = r->head = true;
        r->chosen = tl_job_is_plain(j, r->pos + 1, &r->draw);
        r->to_loop = j->decode_loops;
        r->keep_hidden = j->req.keep != TL_KEEP_NONE || j->req.keep_all;
        j->row_at = at++;
        j->n_rows = 1;
    }
    return at;
}

/* What the tokens of this step will be chosen from does not depend on it. Where the work for that is spent, a job is left out
 * of the step: its rows are run again, and give the same, in the next one, which begins with it. */
static void prepare_masks(struct tl_sched *s)
{
    const struct step *st = step_at(s, 0);
    int start = s->mask_turn;
    bool left_out = false;
    s->grammar_left = s->p.grammar_work;
    for (int i = 0; i < st->n_jobs; i++) {
        int k = (start + i) % st->n_jobs;
        const struct tl_job *j = st->jobs[k];
        if (!j || j->done || !j->constraint || tl_constraint_prepare(j->constraint) ||
            !st->rows[st->row_at[k] + st->n_rows_of[k] - 1].head)
            continue;
        if (!left_out)
            s->mask_turn = k;
        left_out = true;
        st->jobs[k] = NULL;
    }
}

static void take_results(const struct step *st)
{
    for (int i = 0; i < st->n_jobs; i++) {
        struct tl_job *j = st->jobs[i];
        if (!j || j->done || atomic_load(&j->cancelled))
            continue;
        j->n_rows = st->n_rows_of[i];
        tl_job_take_results(j, st->rows + st->row_at[i]);
    }
}

static void fail_all(struct tl_sched *s, struct tl_error *err)
{
    while (s->n_steps)
        (void)finish_first(s, NULL);
    for (int i = 0; i < s->n_running; i++)
        if (!s->running[i]->done)
            tl_job_fail(s->running[i], err);
    sweep_running(s);
    while (s->head) {
        struct tl_job *j = take_waiting(s, &s->head);
        tl_job_fail(j, err);
        tl_job_free(j);
    }
}

/* Start what can be started: a step of whoever has rows, and the one after it where that needs no answer of the first. */
static enum tl_status start_steps(struct tl_sched *s, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    int n_rows;

    if (!s->n_steps) {
        s->rows = step_at(s, 0)->rows;
        n_rows = plan_step(s);
        if (n_rows)
            st = start_step(s, step_at(s, 0), n_rows, err);
    }
    if (st == TL_OK && s->n_steps && s->n_steps < s->n_ring && can_go_ahead(s, step_at(s, s->n_steps - 1))) {
        s->rows = step_at(s, s->n_steps)->rows;
        n_rows = plan_ahead(s, step_at(s, s->n_steps - 1));
        if (n_rows)
            st = start_step(s, step_at(s, s->n_steps), n_rows, err);
    }
    return st;
}

enum tl_status tl_sched_step(struct tl_sched *s, bool *busy, struct tl_error *err)
{
    struct tl_error local;
    const struct step *first;
    enum tl_status st;
    bool reading;

    if (!err)
        err = &local;
    s->stats.turns++;
    reading = tend_waiting(s);
    sweep_running(s);
    admit_waiting(s);
    st = start_steps(s, err);
    *busy = s->n_steps > 0 || reading;
    if (st == TL_OK && s->n_steps) {
        first = step_at(s, 0);
        prepare_masks(s);
        st = finish_first(s, err);
        if (st == TL_OK)
            take_results(first);
    }
    if (st != TL_OK)
        fail_all(s, err);
    sweep_running(s);
    return st;
}

void tl_job_cancel(struct tl_job *j) { atomic_store(&j->cancelled, true); }
void tl_job_resume(struct tl_job *j) { atomic_store(&j->paused, false); }

int tl_job_position(const struct tl_job *j)
{
    int n = 0;
    if (j->phase != TL_PHASE_WAITING)
        return 0;
    for (const struct tl_job *w = j->sched->head; w && w != j; w = w->next)
        n++;
    return n + 1;
}

void tl_sched_stats(const struct tl_sched *s, struct tl_sched_stats *out)
{
    *out = s->stats;
    out->n_running = s->n_running;
    out->n_waiting = s->n_waiting;
}
