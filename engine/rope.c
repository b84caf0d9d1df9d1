#include "rope.h"

#include "dmath.h"

static double scaled(const struct tl_rope_scaling *sc, double inv_freq)
{
    double turns = inv_freq * sc->original_max_positions / 6.28318530717958647693; /* over the original context */
    if (turns > (double)sc->high_freq_factor)
        return inv_freq;
    if (turns < (double)sc->low_freq_factor)
        return inv_freq / (double)sc->factor;
    double smooth =
        (turns - (double)sc->low_freq_factor) / ((double)sc->high_freq_factor - (double)sc->low_freq_factor);
    return (1 - smooth) * inv_freq / (double)sc->factor + smooth * inv_freq;
}

void tl_rope_inv_freq(const struct tl_arch_spec *s, float *out)
{
    double log2_base = tl_dlog2((double)s->rope_base);
    for (int j = 0; j < s->d_head / 2; j++) {
        double f = tl_dexp2(-log2_base * (2.0 * j / s->d_head));
        out[j] = (float)(s->rope_scaling.factor != 0 ? scaled(&s->rope_scaling, f) : f);
    }
}

void tl_rope_fill(const struct tl_arch_spec *s, const float *inv_freq, int pos, int n, float *out)
{
    int half = s->d_head / 2;
    for (int i = 0; i < n; i++, out += s->d_head)
        for (int j = 0; j < half; j++) {
            double sine, cosine;
            float angle = (float)(pos + i) * inv_freq[j];
            tl_dsincos((double)angle, &sine, &cosine);
            out[j] = (float)cosine;
            out[half + j] = (float)sine;
        }
}
