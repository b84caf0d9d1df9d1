#include "grammar_cache.h"

#include "mem.h"

#include <pthread.h>
#include <string.h>

struct entry {
    uint64_t key[2];
    struct tl_grammar *grammar;
};

struct tl_grammar_cache {
    pthread_mutex_t lock;
    struct entry *entries; /* [n_max], the one asked for last first */
    int n, n_max;
    struct tl_grammar_limits limits;
    uint64_t hits, misses;
};

enum tl_status tl_grammar_cache_create(struct tl_grammar_cache **out, const struct tl_grammar_cache_params *params,
                                       struct tl_error *err)
{
    struct tl_grammar_cache *c = tl_calloc(1, sizeof(*c));

    *out = NULL;
    if (!c)
        return tl_fail_host_memory(err, sizeof(*c));
    c->n_max = params && params->n_max > 0 ? params->n_max : 32;
    if (params && params->limits)
        c->limits = *params->limits;
    c->entries = tl_calloc((size_t)c->n_max, sizeof(*c->entries));
    if (!c->entries || pthread_mutex_init(&c->lock, NULL) != 0) {
        tl_free(c->entries);
        tl_free(c);
        return tl_fail_host_memory(err, sizeof(*c));
    }
    *out = c;
    return TL_OK;
}

void tl_grammar_cache_free(struct tl_grammar_cache *c)
{
    if (!c)
        return;
    for (int i = 0; i < c->n; i++)
        tl_grammar_free(c->entries[i].grammar);
    pthread_mutex_destroy(&c->lock);
    tl_free(c->entries);
    tl_free(c);
}

/* Move the entry of key to the front; NULL if there is none. Under the lock. */
static struct tl_grammar *find(struct tl_grammar_cache *c, const uint64_t key[2])
{
    for (int i = 0; i < c->n; i++) {
        struct entry e = c->entries[i];
        if (memcmp(e.key, key, sizeof(e.key)) != 0)
            continue;
        memmove(c->entries + 1, c->entries, (size_t)i * sizeof(e));
        c->entries[0] = e;
        return e.grammar;
    }
    return NULL;
}

enum tl_status tl_grammar_cache_get(struct tl_grammar_cache *c, const struct tl_grammar_source *src,
                                    struct tl_grammar **out, struct tl_error *err)
{
    struct tl_grammar *fresh = NULL, *old = NULL;
    struct entry e;
    enum tl_status st;

    *out = NULL;
    tl_grammar_key(src, e.key);
    pthread_mutex_lock(&c->lock);
    e.grammar = find(c, e.key);
    if (e.grammar)
        tl_grammar_ref(e.grammar);
    c->hits += e.grammar != NULL;
    c->misses += e.grammar == NULL;
    pthread_mutex_unlock(&c->lock);
    if (e.grammar) {
        *out = e.grammar;
        return TL_OK;
    }
    if ((st = tl_grammar_compile(&fresh, src, &c->limits, err)) != TL_OK)
        return st;
    pthread_mutex_lock(&c->lock);
    e.grammar = find(c, e.key);
    if (e.grammar) { /* somebody was quicker */
        old = fresh;
    } else {
        e.grammar = fresh;
        if (c->n == c->n_max)
            old = c->entries[--c->n].grammar;
        memmove(c->entries + 1, c->entries, (size_t)c->n * sizeof(e));
        c->entries[0] = e;
        c->n++;
    }
    tl_grammar_ref(e.grammar);
    pthread_mutex_unlock(&c->lock);
    tl_grammar_free(old);
    *out = e.grammar;
    return TL_OK;
}

void tl_grammar_cache_stats(struct tl_grammar_cache *c, struct tl_grammar_cache_stats *out)
{
    pthread_mutex_lock(&c->lock);
    *out = (struct tl_grammar_cache_stats){c->n, c->hits, c->misses};
    pthread_mutex_unlock(&c->lock);
}
