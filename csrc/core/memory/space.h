/* space.h - one reservation of address space, shared by pools that are created without a size. */
#ifndef KVC_SPACE_H
#define KVC_SPACE_H

#include "base/status.h"

#include <stdatomic.h>

#define SPACE_UNIT ((int64_t)16 << 10)

typedef _Atomic int32_t kvc_unit; /* index of the slab that covers a unit, in the pool that owns it; or LIST_END */

enum { LIST_END = -1 };

typedef struct kvc_space {
    uint8_t *base;
    int64_t bytes;
    kvc_unit *unit_slab; /* [units] below the extent only; written by the pool that owns the unit */
} kvc_space;

/* The space of the process, reserved at the first call. KVC_E_MEMORY: out of address space. */
kvc_status kvc_space_get(const kvc_space **space);
/* 2^order units in a row, usable, at a multiple of their number. first: -1 if so many are not left. KVC_E_MEMORY: the
 * system refuses memory. */
kvc_status kvc_space_take(int order, int64_t *first);
void kvc_space_give(int64_t first, int order);

#endif
