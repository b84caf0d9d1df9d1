/* A job and a barrier are both a counter that goes up by one: who waits for it spins, then sleeps on one condition variable.
 * The thread that raises a counter takes the lock only when somebody sleeps. The two sides cross (raise, look for sleepers /
 * count as sleeper, look at the counter), so all four accesses are sequentially consistent. */
#include "threads.h"

#include "../mem.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#define SPINS 2000 /* pauses of 20 to 50 ns: longer than a phase of a step is uneven, shorter than a wake-up is late */

struct tl_cpu_pool {
    int n;         /* threads that a job runs on, the caller included */
    int n_started; /* helper threads alive */
    pthread_t *threads;
    struct helper *helpers;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    void (*fn)(void *ctx, int tid);
    void *ctx;
    bool stop;
    _Alignas(64) atomic_uint jobs;
    _Alignas(64) atomic_uint phases;
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int sleepers;
};

struct helper {
    struct tl_cpu_pool *pool;
    int tid;
};

static void spin_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static void wait_past(struct tl_cpu_pool *p, atomic_uint *counter, unsigned seen)
{
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(counter, memory_order_acquire) != seen)
            return;
        spin_pause();
    }
    pthread_mutex_lock(&p->lock);
    atomic_fetch_add(&p->sleepers, 1);
    while (atomic_load(counter) == seen)
        pthread_cond_wait(&p->wake, &p->lock);
    atomic_fetch_sub(&p->sleepers, 1);
    pthread_mutex_unlock(&p->lock);
}

static void raise_counter(struct tl_cpu_pool *p, atomic_uint *counter)
{
    atomic_fetch_add(counter, 1);
    if (atomic_load(&p->sleepers) == 0)
        return;
    pthread_mutex_lock(&p->lock);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
}

void tl_cpu_pool_barrier(struct tl_cpu_pool *p)
{
    unsigned seen;
    if (p->n == 1)
        return;
    seen = atomic_load_explicit(&p->phases, memory_order_relaxed);
    if (atomic_fetch_add(&p->arrived, 1) + 1 == p->n) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        raise_counter(p, &p->phases);
    } else {
        wait_past(p, &p->phases, seen);
    }
}

static void *helper_main(void *arg)
{
    struct helper *h = arg;
    struct tl_cpu_pool *p = h->pool;
    for (unsigned seen = 0;; seen++) {
        wait_past(p, &p->jobs, seen);
        if (p->stop)
            return NULL;
        p->fn(p->ctx, h->tid);
        tl_cpu_pool_barrier(p);
    }
}

void tl_cpu_pool_run(struct tl_cpu_pool *p, void (*fn)(void *ctx, int tid), void *ctx)
{
    p->fn = fn;
    p->ctx = ctx;
    if (p->n > 1)
        raise_counter(p, &p->jobs);
    fn(ctx, 0);
    tl_cpu_pool_barrier(p);
}

static int allowed_cpus(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof(set), &set) != 0)
        return 1;
    return CPU_COUNT(&set) < TL_CPU_THREADS_MAX ? CPU_COUNT(&set) : TL_CPU_THREADS_MAX;
}

enum tl_status tl_cpu_pool_open(struct tl_cpu_pool **out, int n_threads, struct tl_error *err)
{
    struct tl_cpu_pool *p;
    int n = n_threads ? n_threads : allowed_cpus();
    *out = NULL;
    if (n_threads < 0 || n_threads > TL_CPU_THREADS_MAX)
        return tl_fail(err, TL_ERR_OUT_OF_RANGE, "the number of CPU threads is %d, it must be 0 to %d", n_threads,
                       TL_CPU_THREADS_MAX);
    p = tl_aligned(sizeof(*p));
    if (!p)
        return tl_fail_host_memory(err, sizeof(*p));
    memset(p, 0, sizeof(*p));
    p->n = n;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    p->threads = tl_calloc((size_t)n, sizeof(*p->threads));
    p->helpers = tl_calloc((size_t)n, sizeof(*p->helpers));
    if (!p->threads || !p->helpers) {
        tl_cpu_pool_close(p);
        return tl_fail_host_memory(err, (size_t)n * sizeof(*p->helpers));
    }
    for (int i = 1; i < n; i++) {
        int rc;
        p->helpers[i] = (struct helper){p, i};
        rc = pthread_create(&p->threads[i], NULL, helper_main, &p->helpers[i]);
        if (rc != 0) {
            tl_cpu_pool_close(p);
            return tl_fail(err, TL_ERR_IO, "cannot start CPU thread %d of %d: %s", i + 1, n, strerror(rc));
        }
        p->n_started++;
    }
    *out = p;
    return TL_OK;
}

void tl_cpu_pool_close(struct tl_cpu_pool *p)
{
    if (!p)
        return;
    p->stop = true;
    raise_counter(p, &p->jobs);
    for (int i = 1; i <= p->n_started; i++)
        pthread_join(p->threads[i], NULL);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
    tl_free(p->helpers);
    tl_free(p->threads);
    tl_free(p);
}

int tl_cpu_pool_size(const struct tl_cpu_pool *p) { return p->n; }
