/* Tokens to look at, nodes to add, and statements: blocks, loops, variables, macros.
 * What Jinja knows and we do not is refused here and in expressions, by name, so that a template that opens does not fail on
 * syntax later. */
#include "chat_template_parse.h"

#include <string.h>

#include "mem.h"

static uint32_t body(struct tl_ct_parser *p, const char *const *ends);

/* ---- helpers ------------------------------------------------------------------------------------------------------ */

uint32_t tl_ct_refuse(struct tl_ct_parser *p, int line, const char *kind, const char *name, size_t n)
{
    if (p->st == TL_OK)
        p->st =
            tl_fail(p->err, TL_ERR_UNSUPPORTED, "line %d of the chat template uses %s '%.*s', which is not supported",
                    line, kind, TL_CT_SHOWN(n), name);
    return 0;
}

uint32_t tl_ct_bad(struct tl_ct_parser *p, const char *what)
{
    if (p->st == TL_OK)
        p->st = tl_fail(p->err, TL_ERR_BAD_FILE, "line %d of the chat template: %s", p->tok.line, what);
    return 0;
}

void tl_ct_advance(struct tl_ct_parser *p)
{
    if (p->st == TL_OK)
        p->st = tl_ct_next(&p->lx, &p->tok);
    if (p->st != TL_OK)
        p->tok = (struct tl_ct_token){.kind = TL_CT_END};
}

bool tl_ct_is_op(const struct tl_ct_parser *p, const char *op)
{
    return p->tok.kind == TL_CT_OP && strcmp(p->tok.op, op) == 0;
}

bool tl_ct_is_name(const struct tl_ct_parser *p, const char *name)
{
    return p->tok.kind == TL_CT_NAME && p->tok.n == strlen(name) && memcmp(p->tok.s, name, p->tok.n) == 0;
}

bool tl_ct_take_op(struct tl_ct_parser *p, const char *op)
{
    bool is = tl_ct_is_op(p, op);
    if (is)
        tl_ct_advance(p);
    return is;
}

bool tl_ct_take_name(struct tl_ct_parser *p, const char *name)
{
    bool is = tl_ct_is_name(p, name);
    if (is)
        tl_ct_advance(p);
    return is;
}

void tl_ct_want_op(struct tl_ct_parser *p, const char *op)
{
    if (!tl_ct_take_op(p, op) && p->st == TL_OK)
        p->st = tl_fail(p->err, TL_ERR_BAD_FILE, "line %d of the chat template: '%s' is missing", p->tok.line, op);
}

static void want_end(struct tl_ct_parser *p, enum tl_ct_token_kind kind)
{
    if (p->tok.kind == kind)
        tl_ct_advance(p);
    else
        tl_ct_bad(p, "a tag goes on where it should end");
}

uint32_t tl_ct_add(struct tl_ct_parser *p, enum tl_ct_kind kind, int line)
{
    struct tl_chat_template *t = p->t;
    if (p->st != TL_OK)
        return 0;
    if (t->n_nodes == t->cap_nodes) {
        uint32_t cap = t->cap_nodes ? t->cap_nodes * 2 : 256;
        struct tl_ct_node *v = t->n_nodes < TL_CT_NODES_MAX ? tl_realloc(t->nodes, cap * sizeof(*v)) : NULL;
        if (!v) {
            p->st = t->n_nodes < TL_CT_NODES_MAX ? tl_fail_host_memory(p->err, cap * sizeof(*v))
                                                 : tl_fail(p->err, TL_ERR_UNSUPPORTED,
                                                           "the chat template has more than %d parts", TL_CT_NODES_MAX);
            return 0;
        }
        t->nodes = v;
        t->cap_nodes = cap;
    }
    t->nodes[t->n_nodes] = (struct tl_ct_node){.kind = kind, .line = line};
    return t->n_nodes++;
}

uint32_t tl_ct_add_pair(struct tl_ct_parser *p, enum tl_ct_kind kind, int line, uint32_t a, uint32_t b)
{
    uint32_t i = tl_ct_add(p, kind, line);
    if (i) {
        tl_ct_at(p, i)->a = a;
        tl_ct_at(p, i)->b = b;
    }
    return i;
}

uint32_t tl_ct_add_named(struct tl_ct_parser *p, enum tl_ct_kind kind, const struct tl_ct_token *name)
{
    uint32_t i = tl_ct_add(p, kind, name->line);
    if (i) {
        tl_ct_at(p, i)->s = name->s;
        tl_ct_at(p, i)->n = name->n;
    }
    return i;
}

void tl_ct_link(struct tl_ct_parser *p, uint32_t *first, uint32_t *last, uint32_t i)
{
    if (!i)
        return;
    if (*last)
        tl_ct_at(p, *last)->next = i;
    else
        *first = i;
    *last = i;
}

bool tl_ct_enter(struct tl_ct_parser *p)
{
    if (++p->depth > TL_CT_DEPTH_MAX)
        tl_ct_bad(p, "it is nested too deep");
    return p->st == TL_OK;
}

struct tl_ct_token tl_ct_take_word(struct tl_ct_parser *p, const char *what)
{
    struct tl_ct_token t = p->tok;
    if (t.kind != TL_CT_NAME)
        tl_ct_bad(p, what);
    tl_ct_advance(p);
    return t;
}

/* ---- statements --------------------------------------------------------------------------------------------------- */

/* The macro of that name among those so far; 0: none. */
static uint32_t find_macro(struct tl_ct_parser *p, const struct tl_ct_token *name)
{
    uint32_t i = p->t->macros;
    while (i && (tl_ct_at(p, i)->n != name->n || memcmp(tl_ct_at(p, i)->s, name->s, name->n) != 0))
        i = tl_ct_at(p, i)->c;
    return i;
}

static bool ends(const struct tl_ct_parser *p, const char *const *words)
{
    for (int i = 0; words[i]; i++)
        if (tl_ct_is_name(p, words[i]))
            return true;
    return false;
}

static uint32_t if_statement(struct tl_ct_parser *p)
{
    static const char *const stops[] = {"elif", "else", "endif", NULL}, *const last[] = {"endif", NULL};
    int line = p->tok.line;
    uint32_t i, a = tl_ct_expression(p), b, c = 0;
    want_end(p, TL_CT_BLOCK_END);
    b = body(p, stops);
    if (tl_ct_is_name(p, "elif")) {
        tl_ct_advance(p);
        if (tl_ct_enter(p)) /* each elif is an if inside the else before it */
            c = if_statement(p);
        p->depth--;
    } else if (tl_ct_take_name(p, "else")) {
        want_end(p, TL_CT_BLOCK_END);
        c = body(p, last);
        tl_ct_take_name(p, "endif");
    } else {
        tl_ct_take_name(p, "endif");
    }
    i = tl_ct_add_pair(p, TL_CT_IF, line, a, b);
    if (i)
        tl_ct_at(p, i)->c = c;
    return i;
}

static uint32_t for_statement(struct tl_ct_parser *p)
{
    static const char *const stops[] = {"else", "endfor", NULL}, *const last[] = {"endfor", NULL};
    int line = p->tok.line;
    uint32_t first = 0, end = 0, over, condition = 0, inner, otherwise = 0, i;
    bool bracket = tl_ct_take_op(p, "(");
    do {
        struct tl_ct_token name = tl_ct_take_word(p, "the name of a loop variable is missing");
        tl_ct_link(p, &first, &end, tl_ct_add_named(p, TL_CT_GET, &name));
    } while (p->st == TL_OK && tl_ct_take_op(p, ","));
    if (bracket)
        tl_ct_want_op(p, ")");
    if (p->st == TL_OK && !tl_ct_take_name(p, "in"))
        return tl_ct_bad(p, "'in' is missing");
    over = tl_ct_logic(p, true);
    if (tl_ct_take_name(p, "if"))
        condition = tl_ct_expression(p);
    if (tl_ct_is_name(p, "recursive"))
        return tl_ct_refuse(p, line, "a loop that is", "recursive", 9);
    want_end(p, TL_CT_BLOCK_END);
    p->loops++;
    inner = body(p, stops);
    p->loops--;
    if (tl_ct_take_name(p, "else")) {
        want_end(p, TL_CT_BLOCK_END);
        otherwise = body(p, last);
    }
    tl_ct_take_name(p, "endfor");
    i = tl_ct_add_pair(p, TL_CT_FOR, line, first, over);
    if (i) {
        tl_ct_at(p, i)->c = inner;
        tl_ct_at(p, i)->d = otherwise;
        tl_ct_at(p, i)->e = condition;
    }
    return i;
}

static uint32_t set_statement(struct tl_ct_parser *p)
{
    static const char *const last[] = {"endset", NULL};
    struct tl_ct_token name = tl_ct_take_word(p, "the name after 'set' is missing"), field = {.kind = TL_CT_END};
    uint32_t i;
    if (tl_ct_take_op(p, "."))
        field = tl_ct_take_word(p, "a name is missing after '.'");
    if (tl_ct_is_op(p, ","))
        return tl_ct_refuse(p, name.line, "more than one target of", "set", 3);
    if (tl_ct_is_op(p, "|"))
        return tl_ct_refuse(p, name.line, "a filter of a block in", "set", 3);
    if (tl_ct_take_op(p, "=")) {
        i = tl_ct_add_named(p, field.kind == TL_CT_NAME ? TL_CT_SET_ATTR : TL_CT_SET, &name);
        uint32_t b = field.kind == TL_CT_NAME ? tl_ct_add_named(p, TL_CT_GET, &field) : 0, a = tl_ct_expression(p);
        if (p->st == TL_OK && tl_ct_is_op(p, ","))
            return tl_ct_refuse(p, name.line, "a tuple without brackets in", "set", 3);
        if (p->st == TL_OK) {
            tl_ct_at(p, i)->a = a;
            tl_ct_at(p, i)->b = b;
        }
        return i;
    }
    if (field.kind == TL_CT_NAME)
        return tl_ct_bad(p, "'=' is missing");
    want_end(p, TL_CT_BLOCK_END);
    i = tl_ct_add_named(p, TL_CT_SET_BLOCK, &name);
    uint32_t inner = body(p, last);
    tl_ct_take_name(p, "endset");
    if (p->st == TL_OK)
        tl_ct_at(p, i)->a = inner;
    return i;
}

/* Macros stand outside of every block, so that a name means the same one wherever it is called. */
static uint32_t macro_statement(struct tl_ct_parser *p, int line)
{
    static const char *const last[] = {"endmacro", NULL};
    struct tl_ct_token name = tl_ct_take_word(p, "the name of a macro is missing");
    uint32_t i = tl_ct_add_named(p, TL_CT_MACRO, &name), first = 0, end = 0, inner;
    int n = 0, loops = p->loops;
    if (p->depth > 1)
        return tl_ct_refuse(p, line, "within a block the statement", "macro", 5);
    if (tl_ct_find_function(name.s, name.n) >= 0 || find_macro(p, &name))
        return tl_ct_refuse(p, line, "for a macro a name that is taken,", name.s, name.n);
    tl_ct_want_op(p, "(");
    while (p->st == TL_OK && !tl_ct_take_op(p, ")")) {
        if (n > 0)
            tl_ct_want_op(p, ",");
        if (++n > TL_CT_PARAMS_MAX)
            return tl_ct_refuse(p, line, "too many parameters of", name.s, name.n);
        struct tl_ct_token word = tl_ct_take_word(p, "the name of a parameter is missing");
        uint32_t param = tl_ct_add_named(p, TL_CT_GET, &word), value = tl_ct_take_op(p, "=") ? tl_ct_expression(p) : 0;
        if (end && !value && tl_ct_at(p, end)->a)
            return tl_ct_bad(p, "a parameter without a default follows one with it");
        if (param)
            tl_ct_at(p, param)->a = value;
        tl_ct_link(p, &first, &end, param);
    }
    want_end(p, TL_CT_BLOCK_END);
    p->loops = 0;
    inner = body(p, last);
    p->loops = loops;
    tl_ct_take_name(p, "endmacro");
    if (p->st == TL_OK) {
        *tl_ct_at(p, i) =
            (struct tl_ct_node){.kind = TL_CT_MACRO, .line = line, .s = name.s, .n = name.n, .a = first, .b = inner};
        tl_ct_at(p, i)->c = p->t->macros;
        tl_ct_at(p, i)->which = p->t->macros ? tl_ct_at(p, p->t->macros)->which + 1 : 1;
        p->t->macros = i;
    }
    return i;
}

/* The word of the statement is looked at. */
static uint32_t statement(struct tl_ct_parser *p)
{
    static const char *const generation[] = {"endgeneration", NULL};
    struct tl_ct_token word = p->tok;
    uint32_t i;
    if (word.kind != TL_CT_NAME)
        return tl_ct_bad(p, "a statement has no name");
    if (tl_ct_take_name(p, "if"))
        return if_statement(p);
    if (tl_ct_take_name(p, "for"))
        return for_statement(p);
    if (tl_ct_take_name(p, "set"))
        return set_statement(p);
    if (tl_ct_take_name(p, "macro"))
        return macro_statement(p, word.line);
    if (tl_ct_is_name(p, "break") || tl_ct_is_name(p, "continue")) {
        if (!p->loops)
            return tl_ct_bad(p, "break and continue are for loops alone");
        i = tl_ct_add(p, tl_ct_is_name(p, "break") ? TL_CT_BREAK : TL_CT_CONTINUE, word.line);
        tl_ct_advance(p);
        return i;
    }
    if (tl_ct_take_name(
            p, "generation")) { /* marks what the model wrote, for training: here only the text inside matters */
        want_end(p, TL_CT_BLOCK_END);
        uint32_t always = tl_ct_add(p, TL_CT_CONST, word.line), inner = body(p, generation);
        tl_ct_take_name(p, "endgeneration");
        if (always) {
            tl_ct_at(p, always)->constant = TL_CT_C_BOOL;
            tl_ct_at(p, always)->i = true;
        }
        return tl_ct_add_pair(p, TL_CT_IF, word.line, always, inner);
    }
    return tl_ct_refuse(p, word.line, "the statement", word.s, word.n);
}

/* Statements up to a block tag that begins with one of the words, which is left to look at; ends NULL: to the end. */
static uint32_t body(struct tl_ct_parser *p, const char *const *words)
{
    uint32_t first = 0, last = 0, i;
    if (!tl_ct_enter(p))
        return 0;
    while (p->st == TL_OK) {
        struct tl_ct_token t = p->tok;
        if (t.kind == TL_CT_END) {
            if (words)
                tl_ct_bad(p, "the text ends inside a block");
            break;
        }
        tl_ct_advance(p);
        if (t.kind == TL_CT_DATA) {
            if (t.n > 0)
                tl_ct_link(p, &first, &last, tl_ct_add_named(p, TL_CT_TEXT, &t));
        } else if (t.kind == TL_CT_VAR_BEGIN) {
            i = tl_ct_add_pair(p, TL_CT_PRINT, t.line, tl_ct_expression(p), 0);
            want_end(p, TL_CT_VAR_END);
            tl_ct_link(p, &first, &last, i);
        } else {
            if (words && ends(p, words))
                break;
            i = statement(p);
            want_end(p, TL_CT_BLOCK_END);
            tl_ct_link(p, &first, &last, i);
        }
    }
    p->depth--;
    return first;
}

/* Macros may call those that follow, so calls find theirs at the end. */
static void bind_macro_calls(struct tl_ct_parser *p)
{
    for (uint32_t i = 1; i < p->t->n_nodes && p->st == TL_OK; i++) {
        struct tl_ct_node *n = tl_ct_at(p, i);
        const struct tl_ct_token name = {.s = n->s, .n = n->n};
        if (n->kind == TL_CT_MACRO_CALL && !(n->a = find_macro(p, &name)))
            tl_ct_refuse(p, n->line, "the function", n->s, n->n);
    }
}

enum tl_status tl_ct_parse(struct tl_chat_template *t, size_t bytes, struct tl_error *err)
{
    struct tl_ct_parser p = {
        .t = t, .err = err, .lx = {.s = t->source, .n = bytes, .line = 1, .strings = t->strings, .err = err}};
    p.lx.line_starting = true;
    tl_ct_add(&p, TL_CT_NONE_NODE, 0); /* index 0 is no node */
    tl_ct_advance(&p);
    t->root = body(&p, NULL);
    bind_macro_calls(&p);
    return p.st;
}
