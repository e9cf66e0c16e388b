/* attend_kernels.h - attention kernels that the level tables point to. */
#ifndef KVC_ATTEND_KERNELS_H
#define KVC_ATTEND_KERNELS_H

#include "../dispatch.h"
#include "kernels.h"

float kvc_scalar_softmax(float *s, int64_t n16, const uint64_t *visible, float softcap, float *m, float *l);

#if defined(__x86_64__)
kvc_qk_fn kvc_avx512_qk_raw_f32, kvc_avx512_qk_raw_f16, kvc_avx512_qk_raw_bf16, kvc_avx512_qk_int8,
    kvc_avx512_qk_fp8_e4m3, kvc_avx512_qk_int4;
kvc_pv_fn kvc_avx512_pv_raw_f32, kvc_avx512_pv_raw_f16, kvc_avx512_pv_raw_bf16, kvc_avx512_pv_int8,
    kvc_avx512_pv_fp8_e4m3, kvc_avx512_pv_int4;
#endif

#endif
