/* The scheduler: which rows run in the next step.
 *
 * A job goes waiting -> (resume) -> prefill -> decode -> gone. It is admitted in order of arrival, once the pages of its whole
 * life can be promised; from then on it cannot run out of memory. Every step takes one row of each decoding job and gives
 * the rest of the row budget to prompts, in equal shares, so that a short prompt is not stuck behind a long one.
 * A cancelled job is dropped between loop iterations, chunks and tokens; what it held is free afterwards. */
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "mem.h"
#include "model.h"
#include "prefix_pool.h"

#define RUNNING_MAX_DEFAULT 64
#define WAITING_MAX_DEFAULT 1024
/* While somebody decodes, prompts get at most this part of a step, so that running streams keep their pace. */
#define PREFILL_SHARE_BESIDE_DECODE 4

enum phase { PHASE_WAITING, PHASE_RESUME, PHASE_PREFILL, PHASE_READOUT, PHASE_DECODE };

struct tl_job {
    struct tl_sched *sched;
    struct tl_job *next;           /* in the waiting list */
    struct tl_request req;         /* tokens, bias and stop ids are copies inside the job or the sampler */
    int32_t *tokens;               /* whole prompt, then output; [cap] */
    int n_prompt, n_tokens, cap;
    enum phase phase;
    atomic_bool cancelled;
    bool paused;
    int loops, decode_loops, window;
    int resume_pos;                /* RESUME: rows of the prefix done */
    int base_len;
    struct tl_seq seq;
    struct tl_sampler *sampler;
    float *last_row;               /* [d_model] copy for keep_all; NULL otherwise */
    struct tl_usage usage;
    double t_submit, t_start, t_phase;
    int row_at, n_rows;            /* its rows in the step being run */
    bool done;                     /* DONE was sent: to be removed */
};

struct tl_sched {
    struct tl_model *m;
    struct tl_sched_params p;
    struct tl_job *head, **tail;   /* waiting */
    int n_waiting;
    struct tl_job **running;       /* [n_running_max] */
    int n_running, turn;           /* turn: whose prompt comes first in the next step */
    struct tl_forward_row *rows;   /* [rows_max] */
    struct tl_sched_stats stats;
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void tl_request_default(struct tl_request *r)
{
    memset(r, 0, sizeof(*r));
    r->cache_window = -1;
    tl_sampling_default(&r->sampling);
}

/* ---- checking a request ---- */

static enum tl_status fail_loops(struct tl_error *err, enum tl_status st, const char *param, int got, int min, int max)
{
    tl_fail(err, st, "%s is %d, it must be %d to %d", param, got, min, max);
    tl_error_param(err, param);
    tl_error_num(err, "min", min);
    tl_error_num(err, "max", max);
    tl_error_num(err, "got", got);
    return st;
}

static enum tl_status check_depth(const struct tl_model *m, const struct tl_request *r, int *loops, int *decode_loops,
                                  struct tl_error *err)
{
    const struct tl_handle *h = r->handle;
    int max = m->info.max_loops;

    *decode_loops = 0;
    *loops = r->new_L ? r->new_L : r->loops ? r->loops : h ? h->n_loops : m->info.spec->loops_default;
    if (r->new_L && !h)
        return tl_fail(err, TL_ERR_BAD_PARAM, "new_L is %d, but there is no handle to resume", r->new_L);
    if (r->new_L && (h->kind != TL_HANDLE_RESUME || r->new_L < h->n_loops || r->new_L > h->max_loops)) {
        tl_fail(err, TL_ERR_RESUME_DEPTH, "new_L is %d, this handle can be resumed to %d through %d", r->new_L, h->n_loops,
                h->max_loops);
        tl_error_param(err, "resume.loops");
        tl_error_num(err, "loops_used", h->n_loops);
        tl_error_num(err, "max_loops", h->max_loops);
        tl_error_num(err, "got", r->new_L);
        return TL_ERR_RESUME_DEPTH;
    }
    if (h && !r->new_L && *loops != h->n_loops) {
        tl_fail(err, TL_ERR_LOOP_DEPTH, "loops is %d, this prefix was computed at %d", *loops, h->n_loops);
        tl_error_param(err, "loops");
        tl_error_num(err, "cache_loops", h->n_loops);
        tl_error_num(err, "requested_loops", *loops);
        return TL_ERR_LOOP_DEPTH;
    }
    if (*loops < 1 || *loops > max)
        return fail_loops(err, TL_ERR_LOOPS_RANGE, "loops", *loops, 1, max);
    *decode_loops = r->decode_loops ? r->decode_loops : r->new_L && r->loops ? r->loops : *loops;
    if (*decode_loops < 1)
        return fail_loops(err, TL_ERR_LOOPS_RANGE, "loops", *decode_loops, 1, *loops);
    if (*decode_loops > *loops) {
        tl_fail(err, TL_ERR_DECODE_DEPTH, "decode depth is %d, the prefix is computed to %d", *decode_loops, *loops);
        tl_error_param(err, "loops");
        tl_error_num(err, "available", *loops);
        tl_error_num(err, "got", *decode_loops);
        return TL_ERR_DECODE_DEPTH;
    }
    return TL_OK;
}

static enum tl_status check_window(const struct tl_model *m, const struct tl_request *r, int *window, struct tl_error *err)
{
    *window = r->cache_window >= 0 ? r->cache_window : r->handle ? r->handle->window : 0;
    if (r->cache_window < -1 || *window > m->info.max_seq_len) {
        tl_fail(err, TL_ERR_WINDOW_RANGE, "cache_window is %d, it must be 0 to %d", r->cache_window, m->info.max_seq_len);
        tl_error_param(err, "cache_window");
        return TL_ERR_WINDOW_RANGE;
    }
    if (r->handle && *window != r->handle->window) {
        tl_fail(err, TL_ERR_WINDOW_MISMATCH, "cache_window is %d, this prefix was computed with %d", *window, r->handle->window);
        tl_error_param(err, "cache_window");
        tl_error_num(err, "entry_window", r->handle->window);
        tl_error_num(err, "requested_window", *window);
        return TL_ERR_WINDOW_MISMATCH;
    }
    return TL_OK;
}

static enum tl_status check_tokens(const struct tl_model *m, const struct tl_request *r, struct tl_error *err)
{
    int64_t prefix = r->handle ? r->handle->n_tokens : 0, total;

    if (r->n_tokens < 0 || r->max_tokens < 0)
        return tl_fail(err, TL_ERR_BAD_PARAM, "%s is %d, it must be 0 or more", r->n_tokens < 0 ? "n_tokens" : "max_tokens",
                       r->n_tokens < 0 ? r->n_tokens : r->max_tokens);
    if (prefix + r->n_tokens < 1) {
        tl_fail(err, TL_ERR_EMPTY_PROMPT, "the prompt has no tokens");
        tl_error_param(err, "prompt");
        return TL_ERR_EMPTY_PROMPT;
    }
    total = prefix + r->n_tokens + r->max_tokens;
    if (total > m->info.max_seq_len) {
        tl_fail(err, TL_ERR_CONTEXT_LENGTH, "%lld prompt tokens and max_tokens %d are %lld positions, the limit is %d",
                (long long)(prefix + r->n_tokens), r->max_tokens, (long long)total, m->info.max_seq_len);
        tl_error_param(err, prefix + r->n_tokens > m->info.max_seq_len ? "prompt" : "max_tokens");
        tl_error_num(err, "prompt_tokens", prefix + r->n_tokens);
        tl_error_num(err, "cached_tokens", prefix);
        tl_error_num(err, "max_tokens", r->max_tokens);
        tl_error_num(err, "max_seq_len", m->info.max_seq_len);
        return TL_ERR_CONTEXT_LENGTH;
    }
    for (int i = 0; i < r->n_tokens; i++)
        if (r->tokens[i] < 0 || r->tokens[i] >= m->info.vocab_size) {
            tl_fail(err, TL_ERR_TOKEN_OUT_OF_VOCAB, "token %d of the prompt is %d, the vocabulary has ids 0 to %d", i,
                    r->tokens[i], m->info.vocab_size - 1);
            tl_error_param(err, "prompt");
            tl_error_num(err, "index", i);
            tl_error_num(err, "value", r->tokens[i]);
            tl_error_num(err, "vocab_size", m->info.vocab_size);
            return TL_ERR_TOKEN_OUT_OF_VOCAB;
        }
    return TL_OK;
}

static enum tl_status check_keep(const struct tl_model *m, const struct tl_request *r, int loops, int decode_loops, int window,
                                 struct tl_error *err)
{
    if (r->keep == TL_KEEP_RESUME) {
        int max = r->keep_max_loops ? r->keep_max_loops : m->info.max_loops;
        if (max > TL_LOOPS_MAX || max > m->info.max_loops) {
            int limit = m->info.max_loops < TL_LOOPS_MAX ? m->info.max_loops : TL_LOOPS_MAX;
            tl_fail(err, TL_ERR_MAX_LOOPS, "max_loops is %d, the limit is %d", max, limit);
            tl_error_param(err, "max_loops");
            tl_error_num(err, "limit", limit);
            tl_error_num(err, "got", max);
            return TL_ERR_MAX_LOOPS;
        }
        if (loops > max)
            return fail_loops(err, TL_ERR_LOOPS_USED_RANGE, "loops_used", loops, 1, max);
        if (r->handle)
            return tl_fail(err, TL_ERR_BAD_PARAM, "a resume handle is built from a whole prompt, not from another handle");
    }
    if (r->keep_all && (window || decode_loops < loops || r->keep != TL_KEEP_NONE))
        return tl_fail(err, TL_ERR_BAD_PARAM, "keep_all needs cache_window 0 (is %d), decode depth %d (is %d) and no other keep",
                       window, loops, decode_loops);
    if (r->want_prompt_logprobs && (r->handle || r->pool))
        return tl_fail(err, TL_ERR_BAD_PARAM, "log-probabilities of a prompt need it computed: no handle and no pool");
    return TL_OK;
}

/* ---- life of a job ---- */

static void job_free(struct tl_job *j)
{
    if (!j)
        return;
    tl_seq_end(&j->seq);
    tl_handle_free(j->req.handle);
    tl_sampler_free(j->sampler);
    tl_free(j->last_row);
    tl_free(j->tokens);
    tl_free(j);
}

static enum tl_verdict emit(struct tl_job *j, struct tl_event *ev)
{
    return j->req.on_event ? j->req.on_event(j->req.arg, ev) : TL_GO_ON;
}

/* Freeze what the sequence has computed and hand it to whoever asked for it. */
static enum tl_status keep_handle(struct tl_job *j, const float *last_row, struct tl_error *err)
{
    struct tl_model *m = j->sched->m;
    bool resume = j->req.keep == TL_KEEP_RESUME;
    struct tl_handle_make mk = {.kind = resume ? TL_HANDLE_RESUME : TL_HANDLE_PREFIX,
                                .model = m,
                                .tokens = j->tokens,
                                .last_row = last_row,
                                .max_loops = j->req.keep_max_loops};
    struct tl_event ev = {.kind = TL_EVENT_KEPT};
    enum tl_status st;

    if (resume) { /* hand the promise made at admission to the handle */
        int64_t pages = tl_resume_pages(m->kv, j->n_prompt, j->loops, j->req.keep_max_loops, j->window);
        TL_ASSERT(pages <= j->seq.reserved);
        j->seq.reserved -= pages;
        tl_kv_unreserve(m->kv, pages);
    }
    st = tl_seq_to_handle(&j->seq, &mk, &ev.handle, err);
    if (st != TL_OK)
        return st;
    if (j->req.on_event)
        emit(j, &ev);
    else
        tl_handle_free(ev.handle);
    return TL_OK;
}

/* The last event. The job is swept from the running list, or freed by the caller, afterwards. Memory is released first, so that
 * whoever hears of the end can use it. */
static void job_done(struct tl_job *j, enum tl_finish finish, const struct tl_error *error)
{
    struct tl_event ev = {.kind = TL_EVENT_DONE, .finish = finish, .usage = &j->usage, .error = error};
    double t = now();

    if (j->phase == PHASE_DECODE)
        j->usage.decode_s = t - j->t_phase;
    if (j->phase == PHASE_WAITING)
        j->usage.queue_s = t - j->t_submit;
    j->usage.n_generated = j->n_tokens - j->n_prompt;
    if (j->req.keep_all && j->seq.len > 0 && (finish == TL_FINISH_STOP || finish == TL_FINISH_LENGTH))
        (void)keep_handle(j, j->last_row, NULL); /* an extra: the answer does not fail with it */
    tl_seq_end(&j->seq);
    tl_handle_free(j->req.handle);
    j->req.handle = NULL;
    j->done = true;
    emit(j, &ev);
}

static void job_fail(struct tl_job *j, struct tl_error *error)
{
    job_done(j, TL_FINISH_ERROR, error);
}

enum tl_status tl_sched_create(struct tl_sched **out, struct tl_model *m, const struct tl_sched_params *params,
                               struct tl_error *err)
{
    struct tl_sched *s = tl_calloc(1, sizeof(*s));

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
    s->tail = &s->head;
    s->running = tl_calloc((size_t)s->p.n_running_max, sizeof(struct tl_job *));
    s->rows = tl_calloc((size_t)tl_forward_rows_max(m->fwd), sizeof(*s->rows));
    if (!s->running || !s->rows) {
        tl_free(s->running);
        tl_free(s->rows);
        tl_free(s);
        return tl_fail_host_memory(err, (size_t)s->p.n_running_max * sizeof(void *));
    }
    *out = s;
    return TL_OK;
}

static struct tl_job *pop_waiting(struct tl_sched *s)
{
    struct tl_job *j = s->head;
    s->head = j->next;
    if (!s->head)
        s->tail = &s->head;
    s->n_waiting--;
    return j;
}

void tl_sched_free(struct tl_sched *s)
{
    if (!s)
        return;
    for (int i = 0; i < s->n_running; i++) {
        job_done(s->running[i], TL_FINISH_CANCELLED, NULL);
        job_free(s->running[i]);
    }
    s->n_running = 0;
    while (s->head) {
        struct tl_job *j = pop_waiting(s);
        job_done(j, TL_FINISH_CANCELLED, NULL);
        job_free(j);
    }
    tl_free(s->running);
    tl_free(s->rows);
    tl_free(s);
}

static void plan_of(const struct tl_job *j, struct tl_handle *base, int base_len, struct tl_seq_plan *p)
{
    memset(p, 0, sizeof(*p));
    p->base = base;
    p->base_len = base_len;
    p->n_loops = j->loops;
    p->window = j->window;
    p->prompt_len = j->n_prompt;
    p->len_max = j->n_prompt + j->req.max_tokens;
    p->keep_state = j->req.keep == TL_KEEP_RESUME;
    p->keep_then_grow = j->req.keep != TL_KEEP_NONE && j->req.max_tokens > 0;
}

/* Pages that the handle a job leaves behind goes on holding, beyond what its base holds already. */
static int64_t kept_pages(const struct tl_job *j, const struct tl_seq_plan *p)
{
    const struct tl_kv *kv = j->sched->m->kv;
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
    const struct tl_kv *kv = j->sched->m->kv;
    struct tl_seq_plan p;
    int64_t need, lent;

    plan_of(j, j->req.handle, j->base_len, &p);
    need = tl_seq_need(kv, &p, &lent);
    if (j->req.keep == TL_KEEP_RESUME)
        need += tl_resume_pages(kv, j->n_prompt, j->loops, j->req.keep_max_loops, j->window);
    if (need > kv->n_pages) {
        tl_fail(err, TL_ERR_EXCEEDS_MEMORY, "the request needs %lld bytes of KV memory, the whole budget is %lld",
                (long long)need * (long long)kv->view.page_bytes, (long long)kv->n_pages * (long long)kv->view.page_bytes);
        tl_error_num(err, "needed", need * (int64_t)kv->view.page_bytes);
        tl_error_num(err, "budget", (int64_t)kv->n_pages * (int64_t)kv->view.page_bytes);
        return TL_ERR_EXCEEDS_MEMORY;
    }
    return TL_OK;
}

enum tl_status tl_sched_submit(struct tl_sched *s, const struct tl_request *r, struct tl_job **out, struct tl_error *err)
{
    struct tl_model *m = s->m;
    struct tl_job *j = NULL;
    int loops, decode_loops, window, prefix = r->handle ? r->handle->n_tokens : 0;
    enum tl_status st;

    *out = NULL;
    if (r->handle && r->pool)
        return tl_fail(err, TL_ERR_BAD_PARAM, "a request starts from a handle or from the pool, not from both");
    if (r->handle && r->handle->model != m)
        return tl_fail(err, TL_ERR_MODEL_MISMATCH, "the handle was made by another model");
    if ((st = check_depth(m, r, &loops, &decode_loops, err)) != TL_OK ||
        (st = check_window(m, r, &window, err)) != TL_OK || (st = check_tokens(m, r, err)) != TL_OK ||
        (st = check_keep(m, r, loops, decode_loops, window, err)) != TL_OK ||
        (st = tl_sampling_check(&r->sampling, m->info.vocab_size, err)) != TL_OK)
        return st;
    if (s->n_waiting >= s->p.n_waiting_max) {
        st = tl_fail(err, TL_ERR_OVERLOADED, "%d requests are waiting, the limit is %d", s->n_waiting, s->p.n_waiting_max);
        tl_error_num(err, "position", s->n_waiting);
        return st;
    }

    j = tl_calloc(1, sizeof(*j));
    if (!j)
        return tl_fail_host_memory(err, sizeof(*j));
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
    if ((st = check_memory(j, err)) != TL_OK)
        goto out;
    st = tl_sampler_create(&j->sampler, &r->sampling, m->info.vocab_size, j->tokens, j->n_prompt, err);
    if (st != TL_OK)
        goto out;
    j->req.sampling.logit_bias = NULL;
    j->req.sampling.stop_ids = NULL;
    atomic_init(&j->cancelled, false);
    j->usage.n_prompt = j->n_prompt;
    j->usage.n_loops = loops;
    j->usage.exact = decode_loops == loops;
    j->t_submit = now();
    *s->tail = j;
    s->tail = &j->next;
    s->n_waiting++;
    *out = j;
    j = NULL;
out:
    job_free(j);
    return st;
}

/* ---- admission ---- */

static void begin(struct tl_job *j, int base_n_loops, int matched, double t_clone)
{
    struct tl_event ev = {.kind = TL_EVENT_STARTED};
    bool resumed = j->seq.base && j->loops > base_n_loops;

    j->t_start = now();
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
    j->phase = resumed ? PHASE_RESUME : matched < j->n_prompt ? PHASE_PREFILL : PHASE_READOUT;
    emit(j, &ev);
}

/* Try to start the first waiting job. TL_OK and *started false: it has to wait. An error is the job's, not the scheduler's. */
static enum tl_status admit(struct tl_sched *s, struct tl_job *j, bool *started, struct tl_error *err)
{
    struct tl_model *m = s->m;
    struct tl_handle *base = j->req.handle;
    int matched = base ? base->n_tokens : 0, base_loops;
    struct tl_seq_plan p;
    int64_t need, lent;
    bool use_lender = false;
    enum tl_status st;
    double t = now();

    *started = false;
    if (j->req.pool && j->req.keep != TL_KEEP_RESUME && !j->req.want_prompt_logprobs) {
        struct tl_pool_match match;
        tl_pool_find(j->req.pool, j->tokens, j->n_prompt, j->loops, j->window, j->req.pool_scope, &match);
        base = match.handle;
        matched = match.n_matched;
        if (!base && j->req.pool_require) {
            tl_fail(err, TL_ERR_NO_POOL_MATCH, "no registered prefix matches the prompt; the nearest one agrees in %d tokens",
                    match.n_common);
            tl_error_num(err, "nearest_common_tokens", match.n_common);
            return TL_ERR_NO_POOL_MATCH;
        }
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

static void admit_waiting(struct tl_sched *s)
{
    while (s->head && s->n_running < s->p.n_running_max) {
        struct tl_job *j = s->head;
        struct tl_error err;
        enum tl_status st = TL_OK;
        bool started = false;
        if (!atomic_load(&j->cancelled)) {
            st = admit(s, j, &started, &err);
            if (st == TL_OK && !started)
                return;
        }
        pop_waiting(s);
        if (started) {
            s->running[s->n_running++] = j;
            continue;
        }
        if (st != TL_OK)
            job_fail(j, &err);
        else
            job_done(j, TL_FINISH_CANCELLED, NULL);
        job_free(j);
    }
}

/* Cancelled jobs anywhere in the queue leave it at once: they must not wait for the ones before them. */
static void sweep_waiting(struct tl_sched *s)
{
    struct tl_job **at = &s->head;
    while (*at) {
        struct tl_job *j = *at;
        if (!atomic_load(&j->cancelled)) {
            at = &j->next;
            continue;
        }
        *at = j->next;
        s->n_waiting--;
        if (!j->next)
            s->tail = at;
        job_done(j, TL_FINISH_CANCELLED, NULL);
        job_free(j);
    }
}

static void sweep_running(struct tl_sched *s)
{
    int n = 0;
    for (int i = 0; i < s->n_running; i++) {
        struct tl_job *j = s->running[i];
        if (!j->done && atomic_load(&j->cancelled))
            job_done(j, TL_FINISH_CANCELLED, NULL);
        if (j->done)
            job_free(j);
        else
            s->running[n++] = j;
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
    case PHASE_RESUME: return j->base_len - j->resume_pos;
    case PHASE_PREFILL: return j->n_prompt - j->seq.len;
    case PHASE_READOUT: case PHASE_DECODE: return 1;
    case PHASE_WAITING: break;
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
    if (j->phase == PHASE_READOUT) {
        struct tl_forward_row *r = add_row(s, j, at, j->n_prompt - 1);
        r->last_row = j->seq.base->last_row;
        r->head = true;
        r->keep_hidden = keeps_row;
        return TL_OK;
    }
    if (j->phase == PHASE_RESUME) {
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
        if (j->phase == PHASE_DECODE)
            r->to_loop = j->decode_loops;
        r->head = last || (j->req.want_prompt_logprobs && j->phase == PHASE_PREFILL);
        r->keep_hidden = last && keeps_row;
        r->save_state = j->phase == PHASE_PREFILL && j->req.keep == TL_KEEP_RESUME;
    }
    return st;
}

/* Fill the step. Returns the number of rows; jobs that fail on the way get DONE. */
static int plan_step(struct tl_sched *s)
{
    int budget = tl_forward_rows_max(s->m->fwd), heads = tl_forward_heads_max(s->m->fwd), at = 0, n_prompts = 0;
    struct tl_error err;

    for (int i = 0; i < s->n_running; i++) {
        struct tl_job *j = s->running[i];
        j->n_rows = 0;
        if (j->done || j->paused)
            continue;
        if (j->phase != PHASE_DECODE && j->phase != PHASE_READOUT) {
            n_prompts++;
            continue;
        }
        if (plan_rows(s, j, at, 1, &err) == TL_OK)
            at++;
        else
            job_fail(j, &err);
    }
    heads -= at;
    if (!n_prompts || at >= budget)
        return at;
    if (at)
        budget = at + (budget - at) / PREFILL_SHARE_BESIDE_DECODE;
    s->turn = (s->turn + 1) % s->n_running;
    for (int k = 0; k < s->n_running && at < budget && heads > 0; k++) {
        struct tl_job *j = s->running[(s->turn + k) % s->n_running];
        int n = (budget - at + n_prompts - 1) / (n_prompts ? n_prompts : 1), left = rows_left(j);
        if (j->done || j->paused || j->phase == PHASE_DECODE || j->phase == PHASE_READOUT)
            continue;
        n_prompts--;
        n = n < left ? n : left;
        if (j->req.want_prompt_logprobs && n > heads)
            n = heads;
        if (plan_rows(s, j, at, n, &err) != TL_OK) {
            job_fail(j, &err);
            j->n_rows = 0;
            continue;
        }
        at += n;
        heads -= j->req.want_prompt_logprobs ? n : 1;
    }
    return at;
}

/* Sample the next token from a row of logits; end the job or let it go on. */
static void take_token(struct tl_job *j, float *logits)
{
    struct tl_sampled sampled;
    struct tl_event ev = {.kind = TL_EVENT_TOKEN, .sampled = &sampled, .pos = j->n_tokens};
    struct tl_error err;
    enum tl_status st;

    if (j->phase != PHASE_DECODE) {
        j->phase = PHASE_DECODE;
        j->t_phase = now();
        j->usage.ttft_s = j->t_phase - j->t_submit;
    }
    if (j->req.want_logits_hash)
        ev.logits_hash = XXH3_64bits(logits, (size_t)j->sched->m->info.vocab_size * sizeof(float));
    st = tl_sampler_sample(j->sampler, logits, j->n_tokens, NULL, &sampled, &err);
    if (st == TL_OK && !sampled.is_stop)
        st = tl_sampler_accept(j->sampler, sampled.token, &err);
    if (st != TL_OK) {
        job_fail(j, &err);
        return;
    }
    if (sampled.is_stop) {
        job_done(j, TL_FINISH_STOP, NULL);
        return;
    }
    j->tokens[j->n_tokens++] = sampled.token;
    switch (emit(j, &ev)) {
    case TL_STOP_HERE: job_done(j, TL_FINISH_STOP, NULL); return;
    case TL_PAUSE: j->paused = true; break;
    case TL_GO_ON: break;
    }
    if (j->n_tokens == j->cap)
        job_done(j, TL_FINISH_LENGTH, NULL);
}

static bool prompt_logprobs(struct tl_job *j, const struct tl_forward_row *rows)
{
    for (int i = 0; i < j->n_rows; i++) {
        int pos = rows[i].pos + 1;
        struct tl_sampled sampled;
        struct tl_event ev = {.kind = TL_EVENT_PROMPT_LOGPROB, .sampled = &sampled, .pos = pos};
        struct tl_error err;
        if (pos >= j->n_prompt)
            break;
        if (tl_logprob_of(rows[i].logits, j->sched->m->info.vocab_size, j->tokens[pos],
                          j->req.sampling.n_top_logprobs < 0 ? 0 : j->req.sampling.n_top_logprobs, &sampled, &err) != TL_OK) {
            job_fail(j, &err);
            return false;
        }
        emit(j, &ev);
    }
    return true;
}

/* What the step computed for one job. */
static void take_results(struct tl_sched *s, struct tl_job *j)
{
    struct tl_forward_row *rows = s->rows + j->row_at, *last = rows + j->n_rows - 1;
    enum phase phase = j->phase;
    struct tl_error err;
    struct tl_event progress = {.kind = TL_EVENT_PROGRESS};

    if (phase == PHASE_RESUME) {
        j->resume_pos += j->n_rows;
        tl_seq_commit(&j->seq, j->resume_pos);
        j->usage.row_loops_run += (int64_t)j->n_rows * (j->loops - j->seq.base->n_loops);
        if (j->resume_pos == j->base_len) {
            j->usage.resume_s = now() - j->t_phase;
            j->t_phase = now();
            j->phase = j->base_len < j->n_prompt ? PHASE_PREFILL : PHASE_READOUT;
        }
    } else if (phase != PHASE_READOUT) {
        tl_seq_commit(&j->seq, j->seq.len + j->n_rows);
        j->usage.row_loops_run += (int64_t)j->n_rows * (phase == PHASE_DECODE ? j->decode_loops : j->loops);
    }
    if (phase == PHASE_PREFILL && j->req.want_prompt_logprobs && !prompt_logprobs(j, rows))
        return;
    if (phase != PHASE_DECODE && phase != PHASE_READOUT) {
        progress.pos = (phase == PHASE_RESUME ? j->resume_pos : j->seq.len);
        progress.n_total = j->n_prompt;
        emit(j, &progress);
    }
    if (!last->head)
        return; /* more of the prompt is to come */
    if (phase == PHASE_PREFILL) {
        if (last->pos != j->n_prompt - 1)
            return;
        j->usage.prefill_s = now() - j->t_phase;
    }
    if (j->last_row && last->hidden)
        memcpy(j->last_row, last->hidden, (size_t)s->m->info.spec->d_model * sizeof(float));
    if (phase != PHASE_DECODE && j->req.keep != TL_KEEP_NONE && keep_handle(j, last->hidden, &err) != TL_OK) {
        job_fail(j, &err);
        return;
    }
    if (j->req.max_tokens == 0)
        job_done(j, TL_FINISH_LENGTH, NULL);
    else
        take_token(j, last->logits);
}

static void fail_all(struct tl_sched *s, struct tl_error *err)
{
    for (int i = 0; i < s->n_running; i++)
        if (!s->running[i]->done)
            job_fail(s->running[i], err);
    sweep_running(s);
    while (s->head) {
        struct tl_job *j = pop_waiting(s);
        job_fail(j, err);
        job_free(j);
    }
}

enum tl_status tl_sched_step(struct tl_sched *s, bool *busy, struct tl_error *err)
{
    struct tl_error local;
    int n_rows;
    enum tl_status st;

    if (!err)
        err = &local;
    sweep_waiting(s);
    sweep_running(s);
    admit_waiting(s);
    n_rows = plan_step(s);
    *busy = n_rows > 0;
    if (!n_rows) {
        sweep_running(s);
        return TL_OK;
    }
    st = tl_forward_run(s->m->fwd, s->rows, n_rows, err);
    if (st != TL_OK) {
        fail_all(s, err);
        return st;
    }
    s->stats.steps++;
    s->stats.rows += n_rows;
    for (int i = 0, n = s->n_running; i < n; i++) {
        struct tl_job *j = s->running[i];
        if (!j->done && j->n_rows > 0 && !atomic_load(&j->cancelled))
            take_results(s, j);
    }
    for (int i = 0; i < n_rows; i++)
        s->stats.row_loops += s->rows[i].last_row ? 0 : s->rows[i].to_loop - (s->rows[i].from_loop < 0 ? 0 : s->rows[i].from_loop);
    sweep_running(s);
    return TL_OK;
}

void tl_job_cancel(struct tl_job *j) { atomic_store(&j->cancelled, true); }
void tl_job_resume(struct tl_job *j) { j->paused = false; }

int tl_job_position(const struct tl_job *j)
{
    int n = 0;
    if (j->phase != PHASE_WAITING)
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
