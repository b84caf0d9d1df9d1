/* cuda/linear_slices.cuh - the kernel of linear_large.cu for BF16 on sm_90a where tiles are not more than
 * multiprocessors. Where they are much fewer, the blocks of a cluster have the same tile, and each computes every SPLIT-th
 * slice of 256 inputs: a slice's sums are sent to the block that finishes their tokens, which adds slices in ascending
 * order, so the bits are those of one block. See linear_large.cu. */
#ifndef TLC_LINEAR_SLICES_CUH
#define TLC_LINEAR_SLICES_CUH

#include "cluster.cuh"
#include "linear_ends.cuh"
#include "wgmma.cuh"

/* A tile has 64 GROUPS stored rows, a warpgroup for each 64, and TOKENS tokens. Where 32 will do, the room of the
 * others holds weights instead. Two blocks of the smallest fit on a multiprocessor, so the next product's weights come early;
 * the others need all of the memory to keep enough bytes on their way. */
template <int GROUPS, int SPLIT, int TOKENS> struct sl {
    enum {
        ROWS = 64 * GROUPS,
        BLOCKS = GROUPS == 1 ? 2 : 1,
        THREADS = 128 * GROUPS + 32,
        STAGE = (ROWS + TOKENS) * WG_K,
        SUMS = SPLIT > 1 ? TOKENS * 4 * ROWS : 0,
        STAGES = ((BLOCKS == 2 ? 113 : 227) * 1024 - 16 - SUMS) / (STAGE + 16),
        SHARED = STAGES * (STAGE + 16) + 16 + SUMS
    };
};

/* The stages of k that a rank has: four of a slice, then those of its next slice. */
__device__ static __forceinline__ int sl_k(int i, int rank, int split) { return (rank + i / 4 * split) * 4 + i % 4; }

/* Block x: rank x % SPLIT of a cluster, which has tile x / SPLIT of stored rows; block y: its tokens. Slices are dealt out
 * in rounds: slice round * SPLIT + rank. Every rank finishes TOKENS / SPLIT of the tile's tokens. Where blocks exchange
 * sums, weights are brought into L2 before the wait, for the ring has no room for them. */
template <int GROUPS, int SPLIT, int TOKENS>
__global__ static void __launch_bounds__(sl<GROUPS, SPLIT, TOKENS>::THREADS, sl<GROUPS, SPLIT, TOKENS>::BLOCKS)
    by_slices(const struct linear p, const __grid_constant__ CUtensorMap w_map,
              const __grid_constant__ CUtensorMap x_map)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    typedef sl<GROUPS, SPLIT, TOKENS> is;
    enum {
        ROWS = is::ROWS,
        STAGE = is::STAGE,
        STAGES = is::STAGES,
        SUMS = is::SUMS,
        THREADS = 128 * GROUPS, /* that multiply */
        WARPS = THREADS / 32,   /* the same; one more fetches */
        NT = TOKENS / 8,
        G = NT / SPLIT,
        SLICE_BYTES = G * THREADS * 16 /* that a rank gets of a slice */
    };
    extern __shared__ __align__(1024) uint8_t ring[];
    float4 *sums = (float4 *)(ring + STAGES * STAGE); /* of a round: [rank that sent them][fragment][thread] */
    uint32_t base = shared_at(ring), full = base + STAGES * STAGE + SUMS, empty = full + 8 * STAGES;
    uint32_t got = empty + 8 * STAGES, room = got + 8; /* the sums of a round are here; all ranks have added theirs */
    int warp = warp_of_block(), lane = threadIdx.x & 31, rank = (int)blockIdx.x % SPLIT;
    int tile0 = (int)blockIdx.x / SPLIT * ROWS, token0 = (int)blockIdx.y * TOKENS;
    int n = *p.n, n_k = (p.k_bytes + WG_K - 1) / WG_K, n_slices = (n_k + 3) / 4;
    int stage = 0, phase = 0;

    tlc_go();
    if (token0 >= n) { /* all of the cluster */
        tlc_wait();
        return;
    }
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, WARPS);
        }
        barrier_init(got, 1);
        barrier_init(room, WARPS * SPLIT);
        barrier_expect(got, min((int)SPLIT, n_slices) * SLICE_BYTES);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (SPLIT > 1)
        tlc_cluster_arrive();

    if (warp == WARPS) {
        int early = 0, kt; /* stages whose weights are asked for before the wait */
        if (lane == 0) {
            fetch_map(&x_map);
            for (; early < STAGES && (kt = sl_k(early, rank, SPLIT)) < n_k; early++) {
                barrier_expect(full + 8 * early, STAGE);
                fetch_box(base + early * STAGE, &w_map, kt * WG_K, tile0, full + 8 * early);
            }
            if (SPLIT > 1 && blockIdx.y == 0) { /* the others, into L2: a share of the tile's rows */
                int row = tile0 + rank * (ROWS / SPLIT), rows = min(ROWS / SPLIT, p.n_stored - row);
                if (rows > 0)
                    fetch_ahead(p.w + row * p.w_pitch, (uint32_t)(rows * p.w_pitch));
            }
            tlc_wait();
            for (int i = 0; (kt = sl_k(i, rank, SPLIT)) < n_k; i++) {
                uint32_t to = base + stage * STAGE, barrier = full + 8 * stage;
                if (i >= early) {
                    barrier_wait(empty + 8 * stage, phase ^ 1);
                    barrier_expect(barrier, STAGE);
                    fetch_box(to, &w_map, kt * WG_K, tile0, barrier);
                }
                fetch_box(to + ROWS * WG_K, &x_map, kt * WG_K, token0, barrier);
                step_on<STAGES>(stage, phase);
            }
        }
        __syncwarp();
        if (SPLIT > 1) /* the barrier is of all threads */
            tlc_cluster_wait();
        return;
    }

    int row0 = tile0 + warp * 16, mine0 = token0 + rank * G * 8, before = 0;
    struct ends<G> e;
    float acc[NT][4], total[G][4];
    uint64_t w_first = operand(base + warp / 4 * 64 * WG_K), x_first = operand(base + ROWS * WG_K);
#pragma unroll
    for (int j = 0; j < G * 4; j++)
        total[j / 4][j % 4] = -0.0f;
    ask_early(p, e, row0, mine0, n);
    tlc_wait();
    ask_late(p, e, row0, mine0);

    /* A stage has been read: whoever fetches into it may do so again. */
    auto release = [&](int read) {
        if (lane == 0)
            barrier_arrive(empty + 8 * read);
    };
    /* Add the slices of a round to the totals, in ascending order, and say so to those who send the next one's. */
    auto add = [&](int round) {
        int left = n_slices - (round + 1) * SPLIT;
        barrier_wait_far(got, round & 1);
#pragma unroll
        for (int r = 0; r < SPLIT; r++) {
            if (round * SPLIT + r >= n_slices)
                break;
#pragma unroll
            for (int j = 0; j < G; j++) {
                float4 v = sums[(r * G + j) * THREADS + threadIdx.x];
                total[j][0] = __fadd_rn(total[j][0], v.x);
                total[j][1] = __fadd_rn(total[j][1], v.y);
                total[j][2] = __fadd_rn(total[j][2], v.z);
                total[j][3] = __fadd_rn(total[j][3], v.w);
            }
        }
        if (left > 0) {
            settle(total); /* all has been read */
            if (threadIdx.x == 0)
                barrier_expect(got, min((int)SPLIT, left) * SLICE_BYTES);
            __syncwarp();
            if (lane < SPLIT)
                barrier_arrive_far(far_at(room, lane));
        }
    };
    for (int round = 0; round * SPLIT < n_slices; round++) {
        int first = 4 * (round * SPLIT + rank), n_stages = min(4, n_k - first); /* none where it is not positive */
        for (int i = 0; i < n_stages; i++) {
            uint64_t w = operand_behind(w_first, stage * STAGE), x = operand_behind(x_first, stage * STAGE);
            barrier_wait(full + 8 * stage, phase);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < WG_K; k += 32)
                wgmma(acc, operand_behind(w, k), operand_behind(x, k), k > 0 ? 1 : i);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (i > 0) { /* the stage before this one has been read */
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                release(before);
            }
            before = stage;
            step_on<STAGES>(stage, phase);
            if (SPLIT > 1 && round > 0 && i == 1) /* while these products run */
                add(round - 1);
        }
        if (SPLIT > 1 && round > 0 && n_stages < 2)
            add(round - 1);
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        settle(acc);
        if (n_stages > 0)
            release(before);
        if constexpr (SPLIT == 1) {
#pragma unroll
            for (int j = 0; j < NT * 4; j++)
                total[j / 4][j % 4] = __fadd_rn(total[j / 4][j % 4], acc[j / 4][j % 4]);
        } else {
            if (round == 0)
                tlc_cluster_wait(); /* all blocks have begun */
            else
                barrier_wait(room, (round - 1) & 1);
#pragma unroll
            for (int r = 0; r < SPLIT; r++) {
                if (n_stages <= 0)
                    break;
                uint32_t to = far_at(shared_at(sums + rank * G * THREADS + threadIdx.x), r), barrier = far_at(got, r);
#pragma unroll
                for (int j = 0; j < G; j++)
                    send(to + j * THREADS * 16, acc[r * G + j], barrier);
            }
        }
    }
    if (SPLIT > 1)
        add((n_slices - 1) / SPLIT);
    finish<G>(p, e, total, row0);
#endif
}

#endif
