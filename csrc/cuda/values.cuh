/* values.cuh - O^T += V^T P for 32 tokens and 8 query rows, in a warp: V's words as A fragments, P as B.
 *
 * The lane's weights are those of keys.cuh: w[2e + i], token 4c + e of tile u, row 2t + i. Four tokens are what a word of V
 * holds, so a lane packs its four into words, and B fragments come by shuffles. Lane 4g + t sums dims 32m + 4g + 2i + r of rows
 * 2t, 2t + 1 in o[m][i][2r], o[m][i][2r + 1]: a load of 16 bytes brings four dims.
 *
 * Where V has a scale a token it is folded into the weights, and these are cut relative to the largest of the block: fp16
 * for fp8, 16 bits in two limbs for integers. Below 8 bits the weights of a higher plane's tokens are divided by what the plane
 * lies higher, as in query.cuh.
 *
 * Cost for 32 tokens of D dims: D * bits / 64 loads of 16 bytes a lane (int2: D / 16, half of them doubles), D / 8 MMAs,
 * 8 shuffles and, with scales, 16 for maxima and sums, D / 4 conversions and D / 4 multiply-adds a lane. */
#ifndef KVC_VALUES_CUH
#define KVC_VALUES_CUH

#include "keys.cuh"

/* Lanes 4g + t share rows 2t, 2t + 1: over all g. */
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

/* The word of tokens of (tile u, chunk c) for row g, from the lane that has it: word[i] for row 2t + i. */
KVC_DEVICE uint32_t kvc_take(const uint32_t word[2], int u, int c)
{
    int g = kvc_lane() >> 2, from = (4 * u + c) * 4 + (g >> 1);
    uint32_t even = kvc_shuffle(word[0], from), odd = kvc_shuffle(word[1], from);
    return g & 1 ? odd : even;
}

/* Bits of the first n elements of `bits` in a word. */
KVC_DEVICE uint32_t kvc_first(int n, int bits)
{
    return n * bits >= 32 ? 0xffffffff : n <= 0 ? 0 : (1u << (n * bits)) - 1;
}

/* 16 bits, 8-bit floats, staged tiles. w: weights as they go into the MMA; unit: what they must be multiplied by, or NULL for 1.
 * tile[2]: the block's. Tokens from `left` on hold anything: their bits become 0. */
KVC_DEVICE void kvc_value_floats(int kind, int dims, const uint8_t *const tile[2], int dim, bool shared, int left,
                                 const float w[8], const float *unit, float *o)
{
    int t = kvc_lane() & 3, g = kvc_lane() >> 2;
    const int each = kvc_kind_bits(kind) / 8; /* rows of words that a step takes */
    uint32_t b[2][2];
    KVC_UNROLL for (int r = 0; r < 2; r++)
    {
        uint32_t word[2];
        KVC_UNROLL for (int i = 0; i < 2; i++) word[i] = kind == KVC_KIND_BF16
                                                             ? kvc_pack_bf16(w[4 * r + i], w[4 * r + 2 + i])
                                                             : kvc_pack_f16(w[4 * r + i], w[4 * r + 2 + i]);
        KVC_UNROLL for (int u = 0; u < 2; u++) b[u][r] = kvc_take(word, u, t);
    }
    KVC_UNROLL for (int m0 = 0; m0 < dims / 32; m0 += 2) /* 4 or 8 loads at once */
    {
        kvc_quad v[2][2][2];
        KVC_UNROLL for (int m = 0; m < 2; m++) KVC_UNROLL for (int u = 0; u < 2; u++)
            KVC_UNROLL for (int r = 0; r < each; r++)
        {
            int d = 32 * (m0 + m) + 4 * g;
            const uint8_t *at = tile[u] + 4 * ((each * t + r) * dim + d);
            v[m][u][r] = kvc_no_quad();
            if (d < dim) v[m][u][r] = shared ? kvc_load_quad(at) : kvc_load_stream(at);
        }
        if (left < KVC_BLOCK) {
            KVC_UNROLL for (int u = 0; u < 2; u++) KVC_UNROLL for (int r = 0; r < each; r++)
            {
                uint32_t mask = kvc_first(left - 16 * u - 4 * t - 2 * r, kvc_kind_bits(kind));
                KVC_UNROLL for (int m = 0; m < 2; m++) KVC_UNROLL for (int i = 0; i < 4; i++) v[m][u][r].w[i] &= mask;
            }
        }
        KVC_UNROLL for (int m = 0; m < 2; m++) KVC_UNROLL for (int i = 0; i < 2; i++)
        {
            float *to = o + ((m0 + m) * 2 + i) * 4, sum[4] = {0, 0, 0, 0};
            KVC_UNROLL for (int u = 0; u < 2; u++)
            {
                uint32_t a[4];
                kvc_unpack(kind, v[m][u], i, 0, a);
                if (kind == KVC_KIND_BF16)
                    kvc_mma_bf16(unit ? sum : to, a, b[u]);
                else
                    kvc_mma_f16(unit ? sum : to, a, b[u]);
            }
            KVC_UNROLL for (int r = 0; r < 4; r++) if (unit) to[r] = fmaf(sum[r], unit[r & 1], to[r]);
        }
    }
}

/* Weights with V's scales in them, relative to the largest of the block: 0 to 1; that largest to unit. */
KVC_DEVICE void kvc_scaled_weights(const float p[8], const float scale[4], float w[8], float unit[2])
{
    KVC_UNROLL for (int i = 0; i < 2; i++)
    {
        float most = 0;
        KVC_UNROLL for (int e = 0; e < 4; e++)
        {
            w[2 * e + i] = p[2 * e + i] > 0 ? p[2 * e + i] * scale[e] : 0; /* scales of no token may be NaN */
            most = fmaxf(most, w[2 * e + i]);
        }
        unit[i] = kvc_rows_max(most);
        float inverse = unit[i] > 1e-30f ? 1 / unit[i] : 0;
        KVC_UNROLL for (int e = 0; e < 4; e++)
        {
            float y = w[2 * e + i] * inverse;
            w[2 * e + i] = y > 0 ? fminf(y, 1) : 0;
        }
    }
}

KVC_DEVICE void kvc_value_integers(int kind, int dims, const kvc_side *side, int block, const float p[8], float *o)
{
    int lane = kvc_lane(), t = lane & 3, g = lane >> 2, c = g & 3, dim = (int)side->dim;
    const int bits = kvc_kind_bits(kind), shift = kind == KVC_KIND_INT4   ? 4 * (c >> 1)
                                                  : kind == KVC_KIND_INT2 ? 2 * c
                                                                          : 0;
    const int centre = kind == KVC_KIND_INT8 ? 256 : (1 << bits) - 1; /* twice the middle of the codes */
    const uint8_t *tile[2];
    KVC_UNROLL for (int u = 0; u < 2; u++) tile[u] =
        side->tiles + kvc_block_tile(side, block, u) * (2 * (int)side->dim * bits);
    float scale[4], w[8], unit[2];
    int32_t sum[2];
    uint32_t high[2] = {0, 0}, low[2] = {0, 0}, bh[2], bl[2];
    kvc_token_scales(side, block, scale);
    kvc_scaled_weights(p, scale, w, unit);
    KVC_UNROLL for (int i = 0; i < 2; i++)
    {
        sum[i] = 0;
        KVC_UNROLL for (int e = 0; e < 4; e++)
        {
            int32_t x = ((int32_t)(w[2 * e + i] * 65535.f + .5f) + (1 << shift >> 1)) >> shift;
            high[i] |= (uint32_t)(x >> 8) << 8 * e;
            low[i] |= (uint32_t)(x & 255) << 8 * e;
            sum[i] += x << shift;
        }
        KVC_UNROLL for (int h = 4; h < 32; h *= 2) sum[i] += (int32_t)kvc_shuffle_xor((uint32_t)sum[i], h);
        unit[i] *= .5f / 65535.f;
    }
    /* b[0], b[1]: the tokens of a[0], a[1] and of a[2], a[3], see below. */
    const int u0 = kind == KVC_KIND_INT8 ? 0 : t >> 1, u1 = kind == KVC_KIND_INT8 ? 1 : u0;
    const int c0 = kind == KVC_KIND_INT8 ? t : kind == KVC_KIND_INT4 ? t & 1 : 2 * (t & 1);
    const int c1 = kind == KVC_KIND_INT8 ? t : kind == KVC_KIND_INT4 ? 2 + (t & 1) : c0 + 1;
    bh[0] = kvc_take(high, u0, c0), bh[1] = kvc_take(high, u1, c1);
    bl[0] = kvc_take(low, u0, c0), bl[1] = kvc_take(low, u1, c1);
    const uint8_t *mine = t >> 1 ? tile[1] : tile[0];
    KVC_UNROLL for (int m0 = 0; m0 < dims / 32; m0 += 2)
    {
        kvc_quad v[2][2];
        KVC_UNROLL for (int m = 0; m < 2; m++)
        {
            int d = 32 * (m0 + m) + 4 * g;
            v[m][0] = v[m][1] = kvc_no_quad();
            if (d >= dim) continue;
            if (kind == KVC_KIND_INT8) { /* word t of each tile */
                v[m][0] = kvc_load_stream(tile[0] + 4 * (t * dim + d));
                v[m][1] = kvc_load_stream(tile[1] + 4 * (t * dim + d));
            } else { /* word t % 2 of tile t / 2, both planes; its only word, planes 2 * (t % 2) and the next */
                v[m][0] = kvc_load_stream(mine + 4 * ((kind == KVC_KIND_INT4 ? (t & 1) * dim : 0) + d));
            }
        }
        KVC_UNROLL for (int m = 0; m < 2; m++) KVC_UNROLL for (int i = 0; i < 2; i++)
        {
            uint32_t a[4];
            int32_t h[4] = {0, 0, 0, 0}, l[4] = {0, 0, 0, 0};
            float *to = o + ((m0 + m) * 2 + i) * 4;
            kvc_unpack(kind, v[m], i, t & 1, a);
            kvc_mma_u8u8(h, a, bh);
            kvc_mma_u8u8(l, a, bl);
            KVC_UNROLL for (int r = 0; r < 4; r++)
            {
                int32_t x = 2 * (256 * h[r] + l[r]) - centre * sum[r & 1];
                to[r] = fmaf((float)x, unit[r & 1], to[r]);
            }
        }
    }
}

/* o += the block's V, weighed by p. */
KVC_DEVICE void kvc_value_sums(int kind, int dims, const kvc_side *side, int block, int left, const float p[8],
                               float *o)
{
    if (kvc_kind_whole(kind)) {
        kvc_value_integers(kind, dims, side, block, p, o);
        return;
    }
    const uint8_t *tile[2];
    KVC_UNROLL for (int u = 0; u < 2; u++) tile[u] =
        side->tiles + kvc_block_tile(side, block, u) * (2 * (int)side->dim * kvc_kind_bits(kind));
    if (kvc_kind_bits(kind) == 16) {
        kvc_value_floats(kind, dims, tile, (int)side->dim, false, left, p, NULL, o);
        return;
    }
    float scale[4], w[8], unit[2];
    kvc_token_scales(side, block, scale);
    kvc_scaled_weights(p, scale, w, unit);
    if (kind == KVC_KIND_E4M3) unit[0] *= KVC_E4M3_UNIT, unit[1] *= KVC_E4M3_UNIT;
    kvc_value_floats(kind, dims, tile, (int)side->dim, false, left, w, unit, o);
}

/* The same through the warp's room; numbers of 32 bits, and their weights, as sums of two. */
KVC_DEVICE void kvc_staged_sums(int dims, const kvc_side *side, int block, int left, const float p[8], kvc_stage *room,
                                float *o)
{
    int lane = kvc_lane(), u = lane >> 4, c = lane >> 2 & 3;
    bool wide = side->format == KVC_RAW_F32;
    const uint8_t *tile[2] = {(const uint8_t *)(room + 1), (const uint8_t *)(room + 1) + 2 * KVC_TILE * side->dim};
    KVC_ONCE for (int limb = 0; limb < (wide ? 3 : 1); limb++) /* V and w; V and the rest of w; the rest of V and w */
    {
        float w[8], unit[2], scale[4];
        if (limb != 1) kvc_stage_block(side, block, left, limb == 2, room);
        KVC_UNROLL for (int e = 0; e < 4; e++) scale[e] = room->unit[16 * u + 4 * c + e];
        kvc_scaled_weights(p, scale, w, unit);
        KVC_UNROLL for (int x = 0; x < 8; x++) if (limb == 1) w[x] -= kvc_f16_to_f32(kvc_f32_to_f16(w[x]));
        kvc_value_floats(KVC_KIND_F16, dims, tile, (int)side->dim, true, left, w, unit, o);
    }
}

#endif
