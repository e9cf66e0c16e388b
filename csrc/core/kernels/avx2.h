/* avx2.h - what the avx2 files share; included behind their target pragma.
 *
 * Integers. vpmaddubsw adds two products of bytes, and saturates at 16 bits: codes of 4 and 2 bits times one limb of q, or
 * times weights of 8 bits, are below that even as sums of some (kvc_add_bytes). All others are exact otherwise: a word of four bytes is read as two
 * words of 16 bits: its even bytes by AND, its odd ones by a shift, and vpmaddwd multiplies them with 15-bit integers in
 * pairs (0, 2) and (1, 3) of every four. q and p are stored in that order, two bytes each. Of q of a row, the first half
 * of the dims lies where other levels have its upper limbs (kvc_query_form.hi), the second half where they have the lower
 * ones: at 4 bits these are the two planes. */
#ifndef KVC_AVX2_H
#define KVC_AVX2_H

#include "attend_kernels.h"
#include "base/util.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

INLINE __m256i kvc_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)(const void *)p); }

/* Codes as they lie: of 3 bits the high ones beside the low ones. */
typedef struct kvc_words {
    __m256i low, high;
} kvc_words;

/* The 32 bytes at `at` of a tile. */
INLINE kvc_words kvc_load_words(int KIND, const uint8_t *tile, int64_t dim, int64_t at)
{
    kvc_words w = {kvc_load(tile + at), _mm256_setzero_si256()};
    if (KIND != 3) return w;
    bool second = at >= 2 * dim;
    w.high = kvc_load(tile + 4 * dim + at - (second ? 2 * dim : 0));
    w.high = _mm256_srl_epi16(w.high, _mm_cvtsi32_si128(second));
    return w;
}

/* Bit 2p of w.high at bit 2 of all elements that `mask` has a 4 in, beside the low bits in x. */
INLINE __m256i kvc_with_high(__m256i x, kvc_words w, int p, __m256i mask)
{
    __m256i y = p ? _mm256_srli_epi16(w.high, 2 * p - 2) : _mm256_slli_epi16(w.high, 2);
    return _mm256_or_si256(x, _mm256_and_si256(y, mask));
}

/* Lloyd's levels and 128, to look codes of 4 bits up by a byte shuffle. */
INLINE __m256i kvc_lloyd_levels(void)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)kvc_lloyd4_codes));
}

/* Codes of 16 bits, i-th of every 16 of a word (its even bytes' planes ascending, then its odd bytes'); of Lloyd's the levels and 128. */
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

/* Sums of codes less their middle, twice; of bytes once. */
INLINE __m256i kvc_less_middle(int KIND, __m256i dot, int32_t sum)
{
    const bool bytes = KIND == 8 || KIND == KVC_LLOYD4;
    return _mm256_sub_epi32(_mm256_slli_epi32(dot, !bytes),
                            _mm256_set1_epi32(kvc_times(bytes ? 128 : (1 << KIND) - 1, sum)));
}
INLINE float kvc_middle_unit(int KIND) { return KIND == 8 || KIND == KVC_LLOYD4 ? 1 : 0.5f; }

/* Two 16-bit integers, or four bytes, in every lane. */
INLINE __m256i kvc_two(const void *p)
{
    int32_t x;
    memcpy(&x, p, sizeof x);
    return _mm256_set1_epi32(x);
}

/* sum + a . b of pairs. The barrier keeps gcc from reordering a row of such sums, which costs it its registers. */
INLINE __m256i kvc_dot(__m256i sum, __m256i a, __m256i b)
{
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
    __asm__("" : "+x"(sum));
    return sum;
}

/* Two floats in every pair of lanes. */
INLINE __m256 kvc_pair(const float *p)
{
    double x;
    memcpy(&x, p, sizeof x);
    return _mm256_castpd_ps(_mm256_set1_pd(x));
}

/* Plane p of codes of so many bits, one a byte. */
INLINE __m256i kvc_plane(int KIND, int p, kvc_words w)
{
    const int BITS = kvc_plane_bits(KIND);
    __m256i code = _mm256_and_si256(_mm256_srli_epi16(w.low, BITS * p), _mm256_set1_epi8((char)((1 << BITS) - 1)));
    return KIND == 3 ? kvc_with_high(code, w, p, _mm256_set1_epi8(4)) : code;
}

/* part + a . b of pairs of bytes, a unsigned, in 16 bits: before kvc_add_part so many of codes times 8 bits at most, */
INLINE __m256i kvc_add_bytes(__m256i part, __m256i a, __m256i b)
{
    part = _mm256_add_epi16(part, _mm256_maddubs_epi16(a, b));
    __asm__("" : "+x"(part)); /* as in kvc_dot */
    return part;
}
/* 8, 18, 40 of signed and 4, 9, 20 of unsigned bytes of 4, 3, 2 bits: 8 * 2 * 127 * 15, 18 * 2 * 127 * 7, .., 20 * 2 * 255 * 3. */
INLINE __m256i kvc_add_part(__m256i sum, __m256i part)
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
}

/* sum + a . b of pairs of bytes, a unsigned, that may fill 16 bits. */
INLINE __m256i kvc_dot_bytes(__m256i sum, __m256i a, __m256i b)
{
    sum = kvc_add_part(sum, _mm256_maddubs_epi16(a, b));
    __asm__("" : "+x"(sum)); /* as in kvc_dot */
    return sum;
}

/* 8 fp16 -> fp32: scales of tokens (or dims) from `at`. */
INLINE __m256 kvc_halves(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}
INLINE __m256 kvc_scales(const uint8_t *meta, int64_t at) { return kvc_halves(meta + 2 * at); }

/* 16 fp16 in a ymm -> two ymm of fp32. */
INLINE void kvc_widen(__m256i h, __m256 *a, __m256 *b)
{
    *a = _mm256_cvtph_ps(_mm256_castsi256_si128(h));
    *b = _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1));
}

/* The upper (lower) byte of each 16 bits -> fp16, exact, subnormals included: e4m3 (4 bits of exponent) gives value x
 * 2^-8, e5m2 is the upper half of an fp16. */
INLINE __m256i kvc_fp8_upper(int exponent, __m256i w)
{
    if (exponent == 5) return _mm256_and_si256(w, _mm256_set1_epi16((short)0xff00));
    return _mm256_and_si256(_mm256_srai_epi16(w, 1), _mm256_set1_epi16((short)0xbf80));
}
INLINE __m256i kvc_fp8_lower(int exponent, __m256i w) { return kvc_fp8_upper(exponent, _mm256_slli_epi16(w, 8)); }
/* What its scale is multiplied by. */
INLINE float kvc_fp8_unit(int exponent) { return exponent == 5 ? 1 : 256; }

/* Adds lanes 2i and 2i + 1: a holds pairs of results 0-3, b of results 4-7. */
INLINE __m256 kvc_add_pairs(__m256 a, __m256 b)
{
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_hadd_ps(a, b)), 0xd8));
}

/* Eight 32-bit integers (that fit in 16 bits) to 16 bits, every four in the order 0, 2, 1, 3. */
INLINE __m128i kvc_pack_pairs(__m256i z)
{
    __m128i x = _mm_packs_epi32(_mm256_castsi256_si128(z), _mm256_extracti128_si256(z, 1));
    return _mm_shufflehi_epi16(_mm_shufflelo_epi16(x, 0xd8), 0xd8);
}

/* Eight integers that fit in 8 bits, unsigned or signed, to bytes. */
INLINE void kvc_store_bytes(void *to, __m256i z, bool is_signed)
{
    __m128i x = _mm_packs_epi32(_mm256_castsi256_si128(z), _mm256_extracti128_si256(z, 1));
    _mm_storel_epi64((__m128i *)to, is_signed ? _mm_packs_epi16(x, x) : _mm_packus_epi16(x, x));
}

/* Four floats in that order. */
INLINE __m128 kvc_order_pairs(const float *x) { return _mm_permute_ps(_mm_loadu_ps(x), 0xd8); }

INLINE __m256 kvc_abs(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.f), x); }

INLINE __m128i kvc_max_half(__m256i x)
{
    __m128i a = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    a = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_max_epu32(a, _mm_shuffle_epi32(a, 0xb1));
}

/* The largest of numbers that are not negative, NaN if one is: as integers they are in that order. */
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

/* What a row (or page of weights) with this largest magnitude is multiplied by to become integers, and the step that
 * multiplies them back; a row that holds NaN or Inf is NaN as a whole: integers 0, step NaN. limit: the largest integer. */
INLINE float kvc_factor(float largest, float limit, float *step)
{
    *step = largest < INFINITY ? largest / limit : NAN;
    return largest > KVC_TINY && largest < INFINITY ? limit / largest : 0;
}

/* x * factor as integers, 0 where factor is 0. */
INLINE __m256i kvc_integers(__m256 x, float factor)
{
    if (factor == 0) return _mm256_setzero_si256();
    return _mm256_cvtps_epi32(_mm256_mul_ps(x, _mm256_set1_ps(factor)));
}

#endif
