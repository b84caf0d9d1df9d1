/* engine/grammar_json.h - JSON as expressions: shared by grammar_json.c, grammar_schema.c, grammar_schema_object.c and
 * grammar_schema_scalar.c. */
#ifndef TL_GRAMMAR_JSON_H
#define TL_GRAMMAR_JSON_H

#include "grammar_impl.h"

struct cJSON;

enum tl_json_rule {
    TL_JSON_BLANKS,
    TL_JSON_ESCAPE,
    TL_JSON_STRING,
    TL_JSON_NUMBER,
    TL_JSON_INTEGER,
    TL_JSON_ANY,
    TL_JSON_OBJECT,
    TL_JSON_ARRAY,
    TL_JSON_RULES
};

struct tl_json_writer { /* rules for the parts of JSON, made when first asked for */
    struct tl_draft *d;
    uint32_t rule[TL_JSON_RULES];
    bool made[TL_JSON_RULES];
};
uint32_t tl_json_call(struct tl_json_writer *w, enum tl_json_rule rule);
uint32_t tl_json_char(struct tl_json_writer *w); /* any character of a string, escaped or not */
uint32_t tl_json_comma(struct tl_json_writer *w);
/* open, blanks, then body and blanks unless that is left out, close. */
uint32_t tl_json_bracketed(struct tl_json_writer *w, const char *open, uint32_t body, bool has_body, bool may_be_empty,
                           const char *close);
uint32_t tl_json_key(struct tl_json_writer *w, const char *name); /* the name in quotes, a colon, blanks */
/* A value word for word; strings and numbers as most programs write them. */
uint32_t tl_json_const(struct tl_json_writer *w, const struct cJSON *value);
void tl_json_add_scalar(struct tl_draft *d, const struct cJSON *value); /* as a word */

#define TL_JSON_INT_DIGITS 20

/* ---- schema ---- */

struct tl_schema_ref {
    const struct cJSON *node;
    uint32_t rule; /* its name is the pointer */
};
struct tl_schema {
    struct tl_draft *d;
    struct tl_json_writer w;
    const struct cJSON *root;
    TL_VEC(struct tl_schema_ref) refs; /* targets of $ref; compiled up to n_done */
    uint32_t n_done;
    TL_VEC(char) path;   /* JSON pointer of what is being read */
    int64_t n_looked_at; /* names compared while searching, which TL_SCHEMA_SEARCH_MAX bounds */
};
#define TL_SCHEMA_SEARCH_MAX 1000000
/* Count n more; false: the schema is refused. */
bool tl_schema_may_search(struct tl_schema *s, int64_t n);
/* key NULL: nothing. Returns what tl_schema_leave needs. */
uint32_t tl_schema_enter(struct tl_schema *s, const char *key);
uint32_t tl_schema_enter_at(struct tl_schema *s, const char *key, int i);
void tl_schema_leave(struct tl_schema *s, uint32_t mark);
/* The schema is refused; key (may be NULL) is appended to the pointer. */
void tl_schema_refuse(struct tl_schema *s, const char *key, const char *why);
uint32_t tl_schema_rule(struct tl_schema *s, uint32_t body); /* a rule named by the pointer; a call of it */
/* depth counts schemas inside schemas without a $ref between that is compiled on its own. */
uint32_t tl_schema_value(struct tl_schema *s, const struct cJSON *node, int depth);
const struct cJSON *tl_schema_target(struct tl_schema *s, const struct cJSON *ref); /* NULL: refused */
uint32_t tl_schema_object(struct tl_schema *s, const struct cJSON *node, int depth);
uint32_t tl_schema_array(struct tl_schema *s, const struct cJSON *node, int depth);
uint32_t tl_schema_string(struct tl_schema *s, const struct cJSON *node);
uint32_t tl_schema_number(struct tl_schema *s, const struct cJSON *node, bool integer);
/* A count such as minItems under key; otherwise if absent. */
int tl_schema_count(struct tl_schema *s, const struct cJSON *node, const char *key, int otherwise);
bool tl_schema_is_note(const char *key); /* says nothing about values */
/* Refuse keys of node that no part of this understands. */
void tl_schema_check_keys(struct tl_schema *s, const struct cJSON *node);

#define TL_SCHEMA_DEPTH_MAX 64

#endif
