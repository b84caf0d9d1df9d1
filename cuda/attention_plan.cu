/* Which rows attend together, over which pages: the host's part of attention. */
#include "attention_impl.cuh"

#include <stdlib.h>
#include <string.h>

/* A tile of clones reads common pages once, but a block then folds all terms of its rows, and has their own pages to itself. Clones
 * by themselves read the same pages again, out of the cache. Tiles are faster where that is what takes time: of many rows, with the
 * pages of many kv heads, or of long prefixes, as long as all tiles together are few. (16 heads of 128, times of a call in us, by
 * tiles and by rows: 16 kv heads, 8 clones of 2,048 17.9 and 26.9, 64 of 512 36 and 44, 64 of 128 28 and 23; 4 kv heads, 16
 * clones of 2,048 18.1 and 23.1, 32 of them 29.8 and 27.4, 16 of 512 10.1 and 7.0, all by rows in blocks of 3 pairs of warps.) Where rows
 * share blocks of the kernel of many rows, see share_of(), that is faster than both. */
#define CLONED_ROWS  8    /* of a tile, at least, ... */
#define CLONED_PAGES 4096 /* ... with so many pages: rows of the group, times kv heads, times common pages; */
#define CLONED_FEW   16   /* or at most so many rows in a group, ... */
#define CLONED_LONG  24   /* ... with so many pages in common at least */

struct group { /* rows with common pages [0, blocks) */
    int leader, n, blocks, entry0;
    bool shared; /* they share blocks of the kernel of many rows, else they are tiles */
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
    bool any_shared;
    int share;   /* rows that may share a block of the kernel of many rows */
    bool sorted; /* the step's rows are grouped by sequence, in ascending order: what the engine does */
    struct group groups[TLC_SHARED_ROWS];
    int n_groups;
    int16_t group_of[TLC_SHARED_ROWS]; /* by place in the set; -1 = none */
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

static void add_entry(struct plan *p, int place)
{
    p->entries[p->n_entries++] = (struct tlc_attn_entry){place, pos_of(p, place), lo_of(p, place), seq_of(p, place)};
}

static uint32_t log2_up(int n)
{
    uint32_t b = 0;
    while ((1 << b) < n)
        b++;
    return b;
}

static int tile_rows(const struct plan *p, int q_max) { return q_max / tlc_tile_heads(p->per_row, q_max); }

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

/* Put the row into the first group that it has at least half of the pages in common with. */
static void join_group(struct plan *p, int place)
{
    int blocks = safe_of(p, place) / TLC_PAGE;
    if (blocks == 0 || lo_of(p, place) > 0 || !single(p, place))
        return;
    for (int i = 0; i < p->n_groups; i++) {
        struct group *g = &p->groups[i];
        int n = common_blocks(p, seq_of(p, g->leader), seq_of(p, place), blocks < g->blocks ? blocks : g->blocks);
        if (n == 0 || 2 * n < g->blocks || 2 * n < blocks)
            continue;
        g->blocks = n;
        g->n++;
        p->group_of[place] = (int16_t)i;
        return;
    }
    p->group_of[place] = (int16_t)p->n_groups;
    p->groups[p->n_groups++] = (struct group){place, 1, blocks, 0, false};
}

static bool worth(const struct plan *p, const struct group *g)
{
    int rows = tile_rows(p, TLC_TILE_Q);
    if (rows >= CLONED_ROWS && g->n >= CLONED_ROWS && g->n * p->spec->n_kv_heads * g->blocks >= CLONED_PAGES)
        return true;
    return rows > 1 && g->n >= 4 && g->n <= CLONED_FEW && g->blocks >= CLONED_LONG;
}

/* How many rows with common pages share a block of the kernel of many rows: where blocks of one row are more than multiprocessors, the
 * fewest that leave them one each, as pages that are rows' own come one after the other. */
static int share_of(const struct plan *p, int sms)
{
    int rows = 0, share = 1;
    if (p->set->n <= TLC_ROW_ROWS || !tlc_many_share(p->per_row, p->spec->d_head, p->shared_max))
        return 1;
    for (int i = 0, n; i < p->set->n; i += n)
        rows += (n = run_at(p, i)) == 1;
    while (share < TLC_ROW_Q / p->per_row && p->spec->n_kv_heads << log2_up((rows + share - 1) / share) > sms)
        share++;
    return share;
}

/* The group's rows as entries, one behind the other; one that is not worth it is dissolved. */
static void settle_group(struct plan *p, int index)
{
    struct group *g = &p->groups[index];
    g->entry0 = p->n_entries;
    g->shared = p->share > 1 && g->n > 1;
    if (!g->shared && !worth(p, g))
        g->n = 0;
    for (int i = 0; i < p->set->n; i++)
        if (p->group_of[i] == index) {
            if (g->n > 0)
                add_entry(p, i);
            else
                p->group_of[i] = -1;
        }
}

static void find_groups(struct plan *p, int sms)
{
    p->n_groups = 0;
    p->share = share_of(p, sms);
    if (p->set->n > TLC_SHARED_ROWS)
        return;
    for (int i = 0; i < p->set->n; i++)
        p->group_of[i] = -1;
    for (int i = 0; i < p->set->n && p->set->n >= 4; i++)
        join_group(p, i);
    for (int i = 0; i < p->n_groups; i++)
        settle_group(p, i);
}

static bool grouped(const struct plan *p, int place) { return p->n_groups > 0 && p->group_of[place] >= 0; }

/* ---- items ---- */

static struct tlc_attn_item *add_item(struct plan *p, int segment, int entry0, int n, int block0, int block1)
{
    struct tlc_attn_entry e = p->entries[entry0];
    struct tlc_attn_item *x = &p->items[p->n_items++];
    *x = (struct tlc_attn_item){entry0, n, block0, block1, safe_of(p, e.place), e.seq, e.place, e.pos, e.lo, 0, 0, 0};
    p->head->n[segment]++;
    return x;
}

/* Rows [i, i + n) of one sequence in tiles of up to `rows`; the last (longest) first. The entry of row i is number
 * i. */
static void add_run(struct plan *p, int segment, int i, int n, int rows)
{
    for (int at = (n - 1) / rows * rows; at >= 0; at -= rows) {
        int last = at + rows < n ? at + rows - 1 : n - 1;
        add_item(p, segment, i + at, last - at + 1, lo_of(p, i + at) / TLC_PAGE, pos_of(p, i + last) / TLC_PAGE + 1)
            ->own = pos_of(p, i);
    }
}

static void add_group(struct plan *p, const struct group *g, int rows)
{
    for (int at = 0; at < g->n; at += rows)
        add_item(p, TLC_SEG_TILE, g->entry0 + at, at + rows < g->n ? rows : g->n - at, 0, g->blocks)->apart = 1;
}

/* Of even size */
static void add_shared(struct plan *p, const struct group *g)
{
    int parts = (g->n + p->share - 1) / p->share;
    for (int at = 0, n; at < g->n; at += n) {
        int turns = g->blocks;
        n = (g->n - at + parts - 1) / parts;
        parts--;
        for (int i = 0; i < n; i++)
            turns += p->entries[g->entry0 + at + i].pos / TLC_PAGE + 1 - g->blocks;
        add_item(p, TLC_SEG_ROW, g->entry0 + at, n, 0, turns)->own = g->blocks;
        p->any_shared |= n > 1;
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

static bool many_fits(const struct plan *p) { return tlc_many_fits(p->per_row, p->spec->d_head, p->shared_max); }

/* Of a run of n rows */
static int segment_of(const struct plan *p, int n, bool any_long)
{
    if (any_long && long_run(p, n))
        return TLC_SEG_LONG;
    if (n > 1 || p->per_row > TLC_ROW_Q)
        return TLC_SEG_TILE;
    return p->set->n <= TLC_ROW_ROWS_MAX || many_fits(p) ? TLC_SEG_ROW : TLC_SEG_TILE;
}

static void add_items(struct plan *p, int sms)
{
    bool any_long = use_long(p, sms);
    for (int seg = 0; seg < TLC_SEGS; seg++) {
        int rows = tile_rows(p, seg == TLC_SEG_LONG ? TLC_LONG_Q : TLC_TILE_Q);
        p->head->first[seg] = p->n_items;
        for (int i = 0; i < p->n_groups && seg != TLC_SEG_LONG; i++)
            if (p->groups[i].shared && seg == TLC_SEG_ROW)
                add_shared(p, &p->groups[i]);
            else if (!p->groups[i].shared && seg == TLC_SEG_TILE)
                add_group(p, &p->groups[i], rows);
        for (int i = 0, n; i < p->set->n; i += n) {
            n = run_at(p, i);
            if (!grouped(p, i) && segment_of(p, n, any_long) == seg)
                add_run(p, seg, i, n, rows);
        }
        qsort(p->items + p->head->first[seg], (size_t)p->head->n[seg], sizeof(*p->items), heavier);
    }
}

/* ---- the class ---- */

/* Of the longest item; rows apart have at least one page each besides the common ones. */
static int most_blocks(const struct plan *p, int segment)
{
    int most = 0;
    for (int i = 0; i < p->head->n[segment]; i++) {
        const struct tlc_attn_item *x = &p->items[p->head->first[segment] + i];
        int blocks = x->block1 - x->block0 + (x->apart ? x->n : 0);
        most = blocks > most ? blocks : most;
    }
    return most;
}

/* How many clusters of tlc_cluster_size(number) blocks run at once, where a multiprocessor has one block. The device is in parts of
 * up to 18, one of them much smaller, and a cluster lies in one part; so many multiprocessors (of 132) it leaves alone. One cluster
 * more, and all wait for a second wave. */
static int clusters_at_once(int sms, uint32_t number)
{
    static const int left[TLC_CLUSTER_SIZES] = {0, 0, 12, 12, 20, 15, 30};
    return (sms - left[number]) / tlc_cluster_size(number);
}

/* Blocks per item, as a power of two: what fills the device about twice, and not more than pages. Two pages are for one block. */
static uint32_t cluster_log2(const struct plan *p, int segment, int sms)
{
    int heads = tlc_tile_heads(p->per_row, TLC_TILE_Q), blocks = most_blocks(p, segment);
    int tiles = (p->spec->n_kv_heads * ((p->per_row + heads - 1) / heads)) << log2_up(p->head->n[segment]);
    uint32_t log2 = 0;
    while (log2 < (blocks > 32 ? TLC_CLUSTER_LOG2 : 3u) && tiles <= 2 * clusters_at_once(sms, log2 + 1) && blocks > 2 &&
           1 << log2 < blocks)
        log2++;
    return log2;
}

/* The same of the row kernel, with the pages that a block takes at a time: all pages of an item in one round where
 * that is possible; up to 4 pages without a cluster. Blocks of 4 pages have a multiprocessor of their own. */
static uint32_t row_class(const struct plan *p, int sms)
{
    static const uint32_t sizes[] = {0, 1, 5, 2, 6, 3, 4}; /* ascending */
    int blocks = most_blocks(p, TLC_SEG_ROW), n = p->head->n[TLC_SEG_ROW], i = 0, most = blocks > 32 ? 6 : 5;
    int tiles = p->spec->n_kv_heads << log2_up(n);
    bool few = n <= TLC_ROW_ROWS || (blocks > TLC_MANY_PAGES && 2 * tiles <= sms);
    if (p->any_shared)
        return TLC_CLS_MANY << TLC_CLS_PAGES | TLC_CLS_SHARED;
    if (!few && many_fits(p))
        return TLC_CLS_MANY << TLC_CLS_PAGES;
    uint32_t pages = blocks <= 4 && tiles <= sms ? log2_up(blocks) : blocks > 1 ? 1 : 0;
    while (tlc_cluster_size(sizes[i]) << pages < blocks && i < most && tiles <= clusters_at_once(sms, sizes[i + 1]))
        i++;
    if (pages < 2 && tlc_cluster_size(sizes[i]) << pages < blocks && tiles * tlc_cluster_size(sizes[i]) <= sms)
        pages = 2;
    return sizes[i] << TLC_CLS_CLUSTER(TLC_SEG_ROW) | pages << TLC_CLS_PAGES;
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
        else if (seg == TLC_SEG_TILE)
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
        add_entry(&p, i);
    find_groups(&p, l->sms);
    p.items = (struct tlc_attn_item *)(p.entries + p.n_entries);
    p.head->items_at = (int32_t)((uint8_t *)p.items - (uint8_t *)host);
    add_items(&p, l->sms);
    *used = (size_t)p.head->items_at + (size_t)p.n_items * sizeof(*p.items);
    return class_of(&p, l->sms);
}
