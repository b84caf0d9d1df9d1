/* engine/chat_template_impl.h - what the parts of the chat template interpreter share; nobody else includes this.
 *
 *   chat_template.c        files, open, free
 *   chat_template_lex.c    text -> pieces of text and tokens, with whitespace control
 *   chat_template_parse.c  tokens -> a tree of nodes: statements
 *   chat_template_expr.c   the same: expressions
 *   chat_template_run.c    statements and operators over the tree
 *   chat_template_call.c   filters, tests, methods and functions
 *   chat_template_value.c  values, memory of a run, JSON
 *
 * A tree is an array of nodes that refer to each other by index; 0 is no node. Its depth is bounded by TL_CT_DEPTH_MAX, and
 * so is every recursion over it. */
#ifndef TL_CHAT_TEMPLATE_IMPL_H
#define TL_CHAT_TEMPLATE_IMPL_H

#include "chat_template.h"

#define TL_CT_DEPTH_MAX  128
#define TL_CT_NODES_MAX  60000
#define TL_CT_ARGS_MAX   4
#define TL_CT_PARAMS_MAX 16                           /* of a macro */
#define TL_CT_CALLS_MAX  32                           /* macros within macros; each may be TL_CT_DEPTH_MAX deep */
#define TL_CT_SHOWN(n)   ((int)((n) < 40 ? (n) : 40)) /* how much of a name goes into a message */

/* ---- tokens ------------------------------------------------------------------------------------------------------- */

enum tl_ct_token_kind {
    TL_CT_END,
    TL_CT_DATA,
    TL_CT_VAR_BEGIN,
    TL_CT_VAR_END,
    TL_CT_BLOCK_BEGIN,
    TL_CT_BLOCK_END,
    TL_CT_NAME,
    TL_CT_STRING,
    TL_CT_INT,
    TL_CT_FLOAT,
    TL_CT_OP
};

struct tl_ct_token {
    enum tl_ct_token_kind kind;
    int line;
    const char *s; /* DATA, NAME: the text; STRING: decoded; OP: in the source */
    size_t n;
    int64_t i;
    double f;
    char op[3]; /* "+", "==", ... */
};

struct tl_ct_lexer {
    const char *s; /* newlines are \n, the last one is gone */
    size_t n, pos;
    int line, depth; /* depth of brackets within a tag */
    enum { TL_CT_IN_DATA, TL_CT_IN_VAR, TL_CT_IN_BLOCK } state;
    bool line_starting;
    char *strings; /* decoded literals: as many bytes as the source at most */
    size_t strings_used;
    struct tl_error *err;
};
enum tl_status tl_ct_next(struct tl_ct_lexer *lx, struct tl_ct_token *out);

/* ---- tree --------------------------------------------------------------------------------------------------------- */

enum tl_ct_kind {
    TL_CT_NONE_NODE,
    /* statements; next is the one after */
    TL_CT_TEXT,      /* s */
    TL_CT_PRINT,     /* a: expression */
    TL_CT_IF,        /* a: condition, b: body, c: else body */
    TL_CT_FOR,       /* a: target(s) NAME, b: iterable, c: body, d: else body, e: condition */
    TL_CT_SET,       /* s: name, a: expression */
    TL_CT_SET_ATTR,  /* s: name, b: NAME of the field, a: expression */
    TL_CT_SET_BLOCK, /* s: name, a: body */
    TL_CT_MACRO, /* s: name, which: 1, 2, ... in order, a: parameters (NAME, a: default), b: body, c: macro before it */
    TL_CT_BREAK,
    TL_CT_CONTINUE,
    /* expressions; next links arguments and items */
    TL_CT_CONST, /* v */
    TL_CT_GET,   /* s: name */
    TL_CT_ATTR,  /* a, s: name */
    TL_CT_ITEM,  /* a[b] */
    TL_CT_SLICE, /* a[b:c:d] */
    TL_CT_FUNCTION,
    TL_CT_MACRO_CALL, /* s: name, a: MACRO, b: arguments */
    TL_CT_METHOD,
    TL_CT_FILTER,
    TL_CT_TEST, /* which: row of the table; a: subject, b: arguments */
    TL_CT_NOT,
    TL_CT_NEG,
    TL_CT_AND,
    TL_CT_OR,
    TL_CT_BINARY, /* op; a, b */
    TL_CT_COND,   /* b if a else c */
    TL_CT_LIST,
    TL_CT_DICT /* b: items; DICT: key, value, key ... */
};

struct tl_ct_node {
    enum tl_ct_kind kind;
    int line;
    uint32_t a, b, c, d, e, next;
    char op[3];
    bool negated; /* TEST: is not */
    int which;
    const char *s; /* in source or strings */
    size_t n;
    const char *keyword; /* of an argument: name=... ; NULL = by position */
    size_t keyword_bytes;
    enum { TL_CT_C_NONE, TL_CT_C_BOOL, TL_CT_C_INT, TL_CT_C_FLOAT, TL_CT_C_STR } constant;
    int64_t i;
    double f;
};

struct tl_chat_template {
    char *source, *strings; /* owned */
    struct tl_ct_node *nodes;
    uint32_t n_nodes, cap_nodes, root, macros; /* macros: the last one */
    char *tokens;                              /* owned: JSON text of bos_token ... after parsing in place */
    size_t tokens_bytes;
    bool thinks;
};

enum tl_status tl_ct_parse(struct tl_chat_template *t, size_t bytes, struct tl_error *err);

/* ---- values ------------------------------------------------------------------------------------------------------- */

enum tl_ct_type {
    TL_CT_UNDEFINED,
    TL_CT_NONE,
    TL_CT_BOOL,
    TL_CT_INTEGER,
    TL_CT_FRACTION,
    TL_CT_STR,
    TL_CT_SEQ,
    TL_CT_MAP,
    TL_CT_SPACE
};

struct tl_ct_value;
struct tl_ct_map { /* in order of insertion; keys are strings */
    struct tl_ct_value *keys, *values;
    size_t n, cap;
};

struct tl_ct_value {
    enum tl_ct_type type;
    size_t n; /* STR: bytes; SEQ: items */
    union {
        bool b;
        int64_t i;
        double f;
        const char *s;
        struct tl_ct_value *items;
        struct tl_ct_map *map; /* MAP, SPACE (a namespace) */
    };
    const unsigned char *plain; /* STR: per byte, 1 = user text; NULL = none is */
};

struct tl_ct_chunk;

struct tl_ct_run {
    const struct tl_chat_template *t;
    struct tl_ct_chunk *chunks;
    size_t memory; /* bytes so far */
    int64_t steps;
    enum tl_status st; /* the first error sticks; everything then returns undefined */
    struct tl_error *err;
    struct tl_ct_var *vars;
    size_t n_vars, cap_vars, frame; /* frame: first variable of the innermost scope */
    size_t n_top;                   /* variables outside of every loop */
    size_t hidden, hidden_end;      /* within a macro: variables of the loops that call it */
    int macros, calls;              /* macros defined so far; calls under way */
    char *out;
    unsigned char *out_plain;
    size_t n_out, cap_out;
    enum { TL_CT_GO, TL_CT_LEAVE_LOOP, TL_CT_NEXT_ITEM } flow;
};

/* All of these return zeroed memory or values, and stick an error in r when something is wrong. */
void *tl_ct_alloc(struct tl_ct_run *r, size_t bytes); /* never NULL while r->st is TL_OK */
void tl_ct_release(struct tl_ct_run *r);
bool tl_ct_step(struct tl_ct_run *r, size_t cost); /* false: stop */
void tl_ct_fail(struct tl_ct_run *r, int line, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

struct tl_ct_value tl_ct_str(const char *s, size_t n, const unsigned char *plain);
struct tl_ct_value tl_ct_int(int64_t i);
struct tl_ct_value tl_ct_bool(bool b);
struct tl_ct_value tl_ct_seq(struct tl_ct_run *r, size_t n);
struct tl_ct_value tl_ct_new_map(struct tl_ct_run *r, enum tl_ct_type type);
void tl_ct_map_set(struct tl_ct_run *r, struct tl_ct_map *m, struct tl_ct_value key, struct tl_ct_value v);
const struct tl_ct_value *tl_ct_map_get(struct tl_ct_run *r, const struct tl_ct_map *m, const char *key, size_t n);
struct tl_ct_value tl_ct_part(struct tl_ct_value s, size_t from, size_t to); /* of a string, in bytes */
struct tl_ct_value tl_ct_concat(struct tl_ct_run *r, struct tl_ct_value a, struct tl_ct_value b);

bool tl_ct_truth(struct tl_ct_value v);
bool tl_ct_equal(struct tl_ct_run *r, struct tl_ct_value a, struct tl_ct_value b);
const char *tl_ct_type_name(enum tl_ct_type t);
size_t tl_ct_chars(struct tl_ct_value s);                   /* characters of a string */
size_t tl_ct_char_at(struct tl_ct_value s, size_t chars);   /* byte offset of a character */
bool tl_ct_is_space(uint32_t cp);                           /* what Python's strip() takes away */
uint32_t tl_ct_get_char(const char *s, size_t n, int *len); /* also of damaged text: one byte */
struct tl_ct_value tl_ct_to_str(struct tl_ct_run *r, int line, struct tl_ct_value v); /* as {{ v }} writes it */
struct tl_ct_value tl_ct_to_json(struct tl_ct_run *r, int line, struct tl_ct_value v,
                                 int indent);                                        /* indent -1 = one line */
struct tl_ct_value tl_ct_items(struct tl_ct_run *r, int line, struct tl_ct_value v); /* what for goes over, as SEQ */
/* The members of a JSON object as variables; user: their strings are user text. text is changed and must live on. */
void tl_ct_load(struct tl_ct_run *r, char *text, size_t bytes, bool user, const char *what);

/* ---- run ---------------------------------------------------------------------------------------------------------- */

struct tl_ct_var {
    const char *name;
    size_t n;
    struct tl_ct_value v;
};
void tl_ct_define(struct tl_ct_run *r, const char *name, size_t n, struct tl_ct_value v); /* in the innermost scope */
void tl_ct_run_body(struct tl_ct_run *r, uint32_t first);

/* ---- calls -------------------------------------------------------------------------------------------------------- */

struct tl_ct_args {
    int line, n;
    struct tl_ct_value v[TL_CT_ARGS_MAX];
    const struct tl_ct_node *node[TL_CT_ARGS_MAX]; /* for its keyword */
};
/* Row of a name in the table of its kind; -1: unknown. */
int tl_ct_find_filter(const char *s, size_t n);
int tl_ct_find_test(const char *s, size_t n);
int tl_ct_find_method(const char *s, size_t n);
int tl_ct_find_function(const char *s, size_t n);
struct tl_ct_value tl_ct_filter(struct tl_ct_run *r, int which, struct tl_ct_value v, const struct tl_ct_args *a);
bool tl_ct_test(struct tl_ct_run *r, int which, struct tl_ct_value v, const struct tl_ct_args *a);
struct tl_ct_value tl_ct_method(struct tl_ct_run *r, int which, struct tl_ct_value v, const struct tl_ct_args *a);
struct tl_ct_value tl_ct_function(struct tl_ct_run *r, int which, const struct tl_ct_args *a);
bool tl_ct_contains(struct tl_ct_run *r, int line, struct tl_ct_value what, struct tl_ct_value in);

#endif
