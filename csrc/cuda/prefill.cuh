/* prefill.cuh - attention of many query rows (64 and more per KV head). A block processes 16 rows per warp, and a row's
 * columns 64 tokens at a time (span.cuh). Each warp computes S = Q K^T with its rows as A, softmax in registers, and O
 * += P V with S's registers as A, without shuffles.
 *
 * A 16-byte chunk of a tile, read by lane 4g + t, gives the B fragments of two k steps: words 0, 1 for the first, 2, 3
 * for the second. This determines the order of q's dims and P's tokens in A. Column g of S's tile 4I + k is token 32I +
 * 8 (g / 2) + 2k + g % 2, so that P's registers match V's chunks.
 *
 * Cost for 64 tokens of D dims and 16 rows, per warp: 2 D / 2 MMAs and 4 for the sums of the weights, D / 2 loads of 16
 * bytes from shared memory, 32 exponentials per lane; and 1/8 of the block's decoding (128 rows; 1/4 for 64), D codes
 * per lane at 64 rows. */
#ifndef KVC_PREFILL_CUH
#define KVC_PREFILL_CUH

#include "span.cuh"

/* ---------------------------------------------------------------- a warp's products */

KVC_DEVICE void kvc_row_mma(const bool bf16, float d[4], const uint32_t a[4], const uint32_t b[2])
{
    if (bf16)
        kvc_mma_bf16(d, a, b);
    else
        kvc_mma_f16(d, a, b);
}

/* Chunk 4S + t of a row g of chunks; `at`: of the lane's row. */
KVC_DEVICE kvc_quad kvc_row_chunk(const uint8_t *at, int S)
{
    int t = kvc_lane() & 3, odd = kvc_lane() >> 2 & 1;
    return kvc_load_quad(at + 64 * S + (S & 1 ? -64 : 64) * odd + 16 * t);
}

/* A fragment of a k step. q: the warp's first row of a form. */
KVC_DEVICE kvc_quad kvc_row_fragment(const uint8_t *q, int step)
{
    return kvc_load_quad(q + 512 * step + 16 * kvc_lane());
}

/* s[4j + 2i + e]: row g + 8i, column 2t + e of tile j. */
KVC_DEVICE void kvc_row_scores(const bool bf16, const int dims, const uint8_t *q, const uint8_t *keys, float *s)
{
    int g = kvc_lane() >> 2;
    const uint8_t *of = keys + (8 * (g >> 1) + (g & 1)) * 2 * dims;
    KVC_UNROLL for (int j = 0; j < 32; j++) s[j] = 0;
    KVC_UNROLL for (int S = 0; S < dims / 32; S++)
    {
        kvc_quad a = kvc_row_fragment(q, 2 * S), b = kvc_row_fragment(q, 2 * S + 1);
        KVC_UNROLL for (int j = 0; j < 8; j++)
        {
            kvc_quad k = kvc_row_chunk(of + (32 * (j >> 2) + 2 * (j & 3)) * 2 * dims, S);
            kvc_row_mma(bf16, s + 4 * j, a.w, k.w);
            kvc_row_mma(bf16, s + 4 * j, b.w, k.w + 2);
        }
    }
}

/* q . mean for rows g and g + 8: the mean is in even columns, its remainder in odd ones. */
KVC_DEVICE void kvc_row_means(const bool bf16, const int dims, const uint8_t *q, const kvc_prefill_room *room,
                              float dot[2])
{
    int g = kvc_lane() >> 2, t = kvc_lane() & 3;
    float sum[4] = {0, 0, 0, 0};
    KVC_UNROLL for (int S = 0; S < dims / 32; S++)
    {
        kvc_quad a = kvc_row_fragment(q, 2 * S), b = kvc_row_fragment(q, 2 * S + 1);
        kvc_quad mean = kvc_load_quad(room->mean[g & 1] + 16 * S + 4 * t);
        kvc_row_mma(bf16, sum, a.w, mean.w);
        kvc_row_mma(bf16, sum, b.w, mean.w + 2);
    }
    dot[0] = sum[0] + sum[1], dot[1] = sum[2] + sum[3];
}

/* o[4n + 2i + e]: row g + 8i, dim 8n + 2t + e; l: the same for a column of ones. */
KVC_DEVICE void kvc_row_sums(const bool bf16, const int dims, const float *p, const uint8_t *values, float *o, float *l)
{
    int g = kvc_lane() >> 2;
    const uint8_t *of = values + g * 2 * KVC_SPAN;
    const uint32_t one = bf16 ? 0x3f803f80 : 0x3c003c00, ones[2] = {one, one};
    uint32_t a[4][4];
    KVC_UNROLL for (int x = 0; x < 16; x++)
    {
        float first = p[2 * x], second = p[2 * x + 1]; /* tile x / 2, row g + 8 (x % 2) */
        a[x >> 2][x & 3] = bf16 ? kvc_pack_bf16(first, second) : kvc_pack_f16(first, second);
    }
    KVC_UNROLL for (int s = 0; s < 4; s++) kvc_row_mma(bf16, l, a[s], ones);
    KVC_UNROLL for (int n = 0; n < dims / 8; n++) KVC_UNROLL for (int S = 0; S < 2; S++)
    {
        kvc_quad v = kvc_row_chunk(of + n * 16 * KVC_SPAN, S);
        kvc_row_mma(bf16, o + 4 * n, a[2 * S], v.w);
        kvc_row_mma(bf16, o + 4 * n, a[2 * S + 1], v.w + 2);
    }
}

/* Orthonormal Walsh-Hadamard transform of rows in o. */
KVC_DEVICE void kvc_rotate_rows(const int dims, float *o)
{
    const float norm = dims == 64 ? .125f : .088388347648318447f;
    KVC_UNROLL for (int x = 0; x < dims / 2; x += 2)
    {
        float p = o[x], q = o[x + 1];
        o[x] = p + q, o[x + 1] = p - q;
    }
    KVC_UNROLL for (int h = 1; h < 4; h *= 2)
    {
        float sign = kvc_lane() & h ? -1.f : 1.f;
        KVC_UNROLL for (int x = 0; x < dims / 2; x++) o[x] = fmaf(sign, o[x], kvc_shuffle_xor_f(o[x], h));
    }
    KVC_UNROLL for (int h = 4; h < dims / 2; h *= 2) KVC_UNROLL for (int x = 0; x < dims / 2; x++) if (!(x & h))
    {
        float p = o[x], q = o[x + h];
        o[x] = p + q, o[x + h] = p - q;
    }
    KVC_UNROLL for (int x = 0; x < dims / 2; x++) o[x] *= norm;
}

/* ---------------------------------------------------------------- visibility */

/* For n >= 1 rows starting at `from`: the tokens that all of them see, and those that any of them sees, as index
 * ranges. */
typedef struct kvc_rows_see {
    kvc_seen_by all, some;
} kvc_rows_see;

KVC_DEVICE int64_t kvc_slot_of_row(const kvc_call *call, const kvc_row *row, int r)
{
    return row->query_slot + (uint32_t)r / (uint32_t)call->group;
}
KVC_DEVICE kvc_rows_see kvc_rows_see_of(const kvc_call *call, const kvc_row *row, int from, int n)
{
    int total = (int)(row->queries * call->group);
    kvc_rows_see see = {{0, 0}, {0, from < total ? INT32_MAX : 0}};
    if (!row->contiguous || from >= total) return see;
    int64_t first = kvc_slot_of_row(call, row, from);
    int64_t last = kvc_slot_of_row(call, row, (from + n < total ? from + n : total) - 1);
    see.all.begin = (int32_t)kvc_max(0, kvc_oldest_slot(call, row, last) - row->first);
    see.all.end = (int32_t)(first + 1 - row->first);
    see.some.begin = (int32_t)kvc_max(0, kvc_oldest_slot(call, row, first) - row->first);
    see.some.end = (int32_t)(last + 1 - row->first);
    return see;
}
KVC_DEVICE bool kvc_none_of(const kvc_seen_by *some, int first, int n)
{
    return first + n <= some->begin || first >= some->end;
}

/* ---------------------------------------------------------------- a block */

/* A warp's rows g and g + 8. */
typedef struct kvc_rows_state {
    float m[2], by[2], plus[2]; /* maxima; factors and offsets of the scores, for powers of two */
    int32_t newest[2], oldest[2];
} kvc_rows_state;

/* Applies the softcap, if any, and masks invisible scores with a value below all others. */
KVC_DEVICE void kvc_mask_rows(float softcap, const kvc_prefill_room *room, bool whole, kvc_rows_state *state, float *s)
{
    int t = kvc_lane() & 3;
    KVC_UNROLL for (int x = 0; x < 32; x++)
    {
        int i = x >> 1 & 1, e = x & 1, j = x >> 2, slot = room->slots[32 * (j >> 2) + 8 * t + 2 * (j & 3) + e];
        if (softcap > 0)
            s[x] = softcap * KVC_LOG2E * tanhf(fmaf(s[x], state->by[i], state->plus[i]) * (1 / KVC_LOG2E) / softcap);
        if (!whole && !(slot >= state->oldest[i] && slot <= state->newest[i])) s[x] = -INFINITY;
    }
    KVC_UNROLL for (int i = 0; i < 2; i++) if (softcap > 0) state->by[i] = 1, state->plus[i] = 0;
}

/* Replaces scores by weights, like kvc_soften. */
KVC_DEVICE void kvc_soften_rows(const int dims, kvc_rows_state *state, float *s, float *o, float *l)
{
    float top[2];
    KVC_UNROLL for (int i = 0; i < 2; i++)
    {
        float most = s[2 * i];
        KVC_UNROLL for (int x = 0; x < 16; x++) most = fmaxf(most, s[4 * (x >> 1) + 2 * i + (x & 1)]);
        top[i] = fmaf(most, state->by[i], state->plus[i]);
    }
    const float slack = KVC_SLACK * KVC_LOG2E;
    if (kvc_warp_any(top[0] > state->m[0] + slack || top[1] > state->m[1] + slack)) {
        float keep[2];
        KVC_UNROLL for (int i = 0; i < 2; i++)
        {
            top[i] = fmaxf(top[i], kvc_shuffle_xor_f(top[i], 1));
            float m = fmaxf(state->m[i], fmaxf(top[i], kvc_shuffle_xor_f(top[i], 2)));
            keep[i] = m == state->m[i] ? 1 : kvc_exp2(state->m[i] - m);
            state->m[i] = m;
        }
        KVC_UNROLL for (int x = 0; x < dims / 2; x++) o[x] *= keep[x >> 1 & 1];
        KVC_UNROLL for (int x = 0; x < 4; x++) l[x] *= keep[x >> 1];
    }
    KVC_UNROLL for (int i = 0; i < 2; i++) state->plus[i] -= state->m[i];
    KVC_UNROLL for (int x = 0; x < 32; x++) s[x] = kvc_exp2(fmaf(s[x], state->by[x >> 1 & 1], state->plus[x >> 1 & 1]));
}

/* Writes the results of the block's rows from shared memory, or this run's partial results. */
KVC_DEVICE void kvc_prefill_finish(const kvc_call *call, const kvc_row *row, const int dims, int b, int h, int row0,
                                   const float *sum, float *to)
{
    int rows = (int)call->rows, total = (int)(row->queries * call->group), lane = kvc_half_lane();
    const float *m = sum + rows * dims, *l = m + rows;
    KVC_ONCE for (int n = kvc_half(); n < rows && row0 + n < total; n += kvc_threads() / 16)
    {
        float o[KVC_PARTS];
        KVC_UNROLL for (int k = 0; k < dims / 16; k++) o[k] = sum[n * dims + 16 * k + lane];
        if (!to) {
            kvc_put_out(call, row, b, h, row0 + n, o, m[n], l[n], dims, lane, 1, 16, dims / 16);
            continue;
        }
        KVC_UNROLL for (int k = 0; k < dims / 16; k++) to[n * dims + 16 * k + lane] = o[k];
        if (lane == 0) to[rows * dims + n] = m[n], to[rows * (dims + 1) + n] = l[n];
    }
}

/* x: as in device.cuh. Heads of K and V have `dims` dims; 32 threads per 16 rows. */
KVC_DEVICE void kvc_prefill_block(const kvc_call *call, const int dims)
{
    const kvc_attend_args *a = &call->a;
    const kvc_store *st = &a->store;
    kvc_prefill_room *room = (kvc_prefill_room *)kvc_shared;
    const kvc_prefill of = kvc_prefill_at(call, dims);
    const kvc_place place = kvc_place_of(call);
    uint32_t runs = (uint32_t)call->runs, run = place.run;
    int b = place.b, h = place.h, rows = (int)call->rows, row0 = place.row0;
    if (b < 0) return;
    int warp = kvc_warp(), lane = kvc_lane(), g = lane >> 2, t = lane & 3;
    const bool bf16 = call->own_raw == KVC_RAW_BF16;
    if (kvc_thread() < KVC_PREFILL_ROWS / 32) room->nonfinite[kvc_thread()] = 0;
    if (lane == 0) room->page[warp].pair = -1;
    kvc_row_shared(call, b, h, &room->row);
    const kvc_row *row = &room->row;
    kvc_prefill_queries(call, &of, room, dims, h, row0);
    kvc_barrier();

    kvc_page_room *page = &room->page[warp];
    kvc_rows_see block_sees = kvc_rows_see_of(call, row, row0, rows);
    kvc_rows_see sees = kvc_rows_see_of(call, row, row0 + 16 * warp, 16);
    kvc_rows_state state;
    float o[64], l[4] = {0, 0, 0, 0}, unit = 1; /* dims / 2 */
    KVC_UNROLL for (int x = 0; x < dims / 2; x++) o[x] = 0;
    KVC_UNROLL for (int i = 0; i < 2; i++)
    {
        int n = 16 * warp + g + 8 * i;
        int64_t slot = kvc_slot_of_row(call, row, row0 + n);
        state.m[i] = KVC_NO_MAX;
        state.newest[i] = row0 + n < (int)(row->queries * call->group) ? (int32_t)slot : -1;
        state.oldest[i] = (int32_t)kvc_oldest_slot(call, row, slot);
        if (room->nonfinite[n / 32] >> n % 32 & 1) l[2 * i] = l[2 * i + 1] = NAN;
    }
    uint32_t columns = (uint32_t)kvc_row_columns(call, row);
    int begin = (int)(columns * run / runs), end = (int)(columns * (run + 1) / runs), rotated = -1;
    int paged = (int)kvc_row_paged(row);
    uint8_t *known = NULL;
    if (begin == 0 && st->sinks == 0 && row->used) begin = 1; /* column 0 has no tokens */
    KVC_ONCE for (int c = begin; c < end; c++)
    {
        kvc_page_at at = kvc_page_begin(call, row, call->kinds, h, c, paged, known, -1, page);
        known = at.data ? kvc_page_known(page, kvc_entry_ahead(row, c + 1, end)) : NULL;
        if (!at.data || kvc_none_of(&block_sees.some, at.first, at.n)) continue;
        if (known && warp == 0) kvc_prefetch(known, page->bytes, lane);
        int key_kind = page->key_kind, value_kind = page->value_kind;
        if (rotated >= 0 && rotated != page->rotated) kvc_rotate_rows(dims, o);
        rotated = page->rotated;
        KVC_ONCE for (int span = 0; span * KVC_SPAN < at.n; span++)
        {
            int first = at.first + KVC_SPAN * span, left = at.n - KVC_SPAN * span;
            if (left > KVC_SPAN) left = KVC_SPAN;
            if (kvc_none_of(&block_sees.some, first, left)) continue;
            float key_unit = 1, grain = kvc_grain_of(value_kind), of_sums = 1;
            if (kvc_kind_bits(key_kind) < 16) {
                kvc_side side = kvc_key_side(page, &at);
                key_unit = kvc_unit_of_scale(kvc_span_scale(&side, span, left));
            }
            if (kvc_kind_bits(value_kind) < 16) { /* the unit stays while the scales are within 1/64 to 2 of it */
                kvc_side side = kvc_value_side(page, &at);
                float most = kvc_span_scale(&side, span, left) * grain;
                of_sums = most < 1.96875f * unit && most * 64 >= unit ? unit : kvc_unit_of_scale(most);
            }
            if (of_sums != unit) {
                float by = unit / of_sums;
                KVC_UNROLL for (int x = 0; x < dims / 2; x++) o[x] *= by;
                unit = of_sums;
            }
            kvc_barrier();
            kvc_decode_span(call, dims, &of, room, page, &at, span, left, key_unit, unit / grain);
            kvc_barrier();
            if (kvc_none_of(&sees.some, first, left)) continue;

            float s[32], dot[2] = {0, 0}, scale = fmaxf(fabsf(a->scale), 1e-30f) * KVC_LOG2E;
            const uint8_t *given = of.q + 16 * warp * 2 * dims;
            int form = kvc_kind_bits(key_kind) < 8 ? KVC_ROWS_ROTATED : KVC_ROWS_GIVEN;
            if (kvc_kind_bits(key_kind) == 8 && of.forms >> KVC_ROWS_F16 & 1) form = KVC_ROWS_F16;
            const uint8_t *q = kvc_rows_in(call, &of, form, dims) + 16 * warp * 2 * dims;
            const float *step = kvc_row_steps_of(call, &of, form, dims) + 16 * warp + g;
            if (page->centred && bf16) kvc_row_means(true, dims, given, room, dot);
            if (page->centred && !bf16) kvc_row_means(false, dims, given, room, dot);
            if (key_kind == KVC_KIND_BF16)
                kvc_row_scores(true, dims, q, of.keys, s);
            else
                kvc_row_scores(false, dims, q, of.keys, s);
            KVC_UNROLL for (int i = 0; i < 2; i++)
            {
                float by = scale * key_unit * kvc_grain_of(key_kind) * (form == KVC_ROWS_GIVEN ? 1 : step[8 * i]);
                state.by[i] = fmaxf(by, 1e-30f);
                state.plus[i] = dot[i] * scale;
            }
            bool whole = left == KVC_SPAN && first >= sees.all.begin && first + left <= sees.all.end;
            if (!whole || a->softcap > 0) kvc_mask_rows(a->softcap, room, whole, &state, s);
            kvc_soften_rows(dims, &state, s, o, l);
            if (value_kind == KVC_KIND_BF16)
                kvc_row_sums(true, dims, s, of.values, o, l);
            else
                kvc_row_sums(false, dims, s, of.values, o, l);
        }
    }
    if (rotated == 1) kvc_rotate_rows(dims, o);
    kvc_barrier();
    float *sum = (float *)of.keys;
    KVC_UNROLL for (int i = 0; i < 2; i++)
    {
        int n = 16 * warp + g + 8 * i;
        KVC_UNROLL for (int x = 0; x < dims / 8; x++) KVC_UNROLL for (int e = 0; e < 2; e++)
            sum[n * dims + 8 * x + 2 * t + e] = o[4 * x + 2 * i + e] * unit;
        if (t == 0) {
            sum[rows * dims + n] = state.m[i] == KVC_NO_MAX ? -INFINITY : state.m[i] * (1 / KVC_LOG2E);
            sum[rows * (dims + 1) + n] = l[2 * i];
        }
    }
    kvc_barrier();
    float *from = call->partial + (int64_t)place.line * runs * (rows * (dims + 2));
    kvc_prefill_finish(call, row, dims, b, h, row0, sum, runs > 1 ? from + run * (rows * (dims + 2)) : NULL);
    if (runs > 1 && kvc_comes_last(call->done + place.line, runs, room->words))
        kvc_combine(call, row, dims, b, h, row0, from);
}

#endif
