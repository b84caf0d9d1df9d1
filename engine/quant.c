/* How INT4 scales are chosen. With S fixed, each group is free: the integer g that just covers the group's largest value and
 * the two below it (which clip that value, but make finer steps for the other 31) are tried, and the one with the least squared
 * error stays. S itself is searched on a small grid around absmax / (7 x 15), the value at which the largest group takes g = 15:
 * smaller ones clip the row's peak, larger ones make the steps between group scales coarser. At last S becomes the least-squares
 * fit of the row to the chosen g q, which can only reduce the error.
 *
 * Sums run over four lanes that are folded in a fixed order, so an artifact comes out the same from every compiler and machine. */
#include "quant.h"

#include <math.h>
#include <string.h>

typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t m4 __attribute__((vector_size(16)));

float tl_bf16_to_f32(uint16_t v)
{
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

uint16_t tl_f32_to_bf16(float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof(bits));
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float tl_f16_to_f32(uint16_t v)
{
    uint32_t sign = (uint32_t)(v & 0x8000) << 16, exponent = v >> 10 & 31, fraction = v & 0x3FF, bits;
    float f;
    if (exponent == 0) { /* zero or subnormal: fraction x 2^-24 */
        f = (float)fraction / 16777216.0f;
        memcpy(&bits, &f, sizeof(bits));
        bits |= sign;
    } else {
        bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    }
    memcpy(&f, &bits, sizeof(f));
    return f;
}

#define INLINE  static inline __attribute__((always_inline))
#define ROUNDER 12582912.0f /* adding and taking it away rounds |x| < 2^22 to whole numbers, ties to even */

INLINE v4 pick(m4 mask, v4 yes, v4 no) { return (v4)(((m4)yes & mask) | ((m4)no & ~mask)); }

INLINE v4 all(float x) { return (v4){x, x, x, x}; }

/* Nearest whole numbers within -limit .. limit. */
INLINE v4 quantise(v4 x, float limit)
{
    x = pick(x > limit, all(limit), pick(x < -limit, all(-limit), x));
    return (x + ROUNDER) - ROUNDER;
}

INLINE float fold(v4 s) { return (s[0] + s[2]) + (s[1] + s[3]); }

INLINE v4 magnitude(v4 x) { return (v4)((m4)x & 0x7FFFFFFF); }

INLINE float absmax(const float *x, int64_t n)
{
    v4 m = {0};
    float most = 0;
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        v4 v = magnitude(*(const v4 *)(x + i));
        m = pick(v > m, v, m);
    }
    for (int j = 0; j < 4; j++)
        most = m[j] > most ? m[j] : most;
    for (; i < n; i++)
        most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    return most;
}

/* Count what four values lost. */
INLINE void add_errors(struct tl_quant_error *e, v4 x, v4 back)
{
    v4 d = magnitude(x - back);
    e->sum_sq += (double)fold(x * x);
    e->sum_sq_error += (double)fold(d * d);
    for (int j = 0; j < 4; j++)
        e->max_error = d[j] > e->max_error ? d[j] : e->max_error;
}

void tl_quant_int8_row(const float *x, int64_t n_in, int8_t *q, float *scale, struct tl_quant_error *e)
{
    float s = absmax(x, n_in) / 127.0f, divisor = s > 0 ? s : 1;
    *scale = s;
    for (int64_t i = 0; i < n_in; i += 4) {
        int n = n_in - i < 4 ? (int)(n_in - i) : 4;
        v4 v = {0};
        memcpy(&v, x + i, (size_t)n * sizeof(*x));
        v4 w = quantise(v / divisor, 127);
        for (int j = 0; j < n; j++)
            q[i + j] = (int8_t)w[j];
        if (e)
            add_errors(e, v, w * s);
    }
}

INLINE v4 weight_of(const float *weight, int64_t i) { return weight ? *(const v4 *)(weight + i) : all(1); }

/* Squared error of 32 inputs quantised to -7..7 in steps of step. */
INLINE float group_error(const float *x, const float *weight, float step)
{
    float inv = 1.0f / step;
    v4 sum = {0};
    for (int i = 0; i < TL_Q4_GROUP; i += 4) {
        v4 v = *(const v4 *)(x + i), d = v - quantise(v * inv, 7) * step;
        sum += d * d * weight_of(weight, i);
    }
    return fold(sum);
}

/* Best group scale for 32 inputs whose largest magnitude is peak. */
INLINE int best_group_scale(const float *x, const float *weight, float peak, float s, float *error)
{
    float need = peak / (7.0f * s);
    int cover = need >= 15 ? 15 : (int)need + ((float)(int)need < need), best = 1;
    float least = INFINITY;
    for (int g = cover < 1 ? 1 : cover, tries = 0; g >= 1 && tries < 3; g--, tries++) {
        float err = group_error(x, weight, s * (float)g);
        if (err < least) {
            least = err;
            best = g;
        }
    }
    *error = least;
    return best;
}

/* Group scales and values of a row under s; returns the least-squares s for them. */
INLINE float pack_row(const float *x, const float *weight, const float *peaks, int64_t n_groups, float s, uint8_t *q4,
                      uint8_t *gscale)
{
    double xy = 0, yy = 0;
    for (int64_t i = 0; i < n_groups; i++) {
        const float *xg = x + i * TL_Q4_GROUP, *wg = weight ? weight + i * TL_Q4_GROUP : NULL;
        float unused;
        int g = s > 0 ? best_group_scale(xg, wg, peaks[i], s, &unused) : 1;
        float inv = s > 0 ? 1.0f / (s * (float)g) : 0;
        v4 sum_xy = {0}, sum_yy = {0};
        gscale[i / 2] |= (uint8_t)(g << (i % 2 * 4));
        for (int j = 0; j < TL_Q4_GROUP; j += 4) {
            v4 v = *(const v4 *)(xg + j), w = quantise(v * inv, 7), y = w * (float)g, wy = y * weight_of(wg, j);
            sum_xy += v * wy;
            sum_yy += y * wy;
            for (int k = 0; k < 4; k += 2)
                q4[(i * TL_Q4_GROUP + j + k) / 2] = (uint8_t)(((int)w[k] & 15) | ((int)w[k + 1] & 15) << 4);
        }
        xy += (double)fold(sum_xy);
        yy += (double)fold(sum_yy);
    }
    return yy > 0 ? (float)(xy / yy) : s;
}

#define GROUPS_MAX 4096 /* 131072 inputs, the most that a spec may have */

/* The scale of a row; 0 where it counts as zero. peaks[n_groups] are the groups' largest values. */
static float search_scale(const float *x, const float *weight, int64_t n_groups, float *peaks)
{
    static const float grid[] = {0.80f, 0.88f, 0.94f, 1.0f, 1.07f, 1.15f, 1.25f, 1.36f};
    float peak = 0, first, s;
    double least = INFINITY;
    for (int64_t i = 0; i < n_groups; i++) {
        peaks[i] = absmax(x + i * TL_Q4_GROUP, TL_Q4_GROUP);
        peak = peaks[i] > peak ? peaks[i] : peak;
    }
    s = first = peak > 1e-30f ? peak / 105.0f : 0; /* less counts as zero: its steps would underflow */
    for (size_t t = 0; t < sizeof(grid) / sizeof(grid[0]) && first > 0; t++) {
        double sum = 0;
        for (int64_t i = 0; i < n_groups && sum < least; i++) {
            float error;
            (void)best_group_scale(x + i * TL_Q4_GROUP, weight ? weight + i * TL_Q4_GROUP : NULL, peaks[i],
                                   first * grid[t], &error);
            sum += (double)error;
        }
        if (sum < least) {
            least = sum;
            s = first * grid[t];
        }
    }
    return s;
}

static void add_row_errors(struct tl_quant_error *e, const float *x, int64_t n_in, const uint8_t *q4,
                           const uint8_t *gscale, float scale)
{
    for (int64_t i = 0; i < n_in / TL_Q4_GROUP; i++) {
        float back[TL_Q4_GROUP];
        uint8_t g = gscale[i / 2] >> (i % 2 * 4) & 15;
        tl_unpack_int4_row(q4 + i * TL_Q4_GROUP / 2, &g, scale, TL_Q4_GROUP, back);
        for (int j = 0; j < TL_Q4_GROUP; j += 4)
            add_errors(e, *(const v4 *)(x + i * TL_Q4_GROUP + j), *(const v4 *)(back + j));
    }
}

void tl_quant_int4_row(const float *x, const float *weight, int64_t n_in, uint8_t *q4, uint8_t *gscale, float *scale,
                       struct tl_quant_error *e)
{
    float peaks[GROUPS_MAX], s;
    int64_t n_groups = n_in / TL_Q4_GROUP;
    memset(gscale, 0, tl_q4_gscale_bytes(n_in));
    s = search_scale(x, weight, n_groups, peaks);
    *scale = pack_row(x, weight, peaks, n_groups, s, q4, gscale);
    if (e)
        add_row_errors(e, x, n_in, q4, gscale, *scale);
}

/* Each group is quantised from what the errors before have left of it. It may outgrow what S was chosen for; then it clips, and
 * those after it take that over, too. */
void tl_quant_int4_row_compensated(const float *x, const struct tl_compensation *c, int64_t n_in, float *left,
                                   uint8_t *q4, uint8_t *gscale, float *scale, struct tl_quant_error *e)
{
    float peaks[GROUPS_MAX], unused, s = search_scale(x, c->importance, n_in / TL_Q4_GROUP, peaks);
    memset(gscale, 0, tl_q4_gscale_bytes(n_in));
    memset(q4, 0, tl_q4_row_bytes(n_in));
    memcpy(left, x, (size_t)n_in * sizeof(*x));
    for (int64_t at = 0; at < n_in; at += TL_Q4_GROUP) {
        int64_t i = at / TL_Q4_GROUP, from = at / c->width * c->width,
                end = from + c->width < n_in ? from + c->width : n_in;
        int g = s > 0 ? best_group_scale(left + at, c->weight + at, absmax(left + at, TL_Q4_GROUP), s, &unused) : 1;
        float step = s * (float)g, inv = s > 0 ? 1.0f / step : 0;
        gscale[i / 2] |= (uint8_t)(g << (i % 2 * 4));
        for (int64_t j = at; j < at + TL_Q4_GROUP; j++) {
            float q = quantise(all(left[j] * inv), 7)[0], lost = left[j] - q * step;
            const float *follow = c->follow + j * c->width - from;
            q4[j / 2] |= (uint8_t)(((int)q & 15) << (j % 2 * 4));
            for (int64_t k = j / 4 * 4; k < end; k += 4) /* nothing of it is for those up to j: theirs is 0 */
                *(v4 *)(left + k) -= lost * *(const v4 *)(follow + k);
        }
    }
    *scale = s;
    if (e)
        add_row_errors(e, x, n_in, q4, gscale, s);
}

void tl_unpack_int8_row(const int8_t *q, float scale, int64_t n_in, float *out)
{
    for (int64_t i = 0; i < n_in; i++)
        out[i] = (float)q[i] * scale;
}

void tl_unpack_int4_row(const uint8_t *q4, const uint8_t *gscale, float scale, int64_t n_in, float *out)
{
    for (int64_t i = 0; i < n_in; i++) {
        int64_t group = i / TL_Q4_GROUP;
        int nibble = q4[i / 2] >> (i % 2 * 4) & 15, g = gscale[group / 2] >> (group % 2 * 4) & 15;
        out[i] = (float)((nibble < 8 ? nibble : nibble - 16) * g) * scale;
    }
}
