#include "ceilings.h"

#include "cpu.h"
#include "threads.h"

#include "../mem.h"

#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2_FN   __attribute__((target("avx2")))
#define AVX512_FN __attribute__((target("avx512f,avx512bw,avx512vnni")))

AVX2_FN static uint64_t read_avx2(const uint8_t *p, size_t bytes)
{
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    uint64_t out[4];
    for (size_t i = 0; i + 128 <= bytes; i += 128) {
        _mm_prefetch((const char *)p + i + 1024, _MM_HINT_T0);
        _mm_prefetch((const char *)p + i + 1088, _MM_HINT_T0);
        a = _mm256_xor_si256(a, _mm256_load_si256((const __m256i *)(p + i)));
        b = _mm256_xor_si256(b, _mm256_load_si256((const __m256i *)(p + i + 32)));
        c = _mm256_xor_si256(c, _mm256_load_si256((const __m256i *)(p + i + 64)));
        d = _mm256_xor_si256(d, _mm256_load_si256((const __m256i *)(p + i + 96)));
    }
    _mm256_storeu_si256((__m256i *)out, _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d)));
    return out[0] ^ out[1] ^ out[2] ^ out[3];
}

#define CHAINS 8 /* enough to hide the latency of the sums */

/* One round: CHAINS x (32 products by vpmaddubsw, added in 16 bits). */
AVX2_FN static uint64_t rate_avx2(int64_t rounds)
{
    __m256i acc[CHAINS], w = _mm256_set1_epi8(3), a = _mm256_set1_epi8((char)rounds);
    for (int i = 0; i < CHAINS; i++)
        acc[i] = _mm256_set1_epi16((short)i);
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 8
        for (int i = 0; i < CHAINS; i++) {
            __asm__ volatile("" : "+x"(w)); /* each product is computed anew */
            acc[i] = _mm256_add_epi16(acc[i], _mm256_maddubs_epi16(w, a));
        }
    }
    for (int i = 1; i < CHAINS; i++)
        acc[0] = _mm256_xor_si256(acc[0], acc[i]);
    return (uint64_t)_mm_cvtsi128_si64(_mm256_castsi256_si128(acc[0]));
}

/* One round: CHAINS x 64 products by vpdpbusd. */
AVX512_FN static uint64_t rate_avx512(int64_t rounds)
{
    __m512i acc[2 * CHAINS], w = _mm512_set1_epi8(3), a = _mm512_set1_epi8((char)rounds);
    for (int i = 0; i < 2 * CHAINS; i++)
        acc[i] = _mm512_set1_epi32(i);
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 16
        for (int i = 0; i < 2 * CHAINS; i++)
            acc[i] = _mm512_dpbusd_epi32(acc[i], w, a);
    }
    for (int i = 1; i < 2 * CHAINS; i++)
        acc[0] = _mm512_xor_si512(acc[0], acc[i]);
    return (uint64_t)_mm_cvtsi128_si64(_mm512_castsi512_si128(acc[0]));
}
#endif

static uint64_t read_plain(const uint8_t *p, size_t bytes)
{
    uint64_t a = 0, v;
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        memcpy(&v, p + i, 8);
        a ^= v;
    }
    return a;
}

/* One round: 64 products. */
static uint64_t rate_plain(int64_t rounds)
{
    int32_t acc[8] = {0};
    volatile int8_t w = 3;
    int8_t a = (int8_t)rounds;
    for (int64_t r = 0; r < rounds; r++)
        for (int j = 0; j < 8; j++)
            for (int i = 0; i < 8; i++)
                acc[i] ^= w * a;
    return (uint64_t)(acc[0] + acc[7]);
}

struct pass {
    struct tl_cpu_pool *pool;
    const uint8_t *data; /* NULL: the rate */
    size_t bytes;
    int64_t rounds;
    enum tl_cpu_level level;
    volatile uint64_t sink[TL_CPU_THREADS_MAX];
};

static void run_pass(void *ctx, int tid)
{
    struct pass *p = ctx;
    int64_t lo, hi;
    uint64_t x;
    if (p->data) {
        tl_cpu_share((int64_t)(p->bytes / 4096), tid, tl_cpu_pool_size(p->pool), &lo, &hi);
#if defined(__x86_64__)
        x = p->level >= TL_CPU_AVX2 ? read_avx2(p->data + lo * 4096, (size_t)(hi - lo) * 4096)
                                    : read_plain(p->data + lo * 4096, (size_t)(hi - lo) * 4096);
    } else {
        x = p->level == TL_CPU_AVX512 ? rate_avx512(p->rounds)
            : p->level == TL_CPU_AVX2 ? rate_avx2(p->rounds)
                                      : rate_plain(p->rounds);
#else
        x = read_plain(p->data + lo * 4096, (size_t)(hi - lo) * 4096);
    } else {
        x = rate_plain(p->rounds);
#endif
    }
    p->sink[tid] = x;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Seconds of the fastest pass. */
static double best_pass(struct pass *p, double seconds)
{
    double best = 1e30, start = now(), t0, t1;
    do {
        t0 = now();
        tl_cpu_pool_run(p->pool, run_pass, p);
        t1 = now();
        best = t1 - t0 < best ? t1 - t0 : best;
    } while (t1 - start < seconds);
    return best;
}

enum tl_status tl_cpu_read_bandwidth(int n_threads, size_t bytes, double seconds, double *bytes_per_s,
                                     struct tl_error *err)
{
    struct pass p = {.bytes = bytes, .level = tl_cpu_level()};
    uint8_t *data = NULL;
    enum tl_status st = tl_cpu_pool_open(&p.pool, n_threads, err);
    *bytes_per_s = 0;
    if (st != TL_OK)
        return st;
    data = tl_cpu_pages(bytes + 8192); /* the prefetches run past the end */
    if (data) {
        memset(data, 1, bytes + 8192);
        p.data = data;
        *bytes_per_s = (double)(bytes / 4096 * 4096) / best_pass(&p, seconds);
    } else {
        st = tl_fail_host_memory(err, bytes);
    }
    tl_free(data);
    tl_cpu_pool_close(p.pool);
    return st;
}

enum tl_status tl_cpu_int8_rate(int n_threads, double seconds, double *ops_per_s, struct tl_error *err)
{
    struct pass p = {.rounds = 1 << 18, .level = tl_cpu_level()};
    enum tl_status st = tl_cpu_pool_open(&p.pool, n_threads, err);
    double products = p.level == TL_CPU_AVX512 ? 16 * 64 : p.level == TL_CPU_AVX2 ? 8 * 32 : 64;
    *ops_per_s = 0;
    if (st != TL_OK)
        return st;
    *ops_per_s = 2 * products * (double)p.rounds * tl_cpu_pool_size(p.pool) / best_pass(&p, seconds);
    tl_cpu_pool_close(p.pool);
    return TL_OK;
}
