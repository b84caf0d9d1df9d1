/* Expressions of a chat template: a recursive descent over the tokens. Precedence as in Jinja, loosest first:
 *   x if c else y | or | and | not | == != < <= > >= in | + - | ~ | * / // % | unary - | . [] () | filter, is */
#include "chat_template_parse.h"

#include <string.h>

static uint32_t constant(struct tl_ct_parser *p)
{
    struct tl_ct_token t = p->tok;
    uint32_t i = tl_ct_add(p, TL_CT_CONST, t.line);
    tl_ct_advance(p);
    if (!i)
        return 0;
    struct tl_ct_node *v = tl_ct_at(p, i);
    v->s = t.s;
    v->n = t.n;
    v->i = t.i;
    v->f = t.f;
    v->constant = t.kind == TL_CT_STRING ? TL_CT_C_STR : t.kind == TL_CT_INT ? TL_CT_C_INT : TL_CT_C_FLOAT;
    while (t.kind == TL_CT_STRING &&
           p->tok.kind == TL_CT_STRING) { /* literals side by side are one: they lie so, too */
        tl_ct_at(p, i)->n += p->tok.n;
        tl_ct_advance(p);
    }
    return i;
}

static uint32_t word_constant(struct tl_ct_parser *p, int kind, bool b)
{
    uint32_t i = tl_ct_add(p, TL_CT_CONST, p->tok.line);
    if (i) {
        tl_ct_at(p, i)->constant = kind;
        tl_ct_at(p, i)->i = b;
    }
    tl_ct_advance(p);
    return i;
}

/* ( args ), the opening one taken. Lists them. */
static uint32_t arguments(struct tl_ct_parser *p)
{
    uint32_t first = 0, last = 0;
    int n = 0;
    bool keywords = false;
    while (p->st == TL_OK && !tl_ct_take_op(p, ")")) {
        const char *keyword = NULL;
        size_t keyword_bytes = 0;
        if (n++ > 0)
            tl_ct_want_op(p, ",");
        if (n > 1 && tl_ct_take_op(p, ")"))
            break;
        if (p->tok.kind == TL_CT_NAME) { /* name=value needs one token of looking ahead */
            struct tl_ct_lexer lx = p->lx;
            struct tl_ct_token name = p->tok, next;
            if (tl_ct_next(&lx, &next) == TL_OK && next.kind == TL_CT_OP && strcmp(next.op, "=") == 0) {
                keyword = name.s;
                keyword_bytes = name.n;
                tl_ct_advance(p);
                tl_ct_advance(p);
            }
        }
        if (keywords && !keyword)
            return tl_ct_bad(p, "an argument by position follows one by name");
        keywords = keywords || keyword;
        uint32_t i = tl_ct_expression(p), holder = tl_ct_add_pair(p, TL_CT_NONE_NODE, p->tok.line, i, 0);
        if (holder) {
            tl_ct_at(p, holder)->keyword = keyword;
            tl_ct_at(p, holder)->keyword_bytes = keyword_bytes;
        }
        tl_ct_link(p, &first, &last, holder);
    }
    return first;
}

static int count(struct tl_ct_parser *p, uint32_t first)
{
    int n = 0;
    for (uint32_t i = first; i; i = tl_ct_at(p, i)->next)
        n++;
    return n;
}

static uint32_t call(struct tl_ct_parser *p, enum tl_ct_kind kind, const char *what, int which,
                     const struct tl_ct_token *name, uint32_t subject, uint32_t args)
{
    if (p->st != TL_OK)
        return 0;
    if (which < 0)
        return tl_ct_refuse(p, name->line, what, name->s, name->n);
    bool any = kind == TL_CT_FUNCTION || kind == TL_CT_MACRO_CALL; /* namespace(...) */
    if (!any && count(p, args) > TL_CT_ARGS_MAX)
        return tl_ct_refuse(p, name->line, "too many arguments of", name->s, name->n);
    uint32_t i = tl_ct_add_pair(p, kind, name->line, subject, args);
    if (i) {
        tl_ct_at(p, i)->which = which;
        tl_ct_at(p, i)->s = name->s;
        tl_ct_at(p, i)->n = name->n;
    }
    return i;
}

/* name( is taken: one of the functions, or a macro. */
static uint32_t function(struct tl_ct_parser *p, const struct tl_ct_token *name)
{
    int which = tl_ct_find_function(name->s, name->n);
    uint32_t args = arguments(p);
    return call(p, which < 0 ? TL_CT_MACRO_CALL : TL_CT_FUNCTION, "the function", which < 0 ? 0 : which, name, 0, args);
}

/* Items up to close. Lists them by holders. */
static uint32_t items(struct tl_ct_parser *p, const char *close, bool pairs)
{
    uint32_t first = 0, last = 0;
    bool any = false;
    while (p->st == TL_OK && !tl_ct_take_op(p, close)) {
        if (any)
            tl_ct_want_op(p, ",");
        if (any && tl_ct_take_op(p, close))
            break;
        any = true;
        tl_ct_link(p, &first, &last, tl_ct_add_pair(p, TL_CT_NONE_NODE, p->tok.line, tl_ct_expression(p), 0));
        if (pairs) {
            tl_ct_want_op(p, ":");
            tl_ct_link(p, &first, &last, tl_ct_add_pair(p, TL_CT_NONE_NODE, p->tok.line, tl_ct_expression(p), 0));
        }
    }
    return first;
}

/* After "(": an expression in brackets or a tuple. */
static uint32_t brackets(struct tl_ct_parser *p, int line)
{
    uint32_t first = 0, last = 0, i;
    if (tl_ct_take_op(p, ")"))
        return tl_ct_add(p, TL_CT_LIST, line);
    i = tl_ct_expression(p);
    if (tl_ct_take_op(p, ")"))
        return i;
    tl_ct_link(p, &first, &last, tl_ct_add_pair(p, TL_CT_NONE_NODE, line, i, 0));
    while (p->st == TL_OK && !tl_ct_take_op(p, ")")) {
        tl_ct_want_op(p, ",");
        if (tl_ct_take_op(p, ")"))
            break;
        tl_ct_link(p, &first, &last, tl_ct_add_pair(p, TL_CT_NONE_NODE, line, tl_ct_expression(p), 0));
    }
    return tl_ct_add_pair(p, TL_CT_LIST, line, 0, first);
}

static uint32_t primary(struct tl_ct_parser *p)
{
    struct tl_ct_token t = p->tok;
    switch (t.kind) {
    case TL_CT_STRING:
    case TL_CT_INT:
    case TL_CT_FLOAT: return constant(p);
    case TL_CT_NAME:
        if (tl_ct_is_name(p, "true") || tl_ct_is_name(p, "True"))
            return word_constant(p, TL_CT_C_BOOL, true);
        if (tl_ct_is_name(p, "false") || tl_ct_is_name(p, "False"))
            return word_constant(p, TL_CT_C_BOOL, false);
        if (tl_ct_is_name(p, "none") || tl_ct_is_name(p, "None"))
            return word_constant(p, TL_CT_C_NONE, false);
        tl_ct_advance(p);
        if (!tl_ct_take_op(p, "("))
            return tl_ct_add_named(p, TL_CT_GET, &t);
        return function(p, &t);
    case TL_CT_OP:
        tl_ct_advance(p);
        if (strcmp(t.op, "(") == 0)
            return brackets(p, t.line);
        if (strcmp(t.op, "[") == 0)
            return tl_ct_add_pair(p, TL_CT_LIST, t.line, 0, items(p, "]", false));
        if (strcmp(t.op, "{") == 0)
            return tl_ct_add_pair(p, TL_CT_DICT, t.line, 0, items(p, "}", true));
        return tl_ct_bad(p, "an expression begins with an operator");
    default: return tl_ct_bad(p, "an expression is missing");
    }
}

/* After "[": an index or a slice. */
static uint32_t subscript(struct tl_ct_parser *p, uint32_t of, int line)
{
    uint32_t part[3] = {0, 0, 0};
    int n = 0;
    if (!tl_ct_is_op(p, ":"))
        part[0] = tl_ct_expression(p);
    if (tl_ct_take_op(p, "]"))
        return tl_ct_add_pair(p, TL_CT_ITEM, line, of, part[0]);
    while (p->st == TL_OK && !tl_ct_take_op(p, "]")) {
        if (n == 2)
            return tl_ct_bad(p, "a slice has more than three parts");
        tl_ct_want_op(p, ":");
        n++;
        if (!tl_ct_is_op(p, ":") && !tl_ct_is_op(p, "]"))
            part[n] = tl_ct_expression(p);
    }
    uint32_t i = tl_ct_add_pair(p, TL_CT_SLICE, line, of, part[0]);
    if (i) {
        tl_ct_at(p, i)->c = part[1];
        tl_ct_at(p, i)->d = part[2];
    }
    return i;
}

static uint32_t dot(struct tl_ct_parser *p, uint32_t of)
{
    struct tl_ct_token name = p->tok;
    if (name.kind == TL_CT_INT) {
        uint32_t index = constant(p);
        return tl_ct_add_pair(p, TL_CT_ITEM, name.line, of, index);
    }
    name = tl_ct_take_word(p, "a name is missing after '.'");
    if (tl_ct_take_op(p, "("))
        return call(p, TL_CT_METHOD, "the method", tl_ct_find_method(name.s, name.n), &name, of, arguments(p));
    uint32_t i = tl_ct_add_named(p, TL_CT_ATTR, &name);
    if (i)
        tl_ct_at(p, i)->a = of;
    return i;
}

/* "is" is taken. */
static uint32_t test(struct tl_ct_parser *p, uint32_t of)
{
    static const char *const stop[] = {"else", "or", "and", "is", "if"};
    bool negated = tl_ct_take_name(p, "not"), argument;
    struct tl_ct_token name = tl_ct_take_word(p, "a name is missing after 'is'");
    uint32_t args = 0;
    if (tl_ct_take_op(p, "(")) {
        args = arguments(p);
    } else {
        argument = p->tok.kind == TL_CT_NAME || p->tok.kind == TL_CT_STRING || p->tok.kind == TL_CT_INT ||
                   tl_ct_is_op(p, "[") || tl_ct_is_op(p, "{");
        for (size_t i = 0; i < sizeof(stop) / sizeof(stop[0]); i++)
            argument = argument && !tl_ct_is_name(p, stop[i]);
        if (argument)
            args = tl_ct_add_pair(p, TL_CT_NONE_NODE, name.line, primary(p), 0);
    }
    uint32_t i = call(p, TL_CT_TEST, "the test", tl_ct_find_test(name.s, name.n), &name, of, args);
    if (i)
        tl_ct_at(p, i)->negated = negated;
    return i;
}

static uint32_t filter(struct tl_ct_parser *p, uint32_t of)
{
    struct tl_ct_token name = tl_ct_take_word(p, "a name is missing after '|'");
    uint32_t args = tl_ct_take_op(p, "(") ? arguments(p) : 0;
    return call(p, TL_CT_FILTER, "the filter", tl_ct_find_filter(name.s, name.n), &name, of, args);
}

/* Each link of such a chain nests the tree one level deeper. */
static uint32_t unary(struct tl_ct_parser *p, bool filters)
{
    int depth = p->depth, line = p->tok.line;
    uint32_t i = 0;
    if (!tl_ct_enter(p))
        return 0;
    if (tl_ct_take_op(p, "-")) {
        i = tl_ct_add_pair(p, TL_CT_NEG, line, unary(p, false), 0);
    } else {
        i = primary(p);
    }
    while (p->st == TL_OK) {
        line = p->tok.line;
        if (tl_ct_take_op(p, "."))
            i = dot(p, i);
        else if (tl_ct_take_op(p, "["))
            i = subscript(p, i, line);
        else if (tl_ct_is_op(p, "("))
            return tl_ct_bad(p, "only names and methods can be called");
        else if (filters && tl_ct_take_op(p, "|"))
            i = filter(p, i);
        else if (filters && tl_ct_take_name(p, "is"))
            i = test(p, i);
        else
            break;
        if (!tl_ct_enter(p))
            return 0;
    }
    p->depth = depth;
    return i;
}

/* Operators of one level, left to right. A long chain is a deep tree: it counts as depth, too. */
static uint32_t level(struct tl_ct_parser *p, int which)
{
    static const char *const ops[][5] = {{"+", "-"}, {"~"}, {"*", "/", "//", "%", "**"}};
    int depth = p->depth;
    uint32_t i = which == 3 ? unary(p, true) : level(p, which + 1);
    while (p->st == TL_OK && which < 3) {
        struct tl_ct_token t = p->tok;
        bool is = false;
        for (int k = 0; k < 5 && ops[which][k]; k++)
            is = is || tl_ct_is_op(p, ops[which][k]);
        if (!is || p->st != TL_OK)
            break;
        if (strcmp(t.op, "**") == 0)
            return tl_ct_refuse(p, t.line, "the operator", "**", 2);
        tl_ct_advance(p);
        i = tl_ct_add_pair(p, TL_CT_BINARY, t.line, i, level(p, which + 1));
        if (i)
            memcpy(tl_ct_at(p, i)->op, t.op, sizeof(t.op));
        if (!tl_ct_enter(p))
            return 0;
    }
    p->depth = depth;
    return i;
}

static uint32_t comparison(struct tl_ct_parser *p)
{
    static const char *const ops[] = {"==", "!=", "<", "<=", ">", ">="};
    uint32_t i = level(p, 0);
    for (int n = 0; p->st == TL_OK; n++) {
        struct tl_ct_token t = p->tok;
        char op[3] = "";
        bool negated = false;
        for (size_t k = 0; k < sizeof(ops) / sizeof(ops[0]); k++)
            if (tl_ct_is_op(p, ops[k]))
                memcpy(op, t.op, sizeof(op));
        if (tl_ct_is_name(p, "not")) { /* only "not in" can follow a value */
            struct tl_ct_lexer lx = p->lx;
            struct tl_ct_token next;
            if (tl_ct_next(&lx, &next) != TL_OK || next.kind != TL_CT_NAME || next.n != 2 ||
                memcmp(next.s, "in", 2) != 0)
                break;
            negated = true;
            tl_ct_advance(p);
        }
        if (tl_ct_is_name(p, "in"))
            memcpy(op, "in", 3);
        if (!op[0])
            break;
        if (n > 0)
            return tl_ct_refuse(p, t.line, "a chain of comparisons with", op, strlen(op));
        tl_ct_advance(p);
        i = tl_ct_add_pair(p, TL_CT_BINARY, t.line, i, level(p, 0));
        if (i)
            memcpy(tl_ct_at(p, i)->op, op, sizeof(op));
        if (negated)
            i = tl_ct_add_pair(p, TL_CT_NOT, t.line, i, 0);
    }
    return i;
}

static uint32_t negation(struct tl_ct_parser *p)
{
    int line = p->tok.line;
    if (!tl_ct_take_name(p, "not"))
        return comparison(p);
    uint32_t i = 0;
    if (tl_ct_enter(p))
        i = tl_ct_add_pair(p, TL_CT_NOT, line, negation(p), 0);
    p->depth--;
    return i;
}

uint32_t tl_ct_logic(struct tl_ct_parser *p, bool or)
{
    int depth = p->depth;
    uint32_t i = or ? tl_ct_logic(p, false) : negation(p);
    while (p->st == TL_OK) {
        int line = p->tok.line;
        if (!tl_ct_take_name(p, or ? "or" : "and"))
            break;
        uint32_t right = or ? tl_ct_logic(p, false) : negation(p);
        i = tl_ct_add_pair(p, or ? TL_CT_OR : TL_CT_AND, line, i, right);
        if (!tl_ct_enter(p))
            return 0;
    }
    p->depth = depth;
    return i;
}

uint32_t tl_ct_expression(struct tl_ct_parser *p)
{
    int depth = p->depth, line = p->tok.line;
    if (!tl_ct_enter(p))
        return 0;
    uint32_t i = tl_ct_logic(p, true);
    while (p->st == TL_OK && tl_ct_take_name(p, "if")) {
        uint32_t c = tl_ct_logic(p, true), other = tl_ct_take_name(p, "else") ? tl_ct_expression(p) : 0;
        i = tl_ct_add_pair(p, TL_CT_COND, line, c, i);
        if (i)
            tl_ct_at(p, i)->c = other;
        if (!tl_ct_enter(p))
            return 0;
    }
    p->depth = depth;
    return i;
}
