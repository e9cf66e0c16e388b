/* levels.h - the levels that this build includes. */
#ifndef KVC_LEVELS_H
#define KVC_LEVELS_H

#include "base/dispatch.h"

extern const kvc_kernels kvc_kernels_scalar;

#if defined(__x86_64__)
extern const kvc_kernels kvc_kernels_avx2, kvc_kernels_avx512, kvc_kernels_avx512bf16;
#if __GNUC__ >= 11 || __clang_major__ >= 12
#define KVC_HAS_AVXVNNI /* supported by assemblers of that age */
extern const kvc_kernels kvc_kernels_avxvnni;
#define KVC_HAS_AMX
extern const kvc_kernels kvc_kernels_amx;
bool kvc_amx_usable(void); /* whether the CPU has AMX and the system lets this process use it */
#endif
#elif defined(__aarch64__)
extern const kvc_kernels kvc_kernels_neon;
/* older clang declares the intrinsics only if the whole file is compiled for the target */
#if !defined(__clang__) || __clang_major__ >= 16
#define KVC_HAS_DOTPROD
extern const kvc_kernels kvc_kernels_dotprod, kvc_kernels_i8mm;
#endif
#endif

#endif
