/* cuda/wgmma.cuh - the instructions of sm_90a that the many-rows products need: barriers in shared memory, the
 * tensor copy engine and the products of a warpgroup. */
#ifndef TLC_WGMMA_CUH
#define TLC_WGMMA_CUH

#include <cuda.h>
#include <stdint.h>
#include <string.h>

#define WG_K 128 /* bytes of k of a stage: one span of the 128-byte swizzle */

__device__ static __forceinline__ uint32_t shared_at(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
/* The warp of the block, the same in all lanes as the compiler sees it: what follows a branch on it may then use uniform registers,
 * as the operands of wgmma must. With them, products follow each other at once; without, 100 cycles apart. */
__device__ static __forceinline__ int warp_of_block() { return __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ static __forceinline__ void barrier_init(uint32_t at, int count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ static __forceinline__ void barrier_expect(uint32_t at, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ static __forceinline__ void barrier_arrive(uint32_t at)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ static __forceinline__ void barrier_wait(uint32_t at, int parity)
{
    asm volatile("{\n.reg .pred p;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra done;\nbra again;\ndone:\n}\n" ::"r"(at),
                 "r"(parity)
                 : "memory");
}
/* The same place in the shared memory of another block of the cluster. */
__device__ static __forceinline__ uint32_t far_at(uint32_t at, int rank)
{
    uint32_t far;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(at), "r"(rank));
    return far;
}
/* For what has been read: orders no writes, and so costs no fence. */
__device__ static __forceinline__ void barrier_arrive_far(uint32_t far)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(far) : "memory");
}
/* For what other blocks have sent. */
__device__ static __forceinline__ void barrier_wait_far(uint32_t at, int parity)
{
    asm volatile("{\n.reg .pred p;\nagain:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra done;\nbra again;\ndone:\n}\n" ::"r"(at),
                 "r"(parity)
                 : "memory");
}
/* Four sums, int or float, to another block; its barrier counts their bytes. Both are places there. (A barrier of the
 * cluster instead would make each thread wait for all that it has ever stored.) */
template <typename T> __device__ static __forceinline__ void send(uint32_t to, const T (&v)[4], uint32_t barrier)
{
    uint32_t bits[4];
    static_assert(sizeof(v) == sizeof(bits), "words");
    memcpy(bits, v, sizeof(bits));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "r"(bits[0]), "r"(bits[1]), "r"(bits[2]), "r"(bits[3]), "r"(barrier)
                 : "memory");
}
/* Have bytes (a multiple of 16) brought into L2. */
__device__ static __forceinline__ void fetch_ahead(const uint8_t *from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
/* Two warpgroups that take turns: turn 0 or 1 is waited for by one and given by the other. */
__device__ static __forceinline__ void turn_wait(int turn)
{
    asm volatile("barrier.sync %0, 256;" ::"r"(turn + 1) : "memory");
}
__device__ static __forceinline__ void turn_give(int turn)
{
    asm volatile("barrier.arrive %0, 256;" ::"r"(turn + 1) : "memory");
}
/* Have a map at hand before it is needed. */
__device__ static __forceinline__ void fetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/* The next stage of a ring; phase is the parity of the turn. */
template <int STAGES> __device__ static __forceinline__ void step_on(int &stage, int &phase)
{
    if (++stage == STAGES) {
        stage = 0;
        phase ^= 1;
    }
}
/* Fetch a box of WG_K bytes x the map's rows, from byte k of row `row` on; outside of the matrix is zero. */
__device__ static __forceinline__ void fetch_box(uint32_t to, const CUtensorMap *map, int k, int row, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(to),
        "l"(map), "r"(k), "r"(row), "r"(barrier)
        : "memory");
}

/* The same into the shared memory of every block of the cluster that has a bit in `to_blocks`, and to the barrier there. */
__device__ static __forceinline__ void fetch_box_for(uint32_t to, const CUtensorMap *map, int k, int row,
                                                     uint32_t barrier, uint16_t to_blocks)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(k), "r"(row), "r"(barrier), "h"(to_blocks)
                 : "memory");
}

/* Rows of 128 bytes in shared memory, swizzled, as a K-major operand: address, 1, 1024 bytes between groups of 8 rows,
 * mode 1. */
__device__ static __forceinline__ uint64_t operand(uint32_t at)
{
    return (uint64_t)((at & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* The operand `bytes` (a multiple of 16) behind another one. */
__device__ static __forceinline__ uint64_t operand_behind(uint64_t first, int bytes) { return first + (bytes >> 4); }

/* d [64 rows x N tokens] = a b + (keep ? d : 0) over 32 bytes of k; a warp holds 16 rows, as fragments of m16n8. */
#define TILE1(c, j) c(d[j][0]), c(d[j][1]), c(d[j][2]), c(d[j][3])
#define TILE4(c, j) TILE1(c, j), TILE1(c, j + 1), TILE1(c, j + 2), TILE1(c, j + 3)
__device__ static __forceinline__ void wgmma(int (&d)[8][4], uint64_t a, uint64_t b, int keep)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                 "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, p;\n}\n"
                 : TILE4("+r", 0), TILE4("+r", 4)
                 : "l"(a), "l"(b), "r"(keep));
}
__device__ static __forceinline__ void wgmma(int (&d)[16][4], uint64_t a, uint64_t b, int keep)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                 "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, "
                 "%37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, "
                 "%55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "%64, %65, p;\n}\n"
                 : TILE4("+r", 0), TILE4("+r", 4), TILE4("+r", 8), TILE4("+r", 12)
                 : "l"(a), "l"(b), "r"(keep));
}
__device__ static __forceinline__ void wgmma(int (&d)[32][4], uint64_t a, uint64_t b, int keep)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                 "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, "
                 "%37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, "
                 "%55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, "
                 "%73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, "
                 "%91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, "
                 "%107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, "
                 "%122, %123, %124, %125, %126, %127}, "
                 "%128, %129, p;\n}\n"
                 : TILE4("+r", 0), TILE4("+r", 4), TILE4("+r", 8), TILE4("+r", 12), TILE4("+r", 16), TILE4("+r", 20),
                   TILE4("+r", 24), TILE4("+r", 28)
                 : "l"(a), "l"(b), "r"(keep));
}
__device__ static __forceinline__ void wgmma(float (&d)[8][4], uint64_t a, uint64_t b, int keep)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                 "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, p, 1, 1, 0, 0;\n}\n"
                 : TILE4("+f", 0), TILE4("+f", 4)
                 : "l"(a), "l"(b), "r"(keep));
}
__device__ static __forceinline__ void wgmma(float (&d)[16][4], uint64_t a, uint64_t b, int keep)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                 "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, "
                 "%37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, "
                 "%55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "%64, %65, p, 1, 1, 0, 0;\n}\n"
                 : TILE4("+f", 0), TILE4("+f", 4), TILE4("+f", 8), TILE4("+f", 12)
                 : "l"(a), "l"(b), "r"(keep));
}
__device__ static __forceinline__ void wgmma(float (&d)[4][4], uint64_t a, uint64_t b, int keep)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "%16, %17, p, 1, 1, 0, 0;\n}\n"
                 : TILE4("+f", 0)
                 : "l"(a), "l"(b), "r"(keep));
}
#undef TILE1
#undef TILE4

/* After the wait for the products: no use of the sums moves above it. */
template <int N> __device__ static __forceinline__ void settle(int (&d)[N][4])
{
#pragma unroll
    for (int j = 0; j < N; j++)
        asm volatile("" : "+r"(d[j][0]), "+r"(d[j][1]), "+r"(d[j][2]), "+r"(d[j][3])::"memory");
}
template <int N> __device__ static __forceinline__ void settle(float (&d)[N][4])
{
#pragma unroll
    for (int j = 0; j < N; j++)
        asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
}
#endif

#endif
