/* tests/support/fake_backend.h - a backend that keeps what it is given in host memory, computes nothing, counts what is
 * alive and can refuse the n-th request. */
#ifndef FAKE_BACKEND_H
#define FAKE_BACKEND_H

#include "backend.h"

extern const struct tl_backend_ops fake_backend_ops;

/* Open one; close with ops->close. */
struct tl_backend *fake_backend_open(void);

/* Refuse the n-th buf_alloc, buf_write or mat_create from now on, once; 0 = none. */
void fake_fail_at(int64_t n);
int64_t fake_requests(void); /* since the last fake_fail_at */
int64_t fake_live_objects(void);
int64_t fake_live_bytes(void);
int64_t fake_runs(void); /* steps run, of all fakes */

/* What a matrix or buffer holds, widened to F32. Row of a matrix: out[n_in]. */
void fake_mat_row(const struct tl_mat *m, int64_t row, float *out);
int64_t fake_mat_rows(const struct tl_mat *m);
int64_t fake_mat_n_in(const struct tl_mat *m);
enum tl_wtype fake_mat_wtype(const struct tl_mat *m);
const float *fake_buf_floats(const struct tl_buf *b);
size_t fake_buf_bytes(const struct tl_buf *b);

#endif
