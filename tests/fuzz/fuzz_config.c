/* libFuzzer target: any text as config.json. The first byte picks the architecture whose reader gets it when the text does not
 * say one. A spec that is accepted must hold what tl_spec_check promises, and survive being written and read again. */
#include <stdlib.h>
#include <string.h>

#include "arch_bind.h"
#include "mem.h"
#include "rope.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check_spec(const struct tl_arch_spec *s)
{
    float freq[TL_HEAD_DIM_MAX / 2];
    struct tl_arch_spec back;
    const struct tl_arch *own = &tl_arch_tinyloop;
    const struct tl_arch_params random = {.start_state_random = true};
    char *text;
    if (tl_spec_check(s, NULL) != TL_OK)
        abort();
    for (int w = 0; w < TL_WT_COUNT; w++) {
        struct tl_weight_shape shape = tl_weight_shape(s, (enum tl_weight)w);
        if (shape.rows[0] < 1 || shape.n_in < 0 || shape.n_in > 131072)
            abort();
    }
    if (s->rope != TL_ROPE_NONE)
        tl_rope_inv_freq(s, freq);
    struct tl_arch_spec copy = *s;
    copy.c2c_is_final_norm = false;
    if (tl_spec_write(&text, &copy, "none", NULL) != TL_OK)
        return;
    struct tl_error err;
    if (tl_arch_read_config(&back, &own, text, strlen(text), NULL, &random, &err) != TL_OK)
        abort();
    tl_free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const struct tl_arch *const rows[] = {NULL, &tl_arch_huginn, &tl_arch_retrofit_olmo};
    const struct tl_arch_params random = {.start_state_random = true};
    struct tl_arch_spec spec;
    struct tl_error err;
    if (!n)
        return 0;
    const struct tl_arch *arch = rows[data[0] % 3];
    char *text = malloc(n); /* of exactly this size, so that reads past the end are seen */
    memcpy(text, data + 1, n - 1);
    if (tl_arch_read_config(&spec, &arch, text, n - 1, NULL, &random, &err) == TL_OK)
        check_spec(&spec);
    free(text);
    return 0;
}
