/* tinyloop: looped language models from the command line. */
#include <stdio.h>
#include <string.h>

#include "commands.h"

static const struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *about;
} commands[] = {
    {"generate", tl_cmd_generate, "continue a prompt"},
    {"logits", tl_cmd_logits, "logits of the last tokens of a prompt, with a hash of their bits"},
    {"tokenize", tl_cmd_tokenize, "text to token ids and back"},
    {"inspect", tl_cmd_inspect, "what a model directory holds"},
    {"quantize", tl_cmd_quantize, "convert a model to INT8 or INT4"},
    {"synth", tl_cmd_synth, "write a model of exact shape with random weights"},
    {"bench", tl_cmd_bench, "measure decode, prefill, reuse and exactness"},
};
enum { N_COMMANDS = sizeof(commands) / sizeof(commands[0]) };

static void usage(FILE *f)
{
    fputs("usage: tinyloop COMMAND [options]\n\nRun looped language models: one block of layers, as many loops as you "
          "ask for.\n\n",
          f);
    for (int i = 0; i < N_COMMANDS; i++)
        fprintf(f, "  %-10s %s\n", commands[i].name, commands[i].about);
    fputs("\ntinyloop COMMAND --help explains a command. tinyloop --version prints the version.\n", f);
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : NULL;

    if (!name || !strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help")) {
        usage(name ? stdout : stderr);
        return name ? TL_EXIT_OK : TL_EXIT_USAGE;
    }
    if (!strcmp(name, "--version")) {
        puts("tinyloop " TL_VERSION);
        return TL_EXIT_OK;
    }
    for (int i = 0; i < N_COMMANDS; i++)
        if (!strcmp(name, commands[i].name))
            return commands[i].run(argc - 1, argv + 1);
    fprintf(stderr, "tinyloop: there is no command '%s' (tinyloop --help lists them)\n", name);
    return TL_EXIT_USAGE;
}
