/* Writes a manual page to standard output: make_man tinyloopd.8 | tinyloopd.conf.5 | tinyloop.1
 * Settings, flags and commands come from the tables that the programs themselves read, so that the pages agree with them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"
#include "config.h"

#define PAGE_DATE "2026-11-29" /* of the words below */

/* ---- text --------------------------------------------------------------------------------------------------------- */

/* One line of running text: nothing in it may be taken for a request or an escape. */
static void put(const char *s, size_t n)
{
    if (n > 0 && (s[0] == '.' || s[0] == '\''))
        fputs("\\&", stdout);
    for (size_t i = 0; i < n; i++) {
        if (s[i] == '\\')
            fputs("\\e", stdout);
        else if (s[i] == '-')
            fputs("\\-", stdout);
        else
            putchar(s[i]);
    }
}

static void text(const char *s) { put(s, strlen(s)); }

/* Running text in lines of about 70 characters, broken at blanks. */
static void fill(const char *s, size_t n)
{
    while (n > 0) {
        size_t cut = n;
        if (n > 70)
            for (cut = 70; cut > 0 && s[cut] != ' ';)
                cut--;
        if (cut == 0)
            cut = n;
        put(s, cut);
        putchar('\n');
        while (cut < n && s[cut] == ' ')
            cut++;
        s += cut;
        n -= cut;
    }
}

static void line(const char *s) { fill(s, strlen(s)); }

static void flag_of(const char *key)
{
    fputs("\\-\\-", stdout);
    for (; *key; key++)
        fputs(*key == '_' ? "\\-" : (char[]){*key, '\0'}, stdout);
}

static void title(const char *name, int section, const char *manual)
{
    printf(".TH %s %d %s \"TinyLoop %s\" \"%s\"\n", name, section, PAGE_DATE, TL_VERSION, manual);
}

/* .TP with a bold term and an italic value (may be NULL) */
static void term(const char *bold, const char *value)
{
    fputs(".TP\n\\fB", stdout);
    text(bold);
    fputs("\\fR", stdout);
    if (value)
        printf(" \\fI%s\\fR", value);
    putchar('\n');
}

static void example(const char *s)
{
    fputs(".in +4\n.nf\n", stdout);
    while (*s) {
        size_t n = strcspn(s, "\n");
        put(s, n);
        putchar('\n');
        s += n + (s[n] == '\n');
    }
    fputs(".fi\n.in\n", stdout);
}

/* ---- tinyloopd.8 -------------------------------------------------------------------------------------------------- */

static void daemon_options(void)
{
    const char *flag, *help, *section = "";
    struct tl_config_option o;
    puts(".SH OPTIONS\nA value follows its flag, or an equals sign.");
    term("--config", "FILE");
    puts("read settings from \\fIFILE\\fR; see\n.BR tinyloopd.conf (5)");
    for (size_t i = 0; tl_config_action_at(i, &flag, &help); i++) {
        term(flag, NULL);
        line(help);
    }
    puts(".PP\nAll others are settings; their ranges and defaults are in\n.BR tinyloopd.conf (5).\n"
         "One without a value below is switched on by its name alone, and off by\n.BR =false .");
    for (size_t i = 0; tl_config_option_at(i, &o); i++) {
        if (strcmp(section, o.section) != 0)
            printf(".SS %s\n", section = o.section);
        fputs(".TP\n\\fB", stdout);
        flag_of(o.key);
        fputs("\\fR", stdout);
        printf(o.value ? " \\fI%s\\fR\n" : "%s\n", o.value ? o.value : "");
        line(o.help);
    }
}

static void daemon_page(void)
{
    title("TINYLOOPD", 8, "System Manager's Manual");
    puts(".SH NAME\ntinyloopd \\- inference server for looped language models\n"
         ".SH SYNOPSIS\n.B tinyloopd\n.B \\-\\-model\n.I DIR\n[\\fB\\-\\-config\\fR \\fIFILE\\fR] "
         "[\\fB\\-\\-\\fR\\fIsetting\\fR "
         "\\fIvalue\\fR]...\n"
         ".SH DESCRIPTION\nServes one model over HTTP, with the routes that OpenAI clients speak\nand routes of its "
         "own for named, "
         "exact reuse of what was computed.\nOne thread speaks HTTP, one owns the model.\nThe answer to\n.B GET "
         "/openapi.json\n"
         "describes every route.\n.PP\nBeside the public listener there is one for administration:\n.B /metrics\nand\n"
         ".BR /admin .\nWithout API keys both are for this machine alone, unless\n.B \\-\\-insecure\nsays "
         "otherwise.\n.PP\n"
         "Each setting is a flag, an environment variable and a key of the\nconfiguration file; the first of these "
         "that\n"
         "gives a value wins.");
    daemon_options();
    puts(".SH ENVIRONMENT");
    term("TINYLOOP_CONFIG", NULL);
    puts("the configuration file, as\n.B \\-\\-config");
    term("TINYLOOP_*", NULL);
    puts("a setting in capitals:\n.B TINYLOOP_MAX_BODY_BYTES\nis\n.BR \\-\\-max\\-body\\-bytes .\nA variable of this "
         "beginning "
         "that is no setting is an error.");
    term("NOTIFY_SOCKET, WATCHDOG_USEC, LISTEN_FDS", NULL);
    puts("set by\n.BR systemd (1):\nreadiness and progress are told to it, and sockets taken over:\nfirst the public "
         "one, then the "
         "one for administration.\n"
         ".SH SIGNALS");
    term("SIGTERM, SIGINT", NULL);
    puts("take no new work, finish what runs within\n.BR shutdown_timeout ,\nend. A second one ends at once.");
    term("SIGHUP", NULL);
    puts("read the file of API keys anew; with a mistake in it the old keys stay\n.SH EXIT STATUS");
    static const char *const codes[][2] = {{"0", "ended as asked"},
                                           {"1", "could not start; of --healthcheck: not ready"},
                                           {"2", "wrong settings or model"},
                                           {"3", "the device or the worker failed"},
                                           {"128+n", "ended by a second signal n"}};
    for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++) {
        term(codes[i][0], NULL);
        line(codes[i][1]);
    }
    puts(".SH FILES");
    term("/etc/tinyloop/tinyloopd.conf", NULL);
    puts("the configuration that the service uses");
    term("state_dir/*.def", NULL);
    puts("one file for each named entry that survives a restart:\nits tokens and settings, never its state\n.SH "
         "EXAMPLES");
    example("tinyloopd --model /usr/local/share/tinyloop/demo-model\n"
            "tinyloopd --config /etc/tinyloop/tinyloopd.conf --check-config\n"
            "curl -s http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' \\\n"
            "  -d '{\"model\": \"demo-model\", \"prompt\": \"Once upon a time\", \"max_tokens\": 60}'\n");
    puts(".SH SEE ALSO\n.BR tinyloop (1),\n.BR tinyloopd.conf (5)");
}

/* ---- tinyloopd.conf.5 --------------------------------------------------------------------------------------------- */

static void number(const struct tl_config_option *o, double v)
{
    if (strcmp(o->value, "BYTES") == 0 && v >= 1024 && v == (double)((long long)v / 1024 * 1024))
        printf("%lldK", (long long)v / 1024);
    else
        printf("%.15g", v);
}

static void setting(const struct tl_config_option *o)
{
    char sentence[256];
    fputs(".TP\n\\fB", stdout);
    text(o->key);
    printf("\\fR = \\fI%s\\fR\n", o->value ? o->value : "true|false");
    snprintf(sentence, sizeof(sentence), "%s.", o->help);
    line(sentence);
    if (o->choices) {
        printf("One of ");
        for (const char *p = o->choices; *p; p++)
            fputs(*p == '|' ? ", " : (char[]){*p, '\0'}, stdout);
        puts(".");
    }
    if (o->min != 0 || o->max != 0) {
        printf("From ");
        number(o, o->min);
        printf(" to ");
        number(o, o->max);
        puts(".");
    }
    if (o->otherwise[0]) {
        printf("Default: ");
        text(o->otherwise);
        puts(".");
    }
}

static void config_page(void)
{
    const char *section = "";
    struct tl_config_option o;
    title("TINYLOOPD.CONF", 5, "File Formats Manual");
    puts(".SH NAME\ntinyloopd.conf \\- settings of tinyloopd\n"
         ".SH SYNOPSIS\n.I /etc/tinyloop/tinyloopd.conf\n"
         ".SH DESCRIPTION\nThe file that\n.B tinyloopd \\-\\-config\nreads: lines of the form\n.IR key \" = \" value\n"
         "below the\n.RI [ section ]\nthat the key belongs to.\nLines that begin with a semicolon or a number sign are "
         "comments,\n"
         "and so is what follows a space and a semicolon.\nA key that is unknown, there twice or out of range\n"
         "is an error that names the line.\n"
         ".PP\nA key is also a flag of\n.BR tinyloopd (8),\nwith dashes instead of underscores, and an environment "
         "variable: "
         "capitals, with\n.B TINYLOOP_\nbefore them.\nA flag wins over the environment, and that over the file.\n"
         ".PP\n.I BYTES\nmay end in K, M or G, for 1024 of the unit before.\n.I SECONDS\nmay have decimals.\n"
         ".PP\n.B tinyloopd \\-\\-print\\-config\nprints the settings in force as such a file, and\n.B "
         "\\-\\-check\\-config\n"
         "says whether they are sound.\n.SH SETTINGS");
    for (size_t i = 0; tl_config_option_at(i, &o); i++) {
        if (strcmp(section, o.section) != 0)
            printf(".SS [%s]\n", section = o.section);
        setting(&o);
    }
    puts(".SH API KEYS\nThe file that\n.B api_keys\nnames has a line for each key, with five fields between "
         "colons:\n.PP");
    example("name:sha256:tenant:roles:limits\n");
    puts(".PP\n.I sha256\nis the hash of the key itself in hexadecimal digits;\n.I tenant\nowns what is made with the "
         "key.\n"
         ".I roles\nare\n.BR infer ,\n.B cache\nand\n.BR admin ,\nbetween commas.\n.I limits\nmay be empty, or hold\n"
         ".BI concurrent= N\n(requests in flight) and\n.BI rpm= N\n(requests a minute).\nThe hash of a key:\n.PP");
    example("printf %s \"$key\" | sha256sum\n");
    puts(".SH SEE ALSO\n.BR tinyloopd (8)");
}

/* ---- tinyloop.1 --------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"generate", tl_cmd_generate}, {"logits", tl_cmd_logits},     {"tokenize", tl_cmd_tokenize},
    {"inspect", tl_cmd_inspect},   {"quantize", tl_cmd_quantize}, {"synth", tl_cmd_synth},
    {"bench", tl_cmd_bench},
};

/* What the command prints about itself; empty if it cannot be caught. */
static void catch_help(int (*run)(int, char **), const char *name, char *out, size_t cap)
{
    char *argv[] = {(char *)name, "--help", NULL};
    FILE *f = tmpfile();
    size_t n = 0;
    fflush(stdout);
    int before = dup(STDOUT_FILENO);
    if (f && before >= 0 && dup2(fileno(f), STDOUT_FILENO) >= 0) {
        run(2, argv);
        fflush(stdout);
        dup2(before, STDOUT_FILENO);
        rewind(f);
        n = fread(out, 1, cap - 1, f);
    }
    out[n] = '\0';
    close(before);
    if (f)
        fclose(f);
}

/* The layout of args.c: usage, words about it, a blank line, "  option  help" lines, "Example:" and a line. */
static void command_section(const char *help)
{
    bool options = false, shown = false;
    while (*help) {
        size_t n = strcspn(help, "\n");
        if (n == 0) {
            options = true;
        } else if (strncmp(help, "Usage: ", 7) == 0) {
            fputs("\\fB", stdout);
            put(help + 7, n - 7);
            fputs("\\fR\n.PP\n", stdout);
        } else if (strncmp(help, "Example:", 8) == 0) {
            shown = true;
            puts(".PP\nExample:\n.PP\n.in +4\n.nf");
        } else if (options && !shown) {
            size_t name = 2, gap;
            while (name < n && strncmp(help + name, "  ", 2) != 0 && !(name >= 28 && help[name] == ' '))
                name++;
            gap = strspn(help + name, " ");
            fputs(".TP\n\\fB", stdout);
            put(help + 2, name - 2);
            fputs("\\fR\n", stdout);
            fill(help + name + gap, n - name - gap);
        } else if (shown) {
            put(help + strspn(help, " "), n - strspn(help, " "));
            putchar('\n');
        } else {
            fill(help, n);
        }
        help += n + (help[n] == '\n');
    }
    if (shown)
        puts(".fi\n.in");
}

static int command_page(void)
{
    static char help[16384];
    title("TINYLOOP", 1, "General Commands Manual");
    puts(".SH NAME\ntinyloop \\- run, convert and measure looped language models\n"
         ".SH SYNOPSIS\n.B tinyloop\n.I COMMAND\n[\\fIoptions\\fR]\n.br\n.B tinyloop \\-\\-help\n.br\n.B tinyloop "
         "\\-\\-version\n"
         ".SH DESCRIPTION\nRuns a model whose block of layers is repeated as many times per token\nas asked for, "
         "without a server.\n"
         "Options are written\n.BI \\-\\-name \" value\"\nor\n.BI \\-\\-name= value\\fR.\n.SH COMMANDS");
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        catch_help(commands[i].run, commands[i].name, help, sizeof(help));
        if (!help[0]) {
            fprintf(stderr, "make_man: no help of %s\n", commands[i].name);
            return 1;
        }
        printf(".SS %s\n", commands[i].name);
        command_section(help);
    }
    puts(".SH EXIT STATUS");
    term("0", NULL);
    puts("it worked");
    term("1", NULL);
    puts("it failed; standard error says why");
    term("2", NULL);
    puts("it was asked wrongly\n.SH SEE ALSO\n.BR tinyloopd (8)");
    return 0;
}

int main(int argc, char **argv)
{
    const char *page = argc == 2 ? argv[1] : "";
    int code = 0;
    if (strcmp(page, "tinyloopd.8") == 0) {
        daemon_page();
    } else if (strcmp(page, "tinyloopd.conf.5") == 0) {
        config_page();
    } else if (strcmp(page, "tinyloop.1") == 0) {
        code = command_page();
    } else {
        fprintf(stderr, "usage: make_man tinyloopd.8|tinyloopd.conf.5|tinyloop.1\n");
        code = 2;
    }
    return code;
}
