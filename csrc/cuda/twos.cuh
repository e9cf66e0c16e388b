/* twos.cuh - pages of 2 bits that all rows see whole, which is nearly all of a long row: little is left of such a page when its
 * words are unpacked, so what surrounds them is done for eight pages at once, and a page 64 tokens at a time. Eight lanes of a warp
 * look up an entry each; the mean keys of the eight pages are the columns of one MMA.
 *
 * Of 64 tokens lane 4g + t loads tokens 4s + 2 (g % 2) and the next, s = 0 .. 3, of tile g / 2 (K: words 4w + t), which are rows
 * g and g + 8 of four MMAs; of V the words of tile t. Weights of two rows in a register become B fragments by `kvc_transpose`:
 * MMA s sums up plane s of all four tiles.
 *
 * The maximum of a row moves when the weights that a lane has of it add up to more than 2^8 (attend.cuh looks at scores). K's scales,
 * the row's unit and log2 e are one factor; V's scales are multiplied into fp16 weights, in the unit of the sums.
 *
 * Cost for 64 tokens of D dims: D / 16 loads of 8 bytes a lane and D / 32 of 16, 8 of scales, 9 D / 4 to unpack, D / 2 MMAs, 4 for the
 * middles, 8 transposes; a page an eighth of 3 D / 16 for its mean. */
#ifndef KVC_TWOS_CUH
#define KVC_TWOS_CUH

#include "finish.cuh"

#define KVC_EIGHT 8
#define KVC_WEIGHTS_MOST 256.f

/* What stays from page to page. */
typedef struct kvc_twos {
    int32_t k, v, k_meta, v_meta; /* the lane's in a page */
    float by[2], plus[2];         /* of scores, times log2 e */
    uint32_t inverse, limit;      /* of the unit of the sums: fp16 twice; scales that it takes */
    uint32_t most;                /* V's scales of the lane in the last 64 tokens, two by two */
} kvc_twos;

/* Has the kernel this way, and does the warp's pair take it? */
KVC_DEVICE bool kvc_takes_twos(const kvc_call *call, const uint32_t kinds, int dims, const kvc_page_room *page)
{
    if (!(kinds >> KVC_KIND_INT2 & 1) || kinds >> KVC_KIND_STAGED & 1 || dims > 128) return false;
    return page->key_kind == KVC_KIND_INT2 && page->value_kind == KVC_KIND_INT2 && page->pair >= 0 &&
           page->key.dim == dims && page->value.dim == dims && page->key.tokens % 64 == 0 && !call->weights &&
           !(call->a.softcap > 0);
}

/* Of columns c, c + share, .. lane 4g + t looks up the g-th: where its page lies. How many, from the first on, are of the warp's
 * pair, full, and seen whole. */
KVC_DEVICE int kvc_eight_pages(const kvc_call *call, const kvc_row *row, const kvc_page_room *page,
                               const kvc_seen_by *seen, int paged, int c, int share, int end, uint32_t *at)
{
    int g = kvc_lane() >> 2, size = (int)call->a.store.page_size;
    int mine = c + g * share, first = (int)call->a.store.sinks + (mine - 1) * size;
    bool there = mine < end && mine < row->plain_end && mine != row->not_plain && mine > 0 && first >= seen->begin &&
                 first + size <= seen->end && first + size <= paged;
    int64_t entry = there ? row->entries[mine] : -1;
    there = entry >= 0 && (int)(entry & 0xffff) == page->pair && kvc_entry_offset(entry) <= page->most;
    *at = (uint32_t)(entry >> 16);
    return KVC_EIGHT - (int)kvc_warp_most(there ? 0 : (uint32_t)(KVC_EIGHT - g));
}

/* q . mean of the eight pages, times log2 e: of pages 2t and 2t + 1 for row g. */
KVC_DEVICE void kvc_eight_means(int dims, const uint8_t *mean, const kvc_query *q, float dot[2])
{
    const kvc_quad *fragments = (const kvc_quad *)((const uint8_t *)q + q->at[KVC_FORM_MEAN]) + kvc_lane();
    float sum[4] = {0, 0, 0, 0}, step = q->step[KVC_FORM_MEAN][kvc_lane() >> 2] * KVC_LOG2E;
    uint64_t word[8];
    KVC_UNROLL for (int s = 0; s < dims / 16; s++) word[s] = kvc_load_pair(mean + 32 * s + 8 * (kvc_lane() & 3));
    KVC_UNROLL for (int s = 0; s < dims / 16; s++)
    {
        kvc_quad a = kvc_load_quad(fragments + 32 * s);
        uint32_t b[2] = {(uint32_t)word[s], (uint32_t)(word[s] >> 32)};
        kvc_mma_f16(sum, a.w, b);
    }
    KVC_UNROLL for (int i = 0; i < 2; i++) dot[i] = (sum[i] + sum[2 + i]) * step;
}

/* The unit that the sums are in, as fp16 wants it: 2^-15 at least. */
KVC_DEVICE void kvc_twos_unit(const kvc_softmax *state, kvc_twos *twos)
{
    float unit = state->unit * KVC_GRAIN;
    twos->inverse = twos->limit = 0; /* none yet */
    if (unit < 0x1p-15f || unit > 0x1p14f) return;
    twos->inverse = kvc_pack_f16(1 / unit, 1 / unit);
    twos->limit = kvc_pack_f16(fminf(128 * unit, 65504.f), 0);
}

/* The sums' unit follows V's scales, of which `most` is the largest. */
KVC_DEVICE void kvc_twos_follow(float most, int sums, kvc_softmax *state, float *o, kvc_twos *twos)
{
    float unit = fmaxf(kvc_f32_of_bits(kvc_f32_bits(most) & 0x7f800000) * (1.f / 64), 0x1p-15f);
    kvc_change_unit(state, unit * (1 / KVC_GRAIN), sums, o);
    kvc_twos_unit(state, twos);
}
KVC_DEVICE float kvc_twos_most(const kvc_twos *twos)
{
    return kvc_warp_max(fmaxf(kvc_widen(twos->most, 0), kvc_widen(twos->most, 1)));
}

/* Scores of 64 tokens, sum[s][2e + i]: token 4s + 2 (g % 2) + e of tile g / 2, row 2t + i. `k`: the lane's words. */
KVC_DEVICE void kvc_twos_scores(int dims, const uint8_t *k, const kvc_query *q, float sum[4][4])
{
    const kvc_quad *fragments = (const kvc_quad *)((const uint8_t *)q + q->at[KVC_FORM_INT2]) + kvc_lane();
    float base[4];
    uint64_t word[2][4];
    kvc_quad both = {}, middle = kvc_load_quad(q->base[KVC_FORM_INT2 - KVC_FORM_INT4][kvc_lane() & 3]);
    KVC_UNROLL for (int x = 0; x < 4; x++) base[x] = kvc_f32_of_bits(middle.w[x]);
    KVC_UNROLL for (int w = 0; w < dims / 64; w++) KVC_UNROLL for (int s = 0; s < 4; s++) word[w][s] =
        kvc_load_pair(k + 256 * w + 16 * s);
    KVC_UNROLL for (int w = 0; w < dims / 64; w++) KVC_UNROLL for (int p = 0; p < 4; p++)
    {
        if (p % 2 == 0) both = kvc_load_quad(fragments + 32 * (2 * w + p / 2));
        uint32_t b[2] = {both.w[p % 2 * 2], both.w[p % 2 * 2 + 1]}, mask = kvc_plane_mask(2, p);
        KVC_UNROLL for (int s = 0; s < 4; s++)
        {
            uint32_t x = (uint32_t)word[w][s], y = (uint32_t)(word[w][s] >> 32);
            uint32_t a[4] = {x & mask, y & mask, x >> 8 & mask, y >> 8 & mask};
            if (w == 0 && p == 0)
                kvc_mma_f16_from(sum[s], a, b, base);
            else
                kvc_mma_f16(sum[s], a, b);
        }
    }
}

/* Weights; what the lane has of each row. */
KVC_DEVICE void kvc_twos_weights(const kvc_softmax *state, const kvc_twos *twos, float sum[4][4], const float scale[8],
                                 float p[16], float total[2])
{
    float plus[2];
    KVC_UNROLL for (int i = 0; i < 2; i++)
    {
        plus[i] = fmaf(-state->m[i], KVC_LOG2E, twos->plus[i]);
        total[i] = 0;
    }
    KVC_UNROLL for (int x = 0; x < 16; x++)
    {
        p[x] = kvc_exp2(fmaf(sum[x >> 2][x & 3], scale[x >> 1] * twos->by[x & 1], plus[x & 1]));
        total[x & 1] += p[x];
    }
}

/* The next 64 tokens, whose K, V and metadata of the lane are at `data` + those of twos + `codes` and `meta`. */
KVC_DEVICE void kvc_twos_span(int dims, const uint8_t *data, int codes, int meta, const kvc_query *q, int sums,
                              kvc_twos *twos, kvc_softmax *state, float *o)
{
    float sum[4][4], scale[8], p[16], total[2];
    uint32_t of_k[4], by[4], b[4][2], a[4];
    kvc_quad word[4];
    KVC_UNROLL for (int s = 0; s < 4; s++)
    {
        of_k[s] = kvc_load_word(data + twos->k_meta + meta + 8 * s);
        by[s] = kvc_load_word(data + twos->v_meta + meta + 8 * s);
    }
    kvc_twos_scores(dims, data + twos->k + codes, q, sum);
    KVC_UNROLL for (int x = 0; x < 8; x++) scale[x] = kvc_widen(of_k[x >> 1], x & 1);
    kvc_twos_weights(state, twos, sum, scale, p, total);

    uint32_t most = kvc_most_pair(kvc_most_pair(by[0], by[1]), kvc_most_pair(by[2], by[3]));
    twos->most = most;
    bool heavy = !(total[0] <= KVC_WEIGHTS_MOST && total[1] <= KVC_WEIGHTS_MOST);
    bool wide =
        (most & 0xffff) > twos->limit || most >> 16 > twos->limit; /* bits of what is not negative are in order */
    if (kvc_warp_any(heavy || wide)) {
        bool begun = kvc_has_begun(state);
        if (kvc_warp_any(heavy)) {
            float top[2] = {-INFINITY, -INFINITY};
            KVC_UNROLL for (int x = 0; x < 16; x++) top[x & 1] =
                fmaxf(top[x & 1],
                      fmaf(sum[x >> 2][x & 3], scale[x >> 1] * twos->by[x & 1], twos->plus[x & 1]) * (1 / KVC_LOG2E));
            kvc_raise(state, top, sums, o);
            kvc_twos_weights(state, twos, sum, scale, p, total);
        }
        if (kvc_warp_any(wide)) {
            if (begun)
                kvc_twos_follow(kvc_twos_most(twos), sums, state, o, twos);
            else
                kvc_twos_follow(kvc_twos_most(twos), 0, state, o, twos);
        }
    }
    KVC_UNROLL for (int m = 0; m < dims / 32; m++) word[m] = kvc_load_stream(data + twos->v + codes + 128 * m);
    KVC_UNROLL for (int i = 0; i < 2; i++) state->l[i] += total[i];

    KVC_UNROLL for (int s = 0; s < 4; s++)
    {
        uint32_t plane = 0x3c003c00u - 0x08000800u * s; /* 4^-s: the weight of its codes */
        uint32_t factor = kvc_times_pair(kvc_times_pair(by[s], twos->inverse), plane);
        KVC_UNROLL for (int e = 0; e < 2; e++) b[s][e] =
            kvc_transpose(kvc_times_half(kvc_pack_f16(p[4 * s + 2 * e], p[4 * s + 2 * e + 1]), factor, e));
        KVC_UNROLL for (int r = 0; r < 4; r++) a[r] = (3u << 2 * s) * 0x10001; /* as kvc_middles */
        kvc_mma_f16(o + dims / 4, a, b[s]);
    }
    KVC_UNROLL for (int m = 0; m < dims / 32; m++) KVC_UNROLL for (int i = 0; i < 2; i++)
        KVC_UNROLL for (int s = 0; s < 4; s++)
    {
        uint32_t mask = kvc_plane_mask(2, s);
        KVC_UNROLL for (int r = 0; r < 2; r++)
        {
            a[r] = word[m].w[2 * i + r] & mask;
            a[2 + r] = word[m].w[2 * i + r] >> 8 & mask;
        }
        kvc_mma_f16(o + (2 * m + i) * 4, a, b[s]);
    }
}

/* From column c on, whose page the warp knows: the column behind the pages that were taken. */
KVC_DEVICE int kvc_twos_pages(const kvc_call *call, const kvc_row *row, const kvc_page_room *page,
                              const kvc_seen_by *seen, int paged, int dims, int c, int share, int end,
                              const kvc_query *q, int sums, kvc_softmax *state, float *o)
{
    int lane = kvc_lane(), g = lane >> 2, t = lane & 3, spans = (int)page->key.tokens / 64;
    uint32_t at, then = 0;
    int count = kvc_eight_pages(call, row, page, seen, paged, c, share, end, &at);
    if (count == 0) return c;
    kvc_twos twos;
    int tile = 4 * dims, of_tile = 32 * (g >> 1) + 4 * (g & 1);
    twos.k = tile * (g >> 1) + 64 * t + 8 * (g & 1);
    twos.v = page->v + tile * t + 16 * g;
    twos.k_meta = page->k_meta + of_tile, twos.v_meta = page->v_meta + of_tile;
    twos.most = 0;
    kvc_row_steps(q, KVC_FORM_INT2, twos.by);
    KVC_UNROLL for (int i = 0; i < 2; i++) twos.by[i] *= KVC_LOG2E;
    kvc_twos_unit(state, &twos);
    KVC_ONCE while (count)
    {
        float dot[2];
        int after = 0;
        uint32_t first = kvc_shuffle(at, 0);
        kvc_eight_means(dims, page->base + (uint64_t)(g < count ? at : first) * KVC_ALIGN + page->mean, q, dot);
        KVC_ONCE for (int j = 0; j < count; j++)
        {
            uint32_t now = kvc_shuffle(at, 4 * j), next = kvc_shuffle(at, (4 * j + 4) & 31);
            bool more = j + 1 < count;
            if (!more && count == KVC_EIGHT) {
                after = kvc_eight_pages(call, row, page, seen, paged, c + KVC_EIGHT * share, share, end, &then);
                next = kvc_shuffle(then, 0), more = after > 0;
            }
            if (more) kvc_prefetch(page->base + (uint64_t)next * KVC_ALIGN, page->bytes, lane);
            KVC_UNROLL for (int i = 0; i < 2; i++) twos.plus[i] = kvc_shuffle_f(dot[j & 1], 4 * (2 * t + i) + (j >> 1));
            const uint8_t *data = page->base + (uint64_t)now * KVC_ALIGN;
            KVC_ONCE for (int span = 0; span < spans; span++)
                kvc_twos_span(dims, data, 4 * tile * span, 128 * span, q, sums, &twos, state, o);
        }
        kvc_settle(dims, o);
        float most = kvc_twos_most(&twos);
        if (most > 0 && most * 64 < 128 * KVC_GRAIN * state->unit && state->unit * KVC_GRAIN > 0x1p-15f)
            kvc_twos_follow(most, sums, state, o, &twos);
        c += count * share;
        at = then, count = after;
    }
    return c;
}

#endif
