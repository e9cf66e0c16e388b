/* amx_ints.c - integer pages against up to 16 query rows, on AMX tiles: exact, the same digits as on avx512.
 *
 *   16 rows, a page of 64 tokens, D = 128   TDPB*UD (16 cycles)     vector instructions      vpdpbusd that they replace
 *   K int8 / int4, int2 (one limb)          16 / 16 (8)             512 / 700                2048 / 2048 (1024)
 *   V int8 / int4, int2 (coarse)            16 / 16 (8)             1200 / 1350              2048 / 2048 (1024)
 * Counted, not timed. Sums go to memory and become floats there: with one page's tokens to a product of V, that costs
 * more than the product. Planes are unpacked to bytes first, once for the 16 rows. */
#include "levels.h"
#ifdef KVC_HAS_AMX
#include "amx.h"

#include "avx512_ints.h"

/* A sum of two limbs; of one, `low` is not read. */
INLINE __m512i joined(const int32_t *high, const int32_t *low, bool two)
{
    __m512i x = _mm512_load_si512(high);
    return two ? _mm512_add_epi32(_mm512_slli_epi32(x, 7), _mm512_load_si512(low)) : x;
}

/* ---------------------------------------------------------------- K */

/* A K tile's planes to the words of an int8 tile. */
INLINE void unpack_key(int BITS, const uint8_t *tile, int64_t dim, uint8_t *to)
{
    int64_t period = dim * BITS / 8;
    for (int64_t j = 0; j < period; j += 4) {
        kvc_words w = kvc_load_words(BITS, tile, dim, j * KVC_TILE);
        EACH (p, 8 / BITS) _mm512_store_si512(to + (p * period + j) * KVC_TILE, kvc_plane(BITS, p, w));
    }
}

INLINE void centres(const uint8_t *centroid, const kvc_query *query, int64_t row0, int64_t rows, float *to)
{
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) kvc_dot_centroid(4, centroid, query, row0 + r, to + r);
    for (; r < rows; r++) kvc_dot_centroid(1, centroid, query, row0 + r, to + r);
}

INLINE void int_qk(int BITS, kvc_qk_args args)
{
    const kvc_query_form *f = args.query->form;
    int64_t dim = args.query->dim, bytes = KVC_TILE * dim * BITS / 8;
    bool two = BITS == 8 || !kvc_one_limb(BITS, KVC_NOISE, args.meta, args.query, args.row0, args.rows, args.n_tiles);
    const int8_t *hi = (two ? f->hi : f->one) + args.row0 * dim, *lo = f->lo + args.row0 * dim;
    const int32_t *sum = (two ? f->sum : f->one_sum) + args.row0;
    _Alignas(64) uint8_t codes[KVC_TILE * KVC_MAX_DIM];
    _Alignas(64) int32_t high[KVC_WIDE][KVC_TILE], low[KVC_WIDE][KVC_TILE];
    float centre[KVC_WIDE];
    if (BITS < 8) centres(args.meta + 2 * args.page_size, args.query, args.row0, args.rows, centre);
    for (int64_t tile = 0; tile < args.n_tiles; tile++) {
        const uint8_t *k = args.tiles + tile * bytes;
        kvc_amx_fetch(k, bytes, args.ahead);
        if (BITS < 8) unpack_key(BITS, k, dim, codes);
        if (BITS < 8) k = codes;
        kvc_amx_zero(0);
        kvc_amx_zero(1);
        for (int64_t d = 0; d < dim; d += KVC_AMX_BYTES) {
            kvc_amx_load(2, k + d * KVC_TILE, KVC_AMX_BYTES);
            kvc_amx_load(3, hi + d, dim);
            kvc_amx_bytes(0, 3, 2, true);
            if (!two) continue;
            kvc_amx_load(4, lo + d, dim);
            kvc_amx_bytes(1, 4, 2, true);
        }
        kvc_amx_store(0, high, KVC_AMX_BYTES);
        if (two) kvc_amx_store(1, low, KVC_AMX_BYTES);
        __m512 scale = kvc_scales(args.meta, tile * KVC_TILE), x;
        for (int64_t r = 0; r < args.rows; r++) {
            __m512i dot = joined(high[r], low[r], two);
            float step = f->step[args.row0 + r];
            if (BITS == 8)
                x = kvc_int8_score(dot, scale, step, sum[r]);
            else
                x = two ? kvc_mid_score(BITS, 2, dot, scale, step, sum[r], centre[r])
                        : kvc_mid_score(BITS, 1, dot, scale, step, sum[r], centre[r]);
            _mm512_storeu_ps(args.s + r * args.ld + tile * KVC_TILE, x);
        }
    }
}
void kvc_amx_qk_int8(const kvc_qk_args *args) { int_qk(8, *args); }
void kvc_amx_qk_int4(const kvc_qk_args *args) { int_qk(4, *args); }
void kvc_amx_qk_int2(const kvc_qk_args *args) { int_qk(2, *args); }

/* ---------------------------------------------------------------- V */

/* V tiles of KVC_WIDE_STEP tokens to the words of int8 tiles. */
INLINE void unpack_value(int BITS, const uint8_t *tiles, int64_t dim, uint8_t *to)
{
    for (int64_t t = 0; t < KVC_WIDE_STEP; t += KVC_TILE)
        for (int64_t s = 0; s < BITS / 2; s++)
            for (int64_t d = 0; d < dim; d += KVC_TILE) {
                kvc_words w = kvc_load_words(BITS, tiles + t * dim * BITS / 8, dim, (s * dim + d) * 4);
                EACH (p, 8 / BITS) {
                    int64_t token = t + 4 * s + 2 * BITS * p;
                    _mm512_store_si512(to + token * dim + d * 4, kvc_plane(BITS, p, w));
                }
            }
}

INLINE void int_pv(int BITS, kvc_pv_args args)
{
    bool two = BITS == 8 || args.digits != KVC_P_BYTE;
    _Alignas(64) uint8_t hi[KVC_WIDE][KVC_WIDE_STEP] = {0}, lo[KVC_WIDE][KVC_WIDE_STEP] = {0};
    _Alignas(64) uint8_t codes[KVC_WIDE_STEP * KVC_MAX_DIM];
    _Alignas(64) int32_t high[KVC_WIDE][KVC_TILE], low[KVC_WIDE][KVC_TILE];
    int32_t sum[KVC_WIDE];
    float step[KVC_WIDE];
    for (int64_t t = 0; t < args.n; t += KVC_WIDE_STEP) {
        const uint8_t *v = args.tiles + t * args.dim * BITS / 8;
        kvc_amx_fetch(v, KVC_WIDE_STEP * args.dim * BITS / 8, args.ahead);
        for (int64_t r = 0; r < args.rows; r += 4)
            weigh(args.p + r * args.ld + t, args.ld, args.rows - r, args.meta + 2 * t, KVC_WIDE_STEP, !two,
                  (digits_of){hi[r], lo[r], KVC_WIDE_STEP, step + r, sum + r});
        if (BITS < 8) unpack_value(BITS, v, args.dim, codes);
        if (BITS < 8) v = codes;
        kvc_amx_load(3, hi, KVC_AMX_BYTES);
        if (two) kvc_amx_load(4, lo, KVC_AMX_BYTES);
        for (int64_t d = 0; d < args.dim; d += KVC_TILE) {
            kvc_amx_zero(0);
            kvc_amx_zero(1);
            kvc_amx_load(2, v + d * 4, args.dim * 4);
            kvc_amx_bytes(0, 3, 2, false);
            if (two) kvc_amx_bytes(1, 4, 2, false);
            kvc_amx_store(0, high, KVC_AMX_BYTES);
            if (two) kvc_amx_store(1, low, KVC_AMX_BYTES);
            for (int64_t r = 0; r < args.rows; r++)
                kvc_add_codes(BITS, joined(high[r], low[r], two), step[r], sum[r], args.o + r * args.dim + d);
        }
    }
}
void kvc_amx_pv_int8(const kvc_pv_args *args) { int_pv(8, *args); }
void kvc_amx_pv_int4(const kvc_pv_args *args) { int_pv(4, *args); }
void kvc_amx_pv_int2(const kvc_pv_args *args) { int_pv(2, *args); }
KVC_TARGET_END
#endif
