/* tests/fuzz/fuzz_text_stream.c - stop strings and tokens from the input, against a plain search in the whole text.
 * Input: flags (bits 0-2: number of stops, bit 3: include_stop), then per stop a length and its bytes; the rest are tokens, one
 * per byte, which are the bytes of the text. */
#include "mem.h"
#include "text_stream.h"
#include "tokenizer_impl.h"
#include "tokenizer_utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STOPS_MAX 7
#define TEXT_MAX  4096

static void check(bool holds)
{
    if (!holds)
        abort();
}

static struct tl_tokenizer *bytes_tokenizer(void)
{
    static char json[1 << 14];
    struct tl_tokenizer *tk = NULL;
    int n =
        snprintf(json, sizeof(json), "{\"model\":{\"type\":\"BPE\",\"byte_fallback\":true,\"merges\":[],\"vocab\":{");
    for (int b = 0; b < 256; b++)
        n += snprintf(json + n, sizeof(json) - (size_t)n, "%s\"<0x%02X>\":%d", b ? "," : "", b, b);
    n += snprintf(
        json + n, sizeof(json) - (size_t)n,
        "}},\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"}]}}");
    check(tl_tokenizer_open_memory(&tk, json, (size_t)n, false, NULL) == TL_OK);
    return tk;
}

/* Where the text ends by the rule of text_stream.h; *stop is -1 if nowhere. */
static size_t end_of_text(const char *text, size_t n, const struct tl_stop_string *stops, int n_stops, bool include,
                          int *stop)
{
    *stop = -1;
    for (size_t end = 1; end <= n; end++) {
        for (int i = 0; i < n_stops; i++)
            if (stops[i].n_bytes <= end && !memcmp(text + end - stops[i].n_bytes, stops[i].bytes, stops[i].n_bytes) &&
                (*stop < 0 || stops[i].n_bytes > stops[*stop].n_bytes))
                *stop = i;
        if (*stop >= 0)
            return end - (include ? 0 : stops[*stop].n_bytes);
    }
    return n;
}

static void run(const struct tl_text_stream_params *p, const uint8_t *data, size_t n)
{
    char got[3 * TEXT_MAX + 16];
    char *whole = NULL;
    const char *delta;
    size_t n_got = 0, n_whole = 0, n_delta, end;
    int32_t *ids = tl_array(n, sizeof(*ids));
    struct tl_text_stream *ts = NULL;
    int stop;

    for (size_t i = 0; i < n; i++)
        ids[i] = data[i];
    check(tl_tokenizer_decode(p->tokenizer, ids, n, &p->detok, &whole, &n_whole, NULL) == TL_OK);
    end = end_of_text(whole, n_whole, p->stops, p->n_stops, p->include_stop, &stop);
    check(tl_text_stream_create(&ts, p, NULL) == TL_OK);
    for (size_t i = 0; i <= n; i++) {
        check((i < n ? tl_text_stream_push(ts, ids[i], &delta, &n_delta, NULL)
                     : tl_text_stream_flush(ts, &delta, &n_delta, NULL)) == TL_OK);
        check(tl_utf8_valid(delta, n_delta) == n_delta);
        check(n_got + n_delta <= end && !memcmp(whole + n_got, delta, n_delta));
        memcpy(got + n_got, delta, n_delta);
        n_got += n_delta;
        check(tl_text_stream_held(ts) < TL_STOP_STRING_BYTES_MAX);
    }
    check(n_got == end && tl_text_stream_stopped(ts) == stop);
    tl_text_stream_free(ts);
    tl_free(whole);
    tl_free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct tl_tokenizer *tk;
    struct tl_stop_string stops[STOPS_MAX];
    struct tl_text_stream_params p = {.stops = stops};
    struct tl_error err = {0};
    int64_t live;

    if (!tk)
        tk = bytes_tokenizer();
    live = tl_mem_live();
    p.tokenizer = tk;
    if (!size)
        return 0;
    p.include_stop = data[0] & 8;
    p.n_stops = data[0] & 7;
    data++;
    size--;
    for (int i = 0; i < p.n_stops; i++) {
        size_t n = size ? data[0] % 12 : 0;
        if (size <= n)
            return 0;
        stops[i] = (struct tl_stop_string){(const char *)data + 1, n};
        data += n + 1;
        size -= n + 1;
    }
    if (tl_text_stream_check(&p, &err) == TL_OK)
        run(&p, data, size < TEXT_MAX ? size : TEXT_MAX);
    else
        check(err.msg[0] && !strcmp(err.param, "stop"));
    check(tl_mem_live() == live);
    return 0;
}
