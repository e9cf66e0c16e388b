/* reclaim.h - callbacks that free pages when a pool is full. The prefix index registers one. */
#ifndef KVC_RECLAIM_H
#define KVC_RECLAIM_H

#include "kvc.h"

/* `give` frees some pages and returns whether there were any. The thread that finds the pool full calls it and holds no
 * lock of the pool. It must not allocate from the pool. */
typedef struct kvc_reclaimer {
    bool (*give)(void *owner);
    void *owner;
    struct kvc_reclaimer *next;
} kvc_reclaimer;

void kvc_pool_add_reclaimer(kvc_pool *pool, kvc_reclaimer *r);
/* Waits for running calls. */
void kvc_pool_remove_reclaimer(kvc_pool *pool, kvc_reclaimer *r);
/* Calls the reclaimers in turn until one frees pages; returns whether one did. */
bool kvc_pool_reclaim(kvc_pool *pool);

#endif
