/* tests/cuda/report.h - what is checked, counted by kind, with the worst differences seen. Thread: one. */
#ifndef REPORT_H
#define REPORT_H

#include <stdbool.h>
#include <stdint.h>

/* Tolerances of one op on equal inputs. Where the op rounds its input (to BF16, to int8, keys and values to F16), two devices
 * round one way until a value lies so near to a border that the 1e-7 between them decide: one input then differs by 2^-8 of
 * itself or 1/127 of the row's largest, and later rows see it through attention. Such rows are few, so two things are asked: in
 * 9 of 10 comparisons the typical row (the median, of 16 rows or more) is as near as in F32, and no row is ever further off
 * than some such steps. A wrong rule moves every row of every comparison. With --noise 2e-7, three times what two devices differ
 * by, 1 of 200 is not typical, and the worst seen are 5e-3, 1.4e-2 and 1e-1. */
struct limits {
    double typical, rms, max; /* all relative to the root mean square of the wanted values */
    double loose;             /* of comparisons of 16 rows or more, so many may have another typical row; 0 = 0.1 */
};

extern bool report_all;        /* print also what holds */
extern char report_place[160]; /* which net is looked at; part of every message */

/* One check of the kind `name`, a constant string; the message is printed if it fails (the first few of a kind). */
__attribute__((format(printf, 3, 4))) void check(bool ok, const char *name, const char *fmt, ...);
/* Equal bits of n floats, in rows of `width`. */
void check_same(const char *name, const float *a, const float *b, int64_t n, int64_t width);
void check_near(const char *name, const float *got, const float *want, int64_t n, int64_t width, struct limits l);
/* The table and "PROGRAM: N checks, M failed"; the exit status. */
int report_end(const char *program);

#endif
