/* avx2_pv.c - weighted sum of one page of V. A lane is a dim; a word holds consecutive tokens of a dim.
 *
 * Integer formats: the token's scale is multiplied into p, the p of a page become 15-bit integers relative to the row's
 * largest weight in the page, and the codes are widened to 16 bits (avx2.h). Sums are exact within a page; sums over
 * pages are fp32. Instructions per 32 bytes of V and row, plus those shared by the rows:
 *    int8       2 vpmaddwd, 2 vpaddd + 2
 *    int4       4 vpmaddwd, 4 vpaddd + 7; coarse weights (8 bits) 2 vpmaddubsw, 2 vpaddw, 1 + 3
 *    int2       8 vpmaddwd, 8 vpaddd + 15; coarse 4 vpmaddubsw, 4 vpaddw + 7
 *    int4_lloyd as int4 + 9; coarse (7 bits) 2 vpmaddubsw, 2 vpmaddwd, 2 vpaddd + 5
 *    int3       as int2 + 40, and 16 bytes more
 *    fp8_e4m3   4 vfmadd + 11
 *    bf16, f16  2 vfmadd + 2 */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx2,fma,f16c")
#include "avx2.h"
#include "avx2_weights.h"

INLINE int64_t ceil16(int64_t n) { return (n + 15) / 16 * 16; }

/* ---------------------------------------------------------------- integers: 16 dims from d0 */

INLINE void int8_dims(int NR, kvc_pv_args args, const weights *w, int64_t d0)
{
    const uint8_t *line = args.tiles + d0 * ((args.n + 3) / 4 * 4); /* to prefetch */
    const __m256i byte = _mm256_set1_epi16(255);
    __m256i sum[4][2];
    EACH (r, NR) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
    for (int64_t t = 0; t < args.n; t += 4) {
        const uint8_t *at = args.tiles + t * args.dim + d0 * 4;
        __m256i u = kvc_load(at), v = kvc_load(at + 32);
        kvc_prefetch(line, t / 4, args.ahead);
        __m256i a = _mm256_and_si256(u, byte), b = _mm256_and_si256(v, byte);
        EACH (r, NR) {
            __m256i x = kvc_two(w->z[r] + t);
            sum[r][0] = kvc_dot(sum[r][0], a, x);
            sum[r][1] = kvc_dot(sum[r][1], b, x);
        }
        a = _mm256_srli_epi16(u, 8), b = _mm256_srli_epi16(v, 8);
        EACH (r, NR) {
            __m256i x = kvc_two(w->z[r] + t + 2);
            sum[r][0] = kvc_dot(sum[r][0], a, x);
            sum[r][1] = kvc_dot(sum[r][1], b, x);
        }
    }
    add_codes(8, NR, sum, w, args.dim, d0, args.o);
}

/* Rotated codes with coarse weights; Lloyd-Max levels with 7-bit weights, because their pairs need all 16 bits. */
INLINE void coarse_dims(int KIND, int NR, kvc_pv_args args, const weights *w, int64_t d0)
{
    const int BITS = kvc_plane_bits(KIND), planes = 8 / BITS;
    const int tokens = KVC_TILE * (KIND == 4 ? 1 : KIND == 3 ? 2 : 4); /* tokens per four additions */
    const uint8_t *line = args.tiles + ceil16(args.n) / KVC_TILE * kvc_kind_bytes(KIND, d0); /* to prefetch */
    int64_t bytes = kvc_kind_bytes(KIND, args.dim) / KVC_TILE;
    const __m256i levels = _mm256_xor_si256(kvc_lloyd_levels(), _mm256_set1_epi8((char)128));
    __m256i sum[4][2];
    EACH (r, NR) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
    for (int64_t t = 0; t < args.n;) {
        __m256i part[4][2];
        EACH (r, NR) part[r][0] = part[r][1] = _mm256_setzero_si256();
        for (int64_t end = kvc_min(args.n, t + tokens); t < end; t += KVC_TILE)
            EACH (s, BITS / 2) {
                const uint8_t *tile = args.tiles + t * bytes;
                int64_t at = (s * args.dim + d0) * 4;
                kvc_words u = kvc_load_words(KIND, tile, args.dim, at),
                          v = kvc_load_words(KIND, tile, args.dim, at + 32);
                kvc_prefetch_planes(KIND, line, t * BITS / 32 + s, args.ahead);
                EACH (p, planes) {
                    __m256i a = kvc_plane(KIND, p, u), b = kvc_plane(KIND, p, v);
                    if (KIND == KVC_LLOYD4) a = _mm256_shuffle_epi8(levels, a), b = _mm256_shuffle_epi8(levels, b);
                    EACH (r, NR) {
                        __m256i x = kvc_two(w->one[r] + t + 4 * s + p * 2 * BITS);
                        if (KIND == KVC_LLOYD4) {
                            sum[r][0] = kvc_dot_bytes(sum[r][0], x, a);
                            sum[r][1] = kvc_dot_bytes(sum[r][1], x, b);
                            continue;
                        }
                        part[r][0] = kvc_add_bytes(part[r][0], x, a);
                        part[r][1] = kvc_add_bytes(part[r][1], x, b);
                    }
                }
            }
        if (KIND != KVC_LLOYD4)
            EACH (r, NR)
                EACH (h, 2) sum[r][h] = kvc_add_part(sum[r][h], part[r][h]);
    }
    add_codes(KIND, NR, sum, w, args.dim, d0, args.o);
}

/* Rotated codes minus their middle. */
INLINE void mid_dims(int KIND, int NR, kvc_pv_args args, const weights *w, int64_t d0)
{
    const int BITS = kvc_plane_bits(KIND), planes = 8 / BITS;
    const uint8_t *line = args.tiles + ceil16(args.n) / KVC_TILE * kvc_kind_bytes(KIND, d0); /* to prefetch */
    int64_t bytes = kvc_kind_bytes(KIND, args.dim) / KVC_TILE;
    __m256i sum[4][2];
    EACH (r, NR) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
    for (int64_t t = 0; t < args.n; t += KVC_TILE)
        for (int64_t s = 0; s < BITS / 2; s++) {
            const uint8_t *tile = args.tiles + t * bytes;
            int64_t at = (s * args.dim + d0) * 4;
            kvc_words u = kvc_load_words(KIND, tile, args.dim, at), v = kvc_load_words(KIND, tile, args.dim, at + 32);
            kvc_prefetch_planes(KIND, line, t * BITS / 32 + s, args.ahead);
            EACH (i, 2 * planes) { /* as 16-bit integers: planes of even tokens, then of odd tokens */
                __m256i a = kvc_codes(KIND, i, u), b = kvc_codes(KIND, i, v);
                EACH (r, NR) {
                    __m256i x = kvc_two(w->z[r] + t + 4 * s + i % planes * (KVC_TILE / planes) + i / planes * 2);
                    sum[r][0] = kvc_dot(sum[r][0], a, x);
                    sum[r][1] = kvc_dot(sum[r][1], b, x);
                }
            }
        }
    add_codes(KIND, NR, sum, w, args.dim, d0, args.o);
}

/* ---------------------------------------------------------------- floats: NC blocks of 8 or 16 dims from d0 */

/* p: weights of the page in pair order, multiplied by the scale and 2^8, [row][KVC_MAX_PAGE]. */
INLINE void fp8_dims(int E, int NR, int NC, kvc_pv_args args, const float *p, int64_t d0)
{
    if (d0 % 16) args.ahead = 0;                                    /* prefetch each line once */
    const uint8_t *line = args.tiles + d0 * ((args.n + 3) / 4 * 4); /* to prefetch */
    __m256 a[4][4], b[4][4];                                        /* dims 0-3, 4-7, in pairs of lanes */
    EACH (r, NR)
        EACH (c, NC) a[r][c] = b[r][c] = _mm256_setzero_ps();
    for (int64_t t = 0; t < args.n; t += 4)
        EACH (c, NC) {
            const uint8_t *at = args.tiles + t * args.dim + (d0 + 8 * c) * 4;
            __m256i w = kvc_load(at);
            if (E == 5 && t + 4 > args.n) w = _mm256_and_si256(w, _mm256_set1_epi32(kvc_stored_bytes(args.n - t)));
            if (c % 2 == 0) kvc_prefetch(line, t / 4 * ((NC + 1) / 2) + c / 2, args.ahead);
            __m256 e0, e1, o0, o1;
            kvc_widen(kvc_fp8_lower(E, w), &e0, &e1); /* tokens t, t+2 */
            kvc_widen(kvc_fp8_upper(E, w), &o0, &o1); /* tokens t+1, t+3 */
            EACH (r, NR) {
                __m256 even = kvc_pair(p + r * KVC_MAX_PAGE + t), odd = kvc_pair(p + r * KVC_MAX_PAGE + t + 2);
                a[r][c] = _mm256_fmadd_ps(o0, odd, _mm256_fmadd_ps(e0, even, a[r][c]));
                b[r][c] = _mm256_fmadd_ps(o1, odd, _mm256_fmadd_ps(e1, even, b[r][c]));
            }
        }
    EACH (r, NR)
        EACH (c, NC) add_to(args.o + r * args.dim + d0 + 8 * c, kvc_add_pairs(a[r][c], b[r][c]), 1);
}

/* Loads words t / 2 of a 16-bit page as fp32. If n is odd, the upper half of the last word may hold anything; it is
 * read as 0. */
INLINE __m256 f16_words(const uint8_t *at, int64_t t, int64_t n)
{
    __m128i w = _mm_loadu_si128((const __m128i *)(const void *)at);
    return _mm256_cvtph_ps(t + 1 < n ? w : _mm_and_si128(w, _mm_set1_epi32(0xffff)));
}

INLINE void f16_dims(int NR, int NC, kvc_pv_args args, int64_t d0)
{
    if (d0 % 16) args.ahead = 0;                                    /* prefetch each line once */
    const uint8_t *line = args.tiles + d0 * ((args.n + 1) / 2 * 4); /* to prefetch */
    __m256 a[4][4], b[4][4];
    EACH (r, NR)
        EACH (c, NC) a[r][c] = b[r][c] = _mm256_setzero_ps();
    for (int64_t t = 0; t < args.n; t += 2)
        EACH (c, NC) {
            const uint8_t *at = args.tiles + t * args.dim * 2 + (d0 + 8 * c) * 4;
            if (c % 2 == 0) kvc_prefetch(line, t / 2 * ((NC + 1) / 2) + c / 2, args.ahead);
            __m256 x = f16_words(at, t, args.n), y = f16_words(at + 16, t, args.n);
            EACH (r, NR) {
                __m256 w = kvc_pair(args.p + r * args.ld + t);
                a[r][c] = _mm256_fmadd_ps(x, w, a[r][c]);
                b[r][c] = _mm256_fmadd_ps(y, w, b[r][c]);
            }
        }
    EACH (r, NR)
        EACH (c, NC) add_to(args.o + r * args.dim + d0 + 8 * c, kvc_add_pairs(a[r][c], b[r][c]), 1);
}

INLINE void bf16_dims(int NR, int NC, kvc_pv_args args, int64_t d0)
{
    const uint8_t *line = args.tiles + d0 * ((args.n + 1) / 2 * 4); /* to prefetch */
    const __m256 upper = _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000u));
    __m256 sum[4][4][2];
    EACH (r, NR)
        EACH (c, NC) sum[r][c][0] = sum[r][c][1] = _mm256_setzero_ps();
    for (int64_t t = 0; t < args.n; t += 2)
        EACH (c, NC) {
            const uint8_t *at = args.tiles + t * args.dim * 2 + (d0 + 16 * c) * 4;
            kvc_prefetch(line, t / 2 * NC + c, args.ahead);
            __m256i u = kvc_load(at), v = kvc_load(at + 32);
            __m256 x = _mm256_castsi256_ps(_mm256_slli_epi32(u, 16)), y = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
            EACH (r, NR) {
                __m256 w = _mm256_set1_ps(args.p[r * args.ld + t]);
                sum[r][c][0] = _mm256_fmadd_ps(x, w, sum[r][c][0]);
                sum[r][c][1] = _mm256_fmadd_ps(y, w, sum[r][c][1]);
            }
            if (t + 1 == args.n) continue; /* the upper half may hold anything */
            x = _mm256_and_ps(_mm256_castsi256_ps(u), upper), y = _mm256_and_ps(_mm256_castsi256_ps(v), upper);
            EACH (r, NR) {
                __m256 w = _mm256_set1_ps(args.p[r * args.ld + t + 1]);
                sum[r][c][0] = _mm256_fmadd_ps(x, w, sum[r][c][0]);
                sum[r][c][1] = _mm256_fmadd_ps(y, w, sum[r][c][1]);
            }
        }
    EACH (r, NR)
        EACH (c, NC)
            EACH (h, 2) add_to(args.o + r * args.dim + d0 + 16 * c + 8 * h, sum[r][c][h], 1);
}

INLINE void f32_dims(int NR, int NC, kvc_pv_args args, int64_t d0)
{
    const uint8_t *line = args.tiles + d0 * (args.n * 4); /* to prefetch */
    __m256 sum[4][4][2];
    EACH (r, NR)
        EACH (c, NC) sum[r][c][0] = sum[r][c][1] = _mm256_setzero_ps();
    for (int64_t t = 0; t < args.n; t++)
        EACH (c, NC) {
            const uint8_t *at = args.tiles + t * args.dim * 4 + (d0 + 16 * c) * 4;
            kvc_prefetch(line, t * NC + c, args.ahead);
            __m256 x = _mm256_castsi256_ps(kvc_load(at)), y = _mm256_castsi256_ps(kvc_load(at + 32));
            EACH (r, NR) {
                __m256 w = _mm256_set1_ps(args.p[r * args.ld + t]);
                sum[r][c][0] = _mm256_fmadd_ps(x, w, sum[r][c][0]);
                sum[r][c][1] = _mm256_fmadd_ps(y, w, sum[r][c][1]);
            }
        }
    EACH (r, NR)
        EACH (c, NC)
            EACH (h, 2) add_to(args.o + r * args.dim + d0 + 16 * c + 8 * h, sum[r][c][h], 1);
}

/* ---------------------------------------------------------------- entry points */

INLINE void pv_int8(kvc_pv_args args)
{
    weights w;
    to_integers(&w, args.p, args.ld, args.rows, args.meta, args.n, KVC_P_LIMIT);
#define CALL(NR, N) int8_dims(NR, args, &w, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 16, 1, 1, 1)
#undef CALL
}
void kvc_avx2_pv_int8(const kvc_pv_args *args) { pv_int8(*args); }

INLINE void mid_pv(int KIND, kvc_pv_args args)
{
    weights w;
    bool coarse = args.digits == KVC_P_BYTE;
    float limit = !coarse ? KVC_P_LIMIT : KIND == KVC_LLOYD4 ? 127 : 255;
    to_integers(&w, args.p, args.ld, args.rows, args.meta, args.n, limit);
    if (coarse) {
        if (KIND == KVC_LLOYD4) memset(w.sum, 0, sizeof w.sum); /* signed levels have no middle */
#define CALL(NR, N) coarse_dims(KIND, NR, args, &w, at)
        KVC_BY_ROWS(CALL, args.rows, args.dim, 16, 1, 1, 1)
#undef CALL
        return;
    }
#define CALL(NR, N) mid_dims(KIND, NR, args, &w, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 16, 1, 1, 1)
#undef CALL
}
void kvc_avx2_pv_int4(const kvc_pv_args *args) { mid_pv(4, *args); }
void kvc_avx2_pv_int4_lloyd(const kvc_pv_args *args) { mid_pv(KVC_LLOYD4, *args); }
void kvc_avx2_pv_int3(const kvc_pv_args *args) { mid_pv(3, *args); }
void kvc_avx2_pv_int2(const kvc_pv_args *args) { mid_pv(2, *args); }

INLINE void fp8_pv(int E, kvc_pv_args args)
{
    _Alignas(32) float weight[KVC_ROWS * KVC_MAX_PAGE], scale[KVC_MAX_PAGE];
    load_scales(scale, args.meta, args.n);
    for (int64_t r = 0; r < args.rows; r++)
        for (int64_t t = 0; t < args.n; t += 8) {
            __m256 x = _mm256_mul_ps(_mm256_loadu_ps(args.p + r * args.ld + t), _mm256_load_ps(scale + t));
            x = _mm256_mul_ps(x, _mm256_set1_ps(kvc_fp8_unit(E)));
            _mm256_store_ps(weight + r * KVC_MAX_PAGE + t, _mm256_permute_ps(x, 0xd8));
        }
#define CALL(NR, N) fp8_dims(E, NR, N, args, weight, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 8, 4, 2, 1)
#undef CALL
}
void kvc_avx2_pv_fp8_e4m3(const kvc_pv_args *args) { fp8_pv(4, *args); }
void kvc_avx2_pv_fp8_e5m2(const kvc_pv_args *args) { fp8_pv(5, *args); }

INLINE void pv_raw_f16(kvc_pv_args args)
{
#define CALL(NR, N) f16_dims(NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 8, 4, 2, 1)
#undef CALL
}
void kvc_avx2_pv_raw_f16(const kvc_pv_args *args) { pv_raw_f16(*args); }

INLINE void pv_raw_bf16(kvc_pv_args args)
{
#define CALL(NR, N) bf16_dims(NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 16, 4, 2, 1)
#undef CALL
}
void kvc_avx2_pv_raw_bf16(const kvc_pv_args *args) { pv_raw_bf16(*args); }

INLINE void pv_raw_f32(kvc_pv_args args)
{
#define CALL(NR, N) f32_dims(NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 16, 4, 2, 1)
#undef CALL
}
void kvc_avx2_pv_raw_f32(const kvc_pv_args *args) { pv_raw_f32(*args); }
KVC_TARGET_END
#endif
