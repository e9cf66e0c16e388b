/* avx512bf16.h - fp8 codes and softmax weights as bf16, shared by the files with bf16 products. Include after their
 * target pragma. */
#ifndef KVC_AVX512BF16_H
#define KVC_AVX512BF16_H

#include "avx512.h"

/* bf16 of the positive code c. Subnormals (exponent 0) are normalized: m / 2^M of the leading bit. */
#define E4M3(c) ((c) >= 8 ? (((c) >> 3) + 120) << 7 | ((c) & 7) << 4 : TINY((c), 118))
#define E5M2(c) ((c) >= 4 ? (((c) >> 2) + 112) << 7 | ((c) & 3) << 5 : TINY((c), 111))
#define TINY(m, e)                                                                                                     \
    ((m) >= 4 ? ((e) + 2) << 7 | ((m) & 3) << 5 : (m) >= 2 ? ((e) + 1) << 7 | ((m) & 1) << 6 : (m) ? (e) << 7 : 0)
#define UPPER(F, c) (uint8_t)(F(c) >> 8)
#define LOWER(F, c) (uint8_t)(F(c) & 255)
#define FOUR(PART, F, c) PART(F, c), PART(F, (c) + 1), PART(F, (c) + 2), PART(F, (c) + 3)
#define SIXTEEN(PART, F, c) FOUR(PART, F, c), FOUR(PART, F, (c) + 4), FOUR(PART, F, (c) + 8), FOUR(PART, F, (c) + 12)
#define ALL(PART, F)                                                                                                   \
    SIXTEEN(PART, F, 0), SIXTEEN(PART, F, 16), SIXTEEN(PART, F, 32), SIXTEEN(PART, F, 48), SIXTEEN(PART, F, 64),       \
        SIXTEEN(PART, F, 80), SIXTEEN(PART, F, 96), SIXTEEN(PART, F, 112)
/* [e5m2][upper, lower byte] */
static _Alignas(64) const uint8_t kvc_fp8_tables[2][2][128] = {{{ALL(UPPER, E4M3)}, {ALL(LOWER, E4M3)}},
                                                               {{ALL(UPPER, E5M2)}, {ALL(LOWER, E5M2)}}};

typedef struct fp8_table {
    __m512i upper[2], lower[2];
} fp8_table;

INLINE fp8_table fp8_load_table(int e5m2)
{
    fp8_table x;
    EACH (i, 2) {
        x.upper[i] = _mm512_load_si512(kvc_fp8_tables[e5m2][0] + 64 * i);
        x.lower[i] = _mm512_load_si512(kvc_fp8_tables[e5m2][1] + 64 * i);
    }
    return x;
}

/* For every four lanes: a gets the codes of lanes 0 and 1 (two bytes per lane), b those of lanes 2 and 3. */
INLINE void fp8_to_bf16(const fp8_table *x, __m512i w, __m512i *a, __m512i *b)
{
    __m512i upper = _mm512_permutex2var_epi8(x->upper[0], w, x->upper[1]);
    __m512i lower = _mm512_permutex2var_epi8(x->lower[0], w, x->lower[1]);
    upper = _mm512_ternarylogic_epi32(upper, w, _mm512_set1_epi8((char)0x80), 0xf8); /* upper | (w & sign) */
    *a = _mm512_unpacklo_epi8(lower, upper);
    *b = _mm512_unpackhi_epi8(lower, upper);
}

/* Restores the order of fp8_to_bf16's a and b: the first (0) or second (1) half of every lane. */
INLINE __m512i fp8_half(int second, __m512i a, __m512i b)
{
    const __m512i first = _mm512_setr_epi32(0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30);
    return _mm512_permutex2var_epi32(a, _mm512_or_si512(first, _mm512_set1_epi32(second)), b);
}

/* 16 weights from p (times scale, if meta is given; 0 from token n on) as bf16, and the remainders
 * unless rest is NULL. */
INLINE void bf16_split(const float *p, const uint8_t *meta, int64_t t, int64_t n, uint16_t *half, uint16_t *rest)
{
    __mmask16 stored = (__mmask16)(n - t >= 16 ? 0xffffu : (1u << (n - t)) - 1);
    __m512 scale = meta ? kvc_scales(meta, t) : _mm512_set1_ps(1);
    __m512 x = _mm512_maskz_mul_ps(stored, _mm512_loadu_ps(p + t), scale);
    __m256i first = (__m256i)_mm512_cvtneps_pbh(x);
    _mm256_store_si256((__m256i *)half, first);
    if (!rest) return;
    __m512 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(first), 16));
    _mm256_store_si256((__m256i *)rest, (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(x, back)));
}

#endif
