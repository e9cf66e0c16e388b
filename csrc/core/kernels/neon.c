/* neon.c - shared by all NEON levels: online softmax, limbs of q, weights as integers. */
#if defined(__aarch64__)
#include "target.h"
#include "base/floats.h"
#include "neon.h"

#include <float.h>

/* tanh(x) = sign(x) * (1 - e) / (1 + e), e = exp(-2 |x|); near 0, where that cancels, an odd polynomial. */
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

/* Mask of the lanes of tokens t..t+3 that are visible. */
INLINE uint32x4_t mask_of(const uint64_t *visible, int64_t t)
{
    static const uint32_t bit[4] = {1, 2, 4, 8};
    return vtstq_u32(vdupq_n_u32((uint32_t)(visible[t / 64] >> (t % 64) & 15)), vld1q_u32(bit));
}

/* If a visible score is NaN, or the largest is +Inf, the sum and the factor become NaN. ALL: every token is visible. */
INLINE float softmax_row(bool ALL, float *s, int64_t n16, const uint64_t *visible, float softcap, float *m, float *l)
{
    const float32x4_t none = vdupq_n_f32(-INFINITY);
    float32x4_t most = none, sum = vdupq_n_f32(0);
    for (int64_t t = 0; t < n16; t += 4) {
        float32x4_t x = vld1q_f32(s + t);
        if (softcap > 0) x = vmulq_n_f32(tanh_ps(vdivq_f32(x, vdupq_n_f32(softcap))), softcap);
        if (!ALL) x = vbslq_f32(mask_of(visible, t), x, none);
        if (!ALL || softcap > 0) vst1q_f32(s + t, x);
        most = vmaxnmq_f32(x, most); /* ignores NaN */
    }
    float top = fmaxf(vmaxnmvq_f32(most), -FLT_MAX); /* avoids -inf - -inf, which is NaN */
    if (!(top > *m + KVC_SLACK)) top = *m;
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
    for (int64_t r = 0; r < rows; r++) {
        bool page = n16 == 64 && visible[r][0] == ~0ull && !(softcap > 0); /* a full page at decode */
        keep[r] = page ? softmax_row(true, s + r * ld, 64, visible[r], 0, m + r, l + r)
                       : softmax_row(false, s + r * ld, n16, visible[r], softcap, m + r, l + r);
    }
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

/* Eight floats times factor as integers below 2^14. If factor is 0, the result is 0 even for NaN and Inf. */
INLINE int16x8_t times_rounded(const float *x, float factor)
{
    int32x4_t a = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x), factor));
    int32x4_t b = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 4), factor));
    return vcombine_s16(vmovn_s32(a), vmovn_s32(b));
}

/* Sums of a row's integers, and of q's other digits. */
typedef struct row_sums {
    int32_t all, low, rounded;
} row_sums;

/* Stores row r's numbers x [n] (n a multiple of 16, largest magnitude `top`) as digits at `to`; see neon.h. rounded:
 * the same in units of 128, or NULL. */
INLINE row_sums put_digits(const float *x, int64_t n, float top, int64_t r, int8_t *to, int8_t *rounded, float *step)
{
    int32x4_t total = vdupq_n_s32(0), ones = total, low = total;
    float factor = top > KVC_TINY && top < INFINITY ? KVC_P_LIMIT / top : 0;
    to += 16 * r;
    for (int64_t i = 0; i < n; i += 16)
        EACH (h, 2) {
            int64_t at = i + 8 * h;
            int16x8_t z = times_rounded(x + at, factor), lower = vandq_s16(z, vdupq_n_s16(127));
            total = vpadalq_s16(total, z);
            vst1q_s8(to + at * 2 * KVC_ROWS, vmovn_high_s16(vshrn_n_s16(z, 7), lower));
            if (!rounded) continue;
            low = vpadalq_s16(low, lower);
            z = vrshrq_n_s16(z, 7);
            ones = vpadalq_s16(ones, z);
            vst1_s8(rounded + at * KVC_ROWS + 8 * r, vmovn_s16(z));
        }
    *step = top < INFINITY ? top / KVC_P_LIMIT : NAN;
    return (row_sums){vaddvq_s32(total), vaddvq_s32(low), vaddvq_s32(ones)};
}

void kvc_neon_limbs(const kvc_query_form *f, int64_t rows, int64_t dim)
{
    for (int64_t r = 0; r < rows; r++) {
        int64_t i = r % KVC_ROWS, row0 = r - i;
        const float *q = f->q + r * dim;
        float32x4_t most = vdupq_n_f32(0); /* NaN if any is NaN */
        for (int64_t d = 0; d < dim; d += 4) most = vmaxq_f32(most, vabsq_f32(vld1q_f32(q + d)));
        int8_t *one = f->one ? f->one + row0 * dim : NULL; /* affine.h does not need one limb */
        row_sums sums = put_digits(q, dim, vmaxvq_f32(most), i, f->hi + 2 * row0 * dim, one, f->step + r);
        f->sum[r] = sums.all;
        if (one) f->low_sum[r] = sums.low, f->one_sum[r] = sums.rounded;
    }
}

INLINE void weigh(weights *w, const float *p, int64_t ld, int64_t rows, int64_t n16, const float *scales)
{
    float x[KVC_MAX_PAGE];
    for (int64_t r = 0; r < rows; r++, p += ld) {
        float32x4_t most[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
        for (int64_t t = 0; t < n16; t += KVC_TILE) {
            float32x4x4_t y = vld1q_f32_x4(p + t), scale = vld1q_f32_x4(scales + t);
            EACH (i, 4) {
                y.val[i] = vmulq_f32(y.val[i], scale.val[i]);
                most[i % 2] = vmaxq_f32(most[i % 2], y.val[i]);
            }
            vst1q_f32_x4(x + t, y);
        }
        float top = vmaxvq_f32(vmaxq_f32(most[0], most[1]));
        w->sum[r] = put_digits(x, n16, top, r, w->digits, NULL, w->step + r).all;
    }
}

void kvc_neon_weigh(weights *w, const float *p, int64_t ld, int64_t rows, int64_t n, const uint8_t *meta,
                    const float *scales)
{
    float own[KVC_MAX_PAGE];
    int64_t n16 = (n + KVC_TILE - 1) / KVC_TILE * KVC_TILE;
    for (int64_t t = 0; meta && t < n16; t += 8) {
        float32x4_t a, b;
        kvc_widen(vreinterpretq_u16_u8(vld1q_u8(meta + 2 * t)), &a, &b);
        vst1q_f32(own + t, a), vst1q_f32(own + t + 4, b);
    }
    for (int64_t t = n; meta && t < n16; t++) own[t] = 0; /* the scales of missing tokens may hold anything */
    if (meta) scales = own;
    if (n16 == 64) /* common page size: constant loop counts keep everything in registers */
        weigh(w, p, ld, rows, 64, scales);
    else
        weigh(w, p, ld, rows, n16, scales);
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
    return kvc_one_limb_of(bits, KVC_NOISE, query, row0, rows, vmaxnmvq_f32(most));
}
#endif
