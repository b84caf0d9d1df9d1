/* A recursive descent over the tokens. Precedence as in Jinja, loosest first:
 *   x if c else y | or | and | not | == != < <= > >= in | + - | ~ | * / // % | unary - | . [] () | filter, is
 * What Jinja knows and we do not is refused here, by name, so that a template that opens does not fail on syntax later. */
#include "chat_template_impl.h"

#include <string.h>

#include "mem.h"

struct parser {
    struct tl_chat_template *t;
    struct tl_ct_lexer lx;
    struct tl_ct_token tok; /* the one to look at */
    int depth, loops;
    enum tl_status st;
    struct tl_error *err;
};

static uint32_t expression(struct parser *p);
static uint32_t body(struct parser *p, const char *const *ends);

/* ---- helpers ------------------------------------------------------------------------------------------------------ */

static uint32_t refuse(struct parser *p, int line, const char *kind, const char *name, size_t n)
{
    if (p->st == TL_OK)
        p->st =
            tl_fail(p->err, TL_ERR_UNSUPPORTED, "line %d of the chat template uses %s '%.*s', which is not supported",
                    line, kind, TL_CT_SHOWN(n), name);
    return 0;
}

static uint32_t bad(struct parser *p, const char *what)
{
    if (p->st == TL_OK)
        p->st = tl_fail(p->err, TL_ERR_BAD_FILE, "line %d of the chat template: %s", p->tok.line, what);
    return 0;
}

static void advance(struct parser *p)
{
    if (p->st == TL_OK)
        p->st = tl_ct_next(&p->lx, &p->tok);
    if (p->st != TL_OK)
        p->tok = (struct tl_ct_token){.kind = TL_CT_END};
}

static bool is_op(const struct parser *p, const char *op)
{
    return p->tok.kind == TL_CT_OP && strcmp(p->tok.op, op) == 0;
}

static bool is_name(const struct parser *p, const char *name)
{
    return p->tok.kind == TL_CT_NAME && p->tok.n == strlen(name) && memcmp(p->tok.s, name, p->tok.n) == 0;
}

static bool take_op(struct parser *p, const char *op)
{
    bool is = is_op(p, op);
    if (is)
        advance(p);
    return is;
}

static bool take_name(struct parser *p, const char *name)
{
    bool is = is_name(p, name);
    if (is)
        advance(p);
    return is;
}

static void want_op(struct parser *p, const char *op)
{
    if (!take_op(p, op) && p->st == TL_OK)
        p->st = tl_fail(p->err, TL_ERR_BAD_FILE, "line %d of the chat template: '%s' is missing", p->tok.line, op);
}

static void want_end(struct parser *p, enum tl_ct_token_kind kind)
{
    if (p->tok.kind == kind)
        advance(p);
    else
        bad(p, "a tag goes on where it should end");
}

/* A node index; 0 with p->st set when there is no room. */
static uint32_t node(struct parser *p, enum tl_ct_kind kind, int line)
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

static struct tl_ct_node *at(struct parser *p, uint32_t i) { return &p->t->nodes[i]; }

static uint32_t node2(struct parser *p, enum tl_ct_kind kind, int line, uint32_t a, uint32_t b)
{
    uint32_t i = node(p, kind, line);
    if (i) {
        at(p, i)->a = a;
        at(p, i)->b = b;
    }
    return i;
}

static uint32_t named(struct parser *p, enum tl_ct_kind kind, const struct tl_ct_token *name)
{
    uint32_t i = node(p, kind, name->line);
    if (i) {
        at(p, i)->s = name->s;
        at(p, i)->n = name->n;
    }
    return i;
}

/* Append to a list that is linked by next. */
static void link_node(struct parser *p, uint32_t *first, uint32_t *last, uint32_t i)
{
    if (!i)
        return;
    if (*last)
        at(p, *last)->next = i;
    else
        *first = i;
    *last = i;
}

static bool enter(struct parser *p)
{
    if (++p->depth > TL_CT_DEPTH_MAX)
        bad(p, "it is nested too deep");
    return p->st == TL_OK;
}

static struct tl_ct_token take_word(struct parser *p, const char *what)
{
    struct tl_ct_token t = p->tok;
    if (t.kind != TL_CT_NAME)
        bad(p, what);
    advance(p);
    return t;
}

/* ---- expressions -------------------------------------------------------------------------------------------------- */

static uint32_t constant(struct parser *p)
{
    struct tl_ct_token t = p->tok;
    uint32_t i = node(p, TL_CT_CONST, t.line);
    advance(p);
    if (!i)
        return 0;
    struct tl_ct_node *v = at(p, i);
    v->s = t.s;
    v->n = t.n;
    v->i = t.i;
    v->f = t.f;
    v->constant = t.kind == TL_CT_STRING ? TL_CT_C_STR : t.kind == TL_CT_INT ? TL_CT_C_INT : TL_CT_C_FLOAT;
    while (t.kind == TL_CT_STRING &&
           p->tok.kind == TL_CT_STRING) { /* literals side by side are one: they lie so, too */
        at(p, i)->n += p->tok.n;
        advance(p);
    }
    return i;
}

static uint32_t word_constant(struct parser *p, int kind, bool b)
{
    uint32_t i = node(p, TL_CT_CONST, p->tok.line);
    if (i) {
        at(p, i)->constant = kind;
        at(p, i)->i = b;
    }
    advance(p);
    return i;
}

/* ( args ), the opening one taken. Lists them. */
static uint32_t arguments(struct parser *p)
{
    uint32_t first = 0, last = 0;
    int n = 0;
    bool keywords = false;
    while (p->st == TL_OK && !take_op(p, ")")) {
        const char *keyword = NULL;
        size_t keyword_bytes = 0;
        if (n++ > 0)
            want_op(p, ",");
        if (n > 1 && take_op(p, ")"))
            break;
        if (p->tok.kind == TL_CT_NAME) { /* name=value needs one token of looking ahead */
            struct tl_ct_lexer lx = p->lx;
            struct tl_ct_token name = p->tok, next;
            if (tl_ct_next(&lx, &next) == TL_OK && next.kind == TL_CT_OP && strcmp(next.op, "=") == 0) {
                keyword = name.s;
                keyword_bytes = name.n;
                advance(p);
                advance(p);
            }
        }
        if (keywords && !keyword)
            return bad(p, "an argument by position follows one by name");
        keywords = keywords || keyword;
        uint32_t i = expression(p), holder = node2(p, TL_CT_NONE_NODE, p->tok.line, i, 0);
        if (holder) {
            at(p, holder)->keyword = keyword;
            at(p, holder)->keyword_bytes = keyword_bytes;
        }
        link_node(p, &first, &last, holder);
    }
    return first;
}

static int count(struct parser *p, uint32_t first)
{
    int n = 0;
    for (uint32_t i = first; i; i = at(p, i)->next)
        n++;
    return n;
}

static uint32_t call(struct parser *p, enum tl_ct_kind kind, const char *what, int which,
                     const struct tl_ct_token *name, uint32_t subject, uint32_t args)
{
    if (p->st != TL_OK)
        return 0;
    if (which < 0)
        return refuse(p, name->line, what, name->s, name->n);
    bool any = kind == TL_CT_FUNCTION || kind == TL_CT_MACRO_CALL; /* namespace(...) */
    if (!any && count(p, args) > TL_CT_ARGS_MAX)
        return refuse(p, name->line, "too many arguments of", name->s, name->n);
    uint32_t i = node2(p, kind, name->line, subject, args);
    if (i) {
        at(p, i)->which = which;
        at(p, i)->s = name->s;
        at(p, i)->n = name->n;
    }
    return i;
}

/* The macro of that name among those so far; 0: none. */
static uint32_t find_macro(struct parser *p, const struct tl_ct_token *name)
{
    uint32_t i = p->t->macros;
    while (i && (at(p, i)->n != name->n || memcmp(at(p, i)->s, name->s, name->n) != 0))
        i = at(p, i)->c;
    return i;
}

/* name( is taken: one of the functions, or a macro. */
static uint32_t function(struct parser *p, const struct tl_ct_token *name)
{
    int which = tl_ct_find_function(name->s, name->n);
    uint32_t args = arguments(p);
    return call(p, which < 0 ? TL_CT_MACRO_CALL : TL_CT_FUNCTION, "the function", which < 0 ? 0 : which, name, 0, args);
}

/* Items up to close. Lists them by holders. */
static uint32_t items(struct parser *p, const char *close, bool pairs)
{
    uint32_t first = 0, last = 0;
    bool any = false;
    while (p->st == TL_OK && !take_op(p, close)) {
        if (any)
            want_op(p, ",");
        if (any && take_op(p, close))
            break;
        any = true;
        link_node(p, &first, &last, node2(p, TL_CT_NONE_NODE, p->tok.line, expression(p), 0));
        if (pairs) {
            want_op(p, ":");
            link_node(p, &first, &last, node2(p, TL_CT_NONE_NODE, p->tok.line, expression(p), 0));
        }
    }
    return first;
}

/* After "(": an expression in brackets or a tuple. */
static uint32_t brackets(struct parser *p, int line)
{
    uint32_t first = 0, last = 0, i;
    if (take_op(p, ")"))
        return node(p, TL_CT_LIST, line);
    i = expression(p);
    if (take_op(p, ")"))
        return i;
    link_node(p, &first, &last, node2(p, TL_CT_NONE_NODE, line, i, 0));
    while (p->st == TL_OK && !take_op(p, ")")) {
        want_op(p, ",");
        if (take_op(p, ")"))
            break;
        link_node(p, &first, &last, node2(p, TL_CT_NONE_NODE, line, expression(p), 0));
    }
    return node2(p, TL_CT_LIST, line, 0, first);
}

static uint32_t primary(struct parser *p)
{
    struct tl_ct_token t = p->tok;
    switch (t.kind) {
    case TL_CT_STRING:
    case TL_CT_INT:
    case TL_CT_FLOAT: return constant(p);
    case TL_CT_NAME:
        if (is_name(p, "true") || is_name(p, "True"))
            return word_constant(p, TL_CT_C_BOOL, true);
        if (is_name(p, "false") || is_name(p, "False"))
            return word_constant(p, TL_CT_C_BOOL, false);
        if (is_name(p, "none") || is_name(p, "None"))
            return word_constant(p, TL_CT_C_NONE, false);
        advance(p);
        if (!take_op(p, "("))
            return named(p, TL_CT_GET, &t);
        return function(p, &t);
    case TL_CT_OP:
        advance(p);
        if (strcmp(t.op, "(") == 0)
            return brackets(p, t.line);
        if (strcmp(t.op, "[") == 0)
            return node2(p, TL_CT_LIST, t.line, 0, items(p, "]", false));
        if (strcmp(t.op, "{") == 0)
            return node2(p, TL_CT_DICT, t.line, 0, items(p, "}", true));
        return bad(p, "an expression begins with an operator");
    default: return bad(p, "an expression is missing");
    }
}

/* After "[": an index or a slice. */
static uint32_t subscript(struct parser *p, uint32_t of, int line)
{
    uint32_t part[3] = {0, 0, 0};
    int n = 0;
    if (!is_op(p, ":"))
        part[0] = expression(p);
    if (take_op(p, "]"))
        return node2(p, TL_CT_ITEM, line, of, part[0]);
    while (p->st == TL_OK && !take_op(p, "]")) {
        if (n == 2)
            return bad(p, "a slice has more than three parts");
        want_op(p, ":");
        n++;
        if (!is_op(p, ":") && !is_op(p, "]"))
            part[n] = expression(p);
    }
    uint32_t i = node2(p, TL_CT_SLICE, line, of, part[0]);
    if (i) {
        at(p, i)->c = part[1];
        at(p, i)->d = part[2];
    }
    return i;
}

static uint32_t dot(struct parser *p, uint32_t of)
{
    struct tl_ct_token name = p->tok;
    if (name.kind == TL_CT_INT) {
        uint32_t index = constant(p);
        return node2(p, TL_CT_ITEM, name.line, of, index);
    }
    name = take_word(p, "a name is missing after '.'");
    if (take_op(p, "("))
        return call(p, TL_CT_METHOD, "the method", tl_ct_find_method(name.s, name.n), &name, of, arguments(p));
    uint32_t i = named(p, TL_CT_ATTR, &name);
    if (i)
        at(p, i)->a = of;
    return i;
}

/* "is" is taken. */
static uint32_t test(struct parser *p, uint32_t of)
{
    static const char *const stop[] = {"else", "or", "and", "is", "if"};
    bool negated = take_name(p, "not"), argument;
    struct tl_ct_token name = take_word(p, "a name is missing after 'is'");
    uint32_t args = 0;
    if (take_op(p, "(")) {
        args = arguments(p);
    } else {
        argument = p->tok.kind == TL_CT_NAME || p->tok.kind == TL_CT_STRING || p->tok.kind == TL_CT_INT ||
                   is_op(p, "[") || is_op(p, "{");
        for (size_t i = 0; i < sizeof(stop) / sizeof(stop[0]); i++)
            argument = argument && !is_name(p, stop[i]);
        if (argument)
            args = node2(p, TL_CT_NONE_NODE, name.line, primary(p), 0);
    }
    uint32_t i = call(p, TL_CT_TEST, "the test", tl_ct_find_test(name.s, name.n), &name, of, args);
    if (i)
        at(p, i)->negated = negated;
    return i;
}

static uint32_t filter(struct parser *p, uint32_t of)
{
    struct tl_ct_token name = take_word(p, "a name is missing after '|'");
    uint32_t args = take_op(p, "(") ? arguments(p) : 0;
    return call(p, TL_CT_FILTER, "the filter", tl_ct_find_filter(name.s, name.n), &name, of, args);
}

/* Each link of such a chain nests the tree one level deeper. */
static uint32_t unary(struct parser *p, bool filters)
{
    int depth = p->depth, line = p->tok.line;
    uint32_t i = 0;
    if (!enter(p))
        return 0;
    if (take_op(p, "-")) {
        i = node2(p, TL_CT_NEG, line, unary(p, false), 0);
    } else {
        i = primary(p);
    }
    while (p->st == TL_OK) {
        line = p->tok.line;
        if (take_op(p, "."))
            i = dot(p, i);
        else if (take_op(p, "["))
            i = subscript(p, i, line);
        else if (is_op(p, "("))
            return bad(p, "only names and methods can be called");
        else if (filters && take_op(p, "|"))
            i = filter(p, i);
        else if (filters && take_name(p, "is"))
            i = test(p, i);
        else
            break;
        if (!enter(p))
            return 0;
    }
    p->depth = depth;
    return i;
}

/* Operators of one level, left to right. A long chain is a deep tree: it counts as depth, too. */
static uint32_t level(struct parser *p, int which)
{
    static const char *const ops[][5] = {{"+", "-"}, {"~"}, {"*", "/", "//", "%", "**"}};
    int depth = p->depth;
    uint32_t i = which == 3 ? unary(p, true) : level(p, which + 1);
    while (p->st == TL_OK && which < 3) {
        struct tl_ct_token t = p->tok;
        bool is = false;
        for (int k = 0; k < 5 && ops[which][k]; k++)
            is = is || is_op(p, ops[which][k]);
        if (!is || p->st != TL_OK)
            break;
        if (strcmp(t.op, "**") == 0)
            return refuse(p, t.line, "the operator", "**", 2);
        advance(p);
        i = node2(p, TL_CT_BINARY, t.line, i, level(p, which + 1));
        if (i)
            memcpy(at(p, i)->op, t.op, sizeof(t.op));
        if (!enter(p))
            return 0;
    }
    p->depth = depth;
    return i;
}

static uint32_t comparison(struct parser *p)
{
    static const char *const ops[] = {"==", "!=", "<", "<=", ">", ">="};
    uint32_t i = level(p, 0);
    for (int n = 0; p->st == TL_OK; n++) {
        struct tl_ct_token t = p->tok;
        char op[3] = "";
        bool negated = false;
        for (size_t k = 0; k < sizeof(ops) / sizeof(ops[0]); k++)
            if (is_op(p, ops[k]))
                memcpy(op, t.op, sizeof(op));
        if (is_name(p, "not")) { /* only "not in" can follow a value */
            struct tl_ct_lexer lx = p->lx;
            struct tl_ct_token next;
            if (tl_ct_next(&lx, &next) != TL_OK || next.kind != TL_CT_NAME || next.n != 2 ||
                memcmp(next.s, "in", 2) != 0)
                break;
            negated = true;
            advance(p);
        }
        if (is_name(p, "in"))
            memcpy(op, "in", 3);
        if (!op[0])
            break;
        if (n > 0)
            return refuse(p, t.line, "a chain of comparisons with", op, strlen(op));
        advance(p);
        i = node2(p, TL_CT_BINARY, t.line, i, level(p, 0));
        if (i)
            memcpy(at(p, i)->op, op, sizeof(op));
        if (negated)
            i = node2(p, TL_CT_NOT, t.line, i, 0);
    }
    return i;
}

static uint32_t negation(struct parser *p)
{
    int line = p->tok.line;
    if (!take_name(p, "not"))
        return comparison(p);
    uint32_t i = 0;
    if (enter(p))
        i = node2(p, TL_CT_NOT, line, negation(p), 0);
    p->depth--;
    return i;
}

static uint32_t logic(struct parser *p, bool or)
{
    int depth = p->depth;
    uint32_t i = or ? logic(p, false) : negation(p);
    while (p->st == TL_OK) {
        int line = p->tok.line;
        if (!take_name(p, or ? "or" : "and"))
            break;
        uint32_t right = or ? logic(p, false) : negation(p);
        i = node2(p, or ? TL_CT_OR : TL_CT_AND, line, i, right);
        if (!enter(p))
            return 0;
    }
    p->depth = depth;
    return i;
}

static uint32_t expression(struct parser *p)
{
    int depth = p->depth, line = p->tok.line;
    if (!enter(p))
        return 0;
    uint32_t i = logic(p, true);
    while (p->st == TL_OK && take_name(p, "if")) {
        uint32_t c = logic(p, true), other = take_name(p, "else") ? expression(p) : 0;
        i = node2(p, TL_CT_COND, line, c, i);
        if (i)
            at(p, i)->c = other;
        if (!enter(p))
            return 0;
    }
    p->depth = depth;
    return i;
}

/* ---- statements --------------------------------------------------------------------------------------------------- */

static bool ends(const struct parser *p, const char *const *words)
{
    for (int i = 0; words[i]; i++)
        if (is_name(p, words[i]))
            return true;
    return false;
}

static uint32_t if_statement(struct parser *p)
{
    static const char *const stops[] = {"elif", "else", "endif", NULL}, *const last[] = {"endif", NULL};
    int line = p->tok.line;
    uint32_t i, a = expression(p), b, c = 0;
    want_end(p, TL_CT_BLOCK_END);
    b = body(p, stops);
    if (is_name(p, "elif")) {
        advance(p);
        if (enter(p)) /* each elif is an if inside the else before it */
            c = if_statement(p);
        p->depth--;
    } else if (take_name(p, "else")) {
        want_end(p, TL_CT_BLOCK_END);
        c = body(p, last);
        take_name(p, "endif");
    } else {
        take_name(p, "endif");
    }
    i = node2(p, TL_CT_IF, line, a, b);
    if (i)
        at(p, i)->c = c;
    return i;
}

static uint32_t for_statement(struct parser *p)
{
    static const char *const stops[] = {"else", "endfor", NULL}, *const last[] = {"endfor", NULL};
    int line = p->tok.line;
    uint32_t first = 0, end = 0, over, condition = 0, inner, otherwise = 0, i;
    bool bracket = take_op(p, "(");
    do {
        struct tl_ct_token name = take_word(p, "the name of a loop variable is missing");
        link_node(p, &first, &end, named(p, TL_CT_GET, &name));
    } while (p->st == TL_OK && take_op(p, ","));
    if (bracket)
        want_op(p, ")");
    if (p->st == TL_OK && !take_name(p, "in"))
        return bad(p, "'in' is missing");
    over = logic(p, true);
    if (take_name(p, "if"))
        condition = expression(p);
    if (is_name(p, "recursive"))
        return refuse(p, line, "a loop that is", "recursive", 9);
    want_end(p, TL_CT_BLOCK_END);
    p->loops++;
    inner = body(p, stops);
    p->loops--;
    if (take_name(p, "else")) {
        want_end(p, TL_CT_BLOCK_END);
        otherwise = body(p, last);
    }
    take_name(p, "endfor");
    i = node2(p, TL_CT_FOR, line, first, over);
    if (i) {
        at(p, i)->c = inner;
        at(p, i)->d = otherwise;
        at(p, i)->e = condition;
    }
    return i;
}

static uint32_t set_statement(struct parser *p)
{
    static const char *const last[] = {"endset", NULL};
    struct tl_ct_token name = take_word(p, "the name after 'set' is missing"), field = {.kind = TL_CT_END};
    uint32_t i;
    if (take_op(p, "."))
        field = take_word(p, "a name is missing after '.'");
    if (is_op(p, ","))
        return refuse(p, name.line, "more than one target of", "set", 3);
    if (is_op(p, "|"))
        return refuse(p, name.line, "a filter of a block in", "set", 3);
    if (take_op(p, "=")) {
        i = named(p, field.kind == TL_CT_NAME ? TL_CT_SET_ATTR : TL_CT_SET, &name);
        uint32_t b = field.kind == TL_CT_NAME ? named(p, TL_CT_GET, &field) : 0, a = expression(p);
        if (p->st == TL_OK && is_op(p, ","))
            return refuse(p, name.line, "a tuple without brackets in", "set", 3);
        if (p->st == TL_OK) {
            at(p, i)->a = a;
            at(p, i)->b = b;
        }
        return i;
    }
    if (field.kind == TL_CT_NAME)
        return bad(p, "'=' is missing");
    want_end(p, TL_CT_BLOCK_END);
    i = named(p, TL_CT_SET_BLOCK, &name);
    uint32_t inner = body(p, last);
    take_name(p, "endset");
    if (p->st == TL_OK)
        at(p, i)->a = inner;
    return i;
}

/* Macros stand outside of every block, so that a name means the same one wherever it is called. */
static uint32_t macro_statement(struct parser *p, int line)
{
    static const char *const last[] = {"endmacro", NULL};
    struct tl_ct_token name = take_word(p, "the name of a macro is missing");
    uint32_t i = named(p, TL_CT_MACRO, &name), first = 0, end = 0, inner;
    int n = 0, loops = p->loops;
    if (p->depth > 1)
        return refuse(p, line, "within a block the statement", "macro", 5);
    if (tl_ct_find_function(name.s, name.n) >= 0 || find_macro(p, &name))
        return refuse(p, line, "for a macro a name that is taken,", name.s, name.n);
    want_op(p, "(");
    while (p->st == TL_OK && !take_op(p, ")")) {
        if (n > 0)
            want_op(p, ",");
        if (++n > TL_CT_PARAMS_MAX)
            return refuse(p, line, "too many parameters of", name.s, name.n);
        struct tl_ct_token word = take_word(p, "the name of a parameter is missing");
        uint32_t param = named(p, TL_CT_GET, &word), value = take_op(p, "=") ? expression(p) : 0;
        if (end && !value && at(p, end)->a)
            return bad(p, "a parameter without a default follows one with it");
        if (param)
            at(p, param)->a = value;
        link_node(p, &first, &end, param);
    }
    want_end(p, TL_CT_BLOCK_END);
    p->loops = 0;
    inner = body(p, last);
    p->loops = loops;
    take_name(p, "endmacro");
    if (p->st == TL_OK) {
        *at(p, i) =
            (struct tl_ct_node){.kind = TL_CT_MACRO, .line = line, .s = name.s, .n = name.n, .a = first, .b = inner};
        at(p, i)->c = p->t->macros;
        at(p, i)->which = p->t->macros ? at(p, p->t->macros)->which + 1 : 1;
        p->t->macros = i;
    }
    return i;
}

/* The word of the statement is looked at. */
static uint32_t statement(struct parser *p)
{
    static const char *const generation[] = {"endgeneration", NULL};
    struct tl_ct_token word = p->tok;
    uint32_t i;
    if (word.kind != TL_CT_NAME)
        return bad(p, "a statement has no name");
    if (take_name(p, "if"))
        return if_statement(p);
    if (take_name(p, "for"))
        return for_statement(p);
    if (take_name(p, "set"))
        return set_statement(p);
    if (take_name(p, "macro"))
        return macro_statement(p, word.line);
    if (is_name(p, "break") || is_name(p, "continue")) {
        if (!p->loops)
            return bad(p, "break and continue are for loops alone");
        i = node(p, is_name(p, "break") ? TL_CT_BREAK : TL_CT_CONTINUE, word.line);
        advance(p);
        return i;
    }
    if (take_name(p, "generation")) { /* marks what the model wrote, for training: here only the text inside matters */
        want_end(p, TL_CT_BLOCK_END);
        uint32_t always = node(p, TL_CT_CONST, word.line), inner = body(p, generation);
        take_name(p, "endgeneration");
        if (always) {
            at(p, always)->constant = TL_CT_C_BOOL;
            at(p, always)->i = true;
        }
        return node2(p, TL_CT_IF, word.line, always, inner);
    }
    return refuse(p, word.line, "the statement", word.s, word.n);
}

/* Statements up to a block tag that begins with one of the words, which is left to look at; ends NULL: to the end. */
static uint32_t body(struct parser *p, const char *const *words)
{
    uint32_t first = 0, last = 0, i;
    if (!enter(p))
        return 0;
    while (p->st == TL_OK) {
        struct tl_ct_token t = p->tok;
        if (t.kind == TL_CT_END) {
            if (words)
                bad(p, "the text ends inside a block");
            break;
        }
        advance(p);
        if (t.kind == TL_CT_DATA) {
            if (t.n > 0)
                link_node(p, &first, &last, named(p, TL_CT_TEXT, &t));
        } else if (t.kind == TL_CT_VAR_BEGIN) {
            i = node2(p, TL_CT_PRINT, t.line, expression(p), 0);
            want_end(p, TL_CT_VAR_END);
            link_node(p, &first, &last, i);
        } else {
            if (words && ends(p, words))
                break;
            i = statement(p);
            want_end(p, TL_CT_BLOCK_END);
            link_node(p, &first, &last, i);
        }
    }
    p->depth--;
    return first;
}

/* Macros may call those that follow, so calls find theirs at the end. */
static void bind_macro_calls(struct parser *p)
{
    for (uint32_t i = 1; i < p->t->n_nodes && p->st == TL_OK; i++) {
        struct tl_ct_node *n = at(p, i);
        const struct tl_ct_token name = {.s = n->s, .n = n->n};
        if (n->kind == TL_CT_MACRO_CALL && !(n->a = find_macro(p, &name)))
            refuse(p, n->line, "the function", n->s, n->n);
    }
}

enum tl_status tl_ct_parse(struct tl_chat_template *t, size_t bytes, struct tl_error *err)
{
    struct parser p = {
        .t = t, .err = err, .lx = {.s = t->source, .n = bytes, .line = 1, .strings = t->strings, .err = err}};
    p.lx.line_starting = true;
    node(&p, TL_CT_NONE_NODE, 0); /* index 0 is no node */
    advance(&p);
    t->root = body(&p, NULL);
    bind_macro_calls(&p);
    return p.st;
}
