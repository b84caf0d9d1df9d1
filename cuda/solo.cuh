/* cuda/solo.cuh - the layers of a step of one row as one kernel that stays on the device: what its parts share.
 *
 * One block per multiprocessor, all of them there at once. A layer is five phases: the qkv product, attention, the o product, the
 * up product, the down product. In each phase a block computes its tiles of the product and publishes their values; every block
 * takes in whole rows of what others published and makes them ready by itself (norm, quantising). A published value is one word
 * of 64 bits, the number above and its epoch below, so that a reader asks for the value itself until it is the one of this phase:
 * no flags, no fences, no barriers of the grid. A buffer of values may be overwritten by its next phase because whoever publishes
 * there has, through the phases between, heard from every block that read it.
 *
 * What costs time is instructions: what is executed by all warps takes a cycle a warp and scheduler, and code that was not executed
 * lately is fetched at some 6 cycles an instruction. So all products share one short code, what it needs of a layer lies in shared
 * memory, and one warp waits for the others.
 *
 * Weights and earlier keys and values depend on nothing that is computed here. One warp of each block, the feeder, copies them in
 * the order of their use into a ring in shared memory, as far ahead as there is room (about a layer).
 *
 * Attention: a kv head is worked on by the four blocks of a cluster; pages go round among them, and each folds a quarter of the
 * columns of all terms, which come to it through the cluster's shared memory.
 *
 * Bits are those of the other kernels: the law of device.cuh. Not the default: TL_CUDA_ONE_KERNEL=1 in the environment asks for
 * it. An earlier form passed the exactness suite on a card, this one has only been timed there (tests/bench/results.md).
 * Thread: worker. */
#ifndef TLC_SOLO_CUH
#define TLC_SOLO_CUH

#include "attention_impl.cuh"
#include "backend_impl.cuh"
#include "weights_ring.cuh"

#define SOLO_CLUSTER   4
#define SOLO_NAP       32                       /* ns between two looks at values that are not there */
#define SOLO_WARPS     (TLC_READY_THREADS / 32) /* that compute; one more is the feeder */
#define SOLO_THREADS   (TLC_READY_THREADS + 32)
#define SOLO_SLOTS(QX) ((QX) == 1 ? 8 : 7)
#define SOLO_SLOT      17408 /* bytes: half a page of KV with padded rows, or 1,024 inputs of a tile */
#define SOLO_TILES     8     /* of a block, summed up at once */
#define SOLO_TERMS     128   /* pages of attention times queries of a kv head */
#define SOLO_OPS_MAX   400   /* layers of one launch */
#define SOLO_LAYERS    64    /* different ones */
#define SOLO_PAGES_MAX                                                                                                 \
    3072 /* entries of the row's page table that fit beside the arguments; at most 32,764 bytes in all */

struct solo_mat {
    const uint8_t *w; /* INT4: tiles of pack.cu; INT8: rows */
    const float *row_scale;
    int n_out, n_tiles, k_pad, wtype;
    int each, more; /* n_tiles = each * blocks + more */
};

enum { SOLO_QKV, SOLO_O, SOLO_UP, SOLO_DOWN, SOLO_MATS };

struct solo_layer {
    struct solo_mat mat[SOLO_MATS];
    const float *norm[6]; /* NULL = absent */
    const float *q_norm, *k_norm, *qkv_bias, *qk_bias;
};

/* Buffers of published values; zero at first, and so is *epoch. */
struct solo_board {
    uint64_t *qkv, *att, *y, *h, *best; /* best: two words a block, the logit's order and the token */
    uint32_t *epoch;                    /* of the last phase of all launches before */
};

/* The row of the step. */
struct solo_row {
    const int32_t *pages; /* of slot s, block b: pages[s * stride + b] */
    int32_t stride, pos, window;
};

/* How a launch begins and ends. */
struct solo_ends {
    bool
        alone; /* the launch is the whole step: it needs no block of bytes, it makes x of the token, it chooses the best */
    int32_t token, pos, window, stride;
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
    uint32_t ops[SOLO_OPS_MAX];            /* layer << 16 | slot */
    struct solo_layer layers[SOLO_LAYERS]; /* here they are read from the constant cache */
    int32_t pages[SOLO_PAGES_MAX];         /* alone: of the row */
};

__device__ static __forceinline__ const struct solo_layer *solo_layer_of(const struct solo_args *a, int op)
{
    return &a->layers[a->ops[op] >> 16];
}

__device__ static __forceinline__ struct solo_row solo_row_of(const struct solo_args *a)
{
    struct solo_row r = {a->pages, a->ends.stride, a->ends.pos, a->ends.window};
    if (a->ends.alone)
        return r;
    struct tlc_row row = a->step.rows[a->set_rows[0]];
    struct tlc_seq seq = a->step.seqs[row.seq];
    r.pages = a->step.pages + seq.pages_at;
    r.stride = seq.stride;
    r.pos = row.pos;
    r.window = seq.window;
    return r;
}

/* What the warps that compute need of a layer, and of a product of any layer. */
struct solo_brief {
    const float *row_scale[SOLO_MATS], *norm[6];
    uint8_t wtype[8];
};
struct solo_shape {
    int n_in, k_pad, n_out, tiles; /* tiles: of this block */
};

template <int D> struct solo_shared {
    uint64_t full[SOLO_SLOTS(1)], empty[SOLO_SLOTS(1)];
    uint64_t inbox;   /* of terms */
    uint64_t rows[3]; /* of the rows y, att, h */
    float2 red[2][16];
    float scale;
    int part[SOLO_WARPS][SOLO_TILES * 16];
    union {
        uint8_t row[8192];                    /* the row of a product, as int8 */
        float4 scores[SOLO_WARPS / 4][4][32]; /* of a page at a time, or of several */
    };
    __half q[TLC_ROW_Q][D + 8];
    __half k_new[D], v_new[D];
    float2 ml[SOLO_TERMS]; /* [term][query] */
    struct solo_shape shape[SOLO_MATS];
    struct solo_brief brief[SOLO_LAYERS];
    uint32_t ops[SOLO_OPS_MAX];
};

/* Behind it: the terms of attention [term][query][columns of this block]; the values of the row at hand [2048 QH]; the stream x
 * [2048 QX], the same in every block. */
enum { SOLO_Y, SOLO_ATT, SOLO_H };
#define SOLO_ACC(D) (SOLO_TERMS * (D) / SOLO_CLUSTER)
template <int D> __device__ static __forceinline__ float *solo_acc(struct solo_shared<D> *s)
{
    return (float *)(s + 1);
}

/* ---- shared memory by address: a pointer would be made from the block's place in its cluster again and again ---- */

__device__ static __forceinline__ uint32_t solo_base()
{
    uint32_t at = shared_at(tlc_shared());
    asm volatile("mov.u32 %0, %0;" : "+r"(at));
    return at;
}
__device__ static __forceinline__ uint4 solo_load16(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ static __forceinline__ float4 solo_load4f(uint32_t at)
{
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at));
    return v;
}
__device__ static __forceinline__ void solo_store4f(uint32_t at, float4 v)
{
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ static __forceinline__ uint2 solo_load8(uint32_t at)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}
__device__ static __forceinline__ uint32_t solo_load2(uint32_t at)
{
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
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

/* A place in the ring; the feeder and those who compute each keep one and move it alike. */
struct solo_at {
    int slot;
    uint32_t turn; /* parity */
};

template <int SLOTS> __device__ static __forceinline__ void solo_next(struct solo_at *at, int n = 1)
{
    at->slot += n;
    if (at->slot >= SLOTS) {
        at->slot -= SLOTS;
        at->turn ^= 1;
    }
}

/* What of the row's attention a block has to do. */
struct solo_pages {
    const int32_t *pages; /* of the slot */
    int kv;               /* -1: nothing */
    int rank;
    int block0, block1; /* visible pages */
    int lo, pos;
};

__device__ static __forceinline__ struct solo_pages solo_pages_of(const struct solo_args *a, const struct solo_row *row,
                                                                  int slot)
{
    struct solo_pages p;
    int cluster = (int)blockIdx.x / SOLO_CLUSTER;
    p.pages = row->pages + (int64_t)slot * row->stride;
    p.kv = cluster < a->n_kv_heads ? cluster : -1;
    p.rank = (int)blockIdx.x % SOLO_CLUSTER;
    p.pos = row->pos;
    p.lo = row->window > 0 && row->pos >= row->window ? row->pos - row->window + 1 : 0;
    p.block0 = p.lo / TLC_PAGE;
    p.block1 = row->pos / TLC_PAGE + 1;
    return p;
}

/* ---- published values ---- */

__device__ static __forceinline__ void solo_publish(uint64_t *to, float v, uint32_t epoch)
{
    uint64_t word = (uint64_t)__float_as_uint(v) << 32 | epoch;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
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

/* A row of n values (a multiple of 4) to shared memory at `to`: every block of the cluster asks for a part of it and passes that on
 * to all of them, so that the same values are not asked for by every block. bar counts what has arrived; turn: how often before. */
__device__ static __forceinline__ void solo_take_row(const uint64_t *from, int n, uint32_t epoch, uint32_t to,
                                                     uint32_t bar, int turn)
{
#if __CUDA_ARCH__ >= 900
    int t = threadIdx.x, quads = n / 4, share = (quads + SOLO_CLUSTER - 1) / SOLO_CLUSTER;
    int quad = (int)(blockIdx.x % SOLO_CLUSTER) * share + t, looks = 0;
    if (t == TLC_READY_THREADS - 32)
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(n * 4) : "memory");
    if ((t & ~31) < share) {
        bool mine = t < share && quad < quads, there;
        uint64_t w[4] = {};
        from += 4 * quad;
        while (true) {
            if (mine) {
                solo_look2(from, &w[0], &w[1]);
                solo_look2(from + 2, &w[2], &w[3]);
            }
            there = !mine || ((uint32_t)w[0] == epoch && (uint32_t)w[1] == epoch && (uint32_t)w[2] == epoch &&
                              (uint32_t)w[3] == epoch);
            if (__all_sync(0xffffffffu, there))
                break;
            __nanosleep(SOLO_NAP); /* the reads of those who wait must not be in the way of those who work */
            solo_patience(&looks);
        }
        if (mine) {
#pragma unroll
            for (int rank = 0; rank < SOLO_CLUSTER; rank++) {
                uint32_t far, far_bar;
                asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                             : "=r"(far)
                             : "r"(to + 16 * (uint32_t)quad), "r"(rank));
                asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far_bar) : "r"(bar), "r"(rank));
                asm volatile(
                    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                        far),
                    "r"((uint32_t)(w[0] >> 32)), "r"((uint32_t)(w[1] >> 32)), "r"((uint32_t)(w[2] >> 32)),
                    "r"((uint32_t)(w[3] >> 32)), "r"(far_bar)
                    : "memory");
            }
        }
    }
    if (t / 32 == SOLO_WARPS - 1)
        solo_wait(bar, (uint32_t)turn & 1);
    tlc_ready_barrier();
#endif
}

#endif
