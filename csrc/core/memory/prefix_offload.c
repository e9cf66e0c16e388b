/* prefix_offload.c - links of the prefix index whose pages are offloaded. */
#include "memory/prefix_link.h"

#include <string.h>

static kvc_link *with_id(const kvc_prefix *p, int64_t id)
{
    kvc_link *l = *kvc_link_bucket(p, id);
    while (l && l->id != id) l = l->next_id;
    return l;
}

bool kvc_prefix_oldest(kvc_prefix *p, bool here, kvc_link_info *found)
{
    pthread_mutex_lock(&p->lock);
    kvc_link *l = p->orders[0].oldest, *offloaded = here ? NULL : p->orders[1].oldest;
    while (l && l->pins) l = l->newer;
    if (offloaded && !(l && l->used < offloaded->used)) l = offloaded;
    if (l) {
        *found = (kvc_link_info){.id = l->id, .n_entries = l->n_entries, .offloaded = l->offloaded};
        found->parent = l->parent ? l->parent->id : 0;
        memcpy(found->root, l->root, KVC_DIGEST);
    }
    pthread_mutex_unlock(&p->lock);
    return l;
}

bool kvc_prefix_entries(kvc_prefix *p, int64_t id, int64_t n, int64_t *entries)
{
    pthread_mutex_lock(&p->lock);
    kvc_link *l = with_id(p, id);
    bool there = l && !l->offloaded && l->n_entries == n;
    for (int64_t i = 0; there && i < n; i++) {
        entries[i] = kvc_link_entries(l)[i];
        kvc_pool_ref(p->pool, kvc_entry_offset(entries[i]));
    }
    pthread_mutex_unlock(&p->lock);
    return there;
}

bool kvc_prefix_offload(kvc_prefix *p, int64_t id)
{
    pthread_mutex_lock(&p->lock);
    kvc_link *l = with_id(p, id);
    bool may = l && !l->offloaded && !l->pins && !l->resident_children;
    if (may) kvc_prefix_strip(p, l);
    pthread_mutex_unlock(&p->lock);
    return may;
}

/* Whether dropping the link would free a page of the pool. */
static bool holds_alone(const kvc_prefix *p, kvc_link *l)
{
    int64_t i = 0;
    while (i < l->n_entries && kvc_pool_refs(p->pool, kvc_entry_offset(kvc_link_entries(l)[i])) > 1) i++;
    return i < l->n_entries;
}

bool kvc_prefix_give_way(void *prefix)
{
    kvc_prefix *p = prefix;
    pthread_mutex_lock(&p->lock);
    kvc_link *l = p->orders[0].oldest;
    while (l && (l->pins || l->resident_children || !holds_alone(p, l))) l = l->newer;
    /* its children are offloaded and need it when they are brought back: keep the link without its pages */
    if (l && l->children) {
        kvc_prefix_strip(p, l);
    } else if (l) {
        kvc_prefix_drop_link(p, l);
        p->stats.evicted++;
    }
    pthread_mutex_unlock(&p->lock);
    return l;
}

bool kvc_prefix_bring(kvc_prefix *p, int64_t id, int64_t n, const int64_t *entries)
{
    pthread_mutex_lock(&p->lock);
    kvc_link *l = with_id(p, id);
    bool may = l && l->offloaded && l->n_entries == n && !(l->parent && l->parent->offloaded) &&
               kvc_prefix_give(p, l, entries) == KVC_OK;
    pthread_mutex_unlock(&p->lock);
    return may;
}

bool kvc_prefix_forget(kvc_prefix *p, int64_t id)
{
    pthread_mutex_lock(&p->lock);
    kvc_link *l = with_id(p, id);
    bool may = l && !l->pins && !l->children;
    if (may) {
        kvc_prefix_drop_link(p, l);
        p->stats.evicted++;
    }
    pthread_mutex_unlock(&p->lock);
    return may;
}

int64_t kvc_prefix_offloaded(kvc_prefix *p, const kvc_chain *chain, int64_t *ids)
{
    kvc_walk w;
    int64_t n = 0;
    if (kvc_chain_check(chain) != KVC_OK) return 0;
    pthread_mutex_lock(&p->lock);
    kvc_prefix_go(p, &w, chain);
    kvc_prefix_touch(p, w.last); /* bringing these back needs their parents, too */
    for (kvc_link *l; !w.clash && kvc_prefix_next(p, &w, &l) && l; n++) {
        ids[n] = l->id;
        kvc_walk_on(&w, l);
    }
    pthread_mutex_unlock(&p->lock);
    return n;
}
