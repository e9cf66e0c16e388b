/* transfer.h - pages between a pool and one piece of memory, with a checksum taken on the way. */
#ifndef KVC_TRANSFER_H
#define KVC_TRANSFER_H

#include "kvc.h"

#ifdef KVC_EXPORT
#pragma GCC visibility push(default)
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* A run of an arena; both are multiples of KVC_ALIGN. */
typedef struct kvc_piece {
    int64_t offset, bytes;
} kvc_piece;

/* KVC_E_VALUE unless all pieces lie within the arena and together are `bytes` long. */
kvc_status kvc_pieces_check(const kvc_piece *pieces, int64_t n, int64_t arena_bytes, int64_t bytes);
/* Copies the pieces, one behind the other, to `to`, or back from `from`; returns the checksum of the bytes: two sums of
 * 64-bit words, plain and weighted by place, in two lanes (Fletcher's). It finds damage, not malice. */
uint64_t kvc_gather(const uint8_t *arena, const kvc_piece *pieces, int64_t n, uint8_t *to);
uint64_t kvc_scatter(uint8_t *arena, const kvc_piece *pieces, int64_t n, const uint8_t *from);
/* The same checksum of bytes that stay where they are. */
uint64_t kvc_checksum(const uint8_t *data, int64_t bytes);

#ifdef __cplusplus
}
#endif
#ifdef KVC_EXPORT
#pragma GCC visibility pop
#endif

#endif
