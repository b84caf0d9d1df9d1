/* cuda/solo_warps.cuh - what the kinds of warps of the one-row kernel do in turn; see solo.cuh. */
#ifndef TLC_SOLO_WARPS_CUH
#define TLC_SOLO_WARPS_CUH

#include "solo_attention.cuh"
#include "solo_feed.cuh"
#include "solo_float.cuh"
#include "solo_part.cuh"
#include "solo_product.cuh"
#include "solo_row.cuh"

/* Behind this the row and the sum warps have what brief() and solo_seat() put into shared memory. */
template <int R> __device__ static __forceinline__ void solo_begin()
{
    asm volatile("bar.sync 1, %0;" ::"n"(SOLO_THREADS(R) - 32) : "memory");
}

/* ---- the row warps ---- */

/* The stream of row r at the start: the token's row of the table, or what lies in memory. */
template <int QX>
__device__ static __forceinline__ void first_x(const struct solo_args *a, struct solo_maker<QX> *m, int r)
{
    const struct solo_ends *e = &a->ends;
    int64_t token = e->alone ? e->token[r] : 0, row = e->alone ? r : a->set_rows[r];
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

/* The streams of several rows; one alone stays in the maker. */
template <int QX, int R> struct streams {
    float4 x[R][QX];
};
template <int QX, int R>
__device__ static __forceinline__ void put_stream(struct streams<QX, R> *y, const struct solo_maker<QX> *m, int r)
{
    if (R > 1) {
#pragma unroll
        for (int i = 0; i < R * QX; i++) /* no index that is not known: they would lie in memory */
            y->x[i / QX][i % QX] = i / QX == r ? m->x[i % QX] : y->x[i / QX][i % QX];
    }
}
template <int QX, int R>
__device__ static __forceinline__ void take_stream(const struct streams<QX, R> *y, struct solo_maker<QX> *m, int r)
{
    if (R > 1) {
#pragma unroll
        for (int i = 0; i < R * QX; i++)
            m->x[i % QX] = i / QX == r ? y->x[i / QX][i % QX] : m->x[i % QX];
    }
}

/* All rows of a product, one after the other. */
template <int D, int QX, int QH, bool F, bool Q, int R>
__device__ static __forceinline__ void make_rows(const struct solo_args *a, struct solo_shared<D> *s, uint32_t epoch)
{
    struct solo_maker<QX> m;
    struct streams<QX, R> streams;
    struct solo_turn t = {0, 0, SOLO_QKV, epoch};
    int n = a->n_ops * SOLO_MATS, rank = (int)blockIdx.x % SOLO_CLUSTER;
    m.thread = rank * 32 * SOLO_ROW_WARPS + (int)threadIdx.x - SOLO_SUMS;
    m.parts = shared_at(s->parts);
    m.told = shared_at(s->told);
    m.row = shared_at(s->row);
    m.ready = shared_at(s->ready);
    m.scale = shared_at(s->scale);
    m.tells = 0;
    m.mean_part = __fdiv_rn(1.0f, (float)a->d_model);
#pragma unroll
    for (int i = 0; i < SOLO_CLUSTER; i++)
        m.far[i] = solo_far(m.parts, i) - m.parts;
    m.far_lane = solo_far(m.parts, (int)(threadIdx.x & (SOLO_CLUSTER - 1))) - m.parts;
#pragma unroll
    for (int r = 0; r < R; r++) {
        first_x<QX>(a, &m, r);
        put_stream<QX, R>(&streams, &m, r);
    }
    solo_begin<R>();
#pragma unroll 1
    for (; t.i <= n; solo_next_turn(&t)) {
        const struct solo_shape *shape = &s->shape[t.i == n ? SOLO_MATS : t.which];
#pragma unroll 1
        for (int r = 0; r < R; r++) {
            const uint64_t *att = a->board.att, *y = a->board.y, *h = a->board.h;
            if (t.i > 0)
                solo_meet<R>(r);
            if (R > 1) {
                m.row = shared_at((struct solo_common *)s) + (uint32_t)a->row_at[r];
                m.ready = shared_at(s->ready + r);
                m.scale = shared_at(s->scale + r);
                att += r * a->steps[STEP_ATT];
                y += r * a->steps[STEP_Y];
                h += r * a->steps[STEP_H];
            }
            if (F) {
                m.row = shared_at(t.i & 1 ? solo_odd_of<D>(s)->row : s->row);
                m.ready = shared_at(t.i & 1 ? &solo_odd_of<D>(s)->ready : s->ready);
            }
            if (t.which == SOLO_O) {
                solo_value_row<QX, QX, F>(&m, att, t.epoch + 2, shape->n_in, shape->k_pad, SOLO_NAP);
            } else if (t.which == SOLO_DOWN) {
                solo_value_row<QH, QX, F>(&m, h, t.epoch + 4, shape->n_in, shape->k_pad, 0);
            } else {
                bool up = t.which == SOLO_UP;
                struct solo_norms norms = {NULL, s->brief[s->ops[t.layer] >> 16].norm[up ? 3 : 0],
                                           t.i == n && a->ends.head_has_norm, a->eps, NULL};
                if (t.i > 0)
                    norms.before = s->brief[s->ops[up ? t.layer : t.layer - 1] >> 16].norm[up ? 1 : 4];
                norms.has_norm |= norms.norm != NULL;
                if (t.i > 0 && !up && s->loop_ends[(t.layer - 1) / 32] >> (t.layer - 1) % 32 & 1)
                    norms.loop = a->loop_norm;
                take_stream<QX, R>(&streams, &m, r);
                solo_stream_row<QX, F>(&m, y, t.epoch + (up ? 3 : 0), &norms, shape->n_in, shape->k_pad, t.i > 0);
                put_stream<QX, R>(&streams, &m, r);
            }
            if (Q && R == 1 && shape->part >= 0)
                solo_part<D, SOLO_ROW_WARPS>(a, s, &t, shape, 0);
        }
    }
    /* What came last came from all blocks: they have read x, and the epoch. */
    if (blockIdx.x >= SOLO_CLUSTER)
        return;
#pragma unroll
    for (int r = 0; r < R; r++) {
        int64_t row = a->ends.alone ? r : a->set_rows[r];
        take_stream<QX, R>(&streams, &m, r);
#pragma unroll
        for (int q = 0; q < QX; q++)
            if (4 * m.thread + 2048 * q < a->d_model)
                *(float4 *)(a->x + row * a->d_model + 4 * m.thread + 2048 * q) = m.x[q];
    }
    if (m.thread == 0)
        *(volatile uint32_t *)a->board.epoch = t.epoch + 1;
}

/* ---- the last warp, where there are several rows: the row warps would be late with the next one ---- */

template <int D, int R>
__device__ static __forceinline__ void make_parts(const struct solo_args *a, struct solo_shared<D> *s, uint32_t epoch)
{
    struct solo_turn t = {0, 0, SOLO_QKV, epoch};
    solo_begin<R>();
#pragma unroll 1
    for (; t.i < a->n_ops * SOLO_MATS;
         solo_next_turn(&t)) { /* it meets the others behind each row: no turn passes it by */
        const struct solo_shape *shape = &s->shape[t.which];
#pragma unroll 1
        for (int r = 0; r < R; r++) {
            if (shape->part >= 0)
                solo_part<D, 1>(a, s, &t, shape, r);
            solo_meet<R>(r);
        }
    }
}

/* ---- the sum warps ---- */

/* The best of all logits of a row: each block publishes its own, block 0 compares. Warp r has row r. of: the best of each row, of this
 * lane. */
template <int D, int R>
__device__ static __forceinline__ void choose(const struct solo_args *a, struct solo_shared<D> *s,
                                              const unsigned long long *of, uint32_t epoch)
{
    int lane = threadIdx.x & 31, r = R == 1 ? 0 : (int)threadIdx.x / 32, looks = 0;
#pragma unroll
    for (int i = 0; i < R; i++) {
        unsigned long long top = tlc_warp_top(of[i]);
        if (lane == 0)
            s->best[i * SOLO_WARPS + threadIdx.x / 32] = top;
    }
    solo_barrier();
    if (threadIdx.x >= 32 * R)
        return;
    unsigned long long best = tlc_warp_top(s->best[r * SOLO_WARPS + lane % SOLO_WARPS]);
    uint64_t *board = a->board.best + (R == 1 ? 0 : r * a->steps[STEP_BEST]);
    if (lane == 0) {
        solo_publish(board + 2 * blockIdx.x, __uint_as_float((uint32_t)(best >> 32)), epoch);
        solo_publish(board + 2 * blockIdx.x + 1, __uint_as_float((uint32_t)best), epoch);
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
                solo_look2(board + 2 * (lane + 32 * i), order + i, id + i);
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
        tlc_report_best(&a->ends.report, a->ends.best, r, best);
}

template <int D, bool F, bool Q, int R>
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
    unsigned long long best[R] = {};
    int n = a->n_ops * SOLO_MATS;
    solo_seat<D, R>(a, s);
    solo_begin<R>();
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
                                 t.which == SOLO_QKV ? END_PLAIN : END_PUBLISH,
                                 a->steps[t.which == SOLO_QKV ? STEP_QKV : STEP_Y],
                                 t.i < n,
                                 a->row_at};
        if (t.i == n) {
            m.end = END_LOGITS;
            m.out = a->ends.logits;
            m.step = shape->n_out;
        } else if (t.which == SOLO_UP) {
            m.end = a->gated ? END_SILU_MUL : END_RELU2;
            m.out = a->board.h;
            m.step = a->steps[STEP_H];
        }
        if (F)
            float_multiply(&places, &at, &m, best);
        else if (Q && l->wtype[t.which] == TL_W_INT4)
            m.k_pad <= 2048   ? solo_multiply<1, 6, R == 1 ? 3 : 2, R>(p, &at, &m, best)
            : m.k_pad <= 4096 ? solo_multiply<2, 3, 1, R>(p, &at, &m, best)
                              : solo_multiply<3, 2, 1, R>(p, &at, &m, best);
        else if (m.k_pad <= 2048)
            solo_multiply<1, SOLO_ROUND, 0, R>(p, &at, &m, best);
        else
            solo_multiply<3, SOLO_ROUND, 0, R>(p, &at, &m, best);
        if (R == 1 && t.i < n)
            solo_meet<1>(0);
        if (t.which == SOLO_QKV && t.i < n && s->pages.kv >= 0) {
            solo_attention<D, F, R>(a, l, s, p - SOLO_SLOTS * SOLO_SLOT, (int)(op & 0xffff), &at, t.layer, t.epoch + 1);
        }
    }
    if (a->ends.chooses)
        choose<D, R>(a, s, best, t.epoch + 1);
}

/* ---- the start ---- */

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

#endif
