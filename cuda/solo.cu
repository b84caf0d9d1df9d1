/* The kernel of solo.cuh, and its launch. */
#include "solo_warps.cuh"

#include <stdlib.h>
#include <string.h>

/* F: weights are BF16, else integers; Q: some are INT4. */
template <int D, int QX, int QH, bool F, bool Q, int R>
__global__ static void __launch_bounds__(SOLO_THREADS(R), 1) solo_kernel(const __grid_constant__ struct solo_args a)
{
#if __CUDA_ARCH__ >= 900
    uint8_t *ring = tlc_shared();
    tlc_go(); /* a launch behind this one finds no room before it ends, and then starts at once */
    struct solo_shared<D> *s = (struct solo_shared<D> *)(ring + SOLO_SLOTS * SOLO_SLOT);
    if (threadIdx.x / 32 == SOLO_FEEDS / 32) {
        /* The ring is this block's alone: the first weights need not wait for the cluster. */
        int i = threadIdx.x - SOLO_FEEDS;
        if (i < SOLO_SLOTS) {
            bar_init(s->full + i, 1);
            bar_init(s->empty + i, F ? 2 : SOLO_WARPS);
            if (F)
                bar_init(solo_odd_of<D>(s)->full + i, 1);
        }
        if (!F && i < 2) {
            bar_init(solo_parts_of<D>(s)->full + i, 1);
            bar_init(solo_parts_of<D>(s)->empty + i, PART_WARPS(R) * R);
        }
        if (!F && i < R)
            bar_init(solo_parts_of<D>(s)->inbox + i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        __syncwarp();
        tlc_cluster_arrive();
        feed<D, F, R>(&a, s, ring);
    } else {
        int i = threadIdx.x;
        if (i < R + 3)
            bar_init(i < R ? s->ready + i : i < R + 2 ? s->told + i - R : &s->inbox, 1);
        if (F && i == R + 3)
            bar_init(&solo_odd_of<D>(s)->ready, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        tlc_cluster_arrive();
        brief<D>(&a, s);
        tlc_cluster_wait();
        tlc_wait();
        uint32_t epoch = *(volatile uint32_t *)a.board.epoch;
        if (threadIdx.x < SOLO_SUMS)
            multiply<D, F, Q, R>(&a, s, ring, epoch);
        else if (R == 1 || threadIdx.x < SOLO_FEEDS)
            make_rows<D, QX, QH, F, Q, R>(&a, s, epoch);
        else
            make_parts<D, R>(&a, s, epoch);
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
    solo_fn fn, fn_many;        /* of one row, of SOLO_MANY; NULL: there is none */
    size_t shared, shared_many; /* bytes of a block */
    uint8_t *board;             /* device */
    int grid;
    struct solo_layer layers[SOLO_LAYERS]; /* a copy is on the device, behind the board */
    struct solo_args args;                 /* of the launch at hand; most of it never changes */
};

/* Of two rows: no more than was held against one row on a card. */
#define INTEGERS(X, Q)                                                                                                 \
    X(64, 1, 1, false, Q, 1)                                                                                           \
    X(64, 1, 3, false, Q, 1)                                                                                           \
    X(64, 3, 3, false, Q, 1)                                                                                           \
    X(128, 1, 3, false, Q, 1)                                                                                          \
    X(128, 3, 3, false, Q, 1)                                                                                          \
    X(128, 1, 3, false, Q, SOLO_MANY)
#define KERNELS(X)                                                                                                     \
    INTEGERS(X, false)                                                                                                 \
    INTEGERS(X, true)                                                                                                  \
    X(64, 1, 3, true, false, 1)                                                                                        \
    X(128, 1, 3, true, false, 1)

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

/* r: 1 or SOLO_MANY. shared: bytes, without what lies behind solo_parts. */
static solo_fn kernel_of(const struct tl_net *net, int r, size_t *shared)
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
#define X(D, QX, QH, F, Q, R)                                                                                          \
    if (d == D && qx == QX && qh == QH && f == F && q == Q && r == R) {                                                \
        *shared = (size_t)SOLO_SLOTS * SOLO_SLOT + sizeof(struct solo_shared<D>) + SOLO_ACC(D) * sizeof(float) +       \
                  (F ? sizeof(struct solo_odd) : sizeof(struct solo_parts));                                           \
        return solo_kernel<D, QX, QH, F, Q, R>;                                                                        \
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
static cudaError_t grid_of(solo_fn fn, int threads, size_t shared, int *grid)
{
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute at;
    int clusters = 0;
    cudaError_t e = cudaFuncSetAttribute((const void *)fn, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    at.id = cudaLaunchAttributeClusterDimension;
    at.val.clusterDim.x = SOLO_CLUSTER;
    at.val.clusterDim.y = at.val.clusterDim.z = 1;
    c.gridDim = dim3(SOLO_CLUSTER);
    c.blockDim = dim3((unsigned)threads);
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
 * memory has room for; without it o's stay what they were, then down's. Returns how many it takes. */
static int part(struct tlc_solo *s, int room)
{
    int at = 0;
    for (int which = SOLO_DOWN; which > 0; which -= SOLO_DOWN - SOLO_O) {
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
    return at;
}

/* Are there steps of several rows? Each has blocks of its own for attention. They lie behind its terms, which have less room then, or behind
 * all else: `end`, bytes of a block. Norms of what a product adds, or behind a loop, are left to one row: see KERNELS. */
static cudaError_t make_room(struct tlc_solo *s, size_t end, size_t shared_max)
{
    const struct tl_arch_spec *spec = &s->net->spec;
    size_t base = (size_t)SOLO_SLOTS * SOLO_SLOT, terms, terms_end, k = 0;
    int grid = 0, *at = s->args.row_at;
    solo_fn fn = kernel_of(s->net, SOLO_MANY, &terms_end);
    if (!fn || SOLO_MANY * SOLO_SHARES * spec->n_kv_heads > s->grid || s->args.loop_norm)
        return cudaSuccess;
    for (int i = 0; i < s->args.n_layers; i++)
        if (s->layers[i].brief.norm[1] || s->layers[i].brief.norm[4])
            return cudaSuccess;
    for (int i = 0; i < SOLO_MATS; i++)
        k = max(k, (size_t)s->layers[0].mat[i].k_pad);
    terms_end -= sizeof(struct solo_parts);
    terms = terms_end - (size_t)((SOLO_TERMS - MANY_TERMS) * spec->d_head / SOLO_SHARES) * sizeof(float);
    at[0] = (int)SOLO_AT(row);
    for (int i = 1; i < SOLO_MANY; i++) {
        size_t *from = terms + k <= terms_end ? &terms : &end;
        at[i] = (int)(*from - base);
        *from += k;
    }
    if (end > shared_max)
        return cudaSuccess;
    s->shared_many = max(end, s->shared);
    cudaError_t e = grid_of(fn, SOLO_THREADS(SOLO_MANY), s->shared_many, &grid);
    s->fn_many = e == cudaSuccess && grid >= s->grid ? fn : NULL;
    return e;
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
    size_t best = (2 * (size_t)s->grid + 127) / 128 * 128, step[] = {qkv, att, d, h, best};
    bytes = ((qkv + att + d + h + best) * SOLO_MANY + 32) * sizeof(uint64_t);
    cudaError_t e = cudaMalloc((void **)&s->board, bytes + sizeof(s->layers));
    if (e == cudaSuccess)
        e = cudaMemsetAsync(s->board, 0, bytes, stream); /* in front of the first launch */
    if (e == cudaSuccess)
        e = cudaMemcpyAsync(s->board + bytes, s->layers, sizeof(s->layers), cudaMemcpyHostToDevice, stream);
    s->args.layers = (const struct solo_layer *)(s->board + bytes);
    struct solo_board *to = &s->args.board;
    uint64_t **buffer[] = {&to->qkv, &to->att, &to->y, &to->h, &to->best}, *next = (uint64_t *)s->board;
    for (int i = 0; i < STEPS; i++) {
        *buffer[i] = next;
        s->args.steps[i] = (int)step[i];
        next += step[i] * SOLO_MANY;
    }
    to->epoch = (uint32_t *)next;
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
    solo_fn fn = kernel_of(net, 1, &shared);
    if (!fn || shared > c->shared_max)
        return cudaSuccess;
    room = is_float(net) ? 0 : min((int)((c->shared_max - shared) / PART_CHUNK), PART_CHUNKS);
    size_t least = shared;
    shared += (size_t)room * PART_CHUNK;
    cudaError_t e = grid_of(fn, SOLO_THREADS(1), shared, &grid);
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
    least += (size_t)part(s, room) * PART_CHUNK;
    spread(&s->args, s->layers[0].mat, s->grid);
    e = make_room(s, (least + 15) / 16 * 16, c->shared_max);
    if (e == cudaSuccess)
        e = make_board(s, c->stream);
    if (e != cudaSuccess) {
        tlc_solo_free(s);
        return e;
    }
    *out = s;
    return cudaSuccess;
}

/* Do all rows go all ways together, each of a sequence of its own? */
static bool in_step(const struct tl_step *step)
{
    for (int i = 0; i < step->n_sets; i++)
        for (int j = 0; j < step->sets[i].n; j++)
            if (step->sets[i].n != step->n_rows || step->sets[i].rows[j] != j)
                return false;
    for (int i = 0; i < step->n_rows; i++)
        for (int j = 0; j < i; j++)
            if (step->rows[i].seq == step->rows[j].seq)
                return false;
    return true;
}

bool tlc_solo_takes(const struct tlc_solo *s, const struct tl_step *step)
{
    int rows = step->n_rows, pages = 0;
    if (!s || step->net != s->net || step->kv.format != TL_KV_F16 ||
        !(rows == 1 || (rows == SOLO_MANY && s->fn_many && in_step(step))))
        return false;
    const struct tl_arch_spec *spec = &s->net->spec;
    for (int i = 0; i < rows; i++)
        pages = max(pages, solo_n_pages(step->rows[i].pos, step->seqs[step->rows[i].seq].window));
    return pages <=
               (is_float(s->net) ? FLOAT_PAGES : SOLO_PAGES) * solo_shares(spec->n_kv_heads * rows, s->grid, pages) &&
           pages * ((spec->n_heads / spec->n_kv_heads + 1) / 2 * 2) <= (rows > 1 ? MANY_TERMS : SOLO_TERMS);
}

static cudaError_t launch(const struct tlc_launch *l, struct tlc_solo *s, int rows)
{
    bool many = rows > 1;
    return tlc_launch_cluster(l, many ? s->fn_many : s->fn, SOLO_CLUSTER, dim3((unsigned)s->grid),
                              dim3(many ? SOLO_THREADS(SOLO_MANY) : SOLO_THREADS(1)), many ? s->shared_many : s->shared,
                              s->args);
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
    bool head = next && next->kind == TL_OP_HEAD && call->step->sets[next->set].n == call->step->n_rows &&
                mat_fits(s->net->head, is_float(s->net));
    a->step = call->view;
    a->set_rows = call->set.rows;
    a->x = call->x;
    a->ends.alone = a->ends.chooses = false;
    a->ends.head = head ? mat_of(s->net->head, s->grid) : (struct solo_mat){};
    a->ends.logits = call->logits;
    *n_ops = n + head;
    *has_head = head;
    return launch(l, s, call->step->n_rows);
}

/* The ops in the order EMBED, layers, HEAD, perhaps BEST, and nothing else? Fills in the arguments. */
bool tlc_solo_is_all(struct tlc_solo *s, const struct tl_step *step)
{
    struct solo_args *a = &s->args;
    const struct tl_net *net = s->net;
    struct solo_ends *ends = &a->ends;
    int slots = 0, n = 0, i = 0;
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
    for (int r = 0; r < step->n_rows; r++) {
        const struct tl_step_seq *seq = &step->seqs[step->rows[r].seq];
        int blocks = step->rows[r].pos / TL_BLOCK_TOKENS + 1;
        if ((int64_t)slots * blocks > SOLO_PAGES_MAX - n)
            return false;
        ends->token[r] = step->rows[r].token;
        ends->pos[r] = step->rows[r].pos;
        ends->window[r] = seq->window;
        ends->stride[r] = blocks;
        ends->pages_at[r] = n;
        for (int j = 0; j < slots; j++, n += blocks)
            memcpy(a->pages + n, seq->pages + (int64_t)j * seq->stride, (size_t)blocks * sizeof(int32_t));
    }
    a->ends.alone = true;
    a->ends.head = mat_of(net->head, s->grid);
    return true;
}

cudaError_t tlc_solo_step(const struct tlc_launch *l, struct tlc_solo *s, int n_rows, const struct tlc_step *view,
                          float *x, float *logits, int32_t *best, const struct tlc_report *report)
{
    struct solo_args *a = &s->args;
    a->step = *view;
    a->x = x;
    a->ends.logits = logits;
    a->ends.best = best;
    a->ends.report = *report;
    return launch(l, s, n_rows);
}
