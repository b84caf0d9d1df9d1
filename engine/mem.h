/* engine/mem.h - host memory for the engine. The only callers of malloc, so that tests can make any of them fail.
 *
 * Sizes are bytes. Every function returns NULL when there is no memory; tl_free accepts NULL. Arrays go through
 * tl_calloc or tl_array, which refuse a product that overflows.
 * Thread: any. In builds with TL_TEST_HOOKS a process-wide counter can fail the n-th request (see tl_mem_fail_at). */
#ifndef TL_MEM_H
#define TL_MEM_H

#include <stddef.h>
#include <stdint.h>

void *tl_malloc(size_t bytes);
void *tl_calloc(size_t n, size_t bytes);
void *tl_array(size_t n, size_t bytes); /* like tl_calloc without clearing */
void *tl_realloc(void *p, size_t bytes);
void *tl_aligned(size_t bytes); /* 64-byte aligned, not cleared; release with tl_free */
char *tl_strdup(const char *s);
void tl_free(void *p);

#ifdef TL_TEST_HOOKS
/* Fail the n-th allocation from now on (1 = the next), once; 0 = none. */
void tl_mem_fail_at(int64_t n);
/* Allocations asked for since the last tl_mem_fail_at, and blocks alive now. */
int64_t tl_mem_requests(void);
int64_t tl_mem_live(void);
#endif

#endif
