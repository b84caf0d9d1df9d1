/* Encodes and decodes what it is told on standard input, for test_tokenizer_equal.py: one process, many strings.
 *
 * Request: one byte 'e' or 'd', one byte of flags, a 32-bit count n, then n bytes of text (e) or n 32-bit ids (d).
 *   flags of e: 1 add_special, 2 parse_special; of d: 1 keep_special
 * Reply: a 32-bit count and that many ids (e) or bytes (d); or -1, a 32-bit count and the error message.
 * Numbers have the machine's byte order. 'd' decodes token by token and also at once, and fails if they differ. */
#include "mem.h"
#include "tokenizer.h"
#include "tokenizer_utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void put(const void *p, size_t bytes) { fwrite(p, 1, bytes, stdout); }

static void put_count(int32_t n) { put(&n, sizeof(n)); }

static void put_error(const struct tl_error *err)
{
    put_count(-1);
    put_count((int32_t)strlen(err->msg));
    put(err->msg, strlen(err->msg));
}

static void encode(const struct tl_tokenizer *tk, int flags, const char *text, size_t bytes)
{
    struct tl_encode_params p = {
        .text = text, .text_bytes = bytes, .add_special = flags & 1, .parse_special = (flags & 2) != 0};
    struct tl_error err;
    int32_t *ids;
    size_t n;
    if (tl_tokenizer_encode(tk, &p, &ids, &n, &err) != TL_OK) {
        put_error(&err);
        return;
    }
    put_count((int32_t)n);
    put(ids, n * sizeof(*ids));
    tl_free(ids);
}

static void decode(const struct tl_tokenizer *tk, int flags, const int32_t *ids, size_t n)
{
    struct tl_detok_params params = {.keep_special = flags & 1};
    struct tl_error err = {.msg = "streamed and whole text differ"};
    struct tl_detok d;
    char *whole = NULL;
    const char *part;
    size_t bytes = 0, part_bytes, at = 0;
    bool same = tl_tokenizer_decode(tk, ids, n, &params, &whole, &bytes, &err) == TL_OK &&
                tl_detok_init(&d, tk, &params, &err) == TL_OK;
    for (size_t i = 0; i <= n && same; i++) {
        if (i == n)
            tl_detok_flush(&d, &part, &part_bytes);
        else
            same = tl_detok_push(&d, ids[i], &part, &part_bytes, &err) == TL_OK;
        same = same && tl_utf8_valid(part, part_bytes) == part_bytes && at + part_bytes <= bytes &&
               memcmp(whole + at, part, part_bytes) == 0;
        at += part_bytes;
    }
    if (same && at == bytes) {
        put_count((int32_t)bytes);
        put(whole, bytes);
    } else {
        put_error(&err);
    }
    if (whole)
        tl_detok_free(&d);
    tl_free(whole);
}

int main(int argc, char **argv)
{
    struct tl_tokenizer *tk;
    struct tl_error err;
    unsigned char head[2];
    uint32_t n;
    if (argc != 2) {
        fprintf(stderr, "usage: tokenizer_driver TOKENIZER.JSON < requests > replies\n");
        return 2;
    }
    if (tl_tokenizer_open(&tk, argv[1], &err) != TL_OK) {
        fprintf(stderr, "tokenizer_driver: %s\n", err.msg);
        return 1;
    }
    while (fread(head, 1, 2, stdin) == 2 && fread(&n, sizeof(n), 1, stdin) == 1) {
        size_t bytes = head[0] == 'd' ? (size_t)n * 4 : n;
        char *data = malloc(bytes + 1);
        if (!data || fread(data, 1, bytes, stdin) != bytes)
            return 1;
        if (head[0] == 'd')
            decode(tk, head[1], (const int32_t *)(void *)data, n);
        else
            encode(tk, head[1], data, bytes);
        free(data);
    }
    tl_tokenizer_free(tk);
    return 0;
}
