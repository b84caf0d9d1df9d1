/* cuda/solo_attention.cuh - attention of the one row, by the blocks of a cluster per kv head. The operations, and their order, are
 * those of attention_row.cu.
 *
 * Between the last value of the qkv product and the first of attention everybody waits, so what can be done before stands before:
 * addresses before the barrier or the look behind which they are used, what is the same in all layers at the start. */
#ifndef TLC_SOLO_ATTENTION_CUH
#define TLC_SOLO_ATTENTION_CUH

#include "attention_heads.cuh"
#include "solo.cuh"

/* A group of sum warps. */
__device__ static __forceinline__ void solo_group_barrier(int group)
{
    asm volatile("bar.sync %0, %1;" ::"r"(3 + group), "n"(32 * SOLO_GROUP) : "memory");
}

/* What is the same in all layers, by the sum warps; there behind their next barrier. */
template <int D, int R>
__device__ static __forceinline__ void solo_seat(const struct solo_args *a, struct solo_shared<D> *s)
{
    struct solo_pages p = solo_pages_of<R>(a);
    const float *rope = a->rope + (int64_t)p.pos * D + threadIdx.x;
    if (threadIdx.x == 0)
        s->pages = p;
    if (threadIdx.x < D / 2 && a->finish.rope != TL_ROPE_NONE)
        s->turn[threadIdx.x] = make_float2(rope[0], rope[D / 2]);
}

/* ---- the heads of the row: by one warp each, value lane + 32 i in v[i] ---- */

/* task counts the n_q query heads of the kv head, then k, then v. from: the row's published values. */
template <int D>
__device__ static __forceinline__ void solo_head(const struct solo_args *a, const struct solo_brief *l,
                                                 struct solo_shared<D> *s, const uint64_t *from, int task,
                                                 uint32_t epoch)
{
    enum { N = D / 32 };
    const struct solo_pages *p = &s->pages;
    int lane = threadIdx.x & 31, n_q = a->per_row;
    bool is_q = task<n_q, is_v = task> n_q, pair = a->finish.rope == TL_ROPE_PAIR;
    int number = is_q ? p->kv * n_q + task : a->n_heads + (is_v ? a->n_kv_heads : 0) + p->kv, at = number * D + lane;
    bool has_b0 = a->has_qkv_bias, has_b1 = a->has_qk_bias && !is_v,
         has_norm = a->finish.qk_norm == TL_QKNORM_HEAD && !is_v;
    bool has_rope = a->finish.rope != TL_ROPE_NONE && !is_v;
    float v[N], b0[N] = {}, b1[N] = {}, w[N] = {}, c[N] = {}, sn[N] = {};
    from += at;
    if (has_b0 || has_b1 || has_norm) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            b0[i] = has_b0 ? solo_ask(l->qkv_bias + at + 32 * i) : 0.0f;
            b1[i] = has_b1 ? solo_ask(l->qk_bias + at + 32 * i) : 0.0f;
            w[i] = has_norm ? solo_ask((is_q ? l->q_norm : l->k_norm) + lane + 32 * i) : 0.0f;
        }
    }
    if (has_rope) {
#pragma unroll
        for (int i = 0; i < N; i++) { /* x - y is x + -y */
            int angle = pair ? lane / 2 + 16 * i : lane + 32 * (i % (N / 2));
            bool second = pair ? lane & 1 : i >= N / 2;
            uint2 turn = solo_load8(shared_at(s->turn + angle));
            c[i] = __uint_as_float(turn.x);
            sn[i] = second ? __uint_as_float(turn.y) : -__uint_as_float(turn.y);
        }
    }
    uint32_t wrong;
    int looks = 0;
    do {
        uint64_t word[N];
        wrong = 0;
#pragma unroll
        for (int i = 0; i < N; i++)
            word[i] = solo_look(from + 32 * i);
#pragma unroll
        for (int i = 0; i < N; i++) {
            wrong |= (uint32_t)word[i] ^ epoch;
            v[i] = solo_value(word[i]);
        }
        solo_patience(&looks);
    } while (!__all_sync(0xffffffffu, wrong == 0));
    if (has_b0) {
#pragma unroll
        for (int i = 0; i < N; i++)
            v[i] = __fadd_rn(v[i], b0[i]);
    }
    if (has_b1) {
#pragma unroll
        for (int i = 0; i < N; i++)
            v[i] = __fadd_rn(v[i], b1[i]);
    }
    if (has_norm)
        tlc_head_norm_held<D>(v, w, a->finish.eps);
    if (has_rope) {
        float other[N];
#pragma unroll
        for (int i = 0; i < N; i++) /* halves are whole numbers of registers, pairs are neighbours */
            other[i] = v[i ^ (N / 2)];
        if (pair) {
#pragma unroll
            for (int i = 0; i < N; i++)
                other[i] = __shfl_xor_sync(0xffffffffu, v[i], 1);
        }
#pragma unroll
        for (int i = 0; i < N; i++)
            v[i] = __fadd_rn(__fmul_rn(v[i], c[i]), __fmul_rn(other[i], sn[i]));
    }
    if (a->finish.qk_norm == TL_QKNORM_HEAD_AFTER_ROPE && !is_v)
        tlc_head_norm_held<D>(v, NULL, 1.1920929e-07f);
    __half *to = (is_q ? s->q[task] : is_v ? s->v_new : s->k_new) + lane;
#pragma unroll
    for (int i = 0; i < N; i++)
        to[32 * i] = tlc_half(v[i]);
}

/* The row's k and v, to their page; by the first two warps, when nobody waits for them any more. */
template <int D>
__device__ static __forceinline__ void solo_keep(const struct solo_args *a, struct solo_shared<D> *s, int slot)
{
    const struct solo_pages *p = &s->pages;
    int lane = threadIdx.x & 31, warp = (int)threadIdx.x / 32;
    __half *to = tlc_page_k<__half>(&a->step, p->pages[(int64_t)slot * p->stride + p->pos / TLC_PAGE], p->kv, D) +
                 p->pos % TLC_PAGE * D + (warp ? (int64_t)a->n_kv_heads * TLC_PAGE * D : 0);
    if (lane < D / 4)
        *(uint2 *)(to + 4 * lane) = solo_load8(shared_at((warp ? s->v_new : s->k_new) + 4 * lane));
}

/* ---- the term of a page, by a group of four warps ---- */

/* Each has the scores of 16 keys, then a quarter of the columns of the values. What a warp has of a page before the heads are there:
 * where its keys are, and the values. */
template <int D> struct solo_page {
    int block, own; /* own: the row's own key's place in it, whose later ones are not there; TLC_PAGE in other pages */
    uint32_t k_at, v_at[4], v[D / 64][4][4];
};

/* k, v: where it is, rows of D + 8. */
template <int D>
__device__ static __forceinline__ void solo_ready(struct solo_shared<D> *s, struct solo_page<D> *page, int block,
                                                  uint32_t k, uint32_t v)
{
    enum { PITCH = D + 8, MINE = D / SOLO_GROUP };
    int w = (int)threadIdx.x / 32 % SOLO_GROUP, lane = threadIdx.x & 31;
    int row = w * 16 + (lane & 15), col = (lane >> 4) * 8, pos = s->pages.pos;
    page->block = block;
    page->own = block == pos / TLC_PAGE ? pos % TLC_PAGE : TLC_PAGE;
    page->k_at = row == page->own ? shared_at(s->k_new + col) : k + (uint32_t)(row * PITCH + col) * 2;
    col = w * MINE + (lane >> 3 & 1) * 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        row = i * 16 + (lane >> 4) * 8 + (lane & 7);
        page->v_at[i] = row < page->own    ? v + (uint32_t)(row * PITCH + col) * 2
                        : row == page->own ? shared_at(s->v_new + col)
                                           : shared_at(s->zero); /* no NaN: it is multiplied by 0 */
#pragma unroll
        for (int b = 0; b < MINE / 16; b++)
            tlc_ldmatrix_t(page->v[b][i], page->v_at[i] + b * 32);
    }
}

template <int D>
__device__ static __forceinline__ void solo_term(const struct solo_args *a, struct solo_shared<D> *s,
                                                 struct solo_page<D> *page)
{
    enum { PITCH = D + 8, MINE = D / SOLO_GROUP };
    const struct solo_pages *p = &s->pages;
    int warp = (int)threadIdx.x / 32, group = warp / SOLO_GROUP, w = warp % SOLO_GROUP, lane = threadIdx.x & 31;
    int g = lane / 4, t2 = lane % 4 * 2, pair = (page->block - p->block0) * ((a->per_row + 1) / 2) + lane % 4;
    int key = page->block * TLC_PAGE + w * 16 + g;
    float c[4] = {}, all[4][4], m[2], acc[MINE / 16][4] = {}, sum[4] = {};
    uint32_t weight[4][2], base = shared_at(s), n_seen = (uint32_t)(p->pos - p->lo);
    uint32_t q_at = tlc_at_k(shared_at(s->q), lane, PITCH), scores = shared_at(&s->scores[group][0][lane]);
    bool whole = p->shares == SOLO_CLUSTER; /* a warp's columns go to two blocks, else to one */
    uint32_t far = solo_far(base, p->first + (whole ? 2 * w : w)) - base, count = far + shared_at(&s->inbox);
    uint32_t next = whole ? solo_far(base, p->first + 2 * w + 1) - base - far : 0;
#pragma unroll
    for (int kk = 0; kk < D / 32; kk++) {
        uint32_t q[4], ka[2][4];
        tlc_ldmatrix(q, q_at + kk * 64);
        tlc_ldmatrix(ka[0], page->k_at + kk * 64);
        tlc_ldmatrix(ka[1], page->k_at + kk * 64 + 32);
        tlc_mma_f16(c, ka[0], q[0], q[1]);
        tlc_mma_f16(c, ka[1], q[2], q[3]);
    }
    if (page->own < TLC_PAGE) { /* what came with the heads */
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t tile = (uint32_t)page->own / 16;
            solo_opaque(&tile); /* or the compiler would index registers with it: they would lie in memory */
            if (i != tile)
                continue;
#pragma unroll
            for (int b = 0; b < MINE / 16; b++)
                tlc_ldmatrix_t(page->v[b][i], page->v_at[i] + b * 32);
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float x = __fmul_rn(c[j], a->scale);
        c[j] = (uint32_t)(key + j / 2 * 8 - p->lo) <= n_seen ? x : tlc_minus_inf();
    }
    solo_store16(scores + (uint32_t)w * 512, c);
    solo_group_barrier(group);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 x = solo_load16(scores + (uint32_t)i * 512);
        all[i][0] = __uint_as_float(x.x), all[i][1] = __uint_as_float(x.y);
        all[i][2] = __uint_as_float(x.z), all[i][3] = __uint_as_float(x.w);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) { /* queries t2 + j: over the keys of this lane, then over g */
        m[j] = fmaxf(fmaxf(fmaxf(all[0][j], all[0][2 + j]), fmaxf(all[1][j], all[1][2 + j])),
                     fmaxf(fmaxf(all[2][j], all[2][2 + j]), fmaxf(all[3][j], all[3][2 + j])));
        m[j] = fmaxf(m[j], __shfl_xor_sync(0xffffffffu, m[j], 4));
        m[j] = fmaxf(m[j], __shfl_xor_sync(0xffffffffu, m[j], 8));
        m[j] = fmaxf(m[j], __shfl_xor_sync(0xffffffffu, m[j], 16));
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        weight[i / 2][i % 2] = tlc_transpose(
            tlc_pack_half(tlc_weight(all[i / 2][i % 2 * 2], m[0]), tlc_weight(all[i / 2][i % 2 * 2 + 1], m[1])));
    const uint32_t ones[4] = {TLC_ONES, TLC_ONES, TLC_ONES, TLC_ONES};
#pragma unroll
    for (int i = 0; i < 4; i++) { /* chains side by side */
        tlc_mma_f16(sum, ones, weight[i][0], weight[i][1]);
#pragma unroll
        for (int b = 0; b < MINE / 16; b++)
            tlc_mma_f16(acc[b], page->v[b][i], weight[i][0], weight[i][1]);
    }
    if (t2 >= a->per_row)
        return;
    uint32_t to = far + shared_at(solo_acc<D>(s) + (pair * p->columns + g) * 2),
             half = whole ? next : MINE / 2 * 8; /* from the first half of the columns to the second */
#pragma unroll
    for (int i = 0; i < MINE / 8; i++) {
        bool second = i >= MINE / 16;
        tlc_far_put(to + (second ? half : 0) + (uint32_t)(i % (MINE / 16) * 64), second ? count + next : count,
                    make_float2(acc[i / 2][i % 2 * 2], acc[i / 2][i % 2 * 2 + 1]));
    }
    if (SOLO_GROUP * g < p->shares) { /* every g has the same; warp w sends to blocks w and w + 4 */
        far = solo_far(base, p->first + w + SOLO_GROUP * g) - base;
        tlc_far_put(far + shared_at(s->ml + pair), far + shared_at(&s->inbox), make_float4(m[0], sum[0], m[1], sum[1]));
    }
}
static_assert(SOLO_SHARES == SOLO_GROUP && SOLO_CLUSTER == 2 * SOLO_GROUP, "whose columns a warp has");

/* ---- the fold: a lane per query and column of this block ---- */

template <int D>
__device__ static __forceinline__ void solo_fold(const struct solo_args *a, struct solo_shared<D> *s,
                                                 const struct solo_pages *p, uint64_t *att, int round, uint32_t epoch)
{
    enum { FEWER = D == 128 ? 4 : 3, MORE = FEWER + 1 }; /* log2 of the columns of a block */
    int t = (int)(threadIdx.x ^ (SOLO_SUMS - 32));       /* the last warp has nothing else to do, often */
    int bits = p->shares == SOLO_CLUSTER ? FEWER : MORE, n_q = a->per_row, n_pairs = (n_q + 1) / 2;
    int n_t = n_pairs << (bits + 1), n = p->block1 - p->block0;
    bool waits = true;
    do {
        int query = (t >> (bits + 1)) * 2 + (t & 1), col = t >> 1 & ((1 << bits) - 1);
        uint32_t ml = shared_at((float2 *)s->ml + query), acc = shared_at(solo_acc<D>(s) + t);
        uint64_t *to = att + solo_place((p->kv * n_q + query) * D + (p->rank << bits) + col);
        float top = tlc_minus_inf(), sum = 0.0f, o = 0.0f;
        if (waits)
            tlc_inbox_wait(&s->inbox, round);
        waits = false;
        if (t >= n_t)
            break;
#pragma unroll 4
        for (int j = 0; j < n; j++, ml += (uint32_t)n_pairs * 16, acc += (uint32_t)n_t * 4) {
            float e0, e1, x = __int_as_float(solo_load1(acc));
            uint2 word = solo_load8(ml);
            tlc_fold(&top, &sum, __uint_as_float(word.x), __uint_as_float(word.y), &e0, &e1);
            o = tlc_fold_o(o, x, e0, e1);
        }
        o = tlc_fold_end(o, __fdiv_rn(1.0f, sum));
        if (query < n_q)
            solo_publish(to, o, epoch);
        t += SOLO_SUMS;
    } while (t < n_t);
}

/* ---- the phase, by all sum warps ---- */

/* at: the ring's place of this block's first page. Each page is two slots: K, V. epoch: of qkv's values. */
template <int D, bool F, int R>
__device__ static __forceinline__ void solo_attention(const struct solo_args *a, const struct solo_brief *l,
                                                      struct solo_shared<D> *s, uint32_t ring, int slot,
                                                      struct solo_at *at, int round, uint32_t epoch)
{
    enum { GROUPS = SOLO_WARPS / SOLO_GROUP };
    const struct solo_pages *p = &s->pages;
    int warp = (int)threadIdx.x / 32, group = warp / SOLO_GROUP, lane = threadIdx.x & 31, n_q = a->per_row;
    int mine = p->mine;
    const uint64_t *qkv = a->board.qkv + (R > 1 ? p->row * a->steps[STEP_QKV] : 0);
    uint64_t *att = a->board.att + (R > 1 ? p->row * a->steps[STEP_ATT] : 0);
    struct solo_at k = *at;
    if (threadIdx.x == 0)
        tlc_inbox_expect(&s->inbox, p->bytes);
    solo_next<F>(&k, 2 * group);
#pragma unroll 1
    for (int i = group;; i += GROUPS, solo_next<F>(&k, 2 * GROUPS)) {
        struct solo_page<D> page;
        struct solo_at v = k;
        solo_next<F>(&v);
        if (i < mine) {
            solo_wait_slot<D, F>(s, k);
            solo_wait_slot<D, F>(s, v);
            solo_ready<D>(s, &page, p->block0 + p->rank + i * p->shares, ring + (uint32_t)k.slot * SOLO_SLOT,
                          ring + (uint32_t)v.slot * SOLO_SLOT);
        } else {
            page = {}; /* or it would be kept through the whole kernel */
        }
        if (i == group) {
            int n = mine ? n_q + (p->home ? 2 : 0) : 0;
            for (int task = SOLO_WARPS - 1 - warp; task < n; task += SOLO_WARPS)
                solo_head<D>(a, l, s, qkv, task, epoch);
            solo_barrier();
        } else if (i < mine) {
            solo_group_barrier(group); /* all have read the scores before */
        }
        if (i >= mine)
            break;
        solo_term<D>(a, s, &page);
        if (F)
            solo_group_barrier(group);
        else
            __syncwarp();
        if (lane < 2 && (!F || warp % SOLO_GROUP == 0))
            solo_arrive_all<F ? 2 : SOLO_WARPS / SOLO_GROUP>(shared_at(s->empty + (lane ? v.slot : k.slot)));
    }
    solo_next<F>(at, 2 * mine);
    solo_fold<D>(a, s, p, att, round, epoch + 1);
    if (p->home && warp < 2)
        solo_keep<D>(a, s, slot);
}

#endif
