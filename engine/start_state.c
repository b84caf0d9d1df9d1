#include "arch_bind.h"
#include "dmath.h"
#include "rng.h"

#include <math.h>
#include <string.h>

/* A standard normal number by Box and Muller's transform, from 2 x 32 random bits. */
static float normal(uint32_t a, uint32_t b)
{
    double u = (a + 0.5) / 4294967296.0, sine, cosine;
    float radius = sqrtf((float)(-2.0 * 0.69314718055994530942 * tl_dlog2(u)));
    tl_dsincos(6.28318530717958647693 * (b / 4294967296.0), &sine, &cosine);
    return (float)((double)radius * cosine);
}

void tl_start_state(const struct tl_arch_spec *s, uint64_t seed, int pos, float *out)
{
    if (s->state_init != TL_STATE_TRUNCNORM) {
        memset(out, 0, (size_t)s->d_model * sizeof(*out));
        return;
    }
    for (int c = 0; c < s->d_model; c++) {
        float z = 4;
        /* Draw again beyond three deviations (once in 370 times). */
        for (uint64_t attempt = 0; !(z >= -3 && z <= 3); attempt++) {
            uint64_t bits = tl_rng_u64(seed, (uint64_t)pos << 32 | (uint32_t)c, attempt);
            z = normal((uint32_t)bits, (uint32_t)(bits >> 32));
        }
        out[c] = z * s->state_std;
    }
}
