/* y = W x for 2 to 16 rows that are ready, INT4 and INT8: decode steps of few streams, and short suffixes behind a prefix.
 *
 * As in linear_one.cu, a block has all of its weights on their way before it waits for the kernels in front, and the 8 columns of the
 * matrix unit, of which one row uses one, are 8 rows at the same price. Warps share the inputs, and of more tiles than one also the
 * tiles. Integer sums are exact: the bits are those of the other kernels. From sm_90 on.
 *
 * Tried and slower (tests/bench/results.md): blocks that make the rows ready by themselves, as that of one row does, for each block
 * reads all rows then; rows in registers, for then two blocks do not fit into an SM. BF16 gained next to nothing. */
#include "backend_impl.cuh"
#include "cluster.cuh"
#include "linear_tiles.cuh"
#include "rows.cuh"

#define THREADS   512
#define WARPS     (THREADS / 32)
#define ROWS_MAX  16
#define WAVES_MAX 3 /* blocks of a multiprocessor, one after the other: each reads the rows anew */
#define PITCH     20 /* words from a row's sums of a tile to the next row's: sums that are written at once share no bank */

struct few {
    struct tiles m;
    const uint8_t *rows; /* the input: [row][ld] */
    const float *scale;
    int64_t ld;
    struct tlc_set set;
    struct tlc_out out;
    int x_pitch;       /* bytes from a row to the next in shared memory: no two that are read at once share a bank */
    int x_at, sums_at; /* bytes in front of rows and sums there; tiles come first */
    int pair;          /* 2: two blocks ask for the rows together; 1: each does for itself */
    int shares;        /* of the inputs: warp w has number w % shares, of the tiles w / shares, ... */
};

struct shared_head {
    uint64_t full, rows; /* the tiles are there, the rows */
    float scale[ROWS_MAX], row_scale[TILES_MAX * 16];
};

/* ---- sums: of a share of the inputs, 16 outputs of a tile by 8 NT rows; see mma_s8 for what thread holds which ---- */

template <int NT>
__device__ static __forceinline__ void sums_q4(int sum[NT][4], const struct few *f, const uint8_t *tile,
                                               const uint8_t *x, int share)
{
    const int zero[4] = {0, 0, 0, 0};
    int lane = threadIdx.x & 31, chunks = f->m.k_pad / 64;
    x += (lane >> 2) * f->x_pitch + 8 * (lane & 3);
#pragma unroll 2
    for (int c = share; c < chunks; c += f->shares) {
        uint4 w = *(const uint4 *)(tile + chunk_at(c) + lane * 16);
        int s = *(const uint16_t *)(tile + chunk_scales_at(c, chunks) + (lane >> 2) * 2);
        const uint32_t a[4] = {low_q4(w.x), low_q4(w.y), high_q4(w.x), high_q4(w.y)};
        const uint32_t a2[4] = {low_q4(w.z), low_q4(w.w), high_q4(w.z), high_q4(w.w)};
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            int d[4];
            uint2 b = *(const uint2 *)(x + nt * 8 * f->x_pitch + c * 64);
            uint2 b2 = *(const uint2 *)(x + nt * 8 * f->x_pitch + c * 64 + 32);
            mma_s8(d, a, b.x, b.y, zero);
            sum[nt][0] += (s & 15) * d[0];
            sum[nt][1] += (s & 15) * d[1];
            sum[nt][2] += (s >> 8 & 15) * d[2];
            sum[nt][3] += (s >> 8 & 15) * d[3];
            mma_s8(d, a2, b2.x, b2.y, zero);
            sum[nt][0] += (s >> 4 & 15) * d[0];
            sum[nt][1] += (s >> 4 & 15) * d[1];
            sum[nt][2] += (s >> 12) * d[2];
            sum[nt][3] += (s >> 12) * d[3];
        }
    }
#pragma unroll
    for (int i = 0; i < NT * 4; i++) /* the shift is exact */
        sum[i / 4][i % 4] >>= 4;
}

template <int NT>
__device__ static __forceinline__ void sums_q8(int sum[NT][4], const struct few *f, const uint8_t *tile,
                                               const uint8_t *x, int share)
{
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, pitch = pitch_of(TL_W_INT8, f->m.k_pad);
#pragma unroll 2
    for (int k = share * 32 + 8 * t; k < f->m.k_pad; k += f->shares * 32) {
        uint2 top = *(const uint2 *)(tile + g * pitch + k), low = *(const uint2 *)(tile + (g + 8) * pitch + k);
        const uint32_t a[4] = {top.x, low.x, top.y, low.y};
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            uint2 b = *(const uint2 *)(x + (nt * 8 + g) * f->x_pitch + k);
            mma_s8(sum[nt], a, b.x, b.y, sum[nt]);
        }
    }
}

/* The rows, for both blocks of a pair: each asks for every second one. Called by warp 0, after the barriers of both are there and
 * know how many bytes come. */
__device__ static __forceinline__ void ask_for_rows(const struct few *f, int n, uint8_t *to, uint64_t *bar)
{
#if __CUDA_ARCH__ >= 900
    int lane = threadIdx.x & 31;
    if (lane < n && (lane & (f->pair - 1)) == (int)(blockIdx.x & (f->pair - 1)))
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], "
                     "%2, [%3], "
                     "%4;" ::"r"(shared_at(to + lane * f->x_pitch)),
                     "l"(f->rows + lane * f->ld), "r"(f->m.k_pad), "r"(shared_at(bar)),
                     "h"((uint16_t)(f->pair == 2 ? 3 : 1))
                     : "memory");
#endif
}

/* Words from one share's sums to the next */
template <int NT> __device__ static __forceinline__ int share_step(const struct few *f)
{
    return f->m.most * 8 * NT * PITCH;
}

template <int W, int NT>
__device__ static __forceinline__ void all_sums(const struct few *f, struct shared_head *s, const uint8_t *ring)
{
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, share = warp % f->shares;
    const uint8_t *x = ring + f->x_at;
    int *to = (int *)(ring + f->sums_at) + share * share_step<NT>(f) + (lane & 3) * 2 * PITCH + (lane >> 2);
#pragma unroll 1
    for (int i = warp / f->shares, n = tiles_of_block(&f->m); i < n; i += WARPS / f->shares) {
        int sum[NT][4] = {};
        if (W == TL_W_INT4)
            sums_q4<NT>(sum, f, ring + i * f->m.room, x, share);
        else
            sums_q8<NT>(sum, f, ring + i * f->m.room, x, share);
#pragma unroll
        for (int v = 0; v < NT * 4; v++)
            to[(i * 8 * NT + v / 4 * 8 + v % 2) * PITCH + v % 4 / 2 * 8] = sum[v / 4][v % 4];
    }
}

/* ---- the kernel ---- */

/* Output number `index` of a block: r is its place in tile i, row the place of its row in the set. */
struct place {
    int i, r, row;
    float *out; /* NULL: it is none */
};
template <int NT> __device__ static __forceinline__ struct place place_of(const struct few *f, int index, int n)
{
    bool gated = f->out.epi == TLC_EPI_SILU_MUL;
    int per = gated ? 8 : 16, tile;
    struct place p = {index / per / (8 * NT), index % per, index / per % (8 * NT), NULL};
    tile = (int)blockIdx.x + p.i * (int)gridDim.x;
    int64_t o = (int64_t)tile * per + p.r;
    if (p.i < f->m.most && tile < f->m.n_tiles && p.row < n && o < (gated ? f->m.n_out / 2 : f->m.n_out))
        p.out = f->out.data + (f->out.epi == TLC_EPI_RESIDUAL ? f->set.rows[p.row] : p.row) * f->out.ld + o;
    return p;
}

/* The product of stored row r of the place's tile. */
template <int NT>
__device__ static __forceinline__ float product(const struct few *f, const struct shared_head *s, const int *sums,
                                                const struct place *p, int r)
{
    int sum = 0, step = share_step<NT>(f);
    sums += (p->i * 8 * NT + p->row) * PITCH + r;
#pragma unroll 8
    for (int share = 0; share < f->shares; share++)
        sum += sums[share * step];
    return tlc_scaled(sum, s->scale[p->row], s->row_scale[p->i * 16 + r]);
}

template <int W, int NT>
__global__ static void __launch_bounds__(THREADS) linear_few(const __grid_constant__ struct few f)
{
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ struct shared_head s;
    const int *sums = (const int *)(ring + f.sums_at);
    int t = threadIdx.x, n = *f.set.n, tile = (int)blockIdx.x + t / 16 * (int)gridDim.x;
    float old = 0;
    struct place p = place_of<NT>(&f, t, n);
    if (t == 0)
        bar_init(&s.rows, 1);
    if (t < 32)
        ask_for_tiles<W>(&f.m, &s.full, ring); /* and a fence */
#if __CUDA_ARCH__ >= 900
    if (t == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_at(&s.rows)), "r"(n * f.m.k_pad)
                     : "memory");
#endif
    __syncwarp();
    tlc_cluster_arrive();
    if (t < f.m.most * 16 && tile < f.m.n_tiles)
        s.row_scale[t] = __ldg(f.m.row_scale + (int64_t)tile * 16 + t % 16);
    __syncthreads(); /* the barriers are there */
    tlc_cluster_wait();
    tlc_wait();
    tlc_go();
    if (t < 32)
        ask_for_rows(&f, n, ring + f.x_at, &s.rows);
    else if (t < 32 + n)
        s.scale[t - 32] = f.scale[t - 32];
    if (f.out.epi == TLC_EPI_RESIDUAL && p.out)
        old = *p.out;
    bar_wait(&s.full, 0);
    bar_wait(&s.rows, 0);
    all_sums<W, NT>(&f, &s, ring);
    __syncthreads();
#pragma unroll 1
    for (int index = t; index < f.m.most * 16 * 8 * NT; index += THREADS) {
        if (index != t)
            p = place_of<NT>(&f, index, n);
        if (!p.out)
            continue;
        float y = product<NT>(&f, &s, sums, &p, p.r);
        switch (f.out.epi) {
        case TLC_EPI_STORE: break;
        case TLC_EPI_SILU_MUL: y = tlc_silu_mul(y, product<NT>(&f, &s, sums, &p, p.r + 8)); break;
        case TLC_EPI_RELU2: y = tlc_relu2(y); break;
        case TLC_EPI_RESIDUAL: y = __fadd_rn(index == t ? old : *p.out, y); break;
        }
        *p.out = y;
    }
}

/* ---- launches ---- */

#define ALL_KERNELS(X)                                                                                                 \
    X(TL_W_INT4, 1)                                                                                                    \
    X(TL_W_INT4, 2)                                                                                                    \
    X(TL_W_INT8, 1)

typedef void (*few_kernel)(struct few);

static few_kernel kernel_of(int w, int nt)
{
#define X(W, NT)                                                                                                       \
    if (w == W && nt == NT)                                                                                            \
        return linear_few<W, NT>;
    ALL_KERNELS(X)
#undef X
    return NULL;
}

cudaError_t tlc_linear_few_init(size_t shared_max)
{
    struct cudaFuncAttributes a;
    cudaError_t e = cudaSuccess;
#define X(W, NT)                                                                                                       \
    if (e == cudaSuccess)                                                                                              \
        e = cudaFuncGetAttributes(&a, (const void *)linear_few<W, NT>);                                                \
    if (e == cudaSuccess)                                                                                              \
        e = cudaFuncSetAttribute((const void *)linear_few<W, NT>, cudaFuncAttributeMaxDynamicSharedMemorySize,         \
                                 (int)(shared_max - a.sharedSizeBytes));
    ALL_KERNELS(X)
#undef X
    return e;
}

/* Fills *f but for the rows and where they go; returns the bytes of shared memory that a block needs. */
static size_t plan(struct few *f, const struct tl_mat *m, int n_cap, int sms, int *grid, int *waves)
{
    int columns = n_cap > 8 ? 16 : 8;
    f->m = tiles_of(m, sms / 8 * 8, grid, waves); /* an even number, so that blocks make pairs */
    f->x_pitch = ((int)m->k_pad + 127) / 128 * 128 + 32;
    f->shares = f->m.most > 1 ? WARPS / 2 : WARPS;
    f->x_at = f->m.most * f->m.room;
    f->sums_at = f->x_at + columns * f->x_pitch;
    return (size_t)f->sums_at + (size_t)(f->shares * f->m.most * columns * PITCH) * sizeof(int);
}

bool tlc_linear_few_fits(const struct tlc_launch *l, const struct tl_mat *m, int n_cap)
{
    struct few f;
    int grid, waves,
        most = m->wtype == TL_W_INT4   ? ROWS_MAX
               : m->wtype == TL_W_INT8 ? 8 /* the kernels of many rows overtake it */
                                       : 0;
    return l->cc >= 90 && n_cap > 1 && n_cap <= most &&
           plan(&f, m, n_cap, l->sms, &grid, &waves) + sizeof(struct shared_head) + 128 <= l->shared_max &&
           waves <= WAVES_MAX;
}

cudaError_t tlc_linear_few(const struct tlc_launch *l, const struct tl_mat *m, const struct tlc_acts *acts,
                           const struct tlc_set *set, struct tlc_out out)
{
    struct few f = {};
    int grid, waves;
    size_t shared = plan(&f, m, set->n_cap, l->sms, &grid, &waves);
    f.rows = (const uint8_t *)acts->q;
    f.scale = acts->scale;
    f.ld = acts->ld;
    f.pair = grid % 2 ? 1 : 2;
    f.set = *set;
    f.out = out;
    return tlc_launch_cluster(l, kernel_of(m->wtype, set->n_cap > 8 ? 2 : 1), f.pair, dim3((unsigned)grid),
                              dim3(THREADS), shared, f);
}
