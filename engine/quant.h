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

void tl_unpack_int8_row(const int8_t *q, float scale, int64_t n_in, float *out);
void tl_unpack_int4_row(const uint8_t *q4, const uint8_t *gscale, float scale, int64_t n_in, float *out);

#endif
