/* prefix.h - the prefix index: sealed pages of prefixes, for prompts that begin with the same tokens.
 *
 * A chain is a root (the digest of everything that pages depend on except tokens: model, formats, policy, options, salt) and
 * tokens in steps of a page; the key of link k is SHA-256 over the digest of link k-1 (or the root) and its own tokens.
 * Tokens are compared as well: a hash collision is a miss. Links hold a reference to each of their pages. The least
 * recently used ends of chains are evicted first; pinned links never. Thread-safe.
 */
#ifndef KVC_PREFIX_H
#define KVC_PREFIX_H

#include "kvc.h"
#include "sha256.h"

#ifdef KVC_EXPORT
#pragma GCC visibility push(default)
#endif
#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvc_prefix kvc_prefix;

typedef struct kvc_chain {
    uint8_t root[KVC_DIGEST];
    const int64_t *tokens;                /* [n] */
    int64_t n, first, step;               /* tokens of the first link, of each later one; both at least 1 */
    int64_t first_entries, later_entries; /* table entries of the first link, of each later one */
} kvc_chain;

typedef struct kvc_prefix_stats {
    int64_t links, bytes, pinned;        /* current; bytes: size of the slots of their pages */
    int64_t offloaded;                   /* links without pages */
    int64_t hits, hit_tokens, hit_bytes; /* of kvc_prefix_take: calls that found links, their tokens and bytes */
    int64_t evicted, collisions;
} kvc_prefix_stats;

/* Holds at most `max_bytes` of pages and `max_links` links (0: any number). The pool is retained. */
kvc_status kvc_prefix_new(kvc_pool *pool, int64_t max_bytes, int64_t max_links, kvc_prefix **out);
void kvc_prefix_free(kvc_prefix *p);
/* Adds missing links. entries: [first_entries], then [later_entries] per link; adds references. *links: number of links of
 * the chain afterwards. After KVC_E_MEMORY the chain may be shorter, but is valid. */
kvc_status kvc_prefix_put(kvc_prefix *p, const kvc_chain *chain, const int64_t *entries, int64_t *links);
/* Returns the number of known links of the chain; writes their entries, each with a reference for the caller. */
int64_t kvc_prefix_take(kvc_prefix *p, const kvc_chain *chain, int64_t *entries);
/* Returns the same number without writing or referencing entries; counts only collisions. */
int64_t kvc_prefix_find(kvc_prefix *p, const kvc_chain *chain);
/* Pins (by 1) or unpins (by -1) the known links of the chain; returns their number. Does not unpin below 0. */
int64_t kvc_prefix_pin(kvc_prefix *p, const kvc_chain *chain, int by);
/* Evicts ends of chains until it holds at most `max_bytes` and `max_links`; pinned links stay. */
void kvc_prefix_trim(kvc_prefix *p, int64_t max_bytes, int64_t max_links);

/* Offloading. An offloaded link is known but has no pages; nor have its children. For take, find and pin the chain ends
 * before it; put restores it. Ids of links are never reused. */
typedef struct kvc_link_info {
    int64_t id, n_entries, parent; /* parent: id of the parent; 0: none */
    uint8_t root[KVC_DIGEST];
    bool offloaded;
} kvc_link_info;
/* The least recently used link that is not pinned (with `here`: nor offloaded). False if there is none. */
bool kvc_prefix_oldest(kvc_prefix *p, bool here, kvc_link_info *found);
/* Entries of a link, each with a reference for the caller. False unless the link exists and has n pages. */
bool kvc_prefix_entries(kvc_prefix *p, int64_t id, int64_t n, int64_t *entries);
/* Drops the pages of a link. False if it does not exist, is pinned or offloaded, or has children with pages. */
bool kvc_prefix_offload(kvc_prefix *p, int64_t id);
/* Restores the pages of an offloaded link; adds references. False if it does not exist, or its parent is offloaded. */
bool kvc_prefix_bring(kvc_prefix *p, int64_t id, int64_t n, const int64_t *entries);
/* Removes a link, offloaded or not. False if it does not exist, is pinned, or has children. */
bool kvc_prefix_forget(kvc_prefix *p, int64_t id);
/* Offloaded links of a chain, in order: ids [number of links of its tokens]. Returns how many. */
int64_t kvc_prefix_offloaded(kvc_prefix *p, const kvc_chain *chain, int64_t *ids);

void kvc_prefix_get_stats(kvc_prefix *p, kvc_prefix_stats *stats);
/* For tests: shortens digests to their first n bytes; 0 to KVC_DIGEST. */
void kvc_prefix_weaken(kvc_prefix *p, int bytes);
/* For tests: checks every invariant. */
kvc_status kvc_prefix_check(kvc_prefix *p);

#ifdef __cplusplus
}
#endif
#ifdef KVC_EXPORT
#pragma GCC visibility pop
#endif

#endif
