/* `tinyloop inspect`: what a model directory holds. */
#include "args.h"
#include "chat_template.h"
#include "commands.h"
#include "mem.h"
#include "weights.h"

#include <stdio.h>
#include <string.h>

struct inspect {
    const char *dir, *dir_option;
    bool tensors, fingerprint, check, knobs;
};

static uint64_t stored_bytes(const struct tl_bind *w)
{
    uint64_t n = 0;
    for (int i = 0; i < w->n_parts; i++)
        n += w->part[i].t->bytes + (w->part[i].row_scale ? w->part[i].row_scale->bytes : 0) +
             (w->part[i].group_scale ? w->part[i].group_scale->bytes : 0);
    return n;
}

static void print_sizes(const struct tl_arch_binding *b)
{
    uint64_t params[TL_W_COUNT] = {0}, bytes[TL_W_COUNT] = {0}, vectors = 0, all = 0, all_bytes = 0;
    int n[TL_W_COUNT] = {0};
    for (int i = 0; i < b->n_binds; i++) {
        const struct tl_bind *w = &b->binds[i];
        uint64_t count = (uint64_t)w->rows * (uint64_t)(w->n_in ? w->n_in : 1);
        if (w->weight == TL_WT_CODA_NORM && b->spec.c2c_is_final_norm)
            continue;
        all += count;
        all_bytes += stored_bytes(w);
        if (!w->n_in) {
            vectors += count;
            continue;
        }
        n[w->wtype]++;
        params[w->wtype] += count;
        bytes[w->wtype] += stored_bytes(w);
    }
    printf("parameters   %llu, %.2f bits each\n", (unsigned long long)all, 8.0 * (double)all_bytes / (double)all);
    for (int t = 0; t < TL_W_COUNT; t++)
        if (n[t])
            printf("  %-10s %d matrices, %llu parameters, %llu bytes, %.2f bits each\n",
                   tl_wtype_name((enum tl_wtype)t), n[t], (unsigned long long)params[t], (unsigned long long)bytes[t],
                   8.0 * (double)bytes[t] / (double)params[t]);
    printf("  %-10s %llu parameters (norms, biases, gates)\n", "vectors", (unsigned long long)vectors);
}

static void print_summary(const struct inspect *o, const struct tl_arch_binding *b)
{
    const struct tl_arch_spec *s = &b->spec;
    long long slot = 2LL * tl_kv_dim(s);
    printf("model        %s\n", o->dir);
    printf("type         %s: %s\n", s->model_type, b->arch->about);
    printf("layers       %d prelude, %d core x %d loops (trained %d, at most %d), %d coda\n", s->n_prelude, s->n_core,
           s->loops_default, s->loops_trained, s->loops_max, s->n_coda);
    printf("widths       model %d, MLP %d, %d heads of %d, %d key/value heads, vocabulary %d%s\n", s->d_model, s->d_ff,
           s->n_heads, s->d_head, s->n_kv_heads, s->vocab_size, s->tied_head ? ", tied head" : "");
    printf("positions    %d\n", s->max_positions);
    printf("KV           %lld values per token at %d loops, %lld more with each loop\n",
           slot * tl_n_slots(s, s->loops_default), s->loops_default, slot * s->n_core);
    printf("files        %d tensors, %llu bytes\n", tl_tensors_count(b->tensors),
           (unsigned long long)tl_tensors_file_bytes(b->tensors));
}

static void print_tensors(const struct tl_arch_binding *b)
{
    for (int i = 0; i < tl_tensors_count(b->tensors); i++) {
        const struct tl_tensor *t = tl_tensors_at(b->tensors, i);
        char shape[200];
        printf("%-60s %-5s %-20s %12zu%s\n", t->name, t->dtype_name, tl_tensor_shape(t, shape, sizeof(shape)), t->bytes,
               tl_arch_tensor_ignored(b->arch, t->name) ? "  (not used)" : "");
    }
}

static enum tl_status print_knobs(const struct tl_arch_binding *b, struct tl_error *err)
{
    char *text = NULL;
    enum tl_status st = tl_spec_write(&text, &b->spec, "none", err);
    if (st == TL_OK)
        printf("knobs        %s", text);
    tl_free(text);
    return st;
}

static enum tl_status check_values(const struct tl_arch_binding *b, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    for (int i = 0; i < b->n_binds && st == TL_OK; i++)
        st = tl_bind_check(b, &b->binds[i], err);
    if (st == TL_OK)
        printf("values       every weight is finite and in range\n");
    return st;
}

/* Text is not needed to serve, so that a chat template cannot be used is no failure. */
static enum tl_status check_text(const struct inspect *o, const struct tl_arch_binding *b, struct tl_error *err)
{
    struct tl_tokenizer *tk;
    struct tl_chat_template *chat = NULL;
    struct tl_error why = {.status = TL_OK};
    enum tl_status st = tl_tokenizer_of_model(&tk, o->dir, b->spec.vocab_size, err);
    if (st != TL_OK)
        return st;
    if (tk)
        printf("tokenizer    %d ids for a vocabulary of %d\n", tl_tokenizer_vocab_size(tk), b->spec.vocab_size);
    else
        printf("tokenizer    none: token ids only\n");
    st = tl_chat_open(&chat, o->dir, tk, &why);
    printf("chat         %s\n", st != TL_OK ? why.msg : chat ? "the template can be used" : "no template");
    tl_chat_free(chat);
    tl_tokenizer_free(tk);
    return TL_OK;
}

int tl_cmd_inspect(int argc, char **argv)
{
    struct inspect o = {0};
    struct tl_error err;
    struct tl_arch_binding *b = NULL;
    char hex[65];
    const struct tl_arch_params params = {.start_state_random = true}; /* show what the file says */
    const struct tl_arg rows[] = {
        {"DIR", TL_ARG_POS, &o.dir, NULL, "model directory", false, 0, 0},
        {"model", TL_ARG_STR, &o.dir_option, "DIR", "the same as an option", false, 0, 0},
        {"tensors", TL_ARG_FLAG, &o.tensors, NULL, "list the tensors", false, 0, 0},
        {"knobs", TL_ARG_FLAG, &o.knobs, NULL, "every knob, as config.json of TinyLoop's own layout", false, 0, 0},
        {"check", TL_ARG_FLAG, &o.check, NULL, "read all weights, tokenizer and chat template, and check them", false,
         0, 0},
        {"fingerprint", TL_ARG_FLAG, &o.fingerprint, NULL, "SHA-256 over config and tensors (zero start state)", false,
         0, 0},
    };
    const struct tl_args args = {
        "tinyloop inspect",
        "Show what a model directory holds: architecture, depth, sizes, weight types.",
        "tinyloop inspect loop-407m --tensors",
        rows,
        sizeof(rows) / sizeof(rows[0]),
    };
    int rc = tl_args_parse(&args, argc, argv);
    if (rc != TL_ARGS_GO)
        return rc;
    if (!o.dir == !o.dir_option)
        return tl_args_wrong(&args, o.dir ? "DIR and --model are both given" : "the model directory is missing");
    o.dir = o.dir ? o.dir : o.dir_option;
    enum tl_status st = tl_arch_open(&b, o.dir, &params, &err);
    if (st == TL_OK) {
        print_summary(&o, b);
        print_sizes(b);
    }
    if (st == TL_OK && o.knobs)
        st = print_knobs(b, &err);
    if (st == TL_OK && o.check)
        st = check_values(b, &err);
    if (st == TL_OK && o.check)
        st = check_text(&o, b, &err);
    if (st == TL_OK && o.fingerprint) {
        if (b->spec.state_init == TL_STATE_TRUNCNORM)
            b->spec.state_init = TL_STATE_ZERO;
        st = tl_weights_fingerprint(b, 0, hex, &err);
        if (st == TL_OK)
            printf("fingerprint  %s\n", hex);
    }
    if (st == TL_OK && o.tensors)
        print_tensors(b);
    if (st != TL_OK)
        fprintf(stderr, "tinyloop inspect: %s\n", err.msg);
    tl_arch_free(b);
    return st == TL_OK ? TL_EXIT_OK : TL_EXIT_FAILED;
}
