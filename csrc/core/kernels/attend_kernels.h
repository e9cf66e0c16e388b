/* attend_kernels.h - attention kernels that the level tables point to, and how the vector levels cut their work. */
#ifndef KVC_ATTEND_KERNELS_H
#define KVC_ATTEND_KERNELS_H

#include "../dispatch.h"
#include "kernels.h"

float kvc_scalar_softmax(float *s, int64_t n16, const uint64_t *visible, float softcap, float *m, float *l);

#if defined(__x86_64__)
#define KVC_LEVEL_KERNELS(isa)                                                                                         \
    kvc_qk_fn kvc_##isa##_qk_raw_f32, kvc_##isa##_qk_raw_f16, kvc_##isa##_qk_raw_bf16, kvc_##isa##_qk_int8,            \
        kvc_##isa##_qk_int4, kvc_##isa##_qk_fp8_e4m3, kvc_##isa##_qk_fp8_e5m2;                                         \
    kvc_pv_fn kvc_##isa##_pv_raw_f32, kvc_##isa##_pv_raw_f16, kvc_##isa##_pv_raw_bf16, kvc_##isa##_pv_int8,            \
        kvc_##isa##_pv_int4, kvc_##isa##_pv_fp8_e4m3, kvc_##isa##_pv_fp8_e5m2;                                         \
    kvc_affine_fn kvc_##isa##_affine;                                                                                  \
    kvc_qk_affine_fn kvc_##isa##_qk_affine;                                                                            \
    kvc_pv_affine_fn kvc_##isa##_pv_affine;
KVC_LEVEL_KERNELS(avx2)
KVC_LEVEL_KERNELS(avx512)
#endif

#define INLINE static inline __attribute__((always_inline))
#define EACH(r, n) for (int r = 0; r < (n); r++)

/* CALL(NR, N) from `at` = 0 to `end`, with constant counts of rows and of blocks (tiles, or dims) of `unit`: few rows
 * take N1, N2 or N4 blocks at once to keep enough sums in flight. */
#define KVC_BLOCKS(CALL, NR, N, end, unit)                                                                             \
    for (; at + (N) * (unit) <= (end); at += (N) * (unit)) CALL(NR, N);                                                \
    for (; at < (end); at += (unit)) CALL(NR, 1);
#define KVC_BY_ROWS(CALL, rows, end, unit, N1, N2, N4)                                                                 \
    int64_t at = 0;                                                                                                    \
    switch (rows) {                                                                                                    \
    case 1: KVC_BLOCKS(CALL, 1, N1, end, unit) break;                                                                  \
    case 2: KVC_BLOCKS(CALL, 2, N2, end, unit) break;                                                                  \
    case 3: KVC_BLOCKS(CALL, 3, N4, end, unit) break;                                                                  \
    default: KVC_BLOCKS(CALL, 4, N4, end, unit)                                                                        \
    }

#endif
