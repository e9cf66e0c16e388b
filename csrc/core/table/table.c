/* table.c - the pages of B sequences in one layer: create and free, commit and rollback of plans, select, reset. Slots,
 * crop and statistics: table_slots.c. Appends: table_plan.c. Evictions: table_evict.c. */
#include "table.h"

#include <stdatomic.h>
#include <string.h>

#define MOST (1 << 24) /* limit on heads and sequences, so that their products with page sizes cannot overflow */

/* ---------------------------------------------------------------- counted arrays */

typedef struct header {
    _Alignas(KVC_ALIGN) atomic_llong owners;
} header;

static header *header_of(void *array) { return (header *)(void *)((char *)array - sizeof(header)); }

kvc_status kvc_array_new(int64_t count, int64_t size, void *out)
{
    header *h;
    int64_t bytes = 0;
    memset(out, 0, sizeof h);
    KVC_CHECK(!__builtin_mul_overflow(count, size, &bytes) && bytes <= INT64_MAX / 2, KVC_E_MEMORY,
              "out of memory: a table of %lld x %lld bytes", (long long)count, (long long)size);
    KVC_TRY(kvc_alloc(1, bytes + (int64_t)sizeof *h, &h));
    atomic_init(&h->owners, 1);
    void *array = h + 1;
    memcpy(out, &array, sizeof array);
    return KVC_OK;
}

void *kvc_array_retain(void *array)
{
    if (array) atomic_fetch_add(&header_of(array)->owners, 1);
    return array;
}

void kvc_array_release(void *array)
{
    if (array && atomic_fetch_sub(&header_of(array)->owners, 1) == 1) kvc_free(header_of(array));
}

/* ---------------------------------------------------------------- create and free */

kvc_span kvc_table_sealed(const kvc_table *t, int64_t c)
{
    int64_t first = kvc_column_first(c, t->spec.sinks, t->spec.page_size);
    for (int64_t i = 0; i < t->n_spans; i++)
        if (first < t->spans[i].end) return t->spans[i];
    return (kvc_span){INT64_MAX, t->spec.key, t->spec.value};
}

int64_t kvc_group_bytes(const kvc_table *t, int64_t c, int key, int value)
{
    int64_t tokens = kvc_column_layout(c, t->spec.sinks, t->spec.page_size);
    return kvc_entry_heads(t) * kvc_page_layout(key, value, t->spec.key_dim, t->spec.value_dim, tokens).bytes;
}

static kvc_status check_side(const kvc_spec *s, int format, int64_t dim, const char *side)
{
    const kvc_format_info *info = kvc_format_get(format);
    KVC_CHECK(info, KVC_E_VALUE, "table: %s: expected a format, got code %d", side, format);
    KVC_TRY(kvc_format_check(format, dim));
    KVC_CHECK(!kvc_format_is_raw(format) || format == s->raw, KVC_E_VALUE,
              "table: %s: expected a quantized format or the raw format of the open page, got %s", side, info->name);
    KVC_CHECK(!s->direct || (info->bits == 8 && info->keys == KVC_KEYS_TOKEN), KVC_E_VALUE,
              "table: %s: expected an 8-bit format to append without an open page (residual_length=0), got %s; formats "
              "below 8 bits share bytes or page statistics: omit residual_length",
              side, info->name);
    return KVC_OK;
}

static kvc_status check_spec(const kvc_spec *s, int64_t batch)
{
    KVC_CHECK(s->heads >= 1 && s->heads <= MOST && batch >= 1 && batch <= MOST, KVC_E_VALUE,
              "table: expected from 1 to %d KV heads and sequences, got %lld and %lld", MOST, (long long)s->heads,
              (long long)batch);
    KVC_TRY(kvc_page_size_check(s->page_size, "table"));
    KVC_CHECK(s->sinks >= 0 && s->sinks <= KVC_MAX_PAGE && s->recent >= 0, KVC_E_VALUE,
              "table: expected sinks from 0 to %d and recent of at least 0, got %lld and %lld", KVC_MAX_PAGE,
              (long long)s->sinks, (long long)s->recent);
    KVC_CHECK(kvc_format_bits(s->raw) && kvc_format_is_raw(s->raw), KVC_E_VALUE,
              "table: raw: expected a raw format, got code %d", s->raw);
    KVC_CHECK(!s->direct || s->recent == 0, KVC_E_VALUE, "table: recent: expected 0 without an open page, got %lld",
              (long long)s->recent);
    KVC_TRY(check_side(s, s->key, s->key_dim, "key"));
    return check_side(s, s->value, s->value_dim, "value");
}

kvc_status kvc_table_set_spans(kvc_table *t, const kvc_span *spans, int64_t n)
{
    KVC_CHECK(n >= 0 && n <= KVC_MAX_SPANS, KVC_E_VALUE, "table: spans: expected at most %d, got %lld", KVC_MAX_SPANS,
              (long long)n);
    for (int64_t i = 0; i < n; i++) {
        KVC_CHECK(spans[i].end > (i ? spans[i - 1].end : 0), KVC_E_VALUE,
                  "table: spans: expected ends that ascend from 1, got %lld after %lld", (long long)spans[i].end,
                  (long long)(i ? spans[i - 1].end : 0));
        KVC_TRY(check_side(&t->spec, spans[i].key, t->spec.key_dim, "spans: key"));
        KVC_TRY(check_side(&t->spec, spans[i].value, t->spec.value_dim, "spans: value"));
    }
    if (n) memcpy(t->spans, spans, (size_t)n * sizeof *spans);
    t->n_spans = n;
    return KVC_OK;
}

static void clear(kvc_table *t)
{
    for (int64_t i = 0; i < kvc_lines(t) * t->columns; i++) t->entries[i] = KVC_NONE;
    memset(t->rows, 0, (size_t)(kvc_lines(t) * 2) * sizeof *t->rows);
    t->seen = 0;
}

static void unref_all(kvc_table *t)
{
    for (int64_t i = 0; i < kvc_lines(t) * t->columns; i++)
        if (t->entries[i] != KVC_NONE) kvc_pool_unref(t->pool, kvc_entry_offset(t->entries[i]));
}

kvc_status kvc_table_new(kvc_pool *pool, const kvc_spec *spec, int64_t batch, kvc_table **out)
{
    kvc_table *t;
    *out = NULL;
    KVC_TRY(check_spec(spec, batch));
    KVC_TRY(kvc_alloc(1, sizeof *t, &t));
    *t = (kvc_table){.spec = *spec, .batch = batch, .table_heads = 1, .columns = 4};
    kvc_status status = kvc_array_new(batch * t->columns, sizeof *t->entries, &t->entries);
    if (status == KVC_OK) status = kvc_array_new(batch * 2, sizeof *t->rows, &t->rows);
    if (status != KVC_OK) {
        kvc_array_release(t->entries);
        kvc_free(t);
        return status;
    }
    clear(t);
    t->pool = kvc_pool_retain(pool);
    *out = t;
    return KVC_OK;
}

void kvc_table_free(kvc_table *t)
{
    if (!t) return;
    kvc_table_rollback(t);
    unref_all(t);
    kvc_table_release_arrays(t);
    kvc_pool_release(t->pool);
    kvc_free(t);
}

/* Ends the append or eviction in progress, if any. */
static void end_plan(kvc_table *t, bool commit)
{
    if (!t->plan) return;
    if (t->plan->eviction)
        kvc_eviction_end(t, commit);
    else
        kvc_append_end(t, commit);
    kvc_free(t->plan);
    t->plan = NULL;
}

void kvc_table_commit(kvc_table *t) { end_plan(t, true); }

void kvc_table_rollback(kvc_table *t) { end_plan(t, false); }

kvc_status kvc_table_no_plan(const kvc_table *t, const char *what)
{
    KVC_CHECK(!t->plan, KVC_E_VALUE, "%s: expected no append under way, and no eviction; commit or roll it back first",
              what);
    return KVC_OK;
}

void kvc_table_release_arrays(kvc_table *t)
{
    kvc_array_release(t->entries);
    kvc_array_release(t->rows);
    kvc_array_release(t->slots);
    kvc_array_release(t->scores);
}

/* Copies the rows `index` of t's arrays to new arrays in *to. Page references are not counted. */
static kvc_status copy_rows(const kvc_table *t, const int64_t *index, int64_t n, kvc_table *to)
{
    int64_t Ht = t->table_heads;
    size_t cells = (size_t)(Ht * t->columns), slots = (size_t)(Ht * t->slot_capacity);
    size_t scores = (size_t)(t->spec.heads * t->score_capacity);
    kvc_table now = *t;
    now.batch = n;
    now.entries = NULL, now.rows = NULL, now.slots = NULL, now.scores = NULL;
    kvc_status status = kvc_array_new(n * (int64_t)cells, sizeof *now.entries, &now.entries);
    if (status == KVC_OK) status = kvc_array_new(n * Ht * 2, sizeof *now.rows, &now.rows);
    if (status == KVC_OK && t->slots) status = kvc_array_new(n * (int64_t)slots, sizeof *now.slots, &now.slots);
    if (status == KVC_OK && t->scores) status = kvc_array_new(n * (int64_t)scores, sizeof *now.scores, &now.scores);
    if (status != KVC_OK) {
        kvc_table_release_arrays(&now);
        return status;
    }
    for (int64_t i = 0; i < n; i++) {
        size_t b = (size_t)(index ? index[i] : i), to_b = (size_t)i;
        memcpy(now.entries + to_b * cells, t->entries + b * cells, cells * sizeof *t->entries);
        memcpy(now.rows + to_b * 2 * (size_t)Ht, t->rows + b * 2 * (size_t)Ht, 2 * (size_t)Ht * sizeof *t->rows);
        if (t->slots) memcpy(now.slots + to_b * slots, t->slots + b * slots, slots * sizeof *t->slots);
        if (t->scores) memcpy(now.scores + to_b * scores, t->scores + b * scores, scores * sizeof *t->scores);
    }
    *to = now;
    return KVC_OK;
}

static void ref_all(kvc_table *t)
{
    for (int64_t i = 0; i < kvc_lines(t) * t->columns; i++)
        if (t->entries[i] != KVC_NONE) kvc_pool_ref(t->pool, kvc_entry_offset(t->entries[i]));
}

kvc_store kvc_table_store(const kvc_table *t)
{
    return (kvc_store){.arena = kvc_pool_base(t->pool),
                       .arena_bytes = kvc_pool_extent(t->pool),
                       .table = t->entries,
                       .rows = t->rows,
                       .slots = t->slots,
                       .slot_capacity = t->slot_capacity,
                       .batch = t->batch,
                       .heads = t->spec.heads,
                       .table_heads = t->table_heads,
                       .columns = t->columns,
                       .key_dim = t->spec.key_dim,
                       .value_dim = t->spec.value_dim,
                       .page_size = t->spec.page_size,
                       .sinks = t->spec.sinks};
}

kvc_status kvc_table_clone(const kvc_table *t, kvc_table **out)
{
    kvc_table *copy;
    *out = NULL;
    KVC_TRY(kvc_table_no_plan(t, "clone"));
    KVC_TRY(kvc_alloc(1, sizeof *copy, &copy));
    kvc_status status = copy_rows(t, NULL, t->batch, copy);
    if (status != KVC_OK) {
        kvc_free(copy);
        return status;
    }
    kvc_pool_retain(copy->pool);
    ref_all(copy);
    *out = copy;
    return KVC_OK;
}

static kvc_status check_rows(const kvc_table *t, const int64_t *index, int64_t n)
{
    KVC_TRY(kvc_table_no_plan(t, "select"));
    KVC_CHECK(n >= 1 && n <= MOST, KVC_E_VALUE, "select: expected at least one row and at most %d, got %lld", MOST,
              (long long)n);
    for (int64_t i = 0; i < n; i++)
        KVC_CHECK(index[i] >= 0 && index[i] < t->batch, KVC_E_VALUE, "select: expected rows from 0 to %lld, got %lld",
                  (long long)t->batch - 1, (long long)index[i]);
    return KVC_OK;
}

/* Replaces t's arrays by those of `now`, which were copied from its rows. */
static void take_rows(kvc_table *t, kvc_table *now)
{
    ref_all(now);
    unref_all(t);
    if (now->batch == t->batch) { /* beam search: copy in place, so that views of the arrays stay valid */
        size_t lines = (size_t)kvc_lines(t);
        /* NOLINTBEGIN: copy_rows allocated the arrays */
        memcpy(t->entries, now->entries, lines * (size_t)t->columns * sizeof *t->entries);
        memcpy(t->rows, now->rows, lines * 2 * sizeof *t->rows);
        if (t->slots) memcpy(t->slots, now->slots, lines * (size_t)t->slot_capacity * sizeof *t->slots);
        if (t->scores)
            memcpy(t->scores, now->scores, (size_t)(t->batch * t->spec.heads * t->score_capacity) * sizeof *t->scores);
        /* NOLINTEND */
    } else {
        kvc_table old = *t;
        *t = *now;
        t->version++;
        *now = old;
    }
    kvc_table_release_arrays(now);
}

kvc_status kvc_tables_select(kvc_table *const *tables, int64_t count, const int64_t *index, int64_t n)
{
    kvc_table *now;
    int64_t done = 0;
    for (int64_t i = 0; i < count; i++) KVC_TRY(check_rows(tables[i], index, n));
    KVC_TRY(kvc_alloc(count, sizeof *now, &now));
    kvc_status status = KVC_OK;
    for (; done < count && status == KVC_OK; done += status == KVC_OK)
        status = copy_rows(tables[done], index, n, &now[done]);
    for (int64_t i = 0; i < done; i++)
        if (status == KVC_OK)
            take_rows(tables[i], &now[i]);
        else
            kvc_table_release_arrays(&now[i]);
    kvc_free(now);
    return status;
}

kvc_status kvc_table_select(kvc_table *t, const int64_t *index, int64_t n)
{
    return kvc_tables_select(&t, 1, index, n);
}

kvc_status kvc_table_reset(kvc_table *t, int64_t batch)
{
    KVC_TRY(kvc_table_no_plan(t, "reset"));
    KVC_CHECK(batch >= 0 && batch <= MOST, KVC_E_VALUE, "reset: expected a batch of 0 (unchanged) to %d, got %lld",
              MOST, (long long)batch);
    batch = batch ? batch : t->batch;
    if (batch != t->batch) {
        int64_t *entries, *rows;
        KVC_TRY(kvc_array_new(batch * t->columns, sizeof *entries, &entries));
        kvc_status status = kvc_array_new(batch * 2, sizeof *rows, &rows);
        if (status != KVC_OK) {
            kvc_array_release(entries);
            return status;
        }
        unref_all(t);
        kvc_array_release(t->entries);
        kvc_array_release(t->rows);
        t->entries = entries;
        t->rows = rows;
        t->batch = batch;
        t->version++;
    } else { /* cannot fail: the source table no longer refers to the pages */
        unref_all(t);
        t->version += t->table_heads > 1; /* the arrays may have a capacity for more lines than in use */
    }
    t->table_heads = 1;
    kvc_table_set_slots(t, NULL, 0);
    kvc_table_set_scores(t, NULL, 0);
    clear(t);
    return KVC_OK;
}
