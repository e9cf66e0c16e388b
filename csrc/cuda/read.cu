/* read.cu - decodes stored tokens to dense K and V, placed at their slots. A half-warp decodes a token. */
#include "rows.cuh"
#include "wide.h"

#define THREADS 256

typedef struct kvc_read_call {
    kvc_store s;
    int64_t width;
    kvc_dense out[2]; /* V, K */
    uint32_t *flags;
} kvc_read_call;

/* Zeroes the output. x: sequence, head, 16 slots; y: V, K */
KVC_KERNEL(kvc_clear_kernel, kvc_read_call, THREADS, 2)
{
    const kvc_dense *x = &a.out[kvc_block_y()];
    int64_t each = (a.width + 15) / 16, bh = kvc_block_x() / each, b = bh / a.s.heads, h = bh % a.s.heads;
    int64_t t = kvc_block_x() % each * 16 + kvc_half();
    int64_t dim = kvc_block_y() ? a.s.key_dim : a.s.value_dim;
    uint8_t *row = (uint8_t *)(uintptr_t)kvc_dense_row(x, b, h, t < a.width ? t : 0);
    for (int64_t d = kvc_half_lane(); d < dim && t < a.width; d += 16) kvc_put_element(row, x->dtype, d, 0);
}

/* x: sequence, head, column; y: V, K */
KVC_KERNEL(kvc_read_kernel, kvc_read_call, THREADS, 2)
{
    const kvc_store *s = &a.s;
    const kvc_dense *x = &a.out[kvc_block_y()];
    int64_t bh = kvc_block_x() / s->columns, b = bh / s->heads, h = bh % s->heads, c = kvc_block_x() % s->columns;
    int64_t at = b * s->table_heads + (s->table_heads == 1 ? 0 : h);
    uint32_t *flags = kvc_thread() ? NULL : a.flags;
    int64_t first = kvc_column_first(c, s->sinks, s->page_size);
    int64_t n = kvc_min(kvc_column_size(c, s->sinks, s->page_size), kvc_row_stored(s, at, flags) - first);
    if (n <= 0) return;
    kvc_page page = kvc_page_of(s, kvc_entry_at(s, at, c), h, kvc_column_layout(c, s->sinks, s->page_size), flags);
    if (!page.data) return;
    kvc_side side = kvc_page_side(&page, (int)kvc_block_y(), s->key_dim, s->value_dim);
    for (int64_t t0 = 0; t0 < n; t0 += THREADS / 16) {
        int64_t t = t0 + kvc_half(), i = first + t;
        float row[KVC_PARTS];
        kvc_half_decode(&side, t < n ? t : 0, row);
        int64_t slot = t >= n ? -1 : s->slots ? s->slots[at * s->slot_capacity + i] : s->rows[2 * at + 1] + i;
        if (slot < 0 || slot >= a.width) continue;
        uint8_t *to = (uint8_t *)(uintptr_t)kvc_dense_row(x, b, h, slot);
        EACH_PART(k, 0, side.dim / 16) kvc_put_element(to, x->dtype, 16 * k + kvc_half_lane(), row[k]);
    }
}

extern "C" int kvc_cuda_read(const kvc_store *store, int64_t width, const kvc_dense *k, const kvc_dense *v,
                             const kvc_cuda *on)
{
    if (kvc_widest(store) > KVC_ROW_DIM) return kvc_read_wide(store, width, k, v, on);
    kvc_read_call call = {*store, width, {*v, *k}, on->flags};
    int64_t heads = store->batch * store->heads;
    if (kvc_store_aligned(store)) return KVC_CUDA_ALIGNMENT;
    int status = KVC_LAUNCH(kvc_clear_kernel, &call, (width + 15) / 16 * heads, 2, 1, THREADS, 0, on->stream);
    if (status) return status;
    return KVC_LAUNCH(kvc_read_kernel, &call, store->columns * heads, 2, 1, THREADS, 0, on->stream);
}
