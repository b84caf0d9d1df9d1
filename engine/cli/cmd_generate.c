#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "commands.h"
#include "mem.h"

struct printer {
    struct tl_text_stream *text; /* NULL: ids are printed */
    bool json;
    char *out; /* JSON: the text so far */
    size_t n_out;
    enum tl_status st;
    struct tl_error err;
};

static volatile sig_atomic_t g_interrupted;
static void on_interrupt(int sig)
{
    (void)sig;
    g_interrupted = 1;
}

static void show(struct printer *p, const char *text, size_t n)
{
    char *more;
    if (!n)
        return;
    if (!p->json) {
        fwrite(text, 1, n, stdout);
        fflush(stdout);
        return;
    }
    more = tl_realloc(p->out, p->n_out + n);
    if (!more) {
        p->st = tl_fail_host_memory(&p->err, n);
        return;
    }
    memcpy(more + p->n_out, text, n);
    p->out = more;
    p->n_out += n;
}

static enum tl_verdict on_event(void *arg, const struct tl_event *ev)
{
    struct printer *p = arg;
    const char *text;
    size_t n;

    if (ev->kind != TL_EVENT_TOKEN)
        return TL_GO_ON;
    if (p->text) {
        p->st = tl_text_stream_push(p->text, ev->sampled->token, &text, &n, &p->err);
        if (p->st == TL_ERR_TOKEN_OUT_OF_VOCAB) /* a row that pads the vocabulary: it has no text */
            p->st = TL_OK;
        if (p->st == TL_OK)
            show(p, text, n);
        if (p->st != TL_OK || tl_text_stream_stopped(p->text) >= 0)
            return TL_STOP_HERE;
    } else if (!p->json) {
        printf("%d ", ev->sampled->token);
        fflush(stdout);
    }
    return g_interrupted ? TL_STOP_HERE : TL_GO_ON;
}

static void print_json(const struct printer *p, const struct tl_result *r)
{
    static const char *const finish[] = {"stop", "length", "cancelled", "error"};
    const struct tl_usage *u = &r->usage;
    printf("{\"text\":");
    tl_cli_json_string(p->out ? p->out : "", p->n_out);
    printf(",\"tokens\":[");
    for (int i = 0; i < r->n_tokens; i++)
        printf("%s%d", i ? "," : "", r->tokens[i]);
    printf("],\"finish_reason\":\"%s\",\"prompt_tokens\":%d,\"completion_tokens\":%d,\"loops\":%d,\"mean_loops\":%.3f,"
           "\"prefill_ms\":%.3f,"
           "\"decode_ms\":%.3f}\n",
           finish[r->finish], u->n_prompt, r->n_tokens, u->n_loops, u->mean_loops, u->prefill_s * 1e3,
           u->decode_s * 1e3);
}

int tl_cmd_generate(int argc, char **argv)
{
    struct tl_model_opts o = {0};
    struct tl_request r;
    const char *prompt = NULL, *tokens = NULL;
    struct tl_arg_list stops = {0};
    double threshold = 0, temperature = 0, top_p = 1, min_p = 0, repetition = 1, presence = 0, frequency = 0;
    int max_tokens = 128, window = 0, code, n = 0;
    bool json = false;
    struct tl_stop_string stop[TL_STOP_STRINGS_MAX];

    tl_request_default(&r);
    const struct tl_arg table[] = {
        TL_MODEL_ARGS(o),
        {"prompt", TL_ARG_STR, &prompt, "TEXT", "the prompt as text", false, 0, 0},
        {"tokens", TL_ARG_STR, &tokens, "IDS", "the prompt as token ids: 1,2,3", false, 0, 0},
        {"loops", TL_ARG_INT, &r.loops, "N", "depth: how often the loop block runs per token; 0 = the model's default",
         false, 0, TL_LOOPS_MAX},
        {"adaptive", TL_ARG_FLAG, &r.adaptive, NULL,
         "stop each token at the loop where the model's exit criterion says so", false, 0, 0},
        {"exit-threshold", TL_ARG_FLOAT, &threshold, "X",
         "of the exit criterion; 0 = 0.3 for a gate, 0.03 for the latent difference", false, 0, 1},
        {"max-tokens", TL_ARG_INT, &max_tokens, "N", "tokens to generate at most (default 128)", false, 0, 1 << 24},
        {"window", TL_ARG_INT, &window, "N", "cache window in tokens; 0 = unlimited", false, 0, 1 << 24},
        {"stop", TL_ARG_LIST, &stops, "TEXT", "end before this text; may be repeated", false, 0, 0},
        {"temperature", TL_ARG_FLOAT, &temperature, "T", "0 = greedy (default)", false, 0, 100},
        {"top-k", TL_ARG_INT, &r.sampling.top_k, "N", "0 = off", false, 0, 1 << 24},
        {"top-p", TL_ARG_FLOAT, &top_p, "P", "1 = off", false, 0, 1},
        {"min-p", TL_ARG_FLOAT, &min_p, "P", "0 = off", false, 0, 1},
        {"repetition-penalty", TL_ARG_FLOAT, &repetition, "X", "1 = off", false, 0.01, 100},
        {"presence-penalty", TL_ARG_FLOAT, &presence, "X", "0 = off", false, -2, 2},
        {"frequency-penalty", TL_ARG_FLOAT, &frequency, "X", "0 = off", false, -2, 2},
        {"seed", TL_ARG_U64, &r.sampling.seed, "N", "of the random numbers (default 0)", false, 0, 0},
        {"min-tokens", TL_ARG_INT, &r.sampling.min_tokens, "N", "no end before this many tokens", false, 0, 1 << 24},
        {"ignore-eos", TL_ARG_FLAG, &r.sampling.ignore_eos, NULL, "go on past the end-of-text token", false, 0, 0},
        {"json", TL_ARG_FLAG, &json, NULL, "one JSON object at the end instead of text as it comes", false, 0, 0},
    };
    const struct tl_args args = {"tinyloop generate", "Continue a prompt; the text appears as it is made.",
                                 "tinyloop generate --model config/demo-model --prompt 'Once upon a time' --loops 8",
                                 table, sizeof(table) / sizeof(table[0])};
    struct tl_model *m = NULL;
    struct tl_sched *s = NULL;
    struct tl_result res = {0};
    struct printer p = {0};
    struct tl_error err;
    int32_t *ids = NULL;
    const char *text;
    size_t n_text;

    if ((code = tl_args_parse(&args, argc, argv)) != TL_ARGS_GO)
        return code;
    if (stops.n > TL_STOP_STRINGS_MAX)
        return tl_args_wrong(&args, "--stop is given %d times, the limit is %d", stops.n, TL_STOP_STRINGS_MAX);
    if (!tl_cli_open(&m, &o))
        return TL_EXIT_FAILED;
    if ((code = tl_cli_prompt(&args, m, prompt, tokens, &ids, &n)) != TL_ARGS_GO)
        goto out;
    code = TL_EXIT_FAILED;
    for (int i = 0; i < stops.n; i++)
        stop[i] = (struct tl_stop_string){stops.item[i], strlen(stops.item[i])};
    if (tl_model_tokenizer(m) || stops.n) {
        struct tl_text_stream_params tp = {
            .tokenizer = tl_model_tokenizer(m), .stops = stop, .n_stops = stops.n, .detok = {.mid_text = true}};
        if (tl_text_stream_create(&p.text, &tp, &err) != TL_OK) {
            tl_cli_fail(&err);
            goto out;
        }
    }
    r.tokens = ids;
    r.n_tokens = n;
    r.max_tokens = max_tokens;
    r.cache_window = window;
    r.exit_threshold = (float)threshold;
    r.sampling.temperature = (float)temperature;
    r.sampling.top_p = (float)top_p;
    r.sampling.min_p = (float)min_p;
    r.sampling.repetition_penalty = (float)repetition;
    r.sampling.presence_penalty = (float)presence;
    r.sampling.frequency_penalty = (float)frequency;
    r.sampling.stop_ids = tl_model_info(m)->spec->stop_ids;
    r.sampling.n_stop_ids = tl_model_info(m)->spec->n_stop_ids;
    r.on_event = on_event;
    r.arg = &p;
    p.json = json;
    signal(SIGINT, on_interrupt);
    if (tl_sched_create(&s, m, NULL, &err) != TL_OK || tl_generate(s, &r, &res, &err) != TL_OK) {
        tl_cli_fail(&err);
        goto out;
    }
    if (p.text && p.st == TL_OK) {
        p.st = tl_text_stream_flush(p.text, &text, &n_text, &p.err);
        if (p.st == TL_OK)
            show(&p, text, n_text);
    }
    if (p.st != TL_OK) {
        tl_cli_fail(&p.err);
        goto out;
    }
    if (res.usage.n_loops > tl_model_info(m)->spec->loops_trained)
        fprintf(stderr, "tinyloop: loops %d is beyond the depth that the model was trained for (%d)\n",
                res.usage.n_loops, tl_model_info(m)->spec->loops_trained);
    if (json)
        print_json(&p, &res);
    else
        putchar('\n');
    code = TL_EXIT_OK;
out:
    tl_result_clear(&res);
    tl_sched_free(s);
    tl_text_stream_free(p.text);
    tl_free(p.out);
    tl_free(ids);
    tl_model_free(m);
    return code;
}
