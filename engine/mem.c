#include "mem.h"

#include <stdlib.h>
#include <string.h>

#ifdef TL_TEST_HOOKS
#include <stdatomic.h>

static atomic_int_least64_t g_requests, g_fail_at, g_live;

void tl_mem_fail_at(int64_t n)
{
    atomic_store(&g_requests, 0);
    atomic_store(&g_fail_at, n);
}

int64_t tl_mem_requests(void) { return atomic_load(&g_requests); }
int64_t tl_mem_live(void) { return atomic_load(&g_live); }

static int refused(void) { return atomic_fetch_add(&g_requests, 1) + 1 == atomic_load(&g_fail_at); }

static void *counted(void *p)
{
    if (p)
        atomic_fetch_add(&g_live, 1);
    return p;
}

static void uncounted(const void *p)
{
    if (p)
        atomic_fetch_sub(&g_live, 1);
}
#else
static int refused(void) { return 0; }
static void *counted(void *p) { return p; }
static void uncounted(const void *p) { (void)p; }
#endif

void *tl_malloc(size_t bytes) { return refused() ? NULL : counted(malloc(bytes ? bytes : 1)); }

void *tl_calloc(size_t n, size_t bytes) { return refused() ? NULL : counted(calloc(n ? n : 1, bytes ? bytes : 1)); }

void *tl_array(size_t n, size_t bytes)
{
    size_t total;
    if (__builtin_mul_overflow(n, bytes, &total))
        return NULL;
    return tl_malloc(total);
}

void *tl_realloc(void *p, size_t bytes)
{
    if (!p)
        return tl_malloc(bytes);
    return refused() ? NULL : realloc(p, bytes ? bytes : 1);
}

void *tl_aligned(size_t bytes)
{
    if (bytes > SIZE_MAX - 64 || refused())
        return NULL;
    return counted(aligned_alloc(64, (bytes + 63) / 64 * 64 + (bytes ? 0 : 64)));
}

char *tl_strdup(const char *s)
{
    size_t n = strlen(s) + 1;
    char *p = tl_malloc(n);
    if (p)
        memcpy(p, s, n);
    return p;
}

void tl_free(void *p)
{
    uncounted(p);
    free(p);
}
