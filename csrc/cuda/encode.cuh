/* encode.cuh - encodes a whole side of a page from rows, 16 tokens at a time: 16 half-warps, one per token, write codes
 * to shared memory, then all threads pack them to words. Statistics over tokens take an extra pass first.
 *
 * Cost: rows are read once (twice for statistics over tokens, the second time from L1 or L2); the page is written
 * once. */
#ifndef KVC_ENCODE_CUH
#define KVC_ENCODE_CUH

#include "rows.cuh"

#define KVC_WRITE_THREADS 256

/* Source of a page: a raw page, rows of a dense array, or tokens of other pages. */
typedef struct kvc_source {
    const kvc_side *raw;
    const kvc_dense *x;
    int64_t b, h, j0;
    const int32_t *own_at; /* row j of x is own_at[j]; NULL: j */
    const kvc_store *store;
    const kvc_move *moves; /* token t is that of moves[map[t]] */
    const uint16_t *map;
    int key;
    uint32_t bit, *flags; /* bit set in *flags if there is NaN or Inf; 0: KVC_FLAG_FINITE */
} kvc_source;

typedef struct kvc_encode_room {
    float rows[KVC_TILE * KVC_ROW_DIM];
    uint8_t codes[KVC_TILE * KVC_ROW_DIM];
    float mean[KVC_ROW_DIM], inverse[KVC_ROW_DIM];
    uint16_t map[KVC_MAX_PAGE];
    uint32_t words[4];
    kvc_row row;   /* used by the write kernel */
    kvc_side side; /* the page to encode, used by the anew kernel: in registers it would spill */
} kvc_encode_room;

/* Bytes of a side of a page in the call's own raw format. */
KVC_DEVICE uint32_t kvc_raw_side_bytes(const kvc_call *call, int key, int64_t tokens)
{
    const kvc_store *s = &call->a.store;
    uint32_t width = call->own_raw == KVC_RAW_F32 ? 4 : 2, dim = (uint32_t)(key ? s->key_dim : s->value_dim);
    return (uint32_t)kvc_align_bytes((int)((uint32_t)tokens * dim * width));
}

/* The side of an open page, raw in the dtype of the call's tokens, so its layout is just two products. The general
 * layout code has a thousand instructions, and the time of a call with one token is mostly instruction fetch. */
KVC_DEVICE kvc_side kvc_open_side(const kvc_call *call, int64_t entry, int64_t h, int64_t tokens, int key)
{
    const kvc_store *s = &call->a.store;
    uint32_t group = s->table_heads == 1 ? (uint32_t)s->heads : 1;
    uint32_t k = kvc_raw_side_bytes(call, 1, tokens), bytes = k + kvc_raw_side_bytes(call, 0, tokens);
    int64_t offset = kvc_entry_offset(entry);
    kvc_side side = {call->own_raw, key, key ? s->key_dim : s->value_dim, tokens, NULL, NULL};
    if (offset > s->arena_bytes - (int64_t)group * bytes) {
        kvc_flag(kvc_thread() ? NULL : call->flags, KVC_FLAG_ENTRY);
        return side;
    }
    side.tiles = s->arena + offset + (group > 1 ? kvc_times(bytes, h) : 0) + (key ? 0 : k);
    return side;
}

KVC_DEVICE const uint8_t *kvc_source_row(const kvc_source *from, int64_t t)
{
    int64_t j = from->j0 + t;
    return kvc_dense_row(from->x, from->b, from->h, from->own_at ? from->own_at[j] : j);
}

KVC_DEVICE void kvc_half_load(const kvc_source *from, int64_t t, int64_t dim, float *x)
{
    int parts = KVC_WIDE_AGAIN((int)(dim / 16));
    if (from->x) {
        const uint8_t *row = kvc_source_row(from, t);
        EACH_PART(k, 0, parts)
        x[k] = kvc_finite(kvc_element(row, from->x->dtype, 16 * k + kvc_half_lane()), from->flags, from->bit);
        return;
    }
    kvc_side side;
    if (from->raw) {
        side = *from->raw;
    } else {
        const kvc_move *m = &from->moves[from->map[t]];
        kvc_page page = kvc_page_of(from->store, m->from, from->h, m->layout, NULL);
        side = kvc_page_side(&page, from->key, from->store->key_dim, from->store->value_dim);
        t = m->from_token;
    }
    kvc_half_decode(&side, t, x);
}

/* From codes [16][dim], one per byte: the code of plane p in byte i of word w of a tile. */
KVC_DEVICE uint32_t kvc_code_of(int key, int bits, int dim, const uint8_t *codes, int w, int i, int p)
{
    int t = key ? w % KVC_TILE : 0, j = key ? w / KVC_TILE : w / dim, d = key ? 0 : w % dim;
    int at = p * (key ? dim * bits / 8 : 2 * bits) + 4 * j + i;
    return codes[key ? t * dim + at : at * dim + d];
}

/* Packs such codes to the words of a tile. */
KVC_DEVICE void kvc_put_tile(const kvc_side *side, int64_t tile, const uint8_t *codes)
{
    int bits = kvc_format_bits(side->format), key = side->key, dim = (int)side->dim, b = bits == 3 ? 2 : bits;
    uint32_t *out = (uint32_t *)(side->tiles + tile * kvc_tile_bytes(side->format, dim)), mask = (1u << b) - 1;
    for (int w = kvc_thread(); w < bits * dim / 2; w += kvc_threads()) {
        uint32_t word = 0;
        int high = w - dim; /* 3 bits: the words of the high bits follow */
        for (int p = 0; p < 8 / b; p++)
            for (int i = 0; i < 4; i++) {
                if (bits == 3 && high >= 0) {
                    word |= kvc_code_of(key, 2, dim, codes, high, i, p) >> 2 << (8 * i + 2 * p);
                    word |= kvc_code_of(key, 2, dim, codes, high + dim / 2, i, p) >> 2 << (8 * i + 2 * p + 1);
                } else {
                    word |= (kvc_code_of(key, b, dim, codes, w, i, p) & mask) << (8 * i + b * p);
                }
            }
        out[w] = word;
    }
}

KVC_DEVICE uint16_t kvc_saturated_f16(float x) { return kvc_f32_to_f16(kvc_clamp(x, -65504, 65504)); }

/* Statistics over the page's tokens, as they are stored: the mean, or the minimum and 1 / scale. One thread per dim. */
KVC_DEVICE void kvc_page_statistics(const kvc_side *side, const kvc_source *from, kvc_encode_room *room)
{
    kvc_traits f = kvc_format_traits(side->format);
    int dim = (int)side->dim;
    uint16_t *at = (uint16_t *)(side->meta + kvc_token_meta_bytes(f, 1, dim, side->tokens));
    const int turns = (KVC_ROW_DIM + KVC_WRITE_THREADS - 1) / KVC_WRITE_THREADS; /* more than one only for wide rows */
    KVC_ONCE for (int turn = 0; turn < turns; turn++)
    {
        int d = turn * KVC_WRITE_THREADS + kvc_thread();
        float sum = 0, low = 0, high = 0;
        for (int64_t tile = 0; tile < side->tokens / KVC_TILE; tile++) {
            float x[KVC_PARTS];
            kvc_half_load(from, tile * KVC_TILE + kvc_half(), dim, x);
            EACH_PART(k, 0, dim / 16) room->rows[kvc_half() * dim + 16 * k + kvc_half_lane()] = x[k];
            kvc_barrier();
            for (int t = 0; d < dim && t < KVC_TILE; t++) {
                float y = room->rows[t * dim + d];
                sum += y;
                low = (tile == 0 && t == 0) || y < low ? y : low;
                high = (tile == 0 && t == 0) || y > high ? y : high;
            }
            kvc_barrier();
        }
        if (d < dim && f.keys == KVC_KEYS_CENTRED) {
            at[d] = kvc_saturated_f16(sum / (float)side->tokens);
            room->mean[d] = kvc_f16_to_f32(at[d]);
        } else if (d < dim) {
            uint16_t zero = kvc_saturated_f16(low);
            low = kvc_f16_to_f32(zero);
            float span = high - low;
            uint16_t scale = span > 0 ? kvc_scale_to_f16(span / (float)((1 << f.bits) - 1)) : 0;
            at[d] = scale;
            at[dim + d] = zero;
            room->mean[d] = low;
            room->inverse[d] = span > 0 ? 1 / kvc_f16_to_f32(scale) : 0;
        }
    }
    kvc_barrier();
}

/* Encodes the whole page in a quantized format, with all threads of the block. */
KVC_DEVICE void kvc_encode_page(const kvc_side *side, const kvc_source *from, kvc_encode_room *room)
{
    kvc_traits f = kvc_format_traits(side->format);
    int dim = (int)side->dim, keys = side->key ? f.keys : KVC_KEYS_TOKEN, lane = kvc_half_lane();
    if (keys != KVC_KEYS_TOKEN) kvc_page_statistics(side, from, room);
    for (int64_t tile = 0; tile < side->tokens / KVC_TILE; tile++) {
        float x[KVC_PARTS];
        int64_t t = tile * KVC_TILE + kvc_half();
        dim = KVC_WIDE_AGAIN(dim), lane = KVC_WIDE_AGAIN(lane);
        uint8_t *codes = room->codes + kvc_half() * dim;
        kvc_half_load(from, t, dim, x);
        if (keys == KVC_KEYS_CHANNEL) {
            float top = (float)((1 << f.bits) - 1);
            EACH_PART(k, 0, dim / 16)
            {
                float y = (x[k] - room->mean[16 * k + lane]) * room->inverse[16 * k + lane];
                y = kvc_clamp(y, 0, top);
                codes[16 * k + lane] = (uint8_t)(int)((y + 0x1p23f) - 0x1p23f);
            }
        } else {
            if (keys == KVC_KEYS_CENTRED) EACH_PART(k, 0, dim / 16) x[k] -= room->mean[16 * k + lane];
            kvc_half_encode(side->format, x, dim, codes, side->meta, t, side->tokens, 1);
        }
        kvc_barrier();
        kvc_put_tile(side, tile, room->codes);
        kvc_barrier();
    }
}

/* Byte offset of an element of at least 8 bits in its tile. */
KVC_DEVICE int kvc_cell_place(int key, int bits, int dim, int t, int d)
{
    int each = 32 / bits, x = key ? d : t;
    return 4 * (key ? x / each * KVC_TILE + t : x / each * dim + d) + x % each * (bits / 8);
}

/* Writes tokens [t0, t0 + n) of a side from rows of the call: copied bits, or codes of a format that takes single
 * tokens. */
KVC_DEVICE void kvc_store_rows(const kvc_side *side, const kvc_source *from, int t0, int n, kvc_encode_room *room)
{
    int bits = kvc_format_bits(side->format), dim = (int)side->dim;
    for (int tile = t0 / KVC_TILE; tile * KVC_TILE < t0 + n; tile++) {
        int begin = (int)kvc_max(t0 - tile * KVC_TILE, 0), end = (int)kvc_min(t0 + n - tile * KVC_TILE, KVC_TILE);
        if (kvc_format_is_raw(side->format)) {
            uint8_t *out = side->tiles + tile * kvc_tile_bytes(side->format, dim);
            for (int i = kvc_thread(); i < (end - begin) * dim; i += kvc_threads()) {
                int t = begin + i / dim, d = i % dim;
                const uint8_t *row = kvc_source_row(from, tile * KVC_TILE + t - t0);
                bool fine = kvc_finite(kvc_element(row, from->x->dtype, d), from->flags, from->bit) != 0;
                uint8_t *to = out + kvc_cell_place(side->key, bits, dim, t, d);
                if (bits == 32)
                    *(uint32_t *)to = fine ? ((const uint32_t *)row)[d] : ((const uint32_t *)row)[d] & 0x80000000;
                else
                    *(uint16_t *)to = fine ? ((const uint16_t *)row)[d] : ((const uint16_t *)row)[d] & 0x8000;
            }
            continue;
        }
        float x[KVC_PARTS];
        bool mine = kvc_half() >= begin && kvc_half() < end;
        int t = tile * KVC_TILE + (mine ? kvc_half() : begin);
        /* half-warps without a token repeat the first, which writes the same bytes */
        kvc_half_load(from, t - t0, dim, x);
        kvc_half_encode(side->format, x, dim, room->codes + kvc_half() * dim, side->meta, t, side->tokens, 1);
        kvc_barrier();
        uint8_t *out = side->tiles + tile * kvc_tile_bytes(side->format, KVC_WIDE_AGAIN(dim));
        for (int i = kvc_thread(); i < (end - begin) * dim; i += kvc_threads()) {
            int c = begin + i / dim, d = i % dim;
            out[kvc_cell_place(side->key, bits, dim, c, d)] = room->codes[c * dim + d];
        }
        kvc_barrier();
    }
}

#endif
