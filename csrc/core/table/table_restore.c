/* table_restore.c - restores a table from a file, a prefix or another tier. The input is untrusted and checked
 * completely. */
#include "table.h"

#include <math.h>
#include <string.h>

#define HERE "restore: "

/* Whether this table could have created the page `entry` at column c of a line of n tokens. */
static kvc_status check_page(const kvc_table *t, const kvc_contents *x, int64_t entry, int64_t c, int64_t n)
{
    const kvc_spec *s = &t->spec;
    int64_t heads = x->table_heads == 1 ? s->heads : 1, tokens = kvc_column_layout(c, s->sinks, s->page_size);
    int key = kvc_entry_key(entry), value = kvc_entry_value(entry);
    int64_t end = kvc_column_first(c, s->sinks, s->page_size) + kvc_column_size(c, s->sinks, s->page_size);
    bool raw = key == s->raw && value == s->raw;
    KVC_CHECK(entry >= 0 && kvc_format_get(key) && kvc_format_get(value), KVC_E_VALUE,
              HERE "entries: expected a page at column %lld, got %lld", (long long)c, (long long)entry);
    KVC_CHECK(raw || (c > 0 && (n >= end || s->direct)), KVC_E_VALUE,
              HERE "entries: expected a raw page at column %lld (%s), got one of formats %d and %d", (long long)c,
              c ? "it is not full" : "sinks", key, value);
    for (int i = 0; i < 2; i++) {
        int format = i ? value : key;
        KVC_TRY(kvc_format_check(format, i ? s->value_dim : s->key_dim));
        KVC_CHECK(!kvc_format_is_raw(format) || format == s->raw, KVC_E_VALUE,
                  HERE "entries: expected raw pages in %s, got %s", kvc_format_get(s->raw)->name,
                  kvc_format_get(format)->name);
    }
    int64_t bytes = heads * kvc_page_layout(key, value, s->key_dim, s->value_dim, tokens).bytes;
    KVC_CHECK(kvc_pool_bytes(t->pool, kvc_entry_offset(entry)) >= bytes, KVC_E_VALUE,
              HERE "entries: expected a page of %lld bytes at column %lld, got a slot of %lld", (long long)bytes,
              (long long)c, (long long)kvc_pool_bytes(t->pool, kvc_entry_offset(entry)));
    return KVC_OK;
}

static kvc_status check_line(const kvc_table *t, const kvc_contents *x, int64_t r)
{
    int64_t n = x->rows[2 * r], first = x->rows[2 * r + 1];
    int64_t most = x->slots ? INT32_MAX : x->seen; /* dead tokens have no slot */
    KVC_CHECK(n >= 0 && n <= most && first >= 0 && first <= x->seen, KVC_E_VALUE,
              HERE "rows: expected up to %lld tokens from a slot up to %lld, got %lld from %lld", (long long)most,
              (long long)x->seen, (long long)n, (long long)first);
    KVC_CHECK(kvc_table_columns(t, n) <= x->columns, KVC_E_VALUE,
              HERE "rows: expected a length that %lld columns hold, got %lld tokens", (long long)x->columns,
              (long long)n);
    KVC_CHECK(x->slots ? n <= x->slot_capacity : first + n <= x->seen, KVC_E_VALUE,
              HERE "slots: expected one below %lld for each of %lld tokens, got fewer", (long long)x->seen,
              (long long)n);
    for (int64_t i = 0; x->slots && i < n; i++) {
        int32_t slot = x->slots[r * x->slot_capacity + i];
        KVC_CHECK(slot >= -1 && slot < x->seen, KVC_E_VALUE, HERE "slots: expected -1 (dead) or one below %lld, got %d",
                  (long long)x->seen, slot);
    }
    for (int64_t c = t->spec.sinks ? 0 : 1; c < kvc_table_columns(t, n); c++)
        KVC_TRY(check_page(t, x, x->entries[r * x->columns + c], c, n));
    return KVC_OK;
}

static kvc_status check_shape(const kvc_table *t, const kvc_contents *x)
{
    KVC_TRY(kvc_table_no_plan(t, "restore"));
    KVC_CHECK(t->seen == 0, KVC_E_VALUE, HERE "expected an empty table, got one of %lld slots", (long long)t->seen);
    KVC_CHECK(x->batch == t->batch && (x->table_heads == 1 || x->table_heads == t->spec.heads), KVC_E_VALUE,
              HERE "expected %lld sequences with 1 or %lld rows each, got %lld with %lld", (long long)t->batch,
              (long long)t->spec.heads, (long long)x->batch, (long long)x->table_heads);
    KVC_CHECK(x->seen >= 0 && x->seen <= INT32_MAX, KVC_E_VALUE, HERE "expected 0 to 2^31 slots, got %lld",
              (long long)x->seen);
    KVC_CHECK(!x->scores == !t->scored || x->seen == 0, KVC_E_VALUE,
              HERE "scores: expected scores if the table keeps them, and none otherwise");
    return KVC_OK;
}

static kvc_status check_lines(const kvc_table *t, const kvc_contents *x)
{
    for (int64_t r = 0; r < x->batch * x->table_heads; r++) {
        KVC_TRY(check_line(t, x, r));
        KVC_CHECK(!x->scores || x->rows[2 * r] <= x->score_capacity, KVC_E_VALUE,
                  HERE "scores: expected one for each of %lld tokens, got %lld", (long long)x->rows[2 * r],
                  (long long)x->score_capacity);
    }
    for (int64_t i = 0; x->scores && i < x->batch * t->spec.heads * x->score_capacity; i++)
        KVC_CHECK(!isnan(x->scores[i]), KVC_E_VALUE, HERE "scores: expected numbers, got NaN");
    return KVC_OK;
}

static kvc_status copy_array(const void *from, int64_t count, int64_t size, void *out)
{
    void *array;
    memset(out, 0, sizeof array);
    if (!from) return KVC_OK;
    KVC_TRY(kvc_array_new(count, size, &array));
    if (count) memcpy(array, from, (size_t)(count * size));
    memcpy(out, &array, sizeof array);
    return KVC_OK;
}

/* The caller's arrays are copied before they are checked: they may be a mapped file that another process writes to. */
kvc_status kvc_table_restore(kvc_table *t, const kvc_contents *given)
{
    kvc_contents x = *given;
    KVC_TRY(check_shape(t, &x));
    kvc_table now = *t;
    int64_t *entries;
    now.table_heads = x.table_heads;
    now.columns = x.columns > t->columns ? x.columns : t->columns;
    now.slot_capacity = x.slots ? x.slot_capacity : 0;
    now.score_capacity = x.scores ? x.score_capacity : 0;
    now.seen = x.seen;
    int64_t lines = kvc_lines(&now);
    kvc_status status = kvc_array_new(lines * now.columns, sizeof *now.entries, &now.entries), part;
    if ((part = copy_array(x.entries, lines * x.columns, sizeof *entries, &entries)) != KVC_OK) status = part;
    if ((part = copy_array(x.rows, lines * 2, sizeof *now.rows, &now.rows)) != KVC_OK) status = part;
    if ((part = copy_array(x.slots, lines * x.slot_capacity, sizeof *now.slots, &now.slots)) != KVC_OK) status = part;
    part = copy_array(x.scores, t->batch * t->spec.heads * x.score_capacity, sizeof *now.scores, &now.scores);
    if (part != KVC_OK) status = part;
    x.entries = entries, x.rows = now.rows, x.slots = now.slots, x.scores = now.scores;
    if (status == KVC_OK) status = check_lines(t, &x);
    for (int64_t i = 0; status == KVC_OK && i < lines * now.columns; i++) {
        int64_t r = i / now.columns, c = i % now.columns;
        bool used = c >= (t->spec.sinks ? 0 : 1) && c < kvc_table_columns(t, now.rows[2 * r]);
        now.entries[i] = used ? x.entries[r * x.columns + c] : KVC_NONE;
    }
    kvc_array_release(entries);
    if (status != KVC_OK) {
        kvc_table_release_arrays(&now);
        return status;
    }
    now.version++;
    kvc_table old = *t;
    *t = now;
    kvc_table_release_arrays(&old);
    return KVC_OK;
}
