/* target.h - sets the instruction set for the functions of a file, for gcc and clang: KVC_TARGET(list) after including
 * this header, KVC_TARGET_END at the end. System headers are included here, because clang would otherwise apply the
 * target to their functions again. */
#ifndef KVC_TARGET_H
#define KVC_TARGET_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define KVC_PRAGMA(...) _Pragma(#__VA_ARGS__)
/* Unrolls the following loop, of at most 4 iterations, completely. */
#if defined(__clang__)
#define KVC_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KVC_UNROLL _Pragma("GCC unroll 4")
#endif
#if defined(__clang__)
#define KVC_TARGET(list) KVC_PRAGMA(clang attribute push(__attribute__((target(list))), apply_to = function))
#define KVC_TARGET_END KVC_PRAGMA(clang attribute pop)
#else
#define KVC_TARGET(list) KVC_PRAGMA(GCC target(list))
#define KVC_TARGET_END
#endif

#endif
