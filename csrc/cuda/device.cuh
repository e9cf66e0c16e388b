/* device.cuh - the counterpart of attend.h: the rows and pages of a call. Kernels compute all of it from arrays on the
 * device, and check it before any access. */
#ifndef KVC_DEVICE_CUH
#define KVC_DEVICE_CUH

#include "kvc_cuda.h"
#include "ptx.cuh"

KVC_DEVICE int64_t kvc_min(int64_t a, int64_t b) { return a < b ? a : b; }
KVC_DEVICE int64_t kvc_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* One side (K or V) of a page. */
typedef struct kvc_side {
    int format, key;
    int64_t dim, tokens; /* tokens of the page layout */
    uint8_t *tiles, *meta;
} kvc_side;

typedef struct kvc_page {
    uint8_t *data; /* NULL: no page */
    int key, value;
    int64_t tokens;
} kvc_page;

/* Sizes of one side of a page in a format: bytes per token, metadata bytes per token, and metadata per dim. */
typedef struct kvc_made_of {
    uint16_t codes, meta, dims;
    uint8_t kind, rotated; /* kind: see query.cuh; KVC_NONE_KIND if the side's dim does not suit the format */
} kvc_made_of;
#define KVC_NONE_KIND 31

/* Layout of a page in a pair of formats: byte offsets, and bytes. */
typedef struct kvc_page_sizes {
    int32_t v, k_meta, v_meta, mean, bytes;
} kvc_page_sizes;

/* A sequence's part of a call with sequences of different lengths (varlen.cu). */
typedef struct kvc_segment {
    int32_t token, own, queries;   /* its first token in q, k, v and out; number of tokens in k and v; in q */
    int32_t own_page, own_columns; /* temporary pages of own tokens per head; own_page: those of preceding sequences */
} kvc_segment;

/* The at-th block of query rows of sequence b, or of its columns to write. */
typedef struct kvc_item {
    int32_t b, at;
} kvc_item;

/* Lists of such a call in its workspace. */
typedef struct kvc_lists {
    kvc_segment *segments; /* [batch]; NULL: all sequences have T tokens and Tq queries */
    kvc_item *attend, *write;
    uint32_t *counts; /* lengths of both lists */
    int64_t attend_most, write_most, own_most;
    uint32_t *nonfinite; /* [batch] or NULL: 1 if k or v had NaN or Inf; the output is NaN then */
} kvc_lists;

/* A call, as passed to kernels. */
typedef struct kvc_call {
    kvc_attend_args a;
    kvc_lists lists;
    const int64_t *seen; /* on the device; NULL: use a.seen */
    uint32_t *flags;
    int32_t *own_list;   /* [B, T] indices of the real tokens if some are masked; else NULL */
    int32_t *own_count;  /* [B] their number */
    uint8_t *own_pages;  /* [B, H, own_columns] temporary raw pages of own tokens */
    int64_t own_columns; /* of `own_page` tokens each */
    int64_t own_page;
    int own_raw; /* raw format of k and v */
    /* kinds of pages (query.cuh) that shared memory is reserved for; forms of q that they need */
    uint32_t kinds, forms;
    int32_t form_at[6];                  /* byte offset of each form in eight query rows; the last is the total */
    kvc_made_of made_of[2][KVC_FORMATS]; /* V, K */
    /* K format << 8 | V format of the call's full pages if they can only have one, or -1; their layout */
    int32_t pair;
    kvc_page_sizes sizes;
    int64_t group, rows;   /* GQA group size; query rows per block: of one KV head, token by token */
    int64_t blocks, runs;  /* blocks of queries; runs of columns */
    int64_t raw_ends;      /* see kvc_ends_of */
    float *partial;        /* [lines, runs] x (rows x (Dv + 2)): o, m, l */
    uint32_t *done;        /* [lines] runs that are finished; 0 before and after the call */
    int64_t lines;         /* number of (sequence, head, block of queries) */
    int64_t write_columns; /* items of writing per (sequence, head) */
    uint32_t *weights;     /* weights stored for accumulated attention, or NULL: see kept.cuh */
    float *tops;
    int kept_blocks, kept_pairs;
    int eights;   /* q can be converted to fragments eight rows at a time (prepare.cuh) */
    int prefill;  /* use the kernels for long calls (prefill.cuh) */
    int token;    /* one token per row, on raw pages: written by token.cu; kvc_write_kernel only seals */
    int joined;   /* one token per row, written by the attention kernel; the call is a single launch */
    int64_t pipe; /* shared memory per warp for asynchronously copied pages (pipeline.cuh); 0: none */
} kvc_call;

/* launch.cu. kvc_call_plan fills the call and returns the bytes of its workspace. longest: 0, or for sequences of
 * different lengths the longest; Tq and T are then totals over all sequences, and kernels are chosen for `typical`
 * tokens. kvc_call_run: `seals`: how many seals may be of pages that no row fills. */
int64_t kvc_call_plan(const kvc_attend_args *a, const kvc_cuda *on, int64_t longest, int64_t typical, kvc_call *call);
int kvc_call_run(const kvc_call *call, int64_t seals, const kvc_cuda *on);
extern "C" int kvc_token_launch(const kvc_call *call, void *stream); /* token.cu */

/* Loads have 16 bytes, and page offsets are multiples of 64, so the arena must be aligned to 64. */
static inline int kvc_store_aligned(const kvc_store *s) { return (uintptr_t)s->arena % 64 ? KVC_CUDA_ALIGNMENT : 0; }

KVC_DEVICE void kvc_flag(uint32_t *flags, uint32_t bit)
{
    if (flags) kvc_atomic_or(flags, bit);
}

/* kvc_align in 32 bits. */
KVC_INLINE int kvc_align_bytes(int n) { return (n + KVC_ALIGN - 1) & -KVC_ALIGN; }

KVC_INLINE kvc_page_sizes kvc_page_sizes_of(const kvc_made_of *k, const kvc_made_of *v, int tokens)
{
    kvc_page_sizes of;
    of.v = kvc_align_bytes(tokens * k->codes);
    of.k_meta = of.v + kvc_align_bytes(tokens * v->codes);
    of.mean = of.k_meta + tokens * k->meta;
    of.v_meta = of.k_meta + kvc_align_bytes(tokens * k->meta + k->dims);
    of.bytes = of.v_meta + kvc_align_bytes(tokens * v->meta);
    return of;
}

KVC_DEVICE bool kvc_takes(int format, int64_t dim)
{
    kvc_traits f = kvc_format_traits(format);
    return f.bits && (f.group == 0 || dim % f.group == 0) && (f.bits != 3 || dim % 32 == 0);
}

/* Slot of own token 0. */
KVC_DEVICE int64_t kvc_seen(const kvc_call *call) { return call->seen ? *call->seen : call->a.seen; }

/* The page of head h that `entry` names, if it lies in the arena. */
KVC_DEVICE kvc_page kvc_page_of(const kvc_store *s, int64_t entry, int64_t h, int64_t tokens, uint32_t *flags)
{
    kvc_page page = {NULL, kvc_entry_key(entry), kvc_entry_value(entry), tokens};
    if (entry < 0 || !kvc_takes(page.key, s->key_dim) || !kvc_takes(page.value, s->value_dim)) {
        kvc_flag(flags, KVC_FLAG_ENTRY);
        return page;
    }
    int64_t bytes = kvc_page_layout(page.key, page.value, s->key_dim, s->value_dim, tokens).bytes;
    int64_t offset = kvc_entry_offset(entry), group = s->table_heads == 1 ? s->heads : 1;
    if (offset > s->arena_bytes - group * bytes) {
        kvc_flag(flags, KVC_FLAG_ENTRY);
        return page;
    }
    page.data = s->arena + offset + (group > 1 ? h * bytes : 0);
    return page;
}

/* Bytes of the pages that an entry names (all heads of a group). */
KVC_DEVICE int64_t kvc_group_bytes(const kvc_store *s, int64_t entry, int64_t tokens)
{
    int key = kvc_entry_key(entry), value = kvc_entry_value(entry);
    return (s->table_heads == 1 ? s->heads : 1) * kvc_page_layout(key, value, s->key_dim, s->value_dim, tokens).bytes;
}

/* Whether the pages of a copy do not overlap; as kvc_apart_check. */
KVC_DEVICE bool kvc_apart(const kvc_store *s, int64_t from, int64_t to, int64_t tokens)
{
    int64_t a = kvc_entry_offset(from), b = kvc_entry_offset(to);
    return a + kvc_group_bytes(s, from, tokens) <= b || b + kvc_group_bytes(s, to, tokens) <= a;
}

KVC_DEVICE kvc_side kvc_page_side(const kvc_page *p, int key, int64_t key_dim, int64_t value_dim)
{
    kvc_layout l = kvc_page_layout(p->key, p->value, key_dim, value_dim, p->tokens);
    kvc_side side = {key ? p->key : p->value,     key,
                     key ? key_dim : value_dim,   p->tokens,
                     p->data + (key ? l.k : l.v), p->data + (key ? l.k_meta : l.v_meta)};
    return side;
}

/* ---------------------------------------------------------------- rows */

/* See attend.h: a (sequence, table row). */
typedef struct kvc_row {
    int64_t at; /* index in the table */
    int64_t stored, own, first, seen;
    /* index in dimension 0 of q, k, v and out; for sequences of different lengths the first token */
    int64_t batch;
    int64_t queries, query_slot, own_page; /* number of queries, slot of the first; see own_pages */
    const int32_t *own_at, *slots;
    bool contiguous, own_in_pages;
    int64_t filling, filling_column;
    int64_t used; /* columns that hold stored tokens for attention */
    const int64_t *entries;
    int32_t plain_end, not_plain; /* columns from 1 on have the table's entries, except for this one if it is not 0 */
} kvc_row;

/* kvc_column without a 64-bit division. */
KVC_DEVICE int64_t kvc_column_of(const kvc_store *s, int64_t i)
{
    return i < s->sinks ? 0 : 1 + (int64_t)((uint32_t)(i - s->sinks) / (uint32_t)s->page_size);
}

KVC_DEVICE int64_t kvc_columns_used(const kvc_store *s, int64_t n) { return n == 0 ? 0 : 1 + kvc_column_of(s, n - 1); }

KVC_DEVICE int64_t kvc_row_stored(const kvc_store *s, int64_t at, uint32_t *flags)
{
    int64_t n = s->rows[2 * at], most = s->columns ? s->sinks + (s->columns - 1) * s->page_size : 0;
    if (s->slots) most = kvc_min(most, s->slot_capacity);
    if (n >= 0 && n <= most) return n;
    kvc_flag(flags, KVC_FLAG_ROWS);
    return n < 0 ? 0 : most;
}

KVC_DEVICE int64_t kvc_entry_at(const kvc_store *s, int64_t at, int64_t c) { return s->table[at * s->columns + c]; }

/* Called by the whole warp. */
KVC_DEVICE kvc_row kvc_row_begin(const kvc_call *call, int64_t b, int64_t h)
{
    const kvc_attend_args *a = &call->a;
    const kvc_store *s = &a->store;
    kvc_row row;
    row.at = b * s->table_heads + (s->table_heads == 1 ? 0 : h);
    int64_t first = s->rows[2 * row.at + 1]; /* loaded together with the others: each load alone has the full latency */
    row.seen = kvc_seen(call);
    row.stored = kvc_row_stored(s, row.at, call->flags);
    row.own = a->T;
    row.batch = b, row.queries = a->Tq, row.query_slot = row.seen + a->T - a->Tq;
    row.own_page = (b * s->heads + h) * call->own_columns;
    if (call->lists.segments) {
        kvc_segment of = call->lists.segments[b];
        row.own = of.own, row.seen = row.stored, row.batch = of.token, row.queries = of.queries;
        row.query_slot = row.stored + of.own - of.queries;
        row.own_page = (int64_t)of.own_page * s->heads + h * of.own_columns;
    }
    row.own_at = NULL;
    row.slots = s->slots ? s->slots + row.at * s->slot_capacity : NULL;
    int64_t skipped = 0;
    bool own_run = true;
    if (call->own_list) { /* a branch: the compiler would wait even for loads whose predicate is false */
        row.own = call->own_count[b];
        if (row.own < a->T) row.own_at = call->own_list + b * a->T;
        if (row.own_at && row.own) skipped = row.own_at[0], own_run = row.own_at[row.own - 1] - skipped == row.own - 1;
    }
    int64_t own_first = row.seen + skipped;
    row.first = row.stored ? first : own_first;
    row.contiguous = own_run && !row.slots && (row.stored == 0 || row.own == 0 || own_first == row.first + row.stored);

    row.entries = s->table + row.at * s->columns;
    int end = (int)(row.stored + row.own), c0 = (int)kvc_column_of(s, row.stored);
    int wanted = (int)kvc_columns_used(s, end), used = (int)kvc_min(wanted, s->columns), own = (int)row.own;
    if (wanted > used) kvc_flag(call->flags, KVC_FLAG_ROWS);
    uint32_t raw = (uint32_t)call->own_raw, pair = raw << 8 | raw, other = 0, fill = 0;
    KVC_ONCE for (int c = c0 + kvc_lane(); c < used && own; c += 32)
    {
        int64_t entry = row.entries[c];
        if (entry < 0 || (uint32_t)(entry & 0xffff) != pair) other = 1;
    }
    int begin = c0 ? (int)s->sinks + (c0 - 1) * (int)s->page_size : 0;
    if (own && c0 > 0 && c0 < used && begin < (int)row.stored && begin + (int)s->page_size <= end) {
        KVC_ONCE for (int i = kvc_lane(); i < (int)a->n_seals;
                      i += 32) if (a->seals[2 * i] != KVC_NONE && a->seals[2 * i + 1] == row.entries[c0]) fill =
            (uint32_t)i + 1;
        fill = kvc_warp_most(fill);
    }
    row.filling = fill ? a->seals[2 * ((int64_t)fill - 1)] : KVC_NONE;
    row.filling_column = c0;
    row.own_in_pages = !kvc_warp_any(other) && !fill && wanted == used;
    row.used = row.own_in_pages ? wanted : row.stored ? c0 + ((int)row.stored > begin) : 0;
    row.plain_end = (int32_t)row.used;
    row.not_plain = fill ? c0 : 0;
    return row;
}

/* For the whole block: one warp determines the row of (b, h). Ends with a barrier. */
KVC_DEVICE void kvc_row_shared(const kvc_call *call, int64_t b, int64_t h, kvc_row *row)
{
    if (kvc_warp() == 0) {
        kvc_row found = kvc_row_begin(call, b, h);
        if (kvc_lane() == 0) *row = found;
    }
    kvc_barrier();
}

/* Slot of stored or own token i. */
KVC_DEVICE int64_t kvc_slot_of(const kvc_row *row, int64_t i)
{
    if (row->contiguous) return row->first + i;
    if (i >= row->stored) return row->seen + (row->own_at ? row->own_at[i - row->stored] : i - row->stored);
    return row->slots ? row->slots[i] : row->first + i;
}

/* ---------------------------------------------------------------- columns, as attention sees them */

typedef struct kvc_view {
    int64_t first, n; /* index of its first token, number of tokens; n <= 0: nothing */
    kvc_page page;
} kvc_view;

/* Number of tokens in stored columns; kvc_row_columns: columns of a row, including own pages. */
KVC_DEVICE int64_t kvc_row_paged(const kvc_row *row) { return row->stored + (row->own_in_pages ? row->own : 0); }
KVC_DEVICE int64_t kvc_row_columns(const kvc_call *call, const kvc_row *row)
{
    int64_t own = row->own_in_pages ? 0 : (row->own + call->own_page - 1) / call->own_page;
    return row->used + own;
}

/* The entry of a column that holds stored tokens. */
KVC_DEVICE int64_t kvc_row_entry(const kvc_row *row, int64_t c)
{
    return row->filling != KVC_NONE && row->filling_column == c ? row->filling : row->entries[c];
}

KVC_DEVICE kvc_view kvc_view_at(const kvc_call *call, const kvc_row *row, int64_t h, int64_t c)
{
    const kvc_store *s = &call->a.store;
    int64_t paged = kvc_row_paged(row);
    kvc_view v;
    if (c < row->used) {
        v.first = kvc_column_first(c, s->sinks, s->page_size);
        v.n = kvc_min(kvc_column_size(c, s->sinks, s->page_size), paged - v.first);
        v.page.data = NULL;
        if (v.n <= 0) return v;
        v.page = kvc_page_of(s, kvc_row_entry(row, c), h, kvc_column_layout(c, s->sinks, s->page_size), call->flags);
        if (!v.page.data) v.n = 0;
        return v;
    }
    v.first = row->stored + (c - row->used) * call->own_page;
    v.n = kvc_min(call->own_page, row->stored + row->own - v.first);
    v.page.key = v.page.value = call->own_raw;
    v.page.tokens = call->own_page;
    int64_t bytes = kvc_page_layout(call->own_raw, call->own_raw, s->key_dim, s->value_dim, call->own_page).bytes;
    v.page.data = call->own_pages + (row->own_page + (c - row->used)) * bytes;
    return v;
}

#define KVC_MOST_ENDS 4
/* A run's columns are split into parts, one for each warp of a group of rows. Columns that the first and the last of all
 * `parts` have less than others, at most `most`: those have the sinks and the open page, which take as long as several
 * pages. */
KVC_INLINE int kvc_ends_of(uint32_t columns, uint32_t parts, int most)
{
    int ends = 0;
    for (int n = 1; n <= KVC_MOST_ENDS; n++) /* one column is left; without a division, as it is done by each block */
        ends += n <= most && parts > 2 && columns >= parts + (uint32_t)n * (parts - 2);
    return ends;
}

/* What a block works on; b < 0: nothing. `line`: see kvc_call. Known once the row is: begin, end: its columns. share:
 * warps that share a group of rows. paged: kvc_row_paged. */
typedef struct kvc_place {
    int b, h, row0, begin, end, share, paged;
    uint32_t run, line;
} kvc_place;

/* blockIdx.x enumerates (sequence, KV head, run, block of rows), because y is limited to 65535. For sequences of
 * different lengths: item, head, run. */
KVC_DEVICE kvc_place kvc_place_of(const kvc_call *call)
{
    uint32_t heads = (uint32_t)call->a.store.heads, runs = (uint32_t)call->runs, x = (uint32_t)kvc_block_x();
    kvc_place at = {-1, 0, 0, 0, 0, 0, 0, 0, 0};
    if (call->lists.segments) {
        at.line = x / runs, at.run = x - at.line * runs;
        uint32_t item = at.line / heads;
        at.h = (int)(at.line - item * heads);
        if (item >= call->lists.counts[0]) return at;
        at.b = call->lists.attend[item].b, at.row0 = call->lists.attend[item].at * (int)call->rows;
        return at;
    }
    uint32_t across = (uint32_t)call->a.store.batch * heads * runs, block = call->blocks == 1 ? 0 : x / across;
    uint32_t bh = (x - block * across) / runs, b = bh / heads;
    at.run = x - block * across - bh * runs, at.line = bh * (uint32_t)call->blocks + block;
    at.b = (int)b, at.h = (int)(bh - b * heads), at.row0 = (int)block * (int)call->rows;
    return at;
}

/* a * b for a non-negative index. */
KVC_DEVICE int64_t kvc_times(int64_t a, int64_t b)
{
    uint32_t x = (uint32_t)b;
    return (int64_t)((uint64_t)(uint32_t)a * x + ((uint64_t)((uint32_t)((uint64_t)a >> 32) * x) << 32));
}

KVC_DEVICE const uint8_t *kvc_dense_row(const kvc_dense *x, int64_t b, int64_t h, int64_t t)
{
    return (const uint8_t *)x->data +
           (kvc_times(x->stride[0], b) + kvc_times(x->stride[1], h) + kvc_times(x->stride[2], t)) *
               (x->dtype == KVC_F32 ? 4 : 2);
}

#endif
