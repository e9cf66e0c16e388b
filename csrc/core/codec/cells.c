/* cells.c - moves elements between rows and the words of a tile (layout: page.h). A "cell" is an element as stored in a
 * row: the raw bits, or a code in a byte. */
#include "cells.h"

#include <string.h>

static uint32_t load32(const uint8_t *p)
{
    uint32_t w;
    memcpy(&w, p, sizeof w);
    return w;
}

static void store32(uint8_t *p, uint32_t w) { memcpy(p, &w, sizeof w); }

static uint16_t load16(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return h;
}

/* ---------------------------------------------------------------- K tiles: one lane per token */

/* Word j of a row of cells: each byte packs the codes of 8 / bits planes of dims. */
static uint32_t key_word(const uint8_t *row, int64_t j, int bits, int64_t period)
{
    uint32_t w = load32(row + 4 * j);
    for (int p = 1; p < 8 / bits; p++) w |= load32(row + p * period + 4 * j) << bits * p;
    return w;
}

/* Writes n rows of cells as tokens [t, t + n) of a tile. */
static void put_key(const kvc_room *side, uint8_t *restrict tile, int64_t t, int64_t n, const uint8_t *restrict cells,
                    int64_t stride)
{
    int bits = kvc_format_bits(side->format);
    int64_t words = side->dim * bits / 32, period = side->dim * bits / 8;
    if (bits == 4)
        for (int64_t j = 0; j < words; j++)
            for (int64_t i = 0; i < n; i++)
                store32(tile + 4 * (j * KVC_TILE + t + i), key_word(cells + i * stride, j, 4, period));
    else if (bits == 2)
        for (int64_t j = 0; j < words; j++)
            for (int64_t i = 0; i < n; i++)
                store32(tile + 4 * (j * KVC_TILE + t + i), key_word(cells + i * stride, j, 2, period));
    else if (n == KVC_TILE)
        for (int64_t j = 0; j < words; j++)
            for (int64_t i = 0; i < KVC_TILE; i++)
                store32(tile + 4 * (j * KVC_TILE + i), load32(cells + i * stride + 4 * j));
    else
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < words; j++)
                store32(tile + 4 * (j * KVC_TILE + t + i), load32(cells + i * stride + 4 * j));
}

static void get_key(const kvc_side *side, const uint8_t *tile, int64_t t, uint8_t *cells)
{
    int bits = kvc_format_bits(side->format);
    int64_t words = side->dim * bits / 32, period = side->dim * bits / 8;
    uint32_t mask = bits == 4 ? 0x0f0f0f0f : bits == 2 ? 0x03030303 : 0xffffffff;
    for (int64_t j = 0; j < words; j++) {
        uint32_t w = load32(tile + 4 * (j * KVC_TILE + t));
        store32(cells + 4 * j, w & mask);
        for (int p = 1; p < 8 / bits; p++) store32(cells + p * period + 4 * j, w >> bits * p & mask);
    }
}

/* ---------------------------------------------------------------- V tiles: one lane per dim */

/* Writes one token; other tokens that share its words are unchanged. */
static void put_value_token(const kvc_room *side, uint8_t *restrict tile, int64_t t, const uint8_t *restrict cells)
{
    int64_t D = side->dim;
    switch (kvc_format_bits(side->format)) {
    case 32: memcpy(tile + 4 * t * D, cells, (size_t)(4 * D)); break;
    case 16:
        for (int64_t d = 0; d < D; d++) memcpy(tile + 4 * (t / 2 * D + d) + 2 * (t % 2), cells + 2 * d, 2);
        break;
    case 8:
        for (int64_t d = 0; d < D; d++) tile[4 * (t / 4 * D + d) + t % 4] = cells[d];
        break;
    default: {
        int bits = kvc_format_bits(side->format), period = 2 * bits;
        int shift = bits * (int)(t / period); /* NOLINT: 2 or 4 bits */
        uint8_t mask = (uint8_t)(((1 << bits) - 1) << shift), *out = tile + 4 * (t % period / 4 * D) + t % 4;
        for (int64_t d = 0; d < D; d++) out[4 * d] = (uint8_t)((out[4 * d] & ~mask) | cells[d] << shift);
    }
    }
}

/* Interleaves rows of cells, so that a word holds two (four) tokens of a dim. */
static void weave16(uint8_t *restrict out, const uint8_t *restrict a, const uint8_t *restrict b, int64_t D)
{
    for (int64_t d = 0; d < D; d++) store32(out + 4 * d, load16(a + 2 * d) | (uint32_t)load16(b + 2 * d) << 16);
}

static void weave8(uint8_t *restrict out, const uint8_t *restrict a, const uint8_t *restrict b,
                   const uint8_t *restrict c, const uint8_t *restrict e, int64_t D)
{
    for (int64_t d = 0; d < D; d++) {
        out[4 * d] = a[d];
        out[4 * d + 1] = b[d];
        out[4 * d + 2] = c[d];
        out[4 * d + 3] = e[d];
    }
}

/* Writes all 16 tokens of a tile. */
static void put_value_tile(const kvc_room *side, uint8_t *restrict tile, const uint8_t *restrict cells, int64_t stride)
{
    int bits = kvc_format_bits(side->format);
    int64_t D = side->dim, words = bits / 2; /* words per dim */
    for (int64_t s = 0; s < words; s++) {
        uint8_t *out = tile + 4 * s * D;
        if (bits < 8) /* byte i, plane p holds token p * 2 * bits + 4s + i */
            for (int64_t i = 0; i < 4; i++) {
                const uint8_t *from = cells + (4 * s + i) * stride;
                for (int64_t d = 0; d < D; d++) out[4 * d + i] = from[d];
                for (int p = 1; p < 8 / bits; p++) {
                    const uint8_t *more = from + p * 2 * bits * stride;
                    for (int64_t d = 0; d < D; d++) out[4 * d + i] |= (uint8_t)(more[d] << bits * p);
                }
            }
        else {
            const uint8_t *a = cells + s * (32 / bits) * stride;
            if (bits == 32)
                memcpy(out, a, (size_t)(4 * D));
            else if (bits == 16)
                weave16(out, a, a + stride, D);
            else
                weave8(out, a, a + stride, a + 2 * stride, a + 3 * stride, D);
        }
    }
}

static void get_value(const kvc_side *side, const uint8_t *tile, int64_t t, uint8_t *restrict cells)
{
    int64_t D = side->dim;
    switch (kvc_format_bits(side->format)) {
    case 32: memcpy(cells, tile + 4 * t * D, (size_t)(4 * D)); break;
    case 16:
        for (int64_t d = 0; d < D; d++) memcpy(cells + 2 * d, tile + 4 * (t / 2 * D + d) + 2 * (t % 2), 2);
        break;
    case 8:
        for (int64_t d = 0; d < D; d++) cells[d] = tile[4 * (t / 4 * D + d) + t % 4];
        break;
    default: {
        int bits = kvc_format_bits(side->format), period = 2 * bits;
        int shift = bits * (int)(t / period), s = (int)(t % period / 4); /* NOLINT: 2 or 4 bits */
        for (int64_t d = 0; d < D; d++)
            cells[d] = (uint8_t)(tile[4 * (s * D + d) + t % 4] >> shift & ((1 << bits) - 1));
    }
    }
}

/* ---------------------------------------------------------------- tiles of 3-bit codes, one code at a time */

/* Byte offsets and shifts of a code's low 2 bits and its high bit. */
typedef struct place {
    int64_t low, high;
    int shift, high_shift;
} place;

static place place_of(int key, int64_t D, int64_t t, int64_t d)
{
    int64_t in = d % (D / 4), at = key ? 4 * (in / 4 * KVC_TILE + t) + in % 4 : 4 * d + t % 4;
    int plane = (int)(key ? d / (D / 4) : t / 4);
    return (place){at, 4 * D + at % (2 * D), 2 * plane, 2 * plane + (at >= 2 * D)};
}

static void put_three(const kvc_room *side, uint8_t *restrict tile, int64_t t, const uint8_t *restrict cells)
{
    for (int64_t d = 0; d < side->dim; d++) {
        place p = place_of(side->key, side->dim, t, d);
        tile[p.low] = (uint8_t)((tile[p.low] & ~(3 << p.shift)) | (cells[d] & 3) << p.shift);
        tile[p.high] = (uint8_t)((tile[p.high] & ~(1 << p.high_shift)) | cells[d] >> 2 << p.high_shift);
    }
}

static void get_three(const kvc_side *side, const uint8_t *tile, int64_t t, uint8_t *restrict cells)
{
    for (int64_t d = 0; d < side->dim; d++) {
        place p = place_of(side->key, side->dim, t, d);
        cells[d] = (uint8_t)((tile[p.low] >> p.shift & 3) | (tile[p.high] >> p.high_shift & 1) << 2);
    }
}

/* ---------------------------------------------------------------- a side of a page */

void kvc_get_cells(const kvc_side *side, const uint8_t *tile, int64_t t, uint8_t *cells)
{
    if (kvc_format_bits(side->format) == 3)
        get_three(side, tile, t, cells);
    else if (side->key)
        get_key(side, tile, t, cells);
    else
        get_value(side, tile, t, cells);
}

void kvc_put_cells(const kvc_room *side, int64_t t0, int64_t n, const uint8_t *cells, int64_t stride)
{
    for (int64_t done = 0; done < n;) {
        int64_t t = (t0 + done) % KVC_TILE, run = KVC_TILE - t < n - done ? KVC_TILE - t : n - done;
        uint8_t *tile = side->tiles + (t0 + done) / KVC_TILE * kvc_tile_bytes(side->format, side->dim);
        const uint8_t *from = cells + done * stride;
        const kvc_tile_kernels *kernels = kvc_kernels_get()->tile;
        if (side->key && run == KVC_TILE && kernels && kvc_format_is_raw(side->format))
            kernels->raw_key(from, stride, side->dim * kvc_format_bits(side->format) / 32, tile, side->stream);
        else if (kvc_format_bits(side->format) == 3)
            for (int64_t i = 0; i < run; i++) put_three(side, tile, t + i, from + i * stride);
        else if (side->key)
            put_key(side, tile, t, run, from, stride);
        else if (run == KVC_TILE)
            put_value_tile(side, tile, from, stride);
        else
            for (int64_t i = 0; i < run; i++) put_value_token(side, tile, t + i, from + i * stride);
        done += run;
    }
}
