/* table_slots.c - per-token data of a table (slots, scores), row lengths and statistics. */
#include "table.h"

#include <string.h>

/* ---------------------------------------------------------------- slots */

kvc_status kvc_table_new_slots(const kvc_table *t, int64_t capacity, int32_t **out)
{
    int32_t *slots;
    KVC_TRY(kvc_array_new(kvc_lines(t) * capacity, sizeof *slots, &slots));
    for (int64_t b = 0; b < kvc_lines(t); b++)
        for (int64_t i = 0; i < capacity; i++) {
            bool stored = i < t->rows[2 * b];
            int64_t slot = !stored ? -1 : t->slots ? t->slots[b * t->slot_capacity + i] : t->rows[2 * b + 1] + i;
            slots[b * capacity + i] = (int32_t)slot;
        }
    *out = slots;
    return KVC_OK;
}

void kvc_table_set_slots(kvc_table *t, int32_t *slots, int64_t capacity)
{
    if (slots == t->slots) return;
    kvc_array_release(t->slots);
    t->slots = slots;
    t->slot_capacity = capacity;
    t->version++;
}

/* Drops the slot array if there are no dead tokens and no gaps: slots are then contiguous. */
void kvc_table_drop_plain_slots(kvc_table *t)
{
    for (int64_t b = 0; t->slots && b < kvc_lines(t); b++) {
        const int32_t *s = t->slots + b * t->slot_capacity;
        for (int64_t i = 0; i < t->rows[2 * b]; i++)
            if (s[i] < 0 || s[i] != t->rows[2 * b + 1] + i) return;
    }
    kvc_table_set_slots(t, NULL, 0);
}

kvc_status kvc_table_new_scores(const kvc_table *t, int64_t capacity, float **out)
{
    float *scores;
    int64_t lines = t->batch * t->spec.heads, old = t->scores ? t->score_capacity : 0;
    KVC_TRY(kvc_array_new(lines * capacity, sizeof *scores, &scores));
    for (int64_t r = 0; r < lines; r++) {
        int64_t n = old < capacity ? old : capacity;
        /* NOLINTNEXTLINE: old is 0 without scores */
        if (n) memcpy(scores + r * capacity, t->scores + r * old, (size_t)n * sizeof *scores);
        memset(scores + r * capacity + n, 0, (size_t)(capacity - n) * sizeof *scores);
    }
    *out = scores;
    return KVC_OK;
}

void kvc_table_set_scores(kvc_table *t, float *scores, int64_t capacity)
{
    if (scores == t->scores) return;
    kvc_array_release(t->scores);
    t->scores = scores;
    t->score_capacity = capacity;
    t->version++;
}

kvc_status kvc_table_keep_scores(kvc_table *t, bool on)
{
    float *scores = NULL;
    int64_t capacity = kvc_table_longest(t);
    KVC_TRY(kvc_table_no_plan(t, "keep_scores"));
    if (on == t->scored) return KVC_OK;
    if (on && capacity) KVC_TRY(kvc_table_new_scores(t, capacity, &scores));
    kvc_table_set_scores(t, scores, capacity);
    t->scored = on;
    return KVC_OK;
}

kvc_status kvc_table_observe(kvc_table *t, const float *received, int64_t width, float decay)
{
    KVC_CHECK(t->scores && width <= t->score_capacity, KVC_E_VALUE,
              "observe: expected a table that keeps scores, and at most %lld of a row, got %lld",
              (long long)(t->scores ? t->score_capacity : 0), (long long)width);
    for (int64_t r = 0; r < t->batch * t->spec.heads; r++) {
        float *scores = t->scores + r * t->score_capacity;
        const float *row = received + r * width;
        for (int64_t i = 0; decay != 1 && i < t->score_capacity; i++) scores[i] *= decay;
        for (int64_t i = 0; i < width; i++) scores[i] += row[i];
    }
    return KVC_OK;
}

/* ---------------------------------------------------------------- crop */

/* Number of tokens of row b up to the last live one with a slot below `seen`. */
static int64_t live_before(const kvc_table *t, int64_t b, int64_t seen)
{
    int64_t n = t->rows[2 * b];
    if (!t->slots) {
        int64_t keep = seen - t->rows[2 * b + 1];
        return keep < 0 ? 0 : keep < n ? keep : n;
    }
    const int32_t *s = t->slots + b * t->slot_capacity;
    while (n > 0 && (s[n - 1] < 0 || s[n - 1] >= seen)) n--;
    return n;
}

/* Length of row b after the crop: `live`, or up to the end of the sealed page that contains the cut. */
static int64_t cut_length(const kvc_table *t, int64_t b, int64_t live)
{
    if (live == 0) return 0;
    int64_t c = kvc_column(live - 1, t->spec.sinks, t->spec.page_size), entry = t->entries[b * t->columns + c];
    kvc_span own = kvc_table_sealed(t, c);
    bool direct = t->spec.direct && (entry & 0xffff) == (own.key << 8 | own.value); /* not demoted */
    if (direct || kvc_entry_is_raw(entry)) return live;
    return kvc_column_first(c, t->spec.sinks, t->spec.page_size) + kvc_column_size(c, t->spec.sinks, t->spec.page_size);
}

kvc_status kvc_table_crop(kvc_table *t, int64_t seen)
{
    bool dead = false;
    KVC_TRY(kvc_table_no_plan(t, "crop"));
    KVC_CHECK(seen >= 0 && seen <= t->seen, KVC_E_VALUE, "crop: expected to keep between 0 and %lld slots, got %lld",
              (long long)t->seen, (long long)seen);
    if (seen == t->seen) return KVC_OK;
    for (int64_t b = 0; b < kvc_lines(t); b++) {
        int64_t live = live_before(t, b, seen);
        dead |= cut_length(t, b, live) != live;
    }
    if (dead && !t->slots) {
        int32_t *slots;
        int64_t capacity = kvc_table_longest(t);
        KVC_TRY(kvc_table_new_slots(t, capacity, &slots));
        kvc_table_set_slots(t, slots, capacity);
    }
    for (int64_t b = 0; b < kvc_lines(t); b++) {
        int64_t live = live_before(t, b, seen), length = cut_length(t, b, live);
        /* after an eviction, tokens need not be in slot order */
        for (int64_t i = 0; t->slots && i < t->rows[2 * b]; i++) {
            int32_t *slot = &t->slots[b * t->slot_capacity + i];
            if (i >= live || *slot >= seen) *slot = -1;
        }
        for (int64_t c = kvc_table_columns(t, length); c < t->columns; c++) {
            int64_t *entry = &t->entries[b * t->columns + c];
            if (*entry != KVC_NONE) kvc_pool_unref(t->pool, kvc_entry_offset(*entry));
            *entry = KVC_NONE;
        }
        t->rows[2 * b] = length;
        if (length == 0) t->rows[2 * b + 1] = 0;
    }
    t->seen = seen;
    kvc_table_drop_plain_slots(t);
    return KVC_OK;
}

/* ---------------------------------------------------------------- pages outside the window */

/* Number of full pages at the start of line r whose slots are all below `before`. The last page is never counted, so
 * that a row that has tokens never becomes empty. */
static int64_t pages_before(const kvc_table *t, int64_t r, int64_t before, int64_t chunk)
{
    int64_t P = t->spec.page_size, n = t->rows[2 * r], pages = 0;
    for (bool all = true; all && (pages + 1) * P < n; pages += all) {
        if (!t->slots)
            all = t->rows[2 * r + 1] + (pages + 1) * P <= before;
        else
            for (int64_t i = pages * P; i < (pages + 1) * P; i++) all &= t->slots[r * t->slot_capacity + i] < before;
    }
    return chunk && !t->slots ? pages - pages % (chunk / P) : pages;
}

static void drop_pages(kvc_table *t, int64_t r, int64_t pages, int64_t chunk)
{
    int64_t n = t->rows[2 * r] - pages * t->spec.page_size, gone = pages * t->spec.page_size;
    int64_t *first = &t->rows[2 * r + 1], *entries = t->entries + r * t->columns + 1;
    for (int64_t c = 0; c < pages; c++) kvc_pool_unref(t->pool, kvc_entry_offset(entries[c]));
    for (int64_t c = 0; c < t->columns - 1; c++)
        entries[c] = c + pages < t->columns - 1 ? entries[c + pages] : KVC_NONE;
    t->rows[2 * r] = n;
    if (t->slots) {
        int32_t *slots = t->slots + r * t->slot_capacity;
        memmove(slots, slots + gone, (size_t)n * sizeof *slots);
        if (slots[0] >= 0 && (!chunk || (slots[0] - *first) % chunk == 0)) *first = slots[0];
    } else
        *first += gone;
    int64_t heads = kvc_entry_heads(t);
    for (int64_t h = r * heads; t->scores && h < (r + 1) * heads; h++) {
        float *scores = t->scores + h * t->score_capacity;
        memmove(scores, scores + gone, (size_t)n * sizeof *scores);
    }
}

kvc_status kvc_table_drop(kvc_table *t, const int64_t *before, int64_t chunk, int64_t *dropped)
{
    KVC_TRY(kvc_table_no_plan(t, "drop"));
    KVC_CHECK(t->spec.sinks == 0 && t->n_spans == 0, KVC_E_VALUE,
              "drop: expected a table without sinks and spans, got %lld and %lld", (long long)t->spec.sinks,
              (long long)t->n_spans);
    KVC_CHECK(chunk >= 0 && chunk % t->spec.page_size == 0, KVC_E_VALUE,
              "drop: chunk: expected a multiple of the page's %lld tokens, got %lld", (long long)t->spec.page_size,
              (long long)chunk);
    *dropped = 0;
    for (int64_t r = 0; r < kvc_lines(t); r++) {
        int64_t pages = pages_before(t, r, before[r / t->table_heads], chunk);
        if (pages) drop_pages(t, r, pages, chunk);
        *dropped += pages;
    }
    if (*dropped) kvc_table_drop_plain_slots(t);
    return KVC_OK;
}

/* ---------------------------------------------------------------- statistics */

int64_t kvc_table_longest(const kvc_table *t)
{
    int64_t longest = 0;
    for (int64_t r = 0; r < kvc_lines(t); r++) longest = t->rows[2 * r] > longest ? t->rows[2 * r] : longest;
    return longest;
}

static int64_t live_of(const kvc_table *t, int64_t r)
{
    int64_t n = t->rows[2 * r], dead = 0;
    for (int64_t i = 0; t->slots && i < n; i++) dead += t->slots[r * t->slot_capacity + i] < 0;
    return n - dead;
}

void kvc_table_live(const kvc_table *t, int64_t *live)
{
    for (int64_t b = 0; b < t->batch; b++) live[b] = 0;
    for (int64_t r = 0; r < kvc_lines(t); r++) live[r / t->table_heads] += live_of(t, r) * kvc_entry_heads(t);
}

/* Whether an earlier cell of the table refers to the same page. A line has a page once; other lines usually have it in
 * the same column. */
static bool counted(const kvc_table *t, int64_t at)
{
    int64_t column = at % t->columns, line = at - column;
    if (line == 0 || kvc_pool_refs(t->pool, kvc_entry_offset(t->entries[at])) == 1) return false;
    for (int64_t i = column; i < line; i += t->columns)
        if (t->entries[i] == t->entries[at]) return true;
    for (int64_t i = 0; i < line; i++)
        if (t->entries[i] == t->entries[at]) return true;
    return false;
}

void kvc_table_get_stats(const kvc_table *t, kvc_table_stats *stats)
{
    *stats = (kvc_table_stats){.seen = t->seen, .rewritten = t->rewritten};
    for (int64_t b = 0; b < kvc_lines(t); b++) {
        stats->kept += live_of(t, b);
        for (int64_t c = 0; c < t->columns; c++) {
            int64_t entry = t->entries[b * t->columns + c];
            if (entry == KVC_NONE || counted(t, b * t->columns + c)) continue;
            int64_t bytes = kvc_align(kvc_group_bytes(t, c, kvc_entry_key(entry), kvc_entry_value(entry)));
            if (c == 0)
                stats->sink_bytes += bytes;
            else if (kvc_entry_is_raw(entry) && !kvc_table_stays_raw(t, c))
                stats->open_bytes += bytes, stats->open_pages++;
            else
                stats->sealed_bytes += bytes, stats->sealed_pages++;
        }
    }
    stats->kept = (stats->kept + t->table_heads - 1) / t->table_heads;
    stats->table_bytes = (int64_t)sizeof *t + kvc_lines(t) * (t->columns + 2) * (int64_t)sizeof *t->entries +
                         (t->slots ? kvc_lines(t) * t->slot_capacity * (int64_t)sizeof *t->slots : 0) +
                         (t->scores ? t->batch * t->spec.heads * t->score_capacity * (int64_t)sizeof *t->scores : 0);
}
