/* config.json and tensor names become a spec and a binding, for every architecture; what does not fit is named. */
#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "arch_bind.h"
#include "commands.h"
#include "mem.h"
#include "presets.h"
#include "temp_dir.h"

#include <cjson/cJSON.h>

static char dir[TEMP_PATH], model[TEMP_PATH + 8];

static void setup(void)
{
    temp_dir_make(dir);
    snprintf(model, sizeof(model), "%s/m", dir);
}
static void teardown(void) { temp_dir_remove(dir); }

static int synth(const char *preset, const char *to, const char *layout, const char *set)
{
    char *argv[] = {"synth", "--preset", (char *)preset, "--to",  (char *)to,  "--out",
                    model,   "--layout", (char *)layout, "--set", (char *)set, NULL};
    ck_assert(freopen("/dev/null", "w", stdout) != NULL);
    return tl_cmd_synth(set ? 11 : 9, argv);
}

static enum tl_status open_model(struct tl_arch_binding **b, struct tl_error *err)
{
    return tl_arch_open(b, model, &(struct tl_arch_params){.start_state_random = true}, err);
}

static void must_open(struct tl_arch_binding **b, const char *path)
{
    struct tl_error err;
    ck_assert_msg(tl_arch_open(b, path, NULL, &err) == TL_OK, "%s", err.msg);
}

/* Replace the first `from` of a file of the model by `to`; lengths may differ (for config.json only). */
static void edit(const char *name, const char *from, const char *to)
{
    size_t n, nf = strlen(from), nt = strlen(to);
    char *text = read_text(model, name, &n), *at = memmem(text, n, from, nf), *out = malloc(n + nt + 1);
    ck_assert_msg(at != NULL, "%s does not hold '%s'", name, from);
    size_t before = (size_t)(at - text), after = n - before - nf;
    memcpy(out, text, before);
    memcpy(out + before, to, nt);
    memcpy(out + before + nt, at + nf, after);
    temp_file(model, name, out, before + nt + after);
    free(out);
    free(text);
}

static void expect_refusal(enum tl_status status, const char *says)
{
    struct tl_arch_binding *b = (struct tl_arch_binding *)1;
    struct tl_error err = {0};
    ck_assert_int_eq(open_model(&b, &err), status);
    ck_assert_msg(strstr(err.msg, says) != NULL, "'%s' does not say '%s'", err.msg, says);
    ck_assert_ptr_null(b);
}

/* ---- the released layouts ---- */

static int uses(const struct tl_arch_binding *b, const struct tl_tensor *t)
{
    int n = b->head_copy == t;
    for (int i = 0; i < b->n_binds; i++)
        for (int j = 0; j < b->binds[i].n_parts; j++)
            n += (b->binds[i].part[j].t == t) + (b->binds[i].part[j].row_scale == t) +
                 (b->binds[i].part[j].group_scale == t);
    return n;
}

static const char *const golden[] = {"ouro-tiny", "huginn-tiny", "retrofit-llama-tiny", "retrofit-olmo-tiny"};

START_TEST(every_golden_tensor_is_used_once_or_known_to_be_unused)
{
    struct tl_arch_binding *b;
    char path[128];
    int n_ignored = 0;
    snprintf(path, sizeof(path), "tests/golden/%s", golden[_i]);
    must_open(&b, path);
    for (int i = 0; i < tl_tensors_count(b->tensors); i++) {
        const struct tl_tensor *t = tl_tensors_at(b->tensors, i);
        bool ignored = tl_arch_tensor_ignored(b->arch, t->name),
             twice = _i == 1 && !strcmp(t->name, "transformer.ln_f.weight");
        ck_assert_msg(uses(b, t) == (ignored ? 0 : twice ? 2 : 1), "%s is used %d times", t->name, uses(b, t));
        n_ignored += ignored;
    }
    ck_assert_int_eq(n_ignored, _i == 1); /* freqs_cis */
    tl_arch_free(b);
}
END_TEST

START_TEST(ouro_is_one_looped_stack_with_a_norm_and_a_gate_per_loop)
{
    struct tl_arch_binding *b;
    must_open(&b, "tests/golden/ouro-tiny");
    const struct tl_arch_spec *s = &b->spec;
    ck_assert(s->n_prelude == 0 && s->n_core == 3 && s->n_coda == 0);
    ck_assert(s->loops_default == 4 && s->loops_trained == 4 && s->loops_max == 8);
    ck_assert_uint_eq(s->norms, TL_N1 | TL_N2 | TL_N4 | TL_N5);
    ck_assert(s->loop_end_norm && !s->final_norm && s->inject == TL_INJECT_NONE && s->state_init == TL_STATE_PRELUDE);
    ck_assert(s->exit == TL_EXIT_GATE_CDF && s->rope == TL_ROPE_HALF && s->rope_base == 1e6f && !s->tied_head);
    ck_assert(s->n_heads == 4 && s->n_kv_heads == 2 && s->d_head == 8);
    ck_assert(s->bos_token_id == 0 && s->eos_token_id == 0 && s->n_stop_ids == 1);
    /* The name trap: post_attention_layernorm comes before the MLP, input_layernorm_2 after attention. */
    for (int i = 0; i < b->n_binds; i++) {
        const char *name = b->binds[i].part[0].t->name;
        if (b->binds[i].weight == TL_WT_N4)
            ck_assert_ptr_nonnull(strstr(name, "post_attention_layernorm.weight"));
        if (b->binds[i].weight == TL_WT_N2)
            ck_assert_ptr_nonnull(strstr(name, "input_layernorm_2.weight"));
    }
    tl_arch_free(b);
}
END_TEST

START_TEST(the_three_raven_blocks_are_told_apart_by_their_tensors)
{
    struct tl_arch_binding *b;
    must_open(&b, "tests/golden/huginn-tiny");
    ck_assert_uint_eq(b->spec.norms, TL_N1 | TL_N3 | TL_N4 | TL_N6);
    ck_assert(b->spec.core_to_coda == TL_C2C_NORM && b->spec.c2c_is_final_norm && b->spec.final_norm);
    ck_assert(b->spec.rope == TL_ROPE_PAIR && b->spec.rope_base == 50000 && b->spec.qk_bias && b->spec.tied_head);
    ck_assert_float_eq(b->spec.embed_scale, sqrtf(32));
    ck_assert_float_eq_tol(b->spec.state_std, sqrtf(0.4f), 1e-6f);
    ck_assert(b->spec.n_prelude == 2 && b->spec.n_core == 3 && b->spec.n_coda == 2 && b->spec.loops_max == 64);
    tl_arch_free(b);
    must_open(&b, "tests/golden/retrofit-llama-tiny");
    ck_assert_uint_eq(b->spec.norms, TL_N1 | TL_N4);
    ck_assert(b->spec.core_to_coda == TL_C2C_NONE && b->spec.embed_scale == 1 && !b->spec.tied_head);
    ck_assert(b->spec.rope == TL_ROPE_HALF && b->spec.rope_base == 10000 && b->spec.n_kv_heads == 2);
    ck_assert_int_eq(b->spec.qk_norm, TL_QKNORM_NONE);
    tl_arch_free(b);
    must_open(&b, "tests/golden/retrofit-olmo-tiny");
    ck_assert_uint_eq(b->spec.norms, TL_N2 | TL_N5);
    ck_assert_int_eq(b->spec.qk_norm, TL_QKNORM_FULL);
    tl_arch_free(b);
}
END_TEST

START_TEST(a_random_start_state_is_zero_unless_asked_for)
{
    struct tl_arch_binding *b;
    const struct tl_arch_params random = {.start_state_random = true};
    must_open(&b, "tests/golden/huginn-tiny");
    ck_assert_int_eq(b->spec.state_init, TL_STATE_ZERO);
    tl_arch_free(b);
    ck_assert_int_eq(tl_arch_open(&b, "tests/golden/huginn-tiny", &random, NULL), TL_OK);
    ck_assert_int_eq(b->spec.state_init, TL_STATE_TRUNCNORM);
    tl_arch_free(b);
    ck_assert_int_eq(tl_arch_open(&b, "tests/golden/ouro-tiny", &random, NULL), TL_OK);
    ck_assert_int_eq(b->spec.state_init, TL_STATE_PRELUDE);
    tl_arch_free(b);
}
END_TEST

START_TEST(every_preset_opens_in_both_layouts_with_the_same_spec)
{
    const struct tl_preset *p = tl_preset_at(_i);
    struct tl_arch_binding *b, *c;
    struct tl_error err;
    if (strncmp(p->name, "tiny", 4) != 0)
        return; /* large */
    ck_assert_int_eq(synth(p->name, "int4", "released", NULL), 0);
    ck_assert_msg(open_model(&b, &err) == TL_OK, "%s", err.msg);
    snprintf(model, sizeof(model), "%s/n", dir);
    ck_assert_int_eq(synth(p->name, "bf16", "own", NULL), 0);
    ck_assert_msg(open_model(&c, &err) == TL_OK, "%s", err.msg);
    ck_assert_ptr_eq(b->arch, p->arch);
    struct tl_arch_spec expected = b->spec;
    memcpy(expected.model_type, c->spec.model_type, sizeof(expected.model_type));
    expected.c2c_is_final_norm = false;
    ck_assert_mem_eq(&expected, &c->spec, sizeof(expected));
    tl_arch_free(b);
    tl_arch_free(c);
}
END_TEST

static int n_presets(void)
{
    int n = 0;
    while (tl_preset_at(n))
        n++;
    return n;
}

START_TEST(the_shapes_of_the_benchmarks_have_the_right_size)
{
    static const struct {
        const char *preset;
        int64_t parameters;
    } sizes[] = {{"loop-407m", 407259136}, {"ouro-1.4b", 1434652673},  {"ouro-2.6b", 2667974657},
                 {"huginn", 3564976800},   {"parcae-370m", 388003328}, {"parcae-1.3b", 1338591744}};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        const struct tl_preset *p = tl_preset_find(sizes[i].preset);
        const struct tl_arch *arch = p->arch;
        struct tl_arch_spec s;
        struct tl_error err;
        int64_t n = 0;
        ck_assert_msg(tl_arch_read_config(&s, &arch, p->config, strlen(p->config), NULL, NULL, &err) == TL_OK, "%s",
                      err.msg);
        for (int w = 0; w < TL_WT_COUNT; w++) {
            struct tl_weight_shape shape = tl_weight_shape(&s, (enum tl_weight)w);
            bool in_layer = w < TL_WT_LAYER_COUNT;
            int64_t rows = 0;
            if (w == TL_WT_CODA_NORM && s.c2c_is_final_norm)
                continue;
            for (int part = 0; part < shape.n_parts; part++)
                rows += shape.rows[part];
            for (int layer = in_layer ? 0 : -1; layer < (in_layer ? tl_n_layers(&s) : 0); layer++)
                if (tl_weight_needed(&s, (enum tl_weight)w, layer))
                    n += rows * (shape.n_in ? shape.n_in : 1);
        }
        ck_assert_msg(n == sizes[i].parameters, "%s has %lld parameters", sizes[i].preset, (long long)n);
    }
}
END_TEST

/* ---- our own layout ---- */

START_TEST(a_spec_written_as_config_reads_back_the_same)
{
    struct tl_arch_spec s, back;
    const struct tl_arch *arch = &tl_arch_tinyloop;
    char *text;
    memset(&s, 0, sizeof(s));
    s = (struct tl_arch_spec){
        .model_type = "tinyloop",
        .d_model = 48,
        .n_heads = 6,
        .n_kv_heads = 3,
        .d_head = 10,
        .d_ff = 33,
        .vocab_size = 500,
        .n_prelude = 1,
        .n_core = 2,
        .n_coda = 3,
        .loops_default = 3,
        .loops_trained = 5,
        .loops_max = 9,
        .max_positions = 77,
        .norm_eps = 1.2345678e-6f,
        .embed_scale = 19.595917f,
        .norms = TL_N1 | TL_N3 | TL_N6,
        .inject = TL_INJECT_DIAG,
        .inject_norm = true,
        .state_init = TL_STATE_TRUNCNORM,
        .state_std = 0.1f,
        .skip_first_inject = true,
        .loop_end_norm = true,
        .core_to_coda = TL_C2C_LINEAR,
        .final_norm = false,
        .rope = TL_ROPE_PAIR,
        .rope_base = 12345.678f,
        .rope_scaling = {8.5f, 1, 4, 4096},
        .qk_norm = TL_QKNORM_HEAD_AFTER_ROPE,
        .qk_bias = true,
        .qkv_bias = true,
        .value_embeds = true,
        .mlp = TL_MLP_RELU2,
        .tied_head = true,
        .exit = TL_EXIT_LATENT_DIFF,
        .bos_token_id = 3,
        .eos_token_id = 4,
        .n_stop_ids = 2,
        .stop_ids = {4, 9},
    };
    memset(&back, 0xAA, sizeof(back));
    ck_assert_int_eq(tl_spec_write(&text, &s, "int4", NULL), TL_OK);
    struct tl_error err;
    enum tl_status st = tl_arch_read_config(&back, &arch, text, strlen(text), NULL,
                                            &(struct tl_arch_params){.start_state_random = true}, &err);
    ck_assert_msg(st == TL_OK, "%s", err.msg);
    ck_assert_str_eq(back.model_type, s.model_type);
    memset(back.model_type, 0, sizeof(back.model_type));
    memset(s.model_type, 0, sizeof(s.model_type));
    char *again;
    ck_assert_int_eq(tl_spec_write(&again, &back, "int4", NULL), TL_OK);
    ck_assert_str_eq(text, again);
    ck_assert(back.norm_eps == s.norm_eps && back.embed_scale == s.embed_scale && back.rope_base == s.rope_base);
    tl_free(text);
    tl_free(again);
}
END_TEST

static const struct {
    const char *from, *to, *says;
} config_mistakes[] = {
    {"\"vocab_size\"", "\"vocab_sise\"", "'vocab_sise' is not a key"},
    {"\"hidden_size\": 64", "\"_x\": 64", "'hidden_size' is missing"},
    {"\"hidden_size\": 64", "\"hidden_size\": 64.5",
     "'hidden_size' is 64.5, allowed are whole numbers from 1 to 65536"},
    {"\"hidden_size\": 64", "\"hidden_size\": 0", "'hidden_size' is 0, allowed are 1 to 65536"},
    {"\"hidden_size\": 64", "\"hidden_size\": \"64\"", "'hidden_size' is \"64\", allowed are whole numbers from 1 to"},
    {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3", "4 attention heads cannot share 3"},
    {"\"head_dim\": 16", "\"head_dim\": 15", "the head width is 15, it must be even"},
    {"\"loops_default\": 4", "\"loops_default\": 17", "the default of loops is 17, allowed are 1 to 16"},
    {"\"loops_max\": 16", "\"loops_max\": 65", "'loops_max' is 65, allowed are 1 to 64"},
    {"\"concat_linear\"", "\"concat\"", "\"none\", \"concat_linear\", \"diag\""},
    {"\"state_init\": \"zero\"", "\"state_init\": \"truncnorm\", \"state_std\": 0", "state_std' is there twice"},
    {"\"concat_linear\"", "\"none\"", "without injection the state must start as the prelude's output"},
    {"\"norms\": [\"n1\"", "\"norms\": [\"n7\"", "'norms' holds \"n7\""},
    {"\"norms\": [\"n1\", \"n4\"]", "\"norms\": 5", "'norms' is not an array"},
    {"\"eos_token_id\": -1", "\"eos_token_id\": 300", "eos_token_id is 300, allowed are -1 to 299"},
    {"\"stop_token_ids\": []", "\"stop_token_ids\": [1,2,3,4,5,6,7,8,9]", "more than 8 entries"},
    {"\"stop_token_ids\": []", "\"stop_token_ids\": [301]", "a stop id is 301, allowed are 0 to 299"},
    {"\"quantization\": \"none\"", "\"quantization\": \"int3\"", "\"none\", \"int8\", \"int4\""},
    {"\"rope_scaling\": null", "\"rope_scaling\": {\"factor\": 8}", "'low_freq_factor' is missing"},
    {"\"final_norm\": true", "\"final_norm\": 1", "'final_norm' is 1, allowed are true and false"},
    {"\"intermediate_size\": 160", "\"intermediate_size\": 161", "expected is [161, 64]"},
    {"\"coda_layers\": 1", "\"coda_layers\": 2", "'model.coda.1.n1.weight' is missing"},
    {"\"coda_layers\": 1", "\"coda_layers\": 0", "'model.coda.0.attn.k.weight' has no place"},
    {"\"loop_end_norm\": true", "\"loop_end_norm\": false", "'model.loop_norm.weight' has no place"},
    {"\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false", "'lm_head.weight' is missing"},
    {"{", "{{", "not valid JSON"},
};

START_TEST(a_mistake_in_our_own_config_is_named)
{
    ck_assert_int_eq(synth("tiny", "f32", "own", NULL), 0);
    edit("config.json", config_mistakes[_i].from, config_mistakes[_i].to);
    expect_refusal(TL_ERR_BAD_FILE, config_mistakes[_i].says);
}
END_TEST

START_TEST(private_and_descriptive_keys_are_ignored)
{
    struct tl_arch_binding *b;
    ck_assert_int_eq(synth("tiny", "f32", "own", NULL), 0);
    edit("config.json", "{",
         "{\"x_author\":\"me\",\"_name_or_path\":\"p\",\"name\":\"n\",\"torch_dtype\":\"float32\",");
    must_open(&b, model);
    tl_arch_free(b);
}
END_TEST

/* ---- foreign configs ---- */

static const struct {
    const char *preset, *set;
    enum tl_status status;
    const char *says;
} foreign_mistakes[] = {
    {"tiny-ouro", "use_sliding_window=true", TL_ERR_UNSUPPORTED, "'use_sliding_window' is set"},
    {"tiny-ouro", "hidden_act=gelu", TL_ERR_BAD_FILE, "'hidden_act' is \"gelu\""},
    {"tiny-ouro", "layer_types=[\"full_attention\",\"sliding_attention\"]", TL_ERR_BAD_FILE, "'layer_types'"},
    {"tiny-ouro", "total_ut_steps=65", TL_ERR_BAD_FILE, "'total_ut_steps' is 65"},
    {"tiny-ouro", "rope_scaling={\"rope_type\":\"yarn\",\"factor\":2}", TL_ERR_BAD_FILE, "\"yarn\""},
    {"tiny-huginn", "bias=true", TL_ERR_UNSUPPORTED, "'bias' is set"},
    {"tiny-huginn", "test_time_noise=0.1", TL_ERR_UNSUPPORTED, "'test_time_noise' is set"},
    {"tiny-huginn", "injection_type=add", TL_ERR_BAD_FILE, "'injection_type' is \"add\""},
    {"tiny-retrofit-llama", "initial_state_mode=magic", TL_ERR_BAD_FILE, "'initial_state_mode'"},
    {"tiny-nanbeige", "enable_double_loop_split=true", TL_ERR_UNSUPPORTED, "'enable_double_loop_split' is set"},
    {"tiny-nanbeige", "loop_share_kv=true", TL_ERR_UNSUPPORTED, "'loop_share_kv' is set"},
    {"tiny-nanbeige", "enable_depth_attention=true", TL_ERR_UNSUPPORTED, "'enable_depth_attention' is set"},
    {"tiny-nanbeige", "enable_hyper_connections=4", TL_ERR_UNSUPPORTED, "'enable_hyper_connections' is set"},
    {"tiny-nanbeige", "skip_loop_final_norm=true", TL_ERR_UNSUPPORTED, "'skip_loop_final_norm' is set"},
    {"tiny-llama", "attention_bias=true", TL_ERR_UNSUPPORTED, "'attention_bias' is set"},
    {"tiny-qwen2", "quantization_config={\"bits\":4}", TL_ERR_UNSUPPORTED, "'quantization_config' is set"},
    {"tiny-llama", "model_type=mamba", TL_ERR_UNSUPPORTED, "model_type 'mamba' is not supported"},
};

START_TEST(flags_that_are_not_supported_are_refused_by_name)
{
    const struct tl_preset *p = tl_preset_find(foreign_mistakes[_i].preset);
    struct tl_arch_spec s;
    const struct tl_arch *arch = p->arch;
    struct tl_error err = {0};
    const char *set = foreign_mistakes[_i].set, *eq = strchr(set, '=');
    char key[64];
    snprintf(key, sizeof(key), "%.*s", (int)(eq - set), set);
    cJSON *json = cJSON_Parse(p->config), *value = cJSON_Parse(eq + 1);
    cJSON_DeleteItemFromObjectCaseSensitive(json, key);
    cJSON_AddItemToObject(json, key, value ? value : cJSON_CreateString(eq + 1));
    char *text = cJSON_PrintUnformatted(json);
    ck_assert_int_eq(tl_arch_read_config(&s, &arch, text, strlen(text), NULL, NULL, &err), foreign_mistakes[_i].status);
    ck_assert_msg(strstr(err.msg, foreign_mistakes[_i].says) != NULL, "'%s' does not say '%s'", err.msg,
                  foreign_mistakes[_i].says);
    cJSON_free(text);
    cJSON_Delete(json);
}
END_TEST

START_TEST(flags_that_are_switched_off_and_unknown_keys_of_others_are_fine)
{
    struct tl_arch_binding *b;
    ck_assert_int_eq(synth("tiny-nanbeige", "f32", "released", NULL), 0);
    edit("config.json", "{", "{\"loop_share_kv\":false,\"enable_ngram\":null,\"ngram_sizes\":[],\"whatever\":17,");
    must_open(&b, model);
    ck_assert(b->spec.loops_default == 2 && b->spec.loops_max == 2 && b->spec.loop_end_norm && !b->spec.final_norm);
    tl_arch_free(b);
}
END_TEST

START_TEST(retrofits_can_start_from_the_embedding_without_the_adapter)
{
    struct tl_arch_binding *b;
    ck_assert_int_eq(synth("tiny-retrofit-llama", "f32", "released", "initial_state_mode=skip-adapter"), 0);
    must_open(&b, model);
    ck_assert(b->spec.state_init == TL_STATE_PRELUDE && b->spec.skip_first_inject);
    tl_arch_free(b);
}
END_TEST

START_TEST(stop_ids_come_from_config_and_generation_config)
{
    struct tl_arch_binding *b;
    const char more[] = "{\"eos_token_id\":[7,9,11]}";
    ck_assert_int_eq(synth("tiny-llama", "f32", "released", "eos_token_id=[7,8]"), 0);
    temp_file(model, "generation_config.json", more, strlen(more));
    must_open(&b, model);
    ck_assert_int_eq(b->spec.eos_token_id, 7);
    ck_assert_int_eq(b->spec.n_stop_ids, 4);
    ck_assert(b->spec.stop_ids[0] == 7 && b->spec.stop_ids[1] == 8 && b->spec.stop_ids[2] == 9 &&
              b->spec.stop_ids[3] == 11);
    tl_arch_free(b);
    temp_file(model, "generation_config.json", "{\"eos_token_id\":300}", 20);
    expect_refusal(TL_ERR_BAD_FILE, "'eos_token_id' is 300");
}
END_TEST

/* ---- tensors that do not fit: names and types are edited in place, with equal lengths ---- */

static const struct {
    const char *preset, *to, *from, *edited, *says;
} tensor_mistakes[] = {
    {"tiny", "f32", "model.core.1.attn.k.weight", "model.core.1.attn.K.weight",
     "'model.core.1.attn.k.weight' is missing"},
    {"tiny", "f32", "\"shape\":[32,64]", "\"shape\":[64,32]", "has shape [64, 32], expected is [32, 64]"},
    {"tiny", "f32", "\"dtype\":\"F32\",\"shape\":[32,64]", "\"dtype\":\"I32\",\"shape\":[32,64]",
     "has dtype I32, which is no weight type"},
    {"tiny", "f32", "\"dtype\":\"F32\",\"shape\":[64]", "\"dtype\":\"I32\",\"shape\":[64]",
     "has dtype I32, expected is F32, BF16 or F16"},
    {"tiny", "int8", "model.core.0.attn.o.weight_scale", "model.core.0.attn.o.weight_scalE",
     "'model.core.0.attn.o.weight_scale' is missing"},
    {"tiny", "int4", "model.core.0.attn.o.weight_gscale", "model.core.0.attn.o.weight_gscalE",
     "'model.core.0.attn.o.weight_gscale' is missing"},
    {"tiny-huginn", "f32", "transformer.core_block.0.norm_3.weight", "transformer.core_block.0.norm_9.weight",
     "qk_bias"},
};

START_TEST(a_tensor_that_does_not_fit_is_named)
{
    ck_assert_int_eq(synth(tensor_mistakes[_i].preset, tensor_mistakes[_i].to, "released", NULL), 0);
    edit("model.safetensors", tensor_mistakes[_i].from, tensor_mistakes[_i].edited);
    expect_refusal(TL_ERR_BAD_FILE, tensor_mistakes[_i].says);
}
END_TEST

START_TEST(parts_of_one_matrix_must_share_their_type)
{
    ck_assert_int_eq(synth("tiny", "bf16", "own", NULL), 0);
    edit("model.safetensors", "\"model.core.0.attn.k.weight\":{\"dtype\":\"BF16\"",
         "\"model.core.0.attn.k.weight\":{\"dtype\":\"F16\" ");
    expect_refusal(TL_ERR_BAD_FILE, "belong together, but one is bf16 and the other f32");
}
END_TEST

START_TEST(a_pipe_in_place_of_a_file_is_refused_without_waiting_for_its_writer)
{
    static const char *const names[] = {"config.json", "model.safetensors"};
    char path[TEMP_PATH + 40];
    ck_assert_int_eq(synth("tiny", "f32", "own", NULL), 0);
    snprintf(path, sizeof(path), "%s/%s", model, names[_i]);
    ck_assert_int_eq(unlink(path), 0);
    ck_assert_int_eq(mkfifo(path, 0600), 0);
    expect_refusal(TL_ERR_BAD_FILE, "is not a regular file");
}
END_TEST

START_TEST(a_missing_config_or_directory_is_said_plainly)
{
    expect_refusal(TL_ERR_NOT_FOUND, "there is no file");
    ck_assert_int_eq(synth("tiny", "f32", "own", NULL), 0);
    edit("config.json", "\"model_type\": \"tinyloop\"", "\"model_type\": 5");
    expect_refusal(TL_ERR_BAD_FILE, "'model_type' is 5, allowed are strings");
}
END_TEST

#ifdef TL_TEST_HOOKS
START_TEST(a_failed_allocation_leaves_nothing_behind)
{
    cJSON_Hooks hooks = {tl_malloc, tl_free};
    enum tl_status st = TL_ERR_NO_HOST_MEMORY;
    struct tl_arch_binding *b;
    cJSON_InitHooks(&hooks);
    int64_t live = tl_mem_live();
    int n = 1;
    for (; st != TL_OK; n++) {
        tl_mem_fail_at(n);
        st = tl_arch_open(&b, "tests/golden/huginn-tiny", NULL, NULL);
        tl_mem_fail_at(0);
        if (st == TL_OK)
            break;
        ck_assert_int_eq(st, TL_ERR_NO_HOST_MEMORY);
        ck_assert_ptr_null(b);
        ck_assert_int_eq(tl_mem_live(), live);
    }
    ck_assert_int_gt(n, 100);
    tl_arch_free(b);
    ck_assert_int_eq(tl_mem_live(), live);
    cJSON_InitHooks(NULL);
}
END_TEST
#endif

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

int main(void)
{
    Suite *suite = suite_create("arch");
    TCase *tc = tcase_create("arch");
    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_loop_test(tc, every_golden_tensor_is_used_once_or_known_to_be_unused, 0, COUNT(golden));
    tcase_add_test(tc, ouro_is_one_looped_stack_with_a_norm_and_a_gate_per_loop);
    tcase_add_test(tc, the_three_raven_blocks_are_told_apart_by_their_tensors);
    tcase_add_test(tc, a_random_start_state_is_zero_unless_asked_for);
    tcase_add_loop_test(tc, every_preset_opens_in_both_layouts_with_the_same_spec, 0, n_presets());
    tcase_add_test(tc, the_shapes_of_the_benchmarks_have_the_right_size);
    tcase_add_test(tc, a_spec_written_as_config_reads_back_the_same);
    tcase_add_loop_test(tc, a_mistake_in_our_own_config_is_named, 0, COUNT(config_mistakes));
    tcase_add_test(tc, private_and_descriptive_keys_are_ignored);
    tcase_add_loop_test(tc, flags_that_are_not_supported_are_refused_by_name, 0, COUNT(foreign_mistakes));
    tcase_add_test(tc, flags_that_are_switched_off_and_unknown_keys_of_others_are_fine);
    tcase_add_test(tc, retrofits_can_start_from_the_embedding_without_the_adapter);
    tcase_add_test(tc, stop_ids_come_from_config_and_generation_config);
    tcase_add_loop_test(tc, a_tensor_that_does_not_fit_is_named, 0, COUNT(tensor_mistakes));
    tcase_add_test(tc, parts_of_one_matrix_must_share_their_type);
    tcase_add_test(tc, a_missing_config_or_directory_is_said_plainly);
    tcase_add_loop_test(tc, a_pipe_in_place_of_a_file_is_refused_without_waiting_for_its_writer, 0, 2);
#ifdef TL_TEST_HOOKS
    tcase_add_test(tc, a_failed_allocation_leaves_nothing_behind);
#endif
    suite_add_tcase(suite, tc);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int n_failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return n_failed ? 1 : 0;
}
