/* test_table.c - tables: a random walk in which every allocation may fail, compared with the expected contents of each
 * slot.
 *
 * The walk emulates the op: it copies tags from raw to sealed pages and writes a tag per new token, at the start and at
 * the end of the group of pages, so that writing to a shared page, or an incomplete copy, shows as a wrong tag. */
#include "harness.h"
#include "table/table.h"

enum { ROWS = 5, SLOTS = 900 };

/* Expected contents of slot s of row b; 0: nothing (padding). */
typedef struct model {
    int32_t tag[ROWS][SLOTS];
} model;

static char *tag_of(const kvc_table *t, int64_t c, int64_t entry, int64_t token, int last)
{
    int64_t bytes = kvc_group_bytes(t, c, kvc_entry_key(entry), kvc_entry_value(entry));
    return (char *)kvc_pool_base(t->pool) + kvc_entry_offset(entry) + (last ? bytes - 4 * (token + 1) : 4 * token);
}

static int64_t slot_of(const kvc_table *t, int64_t b, int64_t i)
{
    return t->slots ? t->slots[b * t->slot_capacity + i] : t->rows[2 * b + 1] + i;
}

/* Every live token has its tag, in slot order, every expected slot is stored, and no page is lost. */
static void check_table(const kvc_table *t, const model *m)
{
    const kvc_spec *s = &t->spec;
    kvc_table_stats stats;
    int64_t kept = 0, wanted = 0;
    for (int64_t b = 0; b < t->batch; b++) {
        int64_t n = t->rows[2 * b], before = -1;
        CHECK(kvc_table_columns(t, n) <= t->columns && (!t->slots || n <= t->slot_capacity));
        for (int64_t c = 0; c < t->columns; c++) {
            bool used = c < kvc_table_columns(t, n) && (c > 0 || s->sinks > 0);
            int64_t entry = t->entries[b * t->columns + c];
            CHECK(used == (entry != KVC_NONE));
            if (used) CHECK(kvc_pool_refs(t->pool, kvc_entry_offset(entry)) > 0);
            if (used && c == 0) CHECK(kvc_entry_key(entry) == s->raw && kvc_entry_value(entry) == s->raw);
        }
        for (int64_t i = 0; i < n; i++) {
            int64_t slot = slot_of(t, b, i), c = kvc_column(i, s->sinks, s->page_size);
            int64_t token = i - kvc_column_first(c, s->sinks, s->page_size);
            if (slot < 0) continue;
            CHECK(slot > before && slot < t->seen);
            before = slot;
            kept++;
            for (int last = 0; last < 2; last++)
                CHECK(m->tag[b][slot] &&
                      !memcmp(tag_of(t, c, t->entries[b * t->columns + c], token, last), &m->tag[b][slot], 4));
        }
        for (int64_t i = 0; i < t->seen; i++) wanted += m->tag[b][i] != 0;
    }
    kvc_table_get_stats(t, &stats);
    CHECK(kept == wanted && stats.kept == kept && stats.seen == t->seen);
    OK(kvc_pool_check(t->pool));
}

/* Where a new token of this column is written: pages being sealed are written raw. */
static int64_t written(const kvc_table *t, int64_t entry)
{
    int64_t n;
    const int64_t *seals = kvc_table_seals(t, &n);
    for (int64_t i = 0; i < n; i++)
        if (seals[2 * i + 1] == entry) return seals[2 * i];
    return entry;
}

/* Emulates the op of an append. */
static void write_tokens(const kvc_table *t, int64_t T, const uint8_t *real, model *m)
{
    static int32_t number;
    const kvc_spec *s = &t->spec;
    int64_t n_seals;
    const int64_t *seals = kvc_table_seals(t, &n_seals);
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t j = 0, i = t->rows[2 * b]; j < T; j++) {
            if (real && !real[b * T + j]) {
                m->tag[b][t->seen + j] = 0;
                continue;
            }
            int64_t c = kvc_column(i, s->sinks, s->page_size), first = kvc_column_first(c, s->sinks, s->page_size);
            m->tag[b][t->seen + j] = ++number;
            for (int last = 0; last < 2; last++)
                memcpy(tag_of(t, c, written(t, t->entries[b * t->columns + c]), i - first, last), &number, 4);
            i++;
        }
    for (int64_t i = 0; i < n_seals; i++)
        for (int64_t k = 0; k < s->page_size; k++)
            for (int last = 0; last < 2; last++)
                memcpy(tag_of(t, 1, seals[2 * i + 1], k, last), tag_of(t, 1, seals[2 * i], k, last), 4);
}

/* ---------------------------------------------------------------- unchanged state */

typedef struct snapshot {
    int64_t batch, columns, slot_capacity, seen, used, slots;
    int64_t *entries, *rows;
    int32_t *sidecar;
} snapshot;

static snapshot take(const kvc_table *t)
{
    kvc_pool_stats pool;
    kvc_pool_get_stats(t->pool, &pool);
    snapshot s = {t->batch, t->columns, t->slot_capacity, t->seen, pool.used, pool.slots, NULL, NULL, NULL};
    size_t cells = (size_t)(t->batch * t->columns), side = (size_t)(t->batch * t->slot_capacity);
    s.entries = malloc(cells * 8);
    s.rows = malloc((size_t)t->batch * 16);
    s.sidecar = malloc(side * 4 + 4);
    memcpy(s.entries, t->entries, cells * 8);
    memcpy(s.rows, t->rows, (size_t)t->batch * 16);
    if (t->slots) memcpy(s.sidecar, t->slots, side * 4);
    return s;
}

static void check_same(const kvc_table *t, const snapshot *s)
{
    kvc_pool_stats pool;
    kvc_pool_get_stats(t->pool, &pool);
    CHECK(t->batch == s->batch && t->seen == s->seen && pool.used == s->used && pool.slots == s->slots && !t->plan);
    CHECK(t->slot_capacity == s->slot_capacity && t->columns >= s->columns && !t->slots == !s->slot_capacity);
    for (int64_t b = 0; b < t->batch; b++) /* only the capacity for columns may differ */
        for (int64_t c = 0; c < t->columns; c++)
            CHECK(t->entries[b * t->columns + c] == (c < s->columns ? s->entries[b * s->columns + c] : KVC_NONE));
    CHECK(!memcmp(t->rows, s->rows, (size_t)t->batch * 16));
    if (t->slots) CHECK(!memcmp(t->slots, s->sidecar, (size_t)(t->batch * t->slot_capacity) * 4));
}

static void drop(snapshot *s)
{
    free(s->entries);
    free(s->rows);
    free(s->sidecar);
}

/* Runs `call` with its first, second, ... allocation failing, until it succeeds. */
#define WITH_FAILURES(t, call)                                                                                         \
    do {                                                                                                               \
        snapshot before_ = take(t);                                                                                    \
        for (int64_t n_ = 1;; n_++) {                                                                                  \
            kvc_alloc_fail_at(n_);                                                                                     \
            kvc_status status_ = (call);                                                                               \
            kvc_alloc_fail_at(0);                                                                                      \
            if (status_ == KVC_OK) break;                                                                              \
            CHECK(status_ == KVC_E_MEMORY && n_ < 500);                                                                \
            check_same(t, &before_);                                                                                   \
        }                                                                                                              \
        drop(&before_);                                                                                                \
    } while (0)

/* ---------------------------------------------------------------- the walk */

/* Padding: none, on the left of the first append (no stored slots needed), or anywhere. */
typedef enum pads { NOWHERE, LEFT, ANYWHERE } pads;

static void append(kvc_table *t, model *m, pads where)
{
    int64_t T = random_below(3) ? random_below(6) : random_below(90);
    uint8_t mask[ROWS * 90], *real = where == ANYWHERE || (where == LEFT && t->seen == 0) ? mask : NULL;
    if (t->seen + T > SLOTS) return;
    for (int64_t b = 0; b < t->batch; b++) {
        int64_t left = random_below(T + 1);
        for (int64_t j = 0; j < T; j++) mask[b * T + j] = where == LEFT ? j >= left : random_below(8) > 0;
    }
    snapshot before = take(t);
    WITH_FAILURES(t, kvc_table_plan(t, T, real));
    FAILS(KVC_E_VALUE, "no append under way", kvc_table_plan(t, T, real));
    FAILS(KVC_E_VALUE, "no append under way", kvc_table_crop(t, 0));
    if (random_below(4) == 0) { /* the op has written, then something failed */
        model scratch = *m;
        write_tokens(t, T, real, &scratch);
        kvc_table_rollback(t);
        check_same(t, &before);
    } else {
        write_tokens(t, T, real, m);
        kvc_table_commit(t);
    }
    drop(&before);
}

static void reorder(kvc_table *t, model *m)
{
    int64_t index[ROWS], n = random_below(3) ? t->batch : 1 + random_below(ROWS);
    model old = *m;
    for (int64_t i = 0; i < n; i++) {
        index[i] = random_below(t->batch);
        memcpy(m->tag[i], old.tag[index[i]], sizeof m->tag[i]);
    }
    WITH_FAILURES(t, kvc_table_select(t, index, n));
}

static void walk(kvc_pool *pool, const kvc_spec *spec, pads where, int steps)
{
    static model m, other;
    kvc_table *t, *clone = NULL;
    OK(kvc_table_new(pool, spec, 1 + random_below(ROWS), &t));
    memset(&m, 0, sizeof m);
    for (int step = 0; step < steps; step++) {
        int64_t what = random_below(20), back = random_below(what < 14 ? t->seen / 8 + 1 : t->seen / 2 + 1);
        int64_t seen = t->seen - back, batch = random_below(ROWS + 1);
        if (what < 11)
            append(t, &m, where);
        else if (what < 15)
            WITH_FAILURES(t, kvc_table_crop(t, seen));
        else if (what < 18)
            reorder(t, &m);
        else if (what < 19) {
            kvc_table_free(clone);
            WITH_FAILURES(t, kvc_table_clone(t, &clone));
            other = m;
            if (random_below(2)) { /* continue with the copy; the original must not change */
                kvc_table *swap = t;
                t = clone;
                clone = swap;
            }
        } else if (t->seen > SLOTS / 2 || batch == 0) {
            WITH_FAILURES(t, kvc_table_reset(t, batch));
        }
        check_table(t, &m);
        if (clone) check_table(clone, &other);
    }
    if (random_below(2)) OK(kvc_table_plan(t, 3, NULL)); /* freed in the middle of an append */
    kvc_table_free(t);
    kvc_table_free(clone);
    kvc_pool_stats left;
    kvc_pool_get_stats(pool, &left);
    CHECK(left.slots == 0 && left.resident == 0);
}

/* ---------------------------------------------------------------- individual cases */

static void test_specs(kvc_pool *pool)
{
    const kvc_spec good = {2, 64, 32, 64, 4, 0, KVC_RAW_BF16, KVC_INT8, KVC_INT4, false};
    kvc_table *t;
#define BAD(change, text)                                                                                              \
    do {                                                                                                               \
        kvc_spec s = good;                                                                                             \
        change;                                                                                                        \
        FAILS(KVC_E_VALUE, text, kvc_table_new(pool, &s, 1, &t));                                                      \
        CHECK(!t);                                                                                                     \
    } while (0)
    BAD(s.heads = 0, "KV heads");
    BAD(s.heads = INT64_MAX / 2, "KV heads");
    BAD(s.key_dim = 24, "head dim");
    BAD(s.value_dim = KVC_MAX_DIM + 16, "head dim");
    BAD(s.value_dim = 40, "head dim");
    BAD(s.page_size = 0, "page_size");
    BAD(s.page_size = 72, "page_size");
    BAD(s.page_size = 512, "page_size");
    BAD(s.sinks = -1, "sinks");
    BAD(s.sinks = 257, "sinks");
    BAD(s.recent = -1, "recent");
    BAD(s.raw = KVC_INT8, "raw: expected a raw format");
    BAD(s.raw = -1, "raw: expected a raw format");
    BAD(s.key = 99, "key: expected a format");
    BAD(s.key = KVC_RAW_F16, "key: expected a quantized format or the raw format");
    BAD(s.value = KVC_RAW_F32, "value: expected a quantized format or the raw format");
    BAD(s.direct = true, "value: expected an 8-bit format");
    BAD((s.direct = true, s.key = KVC_INT4), "key: expected an 8-bit format");
    BAD((s.direct = true, s.key = s.value = s.raw), "key: expected an 8-bit format");
    BAD((s.direct = true, s.value = KVC_INT8, s.recent = 8), "recent");
    FAILS(KVC_E_VALUE, "sequences", kvc_table_new(pool, &good, 0, &t));
    FAILS(KVC_E_VALUE, "sequences", kvc_table_new(pool, &good, INT64_MAX, &t));

    int64_t live = kvc_alloc_live(), n = 1;
    for (; kvc_alloc_fail_at(n), kvc_table_new(pool, &good, 2, &t) != KVC_OK; n++)
        CHECK(n < 9 && !t && kvc_alloc_live() == live);
    kvc_alloc_fail_at(0);
    CHECK(n == 4);
    FAILS(KVC_E_VALUE, "0 or more tokens", kvc_table_plan(t, -1, NULL));
    FAILS(KVC_E_VALUE, "2^31 slots", kvc_table_plan(t, (int64_t)1 << 31, NULL));
    FAILS(KVC_E_VALUE, "crop", kvc_table_crop(t, 1));
    FAILS(KVC_E_VALUE, "crop", kvc_table_crop(t, -1));
    FAILS(KVC_E_VALUE, "select", kvc_table_select(t, NULL, 0));
    FAILS(KVC_E_VALUE, "rows from 0 to 1, got 2", kvc_table_select(t, (int64_t[]){0, 2}, 2));
    FAILS(KVC_E_VALUE, "got -1", kvc_table_select(t, (int64_t[]){-1}, 1));
    FAILS(KVC_E_VALUE, "reset", kvc_table_reset(t, -1));
    kvc_table_commit(t); /* without a plan: nothing */
    kvc_table_rollback(t);
    CHECK(!kvc_table_seals(t, &n) && n == 0 && t->seen == 0);
    kvc_table_free(t);
    kvc_table_free(NULL);
    CHECK(kvc_alloc_live() == live);
}

/* A view of the entries outlives growth of the table, and the table itself. */
static void test_views(kvc_pool *pool)
{
    const kvc_spec spec = {1, 16, 16, 16, 0, 0, KVC_RAW_F32, KVC_RAW_F32, KVC_RAW_F32, false};
    kvc_table *t;
    OK(kvc_table_new(pool, &spec, 1, &t));
    int64_t *view = kvc_array_retain(t->entries), version = t->version;
    OK(kvc_table_plan(t, 16 * 40, NULL));
    kvc_table_commit(t);
    CHECK(t->entries != view && t->version > version && view[0] == KVC_NONE && view[3] == KVC_NONE);
    kvc_table_free(t);
    CHECK(view[1] == KVC_NONE);
    kvc_array_release(view);
    CHECK(!kvc_array_retain(NULL));
}

void test_tables(void)
{
    static const kvc_spec specs[] = {
        /* heads, dims, page size, sinks, recent, raw, key, value, direct */
        {2, 32, 32, 16, 4, 0, KVC_RAW_BF16, KVC_INT8, KVC_INT4, false},
        {1, 16, 32, 32, 0, 0, KVC_RAW_F32, KVC_INT8, KVC_FP8_E4M3, false},
        {1, 32, 16, 16, 20, 40, KVC_RAW_F16, KVC_RAW_F16, KVC_INT8, false},
        {2, 16, 16, 16, 3, 0, KVC_RAW_F32, KVC_RAW_F32, KVC_RAW_F32, false},
        {1, 32, 32, 32, 4, 0, KVC_RAW_F32, KVC_INT8, KVC_FP8_E4M3, true},
    };
    kvc_pool *pool;
    OK(kvc_pool_new(256 * MB, &pool));
    test_specs(pool);
    test_views(pool);
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++)
        for (pads where = NOWHERE; where <= ANYWHERE; where++) walk(pool, &specs[i], where, 250);
    kvc_pool_release(pool);
}
