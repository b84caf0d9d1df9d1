#include "ahead_backend.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend.h"
#include "mem.h"

static struct tl_backend_ops ops;
static int32_t best[256];
static int64_t n_chained, n_drawn;

static enum tl_status a_open(struct tl_backend **out, int n_threads, struct tl_error *err)
{
    enum tl_status st = tl_backend_cpu.open(out, n_threads, err);
    if (st == TL_OK)
        (*out)->ops = &ops;
    return st;
}

static int32_t best_of(const float *logits, int n)
{
    int32_t top = 0;
    for (int i = 0; i < n; i++) {
        if (!isfinite(logits[i]))
            return -1;
        if (logits[i] > logits[top])
            top = i;
    }
    return top;
}

/* The step in the words of a device that does not run ahead: tokens instead of references, logits instead of best tokens. */
static enum tl_status a_run(struct tl_backend *be, const struct tl_step *step, struct tl_error *err)
{
    struct tl_step s = *step;
    size_t vocab = (size_t)step->net->spec.vocab_size;
    struct tl_row *rows = tl_array((size_t)step->n_rows, sizeof(*rows));
    struct tl_op *op = tl_array((size_t)step->n_ops, sizeof(*op));
    float *logits = tl_array((size_t)step->n_rows * vocab, sizeof(float));
    const struct tl_op *choice = NULL;
    int n = 0;
    enum tl_status st = TL_OK;

    if (!rows || !op || !logits) {
        st = tl_fail_host_memory(err, vocab);
        goto out;
    }
    memcpy(rows, step->rows, (size_t)step->n_rows * sizeof(*rows));
    for (int i = 0; i < step->n_rows; i++)
        if (rows[i].token < 0) {
            rows[i].token = best[-1 - rows[i].token] < 0 ? 0 : best[-1 - rows[i].token];
            n_chained++;
        }
    s.rows = rows;
    s.ops = op;
    s.n_ops = 0;
    for (int i = 0; i < step->n_ops; i++) {
        op[s.n_ops] = step->ops[i];
        if (step->ops[i].kind == TL_OP_BEST || step->ops[i].kind == TL_OP_DRAW) {
            choice = &step->ops[i];
            n = step->sets[step->ops[i].set].n;
            continue;
        }
        if (step->ops[i].kind == TL_OP_HEAD && !step->ops[i].host_out)
            op[s.n_ops].host_out = logits;
        s.n_ops++;
    }
    st = tl_backend_cpu.run(be, &s, err);
    for (int i = 0; st == TL_OK && i < n; i++) {
        const float *row = logits + (size_t)i * vocab;
        int32_t token = best_of(row, (int)vocab);
        if (token >= 0 && choice->draws && choice->draws[i].temperature > 0) {
            token = tl_draw(row, (int)vocab, token, &choice->draws[i]);
            n_drawn++;
        }
        choice->host_tokens[i] = best[i] = token;
    }
out:
    tl_free(rows);
    tl_free(op);
    tl_free(logits);
    return st;
}

static enum tl_status a_wait(struct tl_backend *be, int runs_left, struct tl_error *err)
{
    (void)runs_left;
    return tl_backend_cpu.sync(be, err);
}

void ahead_install(void)
{
    ops = tl_backend_cpu;
    ops.name = "test";
    ops.runs_ahead = true;
    ops.open = a_open;
    ops.run = a_run;
    ops.wait = a_wait;
    tl_backend_test = &ops;
    n_chained = n_drawn = 0;
}

int64_t ahead_chained_rows(void) { return n_chained; }
int64_t ahead_drawn_tokens(void) { return n_drawn; }
