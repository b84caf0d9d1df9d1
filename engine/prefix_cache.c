/* PrefixCache: one prefill kept, for any number of requests. See tl_handle in seq.h for what it owns. */
#include "keep.h"

enum tl_status tl_prefix_cache_build(struct tl_handle **out, struct tl_sched *s, const struct tl_prefix_params *p,
                                     struct tl_error *err)
{
    struct tl_request r;

    tl_request_from_prefix(&r, p);
    r.keep = TL_KEEP_PREFIX;
    return tl_run_and_keep(out, s, &r, err);
}
