/* tests/unit/grammar_check.h - a small vocabulary and short ways to ask a grammar. Include after <check.h>. */
#ifndef TL_GRAMMAR_CHECK_H
#define TL_GRAMMAR_CHECK_H

#include "grammar.h"
#include "mem.h"

#include <stdlib.h>
#include <string.h>

/* Ids 0..255 are the bytes, then pieces that cross the seams of JSON, one longer than 24 bytes, and two without text. */
static const char *const g_more_pieces[] = {"{\"",   "\":",  "\": ", "\", \"", "\"}",
                                            "},",    "[{",   "true", "null",   "ab",
                                            "abc",   "aaaa", "  ",   "\n    ", "the quick brown fox jumps over",
                                            "1. e4", "",     ""};
#define N_MORE  ((int)(sizeof(g_more_pieces) / sizeof(g_more_pieces[0])))
#define N_VOCAB (256 + N_MORE)
#define N_WORDS ((N_VOCAB + 31) / 32)
#define NO_TEXT (N_VOCAB - 1)

static inline struct tl_vocab_trie *test_vocab(void)
{
    static char bytes[256];
    static struct tl_vocab_piece pieces[N_VOCAB];
    struct tl_vocab_trie *v;
    for (int i = 0; i < 256; i++) {
        bytes[i] = (char)i;
        pieces[i] = (struct tl_vocab_piece){&bytes[i], 1};
    }
    for (int i = 0; i < N_MORE; i++)
        pieces[256 + i] = (struct tl_vocab_piece){g_more_pieces[i], (uint32_t)strlen(g_more_pieces[i])};
    ck_assert_int_eq(tl_vocab_trie_create(&v, pieces, N_VOCAB, NULL), TL_OK);
    return v;
}

static inline enum tl_status compile(struct tl_grammar **out, enum tl_grammar_kind kind, const char *text,
                                     const struct tl_grammar_limits *limits, struct tl_error *err)
{
    struct tl_grammar_source src = {.kind = kind, .text = text, .text_bytes = strlen(text)};
    enum tl_status st = tl_grammar_compile(out, &src, limits, err);
    ck_assert_ptr_eq(st == TL_OK ? NULL : *out, NULL);
    return st;
}

static inline struct tl_grammar *must_compile(enum tl_grammar_kind kind, const char *text)
{
    struct tl_grammar *g;
    struct tl_error err = {.msg = ""};
    enum tl_status st = compile(&g, kind, text, NULL, &err);
    ck_assert_msg(st == TL_OK, "%s", err.msg);
    return g;
}

/* 'y': a whole text, 'p': the beginning of one, 'n': neither. */
static inline char judge(const struct tl_grammar *g, const char *text)
{
    struct tl_vocab_trie *v = test_vocab();
    struct tl_matcher *m;
    char answer = 'n';
    ck_assert_int_eq(tl_matcher_create(&m, g, v, NULL), TL_OK);
    if (tl_matcher_accept_bytes(m, text, strlen(text), NULL) == TL_OK)
        answer = tl_matcher_can_end(m) ? 'y' : 'p';
    tl_matcher_free(m);
    tl_vocab_trie_free(v);
    return answer;
}

/* texts: whole ones, NULL, then others, NULL. */
static inline void check_texts(enum tl_grammar_kind kind, const char *source, const char *const *texts)
{
    struct tl_grammar *g = must_compile(kind, source);
    for (; *texts; texts++)
        ck_assert_msg(judge(g, *texts) == 'y', "'%.60s' should be of %.200s", *texts, source);
    for (texts++; *texts; texts++)
        ck_assert_msg(judge(g, *texts) != 'y', "'%.60s' should not be of %.200s", *texts, source);
    tl_grammar_free(g);
}
#define TEXTS(...) ((const char *const[]){__VA_ARGS__, NULL})

static inline void check_refused(enum tl_grammar_kind kind, const char *source, enum tl_status want, const char *part)
{
    struct tl_grammar *g;
    struct tl_error err = {.msg = ""};
    enum tl_status st = compile(&g, kind, source, NULL, &err);
    ck_assert_msg(st == want && strstr(err.msg, part), "%.60s: status %d, '%s' should hold '%s'", source, (int)st,
                  err.msg, part);
}

/* The mask at m, checked against accepting every single token. */
static inline void exact_mask(struct tl_matcher *m, uint32_t *mask)
{
    ck_assert_int_eq(tl_matcher_mask(m, mask, NULL), TL_OK);
    for (int t = 0; t < N_VOCAB; t++) {
        struct tl_matcher *copy;
        ck_assert_int_eq(tl_matcher_clone(&copy, m, NULL), TL_OK);
        ck_assert_msg((tl_matcher_accept(copy, t, NULL) == TL_OK) == (mask[t >> 5] >> (t & 31) & 1), "token %d", t);
        tl_matcher_free(copy);
    }
}

static inline bool allows(struct tl_matcher *m, int token)
{
    uint32_t mask[N_WORDS];
    ck_assert_int_eq(tl_matcher_mask(m, mask, NULL), TL_OK);
    return mask[token >> 5] >> (token & 31) & 1;
}

/* n repetitions of a text with something before and behind; the caller frees it. */
static inline char *repeated(const char *before, const char *text, int n, const char *behind)
{
    size_t k = strlen(text);
    char *out = malloc(strlen(before) + k * (size_t)n + strlen(behind) + 1), *p = out;
    ck_assert_ptr_nonnull(out);
    p += strlen(strcpy(p, before));
    for (int i = 0; i < n; i++, p += k)
        memcpy(p, text, k);
    strcpy(p, behind);
    return out;
}

#endif
