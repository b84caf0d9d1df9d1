/* cuda/linear_waves.cuh - the kernel of linear_large.cu for BF16 on sm_90a where tiles are many: a persistent grid of
 * pairs of blocks, clusters, over tiles of 256 stored rows x 128 tokens. A block has one half of a tile's stored rows, and
 * fetches one half of its tokens for both: the L2 cache has three quarters to give. Two warpgroups multiply and add up
 * slices; seven warps finish a tile, out of shared memory, while the next one is multiplied; one warp fetches. See
 * linear_large.cu. */
#ifndef TLC_LINEAR_WAVES_CUH
#define TLC_LINEAR_WAVES_CUH

#include "cluster.cuh"
#include "linear_ends.cuh"
#include "wgmma.cuh"

enum {
    WV_PAIR = 2,   /* blocks of a cluster */
    WV_ROWS = 128, /* stored rows of a block, a half of a tile's */
    WV_TILE = WV_PAIR * WV_ROWS,
    WV_TOKENS = 128,
    WV_HALF = 64,               /* tokens of a tile that is halved */
    WV_BOX = WV_HALF / WV_PAIR, /* of which a block fetches so many */
    WV_THREADS = 512,
    WV_STAGE = (WV_ROWS + WV_TOKENS) * WG_K,
    WV_STAGES = 5,
    WV_PITCH = WV_ROWS + 4, /* floats from a token's sums to the next one's: those that a warp writes share no bank */
    WV_GROUP = 4,  /* tiles of stored rows that are multiplied side by side: what is in use at a time fits into L2 */
    WV_ENDERS = 7, /* warps that finish tiles; of the last one all but the fetching warp do */
    WV_BATCH = 4,  /* tokens that a warp finishes at a time */
    WV_SHARED = WV_STAGES * (WV_STAGE + 16) + 16 + WV_TOKENS * WV_PITCH * 4
};

/* The tiles in the order in which pairs of blocks take them. If those of the last turn are so few that half of the pairs
 * would have none, their tokens are halved. */
struct wv_tiles {
    int down, across; /* tiles of stored rows, of tokens */
    int whole, items; /* tiles that are not halved; all, halves counted as such */
};
__host__ __device__ static inline struct wv_tiles wv_tiles_of(int n_stored, int n, int pairs)
{
    struct wv_tiles t;
    t.down = (n_stored + WV_TILE - 1) / WV_TILE;
    t.across = (n + WV_TOKENS - 1) / WV_TOKENS;
    int all = t.down * t.across, last = all % pairs;
    t.whole = 2 * last <= pairs ? all - last : all;
    t.items = t.whole + 2 * (all - t.whole);
    return t;
}
struct wv_item {
    int row0, token0, tokens;
};
__host__ __device__ static inline struct wv_item wv_item_of(const struct wv_tiles &t, int i)
{
    struct wv_item v;
    int half = i < t.whole ? 0 : (i - t.whole) % 2, tile = i < t.whole ? i : t.whole + (i - t.whole) / 2;
    int first = tile / (WV_GROUP * t.across) * WV_GROUP, in = tile - first * t.across;
    int rows = t.down - first < WV_GROUP ? t.down - first : WV_GROUP;
    v.row0 = (first + in % rows) * WV_TILE;
    v.token0 = in / rows * WV_TOKENS + half * WV_HALF;
    v.tokens = i < t.whole ? WV_TOKENS : WV_HALF;
    return v;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* A warp finishes every step-th batch of an item's tokens, from `batch` on. A lane has outputs lane, lane + 32, ...; of a
 * gated matrix there are half as many. */
template <bool GATED>
__device__ static __forceinline__ void wv_end(const struct linear &p, const struct wv_item &v, const float *sums, int n,
                                              int batch, int step, uint32_t filled, int parity)
{
    enum { Q = (GATED ? WV_ROWS / 2 : WV_ROWS) / 32 };
    int lane = threadIdx.x & 31, o = (GATED ? v.row0 / 2 : v.row0) + lane, n_out = GATED ? p.n_out / 2 : p.n_out;
    int next = row_of(p, v.token0 + batch * WV_BATCH + lane % WV_BATCH, n);
    barrier_wait(filled, parity);
    for (; batch * WV_BATCH < v.tokens; batch += step) {
        float a[WV_BATCH][Q];
        float *y[WV_BATCH];
        int at = next;
        next = row_of(p, v.token0 + (batch + step) * WV_BATCH + lane % WV_BATCH, n);
#pragma unroll
        for (int t = 0; t < WV_BATCH; t++) {
            const float *of = sums + (batch * WV_BATCH + t) * WV_PITCH;
            int row = __shfl_sync(0xffffffff, at, t);
            y[t] = row < 0 ? NULL : p.out.data + (int64_t)row * p.out.ld + o;
#pragma unroll
            for (int q = 0; q < Q; q++)
                if (GATED) {
                    int gate = (lane + 32 * q) / 8 * 16 + lane % 8;
                    a[t][q] = tlc_silu_mul(of[gate], of[gate + 8]);
                } else {
                    a[t][q] = of[lane + 32 * q];
                }
        }
        if (p.out.epi == TLC_EPI_RESIDUAL) {
            float x[WV_BATCH][Q];
#pragma unroll
            for (int i = 0; i < WV_BATCH * Q; i++)
                x[i / Q][i % Q] = y[i / Q] && o + i % Q * 32 < n_out ? y[i / Q][i % Q * 32] : 0.0f;
#pragma unroll
            for (int i = 0; i < WV_BATCH * Q; i++)
                a[i / Q][i % Q] = __fadd_rn(x[i / Q][i % Q], a[i / Q][i % Q]);
        } else if (p.out.epi == TLC_EPI_RELU2) {
#pragma unroll
            for (int i = 0; i < WV_BATCH * Q; i++)
                a[i / Q][i % Q] = tlc_relu2(a[i / Q][i % Q]);
        }
#pragma unroll
        for (int i = 0; i < WV_BATCH * Q; i++)
            if (y[i / Q] && o + i % Q * 32 < n_out)
                y[i / Q][i % Q * 32] = a[i / Q][i % Q];
    }
}

/* Where a warp that multiplies is in the ring. */
struct wv_place {
    int stage, phase;
};

/* A warp has read a stage: both blocks may fetch into it again. */
__device__ static __forceinline__ void wv_release(uint32_t empty)
{
    int lane = threadIdx.x & 31;
    if (lane < WV_PAIR)
        barrier_arrive_far(far_at(empty, lane));
}

/* The sums of 64 stored rows of an item of 8 NT tokens, into shared memory. A warpgroup begins a slice when the other has
 * asked for the first products of its own: so one multiplies while the other waits for its last products and adds them
 * up. */
template <int NT>
__device__ static __forceinline__ void wv_multiply(uint32_t base, uint32_t full, uint32_t empty, int n_k, bool last,
                                                   struct wv_place &at, float *sums, uint32_t drained, int parity)
{
    int warp = warp_of_block(), lane = threadIdx.x & 31, group = warp / 4, before = 0;
    uint64_t w_first = operand(base + group * 64 * WG_K), x_first = operand(base + WV_ROWS * WG_K);
    float total[NT][4], acc[NT][4];
#pragma unroll
    for (int j = 0; j < NT * 4; j++)
        total[j / 4][j % 4] = -0.0f;
    for (int first = 0; first < n_k; first += 4) {
        int n_stages = min(4, n_k - first);
        turn_wait(group);
        for (int i = 0; i < n_stages; i++) {
            uint64_t w = operand_behind(w_first, at.stage * WV_STAGE), x = operand_behind(x_first, at.stage * WV_STAGE);
            barrier_wait(full + 8 * at.stage, at.phase);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < WG_K; k += 32)
                wgmma(acc, operand_behind(w, k), operand_behind(x, k), k > 0 ? 1 : i);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (i == 0) {
                if (group == 0 || !last || first + 4 < n_k)
                    turn_give(group ^ 1);
            } else { /* the stage before this one has been read */
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                wv_release(empty + 8 * before);
            }
            before = at.stage;
            step_on<WV_STAGES>(at.stage, at.phase);
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        settle(acc);
        wv_release(empty + 8 * before);
#pragma unroll
        for (int j = 0; j < NT * 4; j++)
            total[j / 4][j % 4] = __fadd_rn(total[j / 4][j % 4], acc[j / 4][j % 4]);
    }
    barrier_wait(drained, parity);
    sums += 2 * (lane & 3) * WV_PITCH + warp * 16 + (lane >> 2);
#pragma unroll
    for (int j = 0; j < NT * 4; j++)
        sums[(j / 4 * 8 + j % 2) * WV_PITCH + j % 4 / 2 * 8] = total[j / 4][j % 4];
}
#endif

__global__ static void __launch_bounds__(WV_THREADS, 1)
    by_waves(const struct linear p, const __grid_constant__ CUtensorMap w_map,
             const __grid_constant__ CUtensorMap x_map)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int FEW = 72, MANY = 184; /* registers of a thread that fetches or finishes, of one that multiplies */
    extern __shared__ __align__(1024) uint8_t ring[];
    float *sums = (float *)(ring + WV_STAGES * WV_STAGE); /* [token][WV_PITCH] of stored rows */
    uint32_t base = shared_at(ring), full = base + WV_STAGES * WV_STAGE + WV_TOKENS * WV_PITCH * 4;
    uint32_t empty = full + 8 * WV_STAGES, filled = empty + 8 * WV_STAGES, drained = filled + 8;
    int warp = warp_of_block(), lane = threadIdx.x & 31, rank = (int)blockIdx.x % WV_PAIR;
    int n = *p.n, n_k = (p.k_bytes + WG_K - 1) / WG_K;
    int item0 = (int)blockIdx.x / WV_PAIR, step = (int)gridDim.x / WV_PAIR;
    struct wv_tiles tiles = wv_tiles_of(p.n_stored, n, step);

    tlc_go();
    if (threadIdx.x == 0) {
        for (int s = 0; s < WV_STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 8 * WV_PAIR);
        }
        barrier_init(filled, 8);
        barrier_init(drained, WV_ENDERS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    tlc_cluster_arrive();

    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW));
        int early = 0, stage = 0, phase = 0; /* early: stages whose weights were asked for before the wait */
        if (warp == 8 && lane == 0) {
            fetch_map(&x_map);
            if (item0 < tiles.items) {
                struct wv_item v = wv_item_of(tiles, item0);
                for (; early < WV_STAGES && early < n_k; early++) {
                    barrier_expect(full + 8 * early, (WV_ROWS + v.tokens) * WG_K);
                    fetch_box(base + early * WV_STAGE, &w_map, early * WG_K, v.row0 + rank * WV_ROWS, full + 8 * early);
                }
            }
        }
        tlc_cluster_wait(); /* the other block's barriers are there */
        tlc_wait();
        if (warp == 8 && lane == 0) {
            for (int i = item0; i < tiles.items; i += step) {
                struct wv_item v = wv_item_of(tiles, i);
                for (int kt = 0; kt < n_k; kt++) {
                    uint32_t to = base + stage * WV_STAGE, barrier = full + 8 * stage;
                    if (early > 0) {
                        early--;
                    } else {
                        barrier_wait(empty + 8 * stage, phase ^ 1);
                        barrier_expect(barrier, (WV_ROWS + v.tokens) * WG_K);
                        fetch_box(to, &w_map, kt * WG_K, v.row0 + rank * WV_ROWS, barrier);
                    }
                    to += WV_ROWS * WG_K;
                    for (int t = 0; t < v.tokens; t += WV_HALF)
                        fetch_box_for(to + (t + rank * WV_BOX) * WG_K, &x_map, kt * WG_K, v.token0 + t + rank * WV_BOX,
                                      barrier, (1 << WV_PAIR) - 1);
                    step_on<WV_STAGES>(stage, phase);
                }
            }
            for (int s = 0; s < WV_STAGES; s++) { /* the block stays until all have arrived at its barriers */
                barrier_wait(empty + 8 * stage, phase ^ 1);
                step_on<WV_STAGES>(stage, phase);
            }
        } else if (warp > 8) {
            for (int i = item0, turn = 0; i < tiles.items; i += step, turn ^= 1) {
                struct wv_item v = wv_item_of(tiles, i);
                int warps = i + step < tiles.items ? WV_ENDERS : WV_ENDERS + 8;
                v.row0 += rank * WV_ROWS;
                if (p.gated)
                    wv_end<true>(p, v, sums, n, warp - 9, warps, filled, turn);
                else
                    wv_end<false>(p, v, sums, n, warp - 9, warps, filled, turn);
                __syncwarp();
                if (lane == 0)
                    barrier_arrive(drained);
            }
        }
    } else {
        struct wv_place at = {0, 0};
        struct wv_item v;
        int turn = 1;
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MANY));
        tlc_cluster_wait();
        if (warp >= 4 && item0 < tiles.items)
            turn_give(0);
        for (int i = item0; i < tiles.items; i += step) {
            bool last = i + step >= tiles.items;
            v = wv_item_of(tiles, i);
            turn ^= 1;
            if (v.tokens == WV_TOKENS)
                wv_multiply<WV_TOKENS / 8>(base, full, empty, n_k, last, at, sums, drained, turn ^ 1);
            else
                wv_multiply<WV_HALF / 8>(base, full, empty, n_k, last, at, sums, drained, turn ^ 1);
            __syncwarp();
            if (lane == 0)
                barrier_arrive(filled);
        }
        tlc_wait(); /* once it has returned, it does at once */
        if (item0 < tiles.items) {
            v.row0 += rank * WV_ROWS;
            if (p.gated)
                wv_end<true>(p, v, sums, n, WV_ENDERS + warp, WV_ENDERS + 8, filled, turn);
            else
                wv_end<false>(p, v, sums, n, WV_ENDERS + warp, WV_ENDERS + 8, filled, turn);
        }
    }
#endif
}

#endif
