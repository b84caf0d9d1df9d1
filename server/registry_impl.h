/* server/registry_impl.h - what registry.c and registry_make.c share. Thread: worker. */
#ifndef TL_SERVER_REGISTRY_IMPL_H
#define TL_SERVER_REGISTRY_IMPL_H

#include "http_status.h"
#include "registry.h"

struct tl_entry {
    struct tl_entry *prev, *next; /* of the registry's list, in order of making; unlinked ones are in no list */
    bool linked;
    struct tl_definition *def;
    enum tl_entry_state state;
    struct tl_handle *handle;       /* READY: one reference; of a POOL entry the pool's, not ours */
    uint64_t bytes, bytes_reserved; /* of the handle, which never changes */
    bool pooled;                    /* the pool has it in this entry's scope */
    struct tl_build *build;         /* REBUILDING */
    struct tl_claim *claims;
    int in_flight;
    int64_t last_used_at;
    uint64_t uses;
    double queue_ms, prefill_ms, resume_ms;
};

/* One computation, for all who want the same state in the same tenant. */
struct tl_build {
    struct tl_build *next;
    struct tl_registry *r;
    struct tl_definition *def; /* own copy */
    bool deepen;               /* from a handle: never joined */
    struct tl_job *job;        /* NULL once done */
    struct tl_handle *handle;  /* what it left */
    bool done;
    enum tl_status st;
    struct tl_error err;
    struct tl_usage usage;
    int n_waiting; /* entries and makings; 0 = nobody wants it any more */
};

struct tombstone {
    enum tl_entry_kind kind;
    enum tl_gone reason;
    char tenant[TL_TENANT_MAX + 1], id[TL_ENTRY_ID_MAX + 1];
    int64_t at;
};

struct quota {
    char tenant[TL_TENANT_MAX + 1];
    int entries;
    uint64_t bytes;
};
#define QUOTAS_MAX 1024

struct tl_registry {
    struct tl_registry_params p;
    struct tl_pool *pool;
    struct tl_entry *first, *last;
    int n_entries;
    struct tl_making *makings;
    struct tl_build *builds;
    struct tombstone *tombs; /* ring */
    int n_tombs, tomb_next;
    struct quota *quotas;
    int n_quotas;
    unsigned char scope_secret[32];
    uint64_t generation; /* last one given out */
    int64_t expiry_next; /* no entry expires before; 0 = look */
    bool starting;       /* rebuild_at_start: there may be STORED ones left */
    struct tl_registry_counters counters;
    double build_seconds, build_row_loops;
};

int64_t tl_reg_now(const struct tl_registry *r);
uint64_t tl_reg_generation(struct tl_registry *r);
struct tl_entry *tl_reg_find(struct tl_registry *r, enum tl_entry_kind kind, const char *tenant, const char *id);
int tl_reg_not_there(struct tl_registry *r, enum tl_entry_kind kind, const char *tenant, const char *id,
                     struct tl_error *err);
void tl_reg_link(struct tl_registry *r, struct tl_entry *e);
/* Take the name away and leave a tombstone; freed when nobody claims it any more. e may be gone afterwards. */
void tl_reg_unlink(struct tl_registry *r, struct tl_entry *e, enum tl_gone reason);
void tl_reg_entry_free(struct tl_registry *r, struct tl_entry *e);
void tl_reg_set_expiry(struct tl_registry *r, struct tl_entry *e);
int tl_reg_check_match(const struct tl_entry *e, bool must, bool any, uint64_t generation, struct tl_error *err);
/* May d's tenant have it, in the place of old? old NULL = beside what there is. 0 or the code. */
int tl_reg_check_quota(struct tl_registry *r, const struct tl_definition *d, const struct tl_entry *old,
                       struct tl_error *err);
/* READY with handle h, whose reference it takes over. On error h is dropped and the entry is as before. */
enum tl_status tl_reg_ready(struct tl_registry *r, struct tl_entry *e, struct tl_handle *h, struct tl_error *err);
enum tl_status tl_reg_pool_join(struct tl_registry *r, struct tl_entry *e, struct tl_error *err);
void tl_reg_pool_leave(struct tl_registry *r, struct tl_entry *e);
uint64_t tl_reg_scope(const struct tl_registry *r, const struct tl_definition *d); /* where pool matches find it */
/* The entry in which a request of this scope finds h: its own before a shared one; NULL = an automatic one. */
struct tl_entry *tl_reg_pooled(const struct tl_registry *r, const struct tl_handle *h, uint64_t scope);

/* registry_make.c */
/* Somebody wants the state of d: an equal one that is there (*h, a new reference), or a build to wait for (*b). */
enum tl_status tl_reg_want(struct tl_registry *r, const struct tl_definition *d, struct tl_handle *from, bool deepen,
                           struct tl_handle **h, struct tl_build **b, struct tl_error *err);
void tl_reg_unwant(struct tl_registry *r, struct tl_build *b); /* NULL is fine */
void tl_reg_makings_tick(struct tl_registry *r);
void tl_reg_builds_sweep(struct tl_registry *r);
void tl_reg_entry_lost(struct tl_registry *r, struct tl_entry *e); /* e was unlinked: makings that concern it end */

#endif
