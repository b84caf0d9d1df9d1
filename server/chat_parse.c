#include "chat_parse.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "http_status.h"

#define MESSAGES_MAX 4096

/* What the client calls a role, and what templates call it. */
static const char *const roles[][2] = {
    {"system", "system"}, {"developer", "system"}, {"user", "user"}, {"assistant", "assistant"}, {"tool", "tool"}};

static const char *role_of(struct tl_fields *f, const cJSON *m, int i)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(m, "role");
    for (size_t k = 0; cJSON_IsString(v) && k < sizeof(roles) / sizeof(roles[0]); k++)
        if (strcmp(v->valuestring, roles[k][0]) == 0)
            return roles[k][1];
    if (cJSON_IsString(v))
        tl_field_fail(f, TL_ERR_BAD_PARAM, "messages",
                      "has the role '%.30s' at item %d; roles are system, developer, user, assistant "
                      "and tool.",
                      v->valuestring, i);
    else
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "messages", "has no role at item %d.", i);
    return NULL;
}

/* A string, or the texts of a list of parts in a row. NULL: no memory, or f says what is wrong. */
static cJSON *content_of(struct tl_fields *f, const cJSON *m, int i)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(m, "content"), *part;
    struct tl_bytes text = {0};
    if (cJSON_IsString(v))
        return cJSON_CreateString(v->valuestring);
    if ((!v || cJSON_IsNull(v)) && cJSON_IsArray(cJSON_GetObjectItemCaseSensitive(m, "tool_calls")))
        return cJSON_CreateString("");
    if (!cJSON_IsArray(v)) {
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "messages",
                      "has content at item %d that is neither a string nor a list of parts.", i);
        return NULL;
    }
    cJSON_ArrayForEach(part, v)
    {
        const cJSON *type = cJSON_GetObjectItemCaseSensitive(part, "type"),
                    *s = cJSON_GetObjectItemCaseSensitive(part, "text");
        if (!cJSON_IsString(type) || strcmp(type->valuestring, "text") != 0 || !cJSON_IsString(s)) {
            tl_field_fail(f, TL_CODE_UNSUPPORTED_PARAMETER, "messages", "has a part at item %d that is no text.", i);
            break;
        }
        tl_bytes_str(&text, s->valuestring);
    }
    cJSON *out = f->code || text.failed ? NULL : cJSON_CreateString(tl_bytes_cstr(&text));
    tl_bytes_free(&text);
    return out;
}

/* One message as the template sees it, appended to out. false: no memory, or f says what is wrong. */
static bool add_message(struct tl_fields *f, const cJSON *m, int i, cJSON *out)
{
    static const char *const passed_on[] = {"name", "reasoning_content", "tool_calls", "tool_call_id"};
    cJSON *to = cJSON_CreateObject(), *content;
    if (!to || !cJSON_AddItemToArray(out, to)) {
        cJSON_Delete(to);
        return false;
    }
    if (!cJSON_IsObject(m)) {
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "messages", "has an item that is no object: item %d.", i);
        return false;
    }
    const char *role = role_of(f, m, i);
    if (!role || !cJSON_AddStringToObject(to, "role", role) || !(content = content_of(f, m, i)))
        return false;
    cJSON_AddItemToObject(to, "content", content);
    for (size_t k = 0; k < sizeof(passed_on) / sizeof(passed_on[0]); k++) {
        const cJSON *v = cJSON_GetObjectItemCaseSensitive(m, passed_on[k]);
        cJSON *copy = v && !cJSON_IsNull(v) ? cJSON_Duplicate(v, true) : NULL;
        if (copy && !cJSON_AddItemToObject(to, passed_on[k], copy))
            return false;
        if (!copy && v && !cJSON_IsNull(v))
            return false;
    }
    return true;
}

/* "chat_template_kwargs": variables for the template that are no business of ours, e.g. enable_thinking. */
static bool add_kwargs(struct tl_fields *f, cJSON *variables)
{
    const cJSON *kwargs = tl_field(f, "chat_template_kwargs"), *v;
    if (kwargs && !cJSON_IsObject(kwargs)) {
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "chat_template_kwargs", "must be an object.");
        return false;
    }
    cJSON_ArrayForEach(v, kwargs)
    {
        if (strcmp(v->string, "messages") == 0 || strstr(v->string, "_token") ||
            strcmp(v->string, "add_generation_prompt") == 0) {
            tl_field_fail(f, TL_ERR_BAD_PARAM, "chat_template_kwargs", "may not set '%.40s'.", v->string);
            return false;
        }
        cJSON *copy = cJSON_Duplicate(v, true);
        if (!copy || !cJSON_AddItemToObject(variables, v->string, copy))
            return false;
    }
    return true;
}

static void refuse_without_template(struct tl_fields *f, const struct tl_facts *facts)
{
    if (!facts->tokenizer)
        tl_field_fail(f, TL_ERR_UNSUPPORTED, "messages", "cannot be used: this model came without a tokenizer.");
    else if (facts->no_chat)
        tl_field_fail(f, TL_ERR_UNSUPPORTED, "messages", "cannot be used: %s.", facts->no_chat->msg);
    else
        tl_field_fail(f, TL_ERR_UNSUPPORTED, "messages", "cannot be used: this model came without a chat template.");
}

char *tl_chat_parse_messages(struct tl_fields *f, const struct tl_facts *facts, bool answer)
{
    const cJSON *messages = tl_field(f, "messages"), *m;
    cJSON *variables = NULL, *list;
    char *printed = NULL, *text = NULL;
    int i = 0, n = cJSON_GetArraySize(messages);
    bool ok = false, generation = tl_field_bool(f, "add_generation_prompt", answer);
    if (!facts->chat || !facts->tokenizer)
        refuse_without_template(f, facts);
    else if (!cJSON_IsArray(messages))
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "messages", "must be a list of messages.");
    else if (n < 1)
        tl_field_fail(f, TL_ERR_EMPTY_PROMPT, "messages", "is empty.");
    else if (n > MESSAGES_MAX)
        tl_field_fail(f, TL_ERR_OUT_OF_RANGE, "messages", "holds %d messages; %d are allowed.", n, MESSAGES_MAX);
    if (f->code)
        return NULL;
    variables = cJSON_CreateObject();
    list = variables ? cJSON_AddArrayToObject(variables, "messages") : NULL;
    ok = list && cJSON_AddBoolToObject(variables, "add_generation_prompt", generation) && add_kwargs(f, variables);
    cJSON_ArrayForEach(m, messages) ok = ok && add_message(f, m, i++, list);
    if (ok)
        printed = cJSON_PrintUnformatted(variables);
    if (printed)
        text = strdup(printed); /* of one allocator with all other prompts */
    if (!f->code && !text)
        tl_field_fail(f, TL_ERR_NO_HOST_MEMORY, "messages", "do not fit into memory.");
    cJSON_free(printed);
    cJSON_Delete(variables);
    return text;
}

/* Does the prompt leave the model inside its thoughts? */
static bool ends_in_thought(const char *s, size_t n)
{
    while (n > 0 && (s[n - 1] == '\n' || s[n - 1] == ' '))
        n--;
    return n >= 7 && memcmp(s + n - 7, "<think>", 7) == 0;
}

int tl_chat_encode(const struct tl_facts *facts, const char *variables, size_t n_variables, int32_t **ids, int *n_ids,
                   bool *think_open, struct tl_error *err)
{
    struct tl_chat_text chat = {0};
    int32_t *encoded = NULL;
    size_t n = 0;
    *ids = NULL;
    enum tl_status st = tl_chat_render(facts->chat, variables, n_variables, &chat, err);
    if (st == TL_OK) {
        struct tl_encode_params ep = {
            .text = chat.text, .text_bytes = chat.n_bytes, .parse_special = true, .plain = chat.plain};
        if (think_open)
            *think_open = tl_chat_thinks(facts->chat) && ends_in_thought(chat.text, chat.n_bytes);
        st = tl_tokenizer_encode(facts->tokenizer, &ep, &encoded, &n, err);
    }
    if (st == TL_OK) {
        *ids = n < INT32_MAX ? malloc((n ? n : 1) * sizeof(*encoded)) : NULL;
        if (*ids)
            memcpy(*ids, encoded, n * sizeof(*encoded));
        else
            st = tl_fail_host_memory(err, n * sizeof(*encoded));
        *n_ids = (int)n;
    }
    if (st != TL_OK)
        tl_error_param(err, "messages");
    tl_free(encoded);
    tl_chat_text_clear(&chat);
    return (int)st;
}
