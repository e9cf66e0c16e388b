/* test_space.c - the address space shared by pools: blocks are disjoint, aligned and usable, freed blocks are merged;
 * pools in it do not affect each other. */
#include "base/system.h"
#include "harness.h"
#include "kvc.h"
#include "memory/space.h"

enum { BLOCKS = 200, ORDER = 9, POOLS = 3, SLOTS = 400 };

static int64_t bytes_of(int order) { return SPACE_UNIT << order; }

/* Blocks of all orders come and go. The first and last byte of each identify it. */
static void test_blocks(void)
{
    static int64_t first[BLOCKS];
    static int order[BLOCKS];
    static bool taken[BLOCKS];
    const kvc_space *space;
    int64_t none, most = 0;
    OK(kvc_space_get(&space));
    int64_t room = kvc_system_space() / 2, twice = 2 * kvc_system_memory();
    CHECK(space->bytes >= (room < twice ? room : twice) / 2); /* unless the system has less address space */
    for (int walk = 0; walk < 4000; walk++) {
        int i = (int)random_below(BLOCKS);
        uint8_t *at = space->base + first[i] * SPACE_UNIT;
        if (taken[i]) {
            CHECK(at[0] == (uint8_t)i && at[bytes_of(order[i]) - 1] == (uint8_t)i);
            kvc_space_give(first[i], order[i]);
            taken[i] = false;
            continue;
        }
        order[i] = (int)random_below(ORDER);
        kvc_alloc_fail_at(random_below(4) ? 0 : 1);
        kvc_status status = kvc_space_take(order[i], &first[i]);
        kvc_alloc_fail_at(0);
        if (status != KVC_OK) { /* only if more had to become accessible */
            CHECK(status == KVC_E_MEMORY && first[i] == -1 && strstr(kvc_error(), "the system refused"));
            continue;
        }
        CHECK(first[i] >= 0 && first[i] % ((int64_t)1 << order[i]) == 0);
        at = space->base + first[i] * SPACE_UNIT;
        at[0] = at[bytes_of(order[i]) - 1] = (uint8_t)i;
        taken[i] = true;
        if (first[i] + ((int64_t)1 << order[i]) > most) most = first[i] + ((int64_t)1 << order[i]);
    }
    for (int i = 0; i < BLOCKS; i++)
        if (taken[i]) kvc_space_give(first[i], order[i]);
    OK(kvc_space_take(ORDER, &none)); /* all merged again: their range has room for it */
    CHECK(none >= 0 && none < most);
    kvc_space_give(none, ORDER);
    for (int more = 0; more < 3; more++) { /* more than exists, or can exist */
        OK(kvc_space_take(30 + more, &none));
        CHECK(none == -1);
    }
    kvc_alloc_fail_at(1);
    FAILS(KVC_E_MEMORY, "no address space for a pool", kvc_space_get(&space));
    kvc_alloc_fail_at(0);
}

/* Slots of three pools come and go, without sharing bytes. */
static void test_pools_side_by_side(void)
{
    static const int64_t sizes[] = {64, 100, 4096, 20 * 1024, 300 * 1024, 2 * MB};
    static int64_t offset[POOLS][SLOTS], bytes[POOLS][SLOTS];
    kvc_pool *pool[POOLS];
    kvc_pool_stats stats;
    int64_t live = kvc_alloc_live(), some;
    for (int p = 0; p < POOLS; p++) OK(kvc_pool_new_shared(&pool[p]));
    CHECK(kvc_pool_base(pool[0]) == kvc_pool_base(pool[1]));
    for (int walk = 0; walk < 8000; walk++) {
        int p = (int)random_below(POOLS), i = (int)random_below(walk < 6000 ? SLOTS : SLOTS / 8);
        uint8_t *at = kvc_pool_base(pool[p]) + offset[p][i], mark = (uint8_t)(p * 85 + i % 85);
        if (bytes[p][i]) {
            CHECK(at[0] == mark && at[bytes[p][i] - 1] == mark && kvc_pool_refs(pool[p], offset[p][i]) == 1);
            /* it knows nothing of another pool's slab */
            CHECK(kvc_pool_bytes(pool[(p + 1) % POOLS], offset[p][i]) == 0);
            kvc_pool_unref(pool[p], offset[p][i]);
            bytes[p][i] = 0;
            continue;
        }
        int64_t size = sizes[random_below(6)];
        kvc_alloc_fail_at(random_below(5) ? 0 : 1 + random_below(6));
        kvc_status status = kvc_pool_alloc(pool[p], size, &offset[p][i]);
        kvc_alloc_fail_at(0);
        CHECK(status == KVC_OK || status == KVC_E_MEMORY);
        if (status != KVC_OK) continue;
        CHECK(offset[p][i] % KVC_ALIGN == 0 && offset[p][i] + size <= kvc_pool_extent(pool[p]));
        at = kvc_pool_base(pool[p]) + offset[p][i];
        at[0] = at[size - 1] = mark;
        bytes[p][i] = size;
        if (walk % 100 == 0) {
            OK(kvc_pool_check(pool[p]));
            OK(kvc_pool_keep(pool[p], walk % 200 ? 4 * MB : 0));
        }
        if (walk % 1000 == 0) kvc_pool_expect(pool[p], walk % 2000 ? 8 * MB : 0);
    }
    for (int p = 0; p < POOLS; p++) {
        OK(kvc_pool_keep(pool[p], 0));
        for (int i = 0; p && i < SLOTS; i++) /* the first one is released with its slots in use */
            if (bytes[p][i]) kvc_pool_unref(pool[p], offset[p][i]);
        OK(kvc_pool_check(pool[p]));
        kvc_pool_get_stats(pool[p], &stats);
        CHECK(!p || (stats.used == 0 && stats.resident == 0 && stats.slabs == 0));
        kvc_pool_release(pool[p]);
    }
    CHECK(kvc_alloc_live() == live);
    OK(kvc_pool_new_shared(&pool[0]));
    OK(kvc_pool_alloc(pool[0], MB, &some));
    FAILS(KVC_E_VALUE, "at least the extent", kvc_pool_limit(pool[0], MB / 2));
    OK(kvc_pool_limit(pool[0], 2 * MB));
    OK(kvc_pool_alloc(pool[0], MB, &some));
    FAILS(KVC_E_MEMORY, "pool is full", kvc_pool_alloc(pool[0], MB, &some));
    FAILS(KVC_E_MEMORY, "pool is full", kvc_pool_alloc(pool[0], (int64_t)1 << 50, &some));
    kvc_pool_release(pool[0]);
    for (int i = 0; i < 2; i++) { /* what a released pool still held is available to the next one */
        OK(kvc_pool_new_shared(&pool[i]));
        OK(kvc_pool_alloc(pool[i], 2 * MB, &offset[i][0]));
        kvc_pool_release(pool[i]);
    }
    CHECK(offset[0][0] == offset[1][0]);
}

/* Slabs have 1, 1, 2, 4, 8 slots. An empty slab stays while the others have fewer than 16 slots, unless the class is
 * unused. */
static void test_empty_slabs(void)
{
    int64_t offset[32];
    kvc_pool *pool;
    kvc_pool_stats stats;
    OK(kvc_pool_new_shared(&pool));
    for (int n = 16; n <= 32; n += 16) {
        for (int i = 0; i < n; i++) OK(kvc_pool_alloc(pool, 64 << 10, &offset[i]));
        kvc_pool_get_stats(pool, &stats);
        CHECK(stats.slabs == (n == 16 ? 5 : 6));
        for (int i = n; i-- > n / 2;) kvc_pool_unref(pool, offset[i]);
        OK(kvc_pool_check(pool));
        kvc_pool_get_stats(pool, &stats);
        CHECK(stats.slabs == 5);
        for (int i = n / 2; i-- > 0;) kvc_pool_unref(pool, offset[i]);
        kvc_pool_get_stats(pool, &stats);
        CHECK(stats.slabs == 0 && stats.resident == 0);
    }
    kvc_pool_release(pool);
}

/* A random walk over sizes, with occasional allocation failures. Every slot contains its own number. */
static void test_walk(bool shared)
{
    enum { N = 600 };
    static const int64_t sizes[] = {1, 64, 65, 4096, 8192, 12 * 1024 + 64, 200 * 1024, 3 << 20};
    static int64_t offsets[N], bytes[N], refs[N];
    int64_t used = 0;
    kvc_pool *pool;
    kvc_pool_stats stats;
    OK(shared ? kvc_pool_new_shared(&pool) : kvc_pool_new(160 << 20, &pool));
    uint8_t *base = kvc_pool_base(pool);
    for (int step = 0; step < 6000; step++) {
        int64_t i = random_below(step < 4000 ? N : N / 8);
        if (!refs[i]) {
            bytes[i] = sizes[random_below(8)];
            kvc_alloc_fail_at(random_below(3) ? 0 : 1 + random_below(6));
            kvc_status status = kvc_pool_alloc(pool, bytes[i], &offsets[i]);
            kvc_alloc_fail_at(0);
            CHECK(status == KVC_OK || status == KVC_E_MEMORY);
            if (status != KVC_OK) continue;
            CHECK(offsets[i] % KVC_ALIGN == 0 && offsets[i] + bytes[i] <= kvc_pool_extent(pool));
            memcpy(base + offsets[i], &i, 1);
            base[offsets[i] + bytes[i] - 1] = (uint8_t)i;
            refs[i] = 1;
            used += kvc_align(bytes[i]);
        } else if (random_below(4) == 0) {
            kvc_pool_ref(pool, offsets[i]);
            refs[i]++;
        } else {
            CHECK(base[offsets[i]] == (uint8_t)i && base[offsets[i] + bytes[i] - 1] == (uint8_t)i);
            CHECK(kvc_pool_refs(pool, offsets[i]) == refs[i]);
            kvc_pool_unref(pool, offsets[i]);
            if (!--refs[i]) used -= kvc_align(bytes[i]);
        }
        if (step % 50) continue;
        OK(kvc_pool_check(pool));
        kvc_pool_get_stats(pool, &stats);
        CHECK(stats.used == used && stats.resident >= used);
    }
    for (int i = 0; i < N; i++)
        for (; refs[i]; refs[i]--) kvc_pool_unref(pool, offsets[i]);
    kvc_pool_get_stats(pool, &stats);
    CHECK(stats.used == 0 && stats.resident == 0);
    kvc_pool_release(pool);
}

void test_spaces(void)
{
    test_walk(false);
    test_walk(true);
    test_empty_slabs();
    test_blocks();
    test_pools_side_by_side();
}
