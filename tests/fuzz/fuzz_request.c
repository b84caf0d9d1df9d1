/* The body of a completion request: any bytes are a typed request or an error that names something. */
#include <stdlib.h>
#include <string.h>

#include "completion_parse.h"
#include "http_status.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct tl_arch_spec spec = {
        .vocab_size = 300, .loops_default = 4, .loops_max = 16, .n_stop_ids = 2, .stop_ids = {0, 299}};
    static struct tl_model_info info = {.spec = &spec, .vocab_size = 300, .max_seq_len = 64, .max_loops = 16};
    static struct tl_config cfg;
    static struct tl_facts facts = {.info = &info, .name = "m", .cfg = &cfg};
    struct tl_error err;
    struct tl_ask ask;
    if (!cfg.host && tl_config_defaults(&cfg, &err) != TL_OK)
        abort();
    int code = tl_completion_parse(&ask, (const char *)data, size, &facts, &err);
    if (code < 0 || code >= TL_CODE_COUNT)
        abort();
    if (code) {
        if (tl_code_row(code)->http == 500 || !err.msg[0])
            abort();
    } else {
        if (ask.n_prompts < 1 || ask.n < 1 || ask.n_prompts * ask.n > cfg.max_choices)
            abort();
        code = tl_ask_encode(&ask, &facts, &err);
        for (int i = 0; !code && i < ask.n_prompts; i++) {
            const struct tl_prompt *p = &ask.prompts[i];
            bool empty = p->n_ids < 1 && !ask.reuse.named; /* after a named entry a suffix may be empty */
            if (empty || p->n_ids + ask.max_tokens > info.max_seq_len || p->same_as > i)
                abort();
        }
    }
    tl_ask_clear(&ask);
    return 0;
}
