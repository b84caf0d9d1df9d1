/* The exchangeable parts of a tokenizer file. Each type of part is one function that reads its members and appends to an
 * array of the tokenizer; a Sequence appends its members in order. */
#include "tokenizer_impl.h"

#include "mem.h"

#include <string.h>

struct part_type {
    const char *name;
    enum tl_status (*read)(struct tl_tk_load *l, const struct tl_tkjson_node *obj);
};

/* A kind of part: where it stands in the file, the name of the list in its Sequence, its types. */
struct part_kind {
    const char *where, *list;
    const struct part_type *types; /* ends with a NULL name */
};

static enum tl_status load_part(struct tl_tk_load *l, const struct part_kind *kind, const struct tl_tkjson_node *obj)
{
    const struct tl_tkjson_node *type = tl_tkjson_get(&l->js, obj, "type"), *list;
    enum tl_status st = TL_OK;
    char keys[32] = "type ";
    uint32_t i;
    if (!type || type->type != TL_TKJSON_STRING)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "%s has no type", kind->where);
    for (const struct part_type *t = kind->types; t->name; t++)
        if (tl_tkjson_is(type, t->name))
            return t->read(l, obj);
    if (!tl_tkjson_is(type, "Sequence"))
        return tl_fail(l->err, TL_ERR_UNSUPPORTED, "%s of type '%.*s' is not supported", kind->where,
                       TL_TK_SHOWN(type->n), type->text);
    st = tl_tk_check_keys(l, obj, kind->where, strcat(keys, kind->list));
    if (st != TL_OK)
        return st;
    list = tl_tkjson_get(&l->js, obj, kind->list);
    if (!list || list->type != TL_TKJSON_ARRAY)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "%s.%s is not a list", kind->where, kind->list);
    i = (uint32_t)(list - l->js.nodes) + 1;
    for (uint32_t k = 0; k < list->n && st == TL_OK; k++, i = l->js.nodes[i].next)
        st = load_part(l, kind, &l->js.nodes[i]);
    return st;
}

/* The part of this kind at the root; a missing one or null is no part. */
static enum tl_status load_root(struct tl_tk_load *l, const struct part_kind *kind)
{
    const struct tl_tkjson_node *obj = tl_tkjson_get(&l->js, l->js.nodes, kind->where);
    return obj && obj->type != TL_TKJSON_NULL ? load_part(l, kind, obj) : TL_OK;
}

static enum tl_status check_room(struct tl_tk_load *l, const char *where, int n)
{
    if (n < TL_TK_STAGES_MAX)
        return TL_OK;
    return tl_fail(l->err, TL_ERR_UNSUPPORTED, "%s has more than %d parts", where, TL_TK_STAGES_MAX);
}

/* ---- shared members ---------------------------------------------------------------------------------------------- */

static enum tl_status copy_string(struct tl_tk_load *l, const struct tl_tkjson_node *n, char **out, size_t *bytes)
{
    char *p = tl_malloc(n->n);
    if (!p)
        return tl_fail_host_memory(l->err, n->n);
    memcpy(p, n->text, n->n);
    *out = p;
    *bytes = n->n;
    return TL_OK;
}

/* "pattern": {"String": text} or {"Regex": text} */
static enum tl_status read_pattern(struct tl_tk_load *l, const struct tl_tkjson_node *obj, const char *where,
                                   struct tl_tk_pattern *out)
{
    const struct tl_tkjson_node *pattern = tl_tkjson_get(&l->js, obj, "pattern"), *text;
    enum tl_status st;
    if (!pattern)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "%s has no pattern", where);
    st = tl_tk_check_keys(l, pattern, "a pattern", "String Regex");
    if (st != TL_OK)
        return st;
    text = pattern->n == 1 ? pattern + 1 : NULL;
    if (!text || text->type != TL_TKJSON_STRING || text->n == 0)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "the pattern of %s is not one string with text", where);
    if (tl_tkjson_get(&l->js, pattern, "String")) {
        out->kind = TL_TK_LITERAL;
        return copy_string(l, text, &out->literal, &out->literal_bytes);
    }
    out->kind = TL_TK_REGEX;
    return tl_tk_regex_compile(&out->code, text->text, text->n, l->tk->no_jit, l->err);
}

/* ---- normalizers ------------------------------------------------------------------------------------------------- */

static enum tl_status add_normalizer(struct tl_tk_load *l, struct tl_tk_normalizer **out)
{
    enum tl_status st = check_room(l, "normalizer", l->tk->n_normalizers);
    if (st == TL_OK)
        *out = &l->tk->normalizers[l->tk->n_normalizers++];
    return st;
}

static enum tl_status read_nfc(struct tl_tk_load *l, const struct tl_tkjson_node *obj)
{
    struct tl_tk_normalizer *nz;
    enum tl_status st = tl_tk_check_keys(l, obj, "normalizer NFC", "type");
    if (st == TL_OK)
        st = add_normalizer(l, &nz);
    if (st == TL_OK)
        nz->kind = TL_TK_NFC;
    return st;
}

static enum tl_status read_prepend(struct tl_tk_load *l, const struct tl_tkjson_node *obj)
{
    static const char where[] = "normalizer Prepend";
    const struct tl_tkjson_node *text;
    struct tl_tk_normalizer *nz;
    enum tl_status st = tl_tk_check_keys(l, obj, where, "type prepend");
    if (st == TL_OK)
        st = tl_tk_get_string(l, obj, where, "prepend", &text);
    if (st == TL_OK)
        st = add_normalizer(l, &nz);
    if (st != TL_OK)
        return st;
    nz->kind = TL_TK_PREPEND;
    return copy_string(l, text, &nz->content, &nz->content_bytes);
}

static enum tl_status read_replace(struct tl_tk_load *l, const struct tl_tkjson_node *obj)
{
    static const char where[] = "normalizer Replace";
    const struct tl_tkjson_node *text;
    struct tl_tk_normalizer *nz;
    enum tl_status st = tl_tk_check_keys(l, obj, where, "type pattern content");
    if (st == TL_OK)
        st = tl_tk_get_string(l, obj, where, "content", &text);
    if (st == TL_OK)
        st = add_normalizer(l, &nz);
    if (st != TL_OK)
        return st;
    nz->kind = TL_TK_REPLACE;
    st = copy_string(l, text, &nz->content, &nz->content_bytes);
    return st == TL_OK ? read_pattern(l, obj, where, &nz->pattern) : st;
}

enum tl_status tl_tk_load_normalizers(struct tl_tk_load *l)
{
    static const struct part_type types[] = {
        {"NFC", read_nfc}, {"Prepend", read_prepend}, {"Replace", read_replace}, {NULL, NULL}};
    static const struct part_kind kind = {"normalizer", "normalizers", types};
    return load_root(l, &kind);
}

/* ---- pre-tokenizers ---------------------------------------------------------------------------------------------- */

static enum tl_status add_stage(struct tl_tk_load *l, struct tl_tk_stage **out)
{
    enum tl_status st = check_room(l, "pre_tokenizer", l->tk->n_stages);
    if (st == TL_OK)
        *out = &l->tk->stages[l->tk->n_stages++];
    return st;
}

static enum tl_status read_split(struct tl_tk_load *l, const struct tl_tkjson_node *obj)
{
    static const char where[] = "pre_tokenizer Split";
    static const char *const names[] = {"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
    const struct tl_tkjson_node *behavior;
    struct tl_tk_stage *stage;
    int k = 0;
    enum tl_status st = tl_tk_check_keys(l, obj, where, "type pattern behavior invert");
    if (st == TL_OK)
        st = tl_tk_get_string(l, obj, where, "behavior", &behavior);
    if (st == TL_OK)
        st = add_stage(l, &stage);
    if (st != TL_OK)
        return st;
    while (k < 5 && !tl_tkjson_is(behavior, names[k]))
        k++;
    if (k == 5)
        return tl_fail(l->err, TL_ERR_UNSUPPORTED, "%s.behavior '%.*s' is not known", where, TL_TK_SHOWN(behavior->n),
                       behavior->text);
    stage->kind = TL_TK_SPLIT;
    stage->has_split = true;
    stage->behavior = (enum tl_tk_behavior)k;
    st = tl_tk_get_bool(l, obj, where, "invert", false, &stage->invert);
    return st == TL_OK ? read_pattern(l, obj, where, &stage->pattern) : st;
}

static enum tl_status read_byte_level_stage(struct tl_tk_load *l, const struct tl_tkjson_node *obj)
{
    static const char where[] = "pre_tokenizer ByteLevel";
    /* The words of GPT-2: contractions, then runs of letters, digits or other signs with one blank before them; of a run
     * of blanks the last one belongs to the word that follows. */
    static const char words[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    struct tl_tk_stage *stage;
    bool prefix_space, trim;
    enum tl_status st = tl_tk_check_keys(l, obj, where, "type add_prefix_space trim_offsets use_regex");
    if (st == TL_OK)
        st = add_stage(l, &stage);
    if (st == TL_OK)
        st = tl_tk_get_bool(l, obj, where, "add_prefix_space", true, &prefix_space);
    if (st == TL_OK)
        st = tl_tk_get_bool(l, obj, where, "trim_offsets", true, &trim);
    if (st == TL_OK)
        st = tl_tk_get_bool(l, obj, where, "use_regex", true, &stage->has_split);
    if (st != TL_OK)
        return st;
    stage->kind = TL_TK_BYTE_LEVEL;
    stage->prepend = prefix_space ? TL_TK_PREPEND_ALWAYS : TL_TK_PREPEND_NEVER;
    stage->behavior = TL_TK_ISOLATED;
    if (!stage->has_split)
        return TL_OK;
    stage->pattern.kind = TL_TK_REGEX;
    return tl_tk_regex_compile(&stage->pattern.code, words, sizeof(words) - 1, l->tk->no_jit, l->err);
}

static enum tl_status read_digits(struct tl_tk_load *l, const struct tl_tkjson_node *obj)
{
    static const char where[] = "pre_tokenizer Digits";
    struct tl_tk_stage *stage;
    bool individual = false;
    enum tl_status st = tl_tk_check_keys(l, obj, where, "type individual_digits");
    if (st == TL_OK)
        st = tl_tk_get_bool(l, obj, where, "individual_digits", false, &individual);
    if (st == TL_OK)
        st = add_stage(l, &stage);
    if (st != TL_OK)
        return st;
    stage->kind = TL_TK_SPLIT;
    stage->has_split = true;
    stage->pattern.kind = TL_TK_NUMERIC;
    stage->behavior = individual ? TL_TK_ISOLATED : TL_TK_CONTIGUOUS;
    return TL_OK;
}

static enum tl_status read_metaspace(struct tl_tk_load *l, const struct tl_tkjson_node *obj)
{
    static const char where[] = "pre_tokenizer Metaspace";
    const struct tl_tkjson_node *replacement, *scheme = tl_tkjson_get(&l->js, obj, "prepend_scheme");
    struct tl_tk_stage *stage;
    bool prefix_space;
    enum tl_status st =
        tl_tk_check_keys(l, obj, where, "type replacement add_prefix_space prepend_scheme split str_rep");
    if (st == TL_OK)
        st = tl_tk_get_string(l, obj, where, "replacement", &replacement);
    if (st == TL_OK)
        st = add_stage(l, &stage);
    if (st == TL_OK)
        st = tl_tk_get_bool(l, obj, where, "add_prefix_space", true, &prefix_space);
    if (st == TL_OK)
        st = tl_tk_get_bool(l, obj, where, "split", true, &stage->has_split);
    if (st != TL_OK)
        return st;
    if (scheme && tl_tkjson_is(scheme, "first"))
        stage->prepend = TL_TK_PREPEND_FIRST;
    else if (scheme && tl_tkjson_is(scheme, "never"))
        stage->prepend = TL_TK_PREPEND_NEVER;
    else if (!scheme || tl_tkjson_is(scheme, "always")) /* older files have add_prefix_space alone */
        stage->prepend = prefix_space ? TL_TK_PREPEND_ALWAYS : TL_TK_PREPEND_NEVER;
    else
        return tl_fail(l->err, TL_ERR_UNSUPPORTED, "%s.prepend_scheme is none of always, first, never", where);
    if (replacement->n == 0)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "%s.replacement is empty", where);
    stage->kind = TL_TK_METASPACE;
    stage->behavior = TL_TK_MERGED_WITH_NEXT;
    stage->pattern.kind = TL_TK_LITERAL;
    return copy_string(l, replacement, &stage->pattern.literal, &stage->pattern.literal_bytes);
}

enum tl_status tl_tk_load_stages(struct tl_tk_load *l)
{
    static const struct part_type types[] = {{"Split", read_split},
                                             {"ByteLevel", read_byte_level_stage},
                                             {"Digits", read_digits},
                                             {"Metaspace", read_metaspace},
                                             {NULL, NULL}};
    static const struct part_kind kind = {"pre_tokenizer", "pretokenizers", types};
    return load_root(l, &kind);
}

/* ---- post-processors --------------------------------------------------------------------------------------------- */

/* Append the ids of special token name to list. */
static enum tl_status add_special_ids(struct tl_tk_load *l, const struct tl_tkjson_node *specials,
                                      const struct tl_tkjson_node *name, struct tl_tk_ids *list)
{
    const struct tl_tkjson_node *ids = NULL;
    enum tl_status st = TL_OK;
    uint32_t i = specials ? (uint32_t)(specials - l->js.nodes) + 1 : 0;
    for (uint32_t k = 0; specials && k < specials->n && !ids; k++, i = l->js.nodes[i].next)
        if (l->js.nodes[i].key_bytes == name->n && memcmp(l->js.nodes[i].key, name->text, name->n) == 0)
            ids = tl_tkjson_get(&l->js, &l->js.nodes[i], "ids");
    if (!ids || ids->type != TL_TKJSON_ARRAY)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "the template's token '%.*s' has no ids in special_tokens",
                       TL_TK_SHOWN(name->n), name->text);
    i = (uint32_t)(ids - l->js.nodes) + 1;
    for (uint32_t k = 0; k < ids->n && st == TL_OK; k++, i = l->js.nodes[i].next) {
        int64_t id;
        const char *piece;
        size_t bytes;
        if (!tl_tkjson_int(&l->js.nodes[i], 0, TL_TOKENIZER_ID_MAX, &id) ||
            !tl_tokenizer_piece(l->tk, (int32_t)id, &piece, &bytes))
            return tl_fail(l->err, TL_ERR_BAD_FILE, "an id of the template's token '%.*s' is not in the vocabulary",
                           TL_TK_SHOWN(name->n), name->text);
        st = tl_tk_ids_add(list, (int32_t)id, l->err);
    }
    return st;
}

/* list += more[n] */
static enum tl_status join_ids(struct tl_tk_ids *list, const int32_t *more, size_t n, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    for (size_t i = 0; i < n && st == TL_OK; i++)
        st = tl_tk_ids_add(list, more[i], err);
    return st;
}

/* "single": ids of special tokens around one sequence A. A later template goes around what an earlier one made. */
static enum tl_status read_template(struct tl_tk_load *l, const struct tl_tkjson_node *obj)
{
    static const char where[] = "post_processor TemplateProcessing";
    const struct tl_tkjson_node *single, *specials = tl_tkjson_get(&l->js, obj, "special_tokens"), *part, *name;
    struct tl_tokenizer *tk = l->tk;
    struct tl_tk_ids before = {0}, after = {0};
    enum tl_status st = tl_tk_check_keys(l, obj, where, "type single pair special_tokens");
    int n_sequences = 0;
    uint32_t i;
    if (st != TL_OK)
        return st;
    single = tl_tkjson_get(&l->js, obj, "single");
    if (!single || single->type != TL_TKJSON_ARRAY)
        return tl_fail(l->err, TL_ERR_BAD_FILE, "%s.single is not a list", where);
    i = (uint32_t)(single - l->js.nodes) + 1;
    for (uint32_t k = 0; k < single->n && st == TL_OK; k++, i = l->js.nodes[i].next) {
        part = tl_tkjson_get(&l->js, &l->js.nodes[i], "SpecialToken");
        name = tl_tkjson_get(&l->js, part, "id");
        if (name && name->type == TL_TKJSON_STRING) {
            st = add_special_ids(l, specials, name, n_sequences > 0 ? &after : &before);
            continue;
        }
        part = tl_tkjson_get(&l->js, &l->js.nodes[i], "Sequence");
        if (!tl_tkjson_is(tl_tkjson_get(&l->js, part, "id"), "A"))
            st = tl_fail(l->err, TL_ERR_BAD_FILE, "%s.single[%u] is neither a special token nor sequence A", where,
                         (unsigned)k);
        n_sequences++;
    }
    if (st == TL_OK && n_sequences != 1)
        st = tl_fail(l->err, TL_ERR_UNSUPPORTED, "%s.single has sequence A %d times, only 1 is supported", where,
                     n_sequences);
    if (st == TL_OK)
        st = join_ids(&before, tk->prefix, tk->n_prefix, l->err);
    if (st == TL_OK && tk->n_suffix > 0) {
        struct tl_tk_ids inner = {0};
        st = join_ids(&inner, tk->suffix, tk->n_suffix, l->err);
        if (st == TL_OK)
            st = join_ids(&inner, after.v, after.n, l->err);
        tl_free(after.v);
        after = inner;
    }
    if (st == TL_OK) {
        tl_free(tk->prefix);
        tl_free(tk->suffix);
        tk->prefix = before.v;
        tk->n_prefix = before.n;
        tk->suffix = after.v;
        tk->n_suffix = after.n;
        return TL_OK;
    }
    tl_free(before.v);
    tl_free(after.v);
    return st;
}

/* It moves offsets only, and there are none here. */
static enum tl_status read_byte_level_post(struct tl_tk_load *l, const struct tl_tkjson_node *obj)
{
    return tl_tk_check_keys(l, obj, "post_processor ByteLevel", "type add_prefix_space trim_offsets use_regex");
}

enum tl_status tl_tk_load_template(struct tl_tk_load *l)
{
    static const struct part_type types[] = {
        {"TemplateProcessing", read_template}, {"ByteLevel", read_byte_level_post}, {NULL, NULL}};
    static const struct part_kind kind = {"post_processor", "processors", types};
    return load_root(l, &kind);
}

/* ---- decoders ---------------------------------------------------------------------------------------------------- */

static enum tl_status add_decoder(struct tl_tk_load *l, struct tl_tk_decoder **out)
{
    enum tl_status st = check_room(l, "decoder", l->tk->n_decoders);
    if (st == TL_OK && l->fused)
        st = tl_fail(l->err, TL_ERR_UNSUPPORTED, "a decoder other than Strip after Fuse or ByteLevel is not supported");
    if (st == TL_OK)
        *out = &l->tk->decoders[l->tk->n_decoders++];
    return st;
}

static enum tl_status read_byte_level_decoder(struct tl_tk_load *l, const struct tl_tkjson_node *obj)
{
    struct tl_tk_decoder *d;
    enum tl_status st = tl_tk_check_keys(l, obj, "decoder ByteLevel", "type add_prefix_space trim_offsets use_regex");
    if (st == TL_OK)
        st = add_decoder(l, &d);
    if (st == TL_OK)
        d->kind = TL_TK_DEC_BYTE_LEVEL;
    l->fused = true;
    return st;
}

static enum tl_status read_byte_fallback(struct tl_tk_load *l, const struct tl_tkjson_node *obj)
{
    struct tl_tk_decoder *d;
    enum tl_status st = tl_tk_check_keys(l, obj, "decoder ByteFallback", "type");
    if (st == TL_OK)
        st = add_decoder(l, &d);
    if (st == TL_OK)
        d->kind = TL_TK_DEC_BYTE_FALLBACK;
    return st;
}

static enum tl_status read_fuse(struct tl_tk_load *l, const struct tl_tkjson_node *obj)
{
    l->fused = true;
    return tl_tk_check_keys(l, obj, "decoder Fuse", "type");
}

static enum tl_status read_replace_decoder(struct tl_tk_load *l, const struct tl_tkjson_node *obj)
{
    static const char where[] = "decoder Replace";
    const struct tl_tkjson_node *text;
    struct tl_tk_decoder *d;
    enum tl_status st = tl_tk_check_keys(l, obj, where, "type pattern content");
    if (st == TL_OK)
        st = tl_tk_get_string(l, obj, where, "content", &text);
    if (st == TL_OK)
        st = add_decoder(l, &d);
    if (st != TL_OK)
        return st;
    d->kind = TL_TK_DEC_REPLACE;
    st = copy_string(l, text, &d->content, &d->content_bytes);
    return st == TL_OK ? read_pattern(l, obj, where, &d->pattern) : st;
}

/* Before Fuse it is about each token, after it about the whole text, of which only the start can be stripped while the
 * text streams. */
static enum tl_status read_strip(struct tl_tk_load *l, const struct tl_tkjson_node *obj)
{
    static const char where[] = "decoder Strip";
    const struct tl_tkjson_node *text;
    struct tl_tk_decoder *d;
    int64_t start, stop;
    enum tl_status st = tl_tk_check_keys(l, obj, where, "type content start stop");
    if (st == TL_OK)
        st = tl_tk_get_string(l, obj, where, "content", &text);
    if (st != TL_OK)
        return st;
    if (text->n == 0 || !tl_tkjson_int(tl_tkjson_get(&l->js, obj, "start"), 0, 1 << 20, &start) ||
        !tl_tkjson_int(tl_tkjson_get(&l->js, obj, "stop"), 0, 1 << 20, &stop))
        return tl_fail(l->err, TL_ERR_BAD_FILE, "%s needs content, start and stop (0 to %d)", where, 1 << 20);
    if (l->fused && (stop != 0 || !tl_tkjson_is(text, " ") || l->tk->n_strip > 0))
        return tl_fail(l->err, TL_ERR_UNSUPPORTED, "%s after Fuse can only strip blanks from the start, once", where);
    if (l->fused) {
        l->tk->n_strip = (int)start;
        return TL_OK;
    }
    st = add_decoder(l, &d);
    if (st != TL_OK)
        return st;
    d->kind = TL_TK_DEC_STRIP;
    d->start = (int)start;
    d->stop = (int)stop;
    return copy_string(l, text, &d->content, &d->content_bytes);
}

enum tl_status tl_tk_load_decoders(struct tl_tk_load *l)
{
    static const struct part_type types[] = {{"ByteLevel", read_byte_level_decoder},
                                             {"ByteFallback", read_byte_fallback},
                                             {"Fuse", read_fuse},
                                             {"Replace", read_replace_decoder},
                                             {"Strip", read_strip},
                                             {NULL, NULL}};
    static const struct part_kind kind = {"decoder", "decoders", types};
    const struct tl_tkjson_node *obj = tl_tkjson_get(&l->js, l->js.nodes, "decoder");
    struct tl_tk_decoder *d;
    enum tl_status st = load_root(l, &kind);
    /* A file without a decoder still has byte-level tokens if its pre-tokenizer makes them. */
    if (st == TL_OK && (!obj || obj->type == TL_TKJSON_NULL))
        for (int k = 0; k < l->tk->n_stages; k++)
            if (l->tk->stages[k].kind == TL_TK_BYTE_LEVEL && l->tk->n_decoders == 0) {
                st = add_decoder(l, &d);
                if (st == TL_OK)
                    d->kind = TL_TK_DEC_BYTE_LEVEL;
            }
    return st;
}
