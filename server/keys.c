#include "keys.h"

#include <errno.h>
#include <gnutls/crypto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEYS_FILE_BYTES_MAX (1 << 20)
#define KEYS_MAX            10000

static bool copy_name(char *out, size_t cap, const char *from, size_t n)
{
    if (n == 0 || n >= cap)
        return false;
    for (size_t i = 0; i < n; i++) {
        char c = from[i];
        bool ok =
            (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || strchr("._-", c) != NULL;
        if (!ok || c == '\0')
            return false;
    }
    memcpy(out, from, n);
    out[n] = '\0';
    return true;
}

static bool parse_hash(unsigned char out[32], const char *hex, size_t n)
{
    if (n != 64)
        return false;
    for (size_t i = 0; i < 64; i++) {
        char c = hex[i];
        int d = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
        if (d < 0)
            return false;
        out[i / 2] = (unsigned char)(i % 2 ? out[i / 2] | d : d << 4);
    }
    return true;
}

/* Calls take on each comma-separated word of s[0..n). */
static bool each_word(const char *s, size_t n, struct tl_key *key, bool (*take)(struct tl_key *, const char *, size_t))
{
    while (n > 0) {
        const char *comma = memchr(s, ',', n);
        size_t len = comma ? (size_t)(comma - s) : n;
        if (!take(key, s, len))
            return false;
        s += len + (comma != NULL);
        n -= len + (comma != NULL);
    }
    return true;
}

static bool take_role(struct tl_key *key, const char *s, size_t n)
{
    static const struct {
        const char *name;
        enum tl_role role;
    } roles[] = {{"infer", TL_ROLE_INFER}, {"cache", TL_ROLE_CACHE}, {"admin", TL_ROLE_ADMIN}};
    for (int i = 0; i < 3; i++) {
        if (n != strlen(roles[i].name) || memcmp(s, roles[i].name, n) != 0)
            continue;
        key->roles |= roles[i].role;
        return true;
    }
    return false;
}

static bool take_limit(struct tl_key *key, const char *s, size_t n)
{
    const char *eq = memchr(s, '=', n);
    if (!eq)
        return false;
    size_t name = (size_t)(eq - s), digits = n - name - 1;
    int v = 0;
    if (digits == 0 || digits > 7)
        return false;
    for (size_t i = 0; i < digits; i++) {
        if (eq[1 + i] < '0' || eq[1 + i] > '9')
            return false;
        v = v * 10 + (eq[1 + i] - '0');
    }
    if (name == 10 && memcmp(s, "concurrent", 10) == 0)
        key->concurrent = v;
    else if (name == 3 && memcmp(s, "rpm", 3) == 0)
        key->rpm = v;
    else
        return false;
    return v > 0;
}

/* What is wrong with the line, or NULL. */
static const char *parse_line(struct tl_key *key, const char *line, size_t n)
{
    const char *field[5];
    size_t len[5];
    for (int i = 0; i < 5; i++) {
        const char *colon = i < 4 ? memchr(line, ':', n) : NULL;
        if (i < 4 && !colon)
            return "it needs five fields, name:sha256:tenant:roles:limits";
        field[i] = line;
        len[i] = colon ? (size_t)(colon - line) : n;
        if (colon) {
            n -= len[i] + 1;
            line = colon + 1;
        }
    }
    if (!copy_name(key->name, sizeof(key->name), field[0], len[0]))
        return "the name is not 1..63 of [A-Za-z0-9._-]";
    if (!parse_hash(key->sha256, field[1], len[1]))
        return "the hash is not 64 hexadecimal digits";
    if (!copy_name(key->tenant, sizeof(key->tenant), field[2], len[2]))
        return "the tenant is not 1..63 of [A-Za-z0-9._-]";
    if (!each_word(field[3], len[3], key, take_role) || key->roles == 0)
        return "roles are infer, cache, admin";
    if (!each_word(field[4], len[4], key, take_limit))
        return "limits are concurrent=N, rpm=N";
    return NULL;
}

enum tl_status tl_keys_parse(struct tl_keys *out, const char *text, size_t bytes, const char *name,
                             struct tl_error *err)
{
    enum tl_status st = TL_OK;
    const char *end = text + bytes;
    struct tl_keys k = {0};
    memset(out, 0, sizeof(*out));
    for (int line = 1; text < end && st == TL_OK; line++) {
        const char *nl = memchr(text, '\n', (size_t)(end - text));
        size_t n = (size_t)((nl ? nl : end) - text);
        const char *start = text;
        text += n + (nl != NULL);
        while (n > 0 && (start[n - 1] == '\r' || start[n - 1] == ' '))
            n--;
        if (n == 0 || start[0] == '#')
            continue;
        struct tl_key *key = calloc(1, sizeof(*key));
        struct tl_key **grown = k.n < KEYS_MAX ? realloc(k.key, (size_t)(k.n + 1) * sizeof(*grown)) : NULL;
        if (grown)
            k.key = grown;
        if (!key || !grown) {
            free(key);
            st = tl_fail(err, TL_ERR_NO_HOST_MEMORY, "%s:%d: no memory, or more than %d keys", name, line, KEYS_MAX);
            break;
        }
        k.key[k.n++] = key;
        const char *wrong = parse_line(key, start, n);
        for (int i = 0; i < k.n - 1 && !wrong; i++)
            if (strcmp(k.key[i]->name, key->name) == 0)
                wrong = "the name is there twice";
        if (wrong)
            st = tl_fail(err, TL_ERR_BAD_PARAM, "%s:%d: %s", name, line, wrong);
    }
    if (st == TL_OK && k.n == 0)
        st = tl_fail(err, TL_ERR_BAD_PARAM, "%s: holds no key", name);
    if (st == TL_OK) {
        *out = k;
        return TL_OK;
    }
    tl_keys_free(&k);
    return st;
}

enum tl_status tl_keys_read(struct tl_keys *out, const char *path, struct tl_error *err)
{
    enum tl_status st;
    memset(out, 0, sizeof(*out));
    FILE *f = fopen(path, "rb");
    if (!f)
        return tl_fail_errno(err, "read the API keys", path, errno);
    char *text = malloc(KEYS_FILE_BYTES_MAX + 1);
    size_t n = text ? fread(text, 1, KEYS_FILE_BYTES_MAX + 1, f) : 0;
    if (!text)
        st = tl_fail(err, TL_ERR_NO_HOST_MEMORY, "no memory for the API keys");
    else if (ferror(f))
        st = tl_fail_errno(err, "read the API keys", path, errno);
    else if (n > KEYS_FILE_BYTES_MAX)
        st = tl_fail(err, TL_ERR_BAD_PARAM, "%s: larger than %d bytes", path, KEYS_FILE_BYTES_MAX);
    else
        st = tl_keys_parse(out, text, n, path, err);
    free(text);
    fclose(f);
    return st;
}

static void free_unused(struct tl_keys *k)
{
    int n = 0;
    for (int i = 0; i < k->n_retired; i++) {
        if (k->retired[i]->n_users > 0)
            k->retired[n++] = k->retired[i];
        else
            free(k->retired[i]);
    }
    k->n_retired = n;
}

enum tl_status tl_keys_reload(struct tl_keys *k, const char *path, struct tl_error *err)
{
    struct tl_keys fresh;
    enum tl_status st = tl_keys_read(&fresh, path, err);
    if (st != TL_OK)
        return st;
    free_unused(k);
    struct tl_key **retired = realloc(k->retired, (size_t)(k->n_retired + k->n) * sizeof(*retired));
    if (!retired) {
        tl_keys_free(&fresh);
        return tl_fail_host_memory(err, (size_t)(k->n_retired + k->n) * sizeof(*retired));
    }
    k->retired = retired;
    for (int i = 0; i < k->n; i++) {
        struct tl_key *old = k->key[i];
        int j = 0;
        while (j < fresh.n && (strcmp(fresh.key[j]->name, old->name) != 0 ||
                               memcmp(fresh.key[j]->sha256, old->sha256, sizeof(old->sha256)) != 0))
            j++;
        if (j == fresh.n) {
            k->retired[k->n_retired++] = old;
            continue;
        }
        memcpy(old->tenant, fresh.key[j]->tenant, sizeof(old->tenant));
        old->roles = fresh.key[j]->roles;
        old->concurrent = fresh.key[j]->concurrent;
        old->rpm = fresh.key[j]->rpm;
        free(fresh.key[j]);
        fresh.key[j] = old;
    }
    free(k->key);
    k->key = fresh.key;
    k->n = fresh.n;
    return TL_OK;
}

void tl_keys_free(struct tl_keys *k)
{
    for (int i = 0; i < k->n; i++)
        free(k->key[i]);
    for (int i = 0; i < k->n_retired; i++)
        free(k->retired[i]);
    free(k->key);
    free(k->retired);
    memset(k, 0, sizeof(*k));
}

struct tl_key *tl_keys_find(const struct tl_keys *k, const char *presented)
{
    unsigned char hash[32];
    struct tl_key *found = NULL;
    if (gnutls_hash_fast(GNUTLS_DIG_SHA256, presented, strlen(presented), hash) != 0)
        return NULL;
    for (int i = 0; i < k->n; i++) /* never ends early: the time must not tell which key was near */
        if (gnutls_memcmp(k->key[i]->sha256, hash, sizeof(hash)) == 0)
            found = k->key[i];
    return found;
}

bool tl_key_take(struct tl_key *key, double now, double *wait_s)
{
    if (key->rpm == 0)
        return true;
    double per_second = key->rpm / 60.0, burst = key->rpm < 60 ? key->rpm : key->rpm / 6.0;
    if (key->credit_at == 0)
        key->credit = burst;
    else
        key->credit += (now - key->credit_at) * per_second;
    if (key->credit > burst)
        key->credit = burst;
    key->credit_at = now;
    if (key->credit < 1) {
        *wait_s = (1 - key->credit) / per_second;
        return false;
    }
    key->credit -= 1;
    return true;
}
