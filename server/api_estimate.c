/* POST /v1/estimate: what an entry would cost, before it is made. */
#include "entry_parse.h"
#include "entry_render.h"
#include "routes.h"

static void reply_estimate(struct tl_call *c)
{
    struct tl_exchange *x = c->x;
    struct tl_jw w = {.b = &x->out};
    double rate = c->counters.row_loops_per_second;
    tl_jw_obj(&w, NULL);
    tl_jw_str(&w, "object", "estimate");
    tl_jw_str(&w, "kind", c->estimate.resume ? "resume_handle" : "prefix_cache");
    tl_jw_int(&w, "tokens", c->n_ids);
    tl_jw_int(&w, c->estimate.resume ? "loops_used" : "loops", c->estimate.loops);
    if (c->estimate.resume)
        tl_jw_int(&w, "max_loops", c->estimate.max_loops);
    tl_jw_int(&w, "cache_window", c->estimate.cache_window);
    tl_jw_uint(&w, "bytes", c->estimate.bytes);
    tl_jw_uint(&w, "bytes_unused", c->estimate.reserved);
    if (c->all_tenants) { /* what is free says what the others use */
        tl_jw_uint(&w, "bytes_free", c->estimate.free);
        tl_jw_uint(&w, "bytes_evictable", c->estimate.evictable);
    }
    tl_jw_bool(&w, "fits", c->estimate.fits);
    if (rate > 0)
        tl_jw_num(&w, "prefill_ms", (double)c->n_ids * c->estimate.loops / rate * 1e3, 1);
    else
        tl_jw_null(&w, "prefill_ms"); /* nothing was built yet */
    tl_jw_obj_end(&w);
    tl_reply_json(x, 200);
}

void tl_api_estimate(struct tl_exchange *x)
{
    struct tl_call *c = tl_call_new(x, TL_CALL_ESTIMATE, TL_ENTRY_PREFIX, reply_estimate);
    struct tl_error err;
    if (!c)
        return;
    if (tl_parse_estimate(c, &err))
        tl_call_refuse(c, &err);
    else
        tl_call_send(c);
}
