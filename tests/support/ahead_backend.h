/* tests/support/ahead_backend.h - the CPU backend as a device that runs ahead: it chooses best tokens itself and takes chained ones,
 * so that what the scheduler does for a GPU can be tested without one. Opened by the device name "test". Thread: any, one at a time. */
#ifndef AHEAD_BACKEND_H
#define AHEAD_BACKEND_H

#include <stdint.h>

void ahead_install(void);
int64_t ahead_chained_rows(void); /* run since ahead_install() */
int64_t ahead_drawn_tokens(void); /* likewise, other than the best of their logits */

#endif
