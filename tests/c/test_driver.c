/* test_driver.c - decisions of the attention driver: when other threads are used, and which tokens a row has. */
#include "play.h"

#include <math.h>

static kvc_spec spec_of(int64_t heads, int64_t sinks, int raw, int key, int value)
{
    return (kvc_spec){heads, 32, 32, 16, sinks, 0, raw, key, value, false};
}

/* ---------------------------------------------------------------- threads */

static int64_t handed; /* items that were passed to an executor */

static void counting(int64_t n, void (*body)(int64_t, int64_t, void *), void *context)
{
    handed += n;
    body(0, n, context);
}

/* Number of items passed to an executor when Tq queries attend to a sequence of `stored` tokens. */
static int64_t handed_of(kvc_pool *pool, int64_t heads, int64_t stored, int64_t Tq)
{
    play p;
    kvc_spec s = spec_of(heads, 0, KVC_RAW_F32, KVC_INT8, KVC_INT8);
    play_open(&p, pool, &s, 1, 1, stored);
    play_step(&p, &(step){.T = stored, .queries = -1});
    kvc_attend_args a = play_plan_call(&p, 0, Tq, false);
    a.exec = (kvc_exec){counting};
    handed = 0;
    OK(kvc_attend(&a));
    kvc_table_rollback(p.t);
    play_end_call(&a);
    play_close(&p);
    return handed;
}

/* From 64 KiB of elements on, times the number of queries: an item per head, 64 queries, and run of 8 columns. */
static void test_threads(kvc_pool *pool)
{
    CHECK(handed_of(pool, 2, 40, 7) == 0); /* 4 columns (0 is of sinks) x 16 x 64 x 2 heads = 2^13 */
    CHECK(handed_of(pool, 2, 40, 8) == 2);
    CHECK(handed_of(pool, 1, 130, 64) == 0); /* a single item stays in the calling thread */
    CHECK(handed_of(pool, 2, 130, 65) == 4);
    CHECK(handed_of(pool, 2, 260, 1) == 0); /* 18 columns, two runs */
    CHECK(handed_of(pool, 2, 260, 2) == 4);
    for (int64_t T = 127; T <= 128; T++) { /* 512 bytes per own token */
        play p;
        kvc_spec s = spec_of(2, 0, KVC_RAW_F32, KVC_INT8, KVC_INT8);
        play_open(&p, pool, &s, 1, 1, T);
        handed = 0;
        play_step(&p, &(step){.T = T, .queries = -1, .exec = &(kvc_exec){counting}});
        CHECK((handed > 0) == (T == 128));
        play_close(&p);
    }
}

/* ---------------------------------------------------------------- rows */

/* A first call that ends within the sinks is checked like any other. */
static void test_within_sinks(kvc_pool *pool)
{
    play p;
    kvc_spec s = spec_of(1, 4, KVC_RAW_F32, KVC_INT8, KVC_INT8);
    play_open(&p, pool, &s, 1, 1, 20);
    kvc_attend_args a = play_plan_call(&p, 3, 1, false);
    int64_t *table = play_own_table(&a), entry = table[0];
    table[0] = KVC_NONE;
    FAILS(KVC_E_VALUE, "expected a page at column 0", kvc_attend(&a));
    table[0] = kvc_entry(kvc_entry_offset(entry), KVC_RAW_F16, KVC_RAW_F16);
    FAILS(KVC_E_TYPE, "raw page at column 0", kvc_attend(&a));
    table[0] = entry;
    OK(kvc_attend(&a));
    kvc_table_rollback(p.t);
    free(table);
    play_end_call(&a);
    play_close(&p);
}

/* A table may end with the call's columns: nothing is read beyond it (for sanitizers). */
static void test_full_table(kvc_pool *pool)
{
    play p;
    kvc_spec s = spec_of(1, 4, KVC_RAW_F32, KVC_INT8, KVC_INT8);
    play_open(&p, pool, &s, 1, 1, 20);
    kvc_attend_args a = play_plan_call(&p, 20, 1, false);
    a.store.columns = 2;
    int64_t *table = play_own_table(&a);
    OK(kvc_attend(&a));
    CHECK(fabs(a.lse[0] - log(20)) < 1e-6);
    kvc_table_rollback(p.t);
    free(table);
    play_end_call(&a);
    play_close(&p);
}

/* Slots of padding may be between the stored tokens and a call's own. */
static void test_gap(kvc_pool *pool)
{
    play p;
    kvc_spec s = spec_of(1, 0, KVC_RAW_F32, KVC_INT8, KVC_INT8);
    play_open(&p, pool, &s, 1, 1, 60);
    play_step(&p, &(step){.T = 40});
    kvc_attend_args a = play_plan_call(&p, 1, 1, false);
    CHECK(!a.store.slots);
    for (int d = 0; d < 32; d++) ((float *)a.v.data)[d] = (float)d;
    for (int64_t gap = 0; gap < 9; gap += 4) { /* stored tokens are in slots 0 to 39, the query in 40 + gap */
        a.seen = 40 + gap, a.window = 1 + gap;
        OK(kvc_attend(&a));
        CHECK(a.lse[0] == 0); /* of a query of zeros: one token */
        for (int d = 0; d < 32; d++) CHECK(((float *)a.out.data)[d] == (float)d);
        a.window = 3 + gap;
        OK(kvc_attend(&a));
        CHECK(fabs(a.lse[0] - log(3)) < 1e-6);
    }
    kvc_table_rollback(p.t);
    play_end_call(&a);
    play_close(&p);
}

/* A sequence of a page or two next to one of fifty: most of its runs have no columns. */
static void test_uneven(kvc_pool *pool, int key)
{
    play p;
    kvc_spec s = spec_of(2, 0, KVC_RAW_F32, key, KVC_INT8);
    play_open(&p, pool, &s, 2, 2, 1100);
    play_step(&p, &(step){.T = 800, .queries = -1, .late = 790});
    for (int64_t T = 1; T < 100; T += 39)
        for (int threads = 0; threads < 2; threads++)
            play_step(&p, &(step){.T = T, .exec = threads ? &in_threads : NULL});
    play_close(&p);
}

/* One long sequence in a batch of short ones is split into runs, though there is an item for each of 64 sequences. */
static void test_skewed(kvc_pool *pool)
{
    enum { B = 64, D = 32 };
    play p;
    kvc_spec s = spec_of(1, 0, KVC_RAW_F32, KVC_INT8, KVC_INT8);
    play_open(&p, pool, &s, 1, 1, 800);
    play_step(&p, &(step){.T = 800, .queries = -1});
    kvc_attend_args one = play_plan_call(&p, 0, 1, false), a = one;
    for (int64_t d = 0; d < D; d++) ref_put(p.dtype, a.q.data, d, (float)sin((double)d));
    int64_t bytes = a.store.columns * (int64_t)sizeof *a.store.table, rows[B][2];
    char *table = malloc((size_t)(B * bytes));
    float out[2][B * D], lse[2][B];
    for (int64_t b = 0; b < B; b++) {
        memcpy(table + b * bytes, a.store.table, (size_t)bytes);
        rows[b][0] = b == 40 ? 800 : 1 + b % 16; /* 51 or 2 columns */
        rows[b][1] = 0;
    }
    a.store.table = (const int64_t *)(const void *)table, a.store.rows = rows[0], a.store.batch = B;
    a.q.stride[0] = 0;
    for (int i = 0; i < 2; i++) {
        a.exec = i ? in_threads : (kvc_exec){counting};
        a.out = (kvc_dense){out[i], {D, D, D}, KVC_F32}, a.lse = lse[i];
        handed = 0;
        OK(kvc_attend(&a));
        CHECK(handed == (i ? 0 : B - 1 + 6)); /* runs of 8 columns */
    }
    CHECK(memcmp(out[0], out[1], sizeof *out) == 0 && memcmp(lse[0], lse[1], sizeof *lse) == 0);
    for (int64_t b = 0; b < B; b++) {
        one.store.rows = rows[b];
        OK(kvc_attend(&one));
        CHECK(fabsf(one.lse[0] - lse[0][b]) < 1e-5f);
        for (int64_t d = 0; d < D; d++) CHECK(fabsf(((float *)one.out.data)[d] - out[0][b * D + d]) < 1e-5f);
    }
    free(table);
    kvc_table_rollback(p.t);
    play_end_call(&one);
    play_close(&p);
}

/* Eight heads with interleaved pages, also with accumulated attention. */
static void test_side_by_side(kvc_pool *pool)
{
    play p;
    play_open(&p, pool, &(kvc_spec){8, 64, 64, 64, 0, 0, KVC_RAW_F32, KVC_RAW_F32, KVC_RAW_F32, false}, 1, 1, 300);
    play_step(&p, &(step){.T = 200, .queries = -1});
    play_step(&p, &(step){.T = 1});
    play_close(&p);
    play_open(&p, pool, &(kvc_spec){8, 64, 64, 64, 0, 0, KVC_RAW_F32, KVC_INT8, KVC_INT8, false}, 1, 1, 1300);
    play_step(&p, &(step){.T = 1150, .queries = -1});
    play_step(&p, &(step){.T = 1, .accumulated = true}); /* in two runs */
    play_close(&p);
}

static void steps(int64_t begin, int64_t end, void *pool)
{
    play p;
    kvc_spec s = spec_of(1, 0, KVC_RAW_F32, KVC_INT4, KVC_INT4);
    if (begin == end) return;
    play_open(&p, pool, &s, 1, 1, 80);
    play_step(&p, &(step){.T = 20});
    play_step(&p, &(step){.T = 40});
    for (int i = 0; i < 3; i++) play_step(&p, &(step){.T = 1});
    play_close(&p);
}

/* Workspace contains data of the previous call, which filled a page and sealed it: in a thread without other memory,
 * and without poisoning. */
static void test_left_behind(kvc_pool *pool)
{
    kvc_alloc_poison(false);
    in_threads.run(1, steps, pool);
    kvc_alloc_poison(POISON);
}

/* Both entries of every seal are checked. */
static void test_seals(kvc_pool *pool)
{
    play p;
    kvc_spec s = spec_of(1, 0, KVC_RAW_F32, KVC_INT8, KVC_INT8);
    play_open(&p, pool, &s, 1, 1, 100);
    play_step(&p, &(step){.T = 10});
    kvc_attend_args a = play_plan_call(&p, 0, 1, false);
    int64_t at[6], seals[6], bytes = kvc_page_bytes(KVC_RAW_F32, KVC_RAW_F32, 32, 32, 16);
    for (int i = 0; i < 6; i++) {
        OK(kvc_pool_alloc(pool, bytes, &at[i]));
        memset(kvc_pool_base(pool) + at[i], 0, (size_t)bytes);
    }
    a.store.arena_bytes = kvc_pool_extent(pool);
    for (int wrong = -1; wrong < 6; wrong++) {
        for (int i = 0; i < 6; i++)
            seals[i] = i % 2 == 0 ? kvc_entry(at[i], KVC_RAW_F32, KVC_RAW_F32) : kvc_entry(at[i], KVC_INT8, KVC_INT4);
        if (wrong >= 0) seals[wrong] = kvc_entry(at[wrong], KVC_INT8, KVC_RAW_F16);
        a.seals = seals, a.n_seals = 3;
        char text[120];
        snprintf(text, sizeof text, "where to seal it, got entries %lld, %lld",
                 (long long)seals[wrong < 0 ? 0 : wrong & ~1], (long long)seals[wrong < 0 ? 0 : wrong | 1]);
        if (wrong < 0)
            OK(kvc_attend(&a));
        else
            FAILS(KVC_E_VALUE, text, kvc_attend(&a));
        if (wrong < 0) continue;
        seals[wrong] = KVC_NONE;
        snprintf(text, sizeof text, "seals: expected a page at column %d", wrong / 2);
        FAILS(KVC_E_VALUE, text, kvc_attend(&a));
    }
    for (int i = 0; i < 6; i++) kvc_pool_unref(pool, at[i]);
    kvc_table_rollback(p.t);
    play_end_call(&a);
    play_close(&p);
}

/* A query of NaN gives NaN and does not affect others, whose scores are so low that no default may replace them. */
static void test_neighbours(kvc_pool *pool, int raw, int key)
{
    play p;
    kvc_spec s = spec_of(1, 0, raw, key, KVC_INT8);
    play_open(&p, pool, &s, 1, 1, 60);
    for (int wrong = 0; wrong < 3; wrong++) {
        kvc_attend_args a = play_plan_call(&p, 40, 3, false);
        for (int64_t i = 0; i < 40 * 32; i++) ref_put(p.dtype, a.k.data, i, 1), ref_put(p.dtype, a.v.data, i, 2);
        for (int64_t i = 0; i < 3 * 32; i++) ref_put(p.dtype, a.q.data, i, -25); /* x 32 x .25 */
        ref_put(KVC_BF16, a.q.data, p.dtype == KVC_F32 ? 2 * (wrong * 32 + 7) + 1 : wrong * 32 + 7,
                NAN); /* the upper half */
        OK(kvc_attend(&a));
        for (int t = 0; t < 3; t++) {
            CHECK(t == wrong ? isnan(a.lse[t]) : fabs(a.lse[t] + 200 - log(38 + t)) < .1);
            for (int d = 0; d < 32; d++) {
                double got = ref_element(p.dtype, a.out.data, t * 32 + d);
                CHECK(t == wrong ? isnan(got) : fabs(got - 2) < .02);
            }
        }
        kvc_table_rollback(p.t);
        play_end_call(&a);
    }
    play_close(&p);
}

/* ---------------------------------------------------------------- digits */

/* In a long sequence, pages with little weight may be inexact; one with all the weight is exact: its tokens have
 * weights e^s and stored V. */
static void test_heavy_page(kvc_pool *pool, int value)
{
    enum { T = 1100, HEAVY = 512, P = 16, D = 32 };
    play p;
    kvc_spec s = spec_of(1, 0, KVC_RAW_F32, KVC_RAW_F32, value);
    double want[D] = {0}, row[KVC_MAX_DIM], sum = 0, off = 0, all = 0;
    play_open(&p, pool, &s, 1, 1, T);
    kvc_attend_args a = play_plan_call(&p, T, 1, false);
    for (int64_t i = 0; i < T * D; i++) ((float *)a.v.data)[i] = random_number(KVC_F32);
    for (int64_t i = 0; i < P; i++) ((float *)a.k.data)[(HEAVY + i) * D] = (float)(60 + i * 11 % P); /* in quarters */
    OK(kvc_attend(&a));
    kvc_table_commit(p.t);
    play_end_call(&a);
    a = play_plan_call(&p, 0, 1, false);
    ((float *)a.q.data)[0] = 1;
    OK(kvc_attend(&a));
    for (int64_t i = 0; i < T; i++) {
        double w = i < HEAVY || i >= HEAVY + P ? 1 : exp(.25 * (double)(60 + (i - HEAVY) * 11 % P));
        play_row(&p, play_entry(&p, 0, 0, i), 0, i, 0, row);
        for (int d = 0; d < D; d++) want[d] += w * row[d];
        sum += w;
    }
    for (int d = 0; d < D; d++) {
        double got = ((float *)a.out.data)[d] * sum;
        off += (got - want[d]) * (got - want[d]), all += want[d] * want[d];
    }
    CHECK(sqrt(off) <= 5e-4 * sqrt(all));
    kvc_table_rollback(p.t);
    play_end_call(&a);
    play_close(&p);
}

void test_driver(void)
{
    kvc_pool *pool;
    OK(kvc_pool_new(64 * MB, &pool));
    test_threads(pool);
    test_within_sinks(pool);
    test_full_table(pool);
    test_gap(pool);
    test_side_by_side(pool);
    test_uneven(pool, KVC_INT8);
    test_uneven(pool, KVC_INT4);
    test_skewed(pool);
    test_left_behind(pool);
    test_seals(pool);
    test_neighbours(pool, KVC_RAW_F32, KVC_INT8);
    test_neighbours(pool, KVC_RAW_BF16, KVC_RAW_BF16);
    test_neighbours(pool, KVC_RAW_BF16, KVC_INT4);
    test_heavy_page(pool, KVC_INT4);
    test_heavy_page(pool, KVC_INT4_G32);
    kvc_pool_stats left;
    kvc_pool_get_stats(pool, &left);
    CHECK(left.slots == 0);
    kvc_pool_release(pool);
}
