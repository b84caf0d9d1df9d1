/* engine/job.h - one submitted request on its way through the scheduler. Internal to scheduler.c, job.c and request.c.
 * Owner: the scheduler. Thread: worker, but for the two flags. */
#ifndef TL_JOB_H
#define TL_JOB_H

#include <stdatomic.h>

#include "adaptive.h"
#include "grammar_constraint.h"
#include "model.h"

enum tl_phase {
    TL_PHASE_WAITING,
    TL_PHASE_RESUME,
    TL_PHASE_PREFILL,
    TL_PHASE_READOUT,
    TL_PHASE_DECODE,
    TL_PHASE_ADAPTIVE
};

struct tl_job {
    struct tl_model *m;
    struct tl_sched *sched;
    struct tl_job *next;   /* in the waiting list */
    struct tl_request req; /* tokens, bias and stop ids are copies inside the job or the sampler */
    int32_t *tokens;       /* whole prompt, then output; [cap] */
    int n_prompt, n_tokens, cap;
    enum tl_phase phase;
    atomic_bool cancelled;
    atomic_bool paused;
    int loops, decode_loops, window;
    int resume_pos; /* RESUME: rows of the prefix done */
    int base_len;
    struct tl_seq seq;
    struct tl_sampler *sampler;
    struct tl_constraint *constraint; /* NULL = any text */
    struct tl_adaptive *adaptive;     /* NULL = every token at full depth */
    float *last_row;                  /* [d_model] copy for keep_all; NULL otherwise */
    struct tl_usage usage;
    double t_submit, t_start, t_phase;
    int row_at, n_rows; /* its rows in the step being run */
    bool done;          /* DONE was sent: to be removed */
};

/* Everything about a request that needs no queue and no memory: depths, window, tokens, what it may keep. Fills the three
 * numbers that follow from it. */
enum tl_status tl_request_check(const struct tl_model *m, const struct tl_request *r, int *loops, int *decode_loops,
                                int *window, struct tl_error *err);

double tl_now(void); /* seconds, monotonic */

enum tl_verdict tl_job_emit(struct tl_job *j, struct tl_event *ev);
/* The last event. The job leaves its list afterwards. Memory is released first, so that whoever hears of the end can use it. */
void tl_job_done(struct tl_job *j, enum tl_finish finish, const struct tl_error *error);
void tl_job_fail(struct tl_job *j, const struct tl_error *error);
void tl_job_free(struct tl_job *j); /* NULL is fine */
/* Does its token for position pos follow from the raw logits and pos alone? how: as of tl_sampler_is_plain(). */
bool tl_job_is_plain(const struct tl_job *j, int pos, struct tl_draw_params *how);
/* Take what a step computed: rows[0 .. j->n_rows) are the job's. Moves it to its next phase, samples, emits. */
void tl_job_take_results(struct tl_job *j, struct tl_forward_row *rows);

#endif
