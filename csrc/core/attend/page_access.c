/* page_access.c - resolves table entries to pages and their sides, and validates a store's entries. */
#include "page_access.h"

#include "base/alloc.h"
#include "base/util.h"

#include <string.h>

kvc_page kvc_page_of(const kvc_store *s, int64_t entry, int64_t h, int64_t page_size)
{
    kvc_page page = {NULL, kvc_entry_key(entry), kvc_entry_value(entry), page_size};
    int64_t bytes = kvc_page_layout(page.key, page.value, s->key_dim, s->value_dim, page_size).bytes;
    page.data = s->arena + kvc_entry_offset(entry) + (s->table_heads == 1 ? h * bytes : 0);
    return page;
}

kvc_page kvc_page_at(const kvc_store *s, int64_t b, int64_t h, int64_t c)
{
    return kvc_page_of(s, kvc_entry_at(s, b, h, c), h, kvc_column_layout(c, s->sinks, s->page_size));
}

kvc_side kvc_side_of(const kvc_store *s, const kvc_page *p, int key)
{
    return kvc_page_side(p->data, key, p->key, p->value, s->key_dim, s->value_dim, p->page_size);
}

kvc_room kvc_room_of(const kvc_store *s, const kvc_page *p, int key)
{
    return kvc_page_room(p->data, key, p->key, p->value, s->key_dim, s->value_dim, p->page_size);
}

int64_t kvc_entry_bytes(const kvc_store *s, int64_t entry, int64_t page_size)
{
    kvc_layout l = kvc_page_layout(kvc_entry_key(entry), kvc_entry_value(entry), s->key_dim, s->value_dim, page_size);
    return s->table_heads == 1 ? s->heads * l.bytes : l.bytes;
}

kvc_status kvc_entry_check(const kvc_store *s, int64_t entry, int64_t c, int64_t page_size, const char *op,
                           const char *what)
{
    int key = kvc_entry_key(entry), value = kvc_entry_value(entry);
    KVC_CHECK(entry >= 0 && kvc_format_bits(key) && kvc_format_bits(value), KVC_E_VALUE,
              "%s: %s: expected a page at column %lld, got entry %lld that names none; plan the append first", op, what,
              (long long)c, (long long)entry);
    KVC_TRY(kvc_format_check(key, s->key_dim));
    KVC_TRY(kvc_format_check(value, s->value_dim));
    int64_t bytes = kvc_entry_bytes(s, entry, page_size);
    KVC_CHECK(kvc_entry_offset(entry) <= s->arena_bytes - bytes, KVC_E_VALUE,
              "%s: %s: expected pages inside the arena of %lld bytes, got one at %lld (column %lld) of %lld bytes", op,
              what, (long long)s->arena_bytes, (long long)kvc_entry_offset(entry), (long long)c, (long long)bytes);
    return KVC_OK;
}

kvc_status kvc_apart_check(const kvc_store *s, int64_t from, int64_t to, int64_t page_size, const char *op,
                           const char *what)
{
    int64_t a = kvc_entry_offset(from), b = kvc_entry_offset(to);
    KVC_CHECK(a + kvc_entry_bytes(s, from, page_size) <= b || b + kvc_entry_bytes(s, to, page_size) <= a, KVC_E_VALUE,
              "%s: %s: expected pages that share no bytes, got one at %lld and one at %lld", op, what, (long long)a,
              (long long)b);
    return KVC_OK;
}

/* Checks everything but the table and the pages it refers to. */
kvc_status kvc_store_check(const kvc_store *s, const char *op)
{
    KVC_CHECK(s->batch >= 0 && s->columns >= 0 && s->heads > 0 && s->heads <= INT32_MAX, KVC_E_VALUE,
              "%s: expected at least 1 head, got B=%lld H=%lld", op, (long long)s->batch, (long long)s->heads);
    KVC_CHECK(s->key_dim > 0 && s->key_dim <= KVC_MAX_DIM && s->value_dim > 0 && s->value_dim <= KVC_MAX_DIM,
              KVC_E_VALUE, "%s: expected head dims from 1 to %d, got Dk=%lld Dv=%lld", op, KVC_MAX_DIM,
              (long long)s->key_dim, (long long)s->value_dim);
    KVC_CHECK(s->table_heads == 1 || s->table_heads == s->heads, KVC_E_VALUE,
              "%s: table: expected 1 or H=%lld rows a sequence, got %lld", op, (long long)s->heads,
              (long long)s->table_heads);
    KVC_TRY(kvc_page_size_check(s->page_size, op));
    KVC_CHECK(s->sinks >= 0 && s->sinks <= KVC_MAX_PAGE, KVC_E_VALUE, "%s: sinks: expected 0 to %d tokens, got %lld",
              op, KVC_MAX_PAGE, (long long)s->sinks);
    return KVC_OK;
}

static kvc_status check_table(const kvc_store *s, const char *op)
{
    /* formats of the last page that passed, and the largest valid offset for them */
    int64_t passed = KVC_NONE, limit = 0;
    for (int64_t r = 0; r < s->batch * s->table_heads; r++) {
        int64_t n = s->rows[2 * r];
        KVC_CHECK(n >= 0 && kvc_columns_used(s, n) <= s->columns, KVC_E_VALUE,
                  "%s: rows: expected a length that the table's %lld columns hold, got %lld tokens in row %lld", op,
                  (long long)s->columns, (long long)n, (long long)r);
        KVC_CHECK(s->rows[2 * r + 1] >= 0 && s->rows[2 * r + 1] <= INT32_MAX, KVC_E_VALUE,
                  "%s: rows: expected a first slot from 0 to 2^31, got %lld in row %lld", op,
                  (long long)s->rows[2 * r + 1], (long long)r);
        KVC_CHECK(!s->slots || n <= s->slot_capacity, KVC_E_VALUE, "%s: slots: expected at least %lld a row, got %lld",
                  op, (long long)n, (long long)s->slot_capacity);
        int64_t used = kvc_columns_used(s, n);
        for (int64_t c = s->sinks ? 0 : 1; c < used; c++) {
            int64_t entry = s->table[r * s->columns + c], formats = entry & 0xffff;
            if (c > 0 && entry >= 0 && formats == passed && kvc_entry_offset(entry) <= limit) continue;
            KVC_TRY(kvc_entry_check(s, entry, c, kvc_column_layout(c, s->sinks, s->page_size), op, "table"));
            if (c > 0) passed = formats, limit = s->arena_bytes - kvc_entry_bytes(s, entry, s->page_size);
        }
    }
    return KVC_OK;
}

kvc_status kvc_store_take(kvc_store *s, int64_t T, const char *op, int64_t **indices)
{
    KVC_TRY(kvc_store_check(s, op));
    int64_t lines = s->batch * s->table_heads, *table, *rows;
    KVC_TRY(kvc_scratch(lines, (s->columns + 2) * (int64_t)sizeof **indices, indices));
    rows = *indices;
    table = rows + 2 * lines;
    if (lines) memcpy(rows, s->rows, (size_t)(2 * lines) * sizeof *rows);
    for (int64_t r = 0; r < lines; r++) {
        int64_t most = s->columns * s->page_size + s->sinks,
                n = kvc_min(kvc_max(rows[2 * r], 0), most) + kvc_min(T, most);
        int64_t used = kvc_min(kvc_columns_used(s, n), s->columns);
        if (used) memcpy(table + r * s->columns, s->table + r * s->columns, (size_t)used * sizeof *table);
    }
    s->rows = rows;
    s->table = table;
    kvc_status status = check_table(s, op);
    if (status == KVC_OK) return KVC_OK;
    kvc_scratch_free(*indices);
    *indices = NULL;
    return status;
}
