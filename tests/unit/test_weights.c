/* Loading through a backend, the values that are refused, fingerprints, and the commands that write artifacts. */
#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "artifact.h"
#include "commands.h"
#include "fake_backend.h"
#include "mem.h"
#include "quant.h"
#include "rope.h"
#include "temp_dir.h"
#include "weights.h"

#include <cjson/cJSON.h>

static char dir[TEMP_PATH], model[TEMP_PATH + 8], other[TEMP_PATH + 8];
static struct tl_backend *be;

static void setup(void)
{
    temp_dir_make(dir);
    snprintf(model, sizeof(model), "%s/m", dir);
    snprintf(other, sizeof(other), "%s/n", dir);
    be = fake_backend_open();
}
static void teardown(void)
{
    be->ops->close(be);
    temp_dir_remove(dir);
}

/* Run a command with its output thrown away; words end with NULL. */
static int run(int (*cmd)(int, char **), const char *const *words)
{
    char *argv[40];
    int n = 0;
    for (; words[n]; n++)
        argv[n] = (char *)words[n];
    argv[n] = NULL;
    ck_assert(freopen("/dev/null", "w", stdout) && freopen("/dev/null", "w", stderr));
    return cmd(n, argv);
}
#define RUN(cmd, ...) run(cmd, (const char *const[]){"command", __VA_ARGS__, NULL})

static void synth(const char *preset, const char *to)
{
    ck_assert_int_eq(RUN(tl_cmd_synth, "--preset", preset, "--to", to, "--out", model), 0);
}

struct loaded {
    struct tl_arch_binding *b;
    struct tl_net net;
    struct tl_weights_info info;
};

static enum tl_status load(struct loaded *l, const char *path, struct tl_error *err)
{
    const struct tl_weights_params p = {.rope_positions = 100};
    enum tl_status st = tl_arch_open(&l->b, path, NULL, err);
    if (st == TL_OK)
        st = tl_weights_load(&l->net, be, l->b, &p, &l->info, err);
    if (st != TL_OK)
        tl_arch_free(l->b);
    return st;
}

static void must_load(struct loaded *l, const char *path)
{
    struct tl_error err;
    ck_assert_msg(load(l, path, &err) == TL_OK, "%s", err.msg);
}

static void unload(struct loaded *l)
{
    tl_net_free(&l->net, be);
    tl_arch_free(l->b);
    ck_assert_int_eq(fake_live_objects(), 0);
    ck_assert_int_eq(fake_live_bytes(), 0);
}

static const float *tensor_floats(const struct loaded *l, const char *name)
{
    const struct tl_tensor *t = tl_tensors_find(l->b->tensors, name);
    ck_assert_msg(t != NULL && t->dtype == TL_DT_F32, "%s", name);
    return (const float *)(const void *)t->data;
}

START_TEST(separate_and_fused_tensors_end_up_as_the_same_rows)
{
    struct loaded l;
    float row[64];
    must_load(&l, "tests/golden/ouro-tiny");
    ck_assert_int_eq(fake_mat_rows(l.net.layers[1].qkv), 32 + 16 + 16);
    fake_mat_row(l.net.layers[1].qkv, 32 + 5, row);
    ck_assert_mem_eq(row, tensor_floats(&l, "model.layers.1.self_attn.k_proj.weight") + 5 * 32, 32 * 4);
    fake_mat_row(l.net.layers[2].up, 48 + 7, row);
    ck_assert_mem_eq(row, tensor_floats(&l, "model.layers.2.mlp.up_proj.weight") + 7 * 32, 32 * 4);
    ck_assert_mem_eq(fake_buf_floats(l.net.layers[0].norm[4]),
                     tensor_floats(&l, "model.layers.0.post_attention_layernorm_2.weight"), 32 * 4);
    ck_assert_ptr_null(l.net.layers[0].norm[2]);
    ck_assert_ptr_ne(l.net.head, l.net.embed);
    ck_assert(l.net.gate_b == tensor_floats(&l, "model.early_exit_gate.bias")[0]);
    ck_assert_int_eq(l.net.wtype, TL_W_F32);
    unload(&l);

    must_load(&l, "tests/golden/huginn-tiny");
    fake_mat_row(l.net.layers[2].qkv, 70, row); /* layer 2 is core_block.0 */
    ck_assert_mem_eq(row, tensor_floats(&l, "transformer.core_block.0.attn.Wqkv.weight") + 70 * 32, 32 * 4);
    ck_assert_uint_eq(fake_buf_bytes(l.net.layers[6].qk_bias), 2 * 32 * 4);
    ck_assert_mem_eq(fake_buf_floats(l.net.layers[6].qk_bias), tensor_floats(&l, "transformer.coda.1.attn.qk_bias"),
                     64 * 4);
    ck_assert_mem_eq(fake_buf_floats(l.net.coda_norm), fake_buf_floats(l.net.final_norm), 32 * 4);
    ck_assert_ptr_eq(l.net.head, l.net.embed);
    ck_assert_int_eq(fake_mat_n_in(l.net.adapter), 64);
    ck_assert_uint_eq(l.info.n_parameters, 62080);
    unload(&l);
}
END_TEST

START_TEST(the_rope_table_holds_the_positions_asked_for)
{
    struct loaded l;
    float f[4], row[8];
    must_load(&l, "tests/golden/ouro-tiny");
    ck_assert_int_eq(l.net.rope_positions, 100);
    ck_assert_uint_eq(fake_buf_bytes(l.net.rope), 100 * 8 * 4);
    tl_rope_inv_freq(&l.net.spec, f);
    tl_rope_fill(&l.net.spec, f, 99, 1, row);
    ck_assert_mem_eq(fake_buf_floats(l.net.rope) + 99 * 8, row, sizeof(row));
    tl_net_free(&l.net, be);
    const struct tl_weights_params p = {.rope_positions = 129};
    ck_assert_int_eq(tl_weights_load(&l.net, be, l.b, &p, NULL, NULL), TL_ERR_BAD_PARAM);
    unload(&l);
}
END_TEST

static const char *const types[] = {"f32", "bf16", "int8", "int4"};

START_TEST(every_weight_type_reaches_the_backend_as_it_is_stored)
{
    struct loaded l;
    float a[64], b[64];
    synth("tiny", types[_i]);
    must_load(&l, model);
    ck_assert_int_eq(l.net.wtype, _i);
    ck_assert_int_eq(fake_mat_wtype(l.net.layers[0].qkv), _i);
    ck_assert_int_eq(fake_mat_wtype(l.net.embed), _i == TL_W_INT4 ? TL_W_INT8 : _i);
    for (int i = 0; i < l.b->n_binds; i++)
        if (l.b->binds[i].weight == TL_WT_QKV && l.b->binds[i].layer == 2)
            for (int row = 0; row < 128; row += 9) {
                tl_bind_read(&l.b->binds[i], row, 1, a);
                fake_mat_row(l.net.layers[2].qkv, row, b);
                ck_assert_mem_eq(a, b, sizeof(a));
            }
    unload(&l);
}
END_TEST

START_TEST(f16_is_widened_and_unaligned_tensors_are_copied)
{
    struct loaded l;
    float row[64], expected[64];
    size_t n;
    synth("tiny", "bf16");
    /* The same bytes read as F16, all of them moved by one byte: a blank more in the header. */
    char *text = read_text(model, "model.safetensors", &n), *moved = malloc(n + 1);
    for (char *at = text; (at = memmem(at, n - (size_t)(at - text), "\"BF16\"", 6)) != NULL;)
        memcpy(at, "\"F16\" ", 6);
    uint64_t header;
    memcpy(&header, text, 8);
    header++;
    memcpy(moved, &header, 8);
    moved[8] = ' ';
    memcpy(moved + 9, text + 8, n - 8);
    temp_file(model, "model.safetensors", moved, n + 1);
    must_load(&l, model);
    ck_assert_int_eq(fake_mat_wtype(l.net.layers[0].o), TL_W_F32);
    const struct tl_tensor *t = tl_tensors_find(l.b->tensors, "model.prelude.0.attn.o.weight");
    ck_assert_int_eq((uintptr_t)t->data % 2, 1);
    for (int i = 0; i < 64; i++) {
        uint16_t v;
        memcpy(&v, t->data + 2 * i, 2);
        expected[i] = tl_f16_to_f32(v);
    }
    fake_mat_row(l.net.layers[0].o, 0, row);
    ck_assert_mem_eq(row, expected, sizeof(row));
    unload(&l);
    free(moved);
    free(text);
}
END_TEST

/* Overwrite bytes of a tensor in the file. */
static void poke(const char *name, int64_t at, const void *bytes, size_t n_bytes)
{
    struct tl_tensors *ts;
    size_t n;
    ck_assert_int_eq(tl_tensors_open(&ts, model, NULL), TL_OK);
    const struct tl_tensor *t = tl_tensors_find(ts, name);
    ck_assert_msg(t != NULL, "%s", name);
    size_t offset = t->offset;
    tl_tensors_free(ts);
    char *text = read_text(model, "model.safetensors", &n);
    memcpy(text + offset + at, bytes, n_bytes);
    temp_file(model, "model.safetensors", text, n);
    free(text);
}

static const struct {
    const char *to, *tensor;
    int64_t at;
    uint8_t bytes[4];
    size_t n;
    const char *says;
} bad_values[] = {
    {"f32",
     "model.core.1.mlp.down.weight",
     4 * 5000,
     {0, 0, 0xC0, 0x7F},
     4,
     "'model.core.1.mlp.down.weight' has the value nan at index 5000"},
    {"f32",
     "model.final_norm.weight",
     4 * 63,
     {0, 0, 0x80, 0xFF},
     4,
     "'model.final_norm.weight' has the value -inf at index 63"},
    {"bf16",
     "model.core.0.attn.v.weight",
     2 * 7,
     {0x80, 0x7F},
     2,
     "'model.core.0.attn.v.weight' has the value inf at index 7"},
    {"int8", "model.adapter.weight", 8000, {0x80}, 1, "'model.adapter.weight' has the value -128 at index 8000"},
    {"int8",
     "model.adapter.weight_scale",
     4 * 3,
     {0, 0, 0x80, 0x7F},
     4,
     "'model.adapter.weight_scale' has the scale inf at index 3"},
    {"int8",
     "model.adapter.weight_scale",
     4 * 3,
     {0, 0, 0x80, 0xBF},
     4,
     "'model.adapter.weight_scale' has the scale -1 at index 3"},
    {"int4",
     "model.coda.0.attn.q.weight_q4",
     100,
     {0x18},
     1,
     "'model.coda.0.attn.q.weight_q4' has the value -8 at index 200"},
    {"int4",
     "model.coda.0.attn.q.weight_q4",
     100,
     {0x81},
     1,
     "'model.coda.0.attn.q.weight_q4' has the value -8 at index 201"},
    {"int4", "model.coda.0.attn.q.weight_gscale", 9, {0x0F}, 1, "has the group scale 0 in row 9, group 1"},
};

START_TEST(a_value_that_no_weight_may_have_is_named)
{
    struct loaded l;
    struct tl_error err = {0};
    synth("tiny", bad_values[_i].to);
    poke(bad_values[_i].tensor, bad_values[_i].at, bad_values[_i].bytes, bad_values[_i].n);
    ck_assert_int_eq(load(&l, model, &err), TL_ERR_BAD_FILE);
    ck_assert_msg(strstr(err.msg, bad_values[_i].says) != NULL, "'%s' does not say '%s'", err.msg, bad_values[_i].says);
    ck_assert_int_eq(fake_live_objects(), 0);
    ck_assert_int_eq(RUN(tl_cmd_quantize, "--model", model, "--to", "int8", "--out", other), 1);
    ck_assert_int_ne(access(other, F_OK), 0);
}
END_TEST

START_TEST(an_infinity_in_f16_is_named)
{
    struct loaded l;
    struct tl_error err = {0};
    size_t n;
    synth("tiny", "bf16");
    char *text = read_text(model, "model.safetensors", &n);
    for (char *at = text; (at = memmem(at, n - (size_t)(at - text), "\"BF16\"", 6)) != NULL;)
        memcpy(at, "\"F16\" ", 6); /* small numbers stay finite */
    temp_file(model, "model.safetensors", text, n);
    free(text);
    poke("model.core.0.attn.v.weight", 2 * 7, "\0\xFC", 2);
    ck_assert_int_eq(load(&l, model, &err), TL_ERR_BAD_FILE);
    ck_assert_ptr_nonnull(strstr(err.msg, "'model.core.0.attn.v.weight' has the value -inf at index 7"));
}
END_TEST

START_TEST(a_tokenizer_that_the_model_cannot_have_stops_every_command)
{
    static const char text[] = "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":300},\"merges\":[]}}";
    synth("tiny", "f32");
    temp_file(model, "tokenizer.json", text, sizeof(text) - 1);
    ck_assert_int_eq(RUN(tl_cmd_inspect, "--model", model), 0);
    ck_assert_int_eq(RUN(tl_cmd_inspect, "--model", model, "--check"), 1);
    ck_assert_int_eq(RUN(tl_cmd_generate, "--model", model, "--tokens", "1"), 1);
    ck_assert_int_eq(RUN(tl_cmd_quantize, "--model", model, "--to", "int8", "--out", other), 1);
    ck_assert_int_ne(access(other, F_OK), 0);
}
END_TEST

START_TEST(a_tied_head_stored_twice_must_be_equal)
{
    struct loaded l;
    struct tl_error err = {0};
    must_load(&l, "tests/golden/huginn-tiny");
    ck_assert_ptr_nonnull(l.b->head_copy);
    unload(&l);
    size_t n, m;
    char *config = read_text("tests/golden/huginn-tiny", "config.json", &m);
    char *text = read_text("tests/golden/huginn-tiny", "model.safetensors", &n);
    ck_assert_int_eq(mkdir(model, 0755), 0);
    temp_file(model, "config.json", config, m);
    temp_file(model, "model.safetensors", text, n);
    poke("lm_head.weight", 400, "\1\2\3\4", 4);
    ck_assert_int_eq(load(&l, model, &err), TL_ERR_BAD_FILE);
    ck_assert_ptr_nonnull(strstr(err.msg, "'lm_head.weight' and 'transformer.wte.weight' differ"));
    ck_assert_int_eq(RUN(tl_cmd_inspect, "--model", model, "--check"), 1);
    ck_assert_int_eq(RUN(tl_cmd_quantize, "--model", model, "--to", "int8", "--out", other), 1);
    ck_assert_int_ne(access(other, F_OK), 0);
    free(config);
    free(text);
}
END_TEST

START_TEST(the_fingerprint_sees_every_byte_and_not_the_order_of_files)
{
    struct loaded l;
    char hex[65], first[65];
    synth("tiny", "int4");
    must_load(&l, model);
    ck_assert_int_eq(tl_weights_fingerprint(l.b, 0, hex, NULL), TL_OK);
    ck_assert_str_eq(hex, l.info.fingerprint);
    ck_assert_uint_eq(strlen(hex), 64);
    memcpy(first, hex, 65);
    /* The seed counts only where a random start state is drawn. */
    ck_assert_int_eq(tl_weights_fingerprint(l.b, 1, hex, NULL), TL_OK);
    ck_assert_str_eq(hex, first);
    unload(&l);
    /* Two shards instead of one file: the header split in two. */
    struct tl_tensors *ts;
    ck_assert_int_eq(tl_tensors_open(&ts, model, NULL), TL_OK);
    int n = tl_tensors_count(ts);
    char index[32768] = "{\"weight_map\":{";
    for (int shard = 0; shard < 2; shard++) {
        char header[32768] = "{", name[32];
        uint8_t *data = malloc(1 << 20);
        size_t at = 0, len = 1;
        snprintf(name, sizeof(name), "m-%d.safetensors", shard);
        for (int i = 0; i < n; i++) {
            const struct tl_tensor *t = tl_tensors_at(ts, i);
            char shape[100];
            if ((i % 3 == 0) == shard)
                continue;
            memcpy(data + at, t->data, t->bytes);
            len += (size_t)snprintf(header + len, sizeof(header) - len,
                                    "%s\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}",
                                    len > 1 ? "," : "", t->name, t->dtype_name,
                                    tl_tensor_shape(t, shape, sizeof(shape)), at, at + t->bytes);
            at += t->bytes;
            size_t used = strlen(index);
            snprintf(index + used, sizeof(index) - used, "%s\"%s\":\"%s\"", index[used - 1] == '{' ? "" : ",", t->name,
                     name);
        }
        snprintf(header + len, sizeof(header) - len, "}");
        temp_safetensors(model, name, header, data, at);
        free(data);
    }
    tl_tensors_free(ts);
    strcat(index, "}}");
    temp_file(model, "model.safetensors.index.json", index, strlen(index));
    char path[2 * TEMP_PATH];
    snprintf(path, sizeof(path), "%s/model.safetensors", model);
    ck_assert_int_eq(remove(path), 0);
    must_load(&l, model);
    ck_assert_str_eq(l.info.fingerprint, first);
    unload(&l);
}
END_TEST

START_TEST(one_changed_byte_changes_the_fingerprint)
{
    struct loaded l;
    char first[65];
    synth("tiny", "f32");
    must_load(&l, model);
    memcpy(first, l.info.fingerprint, 65);
    unload(&l);
    poke("model.core.0.n1.weight", 8, "\1", 1);
    must_load(&l, model);
    ck_assert_str_ne(l.info.fingerprint, first);
    unload(&l);
}
END_TEST

/* ---- quantize ---- */

static double distance(const struct tl_mat *a, const struct tl_mat *b)
{
    double diff = 0, sum = 0;
    float x[256], y[256];
    ck_assert(fake_mat_rows(a) == fake_mat_rows(b) && fake_mat_n_in(a) == fake_mat_n_in(b));
    for (int64_t r = 0; r < fake_mat_rows(a); r++) {
        fake_mat_row(a, r, x);
        fake_mat_row(b, r, y);
        for (int64_t i = 0; i < fake_mat_n_in(a); i++) {
            diff += (double)(x[i] - y[i]) * (double)(x[i] - y[i]);
            sum += (double)x[i] * (double)x[i];
        }
    }
    return sqrt(diff / sum);
}

static void compare_nets(const struct tl_net *a, const struct tl_net *b, double most)
{
    for (int i = 0; i < tl_n_layers(&a->spec); i++) {
        ck_assert(distance(a->layers[i].qkv, b->layers[i].qkv) <= most);
        ck_assert(distance(a->layers[i].o, b->layers[i].o) <= most);
        ck_assert(distance(a->layers[i].up, b->layers[i].up) <= most);
        ck_assert(distance(a->layers[i].down, b->layers[i].down) <= most);
        for (int k = 0; k < 6; k++) {
            ck_assert(!a->layers[i].norm[k] == !b->layers[i].norm[k]);
            if (a->layers[i].norm[k])
                ck_assert_mem_eq(fake_buf_floats(a->layers[i].norm[k]), fake_buf_floats(b->layers[i].norm[k]),
                                 4 * (size_t)a->spec.d_model);
        }
    }
    ck_assert(distance(a->embed, b->embed) <= most && distance(a->head, b->head) <= most);
}

static const struct {
    const char *model;
    const char *to;
    double most;
} conversions[] = {
    {"ouro-tiny", "f32", 0},
    {"ouro-tiny", "bf16", 0.003},
    {"ouro-tiny", "int8", 0.01},
    {"ouro-tiny", "int4", 0.12},
    {"huginn-tiny", "f32", 0},
    {"huginn-tiny", "bf16", 0.003},
    {"huginn-tiny", "int8", 0.01},
    {"huginn-tiny", "int4", 0.12},
    {"retrofit-llama-tiny", "f32", 0},
    {"retrofit-llama-tiny", "bf16", 0.003},
    {"retrofit-llama-tiny", "int8", 0.01},
    {"retrofit-llama-tiny", "int4", 0.12},
    {"retrofit-olmo-tiny", "f32", 0},
    {"retrofit-olmo-tiny", "bf16", 0.003},
    {"retrofit-olmo-tiny", "int8", 0.01},
    {"retrofit-olmo-tiny", "int4", 0.12},
};

START_TEST(quantize_turns_every_architecture_into_our_layout)
{
    struct loaded a, b;
    char path[128];
    snprintf(path, sizeof(path), "tests/golden/%s", conversions[_i].model);
    ck_assert_int_eq(RUN(tl_cmd_quantize, "--model", path, "--to", conversions[_i].to, "--out", model), 0);
    must_load(&a, path);
    must_load(&b, model);
    ck_assert_str_eq(b.net.spec.model_type, "tinyloop");
    compare_nets(&a.net, &b.net, conversions[_i].most);
    struct tl_arch_spec expected = a.net.spec;
    memcpy(expected.model_type, b.net.spec.model_type, sizeof(expected.model_type));
    expected.c2c_is_final_norm = false;
    ck_assert_mem_eq(&expected, &b.net.spec, sizeof(expected));
    tl_net_free(&a.net, be);
    tl_arch_free(a.b);
    unload(&b);
}
END_TEST

START_TEST(quantize_keeps_chosen_tensors_in_int8_and_copies_the_tokenizer)
{
    struct loaded l;
    size_t n;
    synth("tiny", "f32");
    static const char tokenizer[] = "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1},\"merges\":[]}}";
    temp_file(model, "tokenizer.json", tokenizer, sizeof(tokenizer) - 1);
    ck_assert_int_eq(RUN(tl_cmd_quantize, "--model", model, "--to", "int4", "--out", other, "--embed", "bf16",
                         "--keep-int8", "model.core.*.mlp.down*", "--keep-int8", "model.coda.0.attn.k.weight"),
                     0);
    must_load(&l, other);
    ck_assert_int_eq(fake_mat_wtype(l.net.embed), TL_W_BF16);
    ck_assert_int_eq(fake_mat_wtype(l.net.layers[1].down), TL_W_INT8);
    ck_assert_int_eq(fake_mat_wtype(l.net.layers[0].down), TL_W_INT4);
    ck_assert_int_eq(fake_mat_wtype(l.net.layers[3].qkv), TL_W_INT8); /* k alone was named: all three follow */
    ck_assert_int_eq(l.net.wtype, TL_W_INT4);
    unload(&l);
    char *copied = read_text(other, "tokenizer.json", &n);
    ck_assert_str_eq(copied, tokenizer);
    free(copied);
    ck_assert_int_eq(RUN(tl_cmd_inspect, other, "--tensors", "--check", "--fingerprint", "--knobs"), 0);
}
END_TEST

START_TEST(nothing_is_left_behind_by_a_command_that_fails)
{
    synth("tiny", "f32");
    ck_assert_int_eq(RUN(tl_cmd_quantize, "--model", model, "--to", "int8", "--out", model), 2); /* exists */
    ck_assert_int_eq(RUN(tl_cmd_quantize, "--model", other, "--to", "int8", "--out", other), 1); /* no model */
    ck_assert_int_eq(RUN(tl_cmd_synth, "--preset", "tiny", "--out", "/nonexistent/x"), 1);
    ck_assert_int_eq(RUN(tl_cmd_inspect, other), 1);
    char command[2 * TEMP_PATH];
    snprintf(command, sizeof(command), "test \"$(ls %s)\" = m", dir);
    ck_assert_int_eq(system(command), 0);
}
END_TEST

START_TEST(commands_name_what_is_wrong_with_a_call_and_exit_2)
{
    ck_assert_int_eq(RUN(tl_cmd_synth, "--preset", "huge", "--out", model), 2);
    ck_assert_int_eq(RUN(tl_cmd_synth, "--preset", "tiny"), 2);
    ck_assert_int_eq(RUN(tl_cmd_synth, "--preset", "tiny", "--out", model, "--to", "int3"), 2);
    ck_assert_int_eq(RUN(tl_cmd_synth, "--preset", "tiny", "--out", model, "--colour", "red"), 2);
    ck_assert_int_eq(RUN(tl_cmd_synth, "--preset", "tiny", "--out", model, "--seed"), 2);
    ck_assert_int_eq(RUN(tl_cmd_synth, "--preset", "tiny", "--out", model, "--seed", "-1"), 2);
    ck_assert_int_eq(RUN(tl_cmd_synth, "--preset", "tiny", "--out", model, "--set", "nonsense"), 2);
    ck_assert_int_eq(RUN(tl_cmd_synth, "--preset", "tiny", "--out", model, "--set", "head_dim=15"), 1);
    ck_assert_int_eq(RUN(tl_cmd_quantize, "--model", model), 2);
    ck_assert_int_eq(RUN(tl_cmd_quantize, "--model", model, "--out", other, "--keep-int8", "*"), 2);
    ck_assert_int_eq(RUN(tl_cmd_inspect, model, "--model", model), 2);
    ck_assert_int_eq(RUN(tl_cmd_inspect, model, other), 2);
    ck_assert_int_eq(RUN(tl_cmd_inspect, "--help"), 0);
    ck_assert_int_eq(RUN(tl_cmd_quantize, "--help"), 0);
    ck_assert_int_eq(RUN(tl_cmd_synth, "--help"), 0);
    ck_assert_int_eq(RUN(tl_cmd_synth, "--list"), 0);
}
END_TEST

START_TEST(synth_is_deterministic_and_the_seed_matters)
{
    size_t n, m;
    synth("tiny", "int4");
    ck_assert_int_eq(RUN(tl_cmd_synth, "--preset", "tiny", "--out", other, "--seed", "1"), 0);
    char *a = read_text(model, "model.safetensors", &n), *b = read_text(other, "model.safetensors", &m);
    ck_assert(n == m && memcmp(a, b, n) != 0);
    temp_dir_remove(other);
    ck_assert_int_eq(RUN(tl_cmd_synth, "--preset=tiny", "--to=int4", "--seed=0", "--out", other), 0);
    free(b);
    b = read_text(other, "model.safetensors", &m);
    ck_assert(n == m && memcmp(a, b, n) == 0);
    free(a);
    free(b);
}
END_TEST

/* ---- failures ---- */

START_TEST(a_refusing_device_leaves_nothing_behind)
{
    struct loaded l;
    enum tl_status st = TL_ERR_NO_DEVICE_MEMORY;
    int n = 1;
    for (; st != TL_OK; n++) {
        fake_fail_at(n);
        st = load(&l, "tests/golden/huginn-tiny", NULL);
        if (st == TL_OK)
            break;
        ck_assert_int_eq(st, TL_ERR_NO_DEVICE_MEMORY);
        ck_assert_ptr_null(l.net.layers);
        ck_assert_int_eq(fake_live_objects(), 0);
    }
    ck_assert_int_gt(n, 60);
    fake_fail_at(0);
    unload(&l);
}
END_TEST

#ifdef TL_TEST_HOOKS
START_TEST(a_failed_allocation_leaves_nothing_behind)
{
    struct loaded l;
    enum tl_status st = TL_ERR_NO_HOST_MEMORY;
    struct tl_error err;
    int64_t live = tl_mem_live();
    int n = 1;
    for (; st != TL_OK; n++) {
        tl_mem_fail_at(n);
        st = load(&l, "tests/golden/ouro-tiny", &err);
        tl_mem_fail_at(0);
        if (st == TL_OK)
            break;
        ck_assert_msg(st == TL_ERR_NO_HOST_MEMORY, "%s", err.msg);
        ck_assert_int_eq(tl_mem_live(), live);
        ck_assert_int_eq(fake_live_objects(), 0);
    }
    ck_assert_int_gt(n, 60);
    unload(&l);
    ck_assert_int_eq(tl_mem_live(), live);
}
END_TEST

START_TEST(quantize_and_synth_survive_every_failed_allocation)
{
    int rc = 1, n = 1;
    int64_t live = tl_mem_live();
    synth("tiny", "f32");
    for (; rc != 0; n++) {
        tl_mem_fail_at(n);
        rc = RUN(tl_cmd_quantize, "--model", model, "--to", "int4", "--out", other);
        tl_mem_fail_at(0);
        ck_assert(rc == 0 || rc == 1);
        ck_assert_int_eq(tl_mem_live(), live);
        ck_assert((access(other, F_OK) == 0) == (rc == 0));
    }
    ck_assert_int_gt(n, 100);
    temp_dir_remove(other);
    for (rc = 1, n = 1; rc != 0; n++) {
        tl_mem_fail_at(n);
        rc = RUN(tl_cmd_synth, "--preset", "tiny", "--to", "int4", "--out", other);
        tl_mem_fail_at(0);
        ck_assert(rc == 0 || rc == 1);
        ck_assert_int_eq(tl_mem_live(), live);
        ck_assert((access(other, F_OK) == 0) == (rc == 0));
    }
    ck_assert_int_gt(n, 5);
}
END_TEST
#endif

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

int main(void)
{
    Suite *suite = suite_create("weights");
    TCase *tc = tcase_create("weights");
    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, separate_and_fused_tensors_end_up_as_the_same_rows);
    tcase_add_test(tc, the_rope_table_holds_the_positions_asked_for);
    tcase_add_loop_test(tc, every_weight_type_reaches_the_backend_as_it_is_stored, 0, COUNT(types));
    tcase_add_test(tc, f16_is_widened_and_unaligned_tensors_are_copied);
    tcase_add_loop_test(tc, a_value_that_no_weight_may_have_is_named, 0, COUNT(bad_values));
    tcase_add_test(tc, a_tied_head_stored_twice_must_be_equal);
    tcase_add_test(tc, an_infinity_in_f16_is_named);
    tcase_add_test(tc, a_tokenizer_that_the_model_cannot_have_stops_every_command);
    tcase_add_test(tc, the_fingerprint_sees_every_byte_and_not_the_order_of_files);
    tcase_add_test(tc, one_changed_byte_changes_the_fingerprint);
    tcase_add_loop_test(tc, quantize_turns_every_architecture_into_our_layout, 0, COUNT(conversions));
    tcase_add_test(tc, quantize_keeps_chosen_tensors_in_int8_and_copies_the_tokenizer);
    tcase_add_test(tc, nothing_is_left_behind_by_a_command_that_fails);
    tcase_add_test(tc, commands_name_what_is_wrong_with_a_call_and_exit_2);
    tcase_add_test(tc, synth_is_deterministic_and_the_seed_matters);
    tcase_add_test(tc, a_refusing_device_leaves_nothing_behind);
#ifdef TL_TEST_HOOKS
    tcase_add_test(tc, a_failed_allocation_leaves_nothing_behind);
    tcase_add_test(tc, quantize_and_synth_survive_every_failed_allocation);
#endif
    suite_add_tcase(suite, tc);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int n_failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return n_failed ? 1 : 0;
}
