/* JSON schemas to expressions. What is not understood is refused with its JSON pointer; the documented liberties are those that
 * leave every output valid: properties come in the order of the schema, an object or array that says what it holds holds
 * nothing else unless additionalProperties or items say so, oneOf is read as anyOf, and a schema without "type" has the one its
 * keywords are about. */
#include "grammar_json.h"

#include "json.h"
#include "mem.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N(a) (sizeof(a) / sizeof((a)[0]))

enum group { NOTE, REF, CONSTANT, COMBINE, TYPE, STRING, NUMBER, OBJECT, ARRAY, UNSUPPORTED };

static const struct keyword {
    const char *name;
    enum group group;
} keywords[] = {
    {"title", NOTE},
    {"description", NOTE},
    {"default", NOTE},
    {"examples", NOTE},
    {"example", NOTE},
    {"$comment", NOTE},
    {"$schema", NOTE},
    {"$id", NOTE},
    {"id", NOTE},
    {"deprecated", NOTE},
    {"readOnly", NOTE},
    {"writeOnly", NOTE},
    {"$defs", NOTE},
    {"definitions", NOTE},
    {"discriminator", NOTE},
    {"$ref", REF},
    {"enum", CONSTANT},
    {"const", CONSTANT},
    {"anyOf", COMBINE},
    {"oneOf", COMBINE},
    {"allOf", COMBINE},
    {"type", TYPE},
    {"nullable", TYPE},
    {"minLength", STRING},
    {"maxLength", STRING},
    {"pattern", STRING},
    {"format", STRING},
    {"minimum", NUMBER},
    {"maximum", NUMBER},
    {"exclusiveMinimum", NUMBER},
    {"exclusiveMaximum", NUMBER},
    {"multipleOf", NUMBER},
    {"properties", OBJECT},
    {"required", OBJECT},
    {"additionalProperties", OBJECT},
    {"minProperties", OBJECT},
    {"maxProperties", OBJECT},
    {"items", ARRAY},
    {"prefixItems", ARRAY},
    {"additionalItems", ARRAY},
    {"minItems", ARRAY},
    {"maxItems", ARRAY},
    {"uniqueItems", ARRAY},
    {"not", UNSUPPORTED},
    {"if", UNSUPPORTED},
    {"then", UNSUPPORTED},
    {"else", UNSUPPORTED},
    {"dependentSchemas", UNSUPPORTED},
    {"dependentRequired", UNSUPPORTED},
    {"dependencies", UNSUPPORTED},
    {"patternProperties", UNSUPPORTED},
    {"propertyNames", UNSUPPORTED},
    {"unevaluatedProperties", UNSUPPORTED},
    {"unevaluatedItems", UNSUPPORTED},
    {"contains", UNSUPPORTED},
    {"minContains", UNSUPPORTED},
    {"maxContains", UNSUPPORTED},
    {"$dynamicRef", UNSUPPORTED},
    {"$dynamicAnchor", UNSUPPORTED},
    {"$recursiveRef", UNSUPPORTED},
    {"$anchor", UNSUPPORTED},
    {"$vocabulary", UNSUPPORTED},
};

static const char *const types[] = {"null", "boolean", "string", "integer", "number", "object", "array"};
enum type { T_NULL, T_BOOLEAN, T_STRING, T_INTEGER, T_NUMBER, T_OBJECT, T_ARRAY };

/* ---- pointers and refusals ---- */

static void path_add(struct tl_schema *s, const char *p, size_t n)
{
    if (!TL_VEC_ROOM(&s->path, (uint32_t)n * 2 + 2)) {
        tl_draft_no_memory(s->d);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        if (p[i] == '~' || p[i] == '/')
            s->path.at[s->path.n++] = '~';
        s->path.at[s->path.n++] = (char)(p[i] == '~' ? '0' : p[i] == '/' ? '1' : p[i]);
    }
}

uint32_t tl_schema_enter(struct tl_schema *s, const char *key)
{
    uint32_t mark = s->path.n;

    if (!key)
        return mark;
    if (!TL_VEC_ROOM(&s->path, 1)) {
        tl_draft_no_memory(s->d);
        return mark;
    }
    s->path.at[s->path.n++] = '/';
    path_add(s, key, strlen(key));
    return mark;
}

uint32_t tl_schema_enter_at(struct tl_schema *s, const char *key, int i)
{
    char number[16];
    uint32_t mark = tl_schema_enter(s, key);

    snprintf(number, sizeof(number), "%d", i);
    tl_schema_enter(s, number);
    return mark;
}

void tl_schema_leave(struct tl_schema *s, uint32_t mark) { s->path.n = mark; }

/* The pointer as it can stand in a message: cut in the middle of nothing but characters. */
static void pointer_of(const struct tl_schema *s, char *out, size_t size)
{
    uint32_t n = s->path.n, max = (uint32_t)size - 5;

    if (n <= max) {
        snprintf(out, size, "#%.*s", (int)n, s->path.n ? s->path.at : "");
        return;
    }
    while (max > 0 && (s->path.at[max] & 0xC0) == 0x80)
        max--;
    snprintf(out, size, "#%.*s...", (int)max, s->path.at);
}

void tl_schema_refuse(struct tl_schema *s, const char *key, const char *why)
{
    uint32_t mark = tl_schema_enter(s, key);
    char pointer[160];

    pointer_of(s, pointer, sizeof(pointer));
    if (s->d->st == TL_OK) {
        tl_draft_fail(s->d, TL_ERR_UNSUPPORTED_SCHEMA, "json_schema at %s: %s", pointer, why);
        tl_error_param(s->d->err, strlen(pointer) < sizeof(s->d->err->param) ? pointer : "json_schema");
    }
    tl_schema_leave(s, mark);
}

uint32_t tl_schema_rule(struct tl_schema *s, uint32_t body)
{
    char pointer[160];
    uint32_t rule;

    pointer_of(s, pointer, sizeof(pointer));
    rule = tl_draft_rule(s->d, pointer, strlen(pointer));
    tl_draft_define(s->d, rule, body);
    return tl_draft_call(s->d, rule);
}

int tl_schema_count(struct tl_schema *s, const struct cJSON *node, const char *key, int otherwise)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(node, key);
    char why[96];

    if (!v)
        return otherwise;
    if (cJSON_IsNumber(v) && v->valuedouble > s->d->limits.repeat_max) {
        snprintf(why, sizeof(why), "it is %.17g, the limit is %d", v->valuedouble, s->d->limits.repeat_max);
        tl_schema_refuse(s, key, why);
        return otherwise;
    }
    if (!cJSON_IsNumber(v) || v->valuedouble < 0 || v->valuedouble != (double)(int)v->valuedouble) {
        tl_schema_refuse(s, key, "it must be a whole number of 0 or more");
        return otherwise;
    }
    return (int)v->valuedouble;
}

static enum group group_of(const char *name)
{
    for (size_t i = 0; i < N(keywords); i++)
        if (strcmp(keywords[i].name, name) == 0)
            return keywords[i].group;
    return UNSUPPORTED;
}

bool tl_schema_is_note(const char *key) { return group_of(key) == NOTE; }

/* The key by which an inner schema becomes a document of its own, whose references start there. NULL: none. */
static const char *own_base(const struct tl_schema *s, const struct cJSON *node)
{
    static const char *const keys[] = {"$id", "id"};

    for (size_t i = 0; i < N(keys) && node != s->root; i++) {
        const cJSON *id = cJSON_GetObjectItemCaseSensitive(node, keys[i]);
        if (cJSON_IsString(id) && id->valuestring[0] != '#')
            return keys[i];
    }
    return NULL;
}

void tl_schema_check_keys(struct tl_schema *s, const struct cJSON *node)
{
    const char *base = own_base(s, node);
    const cJSON *k;

    if (base)
        tl_schema_refuse(s, base, "it is supported for the whole document only");
    for (k = node->child; k && s->d->st == TL_OK; k = k->next)
        if (group_of(k->string) == UNSUPPORTED)
            tl_schema_refuse(s, k->string, "this keyword is not supported");
    if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(node, "uniqueItems")))
        tl_schema_refuse(s, "uniqueItems", "this keyword is not supported");
}

static bool has_group(const struct cJSON *node, enum group g)
{
    const cJSON *k;

    cJSON_ArrayForEach(k, node) if (group_of(k->string) == g) return true;
    return false;
}

/* Beside the keyword `main`, only notes, "nullable" and keywords of the given group have a meaning that is kept. */
static void check_alone(struct tl_schema *s, const struct cJSON *node, const char *main, bool with_type)
{
    const cJSON *k;
    char why[96];

    cJSON_ArrayForEach(k, node)
    {
        if (strcmp(k->string, main) == 0 || group_of(k->string) == NOTE || strcmp(k->string, "nullable") == 0 ||
            (with_type && strcmp(k->string, "type") == 0))
            continue;
        snprintf(why, sizeof(why), "this keyword is not supported beside %s", main);
        tl_schema_refuse(s, k->string, why);
    }
}

/* ---- $ref ---- */

bool tl_schema_may_search(struct tl_schema *s, int64_t n)
{
    s->n_looked_at += n;
    if (s->n_looked_at <= TL_SCHEMA_SEARCH_MAX)
        return s->d->st == TL_OK;
    tl_schema_refuse(s, NULL, "there are too many names and references to search");
    return false;
}

/* One step of a pointer: the part up to '/' with its escapes resolved. */
static const cJSON *step(struct tl_schema *s, const cJSON *node, const char *part, size_t n)
{
    char *key = tl_schema_may_search(s, cJSON_GetArraySize(node)) ? tl_malloc(n + 1) : NULL;
    const cJSON *to;
    size_t k = 0;

    if (!key) {
        tl_draft_no_memory(s->d);
        return NULL;
    }
    for (size_t i = 0; i < n; i++) {
        unsigned code;
        if (part[i] == '~' && i + 1 < n && (part[i + 1] == '0' || part[i + 1] == '1'))
            key[k++] = part[++i] == '0' ? '~' : '/';
        else if (part[i] == '%' && i + 2 < n && sscanf(part + i + 1, "%2x", &code) == 1) {
            key[k++] = (char)code;
            i += 2;
        } else
            key[k++] = part[i];
    }
    key[k] = '\0';
    if (cJSON_IsArray(node))
        to = k > 0 && k < 8 && strspn(key, "0123456789") == k ? cJSON_GetArrayItem(node, atoi(key)) : NULL;
    else
        to = cJSON_IsObject(node) ? cJSON_GetObjectItemCaseSensitive(node, key) : NULL;
    tl_free(key);
    return to;
}

const struct cJSON *tl_schema_target(struct tl_schema *s, const struct cJSON *ref)
{
    const char *p = cJSON_IsString(ref) ? ref->valuestring : "";
    const cJSON *node = s->root;

    if (p[0] != '#' || (p[1] != '\0' && p[1] != '/')) {
        tl_schema_refuse(s, "$ref", "it must be a pointer into this document, such as \"#/$defs/name\"");
        return NULL;
    }
    for (p++; *p == '/' && node;) {
        size_t n = strcspn(++p, "/");
        if (own_base(s, node)) {
            tl_schema_refuse(s, "$ref", "it leads through a schema with an $id of its own");
            return NULL;
        }
        node = step(s, node, p, n);
        p += n;
    }
    if (!node)
        tl_schema_refuse(s, "$ref", "it points to nothing in this document");
    return node;
}

/* The rule for a schema that a $ref points to; its body is made later, so that schemas may refer to themselves. */
static uint32_t ref_rule(struct tl_schema *s, const struct cJSON *node, const char *pointer)
{
    if (!node || !tl_schema_may_search(s, s->refs.n / 8))
        return 0;
    for (uint32_t i = 0; i < s->refs.n; i++)
        if (s->refs.at[i].node == node)
            return tl_draft_call(s->d, s->refs.at[i].rule);
    if (s->refs.n >= 2000) { /* which also bounds the search */
        tl_schema_refuse(s, "$ref", "more than 2000 different targets are referred to");
        return 0;
    }
    if (!TL_VEC_ROOM(&s->refs, 1)) {
        tl_draft_no_memory(s->d);
        return 0;
    }
    s->refs.at[s->refs.n] = (struct tl_schema_ref){node, tl_draft_rule(s->d, pointer, strlen(pointer))};
    return tl_draft_call(s->d, s->refs.at[s->refs.n++].rule);
}

/* ---- values ---- */

static bool is_type(const cJSON *v, enum type t)
{
    switch (t) {
    case T_NULL: return cJSON_IsNull(v);
    case T_BOOLEAN: return cJSON_IsBool(v);
    case T_STRING: return cJSON_IsString(v);
    case T_INTEGER:
        return cJSON_IsNumber(v) && v->valuedouble >= -0x1p53 && v->valuedouble <= 0x1p53 &&
               v->valuedouble == (double)(int64_t)v->valuedouble;
    case T_NUMBER: return cJSON_IsNumber(v);
    case T_OBJECT: return cJSON_IsObject(v);
    case T_ARRAY: return cJSON_IsArray(v);
    }
    return false;
}

/* One bit per type that the schema names or its keywords are about; 0: any. */
static unsigned types_of(struct tl_schema *s, const struct cJSON *node)
{
    const cJSON *t = cJSON_GetObjectItemCaseSensitive(node, "type"), *one;
    unsigned found = 0;

    if (!t) {
        found |= has_group(node, OBJECT) ? 1u << T_OBJECT : 0;
        found |= has_group(node, ARRAY) ? 1u << T_ARRAY : 0;
        found |= has_group(node, STRING) ? 1u << T_STRING : 0;
        found |= has_group(node, NUMBER) ? 1u << T_NUMBER : 0;
        if (found & (found - 1))
            tl_schema_refuse(s, NULL, "\"type\" is missing, and the keywords are about more than one");
        return found;
    }
    one = cJSON_IsArray(t) ? t->child : t;
    if (!one)
        tl_schema_refuse(s, "type", "it names no type");
    for (; one; one = cJSON_IsArray(t) ? one->next : NULL) {
        size_t i = 0;
        while (i < N(types) && !(cJSON_IsString(one) && strcmp(one->valuestring, types[i]) == 0))
            i++;
        if (i == N(types)) {
            tl_schema_refuse(s, "type",
                             "it must be null, boolean, string, integer, number, object, array or a list of these");
            return 0;
        }
        found |= 1u << i;
    }
    if (found & 1u << T_NUMBER)
        found &= ~(1u << T_INTEGER);
    return found;
}

static uint32_t words(struct tl_schema *s, const char *a, const char *b)
{
    uint32_t first = s->d->words.n;

    tl_draft_add_word(s->d, a, strlen(a));
    if (b)
        tl_draft_add_word(s->d, b, strlen(b));
    return tl_draft_words(s->d, first);
}

static uint32_t typed(struct tl_schema *s, const struct cJSON *node, enum type t, int depth)
{
    switch (t) {
    case T_NULL: return words(s, "null", NULL);
    case T_BOOLEAN: return words(s, "true", "false");
    case T_STRING: return tl_schema_string(s, node);
    case T_INTEGER: return tl_schema_number(s, node, true);
    case T_NUMBER: return tl_schema_number(s, node, false);
    case T_OBJECT: return tl_schema_object(s, node, depth);
    case T_ARRAY: return tl_schema_array(s, node, depth);
    }
    return 0;
}

/* enum and const: the values that fit the type, word for word. */
static uint32_t constant(struct tl_schema *s, const struct cJSON *node, const char *key)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(node, key), *v;
    bool one = strcmp(key, "const") == 0;
    unsigned allowed = cJSON_GetObjectItemCaseSensitive(node, "type") ? types_of(s, node) : ~0u;
    uint32_t first = s->d->words.n, x = 0;
    TL_VEC(uint32_t) kids = {0};

    check_alone(s, node, key, true);
    if (!one && !cJSON_IsArray(list)) {
        tl_schema_refuse(s, key, "it must be a list");
        return 0;
    }
    for (int pass = 0; pass < 2 && s->d->st == TL_OK;
         pass++) { /* composite values first: the words must stand together */
        first = s->d->words.n;
        for (v = one ? list : list->child; v && s->d->st == TL_OK; v = one ? NULL : v->next) {
            bool composite = cJSON_IsObject(v) || cJSON_IsArray(v), fits = false;
            for (size_t t = 0; t < N(types); t++)
                fits = fits || ((allowed & 1u << t) && is_type(v, (enum type)t));
            if (!fits || composite != (pass == 0))
                continue;
            if (!composite)
                tl_json_add_scalar(s->d, v);
            else if (TL_VEC_ROOM(&kids, 2))
                kids.at[kids.n++] = tl_json_const(&s->w, v);
            else
                tl_draft_no_memory(s->d);
        }
    }
    if (s->d->words.n > first && TL_VEC_ROOM(&kids, 1))
        kids.at[kids.n++] = tl_draft_words(s->d, first);
    if (kids.n == 0)
        tl_schema_refuse(s, key, "no value of it fits the type");
    x = tl_draft_alt(s->d, kids.at, kids.n);
    tl_free(kids.at);
    return x;
}

static uint32_t any_of(struct tl_schema *s, const struct cJSON *node, const char *key, int depth)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(node, key), *kid;
    TL_VEC(uint32_t) kids = {0};
    uint32_t x;

    check_alone(s, node, key, false);
    if (!cJSON_IsArray(list) || !list->child)
        tl_schema_refuse(s, key, "it must be a list of one or more schemas");
    cJSON_ArrayForEach(kid, list)
    {
        uint32_t mark = tl_schema_enter_at(s, key, (int)kids.n);
        if (s->d->st != TL_OK || !TL_VEC_ROOM(&kids, 1)) {
            tl_draft_no_memory(s->d);
            break;
        }
        kids.at[kids.n++] = tl_schema_value(s, kid, depth + 1);
        tl_schema_leave(s, mark);
    }
    x = tl_draft_alt(s->d, kids.at, kids.n);
    tl_free(kids.at);
    return x;
}

/* true: the schema says nothing that narrows its values but for a $ref or allOf of one, which is then all there is. */
static const cJSON *only_ref(const struct cJSON *node)
{
    const cJSON *k, *ref = NULL;

    cJSON_ArrayForEach(k, node)
    {
        if (strcmp(k->string, "$ref") == 0)
            ref = k;
        else if (group_of(k->string) != NOTE && strcmp(k->string, "nullable") != 0)
            return NULL;
    }
    return ref;
}

static uint32_t not_null(struct tl_schema *s, const struct cJSON *node, int depth)
{
    const cJSON *ref = cJSON_GetObjectItemCaseSensitive(node, "$ref"),
                *all = cJSON_GetObjectItemCaseSensitive(node, "allOf");
    uint32_t kids[N(types)], n = 0;
    unsigned found;

    if (only_ref(node))
        return ref_rule(s, tl_schema_target(s, ref), ref->valuestring);
    if (all && cJSON_IsArray(all) && cJSON_GetArraySize(all) == 1 && !ref) {
        const cJSON *k;
        bool alone = true;
        cJSON_ArrayForEach(k, node) alone =
            alone && (k == all || group_of(k->string) == NOTE || strcmp(k->string, "nullable") == 0);
        if (alone) {
            uint32_t mark = tl_schema_enter_at(s, "allOf", 0), x = tl_schema_value(s, all->child, depth + 1);
            tl_schema_leave(s, mark);
            return x;
        }
    }
    if (ref || all)
        return tl_schema_object(s, node, depth);
    if (cJSON_GetObjectItemCaseSensitive(node, "const"))
        return constant(s, node, "const");
    if (cJSON_GetObjectItemCaseSensitive(node, "enum"))
        return constant(s, node, "enum");
    if (cJSON_GetObjectItemCaseSensitive(node, "anyOf"))
        return any_of(s, node, "anyOf", depth);
    if (cJSON_GetObjectItemCaseSensitive(node, "oneOf"))
        return any_of(s, node, "oneOf", depth);
    found = types_of(s, node);
    if (found == 0)
        return tl_json_call(&s->w, TL_JSON_ANY);
    for (unsigned t = 0; t < N(types); t++)
        if (found & 1u << t)
            kids[n++] = typed(s, node, (enum type)t, depth);
    return tl_draft_alt(s->d, kids, n);
}

uint32_t tl_schema_value(struct tl_schema *s, const struct cJSON *node, int depth)
{
    const cJSON *nullable;
    uint32_t x;

    if (s->d->st != TL_OK)
        return 0;
    if (cJSON_IsTrue(node))
        return tl_json_call(&s->w, TL_JSON_ANY);
    if (cJSON_IsFalse(node)) {
        tl_schema_refuse(s, NULL, "the schema false allows no value");
        return 0;
    }
    if (!cJSON_IsObject(node)) {
        tl_schema_refuse(s, NULL, "a schema must be an object or true");
        return 0;
    }
    if (depth > TL_SCHEMA_DEPTH_MAX) {
        tl_schema_refuse(s, NULL, "schemas are nested deeper than 64");
        return 0;
    }
    tl_schema_check_keys(s, node);
    if (s->d->st != TL_OK) /* there may be any number of keys */
        return 0;
    nullable = cJSON_GetObjectItemCaseSensitive(node, "nullable");
    if (nullable && !cJSON_IsBool(nullable))
        tl_schema_refuse(s, "nullable", "it must be true or false");
    x = not_null(s, node, depth);
    if (cJSON_IsTrue(nullable)) {
        uint32_t kids[2] = {x, words(s, "null", NULL)};
        x = tl_draft_alt(s->d, kids, 2);
    }
    return x;
}

void tl_schema_read(struct tl_draft *d, const char *text, size_t n)
{
    struct tl_schema s = {.d = d, .w = {.d = d}};
    cJSON *json = NULL;
    uint32_t kids[2];
    enum tl_status st = tl_json_parse(&json, text, n, "json_schema", d->err);

    if (st != TL_OK) {
        d->st = st == TL_ERR_NO_HOST_MEMORY ? st : TL_ERR_INVALID_GRAMMAR;
        if (d->err)
            d->err->status = d->st;
        tl_error_param(d->err, "json_schema");
        return;
    }
    d->st_bad = TL_ERR_UNSUPPORTED_SCHEMA;
    s.root = json;
    d->root = tl_draft_rule(d, "root", 4);
    kids[0] = tl_json_call(&s.w, TL_JSON_BLANKS);
    kids[1] = ref_rule(&s, json, "#");
    tl_draft_define(d, d->root, tl_draft_cat(d, kids, 2));
    while (s.n_done < s.refs.n && d->st == TL_OK) {
        struct tl_schema_ref ref = s.refs.at[s.n_done++];
        const struct tl_draft_rule *r = &d->rules.at[ref.rule];
        s.path.n = 0;
        if (!TL_VEC_ROOM(&s.path, r->n_name))
            tl_draft_no_memory(d);
        else if (r->n_name > 1) { /* the name is '#' and the pointer */
            memcpy(s.path.at, d->bytes.at + r->name + 1, r->n_name - 1);
            s.path.n = r->n_name - 1;
        }
        tl_draft_define(d, ref.rule, tl_schema_value(&s, ref.node, 0));
    }
    if (d->st != TL_OK && d->err && d->err->param[0] == '\0')
        tl_error_param(d->err, "json_schema");
    tl_json_free(json);
    tl_free(s.refs.at);
    tl_free(s.path.at);
}
