#include "tokenizer_impl.h"

#include "mem.h"
#include "tokenizer_utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- small readers ----------------------------------------------------------------------------------------------- */

static bool in_list(const char *list, const char *s, size_t n)
{
    for (const char *p = list; *p;) {
        size_t len = strcspn(p, " ");
        if (len == n && memcmp(p, s, n) == 0)
            return true;
        p += len + (p[len] == ' ');
    }
    return false;
}

enum tl_status tl_tk_check_keys(struct tl_tk_load *l, const struct tl_tkjson_node *obj, const char *where,
                                const char *keys)
{
    const struct tl_tkjson_node *nodes = l->js.nodes;
    uint32_t first = (uint32_t)(obj - nodes) + 1, i = first;
    if (obj->type != TL_TKJSON_OBJECT)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "%s is not an object", where);
    for (uint32_t k = 0; k < obj->n; k++, i = nodes[i].next) {
        if (!in_list(keys, nodes[i].key, nodes[i].key_bytes))
            return tl_fail(l->err, TL_ERR_UNSUPPORTED, "%s has a member '%.*s', which is not known", where,
                           TL_TK_SHOWN(nodes[i].key_bytes), nodes[i].key);
        for (uint32_t j = first; j != i; j = nodes[j].next)
            if (nodes[j].key_bytes == nodes[i].key_bytes && memcmp(nodes[j].key, nodes[i].key, nodes[i].key_bytes) == 0)
                return tl_fail(l->err, TL_ERR_BAD_FILE, "%s has the member '%.*s' twice", where,
                               TL_TK_SHOWN(nodes[i].key_bytes), nodes[i].key);
    }
    return TL_OK;
}

enum tl_status tl_tk_get_bool(struct tl_tk_load *l, const struct tl_tkjson_node *obj, const char *where,
                              const char *key, bool fallback, bool *out)
{
    const struct tl_tkjson_node *n = tl_tkjson_get(&l->js, obj, key);
    *out = fallback;
    if (!n || n->type == TL_TKJSON_NULL)
        return TL_OK;
    if (n->type != TL_TKJSON_TRUE && n->type != TL_TKJSON_FALSE)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "%s.%s is neither true nor false", where, key);
    *out = n->type == TL_TKJSON_TRUE;
    return TL_OK;
}

enum tl_status tl_tk_get_string(struct tl_tk_load *l, const struct tl_tkjson_node *obj, const char *where,
                                const char *key, const struct tl_tkjson_node **out)
{
    *out = tl_tkjson_get(&l->js, obj, key);
    if (!*out || (*out)->type != TL_TKJSON_STRING)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "%s.%s is not a string", where, key);
    return TL_OK;
}

/* ---- vocabulary -------------------------------------------------------------------------------------------------- */

static enum tl_status set_token(struct tl_tk_load *l, int32_t id, const char *s, size_t n)
{
    struct tl_tk_token *t = &l->tk->tokens[id];
    enum tl_status st = TL_OK;
    if (t->flags & TL_TK_PRESENT)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "id %d belongs to two tokens: '%.*s' and '%.*s'", (int)id,
                       TL_TK_SHOWN(t->text_bytes), l->tk->texts.p + t->text, TL_TK_SHOWN(n), s);
    t->text = (uint32_t)l->tk->texts.n;
    t->text_bytes = (uint32_t)n;
    t->flags = TL_TK_PRESENT;
    st = tl_tk_buf_add(&l->tk->texts, s, n, l->err);
    return st;
}

static enum tl_status read_id(struct tl_tk_load *l, const struct tl_tkjson_node *n, const char *s, size_t s_bytes,
                              int32_t *out)
{
    int64_t id;
    if (!tl_tkjson_int(n, 0, TL_TOKENIZER_ID_MAX, &id))
        return tl_fail(l->err, TL_ERR_BAD_FILE, "the id of token '%.*s' is not a whole number from 0 to %d",
                       TL_TK_SHOWN(s_bytes), s, TL_TOKENIZER_ID_MAX);
    *out = (int32_t)id;
    return TL_OK;
}

/* Room for every id that the vocabulary and the added tokens use. */
static enum tl_status alloc_tokens(struct tl_tk_load *l, const struct tl_tkjson_node *vocab,
                                   const struct tl_tkjson_node *added)
{
    const struct tl_tkjson_node *nodes = l->js.nodes;
    int32_t id = 0, highest = -1;
    uint32_t i = (uint32_t)(vocab - nodes) + 1;
    size_t bytes = 0;
    enum tl_status st = TL_OK;
    for (uint32_t k = 0; k < vocab->n && st == TL_OK; k++, i = nodes[i].next) {
        st = read_id(l, &nodes[i], nodes[i].key, nodes[i].key_bytes, &id);
        bytes += nodes[i].key_bytes;
        if (st == TL_OK && id > highest)
            highest = id;
    }
    i = added ? (uint32_t)(added - nodes) + 1 : 0;
    for (uint32_t k = 0; added && k < added->n && st == TL_OK; k++, i = nodes[i].next) {
        st = read_id(l, tl_tkjson_get(&l->js, &nodes[i], "id"), "of added_tokens", 15, &id);
        if (st == TL_OK && id > highest)
            highest = id;
    }
    if (st != TL_OK)
        return st;
    if (highest < 0)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "model.vocab is empty");
    l->tk->tokens = tl_calloc((size_t)highest + 1, sizeof(*l->tk->tokens));
    if (!l->tk->tokens)
        return tl_fail_host_memory(l->err, ((size_t)highest + 1) * sizeof(*l->tk->tokens));
    l->tk->n_tokens = highest + 1;
    st = tl_tk_buf_reserve(&l->tk->texts, bytes + 1, l->err);
    return st == TL_OK ? tl_tk_vocab_alloc(l->tk, vocab->n, l->err) : st;
}

static enum tl_status load_vocab(struct tl_tk_load *l, const struct tl_tkjson_node *vocab)
{
    const struct tl_tkjson_node *nodes = l->js.nodes;
    struct tl_tokenizer *tk = l->tk;
    uint32_t i = (uint32_t)(vocab - nodes) + 1;
    enum tl_status st = TL_OK;
    char s[8];
    for (uint32_t k = 0; k < vocab->n && st == TL_OK; k++, i = nodes[i].next) {
        int32_t id = 0;
        if (tl_tk_vocab_find(tk, nodes[i].key, nodes[i].key_bytes) >= 0)
            return tl_fail(l->err, TL_ERR_BAD_FILE, "model.vocab has the token '%.*s' twice",
                           TL_TK_SHOWN(nodes[i].key_bytes), nodes[i].key);
        st = read_id(l, &nodes[i], nodes[i].key, nodes[i].key_bytes, &id);
        if (st == TL_OK)
            st = set_token(l, id, nodes[i].key, nodes[i].key_bytes);
        if (st == TL_OK)
            tl_tk_vocab_put(tk, id);
    }
    for (uint32_t cp = 0; cp < TL_TK_CHAR_IDS; cp++)
        tk->char_ids[cp] = tl_tk_vocab_find(tk, s, (size_t)tl_utf8_put(cp, s));
    for (unsigned b = 0; b < 256; b++)
        tk->byte_ids[b] = tl_tk_vocab_find(tk, s, (size_t)snprintf(s, sizeof(s), "<0x%02X>", b));
    return st;
}

/* ---- merges ------------------------------------------------------------------------------------------------------ */

/* A merge is "left right" or ["left", "right"]. */
static bool merge_sides(const struct tl_tk_load *l, const struct tl_tkjson_node *n, const char *side[2],
                        size_t bytes[2])
{
    if (n->type == TL_TKJSON_ARRAY && n->n == 2 && n[1].type == TL_TKJSON_STRING) {
        const struct tl_tkjson_node *right = &l->js.nodes[n[1].next];
        side[0] = n[1].text;
        bytes[0] = n[1].n;
        side[1] = right->text;
        bytes[1] = right->n;
        return right->type == TL_TKJSON_STRING;
    }
    if (n->type == TL_TKJSON_STRING) {
        const char *blank = memchr(n->text, ' ', n->n);
        if (!blank)
            return false;
        side[0] = n->text;
        bytes[0] = (size_t)(blank - n->text);
        side[1] = blank + 1;
        bytes[1] = n->n - bytes[0] - 1;
        return !memchr(side[1], ' ', bytes[1]);
    }
    return false;
}

static enum tl_status load_merges(struct tl_tk_load *l, const struct tl_tkjson_node *merges)
{
    const struct tl_tkjson_node *nodes = l->js.nodes;
    uint32_t i = (uint32_t)(merges - nodes) + 1;
    struct tl_tk_buf joined = {0};
    struct tl_tk_merge m = {.rank = 0};
    enum tl_status st = tl_tk_merges_alloc(l->tk, merges->n, l->err);
    for (uint32_t k = 0; k < merges->n && st == TL_OK; k++, i = nodes[i].next) {
        const char *side[2];
        size_t bytes[2];
        if (nodes[i].type == TL_TKJSON_STRING && nodes[i].n >= 8 && memcmp(nodes[i].text, "#version", 8) == 0)
            continue; /* the headline of a merges.txt */
        if (!merge_sides(l, &nodes[i], side, bytes)) {
            st = tl_fail(l->err, TL_ERR_BAD_FILE, "model.merges[%u] is not a pair of tokens", (unsigned)k);
            break;
        }
        joined.n = 0;
        st = tl_tk_buf_add(&joined, side[0], bytes[0], l->err);
        if (st == TL_OK)
            st = tl_tk_buf_add(&joined, side[1], bytes[1], l->err);
        if (st != TL_OK)
            break;
        m.left = tl_tk_vocab_find(l->tk, side[0], bytes[0]);
        m.right = tl_tk_vocab_find(l->tk, side[1], bytes[1]);
        m.id = tl_tk_vocab_find(l->tk, joined.p, joined.n);
        if (m.left < 0 || m.right < 0 || m.id < 0)
            st = tl_fail(l->err, TL_ERR_BAD_FILE, "model.merges[%u]: '%.*s' + '%.*s' is not in model.vocab",
                         (unsigned)k, TL_TK_SHOWN(bytes[0]), side[0], TL_TK_SHOWN(bytes[1]), side[1]);
        else
            tl_tk_merge_put(l->tk, m);
        m.rank++;
    }
    tl_free(joined.p);
    return st;
}

/* ---- model ------------------------------------------------------------------------------------------------------- */

/* Parts of the BPE model that change the result and that no supported model uses. */
static enum tl_status refuse_model_parts(struct tl_tk_load *l, const struct tl_tkjson_node *model)
{
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    const struct tl_tkjson_node *n = tl_tkjson_get(&l->js, model, "type");
    if (n && !tl_tkjson_is(n, "BPE"))
        return tl_fail(l->err, TL_ERR_UNSUPPORTED, "model.type '%.*s' is not supported, only BPE is",
                       n->type == TL_TKJSON_STRING ? TL_TK_SHOWN(n->n) : 0, n->text ? n->text : "");
    for (int i = 0; i < 2; i++) {
        n = tl_tkjson_get(&l->js, model, affixes[i]);
        if (n && n->type != TL_TKJSON_NULL && !tl_tkjson_is(n, ""))
            return tl_fail(l->err, TL_ERR_UNSUPPORTED, "model.%s is set, which is not supported", affixes[i]);
    }
    n = tl_tkjson_get(&l->js, model, "dropout");
    if (n && n->type == TL_TKJSON_NUMBER && strspn(n->text, "0.") >= n->n)
        return TL_OK;
    if (n && n->type != TL_TKJSON_NULL)
        return tl_fail(l->err, TL_ERR_UNSUPPORTED, "model.dropout is set, which would make tokens random");
    return TL_OK;
}

static enum tl_status load_unk(struct tl_tk_load *l, const struct tl_tkjson_node *model)
{
    const struct tl_tkjson_node *n = tl_tkjson_get(&l->js, model, "unk_token");
    l->tk->unk_id = -1;
    if (!n || n->type == TL_TKJSON_NULL)
        return TL_OK;
    if (n->type == TL_TKJSON_STRING)
        l->tk->unk_id = tl_tk_vocab_find(l->tk, n->text, n->n);
    if (l->tk->unk_id < 0)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "model.unk_token is not a token of model.vocab");
    return TL_OK;
}

static enum tl_status load_model(struct tl_tk_load *l, const struct tl_tkjson_node *added)
{
    const struct tl_tkjson_node *model = tl_tkjson_get(&l->js, l->js.nodes, "model"), *vocab, *merges;
    struct tl_tokenizer *tk = l->tk;
    enum tl_status st;
    if (!model)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "there is no model");
    st = tl_tk_check_keys(l, model, "model",
                          "type dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback "
                          "ignore_merges vocab merges");
    if (st == TL_ERR_UNSUPPORTED && tl_tkjson_get(&l->js, model, "type"))
        refuse_model_parts(l, model); /* another type has other members: its name says more */
    else if (st == TL_OK)
        st = refuse_model_parts(l, model);
    if (st != TL_OK)
        return st;
    vocab = tl_tkjson_get(&l->js, model, "vocab");
    merges = tl_tkjson_get(&l->js, model, "merges");
    if (!vocab || vocab->type != TL_TKJSON_OBJECT || vocab->n == 0)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "model.vocab is not an object with tokens");
    if (!merges || merges->type != TL_TKJSON_ARRAY)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "model.merges is not a list");
    st = tl_tk_get_bool(l, model, "model", "byte_fallback", false, &tk->byte_fallback);
    if (st == TL_OK)
        st = tl_tk_get_bool(l, model, "model", "ignore_merges", false, &tk->ignore_merges);
    if (st == TL_OK)
        st = tl_tk_get_bool(l, model, "model", "fuse_unk", false, &tk->fuse_unk);
    if (st == TL_OK)
        st = alloc_tokens(l, vocab, added);
    if (st == TL_OK)
        st = load_vocab(l, vocab);
    if (st == TL_OK)
        st = load_merges(l, merges);
    return st == TL_OK ? load_unk(l, model) : st;
}

/* ---- added tokens ------------------------------------------------------------------------------------------------ */

/* One entry: its token exists afterwards, and a (except match) is filled. */
static enum tl_status read_added(struct tl_tk_load *l, const struct tl_tkjson_node *n, struct tl_tk_added *a)
{
    static const char where[] = "added_tokens";
    const struct tl_tkjson_node *content;
    struct tl_tokenizer *tk = l->tk;
    int32_t in_vocab;
    enum tl_status st = tl_tk_check_keys(l, n, where, "id content single_word lstrip rstrip normalized special");
    if (st == TL_OK)
        st = tl_tk_get_string(l, n, where, "content", &content);
    if (st == TL_OK && content->n == 0)
        st = tl_fail(l->err, TL_ERR_BAD_FILE, "an added token has no content");
    if (st == TL_OK)
        st = read_id(l, tl_tkjson_get(&l->js, n, "id"), content->text, content->n, &a->id);
    if (st == TL_OK)
        st = tl_tk_get_bool(l, n, where, "single_word", false, &a->single_word);
    if (st == TL_OK)
        st = tl_tk_get_bool(l, n, where, "lstrip", false, &a->lstrip);
    if (st == TL_OK)
        st = tl_tk_get_bool(l, n, where, "rstrip", false, &a->rstrip);
    if (st == TL_OK)
        st = tl_tk_get_bool(l, n, where, "special", false, &a->special);
    if (st == TL_OK)
        st = tl_tk_get_bool(l, n, where, "normalized", !a->special, &a->normalized);
    if (st != TL_OK)
        return st;
    in_vocab = tl_tk_vocab_find(tk, content->text, content->n);
    if (in_vocab >= 0 && in_vocab != a->id)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "token '%.*s' has id %d in model.vocab and id %d in added_tokens",
                       TL_TK_SHOWN(content->n), content->text, (int)in_vocab, (int)a->id);
    if (tk->tokens[a->id].flags & TL_TK_ADDED)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "added_tokens has id %d twice", (int)a->id);
    if (in_vocab < 0)
        st = set_token(l, a->id, content->text, content->n);
    if (st == TL_OK)
        tk->tokens[a->id].flags |= TL_TK_ADDED | (a->special ? TL_TK_SPECIAL : 0);
    return st;
}

static int compare_added(const void *pa, const void *pb)
{
    const struct tl_tk_added *a = pa, *b = pb;
    size_t n = a->match_bytes < b->match_bytes ? a->match_bytes : b->match_bytes;
    int c = memcmp(a->match, b->match, n);
    if (c == 0 && a->match_bytes != b->match_bytes)
        c = a->match_bytes < b->match_bytes ? -1 : 1;
    return c ? c : a->order - b->order;
}

/* What is searched for, ready for match_at. */
static enum tl_status finish_set(struct tl_tk_load *l, struct tl_tk_added_set *set, bool normalized)
{
    enum tl_status st = TL_OK;
    for (size_t i = 0; i < set->n && st == TL_OK; i++) {
        const struct tl_tk_token *t = &l->tk->tokens[set->v[i].id];
        struct tl_tk_buf match = {0};
        const char *text = l->tk->texts.p + t->text;
        if (normalized)
            st = tl_tk_normalize_once(l->tk, text, t->text_bytes, &match, l->err);
        else
            st = tl_tk_buf_add(&match, text, t->text_bytes, l->err);
        if (st == TL_OK && match.n == 0)
            st = tl_fail(l->err, TL_ERR_BAD_FILE, "nothing is left of the added token '%.*s' after the normalizer",
                         TL_TK_SHOWN(t->text_bytes), text);
        set->v[i].match = match.p;
        set->v[i].match_bytes = match.n;
        if (st == TL_OK)
            set->first[(unsigned char)match.p[0]] = true;
    }
    if (st == TL_OK && set->n > 0)
        qsort(set->v, set->n, sizeof(*set->v), compare_added);
    for (size_t i = 1; i < set->n && st == TL_OK; i++) {
        const struct tl_tk_token *a = &l->tk->tokens[set->v[i - 1].id], *b = &l->tk->tokens[set->v[i].id];
        if (a->text_bytes == b->text_bytes &&
            memcmp(l->tk->texts.p + a->text, l->tk->texts.p + b->text, a->text_bytes) == 0)
            st = tl_fail(l->err, TL_ERR_BAD_FILE, "added_tokens has '%.*s' twice", TL_TK_SHOWN(a->text_bytes),
                         l->tk->texts.p + a->text);
    }
    return st;
}

static enum tl_status load_added(struct tl_tk_load *l, const struct tl_tkjson_node *added)
{
    const struct tl_tkjson_node *nodes = l->js.nodes;
    struct tl_tokenizer *tk = l->tk;
    enum tl_status st = TL_OK;
    uint32_t i;
    if (!added || added->n == 0)
        return TL_OK;
    tk->added.v = tl_calloc(added->n, sizeof(*tk->added.v));
    tk->added_normalized.v = tl_calloc(added->n, sizeof(*tk->added.v));
    if (!tk->added.v || !tk->added_normalized.v)
        return tl_fail_host_memory(l->err, added->n * sizeof(*tk->added.v));
    i = (uint32_t)(added - nodes) + 1;
    for (uint32_t k = 0; k < added->n && st == TL_OK; k++, i = nodes[i].next) {
        struct tl_tk_added a = {.id = 0};
        struct tl_tk_added_set *set;
        st = read_added(l, &nodes[i], &a);
        a.order = (int)k + (a.special ? 0 : (int)added->n);
        set = a.normalized ? &tk->added_normalized : &tk->added;
        set->v[set->n++] = a;
    }
    if (st == TL_OK)
        st = finish_set(l, &tk->added, false);
    return st == TL_OK ? finish_set(l, &tk->added_normalized, true) : st;
}

/* ---- the whole --------------------------------------------------------------------------------------------------- */

enum tl_status tl_tk_load(struct tl_tokenizer *tk, char *text, size_t bytes, struct tl_error *err)
{
    struct tl_tk_load l = {.tk = tk, .err = err};
    const struct tl_tkjson_node *added = NULL;
    enum tl_status st = tl_tkjson_parse(&l.js, text, bytes, err);
    if (st == TL_OK)
        st = tl_tk_check_keys(&l, l.js.nodes, "the file",
                              "version truncation padding added_tokens normalizer pre_tokenizer post_processor decoder "
                              "model");
    if (st == TL_OK) {
        added = tl_tkjson_get(&l.js, l.js.nodes, "added_tokens");
        if (added && added->type == TL_TKJSON_NULL)
            added = NULL;
        if (added && added->type != TL_TKJSON_ARRAY)
            st = tl_fail(err, TL_ERR_BAD_FILE, "added_tokens is not a list");
    }
    if (st == TL_OK)
        st = load_model(&l, added);
    if (st == TL_OK)
        st = tl_tk_load_normalizers(&l);
    if (st == TL_OK)
        st = tl_tk_load_stages(&l);
    if (st == TL_OK)
        st = load_added(&l, added);
    if (st == TL_OK)
        st = tl_tk_load_template(&l);
    if (st == TL_OK)
        st = tl_tk_load_decoders(&l);
    if (st == TL_OK)
        st = tl_tk_make_pieces(tk, err);
    tl_tkjson_free(&l.js);
    return st;
}
