/* prefix_link.h - links of the prefix index; for prefix.c and prefix_offload.c. The caller holds the lock. */
#ifndef KVC_PREFIX_LINK_H
#define KVC_PREFIX_LINK_H

#include "memory/reclaim.h"
#include "prefix.h"

#include <pthread.h>

typedef struct kvc_link {
    uint8_t digest[KVC_DIGEST], root[KVC_DIGEST];
    struct kvc_link *parent, *next, *next_id, *older, *newer; /* next, next_id: in the buckets */
    int64_t id, used, n_tokens, n_entries, bytes;             /* used: time of the last use, later for parents */
    int64_t children, resident_children;                      /* child links; those of them that are not offloaded */
    int64_t pins, ends;                                       /* pinned chains through this link; those that end here */
    bool offloaded;                                           /* it has no pages, nor have its descendants */
    int64_t data[];                                           /* tokens, then entries */
} kvc_link;

struct kvc_prefix {
    kvc_pool *pool;
    kvc_link **buckets; /* [2][n_buckets]: by digest, by id */
    struct {
        kvc_link *oldest, *newest;
    } orders[2]; /* links by last use: those with pages, offloaded ones */
    int64_t n_buckets, max_bytes, max_links, last_id, clock;
    int digest_bytes;
    kvc_prefix_stats stats;
    pthread_mutex_t lock;
    kvc_reclaimer reclaimer;
};

/* Walks along a chain. */
typedef struct kvc_walk {
    const kvc_chain *chain;
    kvc_link *last; /* last link found */
    int64_t at;     /* tokens up to there */
    bool clash;     /* the next link holds other tokens (hash collision) */
    uint8_t digest[KVC_DIGEST];
} kvc_walk;

static inline int64_t *kvc_link_entries(kvc_link *l) { return l->data + l->n_tokens; }
static inline kvc_link **kvc_link_bucket(const kvc_prefix *p, int64_t id)
{
    return &p->buckets[p->n_buckets + (id & (p->n_buckets - 1))];
}
static inline void kvc_walk_on(kvc_walk *w, kvc_link *l)
{
    w->last = l;
    w->at += l->n_tokens;
}

kvc_status kvc_chain_check(const kvc_chain *chain);
/* The digest of the next link, and the link if it is known. False past the end. */
bool kvc_prefix_next(kvc_prefix *p, kvc_walk *w, kvc_link **found);
/* Follows the chain while its links are known and resident; returns their number. */
int64_t kvc_prefix_go(kvc_prefix *p, kvc_walk *w, const kvc_chain *chain);
/* `give` of a kvc_reclaimer: evicts the least recently used link whose pages have no other holder. */
bool kvc_prefix_give_way(void *prefix);
/* Marks the chain that ends with l as used. */
void kvc_prefix_touch(kvc_prefix *p, kvc_link *l);
/* Removes a link without children. */
void kvc_prefix_drop_link(kvc_prefix *p, kvc_link *l);
/* Gives the link pages, with a reference to each, or releases its pages. KVC_E_VALUE: not pages of the pool. */
kvc_status kvc_prefix_give(kvc_prefix *p, kvc_link *l, const int64_t *entries);
void kvc_prefix_strip(kvc_prefix *p, kvc_link *l);

#endif
