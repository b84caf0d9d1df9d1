/* The kernel of solo.cuh: products, the feeder, the phases of a layer; and its launch. */
#include "solo.cuh"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "solo_attention.cuh"
#include "solo_product.cuh"

/* ---- the feeder: one warp, a layer or so ahead of the others ---- */

#define FEED_DEPTH 2 /* copies of a block under way */
#define DQ         int D, int QX, int QH

template <DQ> struct feeder {
    struct solo_shared<D> *s;
    uint8_t *ring;
    struct solo_at at, landed; /* landed: FEED_DEPTH slots behind */
    int started;
};

template <DQ> __device__ static __forceinline__ uint8_t *room(struct feeder<D, QX, QH> *f)
{
    if (f->started++ >= FEED_DEPTH) { /* more at once would only stand in the way of the values that blocks exchange */
        bar_wait(f->s->full + f->landed.slot, f->landed.turn);
        solo_next<SOLO_SLOTS(QX)>(&f->landed);
    }
    bar_wait(f->s->empty + f->at.slot, f->at.turn ^ 1);
    return f->ring + f->at.slot * SOLO_SLOT;
}

template <DQ> __device__ static void feed_tiles(struct feeder<D, QX, QH> *f, const struct solo_mat *m)
{
    int slots = slots_of(m), tile_bytes = m->k_pad / 64 * 528;
    for (int tile = first_tile(); tile < m->n_tiles; tile += (int)gridDim.x)
        for (int i = 0; i < slots; i++, solo_next<SOLO_SLOTS(QX)>(&f->at)) {
            uint8_t *to = room(f);
            if (m->wtype == TL_W_INT4)
                copy_rows(to, 0, m->w + (int64_t)tile * tile_bytes + i * INT4_SLOT, 0, 1,
                          min(INT4_SLOT, tile_bytes - i * INT4_SLOT), f->s->full + f->at.slot);
            else
                copy_rows(to, INT8_ROW, m->w + (int64_t)tile * 16 * m->k_pad + i * INT8_STEP, m->k_pad, 16,
                          min(INT8_STEP, m->k_pad - i * INT8_STEP), f->s->full + f->at.slot);
        }
}

/* Rows [0, n) of one kv head's K or V of a page. */
template <DQ> __device__ static void feed_page_rows(struct feeder<D, QX, QH> *f, const __half *from, int n)
{
    int lane = threadIdx.x & 31;
    uint8_t *to = room(f);
    uint64_t *full = f->s->full + f->at.slot;
#if __CUDA_ARCH__ >= 900
    if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_at(full)), "r"(n * D * 2)
                     : "memory");
    __syncwarp();
    for (int row = lane; row < n; row += 32)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_at(to + row * (D + 8) * 2)),
                     "l"(from + row * D), "r"(D * 2), "r"(shared_at(full))
                     : "memory");
#endif
    solo_next<SOLO_SLOTS(QX)>(&f->at);
}

template <DQ>
__device__ static void feed_pages(struct feeder<D, QX, QH> *f, const struct solo_args *a, const struct solo_pages *p)
{
    for (int block = p->block0 + p->rank; block < p->block1; block += SOLO_CLUSTER) {
        const __half *k = tlc_page_k<const __half>(&a->step, p->pages[block], p->kv, D);
        int n = min(p->pos - block * TLC_PAGE, TLC_PAGE); /* the row's own come later */
        feed_page_rows(f, k, n);
        feed_page_rows(f, k + (int64_t)a->n_kv_heads * TLC_PAGE * D, n);
    }
}

template <DQ> __device__ static void feed(const struct solo_args *a, struct solo_shared<D> *s, uint8_t *ring)
{
    struct feeder<D, QX, QH> f = {
        s, ring, {0, 0}, {0, 0}, 0
    };
    struct solo_row row = {};
    for (int i = 0; i < a->n_ops * SOLO_MATS; i++) {
        struct solo_mat m = solo_layer_of(a, i / SOLO_MATS)->mat[i % SOLO_MATS];
        feed_tiles(&f, &m);
        if (i == 0) {
            tlc_wait();
            row = solo_row_of(a);
        }
        if (i % SOLO_MATS != SOLO_QKV)
            continue;
        struct solo_pages p = solo_pages_of(a, &row, (int)(a->ops[i / SOLO_MATS] & 0xffff));
        if (p.kv >= 0)
            feed_pages(&f, a, &p);
    }
    if (a->ends.head.n_tiles)
        feed_tiles(&f, &a->ends.head);
}

/* ---- the input of a product ---- */

/* A row as its input is made: values of this thread's quadruples in shared memory. */
struct input {
    uint32_t v, x; /* of this thread: the values, the stream */
    int n;
    const float *norm; /* NULL: all ones, where has_norm */
    bool has_norm, streams;
};

[[maybe_unused]] __device__ static __forceinline__ float4 plus(float4 a, float4 b)
{
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

/* The norm's weights, asked for before the values are there. */
template <int Q> __device__ static __forceinline__ void ask_weights(const struct input *in, float4 *w)
{
#pragma unroll
    for (int q = 0; q < Q; q++) {
        int j = 4 * (int)threadIdx.x + 2048 * q;
        w[q] = in->norm && j < in->n ? __ldg((const float4 *)(in->norm + j)) : make_float4(1, 1, 1, 1);
    }
}

/* The stream takes in the values (if it adds) and becomes what is made ready; int8 with its scale, padded with zeros to k_pad. */
template <int Q>
__device__ static __forceinline__ void ready(const struct input *in, bool adds, const float4 *w, float eps, float2 *red,
                                             int k_pad, uint32_t row, float *scale)
{
    float4 v[Q];
    float sum = 0.0f, norm_inv, inv, sc;
    unsigned top = 0;
#pragma unroll
    for (int q = 0; q < Q; q++) {
        v[q] = make_float4(0, 0, 0, 0);
        if (4 * (int)threadIdx.x + 2048 * q >= in->n)
            continue;
        if (!in->streams || adds)
            v[q] = solo_load4f(in->v + 8192 * q);
        if (in->streams) {
            float4 x = solo_load4f(in->x + 8192 * q);
            if (adds) {
                x = plus(x, v[q]);
                solo_store4f(in->x + 8192 * q, x);
            }
            v[q] = x;
        }
        if (in->has_norm)
            v[q] = tlc_weighted(true, v[q], w[q], &sum);
        top = max(top, tlc_top4(v[q]));
    }
    sc = tlc_quant_scale(tlc_row_reduce(sum, top, in->has_norm, in->n, eps, red, &norm_inv));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inv) : "f"(sc));
    inv = __float_as_uint(sc) >= 0x7f800000u ? 0.0f : inv;
#pragma unroll
    for (int q = 0; q < Q; q++) {
        int j = 4 * (int)threadIdx.x + 2048 * q;
        uint32_t word = j < in->n ? tlc_quant4(in->has_norm ? tlc_times(v[q], norm_inv) : v[q], sc, inv) : 0;
        if (j < k_pad)
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(row + (uint32_t)j), "r"(word) : "memory");
    }
    if (threadIdx.x == 0)
        *scale = sc;
}

/* ---- the ends ---- */

/* The stream at the start: the token's row of the table, or what lies in memory. to: this thread's place. */
[[maybe_unused]] __device__ static __forceinline__ void first_x(const struct solo_args *a, uint32_t to)
{
    const struct solo_ends *e = &a->ends;
    int64_t token = e->alone ? e->token : 0, row = e->alone ? 0 : a->set_rows[0];
    if (token < 0) /* chained; after logits that were not finite any token will do, nobody takes what follows */
        token = max(e->best[-1 - token], 0);
#pragma unroll 1
    for (int j = 4 * (int)threadIdx.x; j < a->d_model; j += 2048, to += 8192) {
        float4 x;
        if (!e->alone) {
            x = *(const float4 *)(a->x + row * a->d_model + j);
        } else if (e->embed8) {
            char4 w = *(const char4 *)(e->embed8 + token * e->embed_ld + j);
            float s = e->embed_row_scale[token];
            x = tlc_times(make_float4(__fmul_rn(s, w.x), __fmul_rn(s, w.y), __fmul_rn(s, w.z), __fmul_rn(s, w.w)),
                          e->embed_scale);
        } else {
            ushort4 w = *(const ushort4 *)(e->embed16 + token * e->embed_ld + j);
            x = tlc_times(make_float4(__uint_as_float((uint32_t)w.x << 16), __uint_as_float((uint32_t)w.y << 16),
                                      __uint_as_float((uint32_t)w.z << 16), __uint_as_float((uint32_t)w.w << 16)),
                          e->embed_scale);
        }
        solo_store4f(to, x);
    }
}

/* The best of all logits: each block publishes its own, block 0 compares. best: of this thread. */
template <int D>
__device__ static __forceinline__ void choose(const struct solo_args *a, struct solo_shared<D> *s,
                                              unsigned long long best, uint32_t epoch)
{
    int t = threadIdx.x, blocks = (int)gridDim.x, looks = 0;
    unsigned long long *top = (unsigned long long *)s->red[1];
    best = tlc_warp_top(best);
    if (t % 32 == 0)
        top[t / 32] = best;
    tlc_ready_barrier();
    if (t == 0) {
        for (int w = 1; w < SOLO_TILES * 16 / 32; w++) /* the warps whose threads had outputs */
            best = max(best, top[w]);
        solo_publish(a->board.best + 2 * blockIdx.x, __uint_as_float((uint32_t)(best >> 32)), epoch);
        solo_publish(a->board.best + 2 * blockIdx.x + 1, __uint_as_float((uint32_t)best), epoch);
    }
    if (blockIdx.x != 0 || t >= 32)
        return;
    best = 0;
    for (int b = t; b < blocks; b += 32) {
        uint64_t order, id;
        do {
            solo_look2(a->board.best + 2 * b, &order, &id);
            solo_patience(&looks);
        } while ((uint32_t)order != epoch || (uint32_t)id != epoch);
        best = max(best, (unsigned long long)(order >> 32 << 32 | id >> 32));
    }
    best = tlc_warp_top(best);
    if (t == 0)
        tlc_report_best(&a->ends.report, a->ends.best, 0, best);
}

/* What products need of the layers, from the arguments to where it is read fast. */
template <int D> __device__ static void brief(const struct solo_args *a, struct solo_shared<D> *s)
{
    for (int i = threadIdx.x; i < a->n_ops; i += SOLO_THREADS)
        s->ops[i] = a->ops[i];
    for (int i = threadIdx.x; i < a->n_layers; i += SOLO_THREADS) {
        const struct solo_layer *l = &a->layers[i];
        for (int j = 0; j < SOLO_MATS; j++) {
            s->brief[i].row_scale[j] = l->mat[j].row_scale;
            s->brief[i].wtype[j] = (uint8_t)l->mat[j].wtype;
        }
        for (int j = 0; j < 6; j++)
            s->brief[i].norm[j] = l->norm[j];
    }
    if (threadIdx.x < SOLO_MATS) {
        const struct solo_mat *m = &a->layers[0].mat[threadIdx.x];
        struct solo_shape *to = &s->shape[threadIdx.x];
        to->n_in = threadIdx.x == SOLO_O ? a->n_heads * D : threadIdx.x == SOLO_DOWN ? a->d_ff : a->d_model;
        to->k_pad = m->k_pad;
        to->n_out = threadIdx.x == SOLO_UP && a->gated ? m->n_out / 2 : m->n_out;
        to->tiles = tiles_of(m);
    }
}

/* ---- the phases ---- */

/* Phases count from the launch's first: 5 a layer, attention is the second. What phase n publishes has epoch first + n + 1. */
template <int D, int QX, int QH>
__device__ static __forceinline__ void compute(const struct solo_args *a, struct solo_shared<D> *s, uint8_t *ring)
{
    enum { SLOTS = SOLO_SLOTS(QX) };
    struct solo_at at = {0, 0};
    struct places places;
    struct input in;
    struct work w;
    unsigned long long best = 0;
    float scale, up_scale;
    int n = a->n_ops * SOLO_MATS;
    uint32_t base = solo_base(), shared = base + SLOTS * SOLO_SLOT;
    places.ring = base;
    places.full = shared + (uint32_t)offsetof(struct solo_shared<D>, full);
    places.row = shared + (uint32_t)offsetof(struct solo_shared<D>, row);
    places.part = shared + (uint32_t)offsetof(struct solo_shared<D>, part);
    uint32_t landing = shared + (uint32_t)sizeof(struct solo_shared<D>) + SOLO_ACC(D) * 4;
    uint32_t rows = shared + (uint32_t)offsetof(struct solo_shared<D>, rows);
    in.v = landing + 16 * threadIdx.x;
    in.x = in.v + 8192 * QH;
    tlc_wait();
    uint32_t epoch = *(volatile uint32_t *)a->board.epoch;
    first_x(a, in.x);
    /* One code for all products, the head's too: what is executed again is not fetched again. */
#pragma unroll 1
    for (int i = 0, layer = 0, which = SOLO_QKV; i <= n; i++) {
        bool is_head = i == n, up = which == SOLO_UP, adds = i > 0;
        uint32_t op = s->ops[is_head ? layer - 1 : layer];
        const uint64_t *from = which == SOLO_O ? a->board.att : which == SOLO_DOWN ? a->board.h : a->board.y;
        in.streams = which == SOLO_QKV || up;
        in.norm = NULL;
        in.has_norm = false;
        if (is_head) {
            const struct solo_mat *m = &a->ends.head;
            w = {m->row_scale, m->k_pad,       m->n_out, m->n_tiles ? tiles_of(m) : 0, 0, m->wtype == TL_W_INT4,
                 END_LOGITS,   a->ends.logits, 0};
            in.n = a->d_model;
            in.norm = a->ends.head_norm;
            in.has_norm = a->ends.head_has_norm;
        } else {
            const struct solo_brief *l = &s->brief[op >> 16];
            const struct solo_shape *shape = &s->shape[which];
            w = {l->row_scale[which],
                 shape->k_pad,
                 shape->n_out,
                 shape->tiles,
                 0,
                 l->wtype[which] == TL_W_INT4,
                 END_PUBLISH,
                 which == SOLO_QKV ? a->board.qkv : a->board.y,
                 0};
            if (up) {
                w.end = a->gated ? END_SILU_MUL : END_RELU2;
                w.out = a->board.h;
            }
            in.n = shape->n_in;
            if (in.streams) {
                in.norm = l->norm[up ? 3 : 0];
                in.has_norm = in.norm != NULL;
            }
        }
        w.slots = w.q4 ? (w.k_pad + 2047) / 2048 : (w.k_pad + INT8_STEP - 1) / INT8_STEP;
        ask_scales(&w, up && a->gated, &scale, &up_scale);
        float4 weights[QX];
        ask_weights<QX>(&in, weights);
        if (i > 0)
            solo_take_row(from, in.n, epoch, landing,
                          rows + 8 * (which == SOLO_O      ? SOLO_ATT
                                      : which == SOLO_DOWN ? SOLO_H
                                                           : SOLO_Y),
                          !in.streams ? layer
                          : up        ? 2 * layer
                                      : 2 * layer - 1);
        if (is_head && a->ends.head.n_tiles == 0) { /* x is what remains */
            for (int j = 4 * (int)threadIdx.x, q = 0; j < in.n; j += 2048, q += 8192)
                solo_store4f(in.x + q, plus(solo_load4f(in.x + q), solo_load4f(in.v + q)));
            break;
        }
        if (which == SOLO_DOWN)
            ready<QH>(&in, false, NULL, a->eps, s->red[0], w.k_pad, places.row, &s->scale);
        else
            ready<QX>(&in, adds, weights, a->eps, s->red[0], w.k_pad, places.row, &s->scale);
        wait_slots<SLOTS>(&places, &at, w.slots * tiles_at_once<SLOTS>(w.left, w.slots));
        tlc_ready_barrier(); /* the row is ready, the slots are full */
        w.epoch = ++epoch;
        product<D, SLOTS>(s, &places, &at, w, scale, up_scale, &best);
        if (which == SOLO_QKV && !is_head) {
            epoch++;
            if (blockIdx.x < SOLO_CLUSTER * (unsigned)a->n_kv_heads) {
                struct solo_row row = solo_row_of(a);
                struct solo_pages p = solo_pages_of(a, &row, (int)(op & 0xffff));
                solo_attention<D, SLOTS>(a, &a->layers[op >> 16], s, ring, &p, &at, layer, epoch - 1, epoch);
            }
        }
        if (++which == SOLO_MATS) {
            which = SOLO_QKV;
            layer++;
        }
    }
    if (a->ends.chooses)
        choose<D>(a, s, best, epoch);
    if (blockIdx.x != 0)
        return;
    /* Block 0 took in the last row: all blocks have read the epoch, and x. */
    int64_t row = a->ends.alone ? 0 : a->set_rows[0];
    for (int j = 4 * (int)threadIdx.x, to = 0; j < a->d_model; j += 2048, to += 8192)
        *(float4 *)(a->x + row * a->d_model + j) = solo_load4f(in.x + to);
    if (threadIdx.x == 0)
        *(volatile uint32_t *)a->board.epoch = epoch;
}

template <int D, int QX, int QH>
__global__ static void __launch_bounds__(SOLO_THREADS, 1) solo_kernel(const __grid_constant__ struct solo_args a)
{
#if __CUDA_ARCH__ >= 900
    uint8_t *ring = tlc_shared();
    tlc_go(); /* a launch behind this one finds no room before it ends, and then starts at once */
    struct solo_shared<D> *s = (struct solo_shared<D> *)(ring + SOLO_SLOTS(QX) * SOLO_SLOT);
    if (threadIdx.x < SOLO_SLOTS(QX)) {
        bar_init(s->full + threadIdx.x, 1);
        bar_init(s->empty + threadIdx.x, 1);
    }
    if (threadIdx.x < 4)
        tlc_inbox_init(threadIdx.x < 3 ? s->rows + threadIdx.x : &s->inbox);
    brief<D>(&a, s);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int i = threadIdx.x; i < TLC_ROW_Q * (D + 8); i += SOLO_THREADS)
        s->q[i / (D + 8)][i % (D + 8)] = __float2half_rn(0.0f); /* queries that the model does not have */
    tlc_cluster_sync();
    if (threadIdx.x >= TLC_READY_THREADS)
        feed<D, QX, QH>(&a, s, ring);
    else
        compute<D, QX, QH>(&a, s, ring);
    tlc_cluster_sync(); /* nobody leaves while others may write to it */
#endif
}

/* ---- host ---- */

static_assert(sizeof(struct solo_args) <= 32764, "arguments of a kernel");

struct tlc_solo {
    const struct tl_net *net;
    uint8_t *board; /* device */
    int grid;
    struct solo_args args; /* of the launch at hand; most of it never changes */
};

#define KERNELS(X)                                                                                                     \
    X(64, 1, 1)                                                                                                        \
    X(64, 1, 3)                                                                                                        \
    X(64, 3, 3)                                                                                                        \
    X(128, 1, 3)                                                                                                       \
    X(128, 3, 3)

typedef void (*solo_fn)(struct solo_args);

static int hold_of(int n) { return n % 4 ? 0 : n <= 2048 ? 1 : n <= 6144 ? 3 : 0; }

static solo_fn kernel_of(const struct tl_arch_spec *s, size_t *shared)
{
    int d = s->d_head, qx = hold_of(s->d_model), qa = hold_of(tl_q_dim(s)), qh = hold_of(s->d_ff);
    if (!qx || !qa || !qh)
        return NULL;
    qx = qa > qx ? qa : qx;
    qh = qx > qh ? qx : qh;
    if (d == 128 && qx == 1)
        qh = 3;
#define X(D, QX, QH)                                                                                                   \
    if (d == D && qx == QX && qh == QH) {                                                                              \
        *shared = (size_t)SOLO_SLOTS(QX) * SOLO_SLOT + sizeof(struct solo_shared<D>) +                                 \
                  (SOLO_ACC(D) + 2048 * (QH + QX)) * sizeof(float);                                                    \
        return solo_kernel<D, QX, QH>;                                                                                 \
    }
    KERNELS(X)
#undef X
    return NULL;
}

static bool mat_fits(const struct tl_mat *m)
{
    return m && (m->wtype == TL_W_INT4 || m->wtype == TL_W_INT8) && m->k_pad <= 6144 && m->n_out < INT32_MAX / 2;
}

static bool net_fits(const struct tl_net *net)
{
    const struct tl_arch_spec *s = &net->spec;
    int n = s->n_prelude + s->n_core + s->n_coda;
    if (s->value_embeds || s->n_heads / s->n_kv_heads > TLC_ROW_Q || s->qk_norm == TL_QKNORM_FULL || n > SOLO_LAYERS ||
        s->norms & (TL_N2 | TL_N3 | TL_N5 | TL_N6))
        return false;
    for (int i = 0; i < n; i++) {
        const struct tl_layer *l = &net->layers[i];
        if (!mat_fits(l->qkv) || !mat_fits(l->o) || !mat_fits(l->up) || !mat_fits(l->down))
            return false;
    }
    return true;
}

static const float *f32(const struct tl_buf *b) { return b ? (const float *)b->data : NULL; }

static struct solo_mat mat_of(const struct tl_mat *m, int grid)
{
    struct solo_mat s = {m->wtype == TL_W_INT4 ? m->tiles : (const uint8_t *)m->rows8,
                         m->row_scale,
                         (int)m->n_out,
                         (int)m->n_tiles,
                         (int)m->k_pad,
                         (int)m->wtype,
                         (int)m->n_tiles / grid,
                         (int)m->n_tiles % grid};
    return s;
}

/* How many blocks of the kernel are there at once: whole clusters. */
static cudaError_t grid_of(solo_fn fn, size_t shared, int *grid)
{
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute at;
    int clusters = 0;
    cudaError_t e = cudaFuncSetAttribute((const void *)fn, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    at.id = cudaLaunchAttributeClusterDimension;
    at.val.clusterDim.x = SOLO_CLUSTER;
    at.val.clusterDim.y = at.val.clusterDim.z = 1;
    c.gridDim = dim3(SOLO_CLUSTER);
    c.blockDim = dim3(SOLO_THREADS);
    c.dynamicSmemBytes = shared;
    c.attrs = &at;
    c.numAttrs = 1;
    if (e == cudaSuccess)
        e = cudaOccupancyMaxActiveClusters(&clusters, fn, &c);
    *grid = clusters * SOLO_CLUSTER;
    return e;
}

void tlc_solo_free(struct tlc_solo *s)
{
    if (!s)
        return;
    cudaFree(s->board);
    tl_free(s);
}

/* What is the same in all launches. */
static void describe(struct tlc_solo *s)
{
    const struct tl_net *net = s->net;
    const struct tl_arch_spec *spec = &net->spec;
    struct solo_args *a = &s->args;
    a->rope = f32(net->rope);
    a->finish = {spec->d_head, spec->qk_norm, spec->rope, spec->norm_eps};
    a->eps = spec->norm_eps;
    a->scale = 1.0f / sqrtf((float)spec->d_head);
    a->d_model = spec->d_model;
    a->d_ff = spec->d_ff;
    a->n_heads = spec->n_heads;
    a->n_kv_heads = spec->n_kv_heads;
    a->per_row = spec->n_heads / spec->n_kv_heads;
    a->gated = spec->mlp == TL_MLP_SILU_GATED;
    a->has_qkv_bias = net->layers[0].qkv_bias != NULL;
    a->has_qk_bias = net->layers[0].qk_bias != NULL;
    a->n_layers = spec->n_prelude + spec->n_core + spec->n_coda;
    a->ends.embed8 = net->embed->rows8;
    a->ends.embed16 = net->embed->rows16;
    a->ends.embed_row_scale = net->embed->row_scale;
    a->ends.embed_ld = net->embed->k_pad;
    a->ends.embed_scale = spec->embed_scale;
    a->ends.head_norm = f32(net->final_norm);
    a->ends.head_has_norm = spec->final_norm;
    for (int i = 0; i < spec->n_prelude + spec->n_core + spec->n_coda; i++) {
        const struct tl_layer *l = &s->net->layers[i];
        struct solo_layer *to = &s->args.layers[i];
        to->mat[SOLO_QKV] = mat_of(l->qkv, s->grid);
        to->mat[SOLO_O] = mat_of(l->o, s->grid);
        to->mat[SOLO_UP] = mat_of(l->up, s->grid);
        to->mat[SOLO_DOWN] = mat_of(l->down, s->grid);
        for (int j = 0; j < 6; j++)
            to->norm[j] = f32(l->norm[j]);
        to->q_norm = f32(l->q_norm);
        to->k_norm = f32(l->k_norm);
        to->qkv_bias = f32(l->qkv_bias);
        to->qk_bias = f32(l->qk_bias);
    }
}

static cudaError_t make_board(struct tlc_solo *s, cudaStream_t stream)
{
    const struct tl_arch_spec *spec = &s->net->spec;
    size_t qkv = (size_t)(tl_q_dim(spec) + 2 * tl_kv_dim(spec)), att = (size_t)tl_q_dim(spec);
    size_t d = (size_t)spec->d_model, h = (size_t)spec->d_ff, bytes;
    qkv = (qkv + 31) / 32 * 32;
    att = (att + 31) / 32 * 32;
    d = (d + 31) / 32 * 32;
    h = (h + 31) / 32 * 32;
    bytes = (qkv + att + d + h + 2 * (size_t)s->grid + 32) * sizeof(uint64_t);
    cudaError_t e = cudaMalloc((void **)&s->board, bytes);
    if (e == cudaSuccess)
        e = cudaMemsetAsync(s->board, 0, bytes, stream); /* of the steps, which wait for no other */
    struct solo_board *to = &s->args.board;
    to->qkv = (uint64_t *)s->board;
    to->att = to->qkv + qkv;
    to->y = to->att + att;
    to->h = to->y + d;
    to->best = to->h + h;
    to->epoch = (uint32_t *)(to->best + 2 * s->grid);
    return e;
}

cudaError_t tlc_solo_create(struct tlc_backend *c, const struct tl_net *net, struct tlc_solo **out)
{
    size_t shared;
    int grid = 0;
    const char *wanted = getenv("TL_CUDA_ONE_KERNEL");
    *out = NULL;
    if (!wanted || strcmp(wanted, "1") || c->cc < 90 || !net_fits(net))
        return cudaSuccess;
    solo_fn fn = kernel_of(&net->spec, &shared);
    if (!fn || shared > c->shared_max)
        return cudaSuccess;
    cudaError_t e = grid_of(fn, shared, &grid);
    if (e != cudaSuccess || grid < SOLO_CLUSTER * net->spec.n_kv_heads)
        return e;
    struct tlc_solo *s = (struct tlc_solo *)tl_calloc(1, sizeof(*s));
    if (!s)
        return cudaErrorMemoryAllocation;
    s->net = net;
    s->grid = grid;
    for (int i = 0; i < net->spec.n_prelude + net->spec.n_core + net->spec.n_coda; i++) {
        const struct tl_layer *l = &net->layers[i];
        const struct tl_mat *m[] = {l->qkv, l->o, l->up, l->down};
        for (int j = 0; j < 4; j++) { /* every block has a tile of every product */
            int tiles = (int)m[j]->n_tiles / SOLO_CLUSTER * SOLO_CLUSTER;
            s->grid = tiles < s->grid ? tiles : s->grid;
        }
    }
    describe(s);
    e = make_board(s, c->stream);
    if (e != cudaSuccess || s->grid < SOLO_CLUSTER * net->spec.n_kv_heads) {
        tlc_solo_free(s);
        return e;
    }
    *out = s;
    return cudaSuccess;
}

bool tlc_solo_takes(const struct tlc_solo *s, const struct tl_step *step)
{
    if (!s || step->net != s->net || step->n_rows != 1 || step->kv.format != TL_KV_F16)
        return false;
    const struct tl_arch_spec *spec = &s->net->spec;
    int pos = step->rows[0].pos, window = step->seqs[step->rows[0].seq].window;
    int lo = window > 0 && pos >= window ? pos - window + 1 : 0;
    return (pos / TLC_PAGE - lo / TLC_PAGE + 1) * (spec->n_heads / spec->n_kv_heads) <= SOLO_TERMS;
}

static cudaError_t launch(const struct tlc_launch *l, struct tlc_solo *s)
{
    size_t shared;
    solo_fn fn = kernel_of(&s->net->spec, &shared);
    return tlc_launch_cluster(l, fn, SOLO_CLUSTER, dim3((unsigned)s->grid), dim3(SOLO_THREADS), shared, s->args);
}

/* The layers from op `from` on; how many ops that is. Empty sets are passed over. */
static int take_ops(struct solo_args *a, const struct tl_net *net, const struct tl_step *step, int from)
{
    int i = from;
    a->n_ops = 0;
    for (; i < step->n_ops; i++) {
        const struct tl_op *op = &step->ops[i];
        if (step->sets[op->set].n == 0)
            continue;
        if (op->kind == TL_OP_LAYER && a->n_ops < SOLO_OPS_MAX) {
            a->ops[a->n_ops++] = (uint32_t)(op->layer - net->layers) << 16 | (uint32_t)op->slot;
        } else {
            break;
        }
    }
    return i - from;
}

cudaError_t tlc_solo_layers(const struct tlc_launch *l, struct tlc_solo *s, const struct tlc_solo_call *call,
                            int *n_ops, bool *has_head)
{
    struct solo_args *a = &s->args;
    int n = take_ops(a, s->net, call->step, call->from);
    const struct tl_op *next = call->from + n < call->step->n_ops ? &call->step->ops[call->from + n] : NULL;
    bool head = next && next->kind == TL_OP_HEAD && call->step->sets[next->set].n == 1 && mat_fits(s->net->head);
    a->step = call->view;
    a->set_rows = call->set.rows;
    a->x = call->x;
    a->ends.alone = a->ends.chooses = false;
    a->ends.head = head ? mat_of(s->net->head, s->grid) : (struct solo_mat){};
    a->ends.logits = call->logits;
    *n_ops = n + head;
    *has_head = head;
    return launch(l, s);
}

/* The ops in the order EMBED, layers, HEAD, perhaps BEST, and nothing else? Fills in the arguments. */
bool tlc_solo_is_all(struct tlc_solo *s, const struct tl_step *step)
{
    struct solo_args *a = &s->args;
    const struct tl_net *net = s->net;
    const struct tl_step_seq *seq = &step->seqs[step->rows[0].seq];
    int slots = 0, blocks = step->rows[0].pos / TL_BLOCK_TOKENS + 1, i = 0;
    while (i < step->n_ops && step->sets[step->ops[i].set].n == 0)
        i++;
    if (i == step->n_ops || step->ops[i].kind != TL_OP_EMBED || (!net->embed->rows8 && !net->embed->rows16) ||
        !mat_fits(net->head))
        return false;
    i++;
    i += take_ops(a, net, step, i);
    if (a->n_ops == 0 || i == step->n_ops || step->ops[i].kind != TL_OP_HEAD)
        return false;
    i++;
    a->ends.chooses = i < step->n_ops && step->ops[i].kind == TL_OP_BEST;
    if (i + a->ends.chooses != step->n_ops)
        return false;
    for (int j = 0; j < a->n_ops; j++)
        slots = (int)(a->ops[j] & 0xffff) >= slots ? (int)(a->ops[j] & 0xffff) + 1 : slots;
    if ((int64_t)slots * blocks > SOLO_PAGES_MAX)
        return false;
    for (int j = 0; j < slots; j++)
        memcpy(a->pages + j * blocks, seq->pages + (int64_t)j * seq->stride, (size_t)blocks * sizeof(int32_t));
    a->ends.alone = true;
    a->ends.token = step->rows[0].token;
    a->ends.pos = step->rows[0].pos;
    a->ends.window = seq->window;
    a->ends.stride = blocks;
    a->ends.head = mat_of(net->head, s->grid);
    return true;
}

cudaError_t tlc_solo_step(const struct tlc_launch *l, struct tlc_solo *s, const struct tlc_step *view, float *x,
                          float *logits, int32_t *best, const struct tlc_report *report)
{
    struct solo_args *a = &s->args;
    a->step = *view;
    a->x = x;
    a->ends.logits = logits;
    a->ends.best = best;
    a->ends.report = *report;
    return launch(l, s);
}
