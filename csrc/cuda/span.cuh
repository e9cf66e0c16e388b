/* span.cuh - shared memory of a block of prefill.cuh: its query rows as A fragments, and 64 tokens of a page (a span)
 * as two tiles of fp16 (or bf16, for raw bf16 pages), decoded once for all rows.
 *
 * Tiles consist of rows of 16-byte chunks: for K a row per token, [64][dims]; for V a row per dim, [dims][64 tokens].
 * In odd rows the chunk index is xored with 4, so that eight lanes access all banks.
 *
 * Codes become subnormal fp16 numbers without being moved (keys.cuh). One multiply-add subtracts their middle and
 * applies the token's scale, relative to a power of two: for K that of these 64 tokens, for V the unit of the sums. */
#ifndef KVC_SPAN_CUH
#define KVC_SPAN_CUH

#include "attend.cuh"

#define KVC_SPAN 64          /* tokens that are decoded at once */
#define KVC_PREFILL_ROWS 128 /* maximum rows per block */

/* Forms of q, as rows of dims: unchanged (raw pages, centroids); fp16, scaled by a power of two per row; the same,
 * rotated. */
enum kvc_row_form { KVC_ROWS_GIVEN, KVC_ROWS_F16, KVC_ROWS_ROTATED };
#define KVC_CODE_KINDS (1u << KVC_KIND_INT4 | 1u << KVC_KIND_INT2)
#define KVC_PREFILL_KINDS                                                                                              \
    (KVC_RAW_KINDS | (1u << KVC_KIND_E4M3 | 1u << KVC_KIND_E5M2 | 1u << KVC_KIND_INT8) | KVC_CODE_KINDS)

typedef struct kvc_prefill_room {
    kvc_row row;
    kvc_page_room page[KVC_PREFILL_ROWS / 16]; /* of each warp */
    uint32_t words[4], nonfinite[KVC_PREFILL_ROWS / 32];
    int32_t slots[KVC_SPAN];
    alignas(16) uint32_t mean[2][KVC_SPAN]; /* mean of K's page in q's dtype, and its remainder */
} kvc_prefill_room;

KVC_INLINE uint32_t kvc_row_forms(uint32_t kinds)
{
    bool bytes = kinds & (1u << KVC_KIND_E4M3 | 1u << KVC_KIND_E5M2 | 1u << KVC_KIND_INT8);
    return 1u << KVC_ROWS_GIVEN | (bytes && kinds & 1u << KVC_KIND_BF16 ? 1u << KVC_ROWS_F16 : 0) |
           (kinds & KVC_CODE_KINDS ? 1u << KVC_ROWS_ROTATED : 0);
}
KVC_INLINE int kvc_row_form_count(uint32_t forms) { return 1 + (forms >> 1 & 1) + (forms >> 2 & 1); }
/* Index of a form among those that exist; GIVEN is the first. */
KVC_INLINE int kvc_row_form_index(uint32_t forms, int form)
{
    return form == KVC_ROWS_ROTATED ? kvc_row_form_count(forms) - 1 : form;
}

/* Layout: tiles, forms of q, steps of all but the first form. At the end, sums and maxima use the same memory. */
#define KVC_PREFILL_TILES ((sizeof(kvc_prefill_room) + 127) / 128 * 128)
KVC_INLINE int64_t kvc_prefill_bytes(int64_t rows, uint32_t kinds, int dims)
{
    int forms = kvc_row_form_count(kvc_row_forms(kinds));
    int64_t tiles = 4 * KVC_SPAN * dims, q = forms * rows * 2 * dims + (forms - 1) * rows * 4,
            sums = rows * (4 * dims + 8);
    return (int64_t)KVC_PREFILL_TILES + (tiles + q > sums ? tiles + q : sums);
}

/* Byte offset of element d of a row of q: 16 rows are A fragments, 16 bytes per lane and k step. */
KVC_DEVICE int kvc_row_place(int row, int dims, int d)
{
    int lane = 4 * (row & 7) + (d >> 3 & 3), step = 2 * (d >> 5) + (d >> 2 & 1);
    return (row >> 4) * 32 * dims + 512 * step + 16 * lane + 8 * (d >> 1 & 1) + 4 * (row >> 3 & 1) + 2 * (d & 1);
}

/* ---------------------------------------------------------------- queries */

typedef struct kvc_prefill {
    uint8_t *keys, *values, *q; /* tiles; q unchanged */
    uint32_t forms;
} kvc_prefill;

KVC_DEVICE kvc_prefill kvc_prefill_at(const kvc_call *call, int dims)
{
    uint8_t *at = kvc_shared + KVC_PREFILL_TILES;
    kvc_prefill of = {at, at + 2 * KVC_SPAN * dims, at + 4 * KVC_SPAN * dims, kvc_row_forms(call->kinds)};
    return of;
}
KVC_DEVICE uint8_t *kvc_rows_in(const kvc_call *call, const kvc_prefill *of, int form, int dims)
{
    return of->q + kvc_row_form_index(of->forms, form) * (int)call->rows * 2 * dims;
}
KVC_DEVICE float *kvc_row_steps_of(const kvc_call *call, const kvc_prefill *of, int form, int dims)
{
    int rows = (int)call->rows;
    return (float *)(of->q + kvc_row_form_count(of->forms) * rows * 2 * dims) +
           (kvc_row_form_index(of->forms, form) - 1) * rows;
}

/* Stores row n of the block, held by a half-warp, as fp16, divided by the power of two of its largest element. */
KVC_DEVICE void kvc_put_row(const kvc_call *call, const kvc_prefill *of, int form, int dims, int n, const float *x)
{
    uint32_t e = kvc_f32_bits(kvc_absmax(x, dims / 16)) >> 23;
    float unit = kvc_f32_of_bits((e < 20 ? 20 : e > 252 ? 252 : e) << 23);
    float inverse = kvc_f32_of_bits(0x7f000000 - kvc_f32_bits(unit));
    uint8_t *rows = kvc_rows_in(call, of, form, dims);
    KVC_UNROLL for (int k = 0; k < dims / 16; k++) *
        (uint16_t *)(rows + kvc_row_place(n, dims, 16 * k + kvc_half_lane())) =
        (uint16_t)kvc_pack_f16(x[k] * inverse, 0);
    if (kvc_half_lane() == 0) kvc_row_steps_of(call, of, form, dims)[n] = unit;
}

/* Converts all rows of the block to all forms; sets bits of rows with NaN or Inf in room->nonfinite, which must be 0
 * before. */
KVC_DEVICE void kvc_prefill_queries(const kvc_call *call, const kvc_prefill *of, kvc_prefill_room *room, const int dims,
                                    int h, int row0)
{
    const kvc_attend_args *a = &call->a;
    int group = (int)call->group;
    KVC_ONCE for (int n = kvc_half(); n < (int)call->rows; n += kvc_threads() / 16)
    {
        int r = row0 + n, token = (int)((uint32_t)r / (uint32_t)group);
        bool there = token < (int)room->row.queries;
        const uint16_t *from = (const uint16_t *)kvc_dense_row(
            &a->q, room->row.batch, h * group + (there ? r - token * group : 0), there ? token : 0);
        float x[KVC_PARTS];
        uint32_t bits[KVC_PARTS], nonfinite = 0;
        KVC_UNROLL for (int k = 0; k < dims / 16; k++)
        {
            bits[k] = there ? from[16 * k + kvc_half_lane()] : 0;
            x[k] = a->q.dtype == KVC_F16 ? kvc_widen(bits[k], 0) : kvc_f32_of_bits(bits[k] << 16);
            if ((kvc_f32_bits(x[k]) & 0x7f800000) == 0x7f800000) nonfinite = 1;
        }
        KVC_UNROLL for (int i = 8; i > 0; i /= 2) nonfinite |= kvc_shuffle_xor(nonfinite, i);
        if (nonfinite && kvc_half_lane() == 0) kvc_atomic_or(&room->nonfinite[n / 32], 1u << n % 32);
        KVC_UNROLL for (int k = 0; k < dims / 16; k++)
        {
            if (a->scale < 0) x[k] = -x[k], bits[k] ^= 0x8000; /* steps are positive */
            if (nonfinite) x[k] = 0, bits[k] = 0;
            *(uint16_t *)(of->q + kvc_row_place(n, dims, 16 * k + kvc_half_lane())) = (uint16_t)bits[k];
        }
        if (of->forms >> KVC_ROWS_F16 & 1) kvc_put_row(call, of, KVC_ROWS_F16, dims, n, x);
        if (of->forms >> KVC_ROWS_ROTATED & 1) {
            kvc_rotate_parts(dims / 16, x, dims);
            kvc_put_row(call, of, KVC_ROWS_ROTATED, dims, n, x);
        }
    }
}

/* ---------------------------------------------------------------- decoding pages to tiles */

/* The largest scale of tokens [0, left) of a span, in every warp. */
KVC_DEVICE float kvc_span_scale(const kvc_side *side, int span, int left)
{
    int t = 2 * kvc_lane();
    float most = 0;
    if (t < left) {
        uint32_t both = *(const uint32_t *)(side->meta + 2 * (KVC_SPAN * span + t));
        most = kvc_widen(both, 0);
        if (t + 1 < left) most = fmaxf(most, kvc_widen(both, 1));
    }
    return kvc_warp_max(most);
}

/* Factor for integers in tiles, in addition to the unit: subnormals times 2^15 are normal. */
#define KVC_LIFT 0x1p15f
KVC_INLINE float kvc_grain_of(int kind)
{
    return kind >= KVC_KIND_INT8 && kind <= KVC_KIND_INT2 ? 1 / (KVC_LIFT * KVC_GRAIN) : 1;
}

/* Decodes a side of a span to its tile, with all threads. A thread decodes chunks (8 dims of K, 8 tokens of V) of four
 * rows, which a 16-byte load of each word provides; scales are divided by the unit. V of tokens from `left` on is 0. */
KVC_DEVICE void kvc_span_tile(const int kind, const int key, const int dims, const kvc_side *side, int span, int left,
                              float unit, uint8_t *to)
{
    const int bits = kvc_kind_bits(kind), planes = bits < 8 ? 8 / bits : 1;
    const int words = bits == 16 ? 4 : 2, quads = !key && bits == 2 ? 1 : words, each = dims / 8 / planes;
    const bool ints = kvc_grain_of(kind) != 1;
    float inverse = kvc_f32_of_bits(0x7f000000 - kvc_f32_bits(unit)) * (ints ? KVC_LIFT : 1);
    if (kind == KVC_KIND_E4M3) inverse *= KVC_E4M3_UNIT;
    KVC_ONCE for (int i = kvc_thread(); i < 2 * dims; i += kvc_threads())
    {
        const int across = key ? dims / 8 : 8; /* a warp has all planes of its words, so they are loaded once */
        int chunk = i % across, line = i / across;
        int tile = KVC_SPAN / KVC_TILE * span + (key ? line >> 2 : chunk >> 1), last = ((int)side->tokens >> 4) - 1;
        int plane = key ? chunk / each : bits < 8 ? (chunk & 1) * planes / 2 : 0;
        int word = key ? words * (chunk % each) : bits < 8 ? 0 : words * (chunk & 1);
        if (tile > last) tile = last;
        const uint8_t *at = side->tiles + tile * (2 * dims * bits);
        const uint8_t *scales = side->meta + 2 * (KVC_TILE * tile + (key ? 4 * (line & 3) : 8 * (chunk & 1)));
        at += key ? 64 * word + 16 * (line & 3) : 4 * dims * word + 16 * line;
        kvc_quad w[4], y, factor = {}, middle = {}; /* K: of each row; V: of each pair of tokens */
        KVC_UNROLL for (int k = 0; k < quads; k++) w[k] = kvc_load_stream(at + k * (key ? 64 : 4 * dims));
        if (bits < 16) {
            uint32_t two[4];
            KVC_UNROLL for (int k = 0; k < (key ? 2 : 4); k += 2)
            {
                uint64_t four = *(const uint64_t *)(scales + 4 * k);
                two[k] = (uint32_t)four, two[k + 1] = (uint32_t)(four >> 32);
            }
            KVC_UNROLL for (int k = 0; k < 4; k++)
            {
                float first = kvc_widen(two[key ? k / 2 : k], key ? k & 1 : 0) * inverse;
                float second = key ? first : kvc_widen(two[key ? 0 : k], 1) * inverse;
                int p = plane + (quads == 1 ? k >> 1 : 0);
                float by = bits < 8 ? kvc_f32_of_bits((uint32_t)(127 - bits * p) << 23) : 1;
                float off = -KVC_GRAIN * (bits == 8 ? 128.f : bits == 4 ? 7.5f : 1.5f);
                factor.w[k] = kvc_pack_f16(first * by, second * by);
                if (ints) middle.w[k] = kvc_pack_f16(first * off, second * off);
            }
        }
        KVC_UNROLL for (int l = 0; l < 4; l++)
        {
            KVC_UNROLL for (int k = 0; k < 4; k++)
            {
                uint32_t x = w[bits == 16 ? k : quads == 1 ? 0 : k >> 1].w[l];
                int by = key ? l : k, p = plane + (quads == 1 ? k >> 1 : 0);
                if (bits == 16) y.w[k] = x;
                if (kind == KVC_KIND_E4M3) y.w[k] = kvc_times_pair(kvc_e4m3_pair(x, k & 1), factor.w[by]);
                if (kind == KVC_KIND_E5M2) y.w[k] = kvc_times_pair(kvc_e5m2_pair(x, k & 1), factor.w[by]);
                if (!ints) continue;
                x = kvc_bytes(x, 0, k & 1 ? 0x4342 : 0x4140);
                if (bits < 8) x &= kvc_plane_mask(bits, p);
                y.w[k] = kvc_times_pair_more(x, factor.w[by], middle.w[by]);
            }
            if (!key && left < KVC_SPAN)
                KVC_UNROLL for (int k = 0; k < 4; k++) y.w[k] &= kvc_first(left - 8 * chunk - 2 * k, 16);
            kvc_store_quad(to + (4 * line + l) * (key ? 2 * dims : 2 * KVC_SPAN) + 16 * (chunk ^ (l & 1) << 2), y);
        }
    }
}

/* A page's mean key in the dtype of q, and its remainder. */
KVC_DEVICE void kvc_mean_tile(const kvc_call *call, int dims, const uint8_t *mean, kvc_prefill_room *room)
{
    for (int i = kvc_thread(); i < dims / 2; i += kvc_threads()) {
        uint32_t w = ((const uint32_t *)mean)[i], first = w, rest = 0;
        if (call->own_raw == KVC_RAW_BF16) {
            float x = kvc_widen(w, 0), y = kvc_widen(w, 1);
            first = kvc_pack_bf16(x, y);
            rest = kvc_pack_bf16(x - kvc_f32_of_bits(first << 16), y - kvc_f32_of_bits(first & 0xffff0000));
        }
        room->mean[0][i] = first, room->mean[1][i] = rest;
    }
}

/* The power of two that scales are divided by. */
KVC_DEVICE float kvc_unit_of_scale(float most)
{
    return most > 0 ? kvc_f32_of_bits((kvc_f32_bits(most) & 0x7f800000) + (1u << 23)) : 1;
}

/* Decodes both tiles of a span, and what else its products need; `unit`: V's. */
KVC_DEVICE void kvc_decode_span(const kvc_call *call, const int dims, const kvc_prefill *of, kvc_prefill_room *room,
                                const kvc_page_room *page, const kvc_page_at *at, int span, int left, float key_unit,
                                float unit)
{
    kvc_side key = kvc_key_side(page, at), value = kvc_value_side(page, at);
    switch (page->key_kind) {
#define CASE(K)                                                                                                        \
    case K: kvc_span_tile(K, 1, dims, &key, span, left, key_unit, of->keys); break;
        KVC_TUNED_KINDS(CASE)
#undef CASE
    }
    switch (page->value_kind) {
#define CASE(K)                                                                                                        \
    case K: kvc_span_tile(K, 0, dims, &value, span, left, unit, of->values); break;
        KVC_TUNED_KINDS(CASE)
#undef CASE
    }
    if (page->centred) kvc_mean_tile(call, dims, at->data + page->mean, room);
    int i = kvc_thread();
    if (i < KVC_SPAN)
        room->slots[i] = i < left ? (int32_t)kvc_slot_of(&room->row, at->first + KVC_SPAN * span + i) : -1;
}

#endif
