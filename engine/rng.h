/* engine/rng.h - random numbers without a state: Philox 4x32-10, a keyed function of a counter.
 *
 * The same (key, c0, c1) gives the same bits on every machine and in any order of calls, so a number can belong to a
 * position instead of to a moment: what was reused or computed before does not matter.
 * Thread: any. */
#ifndef TL_RNG_H
#define TL_RNG_H

#include <stdint.h>

/* All 128 bits of the block with counter (c0, c1). */
static inline void tl_rng_block(uint64_t key, uint64_t c0, uint64_t c1, uint32_t out[4])
{
    uint32_t x0 = (uint32_t)c0, x1 = (uint32_t)(c0 >> 32), x2 = (uint32_t)c1, x3 = (uint32_t)(c1 >> 32);
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)x0 * 0xD2511F53u, b = (uint64_t)x2 * 0xCD9E8D57u;
        x0 = (uint32_t)(b >> 32) ^ x1 ^ k0;
        x2 = (uint32_t)(a >> 32) ^ x3 ^ k1;
        x1 = (uint32_t)b;
        x3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = x0;
    out[1] = x1;
    out[2] = x2;
    out[3] = x3;
}

/* 64 uniformly distributed bits of counter (c0, c1) under key. */
static inline uint64_t tl_rng_u64(uint64_t key, uint64_t c0, uint64_t c1)
{
    uint32_t w[4];
    tl_rng_block(key, c0, c1, w);
    return (uint64_t)w[1] << 32 | w[0];
}

#endif
