/* cuda/weights_ring.cuh - weights on their way through shared memory, for the kernel of one row: barriers, bulk copies, matrix
 * products. */
#ifndef TLC_WEIGHTS_RING_CUH
#define TLC_WEIGHTS_RING_CUH

#include "device.cuh"

__device__ static __forceinline__ uint32_t shared_at(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ static __forceinline__ void bar_init(uint64_t *bar, int n)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_at(bar)), "r"(n) : "memory");
}

__device__ static __forceinline__ void bar_arrive(uint64_t *bar)
{
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" ::"r"(shared_at(bar)) : "memory");
}

__device__ static __forceinline__ void bar_wait(uint64_t *bar, int parity)
{
    uint32_t done = 0;
    while (!done) {
#if __CUDA_ARCH__ >= 900
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(shared_at(bar)), "r"(parity)
                     : "memory");
#else
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(shared_at(bar)), "r"(parity)
                     : "memory");
#endif
    }
}

/* Called by one whole warp: lane l < n copies `bytes` (a multiple of 16) from src + l * src_step to dst + l * dst_step; the
 * barrier counts one arrival and the bytes. */
__device__ static __forceinline__ void copy_rows(uint8_t *dst, int dst_step, const uint8_t *src, int64_t src_step,
                                                 int n, int bytes, uint64_t *bar)
{
    int lane = threadIdx.x & 31;
#if __CUDA_ARCH__ >= 900
    if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_at(bar)), "r"(n * bytes)
                     : "memory");
    __syncwarp();
    if (lane < n)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_at(dst + lane * dst_step)),
                     "l"(src + lane * src_step), "r"(bytes), "r"(shared_at(bar))
                     : "memory");
#else
    for (int r = 0; r < n; r++)
        for (int i = lane * 16; i < bytes; i += 512)
            *(uint4 *)(dst + r * dst_step + i) = *(const uint4 *)(src + r * src_step + i);
    __syncwarp();
    if (lane == 0)
        bar_arrive(bar);
#endif
}

/* ---- products: weights are the 16-row operand, rows of activations the columns ---- */

__device__ static __forceinline__ void mma_s8(int d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, const int c[4])
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

__device__ static __forceinline__ void mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* 16 times the weights of a word of an INT4 tile (pack.cu). */
__device__ static __forceinline__ uint32_t low_q4(uint32_t w)
{
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" /* (a & b) ^ c; the compiler makes two of it */
        : "=r"(w)
        : "r"(w << 4), "r"(0xf0f0f0f0u), "r"(0x80808080u));
    return w;
}
__device__ static __forceinline__ uint32_t high_q4(uint32_t w) { return w & 0xf0f0f0f0u; }

#endif
