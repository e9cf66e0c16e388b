/* attend_view.c - which page an item sees at a column, and which of its tokens are visible to a query. */
#include "attend_work.h"

#include <string.h>

/* Number of tokens in the stored columns. */
static int64_t paged_tokens(const kvc_call *call, const kvc_row *row)
{
    return row->stored + (call->own_in_pages ? row->own : 0);
}

static int64_t stored_columns(const kvc_call *call, const kvc_row *row)
{
    return kvc_columns_used(&call->a->store, paged_tokens(call, row));
}

int64_t kvc_item_columns(const kvc_call *call, const kvc_row *row)
{
    return stored_columns(call, row) + row->own_columns;
}

bool kvc_view_place(const kvc_place *p, int64_t c, kvc_view *v)
{
    const kvc_call *call = p->job->call;
    const kvc_store *s = &call->a->store;
    int64_t own = c - p->stored_columns;
    if (own >= 0) {
        v->first = p->row->stored + own * s->page_size;
        v->n = kvc_min(s->page_size, p->row->stored + p->row->own - v->first);
        if (v->n > 0) v->key = v->value = call->own_raw;
        return v->n > 0;
    }
    v->first = kvc_column_first(c, s->sinks, s->page_size);
    v->n = kvc_min(kvc_column_size(c, s->sinks, s->page_size), paged_tokens(call, p->row) - v->first);
    if (v->n <= 0) return false; /* an empty column has no entry: keep the view's formats, which match its layout */
    v->entry = kvc_call_entry_at(call, p->b, p->h, c);
    v->key = kvc_entry_key(v->entry), v->value = kvc_entry_value(v->entry);
    return true;
}

bool kvc_view_at(const kvc_place *p, int64_t c, kvc_view *v)
{
    const kvc_call *call = p->job->call;
    const kvc_store *s = &call->a->store;
    int64_t own = c - p->stored_columns, size = own < 0 ? kvc_column_layout(c, s->sinks, s->page_size) : s->page_size;
    int key = v->key, value = v->value;
    if (!kvc_view_place(p, c, v)) return false;
    if (v->page_size != size || v->key != key || v->value != value) /* usually the same as the previous page */
        v->layout = kvc_page_layout(v->key, v->value, s->key_dim, s->value_dim, v->page_size = size);
    if (own < 0)
        v->data = s->arena + kvc_entry_offset(v->entry) + (s->table_heads == 1 ? p->h * v->layout.bytes : 0);
    else
        v->data = call->own_pages + (p->row->own_page + p->h * p->row->own_columns + own) * v->layout.bytes;
    return true;
}

static void set_bits(uint64_t *bits, int64_t from, int64_t to)
{
    for (int64_t i = from, n; i < to; i += n) {
        n = kvc_min(to - i, 64 - i % 64);
        bits[i / 64] |= ~0ull >> (64 - n) << (i % 64);
    }
}

/* Bit mask of the n slots (64 at most) that are in [oldest, oldest + span]. The -1 of a dead token wraps around to the
 * largest number. Computed as bytes first, which compilers vectorize, then packed 8 bytes at a time. */
static uint64_t slots_in(const int32_t *slots, int64_t n, int32_t oldest, uint32_t span)
{
    uint8_t sees[64] = {0};
    uint64_t bits = 0, eight;
    for (int64_t i = 0; i < n; i++) sees[i] = (uint32_t)(slots[i] - oldest) <= span;
    for (int i = 0; i < 8; i++) {
        memcpy(&eight, sees + 8 * i, sizeof eight);
        bits |= eight * 0x0102040810204080u >> 56 << 8 * i;
    }
    return bits;
}

/* First slot visible to a query at `slot`; greater than `slot` if the query precedes the row's first token. */
static int64_t oldest_slot(const kvc_place *p, int64_t slot)
{
    int64_t window = p->job->call->a->window;
    if (window < 0) window = 1 + (slot - p->row->first) % -window;
    return window ? kvc_max(0, slot - window + 1) : 0;
}

bool kvc_in_sight(const kvc_place *p, const kvc_view *v)
{
    int64_t slot = p->row->query_slot + p->t0, from = p->row->first + v->first;
    return !p->row->contiguous || (from <= slot + p->tokens - 1 && from + v->n > oldest_slot(p, slot));
}

/* Sets the bits of the page's tokens that a query at `slot` sees; returns their number. */
static int64_t visible(const kvc_place *p, const kvc_view *v, int64_t slot, uint64_t *bits)
{
    const kvc_row *row = p->row;
    int64_t oldest = oldest_slot(p, slot), count = 0;
    memset(bits, 0, KVC_WORDS * sizeof *bits);
    if (oldest > slot) return 0;
    if (row->contiguous) {
        int64_t base = row->first + v->first;
        int64_t from = kvc_max(0, oldest - base), to = kvc_min(v->n, slot + 1 - base);
        if (to <= from) return 0;
        set_bits(bits, from, to);
        return to - from;
    }
    int64_t listed = row->slots ? kvc_min(v->n, kvc_max(0, row->stored - v->first)) : 0;
    for (int64_t i = 0; i < listed; i += 64) {
        bits[i / 64] =
            slots_in(row->slots + v->first + i, kvc_min(64, listed - i), (int32_t)oldest, (uint32_t)(slot - oldest));
        count += __builtin_popcountll(bits[i / 64]);
    }
    for (int64_t i = listed; i < v->n; i++) {
        int64_t k = kvc_slot_of(row, v->first + i);
        bool sees = k >= oldest && k <= slot;
        bits[i / 64] |= (uint64_t)sees << (i % 64);
        count += sees;
    }
    return count;
}

/* Whether all slots are in [least, most]. Branch-free: it runs for every page of a table with evictions. */
static bool all_within(const int32_t *slots, int64_t n, int64_t least, int64_t most)
{
    int32_t low = (int32_t)kvc_max(least, 0), high = (int32_t)kvc_min(most, INT32_MAX), out = 0;
    for (int64_t i = 0; i < n; i++) out |= (slots[i] < low) | (slots[i] > high);
    return !out;
}

bool kvc_all_seen(const kvc_place *p, const kvc_view *v)
{
    const kvc_row *row = p->row;
    int64_t first_slot = row->query_slot + p->t0, oldest = oldest_slot(p, first_slot + p->tokens - 1);
    if (!row->contiguous)
        return row->slots && v->first + v->n <= row->stored &&
               all_within(row->slots + v->first, v->n, oldest, first_slot);
    return row->first + v->first + v->n <= first_slot + 1 && row->first + v->first >= oldest;
}

bool kvc_look(const kvc_place *p, const kvc_view *v, int64_t r0, int64_t n, uint64_t bits[][KVC_WORDS], int64_t *sees)
{
    int64_t G = p->job->group, first_slot = p->row->query_slot + p->t0, seen = 0;
    for (int64_t r = 0; r < n; r++) {
        if (r > 0 && (r0 + r) % G) { /* same token as the previous row */
            memcpy(bits[r], bits[r - 1], sizeof bits[r]);
            sees[r] = sees[r - 1];
        } else
            sees[r] = visible(p, v, first_slot + (r0 + r) / G, bits[r]);
        seen += sees[r];
    }
    return seen > 0;
}

void kvc_place_at(kvc_place *p, int64_t item)
{
    const kvc_job *job = p->job;
    KVC_SEEK(job->call, p->b, item, attend_item);
    const kvc_row *first = kvc_call_row(job->call, p->b, 0);
    int64_t blocks = kvc_ceil_div(first->queries, job->block_tokens), at = (item - first->attend_item) / first->runs;
    p->h = at / blocks;
    p->item = item;
    p->group = first->attend_group + at;
    p->runs = first->runs;
    p->run = (item - first->attend_item) % p->runs;
    p->part = first->attend_part + at * p->runs;
    p->row = kvc_call_row(job->call, p->b, p->h);
    p->columns = kvc_item_columns(job->call, p->row);
    p->stored_columns = stored_columns(job->call, p->row);
    p->begin = p->columns * p->run / p->runs;
    p->end = p->columns * (p->run + 1) / p->runs;
    p->t0 = at % blocks * job->block_tokens;
    p->tokens = kvc_min(job->block_tokens, p->row->queries - p->t0);
}
