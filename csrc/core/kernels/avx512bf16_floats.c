/* avx512bf16_floats.c - bf16 and fp8 pages with vdpbf16ps: products of pairs of bf16 are exact, sums are fp32. q and p
 * are one bf16 each, or two if one is not exact (the second is the remainder of the first). fp8 codes are converted to
 * bf16, exactly, including subnormals.
 *
 *   per 64 bytes and query row    K                                   V                                   shared
 *   raw_bf16                      1 vdpbf16ps, 2 if q is not bf16     1 vdpbf16ps (bf16 output), else 2   -
 *   fp8                           2 vdpbf16ps, or 4                   2 vdpbf16ps, or 4                   2 vpermi2b,
 *                                                                                  1 vpternlogd, 2 vpunpck */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512bf16,f16c,fma")
#include "avx512bf16.h"

/* Adds the two halves of each lane, in order. */
INLINE __m512 join(__m512 a, __m512 b)
{
    __m512i x = _mm512_castps_si512(a), y = _mm512_castps_si512(b);
    return _mm512_add_ps(_mm512_castsi512_ps(fp8_half(0, x, y)), _mm512_castsi512_ps(fp8_half(1, x, y)));
}

INLINE __m512 dot(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
INLINE __m512i four(const uint16_t *p) { return _mm512_set1_epi64(*(const int64_t *)(const void *)p); }

/* ---------------------------------------------------------------- K */

INLINE void bf16_tiles(int PARTS, int NR, int NT, kvc_qk_args args, int64_t tile0)
{
    int64_t dim = args.query->dim, bytes = KVC_TILE * dim * 2;
    const uint16_t *q[2] = {args.query->forms[KVC_PLAIN].half + args.row0 * dim,
                            args.query->forms[KVC_PLAIN].rest + args.row0 * dim};
    args.tiles += tile0 * bytes;
    __m512 sum[4][4];
    EACH (r, NR)
        EACH (t, NT) sum[r][t] = _mm512_setzero_ps();
    for (int64_t j = 0; j < dim; j += 2)
        EACH (t, NT) {
            __m512i w = _mm512_loadu_si512(args.tiles + t * bytes + j * KVC_TILE * 2);
            kvc_prefetch(args.tiles, j / 2 * NT + t, args.ahead);
            EACH (r, NR)
                EACH (i, PARTS) sum[r][t] = dot(sum[r][t], w, kvc_word(q[i] + r * dim + j));
        }
    const __m512 unit = _mm512_set1_ps(args.query->forms[KVC_PLAIN].unit);
    EACH (r, NR)
        EACH (t, NT) _mm512_storeu_ps(args.s + r * args.ld + (tile0 + t) * KVC_TILE, _mm512_mul_ps(sum[r][t], unit));
}

INLINE void fp8_tiles(int PARTS, int NR, int NT, const fp8_table *x, kvc_qk_args args, int64_t tile0)
{
    int64_t dim = args.query->dim, bytes = KVC_TILE * dim;
    const uint16_t *q[2] = {args.query->forms[KVC_PLAIN].half + args.row0 * dim,
                            args.query->forms[KVC_PLAIN].rest + args.row0 * dim};
    args.tiles += tile0 * bytes;
    __m512 a[4][4], b[4][4];
    EACH (r, NR)
        EACH (t, NT) a[r][t] = b[r][t] = _mm512_setzero_ps();
    for (int64_t j = 0; j < dim; j += 4) {
        __m512i v[4], w[4];
        EACH (t, NT) {
            kvc_prefetch(args.tiles, j / 4 * NT + t, args.ahead);
            fp8_to_bf16(x, _mm512_loadu_si512(args.tiles + t * bytes + j * KVC_TILE), &v[t], &w[t]);
        }
        EACH (r, NR)
            EACH (i, PARTS) {
                __m512i y = four(q[i] + r * dim + j);
                EACH (t, NT) {
                    a[r][t] = dot(a[r][t], v[t], y);
                    b[r][t] = dot(b[r][t], w[t], y);
                }
            }
    }
    EACH (t, NT) {
        __m512 unit = _mm512_mul_ps(kvc_scales(args.meta, (tile0 + t) * KVC_TILE),
                                    _mm512_set1_ps(args.query->forms[KVC_PLAIN].unit));
        EACH (r, NR)
            _mm512_storeu_ps(args.s + r * args.ld + (tile0 + t) * KVC_TILE,
                             _mm512_mul_ps(join(a[r][t], b[r][t]), unit));
    }
}

INLINE void qk_raw_bf16(kvc_qk_args args)
{
    if (args.query->forms[KVC_PLAIN].whole) {
#define CALL(NR, N) bf16_tiles(1, NR, N, args, at)
        KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 4, 4, 4)
#undef CALL
        return;
    }
#define CALL(NR, N) bf16_tiles(2, NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 4, 4, 2)
#undef CALL
}
void kvc_avx512bf16_qk_raw_bf16(const kvc_qk_args *args) { qk_raw_bf16(*args); }

INLINE void fp8_qk(int e5m2, kvc_qk_args args)
{
    fp8_table x = fp8_load_table(e5m2);
    if (args.query->forms[KVC_PLAIN].whole) {
#define CALL(NR, N) fp8_tiles(1, NR, N, &x, args, at)
        KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 4, 2, 2)
#undef CALL
        return;
    }
#define CALL(NR, N) fp8_tiles(2, NR, N, &x, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 4, 2, 2)
#undef CALL
}
void kvc_avx512bf16_qk_fp8_e4m3(const kvc_qk_args *args) { fp8_qk(0, *args); }
void kvc_avx512bf16_qk_fp8_e5m2(const kvc_qk_args *args) { fp8_qk(1, *args); }

/* ---------------------------------------------------------------- V */

typedef struct weights {
    _Alignas(64) uint16_t half[KVC_ROWS][KVC_MAX_PAGE], rest[KVC_ROWS][KVC_MAX_PAGE];
} weights;

/* p (times scale, if meta is given; 0 from token n on) as bf16, and the remainders. */
INLINE void split(weights *w, const float *p, int64_t ld, int64_t rows, const uint8_t *meta, int64_t n)
{
    for (int64_t t = 0; t < n; t += KVC_TILE)
        for (int64_t r = 0; r < rows; r++) bf16_split(p + r * ld, meta, t, n, w->half[r] + t, w->rest[r] + t);
}

INLINE void add_to(float *o, __m512 x) { _mm512_storeu_ps(o, _mm512_add_ps(_mm512_loadu_ps(o), x)); }

/* NC blocks of 16 dims from d0. If n is odd, the upper half of the last word may hold anything (NaN). */
INLINE void bf16_dims(int PARTS, int NR, int NC, kvc_pv_args args, const weights *w, int64_t d0)
{
    const uint8_t *line = args.tiles + d0 * ((args.n + 1) / 2 * 4); /* to prefetch */
    __m512 sum[4][4];
    EACH (r, NR)
        EACH (c, NC) sum[r][c] = _mm512_setzero_ps();
    for (int64_t t = 0; t < args.n; t += 2) {
        __m512i v[4];
        EACH (c, NC) {
            const uint8_t *at = args.tiles + t * args.dim * 2 + (d0 + 16 * c) * 4;
            v[c] = _mm512_loadu_si512(at);
            if (t + 1 == args.n) v[c] = _mm512_and_si512(v[c], _mm512_set1_epi32(0xffff));
            kvc_prefetch(line, t / 2 * NC + c, args.ahead);
        }
        EACH (r, NR) {
            __m512i half = kvc_word(w->half[r] + t), rest = kvc_word(w->rest[r] + t);
            EACH (c, NC) sum[r][c] = dot(sum[r][c], v[c], half);
            if (PARTS == 2)
                EACH (c, NC) sum[r][c] = dot(sum[r][c], v[c], rest);
        }
    }
    EACH (r, NR)
        EACH (c, NC) add_to(args.o + r * args.dim + d0 + 16 * c, sum[r][c]);
}

INLINE void fp8_dims(int PARTS, int NR, int NC, const fp8_table *x, kvc_pv_args args, const weights *w, int64_t d0)
{
    const uint8_t *line = args.tiles + d0 * ((args.n + 3) / 4 * 4); /* to prefetch */
    __m512 a[4][4], b[4][4];
    EACH (r, NR)
        EACH (c, NC) a[r][c] = b[r][c] = _mm512_setzero_ps();
    for (int64_t t = 0; t < args.n; t += 4) {
        __m512i u[4], v[4];
        EACH (c, NC) {
            kvc_prefetch(line, t / 4 * NC + c, args.ahead);
            fp8_to_bf16(x, _mm512_loadu_si512(args.tiles + t * args.dim + (d0 + 16 * c) * 4), &u[c], &v[c]);
        }
        EACH (r, NR)
            EACH (i, PARTS) {
                __m512i y = four((i ? w->rest : w->half)[r] + t);
                EACH (c, NC) {
                    a[r][c] = dot(a[r][c], u[c], y);
                    b[r][c] = dot(b[r][c], v[c], y);
                }
            }
    }
    EACH (r, NR)
        EACH (c, NC) add_to(args.o + r * args.dim + d0 + 16 * c, join(a[r][c], b[r][c]));
}

INLINE void pv_raw_bf16(kvc_pv_args args)
{
    weights w;
    split(&w, args.p, args.ld, args.rows, NULL, args.n);
    if (args.digits != KVC_P_EXACT) {
#define CALL(NR, N) bf16_dims(1, NR, N, args, &w, at)
        KVC_BY_ROWS(CALL, args.rows, args.dim, 16, 4, 4, 4)
#undef CALL
        return;
    }
#define CALL(NR, N) bf16_dims(2, NR, N, args, &w, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 16, 4, 4, 4)
#undef CALL
}
void kvc_avx512bf16_pv_raw_bf16(const kvc_pv_args *args) { pv_raw_bf16(*args); }

INLINE void fp8_pv(int e5m2, kvc_pv_args args)
{
    fp8_table x = fp8_load_table(e5m2);
    weights w;
    split(&w, args.p, args.ld, args.rows, args.meta, args.n);
    if (args.digits != KVC_P_EXACT) {
#define CALL(NR, N) fp8_dims(1, NR, N, &x, args, &w, at)
        KVC_BY_ROWS(CALL, args.rows, args.dim, 16, 4, 2, 2)
#undef CALL
        return;
    }
#define CALL(NR, N) fp8_dims(2, NR, N, &x, args, &w, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 16, 4, 2, 2)
#undef CALL
}
void kvc_avx512bf16_pv_fp8_e4m3(const kvc_pv_args *args) { fp8_pv(0, *args); }
void kvc_avx512bf16_pv_fp8_e5m2(const kvc_pv_args *args) { fp8_pv(1, *args); }
KVC_TARGET_END
#endif
