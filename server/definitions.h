/* server/definitions.h - what is needed to make a named entry again, and where that survives a restart.
 *
 * A definition is ids and settings; the state computed from them is never stored, since it comes out bit for bit the same.
 * One file each in the state directory: "<kind>-<hash of tenant and id>.def", written under a temporary name, synced, renamed,
 * and the directory synced, before anybody is told that the entry exists. A crash leaves the old file, the new one, or none.
 *
 * The store is the loop's: operations run in the library's thread pool, one batch at a time and in the order they came, so that
 * a delete never overtakes the write before it; a batch shares one sync of the directory. */
#ifndef TL_SERVER_DEFINITIONS_H
#define TL_SERVER_DEFINITIONS_H

#include <uv.h>

#include "../engine/tinyloop.h"

#define TL_ENTRY_ID_MAX       64
#define TL_TENANT_MAX         63
#define TL_METADATA_PAIRS_MAX 16
#define TL_METADATA_KEY_MAX   64
#define TL_METADATA_VALUE_MAX 512

enum tl_entry_kind { TL_ENTRY_PREFIX, TL_ENTRY_RESUME, TL_ENTRY_POOL, TL_ENTRY_KINDS };
const char *tl_entry_kind_name(enum tl_entry_kind k); /* "prefix_cache", "resume_handle", "pool_entry" */

struct tl_definition {
    enum tl_entry_kind kind;
    char id[TL_ENTRY_ID_MAX + 1];
    char tenant[TL_TENANT_MAX + 1];
    char salt[TL_ENTRY_ID_MAX + 1]; /* narrows pool matches inside the tenant; "" = none */
    char fingerprint[65];           /* of the model */
    char digest[65];                /* of the content: tl_definition_digest */
    int32_t *tokens;                /* owned */
    int n_tokens;
    int loops;     /* RESUME: loops_used */
    int max_loops; /* deepest resume: RESUME, and POOL if above loops; else equal to loops */
    int cache_window;
    bool in_pool; /* PREFIX, RESUME: pool matches find it too */
    bool shared;  /* POOL, PREFIX: matches every tenant (made by an administrator) */
    bool persist;
    bool sliding;                   /* every use starts the TTL again */
    int64_t ttl_seconds;            /* 0 = never expires */
    int64_t created_at, expires_at; /* Unix seconds; expires_at 0 = never */
    uint64_t generation;            /* of the entity tag: new with every change */
    char idempotency[65];           /* hash of the Idempotency-Key that made it; "" = none */
    char *metadata;                 /* a JSON object as text, or NULL. Owned */
};

void tl_definition_free(struct tl_definition *d);                        /* NULL is fine */
struct tl_definition *tl_definition_copy(const struct tl_definition *d); /* NULL: no memory */
/* SHA-256 over kind, model, tokens, depths and window, into d->digest. False if the hash is not available. */
bool tl_definition_digest(struct tl_definition *d);
/* The same state would be computed: tokens, depths, window and whether rows are kept. */
bool tl_definition_same_state(const struct tl_definition *a, const struct tl_definition *b);
bool tl_definition_keeps_state(const struct tl_definition *d); /* of all rows, so that it can be deepened */
bool tl_definition_in_pool(const struct tl_definition *d);     /* pool matches find it */
bool tl_entry_id_ok(const char *id);

/* ---- files (any thread; blocking) --------------------------------------------------------------------------------- */

/* Without the directory's sync: tl_state_dir_sync. Errors: TL_ERR_IO, TL_ERR_NO_HOST_MEMORY. */
enum tl_status tl_definition_write(const char *dir, const struct tl_definition *d, struct tl_error *err);
enum tl_status tl_definition_remove(const char *dir, enum tl_entry_kind kind, const char *tenant, const char *id,
                                    struct tl_error *err); /* absent is fine */
enum tl_status tl_state_dir_sync(const char *dir, struct tl_error *err);
/* Make the directory if it is missing and lock it against a second server. *lock_fd: close to unlock. */
enum tl_status tl_state_dir_open(const char *dir, int *lock_fd, struct tl_error *err);
/* Every definition goes to take, which owns it. A file that cannot be read as one is renamed to "<name>.bad" and logged;
 * temporary files of an interrupted write are deleted. */
enum tl_status tl_definitions_load(const char *dir, void (*take)(void *arg, struct tl_definition *d), void *arg,
                                   struct tl_error *err);

/* ---- the store (loop) --------------------------------------------------------------------------------------------- */

struct tl_store;
typedef void tl_stored_fn(void *arg, const struct tl_error *err); /* loop; err NULL = safely there (or gone) */

/* loop must run until tl_store_idle. dir must outlive it. Owner: caller, tl_store_free(). */
enum tl_status tl_store_create(struct tl_store **out, uv_loop_t *loop, const char *dir, struct tl_error *err);
void tl_store_free(struct tl_store *s); /* NULL is fine; must be idle */
/* done may be NULL. Takes d over. */
void tl_store_put(struct tl_store *s, struct tl_definition *d, tl_stored_fn *done, void *arg);
void tl_store_remove(struct tl_store *s, enum tl_entry_kind kind, const char *tenant, const char *id,
                     tl_stored_fn *done, void *arg);

#endif
