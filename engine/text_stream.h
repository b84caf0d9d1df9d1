/* engine/text_stream.h - from generated tokens to the text that a client may see.
 *
 * A stream detokenizes, looks for stop strings in the text (not in the tokens: a stop string may span any number of them,
 * or end inside one) and hands out text as soon as it is certain. What is held back is at most the beginning of a stop
 * string that the text ends with, and a character that is not complete: every delta is whole characters, and all deltas
 * together are the text of the whole.
 *
 * The rule: the text ends where the first stop string is complete, whatever the tokens' borders; if several are complete at
 * the same byte, the longest counts (equal ones: the first). What follows, also inside the same token, is dropped. The
 * stop string itself is part of the text only with include_stop. Only generated text counts: a stop string cannot begin in
 * the prompt.
 *
 * Without a tokenizer there is no text: every delta is empty and stop strings are refused.
 * Cost: linear in the bytes of text, times the number of stop strings.
 * Thread: one at a time. */
#ifndef TL_TEXT_STREAM_H
#define TL_TEXT_STREAM_H

#include "tokenizer.h"

#define TL_STOP_STRINGS_MAX      16
#define TL_STOP_STRING_BYTES_MAX 256

struct tl_stop_string {
    const char *bytes; /* UTF-8, may hold NUL */
    size_t n_bytes;    /* 1..TL_STOP_STRING_BYTES_MAX */
};

struct tl_text_stream_params {
    const struct tl_tokenizer *tokenizer; /* must outlive the stream; NULL = ids only */
    struct tl_detok_params detok;
    const struct tl_stop_string *stops; /* copied */
    int n_stops;                        /* 0..TL_STOP_STRINGS_MAX */
    bool include_stop;
};

/* The stops alone, for whoever has to answer before there is a stream. Names "stop".
 * Errors: TL_ERR_OUT_OF_RANGE (too many, empty, too long), TL_ERR_BAD_PARAM (not UTF-8), TL_ERR_UNSUPPORTED (there is no
 * tokenizer). */
enum tl_status tl_text_stream_check(const struct tl_text_stream_params *p, struct tl_error *err);

struct tl_text_stream;
/* Owner: caller, tl_text_stream_free(). Errors: as above, TL_ERR_NO_HOST_MEMORY; *out is NULL then. */
enum tl_status tl_text_stream_create(struct tl_text_stream **out, const struct tl_text_stream_params *p,
                                     struct tl_error *err);
void tl_text_stream_free(struct tl_text_stream *ts); /* NULL is fine */

/* A token was generated. *text[*n_bytes] is what became certain, maybe nothing; valid until the next call for ts. After a stop
 * nothing more comes out. Errors: TL_ERR_TOKEN_OUT_OF_VOCAB (nothing happened), TL_ERR_NO_HOST_MEMORY (ts is of no more use). */
enum tl_status tl_text_stream_push(struct tl_text_stream *ts, int32_t token, const char **text, size_t *n_bytes,
                                   struct tl_error *err);
/* The output ended for another reason: what was held back. A character cut short becomes U+FFFD (which may complete a stop
 * string, too). Errors: TL_ERR_NO_HOST_MEMORY. */
enum tl_status tl_text_stream_flush(struct tl_text_stream *ts, const char **text, size_t *n_bytes,
                                    struct tl_error *err);

/* Index of the stop string that ended the text; -1 = none so far. */
int tl_text_stream_stopped(const struct tl_text_stream *ts);
/* Bytes of text that are known but not handed out yet (beginnings of stop strings). */
size_t tl_text_stream_held(const struct tl_text_stream *ts);

#endif
