/* server/keys.h - who may call: API keys from a file, kept as hashes.
 *
 * A line is name:sha256:tenant:roles:limits, e.g.
 *   web:9f86d0…:acme:infer,cache:concurrent=16,rpm=600
 * roles are infer, cache, admin; limits may be empty. The tenant of a request comes from its key alone.
 * Thread: loop. */
#ifndef TL_SERVER_KEYS_H
#define TL_SERVER_KEYS_H

#include "../engine/tinyloop.h"

enum tl_role { TL_ROLE_NONE = 0, TL_ROLE_INFER = 1, TL_ROLE_CACHE = 2, TL_ROLE_ADMIN = 4 };

struct tl_key {
    char name[64], tenant[64];
    unsigned char sha256[32];
    unsigned roles;           /* bits of enum tl_role */
    int concurrent, rpm;      /* limits; 0 = none */
    int n_running;            /* generations now */
    int n_users;              /* exchanges and generations that point here */
    double credit, credit_at; /* of rpm: requests that may still start, and when that was counted */
};

struct tl_keys {
    struct tl_key **key; /* each allocated alone: requests point at them, also across a reload */
    int n;
    struct tl_key **retired; /* no longer in the file; until the reload that finds nothing pointing at them */
    int n_retired;
};

/* Owner: caller, tl_keys_free(). Errors: TL_ERR_IO, TL_ERR_BAD_PARAM with path:line, TL_ERR_NO_HOST_MEMORY. */
enum tl_status tl_keys_read(struct tl_keys *out, const char *path, struct tl_error *err);
enum tl_status tl_keys_parse(struct tl_keys *out, const char *text, size_t bytes, const char *name,
                             struct tl_error *err);
/* Read the file anew. Keys of the same name and hash stay the same objects, with their new roles and limits. On error
 * nothing changes. */
enum tl_status tl_keys_reload(struct tl_keys *k, const char *path, struct tl_error *err);
void tl_keys_free(struct tl_keys *k);

/* The key that was presented, or NULL. Takes the same time for every wrong one. */
struct tl_key *tl_keys_find(const struct tl_keys *k, const char *presented);

/* One more request of this key: false if its rate is used up (*wait_s: when it may come again). */
bool tl_key_take(struct tl_key *key, double now, double *wait_s);

#endif
