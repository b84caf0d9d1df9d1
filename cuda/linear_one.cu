/* y = W x for one row that is made ready here: the decode step of one stream, where what counts is the time from the kernel in front
 * to the kernel behind.
 *
 * Weights depend on nothing: each block asks for all of its tiles before it waits for the kernels in front, so that they stream in
 * while those still run. After the wait every block makes the whole input row ready by itself (norm, quantising), which costs less
 * than another kernel. Code is fetched as slowly as data here, so what runs after the wait is short, and one kernel serves all
 * epilogues. Bits equal those of the other kernels: integer sums are exact, a BF16 sum has the same slices. */
#include "backend_impl.cuh"
#include "linear_tiles.cuh"
#include "rows.cuh"

#define THREADS    TLC_READY_THREADS
#define WARPS      (THREADS / 32)
#define K_MAX      6144 /* inputs of the widest row that a block holds in its registers */
#define SLICES_MAX (K_MAX / SLICE)

struct one {
    struct tiles m;
    struct tlc_input in;
    const int32_t *set_rows;
    struct tlc_out out;
};

struct shared_head {
    uint64_t full; /* the tiles are there */
    float2 red[WARPS];
    float scale;
    union { /* sums in progress of the rows of the tiles */
        int ints[WARPS][TILES_MAX * 16];
        float floats[SLICES_MAX][16];
    } part;
};

/* ---- sums ---- */

/* A chunk of 64 inputs of an INT4 tile, as a lane has it: weights of stored rows g and g + 8, their scales. */
struct chunk {
    uint4 w;
    uint32_t s;
};

/* Number u of this warp: chunk 16 u + warp. One behind the end is read as the last, its scales as 0. */
__device__ static __forceinline__ struct chunk chunk_of(const uint8_t *tile, int chunks, int u)
{
    int lane = threadIdx.x & 31, c = u * WARPS + (threadIdx.x >> 5), in = min(c, chunks - 1);
    struct chunk v = {*(const uint4 *)(tile + chunk_at(in) + lane * 16),
                      *(const uint16_t *)(tile + chunk_scales_at(in, chunks) + (lane >> 2) * 2)};
    v.s = c < chunks ? v.s : 0;
    return v;
}
__device__ static __forceinline__ void row_chunk(uint2 b[2], const uint8_t *x, int chunks, int u)
{
    int c = min(u * WARPS + (int)(threadIdx.x >> 5), chunks - 1);
    b[0] = *(const uint2 *)(x + c * 64 + 8 * (threadIdx.x & 3));
    b[1] = *(const uint2 *)(x + c * 64 + 8 * (threadIdx.x & 3) + 32);
}

/* 16 times the sums of stored rows g and g + 8 are added to *lo and *hi of lane 4 g. */
__device__ static __forceinline__ void chunk_q4(const struct chunk *v, const uint2 b[2], int *lo, int *hi)
{
    const int zero[4] = {0, 0, 0, 0};
    int d[4], d2[4];
    uint4 w = v->w;
    uint32_t s = v->s;
    const uint32_t a[4] = {low_q4(w.x), low_q4(w.y), high_q4(w.x), high_q4(w.y)};
    const uint32_t a2[4] = {low_q4(w.z), low_q4(w.w), high_q4(w.z), high_q4(w.w)};
    mma_s8(d, a, b[0].x, b[0].y, zero);
    mma_s8(d2, a2, b[1].x, b[1].y, zero);
    *lo += (int)(s & 15) * d[0] + (int)(s >> 4 & 15) * d2[0];
    *hi += (int)(s >> 8 & 15) * d[2] + (int)(s >> 12) * d2[2];
}

/* This warp's chunks of all tiles; chunk `warp` of every unit of 16. Of rows of up to 2048 inputs a warp has two chunks, and holds
 * them for all tiles; their addresses are spelled out, for builds with chunk_of() there were 2 to 4 % slower. Of longer ones it reads two ahead of the sums: a wait for shared memory is as long as the sums of a chunk. */
template <int Q>
__device__ static __forceinline__ void sums_q4(const struct one *f, struct shared_head *s, const uint8_t *ring,
                                               const uint8_t *x)
{
    enum { HELD = 2 };
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, chunks = f->m.k_pad / 64;
    uint2 b[HELD][2];
    struct chunk v[HELD];
    for (int i = 0; i < HELD; i++) {
        row_chunk(b[i], x, chunks, i);
        if (Q > 1)
            v[i] = chunk_of(ring, chunks, i);
    }
#pragma unroll 1
    for (int i = 0, n = tiles_of_block(&f->m); i < n; i++) {
        int lo = 0, hi = 0;
        const uint8_t *next = ring + (i + 1 < n ? f->m.room : 0);
        if (Q == 1) {
#pragma unroll
            for (int u = 0; u < HELD; u++)
                if (u * WARPS + warp < chunks) {
                    struct chunk c = {*(const uint4 *)(ring + u * WARPS * 528 + warp * 512 + lane * 16),
                                      *(const uint16_t *)(ring + u * WARPS * 528 +
                                                          min(WARPS, chunks - u * WARPS) * 512 + warp * 16 +
                                                          (lane >> 2) * 2)};
                    chunk_q4(&c, b[u], &lo, &hi);
                }
        } else {
#pragma unroll 1
            for (int u = 0; u * WARPS < chunks; u += HELD) {
                bool more = (u + HELD) * WARPS < chunks;
                struct chunk now[HELD] = {v[0], v[1]};
                uint2 with[HELD][2] = {{b[0][0], b[0][1]}, {b[1][0], b[1][1]}};
                for (int h = 0; h < HELD; h++) {
                    v[h] = chunk_of(more ? ring : next, chunks, more ? u + HELD + h : h);
                    row_chunk(b[h], x, chunks, more ? u + HELD + h : h);
                }
                for (int h = 0; h < HELD; h++)
                    chunk_q4(&now[h], with[h], &lo, &hi);
            }
        }
        if ((lane & 3) == 0) { /* the shift is exact */
            s->part.ints[warp][i * 16 + (lane >> 2)] = lo >> 4;
            s->part.ints[warp][i * 16 + (lane >> 2) + 8] = hi >> 4;
        }
        ring = next;
    }
}

/* The same for INT8: groups of 32 inputs. */
__device__ static __forceinline__ void sums_q8(const struct one *f, struct shared_head *s, const uint8_t *ring,
                                               const uint8_t *x)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3,
        pitch = pitch_of(TL_W_INT8, f->m.k_pad);
#pragma unroll 1
    for (int i = 0, n = tiles_of_block(&f->m); i < n; i++, ring += f->m.room) {
        int sum[4] = {0, 0, 0, 0};
#pragma unroll 2
        for (int k = warp * 32; k < f->m.k_pad; k += WARPS * 32) {
            uint2 top = *(const uint2 *)(ring + g * pitch + k + 8 * t);
            uint2 low = *(const uint2 *)(ring + (g + 8) * pitch + k + 8 * t), b = *(const uint2 *)(x + k + 8 * t);
            const uint32_t a[4] = {top.x, low.x, top.y, low.y};
            mma_s8(sum, a, b.x, b.y, sum);
        }
        if (t == 0) {
            s->part.ints[warp][i * 16 + g] = sum[0];
            s->part.ints[warp][i * 16 + g + 8] = sum[2];
        }
    }
}

/* BF16, one tile: its slices, each a chain from zero. */
__device__ static __forceinline__ void sums_bf16(const uint8_t *tile, struct shared_head *s, const uint8_t *x,
                                                 int k_pad)
{
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, pitch = pitch_of(TL_W_BF16, k_pad);
    uint32_t at = shared_at(tile + (lane & 15) * pitch + (lane >> 4) * 16);
    for (int slice = threadIdx.x >> 5; slice * SLICE < k_pad; slice += WARPS) {
        float sum[4] = {0, 0, 0, 0};
        for (int k = slice * SLICE; k < min((slice + 1) * SLICE, k_pad); k += 16) {
            uint32_t a[4];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                         : "r"(at + k * 2));
            mma_bf16(sum, a, *(const uint32_t *)(x + k * 2 + t * 4), *(const uint32_t *)(x + k * 2 + t * 4 + 16));
        }
        if (t == 0) {
            s->part.floats[slice][g] = sum[0];
            s->part.floats[slice][g + 8] = sum[2];
        }
    }
}

/* ---- the kernel ---- */

/* The product of row i of the block's tiles. */
template <int W>
__device__ static __forceinline__ float sum_of(const struct one *f, const struct shared_head *s, int i, float row_scale)
{
    if (W != TL_W_BF16) {
        int sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++)
            sum += s->part.ints[warp][i];
        return tlc_scaled(sum, s->scale, row_scale);
    }
    float y = s->part.floats[0][i];
    for (int k = SLICE; k < f->m.k_pad; k += SLICE)
        y = __fadd_rn(y, s->part.floats[k / SLICE][i]);
    return y;
}

template <int W, int Q>
__global__ static void __launch_bounds__(THREADS) linear_one(const __grid_constant__ struct one f)
{
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ struct shared_head s;
    uint8_t *x = ring + f.m.most * f.m.room;
    int t = threadIdx.x, tile = (int)blockIdx.x + (t >> 4) * (int)gridDim.x, r = t & 15;
    bool gated = f.out.epi == TLC_EPI_SILU_MUL;
    int64_t o = gated ? (int64_t)tile * 8 + r : (int64_t)tile * 16 + r, row = f.set_rows[0];
    bool writes =
        t < TILES_MAX * 16 && tile < f.m.n_tiles && o < (gated ? f.m.n_out / 2 : f.m.n_out) && !(gated && r >= 8);
    float *out = f.out.data + (f.out.epi == TLC_EPI_RESIDUAL ? row * f.out.ld : 0) + o;
    float scale = 0, up_scale = 0, old = 0;
    struct tlc_source src = {f.in.a + (f.in.a_by_row ? row : 0) * f.in.lda,
                             f.in.b + (f.in.b_by_row ? row : 0) * f.in.ldb,
                             f.in.w,
                             f.in.n_a,
                             f.in.n,
                             f.in.norm,
                             f.in.eps};
    struct tlc_held<Q> h;
    if (t < 32)
        ask_for_tiles<W>(&f.m, &s.full, ring);
    tlc_hold_weights<Q, W == TL_W_BF16>(&src, &h);
    if (W != TL_W_BF16 && writes) {
        scale = __ldg(f.m.row_scale + (int64_t)tile * 16 + r);
        up_scale = gated ? __ldg(f.m.row_scale + (int64_t)tile * 16 + r + 8) : 0;
    }
    tlc_wait();
    tlc_go(); /* not earlier: more than one kernel ahead gets in the way of this one (5 % of a token) */
    tlc_hold_row<Q>(&src, &h);
    if (writes && f.out.epi == TLC_EPI_RESIDUAL)
        old = *out;
    if (W == TL_W_BF16)
        tlc_ready_bf16<Q>(&src, &h, f.m.k_pad, s.red, (__nv_bfloat16 *)x);
    else
        tlc_ready_int8<Q>(&src, &h, f.m.k_pad, s.red, (int8_t *)x, &s.scale);
    tlc_ready_barrier(); /* the row and the barrier of the tiles are there */
    bar_wait(&s.full, 0);
    if (W == TL_W_INT4)
        sums_q4<Q>(&f, &s, ring, x);
    else if (W == TL_W_INT8)
        sums_q8(&f, &s, ring, x);
    else
        sums_bf16(ring, &s, x, f.m.k_pad);
    tlc_ready_barrier();
    if (!writes)
        return;
    float y = sum_of<W>(&f, &s, t, scale);
    switch (f.out.epi) {
    case TLC_EPI_STORE: break;
    case TLC_EPI_SILU_MUL: y = tlc_silu_mul(y, sum_of<W>(&f, &s, t + 8, up_scale)); break;
    case TLC_EPI_RELU2: y = tlc_relu2(y); break;
    case TLC_EPI_RESIDUAL: y = __fadd_rn(old, y); break;
    }
    *out = y;
}

/* ---- launches ---- */

#define ALL_KERNELS(X)                                                                                                 \
    X(TL_W_INT4, 1)                                                                                                    \
    X(TL_W_INT4, 3)                                                                                                    \
    X(TL_W_INT8, 1)                                                                                                    \
    X(TL_W_INT8, 3)                                                                                                    \
    X(TL_W_BF16, 1)                                                                                                    \
    X(TL_W_BF16, 3)

typedef void (*one_kernel)(struct one);

static one_kernel kernel_of(int w, int q)
{
#define X(W, Q)                                                                                                        \
    if (w == W && q == Q)                                                                                              \
        return linear_one<W, Q>;
    ALL_KERNELS(X)
#undef X
    return NULL;
}

cudaError_t tlc_linear_one_init(void)
{
    struct cudaFuncAttributes a;
    int device, most;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
#define X(W, Q)                                                                                                        \
    if (e == cudaSuccess)                                                                                              \
        e = cudaFuncGetAttributes(&a, (const void *)linear_one<W, Q>);                                                 \
    if (e == cudaSuccess)                                                                                              \
        e = cudaFuncSetAttribute((const void *)linear_one<W, Q>, cudaFuncAttributeMaxDynamicSharedMemorySize,          \
                                 most - (int)a.sharedSizeBytes);
    ALL_KERNELS(X)
#undef X
    return e;
}

static size_t shared_bytes(const struct tl_mat *m, const struct tiles *f)
{
    return (size_t)f->most * (size_t)f->room + (size_t)m->k_pad * (m->wtype == TL_W_BF16 ? 2 : 1);
}

bool tlc_linear_one_fits(const struct tlc_backend *c, const struct tl_mat *m, const struct tlc_input *in)
{
    int grid, waves;
    if (m->wtype == TL_W_F32 || tlc_hold_of(in->n, in->n_a) == 0)
        return false;
    struct tiles f = tiles_of(m, c->sms, &grid, &waves);
    return shared_bytes(m, &f) + sizeof(struct shared_head) + 128 <= c->shared_max;
}

cudaError_t tlc_linear_one(const struct tlc_launch *l, const struct tl_mat *m, const struct tlc_input *in,
                           const struct tlc_set *set, struct tlc_out out)
{
    int grid, waves;
    struct one f = {tiles_of(m, l->sms, &grid, &waves), *in, set->rows, out};
    return tlc_launch(l, kernel_of(m->wtype, tlc_hold_of(in->n, in->n_a)), dim3((unsigned)grid), dim3(THREADS),
                      shared_bytes(m, &f.m), f);
}
