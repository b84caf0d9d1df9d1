/* server/reuse_ask.h - the part of a generation request that says what to start from and what to leave behind. Thread: loop. */
#ifndef TL_SERVER_REUSE_ASK_H
#define TL_SERVER_REUSE_ASK_H

#include "definitions.h"
#include "json.h"
#include "metrics.h"

struct tl_facts;

enum tl_pool_use { TL_POOL_AUTO, TL_POOL_OFF, TL_POOL_REQUIRE };

struct tl_reuse_ask {
    enum tl_reuse named; /* PREFIX_CACHE or RESUME_HANDLE: start from id; the prompt is the suffix. Else NONE */
    char id[TL_ENTRY_ID_MAX + 1];
    const char *id_field;  /* the field that id stood in */
    bool plain_if_missing; /* not there: compute the whole prompt */
    bool prompt_is_full;   /* the prompt begins with the entry's tokens */
    int new_L;             /* RESUME_HANDLE: as asked; only the handle knows what it may be */
    enum tl_pool_use pool;
    int register_tokens; /* first tokens of the prompt to register afterwards; 0 = none */
    bool store;          /* leave a resume handle behind */
    int store_max_loops;
    int64_t store_ttl;
    bool store_persist; /* its definition is to be on disk before the answer */
    char store_id[TL_ENTRY_ID_MAX + 1];
    char tenant[TL_TENANT_MAX + 1]; /* filled in by the flight */
    char salt[TL_ENTRY_ID_MAX + 1];
    bool keep_automatic; /* what is left behind serves the next turn */
};

void tl_reuse_parse(struct tl_fields *f, const struct tl_facts *facts, struct tl_reuse_ask *r);
/* The deepest resume of a handle of depth loops_used whose maker names none. Memory for it is promised, so it is not simply the
 * model's. */
#define TL_RESUME_LOOPS 32
int tl_resume_max_loops(const struct tl_facts *facts, int64_t loops_used);
bool tl_reuse_needs_cache_role(const struct tl_reuse_ask *r);

#endif
