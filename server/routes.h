/* server/routes.h - what exists: one row per endpoint. Thread: any (constant). */
#ifndef TL_SERVER_ROUTES_H
#define TL_SERVER_ROUTES_H

#include "http.h"
#include "keys.h"
#include "metrics.h"

enum { TL_SIDE_PUBLIC = 1, TL_SIDE_ADMIN = 2 };

struct tl_route {
    const char *method; /* a GET row also serves HEAD */
    const char *path;   /* one segment may be {id} */
    unsigned sides;     /* listeners it is on */
    enum tl_role role;  /* what the key must hold; NONE = open to all, also without a key */
    bool generates;     /* starts work: refused while loading or draining */
    void (*handle)(struct tl_exchange *x);
    const char *help;
};

/* Find the row of a path and method. *allow (room for 128) lists the methods of a path that is there with others.
 * id receives the {id} segment. NULL if there is none. */
const struct tl_route *tl_route_find(const char *method, const char *path, size_t path_len, unsigned side, char *id,
                                     size_t id_cap, char allow[128]);
int tl_route_index(const struct tl_route *r);  /* -1 for NULL */
const char *tl_route_name(int index);          /* its path; "none" for -1 */
const struct tl_route *tl_route_at(int index); /* NULL past the end */

/* The handlers, by file. */
void tl_api_completions(struct tl_exchange *x);
void tl_api_chat(struct tl_exchange *x);
void tl_api_models(struct tl_exchange *x);
void tl_api_model(struct tl_exchange *x);
void tl_api_tokenize(struct tl_exchange *x);
void tl_api_detokenize(struct tl_exchange *x);
void tl_api_requests(struct tl_exchange *x);
void tl_api_request(struct tl_exchange *x);
void tl_api_request_cancel(struct tl_exchange *x);
void tl_api_prefix_make(struct tl_exchange *x);
void tl_api_prefix_read(struct tl_exchange *x);
void tl_api_prefix_patch(struct tl_exchange *x);
void tl_api_prefix_delete(struct tl_exchange *x);
void tl_api_prefix_list(struct tl_exchange *x);
void tl_api_prefix_verify(struct tl_exchange *x);
void tl_api_resume_make(struct tl_exchange *x);
void tl_api_resume_read(struct tl_exchange *x);
void tl_api_resume_patch(struct tl_exchange *x);
void tl_api_resume_delete(struct tl_exchange *x);
void tl_api_resume_list(struct tl_exchange *x);
void tl_api_resume_verify(struct tl_exchange *x);
void tl_api_resume_promote(struct tl_exchange *x);
void tl_api_pool(struct tl_exchange *x);
void tl_api_pool_entry_make(struct tl_exchange *x);
void tl_api_pool_entry_read(struct tl_exchange *x);
void tl_api_pool_entry_delete(struct tl_exchange *x);
void tl_api_pool_entry_list(struct tl_exchange *x);
void tl_api_pool_match(struct tl_exchange *x);
void tl_api_estimate(struct tl_exchange *x);
void tl_api_admin_pool(struct tl_exchange *x);
void tl_api_admin_purge(struct tl_exchange *x);
void tl_api_admin_quota(struct tl_exchange *x);
void tl_api_root(struct tl_exchange *x);
void tl_api_openapi(struct tl_exchange *x);
void tl_api_livez(struct tl_exchange *x);
void tl_api_readyz(struct tl_exchange *x);
void tl_api_version(struct tl_exchange *x);
void tl_api_metrics(struct tl_exchange *x);
void tl_api_admin_status(struct tl_exchange *x);
void tl_api_admin_memory(struct tl_exchange *x);
void tl_api_admin_requests(struct tl_exchange *x);
void tl_api_admin_drain(struct tl_exchange *x);
void tl_api_admin_undrain(struct tl_exchange *x);
void tl_api_admin_reload(struct tl_exchange *x);

#endif
