#include "args.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int tl_args_wrong(const struct tl_args *a, const char *fmt, ...)
{
    va_list ap;
    fprintf(stderr, "%s: ", a->command);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fprintf(stderr, " (see %s --help)\n", a->command);
    return TL_EXIT_USAGE;
}

static void print_help(const struct tl_args *a)
{
    printf("Usage: %s [options]", a->command);
    for (int i = 0; i < a->n_args; i++)
        if (a->args[i].kind == TL_ARG_POS)
            printf(a->args[i].required ? " %s" : " [%s]", a->args[i].name);
    printf("\n%s\n\n", a->about);
    for (int i = 0; i < a->n_args; i++) {
        const struct tl_arg *r = &a->args[i];
        char left[64];
        if (r->kind == TL_ARG_POS)
            snprintf(left, sizeof(left), "%s", r->name);
        else
            snprintf(left, sizeof(left), "--%s%s%s", r->name, r->value ? " " : "", r->value ? r->value : "");
        printf("  %-26s %s%s\n", left, r->help, r->required ? " (required)" : "");
    }
    printf("  %-26s %s\n\nExample:\n  %s\n", "--help", "show this text", a->example);
}

static int parse_number(const struct tl_args *a, const struct tl_arg *r, const char *text)
{
    char *end = NULL;
    errno = 0;
    if (r->kind == TL_ARG_U64) {
        unsigned long long v = strtoull(text, &end, 0);
        if (errno || end == text || *end || strchr(text, '-'))
            return tl_args_wrong(a, "--%s: '%s' is not a whole number of 64 bits", r->name, text);
        *(uint64_t *)r->out = v;
    } else if (r->kind == TL_ARG_INT) {
        long v = strtol(text, &end, 10);
        long lo = r->min == 0 && r->max == 0 ? INT_MIN : (long)r->min,
             hi = r->min == 0 && r->max == 0 ? INT_MAX : (long)r->max;
        if (errno || end == text || *end)
            return tl_args_wrong(a, "--%s: '%s' is not a whole number", r->name, text);
        if (v < lo || v > hi)
            return tl_args_wrong(a, "--%s is %ld, allowed are %ld to %ld", r->name, v, lo, hi);
        *(int *)r->out = (int)v;
    } else {
        double v = strtod(text, &end);
        if (errno || end == text || *end || !(v - v == 0))
            return tl_args_wrong(a, "--%s: '%s' is not a number", r->name, text);
        if ((r->min != 0 || r->max != 0) && (v < r->min || v > r->max))
            return tl_args_wrong(a, "--%s is %g, allowed are %g to %g", r->name, v, r->min, r->max);
        *(double *)r->out = v;
    }
    return TL_ARGS_GO;
}

static int parse_value(const struct tl_args *a, const struct tl_arg *r, const char *text)
{
    struct tl_arg_list *list = r->out;
    switch (r->kind) {
    case TL_ARG_STR:
    case TL_ARG_POS: *(const char **)r->out = text; return TL_ARGS_GO;
    case TL_ARG_LIST:
        if (list->n == TL_ARG_LIST_MAX)
            return tl_args_wrong(a, "--%s may be given %d times at most", r->name, TL_ARG_LIST_MAX);
        list->item[list->n++] = text;
        return TL_ARGS_GO;
    default: return parse_number(a, r, text);
    }
}

static const struct tl_arg *find_option(const struct tl_args *a, const char *name, size_t len, bool *seen)
{
    for (int i = 0; i < a->n_args; i++)
        if (a->args[i].kind != TL_ARG_POS && strlen(a->args[i].name) == len && !memcmp(a->args[i].name, name, len)) {
            seen[i] = true;
            return &a->args[i];
        }
    return NULL;
}

static const struct tl_arg *next_positional(const struct tl_args *a, bool *seen)
{
    for (int i = 0; i < a->n_args; i++)
        if (a->args[i].kind == TL_ARG_POS && !seen[i]) {
            seen[i] = true;
            return &a->args[i];
        }
    return NULL;
}

#define ROWS_MAX 64

int tl_args_parse(const struct tl_args *a, int argc, char **argv)
{
    bool seen[ROWS_MAX] = {false}, only_positional = false;
    int rc = TL_ARGS_GO;
    if (a->n_args > ROWS_MAX)
        return tl_args_wrong(a, "this command has more than %d options", ROWS_MAX);
    for (int i = 1; i < argc && rc == TL_ARGS_GO; i++) {
        const char *word = argv[i];
        if (!only_positional && !strcmp(word, "--")) {
            only_positional = true;
        } else if (!only_positional && (!strcmp(word, "--help") || !strcmp(word, "-h"))) {
            print_help(a);
            return TL_EXIT_OK;
        } else if (!only_positional && word[0] == '-' && word[1]) {
            const char *name = word + (word[1] == '-' ? 2 : 1), *eq = strchr(name, '=');
            size_t len = eq ? (size_t)(eq - name) : strlen(name);
            const struct tl_arg *r = word[1] == '-' ? find_option(a, name, len, seen) : NULL;
            if (!r)
                return tl_args_wrong(a, "unknown option '%s'", word);
            if (r->kind == TL_ARG_FLAG) {
                if (eq)
                    return tl_args_wrong(a, "--%s takes no value", r->name);
                *(bool *)r->out = true;
            } else if (!eq && i + 1 >= argc) {
                return tl_args_wrong(a, "--%s needs a value (%s)", r->name, r->value ? r->value : "VALUE");
            } else {
                rc = parse_value(a, r, eq ? eq + 1 : argv[++i]);
            }
        } else {
            const struct tl_arg *r = next_positional(a, seen);
            if (!r)
                return tl_args_wrong(a, "unexpected argument '%s'", word);
            rc = parse_value(a, r, word);
        }
    }
    for (int i = 0; i < a->n_args && rc == TL_ARGS_GO; i++)
        if (a->args[i].required && !seen[i])
            rc = a->args[i].kind == TL_ARG_POS ? tl_args_wrong(a, "%s is missing", a->args[i].name)
                                               : tl_args_wrong(a, "--%s is missing", a->args[i].name);
    return rc;
}

int tl_args_int_list(const struct tl_args *a, const char *name, const char *text, int min, int max, int *out, int n_max)
{
    int n = 0;
    for (const char *p = text;;) {
        char *end = NULL;
        errno = 0;
        long v = strtol(p, &end, 10);
        if (errno || end == p || (*end && *end != ',')) {
            tl_args_wrong(a, "--%s: '%s' is not a list of whole numbers", name, text);
            return -1;
        }
        if (v < min || v > max) {
            tl_args_wrong(a, "--%s: %ld is not within %d to %d", name, v, min, max);
            return -1;
        }
        if (n == n_max) {
            tl_args_wrong(a, "--%s: more than %d numbers", name, n_max);
            return -1;
        }
        out[n++] = (int)v;
        if (!*end)
            return n;
        p = end + 1;
    }
}
