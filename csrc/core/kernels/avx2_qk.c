/* avx2_qk.c - scores of one page of K. A lane is a token, so there are no horizontal sums and no shuffles. Integer sums
 * are exact (avx2.h). Instructions per 32 bytes of K and query row, plus those shared by the rows:
 *    int8       2 vpmaddwd, 2 vpaddd + 2 (even and odd bytes to 16 bits)
 *    int4       4 vpmaddwd, 4 vpaddd + 7 (four nibbles to 16 bits); one limb 2 vpmaddubsw, 2 vpaddw, 1 + 3
 *    int2       8 vpmaddwd, 8 vpaddd + 15; one limb 4 vpmaddubsw, 4 vpaddw + 7
 *    int4_lloyd as int4 + 9
 *    int3       as int2 + 40, and 32 bytes more per 64
 *    fp8_e4m3   4 vfmadd + 5, 2 vextracti128, 4 vcvtph2ps (byte to fp16 by shift, exact)
 *    raw_bf16   2 vfmadd + 2 (exact widening)
 *    raw_f16    2 vfmadd + 2 vcvtph2ps (pairs of dims, added at the end)
 *    raw_f32    1 vfmadd */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx2,fma,f16c")
#include "avx2_scores.h"

/* ---------------------------------------------------------------- integers */

INLINE void int8_tile(int NR, kvc_qk_args args, int64_t tile)
{
    const kvc_query_form *f = args.query->form;
    const __m256i byte = _mm256_set1_epi16(255);
    int64_t dim = args.query->dim, half = dim / 2;
    __m256i sum[4][2]; /* tokens 0-7, 8-15 */
    EACH (r, NR) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
    const uint8_t *at = args.tiles + tile * KVC_TILE * dim;
    EACH (part, 2) {
        const int8_t *q = (part ? f->lo : f->hi) + args.row0 * dim;
        for (int64_t j = 0; j < half; j += 4, at += 4 * KVC_TILE) {
            __m256i v = kvc_load(at), w = kvc_load(at + 32);
            kvc_prefetch(at, 0, args.ahead);
            __m256i a = _mm256_and_si256(v, byte), b = _mm256_and_si256(w, byte);
            EACH (r, NR) {
                __m256i x = kvc_two(q + r * dim + 2 * j);
                sum[r][0] = kvc_dot(sum[r][0], a, x);
                sum[r][1] = kvc_dot(sum[r][1], b, x);
            }
            a = _mm256_srli_epi16(v, 8), b = _mm256_srli_epi16(w, 8);
            EACH (r, NR) {
                __m256i x = kvc_two(q + r * dim + 2 * j + 4);
                sum[r][0] = kvc_dot(sum[r][0], a, x);
                sum[r][1] = kvc_dot(sum[r][1], b, x);
            }
        }
    }
    int8_scores(NR, sum, &args, tile);
}

INLINE void mid_tile(int KIND, int NR, kvc_qk_args args, int64_t tile, const float *centre)
{
    const kvc_query_form *f = args.query->form;
    const int planes = 8 / kvc_plane_bits(KIND);
    int64_t dim = args.query->dim, period = dim / planes;
    __m256i sum[4][2];
    EACH (r, NR) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
    args.tiles += tile * kvc_kind_bytes(KIND, dim);
    const int8_t *q[4]; /* per plane; two bytes per dim, half of the dims in hi, half in lo */
    EACH (p, planes) q[p] = (2 * p < planes ? f->hi : f->lo) + args.row0 * dim + 2 * (p % (planes / 2)) * period;
    for (int64_t j = 0; j < period; j += 4) {
        kvc_words v = kvc_load_words(KIND, args.tiles, dim, j * KVC_TILE),
                  w = kvc_load_words(KIND, args.tiles, dim, j * KVC_TILE + 32);
        kvc_prefetch_planes(KIND, args.tiles, j / 4, args.ahead);
        EACH (i, 2 * planes) { /* as 16-bit integers: planes of even dims, then of odd dims */
            __m256i a = kvc_codes(KIND, i, v), b = kvc_codes(KIND, i, w);
            EACH (r, NR) {
                __m256i x = kvc_two(q[i % planes] + r * dim + 2 * j + i / planes * 4);
                sum[r][0] = kvc_dot(sum[r][0], a, x);
                sum[r][1] = kvc_dot(sum[r][1], b, x);
            }
        }
    }
    mid_scores(KIND, NR, sum, args.meta, f->sum + args.row0, f->step + args.row0, 1, tile, centre, args.s, args.ld);
}

/* The same with one limb of q. */
INLINE void coarse_tile(int KIND, int NR, kvc_qk_args args, int64_t tile, const float *centre)
{
    const kvc_query_form *f = args.query->form;
    /* dims after which the 16-bit sums are widened: 32, or 16 and 8 additions */
    const int planes = 8 / kvc_plane_bits(KIND), dims = KIND == 2 ? 32 : 16;
    int64_t dim = args.query->dim, period = dim / planes;
    const int8_t *one = f->one + args.row0 * dim;
    __m256i sum[4][2];
    EACH (r, NR) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
    args.tiles += tile * kvc_kind_bytes(KIND, dim);
    for (int64_t j = 0; j < period;) {
        __m256i part[4][2];
        EACH (r, NR) part[r][0] = part[r][1] = _mm256_setzero_si256();
        for (int64_t end = kvc_min(period, j + dims); j < end; j += 4) {
            int64_t at = j * KVC_TILE;
            kvc_words v = kvc_load_words(KIND, args.tiles, dim, at), w = kvc_load_words(KIND, args.tiles, dim, at + 32);
            kvc_prefetch_planes(KIND, args.tiles, j / 4, args.ahead);
            EACH (p, planes) {
                __m256i a = kvc_plane(KIND, p, v), b = kvc_plane(KIND, p, w);
                EACH (r, NR) {
                    __m256i x = kvc_two(one + r * dim + p * period + j);
                    part[r][0] = kvc_add_bytes(part[r][0], a, x);
                    part[r][1] = kvc_add_bytes(part[r][1], b, x);
                }
            }
        }
        EACH (r, NR)
            EACH (h, 2) sum[r][h] = kvc_add_part(sum[r][h], part[r][h]);
    }
    mid_scores(KIND, NR, sum, args.meta, f->one_sum + args.row0, f->step + args.row0, 128, tile, centre, args.s,
               args.ld);
}

/* ---------------------------------------------------------------- floats: NH halves of tiles, or NT tiles */

/* q: rows in pair order, [row][KVC_MAX_DIM]. */
INLINE void fp8_halves(int E, int NR, int NH, kvc_qk_args args, const float *q, int64_t dim, int64_t half0)
{
    if (half0 % 2) args.ahead = 0; /* prefetch each line once */
    __m256 a[4][4], b[4][4];       /* tokens 0-3, 4-7, in pairs of lanes */
    EACH (r, NR)
        EACH (h, NH) a[r][h] = b[r][h] = _mm256_setzero_ps();
    for (int64_t j = 0; j < dim; j += 4)
        EACH (h, NH) {
            const uint8_t *at = args.tiles + (half0 + h) / 2 * KVC_TILE * dim + (half0 + h) % 2 * 32 + j * KVC_TILE;
            __m256i w = kvc_load(at);
            if (h % 2 == 0) kvc_prefetch(args.tiles + half0 * (8 * dim), j / 4 * ((NH + 1) / 2) + h / 2, args.ahead);
            __m256 e0, e1, o0, o1;
            kvc_widen(kvc_fp8_lower(E, w), &e0, &e1); /* dims j, j+2 */
            kvc_widen(kvc_fp8_upper(E, w), &o0, &o1); /* dims j+1, j+3 */
            EACH (r, NR) {
                __m256 even = kvc_pair(q + r * KVC_MAX_DIM + j), odd = kvc_pair(q + r * KVC_MAX_DIM + j + 2);
                a[r][h] = _mm256_fmadd_ps(o0, odd, _mm256_fmadd_ps(e0, even, a[r][h]));
                b[r][h] = _mm256_fmadd_ps(o1, odd, _mm256_fmadd_ps(e1, even, b[r][h]));
            }
        }
    EACH (h, NH) {
        int64_t t = (half0 + h) * 8;
        __m256 scale = _mm256_mul_ps(kvc_scales(args.meta, t), _mm256_set1_ps(kvc_fp8_unit(E)));
        EACH (r, NR) _mm256_storeu_ps(args.s + r * args.ld + t, _mm256_mul_ps(kvc_add_pairs(a[r][h], b[r][h]), scale));
    }
}

INLINE void f16_halves(int NR, int NH, kvc_qk_args args, int64_t half0)
{
    if (half0 % 2) args.ahead = 0; /* prefetch each line once */
    int64_t dim = args.query->dim;
    __m256 a[4][4], b[4][4];
    EACH (r, NR)
        EACH (h, NH) a[r][h] = b[r][h] = _mm256_setzero_ps();
    for (int64_t j = 0; j < dim; j += 2)
        EACH (h, NH) {
            const uint8_t *at =
                args.tiles + (half0 + h) / 2 * KVC_TILE * dim * 2 + (half0 + h) % 2 * 32 + j * KVC_TILE * 2;
            if (h % 2 == 0)
                kvc_prefetch(args.tiles + half0 * (8 * dim * 2), j / 2 * ((NH + 1) / 2) + h / 2, args.ahead);
            __m256 x = kvc_halves(at), y = kvc_halves(at + 16);
            EACH (r, NR) {
                __m256 q = kvc_pair(args.query->forms[KVC_PLAIN].q + (args.row0 + r) * dim + j);
                a[r][h] = _mm256_fmadd_ps(x, q, a[r][h]);
                b[r][h] = _mm256_fmadd_ps(y, q, b[r][h]);
            }
        }
    EACH (r, NR)
        EACH (h, NH) _mm256_storeu_ps(args.s + r * args.ld + (half0 + h) * 8, kvc_add_pairs(a[r][h], b[r][h]));
}

INLINE void bf16_tiles(int NR, int NT, kvc_qk_args args, int64_t tile0)
{
    int64_t dim = args.query->dim, bytes = KVC_TILE * dim * 2;
    const int step = NR > 2 ? 2 : 1; /* vectors at a time: with few rows q stays in registers, otherwise K */
    const __m256 upper = _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000u));
    __m256 sum[4][4][2];
    EACH (r, NR)
        EACH (t, NT) sum[r][t][0] = sum[r][t][1] = _mm256_setzero_ps();
    for (int64_t j = 0; j < dim; j += 2)
        EACH (t, NT) {
            const uint8_t *at = args.tiles + (tile0 + t) * bytes + j * KVC_TILE * 2;
            kvc_prefetch(args.tiles + tile0 * bytes, j / 2 * NT + t, args.ahead);
            for (int h = 0; h < 2; h += step) {
                __m256i w[2];
                __m256 x[2];
                EACH (i, step) {
                    w[i] = kvc_load(at + 32 * (h + i));
                    x[i] = _mm256_castsi256_ps(_mm256_slli_epi32(w[i], 16));
                }
                EACH (r, NR)
                    EACH (i, step) {
                        __m256 q = _mm256_set1_ps(args.query->forms[KVC_PLAIN].q[(args.row0 + r) * dim + j]);
                        sum[r][t][h + i] = _mm256_fmadd_ps(x[i], q, sum[r][t][h + i]);
                    }
                EACH (i, step) x[i] = _mm256_and_ps(_mm256_castsi256_ps(w[i]), upper);
                EACH (r, NR)
                    EACH (i, step) {
                        __m256 q = _mm256_set1_ps(args.query->forms[KVC_PLAIN].q[(args.row0 + r) * dim + j + 1]);
                        sum[r][t][h + i] = _mm256_fmadd_ps(x[i], q, sum[r][t][h + i]);
                    }
            }
        }
    EACH (r, NR)
        EACH (t, NT)
            EACH (h, 2) _mm256_storeu_ps(args.s + r * args.ld + (tile0 + t) * KVC_TILE + 8 * h, sum[r][t][h]);
}

INLINE void f32_tiles(int NR, int NT, kvc_qk_args args, int64_t tile0)
{
    int64_t dim = args.query->dim, bytes = KVC_TILE * dim * 4;
    __m256 sum[4][4][2];
    EACH (r, NR)
        EACH (t, NT) sum[r][t][0] = sum[r][t][1] = _mm256_setzero_ps();
    for (int64_t j = 0; j < dim; j++)
        EACH (t, NT) {
            const uint8_t *at = args.tiles + (tile0 + t) * bytes + j * KVC_TILE * 4;
            kvc_prefetch(args.tiles + tile0 * bytes, j * NT + t, args.ahead);
            __m256 x = _mm256_castsi256_ps(kvc_load(at)), y = _mm256_castsi256_ps(kvc_load(at + 32));
            EACH (r, NR) {
                __m256 q = _mm256_set1_ps(args.query->forms[KVC_PLAIN].q[(args.row0 + r) * dim + j]);
                sum[r][t][0] = _mm256_fmadd_ps(x, q, sum[r][t][0]);
                sum[r][t][1] = _mm256_fmadd_ps(y, q, sum[r][t][1]);
            }
        }
    EACH (r, NR)
        EACH (t, NT)
            EACH (h, 2) _mm256_storeu_ps(args.s + r * args.ld + (tile0 + t) * KVC_TILE + 8 * h, sum[r][t][h]);
}

/* ---------------------------------------------------------------- entry points */

INLINE void qk_int8(kvc_qk_args args)
{
#define CALL(NR, N) int8_tile(NR, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 1, 1, 1)
#undef CALL
}
void kvc_avx2_qk_int8(const kvc_qk_args *args) { qk_int8(*args); }

INLINE void mid_qk(int KIND, kvc_qk_args args)
{
    float centre[KVC_ROWS];
    dot_centroid(args.meta + 2 * args.page_size, args.query, args.row0, args.rows, centre);
    if (KIND != KVC_LLOYD4 && one_limb(KIND, args.meta, args.query, args.row0, args.rows, args.n_tiles)) {
#define CALL(NR, N) coarse_tile(KIND == KVC_LLOYD4 ? 4 : KIND, NR, args, at, centre)
        KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 1, 1, 1)
#undef CALL
        return;
    }
#define CALL(NR, N) mid_tile(KIND, NR, args, at, centre)
    KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 1, 1, 1)
#undef CALL
}
void kvc_avx2_qk_int4(const kvc_qk_args *args) { mid_qk(4, *args); }
void kvc_avx2_qk_int4_lloyd(const kvc_qk_args *args) { mid_qk(KVC_LLOYD4, *args); }
void kvc_avx2_qk_int3(const kvc_qk_args *args) { mid_qk(3, *args); }
void kvc_avx2_qk_int2(const kvc_qk_args *args) { mid_qk(2, *args); }

INLINE void fp8_qk(int E, kvc_qk_args args)
{
    float q[KVC_ROWS * KVC_MAX_DIM];
    int64_t dim = args.query->dim;
    for (int64_t r = 0; r < args.rows; r++)
        for (int64_t d = 0; d < dim; d += 4)
            _mm_storeu_ps(q + r * KVC_MAX_DIM + d,
                          kvc_order_pairs(args.query->forms[KVC_PLAIN].q + (args.row0 + r) * dim + d));
#define CALL(NR, N) fp8_halves(E, NR, N, args, q, dim, at)
    KVC_BY_ROWS(CALL, args.rows, 2 * args.n_tiles, 1, 4, 2, 1)
#undef CALL
}
void kvc_avx2_qk_fp8_e4m3(const kvc_qk_args *args) { fp8_qk(4, *args); }
void kvc_avx2_qk_fp8_e5m2(const kvc_qk_args *args) { fp8_qk(5, *args); }

INLINE void qk_raw_f16(kvc_qk_args args)
{
#define CALL(NR, N) f16_halves(NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, 2 * args.n_tiles, 1, 4, 2, 1)
#undef CALL
}
void kvc_avx2_qk_raw_f16(const kvc_qk_args *args) { qk_raw_f16(*args); }

INLINE void qk_raw_bf16(kvc_qk_args args)
{
#define CALL(NR, N) bf16_tiles(NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 4, 2, 1)
#undef CALL
}
void kvc_avx2_qk_raw_bf16(const kvc_qk_args *args) { qk_raw_bf16(*args); }

INLINE void qk_raw_f32(kvc_qk_args args)
{
#define CALL(NR, N) f32_tiles(NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 4, 2, 1)
#undef CALL
}
void kvc_avx2_qk_raw_f32(const kvc_qk_args *args) { qk_raw_f32(*args); }
KVC_TARGET_END
#endif
