#include "config.h"

#include <ctype.h>
#include <errno.h>
#include <ini.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define CONFIG_FILE_BYTES_MAX (1 << 20)
#define LINE_CHARS_MAX        1000

enum kind { STR, INT, BYTES, SECONDS, BOOL, CHOICE };

struct option {
    const char *section, *key;
    enum kind kind;
    size_t offset;
    const char *otherwise; /* default, as text */
    double min, max;       /* INT, BYTES, SECONDS */
    const char *choices;   /* CHOICE: "a|b|c" */
    const char *help;
};

#define AT(field) offsetof(struct tl_config, field)

static const struct option options[] = {
    {"server", "host", STR, AT(host), "127.0.0.1", 0, 0, NULL, "address to listen on"},
    {"server", "port", INT, AT(port), "8080", 0, 65535, NULL, "port to listen on; 0 = any free one (see the log)"},
    {"server", "admin_host", STR, AT(admin_host), "127.0.0.1", 0, 0, NULL, "address of /metrics and /admin"},
    {"server", "admin_port", INT, AT(admin_port), "0", -1, 65535, NULL,
     "port of /metrics and /admin; 0 = the one after port, -1 = none"},
    {"server", "api_keys", STR, AT(api_keys), "", 0, 0, NULL,
     "file of keys, a line each: name:sha256:tenant:roles:limits; empty = no keys"},
    {"server", "insecure", BOOL, AT(insecure), "false", 0, 0, NULL,
     "allow other machines in without keys (host beyond loopback, api_keys empty)"},
    {"server", "allowed_hosts", STR, AT(allowed_hosts), "", 0, 0, NULL,
     "Host headers to accept, comma-separated; empty = any, but only local names without keys on loopback"},
    {"server", "cors_origins", STR, AT(cors_origins), "", 0, 0, NULL,
     "web origins that browsers may call from, comma-separated"},
    {"server", "half_close_cancels", BOOL, AT(half_close_cancels), "true", 0, 0, NULL,
     "a client that shuts down its sending side is gone"},
    {"server", "state_dir", STR, AT(state_dir), "", 0, 0, NULL,
     "directory of what survives a restart; empty = nothing"},

    {"model", "model", STR, AT(model), "", 0, 0, NULL, "directory of the model"},
    {"model", "model_name", STR, AT(model_name), "", 0, 0, NULL, "its name in requests; empty = the directory's name"},
    {"model", "device", CHOICE, AT(device), "auto", 0, 0, "auto|cpu|cuda", "where to compute"},
    {"model", "threads", INT, AT(threads), "0", 0, 1024, NULL, "CPU threads; 0 = all that the process may use"},
    {"model", "memory_bytes", BYTES, AT(memory_bytes), "0", 0, 1e15, NULL,
     "memory for weights and state (suffixes K, M, G); 0 = chosen by the device"},
    {"model", "max_seq_len", INT, AT(max_seq_len), "0", 0, 1 << 24, NULL,
     "longest sequence in tokens; 0 = by model and memory"},
    {"model", "max_loops", INT, AT(max_loops), "0", 0, TL_LOOPS_MAX, NULL, "deepest request; 0 = by model"},
    {"model", "step_rows", INT, AT(step_rows), "0", 0, 65536, NULL,
     "rows of one step of the worker; 0 = 256, on a GPU 2048"},
    {"model", "start_seed", INT, AT(start_seed), "0", 0, 9e15, NULL, "seed of random start states"},
    {"model", "random_start_state", BOOL, AT(random_start_state), "false", 0, 0, NULL,
     "draw start states where the model was trained so"},

    {"limits", "max_connections", INT, AT(max_connections), "1024", 1, 100000, NULL, "open connections"},
    {"limits", "max_body_bytes", BYTES, AT(max_body_bytes), "4M", 1024, 1 << 30, NULL, "largest request body"},
    {"limits", "max_bodies_bytes", BYTES, AT(max_bodies_bytes), "256M", 1024, 1e15, NULL,
     "request bodies that arrive or wait to be tokenised, and answers that leave, together; more get 503"},
    {"limits", "connection_bytes", BYTES, AT(connection_bytes), "32K", 8192, 1 << 24, NULL,
     "memory of one connection; bounds request line and headers"},
    {"limits", "max_running", INT, AT(max_running), "64", 1, 1024, NULL, "sequences computed together"},
    {"limits", "max_waiting", INT, AT(max_waiting), "256", 1, 100000, NULL, "requests waiting; more get 503"},
    {"limits", "max_waiting_tokens", INT, AT(max_waiting_tokens), "1048576", 1, 1e12, NULL,
     "prompt tokens waiting; more get 503"},
    {"limits", "max_choices", INT, AT(max_choices), "64", 1, 128, NULL, "sequences of one request (prompts x n)"},
    {"limits", "max_prompt_bytes_inline", BYTES, AT(max_prompt_bytes_inline), "64K", 0, 1 << 30, NULL,
     "longer text is tokenised outside the event loop"},
    {"limits", "outbox_bytes", BYTES, AT(outbox_bytes), "256K", 1024, 1 << 30, NULL,
     "output waiting for one slow client; then its generation pauses"},
    {"limits", "header_seconds", SECONDS, AT(header_seconds), "10", 0.1, 86400, NULL, "time for the first headers"},
    {"limits", "body_seconds", SECONDS, AT(body_seconds), "30", 0.1, 86400, NULL, "time for a request body"},
    {"limits", "idle_seconds", SECONDS, AT(idle_seconds), "75", 0.1, 86400, NULL, "time between two requests"},
    {"limits", "slow_reader_seconds", SECONDS, AT(slow_reader_seconds), "30", 0.1, 86400, NULL,
     "time that a client may leave output unread"},
    {"limits", "request_seconds", SECONDS, AT(request_seconds), "3600", 1, 1e6, NULL, "longest life of a generation"},

    {"reuse", "max_entries", INT, AT(max_entries), "1024", 1, 65536, NULL, "named entries of all tenants"},
    {"reuse", "tenant_entries", INT, AT(tenant_entries), "256", 1, 65536, NULL, "named entries of one tenant"},
    {"reuse", "tenant_bytes", BYTES, AT(tenant_bytes), "0", 0, 1e15, NULL,
     "memory of one tenant's entries; 0 = no limit"},
    {"reuse", "gone_entries", INT, AT(gone_entries), "4096", 1, 1 << 20, NULL,
     "names of entries that went away, kept for a day so that asking for them says so"},
    {"reuse", "pool_capacity", INT, AT(pool_capacity), "16", 1, 65536, NULL,
     "registered prefixes in the pool; the least used goes"},
    {"reuse", "pool_bytes", BYTES, AT(pool_bytes), "0", 0, 1e15, NULL, "memory of the pool; 0 = what is free"},
    {"reuse", "pool_auto", BOOL, AT(pool_auto), "true", 0, 0, NULL,
     "keep what finished conversations leave behind, for their next turn"},
    {"reuse", "default_ttl_seconds", INT, AT(default_ttl_seconds), "3600", 0, 315360000, NULL,
     "life of an entry that does not say; 0 = until deleted"},
    {"reuse", "rebuild_at_start", BOOL, AT(rebuild_at_start), "false", 0, 0, NULL,
     "compute the state of stored entries after a start, not at their first use"},
    {"reuse", "boot_manifest", STR, AT(boot_manifest), "", 0, 0, NULL,
     "JSON list of named entries that are made before the server is ready; empty = none"},

    {"stream", "stream_hold_seconds", SECONDS, AT(stream_hold_seconds), "10", 0, 86400, NULL,
     "headers of a stream wait this long for the start, so that queue errors are real ones"},
    {"stream", "ping_seconds", SECONDS, AT(ping_seconds), "15", 0.1, 86400, NULL, "comment lines while nothing comes"},
    {"stream", "stream_timestamps", BOOL, AT(stream_timestamps), "false", 0, 0, NULL,
     "after each token a comment with the monotonic time at which it was made, to measure delivery"},

    {"process", "shutdown_timeout", SECONDS, AT(shutdown_timeout), "30", 0, 86400, NULL,
     "time for running requests after SIGTERM"},
    {"process", "worker_stall_seconds", SECONDS, AT(worker_stall_seconds), "120", 1, 86400, NULL,
     "no progress of the worker for this long is a failure"},
    {"process", "log_level", CHOICE, AT(log_level), "info", 0, 0, "error|warn|info|debug",
     "least important lines to log"},
    {"process", "log_format", CHOICE, AT(log_format), "text", 0, 0, "text|json", "form of a line"},
    {"process", "log_health", BOOL, AT(log_health), "false", 0, 0, NULL, "also log health checks and metrics"},
};
#define N_OPTIONS (sizeof(options) / sizeof(options[0]))

static const struct option *find_option(const char *key)
{
    for (size_t i = 0; i < N_OPTIONS; i++)
        if (strcmp(options[i].key, key) == 0)
            return &options[i];
    return NULL;
}

static bool is_choice(const char *choices, const char *value)
{
    size_t n = strlen(value);
    for (const char *p = choices; n > 0 && p; p = strchr(p, '|')) {
        p += *p == '|';
        if (strncmp(p, value, n) == 0 && (p[n] == '|' || p[n] == '\0'))
            return true;
    }
    return false;
}

/* An integer with an optional suffix K, M, G; or seconds with decimals. */
static bool parse_number(const struct option *o, const char *text, double *out)
{
    char *end;
    if (!(isdigit((unsigned char)text[0]) || (text[0] == '-' && isdigit((unsigned char)text[1]))))
        return false;
    if (o->kind == SECONDS) {
        *out = strtod(text, &end);
        for (const char *p = text; *p; p++) /* no hexadecimal, no exponent */
            if (!isdigit((unsigned char)*p) && *p != '.' && *p != '-')
                return false;
        return *end == '\0' && isfinite(*out);
    }
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (errno != 0)
        return false;
    double scale = 1;
    if (o->kind == BYTES && *end) {
        scale = *end == 'K' ? 1024.0 : *end == 'M' ? 1048576.0 : *end == 'G' ? 1073741824.0 : 0;
        if (scale == 0)
            return false;
        end++;
    }
    *out = (double)v * scale;
    return *end == '\0';
}

/* where: "file:line", the variable or the flag. */
static enum tl_status set_option(struct tl_config *c, const struct option *o, const char *value, const char *where,
                                 struct tl_error *err)
{
    char *field = (char *)c + o->offset;
    if (o->kind == STR || o->kind == CHOICE) {
        if (o->kind == CHOICE && !is_choice(o->choices, value))
            return tl_fail(err, TL_ERR_BAD_PARAM, "%s: %s is '%.60s'; it must be one of %s", where, o->key, value,
                           o->choices);
        char *copy = strdup(value);
        if (!copy)
            return tl_fail(err, TL_ERR_NO_HOST_MEMORY, "no memory for the configuration");
        free(*(char **)field);
        *(char **)field = copy;
        return TL_OK;
    }
    if (o->kind == BOOL) {
        bool on = is_choice("true|yes|on|1", value), off = is_choice("false|no|off|0", value);
        if (!on && !off)
            return tl_fail(err, TL_ERR_BAD_PARAM, "%s: %s is '%.60s'; it must be true or false", where, o->key, value);
        *(bool *)field = on;
        return TL_OK;
    }
    double v;
    if (!parse_number(o, value, &v))
        return tl_fail(err, TL_ERR_BAD_PARAM, "%s: %s is '%.60s'; it must be %s%s", where, o->key, value,
                       o->kind == SECONDS ? "a number of seconds" : "a whole number",
                       strncmp(value, "tcp://", 6) == 0 ? " (a service link of a container platform? switch those off)"
                                                        : "");
    if (!(v >= o->min && v <= o->max))
        return tl_fail(err, TL_ERR_OUT_OF_RANGE, "%s: %s is %.60s; it must be %.15g..%.15g", where, o->key, value,
                       o->min, o->max);
    if (o->kind == SECONDS)
        *(double *)field = v;
    else
        *(int64_t *)field = (int64_t)v;
    return TL_OK;
}

enum tl_status tl_config_defaults(struct tl_config *c, struct tl_error *err)
{
    memset(c, 0, sizeof(*c));
    for (size_t i = 0; i < N_OPTIONS; i++) {
        enum tl_status st = set_option(c, &options[i], options[i].otherwise, "default", err);
        if (st != TL_OK)
            return st;
    }
    return TL_OK;
}

void tl_config_clear(struct tl_config *c)
{
    for (size_t i = 0; i < N_OPTIONS; i++)
        if (options[i].kind == STR || options[i].kind == CHOICE)
            free(*(char **)((char *)c + options[i].offset));
    memset(c, 0, sizeof(*c));
}

/* ---- file -------------------------------------------------------------------------------------------------------- */

struct file_reader {
    struct tl_config *c;
    const char *p, *end, *name;
    int line;
    bool seen[N_OPTIONS];
    enum tl_status st;
    struct tl_error *err;
};

static void __attribute__((format(printf, 2, 3))) file_fail(struct file_reader *f, const char *fmt, ...)
{
    char what[200];
    va_list ap;
    if (f->st != TL_OK)
        return;
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    f->st = tl_fail(f->err, TL_ERR_BAD_PARAM, "%s:%d: %s", f->name, f->line, what);
}

/* Hands libinih one line at a time, so that its lines can be counted and bounded here. */
static char *next_line(char *out, int max, void *arg)
{
    struct file_reader *f = arg;
    if (f->p >= f->end || f->st != TL_OK)
        return NULL;
    const char *nl = memchr(f->p, '\n', (size_t)(f->end - f->p));
    size_t n = (size_t)((nl ? nl : f->end) - f->p);
    f->line++;
    if (memchr(f->p, '\0', n))
        file_fail(f, "the line holds a NUL byte");
    if (n >= (size_t)max - 1 || n > LINE_CHARS_MAX)
        file_fail(f, "the line is too long");
    if (f->st != TL_OK)
        return NULL;
    memcpy(out, f->p, n);
    out[n] = '\0';
    f->p += n + (nl != NULL);
    return out;
}

static int file_pair(void *arg, const char *section, const char *key, const char *value)
{
    struct file_reader *f = arg;
    const struct option *o = find_option(key);
    char where[300];
    if (f->st != TL_OK)
        return 0;
    if (!o)
        file_fail(f, "unknown key '%.60s'", key);
    else if (strcmp(section, o->section) != 0)
        file_fail(f, "key '%.60s' belongs into section [%s]", key, o->section);
    else if (f->seen[o - options])
        file_fail(f, "key '%.60s' is there twice", key);
    if (f->st != TL_OK)
        return 0;
    f->seen[o - options] = true;
    snprintf(where, sizeof(where), "%s:%d", f->name, f->line);
    f->st = set_option(f->c, o, value, where, f->err);
    return f->st == TL_OK;
}

enum tl_status tl_config_file_text(struct tl_config *c, const char *text, size_t bytes, const char *name,
                                   struct tl_error *err)
{
    struct file_reader f = {.c = c, .p = text, .end = text + bytes, .name = name, .err = err};
    int rc = ini_parse_stream(next_line, &f, file_pair, &f);
    if (f.st == TL_OK && rc != 0) {
        f.line = rc > 0 ? rc : f.line;
        file_fail(&f, "neither a [section] nor key = value");
    }
    return f.st;
}

static enum tl_status read_file(struct tl_config *c, const char *path, struct tl_error *err)
{
    enum tl_status st;
    char *text = NULL;
    FILE *f = fopen(path, "rb");
    if (!f)
        return tl_fail_errno(err, "read the configuration", path, errno);
    size_t n = 0;
    text = malloc(CONFIG_FILE_BYTES_MAX + 1);
    if (!text) {
        st = tl_fail(err, TL_ERR_NO_HOST_MEMORY, "no memory for the configuration");
        goto out;
    }
    n = fread(text, 1, CONFIG_FILE_BYTES_MAX + 1, f);
    if (ferror(f)) {
        st = tl_fail_errno(err, "read the configuration", path, errno);
        goto out;
    }
    if (n > CONFIG_FILE_BYTES_MAX) {
        st = tl_fail(err, TL_ERR_BAD_PARAM, "%s: larger than %d bytes", path, CONFIG_FILE_BYTES_MAX);
        goto out;
    }
    st = tl_config_file_text(c, text, n, path, err);
out:
    free(text);
    fclose(f);
    return st;
}

/* ---- environment and flags --------------------------------------------------------------------------------------- */

static enum tl_status read_environment(struct tl_config *c, char **envp, struct tl_error *err)
{
    for (char **e = envp; *e; e++) {
        const char *eq = strchr(*e, '=');
        char where[80], key[80];
        size_t n = 0;
        if (strncmp(*e, "TINYLOOP_", 9) != 0 || !eq)
            continue;
        for (const char *p = *e + 9; p < eq && n < sizeof(key) - 1; p++)
            key[n++] = (char)tolower((unsigned char)*p);
        key[n] = '\0';
        snprintf(where, sizeof(where), "%.*s", (int)(eq - *e), *e);
        if (strcmp(key, "config") == 0)
            continue;
        const struct option *o = find_option(key);
        if (!o)
            return tl_fail(err, TL_ERR_BAD_PARAM, "environment variable %s is no setting (see --help)", where);
        enum tl_status st = set_option(c, o, eq + 1, where, err);
        if (st != TL_OK)
            return st;
    }
    return TL_OK;
}

static const struct {
    const char *flag;
    enum tl_config_action action;
    const char *help;
} actions[] = {
    {"--help", TL_SHOW_HELP, "show this"},
    {"--version", TL_SHOW_VERSION, "show the version"},
    {"--check-config", TL_CHECK_CONFIG, "read the settings, say whether they are sound, and end"},
    {"--print-config", TL_PRINT_CONFIG, "print the settings in force as a configuration file, and end"},
    {"--healthcheck", TL_HEALTHCHECK, "ask the daemon of this configuration whether it is ready; exit 0 or 1"},
};
#define N_ACTIONS (sizeof(actions) / sizeof(actions[0]))

/* Splits "--name=value" or "--name value"; a bool flag needs no value. apply == NULL: only look for --config. */
static enum tl_status read_flags(struct tl_config *c, int argc, char **argv, bool apply, const char **file,
                                 enum tl_config_action *action, struct tl_error *err)
{
    for (int i = 1; i < argc; i++) {
        char key[80], where[90];
        const char *arg = argv[i], *eq = strchr(arg, '=');
        size_t n = 0;
        bool known = false;
        for (size_t a = 0; a < N_ACTIONS && !known; a++) {
            if (strcmp(arg, actions[a].flag) != 0)
                continue;
            *action = actions[a].action;
            known = true;
        }
        if (known)
            continue;
        if (strncmp(arg, "--", 2) != 0)
            return tl_fail(err, TL_ERR_BAD_PARAM, "unexpected argument '%.60s' (see --help)", arg);
        for (const char *p = arg + 2; *p && *p != '=' && n < sizeof(key) - 1; p++)
            key[n++] = *p == '-' ? '_' : *p;
        key[n] = '\0';
        snprintf(where, sizeof(where), "--%s", key);
        for (char *p = where + 2; *p; p++)
            *p = *p == '_' ? '-' : *p;
        bool is_config = strcmp(key, "config") == 0;
        const struct option *o = is_config ? NULL : find_option(key);
        if (!o && !is_config)
            return tl_fail(err, TL_ERR_BAD_PARAM, "unknown flag %s (see --help)", where);
        const char *value = eq ? eq + 1 : NULL;
        if (!value && o && o->kind == BOOL)
            value = "true";
        if (!value) {
            if (i + 1 >= argc)
                return tl_fail(err, TL_ERR_BAD_PARAM, "%s needs a value", where);
            value = argv[++i];
        }
        if (is_config)
            *file = value;
        else if (apply) {
            enum tl_status st = set_option(c, o, value, where, err);
            if (st != TL_OK)
                return st;
        }
    }
    return TL_OK;
}

enum tl_status tl_config_read(struct tl_config *c, int argc, char **argv, char **envp, enum tl_config_action *action,
                              struct tl_error *err)
{
    const char *file = NULL;
    *action = TL_RUN;
    enum tl_status st = tl_config_defaults(c, err);
    for (char **e = envp; *e; e++)
        if (strncmp(*e, "TINYLOOP_CONFIG=", 16) == 0 && (*e)[16])
            file = *e + 16;
    if (st == TL_OK)
        st = read_flags(c, argc, argv, false, &file, action, err);
    if (st == TL_OK && file)
        st = read_file(c, file, err);
    if (st == TL_OK)
        st = read_environment(c, envp, err);
    if (st == TL_OK)
        st = read_flags(c, argc, argv, true, &file, action, err);
    return st;
}

void tl_config_help(FILE *f)
{
    fprintf(f,
            "Usage: tinyloopd --model DIR [--flag value]...\n\n"
            "Serves a looped language model over HTTP.\n\n"
            "  --%-26s %s\n",
            "config FILE", "read settings from FILE (TINYLOOP_CONFIG)");
    for (size_t i = 0; i < N_ACTIONS; i++)
        fprintf(f, "  %-28s %s\n", actions[i].flag, actions[i].help);
    const char *section = "";
    for (size_t i = 0; i < N_OPTIONS; i++) {
        const struct option *o = &options[i];
        char flag[64];
        if (strcmp(section, o->section) != 0)
            fprintf(f, "\n[%s]\n", section = o->section);
        snprintf(flag, sizeof(flag), "--%s%s", o->key,
                 o->kind == STR      ? " TEXT"
                 : o->kind == BOOL   ? ""
                 : o->kind == CHOICE ? " WORD"
                                     : " N");
        for (char *p = flag + 2; *p; p++)
            *p = *p == '_' ? '-' : *p;
        fprintf(f, "  %-28s %s%s%s [%s]\n", flag, o->help, o->choices ? ": " : "", o->choices ? o->choices : "",
                o->otherwise);
    }
    fprintf(f, "\nEach flag is also a key of the configuration file and an environment variable (TINYLOOP_PORT).\n"
               "Precedence: flag, environment, file, default.\n");
}

bool tl_config_option_at(size_t i, struct tl_config_option *out)
{
    static const char *const words[] = {
        [STR] = "TEXT", [INT] = "N", [BYTES] = "BYTES", [SECONDS] = "SECONDS", [BOOL] = NULL, [CHOICE] = "WORD"};
    if (i >= N_OPTIONS)
        return false;
    const struct option *o = &options[i];
    *out = (struct tl_config_option){o->section, o->key,         o->otherwise, o->choices,
                                     o->help,    words[o->kind], o->min,       o->max};
    return true;
}

bool tl_config_action_at(size_t i, const char **flag, const char **help)
{
    if (i >= N_ACTIONS)
        return false;
    *flag = actions[i].flag;
    *help = actions[i].help;
    return true;
}

static void print_value(const struct option *o, const void *field, FILE *f)
{
    int64_t v;
    switch (o->kind) {
    case STR:
    case CHOICE:
        if (**(char *const *)field)
            fprintf(f, " %s", *(char *const *)field);
        break;
    case BOOL: fputs(*(const bool *)field ? " true" : " false", f); break;
    case SECONDS: fprintf(f, " %.10g", *(const double *)field); break;
    case INT:
    case BYTES:
        v = *(const int64_t *)field;
        if (o->kind == BYTES && v > 0 && v % 1048576 == 0)
            fprintf(f, " %lldM", (long long)(v / 1048576));
        else if (o->kind == BYTES && v > 0 && v % 1024 == 0)
            fprintf(f, " %lldK", (long long)(v / 1024));
        else
            fprintf(f, " %lld", (long long)v);
        break;
    }
}

void tl_config_print(const struct tl_config *c, FILE *f)
{
    const char *section = "";
    fprintf(f, "; Settings of tinyloopd. Each is also a flag (--max-body-bytes) and an environment variable\n"
               "; (TINYLOOP_MAX_BODY_BYTES). Precedence: flag, environment, file, default.\n");
    for (size_t i = 0; i < N_OPTIONS; i++) {
        const struct option *o = &options[i];
        if (strcmp(section, o->section) != 0)
            fprintf(f, "\n[%s]\n", section = o->section);
        fprintf(f, "; %s%s%s\n%s =", o->help, o->choices ? ": " : "", o->choices ? o->choices : "", o->key);
        print_value(o, (const char *)c + o->offset, f);
        fputc('\n', f);
    }
}
