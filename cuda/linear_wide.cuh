/* cuda/linear_wide.cuh - the kernel of linear_large.cu for batches of decode and tall INT8 matrices with k of at most
 * 2,048 on sm_90a. Every multiprocessor has 80 stored rows, and all of their weights are in its shared memory before
 * the wait; behind it 64 tokens pass by. Here tokens are the M operand and stored rows the N operand, which may be any
 * multiple of 16. See linear_large.cu. */
#ifndef TLC_LINEAR_WIDE_CUH
#define TLC_LINEAR_WIDE_CUH

#include "linear_ends.cuh"
#include "wgmma.cuh"

enum {
    WD_ROWS = 80,
    WD_TOKENS = 64,
    WD_K = 16,        /* stages of WG_K bytes that k may have */
    WD_SLOTS = 8,     /* stages of tokens that there is room for */
    WD_THREADS = 160, /* a warpgroup that multiplies, a warp of which one thread fetches */
    WD_W = WD_ROWS * WG_K,
    WD_X = WD_TOKENS * WG_K,
    WD_SHARED = WD_K * WD_W + WD_SLOTS * WD_X + 8 * (WD_K + WD_SLOTS)
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* d [64 tokens x 80 rows] = a b + (keep ? d : 0) over 32 bytes of k; a warp holds 16 tokens, as fragments of m16n8. */
__device__ static __forceinline__ void wgmma(int (&d)[10][4], uint64_t a, uint64_t b, int keep)
{
#define TILE1(j) "+r"(d[j][0]), "+r"(d[j][1]), "+r"(d[j][2]), "+r"(d[j][3])
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n80k32.s32.s8.s8 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                 "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}, "
                 "%40, %41, p;\n}\n"
                 : TILE1(0), TILE1(1), TILE1(2), TILE1(3), TILE1(4), TILE1(5), TILE1(6), TILE1(7), TILE1(8), TILE1(9)
                 : "l"(a), "l"(b), "r"(keep));
#undef TILE1
}
#endif

/* Two neighbouring results of a row of out; o is even. */
__device__ static __forceinline__ void put_two(const struct linear &p, int at, int o, float a, float b)
{
    int width = p.gated ? p.n_out / 2 : p.n_out;
    float *y = p.out.data + (int64_t)at * p.out.ld + o;
    float v[2] = {a, b};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (o + i >= width)
            return;
        switch (p.out.epi) {
        case TLC_EPI_RELU2: y[i] = tlc_relu2(v[i]); break;
        case TLC_EPI_RESIDUAL: y[i] = __fadd_rn(y[i], v[i]); break;
        default: y[i] = v[i];
        }
    }
}

/* The same of a gated tile all of whose outputs exist: the WD_ROWS / 2 results of a row, of which this thread has a quarter. x_scale:
 * of the row; part: its sums in acc are numbers 2 part and 2 part + 1. */
__device__ static __forceinline__ void put_gated(float *y, const int (&acc)[WD_ROWS / 8][4], int part, float x_scale,
                                                 const float (&w_scale)[WD_ROWS / 8][2])
{
    float g[WD_ROWS / 8], u[WD_ROWS / 8], v[WD_ROWS / 8];
#pragma unroll
    for (int i = 0; i < WD_ROWS / 8; i++) { /* blocks of 16 stored rows: 8 gates, then 8 of what they let through */
        int j = i / 2 * 2;
        g[i] = tlc_scaled(acc[j][2 * part + i % 2], x_scale, w_scale[j][i % 2]);
        u[i] = tlc_scaled(acc[j + 1][2 * part + i % 2], x_scale, w_scale[j + 1][i % 2]);
    }
    tlc_silu_mul_all(v, g, u);
#pragma unroll
    for (int i = 0; i < WD_ROWS / 8; i += 2)
        *(float2 *)(y + 4 * i) = make_float2(v[i], v[i + 1]);
}

__global__ static void __launch_bounds__(WD_THREADS, 1)
    by_wide(const struct linear p, const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) uint8_t ring[];
    uint32_t w = shared_at(ring), x = w + WD_K * WD_W, full = x + WD_SLOTS * WD_X, empty = full + 8 * WD_K;
    int warp = warp_of_block(), lane = threadIdx.x & 31, t2 = lane % 4 * 2;
    int row0 = (int)blockIdx.x * WD_ROWS, token0 = (int)blockIdx.y * WD_TOKENS;
    int n = *p.n, n_k = (p.k_bytes + WG_K - 1) / WG_K;

    tlc_go();
    if (token0 >= n) {
        tlc_wait();
        return;
    }
    if (threadIdx.x == 0) { /* each barrier is passed once */
        for (int k = 0; k < WD_K; k++)
            barrier_init(full + 8 * k, 1);
        for (int s = 0; s < WD_SLOTS; s++)
            barrier_init(empty + 8 * s, 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    if (warp == 4) {
        if (lane != 0)
            return;
        fetch_map(&x_map);
        for (int k = 0; k < n_k; k++) {
            barrier_expect(full + 8 * k, WD_W + WD_X);
            fetch_box(w + k * WD_W, &w_map, k * WG_K, row0, full + 8 * k);
        }
        tlc_wait();
        for (int k = 0; k < n_k; k++) {
            if (k >= WD_SLOTS)
                barrier_wait(empty + 8 * (k - WD_SLOTS), 0);
            fetch_box(x + k % WD_SLOTS * WD_X, &x_map, k * WG_K, token0, full + 8 * k);
        }
        return;
    }

    int acc[WD_ROWS / 8][4] = {}, at[2];
    float w_scale[WD_ROWS / 8][2], x_scale[2];
    uint64_t x_first = operand(x), w_first = operand(w);
#pragma unroll
    for (int j = 0; j < WD_ROWS / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            w_scale[j][i] = row0 + 8 * j + t2 + i < p.n_stored ? p.w_scale[row0 + 8 * j + t2 + i] : 0.0f;
#pragma unroll
    for (int h = 0; h < 2; h++)
        at[h] = row_of(p, token0 + warp * 16 + lane / 4 + 8 * h, n);
    tlc_wait();
#pragma unroll
    for (int h = 0; h < 2; h++)
        x_scale[h] = at[h] >= 0 ? p.x_scale[token0 + warp * 16 + lane / 4 + 8 * h] : 0.0f;
    for (int k = 0; k < n_k; k++) {
        uint64_t x_now = operand_behind(x_first, k % WD_SLOTS * WD_X), w_now = operand_behind(w_first, k * WD_W);
        barrier_wait(full + 8 * k, 0);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < WG_K; i += 32)
            wgmma(acc, operand_behind(x_now, i), operand_behind(w_now, i), 1);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (k > 0) { /* the stage before this one has been read */
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (lane == 0 && k - 1 < WD_SLOTS)
                barrier_arrive(empty + 8 * (k - 1));
        }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    settle(acc);
    if (p.gated && p.out.ld % 2 == 0 && row0 + WD_ROWS <= p.n_out) {
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (at[h] >= 0)
                put_gated(p.out.data + (int64_t)at[h] * p.out.ld + row0 / 2 + t2, acc, h, x_scale[h], w_scale);
        return;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (at[h] < 0)
            continue;
#pragma unroll
        for (int j = 0; j < WD_ROWS / 8; j += 2) {
            float v[2][2];
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[i / 2][i % 2] = tlc_scaled(acc[j + i / 2][2 * h + i % 2], x_scale[h], w_scale[j + i / 2][i % 2]);
            if (p.gated) {
                put_two(p, at[h], row0 / 2 + 4 * j + t2, tlc_silu_mul(v[0][0], v[1][0]),
                        tlc_silu_mul(v[0][1], v[1][1]));
            } else {
                put_two(p, at[h], row0 + 8 * j + t2, v[0][0], v[0][1]);
                put_two(p, at[h], row0 + 8 * j + 8 + t2, v[1][0], v[1][1]);
            }
        }
    }
#endif
}

#endif
