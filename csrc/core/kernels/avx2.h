/* avx2.h - shared by the avx2 files; included after their target pragma.
 *
 * Integer products. vpmaddubsw adds two products of bytes and saturates at 16 bits. Codes of 4 and 2 bits times one
 * limb of q, or times 8-bit weights, stay below that limit, even summed up several times (kvc_add_bytes). All other
 * products use vpmaddwd: the even bytes (by AND) and the odd bytes (by shift) of a word are widened to 16 bits and
 * multiplied with 15-bit integers in pairs (0, 2) and (1, 3) of every four. q and p are stored in this pair order, two
 * bytes each. For q, the first half of a row's dims is stored where other levels have the upper limbs
 * (kvc_query_form.hi), the second half where they have the lower ones; for 4-bit codes these are the two planes. All
 * sums are exact. */
#ifndef KVC_AVX2_H
#define KVC_AVX2_H

#include "attend_kernels.h"
#include "base/util.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

INLINE __m256i kvc_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)(const void *)p); }

/* Packed codes; 3-bit codes have their high bits separately. */
typedef struct kvc_words {
    __m256i low, high;
} kvc_words;

/* Loads the 32 bytes at `at` of a tile. */
INLINE kvc_words kvc_load_words(int KIND, const uint8_t *tile, int64_t dim, int64_t at)
{
    kvc_words w = {kvc_load(tile + at), _mm256_setzero_si256()};
    if (KIND != 3) return w;
    bool second = at >= 2 * dim;
    w.high = kvc_load(tile + 4 * dim + at - (second ? 2 * dim : 0));
    w.high = _mm256_srl_epi16(w.high, _mm_cvtsi32_si128(second));
    return w;
}

/* Moves bit 2p of w.high to bit 2 of each element (mask: 4 in each), and combines it with the low bits in x. */
INLINE __m256i kvc_with_high(__m256i x, kvc_words w, int p, __m256i mask)
{
    __m256i y = p ? _mm256_srli_epi16(w.high, 2 * p - 2) : _mm256_slli_epi16(w.high, 2);
    return _mm256_or_si256(x, _mm256_and_si256(y, mask));
}

/* Lloyd-Max levels plus 128, for lookup of 4-bit codes by a byte shuffle. */
INLINE __m256i kvc_lloyd_levels(void)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)kvc_lloyd4_codes));
}

/* The i-th code in every 16 bits of a word (planes of the even byte, then of the odd byte), as 16-bit integers.
 * Lloyd-Max codes are replaced by their levels plus 128. */
INLINE __m256i kvc_codes(int KIND, int i, kvc_words words)
{
    const int BITS = kvc_plane_bits(KIND);
    __m256i w = words.low;
    if (KIND != KVC_LLOYD4) {
        __m256i code = _mm256_and_si256(_mm256_srli_epi16(w, BITS * i), _mm256_set1_epi16((short)((1 << BITS) - 1)));
        return KIND == 3 ? kvc_with_high(code, words, i, _mm256_set1_epi16(4)) : code;
    }
    const __m256i levels = kvc_lloyd_levels();
    __m256i x = _mm256_and_si256(i % 2 ? _mm256_srli_epi16(w, 4) : w, _mm256_set1_epi8(15));
    x = _mm256_shuffle_epi8(levels, x);
    return i < 2 ? _mm256_and_si256(x, _mm256_set1_epi16(255)) : _mm256_srli_epi16(x, 8);
}

/* Sums of codes minus their middle; twice that, except for bytes. */
INLINE __m256i kvc_less_middle(int KIND, __m256i dot, int32_t sum)
{
    const bool bytes = KIND == 8 || KIND == KVC_LLOYD4;
    return _mm256_sub_epi32(_mm256_slli_epi32(dot, !bytes),
                            _mm256_set1_epi32(kvc_times(bytes ? 128 : (1 << KIND) - 1, sum)));
}
INLINE float kvc_middle_unit(int KIND) { return KIND == 8 || KIND == KVC_LLOYD4 ? 1 : 0.5f; }

/* Broadcasts two 16-bit integers, or four bytes, to every lane. */
INLINE __m256i kvc_two(const void *p)
{
    int32_t x;
    memcpy(&x, p, sizeof x);
    return _mm256_set1_epi32(x);
}

/* sum + dot products of pairs. The asm barrier keeps gcc from reordering these sums, which would cause
 * register spills. */
INLINE __m256i kvc_dot(__m256i sum, __m256i a, __m256i b)
{
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
    __asm__("" : "+x"(sum));
    return sum;
}

/* Broadcasts two floats to every pair of lanes. */
INLINE __m256 kvc_pair(const float *p)
{
    double x;
    memcpy(&x, p, sizeof x);
    return _mm256_castpd_ps(_mm256_set1_pd(x));
}

/* Plane p of the codes, one per byte. */
INLINE __m256i kvc_plane(int KIND, int p, kvc_words w)
{
    const int BITS = kvc_plane_bits(KIND);
    __m256i code = _mm256_and_si256(_mm256_srli_epi16(w.low, BITS * p), _mm256_set1_epi8((char)((1 << BITS) - 1)));
    return KIND == 3 ? kvc_with_high(code, w, p, _mm256_set1_epi8(4)) : code;
}

/* part + dot products of pairs of bytes (a unsigned) in 16 bits. Before kvc_add_part, at most this many may be added
 * for codes of 4, 3, 2 bits times 8-bit factors: 8, 18, 40 if the factor is signed (8 * 2 * 127 * 15, 18 * 2 * 127 * 7,
 * ..), and 4, 9, 20 if it is unsigned (.., 20 * 2 * 255 * 3). */
INLINE __m256i kvc_add_bytes(__m256i part, __m256i a, __m256i b)
{
    part = _mm256_add_epi16(part, _mm256_maddubs_epi16(a, b));
    __asm__("" : "+x"(part)); /* as in kvc_dot */
    return part;
}
/* Adds 16-bit partial sums to 32-bit sums. */
INLINE __m256i kvc_add_part(__m256i sum, __m256i part)
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
}

/* sum + dot products of pairs of bytes (a unsigned) that may need all 16 bits. */
INLINE __m256i kvc_dot_bytes(__m256i sum, __m256i a, __m256i b)
{
    sum = kvc_add_part(sum, _mm256_maddubs_epi16(a, b));
    __asm__("" : "+x"(sum)); /* as in kvc_dot */
    return sum;
}

/* Loads 8 fp16 scales, of tokens (or dims) from `at`. */
INLINE __m256 kvc_halves(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}
INLINE __m256 kvc_scales(const uint8_t *meta, int64_t at) { return kvc_halves(meta + 2 * at); }

/* Widens 16 fp16 in a ymm to two ymm of fp32. */
INLINE void kvc_widen(__m256i h, __m256 *a, __m256 *b)
{
    *a = _mm256_cvtph_ps(_mm256_castsi256_si128(h));
    *b = _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1));
}

/* Converts the upper (lower) byte of each 16 bits to fp16, exactly, including subnormals: e4m3 (4 exponent bits) gives
 * the value x 2^-8; an e5m2 code is the upper half of an fp16. */
INLINE __m256i kvc_fp8_upper(int exponent, __m256i w)
{
    if (exponent == 5) return _mm256_and_si256(w, _mm256_set1_epi16((short)0xff00));
    return _mm256_and_si256(_mm256_srai_epi16(w, 1), _mm256_set1_epi16((short)0xbf80));
}
INLINE __m256i kvc_fp8_lower(int exponent, __m256i w) { return kvc_fp8_upper(exponent, _mm256_slli_epi16(w, 8)); }
/* Factor for the scale that compensates the conversion. */
INLINE float kvc_fp8_unit(int exponent) { return exponent == 5 ? 1 : 256; }

/* Adds lanes 2i and 2i + 1: a holds pairs of results 0-3, b of results 4-7. */
INLINE __m256 kvc_add_pairs(__m256 a, __m256 b)
{
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_hadd_ps(a, b)), 0xd8));
}

/* Narrows eight 32-bit integers (that fit in 16 bits) to 16 bits, each four in the order 0, 2, 1, 3. */
INLINE __m128i kvc_pack_pairs(__m256i z)
{
    __m128i x = _mm_packs_epi32(_mm256_castsi256_si128(z), _mm256_extracti128_si256(z, 1));
    return _mm_shufflehi_epi16(_mm_shufflelo_epi16(x, 0xd8), 0xd8);
}

/* Narrows eight integers that fit in 8 bits (signed or unsigned) to bytes and stores them. */
INLINE void kvc_store_bytes(void *to, __m256i z, bool is_signed)
{
    __m128i x = _mm_packs_epi32(_mm256_castsi256_si128(z), _mm256_extracti128_si256(z, 1));
    _mm_storel_epi64((__m128i *)to, is_signed ? _mm_packs_epi16(x, x) : _mm_packus_epi16(x, x));
}

/* Loads four floats in pair order. */
INLINE __m128 kvc_order_pairs(const float *x) { return _mm_permute_ps(_mm_loadu_ps(x), 0xd8); }

INLINE __m256 kvc_abs(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.f), x); }

INLINE __m128i kvc_max_half(__m256i x)
{
    __m128i a = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    a = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_max_epu32(a, _mm_shuffle_epi32(a, 0xb1));
}

/* Maximum of non-negative floats, compared as integers; NaN if any is NaN. */
INLINE __m256i kvc_grow(__m256i most, __m256 x) { return _mm256_max_epu32(most, _mm256_castps_si256(x)); }
INLINE float kvc_grown(__m256i most) { return _mm_cvtss_f32(_mm_castsi128_ps(kvc_max_half(most))); }

INLINE int32_t kvc_total(__m256i x)
{
    __m128i a = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}

INLINE float kvc_sum(__m256 x)
{
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

/* Factor that maps a row (or a page of weights) with this largest magnitude to integers up to `limit`, and the step
 * that maps them back. A row with NaN or Inf becomes NaN as a whole: integers 0, step NaN. */
INLINE float kvc_factor(float largest, float limit, float *step)
{
    *step = largest < INFINITY ? largest / limit : NAN;
    return largest > KVC_TINY && largest < INFINITY ? limit / largest : 0;
}

/* x * factor, rounded to integers; 0 if factor is 0. */
INLINE __m256i kvc_integers(__m256 x, float factor)
{
    if (factor == 0) return _mm256_setzero_si256();
    return _mm256_cvtps_epi32(_mm256_mul_ps(x, _mm256_set1_ps(factor)));
}

#endif
