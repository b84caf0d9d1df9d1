/* cuda/step.cuh - a step being made ready: what the block of bytes (step.cu) and the kernels of the ops (ops.cu) share.
 * Owner: tlc_run(), for the time of one call. Thread: worker. */
#ifndef TLC_STEP_CUH
#define TLC_STEP_CUH

#include "backend_impl.cuh"

struct header { /* at the start of the block */
    struct tlc_report report;
};

/* Where the parts of the block are; all of it but the page tables follows from the shape. */
struct layout {
    size_t rows, seqs, counts, draws, pages;
    size_t set_rows[TLC_SETS_MAX], plans[TLC_SETS_MAX];
    size_t end; /* of the page tables */
};

struct running {
    struct tlc_backend *c;
    const struct tl_step *step;
    const struct tl_net *net;
    const struct tl_arch_spec *spec;
    struct layout at;
    int caps[TLC_SETS_MAX];
    bool attends[TLC_SETS_MAX];
    bool solo; /* the step is one that solo.cu takes */
    uint32_t cls[TLC_SETS_MAX];
    struct tlc_step view;
    struct tlc_launch launch;
    int64_t results_used;
    const float *logits;  /* of the last HEAD */
    const uint8_t *block; /* device */
    int staging;
    bool reports;    /* the tokens are all there is to say of the step, or the rest is written before them */
    bool keeps_rows; /* by kernels, to the host's memory */
    cudaError_t e;   /* the first error of a launch; launches after it are skipped */
};

/* Launch the kernels of all ops; what they need of the step besides its shape is in the block. r->e: the first error. */
void tlc_run_ops(struct running *r);

/* Floats of a row of the op's result; 0: none. */
int64_t tlc_result_width(const struct running *r, enum tl_op_kind kind);
/* Device floats of the next result; its place depends on the shape alone. */
float *tlc_result(struct running *r, int64_t n);
/* Is the result small, and does its place in host memory take a kernel's writes? */
bool tlc_direct(const struct running *r, const struct tl_op *op);

static inline bool tlc_chooses(const struct tl_op *op) { return op->kind == TL_OP_BEST || op->kind == TL_OP_DRAW; }

/* Once something has failed, nothing more is started. */
#define DO(r, call)                                                                                                    \
    do {                                                                                                               \
        if ((r)->e == cudaSuccess)                                                                                     \
            (r)->e = (call);                                                                                           \
    } while (0)

#endif
