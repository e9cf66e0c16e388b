/* neon.h - shared by the NEON files. A tile's word for 16 tokens takes four registers; a lane is a token (K) or a dim
 * (V). Kernels process blocks of 8 lanes ("halves" of a tile) in two registers each. */
#ifndef KVC_NEON_H
#define KVC_NEON_H

#include "attend_kernels.h"

#include <arm_neon.h>
#include <math.h>
#include <string.h>

/* The digits of a number are 128 * hi + lo, lo in 0..127. A register holds two columns of eight: hi and lo of a row's
 * numbers i to i + 7, or with one limb those numbers of two rows. For each i, the registers of KVC_ROWS rows follow
 * each other. */
INLINE const int8_t *kvc_neon_digits(const kvc_query_form *f, int64_t row0, int64_t dim)
{
    return f->hi + 2 * row0 * dim;
}

/* Softmax weights of a page as integers, for integer V, relative to the row's largest weight in the page. */
typedef struct weights {
    int8_t digits[KVC_MAX_PAGE / 8 * KVC_ROWS * 16];
    float step[KVC_ROWS];
    int32_t sum[KVC_ROWS];
} weights;

/* Loads 4 fp16 scales, of tokens (or dims) from `at`. */
INLINE float32x4_t kvc_scales(const uint8_t *meta, int64_t at)
{
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(meta + 2 * at)));
}

/* Widens 8 fp16 to two registers of fp32. */
INLINE void kvc_widen(uint16x8_t h, float32x4_t *a, float32x4_t *b)
{
    *a = vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(h)));
    *b = vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(h)));
}

/* Mask of the first n lanes. */
INLINE uint32x4_t kvc_first(int64_t n)
{
    static const int32_t index[4] = {0, 1, 2, 3};
    return vcltq_s32(vld1q_s32(index), vdupq_n_s32((int32_t)n));
}

INLINE void kvc_add_to(float *o, float32x4_t x) { vst1q_f32(o, vaddq_f32(x, vld1q_f32(o))); }

/* exp(x) for x up to KVC_SLACK (and -inf), as 2^floor(y) * 2^f. Relative error < 3e-7 + 6e-8 * |x|; of 2^f alone 1e-7
 * (degree 5, minimax with 2^0 = 1). 0 below 2^-126; NaN stays NaN. */
INLINE float32x4_t kvc_exp(float32x4_t x)
{
    float32x4_t y = vmaxq_f32(vdupq_n_f32(-127), vmulq_n_f32(x, 1.44269504f)); /* n = -127 makes 2^n 0 */
    float32x4_t n = vrndmq_f32(y), f = vsubq_f32(y, n), p = vdupq_n_f32(.00186713005f);
    p = vfmaq_f32(vdupq_n_f32(.00901703071f), p, f);
    p = vfmaq_f32(vdupq_n_f32(.0557999127f), p, f);
    p = vfmaq_f32(vdupq_n_f32(.240164444f), p, f);
    p = vfmaq_f32(vdupq_n_f32(.693151295f), p, f);
    p = vfmaq_f32(vdupq_n_f32(1), p, f);
    int32x4_t e = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    return vmulq_f32(p, vreinterpretq_f32_s32(e));
}

void kvc_neon_limbs(const kvc_query_form *form, int64_t rows, int64_t dim);
void kvc_neon_softmax(float *s, int64_t ld, int64_t rows, int64_t n16, const uint64_t (*visible)[KVC_WORDS],
                      float softcap, float *m, float *l, float *keep);
void kvc_neon_factors(float *m, const float *lse, int64_t n);
/* Weights p times scales, for tokens [0, n). The scales are fp16 at `meta`, or fp32; the other pointer is NULL. */
void kvc_neon_weigh(weights *w, const float *p, int64_t ld, int64_t rows, int64_t n, const uint8_t *meta,
                    const float *scales);
/* q . centroid of the page, for each row. */
void kvc_neon_dot_centroid(const uint8_t *centroid, const kvc_query *query, int64_t row0, int64_t rows, float *out);
/* True if one limb of q is precise enough for this page of 4- or 2-bit codes (kvc_one_limb_of). */
bool kvc_neon_one_limb(int bits, const uint8_t *meta, const kvc_query *query, int64_t row0, int64_t rows,
                       int64_t n_tiles);

/* bf16: the level whose bf16 kernels it uses. */
#define KVC_NEON_TABLE(isa, bf16)                                                                                      \
    .encode = kvc_neon_encode, .rotate = kvc_neon_rotate, .limbs = kvc_neon_limbs, .softmax = kvc_neon_softmax,        \
    .factors = kvc_neon_factors, .keep = kvc_keep, .sum_rows = kvc_sum_rows, .affine = kvc_##isa##_affine,             \
    .qk_affine = kvc_##isa##_qk_affine, .pv_affine = kvc_##isa##_pv_affine, .tile = &kvc_neon_tile,                    \
    KVC_NEON_FLOATS(KVC_ENTRY, neon) KVC_NEON_BF16(KVC_ENTRY, bf16) KVC_NEON_INTS(KVC_ENTRY, isa)

#endif
