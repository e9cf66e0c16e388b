/* reclaim.c - a full pool asks the owners of reclaimable pages to release some. */
#include "memory/pool.h"

void kvc_pool_add_reclaimer(kvc_pool *pool, kvc_reclaimer *r)
{
    pthread_mutex_lock(&pool->reclaim_lock);
    r->next = pool->reclaimers;
    pool->reclaimers = r;
    pthread_mutex_unlock(&pool->reclaim_lock);
}

void kvc_pool_remove_reclaimer(kvc_pool *pool, kvc_reclaimer *r)
{
    pthread_mutex_lock(&pool->reclaim_lock);
    kvc_reclaimer **at = &pool->reclaimers;
    while (*at != r) at = &(*at)->next;
    *at = r->next;
    pthread_mutex_unlock(&pool->reclaim_lock);
}

bool kvc_pool_reclaim(kvc_pool *pool)
{
    pthread_mutex_lock(&pool->reclaim_lock);
    kvc_reclaimer *r = pool->reclaimers;
    while (r && !r->give(r->owner)) r = r->next;
    pthread_mutex_unlock(&pool->reclaim_lock);
    return r;
}
