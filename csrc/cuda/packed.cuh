/* packed.cuh - full pages of 2 or 4 bits that all rows see, which is nearly all of a long row. Once unpacked, little
 * work per page remains, so the overhead is shared: lookups are done for eight pages at once, and a page is processed
 * 64 tokens at a time. Eight lanes of a warp look up one entry each; the mean keys of the eight pages are the columns
 * of one MMA.
 *
 * Of 64 tokens, lane 4g + t loads tokens 4s + 2 (g % 2) and the next, s = 0 .. 3, of tile g / 2 (K: words 4w + t),
 * which are rows g and g + 8 of four MMAs; of V the words of tile t. Weights of two rows in a register become B
 * fragments by `kvc_transpose`; MMA s sums tokens 4s .. 4s + 3 of all four tiles, which are one plane of a word.
 *
 * Loads are issued well before their use: those of K for the next 64 tokens before V's sums, those of V before the
 * weights.
 *
 * The maximum of a row is raised when the weights that a lane has of it sum to more than 2^8 (attend.cuh compares
 * scores). K's scales, the row's unit and log2 e form one factor; V's scales are multiplied into fp16 weights, in the
 * unit of the sums.
 *
 * Cost for 64 tokens of D dims: per lane D * bits / 32 loads of 8 bytes, half as many of 16, 8 of scales; 9 D / 4
 * instructions to unpack (int4: 5 D / 2); D / 2 MMAs, 4 for the middles, 8 transposes; per page an eighth of 3 D / 16
 * for its mean. */
#ifndef KVC_PACKED_CUH
#define KVC_PACKED_CUH

#include "finish.cuh"

#define KVC_WEIGHTS_MOST 256.f

/* State kept from page to page. */
typedef struct kvc_packed {
    int32_t k, v, k_meta, v_meta; /* the lane's offsets in a page */
    float by[2], plus[2];         /* factors of the scores, times log2 e */
    uint32_t inverse, limit;      /* 1 / the unit of the sums, as fp16 twice; largest scale that it allows */
    uint32_t most;                /* the largest of the lane's V scales in the last 64 tokens, two by two */
} kvc_packed;

/* The lane's K words for the next 64 tokens: word[w][s], and scales of two tokens each. */
typedef struct kvc_packed_keys {
    uint64_t word[4][4];
    uint32_t scale[4];
} kvc_packed_keys;

/* The bits of the codes if the kernel has this path and the warp's pair of formats can use it, else 0. */
KVC_DEVICE int kvc_takes_packed(const kvc_call *call, const uint32_t kinds, int dims, const kvc_page_room *page)
{
    if (!(kinds & (1u << KVC_KIND_INT2 | 1u << KVC_KIND_INT4)) || kinds >> KVC_KIND_STAGED & 1 || dims > 128) return 0;
    if (page->key_kind != page->value_kind || page->pair < 0 || page->key.dim != dims || page->value.dim != dims ||
        page->key.tokens % 64 || call->weights || call->a.softcap > 0)
        return 0;
    return page->key_kind == KVC_KIND_INT4 ? 4 : page->key_kind == KVC_KIND_INT2 ? 2 : 0;
}

/* Of columns from c on, lane 4g + t looks up the g-th: returns its entry if the page is full and visible to all rows. */
KVC_DEVICE int64_t kvc_eight_entries(const kvc_call *call, const kvc_row *row, const kvc_eight_room *room,
                                     const kvc_seen_by *seen, int paged, int c, int end)
{
    int g = kvc_lane() >> 2, size = (int)call->a.store.page_size;
    int mine = c + g, first = (int)call->a.store.sinks + (mine - 1) * size;
    bool there = mine < end && mine < row->plain_end && mine != row->not_plain && mine > 0 && first >= seen->begin &&
                 first + size <= seen->end && first + size <= paged;
    if (c == room->first) return there ? room->early[g] : -1;
    return there ? row->entries[mine] : -1;
}
/* Writes the addresses of these pages to `to`; returns how many, from the first on, have the warp's pair of formats. */
KVC_DEVICE int kvc_eight_pages(const kvc_page_room *page, int64_t entry, uint32_t *to)
{
    bool there = entry >= 0 && (int)(entry & 0xffff) == page->pair && kvc_entry_offset(entry) <= page->most;
    int g = kvc_lane() >> 2;
    if ((kvc_lane() & 3) == 0) to[g] = (uint32_t)(entry >> 16);
    kvc_warp_barrier();
    return KVC_EIGHT - (int)kvc_warp_most(there ? 0 : (uint32_t)(KVC_EIGHT - g));
}

/* q . mean of the eight pages, times log2 e. Lanes get those of pages 2t and 2t + 1 for row g. */
KVC_DEVICE void kvc_eight_means(int dims, const uint8_t *mean, const kvc_query *q, float dot[KVC_EIGHT][8])
{
    const kvc_quad *fragments = (const kvc_quad *)((const uint8_t *)q + q->at[KVC_FORM_MEAN]) + kvc_lane();
    float sum[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}}, step = q->step[KVC_FORM_MEAN][kvc_lane() >> 2] * KVC_LOG2E;
    uint64_t word[8];
    KVC_UNROLL for (int s = 0; s < dims / 16; s++) word[s] = kvc_load_pair(mean + 32 * s + 8 * (kvc_lane() & 3));
    KVC_UNROLL for (int s = 0; s < dims / 16; s++)
    {
        kvc_quad a = kvc_load_quad(fragments + 32 * s);
        uint32_t b[2] = {(uint32_t)word[s], (uint32_t)(word[s] >> 32)};
        kvc_mma_f16(sum[s & 1], a.w, b); /* two sums, because each MMA waits for the previous one */
    }
    KVC_UNROLL for (int i = 0; i < 2; i++) dot[2 * (kvc_lane() & 3) + i][kvc_lane() >> 2] =
        (sum[0][i] + sum[1][i] + (sum[0][2 + i] + sum[1][2 + i])) * step;
    kvc_warp_barrier();
}

/* Prepares the unit of the sums for fp16: at least 2^-15. */
KVC_DEVICE void kvc_packed_unit(const kvc_softmax *state, kvc_packed *of)
{
    float unit = state->unit * KVC_GRAIN;
    of->inverse = of->limit = 0; /* none yet */
    if (unit < 0x1p-15f || unit > 0x1p14f) return;
    of->inverse = kvc_pack_f16(1 / unit, 1 / unit);
    of->limit = kvc_pack_f16(fminf(128 * unit, 65504.f), 0);
}

/* Adapts the unit of the sums to V's scales, of which `most` is the largest. */
KVC_DEVICE void kvc_packed_follow(float most, int sums, kvc_softmax *state, float *o, kvc_packed *of)
{
    float unit = fmaxf(kvc_f32_of_bits(kvc_f32_bits(most) & 0x7f800000) * (1.f / 64), 0x1p-15f);
    kvc_change_unit(state, unit * (1 / KVC_GRAIN), sums, o);
    kvc_packed_unit(state, of);
}
KVC_DEVICE float kvc_packed_most(const kvc_packed *of)
{
    return kvc_warp_max(fmaxf(kvc_widen(of->most, 0), kvc_widen(of->most, 1)));
}

/* Issues the loads of words [w0, w1) of K of 64 tokens, and with the first those of the scales; `k`, `meta`: the
 * lane's. */
KVC_DEVICE void kvc_packed_ask(int w0, int w1, const uint8_t *k, const uint8_t *meta, kvc_packed_keys *keys)
{
    KVC_UNROLL for (int w = w0; w < w1; w++) KVC_UNROLL for (int s = 0; s < 4; s++) keys->word[w][s] =
        kvc_load_pair(k + 256 * w + 16 * s);
    if (w0 == 0) KVC_UNROLL for (int s = 0; s < 4; s++) keys->scale[s] = kvc_load_word(meta + 8 * s);
}

/* Scores of 64 tokens, sum[s][2e + i]: token 4s + 2 (g % 2) + e of tile g / 2, row 2t + i. */
KVC_DEVICE void kvc_packed_scores(const int bits, int dims, const kvc_packed_keys *keys, const kvc_query *q,
                                  float sum[4][4])
{
    const int planes = 8 / bits, form = bits == 4 ? KVC_FORM_INT4 : KVC_FORM_INT2;
    const kvc_quad *fragments = (const kvc_quad *)((const uint8_t *)q + q->at[form]) + kvc_lane();
    float base[4];
    kvc_quad both = {}, middle = kvc_load_quad(q->base[form - KVC_FORM_INT4][kvc_lane() & 3]);
    KVC_UNROLL for (int x = 0; x < 4; x++) base[x] = kvc_f32_of_bits(middle.w[x]);
    KVC_UNROLL for (int w = 0; w < dims * bits / 128; w++) KVC_UNROLL for (int p = 0; p < planes; p++)
    {
        if (p % 2 == 0) both = kvc_load_quad(fragments + 32 * ((w * planes + p) / 2));
        uint32_t b[2] = {both.w[p % 2 * 2], both.w[p % 2 * 2 + 1]}, mask = kvc_plane_mask(bits, p);
        KVC_UNROLL for (int s = 0; s < 4; s++)
        {
            uint32_t x = (uint32_t)keys->word[w][s], y = (uint32_t)(keys->word[w][s] >> 32);
            uint32_t a[4] = {x & mask, y & mask, x >> 8 & mask, y >> 8 & mask};
            if (w == 0 && p == 0)
                kvc_mma_f16_from(sum[s], a, b, base);
            else
                kvc_mma_f16(sum[s], a, b);
        }
    }
}

/* Weights, and the lane's sums of each row. */
KVC_DEVICE void kvc_packed_weights(const kvc_softmax *state, const kvc_packed *of, float sum[4][4],
                                   const float scale[8], float p[16], float total[2])
{
    float plus[2];
    KVC_UNROLL for (int i = 0; i < 2; i++)
    {
        plus[i] = fmaf(-state->m[i], KVC_LOG2E, of->plus[i]);
        total[i] = 0;
    }
    KVC_UNROLL for (int x = 0; x < 16; x++)
    {
        p[x] = kvc_exp2(fmaf(sum[x >> 2][x & 3], scale[x >> 1] * of->by[x & 1], plus[x & 1]));
        total[x & 1] += p[x];
    }
}

/* The weights as B fragments, multiplied by V's scales `by`. Also adds the weight of the codes' middles to o. */
KVC_DEVICE void kvc_packed_fragments(const int bits, int dims, const kvc_packed *of, const uint32_t by[4],
                                     const float p[16], uint32_t b[4][2], float *o)
{
    uint32_t a[4];
    KVC_UNROLL for (int s = 0; s < 4; s++)
    {
        /* scaled by the weight of their codes' plane */
        uint32_t plane = 0x3c003c00u - (bits == 4 ? 0x10001000u * (s >> 1) : 0x08000800u * s);
        uint32_t factor = kvc_times_pair(kvc_times_pair(by[s], of->inverse), plane);
        uint32_t twice = bits == 4 ? 15u << 4 * (s >> 1) : 3u << 2 * s; /* as kvc_middles */
        KVC_UNROLL for (int e = 0; e < 2; e++) b[s][e] =
            kvc_transpose(kvc_times_half(kvc_pack_f16(p[4 * s + 2 * e], p[4 * s + 2 * e + 1]), factor, e));
        KVC_UNROLL for (int r = 0; r < 4; r++) a[r] = twice * 0x10001;
        kvc_mma_f16(o + dims / 4, a, b[s]);
    }
}

/* Sums of tokens 4s .. 4s + 3 of each tile. */
KVC_DEVICE void kvc_packed_sums(const int bits, int dims, const int s, const kvc_quad word[4], const uint32_t b[2],
                                float *o)
{
    uint32_t a[4], mask = kvc_plane_mask(bits, bits == 4 ? s >> 1 : s);
    KVC_UNROLL for (int m = 0; m < dims / 32; m++) KVC_UNROLL for (int i = 0; i < 2; i++)
    {
        KVC_UNROLL for (int r = 0; r < 2; r++)
        {
            a[r] = word[m].w[2 * i + r] & mask;
            a[2 + r] = word[m].w[2 * i + r] >> 8 & mask;
        }
        kvc_mma_f16(o + (2 * m + i) * 4, a, b);
    }
}

/* Processes the next 64 tokens. The lane's V and metadata are at `data` + the offsets in `of` + `codes` and `meta`; K's
 * words are in `keys`, which is then refilled from `next`, `next_meta`. `behind`: the next page, of `bytes`, prefetched
 * to L2 if it has 2 bits. */
KVC_DEVICE void kvc_packed_span(const int bits, int dims, const uint8_t *data, int codes, int meta, const uint8_t *next,
                                const uint8_t *next_meta, const uint8_t *behind, int bytes, const kvc_query *q,
                                int sums, kvc_packed *of, kvc_packed_keys *keys, kvc_softmax *state, float *o)
{
    float sum[4][4], scale[8], p[16], total[2];
    uint32_t by[4], b[4][2];
    kvc_quad word[2][4];
    KVC_UNROLL for (int s = 0; s < 4; s++) by[s] = kvc_load_word(data + of->v_meta + meta + 8 * s);
    kvc_packed_scores(bits, dims, keys, q, sum);
    if (bits == 2) kvc_prefetch(behind, bytes, kvc_lane()); /* with more bits, L2 cannot hold a page for every warp */
    const uint8_t *v = data + of->v + codes;
    KVC_UNROLL for (int m = 0; m < dims / 32; m++) word[0][m] = kvc_load_stream(v + 128 * m);
    KVC_UNROLL for (int x = 0; x < 8; x++) scale[x] = kvc_widen(keys->scale[x >> 1], x & 1);
    kvc_packed_weights(state, of, sum, scale, p, total);

    uint32_t most = kvc_most_pair(kvc_most_pair(by[0], by[1]), kvc_most_pair(by[2], by[3]));
    of->most = most;
    bool heavy = !(total[0] <= KVC_WEIGHTS_MOST && total[1] <= KVC_WEIGHTS_MOST);
    /* bits of non-negative numbers compare like integers */
    bool wide = (most & 0xffff) > of->limit || most >> 16 > of->limit;
    if (kvc_warp_any(heavy || wide)) {
        bool begun = kvc_has_begun(state);
        if (kvc_warp_any(heavy)) {
            float top[2] = {-INFINITY, -INFINITY};
            KVC_UNROLL for (int x = 0; x < 16; x++) top[x & 1] = fmaxf(
                top[x & 1], fmaf(sum[x >> 2][x & 3], scale[x >> 1] * of->by[x & 1], of->plus[x & 1]) * (1 / KVC_LOG2E));
            kvc_raise(state, top, sums, o);
            kvc_packed_weights(state, of, sum, scale, p, total);
        }
        if (kvc_warp_any(wide)) {
            if (begun)
                kvc_packed_follow(kvc_packed_most(of), sums, state, o, of);
            else
                kvc_packed_follow(kvc_packed_most(of), 0, state, o, of);
        }
    }
    KVC_UNROLL for (int i = 0; i < 2; i++) state->l[i] += total[i];
    if (bits == 4) KVC_UNROLL for (int m = 0; m < dims / 32; m++) word[1][m] = kvc_load_stream(v + 4 * dims + 128 * m);
    kvc_packed_fragments(bits, dims, of, by, p, b, o);
    const int words = dims * bits / 128, half = words / 2;
    kvc_packed_ask(0, half, next, next_meta, keys);
    KVC_UNROLL for (int s = 0; s < 4; s += bits / 2) kvc_packed_sums(bits, dims, s, word[0], b[s], o);
    kvc_packed_ask(half, words, next, next_meta, keys);
    if (bits == 4) KVC_UNROLL for (int s = 1; s < 4; s += 2) kvc_packed_sums(bits, dims, s, word[1], b[s], o);
}

/* Processes pages from column c on, whose page is already known. Returns the column after the last page taken. */
KVC_DEVICE int kvc_packed_pages(const int bits, const kvc_call *call, const kvc_row *row, const kvc_page_room *page,
                                const kvc_seen_by *seen, int paged, int dims, int c, int end, const kvc_query *q,
                                int sums, kvc_softmax *state, float *o)
{
    int lane = kvc_lane(), g = lane >> 2, t = lane & 3, spans = (int)kvc_warp_most((uint32_t)page->key.tokens / 64);
    kvc_eight_room *room = &((kvc_attend_room *)kvc_shared)->eight[kvc_warp()];
    int from = 0, count = kvc_eight_pages(page, kvc_eight_entries(call, row, room, seen, paged, c, end), room->at);
    if (count == 0) return c;
    kvc_packed of;
    kvc_packed_keys keys;
    const int tile = 2 * bits * dims, of_tile = 32 * (g >> 1) + 4 * (g & 1);
    of.k = tile * (g >> 1) + 64 * t + 8 * (g & 1);
    of.v = page->v + tile * t + 16 * g;
    of.k_meta = page->k_meta + of_tile, of.v_meta = page->v_meta + of_tile;
    of.most = 0;
    const uint8_t *data = page->base + (uint64_t)room->at[0] * KVC_ALIGN;
    kvc_packed_ask(0, dims * bits / 128, data + of.k, data + of.k_meta, &keys);
    if (bits == 2) kvc_prefetch(data, page->bytes, lane);
    kvc_row_steps(q, bits == 4 ? KVC_FORM_INT4 : KVC_FORM_INT2, of.by);
    KVC_UNROLL for (int i = 0; i < 2; i++) of.by[i] *= KVC_LOG2E;
    kvc_packed_unit(state, &of);
    KVC_ONCE while (count)
    {
        int after = 0;
        int64_t entry = -1; /* of the eight pages after */
        if (count == KVC_EIGHT) entry = kvc_eight_entries(call, row, room, seen, paged, c + KVC_EIGHT, end);
        kvc_eight_means(dims, page->base + (uint64_t)room->at[from + (g < count ? g : 0)] * KVC_ALIGN + page->mean, q,
                        room->dot);
        if (count == KVC_EIGHT) after = kvc_eight_pages(page, entry, room->at + (from ^ KVC_EIGHT));
        int last = count - (after == 0);
        KVC_ONCE for (int j = 0; j < count; j++)
        {
            uint32_t next_at = room->at[(from + j + (j < last)) & (2 * KVC_EIGHT - 1)];
            const uint8_t *behind = page->base + (uint64_t)next_at * KVC_ALIGN;
            KVC_UNROLL for (int i = 0; i < 2; i++) of.plus[i] = room->dot[j][2 * t + i];
            int span = 0;
            do {
                bool more = ++span < spans; /* K of the next 64 tokens: of this page, or of the next */
                const uint8_t *next = more ? data + 4 * tile * span : behind;
                kvc_packed_span(bits, dims, data, 4 * tile * (span - 1), 128 * (span - 1), next + of.k,
                                (more ? data + 128 * span : behind) + of.k_meta, behind, page->bytes, q, sums, &of,
                                &keys, state, o);
            } while (span < spans);
            data = behind;
        }
        kvc_settle(dims, o);
        float most = kvc_packed_most(&of);
        if (most > 0 && most * 64 < 128 * KVC_GRAIN * state->unit && state->unit * KVC_GRAIN > 0x1p-15f)
            kvc_packed_follow(most, sums, state, o, &of);
        c += count;
        from ^= KVC_EIGHT, count = after;
    }
    return c;
}

#endif
