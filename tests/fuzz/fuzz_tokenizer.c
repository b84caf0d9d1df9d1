/* tests/fuzz/fuzz_tokenizer.c - the input is a tokenizer.json, or (first byte 'T') a text for a fixed one.
 * Whatever opens must encode and decode without a fault, give valid UTF-8, and leave no memory behind. */
#include "mem.h"
#include "tokenizer_impl.h"
#include "tokenizer_utf8.h"

#include <stdlib.h>
#include <string.h>

/* Every kind of part once, in a few tokens. */
static const char fixed[] = "{\"added_tokens\":[{\"id\":40,\"content\":\"<s>\",\"special\":true,\"lstrip\":true},{"
                            "\"id\":41,\"content\":\"[w]\","
                            "\"single_word\":true,\"rstrip\":true,\"normalized\":true}],\"normalizer\":{\"type\":"
                            "\"Sequence\",\"normalizers\":[{\"type\":"
                            "\"NFC\"},{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"\\\\s\"},\"content\":\" "
                            "\"}]},\"pre_tokenizer\":{\"type\":\"Sequence\","
                            "\"pretokenizers\":[{\"type\":\"Digits\",\"individual_digits\":true},{\"type\":\"Split\","
                            "\"pattern\":{\"Regex\":\"\\\\w+|x?\"},"
                            "\"behavior\":\"MergedWithPrevious\",\"invert\":false},{\"type\":\"Metaspace\","
                            "\"replacement\":\"_\",\"prepend_scheme\":\"first\","
                            "\"split\":true}]},\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{"
                            "\"SpecialToken\":{\"id\":\"<s>\",\"type_id\":0}},"
                            "{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}],\"special_tokens\":{\"<s>\":{\"id\":\"<s>\","
                            "\"ids\":[40]}}},\"decoder\":{\"type\":"
                            "\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{\"String\":\"_\"},"
                            "\"content\":\" \"},{\"type\":\"ByteFallback\"},"
                            "{\"type\":\"Fuse\"},{\"type\":\"Strip\",\"content\":\" "
                            "\",\"start\":1,\"stop\":0}]},\"model\":{\"type\":\"BPE\",\"byte_fallback\":"
                            "true,\"unk_token\":\"?\",\"vocab\":{\"?\":0,\"_\":1,\"a\":2,\"b\":3,\"aa\":4,\"_a\":5,"
                            "\"ab\":6,\"<0xC3>\":7,\"<0xA9>\":8,\"<0xCC>\":9},"
                            "\"merges\":[\"a a\",[\"_\",\"a\"],\"a b\"]}}";

static void check(bool holds)
{
    if (!holds)
        abort();
}

static void use(const struct tl_tokenizer *tk, const char *text, size_t bytes)
{
    for (int flags = 0; flags < 4; flags++) {
        struct tl_encode_params p = {.text = text,
                                     .text_bytes = bytes,
                                     .add_special = flags & 1,
                                     .parse_special = flags & 2,
                                     .max_tokens = 1 << 16};
        struct tl_detok_params keep = {.keep_special = flags & 1, .mid_text = flags & 2};
        struct tl_error err;
        int32_t *ids = NULL;
        char *back = NULL;
        size_t n = 0, n_back = 0;
        if (tl_tokenizer_encode(tk, &p, &ids, &n, &err) == TL_OK &&
            tl_tokenizer_decode(tk, ids, n, &keep, &back, &n_back, &err) == TL_OK)
            check(tl_utf8_valid(back, n_back) == n_back);
        else
            check(err.msg[0] != '\0');
        tl_free(back);
        tl_free(ids);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char text[] = " aab  <s> [w] e\xcc\x81\xc3\xa9 12 <|x|>\n\xf0\x9f\x91\x8d";
    static struct tl_tokenizer *fixed_tk;
    struct tl_tokenizer *tk;
    struct tl_error err = {0};
    int64_t live;
    if (!fixed_tk)
        check(tl_tokenizer_open_memory(&fixed_tk, fixed, sizeof(fixed) - 1, false, NULL) == TL_OK);
    live = tl_mem_live();
    if (size > 0 && data[0] == 'T') {
        use(fixed_tk, (const char *)data + 1, size - 1);
    } else if (tl_tokenizer_open_memory(&tk, (const char *)data, size, true, &err) == TL_OK) {
        use(tk, text, sizeof(text) - 1);
        tl_tokenizer_free(tk);
    } else {
        check(tk == NULL && err.msg[0] != '\0');
    }
    check(tl_mem_live() == live);
    return 0;
}
