#include "arch.h"

#include "arch_bind.h"

#include <cjson/cJSON.h>
#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

static const struct tl_arch *const archs[] = {
    &tl_arch_tinyloop, &tl_arch_ouro,  &tl_arch_huginn, &tl_arch_retrofit_olmo, &tl_arch_retrofit_llama,
    &tl_arch_nanbeige, &tl_arch_llama, &tl_arch_qwen2,  &tl_arch_qwen3,
};
#define N_ARCHS (sizeof(archs) / sizeof(archs[0]))

const char *tl_wtype_name(enum tl_wtype t)
{
    static const char *const names[TL_W_COUNT] = {"f32", "bf16", "int8", "int4"};
    return (unsigned)t < TL_W_COUNT ? names[t] : "?";
}

bool tl_wtype_parse(const char *name, enum tl_wtype *out)
{
    for (int t = 0; t < TL_W_COUNT; t++)
        if (!strcmp(name, tl_wtype_name((enum tl_wtype)t))) {
            *out = (enum tl_wtype)t;
            return true;
        }
    return false;
}

/* ---- what a spec needs ---- */

bool tl_weight_needed(const struct tl_arch_spec *s, enum tl_weight w, int layer)
{
    switch (w) {
    case TL_WT_QKV:
    case TL_WT_O:
    case TL_WT_UP:
    case TL_WT_DOWN:
    case TL_WT_EMBED: return true;
    case TL_WT_Q_NORM:
    case TL_WT_K_NORM: return s->qk_norm == TL_QKNORM_FULL || s->qk_norm == TL_QKNORM_HEAD;
    case TL_WT_QK_BIAS: return s->qk_bias;
    case TL_WT_QKV_BIAS: return s->qkv_bias;
    case TL_WT_VALUE_EMBED:
    case TL_WT_VALUE_GATE: return tl_has_value_embed(s, layer);
    case TL_WT_INJECT_NORM: return s->inject_norm;
    case TL_WT_ADAPTER: return s->inject == TL_INJECT_CONCAT_LINEAR;
    case TL_WT_INJECT_B:
    case TL_WT_INJECT_DECAY:
    case TL_WT_INJECT_GAIN: return s->inject == TL_INJECT_DIAG;
    case TL_WT_LOOP_NORM: return s->loop_end_norm;
    case TL_WT_GATE_W:
    case TL_WT_GATE_B: return s->exit == TL_EXIT_GATE_CDF;
    case TL_WT_CODA_IN: return s->core_to_coda == TL_C2C_LINEAR;
    case TL_WT_CODA_NORM: return s->core_to_coda == TL_C2C_NORM;
    case TL_WT_FINAL_NORM: return s->final_norm;
    case TL_WT_HEAD: return !s->tied_head;
    default: return w <= TL_WT_N6 && (s->norms & (1u << w));
    }
}

struct tl_weight_shape tl_weight_shape(const struct tl_arch_spec *s, enum tl_weight w)
{
    int64_t d = s->d_model, q = tl_q_dim(s), kv = tl_kv_dim(s), f = s->d_ff;
    switch (w) {
    case TL_WT_QKV: return (struct tl_weight_shape){3, {q, kv, kv}, d};
    case TL_WT_O: return (struct tl_weight_shape){1, {d}, q};
    case TL_WT_UP: return (struct tl_weight_shape){s->mlp == TL_MLP_SILU_GATED ? 2 : 1, {f, f}, d};
    case TL_WT_DOWN: return (struct tl_weight_shape){1, {d}, f};
    case TL_WT_Q_NORM: return (struct tl_weight_shape){1, {s->qk_norm == TL_QKNORM_FULL ? q : s->d_head}, 0};
    case TL_WT_K_NORM: return (struct tl_weight_shape){1, {s->qk_norm == TL_QKNORM_FULL ? kv : s->d_head}, 0};
    case TL_WT_QK_BIAS: return (struct tl_weight_shape){2, {q, kv}, 0};
    case TL_WT_QKV_BIAS: return (struct tl_weight_shape){3, {q, kv, kv}, 0};
    case TL_WT_VALUE_EMBED: return (struct tl_weight_shape){1, {s->vocab_size}, kv};
    case TL_WT_VALUE_GATE: return (struct tl_weight_shape){1, {(int64_t)s->n_kv_heads * TL_VALUE_GATE_IN}, 0};
    case TL_WT_EMBED:
    case TL_WT_HEAD: return (struct tl_weight_shape){1, {s->vocab_size}, d};
    case TL_WT_ADAPTER: return (struct tl_weight_shape){1, {d}, 2 * d};
    case TL_WT_INJECT_B:
    case TL_WT_CODA_IN: return (struct tl_weight_shape){1, {d}, d};
    case TL_WT_GATE_B: return (struct tl_weight_shape){1, {1}, 0};
    default: return (struct tl_weight_shape){1, {d}, 0};
    }
}

static enum tl_status in_range(const char *what, int64_t value, int64_t min, int64_t max, struct tl_error *err)
{
    if (value >= min && value <= max)
        return TL_OK;
    tl_fail(err, TL_ERR_BAD_FILE, "config.json: %s is %lld, allowed are %lld to %lld", what, (long long)value,
            (long long)min, (long long)max);
    tl_error_num(err, "value", value);
    return TL_ERR_BAD_FILE;
}

static enum tl_status check_integers(const struct tl_arch_spec *s, struct tl_error *err)
{
    const struct {
        const char *what;
        int64_t value, min, max;
    } rows[] = {
        {"the hidden size", s->d_model, 1, 65536},
        /* 131072 products of 127 x 127 are the most that an int32 sum holds. */
        {"the MLP width", s->d_ff, 1, 131072},
        {"the vocabulary", s->vocab_size, 1, 1 << 24},
        {"the number of attention heads", s->n_heads, 1, 1024},
        {"the number of key/value heads", s->n_kv_heads, 1, 1024},
        {"the head width", s->d_head, 2, TL_HEAD_DIM_MAX},
        {"the attention's width", (int64_t)s->n_heads * s->d_head, 1, 131072},
        {"the number of prelude layers", s->n_prelude, 0, 1024},
        {"the number of core layers", s->n_core, 1, 1024},
        {"the number of coda layers", s->n_coda, 0, 1024},
        {"the maximum of loops", s->loops_max, 1, TL_LOOPS_MAX},
        {"the default of loops", s->loops_default, 1, s->loops_max},
        {"the trained number of loops", s->loops_trained, 1, s->loops_max},
        {"the number of positions", s->max_positions, 1, 1 << 24},
        {"bos_token_id", s->bos_token_id, -1, s->vocab_size - 1},
        {"eos_token_id", s->eos_token_id, -1, s->vocab_size - 1},
    };
    enum tl_status st = TL_OK;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]) && st == TL_OK; i++)
        st = in_range(rows[i].what, rows[i].value, rows[i].min, rows[i].max, err);
    for (int i = 0; i < s->n_stop_ids && st == TL_OK; i++)
        st = in_range("a stop id", s->stop_ids[i], 0, s->vocab_size - 1, err);
    return st;
}

enum tl_status tl_spec_check(const struct tl_arch_spec *s, struct tl_error *err)
{
    const struct tl_rope_scaling *sc = &s->rope_scaling;
    enum tl_status st = check_integers(s, err);
    if (st != TL_OK)
        return st;
    if (s->n_heads % s->n_kv_heads)
        return tl_fail(err, TL_ERR_BAD_FILE, "config.json: %d attention heads cannot share %d key/value heads",
                       s->n_heads, s->n_kv_heads);
    if (s->d_head % 2)
        return tl_fail(err, TL_ERR_BAD_FILE, "config.json: the head width is %d, it must be even", s->d_head);
    if (!(s->norm_eps >= 0 && s->norm_eps < 1))
        return tl_fail(err, TL_ERR_BAD_FILE, "config.json: the norm's epsilon is %g, allowed are 0 to 1",
                       (double)s->norm_eps);
    if (!(s->embed_scale > 0 && s->embed_scale <= 1e6f))
        return tl_fail(err, TL_ERR_BAD_FILE, "config.json: the embedding scale is %g, allowed are 0 to 1e6",
                       (double)s->embed_scale);
    if (s->rope != TL_ROPE_NONE && !(s->rope_base >= 1 && s->rope_base <= 1e12f))
        return tl_fail(err, TL_ERR_BAD_FILE, "config.json: the rope base is %g, allowed are 1 to 1e12",
                       (double)s->rope_base);
    if (sc->factor != 0 && !(sc->factor >= 1 && sc->low_freq_factor > 0 && sc->high_freq_factor > sc->low_freq_factor &&
                             sc->original_max_positions > 0))
        return tl_fail(err, TL_ERR_BAD_FILE,
                       "config.json: rope scaling has low_freq_factor %g and high_freq_factor %g, the "
                       "second must be larger",
                       (double)sc->low_freq_factor, (double)sc->high_freq_factor);
    if (!(s->state_std >= 0 && s->state_std <= 1e9f))
        return tl_fail(err, TL_ERR_BAD_FILE, "config.json: state_std is %g, allowed are 0 to 1e9",
                       (double)s->state_std);
    if (s->value_embeds && (s->d_model < TL_VALUE_GATE_IN || s->d_model < s->n_kv_heads))
        return tl_fail(
            err, TL_ERR_BAD_FILE,
            "config.json: value_embeds needs a hidden size of at least %d and of one for each of %d key/value "
            "heads, it is %d",
            TL_VALUE_GATE_IN, s->n_kv_heads, s->d_model);
    if (s->inject == TL_INJECT_NONE && (s->state_init != TL_STATE_PRELUDE || s->inject_norm || s->skip_first_inject))
        return tl_fail(err, TL_ERR_BAD_FILE,
                       "config.json: without injection the state must start as the prelude's output, "
                       "without inject_norm and skip_first_inject");
    return TL_OK;
}

/* ---- pieces shared by architectures ---- */

void tl_arch_read_sizes(struct tl_arch_spec *s, struct tl_json_reader *r)
{
    s->d_model = (int)tl_json_int(r, "hidden_size", 1, 65536);
    s->d_ff = (int)tl_json_int(r, "intermediate_size", 1, 131072);
    s->vocab_size = (int)tl_json_int(r, "vocab_size", 1, 1 << 24);
    s->n_heads = (int)tl_json_int(r, "num_attention_heads", 1, 1024);
    s->n_kv_heads = (int)tl_json_int_or(r, "num_key_value_heads", 1, 1024, s->n_heads);
    s->d_head = (int)tl_json_int_or(r, "head_dim", 2, TL_HEAD_DIM_MAX, s->n_heads ? s->d_model / s->n_heads : 0);
    s->n_core = (int)tl_json_int(r, "num_hidden_layers", 1, 1024);
    s->max_positions = (int)tl_json_int(r, "max_position_embeddings", 1, 1 << 24);
    s->norm_eps = (float)tl_json_num(r, "rms_norm_eps", 0, 1);
    s->tied_head = tl_json_bool_or(r, "tie_word_embeddings", false);
    s->embed_scale = 1;
    s->bos_token_id = s->eos_token_id = -1;
    if (strcmp(tl_json_str_or(r, "hidden_act", "silu"), "silu") != 0)
        tl_json_fail(r, "hidden_act", "is \"%.40s\", only \"silu\" is supported", tl_json_str(r, "hidden_act"));
}

void tl_arch_add_stop_id(struct tl_arch_spec *s, int64_t id)
{
    for (int i = 0; i < s->n_stop_ids; i++)
        if (s->stop_ids[i] == id)
            return;
    if (s->n_stop_ids < TL_STOP_IDS_MAX)
        s->stop_ids[s->n_stop_ids++] = (int32_t)id;
}

void tl_arch_read_tokens(struct tl_arch_spec *s, struct tl_json_reader *r)
{
    int64_t ids[TL_STOP_IDS_MAX];
    int n = tl_json_ints(r, "eos_token_id", 0, (1 << 24) - 1, ids, TL_STOP_IDS_MAX);
    s->bos_token_id = (int)tl_json_int_or(r, "bos_token_id", 0, (1 << 24) - 1, -1);
    s->eos_token_id = n ? (int)ids[0] : -1;
    for (int i = 0; i < n; i++)
        tl_arch_add_stop_id(s, ids[i]);
}

static void read_scaling(struct tl_arch_spec *s, struct tl_json_reader *o)
{
    const char *type = tl_json_str_or(o, "rope_type", tl_json_str_or(o, "type", "default"));
    if (!strcmp(type, "default"))
        return;
    if (strcmp(type, "llama3") != 0) {
        tl_json_fail(o, "rope_type", "is \"%.40s\", only \"default\" and \"llama3\" are supported", type);
        return;
    }
    s->rope_scaling.factor = (float)tl_json_num(o, "factor", 1, 1e6);
    s->rope_scaling.low_freq_factor = (float)tl_json_num(o, "low_freq_factor", 1e-6, 1e6);
    s->rope_scaling.high_freq_factor = (float)tl_json_num(o, "high_freq_factor", 1e-6, 1e6);
    s->rope_scaling.original_max_positions = (int)tl_json_int(o, "original_max_position_embeddings", 1, 1 << 24);
}

void tl_arch_read_rope(struct tl_arch_spec *s, struct tl_json_reader *r, double base_default)
{
    struct tl_json_reader o;
    s->rope_base = (float)tl_json_num_or(r, "rope_theta", 1, 1e12, base_default);
    if (tl_json_object(r, "rope_parameters", &o))
        s->rope_base = (float)tl_json_num_or(&o, "rope_theta", 1, 1e12, s->rope_base);
    else if (!tl_json_object(r, "rope_scaling", &o))
        return;
    read_scaling(s, &o);
    if (r->st == TL_OK)
        r->st = o.st;
}

void tl_arch_one_loop(struct tl_arch_spec *s, int loops_default, int loops_max)
{
    s->loops_default = s->loops_trained = loops_default;
    s->loops_max = loops_max;
    s->inject = TL_INJECT_NONE;
    s->state_init = TL_STATE_PRELUDE;
}

/* ---- reading config.json ---- */

static bool switched_off(const cJSON *v)
{
    return cJSON_IsNull(v) || cJSON_IsFalse(v) || (cJSON_IsNumber(v) && v->valuedouble == 0) ||
           (cJSON_IsString(v) && !*v->valuestring) || ((cJSON_IsArray(v) || cJSON_IsObject(v)) && !v->child);
}

static enum tl_status refuse_flags(const struct tl_arch *a, const cJSON *json, struct tl_error *err)
{
    const cJSON *v;
    for (const char *const *p = a->refused; p && *p; p++)
        cJSON_ArrayForEach(v, json) if (fnmatch(*p, v->string, 0) == 0 && !switched_off(v))
        {
            tl_fail(err, TL_ERR_UNSUPPORTED, "config.json: '%.80s' is set, which is not supported for model_type '%s'",
                    v->string, a->model_type);
            tl_error_param(err, v->string);
            return TL_ERR_UNSUPPORTED;
        }
    return TL_OK;
}

static const struct tl_arch *find_arch(const char *model_type, const struct tl_tensors *ts)
{
    for (size_t i = 0; i < N_ARCHS; i++)
        if (!strcmp(archs[i]->model_type, model_type) &&
            (!archs[i]->if_tensor || (ts && tl_tensors_find(ts, archs[i]->if_tensor))))
            return archs[i];
    return NULL;
}

/* "tinyloop, ouro, ...": rows of one type follow each other. */
static const char *all_types(char *buf, size_t n)
{
    size_t len = 0;
    for (size_t i = 0; i < N_ARCHS && len < n; i++)
        if (!i || strcmp(archs[i]->model_type, archs[i - 1]->model_type) != 0)
            len += (size_t)snprintf(buf + len, n - len, "%s%s", i ? ", " : "", archs[i]->model_type);
    return buf;
}

enum tl_status tl_arch_read_config(struct tl_arch_spec *spec, const struct tl_arch **arch, const char *config,
                                   size_t bytes, const struct tl_tensors *ts, const struct tl_arch_params *params,
                                   struct tl_error *err)
{
    struct cJSON *json = NULL;
    struct tl_json_reader r;
    const char *type;
    char all[128];
    enum tl_status st = tl_json_parse(&json, config, bytes, "config.json", err);
    if (st != TL_OK)
        return st;
    memset(spec, 0, sizeof(*spec));
    tl_json_reader_init(&r, json, "config.json", err);
    type = tl_json_str(&r, "model_type");
    st = r.st;
    if (st != TL_OK)
        goto out;
    if (!*arch)
        *arch = find_arch(type, ts);
    if (!*arch || strcmp((*arch)->model_type, type) != 0) {
        st = tl_fail(err, TL_ERR_UNSUPPORTED, "config.json: model_type '%.40s' is not supported, only %s are", type,
                     all_types(all, sizeof(all)));
        tl_error_param(err, "model_type");
        goto out;
    }
    snprintf(spec->model_type, sizeof(spec->model_type), "%s", type);
    st = refuse_flags(*arch, json, err);
    if (st != TL_OK)
        goto out;
    (*arch)->read(spec, &r, ts);
    st = r.st;
    if (st == TL_OK)
        st = tl_spec_check(spec, err);
    if (st == TL_OK && spec->state_init == TL_STATE_TRUNCNORM && !(params && params->start_state_random))
        spec->state_init = TL_STATE_ZERO;
out:
    tl_json_free(json);
    return st;
}

bool tl_arch_tensor_ignored(const struct tl_arch *a, const char *name)
{
    for (const char *const *p = a->ignored; p && *p; p++)
        if (fnmatch(*p, name, 0) == 0)
            return true;
    return false;
}
