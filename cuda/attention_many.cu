/* Attention of single rows of many sequences, as in decode of a batch: a block per row and kv head, at most 8 queries.
 * There, reading K and V once is what takes time, so pages must be on their way all the time:
 *
 * Pairs of warps take the pages of the row in turns, each with room for one page of its own. A pair waits for
 * nothing but its page, and asks for its next one as soon as it has read it. Terms are folded in order by handing the
 * state (M, L, O) from pair to pair. Inside a page the work is that of attention_row.cu: queries are the 8 columns of
 * the products, a warp has the scores of 32 keys and half of the columns of the values.
 *
 * Rows of sequences that have their first pages in common may share a block, as many as have 8 queries together: first come
 * the common pages, read once, then the other pages of the first row, of the second one, and so on. The fold of such a
 * page is for its row's columns only, so every row has the terms that it has by itself, in the same order. Where blocks have
 * a multiprocessor each they are WIDE.
 *
 * Outputs are made ready for the product behind by a kernel of their own. Blocks of a row that do it here, as a cluster that shares
 * its largest value, save 2 us, but clusters leave multiprocessors without a block: the last 2 of 64 rows began when all others had
 * ended, 13 us later. */
#include "attention_heads.cuh"

/* Pairs of warps of a block. Barriers: one a pair for its warps, one for the state that it gets; 15 in all. */
#define NARROW 3
#define WIDE   6

/* What a kernel is made for: heads of width d, blocks of so many pairs and up to so many rows. */
template <int d, int pairs, int rows> struct form {
    enum { D = d, PAIRS = pairs, ROWS = rows, THREADS = 64 * pairs, WARPS = 2 * pairs };
    static_assert(2 * pairs < 16, "barriers");
};

template <class F> struct shared_data {
    enum { D = F::D, PAIRS = F::PAIRS };
    __half k[PAIRS][TLC_PAGE][D], v[PAIRS][TLC_PAGE][D]; /* pieces of 16 bytes exchanged: see piece() */
    __half q[TLC_ROW_Q][D + 8];
    __half k_new[F::ROWS][D], v_new[F::ROWS][D]; /* of the rows themselves */
    float4 scores[PAIRS][2][2][32];
    float4 o[D / 32][64];    /* the state that is handed on: [fragment][thread of the pair] */
    float2 ml[2][TLC_ROW_Q]; /* M and L of turns in turns */
};

struct row {
    const int32_t *pages;
    int place, pos;
};

struct work {
    struct tlc_attn_item x;
    struct row first, mine; /* the first row; where a block may have more, the one of this lane's number */
    int common;             /* turns below are of pages that all rows see, ... */
    int own;                /* ... from this one on of row `mine` alone; INT_MAX = none */
    int kv, head0, n_q;     /* n_q: of a row */
};

/* A page for a pair of warps */
struct turn {
    const __half *k;
    int block, pos; /* of the row whose page it is */
    int owner;      /* number of the row that alone sees it, -1 = all do */
};

static __device__ __forceinline__ int lane_id() { return (int)threadIdx.x & 31; }
static __device__ __forceinline__ int warp_id() { return (int)threadIdx.x / 32; }
static __device__ __forceinline__ int pair_id() { return (int)threadIdx.x / 64; }
template <class F> static __device__ __forceinline__ struct shared_data<F> *shared_of() {
    return (struct shared_data<F> *)tlc_shared();
}

/* Byte of piece c (16 bytes) of row r of a page: one piece of 8 successive rows covers all banks. */
template <int D>
static __device__ __forceinline__ unsigned piece(int r, int c)
{
    return (unsigned)(r * D * 2 + ((c ^ (r & 7)) << 4));
}

/* ---- rows and pages ---- */

/* Row number r, of all lanes at once. */
template <class F> static __device__ __forceinline__ struct row row_of(const struct work *w, int r)
{
    if (F::ROWS == 1)
        return w->first;
    return {(const int32_t *)__shfl_sync(0xffffffffu, (unsigned long long)w->mine.pages, r),
            __shfl_sync(0xffffffffu, w->mine.place, r), __shfl_sync(0xffffffffu, w->mine.pos, r)};
}

/* The rows of an item that may have several; each has a page of its own. */
static __device__ __forceinline__ void find_rows(const struct tlc_attn_args *a, struct work *w)
{
    int lane = lane_id(), pages, sum;
    struct tlc_attn_entry e = tlc_plan_entries(a->plan)[w->x.entry0 + min(lane, w->x.n - 1)];
    w->mine = {tlc_page_table(&a->step, e.seq, a->slot), e.place, e.pos};
    w->common = w->x.n > 1 ? w->x.own : w->x.block1;
    pages = sum = e.pos / TLC_PAGE + 1 - w->common;
#pragma unroll
    for (int i = 1; i < TLC_ROW_Q; i *= 2) {
        int before = __shfl_up_sync(0xffffffffu, sum, i);
        sum += lane >= i ? before : 0;
    }
    w->own = lane < w->x.n ? w->common + sum - pages : INT_MAX;
}

/* Number i, of all lanes at once */
template <class F>
static __device__ __forceinline__ struct turn turn_of(const struct tlc_attn_args *a, const struct work *w, int i)
{
    struct turn y = {nullptr, i, w->first.pos, -1};
    const int32_t *pages = w->first.pages;
    if (F::ROWS > 1 && i >= w->common) {
        struct row row;
        y.owner = __popc(__ballot_sync(0xffffffffu, w->own <= i)) - 1;
        row = row_of<F>(w, y.owner);
        pages = row.pages;
        y.pos = row.pos;
        y.block = w->common + i - __shfl_sync(0xffffffffu, w->own, y.owner);
    }
    y.k = tlc_page_k<const __half>(&a->step, pages[y.block], w->kv, F::D);
    return y;
}

/* Keys or values (part 0 or 1) of this pair's next page. Those of keys that the row does not see become zeros; its own is put in its
 * place later. */
template <class F>
static __device__ __forceinline__ void fetch(const struct tlc_attn_args *a, const struct work *w, const struct turn *y,
                                             int part)
{
    enum { D = F::D };
    struct shared_data<F> *s = shared_of<F>();
    const __half *from = y->k + part * (int64_t)a->n_kv_heads * TLC_PAGE * D;
    unsigned to = tlc_shared_address(part ? s->v[pair_id()] : s->k[pair_id()]);
    int own = a->fused ? y->pos : -1;
#pragma unroll
    for (int i = 0; i < TLC_PAGE * D / 8 / 64; i++) {
        int c = ((int)threadIdx.x & 63) + 64 * i, row = c / (D / 8), key = y->block * TLC_PAGE + row;
        if (key != own)
            tlc_copy16(to + piece<D>(row, c % (D / 8)), from + c * 8, key >= w->x.lo && key <= y->pos);
    }
    tlc_copy_commit();
}

/* Not all keys that are read of this page are of earlier steps. Those of common pages are; of the pages behind them it is not known. */
static __device__ __forceinline__ bool late(const struct tlc_attn_args *a, const struct work *w, const struct turn *y)
{
    return y->owner >= 0 || min((y->block + 1) * TLC_PAGE, y->pos + (a->fused ? 0 : 1)) > w->x.safe;
}

/* The own key and value of the row whose page it is into it. */
template <class F> static __device__ __forceinline__ void put_own(const struct turn *y)
{
    enum { D = F::D };
    struct shared_data<F> *s = shared_of<F>();
    int t = (int)threadIdx.x & 63, c = t % (D / 8), r = F::ROWS > 1 ? max(y->owner, 0) : 0;
    if (t < D / 4)
        *(uint4 *)((uint8_t *)(t < D / 8 ? s->k[pair_id()] : s->v[pair_id()]) + piece<D>(y->pos % TLC_PAGE, c)) =
            *(const uint4 *)&(t < D / 8 ? s->k_new : s->v_new)[r][c * 8];
}

/* ---- the heads of the rows: all queries, then of each row k and v ---- */

/* Where a head comes from and goes to. */
struct head_way {
    const float *from; /* this lane's first value */
    __half *to, *page; /* page: of k and v */
    int number, pos;   /* see tlc_head_of() */
    bool turned;       /* it is no v head */
};

template <class F> static __device__ __forceinline__ int rows_of(const struct work *w)
{
    return F::ROWS > 1 ? w->x.n : 1;
}

/* Found out before the kernel in front has ended; asked for, if in vain, so that it is. */
template <class F>
static __device__ __forceinline__ struct head_way way_of(const struct tlc_attn_args *a, const struct work *w, int task)
{
    enum { D = F::D };
    struct shared_data<F> *s = shared_of<F>();
    int n_q = rows_of<F>(w) * w->n_q, r = F::ROWS == 1 ? 0 : task < n_q ? task / w->n_q : (task - n_q) / 2;
    bool v = task >= n_q && (task - n_q) % 2;
    struct row row = row_of<F>(w, r);
    struct head_way y = {};
    y.number = task < n_q ? w->head0 + task - r * w->n_q : a->n_heads + (v ? a->n_kv_heads : 0) + w->kv;
    y.pos = row.pos;
    y.turned = !v;
    y.from = a->qkv + row.place * a->ld + y.number * D + lane_id();
    y.to = task < n_q ? s->q[task] : v ? s->v_new[r] : s->k_new[r];
    asm volatile("prefetch.global.L2 [%0];" ::"l"(y.from) : "memory");
    if (task >= n_q) {
        y.page = tlc_page_k<__half>(&a->step, row.pages[row.pos / TLC_PAGE], w->kv, D) + row.pos % TLC_PAGE * D +
                 (v ? (int64_t)a->n_kv_heads * TLC_PAGE * D : 0);
        asm volatile("prefetch.global.L2 [%0];" ::"l"(y.page) : "memory");
    }
    return y;
}

/* ---- the term of a page, by a pair of warps ---- */

/* acc: [16 columns of the values][8 queries] fragments of this warp's half; of queries t2 and t2 + 1 also m and l. */
template <int D> struct term {
    float acc[D / 32][4];
    float m[2], l[2];
};

/* next: the page that this pair has after this one, where there is more; its keys are asked for as soon as these have been read. */
template <class F>
static __device__ __forceinline__ void make_term(struct term<F::D> *out, const struct tlc_attn_args *a,
                                                 const struct work *w, const struct turn *now, const struct turn *next,
                                                 bool more)
{
    enum { D = F::D };
    struct shared_data<F> *s = shared_of<F>();
    int half = warp_id() & 1, lane = lane_id(), g = lane / 4;
    int k_row = half * 32 + (lane & 15), v_row = (lane >> 4) * 8 + (lane & 7);
    unsigned q_at = tlc_at_k(tlc_shared_address(s->q), lane, D + 8);
    unsigned k_at = tlc_shared_address(s->k[pair_id()]), v_at = tlc_shared_address(s->v[pair_id()]);
    float c[2][4] = {}, all[4][4], l[4] = {};
    uint32_t p[4][2];
    const uint32_t ones[4] = {TLC_ONES, TLC_ONES, TLC_ONES, TLC_ONES};
#pragma unroll
    for (int kk = 0; kk < D / 32; kk++) {
        uint32_t q[4];
        tlc_ldmatrix(q, q_at + kk * 64);
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t k[4];
                tlc_ldmatrix(k, k_at + piece<D>(k_row + i * 16, (2 * kk + h) * 2 + (lane >> 4)));
                tlc_mma_f16(c[i], k, q[2 * h], q[2 * h + 1]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int key = now->block * TLC_PAGE + half * 32 + i * 16 + g + j / 2 * 8;
            c[i][j] = key >= w->x.lo && key <= now->pos ? __fmul_rn(c[i][j], a->scale) : tlc_minus_inf();
        }
        s->scores[pair_id()][half][i][lane] = make_float4(c[i][0], c[i][1], c[i][2], c[i][3]);
    }
    tlc_meet_pair();
    if (more)
        fetch<F>(a, w, next, 0);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float4 x = s->scores[pair_id()][i / 2][i % 2][lane];
        all[i][0] = x.x, all[i][1] = x.y, all[i][2] = x.z, all[i][3] = x.w;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) { /* over the keys of this lane, then over g */
        float m = fmaxf(all[0][j], all[0][2 + j]);
#pragma unroll
        for (int i = 1; i < 4; i++)
            m = fmaxf(m, fmaxf(all[i][j], all[i][2 + j]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 4));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 8));
        out->m[j] = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 16));
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        p[i / 2][i % 2] = tlc_transpose(tlc_pack_half(tlc_weight(all[i / 2][i % 2 * 2], out->m[0]),
                                                      tlc_weight(all[i / 2][i % 2 * 2 + 1], out->m[1])));
#pragma unroll
    for (int i = 0; i < 4; i++)
        tlc_mma_f16(l, ones, p[i][0], p[i][1]);
    out->l[0] = l[0];
    out->l[1] = l[1];
#pragma unroll
    for (int n = 0; n < D / 32; n++) {
        uint32_t v[4][4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            out->acc[n][j] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++)
            tlc_ldmatrix_t(v[i], v_at + piece<D>(i * 16 + v_row, half * (D / 16) + n * 2 + (lane >> 3 & 1)));
#pragma unroll
        for (int i = 0; i < 4; i++)
            tlc_mma_f16(out->acc[n], v[i], p[i][0], p[i][1]);
    }
}

/* ---- the fold: threads of all pairs have the same queries and columns ---- */

template <int D> struct state {
    float o[D / 32][4]; /* as term.acc */
    float m[2], l[2];
};

/* sees: of this thread's two queries; what the other rows' pages hold must not reach a query in any way. */
template <int D>
static __device__ __forceinline__ void fold(struct state<D> *z, const struct term<D> *x, const bool *sees)
{
    float e0[2], e1[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float m = z->m[j], l = z->l[j];
        tlc_fold(&m, &l, x->m[j], x->l[j], &e0[j], &e1[j]);
        z->m[j] = sees[j] ? m : z->m[j];
        z->l[j] = sees[j] ? l : z->l[j];
    }
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        float *o = &z->o[i / 4][i % 4], y = tlc_fold_o(*o, x->acc[i / 4][i % 4], e0[i % 2], e1[i % 2]);
        *o = sees[i % 2] ? y : *o;
    }
}

template <int D> static __device__ __forceinline__ struct state<D> nothing() {
    struct state<D> z = {
    };
    z.m[0] = z.m[1] = tlc_minus_inf();
    return z;
}

/* Column of fragment n's values 0 and 1 in this thread; values 2 and 3 are 8 further. */
template <int D>
static __device__ __forceinline__ int column(int n)
{
    return (warp_id() & 1) * (D / 2) + n * 16 + lane_id() / 4;
}

/* The state after turn `i` to the pair of the next one, and from the pair of the one before. */
template <class F> static __device__ __forceinline__ void hand_on(const struct state<F::D> *z, int i)
{
    struct shared_data<F> *s = shared_of<F>();
    int lane = lane_id(), t = (int)threadIdx.x & 63;
#pragma unroll
    for (int n = 0; n < F::D / 32; n++)
        s->o[n][t] = make_float4(z->o[n][0], z->o[n][1], z->o[n][2], z->o[n][3]);
    if (t < 4)
        *(float4 *)&s->ml[i & 1][lane * 2] = make_float4(z->m[0], z->l[0], z->m[1], z->l[1]);
    tlc_meet_give(F::PAIRS + 1 + (pair_id() + 1) % F::PAIRS, 128);
}
template <class F> static __device__ __forceinline__ struct state<F::D> take_over(int i) {
    struct shared_data<F> *s = shared_of<F>();
    struct state<F::D> z;
    tlc_meet_take(F::PAIRS + 1 + pair_id(), 128);
#pragma unroll
    for (int n = 0; n < F::D / 32; n++) {
        float4 o = s->o[n][threadIdx.x & 63];
        z.o[n][0] = o.x, z.o[n][1] = o.y, z.o[n][2] = o.z, z.o[n][3] = o.w;
    }
    float4 ml = *(const float4 *)&s->ml[i & 1][lane_id() % 4 * 2];
    z.m[0] = ml.x, z.l[0] = ml.y, z.m[1] = ml.z, z.l[1] = ml.w;
    return z;
}

/* The outputs, each to its row */
template <class F>
static __device__ __forceinline__ void put_out(const struct state<F::D> *z, const struct tlc_attn_args *a,
                                               const struct work *w)
{
    enum { D = F::D };
    int t2 = lane_id() % 4 * 2;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float inv = __fdiv_rn(1.0f, z->l[j]), *to;
        int r = F::ROWS > 1 ? min((t2 + j) / w->n_q, w->x.n - 1) : 0, head = w->head0 + t2 + j - r * w->n_q;
        int place = F::ROWS > 1 ? __shfl_sync(0xffffffffu, w->mine.place, r) : w->first.place;
        if (t2 + j >= rows_of<F>(w) * w->n_q)
            continue;
        to = a->att + ((int64_t)place * a->n_heads + head) * D;
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            to[column<D>(i / 2) + i % 2 * 8] = tlc_fold_end(z->o[i / 2][i % 2 * 2 + j], inv);
    }
}

/* ---- the kernel ---- */

/* Fills *out in the pair that comes last, and returns whether this one did. */
template <class F>
static __device__ __forceinline__ bool run_item(struct state<F::D> *out, const struct tlc_attn_args *a,
                                                const struct work *w)
{
    enum { D = F::D };
    struct shared_data<F> *s = shared_of<F>();
    struct tlc_head<D> h;
    struct head_way y;
    struct turn now = {};
    int i = w->x.block0 + pair_id(), end = w->x.block1, n_q = rows_of<F>(w) * w->n_q;
    int task = warp_id(), tasks = n_q + (a->fused ? 2 * rows_of<F>(w) : 0), row_of_q[2] = {};
    bool ready = false;
    if (i < end) {
        now = turn_of<F>(a, w, i);
        ready = !late(a, w, &now);
    }
    if (ready) {
        fetch<F>(a, w, &now, 0);
        fetch<F>(a, w, &now, 1);
    }
    if (task < tasks) {
        y = way_of<F>(a, w, task);
        h = tlc_head_of<D>(a, y.number, y.pos);
    }
    for (int j = n_q * D + (int)threadIdx.x; j < TLC_ROW_Q * D; j += F::THREADS)
        s->q[j / D][j % D] = __float2half_rn(0.0f);
    tlc_wait();
    if (task < tasks)
        tlc_head_take_from<D>(a, &h, y.from, y.turned, y.to, y.page, nullptr);
    for (task += F::WARPS; task < tasks; task += F::WARPS) {
        y = way_of<F>(a, w, task);
        h = tlc_head_of<D>(a, y.number, y.pos);
        tlc_head_take_from<D>(a, &h, y.from, y.turned, y.to, y.page, nullptr);
    }
    if (i < end && !ready) {
        fetch<F>(a, w, &now, 0);
        fetch<F>(a, w, &now, 1);
    }
    for (int j = 0; j < 2 && F::ROWS > 1; j++)
        row_of_q[j] = (lane_id() % 4 * 2 + j) / w->n_q;
    __syncthreads();
    for (; i < end; i += F::PAIRS) {
        struct term<D> x;
        struct state<D> z = nothing<D>();
        struct turn next = {};
        bool more = i + F::PAIRS < end, sees[2];
        if (more)
            next = turn_of<F>(a, w, i + F::PAIRS);
        tlc_copy_wait<0>();
        if (a->fused && now.block == now.pos / TLC_PAGE)
            put_own<F>(&now);
        tlc_meet_pair();
        make_term<F>(&x, a, w, &now, &next, more);
        tlc_meet_pair(); /* both have read the page */
        if (more)
            fetch<F>(a, w, &next, 1);
        if (i > w->x.block0)
            z = take_over<F>(i - 1);
#pragma unroll
        for (int j = 0; j < 2; j++)
            sees[j] = F::ROWS == 1 || now.owner < 0 || now.owner == row_of_q[j];
        fold<D>(&z, &x, sees);
        if (i + 1 < end) {
            hand_on<F>(&z, i);
        } else {
            *out = z;
            return true;
        }
        now = next;
    }
    return false;
}

template <class F>
__global__ void __launch_bounds__(F::THREADS, F::PAIRS > NARROW ? 1 : 2) many_kernel(struct tlc_attn_args a)
{
    struct work w;
    struct state<F::D> z;
    int item = (int)blockIdx.x / a.n_kv_heads;
    tlc_go();
    if (item >= a.plan->n[TLC_SEG_ROW]) { /* all of its blocks */
        tlc_wait();
        return;
    }
    w.x = tlc_plan_items(a.plan)[a.plan->first[TLC_SEG_ROW] + item];
    w.first = {tlc_page_table(&a.step, w.x.seq, a.slot), w.x.place, w.x.pos};
    w.kv = (int)blockIdx.x % a.n_kv_heads;
    w.head0 = w.kv * a.per_row;
    w.n_q = a.per_row;
    if (F::ROWS > 1)
        find_rows(&a, &w);
    if (run_item<F>(&z, &a, &w))
        put_out<F>(&z, &a, &w);
}

/* ---- host ---- */

template <int D> using alone = form<D, NARROW, 1>;
template <int D> using wide_alone = form<D, WIDE, 1>;
template <int D> using sharing = form<D, NARROW, TLC_ROW_Q>;
template <int D> using wide = form<D, WIDE, TLC_ROW_Q>;

size_t tlc_attn_many_bytes(int d, bool most)
{
    return d == 64 ? most ? sizeof(struct shared_data<wide<64>>) : sizeof(struct shared_data<alone<64>>)
           : most ? sizeof(struct shared_data<wide<128>>)
                   : sizeof(struct shared_data<alone<128>>);
}

template <class F> static cudaError_t allow() { return tlc_attn_allow(many_kernel<F>, sizeof(struct shared_data<F>)); }
template <int D> static cudaError_t init(size_t shared_max)
{
    cudaError_t e = allow<alone<D>>();
    if (tlc_attn_many_bytes(D, true) > shared_max)
        return e;
    if (e == cudaSuccess)
        e = allow<wide_alone<D>>();
    if (e == cudaSuccess)
        e = allow<sharing<D>>();
    return e == cudaSuccess ? allow<wide<D>>() : e;
}

cudaError_t tlc_attn_many_init(int d, size_t shared_max)
{
    return d == 64 ? init<64>(shared_max) : init<128>(shared_max);
}

template <class F> static cudaError_t launch(const struct tlc_launch *l, struct tlc_attn_args a, int blocks)
{
    return tlc_launch(l, many_kernel<F>, dim3((unsigned)blocks), dim3(F::THREADS), sizeof(struct shared_data<F>), a);
}

template <int D>
static cudaError_t launch_many(const struct tlc_launch *l, struct tlc_attn_args a, int blocks, bool shared)
{
    if (blocks <= l->sms && tlc_attn_many_bytes(D, true) <= l->shared_max)
        return shared ? launch<wide<D>>(l, a, blocks) : launch<wide_alone<D>>(l, a, blocks);
    return shared ? launch<sharing<D>>(l, a, blocks) : launch<alone<D>>(l, a, blocks);
}

cudaError_t tlc_attn_many(const struct tlc_launch *l, struct tlc_attn_args a, int items, bool shared)
{
    int blocks = items * a.n_kv_heads;
    return a.finish.d == 64 ? launch_many<64>(l, a, blocks, shared) : launch_many<128>(l, a, blocks, shared);
}
