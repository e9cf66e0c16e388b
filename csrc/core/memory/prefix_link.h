/* prefix_link.h - what the prefix index is made of; for prefix.c and prefix_offload.c. The caller has the lock. */
#ifndef KVC_PREFIX_LINK_H
#define KVC_PREFIX_LINK_H

#include "memory/reclaim.h"
#include "prefix.h"

#include <pthread.h>

typedef struct kvc_link {
    uint8_t digest[KVC_DIGEST], root[KVC_DIGEST];
    struct kvc_link *parent, *next, *older, *newer; /* next: in the bucket */
    int64_t id, n_tokens, n_entries, bytes;
    int64_t children, near; /* links that hang on it; those of them that are not offloaded */
    int64_t pins, ends;     /* pinned chains that go through here, that end here */
    bool offloaded;         /* it has no pages; nor has what hangs on it */
    int64_t data[];         /* tokens, then entries */
} kvc_link;

struct kvc_prefix {
    kvc_pool *pool;
    kvc_link **buckets, *oldest, *newest;
    int64_t n_buckets, max_bytes, max_links, last_id;
    int digest_bytes;
    kvc_prefix_stats stats;
    pthread_mutex_t lock;
    kvc_reclaimer reclaimer;
};

/* Walks along a chain. */
typedef struct kvc_walk {
    const kvc_chain *chain;
    kvc_link *last; /* known so far */
    int64_t at;     /* tokens up to there */
    bool clash;     /* the next link's place is taken by other tokens */
    uint8_t digest[KVC_DIGEST];
} kvc_walk;

static inline int64_t *kvc_link_entries(kvc_link *l) { return l->data + l->n_tokens; }
static inline void kvc_walk_on(kvc_walk *w, kvc_link *l)
{
    w->last = l;
    w->at += l->n_tokens;
}

kvc_status kvc_chain_check(const kvc_chain *chain);
/* The digest of the next link, and the link if it is known. False past the end. */
bool kvc_prefix_next(kvc_prefix *p, kvc_walk *w, kvc_link **found);
/* Goes as far as the chain is known and has its pages; links. */
int64_t kvc_prefix_go(kvc_prefix *p, kvc_walk *w, const kvc_chain *chain);
/* `give` of a kvc_reclaimer: the least recently used link goes whose pages are held here alone. */
bool kvc_prefix_give_way(void *prefix);
/* The chain that ends with l was used. */
void kvc_prefix_touch(kvc_prefix *p, kvc_link *l);
void kvc_prefix_drop_link(kvc_prefix *p, kvc_link *l);
/* The link gets pages, with a reference to each, or loses what it has. KVC_E_VALUE: not pages of the pool. */
kvc_status kvc_prefix_give(kvc_prefix *p, kvc_link *l, const int64_t *entries);
void kvc_prefix_strip(kvc_prefix *p, kvc_link *l);

#endif
