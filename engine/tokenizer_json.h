/* engine/tokenizer_json.h - a strict JSON reader for large files: the whole tree as one flat array of nodes.
 *
 * A tokenizer file has hundreds of thousands of small values: they are kept in 32 bytes each (json.h needs three times as
 * much), and a fuzzer sees into all of it.
 *
 * Refused: anything outside RFC 8259, invalid UTF-8, unpaired surrogates, more than TL_TKJSON_DEPTH_MAX levels, text after
 * the value. Strings are unescaped in place and carry their length, so they may hold NUL. Nodes stand in document order:
 * the first child of node i is i + 1, its next sibling is nodes[i].next.
 * Thread: none of its own; a tree never changes after tl_tkjson_parse. */
#ifndef TL_TOKENIZER_JSON_H
#define TL_TOKENIZER_JSON_H

#include "status.h"

#define TL_TKJSON_DEPTH_MAX 32

enum tl_tkjson_type {
    TL_TKJSON_NULL,
    TL_TKJSON_FALSE,
    TL_TKJSON_TRUE,
    TL_TKJSON_NUMBER, /* its text is checked and kept as it stands */
    TL_TKJSON_STRING,
    TL_TKJSON_ARRAY,
    TL_TKJSON_OBJECT
};

struct tl_tkjson_node {
    enum tl_tkjson_type type;
    uint32_t next; /* index of the node after this one's subtree */
    uint32_t n;    /* ARRAY, OBJECT: children; STRING, NUMBER: bytes */
    uint32_t key_bytes;
    const char *key;  /* member of an object: its name; else NULL */
    const char *text; /* STRING, NUMBER */
};

struct tl_tkjson {
    struct tl_tkjson_node *nodes; /* nodes[0] is the root */
    uint32_t n_nodes, cap;
};

/* Parse text[bytes], which is changed and must outlive the tree. bytes is below 2^31.
 * Errors: TL_ERR_BAD_FILE with the byte offset, TL_ERR_NO_HOST_MEMORY; the tree is empty then. */
enum tl_status tl_tkjson_parse(struct tl_tkjson *js, char *text, size_t bytes, struct tl_error *err);
void tl_tkjson_free(struct tl_tkjson *js);

/* Member key of an object, or NULL. */
const struct tl_tkjson_node *tl_tkjson_get(const struct tl_tkjson *js, const struct tl_tkjson_node *obj,
                                           const char *key);
bool tl_tkjson_is(const struct tl_tkjson_node *n, const char *s); /* a string equal to s; NULL is not */
/* A whole number in [lo, hi]; false for anything else. NULL is not. */
bool tl_tkjson_int(const struct tl_tkjson_node *n, int64_t lo, int64_t hi, int64_t *out);

#endif
