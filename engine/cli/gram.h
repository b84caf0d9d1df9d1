/* engine/cli/gram.h - how the inputs of a matrix go together, and what follows for rounding its weights.
 *
 * Sums of products x[i] x[j] over the rows that a matrix reads, within blocks of neighbouring inputs (all pairs would take the
 * square of the width). From them comes for each input how an error in its weight is made good by the weights after it:
 * error-compensating rounding, known as GPTQ.
 * Thread: main, or whoever holds the owner's lock. */
#ifndef TL_GRAM_H
#define TL_GRAM_H

#include "quant.h"
#include "status.h"

struct tl_gram;

/* Blocks as equal as multiples of 32 allow, of at most `most` inputs. n a multiple of 32. */
int tl_gram_width(int64_t n, int most);
size_t tl_gram_bytes(int64_t n, int width);
enum tl_status tl_gram_create(struct tl_gram **out, int64_t n, int width, struct tl_error *err); /* tl_gram_free() */
void tl_gram_free(struct tl_gram *g);                                                            /* NULL is fine */
void tl_gram_add(struct tl_gram *g, const float *x);                                             /* a row x[n] */

/* For inputs that were divided by scale[n] (NULL: by 1). Owner: caller, tl_compensation_free().
 * Errors: TL_ERR_BAD_FILE where the rows were not finite, TL_ERR_NO_HOST_MEMORY. */
enum tl_status tl_gram_compensation(struct tl_gram *g, const float *scale, struct tl_compensation **out,
                                    struct tl_error *err);
void tl_compensation_free(struct tl_compensation *c); /* NULL is fine */

#endif
