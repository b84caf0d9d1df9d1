/* server/entry_call.h - one request about named entries, on its way from the loop to the worker's registry and back.
 *
 * A handler fills a call and sends it; the exchange waits. On the worker most calls are done at once; a making goes on until its
 * state is computed, comes back to have its definition written, and is committed after that:
 *
 *   loop: parse, encode -> worker: begin, compute -> loop: write the file -> worker: commit -> loop: answer
 *
 * With Prefer: respond-async the answer (202) leaves when the computation has begun. A client that leaves does not stop what has a
 * name of its choosing, since it or others may ask again; what the server named would be found by nobody and is given up. */
#ifndef TL_SERVER_ENTRY_CALL_H
#define TL_SERVER_ENTRY_CALL_H

#include "aside.h"
#include "http.h"
#include "job.h"
#include "registry.h"
#include "server.h"
#include "verify.h"

enum tl_call_op {
    TL_CALL_MAKE,
    TL_CALL_PROMOTE,
    TL_CALL_FROM_POOL,
    TL_CALL_VIEW,
    TL_CALL_PATCH,
    TL_CALL_DELETE,
    TL_CALL_LIST,
    TL_CALL_MATCH,
    TL_CALL_COUNTERS,
    TL_CALL_ESTIMATE,
    TL_CALL_VERIFY,
    TL_CALL_PURGE,
    TL_CALL_QUOTA,
    TL_CALL_POOL_LIMITS
};

struct tl_call {
    struct tl_task task;
    struct tl_server *srv;
    struct tl_exchange *x;            /* loop; NULL once answered, or when the client left */
    void (*reply)(struct tl_call *c); /* loop: it worked; writes the answer to c->x */
    enum tl_call_op op;
    enum tl_entry_kind kind;
    char tenant[TL_TENANT_MAX + 1], id[TL_ENTRY_ID_MAX + 1],
        other[TL_ENTRY_ID_MAX + 1]; /* other: source of a promotion */
    bool async;
    bool give_up; /* when the client leaves: nobody else knows its name */
    /* text that is to become tokens first; owned */
    char *text;
    size_t n_text;
    bool chat;    /* it is the variables of a chat template (chat_parse.h) */
    int32_t *ids; /* owned; of MATCH, ESTIMATE, and of a definition until it has them */
    int n_ids;
    struct tl_aside encoding;
    /* by op, in and out */
    struct tl_making making;
    struct tl_claim source;
    struct tl_patch patch;
    char *patch_metadata; /* owned */
    struct tl_deletion deletion;
    struct tl_listing listing;
    char after[TL_ENTRY_ID_MAX + 1];
    struct tl_match match;
    struct tl_registry_counters counters;
    struct tl_pool_share share;
    bool all_tenants; /* an administrator asks */
    struct tl_verify verify;
    struct tl_purge purge;
    struct {
        int loops, max_loops, cache_window;
        bool resume;
        uint64_t bytes, reserved;
        uint64_t free, evictable; /* now, of all tenants */
        bool fits;
    } estimate;
    struct {
        bool set;
        int entries, used;
        uint64_t bytes, bytes_used;
    } quota;
    struct {
        int capacity;
        int64_t bytes;
        bool set;
    } limits;
    char salt[TL_ENTRY_ID_MAX + 1];
    int loops, cache_window; /* MATCH */
    bool explain;
    struct tl_view view;
    struct tl_view accepted;     /* of a 202: the entry as it was when its computation began */
    const struct tl_view *shown; /* loop: the one of these to answer with */
    enum tl_making_outcome outcome;
    int code; /* not 0: err says why */
    struct tl_error err;
    /* between the threads */
    atomic_int news;   /* bits: what the worker has to say */
    atomic_int stored; /* the loop's answer: 0 waits, 1 written, -1 failed (store_err) */
    atomic_bool cancel;
    struct tl_error store_err;
    struct tl_definition *put; /* STORE, or to be written before the answer; handed over with the news */
    bool remove;               /* the file goes before the answer */
    bool asked;                /* worker: the file is being written */
    bool over;                 /* worker: ended */
};

/* A call of this exchange; NULL: answered with an error already. Checks that the model is there, copies tenant and {id}. */
struct tl_call *tl_call_new(struct tl_exchange *x, enum tl_call_op op, enum tl_entry_kind kind,
                            void (*reply)(struct tl_call *));
void tl_call_drop(struct tl_call *c);                               /* never sent */
void tl_call_refuse(struct tl_call *c, const struct tl_error *err); /* answer with an error and drop it; never sent */
/* Encode c->text if there is any, check the length, send. Takes the call over. */
void tl_call_send(struct tl_call *c);

/* Make an entry that nobody waits for; its id is chosen here. Takes d over. */
void tl_call_make(struct tl_server *s, struct tl_definition *d);

/* Delete the files of entries that ended by themselves. Before any write, so that it cannot undo a later one. */
void tl_entry_files_drop(struct tl_server *s);

#endif
