/* cuda/solo.cuh - the layers of a step of one row, or two, as one kernel that stays on the device: what its parts share.
 *
 * One block per multiprocessor, all of them there at once. A layer is five phases: the qkv product, attention, the o product, the
 * up product, the down product. In each phase a block computes its tiles of the product and publishes their values. A published
 * value is one word of 64 bits, the number above and its epoch below, so that a reader asks for the value itself until it is the one
 * of this phase: no flags, no fences, no barriers of the grid. A buffer of values may be overwritten by its next phase because
 * whoever publishes there has, through the phases between, heard from every block that read it.
 *
 * What costs time is instructions: what all warps execute takes a cycle a warp and scheduler, and code that was not executed lately
 * is fetched at some 6 cycles an instruction. So every warp has one short task, over and over (SOLO_SUMS and so on):
 * - the feeder copies weights, and earlier keys and values, in the order of their use into a ring in shared memory, as far ahead as
 *   there is room (about a layer): they depend on nothing that is computed here (solo_feed.cuh);
 * - the row warps take in the values of others and make the row of the next product: residual, norm, quantising (solo_row.cuh);
 *   then they have their part of tiles that are left over (solo_part.cuh);
 * - the sum warps have the products, and attention, and publish what comes of them (solo_product.cuh, solo_attention.cuh).
 *
 * The blocks of a cluster share the making of the row: of C blocks, block r has what threads 512 / C * r and on of the 512 in
 * rows.cuh have. They tell each other the sum and the top of their parts, then the finished bytes, through the cluster's shared
 * memory. None of these buffers needs an answer before it is written again: a block gets that far only by values that all blocks
 * published after they had read them.
 *
 * Attention: a kv head is worked on by half a cluster, or, with more pages and where the grid has room, a whole one. Pages go round
 * among its blocks, and each folds its share of the columns of all terms, which come to it through the cluster's shared memory.
 *
 * A step may have SOLO_MANY rows instead, each of a sequence of its own, which go all ways together. They are R in what follows, and have
 * buffers, published values and blocks of attention of their own. Row and sum warps take them one behind the other, with the same
 * weights: while the sums of one are made, the values of another are on their way, and that is what a step waits for. So two rows take
 * 1.4 times as long as one, and not twice.
 *
 * Weights are integers; with BF16 ones, F, some things are done otherwise, and there is one row: solo_float.cuh.
 *
 * Bits are those of the other kernels: the law of device.cuh. TL_CUDA_ONE_KERNEL=0 in the environment turns it off, to compare
 * (tests/bench/results.md). Thread: worker. */
#ifndef TLC_SOLO_CUH
#define TLC_SOLO_CUH

#include <stddef.h>

#include "attention_impl.cuh"
#include "backend_impl.cuh"
#include "weights_ring.cuh"

#define SOLO_CLUSTER 8   /* blocks that share the making of rows */
#define SOLO_SHARES  4   /* of them, for a kv head: at least, and with few pages */
#define SOLO_NAP     100 /* ns between two looks at the values of attention; at others there is no pause */

/* The warps of a block. */
#define SOLO_WARPS      8 /* sum warps: first in the block */
#define SOLO_GROUP      4 /* of them, for a page of attention */
#define SOLO_ROW_WARPS  (TLC_READY_THREADS / 32 / SOLO_CLUSTER)
#define SOLO_SUMS       (32 * SOLO_WARPS)                   /* first thread behind the sum warps: of the row warps */
#define SOLO_FEEDS      (SOLO_SUMS + 32 * SOLO_ROW_WARPS)   /* the feeder */
#define SOLO_THREADS(R) (SOLO_FEEDS + ((R) == 1 ? 32 : 64)) /* of several rows, one more warp: solo_part.cuh */

#define SOLO_MANY  2 /* rows of a step, if it is not one; of some models: make_room() in solo.cu */
#define SOLO_SLOTS 10
#define SOLO_SLOT                                                                                                      \
    17408 /* bytes: half a page of KV with padded rows, or 1,024 inputs of an INT8 tile, 2,048 of an INT4 one */
#define SOLO_PAGES   3 /* of attention at most, for each block of a kv head: with more the chain of kernels is faster */
#define FLOAT_PAGES  8 /* the same with BF16 weights */
#define SOLO_TERMS   128  /* pages of attention times queries of a kv head, an even number */
#define MANY_TERMS   40   /* the same in steps of several rows, whose bytes lie where the others would be */
#define SOLO_ROW     6144 /* inputs of a product at most */
#define SOLO_ROUND   8    /* tiles whose sums are put together at once */
#define SOLO_OPS_MAX 400  /* layers of one launch */
#define SOLO_LAYERS  64   /* different ones */
#define SOLO_BLOCKS  256
#define SOLO_PAGES_MAX                                                                                                 \
    3072 /* entries of the row's page table that fit beside the arguments; at most 32,764 bytes in all */

struct solo_mat {
    const uint8_t *w; /* INT4: tiles of pack.cu; else rows */
    const float *row_scale;
    int n_out, n_tiles, k_pad, wtype;
    int each, more; /* n_tiles = each * blocks + more */
    int parts,
        part_at; /* tiles behind those, one for each of the first clusters; where this block's weights of them go */
};

enum { SOLO_QKV, SOLO_O, SOLO_UP, SOLO_DOWN, SOLO_MATS };
#define SOLO_PART(which) ((which) / 2) /* of o and down: in solo_parts; four times it is the block that ends it */

/* What is needed of a layer besides its weights. */
struct solo_brief {
    const float *row_scale[SOLO_MATS], *norm[6]; /* NULL = absent */
    const float *q_norm, *k_norm, *qkv_bias, *qk_bias;
    uint8_t wtype[8];
};
struct solo_layer {
    struct solo_mat mat[SOLO_MATS];
    struct solo_brief brief;
};

/* Buffers of published values; zero at first, and so is *epoch. */
struct solo_board {
    uint64_t *qkv, *att, *y, *h, *best; /* best: two words a block, the logit's order and the token */
    uint32_t *epoch;                    /* of the last phase of all launches before */
};

/* A row of the step. */
struct solo_row {
    const int32_t *pages; /* of slot s, block b: pages[s * stride + b] */
    int32_t stride, pos, window;
};

/* How a launch begins and ends. */
struct solo_ends {
    bool
        alone; /* the launch is the whole step: it needs no block of bytes, it makes x of the token, it chooses the best */
    int32_t token[SOLO_MANY], pos[SOLO_MANY], window[SOLO_MANY], stride[SOLO_MANY], pages_at[SOLO_MANY];
    const int8_t *embed8; /* the table of tokens: one of these, and the scales of INT8 */
    const uint16_t *embed16;
    const float *embed_row_scale, *head_norm;
    int64_t embed_ld;
    float embed_scale;
    bool head_has_norm;
    struct solo_mat head; /* n_tiles 0: the launch ends with the layers */
    float *logits;
    int32_t *best;            /* alone: the token that this step chooses, and a chained one of the step before */
    struct tlc_report report; /* alone: as in tlc_rows_best() */
    bool chooses;
};

enum { STEP_QKV, STEP_ATT, STEP_Y, STEP_H, STEP_BEST, STEPS }; /* as in solo_board */

struct solo_args {
    struct solo_ends ends;
    struct solo_board board;
    struct tlc_step step;
    const int32_t *set_rows;
    float *x; /* [rows][d_model] */
    const float *rope;
    struct tlc_head_finish finish;
    float eps, scale;
    int d_model, d_ff, n_heads, n_kv_heads, per_row;
    bool gated, has_qkv_bias, has_qk_bias;
    int n_layers, n_ops;
    uint32_t ops[SOLO_OPS_MAX];                   /* layer << 16 | slot */
    const struct solo_layer *layers;              /* device: arguments are short, for each block fetches them */
    struct solo_mat first;                        /* of the first op: its qkv product, at hand at once */
    int row_at[SOLO_MANY];                        /* bytes of the rows, from solo_common */
    int steps[STEPS];                             /* from a row's published values to the next row's */
    int32_t pages[SOLO_PAGES_MAX];                /* alone: of the rows */
    uint32_t loop_ends[(SOLO_OPS_MAX + 31) / 32]; /* bits of ops behind which the stream goes through loop_norm */
    const float *loop_norm;
    int shift[SOLO_MATS + 1]; /* first tile of a block, from its number on, round about */
};

/* The first tile of this block. Blocks with attention come first, and last at second tiles. */
__device__ static __forceinline__ int solo_first(const struct solo_args *a, int which)
{
    return (int)((gridDim.x - 1 - blockIdx.x + (uint32_t)a->shift[which]) % gridDim.x);
}

__device__ static __forceinline__ struct solo_row solo_row_of(const struct solo_args *a, int i)
{
    const struct solo_ends *e = &a->ends;
    struct solo_row r = {a->pages + e->pages_at[i], e->stride[i], e->pos[i], e->window[i]};
    if (e->alone)
        return r;
    struct tlc_row row = a->step.rows[a->set_rows[i]];
    struct tlc_seq seq = a->step.seqs[row.seq];
    r.pages = a->step.pages + seq.pages_at;
    r.stride = seq.stride;
    r.pos = row.pos;
    r.window = seq.window;
    return r;
}

/* A product of any layer. */
struct solo_shape {
    int n_in, k_pad, n_out, tiles;           /* tiles: of this block */
    int part, part_chunk, n_chunks, part_at; /* the cluster's tile, or -1; of it this block's chunks; of solo_mat */
};

/* What of the rows' attention a block has to do. */
struct solo_pages {
    const int32_t *pages; /* of slot s: pages + s * stride */
    int stride;
    int row;            /* of the step */
    int kv;             /* -1: nothing */
    int shares;         /* blocks of the kv head */
    int rank, first;    /* of this block's share; the first share's block in the cluster */
    int block0, block1; /* visible pages */
    int mine;           /* of them this block's */
    bool home;          /* the last of them is */
    int columns, bytes; /* of a head that this block folds; of terms that it gets */
    int lo, pos;
};

/* How many blocks work on a kv head when so many pages are visible. n_heads: kv heads of all rows. */
static inline __host__ __device__ int solo_shares(int n_heads, int grid, int pages)
{
    return pages > SOLO_SHARES && SOLO_CLUSTER * n_heads <= grid ? SOLO_CLUSTER : SOLO_SHARES;
}
static inline __host__ __device__ int solo_first_key(int pos, int window)
{
    return window > 0 && pos >= window ? pos - window + 1 : 0;
}
static inline __host__ __device__ int solo_n_pages(int pos, int window)
{
    return pos / TLC_PAGE + 1 - solo_first_key(pos, window) / TLC_PAGE;
}

template <int R> __device__ static __forceinline__ struct solo_pages solo_pages_of(const struct solo_args *a)
{
    struct solo_row row = solo_row_of(a, 0);
    struct solo_pages p;
    int block = (int)blockIdx.x, pages = solo_n_pages(row.pos, row.window), head;
    if (R > 1) {
#pragma unroll 1
        for (int i = 1; i < R; i++) { /* the same number of shares in all rows */
            row = solo_row_of(a, i);
            pages = max(pages, solo_n_pages(row.pos, row.window));
        }
    }
    p.shares = solo_shares(a->n_kv_heads * R, (int)gridDim.x, pages);
    head = block / p.shares;
    p.row = R > 1 ? min(head / a->n_kv_heads, R - 1) : 0;
    if (R > 1)
        row = solo_row_of(a, p.row);
    p.pages = row.pages;
    p.stride = row.stride;
    p.pos = row.pos;
    p.lo = solo_first_key(row.pos, row.window);
    p.block0 = p.lo / TLC_PAGE;
    p.block1 = row.pos / TLC_PAGE + 1;
    p.kv = head < a->n_kv_heads * R ? head - p.row * a->n_kv_heads : -1;
    p.rank = block % p.shares;
    p.first = block % SOLO_CLUSTER / p.shares * p.shares;
    p.mine = p.kv >= 0 ? (p.block1 - p.block0 - p.rank + p.shares - 1) / p.shares : 0;
    p.home = (p.block1 - 1 - p.block0) % p.shares == p.rank;
    p.columns = a->finish.d / p.shares;
    p.bytes = (p.block1 - p.block0) * ((a->per_row + 1) / 2) * (p.columns * 8 + 16);
    return p;
}

/* What products need; the ring is in front of it. */
struct solo_common {
    uint64_t full[SOLO_SLOTS], empty[SOLO_SLOTS];
    uint64_t told[2], ready[SOLO_MANY]; /* parts of a row, by turns; the rows */
    alignas(16) float2 parts[2][16];    /* of the warps of rows.cuh, read by pairs */
    alignas(16) int8_t row[SOLO_ROW];   /* the first one, see row_at */
    float scale[SOLO_MANY];             /* of the rows */
    alignas(16) __half zero[24];        /* for what is not there: values of later keys, a row's end */
    int sums[SOLO_ROUND][SOLO_WARPS][16];
    int first[SOLO_MATS + 1]; /* tile of this block */
    uint32_t loop_ends[(SOLO_OPS_MAX + 31) / 32];
};
#define SOLO_AT(member) ((uint32_t)offsetof(struct solo_common, member))

template <int D> struct solo_shared : solo_common {
    uint64_t inbox; /* of terms */
    unsigned long long best[SOLO_MANY * SOLO_WARPS];
    float4 scores[SOLO_WARPS / SOLO_GROUP][SOLO_GROUP][32];
    alignas(16) __half q[TLC_ROW_Q][D + 8];
    alignas(16) __half k_new[D], v_new[D];
    float2 turn[D / 2]; /* cosine and sine of the row's angles */
    struct solo_pages pages;
    float4 ml[SOLO_TERMS / 2];              /* [term][pair of queries]: m, l of one and of the other */
    struct solo_shape shape[SOLO_MATS + 1]; /* the last: of the head */
    struct solo_brief brief[SOLO_LAYERS + 1];
    uint32_t ops[SOLO_OPS_MAX + 1];
};

/* Behind it: the terms of attention [term][pair of queries][columns of this block][2]. */
#define SOLO_ACC(D) (SOLO_TERMS * (D) / SOLO_SHARES)
template <int D> __device__ static __forceinline__ float *solo_acc(struct solo_shared<D> *s)
{
    return (float *)(s + 1);
}

/* Behind them, with BF16 weights: what odd turns have for themselves (solo_float.cuh). */
#define FLOAT_SLICE 256
#define FLOAT_HERE  (4 * SOLO_CLUSTER) /* bytes in front of a row */
struct solo_odd {
    uint64_t full[SOLO_SLOTS], ready;
    alignas(16) int8_t row[FLOAT_HERE + SOLO_ROW * 2];
};
template <int D> __device__ static __forceinline__ struct solo_odd *solo_odd_of(struct solo_shared<D> *s)
{
    return (struct solo_odd *)(solo_acc<D>(s) + SOLO_ACC(D));
}

/* Or, with integers: a tile of which each block of the cluster has the sums of an eighth of the inputs (solo_part.cuh); of an o and of
 * a down product. Their weights are behind it, as far as there is room. */
#define PART_CHUNKS   (2 * SOLO_ROW / 64 / SOLO_CLUSTER) /* of both, for a block, at most */
#define PART_CHUNK    528                                /* bytes */
#define PART_WARPS(R) ((R) == 1 ? SOLO_ROW_WARPS : 1)    /* that make the sums */
#define PART_LEAST    2048                               /* inputs: tiles of more are shared */
struct solo_parts {
    uint64_t full[2], empty[2], inbox[SOLO_MANY];
    alignas(16) int sums[SOLO_MANY * SOLO_CLUSTER * PART_WARPS(SOLO_MANY)][16];
};
static_assert(PART_WARPS(1) <= SOLO_MANY * PART_WARPS(SOLO_MANY), "sums");
template <int D> __device__ static __forceinline__ struct solo_parts *solo_parts_of(struct solo_shared<D> *s)
{
    return (struct solo_parts *)(solo_acc<D>(s) + SOLO_ACC(D));
}
__device__ static __forceinline__ uint8_t *part_weights(struct solo_parts *p) { return (uint8_t *)(p + 1); }

/* The product that comes next, as all kinds of warps go through them: four a layer, then the head. */
struct solo_turn {
    int i, layer, which; /* i: from 0 */
    uint32_t epoch;      /* of what the layers before published last */
};
__device__ static __forceinline__ void solo_next_turn(struct solo_turn *t)
{
    t->i++;
    if (++t->which == SOLO_MATS) {
        t->which = SOLO_QKV;
        t->layer++;
        t->epoch += 5;
    }
}

/* ---- shared memory by address: a pointer would be made from the block's place in its cluster again and again ---- */

__device__ static __forceinline__ uint4 solo_load16(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ static __forceinline__ void solo_store16(uint32_t at, const float v[4])
{
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
}
__device__ static __forceinline__ uint2 solo_load8(uint32_t at)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}
__device__ static __forceinline__ int solo_load1(uint32_t at)
{
    int v;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
__device__ static __forceinline__ void solo_store1(uint32_t at, int v)
{
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
__device__ static __forceinline__ uint32_t solo_load_byte(uint32_t at)
{
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ static __forceinline__ void solo_wait(uint32_t bar, uint32_t parity)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n\t.reg .pred p;\n"
                 "again%=:\n\tmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n\t@!p bra again%=;\n\t}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
#endif
}
__device__ static __forceinline__ void solo_arrive(uint32_t bar)
{
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" ::"r"(bar) : "memory");
}
/* For n warps. */
template <int N> __device__ static __forceinline__ void solo_arrive_all(uint32_t bar)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0], %1; }" ::"r"(bar), "n"(N) : "memory");
#endif
}

/* Waits for turn n of a pair of barriers that have the turns by turns. */
__device__ static __forceinline__ void float_wait(uint32_t bar, uint32_t turn) { solo_wait(bar, turn >> 1 & 1); }

/* A place in the ring; the feeder and those who compute each keep one and move it alike. */
struct solo_at {
    int slot;
    uint32_t turn; /* parity; with BF16 weights, F, the number */
};

template <bool F = false> __device__ static __forceinline__ void solo_next(struct solo_at *at, int n = 1)
{
    at->slot += n;
    while (at->slot >= SOLO_SLOTS) {
        at->slot -= SOLO_SLOTS;
        if (F)
            at->turn++;
        else
            at->turn ^= 1;
    }
}
/* By one, without a branch; not with BF16 weights. */
__device__ static __forceinline__ void solo_step(struct solo_at *at)
{
    bool over = ++at->slot == SOLO_SLOTS;
    at->slot = over ? 0 : at->slot;
    at->turn ^= over;
}

/* Waits until the slot is filled. */
template <int D, bool F>
__device__ static __forceinline__ void solo_wait_slot(struct solo_shared<D> *s, struct solo_at at)
{
    if (F)
        float_wait(shared_at((at.turn & 1 ? solo_odd_of<D>(s)->full : s->full) + at.slot), at.turn);
    else
        bar_wait(s->full + at.slot, at.turn);
}

/* All sum warps. */
__device__ static __forceinline__ void solo_barrier() { asm volatile("bar.sync 2, %0;" ::"n"(SOLO_SUMS) : "memory"); }

/* ---- what nobody writes ----
 * Asked for where it stands: the compiler may move other loads to their use, behind a wait. */

__device__ static __forceinline__ float solo_ask(const float *p)
{
    float v;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}
__device__ static __forceinline__ float4 solo_ask4(const float *p)
{
    float4 v;
    asm volatile("ld.global.nc.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
    return v;
}

/* A value that the compiler knows nothing about. */
__device__ static __forceinline__ void solo_opaque(uint32_t *v) { asm volatile("" : "+r"(*v)); }

/* ---- published values ---- */

__device__ static __forceinline__ void solo_publish(uint64_t *to, float v, uint32_t epoch)
{
    uint64_t word = (uint64_t)__float_as_uint(v) << 32 | epoch;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

/* Where value j of a row that row warps take is published: of 32 quadruples the first halves, then the second ones, so that what a
 * warp asks for at once is in one piece. */
__device__ static __forceinline__ int solo_place(int j)
{
    return (j & ~127) + (j & 2) * 32 + (j >> 2 & 31) * 2 + (j & 1);
}

__device__ static __forceinline__ void solo_look2(const uint64_t *from, uint64_t *a, uint64_t *b)
{
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(*a), "=l"(*b) : "l"(from) : "memory");
}
__device__ static __forceinline__ uint64_t solo_look(const uint64_t *from)
{
    uint64_t a;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(a) : "l"(from) : "memory");
    return a;
}

__device__ static __forceinline__ float solo_value(uint64_t word) { return __uint_as_float((uint32_t)(word >> 32)); }

/* A wait that does not end is a fault of ours or of the device; better a failed launch than a device that hangs. */
#define SOLO_LOOKS (1 << 24)
__device__ static __forceinline__ void solo_patience(int *looks)
{
    if (++*looks == SOLO_LOOKS)
        asm volatile("trap;");
}

/* ---- shared memory of the cluster ---- */

__device__ static __forceinline__ uint32_t solo_far(uint32_t at, int rank)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
#endif
    return at;
}

__device__ static __forceinline__ void solo_expect(uint32_t bar, int bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
#endif
}

#endif
