/* engine/seq.h - one growing sequence and the immutable handles that sequences leave behind.
 *
 * A sequence owns a table (KV slot x block -> page). What it shares with the handle it started from is borrowed: the table
 * names the handle's pages, the sequence holds one reference on the handle, and no page is touched until the first write.
 * The first write into a block that is shared and not full copies that block, one page per slot (at most once in its life).
 *
 *   tl_seq_start      empty, or a clone of a handle (cost: one reference and one table copy)
 *   tl_seq_extend     pages for positions [len, new_len) exist and are its own
 *   tl_seq_resume_to  pages for the slots that a deeper run writes, for positions below n
 *   tl_seq_to_handle  freeze: the handle takes over the pages, the sequence goes on as its clone
 *   tl_seq_end        give back pages, reservation, reference
 *
 * Memory is promised before the first page is taken (tl_seq_need -> tl_kv_reserve), so none of these can run out of it
 * half-way. Thread: worker. */
#ifndef TL_SEQ_H
#define TL_SEQ_H

#include "kv_store.h"
#include "tinyloop.h"

struct tl_handle {
    enum tl_handle_kind kind;
    struct tl_model *model;
    struct tl_kv *kv;
    int refs;
    int n_users;     /* sequences whose base it is */
    int32_t *tokens; /* [n_tokens] */
    int n_tokens, n_loops, max_loops, window;
    int n_slots, n_blocks;
    int first_block;      /* blocks below were outside the window */
    int32_t *pages;       /* [n_slots][n_blocks], -1 below first_block */
    int32_t *state_pages; /* [n_state_pages] RESUME: all rows; else NULL */
    int n_state_pages;
    float *last_row;         /* [d_model] stream of the last token before the head */
    int64_t resume_reserved; /* RESUME: pages promised to one resume to max_loops; 0 while one uses them */
    int64_t resume_pages;    /* RESUME: size of that promise */
};

struct tl_seq {
    struct tl_kv *kv;
    int len; /* positions whose KV is written at every slot of its depth */
    int n_loops, window;
    int n_slots, stride;  /* table [n_slots][stride] */
    int32_t *pages;       /* -1 = none */
    int32_t *state_pages; /* own, while building a RESUME handle; else NULL */
    int n_state_pages;
    struct tl_handle *base; /* what it was cloned from, one reference; NULL = nothing */
    int shared_len;         /* positions taken from base */
    int shared_blocks;      /* blocks of these still borrowed */
    int shared_loops;       /* loops of base that are borrowed */
    bool shared_coda;
    int first_block;          /* blocks below are released (window) */
    int64_t reserved;         /* pages it may still take */
    struct tl_handle *lender; /* its resume promise is in use by this sequence; NULL = none */
};

struct tl_seq_plan {        /* everything that decides how many pages a sequence can ever need */
    struct tl_handle *base; /* NULL = from nothing */
    int base_len;           /* positions used of it; a multiple of the block or all of it */
    int n_loops;            /* > base->n_loops = resume */
    int window;
    int len_max;     /* positions it may grow to */
    bool keep_state; /* it keeps the streams of its first n_state_rows rows */
    int n_state_rows;
    bool keep_then_grow; /* it becomes a handle and goes on: one more copy of the tail block */
};
/* Pages to reserve. *of_lender: the part that base's resume promise covers. */
int64_t tl_seq_need(const struct tl_kv *kv, const struct tl_seq_plan *p, int64_t *of_lender);

/* Takes `reserved` pages' promise over from the caller (already reserved in kv). use_lender: base's promise pays its part. */
enum tl_status tl_seq_start(struct tl_seq *s, struct tl_kv *kv, const struct tl_seq_plan *p, int64_t reserved,
                            bool use_lender, struct tl_error *err);
enum tl_status tl_seq_extend(struct tl_seq *s, int new_len, struct tl_error *err);
void tl_seq_resume_to(struct tl_seq *s, int n);
void tl_seq_commit(struct tl_seq *s,
                   int new_len); /* the rows below new_len are computed; releases blocks left of the window */
void tl_seq_truncate(struct tl_seq *s, int n); /* forget positions >= n; their slots may be rewritten */
/* max_loops: of a RESUME handle (its resume promise is reserved here), ignored otherwise. tokens: [s->len], copied. */
struct tl_handle_make {
    enum tl_handle_kind kind;
    struct tl_model *model;
    const int32_t *tokens;
    const float *last_row; /* copied */
    int max_loops;
};
enum tl_status tl_seq_to_handle(struct tl_seq *s, const struct tl_handle_make *mk, struct tl_handle **out,
                                struct tl_error *err);
void tl_seq_end(struct tl_seq *s); /* fine on a zeroed struct, and twice */

/* Pages of a resume promise: prefix of n_tokens from loops_used to max_loops. */
int64_t tl_resume_pages(const struct tl_kv *kv, int n_tokens, int loops_used, int max_loops, int window);

#endif
