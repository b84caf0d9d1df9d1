/* Objects and arrays of a schema. */
#include "grammar_json.h"

#include "mem.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#define PREFIX_ITEMS_MAX 200 /* they nest, and so does the C stack */
#define KEY_CHARS_MAX    200 /* of properties beside which others are open: the same */

struct property {
    const char *name;
    uint32_t value; /* expression; TL_UNKNOWN while only "required" has named it */
    bool required;
};
struct object {
    TL_VEC(struct property) props;
    const cJSON *others; /* additionalProperties, if it says more than true or false */
    bool has_properties, others_open, others_closed, others_said;
    int min, max; /* properties; max -1 = any number */
};

static struct property *find(struct tl_schema *s, struct object *o, const char *name)
{
    if (!tl_schema_may_search(s, o->props.n))
        return NULL;
    for (uint32_t i = 0; i < o->props.n; i++)
        if (strcmp(o->props.at[i].name, name) == 0)
            return &o->props.at[i];
    if (!TL_VEC_ROOM(&o->props, 1)) {
        tl_draft_no_memory(s->d);
        return NULL;
    }
    o->props.at[o->props.n] = (struct property){.name = name, .value = TL_UNKNOWN};
    return &o->props.at[o->props.n++];
}

static void collect_properties(struct tl_schema *s, struct object *o, const cJSON *list, int depth)
{
    const cJSON *k;

    if (list && !cJSON_IsObject(list))
        tl_schema_refuse(s, "properties", "it must be an object");
    cJSON_ArrayForEach(k, list)
    {
        uint32_t mark = tl_schema_enter(s, "properties"), value;
        struct property *p;
        tl_schema_enter(s, k->string);
        value = tl_schema_value(s, k, depth + 1);
        p = s->d->st == TL_OK ? find(s, o, k->string) : NULL;
        if (p && p->value != TL_UNKNOWN)
            tl_schema_refuse(s, NULL, "a property that stands twice in an allOf is not supported");
        if (s->d->st != TL_OK)
            return;
        p->value = value;
        tl_schema_leave(s, mark);
    }
}

static void collect_required(struct tl_schema *s, struct object *o, const cJSON *list)
{
    const cJSON *k;

    if (list && !cJSON_IsArray(list))
        tl_schema_refuse(s, "required", "it must be a list");
    cJSON_ArrayForEach(k, list)
    {
        struct property *p = cJSON_IsString(k) ? find(s, o, k->valuestring) : NULL;
        if (!p)
            tl_schema_refuse(s, "required", "it must be a list of strings");
        if (s->d->st != TL_OK)
            return;
        p->required = true;
    }
}

/* Add what the schema itself says, or one that it is put together from. depth counts both schemas inside schemas and parts
 * of parts, so a cycle of $ref ends, whichever way it goes. */
static void collect(struct tl_schema *s, struct object *o, const cJSON *node, bool is_part, int depth)
{
    static const char *const known[] = {
        "$ref",          "allOf",        "type", "nullable", "properties", "required", "additionalProperties",
        "minProperties", "maxProperties"};
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(node, "type"), *k;
    const cJSON *others = cJSON_GetObjectItemCaseSensitive(node, "additionalProperties");
    const cJSON *properties = cJSON_GetObjectItemCaseSensitive(node, "properties");
    const cJSON *ref = cJSON_GetObjectItemCaseSensitive(node, "$ref"),
                *all = cJSON_GetObjectItemCaseSensitive(node, "allOf");
    bool merging = is_part || ref || all, part_names = false;
    int v, i = 0;

    if (depth > TL_SCHEMA_DEPTH_MAX) {
        tl_schema_refuse(s, NULL, "schemas are nested deeper than 64");
        return;
    }
    if (!cJSON_IsObject(node)) {
        tl_schema_refuse(s, NULL, "allOf is supported for objects only");
        return;
    }
    tl_schema_check_keys(s, node);
    if (merging) { /* here the other keywords would be about something that is no object */
        if (type && !(cJSON_IsString(type) && strcmp(type->valuestring, "object") == 0))
            tl_schema_refuse(s, "type", "allOf is supported for objects only");
        cJSON_ArrayForEach(k, node)
        {
            size_t n = 0;
            while (n < sizeof(known) / sizeof(known[0]) && strcmp(k->string, known[n]) != 0)
                n++;
            if (n == sizeof(known) / sizeof(known[0]) && !tl_schema_is_note(k->string))
                tl_schema_refuse(s, k->string, "this keyword is not supported beside or inside an allOf");
        }
    }
    if (ref && s->d->st == TL_OK) {
        const cJSON *target = tl_schema_target(s, ref);
        if (target)
            collect(s, o, target, true, depth + 1);
    }
    if (all && (!cJSON_IsArray(all) || !all->child))
        tl_schema_refuse(s, "allOf", "it must be a list of one or more schemas");
    cJSON_ArrayForEach(k, all)
    {
        uint32_t mark = tl_schema_enter_at(s, "allOf", i++);
        if (s->d->st != TL_OK)
            return;
        collect(s, o, k, true, depth + 1);
        tl_schema_leave(s, mark);
    }
    for (uint32_t p = 0; p < o->props.n; p++)
        part_names = part_names || o->props.at[p].value != TL_UNKNOWN;
    collect_properties(s, o, properties, depth);
    collect_required(s, o, cJSON_GetObjectItemCaseSensitive(node, "required"));
    o->has_properties = o->has_properties || properties;
    if (others) {
        o->others_open = o->others_open || cJSON_IsTrue(others);
        o->others_closed = o->others_closed || cJSON_IsFalse(others);
        if (!cJSON_IsBool(others)) {
            if (!cJSON_IsObject(others))
                tl_schema_refuse(s, "additionalProperties", "it must be a schema, true or false");
            o->others = others;
        }
        o->others_said = true;
        if (is_part && !cJSON_IsTrue(others))
            tl_schema_refuse(s, "additionalProperties", "inside an allOf only true is supported");
        if (part_names && !cJSON_IsTrue(others)) /* it is about all but the properties of its own schema */
            tl_schema_refuse(s, "additionalProperties",
                             "beside properties that an allOf or $ref brings only true is supported");
    }
    v = tl_schema_count(s, node, "minProperties", 0);
    o->min = v > o->min ? v : o->min;
    v = tl_schema_count(s, node, "maxProperties", -1);
    o->max = v >= 0 && (o->max < 0 || v < o->max) ? v : o->max;
}

/* ---- keys that are none of the properties ---- */

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct property *)a)->name, ((const struct property *)b)->name);
}

struct key_parts {
    uint32_t rest;    /* anything, and the quote */
    uint32_t escaped; /* a character that needs an escape */
};

/* A character out of the ranges. Most often all that need an escape are among them: these are written once for all. */
static uint32_t leaving(struct tl_draft *d, const struct tl_range *ranges, uint32_t n, const struct key_parts *k)
{
    static const struct tl_range special[] = {{0, 0x1F}, {'"', '"'}, {'\\', '\\'}};
    TL_VEC(struct tl_range) r = {0};
    uint32_t parts[2] = {0, k->escaped}, n_gaps, x = 0;
    bool all = n > 0 && ranges[0].lo == 1;

    for (size_t i = 0; i < 3; i++) {
        bool found = false;
        for (uint32_t m = 0; m < n && !found; m++)
            found = ranges[m].lo <= (special[i].lo ? special[i].lo : 1) && ranges[m].hi >= special[i].hi;
        all = all && found;
    }
    if (!all)
        return tl_json_set(d, ranges, n);
    if (!TL_VEC_ROOM(&r, n + 5)) {
        tl_draft_no_memory(d);
        return 0;
    }
    n_gaps = tl_ranges_tidy(r.at, ranges, n, true);  /* what is not in the ranges, */
    memcpy(r.at + n_gaps, special, sizeof(special)); /* nor to be written as it is */
    parts[0] = tl_draft_set(d, r.at, n_gaps + 3, true);
    x = tl_draft_alt(d, parts, 2);
    tl_free(r.at);
    return x;
}

/* The rest of a key, and the quote, where names[0 .. n), sorted, all begin with the `from` bytes read so far. A key leaves the
 * names by one unescaped character; after that anything goes. */
static uint32_t other_key(struct tl_schema *s, const struct property *names, uint32_t n, size_t from, int depth,
                          const struct key_parts *k_parts)
{
    struct tl_draft *d = s->d;
    TL_VEC(uint32_t) kids = {0};
    TL_VEC(struct tl_range) taken = {0};
    bool is_name = false;
    uint32_t x = 0;

    if (depth > KEY_CHARS_MAX) {
        tl_schema_refuse(s, "additionalProperties",
                         "not supported beside properties whose names have more than 200 characters");
        return 0;
    }
    for (uint32_t i = 0, k; i < n && d->st == TL_OK; i = k) {
        const char *p = names[i].name + from;
        uint32_t cp, parts[2];
        int bytes;
        k = i + 1;
        if (*p == '\0') {
            is_name = true;
            continue;
        }
        bytes = tl_utf8_read(p, p + strlen(p), &cp);
        while (k < n && strncmp(names[k].name + from, p, (size_t)bytes) == 0)
            k++;
        if (!TL_VEC_ROOM(&kids, 3) || !TL_VEC_ROOM(&taken, 2)) {
            tl_draft_no_memory(d);
            break;
        }
        taken.at[taken.n++] = (struct tl_range){cp, cp};
        parts[0] = tl_json_set(d, &taken.at[taken.n - 1], 1);
        parts[1] = other_key(s, names + i, k - i, from + (size_t)bytes, depth + 1, k_parts);
        kids.at[kids.n++] = tl_draft_cat(d, parts, 2);
    }
    if (d->st == TL_OK && TL_VEC_ROOM(&kids, 3) && TL_VEC_ROOM(&taken, 2)) {
        uint32_t parts[2];
        taken.n = tl_ranges_tidy(taken.at, taken.at, taken.n, true);
        parts[0] = leaving(d, taken.at, taken.n, k_parts);
        parts[1] = k_parts->rest;
        kids.at[kids.n++] = tl_draft_cat(d, parts, 2);
        if (!is_name)
            kids.at[kids.n++] = tl_draft_text(d, "\"");
        x = tl_draft_alt(d, kids.at, kids.n);
    } else {
        tl_draft_no_memory(d);
    }
    tl_free(kids.at);
    tl_free(taken.at);
    return x;
}

static uint32_t other_member(struct tl_schema *s, struct object *o, uint32_t value)
{
    struct tl_draft *d = s->d;
    uint32_t kids[4], quote = tl_draft_text(d, "\"");

    if (o->props.n == 0) {
        kids[0] = 0;
        kids[1] = tl_json_call(&s->w, TL_JSON_STRING);
    } else {
        struct property *sorted = tl_array(o->props.n, sizeof(*sorted));
        static const struct tl_range special[] = {{1, 0x1F}, {'"', '"'}, {'\\', '\\'}};
        uint32_t rest[2] = {tl_draft_repeat(d, tl_json_char(&s->w), 0, -1), quote},
                 rule = tl_draft_rule(d, "other-key", 9), escaped = tl_draft_rule(d, "escaped", 7);
        struct key_parts parts = {tl_draft_call(d, rule), tl_draft_call(d, escaped)};
        if (!sorted) {
            tl_draft_no_memory(d);
            return 0;
        }
        memcpy(sorted, o->props.at, o->props.n * sizeof(*sorted));
        qsort(sorted, o->props.n, sizeof(*sorted), by_name);
        tl_draft_define(d, rule, tl_draft_cat(d, rest, 2));
        tl_draft_define(d, escaped, tl_json_set(d, special, 3));
        kids[0] = quote;
        kids[1] = other_key(s, sorted, o->props.n, 0, 0, &parts);
        tl_free(sorted);
    }
    kids[2] = tl_draft_text(d, ":");
    kids[3] = tl_json_call(&s->w, TL_JSON_BLANKS);
    kids[0] = tl_draft_cat(d, kids, 4);
    kids[1] = value;
    return tl_draft_cat(d, kids, 2);
}

static uint32_t write_object(struct tl_schema *s, struct object *o, int depth)
{
    struct tl_draft *d = s->d;
    bool open = o->others_open || o->others || (!o->others_said && !o->has_properties && !o->others_closed);
    uint32_t n_required = 0, other = 0, tail = 0, list, mark;
    int tail_max = open ? -1 : 0;
    TL_VEC(uint32_t) pairs = {0};

    for (uint32_t i = 0; i < o->props.n; i++)
        n_required += o->props.at[i].required;
    if (open || o->props.n) {
        mark = tl_schema_enter(s, o->others ? "additionalProperties" : NULL);
        other = o->others ? tl_schema_value(s, o->others, depth + 1) : tl_json_call(&s->w, TL_JSON_ANY);
        tl_schema_leave(s, mark);
    }
    for (uint32_t i = 0; i < o->props.n && d->st == TL_OK; i++) {
        struct property *p = &o->props.at[i];
        uint32_t member[2];
        if (p->value == TL_UNKNOWN && o->others_closed)
            tl_schema_refuse(s, "required", "it names a property that additionalProperties forbids");
        member[0] = tl_json_key(&s->w, p->name);
        member[1] = p->value == TL_UNKNOWN ? other : p->value;
        if (!TL_VEC_ROOM(&pairs, 2)) {
            tl_draft_no_memory(d);
            break;
        }
        pairs.at[pairs.n++] = tl_draft_cat(d, member, 2);
        pairs.at[pairs.n++] = p->required;
    }
    /* A key may stand twice among the others, so they do not count towards a least number beyond one. */
    if (o->min > 1 && (uint32_t)o->min > n_required)
        tl_schema_refuse(s, "minProperties", "more than 1 is supported up to the number of required properties only");
    if (o->max >= 0 && open && o->props.n == 0)
        tail_max = o->max;
    else if (o->max >= 0 && (open || (uint32_t)o->max < o->props.n))
        tl_schema_refuse(s, "maxProperties", "below the number of properties that may stand it is not supported");
    if (o->min > 0 && !open && o->props.n == 0)
        tl_schema_refuse(s, "minProperties", "no property is allowed");
    if (tail_max != 0)
        tail = other_member(s, o, other);
    list = tl_draft_list(d, tl_json_comma(&s->w), tail, tail_max, pairs.at, pairs.n / 2, false);
    list = tl_json_bracketed(&s->w, "{", list, pairs.n || tail_max, n_required == 0 && o->min == 0, "}");
    tl_free(pairs.at);
    return tl_schema_rule(s, list);
}

uint32_t tl_schema_object(struct tl_schema *s, const struct cJSON *node, int depth)
{
    struct object o = {.max = -1};
    uint32_t x = 0;

    collect(s, &o, node, false, depth);
    if (s->d->st == TL_OK)
        x = write_object(s, &o, depth);
    tl_free(o.props.at);
    return x;
}

/* ---- arrays ---- */

static uint32_t cat(struct tl_schema *s, uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t kids[3] = {a, b, c};
    return tl_draft_cat(s->d, kids, 3);
}

uint32_t tl_schema_array(struct tl_schema *s, const struct cJSON *node, int depth)
{
    struct tl_draft *d = s->d;
    const cJSON *items = cJSON_GetObjectItemCaseSensitive(node, "items"), *k;
    const cJSON *prefix = cJSON_GetObjectItemCaseSensitive(node, "prefixItems");
    const char *prefix_key = "prefixItems", *items_key = "items";
    int min = tl_schema_count(s, node, "minItems", 0), max = tl_schema_count(s, node, "maxItems", -1), n = 0;
    uint32_t first[PREFIX_ITEMS_MAX], rest = 0, item = 0, comma = tl_json_comma(&s->w), mark;
    bool closed;

    if (!prefix && cJSON_IsArray(items)) { /* as it was written up to draft 2019-09 */
        prefix = items;
        items = cJSON_GetObjectItemCaseSensitive(node, "additionalItems");
        prefix_key = "items";
        items_key = "additionalItems";
    }
    if (prefix && !cJSON_IsArray(prefix))
        tl_schema_refuse(s, prefix_key, "it must be a list of schemas");
    cJSON_ArrayForEach(k, prefix)
    {
        if (n == PREFIX_ITEMS_MAX)
            tl_schema_refuse(s, prefix_key, "more than 200 items of their own are not supported");
        if (s->d->st != TL_OK)
            return 0;
        mark = tl_schema_enter_at(s, prefix_key, n);
        first[n++] = tl_schema_value(s, k, depth + 1);
        tl_schema_leave(s, mark);
    }
    closed = cJSON_IsFalse(items) || (!items && n > 0 && min <= n);
    if (!closed) {
        mark = tl_schema_enter(s, items_key);
        item = items ? tl_schema_value(s, items, depth + 1) : tl_json_call(&s->w, TL_JSON_ANY);
        tl_schema_leave(s, mark);
    }
    if (closed && min > n)
        tl_schema_refuse(s, "minItems", "it is more than the items that may stand");
    if (max >= 0 && max < min)
        tl_schema_refuse(s, "maxItems", "it is less than minItems");
    if (d->st != TL_OK)
        return 0;
    if (max >= 0 && n > max)
        n = max;
    if (!closed && max != n) {
        int more_min = min > n ? min - n : 0, more_max = max < 0 ? -1 : max - n;
        uint32_t more = cat(s, comma, item, 0);
        if (n == 0) /* the first of them has no comma; whether it may be missing is decided below */
            rest = cat(s, item,
                       tl_draft_repeat(d, more, more_min > 0 ? more_min - 1 : 0, more_max < 0 ? -1 : more_max - 1), 0);
        else
            rest = tl_draft_repeat(d, more, more_min, more_max);
    }
    for (int i = n; i-- > 0;) {
        uint32_t kids[2] = {cat(s, i > 0 ? comma : 0, first[i], rest), 0};
        rest = i > 0 && i >= min ? tl_draft_alt(d, kids, 2) : kids[0];
    }
    return tl_schema_rule(s, tl_json_bracketed(&s->w, "[", rest, n > 0 || (!closed && max != 0), min == 0, "]"));
}
