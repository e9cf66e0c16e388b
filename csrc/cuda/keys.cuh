/* keys.cuh - scores of 32 tokens (two tiles) for 8 query rows, in a warp: S^T = K Q^T, K's words as A fragments.
 *
 * Lane 4g + t has u = g / 4, c = g % 4: of tile u a load of 16 bytes brings it one word of tokens 4c .. 4c + 3, two MMAs' rows g
 * and g + 8. So it ends up with the scores of these four tokens for rows 2t and 2t + 1: s[2e + i], token 4c + e, row 2t + i;
 * and these are what a word of V holds. Eight lanes read 64 adjacent bytes, a warp 512 of two tiles.
 *
 * Codes become fp16 by bits alone: set into the mantissa of a power of two whose unit they then are, less that power and the
 * middle of the codes, exactly. Codes of a word that are two bytes apart lie in both halves of a register.
 *
 * Cost for 32 tokens of D dims: D * bits / 64 loads of 16 bytes a lane, D / 8 MMAs (16 bits: a limb of q), and to unpack a word:
 * nothing (16), 4 (int8), 11 (int4), 19 (int2), 2 cvt (e4m3; 8 ALU below sm_89). Every load of a batch is issued before the
 * first is used. */
#ifndef KVC_KEYS_CUH
#define KVC_KEYS_CUH

#include "query.cuh"

#define KVC_BLOCK 32 /* tokens */
#define KVC_BATCH 4  /* quads loaded at once */

/* Tile u of a block; where the page ends before, the first again: its tokens count as not there. */
KVC_DEVICE int kvc_block_tile(const kvc_side *side, int block, int u)
{
    int tile = 2 * block + u;
    return tile < (int)side->tokens / KVC_TILE ? tile : 2 * block;
}

/* fp16 metadata of the lane's four tokens. */
KVC_DEVICE void kvc_token_scales(const kvc_side *side, int block, float scale[4])
{
    int g = kvc_lane() >> 2;
    uint64_t w = *(const uint64_t *)(side->meta + 2 * (kvc_block_tile(side, block, g >> 2) * 16 + 4 * (g & 3)));
    KVC_UNROLL for (int e = 0; e < 4; e++) scale[e] = kvc_widen((uint32_t)(w >> 32 * (e >> 1)), e & 1);
}

KVC_DEVICE int kvc_kind_bits(int kind)
{
    return kind == KVC_KIND_INT2                            ? 2
           : kind == KVC_KIND_INT4                          ? 4
           : kind >= KVC_KIND_E4M3 && kind <= KVC_KIND_INT8 ? 8
                                                            : 16;
}

/* Codes at bits `at` (from 2) of both halves of x as fp16, less `middle`. */
KVC_DEVICE uint32_t kvc_centred(uint32_t x, int bits, int at, float middle)
{
    uint32_t mask = ((1u << bits) - 1) << at, one = (uint32_t)(25 - at) << 10; /* 2^(10 - at): its unit is bit `at` */
    uint32_t less = kvc_f32_to_f16((float)(1 << (10 - at)) + middle);
    return kvc_less_pair(kvc_and_or(x, mask | mask << 16, one | one << 16), less | less << 16);
}

/* A fragment of rows 2i, 2i + 1 of the quads of a step; plane `p` of words below 8 bits. */
KVC_DEVICE void kvc_unpack(int kind, const kvc_quad *w, int i, int p, uint32_t a[4])
{
    KVC_UNROLL for (int r = 0; r < 2; r++)
    {
        uint32_t x = w[0].w[2 * i + r];
        if (kind == KVC_KIND_INT8) {
            a[r] = kvc_less_pair(kvc_bytes(x, 0x64646464, 0x4140), 0x64806480); /* 1024 + code - 1152 */
            a[2 + r] = kvc_less_pair(kvc_bytes(x, 0x64646464, 0x4342), 0x64806480);
        } else if (kind == KVC_KIND_INT4) {
            a[r] = kvc_centred(p ? x : x << 4, 4, 4, 7.5f);
            a[2 + r] = kvc_centred(x >> (p ? 8 : 4), 4, 4, 7.5f);
        } else if (kind == KVC_KIND_INT2) { /* plane 0 lies too low for a middle of 1.5 */
            a[r] = kvc_centred(p ? x : x << 2, 2, p ? 2 * p : 2, 1.5f);
            a[2 + r] = kvc_centred(x >> (p ? 8 : 6), 2, p ? 2 * p : 2, 1.5f);
        } else if (kind == KVC_KIND_E4M3) {
            a[r] = kvc_e4m3_pair(x, 0);
            a[2 + r] = kvc_e4m3_pair(x, 1);
        } else if (kind == KVC_KIND_E5M2) {
            a[r] = kvc_e5m2_pair(x, 0);
            a[2 + r] = kvc_e5m2_pair(x, 1);
        } else {
            a[r] = x;
            a[2 + r] = w[1].w[2 * i + r];
        }
    }
}

/* Sums in units of the fragments, of half the tokens each. `tile`: the lane's tile, `words` a token's in it; `shared`: it lies in
 * shared memory. */
KVC_DEVICE void kvc_key_sums(int kind, int dims, const uint8_t *tile, int words, bool shared, const kvc_query *q,
                             float sum[2][4])
{
    int form = kvc_form_of(kind), t = kvc_lane() & 3, c = kvc_lane() >> 2 & 3;
    const int each = kvc_kind_bits(kind) == 16 ? 2 : 1;                           /* quads of an MMA step */
    const int planes = kind == KVC_KIND_INT2 ? 4 : kind == KVC_KIND_INT4 ? 2 : 1; /* MMA steps of one */
    const int steps = dims * kvc_kind_bits(kind) / 32 / (4 * each);
    const uint64_t *fragments = (const uint64_t *)((const uint8_t *)q + q->at[form]);
    bool rest = each == 2 && q->rest >> form & 1;
    KVC_ONCE for (int s0 = 0; s0 < steps; s0 += KVC_BATCH / each)
    {
        kvc_quad w[KVC_BATCH];
        KVC_UNROLL for (int k = 0; k < KVC_BATCH; k++)
        {
            int s = s0 + k / each, j = 4 * each * s + (each == 2 ? 2 * t + k % 2 : t);
            if (s >= steps) continue;
            const uint8_t *at = tile + 64 * (j < words ? j : 0) + 16 * c; /* behind the last one q is 0 */
            w[k] = shared ? kvc_load_quad(at) : kvc_load_stream(at);
        }
        KVC_UNROLL for (int k = 0; k < KVC_BATCH; k += each) KVC_UNROLL for (int p = 0; p < planes; p++)
        {
            int s = (s0 + k / each) * planes + p;
            if (s >= steps * planes) continue;
            uint32_t first[2], second[2], a[4];
            kvc_fragment(fragments, dims, 0, s, first);
            if (rest) kvc_fragment(fragments, dims, 1, s, second);
            KVC_UNROLL for (int i = 0; i < 2; i++)
            {
                kvc_unpack(kind, w + k, i, p, a);
                if (kind == KVC_KIND_BF16) {
                    kvc_mma_bf16(sum[i], a, first);
                    if (rest) kvc_mma_bf16(sum[i], a, second);
                } else {
                    kvc_mma_f16(sum[i], a, first);
                    if (rest) kvc_mma_f16(sum[i], a, second);
                }
            }
        }
    }
}

/* q . k times the softmax scale of the block's tokens, `by_page` (the centroid's part) added. */
KVC_DEVICE void kvc_key_scores(int kind, int dims, const kvc_side *side, int block, const kvc_query *q,
                               const float by_page[2], float s[8])
{
    int form = kvc_form_of(kind), lane = kvc_lane(), t = lane & 3;
    float sum[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}}, scale[4] = {1, 1, 1, 1};
    const int bits = kvc_kind_bits(kind);
    const uint8_t *tile = side->tiles + kvc_block_tile(side, block, lane >> 4) * (2 * (int)side->dim * bits);
    if (bits < 16) kvc_token_scales(side, block, scale);
    kvc_key_sums(kind, dims, tile, (int)side->dim * bits / 32, false, q, sum);
    KVC_UNROLL for (int x = 0; x < 8; x++)
    {
        int e = x >> 1, i = x & 1, half = e >> 1, r = 2 * (e & 1) + i, n = 2 * t + i;
        float unit = kind == KVC_KIND_E4M3 ? KVC_E4M3_UNIT : 1.f;
        s[x] = fmaf(sum[half][r], scale[e] * q->step[form][n] * unit, by_page[i]);
    }
}

/* The dot products of rows 2t, 2t + 1, times the softmax scale, with the page's mean key. Lane l sums up dims l, l + 32, ..; then lanes halve the
 * rows that they sum for. */
KVC_DEVICE void kvc_centroid_scores(int dims, const kvc_side *side, const kvc_query *q, float dot[2])
{
    const float *plain = (const float *)((const uint8_t *)q + q->at[KVC_FORMS]);
    const uint16_t *mean = (const uint16_t *)(side->meta + kvc_token_meta_bytes(kvc_format_traits(side->format), 1,
                                                                                side->dim, side->tokens));
    int lane = kvc_lane();
    float p[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    KVC_UNROLL for (int d = 0; d < dims; d += 32)
    {
        if (d + lane >= side->dim) continue;
        float x = kvc_widen(mean[d + lane], 0);
        KVC_UNROLL for (int n = 0; n < 8; n++) p[n] = fmaf(x, plain[n * dims + d + lane], p[n]);
    }
    KVC_UNROLL for (int h = 4; h > 0; h /= 2) KVC_UNROLL for (int n = 0; n < h; n++)
    {
        bool upper = lane & 4 * h;
        float give = upper ? p[n] : p[n + h], keep = upper ? p[n + h] : p[n];
        p[n] = keep + kvc_shuffle_xor_f(give, 4 * h);
    }
    p[0] += kvc_shuffle_xor_f(p[0], 2);
    p[0] += kvc_shuffle_xor_f(p[0], 1);
    KVC_UNROLL for (int i = 0; i < 2; i++) dot[i] =
        kvc_shuffle_f(p[0], 4 * (2 * (lane & 3) + i)); /* row g is at lane 4g */
}

/* ---------------------------------------------------------------- formats without a kind of their own */

/* A warp's room: the block's rows as fp16 tiles, and what their numbers must be multiplied by. */
typedef struct kvc_stage {
    float unit[KVC_BLOCK];
} kvc_stage;
KVC_INLINE int64_t kvc_stage_bytes(int dims) { return (int64_t)sizeof(kvc_stage) + 2 * KVC_BLOCK * dims; }

/* Decodes a side of a block into the warp's room: each row divided by the power of two of its largest, as fp16; `rest`: what
 * that leaves. Tokens from `left` on are 0. */
KVC_DEVICE void kvc_stage_block(const kvc_side *side, int block, int left, bool rest, kvc_stage *room)
{
    uint8_t *words = (uint8_t *)(room + 1);
    int dim = (int)side->dim, lane = kvc_half_lane();
    kvc_warp_barrier();
    KVC_ONCE for (int i = 0; i < KVC_BLOCK; i += 2)
    {
        int t = i + (kvc_lane() >> 4), in = t % KVC_TILE;
        float x[KVC_PARTS];
        kvc_half_decode(side, block * KVC_BLOCK + (t < left ? t : 0), x);
        uint32_t e = kvc_f32_bits(kvc_absmax(x, dim / 16)) >> 23;
        float unit = kvc_f32_of_bits((e < 20 ? 20 : e) << 23), inverse = 1 / unit;
        EACH_PART(k, 0, dim / 16)
        {
            int d = 16 * k + lane;
            float y = x[k] * inverse;
            uint16_t h = kvc_f32_to_f16(y);
            if (rest) h = kvc_f32_to_f16(y - kvc_f16_to_f32(h));
            int place = side->key ? 4 * (d / 2 * KVC_TILE + in) + 2 * (d & 1) : 4 * (in / 2 * dim + d) + 2 * (in & 1);
            *(uint16_t *)(words + t / KVC_TILE * (2 * KVC_TILE * dim) + place) = t < left ? h : 0;
        }
        if (lane == 0) room->unit[t] = t < left ? unit : 0;
    }
    kvc_warp_barrier();
}

KVC_DEVICE void kvc_staged_scores(int dims, const kvc_side *side, int block, int left, const kvc_query *q,
                                  kvc_stage *room, float s[8])
{
    int lane = kvc_lane(), u = lane >> 4, c = lane >> 2 & 3;
    float sum[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    int limbs = side->format == KVC_RAW_F32 ? 2 : 1;
    KVC_ONCE for (int limb = 0; limb < limbs; limb++)
    {
        kvc_stage_block(side, block, left, limb == 1, room);
        kvc_key_sums(KVC_KIND_F16, dims, (const uint8_t *)(room + 1) + u * (2 * KVC_TILE * side->dim),
                     (int)side->dim / 2, true, q, sum);
    }
    KVC_UNROLL for (int x = 0; x < 8; x++)
    {
        int e = x >> 1, i = x & 1;
        s[x] =
            sum[e >> 1][2 * (e & 1) + i] * q->step[KVC_FORM_F16][2 * (lane & 3) + i] * room->unit[16 * u + 4 * c + e];
    }
}

#endif
