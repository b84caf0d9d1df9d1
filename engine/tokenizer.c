#include "tokenizer_impl.h"

#include "json.h"
#include "mem.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum tl_status tl_tk_buf_reserve(struct tl_tk_buf *b, size_t extra, struct tl_error *err)
{
    size_t cap;
    char *p;
    if (extra <= b->cap - b->n)
        return TL_OK;
    if (extra > TL_TK_BUF_MAX || b->n + extra > TL_TK_BUF_MAX)
        return tl_fail(err, TL_ERR_BAD_PARAM, "the text grows above %zu bytes in the tokenizer", TL_TK_BUF_MAX);
    cap = b->cap * 2 > b->n + extra ? b->cap * 2 : b->n + extra;
    p = tl_realloc(b->p, cap);
    if (!p)
        return tl_fail_host_memory(err, cap);
    b->p = p;
    b->cap = cap;
    return TL_OK;
}

enum tl_status tl_tk_buf_add(struct tl_tk_buf *b, const char *s, size_t n, struct tl_error *err)
{
    enum tl_status st = tl_tk_buf_reserve(b, n, err);
    if (st == TL_OK && n > 0) {
        memcpy(b->p + b->n, s, n);
        b->n += n;
    }
    return st;
}

/* ---- tables: open addressing, at most half full ------------------------------------------------------------------ */

static size_t table_slots(size_t n)
{
    size_t slots = 16;
    while (slots < 2 * n)
        slots *= 2;
    return slots;
}

uint32_t tl_tk_hash(const char *s, size_t n)
{
    const uint64_t k = 0x9E3779B97F4A7C15u;
    uint64_t h = n * k, w;
    while (n > 0) {
        size_t take = n < 8 ? n : 8;
        w = 0;
        memcpy(&w, s, take);
        h = (h ^ w) * k;
        h ^= h >> 29;
        s += take;
        n -= take;
    }
    return (uint32_t)(h >> 32);
}

static uint32_t hash_pair(int32_t left, int32_t right)
{
    uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(h >> 32);
}

enum tl_status tl_tk_vocab_alloc(struct tl_tokenizer *tk, size_t n, struct tl_error *err)
{
    size_t slots = table_slots(n);
    tk->vocab = tl_array(slots, sizeof(*tk->vocab));
    if (!tk->vocab)
        return tl_fail_host_memory(err, slots * sizeof(*tk->vocab));
    for (size_t i = 0; i < slots; i++)
        tk->vocab[i].id = -1;
    tk->vocab_mask = slots - 1;
    return TL_OK;
}

int32_t tl_tk_vocab_find(const struct tl_tokenizer *tk, const char *s, size_t n)
{
    uint32_t h = tl_tk_hash(s, n);
    for (size_t i = h & tk->vocab_mask; tk->vocab[i].id >= 0; i = (i + 1) & tk->vocab_mask) {
        const struct tl_tk_token *t = &tk->tokens[tk->vocab[i].id];
        if (tk->vocab[i].hash == h && t->text_bytes == n && memcmp(tk->texts.p + t->text, s, n) == 0)
            return tk->vocab[i].id;
    }
    return -1;
}

void tl_tk_vocab_put(struct tl_tokenizer *tk, int32_t id)
{
    uint32_t h = tl_tk_hash(tk->texts.p + tk->tokens[id].text, tk->tokens[id].text_bytes);
    size_t i = h & tk->vocab_mask;
    while (tk->vocab[i].id >= 0)
        i = (i + 1) & tk->vocab_mask;
    tk->vocab[i] = (struct tl_tk_vocab_slot){.hash = h, .id = id};
}

enum tl_status tl_tk_merges_alloc(struct tl_tokenizer *tk, size_t n, struct tl_error *err)
{
    size_t slots = table_slots(n);
    tk->merges = tl_array(slots, sizeof(*tk->merges));
    if (!tk->merges)
        return tl_fail_host_memory(err, slots * sizeof(*tk->merges));
    for (size_t i = 0; i < slots; i++)
        tk->merges[i].left = -1;
    tk->merge_mask = slots - 1;
    return TL_OK;
}

/* The slot of a pair, or the empty one where it belongs. */
static struct tl_tk_merge *merge_slot(const struct tl_tokenizer *tk, int32_t left, int32_t right)
{
    size_t i = hash_pair(left, right) & tk->merge_mask;
    while (tk->merges[i].left >= 0 && (tk->merges[i].left != left || tk->merges[i].right != right))
        i = (i + 1) & tk->merge_mask;
    return &tk->merges[i];
}

const struct tl_tk_merge *tl_tk_merge_find(const struct tl_tokenizer *tk, int32_t left, int32_t right)
{
    const struct tl_tk_merge *m = merge_slot(tk, left, right);
    return m->left >= 0 ? m : NULL;
}

void tl_tk_merge_put(struct tl_tokenizer *tk, struct tl_tk_merge m) { *merge_slot(tk, m.left, m.right) = m; }

/* ---- open and free ----------------------------------------------------------------------------------------------- */

/* text is changed. */
static enum tl_status open_text(struct tl_tokenizer **out, char *text, size_t bytes, bool no_jit, struct tl_error *err)
{
    struct tl_tokenizer *tk = tl_calloc(1, sizeof(*tk));
    enum tl_status st;
    if (!tk)
        return tl_fail_host_memory(err, sizeof(*tk));
    tk->no_jit = no_jit;
    st = tl_tk_load(tk, text, bytes, err);
    if (st == TL_OK) {
        *out = tk;
        tk = NULL;
    }
    tl_tokenizer_free(tk);
    return st;
}

enum tl_status tl_tokenizer_open_memory(struct tl_tokenizer **out, const char *data, size_t bytes, bool no_jit,
                                        struct tl_error *err)
{
    enum tl_status st;
    char *copy;
    *out = NULL;
    if (bytes > TL_TOKENIZER_FILE_BYTES_MAX)
        return tl_fail(err, TL_ERR_BAD_FILE, "a tokenizer of %zu bytes, the limit is %u", bytes,
                       TL_TOKENIZER_FILE_BYTES_MAX);
    copy = tl_malloc(bytes);
    if (!copy)
        return tl_fail_host_memory(err, bytes);
    if (bytes > 0)
        memcpy(copy, data, bytes);
    st = open_text(out, copy, bytes, no_jit, err);
    tl_free(copy);
    return st;
}

enum tl_status tl_tokenizer_open(struct tl_tokenizer **out, const char *path, struct tl_error *err)
{
    struct tl_error inner = {.status = TL_OK};
    enum tl_status st;
    char *text = NULL;
    size_t bytes = 0;
    *out = NULL;
    st = tl_file_read(&text, &bytes, path, TL_TOKENIZER_FILE_BYTES_MAX, &inner);
    if (st == TL_OK)
        st = open_text(out, text, bytes, false, &inner);
    tl_free(text);
    if (st == TL_ERR_BAD_FILE || st == TL_ERR_UNSUPPORTED) {
        tl_fail(err, st, "tokenizer file '%.120s': %.180s", path, inner.msg);
        for (int i = 0; i < inner.n_nums; i++)
            tl_error_num(err, inner.num[i].key, inner.num[i].value);
    } else if (st != TL_OK && err) {
        *err = inner;
    }
    return st;
}

enum tl_status tl_tokenizer_of_model(struct tl_tokenizer **out, const char *dir, int vocab_size, struct tl_error *err)
{
    char path[4096];
    struct stat sb;
    enum tl_status st;
    int n;
    *out = NULL;
    snprintf(path, sizeof(path), "%s/tokenizer.json", dir);
    if (lstat(path, &sb) != 0 && errno == ENOENT)
        return TL_OK;
    st = tl_tokenizer_open(out, path, err);
    n = *out ? tl_tokenizer_vocab_size(*out) : 0;
    if (n > vocab_size) {
        st =
            tl_fail(err, TL_ERR_BAD_FILE, "tokenizer.json has ids up to %d, but the model's vocabulary has %d: 0 to %d",
                    n - 1, vocab_size, vocab_size - 1);
        tl_tokenizer_free(*out);
        *out = NULL;
    }
    return st;
}

void tl_tk_pattern_clear(struct tl_tk_pattern *p)
{
    tl_free(p->literal);
    pcre2_code_free(p->code);
    memset(p, 0, sizeof(*p));
}

static void added_set_clear(struct tl_tk_added_set *set)
{
    for (size_t i = 0; i < set->n; i++)
        tl_free(set->v[i].match);
    tl_free(set->v);
}

void tl_tokenizer_free(struct tl_tokenizer *tk)
{
    if (!tk)
        return;
    for (int i = 0; i < TL_TK_STAGES_MAX; i++) {
        tl_tk_pattern_clear(&tk->normalizers[i].pattern);
        tl_tk_pattern_clear(&tk->stages[i].pattern);
        tl_tk_pattern_clear(&tk->decoders[i].pattern);
        tl_free(tk->normalizers[i].content);
        tl_free(tk->decoders[i].content);
    }
    added_set_clear(&tk->added);
    added_set_clear(&tk->added_normalized);
    tl_free(tk->tokens);
    tl_free(tk->texts.p);
    tl_free(tk->pieces.p);
    tl_free(tk->vocab);
    tl_free(tk->merges);
    tl_free(tk->prefix);
    tl_free(tk->suffix);
    tl_free(tk);
}

/* ---- questions --------------------------------------------------------------------------------------------------- */

int tl_tokenizer_vocab_size(const struct tl_tokenizer *tk) { return tk->n_tokens; }

static const struct tl_tk_token *token_at(const struct tl_tokenizer *tk, int32_t id)
{
    if (id < 0 || id >= tk->n_tokens || !(tk->tokens[id].flags & TL_TK_PRESENT))
        return NULL;
    return &tk->tokens[id];
}

bool tl_tokenizer_piece(const struct tl_tokenizer *tk, int32_t id, const char **bytes, size_t *n_bytes)
{
    const struct tl_tk_token *t = token_at(tk, id);
    if (!t)
        return false;
    *bytes = tk->pieces.p ? tk->pieces.p + t->piece : "";
    *n_bytes = t->piece_bytes;
    return true;
}

bool tl_tokenizer_is_special(const struct tl_tokenizer *tk, int32_t id)
{
    const struct tl_tk_token *t = token_at(tk, id);
    return t && t->flags & TL_TK_SPECIAL;
}

int32_t tl_tokenizer_find(const struct tl_tokenizer *tk, const char *text)
{
    const struct tl_tk_added_set *sets[] = {&tk->added, &tk->added_normalized};
    size_t n = strlen(text);
    for (int k = 0; k < 2; k++)
        for (size_t i = 0; i < sets[k]->n; i++) {
            const struct tl_tk_token *t = &tk->tokens[sets[k]->v[i].id];
            if (t->text_bytes == n && memcmp(tk->texts.p + t->text, text, n) == 0)
                return sets[k]->v[i].id;
        }
    return -1;
}
