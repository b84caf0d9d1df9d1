/* tests/support/fault_backend.h - the CPU backend with faults on order. Open it as device "test".
 *
 * Calls are counted from the last fault_reset(): allocations, matrix creations, copies, runs, syncs. */
#ifndef TL_FAULT_BACKEND_H
#define TL_FAULT_BACKEND_H

#include <stdint.h>

void fault_install(void);
void fault_reset(void);
void fault_fail_call(int64_t n); /* the n-th call from now on (1 = next) fails with TL_ERR_DEVICE, once; 0 = none */
int64_t fault_calls(void);       /* since the last reset */
void fault_nan_at(int64_t n);    /* the n-th row of logits from now on gets a NaN; 0 = none */
/* Called before the n-th run (one stage) from now on. */
void fault_before_run(int64_t n, void (*fn)(void *arg), void *arg);

#endif
