#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "commands.h"
#include "mem.h"
#include "tokenizer_utf8.h"

/* All of path, or of standard input for NULL. *text is owned: tl_free. */
static enum tl_status read_text(const char *path, char **text, size_t *bytes, struct tl_error *err)
{
    FILE *f = path ? fopen(path, "rb") : stdin;
    const char *name = path ? path : "standard input";
    char *p = NULL;
    size_t n = 0, cap = 0, got = 1;
    enum tl_status st = TL_OK;
    if (!f)
        return tl_fail_errno(err, "open", path, errno);
    while (got > 0 && st == TL_OK) {
        if (n == cap) {
            char *more = tl_realloc(p, cap = cap ? cap * 2 : 1 << 16);
            if (!more) {
                st = tl_fail_host_memory(err, cap);
                break;
            }
            p = more;
        }
        n += got = fread(p + n, 1, cap - n, f);
        if (n > TL_TOKENIZER_TEXT_BYTES_MAX)
            st = tl_fail(err, TL_ERR_BAD_PARAM, "'%s' has more than %u bytes", name, TL_TOKENIZER_TEXT_BYTES_MAX);
    }
    if (st == TL_OK && ferror(f))
        st = tl_fail_errno(err, "read", name, errno);
    if (path)
        fclose(f);
    if (st == TL_OK) {
        *text = p;
        *bytes = n;
        p = NULL;
    }
    tl_free(p);
    return st;
}

/* A piece as a JSON string, or as a list of bytes where it is only a part of a character. */
static void print_piece(const char *s, size_t n)
{
    if (tl_utf8_valid(s, n) == n) {
        tl_cli_json_string(s, n);
        return;
    }
    for (size_t i = 0; i < n; i++)
        printf("%c%u", i ? ',' : '[', (unsigned)(unsigned char)s[i]);
    putchar(']');
}

static void print_ids(const int32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++)
        printf("%s%d", i ? "," : "", (int)ids[i]);
}

static enum tl_status encode(const struct tl_tokenizer *tk, const struct tl_encode_params *p, bool json,
                             struct tl_error *err)
{
    int32_t *ids;
    size_t n, bytes;
    const char *piece;
    enum tl_status st = tl_tokenizer_encode(tk, p, &ids, &n, err);
    if (st != TL_OK)
        return st;
    if (json)
        printf("{\"count\":%zu,\"tokens\":[", n);
    print_ids(ids, n);
    if (json)
        printf("],\"pieces\":[");
    for (size_t i = 0; i < n && json; i++) {
        if (i)
            putchar(',');
        if (tl_tokenizer_piece(tk, ids[i], &piece, &bytes))
            print_piece(piece, bytes);
    }
    printf(json ? "]}\n" : "\n");
    tl_free(ids);
    return TL_OK;
}

static enum tl_status decode(const struct tl_tokenizer *tk, const int32_t *ids, size_t n, bool keep_special, bool json,
                             struct tl_error *err)
{
    const struct tl_detok_params p = {.keep_special = keep_special};
    char *text;
    size_t bytes;
    enum tl_status st = tl_tokenizer_decode(tk, ids, n, &p, &text, &bytes, err);
    if (st != TL_OK)
        return st;
    if (json) {
        printf("{\"text\":");
        tl_cli_json_string(text, bytes);
        putchar('}');
    } else {
        fwrite(text, 1, bytes, stdout);
    }
    putchar('\n');
    tl_free(text);
    return TL_OK;
}

int tl_cmd_tokenize(int argc, char **argv)
{
    const char *dir = NULL, *text = NULL, *file = NULL, *id_list = NULL;
    bool no_special = false, parse_special = false, json = false;
    const struct tl_arg table[] = {
        {"model", TL_ARG_STR, &dir, "DIR", "directory with a tokenizer.json", true, 0, 0},
        {"text", TL_ARG_STR, &text, "TEXT", "the text; without --text, --file and --ids it is read from standard input",
         false, 0, 0},
        {"file", TL_ARG_STR, &file, "FILE", "read the text from a file", false, 0, 0},
        {"ids", TL_ARG_STR, &id_list, "IDS", "the other way: print the text of ids 1,2,3", false, 0, 0},
        {"no-special", TL_ARG_FLAG, &no_special, NULL,
         "add no begin- or end-of-text token; with --ids: print no special tokens", false, 0, 0},
        {"parse-special", TL_ARG_FLAG, &parse_special, NULL, "special tokens written in the text become special tokens",
         false, 0, 0},
        {"json", TL_ARG_FLAG, &json, NULL, "print JSON: count, tokens and pieces, or text", false, 0, 0},
    };
    const struct tl_args args = {"tinyloop tokenize", "Token ids of a text, or the text of token ids.",
                                 "tinyloop tokenize --model config/demo-model --text 'Hello, loops' --json", table,
                                 sizeof(table) / sizeof(table[0])};
    struct tl_tokenizer *tk = NULL;
    struct tl_error err;
    enum tl_status st;
    char path[4096], *owned = NULL;
    int32_t *ids = NULL;
    size_t bytes = 0, room = 1;
    int n = 0, code;

    if ((code = tl_args_parse(&args, argc, argv)) != TL_ARGS_GO)
        return code;
    if (!!text + !!file + !!id_list > 1)
        return tl_args_wrong(&args, "give only one of --text, --file and --ids");
    if ((size_t)snprintf(path, sizeof(path), "%s/tokenizer.json", dir) >= sizeof(path))
        return tl_args_wrong(&args, "--model is longer than %zu bytes", sizeof(path) - 16);
    st = tl_tokenizer_open(&tk, path, &err);
    if (st == TL_OK && id_list) {
        for (const char *c = id_list; *c; c++)
            room += *c == ',';
        ids = tl_array(room, sizeof(*ids));
        if (!ids)
            st = tl_fail_host_memory(&err, room * sizeof(*ids));
        else if ((n = tl_args_int_list(&args, "ids", id_list, 0, tl_tokenizer_vocab_size(tk) - 1, ids, (int)room)) < 0)
            code = TL_EXIT_USAGE;
        else
            st = decode(tk, ids, (size_t)n, !no_special, json, &err);
    } else if (st == TL_OK) {
        if (!text) {
            st = read_text(file, &owned, &bytes, &err);
            text = owned;
        } else {
            bytes = strlen(text);
        }
        if (st == TL_OK)
            st = encode(
                tk,
                &(struct tl_encode_params){
                    .text = text, .text_bytes = bytes, .add_special = !no_special, .parse_special = parse_special},
                json, &err);
    }
    if (st != TL_OK)
        code = tl_cli_fail(&err);
    tl_free(ids);
    tl_free(owned);
    tl_tokenizer_free(tk);
    return code == TL_ARGS_GO ? TL_EXIT_OK : code;
}
