/* token.cu - the writing half of a call of one token a row, where such tokens fall on raw pages (KVC_OPEN_RAW): nearly every step
 * of decode. A block writes a side of a head's token. What the page is to be sealed as is the next launch's.
 *
 * Cost: two loads that wait for each other, of the row's length and of its page's entry, while the token is on its way. On an H200
 * kvc_write_kernel, whose code has all formats, took 11 us for as much, most of them to fetch its code. */
#include "encode.cuh"

#define KVC_TOKEN_THREADS 128

KVC_DEVICE uint32_t kvc_token_bits(const uint8_t *row, bool wide, int d)
{
    return wide ? ((const uint32_t *)row)[d] : ((const uint16_t *)row)[d];
}

KVC_DEVICE void kvc_put_token(uint8_t *tiles, int key, bool wide, int dim, int t, int d, uint32_t bits)
{
    uint8_t *to = tiles + (t / KVC_TILE * KVC_TILE * dim << (wide ? 2 : 1));
    to += kvc_cell_place(key, wide ? 32 : 16, dim, t % KVC_TILE, d);
    if (wide)
        *(uint32_t *)to = bits;
    else
        *(uint16_t *)to = (uint16_t)bits;
}

/* x: sequence, head. y: V, K. */
KVC_KERNEL(kvc_token_kernel, kvc_call, KVC_TOKEN_THREADS, 8)
{
    const kvc_store *s = &a.a.store;
    const bool wide = a.own_raw == KVC_RAW_F32;
    const uint32_t spoilt = wide ? 0x7f800000 : a.own_raw == KVC_RAW_F16 ? 0x7c00 : 0x7f80;
    int key = (int)kvc_block_y(), dim = (int)(key ? s->key_dim : s->value_dim), d = kvc_thread();
    uint32_t i = (uint32_t)kvc_block_x(), b = i / (uint32_t)s->heads, h = i - b * (uint32_t)s->heads;
    const uint8_t *row = key ? kvc_dense_row(&a.a.k, b, h, 0) : kvc_dense_row(&a.a.v, b, h, 0);
    uint32_t bits = d < dim ? kvc_token_bits(row, wide, d) : 0, *flags = d ? NULL : a.flags;
    if (a.done && i == 0 && key == 0) KVC_ONCE for (int n = d; n < a.lines; n += KVC_TOKEN_THREADS) a.done[n] = 0;

    int64_t at = b * s->table_heads + (s->table_heads == 1 ? 0 : h), stored = kvc_row_stored(s, at, flags);
    int64_t c = kvc_column_of(s, stored), first = kvc_column_first(c, s->sinks, s->page_size);
    int64_t entry = c < s->columns ? kvc_entry_at(s, at, c) : KVC_NONE, to = entry;
    bool fills = false;
    if (entry != KVC_NONE && c > 0 && stored + 1 == first + s->page_size) /* full then: as kvc_row_begin */
        KVC_ONCE for (int64_t n = 0; n < a.a.n_seals; n++)
        {
            if (a.a.seals[2 * n + 1] != entry || a.a.seals[2 * n] == KVC_NONE) continue;
            to = a.a.seals[2 * n];
            fills = true;
        }
    const int pair = a.own_raw << 8 | a.own_raw;
    uint8_t *page = NULL, *own = NULL;
    if (to >= 0 && (int)(to & 0xffff) == pair)
        page = kvc_open_side(&a, to, h, kvc_column_layout(c, s->sinks, s->page_size), key).tiles;
    else
        kvc_flag(flags, c >= s->columns ? KVC_FLAG_ROWS : to < 0 ? KVC_FLAG_ENTRY : KVC_FLAG_PAGE);
    if (a.own_columns && (fills || to < 0 || (int)(to & 0xffff) != pair)) { /* as kvc_row.own_in_pages */
        uint32_t k = kvc_raw_side_bytes(&a, 1, a.own_page), all = k + kvc_raw_side_bytes(&a, 0, a.own_page);
        own = a.own_pages + (int64_t)i * a.own_columns * all + (key ? 0 : k);
    }
    KVC_ONCE for (; d < dim; d += KVC_TOKEN_THREADS, bits = d < dim ? kvc_token_bits(row, wide, d) : 0)
    {
        if ((bits & spoilt) == spoilt) {
            bits &= wide ? 0x80000000 : 0x8000;
            kvc_flag(a.flags, KVC_FLAG_FINITE);
        }
        if (page) kvc_put_token(page, key, wide, dim, (int)(stored - first), d, bits);
        if (own) kvc_put_token(own, key, wide, dim, 0, d, bits);
    }
}

extern "C" int kvc_token_launch(const kvc_call *call, void *stream)
{
    int64_t lines = call->a.store.batch * call->a.store.heads;
    return KVC_LAUNCH(kvc_token_kernel, call, lines, 2, 1, KVC_TOKEN_THREADS, 0, stream);
}
