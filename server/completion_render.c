#include "completion_render.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "render.h"

static const struct tl_object_names object_names = {"cmpl-", "text_completion", "text_completion"};

struct choice {
    struct tl_bytes text;         /* not streaming: the output so far */
    struct tl_seen *prompt, *out; /* scored prompt tokens; generated ones */
    size_t n_prompt, n_out, cap_prompt, cap_out;
    struct tl_token_logprob *top;
    size_t n_top, cap_top;
    int64_t offset;              /* characters of text before the next token */
    bool begun;                  /* stream: the echo is out */
    const char *finish, *detail; /* set at the end */
    uint64_t logits_hash;
};

struct render {
    struct choice *choice;
    int n;
    struct tl_bytes head;        /* of each stream event, up to and including "choices":[ */
    struct tl_bytes echo, piece; /* scratch */
    bool failed;
};

void *tl_completion_render_new(const struct tl_ask *ask)
{
    struct render *r = calloc(1, sizeof(*r));
    if (!r)
        return NULL;
    r->n = ask->n_prompts * ask->n;
    r->choice = calloc((size_t)r->n, sizeof(*r->choice));
    if (r->choice)
        return r;
    free(r);
    return NULL;
}

static void render_free(struct tl_flight *f)
{
    struct render *r = f->render;
    if (!r)
        return;
    for (int i = 0; i < r->n; i++) {
        tl_bytes_free(&r->choice[i].text);
        free(r->choice[i].prompt);
        free(r->choice[i].out);
        free(r->choice[i].top);
    }
    free(r->choice);
    tl_bytes_free(&r->head);
    tl_bytes_free(&r->echo);
    tl_bytes_free(&r->piece);
    free(r);
}

/* ---- pieces ------------------------------------------------------------------------------------------------------- */

/* Characters that begin in a token. */
static int64_t characters(const struct tl_tokenizer *tk, int32_t token)
{
    const char *p;
    size_t n;
    int64_t c = 0;
    if (!tk || !tl_tokenizer_piece(tk, token, &p, &n))
        return 0;
    for (size_t i = 0; i < n; i++)
        c += ((unsigned char)p[i] & 0xC0) != 0x80;
    return c;
}

static void echo_tokens(struct tl_flight *f, const int32_t *ids, int n)
{
    struct render *r = f->render;
    const struct tl_tokenizer *tk = f->srv->facts.tokenizer;
    struct tl_detok_params params = {.keep_special = true};
    char *text;
    size_t bytes;
    if (n == 0 || !tk || tl_tokenizer_decode(tk, ids, (size_t)n, &params, &text, &bytes, NULL) != TL_OK)
        return;
    tl_bytes_add(&r->echo, text, bytes);
    tl_free(text);
}

/* The prompt of a choice as text, into r->echo: text as it was sent, after the tokens of a named start if there is one. */
static void make_echo(struct tl_flight *f, int choice)
{
    struct render *r = f->render;
    const struct tl_prompt *p = &f->asked->prompts[choice / f->asked->n];
    const int32_t *prefix = f->g->prefix;
    int n_prefix = f->g->n_prefix;
    r->echo.n = 0;
    if (p->text) {
        echo_tokens(f, prefix, n_prefix);
        tl_bytes_add(&r->echo, p->text, p->n_text);
        return;
    }
    if (n_prefix == 0) {
        echo_tokens(f, p->ids, p->n_ids);
        return;
    }
    int32_t *whole = malloc((size_t)(n_prefix + p->n_ids) * sizeof(*whole)); /* at once: a character may span both */
    if (!whole) {
        r->failed = true;
        return;
    }
    memcpy(whole, prefix, (size_t)n_prefix * sizeof(*whole));
    memcpy(whole + n_prefix, p->ids, (size_t)p->n_ids * sizeof(*whole));
    echo_tokens(f, whole, n_prefix + p->n_ids);
    free(whole);
}

/* ---- collecting --------------------------------------------------------------------------------------------------- */

static void remember(struct tl_flight *f, struct choice *c, const struct tl_out_token *t, const struct tl_batch *b)
{
    struct render *r = f->render;
    struct tl_seen **list = t->prompt ? &c->prompt : &c->out;
    size_t *n = t->prompt ? &c->n_prompt : &c->n_out, *cap = t->prompt ? &c->cap_prompt : &c->cap_out;
    if (!f->asked->logprobs && !f->asked->return_tokens)
        return;
    if (!tl_render_room((void **)list, cap, *n, 1, sizeof(**list), &r->failed) ||
        !tl_render_room((void **)&c->top, &c->cap_top, c->n_top, (size_t)t->n_top, sizeof(*c->top), &r->failed))
        return;
    (*list)[(*n)++] = (struct tl_seen){t->token, t->logprob, t->n_top, c->n_top};
    if (t->n_top > 0)
        memcpy(c->top + c->n_top, b->top + t->top_at, (size_t)t->n_top * sizeof(*c->top));
    c->n_top += (size_t)t->n_top;
}

/* ---- parts of an object ------------------------------------------------------------------------------------------- */

/* One column of the logprobs object over s[0..n). */
enum column { COLUMN_TOKENS, COLUMN_LOGPROBS, COLUMN_TOP, COLUMN_OFFSETS };

static void top_object(struct tl_flight *f, struct tl_jw *w, const struct choice *c, const struct tl_seen *s)
{
    struct render *r = f->render;
    const struct tl_tokenizer *tk = f->srv->facts.tokenizer;
    bool own = false;
    if (f->asked->sampling.n_top_logprobs <= 0) {
        tl_jw_null(w, NULL);
        return;
    }
    tl_jw_obj(w, NULL);
    for (int i = 0; i <= s->n_top; i++) { /* the chosen token is always among them */
        const struct tl_token_logprob *t = i < s->n_top ? &c->top[s->top_at + (size_t)i] : NULL;
        if (t && t->token == s->token)
            own = true;
        if (!t && own)
            break;
        r->piece.n = 0;
        tl_render_piece(&r->piece, tk, t ? t->token : s->token);
        tl_jw_num(w, tl_bytes_cstr(&r->piece), t ? t->logprob : s->logprob, 6);
    }
    tl_jw_obj_end(w);
}

static void column(struct tl_flight *f, struct tl_jw *w, const struct choice *c, const struct tl_seen *s, size_t n,
                   enum column which, int64_t *offset)
{
    struct render *r = f->render;
    for (size_t i = 0; i < n; i++) {
        if (which == COLUMN_LOGPROBS)
            tl_jw_num(w, NULL, s[i].logprob, 6);
        else if (which == COLUMN_TOP)
            top_object(f, w, c, &s[i]);
        if (which == COLUMN_TOKENS) {
            r->piece.n = 0;
            tl_render_piece(&r->piece, f->srv->facts.tokenizer, s[i].token);
            tl_jw_strn(w, NULL, r->piece.data ? r->piece.data : "", r->piece.n);
        } else if (which == COLUMN_OFFSETS) {
            tl_jw_int(w, NULL, *offset);
            *offset += characters(f->srv->facts.tokenizer, s[i].token);
        }
    }
}

/* The logprobs of prompt (unless NULL, with its unscored first token) and of out[0..n_out). */
static void logprobs_object(struct tl_flight *f, struct tl_jw *w, struct choice *c, int32_t first,
                            const struct choice *prompt, const struct tl_seen *out, size_t n_out)
{
    static const char *const names[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
    struct render *r = f->render;
    int64_t start = c->offset, end = start;
    tl_jw_obj(w, "logprobs");
    for (int which = 0; which < 4; which++) {
        int64_t offset = start;
        tl_jw_arr(w, names[which]);
        if (prompt) {
            struct tl_seen s = {.token = first};
            if (which == COLUMN_LOGPROBS || which == COLUMN_TOP)
                tl_jw_null(w, NULL);
            else
                column(f, w, prompt, &s, 1, (enum column)which, &offset);
            column(f, w, prompt, prompt->prompt, prompt->n_prompt, (enum column)which, &offset);
        }
        column(f, w, c, out, n_out, (enum column)which, &offset);
        tl_jw_arr_end(w);
        if (which == COLUMN_OFFSETS)
            end = offset;
    }
    tl_jw_obj_end(w);
    c->offset = end;
    r->failed = r->failed || r->piece.failed;
}

static void write_hash(struct tl_jw *w, uint64_t hash)
{
    char hex[17];
    snprintf(hex, sizeof(hex), "%016llx", (unsigned long long)hash);
    tl_jw_str(w, "logits_hash", hex);
}

/* ---- stream ------------------------------------------------------------------------------------------------------- */

static void event_choice(struct tl_flight *f, struct tl_jw *w, int idx, const char *text, size_t n)
{
    tl_render_event_open(f, w, &((struct render *)f->render)->head, &object_names);
    tl_jw_obj(w, NULL);
    tl_jw_int(w, "index", idx);
    tl_jw_strn(w, "text", text ? text : "", n);
}

/* The echo, once, before the first word of a choice. */
static void begin_choice(struct tl_flight *f, int idx)
{
    struct render *r = f->render;
    const struct tl_ask *a = f->asked;
    struct choice *c = &r->choice[idx];
    const struct tl_prompt *p = &a->prompts[idx / a->n];
    struct tl_jw w;
    if (c->begun)
        return;
    c->begun = true;
    if (!a->echo)
        return;
    make_echo(f, idx);
    event_choice(f, &w, idx, r->echo.data, r->echo.n);
    if (a->logprobs)
        logprobs_object(f, &w, c, p->ids[0], &r->choice[p->same_as * a->n], NULL, 0);
    else
        tl_jw_null(&w, "logprobs");
    tl_jw_null(&w, "finish_reason");
    tl_jw_obj_end(&w);
    tl_render_event_close(f, &w, false, NULL);
}

static void stream_token(struct tl_flight *f, const struct tl_out_token *t, const struct tl_batch *b, const char *text)
{
    struct render *r = f->render;
    const struct tl_ask *a = f->asked;
    struct choice *c = &r->choice[t->choice];
    struct tl_seen s = {t->token, t->logprob, t->n_top, t->top_at};
    struct choice view = {.top = b->top};
    struct tl_jw w;
    bool token = t->token >= 0;
    begin_choice(f, t->choice);
    view.offset = c->offset;
    if (t->n_text == 0 && !(token && (a->logprobs || a->return_tokens)))
        return;
    event_choice(f, &w, t->choice, text, t->n_text);
    if (a->logprobs && token)
        logprobs_object(f, &w, &view, 0, NULL, &s, 1);
    else
        tl_jw_null(&w, "logprobs");
    c->offset = view.offset;
    if (a->return_tokens) {
        tl_jw_arr(&w, "tokens");
        if (token)
            tl_jw_int(&w, NULL, t->token);
        tl_jw_arr_end(&w);
    }
    tl_jw_null(&w, "finish_reason");
    tl_jw_obj_end(&w);
    tl_render_event_close(f, &w, false, NULL);
    if (f->srv->cfg->stream_timestamps && token)
        tl_bytes_fmt(&f->x->out, ": at %.6f\n\n", t->at);
}

static void stream_end(struct tl_flight *f, const struct tl_out_end *e)
{
    struct tl_jw w;
    bool last = f->n_ended == f->asked->n_prompts * f->asked->n && e == &f->batch.end[f->batch.n_ends - 1];
    begin_choice(f, e->choice);
    event_choice(f, &w, e->choice, NULL, 0);
    tl_jw_null(&w, "logprobs");
    if (f->asked->return_tokens) {
        tl_jw_arr(&w, "tokens");
        tl_jw_arr_end(&w);
    }
    if (f->asked->return_logits_hash)
        write_hash(&w, e->logits_hash);
    tl_jw_str(&w, "finish_reason", tl_render_finish(e));
    tl_jw_obj_end(&w);
    tl_render_event_close(f, &w, false, last ? e->detail : NULL);
}

static void render_take(struct tl_flight *f, const struct tl_batch *b)
{
    struct render *r = f->render;
    const char *text = b->text.data;
    for (size_t i = 0; i < b->n_tokens; i++) {
        const struct tl_out_token *t = &b->token[i];
        struct choice *c = &r->choice[t->choice];
        if (t->prompt || (!f->asked->stream && t->token >= 0))
            remember(f, c, t, b);
        if (f->asked->stream && !t->prompt)
            stream_token(f, t, b, text);
        else if (!t->prompt)
            tl_bytes_add(&c->text, text, t->n_text);
        text += t->n_text;
    }
    for (int i = 0; i < b->n_ends; i++) {
        struct choice *c = &r->choice[b->end[i].choice];
        c->finish = tl_render_finish(&b->end[i]);
        c->detail = b->end[i].detail;
        c->logits_hash = b->end[i].logits_hash;
        if (f->asked->stream)
            stream_end(f, &b->end[i]);
    }
}

/* ---- the whole answer --------------------------------------------------------------------------------------------- */

static void whole_choice(struct tl_flight *f, struct tl_jw *w, int idx)
{
    struct render *r = f->render;
    const struct tl_ask *a = f->asked;
    struct choice *c = &r->choice[idx];
    const struct tl_prompt *p = &a->prompts[idx / a->n];
    tl_jw_obj(w, NULL);
    tl_jw_int(w, "index", idx);
    if (a->echo) {
        make_echo(f, idx);
        tl_bytes_add(&r->echo, c->text.data, c->text.n);
        tl_jw_strn(w, "text", r->echo.data ? r->echo.data : "", r->echo.n);
    } else {
        tl_jw_strn(w, "text", c->text.data ? c->text.data : "", c->text.n);
    }
    if (a->logprobs)
        logprobs_object(f, w, c, p->ids[0], a->echo ? &r->choice[p->same_as * a->n] : NULL, c->out, c->n_out);
    else
        tl_jw_null(w, "logprobs");
    if (a->return_tokens) {
        tl_jw_arr(w, "tokens");
        for (size_t i = 0; i < c->n_out; i++)
            tl_jw_int(w, NULL, c->out[i].token);
        tl_jw_arr_end(w);
    }
    if (a->return_logits_hash)
        write_hash(w, c->logits_hash);
    tl_jw_str(w, "finish_reason", c->finish);
    tl_jw_obj_end(w);
    r->failed = r->failed || c->text.failed || r->echo.failed;
}

static void render_finish(struct tl_flight *f)
{
    struct render *r = f->render;
    tl_render_end(f, &(struct tl_ending){&object_names, &r->head, r->n, whole_choice, r->choice[0].detail});
    if (r->failed)
        f->x->out.failed = true; /* an answer with a hole must not leave; the connection is cut instead */
}

const struct tl_renderer tl_completion_renderer = {render_take, render_finish, render_free};
