/* tests/fuzz/fuzz_chat_template.c - the input is a template, or (after a zero byte) a template and the JSON of its variables.
 * Whatever compiles must render to valid UTF-8 with a mark per byte, or fail with a sentence, and leave no memory behind. */
#include "chat_template.h"
#include "mem.h"
#include "tokenizer_utf8.h"

#include <stdlib.h>
#include <string.h>

static const char talk[] =
    "{\"messages\":[{\"role\":\"system\",\"content\":\" Be \xc3\xa9.\"},{\"role\":\"user\",\"content\":\"<s>a b\"},"
    "{\"role\":\"assistant\",\"content\":\"<think>x</think>y\",\"tool_calls\":[{\"function\":{\"name\":\"f\","
    "\"arguments\":{\"x\":[1,2.5,null,true]}}}]}],\"add_generation_prompt\":true,\"tools\":[{\"a\":{}}]}";

static void check(bool holds)
{
    if (!holds)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *zero = size ? memchr(data, 0, size) : NULL;
    size_t n = zero ? (size_t)(zero - data) : size;
    const char *variables = zero ? (const char *)zero + 1 : talk;
    size_t n_variables = zero ? size - n - 1 : sizeof(talk) - 1;
    struct tl_chat_template *t = NULL;
    struct tl_chat_text out;
    struct tl_error err = {0};
    int64_t live = tl_mem_live();
    if (tl_chat_compile(&t, (const char *)data, n, "{\"bos_token\":\"<s>\"}", &err) != TL_OK) {
        check(t == NULL && err.msg[0]);
    } else if (tl_chat_render(t, variables, n_variables, &out, &err) == TL_OK) {
        check(tl_utf8_valid(out.text, out.n_bytes) == out.n_bytes);
        for (size_t i = 0; i < out.n_bytes; i++)
            check(out.plain[i] <= 1);
        tl_chat_text_clear(&out);
    } else {
        check(!out.text && err.msg[0]);
    }
    tl_chat_free(t);
    check(tl_mem_live() == live);
    return 0;
}
