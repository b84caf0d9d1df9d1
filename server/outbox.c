/* What the worker has for the loop: tokens, their text, ends. */
#include <stdlib.h>
#include <string.h>

#include "generate.h"
#include "ids.h"

size_t tl_batch_bytes(const struct tl_batch *b)
{
    return b->n_tokens * sizeof(*b->token) + b->text.n + b->n_top * sizeof(*b->top);
}

void tl_batch_clear(struct tl_batch *b)
{
    b->n_tokens = b->n_top = b->text.n = 0;
    b->n_ends = b->rows_done = b->rows_total = 0;
    b->started = b->done = b->failed = false;
    b->reuse = TL_REUSE_NONE;
    b->reuse_id[0] = '\0';
}

void tl_batch_free(struct tl_batch *b)
{
    free(b->token);
    free(b->top);
    free(b->end);
    tl_bytes_free(&b->text);
    memset(b, 0, sizeof(*b));
}

/* Room for one more of `size` bytes each; false sets failed. */
static bool grow(struct tl_batch *b, void **array, size_t *cap, size_t n, size_t more, size_t size)
{
    if (n + more <= *cap)
        return true;
    size_t want = *cap ? *cap * 2 : 16;
    while (want < n + more)
        want *= 2;
    void *p = realloc(*array, want * size);
    if (!p) {
        b->failed = true;
        return false;
    }
    *array = p;
    *cap = want;
    return true;
}

void tl_batch_token(struct tl_batch *b, int choice, const struct tl_sampled *s, bool prompt, const char *text,
                    size_t n_text)
{
    int n_top = s ? s->n_top : 0;
    if (!grow(b, (void **)&b->token, &b->cap_tokens, b->n_tokens, 1, sizeof(*b->token)) ||
        !grow(b, (void **)&b->top, &b->cap_top, b->n_top, (size_t)n_top, sizeof(*b->top)))
        return;
    b->token[b->n_tokens++] = (struct tl_out_token){
        .choice = choice,
        .token = s ? s->token : -1,
        .prompt = prompt,
        .logprob = s ? s->logprob : 0,
        .n_top = n_top,
        .top_at = b->n_top,
        .n_text = n_text,
        .at = tl_now_mono(),
    };
    if (n_top > 0)
        memcpy(b->top + b->n_top, s->top, (size_t)n_top * sizeof(*b->top));
    b->n_top += (size_t)n_top;
    tl_bytes_add(&b->text, text, n_text);
    b->failed = b->failed || b->text.failed;
}

void tl_batch_end(struct tl_batch *b, const struct tl_out_end *end)
{
    size_t cap = (size_t)b->cap_ends;
    if (!grow(b, (void **)&b->end, &cap, (size_t)b->n_ends, 1, sizeof(*b->end)))
        return;
    b->cap_ends = (int)cap;
    b->end[b->n_ends++] = *end;
}
