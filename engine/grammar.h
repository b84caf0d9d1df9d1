/* engine/grammar.h - output that keeps to a form: which tokens may come next, and when the text may end.
 *
 * Every input (GBNF, JSON schema, regular expression, list of strings) becomes one pushdown automaton over bytes. A matcher is
 * a position in it; for each position it gives one bit per token. A token is allowed if its bytes can be continued to a whole
 * text of the grammar, so a text never runs into a dead end unless the vocabulary lacks the bytes for it.
 * Nothing fails open: what a grammar or schema says and this cannot keep is refused when it is compiled.
 *
 * JSON is written with capped blanks (after '{' '[' ',' ':' and before '}' ']': nothing, one blank, or a line end with up to 40
 * blanks and tabs), properties in the order of the schema, and numbers of bounded length. tests/grammar/README.md has the list.
 * A grammar that needs too much work for one token ends its own request with an error and costs others at most
 * work_per_token_max. Where many are at work, the scheduler bounds what all of them may do in one step.
 *
 * Thread: compiling and vocabularies: any. A grammar with all its matchers belongs to one thread at a time (the worker): it
 * keeps what it has found out about tokens. */
#ifndef TL_GRAMMAR_H
#define TL_GRAMMAR_H

#include "status.h"
#include "tokenizer.h"

enum tl_grammar_kind {
    TL_GRAMMAR_GBNF,        /* rules as llama.cpp reads them; starts at "root" */
    TL_GRAMMAR_JSON_SCHEMA, /* a schema; $ref inside the document only */
    TL_GRAMMAR_JSON_OBJECT, /* any JSON object; no text */
    TL_GRAMMAR_REGEX,       /* has to match the whole output */
    TL_GRAMMAR_CHOICE       /* one of the strings */
};

struct tl_grammar_source { /* borrowed for the call */
    enum tl_grammar_kind kind;
    const char *text;
    size_t text_bytes;
    const char *const *choices; /* CHOICE: NUL-terminated strings */
    int n_choices;
};

/* A field that is 0 takes its default. */
struct tl_grammar_limits {
    size_t source_bytes_max;    /* of text, or of all choices together: 512 KiB */
    int rules_max;              /* 20000 */
    int depth_max;              /* nested groups of a GBNF grammar or a regular expression: 200 */
    int repeat_max;             /* count in {m,n}, minItems, maxLength ...: 65536 */
    int states_max;             /* of the automaton, counted repetitions written out: 150000 */
    int stack_max;              /* rules open at once in a text: 2000 */
    int threads_max;            /* ways in which a text may be read at once: 2000 */
    size_t cache_bytes_max;     /* per grammar, for what it finds out while it runs, of two kinds: 16 MiB each */
    int64_t work_per_token_max; /* elementary steps: 1000000 (some 10 ms); on average a sixteenth of it */
};

/* The pieces of a vocabulary as a tree. Never changes; one per tokenizer. */
struct tl_vocab_trie;

struct tl_vocab_piece {
    const char *bytes;
    uint32_t n_bytes; /* 0: the token has no text of its own (special, unused) and no grammar allows it */
};
/* Errors: TL_ERR_BAD_PARAM, TL_ERR_NO_HOST_MEMORY. */
enum tl_status tl_vocab_trie_create(struct tl_vocab_trie **out, const struct tl_vocab_piece *pieces, int vocab_size,
                                    struct tl_error *err);
/* Special tokens have no text here. tk must outlive *out. vocab_size is the model's: ids that the tokenizer lacks are never allowed. */
enum tl_status tl_vocab_trie_of(struct tl_vocab_trie **out, const struct tl_tokenizer *tk, int vocab_size,
                                struct tl_error *err);
void tl_vocab_trie_free(struct tl_vocab_trie *v); /* after every matcher that uses it. NULL is fine */
int tl_vocab_trie_size(const struct tl_vocab_trie *v);

struct tl_grammar;

/* Owner:  the caller owns one reference to *out; release it with tl_grammar_free(). limits may be NULL.
 * Errors: TL_ERR_INVALID_GRAMMAR (numbers "line" and "column" for GBNF, "offset" for a regular expression),
 *         TL_ERR_UNSUPPORTED_SCHEMA (the message has the JSON pointer, so has param where it fits), TL_ERR_NO_HOST_MEMORY. */
enum tl_status tl_grammar_compile(struct tl_grammar **out, const struct tl_grammar_source *src,
                                  const struct tl_grammar_limits *limits, struct tl_error *err);
void tl_grammar_ref(const struct tl_grammar *g);  /* any thread */
void tl_grammar_free(const struct tl_grammar *g); /* drops one reference, any thread. NULL is fine */
/* XXH3-128 over all that decides what a source compiles to: the key of a cache of compiled grammars. */
void tl_grammar_key(const struct tl_grammar_source *src, uint64_t key[2]);
size_t tl_grammar_bytes(const struct tl_grammar *g); /* host memory held now */

struct tl_matcher;

/* At the start of the text. Takes a reference to g; v must outlive the matcher. */
enum tl_status tl_matcher_create(struct tl_matcher **out, const struct tl_grammar *g, const struct tl_vocab_trie *v,
                                 struct tl_error *err);
enum tl_status tl_matcher_clone(struct tl_matcher **out, const struct tl_matcher *m, struct tl_error *err);
void tl_matcher_free(struct tl_matcher *m); /* NULL is fine */

/* One bit per token, 1 = allowed: (vocab_size + 31) / 32 words, all written. Stop ids are the caller's: allowed exactly when
 * tl_matcher_can_end.
 * Errors: TL_ERR_GRAMMAR_NO_CONTINUATION (no token is allowed and the text may not end here), TL_ERR_INVALID_GRAMMAR (over a
 *         limit), TL_ERR_NO_HOST_MEMORY. The position is unchanged. */
enum tl_status tl_matcher_mask(struct tl_matcher *m, uint32_t *mask, struct tl_error *err);
/* Move on by a token, or by bytes. Errors: TL_ERR_GRAMMAR_NO_CONTINUATION (not allowed here), and as above. The position is
 * unchanged then. */
enum tl_status tl_matcher_accept(struct tl_matcher *m, int32_t token, struct tl_error *err);
enum tl_status tl_matcher_accept_bytes(struct tl_matcher *m, const char *bytes, size_t n, struct tl_error *err);
/* A prompt that has to be part of the text; tokens without text are passed over.
 * Errors: TL_ERR_GRAMMAR_PREFIX_CONFLICT (number "token_index"; the message has the piece), and as above. */
enum tl_status tl_matcher_accept_prompt(struct tl_matcher *m, const int32_t *tokens, int n, struct tl_error *err);
/* The same in parts: from token *at on, until `work` elementary steps are done or all n tokens are; *at is then the next one. */
enum tl_status tl_matcher_accept_part(struct tl_matcher *m, const int32_t *tokens, int n, int64_t work, int *at,
                                      struct tl_error *err);
int64_t tl_matcher_work(const struct tl_matcher *m); /* elementary steps of work since it was made */
bool tl_matcher_can_end(const struct tl_matcher *m); /* what was accepted is a whole text */
bool tl_matcher_is_done(const struct tl_matcher *m); /* and nothing can follow */
/* The bytes that must follow, at most cap; *n = 0 where there is a choice or the text may end. */
enum tl_status tl_matcher_forced(struct tl_matcher *m, char *bytes, size_t cap, size_t *n, struct tl_error *err);

#endif
