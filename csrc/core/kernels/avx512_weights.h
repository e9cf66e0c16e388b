/* avx512_weights.h - weights of a page for integer V, relative to the row's largest weight in it: two limbs (128 * hi +
 * lo, both in 0..127), or coarse: hi alone, 0..255. */
#ifndef KVC_AVX512_WEIGHTS_H
#define KVC_AVX512_WEIGHTS_H

#include "avx512.h"

typedef struct weights {
    _Alignas(64) uint8_t hi[KVC_ROWS][KVC_MAX_PAGE], lo[KVC_ROWS][KVC_MAX_PAGE];
    float step[KVC_ROWS];
    int32_t sum[KVC_ROWS];
} weights;

/* Of a row x >= 0 of weights times scales [n], 0 from n up to a multiple of 16: limbs, their step and sum. */
INLINE void weigh_row(const float *x, int64_t n, bool coarse, uint8_t *hi, uint8_t *lo, float *step, int32_t *sum)
{
    const float limit = coarse ? 255 : KVC_P_LIMIT;
    __m512 top = _mm512_setzero_ps();
    __m512i total = _mm512_setzero_si512();
    for (int64_t t = 0; t < n; t += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(x + t));
    float largest = _mm512_reduce_max_ps(top), factor = largest > KVC_TINY ? limit / largest : 0;
    *step = largest / limit;
    for (int64_t t = 0; t < n; t += 16) {
        __m512i z = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + t), _mm512_set1_ps(factor)));
        total = _mm512_add_epi32(total, z);
        if (coarse) {
            _mm_store_si128((__m128i *)(hi + t), _mm512_cvtepi32_epi8(z));
            continue;
        }
        _mm_store_si128((__m128i *)(hi + t), _mm512_cvtepi32_epi8(_mm512_srli_epi32(z, 7)));
        _mm_store_si128((__m128i *)(lo + t), _mm512_cvtepi32_epi8(_mm512_and_si512(z, _mm512_set1_epi32(127))));
    }
    *sum = _mm512_reduce_add_epi32(total);
}

INLINE void weigh(weights *w, const float x[][KVC_MAX_PAGE], int64_t rows, int64_t n, bool coarse)
{
    for (int64_t r = 0; r < rows; r++) weigh_row(x[r], n, coarse, w->hi[r], w->lo[r], &w->step[r], &w->sum[r]);
}

/* Weights p times scales [n], relative to the product of the largest of each (p's of row r: largest[r]), which spares a pass
 * and a reduction a row where there are many groups of scales. */
INLINE void weigh_by(weights *w, const float *p, int64_t ld, int64_t rows, int64_t n, const float *scales,
                     const float *largest)
{
    __m512 top = _mm512_setzero_ps();
    for (int64_t t = 0; t < n; t += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(scales + t));
    float most = _mm512_reduce_max_ps(top);
    for (int64_t r = 0; r < rows; r++) {
        float limit = most * largest[r];
        __m512 factor = _mm512_set1_ps(limit > KVC_TINY ? KVC_P_LIMIT / limit : 0);
        __m512i total = _mm512_setzero_si512();
        for (int64_t t = 0; t < n; t += 16) {
            __m512 x = _mm512_mul_ps(_mm512_loadu_ps(p + r * ld + t), _mm512_loadu_ps(scales + t));
            __m512i z = _mm512_cvtps_epi32(_mm512_mul_ps(x, factor));
            total = _mm512_add_epi32(total, z);
            _mm_store_si128((__m128i *)(w->hi[r] + t), _mm512_cvtepi32_epi8(_mm512_srli_epi32(z, 7)));
            _mm_store_si128((__m128i *)(w->lo[r] + t),
                            _mm512_cvtepi32_epi8(_mm512_and_si512(z, _mm512_set1_epi32(127))));
        }
        w->step[r] = limit / KVC_P_LIMIT;
        w->sum[r] = _mm512_reduce_add_epi32(total);
    }
}

#endif
