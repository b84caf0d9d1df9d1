/* engine/backend.h - all that the engine may ask of a device.
 *
 * A backend knows rows and layers. What a loop is, which rows run how deep and where a sequence's KV lives is decided in
 * forward.c and kv_store.c; a backend executes a flat list of ops over sets of rows.
 *
 * The exactness contract: what an op computes for a row depends on that row, on the stored KV of its sequence and on the
 * weights. It must not depend on the other rows, on how many there are, on the number of threads or on the instruction set.
 *
 * Units: sizes and offsets are bytes, positions are tokens. Pointers are never NULL unless said so.
 * Thread: worker, for every entry. Host memory in a step is read and written before run() returns, or, on a device that
 * runs ahead, before sync() or a wait() for that run returns. */
#ifndef TL_BACKEND_H
#define TL_BACKEND_H

#include "arch.h"
#include "sampler_draw.h"
#include "status.h"

#define TL_BLOCK_TOKENS 64  /* tokens of one KV block */
#define TL_SPLIT_KEYS   256 /* attention splits: keys [256 i, 256 (i+1)) at absolute positions */

struct tl_backend;
struct tl_buf; /* device memory */
struct tl_mat; /* a weight matrix in the backend's own layout */

/* ---- weights ---- */

/* Row-major source of a matrix [rows, n_in]; rows of all parts are stacked in order (q, k, v; gate, up).
 * F32: float. BF16: uint16_t. INT8: int8_t and row_scale. INT4: two values a byte, even input in the low nibble, two's
 * complement -7..7; group_scale: values 1..15, one per 32 inputs, two a byte, even group low; row_scale.
 * w = row_scale * q   or   row_scale * group_scale * q. */
struct tl_mat_part {
    const void *data;
    const float *row_scale;     /* [rows]; NULL for F32, BF16 */
    const uint8_t *group_scale; /* [rows][ceil(n_groups / 2)]; NULL but for INT4 */
    int64_t rows;
};
struct tl_mat_src {
    enum tl_wtype wtype; /* the same for all parts */
    int64_t n_in;
    bool gated; /* half of the rows are gates, the other half what they gate, row by row */
    int n_parts;
    struct tl_mat_part part[3];
};

struct tl_layer {                   /* one layer's weights; unused ones are NULL */
    struct tl_buf *norm[6];         /* n1..n6, F32 [d_model] */
    struct tl_mat *qkv;             /* [(H + 2 G) d_head, d_model]: q rows, k rows, v rows */
    struct tl_mat *o;               /* [d_model, H d_head] */
    struct tl_mat *up;              /* [2 d_ff, d_model]: gate rows, up rows; RELU2: [d_ff, d_model] */
    struct tl_mat *down;            /* [d_model, d_ff] */
    struct tl_buf *q_norm, *k_norm; /* F32; FULL: [H d_head], [G d_head]; HEAD: [d_head] */
    struct tl_buf *qk_bias;         /* F32 [H d_head + G d_head], added before norms and rope */
    struct tl_buf *qkv_bias;        /* F32 [(H + 2 G) d_head] */
    struct tl_mat *value_embed;     /* [vocab, G d_head]: what a token adds to v */
    struct tl_buf *value_gate;      /* F32 [G][32], with value_embed */
};

struct tl_net { /* all weights of a model on one backend */
    struct tl_arch_spec spec;
    enum tl_wtype wtype;     /* of the layers' matrices (the most common one); decides kv_format and BF16 rounding */
    struct tl_layer *layers; /* prelude, core, coda in this order */
    struct tl_mat *embed, *head;               /* [vocab, d_model]; the same matrix where tied */
    struct tl_mat *adapter;                    /* CONCAT_LINEAR: [d_model, 2 d_model], state columns first */
    struct tl_mat *inject_b;                   /* DIAG: [d_model, d_model] */
    struct tl_buf *inject_decay, *inject_gain; /* DIAG: x = decay * x + gain * (B e), F32 [d_model] */
    struct tl_mat *coda_in;                    /* core_to_coda LINEAR: [d_model, d_model] */
    struct tl_buf *final_norm, *loop_norm, *inject_norm, *coda_norm; /* F32 [d_model] */
    struct tl_buf *gate_w;                                           /* exit gate, F32 [d_model] */
    float gate_b;
    struct tl_buf *rope; /* F32 [positions][d_head]: d_head/2 cosines, then d_head/2 sines */
    int rope_positions;
};

/* ---- KV ---- */

/* A page holds keys and values of one KV slot for TL_BLOCK_TOKENS tokens:
 * K as [n_kv_heads][d_head][TL_BLOCK_TOKENS], then V as [n_kv_heads][TL_BLOCK_TOKENS][d_head]. A CUDA backend may order
 * the elements of a page differently; only whole pages are ever copied by the engine. */
enum tl_kv_format { TL_KV_F32, TL_KV_F16 };

struct tl_kv_view {
    struct tl_buf *arena; /* page p starts at p * page_bytes */
    size_t page_bytes;
    enum tl_kv_format format; /* F32 for F32 models, else F16 (rounded to nearest even) */
    int state_rows_per_page;  /* state pages hold F32 rows: x, or x then e where the model injects */
};

/* ---- one step ---- */

struct tl_step_seq {
    const int32_t *pages; /* host: [n_slots][stride], page of (slot, position / TL_BLOCK_TOKENS) */
    int32_t stride;
    int32_t window;             /* row p sees positions max(0, p - window + 1) .. p; 0 = all */
    const int32_t *state_pages; /* host; NULL unless a row of it loads or saves state */
};

#define TL_TOKEN_CHAINED(i) (-1 - (i)) /* the token of head row i of the run in front (BEST, DRAW) */

struct tl_row {
    int32_t seq; /* index into step->seqs */
    int32_t pos;
    int32_t token; /* or TL_TOKEN_CHAINED, on a device that runs ahead */
};

struct tl_row_set { /* indices into step->rows, ascending; rows of one sequence in ascending position */
    const int32_t *rows;
    int n;
};

/* x[r] is row r's stream, e[r] its injected input: F32 rows in the backend's scratch, kept between runs of one step. */
enum tl_op_kind {
    TL_OP_EMBED, /* x = embed[token] * embed_scale */
    TL_OP_START, /* inject != NONE: e = x (normed if inject_norm). Then x = 0, or host_in rows, or unchanged (PRELUDE) */
    TL_OP_INJECT,     /* x = inject(x, e) */
    TL_OP_LAYER,      /* x = block(x); writes KV of the rows at slot, then attends */
    TL_OP_LOOP_NORM,  /* x = loop_norm(x) */
    TL_OP_TO_CODA,    /* x = core_to_coda(x) */
    TL_OP_GATE,       /* host_out[i] = dot(gate_w, x) + gate_b */
    TL_OP_LOAD_STATE, /* x (and e) = state page row of pos */
    TL_OP_SAVE_STATE, /* state page row of pos = x (and e) */
    TL_OP_LOAD_ROWS,  /* x = host_in rows [n][d_model] */
    TL_OP_SAVE_ROWS,  /* host_out [n][d_model] = x */
    TL_OP_HEAD,       /* host_out [n][vocab] = logits; NULL: they stay on the device, for BEST */
    TL_OP_BEST, /* host_tokens [n] = lowest id of the best logit of the HEAD before; -1 where a logit is not finite. Only
                         for a device that runs ahead */
    TL_OP_DRAW  /* the same, but drawn by draws[i] where its temperature is not 0: what tl_draw() returns */
};

struct tl_op {
    enum tl_op_kind kind;
    int set;                            /* index into step->sets */
    const struct tl_layer *layer;       /* LAYER */
    int slot;                           /* LAYER */
    const float *host_in;               /* START, LOAD_ROWS; may be NULL in START (zero or unchanged, by spec) */
    float *host_out;                    /* GATE, SAVE_ROWS, HEAD */
    int32_t *host_tokens;               /* BEST, DRAW */
    const struct tl_draw_params *draws; /* DRAW; read before run() returns */
};

struct tl_step {
    const struct tl_net *net;
    struct tl_kv_view kv;
    const struct tl_row *rows;
    int n_rows; /* <= rows_max of prepare() */
    const struct tl_step_seq *seqs;
    int n_seqs;
    const struct tl_row_set *sets;
    int n_sets;
    const struct tl_op *ops;
    int n_ops;
};

struct tl_backend_ops {
    const char *name; /* "cpu", "cuda": the config value */
    bool runs_ahead;  /* true: one run() per step; false: forward.c hands over one stage at a time, to look for
                                     cancelled rows between loop iterations */
    /* n_threads 0 = as many as the process may use. */
    enum tl_status (*open)(struct tl_backend **out, int n_threads, struct tl_error *err);
    void (*close)(struct tl_backend *be); /* NULL is fine; every buf and mat is freed before */

    enum tl_status (*buf_alloc)(struct tl_backend *be, size_t bytes, struct tl_buf **out, struct tl_error *err);
    void (*buf_free)(struct tl_backend *be, struct tl_buf *b); /* NULL is fine */
    enum tl_status (*buf_write)(struct tl_backend *be, struct tl_buf *dst, size_t off, const void *src, size_t bytes,
                                struct tl_error *err);
    enum tl_status (*buf_read)(struct tl_backend *be, const struct tl_buf *src, size_t off, void *dst, size_t bytes,
                               struct tl_error *err);
    enum tl_status (*buf_copy)(struct tl_backend *be, struct tl_buf *dst, size_t dst_off, const struct tl_buf *src,
                               size_t src_off, size_t bytes, struct tl_error *err); /* dst may be src, ranges apart */

    /* Host memory that the device copies from and to fast; what a step's host_in and host_out should point into. NULL = no
     * memory left. */
    void *(*host_alloc)(struct tl_backend *be, size_t bytes);
    void (*host_free)(struct tl_backend *be, void *p); /* NULL is fine */

    /* Repack a matrix into device memory; src may be released afterwards. */
    enum tl_status (*mat_create)(struct tl_backend *be, const struct tl_mat_src *src, struct tl_mat **out,
                                 struct tl_error *err);
    void (*mat_free)(struct tl_backend *be, struct tl_mat *m); /* NULL is fine */
    size_t (*mat_bytes)(const struct tl_mat *m);               /* device memory it holds */

    /* Take the scratch for steps of up to rows_max rows of this net, before the first run. */
    enum tl_status (*prepare)(struct tl_backend *be, const struct tl_net *net, int rows_max, struct tl_error *err);
    size_t (*scratch_bytes)(const struct tl_backend *be);
    enum tl_status (*run)(struct tl_backend *be, const struct tl_step *step, struct tl_error *err);
    enum tl_status (*sync)(struct tl_backend *be, struct tl_error *err);
    /* All runs but the last runs_left have ended. NULL where runs_ahead is false: run() returns when it is done. */
    enum tl_status (*wait)(struct tl_backend *be, int runs_left, struct tl_error *err);
    void (*mem_info)(const struct tl_backend *be, size_t *bytes_free, size_t *bytes_total);
    /* One line about the device for logs, e.g. "cpu avx2, 2 threads". Lives as long as the backend. */
    const char *(*describe)(const struct tl_backend *be);
};

struct tl_backend { /* first member of every backend's own struct */
    const struct tl_backend_ops *ops;
    char
        passed_over[160]; /* why "auto" did not take a device it would have preferred; empty: there is nothing to say */
    /* Shown every row x[n] that becomes an input of a matrix, by the thread that made it; NULL = nobody looks. CPU only. */
    void (*observe)(void *arg, const struct tl_mat *m, const float *x, int64_t n);
    void *observe_arg;
};

extern const struct tl_backend_ops tl_backend_cpu;
extern const struct tl_backend_ops
    tl_backend_cuda; /* cuda/backend_cuda.cu, or cuda/backend_stub.c where nvcc is missing */

#ifdef TL_TEST_HOOKS
extern const struct tl_backend_ops *tl_backend_test; /* what the device name "test" opens, if set */
#endif

/* Show `fn` every matrix of the net with the shape that the spec asks of it; m is NULL where it is missing. Ends at the first
 * error. Also checks the head counts and widths that every backend can do. */
enum tl_status tl_net_check(const struct tl_net *net,
                            enum tl_status (*fn)(void *ctx, const char *name, const struct tl_mat *m, int64_t n_out,
                                                 int64_t n_in, struct tl_error *err),
                            void *ctx, struct tl_error *err);
enum tl_status tl_fail_shape(struct tl_error *err, const char *name, int64_t n_out, int64_t n_in, int64_t want_out,
                             int64_t want_in);

/* Open by config value: "cpu", "cuda", or "auto" = cuda where a usable card is there, else cpu. */
enum tl_status tl_backend_open(struct tl_backend **out, const char *device, int n_threads, struct tl_error *err);

#endif
