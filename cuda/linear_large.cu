/* cuda/linear_large.cu - y = W x for many rows: decode batches of more than 16 rows and prefill chunks.
 *
 * In every kernel the weights are the M operand of the matrix unit (16 stored rows) and the rows of activations,
 * here called tokens, are the N operand, as in the few-rows kernels. So a thread holds stored rows r and r + 8 of
 * a block of 16 for the same token: of a gated matrix that is gate and up of one output.
 *
 * - by_mma: m16n8k32 (INT8) or m16n8k16 (BF16) behind a ring of cp.async stages; any card from sm_80 on. Both
 *   types are the same bytes: one product consumes 32 bytes of k. Warps, and on sm_90 the CTAs of a cluster, may
 *   share the k of a tile (integers only: exact in any order).
 * - by_wgmma: INT8 on sm_90a; one thread fetches tiles with the tensor copy engine, two warpgroups multiply. It
 *   also fetches rows from the count up to n_cap: nobody looks at their sums.
 * - by_f32: one warp per output, plain arithmetic.
 *
 * BF16: total = first slice, then total = total + slice, ascending (a total that starts at -0 is the same: -0 + x
 * = x).
 * F32, for any number of rows: lane l sums k = 4 l .. 4 l + 3, then 128 + 4 l .., of a slice of 256 in one
 * ascending fma chain from zero and adds its slices ascending; the lanes are added in the tree of tlc_warp_sum. */
#include "rows.cuh"
#include "wgmma.cuh"

/* What a kernel needs of one product; pitches and k in bytes. */
struct linear {
    const uint8_t *w;     /* [n_stored][w_pitch] */
    const uint8_t *x;     /* [rows][x_pitch] */
    const float *w_scale; /* integers: [n_stored] */
    const float *x_scale; /* integers: [rows] */
    int64_t w_pitch, x_pitch;
    int k_bytes;
    int n_stored, n_out;
    bool gated;
    const int32_t *rows, *n; /* of the set */
    struct tlc_out out;
};

/* ---- what becomes of the sums ---- */

__device__ static __forceinline__ float value(int acc, float x_scale, float w_scale)
{
    return tlc_scaled(acc, x_scale, w_scale);
}
__device__ static __forceinline__ float value(float acc, float, float) { return acc; }

/* Finish 16 stored rows from row0 on for 8 G tokens from token0 on, held by a warp as G fragments. All that is
 * read comes before the first write, so that the reads are in flight together. */
template <int G, typename T>
__device__ static __forceinline__ void finish(const struct linear &p, const T (*acc)[4], int row0, int token0, int n)
{
    int lane = threadIdx.x & 31, ld = (int)p.out.ld;
    int o = (p.gated ? row0 / 2 : row0) + (lane >> 2), t = token0 + 2 * (lane & 3);
    bool lo = o < (p.gated ? p.n_out / 2 : p.n_out), hi = !p.gated && o + 8 < p.n_out;
    float w_lo = 1.0f, w_hi = 1.0f, a[2 * G], b[2 * G];
    int at[2 * G]; /* row of out, -1 = none */
    if (row0 >= p.n_stored || token0 >= n)
        return;
    if (p.w_scale) {
        w_lo = p.w_scale[row0 + (lane >> 2)];
        w_hi = p.w_scale[row0 + (lane >> 2) + 8];
    }
#pragma unroll
    for (int i = 0; i < 2 * G; i++) {
        int token = t + 8 * (i / 2) + i % 2;
        float scale = p.x_scale && token < n ? p.x_scale[token] : 1.0f;
        a[i] = value(acc[i / 2][i % 2], scale, w_lo);
        b[i] = value(acc[i / 2][i % 2 + 2], scale, w_hi);
        at[i] = token < n ? token : -1;
    }
    if (p.out.epi == TLC_EPI_SILU_MUL) {
#pragma unroll
        for (int i = 0; i < 2 * G; i++)
            a[i] = tlc_silu_mul(a[i], b[i]);
    } else if (p.out.epi == TLC_EPI_RELU2) {
#pragma unroll
        for (int i = 0; i < 2 * G; i++) {
            a[i] = tlc_relu2(a[i]);
            b[i] = tlc_relu2(b[i]);
        }
    } else if (p.out.epi == TLC_EPI_RESIDUAL) {
#pragma unroll
        for (int i = 0; i < 2 * G; i++)
            if (at[i] >= 0)
                at[i] = p.rows[at[i]];
#pragma unroll
        for (int i = 0; i < 2 * G; i++) {
            const float *x = p.out.data + (int64_t)at[i] * ld + o;
            if (at[i] >= 0 && lo)
                a[i] = __fadd_rn(x[0], a[i]);
            if (at[i] >= 0 && hi)
                b[i] = __fadd_rn(x[8], b[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * G; i++) {
        float *y = p.out.data + (int64_t)at[i] * ld + o;
        if (at[i] >= 0 && lo)
            y[0] = a[i];
        if (at[i] >= 0 && hi)
            y[8] = b[i];
    }
}

/* ---- mma.sync ---- */

/* Where 16-byte piece c of row r lies in a tile with rows of `row_bytes` (a multiple of 128): pieces are exchanged so
 * that one piece of 8 successive rows covers all banks. */
__host__ __device__ static __forceinline__ int place(int r, int c, int row_bytes)
{
    return r * row_bytes + ((c ^ (r & 7)) << 4);
}

/* ldmatrix.x4: the row and piece that lane l points at, so that the results are a0..a3 of 16 rows x 32 bytes (A),
 * or b0, b1 of tokens 0..7, then b0, b1 of tokens 8..15 (B). */
__host__ __device__ static __forceinline__ int a_row(int l) { return l & 15; }
__host__ __device__ static __forceinline__ int a_piece(int l) { return l >> 4; }
__host__ __device__ static __forceinline__ int b_row(int l) { return (l & 7) | ((l >> 4) << 3); }
__host__ __device__ static __forceinline__ int b_piece(int l) { return (l >> 3) & 1; }

__device__ static __forceinline__ void ldmatrix(uint32_t *r, uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

__device__ static __forceinline__ void mma(int *d, const uint32_t *a, const uint32_t *b)
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ static __forceinline__ void mma(float *d, const uint32_t *a, const uint32_t *b)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Copy ROWS rows of BK bytes into shared memory; what is outside of the source is zero and not read. */
template <int ROWS, int BK, int THREADS>
__device__ static __forceinline__ void fetch(uint32_t to, const uint8_t *from, int64_t pitch, int row0, int n_rows,
                                             int k, int k_bytes)
{
    enum { PIECES = BK / 16, STEP = THREADS / PIECES };
    static_assert(THREADS % PIECES == 0, "a thread keeps its piece");
    int c = threadIdx.x % PIECES, r = threadIdx.x / PIECES;
#pragma unroll
    for (int i = 0; i < (ROWS + STEP - 1) / STEP; i++, r += STEP) {
        bool in = row0 + r < n_rows && k + 16 * c < k_bytes;
        const uint8_t *p = in ? from + (row0 + r) * pitch + k + 16 * c : from;
        if (ROWS % STEP == 0 || r < ROWS)
            asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to + place(r, c, BK)), "l"(p),
                         "r"(in ? 16 : 0)
                         : "memory");
    }
}

/* A barrier for all threads of the KC CTAs of a cluster. */
template <int KC> __device__ static __forceinline__ void exchange_wait()
{
#if __CUDA_ARCH__ >= 900
    if (KC > 1) {
        asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
        return;
    }
#endif
    __syncthreads();
}
/* What lies at this address of shared memory in CTA `rank` of the cluster. */
template <int KC> __device__ static __forceinline__ int4 exchange_read(uint32_t at, int rank)
{
    int4 v;
#if __CUDA_ARCH__ >= 900
    if (KC > 1) {
        asm volatile("{\n.reg .u32 a;\nmapa.shared::cluster.u32 a, %4, %5;\n"
                     "ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [a];\n}"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(at), "r"(rank)
                     : "memory");
        return v;
    }
#endif
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CLUSTER_OF(n) __cluster_dims__(n, 1, 1)
#else
#define CLUSTER_OF(n)
#endif

/* A CTA makes ROWS stored rows x TOKENS; its warps are WR x WT over the tile times WK over k, and KC CTAs of a
 * cluster share k. T: int (INT8) or float (BF16). Every k that is shared is integers: exact in any order. */
template <typename T, int ROWS, int TOKENS, int WR, int WT, int WK, int BK, int STAGES, int KC>
__device__ static __forceinline__ void mma_tile(const struct linear &p)
{
    enum {
        THREADS = 32 * WR * WT * WK,
        MT = ROWS / WR / 16,
        NT = TOKENS / WT / 8,
        MINE = ROWS / 16 * (TOKENS / 8) / (WR * WT * WK * KC), /* fragments that a warp finishes, where k is shared */
        STEPS = BK / 32 / WK,
        W_BYTES = ROWS * BK,
        STAGE = (ROWS + TOKENS) * BK,
        EXACT = sizeof(T) == sizeof(int) && T(1) / 2 == 0
    };
    static_assert(NT % 2 == 0 && BK % (32 * WK) == 0 && BK % 128 == 0, "shape");
    static_assert(WK * KC == 1 || (EXACT && MINE > 0 && TOKENS / 8 % MINE == 0), "shares");
    static_assert(WK * KC == 1 || WR * WT * WK * MT * NT * 512 <= STAGES * STAGE, "sums fit in the ring");
    static_assert(EXACT || BK == 128, "a slice of 256 is four stages");
    extern __shared__ __align__(1024) uint8_t ring[];
    uint32_t base = shared_at(ring);
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int wk = warp % WK, wr = warp / WK % WR, wt = warp / WK / WR;
    int n = *p.n, row0 = blockIdx.x / KC * ROWS, token0 = blockIdx.y * TOKENS, rank = blockIdx.x % KC;
    int all = (p.k_bytes + BK - 1) / BK, first = all * rank / KC, n_k = all * (rank + 1) / KC - first;
    int k_end = min(p.k_bytes, (first + n_k) * BK);
    T acc[MT][NT][4];
    float total[EXACT ? 1 : MT][EXACT ? 1 : NT][4];

    tlc_go();
    if (token0 >= n) {
        tlc_wait(); /* so that the end of this kernel means the end of those before it */
        return;
    }
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        fetch<ROWS, BK, THREADS>(base + s * STAGE, p.w, p.w_pitch, row0, p.n_stored, (first + s) * BK, k_end);
    tlc_wait();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        fetch<TOKENS, BK, THREADS>(base + s * STAGE + W_BYTES, p.x, p.x_pitch, token0, n, (first + s) * BK, k_end);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
#pragma unroll
    for (int i = 0; i < MT * NT * 4; i++) {
        acc[i / (NT * 4)][i / 4 % NT][i % 4] = 0;
        if (!EXACT)
            total[i / (NT * 4)][i / 4 % NT][i % 4] = -0.0f;
    }

    for (int kt = 0, stage = 0; kt < n_k; kt++) {
        int ahead = stage == 0 ? STAGES - 1 : stage - 1; /* the stage that was consumed last */
        uint32_t w = base + stage * STAGE, x = w + W_BYTES;
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        if (kt + STAGES - 1 < n_k) {
            uint32_t to = base + ahead * STAGE;
            int k = (first + kt + STAGES - 1) * BK;
            fetch<ROWS, BK, THREADS>(to, p.w, p.w_pitch, row0, p.n_stored, k, k_end);
            fetch<TOKENS, BK, THREADS>(to + W_BYTES, p.x, p.x_pitch, token0, n, k, k_end);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            int c = 2 * (wk * STEPS + step);
            uint32_t a[MT][4], b[NT][2];
#pragma unroll
            for (int i = 0; i < MT; i++)
                ldmatrix(a[i], w + place((wr * MT + i) * 16 + a_row(lane), c + a_piece(lane), BK));
#pragma unroll
            for (int j = 0; j < NT; j += 2)
                ldmatrix(b[j], x + place((wt * NT + j) * 8 + b_row(lane), c + b_piece(lane), BK));
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < NT; j++)
                    mma(acc[i][j], a[i], b[j]);
        }
        if (!EXACT && (kt % 4 == 3 || kt + 1 == n_k)) {
#pragma unroll
            for (int i = 0; i < MT * NT * 4; i++) {
                float *t = &total[i / (NT * 4)][i / 4 % NT][i % 4];
                *t = __fadd_rn(*t, (float)acc[i / (NT * 4)][i / 4 % NT][i % 4]);
                acc[i / (NT * 4)][i / 4 % NT][i % 4] = 0;
            }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    if constexpr (WK * KC > 1) { /* exchange: every warp adds up its share of the fragments */
        int share = (rank * (THREADS / 32) + warp) * MINE, across = TOKENS / 8;
        T mine[MINE][4] = {};
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
#pragma unroll
        for (int i = 0; i < MT * NT; i++)
            ((int4 *)ring)[(warp * MT * NT + i) * 32 + lane] = make_int4(
                acc[i / NT][i % NT][0], acc[i / NT][i % NT][1], acc[i / NT][i % NT][2], acc[i / NT][i % NT][3]);
        exchange_wait<KC>();
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            int i = (share + j) / across, t = (share + j) % across; /* 16 rows, 8 tokens */
            int warps = (t / NT * WR + i / MT) * WK, at = (i % MT * NT + t % NT) * 32 + lane;
#pragma unroll
            for (int q = 0; q < KC * WK; q++) {
                int4 v = exchange_read<KC>(base + ((warps + q % WK) * MT * NT * 32 + at) * 16, q / WK);
                mine[j][0] += v.x;
                mine[j][1] += v.y;
                mine[j][2] += v.z;
                mine[j][3] += v.w;
            }
        }
        finish<MINE>(p, mine, row0 + share / across * 16, token0 + share % across * 8, n);
        if (KC > 1)
            exchange_wait<KC>(); /* nobody leaves while another may read its sums */
    } else {
#pragma unroll
        for (int i = 0; i < MT; i++) {
            int r = row0 + (wr * MT + i) * 16, t = token0 + wt * NT * 8;
            if constexpr (EXACT)
                finish<NT>(p, acc[i], r, t, n);
            else
                finish<NT>(p, total[i], r, t, n);
        }
    }
}

template <typename T, int ROWS, int TOKENS, int WR, int WT, int WK, int BK, int STAGES>
__global__ static void __launch_bounds__(32 * WR * WT * WK) by_mma(const struct linear p)
{
    mma_tile<T, ROWS, TOKENS, WR, WT, WK, BK, STAGES, 1>(p);
}

/* INT8, sm_90 on: four CTAs share the k of a tile, so that a small matrix occupies the card with wide tiles. */
template <int ROWS, int TOKENS, int WR, int WT, int WK, int BK, int STAGES>
__global__ static void CLUSTER_OF(4) __launch_bounds__(32 * WR * WT * WK) by_mma_cluster(const struct linear p)
{
#if __CUDA_ARCH__ >= 900
    mma_tile<int, ROWS, TOKENS, WR, WT, WK, BK, STAGES, 4>(p);
#endif
}

/* ---- wgmma ---- */

enum {
    WG_ROWS = 128,    /* stored rows of a tile: two warpgroups of 64 */
    WG_THREADS = 384, /* 8 warps that multiply; 4 of which one thread fetches and the rest give their registers away */
    WG_SLACK = 1024 + 256 /* alignment, barriers */
};
__host__ __device__ constexpr int wg_stage(int tokens) { return (WG_ROWS + tokens) * WG_K; }

/* A persistent grid over the tiles of 128 stored rows x TOKENS, tokens fastest. PAIR = 2: two CTAs with neighbouring
 * stored rows each fetch half of their common tokens, for both; PAIR = 1: each for itself. */
template <int TOKENS, int STAGES, int PAIR>
__device__ static __forceinline__ void wgmma_tiles(const struct linear &p, const CUtensorMap *w_map,
                                                   const CUtensorMap *x_map)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    enum {
        STAGE = wg_stage(TOKENS),
        W_BYTES = WG_ROWS * WG_K,
        NT = TOKENS / 8,
        G = NT < 8 ? NT : 8,
        HALF = TOKENS / PAIR
    };
    extern __shared__ uint8_t raw[];
    uint32_t base = (shared_at(raw) + 1023) & ~1023u, full = base + STAGES * STAGE, empty = full + 8 * STAGES;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int n = *p.n, n_k = (p.k_bytes + WG_K - 1) / WG_K;
    int across = (n + TOKENS - 1) / TOKENS, n_tiles = across * ((p.n_stored + PAIR * WG_ROWS - 1) / (PAIR * WG_ROWS));
    int rank = blockIdx.x % PAIR, from = blockIdx.x / PAIR, by = gridDim.x / PAIR;
    int stage = 0, phase = 0;

    tlc_go();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 8 * PAIR);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    exchange_wait<PAIR>();

    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == WG_THREADS - 128) {
            int early = 0; /* stages whose weights were asked for before the wait */
            if (from < n_tiles)
                for (; early < STAGES && early < n_k; early++) {
                    barrier_expect(full + 8 * early, STAGE);
                    fetch_box(base + early * STAGE, w_map, early * WG_K, (from / across * PAIR + rank) * WG_ROWS,
                              full + 8 * early);
                }
            tlc_wait();
            for (int tile = from; tile < n_tiles; tile += by) {
                int row0 = (tile / across * PAIR + rank) * WG_ROWS, token0 = tile % across * TOKENS;
                for (int kt = 0; kt < n_k; kt++) {
                    uint32_t to = base + stage * STAGE, barrier = full + 8 * stage;
                    if (early > 0) {
                        early--;
                    } else {
                        barrier_wait(empty + 8 * stage, phase ^ 1);
                        barrier_expect(barrier, STAGE);
                        fetch_box(to, w_map, kt * WG_K, row0, barrier);
                    }
                    if (PAIR == 1)
                        fetch_box(to + W_BYTES, x_map, kt * WG_K, token0, barrier);
                    else
                        fetch_box_pair(to + W_BYTES + rank * HALF * WG_K, x_map, kt * WG_K, token0 + rank * HALF,
                                       barrier);
                    if (++stage == STAGES) {
                        stage = 0;
                        phase ^= 1;
                    }
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        tlc_wait();
        for (int tile = from; tile < n_tiles; tile += by) {
            int row0 = (tile / across * PAIR + rank) * WG_ROWS + warp * 16, token0 = tile % across * TOKENS;
            int acc[NT][4], before = 0;
            for (int kt = 0; kt < n_k; kt++) {
                uint32_t w = base + stage * STAGE + warp / 4 * 64 * WG_K, x = base + stage * STAGE + W_BYTES;
                barrier_wait(full + 8 * stage, phase);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int k = 0; k < WG_K; k += 32)
                    wgmma(acc, operand(w + k), operand(x + k), kt + k);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                if (kt > 0) { /* the stage before this one has been read */
                    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                    release<PAIR>(empty + 8 * before, lane);
                }
                before = stage;
                if (++stage == STAGES) {
                    stage = 0;
                    phase ^= 1;
                }
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
            for (int j = 0; j < NT; j++) /* no use of the sums moves above the wait */
                asm volatile("" : "+r"(acc[j][0]), "+r"(acc[j][1]), "+r"(acc[j][2]), "+r"(acc[j][3])::"memory");
            release<PAIR>(empty + 8 * before, lane);
#pragma unroll
            for (int j = 0; j < NT; j += G)
                finish<G>(p, &acc[j], row0, token0 + 8 * j, n);
        }
    }
    if (PAIR > 1)
        exchange_wait<PAIR>(); /* nobody leaves while the other may still send to it */
#endif
}

template <int TOKENS, int STAGES>
__global__ static void __launch_bounds__(WG_THREADS, 1)
    by_wgmma(const struct linear p, const __grid_constant__ CUtensorMap w_map,
             const __grid_constant__ CUtensorMap x_map)
{
    wgmma_tiles<TOKENS, STAGES, 1>(p, &w_map, &x_map);
}
template <int TOKENS, int STAGES>
__global__ static void CLUSTER_OF(2) __launch_bounds__(WG_THREADS, 1)
    by_wgmma_pair(const struct linear p, const __grid_constant__ CUtensorMap w_map,
                  const __grid_constant__ CUtensorMap x_map)
{
    wgmma_tiles<TOKENS, STAGES, 2>(p, &w_map, &x_map);
}

/* ---- F32 ---- */

enum { F32_TOKENS = 8 };

/* y[i] = w . x row i for `count` rows; the same in all lanes. */
__device__ static __forceinline__ void dots(float *y, const float *w, const float *x, int64_t ld, int k_pad, int count)
{
    int lane = threadIdx.x & 31;
    float total[F32_TOKENS] = {};
    for (int slice = 0; slice < k_pad; slice += 256) {
        float sum[F32_TOKENS] = {};
#pragma unroll
        for (int k = slice + 4 * lane; k < slice + 256; k += 128) {
            if (k >= k_pad)
                break;
            float4 a = *(const float4 *)(w + k);
#pragma unroll
            for (int i = 0; i < F32_TOKENS; i++) {
                if (i >= count)
                    break;
                float4 b = *(const float4 *)(x + i * ld + k);
                sum[i] = __fmaf_rn(a.x, b.x, sum[i]);
                sum[i] = __fmaf_rn(a.y, b.y, sum[i]);
                sum[i] = __fmaf_rn(a.z, b.z, sum[i]);
                sum[i] = __fmaf_rn(a.w, b.w, sum[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < F32_TOKENS; i++)
            total[i] = __fadd_rn(total[i], sum[i]);
    }
#pragma unroll
    for (int i = 0; i < F32_TOKENS; i++)
        y[i] = tlc_warp_sum(total[i]);
}

__global__ static void __launch_bounds__(256) by_f32(const struct linear p)
{
    int lane = threadIdx.x & 31, o = blockIdx.x * 8 + threadIdx.x / 32, n = *p.n, token0 = blockIdx.y * F32_TOKENS;
    int row = p.gated ? o / 8 * 16 + o % 8 : o, count = min(n - token0, (int)F32_TOKENS), k_pad = p.k_bytes / 4;
    int64_t ld = p.x_pitch / 4;
    float a[F32_TOKENS], b[F32_TOKENS] = {};

    tlc_go();
    tlc_wait();
    if (count <= 0 || o >= (p.gated ? p.n_out / 2 : p.n_out))
        return;
    const float *w = (const float *)(p.w + row * p.w_pitch), *x = (const float *)p.x + token0 * ld;
    dots(a, w, x, ld, k_pad, count);
    if (p.gated)
        dots(b, w + 8 * (p.w_pitch / 4), x, ld, k_pad, count);
#pragma unroll
    for (int i = 0; i < F32_TOKENS; i++) {
        float *y;
        if (i != lane || i >= count)
            continue;
        y = p.out.data + (int64_t)(p.out.epi == TLC_EPI_RESIDUAL ? p.rows[token0 + i] : token0 + i) * p.out.ld + o;
        switch (p.out.epi) {
        case TLC_EPI_STORE: *y = a[i]; break;
        case TLC_EPI_SILU_MUL: *y = tlc_silu_mul(a[i], b[i]); break;
        case TLC_EPI_RELU2: *y = tlc_relu2(a[i]); break;
        case TLC_EPI_RESIDUAL: *y = __fadd_rn(*y, a[i]); break;
        }
    }
}

/* ---- launches ---- */

/* Tiles as stored rows x tokens. A choice of speed only: all give the same bits. */
enum tile {
    MMA_16x32,
    MMA_16x64,
    MMA_32x64,
    MMA_64x32,
    MMA_64x64,
    MMA_128x128,
    CLUSTER_64x32,
    CLUSTER_64x64,
    CLUSTER_128x64,
    WG_128x64,
    WG_128x128,
    WG_128x256,
    PAIR_256x128,
    PAIR_256x256,
    N_TILES
};

template <typename T, int ROWS, int TOKENS, int WR, int WT, int WK, int BK, int STAGES>
static cudaError_t launch_mma(const struct tlc_launch *l, const struct linear *p, int n_cap)
{
    void (*kernel)(const struct linear) = by_mma<T, ROWS, TOKENS, WR, WT, WK, BK, STAGES>;
    int bytes = (ROWS + TOKENS) * BK * STAGES;
    dim3 grid((p->n_stored + ROWS - 1) / ROWS, (n_cap + TOKENS - 1) / TOKENS);
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    return e != cudaSuccess ? e : tlc_launch(l, kernel, grid, dim3(32 * WR * WT * WK), bytes, *p);
}

template <int ROWS, int TOKENS, int WR, int WT, int WK, int BK, int STAGES>
static cudaError_t launch_cluster(const struct tlc_launch *l, const struct linear *p, int n_cap)
{
    void (*kernel)(const struct linear) = by_mma_cluster<ROWS, TOKENS, WR, WT, WK, BK, STAGES>;
    int bytes = (ROWS + TOKENS) * BK * STAGES;
    dim3 grid((p->n_stored + ROWS - 1) / ROWS * 4, (n_cap + TOKENS - 1) / TOKENS);
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    return e != cudaSuccess ? e : tlc_launch(l, kernel, grid, dim3(32 * WR * WT * WK), bytes, *p);
}

/* A matrix of bytes [n_rows][k], fetched in boxes of WG_K bytes x box_rows. */
static cudaError_t map_make(CUtensorMap *map, const uint8_t *data, int k, int64_t pitch, int n_rows, int box_rows)
{
    static decltype(&cuTensorMapEncodeTiled) encode = NULL;
    cuuint64_t size[2] = {(cuuint64_t)k, (cuuint64_t)n_rows}, stride[1] = {(cuuint64_t)pitch};
    cuuint32_t box[2] = {WG_K, (cuuint32_t)box_rows}, step[2] = {1, 1};
    if (!encode) {
        void *f = NULL;
        enum cudaDriverEntryPointQueryResult found;
        cudaError_t e =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
        if (e != cudaSuccess)
            return e;
        if (found != cudaDriverEntryPointSuccess || !f)
            return cudaErrorNotSupported;
        encode = (decltype(&cuTensorMapEncodeTiled))f;
    }
    if (encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, (void *)data, size, stride, box, step,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        return cudaErrorInvalidValue;
    return cudaSuccess;
}

template <int TOKENS, int STAGES, int PAIR>
static cudaError_t launch_wgmma(const struct tlc_launch *l, const struct linear *p, int n_cap)
{
    void (*kernel)(const struct linear, const CUtensorMap, const CUtensorMap);
    int bytes = wg_stage(TOKENS) * STAGES + WG_SLACK, rows = PAIR * WG_ROWS;
    int tiles = (p->n_stored + rows - 1) / rows * ((n_cap + TOKENS - 1) / TOKENS);
    if constexpr (PAIR == 1)
        kernel = by_wgmma<TOKENS, STAGES>;
    else
        kernel = by_wgmma_pair<TOKENS, STAGES>;
    CUtensorMap w_map, x_map;
    cudaError_t e = map_make(&w_map, p->w, p->k_bytes, p->w_pitch, p->n_stored, WG_ROWS);
    if (e == cudaSuccess)
        e = map_make(&x_map, p->x, p->k_bytes, p->x_pitch, n_cap, TOKENS / PAIR);
    if (e == cudaSuccess)
        e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e == cudaSuccess)
        e = tlc_launch(l, kernel, dim3(min(tiles, l->sms / PAIR) * PAIR), dim3(WG_THREADS), bytes, *p, w_map, x_map);
    return e;
}

static cudaError_t launch_int8(const struct tlc_launch *l, const struct linear *p, int n_cap, enum tile tile)
{
    switch (tile) {
    case MMA_16x32: return launch_mma<int, 16, 32, 1, 1, 4, 256, 6>(l, p, n_cap);
    case MMA_16x64: return launch_mma<int, 16, 64, 1, 1, 8, 256, 4>(l, p, n_cap);
    case MMA_32x64: return launch_mma<int, 32, 64, 2, 1, 4, 256, 4>(l, p, n_cap);
    case MMA_64x32: return launch_mma<int, 64, 32, 4, 1, 2, 128, 6>(l, p, n_cap);
    case MMA_64x64: return launch_mma<int, 64, 64, 4, 1, 2, 128, 6>(l, p, n_cap);
    case MMA_128x128: return launch_mma<int, 128, 128, 4, 2, 1, 128, 3>(l, p, n_cap);
    case CLUSTER_64x32: return launch_cluster<64, 32, 2, 1, 2, 128, 6>(l, p, n_cap);
    case CLUSTER_64x64: return launch_cluster<64, 64, 4, 1, 2, 128, 6>(l, p, n_cap);
    case CLUSTER_128x64: return launch_cluster<128, 64, 4, 1, 2, 128, 4>(l, p, n_cap);
    case WG_128x64: return launch_wgmma<64, 8, 1>(l, p, n_cap);
    case WG_128x128: return launch_wgmma<128, 6, 1>(l, p, n_cap);
    case WG_128x256: return launch_wgmma<256, 4, 1>(l, p, n_cap);
    case PAIR_256x128: return launch_wgmma<128, 6, 2>(l, p, n_cap);
    case PAIR_256x256: return launch_wgmma<256, 4, 2>(l, p, n_cap);
    default: return cudaErrorInvalidValue;
    }
}

static cudaError_t launch_bf16(const struct tlc_launch *l, const struct linear *p, int n_cap, enum tile tile)
{
    switch (tile) {
    case MMA_16x32: return launch_mma<float, 16, 32, 1, 2, 1, 128, 6>(l, p, n_cap);
    case MMA_16x64: return launch_mma<float, 16, 64, 1, 4, 1, 128, 6>(l, p, n_cap);
    case MMA_64x64: return launch_mma<float, 64, 64, 4, 2, 1, 128, 6>(l, p, n_cap);
    case MMA_128x128: return launch_mma<float, 128, 128, 4, 2, 1, 128, 3>(l, p, n_cap);
    default: return cudaErrorInvalidValue;
    }
}

/* Tokens of a wgmma tile: fewest rounds of tiles over the multiprocessors, each as long as the bytes it fetches. */
static enum tile choose_wgmma(const struct linear *p, int n_cap, int sms)
{
    enum tile best = WG_128x256;
    int64_t least = INT64_MAX;
    for (int i = 0; i < 3; i++) {
        int tokens = 256 >> i, tiles = (p->n_stored + WG_ROWS - 1) / WG_ROWS * ((n_cap + tokens - 1) / tokens);
        int64_t cost = (int64_t)((tiles + sms - 1) / sms) * (WG_ROWS + tokens);
        if (cost < least) {
            least = cost;
            best = (enum tile)(WG_128x256 - i);
        }
    }
    return best;
}

static enum tile choose(const struct linear *p, int n_cap, bool integers, int cc, int sms)
{
    int64_t outputs = (int64_t)p->n_stored * n_cap;
    if (integers && cc == 90 && n_cap > 64)
        return choose_wgmma(p, n_cap, sms);
    if (outputs >= (int64_t)sms * 128 * 96 && n_cap > 64)
        return MMA_128x128;
    if (outputs >= (int64_t)sms * 64 * 64)
        return integers && n_cap <= 32 ? MMA_64x32 : MMA_64x64;
    if (integers && cc >= 90)
        return n_cap <= 32 ? CLUSTER_64x32 : CLUSTER_64x64;
    return n_cap <= 32 ? MMA_16x32 : MMA_16x64;
}

/* The product in the words of the kernels. */
static struct linear describe(const struct tl_mat *m, const struct tlc_acts *a, const struct tlc_set *set,
                              struct tlc_out out)
{
    struct linear p = {};
    int size = m->wtype == TL_W_F32 ? 4 : m->wtype == TL_W_BF16 ? 2 : 1;
    p.w = m->wtype == TL_W_F32    ? (const uint8_t *)m->rows32
          : m->wtype == TL_W_BF16 ? (const uint8_t *)m->rows16
                                  : (const uint8_t *)m->rows8;
    p.x = m->wtype == TL_W_F32    ? (const uint8_t *)a->f
          : m->wtype == TL_W_BF16 ? (const uint8_t *)a->b
                                  : (const uint8_t *)a->q;
    if (size == 1) {
        p.w_scale = m->row_scale;
        p.x_scale = a->scale;
    }
    p.w_pitch = m->k_pad * size;
    p.x_pitch = a->ld * size;
    p.k_bytes = (int)m->k_pad * size;
    p.n_stored = (int)m->n_tiles * 16;
    p.n_out = (int)m->n_out;
    p.gated = m->gated;
    p.rows = set->rows;
    p.n = set->n;
    p.out = out;
    return p;
}

cudaError_t tlc_linear_large(const struct tlc_launch *l, const struct tl_mat *m, const struct tlc_acts *a,
                             const struct tlc_set *set, struct tlc_out out)
{
    struct linear p = describe(m, a, set, out);
    bool integers = m->wtype == TL_W_INT8 || m->wtype == TL_W_INT4;
    if (m->gated != (out.epi == TLC_EPI_SILU_MUL) || a->ld < m->k_pad || set->n_cap < 1)
        return cudaErrorInvalidValue;
    if (m->wtype == TL_W_F32) {
        int outputs = p.gated ? p.n_out / 2 : p.n_out;
        dim3 grid((outputs + 7) / 8, (set->n_cap + F32_TOKENS - 1) / F32_TOKENS);
        return tlc_launch(l, by_f32, grid, dim3(256), 0, p);
    }
    enum tile tile = choose(&p, set->n_cap, integers, l->cc, l->sms);
    return integers ? launch_int8(l, &p, set->n_cap, tile) : launch_bf16(l, &p, set->n_cap, tile);
}
