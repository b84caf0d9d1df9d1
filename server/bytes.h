/* server/bytes.h - a growing byte buffer, and the JSON writer that fills it.
 *
 * Running out of memory sticks: later writes do nothing and `failed` tells the caller once, at the end.
 * The writer puts commas and escapes; bytes that are not UTF-8 become U+FFFD, so what leaves is always valid JSON.
 * Thread: one at a time. */
#ifndef TL_SERVER_BYTES_H
#define TL_SERVER_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tl_bytes {
    char *data; /* malloc'ed; not NUL-terminated unless tl_bytes_cstr was called */
    size_t n, cap;
    bool failed;
};

void tl_bytes_free(struct tl_bytes *b); /* back to empty */
bool tl_bytes_reserve(struct tl_bytes *b, size_t more);
void tl_bytes_add(struct tl_bytes *b, const void *data, size_t n);
void tl_bytes_str(struct tl_bytes *b, const char *s);
void tl_bytes_fmt(struct tl_bytes *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void tl_bytes_drop_front(struct tl_bytes *b, size_t n);
const char *tl_bytes_cstr(struct tl_bytes *b); /* "" when there is no memory */

/* s[0..n) as the inside of a JSON string, without the quotes. */
void tl_bytes_json(struct tl_bytes *b, const char *s, size_t n);

/* Length of the valid UTF-8 sequence at s (1..4), or 0. */
int tl_utf8_len(const char *s, size_t n);

struct tl_jw {
    struct tl_bytes *b;
    bool comma; /* something stands before at this level */
};
/* key is NULL inside arrays and at the top. */
void tl_jw_obj(struct tl_jw *w, const char *key);
void tl_jw_obj_end(struct tl_jw *w);
void tl_jw_arr(struct tl_jw *w, const char *key);
void tl_jw_arr_end(struct tl_jw *w);
void tl_jw_str(struct tl_jw *w, const char *key, const char *s); /* NULL = null */
void tl_jw_strn(struct tl_jw *w, const char *key, const char *s, size_t n);
void tl_jw_int(struct tl_jw *w, const char *key, int64_t v);
void tl_jw_uint(struct tl_jw *w, const char *key, uint64_t v);
void tl_jw_num(struct tl_jw *w, const char *key, double v, int decimals); /* not finite = null */
void tl_jw_bool(struct tl_jw *w, const char *key, bool v);
void tl_jw_null(struct tl_jw *w, const char *key);
void tl_jw_raw(struct tl_jw *w, const char *key, const char *json, size_t n);

#endif
