/* keys.cuh - scores of 32 tokens (two tiles) for 8 query rows, by one warp: S^T = K Q^T, with K's words as A fragments.
 *
 * For lane 4g + t let u = g / 4, c = g % 4: a load of 16 bytes from tile u gives it one word of each of tokens 4c .. 4c
 * + 3, which are rows g and g + 8 of two MMAs. It then has the scores of these four tokens for rows 2t and 2t + 1: s[2e
 * + i], token 4c + e, row 2t + i. A word of V holds the same tokens. Eight lanes read 64 adjacent bytes, a warp 512
 * bytes of two tiles.
 *
 * Codes are converted to fp16 by bit operations. int8: a code in the mantissa of 1024 counts in units of 1; 1024 and
 * the middle of the codes are subtracted, exactly. Below 8 bits: with the other bits masked out, codes are subnormal
 * fp16 numbers without being moved (query.cuh). Codes that are two bytes apart in a word are in the two halves of a
 * register.
 *
 * Cost for 32 tokens of D dims: D * bits / 64 loads of 16 bytes per lane; D / 8 MMAs (for 16 bits per limb of q);
 * instructions to unpack a word: none (16 bits), 4 (int8), 5 (int4), 9 (int2), 2 cvt (e4m3; 8 ALU below sm_89); D / 8
 * MMAs per page for a centroid. All loads of a batch are issued before the first is used. */
#ifndef KVC_KEYS_CUH
#define KVC_KEYS_CUH

#include "query.cuh"

#define KVC_BLOCK 32 /* tokens */
#define KVC_BATCH 4  /* 16-byte loads per batch */

/* Tile u of a block. Past the end of the page it is the last tile again, whose tokens are then masked. */
KVC_DEVICE int kvc_block_tile(const kvc_side *side, int block, int u)
{
    int tile = 2 * block + u, last = ((int)side->tokens >> 4) - 1;
    return tile < last ? tile : last;
}

/* fp16 metadata of the lane's four tokens; kvc_token_scale: of one of them. */
KVC_DEVICE uint64_t kvc_token_scales(const kvc_side *side, int block)
{
    int g = kvc_lane() >> 2;
    return *(const uint64_t *)(side->meta + 2 * (kvc_block_tile(side, block, g >> 2) * 16 + 4 * (g & 3)));
}
KVC_DEVICE float kvc_token_scale(uint64_t w, int e) { return kvc_widen((uint32_t)(w >> 32 * (e >> 1)), e & 1); }

KVC_INLINE int kvc_kind_bits(int kind)
{
    return kind == KVC_KIND_INT2                            ? 2
           : kind == KVC_KIND_INT4                          ? 4
           : kind >= KVC_KIND_E4M3 && kind <= KVC_KIND_INT8 ? 8
                                                            : 16;
}

/* Mask of the bits of plane p in bytes 0 and 2 of a word. */
KVC_INLINE uint32_t kvc_plane_mask(int bits, int p) { return (((1u << bits) - 1) << bits * p) * 0x10001; }

/* A fragment for rows 2i, 2i + 1, from the 16-byte words of an MMA step; plane `p` of words below 8 bits. */
KVC_DEVICE void kvc_unpack(int kind, const kvc_quad *w, int i, int p, uint32_t a[4])
{
    KVC_UNROLL for (int r = 0; r < 2; r++)
    {
        uint32_t x = w[0].w[2 * i + r];
        if (kind == KVC_KIND_INT8) {
            a[r] = kvc_less_pair(kvc_bytes(x, 0x64646464, 0x4140), 0x64806480); /* 1024 + code - 1152 */
            a[2 + r] = kvc_less_pair(kvc_bytes(x, 0x64646464, 0x4342), 0x64806480);
        } else if (kvc_kind_bits(kind) < 8) {
            a[r] = x & kvc_plane_mask(kvc_kind_bits(kind), p);
            a[2 + r] = x >> 8 & kvc_plane_mask(kvc_kind_bits(kind), p);
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

/* Location of the words: a tile in a page, or in shared memory, or a whole block there in the order of pipeline.cuh. */
enum kvc_words { KVC_IN_PAGE, KVC_IN_STAGE, KVC_IN_PIPE };
KVC_DEVICE kvc_quad kvc_load_words(const int kind, const int from, const uint8_t *at)
{
    if (from != KVC_IN_PAGE) return kvc_load_quad(at);
    return kvc_kind_bits(kind) == 16 ? kvc_load_written(at)
                                     /* not through the read-only path: attend.cuh writes to an open page */
                                     : kvc_load_stream(at);
}
/* Swizzle of a pipe: the i-th 16 bytes of a block's side are at i ^ 2 * this. It is t of the lane that reads them, or
 * the bit of t that the address does not contain. */
KVC_DEVICE int kvc_piped_turn(int kind, int dims, const bool key, int i)
{
    if (key) return i >> 3 & (kvc_kind_bits(kind) == 16 ? 3 : 1);
    return i / (dims / 4) >> (kvc_kind_bits(kind) == 16) & 3;
}
KVC_DEVICE const uint8_t *kvc_piped(int kind, int dims, const bool key, const uint8_t *words, int i)
{
    return words + 16 * (i ^ 2 * kvc_piped_turn(kind, dims, key, i));
}

/* Sums in units of the fragments, for half of the tokens each. `tile`: the lane's tile, with `words` words per token;
 * `from`: its location; `rest`: q has a second part. */
KVC_DEVICE void kvc_key_parts(int kind, int dims, const bool exact, const bool rest, const uint8_t *tile, int words,
                              const int from, const kvc_query *q, float sum[2][4])
{
    int form = kvc_form_of(kind), t = kvc_lane() & 3, c = kvc_lane() >> 2 & 3;
    const int each = kvc_kind_bits(kind) == 16 ? 2 : 1;                           /* 16-byte words per MMA step */
    const int planes = kind == KVC_KIND_INT2 ? 4 : kind == KVC_KIND_INT4 ? 2 : 1; /* MMA steps per 16-byte word */
    const int steps = dims * kvc_kind_bits(kind) / 32 / (4 * each);
    const uint64_t *fragments = (const uint64_t *)((const uint8_t *)q + q->at[form]);
    const uint8_t *lane_words[2];
    KVC_UNROLL for (int k = 0; k < each; k++) lane_words[k] = kvc_piped(
        kind, dims, true, tile, (kvc_lane() >> 4) * (2 * dims * kvc_kind_bits(kind) / 16) + 4 * (each * t + k) + c);
    KVC_ONCE for (int s0 = 0; s0 < steps; s0 += KVC_BATCH / each)
    {
        kvc_quad w[KVC_BATCH], both = {};
        KVC_UNROLL for (int k = 0; k < KVC_BATCH; k++) if (s0 + k / each < steps)
        {
            int j = 4 * each * (s0 + k / each) + each * t + k % each;
            const uint8_t *at = tile + 64 * (exact || j < words ? j : 0) + 16 * c; /* past the end q is 0 */
            if (from == KVC_IN_PIPE) at = lane_words[k % each] + 256 * each * (s0 + k / each);
            w[k] = kvc_load_words(kind, from, at);
        }
        KVC_UNROLL for (int k = 0; k < KVC_BATCH; k += each) KVC_UNROLL for (int p = 0; p < planes; p++)
        {
            int s = (s0 + k / each) * planes + p;
            if (s >= steps * planes) continue;
            uint32_t first[2], second[2], a[4];
            if (planes > 1) { /* one load for both planes */
                if (p % 2 == 0) both = kvc_load_quad((const kvc_quad *)fragments + s / 2 * 32 + kvc_lane());
                first[0] = both.w[p % 2 * 2], first[1] = both.w[p % 2 * 2 + 1];
            } else {
                kvc_fragment(fragments, dims, 0, s, first);
            }
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
KVC_DEVICE void kvc_key_sums(int kind, int dims, const bool exact, const uint8_t *tile, int words, const int from,
                             const kvc_query *q, float sum[2][4])
{
    if (kvc_kind_bits(kind) == 16 && q->rest >> kvc_form_of(kind) & 1)
        kvc_key_parts(kind, dims, exact, true, tile, words, from, q, sum);
    else
        kvc_key_parts(kind, dims, exact, false, tile, words, from, q, sum);
}

/* The unit of scores for the lane's rows. */
KVC_DEVICE void kvc_row_steps(const kvc_query *q, int form, float by[2])
{
    KVC_UNROLL for (int i = 0; i < 2; i++) by[i] = q->step[form][2 * (kvc_lane() & 3) + i];
}

/* A lane's scores from the sums, in order, times the scales of their tokens. */
KVC_DEVICE void kvc_scale_scores(int kind, float sum[2][4], uint64_t scales, float s[8])
{
    KVC_UNROLL for (int x = 0; x < 8; x++)
    {
        int e = x >> 1, i = x & 1;
        s[x] = sum[e >> 1][2 * (e & 1) + i];
        if (kvc_kind_bits(kind) < 16) s[x] *= kvc_token_scale(scales, e) * (kind == KVC_KIND_E4M3 ? KVC_E4M3_UNIT : 1);
    }
}

/* q . k of the block's tokens in units of q->step. */
KVC_DEVICE void kvc_key_scores(int kind, int dims, const bool exact, const kvc_side *side, int block,
                               const kvc_query *q, float s[8])
{
    int lane = kvc_lane();
    float sum[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    const int bits = kvc_kind_bits(kind);
    if (bits < 8) {
        kvc_quad base = kvc_load_quad(q->base[kvc_form_of(kind) - KVC_FORM_INT4][lane & 3]);
        KVC_UNROLL for (int x = 0; x < 8; x++) sum[x >> 2][x & 3] = kvc_f32_of_bits(base.w[x & 3]);
    }
    const uint8_t *tile = side->tiles + kvc_block_tile(side, block, lane >> 4) * (2 * (int)side->dim * bits);
    uint64_t scales = bits < 16 ? kvc_token_scales(side, block) : 0; /* loaded together with the words */
    kvc_key_sums(kind, dims, exact, tile, (int)side->dim * bits / 32, KVC_IN_PAGE, q, sum);
    kvc_scale_scores(kind, sum, scales, s);
}

/* The same for 8 and 16 bits with words and scales in a pipe. */
KVC_DEVICE void kvc_piped_scores(int kind, int dims, const uint8_t *words, const uint8_t *scales, const kvc_query *q,
                                 float s[8])
{
    float sum[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    kvc_key_sums(kind, dims, true, words, 0, KVC_IN_PIPE, q, sum);
    kvc_scale_scores(kind, sum, kvc_kind_bits(kind) < 16 ? *(const uint64_t *)(scales + 8 * (kvc_lane() >> 2)) : 0, s);
}

/* Dot products of rows 2t, 2t + 1 with the page's mean key, times the softmax scale. q is A, with its limbs in rows g
 * and g + 8; the mean is in all columns of B. */
KVC_DEVICE void kvc_centroid_scores(int dims, const uint8_t *mean, int dim, const kvc_query *q, float dot[2])
{
    const kvc_quad *fragments = (const kvc_quad *)((const uint8_t *)q + q->at[KVC_FORM_MEAN]) + kvc_lane();
    const uint8_t *at = mean + 8 * (kvc_lane() & 3);
    float sum[4] = {0, 0, 0, 0};
    uint64_t word[KVC_CUDA_DIM / 16];
    KVC_UNROLL for (int s = 0; s < dims / 16; s++) word[s] =
        16 * s < dim ? *(const uint64_t *)(at + 32 * s) : 0; /* q is 0 there, but the mean could be NaN */
    KVC_UNROLL for (int s = 0; s < dims / 16; s++)
    {
        kvc_quad a = kvc_load_quad(fragments + 32 * s);
        uint32_t b[2] = {(uint32_t)word[s], (uint32_t)(word[s] >> 32)};
        kvc_mma_f16(sum, a.w, b);
    }
    float score = (sum[0] + sum[2]) * q->step[KVC_FORM_MEAN][kvc_lane() >> 2];
    KVC_UNROLL for (int i = 0; i < 2; i++) dot[i] = kvc_shuffle_f(score, 4 * (2 * (kvc_lane() & 3) + i));
}

/* ---------------------------------------------------------------- formats without a kind of their own (staged) */

/* Staging buffer of a warp: the block's rows as fp16 tiles, and the factors of their values. */
typedef struct kvc_stage {
    float unit[KVC_BLOCK];
} kvc_stage;
KVC_INLINE int64_t kvc_stage_bytes(int dims) { return (int64_t)sizeof(kvc_stage) + 2 * KVC_BLOCK * dims; }

/* Decodes a side of a block to the staging buffer: each row divided by the power of two of its largest element, as
 * fp16. `rest`: the remainder instead. Tokens from `left` on are 0, and so are rows below 2^-63, whose unit would make
 * the sums of other tokens overflow. */
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
        if (lane == 0) room->unit[t] = t < left && e >= 64 ? unit : 0;
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
        kvc_key_sums(KVC_KIND_F16, dims, false, (const uint8_t *)(room + 1) + u * (2 * KVC_TILE * side->dim),
                     (int)side->dim / 2, KVC_IN_STAGE, q, sum);
    }
    KVC_UNROLL for (int x = 0; x < 8; x++)
    {
        int e = x >> 1, i = x & 1;
        s[x] = sum[e >> 1][2 * (e & 1) + i] * room->unit[16 * u + 4 * c + e];
    }
}

#endif
