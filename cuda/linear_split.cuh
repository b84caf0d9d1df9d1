/* cuda/linear_split.cuh - the kernel of linear_large.cu for batches of decode on sm_90a: 2 to 64 tokens times INT8
 * weights, with k shared out over the blocks of a cluster. What a multiprocessor can take in (64 bytes a cycle) bounds
 * such products, so blocks are many, small and square: 64 stored rows x 64 tokens x a part of k. Integers are exact in
 * any order. See linear_large.cu. */
#ifndef TLC_LINEAR_SPLIT_CUH
#define TLC_LINEAR_SPLIT_CUH

#include "cluster.cuh"
#include "linear_ends.cuh"
#include "wgmma.cuh"

enum {
    SP_TILE = 64,     /* stored rows, and tokens */
    SP_THREADS = 160, /* a warpgroup that multiplies, a warp of which one thread fetches */
    SP_STAGE = 2 * SP_TILE * WG_K,
    SP_STAGES = 6, /* with the sums, two blocks fit on a multiprocessor: the next product's weights come early */
    SP_SUMS = SP_TILE * SP_TILE * 4,
    SP_SHARED = SP_STAGES * (SP_STAGE + 16) + SP_SUMS + 16
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Rank RANK's sums of a tile: each other rank gets those that it finishes, all of them at the same time from different ones; its own
 * stay here. at: of this thread in the first of the places where sums arrive, 16 G threads apart: SPLIT - 1, by how far away they come
 * from. */
template <int SPLIT, int RANK, int G>
__device__ static __forceinline__ void hand_out(const int (&acc)[SP_TILE / 8][4], int (&mine)[G][4], uint32_t at,
                                                uint32_t inbox)
{
#pragma unroll
    for (int d = 1; d < SPLIT; d++) {
        int to = (RANK + d) % SPLIT;
        uint32_t far = far_at(at + (d - 1) * G * 128 * 16, to), barrier = far_at(inbox, to);
#pragma unroll
        for (int j = 0; j < G; j++)
            send(far + j * 128 * 16, acc[to * G + j], barrier);
    }
#pragma unroll
    for (int j = 0; j < G * 4; j++)
        mine[j / 4][j % 4] = acc[RANK * G + j / 4][j % 4];
}
#endif

/* Block x: rank x % SPLIT of a cluster, which has tile x / SPLIT of stored rows; block y: its tokens. Every rank
 * finishes TOKENS / SPLIT of the tile's tokens. */
template <int SPLIT>
__global__ static void __launch_bounds__(SP_THREADS, 2)
    by_split(const struct linear p, const __grid_constant__ CUtensorMap w_map,
             const __grid_constant__ CUtensorMap x_map)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    enum { G = SP_TILE / 8 / SPLIT, W_BYTES = SP_TILE * WG_K };
    extern __shared__ __align__(1024) uint8_t ring[];
    int4 *sums = (int4 *)(ring + SP_STAGES * SP_STAGE); /* [how far away they come from][fragment][thread] */
    uint32_t base = shared_at(ring), full = base + SP_STAGES * SP_STAGE + SP_SUMS, empty = full + 8 * SP_STAGES;
    uint32_t inbox = empty + 8 * SP_STAGES; /* passed once the sums of all ranks are here */
    int warp = warp_of_block(), lane = threadIdx.x & 31, rank = (int)blockIdx.x % SPLIT;
    int tile0 = (int)blockIdx.x / SPLIT * SP_TILE, token0 = (int)blockIdx.y * SP_TILE;
    int n = *p.n, n_k = (p.k_bytes + WG_K - 1) / WG_K, first = rank * n_k / SPLIT, end = (rank + 1) * n_k / SPLIT;
    int stage = 0, phase = 0;

    tlc_go();
    if (token0 >= n) { /* all of the cluster */
        tlc_wait();
        return;
    }
    if (threadIdx.x == 0) {
        for (int s = 0; s < SP_STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 4);
        }
        barrier_init(inbox, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_expect(inbox, SP_SUMS / SPLIT * (SPLIT - 1));
    }
    __syncthreads();
    if (SPLIT > 1)
        tlc_cluster_arrive();

    if (warp == 4) { /* all of it goes along, so that places are in uniform registers */
        int early = min((int)SP_STAGES, end - first); /* stages whose weights are asked for before the wait */
        if (lane == 0)
            fetch_map(&x_map);
        for (int s = 0; s < early; s++)
            if (lane == 0) {
                barrier_expect(full + 8 * s, SP_STAGE);
                fetch_box(base + s * SP_STAGE, &w_map, (first + s) * WG_K, tile0, full + 8 * s);
            }
        tlc_wait();
        for (int kt = first; kt < end; kt++) {
            uint32_t to = base + stage * SP_STAGE, barrier = full + 8 * stage;
            if (kt - first >= early)
                barrier_wait(empty + 8 * stage, phase ^ 1);
            if (lane == 0) {
                if (kt - first >= early) {
                    barrier_expect(barrier, SP_STAGE);
                    fetch_box(to, &w_map, kt * WG_K, tile0, barrier);
                }
                fetch_box(to + W_BYTES, &x_map, kt * WG_K, token0, barrier);
            }
            step_on<SP_STAGES>(stage, phase);
        }
        if (SPLIT > 1) /* the barrier is of all threads */
            tlc_cluster_wait();
        return;
    }

    int row0 = tile0 + warp * 16, mine0 = token0 + rank * G * 8, before = 0;
    struct ends<G> e;
    int acc[SP_TILE / 8][4] = {}, mine[G][4];
    uint64_t w_first = operand(base);
    ask_early(p, e, row0, mine0, n);
    if (SPLIT > 1)
        tlc_cluster_wait(); /* all blocks have begun */
    tlc_wait();
    ask_late(p, e, row0, mine0);
    for (int kt = first; kt < end; kt++) {
        uint64_t w = operand_behind(w_first, stage * SP_STAGE), x = operand_behind(w, W_BYTES);
        barrier_wait(full + 8 * stage, phase);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < WG_K; k += 32)
            wgmma(acc, operand_behind(w, k), operand_behind(x, k), 1);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (kt > first) { /* the stage before this one has been read */
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (lane == 0)
                barrier_arrive(empty + 8 * before);
        }
        before = stage;
        step_on<SP_STAGES>(stage, phase);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    settle(acc);
    uint32_t at = base + SP_STAGES * SP_STAGE + threadIdx.x * 16;
    switch (rank) {
    case 1: hand_out<SPLIT, 1 % SPLIT, G>(acc, mine, at, inbox); break;
    case 2: hand_out<SPLIT, 2 % SPLIT, G>(acc, mine, at, inbox); break;
    case 3: hand_out<SPLIT, 3 % SPLIT, G>(acc, mine, at, inbox); break;
    default: hand_out<SPLIT, 0, G>(acc, mine, at, inbox);
    }
    if (SPLIT > 1) {
        barrier_wait_far(inbox, 0);
#pragma unroll
        for (int j = 0; j < G; j++)
#pragma unroll
            for (int d = 0; d < SPLIT - 1; d++) {
                int4 v = sums[(d * G + j) * 128 + threadIdx.x];
                mine[j][0] += v.x, mine[j][1] += v.y, mine[j][2] += v.z, mine[j][3] += v.w;
            }
    }
    finish<G>(p, e, mine, row0);
#endif
}

#endif
