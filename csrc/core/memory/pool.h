/* pool.h - private to pool*.c. */
#ifndef KVC_POOL_H
#define KVC_POOL_H

#include "base/status.h"
#include "memory/reclaim.h"
#include "memory/space.h"

#include <pthread.h>
#define UNIT ((int64_t)1 << 20) /* of a pool with a reservation of its own */

/* Slots of a slab are in use (refs > 0), free and resident (hot), free and released (cold), or never used (>= bump). */
typedef struct slab {
    int64_t first_unit, units;
    int32_t class_index;
    bool huge;                 /* huge pages were requested */
    int32_t slots, bump, live; /* bump: slots below were used before; live is 0 in pools that keep memory only */
    int32_t hot, cold;         /* heads of the free lists, LIST_END */
    int32_t next, previous;    /* slabs of the class with free slots */
    uint32_t *refs;            /* [slots] */
    int32_t *link;             /* [slots] free lists */
} slab;

typedef struct size_class {
    int64_t slot_bytes;
    int64_t slots, live; /* of all its slabs */
    int32_t room;        /* list of slabs with free slots */
    int32_t hot;         /* free hot slots */
} size_class;

struct kvc_pool {
    uint8_t *base;
    const kvc_space *space; /* shared space, or NULL: base is a reservation of its own */
    int64_t unit, reserved, extent, resident, used, slots;
    int64_t held;        /* bytes that slabs cover */
    int64_t limit;       /* on the extent, or on the bytes held of a shared space */
    int64_t system_page; /* system page size in bytes */
    int64_t expected;    /* bytes of new slots that the caller is about to write */
    int64_t keep;        /* free bytes that stay resident: see kvc_pool_keep */
    bool full;           /* the last allocation found no units */
    slab **slabs;        /* [capacity] NULL where none */
    size_class *classes;
    int32_t n_classes, n_slabs;
    int64_t class_capacity, slab_capacity;
    kvc_unit *unit_slab; /* [units] slab that covers a unit, or LIST_END; of a shared space, others' too */
    atomic_llong owners;
    pthread_mutex_t lock; /* protects all of the above: tables, prefixes and movers of several threads share a pool */
    kvc_reclaimer *reclaimers;
    pthread_mutex_t reclaim_lock; /* protects the reclaimers; lock order: this, a reclaimer's lock, `lock` */
};

static inline void enter(const kvc_pool *pool) { pthread_mutex_lock((pthread_mutex_t *)&pool->lock); }
static inline void leave(const kvc_pool *pool) { pthread_mutex_unlock((pthread_mutex_t *)&pool->lock); }

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* Bytes of the slab that are resident when `bump` slots were touched and none is cold. */
static inline int64_t touched(const kvc_pool *pool, const slab *s)
{
    return round_up(s->bump * pool->classes[s->class_index].slot_bytes, pool->system_page);
}

/* True if free resident memory is within `keep`. */
static inline bool keeps(const kvc_pool *pool) { return pool->keep && pool->resident - pool->used <= pool->keep; }

static inline bool has_room(const slab *s) { return s->hot != LIST_END || s->cold != LIST_END || s->bump < s->slots; }

static inline int32_t slab_over(const kvc_pool *pool, int64_t unit)
{
    return atomic_load_explicit(&pool->unit_slab[unit], memory_order_relaxed);
}

static inline int64_t slot_at(const kvc_pool *pool, const slab *s, int32_t slot)
{
    return s->first_unit * pool->unit + slot * pool->classes[s->class_index].slot_bytes;
}

/* True if an empty slab may be freed. While slots of the class are in use, small slabs worth one large slab are kept. */
bool kvc_units_can_release(const kvc_pool *pool, const slab *s);
/* Units per slot, and units of the next slab of a class. */
int64_t kvc_units_of(const kvc_pool *pool, int64_t bytes);
int64_t kvc_units_of_slab(const kvc_pool *pool, const size_class *c);
/* Finds units for the slab; first_unit is -1 if there are none. In a shared space the units are then the pool's. */
kvc_status kvc_units_place(kvc_pool *pool, slab *s);
/* Makes memory below `extent` accessible. */
kvc_status kvc_units_reach(kvc_pool *pool, int64_t extent);
/* Returns units that were found and are not used. */
void kvc_units_back(kvc_pool *pool, const slab *s);
/* Frees the slab, its memory and its units. */
void kvc_units_give(kvc_pool *pool, const slab *s);

#endif
