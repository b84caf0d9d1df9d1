/* One buffer holds [handed out with the last call | held back]. A call moves the held bytes to the front and adds the new
 * text behind them. Every stop string runs its own Knuth-Morris-Pratt automaton: its state is the length of the longest
 * beginning of the stop string that the text ends with, so the longest of all states is just what must be held back, and
 * a match can only begin inside of it. Both ends of that are borders of characters, because stop strings are UTF-8. */
#include "text_stream.h"

#include "mem.h"
#include "tokenizer_utf8.h"

#include <string.h>

struct stop {
    size_t n, state;
    unsigned char bytes[TL_STOP_STRING_BYTES_MAX];
    uint16_t fall_back[TL_STOP_STRING_BYTES_MAX]; /* [i]: longest proper border of the first i + 1 bytes */
};

struct tl_text_stream {
    bool has_text, include_stop;
    struct tl_detok detok;
    struct stop *stops;
    int n_stops, stopped;
    char *buf;
    size_t cap, n_out, n_held;
};

enum tl_status tl_text_stream_check(const struct tl_text_stream_params *p, struct tl_error *err)
{
    enum tl_status st = TL_OK;

    if (p->n_stops < 0 || p->n_stops > TL_STOP_STRINGS_MAX)
        st = tl_fail(err, TL_ERR_OUT_OF_RANGE, "stop has %d strings, at most %d are allowed", p->n_stops,
                     TL_STOP_STRINGS_MAX);
    else if (p->n_stops > 0 && !p->tokenizer)
        st = tl_fail(err, TL_ERR_UNSUPPORTED, "stop strings need text, and this model has no tokenizer");
    for (int i = 0; i < p->n_stops && st == TL_OK; i++) {
        const struct tl_stop_string *s = &p->stops[i];
        if (s->n_bytes < 1 || s->n_bytes > TL_STOP_STRING_BYTES_MAX) {
            st = tl_fail(err, TL_ERR_OUT_OF_RANGE, "stop[%d] has %zu bytes, allowed are 1 to %d", i, s->n_bytes,
                         TL_STOP_STRING_BYTES_MAX);
            tl_error_num(err, "index", i);
        } else if (tl_utf8_valid(s->bytes, s->n_bytes) != s->n_bytes) {
            st = tl_fail(err, TL_ERR_BAD_PARAM, "stop[%d] is not valid UTF-8 at byte %zu", i,
                         tl_utf8_valid(s->bytes, s->n_bytes));
            tl_error_num(err, "index", i);
        }
    }
    if (st != TL_OK)
        tl_error_param(err, "stop");
    return st;
}

/* The next state after byte c; s->n means complete. Never called in that state. */
static size_t advance(const struct stop *s, size_t state, unsigned char c)
{
    while (state > 0 && s->bytes[state] != c)
        state = s->fall_back[state - 1];
    return s->bytes[state] == c ? state + 1 : 0;
}

static void stop_init(struct stop *s, const struct tl_stop_string *from)
{
    s->n = from->n_bytes;
    s->state = 0;
    memcpy(s->bytes, from->bytes, s->n);
    s->fall_back[0] = 0;
    for (size_t i = 1; i < s->n; i++)
        s->fall_back[i] = (uint16_t)advance(s, s->fall_back[i - 1], s->bytes[i]);
}

enum tl_status tl_text_stream_create(struct tl_text_stream **out, const struct tl_text_stream_params *p,
                                     struct tl_error *err)
{
    struct tl_text_stream *ts = NULL;
    enum tl_status st;

    *out = NULL;
    st = tl_text_stream_check(p, err);
    if (st != TL_OK)
        return st;
    ts = tl_calloc(1, sizeof(*ts));
    if (!ts)
        return tl_fail_host_memory(err, sizeof(*ts));
    ts->has_text = p->tokenizer != NULL;
    ts->include_stop = p->include_stop;
    ts->stopped = -1;
    if (p->n_stops > 0) {
        ts->stops = tl_array((size_t)p->n_stops, sizeof(*ts->stops));
        if (!ts->stops) {
            st = tl_fail_host_memory(err, (size_t)p->n_stops * sizeof(*ts->stops));
            goto out;
        }
        ts->n_stops = p->n_stops;
        for (int i = 0; i < p->n_stops; i++)
            stop_init(&ts->stops[i], &p->stops[i]);
    }
    if (ts->has_text)
        st = tl_detok_init(&ts->detok, p->tokenizer, &p->detok, err);
    if (st != TL_OK)
        goto out;
    *out = ts;
    ts = NULL;
out:
    tl_text_stream_free(ts);
    return st;
}

void tl_text_stream_free(struct tl_text_stream *ts)
{
    if (!ts)
        return;
    tl_detok_free(&ts->detok);
    tl_free(ts->stops);
    tl_free(ts->buf);
    tl_free(ts);
}

/* All automata over one byte; the longest stop string that it completes, or -1. *held: the longest beginning. */
static int step_all(struct tl_text_stream *ts, unsigned char c, size_t *held)
{
    int match = -1;
    *held = 0;
    for (int i = 0; i < ts->n_stops; i++) {
        struct stop *s = &ts->stops[i];
        s->state = advance(s, s->state, c);
        if (s->state > *held)
            *held = s->state;
        if (s->state == s->n && (match < 0 || s->n > ts->stops[match].n))
            match = i;
    }
    return match;
}

static enum tl_status feed(struct tl_text_stream *ts, const char *text, size_t n, struct tl_error *err)
{
    const size_t total = ts->n_held + n;
    size_t held = ts->n_held;

    if (total > ts->cap) {
        size_t cap = total + total / 2 + 64;
        char *buf = tl_malloc(cap);
        if (!buf)
            return tl_fail_host_memory(err, cap);
        if (ts->n_held)
            memcpy(buf, ts->buf + ts->n_out, ts->n_held);
        tl_free(ts->buf);
        ts->buf = buf;
        ts->cap = cap;
    } else if (ts->n_held) {
        memmove(ts->buf, ts->buf + ts->n_out, ts->n_held);
    }
    if (n)
        memcpy(ts->buf + ts->n_held, text, n);
    for (size_t i = ts->n_held; i < total; i++) {
        ts->stopped = step_all(ts, (unsigned char)ts->buf[i], &held);
        if (ts->stopped >= 0) {
            ts->n_out = i + 1 - (ts->include_stop ? 0 : ts->stops[ts->stopped].n);
            ts->n_held = 0;
            return TL_OK;
        }
    }
    ts->n_held = ts->include_stop ? 0 : held; /* text that comes out in any case need not wait */
    ts->n_out = total - ts->n_held;
    return TL_OK;
}

enum tl_status tl_text_stream_push(struct tl_text_stream *ts, int32_t token, const char **text, size_t *n_bytes,
                                   struct tl_error *err)
{
    enum tl_status st = TL_OK;
    const char *piece = NULL;
    size_t n = 0;

    *text = "";
    *n_bytes = 0;
    if (!ts->has_text || ts->stopped >= 0)
        return TL_OK;
    st = tl_detok_push(&ts->detok, token, &piece, &n, err);
    if (st == TL_OK)
        st = feed(ts, piece, n, err);
    if (st == TL_OK && ts->n_out) {
        *text = ts->buf;
        *n_bytes = ts->n_out;
    }
    return st;
}

enum tl_status tl_text_stream_flush(struct tl_text_stream *ts, const char **text, size_t *n_bytes, struct tl_error *err)
{
    enum tl_status st = TL_OK;
    const char *piece = NULL;
    size_t n = 0;

    *text = "";
    *n_bytes = 0;
    if (!ts->has_text || ts->stopped >= 0)
        return TL_OK;
    tl_detok_flush(&ts->detok, &piece, &n);
    st = feed(ts, piece, n, err);
    if (st != TL_OK)
        return st;
    ts->n_out += ts->n_held;
    ts->n_held = 0;
    if (ts->n_out) {
        *text = ts->buf;
        *n_bytes = ts->n_out;
    }
    return TL_OK;
}

int tl_text_stream_stopped(const struct tl_text_stream *ts) { return ts->stopped; }
size_t tl_text_stream_held(const struct tl_text_stream *ts) { return ts->n_held; }
