/* server/form_ask.h - the part of a generation request that says what form its output has to keep: grammar, json_schema, regex,
 * choice or response_format, and grammar_scope. Parsed on the loop, compiled on the worker. */
#ifndef TL_SERVER_FORM_ASK_H
#define TL_SERVER_FORM_ASK_H

#include "../engine/tinyloop.h"
#include "json.h"

#define TL_FORM_CHOICES_MAX 1024

struct tl_form_ask {
    bool set;
    bool full; /* grammar_scope "full": the prompt is the beginning of the text */
    enum tl_grammar_kind kind;
    char *text;     /* owned; NULL for CHOICE and JSON_OBJECT */
    char **choices; /* owned */
    int n_choices;
};

/* At most one of the fields; mistakes go to f. facts: whether there is a tokenizer. */
void tl_form_parse(struct tl_fields *f, bool has_tokenizer, struct tl_form_ask *a);
void tl_form_clear(struct tl_form_ask *a);

/* Compiled grammars by content, and the vocabulary as a tree, which is made at once. One grammar is compiled between two steps at
 * most, in order of arrival: many dear ones at once cost others no more at a time than one. Owner and thread: the worker. */
struct tl_forms;
enum tl_status tl_forms_create(struct tl_forms **out, const struct tl_model *m, struct tl_error *err);
void tl_forms_free(struct tl_forms *fs); /* after every request that uses it. NULL is fine */
/* The place of a request among those whose grammars are to be compiled. Owner: the request. Zero at first. */
struct tl_form_wait {
    bool waits;
    uint64_t key[2]; /* of the grammar. Waiting */
    struct tl_form_wait *next;
};
/* turn: tl_sched_stats.turns. *grammar: one reference for the caller; NULL with TL_OK: it is not its turn, ask again in the next
 * one, or tl_forms_leave. *vocab lives as long as fs. Errors: as tl_grammar_compile. */
enum tl_status tl_forms_get(struct tl_forms *fs, const struct tl_form_ask *a, struct tl_form_wait *wait, int64_t turn,
                            struct tl_grammar **grammar, const struct tl_vocab_trie **vocab, struct tl_error *err);
void tl_forms_leave(struct tl_forms *fs, struct tl_form_wait *wait); /* also where it does not wait */

#endif
