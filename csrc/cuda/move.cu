/* move.cu - the copying part of an eviction, like compact.c: first, pages with statistics over their tokens are
 * encoded, which writes to new pages only; then other tokens are copied as codes, in order within a line, because a
 * token may be moved to a place that was just vacated. */
#include "encode.cuh"
#include "wide.h"

#define THREADS 256

typedef struct kvc_move_call {
    kvc_store s;
    const kvc_move *moves;
    int64_t n, heads; /* heads: pages per entry */
    uint32_t *flags;
} kvc_move_call;

/* Whether a token of this side can be copied between the pages without re-encoding. */
KVC_DEVICE bool kvc_keeps_codes(int64_t from, int64_t to, int key)
{
    int f = key ? kvc_entry_key(from) : kvc_entry_value(from), g = key ? kvc_entry_key(to) : kvc_entry_value(to);
    return f == g && (!key || kvc_format_traits(f).keys == KVC_KEYS_TOKEN);
}

/* Both sides of a move; false (and a flag) if it is a move that the CPU would reject. */
KVC_DEVICE bool kvc_move_sides(const kvc_move_call *call, const kvc_move *m, int64_t h, int key, kvc_side *from,
                               kvc_side *to)
{
    const kvc_store *s = &call->s;
    bool fits = m->layout == s->page_size || m->layout == kvc_sink_tokens(s->sinks);
    fits = fits && m->layout > 0 && m->from_token >= -1 && m->from_token < m->layout;
    fits = fits && (m->from_token < 0 || (m->to_token >= 0 && m->to_token < m->layout));
    bool same = (m->from & 0xffff) == (m->to & 0xffff);
    if (fits && !same) {
        int f = key ? kvc_entry_key(m->to) : kvc_entry_value(m->to);
        fits = m->from_token >= 0 && (kvc_keeps_codes(m->from, m->to, key) || !kvc_format_is_raw(f));
    }
    kvc_page a = {NULL, 0, 0, 0}, b = a;
    if (fits) {
        a = kvc_page_of(s, m->from, h, m->layout, NULL);
        b = kvc_page_of(s, m->to, h, m->layout, NULL);
    }
    fits = a.data && b.data;
    if (!fits || (m->from_token < 0 && !kvc_apart(s, m->from, m->to, m->layout))) {
        kvc_flag(call->flags, KVC_FLAG_ENTRY);
        return false;
    }
    *from = kvc_page_side(&a, key, s->key_dim, s->value_dim);
    *to = kvc_page_side(&b, key, s->key_dim, s->value_dim);
    return true;
}

/* x: move and head (the block of the first move of a run to one page encodes it); y: V, K. */
KVC_KERNEL(kvc_anew_kernel, kvc_move_call, KVC_WRITE_THREADS, 2)
{
    kvc_encode_room *room = (kvc_encode_room *)kvc_shared;
    int64_t begin = kvc_block_x() / a.heads, h = kvc_block_x() % a.heads, end = begin + 1;
    int key = (int)kvc_block_y();
    const kvc_move *m = &a.moves[begin];
    kvc_side from, to;
    if (m->from_token < 0 || kvc_keeps_codes(m->from, m->to, key)) return;
    if (begin && m[-1].to == m->to && m[-1].line == m->line && m[-1].from_token >= 0) return;
    while (end < a.n && a.moves[end].to == m->to && a.moves[end].line == m->line && a.moves[end].from_token >= 0) end++;
    for (int64_t i = begin; i < end; i++)
        if (a.moves[i].layout != m->layout || !kvc_move_sides(&a, &a.moves[i], h, key, &from, &to)) return;
    for (int64_t t = kvc_thread(); t < to.tokens; t += kvc_threads()) room->map[t] = 0xffff;
    kvc_barrier();
    if (kvc_thread() == 0) {
        for (int64_t i = begin; i < end; i++) room->map[a.moves[i].to_token] = (uint16_t)(i - begin);
        /* places without a token are filled with copies of the others */
        for (int64_t t = 0, next = 0; t < to.tokens; t++)
            if (room->map[t] == 0xffff) room->map[t] = (uint16_t)(next++ % (end - begin));
    }
    kvc_barrier();
    kvc_source tokens = {NULL, NULL, 0, h, 0, NULL, &a.s, m, room->map, key, 0, a.flags};
    kvc_encode_page(&to, &tokens, room);
}

KVC_DEVICE void kvc_copy_token(const kvc_side *from, int t, const kvc_side *to, int t2)
{
    kvc_traits f = kvc_format_traits(from->format);
    /* V of 3 bits: the high bits follow the low ones, like further dims of 2-bit codes */
    int dim = (int)(f.bits == 3 ? from->dim * 3 / 2 : from->dim), bits = f.bits == 3 ? 2 : f.bits,
        size = (int)kvc_meta_size(f), planes = (int)kvc_meta_planes(f, from->dim);
    const uint8_t *tile = from->tiles + t / KVC_TILE * kvc_tile_bytes(from->format, from->dim);
    uint8_t *out = to->tiles + t2 / KVC_TILE * kvc_tile_bytes(to->format, to->dim);
    int period = from->key ? dim * bits / 8 : 2 * bits; /* below 8 bits: bytes of a row (K), tokens of a plane (V) */
    for (int i = kvc_thread(); i < (bits < 8 && from->key ? period : dim); i += kvc_threads()) {
        int in = t % KVC_TILE, at = t2 % KVC_TILE;
        if (bits >= 8) {
            uint32_t cell = kvc_cell(from->key, bits, dim, tile, in, i);
            uint8_t *to_cell = out + kvc_cell_place(from->key, bits, dim, at, i);
            if (bits == 32)
                *(uint32_t *)to_cell = cell;
            else if (bits == 16)
                *(uint16_t *)to_cell = (uint16_t)cell;
            else
                *to_cell = (uint8_t)cell;
        } else if (from->key) { /* the byte holds dims of this token only */
            int place = 4 * (i / 4 * KVC_TILE) + (i & 3);
            out[place + 4 * at] = tile[place + 4 * in];
        } else { /* other tokens in the byte are unchanged */
            uint32_t code = kvc_cell(0, bits, dim, tile, in, i), shift = (uint32_t)(at / period * bits);
            uint8_t *byte = out + 4 * (at % period / 4 * dim + i) + (at & 3);
            *byte = (uint8_t)((*byte & ~(((1u << bits) - 1) << shift)) | code << shift);
        }
    }
    for (int p = kvc_thread(); p < planes; p += kvc_threads())
        for (int i = 0; i < size; i++)
            to->meta[size * (p * to->tokens + t2) + i] = from->meta[size * (p * from->tokens + t) + i];
}

/* x: move and head (the block of the first move of a line processes the whole line); y: V, K. */
KVC_KERNEL(kvc_move_kernel, kvc_move_call, THREADS, 2)
{
    int64_t begin = kvc_block_x() / a.heads, h = kvc_block_x() % a.heads;
    int key = (int)kvc_block_y();
    if (begin && a.moves[begin - 1].line == a.moves[begin].line) return;
    for (int64_t i = begin; i < a.n && a.moves[i].line == a.moves[begin].line; i++) {
        const kvc_move *m = &a.moves[i];
        kvc_side from, to;
        if (m->from_token >= 0 && !kvc_keeps_codes(m->from, m->to, key)) continue;
        if (!kvc_move_sides(&a, m, h, key, &from, &to)) continue;
        if (m->from_token >= 0) {
            kvc_copy_token(&from, (int)m->from_token, &to, (int)m->to_token);
        } else { /* this side of a page */
            int64_t tiles = m->layout / KVC_TILE * kvc_tile_bytes(from.format, from.dim);
            int64_t meta = kvc_meta_bytes(from.format, key, from.dim, m->layout);
            for (int64_t at = 16 * kvc_thread(); at < tiles; at += 16 * kvc_threads())
                kvc_store_quad(to.tiles + at, kvc_load_quad(from.tiles + at));
            for (int64_t at = kvc_thread(); at < meta; at += kvc_threads()) to.meta[at] = from.meta[at];
        }
        kvc_barrier();
    }
}

extern "C" int kvc_cuda_compact(const kvc_store *store, const kvc_move *moves, int64_t n, const kvc_cuda *on)
{
    if (kvc_widest(store) > KVC_ROW_DIM) return kvc_compact_wide(store, moves, n, on);
    kvc_move_call call = {*store, moves, n, store->table_heads == 1 ? store->heads : 1, on->flags};
    if (kvc_store_aligned(store)) return KVC_CUDA_ALIGNMENT;
    int status = KVC_LAUNCH(kvc_anew_kernel, &call, n * call.heads, 2, 1, KVC_WRITE_THREADS, sizeof(kvc_encode_room),
                            on->stream);
    if (status) return status;
    return KVC_LAUNCH(kvc_move_kernel, &call, n * call.heads, 2, 1, THREADS, 0, on->stream);
}
