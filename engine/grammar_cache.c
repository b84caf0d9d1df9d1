#include "grammar_cache.h"

#include "mem.h"

#include <string.h>

struct entry {
    uint64_t key[2];
    struct tl_grammar *grammar;
};

struct tl_grammar_cache {
    struct entry *entries; /* [n_max], the one asked for last first */
    int n, n_max;
    size_t bytes_max;
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
    c->bytes_max = params && params->bytes_max ? params->bytes_max : 256u << 20;
    if (params && params->limits)
        c->limits = *params->limits;
    c->entries = tl_calloc((size_t)c->n_max, sizeof(*c->entries));
    if (!c->entries) {
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
    tl_free(c->entries);
    tl_free(c);
}

/* Let go of those at the end that are too much. */
static void trim(struct tl_grammar_cache *c, int n_max)
{
    size_t bytes = 0;
    int n = 0;

    while (n < c->n && n < n_max && ((bytes += tl_grammar_bytes(c->entries[n].grammar)) <= c->bytes_max || n == 0))
        n++;
    while (c->n > n)
        tl_grammar_free(c->entries[--c->n].grammar);
}

struct tl_grammar *tl_grammar_cache_find(struct tl_grammar_cache *c, const uint64_t key[2])
{
    for (int i = 0; i < c->n; i++) {
        struct entry e = c->entries[i];
        if (memcmp(e.key, key, sizeof(e.key)) != 0)
            continue;
        memmove(c->entries + 1, c->entries, (size_t)i * sizeof(e));
        c->entries[0] = e;
        c->hits++;
        tl_grammar_ref(e.grammar);
        trim(c, c->n_max);
        return e.grammar;
    }
    return NULL;
}

enum tl_status tl_grammar_cache_get(struct tl_grammar_cache *c, const struct tl_grammar_source *src,
                                    struct tl_grammar **out, struct tl_error *err)
{
    struct entry e;
    enum tl_status st;

    tl_grammar_key(src, e.key);
    if ((*out = tl_grammar_cache_find(c, e.key)))
        return TL_OK;
    c->misses++;
    if ((st = tl_grammar_compile(&e.grammar, src, &c->limits, err)) != TL_OK)
        return st;
    trim(c, c->n_max - 1);
    memmove(c->entries + 1, c->entries, (size_t)c->n * sizeof(e));
    c->entries[0] = e;
    c->n++;
    trim(c, c->n_max);
    tl_grammar_ref(e.grammar);
    *out = e.grammar;
    return TL_OK;
}

void tl_grammar_cache_stats(struct tl_grammar_cache *c, struct tl_grammar_cache_stats *out)
{
    *out = (struct tl_grammar_cache_stats){c->n, c->hits, c->misses};
}
