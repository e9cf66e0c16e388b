/* tile.h - operations on whole tiles, with 16 lanes: the functions in a level's kvc_tile_kernels. Included by
 * <isa>_tile.c after the target pragma, fp-contract=off and lanes_<isa>.h. */
#ifndef KVC_TILE_H
#define KVC_TILE_H

/* The (coding, bits) pairs that exist. */
#define KVC_TILE_CASES(CALL)                                                                                           \
    CALL(INT, 8)                                                                                                       \
    CALL(INT, 4)                                                                                                       \
    CALL(UINT, 8)                                                                                                      \
    CALL(UINT, 4)                                                                                                      \
    CALL(UINT, 2)                                                                                                      \
    CALL(MID, 4) CALL(MID, 3) CALL(MID, 2) CALL(E4M3, 8) CALL(E5M2, 8) CALL(E2M1, 4) CALL(LLOYD, 4) CALL(SPREAD, 2)

#include "tile_decode.h"
#include "tile_encode.h"
#include "tile_map.h"

INLINE void encode_case(int coding, int bits, const kvc_room *side, kvc_traits f, int64_t tile, const float *mean,
                        float *x)
{
    int64_t D = side->dim, group = f.group ? f.group : D, plane = kvc_meta_size(f) * side->page_size;
    uint8_t *meta = side->meta + kvc_meta_size(f) * tile * LANES;
    uint32_t codes[MAX_WORDS];
    uint8_t *to = side->tiles + tile * kvc_tile_bytes(side->format, D);
    /* with fewer bits, non-temporal stores are slower: the arithmetic hides the cost of fetching the lines */
    bool stream = side->stream && bits == 8 && (uintptr_t)to % 64 == 0;
    for (int64_t i = 0; !stream && i < kvc_tile_bytes(side->format, D); i += 64) __builtin_prefetch(to + i, 1, 3);
    if (coding == KVC_CODING_MID || coding == KVC_CODING_LLOYD)
        encode_rotated(coding, bits, x, D, mean, side->feedback, meta, codes);
    else if (coding == KVC_CODING_SPREAD)
        encode_spread(x, D, mean, meta, codes);
    else
        for (int64_t d = 0; d < D; d += group, meta += (coding == KVC_CODING_UINT ? 2 : 1) * plane)
            encode_group(coding, bits, f.scale, x + d * LANES, group, meta, plane, codes + d / 4 * LANES);
    put_codes(side->key, bits, D, codes, to, stream);
}

static void encode_around(const kvc_room *side, int64_t tile, const float *mean, float *x)
{
    kvc_traits f = kvc_format_traits(side->format);
#define CASE(CODING, BITS)                                                                                             \
    if (f.coding == KVC_CODING_##CODING && f.bits == BITS)                                                             \
        encode_case(KVC_CODING_##CODING, BITS, side, f, tile, mean, x);
    KVC_TILE_CASES(CASE)
#undef CASE
}

/* Encodes x to a tile of a side; overwrites x. */
static void encode_tile(const kvc_room *side, int64_t tile, float *x) { encode_around(side, tile, NULL, x); }

/* ---------------------------------------------------------------- statistics of a page over its tokens */

/* Transposes 16 dims from d of x: v[t] has those of token t. */
INLINE void by_token(const float *x, int64_t d, vi *v)
{
    for (int k = 0; k < LANES; k++) v[k] = i_load(x + (d + k) * LANES);
    i_transpose(v);
}

/* Stores the mean of the page's tokens and returns it as stored; summed over tokens in ascending order. */
static void page_mean(const kvc_room *side, const float *x, float *mean)
{
    int64_t D = side->dim, tiles = side->page_size / LANES;
    uint8_t *at = side->meta + kvc_token_meta_bytes(kvc_format_traits(side->format), 1, D, side->page_size);
    for (int64_t d = 0; d < D; d += LANES, at += 2 * LANES) {
        vf sum = f_all(0);
        for (int64_t tile = 0; tile < tiles; tile++) {
            vi v[LANES];
            by_token(x + tile * D * LANES, d, v);
            for (int t = 0; t < LANES; t++) sum = f_add(sum, i_bits(v[t]));
        }
        vi h = h_of(clamp(f_div(sum, f_all((float)side->page_size)), f_all(-65504), f_all(65504)));
        i_store16(at, h);
        f_store(mean + d, h_low(h));
    }
}

/* K with a scale and zero point per channel of the page: [D] scales, then [D] zero points (minima). */
INLINE void encode_channels(int bits, const kvc_room *side, const float *x)
{
    int64_t D = side->dim, tiles = side->page_size / LANES;
    float low[KVC_MAX_DIM], inverse[KVC_MAX_DIM];
    const vf zero = f_all(0), top = f_all((float)((1 << bits) - 1));
    for (int64_t d = 0; d < D; d += LANES) {
        vf least = zero, most = zero;
        for (int64_t tile = 0; tile < tiles; tile++) {
            vi v[LANES];
            by_token(x + tile * D * LANES, d, v);
            if (tile == 0) least = most = i_bits(v[0]);
            for (int t = 0; t < LANES; t++) { /* in order: of 0 and -0, the first is kept */
                least = f_min(i_bits(v[t]), least);
                most = f_max(i_bits(v[t]), most);
            }
        }
        vi h = h_of(clamp(least, f_all(-65504), f_all(65504)));
        i_store16(side->meta + 2 * (D + d), h);
        least = h_low(h);
        vf span = f_sub(most, least);
        vm some = f_less(zero, span);
        f_store(low + d, least);
        f_store(inverse + d, inverse_of(put_scale(f_div(span, top), some, side->meta + 2 * d), some));
    }
    for (int64_t tile = 0; tile < tiles; tile++, x += D * LANES) {
        uint32_t codes[MAX_WORDS];
        for (int64_t d = 0; d < D; d += 4) {
            vi c[4];
            for (int i = 0; i < 4; i++) {
                vf y = f_mul(f_sub(at_dim(x, d + i), f_all(low[d + i])), f_all(inverse[d + i]));
                c[i] = nearest(clamp(y, zero, top), 0);
            }
            i_store(codes + d / 4 * LANES, join_bytes(c));
        }
        put_codes(1, bits, D, codes, side->tiles + tile * kvc_tile_bytes(side->format, D), false);
    }
}

/* Encodes x [tiles][dim][16] to a whole page side that has statistics over its tokens; overwrites x. */
static void encode_page(const kvc_room *side, float *x)
{
    kvc_traits f = kvc_format_traits(side->format);
    if (f.keys == KVC_KEYS_CHANNEL && f.bits == 4) {
        encode_channels(4, side, x);
    } else if (f.keys == KVC_KEYS_CHANNEL) {
        encode_channels(2, side, x);
    } else {
        float mean[KVC_MAX_DIM];
        page_mean(side, x, mean);
        for (int64_t tile = 0; tile < side->page_size / LANES; tile++)
            encode_around(side, tile, mean, x + tile * side->dim * LANES);
    }
}

/* ---------------------------------------------------------------- conversion to the other side's layout */

INLINE void turn_codes(int bits, const kvc_side *side, const uint8_t *from, uint8_t *to)
{
    uint32_t codes[MAX_WORDS];
    get_codes(side->key, bits, side->dim, from, codes);
    put_codes(!side->key, bits, side->dim, codes, to, false);
}

static void turn_tile(const kvc_side *side, int64_t tile, uint8_t *to)
{
    const uint8_t *from = side->tiles + tile * kvc_tile_bytes(side->format, side->dim);
    int bits = kvc_format_bits(side->format);
    if (bits == 8)
        turn_codes(8, side, from, to);
    else if (bits == 4)
        turn_codes(4, side, from, to);
    else if (bits == 3)
        turn_codes(3, side, from, to);
    else
        turn_codes(2, side, from, to);
}

/* ---------------------------------------------------------------- statistics of rows */

static void dot_tile(const float *x, int64_t D, const float *y, float *out)
{
    vf sum[4] = {f_all(0), f_all(0), f_all(0), f_all(0)};
    for (int64_t d = 0; d < D; d += 4)
        for (int i = 0; i < 4; i++) {
            vf row = at_dim(x, d + i);
            sum[i] = f_fma(row, y ? f_all(y[d + i]) : row, sum[i]);
        }
    f_store(out, f_add(f_add(sum[0], sum[1]), f_add(sum[2], sum[3])));
}

static void add_tile(const float *x, int64_t D, const float *factor, float *sums)
{
    vf by = f_load(factor);
    for (int64_t d = 0; d < D; d++) f_store(sums + d * LANES, f_fma(at_dim(x, d), by, f_load(sums + d * LANES)));
}

#define KVC_TILE_TABLE                                                                                                 \
    {load_rows,   store_rows, put_raw_key, words_finite, decode_tile, encode_tile,                                     \
     encode_page, turn_tile,  dot_tile,    add_tile,     map_rows}

#endif
