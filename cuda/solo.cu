/* The kernel of solo.cuh: what the kinds of warps do in turn; and its launch. */
#include "solo.cuh"

#include <stdlib.h>
#include <string.h>

#include "solo_attention.cuh"
#include "solo_feed.cuh"
#include "solo_float.cuh"
#include "solo_part.cuh"
#include "solo_product.cuh"
#include "solo_row.cuh"

/* Behind this the row and the sum warps have what brief() and solo_seat() put into shared memory. */
__device__ static __forceinline__ void solo_begin() { asm volatile("bar.sync 1, %0;" ::"n"(SOLO_FEEDS) : "memory"); }

/* ---- the row warps ---- */

/* The stream at the start: the token's row of the table, or what lies in memory. */
template <int QX> __device__ static __forceinline__ void first_x(const struct solo_args *a, struct solo_maker<QX> *m)
{
    const struct solo_ends *e = &a->ends;
    int64_t token = e->alone ? e->token : 0, row = e->alone ? 0 : a->set_rows[0];
    if (token < 0) /* chained; after logits that were not finite any token will do, nobody takes what follows */
        token = max(e->best[-1 - token], 0);
#pragma unroll
    for (int q = 0; q < QX; q++) {
        int j = 4 * m->thread + 2048 * q;
        float4 x = make_float4(0, 0, 0, 0);
        if (j >= a->d_model) {
        } else if (!e->alone) {
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
        m->x[q] = x;
    }
}

template <int D, int QX, int QH, bool F, bool Q>
__device__ static __forceinline__ void make_rows(const struct solo_args *a, struct solo_shared<D> *s, uint32_t epoch)
{
    struct solo_maker<QX> m;
    struct solo_turn t = {0, 0, SOLO_QKV, epoch};
    int n = a->n_ops * SOLO_MATS, rank = (int)blockIdx.x % SOLO_CLUSTER;
    m.thread = rank * 32 * SOLO_ROW_WARPS + (int)threadIdx.x - SOLO_SUMS;
    m.parts = shared_at(s->parts);
    m.told = shared_at(s->told);
    m.row = shared_at(s->row);
    m.ready = shared_at(&s->ready);
    m.tells = 0;
    m.mean_part = __fdiv_rn(1.0f, (float)a->d_model);
#pragma unroll
    for (int r = 0; r < SOLO_CLUSTER; r++)
        m.far[r] = solo_far(m.parts, r) - m.parts;
    m.far_lane = solo_far(m.parts, (int)(threadIdx.x & (SOLO_CLUSTER - 1))) - m.parts;
    first_x<QX>(a, &m);
    solo_begin();
#pragma unroll 1
    for (; t.i <= n; solo_next_turn(&t)) {
        const struct solo_shape *shape = &s->shape[t.i == n ? SOLO_MATS : t.which];
        if (t.i > 0)
            solo_meet();
        if (F) {
            m.row = shared_at(t.i & 1 ? solo_odd_of<D>(s)->row : s->row);
            m.ready = shared_at(t.i & 1 ? &solo_odd_of<D>(s)->ready : &s->ready);
        }
        if (t.which == SOLO_O) {
            solo_value_row<QX, QX, F>(&m, a->board.att, t.epoch + 2, shape->n_in, shape->k_pad, SOLO_NAP);
        } else if (t.which == SOLO_DOWN) {
            solo_value_row<QH, QX, F>(&m, a->board.h, t.epoch + 4, shape->n_in, shape->k_pad, 0);
        } else {
            bool up = t.which == SOLO_UP;
            struct solo_norms norms = {NULL, s->brief[s->ops[t.layer] >> 16].norm[up ? 3 : 0],
                                       t.i == n && a->ends.head_has_norm, a->eps, NULL};
            if (t.i > 0)
                norms.before = s->brief[s->ops[up ? t.layer : t.layer - 1] >> 16].norm[up ? 1 : 4];
            norms.has_norm |= norms.norm != NULL;
            if (t.i > 0 && !up && s->loop_ends[(t.layer - 1) / 32] >> (t.layer - 1) % 32 & 1)
                norms.loop = a->loop_norm;
            solo_stream_row<QX, F>(&m, a->board.y, t.epoch + (up ? 3 : 0), &norms, shape->n_in, shape->k_pad, t.i > 0);
        }
        if (Q && shape->part >= 0)
            solo_part<D>(a, s, &t, shape);
    }
    if (blockIdx.x >= SOLO_CLUSTER)
        return;
    /* What came last came from all blocks: they have read x, and the epoch. */
    int64_t row = a->ends.alone ? 0 : a->set_rows[0];
#pragma unroll
    for (int q = 0; q < QX; q++)
        if (4 * m.thread + 2048 * q < a->d_model)
            *(float4 *)(a->x + row * a->d_model + 4 * m.thread + 2048 * q) = m.x[q];
    if (m.thread == 0)
        *(volatile uint32_t *)a->board.epoch = t.epoch + 1;
}

/* ---- the sum warps ---- */

/* The best of all logits: each block publishes its own, block 0 compares. best: of this lane. */
template <int D>
__device__ static __forceinline__ void choose(const struct solo_args *a, struct solo_shared<D> *s,
                                              unsigned long long best, uint32_t epoch)
{
    int lane = threadIdx.x & 31, looks = 0;
    best = tlc_warp_top(best);
    if (lane == 0)
        s->best[threadIdx.x / 32] = best;
    solo_barrier();
    if (threadIdx.x >= 32)
        return;
    best = tlc_warp_top(s->best[lane % SOLO_WARPS]);
    if (lane == 0) {
        solo_publish(a->board.best + 2 * blockIdx.x, __uint_as_float((uint32_t)(best >> 32)), epoch);
        solo_publish(a->board.best + 2 * blockIdx.x + 1, __uint_as_float((uint32_t)best), epoch);
    }
    if (blockIdx.x != 0)
        return;
    enum { MINE = SOLO_BLOCKS / 32 };
    uint64_t order[MINE] = {}, id[MINE] = {};
    uint32_t wrong;
    do { /* all looks at once */
        wrong = 0;
#pragma unroll
        for (int i = 0; i < MINE; i++)
            if (lane + 32 * i < (int)gridDim.x)
                solo_look2(a->board.best + 2 * (lane + 32 * i), order + i, id + i);
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            uint32_t expected = lane + 32 * i < (int)gridDim.x ? epoch : 0;
            wrong |= ((uint32_t)order[i] ^ expected) | ((uint32_t)id[i] ^ expected);
        }
        solo_patience(&looks);
    } while (!__all_sync(0xffffffffu, wrong == 0));
#pragma unroll
    for (int i = 0; i < MINE; i++)
        best = max(best, (unsigned long long)(order[i] >> 32 << 32 | id[i] >> 32));
    best = tlc_warp_top(best);
    if (lane == 0)
        tlc_report_best(&a->ends.report, a->ends.best, 0, best);
}

template <int D, bool F, bool Q>
__device__ static __forceinline__ void multiply(const struct solo_args *a, struct solo_shared<D> *s, uint8_t *ring,
                                                uint32_t epoch)
{
    uint32_t p = shared_at(s);
    struct solo_odd *odd = solo_odd_of<D>(s);
    struct float_places places = {shared_at(ring),    p + SOLO_AT(full),   shared_at(odd->full),
                                  p + SOLO_AT(empty), p + SOLO_AT(ready),  shared_at(&odd->ready),
                                  p + SOLO_AT(row),   shared_at(odd->row), p + SOLO_AT(sums)};
    struct solo_at at = {0, 0};
    struct solo_turn t = {0, 0, SOLO_QKV, epoch};
    unsigned long long best = 0;
    int n = a->n_ops * SOLO_MATS;
    solo_seat<D>(a, s);
    solo_begin();
#pragma unroll 1
    for (; t.i < n + (a->ends.head.n_tiles > 0); solo_next_turn(&t)) {
        uint32_t op = s->ops[t.layer];
        const struct solo_brief *l = &s->brief[op >> 16];
        const struct solo_shape *shape = &s->shape[t.i == n ? SOLO_MATS : t.which];
        struct solo_product m = {l->row_scale[t.which],
                                 t.which == SOLO_QKV ? a->board.qkv : a->board.y,
                                 t.epoch + (t.which == SOLO_QKV ? 1 : 2 + (uint32_t)t.which),
                                 shape->k_pad,
                                 shape->n_out,
                                 shape->tiles,
                                 s->first[t.i == n ? SOLO_MATS : t.which],
                                 t.i,
                                 t.which == SOLO_QKV ? END_PLAIN : END_PUBLISH};
        if (t.i == n) {
            m.end = END_LOGITS;
            m.out = a->ends.logits;
        } else if (t.which == SOLO_UP) {
            m.end = a->gated ? END_SILU_MUL : END_RELU2;
            m.out = a->board.h;
        }
        if (F)
            float_multiply(&places, &at, &m, &best);
        else if (Q && l->wtype[t.which] == TL_W_INT4)
            m.k_pad <= 2048   ? solo_multiply<1, 6, 3>(p, &at, &m, &best)
            : m.k_pad <= 4096 ? solo_multiply<2, 3, 1>(p, &at, &m, &best)
                              : solo_multiply<3, 2, 1>(p, &at, &m, &best);
        else if (m.k_pad <= 2048)
            solo_multiply<1, SOLO_ROUND, 0>(p, &at, &m, &best);
        else
            solo_multiply<3, SOLO_ROUND, 0>(p, &at, &m, &best);
        if (t.i < n)
            solo_meet();
        if (t.which == SOLO_QKV && t.i < n && s->pages.kv >= 0) {
            solo_attention<D, F>(a, l, s, p - SOLO_SLOTS * SOLO_SLOT, (int)(op & 0xffff), &at, t.layer, t.epoch + 1);
        }
    }
    if (a->ends.chooses)
        choose<D>(a, s, best, t.epoch + 1);
}

/* ---- the kernel ---- */

/* What warps need of the layers, to where it is read fast. The head counts as one more layer. By all but the feeder: each warp has
 * something else to ask for, so that they wait for memory side by side. */
template <int D> __device__ static void brief(const struct solo_args *a, struct solo_shared<D> *s)
{
    enum { WORDS = sizeof(struct solo_brief) / sizeof(uint64_t), TABLE = SOLO_SUMS - 64 };
    const struct solo_mat *head = &a->ends.head;
    int i = threadIdx.x;
    if (i < TABLE) {
        for (; i < a->n_layers * WORDS; i += TABLE)
            ((uint64_t *)s->brief)[i] = __ldg((const uint64_t *)&a->layers[i / WORDS].brief + i % WORDS);
    } else if (i < TABLE + 32) {
        for (i -= TABLE; i <= a->n_ops; i += 32)
            s->ops[i] = i < a->n_ops ? a->ops[i] : (uint32_t)a->n_layers << 16;
    } else if (i < SOLO_SUMS) {
        i -= TABLE + 32;
        if (i < (SOLO_OPS_MAX + 31) / 32)
            s->loop_ends[i] = a->loop_ends[i];
        if (i < sizeof(s->zero) / sizeof(__half))
            s->zero[i] = __float2half_rn(0.0f);
        if (i == 0) {
            s->brief[a->n_layers].row_scale[0] = head->row_scale;
            s->brief[a->n_layers].wtype[0] = (uint8_t)head->wtype;
            s->brief[a->n_layers].norm[0] = a->ends.head_norm;
        }
    } else if (i <= SOLO_SUMS + SOLO_MATS) {
        i -= SOLO_SUMS;
        const struct solo_mat *m = i == SOLO_MATS ? head : &a->layers[0].mat[i];
        struct solo_shape *to = &s->shape[i];
        int parts = m->parts, rank = (int)blockIdx.x % SOLO_CLUSTER, cluster = (int)blockIdx.x / SOLO_CLUSTER;
        to->n_in = i == SOLO_O ? a->n_heads * D : i == SOLO_DOWN ? a->d_ff : a->d_model;
        to->k_pad = m->k_pad;
        to->n_out = i == SOLO_UP && a->gated ? m->n_out / 2 : m->n_out;
        s->first[i] = solo_first(a, i);
        to->tiles = m->each + (s->first[i] < m->more);
        to->part = cluster < parts ? m->n_tiles + cluster : -1;
        to->part_chunk = part_chunk(m->k_pad, rank);
        to->n_chunks = part_chunk(m->k_pad, rank + 1) - to->part_chunk;
        to->part_at = m->part_at;
    }
    for (i = threadIdx.x; i < TLC_ROW_Q * (D + 8); i += SOLO_FEEDS)
        s->q[i / (D + 8)][i % (D + 8)] = __float2half_rn(0.0f); /* queries that the model does not have */
}

/* F: weights are BF16, else integers; Q: some are INT4. */
template <int D, int QX, int QH, bool F, bool Q>
__global__ static void __launch_bounds__(SOLO_THREADS, 1) solo_kernel(const __grid_constant__ struct solo_args a)
{
#if __CUDA_ARCH__ >= 900
    uint8_t *ring = tlc_shared();
    tlc_go(); /* a launch behind this one finds no room before it ends, and then starts at once */
    struct solo_shared<D> *s = (struct solo_shared<D> *)(ring + SOLO_SLOTS * SOLO_SLOT);
    if (threadIdx.x >=
        SOLO_FEEDS) { /* the ring is this block's alone: the first weights need not wait for the cluster */
        int i = threadIdx.x - SOLO_FEEDS;
        if (i < SOLO_SLOTS) {
            bar_init(s->full + i, 1);
            bar_init(s->empty + i, F ? 2 : SOLO_WARPS);
            if (F)
                bar_init(solo_odd_of<D>(s)->full + i, 1);
        }
        if (!F && i < 2) {
            bar_init(solo_parts_of<D>(s)->full + i, 1);
            bar_init(solo_parts_of<D>(s)->empty + i, SOLO_ROW_WARPS);
        }
        if (!F && i == 2)
            bar_init(&solo_parts_of<D>(s)->inbox, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        __syncwarp();
        tlc_cluster_arrive();
        feed<D, F>(&a, s, ring);
    } else {
        if (threadIdx.x < 4)
            bar_init(threadIdx.x == 0 ? &s->inbox : threadIdx.x == 1 ? &s->ready : &s->told[threadIdx.x - 2], 1);
        if (F && threadIdx.x == 4)
            bar_init(&solo_odd_of<D>(s)->ready, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        tlc_cluster_arrive();
        brief<D>(&a, s);
        tlc_cluster_wait();
        tlc_wait();
        uint32_t epoch = *(volatile uint32_t *)a.board.epoch;
        if (threadIdx.x < SOLO_SUMS)
            multiply<D, F, Q>(&a, s, ring, epoch);
        else
            make_rows<D, QX, QH, F, Q>(&a, s, epoch);
    }
    __syncwarp();
    tlc_cluster_sync(); /* nobody leaves while others may write to it */
#endif
}

/* ---- host ---- */

static_assert(sizeof(struct solo_args) <= 32764, "arguments of a kernel");

typedef void (*solo_fn)(struct solo_args);

struct tlc_solo {
    const struct tl_net *net;
    solo_fn fn;
    size_t shared;  /* bytes of a block */
    uint8_t *board; /* device */
    int grid;
    struct solo_layer layers[SOLO_LAYERS]; /* a copy is on the device, behind the board */
    struct solo_args args;                 /* of the launch at hand; most of it never changes */
};

#define INTEGERS(X, Q)                                                                                                 \
    X(64, 1, 1, false, Q)                                                                                              \
    X(64, 1, 3, false, Q)                                                                                              \
    X(64, 3, 3, false, Q)                                                                                              \
    X(128, 1, 3, false, Q)                                                                                             \
    X(128, 3, 3, false, Q)
#define KERNELS(X)                                                                                                     \
    INTEGERS(X, false)                                                                                                 \
    INTEGERS(X, true)                                                                                                  \
    X(64, 1, 3, true, false)                                                                                           \
    X(128, 1, 3, true, false)

static int hold_of(int n) { return n % 4 ? 0 : n <= 2048 ? 1 : n <= 6144 ? 3 : 0; }

static bool is_float(const struct tl_net *net) { return net->layers[0].qkv->wtype == TL_W_BF16; }

static bool has_int4(const struct tl_net *net)
{
    bool q = net->head && net->head->wtype == TL_W_INT4;
    for (int i = 0; i < net->spec.n_prelude + net->spec.n_core + net->spec.n_coda; i++) {
        const struct tl_layer *l = &net->layers[i];
        q = q || l->qkv->wtype == TL_W_INT4 || l->o->wtype == TL_W_INT4 || l->up->wtype == TL_W_INT4 ||
            l->down->wtype == TL_W_INT4;
    }
    return q;
}

/* shared: bytes, without weights behind solo_parts. */
static solo_fn kernel_of(const struct tl_net *net, size_t *shared)
{
    const struct tl_arch_spec *s = &net->spec;
    bool f = is_float(net), q = has_int4(net);
    int d = s->d_head, qx = hold_of(s->d_model), qa = hold_of(tl_q_dim(s)), qh = hold_of(s->d_ff);
    if (!qx || !qa || !qh)
        return NULL;
    qx = qa > qx ? qa : qx;
    qh = qx > qh ? qx : qh;
    if ((d == 128 || f) && qx == 1)
        qh = 3;
#define X(D, QX, QH, F, Q)                                                                                             \
    if (d == D && qx == QX && qh == QH && f == F && q == Q) {                                                          \
        *shared = (size_t)SOLO_SLOTS * SOLO_SLOT + sizeof(struct solo_shared<D>) + SOLO_ACC(D) * sizeof(float) +       \
                  (F ? sizeof(struct solo_odd) : sizeof(struct solo_parts));                                           \
        return solo_kernel<D, QX, QH, F, Q>;                                                                           \
    }
    KERNELS(X)
#undef X
    return NULL;
}

/* f: is the kernel that for BF16? */
static bool mat_fits(const struct tl_mat *m, bool f)
{
    return m && (f ? m->wtype == TL_W_BF16 : m->wtype == TL_W_INT4 || m->wtype == TL_W_INT8) && m->k_pad <= SOLO_ROW &&
           m->n_out < INT32_MAX / 2;
}

static bool net_fits(const struct tl_net *net)
{
    const struct tl_arch_spec *s = &net->spec;
    int n = s->n_prelude + s->n_core + s->n_coda;
    if (s->n_heads / s->n_kv_heads > TLC_ROW_Q || s->qk_norm == TL_QKNORM_FULL || s->value_embeds || n > SOLO_LAYERS ||
        s->norms & (TL_N3 | TL_N6))
        return false;
    for (int i = 0; i < n; i++) {
        const struct tl_layer *l = &net->layers[i];
        bool f = is_float(net);
        if (!mat_fits(l->qkv, f) || !mat_fits(l->o, f) || !mat_fits(l->up, f) || !mat_fits(l->down, f))
            return false;
    }
    return true;
}

static const float *f32(const struct tl_buf *b) { return b ? (const float *)b->data : NULL; }

static struct solo_mat mat_of(const struct tl_mat *m, int grid)
{
    struct solo_mat s = {m->wtype == TL_W_INT4   ? m->tiles
                         : m->wtype == TL_W_INT8 ? (const uint8_t *)m->rows8
                                                 : (const uint8_t *)m->rows16,
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
    a->ends.head_norm = spec->final_norm ? f32(net->final_norm) : NULL;
    a->loop_norm = f32(net->loop_norm);
    a->ends.head_has_norm = spec->final_norm;
    for (int i = 0; i < spec->n_prelude + spec->n_core + spec->n_coda; i++) {
        const struct tl_layer *l = &s->net->layers[i];
        struct solo_layer *to = &s->layers[i];
        to->mat[SOLO_QKV] = mat_of(l->qkv, s->grid);
        to->mat[SOLO_O] = mat_of(l->o, s->grid);
        to->mat[SOLO_UP] = mat_of(l->up, s->grid);
        to->mat[SOLO_DOWN] = mat_of(l->down, s->grid);
        for (int j = 0; j < SOLO_MATS; j++) {
            to->brief.row_scale[j] = to->mat[j].row_scale;
            to->brief.wtype[j] = (uint8_t)to->mat[j].wtype;
        }
        for (int j = 0; j < 6; j++)
            to->brief.norm[j] = f32(l->norm[j]);
        to->brief.q_norm = f32(l->q_norm);
        to->brief.k_norm = f32(l->k_norm);
        to->brief.qkv_bias = f32(l->qkv_bias);
        to->brief.qk_bias = f32(l->qk_bias);
    }
}

/* Tiles of o and down products that are left over become those of clusters, if there are so many clusters; not those of so few inputs
 * that a block is done with a second one before the others could have told of their parts. room: chunks of a block that its shared
 * memory has room for; without it o's stay what they were, then down's. */
static void part(struct tlc_solo *s, int room)
{
    for (int which = SOLO_DOWN, at = 0; which > 0; which -= SOLO_DOWN - SOLO_O) {
        const struct solo_mat *m = &s->layers[0].mat[which];
        int tiles = m->more, chunks = (m->k_pad / 64 + SOLO_CLUSTER - 1) / SOLO_CLUSTER;
        bool fits = tiles > 0 && tiles <= s->grid / SOLO_CLUSTER && m->k_pad > PART_LEAST && at + chunks <= room;
        for (int i = 0; i < s->args.n_layers; i++)
            fits = fits && s->layers[i].mat[which].wtype == TL_W_INT4;
        for (int i = 0; i < s->args.n_layers && fits; i++) {
            struct solo_mat *to = &s->layers[i].mat[which];
            to->n_tiles -= tiles;
            to->more = 0;
            to->parts = tiles;
            to->part_at = at * PART_CHUNK;
        }
        at += fits ? chunks : 0;
    }
}

/* How much worse blocks have it if those from `shift` on have a tile more of a product; load: what they have so far. */
static int64_t cost_of(const int *load, int grid, const struct solo_mat *m, int shift)
{
    int64_t cost = 0;
    for (int i = 0; i < grid; i++) {
        int64_t after = load[i] + ((i + shift) % grid < m->more ? m->k_pad : 0);
        cost += after * after;
    }
    return cost;
}

/* The blocks that have a tile more of a product are those that have least so far: products of large tiles come
 * first, and of few such blocks. Blocks with attention, the last ones, have something to begin with. */
static void spread(struct solo_args *a, const struct solo_mat *m, int grid)
{
    int load[SOLO_BLOCKS] = {};
    bool done[SOLO_MATS] = {};
    for (int i = max(grid - SOLO_SHARES * a->n_kv_heads, 0); i < grid; i++)
        load[i] = FLOAT_SLICE;
    for (int n = 0; n < SOLO_MATS; n++) {
        int at = -1;
        for (int j = 0; j < SOLO_MATS; j++)
            if (!done[j] &&
                (at < 0 || m[j].k_pad > m[at].k_pad || (m[j].k_pad == m[at].k_pad && m[j].more < m[at].more)))
                at = j;
        done[at] = true;
        a->shift[at] = 0;
        for (int shift = 1; shift < grid; shift++)
            if (cost_of(load, grid, &m[at], shift) < cost_of(load, grid, &m[at], a->shift[at]))
                a->shift[at] = shift;
        for (int i = 0; i < grid; i++)
            load[i] += (i + a->shift[at]) % grid < m[at].more ? m[at].k_pad : 0;
    }
}

static cudaError_t make_board(struct tlc_solo *s, cudaStream_t stream)
{
    const struct tl_arch_spec *spec = &s->net->spec;
    size_t qkv = (size_t)(tl_q_dim(spec) + 2 * tl_kv_dim(spec)), att = (size_t)tl_q_dim(spec);
    size_t d = (size_t)spec->d_model, h = (size_t)spec->d_ff, bytes;
    qkv = (qkv + 127) / 128 * 128;
    att = (att + 127) / 128 * 128;
    d = (d + 127) / 128 * 128;
    h = (h + 127) / 128 * 128;
    bytes = (qkv + att + d + h + 2 * (size_t)s->grid + 32) * sizeof(uint64_t);
    cudaError_t e = cudaMalloc((void **)&s->board, bytes + sizeof(s->layers));
    if (e == cudaSuccess)
        e = cudaMemsetAsync(s->board, 0, bytes, stream); /* in front of the first launch */
    if (e == cudaSuccess)
        e = cudaMemcpyAsync(s->board + bytes, s->layers, sizeof(s->layers), cudaMemcpyHostToDevice, stream);
    s->args.layers = (const struct solo_layer *)(s->board + bytes);
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
    int grid = 0, room;
    const char *wanted = getenv("TL_CUDA_ONE_KERNEL");
    *out = NULL;
    if ((wanted && !strcmp(wanted, "0")) || c->cc < 90 || !net_fits(net))
        return cudaSuccess;
    solo_fn fn = kernel_of(net, &shared);
    if (!fn || shared > c->shared_max)
        return cudaSuccess;
    room = is_float(net) ? 0 : min((int)((c->shared_max - shared) / PART_CHUNK), PART_CHUNKS);
    shared += (size_t)room * PART_CHUNK;
    cudaError_t e = grid_of(fn, shared, &grid);
    grid = min(grid, SOLO_BLOCKS);
    for (int i = 0; i < net->spec.n_prelude + net->spec.n_core + net->spec.n_coda; i++) {
        const struct tl_layer *l = &net->layers[i];
        const struct tl_mat *m[] = {l->qkv, l->o, l->up, l->down};
        for (int j = 0; j < 4; j++) /* every block has a tile of every product */
            grid = min(grid, (int)m[j]->n_tiles / SOLO_CLUSTER * SOLO_CLUSTER);
    }
    if (e != cudaSuccess || grid < SOLO_SHARES * net->spec.n_kv_heads) /* perhaps there is no cluster, even */
        return e;
    struct tlc_solo *s = (struct tlc_solo *)tl_calloc(1, sizeof(*s));
    if (!s)
        return cudaErrorMemoryAllocation;
    s->net = net;
    s->fn = fn;
    s->shared = shared;
    s->grid = grid;
    describe(s);
    part(s, room);
    spread(&s->args, s->layers[0].mat, s->grid);
    e = make_board(s, c->stream);
    if (e != cudaSuccess) {
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
    int pages = pos / TLC_PAGE - lo / TLC_PAGE + 1;
    return pages <= (is_float(s->net) ? FLOAT_PAGES : SOLO_PAGES) * solo_shares(spec->n_kv_heads, s->grid, pages) &&
           pages * ((spec->n_heads / spec->n_kv_heads + 1) / 2 * 2) <= SOLO_TERMS;
}

static cudaError_t launch(const struct tlc_launch *l, struct tlc_solo *s)
{
    return tlc_launch_cluster(l, s->fn, SOLO_CLUSTER, dim3((unsigned)s->grid), dim3(SOLO_THREADS), s->shared, s->args);
}

/* The layers from op `from` on, and the norms between loops; how many ops that is. Empty sets are passed over. */
static int take_ops(struct tlc_solo *s, const struct tl_step *step, int from)
{
    struct solo_args *a = &s->args;
    const struct tl_net *net = s->net;
    int i = from;
    a->n_ops = 0;
    memset(a->loop_ends, 0, sizeof(a->loop_ends));
    for (; i < step->n_ops; i++) {
        const struct tl_op *op = &step->ops[i];
        if (step->sets[op->set].n == 0)
            continue;
        if (op->kind == TL_OP_LAYER && a->n_ops < SOLO_OPS_MAX) {
            a->ops[a->n_ops++] = (uint32_t)(op->layer - net->layers) << 16 | (uint32_t)op->slot;
        } else if (op->kind == TL_OP_LOOP_NORM && net->loop_norm && a->n_ops > 0 &&
                   !(a->loop_ends[(a->n_ops - 1) / 32] >> (a->n_ops - 1) % 32 & 1)) {
            a->loop_ends[(a->n_ops - 1) / 32] |= 1u << (a->n_ops - 1) % 32;
        } else {
            break;
        }
    }
    if (a->n_ops)
        a->first = s->layers[a->ops[0] >> 16].mat[SOLO_QKV];
    return i - from;
}

cudaError_t tlc_solo_layers(const struct tlc_launch *l, struct tlc_solo *s, const struct tlc_solo_call *call,
                            int *n_ops, bool *has_head)
{
    struct solo_args *a = &s->args;
    int n = take_ops(s, call->step, call->from);
    const struct tl_op *next = call->from + n < call->step->n_ops ? &call->step->ops[call->from + n] : NULL;
    bool head = next && next->kind == TL_OP_HEAD && call->step->sets[next->set].n == 1 &&
                mat_fits(s->net->head, is_float(s->net));
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
        !mat_fits(net->head, is_float(net)))
        return false;
    i++;
    i += take_ops(s, step, i);
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
