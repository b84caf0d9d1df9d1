#include "chat_template_impl.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

#include "json.h"
#include "mem.h"
#include "tokenizer_utf8.h"

#define CONFIG_BYTES_MAX (16u << 20)

void tl_chat_free(struct tl_chat_template *t)
{
    if (!t)
        return;
    tl_free(t->source);
    tl_free(t->strings);
    tl_free(t->nodes);
    tl_free(t->tokens);
    tl_free(t);
}

void tl_chat_text_clear(struct tl_chat_text *c)
{
    if (!c)
        return;
    tl_free(c->text);
    tl_free(c->plain);
    memset(c, 0, sizeof(*c));
}

bool tl_chat_thinks(const struct tl_chat_template *t) { return t->thinks; }

/* Jinja's view of a text: newlines are \n, and the last one does not count. */
static size_t normal_newlines(char *to, const char *from, size_t n)
{
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        to[k++] = from[i] == '\r' ? '\n' : from[i];
        if (from[i] == '\r' && i + 1 < n && from[i + 1] == '\n')
            i++;
    }
    return k > 0 && to[k - 1] == '\n' ? k - 1 : k;
}

enum tl_status tl_chat_compile(struct tl_chat_template **out, const char *text, size_t bytes, const char *tokens,
                               struct tl_error *err)
{
    struct tl_chat_template *t = NULL;
    enum tl_status st = TL_OK;
    *out = NULL;
    if (bytes > TL_CHAT_TEMPLATE_BYTES_MAX)
        return tl_fail(err, TL_ERR_UNSUPPORTED, "the chat template has %zu bytes, at most %u are read", bytes,
                       TL_CHAT_TEMPLATE_BYTES_MAX);
    size_t good = tl_utf8_valid(text, bytes);
    if (good < bytes)
        return tl_fail(err, TL_ERR_BAD_FILE, "the chat template is not valid UTF-8 at byte %zu", good);
    t = tl_calloc(1, sizeof(*t));
    if (!t)
        return tl_fail_host_memory(err, sizeof(*t));
    t->source = tl_malloc(bytes + 1);
    t->strings = tl_malloc(bytes + 1);
    t->tokens = tl_strdup(tokens ? tokens : "{}");
    if (!t->source || !t->strings || !t->tokens) {
        st = tl_fail_host_memory(err, bytes + 1);
        goto out;
    }
    t->tokens_bytes = strlen(t->tokens);
    size_t n = normal_newlines(t->source, text, bytes);
    t->source[n] = '\0';
    t->thinks = memmem(t->source, n, "<think>", 7) != NULL;
    st = tl_ct_parse(t, n, err);
    if (st != TL_OK)
        goto out;
    *out = t;
    t = NULL;
out:
    tl_chat_free(t);
    return st;
}

/* ---- files --------------------------------------------------------------------------------------------------------- */

/* *text stays NULL where there is no such file. */
static enum tl_status read_file(const char *dir, const char *name, size_t max, char **text, size_t *n,
                                struct tl_error *err)
{
    char path[4096];
    if (snprintf(path, sizeof(path), "%s/%s", dir, name) >= (int)sizeof(path))
        return tl_fail(err, TL_ERR_BAD_PARAM, "the path of %s is too long", name);
    struct tl_error why = {0};
    enum tl_status st = tl_file_read(text, n, path, max, &why);
    if (st == TL_OK || st == TL_ERR_NOT_FOUND)
        return TL_OK;
    if (err)
        *err = why;
    return st;
}

/* bos_token and the like: a string, or an object with "content". As the text of a JSON object. */
static char *special_tokens(const cJSON *config)
{
    static const char *const names[] = {"bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"};
    cJSON *out = cJSON_CreateObject();
    for (size_t i = 0; out && i < sizeof(names) / sizeof(names[0]); i++) {
        const cJSON *v = cJSON_GetObjectItemCaseSensitive(config, names[i]);
        if (cJSON_IsObject(v))
            v = cJSON_GetObjectItemCaseSensitive(v, "content");
        if (cJSON_IsString(v) && !cJSON_AddStringToObject(out, names[i], v->valuestring)) {
            cJSON_Delete(out);
            out = NULL;
        }
    }
    char *printed = out ? cJSON_PrintUnformatted(out) : NULL, *copy = printed ? tl_strdup(printed) : NULL;
    cJSON_free(printed);
    cJSON_Delete(out);
    return copy;
}

/* "chat_template" of the config: NULL if there is none. */
static enum tl_status template_of(const cJSON *config, const char **text, struct tl_error *err)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(config, "chat_template"), *e;
    *text = NULL;
    if (!v || cJSON_IsNull(v))
        return TL_OK;
    if (cJSON_IsString(v)) {
        *text = v->valuestring;
        return TL_OK;
    }
    cJSON_ArrayForEach(e, v)
    {
        const cJSON *name = cJSON_GetObjectItemCaseSensitive(e, "name"),
                    *t = cJSON_GetObjectItemCaseSensitive(e, "template");
        if (cJSON_IsString(name) && cJSON_IsString(t) && strcmp(name->valuestring, "default") == 0)
            *text = t->valuestring;
    }
    return *text
               ? TL_OK
               : tl_fail(
                     err, TL_ERR_BAD_FILE,
                     "tokenizer_config.json: chat_template is neither a string nor a list with one named \"default\"");
}

enum tl_status tl_chat_open(struct tl_chat_template **out, const char *dir, const struct tl_tokenizer *tokenizer,
                            struct tl_error *err)
{
    char *text = NULL, *config_text = NULL, *tokens = NULL;
    const char *found = NULL;
    size_t n = 0, n_config = 0;
    cJSON *config = NULL;
    enum tl_status st;
    *out = NULL;
    if ((st = read_file(dir, "chat_template.jinja", TL_CHAT_TEMPLATE_BYTES_MAX, &text, &n, err)) != TL_OK ||
        (st = read_file(dir, "tokenizer_config.json", CONFIG_BYTES_MAX, &config_text, &n_config, err)) != TL_OK)
        goto out;
    if (config_text && (st = tl_json_parse(&config, config_text, n_config, "tokenizer_config.json", err)) != TL_OK)
        goto out;
    if (config && !cJSON_IsObject(config)) {
        st = tl_fail(err, TL_ERR_BAD_FILE, "tokenizer_config.json is not a JSON object");
        goto out;
    }
    if (!text && config && (st = template_of(config, &found, err)) == TL_OK && found)
        n = strlen(found);
    if (st != TL_OK || (!text && !found))
        goto out;
    if (config && !(tokens = special_tokens(config))) {
        st = tl_fail_host_memory(err, n_config);
        goto out;
    }
    st = tl_chat_compile(out, text ? text : found, n, tokens, err);
    if (st == TL_OK && tokenizer && tl_tokenizer_find(tokenizer, "<think>") >= 0)
        (*out)->thinks = true;
out:
    tl_json_free(config);
    tl_free(config_text);
    tl_free(tokens);
    tl_free(text);
    return st;
}

/* ---- render -------------------------------------------------------------------------------------------------------- */

static char *copy_of(struct tl_ct_run *r, const char *s, size_t n)
{
    char *p = tl_ct_alloc(r, n + 1);
    return p ? memcpy(p, s, n) : NULL;
}

enum tl_status tl_chat_render(const struct tl_chat_template *t, const char *variables, size_t bytes,
                              struct tl_chat_text *out, struct tl_error *err)
{
    struct tl_ct_run r = {.t = t, .err = err};
    memset(out, 0, sizeof(*out));
    if (bytes > TL_CHAT_MEMORY_MAX)
        return tl_fail(err, TL_ERR_OUT_OF_RANGE, "the conversation has %zu bytes, at most %u are read", bytes,
                       TL_CHAT_MEMORY_MAX);
    char *tokens = copy_of(&r, t->tokens, t->tokens_bytes), *text = copy_of(&r, variables, bytes);
    tl_ct_load(&r, tokens, t->tokens_bytes, false, "the special tokens");
    tl_ct_load(&r, text, bytes, true, "the variables of a chat template");
    tl_ct_run_body(&r, t->root);
    if (r.st == TL_OK && !r.out) { /* an empty result is a text, too */
        r.out = tl_malloc(1);
        r.out_plain = tl_malloc(1);
        if (!r.out || !r.out_plain)
            r.st = tl_fail_host_memory(err, 1);
    }
    if (r.st == TL_OK) {
        r.out[r.n_out] = '\0';
        *out = (struct tl_chat_text){r.out, r.n_out, r.out_plain};
        r.out = NULL;
        r.out_plain = NULL;
    }
    tl_free(r.out);
    tl_free(r.out_plain);
    tl_free(r.vars);
    tl_ct_release(&r);
    return r.st;
}
