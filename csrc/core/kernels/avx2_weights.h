/* avx2_weights.h - weights of a page for integer V, relative to the row's largest weight in it: 15-bit integers in pair
 * order (avx2.h), or coarse: 0..255. Behind it. */
#ifndef KVC_AVX2_WEIGHTS_H
#define KVC_AVX2_WEIGHTS_H

typedef struct weights {
    union {
        _Alignas(32) int16_t z[KVC_ROWS][KVC_MAX_PAGE];
        uint8_t one[KVC_ROWS][KVC_MAX_PAGE];
    };
    float step[KVC_ROWS];
    int32_t sum[KVC_ROWS];
} weights;

/* x >= 0: weights times scales, 0 from token n on up to a multiple of 16. */
INLINE void weigh(weights *w, const float x[][KVC_MAX_PAGE], int64_t rows, int64_t n, bool coarse)
{
    int64_t n16 = (n + 15) / 16 * 16;
    for (int64_t r = 0; r < rows; r++) {
        __m256i most = _mm256_setzero_si256(), total = most;
        for (int64_t t = 0; t < n16; t += 8) most = kvc_grow(most, _mm256_loadu_ps(x[r] + t));
        float factor = kvc_factor(kvc_grown(most), coarse ? 255 : KVC_P_LIMIT, w->step + r);
        for (int64_t t = 0; t < n16; t += 8) {
            __m256i z = kvc_integers(_mm256_loadu_ps(x[r] + t), factor);
            if (coarse)
                kvc_store_bytes(w->one[r] + t, z, false);
            else
                _mm_store_si128((__m128i *)(void *)(w->z[r] + t), kvc_pack_pairs(z));
            total = _mm256_add_epi32(total, z);
        }
        w->sum[r] = kvc_total(total);
    }
}

/* Weights p times scales [n]. */
INLINE void weigh_by(weights *w, const float *p, int64_t ld, int64_t rows, int64_t n, const float *scales,
                     const float *largest, bool coarse)
{
    _Alignas(32) float x[KVC_ROWS][KVC_MAX_PAGE];
    (void)largest, (void)coarse; /* as exact either way */
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < (n + 15) / 16 * 16; t += 8)
            _mm256_store_ps(x[r] + t, _mm256_mul_ps(_mm256_loadu_ps(p + r * ld + t), _mm256_loadu_ps(scales + t)));
    weigh(w, x, rows, n, false);
}

#endif
