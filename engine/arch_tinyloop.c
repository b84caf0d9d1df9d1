/* Our own layout, model_type "tinyloop": every knob of struct tl_arch_spec is a key of config.json.
 *
 * The table below is the format: reading, writing and refusing unknown keys all go by it. Beside it there are "norms" (a list
 * of "n1" .. "n6"), "rope_scaling" (null, or the llama3 object), "stop_token_ids", and "quantization" ("none", "int8", "int4":
 * what `tinyloop quantize` made; the tensors themselves say what they are). Keys that begin with "x_" or "_" are ignored.
 *
 * Tensors, with G = prelude, core or coda and {i} counted within it:
 *   model.embed_tokens.weight [V, D]; lm_head.weight [V, D], absent if tied
 *   model.G.{i}.n1.weight .. n6.weight [D], those in "norms"
 *   model.G.{i}.attn.{q,k,v,o}.weight, model.G.{i}.mlp.{gate,up,down}.weight; relu2 has no gate
 *   model.G.{i}.attn.{q,k,v}.bias (qkv_bias); model.G.{i}.attn.{q_bias,k_bias} (qk_bias, before norms and rope)
 *   model.G.{i}.attn.{q_norm,k_norm}.weight (qk_norm full: [H d], [G d]; head: [d]; head_after_rope has no weights)
 *   model.G.{i}.attn.value_embed.weight [V, G d], attn.value_gate.weight [G, 32] (value_embeds, layers at odd places over all)
 *   model.adapter.weight [D, 2D], state columns first (concat_linear); model.inject_norm.weight [D]
 *   model.inject.b.weight [D, D], model.inject.decay, model.inject.gain [D] (diag: x = decay x + gain (B e))
 *   model.loop_norm.weight [D]; model.coda_norm.weight [D] (core_to_coda norm); model.coda_in.weight [D, D] (linear)
 *   model.final_norm.weight [D]; model.gate.weight [D], model.gate.bias [1] (exit gate_cdf)
 * A matrix X.weight may be F32, F16, BF16, I8 with X.weight_scale, or X.weight_q4 with X.weight_gscale and X.weight_scale. */
#include "arch_bind.h"
#include "mem.h"

#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum kind { INT, FLOAT, BOOL, ENUM };

struct field {
    const char *key;
    enum kind kind;
    size_t offset;
    double min, max;          /* INT, FLOAT */
    const char *const *names; /* ENUM */
    int n_names;
    bool required; /* else the value of the defaults below */
};

static const char *const inject_names[] = {"none", "concat_linear", "diag"};
static const char *const state_names[] = {"prelude", "zero", "truncnorm"};
static const char *const c2c_names[] = {"none", "norm", "linear"};
static const char *const rope_names[] = {"none", "half", "pair"};
static const char *const qk_norm_names[] = {"none", "full", "head", "head_after_rope"};
static const char *const mlp_names[] = {"silu_gated", "relu2"};
static const char *const exit_names[] = {"none", "gate_cdf", "latent_diff"};
static const char *const quant_names[] = {"none", "int8", "int4"};
static const char *const norm_names[] = {"n1", "n2", "n3", "n4", "n5", "n6"};

#define AT(member)   offsetof(struct tl_arch_spec, member)
#define NAMES(array) 0, 0, array, (int)(sizeof(array) / sizeof(array[0]))

static const struct field fields[] = {
    {"vocab_size", INT, AT(vocab_size), 1, 1 << 24, NULL, 0, true},
    {"hidden_size", INT, AT(d_model), 1, 65536, NULL, 0, true},
    {"intermediate_size", INT, AT(d_ff), 1, 131072, NULL, 0, true},
    {"num_attention_heads", INT, AT(n_heads), 1, 1024, NULL, 0, true},
    {"num_key_value_heads", INT, AT(n_kv_heads), 1, 1024, NULL, 0, false},
    {"head_dim", INT, AT(d_head), 2, TL_HEAD_DIM_MAX, NULL, 0, false},
    {"prelude_layers", INT, AT(n_prelude), 0, 1024, NULL, 0, true},
    {"core_layers", INT, AT(n_core), 1, 1024, NULL, 0, true},
    {"coda_layers", INT, AT(n_coda), 0, 1024, NULL, 0, true},
    {"loops_default", INT, AT(loops_default), 1, TL_LOOPS_MAX, NULL, 0, true},
    {"loops_trained", INT, AT(loops_trained), 1, TL_LOOPS_MAX, NULL, 0, false},
    {"loops_max", INT, AT(loops_max), 1, TL_LOOPS_MAX, NULL, 0, false},
    {"max_position_embeddings", INT, AT(max_positions), 1, 1 << 24, NULL, 0, true},
    {"norm_eps", FLOAT, AT(norm_eps), 0, 1, NULL, 0, false},
    {"embed_scale", FLOAT, AT(embed_scale), 1e-6, 1e6, NULL, 0, false},
    {"inject", ENUM, AT(inject), NAMES(inject_names), false},
    {"inject_norm", BOOL, AT(inject_norm), 0, 0, NULL, 0, false},
    {"state_init", ENUM, AT(state_init), NAMES(state_names), false},
    {"state_std", FLOAT, AT(state_std), 0, 1e9, NULL, 0, false},
    {"skip_first_inject", BOOL, AT(skip_first_inject), 0, 0, NULL, 0, false},
    {"loop_end_norm", BOOL, AT(loop_end_norm), 0, 0, NULL, 0, false},
    {"core_to_coda", ENUM, AT(core_to_coda), NAMES(c2c_names), false},
    {"final_norm", BOOL, AT(final_norm), 0, 0, NULL, 0, false},
    {"rope", ENUM, AT(rope), NAMES(rope_names), false},
    {"rope_base", FLOAT, AT(rope_base), 1, 1e12, NULL, 0, false},
    {"qk_norm", ENUM, AT(qk_norm), NAMES(qk_norm_names), false},
    {"qk_bias", BOOL, AT(qk_bias), 0, 0, NULL, 0, false},
    {"qkv_bias", BOOL, AT(qkv_bias), 0, 0, NULL, 0, false},
    {"value_embeds", BOOL, AT(value_embeds), 0, 0, NULL, 0, false},
    {"mlp", ENUM, AT(mlp), NAMES(mlp_names), false},
    {"tie_word_embeddings", BOOL, AT(tied_head), 0, 0, NULL, 0, false},
    {"exit", ENUM, AT(exit), NAMES(exit_names), false},
    {"bos_token_id", INT, AT(bos_token_id), -1, (1 << 24) - 1, NULL, 0, false},
    {"eos_token_id", INT, AT(eos_token_id), -1, (1 << 24) - 1, NULL, 0, false},
};
#define N_FIELDS (sizeof(fields) / sizeof(fields[0]))

static const char *const other_keys[] = {
    "model_type",           "norms",         "rope_scaling", "stop_token_ids", "quantization",
    "transformers_version", "architectures", "torch_dtype",  "name",
};

/* Enumerations are stored as unsigned int by every compiler that this builds with. */
_Static_assert(sizeof(enum tl_inject) == sizeof(int), "enum fields are read and written as int");

static int get_int(const struct tl_arch_spec *s, const struct field *f)
{
    int v;
    memcpy(&v, (const char *)s + f->offset, sizeof(v));
    return v;
}

static void set_int(struct tl_arch_spec *s, const struct field *f, int v)
{
    memcpy((char *)s + f->offset, &v, sizeof(v));
}

static void refuse_unknown_keys(struct tl_json_reader *r)
{
    const cJSON *v;
    cJSON_ArrayForEach(v, r->obj)
    {
        bool known = v->string[0] == '_' || !strncmp(v->string, "x_", 2);
        for (size_t i = 0; i < N_FIELDS && !known; i++)
            known = !strcmp(fields[i].key, v->string);
        for (size_t i = 0; i < sizeof(other_keys) / sizeof(other_keys[0]) && !known; i++)
            known = !strcmp(other_keys[i], v->string);
        if (!known)
            tl_json_fail(r, v->string, "is not a key of model_type \"tinyloop\"");
    }
}

static void read_norms(struct tl_arch_spec *s, struct tl_json_reader *r)
{
    const cJSON *list = tl_json_value(r, "norms"), *item;
    if (!list) {
        s->norms = TL_N1 | TL_N4;
        return;
    }
    if (!cJSON_IsArray(list))
        tl_json_fail(r, "norms", "is not an array");
    cJSON_ArrayForEach(item, list)
    {
        const char *name = cJSON_IsString(item) ? item->valuestring : "";
        int i = 0;
        while (i < 6 && strcmp(name, norm_names[i]) != 0)
            i++;
        if (i == 6)
            tl_json_fail(r, "norms", "holds \"%.20s\", allowed are \"n1\" to \"n6\"", name);
        else
            s->norms |= 1u << i;
    }
}

static void read_scaling(struct tl_arch_spec *s, struct tl_json_reader *r)
{
    struct tl_json_reader o;
    if (!tl_json_object(r, "rope_scaling", &o))
        return;
    s->rope_scaling.factor = (float)tl_json_num(&o, "factor", 1, 1e6);
    s->rope_scaling.low_freq_factor = (float)tl_json_num(&o, "low_freq_factor", 1e-6, 1e6);
    s->rope_scaling.high_freq_factor = (float)tl_json_num(&o, "high_freq_factor", 1e-6, 1e6);
    s->rope_scaling.original_max_positions = (int)tl_json_int(&o, "original_max_position_embeddings", 1, 1 << 24);
    if (r->st == TL_OK)
        r->st = o.st;
}

static void read(struct tl_arch_spec *s, struct tl_json_reader *r, const struct tl_tensors *ts)
{
    int64_t ids[TL_STOP_IDS_MAX];
    (void)ts;
    refuse_unknown_keys(r);
    s->norm_eps = 1e-6f;
    s->embed_scale = 1;
    s->rope = TL_ROPE_HALF;
    s->rope_base = 10000;
    s->final_norm = true;
    s->bos_token_id = s->eos_token_id = -1;
    for (size_t i = 0; i < N_FIELDS; i++) {
        const struct field *f = &fields[i];
        if (!f->required && !tl_json_has(r, f->key))
            continue;
        switch (f->kind) {
        case INT: set_int(s, f, (int)tl_json_int(r, f->key, (int64_t)f->min, (int64_t)f->max)); break;
        case ENUM: set_int(s, f, tl_json_enum(r, f->key, f->names, f->n_names)); break;
        case BOOL: *(bool *)((char *)s + f->offset) = tl_json_bool(r, f->key); break;
        case FLOAT: {
            float v = (float)tl_json_num(r, f->key, f->min, f->max);
            memcpy((char *)s + f->offset, &v, sizeof(v));
        }
        }
    }
    if (!tl_json_has(r, "num_key_value_heads"))
        s->n_kv_heads = s->n_heads;
    if (!tl_json_has(r, "head_dim") && s->n_heads)
        s->d_head = s->d_model / s->n_heads;
    if (!tl_json_has(r, "loops_trained"))
        s->loops_trained = s->loops_default;
    if (!tl_json_has(r, "loops_max"))
        s->loops_max = s->loops_default > s->loops_trained ? s->loops_default : s->loops_trained;
    if (!tl_json_has(r, "state_init"))
        s->state_init = s->inject == TL_INJECT_NONE ? TL_STATE_PRELUDE : TL_STATE_ZERO;
    if (s->state_init == TL_STATE_TRUNCNORM && s->state_std == 0)
        tl_json_fail(r, "state_std", "must be given for a truncnorm start state");
    read_norms(s, r);
    read_scaling(s, r);
    if (tl_json_has(r, "quantization"))
        tl_json_enum(r, "quantization", quant_names, 3);
    if (s->eos_token_id >= 0)
        tl_arch_add_stop_id(s, s->eos_token_id);
    int n = tl_json_ints(r, "stop_token_ids", 0, (1 << 24) - 1, ids, TL_STOP_IDS_MAX);
    for (int i = 0; i < n; i++)
        tl_arch_add_stop_id(s, ids[i]);
}

/* The shortest of 6 to 9 digits that reads back as the same float. */
static void print_float(char *buf, size_t n, float v)
{
    for (int digits = 6; digits <= 9; digits++) {
        float back = 0;
        snprintf(buf, n, "%.*g", digits, (double)v);
        if (sscanf(buf, "%f", &back) == 1 && back == v)
            return;
    }
}

enum tl_status tl_spec_write(char **out, const struct tl_arch_spec *s, const char *quantization, struct tl_error *err)
{
    size_t cap = 8192, n = 0; /* the table is fixed, so is the most that it can print */
    char number[32], *text = tl_malloc(cap);
    const struct tl_rope_scaling *sc = &s->rope_scaling;
    *out = NULL;
    if (!text)
        return tl_fail_host_memory(err, cap);
#define PUT(...) n += (size_t)snprintf(text + n, cap - n, __VA_ARGS__)
    PUT("{\n  \"model_type\": \"tinyloop\",\n  \"architectures\": [\"TinyLoopForCausalLM\"]");
    for (size_t i = 0; i < N_FIELDS; i++) {
        const struct field *f = &fields[i];
        if (f->kind == FLOAT) {
            float v;
            memcpy(&v, (const char *)s + f->offset, sizeof(v));
            print_float(number, sizeof(number), v);
        }
        if (f->kind == INT)
            PUT(",\n  \"%s\": %d", f->key, get_int(s, f));
        else if (f->kind == FLOAT)
            PUT(",\n  \"%s\": %s", f->key, number);
        else if (f->kind == BOOL)
            PUT(",\n  \"%s\": %s", f->key, *(const bool *)((const char *)s + f->offset) ? "true" : "false");
        else
            PUT(",\n  \"%s\": \"%s\"", f->key, f->names[get_int(s, f)]);
    }
    PUT(",\n  \"norms\": [");
    for (int i = 0, first = 1; i < 6; i++)
        if (s->norms & (1u << i)) {
            PUT("%s\"%s\"", first ? "" : ", ", norm_names[i]);
            first = 0;
        }
    PUT("],\n  \"rope_scaling\": ");
    if (sc->factor != 0)
        PUT("{\"rope_type\": \"llama3\", \"factor\": %.9g, \"low_freq_factor\": %.9g, \"high_freq_factor\": %.9g, "
            "\"original_max_position_embeddings\": %d}",
            (double)sc->factor, (double)sc->low_freq_factor, (double)sc->high_freq_factor, sc->original_max_positions);
    else
        PUT("null");
    PUT(",\n  \"stop_token_ids\": [");
    for (int i = 0; i < s->n_stop_ids; i++)
        PUT("%s%d", i ? ", " : "", s->stop_ids[i]);
    PUT("],\n  \"quantization\": \"%s\"\n}\n", quantization);
#undef PUT
    TL_ASSERT(n < cap);
    *out = text;
    return TL_OK;
}

static const struct tl_weight_name names[] = {
    {TL_WT_N1, {"n1.weight"}},
    {TL_WT_N2, {"n2.weight"}},
    {TL_WT_N3, {"n3.weight"}},
    {TL_WT_N4, {"n4.weight"}},
    {TL_WT_N5, {"n5.weight"}},
    {TL_WT_N6, {"n6.weight"}},
    {TL_WT_QKV, {"attn.q.weight", "attn.k.weight", "attn.v.weight"}},
    {TL_WT_O, {"attn.o.weight"}},
    {TL_WT_UP, {"mlp.gate.weight", "mlp.up.weight"}},
    {TL_WT_DOWN, {"mlp.down.weight"}},
    {TL_WT_Q_NORM, {"attn.q_norm.weight"}},
    {TL_WT_K_NORM, {"attn.k_norm.weight"}},
    {TL_WT_QK_BIAS, {"attn.q_bias", "attn.k_bias"}},
    {TL_WT_QKV_BIAS, {"attn.q.bias", "attn.k.bias", "attn.v.bias"}},
    {TL_WT_VALUE_EMBED, {"attn.value_embed.weight"}},
    {TL_WT_VALUE_GATE, {"attn.value_gate.weight"}},
    {TL_WT_EMBED, {"model.embed_tokens.weight"}},
    {TL_WT_INJECT_NORM, {"model.inject_norm.weight"}},
    {TL_WT_ADAPTER, {"model.adapter.weight"}},
    {TL_WT_INJECT_B, {"model.inject.b.weight"}},
    {TL_WT_INJECT_DECAY, {"model.inject.decay"}},
    {TL_WT_INJECT_GAIN, {"model.inject.gain"}},
    {TL_WT_LOOP_NORM, {"model.loop_norm.weight"}},
    {TL_WT_GATE_W, {"model.gate.weight"}},
    {TL_WT_GATE_B, {"model.gate.bias"}},
    {TL_WT_CODA_IN, {"model.coda_in.weight"}},
    {TL_WT_CODA_NORM, {"model.coda_norm.weight"}},
    {TL_WT_FINAL_NORM, {"model.final_norm.weight"}},
    {TL_WT_HEAD, {"lm_head.weight"}},
};

const struct tl_arch tl_arch_tinyloop = {
    .model_type = "tinyloop",
    .about = "TinyLoop's own layout",
    .read = read,
    .group = {"model.prelude.", "model.core.", "model.coda."},
    .names = names,
    .n_names = (int)(sizeof(names) / sizeof(names[0])),
};
