/* alloc.h - the one allocator of the core; tests can make the n-th call fail. */
#ifndef KVC_ALLOC_H
#define KVC_ALLOC_H

#include "status.h"

/* `count * size` bytes aligned to KVC_ALIGN, not cleared. KVC_E_MEMORY on overflow or failure; *out is then NULL. */
kvc_status kvc_alloc(int64_t count, int64_t size, void *out);
void kvc_free(void *block);
/* True when the failing allocator says that this allocation must fail (also asked by the pool for slabs). */
bool kvc_alloc_must_fail(void);

#endif
