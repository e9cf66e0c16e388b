/* amx_ints.c - integer pages against up to 16 query rows, on AMX tiles: exact, with the same digits as on avx512.
 *
 * `make page-cycles LEVEL=amx` (avx512bf16) on Granite Rapids, cycles per page, K / V:
 *
 *   rows                   2             4             8            16
 *   int8, here      300 /  510    350 /  610    440 /  920    850 / 1860
 *   int8, avx512    380 /  540    770 /  990   1580 / 2020   3130 / 4190
 *   int4, here        as avx512     as avx512   720 /  910   1060 / 1530
 *   int4, avx512    360 /  410    570 /  690   1140 / 1380   2340 / 2840
 *
 * A page takes 16 products of 17 cycles. Most of the rest is storing the sums, reading them back and converting them to
 * floats, and unpacking planes to bytes, once for all 16 rows. Fewer than 5 rows are left to avx512bf16, for the reason
 * given in amx_floats.c. */
#include "levels.h"
#ifdef KVC_HAS_AMX
#include "amx.h"

#include "avx512_ints.h"
#include "base/util.h"

/* The number of tiles that are multiplied before their sums are read. A load waits until a store to the same bytes has
 * retired, so reading after each tile would stall. */
#define TILES (KVC_WIDE_STEP / KVC_TILE)

/* Above this number of rows, codes are converted to bf16. */
#define MANY_ROWS 128

/* Sums of a product with both limbs of q (or p), by row; for a block of few rows, the second limb's are below. */
typedef struct limb_sums {
    _Alignas(64) int32_t high[KVC_WIDE][KVC_TILE], low[KVC_WIDE][KVC_TILE];
} limb_sums;

INLINE __m512i joined(const limb_sums *sums, int64_t row, bool two, bool stacked)
{
    __m512i x = _mm512_load_si512(sums->high[row]);
    const int32_t *low = stacked ? sums->high[row + KVC_AMX_HALF] : sums->low[row];
    return two ? _mm512_add_epi32(_mm512_slli_epi32(x, 7), _mm512_load_si512(low)) : x;
}

/* ---------------------------------------------------------------- K */

/* Unpacks planes of K tile t to the words of an int8 tile. */
INLINE void unpack_key(int BITS, const kvc_qk_args *args, int64_t t)
{
    int64_t dim = args->query->dim, period = dim * BITS / 8;
    const uint8_t *tile = args->tiles + t * period * KVC_TILE;
    if (BITS == 8 || args->ready || t >= args->n_tiles) return;
    uint8_t *to = kvc_amx_key_at(args, t, 1);
    for (int64_t j = 0; j < period; j += 4) {
        kvc_words w = kvc_load_words(BITS, tile, dim, j * KVC_TILE);
        kvc_prefetch(tile, j / 4, args->ahead);
        EACH (p, 8 / BITS) _mm512_store_si512(to + (p * period + j) * KVC_TILE, kvc_plane(BITS, p, w));
    }
}

INLINE void centres(const uint8_t *centroid, const kvc_query *query, int64_t row0, int64_t rows, float *to)
{
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) kvc_dot_centroid(4, centroid, query, row0 + r, to + r);
    for (; r < rows; r++) kvc_dot_centroid(1, centroid, query, row0 + r, to + r);
}

/* Sums of a K tile of bytes with limbs hi and lo of q. lo is NULL if there is none, or if it is in hi's tile. */
INLINE void key_products(int BITS, const uint8_t *k, const int8_t *hi, const int8_t *lo, int64_t dim, ptrdiff_t ahead,
                         limb_sums *sums)
{
    kvc_amx_zero(0);
    if (lo) kvc_amx_zero(1);
    for (int64_t d = 0; d < dim; d += KVC_AMX_BYTES) {
        kvc_amx_load(6, k + d * KVC_TILE, KVC_AMX_BYTES);
        if (BITS == 8) kvc_amx_fetch(k, d * KVC_TILE / KVC_AMX_BYTES, KVC_TILE, ahead);
        kvc_amx_load(2, hi + d, dim);
        kvc_amx_bytes(0, 2, 6, true);
        if (!lo) continue;
        kvc_amx_load(3, lo + d, dim);
        kvc_amx_bytes(1, 3, 6, true);
    }
    kvc_amx_store(0, sums->high, KVC_AMX_BYTES);
    if (lo) kvc_amx_store(1, sums->low, KVC_AMX_BYTES);
}

INLINE void int_qk(int BITS, kvc_qk_args args)
{
    const kvc_query_form *f = args.query->form;
    int64_t dim = args.query->dim;
    bool two = BITS == 8 || !kvc_one_limb(BITS, KVC_NOISE, args.meta, args.query, args.row0, args.rows, args.n_tiles);
    bool stacked = f->lo == f->hi + KVC_AMX_HALF * dim;
    const int8_t *hi = (two ? f->hi : f->one) + args.row0 * dim, *lo = two && !stacked ? f->lo + args.row0 * dim : NULL;
    const int32_t *sum = (two ? f->sum : f->one_sum) + args.row0;
    limb_sums sums[TILES];
    float centre[KVC_WIDE];
    if (BITS < 8) centres(args.meta + 2 * args.page_size, args.query, args.row0, args.rows, centre);
    unpack_key(BITS, &args, 0);
    for (int64_t tile = 0; tile < args.n_tiles; tile += TILES) {
        for (int t = 0; t < TILES; t++) {
            const uint8_t *k = BITS < 8 ? kvc_amx_key_at(&args, tile + t, 1) : args.tiles + (tile + t) * KVC_TILE * dim;
            unpack_key(BITS, &args, tile + t + 1);
            key_products(BITS, k, hi, lo, dim, args.ahead, &sums[t]);
        }
        for (int t = 0; t < TILES; t++) {
            __m512 scale = kvc_scales(args.meta, (tile + t) * KVC_TILE), x;
            for (int64_t r = 0; r < args.rows; r++) {
                __m512i dot = joined(&sums[t], r, two, stacked);
                float step = f->step[args.row0 + r];
                if (BITS == 8)
                    x = kvc_int8_score(dot, scale, step, sum[r]);
                else
                    x = two ? kvc_mid_score(BITS, 2, dot, scale, step, sum[r], centre[r])
                            : kvc_mid_score(BITS, 1, dot, scale, step, sum[r], centre[r]);
                _mm512_storeu_ps(args.s + r * args.ld + (tile + t) * KVC_TILE, x);
            }
        }
    }
}
void kvc_amx_qk_int8(const kvc_qk_args *args)
{
    if (args->all_rows > MANY_ROWS)
        kvc_amx_qk_many_int8(args);
    else
        int_qk(8, *args);
}
void kvc_amx_qk_int4(const kvc_qk_args *args) { int_qk(4, *args); }
void kvc_amx_qk_int2(const kvc_qk_args *args) { int_qk(2, *args); }

/* ---------------------------------------------------------------- V */

/* Unpacks 16 dims of V tiles of KVC_WIDE_STEP tokens, from d and t on, to the words of int8 tiles, `stride` words apart. */
INLINE void unpack_value(int BITS, const kvc_pv_args *args, int64_t t, int64_t d, uint8_t *to, int64_t stride)
{
    int64_t dim = args->dim;
    const uint8_t *from = args->tiles + t * dim * BITS / 8, *line = from + KVC_WIDE_STEP * d * BITS / 8;
    if (BITS == 8 || args->ready || d >= dim) return;
    for (int64_t tile = 0; tile < KVC_WIDE_STEP; tile += KVC_TILE)
        for (int64_t s = 0; s < BITS / 2; s++, line += 64) {
            kvc_words w = kvc_load_words(BITS, from + tile * dim * BITS / 8, dim, (s * dim + d) * 4);
            kvc_prefetch(line, 0, args->ahead);
            EACH (p, 8 / BITS) _mm512_store_si512(to + (tile + 4 * s + 2 * BITS * p) * stride, kvc_plane(BITS, p, w));
        }
}

INLINE void int_pv(int BITS, kvc_pv_args args)
{
    bool two = BITS == 8 || args.digits != KVC_P_BYTE, stacked = args.rows <= KVC_AMX_HALF, twice = two && !stacked;
    _Alignas(64) uint8_t digits[2 * KVC_WIDE][KVC_WIDE_STEP];
    uint8_t (*hi)[KVC_WIDE_STEP] = digits, (*lo)[KVC_WIDE_STEP] = digits + (stacked ? KVC_AMX_HALF : KVC_WIDE);
    limb_sums sums[TILES];
    int32_t sum[KVC_WIDE];
    float step[KVC_WIDE];
    int64_t stride = BITS == 8 ? args.dim : kvc_amx_value_stride(&args);
    for (int64_t t = 0; t < args.n; t += KVC_WIDE_STEP) {
        const uint8_t *bytes = args.tiles + t * args.dim;
        unpack_value(BITS, &args, t, 0, kvc_amx_value_at(&args, t, 0, 1), stride);
        for (int64_t r = 0; r < args.rows; r += 4)
            weigh(args.p + r * args.ld + t, args.ld, kvc_min(4, args.rows - r), args.meta + 2 * t, KVC_WIDE_STEP, !two,
                  (digits_of){hi[r], lo[r], KVC_WIDE_STEP, step + r, sum + r});
        kvc_amx_load(2, hi, KVC_AMX_BYTES);
        if (twice) kvc_amx_load(3, lo, KVC_AMX_BYTES);
        for (int64_t d0 = 0; d0 < args.dim; d0 += TILES * KVC_TILE) {
            for (int i = 0; i < TILES; i++) {
                int64_t d = d0 + i * KVC_TILE, next = d + KVC_TILE;
                unpack_value(BITS, &args, t, next, kvc_amx_value_at(&args, t, next, 1), stride);
                kvc_amx_zero(0);
                if (twice) kvc_amx_zero(1);
                kvc_amx_load(6, BITS < 8 ? kvc_amx_value_at(&args, t, d, 1) : bytes + d * 4, stride * 4);
                if (BITS == 8) kvc_amx_fetch(bytes, d, KVC_TILE, args.ahead);
                kvc_amx_bytes(0, 2, 6, false);
                if (twice) kvc_amx_bytes(1, 3, 6, false);
                kvc_amx_store(0, sums[i].high, KVC_AMX_BYTES);
                if (twice) kvc_amx_store(1, sums[i].low, KVC_AMX_BYTES);
            }
            for (int64_t r = 0; r < args.rows; r++)
                for (int i = 0; i < TILES; i++)
                    kvc_add_codes(BITS, joined(&sums[i], r, two, stacked), step[r], sum[r],
                                  args.o + r * args.dim + d0 + i * KVC_TILE);
        }
    }
}

/* For many rows, as bf16 (amx_floats.c): planes are first unpacked to the second half of `wide`. */
INLINE void pv(int BITS, kvc_pv_args args, kvc_pv_fn *as_bf16)
{
    if (args.all_rows <= MANY_ROWS) {
        int_pv(BITS, args);
        return;
    }
    uint8_t *codes = args.wide + args.n * args.dim;
    for (int64_t t = 0; BITS < 8 && t < args.n; t += KVC_WIDE_STEP)
        for (int64_t d = 0; d < args.dim; d += KVC_TILE)
            unpack_value(BITS, &args, t, d, codes + t * args.dim + d * 4, args.dim);
    if (BITS < 8) args.tiles = codes, args.ahead = 0;
    as_bf16(&args);
}
void kvc_amx_pv_int8(const kvc_pv_args *args) { pv(8, *args, kvc_amx_pv_many_int8); }
void kvc_amx_pv_int4(const kvc_pv_args *args) { pv(4, *args, kvc_amx_pv_many_int4); }
void kvc_amx_pv_int2(const kvc_pv_args *args) { pv(2, *args, kvc_amx_pv_many_int2); }
KVC_TARGET_END
#endif
