#include "dmath.h"

#include <stdint.h>
#include <string.h>

/* 2^k for -1022 <= k <= 1023, from the exponent field. */
static double power_of_two(int k)
{
    uint64_t bits = (uint64_t)(k + 1023) << 52;
    double d;
    memcpy(&d, &bits, sizeof(d));
    return d;
}

static int nearest(double x) { return (int)(x < 0 ? x - 0.5 : x + 0.5); }

double tl_dexp2(double x)
{
    int k = nearest(x);
    double t = (x - k) * 0.69314718055994530942, term = 1, sum = 1;
    /* |t| <= 0.347: fourteen terms of exp's series leave 1e-18. */
    for (int i = 1; i <= 14; i++) {
        term = term * t / i;
        sum += term;
    }
    return sum * power_of_two(k);
}

double tl_dlog2(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof(bits));
    int k = (int)(bits >> 52) - 1023;
    double m = x / power_of_two(k);
    if (m > 1.4142135623730951) {
        m /= 2;
        k++;
    }
    /* ln m = 2 artanh(z), z = (m - 1) / (m + 1), |z| <= 0.172. */
    double z = (m - 1) / (m + 1), zz = z * z, power = z, sum = 0;
    for (int i = 1; i <= 23; i += 2) {
        sum += power / i;
        power *= zz;
    }
    return k + 2 * sum * 1.44269504088896340736;
}

void tl_dsincos(double x, double *sine, double *cosine)
{
    /* pi/2 in three parts of 29, 29 and 53 bits: k times the first two is exact while k < 2^24. */
    static const double pio2_a = 0x1.921fb54000000p+0, pio2_b = 0x1.10b4611000000p-30, pio2_c = 0x1.4c4c6628b80dcp-59;
    int k = nearest(x * 0.63661977236758134308);
    double r = ((x - k * pio2_a) - k * pio2_b) - k * pio2_c, rr = r * r;
    double s = 0, c = 0, term = r;
    /* |r| <= 0.786: the series to r^18 leave 1e-19. */
    for (int i = 1; i <= 17; i += 2) {
        s += term;
        term = -term * rr / ((i + 1) * (i + 2));
    }
    term = 1;
    for (int i = 0; i <= 18; i += 2) {
        c += term;
        term = -term * rr / ((i + 1) * (i + 2));
    }
    *sine = k & 1 ? (k & 2 ? -c : c) : (k & 2 ? -s : s);
    *cosine = k & 1 ? (k & 2 ? s : -s) : (k & 2 ? -c : c);
}
