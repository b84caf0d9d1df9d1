/* POST /v1/tokenize, /v1/detokenize. Long texts are encoded, and their answers written, beside the loop. */
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "aside.h"
#include "http.h"
#include "http_status.h"
#include "json.h"
#include "routes.h"
#include "server.h"

struct encoding {
    struct tl_aside aside;
    struct tl_exchange *x; /* NULL: the client left */
    const struct tl_facts *facts;
    char *text;
    bool add_special, parse_special, with_pieces;
    enum tl_status st;
    struct tl_error err;
    struct tl_bytes out; /* the answer */
};

static void encoding_free(struct encoding *e)
{
    tl_bytes_free(&e->out);
    free(e->text);
    free(e);
}

static void write_piece(struct tl_jw *w, const struct tl_tokenizer *tk, int32_t id)
{
    const char *p;
    size_t n, i = 0;
    int len;
    tl_jw_obj(w, NULL);
    tl_jw_int(w, "id", id);
    if (!tl_tokenizer_piece(tk, id, &p, &n))
        n = 0;
    while (i < n && (len = tl_utf8_len(p + i, n - i)) > 0)
        i += (size_t)len;
    if (i == n) {
        tl_jw_strn(w, "piece", n ? p : "", n);
    } else { /* not whole characters: its bytes */
        tl_jw_arr(w, "piece");
        for (i = 0; i < n; i++)
            tl_jw_int(w, NULL, (unsigned char)p[i]);
        tl_jw_arr_end(w);
    }
    tl_jw_obj_end(w);
}

static void encode(void *user)
{
    struct encoding *e = user;
    struct tl_encode_params p = {.text = e->text,
                                 .text_bytes = strlen(e->text),
                                 .add_special = e->add_special,
                                 .parse_special = e->parse_special};
    struct tl_jw w = {.b = &e->out};
    int32_t *ids = NULL;
    size_t n = 0;
    e->st = tl_tokenizer_encode(e->facts->tokenizer, &p, &ids, &n, &e->err);
    if (e->st != TL_OK)
        return;
    tl_jw_obj(&w, NULL);
    tl_jw_arr(&w, "tokens");
    for (size_t i = 0; i < n; i++) {
        if (e->with_pieces)
            write_piece(&w, e->facts->tokenizer, ids[i]);
        else
            tl_jw_int(&w, NULL, ids[i]);
    }
    tl_jw_arr_end(&w);
    tl_jw_int(&w, "count", (int64_t)n);
    tl_jw_int(&w, "max_seq_len", e->facts->info->max_seq_len);
    tl_jw_obj_end(&w);
    tl_free(ids);
}

static void reply(struct encoding *e)
{
    struct tl_exchange *x = e->x;
    if (e->st != TL_OK) {
        tl_reply_error(x, &e->err);
        return;
    }
    x->out = e->out;
    memset(&e->out, 0, sizeof(e->out));
    tl_reply_json(x, 200);
}

static void on_encoded(void *user, bool ran)
{
    struct encoding *e = user;
    if (e->x && ran) {
        e->x->ops = NULL;
        reply(e);
    }
    encoding_free(e);
}

static void on_gone(struct tl_exchange *x)
{
    struct encoding *e = x->user;
    e->x = NULL;
    tl_aside_give_up(&e->aside);
}

static void on_nothing(struct tl_exchange *x) { (void)x; }
static const struct tl_exchange_ops encoding_ops = {on_gone, on_nothing, on_nothing};

/* Opens the body; answers and returns false if it is unusable. */
static bool open_body(struct tl_exchange *x, struct tl_fields *f, struct tl_error *err)
{
    int code = tl_fields_open(f, x->body.data, x->body.n, err);
    tl_bytes_free(&x->body);
    if (!code && !x->srv->facts.tokenizer)
        tl_field_fail(f, TL_ERR_UNSUPPORTED, "model", "came without a tokenizer: it takes token ids alone.");
    const char *model = code ? NULL : tl_field_str(f, "model", NULL);
    if (model && !f->code && strcmp(model, x->srv->facts.name) != 0)
        f->code = tl_refuse(err, TL_CODE_MODEL_NOT_FOUND, "model", "This model is not served here; '%s' is.",
                            x->srv->facts.name);
    if (!f->code)
        return true;
    tl_fields_close(f);
    tl_reply_error(x, err);
    return false;
}

void tl_api_tokenize(struct tl_exchange *x)
{
    static const char *const known[] = {"model",         "prompt",      "content", "add_special",
                                        "parse_special", "with_pieces", NULL};
    struct tl_fields f;
    struct tl_error err;
    if (!open_body(x, &f, &err))
        return;
    tl_fields_only(&f, known);
    const char *prompt = tl_field_str(&f, "prompt", NULL), *content = tl_field_str(&f, "content", NULL);
    bool special = tl_field_bool(&f, "add_special", true), parse = tl_field_bool(&f, "parse_special", true);
    bool pieces = tl_field_bool(&f, "with_pieces", false);
    if (!prompt == !content)
        tl_field_fail(&f, TL_CODE_INVALID_TYPE, "prompt", "or content must be there, one of them.");
    struct encoding *e = f.code ? NULL : calloc(1, sizeof(*e));
    if (e)
        e->text = strdup(prompt ? prompt : content);
    if (!f.code && (!e || !e->text))
        f.code = (int)tl_fail_host_memory(&err, sizeof(*e));
    tl_fields_close(&f);
    if (f.code) {
        free(e);
        tl_reply_error(x, &err);
        return;
    }
    e->x = x;
    e->facts = &x->srv->facts;
    e->add_special = special;
    e->parse_special = parse;
    e->with_pieces = pieces;
    size_t bytes = strlen(e->text);
    if (bytes > (size_t)x->srv->cfg->max_prompt_bytes_inline) {
        tl_http_wait(x, &encoding_ops, e);
        if (tl_aside_start(&e->aside, x->srv, bytes, encode, on_encoded, e))
            return;
        x->ops = NULL;
    }
    encode(e);
    reply(e);
    encoding_free(e);
}

void tl_api_detokenize(struct tl_exchange *x)
{
    static const char *const known[] = {"model", "tokens", NULL};
    struct tl_detok_params params = {.keep_special = true};
    struct tl_fields f;
    struct tl_error err;
    struct tl_jw w = {.b = &x->out};
    char *text = NULL;
    size_t n = 0;
    int32_t *ids = NULL;
    int n_ids = 0;
    if (!open_body(x, &f, &err))
        return;
    tl_fields_only(&f, known);
    const cJSON *tokens = tl_field(&f, "tokens");
    if (!cJSON_IsArray(tokens))
        tl_field_fail(&f, TL_CODE_INVALID_TYPE, "tokens", "must be a list of token ids.");
    if (!f.code)
        tl_field_tokens(&f, "tokens", tokens, x->srv->facts.info->vocab_size, &ids, &n_ids);
    if (!f.code)
        f.code = (int)tl_tokenizer_decode(x->srv->facts.tokenizer, ids, (size_t)n_ids, &params, &text, &n, &err);
    tl_fields_close(&f);
    free(ids);
    if (f.code) {
        tl_reply_error(x, &err);
        return;
    }
    tl_jw_obj(&w, NULL);
    tl_jw_strn(&w, "content", text, n);
    tl_jw_strn(&w, "prompt", text, n);
    tl_jw_obj_end(&w);
    tl_free(text);
    tl_reply_json(x, 200);
}
