/* units.c - placement of slabs in the pool's own or the process-wide reservation. The caller holds the pool's lock. */
#include "base/alloc.h"
#include "base/system.h"
#include "memory/pool.h"

#define LOST (-2)     /* a unit that could not be remapped: belongs to no slab and is never reused */
#define SLAB_SLOTS 16 /* approximate number of slots per slab */
#define SLAB_PART 64  /* a slab takes at most 1/64 of the pool, if a slot fits */

/* Smallest power of 2 that is at least n, as an exponent. */
static int order_of(int64_t n)
{
    int order = 0;
    while ((int64_t)1 << order < n) order++;
    return order;
}

int64_t kvc_units_of(const kvc_pool *pool, int64_t bytes)
{
    int64_t units = round_up(bytes, pool->unit) / pool->unit;
    return pool->space ? (int64_t)1 << order_of(units) : units;
}

/* Maximum size of a slab. */
static int64_t most_units(const kvc_pool *pool, int64_t slot_bytes)
{
    int64_t one = kvc_units_of(pool, slot_bytes), part = pool->reserved / pool->unit / SLAB_PART;
    int64_t units = round_up(slot_bytes * SLAB_SLOTS, UNIT) / pool->unit;
    return units > part ? part > one ? part : one : units;
}

/* In a shared space the first slab has about one slot, and each further one doubles the class. */
int64_t kvc_units_of_slab(const kvc_pool *pool, const size_class *c)
{
    int64_t most = most_units(pool, c->slot_bytes);
    int64_t units = pool->space ? kvc_units_of(pool, c->slot_bytes * (c->slots + !c->slots)) : most;
    return units < most ? units : pool->space ? kvc_units_of(pool, most * pool->unit) : most;
}

bool kvc_units_can_release(const kvc_pool *pool, const slab *s)
{
    const size_class *c = &pool->classes[s->class_index];
    return !pool->space || !c->live ||
           (c->slots - s->slots) * c->slot_bytes >= most_units(pool, c->slot_bytes) * pool->unit;
}

/* First run of `units` free units of the pool's own reservation; it may extend past the extent. -1 if there is none. */
static int64_t find_units(const kvc_pool *pool, int64_t units)
{
    int64_t run = 0, end = pool->extent / UNIT;
    for (int64_t u = 0; u < end; u++) {
        run = slab_over(pool, u) == LIST_END ? run + 1 : 0;
        if (run == units) return u + 1 - units;
    }
    return end - run + units <= pool->limit / UNIT ? end - run : -1;
}

kvc_status kvc_units_place(kvc_pool *pool, slab *s)
{
    s->first_unit = -1;
    if (!pool->space)
        s->first_unit = find_units(pool, s->units);
    else if (s->units <= (pool->limit - pool->held) / pool->unit)
        return kvc_space_take(order_of(s->units), &s->first_unit);
    return KVC_OK;
}

static void mark(kvc_pool *pool, int64_t from, int64_t to, int32_t as)
{
    for (int64_t u = from; u < to; u++) atomic_store_explicit(&pool->unit_slab[u], as, memory_order_relaxed);
}

kvc_status kvc_units_reach(kvc_pool *pool, int64_t extent)
{
    int64_t more = extent - pool->extent;
    if (more <= 0) return KVC_OK;
    if (pool->space) { /* the shared space manages its own extent */
        pool->extent = extent;
        return KVC_OK;
    }
    KVC_CHECK(!kvc_alloc_must_fail() && kvc_system_use(pool->base + pool->extent, more), KVC_E_MEMORY,
              "out of memory: the system refused %lld bytes for the pool; evict or use a smaller format",
              (long long)more);
    mark(pool, pool->extent / UNIT, extent / UNIT, LIST_END);
    pool->extent = extent;
    return KVC_OK;
}

void kvc_units_back(kvc_pool *pool, const slab *s)
{
    if (pool->space) kvc_space_give(s->first_unit, order_of(s->units));
}

static bool all_free(const kvc_pool *pool, int64_t from, int64_t to)
{
    bool free = to <= pool->extent / UNIT;
    for (int64_t u = from; free && u < to; u++) free = slab_over(pool, u) == LIST_END;
    return free;
}

/* Remaps the huge pages that [from, to) leaves free (own reservations only): returning parts of a huge page leaves a
 * page table of small ones. */
static void renew(kvc_pool *pool, int64_t from, int64_t to)
{
    int64_t per = KVC_HUGE_PAGE / UNIT, first = from / per * per, last = round_up(to, per);
    if (!all_free(pool, first, from)) first += per;
    if (!all_free(pool, to, last)) last -= per;
    if (first < last && !kvc_system_renew(pool->base + first * UNIT, (last - first) * UNIT))
        mark(pool, first, last, LOST);
}

void kvc_units_give(kvc_pool *pool, const slab *s)
{
    uint8_t *at = pool->base + s->first_unit * pool->unit;
    kvc_system_give_back(at, s->units * pool->unit);
    mark(pool, s->first_unit, s->first_unit + s->units, LIST_END);
    pool->held -= s->units * pool->unit;
    /* the next slab here may be small */
    if (pool->space && s->huge) kvc_system_expect_much(at, s->units * pool->unit, false);
    if (!pool->space) renew(pool, s->first_unit, s->first_unit + s->units);
    kvc_units_back(pool, s);
}
