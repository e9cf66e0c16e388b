/* levels.h - the levels that are compiled in. */
#ifndef KVC_LEVELS_H
#define KVC_LEVELS_H

#include "base/dispatch.h"

extern const kvc_kernels kvc_kernels_scalar;

#if defined(__x86_64__)
extern const kvc_kernels kvc_kernels_avx2, kvc_kernels_avx512, kvc_kernels_avx512bf16;
#if __GNUC__ >= 11 || __clang_major__ >= 12
#define KVC_HAS_AVXVNNI /* the assembler of the time knows it */
extern const kvc_kernels kvc_kernels_avxvnni;
#define KVC_HAS_AMX
extern const kvc_kernels kvc_kernels_amx;
bool kvc_amx_usable(void); /* the CPU has it, and the system lets this process use it */
#endif
#elif defined(__aarch64__)
extern const kvc_kernels kvc_kernels_neon;
#if !defined(__clang__) ||                                                                                             \
    __clang_major__ >= 16 /* older ones know the intrinsics only where the whole file may use them */
#define KVC_HAS_DOTPROD
extern const kvc_kernels kvc_kernels_dotprod, kvc_kernels_i8mm;
#endif
#endif

#endif
