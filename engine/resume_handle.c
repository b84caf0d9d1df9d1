/* ResumeHandle: a prefill at depth L_used that keeps its stream, so that a later request can go on to new_L by running only
 * iterations [L_used, new_L), for every row of the prefix; a coda is then computed anew at the new depth. The handle itself never
 * changes. See tl_handle in seq.h for what it owns. */
#include "keep.h"

enum tl_status tl_resume_handle_build(struct tl_handle **out, struct tl_sched *s, const struct tl_prefix_params *p,
                                      int max_loops, struct tl_error *err)
{
    struct tl_request r;

    tl_request_from_prefix(&r, p);
    r.keep = TL_KEEP_RESUME;
    r.keep_max_loops = max_loops;
    return tl_run_and_keep(out, s, &r, err);
}

enum tl_status tl_resume_handle_promote(struct tl_handle **out, struct tl_sched *s, struct tl_handle *h, int new_L,
                                        struct tl_error *err)
{
    struct tl_request r;

    tl_request_default(&r);
    r.handle = h;
    r.new_L = new_L;
    r.keep = TL_KEEP_PREFIX;
    return tl_run_and_keep(out, s, &r, err);
}
