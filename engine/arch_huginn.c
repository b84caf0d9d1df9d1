/* model_type "huginn_raven": Huginn-0125 and the models retrofitted from Llama-like and OLMo-2 checkpoints. All are prelude,
 * looped core and coda with a linear adapter on [state ; injected input]; the config does not tell the three blocks apart,
 * the tensors do:
 *   norm_3 present         Huginn: sandwich norms, rope over pairs, q/k bias; ln_f between core and coda and again at the end
 *   attn.q_norm present    OLMo: norms on the outputs of attention and MLP, q/k norm over the full width
 *   neither                Llama: norms on the inputs
 * qkv and gate/up are fused. The start state is random in the original; freqs_cis is a cos/sin table, made anew here. */
#include "arch_bind.h"

#include <math.h>
#include <string.h>

static void read_common(struct tl_arch_spec *s, struct tl_json_reader *r)
{
    s->d_model = (int)tl_json_int(r, "n_embd", 1, 65536);
    s->n_heads = (int)tl_json_int(r, "n_heads", 1, 1024);
    s->n_kv_heads = (int)tl_json_int_or(r, "num_key_value_heads", 1, 1024, s->n_heads);
    s->d_head = (int)tl_json_int_or(r, "head_dim", 2, TL_HEAD_DIM_MAX, s->n_heads ? s->d_model / s->n_heads : 0);
    s->d_ff = (int)tl_json_int(r, "intermediate_size", 1, 131072);
    s->vocab_size =
        (int)tl_json_int_or(r, "padded_vocab_size", 1, 1 << 24, tl_json_int_or(r, "vocab_size", 1, 1 << 24, 0));
    s->n_prelude = (int)tl_json_int(r, "n_layers_in_prelude", 0, 1024);
    s->n_core = (int)tl_json_int(r, "n_layers_in_recurrent_block", 1, 1024);
    s->n_coda = (int)tl_json_int(r, "n_layers_in_coda", 0, 1024);
    s->loops_default = s->loops_trained = (int)tl_json_int(r, "mean_recurrence", 1, TL_LOOPS_MAX);
    s->loops_max = TL_LOOPS_MAX;
    s->max_positions = (int)tl_json_int(r, "block_size", 1, 1 << 24);
    s->norm_eps = (float)tl_json_num(r, "norm_eps", 0, 1);
    s->tied_head = tl_json_bool_or(r, "tie_word_embeddings", tl_json_bool_or(r, "tie_embeddings", false));
    s->final_norm = true;
    s->inject = TL_INJECT_CONCAT_LINEAR;
    s->exit = TL_EXIT_LATENT_DIFF;
    s->state_init = TL_STATE_TRUNCNORM;
    tl_arch_read_tokens(s, r);
    if (strcmp(tl_json_str_or(r, "injection_type", "linear"), "linear") != 0)
        tl_json_fail(r, "injection_type", "is \"%.40s\", only \"linear\" is supported",
                     tl_json_str(r, "injection_type"));
}

/* init_values: embedding scale, and deviation of the random start state before scaling. */
static void read_init(struct tl_arch_spec *s, struct tl_json_reader *r, float scale_default)
{
    struct tl_json_reader o;
    s->embed_scale = scale_default;
    s->state_std = s->d_model ? sqrtf(2.0f / (5.0f * (float)s->d_model)) : 0;
    if (!tl_json_object(r, "init_values", &o))
        return;
    s->embed_scale = (float)tl_json_num_or(&o, "embed_scale", 1e-6, 1e6, s->embed_scale);
    s->state_std = (float)tl_json_num_or(&o, "std", 0, 1e3, s->state_std);
    if (r->st == TL_OK)
        r->st = o.st;
}

static void read_huginn(struct tl_arch_spec *s, struct tl_json_reader *r, const struct tl_tensors *ts)
{
    (void)ts;
    read_common(s, r);
    read_init(s, r, sqrtf((float)s->d_model));
    s->state_std *= s->embed_scale;
    s->norms = TL_N1 | TL_N3 | TL_N4 | TL_N6;
    s->core_to_coda = TL_C2C_NORM;
    s->c2c_is_final_norm = true;
    s->rope = TL_ROPE_PAIR;
    s->rope_base = (float)tl_json_num_or(r, "rope_base", 1, 1e12, 50000);
    s->qk_bias = tl_json_bool_or(r, "qk_bias", true);
}

static void read_retrofit(struct tl_arch_spec *s, struct tl_json_reader *r, const struct tl_tensors *ts)
{
    static const char *const modes[] = {"random", "embed-init", "skip-adapter"};
    (void)ts;
    read_common(s, r);
    read_init(s, r, 1);
    tl_arch_read_rope(s, r, 10000);
    s->rope = TL_ROPE_HALF;
    s->norms = TL_N1 | TL_N4;
    int mode = tl_json_has(r, "initial_state_mode") ? tl_json_enum(r, "initial_state_mode", modes, 3) : 0;
    if (mode > 0)
        s->state_init = TL_STATE_PRELUDE;
    s->skip_first_inject = mode == 2;
    if (tl_json_bool_or(r, "qk_bias", false))
        tl_json_fail(r, "qk_bias", "is set, but the tensors are those of a retrofitted model, which has none");
}

static void read_olmo(struct tl_arch_spec *s, struct tl_json_reader *r, const struct tl_tensors *ts)
{
    read_retrofit(s, r, ts);
    s->norms = TL_N2 | TL_N5;
    s->qk_norm = TL_QKNORM_FULL;
}

#define SHARED                                                                                                         \
    {TL_WT_QKV, {"attn.Wqkv.weight"}}, {TL_WT_O, {"attn.proj.weight"}}, {TL_WT_UP, {"mlp.fc.weight"}},                 \
        {TL_WT_DOWN, {"mlp.proj.weight"}}, {TL_WT_EMBED, {"transformer.wte.weight"}},                                  \
        {TL_WT_ADAPTER, {"transformer.adapter.weight"}}, {TL_WT_FINAL_NORM, {"transformer.ln_f.weight"}},              \
    {                                                                                                                  \
        TL_WT_HEAD, { "lm_head.weight" }                                                                               \
    }

static const struct tl_weight_name huginn_names[] = {
    SHARED,
    {TL_WT_N1, {"norm_1.weight"}},
    {TL_WT_N3, {"norm_2.weight"}},
    {TL_WT_N4, {"norm_3.weight"}},
    {TL_WT_N6, {"norm_4.weight"}},
    {TL_WT_QK_BIAS, {"attn.qk_bias"}},
    {TL_WT_CODA_NORM, {"transformer.ln_f.weight"}},
};
static const struct tl_weight_name olmo_names[] = {
    SHARED,
    {TL_WT_N2, {"norm_1.weight"}},
    {TL_WT_N5, {"norm_2.weight"}},
    {TL_WT_Q_NORM, {"attn.q_norm.weight"}},
    {TL_WT_K_NORM, {"attn.k_norm.weight"}},
};
static const struct tl_weight_name llama_names[] = {
    SHARED,
    {TL_WT_N1, {"norm_1.weight"}},
    {TL_WT_N4, {"norm_2.weight"}},
};

static const char *const refused[] = {
    "bias", "test_time_noise", "attn_logit_softcapping", "final_logit_softcapping", "quantization_config", NULL,
};
static const char *const ignored[] = {"freqs_cis", "*.freqs_cis", "*.rotary_emb.inv_freq", NULL};

#define ROW(text, reader, table)                                                                                       \
    .model_type = "huginn_raven", .about = text, .read = reader,                                                       \
    .group = {"transformer.prelude.", "transformer.core_block.", "transformer.coda."}, .names = table,                 \
    .n_names = (int)(sizeof(table) / sizeof(table[0])), .refused = refused, .ignored = ignored

const struct tl_arch tl_arch_huginn = {
    ROW("Huginn: sandwich norms, linear injection", read_huginn, huginn_names),
    .if_tensor = "transformer.core_block.0.norm_3.weight",
};
const struct tl_arch tl_arch_retrofit_olmo = {
    ROW("retrofitted recurrence on an OLMo-2 block", read_olmo, olmo_names),
    .if_tensor = "transformer.core_block.0.attn.q_norm.weight",
};
const struct tl_arch tl_arch_retrofit_llama = {
    ROW("retrofitted recurrence on a Llama block", read_retrofit, llama_names),
};
