/* engine/cli/commands.h - the commands of `tinyloop` and what they share.
 * A command gets argv[0] = its own name and returns an exit code: 0 it worked, 1 it failed, 2 it was asked wrongly. */
#ifndef TL_COMMANDS_H
#define TL_COMMANDS_H

#include "args.h"
#include "tinyloop.h"

int tl_cmd_generate(int argc, char **argv);
int tl_cmd_logits(int argc, char **argv);
int tl_cmd_tokenize(int argc, char **argv);
int tl_cmd_inspect(int argc, char **argv);
int tl_cmd_quantize(int argc, char **argv);
int tl_cmd_synth(int argc, char **argv);
int tl_cmd_bench(int argc, char **argv);

/* Options that every command with a model has. Rows for a struct tl_args table. */
struct tl_model_opts {
    const char *dir, *device;
    int threads, max_seq_len, step_rows;
    uint64_t memory_mib;
};
#define TL_MODEL_ARGS(o)                                                                                               \
    {"model", TL_ARG_STR, &(o).dir, "DIR", "model directory: config.json, *.safetensors, tokenizer.json", true, 0, 0}, \
        {"device", TL_ARG_STR, &(o).device, "NAME", "auto, cpu or cuda (default auto)", false, 0, 0},                  \
        {"threads", TL_ARG_INT, &(o).threads, "N", "CPU threads; 0 = all this process may use", false, 0, 1024},       \
        {"memory-mib",                                                                                                 \
         TL_ARG_U64,                                                                                                   \
         &(o).memory_mib,                                                                                              \
         "N",                                                                                                          \
         "memory budget for weights, scratch and KV; 0 = automatic",                                                   \
         false,                                                                                                        \
         0,                                                                                                            \
         0},                                                                                                           \
        {"max-seq-len", TL_ARG_INT, &(o).max_seq_len, "N", "longest sequence in tokens; 0 = automatic",                \
         false,         0,          1 << 24},                                                                          \
    {                                                                                                                  \
        "step-rows", TL_ARG_INT, &(o).step_rows, "N", "rows of one forward step; 0 = 256, on a GPU 2048", false, 0,    \
            1 << 16                                                                                                    \
    }

/* Open with a progress line on a terminal. Prints the error itself; false = failed. */
bool tl_cli_open(struct tl_model **out, const struct tl_model_opts *o);
/* "tinyloop: <message>" on stderr; returns TL_EXIT_FAILED. */
int tl_cli_fail(const struct tl_error *err);
/* The prompt of --prompt or --tokens (exactly one) as ids, owned: tl_free. Prints what is wrong; returns -1 = fine, else exit code. */
int tl_cli_prompt(const struct tl_args *a, const struct tl_model *m, const char *text, const char *tokens,
                  int32_t **ids, int *n);
/* A JSON string, quoted and escaped; invalid UTF-8 never gets here. */
void tl_cli_json_string(const char *s, size_t n);

#endif
