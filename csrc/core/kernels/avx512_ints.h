/* avx512_ints.h - products of integer codes with q (K) and with weights (V), shared by int8, int4, int3, int2 and the
 * affine formats. Include after avx512.h. KIND (bits per code, or KVC_LLOYD4), LIMBS, NR (rows) and NT, NC (tiles,
 * blocks of 16 dims) are compile-time constants once inlined.
 *
 * Each plane of codes is shifted down once for all rows, and all planes are added to one sum. Per 64 bytes and row
 * there are 8 / bits * LIMBS vpdpbusd. Sums are exact. */
#ifndef KVC_AVX512_INTS_H
#define KVC_AVX512_INTS_H

#include "avx512_weights.h"

#include <math.h>

/* sum += products of unsigned a and signed b. In assembly, because gcc 12 moves the sums of the intrinsic between
 * registers and memory, at a higher cost than the additions. */
INLINE __m512i kvc_dp(__m512i sum, __m512i a, __m512i b)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

/* Packed codes; 3-bit codes have their high bits separately. */
typedef struct kvc_words {
    __m512i low, high;
} kvc_words;

/* Loads the 64 bytes at `at` of a tile. */
INLINE kvc_words kvc_load_words(int KIND, const uint8_t *tile, int64_t dim, int64_t at)
{
    kvc_words w = {_mm512_loadu_si512(tile + at), _mm512_setzero_si512()};
    if (KIND != 3) return w;
    bool second = at >= 2 * dim;
    w.high = _mm512_loadu_si512(tile + 4 * dim + at - (second ? 2 * dim : 0));
    w.high = _mm512_srl_epi16(w.high, _mm_cvtsi32_si128(second));
    return w;
}

/* Plane p of the codes in w, one per byte. Lloyd-Max codes are replaced by their levels plus 128. */
INLINE __m512i kvc_plane(int KIND, int p, kvc_words w)
{
    const int BITS = kvc_plane_bits(KIND);
    if (BITS == 8) return w.low;
    __m512i x = p ? _mm512_srl_epi16(w.low, _mm_cvtsi32_si128(BITS * p)) : w.low;
    if (KIND == 3) {
        __m512i y = p ? _mm512_srl_epi16(w.high, _mm_cvtsi32_si128(2 * p - 2)) : _mm512_slli_epi16(w.high, 2);
        y = _mm512_and_si512(y, _mm512_set1_epi8(4));
        return _mm512_ternarylogic_epi32(x, _mm512_set1_epi8(3), y, 0xea); /* x & 3 | y */
    }
    x = _mm512_and_si512(x, _mm512_set1_epi8((char)((1 << BITS) - 1)));
    if (KIND != KVC_LLOYD4) return x;
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)kvc_lloyd4_codes)), x);
}

/* dot[r][t] = sum over words [j0, j1) of dims of codes * (128 * hi + lo), or codes * hi with one limb, minus offset[r]
 * (NULL: 0). q of row r is at r * dim. */
INLINE void kvc_key_dots(int KIND, int LIMBS, int NR, int NT, const uint8_t *tiles, int64_t dim, int64_t j0, int64_t j1,
                         const int8_t *hi, const int8_t *lo, const int32_t *offset, ptrdiff_t ahead, __m512i dot[4][4])
{
    const int planes = 8 / kvc_plane_bits(KIND);
    int64_t period = dim / planes, bytes = kvc_kind_bytes(KIND, dim);
    __m512i high[4][4], low[4][4];
    EACH (r, NR)
        EACH (t, NT) {
            high[r][t] = low[r][t] = _mm512_setzero_si512();
            if (offset) *(LIMBS == 2 ? &low[r][t] : &high[r][t]) = _mm512_set1_epi32(-offset[r]);
        }
    for (int64_t j = j0; j < j1; j += 4) {
        kvc_words w[4];
        EACH (t, NT) w[t] = kvc_load_words(KIND, tiles + t * bytes, dim, j * KVC_TILE);
        EACH (p, planes) {
            __m512i c[4];
            EACH (t, NT) c[t] = kvc_plane(KIND, p, w[t]);
            EACH (r, NR) {
                int64_t at = r * dim + p * period + j;
                EACH (t, NT) high[r][t] = kvc_dp(high[r][t], c[t], kvc_word(hi + at));
                if (LIMBS == 2)
                    EACH (t, NT) low[r][t] = kvc_dp(low[r][t], c[t], kvc_word(lo + at));
                KVC_PREFETCH_SHARE(KIND, tiles + ahead, j / 4 * NT, NT, p * NR + r, planes * NR, high[r][0]);
            }
        }
    }
    EACH (r, NR)
        EACH (t, NT)
            dot[r][t] = LIMBS == 2 ? _mm512_add_epi32(_mm512_slli_epi32(high[r][t], 7), low[r][t]) : high[r][t];
}

/* dot[r][c] = sum over n tokens of codes * weights for dims from d0 on. n is rounded up to a multiple of 16; the
 * weights there are 0. Coarse weights have 8 bits and are the unsigned operand; codes of fewer bits, and Lloyd-Max
 * levels without their 128, fit the signed one. */
INLINE void kvc_value_dots(int KIND, bool COARSE, int NR, int NC, const uint8_t *tiles, int64_t dim, int64_t n,
                           int64_t d0, const weights *w, ptrdiff_t ahead, __m512i dot[4][4])
{
    const int BITS = kvc_plane_bits(KIND), planes = 8 / BITS;
    const bool levels = COARSE && KIND == KVC_LLOYD4;
    const uint8_t *from = tiles + (n + 15) / 16 * kvc_kind_bytes(KIND, d0); /* to prefetch */
    int64_t line = 0, bytes = kvc_kind_bytes(KIND, dim);
    __m512i high[4][4], low[4][4];
    EACH (r, NR)
        EACH (c, NC) high[r][c] = low[r][c] = _mm512_setzero_si512();
    for (int64_t t = 0; t < n; t += KVC_TILE, tiles += bytes)
        for (int64_t s = 0; s < BITS / 2; s++) {
            kvc_words v[4];
            EACH (c, NC) v[c] = kvc_load_words(KIND, tiles, dim, (s * dim + d0 + 16 * c) * 4);
            EACH (p, planes) {
                int64_t token = t + 4 * s + 2 * BITS * p;
                __m512i x[4];
                EACH (c, NC) x[c] = kvc_plane(KIND, p, v[c]);
                if (levels)
                    EACH (c, NC) x[c] = _mm512_xor_si512(x[c], _mm512_set1_epi8((char)128));
                EACH (r, NR) {
                    __m512i hi = kvc_word(w->hi[r] + token);
                    EACH (c, NC) {
                        if (COARSE) {
                            high[r][c] = kvc_dp(high[r][c], hi, x[c]);
                            continue;
                        }
                        high[r][c] = kvc_dp(high[r][c], x[c], hi);
                        low[r][c] = kvc_dp(low[r][c], x[c], kvc_word(w->lo[r] + token));
                    }
                    KVC_PREFETCH_SHARE(KIND, from + ahead, line, NC, p * NR + r, planes * NR, high[r][0]);
                }
            }
            line += NC;
        }
    EACH (r, NR)
        EACH (c, NC) dot[r][c] = COARSE ? high[r][c] : _mm512_add_epi32(_mm512_slli_epi32(high[r][c], 7), low[r][c]);
}

/* Scores of int8: codes minus 128, times the token's scale. */
INLINE __m512 kvc_int8_score(__m512i dot, __m512 scale, float step, int32_t sum)
{
    dot = _mm512_sub_epi32(dot, _mm512_set1_epi32(128 * sum));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(scale, _mm512_set1_ps(step)));
}

/* Dots of codes minus their middle. For codes in planes the middle is a half-integer, so the result is twice that. */
INLINE __m512i kvc_less_middle(int KIND, __m512i dot, int32_t sum)
{
    const bool bytes = KIND == 8 || KIND == KVC_LLOYD4;
    return _mm512_sub_epi32(_mm512_slli_epi32(dot, !bytes),
                            _mm512_set1_epi32(kvc_times(bytes ? 128 : (1 << KIND) - 1, sum)));
}
INLINE float kvc_middle_unit(int KIND) { return KIND == 8 || KIND == KVC_LLOYD4 ? 1 : 0.5f; }

/* Scores of rotated codes: minus their middle, times the token's gain, plus q . centroid. One limb is
 * in units of 128. */
INLINE __m512 kvc_mid_score(int KIND, int LIMBS, __m512i dot, __m512 gain, float step, int32_t sum, float centre)
{
    dot = kvc_less_middle(KIND, dot, sum);
    __m512 x = _mm512_mul_ps(gain, _mm512_set1_ps((LIMBS == 2 ? 1 : 128) * kvc_middle_unit(KIND) * step));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), x, _mm512_set1_ps(centre));
}

/* q . centroid of the page, for each of NR rows. */
INLINE void kvc_dot_centroid(int NR, const uint8_t *centroid, const kvc_query *query, int64_t row0, float *out)
{
    __m512 sum[4];
    __m128 all;
    EACH (r, 4) sum[r] = _mm512_setzero_ps();
    for (int64_t d = 0; d < query->dim; d += 16) {
        __m512 c = kvc_scales(centroid, d);
        EACH (r, NR)
            sum[r] =
                _mm512_fmadd_ps(c, _mm512_loadu_ps(query->forms[KVC_PLAIN].q + (row0 + r) * query->dim + d), sum[r]);
    }
    KVC_JOIN_LANES(_mm256_add_ps, _mm_add_ps, sum, all);
    _mm_mask_storeu_ps(out, (__mmask8)((1 << NR) - 1), all);
}

/* True if one limb of q is precise enough for this page (kvc_one_limb_of). */
INLINE bool kvc_one_limb(int KIND, float noise, const uint8_t *meta, const kvc_query *query, int64_t row0, int64_t rows,
                         int64_t n_tiles)
{
    __m512 most = _mm512_setzero_ps();
    if (!query->coarse) return false;
    for (int64_t t = 0; t < n_tiles; t++) most = _mm512_max_ps(kvc_scales(meta, t * KVC_TILE), most);
    return kvc_one_limb_of(KIND, noise, query, row0, rows, _mm512_reduce_max_ps(most));
}

/* o += step * (dot of codes minus their middle). */
INLINE void kvc_add_codes(int KIND, __m512i dot, float step, int32_t sum, float *o)
{
    __m512 y = _mm512_set1_ps(kvc_middle_unit(KIND) * step);
    __m512 x = _mm512_cvtepi32_ps(kvc_less_middle(KIND, dot, sum));
    _mm512_storeu_ps(o, _mm512_fmadd_ps(x, y, _mm512_loadu_ps(o)));
}

#endif
