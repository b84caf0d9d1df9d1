/* tests/vectors/vectors_driver.c - what the command line does not show of a forward pass, as JSON for test_vectors.py:
 *
 *   vectors_driver MODEL_DIR LOOPS STATES CHUNK ID...
 *   vectors_driver --serve DEVICE MEMORY_MIB
 *
 * STATES is a file of F32 start states [tokens][d_model], or "-" for the model's own. Prints logits and hidden rows of all
 * tokens, and where the model has an exit gate, its logits [loops][tokens] and the exit step per token at some q.
 * With --serve each line "LOOPS WINDOW ID,ID,... MODEL_DIR" of the input is answered by a line {"logits":[...]} or
 * {"error":"..."}: on a card the start of a process costs a hundred times what the models here do. */
#include "tinyloop.h"

#include "mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const float exit_q[] = {0.2f, 0.5f, 0.8f, 1.0f};

static void print_rows(const char *name, const float *x, size_t rows, size_t width)
{
    printf("\"%s\":[", name);
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = 0; i < width; i++)
            printf("%s%.9g", i ? "," : r ? ",[" : "[", (double)x[r * width + i]);
        printf("]");
    }
    printf("]");
}

static void print_exits(const float *gates, int n_tokens, int n_loops)
{
    printf(",\"exit\":{");
    for (size_t k = 0; k < sizeof(exit_q) / sizeof(exit_q[0]); k++) {
        printf("%s\"%.1f\":[", k ? "," : "", (double)exit_q[k]);
        for (int i = 0; i < n_tokens; i++)
            printf("%s%d", i ? "," : "", tl_exit_step(gates + i, n_tokens, n_loops, exit_q[k]));
        printf("]");
    }
    printf("}");
}

/* Logits of all tokens of one line; false: *err says why not. */
static bool answer(const char *dir, const struct tl_model_params *device, int loops, int window, const int32_t *tokens,
                   int n_tokens, struct tl_error *err)
{
    struct tl_model_params params = *device;
    struct tl_logits_params p = {.tokens = tokens, .n_tokens = n_tokens, .n_rows = n_tokens, .n_loops = loops};
    struct tl_model *m = NULL;
    bool ok = false;
    params.dir = dir;
    p.cache_window = window;
    if (tl_model_open(&m, &params, err) != TL_OK)
        return false;
    p.logits = tl_array((size_t)n_tokens * (size_t)tl_model_info(m)->vocab_size, sizeof(float));
    if (!p.logits)
        tl_fail(err, TL_ERR_NO_HOST_MEMORY, "no memory for %d rows of logits", n_tokens);
    else
        ok = tl_logits(m, &p, err) == TL_OK;
    if (ok) {
        printf("{");
        print_rows("logits", p.logits, (size_t)n_tokens, (size_t)tl_model_info(m)->vocab_size);
        printf("}\n");
    }
    tl_free(p.logits);
    tl_model_free(m);
    return ok;
}

#define LINE_TOKENS 4096

static int serve(const char *device, const char *memory_mib)
{
    struct tl_model_params params = {.device = device, .memory_bytes = strtoull(memory_mib, NULL, 10) << 20};
    static char line[16 * LINE_TOKENS];
    static int32_t tokens[LINE_TOKENS];
    while (fgets(line, sizeof(line), stdin)) {
        struct tl_error err = {0};
        char *at = line;
        int loops = (int)strtol(at, &at, 10), window = (int)strtol(at, &at, 10), n = 0;
        line[strcspn(line, "\n")] = 0;
        do
            tokens[n++] = (int32_t)strtol(at, &at, 10);
        while (*at++ == ',' && n < LINE_TOKENS);
        if (!answer(at, &params, loops, window, tokens, n, &err))
            printf("{\"error\":\"%s\"}\n", err.msg);
        fflush(stdout);
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct tl_model_params params = {.device = "cpu"};
    struct tl_logits_params p = {0};
    struct tl_model *m = NULL;
    struct tl_error err = {0};
    const struct tl_model_info *info;
    int32_t *tokens = NULL;
    float *states = NULL, *logits = NULL, *hidden = NULL, *gates = NULL;
    FILE *f = NULL;
    size_t n, d, vocab;
    int code = 1;

    if (argc == 4 && !strcmp(argv[1], "--serve"))
        return serve(argv[2], argv[3]);
    if (argc < 6) {
        fprintf(stderr, "usage: vectors_driver MODEL_DIR LOOPS STATES CHUNK ID...\n"
                        "       vectors_driver --serve DEVICE MEMORY_MIB\n");
        return 2;
    }
    params.dir = argv[1];
    if (tl_model_open(&m, &params, &err) != TL_OK) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    info = tl_model_info(m);
    n = (size_t)argc - 5;
    d = (size_t)info->spec->d_model;
    vocab = (size_t)info->vocab_size;
    p.n_tokens = p.n_rows = (int)n;
    p.n_loops = atoi(argv[2]);
    p.chunk = atoi(argv[4]);
    if (p.n_loops < 1 || p.n_loops > TL_LOOPS_MAX) {
        fprintf(stderr, "LOOPS is %d, it must be 1 to %d\n", p.n_loops, TL_LOOPS_MAX);
        goto out;
    }
    tokens = tl_array(n, sizeof(*tokens));
    states = tl_array(n * d, sizeof(float));
    logits = tl_array(n * vocab, sizeof(float));
    hidden = tl_array(n * d, sizeof(float));
    gates = tl_array(n * TL_LOOPS_MAX, sizeof(float));
    if (!tokens || !states || !logits || !hidden || !gates) {
        fprintf(stderr, "out of memory\n");
        goto out;
    }
    for (size_t i = 0; i < n; i++)
        tokens[i] = atoi(argv[5 + i]);
    if (strcmp(argv[3], "-") != 0) {
        f = fopen(argv[3], "rb");
        if (!f || fread(states, sizeof(float), n * d, f) != n * d) {
            fprintf(stderr, "%s does not hold %zu values\n", argv[3], n * d);
            goto out;
        }
        p.start_states = states;
    }
    p.tokens = tokens;
    p.logits = logits;
    p.hidden = hidden;
    p.gates = info->spec->exit == TL_EXIT_GATE_CDF ? gates : NULL;
    if (tl_logits(m, &p, &err) != TL_OK) {
        fprintf(stderr, "%s\n", err.msg);
        goto out;
    }
    printf("{");
    print_rows("logits", logits, n, vocab);
    printf(",");
    print_rows("hidden", hidden, n, d);
    if (p.gates) {
        printf(",");
        print_rows("gates", gates, (size_t)p.n_loops, n);
        print_exits(gates, (int)n, p.n_loops);
    }
    printf("}\n");
    code = 0;
out:
    if (f)
        fclose(f);
    tl_free(tokens);
    tl_free(states);
    tl_free(logits);
    tl_free(hidden);
    tl_free(gates);
    tl_model_free(m);
    return code;
}
