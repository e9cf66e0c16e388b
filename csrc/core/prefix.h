/* prefix.h - the prefix index: sealed pages that prompts begin with, for whoever asks with the same tokens.
 *
 * A chain is a root (the digest of all but the tokens that pages depend on: model, formats, policy, options, salt) and
 * tokens in steps of a page; link k is known by SHA-256 over the digest of link k-1 (or the root) and its own tokens.
 * Tokens are compared too: a collision of digests is a miss. Links hold a reference to each of their pages. The least
 * recently used chain ends go first; pinned ones never. Thread safe.
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
    int64_t links, bytes, pinned;        /* held now; bytes: of their pages' slots */
    int64_t offloaded;                   /* links without pages */
    int64_t hits, hit_tokens, hit_bytes; /* of kvc_prefix_take: calls that found something, and what */
    int64_t evicted, collisions;
} kvc_prefix_stats;

/* Holds at most `max_bytes` of pages and `max_links` links (0: any number). The pool is retained. */
kvc_status kvc_prefix_new(kvc_pool *pool, int64_t max_bytes, int64_t max_links, kvc_prefix **out);
void kvc_prefix_free(kvc_prefix *p);
/* Adds the links that are missing; entries: [first_entries], then [later_entries] a link, which are referenced. *links:
 * how many of the chain are there afterwards. After KVC_E_MEMORY the chain may be shorter, never wrong. */
kvc_status kvc_prefix_put(kvc_prefix *p, const kvc_chain *chain, const int64_t *entries, int64_t *links);
/* Length in links of what is known of the chain; writes its entries, each with a reference for the caller. */
int64_t kvc_prefix_take(kvc_prefix *p, const kvc_chain *chain, int64_t *entries);
/* The same length; nothing is written or referenced, and nothing counted but collisions. */
int64_t kvc_prefix_find(kvc_prefix *p, const kvc_chain *chain);
/* Pins (by 1) or unpins (-1) what is known of the chain; its length in links. Unpinning what is not pinned does nothing. */
int64_t kvc_prefix_pin(kvc_prefix *p, const kvc_chain *chain, int by);
/* Lets chain ends go until it holds at most so many bytes and links; pinned ones stay. */
void kvc_prefix_trim(kvc_prefix *p, int64_t max_bytes, int64_t max_links);

/* Offloading. A link whose pages wait elsewhere is offloaded: it is known, and has none; nor has what hangs on it. To take, find
 * and pin its chain ends before it; put fills it. Links have ids, which never return. */
typedef struct kvc_link_info {
    int64_t id, n_entries, parent; /* parent: id of what it hangs on; 0: nothing */
    uint8_t root[KVC_DIGEST];
    bool offloaded;
} kvc_link_info;
/* The least recently used link that is not pinned (here: nor offloaded). False if there is none. */
bool kvc_prefix_oldest(kvc_prefix *p, bool here, kvc_link_info *found);
/* Entries of a link, each with a reference for the caller. False if no link with pages, and with n of them, has this id. */
bool kvc_prefix_entries(kvc_prefix *p, int64_t id, int64_t n, int64_t *entries);
/* Drops the pages of a link. False if it is pinned, offloaded, gone, or links with pages hang on it. */
bool kvc_prefix_offload(kvc_prefix *p, int64_t id);
/* A offloaded link has pages again, with references of its own. False if there is none such, or it hangs on a offloaded one. */
bool kvc_prefix_bring(kvc_prefix *p, int64_t id, int64_t n, const int64_t *entries);
/* Forgets a link, offloaded or not. False if it is pinned, gone, or links hang on it. */
bool kvc_prefix_forget(kvc_prefix *p, int64_t id);
/* Parked links of a chain, in order: ids [links that its tokens are enough for]; how many. */
int64_t kvc_prefix_offloaded(kvc_prefix *p, const kvc_chain *chain, int64_t *ids);

void kvc_prefix_get_stats(kvc_prefix *p, kvc_prefix_stats *stats);
/* Tests: digests keep their first n bytes only; 0 to KVC_DIGEST. */
void kvc_prefix_weaken(kvc_prefix *p, int bytes);
/* Tests: checks every invariant. */
kvc_status kvc_prefix_check(kvc_prefix *p);

#ifdef __cplusplus
}
#endif
#ifdef KVC_EXPORT
#pragma GCC visibility pop
#endif

#endif
