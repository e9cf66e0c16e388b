/* attend.cuh - paged attention. A block of 4 warps processes (sequence and KV head, block of query rows, run of
 * columns). Query rows are processed in groups of 8, the columns of an MMA; with fewer than 4 groups, several warps
 * share a group and split the pages. A warp takes one page at a time, 32 tokens at a time, through scores (keys.cuh),
 * online softmax and sums (values.cuh). There are no barriers, and only q is in shared memory: words go directly from
 * global memory to the tensor cores. Full pages of few bits and of 8 and 16 bits have faster paths (packed.cuh,
 * pipeline.cuh).
 *
 * When V changes between rotated and other formats, the sums are rotated in registers; the transform is its own
 * inverse. Sums that are rotated at the end are rotated back after the warps' sums are combined. */
#ifndef KVC_ATTEND_CUH
#define KVC_ATTEND_CUH

#include "prepare.cuh"
#include "packed.cuh"
#include "pipeline.cuh"
#include "token.cuh"

KVC_INLINE int64_t kvc_attend_bytes(int64_t rows, uint32_t forms, bool staged, int64_t pipe, int dims)
{
    int64_t sums = (int64_t)sizeof(float) * KVC_WARPS * 8 * kvc_sums_row(dims);
    int64_t bytes = rows / 8 * kvc_query_bytes(forms, dims) + KVC_WARPS * (staged ? kvc_stage_bytes(dims) : pipe);
    return (int64_t)((sizeof(kvc_attend_room) + 127) / 128 * 128) + (bytes > sums ? bytes : sums);
}

/* Kernels are instantiated for sets of kinds, because code for fewer kinds uses fewer registers. The first set that
 * covers a call's kinds is used. The occupancy is lower for the set of all kinds, whose code needs more registers, and
 * for sums of 256 dims. */
/* On sm_100 and later, a limit of 128 registers spills 380 bytes for int8 (168 registers: 164) and 340 for few bits. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define KVC_BLOCKS(blocks) 2
#else
#define KVC_BLOCKS(blocks) blocks
#endif
#define KVC_SETS(SET)                                                                                                  \
    SET(raw, KVC_BLOCKS(3), KVC_RAW_KINDS)                                                                             \
    SET(int8, KVC_BLOCKS(3), KVC_RAW_KINDS | 1u << KVC_KIND_INT8)                                                      \
    SET(fp8, KVC_BLOCKS(3), KVC_RAW_KINDS | 1u << KVC_KIND_E4M3 | 1u << KVC_KIND_E5M2)                                 \
    SET(int4, KVC_BLOCKS(3), KVC_RAW_KINDS | 1u << KVC_KIND_INT4)                                                      \
    SET(int2, KVC_BLOCKS(3), KVC_RAW_KINDS | 1u << KVC_KIND_INT2)                                                      \
    SET(ints, KVC_BLOCKS(3), KVC_RAW_KINDS | 1u << KVC_KIND_INT8 | 1u << KVC_KIND_INT4 | 1u << KVC_KIND_INT2)          \
    SET(any, 2, (1u << KVC_KINDS) - 1)

/* Mask of the lane's 8 scores that are visible: bits 2e + i. */
KVC_DEVICE uint32_t kvc_visible(const kvc_call *call, const kvc_row *row, const kvc_query *q, const kvc_page_at *v,
                                int block)
{
    int lane = kvc_lane(), in = block * KVC_BLOCK + 16 * (lane >> 4) + 4 * (lane >> 2 & 3);
    int at[2] = {q->slot[2 * (lane & 3)], q->slot[2 * (lane & 3) + 1]};
    int oldest[2] = {kvc_oldest_slot(call, row, at[0]), kvc_oldest_slot(call, row, at[1])};
    int start = v->first + in, begin = (int)row->first + start;
    const bool contiguous = row->contiguous;
    uint32_t bits = 0;
    KVC_UNROLL for (int e = 0; e < 4; e++)
    {
        if (in + e >= v->n) continue;
        int slot = contiguous ? begin + e : (int)kvc_slot_of(row, start + e);
        KVC_UNROLL for (int i = 0; i < 2; i++)
        {
            bool sees = slot >= oldest[i] && slot <= at[i];
            bits |= (uint32_t)sees << (2 * e + i);
        }
    }
    return bits;
}

KVC_DEVICE float kvc_score(const kvc_scores *of, int x) { return fmaf(of->s[x], of->by[x & 1], of->plus[x & 1]); }

/* Applies the softcap, if any, and masks invisible scores with a value below all others. */
KVC_DEVICE void kvc_mask_scores(float softcap, uint32_t visible, kvc_scores *of)
{
    KVC_UNROLL for (int x = 0; x < 8; x++)
    {
        float s = of->s[x];
        if (softcap > 0) s = (softcap * tanhf(kvc_score(of, x) / softcap) - of->plus[x & 1]) / of->by[x & 1];
        of->s[x] = visible >> x & 1 ? s : -INFINITY;
    }
}

/* Orthonormal Walsh-Hadamard transform of o over the dims: dim 32m + 4g + 2i + r is in o[8m + 4i + 2r + column]. */
KVC_DEVICE void kvc_rotate_sums(int dims, int dim, float *o)
{
    int block = dim & -dim, lane = kvc_lane();
    float norm = 1; /* 1 / sqrt(block) */
    KVC_ONCE for (int rest = block; rest > 1; rest /= 4) norm *= rest > 2 ? .5f : .70710678118654752f;
    KVC_UNROLL for (int h = 2; h <= 4; h *= 2) KVC_UNROLL for (int x = 0; x < dims / 4; x++) if (!(x & h))
    {
        float p = o[x], q = o[x + h];
        o[x] = p + q;
        o[x + h] = p - q;
    }
    KVC_UNROLL for (int h = 4; h < 32; h *= 2) if (h < block)
    {
        float sign = lane & h ? -1.f : 1.f;
        KVC_UNROLL for (int x = 0; x < dims / 4; x++) o[x] = fmaf(sign, o[x], kvc_shuffle_xor_f(o[x], h));
    }
    KVC_UNROLL for (int h = 8; h < dims / 4; h *= 2) if (4 * h < block)
        KVC_UNROLL for (int x = 0; x < dims / 4; x++) if (!(x & h))
    {
        float p = o[x], q = o[(x + h) % (dims / 4)];
        o[x] = p + q;
        o[(x + h) % (dims / 4)] = p - q;
    }
    KVC_UNROLL for (int x = 0; x < dims / 4; x++) o[x] *= norm;
}

#define KVC_TUNED_KINDS(CASE)                                                                                          \
    CASE(KVC_KIND_BF16)                                                                                                \
    CASE(KVC_KIND_F16)                                                                                                 \
    CASE(KVC_KIND_E4M3)                                                                                                \
    CASE(KVC_KIND_E5M2) CASE(KVC_KIND_INT8) CASE(KVC_KIND_INT4) CASE(KVC_KIND_INT2)

/* Whether a side is as wide as the kernel, so that distances within it are compile-time constants. This duplicates the
 * code, so kernels for all kinds do not use it. */
KVC_DEVICE bool kvc_exact(const uint32_t kinds, int dims, const kvc_side *side)
{
    return !(kinds >> KVC_KIND_STAGED & 1) && side->dim == dims;
}

/* Scores of a block of a page of any kind; *plus receives a term to be added to them. */
KVC_DEVICE kvc_scores kvc_any_scores(const uint32_t kinds, int dims, const kvc_page_room *page, const kvc_page_at *at,
                                     int block, const kvc_query *q, kvc_stage *stage, const float plus[2])
{
    kvc_scores of = {{0, 0, 0, 0, 0, 0, 0, 0}, {1, 1}, {plus[0], plus[1]}};
    kvc_side side = kvc_key_side(page, at);
    switch (page->key_kind) {
#define CASE(K)                                                                                                        \
    case K:                                                                                                            \
        if (!(kinds >> K & 1)) break;                                                                                  \
        kvc_row_steps(q, kvc_form_of(K), of.by);                                                                       \
        if (kvc_exact(kinds, dims, &side))                                                                             \
            kvc_key_scores(K, dims, true, &side, block, q, of.s);                                                      \
        else                                                                                                           \
            kvc_key_scores(K, dims, false, &side, block, q, of.s);                                                     \
        break;
        KVC_TUNED_KINDS(CASE)
#undef CASE
    default:
        if (!(kinds >> KVC_KIND_STAGED & 1)) break;
        kvc_row_steps(q, KVC_FORM_F16, of.by);
        kvc_staged_scores(dims, &side, block, at->n - block * KVC_BLOCK, q, stage, of.s);
    }
    return of;
}

KVC_DEVICE void kvc_any_sums(const uint32_t kinds, int dims, const kvc_page_room *page, const kvc_page_at *at,
                             int block, int all, const float p[8], kvc_stage *stage, kvc_softmax *state, float *o)
{
    kvc_side side = kvc_value_side(page, at);
    int left = at->n - block * KVC_BLOCK;
    switch (page->value_kind) {
#define CASE(K)                                                                                                        \
    case K:                                                                                                            \
        if (kinds >> K & 1)                                                                                            \
            kvc_value_sums(K, dims, kvc_exact(kinds, dims, &side), kvc_sums_of(kinds, dims), &side, block, left, all,  \
                           p, state, o);                                                                               \
        break;
        KVC_TUNED_KINDS(CASE)
#undef CASE
    default:
        if (kinds >> KVC_KIND_STAGED & 1)
            kvc_staged_sums(dims, kvc_sums_of(kinds, dims), &side, block, left, p, stage, state, o);
    }
}

/* Adds the contribution of a column's page to the rows of a group. `whole`: blocks whose tokens are visible to all
 * rows. */
KVC_DEVICE void kvc_attend_page(const kvc_call *call, const kvc_row *row, const kvc_page_room *page,
                                const kvc_page_at *at, int whole, const uint32_t kinds, int dims, const kvc_query *q,
                                kvc_stage *stage, kvc_softmax *state, float *o)
{
    float by_page[2] = {0, 0};
    if (page->centred) {
        if (kvc_exact(kinds, dims, &page->key))
            kvc_centroid_scores(dims, at->data + page->mean, dims, q, by_page);
        else
            kvc_centroid_scores(dims, at->data + page->mean, (int)page->key.dim, q, by_page);
    }
    KVC_ONCE for (int block = 0; block * KVC_BLOCK < at->n; block++)
    {
        uint32_t visible = 255;
        if (block >= whole) {
            visible = kvc_visible(call, row, q, at, block);
            if (!kvc_warp_any(visible != 0)) continue;
        }
        kvc_scores of = kvc_any_scores(kinds, dims, page, at, block, q, stage, by_page);
        if (block >= whole || call->a.softcap > 0) kvc_mask_scores(call->a.softcap, visible, &of);
        kvc_soften(state, &of, kvc_sums_of(kinds, dims), o);
        if (call->weights) kvc_keep(call, &page->kept, block, state->m, of.s);
        kvc_any_sums(kinds, dims, page, at, block, block < whole, of.s, stage, state, o);
    }
}

/* First column of a warp that has those from `from` to `end`. If it has sinks, they come last (*sinks), which saves one
 * rotation of the sums. */
KVC_DEVICE int kvc_start(int from, int end, int *sinks)
{
    *sinks = from == 0 && end > 1;
    return *sinks ? 1 : from;
}

/* Finds the row of the block and the columns of its warps. Done by one of its warps, while the others prepare q; blocks
 * of a multiprocessor use different ones. Returns, in lane 8w + g, the g-th entry of warp w if `packs` (packed.cuh): it
 * is loaded while this warp prepares q. */
KVC_DEVICE int64_t kvc_attend_begin(const kvc_call *call, bool packs, kvc_place place, kvc_attend_room *room)
{
    kvc_row row = kvc_row_begin(call, place.b, place.h);
    uint32_t share = KVC_WARPS * 8 / (uint32_t)call->rows, parts = (uint32_t)call->runs * share;
    uint32_t warp = (uint32_t)kvc_lane() >> 3, part = place.run * share + (warp & (share - 1));
    int columns = (int)kvc_row_columns(call, &row), ends = kvc_ends_of((uint32_t)columns, parts, (int)call->raw_ends);
    uint32_t all = (uint32_t)(columns + 2 * ends);
    uint32_t each = all / parts, left = all - each * parts;
    uint32_t more = part == 0 ? 0 : part - 1 < left ? part - 1 : left; /* parts 1 .. left have one column more */
    int from = (int)(each * part + more) - ends, to = from + (int)(each + (part - 1 < left));
    from = from < 0 ? 0 : from < columns ? from : columns;
    to = to < 0 ? 0 : to < columns ? to : columns;
    place.begin = from, place.end = (int)kvc_shuffle((uint32_t)to, 8 * ((int)share - 1));
    from += from == 0 && call->a.store.sinks == 0 && row.used; /* column 0 is empty */
    place.share = (int)share, place.paged = (int)kvc_row_paged(&row);
    if (kvc_lane() == 0) room->row = row, room->place = place;
    if ((kvc_lane() & 7) == 0) room->from[warp] = from, room->to[warp] = to;
    int sinks, start = kvc_start(from, to, &sinks);
    int64_t entry = packs ? kvc_entry_ahead(&row, start + (kvc_lane() & 7), to) : -1;
    if (kvc_lane() < KVC_WARPS) kvc_page_expect(call, place.h, &room->page[kvc_lane()]);
    return entry;
}

/* For a call in which attention writes the one token per row (kvc_call.joined): whether columns [begin, end) contain
 * that token. No other block reads it. */
KVC_DEVICE bool kvc_has_token(const kvc_row *row, int begin, int end)
{
    int c = (int)(row->own_in_pages ? row->filling_column : row->used);
    return c >= begin && c < end;
}
/* Half of the block's warps write K, half V; each thread writes every 64th element. */
KVC_DEVICE void kvc_write_own(const kvc_call *call, const kvc_row *row, const int dims, int b, int h)
{
    const kvc_store *s = &call->a.store;
    int key = kvc_warp() < KVC_WARPS / 2;
    const uint8_t *at = kvc_token_row(call, b, h, key);
    uint32_t i = (uint32_t)(b * (int)s->heads + h), *flags = kvc_thread() & 63 ? NULL : call->flags;
    int64_t c = row->filling_column, entry = c < s->columns ? row->entries[c] : KVC_NONE;
    kvc_token_to to = kvc_token_place(call, i, h, key, c, entry, row->stored, false, flags);
    KVC_UNROLL for (int d = kvc_thread() & 63, k = 0; k < dims / 64; k++, d += 64)
        kvc_put_number(call, key, d, kvc_token_bits(call, at, key, d), to);
}

#define KVC_NOT_ASKED -2 /* value of an entry that was not loaded */

/* The column after c. If there are `sinks`, column 0 comes last. */
KVC_DEVICE int kvc_turn(int c, int *sinks, int *end)
{
    int behind = c + 1, turns = behind >= *end ? *sinks : 0;
    *sinks -= turns, *end = turns ? 1 : *end;
    return turns ? 0 : behind;
}

KVC_DEVICE void kvc_attend_block(const kvc_call *call, const uint32_t kinds, const int dims)
{
    bool staged = call->kinds & kinds & 1u << KVC_KIND_STAGED;
    const kvc_store *st = &call->a.store;
    kvc_attend_room *room = (kvc_attend_room *)kvc_shared;
    const bool packs = kinds & (1u << KVC_KIND_INT2 | 1u << KVC_KIND_INT4);
    const bool finds = kvc_warp() == (kvc_block_x() & (KVC_WARPS - 1));
    kvc_place place = kvc_place_of(call);
    int b = place.b, h = place.h, row0 = place.row0;
    if (b < 0) return;
    int64_t early = finds ? kvc_attend_begin(call, packs, place, room) : -1;
    kvc_queries of = {b, call->a.Tq, (call->seen ? 0 : call->a.seen) + call->a.T - call->a.Tq, call->seen};
    if (call->lists.segments) {
        kvc_barrier();
        of = kvc_row_queries(&room->row);
    }
    kvc_prepare(call, &of, kinds, dims, h, row0, (int)call->rows / 8);
    if (packs && finds) room->eight[kvc_lane() >> 3].early[kvc_lane() & 7] = early;
    kvc_barrier();
    int runs = (int)call->runs;
    int groups = (int)call->rows / 8, warp = kvc_warp(), lane = kvc_lane(), share = room->place.share;
    int group = warp * groups / KVC_WARPS, end = room->to[warp];
    int Dv = (int)st->value_dim;
    if (call->weights) kvc_keep_none(call, b, h, room->place.begin, room->place.end);
    const bool writes = call->joined && kvc_has_token(&room->row, room->place.begin, room->place.end);
    int sinks, start = kvc_start(room->from[warp], end, &sinks);
    if (writes) kvc_write_own(call, &room->row, dims, b, h);
    if (call->weights || writes) kvc_barrier();
    if (packs) {
        room->eight[warp].first = start;
        kvc_warp_barrier();
    }

    kvc_query *q = kvc_group_query(call, group);
    kvc_stage *stage = NULL;
    if (staged) stage = (kvc_stage *)((uint8_t *)kvc_group_query(call, groups) + warp * kvc_stage_bytes(dims));
    /* Kernels that would spill h and the pipe's address read or compute them where they are used. With 8 bits alone
     * this would be 10 to 22 more instructions per page, with 2 bits alone 2 or 3 more per warp. */
    const bool lean = kinds >> KVC_KIND_INT4 & 1 || !(kinds & ~KVC_RAW_KINDS);
    uint8_t *pipe = (uint8_t *)kvc_group_query(call, groups) + warp * call->pipe; /* used if nothing is staged */
    kvc_softmax state = {{KVC_NO_MAX, KVC_NO_MAX}, {0, 0}, 1};
    KVC_UNROLL for (int i = 0; i < 2; i++) if (q->nonfinite >> (2 * (lane & 3) + i) & 1) state.l[i] = NAN;
    float o[KVC_CUDA_DIM / 4 + KVC_MIDDLES];
    KVC_UNROLL for (int x = 0; x < dims / 4 + KVC_MIDDLES; x++) o[x] = 0;
    kvc_page_room *page = &room->page[warp];
    kvc_seen_by seen = kvc_seen_by_all(call, &room->row, q);
    int rotated = 0; /* the space of o */
    int64_t first = packs ? room->eight[warp].early[0] : kvc_entry_ahead(&room->row, start, end);
    const bool middles = kvc_sums_of(kinds, dims) > dims / 4;
    int owed = 0; /* number of pages whose code middles have not been subtracted yet */
    int64_t next = packs ? KVC_NOT_ASKED : kvc_entry_ahead(&room->row, start + 1, end); /* entry of column c + 1 */
    uint8_t *known = kvc_page_known(page, first);
    KVC_ONCE for (int c = start; c < end; c = kvc_turn(c, &sinks, &end))
    {
        int64_t given = packs && c == start ? room->eight[warp].early[0] : -1;
        kvc_page_at at = kvc_page_begin(call, &room->row, call->kinds & kinds, lean ? room->place.h : h, c,
                                        room->place.paged, known, given, page);
        int64_t entry = next;
        if (!packs) next = kvc_entry_ahead(&room->row, c + 2, end);
        known = NULL;
        if (!at.data) {
            if (packs) next = KVC_NOT_ASKED;
            continue;
        }
        if (middles && owed && (owed == KVC_SETTLE || page->rotated != rotated)) kvc_settle(dims, o), owed = 0;
        if (page->rotated != rotated && kvc_has_begun(&state)) kvc_rotate_sums(dims, Dv, o);
        rotated = page->rotated;
        int packed = kvc_takes_packed(call, kinds, dims, page), behind = c;
        if (packed == 4 && kinds >> KVC_KIND_INT4 & 1)
            behind = kvc_packed_pages(4, call, &room->row, page, &seen, room->place.paged, dims, c, end, q,
                                      kvc_sums_of(kinds, dims), &state, o);
        if (packed == 2 && kinds >> KVC_KIND_INT2 & 1)
            behind = kvc_packed_pages(2, call, &room->row, page, &seen, room->place.paged, dims, c, end, q,
                                      kvc_sums_of(kinds, dims), &state, o);
        if (behind > c) {
            c = behind - 1, next = KVC_NOT_ASKED;
            continue;
        }
        if (packs) {
            if (entry == KVC_NOT_ASKED) entry = kvc_entry_ahead(&room->row, c + 1, end);
            next = kvc_entry_ahead(&room->row, c + 2, end);
        }
        if (kvc_takes_piped(call, kinds, dims, page, &at, &seen)) {
            if (lean) pipe = (uint8_t *)kvc_group_query(call, (int)call->rows / 8) + kvc_warp() * call->pipe;
            behind = kvc_any_piped(kinds, call, &room->row, page, &seen, room->place.paged, dims, c, end, at.data,
                                   entry, q, pipe, &state, o);
            c = behind - 1, next = kvc_entry_ahead(&room->row, c + 2, end);
            continue;
        }
        known = kvc_page_known(page, entry);
        if (call->weights) {
            kvc_warp_barrier();
            if (lane == 0) page->kept = kvc_kept_at(call, lean ? room->place.b : b, lean ? room->place.h : h, c);
            kvc_warp_barrier();
        }
        owed += page->rotated;
        int whole = kvc_sees_page(&seen, &at) ? at.n / KVC_BLOCK : 0;
        kvc_attend_page(call, &room->row, page, &at, whole, kinds, dims, q, stage, &state, o);
    }
    if (middles && owed) kvc_settle(dims, o);
    KVC_UNROLL for (int i = 0; i < 2; i++) if (state.m[i] == KVC_NO_MAX) state.m[i] = -INFINITY;

    if (lane < 4) KVC_UNROLL for (int i = 0; i < 2; i++) room->m[2 * lane + i][warp] = state.m[i];
    if (lane == 0) room->rotated[warp] = rotated;
    kvc_barrier();
    place = room->place; /* reloaded from shared memory, so that no registers hold it during the loop */
    b = place.b, h = place.h, row0 = place.row0, share = place.share, group = warp * groups / KVC_WARPS;
    float *from = call->partial + (int64_t)place.line * runs * (call->rows * (Dv + 2));
    float *to = runs > 1 ? from + place.run * (call->rows * (Dv + 2)) : NULL;
    float *sum = kvc_warp_sums(call, dims, warp), top[2] = {-INFINITY, -INFINITY}, weight[2];
    kvc_quad tops[2];
    KVC_UNROLL for (int i = 0; i < 2; i++) tops[i] = kvc_load_quad(room->m[2 * (lane & 3) + i]);
    KVC_UNROLL for (int w = 0; w < KVC_WARPS; w++)
    {
        if (w < group * share || w >= (group + 1) * share) continue;
        KVC_UNROLL for (int i = 0; i < 2; i++) top[i] = fmaxf(top[i], kvc_f32_of_bits(tops[i].w[w]));
    }
    KVC_UNROLL for (int i = 0; i < 2; i++)
    {
        weight[i] = kvc_weight_of(state.m[i], top[i]);
        float l = kvc_rows_sum(state.l[i]) * weight[i];
        if (lane < 4) room->l[2 * lane + i][warp] = l;
        weight[i] *= state.unit;
    }
    KVC_UNROLL for (int x = 0; x < dims / 16; x++) /* four dims of a row */
    {
        int m = x >> 1, i = x & 1, d = 32 * m + 4 * (lane >> 2), n = 2 * (lane & 3) + i;
        kvc_quad y;
        KVC_UNROLL for (int k = 0; k < 4; k++) y.w[k] = kvc_f32_bits(o[8 * m + 2 * k + i] * weight[i]);
        kvc_store_quad(sum + n * kvc_sums_row(dims) + d, y);
    }
    kvc_barrier();
    KVC_ONCE for (int n = kvc_half(); n < 8 * groups; n += KVC_WARPS * 2)
    {
        if (row0 + (n & ~1) >= (int)(room->row.queries * call->group)) continue;
        if (Dv == dims)
            kvc_finish_row(call, dims, true, b, h, row0, n, share, to);
        else
            kvc_finish_row(call, dims, false, b, h, row0, n, share, to);
    }
    if (runs > 1 && kvc_comes_last(call->done + place.line, runs, room->words))
        kvc_combine(call, &room->row, dims, b, h, row0, from);
}

#define KVC_ATTEND_KERNEL(name, kinds, dims, blocks)                                                                   \
    KVC_KERNEL(kvc_attend_##name##_##dims, kvc_call, 32 * KVC_WARPS, blocks) { kvc_attend_block(&a, kinds, dims); }

#endif
