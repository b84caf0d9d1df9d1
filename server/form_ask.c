#include "form_ask.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "http_status.h"

static void take_text(struct tl_fields *f, struct tl_form_ask *a, const char *name, enum tl_grammar_kind kind,
                      char *text)
{
    if (!text) {
        tl_field_fail(f, TL_ERR_NO_HOST_MEMORY, name, "does not fit in memory.");
        return;
    }
    free(a->text);
    a->set = true;
    a->kind = kind;
    a->text = text;
}

static void take_schema(struct tl_fields *f, struct tl_form_ask *a, const char *name, const cJSON *schema)
{
    if (!cJSON_IsObject(schema) && !cJSON_IsBool(schema))
        tl_field_fail(f, TL_CODE_INVALID_TYPE, name, "must be a JSON schema: an object, true or false.");
    else
        take_text(f, a, name, TL_GRAMMAR_JSON_SCHEMA, cJSON_PrintUnformatted(schema));
}

static void take_choices(struct tl_fields *f, struct tl_form_ask *a, const cJSON *v)
{
    int n = cJSON_GetArraySize(v);
    const cJSON *item;
    if (!cJSON_IsArray(v) || n < 1 || n > TL_FORM_CHOICES_MAX) {
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "choice", "must be a list of 1..%d strings.", TL_FORM_CHOICES_MAX);
        return;
    }
    a->choices = calloc((size_t)n, sizeof(*a->choices));
    a->set = true;
    a->kind = TL_GRAMMAR_CHOICE;
    cJSON_ArrayForEach(item, v)
    {
        if (!cJSON_IsString(item) || !item->valuestring[0]) {
            tl_field_fail(f, TL_CODE_INVALID_TYPE, "choice", "[%d] must be a string that is not empty.", a->n_choices);
            return;
        }
        char *copy = a->choices ? strdup(item->valuestring) : NULL;
        if (!copy) {
            tl_field_fail(f, TL_ERR_NO_HOST_MEMORY, "choice", "does not fit in memory.");
            return;
        }
        a->choices[a->n_choices++] = copy;
    }
}

/* {"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": {...}, "strict": bool, "name", "description"}} */
static void take_response_format(struct tl_fields *f, struct tl_form_ask *a)
{
    static const char *const known[] = {"name", "description", "schema", "strict", NULL};
    struct tl_fields o, s;
    if (!tl_field_object(f, "response_format", "response_format.", &o))
        return;
    const char *type = tl_field_str(&o, "type", "");
    if (strcmp(type, "json_object") == 0) {
        a->set = true;
        a->kind = TL_GRAMMAR_JSON_OBJECT;
    } else if (strcmp(type, "json_schema") == 0) {
        if (tl_field_object(&o, "json_schema", "response_format.json_schema.", &s)) {
            tl_fields_only(&s, known);
            tl_field_bool(&s, "strict", true); /* it always is */
            take_schema(&s, a, "schema", tl_field(&s, "schema"));
            if (s.code)
                o.code = s.code;
        } else if (!o.code) {
            tl_field_fail(&o, TL_CODE_INVALID_TYPE, "json_schema", "is missing.");
        }
    } else if (!o.code && strcmp(type, "text") != 0) {
        tl_field_fail(&o, TL_ERR_OUT_OF_RANGE, "type", "must be \"text\", \"json_object\" or \"json_schema\".");
    }
    if (o.code)
        f->code = o.code;
}

void tl_form_parse(struct tl_fields *f, bool has_tokenizer, struct tl_form_ask *a)
{
    static const char *const fields[] = {"grammar", "json_schema", "regex", "choice", "response_format"};
    const char *first = NULL;
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (!tl_field(f, fields[i]))
            continue;
        if (first)
            tl_field_fail(f, TL_ERR_BAD_PARAM, fields[i], "cannot be combined with %s.", first);
        first = fields[i];
    }
    const char *scope = tl_field_str(f, "grammar_scope", "completion");
    if (strcmp(scope, "completion") != 0 && strcmp(scope, "full") != 0)
        tl_field_fail(f, TL_ERR_OUT_OF_RANGE, "grammar_scope", "must be \"completion\" or \"full\".");
    a->full = strcmp(scope, "full") == 0;
    if (f->code || !first)
        return;
    if (strcmp(first, "grammar") == 0)
        take_text(f, a, first, TL_GRAMMAR_GBNF, strdup(tl_field_str(f, first, "")));
    else if (strcmp(first, "regex") == 0)
        take_text(f, a, first, TL_GRAMMAR_REGEX, strdup(tl_field_str(f, first, "")));
    else if (strcmp(first, "json_schema") == 0)
        take_schema(f, a, first, tl_field(f, first));
    else if (strcmp(first, "choice") == 0)
        take_choices(f, a, tl_field(f, first));
    else
        take_response_format(f, a);
    if (a->set && !has_tokenizer)
        tl_field_fail(f, TL_ERR_UNSUPPORTED, first, "needs a tokenizer, and this model came without one.");
}

void tl_form_clear(struct tl_form_ask *a)
{
    for (int i = 0; i < a->n_choices; i++)
        free(a->choices[i]);
    free(a->choices);
    free(a->text);
    memset(a, 0, sizeof(*a));
}

/* ---- worker ------------------------------------------------------------------------------------------------------- */

struct tl_forms {
    struct tl_vocab_trie *vocab; /* NULL: the model has no tokenizer */
    struct tl_grammar_cache *cache;
    struct tl_form_wait *first, **tail; /* what is to be compiled, in order of arrival */
    int64_t turn;                       /* the last one in which something was compiled; -1: none */
};

enum tl_status tl_forms_create(struct tl_forms **out, const struct tl_model *m, struct tl_error *err)
{
    const struct tl_tokenizer *tk = tl_model_tokenizer(m);
    struct tl_forms *fs = calloc(1, sizeof(*fs));
    *out = NULL;
    if (!fs)
        return tl_fail_host_memory(err, sizeof(*fs));
    fs->tail = &fs->first;
    fs->turn = -1;
    enum tl_status st = tl_grammar_cache_create(&fs->cache, NULL, err);
    if (st == TL_OK && tk) /* now: later it would keep others waiting */
        st = tl_vocab_trie_of(&fs->vocab, tk, tl_model_info(m)->vocab_size, err);
    if (st == TL_OK)
        *out = fs;
    else
        tl_forms_free(fs);
    return st;
}

void tl_forms_free(struct tl_forms *fs)
{
    if (!fs)
        return;
    tl_grammar_cache_free(fs->cache);
    tl_vocab_trie_free(fs->vocab);
    free(fs);
}

void tl_forms_leave(struct tl_forms *fs, struct tl_form_wait *wait)
{
    if (!wait->waits)
        return;
    struct tl_form_wait **at = &fs->first;
    while (*at != wait)
        at = &(*at)->next;
    *at = wait->next;
    if (!wait->next)
        fs->tail = at;
    wait->waits = false;
}

enum tl_status tl_forms_get(struct tl_forms *fs, const struct tl_form_ask *a, struct tl_form_wait *wait, int64_t turn,
                            struct tl_grammar **grammar, const struct tl_vocab_trie **vocab, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    struct tl_grammar_source src = {.kind = a->kind,
                                    .text = a->text ? a->text : "",
                                    .text_bytes = a->text ? strlen(a->text) : 0,
                                    .choices = (const char *const *)a->choices,
                                    .n_choices = a->n_choices};
    if (!wait->waits) {
        tl_grammar_key(&src, wait->key);
        wait->waits = true;
        wait->next = NULL;
        *fs->tail = wait;
        fs->tail = &wait->next;
    }
    *vocab = fs->vocab;
    *grammar = tl_grammar_cache_find(fs->cache, wait->key);
    if (!*grammar && fs->first == wait && fs->turn != turn) {
        fs->turn = turn;
        st = tl_grammar_cache_get(fs->cache, &src, grammar, err);
    }
    if (*grammar || st != TL_OK)
        tl_forms_leave(fs, wait);
    return st;
}
