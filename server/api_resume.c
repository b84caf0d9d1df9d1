/* /v1/resume_handles */
#include "api_entries.h"
#include "entry_parse.h"
#include "entry_render.h"
#include "routes.h"

void tl_api_resume_make(struct tl_exchange *x) { tl_api_entry_make(x, TL_ENTRY_RESUME); }
void tl_api_resume_read(struct tl_exchange *x) { tl_api_entry_read(x, TL_ENTRY_RESUME); }
void tl_api_resume_patch(struct tl_exchange *x) { tl_api_entry_patch(x, TL_ENTRY_RESUME); }
void tl_api_resume_delete(struct tl_exchange *x) { tl_api_entry_delete(x, TL_ENTRY_RESUME); }
void tl_api_resume_list(struct tl_exchange *x) { tl_api_entry_list(x, TL_ENTRY_RESUME); }
void tl_api_resume_verify(struct tl_exchange *x) { tl_api_entry_verify(x, TL_ENTRY_RESUME); }

/* The deepened state becomes a prefix cache; the handle stays as it is. */
void tl_api_resume_promote(struct tl_exchange *x)
{
    struct tl_call *c = tl_call_new(x, TL_CALL_PROMOTE, TL_ENTRY_PREFIX, tl_reply_made);
    struct tl_error err;
    if (!c)
        return;
    int code = tl_parse_making_headers(c, &err);
    if (!code)
        code = tl_parse_promote(c, &err);
    if (code)
        tl_call_refuse(c, &err);
    else
        tl_call_send(c);
}
