/* engine/adaptive.h - tokens that choose their own depth, with the answer of having computed everything.
 *
 * A token runs loop after loop until the model's exit criterion says that it is done, and is read out there. At loop r it attends
 * to the keys and values that every earlier token wrote at loop r. An earlier token that stopped before r is taken along: its
 * stream was kept, so it runs loop r now, as one more row of the same pass over the weights. What is never needed is never
 * computed; what is computed is what a run at full depth computes, bit for bit.
 *
 * Criteria: GATE_CDF  the running sum of exit probabilities from the gate reaches the threshold
 *           LATENT_DIFF  |s(r+1) - s(r)| / |s(r+1)| falls below the threshold
 * The tokens of a prompt are taken along with its last one. A coda is run for a token at the depth at which it stopped (prompt
 * tokens: at that of the last); a model with a coda therefore starts from nothing, since a prefix was computed at another depth.
 *
 * Source of the method: per-token early exit with deferred computation of skipped layers' keys and values.
 * Thread: worker. */
#ifndef TL_ADAPTIVE_H
#define TL_ADAPTIVE_H

#include "forward.h"

struct tl_job;

struct tl_adaptive {
    uint8_t *filled;   /* [cap] loops that each position has run */
    int loop;          /* being run */
    int next;          /* first position not yet looked at in this loop */
    bool readout;      /* the loops are done: coda and head come next */
    int coda_next;     /* first position whose coda is missing */
    double sum, alive; /* GATE_CDF: probability of having stopped, of going on */
    float *prev;       /* [d_model] LATENT_DIFF: state of the last token after the loop before */
    float gate, threshold;
    int exit_loops;   /* depth at which the token before the next one stopped */
    int64_t exit_sum; /* exit depths of the tokens generated */
};

enum tl_status tl_adaptive_create(struct tl_adaptive **out, const struct tl_job *j, float threshold,
                                  struct tl_error *err);
void tl_adaptive_free(struct tl_adaptive *a); /* NULL is fine */
/* The job was admitted: base_len positions come from a handle at full depth. */
void tl_adaptive_begin(struct tl_job *j);
int tl_adaptive_rows_left(const struct tl_job *j); /* of the pass at hand */
enum tl_status tl_adaptive_plan(struct tl_job *j, struct tl_forward_row *rows, int n, struct tl_error *err);
/* Take what a step computed. Logits of the last token once it has been read out, else NULL. */
float *tl_adaptive_take(struct tl_job *j, struct tl_forward_row *rows);

#endif
