/* table_plan.c - appends: plan allocates pages and records every change; its end releases the old pages (commit) or
 * restores them (rollback). Nothing after plan can fail. */
#include "table.h"

#include <string.h>

/* Stores `entry` in a cell. The table takes over its reference. */
static void change(kvc_table *t, int64_t cell, int64_t entry)
{
    struct kvc_plan *p = t->plan;
    p->changes[p->n_changes++] = (kvc_change){cell, t->entries[cell]};
    t->entries[cell] = entry;
}

/* Allocates a group of pages for row b, column c. */
static kvc_status new_pages(kvc_table *t, int64_t b, int64_t c, int key, int value)
{
    struct kvc_plan *p = t->plan;
    int64_t offset;
    KVC_TRY(kvc_grow(&p->changes, p->n_changes, &p->change_capacity, sizeof *p->changes));
    KVC_TRY(kvc_pool_alloc(t->pool, kvc_group_bytes(t, c, key, value), &offset));
    change(t, b * t->columns + c, kvc_entry(offset, key, value));
    return KVC_OK;
}

static kvc_status seal(kvc_table *t, int64_t b, int64_t c)
{
    struct kvc_plan *p = t->plan;
    int64_t raw = t->entries[b * t->columns + c];
    bool shared = kvc_pool_refs(t->pool, kvc_entry_offset(raw)) > 1;
    for (int64_t i = 0; shared && i < p->n_seals; i++)
        if (p->seals[2 * i] == raw) { /* another row shares this page: seal it once */
            KVC_TRY(kvc_grow(&p->changes, p->n_changes, &p->change_capacity, sizeof *p->changes));
            kvc_pool_ref(t->pool, kvc_entry_offset(p->seals[2 * i + 1]));
            change(t, b * t->columns + c, p->seals[2 * i + 1]);
            return KVC_OK;
        }
    KVC_TRY(kvc_grow(&p->seals, p->n_seals, &p->seal_capacity, 2 * sizeof *p->seals));
    kvc_span to = kvc_table_sealed(t, c);
    KVC_TRY(new_pages(t, b, c, to.key, to.value));
    p->seals[2 * p->n_seals] = raw;
    p->seals[2 * p->n_seals + 1] = t->entries[b * t->columns + c];
    p->n_seals++;
    return KVC_OK;
}

/* Pages shared with other tables or rows must not be written, so row b gets a copy. The last row that shares a page may
 * write to it: rows that left it in this plan return only by rollback, with a length that hides the new tokens. */
static kvc_status own_page(kvc_table *t, int64_t b, int64_t c)
{
    const struct kvc_plan *p = t->plan;
    int64_t shared = t->entries[b * t->columns + c], others = kvc_pool_refs(t->pool, kvc_entry_offset(shared)) - 1;
    for (int64_t i = 0; others > 0 && i < p->n_changes; i++) others -= p->changes[i].before == shared;
    if (others == 0) return KVC_OK;
    int key = kvc_entry_key(shared), value = kvc_entry_value(shared);
    KVC_TRY(new_pages(t, b, c, key, value));
    uint8_t *base = kvc_pool_base(t->pool);
    memcpy(base + kvc_entry_offset(t->entries[b * t->columns + c]), base + kvc_entry_offset(shared),
           (size_t)kvc_group_bytes(t, c, key, value));
    return KVC_OK;
}

/* Whether an append that makes the row `end` tokens long seals the page of column c. The newest tokens stay raw, so
 * that cropping them is exact. */
static bool seals_page(const kvc_table *t, int64_t c, int64_t end)
{
    const kvc_spec *s = &t->spec;
    int64_t last = kvc_column_first(c, s->sinks, s->page_size) + s->page_size;
    return c > 0 && !kvc_table_stays_raw(t, c) && (s->direct || last <= end - kvc_max(s->page_size, s->recent));
}

static kvc_status plan_row(kvc_table *t, int64_t b)
{
    const kvc_spec *s = &t->spec;
    int64_t n = t->rows[2 * b], end = n + t->plan->own[b / t->table_heads], used = kvc_table_columns(t, n);
    if (end == n) return KVC_OK;
    if (!s->direct && (t->n_spans || !kvc_table_stays_raw(t, 1)))
        /* newest first: pages before a sealed one are sealed, or stay raw for good */
        for (int64_t c = used - 1; c >= 1; c--) {
            if (kvc_table_stays_raw(t, c)) continue;
            int64_t last = kvc_column_first(c, s->sinks, s->page_size) + s->page_size;
            /* a short append may be a draft that is cropped later: seal only what every shorter append would */
            bool draft = end - n <= s->page_size;
            if (last > n || (last > n - s->recent && (draft || !seals_page(t, c, end)))) continue;
            if (!kvc_entry_is_raw(t->entries[b * t->columns + c])) break;
            KVC_TRY(seal(t, b, c));
        }
    int64_t c = kvc_column(n, s->sinks, s->page_size);
    if (c < used) { /* the first new token goes to an existing page */
        KVC_TRY(own_page(t, b, c));
        /* this append fills the page and goes far beyond it */
        if (seals_page(t, c, end) && !s->direct) KVC_TRY(seal(t, b, c));
        c++;
    }
    for (; c < kvc_table_columns(t, end); c++) {
        kvc_span to = kvc_table_sealed(t, c);
        bool sealed = seals_page(t, c, end);
        KVC_TRY(new_pages(t, b, c, sealed ? to.key : s->raw, sealed ? to.value : s->raw));
    }
    return KVC_OK;
}

/* Adds columns to all rows; cells keep their row and column. */
static kvc_status grow_columns(kvc_table *t, int64_t wanted)
{
    int64_t *entries, columns = kvc_max(wanted, t->columns * 2);
    if (wanted <= t->columns) return KVC_OK;
    KVC_TRY(kvc_array_new(kvc_lines(t) * columns, sizeof *entries, &entries));
    for (int64_t b = 0; b < kvc_lines(t); b++)
        for (int64_t c = 0; c < columns; c++)
            entries[b * columns + c] = c < t->columns ? t->entries[b * t->columns + c] : KVC_NONE;
    kvc_array_release(t->entries);
    t->entries = entries;
    t->columns = columns;
    t->version++;
    return KVC_OK;
}

kvc_status kvc_table_reserve(kvc_table *t, int64_t tokens)
{
    KVC_TRY(kvc_table_no_plan(t, "reserve"));
    KVC_CHECK(tokens >= 0 && tokens <= INT32_MAX, KVC_E_VALUE, "reserve: expected 0 to 2^31 tokens a row, got %lld",
              (long long)tokens);
    return grow_columns(t, kvc_table_columns(t, tokens));
}

/* Index of the first real own token of row b. */
static int64_t first_real(const struct kvc_plan *p, int64_t b)
{
    int64_t j = 0;
    while (p->real && j < p->T && !p->real[b * p->T + j]) j++;
    return j;
}

/* Whether the slots of line r remain contiguous (start + index). */
static bool stays_plain(const kvc_table *t, int64_t r)
{
    const struct kvc_plan *p = t->plan;
    int64_t b = r / t->table_heads, n = t->rows[2 * r], first = first_real(p, b);
    if (p->own[b] == 0) return true;
    for (int64_t j = first; p->real && j < first + p->own[b]; j++)
        if (!p->real[b * p->T + j]) return false;
    return n == 0 || t->seen + first == t->rows[2 * r + 1] + n;
}

static kvc_status plan_slots(kvc_table *t, int64_t longest)
{
    bool plain = true;
    for (int64_t r = 0; r < kvc_lines(t); r++) plain &= stays_plain(t, r);
    if (t->slots ? longest <= t->slot_capacity : plain) return KVC_OK;
    t->plan->slot_capacity = longest + longest / 2;
    return kvc_table_new_slots(t, t->plan->slot_capacity, &t->plan->slots);
}

static kvc_status plan_scores(kvc_table *t, int64_t longest)
{
    if (!t->scored || (t->scores && longest <= t->score_capacity)) return KVC_OK;
    t->plan->score_capacity = longest + longest / 2;
    return kvc_table_new_scores(t, t->plan->score_capacity, &t->plan->scores);
}

static kvc_status plan_all(kvc_table *t, const uint8_t *real)
{
    struct kvc_plan *p = t->plan;
    int64_t longest = 0;
    KVC_TRY(kvc_alloc(t->batch, sizeof *p->own, &p->own));
    if (real) {
        KVC_TRY(kvc_alloc(t->batch * p->T, 1, &p->real));
        memcpy(p->real, real, (size_t)(t->batch * p->T));
    }
    for (int64_t b = 0; b < t->batch; b++) {
        p->own[b] = real ? 0 : p->T;
        for (int64_t j = 0; real && j < p->T; j++) p->own[b] += real[b * p->T + j] != 0;
        for (int64_t r = b * t->table_heads; r < (b + 1) * t->table_heads; r++)
            longest = kvc_max(longest, t->rows[2 * r] + p->own[b]);
    }
    KVC_TRY(grow_columns(t, kvc_table_columns(t, longest)));
    KVC_TRY(plan_slots(t, longest));
    KVC_TRY(plan_scores(t, longest));
    kvc_status status = KVC_OK;
    kvc_pool_expect(t->pool,
                    kvc_lines(t) * (p->T / t->spec.page_size) * kvc_group_bytes(t, 1, t->spec.key, t->spec.value));
    for (int64_t r = 0; r < kvc_lines(t) && status == KVC_OK; r++) status = plan_row(t, r);
    kvc_pool_expect(t->pool, 0);
    return status;
}

kvc_status kvc_table_plan(kvc_table *t, int64_t T, const uint8_t *real)
{
    KVC_TRY(kvc_table_no_plan(t, "plan"));
    KVC_CHECK(T >= 0 && T <= INT32_MAX - t->seen, KVC_E_VALUE,
              "plan: expected 0 or more tokens, at most 2^31 slots in all, got %lld after %lld", (long long)T,
              (long long)t->seen);
    KVC_TRY(kvc_alloc(1, sizeof *t->plan, &t->plan));
    *t->plan = (struct kvc_plan){.T = T};
    kvc_status status = plan_all(t, real);
    if (status != KVC_OK) kvc_table_rollback(t);
    return status;
}

const int64_t *kvc_table_seals(const kvc_table *t, int64_t *n)
{
    *n = t->plan ? t->plan->n_seals : 0;
    return t->plan ? t->plan->seals : NULL;
}

bool kvc_table_only_fills(const kvc_table *t)
{
    return t->plan && !t->plan->eviction && !t->plan->n_changes && !t->plan->n_seals;
}

/* Stores the slots and length of line r after the append. */
static void commit_line(kvc_table *t, int64_t r)
{
    const struct kvc_plan *p = t->plan;
    int64_t b = r / t->table_heads, *row = t->rows + 2 * r;
    if (p->own[b] && row[0] == 0) row[1] = t->seen + first_real(p, b);
    for (int64_t j = 0, i = row[0]; t->slots && j < p->T; j++)
        if (!p->real || p->real[b * p->T + j]) t->slots[r * t->slot_capacity + i++] = (int32_t)(t->seen + j);
    int64_t heads = kvc_entry_heads(t);
    for (int64_t h = r * heads; t->scores && h < (r + 1) * heads; h++)
        memset(t->scores + h * t->score_capacity + row[0], 0, (size_t)p->own[b] * sizeof *t->scores);
    row[0] += p->own[b];
}

static void store_tokens(kvc_table *t)
{
    struct kvc_plan *p = t->plan;
    for (int64_t i = 0; i < p->n_changes; i++)
        if (p->changes[i].before != KVC_NONE) kvc_pool_unref(t->pool, kvc_entry_offset(p->changes[i].before));
    if (p->slots) {
        kvc_table_set_slots(t, p->slots, p->slot_capacity);
        p->slots = NULL;
    }
    if (p->scores) {
        kvc_table_set_scores(t, p->scores, p->score_capacity);
        p->scores = NULL;
    }
    for (int64_t r = 0; r < kvc_lines(t); r++) commit_line(t, r);
    t->seen += p->T;
}

static void take_back(kvc_table *t)
{
    const struct kvc_plan *p = t->plan;
    for (int64_t i = p->n_changes - 1; i >= 0; i--) {
        int64_t *entry = &t->entries[p->changes[i].cell];
        kvc_pool_unref(t->pool, kvc_entry_offset(*entry));
        *entry = p->changes[i].before;
    }
}

void kvc_append_end(kvc_table *t, bool commit)
{
    struct kvc_plan *p = t->plan;
    if (commit)
        store_tokens(t);
    else
        take_back(t);
    kvc_free(p->own);
    kvc_free(p->real);
    kvc_free(p->seals);
    kvc_free(p->changes);
    kvc_array_release(p->slots);
    kvc_array_release(p->scores);
}
