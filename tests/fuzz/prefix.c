/* prefix.c - the prefix index under any order of calls, with weak digests that collide: taken pages are those put, or
 * brought back, for the same tokens, and no reference is lost. */
#include "input.h"

#include "memory/reclaim.h"
#include "prefix.h"

enum { STEPS = 6, STEP = 4, PAGE = 256 };

/* The page of the chain's link i; path: its tokens. */
static int64_t page_of(kvc_pool *pool, const kvc_chain *chain, int64_t i, uint8_t path)
{
    int64_t offset;
    kvc_status status = kvc_pool_alloc(pool, PAGE, &offset);
    kvc_alloc_fail_at(status == KVC_OK ? 0 : -1);
    if (status != KVC_OK) OK(kvc_pool_alloc(pool, PAGE, &offset));
    uint8_t *page = kvc_pool_base(pool) + offset;
    page[0] = chain->root[0], page[1] = (uint8_t)i, page[2] = path & (uint8_t)((2 << i) - 1);
    return kvc_entry(offset, 0, 0);
}

static void offloading(kvc_prefix *p, kvc_pool *pool, const kvc_chain *chain, int how, uint8_t path)
{
    kvc_link_info oldest;
    int64_t ids[STEPS + 1], links = kvc_prefix_find(p, chain), offloaded = kvc_prefix_offloaded(p, chain, ids), entry;
    CHECK(links + offloaded <= chain->n / STEP);
    bool any = kvc_prefix_oldest(p, how & 8, &oldest);
    CHECK(!any || oldest.n_entries == 1);
    switch (how % 4) {
    case 1:
        if (any && kvc_prefix_entries(p, oldest.id, 1, &entry)) kvc_pool_unref(pool, kvc_entry_offset(entry));
        if (any) kvc_prefix_offload(p, oldest.id);
        break;
    case 2:
        for (int64_t i = 0; i < offloaded; i++) {
            entry = page_of(pool, chain, links + i, path);
            bool came = kvc_prefix_bring(p, ids[i], 1, &entry);
            kvc_pool_unref(pool, kvc_entry_offset(entry));
            if (!came) break;
            CHECK(!kvc_prefix_bring(p, ids[i], 1, &entry));
        }
        break;
    case 3: CHECK(!(any && kvc_prefix_forget(p, oldest.id)) || !kvc_prefix_forget(p, oldest.id)); break;
    default: CHECK(!kvc_prefix_offload(p, -1) && !kvc_prefix_entries(p, -1, 1, &entry));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static kvc_pool *pool;
    if (!pool) OK(kvc_pool_new(64 * MB, &pool));
    input in = {data, data + size};
    kvc_prefix *p;
    OK(kvc_prefix_new(pool, PAGE * (1 + below(&in, 20)), below(&in, 9), &p));
    kvc_prefix_weaken(p, (int)below(&in, 3));
    for (int step = 0; step < 60 && in.at < in.end; step++) {
        int64_t tokens[STEPS * STEP + 4], entries[STEPS + 1], links, n = below(&in, STEPS * STEP + 4);
        uint8_t what = byte(&in), path = byte(&in);
        for (int64_t i = 0; i < n; i++) tokens[i] = path >> (i / STEP) & 1; /* a binary tree of prompts */
        kvc_chain chain = {
            .tokens = tokens, .n = n, .first = STEP, .step = STEP, .first_entries = 1, .later_entries = 1};
        chain.root[0] = what >> 6;
        kvc_alloc_fail_at(below(&in, 8) ? 0 : 1 + below(&in, 4));
        switch (what % 6) {
        case 0:
        case 1:
            for (int64_t i = 0; i < n / STEP; i++) entries[i] = page_of(pool, &chain, i, path);
            kvc_prefix_put(p, &chain, entries, &links);
            for (int64_t i = 0; i < n / STEP; i++) kvc_pool_unref(pool, kvc_entry_offset(entries[i]));
            break;
        case 2:
            links = kvc_prefix_take(p, &chain, entries);
            CHECK(links <= n / STEP);
            for (int64_t i = 0; i < links; i++) {
                const uint8_t *page = kvc_pool_base(pool) + kvc_entry_offset(entries[i]);
                CHECK(page[0] == chain.root[0] && page[1] == i && page[2] == (path & (uint8_t)((2 << i) - 1)));
                kvc_pool_unref(pool, kvc_entry_offset(entries[i]));
            }
            break;
        case 3: kvc_prefix_pin(p, &chain, what & 8 ? 1 : -1); break;
        case 4:
            if (what & 8)
                kvc_pool_reclaim(pool); /* as if the pool were full */
            else
                kvc_prefix_trim(p, number(&in), number(&in));
            break;
        default: offloading(p, pool, &chain, what >> 3, path);
        }
        kvc_alloc_fail_at(0);
        OK(kvc_prefix_check(p));
    }
    kvc_prefix_free(p);
    kvc_pool_stats left;
    kvc_pool_get_stats(pool, &left);
    CHECK(left.slots == 0);
    return 0;
}
