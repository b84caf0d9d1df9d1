/* cuda/ahead.cuh - weights of a product that comes soon, on their way into L2 while kernels in front of it run: of few
 * rows, the reading of weights is what takes time. */
#ifndef TLC_AHEAD_CUH
#define TLC_AHEAD_CUH

#include "device.cuh"

#define TLC_AHEAD_ROWS 64                 /* more rows than this have enough else to do */
#define TLC_AHEAD_MAX  ((size_t)24 << 20) /* bytes; more would push others out */

struct tlc_ahead {
    const uint8_t *data;
    int bytes; /* of each part, a multiple of 16; 0: nothing to do */
};

/* In so many parts. What tlc_linear_large() reads. */
static inline struct tlc_ahead tlc_ahead_of(const struct tlc_launch *l, const struct tl_mat *m, int n_rows, int parts)
{
    struct tlc_ahead a = {};
    size_t size = m->wtype == TL_W_F32 ? 4 : m->wtype == TL_W_BF16 ? 2 : 1;
    size_t bytes = (size_t)(m->n_tiles * 16 * m->k_pad) * size;
    if (l->cc < 90 || n_rows > TLC_AHEAD_ROWS)
        return a;
    a.data = m->wtype == TL_W_F32    ? (const uint8_t *)m->rows32
             : m->wtype == TL_W_BF16 ? (const uint8_t *)m->rows16
                                     : (const uint8_t *)m->rows8;
    bytes = bytes < TLC_AHEAD_MAX ? bytes : TLC_AHEAD_MAX;
    a.bytes = (int)(bytes / (size_t)parts / 16 * 16);
    return a;
}

#ifdef __CUDACC__
/* By one thread. */
__device__ static __forceinline__ void tlc_ahead_fetch(const struct tlc_ahead &a, int part)
{
#if __CUDA_ARCH__ >= 900
    if (a.bytes > 0)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(a.data + (int64_t)part * a.bytes), "r"(a.bytes)
                     : "memory");
#endif
}
#endif

#endif
