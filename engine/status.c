#include "status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *tl_status_name(enum tl_status st)
{
#define X(code, name) [code] = name,
    static const char *const names[TL_STATUS_COUNT] = {[TL_OK] = "ok", TL_STATUS_MAP(X)};
#undef X
    return (unsigned)st < TL_STATUS_COUNT ? names[st] : names[TL_ERR_INTERNAL];
}

enum tl_status tl_fail(struct tl_error *err, enum tl_status st, const char *fmt, ...)
{
    if (err) {
        va_list ap;
        memset(err, 0, sizeof(*err));
        err->status = st;
        va_start(ap, fmt);
        vsnprintf(err->msg, sizeof(err->msg), fmt, ap);
        va_end(ap);
    }
    return st;
}

void tl_error_param(struct tl_error *err, const char *param)
{
    if (err)
        snprintf(err->param, sizeof(err->param), "%s", param);
}

void tl_error_num(struct tl_error *err, const char *key, int64_t value)
{
    if (!err || err->n_nums >= TL_ERROR_NUMS)
        return;
    err->num[err->n_nums].key = key;
    err->num[err->n_nums].value = value;
    err->n_nums++;
}

enum tl_status tl_fail_host_memory(struct tl_error *err, size_t bytes)
{
    return tl_fail(err, TL_ERR_NO_HOST_MEMORY, "the host has no memory left for %zu bytes", bytes);
}

enum tl_status tl_fail_errno(struct tl_error *err, const char *what, const char *path, int errnum)
{
    return tl_fail(err, TL_ERR_IO, "cannot %s '%s': %s", what, path, strerror(errnum));
}

void tl_assert_failed(const char *expr, const char *file, int line)
{
    fprintf(stderr, "tinyloop: internal error: '%s' does not hold (%s:%d)\n", expr, file, line);
    abort();
}
