/* server/registry.h - what has a name: prefix caches, resume handles and pool entries of every tenant.
 *
 * An entry is a definition (tokens and settings) and, while READY, a handle of the engine. States and what changes them:
 *
 *   BUILDING   being made for the first time; not confirmed yet         tl_registry_make -> tl_registry_commit
 *   STORED     defined, no state (after a restart)                      tl_registry_restore
 *   REBUILDING its state is computed again; claims wait for it          tl_registry_claim of a STORED one
 *   READY      claims succeed at once                                   commit, end of a rebuild
 *   DELETING   unlinked (its id is free again), still claimed           delete, expiry, replacement
 *   then freed; a tombstone keeps the reason for a day.
 *
 * A claim is a caller's hold on an entry: whatever happens to the name, the claimed state stays as it is until the claim is
 * released. Nothing waits in here: what is not there yet is told later by params.changed, between the scheduler's steps.
 *
 * The pool's entries are not held by the registry but by the pool, which may evict them when they are idle; a prefix cache with
 * in_pool is held by both, so it is never evicted. Thread: worker, everything. */
#ifndef TL_SERVER_REGISTRY_H
#define TL_SERVER_REGISTRY_H

#include "../engine/tinyloop.h"
#include "definitions.h"

#define TL_TOMBSTONES        4096 /* unless the params say otherwise */
#define TL_TOMBSTONE_SECONDS 86400
#define TL_ETAG_CHARS        40

enum tl_entry_state { TL_STORED, TL_BUILDING, TL_REBUILDING, TL_READY, TL_DELETING, TL_ENTRY_STATES };
const char *tl_entry_state_name(enum tl_entry_state s); /* as clients see it: a rebuild is "building" */

enum tl_gone {
    TL_GONE_DELETED,
    TL_GONE_EXPIRED,
    TL_GONE_EVICTED,
    TL_GONE_REPLACED,
    TL_GONE_MODEL_CHANGED,
    TL_GONE_BUILD_FAILED,
    TL_GONE_DELETING,
    TL_GONE_REASONS
};
const char *tl_gone_name(int reason); /* "deleted" ... ; "unknown" for other numbers */

struct tl_registry;
struct tl_entry;
struct tl_build;

struct tl_registry_params {
    struct tl_model *model;
    struct tl_sched *sched;
    int pool_capacity;   /* explicit pool entries */
    uint64_t pool_bytes; /* 0 = no limit of its own */
    int entries_max;     /* of all tenants */
    int tenant_entries_max;
    int tombstones_max;         /* names of gone entries that are remembered; 0 = TL_TOMBSTONES */
    uint64_t tenant_bytes_max;  /* 0 = no limit */
    bool rebuild_at_start;      /* STORED entries are built without waiting for a use */
    int64_t (*now)(void);       /* Unix seconds; NULL = the clock */
    void (*changed)(void *arg); /* something that a caller may wait for has happened; called from anywhere in here */
    void (*dropped)(void *arg, const struct tl_definition *d); /* a persistent one ended by itself: its file may go */
    void *arg;
};

struct tl_registry_counters {
    uint64_t built[TL_ENTRY_KINDS], build_failed[TL_ENTRY_KINDS],
        shared[TL_ENTRY_KINDS]; /* shared: made without a build */
    uint64_t expired[TL_ENTRY_KINDS], pool_evicted;
    int64_t entries[TL_ENTRY_KINDS][TL_ENTRY_STATES];
    uint64_t bytes[TL_ENTRY_KINDS];
    struct tl_pool_stats pool;
    double row_loops_per_second; /* of builds so far; 0 = none yet */
};

/* Owner: caller, tl_registry_free(), after every claim is released and before the model is freed. */
enum tl_status tl_registry_create(struct tl_registry **out, const struct tl_registry_params *p, struct tl_error *err);
void tl_registry_free(struct tl_registry *r); /* NULL is fine */
/* From the state directory, at the start; takes d over. Another model's leaves a tombstone. */
void tl_registry_restore(struct tl_registry *r, struct tl_definition *d);
/* Between steps: finish builds, expire, rebuild. Cheap when nothing is due. */
void tl_registry_tick(struct tl_registry *r);
struct tl_pool *tl_registry_pool(struct tl_registry *r);
/* Which pool entries a request may match. Never 0, which is everybody's. */
uint64_t tl_registry_scope(const struct tl_registry *r, const char *tenant, const char *salt);
void tl_registry_counters(const struct tl_registry *r, struct tl_registry_counters *out);

/* ---- use ---------------------------------------------------------------------------------------------------------- */

struct tl_claim {
    struct tl_entry *entry;   /* NULL = nothing claimed */
    struct tl_handle *handle; /* once ready; the claim's own reference */
    bool ready;
    int code; /* not 0: it could not be rebuilt; err says why */
    struct tl_error err;
    struct tl_claim *prev, *next;
};
/* Returns 0 and fills *c, which must stay where it is until released; c->ready tells whether the handle is there already.
 * Else the code: not found, gone, building. tenant NULL = any (administrator). */
int tl_registry_claim(struct tl_registry *r, enum tl_entry_kind kind, const char *tenant, const char *id,
                      struct tl_claim *c, struct tl_error *err);
void tl_registry_release(struct tl_registry *r, struct tl_claim *c); /* fine on a zeroed one, and twice */
/* A request of this scope started from h through the pool: the id of the entry that h belongs to, "" for an automatic one. */
const char *tl_registry_pool_hit(struct tl_registry *r, const struct tl_handle *h, uint64_t scope);
/* A finished conversation left h behind: the pool may keep it. Takes h over. */
void tl_registry_keep_automatic(struct tl_registry *r, struct tl_handle *h, uint64_t scope);

/* Can a handle be resumed to this depth? 0 or the code; field: where the client wrote loops. */
int tl_registry_check_resume(const struct tl_handle *h, int loops, const char *field, struct tl_error *err);

/* May this tenant make another entry? 0 or the code; before work is done for it. */
int tl_registry_check_room(struct tl_registry *r, const char *tenant, struct tl_error *err);

/* ---- making ------------------------------------------------------------------------------------------------------- */

enum tl_making_state { TL_MAKING_WAITS, TL_MAKING_MADE, TL_MAKING_DONE, TL_MAKING_FAILED };
enum tl_making_outcome { TL_MADE_NEW, TL_MADE_BEFORE, TL_MADE_REPLACED };

struct tl_view;
struct tl_making {
    /* what is asked for; zero what is not */
    struct tl_definition *def;  /* taken over by tl_registry_make, whatever it returns */
    bool must_be_new;           /* If-None-Match: * */
    bool must_match, match_any; /* If-Match: generation, or * */
    uint64_t match;
    char idempotency[65]; /* POST: hash of the key; "" = none */
    struct tl_handle
        *from; /* borrowed: resume it to def->loops instead of computing the tokens; else keep it as it is */
    bool deepen;
    /* what came of it */
    enum tl_making_state state;
    enum tl_making_outcome outcome;
    struct tl_view
        *seen; /* the caller's, or NULL: the entry as it was when it was DONE; others may evict it right after */
    int code;  /* FAILED */
    struct tl_error err;
    double queue_ms, prefill_ms, resume_ms;
    /* the registry's own */
    struct tl_entry *fresh, *joined;
    bool begun;
    struct tl_build *build;
    struct tl_making *prev, *next;
};
/* Begin. Returns 0 with m->state WAITS, MADE or DONE, or the code. m must stay where it is until it is DONE or FAILED.
 * MADE: the state is there; make the definition (tl_making_definition) durable if it is to be, then commit. */
int tl_registry_make(struct tl_registry *r, struct tl_making *m, struct tl_error *err);
const struct tl_definition *tl_making_definition(const struct tl_making *m); /* MADE */
/* MADE -> DONE, or FAILED if the name was taken or deleted meanwhile. */
void tl_registry_commit(struct tl_registry *r, struct tl_making *m);
/* A copy of what stands under the name now, if it is persistent: what its file must say after a failed commit. NULL = no file. */
struct tl_definition *tl_registry_definition(struct tl_registry *r, enum tl_entry_kind kind, const char *tenant,
                                             const char *id);
/* MADE: its definition could not be written, so it ends with the process. */
void tl_making_not_durable(struct tl_making *m);
/* The prompt of a finished prefill becomes a resume handle. Takes h over; on success m is MADE, to be committed as any other. */
struct tl_stored_name {
    const char *tenant, *id;
    int64_t ttl_seconds;
    bool persist;
};
int tl_registry_store_resume(struct tl_registry *r, struct tl_making *m, const struct tl_stored_name *name,
                             struct tl_handle *h, struct tl_error *err);
void tl_registry_abandon(struct tl_registry *r, struct tl_making *m); /* any state; what only it waited for stops */

/* ---- reading and changing ----------------------------------------------------------------------------------------- */

struct tl_view {              /* a copy: of any thread */
    struct tl_definition def; /* tokens NULL; metadata owned */
    enum tl_entry_state state;
    uint64_t bytes, bytes_reserved;
    int in_flight;
    int64_t last_used_at; /* 0 = never */
    uint64_t uses;
    double queue_ms, prefill_ms, resume_ms;
};
void tl_view_clear(struct tl_view *v);
void tl_etag(char out[TL_ETAG_CHARS], const struct tl_definition *d); /* with its quotes */
bool tl_etag_parse(const char *s, uint64_t *generation);

/* The entry as it is: 0 or the code. */
int tl_registry_view(struct tl_registry *r, enum tl_entry_kind kind, const char *tenant, const char *id,
                     struct tl_view *v, struct tl_error *err);
bool tl_entry_view(const struct tl_entry *e, struct tl_view *v); /* false: no memory */

struct tl_patch {
    bool set_ttl, set_expires, set_mode, set_metadata, set_pool;
    int64_t ttl_seconds, expires_at;
    bool sliding, pool;
    char *metadata; /* borrowed; NULL = none */
    bool must_match, match_any;
    uint64_t match;
};
/* 0 and *changed: a copy of the new definition if it must be made durable, else NULL. */
int tl_registry_patch(struct tl_registry *r, enum tl_entry_kind kind, const char *tenant, const char *id,
                      const struct tl_patch *p, struct tl_definition **changed, struct tl_error *err);

struct tl_deletion {
    bool if_idle; /* refuse when it is in use */
    bool must_match, match_any;
    uint64_t match;
    int in_flight; /* out: requests that still use it */
    bool had_file; /* out */
};
int tl_registry_delete(struct tl_registry *r, enum tl_entry_kind kind, const char *tenant, const char *id,
                       struct tl_deletion *d, struct tl_error *err);

struct tl_listing {
    enum tl_entry_kind kind;
    const char *tenant, *after; /* after: id or "" */
    int limit, loops;           /* loops 0 = any */
    int state;                  /* enum tl_entry_state as clients see it, -1 = any */
    bool descending;
    struct tl_view *views; /* out: owned, [n] */
    int n;
    bool has_more;
};
int tl_registry_list(struct tl_registry *r, struct tl_listing *l, struct tl_error *err);

struct tl_purge {
    const char *tenant; /* NULL = all */
    unsigned kinds;     /* bits 1 << enum tl_entry_kind; 1 << TL_ENTRY_KINDS: automatic pool entries */
    bool force;         /* also what is in use: it goes when its requests end */
    int freed, busy;    /* out */
    uint64_t bytes;
};
void tl_registry_purge(struct tl_registry *r, struct tl_purge *p);

/* ---- pool --------------------------------------------------------------------------------------------------------- */

struct tl_match {
    char entry[TL_ENTRY_ID_MAX + 1]; /* "" = an automatic one, or none */
    int n_matched;                   /* 0 = miss */
    bool deepen, automatic;
    char nearest[TL_ENTRY_ID_MAX + 1];
    int n_common;
    enum tl_miss reason;
    int expected, got; /* tokens at n_common; -1 = past the end */
};
void tl_registry_match(struct tl_registry *r, const int32_t *tokens, int n, int loops, int cache_window, uint64_t scope,
                       struct tl_match *out);

/* What a tenant has in the pool, named entries alone; tenant NULL = all. */
struct tl_pool_share {
    int entries, by_loops[TL_LOOPS_MAX + 1];
    uint64_t bytes, hits;
};
void tl_registry_pool_share(const struct tl_registry *r, const char *tenant, struct tl_pool_share *out);

/* After a restart: the longest entry of the pool that is only STORED and would match. True: claimed, wait for it before asking
 * the pool. */
bool tl_registry_claim_stored(struct tl_registry *r, const int32_t *tokens, int n, int loops, int cache_window,
                              uint64_t scope, struct tl_claim *c);

/* Limits of one tenant in place of the defaults; 0 = the default. Returns false if there is no room to remember them. */
bool tl_registry_quota_set(struct tl_registry *r, const char *tenant, int entries, uint64_t bytes);
void tl_registry_quota_get(const struct tl_registry *r, const char *tenant, int *entries, uint64_t *bytes, int *used,
                           uint64_t *bytes_used);

#endif
