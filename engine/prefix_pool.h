/* engine/prefix_pool.h - what the scheduler needs of pools beyond the public calls. Thread: worker. */
#ifndef TL_PREFIX_POOL_H
#define TL_PREFIX_POOL_H

#include "model.h"

/* A request started from h (NULL = missed): count it and bump h. */
void tl_pool_used(struct tl_pool *p, const struct tl_handle *h);
/* Evict the least recently used idle entry of the model's pools, automatic ones first; false if there is none. */
bool tl_pools_evict_one(struct tl_model *m);

#endif
