/* GET /v1/models, /v1/models/{id}: the model that is served, with its limits. */
#include <string.h>

#include "generate.h"
#include "http.h"
#include "http_status.h"
#include "routes.h"
#include "server.h"

static bool not_loaded(struct tl_exchange *x)
{
    struct tl_error err;
    if (x->srv->facts.info)
        return false;
    tl_refuse(&err, TL_CODE_MODEL_LOADING, NULL, "The model is being loaded (%d %%).",
              (int)(x->srv->load_fraction * 100));
    tl_reply_error(x, &err);
    return true;
}

static void write_model(const struct tl_server *s, struct tl_jw *w)
{
    const struct tl_model_info *info = s->facts.info;
    tl_jw_obj(w, NULL);
    tl_jw_str(w, "id", s->facts.name);
    tl_jw_str(w, "object", "model");
    tl_jw_int(w, "created", s->facts.created);
    tl_jw_str(w, "owned_by", "tinyloop");
    tl_jw_obj(w, "limits");
    tl_jw_int(w, "max_seq_len", info->max_seq_len);
    tl_jw_int(w, "vocab_size", info->vocab_size);
    tl_jw_int(w, "default_loops", info->spec->loops_default);
    tl_jw_int(w, "trained_loops", info->spec->loops_trained);
    tl_jw_int(w, "max_loops", info->max_loops);
    tl_jw_int(w, "max_stop", TL_STOPS_MAX);
    tl_jw_int(w, "max_choices", s->cfg->max_choices);
    tl_jw_int(w, "max_body_bytes", s->cfg->max_body_bytes);
    tl_jw_obj_end(w);
    tl_jw_str(w, "fingerprint", info->fingerprint);
    tl_jw_str(w, "quantization", info->weights);
    tl_jw_str(w, "architecture", info->spec->model_type);
    tl_jw_str(w, "device", info->device);
    tl_jw_uint(w, "parameters", info->n_parameters);
    tl_jw_bool(w, "has_tokenizer", s->facts.tokenizer != NULL);
    tl_jw_obj_end(w);
}

void tl_api_models(struct tl_exchange *x)
{
    struct tl_jw w = {.b = &x->out};
    if (not_loaded(x))
        return;
    tl_jw_obj(&w, NULL);
    tl_jw_str(&w, "object", "list");
    tl_jw_arr(&w, "data");
    write_model(x->srv, &w);
    tl_jw_arr_end(&w);
    tl_jw_str(&w, "first_id", x->srv->facts.name);
    tl_jw_str(&w, "last_id", x->srv->facts.name);
    tl_jw_bool(&w, "has_more", false);
    tl_jw_obj_end(&w);
    tl_reply_json(x, 200);
}

void tl_api_model(struct tl_exchange *x)
{
    struct tl_jw w = {.b = &x->out};
    struct tl_error err;
    if (not_loaded(x))
        return;
    if (strcmp(x->param, x->srv->facts.name) != 0) {
        tl_refuse(&err, TL_CODE_MODEL_NOT_FOUND, "model", "This model is not served here; '%s' is.",
                  x->srv->facts.name);
        tl_reply_error(x, &err);
        return;
    }
    write_model(x->srv, &w);
    tl_reply_json(x, 200);
}
