/* engine/grammar_cache.h - compiled grammars by their content, so that the same schema is compiled once.
 *
 * Holds one reference to each of its grammars; the least recently asked for goes first. What a grammar finds out while it runs
 * stays with it, so a cached one is also quicker at masks, and grows: that counts as well. Refused sources are not remembered.
 * Thread: that of the grammars. */
#ifndef TL_GRAMMAR_CACHE_H
#define TL_GRAMMAR_CACHE_H

#include "grammar.h"

struct tl_grammar_cache;

struct tl_grammar_cache_params {
    int n_max;                              /* grammars held; 0 = 32 */
    size_t bytes_max;                       /* host memory of all; 0 = 256 MiB. The newest one stays */
    const struct tl_grammar_limits *limits; /* copied; NULL = the defaults */
};
struct tl_grammar_cache_stats {
    int n;
    uint64_t hits, misses;
};

enum tl_status tl_grammar_cache_create(struct tl_grammar_cache **out, const struct tl_grammar_cache_params *params,
                                       struct tl_error *err);
void tl_grammar_cache_free(struct tl_grammar_cache *c); /* grammars in use live on. NULL is fine */
/* Owner: the caller owns one reference to *out. Errors: as tl_grammar_compile. */
enum tl_status tl_grammar_cache_get(struct tl_grammar_cache *c, const struct tl_grammar_source *src,
                                    struct tl_grammar **out, struct tl_error *err);
/* One reference to the grammar of this key (tl_grammar_key), or NULL where it would have to be compiled. */
struct tl_grammar *tl_grammar_cache_find(struct tl_grammar_cache *c, const uint64_t key[2]);
void tl_grammar_cache_stats(struct tl_grammar_cache *c, struct tl_grammar_cache_stats *out);

#endif
