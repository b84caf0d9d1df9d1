/* The CPU backend: every instruction set level gives the bits of the scalar level, the scalar level gives what plain formulas
 * in int64 or double give, and nothing depends on how many rows or threads there are. */
#include "backend.h"
#include "cpu/cpu.h"
#include "cpu/threads.h"
#include "mem.h"

#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- random things ---- */

static uint64_t g_seed;

static uint64_t next(void)
{
    uint64_t z = (g_seed += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static int below(int n) { return (int)(next() % (uint64_t)n); }
static float uniform(void) { return (float)(next() >> 40) * 0x1p-23f - 1.0f; }

static float *floats(int64_t n, float amp)
{
    float *x = tl_array((size_t)n + 1, sizeof(*x));
    for (int64_t i = 0; i < n; i++)
        x[i] = uniform() * amp;
    return x;
}

static float from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

/* Equal bits; any NaN equals any NaN. */
static void assert_same(const float *a, const float *b, int64_t n, const char *what)
{
    for (int64_t i = 0; i < n; i++)
        if (bits_of(a[i]) != bits_of(b[i]) && !(isnan(a[i]) && isnan(b[i])))
            ck_abort_msg("%s differs at %lld of %lld: %a and %a", what, (long long)i, (long long)n, a[i], b[i]);
}

static const float specials[] = {
    0.0f,    -0.0f,    1e-45f,   -1e-45f,  1.17549435e-38f, 1e-8f,   -104.5f,  -103.0f,  88.7f,    88.73f,   89.5f,
    3.4e38f, -3.4e38f, 65504.0f, 65520.0f, 65519.99f,       6.1e-5f, 5.96e-8f, 2.98e-8f, 2.99e-8f, INFINITY, -INFINITY,
    NAN,     0.5f,     1.5f,     2.5f,     -0.5f,           -1.5f,   1.0f};
#define N_SPECIALS ((int)(sizeof(specials) / sizeof(specials[0])))

static const struct tl_cpu_kernels *level_or_skip(int level) { return tl_cpu_kernels_of((enum tl_cpu_level)level); }

#define EACH_VECTOR_LEVEL(k)                                                                                           \
    for (int level_ = TL_CPU_AVX2; level_ < TL_CPU_LEVELS; level_++)                                                   \
        for (const struct tl_cpu_kernels *k = level_or_skip(level_); k; k = NULL)

static const struct tl_cpu_kernels *const scalar = &tl_cpu_kernels_scalar;

/* ---- matrices ---- */

struct source {
    struct tl_mat_src src;
    int8_t *q;       /* [n_out][n_in]: the integers */
    uint8_t *gscale; /* [n_out][groups], 1 for INT8 */
    float *scale;    /* [n_out] */
    float *w;        /* [n_out][n_in]: the values */
    void *data, *packed_gscale;
};

static void source_free(struct source *s)
{
    tl_free(s->q);
    tl_free(s->gscale);
    tl_free(s->scale);
    tl_free(s->w);
    tl_free(s->data);
    tl_free(s->packed_gscale);
}

/* Random weights of about 1 / sqrt(n_in); with `extreme` the largest values there are. */
static struct source source_make(enum tl_wtype t, int64_t n_out, int64_t n_in, bool extreme)
{
    int64_t n = n_out * n_in, groups = (n_in + 31) / 32, gbytes = (groups + 1) / 2;
    struct source s = {.src = {.wtype = t, .n_in = n_in, .n_parts = 1}};
    float amp = 1.0f / sqrtf((float)n_in);
    s.w = tl_array((size_t)n, sizeof(float));
    s.data = tl_calloc((size_t)n, 4);
    if (t == TL_W_INT8 || t == TL_W_INT4) {
        int top = t == TL_W_INT8 ? 127 : 7;
        s.q = tl_calloc((size_t)n, 1);
        s.gscale = tl_calloc((size_t)(n_out * groups), 1);
        s.packed_gscale = tl_calloc((size_t)(n_out * gbytes), 1);
        s.scale = floats(n_out, amp / (float)(top * (t == TL_W_INT4 ? 8 : 1)));
        for (int64_t o = 0; o < n_out; o++)
            for (int64_t g = 0; g < groups; g++) {
                int v = t == TL_W_INT8 ? 1 : extreme ? 15 : 1 + below(15);
                s.gscale[o * groups + g] = (uint8_t)v;
                ((uint8_t *)s.packed_gscale)[o * gbytes + g / 2] |= (uint8_t)(g & 1 ? v << 4 : v);
            }
        for (int64_t i = 0; i < n; i++) {
            int v = extreme ? (i % 3 ? top : -top) : below(2 * top + 1) - top;
            s.q[i] = (int8_t)v;
            if (t == TL_W_INT8)
                ((int8_t *)s.data)[i] = (int8_t)v;
            else
                ((uint8_t *)s.data)[i / 2] |= (uint8_t)((v & 15) << (i & 1 ? 4 : 0));
            s.w[i] = s.scale[i / n_in] * (float)(v * s.gscale[i / n_in * groups + i % n_in / 32]);
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            uint32_t b = bits_of(uniform() * amp);
            if (t == TL_W_BF16) {
                ((uint16_t *)s.data)[i] = (uint16_t)(b >> 16);
                b &= 0xffff0000u;
            } else {
                ((float *)s.data)[i] = from_bits(b);
            }
            s.w[i] = from_bits(b);
        }
    }
    s.src.part[0] = (struct tl_mat_part){s.data, s.scale, s.packed_gscale, n_out};
    return s;
}

static struct tl_mat *mat_of(const struct source *s)
{
    struct tl_mat *m = NULL;
    struct tl_error err;
    ck_assert_msg(tl_cpu_mat_create(NULL, &s->src, &m, &err) == TL_OK, "%s", err.msg);
    return m;
}

static struct tl_cpu_acts acts_make(const struct tl_cpu_kernels *k, const struct tl_mat *m, const float *x, int n)
{
    struct tl_cpu_acts a = {.k_max = (m->k_pad + 63) / 64 * 64 + 64 * below(2)};
    a.q = tl_aligned((size_t)(n * a.k_max));
    a.group = tl_array((size_t)(n * a.k_max / 32), 4);
    a.sum = tl_array((size_t)n, 4);
    a.scale = tl_array((size_t)n, 4);
    a.f = tl_calloc((size_t)(n * a.k_max), 4);
    for (int i = 0; i < n; i++) {
        if (m->wtype == TL_W_INT8 || m->wtype == TL_W_INT4)
            k->quantise(x + i * m->n_in, m->n_in, m->k_pad, a.q + i * a.k_max, a.group + i * (a.k_max / 32), a.sum + i,
                        a.scale + i);
        else if (m->wtype == TL_W_BF16)
            k->round_bf16(a.f + i * a.k_max, x + i * m->n_in, m->n_in);
        else
            memcpy(a.f + i * a.k_max, x + i * m->n_in, (size_t)m->n_in * 4);
    }
    return a;
}

static void acts_free(struct tl_cpu_acts *a)
{
    tl_free(a->q);
    tl_free(a->group);
    tl_free(a->sum);
    tl_free(a->scale);
    tl_free(a->f);
}

static struct tl_cpu_linear_scratch *g_tmp;

static void linear(const struct tl_cpu_kernels *k, const struct tl_mat *m, const struct tl_cpu_acts *a, int n,
                   int64_t t0, int64_t t1, float *y)
{
    if (!g_tmp)
        g_tmp = tl_aligned(sizeof(*g_tmp));
    (m->wtype == TL_W_INT4   ? k->linear_q4
     : m->wtype == TL_W_INT8 ? k->linear_q8
                             : k->linear_f)(m, a, n, t0, t1, y, m->n_out, g_tmp);
}

/* y from the integers themselves, in int64. */
static float exact_int(const struct source *s, int64_t o, const float *x, int64_t n_in)
{
    int64_t acc = 0, groups = (n_in + 31) / 32;
    float m = 0, sc;
    for (int64_t k = 0; k < n_in; k++)
        m = fabsf(x[k]) > m ? fabsf(x[k]) : m;
    sc = (m < 1e-8f ? 1e-8f : m) / 127.0f;
    for (int64_t k = 0; k < n_in; k++) {
        double q = nearbyint((double)(x[k] / sc));
        q = q > 127 ? 127 : q < -127 ? -127 : q;
        acc += (int64_t)q * s->q[o * n_in + k] * s->gscale[o * groups + k / 32];
    }
    ck_assert(acc <= INT32_MAX && acc >= INT32_MIN);
    return (float)acc * (sc * s->scale[o]);
}

static const int shapes[][2] = {{1, 1},    {1, 2},    {3, 8},    {16, 32},   {17, 34},   {33, 40},
                                {40, 48},  {97, 32},  {64, 64},  {31, 66},   {48, 128},  {20, 250},
                                {18, 256}, {35, 258}, {50, 320}, {16, 1024}, {37, 1100}, {96, 2048}};
#define N_SHAPES ((int)(sizeof(shapes) / sizeof(shapes[0])))

START_TEST(every_level_gives_the_bits_of_the_scalar_level_in_linear_layers)
{
    static const int row_counts[] = {1, 2, 3, 4, 5, 7, 8, 11, 13, 24, 33};
    g_seed = (uint64_t)_i;
    for (int t = 0; t < TL_W_COUNT; t++)
        for (int sh = 0; sh < N_SHAPES; sh++) {
            int n_out = shapes[sh][0], n_in = shapes[sh][1], n = row_counts[below(11)];
            struct source s;
            struct tl_mat *m;
            struct tl_cpu_acts a;
            float *x, *want, *got;
            int64_t t0, t1;
            if (t == TL_W_INT4 && n_in % 2)
                continue;
            s = source_make((enum tl_wtype)t, n_out, n_in, below(4) == 0);
            m = mat_of(&s);
            x = floats((int64_t)n * n_in, 3.0f);
            if (below(4) == 0)
                x[below(n * n_in)] = specials[below(N_SPECIALS)];
            want = floats((int64_t)n * n_out, 1);
            got = tl_array((size_t)(n * n_out), 4);
            memcpy(got, want, (size_t)(n * n_out) * 4);
            t0 = below((int)m->n_tiles);
            t1 = t0 + 1 + below((int)(m->n_tiles - t0));
            a = acts_make(scalar, m, x, n);
            linear(scalar, m, &a, n, t0, t1, want);
            EACH_VECTOR_LEVEL(k)
            {
                struct tl_cpu_acts b = acts_make(k, m, x, n);
                linear(k, m, &b, n, t0, t1, got);
                assert_same(want, got, (int64_t)n * n_out, k->name);
                acts_free(&b);
            }
            acts_free(&a);
            tl_free(x);
            tl_free(want);
            tl_free(got);
            tl_cpu_mat_free(NULL, m);
            source_free(&s);
        }
}
END_TEST

START_TEST(a_row_gets_the_same_bits_alone_and_among_others)
{
    g_seed = 77 + (uint64_t)_i;
    for (int level = 0; level < TL_CPU_LEVELS; level++) {
        const struct tl_cpu_kernels *k = level_or_skip(level);
        for (int t = 0; k && t < TL_W_COUNT; t++) {
            int n_out = 1 + below(70), n_in = 2 * (1 + below(700)), n = 2 + below(300);
            struct source s = source_make((enum tl_wtype)t, n_out, n_in, false);
            struct tl_mat *m = mat_of(&s);
            float *x = floats((int64_t)n * n_in, 2.0f), *all = tl_array((size_t)(n * n_out), 4),
                  *one = tl_array((size_t)n_out, 4);
            struct tl_cpu_acts a = acts_make(k, m, x, n);
            linear(k, m, &a, n, 0, m->n_tiles, all);
            for (int i = 0; i < n; i += 1 + below(9)) {
                struct tl_cpu_acts b = acts_make(k, m, x + (int64_t)i * n_in, 1);
                linear(k, m, &b, 1, 0, m->n_tiles, one);
                assert_same(one, all + (int64_t)i * n_out, n_out, k->name);
                acts_free(&b);
            }
            acts_free(&a);
            tl_free(x);
            tl_free(all);
            tl_free(one);
            tl_cpu_mat_free(NULL, m);
            source_free(&s);
        }
    }
}
END_TEST

START_TEST(integer_layers_equal_the_sum_in_64_bits)
{
    g_seed = 5 + (uint64_t)_i;
    for (int t = TL_W_INT8; t <= TL_W_INT4; t++)
        for (int sh = 0; sh < N_SHAPES; sh++) {
            int n_out = shapes[sh][0], n_in = shapes[sh][1];
            struct source s;
            struct tl_mat *m;
            float *x, *y;
            struct tl_cpu_acts a;
            if (t == TL_W_INT4 && n_in % 2)
                continue;
            s = source_make((enum tl_wtype)t, n_out, n_in, _i == 0);
            m = mat_of(&s);
            x = floats(n_in, 5.0f);
            y = tl_array((size_t)n_out, 4);
            a = acts_make(scalar, m, x, 1);
            linear(scalar, m, &a, 1, 0, m->n_tiles, y);
            for (int o = 0; o < n_out; o++) {
                float want = exact_int(&s, o, x, n_in);
                ck_assert_msg(bits_of(want) == bits_of(y[o]), "output %d of [%d, %d]: %a, not %a", o, n_out, n_in, y[o],
                              want);
            }
            acts_free(&a);
            tl_free(x);
            tl_free(y);
            tl_cpu_mat_free(NULL, m);
            source_free(&s);
        }
}
END_TEST

/* 17,920 inputs, all products of one sign and the largest there are: 127 * 127 * 17920 = 289 M, 105 * 127 * 17920 = 239 M. */
START_TEST(the_widest_layer_of_a_model_cannot_overflow)
{
    enum { K = 17920 };
    for (int t = TL_W_INT8; t <= TL_W_INT4; t++)
        for (int level = 0; level < TL_CPU_LEVELS; level++) {
            const struct tl_cpu_kernels *k = level_or_skip(level);
            struct source s = source_make((enum tl_wtype)t, 16, K, true);
            struct tl_mat *m = mat_of(&s);
            float *x = tl_array(2 * K, 4), y[32];
            struct tl_cpu_acts a;
            for (int i = 0; i < 2 * K; i++)
                x[i] = s.q[i % K] > 0 ? 1.0f : -1.0f;
            for (int n = 1; k && n <= 2; n++) {
                a = acts_make(k, m, x, n);
                linear(k, m, &a, n, 0, 1, y);
                for (int o = 0; o < n * 16; o++)
                    ck_assert_uint_eq(bits_of(y[o]), bits_of(exact_int(&s, o % 16, x, K)));
                acts_free(&a);
            }
            tl_free(x);
            tl_cpu_mat_free(NULL, m);
            source_free(&s);
        }
}
END_TEST

/* An F32 dot of K terms in 16 lanes errs by at most (K / 16 + 8) * 2^-24 of the sum of magnitudes. */
START_TEST(float_layers_are_near_the_sum_in_double)
{
    g_seed = 9;
    for (int t = TL_W_F32; t <= TL_W_BF16; t++)
        for (int sh = 0; sh < N_SHAPES; sh++) {
            int n_out = shapes[sh][0], n_in = shapes[sh][1];
            struct source s = source_make((enum tl_wtype)t, n_out, n_in, false);
            struct tl_mat *m = mat_of(&s);
            float *x = floats(n_in, 2.0f), *y = tl_array((size_t)n_out, 4);
            struct tl_cpu_acts a = acts_make(scalar, m, x, 1);
            linear(scalar, m, &a, 1, 0, m->n_tiles, y);
            for (int o = 0; o < n_out; o++) {
                double want = 0, mag = 0;
                for (int k = 0; k < n_in; k++) {
                    want += (double)a.f[k] * (double)s.w[o * n_in + k];
                    mag += fabs((double)a.f[k] * (double)s.w[o * n_in + k]);
                }
                ck_assert_double_le(fabs(want - (double)y[o]), mag * (n_in / 16.0 + 8) * 0x1p-24);
            }
            acts_free(&a);
            tl_free(x);
            tl_free(y);
            tl_cpu_mat_free(NULL, m);
            source_free(&s);
        }
}
END_TEST

START_TEST(a_row_of_a_packed_matrix_is_its_source)
{
    g_seed = 31;
    for (int t = 0; t < TL_W_COUNT; t++)
        for (int sh = 1; sh < N_SHAPES; sh++) {
            int n_out = shapes[sh][0], n_in = shapes[sh][1];
            struct source s = source_make((enum tl_wtype)t, n_out, n_in, false);
            struct tl_mat *m = mat_of(&s);
            float *w = tl_array((size_t)n_in, 4);
            for (int o = 0; o < n_out; o++) {
                tl_cpu_mat_row(m, o, w);
                assert_same(s.w + o * n_in, w, n_in, "a row");
            }
            tl_free(w);
            tl_cpu_mat_free(NULL, m);
            source_free(&s);
        }
}
END_TEST

START_TEST(stacked_parts_equal_one_matrix)
{
    struct source s = source_make(TL_W_INT4, 50, 96, false);
    struct tl_mat *one = mat_of(&s), *parts;
    struct tl_mat_part p = s.src.part[0];
    int at = 0;
    s.src.n_parts = 3;
    for (int i = 0; i < 3; i++) {
        int rows = i == 0 ? 20 : i == 1 ? 7 : 23;
        s.src.part[i] =
            (struct tl_mat_part){(const uint8_t *)p.data + at * 48, p.row_scale + at, p.group_scale + at * 2, rows};
        at += rows;
    }
    parts = mat_of(&s);
    ck_assert_uint_eq(one->bytes, parts->bytes);
    ck_assert_mem_eq(one->data, parts->data, one->tile_bytes * (size_t)one->n_tiles);
    ck_assert_mem_eq(one->row_scale, parts->row_scale, 50 * 4);
    tl_cpu_mat_free(NULL, one);
    tl_cpu_mat_free(NULL, parts);
    source_free(&s);
}
END_TEST

START_TEST(a_matrix_that_cannot_be_exact_is_refused_in_one_sentence)
{
    struct source s = source_make(TL_W_INT8, 2, 64, false), f = source_make(TL_W_INT4, 2, 64, false);
    struct tl_mat *m = (struct tl_mat *)&s;
    struct tl_error err;
    s.src.n_in = TL_CPU_K_MAX + 1;
    ck_assert_int_eq(tl_cpu_mat_create(NULL, &s.src, &m, &err), TL_ERR_UNSUPPORTED);
    ck_assert_ptr_null(m);
    ck_assert_ptr_nonnull(strstr(err.msg, "133145"));
    s.src.n_in = 64;
    ((int8_t *)s.data)[70] = -128;
    ck_assert_int_eq(tl_cpu_mat_create(NULL, &s.src, &m, &err), TL_ERR_BAD_PARAM);
    ck_assert_ptr_nonnull(strstr(err.msg, "row 1 "));
    ((uint8_t *)f.data)[3] = 0x88;
    ck_assert_int_eq(tl_cpu_mat_create(NULL, &f.src, &m, NULL), TL_ERR_BAD_PARAM);
    f.src.n_in = 63;
    ck_assert_int_eq(tl_cpu_mat_create(NULL, &f.src, &m, &err), TL_ERR_UNSUPPORTED);
    f.src.n_parts = 0;
    ck_assert_int_eq(tl_cpu_mat_create(NULL, &f.src, &m, &err), TL_ERR_BAD_PARAM);
    source_free(&s);
    source_free(&f);
}
END_TEST

START_TEST(int4_takes_four_and_a_sixth_bits_a_weight)
{
    struct source s = source_make(TL_W_INT4, 1024, 2048, false);
    struct tl_mat *m = mat_of(&s);
    ck_assert_double_le((double)m->bytes * 8 / (1024.0 * 2048), 4.16);
    tl_cpu_mat_free(NULL, m);
    source_free(&s);
}
END_TEST

/* ---- elementwise kernels ---- */

START_TEST(every_level_gives_the_bits_of_the_scalar_level_in_float_kernels)
{
    static const int sizes[] = {1,  2,   7,   8,   15,  16,  17,  31,  32,  40,  48,
                                64, 100, 255, 256, 257, 271, 384, 512, 530, 2048};
    g_seed = 1000 + (uint64_t)_i;
    for (int c = 0; c < (int)(sizeof(sizes) / sizeof(sizes[0])); c++) {
        int n = sizes[c], k_pad = (n + 63) / 64 * 64;
        float *x = floats(n, _i % 2 ? 20.0f : 1.0f), *y = floats(n, 3), *want = tl_array((size_t)n, 4),
              *got = tl_array((size_t)n, 4), ws, gs;
        int8_t *wq = tl_array((size_t)k_pad, 1), *gq = tl_array((size_t)k_pad, 1);
        int32_t *wg = tl_array((size_t)k_pad, 4), *gg = tl_array((size_t)k_pad, 4), wsum, gsum;
        uint16_t *wh = tl_array((size_t)n, 2), *gh = tl_array((size_t)n, 2);
        for (int i = 0; _i % 3 == 2 && i < 3; i++)
            x[below(n)] = specials[below(N_SPECIALS)];
        EACH_VECTOR_LEVEL(k)
        {
#define BOTH(call_want, call_got, what)                                                                                \
    do {                                                                                                               \
        memcpy(want, y, (size_t)n * 4);                                                                                \
        memcpy(got, y, (size_t)n * 4);                                                                                 \
        call_want;                                                                                                     \
        call_got;                                                                                                      \
        assert_same(want, got, n, what);                                                                               \
    } while (0)
            BOTH(scalar->exp(want, x, n), k->exp(got, x, n), "exp");
            BOTH(scalar->rmsnorm(want, x, y, n, 1e-5f), k->rmsnorm(got, x, y, n, 1e-5f), "rmsnorm");
            BOTH(scalar->rmsnorm(want, x, NULL, n, 1e-5f), k->rmsnorm(got, x, NULL, n, 1e-5f),
                 "rmsnorm without weight");
            BOTH(scalar->round_bf16(want, x, n), k->round_bf16(got, x, n), "round_bf16");
            BOTH(scalar->silu_mul(want, x, y, n), k->silu_mul(got, x, y, n), "silu_mul");
            BOTH(scalar->relu2(want, x, n), k->relu2(got, x, n), "relu2");
            BOTH(scalar->add(want, x, n), k->add(got, x, n), "add");
            BOTH(scalar->merge(want, 0.3f, x, 0.7f, n), k->merge(got, 0.3f, x, 0.7f, n), "merge");
            BOTH(want[0] = scalar->dot(x, y, n), got[0] = k->dot(x, y, n), "dot");
            scalar->quantise(x, n, k_pad, wq, wg, &wsum, &ws);
            k->quantise(x, n, k_pad, gq, gg, &gsum, &gs);
            assert_same(&ws, &gs, 1, "scale");
            ck_assert_mem_eq(wq, gq, (size_t)k_pad);
            ck_assert_mem_eq(wg, gg, (size_t)(k_pad / 32) * 4);
            ck_assert_int_eq(wsum, gsum);
            scalar->narrow(wh, x, n);
            k->narrow(gh, x, n);
            scalar->widen(want, wh, n);
            k->widen(got, gh, n);
            assert_same(want, got, n, "F16");
        }
        tl_free(x);
        tl_free(y);
        tl_free(want);
        tl_free(got);
        tl_free(wq);
        tl_free(gq);
        tl_free(wg);
        tl_free(gg);
        tl_free(wh);
        tl_free(gh);
    }
}
END_TEST

START_TEST(every_level_gives_the_bits_of_the_scalar_level_in_attention_kernels)
{
    g_seed = 2000 + (uint64_t)_i;
    for (int c = 0; c < 60; c++) {
        int n_t = 1 + below(256), rows = 1 + below(6), lda = n_t + below(5), blocks = 1 + below(5),
            ldb = 16 * blocks + 8 * below(4), ldc = 16 * blocks + below(9), n_c = 1 + below(16), lo = below(250),
            hi = lo + 1 + below(256 - lo);
        float *a = floats(rows * lda, 1), *b = floats(n_t * ldb, 1), *want = floats(rows * ldc, 1),
              *got = tl_array((size_t)(rows * ldc), 4), s_want[256], s_got[256], ml[4],
              *pan = tl_array((size_t)n_t * 32, 4);
        uint16_t *h = tl_array((size_t)(n_t * ldb), 2);
        bool first = below(2);
        scalar->narrow(h, b, n_t * ldb);
        EACH_VECTOR_LEVEL(k)
        {
            memcpy(got, want, (size_t)(rows * ldc) * 4);
            scalar->mm(rows, a, lda, b, ldb, n_t, want, ldc, first, blocks);
            k->mm(rows, a, lda, b, ldb, n_t, got, ldc, first, blocks);
            assert_same(want, got, rows * ldc, "mm");
            scalar->mm_f16(rows, a, lda, h, ldb, n_t, want, ldc, first, blocks);
            k->mm_f16(rows, a, lda, h, ldb, n_t, got, ldc, first, blocks);
            assert_same(want, got, rows * ldc, "mm_f16");
            scalar->panel_f16(pan, h, ldb, n_t, n_c);
            k->panel_f16(pan + n_t * 16, h, ldb, n_t, n_c);
            assert_same(pan, pan + n_t * 16, n_t * 16, "panel_f16");
            scalar->panel_f32(pan, b, ldb, n_t, n_c);
            k->panel_f32(pan + n_t * 16, b, ldb, n_t, n_c);
            assert_same(pan, pan + n_t * 16, n_t * 16, "panel_f32");
            for (int i = 0; i < 256; i++)
                s_want[i] = s_got[i] = uniform() * 30.0f;
            scalar->softmax(s_want, lo, hi, 0.25f, ml, ml + 1);
            k->softmax(s_got, lo, hi, 0.25f, ml + 2, ml + 3);
            assert_same(ml, ml + 2, 2, "maximum and sum");
            assert_same(s_want, s_got, 256, "softmax");
        }
        tl_free(a);
        tl_free(b);
        tl_free(want);
        tl_free(got);
        tl_free(pan);
        tl_free(h);
    }
}
END_TEST

START_TEST(every_half_widens_and_narrows_alike_at_all_levels)
{
    uint16_t *h = tl_array(65536, 2), *back = tl_array(65536, 2);
    float *want = tl_array(65536, 4), *got = tl_array(65536, 4);
    for (int i = 0; i < 65536; i++)
        h[i] = (uint16_t)i;
    scalar->widen(want, h, 65536);
    scalar->narrow(back, want, 65536);
    for (int i = 0; i < 65536; i++)
        if (!isnan(want[i]))
            ck_assert_int_eq(h[i], back[i]);
    EACH_VECTOR_LEVEL(k)
    {
        k->widen(got, h, 65536);
        assert_same(want, got, 65536, "widen");
        for (int i = 0; i < 65536; i++) /* between two halves and on both sides of the middle */
            got[i] = isfinite(want[i]) ? from_bits(bits_of(want[i]) + 0x1000u + (uint32_t)below(3) - 1u) : want[i];
        scalar->narrow(h, got, 65536);
        k->narrow(back, got, 65536);
        ck_assert_mem_eq(h, back, 131072);
        for (int i = 0; i < 65536; i++)
            h[i] = (uint16_t)i;
    }
    tl_free(h);
    tl_free(back);
    tl_free(want);
    tl_free(got);
}
END_TEST

START_TEST(exp_is_within_two_units_in_the_last_place)
{
    enum { N = 1 << 16 };
    float *x = tl_array(N, 4), *y = tl_array(N, 4);
    double worst = 0;
    for (int part = 0; part < 32; part++) {
        for (int i = 0; i < N; i++)
            x[i] = -87.0f + 175.0f * (float)(part * N + i) / (float)(32 * N);
        tl_cpu_kernels_of(tl_cpu_level())->exp(y, x, N);
        for (int i = 0; i < N; i++) {
            double want = exp((double)x[i]), ulp = (double)(nextafterf((float)want, INFINITY) - (float)want);
            double e = fabs((double)y[i] - want) / ulp;
            worst = e > worst ? e : worst;
        }
    }
    ck_assert_double_le(worst, 2.0);
    x[0] = -INFINITY;
    x[1] = INFINITY;
    x[2] = NAN;
    x[3] = 0;
    x[4] = -1000;
    x[5] = 89;
    x[6] = -100; /* below the normal range */
    tl_cpu_kernels_of(tl_cpu_level())->exp(y, x, 7);
    ck_assert(y[0] == 0 && y[1] == INFINITY && isnan(y[2]) && y[3] == 1 && y[4] == 0 && y[5] == INFINITY);
    ck_assert_double_le(fabs((double)y[6] - exp(-100.0)), 0x1p-149);
    tl_free(x);
    tl_free(y);
}
END_TEST

START_TEST(float_kernels_are_near_their_formulas)
{
    enum { N = 777 };
    float *x = floats(N, 6), *w = floats(N, 2), *y = tl_array(N, 4), s[256], m, l;
    double sq = 0, inv, sum = 0;
    for (int i = 0; i < N; i++)
        sq += (double)x[i] * (double)x[i];
    inv = 1 / sqrt(sq / N + 1e-5);
    scalar->rmsnorm(y, x, w, N, 1e-5f);
    for (int i = 0; i < N; i++) /* sum, division, root and two products */
        ck_assert_double_le(fabs((double)y[i] - (double)x[i] * inv * (double)w[i]), 1e-5 * fabs((double)y[i]) + 1e-12);
    scalar->silu_mul(y, x, w, N);
    for (int i = 0; i < N; i++)
        ck_assert_double_le(fabs((double)y[i] - (double)x[i] / (1 + exp(-(double)x[i])) * (double)w[i]), 1e-6 * 12);
    scalar->relu2(y, x, N);
    for (int i = 0; i < N; i++)
        ck_assert_double_le(fabs((double)y[i] - (x[i] > 0 ? 0.5 * (double)x[i] * (double)x[i] : 0)), 1e-5);
    for (int i = 0; i < 256; i++)
        s[i] = x[i];
    scalar->softmax(s, 3, 250, 0.5f, &m, &l);
    for (int i = 3; i < 250; i++)
        sum += exp(0.5 * (double)x[i] - (double)m);
    ck_assert_double_le(fabs((double)l - sum), 1e-5 * sum);
    ck_assert(s[0] == 0 && s[2] == 0 && s[250] == 0 && s[255] == 0);
    tl_free(x);
    tl_free(w);
    tl_free(y);
}
END_TEST

/* A value that is not finite must reach the logits, where it is reported: quantising may not hide it. */
START_TEST(a_nan_or_infinity_survives_an_integer_layer)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    struct source s = source_make(TL_W_INT4, 20, 64, false);
    struct tl_mat *m = mat_of(&s);
    for (int level = 0; level < TL_CPU_LEVELS; level++) {
        const struct tl_cpu_kernels *k = level_or_skip(level);
        for (int b = 0; k && b < 3; b++) {
            float x[64] = {1, 2, 3}, y[20];
            struct tl_cpu_acts a;
            x[50] = bad[b];
            a = acts_make(k, m, x, 1);
            linear(k, m, &a, 1, 0, 2, y);
            for (int o = 0; o < 20; o++)
                ck_assert(!isfinite(y[o]));
            acts_free(&a);
        }
    }
    tl_cpu_mat_free(NULL, m);
    source_free(&s);
}
END_TEST

/* ---- the pool ---- */

struct count {
    struct tl_cpu_pool *pool;
    int n, rounds;
    int64_t cell[TL_CPU_THREADS_MAX][8]; /* a line each */
    int64_t wrong;
};

/* Every thread reads its neighbour's cell of the round before: a barrier that lets one through too early is seen. */
static void count_rounds(void *ctx, int tid)
{
    struct count *c = ctx;
    for (int i = 1; i <= c->rounds; i++) {
        c->cell[tid][0] = i;
        tl_cpu_pool_barrier(c->pool);
        if (c->cell[(tid + 1) % c->n][0] != i)
            __atomic_fetch_add(&c->wrong, 1, __ATOMIC_RELAXED);
        tl_cpu_pool_barrier(c->pool);
    }
}

START_TEST(nobody_passes_a_barrier_before_all_have_come)
{
    static const int sizes[] = {1, 2, 3, 5};
    for (int i = 0; i < 4; i++) {
        struct count c = {.n = sizes[i], .rounds = i < 2 ? 2000 : 100};
        struct tl_error err;
        ck_assert_int_eq(tl_cpu_pool_open(&c.pool, sizes[i], &err), TL_OK);
        ck_assert_int_eq(tl_cpu_pool_size(c.pool), sizes[i]);
        for (int job = 0; job < 5; job++)
            tl_cpu_pool_run(c.pool, count_rounds, &c);
        ck_assert_int_eq(c.wrong, 0);
        tl_cpu_pool_close(c.pool);
    }
}
END_TEST

START_TEST(an_impossible_number_of_threads_is_refused)
{
    struct tl_cpu_pool *p;
    struct tl_error err;
    ck_assert_int_eq(tl_cpu_pool_open(&p, -1, &err), TL_ERR_OUT_OF_RANGE);
    ck_assert_int_eq(tl_cpu_pool_open(&p, 5000, &err), TL_ERR_OUT_OF_RANGE);
    ck_assert_ptr_nonnull(strstr(err.msg, "5000"));
    ck_assert_ptr_null(p);
    tl_cpu_pool_close(NULL);
}
END_TEST

START_TEST(shares_cover_everything_once)
{
    for (int n = 0; n < 40; n++)
        for (int threads = 1; threads < 9; threads++) {
            int64_t at = 0;
            for (int t = 0; t < threads; t++) {
                int64_t lo, hi;
                tl_cpu_share(n, t, threads, &lo, &hi);
                ck_assert_int_eq(lo, at);
                at = hi;
            }
            ck_assert_int_eq(at, n);
        }
}
END_TEST

int main(void)
{
    Suite *s = suite_create("cpu kernels");
    TCase *t = tcase_create("all");
    SRunner *r;
    int failed;
    tcase_set_timeout(t, 120);
    tcase_add_loop_test(t, every_level_gives_the_bits_of_the_scalar_level_in_linear_layers, 0, 6);
    tcase_add_loop_test(t, every_level_gives_the_bits_of_the_scalar_level_in_float_kernels, 0, 12);
    tcase_add_loop_test(t, every_level_gives_the_bits_of_the_scalar_level_in_attention_kernels, 0, 4);
    tcase_add_test(t, every_half_widens_and_narrows_alike_at_all_levels);
    tcase_add_loop_test(t, a_row_gets_the_same_bits_alone_and_among_others, 0, 4);
    tcase_add_loop_test(t, integer_layers_equal_the_sum_in_64_bits, 0, 3);
    tcase_add_test(t, the_widest_layer_of_a_model_cannot_overflow);
    tcase_add_test(t, float_layers_are_near_the_sum_in_double);
    tcase_add_test(t, float_kernels_are_near_their_formulas);
    tcase_add_test(t, exp_is_within_two_units_in_the_last_place);
    tcase_add_test(t, a_nan_or_infinity_survives_an_integer_layer);
    tcase_add_test(t, a_row_of_a_packed_matrix_is_its_source);
    tcase_add_test(t, stacked_parts_equal_one_matrix);
    tcase_add_test(t, a_matrix_that_cannot_be_exact_is_refused_in_one_sentence);
    tcase_add_test(t, int4_takes_four_and_a_sixth_bits_a_weight);
    tcase_add_test(t, nobody_passes_a_barrier_before_all_have_come);
    tcase_add_test(t, an_impossible_number_of_threads_is_refused);
    tcase_add_test(t, shares_cover_everything_once);
    suite_add_tcase(s, t);
    r = srunner_create(s);
    srunner_run_all(r, CK_ENV);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
