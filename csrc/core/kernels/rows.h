/* rows.h - row encoders in plain C with 16 lanes, compiled by every level. Each lane does the same operations as scalar
 * code, so all levels produce the same bytes. Included after a level's target pragma and fp-contract=off; ROTATE(rows,
 * n, dim) is the level's transform. Rounding rules as in scalar_codec.c.
 *
 * Cost: about 12 instructions per 16 dims for integers (two passes: extremes, codes), 30 for e2m1, 40 for e5m2. */
#ifndef KVC_ROWS_H
#define KVC_ROWS_H

#include "base/floats.h"
#include "kernels.h"

#include <math.h>

#define LANES 16
#define EACH_LANE for (int i = 0; i < LANES; i++)

/* A row encoder writes n codes, one per byte, and the metadata of their group. */
typedef struct range {
    float low, high;
} range;

static inline range kvc_row_range(const float *x, int64_t n)
{
    float low[LANES], high[LANES];
    EACH_LANE low[i] = high[i] = x[i];
    for (int64_t d = LANES; d < n; d += LANES) EACH_LANE
        {
            low[i] = x[d + i] < low[i] ? x[d + i] : low[i];
            high[i] = x[d + i] > high[i] ? x[d + i] : high[i];
        }
    range r = {low[0], high[0]};
    EACH_LANE
    {
        r.low = low[i] < r.low ? low[i] : r.low;
        r.high = high[i] > r.high ? high[i] : r.high;
    }
    return r;
}

static inline float kvc_row_absmax(const float *x, int64_t n)
{
    range r = kvc_row_range(x, n);
    return fabsf(-r.low > r.high ? -r.low : r.high); /* fabsf: 0 for a row of -0 */
}

/* Nearest integer, ties to even, for |x| <= 2^22, in the rounding mode of the codecs. */
static inline float kvc_nearest(float x) { return (x + 12582912.f) - 12582912.f; }

static inline float kvc_floor(float x)
{
    float whole = (float)(int32_t)x;
    return whole - (x < whole ? 1.f : 0.f);
}

static inline float kvc_lane_sum(float *p)
{
    for (int h = LANES / 2; h > 0; h /= 2)
        for (int i = 0; i < h; i++) p[i] += p[i + h];
    return p[0];
}

static inline void kvc_put16(uint8_t *meta, uint16_t h) { memcpy(meta, &h, sizeof h); }

/* Symmetric: absmax / (2^(bits-1) - 1). */
static inline void kvc_encode_int(const float *x, int64_t n, int bits, uint8_t *restrict codes, uint8_t *meta)
{
    float a = kvc_row_absmax(x, n), top = (float)((1 << (bits - 1)) - 1);
    uint16_t scale = a > 0 ? kvc_scale_to_f16(a / top) : 0;
    float inverse = a > 0 ? 1 / kvc_f16_to_f32(scale) : 0;
    for (int64_t d = 0; d < n; d += LANES) EACH_LANE
    codes[d + i] = (uint8_t)((int)kvc_nearest(kvc_clamp(x[d + i] * inverse, -top, top)) + (1 << (bits - 1)));
    kvc_put16(meta, scale);
}

/* Asymmetric: zero point = minimum, scale = (maximum - zero point as stored) / (2^bits - 1). */
static inline void kvc_encode_uint(const float *x, int64_t n, int bits, uint8_t *restrict codes, uint8_t *meta)
{
    range r = kvc_row_range(x, n);
    float top = (float)((1 << bits) - 1);
    uint16_t zero = kvc_f32_to_f16(kvc_clamp(r.low, -65504, 65504));
    float low = kvc_f16_to_f32(zero), span = r.high - low;
    uint16_t scale = span > 0 ? kvc_scale_to_f16(span / top) : 0;
    float inverse = span > 0 ? 1 / kvc_f16_to_f32(scale) : 0;
    for (int64_t d = 0; d < n; d += LANES) EACH_LANE
    codes[d + i] = (uint8_t)(int)kvc_nearest(kvc_clamp((x[d + i] - low) * inverse, 0, top));
    kvc_put16(meta, scale);
    kvc_put16(meta + 2, zero);
}

/* minus = 0: a row of zeros has no -0. */
#define FP8_ENCODER(name, largest, minus)                                                                              \
    static inline void kvc_encode_##name(const float *x, int64_t n, uint8_t *restrict codes, uint8_t *meta)            \
    {                                                                                                                  \
        float a = kvc_row_absmax(x, n);                                                                                \
        uint16_t scale = a > 0 ? kvc_scale_to_f16(a / largest) : 0;                                                    \
        float inverse = a > 0 ? 1 / kvc_f16_to_f32(scale) : 0;                                                         \
        for (int64_t d = 0; d < n; d += LANES) EACH_LANE codes[d + i] = kvc_f32_to_##name(x[d + i] * inverse);         \
        if (a == 0 && !minus) memset(codes, 0, (size_t)n);                                                             \
        kvc_put16(meta, scale);                                                                                        \
    }
FP8_ENCODER(e4m3, 448, 0)
FP8_ENCODER(e5m2, 57344, 1)

/* e2m1 (0, .5, 1, 1.5, 2, 3, 4, 6), ties to the even code, saturating. The block's scale is e4m3 of absmax / 6, or the
 * power of two with the exponent of absmax minus 2 (OCP MX 1.0, section 6.3). */
static inline void kvc_encode_e2m1(const float *x, int64_t n, int scale, uint8_t *restrict codes, uint8_t *meta)
{
    float a = kvc_row_absmax(x, n), inverse = 0;
    if (scale == KVC_SCALE_E4M3) {
        uint8_t s = a > 0 ? kvc_f32_to_e4m3(a / 6) : 0;
        *meta = a > 0 && s == 0 ? 1 : s;
        inverse = a > 0 ? 1 / kvc_e4m3_to_f32(*meta) : 0;
    } else {
        int32_t e = (int32_t)(kvc_f32_bits(a) >> 23) - 2;
        *meta = (uint8_t)(e < 1 ? 1 : e);
        inverse = kvc_f32_of_bits((uint32_t)(254 - *meta) << 23);
    }
    for (int64_t d = 0; d < n; d += LANES) EACH_LANE
        {
            float y = x[d + i] * inverse, m = fabsf(y);
            int code = (m > .25f) + (m >= .75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.f);
            codes[d + i] = (uint8_t)(code | (int)(kvc_f32_bits(y) >> 28 & 8));
        }
}

/* Codes of a rotated row with step 1 / inverse; num = sum of row * levels, den = sum of levels squared. */
static inline void kvc_fit(const float *restrict x, int64_t n, int coding, int bits, float inverse,
                           uint8_t *restrict codes, float *num, float *den)
{
    float a[LANES] = {0}, b[LANES] = {0}, half = (float)(1 << (bits - 1));
    for (int64_t d = 0; d < n; d += LANES) EACH_LANE
        {
            /* clamp first: NaN cannot be converted to int */
            float q = kvc_clamp(x[d + i] * inverse, -half, half - 0.5f), level;
            if (coding == KVC_CODING_MID) {
                q = kvc_floor(q);
                level = q + 0.5f;
                codes[d + i] = (uint8_t)((int)q + (1 << (bits - 1)));
            } else {
                codes[d + i] = (uint8_t)kvc_lloyd_code(bits, x[d + i] * inverse);
                level = (float)kvc_lloyd_level(bits, codes[d + i]);
            }
            a[i] += x[d + i] * level;
            b[i] += level * level;
        }
    *num = kvc_lane_sum(a);
    *den = kvc_lane_sum(b);
}

/* The nearest level of a number, with step 1. */
static inline float kvc_nearest_level(float y, int coding, int bits)
{
    float half = (float)(1 << (bits - 1));
    if (coding == KVC_CODING_LLOYD) return (float)kvc_lloyd_level(bits, (uint8_t)kvc_lloyd_code(bits, y));
    return kvc_floor(kvc_clamp(y, -half, half - 0.5f)) + 0.5f;
}

/* Codes with error feedback (see kvc_attend_feedback) of a row with step 1 / inverse. Returns the gain that keeps the
 * row's length along itself in the metric. x is replaced by the levels. */
static inline float kvc_feed_back(float *restrict x, int64_t n, int coding, int bits, float inverse,
                                  const float *feedback)
{
    float error[KVC_MAX_DIM], step = 1 / inverse, sums[3][LANES] = {{0}};
    memset(error, 0, (size_t)n * sizeof *error);
    for (int64_t d = n - 1; d >= 0; d--) {
        const float *weigh = feedback + d * n;
        float e[LANES] = {0}, l[LANES] = {0};
        for (int64_t i = d + 1; i < n; i++) {
            e[i % LANES] += weigh[i] * error[i];
            l[i % LANES] += weigh[i] * x[i];
        }
        float target = x[d] + kvc_lane_sum(e), before = kvc_lane_sum(l);
        float level = kvc_nearest_level(target * inverse, coding, bits);
        float levels = level + before, row = target + step * before, cost = feedback[n * n + d];
        error[d] = x[d] - step * level;
        x[d] = level;
        sums[0][d % LANES] += cost * (row * row);
        sums[1][d % LANES] += cost * (row * levels);
        sums[2][d % LANES] += cost * (levels * levels);
    }
    return kvc_rotated_gain(3, kvc_lane_sum(sums[0]), kvc_lane_sum(sums[1]), kvc_lane_sum(sums[2]));
}

/* Rotated codes; overwrites x. The row is scaled to absmax 1, rotated, and rounded to a mid-rise grid or to Lloyd-Max
 * levels, with a step relative to its rms (see kvc_rotated_steps). */
static inline void kvc_encode_rotated(float *restrict x, int64_t n, int coding, int bits, const float *feedback,
                                      uint8_t *restrict codes, uint8_t *meta)
{
    float a = kvc_row_absmax(x, n), p[LANES] = {0}, num, den;
    if (a < 0x1p-100f) {
        memset(codes, 1 << (bits - 1), (size_t)n);
        kvc_put16(meta, 0);
        return;
    }
    float scale = 1 / a;
    for (int64_t d = 0; d < n; d += LANES) EACH_LANE x[d + i] *= scale;
    ROTATE(x, 1, n);
    for (int64_t d = 0; d < n; d += LANES) EACH_LANE p[i] += x[d + i] * x[d + i];
    float squares = kvc_lane_sum(p), step = kvc_rotated_step(coding, bits) * sqrtf(squares / (float)n);
    int steps = kvc_rotated_steps(coding, bits);
    float inverse = 1 / step;
    kvc_fit(x, n, coding, bits, inverse, codes, &num, &den);
    for (int i = 1; i < steps; i++) {
        uint8_t other[KVC_MAX_DIM];
        float more, sum;
        float finer = 1 / (step * kvc_step_factor(i));
        kvc_fit(x, n, coding, bits, finer, other, &more, &sum);
        if (more * more * den > num * num * sum) {
            inverse = finer;
            memcpy(codes, other, (size_t)n);
            num = more;
            den = sum;
        }
    }
    float gain = kvc_rotated_gain(steps, squares, num, den);
    if (feedback) {
        gain = kvc_feed_back(x, n, coding, bits, inverse, feedback);
        kvc_fit(x, n, coding, bits, 1, codes, &num, &den);
    }
    kvc_put16(meta, kvc_scale_to_f16(gain * a));
}

/* Codes of cal2 (see kvc_spread); overwrites x. Steps are relative to the rms of the dims that are stored; their length
 * is preserved. */
static inline void kvc_encode_spread(float *restrict x, int64_t n, uint8_t *restrict codes, uint8_t *meta)
{
    int64_t fine = n / 4, used = n - fine;
    float a = 0, p[LANES] = {0}, den[LANES] = {0};
    for (int64_t d = 0; d < used; d++) a = fabsf(x[d]) > a ? fabsf(x[d]) : a;
    if (a < 0x1p-100f) {
        memset(codes, 2, (size_t)n);
        kvc_put16(meta, 0);
        return;
    }
    float scale = 1 / a;
    for (int64_t d = 0; d < used; d++) {
        x[d] *= scale;
        p[d % LANES] += x[d] * x[d];
    }
    float squares = kvc_lane_sum(p), rms = sqrtf(squares / (float)used), steps[2] = {1 / rms, 1 / (KVC_FINE * rms)};
    for (int64_t d = 0; d < used; d++) {
        bool two = d < fine;
        float half = two ? 8 : 2, q = kvc_floor(kvc_clamp(x[d] * steps[two], -half, half - 0.5f));
        float level = (q + 0.5f) * (two ? KVC_FINE : 1);
        int code = (int)(q + half);
        codes[d] = (uint8_t)(two ? code >> 2 : code);
        if (two) codes[used + d] = code & 3;
        den[d % LANES] += level * level;
    }
    kvc_put16(meta, kvc_scale_to_f16(sqrtf(squares / kvc_lane_sum(den)) * a));
}

/* The `encode` function of a level: n rows. The metadata of a row is contiguous, groups ascending (kvc_meta_planes
 * elements). */
static inline void kvc_encode_rows(int format, float *rows, int64_t n, int64_t dim, const float *feedback,
                                   uint8_t *codes, uint8_t *meta)
{
    kvc_traits f = kvc_format_traits(format);
    uint32_t guard = kvc_fp_begin();
    int64_t group = f.group ? f.group : dim, step = kvc_meta_planes(f, dim) * kvc_meta_size(f) / (dim / group);
    for (int64_t i = 0; i < n * (dim / group); i++, rows += group, codes += group, meta += step) switch (f.coding) {
        case KVC_CODING_INT: kvc_encode_int(rows, group, f.bits, codes, meta); break;
        case KVC_CODING_UINT: kvc_encode_uint(rows, group, f.bits, codes, meta); break;
        case KVC_CODING_E4M3: kvc_encode_e4m3(rows, group, codes, meta); break;
        case KVC_CODING_E5M2: kvc_encode_e5m2(rows, group, codes, meta); break;
        case KVC_CODING_E2M1: kvc_encode_e2m1(rows, group, f.scale, codes, meta); break;
        case KVC_CODING_LLOYD: kvc_encode_rotated(rows, group, KVC_CODING_LLOYD, f.bits, feedback, codes, meta); break;
        case KVC_CODING_SPREAD: kvc_encode_spread(rows, group, codes, meta); break;
        default: kvc_encode_rotated(rows, group, KVC_CODING_MID, f.bits, feedback, codes, meta);
        }
    kvc_fp_end(guard);
}

#endif
