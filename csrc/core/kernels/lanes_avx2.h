/* lanes_avx2.h - 16 lanes of fp32 (vf) or 32-bit integers (vi) for tile.h, as two ymm registers. Include after the
 * level's target pragma. */
#ifndef KVC_LANES_AVX2_H
#define KVC_LANES_AVX2_H

#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

typedef struct vf {
    __m256 a, b;
} vf;
typedef struct vi {
    __m256i a, b;
} vi;
typedef vi vm; /* mask: all ones for true */

#define BOTH(type, x, y) ((type){x, y})
#define FLOAT1(name, f)                                                                                                \
    INLINE vf name(vf x) { return BOTH(vf, f(x.a), f(x.b)); }
#define FLOAT2(name, f)                                                                                                \
    INLINE vf name(vf x, vf y) { return BOTH(vf, f(x.a, y.a), f(x.b, y.b)); }
#define INT2(name, f)                                                                                                  \
    INLINE vi name(vi x, vi y) { return BOTH(vi, f(x.a, y.a), f(x.b, y.b)); }

INLINE vf f_load(const float *p) { return BOTH(vf, _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE void f_store(float *p, vf x)
{
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
INLINE vf f_all(float x) { return BOTH(vf, _mm256_set1_ps(x), _mm256_set1_ps(x)); }
FLOAT2(f_add, _mm256_add_ps)
FLOAT2(f_sub, _mm256_sub_ps)
FLOAT2(f_mul, _mm256_mul_ps)
FLOAT2(f_div, _mm256_div_ps)
FLOAT1(f_sqrt, _mm256_sqrt_ps)
FLOAT1(f_floor, _mm256_floor_ps)
/* a < b ? a : b, a > b ? a : b. The result is b if they are equal or one is NaN. */
FLOAT2(f_min, _mm256_min_ps)
FLOAT2(f_max, _mm256_max_ps)
INLINE vf f_fma(vf x, vf y, vf z) { return BOTH(vf, _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)); }
/* x - y by a fused multiply-add, where the units for additions are busy. */
INLINE vf f_minus(vf x, vf y)
{
    __m256 one = _mm256_set1_ps(1);
    return BOTH(vf, _mm256_fnmadd_ps(y.a, one, x.a), _mm256_fnmadd_ps(y.b, one, x.b));
}
/* Clamps x to [-most, most]. */
INLINE vf f_within(vf x, float most) { return f_min(f_max(x, f_all(-most)), f_all(most)); }
INLINE vf f_abs(vf x)
{
    __m256 sign = _mm256_set1_ps(-0.f);
    return BOTH(vf, _mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b));
}

INLINE vi f_bits(vf x) { return BOTH(vi, _mm256_castps_si256(x.a), _mm256_castps_si256(x.b)); }
INLINE vf i_bits(vi x) { return BOTH(vf, _mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)); }
INLINE vf f_of(vi x) { return BOTH(vf, _mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }
INLINE vm f_less(vf x, vf y)
{
    return f_bits(BOTH(vf, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)));
}

INLINE vi i_load(const void *p)
{
    const __m256i *from = p;
    return BOTH(vi, _mm256_loadu_si256(from), _mm256_loadu_si256(from + 1));
}
INLINE vi i_load_half(const void *p) { return BOTH(vi, _mm256_loadu_si256(p), _mm256_setzero_si256()); }
INLINE void i_store(void *p, vi x)
{
    __m256i *to = p;
    _mm256_storeu_si256(to, x.a);
    _mm256_storeu_si256(to + 1, x.b);
}
/* Non-temporal store; p is 64-byte aligned. */
INLINE void i_stream(void *p, vi x)
{
    __m256i *to = p;
    _mm256_stream_si256(to, x.a);
    _mm256_stream_si256(to + 1, x.b);
}
INLINE void i_store_half(void *p, vi x) { _mm256_storeu_si256(p, x.a); }
INLINE vi i_all(uint32_t x) { return BOTH(vi, _mm256_set1_epi32((int)x), _mm256_set1_epi32((int)x)); }
INT2(i_add, _mm256_add_epi32)
INT2(i_sub, _mm256_sub_epi32)
INT2(i_and, _mm256_and_si256)
INT2(i_or, _mm256_or_si256)
INT2(i_max, _mm256_max_epi32)
INT2(i_is, _mm256_cmpeq_epi32)
#define i_left(x, n) BOTH(vi, _mm256_slli_epi32((x).a, (int)(n)), _mm256_slli_epi32((x).b, (int)(n)))
#define i_right(x, n) BOTH(vi, _mm256_srli_epi32((x).a, (int)(n)), _mm256_srli_epi32((x).b, (int)(n)))
INLINE vi i_keep(vm m, vi x) { return i_and(m, x); }
INLINE vi i_pick(vm m, vi yes, vi no)
{
    return BOTH(vi, _mm256_blendv_epi8(no.a, yes.a, m.a), _mm256_blendv_epi8(no.b, yes.b, m.b));
}
INLINE vf f_pick(vm m, vf yes, vf no) { return i_bits(i_pick(m, f_bits(yes), f_bits(no))); }
INLINE int i_any(vi x) { return !_mm256_testz_si256(x.a, x.a) || !_mm256_testz_si256(x.b, x.b); }
/* mask ? a : b, bitwise. */
INLINE vi i_mix(vi mask, vi x, vi y)
{
    return i_or(i_and(mask, x), BOTH(vi, _mm256_andnot_si256(mask.a, y.a), _mm256_andnot_si256(mask.b, y.b)));
}

INLINE __m256 table8(const float *t, __m256i x) /* bit 3 selects the half */
{
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(t), x);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(t + 8), x);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(x, 28)));
}
/* t[x & 15] */
INLINE vf f_table(const float *t, vi x) { return BOTH(vf, table8(t, x.a), table8(t, x.b)); }

/* The low 16 bits of each lane, in order. */
INLINE __m256i words16(vi x)
{
    __m256i mask = _mm256_set1_epi32(0xffff);
    __m256i both = _mm256_packus_epi32(_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask));
    return _mm256_permute4x64_epi64(both, 0xd8);
}
INLINE vf h_wide(__m256i x)
{
    return BOTH(vf, _mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}

/* fp16 to fp32: 16 at p; the low or high halves of words. h_of: fp32 to fp16 in the low halves. */
INLINE vf h_load(const void *p) { return h_wide(_mm256_loadu_si256(p)); }
INLINE vf h_low(vi x) { return h_wide(words16(x)); }
INLINE vf h_high(vi x) { return h_low(i_right(x, 16)); }
INLINE vi h_of(vf x)
{
    return BOTH(vi, _mm256_cvtepu16_epi32(_mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT)),
                _mm256_cvtepu16_epi32(_mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT)));
}

/* Stores or loads the low 16 (8) bits of each lane. */
INLINE void i_store16(void *p, vi x) { _mm256_storeu_si256(p, words16(x)); }
INLINE void i_store8(void *p, vi x)
{
    __m256i w = _mm256_and_si256(words16(x), _mm256_set1_epi16(0xff));
    _mm_storeu_si128(p, _mm_packus_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
INLINE vi i_load8(const void *p)
{
    __m128i x = _mm_loadu_si128(p);
    return BOTH(vi, _mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)));
}

/* t[byte] for each byte, all below 16. */
INLINE vi i_look_up(const uint8_t *t, vi x)
{
    __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)t));
    return BOTH(vi, _mm256_shuffle_epi8(table, x.a), _mm256_shuffle_epi8(table, x.b));
}

/* Transposes the bytes of each group of four lanes as a 4 x 4 matrix. */
INLINE vi i_turn(vi x)
{
    __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    return BOTH(vi, _mm256_shuffle_epi8(x.a, order), _mm256_shuffle_epi8(x.b, order));
}

#define HALVES(x, y, which) _mm256_permute2x128_si256(x, y, which)

/* Transposes v as a 4 x 4 matrix of groups of four lanes. */
INLINE void i_quarters(vi *v)
{
    vi w[4] = {{HALVES(v[0].a, v[1].a, 0x20), HALVES(v[2].a, v[3].a, 0x20)},
               {HALVES(v[0].a, v[1].a, 0x31), HALVES(v[2].a, v[3].a, 0x31)},
               {HALVES(v[0].b, v[1].b, 0x20), HALVES(v[2].b, v[3].b, 0x20)},
               {HALVES(v[0].b, v[1].b, 0x31), HALVES(v[2].b, v[3].b, 0x31)}};
    for (int i = 0; i < 4; i++) v[i] = w[i];
}

/* Transposes 16 x 16 lanes: first within groups of four, then the groups. */
INLINE void i_transpose(vi *v)
{
    vi w[16];
    for (int i = 0; i < 16; i += 4) {
#define INTERLEAVE(half)                                                                                               \
    {                                                                                                                  \
        __m256i p = _mm256_unpacklo_epi32(v[i].half, v[i + 1].half);                                                   \
        __m256i q = _mm256_unpackhi_epi32(v[i].half, v[i + 1].half);                                                   \
        __m256i r = _mm256_unpacklo_epi32(v[i + 2].half, v[i + 3].half);                                               \
        __m256i s = _mm256_unpackhi_epi32(v[i + 2].half, v[i + 3].half);                                               \
        w[i / 4].half = _mm256_unpacklo_epi64(p, r);                                                                   \
        w[i / 4 + 4].half = _mm256_unpackhi_epi64(p, r);                                                               \
        w[i / 4 + 8].half = _mm256_unpacklo_epi64(q, s);                                                               \
        w[i / 4 + 12].half = _mm256_unpackhi_epi64(q, s);                                                              \
    }
        INTERLEAVE(a)
        INTERLEAVE(b)
#undef INTERLEAVE
    }
    for (int k = 0; k < 4; k++) { /* w[4k ..] holds lane 4g + k of 16 rows; moved to v[4g + k] */
        i_quarters(w + 4 * k);
        for (int g = 0; g < 4; g++) v[4 * g + k] = w[4 * k + g];
    }
}

#undef HALVES
#undef FLOAT1
#undef FLOAT2
#undef INT2

#endif
