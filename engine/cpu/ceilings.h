/* engine/cpu/ceilings.h - what this machine can do at best, measured: the denominators of every ratio that a benchmark prints.
 *
 * Each figure is the best of several passes within `seconds`, since a pass can only be slowed down from outside.
 * n_threads 0 = as many as the process may use.
 * Thread: any, alone. Errors: TL_ERR_NO_HOST_MEMORY, TL_ERR_OUT_OF_RANGE, TL_ERR_IO. */
#ifndef TL_CPU_CEILINGS_H
#define TL_CPU_CEILINGS_H

#include "../status.h"

/* Bytes per second that n_threads read together from a buffer of `bytes` (take several times the last-level cache). */
enum tl_status tl_cpu_read_bandwidth(int n_threads, size_t bytes, double seconds, double *bytes_per_s,
                                     struct tl_error *err);

/* int8 operations (a multiply and an add are two) per second out of registers, with the instructions of the best level. */
enum tl_status tl_cpu_int8_rate(int n_threads, double seconds, double *ops_per_s, struct tl_error *err);

#endif
