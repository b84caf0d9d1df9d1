#include "prefix_pool.h"

#include <string.h>

#include "mem.h"

struct entry {
    struct tl_handle *handle; /* one reference */
    uint64_t scope;
    uint64_t used; /* clock of the last use */
    bool automatic;
};

struct tl_pool {
    struct tl_model *m;
    struct tl_pool *next; /* of the model's list */
    struct entry *entries;
    int n, room;
    uint64_t clock, bytes, bytes_max;
    struct tl_pool_stats stats;
    void (*on_evict)(void *arg, const struct tl_handle *h);
    void *on_evict_arg;
};

enum tl_status tl_pool_create(struct tl_pool **out, struct tl_model *m, int capacity, uint64_t bytes_max,
                              struct tl_error *err)
{
    struct tl_pool *p;

    *out = NULL;
    if (capacity < 1 || capacity > 1 << 20)
        return tl_fail(err, TL_ERR_BAD_PARAM, "capacity of a pool is %d, it must be 1 to %d", capacity, 1 << 20);
    p = tl_calloc(1, sizeof(*p));
    if (!p)
        return tl_fail_host_memory(err, sizeof(*p));
    p->m = m;
    p->bytes_max = bytes_max ? bytes_max : UINT64_MAX;
    p->stats.capacity = capacity;
    p->next = m->pools;
    m->pools = p;
    *out = p;
    return TL_OK;
}

static uint64_t handle_bytes(const struct tl_handle *h)
{
    struct tl_handle_info info;
    tl_handle_info(h, &info);
    return info.bytes;
}

static void drop(struct tl_pool *p, int i)
{
    struct entry e = p->entries[i];
    p->entries[i] = p->entries[--p->n];
    p->bytes -= handle_bytes(e.handle);
    p->stats.n_automatic -= e.automatic;
    tl_handle_free(e.handle);
}

void tl_pool_free(struct tl_pool *p)
{
    if (!p)
        return;
    for (struct tl_pool **at = &p->m->pools; *at; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            break;
        }
    while (p->n)
        drop(p, p->n - 1);
    tl_free(p->entries);
    tl_free(p);
}

static int common_prefix(const struct tl_handle *h, const int32_t *tokens, int n_tokens)
{
    int n = h->n_tokens < n_tokens ? h->n_tokens : n_tokens, i = 0;
    while (i < n && h->tokens[i] == tokens[i])
        i++;
    return i;
}

/* The first entry with h; -1 if none. */
static int find_handle(const struct tl_pool *p, const struct tl_handle *h)
{
    int i = 0;
    while (i < p->n && p->entries[i].handle != h)
        i++;
    return i < p->n ? i : -1;
}

/* Only the pool holds it, in one scope or several. */
static bool is_idle(const struct tl_pool *p, const struct tl_handle *h)
{
    int n = 0;
    for (int i = 0; i < p->n && h->refs > 1; i++)
        n += p->entries[i].handle == h;
    return h->refs == 1 || h->refs == n;
}

/* Least recently used idle entry; -1 if none. */
static int lru_idle(const struct tl_pool *p, bool automatic)
{
    int best = -1;
    for (int i = 0; i < p->n; i++)
        if (p->entries[i].automatic == automatic && (best < 0 || p->entries[i].used < p->entries[best].used) &&
            is_idle(p, p->entries[i].handle))
            best = i;
    return best;
}

static bool evict(struct tl_pool *p, bool automatic)
{
    int at = lru_idle(p, automatic);
    if (at < 0)
        return false;
    struct tl_handle *h = p->entries[at].handle;
    tl_handle_ref(h);
    if (p->on_evict)
        p->on_evict(p->on_evict_arg, h);
    for (int i = p->n - 1; i >= 0; i--)
        if (p->entries[i].handle == h) {
            drop(p, i);
            p->stats.evictions++;
        }
    tl_handle_free(h);
    return true;
}

bool tl_pool_evict_one(struct tl_pool *p) { return evict(p, true) || evict(p, false); }

void tl_pool_on_evict(struct tl_pool *p, void (*fn)(void *arg, const struct tl_handle *h), void *arg)
{
    p->on_evict = fn;
    p->on_evict_arg = arg;
}

void tl_pool_drop_automatic(struct tl_pool *p)
{
    for (int i; (i = lru_idle(p, true)) >= 0;)
        drop(p, i);
}

void tl_pool_limits(struct tl_pool *p, int capacity, uint64_t bytes_max)
{
    p->stats.capacity = capacity;
    p->bytes_max = bytes_max ? bytes_max : UINT64_MAX;
    while (p->n - p->stats.n_automatic > capacity && evict(p, false))
        ;
    while (p->bytes > p->bytes_max && tl_pool_evict_one(p))
        ;
}

bool tl_pools_evict_one(struct tl_model *m)
{
    for (int automatic = 1; automatic >= 0; automatic--)
        for (struct tl_pool *p = m->pools; p; p = p->next)
            if (evict(p, automatic))
                return true;
    return false;
}

static bool same_identity(const struct entry *e, const struct tl_handle *h, uint64_t scope)
{
    return e->scope == scope && e->handle->n_loops == h->n_loops && e->handle->window == h->window &&
           e->handle->kind == h->kind && e->handle->max_loops == h->max_loops && e->handle->n_tokens == h->n_tokens &&
           !memcmp(e->handle->tokens, h->tokens, (size_t)h->n_tokens * sizeof(*h->tokens));
}

enum tl_status tl_pool_add(struct tl_pool *p, struct tl_handle *h, uint64_t scope, bool automatic, struct tl_error *err)
{
    uint64_t bytes = handle_bytes(h);

    if (h->model != p->m)
        return tl_fail(err, TL_ERR_MODEL_MISMATCH, "the handle was made by another model than the pool's");
    for (int i = 0; i < p->n; i++)
        if (same_identity(&p->entries[i], h, scope)) {
            p->entries[i].used = ++p->clock;
            p->stats.n_automatic -= p->entries[i].automatic && !automatic;
            p->entries[i].automatic &= automatic; /* registering it by hand makes it explicit */
            return TL_OK;
        }
    if (bytes > p->bytes_max)
        return tl_fail(err, TL_ERR_OVERLOADED, "the prefix holds %llu bytes, the pool may hold %llu",
                       (unsigned long long)bytes, (unsigned long long)p->bytes_max);
    while (!automatic && p->n - p->stats.n_automatic >= p->stats.capacity)
        if (!evict(p, false))
            return tl_fail(err, TL_ERR_OVERLOADED, "all %d entries of the pool are in use", p->stats.capacity);
    while (p->bytes + bytes > p->bytes_max)
        if (!evict(p, true) && (automatic || !evict(p, false)))
            return tl_fail(err, TL_ERR_OVERLOADED, "the pool holds %llu of %llu bytes and nothing in it is idle",
                           (unsigned long long)p->bytes, (unsigned long long)p->bytes_max);
    if (p->n == p->room) {
        int room = p->room ? 2 * p->room : 16;
        struct entry *e = tl_realloc(p->entries, (size_t)room * sizeof(*e));
        if (!e)
            return tl_fail_host_memory(err, (size_t)room * sizeof(*e));
        p->entries = e;
        p->room = room;
    }
    p->entries[p->n++] = (struct entry){.handle = h, .scope = scope, .used = ++p->clock, .automatic = automatic};
    tl_handle_ref(h);
    p->bytes += bytes;
    p->stats.n_automatic += automatic;
    return TL_OK;
}

struct tl_handle *tl_pool_holds(const struct tl_pool *p, const struct tl_handle *like, uint64_t scope)
{
    for (int i = 0; i < p->n; i++)
        if (same_identity(&p->entries[i], like, scope))
            return p->entries[i].handle;
    return NULL;
}

bool tl_pool_remove(struct tl_pool *p, const struct tl_handle *h, uint64_t scope)
{
    for (int i = 0; i < p->n; i++)
        if (p->entries[i].handle == h && p->entries[i].scope == scope) {
            drop(p, i);
            return true;
        }
    return false;
}

/* Tokens of e that count for a prompt of n_tokens with `common` of them equal; 0 = no match. */
static int matched_tokens(const struct entry *e, int common, int n_tokens)
{
    int n;
    if (common == e->handle->n_tokens && !e->automatic)
        return common;
    if (!e->automatic || e->handle->window)
        return 0;
    n = common < n_tokens - 1 ? common : n_tokens - 1;
    return n / TL_BLOCK_TOKENS * TL_BLOCK_TOKENS;
}

/* One token tells of most entries that they do not go beyond the first n. */
static bool agrees_at(const struct tl_handle *h, const int32_t *tokens, int n_tokens, int n)
{
    return n < h->n_tokens && n < n_tokens && h->tokens[n] == tokens[n];
}

void tl_pool_find(const struct tl_pool *p, const int32_t *tokens, int n_tokens, int n_loops, int cache_window,
                  uint64_t scope, struct tl_pool_match *out)
{
    struct tl_pool_match deep = {0}, same = {0};
    int known = 0; /* tokens that a match or a near miss agrees in already */

    memset(out, 0, sizeof(*out));
    for (int i = p->n - 1; i >= 0; i--) { /* the newest first: of a conversation's turns it is the longest */
        const struct entry *e = &p->entries[i];
        struct tl_handle *h = e->handle;
        int common, matched, beat;
        enum tl_miss reason;
        bool same_depth = h->n_loops == n_loops && h->window == cache_window;
        bool deepens =
            h->kind == TL_HANDLE_RESUME && h->n_loops < n_loops && n_loops <= h->max_loops && h->window == cache_window;
        beat = same_depth ? same.n_matched : deepens ? deep.n_matched : known;
        if (beat && e->automatic && (same_depth || deepens))
            beat += TL_BLOCK_TOKENS - 1; /* by a whole block, or not at all */
        if ((e->scope != scope && e->scope != 0) || !agrees_at(h, tokens, n_tokens, beat))
            continue;
        common = common_prefix(h, tokens, n_tokens);
        matched = matched_tokens(e, common, n_tokens);
        if (same_depth && matched > same.n_matched)
            same = (struct tl_pool_match){.handle = h, .n_matched = matched, .automatic = e->automatic};
        else if (deepens && matched > deep.n_matched)
            deep = (struct tl_pool_match){.handle = h, .n_matched = matched, .deepen = true, .automatic = e->automatic};
        if ((same_depth || deepens) && matched) {
            known = matched > known ? matched : known;
            continue;
        }
        reason = h->window != cache_window ? TL_MISS_WINDOW
                 : !same_depth && !deepens ? TL_MISS_LOOPS
                 : common == n_tokens      ? TL_MISS_PROMPT_SHORTER
                                           : TL_MISS_TOKEN;
        if (common > out->n_common) {
            out->nearest = h;
            out->n_common = common;
            out->reason = reason;
        }
        known = common > known ? common : known;
    }
    if (out->n_common <= same.n_matched || out->n_common <= deep.n_matched) {
        out->nearest = NULL;
        out->n_common = 0;
        out->reason = TL_MISS_NONE;
    }
    if (same.handle || deep.handle) {
        const struct tl_pool_match *best = same.handle ? &same : &deep;
        out->handle = best->handle;
        out->n_matched = best->n_matched;
        out->deepen = best->deepen;
        out->automatic = best->automatic;
    }
}

void tl_pool_used(struct tl_pool *p, const struct tl_handle *h)
{
    p->stats.queries++;
    if (!h)
        return;
    p->stats.hits++;
    for (int i = 0; i < p->n; i++)
        if (p->entries[i].handle == h)
            p->entries[i].used = ++p->clock;
}

void tl_pool_stats(const struct tl_pool *p, struct tl_pool_stats *out)
{
    *out = p->stats;
    out->n_entries = p->n;
    out->bytes = p->bytes;
}

/* One reference less on, or again one more on, each page of h; how many pages then have none. */
static int64_t shift_refs(struct tl_kv *kv, const struct tl_handle *h, bool up)
{
    int64_t n_free = 0;
    for (int i = 0; i < h->n_slots * h->n_blocks; i++)
        if (h->pages[i] >= 0)
            n_free += (up ? ++kv->refs[h->pages[i]] : --kv->refs[h->pages[i]]) == 0;
    for (int i = 0; i < h->n_state_pages; i++)
        n_free += (up ? ++kv->refs[h->state_pages[i]] : --kv->refs[h->state_pages[i]]) == 0;
    return n_free;
}

/* Entries share pages, so the sum of theirs would be too much: give all references back, count, take them again. */
uint64_t tl_pool_idle_bytes(const struct tl_pool *p)
{
    struct tl_kv *kv = p->m->kv;
    int64_t pages = 0;
    for (int up = 0; up < 2; up++)
        for (int i = 0; i < p->n; i++) {
            const struct tl_handle *h = p->entries[i].handle;
            if (!is_idle(p, h) || (h->refs > 1 && find_handle(p, h) != i)) /* once, also if in two scopes */
                continue;
            int64_t n = shift_refs(kv, h, up);
            pages += up ? 0 : n + h->resume_reserved;
        }
    return (uint64_t)pages * kv->view.page_bytes;
}
