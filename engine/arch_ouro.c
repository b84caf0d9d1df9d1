/* Ouro (1.4B, 2.6B and their Thinking variants): one stack of layers, run total_ut_steps times, no prelude, coda or
 * injection. model.norm ends every loop and is the read-out as well, so there is no further final norm.
 *
 * Beware of the names: post_attention_layernorm is the norm *before* the MLP; the two *_2 norms act on what attention and
 * MLP put out. */
#include "arch_bind.h"

#include <cjson/cJSON.h>
#include <string.h>

static void read(struct tl_arch_spec *s, struct tl_json_reader *r, const struct tl_tensors *ts)
{
    const cJSON *item, *types = tl_json_value(r, "layer_types");
    (void)ts;
    tl_arch_read_sizes(s, r);
    tl_arch_read_tokens(s, r);
    tl_arch_read_rope(s, r, 1e6);
    s->rope = TL_ROPE_HALF;
    int loops = (int)tl_json_int(r, "total_ut_steps", 1, TL_LOOPS_MAX);
    /* Trained for this depth; quality falls beyond it, but twice as deep still answers. */
    tl_arch_one_loop(s, loops, 2 * loops < TL_LOOPS_MAX ? 2 * loops : TL_LOOPS_MAX);
    s->norms = TL_N1 | TL_N2 | TL_N4 | TL_N5;
    s->loop_end_norm = true;
    s->exit = TL_EXIT_GATE_CDF;
    /* The released vocabulary ends a chat turn with <|im_end|> = 2, which the config does not say. */
    if (s->vocab_size == 49152)
        tl_arch_add_stop_id(s, 2);
    cJSON_ArrayForEach(item, types) if (!cJSON_IsString(item) || strcmp(item->valuestring, "full_attention") != 0)
        tl_json_fail(r, "layer_types", "holds something else than \"full_attention\"");
}

static const struct tl_weight_name names[] = {
    {TL_WT_N1, {"input_layernorm.weight"}},
    {TL_WT_N2, {"input_layernorm_2.weight"}},
    {TL_WT_N4, {"post_attention_layernorm.weight"}},
    {TL_WT_N5, {"post_attention_layernorm_2.weight"}},
    {TL_WT_QKV, {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"}},
    {TL_WT_O, {"self_attn.o_proj.weight"}},
    {TL_WT_UP, {"mlp.gate_proj.weight", "mlp.up_proj.weight"}},
    {TL_WT_DOWN, {"mlp.down_proj.weight"}},
    {TL_WT_EMBED, {"model.embed_tokens.weight"}},
    {TL_WT_LOOP_NORM, {"model.norm.weight"}},
    {TL_WT_GATE_W, {"model.early_exit_gate.weight"}},
    {TL_WT_GATE_B, {"model.early_exit_gate.bias"}},
    {TL_WT_HEAD, {"lm_head.weight"}},
};

static const char *const refused[] = {"use_sliding_window", "attention_bias", "mlp_bias", "quantization_config", NULL};
static const char *const ignored[] = {"*.rotary_emb.inv_freq", NULL};

const struct tl_arch tl_arch_ouro = {
    .model_type = "ouro",
    .about = "Ouro: the whole stack loops, a norm and an exit gate after every loop",
    .read = read,
    .group = {"", "model.layers.", ""},
    .names = names,
    .n_names = (int)(sizeof(names) / sizeof(names[0])),
    .refused = refused,
    .ignored = ignored,
};
