#include "presets.h"

#include <string.h>

#define LOOP_2048(p, c, k)                                                                                             \
    "{\"model_type\":\"tinyloop\",\"vocab_size\":35000,\"hidden_size\":2048,\"intermediate_size\":5120,"               \
    "\"num_attention_heads\":16,\"num_key_value_heads\":4,\"head_dim\":128,\"prelude_layers\":" #p                     \
    ",\"core_layers\":" #c ",\"coda_layers\":" #k ",\"loops_default\":8,\"loops_trained\":8,\"loops_max\":64,"         \
    "\"max_position_embeddings\":8192,\"tie_word_embeddings\":true}"

#define TINY(more)                                                                                                     \
    "{\"model_type\":\"tinyloop\",\"vocab_size\":300,\"hidden_size\":64,\"intermediate_size\":160,"                    \
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":16,\"prelude_layers\":1,\"core_layers\":2,"      \
    "\"coda_layers\":1,\"loops_default\":4,\"loops_trained\":4,\"loops_max\":16,\"max_position_embeddings\":2048,"     \
    "\"tie_word_embeddings\":true" more "}"

#define OURO(d, f, layers, heads, kv, width, vocab, positions)                                                         \
    "{\"architectures\":[\"OuroForCausalLM\"],\"model_type\":\"ouro\",\"vocab_size\":" #vocab ",\"hidden_size\":" #d   \
    ",\"intermediate_size\":" #f ",\"num_hidden_layers\":" #layers ",\"num_attention_heads\":" #heads                  \
    ",\"num_key_value_heads\":" #kv ",\"head_dim\":" #width ",\"hidden_act\":\"silu\",\"rms_norm_eps\":1e-06,"         \
    "\"rope_theta\":1000000.0,\"rope_scaling\":null,\"max_position_embeddings\":" #positions                           \
    ",\"tie_word_embeddings\":false,\"use_sliding_window\":false,\"total_ut_steps\":4,\"early_exit_threshold\":1.0,"   \
    "\"bos_token_id\":0,\"eos_token_id\":0,\"torch_dtype\":\"bfloat16\"}"

#define RAVEN(d, heads, kv, f, vocab, p, c, k, loops, positions, more)                                                 \
    "{\"architectures\":[\"RavenForCausalLM\"],\"model_type\":\"huginn_raven\",\"n_embd\":" #d ",\"n_heads\":" #heads  \
    ",\"num_key_value_heads\":" #kv ",\"intermediate_size\":" #f ",\"vocab_size\":" #vocab                             \
    ",\"padded_vocab_size\":" #vocab ",\"n_layers_in_prelude\":" #p ",\"n_layers_in_recurrent_block\":" #c             \
    ",\"n_layers_in_coda\":" #k ",\"mean_recurrence\":" #loops ",\"block_size\":" #positions                           \
    ",\"injection_type\":\"linear\",\"bias\":false," more "}"

#define LLAMA(type, d, f, layers, heads, kv, width, vocab, positions, more)                                            \
    "{\"model_type\":\"" type "\",\"vocab_size\":" #vocab ",\"hidden_size\":" #d ",\"intermediate_size\":" #f          \
    ",\"num_hidden_layers\":" #layers ",\"num_attention_heads\":" #heads ",\"num_key_value_heads\":" #kv               \
    ",\"head_dim\":" #width ",\"hidden_act\":\"silu\",\"max_position_embeddings\":" #positions more "}"

/* Converted: scripts/convert_parcae.py. */
#define PARCAE(d, heads, f, layers)                                                                                    \
    "{\"model_type\":\"tinyloop\",\"vocab_size\":32768,\"hidden_size\":" #d ",\"intermediate_size\":" #f               \
    ",\"num_attention_heads\":" #heads ",\"prelude_layers\":" #layers ",\"core_layers\":" #layers                      \
    ",\"coda_layers\":" #layers ",\"loops_default\":8,\"loops_max\":32,\"max_position_embeddings\":2048,"              \
    "\"norm_eps\":1e-05,\"rope_base\":50000.0,\"tie_word_embeddings\":true" PARCAE_MORE "}"
#define PARCAE_MORE                                                                                                    \
    ",\"inject\":\"diag\",\"inject_norm\":true,\"core_to_coda\":\"linear\",\"mlp\":\"relu2\",\"rope\":\"pair\","       \
    "\"qk_norm\":\"head_after_rope\",\"value_embeds\":true"

#define HUGINN_MORE "\"norm_eps\":1e-06,\"rope_base\":50000.0,\"qk_bias\":true,\"tie_embeddings\":true"
#define RETRO_MORE(theta, eps)                                                                                         \
    "\"norm_eps\":" eps ",\"rope_theta\":" theta                                                                       \
    ",\"qk_bias\":false,\"tie_embeddings\":false,\"init_values\":{\"std\":0.0087,\"embed_scale\":1.0}"

static const struct tl_preset presets[] = {
    {"loop-407m", "2/4/2 layers of width 2048, the synthetic benchmark model", &tl_arch_tinyloop, LOOP_2048(2, 4, 2)},
    {"loop-block1", "3/1/4 layers of the same widths", &tl_arch_tinyloop, LOOP_2048(3, 1, 4)},
    {"ouro-1.4b", "the shape of Ouro-1.4B", &tl_arch_ouro, OURO(2048, 5632, 24, 16, 16, 128, 49152, 65536)},
    {"ouro-2.6b", "the shape of Ouro-2.6B", &tl_arch_ouro, OURO(2048, 5632, 48, 16, 16, 128, 49152, 65536)},
    {"huginn", "the shape of Huginn-0125", &tl_arch_huginn,
     RAVEN(5280, 55, 55, 17920, 65536, 2, 4, 2, 32, 4096, HUGINN_MORE)},
    {"retrofit-tinyllama", "TinyLlama-1.1B with retrofitted recurrence, 4/8/4", &tl_arch_retrofit_llama,
     RAVEN(2048, 32, 4, 5632, 32000, 4, 8, 4, 16, 2048, RETRO_MORE("10000.0", "1e-05"))},
    {"retrofit-olmo", "OLMo-2-1B with retrofitted recurrence, 4/6/4", &tl_arch_retrofit_olmo,
     RAVEN(2048, 16, 16, 8192, 100352, 4, 6, 4, 16, 4096, RETRO_MORE("500000.0", "1e-06"))},
    {"nanbeige", "the shape of Nanbeige4.2-3B", &tl_arch_nanbeige,
     LLAMA("nanbeige", 3072, 10752, 22, 48, 8, 128, 166144, 262144,
           ",\"rms_norm_eps\":1e-05,\"rope_theta\":70000000.0,\"tie_word_embeddings\":false,\"num_loops\":2,"
           "\"skip_loop_final_norm\":false,\"bos_token_id\":166100,\"eos_token_id\":166101")},
    {"parcae-370m", "the shape of Parcae-370M", &tl_arch_tinyloop, PARCAE(1024, 8, 4096, 4)},
    {"parcae-1.3b", "the shape of Parcae-1.3B", &tl_arch_tinyloop, PARCAE(1536, 12, 6144, 8)},
    {"tiny", "1/2/1 layers of width 64 with injection, for tests", &tl_arch_tinyloop,
     TINY(",\"inject\":\"concat_linear\",\"state_init\":\"zero\",\"loop_end_norm\":true")},
    {"tiny-plain", "the same without injection, as loop-407m is made", &tl_arch_tinyloop, TINY("")},
    {"tiny-diag", "diagonal injection, relu2, linear into the coda, norms of q and k after rope", &tl_arch_tinyloop,
     TINY(",\"inject\":\"diag\",\"inject_norm\":true,\"core_to_coda\":\"linear\",\"mlp\":\"relu2\",\"rope\":\"pair\","
          "\"qk_norm\":\"head_after_rope\"")},
    {"tiny-parcae", "Parcae's structure", &tl_arch_tinyloop, TINY(PARCAE_MORE)},
    {"tiny-ouro", "Ouro's structure", &tl_arch_ouro, OURO(64, 160, 3, 4, 2, 16, 300, 2048)},
    {"tiny-huginn", "Huginn's structure", &tl_arch_huginn, RAVEN(64, 4, 4, 160, 300, 1, 2, 1, 4, 2048, HUGINN_MORE)},
    {"tiny-retrofit-llama", "a retrofitted Llama's structure", &tl_arch_retrofit_llama,
     RAVEN(64, 4, 2, 160, 300, 1, 2, 1, 4, 2048, RETRO_MORE("10000.0", "1e-05"))},
    {"tiny-retrofit-olmo", "a retrofitted OLMo-2's structure", &tl_arch_retrofit_olmo,
     RAVEN(64, 4, 4, 160, 300, 1, 2, 1, 4, 2048, RETRO_MORE("500000.0", "1e-06"))},
    {"tiny-nanbeige", "Nanbeige's structure", &tl_arch_nanbeige,
     LLAMA("nanbeige", 64, 160, 2, 4, 2, 16, 300, 2048,
           ",\"rms_norm_eps\":1e-05,\"rope_theta\":70000000.0,\"num_loops\":2")},
    {"tiny-llama", "a one-loop Llama with llama3 rope scaling", &tl_arch_llama,
     LLAMA(
         "llama", 64, 160, 2, 4, 2, 16, 300, 2048,
         ",\"rms_norm_eps\":1e-05,\"rope_theta\":500000.0,\"tie_word_embeddings\":true,\"rope_scaling\":{\"rope_type\":"
         "\"llama3\",\"factor\":32.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,\"original_max_position_"
         "embeddings\":512}")},
    {"tiny-qwen2", "a one-loop Qwen2: bias on q, k, v", &tl_arch_qwen2,
     LLAMA("qwen2", 64, 160, 2, 4, 2, 16, 300, 2048,
           ",\"rms_norm_eps\":1e-06,\"rope_theta\":1000000.0,\"tie_word_embeddings\":true")},
    {"tiny-qwen3", "a one-loop Qwen3: norms of q and k heads", &tl_arch_qwen3,
     LLAMA("qwen3", 64, 160, 2, 4, 2, 16, 300, 2048,
           ",\"rms_norm_eps\":1e-06,\"rope_theta\":1000000.0,\"tie_word_embeddings\":true")},
};
#define N_PRESETS ((int)(sizeof(presets) / sizeof(presets[0])))

const struct tl_preset *tl_preset_find(const char *name)
{
    for (int i = 0; i < N_PRESETS; i++)
        if (!strcmp(presets[i].name, name))
            return &presets[i];
    return NULL;
}

const struct tl_preset *tl_preset_at(int i) { return i >= 0 && i < N_PRESETS ? &presets[i] : NULL; }
