/* avx2_weights.h - softmax weights of a page as integers, for integer V, relative to the row's largest weight in the
 * page: 15-bit integers in pair order (avx2.h), or with KVC_LIMBS two limbs in token order (128 * hi + lo, both in
 * 0..127). Coarse weights (limit 255 or less) are bytes. Include after avx2.h. */
#ifndef KVC_AVX2_WEIGHTS_H
#define KVC_AVX2_WEIGHTS_H

typedef struct weights {
    union {
#ifdef KVC_LIMBS
        _Alignas(32) uint8_t limbs[2][KVC_ROWS][KVC_MAX_PAGE]; /* hi, lo */
#else
        _Alignas(32) int16_t z[KVC_ROWS][KVC_MAX_PAGE];
#endif
        uint8_t one[KVC_ROWS][KVC_MAX_PAGE];
    };
    float step[KVC_ROWS];
    int32_t sum[KVC_ROWS];
} weights;

INLINE void store_weights(weights *w, int64_t r, int64_t t, __m256i z)
{
#ifdef KVC_LIMBS
    kvc_store_bytes(w->limbs[0][r] + t, _mm256_srli_epi32(z, 7), true);
    kvc_store_bytes(w->limbs[1][r] + t, _mm256_and_si256(z, _mm256_set1_epi32(127)), true);
#else
    _mm_store_si128((__m128i *)(void *)(w->z[r] + t), kvc_pack_pairs(z));
#endif
}

/* Converts weights times scales (x >= 0) to integers; tokens from n up to a multiple of 16 get 0. */
INLINE void weigh(weights *w, const float x[][KVC_MAX_PAGE], int64_t rows, int64_t n, float limit)
{
    int64_t n16 = (n + 15) / 16 * 16;
    for (int64_t r = 0; r < rows; r++) {
        __m256i most = _mm256_setzero_si256(), total = most;
        for (int64_t t = 0; t < n16; t += 8) most = kvc_grow(most, _mm256_loadu_ps(x[r] + t));
        float factor = kvc_factor(kvc_grown(most), limit, w->step + r);
        for (int64_t t = 0; t < n16; t += 8) {
            __m256i z = kvc_integers(_mm256_loadu_ps(x[r] + t), factor);
            if (limit <= 255)
                kvc_store_bytes(w->one[r] + t, z, false);
            else
                store_weights(w, r, t, z);
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
    (void)largest, (void)coarse; /* both precisions cost the same here */
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < (n + 15) / 16 * 16; t += 8)
            _mm256_store_ps(x[r] + t, _mm256_mul_ps(_mm256_loadu_ps(p + r * ld + t), _mm256_loadu_ps(scales + t)));
    weigh(w, x, rows, n, KVC_P_LIMIT);
}

/* Loads the scales of a page as fp32. Tokens from n on get 0, whatever is stored there (their p is 0, too). */
INLINE void load_scales(float *scale, const uint8_t *meta, int64_t n)
{
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (int64_t t = 0; t < (n + 15) / 16 * 16; t += 8) {
        __m256i stored = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(n - t)), index);
        _mm256_store_ps(scale + t, _mm256_and_ps(kvc_scales(meta, t), _mm256_castsi256_ps(stored)));
    }
}

/* Weights p times the tokens' scales in `meta`. */
INLINE void to_integers(weights *w, const float *p, int64_t ld, int64_t rows, const uint8_t *meta, int64_t n,
                        float limit)
{
    _Alignas(32) float scale[KVC_MAX_PAGE], x[KVC_ROWS][KVC_MAX_PAGE];
    load_scales(scale, meta, n);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < (n + 15) / 16 * 16; t += 8)
            _mm256_store_ps(x[r] + t, _mm256_mul_ps(_mm256_loadu_ps(p + r * ld + t), _mm256_load_ps(scale + t)));
    weigh(w, x, rows, n, limit);
}

INLINE void add_to(float *o, __m256 x, float step)
{
    _mm256_storeu_ps(o, _mm256_fmadd_ps(x, _mm256_set1_ps(step), _mm256_loadu_ps(o)));
}

INLINE void add_codes(int KIND, int NR, __m256i sum[4][2], const weights *w, int64_t dim, int64_t d0, float *o)
{
    EACH (r, NR)
        EACH (h, 2) {
            __m256i x = kvc_less_middle(KIND, sum[r][h], w->sum[r]);
            add_to(o + r * dim + d0 + 8 * h, _mm256_cvtepi32_ps(x), kvc_middle_unit(KIND) * w->step[r]);
        }
}

#endif
