/* engine/forward.h - rows through stages: the only place that knows what a loop is.
 *
 * A row is one token of one sequence. Its way through the model is prelude, loops [0, to_loop), coda, head; a resumed row
 * enters at loop from_loop with the state that its handle kept. Rows of different sequences, positions and depths share one
 * call: all prelude rows first, then for iteration i every row whose range holds i, then the coda.
 * Thread: worker. */
#ifndef TL_FORWARD_H
#define TL_FORWARD_H

#include <stdatomic.h>

#include "seq.h"

struct tl_forward_row {
    struct tl_seq *seq; /* tables cover pos at every slot this row writes; NULL only with last_row */
    int pos;
    int32_t token;
    bool chained;  /* token is the number of a head row of the call in front, whose chosen token this is */
    int from_loop; /* -1 = from the prelude on; else stream (and injected input) come from the sequence's state
                                     pages, its own or those of its base */
    int to_loop;   /* depth */
    bool head;     /* logits wanted */
    bool chosen;   /* of them only a token; if all heads of a call say so, a device that runs ahead chooses it */
    struct tl_draw_params draw; /* how it is chosen; temperature 0 = the best */
    bool keep_hidden;           /* the row before the head is wanted */
    bool save_state;            /* store the stream after to_loop in seq->state_pages */
    bool no_coda;               /* stop after to_loop: no coda; the kept row is the stream */
    const float *start_state;   /* [d_model]; NULL = the model's own */
    const float *last_row;      /* not NULL: no stage is run, only the head on this row */
    float *gates;               /* exit gate logit after loop t at gates[t * gate_stride]; NULL = not wanted */
    int gate_stride;
    const atomic_bool *cancelled; /* NULL or looked at between loop iterations: the row is dropped */
    /* out, valid until the next call; NULL if not wanted or dropped */
    float *logits;
    int32_t best; /* where a chosen row has no logits: its token, -1 if a logit is not finite */
    const float *hidden;
};

struct tl_forward;
struct tl_forward_params {
    int rows_max, heads_max; /* of one call */
    int loops_max;
    uint64_t start_seed;
};
enum tl_status tl_forward_create(struct tl_forward **out, struct tl_backend *be, const struct tl_net *net,
                                 const struct tl_kv *kv, const struct tl_forward_params *p, struct tl_error *err);
void tl_forward_free(struct tl_forward *f);
int tl_forward_rows_max(const struct tl_forward *f);
int tl_forward_heads_max(const struct tl_forward *f);
/* Calls that may be under way at once: 1, or more where the device runs ahead. */
#define TL_FLIGHTS_MAX 2
int tl_forward_flights_max(const struct tl_forward *f);

/* Rows of one sequence must stand together, in ascending position, with nothing missing before them in their sequence. */
enum tl_status tl_forward_run(struct tl_forward *f, struct tl_forward_row *rows, int n_rows, struct tl_error *err);

/* The same in two halves. Between them `rows` stays with the call; the sequences may change, since the device works in the order
 * of the calls. A call may start before the one in front is finished if its rows need nothing of it but KV and chosen tokens
 * (`chained`). */
enum tl_status tl_forward_start(struct tl_forward *f, struct tl_forward_row *rows, int n_rows, int *flight,
                                struct tl_error *err);
enum tl_status tl_forward_finish(struct tl_forward *f, int flight, struct tl_error *err);

#endif
