/* engine/sha256.h - SHA-256 of a stream of bytes (GnuTLS, which uses the processor's SHA instructions where it has them).
 * Thread: one per stream. */
#ifndef TL_SHA256_H
#define TL_SHA256_H

#include "status.h"

#define TL_SHA256_BYTES 32

struct tl_sha256;

/* Owner: caller; tl_sha256_finish() or tl_sha256_free() releases it. Errors: TL_ERR_NO_HOST_MEMORY. */
enum tl_status tl_sha256_start(struct tl_sha256 **out, struct tl_error *err);
void tl_sha256_add(struct tl_sha256 *s, const void *data, size_t bytes);
void tl_sha256_finish(struct tl_sha256 *s, uint8_t digest[TL_SHA256_BYTES]); /* releases s */
void tl_sha256_free(struct tl_sha256 *s);                                    /* NULL is fine */

/* The digest of one piece of memory. */
enum tl_status tl_sha256_of(const void *data, size_t bytes, uint8_t digest[TL_SHA256_BYTES], struct tl_error *err);
/* 64 hex digits and a NUL. */
void tl_sha256_hex(const uint8_t digest[TL_SHA256_BYTES], char hex[2 * TL_SHA256_BYTES + 1]);

#endif
