/* token.cu - the write phase of a call with one token per row on raw pages (KVC_OPEN_RAW), if the attention kernel does
 * not write the token itself: there are no persistent counters (kvc_cuda.done), or the call seals pages. A block writes
 * one side of a head's token. Pages are sealed by the next launch.
 *
 * Cost: two dependent loads (the row's length, its page's entry), while the token is loaded. kvc_write_kernel, with
 * code for all formats, took 11 us for this on an H200, most of it instruction fetch. */
#include "token.cuh"

#define KVC_TOKEN_THREADS 128

/* x: sequence, head. y: V, K. */
KVC_KERNEL(kvc_token_kernel, kvc_call, KVC_TOKEN_THREADS, 8)
{
    const kvc_store *s = &a.a.store;
    int key = (int)kvc_block_y(), d = kvc_thread();
    uint32_t i = (uint32_t)kvc_block_x(), b = i / (uint32_t)s->heads, h = i - b * (uint32_t)s->heads;
    const uint8_t *row = kvc_token_row(&a, b, h, key);
    uint32_t bits = kvc_token_bits(&a, row, key, d), *flags = d ? NULL : a.flags;
    if (a.done && i == 0 && key == 0) KVC_ONCE for (int n = d; n < a.lines; n += KVC_TOKEN_THREADS) a.done[n] = 0;

    int64_t at = b * s->table_heads + (s->table_heads == 1 ? 0 : h), stored = kvc_row_stored(s, at, flags);
    int64_t c = kvc_column_of(s, stored), first = kvc_column_first(c, s->sinks, s->page_size);
    int64_t entry = c < s->columns ? kvc_entry_at(s, at, c) : KVC_NONE, to = entry;
    bool fills = false;
    /* the page is then full: as in kvc_row_begin */
    if (entry != KVC_NONE && c > 0 && stored + 1 == first + s->page_size)
        KVC_ONCE for (int64_t n = 0; n < a.a.n_seals; n++)
        {
            if (a.a.seals[2 * n + 1] != entry || a.a.seals[2 * n] == KVC_NONE) continue;
            to = a.a.seals[2 * n];
            fills = true;
        }
    kvc_token_to place = kvc_token_place(&a, i, h, key, c, to, stored, fills, flags);
    int dim = (int)(key ? s->key_dim : s->value_dim);
    KVC_ONCE for (; d < dim; d += KVC_TOKEN_THREADS, bits = kvc_token_bits(&a, row, key, d))
        kvc_put_number(&a, key, d, bits, place);
}

extern "C" int kvc_token_launch(const kvc_call *call, void *stream)
{
    int64_t lines = call->a.store.batch * call->a.store.heads;
    return KVC_LAUNCH(kvc_token_kernel, call, lines, 2, 1, KVC_TOKEN_THREADS, 0, stream);
}
