/* y = W x for up to 16 rows: one kernel streams the weights once through a ring of shared memory and multiplies them on the
 * matrix units, weights as the 16-row operand, rows of activations as the 8 or 16 columns.
 *
 * A block has 8 warps that compute and one that copies. Weights depend on nothing, so the copying warp starts before the
 * kernels in front have ended and, while everything fits into its ring, never waits. The computing warps wait for the kernels
 * in front, make the input rows ready (or fetch them from acts), then share out each unit of a tile by its inputs. Integer sums
 * of the warps meet in shared memory by atomic adds (exact in any order); the slices of a BF16 sum are kept apart and added in
 * ascending order. */
#include "backend_impl.cuh"
#include "rows.cuh"

#define STAGE      8704 /* bytes of a ring stage: a unit, with padding between the rows of INT8 and BF16 */
#define STAGES_MAX 12
#define THREADS    288 /* 8 computing warps, one that copies */
#define ROUND      8   /* tiles whose integer sums are kept before they are written out */

/* Inputs of a unit, bytes from one of its rows to the next. */
#define UNIT_K(W)  ((W) == TL_W_INT4 ? 1024 : (W) == TL_W_INT8 ? 512 : 256)
#define PITCH(W)   ((W) == TL_W_INT8 ? 544 : 528)

struct few {
    const uint8_t *w;
    const float *row_scale;
    int64_t n_out;
    int n_tiles, k_pad, n, stages, units; /* units: of a tile */
    bool gated, fused;
    int x_pitch; /* bytes from one input row in shared memory to the next */
    struct tlc_input in;
    struct tlc_acts acts;
    const int32_t *set_rows;
    struct tlc_out out;
};

/* ---- barriers and copies in shared memory ---- */

__device__ static __forceinline__ uint32_t shared_at(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ static __forceinline__ void bar_init(uint64_t *bar, int n)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_at(bar)), "r"(n) : "memory");
}

__device__ static __forceinline__ void bar_arrive(uint64_t *bar)
{
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" ::"r"(shared_at(bar)) : "memory");
}

__device__ static __forceinline__ void bar_wait(uint64_t *bar, int parity)
{
    uint32_t done = 0;
    while (!done) {
#if __CUDA_ARCH__ >= 900
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(shared_at(bar)), "r"(parity)
                     : "memory");
#else
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(shared_at(bar)), "r"(parity)
                     : "memory");
#endif
    }
}

/* Called by one whole warp: lane l < n copies `bytes` (a multiple of 16) from src + l * src_step to dst + l * dst_step; the
 * barrier counts one arrival and the bytes. */
__device__ static __forceinline__ void copy_rows(uint8_t *dst, int dst_step, const uint8_t *src, int64_t src_step, int n,
                                                 int bytes, uint64_t *bar)
{
    int lane = threadIdx.x & 31;
#if __CUDA_ARCH__ >= 900
    if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_at(bar)), "r"(n * bytes)
                     : "memory");
    __syncwarp();
    if (lane < n)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_at(dst + lane * dst_step)),
                     "l"(src + lane * src_step), "r"(bytes), "r"(shared_at(bar))
                     : "memory");
#else
    for (int r = 0; r < n; r++)
        for (int i = lane * 16; i < bytes; i += 512)
            *(uint4 *)(dst + r * dst_step + i) = *(const uint4 *)(src + r * src_step + i);
    __syncwarp();
    if (lane == 0)
        bar_arrive(bar);
#endif
}

/* ---- products ---- */

__device__ static __forceinline__ void mma_s8(int d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, const int c[4])
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]),
                   "r"(c[3]));
}

__device__ static __forceinline__ void mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#define HIGH 0xf0f0f0f0u

/* One chunk of 64 inputs of an INT4 unit; WIDE: each group's sum is taken down to its true size before it is scaled, else the
 * total is 16 times the sum. x: the row of this lane's column for each block of 8. */
template <int NT, bool WIDE>
__device__ static __forceinline__ void chunk_q4(const uint8_t *weights, const uint8_t *scales, const uint8_t *const x[NT],
                                                int tot[NT][4])
{
    int lane = threadIdx.x & 31;
    uint4 w = *(const uint4 *)(weights + lane * 16);
    uint32_t s = *(const uint16_t *)(scales + (lane >> 2) * 2);
    const uint32_t a[2][4] = {{w.x << 4 & HIGH, w.y << 4 & HIGH, w.x & HIGH, w.y & HIGH},
                              {w.z << 4 & HIGH, w.w << 4 & HIGH, w.z & HIGH, w.w & HIGH}};
    const int scale[2][2] = {{(int)(s & 15), (int)(s >> 8 & 15)}, {(int)(s >> 4 & 15), (int)(s >> 12)}};
    const int zero[4] = {0, 0, 0, 0};
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int group = 0; group < 2; group++) {
            uint2 b = *(const uint2 *)(x[nt] + 32 * group);
            int d[4];
            mma_s8(d, a[group], b.x, b.y, zero);
#pragma unroll
            for (int i = 0; i < 4; i++)
                tot[nt][i] += scale[group][i / 2] * (WIDE ? d[i] >> 4 : d[i]);
        }
}

template <int NT>
__device__ static __forceinline__ void chunk_q8(const uint8_t *rows, const uint8_t *const x[NT], int tot[NT][4])
{
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int group = 0; group < 2; group++) {
        uint2 lo = *(const uint2 *)(rows + g * PITCH(TL_W_INT8) + group * 32 + 8 * t);
        uint2 hi = *(const uint2 *)(rows + (g + 8) * PITCH(TL_W_INT8) + group * 32 + 8 * t);
        const uint32_t a[4] = {lo.x, hi.x, lo.y, hi.y};
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            uint2 b = *(const uint2 *)(x[nt] + 32 * group);
            mma_s8(tot[nt], a, b.x, b.y, tot[nt]);
        }
    }
}

/* One slice of up to 256 inputs, a chain from zero; x: at this lane's input 2 t. */
template <int NT>
__device__ static __forceinline__ void slice_bf16(const uint8_t *rows, const uint8_t *const x[NT], int n_k, float sum[NT][4])
{
    int lane = threadIdx.x & 31;
    uint32_t at = shared_at(rows + (lane & 15) * PITCH(TL_W_BF16) + (lane >> 4) * 16);
    for (int k = 0; k < n_k; k += 16) {
        uint32_t a[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                     : "r"(at + k * 2));
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
            mma_bf16(sum[nt], a, *(const uint32_t *)(x[nt] + k * 2), *(const uint32_t *)(x[nt] + k * 2 + 16));
    }
}

/* ---- input rows ---- */

__device__ static struct tlc_source source_of(const struct few *f, int i)
{
    const struct tlc_input *in = &f->in;
    int64_t row = in->a_by_row || in->b_by_row ? f->set_rows[i] : i;
    struct tlc_source s = {in->a + (in->a_by_row ? row : i) * in->lda, NULL, in->w, in->n_a, in->n, in->norm, in->eps};
    if (in->b)
        s.b = in->b + (in->b_by_row ? row : i) * in->ldb;
    return s;
}

template <int W>
__device__ static __forceinline__ void ready_rows(const struct few *f, uint8_t *x, float *scale, float *red, float *buf)
{
    int row_bytes = f->k_pad * (W == TL_W_BF16 ? 2 : 1);
    if (!f->fused) {
        const uint8_t *src = W == TL_W_BF16 ? (const uint8_t *)f->acts.b : (const uint8_t *)f->acts.q;
        int64_t ld = f->acts.ld * (W == TL_W_BF16 ? 2 : 1);
        int per_row = row_bytes / 16;
        for (int i = threadIdx.x; i < f->n * per_row; i += 256)
            *(uint4 *)(x + i / per_row * f->x_pitch + i % per_row * 16) =
                *(const uint4 *)(src + i / per_row * ld + i % per_row * 16);
        if (W != TL_W_BF16 && threadIdx.x < f->n)
            scale[threadIdx.x] = f->acts.scale[threadIdx.x];
        return;
    }
    for (int i = 0; i < f->n; i++) {
        struct tlc_source s = source_of(f, i);
        if (W == TL_W_BF16)
            tlc_row_bf16(&s, f->k_pad, buf, red + 16 * (i & 1), (__nv_bfloat16 *)(x + i * f->x_pitch));
        else
            tlc_row_quantise(&s, f->k_pad, buf, red + 16 * (i & 1), (int8_t *)(x + i * f->x_pitch), scale + i);
    }
}

/* ---- results ---- */

__device__ static __forceinline__ void put(const struct few *f, int64_t o, int i, float y)
{
    float *at;
    if (f->out.epi == TLC_EPI_RESIDUAL) {
        at = f->out.data + f->set_rows[i] * f->out.ld + o;
        *at = __fadd_rn(*at, y);
        return;
    }
    f->out.data[i * f->out.ld + o] = f->out.epi == TLC_EPI_RELU2 ? tlc_relu2(y) : y;
}

/* y(tile, row r of it, column i) for `n_tiles` tiles from `first` on, gridDim.x apart. */
template <typename Y> __device__ static __forceinline__ void write_out(const struct few *f, int first, int n_tiles, Y y)
{
    if (f->out.epi == TLC_EPI_SILU_MUL) {
        for (int j = threadIdx.x; j < n_tiles * 8 * f->n; j += 256) {
            int r = j & 7, tile = j / 8 % n_tiles, i = j / 8 / n_tiles;
            int64_t o = (int64_t)(first + tile * (int)gridDim.x) * 8 + r;
            if (o < f->n_out / 2)
                f->out.data[i * f->out.ld + o] = tlc_silu_mul(y(tile, r, i), y(tile, r + 8, i));
        }
        return;
    }
    for (int j = threadIdx.x; j < n_tiles * 16 * f->n; j += 256) {
        int r = j & 15, tile = j / 16 % n_tiles, i = j / 16 / n_tiles;
        int64_t o = (int64_t)(first + tile * (int)gridDim.x) * 16 + r;
        if (o < f->n_out)
            put(f, o, i, y(tile, r, i));
    }
}

/* ---- the kernel ---- */

/* Shared memory behind the ring. */
struct layout {
    uint64_t *full, *empty;
    float *scale, *red, *buf;
    uint8_t *acc, *x;
};

__host__ __device__ static inline int acc_bytes(int w, int nt, int units)
{
    return (w == TL_W_BF16 ? units : ROUND) * 16 * 8 * nt * 4;
}

__device__ static __forceinline__ struct layout lay_out(uint8_t *shared, const struct few *f, int w, int nt)
{
    struct layout l;
    uint8_t *p = shared + f->stages * STAGE;
    l.full = (uint64_t *)p;
    l.empty = l.full + STAGES_MAX;
    l.scale = (float *)(l.empty + STAGES_MAX);
    l.red = l.scale + TLC_FEW_ROWS;
    l.acc = (uint8_t *)(l.red + 32);
    l.x = l.acc + acc_bytes(w, nt, f->units);
    l.buf = (float *)(l.x + f->n * f->x_pitch);
    return l;
}

static size_t shared_bytes(const struct few *f, int w, int nt)
{
    return (size_t)f->stages * STAGE + 2 * STAGES_MAX * 8 + (TLC_FEW_ROWS + 32) * 4 + (size_t)acc_bytes(w, nt, f->units) +
           (size_t)f->n * (size_t)f->x_pitch + (f->fused ? ((size_t)f->in.n + 3) / 4 * 16 : 0);
}

template <int W> __device__ static __forceinline__ void copy_all(const struct few *f, uint8_t *ring, const struct layout *l)
{
    int my_tiles = (f->n_tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    for (int u = 0; u < my_tiles * f->units; u++) {
        int stage = u % f->stages, unit = u % f->units;
        int64_t tile = blockIdx.x + (int64_t)(u / f->units) * gridDim.x;
        int n_k = min(UNIT_K(W), f->k_pad - unit * UNIT_K(W));
        uint8_t *dst = ring + stage * STAGE;
        if (u >= f->stages)
            bar_wait(&l->empty[stage], (u / f->stages - 1) & 1);
        if (W == TL_W_INT4) {
            const uint8_t *src = f->w + tile * (f->k_pad / 64 * 528) + unit * (UNIT_K(W) / 64 * 528);
            copy_rows(dst, 0, src, 0, 1, n_k / 64 * 528, &l->full[stage]);
        } else {
            int size = W == TL_W_BF16 ? 2 : 1;
            const uint8_t *src = f->w + (tile * 16 * f->k_pad + unit * UNIT_K(W)) * size;
            copy_rows(dst, PITCH(W), src, (int64_t)f->k_pad * size, 16, n_k * size, &l->full[stage]);
        }
    }
}

template <int NT, bool WIDE>
__device__ static __forceinline__ void unit_q4(const uint8_t *stage, int n_k, const uint8_t *const x[NT], int tot[NT][4])
{
    int n_chunks = n_k / 64;
    for (int c = threadIdx.x >> 5; c < n_chunks; c += 8) {
        const uint8_t *at[NT];
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
            at[nt] = x[nt] + c * 64;
        chunk_q4<NT, WIDE>(stage + c * 512, stage + n_chunks * 512 + c * 16, at, tot);
    }
}

template <int W, int NT, bool WIDE>
__device__ static __forceinline__ void integers(const struct few *f, const uint8_t *ring, const struct layout *l,
                                                const uint8_t *const x[NT])
{
    int *acc = (int *)l->acc, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, u = 0;
    const int shift = W == TL_W_INT4 && !WIDE ? 4 : 0, cols = 8 * NT;
    for (int first = blockIdx.x; first < f->n_tiles; first += ROUND * (int)gridDim.x) {
        int n_tiles = min(ROUND, (f->n_tiles - first + (int)gridDim.x - 1) / (int)gridDim.x);
        for (int j = threadIdx.x; j < n_tiles * 16 * cols; j += 256)
            acc[j] = 0;
        tlc_row_barrier(); /* the first time the input rows and their scales are complete, too */
        for (int tile = 0; tile < n_tiles; tile++) {
            int tot[NT][4] = {};
            for (int unit = 0; unit < f->units; unit++, u++) {
                int stage = u % f->stages, n_k = min(UNIT_K(W), f->k_pad - unit * UNIT_K(W));
                const uint8_t *s = ring + stage * STAGE, *at[NT];
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
                    at[nt] = x[nt] + unit * UNIT_K(W) + (W == TL_W_INT8 ? warp * 64 : 0);
                bar_wait(&l->full[stage], u / f->stages & 1);
                if (W == TL_W_INT4)
                    unit_q4<NT, WIDE>(s, n_k, at, tot);
                else if (warp * 64 < n_k)
                    chunk_q8<NT>(s + warp * 64, at, tot);
                __syncwarp();
                if (lane == 0)
                    bar_arrive(&l->empty[stage]);
            }
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    atomicAdd(&acc[(tile * 16 + (lane >> 2) + i / 2 * 8) * cols + nt * 8 + (lane & 3) * 2 + i % 2], tot[nt][i]);
        }
        tlc_row_barrier();
        write_out(f, first, n_tiles, [&](int tile, int r, int i) {
            int64_t stored = (int64_t)(first + tile * (int)gridDim.x) * 16 + r;
            return tlc_scaled(acc[(tile * 16 + r) * cols + i] >> shift, l->scale[i], f->row_scale[stored]);
        });
        if (first + ROUND * (int)gridDim.x < f->n_tiles)
            tlc_row_barrier();
    }
}

template <int NT>
__device__ static __forceinline__ void floats(const struct few *f, const uint8_t *ring, const struct layout *l,
                                              const uint8_t *const x[NT])
{
    float *acc = (float *)l->acc;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, u = 0;
    const int cols = 8 * NT, K = UNIT_K(TL_W_BF16);
    for (int first = blockIdx.x; first < f->n_tiles; first += (int)gridDim.x) {
        tlc_row_barrier();
        for (int unit = 0; unit < f->units; unit++, u++) {
            int stage = u % f->stages;
            float sum[NT][4] = {};
            const uint8_t *at[NT];
            if (unit % 8 != warp)
                continue;
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
                at[nt] = x[nt] + unit * K * 2;
            bar_wait(&l->full[stage], u / f->stages & 1);
            slice_bf16<NT>(ring + stage * STAGE, at, min(K, f->k_pad - unit * K), sum);
            __syncwarp();
            if (lane == 0)
                bar_arrive(&l->empty[stage]);
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    acc[(unit * 16 + (lane >> 2) + i / 2 * 8) * cols + nt * 8 + (lane & 3) * 2 + i % 2] = sum[nt][i];
        }
        tlc_row_barrier();
        write_out(f, first, 1, [&](int tile, int r, int i) {
            float y = acc[r * cols + i];
            for (int unit = 1; unit < f->units; unit++)
                y = __fadd_rn(y, acc[(unit * 16 + r) * cols + i]);
            return y;
        });
    }
}

template <int W, int NT, bool WIDE> __global__ static void __launch_bounds__(THREADS, 2) linear_few(const __grid_constant__ struct few f)
{
    extern __shared__ __align__(128) uint8_t shared[];
    struct layout l = lay_out(shared, &f, W, NT);
    tlc_go();
    if (threadIdx.x == 0) {
        for (int i = 0; i < f.stages; i++) {
            bar_init(&l.full[i], 1);
            bar_init(&l.empty[i], W == TL_W_BF16 ? 1 : 8);
        }
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();
    if (threadIdx.x >= 256) {
        copy_all<W>(&f, shared, &l);
        return;
    }
    tlc_wait();
    ready_rows<W>(&f, l.x, l.scale, l.red, l.buf);
    const uint8_t *x[NT];
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) /* a column beyond the rows reads the last one; nobody looks at its sum */
        x[nt] = l.x + min(nt * 8 + g, f.n - 1) * f.x_pitch + t * (W == TL_W_BF16 ? 4 : 8);
    if (W == TL_W_BF16)
        floats<NT>(&f, shared, &l, x);
    else
        integers<W, NT, WIDE>(&f, shared, &l, x);
}

/* ---- launches ---- */

#define ALL_KERNELS(X)                                                                                                 \
    X(TL_W_INT4, 1, false)                                                                                             \
    X(TL_W_INT4, 1, true)                                                                                              \
    X(TL_W_INT4, 2, false)                                                                                             \
    X(TL_W_INT4, 2, true)                                                                                              \
    X(TL_W_INT8, 1, false)                                                                                             \
    X(TL_W_INT8, 2, false)                                                                                             \
    X(TL_W_BF16, 1, false)                                                                                             \
    X(TL_W_BF16, 2, false)

typedef void (*few_kernel)(struct few);

static few_kernel kernel_of(int w, int nt, bool wide)
{
#define X(W, NT, WIDE)                                                                                                 \
    if (w == W && nt == NT && wide == WIDE)                                                                            \
        return linear_few<W, NT, WIDE>;
    ALL_KERNELS(X)
#undef X
    return NULL;
}

cudaError_t tlc_linear_few_init(void)
{
    int device, most;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
#define X(W, NT, WIDE)                                                                                                 \
    if (e == cudaSuccess)                                                                                              \
        e = cudaFuncSetAttribute((const void *)linear_few<W, NT, WIDE>, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    ALL_KERNELS(X)
#undef X
    return e;
}

/* A group's sum is at most 32 * 7 * 127, times 16 and a scale of 15: a row of more than 314 groups could exceed 31 bits. */
static bool is_wide(const struct tl_mat *m) { return m->wtype == TL_W_INT4 && m->k_pad > 314 * 32; }

static int x_pitch(const struct tl_mat *m)
{
    int64_t k128 = (m->k_pad + 127) / 128 * 128;
    return (int)(m->wtype == TL_W_BF16 ? k128 * 2 + 16 : k128 + 32);
}

static struct few plan(const struct tl_mat *m, int n, bool fused, int n_in, int sms)
{
    struct few f = {};
    int unit = UNIT_K(m->wtype), grid = m->n_tiles < sms ? (int)m->n_tiles : sms;
    f.w = m->wtype == TL_W_INT4 ? m->tiles : m->wtype == TL_W_INT8 ? (const uint8_t *)m->rows8 : (const uint8_t *)m->rows16;
    f.row_scale = m->row_scale;
    f.n_out = m->n_out;
    f.n_tiles = (int)m->n_tiles;
    f.k_pad = (int)m->k_pad;
    f.n = n;
    f.units = (int)((m->k_pad + unit - 1) / unit);
    f.gated = m->gated;
    f.fused = fused;
    f.x_pitch = x_pitch(m);
    f.in.n = n_in;
    int64_t all = ((m->n_tiles + grid - 1) / grid) * f.units;
    f.stages = all < STAGES_MAX - 2 ? (int)all : STAGES_MAX - 2;
    return f;
}

bool tlc_linear_few_fits(const struct tlc_backend *c, const struct tl_mat *m, int n, bool fused)
{
    if (m->wtype == TL_W_F32 || n > TLC_FEW_ROWS)
        return false;
    struct few f = plan(m, n, fused, (int)m->n_in, c->sms);
    return shared_bytes(&f, m->wtype, n > 8 ? 2 : 1) <= c->shared_max;
}

cudaError_t tlc_linear_few(const struct tlc_launch *l, const struct tl_mat *m, const struct tlc_input *in,
                           const struct tlc_acts *acts, const struct tlc_set *set, struct tlc_out out)
{
    int n = set->n_cap, nt = n > 8 ? 2 : 1, grid = m->n_tiles < l->sms ? (int)m->n_tiles : l->sms;
    struct few f = plan(m, n, in != NULL, in ? in->n : 0, l->sms);
    if (in)
        f.in = *in;
    f.acts = *acts;
    f.set_rows = set->rows;
    f.out = out;
    return tlc_launch(l, kernel_of(m->wtype, nt, is_wide(m)), dim3((unsigned)grid), dim3(THREADS), shared_bytes(&f, m->wtype, nt),
                      f);
}
