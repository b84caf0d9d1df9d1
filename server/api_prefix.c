/* /v1/prefix_caches, and what all kinds of named entries have in common. */
#include "api_entries.h"

#include <stdio.h>
#include <string.h>

#include "entry_parse.h"
#include "entry_render.h"
#include "http_status.h"
#include "routes.h"

void tl_api_entry_make(struct tl_exchange *x, enum tl_entry_kind kind)
{
    static const char *const prefixes[TL_ENTRY_KINDS] = {"pc_", "rh_", "pe_"};
    struct tl_call *c = tl_call_new(x, TL_CALL_MAKE, kind, tl_reply_made);
    struct tl_error err;
    if (!c)
        return;
    if (!c->id[0]) {
        memcpy(c->id, prefixes[kind], 3);
        tl_ulid(c->id + 3);
        c->give_up = true;
    }
    int code = tl_parse_making_headers(c, &err);
    if (!code)
        code = tl_parse_definition(c, &err);
    if (code)
        tl_call_refuse(c, &err);
    else
        tl_call_send(c);
}

void tl_api_entry_read(struct tl_exchange *x, enum tl_entry_kind kind)
{
    struct tl_call *c = tl_call_new(x, TL_CALL_VIEW, kind, tl_reply_entry);
    if (c)
        tl_call_send(c);
}

void tl_api_entry_patch(struct tl_exchange *x, enum tl_entry_kind kind)
{
    struct tl_call *c = tl_call_new(x, TL_CALL_PATCH, kind, tl_reply_entry);
    struct tl_error err;
    if (!c)
        return;
    if (tl_parse_patch(c, &err))
        tl_call_refuse(c, &err);
    else
        tl_call_send(c);
}

void tl_api_entry_delete(struct tl_exchange *x, enum tl_entry_kind kind)
{
    struct tl_call *c = tl_call_new(x, TL_CALL_DELETE, kind, tl_reply_deleted);
    struct tl_error err;
    if (!c)
        return;
    const char *if_busy = tl_http_query(x, "if_busy");
    int code = 0;
    if (if_busy && strcmp(if_busy, "fail") != 0 && strcmp(if_busy, "defer") != 0)
        code = tl_refuse(&err, TL_ERR_OUT_OF_RANGE, "if_busy", "if_busy must be fail or defer.");
    c->deletion.if_idle = if_busy && strcmp(if_busy, "fail") == 0;
    if (!code)
        code = tl_parse_if_match(x, &c->deletion.must_match, &c->deletion.match_any, &c->deletion.match, &err);
    if (code)
        tl_call_refuse(c, &err);
    else
        tl_call_send(c);
}

void tl_api_entry_list(struct tl_exchange *x, enum tl_entry_kind kind)
{
    struct tl_call *c = tl_call_new(x, TL_CALL_LIST, kind, tl_reply_listing);
    struct tl_error err;
    if (!c)
        return;
    if (tl_parse_listing(c, &err))
        tl_call_refuse(c, &err);
    else
        tl_call_send(c);
}

void tl_api_entry_verify(struct tl_exchange *x, enum tl_entry_kind kind)
{
    struct tl_call *c = tl_call_new(x, TL_CALL_VERIFY, kind, tl_reply_verified);
    struct tl_error err;
    if (!c)
        return;
    if (tl_parse_verify(c, &err))
        tl_call_refuse(c, &err);
    else
        tl_call_send(c);
}

void tl_api_prefix_make(struct tl_exchange *x) { tl_api_entry_make(x, TL_ENTRY_PREFIX); }
void tl_api_prefix_read(struct tl_exchange *x) { tl_api_entry_read(x, TL_ENTRY_PREFIX); }
void tl_api_prefix_patch(struct tl_exchange *x) { tl_api_entry_patch(x, TL_ENTRY_PREFIX); }
void tl_api_prefix_delete(struct tl_exchange *x) { tl_api_entry_delete(x, TL_ENTRY_PREFIX); }
void tl_api_prefix_list(struct tl_exchange *x) { tl_api_entry_list(x, TL_ENTRY_PREFIX); }
void tl_api_prefix_verify(struct tl_exchange *x) { tl_api_entry_verify(x, TL_ENTRY_PREFIX); }
