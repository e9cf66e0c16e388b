/* test_pool.c - the pool and the tables without Python, plain, with sanitizers and with valgrind.
 *
 * It includes pool.c to corrupt its internals, for kvc_pool_check, and system.c to emulate system failures. */
#include "harness.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

/* Checks that the pool's lock is not taken recursively, and is released before callbacks. */
static _Thread_local int locks;
static int take_lock(pthread_mutex_t *lock)
{
    CHECK(locks++ == 0);
    return pthread_mutex_lock(lock);
}
static int give_lock(pthread_mutex_t *lock)
{
    CHECK(--locks == 0);
    return pthread_mutex_unlock(lock);
}
/* Emulates a system with less address space and memory; counts requests for huge pages. */
static int64_t most_space = INT64_MAX, memory, asked;
static int renewing; /* 1: remapping fails; 2: and the old mapping is gone */
static void *huge_at, *renewed_at;
static size_t huge_bytes, renewed_bytes;
static void *take_space(void *at, size_t bytes, int access, int kind, int file, off_t from)
{
    asked++;
    if (kind & MAP_FIXED) renewed_at = at, renewed_bytes = bytes;
    if (renewing && kind & MAP_FIXED) return renewing == 2 ? munmap(at, bytes), MAP_FAILED : MAP_FAILED;
    return (int64_t)bytes > most_space ? MAP_FAILED : mmap(at, bytes, access, kind, file, from);
}
static int advise(void *at, size_t bytes, int what)
{
    if (what == MADV_HUGEPAGE) huge_at = at, huge_bytes = bytes;
    return madvise(at, bytes, what);
}
static long configured(int what)
{
    return what == _SC_PHYS_PAGES && memory ? (long)(memory / sysconf(_SC_PAGESIZE)) : sysconf(what);
}
#define pthread_mutex_lock take_lock
#define pthread_mutex_unlock give_lock
#define mmap take_space
#define madvise advise
#define sysconf configured
#include "../../csrc/core/base/system.c"
#include "../../csrc/core/memory/pool.c"
#undef pthread_mutex_lock
#undef pthread_mutex_unlock
#undef mmap
#undef madvise
#undef sysconf

static kvc_pool_stats stats_of(const kvc_pool *pool)
{
    kvc_pool_stats stats;
    OK(kvc_pool_check(pool));
    kvc_pool_get_stats(pool, &stats);
    CHECK(locks == 0);
    return stats;
}

/* Bytes of the arena that are resident, or -1 if the system does not tell. */
static int64_t held_by_system(const kvc_pool *pool)
{
    int64_t pages = kvc_pool_extent(pool) / pool->system_page, held = 0;
    unsigned char *flags = malloc((size_t)pages + 1);
    if (mincore(pool->base, (size_t)kvc_pool_extent(pool), flags)) pages = 0, held = -1;
    for (int64_t i = 0; i < pages; i++) held += (flags[i] & 1) * pool->system_page;
    free(flags);
    return held;
}

/* ---------------------------------------------------------------- pool */

static void test_bounds(void)
{
    kvc_pool *pool;
    int64_t a, b, offsets[8];
    FAILS(KVC_E_VALUE, "max_bytes", kvc_pool_new(-1, &pool));
    FAILS(KVC_E_VALUE, "max_bytes", kvc_pool_new(INT64_MAX, &pool));
    FAILS(KVC_E_MEMORY, "address space", kvc_pool_new((int64_t)1 << 61, &pool));
    OK(kvc_pool_new(4 * MB - 5, &pool)); /* whole units */
    CHECK(stats_of(pool).reserved == 4 * MB && kvc_pool_extent(pool) == 0 && stats_of(pool).resident == 0);
    FAILS(KVC_E_VALUE, "at least 1 byte", kvc_pool_alloc(pool, 0, &a));
    FAILS(KVC_E_MEMORY, "pool is full: needed 4194305 bytes in one piece", kvc_pool_alloc(pool, 4 * MB + 1, &a));
    for (int i = 0; i < 4; i++) OK(kvc_pool_alloc(pool, MB, &offsets[i]));
    FAILS(KVC_E_MEMORY, "4194304 of 4194304 in use", kvc_pool_alloc(pool, MB, &a));
    FAILS(KVC_E_MEMORY, "max_bytes=", kvc_pool_alloc(pool, 64, &a));
    CHECK(stats_of(pool).used == 4 * MB);
    kvc_pool_unref(pool, offsets[2]); /* its unit is used by another class now */
    OK(kvc_pool_alloc(pool, 100, &a));
    OK(kvc_pool_alloc(pool, 128, &b));
    CHECK(a == offsets[2] && b == a + 128 && kvc_pool_extent(pool) == 4 * MB && stats_of(pool).used == 3 * MB + 256);
    CHECK(kvc_pool_refs(pool, a) == 1 && kvc_pool_refs(pool, a + 64) == 0 && kvc_pool_refs(pool, a + 256) == 0);
    CHECK(kvc_pool_refs(pool, -64) == 0 && kvc_pool_refs(pool, 4 * MB) == 0);
    kvc_pool_unref(pool, a);
    kvc_pool_unref(pool, b);
    kvc_pool_unref(pool, offsets[1]);
    FAILS(KVC_E_MEMORY, "pool is full", kvc_pool_alloc(pool, 3 * MB, &a)); /* 2 units in a row are free */
    OK(kvc_pool_alloc(pool, 2 * MB, &a));
    CHECK(a == offsets[1]);
    CHECK(kvc_pool_retain(pool) == pool);
    kvc_pool_release(pool);
    CHECK(kvc_pool_refs(pool, a) == 1);
    kvc_pool_release(pool);
    kvc_pool_release(NULL);
    OK(kvc_pool_new(4 * MB, &pool));
    OK(kvc_pool_alloc(pool, MB, &a));
    OK(kvc_pool_alloc(pool, MB, &b));
    kvc_pool_unref(pool, b);
    OK(kvc_pool_alloc(pool, 3 * MB, &a)); /* from the freed unit to past the extent */
    CHECK(a == b && kvc_pool_extent(pool) == 4 * MB && stats_of(pool).slabs == 2);
    kvc_pool_release(pool);
    OK(kvc_pool_new(0, &pool)); /* the machine's memory; nothing of it is used */
    CHECK(stats_of(pool).reserved >= 64 * MB && stats_of(pool).resident == 0);
    kvc_pool_release(pool);
}

/* Memory is returned: hot slots stay, cold ones and empty slabs do not; `resident` matches the system. */
static void test_memory_goes_back(void)
{
    enum { N = 40 };
    kvc_pool *pool;
    int64_t offsets[N], slot = 8 * sysconf(_SC_PAGESIZE), small;
    OK(kvc_pool_new(1024 * MB, &pool));
    OK(kvc_pool_alloc(pool, 64, &small));
    memset(pool->base + small, 1, 64);
    bool told = held_by_system(pool) == pool->system_page; /* otherwise the system does not tell, or rounds up */
    for (int i = 0; i < N; i++) {
        OK(kvc_pool_alloc(pool, slot, &offsets[i]));
        memset(pool->base + offsets[i], i, (size_t)slot);
    }
    CHECK(stats_of(pool).resident == N * slot + pool->system_page);
    CHECK(!told || held_by_system(pool) == stats_of(pool).resident);
    for (int i = 0; i < N; i++)
        if (i % 4) kvc_pool_unref(pool, offsets[i]);
    CHECK(stats_of(pool).used == N / 4 * slot + 64);
    CHECK(stats_of(pool).resident == (N / 4 + HOT) * slot + pool->system_page);
    CHECK(!told || held_by_system(pool) == stats_of(pool).resident);
    for (int i = 0; i < N; i += 4) CHECK(pool->base[offsets[i]] == i && pool->base[offsets[i] + slot - 1] == i);
    for (int i = 0; i < N; i++)
        if (i % 4) { /* reuses hot, cold and untouched slots */
            OK(kvc_pool_alloc(pool, slot - 1, &offsets[i]));
            memset(pool->base + offsets[i], i, (size_t)slot);
        }
    CHECK(stats_of(pool).slots == N + 1);
    CHECK(!told || held_by_system(pool) == stats_of(pool).resident);
    for (int i = 0; i < N; i++) CHECK(pool->base[offsets[i]] == i && pool->base[offsets[i] + slot - 1] == i);
    int64_t extent = kvc_pool_extent(pool);
    for (int i = 0; i < N; i++) kvc_pool_unref(pool, offsets[i]);
    kvc_pool_unref(pool, small);
    CHECK(stats_of(pool).resident == 0 && stats_of(pool).slabs == 0 && kvc_pool_extent(pool) == extent);
    CHECK(!told || held_by_system(pool) == 0);
    for (int64_t i = 0; i < extent; i += pool->system_page) CHECK(pool->base[i] == 0); /* stays readable */
    kvc_pool_release(pool);
}

/* After a refusal, half as much is requested, down to 64 MiB; an explicit size is requested once. */
static void test_less_space(void)
{
    kvc_pool *pool;
    memory = 1024 * MB;
    for (int64_t most = 32; most < 2048; most *= 2) {
        most_space = (most + 2) * MB, asked = 0; /* 2 are trimmed: bases are aligned to a huge page */
        if (most < 64) {
            FAILS(KVC_E_MEMORY, "no address space for a pool of 67108864 bytes", kvc_pool_new(0, &pool));
            CHECK(asked == 5); /* 1024, 512, 256, 128, 64 */
            FAILS(KVC_E_MEMORY, "no address space", kvc_pool_new(128 * MB, &pool));
            CHECK(asked == 6);
            continue;
        }
        OK(kvc_pool_new(0, &pool));
        CHECK(stats_of(pool).reserved == (most < 1024 ? most : 1024) * MB);
        kvc_pool_release(pool);
    }
    memory = 1; /* at least a unit */
    OK(kvc_pool_new(0, &pool));
    CHECK(stats_of(pool).reserved == MB);
    kvc_pool_release(pool);
    most_space = INT64_MAX, memory = 0;
}

/* Slabs use huge pages as a whole: from 64 resident MiB on, or if a call writes 4 MiB. */
static void test_huge(void)
{
    kvc_pool *pool;
    int64_t offset;
    OK(kvc_pool_new(2048 * MB, &pool));
    huge_at = NULL;
    for (int i = 0; i < 64; i++) OK(kvc_pool_alloc(pool, MB, &offset));
    CHECK(!huge_at && stats_of(pool).resident == 64 * MB);
    OK(kvc_pool_alloc(pool, MB, &offset));
    CHECK(huge_at == pool->base + offset && huge_bytes == (size_t)(16 * MB));
    kvc_pool_release(pool);
    OK(kvc_pool_new(2048 * MB, &pool));
    kvc_pool_expect(pool, 4 * MB - 1);
    huge_at = NULL;
    OK(kvc_pool_alloc(pool, 64, &offset));
    CHECK(!huge_at);
    kvc_pool_expect(pool, 4 * MB);
    OK(kvc_pool_alloc(pool, 128 << 10, &offset));
    CHECK(huge_at == pool->base + offset && huge_bytes == (size_t)(2 * MB) && offset == MB);
    kvc_pool_release(pool);
}

/* Memory that cannot be remapped is reused; if that left a hole, it is never allocated again. */
static void test_renewing(bool shared)
{
    kvc_pool *pool;
    int64_t offset, lost = -1;
    OK(shared ? kvc_pool_new_shared(&pool) : kvc_pool_new(32 * MB, &pool));
    for (int how = 0; how < 4; how++) {
        OK(kvc_pool_alloc(pool, 8 * MB, &offset));
        CHECK(offset != lost && memset(pool->base + offset, 1, 8 * MB));
        CHECK(shared || offset == (lost < 0 ? 0 : 8 * MB));
        renewing = how % 3;
        kvc_pool_unref(pool, offset);
        if (renewing == 2) lost = offset;
        OK(kvc_pool_check(pool));
    }
    renewing = 0;
    kvc_pool_release(pool);
}

/* A huge page shared by two slabs (own reservation) is remapped when the second one is freed. */
static void test_renewing_by_halves(void)
{
    kvc_pool *pool;
    int64_t a, b, c;
    OK(kvc_pool_new(64 * MB, &pool));
    OK(kvc_pool_alloc(pool, 3 * MB, &a));
    OK(kvc_pool_alloc(pool, 5 * MB, &b));
    OK(kvc_pool_alloc(pool, MB, &c));
    CHECK(a == 0 && b == 3 * MB && c == 8 * MB && (uintptr_t)pool->base % (2 * MB) == 0);
    renewed_at = NULL, renewed_bytes = 0;
    kvc_pool_unref(pool, a);
    CHECK(renewed_at == pool->base && renewed_bytes == (size_t)(2 * MB));
    kvc_pool_unref(pool, c); /* half of its huge page is above the extent */
    CHECK(renewed_at == pool->base);
    kvc_pool_unref(pool, b);
    CHECK(renewed_at == pool->base + 2 * MB && renewed_bytes == (size_t)(6 * MB));
    kvc_pool_release(pool);
}

/* Beyond 64 MiB, slabs use huge pages, without effect on the contents of slots. */
static void test_many_bytes(void)
{
    kvc_pool *pool;
    int64_t offset[12];
    OK(kvc_pool_new(1024 * MB, &pool));
    for (int i = 0; i < 12; i++) {
        OK(kvc_pool_alloc(pool, 10 * MB, &offset[i]));
        pool->base[offset[i]] = pool->base[offset[i] + 10 * MB - 1] = (uint8_t)i;
    }
    for (int i = 0; i < 12; i++) CHECK(pool->base[offset[i]] == i && pool->base[offset[i] + 10 * MB - 1] == i);
    CHECK(stats_of(pool).resident == 120 * MB);
    kvc_pool_release(pool);
}

/* A slab has about 16 slots, but at most one unit in 64 of the pool unless a slot needs more; and less if space is
 * short. The first free units are used. */
static void test_slabs(void)
{
    kvc_pool *pool;
    int64_t a, b, c, tail, n = 0;
    OK(kvc_pool_new(1024 * MB, &pool));
    OK(kvc_pool_alloc(pool, MB, &a));
    CHECK(a == 0 && kvc_pool_extent(pool) == 16 * MB && pool->slabs[0]->slots == 16);
    OK(kvc_pool_alloc(pool, 100, &b));
    CHECK(b == 16 * MB && kvc_pool_extent(pool) == 17 * MB && pool->slabs[1]->slots == MB / 128);
    OK(kvc_pool_alloc(pool, 100 * 1024, &c));
    CHECK(kvc_pool_extent(pool) == 19 * MB && pool->slabs[2]->slots == 20);
    CHECK(kvc_pool_bytes(pool, a) == MB && kvc_pool_bytes(pool, b) == 128 && kvc_pool_bytes(pool, c) == 100 * 1024);
    for (int i = 1; i < 20; i++) OK(kvc_pool_alloc(pool, 100 * 1024, &tail));
    tail = c + 20 * 100 * 1024; /* less than a slot is left in the slab */
    CHECK(kvc_pool_extent(pool) == 19 * MB && kvc_pool_refs(pool, tail) == 0 && kvc_pool_bytes(pool, tail) == 0);
    CHECK(kvc_pool_bytes(pool, MB) == 0 && kvc_pool_bytes(pool, b + 64) == 0 && kvc_pool_bytes(pool, b + 128) == 0);
    kvc_pool_unref(pool, b);
    CHECK(kvc_pool_bytes(pool, b) == 0 && kvc_pool_refs(pool, b) == 0 && stats_of(pool).slabs == 2);
    OK(kvc_pool_alloc(pool, 3 * 64, &b)); /* the freed unit */
    CHECK(b == 16 * MB && kvc_pool_extent(pool) == 19 * MB);
    kvc_pool_release(pool);
    OK(kvc_pool_new(128 * MB, &pool));
    OK(kvc_pool_alloc(pool, MB, &a));
    CHECK(kvc_pool_extent(pool) == 2 * MB);
    OK(kvc_pool_alloc(pool, 5 * MB, &b));
    CHECK(b == 2 * MB && kvc_pool_extent(pool) == 7 * MB);
    kvc_pool_expect(pool, 8 * MB);
    OK(kvc_pool_alloc(pool, 64, &c));
    CHECK(pool->expected == 8 * MB && c == 7 * MB && stats_of(pool).used == 6 * MB + 64);
    OK(kvc_pool_alloc(pool, 128, &c)); /* another unit */
    while (kvc_pool_alloc(pool, MB, &a) == KVC_OK) n++;
    CHECK(n == 120 && a == 127 * MB); /* one in the first slab, then two per slab, the last unit by itself */
    kvc_pool_release(pool);
}

/* The check must be able to fail. */
static void test_check_notices(void)
{
    kvc_pool *pool;
    int64_t a, b, c;
    OK(kvc_pool_new(8 * MB, &pool));
    OK(kvc_pool_alloc(pool, 4096, &a));
    OK(kvc_pool_alloc(pool, 4096, &b));
    OK(kvc_pool_alloc(pool, 4096, &c));
    kvc_pool_unref(pool, b);
    slab *s = pool->slabs[0];
    OK(kvc_pool_check(pool));
#define BREAK(lvalue, text)                                                                                            \
    (lvalue)++;                                                                                                        \
    FAILS(KVC_E_VALUE, text, kvc_pool_check(pool));                                                                    \
    (lvalue)--
    BREAK(pool->resident, "totals");
    BREAK(pool->used, "totals");
    BREAK(pool->slots, "totals");
    BREAK(pool->n_slabs, "totals");
    BREAK(pool->classes[0].hot, "totals");
    BREAK(pool->unit_slab[0], "lost a unit");
    pool->classes[0].room = LIST_END;
    FAILS(KVC_E_VALUE, "wrong about its room", kvc_pool_check(pool));
    pool->classes[0].room = 0;
    BREAK(s->live, "counts");
    BREAK(s->refs[1], "free list");
    BREAK(s->hot, "free list");
    s->link[1] = 1;
    FAILS(KVC_E_VALUE, "free list", kvc_pool_check(pool));
    s->link[1] = LIST_END;
    OK(kvc_pool_check(pool));
    kvc_pool_release(pool);
}

/* Address space of this process in system pages. */
static long address_space(void)
{
    long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    CHECK(f && fscanf(f, "%ld", &pages) == 1);
    fclose(f);
    return pages;
}

/* Each allocation of a new pool and of its first slab fails once. */
static void test_pool_failures(void)
{
    int64_t live = kvc_alloc_live(), offset;
    kvc_pool *pool;
    int n = 0;
    for (bool done = false; !done; n++) {
        kvc_alloc_fail_at(n + 1);
        if (kvc_pool_new(64 * MB, &pool) != KVC_OK) {
            CHECK(n < 3 && !pool && strstr(kvc_error(), "out of memory"));
            continue;
        }
        done = kvc_pool_alloc(pool, 100, &offset) == KVC_OK;
        if (!done) CHECK(strstr(kvc_error(), "out of memory") && stats_of(pool).slabs == 0 && pool->extent == 0);
        kvc_alloc_fail_at(0);
        OK(kvc_pool_alloc(pool, 100, &offset));
        CHECK(stats_of(pool).slots == 1 + done);
        kvc_pool_release(pool);
        CHECK(kvc_alloc_live() == live);
    }
    CHECK(n == 10); /* 3 of the pool, 6 of the slab, and one success */
    long before = address_space();
    for (int i = 0; i < 24; i++) {
        kvc_alloc_fail_at(2 + i % 2);
        CHECK(kvc_pool_new(1024 * MB, &pool) == KVC_E_MEMORY);
    }
    kvc_alloc_fail_at(0);
    CHECK((address_space() - before) * sysconf(_SC_PAGESIZE) < 4096 * MB); /* all of it was released */
}

/* Memory is kept while the pool may keep it, and returned afterwards. */
static void test_keeping(void)
{
    kvc_pool *pool;
    int64_t offset[64];
    OK(kvc_pool_new(64 * MB, &pool));
    FAILS(KVC_E_VALUE, "at least 0", kvc_pool_keep(pool, -1));
    OK(kvc_pool_keep(pool, 32 * MB));
    for (int i = 0; i < 64; i++) OK(kvc_pool_alloc(pool, 128 << 10, &offset[i]));
    for (int i = 0; i < 64; i++) kvc_pool_unref(pool, offset[i]);
    CHECK(stats_of(pool).used == 0 && stats_of(pool).resident >= 64 * (128 << 10));
    OK(kvc_pool_keep(pool, 0));
    CHECK(stats_of(pool).resident == 0);
    kvc_pool_release(pool);
}

void test_pools(void)
{
    test_keeping();
    test_bounds();
    test_slabs();
    test_memory_goes_back();
    test_less_space();
    test_huge();
    test_renewing(true);
    test_renewing(false);
    test_renewing_by_halves();
    test_many_bytes();
    test_check_notices();
    test_pool_failures();
}
