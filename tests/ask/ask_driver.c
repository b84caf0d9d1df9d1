/* tests/ask/ask_driver.c - many short questions and texts through the engine's rows, at many depths, for ask.py:
 *
 *   ask_driver MODEL_DIR DEVICE THREADS LOOPS,LOOPS,... SECONDS <questions >answers
 *
 * A line is a number of the caller's and token ids: a text. The answer repeats the number and has, for every depth, the nats
 * that the tokens after the first cost. In "NUMBER ids | ids" the second ids are the answer expected of a prompt: of them
 * the reply has, for every depth, what the model chooses there after the expected ones before, "3,17 3,18". A reply without a
 * number comes first: the depths. Depths rise. Questions share calls, and a depth goes on from the stream of the one before,
 * as a resume does. After SECONDS (0 = never) no more questions are read. */
#include "mem.h"
#include "model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TOGETHER   64 /* questions of a batch */
#define DEPTHS_MAX 32

struct question {
    long number;
    int32_t *ids;  /* owned */
    int n;         /* of them; the last of an expected answer is not among them: nothing follows it */
    int n_asked;   /* answers are wanted from here on; 0 = a text */
    int32_t *said; /* [depths][n - n_asked + 1], owned; NULL for a text */
    double nats[DEPTHS_MAX];
    struct tl_seq seq;
};

struct asking {
    struct tl_model *m;
    int depths[DEPTHS_MAX], n_depths;
    struct question batch[TOGETHER];
    int n;       /* questions in the batch */
    size_t rows; /* of all of them */
    struct tl_forward_row *call;
    int *of; /* [rows of a call] its question */
};

static bool wants_head(const struct question *q, int pos)
{
    return q->n_asked ? pos >= q->n_asked - 1 : pos + 1 < q->n;
}

static int n_said(const struct question *q) { return q->n - q->n_asked + 1; }

/* ---- input and output ---- */

/* Reads a line into q; false: the input has ended, or st says what is wrong with it. */
static bool read_question(struct question *q, char **line, size_t *room, enum tl_status *st, struct tl_error *err)
{
    size_t n = 0, cap;
    char *at, *end;

    memset(q, 0, sizeof(*q));
    if (getline(line, room, stdin) < 0)
        return false;
    cap = strlen(*line) / 2 + 1;
    q->ids = tl_array(cap, sizeof(*q->ids));
    if (!q->ids) {
        *st = tl_fail_host_memory(err, cap * sizeof(*q->ids));
        return false;
    }
    q->number = strtol(*line, &at, 10);
    for (; *(at += strspn(at, " \n")); at = end) {
        if (*at == '|' && !q->n_asked) {
            q->n_asked = (int)n;
            end = at + 1;
            continue;
        }
        q->ids[n++] = (int32_t)strtol(at, &end, 10);
        if (end == at) {
            *st = tl_fail(err, TL_ERR_BAD_PARAM, "%.*s is not a token id", (int)strcspn(at, " |\n"), at);
            goto out;
        }
    }
    q->n = (int)n - (q->n_asked > 0);
    if (q->n < (q->n_asked ? q->n_asked : 2))
        *st =
            tl_fail(err, TL_ERR_BAD_PARAM, "line %ld has %zu tokens, of them %d of a prompt", q->number, n, q->n_asked);
out:
    if (*st != TL_OK)
        tl_free(q->ids);
    return *st == TL_OK;
}

static void print_answer(const struct asking *a, const struct question *q)
{
    printf("%ld", q->number);
    for (int d = 0; d < a->n_depths; d++) {
        if (!q->n_asked)
            printf(" %.6f", q->nats[d]);
        for (int i = 0; q->n_asked && i < n_said(q); i++)
            printf("%c%d", i ? ',' : ' ', q->said[d * n_said(q) + i]);
    }
    putchar('\n');
}

static void clear_batch(struct asking *a)
{
    for (int i = 0; i < a->n; i++) {
        tl_seq_end(&a->batch[i].seq);
        tl_free(a->batch[i].ids);
        tl_free(a->batch[i].said);
    }
    a->n = 0;
    a->rows = 0;
}

/* ---- one batch ---- */

static int best_of(const float *x, int n)
{
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    return best;
}

static double nats_of(const float *x, int n, int32_t next)
{
    double max = (double)x[best_of(x, n)], sum = 0;
    for (int i = 0; i < n; i++)
        sum += exp((double)x[i] - max);
    return log(sum) + max - (double)x[next];
}

static void take(struct question *q, const struct tl_forward_row *r, int depth, int vocab)
{
    if (!r->head)
        return;
    if (q->n_asked)
        q->said[depth * n_said(q) + r->pos - q->n_asked + 1] = r->logits ? best_of(r->logits, vocab) : r->best;
    else
        q->nats[depth] += nats_of(r->logits, vocab, q->ids[r->pos + 1]);
}

/* All rows of the batch from the depth before to this one, in as many calls as they need. */
static enum tl_status run_depth(struct asking *a, int depth, struct tl_error *err)
{
    const struct tl_model_info *info = tl_model_info(a->m);
    int heads_max = tl_forward_heads_max(a->m->fwd), at = 0, pos = 0;
    enum tl_status st = TL_OK;

    while (st == TL_OK && at < a->n) {
        int n = 0, heads = 0;
        while (at < a->n && n < info->step_rows_max) {
            struct question *q = &a->batch[at];
            bool head = wants_head(q, pos);
            if (head && heads == heads_max)
                break;
            heads += head;
            a->of[n] = at;
            a->call[n++] = (struct tl_forward_row){.seq = &q->seq,
                                                   .pos = pos,
                                                   .token = q->ids[pos],
                                                   .from_loop = depth ? a->depths[depth - 1] : -1,
                                                   .to_loop = a->depths[depth],
                                                   .head = head,
                                                   .chosen = q->n_asked > 0,
                                                   .save_state = depth + 1 < a->n_depths};
            if (++pos == q->n) {
                pos = 0;
                at++;
            }
        }
        st = tl_forward_run(a->m->fwd, a->call, n, err);
        for (int i = 0; st == TL_OK && i < n; i++)
            take(&a->batch[a->of[i]], &a->call[i], depth, info->vocab_size);
    }
    return st;
}

static enum tl_status start_question(struct asking *a, struct question *q, struct tl_error *err)
{
    const struct tl_model_info *info = tl_model_info(a->m);
    struct tl_seq_plan plan = {
        .n_loops = a->depths[a->n_depths - 1], .len_max = q->n, .keep_state = a->n_depths > 1, .n_state_rows = q->n};
    int64_t lent, need;
    enum tl_status st;

    if (q->n > info->max_seq_len)
        return tl_fail(err, TL_ERR_CONTEXT_LENGTH, "a question has %d tokens, the limit is %d", q->n,
                       info->max_seq_len);
    for (int i = 0; i < q->n; i++)
        if (q->ids[i] < 0 || q->ids[i] >= info->vocab_size)
            return tl_fail(err, TL_ERR_TOKEN_OUT_OF_VOCAB, "token %d is %d, the vocabulary has ids 0 to %d", i,
                           q->ids[i], info->vocab_size - 1);
    if (q->n_asked) {
        size_t n = (size_t)a->n_depths * (size_t)n_said(q);
        q->said = tl_array(n, sizeof(*q->said));
        if (!q->said)
            return tl_fail_host_memory(err, n * sizeof(*q->said));
    }
    need = tl_seq_need(a->m->kv, &plan, &lent);
    if (!tl_model_reserve(a->m, need))
        return tl_fail(err, TL_ERR_NO_DEVICE_MEMORY, "a batch of %d questions and %zu tokens does not fit", a->n,
                       a->rows);
    st = tl_seq_start(&q->seq, a->m->kv, &plan, need, false, err);
    if (st != TL_OK)
        tl_kv_unreserve(a->m->kv, need);
    return st == TL_OK ? tl_seq_extend(&q->seq, q->n, err) : st;
}

static enum tl_status run_batch(struct asking *a, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    for (int i = 0; st == TL_OK && i < a->n; i++)
        st = start_question(a, &a->batch[i], err);
    for (int d = 0; st == TL_OK && d < a->n_depths; d++)
        st = run_depth(a, d, err);
    for (int i = 0; st == TL_OK && i < a->n; i++)
        print_answer(a, &a->batch[i]);
    fflush(stdout);
    clear_batch(a);
    return st;
}

/* Questions in the order of the input, as many together as a call holds. */
static enum tl_status run_all(struct asking *a, double seconds, struct tl_error *err)
{
    char *line = NULL;
    size_t room = 0;
    struct question q;
    time_t start = time(NULL);
    enum tl_status st = TL_OK;

    for (int d = 0; d < a->n_depths; d++)
        printf("%s%d", d ? " " : "", a->depths[d]);
    putchar('\n');
    while (st == TL_OK && (seconds <= 0 || difftime(time(NULL), start) < seconds) &&
           read_question(&q, &line, &room, &st, err)) {
        if (a->n == TOGETHER || (a->n && a->rows + (size_t)q.n > (size_t)tl_model_info(a->m)->step_rows_max))
            st = run_batch(a, err);
        a->batch[a->n++] = q;
        a->rows += (size_t)q.n;
    }
    if (st == TL_OK)
        st = run_batch(a, err);
    else
        clear_batch(a);
    free(line);
    return st;
}

static bool read_depths(struct asking *a, const char *text, int max)
{
    char *at = (char *)text;
    do {
        int least = a->n_depths ? a->depths[a->n_depths - 1] + 1 : 1;
        long loops = strtol(at, &at, 10);
        if (a->n_depths == DEPTHS_MAX || loops < least || loops > max)
            return false;
        a->depths[a->n_depths++] = (int)loops;
    } while (*at++ == ',');
    return !at[-1];
}

int main(int argc, char **argv)
{
    struct tl_model_params params = {.memory_bytes = (uint64_t)6 << 30};
    static struct asking a;
    struct tl_error err = {0};
    enum tl_status st;

    if (argc != 6) {
        fprintf(stderr, "usage: ask_driver MODEL_DIR DEVICE THREADS LOOPS,LOOPS,... SECONDS <questions >answers\n");
        return 2;
    }
    params.dir = argv[1];
    params.device = argv[2];
    params.n_threads = atoi(argv[3]);
    st = tl_model_open(&a.m, &params, &err);
    if (st == TL_OK && !read_depths(&a, argv[4], tl_model_info(a.m)->max_loops))
        st = tl_fail(&err, TL_ERR_LOOPS_RANGE, "depths are %s, they must rise and be 1 to %d", argv[4],
                     tl_model_info(a.m)->max_loops);
    if (st == TL_OK) {
        size_t rows = (size_t)tl_model_info(a.m)->step_rows_max;
        a.call = tl_array(rows, sizeof(*a.call));
        a.of = tl_array(rows, sizeof(*a.of));
        st = a.call && a.of ? run_all(&a, atof(argv[5]), &err) : tl_fail_host_memory(&err, rows * sizeof(*a.call));
    }
    if (st != TL_OK)
        fprintf(stderr, "%s\n", err.msg);
    tl_free(a.call);
    tl_free(a.of);
    tl_model_free(a.m);
    return st == TL_OK ? 0 : 1;
}
