/* table_evict.c - an eviction has the same steps as an append: plan allocates pages, builds the new arrays and lists
 * the tokens to copy; the op copies them (compact.c); commit swaps the arrays and releases the old pages.
 *
 * A line consists of sinks (column 0, never evicted), closed pages, and the open tail: the raw pages still to be
 * sealed, or else the last page if it is not full. The tail is compacted in place and keeps its order. In closed pages
 * that are not shared and whose format allows moving single tokens, the tokens of the emptiest pages fill the holes of
 * the others. Other closed pages (shared, or with statistics over the page) keep dead tokens; when more than a quarter
 * of their tokens are dead, the emptiest are rewritten as fewer pages until at most a sixteenth are dead. Pages that
 * change format are rewritten together. */
#include "table_evict.h"

#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- growable lists */

kvc_status kvc_offsets_push(kvc_offsets *list, int64_t offset)
{
    KVC_TRY(kvc_grow(&list->at, list->n, &list->capacity, sizeof *list->at));
    list->at[list->n++] = offset;
    return KVC_OK;
}

static kvc_status push_move(kvc_line *w, int64_t from, int64_t t, int64_t to, int64_t t2, int64_t layout)
{
    kvc_eviction *e = w->e;
    KVC_TRY(kvc_grow(&e->moves, e->n_moves, &e->move_capacity, sizeof *e->moves));
    e->moves[e->n_moves++] = (kvc_move){w->line, from, t, to, t2, layout};
    return KVC_OK;
}

kvc_status kvc_line_new_page(kvc_line *w, int64_t c, int64_t like, int64_t *entry)
{
    int64_t offset, tokens = kvc_column_layout(c, w->t->spec.sinks, w->t->spec.page_size);
    int key = kvc_entry_key(like), value = kvc_entry_value(like);
    int64_t bytes = kvc_page_layout(key, value, w->t->spec.key_dim, w->t->spec.value_dim, tokens).bytes;
    int64_t heads = w->e->after.table_heads == 1 ? w->t->spec.heads : 1;
    KVC_TRY(kvc_grow(&w->e->added.at, w->e->added.n, &w->e->added.capacity, sizeof offset));
    KVC_TRY(kvc_pool_alloc(w->t->pool, heads * bytes, &offset));
    w->e->added.at[w->e->added.n++] = offset;
    *entry = kvc_entry(offset, key, value);
    return KVC_OK;
}

/* Sets where the page's remaining tokens are stored: in the page itself, unless its group of heads is split, which
 * requires a copy. */
static kvc_status settle(kvc_line *w, kvc_evict_page *p)
{
    if (p->to != KVC_NONE) return KVC_OK;
    p->to = p->entry;
    if (!w->foreign) return KVC_OK;
    KVC_TRY(kvc_line_new_page(w, p->column, p->entry, &p->to));
    return push_move(w, p->entry, -1, p->to, 0, kvc_column_layout(p->column, w->t->spec.sinks, w->t->spec.page_size));
}

/* ---------------------------------------------------------------- closed pages */

static int by_age(const void *a, const void *b)
{
    const kvc_evict_page *x = *(kvc_evict_page *const *)a, *y = *(kvc_evict_page *const *)b;
    return (x->column > y->column) - (x->column < y->column);
}

/* By number of live tokens; ties by age, oldest first. */
static int by_emptiest(const void *a, const void *b)
{
    const kvc_evict_page *x = *(kvc_evict_page *const *)a, *y = *(kvc_evict_page *const *)b;
    return x->live == y->live ? by_age(a, b) : x->live < y->live ? -1 : 1;
}

static int by_fullest(const void *a, const void *b)
{
    const kvc_evict_page *x = *(kvc_evict_page *const *)a, *y = *(kvc_evict_page *const *)b;
    return x->live == y->live ? by_age(a, b) : x->live > y->live ? -1 : 1;
}

/* Moves the tokens of the emptiest pages to the holes of the others. */
static kvc_status fill_holes(kvc_line *w, kvc_evict_page **pages, int64_t n)
{
    int64_t P = w->t->spec.page_size, live = 0, to = 0, hole = 0;
    for (int64_t i = 0; i < n; i++) live += pages[i]->live;
    int64_t stay = (live + P - 1) / P;
    qsort(pages, (size_t)n, sizeof(kvc_evict_page *), by_fullest);
    for (int64_t i = stay; i < n; i++) {
        kvc_evict_page *from = pages[i];
        for (int64_t t = 0; t < P; t++) {
            if (from->place[t] < 0) continue;
            while (pages[to]->place[hole] >= 0)
                if (++hole == P) to++, hole = 0;
            KVC_TRY(settle(w, pages[to]));
            KVC_TRY(push_move(w, from->entry, t, pages[to]->to, hole, P));
            pages[to]->place[hole] = from->place[t];
            pages[to]->live++;
        }
        from->live = 0;
    }
    return KVC_OK;
}

/* Number of the emptiest pages to rewrite; 0 while few tokens are dead. */
static int64_t worth_merging(kvc_evict_page **pages, int64_t n, int64_t P)
{
    int64_t dead = 0, live = 0;
    for (int64_t i = 0; i < n; i++) dead += P - pages[i]->live;
    if (dead * KVC_MERGE_ABOVE <= n * P) return 0;
    int64_t best = 0, most = 0;
    for (int64_t i = 0; i < n; i++) {
        live += pages[i]->live;
        int64_t freed = i + 1 - (live + P - 1) / P;
        if (freed <= most) continue;
        best = i + 1;
        most = freed;
        if ((dead - freed * P) * KVC_MERGE_UNTIL <= (n - freed) * P) break;
    }
    return best;
}

/* Copies the live tokens of the pages to new pages, in order. */
static kvc_status write_anew(kvc_line *w, kvc_evict_page **pages, int64_t n)
{
    int64_t P = w->t->spec.page_size, live = 0, at = 0;
    for (int64_t i = 0; i < n; i++) live += pages[i]->live;
    qsort(pages, (size_t)n, sizeof(kvc_evict_page *), by_age);
    int32_t *place = w->merged;
    int64_t *to = w->merged_to, out = (live + P - 1) / P, first = w->e->n_moves;
    for (int64_t i = 0; i < out; i++) KVC_TRY(kvc_line_new_page(w, 1, pages[0]->formats, &to[i]));
    for (int64_t i = 0; i < n; i++)
        for (int64_t t = 0; t < P; t++)
            if (pages[i]->place[t] >= 0) {
                KVC_TRY(push_move(w, pages[i]->entry, t, to[at / P], at % P, P));
                place[at++] = pages[i]->place[t];
            }
    for (int64_t i = (out - 1) * P; at < out * P; i++, at++) { /* pad the last page with copies of its own tokens */
        const kvc_move *m = w->e->moves + first + i;
        KVC_TRY(push_move(w, m->from, m->from_token, to[out - 1], at % P, P));
        place[at] = -1;
    }
    for (int64_t i = 0; i < n; i++) {
        pages[i]->live = 0;
        if (i >= out) continue;
        memcpy(pages[i]->place, place + i * P, (size_t)P * sizeof *place);
        for (int64_t t = 0; t < P; t++) pages[i]->live += pages[i]->place[t] >= 0;
        pages[i]->to = to[i];
    }
    w->e->rewritten += live;
    return KVC_OK;
}

/* For pages that cannot be changed in place: rewrites the emptiest if it is worthwhile. */
static kvc_status merge(kvc_line *w, kvc_evict_page **pages, int64_t n)
{
    qsort(pages, (size_t)n, sizeof(kvc_evict_page *), by_emptiest);
    n = worth_merging(pages, n, w->t->spec.page_size);
    return n ? write_anew(w, pages, n) : KVC_OK;
}

static int64_t formats_of(int64_t entry) { return entry & 0xffff; }

static bool may_change(const kvc_line *w, const kvc_evict_page *p)
{
    return kvc_format_traits(kvc_entry_key(p->entry)).keys == KVC_KEYS_TOKEN &&
           (w->foreign || kvc_pool_refs(w->t->pool, kvc_entry_offset(p->entry)) == 1);
}

/* Compacts closed pages, in groups of the same formats and kind. */
static kvc_status close_up(kvc_line *w)
{
    for (int64_t i = 0; i < w->closed; i++) {
        const kvc_evict_page *first = &w->pages[i];
        if (first->done || first->live == 0) continue;
        bool down = first->formats != formats_of(first->entry), change = may_change(w, first);
        int64_t n = 0;
        for (int64_t j = i; j < w->closed; j++) {
            kvc_evict_page *p = &w->pages[j];
            if (p->done || p->live == 0 || p->formats != first->formats ||
                (p->formats != formats_of(p->entry)) != down || (!down && may_change(w, p) != change))
                continue;
            p->done = true;
            w->sorted[n++] = p;
        }
        KVC_TRY(down ? write_anew(w, w->sorted, n) : change ? fill_holes(w, w->sorted, n) : merge(w, w->sorted, n));
    }
    for (int64_t i = 0; i < w->closed; i++)
        if (w->pages[i].live) KVC_TRY(settle(w, &w->pages[i]));
    return KVC_OK;
}

/* ---------------------------------------------------------------- the open tail */

static kvc_status close_tail(kvc_line *w)
{
    int64_t P = w->t->spec.page_size, at = 0, size = w->open * P;
    kvc_evict_page *pages = w->pages + w->closed;
    int32_t *place = w->places + w->closed * P; /* of all open pages, contiguous */
    for (int64_t i = 0; i < size; i++) {
        if (place[i] < 0) continue;
        kvc_evict_page *from = &pages[i / P], *to = &pages[at / P];
        if (at % P == 0) {
            bool changes = false;
            for (int64_t j = i, n = at; j < size && n < at + P; j++)
                if (place[j] >= 0) changes |= j != n++;
            if (changes && !w->foreign && kvc_pool_refs(w->t->pool, kvc_entry_offset(to->entry)) > 1) {
                KVC_TRY(kvc_line_new_page(w, 1, to->entry, &to->to));
                to->fresh = true;
            } else {
                KVC_TRY(settle(w, to));
            }
        }
        if (i != at || to->fresh) KVC_TRY(push_move(w, from->entry, i % P, to->to, at % P, P));
        int32_t moved = place[i];
        place[i] = -1;
        place[at++] = moved;
    }
    w->tail = at;
    return KVC_OK;
}

/* ---------------------------------------------------------------- a line */

/* Number of open columns at the end: raw pages still to be sealed, or else the last page if it is not full. */
static int64_t open_columns(const kvc_table *t, const int64_t *entries, int64_t n)
{
    int64_t used = kvc_table_columns(t, n), c = used;
    while (c > 1 && kvc_entry_is_raw(entries[c - 1]) && !kvc_table_stays_raw(t, c - 1)) c--;
    bool full = used > 1 && kvc_column_first(used, t->spec.sinks, t->spec.page_size) == n;
    return used <= 1 ? 0 : c == used && !full ? 1 : used - c;
}

static int64_t old_slot(const kvc_table *t, int64_t r, int64_t i)
{
    return t->slots ? t->slots[r * t->slot_capacity + i] : t->rows[2 * r + 1] + i;
}

/* The entry of head h's page within a group. */
static int64_t inside(const kvc_table *t, int64_t entry, int64_t c, int64_t h)
{
    if (entry == KVC_NONE) return entry;
    int key = kvc_entry_key(entry), value = kvc_entry_value(entry);
    int64_t tokens = kvc_column_layout(c, t->spec.sinks, t->spec.page_size);
    int64_t bytes = kvc_page_layout(key, value, t->spec.key_dim, t->spec.value_dim, tokens).bytes;
    return kvc_entry(kvc_entry_offset(entry) + h * bytes, key, value);
}

/* Fills the new table's arrays for line w->line. */
static void write_line(kvc_line *w)
{
    const kvc_table *t = w->t;
    kvc_table *a = &w->e->after;
    int64_t P = t->spec.page_size, c = 1, n = w->sinks, left = w->tail;
    int64_t *entries = a->entries + w->line * a->columns;
    for (int64_t i = 0; i < a->columns; i++) entries[i] = KVC_NONE;
    if (w->sinks && t->spec.sinks) entries[0] = w->sink.to;
    for (int64_t i = 0; i < w->sinks; i++) w->order[i] = (int32_t)i;
    for (int64_t i = 0; i < w->closed + w->open; i++) {
        kvc_evict_page *p = &w->pages[i];
        int64_t tokens = i < w->closed ? (p->live ? P : 0) : left < P ? left : P;
        if (!tokens) continue;
        if (i >= w->closed) left -= tokens;
        entries[c++] = p->to;
        memcpy(w->order + n, p->place, (size_t)tokens * sizeof *p->place);
        n += tokens;
    }
    int64_t heads = a->table_heads == 1 ? t->spec.heads : 1;
    a->rows[2 * w->line] = n;
    a->rows[2 * w->line + 1] = t->rows[2 * w->from + 1];
    for (int64_t i = 0; i < a->slot_capacity; i++) {
        bool stored = i < n && w->order[i] >= 0;
        a->slots[w->line * a->slot_capacity + i] = stored ? (int32_t)old_slot(t, w->from, w->order[i]) : -1;
    }
    for (int64_t h = w->line * heads; a->scores && h < (w->line + 1) * heads; h++)
        for (int64_t i = 0; i < a->score_capacity; i++) {
            bool stored = i < n && w->order[i] >= 0;
            a->scores[h * a->score_capacity + i] = stored ? t->scores[h * t->score_capacity + w->order[i]] : 0;
        }
}

/* The formats that a closed page gets: the requested ones, unless the page is shared. */
static int64_t wanted(const kvc_line *w, int64_t c, const int32_t *formats, int64_t columns)
{
    int64_t entry = w->t->entries[w->from * w->t->columns + c];
    bool keeps = !formats || c >= columns || formats[c] < 0 || kvc_pool_refs(w->t->pool, kvc_entry_offset(entry)) > 1;
    return keeps ? formats_of(entry) : formats[c];
}

kvc_status kvc_line_evict(kvc_line *w, const uint8_t *keep, const int32_t *formats, int64_t columns)
{
    const kvc_table *t = w->t;
    int64_t P = t->spec.page_size, n = t->rows[2 * w->from], used = kvc_table_columns(t, n);
    const int64_t *entries = t->entries + w->from * t->columns;
    w->sinks = n < t->spec.sinks ? n : t->spec.sinks;
    w->open = open_columns(t, entries, n);
    w->closed = used > 1 ? used - 1 - w->open : 0;
    if (w->sinks) {
        w->sink =
            (kvc_evict_page){.entry = w->foreign ? inside(t, entries[0], 0, w->head) : entries[0], .to = KVC_NONE};
        KVC_TRY(settle(w, &w->sink));
    }
    for (int64_t i = 0; i < w->closed + w->open; i++) {
        int64_t c = i + 1, first = kvc_column_first(c, t->spec.sinks, P);
        kvc_evict_page *p = &w->pages[i];
        *p = (kvc_evict_page){.entry = w->foreign ? inside(t, entries[c], c, w->head) : entries[c],
                              .to = KVC_NONE,
                              .column = c,
                              .formats = wanted(w, c, formats, columns),
                              .place = w->places + i * P};
        for (int64_t k = 0; k < P; k++) {
            bool was = first + k < n && old_slot(t, w->from, first + k) >= 0, live = was && keep[first + k];
            p->place[k] = live ? (int32_t)(first + k) : -1;
            p->live += live;
            w->e->lost |= was && !live;
        }
    }
    KVC_TRY(close_up(w));
    KVC_TRY(close_tail(w));
    write_line(w);
    if (w->foreign) return KVC_OK; /* groups are dropped as a whole, by plan_lines */
    /* empty pages have no destination (to = KVC_NONE) and are dropped, too */
    for (int64_t i = 0; i < w->closed + w->open; i++)
        if (w->pages[i].to != w->pages[i].entry)
            KVC_TRY(kvc_offsets_push(&w->e->dropped, kvc_entry_offset(w->pages[i].entry)));
    return KVC_OK;
}
