/* test_restore.c - a table takes over the contents of another one, and rejects contents that no table could have. */
#include "harness.h"
#include "table/table.h"

#include <math.h>

static const kvc_spec SPEC = {2, 48, 32, 16, 4, 0, KVC_RAW_F32, KVC_INT8, KVC_INT4, false};

typedef struct copy {
    kvc_contents x;
    int64_t *entries, *rows;
    int32_t *slots;
    float *scores;
} copy;

static void *copied(const void *from, int64_t bytes)
{
    return from ? memcpy(malloc((size_t)bytes), from, (size_t)bytes) : NULL;
}

static copy copy_of(const kvc_table *t)
{
    int64_t lines = kvc_lines(t);
    copy c = {.entries = copied(t->entries, lines * t->columns * 8),
              .rows = copied(t->rows, lines * 16),
              .slots = copied(t->slots, lines * t->slot_capacity * 4),
              .scores = copied(t->scores, t->batch * t->spec.heads * t->score_capacity * 4)};
    c.x = (kvc_contents){t->batch, t->table_heads, t->columns, t->slot_capacity, t->score_capacity,
                         t->seen,  c.entries,      c.rows,     c.slots,          c.scores};
    return c;
}

static void free_copy(copy *c)
{
    free(c->entries);
    free(c->rows);
    free(c->slots);
    free(c->scores);
}

/* 2 sequences of 60 slots, the first with three padding tokens; with slots and scores if evicted. */
static kvc_table *table_of(kvc_pool *pool, bool scored, int64_t heads)
{
    kvc_table *t;
    uint8_t real[120], keep[2 * 2 * 60];
    for (int i = 0; i < 120; i++) real[i] = i > 2;
    OK(kvc_table_new(pool, &SPEC, 2, &t));
    if (scored) OK(kvc_table_keep_scores(t, true));
    OK(kvc_table_plan(t, 60, real));
    kvc_table_commit(t);
    if (!heads) return t;
    for (int i = 0; i < 240; i++) keep[i] = i % 60 < 4 || random_below(2);
    OK(kvc_table_plan_evict(t, keep, NULL, heads, 60));
    kvc_table_commit(t);
    CHECK(t->slots && t->table_heads == heads);
    return t;
}

static void take_references(const kvc_table *t)
{
    for (int64_t i = 0; i < kvc_lines(t) * t->columns; i++)
        if (t->entries[i] != KVC_NONE) kvc_pool_ref(t->pool, kvc_entry_offset(t->entries[i]));
}

static void test_taken_over(kvc_pool *pool, bool scored, int64_t heads)
{
    kvc_table *t = table_of(pool, scored, heads), *other;
    copy c = copy_of(t);
    OK(kvc_table_new(pool, &SPEC, 2, &other));
    if (scored) OK(kvc_table_keep_scores(other, true));
    for (int64_t r = 0; r < kvc_lines(t); r++) /* data past a row's tokens is ignored */
        for (int64_t i = kvc_table_columns(t, c.rows[2 * r]); i < c.x.columns; i++) c.entries[r * c.x.columns + i] = 5;
    if (c.slots && c.rows[0] < c.x.slot_capacity) c.slots[c.rows[0]] = t->slots[c.rows[0]] = -7;
    int64_t version = other->version;
    int n = 0;
    for (kvc_status status = KVC_E_MEMORY; status != KVC_OK; n++) {
        int64_t live = kvc_alloc_live();
        kvc_alloc_fail_at(n + 1);
        status = kvc_table_restore(other, &c.x);
        kvc_alloc_fail_at(0);
        if (status != KVC_OK)
            CHECK(strstr(kvc_error(), "out of memory") && other->seen == 0 && kvc_alloc_live() == live);
    }
    CHECK(n > 3 && other->version != version);
    take_references(t);
    free_copy(&c); /* it has its own arrays */
    copy a = copy_of(t), b = copy_of(other);
    CHECK(other->seen == t->seen && other->table_heads == t->table_heads && other->slot_capacity == t->slot_capacity);
    CHECK(other->columns == t->columns && !memcmp(a.entries, b.entries, (size_t)(kvc_lines(t) * t->columns * 8)));
    CHECK(!memcmp(a.rows, b.rows, (size_t)kvc_lines(t) * 16) && other->score_capacity == t->score_capacity);
    CHECK(!a.slots == !b.slots &&
          (!a.slots || !memcmp(a.slots, b.slots, (size_t)(kvc_lines(t) * t->slot_capacity * 4))));
    CHECK(!a.scores == !b.scores);
    free_copy(&a);
    free_copy(&b);
    kvc_table_free(t);
    OK(kvc_table_plan(other, 20, NULL)); /* it can be continued */
    kvc_table_commit(other);
    kvc_table_free(other);
    OK(kvc_pool_check(pool));
}

/* Applies `change`, expects the error, and restores everything. */
#define REFUSED(text, change)                                                                                          \
    do {                                                                                                               \
        copy c = copy_of(t);                                                                                           \
        change;                                                                                                        \
        FAILS(KVC_E_VALUE, text, kvc_table_restore(other, &c.x));                                                      \
        CHECK(other->seen == 0 && other->columns == columns);                                                          \
        free_copy(&c);                                                                                                 \
    } while (0)

static void test_refused(kvc_pool *pool)
{
    kvc_table *t = table_of(pool, false, 0), *other, *full;
    int64_t small, columns, sealed = t->entries[1], raw = t->entries[4];
    CHECK(kvc_entry_key(sealed) == KVC_INT8 && kvc_entry_key(raw) == KVC_RAW_F32);
    OK(kvc_table_new(pool, &SPEC, 2, &other));
    columns = other->columns;
    REFUSED("expected 2 sequences with 1 or 2 rows each, got 3 with 1", c.x.batch = 3);
    REFUSED("got 2 with 3", c.x.table_heads = 3);
    REFUSED("expected 0 to 2^31 slots, got -1", c.x.seen = -1);
    REFUSED("slots, got 2147483648", c.x.seen = (int64_t)INT32_MAX + 1);
    float one = 1;
    REFUSED("scores: expected scores if the table keeps them", c.x.scores = &one);
    REFUSED("rows: expected up to 60 tokens from a slot up to 60, got -1 from 3", c.rows[0] = -1);
    REFUSED("got 61 from 3", c.rows[0] = 61);
    REFUSED("from -1", c.rows[1] = -1);
    REFUSED("from 61", c.rows[3] = 61);
    REFUSED("rows: expected a length that 2 columns hold, got 57 tokens", c.x.columns = 2);
    REFUSED("slots: expected one below 60 for each of 57 tokens, got fewer", c.rows[1] = 4);
    REFUSED("entries: expected a page at column 0, got -1", c.entries[0] = KVC_NONE);
    REFUSED("entries: expected a page at column 1, got 65535", c.entries[1] = 0xffff);
    REFUSED("entries: expected a page at column 1", c.entries[1] = kvc_entry(0, KVC_INT8, 200));
    REFUSED("(sinks), got one of formats", c.entries[0] = sealed);
    REFUSED("(it is not full), got one of formats", c.entries[4] = sealed);
    REFUSED("raw pages in raw_f32, got raw_f16",
            c.entries[1] = kvc_entry(kvc_entry_offset(sealed), KVC_RAW_F16, KVC_INT4));
    REFUSED("multiple of 32", c.entries[1] = kvc_entry(kvc_entry_offset(sealed), KVC_MXFP4, KVC_INT4));
    OK(kvc_pool_alloc(pool, 64, &small));
    REFUSED("got a slot of 64", c.entries[1] = kvc_entry(small, KVC_INT8, KVC_INT4));
    REFUSED("got a slot of 0", c.entries[1] = kvc_entry(small + 64, KVC_INT8, KVC_INT4));
    kvc_pool_unref(pool, small);
    OK(kvc_table_plan(other, 1, NULL));
    REFUSED("restore", (void)c);
    kvc_table_rollback(other);
    full = table_of(pool, false, 0);
    copy whole = copy_of(t);
    FAILS(KVC_E_VALUE, "expected an empty table, got one of 60 slots", kvc_table_restore(full, &whole.x));
    free_copy(&whole);
    kvc_table_free(full);
    kvc_table_free(t);
    t = table_of(pool, true, 2);
    REFUSED("scores: expected scores if the table keeps them", (void)c);
    OK(kvc_table_keep_scores(other, true));
    REFUSED("scores: expected scores if the table keeps them", c.x.scores = NULL);
    REFUSED("scores: expected numbers, got NaN", c.scores[3] = NAN);
    REFUSED("scores: expected one for each of", c.x.score_capacity = 1);
    REFUSED("for each of", c.x.slot_capacity = 1);
    REFUSED("slots: expected -1 (dead) or one below 60, got -2", c.slots[0] = -2);
    REFUSED("one below 60, got 60", c.slots[1] = 60);
    REFUSED("one below 60, got 60", c.slots[3 * c.x.slot_capacity + 1] = 60);
    kvc_table_free(t);
    kvc_table_free(other);
}

/* Maximum sizes: slots, and scores of the longest row. */
static void test_longest(kvc_pool *pool)
{
    kvc_table *t = table_of(pool, true, 1), *other;
    copy c = copy_of(t);
    int64_t n = c.rows[0] > c.rows[2] ? c.rows[0] : c.rows[2], none[4] = {0};
    c.x.score_capacity = n;
    memset(c.scores, 0, (size_t)(2 * 2 * n) * sizeof *c.scores);
    OK(kvc_table_new(pool, &SPEC, 2, &other));
    OK(kvc_table_keep_scores(other, true));
    OK(kvc_table_restore(other, &c.x));
    take_references(t);
    kvc_table_free(other);
    OK(kvc_table_new(pool, &SPEC, 2, &other));
    OK(kvc_table_restore(other, &(kvc_contents){2, 1, 0, 0, 0, INT32_MAX, none, none, NULL, NULL}));
    CHECK(other->seen == INT32_MAX);
    kvc_table_free(other);
    kvc_table_free(t);
    free_copy(&c);
}

void test_restores(void)
{
    kvc_pool *pool;
    kvc_pool_stats left;
    OK(kvc_pool_new(64 * MB, &pool));
    for (int64_t heads = 0; heads < 3; heads++)
        for (int scored = 0; scored < 2; scored++) test_taken_over(pool, scored, heads);
    test_longest(pool);
    test_refused(pool);
    kvc_pool_get_stats(pool, &left);
    CHECK(left.slots == 0);
    kvc_pool_release(pool);
}
