#include "sha256.h"

#include "mem.h"

#include <gnutls/crypto.h>
#include <gnutls/gnutls.h>
#include <stdio.h>

struct tl_sha256 {
    gnutls_hash_hd_t hash;
};

enum tl_status tl_sha256_start(struct tl_sha256 **out, struct tl_error *err)
{
    struct tl_sha256 *s = tl_malloc(sizeof(*s));
    *out = NULL;
    if (!s || gnutls_hash_init(&s->hash, GNUTLS_DIG_SHA256) != 0) {
        tl_free(s);
        return tl_fail_host_memory(err, sizeof(*s));
    }
    *out = s;
    return TL_OK;
}

void tl_sha256_add(struct tl_sha256 *s, const void *data, size_t bytes)
{
    (void)gnutls_hash(s->hash, data, bytes); /* fails for unknown algorithms only */
}

void tl_sha256_finish(struct tl_sha256 *s, uint8_t digest[TL_SHA256_BYTES])
{
    gnutls_hash_deinit(s->hash, digest);
    tl_free(s);
}

void tl_sha256_free(struct tl_sha256 *s)
{
    if (!s)
        return;
    gnutls_hash_deinit(s->hash, NULL);
    tl_free(s);
}

enum tl_status tl_sha256_of(const void *data, size_t bytes, uint8_t digest[TL_SHA256_BYTES], struct tl_error *err)
{
    struct tl_sha256 *s;
    enum tl_status st = tl_sha256_start(&s, err);
    if (st != TL_OK)
        return st;
    tl_sha256_add(s, data, bytes);
    tl_sha256_finish(s, digest);
    return TL_OK;
}

void tl_sha256_hex(const uint8_t digest[TL_SHA256_BYTES], char hex[2 * TL_SHA256_BYTES + 1])
{
    for (int i = 0; i < TL_SHA256_BYTES; i++)
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
}
