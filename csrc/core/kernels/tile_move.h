/* tile_move.h - moves 16 tokens between dense rows, raw tiles, words of quantized tiles, and x [dim][16] (fp32, one
 * lane per token), which the codecs compute on. No arithmetic except conversions. Uses lanes_<isa>.h, which must be
 * included first.
 *
 * Cost, instructions per 16 elements: between rows and x 4 (fp32) or 3 (16 bits: words of two dims are transposed, then
 * split); codes to K words none, to V words 1 (a word's tokens are a 4 x 4 transpose of bytes, one shuffle). */
#ifndef KVC_TILE_MOVE_H
#define KVC_TILE_MOVE_H

#include "tile_codes.h"

/* ---------------------------------------------------------------- 16-bit elements, two per word */

INLINE vf low_half(kvc_dtype dtype, vi w) { return dtype == KVC_BF16 ? i_bits(i_left(w, 16)) : h_low(w); }
INLINE vf high_half(kvc_dtype dtype, vi w)
{
    return dtype == KVC_BF16 ? i_bits(i_and(w, i_all(0xffff0000))) : h_high(w);
}

/* Clamps x to [-most, most] as kvc_saturate does; NaN stays NaN. */
INLINE vf saturate(vf x, float most) { return f_min(f_all(most), f_max(f_all(-most), x)); }

/* Rounds to the upper half of a word; the lower half is undefined. */
INLINE vi round_bf16(vf x)
{
    vi u = f_bits(saturate(x, 0x1.fep127f)), odd = i_and(i_right(u, 16), i_all(1));
    return i_add(i_add(u, i_all(0x7fff)), odd);
}

INLINE vi join_halves(kvc_dtype dtype, vf low, vf high)
{
    if (dtype == KVC_BF16) return i_mix(i_all(0xffff0000), round_bf16(high), i_right(round_bf16(low), 16));
    return i_or(h_of(saturate(low, 65504)), i_left(h_of(saturate(high, 65504)), 16));
}

/* ---------------------------------------------------------------- finite check */

/* True if n words (a multiple of 16) contain only finite numbers: adding 1 to an all-ones exponent carries into the
 * sign. */
static bool words_finite(const uint8_t *words, kvc_dtype dtype, int64_t n)
{
    const vi ones = i_all(dtype == KVC_F32 ? 0x7f800000 : dtype == KVC_BF16 ? 0x7f807f80 : 0x7c007c00);
    const vi one = i_all(dtype == KVC_F32 ? 0x00800000 : dtype == KVC_BF16 ? 0x00800080 : 0x04000400);
    vi bad = i_all(0);
    for (int64_t i = 0; i < n; i += LANES) bad = i_or(bad, i_add(i_and(i_load(words + 4 * i), ones), one));
    return !i_any(i_and(bad, i_all(dtype == KVC_F32 ? 0x80000000 : 0x80008000)));
}

/* ---------------------------------------------------------------- rows */

/* Reading across rows defeats hardware prefetchers, so rows are prefetched a page (64 tokens) ahead: to L2, because
 * misses occupy L1's few fill buffers, which the encoder running meanwhile needs. */
#define ROWS_AHEAD 64

INLINE void fetch(const uint8_t *at, ptrdiff_t ahead)
{
    __builtin_prefetch((const char *)((uintptr_t)at + (uintptr_t)ahead), 0, 2);
}

/* Loads 16 rows of `dtype` to x. */
INLINE void load_rows_as(kvc_dtype dtype, const uint8_t *const *row, int64_t dim, float *x)
{
    int64_t words = dtype == KVC_F32 ? dim : dim / 2;
    ptrdiff_t ahead = ROWS_AHEAD * (row[1] - row[0]); /* usually the rows have a constant stride */
    for (int64_t w = 0; w < words; w += LANES) {
        vi v[LANES];
        bool whole = w + LANES <= words;
        for (int t = 0; t < LANES; t++) {
            fetch(row[t] + 4 * w, ahead);
            v[t] = whole ? i_load(row[t] + 4 * w) : i_load_half(row[t] + 4 * w);
        }
        i_transpose(v);
        for (int k = 0; k < (whole ? LANES : LANES / 2); k++) {
            if (dtype == KVC_F32) {
                f_store(x + (w + k) * LANES, i_bits(v[k]));
            } else {
                f_store(x + 2 * (w + k) * LANES, low_half(dtype, v[k]));
                f_store(x + (2 * (w + k) + 1) * LANES, high_half(dtype, v[k]));
            }
        }
    }
}

static void load_rows(const uint8_t *const *row, kvc_dtype dtype, int64_t dim, float *x)
{
    if (dtype == KVC_F32)
        load_rows_as(KVC_F32, row, dim, x);
    else if (dtype == KVC_F16)
        load_rows_as(KVC_F16, row, dim, x);
    else
        load_rows_as(KVC_BF16, row, dim, x);
}

/* Lanes k of 16 vectors: words w.. of a tile's rows. */
INLINE void row_words(kvc_dtype dtype, const float *x, int64_t w, int n, vi *v)
{
#pragma GCC unroll 16
    for (int k = 0; k < n; k++)
        v[k] = dtype == KVC_F32
                   ? i_load(x + (w + k) * LANES)
                   : join_halves(dtype, f_load(x + 2 * (w + k) * LANES), f_load(x + (2 * (w + k) + 1) * LANES));
}

/* Stores x to 16 rows of `dtype`; NULL rows are skipped. stream: non-temporal stores, if the rows are aligned. */
INLINE void store_rows_as(kvc_dtype dtype, const float *x, int64_t dim, uint8_t *const *row, bool stream)
{
    int64_t words = dtype == KVC_F32 ? dim : dim / 2, w = 0;
    uintptr_t low = 0;
    bool all = true;
    for (int t = 0; t < LANES; t++) {
        low |= (uintptr_t)row[t];
        all &= row[t] != NULL;
    }
    for (; w + LANES <= words; w += LANES) {
        vi v[LANES];
        row_words(dtype, x, w, LANES, v);
        i_transpose(v);
        if (stream && all && low % 64 == 0)
            for (int t = 0; t < LANES; t++) i_stream(row[t] + 4 * w, v[t]);
        else
            for (int t = 0; t < LANES; t++)
                if (row[t]) i_store(row[t] + 4 * w, v[t]);
    }
    if (w < words) {
        vi v[LANES];
        row_words(dtype, x, w, LANES / 2, v);
        for (int k = 0; k < LANES / 2; k++) v[k + LANES / 2] = v[k]; /* not stored */
        i_transpose(v);
        for (int t = 0; t < LANES; t++)
            if (row[t]) i_store_half(row[t] + 4 * w, v[t]);
    }
}

static void store_rows(const float *x, kvc_dtype dtype, int64_t dim, uint8_t *const *row, bool stream)
{
    if (dtype == KVC_F32)
        store_rows_as(KVC_F32, x, dim, row, stream);
    else if (dtype == KVC_F16)
        store_rows_as(KVC_F16, x, dim, row, stream);
    else
        store_rows_as(KVC_BF16, x, dim, row, stream);
}

/* ---------------------------------------------------------------- raw tiles */

/* Copies 16 rows, `stride` bytes apart, to the words of a K tile. */
static void put_raw_key(const uint8_t *rows, int64_t stride, int64_t words, uint8_t *tile, bool stream)
{
    stream = stream && (uintptr_t)tile % 64 == 0;
    for (int64_t w = 0; w < words; w += LANES) {
        vi v[LANES];
        bool whole = w + LANES <= words;
        for (int t = 0; t < LANES; t++) {
            const uint8_t *at = rows + t * stride + 4 * w;
            fetch(at, ROWS_AHEAD * stride);
            v[t] = whole ? i_load(at) : i_load_half(at);
        }
        i_transpose(v);
        for (int k = 0; k < (whole ? LANES : LANES / 2); k++) put_word(tile + 64 * (w + k), v[k], stream);
    }
}

INLINE void load_raw_as(kvc_dtype dtype, const kvc_side *side, const uint8_t *tile, float *x)
{
    int64_t D = side->dim;
    if (side->key) { /* already one lane per token */
        for (int64_t w = 0; w < D / 2; w++) {
            vi v = i_load(tile + 64 * w);
            f_store(x + 2 * w * LANES, low_half(dtype, v));
            f_store(x + (2 * w + 1) * LANES, high_half(dtype, v));
        }
        return;
    }
    for (int64_t d = 0; d < D; d += LANES) { /* a word holds tokens 2s, 2s + 1 */
        vi v[LANES];
        for (int s = 0; s < LANES / 2; s++) {
            vi w = i_load(tile + 4 * (s * D + d));
            v[2 * s] = f_bits(low_half(dtype, w));
            v[2 * s + 1] = f_bits(high_half(dtype, w));
        }
        i_transpose(v);
        for (int k = 0; k < LANES; k++) i_store(x + (d + k) * LANES, v[k]);
    }
}

static void load_raw(const kvc_side *side, const uint8_t *tile, float *x)
{
    if (side->format == KVC_RAW_F16) {
        load_raw_as(KVC_F16, side, tile, x);
    } else if (side->format == KVC_RAW_BF16) {
        load_raw_as(KVC_BF16, side, tile, x);
    } else if (side->key) {
        memcpy(x, tile, (size_t)(4 * LANES * side->dim));
    } else {
        const uint8_t *row[LANES];
        for (int t = 0; t < LANES; t++) row[t] = tile + 4 * t * side->dim;
        load_rows_as(KVC_F32, row, side->dim, x);
    }
}

#endif
