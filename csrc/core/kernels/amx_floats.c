/* amx_floats.c - bf16 and fp8 pages against up to 16 query rows, on AMX tiles, by TDPBF16PS: q and p are one bf16, or
 * two if one is not exact, as on avx512bf16.
 *
 * `make page-cycles LEVEL=amx` (avx512bf16) on Granite Rapids, cycles per page, K / V, q and p in one bf16:
 *
 *   rows                         1             2             4             8             16
 *   bf16, here            420 /  490    410 /  480    490 /  570    540 /  880    570 /  1210
 *   bf16, avx512bf16      620 /  710   1150 / 1270   2210 / 2300   4460 / 4680   9050 /  9480
 *   fp8, here              as avx512   1500 / 1730   1590 / 1720   1600 / 1900   1710 /  2310
 *   fp8, avx512bf16      1380 / 1420   1990 / 2020   3060 / 3220   6210 / 6490  12330 / 13030
 *
 * A page of bf16 takes 32 products of 17 cycles. fp8 is first converted to bf16 (exactly), 1100 cycles per side for all
 * rows. Pages come from memory, which takes longer than fewer than 5 rows (fp8: 4) do on either level; avx512bf16 then
 * spreads its prefetches more evenly and is up to 15% faster, so that amx leaves these rows to it. */
#include "levels.h"
#ifdef KVC_HAS_AMX
#include "amx.h"

#include "avx512bf16.h"

#define TILES (KVC_WIDE_STEP / KVC_TILE) /* see amx_ints.c */
#define STEP (KVC_AMX_BYTES / 2)         /* bf16 in a row of a tile register */

/* Converts n words of 4 codes to pairs of words of 2 bf16, `stride` lanes apart: the first two codes, the last two. */
INLINE void widen(int e5m2, const uint8_t *from, int64_t rows, int64_t stride, ptrdiff_t ahead, uint16_t *to)
{
    fp8_table table = fp8_load_table(e5m2);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < stride; i += KVC_TILE) {
            const uint8_t *at = from + (row * stride + i) * 4;
            uint16_t *out = to + (2 * row * stride + i) * 2;
            __m512i a, b;
            kvc_prefetch(at, 0, ahead);
            fp8_to_bf16(&table, _mm512_loadu_si512(at), &a, &b);
            _mm512_store_si512(out, fp8_half(0, a, b));
            _mm512_store_si512(out + 2 * stride, fp8_half(1, a, b));
        }
}

/* FP8: 0: bf16; 1: e4m3; 2: e5m2. */
INLINE void float_qk(int FP8, kvc_qk_args args)
{
    const kvc_query_form *f = &args.query->forms[KVC_PLAIN];
    int64_t dim = args.query->dim;
    bool stacked = f->rest == f->half + KVC_AMX_HALF * dim;
    const uint16_t *half = f->half + args.row0 * dim, *rest = f->rest + args.row0 * dim;
    _Alignas(64) uint16_t wide[TILES * KVC_TILE * KVC_MAX_DIM];
    _Alignas(64) float sum[TILES][KVC_WIDE][KVC_TILE];
    for (int64_t tile = 0; tile < args.n_tiles; tile += TILES) {
        const uint8_t *k = args.tiles + tile * KVC_TILE * dim * (FP8 ? 1 : 2);
        for (int t = 0; FP8 && t < TILES; t++)
            widen(FP8 - 1, k + t * KVC_TILE * dim, dim / 4, KVC_TILE, args.ahead, wide + t * KVC_TILE * dim);
        if (FP8) k = (const uint8_t *)wide;
        for (int t = 0; t < TILES; t++, k += KVC_TILE * dim * 2) {
            kvc_amx_zero(0);
            for (int64_t d = 0; d < dim; d += STEP) {
                kvc_amx_load(6, k + d * KVC_TILE * 2, KVC_AMX_BYTES);
                if (!FP8) kvc_amx_fetch(k, d / 2, KVC_TILE, args.ahead);
                kvc_amx_load(2, half + d, dim * 2);
                kvc_amx_bf16(0, 2, 6);
                if (f->whole || stacked) continue;
                kvc_amx_load(3, rest + d, dim * 2);
                kvc_amx_bf16(0, 3, 6);
            }
            kvc_amx_store(0, sum[t], KVC_AMX_BYTES);
        }
        for (int t = 0; t < TILES; t++) {
            __m512 unit = _mm512_set1_ps(f->unit);
            if (FP8) unit = _mm512_mul_ps(unit, kvc_scales(args.meta, (tile + t) * KVC_TILE));
            for (int64_t r = 0; r < args.rows; r++) {
                __m512 x = _mm512_load_ps(sum[t][r]);
                if (stacked && !f->whole) x = _mm512_add_ps(x, _mm512_load_ps(sum[t][r + KVC_AMX_HALF]));
                _mm512_storeu_ps(args.s + r * args.ld + (tile + t) * KVC_TILE, _mm512_mul_ps(x, unit));
            }
        }
    }
}
void kvc_amx_qk_raw_bf16(const kvc_qk_args *args) { float_qk(0, *args); }
void kvc_amx_qk_fp8_e4m3(const kvc_qk_args *args) { float_qk(1, *args); }
void kvc_amx_qk_fp8_e5m2(const kvc_qk_args *args) { float_qk(2, *args); }

INLINE void float_pv(int FP8, kvc_pv_args args)
{
    bool stacked = args.rows <= KVC_AMX_HALF, exact = args.digits == KVC_P_EXACT, twice = exact && !stacked;
    _Alignas(64) uint16_t parts[2 * KVC_WIDE][KVC_WIDE_STEP];
    _Alignas(64) uint16_t wide[KVC_WIDE_STEP * KVC_MAX_DIM];
    _Alignas(64) float sum[TILES][KVC_WIDE][KVC_TILE];
    uint16_t (*half)[KVC_WIDE_STEP] = parts, (*rest)[KVC_WIDE_STEP] = parts + (stacked ? KVC_AMX_HALF : KVC_WIDE);
    for (int64_t t = 0; t < args.n; t += KVC_WIDE_STEP) {
        const uint8_t *v = args.tiles + t * args.dim * (FP8 ? 1 : 2);
        if (FP8) widen(FP8 - 1, v, KVC_WIDE_STEP / 4, args.dim, args.ahead, wide);
        for (int64_t r = 0; r < args.rows; r++)
            for (int64_t i = 0; i < KVC_WIDE_STEP; i += KVC_TILE)
                bf16_split(args.p + r * args.ld, FP8 ? args.meta : NULL, t + i, args.n, half[r] + i, rest[r] + i);
        if (FP8) v = (const uint8_t *)wide;
        kvc_amx_load(2, half[0], KVC_AMX_BYTES * 2);
        kvc_amx_load(3, half[0] + STEP, KVC_AMX_BYTES * 2);
        if (twice) {
            kvc_amx_load(4, rest[0], KVC_AMX_BYTES * 2);
            kvc_amx_load(5, rest[0] + STEP, KVC_AMX_BYTES * 2);
        }
        for (int64_t d0 = 0; d0 < args.dim; d0 += TILES * KVC_TILE) {
            for (int i = 0; i < TILES; i++) {
                int64_t d = d0 + i * KVC_TILE;
                kvc_amx_zero(0);
                kvc_amx_load(6, v + d * 4, args.dim * 4);
                if (!FP8) kvc_amx_fetch(v, 2 * d, KVC_TILE, args.ahead);
                kvc_amx_load(7, v + (STEP / 2 * args.dim + d) * 4, args.dim * 4);
                if (!FP8) kvc_amx_fetch(v, 2 * d + KVC_TILE, KVC_TILE, args.ahead);
                kvc_amx_bf16(0, 2, 6);
                kvc_amx_bf16(0, 3, 7);
                if (twice) {
                    kvc_amx_bf16(0, 4, 6);
                    kvc_amx_bf16(0, 5, 7);
                }
                kvc_amx_store(0, sum[i], KVC_AMX_BYTES);
            }
            for (int64_t r = 0; r < args.rows; r++)
                for (int i = 0; i < TILES; i++) {
                    float *o = args.o + r * args.dim + d0 + i * KVC_TILE;
                    __m512 x = _mm512_add_ps(_mm512_loadu_ps(o), _mm512_load_ps(sum[i][r]));
                    if (stacked && exact) x = _mm512_add_ps(x, _mm512_load_ps(sum[i][r + KVC_AMX_HALF]));
                    _mm512_storeu_ps(o, x);
                }
        }
    }
}
void kvc_amx_pv_raw_bf16(const kvc_pv_args *args) { float_pv(0, *args); }
void kvc_amx_pv_fp8_e4m3(const kvc_pv_args *args) { float_pv(1, *args); }
void kvc_amx_pv_fp8_e5m2(const kvc_pv_args *args) { float_pv(2, *args); }
KVC_TARGET_END
#endif
