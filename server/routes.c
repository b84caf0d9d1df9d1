#include "routes.h"

#include <string.h>

#define PUBLIC  TL_SIDE_PUBLIC
#define ADMIN   TL_SIDE_ADMIN
#define BOTH    (TL_SIDE_PUBLIC | TL_SIDE_ADMIN)
#define ANY_USE ((enum tl_role)(TL_ROLE_INFER | TL_ROLE_CACHE))
#define ANY_KEY ((enum tl_role)(TL_ROLE_INFER | TL_ROLE_CACHE | TL_ROLE_ADMIN))

static const struct tl_route routes[] = {
    {"POST", "/v1/completions", PUBLIC, TL_ROLE_INFER, true, tl_api_completions, "continue a text"},
    {"POST", "/v1/chat/completions", PUBLIC, TL_ROLE_INFER, true, tl_api_chat, "answer a conversation"},
    {"GET", "/v1/models", PUBLIC, TL_ROLE_INFER, false, tl_api_models, "the model, with its limits"},
    {"GET", "/v1/models/{id}", PUBLIC, TL_ROLE_INFER, false, tl_api_model, "one model"},
    {"POST", "/v1/tokenize", PUBLIC, TL_ROLE_INFER, true, tl_api_tokenize, "text to token ids"},
    {"POST", "/v1/detokenize", PUBLIC, TL_ROLE_INFER, true, tl_api_detokenize, "token ids to text"},
    {"POST", "/tokenize", PUBLIC, TL_ROLE_INFER, true, tl_api_tokenize, "alias"},
    {"POST", "/detokenize", PUBLIC, TL_ROLE_INFER, true, tl_api_detokenize, "alias"},
    {"GET", "/v1/requests", PUBLIC, TL_ROLE_INFER, false, tl_api_requests, "own requests in flight"},
    {"GET", "/v1/requests/{id}", PUBLIC, TL_ROLE_INFER, false, tl_api_request, "one of them"},
    {"DELETE", "/v1/requests/{id}", PUBLIC, TL_ROLE_INFER, false, tl_api_request_cancel, "cancel it"},
    {"POST", "/v1/prefix_caches", PUBLIC, TL_ROLE_CACHE, true, tl_api_prefix_make,
     "keep a prefix under a name of ours"},
    {"GET", "/v1/prefix_caches", PUBLIC, ANY_USE, false, tl_api_prefix_list, "own prefix caches"},
    {"PUT", "/v1/prefix_caches/{id}", PUBLIC, TL_ROLE_CACHE, true, tl_api_prefix_make, "keep a prefix under this name"},
    {"GET", "/v1/prefix_caches/{id}", PUBLIC, ANY_USE, false, tl_api_prefix_read, "one of them"},
    {"PATCH", "/v1/prefix_caches/{id}", PUBLIC, TL_ROLE_CACHE, false, tl_api_prefix_patch,
     "its time to live, metadata, pool"},
    {"DELETE", "/v1/prefix_caches/{id}", PUBLIC, TL_ROLE_CACHE, false, tl_api_prefix_delete, "give it up"},
    {"POST", "/v1/prefix_caches/{id}/verify", PUBLIC, ANY_USE, true, tl_api_prefix_verify,
     "prove that it changes nothing"},
    {"POST", "/v1/resume_handles", PUBLIC, TL_ROLE_CACHE, true, tl_api_resume_make,
     "keep a prefix that can be deepened"},
    {"GET", "/v1/resume_handles", PUBLIC, ANY_USE, false, tl_api_resume_list, "own resume handles"},
    {"PUT", "/v1/resume_handles/{id}", PUBLIC, TL_ROLE_CACHE, true, tl_api_resume_make, "the same under this name"},
    {"GET", "/v1/resume_handles/{id}", PUBLIC, ANY_USE, false, tl_api_resume_read, "one of them"},
    {"PATCH", "/v1/resume_handles/{id}", PUBLIC, TL_ROLE_CACHE, false, tl_api_resume_patch,
     "its time to live, metadata"},
    {"DELETE", "/v1/resume_handles/{id}", PUBLIC, TL_ROLE_CACHE, false, tl_api_resume_delete, "give it up"},
    {"POST", "/v1/resume_handles/{id}/verify", PUBLIC, ANY_USE, true, tl_api_resume_verify,
     "prove that it changes nothing"},
    {"POST", "/v1/resume_handles/{id}/promote", PUBLIC, TL_ROLE_CACHE, true, tl_api_resume_promote,
     "deepen it and keep that as a prefix cache"},
    {"GET", "/v1/pool", PUBLIC, ANY_USE, false, tl_api_pool, "state of the pool"},
    {"POST", "/v1/pool/entries", PUBLIC, TL_ROLE_CACHE, true, tl_api_pool_entry_make, "register a prefix"},
    {"GET", "/v1/pool/entries", PUBLIC, ANY_USE, false, tl_api_pool_entry_list, "own registered prefixes"},
    {"GET", "/v1/pool/entries/{id}", PUBLIC, ANY_USE, false, tl_api_pool_entry_read, "one of them"},
    {"DELETE", "/v1/pool/entries/{id}", PUBLIC, TL_ROLE_CACHE, false, tl_api_pool_entry_delete, "give it up"},
    {"POST", "/v1/pool/match", PUBLIC, ANY_USE, true, tl_api_pool_match, "what a prompt would match, and why not more"},
    {"POST", "/v1/estimate", PUBLIC, ANY_USE, true, tl_api_estimate, "what an entry would cost"},
    {"GET", "/", BOTH, TL_ROLE_NONE, false, tl_api_root, "what this is"},
    {"GET", "/openapi.json", BOTH, ANY_KEY, false, tl_api_openapi, "this API as an OpenAPI document"},
    {"GET", "/livez", BOTH, TL_ROLE_NONE, false, tl_api_livez, "is the process alive"},
    {"GET", "/readyz", BOTH, TL_ROLE_NONE, false, tl_api_readyz, "may requests be sent"},
    {"GET", "/health", BOTH, TL_ROLE_NONE, false, tl_api_readyz, "alias"},
    {"GET", "/version", BOTH, TL_ROLE_NONE, false, tl_api_version, "version of the daemon"},
    {"GET", "/metrics", ADMIN, TL_ROLE_ADMIN, false, tl_api_metrics, "Prometheus metrics"},
    {"GET", "/admin/status", ADMIN, TL_ROLE_ADMIN, false, tl_api_admin_status, "state of the daemon"},
    {"GET", "/admin/memory", ADMIN, TL_ROLE_ADMIN, false, tl_api_admin_memory, "device memory, in bytes"},
    {"GET", "/admin/requests", ADMIN, TL_ROLE_ADMIN, false, tl_api_admin_requests, "all requests in flight"},
    {"PATCH", "/admin/pool", ADMIN, TL_ROLE_ADMIN, false, tl_api_admin_pool, "limits of the pool"},
    {"POST", "/admin/purge", ADMIN, TL_ROLE_ADMIN, false, tl_api_admin_purge, "give up entries"},
    {"PUT", "/admin/quotas/{id}", ADMIN, TL_ROLE_ADMIN, false, tl_api_admin_quota, "limits of a tenant"},
    {"GET", "/admin/quotas/{id}", ADMIN, TL_ROLE_ADMIN, false, tl_api_admin_quota, "its limits and use"},
    {"DELETE", "/admin/quotas/{id}", ADMIN, TL_ROLE_ADMIN, false, tl_api_admin_quota, "the default limits again"},
    {"POST", "/admin/drain", ADMIN, TL_ROLE_ADMIN, false, tl_api_admin_drain, "accept no new work"},
    {"POST", "/admin/reload", ADMIN, TL_ROLE_ADMIN, false, tl_api_admin_reload, "read the API keys anew"},
    {"POST", "/admin/undrain", ADMIN, TL_ROLE_ADMIN, false, tl_api_admin_undrain, "accept work again"},
};
#define N_ROUTES ((int)(sizeof(routes) / sizeof(routes[0])))
_Static_assert(sizeof(routes) / sizeof(routes[0]) <= TL_ROUTES_MAX, "metrics count by route");

/* Does the path fit the pattern? *id_at, *id_len: the {id} segment. */
static bool fits(const char *pattern, const char *path, size_t n, const char **id_at, size_t *id_len)
{
    size_t i = 0;
    *id_len = 0;
    for (; *pattern; pattern++) {
        if (*pattern == '{') {
            *id_at = path + i;
            while (i < n && path[i] != '/')
                i++;
            *id_len = (size_t)(path + i - *id_at);
            if (*id_len == 0)
                return false;
            pattern = strchr(pattern, '}');
        } else {
            if (i >= n || path[i] != *pattern)
                return false;
            i++;
        }
    }
    return i == n;
}

const struct tl_route *tl_route_find(const char *method, const char *path, size_t path_len, unsigned side, char *id,
                                     size_t id_cap, char allow[128])
{
    const char *at = NULL, *want = strcmp(method, "HEAD") == 0 ? "GET" : method;
    size_t len = 0;
    allow[0] = id[0] = '\0';
    for (int i = 0; i < N_ROUTES; i++) {
        if (!(routes[i].sides & side) || !fits(routes[i].path, path, path_len, &at, &len))
            continue;
        if (strcmp(routes[i].method, want) == 0) {
            if (len >= id_cap)
                len = id_cap - 1; /* longer than any id there is: it will not be found */
            if (len > 0)
                memcpy(id, at, len);
            id[len] = '\0';
            return &routes[i];
        }
        if (allow[0])
            strcat(allow, ", "); /* at most a handful of short names */
        strcat(allow, strcmp(routes[i].method, "GET") == 0 ? "GET, HEAD" : routes[i].method);
    }
    return NULL;
}

int tl_route_index(const struct tl_route *r) { return r ? (int)(r - routes) : -1; }
const char *tl_route_name(int index) { return index >= 0 && index < N_ROUTES ? routes[index].path : "none"; }
const struct tl_route *tl_route_at(int index) { return index >= 0 && index < N_ROUTES ? &routes[index] : NULL; }
