#include "seq.h"

#include <string.h>

#include "mem.h"
#include "model.h"

/* Most blocks of one slot alive at a time: everything, or the window plus the chunk being written. */
static int live_blocks(const struct tl_kv *kv, int window, int n_blocks)
{
    int live = window ? (int)(((int64_t)window + kv->chunk_rows) / TL_BLOCK_TOKENS) + 2 : n_blocks;
    return live < n_blocks ? live : n_blocks;
}

/* Slots that a resume writes for rows whose shallower loops are shared: the new loops and the coda. */
static int64_t resumed_slots(const struct tl_arch_spec *spec, int loops_used, int n_loops)
{
    return spec->n_coda + (int64_t)(n_loops - loops_used) * spec->n_core;
}

int64_t tl_resume_pages(const struct tl_kv *kv, int n_tokens, int loops_used, int max_loops, int window)
{
    if (max_loops <= loops_used)
        return 0;
    return resumed_slots(kv->spec, loops_used, max_loops) * live_blocks(kv, window, tl_blocks(n_tokens));
}

static int64_t state_pages_for(const struct tl_kv *kv, int n_rows)
{
    return (n_rows + kv->view.state_rows_per_page - 1) / kv->view.state_rows_per_page;
}

int64_t tl_seq_need(const struct tl_kv *kv, const struct tl_seq_plan *p, int64_t *of_lender)
{
    const struct tl_arch_spec *spec = kv->spec;
    int64_t n_slots = tl_n_slots(spec, p->n_loops), pages = 0;
    int total = tl_blocks(p->len_max), full = p->base_len / TL_BLOCK_TOKENS;
    bool resumed = p->base && p->n_loops > p->base->n_loops;

    *of_lender = 0;
    if (resumed) {
        int64_t fresh = resumed_slots(spec, p->base->n_loops, p->n_loops);
        *of_lender = fresh * live_blocks(kv, p->window, tl_blocks(p->base_len));
        pages += *of_lender;
        pages += fresh * live_blocks(kv, p->window, total - tl_blocks(p->base_len));
        n_slots -= fresh;
    }
    pages += n_slots * live_blocks(kv, p->window, total - full);
    if (p->keep_state)
        pages += state_pages_for(kv, p->n_state_rows);
    if (p->keep_then_grow) /* frozen pages stay with the handle: the tail is copied, a window refills */
        pages += tl_n_slots(spec, p->n_loops) * live_blocks(kv, p->window, p->window ? total : 1);
    return pages;
}

static bool slot_shared(const struct tl_seq *s, int slot)
{
    const struct tl_arch_spec *spec = s->kv->spec;
    if (slot < spec->n_prelude)
        return true;
    if (slot < spec->n_prelude + spec->n_coda)
        return s->shared_coda;
    return slot < tl_n_slots(spec, s->shared_loops);
}

static bool borrowed(const struct tl_seq *s, int slot, int block)
{
    return s->base && block < s->shared_blocks && slot_shared(s, slot);
}

static int32_t *entry(const struct tl_seq *s, int slot, int block)
{
    return &s->pages[(size_t)slot * (size_t)s->stride + (size_t)block];
}

static void take_base(struct tl_seq *s, struct tl_handle *h)
{
    tl_handle_ref(h);
    h->n_users++;
    s->base = h;
}

static void drop_base(struct tl_seq *s)
{
    if (!s->base)
        return;
    s->base->n_users--;
    tl_handle_free(s->base);
    s->base = NULL;
}

enum tl_status tl_seq_start(struct tl_seq *s, struct tl_kv *kv, const struct tl_seq_plan *p, int64_t reserved,
                            bool use_lender, struct tl_error *err)
{
    size_t n_entries;

    memset(s, 0, sizeof(*s));
    s->n_slots = tl_n_slots(kv->spec, p->n_loops);
    s->stride = tl_blocks(p->len_max);
    n_entries = (size_t)s->n_slots * (size_t)s->stride;
    s->pages = tl_array(n_entries, sizeof(*s->pages));
    if (p->keep_state) {
        s->n_state_pages = (int)state_pages_for(kv, p->n_state_rows);
        s->state_pages = tl_array((size_t)s->n_state_pages, sizeof(*s->state_pages));
    }
    if (!s->pages || (p->keep_state && !s->state_pages)) {
        tl_free(s->pages);
        tl_free(s->state_pages);
        memset(s, 0, sizeof(*s));
        return tl_fail_host_memory(err, n_entries * sizeof(*s->pages));
    }
    s->kv = kv;
    s->n_loops = p->n_loops;
    s->window = p->window;
    s->reserved = reserved;
    memset(s->pages, 0xff, n_entries * sizeof(*s->pages));
    for (int i = 0; i < s->n_state_pages; i++)
        s->state_pages[i] = tl_kv_take(kv, &s->reserved);
    if (p->base) {
        struct tl_handle *h = p->base;
        int n_blocks = tl_blocks(p->base_len);
        take_base(s, h);
        s->len = s->shared_len = p->base_len;
        s->shared_blocks = n_blocks;
        s->shared_loops = h->n_loops < p->n_loops ? h->n_loops : p->n_loops;
        s->shared_coda = h->n_loops == p->n_loops;
        s->first_block = p->n_loops > h->n_loops ? 0 : h->first_block;
        for (int slot = 0; slot < s->n_slots; slot++)
            if (slot_shared(s, slot))
                memcpy(entry(s, slot, 0), h->pages + (size_t)slot * (size_t)h->n_blocks,
                       (size_t)n_blocks * sizeof(*s->pages));
        if (use_lender) {
            TL_ASSERT(h->resume_reserved == h->resume_pages);
            s->lender = h;
            s->reserved += h->resume_reserved;
            h->resume_reserved = 0;
        }
    }
    return TL_OK;
}

/* Drop a page of the sequence's own; it returns to the reservation, so growth that was promised stays promised. */
static void give_back(struct tl_seq *s, int32_t page)
{
    if (tl_kv_unref(s->kv, page)) {
        s->kv->n_reserved++;
        s->reserved++;
    }
}

enum tl_status tl_seq_extend(struct tl_seq *s, int new_len, struct tl_error *err)
{
    const struct tl_backend_ops *ops = s->kv->be->ops;
    size_t page_bytes = s->kv->view.page_bytes;
    int from = s->len / TL_BLOCK_TOKENS, to = tl_blocks(new_len);

    TL_ASSERT(new_len >= s->len && to <= s->stride);
    if (s->base && from < s->shared_blocks) { /* first write into the shared tail block: copy it, one page per slot */
        for (int slot = 0; slot < s->n_slots; slot++) {
            int32_t *e = entry(s, slot, from), page;
            enum tl_status st;
            if (!borrowed(s, slot, from))
                continue;
            page = tl_kv_take(s->kv, &s->reserved);
            st = ops->buf_copy(s->kv->be, s->kv->view.arena, (size_t)page * page_bytes, s->kv->view.arena,
                               (size_t)*e * page_bytes, page_bytes, err);
            if (st != TL_OK) {
                give_back(s, page);
                while (slot-- > 0) /* undo: the table names only borrowed pages of this block again */
                    if (borrowed(s, slot, from)) {
                        give_back(s, *entry(s, slot, from));
                        *entry(s, slot, from) = s->base->pages[(size_t)slot * (size_t)s->base->n_blocks + (size_t)from];
                    }
                return st;
            }
            *e = page;
        }
        s->shared_blocks = from;
    }
    for (int b = from; b < to; b++)
        for (int slot = 0; slot < s->n_slots; slot++)
            if (*entry(s, slot, b) < 0)
                *entry(s, slot, b) = tl_kv_take(s->kv, &s->reserved);
    return TL_OK;
}

void tl_seq_resume_to(struct tl_seq *s, int n)
{
    for (int b = s->first_block; b < tl_blocks(n); b++)
        for (int slot = 0; slot < s->n_slots; slot++)
            if (!slot_shared(s, slot) && *entry(s, slot, b) < 0)
                *entry(s, slot, b) = tl_kv_take(s->kv, &s->reserved);
}

static void release_entry(struct tl_seq *s, int slot, int block)
{
    int32_t *e = entry(s, slot, block);
    if (*e < 0)
        return;
    if (!borrowed(s, slot, block))
        give_back(s, *e);
    *e = -1;
}

void tl_seq_commit(struct tl_seq *s, int new_len)
{
    int keep_from = s->window ? new_len - s->window + 1 : 0; /* first position that row new_len still sees */
    int until = keep_from > 0 ? keep_from / TL_BLOCK_TOKENS : 0;

    if (new_len > s->len)
        s->len = new_len;
    for (; s->first_block < until; s->first_block++)
        for (int slot = 0; slot < s->n_slots; slot++)
            release_entry(s, slot, s->first_block);
}

void tl_seq_truncate(struct tl_seq *s, int n)
{
    TL_ASSERT(n >= s->shared_len && n <= s->len);
    s->len = n;
}

enum tl_status tl_seq_to_handle(struct tl_seq *s, const struct tl_handle_make *mk, struct tl_handle **out,
                                struct tl_error *err)
{
    struct tl_kv *kv = s->kv;
    const struct tl_arch_spec *spec = kv->spec;
    struct tl_handle *h = tl_calloc(1, sizeof(*h));
    size_t n_entries, row_bytes = (size_t)spec->d_model * sizeof(float);
    enum tl_status st = TL_ERR_NO_HOST_MEMORY;

    *out = NULL;
    if (!h)
        return tl_fail_host_memory(err, sizeof(*h));
    TL_ASSERT(!s->lender && s->len > 0);
    h->n_blocks = tl_blocks(s->len);
    h->n_slots = s->n_slots;
    n_entries = (size_t)h->n_slots * (size_t)h->n_blocks;
    h->pages = tl_array(n_entries, sizeof(*h->pages));
    h->tokens = tl_array((size_t)s->len, sizeof(*h->tokens));
    h->last_row = tl_malloc(row_bytes);
    if (!h->pages || !h->tokens || !h->last_row) {
        tl_fail_host_memory(err, n_entries * sizeof(*h->pages));
        goto out;
    }
    h->kind = mk->kind;
    h->model = mk->model;
    h->kv = kv;
    h->refs = 1;
    h->n_tokens = s->len;
    h->n_loops = s->n_loops;
    h->max_loops = mk->kind == TL_HANDLE_RESUME ? mk->max_loops : s->n_loops;
    h->window = s->window;
    h->first_block = s->first_block;
    memcpy(h->tokens, mk->tokens, (size_t)s->len * sizeof(*h->tokens));
    memcpy(h->last_row, mk->last_row, row_bytes);
    if (mk->kind == TL_HANDLE_RESUME) {
        h->resume_pages = tl_resume_pages(kv, s->len, s->n_loops, mk->max_loops, s->window);
        if (!tl_kv_reserve(kv, h->resume_pages)) {
            st = tl_fail(err, TL_ERR_NO_DEVICE_MEMORY,
                         "a resume handle of %d tokens to depth %d reserves %lld pages, %lld are free", s->len,
                         mk->max_loops, (long long)h->resume_pages, (long long)tl_kv_available(kv));
            goto out;
        }
        h->resume_reserved = h->resume_pages;
        h->state_pages = s->state_pages; /* the handle owns them from here */
        h->n_state_pages = s->n_state_pages;
        s->state_pages = NULL;
        s->n_state_pages = 0;
        kv->n_held += h->n_state_pages + h->resume_pages;
    }
    for (int slot = 0; slot < s->n_slots; slot++) {
        for (int b = 0; b < h->n_blocks; b++) {
            int32_t page = *entry(s, slot, b);
            h->pages[(size_t)slot * (size_t)h->n_blocks + (size_t)b] = page;
            if (page < 0)
                continue;
            if (borrowed(s, slot, b))
                tl_kv_ref(kv, page);
            else
                kv->n_held++; /* ownership moves: the reference of the sequence becomes the handle's */
        }
        for (int b = h->n_blocks; b < s->stride; b++)
            release_entry(s, slot, b);
    }
    drop_base(s);
    take_base(s, h);
    s->shared_len = s->len;
    s->shared_blocks = h->n_blocks;
    s->shared_loops = s->n_loops;
    s->shared_coda = true;
    *out = h;
    h = NULL;
    st = TL_OK;
out:
    if (h) {
        tl_free(h->pages);
        tl_free(h->tokens);
        tl_free(h->last_row);
        tl_free(h);
    }
    return st;
}

void tl_seq_end(struct tl_seq *s)
{
    if (!s->kv)
        return;
    for (int slot = 0; slot < s->n_slots; slot++)
        for (int b = 0; b < s->stride; b++)
            release_entry(s, slot, b);
    for (int i = 0; i < s->n_state_pages; i++)
        give_back(s, s->state_pages[i]);
    tl_kv_unreserve(s->kv, s->reserved);
    if (s->lender) { /* what it lent has just come back */
        bool ok = tl_kv_reserve(s->kv, s->lender->resume_pages);
        TL_ASSERT(ok);
        s->lender->resume_reserved = s->lender->resume_pages;
    }
    drop_base(s);
    tl_free(s->state_pages);
    tl_free(s->pages);
    memset(s, 0, sizeof(*s));
}

void tl_handle_ref(struct tl_handle *h) { h->refs++; }

static void unhold(struct tl_kv *kv, int32_t page)
{
    if (page >= 0 && tl_kv_unref(kv, page))
        kv->n_held--;
}

void tl_handle_free(struct tl_handle *h)
{
    if (!h || --h->refs > 0)
        return;
    for (size_t i = 0; i < (size_t)h->n_slots * (size_t)h->n_blocks; i++)
        unhold(h->kv, h->pages[i]);
    for (int i = 0; i < h->n_state_pages; i++)
        unhold(h->kv, h->state_pages[i]);
    tl_kv_unreserve(h->kv, h->resume_reserved);
    h->kv->n_held -= h->resume_pages;
    tl_free(h->state_pages);
    tl_free(h->pages);
    tl_free(h->tokens);
    tl_free(h->last_row);
    tl_free(h);
}

void tl_handle_info(const struct tl_handle *h, struct tl_handle_info *out)
{
    uint64_t pages = (uint64_t)h->n_state_pages;
    for (size_t i = 0; i < (size_t)h->n_slots * (size_t)h->n_blocks; i++)
        pages += h->pages[i] >= 0;
    memset(out, 0, sizeof(*out));
    out->kind = h->kind;
    out->tokens = h->tokens;
    out->n_tokens = h->n_tokens;
    out->n_loops = h->n_loops;
    out->max_loops = h->max_loops;
    out->cache_window = h->window;
    out->bytes_reserved = (uint64_t)h->resume_pages * h->kv->view.page_bytes;
    out->bytes = pages * h->kv->view.page_bytes + out->bytes_reserved;
    out->n_refs = h->refs;
    out->n_users = h->n_users;
}

void tl_handle_estimate(const struct tl_model *m, enum tl_handle_kind kind, const struct tl_prefix_shape *shape,
                        uint64_t *bytes, uint64_t *bytes_reserved)
{
    const struct tl_kv *kv = m->kv;
    bool resume = kind == TL_HANDLE_RESUME;
    int n_blocks = tl_blocks(shape->n_tokens), hidden = shape->n_tokens - shape->cache_window + 1;
    int64_t pages, reserved = 0;

    if (shape->cache_window && hidden > 0)
        n_blocks -= hidden / TL_BLOCK_TOKENS;
    pages = (int64_t)tl_n_slots(kv->spec, shape->n_loops) * n_blocks;
    if (resume) {
        pages += state_pages_for(kv, shape->n_tokens);
        reserved = tl_resume_pages(kv, shape->n_tokens, shape->n_loops, shape->max_loops, shape->cache_window);
    }
    *bytes_reserved = (uint64_t)reserved * kv->view.page_bytes;
    *bytes = (uint64_t)pages * kv->view.page_bytes + *bytes_reserved;
}
