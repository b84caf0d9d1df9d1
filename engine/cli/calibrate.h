/* engine/cli/calibrate.h - channel scales that make quantising easier, out of what a model does with a text.
 *
 * Rows of activations become int8 by their largest value, so one channel that is always far larger than the rest leaves the rest few
 * steps. Such a channel can be divided by s where it is made and its weights multiplied by s where it is used, which changes
 * nothing but the rounding: s goes into n1 and n4 (inputs of qkv and up), into the rows of v (input of o) and of up (input of
 * down), and into the final norm where the head is not the embedding. s is the square root of the channel's largest magnitude,
 * relative to the mean: half of the spread moves into the weights.
 *
 * Inputs that no weight of the same layer makes (layers without n1) stay as they are.
 *
 * For INT4 it also watches how inputs go together, so that rounding can make errors good (gram.h).
 * Thread: main. */
#ifndef TL_CALIBRATE_H
#define TL_CALIBRATE_H

#include "artifact.h"
#include "quant.h"

struct tl_calibration;

/* Run the beginning of a text (TL_CALIBRATION_BYTES) through the model in dir at its default depth, on the CPU; on one thread
 * where pairs are watched, so that their sums have one order. pairs: for INT4. Owner: caller, tl_calibration_free().
 * Errors: those of opening and running a model; TL_ERR_UNSUPPORTED without a tokenizer. */
#define TL_CALIBRATION_BYTES 65536
enum tl_status tl_calibration_measure(struct tl_calibration **out, const char *dir, const char *text_path, bool pairs,
                                      struct tl_error *err);
void tl_calibration_free(struct tl_calibration *c); /* NULL is fine */

/* How much an error in each input of a matrix counts, out[n_in]: the square of what it was multiplied by. */
void tl_calibration_weights(const struct tl_calibration *c, const struct tl_piece *p, bool own_head, float *out);
/* How errors in a matrix are made good: *out is NULL where nothing is known. It lives until the next call or the end of c. */
enum tl_status tl_calibration_compensation(struct tl_calibration *c, const struct tl_piece *p, bool own_head,
                                           const struct tl_compensation **out, struct tl_error *err);
/* Put the scales into rows [row, row + n) of a weight (elements of a vector), x[n][n_in]. own_head: the head is not the embedding. */
void tl_calibration_fold(const struct tl_calibration *c, const struct tl_piece *p, bool own_head, int64_t row,
                         int64_t n, float *x);

#endif
