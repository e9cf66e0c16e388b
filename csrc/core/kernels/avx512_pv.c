/* avx512_pv.c - weighted sum of one page of V. A lane is a dim; a word holds consecutive tokens of a dim.
 *
 * Integer formats: the token's scale is multiplied into p, the p of a page become two limbs (128 * hi + lo, hi and lo
 * in 0..127) relative to the row's largest weight in the page, and V is multiplied without unpacking. Sums are exact
 * within a page; sums over pages are fp32. Instructions per row and 64 bytes, plus those shared by the rows:
 *    int8        2 vpdpbusd
 *    int4        4 vpdpbusd + 3; coarse weights 2
 *    int2        8 vpdpbusd + 7; coarse 4
 *    int4_lloyd  as int4 + 2 vpshufb; coarse + 4
 *    int3        as int2 + 10, and 32 bytes more
 *    fp8_e4m3    4 vfmadd + 9
 *    bf16, f16   2 vfmadd + 2 */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")
#include "avx512_ints.h"

INLINE void add_to(float *o, __m512 x) { _mm512_storeu_ps(o, _mm512_add_ps(x, _mm512_loadu_ps(o))); }

/* ---------------------------------------------------------------- integers */

/* NC blocks of 16 dims from d0. */
INLINE void int_dims(int KIND, bool COARSE, int NR, int NC, kvc_pv_args args, const weights *w, int64_t d0)
{
    const bool levels = COARSE && KIND == KVC_LLOYD4; /* as signed operands */
    __m512i dots[4][4];
    kvc_value_dots(KIND, COARSE, NR, NC, args.tiles, args.dim, args.n, d0, w, args.ahead, dots);
    EACH (r, NR)
        EACH (c, NC)
            kvc_add_codes(KIND, dots[r][c], w->step[r], levels ? 0 : w->sum[r], args.o + r * args.dim + d0 + 16 * c);
}

/* ---------------------------------------------------------------- floats */

/* p: weights of the page, multiplied by the scale and 2^8, [row][KVC_MAX_PAGE]. */
INLINE void fp8_dims(int E, int NR, kvc_pv_args args, const float *p, int64_t d0)
{
    const uint8_t *line = args.tiles + d0 * ((args.n + 3) / 4 * 4); /* to prefetch */
    __m512 a[4], b[4];
    EACH (r, NR) a[r] = b[r] = _mm512_setzero_ps();
    for (int64_t t = 0; t < args.n; t += 4) {
        const uint8_t *at = args.tiles + t * args.dim + d0 * 4;
        __m512i w = _mm512_loadu_si512(at);
        if (E == 5 && t + 4 > args.n) w = _mm512_and_si512(w, _mm512_set1_epi32(kvc_stored_bytes(args.n - t)));
        kvc_prefetch(line, t / 4, args.ahead);
        __m512 e0, e1, o0, o1;
        kvc_widen(kvc_fp8_lower(E, w), &e0, &e1); /* tokens t, t+2 of dims 0-7, 8-15 */
        kvc_widen(kvc_fp8_upper(E, w), &o0, &o1); /* tokens t+1, t+3 */
        EACH (r, NR) {
            __m512 even, odd;
            kvc_split_pairs(p + r * KVC_MAX_PAGE + t, &even, &odd);
            a[r] = _mm512_fmadd_ps(o0, odd, _mm512_fmadd_ps(e0, even, a[r]));
            b[r] = _mm512_fmadd_ps(o1, odd, _mm512_fmadd_ps(e1, even, b[r]));
        }
    }
    EACH (r, NR) add_to(args.o + r * args.dim + d0, kvc_add_pairs(a[r], b[r]));
}

/* Word t / 2 of a 16-bit page. If n is odd, the upper half of the last word may hold anything; it is read as 0. */
INLINE __m512i word16(const uint8_t *at, int64_t t, int64_t n)
{
    __m512i w = _mm512_loadu_si512(at);
    return t + 1 < n ? w : _mm512_and_si512(w, _mm512_set1_epi32(0xffff));
}

INLINE void f16_dims(int NR, kvc_pv_args args, int64_t d0)
{
    const uint8_t *line = args.tiles + d0 * ((args.n + 1) / 2 * 4); /* to prefetch */
    __m512 a[4], b[4];
    EACH (r, NR) a[r] = b[r] = _mm512_setzero_ps();
    for (int64_t t = 0; t < args.n; t += 2) {
        __m512 x, y;
        const uint8_t *at = args.tiles + t * args.dim * 2 + d0 * 4;
        kvc_widen(word16(at, t, args.n), &x, &y);
        kvc_prefetch(line, t / 2, args.ahead);
        EACH (r, NR) {
            __m512 w = kvc_pair(args.p + r * args.ld + t);
            a[r] = _mm512_fmadd_ps(x, w, a[r]);
            b[r] = _mm512_fmadd_ps(y, w, b[r]);
        }
    }
    EACH (r, NR) add_to(args.o + r * args.dim + d0, kvc_add_pairs(a[r], b[r]));
}

INLINE void bf16_dims(int NR, int NC, kvc_pv_args args, int64_t d0)
{
    const uint8_t *line = args.tiles + d0 * ((args.n + 1) / 2 * 4); /* to prefetch */
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    __m512 sum[4][4];
    EACH (r, NR)
        EACH (c, NC) sum[r][c] = _mm512_setzero_ps();
    for (int64_t t = 0; t < args.n; t += 2)
        EACH (c, NC) {
            const uint8_t *at = args.tiles + t * args.dim * 2 + (d0 + 16 * c) * 4;
            __m512i w = word16(at, t, args.n);
            kvc_prefetch(line, t / 2 * NC + c, args.ahead);
            __m512 x = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
            __m512 y = _mm512_castsi512_ps(_mm512_and_si512(w, upper));
            EACH (r, NR) {
                sum[r][c] = _mm512_fmadd_ps(x, _mm512_set1_ps(args.p[r * args.ld + t]), sum[r][c]);
                sum[r][c] = _mm512_fmadd_ps(y, _mm512_set1_ps(args.p[r * args.ld + t + 1]), sum[r][c]);
            }
        }
    EACH (r, NR)
        EACH (c, NC) add_to(args.o + r * args.dim + d0 + 16 * c, sum[r][c]);
}

INLINE void f32_dims(int NR, int NC, kvc_pv_args args, int64_t d0)
{
    const uint8_t *line = args.tiles + d0 * (args.n * 4); /* to prefetch */
    __m512 sum[4][4];
    EACH (r, NR)
        EACH (c, NC) sum[r][c] = _mm512_setzero_ps();
    for (int64_t t = 0; t < args.n; t++)
        EACH (c, NC) {
            const uint8_t *at = args.tiles + t * args.dim * 4 + (d0 + 16 * c) * 4;
            __m512 x = _mm512_loadu_ps(at);
            kvc_prefetch(line, t * NC + c, args.ahead);
            EACH (r, NR) sum[r][c] = _mm512_fmadd_ps(x, _mm512_set1_ps(args.p[r * args.ld + t]), sum[r][c]);
        }
    EACH (r, NR)
        EACH (c, NC) add_to(args.o + r * args.dim + d0 + 16 * c, sum[r][c]);
}

/* ---------------------------------------------------------------- entry points */

INLINE void int_pv(int KIND, kvc_pv_args args)
{
    weights w;
    bool coarse = args.digits == KVC_P_BYTE && KIND != 8;
    EACH (r, KVC_ROWS) w.step[r] = 0, w.sum[r] = 0;
    weigh(args.p, args.ld, args.rows, args.meta, args.n, coarse,
          (digits_of){w.hi[0], w.lo[0], KVC_MAX_PAGE, w.step, w.sum});
    if (coarse) {
#define CALL(NR, N) int_dims(KIND, true, NR, N, args, &w, at)
        KVC_BY_ROWS(CALL, args.rows, args.dim, 16, 4, 4, 4)
#undef CALL
        return;
    }
#define CALL(NR, N) int_dims(KIND, false, NR, N, args, &w, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 16, 4, 4, 2)
#undef CALL
}

/* With the common dim as a constant, offsets of words need no registers. */
INLINE void by_dim(int KIND, kvc_pv_args args)
{
    if (args.dim == 128)
        int_pv(KIND, args);
    else
        int_pv(KIND, args);
}
void kvc_avx512_pv_int8(const kvc_pv_args *args) { by_dim(8, *args); }
void kvc_avx512_pv_int4(const kvc_pv_args *args) { by_dim(4, *args); }
void kvc_avx512_pv_int4_lloyd(const kvc_pv_args *args) { by_dim(KVC_LLOYD4, *args); }
void kvc_avx512_pv_int3(const kvc_pv_args *args) { by_dim(3, *args); }
void kvc_avx512_pv_int2(const kvc_pv_args *args) { by_dim(2, *args); }

INLINE void fp8_pv(int E, kvc_pv_args args)
{
    _Alignas(64) float weight[KVC_ROWS * KVC_MAX_PAGE];
    for (int64_t r = 0; r < args.rows; r++)
        for (int64_t t = 0; t < args.n; t += 16)
            _mm512_store_ps(
                weight + r * KVC_MAX_PAGE + t,
                _mm512_mul_ps(kvc_scaled(args.p + r * args.ld, args.meta, t, args.n), _mm512_set1_ps(kvc_fp8_unit(E))));
#define CALL(NR, N) fp8_dims(E, NR, args, weight, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 16, 1, 1, 1)
#undef CALL
}
void kvc_avx512_pv_fp8_e4m3(const kvc_pv_args *args) { fp8_pv(4, *args); }
void kvc_avx512_pv_fp8_e5m2(const kvc_pv_args *args) { fp8_pv(5, *args); }

INLINE void pv_raw_f16(kvc_pv_args args)
{
#define CALL(NR, N) f16_dims(NR, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 16, 1, 1, 1)
#undef CALL
}
void kvc_avx512_pv_raw_f16(const kvc_pv_args *args) { pv_raw_f16(*args); }

INLINE void pv_raw_bf16(kvc_pv_args args)
{
#define CALL(NR, N) bf16_dims(NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 16, 4, 4, 2)
#undef CALL
}
void kvc_avx512_pv_raw_bf16(const kvc_pv_args *args) { pv_raw_bf16(*args); }

INLINE void pv_raw_f32(kvc_pv_args args)
{
#define CALL(NR, N) f32_dims(NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 16, 4, 4, 2)
#undef CALL
}
void kvc_avx512_pv_raw_f32(const kvc_pv_args *args) { pv_raw_f32(*args); }
KVC_TARGET_END
#endif
