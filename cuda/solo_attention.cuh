/* cuda/solo_attention.cuh - attention of the one row, by the blocks of a cluster per kv head. The operations, and their order, are
 * those of attention_row.cu. */
#ifndef TLC_SOLO_ATTENTION_CUH
#define TLC_SOLO_ATTENTION_CUH

#include "attention_heads.cuh"
#include "solo.cuh"

/* A group of sum warps. */
__device__ static __forceinline__ void solo_group_barrier(int group)
{
    asm volatile("bar.sync %0, %1;" ::"r"(3 + group), "n"(32 * SOLO_GROUP) : "memory");
}

/* ---- the heads of the row: by one warp each, value lane + 32 i in v[i] ---- */

/* task counts the n_q query heads of the kv head, then k, then v. */
template <int D>
__device__ static __forceinline__ void solo_head(const struct solo_args *a, const struct solo_brief *l,
                                                 struct solo_shared<D> *s, const struct solo_pages *p, int task,
                                                 uint32_t epoch)
{
    enum { N = D / 32 };
    int lane = threadIdx.x & 31, n_q = a->per_row;
    bool is_q = task<n_q, is_v = task> n_q, pair = a->finish.rope == TL_ROPE_PAIR;
    int number = is_q ? p->kv * n_q + task : a->n_heads + (is_v ? a->n_kv_heads : 0) + p->kv, at = number * D;
    const float *rope = a->rope + (int64_t)p->pos * D;
    bool has_b0 = a->has_qkv_bias, has_b1 = a->has_qk_bias && !is_v,
         has_norm = a->finish.qk_norm == TL_QKNORM_HEAD && !is_v;
    bool has_rope = a->finish.rope != TL_ROPE_NONE && !is_v;
    float v[N], b0[N], b1[N], w[N], c[N], sn[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        int j = lane + 32 * i, angle = pair ? j / 2 : j < D / 2 ? j : j - D / 2;
        b0[i] = has_b0 ? __ldg(l->qkv_bias + at + j) : 0.0f;
        b1[i] = has_b1 ? __ldg(l->qk_bias + at + j) : 0.0f;
        w[i] = has_norm ? __ldg((is_q ? l->q_norm : l->k_norm) + j) : 0.0f;
        c[i] = has_rope ? __ldg(rope + angle) : 0.0f;
        sn[i] = has_rope ? __ldg(rope + D / 2 + angle) : 0.0f;
    }
    __half *page = NULL;
    if (!is_q)
        page = tlc_page_k<__half>(&a->step, p->pages[p->pos / TLC_PAGE], p->kv, D) + p->pos % TLC_PAGE * D +
               (is_v ? (int64_t)a->n_kv_heads * TLC_PAGE * D : 0);
    bool there;
    int looks = 0;
    do {
        uint64_t word[N];
        there = true;
#pragma unroll
        for (int i = 0; i < N; i++)
            word[i] = solo_look(a->board.qkv + at + lane + 32 * i);
#pragma unroll
        for (int i = 0; i < N; i++) {
            there = there && (uint32_t)word[i] == epoch;
            v[i] = solo_value(word[i]);
        }
        solo_patience(&looks);
    } while (!__all_sync(0xffffffffu, there));
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
            other[i] = pair ? __shfl_xor_sync(0xffffffffu, v[i], 1) : v[i ^ (N / 2)];
#pragma unroll
        for (int i = 0; i < N; i++) {
            bool second = pair ? lane & 1 : i >= N / 2;
            v[i] = second ? __fadd_rn(__fmul_rn(v[i], c[i]), __fmul_rn(other[i], sn[i]))
                          : __fsub_rn(__fmul_rn(v[i], c[i]), __fmul_rn(other[i], sn[i]));
        }
    }
    if (a->finish.qk_norm == TL_QKNORM_HEAD_AFTER_ROPE && !is_v)
        tlc_head_norm_held<D>(v, NULL, 1.1920929e-07f);
    __half *to = is_q ? s->q[task] : is_v ? s->v_new : s->k_new;
#pragma unroll
    for (int i = 0; i < N; i++) {
        __half h = tlc_half(v[i]);
        to[lane + 32 * i] = h;
        if (page)
            page[lane + 32 * i] = h;
    }
}

/* ---- the term of a page, by the two warps of a pair ---- */

/* By a group of four warps. Each has the scores of 16 keys, then a quarter of the columns of the values.
 * k, v: where the page is, rows of D + 8. own: the row's own key's place in the page, or -1. */
template <int D>
__device__ static __forceinline__ void solo_term(const struct solo_args *a, struct solo_shared<D> *s,
                                                 const struct solo_pages *p, const __half *k, const __half *v,
                                                 int block, int own)
{
    enum { PITCH = D + 8, SHARE = D / SOLO_SHARES, MINE = D / SOLO_GROUP };
    int warp = (int)threadIdx.x / 32, group = warp / SOLO_GROUP, w = warp % SOLO_GROUP, lane = threadIdx.x & 31;
    int g = lane / 4, t2 = lane % 4 * 2, n_q = a->per_row, term = block - p->block0;
    float all[4][4], m[2];
    uint32_t weight[4][2], va[MINE / 16][4][4];
    {
        int row = w * 16 + (lane & 15), col = (lane >> 4) * 8;
        unsigned q_at = tlc_at_k(tlc_shared_address(s->q), lane, PITCH);
        unsigned k_at = tlc_shared_address(row == own ? s->k_new + col : k + row * PITCH + col);
        float c[4] = {};
#pragma unroll
        for (int kk = 0; kk < D / 32; kk++) {
            uint32_t q[4], ka[2][4];
            tlc_ldmatrix(q, q_at + kk * 64);
            tlc_ldmatrix(ka[0], k_at + kk * 64);
            tlc_ldmatrix(ka[1], k_at + kk * 64 + 32);
            tlc_mma_f16(c, ka[0], q[0], q[1]);
            tlc_mma_f16(c, ka[1], q[2], q[3]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int key = block * TLC_PAGE + w * 16 + g + j / 2 * 8;
            c[j] = key >= p->lo && key <= p->pos ? __fmul_rn(c[j], a->scale) : tlc_minus_inf();
        }
        s->scores[group][w][lane] = make_float4(c[0], c[1], c[2], c[3]);
    }
#pragma unroll
    for (int i = 0; i < MINE / 4; i++) {
        int row = i % 4 * 16 + (lane >> 4) * 8 + (lane & 7), col = w * MINE + i / 4 * 16 + (lane >> 3 & 1) * 8;
        tlc_ldmatrix_t(va[i / 4][i % 4], tlc_shared_address(row == own ? s->v_new + col : v + row * PITCH + col));
    }
    solo_group_barrier(group);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float4 x = s->scores[group][i][lane];
        all[i][0] = x.x, all[i][1] = x.y, all[i][2] = x.z, all[i][3] = x.w;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) { /* queries t2 + j: over the keys of this lane, then over g */
        m[j] = fmaxf(all[0][j], all[0][2 + j]);
#pragma unroll
        for (int i = 1; i < 4; i++)
            m[j] = fmaxf(m[j], fmaxf(all[i][j], all[i][2 + j]));
        m[j] = fmaxf(m[j], __shfl_xor_sync(0xffffffffu, m[j], 4));
        m[j] = fmaxf(m[j], __shfl_xor_sync(0xffffffffu, m[j], 8));
        m[j] = fmaxf(m[j], __shfl_xor_sync(0xffffffffu, m[j], 16));
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        weight[i / 2][i % 2] = tlc_transpose(
            tlc_pack_half(tlc_weight(all[i / 2][i % 2 * 2], m[0]), tlc_weight(all[i / 2][i % 2 * 2 + 1], m[1])));
    uint32_t base = shared_at(s), far = solo_far(base, p->first + w * MINE / SHARE) - base,
             count = far + shared_at(&s->inbox);
    uint32_t to = far + shared_at(solo_acc<D>(s) + (term * n_q + t2) * SHARE + w * MINE % SHARE + g);
#pragma unroll
    for (int b = 0; b < MINE / 16; b++, to += 16 * sizeof(float)) {
        float acc[4] = {};
#pragma unroll
        for (int i = 0; i < 4; i++)
            tlc_mma_f16(acc, va[b][i], weight[i][0], weight[i][1]);
        if (t2 < n_q) {
            solo_put(to, __float_as_uint(acc[0]), count);
            solo_put(to + 8 * sizeof(float), __float_as_uint(acc[2]), count);
        }
        if (t2 + 1 < n_q) {
            solo_put(to + SHARE * sizeof(float), __float_as_uint(acc[1]), count);
            solo_put(to + (SHARE + 8) * sizeof(float), __float_as_uint(acc[3]), count);
        }
    }
    if (w == SOLO_GROUP - 1) {
        const uint32_t ones[4] = {TLC_ONES, TLC_ONES, TLC_ONES, TLC_ONES};
        float l[4] = {};
#pragma unroll
        for (int i = 0; i < 4; i++)
            tlc_mma_f16(l, ones, weight[i][0], weight[i][1]);
        for (int j = 0; j < 2; j++) /* every g has the same; g sends to block g */
            if (g < SOLO_SHARES && t2 + j < n_q)
                tlc_far_store(&s->ml[term * n_q + t2 + j], &s->inbox, p->first + g, make_float2(m[j], l[j]));
    }
}

/* ---- the fold: a warp per query and 32 columns of this block, a lane per column ---- */

template <int D>
__device__ static __forceinline__ void solo_fold(const struct solo_args *a, struct solo_shared<D> *s,
                                                 const struct solo_pages *p, int task, uint32_t epoch)
{
    enum { SHARE = D / SOLO_SHARES };
    int lane = threadIdx.x & 31, n_q = a->per_row, n = p->block1 - p->block0;
    int parts = (SHARE + 31) / 32, query = task / parts, col = task % parts * 32 + lane % SHARE;
    float top_before = tlc_minus_inf(), sum = 0.0f, o = 0.0f;
    for (int first = 0; first < n; first += 32) {
        float2 ml = first + lane < n ? s->ml[(first + lane) * n_q + query] : make_float2(tlc_minus_inf(), 0.0f);
        float top = ml.x, before, unused = 0.0f, e0, e1;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) { /* the largest of any set is exact: running maxima can be had in any order */
            float y = __shfl_up_sync(0xffffffffu, top, d);
            top = lane >= d ? fmaxf(top, y) : top;
        }
        before = __shfl_up_sync(0xffffffffu, top, 1);
        before = lane > 0 ? fmaxf(before, top_before) : top_before;
        tlc_fold(&before, &unused, ml.x, 0.0f, &e0, &e1);
#pragma unroll 4
        for (int j = 0; j < min(n - first, 32); j++) {
            float f0 = __shfl_sync(0xffffffffu, e0, j), f1 = __shfl_sync(0xffffffffu, e1, j),
                  l = __shfl_sync(0xffffffffu, ml.y, j);
            float acc = solo_acc<D>(s)[((first + j) * n_q + query) * SHARE + col];
            sum = __fmaf_rn(l, f1, __fmul_rn(sum, f0));
            o = tlc_fold_o(o, acc, f0, f1);
        }
        top_before = fmaxf(top_before, __shfl_sync(0xffffffffu, top, 31));
    }
    if (lane < SHARE)
        solo_publish(a->board.att + solo_place((p->kv * n_q + query) * D + p->rank * SHARE + col),
                     tlc_fold_end(o, __fdiv_rn(1.0f, sum)), epoch);
}

/* ---- the phase, by all sum warps ---- */

/* Values that are not there yet must not be NaN: they are multiplied by 0. By the group whose page it is. */
template <int D> __device__ static __forceinline__ void solo_clear(uint8_t *page_v, int own)
{
    enum { CHUNKS = (D + 8) / 8, THREADS = 32 * SOLO_GROUP };
    for (int c = own * CHUNKS + (int)threadIdx.x % THREADS; c < TLC_PAGE * CHUNKS; c += THREADS)
        ((uint4 *)page_v)[c] = make_uint4(0, 0, 0, 0);
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* before the slot is copied to again */
#endif
    solo_group_barrier((int)threadIdx.x / THREADS);
}

/* at: the ring's place of this block's first page. Each page is two slots: K, V. */
template <int D, bool F>
__device__ static __forceinline__ void
solo_attention(const struct solo_args *a, const struct solo_brief *l, struct solo_shared<D> *s, uint8_t *ring,
               const struct solo_pages *p, struct solo_at *at, int round, uint32_t qkv_epoch, uint32_t epoch)
{
    enum { GROUPS = SOLO_WARPS / SOLO_GROUP };
    int warp = (int)threadIdx.x / 32, group = warp / SOLO_GROUP, lane = threadIdx.x & 31, n_q = a->per_row;
    int own_block = p->pos / TLC_PAGE, own = p->pos % TLC_PAGE, n = p->block1 - p->block0;
    int own_i = (own_block - p->block0) / SOLO_SHARES;
    bool home = (own_block - p->block0) % SOLO_SHARES == p->rank, early = 2 * own_i + 2 <= SOLO_SLOTS;
    if (threadIdx.x == 0)
        tlc_inbox_expect(&s->inbox, n * n_q * (D / SOLO_SHARES * 4 + 8));
    if (home && early && group == own_i % GROUPS) { /* the ring has room for it before the others are read */
        struct solo_at v = *at;
        for (int i = 0; i < 2 * own_i + 1; i++)
            solo_next<F>(&v);
        solo_wait_slot<D, F>(s, v);
        solo_clear<D>(ring + v.slot * SOLO_SLOT, own);
    }
    for (int task = SOLO_WARPS - 1 - warp; task < n_q + (home ? 2 : 0); task += SOLO_WARPS)
        solo_head<D>(a, l, s, p, task, qkv_epoch);
    for (int block = p->block0 + p->rank, i = 0; i == 0 || block < p->block1; block += SOLO_SHARES * GROUPS, i++) {
        struct solo_at k = *at, v;
        int mine = block + group * SOLO_SHARES, left = (p->block1 - block + SOLO_SHARES - 1) / SOLO_SHARES;
        solo_next<F>(&k, 2 * group);
        v = k;
        solo_next<F>(&v);
        if (mine < p->block1 && warp % SOLO_GROUP < 2)
            solo_wait_slot<D, F>(s, warp % SOLO_GROUP ? v : k);
        solo_barrier(); /* heads and pages are there, and scores may be used again */
        if (mine < p->block1) {
            uint8_t *page_k = ring + k.slot * SOLO_SLOT, *page_v = ring + v.slot * SOLO_SLOT;
            if (mine == own_block && !early)
                solo_clear<D>(page_v, own);
            solo_term<D>(a, s, p, (const __half *)page_k, (const __half *)page_v, mine, mine == own_block ? own : -1);
            solo_group_barrier(group);
            if (warp % SOLO_GROUP == 0 && lane < 2)
                solo_arrive_all<F ? 1 : SOLO_WARPS>(shared_at(s->empty + (lane ? v.slot : k.slot)));
        }
        if (left > 0)
            solo_next<F>(at, 2 * min(left, (int)GROUPS));
    }
    tlc_inbox_wait(&s->inbox, round);
    for (int task = warp; task < n_q * ((D / SOLO_SHARES + 31) / 32); task += SOLO_WARPS)
        solo_fold<D>(a, s, p, task, epoch);
}

#endif
