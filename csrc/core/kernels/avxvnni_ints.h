/* avxvnni_ints.h - products of integer codes with q (K) and with weights (V), by vpdpbusd on 32 bytes: unsigned codes
 * times signed limbs. Include after defining KVC_LIMBS and after avx2.h. KIND (bits per code, or KVC_LLOYD4), NR (rows)
 * and NT, NC (tiles, blocks of 16 dims) are compile-time constants once inlined.
 *
 * Two limbs take two passes over the same codes, which are in L1 the second time: the sum of the upper limbs is shifted
 * up and the lower ones are added to it. So four rows and 16 tokens (or dims) need only 8 of the 16 registers, and each
 * broadcast limb is used twice. Per 32 bytes, row and pass: 8 / bits vpdpbusd and half as many vpbroadcastd. Sums are
 * exact. */
#ifndef KVC_AVXVNNI_INTS_H
#define KVC_AVXVNNI_INTS_H

#include "avx2_weights.h"

/* CPUs that have AVX512-VNNI but not AVX-VNNI can run the EVEX encoding, for tests (KVCOMPRESS_AVXVNNI_MODEL in
 * setup.py). */
#ifdef KVC_AVXVNNI_MODEL
#define VPDPBUSD "vpdpbusd"
#else
#define VPDPBUSD "%{vex%} vpdpbusd"
#endif

/* sum += products of unsigned a and signed b. In assembly, as in avx512_ints.h. */
INLINE __m256i kvc_dp(__m256i sum, __m256i a, __m256i b)
{
    __asm__(VPDPBUSD " %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}

/* Plane p of the codes in w, one per byte. Lloyd-Max codes are replaced by their levels plus 128. */
INLINE __m256i kvc_bytes(int KIND, int p, kvc_words w)
{
    if (KIND == 8) return w.low;
    __m256i x = kvc_plane(KIND, p, w);
    if (KIND != KVC_LLOYD4) return x;
    return _mm256_shuffle_epi8(kvc_lloyd_levels(), x);
}

/* dot[r][t] += sum over words [j0, j1) of dims of codes * q, for tokens 0-7 and 8-15 of a tile. q of row r is at r *
 * dim. */
INLINE void key_pass(int KIND, int NR, int NT, const uint8_t *tiles, int64_t dim, int64_t j0, int64_t j1,
                     const int8_t *q, ptrdiff_t ahead, __m256i dot[4][4][2])
{
    const int planes = 8 / kvc_plane_bits(KIND);
    int64_t period = dim / planes, bytes = kvc_kind_bytes(KIND, dim);
    for (int64_t j = j0; j < j1; j += 4)
        EACH (t, NT) {
            const uint8_t *tile = tiles + t * bytes;
            kvc_words v = kvc_load_words(KIND, tile, dim, j * KVC_TILE),
                      w = kvc_load_words(KIND, tile, dim, j * KVC_TILE + 32);
            kvc_prefetch_planes(KIND, tiles, j / 4 * NT + t, ahead);
            EACH (p, planes) {
                __m256i a = kvc_bytes(KIND, p, v), b = kvc_bytes(KIND, p, w);
                EACH (r, NR) {
                    __m256i x = kvc_two(q + r * dim + p * period + j);
                    dot[r][t][0] = kvc_dp(dot[r][t][0], a, x);
                    dot[r][t][1] = kvc_dp(dot[r][t][1], b, x);
                }
            }
        }
}

/* dot = products with 128 * hi + lo, or with hi for one limb, minus offset[r] (NULL: 0). */
INLINE void kvc_key_dots(int KIND, int LIMBS, int NR, int NT, const uint8_t *tiles, int64_t dim, int64_t j0, int64_t j1,
                         const int8_t *hi, const int8_t *lo, const int32_t *offset, ptrdiff_t ahead,
                         __m256i dot[4][4][2])
{
    EACH (r, NR)
        EACH (t, NT) dot[r][t][0] = dot[r][t][1] = _mm256_setzero_si256();
    key_pass(KIND, NR, NT, tiles, dim, j0, j1, hi, ahead, dot);
    if (LIMBS == 1) return;
    EACH (r, NR) {
        __m256i less = offset ? _mm256_set1_epi32(offset[r]) : _mm256_setzero_si256();
        EACH (t, NT)
            EACH (h, 2) dot[r][t][h] = _mm256_sub_epi32(_mm256_slli_epi32(dot[r][t][h], 7), less);
    }
    key_pass(KIND, NR, NT, tiles, dim, j0, j1, lo, 0, dot);
}

/* dot[r][c] += sum over n tokens of codes * weights for 16 dims from d0 + 16 * c on. n is rounded up to a multiple of
 * 16; the weights there are 0. Coarse weights have 8 bits and are the unsigned operand; codes of fewer bits, and
 * Lloyd-Max levels without their 128, fit the signed one. */
INLINE void value_pass(int KIND, bool COARSE, int NR, int NC, const uint8_t *tiles, int64_t dim, int64_t n, int64_t d0,
                       const uint8_t w[][KVC_MAX_PAGE], ptrdiff_t ahead, __m256i dot[4][4][2])
{
    const int BITS = kvc_plane_bits(KIND), planes = 8 / BITS;
    const uint8_t *from = tiles + (n + 15) / 16 * kvc_kind_bytes(KIND, d0); /* to prefetch */
    int64_t line = 0, bytes = kvc_kind_bytes(KIND, dim);
    for (int64_t t = 0; t < n; t += KVC_TILE, tiles += bytes)
        for (int64_t s = 0; s < BITS / 2; s++)
            EACH (c, NC) {
                int64_t at = (s * dim + d0 + 16 * c) * 4;
                kvc_words u = kvc_load_words(KIND, tiles, dim, at), v = kvc_load_words(KIND, tiles, dim, at + 32);
                kvc_prefetch_planes(KIND, from, line++, ahead);
                EACH (p, planes) {
                    __m256i a = kvc_bytes(KIND, p, u), b = kvc_bytes(KIND, p, v);
                    if (COARSE && KIND == KVC_LLOYD4) {
                        a = _mm256_xor_si256(a, _mm256_set1_epi8((char)128));
                        b = _mm256_xor_si256(b, _mm256_set1_epi8((char)128));
                    }
                    EACH (r, NR) {
                        __m256i x = kvc_two(w[r] + t + 4 * s + 2 * BITS * p);
                        dot[r][c][0] = COARSE ? kvc_dp(dot[r][c][0], x, a) : kvc_dp(dot[r][c][0], a, x);
                        dot[r][c][1] = COARSE ? kvc_dp(dot[r][c][1], x, b) : kvc_dp(dot[r][c][1], b, x);
                    }
                }
            }
}

INLINE void kvc_value_dots(int KIND, bool COARSE, int NR, int NC, const uint8_t *tiles, int64_t dim, int64_t n,
                           int64_t d0, const weights *w, ptrdiff_t ahead, __m256i dot[4][4][2])
{
    EACH (r, NR)
        EACH (c, NC) dot[r][c][0] = dot[r][c][1] = _mm256_setzero_si256();
    if (COARSE) {
        value_pass(KIND, true, NR, NC, tiles, dim, n, d0, w->one, ahead, dot);
        return;
    }
    value_pass(KIND, false, NR, NC, tiles, dim, n, d0, w->limbs[0], ahead, dot);
    EACH (r, NR)
        EACH (c, NC)
            EACH (h, 2) dot[r][c][h] = _mm256_slli_epi32(dot[r][c][h], 7);
    value_pass(KIND, false, NR, NC, tiles, dim, n, d0, w->limbs[1], 0, dot);
}

#endif
