/* neon_ints.h - pages of integer codes for one level with NEON, and affine.h: products of four codes in a lane with four digits
 * of q (K) or of the weights (V), two limbs each. Included by <isa>.c behind its target, with ISA(name), LEVEL, BIAS and
 *
 *   DOT(sum, codes, digits, lane)   sum of four lanes += codes (a byte each, less BIAS where they have 8 bits) . digits[lane]
 *   CODES(w)                        8-bit codes as DOT takes them
 *
 *   per 16 bytes and row   int8  2 DOT    int4  4 DOT, 2 shared    int2  8 DOT, 6 shared; int3  8 DOT, 22 shared; half with one limb of q (K)
 * Integer sums are exact. */
#ifndef KVC_NEON_INTS_H
#define KVC_NEON_INTS_H

#include "lanes_neon.h"
#include "levels.h"
#include "mass.h"
#include "neon.h"

/* Plane p of the codes in the 16 bytes at `at` of a tile, one a byte. */
INLINE uint8x16_t plane_of(int KIND, int p, const uint8_t *tile, int64_t dim, int64_t at)
{
    const int BITS = kvc_plane_bits(KIND);
    uint8x16_t w = vld1q_u8(tile + at);
    if (KIND == 8) return CODES(w);
    if (KIND == 3) {
        int second = at >= 2 * dim;
        uint8x16_t high = vld1q_u8(tile + 4 * dim + at - (second ? 2 * dim : 0));
        w = vandq_u8(vshlq_u8(w, vdupq_n_s8((int8_t)(-2 * p))), vdupq_n_u8(3));
        high = vshlq_u8(high, vdupq_n_s8((int8_t)(2 - 2 * p - second)));
        return vorrq_u8(w, vandq_u8(high, vdupq_n_u8(4)));
    }
    if (p) w = vshlq_u8(w, vdupq_n_s8((int8_t)(-BITS * p)));
    return (p + 1) * BITS < 8 ? vandq_u8(w, vdupq_n_u8((uint8_t)((1 << BITS) - 1))) : w;
}

INLINE int8x16_t four(const int8_t *digits)
{
    int32_t x;
    memcpy(&x, digits, sizeof x);
    return vreinterpretq_s8_s32(vdupq_n_s32(x));
}

/* One word of K of NV registers in LANE of each row's digits. */
#define KEY_STEP(LANE, word)                                                                                           \
    EACH (v, NV) {                                                                                                     \
        uint8x16_t c = plane_of(BITS, p, tile[v], dim, lane[v] + (word) * KVC_TILE);                                   \
        EACH (r, NR) {                                                                                                 \
            dot[r][v] = DOT(dot[r][v], c, h[r], LANE);                                                                 \
            if (LIMBS == 2) low[r][v] = DOT(low[r][v], c, l[r], LANE);                                                 \
        }                                                                                                              \
    }

/* dot[r][v] = sum over words [j0, j1) of dims of codes * (128 * hi + lo), or with one limb of codes * hi, less offset[r]
 * (NULL: 0), for NV registers of tokens from half half0 of a tile on; q of row r at r * dim. */
INLINE void key_dots(int BITS, int LIMBS, int NR, int NV, const uint8_t *tiles, int64_t half0, int64_t dim, int64_t j0,
                     int64_t j1, const int8_t *hi, const int8_t *lo, const int32_t *offset, ptrdiff_t ahead,
                     int32x4_t dot[4][8])
{
    const int planes = 8 / kvc_plane_bits(BITS);
    int64_t period = dim / planes, j = j0, lane[8];
    const uint8_t *tile[8];
    int32x4_t low[4][8];
    int8x16_t h[4], l[4];
    EACH (v, NV) {
        tile[v] = tiles + (half0 + v / 2) / 2 * kvc_kind_bytes(BITS, dim);
        lane[v] = (half0 + v / 2) % 2 * 32 + v % 2 * 16;
    }
    EACH (r, NR)
        EACH (v, NV) {
            dot[r][v] = low[r][v] = vdupq_n_s32(0);
            if (offset) *(LIMBS == 2 ? &low[r][v] : &dot[r][v]) = vdupq_n_s32(-offset[r]);
        }
    for (; j + 16 <= j1; j += 16) {
        if (ahead)
            EACH (v, NV)
                EACH (i, 4)
                    if (v % 4 == 0) kvc_prefetch_planes(BITS, tile[v], j / 4 + i, ahead);
#pragma GCC unroll 4 /* clang else shifts by a variable, and spills sums */
        EACH (p, planes) {
            EACH (r, NR) {
                h[r] = vld1q_s8(hi + r * dim + p * period + j);
                if (LIMBS == 2) l[r] = vld1q_s8(lo + r * dim + p * period + j);
            }
            KEY_STEP(0, j)
            KEY_STEP(1, j + 4)
            KEY_STEP(2, j + 8)
            KEY_STEP(3, j + 12)
        }
    }
    for (; j < j1; j += 4)
        EACH (p, planes) {
            EACH (r, NR) {
                h[r] = four(hi + r * dim + p * period + j);
                if (LIMBS == 2) l[r] = four(lo + r * dim + p * period + j);
            }
            KEY_STEP(0, j)
        }
    if (LIMBS == 2)
        EACH (r, NR)
            EACH (v, NV) dot[r][v] = vaddq_s32(vshlq_n_s32(dot[r][v], 7), low[r][v]);
}

/* Tokens t + 4 * word of V in lane word of each row's digits. */
#define VALUE_STEP(LANE, s, p)                                                                                         \
    EACH (v, NV) {                                                                                                     \
        uint8x16_t c = plane_of(BITS, p, tile, dim, ((s) * dim + d0 + 4 * v) * 4);                                     \
        EACH (r, NR) {                                                                                                 \
            dot[r][v] = DOT(dot[r][v], c, h[r], LANE);                                                                 \
            low[r][v] = DOT(low[r][v], c, l[r], LANE);                                                                 \
        }                                                                                                              \
    }

/* dot[r][v] = sum over n tokens of codes * weights, of NV registers of dims; n up to a multiple of 16, where weights are 0.
 * d0: the first dim. */
INLINE void value_dots(int BITS, int NR, int NV, const uint8_t *tiles, int64_t dim, int64_t n, int64_t d0,
                       const weights *w, ptrdiff_t ahead, int32x4_t dot[4][8])
{
    int32x4_t low[4][8];
    EACH (r, NR)
        EACH (v, NV) dot[r][v] = low[r][v] = vdupq_n_s32(0);
    for (int64_t t = 0; t < n; t += KVC_TILE) {
        const uint8_t *tile = tiles + t / KVC_TILE * kvc_kind_bytes(BITS, dim);
        int8x16_t h[4], l[4];
        EACH (r, NR) {
            h[r] = vld1q_s8(w->hi[r] + t);
            l[r] = vld1q_s8(w->lo[r] + t);
        }
        if (ahead)
            EACH (s, BITS / 2)
                EACH (v, NV)
                    if (v % 4 == 0) kvc_prefetch_planes(BITS, tile, (s * dim + d0 + 4 * v) / 16, ahead);
        VALUE_STEP(0, 0, 0)
        if (BITS == 8) {
            VALUE_STEP(1, 1, 0)
            VALUE_STEP(2, 2, 0)
            VALUE_STEP(3, 3, 0)
        } else if (BITS == 4) {
            VALUE_STEP(1, 1, 0)
            VALUE_STEP(2, 0, 1)
            VALUE_STEP(3, 1, 1)
        } else {
            VALUE_STEP(1, 0, 1)
            VALUE_STEP(2, 0, 2)
            VALUE_STEP(3, 0, 3)
        }
    }
    EACH (r, NR)
        EACH (v, NV) dot[r][v] = vaddq_s32(vshlq_n_s32(dot[r][v], 7), low[r][v]);
}

/* What is subtracted of a dot for codes whose middle is centre, when the digits sum up to `sum`. */
INLINE int32x4_t less(int BITS, int32x4_t dot, int32_t centre, int32_t sum)
{
    return vsubq_s32(dot, vdupq_n_s32(kvc_times(centre - (BITS == 8 ? BIAS : 0), sum)));
}

/* ---------------------------------------------------------------- K */

INLINE void int8_keys(int NR, int NH, kvc_qk_args args, int64_t half0)
{
    if (half0 % 2) args.ahead = 0; /* a line once */
    const kvc_query_form *f = args.query->form;
    int64_t dim = args.query->dim;
    int32x4_t dot[4][8];
    key_dots(8, 2, NR, 2 * NH, args.tiles, half0, dim, 0, dim, f->hi + args.row0 * dim, f->lo + args.row0 * dim, NULL,
             args.ahead, dot);
    EACH (v, 2 * NH) {
        int64_t t = half0 * 8 + 4 * v;
        float32x4_t scale = kvc_scales(args.meta, t);
        EACH (r, NR) {
            float32x4_t x = vcvtq_f32_s32(less(8, dot[r][v], 128, f->sum[args.row0 + r]));
            vst1q_f32(args.s + r * args.ld + t, vmulq_f32(x, vmulq_n_f32(scale, f->step[args.row0 + r])));
        }
    }
}

INLINE void qk_int8(kvc_qk_args args)
{
#define CALL(NR, N) int8_keys(NR, N, args, at)
    KVC_BY_ROWS(CALL, args.rows, 2 * args.n_tiles, 1, 4, 2, 1)
#undef CALL
}
void ISA(qk_int8)(const kvc_qk_args *args) { qk_int8(*args); }

/* Rotated codes: code - (2^BITS - 1) / 2 in steps of the token's gain, plus q . centroid. One limb is in steps of 128. */
INLINE void mid_keys(int BITS, int LIMBS, int NR, int NH, kvc_qk_args args, int64_t half0, const float *centre)
{
    if (half0 % 2) args.ahead = 0; /* a line once */
    const kvc_query_form *f = args.query->form;
    int64_t dim = args.query->dim;
    const int8_t *hi = (LIMBS == 2 ? f->hi : f->one) + args.row0 * dim;
    const int32_t *sum = (LIMBS == 2 ? f->sum : f->one_sum) + args.row0;
    int32x4_t dot[4][8];
    key_dots(BITS, LIMBS, NR, 2 * NH, args.tiles, half0, dim, 0, dim * kvc_plane_bits(BITS) / 8, hi,
             f->lo + args.row0 * dim, NULL, args.ahead, dot);
    EACH (v, 2 * NH) {
        int64_t t = half0 * 8 + 4 * v;
        float32x4_t gain = kvc_scales(args.meta, t);
        EACH (r, NR) {
            int32x4_t x = less(BITS, vshlq_n_s32(dot[r][v], 1), (1 << BITS) - 1, sum[r]); /* twice the dot */
            float32x4_t step = vmulq_n_f32(gain, (LIMBS == 2 ? 0.5f : 64) * f->step[args.row0 + r]);
            vst1q_f32(args.s + r * args.ld + t, vfmaq_f32(vdupq_n_f32(centre[r]), vcvtq_f32_s32(x), step));
        }
    }
}

INLINE void mid_qk(int BITS, kvc_qk_args args)
{
    float centre[KVC_ROWS];
    kvc_neon_dot_centroid(args.meta + 2 * args.page_size, args.query, args.row0, args.rows, centre);
#define CALL(NR, N) mid_keys(BITS, LIMBS, NR, N, args, at, centre)
    if (kvc_neon_one_limb(BITS, args.meta, args.query, args.row0, args.rows, args.n_tiles)) {
#define LIMBS 1
        KVC_BY_ROWS(CALL, args.rows, 2 * args.n_tiles, 1, 4, 2, 2)
#undef LIMBS
    } else {
#define LIMBS 2
        KVC_BY_ROWS(CALL, args.rows, 2 * args.n_tiles, 1, 4, 2, 1)
#undef LIMBS
    }
#undef CALL
}
void ISA(qk_int4)(const kvc_qk_args *args) { mid_qk(4, *args); }
void ISA(qk_int3)(const kvc_qk_args *args) { mid_qk(3, *args); }
void ISA(qk_int2)(const kvc_qk_args *args) { mid_qk(2, *args); }

/* ---------------------------------------------------------------- V: NC blocks of 8 dims */

INLINE void int_values(int BITS, int NR, int NC, kvc_pv_args args, const weights *w, int64_t d0)
{
    if (d0 % 16) args.ahead = 0; /* a line once */
    int32x4_t dot[4][8];
    value_dots(BITS, NR, 2 * NC, args.tiles, args.dim, args.n, d0, w, args.ahead, dot);
    EACH (r, NR)
        EACH (v, 2 * NC) {
            int32x4_t x = BITS == 8 ? less(8, dot[r][v], 128, w->sum[r])
                                    : less(BITS, vshlq_n_s32(dot[r][v], 1), (1 << BITS) - 1, w->sum[r]);
            kvc_add_to(args.o + r * args.dim + d0 + 4 * v,
                       vmulq_n_f32(vcvtq_f32_s32(x), (BITS == 8 ? 1 : .5f) * w->step[r]));
        }
}

INLINE void int_pv(int BITS, kvc_pv_args args)
{
    weights w;
    kvc_neon_weigh(&w, args.p, args.ld, args.rows, args.n, args.meta, NULL);
#define CALL(NR, N) int_values(BITS, NR, N, args, &w, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 8, 4, 2, 1)
#undef CALL
}
void ISA(pv_int8)(const kvc_pv_args *args) { int_pv(8, *args); }
void ISA(pv_int4)(const kvc_pv_args *args) { int_pv(4, *args); }
void ISA(pv_int3)(const kvc_pv_args *args) { int_pv(3, *args); }
void ISA(pv_int2)(const kvc_pv_args *args) { int_pv(2, *args); }

/* ---------------------------------------------------------------- other formats of integers */

INLINE float sum_of(vf x) { return vaddvq_f32(vaddq_f32(vaddq_f32(x.x[0], x.x[1]), vaddq_f32(x.x[2], x.x[3]))); }
INLINE float most_of(vf x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.x[0], x.x[1]), vmaxq_f32(x.x[2], x.x[3]))); }

/* Sum of the integers that stand for q's dims [d, d + n). */
INLINE int32_t group_sum(const kvc_query_form *f, int64_t row, int64_t dim, int64_t d, int64_t n)
{
    if (n == dim) return f->sum[row];
    int32_t hi = 0, lo = 0;
    for (int64_t i = row * dim + d; i < row * dim + d + n; i += 16) {
        hi += vaddlvq_s8(vld1q_s8(f->hi + i));
        lo += vaddlvq_s8(vld1q_s8(f->lo + i));
    }
    return 128 * hi + lo;
}

INLINE void key_halves(int BITS, int NR, int NH, const kvc_affine *x, const kvc_query_form *f, int64_t row0,
                       const float sums[KVC_ROWS][KVC_MAX_GROUPS], const int32_t offset[KVC_ROWS][KVC_MAX_GROUPS],
                       const float *base, int64_t half0, float *s, int64_t ld)
{
    int64_t dim = x->dim;
    float32x4_t out[4][8];
    EACH (r, NR)
        EACH (v, 2 * NH) out[r][v] = vdupq_n_f32(0); /* in steps of the row */
    for (int64_t g = 0, j = 0; j < dim; g++, j += x->group) {
        int32x4_t dot[4][8];
        int32_t start[4]; /* offsets are the centre times a sum */
        EACH (r, NR) start[r] = BITS == 8 ? offset[r][g] / x->centre * (x->centre - BIAS) : offset[r][g];
        key_dots(BITS, 2, NR, 2 * NH, x->words, half0, dim, j * BITS / 8, (j + x->group) * BITS / 8, f->hi + row0 * dim,
                 f->lo + row0 * dim, start, x->ahead, dot);
        EACH (v, 2 * NH) {
            int64_t at = g * x->page_size + half0 * 8 + 4 * v;
            float32x4_t scale = vld1q_f32(x->scale + at), middle = vld1q_f32(x->middle + at);
            EACH (r, NR) {
                if (!x->symmetric) out[r][v] = vfmaq_n_f32(out[r][v], middle, sums[r][g]);
                out[r][v] = vfmaq_f32(out[r][v], vcvtq_f32_s32(dot[r][v]), scale);
            }
        }
    }
    EACH (r, NR)
        EACH (v, 2 * NH)
            vst1q_f32(s + r * ld + half0 * 8 + 4 * v, vfmaq_n_f32(vdupq_n_f32(base[r]), out[r][v], f->step[row0 + r]));
}

INLINE void key_tiles(int BITS, int NR, int NT, const kvc_affine *x, const kvc_query_form *f, int64_t row0,
                      const float sums[KVC_ROWS][KVC_MAX_GROUPS], const int32_t offset[KVC_ROWS][KVC_MAX_GROUPS],
                      const float *base, int64_t tile, float *s, int64_t ld)
{
    if (NR <= 2) {
        key_halves(BITS, NR, 2 * NT, x, f, row0, sums, offset, base, 2 * tile, s, ld);
        return;
    }
    EACH (h, 2) key_halves(BITS, NR, 1, x, f, row0, sums, offset, base, 2 * tile + h, s, ld);
}

INLINE void value_halves(int BITS, int NR, int NC, const kvc_affine *x, const weights *w, const float *middle,
                         int64_t n, int64_t d0, float *o)
{
    int64_t dim = x->dim;
    int32x4_t dot[4][8];
    value_dots(BITS, NR, 2 * NC, x->words, dim, n, d0, w, x->ahead, dot);
    EACH (r, NR)
        EACH (v, 2 * NC) {
            float *to = o + r * dim + d0 + 4 * v;
            float32x4_t y = vaddq_f32(vld1q_f32(to), vdupq_n_f32(middle[r]));
            vst1q_f32(to, vfmaq_n_f32(y, vcvtq_f32_s32(less(BITS, dot[r][v], x->centre, w->sum[r])), w->step[r]));
        }
}

/* 16 dims from d0. */
INLINE void value_dims(int BITS, bool BYTE, int NR, int NC, const kvc_affine *x, const weights *w, const float *middle,
                       int64_t n, int64_t d0, float *o)
{
    (void)BYTE;
    if (NR <= 2)
        value_halves(BITS, NR, 2 * NC, x, w, middle, n, d0, o);
    else
        EACH (h, 2) value_halves(BITS, NR, 1, x, w, middle, n, d0 + 8 * h, o);
}

INLINE void weigh_by(weights *w, const float *p, int64_t ld, int64_t rows, int64_t n, const float *scales,
                     const float *largest, bool coarse)
{
    (void)largest, (void)coarse; /* as exact either way */
    kvc_neon_weigh(w, p, ld, rows, n, NULL, scales);
}

#define PLANES true
#define COARSE false
#define NAME(function) ISA(function)
#define KVC_LEVEL LEVEL
#define KEY_TILES 2, 1, 1
#define VALUE_BLOCKS 1, 1, 1
#include "affine.h"

#endif
