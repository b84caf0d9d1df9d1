/* engine/grammar_impl.h - the rooms behind grammar.h, in the order in which a grammar passes through them.
 *
 *   gbnf, regex, schema   read a source into a draft: rules, each an expression over characters and rules
 *   draft                 the expressions; build turns them into
 *   net                   one small byte automaton (NFA) per rule, with edges "byte range", "rule" and "nothing"; checked: no
 *                         left recursion, no part that cannot be completed. Immutable.
 *   local                 the rules' automata made deterministic, state by state, when first needed
 *   space                 positions in a text: local states with stacks of return states, interned, and the moves between them
 *   masks                 tokens allowed from a local state whatever the stack below is, and where in the trie the stack matters
 *   matcher               a position of its own; puts masks together
 *
 * Thread: see grammar.h. */
#ifndef TL_GRAMMAR_IMPL_H
#define TL_GRAMMAR_IMPL_H

#include "grammar.h"

#include <stdatomic.h>

#define TL_UNICODE_MAX 0x10FFFFu

/* A growing array: make room for n elements more. false: no memory. */
bool tl_vec_grow(void *data_ptr, uint32_t n_used, uint32_t n_more, uint32_t *cap, size_t elem_bytes);
#define TL_VEC(type)                                                                                                   \
    struct {                                                                                                           \
        type *at;                                                                                                      \
        uint32_t n, cap;                                                                                               \
    }
#define TL_VEC_ROOM(v, more) tl_vec_grow(&(v)->at, (v)->n, (more), &(v)->cap, sizeof(*(v)->at))

/* ---- draft --------------------------------------------------------------------------------------------------------- */

enum tl_expr_kind {
    TL_EXPR_EMPTY,  /* the empty text */
    TL_EXPR_SET,    /* one character out of ranges[a .. a + n) */
    TL_EXPR_WORDS,  /* one of words[a .. a + n), as bytes */
    TL_EXPR_CAT,    /* kids[a .. a + n) one after the other */
    TL_EXPR_ALT,    /* one of kids[a .. a + n); none of them = no text at all */
    TL_EXPR_REPEAT, /* expression a, min to max times; max -1 = any number */
    TL_EXPR_RULE,   /* rule a */
    TL_EXPR_LIST    /* members of an object, see tl_draft_list */
};
struct tl_expr {
    enum tl_expr_kind kind;
    uint32_t a, n;
    int32_t min, max;
};
struct tl_range {
    uint32_t lo, hi; /* code points, inclusive */
};
struct tl_word {
    uint32_t at, n; /* in bytes */
};
struct tl_draft_rule {
    uint32_t name, n_name; /* in bytes */
    uint32_t body;
    bool defined;
};

/* Functions that make expressions return their number; after a failure (st, err) 0, which is the empty text. */
struct tl_draft {
    struct tl_grammar_limits limits;
    enum tl_status st;
    struct tl_error *err;
    enum tl_status st_bad; /* what a source that is wrong is answered with */
    TL_VEC(struct tl_expr) exprs;
    TL_VEC(uint32_t) kids;
    TL_VEC(struct tl_range) ranges;
    TL_VEC(struct tl_word) words;
    TL_VEC(char) bytes;
    TL_VEC(struct tl_draft_rule) rules;
    uint32_t root;
};

enum tl_status tl_draft_init(struct tl_draft *d, const struct tl_grammar_limits *limits, struct tl_error *err);
void tl_draft_clear(struct tl_draft *d);
void tl_draft_fail(struct tl_draft *d, enum tl_status st, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
void tl_draft_no_memory(struct tl_draft *d);

uint32_t tl_draft_set(struct tl_draft *d, const struct tl_range *ranges, uint32_t n,
                      bool negate); /* any order, may overlap */
uint32_t tl_draft_literal(struct tl_draft *d, const char *bytes, size_t n);
uint32_t tl_draft_text(struct tl_draft *d, const char *text); /* a C string as literal */
void tl_draft_add_word(struct tl_draft *d, const char *bytes, size_t n);
uint32_t tl_draft_words(struct tl_draft *d, uint32_t first_word); /* all words added since */
uint32_t tl_draft_cat(struct tl_draft *d, const uint32_t *kids, uint32_t n);
uint32_t tl_draft_alt(struct tl_draft *d, const uint32_t *kids, uint32_t n);
uint32_t tl_draft_repeat(struct tl_draft *d, uint32_t kid, int min, int max);
uint32_t tl_draft_call(struct tl_draft *d, uint32_t rule);
/* Members in order, each once: kids are pairs (expression, 1 if required); then tail 0 to tail_max times (-1 = any number);
 * sep between all. may_be_empty: also without any. */
uint32_t tl_draft_list(struct tl_draft *d, uint32_t sep, uint32_t tail, int tail_max, const uint32_t *pairs,
                       uint32_t n_members, bool may_be_empty);
uint32_t tl_draft_rule(struct tl_draft *d, const char *name, size_t n_name); /* a new rule without a body */
void tl_draft_define(struct tl_draft *d, uint32_t rule, uint32_t body);

/* Sources. Each leaves its result in d->root, or d->st. */
void tl_gbnf_read(struct tl_draft *d, const char *text, size_t n);
void tl_schema_read(struct tl_draft *d, const char *text, size_t n);
uint32_t tl_json_object_rule(struct tl_draft *d); /* any object */

struct tl_regex_params {
    const char *text;
    size_t n;
    bool search;  /* matches anywhere unless anchored (a schema's pattern); else the whole */
    bool json;    /* characters as they stand inside a JSON string */
    int min, max; /* characters in all; max -1 = any number. What cannot be kept is refused */
};
uint32_t tl_regex_read(struct tl_draft *d, const struct tl_regex_params *p);
/* A character out of the ranges as it stands inside a JSON string: quotes, backslashes and controls escaped. */
uint32_t tl_json_set(struct tl_draft *d, const struct tl_range *ranges, uint32_t n);
/* Ranges sorted and joined in place, perhaps turned round; out has room for n + 1. Returns how many. */
uint32_t tl_ranges_tidy(struct tl_range *out, const struct tl_range *in, uint32_t n, bool negate);

/* Decode one character of UTF-8 at p < end; 0 bytes: not UTF-8. */
int tl_utf8_read(const char *p, const char *end, uint32_t *cp);
int tl_utf8_write(char out[4], uint32_t cp);

/* ---- net ----------------------------------------------------------------------------------------------------------- */

#define TL_EDGE_NOTHING 0u
#define TL_EDGE_BYTES   (1u << 30) /* | lo << 8 | hi */
#define TL_EDGE_RULE    (2u << 30) /* | rule */
#define TL_EDGE_KIND    (3u << 30)

/* Tokens of more bytes are looked at one by one; up to that many, a counted repetition far from its ends looks like any other
 * far from its ends. */
#define TL_SHORT_PIECE 24

struct tl_edge {
    uint32_t to, what;
};
struct tl_net_rule {
    uint32_t start, end;
    bool nullable;
    uint32_t rank; /* a rule that another one may begin with has a higher rank */
};
struct tl_net {
    uint32_t n_states, n_edges, n_rules, root;
    uint32_t *first; /* [n_states + 1] into edges */
    struct tl_edge *edges;
    uint32_t *same;    /* [n_states] a state that reads any TL_SHORT_PIECE bytes just so, often itself */
    uint32_t *rule_of; /* [n_states] */
    struct tl_net_rule *rules;
    int n_classes;                                          /* bytes that no edge tells apart */
    uint8_t class_of[256], byte_of[256], class_size_1[256]; /* class -> a byte of it; whether it has only that one */
    size_t bytes;
};
enum tl_status tl_net_build(struct tl_net *net, struct tl_draft *d, struct tl_error *err);
void tl_net_clear(struct tl_net *net);

/* ---- local --------------------------------------------------------------------------------------------------------- */

#define TL_NONE    0u          /* no state */
#define TL_UNKNOWN 0xFFFFFFFFu /* not computed yet */

struct tl_local_call {
    uint32_t rule, back; /* the state after it */
};
struct tl_local_state {
    uint32_t set, n_set;     /* net states: in sets */
    uint32_t calls, n_calls; /* in calls; TL_UNKNOWN = not computed */
    uint32_t same;           /* by net.same; TL_UNKNOWN = not computed */
    bool accepts;            /* the rule may end here */
    bool only_accepts;       /* and has to */
};
struct tl_index { /* hash -> number */
    uint32_t *slots, n_slots, n_used;
};
struct tl_local {
    const struct tl_net *net;
    TL_VEC(struct tl_local_state) states; /* [0] is unused */
    TL_VEC(uint32_t) sets;
    TL_VEC(struct tl_local_call) calls;
    TL_VEC(uint32_t) moves; /* [state][class] */
    TL_VEC(uint32_t) todo, found;
    struct tl_index index;
    uint32_t *seen, stamp; /* [net states] */
    uint32_t *start_of;    /* [rules]: local state, TL_UNKNOWN = not computed */
};

/* What one token may cost, and what there is to run it on. A text saves up to work_per_token_max for its dear tokens; each
 * token adds one part in TL_WORK_SHARES, so that none stays dear. */
#define TL_WORK_SHARES 16
struct tl_effort {
    int64_t left, given;
    const struct tl_grammar_limits *limits;
    struct tl_error *err;
};
enum tl_status tl_effort_spent(const struct tl_effort *e);
static inline bool tl_effort_take(struct tl_effort *e, int64_t n) { return (e->left -= n) >= 0; }

enum tl_status tl_local_init(struct tl_local *l, const struct tl_net *net, struct tl_error *err);
void tl_local_clear(struct tl_local *l);
size_t tl_local_bytes(const struct tl_local *l);
enum tl_status tl_local_start(struct tl_local *l, uint32_t rule, uint32_t *state, struct tl_effort *e);
enum tl_status tl_local_move(struct tl_local *l, uint32_t state, int cls, uint32_t *to, struct tl_effort *e);
enum tl_status tl_local_need_calls(struct tl_local *l, uint32_t state, struct tl_effort *e);
enum tl_status tl_local_same(struct tl_local *l, uint32_t state, uint32_t *same, struct tl_effort *e);

/* Find a number by hash. eq says whether number n is the one. *at: where it is or belongs. TL_UNKNOWN if absent. */
typedef bool tl_index_eq(const void *arg, uint32_t n);
bool tl_index_room(struct tl_index *x, uint64_t (*hash)(const void *arg, uint32_t n), const void *arg);
uint32_t tl_index_find(const struct tl_index *x, uint64_t h, tl_index_eq *eq, const void *arg, uint32_t *at);
void tl_index_put(struct tl_index *x, uint32_t at, uint32_t n);

/* ---- space --------------------------------------------------------------------------------------------------------- */

#define TL_BOTTOM                                                                                                      \
    0u /* node 0: below it lies what the space does not know. Also the state 0 in an entry: "through the bottom" */

struct tl_pair { /* a local state over a stack */
    uint32_t state, node;
};
struct tl_node { /* top of stacks: what may be returned to */
    uint32_t first, n, depth;
};
struct tl_place { /* a set of pairs, each local state once. Number 0: nowhere */
    uint32_t first, n;
    uint32_t wide, n_wide; /* the same with the rules that may begin here; TL_UNKNOWN = not computed */
    bool through;          /* the bottom was reached: the text may end, or what lies below goes on */
};
struct tl_space_call { /* a rule about to be entered */
    uint32_t rank, rule;
    struct tl_pair entry; /* where it returns to */
};
struct tl_space {
    struct tl_local *local;
    TL_VEC(struct tl_pair) pairs; /* of nodes and places */
    TL_VEC(struct tl_node) nodes;
    TL_VEC(struct tl_place) places;
    TL_VEC(uint32_t) moves; /* [place][class] */
    struct tl_index node_index, place_index;
    TL_VEC(struct tl_pair) work, kept, entries; /* scratch */
    TL_VEC(struct tl_space_call) calls;
};
enum tl_status tl_space_init(struct tl_space *s, struct tl_local *local, struct tl_error *err);
void tl_space_clear(struct tl_space *s);
size_t tl_space_bytes(const struct tl_space *s);
enum tl_status tl_space_node(struct tl_space *s, uint32_t *node, struct tl_effort *e); /* of s->entries */
/* The place of a text that starts in a local state over the bottom. */
enum tl_status tl_space_begin(struct tl_space *s, uint32_t state, uint32_t *place, struct tl_effort *e);
/* The place made of one pair alone. */
enum tl_status tl_space_place_of(struct tl_space *s, uint32_t state, uint32_t node, uint32_t *place,
                                 struct tl_effort *e);
/* Where a return to node's entries leads. */
enum tl_status tl_space_return(struct tl_space *s, uint32_t node, uint32_t *place, struct tl_effort *e);
enum tl_status tl_space_move(struct tl_space *s, uint32_t place, int cls, uint32_t *to, struct tl_effort *e);
/* The only byte that can follow; -1 = there is a choice, or none can. */
enum tl_status tl_space_only_byte(struct tl_space *s, uint32_t place, int *byte, struct tl_effort *e);
/* Copy one place of another space over the same local states. */
enum tl_status tl_space_copy(struct tl_space *s, const struct tl_space *from, uint32_t place, uint32_t *copy,
                             struct tl_effort *e);

/* ---- masks --------------------------------------------------------------------------------------------------------- */

struct tl_trie_node {
    uint32_t end;   /* the next node that is not below this one */
    uint32_t token; /* first of the tokens that end here, in tokens; the next node's is the end */
    uint8_t byte, depth;
};
struct tl_trie {
    struct tl_trie_node *nodes; /* [n_nodes + 1], in order of bytes; [0] is the root, the last one only ends lists */
    uint32_t n_nodes;
    int32_t *tokens;
};
struct tl_vocab_trie {
    int vocab_size;
    const struct tl_tokenizer *tk; /* whose pieces they are; NULL = nobody's */
    uint64_t serial;               /* no two vocabularies of a process share it */
    struct tl_trie brief;          /* pieces up to TL_SHORT_PIECE bytes */
    struct tl_trie lengthy;        /* and beyond */
    uint32_t *piece;               /* [vocab_size + 1] into bytes */
    char *bytes;
};
#define TL_PIECE_MAX 255 /* bytes; no grammar allows a longer token */

/* Walk the part of a trie below node `top` from a place; sets bits of tokens reached. pops (may be NULL): nodes that have
 * others below them and where the bottom was reached. */
struct tl_walk {
    struct tl_space *space;
    const struct tl_trie *trie;
    uint32_t *mask;
    struct tl_masks *pops;
};
enum tl_status tl_walk_below(const struct tl_walk *w, uint32_t top, uint32_t place, struct tl_effort *e);

#define TL_MASK_FRAMES 4
struct tl_mask { /* tokens allowed from a local state, the bottom being some frames further down */
    uint32_t key[TL_MASK_FRAMES];
    uint32_t n_key;
    uint32_t ids, n_ids;   /* few tokens: their ids, in words */
    uint32_t bits;         /* many: one bit each, in words; TL_UNKNOWN = ids are meant */
    uint32_t pops, n_pops; /* trie nodes below which what lies under the bottom decides, in words */
    uint32_t pop_cost;     /* their children, counted */
};
struct tl_masks {
    uint64_t serial; /* of the vocabulary they are for */
    struct tl_space space;
    TL_VEC(struct tl_mask) masks; /* [0] is unused */
    TL_VEC(uint32_t) words;
    struct tl_index index;
    TL_VEC(uint32_t) pops; /* scratch */
    uint32_t pop_cost;
};

struct tl_grammar {
    atomic_int n_refs;
    struct tl_grammar_limits limits;
    struct tl_net net;
    struct tl_room {
        struct tl_local local;
        struct tl_masks masks;
    } * room;
};
void tl_masks_clear(struct tl_masks *ms);
size_t tl_masks_bytes(const struct tl_masks *ms);
/* The mask of a state under `frames` return states (key[0] is the state). *out is a number in ms->masks. */
enum tl_status tl_masks_get(struct tl_masks *ms, struct tl_local *local, const struct tl_vocab_trie *v,
                            const uint32_t *key, uint32_t n_key, uint32_t *out, struct tl_effort *e);

#endif
