/* tile_decode.h - decodes a tile of any format to x [dim][16], fp32, one lane per token: level * scale (+ zero point),
 * rotated back. Each operation is rounded separately, as in kvc_decode (codec.c).
 *
 * Cost, instructions per 16 elements: a shift and a table lookup (4 bits and less) or 3 to 4 for the conversion (8
 * bits), one or two for the scale, and 8 for the rotation. */
#ifndef KVC_TILE_DECODE_H
#define KVC_TILE_DECODE_H

#include "tile_move.h"
#include "tile_rotate.h"
#include "tile_scale.h"

/* Levels by the low nibble of a code. */
INLINE const float *level_table(int coding, int bits)
{
    static const float table[7][16] = {
        {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
        {-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -.5f, .5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f},
        {-1.5f, -.5f, .5f, 1.5f},
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
        {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6},
        {-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127},
        {-3.5f, -2.5f, -1.5f, -.5f, .5f, 1.5f, 2.5f, 3.5f},
    };
    return table[coding == KVC_CODING_INT                                  ? 0
                 : coding == KVC_CODING_MID || coding == KVC_CODING_SPREAD ? (bits == 4   ? 1
                                                                              : bits == 3 ? 6
                                                                                          : 2)
                 : coding == KVC_CODING_UINT                               ? 3
                 : coding == KVC_CODING_E2M1                               ? 4
                                                                           : 5];
}

/* Converts the four codes in each lane's word to levels. e4m3 levels are divided by 256, which the caller's scale
 * includes. */
INLINE void levels_of(int coding, int bits, const float *table, vi w, vf *level)
{
    if (coding == KVC_CODING_E4M3 || coding == KVC_CODING_E5M2) {
        vi even = i_left(w, 8), odd = w; /* bytes 0, 2 and 1, 3 as the upper halves of fp16 numbers */
        if (coding == KVC_CODING_E4M3) {
            even = i_or(i_and(even, i_all(0x80008000)), i_and(i_right(even, 1), i_all(0x3f803f80)));
            odd = i_or(i_and(odd, i_all(0x80008000)), i_and(i_right(odd, 1), i_all(0x3f803f80)));
        } else {
            even = i_and(even, i_all(0xff00ff00));
            odd = i_and(odd, i_all(0xff00ff00));
        }
        level[0] = h_low(even);
        level[1] = h_low(odd);
        level[2] = h_high(even);
        level[3] = h_high(odd);
    } else if (bits == 8) {
        vf offset = f_all(coding == KVC_CODING_INT ? 128 : 0);
        vi mask = i_all(0xff);
        level[0] = f_sub(f_of(i_and(w, mask)), offset);
        level[1] = f_sub(f_of(i_and(i_right(w, 8), mask)), offset);
        level[2] = f_sub(f_of(i_and(i_right(w, 16), mask)), offset);
        level[3] = f_sub(f_of(i_right(w, 24)), offset);
    } else {
        level[0] = f_table(table, w);
        level[1] = f_table(table, i_right(w, 8));
        level[2] = f_table(table, i_right(w, 16));
        level[3] = f_table(table, i_right(w, 24));
    }
}

/* Converts n fp16 numbers, a multiple of 16. */
INLINE void load_halves(const uint8_t *from, int64_t n, float *to)
{
    for (int64_t i = 0; i < n; i += LANES) f_store(to + i, h_load(from + 2 * i));
}

/* Formats with metadata per token; t0 is the first token of the tile. Rotated rows are scaled by the rotation. */
INLINE void decode_as(int coding, int bits, const kvc_side *side, kvc_traits f, int64_t t0, const uint32_t *codes,
                      float *x)
{
    int64_t group = f.group ? f.group : side->dim, plane = kvc_meta_size(f) * side->page_size;
    const uint8_t *meta = side->meta + kvc_meta_size(f) * t0;
    const float *table = level_table(coding, bits);
    for (int64_t d0 = 0; d0 < side->dim; d0 += group, meta += (coding == KVC_CODING_UINT ? 2 : 1) * plane) {
        vf scale = load_scale(f.scale, meta), zero = scale;
        if (coding == KVC_CODING_UINT) zero = h_load(meta + plane);
        if (coding == KVC_CODING_E4M3) scale = f_mul(scale, f_all(256));
        for (int64_t d = d0; d < d0 + group; d += 4) {
            vf level[4];
            levels_of(coding, bits, table, i_load(codes + d / 4 * LANES), level);
            for (int i = 0; i < 4; i++) {
                vf y = coding == KVC_CODING_MID || coding == KVC_CODING_LLOYD || coding == KVC_CODING_SPREAD
                           ? level[i]
                           : f_mul(level[i], scale);
                f_store(x + (d + i) * LANES, coding == KVC_CODING_UINT ? f_add(y, zero) : y);
            }
        }
    }
}

/* K with a scale and zero point per channel. */
INLINE void decode_channels(int bits, const kvc_side *side, const uint32_t *codes, float *x)
{
    float scale[KVC_MAX_DIM], zero[KVC_MAX_DIM];
    load_halves(side->meta, side->dim, scale);
    load_halves(side->meta + 2 * side->dim, side->dim, zero);
    const float *table = level_table(KVC_CODING_UINT, bits);
    for (int64_t d = 0; d < side->dim; d += 4) {
        vf level[4];
        levels_of(KVC_CODING_UINT, bits, table, i_load(codes + d / 4 * LANES), level);
        for (int i = 0; i < 4; i++) {
            vf y = f_mul(level[i], f_all(scale[d + i]));
            f_store(x + (d + i) * LANES, f_add(y, f_all(zero[d + i])));
        }
    }
}

INLINE void decode_case(int coding, int bits, const kvc_side *side, kvc_traits f, int64_t tile, float *x)
{
    uint32_t codes[MAX_WORDS];
    get_codes(side->key, bits, side->dim, side->tiles + tile * kvc_tile_bytes(side->format, side->dim), codes);
    if (coding == KVC_CODING_UINT && bits < 8 && side->key && f.keys == KVC_KEYS_CHANNEL)
        decode_channels(bits, side, codes, x);
    else
        decode_as(coding, bits, side, f, tile * LANES, codes, x);
}

/* kvc_join, then multiplied by the scale, plus `add` [dim] (NULL: none). */
INLINE void join_tile(float *x, int64_t dim, vf scale, const float *add)
{
    int64_t fine = dim / 4, used = dim - fine;
    for (int64_t d = 0; d < dim; d++) {
        vf y = d < used ? f_load(x + d * LANES) : f_all(0);
        if (d < fine) y = f_add(f_mul(y, f_all(4 * KVC_FINE)), f_mul(f_load(x + (used + d) * LANES), f_all(KVC_FINE)));
        y = f_mul(y, scale);
        f_store(x + d * LANES, add ? f_add(y, f_all(add[d])) : y);
    }
}

/* Decodes a tile of a side to x [dim][16]. */
static void decode_tile(const kvc_side *side, int64_t tile, float *x)
{
    kvc_traits f = kvc_format_traits(side->format);
    int64_t bytes = kvc_tile_bytes(side->format, side->dim);
    const uint8_t *next = side->tiles + (tile + 1) * bytes; /* the next tile is usually decoded next */
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i, 0, 3);
    if (f.coding == KVC_CODING_RAW) {
        load_raw(side, next - bytes, x);
        return;
    }
#define CASE(CODING, BITS)                                                                                             \
    if (f.coding == KVC_CODING_##CODING && f.bits == BITS) decode_case(KVC_CODING_##CODING, BITS, side, f, tile, x);
    KVC_TILE_CASES(CASE)
#undef CASE
    if (f.rotated) {
        const uint8_t *mean = side->meta + kvc_token_meta_bytes(f, 1, side->dim, side->page_size);
        vf scale = h_load(side->meta + 2 * tile * LANES);
        float add[KVC_MAX_DIM];
        bool centred = side->key && f.keys == KVC_KEYS_CENTRED;
        if (centred) load_halves(mean, side->dim, add);
        if (f.rotated == KVC_DIGITS)
            join_tile(x, side->dim, scale, centred ? add : NULL);
        else
            rotate_tile(x, side->dim, scale, (after){.add = centred ? add : NULL});
    }
}

#endif
