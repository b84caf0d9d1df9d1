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
    int32_t *best;                  /* [rows_max]: tokens of the last BEST or DRAW, -1 where a logit was not finite */
    float *results;                 /* [results_max]: what host_out of a step gets */
    int64_t results_max;
};

struct tlc_graphs;
struct tlc_solo;

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
    struct tlc_solo *solo; /* NULL: the model, or the device, is not one for it */
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
/* Rows as the input of m; ahead: its weights for tlc_linear_large() are brought into L2 meanwhile, where the rows are few. */
cudaError_t tlc_rows_ready(const struct tlc_launch *l, const struct tl_mat *m, const struct tlc_input *in, bool ahead,
                           const struct tlc_acts *acts, const struct tlc_set *set);
cudaError_t tlc_rows_embed(const struct tlc_launch *l, const struct tl_mat *m, const struct tlc_step *step,
                           const int32_t *best, float scale, float *x, int d, const struct tlc_set *set);
/* v[i] (of ld floats a row) += 2 sigmoid( gates of the input of qkv ) x the token's row of the layer's value embedding. */
cudaError_t tlc_rows_values(const struct tlc_launch *l, const struct tl_layer *layer, const struct tl_arch_spec *spec,
                            const struct tlc_input *in, const struct tlc_step *step, const int32_t *best, float *v,
                            int64_t ld, const struct tlc_set *set);
/* best[i] = the lowest id of the best of logits[i][0 .. vocab); -1 where one is not finite. parts: [rows][TLC_BEST_PARTS] scratch.
 * report, in device memory: where the host wants to hear of it. */
#define TLC_BEST_PARTS 16
cudaError_t tlc_rows_best(const struct tlc_launch *l, int32_t *best, unsigned long long *parts, const float *logits,
                          int vocab, const struct tlc_report *report, const struct tlc_set *set);
/* The first half of it: parts. */
cudaError_t tlc_rows_best_parts(const struct tlc_launch *l, unsigned long long *parts, const float *logits, int vocab,
                                const struct tlc_set *set);
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

/* draw.cu: tokens that are not simply the best. How, in the words of the kernel; temperature 0 = the best after all. */
struct tlc_draw {
    double inv_temperature; /* 0: the best */
    uint64_t top_p;         /* in units of 2^-64; 0 = off */
    uint64_t weight_min, random;
    int32_t top_k, reserved; /* 0 = off */
};
struct tlc_draw tlc_draw_of(const struct tl_draw_params *p);
/* As tlc_rows_best(), but drawn by draws[i], in device memory: what tl_draw() returns. */
cudaError_t tlc_rows_draw(const struct tlc_launch *l, int32_t *best, unsigned long long *parts, const float *logits,
                          int vocab, const struct tlc_draw *draws, const struct tlc_report *report,
                          const struct tlc_set *set);

/* linear_one.cu: y = m times one row that is not ready yet. */
bool tlc_linear_one_fits(const struct tlc_backend *c, const struct tl_mat *m, const struct tlc_input *in);
cudaError_t tlc_linear_one(const struct tlc_launch *l, const struct tl_mat *m, const struct tlc_input *in,
                           const struct tlc_set *set, struct tlc_out out);
cudaError_t tlc_linear_one_init(void); /* shared memory limits of the kernels; once per process and device */

/* linear_few.cu: as tlc_linear_large(), of few rows. fits: false also where another kernel is faster. */
bool tlc_linear_few_fits(const struct tlc_launch *l, const struct tl_mat *m, int n_cap);
cudaError_t tlc_linear_few(const struct tlc_launch *l, const struct tl_mat *m, const struct tlc_acts *acts,
                           const struct tlc_set *set, struct tlc_out out);
cudaError_t tlc_linear_few_init(size_t shared_max); /* as above */

/* solo.cu: layers of a step of one row, or of two of different sequences, as one kernel, or the whole step. */
struct tlc_solo_call {
    const struct tl_step *step;
    int from; /* the first op */
    struct tlc_step view;
    struct tlc_set set;
    float *x, *logits; /* logits: where those of a HEAD behind the layers go */
};
/* *out: NULL where net or device are not ones for it. The net stays where it is as long as *out lives. */
cudaError_t tlc_solo_create(struct tlc_backend *c, const struct tl_net *net, struct tlc_solo **out);
void tlc_solo_free(struct tlc_solo *s);                                    /* NULL is fine */
bool tlc_solo_takes(const struct tlc_solo *s, const struct tl_step *step); /* s may be NULL */
/* *n_ops: how many ops that were, from call->from on; *has_head: the last of them is a HEAD. */
cudaError_t tlc_solo_layers(const struct tlc_launch *l, struct tlc_solo *s, const struct tlc_solo_call *call,
                            int *n_ops, bool *has_head);
/* Is a step that it takes nothing but the way from one token to the next? Then tlc_solo_step() runs it, by one launch that needs
 * no copy in front. */
bool tlc_solo_is_all(struct tlc_solo *s, const struct tl_step *step);
cudaError_t tlc_solo_step(const struct tlc_launch *l, struct tlc_solo *s, int n_rows, const struct tlc_step *view,
                          float *x, float *logits, int32_t *best, const struct tlc_report *report);

#endif
