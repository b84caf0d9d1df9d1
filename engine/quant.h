/* engine/quant.h - number formats of weights: conversions, quantisers, and the plain unpackers that kernels are tested against.
 *
 * INT8: w = S q, one F32 scale S per row, q in -127..127.
 * INT4: w = S g q, one F32 scale S per row, one integer g in 1..15 per group of 32 inputs, q in -7..7. Two q a byte, even input
 *       in the low nibble, two's complement; two g a byte, even group in the low nibble.
 * Thread: any. */
#ifndef TL_QUANT_H
#define TL_QUANT_H

#include "arch.h"

#include <stddef.h>

#define TL_Q4_GROUP 32

static inline size_t tl_q4_row_bytes(int64_t n_in) { return (size_t)n_in / 2; }
static inline size_t tl_q4_gscale_bytes(int64_t n_in) { return (size_t)(n_in / TL_Q4_GROUP + 1) / 2; }

float tl_bf16_to_f32(uint16_t v);
uint16_t tl_f32_to_bf16(float v); /* to nearest even; v finite */
float tl_f16_to_f32(uint16_t v);

/* Sum of squares of a row and of what quantising lost. */
struct tl_quant_error {
    double sum_sq, sum_sq_error;
    float max_error;
};

/* One row x[n_in], finite. Errors are added to *e (may be NULL). */
void tl_quant_int8_row(const float *x, int64_t n_in, int8_t *q, float *scale, struct tl_quant_error *e);
/* n_in a multiple of 32. Searches row scale and group scales for the least squared error: see quant.c. weight[n_in], positive,
 * says how much the error of each input counts; NULL = all the same. */
void tl_quant_int4_row(const float *x, const float *weight, int64_t n_in, uint8_t *q4, uint8_t *gscale, float *scale,
                       struct tl_quant_error *e);

/* What is known about the inputs of a matrix, so that the error of one weight can be made good by those after it. Inputs are in
 * blocks of `width` (a multiple of 32; the last may be shorter) that have nothing to do with each other. */
struct tl_compensation {
    int width;
    float *follow;     /* [n_in][width]: what of an error in input i is taken from input k of its block, k after i */
    float *weight;     /* [n_in], positive: how much an error in i counts after what follows made good what it can */
    float *importance; /* [n_in], positive: the mean square of an input, relative to that of all */
};
/* The same, weights chosen one after another; left[n_in] is scratch. */
void tl_quant_int4_row_compensated(const float *x, const struct tl_compensation *c, int64_t n_in, float *left,
                                   uint8_t *q4, uint8_t *gscale, float *scale, struct tl_quant_error *e);

void tl_unpack_int8_row(const int8_t *q, float scale, int64_t n_in, float *out);
void tl_unpack_int4_row(const uint8_t *q4, const uint8_t *gscale, float scale, int64_t n_in, float *out);

#endif
