/* move.cu - the copying part of an eviction, like compact.c: first, pages with statistics over their tokens are
 * encoded, which writes to new pages only; then other tokens are copied as codes, in order within a line (but for the
 * eight of a block's warps), because a token may be moved to a place that was just vacated. A token is moved once. */
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
    int begin = (int)kvc_block_x() / (int)a.heads, h = (int)kvc_block_x() % (int)a.heads, end = begin + 1;
    int key = (int)kvc_block_y();
    const kvc_move *m = &a.moves[begin];
    kvc_side from, to;
    if (m->from_token < 0 || kvc_keeps_codes(m->from, m->to, key)) return;
    if (begin && m[-1].to == m->to && m[-1].line == m->line && m[-1].from_token >= 0) return;
    while (end < a.n && a.moves[end].to == m->to && a.moves[end].line == m->line && a.moves[end].from_token >= 0) end++;
    for (int i = begin; i < end; i++)
        if (a.moves[i].layout != m->layout || !kvc_move_sides(&a, &a.moves[i], h, key, &from, &to)) return;
    for (int t = kvc_thread(); t < to.tokens; t += kvc_threads()) room->map[t] = 0xffff;
    kvc_barrier();
    if (kvc_thread() == 0) {
        room->side = to;
        for (int i = begin; i < end; i++) room->map[a.moves[i].to_token] = (uint16_t)(i - begin);
        /* places without a token are filled with copies of the others */
        for (int t = 0, next = 0; t < to.tokens; t++)
            if (room->map[t] == 0xffff) room->map[t] = (uint16_t)(next++ % (end - begin));
    }
    kvc_barrier();
    kvc_source tokens = {NULL, NULL, 0, h, 0, NULL, &a.s, m, room->map, key, 0, a.flags};
    kvc_encode_page(&room->side, &tokens, room);
}

/* One side of a token: a lane's cells and metadata. */
#define KVC_MOVED (KVC_PARTS * 3 / 4) /* of 3 bits: half more */
#define KVC_MOVED_PLANES 2
typedef struct kvc_moved {
    uint32_t cell[KVC_MOVED], meta[KVC_MOVED_PLANES];
} kvc_moved;

/* How a side's cells are stored. V of 3 bits: the high bits follow the low ones, like further dims of 2-bit codes. */
typedef struct kvc_cells {
    int dim, bits, period, many, size, planes; /* period below 8 bits: bytes of a row (K), tokens of a plane (V) */
} kvc_cells;
KVC_DEVICE kvc_cells kvc_cells_of(const kvc_side *side)
{
    kvc_traits f = kvc_format_traits(side->format);
    kvc_cells of = {(int)(f.bits == 3 ? side->dim * 3 / 2 : side->dim),
                    f.bits == 3 ? 2 : f.bits,
                    0,
                    0,
                    (int)kvc_meta_size(f),
                    (int)kvc_meta_planes(f, side->dim)};
    of.period = side->key ? of.dim * of.bits / 8 : 2 * of.bits;
    of.many = of.bits < 8 && side->key ? of.period : of.dim;
    return of;
}
#define EACH_CELL(k, i, many) KVC_UNROLL for (int k = 0, i = kvc_lane(); k < KVC_MOVED; k++, i += 32) if (i < many)
#define EACH_META(k, p, planes)                                                                                        \
    KVC_UNROLL for (int k = 0, p = kvc_lane(); k < KVC_MOVED_PLANES; k++, p += 32) if (p < planes)

KVC_DEVICE void kvc_take_token(const kvc_side *side, int t, kvc_moved *x)
{
    kvc_cells of = kvc_cells_of(side);
    const uint8_t *tile = side->tiles + t / KVC_TILE * kvc_tile_bytes(side->format, side->dim);
    const bool bytes = of.bits < 8 && side->key; /* a byte holds dims of this token only */
    EACH_CELL(k, i, of.many)
    x->cell[k] = bytes ? tile[4 * (i / 4 * KVC_TILE + t % KVC_TILE) + (i & 3)]
                       : kvc_cell(side->key, of.bits, of.dim, tile, t % KVC_TILE, i);
    EACH_META(k, p, of.planes)
    {
        const uint8_t *meta = side->meta + of.size * (p * side->tokens + t);
        x->meta[k] = of.size == 2 ? *(const uint16_t *)meta : *meta;
    }
}

KVC_DEVICE void kvc_put_token(const kvc_side *side, int t, const kvc_moved *x)
{
    kvc_cells of = kvc_cells_of(side);
    uint8_t *tile = side->tiles + t / KVC_TILE * kvc_tile_bytes(side->format, side->dim);
    int in = t % KVC_TILE;
    EACH_CELL(k, i, of.many)
    {
        if (of.bits >= 8) {
            uint8_t *to = tile + kvc_cell_place(side->key, of.bits, of.dim, in, i);
            if (of.bits == 32)
                *(uint32_t *)to = x->cell[k];
            else if (of.bits == 16)
                *(uint16_t *)to = (uint16_t)x->cell[k];
            else
                *to = (uint8_t)x->cell[k];
        } else if (side->key) {
            tile[4 * (i / 4 * KVC_TILE + in) + (i & 3)] = (uint8_t)x->cell[k];
        } else { /* other warps may change other tokens of the word at the same time */
            uint32_t *word = (uint32_t *)(tile + 4 * (in % of.period / 4 * of.dim + i));
            uint32_t before = kvc_cell(0, of.bits, of.dim, tile, in, i);
            kvc_atomic_add(word, (x->cell[k] - before) << (8 * (in & 3) + in / of.period * of.bits));
        }
    }
    EACH_META(k, p, of.planes)
    {
        uint8_t *meta = side->meta + of.size * (p * side->tokens + t);
        if (of.size == 2)
            *(uint16_t *)meta = (uint16_t)x->meta[k];
        else
            *meta = (uint8_t)x->meta[k];
    }
}

KVC_DEVICE void kvc_copy_side(const kvc_side *from, const kvc_side *to, int key, int64_t tokens)
{
    int64_t tiles = tokens / KVC_TILE * kvc_tile_bytes(from->format, from->dim);
    int64_t meta = kvc_meta_bytes(from->format, key, from->dim, tokens);
    for (int64_t at = 16 * kvc_thread(); at < tiles; at += 16 * kvc_threads())
        kvc_store_quad(to->tiles + at, kvc_load_quad(from->tiles + at));
    for (int64_t at = kvc_thread(); at < meta; at += kvc_threads()) to->meta[at] = from->meta[at];
}

/* x: move and head (the block of the first move of a line processes the whole line, a token per warp at a time, of
 * which all are read before any is written); y: V, K. */
KVC_KERNEL(kvc_move_kernel, kvc_move_call, THREADS, 2)
{
    int begin = (int)kvc_block_x() / (int)a.heads, h = (int)kvc_block_x() % (int)a.heads;
    int64_t line = a.moves[begin].line;
    int key = (int)kvc_block_y();
    if (begin && a.moves[begin - 1].line == line) return;
    for (int i = begin, n = 1; i < a.n && a.moves[i].line == line; i += n) {
        const kvc_move *m = &a.moves[i];
        kvc_side from, to;
        if (m->from_token < 0) {
            n = 1;
            if (kvc_move_sides(&a, m, h, key, &from, &to)) kvc_copy_side(&from, &to, key, m->layout);
            kvc_barrier();
            continue;
        }
        for (n = 1; n < THREADS / 32 && i + n < a.n && m[n].line == line && m[n].from_token >= 0;) n++;
        m += kvc_warp();
        kvc_moved x;
        bool moves = kvc_warp() < n && kvc_keeps_codes(m->from, m->to, key);
        moves = moves && kvc_move_sides(&a, m, h, key, &from, &to);
        if (moves) kvc_take_token(&from, (int)m->from_token, &x);
        kvc_barrier();
        if (moves) kvc_put_token(&to, (int)m->to_token, &x);
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
