/* pages.cuh - a warp's way over the columns of a row. What all pages of one pair of formats have in common is found when the
 * warp meets another pair, and kept: the next page of the same pair costs a look at its entry and a check of its place. */
#ifndef KVC_PAGES_CUH
#define KVC_PAGES_CUH

#include "kept.cuh"

/* A warp's page. Here and not in registers: those hold sums and words. */
typedef struct kvc_page_room {
    kvc_view view;
    kvc_side key, value;
    kvc_kept kept;
    int key_kind, value_kind;
    int centred, rotated;
    int pair;                         /* K format << 8 | V format of the pages that this is of; -1: none */
    int32_t v, k_meta, v_meta, bytes; /* their layout */
} kvc_page_room;

/* Where the page of head h lies that `entry` names, pages being of so many bytes; NULL: not in the arena. */
KVC_DEVICE uint8_t *kvc_page_place(const kvc_store *s, int64_t entry, int h, int64_t bytes)
{
    int64_t offset = kvc_entry_offset(entry);
    int group = s->table_heads == 1 ? (int)s->heads : 1;
    if (entry < 0 || offset > s->arena_bytes - bytes * group) return NULL;
    return s->arena + offset + (group > 1 ? bytes * h : 0);
}

/* A page of another pair of formats than the last; false if there is no page, or no room for its kinds. */
KVC_DEVICE bool kvc_page_meet(const kvc_call *call, const kvc_row *row, uint32_t kinds, int64_t b, int64_t h, int64_t c,
                              kvc_page_room *page)
{
    const kvc_store *s = &call->a.store;
    bool stored = c < row->used;
    int64_t entry = stored ? kvc_row_entry(s, row, c) : kvc_entry(0, call->own_raw, call->own_raw);
    int64_t tokens = stored ? kvc_column_layout(c, s->sinks, s->page_size) : call->own_page;
    int64_t first = stored ? kvc_column_first(c, s->sinks, s->page_size) : row->stored + (c - row->used) * tokens;
    int64_t n = stored ? kvc_min(kvc_column_size(c, s->sinks, s->page_size), kvc_row_paged(row) - first)
                       : kvc_min(tokens, row->stored + row->own - first);
    if (n <= 0) return false;
    int key = kvc_entry_key(entry), value = kvc_entry_value(entry), kk = kvc_kind_in(kinds, key),
        vk = kvc_kind_in(kinds, value);
    uint8_t *data = NULL;
    kvc_layout l = {0, 0, 0, 0, 0};
    if (entry >= 0 && kvc_takes(key, s->key_dim) && kvc_takes(value, s->value_dim)) {
        l = kvc_page_layout(key, value, s->key_dim, s->value_dim, tokens);
        data = stored ? kvc_page_place(s, entry, (int)h, l.bytes)
                      : call->own_pages + ((b * s->heads + h) * call->own_columns + (c - row->used)) * l.bytes;
    }
    bool known = kinds >> kk & kinds >> vk & 1;
    if (!data || !known) {
        if (kvc_lane() == 0) kvc_flag(call->flags, data ? KVC_FLAG_STAGE : KVC_FLAG_ENTRY);
        return false;
    }
    kvc_warp_barrier();
    if (kvc_lane() == 0) {
        kvc_view view = {first, n, {data, key, value, tokens}};
        kvc_side k = {key, 1, s->key_dim, tokens, data, data + l.k_meta};
        kvc_side v = {value, 0, s->value_dim, tokens, data + l.v, data + l.v_meta};
        page->view = view, page->key = k, page->value = v;
        page->key_kind = kk, page->value_kind = vk;
        page->centred = kvc_format_traits(key).keys == KVC_KEYS_CENTRED;
        page->rotated = kvc_format_rotated(value) != 0;
        page->pair = stored && c > 0 ? key << 8 | value : -1;
        page->v = (int32_t)l.v, page->k_meta = (int32_t)l.k_meta, page->v_meta = (int32_t)l.v_meta;
        page->bytes = (int32_t)l.bytes;
        if (call->weights) page->kept = kvc_kept_at(call, b, h, c);
    }
    kvc_warp_barrier();
    return true;
}

/* The page of the warp's pair of formats that column c, not the first, has; NULL if it has another or none. */
KVC_DEVICE uint8_t *kvc_page_known(const kvc_call *call, const kvc_row *row, const kvc_page_room *page, int64_t h,
                                   int64_t c)
{
    if (c == 0 || c >= row->used) return NULL;
    int64_t entry = kvc_row_entry(&call->a.store, row, c);
    return (int)(entry & 0xffff) == page->pair ? kvc_page_place(&call->a.store, entry, (int)h, page->bytes) : NULL;
}

/* The warp's page of column c; false where there is none. */
KVC_DEVICE bool kvc_page_begin(const kvc_call *call, const kvc_row *row, uint32_t kinds, int64_t b, int64_t h,
                               int64_t c, kvc_page_room *page)
{
    const kvc_store *s = &call->a.store;
    uint8_t *data = kvc_page_known(call, row, page, h, c);
    if (!data) return kvc_page_meet(call, row, kinds, b, h, c, page);
    kvc_warp_barrier();
    if (kvc_lane() == 0) {
        int64_t first = s->sinks + (int)(c - 1) * (int)s->page_size, n = kvc_row_paged(row) - first;
        page->view.first = first, page->view.n = kvc_min(n, s->page_size);
        page->key.tiles = data, page->key.meta = data + page->k_meta;
        page->value.tiles = data + page->v, page->value.meta = data + page->v_meta;
        if (call->weights) page->kept = kvc_kept_at(call, b, h, c);
    }
    kvc_warp_barrier();
    return true;
}

/* A column that the warp comes to next, on its way to L2 if it is of the same pair. */
KVC_DEVICE void kvc_page_prefetch(const kvc_call *call, const kvc_row *row, int64_t h, int64_t c,
                                  const kvc_page_room *page)
{
    uint8_t *data = kvc_page_known(call, row, page, h, c);
    if (data) kvc_prefetch(data, page->bytes, kvc_lane());
}

/* First slot that a query at `slot` may see: as in attend_view.c. */
KVC_DEVICE int64_t kvc_oldest_slot(const kvc_call *call, const kvc_row *row, int64_t slot)
{
    int64_t window = call->a.window;
    if (window < 0) window = 1 + (slot - row->first) % -window;
    return window ? kvc_max(0, slot - window + 1) : 0;
}

/* Tokens that all rows of a group see: indices [begin, end). */
typedef struct kvc_seen_by {
    int64_t begin, end;
} kvc_seen_by;

KVC_DEVICE kvc_seen_by kvc_seen_by_all(const kvc_call *call, const kvc_row *row, const kvc_query *q)
{
    kvc_seen_by seen = {0, row->contiguous ? INT64_MAX : 0};
    KVC_ONCE for (int n = 0; n < 8; n++)
    {
        int64_t slot = q->slot[n];
        if (slot < 0) continue;
        seen.begin = kvc_max(seen.begin, kvc_oldest_slot(call, row, slot) - row->first);
        seen.end = kvc_min(seen.end, slot + 1 - row->first);
    }
    return seen;
}

KVC_DEVICE int kvc_sees_page(const kvc_seen_by *seen, const kvc_page_room *page)
{
    return page->view.first >= seen->begin && page->view.first + page->view.n <= seen->end;
}

#endif
