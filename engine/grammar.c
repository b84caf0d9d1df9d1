/* Sources to grammars. */
#include "grammar_impl.h"

#include "mem.h"

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

static void fill_limits(struct tl_grammar_limits *out, const struct tl_grammar_limits *in)
{
    *out = in ? *in : (struct tl_grammar_limits){0};
    if (!out->source_bytes_max)
        out->source_bytes_max = 512u << 10;
    if (out->rules_max <= 0 || out->rules_max >= 1 << 30)
        out->rules_max = 20000;
    if (out->depth_max <= 0)
        out->depth_max = 200;
    if (out->repeat_max <= 0)
        out->repeat_max = 65536;
    if (out->states_max <= 0 || out->states_max > 1 << 28)
        out->states_max = 150000;
    if (out->stack_max <= 0)
        out->stack_max = 2000;
    if (out->threads_max <= 0)
        out->threads_max = 2000;
    if (!out->cache_bytes_max)
        out->cache_bytes_max = 16u << 20;
    if (out->work_per_token_max <= 0)
        out->work_per_token_max = 1000000;
}

void tl_grammar_key(const struct tl_grammar_source *src, uint64_t key[2])
{
    XXH3_state_t x;
    XXH128_hash_t h;
    int kind = (int)src->kind;

    XXH3_128bits_reset(&x);
    XXH3_128bits_update(&x, &kind, sizeof(kind));
    if (src->kind == TL_GRAMMAR_CHOICE)
        for (int i = 0; i < src->n_choices; i++)
            XXH3_128bits_update(&x, src->choices[i], strlen(src->choices[i]) + 1);
    else if (src->text_bytes)
        XXH3_128bits_update(&x, src->text, src->text_bytes);
    h = XXH3_128bits_digest(&x);
    key[0] = h.low64;
    key[1] = h.high64;
}

static enum tl_status check_source(const struct tl_grammar_source *src, const struct tl_grammar_limits *limits,
                                   struct tl_error *err)
{
    static const char *const names[] = {"grammar", "json_schema", "response_format", "regex", "choice"};
    size_t n = src->text_bytes;
    enum tl_status st;

    if ((unsigned)src->kind > TL_GRAMMAR_CHOICE)
        return tl_fail(err, TL_ERR_BAD_PARAM, "grammar kind is %d, it must be 0 to %d", (int)src->kind,
                       TL_GRAMMAR_CHOICE);
    if (src->kind == TL_GRAMMAR_CHOICE) {
        n = 0;
        for (int i = 0; i < src->n_choices; i++)
            n += strlen(src->choices[i]);
    }
    if (n <= limits->source_bytes_max)
        return TL_OK;
    st = tl_fail(err, TL_ERR_INVALID_GRAMMAR, "%s has %zu bytes, the limit is %zu", names[src->kind], n,
                 limits->source_bytes_max);
    tl_error_param(err, names[src->kind]);
    tl_error_num(err, "limit", (int64_t)limits->source_bytes_max);
    tl_error_num(err, "got", (int64_t)n);
    return st;
}

static void read_choices(struct tl_draft *d, const struct tl_grammar_source *src)
{
    if (src->n_choices < 1)
        tl_draft_fail(d, d->st_bad, "choice has no strings, it must have one or more");
    for (int i = 0; i < src->n_choices && d->st == TL_OK; i++) {
        const char *p = src->choices[i], *end = p + strlen(p);
        uint32_t cp;
        for (int n; p < end; p += n)
            if ((n = tl_utf8_read(p, end, &cp)) == 0) {
                tl_draft_fail(d, d->st_bad, "choice %d is not UTF-8", i);
                return;
            }
        tl_draft_add_word(d, src->choices[i], strlen(src->choices[i]));
    }
    tl_draft_define(d, d->root, tl_draft_words(d, 0));
}

static void read_source(struct tl_draft *d, const struct tl_grammar_source *src)
{
    struct tl_regex_params regex = {.text = src->text, .n = src->text_bytes, .max = -1};

    switch (src->kind) {
    case TL_GRAMMAR_GBNF: tl_gbnf_read(d, src->text, src->text_bytes); break;
    case TL_GRAMMAR_JSON_SCHEMA: tl_schema_read(d, src->text, src->text_bytes); break;
    case TL_GRAMMAR_JSON_OBJECT: d->root = tl_json_object_rule(d); break;
    case TL_GRAMMAR_REGEX:
        d->root = tl_draft_rule(d, "regex", 5);
        tl_draft_define(d, d->root, tl_regex_read(d, &regex));
        break;
    case TL_GRAMMAR_CHOICE:
        d->root = tl_draft_rule(d, "choice", 6);
        read_choices(d, src);
        break;
    }
}

enum tl_status tl_grammar_compile(struct tl_grammar **out, const struct tl_grammar_source *src,
                                  const struct tl_grammar_limits *limits, struct tl_error *err)
{
    struct tl_grammar *g = NULL;
    struct tl_draft d;
    struct tl_error local;
    enum tl_status st;

    *out = NULL;
    if (!err)
        err = &local;
    memset(&d, 0, sizeof(d));
    g = tl_calloc(1, sizeof(*g));
    if (!g)
        return tl_fail_host_memory(err, sizeof(*g));
    atomic_init(&g->n_refs, 1);
    fill_limits(&g->limits, limits);
    if ((st = check_source(src, &g->limits, err)) != TL_OK || (st = tl_draft_init(&d, &g->limits, err)) != TL_OK)
        goto out;
    read_source(&d, src);
    if ((st = d.st) != TL_OK || (st = tl_net_build(&g->net, &d, err)) != TL_OK)
        goto out;
    g->room = tl_calloc(1, sizeof(*g->room));
    st = g->room ? tl_local_init(&g->room->local, &g->net, err) : tl_fail_host_memory(err, sizeof(*g->room));
    if (st != TL_OK)
        goto out;
    *out = g;
    g = NULL;
out:
    tl_draft_clear(&d);
    tl_grammar_free(g);
    return st;
}

/* The count of references is the one thing in a const grammar that changes. */
static atomic_int *refs_of(const struct tl_grammar *g) { return &((struct tl_grammar *)(uintptr_t)g)->n_refs; }

void tl_grammar_ref(const struct tl_grammar *g) { atomic_fetch_add(refs_of(g), 1); }

void tl_grammar_free(const struct tl_grammar *g)
{
    struct tl_grammar *mine = (struct tl_grammar *)(uintptr_t)g;

    if (!g || atomic_fetch_sub(refs_of(g), 1) > 1)
        return;
    if (mine->room) {
        tl_local_clear(&mine->room->local);
        tl_masks_clear(&mine->room->masks);
        tl_free(mine->room);
    }
    tl_net_clear(&mine->net);
    tl_free(mine);
}

size_t tl_grammar_bytes(const struct tl_grammar *g)
{
    return sizeof(*g) + sizeof(*g->room) + g->net.bytes + (size_t)g->net.n_states * sizeof(uint32_t) +
           tl_local_bytes(&g->room->local) + tl_masks_bytes(&g->room->masks);
}
