/* accumulated.cuh - accumulated attention (H2O): for each token, the sum of exp(score - lse) over the call's queries
 * and the group. For up to 32 rows per KV head it is computed from the weights that attention stored (kept.cuh),
 * otherwise by a second pass over K, which is exact and needs no weight matrix. A block processes (sequence and KV head,
 * run of columns) and all rows, 8 at a time in the second pass. Tokens are partitioned over warps, so sums need no
 * atomics. The output is zeroed before.
 *
 * Cost of the second pass: K's part of the pages is read again, and half of the arithmetic of attention. */
#ifndef KVC_ACCUMULATED_CUH
#define KVC_ACCUMULATED_CUH

#include "attend.cuh"

/* Blocks per (sequence, head). */
KVC_INLINE int64_t kvc_accumulated_parts(const kvc_call *call)
{
    int64_t parts = (call->a.store.columns + call->own_columns) / KVC_WARPS;
    return parts < 1 ? 1 : parts > 64 ? 64 : parts;
}

/* lse of the call's row r of (b, h); NaN if it does not count. */
KVC_DEVICE float kvc_row_lse(const kvc_call *call, int64_t b, int64_t h, int64_t r)
{
    const kvc_attend_args *a = &call->a;
    int64_t t = r / call->group, hq = h * call->group + r % call->group;
    if (r >= a->Tq * call->group || (a->real && a->Tq == a->T && !a->real[b * a->T + t])) return NAN;
    return (a->given_lse ? a->given_lse : a->lse)[(b * a->query_heads + hq) * a->Tq + t];
}

/* From stored weights, for any pages. */
KVC_DEVICE void kvc_kept_block(const kvc_call *call)
{
    const kvc_store *st = &call->a.store;
    kvc_attend_room *room = (kvc_attend_room *)kvc_shared;
    int64_t parts = kvc_accumulated_parts(call), bh = kvc_block_x() / parts, b = bh / st->heads, h = bh % st->heads;
    int64_t part = kvc_block_x() % parts, step = parts * KVC_WARPS;
    kvc_row_shared(call, b, h, &room->row);
    const kvc_row *row = &room->row;
    float *accumulated = call->a.accumulated + bh * call->a.accumulated_width;
    float lse = kvc_row_lse(call, b, h, kvc_lane());
    int64_t columns = kvc_row_columns(call, row);
    for (int64_t c = part * KVC_WARPS + kvc_warp(); c < columns; c += step) {
        kvc_view v = kvc_view_at(call, row, h, c);
        kvc_kept kept = kvc_kept_at(call, b, h, c);
        for (int block = 0; block * KVC_BLOCK < v.n; block++) {
            float sum = kvc_kept_sum(call, &kept, block, lse);
            int64_t in = block * KVC_BLOCK + kvc_lane(), i = v.first + in;
            if (in < v.n && i < call->a.accumulated_width) accumulated[i] = sum;
        }
    }
}

/* Columns are assigned round-robin: warp w of block p takes p * 4 + w and every (parts * 4)-th after. */
KVC_DEVICE void kvc_accumulate_block(const kvc_call *call, const uint32_t kinds, const int dims)
{
    bool staged = call->kinds & kinds & 1u << KVC_KIND_STAGED;
    const kvc_attend_args *a = &call->a;
    const kvc_store *st = &a->store;
    kvc_attend_room *room = (kvc_attend_room *)kvc_shared;
    int64_t parts = kvc_accumulated_parts(call), bh = kvc_block_x() / parts, b = bh / st->heads, h = bh % st->heads;
    int64_t part = kvc_block_x() % parts, rows = a->Tq * call->group, step = parts * KVC_WARPS;
    int warp = kvc_warp(), lane = kvc_lane(), u = lane >> 4, c4 = 4 * (lane >> 2 & 3);
    kvc_row_shared(call, b, h, &room->row);
    const kvc_row *row = &room->row;
    int64_t columns = kvc_row_columns(call, row);
    float *accumulated = a->accumulated + bh * a->accumulated_width;
    kvc_query *q = kvc_group_query(call, 0);
    kvc_stage *stage = NULL;
    if (staged) stage = (kvc_stage *)((uint8_t *)kvc_group_query(call, 1) + warp * kvc_stage_bytes(dims));
    if (lane == 0) room->page[warp].pair = -1;

    for (int64_t row0 = 0; row0 < rows; row0 += 8) {
        kvc_barrier();
        kvc_queries of = kvc_row_queries(row);
        kvc_prepare(call, &of, kinds, dims, (int)h, (int)row0, 1);
        kvc_barrier();
        float lse[2];
        KVC_UNROLL for (int i = 0; i < 2; i++) lse[i] = kvc_row_lse(call, b, h, row0 + 2 * (lane & 3) + i);
        KVC_ONCE for (int64_t c = part * KVC_WARPS + warp; c < columns; c += step)
        {
            kvc_page_room *page = &room->page[warp];
            uint8_t *known = kvc_page_known(page, kvc_entry_ahead(row, (int)c, (int)columns));
            kvc_page_at at = kvc_page_begin(call, row, call->kinds & kinds, (int)h, (int)c, (int)kvc_row_paged(row),
                                            known, -1, page);
            if (!at.data) continue;
            float by_page[2] = {0, 0};
            if (page->centred) kvc_centroid_scores(dims, at.data + page->mean, (int)page->key.dim, q, by_page);
            KVC_ONCE for (int block = 0; block * KVC_BLOCK < at.n; block++)
            {
                uint32_t visible = kvc_visible(call, row, q, &at, block);
                float sum[4];
                kvc_scores of = kvc_any_scores(kinds, dims, page, &at, block, q, stage, by_page);
                kvc_mask_scores(a->softcap, visible, &of);
                KVC_UNROLL for (int e = 0; e < 4; e++)
                {
                    sum[e] = 0;
                    KVC_UNROLL for (int i = 0; i < 2; i++) if (visible >> (2 * e + i) & 1 && isfinite(lse[i])) sum[e] +=
                        kvc_exp2((kvc_score(&of, 2 * e + i) - lse[i]) * KVC_LOG2E);
                    sum[e] += kvc_shuffle_xor_f(sum[e], 1);
                    sum[e] += kvc_shuffle_xor_f(sum[e], 2);
                    int64_t in = block * KVC_BLOCK + 16 * u + c4 + e, i = at.first + in;
                    if ((lane & 3) == e && in < at.n && i < a->accumulated_width) accumulated[i] += sum[e];
                }
            }
        }
    }
}

#define KVC_ACCUMULATE_KERNEL(name, kinds, dims)                                                                       \
    KVC_KERNEL(kvc_accumulate_##name##_##dims, kvc_call, 32 * KVC_WARPS, 2) { kvc_accumulate_block(&a, kinds, dims); }

#endif
