/* amx_floats.c - bf16 and fp8 pages against up to 16 query rows, on AMX tiles, by TDPBF16PS: q and p in one bf16, or two where
 * one is not exact, as on avx512bf16. Sums of V stay in o.
 *
 *   16 rows, a page of 64 tokens, D = 128   TDPBF16PS (16 cycles)   vector instructions    vdpbf16ps that they replace
 *   K bf16 / fp8                            16 (32) / the same      128 / 900              4096 / 4096
 *   V bf16 / fp8                            16 (32) / the same      256 / 1000             4096 / 4096
 * Counted, not timed. fp8 becomes bf16 (exact) first, once for the 16 rows. */
#include "levels.h"
#ifdef KVC_HAS_AMX
#include "amx.h"

#include "avx512bf16.h"

#define STEP (KVC_AMX_BYTES / 2) /* bf16 in a row of a tile register */

/* n words of 4 codes to pairs of words of 2 bf16, `stride` lanes apart: those of the first two codes, of the last two. */
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
    int64_t dim = args.query->dim, bytes = KVC_TILE * dim * (FP8 ? 1 : 2);
    const uint16_t *half = args.query->forms[KVC_PLAIN].half + args.row0 * dim,
                   *rest = args.query->forms[KVC_PLAIN].rest + args.row0 * dim;
    _Alignas(64) uint16_t wide[KVC_TILE * KVC_MAX_DIM];
    _Alignas(64) float sum[KVC_WIDE][KVC_TILE];
    for (int64_t tile = 0; tile < args.n_tiles; tile++) {
        const void *k = args.tiles + tile * bytes;
        if (FP8)
            widen(FP8 - 1, k, dim / 4, KVC_TILE, args.ahead, wide);
        else
            kvc_amx_fetch(k, bytes, args.ahead);
        if (FP8) k = wide;
        kvc_amx_zero(0);
        for (int64_t d = 0; d < dim; d += STEP) {
            kvc_amx_load(1, (const uint8_t *)k + d * KVC_TILE * 2, KVC_AMX_BYTES);
            kvc_amx_load(2, half + d, dim * 2);
            kvc_amx_bf16(0, 2, 1);
            if (args.query->forms[KVC_PLAIN].whole) continue;
            kvc_amx_load(3, rest + d, dim * 2);
            kvc_amx_bf16(0, 3, 1);
        }
        kvc_amx_store(0, sum, KVC_AMX_BYTES);
        __m512 unit = _mm512_set1_ps(args.query->forms[KVC_PLAIN].unit);
        if (FP8) unit = _mm512_mul_ps(unit, kvc_scales(args.meta, tile * KVC_TILE));
        for (int64_t r = 0; r < args.rows; r++)
            _mm512_storeu_ps(args.s + r * args.ld + tile * KVC_TILE, _mm512_mul_ps(_mm512_load_ps(sum[r]), unit));
    }
}
void kvc_amx_qk_raw_bf16(const kvc_qk_args *args) { float_qk(0, *args); }
void kvc_amx_qk_fp8_e4m3(const kvc_qk_args *args) { float_qk(1, *args); }
void kvc_amx_qk_fp8_e5m2(const kvc_qk_args *args) { float_qk(2, *args); }

INLINE void float_pv(int FP8, kvc_pv_args args)
{
    _Alignas(64) uint16_t half[KVC_WIDE][KVC_WIDE_STEP] = {0}, rest[KVC_WIDE][KVC_WIDE_STEP] = {0};
    _Alignas(64) uint16_t wide[KVC_WIDE_STEP * KVC_MAX_DIM];
    for (int64_t t = 0; t < args.n; t += KVC_WIDE_STEP) {
        const void *v = args.tiles + t * args.dim * (FP8 ? 1 : 2);
        for (int64_t r = 0; r < args.rows; r++)
            for (int64_t i = 0; i < KVC_WIDE_STEP; i += KVC_TILE)
                bf16_split(args.p + r * args.ld, FP8 ? args.meta : NULL, t + i, args.n, half[r] + i, rest[r] + i);
        if (FP8)
            widen(FP8 - 1, v, KVC_WIDE_STEP / 4, args.dim, args.ahead, wide);
        else
            kvc_amx_fetch(v, KVC_WIDE_STEP * args.dim * 2, args.ahead);
        if (FP8) v = wide;
        kvc_amx_load(2, half[0], KVC_AMX_BYTES * 2);
        kvc_amx_load(3, half[0] + STEP, KVC_AMX_BYTES * 2);
        kvc_amx_load(4, rest[0], KVC_AMX_BYTES * 2);
        kvc_amx_load(5, rest[0] + STEP, KVC_AMX_BYTES * 2);
        for (int64_t d = 0; d < args.dim; d += KVC_TILE) {
            kvc_amx_load(0, args.o + d, args.dim * 4);
            kvc_amx_load(6, (const uint8_t *)v + d * 4, args.dim * 4);
            kvc_amx_load(7, (const uint8_t *)v + (STEP / 2 * args.dim + d) * 4, args.dim * 4);
            kvc_amx_bf16(0, 2, 6);
            kvc_amx_bf16(0, 3, 7);
            if (args.digits == KVC_P_EXACT) {
                kvc_amx_bf16(0, 4, 6);
                kvc_amx_bf16(0, 5, 7);
            }
            kvc_amx_store(0, args.o + d, args.dim * 4);
        }
    }
}
void kvc_amx_pv_raw_bf16(const kvc_pv_args *args) { float_pv(0, *args); }
void kvc_amx_pv_fp8_e4m3(const kvc_pv_args *args) { float_pv(1, *args); }
void kvc_amx_pv_fp8_e5m2(const kvc_pv_args *args) { float_pv(2, *args); }
KVC_TARGET_END
#endif
