/* engine/cpu/backend_impl.h - the CPU backend's own struct, its scratch, and what a thread needs inside a step.
 * Owner: the backend. Thread: the scratch belongs to the threads of the running step; see each field. */
#ifndef TL_CPU_BACKEND_IMPL_H
#define TL_CPU_BACKEND_IMPL_H

#include "cpu.h"
#include "threads.h"

#define TL_CPU_QUERIES 96 /* queries (rows x q heads of one kv head) that share one pass over a split of keys */

#define TL_CPU_PART_ROWS                                                                                               \
    8 /* rows whose attention may be shared out by splits: more of them keep the threads busy anyway */

/* One thread's attention scratch; d16 = d_head rounded up to 16. */
struct tl_cpu_attn_scratch {
    float *q;                 /* [queries][d_head] */
    float *s;                 /* [queries][TL_SPLIT_KEYS]: scores, then probabilities of a split */
    float *acc;               /* [queries][d16]: sums of a split */
    float *out;               /* [queries][d16]: of the splits so far */
    float *m, *l;             /* [queries]: maximum and sum of the splits so far */
    float *m_split, *l_split; /* [queries]: of the split at hand */
    float *panel;             /* [max(d_head, TL_SPLIT_KEYS)][16] of K or V as F32 */
};

struct tl_cpu_scratch {
    void *slab; /* all of it; NULL before prepare() */
    size_t bytes;
    int rows_max;
    float *x, *e; /* [rows_max][d_model], indexed by row of the step */
    /* Indexed by the row's place in the set: */
    float *wide; /* [rows_max][max(q + 2 kv, up width)]: qkv, then the MLP's inner values */
    float *att;  /* [rows_max][n_heads * d_head] */
    float *y;    /* [rows_max][d_model]: what a linear layer gave */
    struct tl_cpu_acts acts;
    /* Shared-out attention: [rows][n_heads][part_splits][part_floats]: m, l, then acc of a split. NULL where there are at
     * least as many kv heads as threads. */
    float *parts;
    int64_t part_splits, part_floats;
    /* Per thread: */
    float *row; /* [threads][k_max] */
    struct tl_cpu_linear_scratch *linear;
    struct tl_cpu_attn_scratch attn[TL_CPU_THREADS_MAX];
};

struct tl_cpu_backend {
    struct tl_backend base;
    const struct tl_cpu_kernels *k;
    struct tl_cpu_pool *pool;
    int n_threads;
    struct tl_cpu_scratch s;
    char describe[80];
};

/* A step as a thread sees it. */
struct tl_cpu_run {
    struct tl_cpu_backend *be;
    const struct tl_step *step;
    int tid;
};

static inline const float *tl_cpu_f32(const struct tl_buf *b) { return b ? (const float *)b->data : NULL; }

/* Run all ops of a step; called on every thread. */
void tl_cpu_step(const struct tl_cpu_run *r);

/* Store keys and values of a row (after norm and rope) for kv head g; k, v: [d_head]. */
void tl_cpu_kv_store(const struct tl_cpu_run *r, const struct tl_row *row, int slot, int g, const float *k,
                     const float *v);
/* att[i] = attention of row i of the set over its stored keys. qkv: [n][ld], q heads first. This thread's share only. */
void tl_cpu_attention(const struct tl_cpu_run *r, const struct tl_row_set *set, int slot, const float *qkv, int64_t ld,
                      float *att);

#endif
