/* token.cuh - writes a row's one token to its open page, which is raw in the dtype of the call's tokens, and to its
 * page of own tokens. Used by a separate launch (token.cu), or by the attention kernel (attend.cuh), in the block that
 * has the token's column. */
#ifndef KVC_TOKEN_CUH
#define KVC_TOKEN_CUH

#include "encode.cuh"

/* Destinations of a side of the token; NULL: none. */
typedef struct kvc_token_to {
    uint8_t *page, *own; /* tiles */
    int t;               /* index in the page */
} kvc_token_to;

/* `i`: index of (sequence, head). `c`, `entry`: its column and the page there, which starts at token `first` of
 * `stored`. `fills`: the page is sealed in this call. */
KVC_DEVICE kvc_token_to kvc_token_place(const kvc_call *call, uint32_t i, uint32_t h, int key, int64_t c, int64_t entry,
                                        int64_t stored, bool fills, uint32_t *flags)
{
    const kvc_store *s = &call->a.store;
    const int pair = call->own_raw << 8 | call->own_raw;
    bool raw = entry >= 0 && (int)(entry & 0xffff) == pair;
    kvc_token_to to = {NULL, NULL, (int)(stored - kvc_column_first(c, s->sinks, s->page_size))};
    if (raw)
        to.page = kvc_open_side(call, entry, h, kvc_column_layout(c, s->sinks, s->page_size), key).tiles;
    else
        kvc_flag(flags, c >= s->columns ? KVC_FLAG_ROWS : entry < 0 ? KVC_FLAG_ENTRY : KVC_FLAG_PAGE);
    if (call->own_columns && (fills || !raw)) { /* as kvc_row.own_in_pages */
        uint32_t k = kvc_raw_side_bytes(call, 1, call->own_page), all = k + kvc_raw_side_bytes(call, 0, call->own_page);
        to.own = call->own_pages + (int64_t)i * call->own_columns * all + (key ? 0 : k);
    }
    return to;
}

KVC_DEVICE const uint8_t *kvc_token_row(const kvc_call *call, uint32_t b, uint32_t h, int key)
{
    return key ? kvc_dense_row(&call->a.k, b, h, 0) : kvc_dense_row(&call->a.v, b, h, 0);
}

/* Dim d of the token; 0 past the end. */
KVC_DEVICE uint32_t kvc_token_bits(const kvc_call *call, const uint8_t *row, int key, int d)
{
    if (d >= (int)(key ? call->a.store.key_dim : call->a.store.value_dim)) return 0;
    return call->own_raw == KVC_RAW_F32 ? ((const uint32_t *)row)[d] : ((const uint16_t *)row)[d];
}

KVC_DEVICE void kvc_put_cell(uint8_t *tiles, int key, bool wide, int dim, int t, int d, uint32_t bits)
{
    uint8_t *to = tiles + (t / KVC_TILE * KVC_TILE * dim << (wide ? 2 : 1));
    to += kvc_cell_place(key, wide ? 32 : 16, dim, t % KVC_TILE, d);
    if (wide)
        *(uint32_t *)to = bits;
    else
        *(uint16_t *)to = (uint16_t)bits;
}

/* Stores dim d, unless it is past the end. */
KVC_DEVICE void kvc_put_number(const kvc_call *call, int key, int d, uint32_t bits, kvc_token_to to)
{
    const bool wide = call->own_raw == KVC_RAW_F32;
    const uint32_t exponent = wide ? 0x7f800000 : call->own_raw == KVC_RAW_F16 ? 0x7c00 : 0x7f80;
    int dim = (int)(key ? call->a.store.key_dim : call->a.store.value_dim);
    if (d >= dim) return;
    if ((bits & exponent) == exponent) {
        bits &= wide ? 0x80000000 : 0x8000;
        kvc_flag(call->flags, KVC_FLAG_FINITE);
    }
    if (to.page) kvc_put_cell(to.page, key, wide, dim, to.t, d, bits);
    if (to.own) kvc_put_cell(to.own, key, wide, dim, 0, d, bits);
}

#endif
