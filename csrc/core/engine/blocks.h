/* blocks.h - private to engine/: checks blocks that the caller owns and converts them to entries. */
#ifndef KVC_BLOCKS_H
#define KVC_BLOCKS_H

#include "attend/attend.h"
#include "varlen.h"

/* Checks heads, dims and page size, and formats, sizes and alignment of `blocks` (`what` in messages). */
kvc_status kvc_geometry_check(int64_t heads, int64_t key_dim, int64_t value_dim, int64_t page_size, const char *op);
kvc_status kvc_blocks_check(const kvc_blocks *blocks, int64_t page_bytes, const char *op, const char *what);
/* Bytes of a page of all heads. */
int64_t kvc_all_heads_bytes(int key, int value, int64_t heads, int64_t key_dim, int64_t value_dim, int64_t page_size);
/* True if single tokens can be written to a page of these formats. */
static inline bool kvc_in_place(int key, int value) { return kvc_format_bits(key) >= 8 && kvc_format_bits(value) >= 8; }
static inline const uint8_t *kvc_blocks_end(const kvc_blocks *b)
{
    return b->blocks ? b->data + (b->blocks - 1) * b->stride + b->bytes : b->data;
}

#endif
