/* amx_floats.c - bf16 and fp8 pages, and integer codes for many rows, against up to 16 query rows at once, on AMX tiles
 * by TDPBF16PS: q and p are one bf16, or two if one is not exact, as on avx512bf16.
 *
 * `make page-cycles LEVEL=amx` (avx512bf16) on Granite Rapids, cycles per page, K / V, q and p in one bf16:
 *
 *   rows                         1             2             4             8             16
 *   bf16, here            420 /  490    410 /  480    490 /  570    540 /  590    570 /   640
 *   bf16, avx512bf16      620 /  710   1150 / 1270   2210 / 2300   4460 / 4680   9050 /  9480
 *   fp8, here              as avx512   1500 / 1730   1500 / 1620   1530 / 1670   1580 /  1820
 *   fp8, avx512bf16      1380 / 1420   1990 / 2020   3060 / 3220   6210 / 6490  12330 / 13030
 *
 * A page of bf16 takes 32 products of 17 cycles. Codes are first converted to bf16 (exactly), fp8 in 1100 cycles per
 * side, once for all rows of a block. V's sums stay in tile registers for a page. Pages come from memory, which takes
 * longer than fewer than 5 rows (fp8: 2) do on either level; avx512bf16 then spreads its prefetches more evenly and is
 * up to 15% faster, so that amx leaves these rows to it. */
#include "levels.h"
#ifdef KVC_HAS_AMX
#include "amx.h"

#include "avx512bf16.h"

#define TILES (KVC_WIDE_STEP / KVC_TILE) /* see amx_ints.c */
#define STEP (KVC_AMX_BYTES / 2)         /* bf16 in a row of a tile register */

enum { BF16, INT8, INT4, INT2, E4M3, E5M2 };

/* Four codes per lane, minus their middle, as bf16: `first` gets two of them, `second` the others. */
INLINE void ints_to_bf16(float middle, __m512i w, __m512i *first, __m512i *second)
{
    const __m512i byte = _mm512_set1_epi32(255), upper = _mm512_set1_epi32((int)0xffff0000);
    __m512i x[4] = {_mm512_and_si512(w, byte), _mm512_and_si512(_mm512_srli_epi32(w, 8), byte),
                    _mm512_and_si512(_mm512_srli_epi32(w, 16), byte), _mm512_srli_epi32(w, 24)};
    EACH (i, 4) x[i] = _mm512_castps_si512(_mm512_sub_ps(_mm512_cvtepi32_ps(x[i]), _mm512_set1_ps(middle)));
    *first = _mm512_ternarylogic_epi32(_mm512_srli_epi32(x[0], 16), x[1], upper, 0xf8); /* a | (b & c) */
    *second = _mm512_ternarylogic_epi32(_mm512_srli_epi32(x[2], 16), x[3], upper, 0xf8);
}

/* Converts 16 words of 4 codes in each of `rows` rows, `stride` words apart, to pairs of rows of words of 2 bf16,
 * `to_stride` words apart: the first two codes, the last two. Prefetches lines of the next page from `next` on. */
INLINE void widen(int KIND, const uint8_t *from, int64_t rows, int64_t stride, const uint8_t *next, ptrdiff_t ahead,
                  uint8_t *to, int64_t to_stride)
{
    fp8_table table = fp8_load_table(KIND == E5M2);
    for (int64_t row = 0; row < rows; row++) {
        uint8_t *out = to + 8 * row * to_stride;
        __m512i w = _mm512_loadu_si512(from + 4 * row * stride), first, second, a, b;
        kvc_prefetch(next, row, ahead);
        if (KIND <= INT2) {
            ints_to_bf16(KIND == INT8 ? 128 : KIND == INT4 ? 7.5f : 1.5f, w, &first, &second);
        } else {
            fp8_to_bf16(&table, w, &a, &b);
            first = fp8_half(0, a, b), second = fp8_half(1, a, b);
        }
        _mm512_store_si512(out, first);
        _mm512_store_si512(out + 4 * to_stride, second);
    }
}

INLINE void widen_key(int KIND, const kvc_qk_args *args, int64_t t)
{
    const uint8_t *from = args->tiles + t * KVC_TILE * args->query->dim;
    if (KIND == BF16 || args->ready || t >= args->n_tiles) return;
    widen(KIND, from, args->query->dim / 4, KVC_TILE, from, args->ahead, kvc_amx_key_at(args, t, 2), KVC_TILE);
}

INLINE void widen_value(int KIND, const kvc_pv_args *args, int64_t t, int64_t d)
{
    const uint8_t *from = args->tiles + t * args->dim;
    if (KIND == BF16 || args->ready || d >= args->dim) return;
    widen(KIND, from + 4 * d, KVC_WIDE_STEP / 4, args->dim, from + KVC_WIDE_STEP * d, args->ahead,
          kvc_amx_value_at(args, t, d, 2), kvc_amx_value_stride(args));
}

INLINE void float_qk(int KIND, kvc_qk_args args)
{
    const kvc_query_form *f = &args.query->forms[KVC_PLAIN];
    int64_t dim = args.query->dim;
    bool stacked = f->rest == f->half + KVC_AMX_HALF * dim;
    const uint16_t *half = f->half + args.row0 * dim, *rest = f->rest + args.row0 * dim;
    _Alignas(64) float sum[TILES][KVC_WIDE][KVC_TILE];
    widen_key(KIND, &args, 0);
    for (int64_t tile = 0; tile < args.n_tiles; tile += TILES) {
        for (int t = 0; t < TILES; t++) {
            const uint8_t *k =
                KIND == BF16 ? args.tiles + (tile + t) * KVC_TILE * dim * 2 : kvc_amx_key_at(&args, tile + t, 2);
            widen_key(KIND, &args, tile + t + 1);
            kvc_amx_zero(0);
            for (int64_t d = 0; d < dim; d += STEP) {
                kvc_amx_load(6, k + d * KVC_TILE * 2, KVC_AMX_BYTES);
                if (KIND == BF16) kvc_amx_fetch(k, d / 2, KVC_TILE, args.ahead);
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
            if (KIND != BF16) unit = _mm512_mul_ps(unit, kvc_scales(args.meta, (tile + t) * KVC_TILE));
            for (int64_t r = 0; r < args.rows; r++) {
                __m512 x = _mm512_load_ps(sum[t][r]);
                if (stacked && !f->whole) x = _mm512_add_ps(x, _mm512_load_ps(sum[t][r + KVC_AMX_HALF]));
                _mm512_storeu_ps(args.s + r * args.ld + (tile + t) * KVC_TILE, _mm512_mul_ps(x, unit));
            }
        }
    }
}
void kvc_amx_qk_raw_bf16(const kvc_qk_args *args) { float_qk(BF16, *args); }
void kvc_amx_qk_fp8_e4m3(const kvc_qk_args *args) { float_qk(E4M3, *args); }
void kvc_amx_qk_fp8_e5m2(const kvc_qk_args *args) { float_qk(E5M2, *args); }
void kvc_amx_qk_many_int8(const kvc_qk_args *args) { float_qk(INT8, *args); }

/* o is the accumulator of the products, in tile registers: as many rows as those have. */
INLINE void float_pv(int KIND, bool EXACT, kvc_pv_args args)
{
    _Alignas(64) uint16_t half[KVC_WIDE][KVC_WIDE_STEP], rest[KVC_WIDE][KVC_WIDE_STEP];
    int64_t stride = KIND == BF16 ? args.dim : kvc_amx_value_stride(&args);
    for (int64_t t = 0; t < args.n; t += KVC_WIDE_STEP) {
        for (int64_t r = 0; r < args.rows; r++)
            for (int64_t i = 0; i < KVC_WIDE_STEP; i += KVC_TILE)
                bf16_split(args.p + r * args.ld, KIND == BF16 ? NULL : args.meta, t + i, args.n, half[r] + i,
                           EXACT ? rest[r] + i : NULL);
        kvc_amx_load(2, half[0], KVC_AMX_BYTES * 2);
        kvc_amx_load(3, half[0] + STEP, KVC_AMX_BYTES * 2);
        if (EXACT) {
            kvc_amx_load(4, rest[0], KVC_AMX_BYTES * 2);
            kvc_amx_load(5, rest[0] + STEP, KVC_AMX_BYTES * 2);
        }
        widen_value(KIND, &args, t, 0);
        for (int64_t d = 0; d < args.dim; d += KVC_TILE) {
            widen_value(KIND, &args, t, d + KVC_TILE);
            kvc_amx_load(0, args.o + d, args.dim * 4);
            const uint8_t *line = args.tiles + t * args.dim * 2;
            const uint8_t *v = KIND == BF16 ? line + d * 4 : kvc_amx_value_at(&args, t, d, 2);
            kvc_amx_load(6, v, stride * 4);
            if (KIND == BF16) kvc_amx_fetch(line, 2 * d, KVC_TILE, args.ahead);
            kvc_amx_load(7, v + STEP / 2 * stride * 4, stride * 4);
            if (KIND == BF16) kvc_amx_fetch(line, 2 * d + KVC_TILE, KVC_TILE, args.ahead);
            kvc_amx_bf16(0, 2, 6);
            kvc_amx_bf16(0, 3, 7);
            if (EXACT) {
                kvc_amx_bf16(0, 4, 6);
                kvc_amx_bf16(0, 5, 7);
            }
            kvc_amx_store(0, args.o + d, args.dim * 4);
        }
    }
}
INLINE void pv(int KIND, const kvc_pv_args *args)
{
    if (args->digits == KVC_P_EXACT)
        float_pv(KIND, true, *args);
    else
        float_pv(KIND, false, *args);
}
void kvc_amx_pv_raw_bf16(const kvc_pv_args *args) { pv(BF16, args); }
void kvc_amx_pv_fp8_e4m3(const kvc_pv_args *args) { pv(E4M3, args); }
void kvc_amx_pv_fp8_e5m2(const kvc_pv_args *args) { pv(E5M2, args); }
void kvc_amx_pv_many_int8(const kvc_pv_args *args) { pv(INT8, args); }
void kvc_amx_pv_many_int4(const kvc_pv_args *args) { pv(INT4, args); }
void kvc_amx_pv_many_int2(const kvc_pv_args *args) { pv(INT2, args); }
KVC_TARGET_END
#endif
