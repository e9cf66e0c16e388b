/* test_prefix.c - a full pool and an index that holds pages of it: what is evicted, in which order, and what stays.
 * (Lookups are tested from Python and by fuzzing.) */
#include "harness.h"
#include "prefix.h"

enum { PAGE = 64 << 10, SLOTS = MB / PAGE, TOKENS = 4, LINKS = 4 };

static kvc_pool *pool;

static kvc_chain chain_of(const int64_t *tokens)
{
    return (kvc_chain){
        .tokens = tokens, .n = LINKS * TOKENS, .first = TOKENS, .step = TOKENS, .first_entries = 1, .later_entries = 1};
}

static void name_tokens(int64_t prompt, int64_t *tokens)
{
    for (int64_t i = 0; i < LINKS * TOKENS; i++) tokens[i] = 100 * prompt + i;
}

static int64_t find(kvc_prefix *p, int64_t prompt)
{
    int64_t tokens[LINKS * TOKENS];
    name_tokens(prompt, tokens);
    kvc_chain chain = chain_of(tokens);
    return kvc_prefix_find(p, &chain);
}

/* LINKS pages, held only by the index. */
static void put(kvc_prefix *p, int64_t prompt)
{
    int64_t tokens[LINKS * TOKENS], entries[LINKS], links;
    name_tokens(prompt, tokens);
    kvc_chain chain = chain_of(tokens);
    for (int i = 0; i < LINKS; i++) {
        OK(kvc_pool_alloc(pool, PAGE, &entries[i]));
        entries[i] = kvc_entry(entries[i], 0, 0);
    }
    OK(kvc_prefix_put(p, &chain, entries, &links));
    CHECK(links == LINKS);
    for (int i = 0; i < LINKS; i++) kvc_pool_unref(pool, kvc_entry_offset(entries[i]));
}

static int64_t evicted(kvc_prefix *p)
{
    kvc_prefix_stats stats;
    kvc_prefix_get_stats(p, &stats);
    return stats.evicted;
}

void test_prefixes(void)
{
    kvc_prefix *a, *b;
    int64_t tokens[LINKS * TOKENS], taken[LINKS], own[SLOTS], ids[LINKS];
    OK(kvc_pool_new(MB, &pool));
    OK(kvc_prefix_new(pool, 0, 0, &a));
    OK(kvc_prefix_new(pool, 0, 0, &b));
    for (int64_t i = 0; i < 3; i++) put(a, i); /* 12 of 16 slots */
    put(b, 9);                                 /* all of them */
    name_tokens(0, tokens);
    kvc_chain chain = chain_of(tokens);
    CHECK(kvc_prefix_take(a, &chain, taken) == LINKS); /* another user holds 0: evicting it would free no pages */
    name_tokens(1, tokens);
    CHECK(kvc_prefix_pin(a, &chain, 1) == LINKS);

    /* b was created last and is asked first: ends of its chain are evicted, a page each; then those of a without other
     * users. */
    for (int i = 0; i < LINKS; i++) {
        OK(kvc_pool_alloc(pool, PAGE, &own[i]));
        CHECK(find(b, 9) == LINKS - 1 - i && evicted(b) == i + 1 && evicted(a) == 0);
    }
    for (int i = 0; i < LINKS; i++) {
        OK(kvc_pool_alloc(pool, PAGE, &own[LINKS + i]));
        CHECK(find(a, 2) == LINKS - 1 - i && find(a, 0) == LINKS && find(a, 1) == LINKS);
    }
    int64_t offset = 7;
    FAILS(KVC_E_MEMORY, "pool is full", kvc_pool_alloc(pool, PAGE, &offset));
    FAILS(KVC_E_MEMORY, "in one piece", kvc_pool_alloc(pool, 2 * MB, &offset));
    CHECK(offset == 7 && find(a, 0) == LINKS && find(a, 1) == LINKS && evicted(a) == LINKS);

    /* A link that alone holds its pages, with an offloaded child: it loses its pages, but stays. */
    name_tokens(0, tokens);
    for (int i = 0; i < LINKS; i++) kvc_pool_unref(pool, kvc_entry_offset(taken[i]));
    kvc_link_info info;
    CHECK(kvc_prefix_oldest(a, true, &info) && kvc_prefix_offload(a, info.id));
    for (int i = 0; i < 2; i++)
        OK(kvc_pool_alloc(pool, PAGE, &own[2 * LINKS + i])); /* the free slot, and an evicted one */
    CHECK(find(a, 0) == LINKS - 2 && kvc_prefix_offloaded(a, &chain, ids) == 2 && ids[1] == info.id);
    OK(kvc_prefix_check(a));

    name_tokens(1, tokens);
    CHECK(kvc_prefix_pin(a, &chain, -1) == LINKS);
    kvc_prefix_free(b); /* a freed index is not asked */
    for (int i = 10; i < SLOTS; i++) OK(kvc_pool_alloc(pool, PAGE, &own[i]));
    FAILS(KVC_E_MEMORY, "pool is full", kvc_pool_alloc(pool, PAGE, &offset));
    CHECK(find(a, 0) == 0 && find(a, 1) == 0);
    OK(kvc_prefix_check(a));
    kvc_prefix_free(a);
    FAILS(KVC_E_MEMORY, "pool is full", kvc_pool_alloc(pool, PAGE, &offset));
    for (int i = 0; i < SLOTS; i++) kvc_pool_unref(pool, own[i]);
    OK(kvc_pool_check(pool));
    kvc_pool_release(pool);
}
