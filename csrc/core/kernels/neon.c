/* neon.c - what every level with NEON has in common: online softmax, limbs of q, weights as integers. */
#if defined(__aarch64__)
#include "base/floats.h"
#include "neon.h"

#include <float.h>

/* tanh(x) = sign(x) * (1 - e) / (1 + e), e = exp(-2 |x|); an odd polynomial near 0, where that cancels. */
INLINE float32x4_t tanh_ps(float32x4_t x)
{
    float32x4_t a = vabsq_f32(x), square = vmulq_f32(x, x), one = vdupq_n_f32(1), e = kvc_exp(vmulq_n_f32(a, -2));
    float32x4_t far = vdivq_f32(vsubq_f32(one, e), vaddq_f32(one, e));
    far = vbslq_f32(vdupq_n_u32(0x80000000), x, far);
    float32x4_t near = vfmaq_f32(vdupq_n_f32(2.f / 15), square, vdupq_n_f32(-17.f / 315));
    near = vfmaq_f32(vdupq_n_f32(-1.f / 3), square, near);
    near = vfmaq_f32(x, vmulq_f32(square, near), x);
    return vbslq_f32(vcltq_f32(a, vdupq_n_f32(.15f)), near, far);
}

/* All ones in the lanes of tokens t..t+3 that are visible. */
INLINE uint32x4_t mask_of(const uint64_t *visible, int64_t t)
{
    static const uint32_t bit[4] = {1, 2, 4, 8};
    return vtstq_u32(vdupq_n_u32((uint32_t)(visible[t / 64] >> (t % 64) & 15)), vld1q_u32(bit));
}

/* A visible NaN, and a largest score of +Inf, make the sum and the factor NaN. */
INLINE float softmax_row(float *s, int64_t n16, const uint64_t *visible, float softcap, float *m, float *l)
{
    const float32x4_t none = vdupq_n_f32(-INFINITY);
    float32x4_t most = none, sum = vdupq_n_f32(0);
    for (int64_t t = 0; t < n16; t += 4) {
        uint32x4_t mask = mask_of(visible, t);
        float32x4_t x = vld1q_f32(s + t);
        if (softcap > 0) x = vmulq_n_f32(tanh_ps(vdivq_f32(x, vdupq_n_f32(softcap))), softcap);
        x = vbslq_f32(mask, x, none);
        vst1q_f32(s + t, x);
        most = vmaxnmq_f32(x, most); /* passes over NaN */
    }
    float top = fmaxf(fmaxf(*m, vmaxnmvq_f32(most)), -FLT_MAX); /* -inf - -FLT_MAX is no NaN */
    for (int64_t t = 0; t < n16; t += 4) {
        float32x4_t x = kvc_exp(vsubq_f32(vld1q_f32(s + t), vdupq_n_f32(top)));
        vst1q_f32(s + t, x);
        sum = vaddq_f32(sum, x);
    }
    float keep = top == *m ? 1 : expf(*m - top), total = vaddvq_f32(sum);
    *l = *l * keep + total;
    *m = top;
    return isnan(total) ? total : keep;
}

void kvc_neon_softmax(float *s, int64_t ld, int64_t rows, int64_t n16, const uint64_t (*visible)[KVC_WORDS],
                      float softcap, float *m, float *l, float *keep)
{
    for (int64_t r = 0; r < rows; r++) keep[r] = softmax_row(s + r * ld, n16, visible[r], softcap, m + r, l + r);
}

void kvc_neon_factors(float *m, const float *lse, int64_t n)
{
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t x = vsubq_f32(vld1q_f32(m + i), vld1q_f32(lse + i));
        vst1q_f32(m + i, kvc_exp(vminq_f32(x, vdupq_n_f32(0))));
    }
    for (; i < n; i++) m[i] = vgetq_lane_f32(kvc_exp(vdupq_n_f32(fminf(m[i] - lse[i], 0))), 0);
}

/* The largest magnitude, NaN if one is: as integers they are in that order. */
INLINE uint32x4_t grow(uint32x4_t most, float32x4_t x) { return vmaxq_u32(most, vreinterpretq_u32_f32(vabsq_f32(x))); }

/* 4 integers to bytes. */
INLINE void put_bytes(int8_t *to, int32x4_t z)
{
    int8x8_t x = vmovn_s16(vcombine_s16(vmovn_s32(z), vmovn_s32(z)));
    vst1_lane_s32((int32_t *)(void *)to, vreinterpret_s32_s8(x), 0);
}

void kvc_neon_limbs(const kvc_query_form *form, int64_t rows, int64_t dim)
{
    for (int64_t r = 0; r < rows; r++) {
        const float *q = form->q + r * dim;
        int8_t *hi = form->hi + r * dim, *lo = form->lo + r * dim, *one = form->one ? form->one + r * dim : NULL;
        uint32x4_t most = vdupq_n_u32(0);
        int32x4_t total = vdupq_n_s32(0), ones = total;
        for (int64_t d = 0; d < dim; d += 4) most = grow(most, vld1q_f32(q + d));
        float top = kvc_f32_of_bits(vmaxvq_u32(most)), factor = top > KVC_TINY ? KVC_P_LIMIT / top : 0;
        if (!(top < INFINITY)) factor = 0;
        for (int64_t d = 0; d < dim; d += 4) {
            float32x4_t x = vld1q_f32(q + d);
            int32x4_t z = factor > 0 ? vcvtnq_s32_f32(vmulq_n_f32(x, factor)) : vdupq_n_s32(0);
            int32x4_t rounded = vrshrq_n_s32(z, 7);
            total = vaddq_s32(total, z);
            ones = vaddq_s32(ones, rounded);
            put_bytes(hi + d, vshrq_n_s32(z, 7));
            put_bytes(lo + d, vandq_s32(z, vdupq_n_s32(127)));
            if (one) put_bytes(one + d, rounded);
        }
        if (one) form->one_sum[r] = vaddvq_s32(ones);
        form->step[r] = top < INFINITY ? top / KVC_P_LIMIT : NAN;
        form->sum[r] = vaddvq_s32(total);
    }
}

/* Eight floats times factor as integers below 2^15. */
static inline int16x8_t times_rounded(const float *x, float factor)
{
    int32x4_t a = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x), factor));
    int32x4_t b = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 4), factor));
    return vcombine_s16(vmovn_s32(a), vmovn_s32(b));
}

void kvc_neon_weigh(weights *w, const float *p, int64_t ld, int64_t rows, int64_t n, const uint8_t *meta,
                    const float *scales)
{
    static const int32_t index[4] = {0, 1, 2, 3};
    float x[KVC_MAX_PAGE];
    int64_t n16 = (n + KVC_TILE - 1) / KVC_TILE * KVC_TILE;
    for (int64_t r = 0; r < rows; r++) {
        uint32x4_t most = vdupq_n_u32(0);
        int32x4_t total = vdupq_n_s32(0);
        for (int64_t t = 0; t < n16; t += 4) { /* scales of tokens from n on may be anything: their weight is 0 */
            float32x4_t y = vmulq_f32(vld1q_f32(p + r * ld + t), meta ? kvc_scales(meta, t) : vld1q_f32(scales + t));
            if (t + 4 > n) {
                uint32x4_t stored = vcltq_s32(vld1q_s32(index), vdupq_n_s32((int32_t)(n - t)));
                y = vreinterpretq_f32_u32(vandq_u32(stored, vreinterpretq_u32_f32(y)));
            }
            vst1q_f32(x + t, y);
            most = grow(most, y);
        }
        float top = kvc_f32_of_bits(vmaxvq_u32(most));
        float factor = top > KVC_TINY && top < INFINITY ? KVC_P_LIMIT / top : 0;
        for (int64_t t = 0; t < n16; t += 8) {
            int16x8_t z = factor > 0 ? times_rounded(x + t, factor) : vdupq_n_s16(0);
            total = vpadalq_s16(total, z);
            vst1_s8(w->hi[r] + t, vshrn_n_s16(z, 7));
            vst1_s8(w->lo[r] + t, vmovn_s16(vandq_s16(z, vdupq_n_s16(127))));
        }
        w->step[r] = top < INFINITY ? top / KVC_P_LIMIT : NAN;
        w->sum[r] = vaddvq_s32(total);
    }
}

void kvc_neon_dot_centroid(const uint8_t *centroid, const kvc_query *query, int64_t row0, int64_t rows, float *out)
{
    for (int64_t r = 0; r < rows; r++) {
        const float *q = query->forms[KVC_PLAIN].q + (row0 + r) * query->dim;
        float32x4_t sum = vdupq_n_f32(0);
        for (int64_t d = 0; d < query->dim; d += 4) sum = vfmaq_f32(sum, kvc_scales(centroid, d), vld1q_f32(q + d));
        out[r] = vaddvq_f32(sum);
    }
}

bool kvc_neon_one_limb(int bits, const uint8_t *meta, const kvc_query *query, int64_t row0, int64_t rows,
                       int64_t n_tiles)
{
    float32x4_t most = vdupq_n_f32(0);
    if (!query->coarse) return false;
    for (int64_t t = 0; t < n_tiles * KVC_TILE; t += 4) most = vmaxnmq_f32(kvc_scales(meta, t), most);
    return kvc_one_limb_of(bits, query, row0, rows, vmaxnmvq_f32(most));
}
#endif
