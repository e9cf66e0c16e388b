/* codec.c - rows into the words of a page and back. The arithmetic is in kernels/; here bytes are put where page.h
 * wants them. A "cell" is an element as a row holds it: the raw bits, or a code in a byte. */
#include "codec.h"
#include "floats.h"

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

kvc_side kvc_page_side(uint8_t *page, int key_side, int key, int value, int64_t key_dim, int64_t value_dim,
                       int64_t page_size)
{
    kvc_layout l = kvc_page_layout(key, value, key_dim, value_dim, page_size);
    return key_side ? (kvc_side){key, 1, key_dim, page_size, page + l.k, page + l.k_meta}
                    : (kvc_side){value, 0, value_dim, page_size, page + l.v, page + l.v_meta};
}

/* ---------------------------------------------------------------- K tiles: a lane is a token */

/* n rows of cells to tokens t.. of one tile. */
static void put_key(const kvc_side *side, uint8_t *restrict tile, int64_t t, int64_t n, const uint8_t *restrict cells,
                    int64_t stride)
{
    int bits = kvc_format_bits(side->format);
    int64_t words = side->dim * bits / 32, high = side->dim / 2;
    if (bits == 4)
        for (int64_t j = 0; j < words; j++)
            for (int64_t i = 0; i < n; i++) {
                const uint8_t *cell = cells + i * stride + 4 * j;
                store32(tile + 4 * (j * KVC_TILE + t + i), load32(cell) | load32(cell + high) << 4);
            }
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
    int64_t words = side->dim * bits / 32;
    for (int64_t j = 0; j < words; j++) {
        uint32_t w = load32(tile + 4 * (j * KVC_TILE + t));
        if (bits == 4) {
            store32(cells + side->dim / 2 + 4 * j, w >> 4 & 0x0f0f0f0f);
            w &= 0x0f0f0f0f;
        }
        store32(cells + 4 * j, w);
    }
}

/* ---------------------------------------------------------------- V tiles: a lane is a dim */

/* One token; the other tokens of its words keep their bits. Below 8 bits tokens come by whole tiles only. */
static void put_value_token(const kvc_side *side, uint8_t *restrict tile, int64_t t, const uint8_t *restrict cells)
{
    int64_t D = side->dim;
    switch (kvc_format_bits(side->format)) {
    case 32: memcpy(tile + 4 * t * D, cells, (size_t)(4 * D)); break;
    case 16:
        for (int64_t d = 0; d < D; d++) memcpy(tile + 4 * (t / 2 * D + d) + 2 * (t % 2), cells + 2 * d, 2);
        break;
    default:
        for (int64_t d = 0; d < D; d++) tile[4 * (t / 4 * D + d) + t % 4] = cells[d];
    }
}

/* Rows a, b, .. of cells to words of one, two, four of them. */
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

/* 16 tokens. */
static void put_value_tile(const kvc_side *side, uint8_t *restrict tile, const uint8_t *restrict cells, int64_t stride)
{
    int bits = kvc_format_bits(side->format);
    int64_t D = side->dim, words = bits / 2; /* a dim */
    for (int64_t s = 0; s < words; s++) {
        uint8_t *out = tile + 4 * s * D;
        if (bits == 4) /* byte i: tokens 4s + i and 8 + 4s + i */
            for (int64_t i = 0; i < 4; i++) {
                const uint8_t *low = cells + (4 * s + i) * stride, *high = low + 8 * stride;
                for (int64_t d = 0; d < D; d++) out[4 * d + i] = (uint8_t)(low[d] | high[d] << 4);
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
    default:
        for (int64_t d = 0; d < D; d++) {
            uint8_t byte = tile[4 * (t % 8 / 4 * D + d) + t % 4];
            cells[d] = (uint8_t)(t < 8 ? byte & 15 : byte >> 4);
        }
    }
}

/* ---------------------------------------------------------------- a side of a page */

/* n rows of cells, `stride` bytes apart, to tokens t0.. */
static void put_cells(const kvc_side *side, int64_t t0, int64_t n, const uint8_t *cells, int64_t stride)
{
    for (int64_t done = 0; done < n;) {
        int64_t t = (t0 + done) % KVC_TILE, run = KVC_TILE - t < n - done ? KVC_TILE - t : n - done;
        uint8_t *tile = side->tiles + (t0 + done) / KVC_TILE * kvc_tile_bytes(side->format, side->dim);
        const uint8_t *from = cells + done * stride;
        if (side->key)
            put_key(side, tile, t, run, from, stride);
        else if (run == KVC_TILE)
            put_value_tile(side, tile, from, stride);
        else
            for (int64_t i = 0; i < run; i++) put_value_token(side, tile, t + i, from + i * stride);
        done += run;
    }
}

/* Encodes n rows as tokens t0..; scratch holds their codes and scales. */
static void encode_rows(const kvc_side *side, int64_t t0, int64_t n, float *rows, float *scratch)
{
    uint8_t *codes = (uint8_t *)scratch;
    uint16_t *scales = (uint16_t *)(void *)(codes + n * side->dim);
    kvc_kernels_get()->encode(side->format, rows, n, side->dim, codes, scales);
    memcpy(side->meta + 2 * t0, scales, (size_t)(2 * n));
    put_cells(side, t0, n, codes, side->dim);
}

/* Subtracts the mean of the page's rows, as it is stored. */
static void centre(const kvc_side *side, float *restrict rows, float *restrict mean)
{
    int64_t D = side->dim;
    memset(mean, 0, (size_t)D * sizeof *mean);
    for (int64_t t = 0; t < side->page_size; t++)
        for (int64_t d = 0; d < D; d++) mean[d] += rows[t * D + d];
    for (int64_t d = 0; d < D; d++) {
        uint16_t stored = kvc_f32_to_f16(kvc_clamp(mean[d] / (float)side->page_size, -65504, 65504));
        memcpy(side->meta + 2 * (side->page_size + d), &stored, sizeof stored);
        mean[d] = kvc_f16_to_f32(stored);
    }
    for (int64_t t = 0; t < side->page_size; t++)
        for (int64_t d = 0; d < D; d++) rows[t * D + d] -= mean[d];
}

int64_t kvc_codec_scratch(int64_t dim, int64_t page_size)
{
    int64_t codes = page_size * (dim + 2) / 4;     /* codes and scales of a page */
    return codes + KVC_TILE * dim + KVC_ALIGN / 4; /* or the centroid; or a tile of rows */
}

void kvc_encode(const kvc_side *side, float *rows, float *scratch)
{
    uint32_t guard = kvc_fp_begin();
    if (side->key && kvc_format_get(side->format)->key_dim_meta) centre(side, rows, scratch);
    encode_rows(side, 0, side->page_size, rows, scratch);
    kvc_fp_end(guard);
}

void kvc_store_rows(const kvc_side *side, int64_t t0, int64_t n, const void *src, int64_t stride, kvc_dtype dtype,
                    float *scratch)
{
    int64_t step = stride * (dtype == KVC_F32 ? 4 : 2);
    if (kvc_format_is_raw(side->format)) {
        put_cells(side, t0, n, src, step);
        return;
    }
    for (int64_t done = 0; done < n;) { /* tile by tile */
        int64_t left = KVC_TILE - (t0 + done) % KVC_TILE, run = left < n - done ? left : n - done;
        kvc_load_rows((const uint8_t *)src + done * step, stride, dtype, run, side->dim, scratch);
        encode_rows(side, t0 + done, run, scratch, scratch + KVC_TILE * side->dim);
        done += run;
    }
}

void kvc_decode_codes(int format, const uint8_t *codes, const uint16_t *scales, int64_t n, int64_t dim, float *rows)
{
    for (int64_t i = 0; i < n; i++, codes += dim, rows += dim) {
        float scale = kvc_f16_to_f32(scales[i]);
        if (format == KVC_INT8)
            for (int64_t d = 0; d < dim; d++) rows[d] = (float)(codes[d] - 128) * scale;
        else if (format == KVC_FP8_E4M3)
            for (int64_t d = 0; d < dim; d++) rows[d] = kvc_e4m3_to_f32(codes[d]) * scale;
        else {
            for (int64_t d = 0; d < dim; d++) rows[d] = ((float)codes[d] - 7.5f) * scale;
            kvc_kernels_get()->rotate(rows, 1, dim);
        }
    }
}

void kvc_decode(const kvc_side *side, int64_t t0, int64_t n, float *rows)
{
    _Alignas(KVC_ALIGN) uint8_t cells[4 * KVC_MAX_DIM];
    int64_t D = side->dim;
    for (int64_t t = t0; t < t0 + n; t++, rows += D) {
        const uint8_t *tile = side->tiles + t / KVC_TILE * kvc_tile_bytes(side->format, D);
        if (side->key)
            get_key(side, tile, t % KVC_TILE, cells);
        else
            get_value(side, tile, t % KVC_TILE, cells);
        if (kvc_format_is_raw(side->format)) {
            kvc_load_rows(cells, 0, (kvc_dtype)(side->format - KVC_RAW_F32), 1, D, rows);
            continue;
        }
        uint16_t scale = load16(side->meta + 2 * t);
        kvc_decode_codes(side->format, cells, &scale, 1, D, rows);
        if (side->key && kvc_format_get(side->format)->key_dim_meta)
            for (int64_t d = 0; d < D; d++) rows[d] += kvc_f16_to_f32(load16(side->meta + 2 * (side->page_size + d)));
    }
}

/* ---------------------------------------------------------------- dense rows */

void kvc_load_rows(const void *src, int64_t stride, kvc_dtype dtype, int64_t n, int64_t dim, float *rows)
{
    const uint8_t *from = src;
    for (int64_t i = 0; i < n; i++, from += stride * (dtype == KVC_F32 ? 4 : 2), rows += dim) {
        if (dtype == KVC_F32)
            memcpy(rows, from, (size_t)dim * sizeof *rows);
        else if (dtype == KVC_F16)
            for (int64_t d = 0; d < dim; d++) rows[d] = kvc_f16_to_f32(load16(from + 2 * d));
        else
            for (int64_t d = 0; d < dim; d++) rows[d] = kvc_bf16_to_f32(load16(from + 2 * d));
    }
}

bool kvc_row_finite(const void *src, kvc_dtype dtype, int64_t dim)
{
    const uint8_t *from = src;
    int32_t bad = 0; /* an exponent of all ones is NaN or Inf */
    if (dtype == KVC_F32)
        for (int64_t d = 0; d < dim; d++) bad |= (int32_t)(load32(from + 4 * d) & 0x7f800000) == 0x7f800000;
    else {
        int16_t ones = dtype == KVC_F16 ? 0x7c00 : 0x7f80, bad16 = 0;
        for (int64_t d = 0; d < dim; d++) bad16 |= (int16_t)((load16(from + 2 * d) & ones) == ones);
        bad = bad16;
    }
    return !bad;
}
