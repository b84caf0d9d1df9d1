/* engine/cpu/threads.h - the helper threads of the CPU backend.
 *
 * One job at a time: every thread of the pool runs the same function with its own number, and they meet at barriers inside
 * it. A waiting thread spins for some tens of microseconds, then sleeps, so that an idle server costs nothing.
 * Who computes what is a function of the thread number alone; what is computed never depends on it.
 * Owner: the backend. Thread: run() from one thread, barrier() from inside a job. */
#ifndef TL_CPU_THREADS_H
#define TL_CPU_THREADS_H

#include "../status.h"

#define TL_CPU_THREADS_MAX 256

struct tl_cpu_pool;

/* n_threads 0 = as many as the affinity mask of the process allows. The caller of run() is one of them.
 * Errors: TL_ERR_OUT_OF_RANGE, TL_ERR_NO_HOST_MEMORY, TL_ERR_IO (no thread could be started). */
enum tl_status tl_cpu_pool_open(struct tl_cpu_pool **out, int n_threads, struct tl_error *err);
void tl_cpu_pool_close(struct tl_cpu_pool *p); /* NULL is fine */
int tl_cpu_pool_size(const struct tl_cpu_pool *p);

/* Run fn(ctx, tid) on every thread, tid 0 being the caller; returns when all have returned. */
void tl_cpu_pool_run(struct tl_cpu_pool *p, void (*fn)(void *ctx, int tid), void *ctx);
/* Inside a job: wait for all threads. What was written before it is seen by all after it. */
void tl_cpu_pool_barrier(struct tl_cpu_pool *p);

/* The share [*lo, *hi) of n things for thread tid of n_threads; shares differ by one at most. */
static inline void tl_cpu_share(int64_t n, int tid, int n_threads, int64_t *lo, int64_t *hi)
{
    *lo = n * tid / n_threads;
    *hi = n * (tid + 1) / n_threads;
}

#endif
