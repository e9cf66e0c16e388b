/* avx512_weights.h - softmax weights of a page as integers, for integer V, relative to the row's largest weight in the
 * page: two limbs (128 * hi + lo, both in 0..127), or coarse: hi only, 0..255. */
#ifndef KVC_AVX512_WEIGHTS_H
#define KVC_AVX512_WEIGHTS_H

#include "avx512.h"

typedef struct weights {
    _Alignas(64) uint8_t hi[KVC_ROWS][KVC_MAX_PAGE], lo[KVC_ROWS][KVC_MAX_PAGE];
    float step[KVC_ROWS];
    int32_t sum[KVC_ROWS];
} weights;

/* Destination of the digits; row r is at r * stride. */
typedef struct digits_of {
    uint8_t *hi, *lo;
    int64_t stride;
    float *step;
    int32_t *sum;
} digits_of;

/* p * scale of 16 tokens from t0. Tokens from n on give 0, whatever their scale holds. */
INLINE __m512 kvc_scaled(const float *p, const uint8_t *meta, int64_t t0, int64_t n)
{
    __mmask16 stored = (__mmask16)(n - t0 >= 16 ? 0xffffu : (1u << (n - t0)) - 1);
    return _mm512_maskz_mul_ps(stored, _mm512_loadu_ps(p + t0), kvc_scales(meta, t0));
}

/* Stores the digits of 16 integer weights. */
INLINE void kvc_store_digits(__m512i z, bool coarse, uint8_t *hi, uint8_t *lo)
{
    _mm_store_si128((__m128i *)hi, _mm512_cvtepi32_epi8(coarse ? z : _mm512_srli_epi32(z, 7)));
    if (!coarse) _mm_store_si128((__m128i *)lo, _mm512_cvtepi32_epi8(_mm512_and_si512(z, _mm512_set1_epi32(127))));
}

/* Weights times scales of NR rows. The rows are interleaved so that their dependency chains overlap and one reduction
 * serves all. */
INLINE void weigh_rows(int NR, const float *p, int64_t ld, const uint8_t *meta, int64_t n, bool coarse, digits_of to)
{
    _Alignas(64) float x[4][KVC_MAX_PAGE], factors[4], steps[4];
    int32_t sums[4];
    __m512 most[4], sum[4];
    __m512i total[4];
    __m128 top, joined;
    EACH (r, 4) most[r] = sum[r] = _mm512_setzero_ps(), total[r] = _mm512_setzero_si512();
    for (int64_t t = 0; t < n; t += 16)
        EACH (r, NR) {
            __m512 y = kvc_scaled(p + r * ld, meta, t, n);
            _mm512_store_ps(x[r] + t, y);
            most[r] = _mm512_max_ps(most[r], y);
        }
    KVC_JOIN_LANES(_mm256_max_ps, _mm_max_ps, most, top);
    __m128 limit = _mm_set1_ps(coarse ? 255 : KVC_P_LIMIT);
    _mm_store_ps(factors, _mm_maskz_div_ps(_mm_cmp_ps_mask(top, _mm_set1_ps(KVC_TINY), _CMP_GT_OQ), limit, top));
    _mm_store_ps(steps, _mm_div_ps(top, limit));
    for (int64_t t = 0; t < n; t += 16)
        EACH (r, NR) {
            __m512i z = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(x[r] + t), _mm512_set1_ps(factors[r])));
            total[r] = _mm512_add_epi32(total[r], z);
            kvc_store_digits(z, coarse, to.hi + r * to.stride + t, to.lo + r * to.stride + t);
        }
    EACH (r, NR) sum[r] = _mm512_cvtepi32_ps(total[r]); /* below 2^24: exact */
    KVC_JOIN_LANES(_mm256_add_ps, _mm_add_ps, sum, joined);
    _mm_storeu_si128((__m128i *)sums, _mm_cvtps_epi32(joined));
    EACH (r, NR) to.step[r] = steps[r], to.sum[r] = sums[r];
}

/* The same for a full page of 64 tokens and four rows, kept in registers, with all digits packed at once. PARTS = 2:
 * each half is relative to its own largest weight; the steps of the second half are written to `second`, and there are
 * no sums. */
INLINE void weigh_page(int PARTS, const float *p, int64_t ld, const uint8_t *meta, bool coarse, digits_of to,
                       float *second)
{
    _Alignas(16) float factors[2][4];
    __m512 x[4][4], most[4], sum[4];
    __m128 top, joined;
    const __m128 limit = _mm_set1_ps(coarse ? 255 : KVC_P_LIMIT);
    EACH (t, 4) {
        __m512 scale = kvc_scales(meta, 16 * t);
        EACH (r, 4) x[r][t] = _mm512_mul_ps(_mm512_loadu_ps(p + r * ld + 16 * t), scale);
    }
    EACH (h, PARTS) {
        EACH (r, 4) {
            most[r] = _mm512_max_ps(x[r][2 * h], x[r][2 * h + 1]);
            if (PARTS == 1) most[r] = _mm512_max_ps(most[r], _mm512_max_ps(x[r][2], x[r][3]));
        }
        KVC_JOIN_LANES(_mm256_max_ps, _mm_max_ps, most, top);
        _mm_store_ps(factors[h], _mm_maskz_div_ps(_mm_cmp_ps_mask(top, _mm_set1_ps(KVC_TINY), _CMP_GT_OQ), limit, top));
        _mm_storeu_ps(h ? second : to.step, _mm_div_ps(top, limit));
    }
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    EACH (r, 4) {
        __m512i z[4];
        EACH (t, 4)
            z[t] = _mm512_cvtps_epi32(_mm512_mul_ps(x[r][t], _mm512_set1_ps(factors[PARTS == 2 ? t / 2 : 0][r])));
        __m512i total = _mm512_add_epi32(_mm512_add_epi32(z[0], z[1]), _mm512_add_epi32(z[2], z[3]));
        sum[r] = _mm512_cvtepi32_ps(total); /* below 2^24: exact */
        __m512i a = _mm512_packus_epi32(z[0], z[1]), b = _mm512_packus_epi32(z[2], z[3]);
        __m512i hi =
            coarse ? _mm512_packus_epi16(a, b) : _mm512_packus_epi16(_mm512_srli_epi16(a, 7), _mm512_srli_epi16(b, 7));
        _mm512_storeu_si512(to.hi + r * to.stride, _mm512_permutexvar_epi32(order, hi));
        if (coarse) continue;
        const __m512i low = _mm512_set1_epi16(127);
        __m512i lo = _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low));
        _mm512_storeu_si512(to.lo + r * to.stride, _mm512_permutexvar_epi32(order, lo));
    }
    if (PARTS == 2) return;
    KVC_JOIN_LANES(_mm256_add_ps, _mm_add_ps, sum, joined);
    _mm_storeu_si128((__m128i *)to.sum, _mm_cvtps_epi32(joined));
}

INLINE void weigh(const float *p, int64_t ld, int64_t rows, const uint8_t *meta, int64_t n, bool coarse, digits_of to)
{
    if (rows == 4 && n == 64 && to.stride % 64 == 0) {
        weigh_page(1, p, ld, meta, coarse, to, NULL);
        return;
    }
    switch (rows) {
    case 1: weigh_rows(1, p, ld, meta, n, coarse, to); break;
    case 2: weigh_rows(2, p, ld, meta, n, coarse, to); break;
    case 3: weigh_rows(3, p, ld, meta, n, coarse, to); break;
    default: weigh_rows(4, p, ld, meta, n, coarse, to);
    }
}

/* Weights p times scales [n], relative to the product of the largest p of row r (largest[r]) and the largest scale.
 * This saves a pass and a reduction per row if there are many groups of scales. */
INLINE void weigh_rows_by(int NR, weights *w, const float *p, int64_t ld, int64_t n, const float *scales,
                          const float *largest, bool coarse)
{
    const float digits = coarse ? 255 : KVC_P_LIMIT;
    __m512 top = _mm512_setzero_ps(), factor[4], sum[4];
    __m512i total[4];
    __m128 joined;
    for (int64_t t = 0; t < n; t += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(scales + t));
    float most = _mm512_reduce_max_ps(top);
    EACH (r, 4) sum[r] = _mm512_setzero_ps(), total[r] = _mm512_setzero_si512();
    EACH (r, NR) {
        float limit = most * largest[r];
        factor[r] = _mm512_set1_ps(limit > KVC_TINY ? digits / limit : 0);
        w->step[r] = limit / digits;
    }
    for (int64_t t = 0; t < n; t += 16) {
        __m512 scale = _mm512_loadu_ps(scales + t);
        EACH (r, NR) {
            __m512 x = _mm512_mul_ps(_mm512_loadu_ps(p + r * ld + t), scale);
            __m512i z = _mm512_cvtps_epi32(_mm512_mul_ps(x, factor[r]));
            total[r] = _mm512_add_epi32(total[r], z);
            kvc_store_digits(z, coarse, w->hi[r] + t, w->lo[r] + t);
        }
    }
    EACH (r, NR) sum[r] = _mm512_cvtepi32_ps(total[r]); /* below 2^24: exact */
    KVC_JOIN_LANES(_mm256_add_ps, _mm_add_ps, sum, joined);
    _mm_storeu_si128((__m128i *)w->sum, _mm_cvtps_epi32(joined));
}

INLINE void weigh_by(weights *w, const float *p, int64_t ld, int64_t rows, int64_t n, const float *scales,
                     const float *largest, bool coarse)
{
    switch (rows) {
    case 1: weigh_rows_by(1, w, p, ld, n, scales, largest, coarse); break;
    case 2: weigh_rows_by(2, w, p, ld, n, scales, largest, coarse); break;
    case 3: weigh_rows_by(3, w, p, ld, n, scales, largest, coarse); break;
    default: weigh_rows_by(4, w, p, ld, n, scales, largest, coarse);
    }
}

#endif
