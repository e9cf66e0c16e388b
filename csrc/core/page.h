/* page.h - the layout of a page. Also included by CUDA code.
 *
 * A page holds `page_size` tokens of one KV head:
 *
 *     | K tiles | V tiles | K meta | V meta |          every section is aligned to 64 bytes
 *
 * A tile is 16 tokens, an array of 32-bit words (little endian):
 *     K: word[j][t]  t = token.  32 bits: dim j.  16: dims 2j, 2j+1.  8: dims 4j..4j+3.
 *                    b < 8 bits: byte i, plane p (of 8/b) = dim p*(D*b/8) + 4j + i.
 *     V: word[s][d]  d = dim.    32 bits: token s. 16: tokens 2s, 2s+1. 8: tokens 4s..4s+3.
 *                    b < 8 bits: byte i, plane p = token p*(16*b/8) + 4s + i of the tile.
 *     3 bits: a tile of the low 2 bits of the codes, 4*D bytes; then 2*D bytes, where byte x has, at bits 2p and 2p + 1, the
 *     high bits of the codes in plane p of bytes x and 2*D + x. (For K, this is a tile of 1 bit.)
 * Metadata consists of planes of page_size elements (fp16: 2 bytes; block scales: 1 byte): for each group of dims its
 * scale (never negative), then its zero point, if any; element t belongs to token t. K meta continues with fp16
 * centroid[D] (CENTRED), or consists of fp16 scale[D], zero point[D] only (CHANNEL).
 */
#ifndef KVC_PAGE_H
#define KVC_PAGE_H

#include <stdint.h>

#ifdef __CUDACC__
#define KVC_INLINE static __host__ __device__ inline
#else
#define KVC_INLINE static inline
#endif

#define KVC_TILE 16      /* tokens per tile */
#define KVC_ALIGN 64     /* bytes; alignment of sections, pages and offsets */
#define KVC_NONE (-1)    /* table entry without a page */
#define KVC_MAX_DIM 576  /* largest head dim */
#define KVC_CUDA_DIM 256 /* largest head dim for tensor cores on a GPU */
#define KVC_MAX_PAGE 256 /* tokens */

enum kvc_format {
#define KVC_FORMAT(ID, name, bits, coding, scale, group, keys, rotated, dim_multiple, about) KVC_##ID,
#include "formats.def"
#undef KVC_FORMAT
    KVC_FORMATS
};

/* A code's level; its value is level * scale (+ zero point). RAW: the element itself. INT: code - 2^(bits-1).
 * MID, SPREAD: code - (2^bits - 1) / 2. UINT: code. LLOYD: kvc_lloyd_level. The rest: the bits of a small float; e4m3's NaN is
 * never stored. */
enum kvc_coding {
    KVC_CODING_RAW,
    KVC_CODING_INT,
    KVC_CODING_MID,
    KVC_CODING_UINT,
    KVC_CODING_E4M3,
    KVC_CODING_E5M2,
    KVC_CODING_E2M1,
    KVC_CODING_LLOYD,
    KVC_CODING_SPREAD
};
enum kvc_scale { KVC_SCALE_F16, KVC_SCALE_E4M3, KVC_SCALE_E8M0 };
enum kvc_keys { KVC_KEYS_TOKEN, KVC_KEYS_CENTRED, KVC_KEYS_CHANNEL };

typedef struct kvc_traits {
    int bits, coding, scale, group, keys, rotated;
} kvc_traits;

/* A row of the table; bits is 0 for an unknown code. */
KVC_INLINE kvc_traits kvc_format_traits(int f)
{
    switch (f) {
#define KVC_FORMAT(ID, name, bits, coding, scale, group, keys, rotated, dim_multiple, about)                           \
    case KVC_##ID: return (kvc_traits){bits, KVC_CODING_##coding, KVC_SCALE_##scale, group, KVC_KEYS_##keys, rotated};
#include "formats.def"
#undef KVC_FORMAT
    default: return (kvc_traits){0, 0, 0, 0, 0, 0};
    }
}

/* Bits per element of format `f`; 0 for an unknown code. */
KVC_INLINE int kvc_format_bits(int f) { return kvc_format_traits(f).bits; }
KVC_INLINE int kvc_format_rotated(int f) { return kvc_format_traits(f).rotated; }
/* The space of a page's rows (`rotated` of its format): original, after the Walsh-Hadamard transform, or digits. */
enum kvc_row_space { KVC_PLAIN, KVC_ROTATED, KVC_DIGITS, KVC_SPACES };

/* True if attention multiplies codes as integers, with q in limbs (see kvc_query_form), instead of as floats. */
KVC_INLINE int kvc_format_is_integer(int f)
{
    int coding = kvc_format_traits(f).coding;
    return coding != KVC_CODING_RAW && coding != KVC_CODING_E4M3 && coding != KVC_CODING_E5M2;
}

/* Lloyd-Max levels for a Gaussian, scaled to a maximum of 127, so that products are those of int8. */
KVC_INLINE int kvc_lloyd_level(int bits, int code)
{
    uint64_t levels = bits == 4 ? 0x7f604b3a2c1f1206 : 0x7f4f2d0e;
    int half = 1 << (bits - 1), k = code < half ? half - 1 - code : code - half;
    int level = (int)(levels >> 8 * k & 127);
    return code < half ? -level : level;
}
/* The code of the nearest level. */
KVC_INLINE int kvc_lloyd_code(int bits, float x)
{
    int half = 1 << (bits - 1), k = 0;
    float a = x < 0 ? -x : x;
    for (int c = half; c < 2 * half - 1; c++)
        k += a > .5f * (float)(kvc_lloyd_level(bits, c) + kvc_lloyd_level(bits, c + 1));
    return x < 0 ? half - 1 - k : half + k;
}
/* The initial step of a rotated row's codes, relative to the row's RMS; optimal for rows of 64 to 128 elements. */
KVC_INLINE float kvc_rotated_step(int coding, int bits)
{
    if (coding == KVC_CODING_LLOYD) return bits == 4 ? 1 / 47.f : 1 / 60.f;
    return bits == 4 ? 0.33f : bits == 3 ? 0.58f : 1.f;
}
/* int4 and int2 use one step and the least-squares gain, which shrinks rows. Later formats try three steps, kvc_step_factor
 * times the first, and use the one whose levels are most parallel to the row. */
KVC_INLINE int kvc_rotated_steps(int coding, int bits) { return coding == KVC_CODING_LLOYD || bits == 3 ? 3 : 1; }
KVC_INLINE float kvc_step_factor(int i) { return i == 0 ? 1.f : i == 1 ? 0.875f : 1.125f; }
/* Their gain, |row|^2 / <row, levels>, preserves the projection onto the row, so that products are unbiased. It is limited to
 * 1.125 times the least-squares gain, for rows that are hardly parallel to their levels. */
KVC_INLINE float kvc_rotated_gain(int steps, float row_row, float row_levels, float levels_levels)
{
    float fitted = row_levels / levels_levels, whole = row_row / row_levels;
    return steps == 1 ? fitted : whole < 1.125f * fitted ? whole : 1.125f * fitted;
}

/* Rows with dims in order of importance, as digits of 2 bits: code - 7.5 = 4 * (high - 1.5) + (low - 1.5). The first quarter
 * of the dims has 4-bit codes in steps of KVC_FINE: the high digit is stored at the dim, the low digit at a dim of the last
 * quarter, which has no code of its own; the other half has one digit per dim, in steps of 1. kvc_spread converts a row of q
 * for products with digits; kvc_join, its transpose, converts a row of digits (or sums of them) back, in place. */
#define KVC_FINE 0.328125f /* 21 / 64: near the best step of 16 levels for a Gaussian, and exact in products */
KVC_INLINE void kvc_spread(float *q, int64_t dim)
{
    for (int64_t d = 0; d < dim / 4; d++) {
        q[dim - dim / 4 + d] = KVC_FINE * q[d];
        q[d] *= 4 * KVC_FINE;
    }
}
KVC_INLINE void kvc_join(float *x, int64_t dim)
{
    for (int64_t d = 0; d < dim / 4; d++) {
        float *low = x + dim - dim / 4 + d;
        x[d] = 4 * KVC_FINE * x[d] + KVC_FINE * *low;
        *low = 0;
    }
}

/* Number of metadata elements per token, and bytes per element. */
KVC_INLINE int64_t kvc_meta_planes(kvc_traits f, int64_t dim)
{
    int64_t groups = f.group ? dim / f.group : 1;
    return f.coding == KVC_CODING_RAW ? 0 : f.coding == KVC_CODING_UINT ? 2 * groups : groups;
}
KVC_INLINE int64_t kvc_meta_size(kvc_traits f) { return f.scale == KVC_SCALE_F16 ? 2 : 1; }

/* Bytes of K (key = 1) or V metadata of a page, without and with metadata per dim. */
KVC_INLINE int64_t kvc_token_meta_bytes(kvc_traits f, int key, int64_t dim, int64_t page_size)
{
    return key && f.keys == KVC_KEYS_CHANNEL ? 0 : kvc_meta_planes(f, dim) * kvc_meta_size(f) * page_size;
}
KVC_INLINE int64_t kvc_meta_bytes(int format, int key, int64_t dim, int64_t page_size)
{
    kvc_traits f = kvc_format_traits(format);
    int64_t per_dim = f.keys == KVC_KEYS_CHANNEL ? 4 : f.keys == KVC_KEYS_CENTRED ? 2 : 0;
    return kvc_token_meta_bytes(f, key, dim, page_size) + (key ? per_dim * dim : 0);
}

KVC_INLINE int kvc_format_is_raw(int f) { return f <= KVC_RAW_BF16; }

KVC_INLINE int64_t kvc_align(int64_t bytes) { return (bytes + KVC_ALIGN - 1) / KVC_ALIGN * KVC_ALIGN; }

/* Bytes of one tile of K or V. */
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

/* A table entry: offset of the page in units of 64 bytes, K format, V format. */
KVC_INLINE int64_t kvc_entry(int64_t offset, int key, int value)
{
    return ((offset / KVC_ALIGN) << 16) | ((int64_t)key << 8) | (int64_t)value;
}
KVC_INLINE int64_t kvc_entry_offset(int64_t entry) { return (entry >> 16) * KVC_ALIGN; }
/* cppcheck-suppress shiftNegativeLHS ; all compilers that we know shift the sign in, and & drops it */
KVC_INLINE int kvc_entry_key(int64_t entry) { return (int)((entry >> 8) & 255); }
KVC_INLINE int kvc_entry_value(int64_t entry) { return (int)(entry & 255); }

/* The column of token index `i`. Column 0 of a table is the sink page (a raw page of kvc_sink_tokens(sinks) tokens with the
 * first `sinks` tokens); pages follow from column 1. */
KVC_INLINE int64_t kvc_sink_tokens(int64_t sinks) { return (sinks + KVC_TILE - 1) / KVC_TILE * KVC_TILE; }
KVC_INLINE int64_t kvc_column(int64_t i, int64_t sinks, int64_t page_size)
{
    return i < sinks ? 0 : 1 + (i - sinks) / page_size;
}
/* First token index of column `c`, and its capacity in tokens. */
KVC_INLINE int64_t kvc_column_first(int64_t c, int64_t sinks, int64_t page_size)
{
    return c == 0 ? 0 : sinks + (c - 1) * page_size;
}
KVC_INLINE int64_t kvc_column_size(int64_t c, int64_t sinks, int64_t page_size) { return c == 0 ? sinks : page_size; }
/* Page size in tokens of column `c`. */
KVC_INLINE int64_t kvc_column_layout(int64_t c, int64_t sinks, int64_t page_size)
{
    return c == 0 ? kvc_sink_tokens(sinks) : page_size;
}

#endif
