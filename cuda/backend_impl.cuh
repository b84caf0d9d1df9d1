/* cuda/backend_impl.cuh - the CUDA backend's own struct and what its host parts need of each other.
 * Owner: the backend. Thread: worker. */
#ifndef TLC_BACKEND_IMPL_CUH
#define TLC_BACKEND_IMPL_CUH

#include "attention.cuh"
#include "device.cuh"

#define TLC_DIRECT_ROWS 64 /* rows whose small results kernels write to the host themselves */
#define TLC_SETS_MAX    160

/* Scratch of prepare(). */
struct tlc_scratch {
    uint8_t *slab; /* device */
    size_t bytes;
    int rows_max;
    int64_t k_max;
    float *x, *e; /* [rows_max][d_model], by row of the step */
    float *wide;  /* [rows_max][max(qkv, d_ff)]: by place in the set, as all below */
    float *att;   /* [rows_max][q_dim] */
    float *y;     /* [rows_max][d_model] */
    struct tlc_acts acts;
    float *host_in;                 /* [rows_max][d_model] */
    unsigned long long *best_parts; /* [rows_max][TLC_BEST_PARTS] */
    int32_t *best;                  /* [rows_max]: the best tokens of the last BEST, -1 where a logit was not finite */
    float *results;                 /* [results_max]: what host_out of a step gets */
    int64_t results_max;
    uint8_t *attn; /* attention's own */
};

struct tlc_graphs;

#define TLC_MAPPED_MAX 16 /* pieces of host memory that kernels may write to */

struct tlc_backend {
    struct tl_backend base;
    int device;
    int cc; /* 10 * major + minor */
    int sms;
    size_t shared_max; /* bytes a block may have */
    cudaStream_t stream;
    bool failed; /* a CUDA error after which nothing works any more */
    struct tlc_scratch s;
    struct tlc_graphs *graphs;
    struct {
        uint8_t *data;
        size_t bytes;
    } mapped[TLC_MAPPED_MAX]; /* what host_alloc handed out, as far as there was room to remember it */
    char describe[160];
};

static inline struct tlc_backend *tlc_of(struct tl_backend *be) { return (struct tlc_backend *)be; }

/* Turns a CUDA status into ours; TL_ERR_DEVICE marks the backend as failed unless the error is one of memory. */
enum tl_status tlc_check(struct tlc_backend *c, cudaError_t e, const char *what, struct tl_error *err);

/* step.cu */
enum tl_status tlc_run(struct tlc_backend *c, const struct tl_step *step, struct tl_error *err);
enum tl_status tlc_wait_for_run(struct tlc_backend *c, int runs_left, struct tl_error *err);
enum tl_status tlc_graphs_create(struct tlc_backend *c, struct tl_error *err);
void tlc_graphs_free(struct tlc_graphs *g); /* NULL is fine */

/* rows.cu: kernels over the rows of a set. */
enum tlc_ready { TLC_READY_INT8, TLC_READY_BF16, TLC_READY_F32 };
/* A row's source for a kernel: a row of `a` by step row or by place in the set, then a row of b likewise. */
struct tlc_input {
    const float *a, *b;
    int64_t lda, ldb;
    bool a_by_row, b_by_row; /* indexed by set.rows[i], else by i */
    const float *w;
    int n_a, n;
    bool norm;
    float eps;
};
cudaError_t tlc_rows_ready(const struct tlc_launch *l, enum tlc_ready kind, const struct tlc_input *in, int k_pad,
                           const struct tlc_acts *acts, const struct tlc_set *set);
cudaError_t tlc_rows_embed(const struct tlc_launch *l, const struct tl_mat *m, const struct tlc_step *step,
                           const int32_t *best, float scale, float *x, int d, const struct tlc_set *set);
/* best[i] = the lowest id of the best of logits[i][0 .. vocab); -1 where one is not finite. parts: [rows][TLC_BEST_PARTS] scratch.
 * report, in device memory: where the host wants to hear of it. */
#define TLC_BEST_PARTS 16
struct tlc_report {
    uint64_t
        *written; /* mapped host memory: word i gets number in the high half and the token in the low one; NULL: not */
    uint64_t number;
    uint64_t fence; /* not 0: what kernels in front wrote to the host's memory is to be seen before that */
};
cudaError_t tlc_rows_best(const struct tlc_launch *l, int32_t *best, unsigned long long *parts, const float *logits,
                          int vocab, const struct tlc_report *report, const struct tlc_set *set);
/* x[row] = after( x[row] + before( y[i] ) ); NULL weights of an absent norm come with the flag false. */
cudaError_t tlc_rows_residual(const struct tlc_launch *l, float *x, const float *y, int d, const float *before,
                              const float *after, float eps, const struct tlc_set *set);
cudaError_t tlc_rows_norm(const struct tlc_launch *l, float *dst, const float *src, int d, const float *w, float eps,
                          const struct tlc_set *set); /* both by step row */
/* dst[row] = src[row or i] (NULL: zero); and back: dst[i] = src[row]. */
cudaError_t tlc_rows_put(const struct tlc_launch *l, float *dst, const float *src, bool src_by_row, int d,
                         const struct tlc_set *set);
cudaError_t tlc_rows_take(const struct tlc_launch *l, float *dst, const float *src, int d, const struct tlc_set *set);
cudaError_t tlc_rows_diag(const struct tlc_launch *l, float *x, const float *y, const float *decay, const float *gain,
                          int d, const struct tlc_set *set);
cudaError_t tlc_rows_gate(const struct tlc_launch *l, float *out, const float *x, const float *w, float b, int d,
                          const struct tlc_set *set);
cudaError_t tlc_rows_state(const struct tlc_launch *l, const struct tlc_step *step, bool save, float *x, float *e,
                           int d, int rows_per_page, const struct tlc_set *set);

/* linear_one.cu: y = m times one row that is not ready yet. */
bool tlc_linear_one_fits(const struct tlc_backend *c, const struct tl_mat *m, const struct tlc_input *in);
cudaError_t tlc_linear_one(const struct tlc_launch *l, const struct tl_mat *m, const struct tlc_input *in,
                           const struct tlc_set *set, struct tlc_out out);
cudaError_t tlc_linear_one_init(void); /* shared memory limits of the kernels; once per process and device */

#endif
