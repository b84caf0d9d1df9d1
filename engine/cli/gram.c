#include "gram.h"

#include <math.h>
#include <string.h>

#include "mem.h"

#define HELD_ROWS 16 /* rows that are added at once, so that the sums pass the caches less often */
/* What is added to each mean square, of the mean of all: a little, and more the fewer the rows are, since what few rows show of how
 * inputs go together is chance. */
#define DAMP      0.01
#define DAMP_ROWS 1.0 /* times inputs over rows */

typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));

struct tl_gram {
    int64_t n;
    int width, n_held;
    int64_t n_rows;
    float *sums; /* [n][width]: input i with inputs of its block; from the diagonal on, rounded down to 4 */
    float *held; /* [HELD_ROWS][n] */
};

int tl_gram_width(int64_t n, int most)
{
    int64_t blocks = (n + most - 1) / most, width = (n + blocks - 1) / blocks;
    return (int)((width + 31) / 32 * 32);
}

size_t tl_gram_bytes(int64_t n, int width) { return (size_t)n * (size_t)(width + HELD_ROWS) * sizeof(float); }

void tl_gram_free(struct tl_gram *g)
{
    if (!g)
        return;
    tl_free(g->sums);
    tl_free(g->held);
    tl_free(g);
}

enum tl_status tl_gram_create(struct tl_gram **out, int64_t n, int width, struct tl_error *err)
{
    struct tl_gram *g = tl_calloc(1, sizeof(*g));
    *out = NULL;
    if (!g)
        return tl_fail_host_memory(err, sizeof(*g));
    g->n = n;
    g->width = width;
    g->sums = tl_calloc((size_t)n * (size_t)width, sizeof(*g->sums));
    g->held = tl_calloc((size_t)n * HELD_ROWS, sizeof(*g->held));
    if (!g->sums || !g->held) {
        tl_gram_free(g);
        return tl_fail_host_memory(err, tl_gram_bytes(n, width));
    }
    *out = g;
    return TL_OK;
}

static int width_at(const struct tl_gram *g, int64_t from) /* of the block that begins there */
{
    return g->n - from < g->width ? (int)(g->n - from) : g->width;
}

static void add_held(struct tl_gram *g)
{
    for (int64_t i = 0; i < g->n; i++) {
        int64_t from = i / g->width * g->width;
        float *sums = g->sums + i * g->width;
        for (int r = 0; r < g->n_held; r++) {
            const float *x = g->held + r * g->n + from;
            float f = x[i - from];
            for (int k = (int)(i - from) & ~3; k < width_at(g, from); k += 4)
                *(v4 *)(sums + k) += f * *(const v4 *)(x + k);
        }
    }
    g->n_rows += g->n_held;
    g->n_held = 0;
}

void tl_gram_add(struct tl_gram *g, const float *x)
{
    memcpy(g->held + g->n_held++ * g->n, x, (size_t)g->n * sizeof(*x));
    if (g->n_held == HELD_ROWS)
        add_held(g);
}

/* ---- from sums to compensation ---- */

/* h = r r^T with r upper triangular, in place, from the last row up; only the upper half of h is read. False: h is not positive. */
static bool factor(double *h, int n)
{
    for (int j = n - 1; j >= 0; j--) {
        double *rj = h + (size_t)j * (size_t)n, pivot = rj[j];
        for (int k = j + 1; k < n; k++)
            pivot -= rj[k] * rj[k];
        if (!(pivot > 0))
            return false;
        rj[j] = sqrt(pivot);
        for (int i = 0; i < j; i++) {
            double *ri = h + (size_t)i * (size_t)n, sum = ri[j];
            for (int k = j + 1; k < n; k++)
                sum -= ri[k] * rj[k];
            ri[j] = sum / rj[j];
        }
    }
    return true;
}

/* The inverse of an upper triangular matrix, in place: row i out of those below it. */
static void invert(double *r, int n, double *row)
{
    for (int i = n - 1; i >= 0; i--) {
        double *ri = r + (size_t)i * (size_t)n, inverse = 1 / ri[i];
        memset(row, 0, (size_t)n * sizeof(*row));
        for (int k = i + 1; k < n; k++)
            for (int j = k; j < n; j++)
                row[j] -= ri[k] * r[(size_t)k * (size_t)n + (size_t)j];
        for (int j = i + 1; j < n; j++)
            ri[j] = row[j] * inverse;
        ri[i] = inverse;
    }
}

static void read_block(const struct tl_gram *g, const float *scale, int64_t from, int n, double damp, double *h)
{
    for (int i = 0; i < n; i++)
        for (int k = i; k < n; k++) {
            double by = scale ? (double)scale[from + i] * (double)scale[from + k] : 1;
            h[i * n + k] = (double)g->sums[(from + i) * g->width + k] / by + (i == k ? damp : 0);
        }
}

static enum tl_status compensate_block(const struct tl_gram *g, const float *scale, int64_t from,
                                       struct tl_compensation *c, double *h, double *row, struct tl_error *err)
{
    int n = width_at(g, from);
    double mean = 0;
    read_block(g, scale, from, n, 0, h);
    for (int i = 0; i < n; i++)
        mean += h[i * n + i] / n;
    if (!(mean < (double)INFINITY))
        return tl_fail(err, TL_ERR_BAD_FILE,
                       "the model computes values that are not finite, so it cannot be calibrated");
    mean = mean > 1e-30 ? mean : 1; /* nothing ever came in: all errors count the same and none is made good */
    for (int i = 0; i < n; i++)
        c->importance[from + i] = (float)(h[i * n + i]);
    double damp = DAMP + DAMP_ROWS * n / (double)(g->n_rows + 1);
    for (read_block(g, scale, from, n, damp * mean, h); !factor(h, n); damp *= 10)
        read_block(g, scale, from, n, 10 * damp * mean, h); /* ends: at last the diagonal outweighs the rest */
    invert(h, n, row);
    for (int i = 0; i < n; i++) {
        const double *u = h + i * n;
        c->weight[from + i] = (float)(1 / (u[i] * u[i]));
        for (int k = i + 1; k < n; k++)
            c->follow[(from + i) * c->width + k] = (float)(u[k] / u[i]);
    }
    return TL_OK;
}

static void make_relative(float *x, size_t n)
{
    double mean = 0;
    for (size_t i = 0; i < n; i++)
        mean += (double)x[i] / (double)n;
    for (size_t i = 0; i < n; i++) {
        double part = mean > 0 ? (double)x[i] / mean : 1;
        x[i] = (float)(part > 1e-3 ? part : 1e-3);
    }
}

void tl_compensation_free(struct tl_compensation *c)
{
    if (!c)
        return;
    tl_free(c->follow);
    tl_free(c->weight);
    tl_free(c->importance);
    tl_free(c);
}

enum tl_status tl_gram_compensation(struct tl_gram *g, const float *scale, struct tl_compensation **out,
                                    struct tl_error *err)
{
    size_t n = (size_t)g->n, w = (size_t)g->width;
    struct tl_compensation *c = tl_calloc(1, sizeof(*c));
    double *h = tl_array(w * w, sizeof(*h)), *row = tl_array(w, sizeof(*row));
    enum tl_status st = TL_OK;
    *out = NULL;
    if (c) {
        c->width = g->width;
        c->follow = tl_calloc(n * w, sizeof(*c->follow));
        c->weight = tl_array(n, sizeof(*c->weight));
        c->importance = tl_array(n, sizeof(*c->importance));
    }
    if (!c || !h || !row || !c->follow || !c->weight || !c->importance)
        st = tl_fail_host_memory(err, (n + 2 * w) * w * sizeof(float));
    add_held(g);
    for (int64_t from = 0; from < g->n && st == TL_OK; from += g->width)
        st = compensate_block(g, scale, from, c, h, row, err);
    if (st == TL_OK) {
        make_relative(c->importance, n);
        *out = c;
        c = NULL;
    }
    tl_compensation_free(c);
    tl_free(row);
    tl_free(h);
    return st;
}
