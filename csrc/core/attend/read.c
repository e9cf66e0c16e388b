/* read.c - decodes stored tokens to dense K and V, placed at their slots. */
#include "base/alloc.h"
#include "base/dtype.h"
#include "attend.h"

#include <stdatomic.h>
#include <string.h>

typedef struct reader {
    const kvc_store *s;
    int64_t width;
    const kvc_dense *k, *v;
    bool stream; /* use non-temporal stores */
    atomic_bool failed;
} reader;

static uint8_t *dense_row(const kvc_dense *x, int64_t b, int64_t h, int64_t t)
{
    return (uint8_t *)x->data +
           (b * x->stride[0] + h * x->stride[1] + t * x->stride[2]) * (x->dtype == KVC_F32 ? 4 : 2);
}

static void read_side(const reader *r, const kvc_side *side, const kvc_dense *x, int64_t b, int64_t h, int64_t first,
                      int64_t n, float *scratch)
{
    const kvc_store *s = r->s;
    int64_t row = b * s->table_heads + (s->table_heads == 1 ? 0 : h);
    uint8_t *to[KVC_MAX_PAGE];
    for (int64_t i = 0; i < n; i++) {
        int64_t slot = s->slots ? s->slots[row * s->slot_capacity + first + i] : s->rows[2 * row + 1] + first + i;
        to[i] = slot >= 0 && slot < r->width ? dense_row(x, b, h, slot) : NULL;
    }
    kvc_decode_page(side, n, x->dtype, to, r->stream, scratch);
}

static void clear_rows(const reader *r, int64_t b, int64_t h, int64_t from, int64_t to)
{
    for (int64_t t = from; t < to; t++) {
        memset(dense_row(r->k, b, h, t), 0, (size_t)(r->s->key_dim * (r->k->dtype == KVC_F32 ? 4 : 2)));
        memset(dense_row(r->v, b, h, t), 0, (size_t)(r->s->value_dim * (r->v->dtype == KVC_F32 ? 4 : 2)));
    }
}

/* Zeroes slots that no token is written to; all slots if the row lists its slots. */
static void clear_heads(int64_t begin, int64_t end, void *context)
{
    reader *r = context;
    const kvc_store *s = r->s;
    for (int64_t i = begin; i < end; i++) {
        int64_t b = i / s->heads, h = i % s->heads;
        const int64_t *row = s->rows + 2 * (b * s->table_heads + (s->table_heads == 1 ? 0 : h));
        int64_t first = s->slots ? r->width : kvc_min(row[1], r->width);
        clear_rows(r, b, h, 0, first);
        clear_rows(r, b, h, kvc_min(first + row[0], r->width), r->width);
    }
}

static void read_pages(int64_t begin, int64_t end, void *context)
{
    reader *r = context;
    const kvc_store *s = r->s;
    float *rows;
    if (kvc_scratch(KVC_TILE * kvc_max(s->key_dim, s->value_dim), sizeof *rows, &rows) != KVC_OK) {
        atomic_store(&r->failed, true);
        return;
    }
    for (int64_t i = begin; i < end; i++) {
        /* The pages of an entry are adjacent: read them in order. */
        int64_t h = i % s->heads, c = i / s->heads % s->columns, b = i / s->heads / s->columns;
        int64_t n = s->rows[2 * (b * s->table_heads + (s->table_heads == 1 ? 0 : h))];
        int64_t first = kvc_column_first(c, s->sinks, s->page_size);
        int64_t count = kvc_min(kvc_column_size(c, s->sinks, s->page_size), n - first);
        if (count <= 0) continue;
        kvc_page page = kvc_page_at(s, b, h, c);
        kvc_side key = kvc_side_of(s, &page, 1), value = kvc_side_of(s, &page, 0);
        read_side(r, &key, r->k, b, h, first, count, rows);
        read_side(r, &value, r->v, b, h, first, count, rows);
    }
    kvc_scratch_free(rows);
    atomic_thread_fence(memory_order_seq_cst); /* order non-temporal stores */
}

kvc_status kvc_read(const kvc_store *store, int64_t width, const kvc_dense *k, const kvc_dense *v, const kvc_exec *exec)
{
    kvc_store s = *store;
    reader r = {.s = &s, .width = width, .k = k, .v = v};
    int64_t *indices;
    const char *isa;
    KVC_TRY(kvc_isa(&isa)); /* decoding needs a kernel level */
    KVC_CHECK(width >= 0, KVC_E_VALUE, "read: expected a width of at least 0, got %lld", (long long)width);
    KVC_TRY(kvc_dtype_check(k->dtype, "read: k"));
    KVC_TRY(kvc_dtype_check(v->dtype, "read: v"));
    KVC_TRY(kvc_store_take(&s, 0, "read", &indices));
    int64_t heads = store->batch * store->heads, bytes = heads * width * (store->key_dim + store->value_dim) * 4;
    r.stream = bytes >= KVC_STREAM;
    kvc_run(exec, heads, bytes, clear_heads, &r);
    kvc_run(exec, heads * store->columns, bytes, read_pages, &r);
    kvc_scratch_free(indices);
    return atomic_load(&r.failed) ? kvc_no_workspace("read") : KVC_OK;
}
