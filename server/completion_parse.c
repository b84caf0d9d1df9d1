#include "completion_parse.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "chat_parse.h"
#include "http_status.h"
#include "ids.h"
#include "json.h"

#define MAX_TOKENS_DEFAULT 128
#define LOGPROBS_MAX       5
#define CHAT_LOGPROBS_MAX  20
#define TIMEOUT_MS_MAX     86400000

/* What this route cannot do is refused rather than ignored, unless it is asked for in its harmless form. */
static void refuse_unsupported(struct tl_fields *f, int n)
{
    static const char *const never[] = {"suffix", "tools"};
    for (size_t i = 0; i < sizeof(never) / sizeof(never[0]); i++)
        if (tl_field(f, never[i]))
            tl_field_fail(f, TL_CODE_UNSUPPORTED_PARAMETER, never[i], "is not supported.");
    if (tl_field_int(f, "best_of", 1, 128, n) != n)
        tl_field_fail(f, TL_CODE_UNSUPPORTED_PARAMETER, "best_of", "is only supported when it equals n (%d).", n);
}

static char *copy_text(const char *s, size_t *n)
{
    *n = strlen(s);
    char *out = malloc(*n + 1);
    if (out)
        memcpy(out, s, *n + 1);
    return out;
}

static void one_prompt(struct tl_fields *f, const cJSON *v, const struct tl_facts *facts, struct tl_prompt *p)
{
    if (cJSON_IsString(v)) {
        if (!facts->tokenizer) {
            tl_field_fail(f, TL_ERR_UNSUPPORTED, "prompt", "must be token ids: this model came without a tokenizer.");
            return;
        }
        p->text = copy_text(v->valuestring, &p->n_text);
        if (!p->text)
            tl_field_fail(f, TL_ERR_NO_HOST_MEMORY, "prompt", "does not fit into memory.");
    } else {
        tl_field_tokens(f, "prompt", v, facts->info->vocab_size, &p->ids, &p->n_ids);
    }
}

/* string | string[] | int[] | int[][] */
static void parse_prompts(struct tl_fields *f, const struct tl_facts *facts, struct tl_ask *a)
{
    const cJSON *v = tl_field(f, "prompt"), *first = cJSON_IsArray(v) ? v->child : NULL, *e;
    int max = (int)(facts->cfg->max_choices / a->n), n = 1, i = 0;
    bool many = first && (cJSON_IsString(first) || cJSON_IsArray(first));
    if (a->reuse.named && (!v || (cJSON_IsArray(v) && !first))) { /* no suffix */
        a->prompts = calloc(1, sizeof(*a->prompts));
        if (a->prompts)
            a->prompts[0].ids = calloc(1, sizeof(int32_t));
        a->n_prompts = a->prompts != NULL;
        if (!a->prompts || !a->prompts[0].ids)
            tl_field_fail(f, TL_ERR_NO_HOST_MEMORY, "prompt", "does not fit into memory.");
        return;
    }
    if (!v || !(cJSON_IsString(v) || cJSON_IsArray(v))) {
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "prompt", "must be a string, token ids, or a list of either.");
        return;
    }
    if (cJSON_IsArray(v) && !first) {
        tl_field_fail(f, TL_ERR_EMPTY_PROMPT, "prompt", "is empty.");
        return;
    }
    if (many)
        n = cJSON_GetArraySize(v);
    if (n > max) {
        tl_field_fail(f, TL_ERR_OUT_OF_RANGE, "prompt",
                      "holds %d prompts for %d choices each; %lld sequences are allowed.", n, a->n,
                      (long long)facts->cfg->max_choices);
        return;
    }
    a->prompts = calloc((size_t)n, sizeof(*a->prompts));
    if (!a->prompts) {
        tl_field_fail(f, TL_ERR_NO_HOST_MEMORY, "prompt", "does not fit into memory.");
        return;
    }
    a->n_prompts = n;
    if (!many) {
        one_prompt(f, v, facts, &a->prompts[0]);
        return;
    }
    cJSON_ArrayForEach(e, v)
    {
        if (cJSON_IsString(e) != cJSON_IsString(first) || cJSON_IsArray(e) != cJSON_IsArray(first)) {
            tl_field_fail(f, TL_CODE_INVALID_TYPE, "prompt", "mixes kinds: item %d differs from the first.", i);
            return;
        }
        one_prompt(f, e, facts, &a->prompts[i++]);
    }
}

static void parse_stops(struct tl_fields *f, const struct tl_facts *facts, struct tl_ask *a)
{
    const cJSON *v = tl_field(f, "stop"), *e = cJSON_IsArray(v) ? v->child : v;
    struct tl_stop_string list[TL_STOPS_MAX];
    struct tl_error err;
    for (; e; e = cJSON_IsArray(v) ? e->next : NULL) {
        size_t n;
        if (!cJSON_IsString(e)) {
            tl_field_fail(f, TL_CODE_INVALID_TYPE, "stop", "must be a string or a list of strings.");
            return;
        }
        if (a->n_stops == TL_STOPS_MAX) {
            tl_field_fail(f, TL_ERR_OUT_OF_RANGE, "stop", "holds more than %d strings.", TL_STOPS_MAX);
            return;
        }
        a->stops[a->n_stops] = copy_text(e->valuestring, &n);
        if (!a->stops[a->n_stops]) {
            tl_field_fail(f, TL_ERR_NO_HOST_MEMORY, "stop", "does not fit into memory.");
            return;
        }
        list[a->n_stops] = (struct tl_stop_string){a->stops[a->n_stops], n};
        a->n_stops++;
    }
    struct tl_text_stream_params p = {.tokenizer = facts->tokenizer, .stops = list, .n_stops = a->n_stops};
    enum tl_status st = a->n_stops ? tl_text_stream_check(&p, &err) : TL_OK;
    if (st != TL_OK)
        tl_field_fail(f, (int)st, "stop", "is not usable: %s", err.msg);
}

static void parse_bias(struct tl_fields *f, const struct tl_facts *facts, struct tl_ask *a)
{
    const cJSON *v = tl_field(f, "logit_bias"), *e;
    if (!v)
        return;
    int n = cJSON_GetArraySize(v), i = 0;
    if (!cJSON_IsObject(v)) {
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "logit_bias", "must be an object of token id to bias.");
        return;
    }
    if (n > TL_LOGIT_BIAS_MAX) {
        tl_field_fail(f, TL_ERR_OUT_OF_RANGE, "logit_bias", "holds %d entries; %d are allowed.", n, TL_LOGIT_BIAS_MAX);
        return;
    }
    /* room for the stop ids that ignore_eos bans beside stop_token_ids */
    a->bias = calloc((size_t)n + TL_STOP_IDS_MAX, sizeof(*a->bias));
    if (!a->bias) {
        tl_field_fail(f, TL_ERR_NO_HOST_MEMORY, "logit_bias", "does not fit into memory.");
        return;
    }
    cJSON_ArrayForEach(e, v)
    {
        size_t digits = strspn(e->string, "0123456789");
        long id = strtol(e->string, NULL, 10);
        if (digits == 0 || e->string[digits] || digits > 9 || id >= facts->info->vocab_size) {
            tl_field_fail(f, TL_ERR_TOKEN_OUT_OF_VOCAB, "logit_bias",
                          "has the key '%.20s'; keys are token ids below %d.", e->string, facts->info->vocab_size);
            return;
        }
        if (!cJSON_IsNumber(e) || !(e->valuedouble >= -100 && e->valuedouble <= 100)) {
            tl_field_fail(f, cJSON_IsNumber(e) ? TL_ERR_OUT_OF_RANGE : TL_CODE_INVALID_TYPE, "logit_bias",
                          "has a value that is no number in -100..100, for token %ld.", id);
            return;
        }
        for (int k = 0; k < i; k++)
            if (a->bias[k].token == id) {
                tl_field_fail(f, TL_ERR_BAD_PARAM, "logit_bias", "names token %ld twice.", id);
                return;
            }
        a->bias[i++] = (struct tl_logit_bias){(int32_t)id, (float)e->valuedouble};
    }
    a->sampling.logit_bias = a->bias;
    a->sampling.n_logit_bias = i;
}

static void parse_stop_ids(struct tl_fields *f, const struct tl_facts *facts, struct tl_ask *a)
{
    const struct tl_arch_spec *spec = facts->info->spec;
    const cJSON *v = tl_field(f, "stop_token_ids");
    int32_t *ids = NULL;
    int n = 0;
    if (v && !cJSON_IsArray(v)) {
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "stop_token_ids", "must be a list of token ids.");
        return;
    }
    if (v)
        tl_field_tokens(f, "stop_token_ids", v, facts->info->vocab_size, &ids, &n);
    if (n > TL_STOP_IDS_USER_MAX)
        tl_field_fail(f, TL_ERR_OUT_OF_RANGE, "stop_token_ids", "holds %d ids; %d are allowed.", n,
                      TL_STOP_IDS_USER_MAX);
    if (f->code) {
        free(ids);
        return;
    }
    for (int i = 0; i < n; i++)
        a->stop_ids[i] = ids[i];
    free(ids);
    a->n_user_stop_ids = n;
    if (a->sampling.ignore_eos && n > 0) {
        /* The sampler's switch bans all stop ids; here those of the request must still stop, the model's must not. */
        if (!a->bias)
            a->bias = calloc(TL_STOP_IDS_MAX, sizeof(*a->bias));
        if (!a->bias) {
            tl_field_fail(f, TL_ERR_NO_HOST_MEMORY, "ignore_eos", "does not fit into memory.");
            return;
        }
        int nb = a->sampling.n_logit_bias;
        for (int i = 0; i < spec->n_stop_ids && nb < TL_LOGIT_BIAS_MAX; i++)
            a->bias[nb++] = (struct tl_logit_bias){spec->stop_ids[i], -100};
        a->sampling.logit_bias = a->bias;
        a->sampling.n_logit_bias = nb;
        a->sampling.ignore_eos = false;
    } else {
        for (int i = 0; i < spec->n_stop_ids; i++)
            a->stop_ids[n++] = spec->stop_ids[i];
    }
    a->sampling.stop_ids = a->stop_ids;
    a->sampling.n_stop_ids = n;
}

/* A whole number up to 2^53 - 1, or any 64-bit one as a string of digits. */
static void parse_seed(struct tl_fields *f, struct tl_ask *a)
{
    const cJSON *v = tl_field(f, "seed");
    a->seed_given = v != NULL;
    if (!v) {
        a->sampling.seed = tl_random64() & TL_JSON_INT_MAX;
    } else if (cJSON_IsString(v)) {
        uint64_t seed = 0;
        const char *s = v->valuestring;
        size_t n = strspn(s, "0123456789");
        bool ok = n > 0 && n <= 20 && s[n] == '\0';
        for (size_t i = 0; i < n && ok; i++) {
            uint64_t d = (uint64_t)(s[i] - '0');
            ok = seed < UINT64_MAX / 10 || (seed == UINT64_MAX / 10 && d <= UINT64_MAX % 10);
            seed = seed * 10 + d;
        }
        if (!ok)
            tl_field_fail(f, TL_ERR_OUT_OF_RANGE, "seed", "as a string must be digits of a number below 2^64.");
        a->sampling.seed = seed;
    } else {
        a->sampling.seed = (uint64_t)tl_field_int(f, "seed", 0, TL_JSON_INT_MAX, 0);
    }
}

static void parse_sampling(struct tl_fields *f, const struct tl_facts *facts, struct tl_ask *a)
{
    struct tl_sampling *s = &a->sampling;
    int vocab = facts->info->vocab_size;
    tl_sampling_default(s);
    s->temperature = (float)tl_field_num(f, "temperature", 0, 2, 1);
    if (s->temperature < 1e-4f)
        s->temperature = 0; /* below this it is greedy in all but overflow */
    s->top_p = (float)tl_field_num(f, "top_p", 0, 1, 1);
    if (s->top_p <= 0)
        s->top_p = 1e-6f; /* the likeliest token alone */
    s->min_p = (float)tl_field_num(f, "min_p", 0, 1, 0);
    s->top_k = (int)tl_field_int(f, "top_k", -1, INT32_MAX, 0);
    if (s->top_k < 0 || s->top_k >= vocab)
        s->top_k = 0; /* -1 and 0: off, and so is everything */
    s->repetition_penalty = (float)tl_field_num(f, "repetition_penalty", 0.01, 10, 1);
    s->presence_penalty = (float)tl_field_num(f, "presence_penalty", -2, 2, 0);
    s->frequency_penalty = (float)tl_field_num(f, "frequency_penalty", -2, 2, 0);
    s->min_tokens = (int)tl_field_int(f, "min_tokens", 0, INT32_MAX, 0);
    s->ignore_eos = tl_field_bool(f, "ignore_eos", false);
    if (a->chat) {
        a->logprobs = tl_field_bool(f, "logprobs", false);
        int top = (int)tl_field_int(f, "top_logprobs", 0, CHAT_LOGPROBS_MAX, 0);
        s->n_top_logprobs = a->logprobs ? top : -1;
    } else {
        a->logprobs = tl_field(f, "logprobs") != NULL && !cJSON_IsFalse(tl_field(f, "logprobs"));
        s->n_top_logprobs = a->logprobs ? (int)tl_field_int(f, "logprobs", 0, LOGPROBS_MAX, 0) : -1;
    }
    parse_seed(f, a);
    parse_bias(f, facts, a);
    parse_stop_ids(f, facts, a);
}

static void parse_depth(struct tl_fields *f, const struct tl_facts *facts, struct tl_ask *a)
{
    int64_t loops = 0, window = -1;
    const cJSON *v = tl_field(f, "loops");
    if (cJSON_IsString(v) && strcmp(v->valuestring, "auto") == 0) {
        if (facts->info->spec->exit == TL_EXIT_NONE)
            tl_field_fail(f, TL_ERR_UNSUPPORTED, "loops",
                          "\"auto\" needs a model with an exit criterion, and this one has none.");
        a->adaptive = true;
    } else if (v && !tl_json_whole(v, -TL_JSON_INT_MAX, TL_JSON_INT_MAX, &loops)) {
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "loops", "must be a whole number.");
    } else if (v && (loops < 1 || loops > facts->info->max_loops)) {
        if (tl_field_fail(f, TL_ERR_LOOPS_RANGE, "loops", "is %lld; this model is served with 1..%d.", (long long)loops,
                          facts->info->max_loops)) {
            tl_error_num(f->err, "min", 1);
            tl_error_num(f->err, "max", facts->info->max_loops);
            tl_error_num(f->err, "got", loops);
        }
    }
    a->loops = (int)loops;
    a->exit_threshold = (float)tl_field_num(f, "exit_threshold", 0, 1, 0);
    if (tl_field(f, "exit_threshold") && !a->adaptive)
        tl_field_fail(f, TL_ERR_BAD_PARAM, "exit_threshold", "needs loops: \"auto\".");
    v = tl_field(f, "cache_window");
    if (v && !tl_json_whole(v, -TL_JSON_INT_MAX, TL_JSON_INT_MAX, &window))
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "cache_window", "must be a whole number.");
    else if (v && (window < 0 || window > facts->info->max_seq_len))
        tl_field_fail(f, TL_ERR_WINDOW_RANGE, "cache_window", "is %lld; it must be 0..%d.", (long long)window,
                      facts->info->max_seq_len);
    a->cache_window = f->code ? -1 : (int)window;
}

static void parse_stream(struct tl_fields *f, struct tl_ask *a)
{
    struct tl_fields options;
    a->stream = tl_field_bool(f, "stream", false);
    if (tl_field_object(f, "stream_options", "stream_options.", &options)) {
        a->include_usage = tl_field_bool(&options, "include_usage", false);
        tl_field_bool(&options, "include_obfuscation",
                      false); /* padding against traffic analysis: accepted, not done */
        if (options.code)
            f->code = options.code;
        if (!a->stream)
            tl_field_fail(f, TL_ERR_BAD_PARAM, "stream_options", "is only allowed with stream.");
    }
}

static void parse_model(struct tl_fields *f, const struct tl_facts *facts)
{
    const char *model = tl_field_str(f, "model", NULL);
    if (!model) {
        tl_field_fail(f, TL_CODE_INVALID_TYPE, "model", "must be a string: the model's name (see /v1/models).");
    } else if (strcmp(model, facts->name) != 0) {
        f->code = tl_refuse(f->err, TL_CODE_MODEL_NOT_FOUND, "model", "The model '%.80s' is not served here; '%s' is.",
                            model, facts->name);
    }
}

static void parse_max_tokens(struct tl_fields *f, struct tl_ask *a)
{
    static const char *const aliases[] = {"max_completion_tokens", "n_predict"};
    a->max_tokens = (int)tl_field_int(f, "max_tokens", 0, INT32_MAX, -1);
    for (int i = 0; i < 2; i++) {
        int v = (int)tl_field_int(f, aliases[i], 0, INT32_MAX, -1);
        if (v < 0)
            continue;
        if (a->max_tokens >= 0 && a->max_tokens != v)
            tl_field_fail(f, TL_ERR_BAD_PARAM, aliases[i], "is another name of max_tokens and differs from it.");
        a->max_tokens = v;
    }
    a->max_tokens_given = a->max_tokens >= 0;
}

/* A conversation is one prompt, whose text is the variables of the chat template. */
static void parse_messages(struct tl_fields *f, const struct tl_facts *facts, struct tl_ask *a)
{
    char *text = tl_chat_parse_messages(f, facts, true);
    a->prompts = text ? calloc(1, sizeof(*a->prompts)) : NULL;
    if (!a->prompts) {
        free(text);
        tl_field_fail(f, TL_ERR_NO_HOST_MEMORY, "messages", "do not fit into memory.");
        return;
    }
    a->n_prompts = 1;
    a->prompts[0] = (struct tl_prompt){.text = text, .n_text = strlen(text)};
}

static int parse(struct tl_ask *a, bool chat, const char *body, size_t bytes, const struct tl_facts *facts,
                 struct tl_error *err)
{
    struct tl_fields f;
    memset(a, 0, sizeof(*a));
    a->chat = chat;
    if (tl_fields_open(&f, body, bytes, err) != 0)
        return f.code;
    parse_model(&f, facts);
    a->n = (int)tl_field_int(&f, "n", 1, facts->cfg->max_choices, 1);
    refuse_unsupported(&f, a->n);
    parse_max_tokens(&f, a);
    parse_sampling(&f, facts, a);
    parse_depth(&f, facts, a);
    tl_reuse_parse(&f, facts, &a->reuse);
    tl_form_parse(&f, facts->tokenizer != NULL, &a->form);
    parse_stream(&f, a);
    parse_stops(&f, facts, a);
    a->echo = !chat && tl_field_bool(&f, "echo", false);
    if (a->echo && a->logprobs && a->reuse.named)
        tl_field_fail(&f, TL_CODE_UNSUPPORTED_PARAMETER, "logprobs",
                      "with echo needs the whole prompt computed: no prefix_cache, no resume.");
    a->return_tokens = tl_field_bool(&f, "return_tokens", false);
    a->return_logits_hash = tl_field_bool(&f, "return_logits_hash", false);
    a->return_progress = tl_field_bool(&f, "return_progress", false);
    a->max_queue_s = (double)tl_field_int(&f, "max_queue_ms", 1, TIMEOUT_MS_MAX, 0) / 1e3;
    a->timeout_s = (double)tl_field_int(&f, "timeout_ms", 1, TIMEOUT_MS_MAX, 0) / 1e3;
    tl_field_str(&f, "user", NULL);
    if (!f.code && chat)
        parse_messages(&f, facts, a);
    else if (!f.code)
        parse_prompts(&f, facts, a);
    if (a->reuse.store && a->n * a->n_prompts > 1)
        tl_field_fail(&f, TL_CODE_UNSUPPORTED_PARAMETER, "store_resume", "is for one prompt and one choice.");
    if (!f.code) {
        enum tl_status st = tl_sampling_check(&a->sampling, facts->info->vocab_size, err);
        if (st != TL_OK)
            f.code = (int)st;
    }
    tl_fields_close(&f);
    return f.code;
}

int tl_completion_parse(struct tl_ask *a, const char *body, size_t bytes, const struct tl_facts *facts,
                        struct tl_error *err)
{
    return parse(a, false, body, bytes, facts, err);
}

int tl_chat_parse(struct tl_ask *a, const char *body, size_t bytes, const struct tl_facts *facts, struct tl_error *err)
{
    return parse(a, true, body, bytes, facts, err);
}

/* ---- from text to ids --------------------------------------------------------------------------------------------- */

size_t tl_ask_text_bytes(const struct tl_ask *ask)
{
    size_t n = 0;
    for (int i = 0; i < ask->n_prompts; i++)
        n += ask->prompts[i].n_text;
    return n;
}

int64_t tl_ask_tokens(const struct tl_ask *ask)
{
    int64_t n = 0;
    for (int i = 0; i < ask->n_prompts; i++)
        if (ask->prompts[i].same_as == i)
            n += ask->prompts[i].n_ids;
    return n;
}

/* suffix: of a named prefix, whose tokens have the special ones already. */
static int encode_prompt(struct tl_prompt *p, bool suffix, const struct tl_tokenizer *tk, struct tl_error *err)
{
    struct tl_encode_params ep = {
        .text = p->text, .text_bytes = p->n_text, .add_special = !suffix, .parse_special = true};
    int32_t *ids;
    size_t n;
    enum tl_status st = tl_tokenizer_encode(tk, &ep, &ids, &n, err);
    if (st != TL_OK) {
        tl_error_param(err, "prompt");
        return (int)st;
    }
    p->ids = n < INT32_MAX ? malloc((n ? n : 1) * sizeof(*ids)) : NULL;
    if (p->ids) {
        memcpy(p->ids, ids, n * sizeof(*ids));
        p->n_ids = (int)n;
    }
    tl_free(ids);
    return p->ids ? 0 : (int)tl_fail_host_memory(err, n * sizeof(*ids));
}

static int refuse_length(struct tl_error *err, int n_prompt, int64_t max_tokens, int max_seq_len)
{
    int code = tl_refuse(err, TL_ERR_CONTEXT_LENGTH, "prompt",
                         "The prompt has %d tokens and max_tokens is %lld; together they may have %d.", n_prompt,
                         (long long)max_tokens, max_seq_len);
    tl_error_num(err, "prompt_tokens", n_prompt);
    tl_error_num(err, "cached_tokens", 0);
    tl_error_num(err, "max_tokens", max_tokens);
    tl_error_num(err, "max_seq_len", max_seq_len);
    return code;
}

int tl_ask_encode(struct tl_ask *ask, const struct tl_facts *facts, struct tl_error *err)
{
    int max_seq_len = facts->info->max_seq_len, longest = 0;
    bool suffix = ask->reuse.named && !ask->reuse.prompt_is_full;
    for (int i = 0; i < ask->n_prompts; i++) {
        struct tl_prompt *p = &ask->prompts[i];
        int code = 0;
        if (!p->ids && ask->chat)
            code = tl_chat_encode(facts, p->text, p->n_text, &p->ids, &p->n_ids, &ask->think_open, err);
        else if (!p->ids)
            code = encode_prompt(p, suffix, facts->tokenizer, err);
        if (code)
            return code;
        if (p->n_ids < 1 && !suffix)
            return tl_refuse(err, TL_ERR_EMPTY_PROMPT, "prompt", "prompt %d has no tokens.", i);
        if (p->n_ids > longest)
            longest = p->n_ids;
        p->same_as = i;
        for (int k = 0; k < i && p->same_as == i; k++)
            if (ask->prompts[k].n_ids == p->n_ids &&
                (p->n_ids == 0 || memcmp(ask->prompts[k].ids, p->ids, (size_t)p->n_ids * sizeof(*p->ids)) == 0))
                p->same_as = k;
    }
    if (!ask->max_tokens_given) {
        int room = max_seq_len - longest;
        ask->max_tokens = room > MAX_TOKENS_DEFAULT && !ask->chat ? MAX_TOKENS_DEFAULT : room > 1 ? room : 1;
    }
    if (longest + (int64_t)ask->max_tokens > max_seq_len)
        return refuse_length(err, longest, ask->max_tokens, max_seq_len);
    return 0;
}
