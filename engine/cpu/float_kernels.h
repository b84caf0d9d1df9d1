/* engine/cpu/float_kernels.h - every floating-point kernel, written once over sixteen lanes and compiled once per level: the
 * file is included by kernels_<level>.c after that level's v16_*.h. That the same sequence of operations runs at all levels is
 * so a matter of construction. The order of sums is the law of cpu.h. */
#include "cpu.h"

#define KERNEL static TL_TARGET

/* ---- ragged ends: n < 16 values, filled up with +0 ---- */

V16_OP struct v16 load_part(const float *p, int64_t n)
{
    float t[16] = {0};
    memcpy(t, p, (size_t)n * sizeof(float));
    return v_load(t);
}

V16_OP void store_part(float *p, struct v16 a, int64_t n)
{
    float t[16];
    v_store(t, a);
    memcpy(p, t, (size_t)n * sizeof(float));
}

/* `body` over v16 `x` = in[k..], storing v16 `y` to out[k..]; whole blocks, then the ragged one. */
#define MAP(out, in, n, body)                                                                                          \
    do {                                                                                                               \
        int64_t k = 0;                                                                                                 \
        for (; k + 16 <= (n); k += 16) {                                                                               \
            struct v16 x = v_load((in) + k), y;                                                                        \
            body;                                                                                                      \
            v_store((out) + k, y);                                                                                     \
        }                                                                                                              \
        if (k < (n)) {                                                                                                 \
            struct v16 x = load_part((in) + k, (n)-k), y;                                                              \
            body;                                                                                                      \
            store_part((out) + k, y, (n)-k);                                                                           \
        }                                                                                                              \
    } while (0)

/* The second operand inside a MAP. */
#define ALSO(p, n) (k + 16 <= (n) ? v_load((p) + k) : load_part((p) + k, (n)-k))

/* ---- exp ---- */

/* e^x = 2^n e^r, n = round(x / ln 2), |r| <= ln 2 / 2, e^r by its Taylor polynomial of degree 7 (cut-off below 0.05 ulp).
 * 0 below -104, infinity above 88.73, NaN for NaN. */
V16_OP struct v16 v_exp(struct v16 x)
{
    struct v16 t, n, r, p;
    x = v_max(v_set1(-104.0f), x);
    x = v_min(v_set1(89.0f), x);
    t = v_fma(x, v_set1(1.44269504f), v_set1(12582912.0f));
    n = v_sub(t, v_set1(12582912.0f));
    r = v_fma(n, v_set1(-0x1.62e400p-1f), x);
    r = v_fma(n, v_set1(-0x1.7f7d1cp-20f), r);
    p = v_fma(r, v_set1(1.0f / 5040), v_set1(1.0f / 720));
    p = v_fma(p, r, v_set1(1.0f / 120));
    p = v_fma(p, r, v_set1(1.0f / 24));
    p = v_fma(p, r, v_set1(1.0f / 6));
    p = v_fma(p, r, v_set1(0.5f));
    p = v_fma(p, r, v_set1(1.0f));
    p = v_fma(p, r, v_set1(1.0f));
    return v_scale2(p, t);
}

KERNEL void k_exp(float *out, const float *in, int64_t n) { MAP(out, in, n, y = v_exp(x)); }

/* ---- rows ---- */

KERNEL float k_dot(const float *a, const float *b, int64_t n)
{
    float sum = 0;
    for (int64_t s = 0; s < n; s += TL_CPU_SLICE) {
        int64_t end = n - s < TL_CPU_SLICE ? n : s + TL_CPU_SLICE, k = s;
        struct v16 acc = v_set1(0);
        float part;
        for (; k + 16 <= end; k += 16)
            acc = v_fma(v_load(a + k), v_load(b + k), acc);
        if (k < end)
            acc = v_fma(load_part(a + k, end - k), load_part(b + k, end - k), acc);
        part = v_fold(acc);
        sum = s == 0 ? part : sum + part;
    }
    return sum;
}

/* In double: a looped model feeds a norm's rounding errors back into itself. A square of an F32 is exact in double, so plain
 * code gives the same bits at all levels, whether or not the compiler fuses or vectorises it. */
KERNEL void k_rmsnorm(float *out, const float *in, const float *w, int64_t n, float eps)
{
    double lane[16] = {0}, inv;
    int64_t k = 0;
    for (; k + 16 <= n; k += 16)
        for (int j = 0; j < 16; j++)
            lane[j] += (double)in[k + j] * (double)in[k + j];
    for (int j = 0; k + j < n; j++)
        lane[j] += (double)in[k + j] * (double)in[k + j];
    for (int half = 8; half > 0; half /= 2)
        for (int j = 0; j < half; j++)
            lane[j] += lane[j + half];
    inv = 1.0 / sqrt(lane[0] / (double)n + (double)eps);
    if (w)
        for (k = 0; k < n; k++)
            out[k] = (float)((double)in[k] * inv * (double)w[k]);
    else
        for (k = 0; k < n; k++)
            out[k] = (float)((double)in[k] * inv);
}

/* Group sums: q of a group as 8 slices of 4; int16 arithmetic cannot leave 16 bits (8 * 16 * 127). */
static void group_sums(const int8_t *q, int64_t k_pad, int32_t *group, int32_t *sum)
{
    int32_t total = 0;
    for (int64_t g = 0; g < k_pad / 32; g++) {
        int lo = 0, hi = 0;
        for (int i = 0; i < 32; i += 4) {
            lo += q[g * 32 + i] + q[g * 32 + i + 1];
            hi += q[g * 32 + i + 2] + q[g * 32 + i + 3];
        }
        total += lo + hi;
        group[g] = (int32_t)((uint32_t)(uint16_t)(-8 * lo) | (uint32_t)(uint16_t)(-8 * hi) << 16);
    }
    *sum = total;
}

KERNEL void k_quantise(const float *in, int64_t n, int64_t k_pad, int8_t *q, int32_t *group, int32_t *sum, float *scale)
{
    struct v16i m = v_izero();
    int32_t lanes[16], bits = 0;
    int64_t k = 0;
    float s;
    for (; k + 16 <= n; k += 16)
        m = v_absmax(m, v_load(in + k));
    if (k < n)
        m = v_absmax(m, load_part(in + k, n - k));
    v_istore(lanes, m);
    for (int i = 0; i < 16; i++)
        bits = lanes[i] > bits ? lanes[i] : bits;
    memcpy(&s, &bits, 4);
    s = (s < 1e-8f ? 1e-8f : s) / 127.0f;
    *scale = s;
    memset(q + n / 16 * 16, 0, (size_t)(k_pad - n / 16 * 16));
    if (!(s <= 3.4e38f)) { /* NaN or infinity */
        memset(q, 0, (size_t)k_pad);
    } else {
        struct v16 vs = v_set1(s);
        for (k = 0; k + 16 <= n; k += 16)
            v_store_q8(q + k, v_div(v_load(in + k), vs));
        if (k < n)
            v_store_q8(q + k, v_div(load_part(in + k, n - k), vs)); /* k_pad is a multiple of 64 */
    }
    group_sums(q, k_pad, group, sum);
}

KERNEL void k_round_bf16(float *out, const float *in, int64_t n) { MAP(out, in, n, y = v_bf16(x)); }

KERNEL void k_silu_mul(float *out, const float *g, const float *u, int64_t n)
{
    struct v16 one = v_set1(1.0f), zero = v_set1(0.0f);
    MAP(out, g, n, y = v_mul(v_div(x, v_add(one, v_exp(v_sub(zero, x)))), ALSO(u, n)));
}

KERNEL void k_relu2(float *out, const float *in, int64_t n)
{
    struct v16 half = v_set1(0.5f), zero = v_set1(0.0f);
    MAP(out, in, n, x = v_max(zero, x); y = v_mul(half, v_mul(x, x)));
}

KERNEL void k_add(float *out, const float *in, int64_t n) { MAP(out, in, n, y = v_add(ALSO(out, n), x)); }

KERNEL void k_merge(float *out, float fy, const float *in, float fx, int64_t n)
{
    struct v16 vx = v_set1(fx), vy = v_set1(fy);
    MAP(out, in, n, y = v_fma(x, vx, v_mul(ALSO(out, n), vy)));
}

KERNEL void k_widen(float *out, const uint16_t *h, int64_t n)
{
    int64_t k = 0;
    for (; k + 16 <= n; k += 16)
        v_store(out + k, v_load_f16(h + k));
    if (k < n) {
        uint16_t t[16] = {0};
        memcpy(t, h + k, (size_t)(n - k) * sizeof(*t));
        store_part(out + k, v_load_f16(t), n - k);
    }
}

KERNEL void k_narrow(uint16_t *h, const float *in, int64_t n)
{
    int64_t k = 0;
    for (; k + 16 <= n; k += 16)
        v_store_f16(h + k, v_load(in + k));
    if (k < n) {
        uint16_t t[16];
        v_store_f16(t, load_part(in + k, n - k));
        memcpy(h + k, t, (size_t)(n - k) * sizeof(*t));
    }
}

/* ---- attention ---- */

KERNEL void k_softmax(float *s, int lo, int hi, float scale, float *m, float *l)
{
    int first = lo / 16 * 16;
    struct v16 vm = v_set1(-INFINITY), vscale = v_set1(scale), sum = v_set1(0);
    float lanes[16], max;
    for (int k = first; k < hi; k += 16) {
        struct v16 x = v_mul(v_load(s + k), vscale);
        if (k < lo || k + 16 > hi)
            x = v_outside(x, lo - k, hi - k, -INFINITY);
        v_store(s + k, x);
        vm = v_max(x, vm);
    }
    v_store(lanes, vm);
    max = lanes[0];
    for (int i = 1; i < 16; i++)
        max = lanes[i] > max ? lanes[i] : max;
    vm = v_set1(max);
    for (int k = first; k < hi; k += 16) {
        struct v16 p = v_exp(v_sub(v_load(s + k), vm));
        if (k < lo || k + 16 > hi)
            p = v_outside(p, lo - k, hi - k, 0.0f);
        v_store(s + k, p);
        sum = v_add(sum, p);
    }
    *m = max;
    *l = v_fold(sum);
}

KERNEL void k_panel_f16(float *dst, const uint16_t *src, int64_t ld, int64_t n_t, int n_c)
{
    for (int64_t t = 0; t < n_t; t++) {
        uint16_t part[16] = {0};
        if (n_c < 16)
            memcpy(part, src + t * ld, (size_t)n_c * sizeof(*part));
        v_store(dst + t * 16, v_load_f16(n_c < 16 ? part : src + t * ld));
    }
}

KERNEL void k_panel_f32(float *dst, const float *src, int64_t ld, int64_t n_t, int n_c)
{
    for (int64_t t = 0; t < n_t; t++)
        v_store(dst + t * 16, n_c < 16 ? load_part(src + t * ld, n_c) : v_load(src + t * ld));
}

/* rows x blocks of 16 columns: one register tile. */
V16_OP void mm_tile(const int rows, const int blocks, const float *a, int64_t lda, const void *b, const bool f16,
                    int64_t ldb, int64_t n_t, float *c, int64_t ldc, bool first)
{
    struct v16 acc[MM_ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < rows * blocks; i++)
        acc[i] = first ? v_set1(0) : v_load(c + i / blocks * ldc + i % blocks * 16);
    for (int64_t t = 0; t < n_t; t++) {
#pragma GCC unroll 16
        for (int i = 0; i < rows * blocks; i++) {
            int64_t at = t * ldb + i % blocks * 16;
            struct v16 bt = f16 ? v_load_f16((const uint16_t *)b + at) : v_load((const float *)b + at);
            acc[i] = v_fma(v_set1(a[i / blocks * lda + t]), bt, acc[i]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows * blocks; i++)
        v_store(c + i / blocks * ldc + i % blocks * 16, acc[i]);
}

/* Few rows take several blocks side by side: one chain of fma alone would wait for itself. */
V16_OP void mm_blocks(const int rows, const float *a, int64_t lda, const void *b, const bool f16, int64_t ldb,
                      int64_t n_t, float *c, int64_t ldc, bool first, int blocks)
{
    const int wide = rows == 1 ? 4 : rows == 2 ? 2 : 1;
    size_t step = (size_t)wide * 16 * (f16 ? sizeof(uint16_t) : sizeof(float));
    for (; wide > 1 && blocks >= wide; blocks -= wide, c += wide * 16, b = (const uint8_t *)b + step)
        mm_tile(rows, wide, a, lda, b, f16, ldb, n_t, c, ldc, first);
    for (; blocks > 0; blocks--, c += 16, b = (const uint8_t *)b + step / (size_t)wide)
        mm_tile(rows, 1, a, lda, b, f16, ldb, n_t, c, ldc, first);
}

#define MM_CASE(n, f16)                                                                                                \
    case n:                                                                                                            \
        mm_blocks(n, a, lda, b, f16, ldb, n_t, c, ldc, first, blocks);                                                 \
        break;
#if MM_ROWS == 8
#define MM_CASES(f16)                                                                                                  \
    MM_CASE(1, f16)                                                                                                    \
    MM_CASE(2, f16)                                                                                                    \
    MM_CASE(3, f16)                                                                                                    \
    MM_CASE(4, f16)                                                                                                    \
    MM_CASE(5, f16)                                                                                                    \
    MM_CASE(6, f16)                                                                                                    \
    MM_CASE(7, f16)                                                                                                    \
    MM_CASE(8, f16)
#else
#define MM_CASES(f16)                                                                                                  \
    MM_CASE(1, f16)                                                                                                    \
    MM_CASE(2, f16)                                                                                                    \
    MM_CASE(3, f16)                                                                                                    \
    MM_CASE(4, f16)                                                                                                    \
    MM_CASE(5, f16)                                                                                                    \
    MM_CASE(6, f16)
#endif

KERNEL void k_mm(int rows, const float *a, int64_t lda, const float *b, int64_t ldb, int64_t n_t, float *c, int64_t ldc,
                 bool first, int blocks)
{
    switch (rows) {
        MM_CASES(false)
    }
}

KERNEL void k_mm_f16(int rows, const float *a, int64_t lda, const uint16_t *b, int64_t ldb, int64_t n_t, float *c,
                     int64_t ldc, bool first, int blocks)
{
    switch (rows) {
        MM_CASES(true)
    }
}

/* ---- F32 and BF16 linear layers ---- */

#define DOT_TILE_MAX 16

/* One slice of `rows` x `outs` dots into y. w: F32, or BF16 read in place. n_k is a multiple of 16. */
V16_OP void dot_tile(const int rows, const int outs, const float *x, int64_t ldx, const void *w, const bool bf16,
                     int64_t ldw, int n_k, float *y, int64_t ldy, bool first)
{
    struct v16 acc[DOT_TILE_MAX]; /* rows * outs of them */
#pragma GCC unroll 16
    for (int i = 0; i < rows * outs; i++)
        acc[i] = v_set1(0);
    for (int k = 0; k < n_k; k += 16) {
#pragma GCC unroll 16
        for (int o = 0; o < outs; o++) {
            int64_t at = o * ldw + k;
            struct v16 wv = bf16 ? v_load_bf16((const uint16_t *)w + at) : v_load((const float *)w + at);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++)
                acc[r * outs + o] = v_fma(v_load(x + r * ldx + k), wv, acc[r * outs + o]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows * outs; i++) {
        float part = v_fold(acc[i]), *dst = y + i / outs * ldy + i % outs;
        *dst = first ? part : *dst + part;
    }
}

/* A tile of outputs for one row: a few rows of the matrix are streamed side by side. */
V16_OP void dot_single(const struct tl_mat *m, const bool bf16, int64_t o, int outs, const float *x, float *y)
{
    int64_t k_pad = m->k_pad;
    int n;
    for (int i = 0; i < outs; i += n) {
        const uint8_t *w = m->data + (size_t)((o + i) * k_pad) * (bf16 ? 2 : 4);
        n = outs - i >= DOT_OUTS_1 ? DOT_OUTS_1 : 1;
        for (int64_t s = 0; s < k_pad; s += TL_CPU_SLICE, w += TL_CPU_SLICE * (bf16 ? 2 : 4)) {
            int n_k = (int)(k_pad - s < TL_CPU_SLICE ? k_pad - s : TL_CPU_SLICE);
            if (n == 1)
                dot_tile(1, 1, x + s, 0, w, bf16, k_pad, n_k, y + i, 0, s == 0);
            else
                dot_tile(1, DOT_OUTS_1, x + s, 0, w, bf16, k_pad, n_k, y + i, 0, s == 0);
        }
    }
}

/* One slice of up to 16 outputs for `rows` rows. */
V16_OP void dot_rows(const int rows, int outs, const float *x, int64_t ldx, const float *w, int64_t ldw, int n_k,
                     float *y, int64_t ldy, bool first)
{
    int o = 0;
    for (; o + DOT_OUTS <= outs; o += DOT_OUTS)
        dot_tile(rows, DOT_OUTS, x, ldx, w + o * ldw, false, ldw, n_k, y + o, ldy, first);
    for (; o < outs; o++)
        dot_tile(rows, 1, x, ldx, w + o * ldw, false, ldw, n_k, y + o, ldy, first);
}

KERNEL void k_linear_f(const struct tl_mat *m, const struct tl_cpu_acts *a, int n, int64_t t0, int64_t t1, float *y,
                       int64_t ldy, struct tl_cpu_linear_scratch *tmp)
{
    for (int64_t t = t0; t < t1; t++) {
        int64_t o = t * TL_CPU_TILE;
        int outs = (int)(m->n_out - o < TL_CPU_TILE ? m->n_out - o : TL_CPU_TILE);
        if (n == 1) {
            if (m->wtype == TL_W_BF16)
                dot_single(m, true, o, outs, a->f, y + o);
            else
                dot_single(m, false, o, outs, a->f, y + o);
            continue;
        }
        for (int64_t s = 0; s < m->k_pad; s += TL_CPU_SLICE) {
            int n_k = (int)(m->k_pad - s < TL_CPU_SLICE ? m->k_pad - s : TL_CPU_SLICE), i = 0;
            const float *w = (const float *)m->data + o * m->k_pad + s, *x = a->f + s;
            int64_t ldw = m->k_pad;
            if (m->wtype == TL_W_BF16) { /* 16 outputs x 256 inputs of F32: 16 KB */
                float *panel = (float *)tmp->panel;
                for (int j = 0; j < outs; j++)
                    for (int k = 0; k < n_k; k += 16)
                        v_store(panel + j * TL_CPU_SLICE + k,
                                v_load_bf16((const uint16_t *)m->data + (o + j) * m->k_pad + s + k));
                w = panel;
                ldw = TL_CPU_SLICE;
            }
            for (; i + DOT_ROWS <= n; i += DOT_ROWS)
                dot_rows(DOT_ROWS, outs, x + i * a->k_max, a->k_max, w, ldw, n_k, y + i * ldy + o, ldy, s == 0);
            for (; i < n; i++)
                dot_rows(1, outs, x + i * a->k_max, a->k_max, w, ldw, n_k, y + i * ldy + o, ldy, s == 0);
        }
    }
}

/* ---- the table ---- */

#define FLOAT_KERNELS                                                                                                  \
    .mm_rows = MM_ROWS, .linear_f = k_linear_f, .dot = k_dot, .rmsnorm = k_rmsnorm, .quantise = k_quantise,            \
    .round_bf16 = k_round_bf16, .silu_mul = k_silu_mul, .relu2 = k_relu2, .add = k_add, .exp = k_exp,                  \
    .widen = k_widen, .narrow = k_narrow, .mm = k_mm, .mm_f16 = k_mm_f16, .softmax = k_softmax,                        \
    .panel_f16 = k_panel_f16, .panel_f32 = k_panel_f32, .merge = k_merge
