/* codec.c - encodes rows to pages and decodes them. The arithmetic is in kernels/; cells.c places the bytes. */
#include "cells.h"
#include "codec.h"
#include "base/floats.h"

#include <string.h>

static uint16_t load16(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return h;
}

kvc_side kvc_page_side(const uint8_t *page, int key_side, int key, int value, int64_t key_dim, int64_t value_dim,
                       int64_t page_size)
{
    kvc_layout l = kvc_page_layout(key, value, key_dim, value_dim, page_size);
    return key_side ? (kvc_side){key, 1, key_dim, page_size, page + l.k, page + l.k_meta}
                    : (kvc_side){value, 0, value_dim, page_size, page + l.v, page + l.v_meta};
}

kvc_room kvc_page_room(uint8_t *page, int key_side, int key, int value, int64_t key_dim, int64_t value_dim,
                       int64_t page_size)
{
    kvc_layout l = kvc_page_layout(key, value, key_dim, value_dim, page_size);
    return key_side ? (kvc_room){key, 1, key_dim, page_size, page + l.k, page + l.k_meta, false, NULL}
                    : (kvc_room){value, 0, value_dim, page_size, page + l.v, page + l.v_meta, false, NULL};
}

void kvc_store_codes(const kvc_room *side, int64_t t0, int64_t n, const uint8_t *codes, int64_t stride,
                     const uint8_t *meta)
{
    kvc_traits f = kvc_format_traits(side->format);
    int64_t planes = kvc_meta_planes(f, side->dim), size = kvc_meta_size(f);
    if (planes == 1)
        memcpy(side->meta + size * t0, meta, (size_t)(size * n));
    else
        for (int64_t i = 0; i < n; i++)
            for (int64_t p = 0; p < planes; p++)
                memcpy(side->meta + size * (p * side->page_size + t0 + i), meta + size * (i * planes + p),
                       (size_t)size);
    kvc_put_cells(side, t0, n, codes, stride);
}

/* Encodes n rows as tokens [t0, t0 + n); scratch holds their codes and metadata. */
static void encode_rows(const kvc_room *side, int64_t t0, int64_t n, float *rows, float *scratch)
{
    uint8_t *codes = (uint8_t *)scratch, *meta = codes + n * side->dim;
    kvc_kernels_get()->encode(side->format, rows, n, side->dim, side->feedback, codes, meta);
    kvc_store_codes(side, t0, n, codes, side->dim, meta);
}

static uint16_t saturated_f16(float x) { return kvc_f32_to_f16(kvc_clamp(x, -65504, 65504)); }

/* Subtracts the mean of the page's rows, rounded as it is stored. */
static void centre(const kvc_room *side, float *restrict rows, float *restrict mean)
{
    int64_t D = side->dim;
    uint8_t *at = side->meta + kvc_token_meta_bytes(kvc_format_traits(side->format), 1, D, side->page_size);
    memset(mean, 0, (size_t)D * sizeof *mean);
    for (int64_t t = 0; t < side->page_size; t++)
        for (int64_t d = 0; d < D; d++) mean[d] += rows[t * D + d];
    for (int64_t d = 0; d < D; d++) {
        uint16_t stored = saturated_f16(mean[d] / (float)side->page_size);
        memcpy(at + 2 * d, &stored, sizeof stored);
        mean[d] = kvc_f16_to_f32(stored);
    }
    for (int64_t t = 0; t < side->page_size; t++)
        for (int64_t d = 0; d < D; d++) rows[t * D + d] -= mean[d];
}

/* K with a scale and zero point per channel of the page: [D] scales, then [D] zero points (minima). */
static void encode_channels(const kvc_room *side, const float *restrict rows, float *restrict scratch)
{
    int64_t D = side->dim, P = side->page_size;
    uint8_t *codes = (uint8_t *)scratch;
    float low[KVC_MAX_DIM], inverse[KVC_MAX_DIM], top = (float)((1 << kvc_format_bits(side->format)) - 1);
    memcpy(low, rows, (size_t)D * sizeof *low);
    memcpy(inverse, rows, (size_t)D * sizeof *low); /* holds the maxima first */
    for (int64_t t = 1; t < P; t++)
        for (int64_t d = 0; d < D; d++) {
            float x = rows[t * D + d];
            low[d] = x < low[d] ? x : low[d];
            inverse[d] = x > inverse[d] ? x : inverse[d];
        }
    for (int64_t d = 0; d < D; d++) {
        uint16_t zero = saturated_f16(low[d]);
        float span = inverse[d] - (low[d] = kvc_f16_to_f32(zero));
        uint16_t scale = span > 0 ? kvc_scale_to_f16(span / top) : 0;
        memcpy(side->meta + 2 * d, &scale, sizeof scale);
        memcpy(side->meta + 2 * (D + d), &zero, sizeof zero);
        inverse[d] = span > 0 ? 1 / kvc_f16_to_f32(scale) : 0;
    }
    for (int64_t t = 0; t < P; t++)
        for (int64_t d = 0; d < D; d++) {
            float y = kvc_clamp((rows[t * D + d] - low[d]) * inverse[d], 0, top);
            codes[t * D + d] = (uint8_t)(int)((y + 0x1p23f) - 0x1p23f); /* round to nearest, ties to even */
        }
    kvc_put_cells(side, 0, P, codes, D);
}

int64_t kvc_codec_scratch(int64_t dim, int64_t page_size)
{
    int64_t codes = page_size * (dim + 4 * (dim / 32 + 1)) / 4; /* codes and metadata of a page */
    return codes + KVC_TILE * dim + KVC_ALIGN / 4;              /* or the centroid, or a tile of rows */
}

void kvc_encode(const kvc_room *side, float *rows, float *scratch)
{
    int keys = side->key ? kvc_format_traits(side->format).keys : KVC_KEYS_TOKEN;
    uint32_t guard = kvc_fp_begin();
    if (keys == KVC_KEYS_CENTRED) centre(side, rows, scratch);
    if (keys == KVC_KEYS_CHANNEL)
        encode_channels(side, rows, scratch);
    else
        encode_rows(side, 0, side->page_size, rows, scratch);
    kvc_fp_end(guard);
}

void kvc_store_rows(const kvc_room *side, int64_t t0, int64_t n, const void *src, int64_t stride, kvc_dtype dtype,
                    float *scratch)
{
    int64_t step = stride * (dtype == KVC_F32 ? 4 : 2);
    if (kvc_format_is_raw(side->format)) {
        kvc_put_cells(side, t0, n, src, step);
        return;
    }
    for (int64_t done = 0; done < n;) { /* one tile at a time */
        int64_t left = KVC_TILE - (t0 + done) % KVC_TILE, run = left < n - done ? left : n - done;
        kvc_load_rows((const uint8_t *)src + done * step, stride, dtype, run, side->dim, scratch);
        encode_rows(side, t0 + done, run, scratch, scratch + KVC_TILE * side->dim);
        done += run;
    }
}

void kvc_copy_token(const kvc_side *from, int64_t t, const kvc_room *to, int64_t t2)
{
    _Alignas(KVC_ALIGN) uint8_t cells[4 * KVC_MAX_DIM];
    kvc_traits f = kvc_format_traits(from->format);
    int64_t size = kvc_meta_size(f), P = from->page_size;
    const uint8_t *tile = from->tiles + t / KVC_TILE * kvc_tile_bytes(from->format, from->dim);
    kvc_get_cells(from, tile, t % KVC_TILE, cells);
    kvc_put_cells(to, t2, 1, cells, 0);
    for (int64_t p = 0; p < kvc_meta_planes(f, from->dim); p++)
        memcpy(to->meta + size * (p * P + t2), from->meta + size * (p * P + t), (size_t)size);
}

float kvc_level_of(int coding, int bits, uint8_t code)
{
    static const float e2m1[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
    switch (coding) {
    case KVC_CODING_INT: return (float)(code - (1 << (bits - 1)));
    case KVC_CODING_MID:
    case KVC_CODING_SPREAD: return (float)code - (float)((1 << bits) - 1) / 2;
    case KVC_CODING_LLOYD: return (float)kvc_lloyd_level(bits, code);
    case KVC_CODING_E4M3: return kvc_e4m3_to_f32(code);
    case KVC_CODING_E5M2: return kvc_e5m2_to_f32(code);
    case KVC_CODING_E2M1: return code & 8 ? -e2m1[code & 7] : e2m1[code & 7];
    default: return code;
    }
}

void kvc_decode_codes(int format, const uint8_t *codes, const uint8_t *meta, int64_t n, int64_t dim, float *rows)
{
    kvc_traits f = kvc_format_traits(format);
    int64_t group = f.group ? f.group : dim, size = kvc_meta_size(f), each = f.coding == KVC_CODING_UINT ? 2 : 1;
    float levels[256];
    for (int c = 0; c < 1 << f.bits; c++) levels[c] = kvc_level_of(f.coding, f.bits, (uint8_t)c);
    for (int64_t i = 0; i < n; i++, rows += dim) {
        for (int64_t d0 = 0; d0 < dim; d0 += group, codes += group, meta += each * size) {
            float scale = kvc_scale_value(f.scale, meta), zero = each == 2 ? kvc_scale_value(f.scale, meta + size) : 0;
            if (each == 2)
                for (int64_t d = 0; d < group; d++) rows[d0 + d] = levels[codes[d]] * scale + zero;
            else
                for (int64_t d = 0; d < group; d++) rows[d0 + d] = levels[codes[d]] * scale;
        }
        if (f.rotated == KVC_DIGITS)
            kvc_join(rows, dim);
        else if (f.rotated)
            kvc_kernels_get()->rotate(rows, 1, dim);
    }
}

void kvc_decode(const kvc_side *side, int64_t t0, int64_t n, float *rows)
{
    _Alignas(KVC_ALIGN) uint8_t cells[4 * KVC_MAX_DIM], meta[KVC_MAX_DIM];
    kvc_traits f = kvc_format_traits(side->format);
    int64_t D = side->dim, planes = kvc_meta_planes(f, D), size = kvc_meta_size(f);
    const uint8_t *by_dim = side->meta + kvc_token_meta_bytes(f, side->key, D, side->page_size);
    for (int64_t t = t0; t < t0 + n; t++, rows += D) {
        const uint8_t *tile = side->tiles + t / KVC_TILE * kvc_tile_bytes(side->format, D);
        kvc_get_cells(side, tile, t % KVC_TILE, cells);
        if (f.coding == KVC_CODING_RAW) {
            kvc_load_rows(cells, 0, (kvc_dtype)(side->format - KVC_RAW_F32), 1, D, rows);
            continue;
        }
        if (side->key && f.keys == KVC_KEYS_CHANNEL) {
            for (int64_t d = 0; d < D; d++)
                rows[d] = (float)cells[d] * kvc_scale_value(f.scale, by_dim + 2 * d) +
                          kvc_scale_value(f.scale, by_dim + 2 * (D + d));
            continue;
        }
        for (int64_t p = 0; p < planes; p++)
            memcpy(meta + size * p, side->meta + size * (p * side->page_size + t), (size_t)size);
        kvc_decode_codes(side->format, cells, meta, 1, D, rows);
        if (side->key && f.keys == KVC_KEYS_CENTRED)
            for (int64_t d = 0; d < D; d++) rows[d] += kvc_scale_value(f.scale, by_dim + 2 * d);
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
    int32_t bad = 0; /* an all-ones exponent is NaN or Inf */
    if (dtype == KVC_F32)
        for (int64_t d = 0; d < dim; d++) {
            uint32_t w;
            memcpy(&w, from + 4 * d, sizeof w);
            bad |= (w & 0x7f800000) == 0x7f800000;
        }
    else {
        int16_t ones = dtype == KVC_F16 ? 0x7c00 : 0x7f80, bad16 = 0;
        for (int64_t d = 0; d < dim; d++) bad16 |= (int16_t)((load16(from + 2 * d) & ones) == ones);
        bad = bad16;
    }
    return !bad;
}
