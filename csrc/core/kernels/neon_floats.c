/* neon_floats.c - raw and fp8 pages on NEON: fp32 sums of fused products.
 *
 *   per 16 bytes and row     products     shared by the rows
 *   fp8                      4 fmla       3 to widen to fp16 (shift, mask; exact), 4 fcvtl
 *   raw_f16, raw_bf16        2 fmla       2
 *   raw_f32                  1 fmla       -
 * 16-bit words hold pairs of dims (K) or tokens (V): pairs of lanes are added at the end. */
#if defined(__aarch64__)
#include "neon.h"

/* 16 bytes of 16-bit elements to fp32, in order; `one`: of each word the lower element alone, the upper may hold anything. */
INLINE void widen_as(int bf16, const uint8_t *at, bool one, float32x4_t *a, float32x4_t *b)
{
    uint16x8_t h = vreinterpretq_u16_u8(vld1q_u8(at));
    if (one) h = vandq_u16(h, vreinterpretq_u16_u32(vdupq_n_u32(0xffff)));
    if (!bf16) {
        kvc_widen(h, a, b);
        return;
    }
    *a = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16));
    *b = vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(h), 16));
}

/* The four bytes of each word as floats: even (bytes 0, 2) and odd ones of words 0, 1 and of words 2, 3. */
INLINE void widen_fp8(int E, uint8x16_t w, float32x4_t even[2], float32x4_t odd[2])
{
    uint16x8_t h = vreinterpretq_u16_u8(w);
    kvc_widen(kvc_fp8_lower(E, h), &even[0], &even[1]);
    kvc_widen(kvc_fp8_upper(E, h), &odd[0], &odd[1]);
}

/* Four values as fp8's factors: pairs of the even and of the odd ones, each twice, so that two registers are one load. */
#define FACTORS 2 /* floats a value */
INLINE void put_factors(float x0, float x1, float x2, float x3, float *to)
{
    const float x[8] = {x0, x2, x0, x2, x1, x3, x1, x3};
    memcpy(to, x, sizeof x);
}

/* a: in pairs of lanes. */
INLINE float32x4_t join(const float32x4_t a[2]) { return vpaddq_f32(a[0], a[1]); }

/* ---------------------------------------------------------------- K: NH halves of tiles of 8 tokens */

/* q: rows as put_factors has them, [row][FACTORS * KVC_MAX_DIM]. */
INLINE void fp8_keys(int E, int NR, int NH, kvc_qk_args args, const float *q, int64_t dim, int64_t half0)
{
    if (half0 % 2) args.ahead = 0; /* a line once */
    float32x4_t sum[4][8][2];
    EACH (r, NR)
        EACH (v, 2 * NH) sum[r][v][0] = sum[r][v][1] = vdupq_n_f32(0);
    for (int64_t j = 0; j < dim; j += 4)
        EACH (v, 2 * NH) {
            int64_t half = half0 + v / 2;
            const uint8_t *at = args.tiles + half / 2 * KVC_TILE * dim + half % 2 * 32 + v % 2 * 16 + j * KVC_TILE;
            float32x4_t even[2], odd[2];
            if (v % 4 == 0) kvc_prefetch(at, 0, args.ahead);
            widen_fp8(E, vld1q_u8(at), even, odd);
            EACH (r, NR) {
                const float *x = q + FACTORS * (r * KVC_MAX_DIM + j);
                float32x4_t a = vld1q_f32(x), b = vld1q_f32(x + 4);
                EACH (i, 2) sum[r][v][i] = vfmaq_f32(vfmaq_f32(sum[r][v][i], even[i], a), odd[i], b);
            }
        }
    EACH (v, 2 * NH) {
        int64_t t = half0 * 8 + 4 * v;
        float32x4_t scale = vmulq_n_f32(kvc_scales(args.meta, t), kvc_fp8_unit(E));
        EACH (r, NR) vst1q_f32(args.s + r * args.ld + t, vmulq_f32(join(sum[r][v]), scale));
    }
}

INLINE void half_keys(int bf16, int NR, int NH, kvc_qk_args args, int64_t half0)
{
    if (half0 % 2) args.ahead = 0; /* a line once */
    int64_t dim = args.query->dim;
    float32x4_t sum[4][8][2];
    EACH (r, NR)
        EACH (v, 2 * NH) sum[r][v][0] = sum[r][v][1] = vdupq_n_f32(0);
    for (int64_t j = 0; j < dim; j += 2)
        EACH (v, 2 * NH) {
            int64_t half = half0 + v / 2;
            const uint8_t *at =
                args.tiles + half / 2 * KVC_TILE * dim * 2 + half % 2 * 32 + v % 2 * 16 + j * KVC_TILE * 2;
            float32x4_t x[2];
            if (v % 4 == 0) kvc_prefetch(at, 0, args.ahead);
            widen_as(bf16, at, false, &x[0], &x[1]);
            EACH (r, NR) {
                float32x4_t q = kvc_pair(args.query->forms[KVC_PLAIN].q + (args.row0 + r) * dim + j);
                EACH (i, 2) sum[r][v][i] = vfmaq_f32(sum[r][v][i], x[i], q);
            }
        }
    EACH (r, NR)
        EACH (v, 2 * NH) vst1q_f32(args.s + r * args.ld + half0 * 8 + 4 * v, join(sum[r][v]));
}

INLINE void f32_keys(int NR, int NH, kvc_qk_args args, int64_t half0)
{
    if (half0 % 2) args.ahead = 0; /* a line once */
    int64_t dim = args.query->dim;
    float32x4_t sum[4][8];
    EACH (r, NR)
        EACH (v, 2 * NH) sum[r][v] = vdupq_n_f32(0);
    for (int64_t j = 0; j < dim; j++)
        EACH (v, 2 * NH) {
            int64_t half = half0 + v / 2;
            const uint8_t *at =
                args.tiles + half / 2 * KVC_TILE * dim * 4 + half % 2 * 32 + v % 2 * 16 + j * KVC_TILE * 4;
            if (v % 4 == 0) kvc_prefetch(at, 0, args.ahead);
            float32x4_t x = vreinterpretq_f32_u8(vld1q_u8(at));
            EACH (r, NR)
                sum[r][v] = vfmaq_n_f32(sum[r][v], x, args.query->forms[KVC_PLAIN].q[(args.row0 + r) * dim + j]);
        }
    EACH (r, NR)
        EACH (v, 2 * NH) vst1q_f32(args.s + r * args.ld + half0 * 8 + 4 * v, sum[r][v]);
}

INLINE void fp8_qk(int E, kvc_qk_args args)
{
    float q[FACTORS * KVC_ROWS * KVC_MAX_DIM];
    int64_t dim = args.query->dim;
    for (int64_t r = 0; r < args.rows; r++)
        for (int64_t d = 0; d < dim; d += 4) {
            const float *from = args.query->forms[KVC_PLAIN].q + (args.row0 + r) * dim + d;
            put_factors(from[0], from[1], from[2], from[3], q + FACTORS * (r * KVC_MAX_DIM + d));
        }
#define CALL(NR, N) fp8_keys(E, NR, N, args, q, dim, at)
    KVC_BY_ROWS(CALL, args.rows, 2 * args.n_tiles, 1, 4, 2, 1)
#undef CALL
}
void kvc_neon_qk_fp8_e4m3(const kvc_qk_args *args) { fp8_qk(4, *args); }
void kvc_neon_qk_fp8_e5m2(const kvc_qk_args *args) { fp8_qk(5, *args); }

INLINE void qk_raw_f16(kvc_qk_args args)
{
#define CALL(NR, N) half_keys(0, NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, 2 * args.n_tiles, 1, 4, 2, 1)
#undef CALL
}
void kvc_neon_qk_raw_f16(const kvc_qk_args *args) { qk_raw_f16(*args); }

INLINE void qk_raw_bf16(kvc_qk_args args)
{
#define CALL(NR, N) half_keys(1, NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, 2 * args.n_tiles, 1, 4, 2, 1)
#undef CALL
}
void kvc_neon_qk_raw_bf16(const kvc_qk_args *args) { qk_raw_bf16(*args); }

INLINE void qk_raw_f32(kvc_qk_args args)
{
#define CALL(NR, N) f32_keys(NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, 2 * args.n_tiles, 1, 4, 2, 1)
#undef CALL
}
void kvc_neon_qk_raw_f32(const kvc_qk_args *args) { qk_raw_f32(*args); }

/* ---------------------------------------------------------------- V: NC blocks of 8 dims from d0 */

/* p: weights, scale and 2^8 folded in, as put_factors has them, [row][FACTORS * KVC_MAX_PAGE]. */
INLINE void fp8_values(int E, int NR, int NC, kvc_pv_args args, const float *p, int64_t d0)
{
    if (d0 % 16) args.ahead = 0; /* a line once */
    float32x4_t sum[4][8][2];
    EACH (r, NR)
        EACH (v, 2 * NC) sum[r][v][0] = sum[r][v][1] = vdupq_n_f32(0);
    for (int64_t t = 0; t < args.n; t += 4)
        EACH (v, 2 * NC) {
            const uint8_t *at = args.tiles + t * args.dim + (d0 + 4 * v) * 4;
            uint8x16_t w = vld1q_u8(at);
            if (E == 5 && t + 4 > args.n)
                w = vandq_u8(w, vreinterpretq_u8_s32(vdupq_n_s32(kvc_stored_bytes(args.n - t))));
            if (v % 4 == 0) kvc_prefetch(at, 0, args.ahead);
            float32x4_t even[2], odd[2];
            widen_fp8(E, w, even, odd);
            EACH (r, NR) {
                const float *x = p + FACTORS * (r * KVC_MAX_PAGE + t);
                float32x4_t a = vld1q_f32(x), b = vld1q_f32(x + 4);
                EACH (i, 2) sum[r][v][i] = vfmaq_f32(vfmaq_f32(sum[r][v][i], even[i], a), odd[i], b);
            }
        }
    EACH (r, NR)
        EACH (v, 2 * NC) kvc_add_to(args.o + r * args.dim + d0 + 4 * v, join(sum[r][v]));
}

INLINE void half_values(int bf16, int NR, int NC, kvc_pv_args args, int64_t d0)
{
    if (d0 % 16) args.ahead = 0; /* a line once */
    float32x4_t sum[4][8][2];
    EACH (r, NR)
        EACH (v, 2 * NC) sum[r][v][0] = sum[r][v][1] = vdupq_n_f32(0);
    for (int64_t t = 0; t < args.n; t += 2)
        EACH (v, 2 * NC) {
            const uint8_t *at = args.tiles + t * args.dim * 2 + (d0 + 4 * v) * 4;
            float32x4_t x[2];
            if (v % 4 == 0) kvc_prefetch(at, 0, args.ahead);
            widen_as(bf16, at, t + 1 == args.n, &x[0], &x[1]);
            EACH (r, NR) {
                float32x4_t w = kvc_pair(args.p + r * args.ld + t);
                EACH (i, 2) sum[r][v][i] = vfmaq_f32(sum[r][v][i], x[i], w);
            }
        }
    EACH (r, NR)
        EACH (v, 2 * NC) kvc_add_to(args.o + r * args.dim + d0 + 4 * v, join(sum[r][v]));
}

INLINE void f32_values(int NR, int NC, kvc_pv_args args, int64_t d0)
{
    if (d0 % 16) args.ahead = 0; /* a line once */
    float32x4_t sum[4][8];
    EACH (r, NR)
        EACH (v, 2 * NC) sum[r][v] = vdupq_n_f32(0);
    for (int64_t t = 0; t < args.n; t++)
        EACH (v, 2 * NC) {
            const uint8_t *at = args.tiles + t * args.dim * 4 + (d0 + 4 * v) * 4;
            if (v % 4 == 0) kvc_prefetch(at, 0, args.ahead);
            float32x4_t x = vreinterpretq_f32_u8(vld1q_u8(at));
            EACH (r, NR) sum[r][v] = vfmaq_n_f32(sum[r][v], x, args.p[r * args.ld + t]);
        }
    EACH (r, NR)
        EACH (v, 2 * NC) kvc_add_to(args.o + r * args.dim + d0 + 4 * v, sum[r][v]);
}

INLINE void fp8_pv(int E, kvc_pv_args args)
{
    float weight[FACTORS * KVC_ROWS * KVC_MAX_PAGE];
    for (int64_t r = 0; r < args.rows; r++)
        for (int64_t t = 0; t < args.n; t += 4) {
            float x[4], scale[4];
            vst1q_f32(scale, vmulq_n_f32(kvc_scales(args.meta, t), kvc_fp8_unit(E)));
            EACH (i, 4)
                x[i] = t + i < args.n ? args.p[r * args.ld + t + i] * scale[i]
                                      : 0; /* scales behind args.n may be anything */
            put_factors(x[0], x[1], x[2], x[3], weight + FACTORS * (r * KVC_MAX_PAGE + t));
        }
#define CALL(NR, N) fp8_values(E, NR, N, args, weight, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 8, 4, 2, 1)
#undef CALL
}
void kvc_neon_pv_fp8_e4m3(const kvc_pv_args *args) { fp8_pv(4, *args); }
void kvc_neon_pv_fp8_e5m2(const kvc_pv_args *args) { fp8_pv(5, *args); }

INLINE void pv_raw_f16(kvc_pv_args args)
{
#define CALL(NR, N) half_values(0, NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 8, 4, 2, 1)
#undef CALL
}
void kvc_neon_pv_raw_f16(const kvc_pv_args *args) { pv_raw_f16(*args); }

INLINE void pv_raw_bf16(kvc_pv_args args)
{
#define CALL(NR, N) half_values(1, NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 8, 4, 2, 1)
#undef CALL
}
void kvc_neon_pv_raw_bf16(const kvc_pv_args *args) { pv_raw_bf16(*args); }

INLINE void pv_raw_f32(kvc_pv_args args)
{
#define CALL(NR, N) f32_values(NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 8, 4, 2, 1)
#undef CALL
}
void kvc_neon_pv_raw_f32(const kvc_pv_args *args) { pv_raw_f32(*args); }
#endif
