#include "chat_think.h"

#include <string.h>

static const char open_mark[] = "<think>", close_mark[] = "</think>";

static int32_t special_id(const struct tl_tokenizer *tk, const char *mark)
{
    int32_t id = tk ? tl_tokenizer_find(tk, mark) : -1;
    return id >= 0 && tl_tokenizer_is_special(tk, id) ? id : -1;
}

void tl_think_init(struct tl_think *t, const struct tl_tokenizer *tk, bool thinks, bool inside)
{
    memset(t, 0, sizeof(*t));
    t->open_id = special_id(tk, open_mark);
    t->close_id = special_id(tk, close_mark);
    t->state = !thinks ? TL_THINK_NEVER : inside ? TL_THINK_IN : TL_THINK_NOT_YET;
    t->trim = thinks && inside;
}

void tl_think_free(struct tl_think *t)
{
    tl_bytes_free(&t->held);
    tl_bytes_free(&t->thought);
    tl_bytes_free(&t->answer);
}

static bool is_blank(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

static void emit(struct tl_think *t, const char *s, size_t n)
{
    while (t->trim && n > 0 && is_blank(*s))
        s++, n--;
    if (n > 0)
        t->trim = false;
    tl_bytes_add(t->state == TL_THINK_IN ? &t->thought : &t->answer, s, n);
}

static void change(struct tl_think *t, int state)
{
    t->state = state;
    t->trim = true;
}

/* Hand out of held what is certain; all of it at the end. */
static void settle(struct tl_think *t, bool end)
{
    while (t->held.n > 0) {
        const char *s = t->held.data, *mark = t->state == TL_THINK_IN ? close_mark : open_mark, *hit = NULL;
        size_t n = t->held.n, len = strlen(mark), take = n, blanks = 0;
        if (t->state == TL_THINK_NOT_YET) { /* a thought can only come first */
            while (blanks < n && is_blank(s[blanks]))
                blanks++;
            size_t have = n - blanks < len ? n - blanks : len;
            bool may = memcmp(s + blanks, mark, have) == 0;
            if (may && have == len) {
                tl_bytes_drop_front(&t->held, blanks + len);
                change(t, TL_THINK_IN);
                continue;
            }
            if (may && !end)
                return;
            t->state = TL_THINK_NEVER;
            continue;
        }
        if (t->state == TL_THINK_IN) {
            hit = memmem(s, n, mark, len);
            take = hit ? (size_t)(hit - s) : n;
            for (size_t keep = len - 1; !hit && !end && keep > 0; keep--)
                if (keep <= n && memcmp(s + n - keep, mark, keep) == 0) {
                    take = n - keep;
                    break;
                }
            while ((hit || !end) && take > 0 && is_blank(s[take - 1]))
                take--; /* blanks before the mark are nobody's */
        }
        emit(t, s, take);
        tl_bytes_drop_front(&t->held, hit ? (size_t)(hit - s) + len : take);
        if (!hit)
            return;
        change(t, TL_THINK_AFTER);
    }
}

void tl_think_push(struct tl_think *t, int32_t token, const char *text, size_t n)
{
    t->thought.n = t->answer.n = 0;
    if (token >= 0 && token == t->close_id && t->state == TL_THINK_IN) {
        while (t->held.n > 0 && is_blank(t->held.data[t->held.n - 1]))
            t->held.n--;
        settle(t, true);
        change(t, TL_THINK_AFTER);
    } else if (token >= 0 && token == t->open_id && t->state == TL_THINK_NOT_YET) {
        t->held.n = 0; /* blanks */
        change(t, TL_THINK_IN);
    }
    tl_bytes_add(&t->held, text, n);
    settle(t, false);
}

void tl_think_flush(struct tl_think *t)
{
    t->thought.n = t->answer.n = 0;
    settle(t, true);
}
