/* engine/chat_template.h - from a conversation to the prompt, as the model's own chat template says.
 *
 * The template is the Jinja text in tokenizer_config.json ("chat_template": a string, or a list with one named "default") or
 * in chat_template.jinja, which goes first. It runs in an interpreter for the part of Jinja that such templates use:
 *   statements  for (else, if, two targets), if/elif/else, set (also of a namespace's field, and as a block), break, continue,
 *               macro (outside of every block, called by name), generation; comments; whitespace control with trim_blocks
 *               and lstrip_blocks on
 *   values      strings, whole numbers, fractions, true, false, none, lists, tuples, dicts; . [] [a:b:c]; and or not in is
 *               == != < <= > >= + - * / // % ~, x if c else y
 *   names       messages and whatever else the caller gives; bos_token, eos_token ...; loop; namespace, range, raise_exception
 *   filters, tests and methods: the tables in chat_template_call.c
 * Anything else is refused when the template is read, with its name and line. strftime_now counts as not defined: a prompt
 * that changes with the day could not be reused.
 *
 * Bounded: bytes and nodes of the template, depth, steps, memory and output of a run. All strings that come in as variables
 * are user text: they may look like special tokens, and whatever the template does with them, they stay plain text. The
 * result says so byte by byte (plain), and tl_tokenizer_encode respects it.
 * Thread: any. A template never changes after it is opened. */
#ifndef TL_CHAT_TEMPLATE_H
#define TL_CHAT_TEMPLATE_H

#include "tokenizer.h"

#define TL_CHAT_TEMPLATE_BYTES_MAX (256u << 10)
#define TL_CHAT_STEPS_MAX          20000000
#define TL_CHAT_MEMORY_MAX         (128u << 20) /* bytes of one run, output included */

struct tl_chat_template;

/* Read the template of the model in dir. *out is NULL with TL_OK where the directory has none.
 * tokenizer (may be NULL) tells whether the model has a <think> token of its own.
 * Owner:  the caller owns *out; release it with tl_chat_free().
 * Errors: TL_ERR_BAD_FILE (not Jinja, or a damaged file), TL_ERR_UNSUPPORTED (Jinja outside the subset), TL_ERR_IO,
 *         TL_ERR_NO_HOST_MEMORY. */
enum tl_status tl_chat_open(struct tl_chat_template **out, const char *dir, const struct tl_tokenizer *tokenizer,
                            struct tl_error *err);
/* The same from text; bos_token and the like are the members of the JSON object tokens (NULL = none). */
enum tl_status tl_chat_compile(struct tl_chat_template **out, const char *text, size_t bytes, const char *tokens,
                               struct tl_error *err);
void tl_chat_free(struct tl_chat_template *t); /* NULL is fine */

/* Does the model think in <think> ... </think> before it answers? True where its template or its vocabulary has the mark. */
bool tl_chat_thinks(const struct tl_chat_template *t);

struct tl_chat_text {
    char *text; /* owned, tl_free(); NUL-terminated for convenience, may hold NUL */
    size_t n_bytes;
    unsigned char *plain; /* owned, tl_free(); per byte: 1 = user text */
};
void tl_chat_text_clear(struct tl_chat_text *c); /* NULL and a zeroed struct are fine */

/* Run the template over variables: the text of a JSON object, e.g. {"messages": [...], "add_generation_prompt": true}.
 * Errors: TL_ERR_BAD_PARAM (not a JSON object; the template refuses the conversation by raise_exception; a step of it does
 *         not fit the values, with its line), TL_ERR_OUT_OF_RANGE (steps, memory), TL_ERR_NO_HOST_MEMORY. *out is empty then. */
enum tl_status tl_chat_render(const struct tl_chat_template *t, const char *variables, size_t bytes,
                              struct tl_chat_text *out, struct tl_error *err);

#endif
