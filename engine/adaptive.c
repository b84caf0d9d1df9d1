#include "adaptive.h"

#include <string.h>

#include "job.h"
#include "mem.h"
#include "sampler_math.h"

static int frontier(const struct tl_job *j) { return j->n_tokens - 1; }

enum tl_status tl_adaptive_create(struct tl_adaptive **out, const struct tl_job *j, float threshold,
                                  struct tl_error *err)
{
    struct tl_adaptive *a = tl_calloc(1, sizeof(*a));

    *out = NULL;
    if (!a)
        return tl_fail_host_memory(err, sizeof(*a));
    a->threshold = threshold;
    a->filled = tl_calloc((size_t)j->cap, sizeof(*a->filled));
    a->prev = tl_array((size_t)j->m->info.spec->d_model, sizeof(float));
    if (!a->filled || !a->prev) {
        tl_adaptive_free(a);
        return tl_fail_host_memory(err, (size_t)j->cap);
    }
    *out = a;
    return TL_OK;
}

void tl_adaptive_free(struct tl_adaptive *a)
{
    if (!a)
        return;
    tl_free(a->filled);
    tl_free(a->prev);
    tl_free(a);
}

/* The next token starts: it and whatever comes with it, from loop 0. */
static void restart(struct tl_adaptive *a, int first)
{
    a->loop = 0;
    a->next = first;
    a->readout = false;
    a->sum = 0;
    a->alive = 1;
}

void tl_adaptive_begin(struct tl_job *j)
{
    struct tl_adaptive *a = j->adaptive;
    memset(a->filled, j->loops, (size_t)j->base_len);
    a->coda_next = j->base_len;
    restart(a, j->base_len);
}

/* First position from `pos` on that runs in the pass at hand; frontier + 1 = none. */
static int next_row(const struct tl_job *j, int pos)
{
    const struct tl_adaptive *a = j->adaptive;
    while (pos <= frontier(j) && a->filled[pos] != a->loop)
        pos++;
    return pos;
}

int tl_adaptive_rows_left(const struct tl_job *j)
{
    const struct tl_adaptive *a = j->adaptive;
    int n = 0;
    if (a->readout)
        return j->m->info.spec->n_coda ? j->n_tokens - a->coda_next : 1;
    for (int pos = next_row(j, a->next); pos <= frontier(j); pos = next_row(j, pos + 1))
        n++;
    return n;
}

static struct tl_forward_row *put(struct tl_job *j, struct tl_forward_row *r, int pos)
{
    memset(r, 0, sizeof(*r));
    r->seq = &j->seq;
    r->pos = pos;
    r->token = j->tokens[pos];
    r->cancelled = &j->cancelled;
    return r;
}

static void plan_readout(struct tl_job *j, struct tl_forward_row *rows, int n)
{
    const struct tl_adaptive *a = j->adaptive;
    int pos = j->m->info.spec->n_coda ? a->coda_next : frontier(j);
    for (int i = 0; i < n; i++, pos++) {
        struct tl_forward_row *r = put(j, &rows[i], pos);
        r->from_loop = r->to_loop = a->filled[pos];
        r->head = pos == frontier(j);
    }
}

enum tl_status tl_adaptive_plan(struct tl_job *j, struct tl_forward_row *rows, int n, struct tl_error *err)
{
    struct tl_adaptive *a = j->adaptive;
    enum tl_status st = TL_OK;
    int pos = a->next;

    if (a->readout) {
        plan_readout(j, rows, n);
        return TL_OK;
    }
    for (int i = 0; i < n; i++) {
        struct tl_forward_row *r = put(j, &rows[i], pos = next_row(j, pos));
        r->from_loop = a->loop > 0 ? a->loop : -1;
        r->to_loop = a->loop + 1;
        r->no_coda = r->save_state = true;
        if (pos == frontier(j)) {
            r->keep_hidden = j->m->info.spec->exit == TL_EXIT_LATENT_DIFF;
            r->gates = j->m->info.spec->exit == TL_EXIT_GATE_CDF ? &a->gate : NULL;
            r->gate_stride = 0; /* one loop is run: one place */
        }
        pos++;
    }
    if (a->loop == 0)
        st = tl_seq_extend(&j->seq, pos, err);
    return st;
}

/* Whether the last token is done after the loop it has just run. state: its stream, for LATENT_DIFF. */
static bool wants_exit(struct tl_job *j, const float *state)
{
    struct tl_adaptive *a = j->adaptive;
    int d = j->m->info.spec->d_model;

    if (j->m->info.spec->exit == TL_EXIT_GATE_CDF) {
        double lambda = tl_sigmoid((double)a->gate);
        a->sum += lambda * a->alive;
        a->alive *= 1 - lambda;
        return a->sum >= (double)a->threshold;
    }
    {
        double step = 0, size = 0;
        for (int i = 0; i < d; i++) {
            double moved = (double)state[i] - (a->loop ? (double)a->prev[i] : 0);
            step += moved * moved;
            size += (double)state[i] * (double)state[i];
        }
        memcpy(a->prev, state, (size_t)d * sizeof(*state));
        return a->loop > 0 &&
               step < (double)a->threshold * (double)a->threshold * size; /* one loop has nothing to compare with */
    }
}

float *tl_adaptive_take(struct tl_job *j, struct tl_forward_row *rows)
{
    struct tl_adaptive *a = j->adaptive;
    struct tl_forward_row *last = rows + j->n_rows - 1;

    if (a->readout) {
        a->coda_next = last->pos + 1;
        if (last->pos < frontier(j))
            return NULL;
        a->exit_loops = a->filled[frontier(j)];
        a->exit_sum += a->exit_loops;
        restart(a, frontier(j) + 1);
        return last->logits;
    }
    for (int i = 0; i < j->n_rows; i++)
        a->filled[rows[i].pos] = (uint8_t)(a->loop + 1);
    j->usage.row_loops_run += j->n_rows;
    if (a->loop == 0)
        tl_seq_commit(&j->seq, last->pos + 1);
    a->next = last->pos + 1;
    if (last->pos < frontier(j))
        return NULL;
    if (wants_exit(j, last->hidden) || a->loop + 1 == j->loops) {
        a->readout = true;
    } else {
        a->loop++;
        a->next = 0;
    }
    return NULL;
}
