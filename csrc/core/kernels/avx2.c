/* avx2.c - the avx2 level: its table, online softmax, conversion of q to integers. Requires AVX2, FMA, F16C. */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx2,fma,f16c")
#include "avx2_scores.h"
#include "levels.h"
#include "accumulated.h"

#include <float.h>

INLINE __m256 splat(float x) { return _mm256_set1_ps(x); }

/* exp(x) for x up to KVC_SLACK (and -inf), as 2^floor(y) * 2^f. Relative error < 3e-7 + 6e-8 * |x|; of 2^f alone 1e-7
 * (degree 5, minimax with 2^0 = 1). 0 below 2^-126; NaN stays NaN. */
INLINE __m256 exp_ps(__m256 x)
{
    __m256 y = _mm256_max_ps(splat(-127), _mm256_mul_ps(x, splat(1.44269504f))); /* n = -127 makes 2^n 0 */
    __m256 n = _mm256_floor_ps(y), f = _mm256_sub_ps(y, n), p = splat(.00186713005f);
    p = _mm256_fmadd_ps(p, f, splat(.00901703071f));
    p = _mm256_fmadd_ps(p, f, splat(.0557999127f));
    p = _mm256_fmadd_ps(p, f, splat(.240164444f));
    p = _mm256_fmadd_ps(p, f, splat(.693151295f));
    p = _mm256_fmadd_ps(p, f, splat(1));
    __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(e));
}

/* tanh(x) = sign(x) * (1 - e) / (1 + e), e = exp(-2 |x|); near 0, where that cancels, an odd polynomial. */
INLINE __m256 tanh_ps(__m256 x)
{
    __m256 a = kvc_abs(x), square = _mm256_mul_ps(x, x), e = exp_ps(_mm256_mul_ps(a, splat(-2)));
    __m256 far = _mm256_div_ps(_mm256_sub_ps(splat(1), e), _mm256_add_ps(splat(1), e));
    far = _mm256_or_ps(far, _mm256_and_ps(x, splat(-0.f)));
    __m256 near = _mm256_fmadd_ps(square, splat(-17.f / 315), splat(2.f / 15));
    near = _mm256_fmadd_ps(square, near, splat(-1.f / 3));
    near = _mm256_fmadd_ps(_mm256_mul_ps(square, near), x, x);
    return _mm256_blendv_ps(far, near, _mm256_cmp_ps(a, splat(.15f), _CMP_LT_OQ));
}

/* Mask of the lanes of tokens t..t+7 that are visible. */
INLINE __m256 mask_of(const uint64_t *visible, int64_t t)
{
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i bits = _mm256_set1_epi32((int)(visible[t / 64] >> (t % 64) & 255));
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(bits, bit), bit));
}

/* If a visible score is NaN, or the largest is +Inf, the sum and the factor become NaN. ALL: every token is visible. */
INLINE float softmax_row(bool ALL, float *s, int64_t n16, const uint64_t *visible, float softcap, float *m, float *l)
{
    const __m256 none = splat(-INFINITY), limit = splat(*m + KVC_SLACK);
    __m256 most = none, sum = _mm256_setzero_ps();
    for (int64_t t = 0; t < n16; t += 8) {
        __m256 x = _mm256_loadu_ps(s + t);
        if (softcap > 0) x = _mm256_mul_ps(tanh_ps(_mm256_div_ps(x, splat(softcap))), splat(softcap));
        if (!ALL) x = _mm256_blendv_ps(none, x, mask_of(visible, t));
        if (!ALL || softcap > 0) _mm256_storeu_ps(s + t, x);
        most = _mm256_max_ps(x, most); /* ignores NaN */
    }
    float top = *m;
    if (!(top > -INFINITY) ||
        _mm256_movemask_ps(_mm256_cmp_ps(most, limit, _CMP_GT_OQ))) { /* otherwise the result is not needed */
        __m128 a = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
        a = _mm_max_ps(a, _mm_movehl_ps(a, a));
        top = fmaxf(_mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a))), -FLT_MAX); /* avoids -inf - -inf, which is NaN */
    }
    for (int64_t t = 0; t < n16; t += 8) {
        __m256 x = exp_ps(_mm256_sub_ps(_mm256_loadu_ps(s + t), splat(top)));
        _mm256_storeu_ps(s + t, x);
        sum = _mm256_add_ps(sum, x);
    }
    float keep = top == *m ? 1 : expf(*m - top), total = kvc_sum(sum);
    *l = *l * keep + total;
    *m = top;
    return isnan(total) ? total : keep;
}

void kvc_avx2_softmax(float *s, int64_t ld, int64_t rows, int64_t n16, const uint64_t (*visible)[KVC_WORDS],
                      float softcap, float *m, float *l, float *keep)
{
    for (int64_t r = 0; r < rows; r++) {
        bool page = n16 == 64 && visible[r][0] == ~0ull && !(softcap > 0); /* a full page at decode */
        keep[r] = page ? softmax_row(true, s + r * ld, 64, visible[r], 0, m + r, l + r)
                       : softmax_row(false, s + r * ld, n16, visible[r], softcap, m + r, l + r);
    }
}

static void limbs(const kvc_query_form *form, int64_t rows, int64_t dim) { kvc_limbs(true, form, rows, dim); }

void kvc_avx2_factors(float *m, const float *lse, int64_t n)
{
    for (int64_t i = 0; i < n; i += 8) {
        __m256i some = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(n - i)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        __m256 x = _mm256_sub_ps(_mm256_maskload_ps(m + i, some), _mm256_maskload_ps(lse + i, some));
        _mm256_maskstore_ps(m + i, some, exp_ps(_mm256_min_ps(x, _mm256_setzero_ps())));
    }
}

const kvc_kernels kvc_kernels_avx2 = {.name = "avx2",
                                      .encode = kvc_avx2_encode,
                                      .rotate = kvc_avx2_rotate,
                                      .limbs = limbs,
                                      .softmax = kvc_avx2_softmax,
                                      .factors = kvc_avx2_factors,
                                      .keep = kvc_keep,
                                      .sum_rows = kvc_sum_rows,
                                      .affine = kvc_avx2_affine,
                                      .qk_affine = kvc_avx2_qk_affine,
                                      .pv_affine = kvc_avx2_pv_affine,
                                      .tile = &kvc_avx2_tile,
                                      KVC_OWN_KERNELS(KVC_ENTRY, avx2)};
KVC_TARGET_END
#endif
