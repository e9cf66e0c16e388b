/* alloc.h - the only allocator of the core. Tests can make the n-th call fail. */
#ifndef KVC_ALLOC_H
#define KVC_ALLOC_H

#include "status.h"

#if __GNUC__ >= 10 && !defined(__clang__) /* -fanalyzer does not follow a pointer that is given through memcpy */
#pragma GCC diagnostic ignored "-Wanalyzer-null-dereference"
#pragma GCC diagnostic ignored "-Wanalyzer-null-argument"
#endif

/* `count * size` bytes aligned to KVC_ALIGN, not cleared. KVC_E_MEMORY on overflow or failure; *out is then NULL. */
kvc_status kvc_alloc(int64_t count, int64_t size, void *out);
void kvc_free(void *block);
/* Room for element `n` of the array at `*array` (NULL: none yet), which holds `capacity` of `size` bytes: twice as many, new
 * ones cleared. The array stays valid on failure. */
kvc_status kvc_grow(void *array, int64_t n, int64_t *capacity, int64_t size);
/* The same for workspace: blocks that a thread gives back are kept for its next call, up to KVC_SCRATCH_BLOCKS of them and
 * KVC_SCRATCH_BYTES each, so that a decode step allocates nothing and its workspace has no page faults. Given back in the
 * thread that took it. */
#define KVC_SCRATCH_BLOCKS 8
#define KVC_SCRATCH_BYTES ((int64_t)8 << 20)
kvc_status kvc_scratch(int64_t count, int64_t size, void *out);
void kvc_scratch_free(void *block);
/* What is new in tests (kvc_alloc_poison): NaN. */
void kvc_alloc_fresh(void *block, int64_t bytes);
/* True when the failing allocator says that this allocation must fail (also asked by the pool for slabs). */
bool kvc_alloc_must_fail(void);

#endif
