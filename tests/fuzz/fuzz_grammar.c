/* tests/fuzz/fuzz_grammar.c - the first byte picks the kind of source, the second where a walk goes, the rest is the source.
 * Whatever compiles must give masks that agree with accepting single tokens and with the text that is forced, must be able to
 * end whenever nothing is allowed (the vocabulary has all bytes), and must leave no memory behind. Limits are low, so that no input takes long. */
#include "grammar.h"
#include "mem.h"

#include <stdlib.h>
#include <string.h>

#define N_VOCAB 266

static void check(bool holds)
{
    if (!holds)
        abort();
}

static struct tl_vocab_trie *make_vocab(void)
{
    static const char *const more[] = {"{\"", "\":", "\"}",  "], [", "true",
                                       "a b", "00",  "\n  ", "ab",   "a piece of more than twenty-four bytes"};
    static char bytes[256];
    struct tl_vocab_piece pieces[N_VOCAB];
    struct tl_vocab_trie *v;
    for (int i = 0; i < N_VOCAB; i++) {
        if (i < 256)
            bytes[i] = (char)i;
        pieces[i] = i < 256 ? (struct tl_vocab_piece){&bytes[i], 1}
                            : (struct tl_vocab_piece){more[i - 256], (uint32_t)strlen(more[i - 256])};
    }
    check(tl_vocab_trie_create(&v, pieces, N_VOCAB, NULL) == TL_OK);
    return v;
}

static void walk(const struct tl_grammar *g, const struct tl_vocab_trie *v, uint32_t seed)
{
    uint32_t mask[(N_VOCAB + 31) / 32];
    struct tl_matcher *m;
    struct tl_error err = {0};
    if (tl_matcher_create(&m, g, v, &err) != TL_OK) {
        check(err.msg[0] != '\0');
        return;
    }
    for (int step = 0; step < 24; step++) {
        int allowed[N_VOCAB], n = 0, n_bytes = 0, probe;
        char forced[40];
        size_t n_forced;
        enum tl_status st = tl_matcher_mask(m, mask, &err);
        struct tl_matcher *copy;
        if (st != TL_OK) {
            check(st != TL_ERR_GRAMMAR_NO_CONTINUATION && err.msg[0] != '\0');
            break;
        }
        for (int t = 0; t < N_VOCAB; t++)
            if (mask[t >> 5] >> (t & 31) & 1)
                allowed[n++] = t;
        while (n_bytes < n && allowed[n_bytes] < 256)
            n_bytes++;
        if (tl_matcher_forced(m, forced, sizeof(forced), &n_forced, &err) == TL_OK)
            check(tl_matcher_can_end(m)
                      ? n_forced == 0
                      : (n_forced > 0) == (n_bytes == 1) && (!n_forced || (unsigned char)forced[0] == allowed[0]));
        check(n > 0 || tl_matcher_can_end(m));
        check(!tl_matcher_is_done(m) || n == 0);
        seed = seed * 1664525 + 1013904223;
        probe = (int)(seed >> 8) % N_VOCAB;
        if (tl_matcher_clone(&copy, m, NULL) == TL_OK) {
            st = tl_matcher_accept(copy, probe, NULL);
            check(st == TL_OK || !(mask[probe >> 5] >> (probe & 31) & 1) || st == TL_ERR_INVALID_GRAMMAR);
            check(st != TL_OK || (mask[probe >> 5] >> (probe & 31) & 1));
            tl_matcher_free(copy);
        }
        if (n == 0 || tl_matcher_accept(m, allowed[(seed >> 16) % (uint32_t)n], &err) != TL_OK)
            break;
    }
    tl_matcher_free(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const enum tl_grammar_kind kinds[] = {TL_GRAMMAR_GBNF, TL_GRAMMAR_JSON_SCHEMA, TL_GRAMMAR_REGEX,
                                                 TL_GRAMMAR_CHOICE};
    static const struct tl_grammar_limits limits = {.source_bytes_max = 4096,
                                                    .repeat_max = 200,
                                                    .states_max = 5000,
                                                    .stack_max = 50,
                                                    .threads_max = 200,
                                                    .cache_bytes_max = 200000,
                                                    .work_per_token_max = 50000};
    static struct tl_vocab_trie *vocab;
    struct tl_grammar_source src = {0};
    struct tl_grammar *g;
    struct tl_error err = {0};
    const char *choice;
    char *text;
    int64_t live;
    if (size < 2)
        return 0;
    if (!vocab)
        vocab = make_vocab();
    live = tl_mem_live();
    text = malloc(size - 1);
    check(text != NULL);
    memcpy(text, data + 2, size - 2);
    text[size - 2] = '\0';
    choice = text;
    src.kind = kinds[data[0] % 4];
    src.choices = &choice;
    src.n_choices = 1;
    src.text = text;
    src.text_bytes = size - 2;
    if (tl_grammar_compile(&g, &src, &limits, &err) == TL_OK) {
        walk(g, vocab, data[1]);
        tl_grammar_free(g);
    } else {
        check(g == NULL && err.msg[0] != '\0');
    }
    free(text);
    check(tl_mem_live() == live);
    return 0;
}
