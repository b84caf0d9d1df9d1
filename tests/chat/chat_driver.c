/* Runs chat templates for a test in another language. Each line of stdin is an object {"template", "tokens", "variables"
 * (as JSON text, so that numbers keep their form)}; each line of stdout {"text", "plain"} (plain: a 0 or 1 per byte) or {"error", "status"}. */
#include "chat_template.h"
#include "mem.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static cJSON *answer(const cJSON *in)
{
    const cJSON *text = cJSON_GetObjectItem(in, "template");
    char *tokens = cJSON_PrintUnformatted(cJSON_GetObjectItem(in, "tokens"));
    const char *variables = cJSON_GetObjectItem(in, "variables")->valuestring;
    struct tl_chat_template *t = NULL;
    struct tl_chat_text result = {0};
    struct tl_error err = {0};
    cJSON *out = cJSON_CreateObject();
    enum tl_status st = tl_chat_compile(&t, text->valuestring, strlen(text->valuestring), tokens, &err);
    if (st == TL_OK)
        st = tl_chat_render(t, variables, strlen(variables), &result, &err);
    if (st == TL_OK) {
        char *plain = malloc(result.n_bytes + 1);
        for (size_t i = 0; i < result.n_bytes; i++)
            plain[i] = result.plain[i] ? '1' : '0';
        plain[result.n_bytes] = '\0';
        cJSON_AddStringToObject(out, "text", result.text);
        cJSON_AddStringToObject(out, "plain", plain);
        free(plain);
    } else {
        cJSON_AddStringToObject(out, "error", err.msg);
        cJSON_AddStringToObject(out, "status", tl_status_name(st));
    }
    tl_chat_text_clear(&result);
    tl_chat_free(t);
    cJSON_free(tokens);
    return out;
}

int main(void)
{
    char *line = NULL;
    size_t cap = 0;
    while (getline(&line, &cap, stdin) > 0) {
        cJSON *in = cJSON_Parse(line), *out = answer(in);
        char *text = cJSON_PrintUnformatted(out);
        puts(text);
        fflush(stdout);
        cJSON_free(text);
        cJSON_Delete(out);
        cJSON_Delete(in);
    }
    free(line);
    return 0;
}
