/* dispatch.c - picks the kernel level once. */
#include "dispatch.h"
#include "base/status.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define LEVELS 5

static const kvc_kernels *available[LEVELS + 1]; /* best last, NULL at the end */
static const kvc_kernels *chosen;                /* NULL: KVCOMPRESS_ISA is wrong */
static pthread_once_t once = PTHREAD_ONCE_INIT;

#if defined(__x86_64__)
/* F16C by CPUID: gcc knows its name only since 11. That the system saves the registers is part of its AVX2 test. */
static int has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

static void choose(void)
{
    const char *wanted = getenv("KVCOMPRESS_ISA");
    int n = 0;
    available[n++] = &kvc_kernels_scalar;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
        available[n++] = &kvc_kernels_avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
        available[n++] = &kvc_kernels_avx512;
        if (__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16")) {
            available[n++] = &kvc_kernels_avx512bf16;
#ifdef KVC_HAS_AMX
            if (kvc_amx_usable()) available[n++] = &kvc_kernels_amx;
#endif
        }
    }
#endif
    if (!wanted || !*wanted)
        chosen = available[n - 1];
    else
        for (int i = 0; i < n; i++)
            if (!strcmp(wanted, available[i]->name)) chosen = available[i];
}

const kvc_kernels *kvc_kernels_get(void)
{
    pthread_once(&once, choose);
    return chosen;
}

const char *kvc_isa_available(int i)
{
    pthread_once(&once, choose);
    return i >= 0 && i < LEVELS && available[i] ? available[i]->name : NULL;
}

kvc_status kvc_isa(const char **name)
{
    const kvc_kernels *kernels = kvc_kernels_get();
    int best = 0;
    while (available[best + 1]) best++;
    KVC_CHECK(kernels, KVC_E_VALUE,
              "KVCOMPRESS_ISA: wanted a level that is compiled in and runs on this CPU "
              "(best: %s), got '%s'; unset it to take the best",
              available[best]->name, getenv("KVCOMPRESS_ISA") ? getenv("KVCOMPRESS_ISA") : "");
    *name = kernels->name;
    return KVC_OK;
}
