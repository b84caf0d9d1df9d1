/* Which tokens may come next, as far as the top of the stack decides it.
 *
 * From a local state the trie is walked over a stack whose bottom is unknown. A token whose walk survives is allowed whatever
 * lies below; where the walk falls through the bottom, the node of the trie is noted, and the tokens below that node are for
 * the matcher to look at, which knows its stack. Where that would be many of them, the mask is made again with one more frame
 * of the stack above the bottom. Masks are dropped all at once when they outgrow the cache: nothing refers to them. */
#include "grammar_impl.h"

#include "mem.h"

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

static enum tl_status no_memory(const struct tl_effort *e)
{
    return tl_fail(e->err, TL_ERR_NO_HOST_MEMORY, "the host has no memory left for token masks");
}

enum tl_status tl_walk_below(const struct tl_walk *w, uint32_t top, uint32_t place, struct tl_effort *e)
{
    struct tl_space *s = w->space;
    const struct tl_trie *t = w->trie;
    const uint8_t *class_of = s->local->net->class_of;
    const size_t n_classes = (size_t)s->local->net->n_classes;
    uint32_t at[TL_PIECE_MAX + 1], base = t->nodes[top].depth, end = t->nodes[top].end, n_seen = 0;

    at[0] = place;
    for (uint32_t i = top + 1; i < end; n_seen++) {
        const struct tl_trie_node *node = &t->nodes[i];
        uint32_t depth = node->depth - base, from = at[depth - 1], to;
        to = s->moves.at[from * n_classes + class_of[node->byte]];
        if (to == TL_UNKNOWN) {
            enum tl_status st = tl_space_move(s, from, class_of[node->byte], &to, e);
            if (st != TL_OK)
                return st;
        }
        if (to == 0) {
            i = node->end;
            continue;
        }
        at[depth] = to;
        for (uint32_t k = node->token; k < node[1].token; k++)
            w->mask[t->tokens[k] >> 5] |= 1u << (t->tokens[k] & 31);
        i++;
        if (w->pops && i < node->end && s->places.at[to].through) {
            uint32_t n_below = 0;
            if (!TL_VEC_ROOM(&w->pops->pops, 1))
                return no_memory(e);
            w->pops->pops.at[w->pops->pops.n++] = i - 1;
            for (uint32_t k = i; k < node->end; k = t->nodes[k].end)
                n_below++;
            w->pops->pop_cost += 1 + n_below;
        }
    }
    return tl_effort_take(e, n_seen / 4) ? TL_OK : tl_effort_spent(e);
}

void tl_masks_clear(struct tl_masks *ms)
{
    tl_space_clear(&ms->space);
    tl_free(ms->masks.at);
    tl_free(ms->words.at);
    tl_free(ms->index.slots);
    tl_free(ms->pops.at);
    memset(ms, 0, sizeof(*ms));
}

size_t tl_masks_bytes(const struct tl_masks *ms)
{
    return tl_space_bytes(&ms->space) + (size_t)ms->masks.cap * sizeof(*ms->masks.at) +
           (size_t)ms->words.cap * sizeof(*ms->words.at) + (size_t)ms->index.n_slots * sizeof(*ms->index.slots);
}

static enum tl_status start_over(struct tl_masks *ms, struct tl_local *local, const struct tl_vocab_trie *v,
                                 struct tl_effort *e)
{
    enum tl_status st;

    tl_masks_clear(ms);
    st = tl_space_init(&ms->space, local, e->err);
    if (st == TL_OK && !TL_VEC_ROOM(&ms->masks, 16)) {
        tl_masks_clear(ms);
        st = no_memory(e);
    }
    if (st != TL_OK)
        return st;
    ms->masks.n = 1;
    ms->serial = v->serial;
    return TL_OK;
}

static uint64_t hash_key(const uint32_t *key, uint32_t n) { return XXH3_64bits(key, n * sizeof(*key)); }

static uint64_t hash_mask(const void *arg, uint32_t n)
{
    const struct tl_masks *ms = arg;
    return hash_key(ms->masks.at[n].key, ms->masks.at[n].n_key);
}

struct wanted {
    const struct tl_masks *ms;
    const uint32_t *key;
    uint32_t n_key;
};

static bool same_key(const void *arg, uint32_t n)
{
    const struct wanted *w = arg;
    const struct tl_mask *m = &w->ms->masks.at[n];
    return m->n_key == w->n_key && memcmp(m->key, w->key, w->n_key * sizeof(*w->key)) == 0;
}

/* Keep what the walk found: bits in ms->words at `bits`, nodes in ms->pops. */
static bool keep(struct tl_masks *ms, struct tl_mask *m, uint32_t bits, uint32_t n_words)
{
    uint32_t n_ids = 0;

    for (uint32_t i = 0; i < n_words; i++)
        n_ids += (uint32_t)__builtin_popcount(ms->words.at[bits + i]);
    m->bits = bits;
    m->n_ids = n_ids;
    if (n_ids <= n_words / 2) { /* a list is smaller, and quicker to put into a mask */
        uint32_t ids = bits + n_words;
        if (!TL_VEC_ROOM(&ms->words, n_ids))
            return false;
        for (uint32_t i = 0; i < n_words; i++)
            for (uint32_t w = ms->words.at[bits + i]; w; w &= w - 1)
                ms->words.at[ms->words.n++] = i * 32 + (uint32_t)__builtin_ctz(w);
        memmove(ms->words.at + bits, ms->words.at + ids, n_ids * sizeof(*ms->words.at));
        ms->words.n = bits + n_ids;
        m->ids = bits;
        m->bits = TL_UNKNOWN;
    }
    if (!TL_VEC_ROOM(&ms->words, ms->pops.n))
        return false;
    m->pops = ms->words.n;
    m->n_pops = ms->pops.n;
    m->pop_cost = ms->pop_cost;
    if (ms->pops.n)
        memcpy(ms->words.at + ms->words.n, ms->pops.at, ms->pops.n * sizeof(*ms->pops.at));
    ms->words.n += ms->pops.n;
    return true;
}

enum tl_status tl_masks_get(struct tl_masks *ms, struct tl_local *local, const struct tl_vocab_trie *v,
                            const uint32_t *key, uint32_t n_key, uint32_t *out, struct tl_effort *e)
{
    struct tl_mask m = {.n_key = n_key};
    struct tl_walk w = {.space = &ms->space, .trie = &v->brief, .pops = ms};
    uint32_t n_words = ((uint32_t)v->vocab_size + 31) / 32, at, bits, node = TL_BOTTOM, place;
    enum tl_status st;

    if (ms->serial != v->serial || tl_masks_bytes(ms) > e->limits->cache_bytes_max)
        if ((st = start_over(ms, local, v, e)) != TL_OK)
            return st;
    if (!tl_index_room(&ms->index, hash_mask, ms))
        return no_memory(e);
    *out = tl_index_find(&ms->index, hash_key(key, n_key), same_key, &(struct wanted){ms, key, n_key}, &at);
    if (*out != TL_UNKNOWN)
        return TL_OK;

    memcpy(m.key, key, n_key * sizeof(*key));
    for (uint32_t i = n_key; i-- > 1;) { /* the frames, from the bottom up */
        ms->space.entries.n = 0;
        ms->space.entries.at[ms->space.entries.n++] = (struct tl_pair){key[i], node};
        if ((st = tl_space_node(&ms->space, &node, e)) != TL_OK)
            return st;
    }
    if ((st = tl_space_place_of(&ms->space, key[0], node, &place, e)) != TL_OK)
        return st;
    bits = ms->words.n;
    if (!TL_VEC_ROOM(&ms->words, n_words) || !TL_VEC_ROOM(&ms->masks, 1))
        return no_memory(e);
    memset(ms->words.at + bits, 0, n_words * sizeof(*ms->words.at));
    ms->words.n += n_words;
    ms->pops.n = ms->pop_cost = 0;
    w.mask = ms->words.at + bits;
    st = tl_walk_below(&w, 0, place, e);
    if (st == TL_OK && !keep(ms, &m, bits, n_words))
        st = no_memory(e);
    if (st != TL_OK) {
        ms->words.n = bits;
        return st;
    }
    *out = ms->masks.n;
    ms->masks.at[ms->masks.n++] = m;
    tl_index_put(&ms->index, at, *out);
    return TL_OK;
}
