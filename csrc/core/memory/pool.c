/* pool.c - a slab allocator for pages: O(1) alloc and free, reference counts, memory returned to the system.
 *
 * A pool reserves address space and divides it into units; a slab is a run of units with slots of one size. Pools
 * usually share one reservation of the process (space.c), in which slabs start small; a pool may also have its own.
 * Slots that were never used are not resident, so slabs can be generous. Units become accessible as the extent grows,
 * so that systems that account for committed memory count only those.
 *
 * Memory is returned when a slab is empty; for slots made of whole system pages also when more than HOT freed slots of
 * a size class are resident. The raw pages of a prefill are thus returned, while steady decode of one sequence, which
 * frees one page per page it allocates, makes no system calls. Tables allocate new pages before they free old ones, so
 * the last slab is not freed and recreated repeatedly. A pool can be configured to keep freed memory. */
#include "pool.h"

#include "base/alloc.h"
#include "base/system.h"

#include <string.h>

#define HOT 1 /* freed slots per class that stay resident, for reuse by the next decode step */
/* resident bytes from which slabs use huge pages: fewer TLB misses when large, no rounding up when small */
#define HUGE_FROM ((int64_t)64 << 20)
#define HUGE_CALL ((int64_t)4 << 20) /* bytes written by one call from which its new slabs use huge pages */
#define MIN_RESERVE ((int64_t)64 << 20)

static kvc_status new_pool(kvc_pool made, kvc_pool **out)
{
    kvc_pool *pool;
    KVC_TRY(kvc_alloc(1, sizeof *pool, &pool));
    *pool = made;
    pool->limit = made.reserved;
    pool->system_page = kvc_system_page();
    atomic_init(&pool->owners, 1);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_mutex_init(&pool->reclaim_lock, NULL);
    *out = pool;
    return KVC_OK;
}

kvc_status kvc_pool_new(int64_t max_bytes, kvc_pool **out)
{
    *out = NULL;
    KVC_CHECK(max_bytes >= 0 && max_bytes <= INT64_MAX - UNIT, KVC_E_VALUE,
              "pool: expected max_bytes of at least 0 and below 2^63 - 2^20, got %lld", (long long)max_bytes);
    int64_t bytes = max_bytes ? max_bytes : kvc_system_memory();
    bytes = round_up(bytes < UNIT ? UNIT : bytes, UNIT);
    KVC_CHECK(!kvc_alloc_must_fail(), KVC_E_MEMORY, "out of memory: no address space for a pool");
    void *base = NULL;
    for (;; bytes = round_up(bytes / 2, UNIT)) { /* retry with less if the address space is limited */
        base = kvc_system_reserve(bytes);
        if (base || max_bytes || bytes <= MIN_RESERVE) break;
    }
    KVC_CHECK(base, KVC_E_MEMORY, "out of memory: no address space for a pool of %lld bytes", (long long)bytes);
    kvc_unit *unit_slab;
    kvc_status status = kvc_alloc(bytes / UNIT, sizeof *unit_slab, &unit_slab);
    if (status == KVC_OK)
        status = new_pool((kvc_pool){.base = base, .reserved = bytes, .unit = UNIT, .unit_slab = unit_slab}, out);
    if (status != KVC_OK) {
        kvc_free(unit_slab);
        kvc_system_release(base, bytes);
    }
    return status;
}

kvc_status kvc_pool_new_shared(kvc_pool **out)
{
    const kvc_space *space;
    *out = NULL;
    KVC_TRY(kvc_space_get(&space));
    int64_t most = kvc_system_memory(), bytes = most < space->bytes ? most : space->bytes;
    return new_pool(
        (kvc_pool){
            .base = space->base, .space = space, .reserved = bytes, .unit = SPACE_UNIT, .unit_slab = space->unit_slab},
        out);
}

kvc_pool *kvc_pool_retain(kvc_pool *pool)
{
    atomic_fetch_add(&pool->owners, 1);
    return pool;
}

static void free_slab(kvc_pool *pool, slab *s)
{
    if (!s) return;
    kvc_free(s->refs);
    kvc_free(s->link);
    kvc_free(s);
    pool->n_slabs--;
}

void kvc_pool_release(kvc_pool *pool)
{
    if (!pool || atomic_fetch_sub(&pool->owners, 1) > 1) return;
    pthread_mutex_destroy(&pool->lock);
    pthread_mutex_destroy(&pool->reclaim_lock);
    for (int32_t i = 0; i < pool->slab_capacity; i++) {
        if (pool->space && pool->slabs[i]) kvc_units_give(pool, pool->slabs[i]);
        free_slab(pool, pool->slabs[i]);
    }
    kvc_free(pool->slabs);
    kvc_free(pool->classes);
    if (!pool->space) {
        kvc_system_release(pool->base, pool->reserved);
        kvc_free(pool->unit_slab);
    }
    kvc_free(pool);
}

/* ---------------------------------------------------------------- slabs */

static void list_add(kvc_pool *pool, int32_t i)
{
    slab *s = pool->slabs[i];
    size_class *c = &pool->classes[s->class_index];
    s->previous = LIST_END;
    s->next = c->room;
    if (c->room != LIST_END) pool->slabs[c->room]->previous = i;
    c->room = i;
}

static void list_remove(kvc_pool *pool, int32_t i)
{
    slab *s = pool->slabs[i];
    if (s->previous != LIST_END)
        pool->slabs[s->previous]->next = s->next;
    else
        pool->classes[s->class_index].room = s->next;
    if (s->next != LIST_END) pool->slabs[s->next]->previous = s->previous;
}

static kvc_status find_class(kvc_pool *pool, int64_t slot_bytes, int32_t *index)
{
    for (*index = 0; *index < pool->n_classes; ++*index) /* only a few: formats in use x page sizes */
        if (pool->classes[*index].slot_bytes == slot_bytes) return KVC_OK;
    KVC_TRY(kvc_grow(&pool->classes, pool->n_classes, &pool->class_capacity, sizeof *pool->classes));
    pool->classes[pool->n_classes++] = (size_class){.slot_bytes = slot_bytes, .room = LIST_END};
    return KVC_OK;
}

static void drop_slab(kvc_pool *pool, int32_t index)
{
    slab *s = pool->slabs[index];
    int64_t slot_bytes = pool->classes[s->class_index].slot_bytes;
    for (int32_t i = s->hot; i != LIST_END; i = s->link[i]) pool->classes[s->class_index].hot--;
    int64_t gone = touched(pool, s);
    for (int32_t i = s->cold; i != LIST_END; i = s->link[i]) gone -= slot_bytes;
    pool->resident -= gone;
    pool->classes[s->class_index].slots -= s->slots;
    kvc_units_give(pool, s);
    list_remove(pool, index);
    free_slab(pool, s);
    pool->slabs[index] = NULL;
}

/* Frees empty slabs, which are kept if the pool keeps freed memory. */
static bool drop_empty(kvc_pool *pool)
{
    int32_t before = pool->n_slabs;
    for (int32_t i = 0; i < pool->slab_capacity; i++)
        if (pool->slabs[i] && !pool->slabs[i]->live) drop_slab(pool, i);
    return pool->n_slabs < before;
}

static kvc_status new_slab(kvc_pool *pool, int32_t class_index)
{
    size_class *c = &pool->classes[class_index];
    int64_t slot_bytes = c->slot_bytes, one = kvc_units_of(pool, slot_bytes);
    slab found = {.units = kvc_units_of_slab(pool, c), .class_index = class_index, .hot = LIST_END, .cold = LIST_END};
    KVC_TRY(kvc_units_place(pool, &found));
    if (found.first_unit < 0 && drop_empty(pool)) KVC_TRY(kvc_units_place(pool, &found));
    if (found.first_unit < 0) { /* nearly full: use the smallest possible slab */
        found.units = one;
        KVC_TRY(kvc_units_place(pool, &found));
    }
    pool->full = found.first_unit < 0 && one <= pool->limit / pool->unit;
    KVC_CHECK(
        found.first_unit >= 0, KVC_E_MEMORY,
        "pool is full: needed %lld bytes, %lld of %lld in use (pages of one size share pieces of %lld); evict, use "
        "a smaller format, or give the pool more (max_bytes=)",
        (long long)slot_bytes, (long long)pool->used, (long long)pool->limit, (long long)pool->unit);
    int32_t index = 0;
    while (index < pool->slab_capacity && pool->slabs[index]) index++;
    slab *s = NULL;
    found.slots = (int32_t)(found.units * pool->unit / slot_bytes);
    kvc_status status = kvc_grow(&pool->slabs, index, &pool->slab_capacity, sizeof *pool->slabs);
    if (status == KVC_OK) status = kvc_alloc(1, sizeof *s, &s);
    if (status == KVC_OK) {
        *s = found;
        pool->n_slabs++;
        status = kvc_alloc(s->slots, sizeof *s->refs, &s->refs);
    }
    if (status == KVC_OK) status = kvc_alloc(s->slots, sizeof *s->link, &s->link);
    if (status == KVC_OK) status = kvc_units_reach(pool, (found.first_unit + found.units) * pool->unit);
    if (status != KVC_OK) {
        if (pool->space) kvc_units_back(pool, &found);
        free_slab(pool, s);
        return status;
    }
    memset(s->refs, 0, (size_t)s->slots * sizeof *s->refs);
    pool->slabs[index] = s;
    pool->held += s->units * pool->unit;
    c->slots += s->slots;
    for (int64_t u = 0; u < s->units; u++)
        atomic_store_explicit(&pool->unit_slab[s->first_unit + u], index, memory_order_relaxed);
    list_add(pool, index);
    s->huge = pool->resident >= HUGE_FROM || pool->expected >= HUGE_CALL;
    if (s->huge) kvc_system_expect_much(pool->base + s->first_unit * pool->unit, s->units * pool->unit, true);
    return KVC_OK;
}

/* ---------------------------------------------------------------- slots */

static slab *slab_of(const kvc_pool *pool, int64_t offset, int32_t *slot)
{
    slab *s = pool->slabs[slab_over(pool, offset / pool->unit)];
    *slot = (int32_t)((offset - s->first_unit * pool->unit) / pool->classes[s->class_index].slot_bytes);
    return s;
}

static kvc_status take_slot(kvc_pool *pool, int64_t bytes, int64_t *offset)
{
    KVC_CHECK(bytes > 0, KVC_E_VALUE, "pool: expected a slot of at least 1 byte, got %lld", (long long)bytes);
    KVC_CHECK(bytes <= pool->reserved, KVC_E_MEMORY,
              "pool is full: needed %lld bytes in one piece, the pool has %lld; give it more (max_bytes=)",
              (long long)bytes, (long long)pool->reserved);
    int32_t class_index, slot;
    KVC_TRY(find_class(pool, kvc_align(bytes), &class_index));
    if (pool->classes[class_index].room == LIST_END) KVC_TRY(new_slab(pool, class_index));
    size_class *c = &pool->classes[class_index];
    int32_t index = c->room;
    while (pool->space && c->hot && pool->slabs[index]->hot == LIST_END && pool->slabs[index]->next != LIST_END)
        index = pool->slabs[index]->next; /* prefer slots that are resident; short list, since slabs double in size */
    slab *s = pool->slabs[index];
    if (s->hot != LIST_END) {
        slot = s->hot;
        s->hot = s->link[slot];
        c->hot--;
    } else if (s->cold != LIST_END) {
        slot = s->cold;
        s->cold = s->link[slot];
        pool->resident += c->slot_bytes;
    } else {
        int64_t before = touched(pool, s);
        slot = s->bump++;
        pool->resident += touched(pool, s) - before;
    }
    s->refs[slot] = 1;
    s->live++;
    pool->slots++;
    c->live++;
    pool->used += c->slot_bytes;
    if (!has_room(s)) list_remove(pool, index);
    *offset = slot_at(pool, s, slot);
    return KVC_OK;
}

static void drop_slot(kvc_pool *pool, int64_t offset)
{
    int32_t slot, index = slab_over(pool, offset / pool->unit);
    slab *s = slab_of(pool, offset, &slot);
    size_class *c = &pool->classes[s->class_index];
    if (--s->refs[slot]) return;
    bool had_room = has_room(s);
    s->live--;
    pool->slots--;
    c->live--;
    pool->used -= c->slot_bytes;
    if (c->slot_bytes % pool->system_page == 0 && c->hot >= HOT && !keeps(pool)) {
        kvc_system_give_back(pool->base + offset, c->slot_bytes);
        pool->resident -= c->slot_bytes;
        s->link[slot] = s->cold;
        s->cold = slot;
    } else {
        c->hot++;
        s->link[slot] = s->hot;
        s->hot = slot;
    }
    if (!had_room) list_add(pool, index);
    if (s->live || keeps(pool) || !kvc_units_can_release(pool, s)) return;
    drop_slab(pool, index);
    for (int32_t i = 0; pool->space && !c->live && c->slots && i < pool->slab_capacity; i++)
        if (pool->slabs[i] && pool->slabs[i]->class_index == c - pool->classes) drop_slab(pool, i);
}

/* The slab of the used slot at `offset`, or NULL. */
static slab *slab_at(const kvc_pool *pool, int64_t offset, int32_t *slot)
{
    if (offset < 0 || offset >= pool->extent) return NULL;
    int64_t unit = offset / pool->unit;
    int32_t index = slab_over(pool, unit); /* in the shared space, possibly of another pool */
    slab *s = index >= 0 && index < pool->slab_capacity ? pool->slabs[index] : NULL;
    if (!s || unit < s->first_unit || unit >= s->first_unit + s->units) return NULL;
    slab_of(pool, offset, slot);
    return *slot < s->bump && offset == slot_at(pool, s, *slot) ? s : NULL;
}

kvc_status kvc_pool_alloc(kvc_pool *pool, int64_t bytes, int64_t *offset)
{
    kvc_status status;
    bool full;
    do {
        enter(pool);
        pool->full = false;
        status = take_slot(pool, bytes, offset);
        full = pool->full;
        leave(pool);
    } while (full && kvc_pool_reclaim(pool));
    if (status == KVC_OK) kvc_alloc_fresh(pool->base + *offset, kvc_align(bytes));
    return status;
}

void kvc_pool_ref(kvc_pool *pool, int64_t offset)
{
    int32_t slot;
    enter(pool);
    slab_of(pool, offset, &slot)->refs[slot]++;
    leave(pool);
}

void kvc_pool_unref(kvc_pool *pool, int64_t offset)
{
    enter(pool);
    drop_slot(pool, offset);
    leave(pool);
}

int64_t kvc_pool_refs(const kvc_pool *pool, int64_t offset)
{
    int32_t slot;
    enter(pool);
    const slab *s = slab_at(pool, offset, &slot);
    int64_t refs = s ? s->refs[slot] : 0;
    leave(pool);
    return refs;
}

int64_t kvc_pool_bytes(const kvc_pool *pool, int64_t offset)
{
    int32_t slot;
    enter(pool);
    const slab *s = slab_at(pool, offset, &slot);
    int64_t bytes = s && s->refs[slot] ? pool->classes[s->class_index].slot_bytes : 0;
    leave(pool);
    return bytes;
}

void kvc_pool_expect(kvc_pool *pool, int64_t bytes)
{
    enter(pool);
    pool->expected = bytes;
    leave(pool);
}

kvc_status kvc_pool_keep(kvc_pool *pool, int64_t bytes)
{
    KVC_CHECK(bytes >= 0, KVC_E_VALUE, "pool: keep: expected at least 0 bytes, got %lld", (long long)bytes);
    enter(pool);
    if (bytes < pool->keep) drop_empty(pool);
    pool->keep = bytes;
    leave(pool);
    return KVC_OK;
}

kvc_status kvc_pool_limit(kvc_pool *pool, int64_t bytes)
{
    enter(pool);
    bool fits = bytes >= (pool->space ? pool->held : pool->extent);
    if (fits) pool->limit = bytes < pool->reserved ? bytes : pool->reserved;
    leave(pool);
    KVC_CHECK(fits, KVC_E_VALUE, "pool: limit: expected at least the extent of %lld bytes, got %lld",
              (long long)kvc_pool_extent(pool), (long long)bytes);
    return KVC_OK;
}

uint8_t *kvc_pool_base(const kvc_pool *pool) { return pool->base; }

int64_t kvc_pool_extent(const kvc_pool *pool)
{
    enter(pool);
    int64_t extent = pool->extent;
    leave(pool);
    return extent;
}

void kvc_pool_get_stats(const kvc_pool *pool, kvc_pool_stats *stats)
{
    enter(pool);
    *stats = (kvc_pool_stats){pool->reserved, pool->resident, pool->used, pool->slots, pool->n_slabs};
    leave(pool);
}
