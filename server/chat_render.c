#include "chat_render.h"

#include <stdlib.h>
#include <string.h>

#include "chat_think.h"
#include "render.h"

static const struct tl_object_names object_names = {"chatcmpl-", "chat.completion", "chat.completion.chunk"};

struct choice {
    struct tl_think think;
    struct tl_bytes thought, answer; /* not streaming: so far */
    struct tl_seen *seen;            /* not streaming */
    size_t n_seen, cap_seen;
    struct tl_token_logprob *top;
    size_t n_top, cap_top;
    bool begun;                  /* stream: the role is out */
    const char *finish, *detail; /* set at the end */
};

struct render {
    struct choice *choice;
    int n;
    bool thinks, started;
    struct tl_bytes head, piece; /* of each chunk, up to and including "choices":[; scratch */
    bool failed;
};

void *tl_chat_render_new(const struct tl_ask *ask, const struct tl_facts *facts)
{
    struct render *r = calloc(1, sizeof(*r));
    if (!r)
        return NULL;
    r->n = ask->n_prompts * ask->n;
    r->thinks = tl_chat_thinks(facts->chat);
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
        tl_think_free(&r->choice[i].think);
        tl_bytes_free(&r->choice[i].thought);
        tl_bytes_free(&r->choice[i].answer);
        free(r->choice[i].seen);
        free(r->choice[i].top);
    }
    free(r->choice);
    tl_bytes_free(&r->head);
    tl_bytes_free(&r->piece);
    free(r);
}

/* The prompt is known only once it is encoded. */
static void start(struct tl_flight *f)
{
    struct render *r = f->render;
    if (r->started)
        return;
    r->started = true;
    for (int i = 0; i < r->n; i++)
        tl_think_init(&r->choice[i].think, f->srv->facts.tokenizer, r->thinks, f->asked->think_open);
}

/* ---- collecting --------------------------------------------------------------------------------------------------- */

static void remember(struct tl_flight *f, struct choice *c, const struct tl_out_token *t, const struct tl_batch *b)
{
    struct render *r = f->render;
    if (!f->asked->logprobs && !f->asked->return_tokens)
        return;
    if (!tl_render_room((void **)&c->seen, &c->cap_seen, c->n_seen, 1, sizeof(*c->seen), &r->failed) ||
        !tl_render_room((void **)&c->top, &c->cap_top, c->n_top, (size_t)t->n_top, sizeof(*c->top), &r->failed))
        return;
    c->seen[c->n_seen++] = (struct tl_seen){t->token, t->logprob, t->n_top, c->n_top};
    if (t->n_top > 0)
        memcpy(c->top + c->n_top, b->top + t->top_at, (size_t)t->n_top * sizeof(*c->top));
    c->n_top += (size_t)t->n_top;
}

/* ---- parts of an object ------------------------------------------------------------------------------------------- */

/* token, logprob, bytes: the members of an open object. */
static void token_members(struct tl_flight *f, struct tl_jw *w, int32_t token, float logprob)
{
    struct render *r = f->render;
    const struct tl_tokenizer *tk = f->srv->facts.tokenizer;
    const char *p;
    size_t n = 0;
    r->piece.n = 0;
    tl_render_piece(&r->piece, tk, token);
    tl_jw_strn(w, "token", r->piece.data ? r->piece.data : "", r->piece.n);
    tl_jw_num(w, "logprob", logprob, 6);
    tl_jw_arr(w, "bytes");
    if (tl_tokenizer_piece(tk, token, &p, &n))
        for (size_t i = 0; i < n; i++)
            tl_jw_int(w, NULL, (unsigned char)p[i]);
    tl_jw_arr_end(w);
    r->failed = r->failed || r->piece.failed;
}

static void logprobs_object(struct tl_flight *f, struct tl_jw *w, const struct tl_seen *s, size_t n,
                            const struct tl_token_logprob *top)
{
    if (!f->asked->logprobs) {
        tl_jw_null(w, "logprobs");
        return;
    }
    tl_jw_obj(w, "logprobs");
    tl_jw_arr(w, "content");
    for (size_t i = 0; i < n; i++) {
        tl_jw_obj(w, NULL);
        token_members(f, w, s[i].token, s[i].logprob);
        tl_jw_arr(w, "top_logprobs");
        for (int k = 0; k < s[i].n_top; k++) {
            const struct tl_token_logprob *t = &top[s[i].top_at + (size_t)k];
            tl_jw_obj(w, NULL);
            token_members(f, w, t->token, t->logprob);
            tl_jw_obj_end(w);
        }
        tl_jw_arr_end(w);
        tl_jw_obj_end(w);
    }
    tl_jw_arr_end(w);
    tl_jw_null(w, "refusal");
    tl_jw_obj_end(w);
}

/* ---- stream ------------------------------------------------------------------------------------------------------- */

/* One choice's chunk, up to the open delta. */
static void delta_open(struct tl_flight *f, struct tl_jw *w, int idx)
{
    tl_render_event_open(f, w, &((struct render *)f->render)->head, &object_names);
    tl_jw_obj(w, NULL);
    tl_jw_int(w, "index", idx);
    tl_jw_obj(w, "delta");
}

static void delta_close(struct tl_flight *f, struct tl_jw *w, const char *finish, const char *tinyloop_detail)
{
    tl_jw_str(w, "finish_reason", finish);
    tl_jw_obj_end(w);
    tl_render_event_close(f, w, false, tinyloop_detail);
}

static void begin_choice(struct tl_flight *f, int idx)
{
    struct choice *c = &((struct render *)f->render)->choice[idx];
    struct tl_jw w;
    if (c->begun)
        return;
    c->begun = true;
    delta_open(f, &w, idx);
    tl_jw_str(&w, "role", "assistant");
    tl_jw_str(&w, "content", "");
    tl_jw_obj_end(&w);
    tl_jw_null(&w, "logprobs");
    delta_close(f, &w, NULL, NULL);
}

/* What think has made certain, with the token that did it (NULL: none). */
static void stream_text(struct tl_flight *f, int idx, const struct tl_out_token *t, const struct tl_batch *b)
{
    const struct tl_ask *a = f->asked;
    struct tl_think *think = &((struct render *)f->render)->choice[idx].think;
    bool token = t && t->token >= 0;
    struct tl_jw w;
    begin_choice(f, idx);
    if (think->thought.n + think->answer.n == 0 && !(token && (a->logprobs || a->return_tokens)))
        return;
    delta_open(f, &w, idx);
    if (think->thought.n > 0)
        tl_jw_strn(&w, "reasoning_content", think->thought.data, think->thought.n);
    if (think->answer.n > 0)
        tl_jw_strn(&w, "content", think->answer.data, think->answer.n);
    tl_jw_obj_end(&w);
    if (token)
        logprobs_object(f, &w, &(struct tl_seen){t->token, t->logprob, t->n_top, t->top_at}, 1, b->top);
    else
        tl_jw_null(&w, "logprobs");
    if (a->return_tokens) {
        tl_jw_arr(&w, "tokens");
        if (token)
            tl_jw_int(&w, NULL, t->token);
        tl_jw_arr_end(&w);
    }
    delta_close(f, &w, NULL, NULL);
    if (f->srv->cfg->stream_timestamps && token)
        tl_bytes_fmt(&f->x->out, ": at %.6f\n\n", t->at);
}

static void stream_end(struct tl_flight *f, const struct tl_out_end *e)
{
    bool last = f->n_ended == f->asked->n_prompts * f->asked->n && e == &f->batch.end[f->batch.n_ends - 1];
    struct tl_jw w;
    begin_choice(f, e->choice);
    delta_open(f, &w, e->choice);
    tl_jw_obj_end(&w);
    tl_jw_null(&w, "logprobs");
    delta_close(f, &w, tl_render_finish(e), last ? e->detail : NULL);
}

static void gather(struct choice *c)
{
    tl_bytes_add(&c->thought, c->think.thought.data, c->think.thought.n);
    tl_bytes_add(&c->answer, c->think.answer.data, c->think.answer.n);
}

static void render_take(struct tl_flight *f, const struct tl_batch *b)
{
    struct render *r = f->render;
    const char *text = b->text.data;
    start(f);
    for (size_t i = 0; i < b->n_tokens; i++) {
        const struct tl_out_token *t = &b->token[i];
        struct choice *c = &r->choice[t->choice];
        if (t->prompt)
            continue;
        f->n_reasoning += t->token >= 0 && c->think.state == TL_THINK_IN;
        tl_think_push(&c->think, t->token, text ? text : "", t->n_text);
        text = text ? text + t->n_text : NULL;
        if (f->asked->stream)
            stream_text(f, t->choice, t, b);
        else
            gather(c);
        if (!f->asked->stream && t->token >= 0)
            remember(f, c, t, b);
    }
    for (int i = 0; i < b->n_ends; i++) {
        struct choice *c = &r->choice[b->end[i].choice];
        c->finish = tl_render_finish(&b->end[i]);
        c->detail = b->end[i].detail;
        tl_think_flush(&c->think);
        r->failed = r->failed || c->think.held.failed || c->think.thought.failed || c->think.answer.failed;
        if (f->asked->stream) {
            stream_text(f, b->end[i].choice, NULL, b);
            stream_end(f, &b->end[i]);
        } else {
            gather(c);
        }
    }
}

/* ---- the whole answer --------------------------------------------------------------------------------------------- */

static void whole_choice(struct tl_flight *f, struct tl_jw *w, int idx)
{
    struct render *r = f->render;
    struct choice *c = &r->choice[idx];
    tl_jw_obj(w, NULL);
    tl_jw_int(w, "index", idx);
    tl_jw_obj(w, "message");
    tl_jw_str(w, "role", "assistant");
    tl_jw_strn(w, "content", c->answer.data ? c->answer.data : "", c->answer.n);
    if (r->thinks && c->thought.n > 0)
        tl_jw_strn(w, "reasoning_content", c->thought.data, c->thought.n);
    else if (r->thinks)
        tl_jw_null(w, "reasoning_content");
    tl_jw_null(w, "refusal");
    tl_jw_obj_end(w);
    logprobs_object(f, w, c->seen, c->n_seen, c->top);
    if (f->asked->return_tokens) {
        tl_jw_arr(w, "tokens");
        for (size_t i = 0; i < c->n_seen; i++)
            tl_jw_int(w, NULL, c->seen[i].token);
        tl_jw_arr_end(w);
    }
    tl_jw_str(w, "finish_reason", c->finish);
    tl_jw_obj_end(w);
    r->failed = r->failed || c->thought.failed || c->answer.failed;
}

static void render_finish(struct tl_flight *f)
{
    struct render *r = f->render;
    tl_render_end(f, &(struct tl_ending){&object_names, &r->head, r->n, whole_choice, r->choice[0].detail});
    if (r->failed)
        f->x->out.failed = true; /* an answer with a hole must not leave; the connection is cut instead */
}

const struct tl_renderer tl_chat_renderer = {render_take, render_finish, render_free};
