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

#elif defined(__aarch64__) && defined(KVC_HAS_DOTPROD)
#if defined(__linux__)
#include <sys/auxv.h>

/* <asm/hwcap.h> */
static bool dotprod(void) { return getauxval(AT_HWCAP) >> 20 & 1; }              /* HWCAP_ASIMDDP */
static bool i8mm(void) { return dotprod() && (getauxval(AT_HWCAP2) >> 13 & 1); } /* HWCAP2_I8MM */

#elif defined(__APPLE__)
#include <sys/sysctl.h>

static bool has(const char *name)
{
    int yes = 0;
    size_t size = sizeof yes;
    return sysctlbyname(name, &yes, &size, NULL, 0) == 0 && yes;
}
static bool dotprod(void) { return has("hw.optional.arm.FEAT_DotProd"); }
static bool i8mm(void) { return dotprod() && has("hw.optional.arm.FEAT_I8MM"); }

#else
static bool dotprod(void) { return false; }
static bool i8mm(void) { return false; }
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
#elif defined(__aarch64__)
    {&kvc_kernels_neon, always},
#ifdef KVC_HAS_DOTPROD
    {&kvc_kernels_dotprod, dotprod},
    {&kvc_kernels_i8mm, i8mm},
#endif
#endif
    {NULL, NULL},
};
