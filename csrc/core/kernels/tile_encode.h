/* tile_encode.h - encodes x [dim][16] (fp32, one lane per token) to the words and metadata of a tile. The algorithms
 * are those of rows.h, transposed: loops over a row become loops down the lanes, so that scales, divisions and square
 * roots serve 16 tokens at once and K words need no transposition. All operations, and the order of all sums (16
 * partial sums over d % 16, then a tree), are those of rows.h, so the bytes are the same.
 *
 * Cost, instructions per 16 elements: integers 2 for the extremes, 4 to 6 for codes and words; small floats 12; rotated
 * 29. int4_lloyd tries three steps, which takes 2.3 times as long on AVX-512 and 3.2 times on AVX2. */
#ifndef KVC_TILE_ENCODE_H
#define KVC_TILE_ENCODE_H

#include "tile_move.h"
#include "tile_rotate.h"

/* Stores positive scales as fp16, never Inf or 0, where `some` is set; otherwise 0. Returns them as stored. */
INLINE vf put_scale(vf x, vm some, uint8_t *at)
{
    vi h = i_keep(some, i_max(h_of(f_min(x, f_all(65504))), i_all(1)));
    i_store16(at, h);
    return h_low(h);
}

INLINE vf inverse_of(vf scale, vm some)
{
    return i_bits(i_keep(some, f_bits(f_div(f_all(1), f_pick(some, scale, f_all(1))))));
}

INLINE vf clamp(vf x, vf low, vf high) { return f_min(f_max(x, low), high); }

/* Nearest integer, ties to even, for |x| < 2^21, plus `offset`, in the low byte. */
INLINE vi nearest(vf x, int offset) { return f_bits(f_add(x, f_all(12582912.f + (float)offset))); }

/* Combines the low bytes of four vectors to one word per lane. */
INLINE vi join_bytes(const vi *c)
{
    vi w = i_mix(i_all(0xff), c[0], i_left(c[1], 8));
    w = i_mix(i_all(0xffff), w, i_left(c[2], 16));
    return i_mix(i_all(0xffffff), w, i_left(c[3], 24));
}

INLINE vf at_dim(const float *x, int64_t d) { return f_load(x + d * LANES); }

INLINE vf absmax(const float *x, int64_t n)
{
    vf a[4] = {f_all(0), f_all(0), f_all(0), f_all(0)};
    for (int64_t d = 0; d < n; d += 4)
        for (int i = 0; i < 4; i++) a[i] = f_max(f_abs(at_dim(x, d + i)), a[i]);
    return f_max(f_max(a[0], a[1]), f_max(a[2], a[3]));
}

/* Minimum and maximum in the order of rows.h: whether 0 or -0 comes first decides the stored sign. */
INLINE void extremes(const float *x, int64_t n, vf *low, vf *high)
{
    for (int k = 0; k < 16; k += 4) {
        vf l[4], h[4];
        for (int i = 0; i < 4; i++) l[i] = h[i] = at_dim(x, k + i);
        for (int64_t d = k + 16; d < n; d += 16)
            for (int i = 0; i < 4; i++) {
                l[i] = f_min(at_dim(x, d + i), l[i]);
                h[i] = f_max(at_dim(x, d + i), h[i]);
            }
        for (int i = 0; i < 4; i++) {
            *low = k + i ? f_min(l[i], *low) : l[i];
            *high = k + i ? f_max(h[i], *high) : h[i];
        }
    }
}

/* Converts fp32 to a float with `m` mantissa bits. Normal numbers are rounded as integers; below `normal`, adding
 * `shifter` rounds to multiples of the smallest subnormal. `sign` is the position of the sign bit. */
INLINE vi to_small(vf y, float most, uint32_t m, uint32_t bias, float normal, float shifter, uint32_t sign)
{
    vf a = f_min(f_abs(y), f_all(most));
    vi u = f_bits(a), odd = i_and(i_right(u, 23 - m), i_all(1));
    vi rounded = i_add(i_add(u, i_all((1u << (22 - m)) - 1 - (bias << 23))), odd);
    vi small = i_sub(f_bits(f_add(a, f_all(shifter))), f_bits(f_all(shifter)));
    vi code = i_pick(f_less(a, f_all(normal)), small, i_right(rounded, 23 - m));
    vi minus = sign == 0x80 ? i_right(f_bits(y), 24) : i_right(f_bits(y), 28);
    return i_mix(i_all(sign), minus, code);
}

INLINE vi e4m3_code(vf y) { return to_small(y, 448, 3, 120, 0x1p-6f, 0x1p14f, 0x80); }

/* One group of n dims in a coding without statistics across elements; metadata at `meta`, planes
 * `plane` bytes apart. */
INLINE void encode_group(int coding, int bits, int scale_kind, const float *x, int64_t n, uint8_t *meta, int64_t plane,
                         uint32_t *codes)
{
    float top = coding == KVC_CODING_INT ? (float)((1 << (bits - 1)) - 1) : (float)((1 << bits) - 1);
    vf inverse, low = f_all(0), zero = f_all(0);
    vm some;
    if (coding == KVC_CODING_UINT) {
        vf high = zero;
        extremes(x, n, &low, &high);
        vi h = h_of(clamp(low, f_all(-65504), f_all(65504)));
        i_store16(meta + plane, h);
        low = h_low(h);
        vf span = f_sub(high, low);
        some = f_less(zero, span);
        inverse = inverse_of(put_scale(f_div(span, f_all(top)), some, meta), some);
    } else {
        vf a = absmax(x, n);
        some = f_less(zero, a);
        if (coding == KVC_CODING_E2M1 && scale_kind == KVC_SCALE_E8M0) {
            vi e = i_max(i_sub(i_right(f_bits(a), 23), i_all(2)), i_all(1));
            i_store8(meta, e);
            inverse = i_bits(i_left(i_sub(i_all(254), e), 23));
        } else if (coding == KVC_CODING_E2M1) {
            vi e = i_keep(some, i_max(e4m3_code(f_div(a, f_all(6))), i_all(1)));
            i_store8(meta, e);
            vf scale = f_mul(h_low(i_left(e, 7)), f_all(256)); /* e4m3 to e5m10: subtract 8 from the exponent */
            inverse = inverse_of(scale, some);
        } else {
            float most = coding == KVC_CODING_E4M3 ? 448 : coding == KVC_CODING_E5M2 ? 57344 : top;
            inverse = inverse_of(put_scale(f_div(a, f_all(most)), some, meta), some);
        }
    }
    for (int64_t d = 0; d < n; d += 4) {
        vi c[4];
        for (int i = 0; i < 4; i++) {
            vf v = at_dim(x, d + i);
            if (coding == KVC_CODING_UINT)
                c[i] = nearest(clamp(f_mul(f_sub(v, low), inverse), zero, f_all(top)), 0);
            else if (coding == KVC_CODING_INT)
                c[i] = nearest(clamp(f_mul(v, inverse), f_all(-top), f_all(top)), 1 << (bits - 1));
            else if (coding == KVC_CODING_E4M3)
                c[i] = e4m3_code(f_mul(v, inverse));
            else if (coding == KVC_CODING_E5M2)
                c[i] = to_small(f_mul(v, inverse), 57344, 2, 112, 0x1p-14f, 0x1p7f, 0x80);
            else
                c[i] = to_small(f_mul(v, inverse), 6, 1, 126, 1, 0x1p22f, 8);
        }
        vi w = join_bytes(c);
        i_store(codes + d / 4 * LANES, coding == KVC_CODING_E4M3 ? i_keep(some, w) : w); /* no -0 in a row of zeros */
    }
}

/* Tables of the positive Lloyd-Max levels by cells of width 8: at the start of the cell, the code (in its low byte) and
 * the level; the edge within the cell (at most one, because levels are at least 12 apart); the increase of the level at
 * the edge. */
#define LLOYD_CODE(k) (12582912.f + 8 + (k))
static const float lloyd_code_at[16] = {LLOYD_CODE(0), LLOYD_CODE(0), LLOYD_CODE(1), LLOYD_CODE(1),
                                        LLOYD_CODE(2), LLOYD_CODE(3), LLOYD_CODE(3), LLOYD_CODE(4),
                                        LLOYD_CODE(4), LLOYD_CODE(5), LLOYD_CODE(5), LLOYD_CODE(6),
                                        LLOYD_CODE(6), LLOYD_CODE(6), LLOYD_CODE(7), LLOYD_CODE(7)};
static const float lloyd_level_at[16] = {6, 6, 18, 18, 31, 44, 44, 58, 58, 75, 75, 96, 96, 96, 127, 127};
static const float lloyd_edge[16] = {1e9f,  12,   1e9f,  24.5f, 37.5f, 1e9f,   51,   1e9f,
                                     66.5f, 1e9f, 85.5f, 1e9f,  1e9f,  111.5f, 1e9f, 1e9f};
static const float lloyd_growth[16] = {0, 12, 0, 13, 13, 0, 14, 0, 17, 0, 21, 0, 0, 31, 0, 0};

/* The cell of a >= 0 in its low 4 bits. At a boundary it may be the previous cell, which gives the same level. */
INLINE vi lloyd_cell(vf a)
{
    return f_bits(f_add(f_fma(f_min(a, f_all(127)), f_all(0.125f), f_all(-0.5f)), f_all(12582912.f)));
}
INLINE vm lloyd_passed(vf a, vi cell) { return f_less(f_table(lloyd_edge, cell), a); }

/* kvc_lloyd_code, in the low byte. */
INLINE vi lloyd_code(vf x)
{
    vf a = f_abs(x);
    vi cell = lloyd_cell(a);
    vi code = i_add(f_bits(f_table(lloyd_code_at, cell)), i_keep(lloyd_passed(a, cell), i_all(1)));
    return i_pick(f_less(x, f_all(0)), i_sub(i_all(15), code), code);
}

/* p[i] += p[i + 8], then + 4, + 2, + 1. */
INLINE vf tree_sum(vf *p)
{
    for (int h = 8; h > 0; h /= 2)
        for (int i = 0; i < h; i++) p[i] = f_add(p[i], p[i + h]);
    return p[0];
}

/* For codes with step 1 / inverse of each row: num = sum of row * levels, den = sum of levels squared. */
INLINE void fit(int coding, int bits, const float *x, int64_t n, vf inverse, vf *num, vf *den)
{
    const int half = 1 << (bits - 1);
    vf p[LANES], squares[4] = {f_all(0), f_all(0), f_all(0), f_all(0)};
    for (int k = 0; k < LANES; k++) {
        p[k] = f_all(0);
        for (int64_t d = k; d < n; d += LANES) {
            vf v = at_dim(x, d), y = f_mul(v, inverse), level;
            if (coding == KVC_CODING_LLOYD) { /* a level and its negative behave alike */
                v = f_abs(v);
                y = f_abs(y);
                vi cell = lloyd_cell(y), growth = f_bits(f_table(lloyd_growth, cell));
                level = f_add(f_table(lloyd_level_at, cell), i_bits(i_keep(lloyd_passed(y, cell), growth)));
            } else {
                level = f_within(f_add(f_floor(y), f_all(0.5f)), (float)half - 0.5f);
            }
            p[k] = f_add(p[k], f_mul(v, level));
            squares[k % 4] = f_fma(level, level, squares[k % 4]);
        }
    }
    *num = tree_sum(p);
    *den = f_add(f_add(squares[0], squares[1]), f_add(squares[2], squares[3]));
}

/* 1 / step of each row, the best of the steps that the coding tries (kvc_rotated_steps). */
INLINE vf best_inverse(int coding, int bits, const float *x, int64_t n, vf step)
{
    vf inverse = f_div(f_all(1), step), num, den;
    if (kvc_rotated_steps(coding, bits) == 1) return inverse;
    fit(coding, bits, x, n, inverse, &num, &den);
    for (int i = 1; i < kvc_rotated_steps(coding, bits); i++) {
        vf other = f_div(f_all(1), f_mul(step, f_all(kvc_step_factor(i)))), more, sum;
        fit(coding, bits, x, n, other, &more, &sum);
        vm better = f_less(f_mul(f_mul(num, num), sum), f_mul(f_mul(more, more), den));
        inverse = f_pick(better, other, inverse);
        num = f_pick(better, more, num);
        den = f_pick(better, sum, den);
    }
    return inverse;
}

/* Sum over i in (d, n) of weigh[i] * x[i], in the order of rows.h. */
static __attribute__((noinline)) vf weighed(const float *weigh, const float *x, int64_t d, int64_t n)
{
    vf p[LANES];
    for (int k = 0; k < LANES; k++) p[k] = f_all(0);
    for (int64_t i = d + 1; i < n && i % LANES; i++)
        p[i % LANES] = f_add(p[i % LANES], f_mul(f_all(weigh[i]), at_dim(x, i)));
    for (int64_t i = (d / LANES + 1) * LANES; i < n; i += LANES)
        for (int k = 0; k < LANES; k++) p[k] = f_add(p[k], f_mul(f_all(weigh[i + k]), at_dim(x, i + k)));
    return tree_sum(p);
}

INLINE vf nearest_level(vf y, int coding, int bits)
{
    const float half = (float)(1 << (bits - 1));
    if (coding == KVC_CODING_LLOYD) return f_table(level_table(coding, bits), lloyd_code(y));
    return f_within(f_add(f_floor(y), f_all(0.5f)), half - 0.5f);
}

/* kvc_feed_back for 16 rows. Cost: dim^2 / 2 times 2 products, additions and loads. */
static __attribute__((noinline)) vf feed_back(int coding, int bits, float *x, int64_t n, vf inverse,
                                              const float *feedback)
{
    _Alignas(64) float error[KVC_MAX_DIM * LANES];
    vf step = f_div(f_all(1), inverse), sums[3][LANES];
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < LANES; k++) sums[i][k] = f_all(0);
    for (int64_t d = n - 1; d >= 0; d--) {
        const float *weigh = feedback + d * n;
        int k = (int)(d % LANES);
        vf target = f_add(at_dim(x, d), weighed(weigh, error, d, n)), before = weighed(weigh, x, d, n);
        vf level = nearest_level(f_mul(target, inverse), coding, bits);
        vf levels = f_add(level, before), row = f_add(target, f_mul(step, before)), cost = f_all(feedback[n * n + d]);
        f_store(error + d * LANES, f_sub(at_dim(x, d), f_mul(step, level)));
        f_store(x + d * LANES, level);
        sums[0][k] = f_add(sums[0][k], f_mul(cost, f_mul(row, row)));
        sums[1][k] = f_add(sums[1][k], f_mul(cost, f_mul(row, levels)));
        sums[2][k] = f_add(sums[2][k], f_mul(cost, f_mul(levels, levels)));
    }
    vf length = tree_sum(sums[0]), num = tree_sum(sums[1]), den = tree_sum(sums[2]);
    return f_min(f_div(length, num), f_mul(f_all(1.125f), f_div(num, den)));
}

/* Rotated codes; overwrites x. Subtracts `mean` first (NULL: none). Sums of squared levels are exact (quarters, or
 * integers below 2^24), so their order does not matter. */
INLINE void encode_rotated(int coding, int bits, float *x, int64_t n, const float *mean, const float *feedback,
                           uint8_t *meta, uint32_t *codes)
{
    float half = (float)(1 << (bits - 1)), step = kvc_rotated_step(coding, bits);
    vf a, p[LANES], den[4] = {f_all(0), f_all(0), f_all(0), f_all(0)};
    for (int64_t d = 0; mean && d < n; d++) f_store(x + d * LANES, f_sub(at_dim(x, d), f_all(mean[d])));
    a = absmax(x, n);
    vm none = f_less(a, f_all(0x1p-100f)), some = f_less(f_all(0x1.fffffep-101f), a);
    for (int k = 0; k < LANES; k++) p[k] = f_all(0);
    rotate_tile(x, n, f_div(f_all(1), f_pick(none, f_all(1), a)), (after){.squares = p});
    vf length = tree_sum(p), rms = f_sqrt(f_div(length, f_all((float)n))); /* length: sum of squares */
    vf inverse = best_inverse(coding, bits, x, n, f_mul(f_all(step), f_pick(none, f_all(1), rms))), fed = inverse;
    if (feedback) {
        fed = feed_back(coding, bits, x, n, inverse, feedback);
        inverse = f_all(1);
    }
    for (int k = 0; k < LANES; k += 4) {
        vf num[4] = {f_all(0), f_all(0), f_all(0), f_all(0)};
        vi all = i_all((uint32_t)(1 << (bits - 1)) * 0x01010101u);
        for (int64_t d = k; d < n; d += 16) {
            /* 2^23 plus twice a code; three dims in one float, 8 bits apart. Exact, because it stays below 2^24. */
            vf one = f_all(0x1p23f + 2 * half - 1), three = f_all(0x1p23f + (2 * half - 1) * 0x10101p0f);
            if (coding == KVC_CODING_LLOYD) {
                vi c[4];
                for (int i = 0; i < 4; i++) {
                    vf v = at_dim(x, d + i);
                    c[i] = lloyd_code(f_mul(v, inverse));
                    vf level = f_table(level_table(coding, bits), c[i]);
                    num[i] = f_add(num[i], f_mul(v, level));
                    den[i] = f_fma(level, level, den[i]);
                }
                i_store(codes + d / 4 * LANES, i_pick(none, all, join_bytes(c)));
                continue;
            }
            for (int i = 0; i < 4; i++) {
                vf v = at_dim(x, d + i), q = f_floor(f_mul(v, inverse));
                vf level = f_within(f_fma(q, f_all(1), f_all(0.5f)), half - 0.5f);
                num[i] = f_add(num[i], f_mul(v, level));
                den[i] = f_fma(level, level, den[i]);
                if (i < 3)
                    three = f_fma(level, f_all((float)(2 << 8 * i)), three);
                else
                    one = f_fma(level, f_all(2), one);
            }
            vi w = i_mix(i_all(0x7fffff), i_right(f_bits(three), 1), i_left(f_bits(one), 23));
            i_store(codes + d / 4 * LANES, i_pick(none, all, w));
        }
        for (int i = 0; i < 4; i++) p[k + i] = num[i];
    }
    vf squares = f_add(f_add(den[0], den[1]), f_add(den[2], den[3])), num = tree_sum(p);
    vf gain = f_div(num, squares); /* as kvc_rotated_gain */
    if (kvc_rotated_steps(coding, bits) > 1) gain = f_min(f_div(length, num), f_mul(f_all(1.125f), gain));
    put_scale(f_mul(feedback ? fed : gain, a), some, meta);
}

/* The codes of cal2, as kvc_encode_spread. */
INLINE void encode_spread(float *x, int64_t n, const float *mean, uint8_t *meta, uint32_t *codes)
{
    int64_t fine = n / 4, used = n - fine;
    vf p[LANES], den[LANES];
    for (int64_t d = 0; mean && d < used; d++) f_store(x + d * LANES, f_sub(at_dim(x, d), f_all(mean[d])));
    vf a = absmax(x, used);
    vm none = f_less(a, f_all(0x1p-100f)), some = f_less(f_all(0x1.fffffep-101f), a);
    vf scale = f_div(f_all(1), f_pick(none, f_all(1), a));
    for (int k = 0; k < LANES; k++) p[k] = den[k] = f_all(0);
    for (int64_t d = 0; d < used; d++) {
        vf v = f_mul(at_dim(x, d), scale);
        f_store(x + d * LANES, v);
        p[d % LANES] = f_add(p[d % LANES], f_mul(v, v));
    }
    vf length = tree_sum(p), rms = f_sqrt(f_div(length, f_all((float)used))); /* length: sum of squares */
    rms = f_pick(none, f_all(1), rms);
    vf steps[2] = {f_div(f_all(1), rms), f_div(f_all(1), f_mul(f_all(KVC_FINE), rms))};
    vi twos = i_all(0x02020202), ones = i_all(0x03030303);
    for (int64_t d = 0; d < used; d += 4) {
        bool two = d < fine;
        float half = two ? 8 : 2;
        vi c[4];
        for (int i = 0; i < 4; i++) {
            vf v = at_dim(x, d + i), q = f_floor(clamp(f_mul(v, steps[two]), f_all(-half), f_all(half - 0.5f)));
            vf level = f_mul(f_add(q, f_all(0.5f)), f_all(two ? KVC_FINE : 1));
            int k = (int)(d + i) % LANES;
            c[i] = nearest(q, (int)half);
            den[k] = f_add(den[k], f_mul(level, level));
        }
        vi w = join_bytes(c);
        i_store(codes + d / 4 * LANES, i_pick(none, twos, two ? i_and(i_right(w, 2), ones) : w));
        if (two) i_store(codes + (used + d) / 4 * LANES, i_pick(none, twos, i_and(w, ones)));
    }
    put_scale(f_mul(f_sqrt(f_div(length, tree_sum(den))), a), some, meta);
}

#endif
