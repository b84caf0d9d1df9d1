/* `tinyloop synth`: artifacts of exact shape with random weights, for tests and benchmarks.
 *
 * Every value is a function of (seed, weight, layer, element), so an artifact is the same in every layout and on every
 * machine. Matrices of integer types are made as integers, without a detour through floats. Weights have the usual deviation
 * of 1 / sqrt(inputs), so that states stay moderate over many loops. */
#include "args.h"
#include "artifact.h"
#include "commands.h"
#include "mem.h"
#include "presets.h"
#include "progress.h"
#include "quant.h"
#include "rng.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_BYTES ((size_t)4 << 20)

struct synth {
    const char *preset, *to, *out, *embed, *layout;
    uint64_t seed;
    struct tl_arg_list set;
    const struct tl_arch *arch; /* whose names are used */
    struct tl_arch_spec spec;
    bool one_norm; /* the original uses its final norm before the coda as well */
    enum tl_wtype wtype, embed_wtype;
    char *config;  /* config.json to write */
    uint64_t done; /* bytes of tensors written */
    uint8_t *chunk;
};

/* ---- values ---- */

/* 64 random bits of a counter under a key: fast, and good enough for weights. */
static inline uint64_t mix(uint64_t key, uint64_t i)
{
    uint64_t z = key + i * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Element i, uniform within -1..1. */
static inline float uniform(uint64_t key, uint64_t i)
{
    uint64_t z = mix(key, i / 2);
    return (float)(int32_t)(i % 2 ? z >> 32 : z) * (1.0f / 2147483648.0f);
}

/* A weight's number in the seed: those of weights that came later follow the rest, so that artifacts stay what they were. */
static uint64_t number_of(enum tl_weight w)
{
    if (w == TL_WT_VALUE_EMBED || w == TL_WT_VALUE_GATE)
        return (uint64_t)(TL_WT_COUNT - 2 + (w - TL_WT_VALUE_EMBED));
    return (uint64_t)(w > TL_WT_VALUE_GATE ? w - 2 : w);
}

static uint64_t key_of(const struct synth *s, const struct tl_piece *p)
{
    enum tl_weight w = p->weight == TL_WT_CODA_NORM && s->one_norm ? TL_WT_FINAL_NORM : p->weight;
    return tl_rng_u64(s->seed, number_of(w), (uint64_t)(int64_t)p->layer);
}

static float deviation(const struct tl_piece *p)
{
    float base = 1.0f / sqrtf((float)p->n_in);
    switch (p->weight) {
    case TL_WT_EMBED:
    case TL_WT_HEAD: return 2 * base;
    case TL_WT_O:
    case TL_WT_DOWN: return 0.5f * base;
    default: return base;
    }
}

/* Middle and half width of a vector's values. */
static void vector_range(const struct synth *s, enum tl_weight w, float *mid, float *half)
{
    *mid = 0;
    *half = 0.1f;
    if (w == TL_WT_GATE_W)
        *half = 1.7f / sqrtf((float)s->spec.d_model);
    else if (w == TL_WT_INJECT_DECAY)
        *mid = 0.8f;
    else if (w == TL_WT_INJECT_GAIN)
        *mid = 0.3f;
    else if (w == TL_WT_GATE_B)
        *mid = -0.5f;
    else if (w == TL_WT_VALUE_GATE)
        *half = 0.3f;
    else if (w != TL_WT_QK_BIAS && w != TL_WT_QKV_BIAS)
        *mid = 1; /* norms */
}

/* ---- writing pieces ---- */

static enum tl_status put(struct synth *s, struct tl_artifact *a, const void *data, size_t bytes, struct tl_error *err)
{
    s->done += bytes;
    tl_progress_show("writing", (double)s->done / (double)tl_artifact_bytes(a));
    return tl_artifact_write(a, data, bytes, err);
}

static enum tl_status put_vector(struct synth *s, struct tl_artifact *a, const struct tl_piece *p, struct tl_error *err)
{
    float mid, half, *v = (float *)(void *)s->chunk;
    uint64_t key = key_of(s, p);
    vector_range(s, p->weight, &mid, &half);
    for (int64_t i = 0; i < p->rows; i++)
        v[i] = mid + half * uniform(key, (uint64_t)(p->row + i));
    return put(s, a, v, (size_t)p->rows * sizeof(*v), err);
}

static enum tl_status put_floats(struct synth *s, struct tl_artifact *a, const struct tl_piece *p, struct tl_error *err)
{
    uint64_t key = key_of(s, p), at = (uint64_t)p->row * (uint64_t)p->n_in, n = (uint64_t)p->rows * (uint64_t)p->n_in;
    float half = 1.7320508f * deviation(p);
    size_t width = p->wtype == TL_W_F32 ? 4 : 2;
    enum tl_status st = TL_OK;
    for (uint64_t i = 0, take; i < n && st == TL_OK; i += take) {
        take = n - i < CHUNK_BYTES / width ? n - i : CHUNK_BYTES / width;
        for (uint64_t j = 0; j < take; j++) {
            float v = half * uniform(key, at + i + j);
            if (width == 4)
                ((float *)(void *)s->chunk)[j] = v;
            else
                ((uint16_t *)(void *)s->chunk)[j] = tl_f32_to_bf16(v);
        }
        st = put(s, a, s->chunk, take * width, err);
    }
    return st;
}

enum filler { INT8_VALUES, INT4_VALUES, GROUP_SCALES };

static inline uint64_t fill_word(enum filler kind, uint64_t z)
{
    const uint64_t ones = 0x1111111111111111u;
    if (kind == INT8_VALUES) { /* bytes of -128 become 0 */
        for (int k = 0; k < 64; k += 8)
            if ((z >> k & 255) == 128)
                z ^= (uint64_t)128 << k;
        return z;
    }
    if (kind == GROUP_SCALES) /* 8 .. 15 */
        return z | ones << 3;
    /* Nibbles of -8 become 0: those with bit 3 alone. */
    return z ^ (z & ~(z << 1) & ~(z << 2) & ~(z << 3) & ones << 3);
}

/* n_bytes of packed random integers. */
static enum tl_status put_packed(struct synth *s, struct tl_artifact *a, enum filler kind, uint64_t key,
                                 uint64_t n_bytes, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    for (uint64_t i = 0, take; i < n_bytes && st == TL_OK; i += take) {
        take = n_bytes - i < CHUNK_BYTES ? n_bytes - i : CHUNK_BYTES;
        for (uint64_t j = 0; j < take; j += 8) {
            uint64_t z = fill_word(kind, mix(key, (i + j) / 8));
            memcpy(s->chunk + j, &z, 8); /* the chunk has 8 bytes to spare */
        }
        st = put(s, a, s->chunk, take, err);
    }
    return st;
}

static enum tl_status put_integers(struct synth *s, struct tl_artifact *a, const struct tl_piece *p,
                                   struct tl_error *err)
{
    bool int4 = p->wtype == TL_W_INT4;
    uint64_t key = mix(key_of(s, p), (uint64_t)p->row + 1), rows = (uint64_t)p->rows;
    /* Root mean squares: of INT8 values 73.3, of INT4 values 4.18, of group scales 11.64. */
    float base = deviation(p) / (int4 ? 4.18f * 11.64f : 73.3f), *scale = (float *)(void *)s->chunk;
    enum tl_status st = put_packed(s, a, int4 ? INT4_VALUES : INT8_VALUES, key,
                                   rows * (int4 ? tl_q4_row_bytes(p->n_in) : (uint64_t)p->n_in), err);
    if (st == TL_OK && int4)
        st = put_packed(s, a, GROUP_SCALES, mix(key, 1), rows * tl_q4_gscale_bytes(p->n_in), err);
    for (uint64_t i = 0, take; i < rows && st == TL_OK; i += take) {
        take = rows - i < CHUNK_BYTES / 4 ? rows - i : CHUNK_BYTES / 4;
        for (uint64_t j = 0; j < take; j++)
            scale[j] = base * (1 + 0.1f * uniform(mix(key, 2), i + j));
        st = put(s, a, scale, take * sizeof(*scale), err);
    }
    return st;
}

/* ---- the command ---- */

static enum tl_wtype choose(void *arg, const struct tl_piece *p)
{
    const struct synth *s = arg;
    bool table = p->weight == TL_WT_EMBED || p->weight == TL_WT_HEAD || p->weight == TL_WT_VALUE_EMBED;
    enum tl_wtype t = table ? s->embed_wtype : s->wtype;
    return t == TL_W_INT4 && p->n_in % TL_Q4_GROUP ? TL_W_INT8 : t;
}

/* The preset's config with every --set applied, and the spec that it makes. */
static enum tl_status read_preset(struct synth *s, const struct tl_preset *preset, struct tl_error *err)
{
    const struct tl_arch_params params = {.start_state_random = true};
    const struct tl_arch *arch = preset->arch;
    struct cJSON *json = NULL, *value;
    char *text = NULL;
    enum tl_status st = tl_json_parse(&json, preset->config, strlen(preset->config), "the preset", err);
    for (int i = 0; i < s->set.n && st == TL_OK; i++) {
        const char *item = s->set.item[i], *eq = strchr(item, '=');
        char key[64];
        if (!eq || eq == item || (size_t)(eq - item) >= sizeof(key)) {
            st = tl_fail(err, TL_ERR_BAD_PARAM, "--set '%.80s' is not of the form key=value", item);
            break;
        }
        snprintf(key, sizeof(key), "%.*s", (int)(eq - item), item);
        if (tl_json_parse(&value, eq + 1, strlen(eq + 1), "--set", NULL) != TL_OK)
            value = cJSON_CreateString(eq + 1); /* a word: "half", "diag" */
        cJSON_DeleteItemFromObjectCaseSensitive(json, key);
        if (!value || !cJSON_AddItemToObject(json, key, value))
            st = tl_fail_host_memory(err, strlen(item));
    }
    if (st == TL_OK) {
        text = cJSON_PrintUnformatted(json);
        st = text ? tl_arch_read_config(&s->spec, &arch, text, strlen(text), NULL, &params, err)
                  : tl_fail_host_memory(err, strlen(preset->config));
    }
    s->one_norm = s->spec.c2c_is_final_norm;
    if (st == TL_OK && s->arch == &tl_arch_tinyloop) {
        s->spec.c2c_is_final_norm = false; /* our layout keeps a copy */
        st = tl_spec_write(&s->config, &s->spec, s->wtype >= TL_W_INT8 ? tl_wtype_name(s->wtype) : "none", err);
    } else if (st == TL_OK) {
        s->config = tl_strdup(text);
        st = s->config ? TL_OK : tl_fail_host_memory(err, strlen(text));
    }
    cJSON_free(text);
    tl_json_free(json);
    return st;
}

static enum tl_status write_artifact(struct synth *s, struct tl_error *err)
{
    struct tl_artifact *a = NULL;
    struct tl_piece *pieces = NULL;
    int n = 0;
    enum tl_status st = tl_artifact_create(&a, s->out, err);
    if (st == TL_OK)
        st = tl_pieces_list(&pieces, &n, s->arch, &s->spec, choose, s, err);
    if (st == TL_OK && !(s->chunk = tl_malloc(CHUNK_BYTES + 8)))
        st = tl_fail_host_memory(err, CHUNK_BYTES + 8);
    for (int i = 0; i < n && st == TL_OK; i++)
        st = tl_artifact_declare_piece(a, &pieces[i], err);
    for (int i = 0; i < n && st == TL_OK; i++) {
        const struct tl_piece *p = &pieces[i];
        st = !p->n_in               ? put_vector(s, a, p, err)
             : p->wtype < TL_W_INT8 ? put_floats(s, a, p, err)
                                    : put_integers(s, a, p, err);
    }
    if (st == TL_OK)
        st = tl_artifact_put_file(a, "config.json", s->config, strlen(s->config), err);
    if (st == TL_OK)
        st = tl_artifact_finish(a, err);
    tl_progress_clear();
    if (st == TL_OK)
        printf("%s: %s, %llu bytes of %s tensors\n", s->out, s->preset, (unsigned long long)tl_artifact_bytes(a),
               s->to);
    tl_free(s->chunk);
    tl_free(pieces);
    tl_artifact_free(a);
    return st;
}

static int list_presets(void)
{
    for (int i = 0; tl_preset_at(i); i++)
        printf("%-22s %s\n", tl_preset_at(i)->name, tl_preset_at(i)->about);
    return TL_EXIT_OK;
}

int tl_cmd_synth(int argc, char **argv)
{
    struct synth s = {.to = "int4", .layout = "own"};
    struct tl_error err;
    bool list = false;
    const struct tl_arg rows[] = {
        {"preset", TL_ARG_STR, &s.preset, "NAME", "shape to make; see --list", false, 0, 0},
        {"to", TL_ARG_STR, &s.to, "TYPE", "weights: f32, bf16, int8 or int4 (default)", false, 0, 0},
        {"embed", TL_ARG_STR, &s.embed, "TYPE", "embedding and head; default int8 for int4, else as --to", false, 0, 0},
        {"out", TL_ARG_STR, &s.out, "DIR", "directory to make; must not exist", false, 0, 0},
        {"seed", TL_ARG_U64, &s.seed, "N", "other weights for every seed (default 0)", false, 0, 0},
        {"layout", TL_ARG_STR, &s.layout, "WHICH", "own (default), or released: names and config as published", false,
         0, 0},
        {"set", TL_ARG_LIST, &s.set, "KEY=VALUE", "change a key of the preset's config; may be repeated", false, 0, 0},
        {"list", TL_ARG_FLAG, &list, NULL, "list the presets", false, 0, 0},
    };
    const struct tl_args args = {
        "tinyloop synth",
        "Make a model of exact shape with random weights, for tests and benchmarks.",
        "tinyloop synth --preset loop-407m --to int4 --out loop-407m",
        rows,
        sizeof(rows) / sizeof(rows[0]),
    };
    int rc = tl_args_parse(&args, argc, argv);
    if (rc != TL_ARGS_GO)
        return rc;
    if (list)
        return list_presets();
    if (!s.preset || !s.out)
        return tl_args_wrong(&args, "--%s is missing", s.preset ? "out" : "preset");
    const struct tl_preset *preset = tl_preset_find(s.preset);
    if (!preset)
        return tl_args_wrong(&args, "--preset: there is no '%s'; --list shows them", s.preset);
    if (!tl_wtype_parse(s.to, &s.wtype))
        return tl_args_wrong(&args, "--to: '%s' is not f32, bf16, int8 or int4", s.to);
    s.embed_wtype = s.wtype == TL_W_INT4 ? TL_W_INT8 : s.wtype;
    if (s.embed && !tl_wtype_parse(s.embed, &s.embed_wtype))
        return tl_args_wrong(&args, "--embed: '%s' is not f32, bf16, int8 or int4", s.embed);
    if (strcmp(s.layout, "own") != 0 && strcmp(s.layout, "released") != 0)
        return tl_args_wrong(&args, "--layout: '%s' is neither own nor released", s.layout);
    s.arch = strcmp(s.layout, "own") ? preset->arch : &tl_arch_tinyloop;
    enum tl_status st = read_preset(&s, preset, &err);
    if (st == TL_OK)
        st = write_artifact(&s, &err);
    tl_free(s.config);
    if (st != TL_OK)
        fprintf(stderr, "tinyloop synth: %s\n", err.msg);
    return st == TL_OK ? TL_EXIT_OK : st == TL_ERR_BAD_PARAM ? TL_EXIT_USAGE : TL_EXIT_FAILED;
}
