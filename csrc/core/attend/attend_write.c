/* attend_write.c - the write phase of a call: writes own tokens to the pages that the table names, then seals full
 * pages.
 *
 * The unit of work is (page, head): a V word holds several tokens, so each page has a single writer. Own tokens are
 * checked for NaN and Inf one page at a time, right before they are written, so memory is read once and sequentially,
 * which hardware prefetchers handle better than the encoders' access pattern. A call may therefore fail after some
 * pages were written; they contain no tokens that were stored before. */
#include "base/alloc.h"
#include "attend.h"

#include <limits.h>
#include <stdatomic.h>
#include <string.h>

typedef struct writer {
    kvc_call *call;
    atomic_bool failed;  /* a worker could not allocate its workspace */
    atomic_llong bad[2]; /* index of the first (sequence, head, token) of k and v with NaN or Inf; LLONG_MAX if none */
} writer;

static const uint8_t *own_row(const kvc_dense *x, int64_t b, int64_t h, int64_t t)
{
    return (const uint8_t *)x->data +
           (b * x->stride[0] + h * x->stride[1] + t * x->stride[2]) * (x->dtype == KVC_F32 ? 4 : 2);
}

static int64_t own_token(const kvc_row *row, int64_t j) { return row->own_at ? row->own_at[j] : j; }

static const uint8_t *call_row(const kvc_row *row, const kvc_dense *x, int64_t b, int64_t h, int64_t j)
{
    return own_row(x, b, h, row->token + own_token(row, j));
}

/* First of own tokens [j0, j0 + n) with NaN or Inf; -1 if none. */
static int64_t find_bad(const kvc_dense *x, const kvc_row *row, int64_t b, int64_t h, int64_t dim, int64_t j0,
                        int64_t n)
{
    if (!row->own_at && x->stride[2] == dim && kvc_all_finite(call_row(row, x, b, h, j0), x->dtype, n * dim)) return -1;
    for (int64_t j = j0; j < j0 + n; j++)
        if (!kvc_all_finite(call_row(row, x, b, h, j), x->dtype, dim)) return own_token(row, j);
    return -1;
}

static void lower(atomic_llong *to, long long value)
{
    long long old = atomic_load(to);
    while (value < old && !atomic_compare_exchange_weak(to, &old, value)) {}
}

/* Own token j; zeros if it has to be checked and contains NaN or Inf. */
static const uint8_t *taken_row(const kvc_row *row, const kvc_dense *x, int64_t b, int64_t h, int64_t j, int64_t dim,
                                bool finite)
{
    static const float zeros[KVC_MAX_DIM];
    const uint8_t *at = call_row(row, x, b, h, j);
    return finite || kvc_all_finite(at, x->dtype, dim) ? at : (const uint8_t *)zeros;
}

/* Writes own tokens [j0, j0 + n) of one side to a page, from token t0 on: full quantized pages at once, others row by
 * row or as one strided run. */
static void write_side(const kvc_room *side, const kvc_dense *x, const kvc_row *row, int64_t b, int64_t h, int64_t j0,
                       int64_t t0, int64_t n, bool finite, float *scratch)
{
    if (!kvc_format_is_raw(side->format) && t0 == 0 && n == side->page_size) {
        const uint8_t *rows[KVC_MAX_PAGE];
        for (int64_t i = 0; i < n; i++) rows[i] = taken_row(row, x, b, h, j0 + i, side->dim, finite);
        kvc_encode_page(side, &(kvc_source){.row = rows, .dtype = x->dtype}, scratch);
    } else if (!row->own_at && finite) {
        kvc_store_rows(side, t0, n, call_row(row, x, b, h, j0), x->stride[2], x->dtype, scratch);
    } else {
        for (int64_t i = 0; i < n; i++)
            kvc_store_rows(side, t0 + i, 1, taken_row(row, x, b, h, j0 + i, side->dim, finite), 0, x->dtype, scratch);
    }
}

static const float *feedback_of(const kvc_call *call, int64_t h, int key)
{
    int64_t dim = key ? call->a->store.key_dim : call->a->store.value_dim;
    return call->feedback[key] ? call->feedback[key] + h * (dim + 1) * dim : NULL;
}

/* Finds the head whose table row contains `entry`. Seals are in table order, so the search starts at *at, where the
 * previous one ended. Columns beyond the last token were not copied and are not searched. */
static int64_t head_of(const kvc_attend_args *a, int64_t entry, int64_t *at)
{
    const kvc_store *s = &a->store;
    int64_t lines = s->batch * s->table_heads;
    for (int64_t k = 0; k < lines; k++) {
        const int64_t *row = s->table + *at * s->columns;
        int64_t used = kvc_min(kvc_columns_used(s, s->rows[2 * *at] + a->T), s->columns);
        for (int64_t c = 0; c < used; c++)
            if (row[c] == entry) return *at % s->table_heads;
        *at = (*at + 1) % lines;
    }
    return 0;
}

static void write_page(writer *w, const kvc_page *page, int64_t b, int64_t h, int64_t j0, int64_t t0, int64_t n,
                       float *scratch)
{
    const kvc_attend_args *a = w->call->a;
    const kvc_row *row = kvc_call_row(w->call, b, h);
    kvc_room sides[2] = {kvc_room_of(&a->store, page, 1), kvc_room_of(&a->store, page, 0)};
    for (int i = 0; i < 2; i++) {
        sides[i].stream = w->call->own_bytes >= KVC_STREAM;
        sides[i].feedback = feedback_of(w->call, h, i == 0);
        const kvc_dense *x = i ? &a->v : &a->k;
        int64_t bad = find_bad(x, row, b, h, sides[i].dim, j0, n);
        if (bad >= 0 && row->flag) __atomic_store_n(row->flag, 1, __ATOMIC_RELAXED);
        if (bad < 0 || row->flag)
            write_side(&sides[i], x, row, b, h, j0, t0, n, bad < 0, scratch);
        else
            lower(&w->bad[i], (b * a->store.heads + h) * a->T + bad);
    }
}

/* Floats of scratch per worker: a page of rows and the codec's workspace. */
static int64_t scratch_floats(const kvc_store *s)
{
    return kvc_page_scratch(kvc_max(s->key_dim, s->value_dim), KVC_MAX_PAGE);
}

static void seal_pages(int64_t begin, int64_t end, void *context)
{
    writer *w = context;
    const kvc_attend_args *a = w->call->a;
    const kvc_store *s = &a->store;
    float *scratch;
    if (kvc_scratch(scratch_floats(s), sizeof *scratch, &scratch) != KVC_OK) {
        atomic_store(&w->failed, true);
        return;
    }
    int64_t heads = s->table_heads == 1 ? s->heads : 1, at = 0; /* pages per entry */
    for (int64_t i = begin; i < end; i++) {
        const int64_t *pair = a->seals + 2 * (i / heads);
        kvc_page from = kvc_page_of(s, pair[0], i % heads, s->page_size);
        kvc_page to = kvc_page_of(s, pair[1], i % heads, s->page_size);
        kvc_side src[2] = {kvc_side_of(s, &from, 1), kvc_side_of(s, &from, 0)};
        kvc_room dst[2] = {kvc_room_of(s, &to, 1), kvc_room_of(s, &to, 0)};
        bool each = s->table_heads > 1 && (w->call->feedback[0] || w->call->feedback[1]);
        int64_t h = each ? head_of(a, pair[1], &at) : i % heads;
        for (int side = 0; side < 2; side++) {
            dst[side].feedback = feedback_of(w->call, h, side == 0);
            if (kvc_format_is_raw(dst[side].format))
                memcpy(dst[side].tiles, src[side].tiles,
                       (size_t)(s->page_size / KVC_TILE * kvc_tile_bytes(src[side].format, src[side].dim)));
            else
                kvc_encode_page(&dst[side], &(kvc_source){.raw = &src[side]}, scratch);
        }
    }
    kvc_scratch_free(scratch);
}

static void write_own(int64_t begin, int64_t end, void *context)
{
    writer *w = context;
    const kvc_call *call = w->call;
    const kvc_store *s = &call->a->store;
    float *scratch;
    if (kvc_scratch(scratch_floats(s), sizeof *scratch, &scratch) != KVC_OK) {
        atomic_store(&w->failed, true);
        return;
    }
    int64_t own_bytes = kvc_page_layout(call->own_raw, call->own_raw, s->key_dim, s->value_dim, s->page_size).bytes;
    int64_t b = 0;
    for (int64_t i = begin; i < end; i++) {
        KVC_SEEK(call, b, i, write_item);
        int64_t next = b + 1 < s->batch ? kvc_call_row(call, b + 1, 0)->write_item : call->write_items;
        int64_t at = i - kvc_call_row(call, b, 0)->write_item;
        int64_t columns = (next - kvc_call_row(call, b, 0)->write_item) / s->heads, h = at / columns, c = at % columns;
        const kvc_row *row = kvc_call_row(call, b, h);
        if (c < row->own_columns) { /* exact K and V for this call's own attention */
            kvc_page page = {call->own_pages + (row->own_page + h * row->own_columns + c) * own_bytes, call->own_raw,
                             call->own_raw, s->page_size};
            int64_t j = c * s->page_size, n = kvc_min(row->own - j, s->page_size);
            if (n > 0) write_page(w, &page, b, h, j, 0, n, scratch);
            continue;
        }
        /* Column of the table: c counts from the column of the first own token. */
        c += kvc_column(row->stored, s->sinks, s->page_size) - row->own_columns;
        int64_t first = kvc_column_first(c, s->sinks, s->page_size);
        int64_t from = kvc_max(first, row->stored);
        int64_t n = kvc_min(first + kvc_column_size(c, s->sinks, s->page_size), row->stored + row->own) - from;
        if (n <= 0) continue;
        kvc_page page = kvc_call_page_at(call, b, h, c);
        write_page(w, &page, b, h, from - row->stored, from - first, n, scratch);
    }
    kvc_scratch_free(scratch);
    atomic_thread_fence(memory_order_seq_cst); /* order non-temporal stores */
}

static kvc_status check_finite(writer *w)
{
    const kvc_attend_args *a = w->call->a;
    bool key = atomic_load(&w->bad[0]) < LLONG_MAX;
    long long at = atomic_load(&w->bad[!key]);
    long long b = at == LLONG_MAX ? 0 : at / a->T / a->store.heads;
    KVC_CHECK(
        at == LLONG_MAX, KVC_E_VALUE,
        "attend: %s: expected finite numbers, got NaN or Inf at sequence %lld, head %lld, token %lld; nothing was "
        "stored",
        key ? "k" : "v", w->call->segments ? (long long)w->call->segments[b].sequence : b, at / a->T % a->store.heads,
        at % a->T);
    return KVC_OK;
}

kvc_status kvc_call_write(kvc_call *call)
{
    const kvc_attend_args *a = call->a;
    const kvc_store *s = &a->store;
    writer w = {.call = call};
    atomic_init(&w.bad[0], LLONG_MAX);
    atomic_init(&w.bad[1], LLONG_MAX);
    if (a->T > 0) {
        kvc_run(&a->exec, call->write_items, call->own_bytes, write_own, &w);
        KVC_TRY(check_finite(&w));
    }
    int64_t pages = a->n_seals * (s->table_heads == 1 ? s->heads : 1);
    kvc_run(&a->exec, pages, pages * s->page_size * (s->key_dim + s->value_dim) * 4, seal_pages, &w);
    KVC_CHECK(!atomic_load(&w.failed), KVC_E_MEMORY, "out of memory: attend has no memory for its workspace");
    return KVC_OK;
}
