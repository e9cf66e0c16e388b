/* codec.h - conversion between dense rows and pages, one side (K or V) of one page at a time. */
#ifndef KVC_CODEC_H
#define KVC_CODEC_H

#include "base/dispatch.h"
#include "base/floats.h"
#include "base/status.h"

#include <string.h>

/* One side of one page, read-only: addresses of its tiles and metadata. */
typedef struct kvc_side {
    int format, key; /* key = 1: K side */
    int64_t dim, page_size;
    const uint8_t *tiles, *meta;
} kvc_side;

/* The same, writable. */
typedef struct kvc_room {
    int format, key;
    int64_t dim, page_size;
    uint8_t *tiles, *meta;
    bool stream;           /* non-temporal stores, for output larger than the caches. A fence must follow */
    const float *feedback; /* one head of kvc_attend_feedback; NULL: round to nearest */
} kvc_room;

/* The side of the page at `page`. */
kvc_side kvc_page_side(const uint8_t *page, int key_side, int key, int value, int64_t key_dim, int64_t value_dim,
                       int64_t page_size);
kvc_room kvc_page_room(uint8_t *page, int key_side, int key, int value, int64_t key_dim, int64_t value_dim,
                       int64_t page_size);

/* Input of an encoder: one side of a raw page, or (raw = NULL) one pointer per row of `dtype`. */
typedef struct kvc_source {
    const kvc_side *raw;
    const uint8_t *const *row; /* [page_size] */
    kvc_dtype dtype;
} kvc_source;

/* Encodes a whole page in a quantized format. scratch: kvc_page_scratch floats. */
void kvc_encode_page(const kvc_room *side, const kvc_source *from, float *scratch);
/* Decodes tokens [0, n) to rows of `dtype` at to[0 .. n); NULL rows are skipped. scratch: a tile of rows. Values are
 * clamped to the range of the dtype. stream: non-temporal stores, for output larger than the caches; a fence must
 * follow. */
void kvc_decode_page(const kvc_side *side, int64_t n, kvc_dtype dtype, uint8_t *const *to, bool stream, float *scratch);
int64_t kvc_page_scratch(int64_t dim, int64_t page_size);

/* Floats of scratch that kvc_encode and kvc_store need. */
int64_t kvc_codec_scratch(int64_t dim, int64_t page_size);

/* Encodes a whole page (page_size rows of `rows`, [page_size][dim] fp32, overwritten) in a quantized format. */
void kvc_encode(const kvc_room *side, float *rows, float *scratch);
/* Writes n rows from token t0 on. Raw formats: bits are copied (src has the format's dtype). Quantized formats without
 * statistics over tokens: each row by itself. Row i is at src + i * stride elements. */
void kvc_store_rows(const kvc_room *side, int64_t t0, int64_t n, const void *src, int64_t stride, kvc_dtype dtype,
                    float *scratch);
/* Writes n encoded rows: codes, one per byte, `stride` bytes apart, and the metadata of each row, contiguous. */
void kvc_store_codes(const kvc_room *side, int64_t t0, int64_t n, const uint8_t *codes, int64_t stride,
                     const uint8_t *meta);
/* Copies the codes and metadata of token t to token t2 of another side of the same format, which has no statistics over
 * tokens. */
void kvc_copy_token(const kvc_side *from, int64_t t, const kvc_room *to, int64_t t2);
/* The level of a code (enum kvc_coding), before scale and zero point. */
float kvc_level_of(int coding, int bits, uint8_t code);
/* Decodes codes of a quantized format, one per byte ([n][dim]), with each row's metadata ([n][kvc_meta_planes]) to rows
 * [n][dim], without the centroid. */
void kvc_decode_codes(int format, const uint8_t *codes, const uint8_t *meta, int64_t n, int64_t dim, float *rows);
/* Converts a stored scale or zero point (enum kvc_scale). */
static inline float kvc_scale_value(int scale, const uint8_t *at)
{
    uint16_t h;
    if (scale == KVC_SCALE_E4M3) return kvc_e4m3_to_f32(*at);
    if (scale == KVC_SCALE_E8M0) return kvc_f32_of_bits(*at ? (uint32_t)*at << 23 : 1u << 22);
    memcpy(&h, at, sizeof h);
    return kvc_f16_to_f32(h);
}
/* Decodes tokens [t0, t0 + n) to rows [n][dim] fp32. */
void kvc_decode(const kvc_side *side, int64_t t0, int64_t n, float *rows);

/* Converts n rows of `dtype` to contiguous fp32. */
void kvc_load_rows(const void *src, int64_t stride, kvc_dtype dtype, int64_t n, int64_t dim, float *rows);
/* True if n contiguous elements are finite. kvc_all_finite uses the kernel of the level. */
bool kvc_all_finite(const void *src, kvc_dtype dtype, int64_t n);
bool kvc_row_finite(const void *src, kvc_dtype dtype, int64_t dim);

#endif
