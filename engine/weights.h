/* engine/weights.h - a bound model directory becomes a net on a backend, in one pass over the files.
 *
 * Every tensor is read once, in order of place: hashed, checked (no NaN or infinity, INT8 within -127..127, INT4 within -7..7,
 * group scales 1..15), handed to the backend, and its pages are given back. The host needs memory for one tensor at a time.
 * Thread: worker. */
#ifndef TL_WEIGHTS_H
#define TL_WEIGHTS_H

#include "arch_bind.h"
#include "backend.h"

struct tl_weights_params {
    uint64_t start_seed; /* of random start states; part of the fingerprint where they are used */
    int rope_positions;  /* rows of the rope table; 0 = the model's max_positions */
    void (*progress)(void *arg, double fraction); /* may be NULL; 0..1 */
    void *progress_arg;
};

struct tl_weights_info {
    char fingerprint
        [65]; /* SHA-256 in hex over config.json, every tensor (name, dtype, shape, data) and the start state */
    uint64_t n_parameters;
    uint64_t device_bytes; /* weights, scales and rope table in device memory */
};

/* Fill *net (any content before). info may be NULL. On error *net is empty and no device memory is held.
 * Errors: TL_ERR_BAD_FILE (tensor, index and value named), TL_ERR_NO_HOST_MEMORY, what the backend reports. */
enum tl_status tl_weights_load(struct tl_net *net, struct tl_backend *be, const struct tl_arch_binding *b,
                               const struct tl_weights_params *p, struct tl_weights_info *info, struct tl_error *err);
void tl_net_free(struct tl_net *net, struct tl_backend *be); /* an empty net is fine */

/* The fingerprint alone; reads every tensor. */
enum tl_status tl_weights_fingerprint(const struct tl_arch_binding *b, uint64_t start_seed, char hex[65],
                                      struct tl_error *err);
/* Whether the values of one weight of b are sound, as above. */
enum tl_status tl_bind_check(const struct tl_arch_binding *b, const struct tl_bind *w, struct tl_error *err);
/* Rows [row, row + n) of a matrix (or elements of a vector, n_in 0) as F32, whatever they are stored as. */
void tl_bind_read(const struct tl_bind *w, int64_t row, int64_t n, float *out);

#endif
