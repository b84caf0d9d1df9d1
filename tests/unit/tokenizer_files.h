/* tests/unit/tokenizer_files.h - small tokenizer files for the tests, built from the parts that matter to a case. */
#ifndef TL_TOKENIZER_FILES_H
#define TL_TOKENIZER_FILES_H

#include "mem.h"
#include "tokenizer_impl.h"
#include "tokenizer_json.h"
#include "tokenizer_utf8.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A file under construction: members of the root in place of the usual ones. */
struct file {
    const char *vocab;  /* further entries, e.g. "\"ab\":256"; ids below 256 are the bytes */
    const char *merges; /* a list */
    const char *model;  /* further members of the model */
    const char *added, *normalizer, *pre, *post, *decoder;
};

static char g_json[1 << 16];

#define OR(text, usual) ((text) ? (text) : (usual))

static inline const char *file_text(const struct file *f)
{
    char *p = g_json, *end = g_json + sizeof(g_json);
    p += snprintf(p, (size_t)(end - p), "{\"version\":\"1.0\",\"model\":{\"type\":\"BPE\",%s\"vocab\":{",
                  OR(f->model, ""));
    for (unsigned b = 0; b < 256; b++) {
        char c[5] = "";
        c[tl_utf8_put(tl_tk_byte_char((unsigned char)b), c)] = '\0';
        p += snprintf(p, (size_t)(end - p), "%s\"%s%s\":%u", b ? "," : "", c[0] == '"' || c[0] == '\\' ? "\\" : "", c,
                      b);
    }
    p += snprintf(p, (size_t)(end - p), "%s%s},\"merges\":%s}", f->vocab ? "," : "", OR(f->vocab, ""),
                  OR(f->merges, "[]"));
    p += snprintf(
        p, (size_t)(end - p), ",\"added_tokens\":%s,\"normalizer\":%s,\"pre_tokenizer\":%s", OR(f->added, "[]"),
        OR(f->normalizer, "null"),
        OR(f->pre, "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":true}"));
    snprintf(p, (size_t)(end - p), ",\"post_processor\":%s,\"decoder\":%s}", OR(f->post, "null"),
             OR(f->decoder, "{\"type\":\"ByteLevel\"}"));
    return g_json;
}

static inline struct tl_tokenizer *open_file(const struct file *f)
{
    const char *text = file_text(f);
    struct tl_tokenizer *tk = NULL;
    struct tl_error err = {0};
    enum tl_status st = tl_tokenizer_open_memory(&tk, text, strlen(text), false, &err);
    ck_assert_msg(st == TL_OK, "%s", err.msg);
    return tk;
}

/* The ids of a text as "1,2,3". */
static inline const char *ids_of(const struct tl_tokenizer *tk, const char *text, bool add_special, bool parse_special)
{
    static char out[4096];
    struct tl_encode_params p = {
        .text = text, .text_bytes = strlen(text), .add_special = add_special, .parse_special = parse_special};
    struct tl_error err = {0};
    int32_t *ids = NULL;
    size_t n = 0, at = 0;
    enum tl_status st = tl_tokenizer_encode(tk, &p, &ids, &n, &err);
    ck_assert_msg(st == TL_OK, "%s", err.msg);
    out[0] = '\0';
    for (size_t i = 0; i < n; i++)
        at += (size_t)snprintf(out + at, sizeof(out) - at, "%s%d", i ? "," : "", (int)ids[i]);
    tl_free(ids);
    return out;
}

#define ck_ids(tk, text, want) ck_assert_str_eq(ids_of(tk, text, false, true), want)

#define VOCAB_AB       "\"ab\":256,\"abc\":257,\"bc\":258,\"aa\":259"
#define MERGES_AB      "[\"a b\",[\"ab\",\"c\"],\"b c\",\"a a\"]"
#define NO_WORDS       "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}"
#define SEQUENCE(a, b) "{\"type\":\"Sequence\",\"pretokenizers\":[" a "," b "]}"
#define SPLIT(pattern, behavior, invert)                                                                               \
    "{\"type\":\"Split\",\"pattern\":" pattern ",\"behavior\":\"" behavior "\",\"invert\":" invert "}"
#define ADDED(id, content, flags) "{\"id\":" #id ",\"content\":\"" content "\"" flags "}"

/* A vocabulary as converted from SentencePiece: characters, and bytes for the rest. */
static inline struct tl_tokenizer *open_llama(const char *model, const char *pre, const char *normalizer)
{
    char json[4096];
    struct tl_tokenizer *tk = NULL;
    struct tl_error err = {0};
    snprintf(
        json, sizeof(json),
        "{\"model\":{\"type\":\"BPE\",%s\"unk_token\":\"<unk>\",\"vocab\":{\"<unk>\":0,\"<s>\":1,\"<0xC3>\":2,\"<0xA9>"
        "\":3,"
        "\"\u2581\":4,\"a\":5,\"b\":6,\"\u2581a\":7,\"ab\":9},\"merges\":[\"\u2581 a\",\"a b\"]},"
        "\"added_tokens\":[{\"id\":1,\"content\":\"<s>\",\"special\":true}],\"normalizer\":%s,\"pre_tokenizer\":%s,"
        "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{\"String\":\"\u2581\"},"
        "\"content\":\" \"},{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},{\"type\":\"Strip\",\"content\":\" "
        "\",\"start\":1,"
        "\"stop\":0}]}}",
        model, normalizer, pre);
    ck_assert_msg(tl_tokenizer_open_memory(&tk, json, strlen(json), false, &err) == TL_OK, "%s", err.msg);
    return tk;
}

#define LLAMA_NORMALIZER                                                                                               \
    "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":\"\u2581\"},"                           \
    "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"\u2581\"}]}"
#define METASPACE(scheme)                                                                                              \
    "{\"type\":\"Metaspace\",\"replacement\":\"\u2581\",\"prepend_scheme\":\"" scheme "\",\"split\":true}"

#endif
