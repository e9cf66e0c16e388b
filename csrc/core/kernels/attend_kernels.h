/* attend_kernels.h - the attention kernels in the tables of the levels, and how vector levels tile their work. */
#ifndef KVC_ATTEND_KERNELS_H
#define KVC_ATTEND_KERNELS_H

#include "base/dispatch.h"
#include "kernels.h"

#include <math.h>

/* levels * the sum of a row's weights; wraps around if the weights contain NaN. */
static inline int32_t kvc_times(int32_t levels, int32_t sum) { return (int32_t)((uint32_t)levels * (uint32_t)sum); }

/* value of KIND for 4-bit codes of Lloyd-Max levels */
#define KVC_LLOYD4 20
/* Those levels (kvc_lloyd_level) plus 128: like int8 codes. */
static const uint8_t kvc_lloyd4_codes[16] = {1, 32, 53, 70, 84, 97, 110, 122, 134, 146, 159, 172, 186, 203, 224, 255};

/* Mask of the bytes of a word that hold the first n of its four tokens, 0 < n < 4. The others may hold anything, which
 * in e5m2 includes NaN. */
static inline int32_t kvc_stored_bytes(int64_t n) { return (int32_t)((1u << (8 * n)) - 1); }

/* CALL(isa, function, format) for the formats with kernels of their own at a vector level. KVC_BF16_KERNELS: formats
 * for which levels with bf16 products have better ones. Kernels of int2 also serve cal2. */
#define KVC_FLOAT_KERNELS(CALL, isa) CALL(isa, raw_f32, RAW_F32) CALL(isa, raw_f16, RAW_F16)
#define KVC_INT_KERNELS(CALL, isa)                                                                                     \
    CALL(isa, int8, INT8)                                                                                              \
    CALL(isa, int4, INT4)                                                                                              \
    CALL(isa, int3, INT3) CALL(isa, int2, INT2) CALL(isa, int4_lloyd, INT4_LLOYD) CALL(isa, int2, CAL2)
#define KVC_COMMON_KERNELS(CALL, isa) KVC_FLOAT_KERNELS(CALL, isa) KVC_INT_KERNELS(CALL, isa)
#define KVC_FP8_KERNELS(CALL, isa) CALL(isa, fp8_e4m3, FP8_E4M3) CALL(isa, fp8_e5m2, FP8_E5M2)
#define KVC_BF16_KERNELS(CALL, isa) CALL(isa, raw_bf16, RAW_BF16) KVC_FP8_KERNELS(CALL, isa)
#define KVC_OWN_KERNELS(CALL, isa) KVC_COMMON_KERNELS(CALL, isa) KVC_BF16_KERNELS(CALL, isa)
#define KVC_DECLARE(isa, name, ID)                                                                                     \
    kvc_qk_fn kvc_##isa##_qk_##name;                                                                                   \
    kvc_pv_fn kvc_##isa##_pv_##name;
#define KVC_ENTRY(isa, name, ID) .qk[KVC_##ID] = kvc_##isa##_qk_##name, .pv[KVC_##ID] = kvc_##isa##_pv_##name,
#if defined(__x86_64__)
KVC_OWN_KERNELS(KVC_DECLARE, avx2)
KVC_INT_KERNELS(KVC_DECLARE, avxvnni)
KVC_OWN_KERNELS(KVC_DECLARE, avx512)
KVC_BF16_KERNELS(KVC_DECLARE, avx512bf16)
#define KVC_AMX_KERNELS(CALL, isa)                                                                                     \
    KVC_BF16_KERNELS(CALL, isa) CALL(isa, int8, INT8) CALL(isa, int4, INT4) CALL(isa, int2, INT2) CALL(isa, int2, CAL2)
KVC_AMX_KERNELS(KVC_DECLARE, amx)
kvc_qk_fn kvc_amx_qk_many_int8;
kvc_pv_fn kvc_amx_pv_many_int8, kvc_amx_pv_many_int4, kvc_amx_pv_many_int2;
bool kvc_avx512bf16_halves(const kvc_query_form *form, int64_t rows, int64_t dim);
void kvc_avx512_limbs(const kvc_query_form *form, int64_t rows, int64_t dim);
void kvc_avx512_softmax(float *s, int64_t ld, int64_t rows, int64_t n16, const uint64_t (*visible)[KVC_WORDS],
                        float softcap, float *m, float *l, float *keep);
void kvc_avx512_factors(float *m, const float *lse, int64_t n);
void kvc_avx2_softmax(float *s, int64_t ld, int64_t rows, int64_t n16, const uint64_t (*visible)[KVC_WORDS],
                      float softcap, float *m, float *l, float *keep);
void kvc_avx2_factors(float *m, const float *lse, int64_t n);
kvc_affine_fn kvc_avx2_affine, kvc_avxvnni_affine, kvc_avx512_affine;
kvc_qk_affine_fn kvc_avx2_qk_affine, kvc_avxvnni_qk_affine, kvc_avx512_qk_affine;
kvc_pv_affine_fn kvc_avx2_pv_affine, kvc_avxvnni_pv_affine, kvc_avx512_pv_affine;
extern const kvc_panel_kernels kvc_avx512_panel;
/* Shared by all AVX-512 levels. Include after accumulated.h. */
#define KVC_AVX512_TABLE                                                                                               \
    .encode = kvc_avx512_encode, .rotate = kvc_avx512_rotate, .limbs = kvc_avx512_limbs,                               \
    .softmax = kvc_avx512_softmax, .factors = kvc_avx512_factors, .keep = kvc_keep, .sum_rows = kvc_sum_rows,          \
    .panel = &kvc_avx512_panel, .affine = kvc_avx512_affine, .qk_affine = kvc_avx512_qk_affine,                        \
    .pv_affine = kvc_avx512_pv_affine, .tile = &kvc_avx512_tile
#elif defined(__aarch64__)
#define KVC_NEON_FLOATS(CALL, isa) CALL(isa, raw_f32, RAW_F32) CALL(isa, raw_f16, RAW_F16) CALL(isa, fp8_e5m2, FP8_E5M2)
#define KVC_NEON_BF16(CALL, isa) CALL(isa, raw_bf16, RAW_BF16) CALL(isa, fp8_e4m3, FP8_E4M3)
#define KVC_NEON_INTS(CALL, isa)                                                                                       \
    CALL(isa, int8, INT8)                                                                                              \
    CALL(isa, int4, INT4) CALL(isa, int3, INT3) CALL(isa, int2, INT2) CALL(isa, int2, CAL2)
KVC_NEON_FLOATS(KVC_DECLARE, neon)
KVC_NEON_BF16(KVC_DECLARE, neon)
KVC_NEON_BF16(KVC_DECLARE, i8mm)
bool kvc_i8mm_halves(const kvc_query_form *form, int64_t rows, int64_t dim);
KVC_NEON_INTS(KVC_DECLARE, neon)
KVC_NEON_INTS(KVC_DECLARE, dotprod)
KVC_NEON_INTS(KVC_DECLARE, i8mm)
kvc_affine_fn kvc_neon_affine, kvc_dotprod_affine, kvc_i8mm_affine;
kvc_qk_affine_fn kvc_neon_qk_affine, kvc_dotprod_qk_affine, kvc_i8mm_qk_affine;
kvc_pv_affine_fn kvc_neon_pv_affine, kvc_dotprod_pv_affine, kvc_i8mm_pv_affine;
#endif

#define INLINE static inline __attribute__((always_inline))

/* Prefetches line `i` of the page that is `ahead` bytes after `from` (0: none) to L2; the next page does not fit in L1.
 * Lines are requested in ascending order, whatever the order of loads, because hardware prefetchers recognize only
 * that. */
INLINE void kvc_prefetch(const uint8_t *from, int64_t i, ptrdiff_t ahead)
{
    if (ahead) __builtin_prefetch(from + ahead + 64 * i, 0, 2);
}
/* The same for kernels that process planes line by line; a 3-bit page has half as many lines of high bits. */
INLINE void kvc_prefetch_planes(int KIND, const uint8_t *from, int64_t i, ptrdiff_t ahead)
{
    kvc_prefetch(from, KIND == 3 ? i * 3 / 2 : i, ahead);
    if (KIND == 3 && i % 2) kvc_prefetch(from, i * 3 / 2 + 1, ahead);
}
/* For codes of KIND: bits per code in the planes (the low bits if there are 3), and bytes per tile. */
INLINE int kvc_plane_bits(int KIND) { return KIND == KVC_LLOYD4 ? 4 : KIND == 3 ? 2 : KIND; }
INLINE int64_t kvc_kind_bytes(int KIND, int64_t dim) { return KVC_TILE * dim * (KIND == KVC_LLOYD4 ? 4 : KIND) / 8; }
#define EACH(r, n) for (int r = 0; r < (n); r++)

/* True if using one limb of q changes no score by more than `noise`, for a page whose largest gain is `most`. Rounding
 * q to 8 bits adds an error of standard deviation step / sqrt(12) * |k| to a score, where |k| is the gain * the rms of
 * the levels * sqrt(D). False for NaN. */
INLINE bool kvc_one_limb_of(int KIND, float noise, const kvc_query *query, int64_t row0, int64_t rows, float most)
{
    const float *steps = query->form->step + row0;
    float step = 0, levels = KIND == KVC_LLOYD4 ? 47 : KIND == 4 ? 1 / .33f : KIND == 3 ? 1 / .58f : 1.04f;
    for (int64_t r = 0; r < rows; r++) step = step > steps[r] ? step : steps[r];
    return 128 * step * most * levels * sqrtf((float)query->dim / 12) <= noise;
}

/* Runs CALL(NR, N) from `at` = 0 to `end`, with compile-time numbers of rows and of blocks (tiles or dims) of `unit`.
 * With few rows, N1, N2 or N4 blocks are processed together to keep enough independent sums in flight. */
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
