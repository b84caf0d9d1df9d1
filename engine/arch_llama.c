/* Llama's block under Llama's tensor names: Llama, Qwen2 (bias on q, k, v) and Qwen3 (norm on every q and k head) as models
 * of one loop, and Nanbeige, which runs its whole stack num_loops times with model.norm after every pass. */
#include "arch_bind.h"

static void read_block(struct tl_arch_spec *s, struct tl_json_reader *r)
{
    tl_arch_read_sizes(s, r);
    tl_arch_read_tokens(s, r);
    tl_arch_read_rope(s, r, 10000);
    s->rope = TL_ROPE_HALF;
    s->norms = TL_N1 | TL_N4;
}

static void read_llama(struct tl_arch_spec *s, struct tl_json_reader *r, const struct tl_tensors *ts)
{
    (void)ts;
    read_block(s, r);
    tl_arch_one_loop(s, 1, 1);
    s->final_norm = true;
}

static void read_qwen2(struct tl_arch_spec *s, struct tl_json_reader *r, const struct tl_tensors *ts)
{
    read_llama(s, r, ts);
    s->qkv_bias = true;
}

static void read_qwen3(struct tl_arch_spec *s, struct tl_json_reader *r, const struct tl_tensors *ts)
{
    read_llama(s, r, ts);
    s->qk_norm = TL_QKNORM_HEAD;
}

static void read_nanbeige(struct tl_arch_spec *s, struct tl_json_reader *r, const struct tl_tensors *ts)
{
    (void)ts;
    read_block(s, r);
    int loops = (int)tl_json_int(r, "num_loops", 1, TL_LOOPS_MAX);
    tl_arch_one_loop(s, loops, loops);
    s->loop_end_norm = true; /* the last one is the read-out */
}

static const struct tl_weight_name names[] = {
    {TL_WT_N1, {"input_layernorm.weight"}},
    {TL_WT_N4, {"post_attention_layernorm.weight"}},
    {TL_WT_QKV, {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"}},
    {TL_WT_QKV_BIAS, {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"}},
    {TL_WT_Q_NORM, {"self_attn.q_norm.weight"}},
    {TL_WT_K_NORM, {"self_attn.k_norm.weight"}},
    {TL_WT_O, {"self_attn.o_proj.weight"}},
    {TL_WT_UP, {"mlp.gate_proj.weight", "mlp.up_proj.weight"}},
    {TL_WT_DOWN, {"mlp.down_proj.weight"}},
    {TL_WT_EMBED, {"model.embed_tokens.weight"}},
    {TL_WT_FINAL_NORM, {"model.norm.weight"}}, /* of these two a model has one */
    {TL_WT_LOOP_NORM, {"model.norm.weight"}},
    {TL_WT_HEAD, {"lm_head.weight"}},
};

static const char *const refused[] = {"attention_bias", "mlp_bias", "use_sliding_window", "quantization_config", NULL};
static const char *const refused_nanbeige[] = {"attention_bias",
                                               "mlp_bias",
                                               "use_sliding_window",
                                               "quantization_config",
                                               "skip_loop_final_norm",
                                               "enable_double_loop_split",
                                               "loop_share_kv",
                                               "enable_depth_attention",
                                               "*hyper_connection*",
                                               "*ngram*",
                                               "*n_gram*",
                                               NULL};
static const char *const ignored[] = {"*.rotary_emb.inv_freq", NULL};

#define ROW(type, text, reader, flags)                                                                                 \
    {                                                                                                                  \
        .model_type = type, .about = text, .read = reader, .group = {"", "model.layers.", ""}, .names = names,         \
        .n_names = (int)(sizeof(names) / sizeof(names[0])), .refused = flags, .ignored = ignored,                      \
    }

const struct tl_arch tl_arch_llama = ROW("llama", "Llama as a model of one loop", read_llama, refused);
const struct tl_arch tl_arch_qwen2 = ROW("qwen2", "Qwen2 as a model of one loop", read_qwen2, refused);
const struct tl_arch tl_arch_qwen3 = ROW("qwen3", "Qwen3 as a model of one loop", read_qwen3, refused);
const struct tl_arch tl_arch_nanbeige =
    ROW("nanbeige", "Nanbeige: a Llama stack that loops", read_nanbeige, refused_nanbeige);
