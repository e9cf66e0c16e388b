/* avx512_qk.c - scores of one page of K. A lane is a token, so there are no horizontal sums and no shuffles. Integer
 * sums are exact. One core reads 3-10 bytes/cycle from DRAM.
 *
 *   per 64 bytes of K and query row         instructions                          bytes/cycle at 4 rows,
 *                                                                                 from port counts, Zen 5 / ICX
 *   int8      2 vpdpbusd (two limbs of q)   VPDPBUSD zmm, zmm, m32{1to16}         16 / 8
 *   int4      4 vpdpbusd, 3 shared          planes shifted down; 2 with one limb   8 / 4 (16 / 8)
 *   int2      8 vpdpbusd, 7 shared          4 with one limb                        4 / 2 (8 / 4)
 *   int4_lloyd: int4 and 2 vpshufb shared; int3: int2 and 10 shared, 32 bytes more
 *   fp8_e4m3  4 vfmadd, 5 + 4 vcvtph2ps     byte to fp16 by shift, exact           7 / 5
 *   raw_bf16  2 vfmadd, 2 shared            exact widening                        13 / 10
 *   raw_f16   2 vfmadd, 2 vcvtph2ps shared  pairs of dims, added at the end       13 / 8
 *   raw_f32   1 vfmadd                                                            26 / 20 */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")
#include "avx512_ints.h"

/* ---------------------------------------------------------------- integers */

INLINE void int8_tiles(int64_t dim, int NR, int NT, kvc_qk_args args, int64_t tile0)
{
    const kvc_query_form *f = args.query->form;
    __m512i dots[4][4];
    kvc_key_dots(8, 2, NR, NT, args.tiles + tile0 * KVC_TILE * dim, dim, 0, dim, f->hi + args.row0 * dim,
                 f->lo + args.row0 * dim, NULL, args.ahead, dots);
    EACH (t, NT) {
        __m512 scale = kvc_scales(args.meta, (tile0 + t) * KVC_TILE);
        EACH (r, NR)
            _mm512_storeu_ps(args.s + r * args.ld + (tile0 + t) * KVC_TILE,
                             kvc_int8_score(dots[r][t], scale, f->step[args.row0 + r], f->sum[args.row0 + r]));
    }
}

INLINE void mid_tiles(int64_t dim, int KIND, int LIMBS, int NR, int NT, kvc_qk_args args, int64_t tile0,
                      const float *centre)
{
    const kvc_query_form *f = args.query->form;
    int64_t period = dim * kvc_plane_bits(KIND) / 8;
    const int8_t *hi = (LIMBS == 2 ? f->hi : f->one) + args.row0 * dim;
    const int32_t *sum = LIMBS == 2 ? f->sum : f->one_sum;
    __m512i dots[4][4];
    kvc_key_dots(KIND, LIMBS, NR, NT, args.tiles + tile0 * kvc_kind_bytes(KIND, dim), dim, 0, period, hi,
                 f->lo + args.row0 * dim, NULL, args.ahead, dots);
    EACH (t, NT) {
        __m512 gain = kvc_scales(args.meta, (tile0 + t) * KVC_TILE);
        EACH (r, NR)
            _mm512_storeu_ps(
                args.s + r * args.ld + (tile0 + t) * KVC_TILE,
                kvc_mid_score(KIND, LIMBS, dots[r][t], gain, f->step[args.row0 + r], sum[args.row0 + r], centre[r]));
    }
}

/* ---------------------------------------------------------------- floats */

INLINE void fp8_tiles(int E, int NR, kvc_qk_args args, int64_t tile)
{
    int64_t dim = args.query->dim;
    __m512 a[4], b[4];
    EACH (r, NR) a[r] = b[r] = _mm512_setzero_ps();
    const uint8_t *k = args.tiles + tile * KVC_TILE * dim;
    for (int64_t j = 0; j < dim; j += 4) {
        __m512i w = _mm512_loadu_si512(k + j * KVC_TILE);
        kvc_prefetch(k + j * KVC_TILE, 0, args.ahead);
        __m512 e0, e1, o0, o1;
        kvc_widen(kvc_fp8_lower(E, w), &e0, &e1); /* dims j, j+2 of tokens 0-7, 8-15 */
        kvc_widen(kvc_fp8_upper(E, w), &o0, &o1); /* dims j+1, j+3 */
        EACH (r, NR) {
            __m512 even, odd;
            kvc_split_pairs(args.query->forms[KVC_PLAIN].q + (args.row0 + r) * dim + j, &even, &odd);
            a[r] = _mm512_fmadd_ps(o0, odd, _mm512_fmadd_ps(e0, even, a[r]));
            b[r] = _mm512_fmadd_ps(o1, odd, _mm512_fmadd_ps(e1, even, b[r]));
        }
    }
    __m512 scale = _mm512_mul_ps(kvc_scales(args.meta, tile * KVC_TILE), _mm512_set1_ps(kvc_fp8_unit(E)));
    EACH (r, NR)
        _mm512_storeu_ps(args.s + r * args.ld + tile * KVC_TILE, _mm512_mul_ps(kvc_add_pairs(a[r], b[r]), scale));
}

INLINE void f16_tiles(int NR, kvc_qk_args args, int64_t tile)
{
    int64_t dim = args.query->dim;
    __m512 a[4], b[4];
    EACH (r, NR) a[r] = b[r] = _mm512_setzero_ps();
    const uint8_t *k = args.tiles + tile * KVC_TILE * dim * 2;
    for (int64_t j = 0; j < dim; j += 2) {
        __m512 x, y;
        const uint8_t *at = k + j * KVC_TILE * 2;
        kvc_widen(_mm512_loadu_si512(at), &x, &y);
        kvc_prefetch(at, 0, args.ahead);
        EACH (r, NR) {
            __m512 q = kvc_pair(args.query->forms[KVC_PLAIN].q + (args.row0 + r) * dim + j);
            a[r] = _mm512_fmadd_ps(x, q, a[r]);
            b[r] = _mm512_fmadd_ps(y, q, b[r]);
        }
    }
    EACH (r, NR) _mm512_storeu_ps(args.s + r * args.ld + tile * KVC_TILE, kvc_add_pairs(a[r], b[r]));
}

INLINE void bf16_tiles(int NR, int NT, kvc_qk_args args, int64_t tile0)
{
    int64_t dim = args.query->dim, bytes = KVC_TILE * dim * 2;
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    __m512 sum[4][4];
    EACH (r, NR)
        EACH (t, NT) sum[r][t] = _mm512_setzero_ps();
    for (int64_t j = 0; j < dim; j += 2)
        EACH (t, NT) {
            const uint8_t *at = args.tiles + (tile0 + t) * bytes + j * KVC_TILE * 2;
            __m512i w = _mm512_loadu_si512(at);
            kvc_prefetch(args.tiles + tile0 * bytes, j / 2 * NT + t, args.ahead);
            __m512 x = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
            __m512 y = _mm512_castsi512_ps(_mm512_and_si512(w, upper));
            EACH (r, NR) {
                const float *q = args.query->forms[KVC_PLAIN].q + (args.row0 + r) * dim + j;
                sum[r][t] = _mm512_fmadd_ps(x, _mm512_set1_ps(q[0]), sum[r][t]);
                sum[r][t] = _mm512_fmadd_ps(y, _mm512_set1_ps(q[1]), sum[r][t]);
            }
        }
    EACH (r, NR)
        EACH (t, NT) _mm512_storeu_ps(args.s + r * args.ld + (tile0 + t) * KVC_TILE, sum[r][t]);
}

INLINE void f32_tiles(int NR, int NT, kvc_qk_args args, int64_t tile0)
{
    int64_t dim = args.query->dim, bytes = KVC_TILE * dim * 4;
    __m512 sum[4][4];
    EACH (r, NR)
        EACH (t, NT) sum[r][t] = _mm512_setzero_ps();
    for (int64_t j = 0; j < dim; j++)
        EACH (t, NT) {
            const uint8_t *at = args.tiles + (tile0 + t) * bytes + j * KVC_TILE * 4;
            __m512 x = _mm512_loadu_ps(at);
            kvc_prefetch(args.tiles + tile0 * bytes, j * NT + t, args.ahead);
            EACH (r, NR)
                sum[r][t] = _mm512_fmadd_ps(
                    x, _mm512_set1_ps(args.query->forms[KVC_PLAIN].q[(args.row0 + r) * dim + j]), sum[r][t]);
        }
    EACH (r, NR)
        EACH (t, NT) _mm512_storeu_ps(args.s + r * args.ld + (tile0 + t) * KVC_TILE, sum[r][t]);
}

/* ---------------------------------------------------------------- entry points */

INLINE void int8_qk(int64_t dim, kvc_qk_args args){
#define CALL(NR, N) int8_tiles(dim, NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 4, 4, 2)
#undef CALL
}

INLINE void mid_qk(int KIND, int64_t dim, kvc_qk_args args)
{
    float centre[KVC_ROWS];
    const uint8_t *centroid = args.meta + 2 * args.page_size;
    switch (args.rows) {
    case 1: kvc_dot_centroid(1, centroid, args.query, args.row0, centre); break;
    case 2: kvc_dot_centroid(2, centroid, args.query, args.row0, centre); break;
    case 3: kvc_dot_centroid(3, centroid, args.query, args.row0, centre); break;
    default: kvc_dot_centroid(4, centroid, args.query, args.row0, centre);
    }
    if (kvc_one_limb(KIND, KVC_NOISE, args.meta, args.query, args.row0, args.rows, args.n_tiles)) {
#define CALL(NR, N) mid_tiles(dim, KIND, 1, NR, N, args, at, centre)
        KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 4, 4, 4)
#undef CALL
        return;
    }
#define CALL(NR, N) mid_tiles(dim, KIND, 2, NR, N, args, at, centre)
    KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 4, 4, 2)
#undef CALL
}

/* With the common dim as a constant, offsets of rows and tiles need no registers. */
INLINE void mid_by_dim(int KIND, kvc_qk_args args)
{
    args.query->dim == 128 ? mid_qk(KIND, 128, args) : mid_qk(KIND, args.query->dim, args);
}
void kvc_avx512_qk_int8(const kvc_qk_args *args)
{
    args->query->dim == 128 ? int8_qk(128, *args) : int8_qk(args->query->dim, *args);
}
void kvc_avx512_qk_int4(const kvc_qk_args *args) { mid_by_dim(4, *args); }
void kvc_avx512_qk_int4_lloyd(const kvc_qk_args *args) { mid_by_dim(KVC_LLOYD4, *args); }
void kvc_avx512_qk_int3(const kvc_qk_args *args) { mid_by_dim(3, *args); }
void kvc_avx512_qk_int2(const kvc_qk_args *args) { mid_by_dim(2, *args); }

INLINE void fp8_qk(int E, kvc_qk_args args)
{
#define CALL(NR, N) fp8_tiles(E, NR, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 1, 1, 1)
#undef CALL
}
void kvc_avx512_qk_fp8_e4m3(const kvc_qk_args *args) { fp8_qk(4, *args); }
void kvc_avx512_qk_fp8_e5m2(const kvc_qk_args *args) { fp8_qk(5, *args); }

INLINE void qk_raw_f16(kvc_qk_args args)
{
#define CALL(NR, N) f16_tiles(NR, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 1, 1, 1)
#undef CALL
}
void kvc_avx512_qk_raw_f16(const kvc_qk_args *args) { qk_raw_f16(*args); }

INLINE void qk_raw_bf16(kvc_qk_args args)
{
#define CALL(NR, N) bf16_tiles(NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 4, 4, 2)
#undef CALL
}
void kvc_avx512_qk_raw_bf16(const kvc_qk_args *args) { qk_raw_bf16(*args); }

INLINE void qk_raw_f32(kvc_qk_args args)
{
#define CALL(NR, N) f32_tiles(NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 4, 4, 2)
#undef CALL
}
void kvc_avx512_qk_raw_f32(const kvc_qk_args *args) { qk_raw_f32(*args); }
KVC_TARGET_END
#endif
