#include "render.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *tl_render_finish(const struct tl_out_end *e) { return e->finish == TL_FINISH_LENGTH ? "length" : "stop"; }

bool tl_render_room(void **array, size_t *cap, size_t n, size_t more, size_t size, bool *failed)
{
    if (n + more <= *cap)
        return true;
    size_t want = *cap * 2 > n + more ? *cap * 2 : n + more + 16;
    void *p = realloc(*array, want * size);
    if (!p) {
        *failed = true;
        return false;
    }
    *array = p;
    *cap = want;
    return true;
}

void tl_render_piece(struct tl_bytes *out, const struct tl_tokenizer *tk, int32_t token)
{
    const char *p;
    size_t n, whole = 0;
    if (!tk || !tl_tokenizer_piece(tk, token, &p, &n)) {
        tl_bytes_fmt(out, "<%d>", token);
        return;
    }
    while (whole < n) {
        int len = tl_utf8_len(p + whole, n - whole);
        if (len == 0)
            break;
        whole += (size_t)len;
    }
    if (whole == n) {
        tl_bytes_add(out, p, n);
        return;
    }
    tl_bytes_str(out, "bytes:");
    for (size_t i = 0; i < n; i++)
        tl_bytes_fmt(out, "\\x%02x", (unsigned char)p[i]);
}

void tl_render_usage(struct tl_jw *w, const char *key, const struct tl_flight *f)
{
    tl_jw_obj(w, key);
    tl_jw_int(w, "prompt_tokens", f->n_prompt);
    tl_jw_int(w, "completion_tokens", f->n_generated);
    tl_jw_int(w, "total_tokens", f->n_prompt + f->n_generated);
    tl_jw_obj(w, "prompt_tokens_details");
    tl_jw_int(w, "cached_tokens", f->n_cached);
    tl_jw_int(w, "cache_write_tokens", 0);
    tl_jw_obj_end(w);
    tl_jw_obj(w, "completion_tokens_details");
    tl_jw_int(w, "reasoning_tokens", f->n_reasoning);
    tl_jw_obj_end(w);
    tl_jw_obj_end(w);
}

static void write_reuse(struct tl_jw *w, const char *key, enum tl_reuse kind, const char *id, const struct tl_usage *u)
{
    tl_jw_obj(w, key);
    tl_jw_str(w, "kind", tl_reuse_name(kind));
    tl_jw_str(w, "id", id[0] ? id : NULL);
    tl_jw_int(w, "matched_tokens", u->n_reused);
    tl_jw_int(w, "suffix_tokens", u->n_prefilled);
    tl_jw_int(w, "iterations_run", u->iterations_run);
    tl_jw_int(w, "iterations_skipped", u->iterations_skipped);
    tl_jw_obj_end(w);
}

/* Of a batch: what each prompt began from. Equal prompts are computed once. */
static void write_prompts(struct tl_jw *w, const struct tl_flight *f)
{
    tl_jw_arr(w, "reuse_by_prompt");
    for (int i = 0; i < f->asked->n_prompts; i++) {
        const struct tl_prompt_start *s = &f->starts[f->asked->adaptive ? i : f->asked->prompts[i].same_as];
        write_reuse(w, NULL, s->reuse, s->id, &s->usage);
    }
    tl_jw_arr_end(w);
}

void tl_render_warnings(struct tl_jw *w, int loops, const struct tl_model_info *info)
{
    char warning[96];
    tl_jw_arr(w, "warnings");
    if (loops > info->spec->loops_trained) {
        snprintf(warning, sizeof(warning), "loops %d is beyond the depth that the model was trained for (%d)", loops,
                 info->spec->loops_trained);
        tl_jw_str(w, NULL, warning);
    }
    tl_jw_arr_end(w);
}

void tl_render_tinyloop(struct tl_jw *w, const char *key, const struct tl_flight *f, const char *stop_detail)
{
    const struct tl_usage *u = &f->usage;
    uint64_t seed = f->asked->sampling.seed;
    char text[24];
    tl_jw_obj(w, key);
    tl_jw_int(w, "loops", u->n_loops);
    tl_jw_num(w, "mean_loops", u->mean_loops, 3);
    tl_jw_bool(w, "exact", u->exact);
    tl_render_warnings(w, u->n_loops, f->srv->facts.info);
    tl_jw_str(w, "stop_detail", stop_detail);
    if (seed <= 9007199254740991u) {
        tl_jw_uint(w, "seed", seed);
    } else {
        snprintf(text, sizeof(text), "%llu", (unsigned long long)seed);
        tl_jw_str(w, "seed", text);
    }
    write_reuse(w, "reuse", f->reuse, f->reuse_id, u);
    if (f->asked->n_prompts > 1)
        write_prompts(w, f);
    if (f->asked->reuse.store) {
        tl_jw_obj(w, "resume_handle");
        tl_jw_str(w, "id", f->asked->reuse.store_id);
        tl_jw_int(w, "loops_used", u->n_loops);
        tl_jw_int(w, "max_loops", f->asked->reuse.store_max_loops);
        tl_jw_bool(w, "durable", f->stored_durable);
        tl_jw_obj_end(w);
    }
    tl_jw_obj(w, "timings");
    tl_jw_num(w, "queue_ms", f->t_started > 0 ? (f->t_started - f->t_start) * 1e3 : 0, 3);
    tl_jw_num(w, "clone_ms", u->clone_s * 1e3, 3);
    tl_jw_num(w, "prefill_ms", u->prefill_s * 1e3, 3);
    tl_jw_num(w, "resume_ms", u->resume_s * 1e3, 3);
    tl_jw_num(w, "ttft_ms", f->t_first > 0 ? (f->t_first - f->t_start) * 1e3 : 0, 3);
    tl_jw_num(w, "decode_ms", u->decode_s * 1e3, 3);
    tl_jw_num(w, "tokens_per_second", u->decode_s > 0 ? u->n_generated / u->decode_s : 0, 1);
    tl_jw_obj_end(w);
    tl_jw_obj_end(w);
}

void tl_render_head(const struct tl_flight *f, struct tl_jw *w, const struct tl_object_names *names)
{
    char id[44], fingerprint[24];
    snprintf(id, sizeof(id), "%s%s", names->id_prefix, f->id);
    snprintf(fingerprint, sizeof(fingerprint), "fp_%.16s", f->srv->facts.info->fingerprint);
    tl_jw_obj(w, NULL);
    tl_jw_str(w, "id", id);
    tl_jw_str(w, "object", f->asked->stream ? names->event : names->whole);
    tl_jw_int(w, "created", f->created);
    tl_jw_str(w, "model", f->srv->facts.name);
    tl_jw_str(w, "system_fingerprint", fingerprint);
    tl_jw_arr(w, "choices");
}

void tl_render_event_open(struct tl_flight *f, struct tl_jw *w, struct tl_bytes *head,
                          const struct tl_object_names *names)
{
    if (head->n == 0) {
        struct tl_jw first = {.b = head};
        tl_bytes_str(head, "data: ");
        tl_render_head(f, &first, names);
    }
    w->b = &f->x->out;
    w->comma = false;
    tl_bytes_add(w->b, head->data, head->n);
    w->b->failed = w->b->failed || head->failed;
}

void tl_render_event_close(struct tl_flight *f, struct tl_jw *w, bool with_usage, const char *tinyloop_detail)
{
    tl_jw_arr_end(w);
    if (with_usage)
        tl_render_usage(w, "usage", f);
    else if (f->asked->include_usage)
        tl_jw_null(w, "usage");
    if (tinyloop_detail)
        tl_render_tinyloop(w, "tinyloop", f, tinyloop_detail);
    tl_jw_obj_end(w);
    tl_bytes_str(w->b, "\n\n");
}

void tl_render_end(struct tl_flight *f, const struct tl_ending *e)
{
    struct tl_bytes *out = &f->x->out;
    struct tl_jw w = {.b = out};
    if (f->asked->stream) {
        if (f->asked->include_usage) {
            tl_render_event_open(f, &w, e->head, e->names);
            tl_render_event_close(f, &w, true, e->detail);
        }
        tl_bytes_str(out, "data: [DONE]\n\n");
        return;
    }
    tl_render_head(f, &w, e->names);
    for (int i = 0; i < e->n; i++)
        e->choice(f, &w, i);
    tl_jw_arr_end(&w);
    tl_render_usage(&w, "usage", f);
    tl_render_tinyloop(&w, "tinyloop", f, e->detail);
    tl_jw_obj_end(&w);
}
