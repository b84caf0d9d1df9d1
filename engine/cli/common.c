#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"
#include "mem.h"

static void show_progress(void *arg, const char *what, double fraction)
{
    int *last = arg, percent = (int)(fraction * 100);
    if (percent == *last)
        return;
    *last = percent;
    fprintf(stderr, "\r%s %3d %%%s", what, percent, fraction >= 1 ? "\n" : "");
}

int tl_cli_fail(const struct tl_error *err)
{
    fprintf(stderr, "tinyloop: %s\n", err->msg);
    return TL_EXIT_FAILED;
}

bool tl_cli_open(struct tl_model **out, const struct tl_model_opts *o)
{
    int percent = -1;
    struct tl_error err;
    struct tl_model_params p = {
        .dir = o->dir,
        .device = o->device,
        .n_threads = o->threads,
        .max_seq_len = o->max_seq_len,
        .memory_bytes = o->memory_mib << 20,
        .step_rows_max = o->step_rows,
        .progress = isatty(2) ? show_progress : NULL,
        .progress_arg = &percent,
    };
    if (tl_model_open(out, &p, &err) == TL_OK)
        return true;
    tl_cli_fail(&err);
    return false;
}

int tl_cli_prompt(const struct tl_args *a, const struct tl_model *m, const char *text, const char *tokens,
                  int32_t **ids, int *n)
{
    const struct tl_tokenizer *tk = tl_model_tokenizer(m);
    const struct tl_model_info *info = tl_model_info(m);
    struct tl_error err;
    size_t n_ids;

    *ids = NULL;
    if (!text == !tokens)
        return tl_args_wrong(a, "give either --prompt or --tokens");
    if (tokens) {
        size_t room = 1;
        for (const char *c = tokens; *c; c++)
            room += *c == ',';
        *ids = tl_array(room, sizeof(**ids));
        if (!*ids)
            return tl_fail_host_memory(&err, room * sizeof(**ids)), tl_cli_fail(&err);
        *n = tl_args_int_list(a, "tokens", tokens, 0, info->vocab_size - 1, *ids, (int)room);
        if (*n < 0) {
            tl_free(*ids);
            *ids = NULL;
            return TL_EXIT_USAGE;
        }
        return TL_ARGS_GO;
    }
    if (!tk)
        return tl_args_wrong(a, "the model has no tokenizer.json: give token ids with --tokens");
    if (tl_tokenizer_encode(tk,
                            &(struct tl_encode_params){.text = text, .text_bytes = strlen(text), .add_special = true},
                            ids, &n_ids, &err) != TL_OK)
        return tl_cli_fail(&err);
    *n = (int)n_ids;
    return TL_ARGS_GO;
}

void tl_cli_json_string(const char *s, size_t n)
{
    putchar('"');
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c == '"' || c == '\\')
            printf("\\%c", c);
        else if (c < 0x20)
            printf("\\u%04x", c);
        else
            putchar(c);
    }
    putchar('"');
}
