/* pipeline.cuh - full pages of 8 and 16 bits that all rows see, which is nearly all of a long row. Words are copied
 * asynchronously (cp.async) to shared memory, one block of 32 tokens ahead: while K of a block is processed, its V is
 * in flight; while V is processed, K of the next block is. Pages are not prefetched to L2, which cannot hold one for
 * every warp: with prefetching, raw pages took 1.46 times as long on an H200.
 *
 * A warp copies 512 adjacent bytes at a time. Pairs of 16-byte words are swizzled within 128 bytes, by the lane t that
 * reads them, so that the eight lanes that read at once access all banks.
 *
 * Cost for 32 tokens in addition to keys.cuh and values.cuh: a copy for each load, and 512 bytes of shared memory per
 * warp for each. */
#ifndef KVC_PIPELINE_CUH
#define KVC_PIPELINE_CUH

#include "finish.cuh"

/* Pairs of kinds that use this path, in kernels that have both. Raw pages only in kernels without other kinds, to keep
 * the code short. */
#define KVC_PIPED(PAIR)                                                                                                \
    PAIR(KVC_KIND_BF16, KVC_KIND_BF16)                                                                                 \
    PAIR(KVC_KIND_F16, KVC_KIND_F16)                                                                                   \
    PAIR(KVC_KIND_E4M3, KVC_KIND_E4M3)                                                                                 \
    PAIR(KVC_KIND_E5M2, KVC_KIND_E5M2)                                                                                 \
    PAIR(KVC_KIND_INT8, KVC_KIND_INT8)                                                                                 \
    PAIR(KVC_KIND_INT8, KVC_KIND_INT4)
KVC_INLINE bool kvc_pipes(uint32_t kinds, int key, int value)
{
    if (kinds >> KVC_KIND_STAGED & 1 || !(kinds >> key & kinds >> value & 1)) return false;
    return key > KVC_KIND_F16 || !(kinds & ~KVC_RAW_KINDS);
}

/* Number of 16-byte copies per lane for a side of a block. */
KVC_INLINE int kvc_piped_quads(int bits, int dims) { return dims * bits / 128; }
/* Shared memory of a warp: K, V, scales of both. */
#define KVC_PIPED_SCALES (2 * KVC_BLOCK)
KVC_INLINE int64_t kvc_pipe_bytes(uint32_t kinds, int dims)
{
    int most = 0;
#define PAIR(K, V)                                                                                                     \
    if (kvc_pipes(kinds, K, V) && most < kvc_kind_bits(K) + kvc_kind_bits(V))                                          \
        most = kvc_kind_bits(K) + kvc_kind_bits(V);
    KVC_PIPED(PAIR)
#undef PAIR
    return most ? 512 * kvc_piped_quads(most, dims) + 2 * KVC_PIPED_SCALES : 0;
}

/* Copies a block's words and scales from `at` and `meta`: 16-byte word i goes to i ^ 2 * kvc_piped_turn(.., i). */
KVC_DEVICE void kvc_pipe_block(const int kind, const int dims, const bool key, const uint8_t *at, const uint8_t *meta,
                               uint8_t *words, uint8_t *scales)
{
    const int bits = kvc_kind_bits(kind);
    int lane = kvc_lane();
    KVC_UNROLL for (int x = 0; x < kvc_piped_quads(bits, dims); x++)
    {
        int i = 32 * x + lane;
        kvc_copy_quad(words + 16 * (i ^ 2 * kvc_piped_turn(kind, dims, key, i)), at + 16 * i);
    }
    if (bits < 16 && lane < KVC_PIPED_SCALES / 16) kvc_copy_quad(scales + 16 * lane, meta + 16 * lane);
}
KVC_DEVICE void kvc_pipe_keys(const int K, const int dims, const kvc_page_room *of, const uint8_t *page, int block,
                              uint8_t *room)
{
    kvc_pipe_block(K, dims, true, page + block * (4 * dims * kvc_kind_bits(K)),
                   page + of->k_meta + block * KVC_PIPED_SCALES, room + 2 * KVC_PIPED_SCALES, room);
    kvc_copies_end();
}
KVC_DEVICE void kvc_pipe_values(const int K, const int V, const int dims, const kvc_page_room *of, const uint8_t *page,
                                int block, uint8_t *room)
{
    kvc_pipe_block(V, dims, false, page + of->v + block * (4 * dims * kvc_kind_bits(V)),
                   page + of->v_meta + block * KVC_PIPED_SCALES,
                   room + 2 * KVC_PIPED_SCALES + 512 * kvc_piped_quads(kvc_kind_bits(K), dims),
                   room + KVC_PIPED_SCALES);
    kvc_copies_end();
}

/* Whether the warp's pair of formats uses this path, for a page that is completely stored. */
KVC_DEVICE bool kvc_takes_piped(const kvc_call *call, const uint32_t kinds, int dims, const kvc_page_room *page,
                                const kvc_page_at *at, const kvc_seen_by *seen)
{
    if (!call->pipe || page->pair < 0 || page->key.dim != dims || page->value.dim != dims || page->key.tokens % 32 ||
        call->weights || call->a.softcap > 0 || at->n != (int)page->key.tokens || !kvc_sees_page(seen, at))
        return false;
#define PAIR(K, V)                                                                                                     \
    if (kvc_pipes(kinds, K, V) && page->key_kind == K && page->value_kind == V) return true;
    KVC_PIPED(PAIR)
#undef PAIR
    return false;
}

/* Processes pages from column c on; its page is at `data`, `entry` is that of the next column. Returns the column after
 * the last page taken. */
KVC_DEVICE int kvc_piped_pages(const int K, const int V, const uint32_t kinds, const kvc_call *call, const kvc_row *row,
                               const kvc_page_room *page, const kvc_seen_by *seen, int paged, const int dims, int c,
                               int end, const uint8_t *data, int64_t entry, const kvc_query *q, uint8_t *room,
                               kvc_softmax *state, float *o)
{
    const int sums = kvc_sums_of(kinds, dims);
    const uint8_t *keys = room + 2 * KVC_PIPED_SCALES, *values = keys + 512 * kvc_piped_quads(kvc_kind_bits(K), dims);
    int size = (int)call->a.store.page_size, blocks = size / KVC_BLOCK, owed = 0;
    int last = seen->end < paged ? seen->end : paged; /* all rows see the tokens before this one */
    float by[2];
    kvc_row_steps(q, kvc_form_of(K), by);
    kvc_pipe_keys(K, dims, page, data, 0, room);
    kvc_pipe_values(K, V, dims, page, data, 0, room);
    KVC_ONCE for (bool more = true; more; c++)
    {
        int first = (int)call->a.store.sinks + c * size;
        const uint8_t *behind = kvc_page_known(page, entry);
        if (first < seen->begin || first + size > last) behind = NULL;
        entry = kvc_entry_ahead(row, c + 2, end);
        KVC_ONCE for (int block = 0; block < blocks; block++)
        {
            const uint8_t *next = block + 1 < blocks ? data : behind; /* the page of the next block */
            int of_next = block + 1 < blocks ? block + 1 : 0;
            kvc_scores scores = {{0, 0, 0, 0, 0, 0, 0, 0}, {by[0], by[1]}, {0, 0}};
            kvc_copies_wait();
            kvc_warp_barrier();
            kvc_piped_scores(K, dims, keys, room, q, scores.s);
            kvc_warp_barrier();
            if (next)
                kvc_pipe_keys(K, dims, page, next, of_next, room);
            else
                kvc_copies_end();
            kvc_soften(state, &scores, sums, o);
            kvc_copies_wait();
            kvc_warp_barrier();
            kvc_piped_sums(V, dims, sums, values, room + KVC_PIPED_SCALES, scores.s, state, o);
            kvc_warp_barrier();
            if (next)
                kvc_pipe_values(K, V, dims, page, next, of_next, room);
            else
                kvc_copies_end();
        }
        if (kvc_kind_bits(V) < 8 && ++owed == KVC_SETTLE) kvc_settle(dims, o), owed = 0;
        data = behind, more = behind != NULL;
    }
    if (owed) kvc_settle(dims, o);
    return c;
}

/* The same for any pair of formats. */
KVC_DEVICE int kvc_any_piped(const uint32_t kinds, const kvc_call *call, const kvc_row *row, const kvc_page_room *page,
                             const kvc_seen_by *seen, int paged, const int dims, int c, int end, const uint8_t *data,
                             int64_t entry, const kvc_query *q, uint8_t *room, kvc_softmax *state, float *o)
{
#define PAIR(K, V)                                                                                                     \
    if (kvc_pipes(kinds, K, V) && page->key_kind == K && page->value_kind == V)                                        \
        return kvc_piped_pages(K, V, kinds, call, row, page, seen, paged, dims, c, end, data, entry, q, room, state, o);
    KVC_PIPED(PAIR)
#undef PAIR
    return c;
}

#endif
