/* transfer.h - copies pages between a pool and one block of memory, with a checksum. */
#ifndef KVC_TRANSFER_H
#define KVC_TRANSFER_H

#include "kvc.h"

#ifdef KVC_EXPORT
#pragma GCC visibility push(default)
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* A range of an arena; both are multiples of KVC_ALIGN. */
typedef struct kvc_piece {
    int64_t offset, bytes;
} kvc_piece;

/* KVC_E_VALUE unless all pieces are within the arena and have `bytes` bytes in total. */
kvc_status kvc_pieces_check(const kvc_piece *pieces, int64_t n, int64_t arena_bytes, int64_t bytes);
/* Copies the pieces, concatenated, to `to`, or back from `from`. Returns the checksum of the bytes: two sums of 64-bit
 * words, plain and weighted by position, in two lanes (Fletcher). It detects damage, not manipulation. */
uint64_t kvc_gather(const uint8_t *arena, const kvc_piece *pieces, int64_t n, uint8_t *to);
uint64_t kvc_scatter(uint8_t *arena, const kvc_piece *pieces, int64_t n, const uint8_t *from);
/* The same checksum, without a copy. */
uint64_t kvc_checksum(const uint8_t *data, int64_t bytes);

#ifdef __cplusplus
}
#endif
#ifdef KVC_EXPORT
#pragma GCC visibility pop
#endif

#endif
