/* neon_floats.c - raw and fp8 pages on NEON: fused multiply-adds to fp32 sums; a lane is a token (K) or a dim (V); the
 * multiplier is an element of a register with four numbers of q or of the weights.
 *
 *   per 16 bytes and row     products     shared by the rows
 *   fp8                      4 fmla       2 to separate the bytes, 4 to widen to fp16 (exact), 4 fcvtl
 *   raw_f16                  2 fmla       1 to separate even and odd elements, 2 fcvtl
 *   raw_bf16                 2 fmla       2
 *   raw_f32                  1 fmla       - */
#if defined(__aarch64__)
#include "neon.h"

enum { F32, F16, BF16, E4M3, E5M2 };
#define BITS_OF(KIND) ((KIND) == F32 ? 32 : (KIND) < E4M3 ? 16 : 8)
#define EACH_WORD(KIND) (32 / BITS_OF(KIND))      /* elements per word */
#define UNIT(KIND) ((KIND) == E5M2 ? 1.f : 256.f) /* factor that compensates the conversion of fp8 to fp16 */

/* Sixteen codes to fp16, exactly (value = fp16 * UNIT), then to fp32. */
INLINE void widen_codes(int KIND, uint8x16_t codes, float32x4_t *a, float32x4_t *b, float32x4_t *c, float32x4_t *d)
{
    uint16x8_t low, high;
    if (KIND == E5M2) { /* an e5m2 code is the upper half of an fp16 */
        low = vreinterpretq_u16_u8(vzip1q_u8(vdupq_n_u8(0), codes));
        high = vreinterpretq_u16_u8(vzip2q_u8(vdupq_n_u8(0), codes));
    } else { /* the sign is duplicated, and one copy removed */
        int8x16_t x = vreinterpretq_s8_u8(codes);
        low = vbicq_u16(vreinterpretq_u16_s16(vshll_n_s8(vget_low_s8(x), 7)), vdupq_n_u16(0x4000));
        high = vbicq_u16(vreinterpretq_u16_s16(vshll_high_n_s8(x, 7)), vdupq_n_u16(0x4000));
    }
    kvc_widen(low, a, b);
    kvc_widen(high, c, d);
}

/* x[i][v]: elements i of the four words in register v, for four registers. */
INLINE void part(int KIND, const uint8x16_t w[4], float32x4_t x[4][4])
{
    if (KIND == F32)
        EACH (v, 4) x[0][v] = vreinterpretq_f32_u8(w[v]);
    if (KIND == F16)
        EACH (v, 2) {
            uint16x8_t a = vreinterpretq_u16_u8(w[2 * v]), b = vreinterpretq_u16_u8(w[2 * v + 1]);
            kvc_widen(vuzp1q_u16(a, b), &x[0][2 * v], &x[0][2 * v + 1]);
            kvc_widen(vuzp2q_u16(a, b), &x[1][2 * v], &x[1][2 * v + 1]);
        }
    if (KIND == BF16)
        EACH (v, 4) {
            uint32x4_t a = vreinterpretq_u32_u8(w[v]);
            x[0][v] = vreinterpretq_f32_u32(vshlq_n_u32(a, 16));
            x[1][v] = vreinterpretq_f32_u32(vandq_u32(a, vdupq_n_u32(0xffff0000u)));
        }
    if (KIND >= E4M3)
        EACH (odd, 2) {
            uint8x16_t a = odd ? vuzp2q_u8(w[0], w[1]) : vuzp1q_u8(w[0], w[1]);
            uint8x16_t b = odd ? vuzp2q_u8(w[2], w[3]) : vuzp1q_u8(w[2], w[3]);
            float32x4_t *y = x[odd], *z = x[odd + 2];
            widen_codes(KIND, vuzp1q_u8(a, b), y, y + 1, y + 2, y + 3);
            widen_codes(KIND, vuzp2q_u8(a, b), z, z + 1, z + 2, z + 3);
        }
}

/* sum[r] += the words of four registers . elements of by[r] from `first` on. */
INLINE void multiply(int KIND, int NR, const uint8x16_t w[4], int first, const float32x4_t by[4], float32x4_t sum[4][4])
{
    float32x4_t x[4][4];
    part(KIND, w, x);
    EACH (i, EACH_WORD(KIND))
        EACH (v, 4)
            EACH (r, NR) sum[r][v] = vfmaq_n_f32(sum[r][v], x[i][v], by[r][first + i]);
}

/* ---------------------------------------------------------------- K: NT tiles */

INLINE void keys(int KIND, int NR, int NT, kvc_qk_args args, int64_t tile0)
{
    int64_t dim = args.query->dim, bytes = KVC_TILE * dim * BITS_OF(KIND) / 8;
    const float *q = args.query->forms[KVC_PLAIN].q + args.row0 * dim;
    const uint8_t *at = args.tiles + tile0 * bytes;
    float32x4_t sum[2][4][4], by[4];
    EACH (t, NT)
        EACH (r, NR)
            EACH (v, 4) sum[t][r][v] = vdupq_n_f32(0);
    for (int64_t j = 0; j < dim; j += 4) {
        EACH (r, NR) by[r] = vld1q_f32(q + r * dim + j);
/* gcc unrolls by itself, and warns if there is one iteration; the lanes of by[r] must be constants */
#if defined(__clang__)
#pragma clang loop unroll(full)
#endif
        EACH (word, 4 / EACH_WORD(KIND)) {
            EACH (t, NT) {
                uint8x16_t w[4];
                EACH (v, 4) w[v] = vld1q_u8(at + t * bytes + 16 * v);
                kvc_prefetch(at + t * bytes, 0, args.ahead);
                multiply(KIND, NR, w, word * EACH_WORD(KIND), by, sum[t]);
            }
            at += 4 * KVC_TILE;
        }
    }
    EACH (t, NT)
        EACH (v, 4) {
            int64_t token = (tile0 + t) * KVC_TILE + 4 * v;
            float32x4_t scale = KIND >= E4M3 ? vmulq_n_f32(kvc_scales(args.meta, token), UNIT(KIND)) : vdupq_n_f32(1);
            EACH (r, NR) {
                float32x4_t x = sum[t][r][v];
                vst1q_f32(args.s + r * args.ld + token, KIND >= E4M3 ? vmulq_f32(x, scale) : x);
            }
        }
}

INLINE void qk(int KIND, kvc_qk_args args)
{
#define CALL(NR, N) keys(KIND, NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.n_tiles, 1, 2, 1, 1)
#undef CALL
}
void kvc_neon_qk_raw_f32(const kvc_qk_args *args) { qk(F32, *args); }
void kvc_neon_qk_raw_f16(const kvc_qk_args *args) { qk(F16, *args); }
void kvc_neon_qk_raw_bf16(const kvc_qk_args *args) { qk(BF16, *args); }
void kvc_neon_qk_fp8_e4m3(const kvc_qk_args *args) { qk(E4M3, *args); }
void kvc_neon_qk_fp8_e5m2(const kvc_qk_args *args) { qk(E5M2, *args); }

/* ---------------------------------------------------------------- V: NC blocks of 16 dims from d0 */

/* Keeps `left` elements of a word: the others may hold anything (NaN). */
INLINE uint8x16_t stored(int KIND, uint8x16_t w, int64_t left)
{
    int64_t bytes = left * BITS_OF(KIND) / 8;
    return bytes >= 4 ? w : vandq_u8(w, vreinterpretq_u8_s32(vdupq_n_s32(bytes > 0 ? kvc_stored_bytes(bytes) : 0)));
}

/* args.p: weights, multiplied by an fp8 page's scales; 0 from args.n on. */
INLINE void values(int KIND, int NR, int NC, kvc_pv_args args, int64_t d0)
{
    float32x4_t sum[2][4][4], by[4];
    const uint8_t *at = args.tiles + 4 * d0;
    EACH (c, NC)
        EACH (r, NR)
            EACH (v, 4) sum[c][r][v] = vdupq_n_f32(0);
    for (int64_t t = 0; t < args.n; t += 4) {
        EACH (r, NR) by[r] = vld1q_f32(args.p + r * args.ld + t);
/* gcc unrolls by itself, and warns if there is one iteration; the lanes of by[r] must be constants */
#if defined(__clang__)
#pragma clang loop unroll(full)
#endif
        EACH (word, 4 / EACH_WORD(KIND)) {
            EACH (c, NC) {
                uint8x16_t w[4];
                EACH (v, 4) w[v] = vld1q_u8(at + 64 * c + 16 * v);
                if (KIND != E4M3 && t + 4 > args.n)
                    EACH (v, 4) w[v] = stored(KIND, w[v], args.n - t - word * EACH_WORD(KIND));
                kvc_prefetch(at + 64 * c, 0, args.ahead);
                multiply(KIND, NR, w, word * EACH_WORD(KIND), by, sum[c]);
            }
            at += 4 * args.dim;
        }
    }
    EACH (c, NC)
        EACH (r, NR)
            EACH (v, 4) kvc_add_to(args.o + r * args.dim + d0 + 16 * c + 4 * v, sum[c][r][v]);
}

INLINE void pv(int KIND, kvc_pv_args args)
{
    float weight[KVC_ROWS * KVC_MAX_PAGE];
    for (int64_t t = 0; KIND >= E4M3 && t < args.n; t += 4) {
        uint32x4_t scale = vreinterpretq_u32_f32(vmulq_n_f32(kvc_scales(args.meta, t), UNIT(KIND)));
        /* scales of missing tokens may hold anything */
        float32x4_t x = vreinterpretq_f32_u32(vandq_u32(scale, kvc_first(args.n - t)));
        for (int64_t r = 0; r < args.rows; r++)
            vst1q_f32(weight + r * KVC_MAX_PAGE + t, vmulq_f32(vld1q_f32(args.p + r * args.ld + t), x));
    }
    if (KIND >= E4M3) args.p = weight, args.ld = KVC_MAX_PAGE;
#define CALL(NR, N) values(KIND, NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 16, 2, 1, 1)
#undef CALL
}
void kvc_neon_pv_raw_f32(const kvc_pv_args *args) { pv(F32, *args); }
void kvc_neon_pv_raw_f16(const kvc_pv_args *args) { pv(F16, *args); }
void kvc_neon_pv_raw_bf16(const kvc_pv_args *args) { pv(BF16, *args); }
void kvc_neon_pv_fp8_e4m3(const kvc_pv_args *args) { pv(E4M3, *args); }
void kvc_neon_pv_fp8_e5m2(const kvc_pv_args *args) { pv(E5M2, *args); }
#endif
