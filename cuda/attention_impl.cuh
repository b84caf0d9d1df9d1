/* cuda/attention_impl.cuh - what the files of attention share: the plan, the launch class, arguments of the
 * kernels, and the pieces of the law that every kernel uses. */
#ifndef TLC_ATTENTION_IMPL_CUH
#define TLC_ATTENTION_IMPL_CUH

#include "attention.cuh"
#include "cluster.cuh"
#include "rows.cuh"

#include <float.h>

#define TLC_PAGE         TL_BLOCK_TOKENS
#define TLC_TILE_Q       16  /* queries of a tile of the short kernel */
#define TLC_LONG_Q       64  /* and of the long kernel */
#define TLC_NEW_ROWS     16  /* rows of a run whose heads the short kernel finishes by itself */
#define TLC_SHARED_ROWS  256 /* rows of a set that are looked through for common pages, and that may be grouped */
#define TLC_CLUSTER_LOG2 4   /* most blocks per item, as a power of two; more than 3 only for many pages */
#define TLC_ROW_Q        8   /* and of the row kernel */
#define TLC_ROW_ROWS     4 /* single rows of a set that the row kernel serves; more go to the kernel of many rows, ... */
#define TLC_MANY_PAGES   20 /* ... but for those with more pages than these, and with room for two blocks each; ... */
#define TLC_ROW_ROWS_MAX 32 /* ... and where that does not fit, rows of sets of more than these to the short one */

/* ---- the plan: head, entries, items segment by segment ---- */

enum {
    TLC_SEG_ROW,  /* single rows: the row kernel, or that of many rows */
    TLC_SEG_TILE, /* other rows, and rows of sequences that have pages in common: the short kernel */
    TLC_SEG_LONG, /* many rows of a sequence: the long kernel */
    TLC_SEGS
};

struct tlc_attn_head {
    int32_t first[TLC_SEGS], n[TLC_SEGS]; /* items of each segment */
    int32_t items_at;                     /* bytes from here; the entries follow the head */
    int32_t reserved[3];
};

struct tlc_attn_entry { /* a row: sees keys lo .. pos */
    int32_t place, pos, lo, seq;
};

/* Rows that see the same pages [block0, block1) of seq: ascending rows of one sequence, or (apart) one row each of sequences
 * that have these pages in common; such a row's later pages are its own. TLC_SEG_ROW: one row, or rows that share a block of the
 * kernel of many rows: pages [0, own) in common, block1 counts these and all pages that are rows' own. */
struct tlc_attn_item {
    int32_t entry0, n;
    int32_t block0, block1;
    int32_t safe; /* keys of seq below were stored by earlier steps */
    int32_t seq;
    int32_t place, pos, lo; /* the first entry */
    int32_t own; /* TLC_SEG_TILE: position of the first row of the run that the item is part of; _ROW: see above */
    int32_t apart;
    int32_t reserved;
};

/* ---- the launch class ---- */

#define TLC_CLS_FUSED 1u
#define TLC_CLS_PLAIN 2u

/* Bits: tlc_cluster_size() of blocks per item (not LONG) from 2 on, log2 of pages side by side in a block of the row kernel at 8 (3 =
 * the kernel of many rows instead), 1 + log2 of items (0 = none) from 10 on, and whether rows share blocks of the kernel of many. */
#define TLC_CLS_CLUSTER(seg) (2 + 3 * (seg))
#define TLC_CLS_PAGES        8
#define TLC_CLS_MANY         3u
#define TLC_CLS_ITEMS(seg)   (10 + 4 * (seg))
#define TLC_CLS_SHARED       (1u << TLC_CLS_ITEMS(TLC_SEGS))
static inline uint32_t tlc_cls_cluster(uint32_t cls, int seg) { return cls >> TLC_CLS_CLUSTER(seg) & 7; }
/* The sizes that clusters have: powers of two first, which are all that the short kernel has. */
#define TLC_CLUSTER_SIZES 7
#define TLC_CLUSTER_LEFT  8 /* more than x % size, where size does not divide x, a multiple of 16 */
static inline int tlc_cluster_size(uint32_t number)
{
    return number <= TLC_CLUSTER_LOG2 ? 1 << number : number == 5 ? 3 : 6;
}
static inline uint32_t tlc_cls_pages(uint32_t cls) { return cls >> TLC_CLS_PAGES & 3; }
static inline uint32_t tlc_cls_items(uint32_t cls, int seg) { return cls >> TLC_CLS_ITEMS(seg) & 15; }

/* ---- shapes ---- */

/* Heads of one kv head that a tile of q_max queries takes from each row. */
static inline __host__ __device__ int tlc_tile_heads(int per_row, int q_max)
{
    return per_row < q_max ? per_row : q_max;
}
/* What F(D) is for heads of width d, one of tlc_tile_width(). */
#define TLC_BY_WIDTH(d, F) ((d) == 32 ? F(32) : (d) == 64 ? F(64) : (d) == 96 ? F(96) : (d) == 128 ? F(128) : F(256))
static inline bool tlc_tile_width(int d) { return d == 32 || d == 64 || d == 96 || d == 128 || d == 256; }

struct tlc_attn_args {
    const struct tlc_attn_head *plan;
    struct tlc_step step;
    struct tlc_set set;
    int slot;
    int n_heads, n_kv_heads, per_row;
    int heads, head_tiles; /* of a tile */
    int cluster;           /* blocks per item; cluster_bits: log2 of that, in the short kernel */
    int cluster_bits;
    int page_bits;            /* of the row kernel: log2 of the pages side by side in a block, ... */
    uint32_t step_inverse;    /* ... 2^31 / pages of a round of a cluster, rounded up, ... */
    int share, share_inverse; /* ... and pairs of outputs that a block of it folds; 2^20 / share, rounded up */
    bool fused;
    float scale;
    float *qkv;
    int64_t ld;
    float *att;
    const float *qkv_bias, *qk_bias, *q_norm, *k_norm, *rope;
    struct tlc_head_finish finish;
};

/* Shared memory of a block, of the row kernel with so many pages side by side; the kernels' limits. d: tlc_tile_width(). */
size_t tlc_attn_short_bytes(int d);
size_t tlc_attn_row_bytes(int d, int pages);
size_t tlc_attn_many_bytes(int d, bool most); /* most: of the largest of its forms */
size_t tlc_attn_long_bytes(int d);

/* Has a device room for all kernels that every plan of tiles may need? And for that of many rows, and with rows that share blocks? */
static inline bool tlc_tiles_fit(int d, size_t shared_max)
{
    return tlc_tile_width(d) && tlc_attn_short_bytes(d) <= shared_max && tlc_attn_long_bytes(d) <= shared_max &&
           tlc_attn_row_bytes(d, 1) <= shared_max;
}
static inline bool tlc_many_fits(int per_row, int d, size_t shared_max)
{
    return per_row <= TLC_ROW_Q && (d == 64 || d == 128) && tlc_attn_many_bytes(d, false) <= shared_max;
}
static inline bool tlc_many_share(int per_row, int d, size_t shared_max)
{
    return 2 * per_row <= TLC_ROW_Q && (d == 64 || d == 128) && tlc_attn_many_bytes(d, true) <= shared_max;
}

cudaError_t tlc_attn_short_init(int d);
cudaError_t tlc_attn_short(const struct tlc_launch *l, struct tlc_attn_args a, int items);
cudaError_t tlc_attn_row_init(int d, size_t shared_max);
cudaError_t tlc_attn_row(const struct tlc_launch *l, struct tlc_attn_args a, int items);
cudaError_t tlc_attn_many_init(int d, size_t shared_max);
cudaError_t tlc_attn_many(const struct tlc_launch *l, struct tlc_attn_args a, int items, bool shared);
cudaError_t tlc_attn_long_init(int d);
cudaError_t tlc_attn_long(const struct tlc_launch *l, struct tlc_attn_args a, int items);

/* The kernel may have so much shared memory, and clusters of 16 where the device has clusters. */
cudaError_t tlc_attn_allow(void (*kernel)(struct tlc_attn_args), size_t shared);

#ifdef __CUDACC__

static __device__ __forceinline__ float tlc_minus_inf() { return __int_as_float((int)0xff800000u); }

static __device__ __forceinline__ const struct tlc_attn_entry *tlc_plan_entries(const struct tlc_attn_head *h)
{
    return (const struct tlc_attn_entry *)(h + 1);
}
static __device__ __forceinline__ const struct tlc_attn_item *tlc_plan_items(const struct tlc_attn_head *h)
{
    return (const struct tlc_attn_item *)((const uint8_t *)h + h->items_at);
}

static __device__ __forceinline__ const int32_t *tlc_page_table(const struct tlc_step *s, int seq, int slot)
{
    return s->pages + s->seqs[seq].pages_at + (int64_t)slot * s->seqs[seq].stride;
}

/* First key of kv head g in a page; V follows K at n_kv_heads * 64 * d elements. */
template <typename T> static __device__ __forceinline__ T *tlc_page_k(const struct tlc_step *s, int page, int g, int d)
{
    return (T *)(s->arena + page * s->page_bytes) + (int64_t)g * TLC_PAGE * d;
}

/* One term's part in a fold: M and L take it in; o = fma(acc, e1, o * e0) for every o. A row that sees no key of
 * the page has m = -inf and stays as it is. */
static __device__ __forceinline__ void tlc_fold(float *M, float *L, float m, float l, float *e0, float *e1)
{
    float top = fmaxf(*M, m);
    bool none = m == tlc_minus_inf();
    *e0 = none ? 1.0f : tlc_exp(__fsub_rn(*M, top));
    *e1 = none ? 0.0f : tlc_exp(__fsub_rn(m, top));
    *M = top;
    *L = __fmaf_rn(l, *e1, __fmul_rn(*L, *e0));
}
static __device__ __forceinline__ float tlc_fold_o(float o, float acc, float e0, float e1)
{
    return __fmaf_rn(acc, e1, __fmul_rn(o, e0));
}
/* Adding zero makes one zero of both, so that an invisible page, skipped or folded, leaves no trace. */
static __device__ __forceinline__ float tlc_fold_end(float o, float inv) { return __fadd_rn(__fmul_rn(o, inv), 0.0f); }

/* p of a scaled score (or -inf) in a page whose largest is m */
static __device__ __forceinline__ float tlc_weight(float s, float m)
{
    return tlc_exp(__fsub_rn(s, m == tlc_minus_inf() ? 0.0f : m));
}

/* ---- a q, k or v head of a row, finished in x by one warp ---- */

static __device__ __forceinline__ void tlc_head_load(float *x, const float *src, const float *bias, int d)
{
    for (int j = threadIdx.x & 31; j < d; j += 32)
        x[j] = bias ? __fadd_rn(src[j], bias[j]) : src[j];
    __syncwarp();
}

/* What the finish of a row's heads reads besides the row; pointers into shared or global memory. */
struct tlc_head_tables {
    const float *rope, *q_norm, *k_norm; /* rope: of the row's position */
};
static __device__ __forceinline__ struct tlc_head_tables tlc_head_tables_of(const struct tlc_attn_args *a, int pos)
{
    return {a->rope + (int64_t)pos * a->finish.d, a->q_norm, a->k_norm};
}

/* head counts q heads, then k heads, then v heads; d: width of a head, a constant where the caller has one. */
static __device__ __forceinline__ void tlc_head_ready(const struct tlc_attn_args *a, float *x, int d, int place,
                                                      int head, struct tlc_head_tables t)
{
    struct tlc_head_finish f = a->finish;
    int64_t at = (int64_t)head * d;
    bool is_q = head < a->n_heads, is_v = head >= a->n_heads + a->n_kv_heads;
    tlc_head_load(x, a->qkv + place * a->ld + at, a->qkv_bias ? a->qkv_bias + at : nullptr, d);
    f.d = d;
    if (!is_v)
        tlc_head_finish_qk(x, a->qk_bias ? a->qk_bias + at : nullptr, is_q ? t.q_norm : t.k_norm, t.rope, f);
}

/* ---- tensor units, copies, clusters ---- */

static __device__ __forceinline__ uint8_t *tlc_shared()
{
    extern __shared__ uint4 tlc_shared_memory[];
    return (uint8_t *)tlc_shared_memory;
}

static __device__ __forceinline__ unsigned tlc_shared_address(const void *p)
{
    return (unsigned)__cvta_generic_to_shared(p);
}

/* 16 bytes to shared memory; zeros, and nothing is read, where !valid. */
static __device__ __forceinline__ void tlc_copy16(unsigned to, const void *src, bool valid)
{
    int n = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(src), "r"(n) : "memory");
}
static __device__ __forceinline__ void tlc_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> static __device__ __forceinline__ void tlc_copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Four 8x8 matrices; lane i gives the shared address of row i % 8 of matrix i / 8. */
static __device__ __forceinline__ void tlc_ldmatrix(uint32_t r[4], unsigned at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
static __device__ __forceinline__ void tlc_ldmatrix_t(uint32_t r[4], unsigned at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
/* c += a b: a [16 rows][16 k], b [16 k][8 columns]. */
static __device__ __forceinline__ void tlc_mma_f16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#define TLC_ONES 0x3c003c00u /* two halves of 1 */

static __device__ __forceinline__ uint32_t tlc_pack_half(float a, float b)
{
    __half2 h = __floats2half2_rn(a, b);
    return *(uint32_t *)&h;
}

/* Barrier of warps 2 i and 2 i + 1. */
static __device__ __forceinline__ void tlc_meet_pair()
{
    asm volatile("bar.sync %0, 64;" ::"r"(1 + threadIdx.x / 64) : "memory");
}

/* A barrier of n threads, of which some only say that what they wrote before is there, and the others wait for it. */
static __device__ __forceinline__ void tlc_meet_give(int barrier, int n)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(n) : "memory");
}
static __device__ __forceinline__ void tlc_meet_take(int barrier, int n)
{
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(n) : "memory");
}

/* An 8x8 matrix of halves, transposed across a warp. */
static __device__ __forceinline__ uint32_t tlc_transpose(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
/* Barriers that count bytes which other blocks of the cluster store here: by one thread, ... */
static __device__ __forceinline__ void tlc_inbox_init(uint64_t *bar)
{
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mbarrier.init.shared.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(tlc_shared_address(bar))
        : "memory");
#endif
}
static __device__ __forceinline__ void tlc_inbox_expect(uint64_t *bar, int bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(tlc_shared_address(bar)), "r"(bytes)
                 : "memory");
#endif
}
/* ... by all, for the bytes of round 0, 1, ... */
static __device__ __forceinline__ void tlc_inbox_wait(uint64_t *bar, int round)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n\t.reg .pred p;\n"
                 "again%=:\n\tmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n\t@!p bra again%=;\n\t}" ::"r"(
                     tlc_shared_address(bar)),
                 "r"(round & 1)
                 : "memory");
#endif
}
/* Store to a block's shared memory; its barrier `bar` counts the bytes once they are there. */
static __device__ __forceinline__ void tlc_far_put(unsigned to, unsigned bar, uint32_t v)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(v), "r"(bar)
                 : "memory");
#endif
}
static __device__ __forceinline__ void tlc_far_put(unsigned to, unsigned bar, float2 v)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(to),
                 "f"(v.x), "f"(v.y), "r"(bar)
                 : "memory");
#endif
}
static __device__ __forceinline__ void tlc_far_put(unsigned to, unsigned bar, float4 v)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
                 : "memory");
#endif
}
static __device__ __forceinline__ void tlc_far_store(const void *to, uint64_t *bar, int rank, float2 v)
{
    tlc_far_put(tlc_far_at(to, rank), tlc_far_at(bar, rank), v);
}

/* Shared address of this lane's 16-byte row in the ldmatrix, at row `row` and column `col` of rows of ld halves,
 * of an A operand [16][16]; of B operands of K [8 keys][32 d] (two steps of 16 in d), and of V [32 keys][8 d],
 * transposed (two steps in keys). */
static __device__ __forceinline__ unsigned tlc_at_a(unsigned base, int lane, int ld)
{
    return base + (unsigned)((lane & 15) * ld + (lane >> 4) * 8) * 2;
}
static __device__ __forceinline__ unsigned tlc_at_k(unsigned base, int lane, int ld)
{
    return base + (unsigned)((lane & 7) * ld + (lane >> 3) * 8) * 2;
}
static __device__ __forceinline__ unsigned tlc_at_v(unsigned base, int lane, int ld)
{
    return base + (unsigned)(lane * ld) * 2;
}

/* Which keys of pages are copied: [lo, hi); the others become zeros, but for `skip`, which is left alone. */
struct tlc_keys {
    int lo, hi, skip;
};

/* A page's K and V of one kv head to shared addresses k and v, both [64][D + 8]; by thread t of N. */
template <int D, int N>
static __device__ __forceinline__ void tlc_page_copy(unsigned k, unsigned v, const __half *page_k, int64_t v_at,
                                                     int block, struct tlc_keys keys, int t)
{
#pragma unroll(512 / N)
    for (int c = t; c < TLC_PAGE * D / 8; c += N) {
        int row = c / (D / 8), col = c % (D / 8) * 8, key = block * TLC_PAGE + row;
        unsigned to = (unsigned)(row * (D + 8) + col) * 2;
        bool valid = key >= keys.lo && key < keys.hi;
        if (key == keys.skip)
            continue;
        tlc_copy16(k + to, page_k + c * 8, valid);
        tlc_copy16(v + to, page_k + v_at + c * 8, valid);
    }
}
#endif

#endif
