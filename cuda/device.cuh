/* cuda/device.cuh - what the files of the CUDA backend share: the step as the device sees it, matrices, activations, launches.
 *
 * The numeric law. What a kernel computes for a row depends on that row, on the stored KV of its sequence and on the weights:
 * - Integer sums are exact in any order.
 * - A float sum over k of a BF16 matrix has slices of 256; inside a slice a chain of m16n8k16 products ascending from zero; slices
 *   are added in ascending order, from the first slice's value on.
 * - Attention: one page of 64 keys is one term (m, l, acc), computed from scratch; terms are folded in ascending order.
 * - A reduction over a row is done in the fixed tree that rows.cuh has for its operation, whatever kernel it is part of.
 * - Compiled with --fmad=false: a multiply and an add fuse only where the code says so. No float atomics.
 *
 * Kernels of one stream are launched with programmatic dependent launch: before tlc_wait() a kernel may only read what no
 * kernel writes (weights, the step block); everything else comes after it. Buffers named here live as long as the backend.
 * Thread: worker. */
#ifndef TLC_DEVICE_CUH
#define TLC_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

extern "C" {
#include "backend.h"
#include "mem.h"
}

struct tl_buf {
    uint8_t *data; /* device */
    size_t bytes;
};

/* A weight matrix. INT4 is kept twice: `tiles` for few rows, `rows8` (INT8, natural order) for more; an INT8 value of an
 * INT4 matrix is group_scale * q (at most 105). A gated matrix (gate rows, then as many up rows) is stored in blocks of 16 rows:
 * 8 gate rows, then the 8 up rows of the same outputs. All other matrices keep their row order. */
struct tl_mat {
    enum tl_wtype wtype;
    bool gated;
    int64_t n_out, n_in; /* as in the source */
    int64_t k_pad;       /* n_in rounded up to 64; padded with zeros */
    int64_t n_tiles;     /* of 16 stored rows, padded with zero rows */
    size_t tile_bytes, bytes;
    uint8_t *tiles;   /* INT4, INT8: [n_tiles][tile_bytes], see pack.cu */
    int8_t *rows8;    /* INT4, INT8: [n_tiles * 16][k_pad] */
    uint16_t *rows16; /* BF16: [n_tiles * 16][k_pad] */
    float *rows32;    /* F32: [n_tiles * 16][k_pad] */
    float *row_scale; /* integers: [n_tiles * 16] in stored order */
};

/* ---- the step as the device sees it; renewed by one copy per step ---- */

struct tlc_row {
    int32_t seq, pos, token, reserved;
};
struct tlc_seq {
    int32_t pages_at; /* page of (slot, block) = pages[pages_at + slot * stride + block] */
    int32_t stride;
    int32_t window;   /* 0 = all */
    int32_t state_at; /* state page of block b = pages[state_at + b]; -1 = none */
};

/* A set of rows: device indices into rows, device count, and the largest count this launch must cover (a graph is launched
 * for any count up to it). */
struct tlc_set {
    const int32_t *rows;
    const int32_t *n;
    int n_cap;
};

struct tlc_step {
    const struct tlc_row *rows;
    const struct tlc_seq *seqs;
    const int32_t *pages;
    uint8_t *arena;
    int64_t page_bytes;
    int kv_f32; /* 1: pages hold F32, else F16 */
};
/* A page: K as [n_kv_heads][64][d_head], then V as [n_kv_heads][64][d_head]. */

/* Rows ready to be the input of a linear layer, indexed by their place in the set; padded with zeros to k_pad. */
struct tlc_acts {
    int8_t *q;        /* [rows][ld] */
    float *scale;     /* [rows] */
    __nv_bfloat16 *b; /* [rows][ld] */
    float *f;         /* [rows][ld] */
    int64_t ld;       /* elements; a multiple of 64 */
};

/* What becomes of the product y [n][n_out] of a linear layer. */
enum tlc_epi {
    TLC_EPI_STORE,    /* out[i * ld + o] = y */
    TLC_EPI_SILU_MUL, /* gated matrix: out[i * ld + o] = silu(gate) * up, o < n_out / 2 */
    TLC_EPI_RELU2,    /* out[i * ld + o] = 0.5 * max(y, 0)^2 */
    TLC_EPI_RESIDUAL  /* out[set.rows[i] * ld + o] += y: out is the stream x */
};
struct tlc_out {
    enum tlc_epi epi;
    float *data;
    int64_t ld;
};

/* How the host hears of a row's best token. */
struct tlc_report {
    uint64_t
        *written; /* mapped host memory: word i gets number in the high half, the token in the low one; NULL: not */
    uint64_t number;
    uint64_t fence; /* not 0: what kernels in front wrote to the host's memory is to be seen before that */
};

/* ---- launches ---- */

struct tlc_launch {
    cudaStream_t stream;
    bool dependent;    /* programmatic: may start before the kernel in front has ended (sm_90 on) */
    int sms;           /* multiprocessors */
    int cc;            /* 10 * major + minor */
    size_t shared_max; /* bytes of shared memory that a block may have */
};

template <typename... P, typename... A>
static inline cudaError_t tlc_launch(const struct tlc_launch *l, void (*kernel)(P...), dim3 grid, dim3 block,
                                     size_t shared, A... args)
{
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute at;
    c.gridDim = grid;
    c.blockDim = block;
    c.dynamicSmemBytes = shared;
    c.stream = l->stream;
    at.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    at.val.programmaticStreamSerializationAllowed = 1;
    c.attrs = &at;
    c.numAttrs = l->dependent ? 1 : 0;
    /* All kernels ask for the same division of an SM's memory: a change of it waits until the SM is empty. */
    cudaError_t e = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                         cudaSharedmemCarveoutMaxShared);
    if (e != cudaSuccess)
        return e;
    return cudaLaunchKernelEx(&c, kernel, P(args)...);
}

#ifdef __CUDACC__
/* Everything before is done and visible. */
__device__ static __forceinline__ void tlc_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/* The next kernel may start (its part before tlc_wait). */
__device__ static __forceinline__ void tlc_go()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

/* ---- the parts ---- */

/* pack.cu */
enum tl_status tlc_mat_create(struct tl_backend *be, const struct tl_mat_src *src, struct tl_mat **out,
                              struct tl_error *err);
void tlc_mat_free(struct tl_backend *be, struct tl_mat *m);

/* linear_large.cu: y = m times rows acts[0 .. n), for any number of rows; bits equal those of linear_one.cu and linear_few.cu. */
cudaError_t tlc_linear_large(const struct tlc_launch *l, const struct tl_mat *m, const struct tlc_acts *a,
                             const struct tlc_set *set, struct tlc_out out);

/* attention.cu: see there. */

#endif
