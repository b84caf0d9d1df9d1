/* engine/tokenizer.h - text to token ids and back, as a Hugging Face tokenizer.json describes it.
 *
 * Supported: the BPE model (byte-level or with byte fallback); normalizers NFC, Prepend, Replace; pre-tokenizers Split,
 * ByteLevel, Digits, Metaspace; post-processors TemplateProcessing, ByteLevel; decoders ByteLevel, Replace, ByteFallback,
 * Fuse, Strip; Sequence of any of them; added tokens with all their flags. "truncation" and "padding" are ignored: they
 * are a matter of the caller. Anything else in the file is refused with an error that names it.
 *
 * Encoding takes time in proportion to n log n whatever the text is, and at most about 64 bytes of memory per byte of
 * text (only if the file cuts the text into no pieces). Letters and blanks are those of Unicode 14, as in the reference
 * library; tests/tokenizer/README.md lists the few known differences from it.
 * Thread: any. A tokenizer never changes after it is opened; a tl_detok belongs to one thread at a time. */
#ifndef TL_TOKENIZER_H
#define TL_TOKENIZER_H

#include "status.h"

#define TL_TOKENIZER_FILE_BYTES_MAX (256u << 20)
#define TL_TOKENIZER_TEXT_BYTES_MAX (64u << 20)
#define TL_TOKENIZER_ID_MAX         ((1 << 21) - 1)

struct tl_tokenizer;

/* Read the tokenizer.json at path.
 * Owner:  the caller owns *out; release it with tl_tokenizer_free().
 * Errors: TL_ERR_NOT_FOUND, TL_ERR_IO, TL_ERR_BAD_FILE (damaged or contradictory), TL_ERR_UNSUPPORTED (sound, but with a
 *         part that is not in the list above), TL_ERR_NO_HOST_MEMORY. On error *out is NULL. */
enum tl_status tl_tokenizer_open(struct tl_tokenizer **out, const char *path, struct tl_error *err);
/* The same of a model's directory: *out is NULL where it has no tokenizer.json. Errors: also TL_ERR_BAD_FILE for ids that a
 * vocabulary of vocab_size does not have. Fewer ids than that are fine: vocabularies are padded. */
enum tl_status tl_tokenizer_of_model(struct tl_tokenizer **out, const char *dir, int vocab_size, struct tl_error *err);
void tl_tokenizer_free(struct tl_tokenizer *tk); /* NULL is fine */

int tl_tokenizer_vocab_size(const struct tl_tokenizer *tk); /* highest id + 1; ids in between may be missing */

struct tl_encode_params {
    const char *text;           /* UTF-8, may hold NUL; borrowed for the call only */
    size_t text_bytes;          /* 0..TL_TOKENIZER_TEXT_BYTES_MAX */
    bool add_special;           /* add the tokens of the file's template, e.g. a begin-of-text token */
    bool parse_special;         /* false: text that looks like a special token is plain text */
    const unsigned char *plain; /* NULL, or per byte of text: 1 = no special token may touch it (parse_special true) */
    size_t max_tokens;          /* more is TL_ERR_CONTEXT_LENGTH; 0 = no limit */
};

/* Owner:  the caller owns *ids; release it with tl_free(). Never NULL on TL_OK, also for no tokens.
 * Errors: TL_ERR_BAD_PARAM (text is not UTF-8: the message and number "offset" say where; too long),
 *         TL_ERR_CONTEXT_LENGTH, TL_ERR_UNSUPPORTED (a pattern of the file needs too much work on this text),
 *         TL_ERR_NO_HOST_MEMORY. On error *ids is NULL and *n_ids is 0. */
enum tl_status tl_tokenizer_encode(const struct tl_tokenizer *tk, const struct tl_encode_params *p, int32_t **ids,
                                   size_t *n_ids, struct tl_error *err);

/* The raw bytes that a token stands for: maybe part of a character only. Valid as long as tk. false: no such id. */
bool tl_tokenizer_piece(const struct tl_tokenizer *tk, int32_t id, const char **bytes, size_t *n_bytes);
bool tl_tokenizer_is_special(const struct tl_tokenizer *tk, int32_t id); /* false also for no such id */
/* The id of an added token by its text, or -1. */
int32_t tl_tokenizer_find(const struct tl_tokenizer *tk, const char *text);

/* ---- streaming detokenizer --------------------------------------------------------------------------------------- */

struct tl_detok_params {
    bool keep_special; /* write special tokens as text instead of skipping them */
    bool mid_text;     /* the ids continue an earlier text: keep the leading blank that the decoder would strip there */
};

/* Text comes out as soon as it is certain: never half a character, and bytes that cannot become a valid character turn
 * into U+FFFD. Pieces put together equal tl_tokenizer_decode of the whole. */
struct tl_detok {
    const struct tl_tokenizer *tk; /* must outlive this */
    struct tl_detok_params params;
    char *out;             /* text of the last call */
    unsigned char held[4]; /* a character that is not complete yet */
    int n_held;
    int n_strip; /* blanks that may still be stripped from the start */
};

enum tl_status tl_detok_init(struct tl_detok *d, const struct tl_tokenizer *tk, const struct tl_detok_params *params,
                             struct tl_error *err); /* params NULL = all false. Errors: TL_ERR_NO_HOST_MEMORY */
/* *text is valid until the next call for d; *n_bytes may be 0. Errors: TL_ERR_TOKEN_OUT_OF_VOCAB (d is unchanged). */
enum tl_status tl_detok_push(struct tl_detok *d, int32_t id, const char **text, size_t *n_bytes, struct tl_error *err);
void tl_detok_flush(struct tl_detok *d, const char **text, size_t *n_bytes); /* the end: what was held back */
void tl_detok_free(struct tl_detok *d); /* the contents; NULL and a zeroed struct are fine */

/* The text of ids[n] at once. Owner: the caller owns *text (tl_free); it is also NUL-terminated.
 * Errors: TL_ERR_TOKEN_OUT_OF_VOCAB (numbers "index", "value", "vocab_size"), TL_ERR_NO_HOST_MEMORY; *text is NULL then. */
enum tl_status tl_tokenizer_decode(const struct tl_tokenizer *tk, const int32_t *ids, size_t n,
                                   const struct tl_detok_params *params, char **text, size_t *n_bytes,
                                   struct tl_error *err);

#endif
