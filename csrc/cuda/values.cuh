/* values.cuh - O^T += V^T P for 32 tokens and 8 query rows, by one warp: V's words as A fragments, P as B.
 *
 * A lane's weights are distributed as in keys.cuh: w[2e + i], token 4c + e of tile u, row 2t + i. A word of V holds the
 * same four tokens, so a lane packs its four weights into words, and B fragments are obtained by shuffles. Lane 4g + t
 * sums dims 32m + 4g + 2i + r of rows 2t, 2t + 1 in o[m][i][2r], o[m][i][2r + 1]: a 16-byte load provides four dims.
 *
 * Scales of V per token are multiplied into the weights, relative to `unit`, a power of two in which the sums are kept.
 * It follows the scales that a warp encounters, so that weights fit fp16 and sums continue from block to block without
 * conversion. Below 8 bits, codes are used as subnormals including their middle (keys.cuh); an extra MMA per step sums
 * the weights times twice the middle, next to the other sums in o, and kvc_settle subtracts them.
 *
 * Cost for 32 tokens of D dims: D * bits / 64 loads of 16 bytes per lane (int2: D / 16, half of them duplicates), D / 8
 * MMAs, 8 shuffles, and unpacking as in keys.cuh. */
#ifndef KVC_VALUES_CUH
#define KVC_VALUES_CUH

#include "keys.cuh"

typedef struct kvc_softmax {
    float m[2], l[2]; /* of rows 2t, 2t + 1; l: the lane's part */
    float unit;       /* unit of the sums o */
} kvc_softmax;

/* Maximum over all g for rows 2t, 2t + 1, which lanes 4g + t share. */
KVC_DEVICE float kvc_rows_max(float x)
{
    KVC_UNROLL for (int h = 4; h < 32; h *= 2) x = fmaxf(x, kvc_shuffle_xor_f(x, h));
    return x;
}
KVC_DEVICE float kvc_rows_sum(float x)
{
    KVC_UNROLL for (int h = 4; h < 32; h *= 2) x += kvc_shuffle_xor_f(x, h);
    return x;
}

#define KVC_LOG2E 1.4426950408889634f
#define KVC_NO_MAX -1e38f /* maximum of a row that has seen no token */
/* Whether the sums of any row have a contribution. Called by the whole warp. */
KVC_DEVICE bool kvc_has_begun(const kvc_softmax *state)
{
    return kvc_warp_any(state->m[0] != KVC_NO_MAX || state->m[1] != KVC_NO_MAX);
}

/* Raises a row's maximum and rescales its sums. */
KVC_DEVICE void kvc_raise(kvc_softmax *state, const float top[2], int sums, float *o)
{
    float keep[2];
    bool begun = kvc_has_begun(state);
    KVC_UNROLL for (int i = 0; i < 2; i++)
    {
        float m = fmaxf(state->m[i], kvc_rows_max(top[i]));
        keep[i] = m == state->m[i] ? 1 : kvc_exp2((state->m[i] - m) * KVC_LOG2E);
        state->m[i] = m;
        state->l[i] *= keep[i];
    }
    if (begun) KVC_UNROLL for (int x = 0; x < sums; x++) o[x] *= keep[x & 1];
}

/* A block's scores: s[2e + i] * by[i] + plus[i]; by > 0. */
typedef struct kvc_scores {
    float s[8], by[2], plus[2];
} kvc_scores;

/* Replaces scores by weights. m is an earlier maximum; it is raised only if a score exceeds it by KVC_SLACK, so weights
 * stay below 2^8. */
#define KVC_SLACK 5.5f
KVC_DEVICE void kvc_soften(kvc_softmax *state, kvc_scores *of, int sums, float *o)
{
    float top[2], by[2], plus[2], *s = of->s;
    KVC_UNROLL for (int i = 0; i < 2; i++) top[i] =
        fmaf(fmaxf(fmaxf(s[i], s[2 + i]), fmaxf(s[4 + i], s[6 + i])), of->by[i], of->plus[i]);
    if (kvc_warp_any(top[0] > state->m[0] + KVC_SLACK || top[1] > state->m[1] + KVC_SLACK))
        kvc_raise(state, top, sums, o);
    KVC_UNROLL for (int i = 0; i < 2; i++)
    {
        by[i] = of->by[i] * KVC_LOG2E;
        plus[i] = (of->plus[i] - state->m[i]) * KVC_LOG2E;
    }
    KVC_UNROLL for (int x = 0; x < 8; x++)
    {
        s[x] = kvc_exp2(fmaf(s[x], by[x & 1], plus[x & 1]));
        state->l[x & 1] += s[x];
    }
}

/* The word with tokens of (tile u, chunk c) for row g, from the lane that has it: word[i] for row 2t + i. */
KVC_DEVICE uint32_t kvc_take(const uint32_t word[2], int u, int c)
{
    int g = kvc_lane() >> 2, from = (4 * u + c) * 4 + (g >> 1);
    uint32_t even = kvc_shuffle(word[0], from), odd = kvc_shuffle(word[1], from);
    return g & 1 ? odd : even;
}

/* Mask of the first n elements of `bits` bits in a word. */
KVC_DEVICE uint32_t kvc_first(int n, int bits)
{
    return n * bits >= 32 ? 0xffffffff : n <= 0 ? 0 : (1u << (n * bits)) - 1;
}

/* B fragment words of the weights w as fp16 (bf16): b[k step][register]. */
KVC_DEVICE void kvc_weight_fragments(int kind, const float w[8], uint32_t b[2][2])
{
    int t = kvc_lane() & 3;
    const bool planes = kvc_kind_bits(kind) < 8;
    KVC_UNROLL for (int r = 0; r < 2; r++)
    {
        uint32_t word[2]; /* tokens 2r and 2r + 1; or those of bytes r and r + 2 if a word has planes */
        KVC_UNROLL for (int i = 0; i < 2; i++)
        {
            float first = planes ? w[2 * r + i] : w[4 * r + i],
                  second = w[4 * (planes ? 1 : r) + (planes ? 2 * r : 2) + i];
            word[i] = kind == KVC_KIND_BF16 ? kvc_pack_bf16(first, second) : kvc_pack_f16(first, second);
        }
        KVC_UNROLL for (int s = 0; s < 2; s++)
        {
            if (!planes) b[s][r] = kvc_take(word, s, t);
            if (kind == KVC_KIND_INT4) b[s][r] = kvc_take(word, t >> 1, 2 * s + (t & 1));
            if (kind == KVC_KIND_INT2) b[s][r] = kvc_take(word, t >> 1, 2 * (t & 1) + s);
        }
    }
}

/* o: sums of the lane's dims, then KVC_MIDDLES sums of the middles still to be subtracted, doubled, by column. They are
 * subtracted every few pages, so that the sums do not grow much larger than their result. */
#define KVC_MIDDLES 4
#define KVC_SETTLE 4
KVC_INLINE int kvc_sums_of(uint32_t kinds, int dims)
{
    return dims / 4 + (kinds & (1u << KVC_KIND_INT4 | 1u << KVC_KIND_INT2) ? KVC_MIDDLES : 0);
}
KVC_DEVICE void kvc_settle(int dims, float *o)
{
    float middle[2] = {o[dims / 4] * .5f, o[dims / 4 + 1] * .5f};
    KVC_UNROLL for (int x = 0; x < dims / 4; x++) o[x] -= middle[x & 1];
    KVC_UNROLL for (int x = 0; x < KVC_MIDDLES; x++) o[dims / 4 + x] = 0;
}

/* A fragment of k step s. 8 bits and more: tile s; int4: plane s of the lane's word; int2: the lane's planes 2 (t % 2)
 * + s. */
KVC_DEVICE void kvc_unpack_values(int kind, const kvc_quad v[2][2], int i, int s, uint32_t a[4])
{
    if (kvc_kind_bits(kind) >= 8) kvc_unpack(kind, v[s], i, 0, a);
    if (kind == KVC_KIND_INT4) kvc_unpack(kind, v[0], i, s, a);
    if (kind != KVC_KIND_INT2) return;
    uint32_t mask = kvc_plane_mask(2, s) << 4 * (kvc_lane() & 1);
    KVC_UNROLL for (int r = 0; r < 2; r++)
    {
        uint32_t x = v[0][0].w[2 * i + r];
        a[r] = x & mask;
        a[2 + r] = x >> 8 & mask;
    }
}

/* The same for the constant 2 * middle, as subnormals. Not -2 * middle: ptxas 12.4 loses the sign of such constants
 * when it copies them into the registers of an MMA. */
KVC_DEVICE void kvc_middles(int kind, int s, uint32_t a[4])
{
    uint32_t twice = kind == KVC_KIND_INT4 ? 15u << 4 * s : 3u << (2 * s + 4 * (kvc_lane() & 1));
    KVC_UNROLL for (int r = 0; r < 4; r++) a[r] = twice * 0x10001;
}

/* w: weights as MMA operands. tile[2]: those of the block. Tokens from `left` on may hold anything; floats become 0. */
KVC_DEVICE void kvc_value_tiles(int kind, int dims, const bool exact, const uint8_t *const tile[2], int dim,
                                const int from, int left, const float w[8], float *o)
{
    int t = kvc_lane() & 3, g = kvc_lane() >> 2;
    const int bits = kvc_kind_bits(kind), each = bits == 16 ? 2 : 1; /* rows of words per step */
    const int tiles = bits < 8 ? 1 : 2;                              /* below 8 bits, lanes t share them */
    int word = bits >= 8 ? each * t : bits == 4 ? t & 1 : 0;
    const uint8_t *lane_words = kvc_piped(kind, dims, false, tile[0], each * t * (dims / 4) + g);
    uint32_t b[2][2], a[4];
    kvc_weight_fragments(kind, w, b);
    KVC_UNROLL for (int s = 0; s < 2; s++) if (bits < 8)
    {
        kvc_middles(kind, s, a);
        kvc_mma_f16(o + dims / 4, a, b[s]);
    }
    KVC_UNROLL for (int m0 = 0; m0 < dims / 32; m0 += 2) /* 2 to 8 loads at once */
    {
        kvc_quad v[2][2][2];
        KVC_UNROLL for (int m = 0; m < 2; m++) KVC_UNROLL for (int u = 0; u < tiles; u++)
            KVC_UNROLL for (int r = 0; r < each; r++)
        {
            int d = 32 * (m0 + m) + 4 * g;
            if (!exact && d >= dim) d = 0; /* sums of dims past the end are discarded */
            const uint8_t *at = (tiles == 2 ? tile[u] : t >> 1 ? tile[1] : tile[0]) + 4 * ((word + r) * dim + d);
            if (from == KVC_IN_PIPE) at = lane_words + 4 * (4 * each * u + r) * dims + 128 * (m0 + m);
            v[m][u][r] = kvc_load_words(kind, from, at);
        }
        if (left < KVC_BLOCK && bits >= 8) {
            KVC_UNROLL for (int u = 0; u < 2; u++) KVC_UNROLL for (int r = 0; r < each; r++)
            {
                uint32_t mask = kvc_first(left - 16 * u - 4 * t - 2 * r, bits);
                KVC_UNROLL for (int m = 0; m < 2; m++) KVC_UNROLL for (int i = 0; i < 4; i++) v[m][u][r].w[i] &= mask;
            }
        }
        KVC_UNROLL for (int m = 0; m < 2; m++) KVC_UNROLL for (int i = 0; i < 2; i++)
            KVC_UNROLL for (int s = 0; s < 2; s++)
        {
            kvc_unpack_values(kind, v[m], i, s, a);
            float *to = o + ((m0 + m) * 2 + i) * 4;
            if (kind == KVC_KIND_BF16)
                kvc_mma_bf16(to, a, b[s]);
            else
                kvc_mma_f16(to, a, b[s]);
        }
    }
}

/* Changes the unit of the sums, a power of two. */
KVC_DEVICE void kvc_change_unit(kvc_softmax *state, float unit, int sums, float *o)
{
    float by = state->unit / unit;
    state->unit = unit;
    KVC_UNROLL for (int x = 0; x < sums; x++) o[x] *= by;
}

/* Weights p times V's scales, in units of the sums, for codes of this many bits. Scales must be below 128 units, since
 * p can reach 2^8 and fp16 2^16, and not all below 128 / `room`, so that small weights keep precision. `all`: no
 * missing tokens, whose scales may be NaN. */
KVC_DEVICE void kvc_scaled_weights(int bits, const bool all, const float p[8], float scale[4], float room,
                                   kvc_softmax *state, int sums, float *o, float w[8])
{
    const float grain = bits < 8 ? KVC_GRAIN : 1;
    float unit = state->unit * grain;
    KVC_UNROLL for (int e = 0; e < 4; e++) if (!all && !(p[2 * e] > 0) && !(p[2 * e + 1] > 0)) scale[e] = 0;
    float most = kvc_warp_max(fmaxf(fmaxf(scale[0], scale[1]), fmaxf(scale[2], scale[3])));
    if (most > 0 && (most > 128 * unit || most * room < 128 * unit)) {
        unit = kvc_f32_of_bits(kvc_f32_bits(most) & 0x7f800000) * (1.f / 64);
        kvc_change_unit(state, unit / grain, sums, o);
    }
    uint32_t inverse = 0x7f000000 - kvc_f32_bits(unit); /* 1 / unit, which is a power of two */
    if (bits < 8) {                                     /* and the weight of the plane that holds the lane's tokens */
        int c = kvc_lane() >> 2 & 3;
        inverse -= (uint32_t)(bits * (2 * c / bits)) << 23;
    }
    KVC_UNROLL for (int x = 0; x < 8; x++) w[x] = p[x] * (scale[x >> 1] * kvc_f32_of_bits(inverse));
}

/* o += V of a block's tiles, weighted by p, with `scales` of the lane's tokens. */
KVC_DEVICE void kvc_weighed_sums(int kind, int dims, const bool exact, int sums, const uint8_t *const tile[2], int dim,
                                 const int from, int left, int all, uint64_t scales, const float p[8],
                                 kvc_softmax *state, float *o)
{
    const int bits = kvc_kind_bits(kind);
    float scale[4], w[8];
    if (bits == 16) {
        if (state->unit != 1) kvc_change_unit(state, 1, sums, o);
        kvc_value_tiles(kind, dims, exact, tile, dim, from, left, p, o);
        return;
    }
    KVC_UNROLL for (int e = 0; e < 4; e++) scale[e] =
        kvc_token_scale(scales, e) * (kind == KVC_KIND_E4M3 ? KVC_E4M3_UNIT : 1);
    if (all)
        kvc_scaled_weights(bits, true, p, scale, 64, state, sums, o, w);
    else
        kvc_scaled_weights(bits, false, p, scale, 64, state, sums, o, w);
    kvc_value_tiles(kind, dims, exact, tile, dim, from, left, w, o);
}

/* The same for a block of a page; kvc_piped_sums: for words and scales in a pipe. */
KVC_DEVICE void kvc_value_sums(int kind, int dims, bool exact, int sums, const kvc_side *side, int block, int left,
                               int all, const float p[8], kvc_softmax *state, float *o)
{
    const uint8_t *tile[2];
    KVC_UNROLL for (int u = 0; u < 2; u++) tile[u] =
        side->tiles + kvc_block_tile(side, block, u) * (2 * (int)side->dim * kvc_kind_bits(kind));
    uint64_t scales = kvc_kind_bits(kind) < 16 ? kvc_token_scales(side, block) : 0;
    if (exact)
        kvc_weighed_sums(kind, dims, true, sums, tile, dims, KVC_IN_PAGE, left, all, scales, p, state, o);
    else
        kvc_weighed_sums(kind, dims, false, sums, tile, (int)side->dim, KVC_IN_PAGE, left, all, scales, p, state, o);
}
KVC_DEVICE void kvc_piped_sums(int kind, int dims, int sums, const uint8_t *words, const uint8_t *scales,
                               const float p[8], kvc_softmax *state, float *o)
{
    const uint8_t *tile[2] = {words, words};
    uint64_t of_tokens = kvc_kind_bits(kind) < 16 ? *(const uint64_t *)(scales + 8 * (kvc_lane() >> 2)) : 0;
    kvc_weighed_sums(kind, dims, true, sums, tile, dims, KVC_IN_PIPE, KVC_BLOCK, true, of_tokens, p, state, o);
}

/* The same through the warp's staging buffer; fp32 numbers and their weights are split into two parts. */
KVC_DEVICE void kvc_staged_sums(int dims, int sums, const kvc_side *side, int block, int left, const float p[8],
                                kvc_stage *room, kvc_softmax *state, float *o)
{
    int lane = kvc_lane(), u = lane >> 4, c = lane >> 2 & 3;
    bool wide = side->format == KVC_RAW_F32;
    const uint8_t *tile[2] = {(const uint8_t *)(room + 1), (const uint8_t *)(room + 1) + 2 * KVC_TILE * side->dim};
    /* V and w; V and the remainder of w; the remainder of V and w */
    KVC_ONCE for (int limb = 0; limb < (wide ? 3 : 1); limb++)
    {
        float w[8], scale[4];
        if (limb != 1) kvc_stage_block(side, block, left, limb == 2, room);
        KVC_UNROLL for (int e = 0; e < 4; e++) scale[e] = room->unit[16 * u + 4 * c + e];
        kvc_scaled_weights(16, false, p, scale, 2, state, sums, o, w);
        KVC_UNROLL for (int x = 0; x < 8; x++) if (limb == 1) w[x] -= kvc_f16_to_f32(kvc_f32_to_f16(w[x]));
        kvc_value_tiles(KVC_KIND_F16, dims, false, tile, (int)side->dim, KVC_IN_STAGE, left, w, o);
    }
}

#endif
