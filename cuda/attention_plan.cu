/* Which rows attend together, over which pages: the host's part of attention. */
#include "attention_impl.cuh"

#include <stdlib.h>
#include <string.h>

struct group { /* rows with common pages [0, blocks) */
    int leader, n, blocks, entry0;
};

struct plan {
    const struct tl_arch_spec *spec;
    const struct tl_step *step;
    const struct tl_row_set *set;
    size_t shared_max; /* of the device */
    int index;         /* of the set */
    int per_row;
    struct tlc_attn_head *head;
    struct tlc_attn_entry *entries;
    int n_entries;
    struct tlc_attn_item *items;
    int n_items;
    bool sorted; /* the step's rows are grouped by sequence, in ascending order: what the engine does */
    struct group groups[TLC_SHARED_ROWS];
    int n_groups;
    int16_t group_of[TLC_SHARED_ROWS]; /* by place in the set; -1 = none */
    int n_terms;
    bool terms_only; /* there are rows all of whose pages are stored as terms */
};

static int seq_of(const struct plan *p, int place) { return p->step->rows[p->set->rows[place]].seq; }
static int pos_of(const struct plan *p, int place) { return p->step->rows[p->set->rows[place]].pos; }
static int lo_of(const struct plan *p, int place)
{
    int win = p->step->seqs[seq_of(p, place)].window, pos = pos_of(p, place);
    return win > 0 && pos >= win ? pos - win + 1 : 0;
}

static bool tiled(const struct plan *p)
{
    return p->step->kv.format == TL_KV_F16 && tlc_tiles_fit(p->spec->d_head, p->shared_max);
}

size_t tlc_attn_plan_bytes(const struct tl_arch_spec *spec, int rows_max)
{
    (void)spec;
    size_t rows = (size_t)rows_max + (size_t)(rows_max < TLC_SHARED_ROWS ? rows_max : TLC_SHARED_ROWS);
    size_t bytes = sizeof(struct tlc_attn_head) + rows * (sizeof(struct tlc_attn_entry) + sizeof(struct tlc_attn_item));
    return (bytes + 255) / 256 * 256;
}

size_t tlc_attn_scratch_bytes(const struct tl_arch_spec *spec, int rows_max)
{
    (void)rows_max;
    return (size_t)TLC_TERMS * (size_t)spec->n_heads * (size_t)(spec->d_head + TLC_TERM_PAD) * sizeof(float);
}

#define NO_TERMS   INT32_MIN
#define STORED_RUN 48 /* rows of a run whose terms are stored, at least */

/* Rows from place i on that are neighbours of one sequence. */
static int run_at(const struct plan *p, int i)
{
    int n = 1;
    while (i + n < p->set->n && seq_of(p, i + n) == seq_of(p, i))
        n++;
    return n;
}

static bool rows_sorted(const struct tl_step *step)
{
    for (int i = 0; i < step->n_rows; i++)
        if (step->rows[i].seq < (i > 0 ? step->rows[i - 1].seq : 0))
            return false;
    return true;
}

/* Keys of this row's sequence below this position were stored by earlier steps: the lowest position of its rows in
 * the step. */
static int safe_of(const struct plan *p, int place)
{
    int lo = 0, hi = p->set->rows[place], seq = seq_of(p, place);
    if (!p->sorted)
        return 0;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (p->step->rows[mid].seq < seq)
            lo = mid + 1;
        else
            hi = mid;
    }
    return p->step->rows[lo].pos;
}

/* It is the only row of its sequence in the set. */
static bool single(const struct plan *p, int place)
{
    return p->sorted && (place == 0 || seq_of(p, place - 1) != seq_of(p, place)) && run_at(p, place) == 1;
}

/* Do the kernels of attention finish all heads by themselves? A block that has a page with rows of the step itself finishes
 * their keys and values: few rows, one after the other. */
static bool fused(const struct plan *p)
{
    for (int i = 0, n; i < p->set->n; i += n) {
        n = run_at(p, i);
        if (n == 1 ? !single(p, i) : !p->sorted || n > TLC_NEW_ROWS)
            return false;
        for (int j = 1; j < n; j++)
            if (pos_of(p, i + j) != pos_of(p, i) + j)
                return false;
    }
    return p->spec->qk_norm != TL_QKNORM_FULL && p->head->n[TLC_SEG_LONG] == 0;
}

static void add_entry(struct plan *p, int place, int term0)
{
    p->entries[p->n_entries++] = (struct tlc_attn_entry){place, pos_of(p, place), lo_of(p, place), term0};
}

/* ---- common pages ---- */

/* Blocks, at most n, from the start on that both sequences have in common at every slot of this set's layers. */
static int common_blocks(const struct plan *p, int a, int b, int n)
{
    for (int i = 0; i < p->step->n_ops && n > 0; i++) {
        const struct tl_op *op = &p->step->ops[i];
        if (op->kind != TL_OP_LAYER || op->set != p->index)
            continue;
        const int32_t *x = p->step->seqs[a].pages + (int64_t)op->slot * p->step->seqs[a].stride;
        const int32_t *y = p->step->seqs[b].pages + (int64_t)op->slot * p->step->seqs[b].stride;
        if (!memcmp(x, y, (size_t)n * sizeof(*x)))
            continue;
        for (int j = 0; j < n; j++)
            if (x[j] != y[j])
                n = j;
    }
    return n;
}

/* Put the row into the first group that it shares at least half of the pages with. */
static void join_group(struct plan *p, int place)
{
    int blocks = safe_of(p, place) / TLC_PAGE;
    if (blocks == 0 || lo_of(p, place) > 0 || !single(p, place))
        return;
    for (int i = 0; i < p->n_groups; i++) {
        struct group *g = &p->groups[i];
        int n = common_blocks(p, seq_of(p, g->leader), seq_of(p, place), blocks < g->blocks ? blocks : g->blocks);
        if (n == 0 || 2 * n < g->blocks)
            continue;
        g->blocks = n;
        g->n++;
        p->group_of[place] = (int16_t)i;
        return;
    }
    p->group_of[place] = (int16_t)p->n_groups;
    p->groups[p->n_groups++] = (struct group){place, 1, blocks, 0};
}

/* One more kernel pays off where it saves the reading of enough pages. */
static bool worth(const struct group *g) { return g->n >= 4 && g->n * g->blocks >= 16; }

/* The group's rows as entries, with the numbers of their terms; of many pages it keeps what there is room for. */
static void settle_group(struct plan *p, int index)
{
    struct group *g = &p->groups[index];
    int room = (TLC_TERMS - p->n_terms) / g->n;
    g->blocks = g->blocks < room ? g->blocks : room;
    g->entry0 = p->n_entries;
    for (int i = 0; i < p->set->n && worth(g); i++)
        if (p->group_of[i] == index) {
            p->entries[i].term0 = p->n_terms;
            add_entry(p, i, p->n_terms);
            p->n_terms += g->blocks;
        }
}

static void find_groups(struct plan *p)
{
    p->n_groups = 0;
    if (p->set->n > TLC_SHARED_ROWS)
        return;
    for (int i = 0; i < p->set->n; i++)
        p->group_of[i] = -1;
    for (int i = 0; i < p->set->n && p->set->n >= 4; i++)
        join_group(p, i);
    for (int i = 0; i < p->n_groups; i++)
        settle_group(p, i);
}

static const struct group *shared_by(const struct plan *p, int place)
{
    if (p->n_groups == 0 || p->group_of[place] < 0)
        return NULL;
    const struct group *g = &p->groups[p->group_of[place]];
    return worth(g) ? g : NULL;
}

/* ---- items ---- */

/* terms: pages before block0 that are stored as terms */
static void add_item(struct plan *p, int segment, int entry0, int n, int block0, int block1, int terms)
{
    struct tlc_attn_entry e = p->entries[entry0];
    p->items[p->n_items++] = (struct tlc_attn_item){entry0,
                                                    n,
                                                    block0,
                                                    block1,
                                                    safe_of(p, e.place),
                                                    seq_of(p, e.place),
                                                    e.place,
                                                    e.pos,
                                                    e.lo,
                                                    terms,
                                                    terms > 0 ? p->entries[e.place].term0 + block0 - terms : 0,
                                                    0};
    p->head->n[segment]++;
}

static int tile_rows(const struct plan *p, int q_max) { return q_max / tlc_tile_heads(p->per_row, q_max); }

/* Rows [i, i + n) of one sequence in tiles of up to `rows`; the last (longest) first. The entry of row i is number
 * i. */
static void add_run(struct plan *p, int segment, int i, int n, int rows)
{
    for (int at = (n - 1) / rows * rows; at >= 0; at -= rows) {
        int last = at + rows < n ? at + rows - 1 : n - 1;
        const struct group *g = n == 1 ? shared_by(p, i) : NULL;
        add_item(p, segment, i + at, last - at + 1, g ? g->blocks : lo_of(p, i + at) / TLC_PAGE,
                 pos_of(p, i + last) / TLC_PAGE + 1, g ? g->blocks : 0);
        p->items[p->n_items - 1].own = pos_of(p, i);
    }
}

static bool long_run(const struct plan *p, int n) { return n >= tile_rows(p, TLC_LONG_Q); }

/* The long kernel reads less, but has few blocks: it gets the long runs where they fill the device. */
static bool use_long(const struct plan *p, int sms)
{
    int tiles = 0, heads = tlc_tile_heads(p->per_row, TLC_LONG_Q), rows = tile_rows(p, TLC_LONG_Q);
    for (int i = 0, n; i < p->set->n; i += n) {
        n = run_at(p, i);
        tiles += long_run(p, n) ? (n + rows - 1) / rows : 0;
    }
    return tiles * p->spec->n_kv_heads * ((p->per_row + heads - 1) / heads) >= sms / 2;
}

static int heavier(const void *a, const void *b)
{
    const struct tlc_attn_item *x = (const struct tlc_attn_item *)a, *y = (const struct tlc_attn_item *)b;
    int nx = x->block1 - x->block0, ny = y->block1 - y->block0;
    return nx != ny ? (nx < ny) - (nx > ny) : (x->entry0 > y->entry0) - (x->entry0 < y->entry0);
}

/* Of a long run of rows of one sequence the terms of all pages at once, then the fold of each row: as the pages are many,
 * they are what fills the device. (Of 16 rows the short kernel is faster.) entries[i].term0 counts from page 0. */
static void store_run(struct plan *p, int i, int n, int wide)
{
    int block0 = lo_of(p, i) / TLC_PAGE, blocks = pos_of(p, i + n - 1) / TLC_PAGE + 1 - block0;
    if (n < STORED_RUN || blocks < 3 || n > (TLC_TERMS - p->n_terms) / blocks)
        return;
    for (int j = 0; j < n; j++)
        p->entries[i + j].term0 = p->n_terms + j * blocks - block0;
    for (int j = 0; j < n; j += wide) {
        int last = j + wide < n ? j + wide - 1 : n - 1;
        add_item(p, TLC_SEG_SHARED, i + j, last - j + 1, lo_of(p, i + j) / TLC_PAGE, pos_of(p, i + last) / TLC_PAGE + 1,
                 0);
    }
    p->n_terms += n * blocks;
    p->terms_only = true;
}

static void fold_run(struct plan *p, int i, int n)
{
    for (int j = i; j < i + n; j++) {
        int block0 = lo_of(p, j) / TLC_PAGE, block1 = pos_of(p, j) / TLC_PAGE + 1;
        add_item(p, TLC_SEG_ROW, j, 1, block1, block1, block1 - block0);
    }
}

static bool many_fits(const struct plan *p) { return tlc_many_fits(p->per_row, p->spec->d_head, p->shared_max); }

/* Of a run of n rows */
static int segment_of(const struct plan *p, int n, bool any_long)
{
    if (any_long && long_run(p, n))
        return TLC_SEG_LONG;
    if (n > 1 || p->per_row > TLC_ROW_Q)
        return TLC_SEG_OWN;
    return p->set->n <= TLC_ROW_ROWS_MAX || many_fits(p) ? TLC_SEG_ROW : TLC_SEG_OWN;
}

static void add_items(struct plan *p, int sms)
{
    bool any_long = use_long(p, sms);
    int rows = tile_rows(p, TLC_TILE_Q), wide = tile_rows(p, TLC_LONG_Q);
    for (int i = 0; i < p->n_groups; i++) {
        const struct group *g = &p->groups[i];
        for (int j = 0; j < g->n && worth(g); j += wide)
            add_item(p, TLC_SEG_SHARED, g->entry0 + j, g->n - j < wide ? g->n - j : wide, 0, g->blocks, 0);
    }
    for (int i = 0, n; i < p->set->n && many_fits(p); i += n) {
        n = run_at(p, i);
        if (n > 1 && segment_of(p, n, any_long) == TLC_SEG_OWN)
            store_run(p, i, n, wide);
    }
    for (int seg = TLC_SEG_ROW; seg <= TLC_SEG_LONG; seg++) {
        p->head->first[seg] = p->n_items;
        for (int i = 0, n; i < p->set->n; i += n) {
            n = run_at(p, i);
            if (n > 1 && p->entries[i].term0 != NO_TERMS) {
                if (seg == TLC_SEG_ROW)
                    fold_run(p, i, n);
            } else if (segment_of(p, n, any_long) == seg)
                add_run(p, seg, i, n, seg == TLC_SEG_LONG ? wide : rows);
        }
        qsort(p->items + p->head->first[seg], (size_t)p->head->n[seg], sizeof(*p->items), heavier);
    }
}

/* ---- the class ---- */

static uint32_t log2_up(int n)
{
    uint32_t b = 0;
    while ((1 << b) < n)
        b++;
    return b;
}

/* The longest item */
static int most_blocks(const struct plan *p, int segment)
{
    const struct tlc_attn_item *first = p->items + p->head->first[segment];
    int blocks = 0;
    for (int i = 0; i < p->head->n[segment]; i++)
        blocks = first[i].block1 - first[i].block0 > blocks ? first[i].block1 - first[i].block0 : blocks;
    return blocks;
}

/* Blocks per item, as a power of two: what fills the device about twice, and not more than pages. Two pages are for one block. */
static uint32_t cluster_log2(const struct plan *p, int segment, int sms)
{
    int heads = tlc_tile_heads(p->per_row, TLC_TILE_Q), blocks = most_blocks(p, segment);
    int tiles = (p->spec->n_kv_heads * ((p->per_row + heads - 1) / heads)) << log2_up(p->head->n[segment]);
    uint32_t log2 = 0;
    while (log2 < (blocks > 32 ? TLC_CLUSTER_LOG2 : 3u) && (tiles << (log2 + 1)) <= 2 * sms && blocks > 2 &&
           1 << log2 < blocks)
        log2++;
    return log2;
}

/* Blocks per item of the shared kernel: one for each page, as far as they are of use. */
static uint32_t shared_log2(const struct plan *p, int sms)
{
    int heads = tlc_tile_heads(p->per_row, TLC_LONG_Q), items = p->head->n[TLC_SEG_SHARED];
    int tiles = (p->spec->n_kv_heads * ((p->per_row + heads - 1) / heads)) << log2_up(items);
    uint32_t log2 = log2_up(most_blocks(p, TLC_SEG_SHARED));
    log2 = log2 < 7 ? log2 : 7;
    while (log2 > 0 && tiles << log2 > 4 * sms)
        log2--;
    return log2;
}

/* The same of the row kernel, with the pages that a block takes at a time: all pages of an item in one round where
 * that is possible; up to 4 pages without a cluster. Blocks of 4 pages have a multiprocessor of their own. */
static uint32_t row_class(const struct plan *p, int sms)
{
    int blocks = most_blocks(p, TLC_SEG_ROW);
    bool many = p->set->n > TLC_ROW_ROWS || (p->set->n > TLC_ROW_ROWS_MIN && blocks <= TLC_MANY_PAGES);
    if (p->terms_only || (many && many_fits(p)))
        return TLC_CLS_MANY << TLC_CLS_PAGES;
    int tiles = p->spec->n_kv_heads << log2_up(p->head->n[TLC_SEG_ROW]);
    uint32_t pages = blocks <= 4 && tiles <= sms ? log2_up(blocks) : blocks > 1 ? 1 : 0, cluster = 0;
    while (1 << (pages + cluster) < blocks && cluster < (blocks > 32 ? TLC_CLUSTER_LOG2 : 3u) &&
           (tiles << (cluster + 1)) <= sms)
        cluster++;
    if (pages < 2 && 1 << (pages + cluster) < blocks && (tiles << cluster) <= sms)
        pages = 2;
    return cluster << TLC_CLS_CLUSTER(TLC_SEG_ROW) | pages << TLC_CLS_PAGES;
}

static uint32_t class_of(const struct plan *p, int sms)
{
    uint32_t cls = fused(p) ? TLC_CLS_FUSED : 0;
    for (int seg = 0; seg < TLC_SEGS; seg++) {
        if (p->head->n[seg] == 0)
            continue;
        cls |= (1 + log2_up(p->head->n[seg])) << TLC_CLS_ITEMS(seg);
        if (seg == TLC_SEG_ROW)
            cls |= row_class(p, sms);
        else if (seg == TLC_SEG_SHARED)
            cls |= shared_log2(p, sms) << TLC_CLS_CLUSTER(seg);
        else if (seg == TLC_SEG_OWN)
            cls |= cluster_log2(p, seg, sms) << TLC_CLS_CLUSTER(seg);
    }
    return cls;
}

uint32_t tlc_attn_plan(const struct tl_arch_spec *spec, const struct tl_step *step, int set, const struct tlc_launch *l,
                       void *host, size_t *used)
{
    struct plan p = {};
    p.spec = spec;
    p.step = step;
    p.set = &step->sets[set];
    p.shared_max = l->shared_max;
    p.index = set;
    p.per_row = spec->n_heads / spec->n_kv_heads;
    p.head = (struct tlc_attn_head *)host;
    memset(p.head, 0, sizeof(*p.head));
    *used = sizeof(*p.head);
    if (!tiled(&p))
        return TLC_CLS_PLAIN;
    p.entries = (struct tlc_attn_entry *)(p.head + 1);
    p.sorted = rows_sorted(step);
    for (int i = 0; i < p.set->n; i++)
        add_entry(&p, i, NO_TERMS);
    find_groups(&p);
    p.items = (struct tlc_attn_item *)(p.entries + p.n_entries);
    p.head->items_at = (int32_t)((uint8_t *)p.items - (uint8_t *)host);
    add_items(&p, l->sms);
    *used = (size_t)p.head->items_at + (size_t)p.n_items * sizeof(*p.items);
    return class_of(&p, l->sms);
}
