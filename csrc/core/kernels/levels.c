/* levels.c - which levels there are for this architecture, worst first, and what each asks of the CPU. */
#include "levels.h"

static bool always(void) { return true; }

#if defined(__x86_64__)
#include <cpuid.h>

/* F16C by CPUID: gcc knows its name only since 11. That the system saves the registers is part of its AVX2 test. */
static bool avx2(void)
{
    unsigned a, b, c, d;
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           c & bit_F16C;
}

static bool avx512(void)
{
    return avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

static bool avx512bf16(void)
{
    return avx512() && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
}

#ifdef KVC_HAS_AMX
static bool amx(void) { return avx512bf16() && kvc_amx_usable(); }
#endif
#endif

const kvc_level kvc_levels[] = {
    {&kvc_kernels_scalar, always},
#if defined(__x86_64__)
    {&kvc_kernels_avx2, avx2},
    {&kvc_kernels_avx512, avx512},
    {&kvc_kernels_avx512bf16, avx512bf16},
#ifdef KVC_HAS_AMX
    {&kvc_kernels_amx, amx},
#endif
#endif
    {NULL, NULL},
};
