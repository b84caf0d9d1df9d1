/* engine/kv_store.h - device memory for computed state: equal pages, references, promises.
 *
 * One arena is taken from the device when the model opens and cut into pages of one size: the keys and values of one KV slot
 * (one execution of one layer) for TL_BLOCK_TOKENS tokens. A block of a segment (prelude, one loop iteration, coda) is one
 * page per layer of it. Equal pages cannot fragment, so counting is enough: what was promised can always be taken.
 * State rows (the stream after a loop, for resuming) live in pages of the same arena.
 *
 *   free       not in use; of these, n_reserved are promised to admitted work
 *   in use     refs >= 1; written by one sequence (refs 1), or held by handles (any number, never written again)
 *
 * Owner: the model. Thread: worker. */
#ifndef TL_KV_STORE_H
#define TL_KV_STORE_H

#include "backend.h"

struct tl_kv {
    struct tl_backend *be;
    const struct tl_arch_spec *spec;
    struct tl_kv_view view;
    int chunk_rows; /* most positions that one step adds to a sequence */
    int32_t n_pages;
    int32_t n_free;
    int64_t n_reserved; /* <= n_free */
    int32_t n_used_peak;
    int64_t n_held;      /* pages that handles refer to (each counted once) plus what they reserve for a resume */
    int32_t *free_stack; /* [n_free] */
    uint32_t *refs;      /* [n_pages] */
};

/* Bytes of one page for this model; 0 on overflow. */
size_t tl_kv_page_bytes(const struct tl_arch_spec *spec, enum tl_kv_format format);
/* Rows of state (x, and e where the model injects) that one page holds, >= 1. */
int tl_kv_state_rows_per_page(const struct tl_arch_spec *spec, size_t page_bytes);

enum tl_status tl_kv_create(struct tl_kv **out, struct tl_backend *be, const struct tl_arch_spec *spec,
                            enum tl_kv_format format, int64_t n_pages, int chunk_rows, struct tl_error *err);
void tl_kv_free(struct tl_kv *kv); /* NULL is fine */

/* Promise n pages; false and no change if they are not there. */
bool tl_kv_reserve(struct tl_kv *kv, int64_t n);
void tl_kv_unreserve(struct tl_kv *kv, int64_t n);
/* Free pages that nobody was promised. */
int64_t tl_kv_available(const struct tl_kv *kv);

/* Take one page out of the taker's own reservation (*reserved, decremented). Refs becomes 1. */
int32_t tl_kv_take(struct tl_kv *kv, int64_t *reserved);
void tl_kv_ref(struct tl_kv *kv, int32_t page);
/* Drop one reference; true if the page is free now. */
bool tl_kv_unref(struct tl_kv *kv, int32_t page);

static inline int tl_blocks(int n_tokens) { return (n_tokens + TL_BLOCK_TOKENS - 1) / TL_BLOCK_TOKENS; }

#endif
