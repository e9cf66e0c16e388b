/* levels.c - which levels there are for this architecture, worst first, and what each asks of the CPU. */
#include "levels.h"

static bool always(void) { return true; }

#if defined(__x86_64__)
#include <cpuid.h>

/* By CPUID, and XGETBV for the registers that the system saves: not every compiler's library fills in what
 * __builtin_cpu_supports reads (zig's does not). */
enum { EAX, EBX, ECX, EDX, YMM = 0x6, ZMM = 0xe6, TILES = 0x60000 };
static const struct {
    const char *name;
    unsigned leaf, subleaf, reg, bit, saved;
} features[] = {
    {"avx2", 7, 0, EBX, bit_AVX2, YMM},
    {"fma", 1, 0, ECX, bit_FMA, YMM},
    {"f16c", 1, 0, ECX, bit_F16C, YMM},
    {"avx512f", 7, 0, EBX, bit_AVX512F, ZMM},
    {"avx512bw", 7, 0, EBX, bit_AVX512BW, ZMM},
    {"avx512vl", 7, 0, EBX, bit_AVX512VL, ZMM},
    {"avx512dq", 7, 0, EBX, bit_AVX512DQ, ZMM},
    {"avx512vnni", 7, 0, ECX, bit_AVX512VNNI, ZMM},
    {"avx512vbmi", 7, 0, ECX, bit_AVX512VBMI, ZMM},
    {"avx512bf16", 7, 1, EAX, bit_AVX512BF16, ZMM},
    {"avxvnni", 7, 1, EAX, 1u << 4, YMM},
    {"amxbf16", 7, 0, EDX, 1u << 22, TILES},
    {"amxint8", 7, 0, EDX, 1u << 25, TILES},
};

const char *kvc_cpu_feature(int i, bool *there)
{
    unsigned x[4], saved = 0, high;
    if (i < 0 || i >= (int)(sizeof features / sizeof *features)) return NULL;
    *there = false;
    if (__get_cpuid(1, &x[EAX], &x[EBX], &x[ECX], &x[EDX]) && x[ECX] & bit_OSXSAVE)
        __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (__get_cpuid_count(features[i].leaf, features[i].subleaf, &x[EAX], &x[EBX], &x[ECX], &x[EDX]))
        *there = x[features[i].reg] & features[i].bit && (saved & features[i].saved) == features[i].saved;
    return features[i].name;
}

/* Whether the CPU has the first n features. */
static bool has_first(int n)
{
    bool there = true;
    for (int i = 0; i < n && there; i++) kvc_cpu_feature(i, &there);
    return there;
}

static bool avx2(void) { return has_first(3); }
static bool avx512(void) { return has_first(8); }
#if defined(KVC_AVXVNNI_MODEL) /* see avxvnni_ints.h */
static bool avxvnni(void) { return avx512(); }
#elif defined(KVC_HAS_AVXVNNI)
static bool avxvnni(void)
{
    bool there = false;
    kvc_cpu_feature(10, &there);
    return there && avx2();
}
#endif
static bool avx512bf16(void) { return has_first(10); }

#ifdef KVC_HAS_AMX
static bool amx(void) { return avx512bf16() && kvc_amx_usable(); }
#endif

#else
const char *kvc_cpu_feature(int i, bool *there)
{
    (void)i, (void)there;
    return NULL;
}
#endif

#if defined(__aarch64__) && defined(KVC_HAS_DOTPROD)
#if defined(__linux__)
#include <sys/auxv.h>

/* <asm/hwcap.h> */
static bool dotprod(void) { return getauxval(AT_HWCAP) >> 20 & 1; }                   /* HWCAP_ASIMDDP */
static bool i8mm(void) { return dotprod() && (getauxval(AT_HWCAP2) >> 13 & 3) == 3; } /* HWCAP2_I8MM, HWCAP2_BF16 */

#elif defined(__APPLE__)
#include <sys/sysctl.h>

static bool has(const char *name)
{
    int yes = 0;
    size_t size = sizeof yes;
    return sysctlbyname(name, &yes, &size, NULL, 0) == 0 && yes;
}
static bool dotprod(void) { return has("hw.optional.arm.FEAT_DotProd"); }
static bool i8mm(void) { return dotprod() && has("hw.optional.arm.FEAT_I8MM") && has("hw.optional.arm.FEAT_BF16"); }

#else
static bool dotprod(void) { return false; }
static bool i8mm(void) { return false; }
#endif
#endif

const kvc_level kvc_levels[] = {
    {&kvc_kernels_scalar, always},
#if defined(__x86_64__)
    {&kvc_kernels_avx2, avx2},
#ifdef KVC_HAS_AVXVNNI
    {&kvc_kernels_avxvnni, avxvnni},
#endif
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
