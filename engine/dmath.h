/* engine/dmath.h - the few double-precision functions that tables and start states need, made of +, -, *, / alone.
 *
 * A C library's sin or pow may round differently from the next one's; these give the same bits everywhere, so that a rope
 * table or a random start state never depends on the machine. Errors are below 1e-14 (relative; absolute for sine and cosine),
 * far under the F32 rounding that follows. Not for the inner loops.
 * Thread: any. */
#ifndef TL_DMATH_H
#define TL_DMATH_H

double tl_dexp2(double x);                               /* |x| <= 1000 */
double tl_dlog2(double x);                               /* normal x > 0 */
void tl_dsincos(double x, double *sine, double *cosine); /* |x| <= 2^24 */

#endif
