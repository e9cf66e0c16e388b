/* table_evict_plan.c - planning of evictions: checks, whether heads diverge, allocation, commit and rollback. */
#include "table_evict.h"

#include <string.h>

static kvc_status check_keep(const kvc_table *t, const uint8_t *keep, int64_t heads, int64_t width)
{
    KVC_CHECK(
        heads == t->spec.heads || (heads == 1 && t->table_heads == 1), KVC_E_VALUE,
        "evict: keep: expected %s%lld heads, got %lld; heads that store different tokens need separate rows of keep",
        t->table_heads == 1 ? "1 or " : "", (long long)t->spec.heads, (long long)heads);
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t h = 0; h < heads; h++) {
            int64_t n = t->rows[2 * (b * t->table_heads + (t->table_heads == 1 ? 0 : h))];
            const uint8_t *row = keep + (b * heads + h) * width;
            KVC_CHECK(n <= width, KVC_E_VALUE, "evict: keep: expected the %lld stored tokens of row %lld, got %lld",
                      (long long)n, (long long)b, (long long)width);
            for (int64_t i = 0; i < n && i < t->spec.sinks; i++)
                KVC_CHECK(
                    row[i], KVC_E_VALUE,
                    "evict: keep: expected the first %lld tokens (sinks) kept, got token %lld of row %lld evicted; "
                    "make the cache with fewer sinks",
                    (long long)t->spec.sinks, (long long)i, (long long)b);
        }
    return KVC_OK;
}

static kvc_status check_formats(const kvc_table *t, const kvc_demotion *d, int64_t heads)
{
    for (int64_t i = 0; d && i < t->batch * heads * d->columns; i++) {
        int key = d->formats[i] >> 8, value = d->formats[i] & 255;
        if (d->formats[i] < 0) continue;
        KVC_CHECK(
            !kvc_format_is_raw(key) && !kvc_format_is_raw(value) && kvc_format_check(key, t->spec.key_dim) == KVC_OK &&
                kvc_format_check(value, t->spec.value_dim) == KVC_OK,
            KVC_E_VALUE, "evict: formats: expected quantized formats that take head dims %lld and %lld, got %d and %d",
            (long long)t->spec.key_dim, (long long)t->spec.value_dim, key, value);
    }
    return KVC_OK;
}

/* Whether the heads of a uniform table keep different tokens or get different formats. */
static bool heads_part(const kvc_table *t, const uint8_t *keep, const kvc_demotion *d, int64_t heads, int64_t width)
{
    for (int64_t b = 0; t->table_heads == 1 && b < t->batch; b++)
        for (int64_t h = 1; h < heads; h++) {
            for (int64_t i = 0; i < t->rows[2 * b]; i++)
                if (!keep[(b * heads + h) * width + i] != !keep[b * heads * width + i]) return true;
            for (int64_t c = 0; d && c < d->columns; c++)
                if (d->formats[(b * heads + h) * d->columns + c] != d->formats[b * heads * d->columns + c]) return true;
        }
    return false;
}

/* The capacity after an eviction; shrinks if much less is needed. */
static int64_t room_for(int64_t longest, int64_t capacity)
{
    return capacity >= longest && capacity <= 4 * longest + 64 ? capacity : longest + longest / 2 + 16;
}

static kvc_status new_arrays(const kvc_table *t, kvc_table *a)
{
    int64_t longest = kvc_table_longest(t);
    a->columns = room_for(kvc_table_columns(t, longest), t->columns);
    a->slot_capacity = room_for(longest, t->slot_capacity);
    a->score_capacity = t->scores ? room_for(longest, t->score_capacity) : 0;
    KVC_TRY(kvc_array_new(kvc_lines(a) * a->columns, sizeof *a->entries, &a->entries));
    KVC_TRY(kvc_array_new(kvc_lines(a) * 2, sizeof *a->rows, &a->rows));
    KVC_TRY(kvc_array_new(kvc_lines(a) * a->slot_capacity, sizeof *a->slots, &a->slots));
    if (t->scores) KVC_TRY(kvc_array_new(a->batch * a->spec.heads * a->score_capacity, sizeof *a->scores, &a->scores));
    return KVC_OK;
}

static kvc_status plan_lines(kvc_line *w, const uint8_t *keep, const kvc_demotion *d, int64_t heads, int64_t width)
{
    const kvc_table *t = w->t;
    const kvc_table *a = &w->e->after;
    int64_t P = t->spec.page_size, columns = t->columns;
    KVC_TRY(kvc_alloc(columns, sizeof *w->pages, &w->pages));
    KVC_TRY(kvc_alloc(columns, sizeof(kvc_evict_page *), &w->sorted));
    KVC_TRY(kvc_alloc(columns * P, sizeof *w->places, &w->places));
    KVC_TRY(kvc_alloc(columns * P, sizeof *w->merged, &w->merged));
    KVC_TRY(kvc_alloc(columns * P + t->spec.sinks, sizeof *w->order, &w->order));
    KVC_TRY(kvc_alloc(columns, sizeof *w->merged_to, &w->merged_to));
    for (w->line = 0; w->line < kvc_lines(a); w->line++) {
        int64_t b = w->line / a->table_heads, h = w->line % a->table_heads;
        w->from = w->foreign ? b : w->line;
        w->head = h;
        int64_t given = b * heads + (heads == 1 ? 0 : h);
        KVC_TRY(
            kvc_line_evict(w, keep + given * width, d ? d->formats + given * d->columns : NULL, d ? d->columns : 0));
    }
    for (int64_t i = 0; w->foreign && i < kvc_lines(t) * columns; i++)
        if (t->entries[i] != KVC_NONE) KVC_TRY(kvc_offsets_push(&w->e->dropped, kvc_entry_offset(t->entries[i])));
    return KVC_OK;
}

kvc_status kvc_table_plan_evict(kvc_table *t, const uint8_t *keep, const kvc_demotion *demote, int64_t heads,
                                int64_t width)
{
    KVC_TRY(kvc_table_no_plan(t, "evict"));
    KVC_TRY(check_keep(t, keep, heads, width));
    KVC_TRY(check_formats(t, demote, heads));
    kvc_eviction *e = NULL;
    KVC_TRY(kvc_alloc(1, sizeof *t->plan, &t->plan));
    *t->plan = (struct kvc_plan){0};
    kvc_status status = kvc_alloc(1, sizeof *e, &e);
    if (status != KVC_OK) {
        kvc_free(t->plan);
        t->plan = NULL;
        return status;
    }
    *e = (kvc_eviction){.after = *t};
    e->after.entries = NULL, e->after.rows = NULL, e->after.slots = NULL, e->after.scores = NULL;
    t->plan->eviction = e;
    kvc_line w = {.t = t, .e = e, .foreign = heads_part(t, keep, demote, heads, width)};
    if (w.foreign) e->after.table_heads = t->spec.heads;
    status = new_arrays(t, &e->after);
    if (status == KVC_OK) status = plan_lines(&w, keep, demote, heads, width);
    kvc_free(w.pages);
    kvc_free(w.sorted);
    kvc_free(w.places);
    kvc_free(w.merged);
    kvc_free(w.order);
    kvc_free(w.merged_to);
    if (status != KVC_OK) kvc_table_rollback(t);
    return status;
}

const kvc_move *kvc_table_moves(const kvc_table *t, int64_t *n, int64_t *heads)
{
    const kvc_eviction *e = t->plan ? t->plan->eviction : NULL;
    *n = e ? e->n_moves : 0;
    *heads = !e || e->after.table_heads == 1 ? t->spec.heads : 1;
    return e ? e->moves : NULL;
}

bool kvc_table_evicts(const kvc_table *t)
{
    const kvc_eviction *e = t->plan ? t->plan->eviction : NULL;
    return e && (e->lost || e->rewritten);
}

static void unref_list(const kvc_table *t, const kvc_offsets *pages)
{
    for (int64_t i = 0; i < pages->n; i++) kvc_pool_unref(t->pool, pages->at[i]);
}

void kvc_eviction_end(kvc_table *t, bool commit)
{
    kvc_eviction *e = t->plan->eviction;
    if (commit) {
        kvc_table old = *t;
        unref_list(t, &e->dropped);
        t->entries = e->after.entries, t->rows = e->after.rows, t->slots = e->after.slots;
        t->scores = e->after.scores;
        t->columns = e->after.columns, t->table_heads = e->after.table_heads;
        t->slot_capacity = e->after.slot_capacity, t->score_capacity = e->after.score_capacity;
        t->rewritten += e->rewritten;
        t->version++;
        kvc_table_release_arrays(&old);
        kvc_table_drop_plain_slots(t);
    } else {
        unref_list(t, &e->added);
        kvc_table_release_arrays(&e->after);
    }
    kvc_free(e->added.at);
    kvc_free(e->dropped.at);
    kvc_free(e->moves);
    kvc_free(e);
}
