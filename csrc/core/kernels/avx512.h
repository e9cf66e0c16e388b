/* avx512.h - shared by the avx512 files; included after their target pragma. */
#ifndef KVC_AVX512_H
#define KVC_AVX512_H

#include "attend_kernels.h"

#include <immintrin.h>

/* Prefetches line `to` to L2 after a product has been added to `sum`. */
#define KVC_PREFETCH_AFTER(sum, to) __asm__ volatile("prefetcht1 (%1)" : "+v"(sum) : "r"(to))

/* Product i of `of` products that use n <= 4 lines requests its share of the lines [first, first + n) from `from` (of the
 * next page, or of the same one, which does no harm). Lines are requested one at a time, between products: behind several
 * requests, loads of the current page from L2 wait until memory has answered. KIND: see kvc_prefetch_planes. */
#define KVC_PREFETCH_SHARE(KIND, from, first, n, i, of, sum)                                                           \
    EACH (line_, n) {                                                                                                  \
        const int64_t at_ = (first) + line_;                                                                           \
        const uint8_t *to_ = (from) + 64 * ((KIND) == 3 ? at_ * 3 / 2 : at_);                                          \
        if (line_ * (of) / (n) != (i)) continue;                                                                       \
        KVC_PREFETCH_AFTER(sum, to_);                                                                                  \
        if ((KIND) == 3 && at_ % 2) KVC_PREFETCH_AFTER(sum, to_ + 64);                                                 \
    }

/* Broadcasts four bytes (limbs of four dims or tokens) to every lane. */
INLINE __m512i kvc_word(const void *p) { return _mm512_set1_epi32(*(const int32_t *)p); }

/* Broadcasts two floats to every pair of lanes. */
INLINE __m512 kvc_pair(const float *p) { return _mm512_castpd_ps(_mm512_set1_pd(*(const double *)(const void *)p)); }

/* Loads 16 fp16 scales, of tokens (or dims) from `at`. */
INLINE __m512 kvc_scales(const uint8_t *meta, int64_t at)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(meta + 2 * at)));
}

/* Widens 32 fp16 in a zmm to two zmm of fp32. */
INLINE void kvc_widen(__m512i h, __m512 *a, __m512 *b)
{
    *a = _mm512_cvtph_ps(_mm512_castsi512_si256(h));
    *b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(h, 1));
}

/* Converts the upper (lower) byte of each 16 bits to fp16, exactly, including subnormals: e4m3 (4 exponent bits) gives
 * the value x 2^-8; an e5m2 code is the upper half of an fp16. */
INLINE __m512i kvc_fp8_upper(int exponent, __m512i w)
{
    if (exponent == 5) return _mm512_and_si512(w, _mm512_set1_epi16((short)0xff00));
    return _mm512_and_si512(_mm512_srai_epi16(w, 1), _mm512_set1_epi16((short)0xbf80));
}
INLINE __m512i kvc_fp8_lower(int exponent, __m512i w) { return kvc_fp8_upper(exponent, _mm512_slli_epi16(w, 8)); }
/* Factor for the scale that compensates the conversion. */
INLINE float kvc_fp8_unit(int exponent) { return exponent == 5 ? 1 : 256; }

/* Broadcasts x[0..3] to every four lanes as x0, x2, x0, x2 and x1, x3, x1, x3. */
INLINE void kvc_split_pairs(const float *x, __m512 *even, __m512 *odd)
{
    __m512 four = _mm512_broadcast_f32x4(_mm_loadu_ps(x));
    *even = _mm512_permute_ps(four, 0x88);
    *odd = _mm512_permute_ps(four, 0xdd);
}

/* Adds lanes 2i and 2i+1: a holds pairs of results 0-7, b of results 8-15. */
INLINE __m512 kvc_add_pairs(__m512 a, __m512 b)
{
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    return _mm512_add_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
}

/* Reduces each of x[0..3] over its lanes with OP (_mm256_max_ps, _mm256_add_ps); lane r of `out` is
 * the result of x[r]. */
#define KVC_JOIN_LANES(OP, OP4, x, out)                                                                                \
    do {                                                                                                               \
        __m256 y_[4];                                                                                                  \
        EACH (i, 4) y_[i] = OP(_mm512_castps512_ps256((x)[i]), _mm512_extractf32x8_ps((x)[i], 1));                     \
        __m256 a_ = OP(_mm256_unpacklo_ps(y_[0], y_[1]), _mm256_unpackhi_ps(y_[0], y_[1]));                            \
        __m256 b_ = OP(_mm256_unpacklo_ps(y_[2], y_[3]), _mm256_unpackhi_ps(y_[2], y_[3]));                            \
        __m256d c_ = _mm256_castps_pd(a_), d_ = _mm256_castps_pd(b_);                                                  \
        a_ = OP(_mm256_castpd_ps(_mm256_unpacklo_pd(c_, d_)), _mm256_castpd_ps(_mm256_unpackhi_pd(c_, d_)));           \
        out = OP4(_mm256_castps256_ps128(a_), _mm256_extractf128_ps(a_, 1));                                           \
    } while (0)

#endif
