/* lanes_avx512.h - 16 lanes of fp32 (vf) or 32-bit integers (vi) for tile.h, as one zmm register. Include after the
 * level's target pragma. */
#ifndef KVC_LANES_AVX512_H
#define KVC_LANES_AVX512_H

#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;

INLINE vf f_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void f_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf f_all(float x) { return _mm512_set1_ps(x); }
INLINE vf f_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf f_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf f_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf f_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf f_sqrt(vf a) { return _mm512_sqrt_ps(a); }
INLINE vf f_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
/* a - b by a fused multiply-add, where the units for additions are busy. */
INLINE vf f_minus(vf a, vf b) { return _mm512_fnmadd_ps(b, f_all(1), a); }
/* Clamps x to [-most, most]; most > 0, and x is not NaN. */
INLINE vf f_within(vf x, float most) { return _mm512_range_ps(x, f_all(most), 2); }
INLINE vf f_floor(vf a) { return _mm512_roundscale_ps(a, 9); }
INLINE vf f_abs(vf a) { return _mm512_abs_ps(a); }
/* a < b ? a : b, a > b ? a : b. The result is b if they are equal or one is NaN. */
INLINE vf f_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf f_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vm f_less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE vf f_pick(vm m, vf yes, vf no) { return _mm512_mask_blend_ps(m, no, yes); }

INLINE vi i_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE vi i_load_half(const void *p) { return _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void i_store(void *p, vi x) { _mm512_storeu_si512(p, x); }
/* Non-temporal store; p is 64-byte aligned. */
INLINE void i_stream(void *p, vi x) { _mm512_stream_si512(p, x); }
INLINE void i_store_half(void *p, vi x) { _mm256_storeu_si256((__m256i *)p, _mm512_castsi512_si256(x)); }
INLINE vi i_all(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE vi i_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi i_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
INLINE vi i_and(vi a, vi b) { return _mm512_and_si512(a, b); }
INLINE vi i_or(vi a, vi b) { return _mm512_or_si512(a, b); }
#define i_left(a, n) _mm512_slli_epi32(a, (unsigned)(n))
#define i_right(a, n) _mm512_srli_epi32(a, (unsigned)(n))
INLINE vi i_max(vi a, vi b) { return _mm512_max_epi32(a, b); }
INLINE vi i_pick(vm m, vi yes, vi no) { return _mm512_mask_blend_epi32(m, no, yes); }
INLINE vi i_keep(vm m, vi a) { return _mm512_maskz_mov_epi32(m, a); }
INLINE vm i_is(vi a, vi b) { return _mm512_cmpeq_epi32_mask(a, b); }
INLINE int i_any(vi a) { return _mm512_test_epi32_mask(a, a) != 0; }
/* mask ? a : b, bitwise. */
INLINE vi i_mix(vi mask, vi a, vi b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xca); }

INLINE vi f_bits(vf a) { return _mm512_castps_si512(a); }
INLINE vf i_bits(vi a) { return _mm512_castsi512_ps(a); }
INLINE vf f_of(vi a) { return _mm512_cvtepi32_ps(a); }

/* t[a & 15] */
INLINE vf f_table(const float *t, vi a) { return _mm512_permutexvar_ps(a, _mm512_loadu_ps(t)); }

/* fp16 to fp32: 16 at p; the low or high halves of words. h_of: fp32 to fp16 in the low halves. */
INLINE vf h_load(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf h_low(vi a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }
INLINE vf h_high(vi a) { return h_low(i_right(a, 16)); }
INLINE vi h_of(vf a) { return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }

/* Stores or loads the low 16 (8) bits of each lane. */
INLINE void i_store16(void *p, vi a) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(a)); }
INLINE void i_store8(void *p, vi a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a)); }
INLINE vi i_load8(const void *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }

/* t[byte] for each byte, all below 16. */
INLINE vi i_look_up(const uint8_t *t, vi a)
{
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)t)), a);
}

/* Transposes the bytes of each group of four lanes as a 4 x 4 matrix. */
INLINE vi i_turn(vi a)
{
    return _mm512_shuffle_epi8(
        a, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
}

/* Transposes v as a 4 x 4 matrix of groups of four lanes. */
INLINE void i_quarters(vi *v)
{
    vi a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[0], v[1], 0xee);
    vi c = _mm512_shuffle_i32x4(v[2], v[3], 0x44), d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
    v[0] = _mm512_shuffle_i32x4(a, c, 0x88);
    v[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
    v[2] = _mm512_shuffle_i32x4(b, d, 0x88);
    v[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}

/* Transposes 16 x 16 lanes: first within groups of four, then the groups. */
INLINE void i_transpose(vi *v)
{
    vi w[16];
    for (int i = 0; i < 16; i += 4) {
        vi a = _mm512_unpacklo_epi32(v[i], v[i + 1]), b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
        vi c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]), d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
        w[i / 4] = _mm512_unpacklo_epi64(a, c);
        w[i / 4 + 4] = _mm512_unpackhi_epi64(a, c);
        w[i / 4 + 8] = _mm512_unpacklo_epi64(b, d);
        w[i / 4 + 12] = _mm512_unpackhi_epi64(b, d);
    }
    for (int k = 0; k < 4; k++) { /* w[4k ..] holds lane 4g + k of 16 rows; moved to v[4g + k] */
        i_quarters(w + 4 * k);
        for (int g = 0; g < 4; g++) v[4 * g + k] = w[4 * k + g];
    }
}

#endif
