/* cuda/linear_wgmma.cuh - the kernel of linear_large.cu for INT8 on sm_90a: tiles fetched by the tensor copy engine, products
 * by warpgroups. See there. */
#ifndef TLC_LINEAR_WGMMA_CUH
#define TLC_LINEAR_WGMMA_CUH

#include "linear_ends.cuh"
#include "wgmma.cuh"

enum {
    WG_ROWS = 128,   /* stored rows of a tile: two warpgroups of 64 */
    WG_THREADS = 384 /* 8 warps that multiply; 4 of which one thread fetches and the rest give their registers away */
};
__host__ __device__ constexpr int wg_stage(int tokens) { return (WG_ROWS + tokens) * WG_K; }

/* What the tokens of a tile need at the end; two of it, because a warp may begin a tile while another ends the last. */
template <int TOKENS> struct wg_side {
    float scale[TOKENS];
    int at[TOKENS];
};
__host__ __device__ constexpr int wg_shared(int tokens, int stages)
{
    return 1024 + stages * (wg_stage(tokens) + 16) + 2 * 8 * tokens; /* alignment, ring, barriers, sides */
}

/* A persistent grid over the tiles of 128 stored rows x TOKENS, tokens fastest. */
template <int TOKENS, int STAGES>
__global__ static void __launch_bounds__(WG_THREADS, 1)
    by_wgmma(const struct linear p, const __grid_constant__ CUtensorMap w_map,
             const __grid_constant__ CUtensorMap x_map)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    enum {
        STAGE = wg_stage(TOKENS),
        W_BYTES = WG_ROWS * WG_K,
        NT = TOKENS / 8,
        G = 8 /* fragments finished at a time: as many as registers allow */
    };
    constexpr int FEW = 40, MANY = 232; /* registers of a thread that fetches, of one that multiplies */
    extern __shared__ uint8_t raw[];
    uint32_t base = (shared_at(raw) + 1023) & ~1023u, full = base + STAGES * STAGE, empty = full + 8 * STAGES;
    struct wg_side<TOKENS> *sides = (struct wg_side<TOKENS> *)(raw + (empty + 8 * STAGES - shared_at(raw)));
    int warp = warp_of_block(), lane = threadIdx.x & 31;
    int n = *p.n, n_k = (p.k_bytes + WG_K - 1) / WG_K;
    int across = (n + TOKENS - 1) / TOKENS, n_tiles = across * ((p.n_stored + WG_ROWS - 1) / WG_ROWS);
    int stage = 0, phase = 0;

    tlc_go();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW));
        if (threadIdx.x == WG_THREADS - 128) {
            int early = 0; /* stages whose weights were asked for before the wait */
            if ((int)blockIdx.x < n_tiles)
                for (; early < STAGES && early < n_k; early++) {
                    barrier_expect(full + 8 * early, STAGE);
                    fetch_box(base + early * STAGE, &w_map, early * WG_K, blockIdx.x / across * WG_ROWS,
                              full + 8 * early);
                }
            tlc_wait();
            for (int tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
                int row0 = tile / across * WG_ROWS, token0 = tile % across * TOKENS;
                for (int kt = 0; kt < n_k; kt++) {
                    uint32_t to = base + stage * STAGE, barrier = full + 8 * stage;
                    if (early > 0) {
                        early--;
                    } else {
                        barrier_wait(empty + 8 * stage, phase ^ 1);
                        barrier_expect(barrier, STAGE);
                        fetch_box(to, &w_map, kt * WG_K, row0, barrier);
                    }
                    fetch_box(to + W_BYTES, &x_map, kt * WG_K, token0, barrier);
                    step_on<STAGES>(stage, phase);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MANY));
        uint64_t w_first = operand(base + warp / 4 * 64 * WG_K), x_first = operand(base + W_BYTES);
        for (int tile = blockIdx.x, turn = 0; tile < n_tiles; tile += gridDim.x, turn ^= 1) {
            int row0 = tile / across * WG_ROWS + warp * 16, token0 = tile % across * TOKENS, before = 0;
            int token = token0 + threadIdx.x, at = -1;
            struct wg_side<TOKENS> *side = sides + turn;
            struct ends<G> e;
            int acc[NT][4];
            float scale = 1.0f;
            ask_w_scales(p, e, row0);
            if (threadIdx.x < TOKENS)
                at = row_of(p, token, n);
            tlc_wait(); /* once it has returned, it does at once */
            if (at >= 0 && p.x_scale)
                scale = p.x_scale[token];
            for (int kt = 0; kt < n_k; kt++) {
                uint64_t w = operand_behind(w_first, stage * STAGE), x = operand_behind(x_first, stage * STAGE);
                barrier_wait(full + 8 * stage, phase);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int k = 0; k < WG_K; k += 32)
                    wgmma(acc, operand_behind(w, k), operand_behind(x, k), k > 0 ? 1 : kt);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                if (kt > 0) { /* the stage before this one has been read */
                    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                    if (lane == 0)
                        barrier_arrive(empty + 8 * before);
                }
                before = stage;
                step_on<STAGES>(stage, phase);
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            settle(acc);
            if (lane == 0)
                barrier_arrive(empty + 8 * before);
            if (threadIdx.x < TOKENS) {
                side->scale[threadIdx.x] = scale;
                side->at[threadIdx.x] = at;
            }
            tlc_row_barrier();
#pragma unroll
            for (int j = 0; j < NT; j += G) {
#pragma unroll
                for (int i = 0; i < 2 * G; i++) {
                    e.scale[i] = side->scale[8 * j + token_of(i)];
                    e.at[i] = row0 < p.n_stored ? side->at[8 * j + token_of(i)] : -1;
                }
                ask_residual(p, e, row0);
                finish<G>(p, e, &acc[j], row0);
            }
        }
        tlc_wait(); /* where there was no tile: the end of this kernel means the end of those before it */
    }
#endif
}

#endif
