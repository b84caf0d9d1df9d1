/* Whatever the scan accepts the JSON library must read the same: one object, nothing behind it, no key twice. */
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "prescan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tl_error err;
    const char *end = NULL;
    if (tl_prescan((const char *)data, size, 10000, &err) != TL_OK)
        return 0;
    cJSON *json = cJSON_ParseWithLengthOpts((const char *)data, size, &end, 0);
    if (!json || !cJSON_IsObject(json))
        abort();
    for (; end < (const char *)data + size; end++)
        if (!strchr(" \t\r\n", *end))
            abort();
    cJSON_Delete(json);
    return 0;
}
