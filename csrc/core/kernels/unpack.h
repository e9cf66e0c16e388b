/* unpack.h - pages of any quantized format to raw_f32 words, so that the raw_f32 kernels attend to formats that have
 * none of their own. Plain C with 16 lanes (K: tokens, V: dims), compiled by every vector level behind its target
 * pragma. What is rotated stays rotated.
 *
 * Cost: a word of 16 lanes gives 4 (8 bits) to 16 (2 bits) vectors, each 4 to 6 instructions and a store to L1/L2; then
 * raw_f32's fused multiply-add. Compared with a kernel of its own about half the speed. */
#ifndef KVC_UNPACK_H
#define KVC_UNPACK_H

#include "../codec.h"
#include "../floats.h"

#define INLINE_ALWAYS static inline __attribute__((always_inline))
#define MAX_GROUPS (KVC_MAX_DIM / 16)

/* The level of a code; coding and bits are constants where this is inlined. */
INLINE_ALWAYS float kvc_level(int coding, int bits, uint32_t code)
{
    float x = (float)(int32_t)code;
    if (coding == KVC_CODING_INT) return x - (float)(1 << (bits - 1));
    if (coding == KVC_CODING_MID) return x - (float)((1 << bits) - 1) / 2;
    if (coding == KVC_CODING_E4M3) return kvc_e4m3_to_f32((uint8_t)code);
    if (coding == KVC_CODING_E5M2) return kvc_e5m2_to_f32((uint8_t)code);
    if (coding == KVC_CODING_E2M1) { /* twice the magnitude is 0 1 2 3, 4 6, 8 12 */
        int32_t m = (int32_t)(code & 7), twice = m < 4 ? m : m < 6 ? 2 * m - 4 : 4 * m - 16;
        return kvc_f32_of_bits(kvc_f32_bits((float)twice * .5f) | (code & 8) << 28);
    }
    return x;
}

/* Scales and zero points of 16 tokens: [groups][16]. */
INLINE_ALWAYS void kvc_tile_meta(const kvc_side *side, kvc_traits f, int64_t t0, float scale[][16], float zero[][16])
{
    int64_t groups = f.group ? side->dim / f.group : 1, P = side->page_size, each = f.coding == KVC_CODING_UINT ? 2 : 1;
    for (int64_t g = 0; g < groups; g++)
        for (int i = 0; i < 16; i++) {
            int64_t at = g * each * P + t0 + i;
            scale[g][i] = kvc_scale_value(f.scale, side->meta + at * kvc_meta_size(f));
            zero[g][i] = each == 2 ? kvc_scale_value(KVC_SCALE_F16, side->meta + 2 * (at + P)) : 0;
        }
}

INLINE_ALWAYS void kvc_unpack_key_as(int coding, int bits, const kvc_side *side, kvc_traits f, int64_t n_tiles,
                                     const float *centre, float *restrict out)
{
    int64_t D = side->dim, period = D * bits / 8, group = f.group ? f.group : D;
    float scale[MAX_GROUPS][16], zero[MAX_GROUPS][16], by_dim[2][KVC_MAX_DIM];
    int channel = f.keys == KVC_KEYS_CHANNEL;
    for (int64_t d = 0; channel && d < D; d++)
        for (int k = 0; k < 2; k++) by_dim[k][d] = kvc_scale_value(KVC_SCALE_F16, side->meta + 2 * (k * D + d));
    for (int64_t tile = 0; tile < n_tiles; tile++, out += KVC_TILE * D) {
        if (!channel) kvc_tile_meta(side, f, tile * KVC_TILE, scale, zero);
        const uint8_t *words = side->tiles + tile * kvc_tile_bytes(side->format, D);
        for (int64_t j = 0; j < period / 4; j++, words += 64) {
            uint32_t w[16];
            memcpy(w, words, sizeof w);
            for (int p = 0; p < 8 / bits; p++)
                for (int i = 0; i < 4; i++) {
                    int64_t d = p * period + 4 * j + i, g = d / group;
                    float *restrict to = out + d * KVC_TILE, add = centre ? centre[d] : 0;
                    if (channel)
                        for (int t = 0; t < 16; t++)
                            to[t] = kvc_level(coding, bits, w[t] >> (8 * i + bits * p) & ((1u << bits) - 1)) *
                                        by_dim[0][d] +
                                    by_dim[1][d];
                    else
                        for (int t = 0; t < 16; t++)
                            to[t] =
                                kvc_level(coding, bits, w[t] >> (8 * i + bits * p) & ((1u << bits) - 1)) * scale[g][t] +
                                (zero[g][t] + add);
                }
        }
    }
}

INLINE_ALWAYS void kvc_unpack_value_as(int coding, int bits, const kvc_side *side, kvc_traits f, int64_t n_tiles,
                                       float *restrict out)
{
    int64_t D = side->dim, period = KVC_TILE * bits / 8, group = f.group ? f.group : D;
    float scale[MAX_GROUPS][16], zero[MAX_GROUPS][16];
    for (int64_t tile = 0; tile < n_tiles; tile++, out += KVC_TILE * D) {
        kvc_tile_meta(side, f, tile * KVC_TILE, scale, zero);
        const uint8_t *words = side->tiles + tile * kvc_tile_bytes(side->format, D);
        for (int64_t t = 0; t < KVC_TILE; t++) {
            int64_t p = t / period, s = t % period / 4, i = t % 4;
            int shift = (int)(8 * i + bits * p);
            for (int64_t d0 = 0; d0 < D; d0 += 16) {
                uint32_t w[16];
                memcpy(w, words + 4 * (s * D + d0), sizeof w);
                float by = scale[d0 / group][t], add = zero[d0 / group][t];
                float *restrict to = out + t * D + d0;
                for (int d = 0; d < 16; d++)
                    to[d] = kvc_level(coding, bits, w[d] >> shift & ((1u << bits) - 1)) * by + add;
            }
        }
    }
}

/* The codings that a vector level meets: (coding, bits). */
#define KVC_UNPACK_CASES(CALL)                                                                                         \
    CALL(INT, 8)                                                                                                       \
    CALL(INT, 4)                                                                                                       \
    CALL(UINT, 8) CALL(UINT, 4) CALL(UINT, 2) CALL(MID, 4) CALL(MID, 2) CALL(E4M3, 8) CALL(E5M2, 8) CALL(E2M1, 4)

static inline void kvc_unpack_page(const kvc_side *side, int64_t n_tiles, float *out)
{
    kvc_traits f = kvc_format_traits(side->format);
    float centre[KVC_MAX_DIM];
    bool centred = side->key && f.keys == KVC_KEYS_CENTRED;
    if (centred) {
        const uint8_t *mean = side->meta + kvc_token_meta_bytes(f, 1, side->dim, side->page_size);
        for (int64_t d = 0; d < side->dim; d++) centre[d] = kvc_scale_value(KVC_SCALE_F16, mean + 2 * d);
        if (f.rotated) ROTATE(centre, 1, side->dim);
    }
#define CASE(CODING, BITS)                                                                                             \
    if (f.coding == KVC_CODING_##CODING && f.bits == BITS) {                                                           \
        if (side->key)                                                                                                 \
            kvc_unpack_key_as(KVC_CODING_##CODING, BITS, side, f, n_tiles, centred ? centre : NULL, out);              \
        else                                                                                                           \
            kvc_unpack_value_as(KVC_CODING_##CODING, BITS, side, f, n_tiles, out);                                     \
        return;                                                                                                        \
    }
    KVC_UNPACK_CASES(CASE)
#undef CASE
}

#endif
