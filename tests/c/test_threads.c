/* test_threads.c - eight threads on one pool and one prefix index, for ThreadSanitizer: everything found was put by
 * some thread, and in the end nothing is left. */
#include "harness.h"
#include "memory/reclaim.h"
#include "prefix.h"
#include "transfer.h"

#include <pthread.h>
#include <stdatomic.h>

#define THREADS 8
#ifndef STEPS
#define STEPS 300
#endif
#define LINKS 4
#define STEP 16
#define PAGE 4096

static kvc_pool *pool;
static kvc_prefix *prefix;
static atomic_llong hits;

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void tokens_of(int64_t prompt, int64_t *tokens)
{
    for (int64_t i = 0; i < LINKS * STEP; i++) tokens[i] = i < STEP ? prompt % 3 : prompt * 7 + i;
}

/* All words of a page identify its link and prompt; prompts with a common prefix share their first link. */
static int64_t word_of(int64_t prompt, int64_t link) { return (link ? prompt : prompt % 3) * 100 + link; }

static kvc_chain chain_of(const int64_t *tokens)
{
    return (kvc_chain){
        .tokens = tokens, .n = LINKS * STEP, .first = STEP, .step = STEP, .first_entries = 1, .later_entries = 1};
}

static void put(int64_t prompt)
{
    int64_t tokens[LINKS * STEP], entries[LINKS], links;
    tokens_of(prompt, tokens);
    kvc_chain chain = chain_of(tokens);
    for (int64_t i = 0; i < LINKS; i++) {
        int64_t offset;
        OK(kvc_pool_alloc(pool, PAGE, &offset));
        int64_t *words = (int64_t *)(void *)(kvc_pool_base(pool) + offset);
        for (int64_t k = 0; k < PAGE / 8; k++) words[k] = word_of(prompt, i);
        entries[i] = kvc_entry(offset, 0, 0);
    }
    OK(kvc_prefix_put(prefix, &chain, entries, &links));
    CHECK(links >= 0 && links <= LINKS);
    for (int64_t i = 0; i < LINKS; i++) kvc_pool_unref(pool, kvc_entry_offset(entries[i]));
}

static void take(int64_t prompt)
{
    int64_t tokens[LINKS * STEP], entries[LINKS];
    uint8_t copy[PAGE];
    tokens_of(prompt, tokens);
    kvc_chain chain = chain_of(tokens);
    int64_t links = kvc_prefix_take(prefix, &chain, entries);
    for (int64_t i = 0; i < links; i++) {
        kvc_piece piece = {kvc_entry_offset(entries[i]), PAGE};
        CHECK(kvc_pool_refs(pool, piece.offset) >= 1 && kvc_pool_bytes(pool, piece.offset) == PAGE);
        kvc_gather(kvc_pool_base(pool), &piece, 1, copy);
        for (int64_t k = 0; k < PAGE / 8; k++) {
            int64_t word;
            memcpy(&word, copy + 8 * k, sizeof word);
            CHECK(word == word_of(prompt, i));
        }
        kvc_pool_unref(pool, piece.offset);
    }
    atomic_fetch_add(&hits, links > 0);
}

/* A table of this thread takes over what is known of a prompt, appends, and is freed. */
static void adopt(int64_t prompt)
{
    int64_t tokens[LINKS * STEP], entries[1 + LINKS] = {KVC_NONE}, rows[2] = {0};
    tokens_of(prompt, tokens);
    kvc_chain chain = chain_of(tokens);
    kvc_table *table, *twin;
    kvc_spec spec = {.heads = 1, .key_dim = 32, .value_dim = 32, .page_size = STEP};
    OK(kvc_table_new(pool, &spec, 1, &table));
    int64_t links = kvc_prefix_take(prefix, &chain, entries + 1);
    rows[0] = links * STEP;
    kvc_contents x = {
        .batch = 1, .table_heads = 1, .columns = 1 + LINKS, .seen = rows[0], .entries = entries, .rows = rows};
    OK(kvc_table_restore(table, &x));
    OK(kvc_table_clone(table, &twin));
    OK(kvc_table_plan(table, 20, NULL));
    kvc_table_commit(table);
    OK(kvc_table_crop(table, rows[0]));
    kvc_table_free(table);
    kvc_table_free(twin);
}

/* The page of the least recently used link is offloaded and brought back, unless another thread has filled or dropped
 * it. */
static void park_and_bring(bool forget)
{
    kvc_link_info oldest;
    int64_t entry;
    uint8_t copy[PAGE];
    if (!kvc_prefix_oldest(prefix, true, &oldest) || !kvc_prefix_entries(prefix, oldest.id, 1, &entry)) return;
    kvc_piece piece = {kvc_entry_offset(entry), PAGE};
    kvc_gather(kvc_pool_base(pool), &piece, 1, copy);
    bool offloaded = kvc_prefix_offload(prefix, oldest.id);
    kvc_pool_unref(pool, piece.offset);
    if (!offloaded || (forget && kvc_prefix_forget(prefix, oldest.id))) return;
    OK(kvc_pool_alloc(pool, PAGE, &piece.offset));
    kvc_scatter(kvc_pool_base(pool), &piece, 1, copy);
    entry = kvc_entry(piece.offset, 0, 0);
    kvc_prefix_bring(prefix, oldest.id, 1, &entry);
    kvc_pool_unref(pool, piece.offset);
}

static void *work(void *argument)
{
    uint64_t state = 88172645463325252u + (uint64_t)(intptr_t)argument * 7919;
    for (int i = 0; i < STEPS; i++) {
        int64_t prompt = (int64_t)(next_random(&state) % 12), tokens[LINKS * STEP], ids[LINKS];
        tokens_of(prompt, tokens);
        kvc_chain chain = chain_of(tokens);
        kvc_prefix_stats stats;
        kvc_pool_stats pool_stats;
        switch (next_random(&state) % 12) {
        case 0:
        case 1: put(prompt); break;
        case 2:
        case 3: take(prompt); break;
        case 4: adopt(prompt); break;
        case 5:
            if (kvc_prefix_pin(prefix, &chain, 1)) kvc_prefix_pin(prefix, &chain, -1);
            break;
        case 6: kvc_prefix_trim(prefix, (int64_t)(next_random(&state) % 20) * PAGE, INT64_MAX); break;
        case 7:
        case 8: park_and_bring(next_random(&state) % 4 == 0); break;
        case 9: CHECK(kvc_prefix_offloaded(prefix, &chain, ids) <= LINKS); break;
        case 10: kvc_pool_reclaim(pool); break; /* as if the pool were full */
        default:
            kvc_prefix_get_stats(prefix, &stats);
            kvc_pool_get_stats(pool, &pool_stats);
            CHECK(stats.bytes <= pool_stats.reserved && kvc_pool_extent(pool) <= pool_stats.reserved);
        }
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];
    kvc_pool_stats stats;
    OK(kvc_pool_new(64 * MB, &pool));
    OK(kvc_prefix_new(pool, 24 * PAGE, 0, &prefix));
    for (intptr_t i = 0; i < THREADS; i++) CHECK(!pthread_create(&threads[i], NULL, work, (void *)i));
    for (int i = 0; i < THREADS; i++) CHECK(!pthread_join(threads[i], NULL));
    OK(kvc_prefix_check(prefix));
    OK(kvc_pool_check(pool));
    CHECK(atomic_load(&hits) > STEPS / 10); /* a third of 8 threads' STEPS are lookups */
    kvc_prefix_free(prefix);
    kvc_pool_get_stats(pool, &stats);
    CHECK(stats.slots == 0 && stats.resident == 0);
    kvc_pool_release(pool);
    CHECK(kvc_alloc_live() == 0);
    puts("ok");
    return 0;
}
