#include "report.h"

#include "mem.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool report_all;
char report_place[160];
static long n_checks, n_failed;

struct group { /* of like comparisons, for the table */
    const char *name;
    long n, failed, judged, untypical; /* judged: those with enough rows for one of them to be typical */
    double typical, rms, max;          /* worst seen, relative */
    double loose;
};
static struct group groups[64];
static int n_groups;

static struct group *group_of(const char *name)
{
    for (int i = 0; i < n_groups; i++)
        if (!strcmp(groups[i].name, name))
            return &groups[i];
    groups[n_groups].name = name;
    return &groups[n_groups++];
}

void check(bool ok, const char *name, const char *fmt, ...)
{
    struct group *g = group_of(name);
    va_list ap;
    n_checks++;
    g->n++;
    if (ok && !report_all)
        return;
    if (!ok) {
        n_failed++;
        if (g->failed++ >= 8 && !report_all)
            return;
    }
    printf("%s %s, %s: ", ok ? "ok    " : "FAILED", report_place, name);
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    putchar('\n');
    fflush(stdout);
}

void check_same(const char *name, const float *a, const float *b, int64_t n, int64_t width)
{
    int64_t differ = 0, first = -1;
    for (int64_t i = 0; i < n; i++)
        if (memcmp(a + i, b + i, sizeof(*a))) {
            first = differ++ ? first : i;
        }
    check(!differ, name, "%lld of %lld values differ, the first at row %lld, column %lld: %a and %a", (long long)differ,
          (long long)n, (long long)(first / width), (long long)(first % width), differ ? (double)a[first] : 0,
          differ ? (double)b[first] : 0);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median over rows of a row's root mean square difference. */
static double typical_row(const float *got, const float *want, int64_t rows, int64_t width)
{
    double *v = tl_array((size_t)rows, sizeof(*v)), middle;
    if (!v)
        exit(1);
    for (int64_t i = 0; i < rows; i++) {
        v[i] = 0;
        for (int64_t j = 0; j < width; j++) {
            double d = (double)got[i * width + j] - (double)want[i * width + j];
            v[i] += d * d;
        }
        v[i] = sqrt(v[i] / (double)width);
    }
    qsort(v, (size_t)rows, sizeof(*v), ascending);
    middle = v[rows / 2];
    tl_free(v);
    return middle;
}

void check_near(const char *name, const float *got, const float *want, int64_t n, int64_t width, struct limits l)
{
    struct group *g = group_of(name);
    double sq = 0, diff_sq = 0, max = 0, typical = 0;
    int64_t at = 0;
    bool finite = true;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)got[i] - (double)want[i]);
        finite = finite && isfinite(got[i]) && isfinite(want[i]);
        sq += (double)want[i] * (double)want[i];
        diff_sq += d * d;
        if (d > max || !(d <= max)) {
            max = d;
            at = i;
        }
    }
    sq = sqrt(sq / (double)n) + 1e-30;
    diff_sq = sqrt(diff_sq / (double)n) / sq;
    max /= sq;
    if (finite && diff_sq > g->rms)
        g->rms = diff_sq;
    if (finite && max > g->max)
        g->max = max;
    if (n / width >= 16) {
        typical = typical_row(got, want, n / width, width) / sq;
        g->judged++;
        g->untypical += !(typical <= l.typical);
        g->loose = l.loose > 0 ? l.loose : 0.1;
    }
    if (finite && typical > g->typical)
        g->typical = typical;
    check(finite && diff_sq <= l.rms && max <= l.max, name,
          "off by %.1e in the typical row, rms %.1e (limit %.0e), at most %.1e (%.0e) at row %lld, column %lld: %g, "
          "not %g%s",
          typical, diff_sq, l.rms, max, l.max, (long long)(at / width), (long long)(at % width), (double)got[at],
          (double)want[at], finite ? "" : "; not all are finite");
}

int report_end(const char *program)
{
    snprintf(report_place, sizeof(report_place), "all nets");
    for (int i = 0; i < n_groups; i++)
        if (groups[i].judged >= 10)
            check((double)groups[i].untypical <= groups[i].loose * (double)groups[i].judged, groups[i].name,
                  "the typical row is off in %ld of %ld comparisons (limit %g)", groups[i].untypical, groups[i].judged,
                  groups[i].loose * (double)groups[i].judged);
    printf("%-32s %8s %8s %10s %10s %10s %10s\n", "worst relative differences", "checks", "failed", "untypical",
           "typical", "rms", "largest");
    for (int i = 0; i < n_groups; i++)
        printf("%-32s %8ld %8ld %10ld %10.1e %10.1e %10.1e\n", groups[i].name, groups[i].n, groups[i].failed,
               groups[i].untypical, groups[i].typical, groups[i].rms, groups[i].max);
    printf("%s: %ld checks, %ld failed\n", program, n_checks, n_failed);
    return n_failed ? 1 : 0;
}
