/* libFuzzer target: any bytes as a safetensors file. What is accepted must be consistent: every tensor lies inside the file,
 * can be found by its name, and can be read to its last byte. */
#include <stdlib.h>
#include <string.h>

#include "safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct tl_tensors *ts;
    struct tl_error err;
    volatile uint8_t sum = 0;
    if (tl_tensors_open_bytes(&ts, data, n, &err) != TL_OK) {
        if (ts || !err.msg[0])
            abort();
        return 0;
    }
    for (int i = 0; i < tl_tensors_count(ts); i++) {
        const struct tl_tensor *t = tl_tensors_at(ts, i);
        if (t->data < data || t->data + t->bytes > data + n || tl_tensors_find(ts, t->name) != t)
            abort();
        for (size_t k = 0; k < t->bytes; k++)
            sum = (uint8_t)(sum + t->data[k]);
    }
    tl_tensors_free(ts);
    return 0;
}
