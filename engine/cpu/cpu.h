/* engine/cpu/cpu.h - what the files of the CPU backend share: the packed matrix, rows ready for a linear layer, and the table
 * of kernels, one per instruction set level.
 *
 * The numeric law. Every kernel gives the same bits at every level, for any number of threads and of rows:
 * - A float sum over k has 16 lanes; lane j adds the terms k = j (mod 16) in ascending order by fma, starting from +0, inside
 *   a slice of 256; the lanes are folded +8, +4, +2, +1; slices are added in ascending order, starting from the first slice's
 *   value. A ragged end is filled with terms +0 * +0 up to a multiple of 16, at every level, so that even the sign of a zero
 *   is the same.
 * - Integer sums are exact in any order; all integer arithmetic is modulo 2^32 and tl_cpu_mat_create() refuses widths whose sum
 *   could leave it.
 * - Everything else is a fixed sequence of IEEE operations per element; a fused multiply-add is written as one, all others
 *   are not fused.
 * NaN stays NaN; its payload is not part of the law.
 *
 * Thread: kernels are called by all threads of the pool, on disjoint outputs. */
#ifndef TL_CPU_H
#define TL_CPU_H

#include "../backend.h"

enum tl_cpu_level {
    TL_CPU_SCALAR,
    TL_CPU_AVX2,   /* AVX2, FMA, F16C */
    TL_CPU_AVX512, /* AVX-512 F, BW, DQ, VL and VNNI; without VNNI a machine counts as AVX2 */
    TL_CPU_LEVELS
};

#define TL_CPU_TILE  16     /* outputs of a packed tile */
#define TL_CPU_SLICE 256    /* k of a float slice */
#define TL_CPU_K_MAX 133144 /* inputs of an integer matrix: 127 * 127 * this < 2^31 */

struct tl_buf {
    uint8_t *data;
    size_t bytes;
};

/* INT4 and INT8 matrices are stored in tiles of 16 outputs, padded with zeros; the layout is the same at all levels. A chunk of
 * 64 bytes holds, for each of the 16 outputs in turn, 4 bytes.
 *   INT8  chunk s: byte j of an output is the weight of input 4 s + j.
 *   INT4  a block of 256 inputs (the last one of a row may hold fewer pairs) is one line of scales and up to 4 pairs of groups:
 *         line: 16 bytes per pair; byte r: scale of output r for the even group in the low nibble, for the odd one in the high;
 *         pair: 2 groups of 32 inputs, 4 chunks each; in chunk c of a group byte j has q + 8 of input 8 c + j in the low nibble
 *         and of input 8 c + 4 + j in the high one.
 * F32 and BF16 matrices are row-major, rows padded with zeros to k_pad. */
struct tl_mat {
    enum tl_wtype wtype;
    int64_t n_out, n_in;
    int64_t k_pad;     /* n_in rounded up: integers to 64, floats to 16 */
    int64_t n_tiles;   /* of 16 outputs */
    size_t tile_bytes; /* of data, from one tile to the next; 16 rows for floats */
    size_t bytes;      /* all memory held */
    uint8_t *data;
    float *row_scale; /* [n_tiles * 16]; NULL for floats */
};

#define TL_CPU_Q4_PAIR  512
#define TL_CPU_Q4_BLOCK (64 + 4 * TL_CPU_Q4_PAIR) /* bytes of 256 inputs of a tile */

/* Errors: TL_ERR_BAD_PARAM, TL_ERR_UNSUPPORTED, TL_ERR_NO_HOST_MEMORY. */
enum tl_status tl_cpu_mat_create(struct tl_backend *be, const struct tl_mat_src *src, struct tl_mat **out,
                                 struct tl_error *err);
void tl_cpu_mat_free(struct tl_backend *be, struct tl_mat *m);      /* NULL is fine */
void tl_cpu_mat_row(const struct tl_mat *m, int64_t row, float *w); /* w[n_in] = the dequantised row */

/* 64-byte aligned memory that asks for huge pages where it is large. NULL = no memory. Release with tl_free. */
void *tl_cpu_pages(size_t bytes);

/* Rows ready to be the input of linear layers: int8 or float, whatever the matrix wants. Padded with zeros to its k_pad. */
struct tl_cpu_acts {
    int64_t k_max;  /* widest input; a multiple of 64 */
    int8_t *q;      /* [rows][k_max] */
    int32_t *group; /* [rows][k_max / 32]: two int16, -8 * sum of the q with k mod 4 in {0, 1}, and in {2, 3} */
    int32_t *sum;   /* [rows]: sum of the row's q */
    float *scale;   /* [rows] */
    float *f;       /* [rows][k_max] */
};

/* Scratch of one thread for the linear kernels: a panel of unpacked weights (bytes of 16 outputs x K_BLOCK inputs, and
 * their group scales; or F32 of 16 outputs x one slice) and integer sums in progress (of up to two tiles). */
#define TL_CPU_K_BLOCK     1024 /* inputs of a panel, at most */
#define TL_CPU_ROW_BLOCK   256  /* rows that share one unpacking, at most */
#define TL_CPU_PANEL_BYTES (18 * TL_CPU_K_BLOCK)
#define TL_CPU_SUMS_BYTES  (TL_CPU_ROW_BLOCK * 2 * TL_CPU_TILE * 4)
struct tl_cpu_linear_scratch {
    _Alignas(64) uint8_t panel[TL_CPU_PANEL_BYTES];
    _Alignas(64) uint8_t sums[TL_CPU_SUMS_BYTES];
};

struct tl_cpu_kernels {
    const char *name;
    int mm_rows; /* rows that mm_* take at once */

    /* y[i * ldy + o] = W row o times row i of acts, i < n, o in tiles [t0, t1). */
    void (*linear_q4)(const struct tl_mat *m, const struct tl_cpu_acts *a, int n, int64_t t0, int64_t t1, float *y,
                      int64_t ldy, struct tl_cpu_linear_scratch *tmp);
    void (*linear_q8)(const struct tl_mat *m, const struct tl_cpu_acts *a, int n, int64_t t0, int64_t t1, float *y,
                      int64_t ldy, struct tl_cpu_linear_scratch *tmp);
    void (*linear_f)(const struct tl_mat *m, const struct tl_cpu_acts *a, int n, int64_t t0, int64_t t1, float *y,
                     int64_t ldy, struct tl_cpu_linear_scratch *tmp);

    float (*dot)(const float *a, const float *b, int64_t n);
    /* y = x * (1 / sqrt(sum(x^2) / n + eps)) * w in double, rounded once; w NULL = without. y may be x. The sum has 16 lanes of
     * k mod 16, ascending, folded +8, +4, +2, +1. */
    void (*rmsnorm)(float *y, const float *x, const float *w, int64_t n, float eps);
    /* q, group, sum and *scale of one row; a row with a NaN or an infinity gets q = 0 and a scale that is not finite. */
    void (*quantise)(const float *x, int64_t n, int64_t k_pad, int8_t *q, int32_t *group, int32_t *sum, float *scale);
    void (*round_bf16)(float *y, const float *x, int64_t n);               /* nearest even, kept as F32 */
    void (*silu_mul)(float *y, const float *g, const float *u, int64_t n); /* y = g / (1 + exp(-g)) * u */
    void (*relu2)(float *y, const float *x, int64_t n);                    /* y = 0.5 * (max(x, 0)^2) */
    void (*add)(float *y, const float *x, int64_t n);                      /* y += x */
    void (*exp)(float *y, const float *x, int64_t n);
    void (*widen)(float *y, const uint16_t *h, int64_t n);  /* F16 to F32 */
    void (*narrow)(uint16_t *h, const float *x, int64_t n); /* F32 to F16, nearest even */

    /* c[r][j] += a[r][t] * b[t][j], r < rows <= mm_rows, j < 16 * blocks, one fma per t in ascending order; `first`: c starts
     * at +0. Strides in elements. mm_f16: b is F16. */
    void (*mm)(int rows, const float *a, int64_t lda, const float *b, int64_t ldb, int64_t n_t, float *c, int64_t ldc,
               bool first, int blocks);
    void (*mm_f16)(int rows, const float *a, int64_t lda, const uint16_t *b, int64_t ldb, int64_t n_t, float *c,
                   int64_t ldc, bool first, int blocks);
    /* One split: s[key] *= scale; *m = max; s[key] = exp(s[key] - m); *l = sum in 16 lanes of key mod 16; keys [lo, hi) only,
     * the rest of their blocks of 16 becomes +0. */
    void (*softmax)(float *s, int lo, int hi, float scale, float *m, float *l);
    /* Panel for mm: dst[t][0..15] = the first n_c (<= 16) values of row t of src as F32, the rest +0. */
    void (*panel_f16)(float *dst, const uint16_t *src, int64_t ld, int64_t n_t, int n_c);
    void (*panel_f32)(float *dst, const float *src, int64_t ld, int64_t n_t, int n_c);
    /* y = fma(x, fx, y * fy) */
    void (*merge)(float *y, float fy, const float *x, float fx, int64_t n);
};

extern const struct tl_cpu_kernels tl_cpu_kernels_scalar, tl_cpu_kernels_avx2, tl_cpu_kernels_avx512;

/* The best level this machine has, or the forced one. */
enum tl_cpu_level tl_cpu_level(void);
bool tl_cpu_has_level(enum tl_cpu_level level);
/* NULL where the build or the machine lacks it. */
const struct tl_cpu_kernels *tl_cpu_kernels_of(enum tl_cpu_level level);
/* For tests: backends opened from now on use this level; TL_CPU_LEVELS = the best again. */
void tl_cpu_force_level(enum tl_cpu_level level);

#ifdef TL_TEST_HOOKS
/* While on, norms of calls with more than one row are summed in another order: tests of exactness must notice. */
void tl_cpu_plant_order_change(bool on);
#endif

#endif
