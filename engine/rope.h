/* engine/rope.h - the table of rotation angles of a model.
 *
 * inv_freq[j] = base^(-2j / d_head) rounded to F32 (llama3 scaling applied before rounding); the angle of position p is the
 * F32 product p * inv_freq[j]; its cosine and sine are taken in double and rounded to F32.
 * Thread: any. */
#ifndef TL_ROPE_H
#define TL_ROPE_H

#include "arch.h"

/* out[d_head / 2] */
void tl_rope_inv_freq(const struct tl_arch_spec *s, float *out);
/* Rows of positions [pos, pos + n): out[n][d_head], first d_head/2 cosines, then d_head/2 sines. inv_freq as above. */
void tl_rope_fill(const struct tl_arch_spec *s, const float *inv_freq, int pos, int n, float *out);

#endif
