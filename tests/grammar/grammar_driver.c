/* Compile grammars and walk through them on behalf of a Python test: one command a line on stdin, one answer a line on stdout.
 *
 *   vocab N            then N lines, each the piece of a token in hex ("-" = none)
 *   compile KIND HEX   KIND: gbnf schema object regex; answers "ok" or "error NAME MESSAGE"
 *   choice HEX...      the same with a list of strings
 *   worst              milliseconds of the thread that the longest compiling, mask or move took since the last `worst`
 *   accept HEX         byte by byte from the start: "yes" (whole), "part", or "no OFFSET"
 *   walk SEED STEPS    random allowed tokens; after STEPS those that close things. Answers "HEX end" or "HEX cut"; every mask
 *                      on the way is checked against accepting each token on its own if STEPS is negative */
#include "grammar.h"
#include "mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static struct tl_vocab_trie *vocab;
static struct tl_vocab_piece *pieces;
static int n_pieces;
static uint64_t seed;

static uint64_t next(void)
{
    uint64_t z = (seed += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static double worst_ms; /* of the thread, since `worst`: compiling, or one token's mask and move */

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void took(double since)
{
    double t = now_ms() - since;
    worst_ms = t > worst_ms ? t : worst_ms;
}

static void die(const char *what)
{
    fprintf(stderr, "grammar_driver: %s\n", what);
    exit(1);
}

static int digit(char c) { return c <= '9' ? c - '0' : c - 'a' + 10; }

static char *from_hex(const char *hex, size_t *n)
{
    size_t len = strspn(hex, "0123456789abcdef");
    char *out = tl_malloc(len / 2 + 1);
    if (!out)
        die("no memory");
    for (size_t i = 0; i < len / 2; i++)
        out[i] = (char)(digit(hex[2 * i]) << 4 | digit(hex[2 * i + 1]));
    out[len / 2] = '\0';
    *n = len / 2;
    return out;
}

static void read_vocab(char **line, size_t *cap, int n)
{
    struct tl_error err;
    pieces = tl_calloc((size_t)n, sizeof(*pieces));
    n_pieces = n;
    for (int i = 0; i < n; i++) {
        size_t k;
        if (getline(line, cap, stdin) <= 0)
            die("vocabulary ends early");
        pieces[i].bytes = from_hex(*line, &k);
        pieces[i].n_bytes = (uint32_t)k;
    }
    if (tl_vocab_trie_create(&vocab, pieces, n, &err) != TL_OK)
        die(err.msg);
}

/* Every token that the mask allows can be accepted, and no other one can. */
static bool mask_is_exact(const struct tl_matcher *m, const uint32_t *mask)
{
    for (int t = 0; t < n_pieces; t++) {
        struct tl_matcher *copy;
        bool allowed = mask[t >> 5] >> (t & 31) & 1;
        if (tl_matcher_clone(&copy, m, NULL) != TL_OK)
            die("clone failed");
        if ((tl_matcher_accept(copy, t, NULL) == TL_OK) != allowed) {
            fprintf(stderr, "token %d '%s': the mask says %d\n", t, pieces[t].bytes, allowed);
            return false;
        }
        tl_matcher_free(copy);
    }
    return true;
}

static bool is_closing(int t) { return pieces[t].n_bytes == 1 && strchr("\"]}", pieces[t].bytes[0]); }

static void walk(const struct tl_grammar *g, int steps)
{
    size_t n_words = ((size_t)n_pieces + 31) / 32;
    uint32_t *mask = tl_array(n_words, sizeof(*mask));
    int *allowed = tl_array((size_t)n_pieces, sizeof(*allowed));
    struct tl_matcher *m = NULL;
    struct tl_error err;
    bool check = steps < 0, ended = false;
    if (!mask || !allowed || tl_matcher_create(&m, g, vocab, &err) != TL_OK)
        die("no memory");
    steps = abs(steps);
    for (int i = 0; i < steps + 4000; i++) {
        int n = 0, n_closing = 0, pick;
        if (tl_matcher_is_done(m) || (tl_matcher_can_end(m) && (i >= steps || next() % 4 == 0))) {
            ended = true;
            break;
        }
        double start = now_ms();
        enum tl_status st = tl_matcher_mask(m, mask, &err);
        took(start);
        if (st != TL_OK) {
            printf("error %s %s\n", tl_status_name(err.status), err.msg);
            goto out;
        }
        if (check && i < 12 && !mask_is_exact(m, mask)) {
            printf("error mask\n");
            goto out;
        }
        for (int t = 0; t < n_pieces; t++)
            if (mask[t >> 5] >> (t & 31) & 1) {
                allowed[n++] = t;
                n_closing += is_closing(t);
            }
        if (n == 0) { /* may end, and no token of this vocabulary goes on */
            ended = true;
            break;
        }
        pick = allowed[next() % (uint64_t)n];
        if (n_closing && (i >= steps || next() % 4 == 0)) {
            int k = (int)(next() % (uint64_t)n_closing);
            for (int j = 0; j < n; j++)
                if (is_closing(allowed[j]) && k-- == 0)
                    pick = allowed[j];
        }
        start = now_ms();
        st = tl_matcher_accept(m, pick, &err);
        took(start);
        if (st != TL_OK) {
            printf("error %s %s\n", tl_status_name(err.status), err.msg);
            goto out;
        }
        for (uint32_t k = 0; k < pieces[pick].n_bytes; k++)
            printf("%02x", (unsigned char)pieces[pick].bytes[k]);
    }
    printf(" %s\n", ended ? "end" : "cut");
out:
    tl_matcher_free(m);
    tl_free(mask);
    tl_free(allowed);
}

static void accept(const struct tl_grammar *g, const char *text, size_t n)
{
    struct tl_matcher *m;
    struct tl_error err;
    if (tl_matcher_create(&m, g, vocab, &err) != TL_OK)
        die(err.msg);
    for (size_t i = 0; i < n; i++)
        if (tl_matcher_accept_bytes(m, text + i, 1, &err) != TL_OK) {
            printf("no %zu %s\n", i, err.msg);
            tl_matcher_free(m);
            return;
        }
    printf("%s\n", tl_matcher_can_end(m) ? "yes" : "part");
    tl_matcher_free(m);
}

int main(void)
{
    static const char *const kinds[] = {"gbnf", "schema", "object", "regex"};
    struct tl_grammar *g = NULL;
    char *line = NULL;
    size_t cap = 0;
    while (getline(&line, &cap, stdin) > 0) {
        char word[16] = "", kind[16] = "";
        int used = 0, a = 0;
        struct tl_error err;
        sscanf(line, "%15s %n", word, &used);
        if (strcmp(word, "vocab") == 0) {
            read_vocab(&line, &cap, atoi(line + used));
            printf("ok\n");
        } else if (strcmp(word, "compile") == 0 || strcmp(word, "choice") == 0) {
            struct tl_grammar_source src = {.kind = TL_GRAMMAR_CHOICE};
            char *choices[64];
            tl_grammar_free(g);
            g = NULL;
            if (word[1] == 'o') {
                size_t n;
                sscanf(line + used, "%15s %n", kind, &a);
                for (int k = 0; k < 4; k++)
                    if (strcmp(kind, kinds[k]) == 0)
                        src.kind = (enum tl_grammar_kind)k;
                choices[0] = from_hex(line + used + a, &n);
                src.text = choices[0];
                src.text_bytes = n;
                src.n_choices = 1;
            } else {
                for (char *p = strtok(line + used, " \n"); p && src.n_choices < 64; p = strtok(NULL, " \n")) {
                    size_t n;
                    choices[src.n_choices++] = from_hex(p, &n);
                }
                src.choices = (const char *const *)choices;
            }
            double start = now_ms();
            enum tl_status st = tl_grammar_compile(&g, &src, NULL, &err);
            took(start);
            if (st == TL_OK)
                printf("ok\n");
            else
                printf("error %s %s\n", tl_status_name(err.status), err.msg);
            for (int i = 0; i < src.n_choices; i++)
                tl_free(choices[i]);
        } else if (strcmp(word, "worst") == 0) {
            printf("%.3f\n", worst_ms);
            worst_ms = 0;
        } else if (!g) {
            printf("error no grammar\n");
        } else if (strcmp(word, "accept") == 0) {
            size_t n;
            char *text = from_hex(line + used, &n);
            accept(g, text, n);
            tl_free(text);
        } else if (strcmp(word, "walk") == 0) {
            sscanf(line + used, "%d %d", &a, &used);
            seed = (uint64_t)a;
            walk(g, used);
        }
        fflush(stdout);
    }
    tl_grammar_free(g);
    tl_vocab_trie_free(vocab);
    for (int i = 0; i < n_pieces; i++)
        tl_free((char *)(uintptr_t)pieces[i].bytes);
    tl_free(pieces);
    free(line);
    return 0;
}
