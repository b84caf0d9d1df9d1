/* The life of a job: what its steps computed, what it leaves behind, how it ends. */
#include "job.h"

#include <string.h>
#include <time.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "mem.h"

double tl_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void tl_job_free(struct tl_job *j)
{
    if (!j)
        return;
    tl_seq_end(&j->seq);
    tl_handle_free(j->req.handle);
    tl_sampler_free(j->sampler);
    tl_constraint_free(j->constraint);
    tl_adaptive_free(j->adaptive);
    tl_free(j->last_row);
    tl_free(j->tokens);
    tl_free(j);
}

enum tl_verdict tl_job_emit(struct tl_job *j, struct tl_event *ev)
{
    return j->req.on_event ? j->req.on_event(j->req.arg, ev) : TL_GO_ON;
}

/* Freeze what the sequence has computed and hand it to whoever asked for it. */
static enum tl_status keep_handle(struct tl_job *j, const float *last_row, struct tl_error *err)
{
    struct tl_model *m = j->m;
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
        tl_job_emit(j, &ev);
    else
        tl_handle_free(ev.handle);
    return TL_OK;
}

static void end(struct tl_job *j, enum tl_finish finish, const struct tl_error *error, const struct tl_sampled *stop_id)
{
    struct tl_event ev = {
        .kind = TL_EVENT_DONE, .finish = finish, .usage = &j->usage, .error = error, .sampled = stop_id};
    double t = tl_now();

    if (j->n_tokens > j->n_prompt)
        j->usage.decode_s = t - j->t_phase;
    if (j->phase == TL_PHASE_WAITING)
        j->usage.queue_s = t - j->t_submit;
    j->usage.n_generated = j->n_tokens - j->n_prompt;
    j->usage.mean_loops = !j->adaptive                ? j->decode_loops
                          : j->n_tokens > j->n_prompt ? (double)j->adaptive->exit_sum / (j->n_tokens - j->n_prompt)
                                                      : 0;
    if (j->req.keep_all && j->seq.len > 0 && (finish == TL_FINISH_STOP || finish == TL_FINISH_LENGTH))
        (void)keep_handle(j, j->last_row, NULL); /* an extra: the answer does not fail with it */
    tl_seq_end(&j->seq);
    tl_handle_free(j->req.handle);
    j->req.handle = NULL;
    j->done = true;
    tl_job_emit(j, &ev);
}

void tl_job_done(struct tl_job *j, enum tl_finish finish, const struct tl_error *error) { end(j, finish, error, NULL); }

void tl_job_fail(struct tl_job *j, const struct tl_error *error) { tl_job_done(j, TL_FINISH_ERROR, error); }

/* A token joins the output. false: the job has ended with it. */
static bool take(struct tl_job *j, const struct tl_sampled *sampled, struct tl_event *ev)
{
    struct tl_error err;
    bool complete = false;
    enum tl_status st = tl_sampler_accept(j->sampler, sampled->token, &err);

    if (st == TL_OK && j->constraint)
        st = tl_constraint_accept(j->constraint, sampled->token, &complete, &err);
    if (st != TL_OK) {
        tl_job_fail(j, &err);
        return false;
    }
    ev->kind = TL_EVENT_TOKEN;
    ev->sampled = sampled;
    ev->pos = j->n_tokens;
    ev->n_loops = j->adaptive ? j->adaptive->exit_loops : j->n_tokens == j->n_prompt ? j->loops : j->decode_loops;
    j->tokens[j->n_tokens++] = sampled->token;
    switch (tl_job_emit(j, ev)) {
    case TL_STOP_HERE: tl_job_done(j, TL_FINISH_STOP, NULL); return false;
    case TL_PAUSE: atomic_store(&j->paused, true); break;
    case TL_GO_ON: break;
    }
    if (complete)
        tl_job_done(j, TL_FINISH_STOP, NULL);
    else if (j->n_tokens == j->cap)
        tl_job_done(j, TL_FINISH_LENGTH, NULL);
    return !j->done;
}

/* Tokens that the grammar leaves no choice of join at once, and the next step runs all of them. They would be the same one by
 * one, at probability 1. Not where each token's own logits or depth are wanted. */
static void take_forced(struct tl_job *j)
{
    while (!j->done && !atomic_load(&j->paused)) {
        struct tl_sampled sampled = {.n_top = j->req.sampling.n_top_logprobs > 0};
        struct tl_event ev = {0};
        struct tl_error err;
        if (tl_constraint_forced(j->constraint, &sampled.token, &err) != TL_OK) {
            tl_job_fail(j, &err);
            return;
        }
        if (sampled.token < 0)
            return;
        sampled.top[0].token = sampled.token;
        take(j, &sampled, &ev);
    }
}

bool tl_job_is_plain(const struct tl_job *j, int pos, struct tl_draw_params *how)
{
    return !j->constraint && !j->adaptive && !j->req.want_logits_hash && tl_sampler_is_plain(j->sampler, pos, how);
}

/* Choose the next token by a row of logits, or take the `chosen` one where logits is NULL; end the job or let it go on. */
static void take_token(struct tl_job *j, float *logits, int32_t chosen)
{
    struct tl_sampled sampled;
    struct tl_event ev = {0};
    struct tl_error err;
    const uint32_t *mask = NULL;
    bool complete = false;
    enum tl_status st = TL_OK;

    if (j->n_tokens == j->n_prompt) {
        j->phase = j->adaptive ? TL_PHASE_ADAPTIVE : TL_PHASE_DECODE;
        j->t_phase = tl_now();
        j->usage.ttft_s = j->t_phase - j->t_submit;
    }
    if (j->req.want_logits_hash)
        ev.logits_hash = XXH3_64bits(logits, (size_t)j->m->info.vocab_size * sizeof(float));
    if (j->constraint)
        st = tl_constraint_mask(j->constraint, &mask, &complete, &err);
    if (complete) {
        tl_job_done(j, TL_FINISH_STOP, NULL);
        return;
    }
    if (st == TL_OK)
        st = logits ? tl_sampler_sample(j->sampler, logits, j->n_tokens, mask, &sampled, &err)
                    : tl_sampler_take(j->sampler, chosen, j->n_tokens, &sampled, &err);
    if (st == TL_ERR_BAD_PARAM && mask) /* what the grammar allows, logit_bias or min_tokens forbid */
        st = err.status = TL_ERR_GRAMMAR_NO_CONTINUATION;
    if (st != TL_OK)
        tl_job_fail(j, &err);
    else if (sampled.is_stop)
        end(j, TL_FINISH_STOP, NULL, &sampled);
    else if (take(j, &sampled, &ev) && j->constraint && !j->adaptive && !j->req.want_logits_hash)
        take_forced(j);
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
        if (tl_logprob_of(rows[i].logits, j->m->info.vocab_size, j->tokens[pos],
                          j->req.sampling.n_top_logprobs < 0 ? 0 : j->req.sampling.n_top_logprobs, &sampled,
                          &err) != TL_OK) {
            tl_job_fail(j, &err);
            return false;
        }
        tl_job_emit(j, &ev);
    }
    return true;
}

/* What the step computed for one job. */
void tl_job_take_results(struct tl_job *j, struct tl_forward_row *rows)
{
    struct tl_forward_row *last = rows + j->n_rows - 1;
    enum tl_phase phase = j->phase;
    struct tl_error err;
    struct tl_event progress = {.kind = TL_EVENT_PROGRESS};

    if (phase == TL_PHASE_ADAPTIVE) {
        float *logits = tl_adaptive_take(j, rows);
        if (logits && j->n_tokens == j->n_prompt)
            j->usage.prefill_s = tl_now() - j->t_phase;
        if (logits && j->req.max_tokens > 0)
            take_token(j, logits, -1);
        else if (logits)
            tl_job_done(j, TL_FINISH_LENGTH, NULL);
        return;
    }
    if (phase == TL_PHASE_RESUME) {
        j->resume_pos += j->n_rows;
        tl_seq_commit(&j->seq, j->resume_pos);
        j->usage.row_loops_run += (int64_t)j->n_rows * (j->loops - j->seq.base->n_loops);
        if (j->resume_pos == j->base_len) {
            j->usage.resume_s = tl_now() - j->t_phase;
            j->t_phase = tl_now();
            j->phase = j->base_len < j->n_prompt ? TL_PHASE_PREFILL : TL_PHASE_READOUT;
        }
    } else if (phase != TL_PHASE_READOUT) {
        tl_seq_commit(&j->seq, j->seq.len + j->n_rows);
        j->usage.row_loops_run += (int64_t)j->n_rows * (phase == TL_PHASE_DECODE ? j->decode_loops : j->loops);
    }
    if (phase == TL_PHASE_PREFILL && j->req.want_prompt_logprobs && !prompt_logprobs(j, rows))
        return;
    if (phase != TL_PHASE_DECODE && phase != TL_PHASE_READOUT) {
        progress.pos = (phase == TL_PHASE_RESUME ? j->resume_pos : j->seq.len);
        progress.n_total = j->n_prompt;
        tl_job_emit(j, &progress);
    }
    if (!last->head)
        return; /* more of the prompt is to come */
    if (phase == TL_PHASE_PREFILL) {
        if (last->pos != j->n_prompt - 1)
            return;
        j->usage.prefill_s = tl_now() - j->t_phase;
    }
    if (j->last_row && last->hidden)
        memcpy(j->last_row, last->hidden, (size_t)j->m->info.spec->d_model * sizeof(float));
    if (phase != TL_PHASE_DECODE && j->req.keep != TL_KEEP_NONE && keep_handle(j, last->hidden, &err) != TL_OK) {
        tl_job_fail(j, &err);
        return;
    }
    if (j->req.max_tokens == 0)
        tl_job_done(j, TL_FINISH_LENGTH, NULL);
    else
        take_token(j, last->logits, last->best);
}
