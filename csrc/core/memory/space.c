/* space.c - address space shared by all small pools: one mapping, managed by a buddy allocator in blocks of 2^n units.
 *
 * A reservation per pool would be limited by the address space of the process and by its number of mappings (65,530 on
 * Linux). Units become accessible from the start of the mapping on. */
#include "memory/space.h"

#include "base/alloc.h"
#include "base/system.h"

#include <pthread.h>

/* in units. STEP: at least 1 MiB becomes accessible at once; HUGE: a huge page */
enum { ORDERS = 31, STEP = 6, HUGE = 7 };
#define MIN_SPACE ((int64_t)64 << 20)

typedef struct block {
    int32_t next, previous;
    int32_t order; /* order of the free block that starts here, or LIST_END */
} block;

static struct {
    kvc_space space;
    block *blocks;         /* [units] up to the extent */
    int64_t units, extent; /* extent: number of accessible units */
    int32_t free[ORDERS];
} all;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Reserves twice the machine's memory, because blocks of 2^n units waste space, but at most half of the process's
 * limit. */
static kvc_status reserve(void)
{
    int64_t bytes = 2 * kvc_system_memory(), most = kvc_system_space() / 2, entries = sizeof(kvc_unit) + sizeof(block);
    if (bytes > most) bytes = most;
    if (bytes > INT32_MAX * SPACE_UNIT) bytes = INT32_MAX * SPACE_UNIT;
    for (;; bytes /= 2) {
        bytes = bytes < MIN_SPACE ? MIN_SPACE : bytes / KVC_HUGE_PAGE * KVC_HUGE_PAGE;
        uint8_t *base = kvc_system_reserve(bytes);
        void *map = base ? kvc_system_reserve(bytes / SPACE_UNIT * entries) : NULL;
        if (map) {
            all.units = bytes / SPACE_UNIT;
            all.space = (kvc_space){.base = base, .bytes = bytes, .unit_slab = map};
            all.blocks = (block *)(void *)(all.space.unit_slab + all.units);
            for (int i = 0; i < ORDERS; i++) all.free[i] = LIST_END;
            return KVC_OK;
        }
        if (base) kvc_system_release(base, bytes);
        KVC_CHECK(bytes > MIN_SPACE, KVC_E_MEMORY, "out of memory: no address space for pools of %lld bytes",
                  (long long)bytes);
    }
}

kvc_status kvc_space_get(const kvc_space **space)
{
    pthread_mutex_lock(&lock);
    kvc_status status = KVC_OK;
    if (kvc_alloc_must_fail())
        status = kvc_fail(KVC_E_MEMORY, "out of memory: no address space for a pool");
    else if (!all.space.base)
        status = reserve();
    pthread_mutex_unlock(&lock);
    *space = &all.space;
    return status;
}

static void link_block(int64_t first, int order)
{
    int32_t head = all.free[order];
    all.blocks[first] = (block){.next = head, .previous = LIST_END, .order = order};
    if (head != LIST_END) all.blocks[head].previous = (int32_t)first;
    all.free[order] = (int32_t)first;
}

static void unlink_block(int64_t first)
{
    block b = all.blocks[first];
    all.blocks[first].order = LIST_END;
    if (b.next != LIST_END) all.blocks[b.next].previous = b.previous;
    if (b.previous != LIST_END)
        all.blocks[b.previous].next = b.next;
    else
        all.free[b.order] = b.next;
}

/* Merges a free block with its free buddies. The result is in no list. */
static int64_t merge(int64_t first, int *order)
{
    for (; *order + 1 < ORDERS; ++*order) {
        int64_t buddy = first ^ ((int64_t)1 << *order);
        if (buddy + ((int64_t)1 << *order) > all.extent || all.blocks[buddy].order != *order) break;
        unlink_block(buddy);
        if (buddy < first) first = buddy;
    }
    return first;
}

/* Makes entries [from, to) of one of the two maps accessible. */
static bool use(void *entries, int64_t bytes, int64_t from, int64_t to)
{
    int64_t page = kvc_system_page(), skip = (int64_t)((uintptr_t)entries % (uintptr_t)page);
    int64_t begin = (skip + from * bytes) / page * page, end = skip + to * bytes;
    return kvc_system_use((uint8_t *)entries - skip + begin, end - begin);
}

/* Makes more units accessible. *room: whether a block of this order fits. */
static kvc_status extend(int order, bool *room)
{
    int64_t from = all.extent, block_units = (int64_t)1 << order, size = (int64_t)1 << (order > STEP ? order : STEP);
    int64_t to = (from + size - 1) / size * size + size;
    if (to > all.units) to = all.units;
    *room = (from + block_units - 1) / block_units * block_units + block_units <= to;
    if (!*room) return KVC_OK;
    KVC_CHECK(!kvc_alloc_must_fail() && use(all.space.unit_slab, sizeof(kvc_unit), from, to) &&
                  use(all.blocks, sizeof(block), from, to) &&
                  kvc_system_use(all.space.base + from * SPACE_UNIT, (to - from) * SPACE_UNIT),
              KVC_E_MEMORY, "out of memory: the system refused %lld bytes for the pool; evict or use a smaller format",
              (long long)((to - from) * SPACE_UNIT));
    for (int64_t u = from; u < to; u++) {
        atomic_store_explicit(&all.space.unit_slab[u], LIST_END, memory_order_relaxed);
        all.blocks[u].order = LIST_END;
    }
    for (int64_t u = from; u < to;) {
        int o = 0;
        while (o + 1 < ORDERS && u % ((int64_t)2 << o) == 0 && u + ((int64_t)2 << o) <= to) o++;
        int64_t first = u;
        u = all.extent = u + ((int64_t)1 << o);
        first = merge(first, &o);
        link_block(first, o);
    }
    return KVC_OK;
}

kvc_status kvc_space_take(int order, int64_t *first)
{
    *first = -1;
    if (order >= ORDERS) return KVC_OK;
    pthread_mutex_lock(&lock);
    kvc_status status = KVC_OK;
    int o = order;
    for (bool room = true; room; o = order) {
        while (o < ORDERS && all.free[o] == LIST_END) o++;
        if (o < ORDERS) break;
        status = extend(order, &room);
        if (status != KVC_OK) room = false;
    }
    if (o < ORDERS && all.free[o] != LIST_END) {
        *first = all.free[o];
        unlink_block(*first);
        while (o-- > order) link_block(*first + ((int64_t)1 << o), o);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

void kvc_space_give(int64_t first, int order)
{
    pthread_mutex_lock(&lock);
    /* returning part of a huge page leaves a page table of small ones, so whole huge pages are remapped */
    int whole = order > HUGE ? order : HUGE;
    uint8_t *at = all.space.base + (first >> whole << whole) * SPACE_UNIT;
    first = merge(first, &order);
    if (order < HUGE || kvc_system_renew(at, SPACE_UNIT << whole)) link_block(first, order);
    pthread_mutex_unlock(&lock);
}
