/* pages.cuh - how a warp iterates over the columns of a row. Data common to all pages of a pair of formats is computed
 * when the pair changes, and kept; the next page of the same pair needs only its entry, which is loaded one page
 * ahead. */
#ifndef KVC_PAGES_CUH
#define KVC_PAGES_CUH

#include "kept.cuh"

/* Data common to the warp's pages. In shared memory, because registers hold sums and words. */
typedef struct kvc_page_room {
    kvc_side key, value; /* without addresses */
    kvc_kept kept;
    int key_kind, value_kind, centred, rotated;
    int pair;                               /* K format << 8 | V format; -1: none yet */
    int32_t v, k_meta, v_meta, mean, bytes; /* their layout */
    uint8_t *base;                          /* start of the head's pages in the arena */
    int64_t most;                           /* largest valid offset */
} kvc_page_room;

/* A page, in registers: index of its first token, number of tokens. */
typedef struct kvc_page_at {
    uint8_t *data; /* NULL: no page */
    int32_t first, n;
} kvc_page_at;

KVC_DEVICE kvc_side kvc_key_side(const kvc_page_room *page, const kvc_page_at *at)
{
    kvc_side side = page->key;
    side.tiles = at->data, side.meta = at->data + page->k_meta;
    return side;
}
KVC_DEVICE kvc_side kvc_value_side(const kvc_page_room *page, const kvc_page_at *at)
{
    kvc_side side = page->value;
    side.tiles = at->data + page->v, side.meta = at->data + page->v_meta;
    return side;
}

/* Sets what depends on the formats, except for their pair. */
KVC_DEVICE void kvc_page_fill(const kvc_store *s, int key, int value, int tokens, const kvc_made_of *k,
                              const kvc_made_of *v, const kvc_page_sizes *sizes, kvc_page_room *page)
{
    page->key.format = key, page->key.key = 1, page->key.dim = s->key_dim, page->key.tokens = tokens;
    page->value.format = value, page->value.key = 0, page->value.dim = s->value_dim, page->value.tokens = tokens;
    page->key_kind = k->kind, page->value_kind = v->kind;
    page->centred = kvc_kind_bits(k->kind) < 8, page->rotated = v->rotated;
    page->v = sizes->v, page->k_meta = sizes->k_meta, page->v_meta = sizes->v_meta, page->mean = sizes->mean;
    page->bytes = sizes->bytes;
}

/* Prepares for the only pair of formats that full pages can have, if the host knows it. */
KVC_DEVICE void kvc_page_expect(const kvc_call *call, int h, kvc_page_room *page)
{
    const kvc_store *s = &call->a.store;
    page->pair = call->pair;
    if (call->pair < 0) return;
    int key = call->pair >> 8, value = call->pair & 255, group = s->table_heads == 1 ? (int)s->heads : 1;
    page->base = s->arena + (group > 1 ? (int64_t)call->sizes.bytes * h : 0);
    page->most = s->arena_bytes - (int64_t)call->sizes.bytes * group;
    kvc_page_fill(s, key, value, (int)s->page_size, &call->made_of[1][key], &call->made_of[0][value], &call->sizes,
                  page);
}

/* A page of another pair of formats than the last one, with entry `given` if that is not negative. No data if there is
 * no page, or no shared memory for its kinds. */
KVC_DEVICE kvc_page_at kvc_page_meet(const kvc_call *call, const kvc_row *row, uint32_t kinds, int h, int c,
                                     int64_t given, kvc_page_room *page)
{
    const kvc_store *s = &call->a.store;
    bool stored = c < row->used;
    int64_t entry = given, most = 0;
    if (given < 0) entry = stored ? kvc_row_entry(row, c) : kvc_entry(0, call->own_raw, call->own_raw);
    int used = (int)row->used, sinks = (int)s->sinks, size = stored ? (int)s->page_size : (int)call->own_page;
    int tokens = stored && c == 0 ? (sinks + KVC_TILE - 1) & -KVC_TILE : size,
        group = s->table_heads == 1 ? (int)s->heads : 1;
    int first = stored ? c == 0 ? 0 : sinks + (c - 1) * size : (int)row->stored + (c - used) * size;
    int left = (int)(stored ? kvc_row_paged(row) : row->stored + row->own) - first;
    int room = stored && c == 0 ? sinks : size, n = left < room ? left : room;
    kvc_page_at at = {NULL, first, n};
    if (n <= 0) return at;
    int key = kvc_entry_key(entry), value = kvc_entry_value(entry);
    uint8_t *base = NULL;
    kvc_made_of k = {0, 0, 0, KVC_NONE_KIND, 0}, v = k;
    if (entry >= 0 && key < KVC_FORMATS && value < KVC_FORMATS) k = call->made_of[1][key], v = call->made_of[0][value];
    const kvc_page_sizes sizes = kvc_page_sizes_of(&k, &v, tokens);
    int bytes = sizes.bytes;
    if (k.kind != KVC_NONE_KIND && v.kind != KVC_NONE_KIND) {
        base = s->arena + (group > 1 ? (int64_t)bytes * h : 0);
        most = s->arena_bytes - (int64_t)bytes * group;
        if (!stored)
            at.data = call->own_pages + (row->own_page + (c - used)) * bytes;
        else if (kvc_entry_offset(entry) <= most)
            at.data = base + kvc_entry_offset(entry);
    }
    bool known = kinds >> k.kind & kinds >> v.kind & 1;
    if (!at.data || !known) {
        if (kvc_lane() == 0) kvc_flag(call->flags, at.data ? KVC_FLAG_STAGE : KVC_FLAG_ENTRY);
        at.data = NULL;
        return at;
    }
    kvc_warp_barrier();
    if (kvc_lane() == 0) {
        page->pair = stored && c > 0 ? key << 8 | value : -1;
        page->base = base, page->most = most;
        kvc_page_fill(s, key, value, tokens, &k, &v, &sizes, page);
    }
    kvc_warp_barrier();
    return at;
}

/* Loads the entry of column c < end for kvc_page_known, one page ahead because of the latency. */
KVC_DEVICE int64_t kvc_entry_ahead(const kvc_row *row, int c, int end)
{
    return c < end && c < row->plain_end && c != row->not_plain && c > 0 ? row->entries[c] : -1;
}

/* The page of an entry, if it has the same pair of formats as the warp's last page. */
KVC_DEVICE uint8_t *kvc_page_known(const kvc_page_room *page, int64_t entry)
{
    int64_t offset = kvc_entry_offset(entry);
    return (int)(entry & 0xffff) == page->pair && entry >= 0 && offset <= page->most ? page->base + offset : NULL;
}

/* The page of column c. `paged`: kvc_row_paged. `known`: result of kvc_page_known during the warp's previous page;
 * otherwise `given` may be its entry. */
KVC_DEVICE kvc_page_at kvc_page_begin(const kvc_call *call, const kvc_row *row, uint32_t kinds, int h, int c, int paged,
                                      uint8_t *known, int64_t given, kvc_page_room *page)
{
    const kvc_store *s = &call->a.store;
    int size = (int)s->page_size, first = (int)s->sinks + (c - 1) * size, n = paged - first;
    kvc_page_at at = {known, first, n < size ? n : size};
    if (!known) at = kvc_page_meet(call, row, kinds, h, c, given, page);
    return at;
}

/* First slot visible to a query at `slot`, as in attend_view.c. */
KVC_DEVICE int kvc_oldest_slot(const kvc_call *call, const kvc_row *row, int slot)
{
    if (call->a.window == 0) return 0;
    int window = (int)kvc_max(-INT32_MAX, kvc_min(call->a.window, INT32_MAX)), oldest;
    if (window < 0) window = 1 + (slot - (int)row->first) % -window;
    oldest = slot - window + 1;
    return oldest > 0 ? oldest : 0;
}

/* Tokens that all rows of a group see: indices [begin, end). */
typedef struct kvc_seen_by {
    int32_t begin, end;
} kvc_seen_by;

KVC_DEVICE kvc_seen_by kvc_seen_by_all(const kvc_call *call, const kvc_row *row, const kvc_query *q)
{
    kvc_seen_by seen = {0, 0};
    kvc_quad slot[2] = {kvc_load_quad(q->slot), kvc_load_quad(q->slot + 4)};
    int first = (int)slot[0].w[0], last = first; /* rows are ordered by token; missing ones (-1) come last */
    if (!row->contiguous || first < 0) return seen;
    KVC_UNROLL for (int n = 1; n < 8; n++) last = (int)slot[n / 4].w[n % 4] > last ? (int)slot[n / 4].w[n % 4] : last;
    int begin = kvc_oldest_slot(call, row, last) - (int)row->first;
    seen.begin = begin > 0 ? begin : 0;
    seen.end = first + 1 - (int)row->first;
    return seen;
}

KVC_DEVICE int kvc_sees_page(const kvc_seen_by *seen, const kvc_page_at *at)
{
    return at->first >= seen->begin && at->first + at->n <= seen->end;
}

#endif
