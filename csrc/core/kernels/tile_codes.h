/* tile_codes.h - converts the codes of 16 tokens between one per byte and the words of a quantized tile. Uses
 * lanes_<isa>.h, which must be included first. */
#ifndef KVC_TILE_CODES_H
#define KVC_TILE_CODES_H

#include "codec/codec.h"

#define LANES 16
#define MAX_WORDS (KVC_MAX_DIM / 4 * LANES) /* codes, one per byte: [dim / 4][16]; a word holds dims 4j.. of a token */

INLINE void put_word(uint8_t *to, vi w, bool stream)
{
    if (stream)
        i_stream(to, w);
    else
        i_store(to, w);
}

/* Packs codes to the words of a tile, in planes of 8 / bits per byte. */
INLINE void put_planes(int key, int bits, int64_t dim, const uint32_t *codes, uint8_t *tile, bool stream)
{
    if (key) {
        int64_t words = dim * bits / 32; /* per plane */
        for (int64_t j = 0; j < words; j++) {
            vi w = i_load(codes + j * LANES);
            if (bits <= 4) w = i_or(w, i_left(i_load(codes + (j + words) * LANES), bits));
            if (bits == 2) {
                w = i_or(w, i_left(i_load(codes + (j + 2 * words) * LANES), 4));
                w = i_or(w, i_left(i_load(codes + (j + 3 * words) * LANES), 6));
            }
            put_word(tile + 64 * j, w, stream);
        }
        return;
    }
    for (int64_t d = 0; d < dim; d += LANES) {
        vi v[4]; /* v[s]: tokens 4s .. 4s + 3 of 16 dims */
        for (int k = 0; k < 4; k++) v[k] = i_turn(i_load(codes + (d / 4 + k) * LANES));
        i_quarters(v);
        if (bits == 8)
            for (int s = 0; s < 4; s++) put_word(tile + 4 * (s * dim + d), v[s], stream);
        else if (bits == 4)
            for (int s = 0; s < 2; s++) put_word(tile + 4 * (s * dim + d), i_or(v[s], i_left(v[s + 2], 4)), stream);
        else
            put_word(tile + 4 * d, i_or(i_or(v[0], i_left(v[1], 2)), i_or(i_left(v[2], 4), i_left(v[3], 6))), stream);
    }
}

/* Unpacks the words of a tile to codes. */
INLINE void get_planes(int key, int bits, int64_t dim, const uint8_t *tile, uint32_t *codes)
{
    vi mask = i_all(bits == 4 ? 0x0f0f0f0f : bits == 2 ? 0x03030303 : 0xffffffff);
    if (key) {
        int64_t words = dim * bits / 32;
        for (int64_t j = 0; j < words; j++) {
            vi w = i_load(tile + 64 * j);
            i_store(codes + j * LANES, i_and(w, mask));
            if (bits == 4) i_store(codes + (j + words) * LANES, i_and(i_right(w, 4), mask));
            if (bits == 2) {
                i_store(codes + (j + words) * LANES, i_and(i_right(w, 2), mask));
                i_store(codes + (j + 2 * words) * LANES, i_and(i_right(w, 4), mask));
                i_store(codes + (j + 3 * words) * LANES, i_and(i_right(w, 6), mask));
            }
        }
        return;
    }
    for (int64_t d = 0; d < dim; d += LANES) {
        vi v[4];
        if (bits == 8) {
            for (int s = 0; s < 4; s++) v[s] = i_load(tile + 4 * (s * dim + d));
        } else if (bits == 4) {
            for (int s = 0; s < 2; s++) {
                vi w = i_load(tile + 4 * (s * dim + d));
                v[s] = i_and(w, mask);
                v[s + 2] = i_and(i_right(w, 4), mask);
            }
        } else {
            vi w = i_load(tile + 4 * d);
            v[0] = i_and(w, mask);
            v[1] = i_and(i_right(w, 2), mask);
            v[2] = i_and(i_right(w, 4), mask);
            v[3] = i_and(i_right(w, 6), mask);
        }
        i_quarters(v);
        for (int k = 0; k < 4; k++) i_store(codes + (d / 4 + k) * LANES, i_turn(v[k]));
    }
}

/* Packs 3-bit codes: the low 2 bits as 2-bit codes, followed by the high bits, with the two halves interleaved. */
INLINE void put_codes(int key, int bits, int64_t dim, const uint32_t *codes, uint8_t *tile, bool stream)
{
    uint32_t part[MAX_WORDS], high[MAX_WORDS / 4];
    const uint8_t *from = (const uint8_t *)high;
    if (bits != 3) {
        put_planes(key, bits, dim, codes, tile, stream);
        return;
    }
    for (int64_t i = 0; i < 4 * dim; i += LANES) i_store(part + i, i_and(i_load(codes + i), i_all(0x03030303)));
    put_planes(key, 2, dim, part, tile, stream);
    for (int64_t i = 0; i < 4 * dim; i += LANES)
        i_store(part + i, i_and(i_right(i_load(codes + i), 2), i_all(0x01010101)));
    put_planes(key, 2, dim, part, (uint8_t *)high, false);
    for (int64_t at = 0; at < 2 * dim; at += 64)
        put_word(tile + 4 * dim + at, i_or(i_load(from + at), i_left(i_load(from + 2 * dim + at), 1)), stream);
}

INLINE void get_codes(int key, int bits, int64_t dim, const uint8_t *tile, uint32_t *codes)
{
    uint32_t part[MAX_WORDS], high[MAX_WORDS / 4];
    uint8_t *to = (uint8_t *)high;
    if (bits != 3) {
        get_planes(key, bits, dim, tile, codes);
        return;
    }
    for (int64_t at = 0; at < 2 * dim; at += 64) {
        vi w = i_load(tile + 4 * dim + at);
        i_store(to + at, i_and(w, i_all(0x55555555)));
        i_store(to + 2 * dim + at, i_and(i_right(w, 1), i_all(0x55555555)));
    }
    get_planes(key, 2, dim, tile, codes);
    get_planes(key, 2, dim, to, part);
    for (int64_t i = 0; i < 4 * dim; i += LANES)
        i_store(codes + i, i_or(i_load(codes + i), i_left(i_load(part + i), 2)));
}

#endif
