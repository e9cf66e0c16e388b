/* avx512_qk.c - scores of one page of K: a lane is a token, so there is no horizontal sum and no shuffle.
 *
 *   per 64 bytes of K and query row         instructions                          bytes/cycle at 4 rows, from port counts, Zen 5 / ICX
 *   int8      2 vpdpbusd (two limbs of q)   VPDPBUSD zmm, zmm, m32{1to16}         16 / 8
 *   int4      4 vpdpbusd, 3 shared          planes shifted down; 2 with one limb   8 / 4 (16 / 8)
 *   int2      8 vpdpbusd, 7 shared          4 with one limb                        4 / 2 (8 / 4)
 *   int4_lloyd: int4 and 2 vpshufb shared; int3: int2 and 10 shared, 32 bytes more
 *   fp8_e4m3  4 vfmadd, 5 + 4 vcvtph2ps     byte -> fp16 by shift, exact           7 / 5
 *   raw_bf16  2 vfmadd, 2 shared            exact widening                        13 / 10
 *   raw_f16   2 vfmadd, 2 vcvtph2ps shared  pairs of dims, added at the end       13 / 8
 *   raw_f32   1 vfmadd                                                            26 / 20
 * One core draws 3-10 bytes/cycle from DRAM. Integer sums are exact. */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")
#include "avx512_ints.h"

/* ---------------------------------------------------------------- integers */

INLINE void int8_tiles(int64_t dim, int NR, int NT, const uint8_t *tiles, const uint8_t *meta, const kvc_query *query,
                       int64_t row0, int64_t tile0, ptrdiff_t ahead, float *s, int64_t ld)
{
    const kvc_query_form *f = query->form;
    __m512i dots[4][4];
    kvc_key_dots(8, 2, NR, NT, tiles + tile0 * KVC_TILE * dim, dim, 0, dim, f->hi + row0 * dim, f->lo + row0 * dim,
                 NULL, ahead, dots);
    EACH (t, NT) {
        __m512 scale = kvc_scales(meta, (tile0 + t) * KVC_TILE);
        EACH (r, NR)
            _mm512_storeu_ps(s + r * ld + (tile0 + t) * KVC_TILE,
                             kvc_int8_score(dots[r][t], scale, f->step[row0 + r], f->sum[row0 + r]));
    }
}

INLINE void mid_tiles(int64_t dim, int KIND, int LIMBS, int NR, int NT, const uint8_t *tiles, const uint8_t *meta,
                      const kvc_query *query, int64_t row0, int64_t tile0, ptrdiff_t ahead, const float *centre,
                      float *s, int64_t ld)
{
    const kvc_query_form *f = query->form;
    int64_t period = dim * kvc_plane_bits(KIND) / 8;
    const int8_t *hi = (LIMBS == 2 ? f->hi : f->one) + row0 * dim;
    const int32_t *sum = LIMBS == 2 ? f->sum : f->one_sum;
    __m512i dots[4][4];
    kvc_key_dots(KIND, LIMBS, NR, NT, tiles + tile0 * kvc_kind_bytes(KIND, dim), dim, 0, period, hi, f->lo + row0 * dim,
                 NULL, ahead, dots);
    EACH (t, NT) {
        __m512 gain = kvc_scales(meta, (tile0 + t) * KVC_TILE);
        EACH (r, NR)
            _mm512_storeu_ps(s + r * ld + (tile0 + t) * KVC_TILE,
                             kvc_mid_score(KIND, LIMBS, dots[r][t], gain, f->step[row0 + r], sum[row0 + r], centre[r]));
    }
}

/* ---------------------------------------------------------------- floats */

INLINE void fp8_tiles(int E, int NR, const uint8_t *tiles, const uint8_t *meta, const kvc_query *query, int64_t row0,
                      int64_t tile, ptrdiff_t ahead, float *s, int64_t ld)
{
    int64_t dim = query->dim;
    __m512 a[4], b[4];
    EACH (r, NR) a[r] = b[r] = _mm512_setzero_ps();
    const uint8_t *k = tiles + tile * KVC_TILE * dim;
    for (int64_t j = 0; j < dim; j += 4) {
        __m512i w = _mm512_loadu_si512(k + j * KVC_TILE);
        kvc_prefetch(k + j * KVC_TILE, 0, ahead);
        __m512 e0, e1, o0, o1;
        kvc_widen(kvc_fp8_lower(E, w), &e0, &e1); /* dims j, j+2 of tokens 0-7, 8-15 */
        kvc_widen(kvc_fp8_upper(E, w), &o0, &o1); /* dims j+1, j+3 */
        EACH (r, NR) {
            __m512 even, odd;
            kvc_split_pairs(query->forms[KVC_PLAIN].q + (row0 + r) * dim + j, &even, &odd);
            a[r] = _mm512_fmadd_ps(o0, odd, _mm512_fmadd_ps(e0, even, a[r]));
            b[r] = _mm512_fmadd_ps(o1, odd, _mm512_fmadd_ps(e1, even, b[r]));
        }
    }
    __m512 scale = _mm512_mul_ps(kvc_scales(meta, tile * KVC_TILE), _mm512_set1_ps(kvc_fp8_unit(E)));
    EACH (r, NR) _mm512_storeu_ps(s + r * ld + tile * KVC_TILE, _mm512_mul_ps(kvc_add_pairs(a[r], b[r]), scale));
}

INLINE void f16_tiles(int NR, const uint8_t *tiles, const kvc_query *query, int64_t row0, int64_t tile, ptrdiff_t ahead,
                      float *s, int64_t ld)
{
    int64_t dim = query->dim;
    __m512 a[4], b[4];
    EACH (r, NR) a[r] = b[r] = _mm512_setzero_ps();
    const uint8_t *k = tiles + tile * KVC_TILE * dim * 2;
    for (int64_t j = 0; j < dim; j += 2) {
        __m512 x, y;
        const uint8_t *at = k + j * KVC_TILE * 2;
        kvc_widen(_mm512_loadu_si512(at), &x, &y);
        kvc_prefetch(at, 0, ahead);
        EACH (r, NR) {
            __m512 q = kvc_pair(query->forms[KVC_PLAIN].q + (row0 + r) * dim + j);
            a[r] = _mm512_fmadd_ps(x, q, a[r]);
            b[r] = _mm512_fmadd_ps(y, q, b[r]);
        }
    }
    EACH (r, NR) _mm512_storeu_ps(s + r * ld + tile * KVC_TILE, kvc_add_pairs(a[r], b[r]));
}

INLINE void bf16_tiles(int NR, int NT, const uint8_t *tiles, const kvc_query *query, int64_t row0, int64_t tile0,
                       ptrdiff_t ahead, float *s, int64_t ld)
{
    int64_t dim = query->dim, bytes = KVC_TILE * dim * 2;
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    __m512 sum[4][4];
    EACH (r, NR)
        EACH (t, NT) sum[r][t] = _mm512_setzero_ps();
    for (int64_t j = 0; j < dim; j += 2)
        EACH (t, NT) {
            const uint8_t *at = tiles + (tile0 + t) * bytes + j * KVC_TILE * 2;
            __m512i w = _mm512_loadu_si512(at);
            kvc_prefetch(tiles + tile0 * bytes, j / 2 * NT + t, ahead);
            __m512 x = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
            __m512 y = _mm512_castsi512_ps(_mm512_and_si512(w, upper));
            EACH (r, NR) {
                const float *q = query->forms[KVC_PLAIN].q + (row0 + r) * dim + j;
                sum[r][t] = _mm512_fmadd_ps(x, _mm512_set1_ps(q[0]), sum[r][t]);
                sum[r][t] = _mm512_fmadd_ps(y, _mm512_set1_ps(q[1]), sum[r][t]);
            }
        }
    EACH (r, NR)
        EACH (t, NT) _mm512_storeu_ps(s + r * ld + (tile0 + t) * KVC_TILE, sum[r][t]);
}

INLINE void f32_tiles(int NR, int NT, const uint8_t *tiles, const kvc_query *query, int64_t row0, int64_t tile0,
                      ptrdiff_t ahead, float *s, int64_t ld)
{
    int64_t dim = query->dim, bytes = KVC_TILE * dim * 4;
    __m512 sum[4][4];
    EACH (r, NR)
        EACH (t, NT) sum[r][t] = _mm512_setzero_ps();
    for (int64_t j = 0; j < dim; j++)
        EACH (t, NT) {
            const uint8_t *at = tiles + (tile0 + t) * bytes + j * KVC_TILE * 4;
            __m512 x = _mm512_loadu_ps(at);
            kvc_prefetch(tiles + tile0 * bytes, j * NT + t, ahead);
            EACH (r, NR)
                sum[r][t] =
                    _mm512_fmadd_ps(x, _mm512_set1_ps(query->forms[KVC_PLAIN].q[(row0 + r) * dim + j]), sum[r][t]);
        }
    EACH (r, NR)
        EACH (t, NT) _mm512_storeu_ps(s + r * ld + (tile0 + t) * KVC_TILE, sum[r][t]);
}

/* ---------------------------------------------------------------- entry points */

INLINE void int8_qk(int64_t dim, KVC_QK_ARGS)
{
    (void)page_size;
#define CALL(NR, N) int8_tiles(dim, NR, N, tiles, meta, query, row0, at, ahead, s, ld)
    KVC_BY_ROWS(CALL, rows, n_tiles, 1, 4, 4, 2)
#undef CALL
}

INLINE void mid_qk(int KIND, int64_t dim, KVC_QK_ARGS)
{
    float centre[KVC_ROWS];
    const uint8_t *centroid = meta + 2 * page_size;
    switch (rows) {
    case 1: kvc_dot_centroid(1, centroid, query, row0, centre); break;
    case 2: kvc_dot_centroid(2, centroid, query, row0, centre); break;
    case 3: kvc_dot_centroid(3, centroid, query, row0, centre); break;
    default: kvc_dot_centroid(4, centroid, query, row0, centre);
    }
    if (kvc_one_limb(KIND, meta, query, row0, rows, n_tiles)) {
#define CALL(NR, N) mid_tiles(dim, KIND, 1, NR, N, tiles, meta, query, row0, at, ahead, centre, s, ld)
        KVC_BY_ROWS(CALL, rows, n_tiles, 1, 4, 4, 4)
#undef CALL
        return;
    }
#define CALL(NR, N) mid_tiles(dim, KIND, 2, NR, N, tiles, meta, query, row0, at, ahead, centre, s, ld)
    KVC_BY_ROWS(CALL, rows, n_tiles, 1, 4, 4, 2)
#undef CALL
}

/* The usual dim as a constant: offsets of rows and tiles then take no registers. */
#define BY_DIM(CALL, dim) (dim) == 128 ? CALL(128) : CALL(dim)
#define INT8(D) int8_qk(D, tiles, meta, query, row0, rows, page_size, n_tiles, ahead, s, ld)
#define INT4(D) mid_qk(4, D, tiles, meta, query, row0, rows, page_size, n_tiles, ahead, s, ld)
#define INT4_LLOYD(D) mid_qk(KVC_LLOYD4, D, tiles, meta, query, row0, rows, page_size, n_tiles, ahead, s, ld)
#define INT3(D) mid_qk(3, D, tiles, meta, query, row0, rows, page_size, n_tiles, ahead, s, ld)
#define INT2(D) mid_qk(2, D, tiles, meta, query, row0, rows, page_size, n_tiles, ahead, s, ld)
void kvc_avx512_qk_int8(KVC_QK_ARGS) { BY_DIM(INT8, query->dim); }
void kvc_avx512_qk_int4(KVC_QK_ARGS) { BY_DIM(INT4, query->dim); }
void kvc_avx512_qk_int4_lloyd(KVC_QK_ARGS) { BY_DIM(INT4_LLOYD, query->dim); }
void kvc_avx512_qk_int3(KVC_QK_ARGS) { BY_DIM(INT3, query->dim); }
void kvc_avx512_qk_int2(KVC_QK_ARGS) { BY_DIM(INT2, query->dim); }

INLINE void fp8_qk(int E, KVC_QK_ARGS)
{
    (void)page_size;
#define CALL(NR, N) fp8_tiles(E, NR, tiles, meta, query, row0, at, ahead, s, ld)
    KVC_BY_ROWS(CALL, rows, n_tiles, 1, 1, 1, 1)
#undef CALL
}
void kvc_avx512_qk_fp8_e4m3(KVC_QK_ARGS)
{
    fp8_qk(4, tiles, meta, query, row0, rows, page_size, n_tiles, ahead, s, ld);
}
void kvc_avx512_qk_fp8_e5m2(KVC_QK_ARGS)
{
    fp8_qk(5, tiles, meta, query, row0, rows, page_size, n_tiles, ahead, s, ld);
}

void kvc_avx512_qk_raw_f16(KVC_QK_ARGS)
{
    (void)page_size, (void)meta;
#define CALL(NR, N) f16_tiles(NR, tiles, query, row0, at, ahead, s, ld)
    KVC_BY_ROWS(CALL, rows, n_tiles, 1, 1, 1, 1)
#undef CALL
}

void kvc_avx512_qk_raw_bf16(KVC_QK_ARGS)
{
    (void)page_size, (void)meta;
#define CALL(NR, N) bf16_tiles(NR, N, tiles, query, row0, at, ahead, s, ld)
    KVC_BY_ROWS(CALL, rows, n_tiles, 1, 4, 4, 2)
#undef CALL
}

void kvc_avx512_qk_raw_f32(KVC_QK_ARGS)
{
    (void)page_size, (void)meta;
#define CALL(NR, N) f32_tiles(NR, N, tiles, query, row0, at, ahead, s, ld)
    KVC_BY_ROWS(CALL, rows, n_tiles, 1, 4, 4, 2)
#undef CALL
}
KVC_TARGET_END
#endif
