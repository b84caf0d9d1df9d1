/* engine/arch_bind.h - from a model directory to "this tensor is that weight".
 *
 * An architecture is one row of archs[] (arch.c): a function that reads config.json into struct tl_arch_spec, and a table of
 * tensor names. Everything else follows from the spec and is common to all: which weights there must be, their shapes,
 * quantised storage, tied heads, tensors that must not be left over. To add an architecture, write arch_<name>.c with one
 * const struct tl_arch and add it to the table.
 *
 * Thread: a binding is immutable after opening, any. */
#ifndef TL_ARCH_BIND_H
#define TL_ARCH_BIND_H

#include "arch.h"
#include "json.h"
#include "safetensors.h"

/* Every weight that struct tl_net may hold. Up to TL_WT_LAYER_COUNT: once per layer. */
enum tl_weight {
    TL_WT_N1,
    TL_WT_N2,
    TL_WT_N3,
    TL_WT_N4,
    TL_WT_N5,
    TL_WT_N6,
    TL_WT_QKV,
    TL_WT_O,
    TL_WT_UP,
    TL_WT_DOWN,
    TL_WT_Q_NORM,
    TL_WT_K_NORM,
    TL_WT_QK_BIAS,
    TL_WT_QKV_BIAS,
    TL_WT_VALUE_EMBED,
    TL_WT_VALUE_GATE,
    TL_WT_LAYER_COUNT,
    TL_WT_EMBED = TL_WT_LAYER_COUNT,
    TL_WT_INJECT_NORM,
    TL_WT_ADAPTER,
    TL_WT_INJECT_B,
    TL_WT_INJECT_DECAY,
    TL_WT_INJECT_GAIN,
    TL_WT_LOOP_NORM,
    TL_WT_GATE_W,
    TL_WT_GATE_B,
    TL_WT_CODA_IN,
    TL_WT_CODA_NORM,
    TL_WT_FINAL_NORM,
    TL_WT_HEAD,
    TL_WT_COUNT
};

/* Rows stacked in order (q, k, v; gate, up). n_in 0: a vector of rows[0] + rows[1] + ... elements. */
struct tl_weight_shape {
    int n_parts;
    int64_t rows[3];
    int64_t n_in;
};
/* Whether a model of this spec has the weight (in this layer; -1 for weights outside layers), and its shape. */
bool tl_weight_needed(const struct tl_arch_spec *s, enum tl_weight w, int layer);
struct tl_weight_shape tl_weight_shape(const struct tl_arch_spec *s, enum tl_weight w);
static inline int tl_n_layers(const struct tl_arch_spec *s) { return s->n_prelude + s->n_core + s->n_coda; }

bool tl_wtype_parse(const char *name, enum tl_wtype *out); /* "f32", "bf16", "int8", "int4"; false if none of them */

/* ---- an architecture ---- */

struct tl_weight_name {
    enum tl_weight weight;
    const char
        *part[3]; /* layer weights: what follows "<group><layer>."; only [0] where the parts are fused in one tensor */
};

struct tl_arch {
    const char *model_type;
    const char *if_tensor; /* row applies only to files with this tensor; NULL = any. Rows are tried in order */
    const char *about;     /* for messages and inspect */
    /* Fill the spec (zeroed, model_type set). Mistakes go through tl_json_fail. */
    void (*read)(struct tl_arch_spec *s, struct tl_json_reader *r, const struct tl_tensors *ts);
    const char *group[3]; /* names of prelude, core and coda layers up to the layer's number */
    const struct tl_weight_name *names;
    int n_names;
    const char *const *refused; /* config keys (shell patterns) that are fine only if absent, null, false, 0 or empty */
    const char *const *ignored; /* names of tensors (shell patterns) that are known and not used */
};
extern const struct tl_arch tl_arch_tinyloop, tl_arch_ouro, tl_arch_huginn, tl_arch_retrofit_olmo,
    tl_arch_retrofit_llama, tl_arch_nanbeige, tl_arch_llama, tl_arch_qwen2, tl_arch_qwen3;

/* Pieces that several architectures share. */
void tl_arch_read_sizes(struct tl_arch_spec *s, struct tl_json_reader *r); /* hidden_size ... head_dim, Llama's names */
void tl_arch_read_tokens(struct tl_arch_spec *s, struct tl_json_reader *r); /* bos_token_id, eos_token_id -> stop ids */
/* rope_theta and rope_scaling (none or llama3), or rope_parameters. */
void tl_arch_read_rope(struct tl_arch_spec *s, struct tl_json_reader *r, double base_default);
void tl_arch_one_loop(struct tl_arch_spec *s, int loops_default, int loops_max); /* all layers are core layers */
void tl_arch_add_stop_id(struct tl_arch_spec *s, int64_t id); /* once; ids past TL_STOP_IDS_MAX are dropped */

/* ---- a binding ---- */

struct tl_bind_part {
    const struct tl_tensor *t;
    const struct tl_tensor *row_scale;   /* INT8, INT4 */
    const struct tl_tensor *group_scale; /* INT4 */
    int64_t rows;
};

struct tl_bind {
    enum tl_weight weight;
    int layer;           /* index into net->layers; -1 for weights outside layers */
    int64_t rows, n_in;  /* of all parts; n_in 0 = vector */
    enum tl_wtype wtype; /* matrices: as it will be used (F16 files become F32) */
    int n_parts;
    struct tl_bind_part part[3];
};

struct tl_arch_binding {
    struct tl_arch_spec spec;
    const struct tl_arch *arch;
    struct tl_tensors *tensors;
    char *config; /* bytes of config.json */
    size_t config_bytes;
    struct tl_bind *binds; /* in order of place in the files */
    int n_binds;
    const struct tl_tensor *embed,
        *head_copy; /* tied models that store the head again: both must be equal. Else NULL */
};

struct tl_arch_params {
    bool start_state_random; /* draw the start state where the original does; else it is zero */
};

/* Open dir: read config.json, check and map the tensor files, bind. params may be NULL. Owner: caller, tl_arch_free().
 * Errors: TL_ERR_NOT_FOUND, TL_ERR_IO, TL_ERR_BAD_FILE, TL_ERR_UNSUPPORTED (architecture or flag, by name),
 * TL_ERR_NO_HOST_MEMORY. */
enum tl_status tl_arch_open(struct tl_arch_binding **out, const char *dir, const struct tl_arch_params *params,
                            struct tl_error *err);
/* The same from memory; takes ts over, also on failure. config is copied. */
enum tl_status tl_arch_bind(struct tl_arch_binding **out, const char *config, size_t config_bytes,
                            struct tl_tensors *ts, const struct tl_arch_params *params, struct tl_error *err);
void tl_arch_free(struct tl_arch_binding *b); /* NULL is fine */
bool tl_arch_tensor_ignored(const struct tl_arch *a, const char *name);

/* The spec alone, from config.json text. *arch NULL: found by model_type (and by tensors of ts, which may be NULL, where
 * several rows share one); else the row to use. */
enum tl_status tl_arch_read_config(struct tl_arch_spec *spec, const struct tl_arch **arch, const char *config,
                                   size_t bytes, const struct tl_tensors *ts, const struct tl_arch_params *params,
                                   struct tl_error *err);
/* Whether the numbers of a spec fit together. Errors: TL_ERR_BAD_FILE. */
enum tl_status tl_spec_check(const struct tl_arch_spec *s, struct tl_error *err);
/* config.json of our own layout for a spec, quantization "none", "int8" or "int4". Owner: caller, tl_free(). */
enum tl_status tl_spec_write(char **out, const struct tl_arch_spec *s, const char *quantization, struct tl_error *err);
/* The name that a layout gives to part of a weight, e.g. "model.core.0.attn.q.weight". Returns buf; NULL if it has none. */
const char *tl_arch_tensor_name(const struct tl_arch *a, const struct tl_arch_spec *s, enum tl_weight w, int layer,
                                int part, char *buf, size_t n);
bool tl_arch_fuses(const struct tl_arch *a, enum tl_weight w); /* one tensor holds all parts */

/* Start state of one row: out[d_model], zeros unless state_init is TRUNCNORM, then a normal of state_std cut at 3 of them.
 * A pure function of (seed, pos, channel). */
void tl_start_state(const struct tl_arch_spec *s, uint64_t seed, int pos, float *out);

#endif
