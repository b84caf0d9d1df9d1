/* engine/cli/args.h - options of a command as a table: what is parsed, what --help prints and what is refused agree.
 *
 * Options are written --name value or --name=value; flags take no value; arguments without a dash fill the TL_ARG_POS rows
 * in order. --help (or -h) prints the table and the example. A mistake is answered by one sentence on stderr that names
 * the option. Values point into argv.
 * Thread: any. */
#ifndef TL_ARGS_H
#define TL_ARGS_H

#include <stdbool.h>
#include <stdint.h>

enum tl_arg_kind {
    TL_ARG_FLAG,  /* bool */
    TL_ARG_STR,   /* const char * */
    TL_ARG_INT,   /* int, within min..max (both 0: any int) */
    TL_ARG_U64,   /* uint64_t */
    TL_ARG_FLOAT, /* double, finite, within min..max (both 0: any) */
    TL_ARG_LIST,  /* struct tl_arg_list: may be repeated */
    TL_ARG_POS    /* const char *: an argument without a dash */
};

#define TL_ARG_LIST_MAX 64
struct tl_arg_list {
    int n;
    const char *item[TL_ARG_LIST_MAX];
};

struct tl_arg {
    const char *name; /* without dashes; POS: the word shown in the usage line */
    enum tl_arg_kind kind;
    void *out;         /* keeps its value where the option is not given */
    const char *value; /* word for the value in --help, e.g. "DIR"; NULL for flags */
    const char *help;
    bool required;
    double min, max;
};

struct tl_args {
    const char *command; /* e.g. "tinyloop inspect" */
    const char *about;   /* one or two lines */
    const char *example;
    const struct tl_arg *args;
    int n_args;
};

enum { TL_ARGS_GO = -1, TL_EXIT_OK = 0, TL_EXIT_FAILED = 1, TL_EXIT_USAGE = 2 };

/* Parse argv[1] .. argv[argc - 1] (argv[0] is the command's name). TL_ARGS_GO: go on; otherwise return the value as the
 * exit code (help was printed, or a mistake was named). */
int tl_args_parse(const struct tl_args *a, int argc, char **argv);

/* "a,b,c" as ints within min..max. Returns their number, or -1 and prints a sentence naming the option. */
int tl_args_int_list(const struct tl_args *a, const char *name, const char *text, int min, int max, int *out,
                     int n_max);

/* One sentence on stderr about a wrong call; returns TL_EXIT_USAGE. */
int tl_args_wrong(const struct tl_args *a, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
