/* prefix.c - links of chains in a hash table and in LRU order. Use of a chain marks its links as used from the end to
 * the start, so the least recently used link is always the end of a chain. */
#include "base/alloc.h"
#include "memory/prefix_link.h"

#include <string.h>

typedef kvc_link link;
typedef kvc_walk walk;

kvc_status kvc_prefix_new(kvc_pool *pool, int64_t max_bytes, int64_t max_links, kvc_prefix **out)
{
    kvc_prefix *p;
    *out = NULL;
    KVC_CHECK(max_bytes >= 0 && max_links >= 0, KVC_E_VALUE,
              "prefix: expected max_bytes and max_entries of at least 0, got %lld and %lld", (long long)max_bytes,
              (long long)max_links);
    KVC_TRY(kvc_alloc(1, sizeof *p, &p));
    *p = (kvc_prefix){.n_buckets = 64, .digest_bytes = KVC_DIGEST};
    p->max_bytes = max_bytes ? max_bytes : INT64_MAX;
    p->max_links = max_links ? max_links : INT64_MAX;
    kvc_status status = kvc_alloc(2 * p->n_buckets, sizeof(link *), &p->buckets);
    if (status != KVC_OK) {
        kvc_free(p);
        return status;
    }
    for (int64_t i = 0; i < 2 * p->n_buckets; i++) p->buckets[i] = NULL;
    p->pool = kvc_pool_retain(pool);
    pthread_mutex_init(&p->lock, NULL);
    p->reclaimer = (kvc_reclaimer){.give = kvc_prefix_give_way, .owner = p};
    kvc_pool_add_reclaimer(pool, &p->reclaimer);
    *out = p;
    return KVC_OK;
}

/* ---------------------------------------------------------------- hash tables and LRU order */

static link **bucket_of(const kvc_prefix *p, const uint8_t *digest)
{
    uint64_t head;
    memcpy(&head, digest, sizeof head);
    return &p->buckets[head & (uint64_t)(p->n_buckets - 1)];
}

static void enter_buckets(kvc_prefix *p, link *l)
{
    link **by_digest = bucket_of(p, l->digest), **by_id = kvc_link_bucket(p, l->id);
    l->next = *by_digest;
    l->next_id = *by_id;
    *by_digest = *by_id = l;
}

static void leave_buckets(kvc_prefix *p, link *l)
{
    link **at = bucket_of(p, l->digest);
    while (*at != l) at = &(*at)->next;
    *at = l->next;
    for (at = kvc_link_bucket(p, l->id); *at != l;) at = &(*at)->next_id;
    *at = l->next_id;
}

static void leave_order(kvc_prefix *p, link *l)
{
    *(l->older ? &l->older->newer : &p->orders[l->offloaded].oldest) = l->newer;
    *(l->newer ? &l->newer->older : &p->orders[l->offloaded].newest) = l->older;
}

/* Inserts a link by its last use. The search is short: links are offloaded when they are older than all others with
 * pages, and are then newer than those offloaded before; brought back, they are among the oldest again. */
static void enter_order(kvc_prefix *p, link *l)
{
    link *older = p->orders[l->offloaded].newest, *newer = NULL;
    if (l->offloaded || (older && older->used < l->used)) {
        for (; older && older->used > l->used; older = older->older) newer = older;
    } else {
        for (newer = p->orders[0].oldest, older = NULL; newer && newer->used < l->used; newer = newer->newer)
            older = newer;
    }
    l->older = older;
    l->newer = newer;
    *(older ? &older->newer : &p->orders[l->offloaded].oldest) = l;
    *(newer ? &newer->older : &p->orders[l->offloaded].newest) = l;
}

void kvc_prefix_touch(kvc_prefix *p, link *l)
{
    for (; l; l = l->parent) {
        leave_order(p, l);
        l->used = ++p->clock;
        enter_order(p, l);
    }
}

/* Doubles the buckets if memory is available; without it, lookups are only slower. */
static void widen(kvc_prefix *p)
{
    link **old = p->buckets, **buckets;
    int64_t n = p->n_buckets;
    if (p->stats.links < n || kvc_alloc(4 * n, sizeof(link *), &buckets) != KVC_OK) return;
    for (int64_t i = 0; i < 4 * n; i++) buckets[i] = NULL;
    p->buckets = buckets;
    p->n_buckets = 2 * n;
    for (int64_t i = 0; i < n; i++)
        for (link *l = old[i], *next; l; l = next) {
            next = l->next;
            enter_buckets(p, l);
        }
    kvc_free(old);
}

kvc_status kvc_prefix_give(kvc_prefix *p, link *l, const int64_t *entries)
{
    for (int64_t i = 0; i < l->n_entries; i++)
        KVC_CHECK(entries[i] >= 0 && kvc_pool_refs(p->pool, kvc_entry_offset(entries[i])) > 0, KVC_E_VALUE,
                  "prefix: expected pages of its pool, got entry %lld", (long long)entries[i]);
    memcpy(kvc_link_entries(l), entries, (size_t)l->n_entries * sizeof *l->data);
    l->bytes = 0;
    for (int64_t i = 0; i < l->n_entries; i++) {
        kvc_pool_ref(p->pool, kvc_entry_offset(entries[i]));
        l->bytes += kvc_pool_bytes(p->pool, kvc_entry_offset(entries[i]));
    }
    p->stats.bytes += l->bytes;
    if (l->parent) l->parent->resident_children++;
    if (!l->offloaded) return KVC_OK; /* a new link */
    leave_order(p, l);
    p->stats.offloaded--;
    l->offloaded = false;
    enter_order(p, l);
    return KVC_OK;
}

static void release(kvc_prefix *p, link *l)
{
    for (int64_t i = 0; i < l->n_entries; i++) kvc_pool_unref(p->pool, kvc_entry_offset(kvc_link_entries(l)[i]));
    p->stats.bytes -= l->bytes;
    l->bytes = 0;
    if (l->parent) l->parent->resident_children--;
}

void kvc_prefix_strip(kvc_prefix *p, link *l)
{
    release(p, l);
    leave_order(p, l);
    p->stats.offloaded++;
    l->offloaded = true;
    enter_order(p, l);
}

void kvc_prefix_drop_link(kvc_prefix *p, link *l)
{
    if (!l->offloaded) release(p, l);
    p->stats.offloaded -= l->offloaded;
    p->stats.links--;
    if (l->parent) l->parent->children--;
    leave_order(p, l);
    leave_buckets(p, l);
    kvc_free(l);
}

static void trim(kvc_prefix *p, int64_t max_bytes, int64_t max_links)
{
    link *here = p->orders[0].oldest, *offloaded = p->orders[1].oldest;
    while ((here || offloaded) && (p->stats.bytes > max_bytes || p->stats.links > max_links)) {
        link *l = !offloaded || (here && here->used < offloaded->used) ? here : offloaded;
        *(l == here ? &here : &offloaded) = l->newer;
        if (l->pins) continue; /* then all its parents are pinned, too */
        kvc_prefix_drop_link(p, l);
        p->stats.evicted++;
    }
}

/* ---------------------------------------------------------------- chains */

static void digest_link(const kvc_prefix *p, const uint8_t *before, const int64_t *tokens, int64_t n, uint8_t *digest)
{
    kvc_sha256 h;
    kvc_sha256_begin(&h);
    kvc_sha256_add(&h, before, KVC_DIGEST);
    for (int64_t i = 0; i < n; i += 8) {
        uint8_t bytes[64]; /* little endian on any machine */
        int64_t some = n - i < 8 ? n - i : 8;
        for (int64_t j = 0; j < 8 * some; j++) bytes[j] = (uint8_t)((uint64_t)tokens[i + j / 8] >> (8 * (j % 8)));
        kvc_sha256_add(&h, bytes, 8 * some);
    }
    kvc_sha256_end(&h, digest);
    memset(digest + p->digest_bytes, 0, (size_t)(KVC_DIGEST - p->digest_bytes));
}

static int64_t size_of_next(const walk *w) { return w->last ? w->chain->step : w->chain->first; }

bool kvc_prefix_next(kvc_prefix *p, walk *w, link **found)
{
    int64_t n = size_of_next(w), entries = w->last ? w->chain->later_entries : w->chain->first_entries;
    const int64_t *tokens = w->chain->tokens + w->at;
    *found = NULL;
    if (n > w->chain->n - w->at) return false;
    digest_link(p, w->last ? w->last->digest : w->chain->root, tokens, n, w->digest);
    for (link *l = *bucket_of(p, w->digest); l; l = l->next) {
        if (memcmp(l->digest, w->digest, KVC_DIGEST) != 0) continue;
        bool same = l->parent == w->last && l->n_tokens == n && l->n_entries == entries &&
                    !memcmp(l->data, tokens, (size_t)n * sizeof *tokens) &&
                    !memcmp(l->root, w->chain->root, KVC_DIGEST);
        if (same)
            *found = l;
        else
            w->clash = true;
        return true;
    }
    return true;
}

int64_t kvc_prefix_go(kvc_prefix *p, walk *w, const kvc_chain *chain)
{
    int64_t links = 0;
    *w = (walk){.chain = chain};
    for (link *l; kvc_prefix_next(p, w, &l) && l && !l->offloaded; links++) kvc_walk_on(w, l);
    p->stats.collisions += w->clash;
    return links;
}

static kvc_status add(kvc_prefix *p, walk *w, const int64_t *entries)
{
    link *l;
    int64_t n = size_of_next(w), n_entries = w->last ? w->chain->later_entries : w->chain->first_entries;
    KVC_TRY(kvc_alloc(1, (int64_t)sizeof *l + (n + n_entries) * (int64_t)sizeof *l->data, &l));
    *l = (link){.parent = w->last, .n_tokens = n, .n_entries = n_entries};
    kvc_status status = kvc_prefix_give(p, l, entries);
    if (status != KVC_OK) {
        kvc_free(l);
        return status;
    }
    l->id = ++p->last_id;
    memcpy(l->digest, w->digest, KVC_DIGEST);
    memcpy(l->root, w->chain->root, KVC_DIGEST);
    memcpy(l->data, w->chain->tokens + w->at, (size_t)n * sizeof *l->data);
    l->used = ++p->clock;
    widen(p);
    enter_buckets(p, l);
    enter_order(p, l);
    if (w->last) w->last->children++;
    p->stats.links++;
    kvc_walk_on(w, l);
    return KVC_OK;
}

kvc_status kvc_chain_check(const kvc_chain *c)
{
    KVC_CHECK(c->n >= 0 && c->first >= 1 && c->step >= 1 && c->first_entries >= 1 && c->later_entries >= 1, KVC_E_VALUE,
              "prefix: expected links of at least 1 token and 1 page, got %lld and %lld tokens", (long long)c->first,
              (long long)c->step);
    return KVC_OK;
}

kvc_status kvc_prefix_put(kvc_prefix *p, const kvc_chain *chain, const int64_t *entries, int64_t *links)
{
    walk w;
    link *known;
    kvc_status status = KVC_OK;
    *links = 0;
    KVC_TRY(kvc_chain_check(chain));
    pthread_mutex_lock(&p->lock);
    int64_t n = kvc_prefix_go(p, &w, chain);
    while (!w.clash && status == KVC_OK && kvc_prefix_next(p, &w, &known) && !w.clash) {
        const int64_t *own = entries + (n ? chain->first_entries + (n - 1) * chain->later_entries : 0);
        status = known ? kvc_prefix_give(p, known, own) : add(p, &w, own);
        if (known && status == KVC_OK) kvc_walk_on(&w, known);
        n += status == KVC_OK;
    }
    kvc_prefix_touch(p, w.last);
    trim(p, p->max_bytes, p->max_links);
    *links = kvc_prefix_go(p, &w, chain); /* trim may have removed the end of a chain that exceeds the limits */
    pthread_mutex_unlock(&p->lock);
    return status;
}

int64_t kvc_prefix_take(kvc_prefix *p, const kvc_chain *chain, int64_t *entries)
{
    walk w;
    if (kvc_chain_check(chain) != KVC_OK) return 0;
    pthread_mutex_lock(&p->lock);
    int64_t links = kvc_prefix_go(p, &w, chain), end = links;
    kvc_prefix_touch(p, w.last);
    for (link *l = w.last; l; l = l->parent) {
        end--;
        int64_t *to = entries + (end ? chain->first_entries + (end - 1) * chain->later_entries : 0);
        for (int64_t i = 0; i < l->n_entries; i++) {
            to[i] = kvc_link_entries(l)[i];
            /* while the lock is held: afterwards the link may be freed */
            kvc_pool_ref(p->pool, kvc_entry_offset(to[i]));
        }
        p->stats.hit_bytes += l->bytes;
    }
    p->stats.hits += links > 0;
    p->stats.hit_tokens += w.at;
    pthread_mutex_unlock(&p->lock);
    return links;
}

int64_t kvc_prefix_find(kvc_prefix *p, const kvc_chain *chain)
{
    walk w;
    if (kvc_chain_check(chain) != KVC_OK) return 0;
    pthread_mutex_lock(&p->lock);
    int64_t links = kvc_prefix_go(p, &w, chain);
    pthread_mutex_unlock(&p->lock);
    return links;
}

int64_t kvc_prefix_pin(kvc_prefix *p, const kvc_chain *chain, int by)
{
    walk w;
    if (kvc_chain_check(chain) != KVC_OK) return 0;
    pthread_mutex_lock(&p->lock);
    int64_t links = kvc_prefix_go(p, &w, chain);
    if (by < 0) /* the chain may have grown since it was pinned */
        while (w.last && !w.last->ends) w.last = w.last->parent;
    if (w.last) w.last->ends += by;
    for (link *l = w.last; l; l = l->parent) {
        p->stats.pinned -= l->pins > 0;
        l->pins += by;
        p->stats.pinned += l->pins > 0;
    }
    pthread_mutex_unlock(&p->lock);
    return links;
}

void kvc_prefix_trim(kvc_prefix *p, int64_t max_bytes, int64_t max_links)
{
    pthread_mutex_lock(&p->lock);
    trim(p, max_bytes, max_links);
    pthread_mutex_unlock(&p->lock);
}

void kvc_prefix_get_stats(kvc_prefix *p, kvc_prefix_stats *stats)
{
    pthread_mutex_lock(&p->lock);
    *stats = p->stats;
    pthread_mutex_unlock(&p->lock);
}

void kvc_prefix_weaken(kvc_prefix *p, int bytes) { p->digest_bytes = bytes; }

void kvc_prefix_free(kvc_prefix *p)
{
    if (!p) return;
    kvc_pool_remove_reclaimer(p->pool, &p->reclaimer);
    for (int i = 1; i >= 0; i--) /* links without pages first: their parents may have some, their children do not */
        while (p->orders[i].oldest) kvc_prefix_drop_link(p, p->orders[i].oldest);
    pthread_mutex_destroy(&p->lock);
    kvc_pool_release(p->pool);
    kvc_free(p->buckets);
    kvc_free(p);
}

/* ---------------------------------------------------------------- invariants */

typedef struct totals {
    int64_t links, bytes, pinned, offloaded, children, resident_children, hanging;
} totals;

static kvc_status check_link(const kvc_prefix *p, link *l, totals *all)
{
    link *found = *kvc_link_bucket(p, l->id);
    while (found && found != l) found = found->next_id;
    KVC_CHECK(found, KVC_E_VALUE, "prefix: a link is not found by its id");
    KVC_CHECK(l->newer ? l->newer->older == l && l->newer->used > l->used : p->orders[l->offloaded].newest == l,
              KVC_E_VALUE, "prefix: its LRU list is broken");
    KVC_CHECK(!l->parent || l->parent->used > l->used, KVC_E_VALUE, "prefix: a link was used later than its parent");
    KVC_CHECK(!l->parent || l->parent->pins >= l->pins, KVC_E_VALUE, "prefix: a pinned link has an unpinned parent");
    KVC_CHECK(!l->offloaded || !(l->resident_children || l->pins || l->bytes), KVC_E_VALUE,
              "prefix: an offloaded link or a child of it has pages");
    for (int64_t e = 0; !l->offloaded && e < l->n_entries; e++)
        KVC_CHECK(kvc_pool_refs(p->pool, kvc_entry_offset(kvc_link_entries(l)[e])) > 0, KVC_E_VALUE,
                  "prefix: a page was freed");
    all->links++;
    all->bytes += l->bytes;
    all->pinned += l->pins > 0;
    all->offloaded += l->offloaded;
    all->children += l->children;
    all->hanging += l->parent != NULL;
    all->resident_children += l->resident_children - (l->parent && !l->offloaded);
    return KVC_OK;
}

static kvc_status check_all(kvc_prefix *p)
{
    totals all = {0};
    int64_t listed = 0;
    for (int64_t i = 0; i < p->n_buckets; i++)
        for (link *l = p->buckets[i]; l; l = l->next) listed++;
    for (int i = 0; i < 2; i++)
        for (link *l = p->orders[i].oldest; l; l = l->newer) {
            KVC_CHECK(l->offloaded == i, KVC_E_VALUE, "prefix: a link is in the wrong LRU list");
            KVC_TRY(check_link(p, l, &all));
        }
    KVC_CHECK(all.links == p->stats.links && all.links == listed && all.bytes == p->stats.bytes &&
                  all.pinned == p->stats.pinned && all.offloaded == p->stats.offloaded && all.children == all.hanging &&
                  !all.resident_children,
              KVC_E_VALUE, "prefix: its totals are wrong");
    return KVC_OK;
}

kvc_status kvc_prefix_check(kvc_prefix *p)
{
    pthread_mutex_lock(&p->lock);
    kvc_status status = check_all(p);
    pthread_mutex_unlock(&p->lock);
    return status;
}
