/* neon_ints.h - attention on pages of integer codes for one NEON level, and affine.h. Codes of two words (8 dims of K,
 * or 8 tokens of V) are multiplied with registers of digits (neon.h), two columns of eight. Included by <isa>.c after
 * its target pragma and its definitions of ISA(name), LEVEL and
 *
 *   CODES(w), BIAS                     8-bit codes as the products of K take them, minus BIAS
 *   DOT(sum, codes, digits, lane)      sum of four lanes += four codes per lane . digits[lane]
 *   UDOT(sum, codes, digits, lane)     the same for V: codes as stored, digits not negative
 *   or MMLA(sum, codes, digits)        for both: sums [2][2] += codes [2][8] . columns [2][8]
 *
 * Instructions per 16 bytes and row, plus those shared by the rows: int8 2 DOT; int4 4 DOT + 2; int2 8 DOT + 6; int3 8
 * DOT + 22. Half of that with one limb of q (K). MMLA: half as many, and a zip per 16 codes. Integer sums are exact. */
#ifndef KVC_NEON_INTS_H
#define KVC_NEON_INTS_H

#include "lanes_neon.h"
#include "levels.h"
#include "accumulated.h"
#include "neon.h"

/* Plane p of the codes in the 16 bytes at `at` of a tile, one per byte: value_plane for values(),
 * plane_of for keys(). */
INLINE uint8x16_t value_plane(int KIND, int p, const uint8_t *tile, int64_t dim, int64_t at)
{
    const int BITS = kvc_plane_bits(KIND);
    uint8x16_t w = vld1q_u8(tile + at);
    if (KIND == 8) return w;
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

INLINE uint8x16_t plane_of(int KIND, int p, const uint8_t *tile, int64_t dim, int64_t at)
{
    uint8x16_t w = value_plane(KIND, p, tile, dim, at);
    return KIND == 8 ? CODES(w) : w;
}

#ifdef MMLA
/* Two registers of sums, for lanes 0, 1 and 2, 3, each by both columns. Sums of the second column start at `first`. */
INLINE int32x4_t begin_with(int32_t x) { return vreinterpretq_s32_u64(vdupq_n_u64((uint64_t)(uint32_t)x << 32)); }
INLINE void start(int32x4_t sums[2], int32x4_t first) { sums[0] = sums[1] = first; }

/* sums += words a and b of four lanes . digits */
INLINE void keys(int32x4_t sums[2], uint8x16_t a, uint8x16_t b, int8x16_t digits)
{
    uint32x4_t x = vreinterpretq_u32_u8(a), y = vreinterpretq_u32_u8(b);
    sums[0] = MMLA(sums[0], vreinterpretq_u8_u32(vzip1q_u32(x, y)), digits);
    sums[1] = MMLA(sums[1], vreinterpretq_u8_u32(vzip2q_u32(x, y)), digits);
}
#define values keys

/* Separates the sums of the first and the second column. */
INLINE void columns(int32x4_t sums[2])
{
    int32x4_t x = sums[0];
    sums[0] = vuzp1q_s32(x, sums[1]);
    sums[1] = vuzp2q_s32(x, sums[1]);
}
#else
INLINE int32x4_t begin_with(int32_t x) { return vdupq_n_s32(x); }
INLINE void start(int32x4_t sums[2], int32x4_t first)
{
    sums[0] = vdupq_n_s32(0);
    sums[1] = first;
}

INLINE void keys(int32x4_t sums[2], uint8x16_t a, uint8x16_t b, int8x16_t digits)
{
    sums[0] = DOT(DOT(sums[0], a, digits, 0), b, digits, 1);
    sums[1] = DOT(DOT(sums[1], a, digits, 2), b, digits, 3);
}

INLINE void values(int32x4_t sums[2], uint8x16_t a, uint8x16_t b, int8x16_t digits)
{
    sums[0] = UDOT(UDOT(sums[0], a, digits, 0), b, digits, 1);
    sums[1] = UDOT(UDOT(sums[1], a, digits, 2), b, digits, 3);
}

INLINE void columns(int32x4_t sums[2]) { (void)sums; }
#endif

/* dot[r][v] from the completed sums: 128 * hi + lo, or hi with one limb. */
INLINE void join_columns(int LIMBS, int NR, int NV, int32x4_t sums[4][8][2], int32x4_t dot[4][8])
{
    EACH (i, NR * LIMBS / 2 + NR * LIMBS % 2)
        EACH (v, NV) {
            columns(sums[i][v]);
            if (LIMBS == 2)
                dot[i][v] = vmlaq_n_s32(sums[i][v][1], sums[i][v][0], 128);
            else
                EACH (k, 2)
                    if (2 * i + k < NR) dot[2 * i + k][v] = sums[i][v][k];
        }
}

/* dot[r][v] = sum over words [j0, j1) of dims of codes * (128 * hi + lo) + first[r] (from begin_with), or codes * hi
 * with one limb, for NV registers of tokens from half half0 of a tile on. digits: of the block of rows. */
INLINE void key_dots(int BITS, int LIMBS, int NR, int NV, const uint8_t *tiles, int64_t half0, int64_t dim, int64_t j0,
                     int64_t j1, const int8_t *digits, const int32x4_t *first, ptrdiff_t ahead, int32x4_t dot[4][8])
{
    const int planes = 8 / kvc_plane_bits(BITS), ND = NR * LIMBS / 2 + NR * LIMBS % 2, STEP = BITS == 8 ? 16 : 8;
    int64_t period = dim / planes, j = j0, lane[8];
    const uint8_t *tile[8];
    int32x4_t sums[4][8][2];
    int8x16_t d[4];
    EACH (v, NV) {
        tile[v] = tiles + (half0 + v / 2) / 2 * kvc_kind_bytes(BITS, dim);
        lane[v] = (half0 + v / 2) % 2 * 32 + v % 2 * 16;
    }
    EACH (i, ND)
        EACH (v, NV) start(sums[i][v], LIMBS == 2 ? first[i] : vdupq_n_s32(0));
    if (period % 8 == 0) do { /* j0 < j1, both multiples of STEP */
            if (ahead)
                EACH (v, NV)
                    EACH (i, STEP / 4)
                        if (v % 4 == 0) kvc_prefetch_planes(BITS, tile[v], j / 4 + i, ahead);
#pragma GCC unroll 4 /* otherwise clang shifts by a variable and spills the sums */
            EACH (p, planes)
                EACH (step, STEP / 8) {
                    int64_t at = j + 8 * step;
                    EACH (i, ND) d[i] = vld1q_s8(digits + (p * period + at) * KVC_ROWS * LIMBS + 16 * i);
                    EACH (v, NV) {
                        uint8x16_t a = plane_of(BITS, p, tile[v], dim, lane[v] + at * KVC_TILE);
                        uint8x16_t b = plane_of(BITS, p, tile[v], dim, lane[v] + (at + 4) * KVC_TILE);
                        EACH (i, ND) keys(sums[i][v], a, b, d[i]);
                    }
                }
        } while ((j += STEP) < j1);
    /* 2-bit codes and a dim that is not a multiple of 32: one word at a time, paired with zeros */
    for (; j < j1; j += 4)
        EACH (p, planes) {
            int64_t at = p * period + j;
            EACH (i, ND) {
                uint64x2_t x = vreinterpretq_u64_s8(vld1q_s8(digits + at / 8 * 8 * KVC_ROWS * LIMBS + 16 * i));
                d[i] = vreinterpretq_s8_u64(vshlq_u64(x, vdupq_n_s64(at % 8 * -8)));
            }
            EACH (v, NV) {
                uint8x16_t a = plane_of(BITS, p, tile[v], dim, lane[v] + j * KVC_TILE);
                EACH (i, ND) keys(sums[i][v], a, vdupq_n_u8(0), d[i]);
            }
        }
    join_columns(LIMBS, NR, NV, sums, dot);
}

/* Prefetches dims d to d + 15 of word s; d is a multiple of 16. */
INLINE void prefetch_values(int BITS, const uint8_t *tile, int64_t dim, int64_t s, int64_t d, ptrdiff_t ahead)
{
    if (BITS == 3)
        kvc_prefetch_planes(BITS, tile, (s * dim + d) / 16, ahead);
    else
        kvc_prefetch(tile + 4 * (s * dim + d), 0, ahead);
}

/* dot[r][v] = first[r] + sum over n tokens of codes * weights, for NV registers of dims from d0 on. n is rounded up to
 * a multiple of 16; the weights there are 0. */
INLINE void value_dots(int BITS, int NR, int NV, const uint8_t *tiles, int64_t dim, int64_t n, int64_t d0,
                       const weights *w, const int32x4_t *first, ptrdiff_t ahead, int32x4_t dot[4][8])
{
    int32x4_t sums[4][8][2];
    const int8_t *digits = w->digits;
    EACH (r, NR)
        EACH (v, NV) start(sums[r][v], first[r]);
    do {                     /* n > 0 */
        int64_t at = 4 * d0; /* offset of word s */
        if (ahead)
            EACH (s, BITS / 2)
                EACH (v, NV)
                    if (v % 4 == 0) prefetch_values(BITS, tiles, dim, s, d0 + 4 * v, ahead);
#pragma GCC unroll 2
        EACH (
            h,
            2) { /* tokens from 8h: words 2h, 2h + 1 (8 bits), words 0, 1 of plane h (4), word 0 of planes 2h, 2h + 1 */
            int8x16_t d[4];
            uint8x16_t a[8], b[8];
            if (BITS == 4) at = 4 * d0;
            EACH (r, NR) d[r] = vld1q_s8(digits + (h * KVC_ROWS + r) * 16);
            EACH (v, NV) a[v] = value_plane(BITS, BITS == 8 ? 0 : BITS == 4 ? h : 2 * h, tiles, dim, at + 16 * v);
            if (BITS >= 4) at += 4 * dim;
            EACH (v, NV) b[v] = value_plane(BITS, BITS == 8 ? 0 : BITS == 4 ? h : 2 * h + 1, tiles, dim, at + 16 * v);
            if (BITS == 8) at += 4 * dim;
            EACH (v, NV)
                EACH (r, NR) values(sums[r][v], a[v], b[v], d[r]);
        }
        tiles += kvc_kind_bytes(BITS, dim);
        digits += 2 * KVC_ROWS * 16;
    } while ((n -= KVC_TILE) > 0);
    join_columns(2, NR, NV, sums, dot);
}

/* Initial values of sums that subtract centre * the sum of the row's digits. */
INLINE void less(int64_t rows, int32_t centre, const int32_t *sum, int32x4_t first[KVC_ROWS])
{
    for (int64_t r = 0; r < rows; r++) first[r] = begin_with(kvc_times(-centre, sum[r]));
}

/* Twice the dot of codes minus their middle, (2^BITS - 1) / 2. */
INLINE int32x4_t about_middle(int BITS, int32x4_t dot, int32_t sum)
{
    return vsubq_s32(vshlq_n_s32(dot, 1), vdupq_n_s32(kvc_times((1 << BITS) - 1, sum)));
}

/* ---------------------------------------------------------------- K */

#include "neon_bytes.h"

/* Rotated codes: (code - (2^BITS - 1) / 2) times the token's gain, plus q . centroid. One limb is in units of 128. */
INLINE void mid_keys(int BITS, int LIMBS, int NR, int NH, kvc_qk_args args, int64_t half0, const float *centre)
{
    if (half0 % 2) args.ahead = 0; /* prefetch each line once */
    const kvc_query_form *f = args.query->form;
    int64_t dim = args.query->dim;
    const int8_t *digits = LIMBS == 2 ? kvc_neon_digits(f, args.row0, dim) : f->one + args.row0 * dim;
    const int32_t *sum = (LIMBS == 2 ? f->sum : f->one_sum) + args.row0;
    int32x4_t dot[4][8], first[4];
    less(NR, 0, sum, first);
    key_dots(BITS, LIMBS, NR, 2 * NH, args.tiles, half0, dim, 0, dim * kvc_plane_bits(BITS) / 8, digits, first,
             args.ahead, dot);
    EACH (v, 2 * NH) {
        int64_t t = half0 * 8 + 4 * v;
        float32x4_t gain = kvc_scales(args.meta, t);
        EACH (r, NR) {
            int32x4_t x = about_middle(BITS, dot[r][v], sum[r]);
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

INLINE void add_times(float *o, int32x4_t x, float step)
{
    vst1q_f32(o, vfmaq_n_f32(vld1q_f32(o), vcvtq_f32_s32(x), step));
}

INLINE void int_values(int BITS, int NR, int NC, kvc_pv_args args, const weights *w, const int32x4_t *first,
                       float32x4_t step, int64_t d0)
{
    if (d0 % 16) args.ahead = 0; /* prefetch each line once */
    int32x4_t dot[4][8];
    value_dots(BITS, NR, 2 * NC, args.tiles, args.dim, args.n, d0, w, first, args.ahead, dot);
    EACH (r, NR)
        EACH (v, 2 * NC) {
            int32x4_t x = about_middle(BITS, dot[r][v], w->sum[r]);
            add_times(args.o + r * args.dim + d0 + 4 * v, x, step[r]);
        }
}

INLINE void int_pv(int BITS, kvc_pv_args args)
{
    weights w;
    int32x4_t first[KVC_ROWS];
    kvc_neon_weigh(&w, args.p, args.ld, args.rows, args.n, args.meta, NULL);
    less(args.rows, 0, w.sum, first);
    float32x4_t step = vmulq_n_f32(vld1q_f32(w.step), .5f); /* about_middle gives twice the dot */
#define CALL(NR, N) int_values(BITS, NR, N, args, &w, first, step, at)
    KVC_BY_ROWS(CALL, args.rows, args.dim, 8, 4, 2, 1)
#undef CALL
}
void ISA(pv_int4)(const kvc_pv_args *args) { int_pv(4, *args); }
void ISA(pv_int3)(const kvc_pv_args *args) { int_pv(3, *args); }
void ISA(pv_int2)(const kvc_pv_args *args) { int_pv(2, *args); }

/* ---------------------------------------------------------------- affine formats */

INLINE float sum_of(vf x) { return vaddvq_f32(vaddq_f32(vaddq_f32(x.x[0], x.x[1]), vaddq_f32(x.x[2], x.x[3]))); }
INLINE float most_of(vf x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.x[0], x.x[1]), vmaxq_f32(x.x[2], x.x[3]))); }

/* Sum of the integers of q's dims [d, d + n). */
INLINE int32_t group_sum(const kvc_query_form *f, int64_t row, int64_t dim, int64_t d, int64_t n)
{
    if (n == dim) return f->sum[row];
    const int8_t *digits = kvc_neon_digits(f, row / KVC_ROWS * KVC_ROWS, dim) + row % KVC_ROWS * 16;
    int32_t hi = 0, lo = 0;
    for (int64_t i = d; i < d + n; i += 8) {
        int8x16_t x = vld1q_s8(digits + i * KVC_ROWS * 2);
        hi += vaddlv_s8(vget_low_s8(x));
        lo += vaddlv_s8(vget_high_s8(x));
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
        EACH (v, 2 * NH) out[r][v] = vdupq_n_f32(0); /* in units of the row's step */
    for (int64_t g = 0, j = 0; j < dim; g++, j += x->group) {
        int32x4_t dot[4][8];
        int32x4_t first[4]; /* offsets are the centre times a sum */
        EACH (r, NR) first[r] = begin_with(-(BITS == 8 ? offset[r][g] / x->centre * (x->centre - BIAS) : offset[r][g]));
        key_dots(BITS, 2, NR, 2 * NH, x->words, half0, dim, j * BITS / 8, (j + x->group) * BITS / 8,
                 kvc_neon_digits(f, row0, dim), first, x->ahead, dot);
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
    int32x4_t dot[4][8], first[4];
    less(NR, x->centre, w->sum, first);
    value_dots(BITS, NR, 2 * NC, x->words, dim, n, d0, w, first, x->ahead, dot);
    EACH (r, NR)
        EACH (v, 2 * NC) {
            float *to = o + r * dim + d0 + 4 * v;
            float32x4_t y = vaddq_f32(vld1q_f32(to), vdupq_n_f32(middle[r]));
            vst1q_f32(to, vfmaq_n_f32(y, vcvtq_f32_s32(dot[r][v]), w->step[r]));
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
    (void)largest, (void)coarse; /* both precisions cost the same here */
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
