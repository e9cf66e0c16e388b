/* avx2_scores.h - integer forms of q, and conversion of integer dot products to scores of a page of K. */
#ifndef KVC_AVX2_SCORES_H
#define KVC_AVX2_SCORES_H

#include "avx2.h"

/* Converts q to integers: 15-bit in pair order (PAIRS; see avx2.h) or two limbs; and 8-bit. */
INLINE void kvc_limbs(bool PAIRS, const kvc_query_form *form, int64_t rows, int64_t dim)
{
    int64_t half = dim / 2; /* a multiple of 8 */
    for (int64_t r = 0; r < rows; r++) {
        const float *q = form->q + r * dim;
        __m256i most = _mm256_setzero_si256(), total = most, ones = most;
        for (int64_t d = 0; d < dim; d += 8) most = kvc_grow(most, kvc_abs(_mm256_loadu_ps(q + d)));
        float factor = kvc_factor(kvc_grown(most), KVC_P_LIMIT, form->step + r);
        for (int64_t d = 0; d < dim; d += 8) {
            __m256i z = kvc_integers(_mm256_loadu_ps(q + d), factor);
            if (PAIRS) {
                int8_t *to = (d < half ? form->hi + 2 * d : form->lo + 2 * (d - half)) + r * dim;
                _mm_storeu_si128((__m128i *)(void *)to, kvc_pack_pairs(z));
            } else {
                kvc_store_bytes(form->hi + r * dim + d, _mm256_srai_epi32(z, 7), true);
                kvc_store_bytes(form->lo + r * dim + d, _mm256_and_si256(z, _mm256_set1_epi32(127)), true);
            }
            total = _mm256_add_epi32(total, z);
            __m256i one = _mm256_srai_epi32(_mm256_add_epi32(z, _mm256_set1_epi32(64)), 7);
            ones = _mm256_add_epi32(ones, one);
            if (form->one) kvc_store_bytes(form->one + r * dim + d, one, true);
        }
        form->sum[r] = kvc_total(total);
        if (form->one) form->one_sum[r] = kvc_total(ones);
    }
}

/* Scores from the dots of int8 codes, which are biased by 128, times the token's scale. */
INLINE void int8_scores(int NR, __m256i sum[4][2], const kvc_qk_args *args, int64_t tile)
{
    const kvc_query_form *f = args->query->form;
    EACH (h, 2) {
        __m256 scale = kvc_scales(args->meta, tile * KVC_TILE + 8 * h);
        EACH (r, NR) {
            __m256i bias =
                _mm256_slli_epi32(_mm256_set1_epi32(f->sum[args->row0 + r]), 7); /* codes are biased by 128 */
            __m256 dot = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum[r][h], bias));
            dot = _mm256_mul_ps(dot, _mm256_mul_ps(scale, _mm256_set1_ps(f->step[args->row0 + r])));
            _mm256_storeu_ps(args->s + r * args->ld + tile * KVC_TILE + 8 * h, dot);
        }
    }
}

/* Scores from the dots of rotated codes: minus their middle, times the token's gain, plus q . centroid. */
INLINE void mid_scores(int KIND, int NR, __m256i sum[4][2], const uint8_t *meta, const int32_t *q_sum,
                       const float *step, float unit, int64_t tile, const float *centre, float *s, int64_t ld)
{
    EACH (h, 2) {
        __m256 gain = kvc_scales(meta, tile * KVC_TILE + 8 * h);
        EACH (r, NR) {
            __m256i dot = kvc_less_middle(KIND, sum[r][h], q_sum[r]);
            __m256 x = _mm256_mul_ps(gain, _mm256_set1_ps(unit * kvc_middle_unit(KIND) * step[r]));
            x = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), x, _mm256_set1_ps(centre[r]));
            _mm256_storeu_ps(s + r * ld + tile * KVC_TILE + 8 * h, x);
        }
    }
}

/* True if one limb of q is precise enough for this page (kvc_one_limb_of). */
INLINE bool one_limb(int KIND, const uint8_t *meta, const kvc_query *query, int64_t row0, int64_t rows, int64_t n_tiles)
{
    __m256i most = _mm256_setzero_si256();
    if (!query->coarse) return false;
    for (int64_t t = 0; t < n_tiles * KVC_TILE; t += 8) most = kvc_grow(most, kvc_abs(kvc_scales(meta, t)));
    return kvc_one_limb_of(KIND, KVC_NOISE, query, row0, rows, kvc_grown(most));
}

/* q . centroid of the page, for each row. */
INLINE void dot_centroid(const uint8_t *centroid, const kvc_query *query, int64_t row0, int64_t rows, float *out)
{
    for (int64_t r = 0; r < rows; r++) {
        const float *q = query->forms[KVC_PLAIN].q + (row0 + r) * query->dim;
        __m256 sum = _mm256_setzero_ps();
        for (int64_t d = 0; d < query->dim; d += 8)
            sum = _mm256_fmadd_ps(kvc_scales(centroid, d), _mm256_loadu_ps(q + d), sum);
        out[r] = kvc_sum(sum);
    }
}

#endif
