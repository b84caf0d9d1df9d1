/* Attention for few queries: a tile of 16 queries of one kv head, its pages dealt out to the blocks of a cluster. Its rows are of
 * one sequence, or, apart, of sequences that have their first pages in common.
 *
 * A block takes two pages of each round, side by side: 8 warps have 8 keys each of a page for the scores, and d / 8 columns
 * each for the values. Every block folds some of the queries, over the terms of all pages in ascending order; terms are
 * sent to it from registers, by stores that its barrier counts. (A barrier of the cluster would wait for all that a thread
 * has ever stored.) The later pages of a row apart are read by the block that folds its queries, once the common ones are folded.
 *
 * In a fused launch the heads are finished here: a warp has one query, and in a block that has a page with rows of the step
 * itself also the key and the value of one of these rows, of which there are 16 at most. So all that is read of pages is of
 * earlier steps, and that of common ones on its way before tlc_wait(). */
#include "attention_heads.cuh"

#include <limits.h>

#define SIDE_LOG2   1
#define SIDE        (1 << SIDE_LOG2) /* pages side by side */
#define TILE_Q_LOG2 4
#define THREADS     (SIDE * 256)
#define WARPS       (THREADS / 32)
#define LD_P        (TLC_PAGE + 8)
#define SMALL       101376 /* bytes of shared memory of a block on the smallest cards */

static_assert(WARPS == TLC_TILE_Q && WARPS == TLC_NEW_ROWS && TLC_TILE_Q == 1 << TILE_Q_LOG2,
              "a warp has one query and one row");

/* What a block needs to know of its item. */
struct work {
    struct tlc_attn_item x;
    const struct tlc_attn_entry *entries;
    const int32_t *pages;
    int kv, head0, heads; /* q heads head0 .. head0 + heads - 1 of each row */
    int n_q, rank, rounds;
    int step; /* pages of a round of the cluster */
    int keys; /* the item sees keys below */
    int own;  /* keys own .. keys - 1 are in k_new, not in pages; INT_MAX: none are */
    int row,
        n_new; /* rows whose keys are in k_new: of the run, or, apart, those from number `row` on whose queries are folded here */
    bool home; /* this block needs them */
};

struct query {
    int lo, pos; /* first and last key that it sees */
    int to;      /* place * heads + head */
    int pages;   /* where the page table of its sequence is */
};

/* A page, and the only row of the item that has it, or -1. */
struct spot {
    int block, row;
};

template <int D> struct shared_data {
    __half k[SIDE][TLC_PAGE][D + 8], v[SIDE][TLC_PAGE][D + 8]; /* k[side] takes the weights once the scores are there */
    __half q[TLC_TILE_Q][D + 8];
    __half k_new[TLC_NEW_ROWS][D + 8], v_new[TLC_NEW_ROWS][D + 8]; /* rows of the step itself */
    /* What other blocks send, [terms of a round][queries that this block folds]: */
    float acc[SIDE * TLC_TILE_Q][D + 4]; /* columns in the order of column() */
    float2 ml[SIDE * TLC_TILE_Q];
    float max[SIDE][8][TLC_TILE_Q];
    struct query query[TLC_TILE_Q];
    float work[WARPS][D % 64 ? D : 1];
    struct work item;
    uint64_t inbox;
};

static __device__ __forceinline__ int lane_id() { return (int)threadIdx.x & 31; }
static __device__ __forceinline__ int warp_id() { return (int)threadIdx.x / 32; }
static __device__ __forceinline__ int side_id() { return (int)threadIdx.x / 256; }
static __device__ __forceinline__ void meet_side()
{
    asm volatile("bar.sync %0, 256;" ::"r"(1 + side_id()) : "memory");
}
template <int D> static __device__ __forceinline__ struct shared_data<D> *shared_of() {
    return (struct shared_data<D> *)tlc_shared();
}

/* Query q is folded by block q / n of the cluster, as its number q % n. */
static __device__ __forceinline__ int
queries_of_block(const struct tlc_attn_args *a)
{
    return TLC_TILE_Q >> a->cluster_bits;
}

/* Queries that this block folds; none where there are fewer. */
static __device__ __forceinline__ int queries_here(const struct tlc_attn_args *a, const struct work *w)
{
    int n = queries_of_block(a);
    return max(0, min(n, w->n_q - w->rank * n));
}

static __device__ __forceinline__ struct work work_of(const struct tlc_attn_args *a, int item, int rank)
{
    struct work w;
    int tile = (int)blockIdx.y % a->head_tiles, last;
    w.x = tlc_plan_items(a->plan)[a->plan->first[TLC_SEG_TILE] + item];
    w.entries = tlc_plan_entries(a->plan) + w.x.entry0;
    w.pages = tlc_page_table(&a->step, w.x.seq, a->slot);
    w.kv = (int)blockIdx.y / a->head_tiles;
    w.head0 = w.kv * a->per_row + tile * a->heads;
    w.heads = min(a->heads, a->per_row - tile * a->heads);
    w.n_q = w.x.n * w.heads;
    w.rank = rank;
    w.step = SIDE * a->cluster;
    w.rounds = ((w.x.block1 - w.x.block0 - 1) >> (a->cluster_bits + SIDE_LOG2)) + 1;
    last = w.entries[w.x.n - 1].pos;
    w.keys = min(last + 1, w.x.block1 * TLC_PAGE);
    w.own = a->fused && !w.x.apart ? w.x.own : INT_MAX;
    w.row = 0;
    w.n_new = last + 1 - w.x.own;
    w.home = false;
    if (w.x.apart) {
        int q = rank * queries_of_block(a), n = queries_here(a, &w);
        w.row = q / w.heads;
        w.n_new = n > 0 ? (q + n - 1) / w.heads + 1 - w.row : 0;
        w.home = a->fused;
    }
    for (int b = max(w.own / TLC_PAGE, w.x.block0); b < w.x.block1; b++)
        w.home |= ((b - w.x.block0) & (a->cluster - 1)) == rank;
    return w;
}

static_assert(sizeof(struct shared_data<128>) <= SMALL, "heads of the usual width go everywhere");

/* ---- pages ---- */

/* Keys of a page from `keys` on are not seen; those from `own` on lie in k_new instead, from its row `at` on. */
struct sight {
    int keys, own, at;
};
template <int D>
static __device__ __forceinline__ struct sight sight_of(const struct tlc_attn_args *a, const struct work *w, int row)
{
    if (row < 0)
        return {w->keys, w->own, 0};
    int pos = shared_of<D>()->query[row * w->heads].pos;
    return {pos + 1, a->fused ? pos : INT_MAX, row - w->row};
}
static __device__ __forceinline__ bool is_own(struct sight see, int key) { return key >= see.own && key < see.keys; }

/* K and V of a page for this side; keys that are not seen become zeros, those in k_new are left alone. */
template <int D>
static __device__ __forceinline__ void fetch(const struct tlc_attn_args *a, const struct work *w, struct spot at)
{
    struct shared_data<D> *s = shared_of<D>();
    struct sight see = sight_of<D>(a, w, at.row);
    const int32_t *pages = at.row < 0 ? w->pages : a->step.pages + s->query[at.row * w->heads].pages;
    const __half *from = tlc_page_k<const __half>(&a->step, pages[at.block], w->kv, D);
    int64_t v_at = (int64_t)a->n_kv_heads * TLC_PAGE * D;
    unsigned k = tlc_shared_address(s->k[side_id()]), v = tlc_shared_address(s->v[side_id()]);
#pragma unroll 2
    for (int c = (int)threadIdx.x & 255; c < TLC_PAGE * D / 8; c += 256) {
        int row = c / (D / 8), key = at.block * TLC_PAGE + row;
        unsigned to = (unsigned)(row * (D + 8) + c % (D / 8) * 8) * 2;
        bool valid = key >= w->x.lo && key < see.keys;
        if (is_own(see, key))
            continue;
        tlc_copy16(k + to, from + c * 8, valid);
        tlc_copy16(v + to, from + v_at + c * 8, valid);
    }
    tlc_copy_commit();
}

/* Not all keys that are read of this page of all rows are of earlier steps. */
static __device__ __forceinline__ bool late(const struct work *w, int block)
{
    return min(min((block + 1) * TLC_PAGE, w->keys), w->own) > w->x.safe;
}

/* How many pages of single rows this block has, and which one is number i; once the heads are ready. */
template <int D> static __device__ __forceinline__ int spots_apart(const struct work *w)
{
    int n = 0;
    for (int row = w->row; row < w->row + w->n_new; row++)
        n += shared_of<D>()->query[row * w->heads].pos / TLC_PAGE + 1 - w->x.block1;
    return n;
}
template <int D> static __device__ __forceinline__ struct spot spot_apart(const struct work *w, int i)
{
    struct spot at = {w->x.block1 + i, w->row};
    for (int pos; at.block > (pos = shared_of<D>()->query[at.row * w->heads].pos) / TLC_PAGE; at.row++)
        at.block -= pos / TLC_PAGE + 1 - w->x.block1;
    return at;
}

/* ---- heads ---- */

/* What the finish of a q or k head reads besides the product, but for biases. */
template <int D> struct tables {
    float w[D / 32], c[D / 32], s[D / 32];
};
template <int D>
static __device__ __forceinline__ void read_tables(struct tables<D> *t, const struct tlc_attn_args *a,
                                                   const float *norm, int pos)
{
    bool some = a->fused && a->finish.qk_norm == TL_QKNORM_HEAD;
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        t->w[i] = some ? norm[lane_id() + 32 * i] : 0.0f;
    tlc_head_angles<D>(a, pos, t->c, t->s);
}

template <int D>
static __device__ __forceinline__ void read_head(float *v, const struct tlc_attn_args *a, int place, int number)
{
    const float *from = a->qkv + place * a->ld + number * D;
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        v[i] = from[lane_id() + 32 * i];
}

/* page: NULL, or where it is to be stored besides `to`. */
template <int D>
static __device__ __forceinline__ void finish_head(float *v, const struct tlc_attn_args *a, int number,
                                                   const struct tables<D> *t, __half *to, __half *page)
{
    struct shared_data<D> *s = shared_of<D>();
    bool turned = number < a->n_heads + a->n_kv_heads;
    float b0[D / 32], b1[D / 32];
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        b0[i] = a->fused && a->qkv_bias ? a->qkv_bias[number * D + lane_id() + 32 * i] : 0.0f;
        b1[i] = a->fused && a->qk_bias && turned ? a->qk_bias[number * D + lane_id() + 32 * i] : 0.0f;
    }
    tlc_head_finish_held<D>(a, v, turned, b0, b1, t->w, t->c, t->s, s->work[warp_id()]);
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        to[lane_id() + 32 * i] = tlc_half(v[i]);
        if (page)
            page[lane_id() + 32 * i] = tlc_half(v[i]);
    }
}

/* Query warp_id(), and key and value of row warp_id() of the step's own, with the wait for the kernels in front. */
template <int D, bool APART>
static __device__ __forceinline__ void ready_heads(const struct tlc_attn_args *a, const struct work *w)
{
    struct shared_data<D> *s = shared_of<D>();
    struct tlc_attn_entry e = w->entries[min(warp_id() / w->heads, w->x.n - 1)];
    int q_number = w->head0 + warp_id() % w->heads, k_number = a->n_heads + w->kv, v_number = k_number + a->n_kv_heads;
    bool some = warp_id() < w->n_q, more = w->home && warp_id() < w->n_new;
    int pos = more ? w->x.own + warp_id() : w->x.pos, place = w->x.place + pos - w->x.pos;
    const int32_t *pages = w->pages;
    __half *page = nullptr;
    struct tables<D> tq, tk;
    float q[D / 32], k[D / 32], v[D / 32];
    read_tables<D>(&tq, a, a->q_norm, e.pos);
    if (APART && more) {
        struct tlc_attn_entry other = w->entries[w->row + warp_id()];
        pos = other.pos;
        place = other.place;
        pages = tlc_page_table(&a->step, other.seq, a->slot);
    }
    if (more) {
        read_tables<D>(&tk, a, a->k_norm, pos);
        if (APART || pos >= w->x.pos) /* a row of this item */
            page = tlc_page_k<__half>(&a->step, pages[pos / TLC_PAGE], w->kv, D) + pos % TLC_PAGE * D;
    }
    if (lane_id() == 0)
        s->query[warp_id()] = {e.lo, e.pos, e.place * a->n_heads + q_number,
                               APART ? (int)(tlc_page_table(&a->step, e.seq, a->slot) - a->step.pages) : 0};
    if (!some)
#pragma unroll
        for (int i = 0; i < D / 32; i++)
            s->q[warp_id()][lane_id() + 32 * i] = __float2half_rn(0.0f);
    tlc_wait();
    if (some)
        read_head<D>(q, a, e.place, q_number);
    if (more) {
        read_head<D>(k, a, place, k_number);
        read_head<D>(v, a, place, v_number);
    }
    if (some)
        finish_head<D>(q, a, q_number, &tq, s->q[warp_id()], nullptr);
    if (more) {
        finish_head<D>(k, a, k_number, &tk, s->k_new[warp_id()], page);
        finish_head<D>(v, a, v_number, &tk, s->v_new[warp_id()],
                       page ? page + (int64_t)a->n_kv_heads * TLC_PAGE * D : nullptr);
    }
}

/* ---- the term of a page, by the 8 warps of a side ---- */

/* Where a query's sums of a page go. */
struct target {
    unsigned to, inbox;
};
template <int D>
static __device__ __forceinline__ struct target target_of(const struct tlc_attn_args *a, bool far, const void *first,
                                                          int bytes, int term, int q)
{
    int n = queries_of_block(a), rank = q >> (TILE_Q_LOG2 - a->cluster_bits);
    const void *to = (const uint8_t *)first + (term * n + (q & (n - 1))) * bytes;
    if (!far)
        return {tlc_shared_address(to), 0};
    return {tlc_far_at(to, rank), tlc_far_at(&shared_of<D>()->inbox, rank)};
}

static __device__ __forceinline__ void put(bool far, struct target t, int bytes, float2 v)
{
    if (far)
        tlc_far_put(t.to + (unsigned)bytes, t.inbox, v);
    else
        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(t.to + (unsigned)bytes), "f"(v.x), "f"(v.y) : "memory");
}
static __device__ __forceinline__ void put(bool far, struct target t, int bytes, float4 v)
{
    if (far)
        tlc_far_put(t.to + (unsigned)bytes, t.inbox, v);
    else
        asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(t.to + (unsigned)bytes), "f"(v.x), "f"(v.y),
                     "f"(v.z), "f"(v.w)
                     : "memory");
}

/* Column of a query's pair number c of sums: the fragments of two tiles of 8 columns lie together where there are as many. */
template <int D> static __device__ __forceinline__ int column(int c)
{
    if (D % 128)
        return 2 * c;
    return (c / 64 * 16 + (c & 1) * 8 + c % 64 / 8) * 8 + (c >> 1 & 3) * 2;
}

static __device__ __forceinline__ bool wanted(const struct tlc_attn_args *a, const struct work *w, bool far, int q)
{
    return q < w->n_q && (far || q >> (TILE_Q_LOG2 - a->cluster_bits) == w->rank);
}

/* The sums of queries lane / 4 (h 0) or 8 more (h 1) in the tiles of columns from number `tile` on. */
template <int D>
static __device__ __forceinline__ void send(bool far, struct target t, int tile, int h,
                                            const float (&acc)[D % 128 ? 1 : 2][4])
{
    int t4 = lane_id() % 4;
    if (D % 128) {
        put(far, t, (tile * 4 + t4) * 8, make_float2(acc[0][2 * h], acc[0][2 * h + 1]));
    } else {
        constexpr int B = D % 128 ? 0 : 1;
        put(far, t, ((tile / 16 * 8 + tile % 16) * 4 + t4) * 16,
            make_float4(acc[0][2 * h], acc[0][2 * h + 1], acc[B][2 * h], acc[B][2 * h + 1]));
    }
}

/* far: to the blocks that fold it; else this block folds its queries in it. */
template <int D>
static __device__ __forceinline__ void make_term(const struct tlc_attn_args *a, const struct work *w, struct spot at,
                                                 bool far, int term)
{
    enum { TILES = D % 128 ? 1 : 2 }; /* of columns, at a time */
    struct shared_data<D> *s = shared_of<D>();
    int warp = warp_id() & 7, side = side_id(), lane = lane_id(), g = lane / 4, t2 = lane % 4 * 2;
    int k_row = warp * 8 + (lane & 7), first = at.block * TLC_PAGE;
    struct sight see = sight_of<D>(a, w, at.row);
    unsigned q_at = tlc_at_a(tlc_shared_address(s->q), lane, D + 8);
    unsigned p_at = tlc_at_a(tlc_shared_address(s->k[side]), lane, LD_P), v_at[2];
    unsigned k_at =
        tlc_shared_address(is_own(see, first + k_row) ? &s->k_new[see.at + first + k_row - see.own][(lane >> 3) * 8]
                                                      : &s->k[side][k_row][(lane >> 3) * 8]);
    __half *weights = s->k[side][0];
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, m[2];
    uint32_t p[4][4];
#pragma unroll
    for (int kk = 0; kk < D / 32; kk++) {
        uint32_t b[4], q[4];
        tlc_ldmatrix(b, k_at + kk * 64);
        tlc_ldmatrix(q, q_at + kk * 64);
        tlc_mma_f16(c, q, b[0], b[1]);
        tlc_ldmatrix(q, q_at + kk * 64 + 32);
        tlc_mma_f16(c, q, b[2], b[3]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int key = first + warp * 8 + t2, lo = s->query[g + 8 * h].lo, pos = s->query[g + 8 * h].pos;
        if (at.row >= 0 && (unsigned)(g + 8 * h - at.row * w->heads) >= (unsigned)w->heads)
            pos = -1; /* another row's */
        c[2 * h] = key >= lo && key <= pos ? __fmul_rn(c[2 * h], a->scale) : tlc_minus_inf();
        c[2 * h + 1] = key + 1 >= lo && key + 1 <= pos ? __fmul_rn(c[2 * h + 1], a->scale) : tlc_minus_inf();
        m[h] = fmaxf(c[2 * h], c[2 * h + 1]);
        m[h] = fmaxf(m[h], __shfl_xor_sync(0xffffffffu, m[h], 1));
        m[h] = fmaxf(m[h], __shfl_xor_sync(0xffffffffu, m[h], 2));
        if (t2 == 0)
            s->max[side][warp][g + 8 * h] = m[h];
    }
    meet_side(); /* and all have read their keys */
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int q = g + 8 * h;
        m[h] = s->max[side][0][q];
#pragma unroll
        for (int i = 1; i < 8; i++)
            m[h] = fmaxf(m[h], s->max[side][i][q]);
        *(uint32_t *)&weights[q * LD_P + warp * 8 + t2] =
            tlc_pack_half(tlc_weight(c[2 * h], m[h]), tlc_weight(c[2 * h + 1], m[h]));
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = lane + 32 * h;
        v_at[h] =
            tlc_shared_address(is_own(see, first + row) ? s->v_new[see.at + first + row - see.own] : s->v[side][row]);
    }
    meet_side();
#pragma unroll
    for (int kk = 0; kk < 4; kk++)
        tlc_ldmatrix(p[kk], p_at + kk * 32);
    if (warp == 7) {
        float l[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int kk = 0; kk < 4; kk++)
            tlc_mma_f16(l, p[kk], TLC_ONES, TLC_ONES);
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (t2 == 0 && wanted(a, w, far, g + 8 * h))
                put(far, target_of<D>(a, far, s->ml, sizeof(s->ml[0]), term, g + 8 * h), 0,
                    make_float2(m[h], l[2 * h]));
    }
#pragma unroll
    for (int n = warp; n < D / 8; n += 8 * TILES) {
        float acc[TILES][4] = {};
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int kk = 0; kk < 2; kk++) {
                uint32_t b[4];
                tlc_ldmatrix_t(b, v_at[kk] + (n + 8 * i) * 16);
                tlc_mma_f16(acc[i], p[2 * kk], b[0], b[1]);
                tlc_mma_f16(acc[i], p[2 * kk + 1], b[2], b[3]);
            }
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (wanted(a, w, far, g + 8 * h))
                send<D>(far, target_of<D>(a, far, s->acc, sizeof(s->acc[0]), term, g + 8 * h), n, h, acc);
    }
}

/* ---- the fold: thread t has pairs t, t + THREADS, ... of the queries of its block ---- */

template <int D> struct result {
    enum { N = (TLC_TILE_Q * D / 2 + THREADS - 1) / THREADS };
    float m[N], l[N];
    float2 o[N];
};

/* Bytes that come to this block in a round of n terms */
template <int D> static __device__ __forceinline__ int sent(const struct tlc_attn_args *a, const struct work *w, int n)
{
    return n * queries_here(a, w) * (D + 2) * (int)sizeof(float);
}

static __device__ __forceinline__ int terms_of(const struct work *w, int round)
{
    return min(w->x.block1 - w->x.block0 - round * w->step, w->step);
}

template <int D> static __device__ __forceinline__ void start(struct result<D> *r)
{
#pragma unroll
    for (int i = 0; i < r->N; i++) {
        r->m[i] = tlc_minus_inf();
        r->l[i] = 0.0f;
        r->o[i] = make_float2(0.0f, 0.0f);
    }
}

/* Take in the n terms of a round, so many at a time: loads together, then the chain. */
template <int D, int AT_A_TIME>
static __device__ __forceinline__ void fold(struct result<D> *r, const struct tlc_attn_args *a, const struct work *w,
                                            int n)
{
    struct shared_data<D> *s = shared_of<D>();
    int queries = queries_of_block(a), pairs = queries_here(a, w) * (D / 2);
#pragma unroll
    for (int i = 0; i < r->N; i++) {
        int p = (int)threadIdx.x + i * THREADS, q = p / (D / 2);
        if (p >= pairs)
            continue;
#pragma unroll 1
        for (int first = 0; first < n; first += AT_A_TIME) {
            float2 ml[AT_A_TIME], acc[AT_A_TIME];
#pragma unroll
            for (int j = 0; j < AT_A_TIME; j++) { /* a term that is not there is like a page without visible keys */
                int t = min(first + j, n - 1) * queries + q;
                bool there = first + j < n;
                ml[j] = s->ml[t];
                acc[j] = *(const float2 *)&s->acc[t][p % (D / 2) * 2];
                ml[j].x = there ? ml[j].x : tlc_minus_inf();
            }
#pragma unroll
            for (int j = 0; j < AT_A_TIME; j++) {
                float e0, e1;
                tlc_fold(&r->m[i], &r->l[i], ml[j].x, ml[j].y, &e0, &e1);
                r->o[i].x = tlc_fold_o(r->o[i].x, acc[j].x, e0, e1);
                r->o[i].y = tlc_fold_o(r->o[i].y, acc[j].y, e0, e1);
            }
        }
    }
}

template <int D>
static __device__ __forceinline__ void finish(const struct result<D> *r, const struct tlc_attn_args *a,
                                              const struct work *w)
{
    struct shared_data<D> *s = shared_of<D>();
    int first = w->rank * queries_of_block(a), pairs = queries_here(a, w) * (D / 2);
#pragma unroll
    for (int i = 0; i < r->N; i++) {
        int p = (int)threadIdx.x + i * THREADS, q = first + p / (D / 2);
        if (p >= pairs)
            continue;
        float inv = __fdiv_rn(1.0f, r->l[i]);
        *(float2 *)(a->att + (int64_t)s->query[q].to * D + column<D>(p % (D / 2))) =
            make_float2(tlc_fold_end(r->o[i].x, inv), tlc_fold_end(r->o[i].y, inv));
    }
}

/* ---- the kernel ---- */

/* The inbox's turn number `round` is over when thread 0 has said how many bytes come and all of them are there. It says so when all
 * threads of the block have seen the turn before to its end (with no bytes to come, the turn ends at once), and bytes are sent only
 * after a barrier of the cluster behind that: so nobody sends into terms that are still read, and no wait can be for a turn other
 * than the one meant. A block ends when all that is sent to it has come. Turns behind those are of pages of single rows, and of this
 * block alone. A page is asked for when all of its side have read the one before. */
template <int D, bool APART>
static __device__ __forceinline__ void run_item(const struct tlc_attn_args *a, const struct work *item)
{
    struct shared_data<D> *s = shared_of<D>();
    struct result<D> r;
    int term = side_id() * a->cluster + item->rank, n_apart, rounds;
    int next = SIDE - 1 - side_id();              /* side 1 is more often without a common page */
    struct spot at = {item->x.block0 + term, -1}; /* the page of this side; block INT_MAX: none */
    if (at.block >= item->x.block1)
        at.block = INT_MAX;
    else if (!late(item, at.block))
        fetch<D>(a, item, at);
    if (threadIdx.x == 0)
        s->item = *item; /* until the heads are finished: they need the registers */
    if (a->cluster > 1) {
        if (threadIdx.x == 0) {
            tlc_inbox_init(&s->inbox);
            tlc_inbox_expect(&s->inbox, sent<D>(a, item, terms_of(item, 0)));
        }
        __syncwarp();
        tlc_cluster_arrive();
        tlc_cluster_wait(); /* all inboxes are open */
    }
    ready_heads<D, APART>(a, item);
    tlc_copy_wait<0>();
    __syncthreads();
    const struct work *w = &s->item;
    n_apart = APART ? spots_apart<D>(w) : 0;
    rounds = w->rounds + (n_apart + SIDE - 1) / SIDE;
    if (APART && at.block == INT_MAX && next < n_apart) {
        at = spot_apart<D>(w, next);
        fetch<D>(a, w, at);
    } else if (at.block != INT_MAX && late(w, at.block)) {
        fetch<D>(a, w, at);
        tlc_copy_wait<0>();
        meet_side();
    }
    start<D>(&r);
    for (int round = 0; round < rounds; round++) {
        bool common = !APART || round < w->rounds, far = common && a->cluster > 1;
        if (at.block != INT_MAX && common == (at.row < 0)) {
            if (round > 0) {
                tlc_copy_wait<0>();
                meet_side();
            }
            make_term<D>(a, w, at, far, common ? term : SIDE - 1 - side_id());
            next += common ? 0 : SIDE;
            if (common && at.block + w->step < w->x.block1)
                at.block += w->step;
            else if (APART && next < n_apart)
                at = spot_apart<D>(w, next);
            else
                at.block = INT_MAX;
            if (at.block != INT_MAX) {
                meet_side(); /* all have read the page */
                fetch<D>(a, w, at);
            }
        }
        if (far)
            tlc_inbox_wait(&s->inbox, round);
        else
            __syncthreads();
        if (common)
            fold<D, 8>(&r, a, w, terms_of(w, round));
        else
            fold<D, SIDE>(&r, a, w, min(SIDE, n_apart - (round - w->rounds) * SIDE));
        if (round + 1 == rounds)
            break;
        __syncthreads();                    /* all have seen the turn's end */
        if (far && round + 1 < w->rounds) { /* the terms may be overwritten */
            if (threadIdx.x == 0)
                tlc_inbox_expect(&s->inbox, sent<D>(a, w, terms_of(w, round + 1)));
            __syncwarp();
            tlc_cluster_arrive();
            tlc_cluster_wait();
        }
    }
    finish<D>(&r, a, w);
}

template <int D> __global__ void __launch_bounds__(THREADS, D <= 128 ? 2 : 1) short_kernel(struct tlc_attn_args a)
{
    int rank = (int)blockIdx.x & (a.cluster - 1), item = (int)blockIdx.x >> a.cluster_bits;
    tlc_go();
    if (item < a.plan->n[TLC_SEG_TILE]) { /* all blocks of the cluster */
        struct work w = work_of(&a, item, rank);
        if (w.x.apart)
            run_item<D, true>(&a, &w);
        else
            run_item<D, false>(&a, &w);
    } else {
        tlc_wait();
    }
}

/* ---- host ---- */

template <int D> static cudaError_t allow() { return tlc_attn_allow(short_kernel<D>, sizeof(struct shared_data<D>)); }

template <int D> static cudaError_t launch(const struct tlc_launch *l, const struct tlc_attn_args *a, dim3 grid)
{
    return tlc_launch_cluster(l, short_kernel<D>, a->cluster, grid, dim3(THREADS), sizeof(struct shared_data<D>), *a);
}

#define BYTES(D)  sizeof(struct shared_data<D>)
#define ALLOW(D)  allow<D>()
#define LAUNCH(D) launch<D>(l, &a, grid)

size_t tlc_attn_short_bytes(int d) { return TLC_BY_WIDTH(d, BYTES); }

cudaError_t tlc_attn_short_init(int d) { return TLC_BY_WIDTH(d, ALLOW); }

cudaError_t tlc_attn_short(const struct tlc_launch *l, struct tlc_attn_args a, int items)
{
    a.heads = tlc_tile_heads(a.per_row, TLC_TILE_Q);
    a.head_tiles = (a.per_row + a.heads - 1) / a.heads;
    while (1 << a.cluster_bits < a.cluster)
        a.cluster_bits++;
    dim3 grid((unsigned)(items * a.cluster), (unsigned)(a.n_kv_heads * a.head_tiles));
    return TLC_BY_WIDTH(a.finish.d, LAUNCH);
}
