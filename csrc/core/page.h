/* page.h - the layout of a page, the only place that knows it. Also included by CUDA.
 *
 * A page holds `page_size` tokens of one KV head:
 *
 *     | K tiles | V tiles | K meta | V meta |          every section starts on 64 bytes
 *
 * A tile is 16 tokens, an array of 32-bit words (little endian):
 *     K: word[j][t]  t = token.  32 bits: dim j.  16: dims 2j, 2j+1.  8: dims 4j..4j+3.
 *                    4 bits: byte i, plane p (nibble) = dim p*(D/2) + 4j + i.
 *     V: word[s][d]  d = dim.    32 bits: token s. 16: tokens 2s, 2s+1. 8: tokens 4s..4s+3.
 *                    4 bits: byte i, plane p = token p*8 + 4s + i of the tile.
 * K meta: fp16 scale[page_size], then fp16 centroid[D] where the format has one.  V meta: fp16 scale[page_size].
 */
#ifndef KVC_PAGE_H
#define KVC_PAGE_H

#include <stdint.h>

#ifdef __CUDACC__
#define KVC_INLINE static __host__ __device__ inline
#else
#define KVC_INLINE static inline
#endif

#define KVC_TILE 16   /* tokens of a tile */
#define KVC_ALIGN 64  /* bytes; sections, pages and offsets are multiples of it */
#define KVC_NONE (-1) /* table entry that names no page */
#define KVC_MAX_DIM 256
#define KVC_MAX_PAGE 256 /* tokens */

enum kvc_format {
#define KVC_FORMAT(ID, name, bits, token_meta, key_dim_meta, rotated, dim_multiple, about) KVC_##ID,
#include "formats.def"
#undef KVC_FORMAT
    KVC_FORMATS
};

/* Bits per element of format `f`; 0 for a code that is no format. */
KVC_INLINE int kvc_format_bits(int f)
{
    switch (f) {
#define KVC_FORMAT(ID, name, bits, token_meta, key_dim_meta, rotated, dim_multiple, about)                             \
    case KVC_##ID: return bits;
#include "formats.def"
#undef KVC_FORMAT
    default: return 0;
    }
}

/* Bytes of K-side (key = 1) or V-side metadata of a page. */
KVC_INLINE int64_t kvc_meta_bytes(int f, int key, int64_t dim, int64_t page_size)
{
    switch (f) {
#define KVC_FORMAT(ID, name, bits, token_meta, key_dim_meta, rotated, dim_multiple, about)                             \
    case KVC_##ID: return (token_meta) * page_size + (key ? (key_dim_meta) * dim : 0);
#include "formats.def"
#undef KVC_FORMAT
    default: return 0;
    }
}

KVC_INLINE int kvc_format_rotated(int f)
{
    switch (f) {
#define KVC_FORMAT(ID, name, bits, token_meta, key_dim_meta, rotated, dim_multiple, about)                             \
    case KVC_##ID: return rotated;
#include "formats.def"
#undef KVC_FORMAT
    default: return 0;
    }
}

KVC_INLINE int kvc_format_is_raw(int f) { return f <= KVC_RAW_BF16; }

KVC_INLINE int64_t kvc_align(int64_t bytes) { return (bytes + KVC_ALIGN - 1) / KVC_ALIGN * KVC_ALIGN; }

/* Bytes of one tile of one side. */
KVC_INLINE int64_t kvc_tile_bytes(int f, int64_t dim) { return KVC_TILE * dim * kvc_format_bits(f) / 8; }

/* Byte offsets of a page's sections, and its size. */
typedef struct kvc_layout {
    int64_t k, v, k_meta, v_meta, bytes;
} kvc_layout;

KVC_INLINE kvc_layout kvc_page_layout(int key, int value, int64_t key_dim, int64_t value_dim, int64_t page_size)
{
    kvc_layout l;
    int64_t tiles = page_size / KVC_TILE;
    l.k = 0;
    l.v = kvc_align(tiles * kvc_tile_bytes(key, key_dim));
    l.k_meta = l.v + kvc_align(tiles * kvc_tile_bytes(value, value_dim));
    l.v_meta = l.k_meta + kvc_align(kvc_meta_bytes(key, 1, key_dim, page_size));
    l.bytes = l.v_meta + kvc_align(kvc_meta_bytes(value, 0, value_dim, page_size));
    return l;
}

/* A table entry names a page and its formats: offset in units of 64 bytes, K format, V format. */
KVC_INLINE int64_t kvc_entry(int64_t offset, int key, int value)
{
    return ((offset / KVC_ALIGN) << 16) | ((int64_t)key << 8) | (int64_t)value;
}
KVC_INLINE int64_t kvc_entry_offset(int64_t entry) { return (entry >> 16) * KVC_ALIGN; }
KVC_INLINE int kvc_entry_key(int64_t entry) { return (int)((entry >> 8) & 255); }
KVC_INLINE int kvc_entry_value(int64_t entry) { return (int)(entry & 255); }

/* Where token index `i` of a sequence lies. Column 0 of a table is the sink page (a raw page of
 * kvc_sink_tokens(sinks) tokens that holds the first `sinks` tokens); pages follow from column 1. */
KVC_INLINE int64_t kvc_sink_tokens(int64_t sinks) { return (sinks + KVC_TILE - 1) / KVC_TILE * KVC_TILE; }
KVC_INLINE int64_t kvc_column(int64_t i, int64_t sinks, int64_t page_size)
{
    return i < sinks ? 0 : 1 + (i - sinks) / page_size;
}
/* First token index of column `c`, and how many tokens it can hold. */
KVC_INLINE int64_t kvc_column_first(int64_t c, int64_t sinks, int64_t page_size)
{
    return c == 0 ? 0 : sinks + (c - 1) * page_size;
}
KVC_INLINE int64_t kvc_column_size(int64_t c, int64_t sinks, int64_t page_size) { return c == 0 ? sinks : page_size; }
/* Tokens that the page of column `c` was laid out for. */
KVC_INLINE int64_t kvc_column_layout(int64_t c, int64_t sinks, int64_t page_size)
{
    return c == 0 ? kvc_sink_tokens(sinks) : page_size;
}

#endif
