/* cuda/linear_large.cu - y = W x for any number of rows: decode batches and prefill chunks.
 *
 * In every kernel but by_wide the weights are the M operand of the matrix unit (16 stored rows) and the rows
 * of activations, here called tokens, are the N operand. So a thread holds stored rows r and r + 8 of a block of 16 for
 * the same token: of a gated matrix that is gate and up of one output.
 *
 * - by_mma: m16n8k32 (INT8) or m16n8k16 (BF16) behind a ring of cp.async stages; any card from sm_80 on. Both
 *   types are the same bytes: one product consumes 32 bytes of k. Warps may share the k of a tile (integers only:
 *   exact in any order).
 * - by_wgmma: INT8 on sm_90a; one thread fetches tiles with the tensor copy engine, two warpgroups multiply. It also
 *   fetches rows from the count up to n_cap: nobody looks at their sums.
 * - by_split: INT8 on sm_90a, for few tokens; as by_wgmma, with k over the blocks of a cluster.
 * - by_wide: as by_split, for tall matrices; tokens are M and stored rows N.
 * - by_slices: BF16 on sm_90a, where a multiprocessor has one tile, or slices of one.
 * - by_waves: BF16 on sm_90a, where tiles are many: as by_wgmma, by pairs of blocks, with tiles finished while the next
 *   one is multiplied.
 * - by_f32: one warp per output, plain arithmetic.
 *
 * What limits BF16 on sm_90a is the L2 cache: all multiprocessors together could take in more than it hands out. So tiles
 * are as large as they can be, and the two blocks of by_waves share tokens: each fetches one half, for both.
 *
 * A batch of decode is short of time, not of arithmetic: whatever the kernel in front does not write (weights,
 * scales of stored rows, row numbers) is asked for before the wait, and what the sums meet at the end (scales of
 * tokens, the stream that they are added to) before the products.
 *
 * BF16: total = first slice, then total = total + slice, ascending (a total that starts at -0 is the same: -0 + x
 * = x). The sums of wgmma and of mma.sync have the same bits; tests/cuda/check_linear.cu holds that.
 * F32, for any number of rows: lane l sums k = 4 l .. 4 l + 3, then 128 + 4 l .., of a slice of 256 in one
 * ascending fma chain from zero and adds its slices ascending; the lanes are added in the tree of tlc_warp_sum. */
#include "linear_slices.cuh"
#include "linear_split.cuh"
#include "linear_waves.cuh"
#include "linear_wgmma.cuh"
#include "linear_wide.cuh"

#include <limits.h>

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

/* Have the weights of ROWS stored rows brought into L2: without shared memory to land in, all of them at once, while
 * the kernel in front still runs. A part for each warp. */
template <int ROWS, int WARPS> __device__ static __forceinline__ void prefetch(const struct linear &p, int row0)
{
#if __CUDA_ARCH__ >= 900
    int warp = threadIdx.x / 32, part = (int)(min(ROWS, p.n_stored - row0) / 16 * (16 * p.w_pitch / WARPS));
    static_assert(16 * 64 % (16 * WARPS) == 0, "parts are multiples of 16 bytes");
    if (threadIdx.x % 32 == 0)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p.w + row0 * p.w_pitch + (int64_t)warp * part),
                     "r"(part)
                     : "memory");
#endif
}

/* A CTA makes ROWS stored rows x TOKENS; its warps are WR x WT over the tile times WK over k. T: int (INT8) or float
 * (BF16). */
template <typename T, int ROWS, int TOKENS, int WR, int WT, int WK, int BK, int STAGES>
__global__ static void __launch_bounds__(32 * WR * WT * WK) by_mma(const struct linear p)
{
    enum {
        THREADS = 32 * WR * WT * WK,
        MT = ROWS / WR / 16,
        NT = TOKENS / WT / 8,
        MINE = WK > 1 ? MT * NT / WK : NT, /* fragments that a warp finishes at a time */
        STEPS = BK / 32 / WK,
        W_BYTES = ROWS * BK,
        STAGE = (ROWS + TOKENS) * BK,
        EXACT = T(1) / 2 == 0,
        AHEAD = WK > 1 || MT == 1 /* there are registers to hold what the end needs */
    };
    static_assert(NT % 2 == 0 && BK % (32 * WK) == 0 && BK % 128 == 0, "shape");
    static_assert(WK == 1 || (EXACT && MINE > 0 && TOKENS / 8 % MINE == 0), "shares");
    static_assert(WK == 1 || WR * WT * WK * MT * NT * 512 <= STAGES * STAGE, "sums fit in the ring");
    static_assert(EXACT || BK == 128, "a slice of 256 is four stages");
    extern __shared__ __align__(1024) uint8_t ring[];
    uint32_t base = shared_at(ring);
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int wk = warp % WK, wr = warp / WK % WR, wt = warp / WK / WR;
    int n = *p.n, row0 = blockIdx.x * ROWS, token0 = blockIdx.y * TOKENS;
    int n_k = (p.k_bytes + BK - 1) / BK, across = TOKENS / 8;
    int share = WK > 1 ? warp * MINE : (wr * MT) * across + wt * NT; /* its first fragment of the tile to finish */
    int end_row = row0 + share / across * 16, end_token = token0 + share % across * 8;
    struct ends<MINE> e;
    T acc[MT][NT][4];
    float total[EXACT ? 1 : MT][EXACT ? 1 : NT][4];

    tlc_go();
    if (token0 >= n) {
        tlc_wait(); /* so that the end of this kernel means the end of those before it */
        return;
    }
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        fetch<ROWS, BK, THREADS>(base + s * STAGE, p.w, p.w_pitch, row0, p.n_stored, s * BK, p.k_bytes);
    if (blockIdx.y == 0)
        prefetch<ROWS, WR * WT * WK>(p, row0);
    if (AHEAD)
        ask_early(p, e, end_row, end_token, n);
    tlc_wait();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        fetch<TOKENS, BK, THREADS>(base + s * STAGE + W_BYTES, p.x, p.x_pitch, token0, n, s * BK, p.k_bytes);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    if (AHEAD)
        ask_late(p, e, end_row, end_token);
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
            int k = (kt + STAGES - 1) * BK;
            fetch<ROWS, BK, THREADS>(to, p.w, p.w_pitch, row0, p.n_stored, k, p.k_bytes);
            fetch<TOKENS, BK, THREADS>(to + W_BYTES, p.x, p.x_pitch, token0, n, k, p.k_bytes);
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

    if constexpr (WK > 1) { /* exchange: every warp adds up its share of the fragments */
        T mine[MINE][4] = {};
        int4 *sums = (int4 *)ring;
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
#pragma unroll
        for (int i = 0; i < MT * NT; i++)
            sums[(warp * MT * NT + i) * 32 + lane] = make_int4(acc[i / NT][i % NT][0], acc[i / NT][i % NT][1],
                                                               acc[i / NT][i % NT][2], acc[i / NT][i % NT][3]);
        __syncthreads();
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            int i = (share + j) / across, t = (share + j) % across; /* 16 rows, 8 tokens */
            int warps = (t / NT * WR + i / MT) * WK, at = (i % MT * NT + t % NT) * 32 + lane;
#pragma unroll
            for (int q = 0; q < WK; q++) {
                int4 v = sums[(warps + q) * MT * NT * 32 + at];
                mine[j][0] += v.x;
                mine[j][1] += v.y;
                mine[j][2] += v.z;
                mine[j][3] += v.w;
            }
        }
        finish<MINE>(p, e, mine, end_row);
    } else {
#pragma unroll
        for (int i = 0; i < MT; i++) {
            int row = end_row + 16 * i;
            if (!AHEAD) {
                ask_early(p, e, row, end_token, n);
                ask_late(p, e, row, end_token);
            }
            if constexpr (EXACT)
                finish<NT>(p, e, acc[i], row);
            else
                finish<NT>(p, e, total[i], row);
        }
    }
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
    MMA_64x64,
    MMA_128x128,
    WG_128x64,
    WG_128x128,
    WG_128x256,
    SPLIT_1, /* 64x64, k over so many blocks */
    SPLIT_2,
    SPLIT_4,
    WIDE_80,        /* 80x64 */
    SLICES_64x32_4, /* slices over so many blocks */
    SLICES_64x64_4,
    SLICES_128x32,
    SLICES_128x64,
    WAVES, /* 256x128, of a pair of blocks */
    N_TILES
};

static int blocks(int n, int of) { return (n + of - 1) / of; }

template <typename T, int ROWS, int TOKENS, int WR, int WT, int WK, int BK, int STAGES>
static cudaError_t launch_mma(const struct tlc_launch *l, const struct linear *p, int n_cap)
{
    void (*kernel)(const struct linear) = by_mma<T, ROWS, TOKENS, WR, WT, WK, BK, STAGES>;
    int bytes = (ROWS + TOKENS) * BK * STAGES;
    dim3 grid(blocks(p->n_stored, ROWS), blocks(n_cap, TOKENS));
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

/* A kernel whose weights and tokens come in boxes of so many rows. */
struct boxed {
    void (*kernel)(const struct linear, const CUtensorMap, const CUtensorMap);
    int w_rows, x_rows, cluster, threads, shared;
};

static cudaError_t launch_boxed(const struct tlc_launch *l, const struct linear *p, int n_cap, struct boxed b,
                                dim3 grid)
{
    CUtensorMap w_map, x_map;
    cudaError_t e = map_make(&w_map, p->w, p->k_bytes, p->w_pitch, p->n_stored, b.w_rows);
    if (e == cudaSuccess)
        e = map_make(&x_map, p->x, p->k_bytes, p->x_pitch, n_cap, b.x_rows);
    if (e == cudaSuccess)
        e = cudaFuncSetAttribute(b.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, b.shared);
    if (e == cudaSuccess)
        e = tlc_launch_cluster(l, b.kernel, b.cluster, grid, dim3(b.threads), b.shared, *p, w_map, x_map);
    return e;
}

template <int TOKENS, int STAGES>
static cudaError_t launch_wgmma(const struct tlc_launch *l, const struct linear *p, int n_cap)
{
    int tiles = blocks(p->n_stored, WG_ROWS) * blocks(n_cap, TOKENS);
    struct boxed b = {by_wgmma<TOKENS, STAGES>, WG_ROWS, TOKENS, 1, WG_THREADS, wg_shared(TOKENS, STAGES)};
    return launch_boxed(l, p, n_cap, b, dim3(min(tiles, l->sms)));
}

template <int SPLIT> static cudaError_t launch_split(const struct tlc_launch *l, const struct linear *p, int n_cap)
{
    struct boxed b = {by_split<SPLIT>, SP_TILE, SP_TILE, SPLIT, SP_THREADS, SP_SHARED};
    return launch_boxed(l, p, n_cap, b, dim3(blocks(p->n_stored, SP_TILE) * SPLIT, blocks(n_cap, SP_TILE)));
}

template <int GROUPS, int SPLIT, int TOKENS>
static cudaError_t launch_slices(const struct tlc_launch *l, const struct linear *p, int n_cap)
{
    typedef sl<GROUPS, SPLIT, TOKENS> is;
    struct boxed b = {by_slices<GROUPS, SPLIT, TOKENS>, is::ROWS, TOKENS, SPLIT, is::THREADS, is::SHARED};
    return launch_boxed(l, p, n_cap, b, dim3(blocks(p->n_stored, is::ROWS) * SPLIT, blocks(n_cap, TOKENS)));
}

static cudaError_t launch_waves(const struct tlc_launch *l, const struct linear *p, int n_cap)
{
    int pairs = max(l->sms / WV_PAIR, 1), items = wv_tiles_of(p->n_stored, n_cap, pairs).items;
    struct boxed b = {by_waves, WV_ROWS, WV_BOX, WV_PAIR, WV_THREADS, WV_SHARED};
    return launch_boxed(l, p, n_cap, b, dim3(min(items, pairs) * WV_PAIR));
}

static cudaError_t launch_wide(const struct tlc_launch *l, const struct linear *p, int n_cap)
{
    struct boxed b = {by_wide, WD_ROWS, WD_TOKENS, 1, WD_THREADS, WD_SHARED};
    if (p->k_bytes > WD_K * WG_K)
        return cudaErrorInvalidValue;
    return launch_boxed(l, p, n_cap, b, dim3(blocks(p->n_stored, WD_ROWS), blocks(n_cap, WD_TOKENS)));
}

static cudaError_t launch_int8(const struct tlc_launch *l, const struct linear *p, int n_cap, enum tile tile)
{
    switch (tile) {
    case MMA_16x32: return launch_mma<int, 16, 32, 1, 1, 4, 256, 6>(l, p, n_cap);
    case MMA_16x64: return launch_mma<int, 16, 64, 1, 1, 8, 256, 4>(l, p, n_cap);
    case MMA_64x64: return launch_mma<int, 64, 64, 4, 1, 2, 128, 6>(l, p, n_cap);
    case MMA_128x128: return launch_mma<int, 128, 128, 4, 2, 1, 128, 3>(l, p, n_cap);
    case WG_128x64: return launch_wgmma<64, 8>(l, p, n_cap);
    case WG_128x128: return launch_wgmma<128, 6>(l, p, n_cap);
    case WG_128x256: return launch_wgmma<256, 4>(l, p, n_cap);
    case SPLIT_1: return launch_split<1>(l, p, n_cap);
    case SPLIT_2: return launch_split<2>(l, p, n_cap);
    case SPLIT_4: return launch_split<4>(l, p, n_cap);
    case WIDE_80: return launch_wide(l, p, n_cap);
    default: return cudaErrorInvalidValue;
    }
}

static cudaError_t launch_bf16(const struct tlc_launch *l, const struct linear *p, int n_cap, enum tile tile)
{
    switch (tile) {
    case MMA_16x32: return launch_mma<float, 16, 32, 1, 2, 1, 128, 6>(l, p, n_cap);
    case MMA_64x64: return launch_mma<float, 64, 64, 4, 2, 1, 128, 6>(l, p, n_cap);
    case MMA_128x128: return launch_mma<float, 128, 128, 4, 2, 1, 128, 3>(l, p, n_cap);
    case SLICES_64x32_4: return launch_slices<1, 4, 32>(l, p, n_cap);
    case SLICES_64x64_4: return launch_slices<1, 4, 64>(l, p, n_cap);
    case SLICES_128x32: return launch_slices<2, 1, 32>(l, p, n_cap);
    case SLICES_128x64: return launch_slices<2, 1, 64>(l, p, n_cap);
    case WAVES: return launch_waves(l, p, n_cap);
    default: return cudaErrorInvalidValue;
    }
}

/* The tile of wgmma that ends first: tiles of 64, 128 and 256 tokens take 5, 8 and 15 units of time, and the
 * multiprocessors take them in turns. */
static enum tile choose_wgmma(const struct linear *p, int n_cap, int sms)
{
    static const int tokens[] = {64, 128, 256}, units[] = {5, 8, 15};
    int best = 0, best_time = INT_MAX;
    for (int i = 0; i < 3; i++) {
        int time = units[i] * blocks(blocks(p->n_stored, WG_ROWS) * blocks(n_cap, tokens[i]), sms);
        if (time < best_time) {
            best = i;
            best_time = time;
        }
    }
    return (enum tile)(WG_128x64 + best);
}

/* The kernel of BF16 on sm_90a: by_slices where a multiprocessor has no more than one of its tiles, and by_waves where there
 * are more, unless half of its tokens would be empty. Slices are shared out where tiles are so few that it is worth the
 * exchange of sums. Tiles have 32 tokens where there are no more, or where only half of the multiprocessors get one. */
static enum tile choose_bf16(const struct linear *p, int n_cap, int sms)
{
    int tiles = blocks(p->n_stored, 128), across = blocks(n_cap, 64);
    if (5 * blocks(p->n_stored, 64) * across <= 2 * sms)
        return n_cap <= 32 ? SLICES_64x32_4 : SLICES_64x64_4;
    if (n_cap <= 32 || 2 * tiles * blocks(n_cap, 32) <= sms)
        return SLICES_128x32;
    return n_cap <= 64 || tiles * across <= sms ? SLICES_128x64 : WAVES;
}

/* The tile of the most reuse that still occupies the card; fitted to measured times. */
static enum tile choose(const struct linear *p, int n_cap, bool integers, int cc, int sms)
{
    if (cc == 90 && integers && n_cap <= SP_TILE && 2 * blocks(p->n_stored, SP_TILE) <= sms)
        return 4 * blocks(p->n_stored, SP_TILE) <= sms ? SPLIT_4 : SPLIT_2;
    if (cc == 90 && integers && n_cap <= WD_TOKENS && p->k_bytes <= WD_K * WG_K && blocks(p->n_stored, WD_ROWS) <= sms)
        return WIDE_80;
    if (integers && blocks(p->n_stored, 16) * blocks(n_cap, 32) <= 3 * sms)
        return MMA_16x32;
    if (cc == 90)
        return integers ? choose_wgmma(p, n_cap, sms) : choose_bf16(p, n_cap, sms);
    if (integers && blocks(p->n_stored, 16) * blocks(n_cap, 64) <= 2 * sms)
        return MMA_16x64;
    if (n_cap > 64 && 5 * blocks(p->n_stored, 128) * blocks(n_cap, 128) >= 3 * sms)
        return MMA_128x128;
    return n_cap > 32 && blocks(p->n_stored, 64) * blocks(n_cap, 64) >= sms ? MMA_64x64 : MMA_16x32;
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
