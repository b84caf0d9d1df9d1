/* POST /v1/completions */
#include "completion_parse.h"
#include "completion_render.h"
#include "http_status.h"
#include "routes.h"

void tl_api_completions(struct tl_exchange *x)
{
    struct tl_ask ask;
    struct tl_error err;
    int code = tl_completion_parse(&ask, x->body.data, x->body.n, &x->srv->facts, &err);
    tl_bytes_free(&x->body);
    if (!code && tl_reuse_needs_cache_role(&ask.reuse) && x->key && !(x->key->roles & TL_ROLE_CACHE))
        code = tl_refuse(&err, TL_CODE_INSUFFICIENT_ROLE, NULL, "Leaving state behind needs the role cache.");
    void *render = code ? NULL : tl_completion_render_new(&ask);
    if (!code && !render)
        code = (int)tl_fail_host_memory(&err, sizeof(ask));
    if (code) {
        tl_ask_clear(&ask);
        tl_reply_error(x, &err);
        return;
    }
    tl_flight_start(x, &ask, &tl_completion_renderer, render);
}
