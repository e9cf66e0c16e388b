/* reclaim.h - who holds pages of a pool that it can do without: the prefix index. */
#ifndef KVC_RECLAIM_H
#define KVC_RECLAIM_H

#include "kvc.h"

/* `give` lets some pages go and tells whether there were any. It is called by the thread that finds the pool full, which
 * holds no lock of the pool; it must not allocate from it. */
typedef struct kvc_reclaimer {
    bool (*give)(void *owner);
    void *owner;
    struct kvc_reclaimer *next;
} kvc_reclaimer;

void kvc_pool_add_reclaimer(kvc_pool *pool, kvc_reclaimer *r);
/* Waits for calls that are under way. */
void kvc_pool_remove_reclaimer(kvc_pool *pool, kvc_reclaimer *r);
/* Asks one after the other until one gives; did any? */
bool kvc_pool_reclaim(kvc_pool *pool);

#endif
