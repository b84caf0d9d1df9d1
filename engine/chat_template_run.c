#include "chat_template_impl.h"

#include <string.h>

#include "mem.h"

static struct tl_ct_value eval(struct tl_ct_run *r, uint32_t i);

static const struct tl_ct_node *at(const struct tl_ct_run *r, uint32_t i) { return &r->t->nodes[i]; }
static struct tl_ct_value undefined(void) { return (struct tl_ct_value){.type = TL_CT_UNDEFINED}; }

/* ---- variables ----------------------------------------------------------------------------------------------------- */

/* The innermost variable of that name, from scope on; NULL: none. */
static struct tl_ct_value *lookup(struct tl_ct_run *r, const char *name, size_t n, size_t scope)
{
    for (size_t i = r->n_vars; i-- > scope && tl_ct_step(r, 0);) {
        if (i + 1 == r->hidden_end)
            i = r->hidden;
        else if (r->vars[i].n == n && memcmp(r->vars[i].name, name, n) == 0)
            return &r->vars[i].v;
    }
    return NULL;
}

void tl_ct_define(struct tl_ct_run *r, const char *name, size_t n, struct tl_ct_value v)
{
    struct tl_ct_value *old = lookup(r, name, n, r->frame);
    if (r->st != TL_OK)
        return;
    if (old) {
        *old = v;
        return;
    }
    if (r->n_vars == r->cap_vars) {
        size_t cap = r->cap_vars ? r->cap_vars * 2 : 32;
        struct tl_ct_var *vars = tl_realloc(r->vars, cap * sizeof(*vars));
        if (!vars) {
            r->st = tl_fail_host_memory(r->err, cap * sizeof(*vars));
            return;
        }
        r->vars = vars;
        r->cap_vars = cap;
    }
    r->vars[r->n_vars++] = (struct tl_ct_var){name, n, v};
}

/* ---- access -------------------------------------------------------------------------------------------------------- */

static struct tl_ct_value member(struct tl_ct_run *r, int line, struct tl_ct_value of, const char *name, size_t n)
{
    const struct tl_ct_value *found = NULL;
    if (of.type == TL_CT_UNDEFINED)
        tl_ct_fail(r, line, "'%.*s' is asked of an undefined value", TL_CT_SHOWN(n), name);
    else if (of.type == TL_CT_MAP || of.type == TL_CT_SPACE)
        found = tl_ct_map_get(r, of.map, name, n);
    return found ? *found : undefined();
}

static struct tl_ct_value item(struct tl_ct_run *r, int line, struct tl_ct_value of, struct tl_ct_value key)
{
    if (key.type == TL_CT_STR)
        return member(r, line, of, key.s, key.n);
    if (of.type == TL_CT_UNDEFINED)
        tl_ct_fail(r, line, "an item is asked of an undefined value");
    if (key.type != TL_CT_INTEGER || (of.type != TL_CT_SEQ && of.type != TL_CT_STR))
        return undefined();
    int64_t n = of.type == TL_CT_SEQ ? (int64_t)of.n : (int64_t)tl_ct_chars(of), i = key.i < 0 ? key.i + n : key.i;
    if (i < 0 || i >= n || !tl_ct_step(r, of.type == TL_CT_STR ? of.n / 64 : 0))
        return undefined();
    return of.type == TL_CT_SEQ ? of.items[i]
                                : tl_ct_part(of, tl_ct_char_at(of, (size_t)i), tl_ct_char_at(of, (size_t)i + 1));
}

static bool whole_or_none(struct tl_ct_run *r, const struct tl_ct_node *n, uint32_t i, int64_t otherwise, int64_t *out)
{
    struct tl_ct_value v = i ? eval(r, i) : (struct tl_ct_value){.type = TL_CT_NONE};
    *out = v.type == TL_CT_INTEGER ? v.i : otherwise;
    if (v.type != TL_CT_INTEGER && v.type != TL_CT_NONE)
        tl_ct_fail(r, n->line, "a slice wants whole numbers, not %s", tl_ct_type_name(v.type));
    return r->st == TL_OK && v.type == TL_CT_INTEGER;
}

static struct tl_ct_value slice(struct tl_ct_run *r, const struct tl_ct_node *n)
{
    struct tl_ct_value of = eval(r, n->a), list = of, out;
    int64_t from, to, step, len;
    if (of.type != TL_CT_SEQ && of.type != TL_CT_STR) {
        tl_ct_fail(r, n->line, "%s has no slices", tl_ct_type_name(of.type));
        return undefined();
    }
    whole_or_none(r, n, n->d, 1, &step);
    if (step == 0)
        tl_ct_fail(r, n->line, "the step of a slice is 0");
    len = of.type == TL_CT_SEQ ? (int64_t)of.n : (int64_t)tl_ct_chars(of);
    if (whole_or_none(r, n, n->b, step > 0 ? 0 : len - 1, &from)) {
        from = from < 0 ? from + len : from;
        from = from < 0 ? (step > 0 ? 0 : -1) : from >= len ? (step > 0 ? len : len - 1) : from;
    }
    if (whole_or_none(r, n, n->c, step > 0 ? len : -1, &to)) {
        to = to < 0 ? to + len : to;
        to = to < 0 ? (step > 0 ? 0 : -1) : to > len ? len : to;
    }
    if (r->st != TL_OK)
        return undefined();
    if (of.type == TL_CT_STR) {
        if (step == 1)
            return tl_ct_step(r, of.n / 64) ? tl_ct_part(of, tl_ct_char_at(of, (size_t)from),
                                                         tl_ct_char_at(of, (size_t)(to > from ? to : from)))
                                            : undefined();
        tl_ct_fail(r, n->line, "a slice of a string can only have the step 1");
        return undefined();
    }
    out = tl_ct_seq(r, of.n);
    if (out.type != TL_CT_SEQ)
        return undefined();
    out.n = 0;
    if (step > len || step < -len) /* one item at most, and no overflow */
        step = step > 0 ? len + 1 : -len - 1;
    for (int64_t i = from; (step > 0 ? i < to : i > to) && tl_ct_step(r, 0); i += step)
        out.items[out.n++] = list.items[i];
    return out;
}

/* ---- operators ----------------------------------------------------------------------------------------------------- */

static double fraction(struct tl_ct_value v)
{
    return v.type == TL_CT_FRACTION ? v.f : v.type == TL_CT_BOOL ? v.b : (double)v.i;
}

static struct tl_ct_value arithmetic(struct tl_ct_run *r, const struct tl_ct_node *n, struct tl_ct_value a,
                                     struct tl_ct_value b)
{
    bool whole = a.type != TL_CT_FRACTION && b.type != TL_CT_FRACTION, overflow = false;
    int64_t x = a.type == TL_CT_BOOL ? a.b : a.i, y = b.type == TL_CT_BOOL ? b.b : b.i, z = 0;
    char op = n->op[0];
    bool divides = op == '/' || op == '%';
    if (divides && fraction(b) == 0) {
        tl_ct_fail(r, n->line, "a division by 0");
    } else if (op == '/' && !n->op[1]) {
        return (struct tl_ct_value){.type = TL_CT_FRACTION, .f = fraction(a) / fraction(b)};
    } else if (!whole && divides) {
        tl_ct_fail(r, n->line, "%s wants whole numbers here", n->op);
    } else if (!whole) {
        double f = op == '+'   ? fraction(a) + fraction(b)
                   : op == '-' ? fraction(a) - fraction(b)
                               : fraction(a) * fraction(b);
        return (struct tl_ct_value){.type = TL_CT_FRACTION, .f = f};
    } else if (divides && y == -1) {
        overflow = op == '/' && x == INT64_MIN;
        z = op == '/' && !overflow ? -x : 0;
    } else if (divides) { /* rounds down, as Python does */
        int64_t q = x / y, rest = x % y;
        bool down = rest != 0 && (rest < 0) != (y < 0);
        z = op == '/' ? q - down : down ? rest + y : rest;
    } else {
        overflow = op == '+'   ? __builtin_add_overflow(x, y, &z)
                   : op == '-' ? __builtin_sub_overflow(x, y, &z)
                               : __builtin_mul_overflow(x, y, &z);
    }
    if (overflow)
        tl_ct_fail(r, n->line, "a number is too large");
    return tl_ct_int(z);
}

static int compare_text(struct tl_ct_value a, struct tl_ct_value b)
{
    int c = memcmp(a.s, b.s, a.n < b.n ? a.n : b.n);
    return c ? c : (a.n > b.n) - (a.n < b.n);
}

static bool is_number(struct tl_ct_value v) { return v.type >= TL_CT_BOOL && v.type <= TL_CT_FRACTION; }

static struct tl_ct_value ordered(struct tl_ct_run *r, const struct tl_ct_node *n, struct tl_ct_value a,
                                  struct tl_ct_value b)
{
    int c = 0;
    if (a.type == TL_CT_STR && b.type == TL_CT_STR) {
        c = compare_text(a, b);
    } else if (is_number(a) && is_number(b)) {
        if (a.type == TL_CT_INTEGER && b.type == TL_CT_INTEGER)
            c = (a.i > b.i) - (a.i < b.i);
        else
            c = (fraction(a) > fraction(b)) - (fraction(a) < fraction(b));
    } else {
        tl_ct_fail(r, n->line, "'%s' cannot compare %s with %s", n->op, tl_ct_type_name(a.type),
                   tl_ct_type_name(b.type));
    }
    return tl_ct_bool(n->op[0] == '<' ? c < (n->op[1] != 0) : c > -(n->op[1] != 0));
}

static struct tl_ct_value binary(struct tl_ct_run *r, const struct tl_ct_node *n)
{
    struct tl_ct_value a = eval(r, n->a), b = eval(r, n->b), out;
    if (r->st != TL_OK)
        return undefined();
    if (strcmp(n->op, "==") == 0 || strcmp(n->op, "!=") == 0)
        return tl_ct_bool(tl_ct_equal(r, a, b) == (n->op[0] == '='));
    if (strcmp(n->op, "in") == 0)
        return tl_ct_bool(tl_ct_contains(r, n->line, a, b));
    if (n->op[0] == '<' || n->op[0] == '>')
        return ordered(r, n, a, b);
    if (n->op[0] == '~')
        return tl_ct_concat(r, tl_ct_to_str(r, n->line, a), tl_ct_to_str(r, n->line, b));
    if (is_number(a) && is_number(b))
        return arithmetic(r, n, a, b);
    if (n->op[0] == '+' && a.type == TL_CT_STR && b.type == TL_CT_STR)
        return tl_ct_concat(r, a, b);
    if (n->op[0] == '+' && a.type == TL_CT_SEQ && b.type == TL_CT_SEQ) {
        out = tl_ct_seq(r, a.n + b.n);
        if (out.type == TL_CT_SEQ && tl_ct_step(r, (a.n + b.n) / 8)) {
            memcpy(out.items, a.items, a.n * sizeof(*out.items));
            memcpy(out.items + a.n, b.items, b.n * sizeof(*out.items));
        }
        return out;
    }
    tl_ct_fail(r, n->line, "'%s' cannot take %s and %s", n->op, tl_ct_type_name(a.type), tl_ct_type_name(b.type));
    return undefined();
}

/* ---- calls, lists, constants --------------------------------------------------------------------------------------- */

static void arguments(struct tl_ct_run *r, const struct tl_ct_node *n, struct tl_ct_args *a)
{
    a->line = n->line;
    a->n = 0;
    for (uint32_t i = n->b; i && r->st == TL_OK && a->n < TL_CT_ARGS_MAX; i = at(r, i)->next) {
        a->node[a->n] = at(r, i);
        a->v[a->n++] = eval(r, at(r, i)->a);
    }
}

static struct tl_ct_value make_namespace(struct tl_ct_run *r, const struct tl_ct_node *n)
{
    struct tl_ct_value space = tl_ct_new_map(r, TL_CT_SPACE);
    for (uint32_t i = n->b; i && r->st == TL_OK; i = at(r, i)->next) {
        if (!at(r, i)->keyword)
            tl_ct_fail(r, n->line, "namespace takes name=value");
        else
            tl_ct_map_set(r, space.map, tl_ct_str(at(r, i)->keyword, at(r, i)->keyword_bytes, NULL),
                          eval(r, at(r, i)->a));
    }
    return space;
}

/* What the body prints, as a value; nothing is printed. */
static struct tl_ct_value capture(struct tl_ct_run *r, uint32_t body)
{
    size_t start = r->n_out, len;
    tl_ct_run_body(r, body);
    len = r->n_out - start;
    char *s = tl_ct_alloc(r, len + 1);
    unsigned char *plain = s ? tl_ct_alloc(r, len + 1) : NULL;
    if (!plain)
        return undefined();
    if (len > 0) {
        memcpy(s, r->out + start, len);
        memcpy(plain, r->out_plain + start, len);
    }
    r->n_out = start;
    return tl_ct_str(s, len, plain);
}

/* The arguments of a call of a macro at their parameters' places; a bit of *given for each that there is. */
static struct tl_ct_value macro_arguments(struct tl_ct_run *r, const struct tl_ct_node *n,
                                          const struct tl_ct_node *macro, uint32_t *given)
{
    struct tl_ct_value v = tl_ct_seq(r, TL_CT_PARAMS_MAX);
    size_t at_position = 0;
    *given = 0;
    for (uint32_t i = n->b; i && r->st == TL_OK; i = at(r, i)->next, at_position++) {
        const struct tl_ct_node *arg = at(r, i), *param;
        uint32_t k = macro->a, place = 0;
        for (; k; k = param->next, place++) {
            param = at(r, k);
            if (arg->keyword ? param->n == arg->keyword_bytes && memcmp(param->s, arg->keyword, param->n) == 0
                             : place == at_position)
                break;
        }
        if (!k || *given >> place & 1)
            tl_ct_fail(r, n->line, "the macro %.*s does not take these arguments", TL_CT_SHOWN(n->n), n->s);
        else
            v.items[place] = eval(r, arg->a);
        *given |= k ? 1u << place : 0;
    }
    return v;
}

/* A macro sees its parameters and what is outside of every loop. */
static struct tl_ct_value call_macro(struct tl_ct_run *r, const struct tl_ct_node *n)
{
    const struct tl_ct_node *macro = at(r, n->a);
    const size_t frame = r->frame, vars = r->n_vars, hidden = r->hidden, hidden_end = r->hidden_end;
    uint32_t given;
    struct tl_ct_value args = macro_arguments(r, n, macro, &given), out = undefined();
    if (macro->which > r->macros)
        tl_ct_fail(r, n->line, "the macro %.*s is called before it is defined", TL_CT_SHOWN(n->n), n->s);
    if (r->calls == TL_CT_CALLS_MAX)
        tl_ct_fail(r, n->line, "macros call each other more than %d deep", TL_CT_CALLS_MAX);
    if (r->st != TL_OK)
        return out;
    r->calls++;
    if (frame == 0)
        r->n_top = vars;
    r->hidden = r->n_top;
    r->hidden_end = vars > r->hidden ? vars : 0;
    r->frame = vars;
    for (uint32_t i = macro->a, place = 0; i; i = at(r, i)->next, place++) {
        const struct tl_ct_node *param = at(r, i);
        tl_ct_define(r, param->s, param->n,
                     given >> place & 1 ? args.items[place]
                     : param->a         ? eval(r, param->a)
                                        : undefined());
    }
    out = capture(r, macro->b);
    r->calls--;
    r->n_vars = vars;
    r->frame = frame;
    r->hidden = hidden;
    r->hidden_end = hidden_end;
    return out;
}

static struct tl_ct_value call(struct tl_ct_run *r, const struct tl_ct_node *n)
{
    struct tl_ct_args a;
    struct tl_ct_value of = n->a ? eval(r, n->a) : undefined();
    if (n->kind == TL_CT_FUNCTION && n->n == 9 && memcmp(n->s, "namespace", 9) == 0)
        return make_namespace(r, n);
    arguments(r, n, &a);
    if (r->st != TL_OK)
        return undefined();
    switch (n->kind) {
    case TL_CT_FUNCTION: return tl_ct_function(r, n->which, &a);
    case TL_CT_METHOD: return tl_ct_method(r, n->which, of, &a);
    case TL_CT_FILTER: return tl_ct_filter(r, n->which, of, &a);
    default: return tl_ct_bool(tl_ct_test(r, n->which, of, &a) != n->negated);
    }
}

static struct tl_ct_value list(struct tl_ct_run *r, const struct tl_ct_node *n)
{
    size_t count = 0;
    for (uint32_t i = n->b; i; i = at(r, i)->next)
        count++;
    struct tl_ct_value v = tl_ct_seq(r, count);
    count = 0;
    for (uint32_t i = n->b; i && v.type == TL_CT_SEQ; i = at(r, i)->next)
        v.items[count++] = eval(r, at(r, i)->a);
    return v;
}

static struct tl_ct_value dict(struct tl_ct_run *r, const struct tl_ct_node *n)
{
    struct tl_ct_value v = tl_ct_new_map(r, TL_CT_MAP);
    for (uint32_t i = n->b; i && r->st == TL_OK; i = at(r, at(r, i)->next)->next) {
        struct tl_ct_value key = eval(r, at(r, i)->a), value = eval(r, at(r, at(r, i)->next)->a);
        if (key.type != TL_CT_STR)
            tl_ct_fail(r, n->line, "a key of a dict is %s, not a string", tl_ct_type_name(key.type));
        else
            tl_ct_map_set(r, v.map, key, value);
    }
    return v;
}

static struct tl_ct_value constant(const struct tl_ct_node *n)
{
    switch (n->constant) {
    case TL_CT_C_BOOL: return tl_ct_bool(n->i != 0);
    case TL_CT_C_INT: return tl_ct_int(n->i);
    case TL_CT_C_FLOAT: return (struct tl_ct_value){.type = TL_CT_FRACTION, .f = n->f};
    case TL_CT_C_STR: return tl_ct_str(n->s, n->n, NULL);
    case TL_CT_C_NONE: break;
    }
    return (struct tl_ct_value){.type = TL_CT_NONE};
}

/* A macro is no value here. */
static void refuse_macro(struct tl_ct_run *r, const struct tl_ct_node *name)
{
    for (uint32_t i = r->t->macros; i; i = at(r, i)->c)
        if (at(r, i)->n == name->n && memcmp(at(r, i)->s, name->s, name->n) == 0)
            tl_ct_fail(r, name->line, "the macro %.*s can only be called", TL_CT_SHOWN(name->n), name->s);
}

static struct tl_ct_value eval(struct tl_ct_run *r, uint32_t i)
{
    const struct tl_ct_node *n = at(r, i);
    struct tl_ct_value v;
    if (!tl_ct_step(r, 0))
        return undefined();
    switch (n->kind) {
    case TL_CT_CONST: return constant(n);
    case TL_CT_GET: {
        const struct tl_ct_value *found = lookup(r, n->s, n->n, 0);
        if (!found)
            refuse_macro(r, n);
        return found ? *found : undefined();
    }
    case TL_CT_ATTR: return member(r, n->line, eval(r, n->a), n->s, n->n);
    case TL_CT_ITEM: v = eval(r, n->a); return item(r, n->line, v, eval(r, n->b));
    case TL_CT_SLICE: return slice(r, n);
    case TL_CT_FUNCTION:
    case TL_CT_METHOD:
    case TL_CT_FILTER:
    case TL_CT_TEST: return call(r, n);
    case TL_CT_MACRO_CALL: return call_macro(r, n);
    case TL_CT_NOT: return tl_ct_bool(!tl_ct_truth(eval(r, n->a)));
    case TL_CT_NEG:
        v = eval(r, n->a);
        if (v.type == TL_CT_FRACTION)
            v.f = -v.f;
        else if (v.type == TL_CT_INTEGER && v.i > INT64_MIN)
            v.i = -v.i;
        else
            tl_ct_fail(r, n->line, "'-' cannot take %s", tl_ct_type_name(v.type));
        return v;
    case TL_CT_AND: v = eval(r, n->a); return tl_ct_truth(v) ? eval(r, n->b) : v;
    case TL_CT_OR: v = eval(r, n->a); return tl_ct_truth(v) ? v : eval(r, n->b);
    case TL_CT_BINARY: return binary(r, n);
    case TL_CT_COND: return tl_ct_truth(eval(r, n->a)) ? eval(r, n->b) : n->c ? eval(r, n->c) : undefined();
    case TL_CT_LIST: return list(r, n);
    case TL_CT_DICT: return dict(r, n);
    default: return undefined();
    }
}

/* ---- statements ---------------------------------------------------------------------------------------------------- */

static void print(struct tl_ct_run *r, struct tl_ct_value s)
{
    if (r->st != TL_OK || s.n == 0 || !tl_ct_step(r, s.n / 64))
        return;
    if (r->cap_out - r->n_out <= s.n) {
        size_t cap = r->cap_out * 2 + s.n + 256;
        char *out = NULL;
        unsigned char *plain = NULL;
        if (cap * 2 + r->memory > TL_CHAT_MEMORY_MAX) {
            r->st = tl_fail(r->err, TL_ERR_OUT_OF_RANGE,
                            "the chat template needs more than %u bytes for this conversation", TL_CHAT_MEMORY_MAX);
            return;
        }
        if ((out = tl_realloc(r->out, cap)))
            r->out = out;
        if (out && (plain = tl_realloc(r->out_plain, cap)))
            r->out_plain = plain;
        if (!out || !plain) {
            r->st = tl_fail_host_memory(r->err, cap);
            return;
        }
        r->cap_out = cap;
    }
    memcpy(r->out + r->n_out, s.s, s.n);
    if (s.plain)
        memcpy(r->out_plain + r->n_out, s.plain, s.n);
    else
        memset(r->out_plain + r->n_out, 0, s.n);
    r->n_out += s.n;
}

static void set_field(struct tl_ct_run *r, const struct tl_ct_node *n)
{
    struct tl_ct_value *space = lookup(r, n->s, n->n, 0), v;
    if (!space || space->type != TL_CT_SPACE) {
        tl_ct_fail(r, n->line, "'%.*s' is no namespace", TL_CT_SHOWN(n->n), n->s);
        return;
    }
    struct tl_ct_map *map = space->map; /* evaluating may move the variables */
    v = eval(r, n->a);
    tl_ct_map_set(r, map, tl_ct_str(at(r, n->b)->s, at(r, n->b)->n, NULL), v);
}

/* The target names of a loop, from an item. */
static void bind_targets(struct tl_ct_run *r, const struct tl_ct_node *n, struct tl_ct_value v)
{
    size_t count = 0, k = 0;
    for (uint32_t i = n->a; i; i = at(r, i)->next)
        count++;
    if (count > 1 && (v.type != TL_CT_SEQ || v.n != count)) {
        tl_ct_fail(r, n->line, "a loop over %zu names got %s that does not fit", count, tl_ct_type_name(v.type));
        return;
    }
    for (uint32_t i = n->a; i; i = at(r, i)->next)
        tl_ct_define(r, at(r, i)->s, at(r, i)->n, count > 1 ? v.items[k++] : v);
}

/* The variable "loop" of item i: one map for all items, made with the first. */
static void set_loop(struct tl_ct_run *r, struct tl_ct_value *loop, struct tl_ct_value list, size_t i)
{
    static const char *const names[] = {"index",    "index0",    "first",    "last",    "length",
                                        "revindex", "revindex0", "previtem", "nextitem"};
    const struct tl_ct_value v[] = {
        tl_ct_int((int64_t)i + 1),
        tl_ct_int((int64_t)i),
        tl_ct_bool(i == 0),
        tl_ct_bool(i + 1 == list.n),
        tl_ct_int((int64_t)list.n),
        tl_ct_int((int64_t)(list.n - i)),
        tl_ct_int((int64_t)(list.n - i) - 1),
        i > 0 ? list.items[i - 1] : undefined(),
        i + 1 < list.n ? list.items[i + 1] : undefined(),
    };
    const size_t n = sizeof(v) / sizeof(v[0]);
    if (i == 0)
        *loop = tl_ct_new_map(r, TL_CT_MAP);
    for (size_t k = 0; k < n && i == 0 && r->st == TL_OK; k++)
        tl_ct_map_set(r, loop->map, tl_ct_str(names[k], strlen(names[k]), NULL), v[k]);
    if (r->st == TL_OK)
        memcpy(loop->map->values, v, sizeof(v));
    tl_ct_define(r, "loop", 4, *loop);
}

static void for_loop(struct tl_ct_run *r, const struct tl_ct_node *n)
{
    struct tl_ct_value list = tl_ct_items(r, n->line, eval(r, n->b)), kept, loop = undefined();
    size_t frame = r->frame, vars = r->n_vars;
    if (frame == 0)
        r->n_top = vars;
    r->frame = vars;
    if (n->e && r->st == TL_OK) { /* only items that fit the condition count */
        kept = tl_ct_seq(r, list.n);
        kept.n = 0;
        for (size_t i = 0; i < list.n && r->st == TL_OK; i++) {
            bind_targets(r, n, list.items[i]);
            if (tl_ct_truth(eval(r, n->e)) && r->st == TL_OK)
                kept.items[kept.n++] = list.items[i];
            r->n_vars = vars;
        }
        list = kept;
    }
    for (size_t i = 0; i < list.n && r->st == TL_OK && r->flow != TL_CT_LEAVE_LOOP; i++) {
        bind_targets(r, n, list.items[i]);
        set_loop(r, &loop, list, i);
        tl_ct_run_body(r, n->c);
        if (r->flow == TL_CT_NEXT_ITEM)
            r->flow = TL_CT_GO;
        r->n_vars = vars;
    }
    r->flow = TL_CT_GO;
    r->frame = frame;
    if (list.n == 0)
        tl_ct_run_body(r, n->d);
}

void tl_ct_run_body(struct tl_ct_run *r, uint32_t first)
{
    for (uint32_t i = first; i && r->flow == TL_CT_GO && tl_ct_step(r, 0); i = at(r, i)->next) {
        const struct tl_ct_node *n = at(r, i);
        switch (n->kind) {
        case TL_CT_TEXT: print(r, tl_ct_str(n->s, n->n, NULL)); break;
        case TL_CT_PRINT: print(r, tl_ct_to_str(r, n->line, eval(r, n->a))); break;
        case TL_CT_IF: tl_ct_run_body(r, tl_ct_truth(eval(r, n->a)) ? n->b : n->c); break;
        case TL_CT_FOR: for_loop(r, n); break;
        case TL_CT_SET: tl_ct_define(r, n->s, n->n, eval(r, n->a)); break;
        case TL_CT_SET_ATTR: set_field(r, n); break;
        case TL_CT_SET_BLOCK: tl_ct_define(r, n->s, n->n, capture(r, n->a)); break;
        case TL_CT_MACRO: r->macros = n->which; break;
        case TL_CT_BREAK: r->flow = TL_CT_LEAVE_LOOP; break;
        case TL_CT_CONTINUE: r->flow = TL_CT_NEXT_ITEM; break;
        default: break;
        }
    }
}
