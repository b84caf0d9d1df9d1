/* Which instruction set level runs. The only place that asks the processor. */
#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>

static bool has_f16c(void) /* a name that not every compiler's __builtin_cpu_supports knows */
{
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static enum tl_cpu_level g_forced = TL_CPU_LEVELS;

bool tl_cpu_has_level(enum tl_cpu_level level)
{
#if defined(__x86_64__)
    bool avx2, avx512;
    __builtin_cpu_init();
    avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512vnni");
    return level == TL_CPU_SCALAR || (level == TL_CPU_AVX2 && avx2) || (level == TL_CPU_AVX512 && avx512);
#else
    return level == TL_CPU_SCALAR;
#endif
}

const struct tl_cpu_kernels *tl_cpu_kernels_of(enum tl_cpu_level level)
{
    if (!tl_cpu_has_level(level))
        return NULL;
    switch (level) {
#if defined(__x86_64__)
    case TL_CPU_AVX2: return &tl_cpu_kernels_avx2;
    case TL_CPU_AVX512: return &tl_cpu_kernels_avx512;
#endif
    default: return &tl_cpu_kernels_scalar;
    }
}

enum tl_cpu_level tl_cpu_level(void)
{
    if (g_forced != TL_CPU_LEVELS && tl_cpu_has_level(g_forced))
        return g_forced;
    if (tl_cpu_has_level(TL_CPU_AVX512))
        return TL_CPU_AVX512;
    return tl_cpu_has_level(TL_CPU_AVX2) ? TL_CPU_AVX2 : TL_CPU_SCALAR;
}

void tl_cpu_force_level(enum tl_cpu_level level) { g_forced = level; }
