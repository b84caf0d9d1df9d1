/* engine/tokenizer_impl.h - what the parts of the tokenizer share; nobody else includes this.
 *
 *   tokenizer.c         open, free, questions, the string and merge tables
 *   tokenizer_load.c    tokenizer.json -> struct tl_tokenizer: vocabulary, merges, added tokens
 *   tokenizer_parts.c   the same: normalizers, pre-tokenizers, template, decoders
 *   tokenizer_regex.c   patterns: translation to PCRE2, search
 *   tokenizer_encode.c  text -> added tokens -> normalizers -> pre-tokenizers -> BPE -> template
 *   tokenizer_bpe.c     one piece of text -> ids
 *   tokenizer_decode.c  ids -> text
 *   tokenizer_json.c, tokenizer_utf8.c */
#ifndef TL_TOKENIZER_IMPL_H
#define TL_TOKENIZER_IMPL_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "tokenizer.h"
#include "tokenizer_json.h"

#define TL_TK_STAGES_MAX 16                /* normalizers, pre-tokenizers or decoders after flattening each Sequence */
#define TL_TK_BUF_MAX    ((size_t)1 << 30) /* bytes of any intermediate text */
#define TL_TK_SHOWN(n)   ((int)((n) < 60 ? (n) : 60)) /* how much of a text from the file goes into a message */
#define TL_TK_CHAR_IDS   0x800 /* characters of one or two bytes have their vocabulary id in a table */

/* A growing byte buffer. */
struct tl_tk_buf {
    char *p;
    size_t n, cap;
};
/* Room for extra more bytes. Errors: TL_ERR_NO_HOST_MEMORY; TL_ERR_BAD_PARAM above TL_TK_BUF_MAX. */
enum tl_status tl_tk_buf_reserve(struct tl_tk_buf *b, size_t extra, struct tl_error *err);
enum tl_status tl_tk_buf_add(struct tl_tk_buf *b, const char *s, size_t n, struct tl_error *err);

struct tl_tk_pattern {
    enum { TL_TK_LITERAL, TL_TK_REGEX, TL_TK_NUMERIC } kind;
    char *literal; /* LITERAL: never empty; owned */
    size_t literal_bytes;
    pcre2_code *code; /* REGEX; owned */
};

enum tl_tk_behavior {
    TL_TK_ISOLATED,
    TL_TK_REMOVED,
    TL_TK_MERGED_WITH_PREVIOUS,
    TL_TK_MERGED_WITH_NEXT,
    TL_TK_CONTIGUOUS
};

/* A pre-tokenizer. Every kind may prepare the text and then splits it with pattern (if has_split). */
struct tl_tk_stage {
    enum { TL_TK_SPLIT, TL_TK_BYTE_LEVEL, TL_TK_METASPACE } kind;
    bool has_split, invert;
    enum tl_tk_behavior behavior;
    struct tl_tk_pattern pattern;                                                    /* METASPACE: the replacement */
    enum { TL_TK_PREPEND_NEVER, TL_TK_PREPEND_FIRST, TL_TK_PREPEND_ALWAYS } prepend; /* of ' ' or the replacement */
};

struct tl_tk_normalizer {
    enum { TL_TK_NFC, TL_TK_PREPEND, TL_TK_REPLACE } kind;
    struct tl_tk_pattern pattern; /* REPLACE */
    char *content;                /* PREPEND, REPLACE; owned */
    size_t content_bytes;
};

/* What a decoder does to each token alone; done once, at open, for every piece. */
struct tl_tk_decoder {
    enum { TL_TK_DEC_BYTE_LEVEL, TL_TK_DEC_REPLACE, TL_TK_DEC_BYTE_FALLBACK, TL_TK_DEC_STRIP } kind;
    struct tl_tk_pattern pattern; /* REPLACE */
    char *content;                /* REPLACE: new text; STRIP: the one character; owned */
    size_t content_bytes;
    int start, stop; /* STRIP: at most so many */
};

struct tl_tk_added {
    int32_t id; /* its text is that of the token */
    bool special, normalized, lstrip, rstrip, single_word;
    char *match; /* what is searched for: the text, normalized where the file asks for it; owned */
    size_t match_bytes;
    int order; /* among equal matches the lowest wins */
};

/* Sorted by match, so that a search narrows a range byte by byte. */
struct tl_tk_added_set {
    struct tl_tk_added *v;
    size_t n;
    bool first[256]; /* bytes that a match can begin with */
};

#define TL_TK_PRESENT 1
#define TL_TK_SPECIAL 2
#define TL_TK_ADDED   4

struct tl_tk_token {
    uint32_t text, text_bytes;   /* offsets into texts: as it stands in the file */
    uint32_t piece, piece_bytes; /* offsets into pieces: the bytes it stands for */
    uint32_t flags;
};

struct tl_tk_vocab_slot {
    uint32_t hash;
    int32_t id; /* -1 = empty */
};

struct tl_tk_merge {
    int32_t left, right; /* left -1 = empty */
    int32_t rank, id;
};

struct tl_tokenizer {
    struct tl_tk_token *tokens; /* by id */
    int32_t n_tokens;           /* highest id + 1 */
    struct tl_tk_buf texts, pieces;
    size_t piece_bytes_max;

    struct tl_tk_vocab_slot *vocab; /* the model's vocabulary, without tokens that are only added */
    size_t vocab_mask;
    struct tl_tk_merge *merges;
    size_t merge_mask;
    int32_t char_ids[TL_TK_CHAR_IDS];
    int32_t byte_ids[256]; /* "<0x00>" ...; -1 = none */
    bool byte_fallback, ignore_merges, fuse_unk;
    int32_t unk_id; /* -1 = characters that are not in the vocabulary are dropped */

    struct tl_tk_added_set added, added_normalized;
    struct tl_tk_normalizer normalizers[TL_TK_STAGES_MAX];
    struct tl_tk_stage stages[TL_TK_STAGES_MAX];
    struct tl_tk_decoder decoders[TL_TK_STAGES_MAX];
    int n_normalizers, n_stages, n_decoders;
    int32_t *prefix, *suffix; /* of the template */
    size_t n_prefix, n_suffix;
    int n_strip; /* blanks stripped from the start of a decoded text */
    bool no_jit;
};

/* ---- tokenizer.c ---- */
/* Like tl_tokenizer_open for data[bytes] in memory, which is only read. no_jit: match patterns without machine code. */
enum tl_status tl_tokenizer_open_memory(struct tl_tokenizer **out, const char *data, size_t bytes, bool no_jit,
                                        struct tl_error *err);
uint32_t tl_tk_hash(const char *s, size_t n);
enum tl_status tl_tk_vocab_alloc(struct tl_tokenizer *tk, size_t n, struct tl_error *err);
int32_t tl_tk_vocab_find(const struct tl_tokenizer *tk, const char *s, size_t n); /* -1 = none */
void tl_tk_vocab_put(struct tl_tokenizer *tk, int32_t id);                        /* its text is not in yet */
enum tl_status tl_tk_merges_alloc(struct tl_tokenizer *tk, size_t n, struct tl_error *err);
const struct tl_tk_merge *tl_tk_merge_find(const struct tl_tokenizer *tk, int32_t left,
                                           int32_t right);           /* NULL = none */
void tl_tk_merge_put(struct tl_tokenizer *tk, struct tl_tk_merge m); /* the later of two with the same pair stays */
void tl_tk_pattern_clear(struct tl_tk_pattern *p);

/* ---- tokenizer_load.c ---- */
/* Fill a zeroed tk; text is changed. On error the caller frees tk. */
enum tl_status tl_tk_load(struct tl_tokenizer *tk, char *text, size_t bytes, struct tl_error *err);

/* A file being read. where names a part of it in messages: "model", "pre_tokenizer" ... */
struct tl_tk_load {
    struct tl_tokenizer *tk;
    struct tl_tkjson js;
    bool fused; /* the decoders so far have made one text of all tokens */
    struct tl_error *err;
};
/* obj is an object, and its members are among keys (space separated), each at most once. */
enum tl_status tl_tk_check_keys(struct tl_tk_load *l, const struct tl_tkjson_node *obj, const char *where,
                                const char *keys);
/* Member key of obj: a boolean, or fallback where it is missing or null. */
enum tl_status tl_tk_get_bool(struct tl_tk_load *l, const struct tl_tkjson_node *obj, const char *where,
                              const char *key, bool fallback, bool *out);
/* Member key of obj: a string. */
enum tl_status tl_tk_get_string(struct tl_tk_load *l, const struct tl_tkjson_node *obj, const char *where,
                                const char *key, const struct tl_tkjson_node **out);

/* ---- tokenizer_parts.c ---- */
/* Read the members "normalizer", "pre_tokenizer", "post_processor" and "decoder" of the root. */
enum tl_status tl_tk_load_normalizers(struct tl_tk_load *l);
enum tl_status tl_tk_load_stages(struct tl_tk_load *l);
enum tl_status tl_tk_load_template(struct tl_tk_load *l);
enum tl_status tl_tk_load_decoders(struct tl_tk_load *l);

/* ---- tokenizer_regex.c ---- */
enum tl_status tl_tk_regex_compile(pcre2_code **out, const char *regex, size_t bytes, bool no_jit,
                                   struct tl_error *err);

/* Search state of one encode call: PCRE2 wants some memory per thread. */
struct tl_tk_search {
    size_t text_bytes; /* of the text as it came: bounds the work */
    pcre2_match_data *data;
    pcre2_match_context *context;
};
void tl_tk_search_free(struct tl_tk_search *s);
/* The first match at or after from. *found false: none. Errors: TL_ERR_UNSUPPORTED, TL_ERR_NO_HOST_MEMORY. */
enum tl_status tl_tk_search_next(struct tl_tk_search *s, const struct tl_tk_pattern *p, const char *text, size_t n,
                                 size_t from, bool *found, size_t *start, size_t *end, struct tl_error *err);

/* ---- tokenizer_bpe.c ---- */
struct tl_tk_ids {
    int32_t *v;
    size_t n, cap, max; /* max 0 = no limit */
};
enum tl_status tl_tk_ids_add(struct tl_tk_ids *ids, int32_t id, struct tl_error *err);

/* Scratch memory of one encode call, zeroed at first. */
struct tl_tk_bpe {
    struct tl_tk_symbol *symbols;
    uint64_t *heap;
    size_t cap;
    struct tl_tk_word *words; /* NULL until the text turns out to be long */
};
void tl_tk_bpe_free(struct tl_tk_bpe *b);
enum tl_status tl_tk_bpe_run(struct tl_tk_bpe *b, const struct tl_tokenizer *tk, const char *s, size_t n,
                             struct tl_tk_ids *ids, struct tl_error *err);

/* ---- tokenizer_encode.c ---- */
/* Replace or extend text as the normalizers say; used at open for added tokens. *out is new text (append). */
enum tl_status tl_tk_normalize_once(const struct tl_tokenizer *tk, const char *s, size_t n, struct tl_tk_buf *out,
                                    struct tl_error *err);
/* out += s with every match of p replaced. */
enum tl_status tl_tk_replace(struct tl_tk_search *search, const struct tl_tk_pattern *p, const char *content,
                             size_t content_bytes, const char *s, size_t n, struct tl_tk_buf *out,
                             struct tl_error *err);
/* out += the NFC form of s. */
enum tl_status tl_tk_nfc(const char *s, size_t n, struct tl_tk_buf *out, struct tl_error *err);

/* ---- tokenizer_decode.c ---- */
enum tl_status tl_tk_make_pieces(struct tl_tokenizer *tk, struct tl_error *err); /* once tokens and decoders are set */
uint32_t tl_tk_byte_char(unsigned char byte); /* the printable character that stands for a byte in byte-level text */

#endif
