/* Settings and key files: any bytes are settings or an error with a place; what is accepted prints and reads back. */
#include <stdlib.h>
#include <string.h>

#include "config.h"
#include "keys.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tl_config cfg;
    struct tl_keys keys;
    struct tl_error err;
    if (tl_config_defaults(&cfg, &err) != TL_OK)
        abort();
    if (tl_config_file_text(&cfg, (const char *)data, size, "f", &err) == TL_OK) {
        char *text = NULL;
        size_t n = 0;
        FILE *f = open_memstream(&text, &n);
        if (!f)
            abort();
        tl_config_print(&cfg, f);
        fclose(f);
        struct tl_config again;
        if (tl_config_defaults(&again, &err) != TL_OK)
            abort();
        (void)tl_config_file_text(&again, text, n, "g", &err);
        if (again.port != cfg.port || again.max_body_bytes != cfg.max_body_bytes)
            abort();
        tl_config_clear(&again);
        free(text);
    } else if (strncmp(err.msg, "f:", 2) != 0) {
        abort();
    }
    tl_config_clear(&cfg);
    if (tl_keys_parse(&keys, (const char *)data, size, "k", &err) == TL_OK) {
        if (keys.n < 1 || tl_keys_find(&keys, "x"))
            abort();
        tl_keys_free(&keys);
    }
    return 0;
}
