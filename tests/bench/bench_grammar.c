/* What a grammar costs per token: JSON lines with microseconds for masks and compiling.
 *
 *   bench_grammar [tokens per case]      (2000 unless said)
 *
 * Each case writes random texts of a grammar, token by token, and times the mask of every token: the first text with nothing
 * known about the grammar ("cold": new states and masks are computed on the way), the others after it. `all` counts both.
 * Times are those of the thread, so that others on the machine do not count. Vocabularies are made up: all bytes and random
 * words, 4096 and 50000 pieces. */
#include "grammar.h"
#include "mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static uint64_t seed = 1;

static uint64_t next(void)
{
    uint64_t z = (seed += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static void stop_if(bool bad, const char *what)
{
    if (!bad)
        return;
    fprintf(stderr, "bench_grammar: %s\n", what);
    exit(1);
}

#define PIECE_BYTES 40

static char (*g_pieces)[PIECE_BYTES];

static struct tl_vocab_trie *make_vocab(int n)
{
    static const char *const parts[] = {"a",  "e",  "i",  "o",  "u",  "an", "er", "st", "ing", "tion", "re",
                                        "de", "co", "th", "qu", "br", "pl", "1",  "20", "_",   "-",    "."};
    static const char *const seams[] = {"{\"",  "\":",   "\": ", "\", \"", "\"}",  "},",       "}, {",  "[{",
                                        "true", "false", "null", ",\n",    "\n  ", "\n    \"", "\",\"", "[]",
                                        "{}",   "\"]",   "\"},", "\"\n",   " \"",  "e+",       "\\n",   "\\u00"};
    struct tl_vocab_piece *pieces = tl_calloc((size_t)n, sizeof(*pieces));
    struct tl_vocab_trie *v;
    int n_seams = (int)(sizeof(seams) / sizeof(seams[0]));
    g_pieces = tl_calloc((size_t)n, sizeof(*g_pieces));
    stop_if(!pieces || !g_pieces, "no memory");
    for (int i = 0; i < n; i++) {
        char *p = g_pieces[i];
        size_t k = 0;
        if (i < 256) {
            p[k++] = (char)i;
        } else if (i < 256 + n_seams) {
            k = (size_t)snprintf(p, PIECE_BYTES, "%s", seams[i - 256]);
        } else {
            if (next() % 2)
                p[k++] = ' ';
            for (int w = 1 + (int)(next() % 6); w > 0; w--)
                k += (size_t)snprintf(p + k, PIECE_BYTES - k, "%s", parts[next() % 22]);
            if (next() % 33 == 0)
                k += (size_t)snprintf(p + k, PIECE_BYTES - k, "%s", seams[next() % 10]);
        }
        pieces[i] = (struct tl_vocab_piece){p, (uint32_t)k};
    }
    stop_if(tl_vocab_trie_create(&v, pieces, n, NULL) != TL_OK, "no vocabulary");
    tl_free(pieces);
    return v;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(const char *name, int vocab_size, const char *what, double *us, int n)
{
    if (n == 0)
        return;
    qsort(us, (size_t)n, sizeof(*us), by_value);
    printf(
        "{\"case\":\"%s\",\"vocab\":%d,\"masks\":\"%s\",\"n\":%d,\"median_us\":%.1f,\"p99_us\":%.1f,\"max_us\":%.1f}\n",
        name, vocab_size, what, n, us[n / 2], us[(int)((double)n * 0.99)], us[n - 1]);
}

/* One text of up to n tokens; the time of each mask. */
static int write_text(const struct tl_grammar *g, struct tl_vocab_trie *v, double *us, int n)
{
    int size = tl_vocab_trie_size(v), n_words = (size + 31) / 32, done = 0;
    uint32_t *mask = tl_array((size_t)n_words, sizeof(*mask));
    struct tl_matcher *m;
    struct tl_error err;
    stop_if(!mask || tl_matcher_create(&m, g, v, &err) != TL_OK, "no matcher");
    while (done < n && !tl_matcher_is_done(m)) {
        double t = now_us();
        int n_allowed = 0, k, pick = -1;
        stop_if(tl_matcher_mask(m, mask, &err) != TL_OK, err.msg);
        us[done++] = now_us() - t;
        for (int i = 0; i < n_words; i++)
            n_allowed += __builtin_popcount(mask[i]);
        if (n_allowed == 0)
            break;
        /* mostly words; now and then something short, or no string would ever end */
        for (int i = 256; i < 256 + 24 && pick < 0 && next() % 3 == 0; i++)
            if ((mask[i >> 5] >> (i & 31) & 1) && next() % 6 == 0)
                pick = i;
        if (pick < 0 && (mask['"' >> 5] >> ('"' & 31) & 1) && next() % 6 == 0)
            pick = '"';
        k = (int)(next() % (uint64_t)n_allowed);
        for (int i = 0; pick < 0 && i < size; i++)
            if ((mask[i >> 5] >> (i & 31) & 1) && k-- == 0)
                pick = i;
        stop_if(tl_matcher_accept(m, pick, &err) != TL_OK, err.msg);
    }
    tl_matcher_free(m);
    tl_free(mask);
    return done;
}

static const char person[] = "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\"},\"email\":{\"type\":"
                             "\"string\",\"format\":\"email\"},\"age\":{\"type\":"
                             "\"integer\",\"minimum\":0,\"maximum\":150},\"born\":{\"type\":\"string\",\"format\":"
                             "\"date\"},\"note\":{\"type\":\"string\",\"maxLength\":500},"
                             "\"level\":{\"enum\":[\"low\",\"middle\",\"high\"]},\"address\":{\"type\":\"object\","
                             "\"properties\":{\"street\":{\"type\":\"string\"},\"city\":{"
                             "\"type\":\"string\"},\"zip\":{\"type\":\"string\",\"pattern\":\"^[0-9]{5}$\"}},"
                             "\"required\":[\"street\",\"city\"]},\"tags\":{\"type\":\"array\","
                             "\"items\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":20},\"maxItems\":10},"
                             "\"children\":{\"type\":\"array\",\"items\":{\"$ref\":\"#\"}}},"
                             "\"required\":[\"name\",\"email\",\"address\"]}";
static const char chess[] =
    "root ::= (\"1. \" move \" \" move \"\\n\") ([1-9] [0-9]? \". \" move \" \" move \"\\n\")+\n"
    "move ::= (pawn | nonpawn | castle) [+#]?\n"
    "nonpawn ::= [NBKQR] [a-h]? [1-8]? \"x\"? [a-h] [1-8]\n"
    "pawn ::= ([a-h] \"x\")? [a-h] [1-8] (\"=\" [NBKQR])?\n"
    "castle ::= \"O-O\" \"-O\"?\n";
static const char sentences[] = "root ::= (sentence \" \")* sentence\n"
                                "sentence ::= subject \" \" word (\" \" word)* (\", \" word)? [.!?]\n"
                                "subject ::= \"the \" word | word \"s\"\n"
                                "word ::= [a-z]+ (\"-\" [a-z]+)?\n";
static const char c_like[] =
    "root ::= statement+\n"
    "statement ::= ident \" = \" expr \";\\n\" | \"if (\" expr \") {\\n\" statement* \"}\\n\"\n"
    "expr ::= term ((\" + \" | \" * \" | \" < \") term)*\n"
    "term ::= ident | [0-9]+ | \"(\" expr \")\" | ident \"(\" (expr (\", \" expr)*)? \")\"\n"
    "ident ::= [a-z_] [a-z0-9_]*\n";

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        enum tl_grammar_kind kind;
        const char *text;
    } cases[] = {{"json_object", TL_GRAMMAR_JSON_OBJECT, ""},
                 {"schema", TL_GRAMMAR_JSON_SCHEMA, person},
                 {"chess", TL_GRAMMAR_GBNF, chess},
                 {"sentences", TL_GRAMMAR_GBNF, sentences},
                 {"c_like", TL_GRAMMAR_GBNF, c_like},
                 {"regex", TL_GRAMMAR_REGEX, "([A-Za-z ]{5,60}: \\d{1,3}(\\.\\d+)?\\n)+"}};
    static const int sizes[] = {4096, 50000};
    int n = argc > 1 ? atoi(argv[1]) : 2000;
    double *us = tl_array((size_t)(n > 0 ? n : 1), sizeof(*us));
    stop_if(n < 1 || !us, "tokens per case must be 1 or more");
    for (int s = 0; s < 2; s++) {
        struct tl_vocab_trie *v = make_vocab(sizes[s]);
        for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
            struct tl_grammar_source src = {
                .kind = cases[c].kind, .text = cases[c].text, .text_bytes = strlen(cases[c].text)};
            struct tl_grammar *g;
            struct tl_error err;
            double t = now_us();
            int cold, at;
            stop_if(tl_grammar_compile(&g, &src, NULL, &err) != TL_OK, err.msg);
            printf("{\"case\":\"%s\",\"compile_us\":%.0f}\n", cases[c].name, now_us() - t);
            cold = at = write_text(g, v, us, n < 200 ? n : 200);
            while (at < n)
                at += write_text(g, v, us + at, n - at < 200 ? n - at : 200);
            {
                double *copy = tl_array((size_t)n, sizeof(*copy));
                stop_if(!copy, "no memory");
                memcpy(copy, us, (size_t)n * sizeof(*us));
                report(cases[c].name, sizes[s], "cold", us, cold);
                report(cases[c].name, sizes[s], "all", copy, n);
                tl_free(copy);
            }
            printf("{\"case\":\"%s\",\"vocab\":%d,\"host_bytes\":%zu}\n", cases[c].name, sizes[s], tl_grammar_bytes(g));
            tl_grammar_free(g);
        }
        tl_vocab_trie_free(v);
        tl_free(g_pieces);
    }
    tl_free(us);
    return 0;
}
