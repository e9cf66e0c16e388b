/* alloc.h - the only allocator of the core. Tests can make any call fail. */
#ifndef KVC_ALLOC_H
#define KVC_ALLOC_H

#include "status.h"

#if __GNUC__ >= 10 && !defined(__clang__) /* -fanalyzer does not track a pointer stored through memcpy */
#pragma GCC diagnostic ignored "-Wanalyzer-null-dereference"
#pragma GCC diagnostic ignored "-Wanalyzer-null-argument"
#endif

/* `count * size` bytes aligned to KVC_ALIGN, not cleared. KVC_E_MEMORY on overflow or failure; *out is then NULL. */
kvc_status kvc_alloc(int64_t count, int64_t size, void *out);
void kvc_free(void *block);
/* Makes room for element `n` of the array at `*array` (NULL: none yet), which holds `capacity` elements of `size`
 * bytes, by doubling; new elements are zeroed. The array stays valid on failure. */
kvc_status kvc_grow(void *array, int64_t n, int64_t *capacity, int64_t size);
/* The same for workspace. Blocks that a thread frees are cached for its next call, up to KVC_SCRATCH_BLOCKS blocks of
 * up to KVC_SCRATCH_BYTES each, so that a decode step makes no allocations and its workspace causes no page faults.
 * Must be freed by the thread that allocated it. */
#define KVC_SCRATCH_BLOCKS 8
#define KVC_SCRATCH_BYTES ((int64_t)8 << 20)
kvc_status kvc_scratch(int64_t count, int64_t size, void *out);
void kvc_scratch_free(void *block);
/* Fills a new block with NaN if tests have asked for it (kvc_alloc_poison). */
void kvc_alloc_fresh(void *block, int64_t bytes);
/* Whether the current allocation must fail; the pool asks this for slabs, too. */
bool kvc_alloc_must_fail(void);

#endif
