#include <math.h>
#include <stdio.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "commands.h"
#include "mem.h"

int tl_cmd_logits(int argc, char **argv)
{
    struct tl_model_opts o = {0};
    const char *prompt = NULL, *tokens = NULL;
    int loops = 0, window = 0, chunk = 0, rows = 1, code;
    bool json = false;
    const struct tl_arg table[] = {
        TL_MODEL_ARGS(o),
        {"prompt", TL_ARG_STR, &prompt, "TEXT", "the prompt as text", false, 0, 0},
        {"tokens", TL_ARG_STR, &tokens, "IDS", "the prompt as token ids: 1,2,3", false, 0, 0},
        {"loops", TL_ARG_INT, &loops, "N", "depth; 0 = the model's default", false, 0, TL_LOOPS_MAX},
        {"window", TL_ARG_INT, &window, "N", "cache window in tokens; 0 = unlimited", false, 0, 1 << 24},
        {"chunk", TL_ARG_INT, &chunk, "N", "rows per forward step; 0 = as many as fit", false, 0, 1 << 16},
        {"rows", TL_ARG_INT, &rows, "N", "how many of the last rows to print (default 1)", false, 1, 1 << 20},
        {"json", TL_ARG_FLAG, &json, NULL, "print JSON: logits of the last row, hash, and rows if --rows is above 1",
         false, 0, 0},
    };
    const struct tl_args args = {"tinyloop logits",
                                 "Logits of the last rows of a prompt at a depth, and a 64-bit hash of their bits.",
                                 "tinyloop logits --model config/demo-model --tokens 1,2,3 --loops 4 --json", table,
                                 sizeof(table) / sizeof(table[0])};
    struct tl_model *m = NULL;
    struct tl_error err;
    int32_t *ids = NULL;
    float *logits = NULL;
    int n = 0;
    size_t vocab;

    if ((code = tl_args_parse(&args, argc, argv)) != TL_ARGS_GO)
        return code;
    if (!tl_cli_open(&m, &o))
        return TL_EXIT_FAILED;
    vocab = (size_t)tl_model_info(m)->vocab_size;
    if ((code = tl_cli_prompt(&args, m, prompt, tokens, &ids, &n)) != TL_ARGS_GO)
        goto out;
    code = TL_EXIT_FAILED;
    logits = tl_array((size_t)rows * vocab, sizeof(float));
    if (!logits) {
        tl_fail_host_memory(&err, (size_t)rows * vocab * sizeof(float));
        tl_cli_fail(&err);
        goto out;
    }
    if (tl_logits(m,
                  &(struct tl_logits_params){.tokens = ids,
                                             .n_tokens = n,
                                             .n_rows = rows,
                                             .cache_window = window,
                                             .chunk = chunk,
                                             .n_loops = loops ? loops : tl_model_info(m)->spec->loops_default,
                                             .logits = logits},
                  &err) != TL_OK) {
        tl_cli_fail(&err);
        goto out;
    }
    for (size_t i = 0; i < (size_t)rows * vocab; i++)
        if (!isfinite(logits[i])) {
            tl_fail(&err, TL_ERR_NON_FINITE,
                    "logit %zu of row %d is %f: the model does not compute finite numbers here", i % vocab,
                    n - rows + (int)(i / vocab), (double)logits[i]);
            tl_cli_fail(&err);
            goto out;
        }
    code = TL_EXIT_OK;
    for (int r = 0; r < rows && !json; r++) {
        const float *row = logits + (size_t)r * vocab;
        size_t best = 0;
        for (size_t i = 1; i < vocab; i++)
            if (row[i] > row[best])
                best = i;
        printf("row %d: top token %zu, logit %.6f, hash %016llx\n", n - rows + r, best, (double)row[best],
               (unsigned long long)XXH3_64bits(row, vocab * sizeof(float)));
    }
    if (json) {
        const float *last = logits + (size_t)(rows - 1) * vocab;
        printf("{\"logits\":[");
        for (size_t i = 0; i < vocab; i++)
            printf("%s%.9g", i ? "," : "", (double)last[i]);
        printf("],\"hash\":\"%016llx\"", (unsigned long long)XXH3_64bits(last, vocab * sizeof(float)));
        if (rows > 1) {
            printf(",\"rows\":[");
            for (int r = 0; r < rows; r++) {
                printf(r ? ",[" : "[");
                for (size_t i = 0; i < vocab; i++)
                    printf("%s%.9g", i ? "," : "", (double)logits[(size_t)r * vocab + i]);
                printf("]");
            }
            printf("]");
        }
        printf("}\n");
    }
out:
    tl_free(logits);
    tl_free(ids);
    tl_model_free(m);
    return code;
}
