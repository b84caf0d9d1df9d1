/* engine/keep.h - shared by the calls that build a handle. Thread: worker. */
#ifndef TL_KEEP_H
#define TL_KEEP_H

#include "tinyloop.h"

/* A request for the prompt of p alone. */
void tl_request_from_prefix(struct tl_request *r, const struct tl_prefix_params *p);
/* Run r to its end; the handle it kept is the caller's. */
enum tl_status tl_run_and_keep(struct tl_handle **out, struct tl_sched *s, const struct tl_request *r,
                               struct tl_error *err);

#endif
