/* rows.cuh - a row of K or V in a half-warp: lane i of 16 holds dims i, 16 + i, .. in x[0], x[1], .. This is the order
 * of computation of rows.h and scalar_codec.c on the CPU, so sums, maxima and codes are bit-identical: partial sums by
 * lane, then one tree; Walsh-Hadamard levels ascending; every operation rounded separately (-fmad=false). Both halves
 * of a warp must call these functions together. */
#ifndef KVC_ROWS_CUH
#define KVC_ROWS_CUH

#include "device.cuh"

/* Row kernels are compiled for heads up to KVC_CUDA_DIM, and again, in wide.cu, for all. */
#ifndef KVC_ROW_DIM
#define KVC_ROW_DIM KVC_CUDA_DIM
#endif
#define KVC_PARTS (KVC_ROW_DIM / 16)
/* kvc_again in wide rows: with 36 parts, predicates and addresses of each that are kept from loop to loop spill. */
#define KVC_WIDE_AGAIN(x) (KVC_ROW_DIM > KVC_CUDA_DIM ? kvc_again(x) : (x))
#define EACH_PART(k, k0, k1) KVC_UNROLL for (int k = 0; k < KVC_PARTS; k++) if (k >= (k0) && k < (k1))

KVC_DEVICE int kvc_half_lane(void) { return kvc_thread() & 15; }
KVC_DEVICE int kvc_half(void) { return kvc_thread() >> 4; } /* of the block */

KVC_DEVICE float kvc_half_sum(float p)
{
    KVC_UNROLL for (int h = 8; h > 0; h /= 2) p += kvc_shuffle_xor_f(p, h);
    return p;
}

/* Orthonormal Walsh-Hadamard transform in blocks of the largest power of two in dim; `most`: maximum number of parts.
 * other - x and x + other are computed as one multiply-add by -1 or 1, which rounds the same. */
KVC_DEVICE void kvc_rotate_parts(const int most, float *x, int dim)
{
    int block = dim & -dim, lane = kvc_half_lane();
    float norm = 1; /* 1 / sqrt(block), without doubles */
    for (int rest = block; rest > 1; rest /= 4) norm *= rest > 2 ? .5f : .70710678118654752f;
    KVC_UNROLL for (int h = 1; h < 16; h *= 2)
    {
        float sign = lane & h ? -1.f : 1.f;
        KVC_UNROLL for (int k = 0; k < most; k++) if (16 * k < dim) x[k] = fmaf(sign, x[k], kvc_shuffle_xor_f(x[k], h));
    }
    KVC_UNROLL for (int h = 1; h < most; h *= 2) if (16 * h < block)
    {
        KVC_UNROLL for (int k = 0; k < most; k++) if (16 * k < dim && !(k & h))
        {
            float p = x[k], q = x[(k + h) % most];
            x[k] = p + q;
            x[(k + h) % most] = p - q;
        }
    }
    KVC_UNROLL for (int k = 0; k < most; k++) if (16 * k < dim) x[k] *= norm;
}
KVC_DEVICE void kvc_half_rotate(float *x, int64_t dim) { kvc_rotate_parts(KVC_PARTS, x, (int)dim); }

/* ---------------------------------------------------------------- encoding */

typedef struct kvc_range {
    float low, high;
} kvc_range;

/* Among equals (-0, 0) the first lane's, like a loop over lanes. */
KVC_DEVICE kvc_range kvc_half_range(const float *x, int k0, int k1)
{
    kvc_range r = {0, 0};
    EACH_PART(k, k0, k1)
    {
        r.low = k == k0 || x[k] < r.low ? x[k] : r.low;
        r.high = k == k0 || x[k] > r.high ? x[k] : r.high;
    }
    KVC_UNROLL for (int h = 1; h < 16; h *= 2)
    {
        float low = kvc_shuffle_xor_f(r.low, h), high = kvc_shuffle_xor_f(r.high, h);
        bool second = kvc_half_lane() & h; /* the other lane comes first */
        r.low = second ? (r.low < low ? r.low : low) : (low < r.low ? low : r.low);
        r.high = second ? (r.high > high ? r.high : high) : (high > r.high ? high : r.high);
    }
    return r;
}

KVC_DEVICE float kvc_half_absmax(const float *x, int k0, int k1)
{
    kvc_range r = kvc_half_range(x, k0, k1);
    return fabsf(-r.low > r.high ? -r.low : r.high);
}

KVC_DEVICE float kvc_nearest(float x) { return (x + 12582912.f) - 12582912.f; }
KVC_DEVICE float kvc_floor(float x)
{
    float whole = (float)(int32_t)x;
    return whole - (x < whole ? 1.f : 0.f);
}

/* As kvc_fit in rows.h. */
KVC_DEVICE void kvc_half_fit(kvc_traits f, const float *x, int k0, int k1, float inverse, uint8_t *code, float *num,
                             float *den)
{
    int half = 1 << (f.bits - 1);
    float a = 0, b = 0;
    EACH_PART(k, k0, k1)
    {
        float q = kvc_floor(kvc_clamp(x[k] * inverse, (float)-half, (float)half - 0.5f)), level = q + 0.5f;
        code[k] = (uint8_t)((int)q + half);
        if (f.coding == KVC_CODING_LLOYD) {
            code[k] = (uint8_t)kvc_lloyd_code(f.bits, x[k] * inverse);
            level = (float)kvc_lloyd_level(f.bits, code[k]);
        }
        a += x[k] * level;
        b += level * level;
    }
    *num = kvc_half_sum(a);
    *den = kvc_half_sum(b);
}

/* Encodes groups [k0, k1) of a row: codes, one per byte, to `code`; scale and zero point as stored. Overwrites x. */
KVC_DEVICE void kvc_half_codes(kvc_traits f, float *x, int64_t dim, int k0, int k1, uint8_t *code, uint16_t meta[2])
{
    int top = (1 << f.bits) - 1, half = 1 << (f.bits - 1);
    meta[1] = 0;
    if (f.coding == KVC_CODING_MID || f.coding == KVC_CODING_LLOYD) {
        float a = kvc_half_absmax(x, k0, k1), p = 0, num = 0, den = 0, more, sum;
        bool tiny = a < 0x1p-100f;
        float scale = tiny ? 0.f : 1 / a;
        EACH_PART(k, k0, k1) x[k] *= scale;
        kvc_half_rotate(x, dim);
        EACH_PART(k, k0, k1) p += x[k] * x[k];
        p = kvc_half_sum(p);
        float step = kvc_rotated_step(f.coding, f.bits) * sqrtf(p / (float)dim), best = tiny ? 0.f : 1 / step;
        kvc_half_fit(f, x, k0, k1, best, code, &num, &den);
        int steps = kvc_rotated_steps(f.coding, f.bits);
        /* recomputed with the best step: keeping codes of two rows would take too many registers */
        for (int i = 1; i < steps; i++) {
            float other = tiny ? 0.f : 1 / (step * kvc_step_factor(i));
            kvc_half_fit(f, x, k0, k1, other, code, &more, &sum);
            bool better = more * more * den > num * num * sum;
            best = better ? other : best;
            num = better ? more : num;
            den = better ? sum : den;
        }
        if (steps > 1) kvc_half_fit(f, x, k0, k1, best, code, &num, &den);
        if (tiny) EACH_PART(k, k0, k1) code[k] = (uint8_t)half;
        meta[0] = tiny ? 0 : kvc_scale_to_f16(kvc_rotated_gain(steps, p, num, den) * a);
        return;
    }
    if (f.coding == KVC_CODING_UINT) {
        kvc_range r = kvc_half_range(x, k0, k1);
        meta[1] = kvc_f32_to_f16(kvc_clamp(r.low, -65504, 65504));
        float low = kvc_f16_to_f32(meta[1]), span = r.high - low;
        meta[0] = span > 0 ? kvc_scale_to_f16(span / (float)top) : 0;
        float inverse = span > 0 ? 1 / kvc_f16_to_f32(meta[0]) : 0;
        EACH_PART(k, k0, k1) code[k] = (uint8_t)(int)kvc_nearest(kvc_clamp((x[k] - low) * inverse, 0, (float)top));
        return;
    }
    float a = kvc_half_absmax(x, k0, k1);
    if (f.coding == KVC_CODING_E2M1) {
        float inverse = 0;
        if (f.scale == KVC_SCALE_E4M3) {
            uint8_t s = a > 0 ? kvc_f32_to_e4m3(a / 6) : 0;
            meta[0] = a > 0 && s == 0 ? 1 : s;
            inverse = a > 0 ? 1 / kvc_e4m3_to_f32((uint8_t)meta[0]) : 0;
        } else {
            int32_t e = (int32_t)(kvc_f32_bits(a) >> 23) - 2;
            meta[0] = (uint16_t)(e < 1 ? 1 : e);
            inverse = kvc_f32_of_bits((uint32_t)(254 - meta[0]) << 23);
        }
        EACH_PART(k, k0, k1)
        {
            float y = x[k] * inverse, m = fabsf(y);
            int c = (m > .25f) + (m >= .75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.f);
            code[k] = (uint8_t)(c | (int)(kvc_f32_bits(y) >> 28 & 8));
        }
        return;
    }
    float most = f.coding == KVC_CODING_INT ? (float)(half - 1) : f.coding == KVC_CODING_E4M3 ? 448.f : 57344.f;
    meta[0] = a > 0 ? kvc_scale_to_f16(a / most) : 0;
    float inverse = a > 0 ? 1 / kvc_f16_to_f32(meta[0]) : 0;
    EACH_PART(k, k0, k1)
    {
        float y = x[k] * inverse;
        if (f.coding == KVC_CODING_INT)
            code[k] = (uint8_t)((int)kvc_nearest(kvc_clamp(y, -most, most)) + half);
        else if (f.coding == KVC_CODING_E4M3)
            code[k] = a == 0 ? 0 : kvc_f32_to_e4m3(y);
        else
            code[k] = kvc_f32_to_e5m2(y);
    }
}

/* As kvc_encode_spread in rows.h: codes of cal2 to `codes` [dim]; returns the scale as stored. */
KVC_DEVICE uint16_t kvc_half_spread(float *x, int dim, uint8_t *codes)
{
    int fine = dim / 4, used = dim - fine, lane = kvc_half_lane();
    float a = 0, p = 0, den = 0;
    EACH_PART(k, 0, dim / 16) a = fmaxf(a, 16 * k + lane < used ? fabsf(x[k]) : 0);
    KVC_UNROLL for (int h = 8; h > 0; h /= 2) a = fmaxf(a, kvc_shuffle_xor_f(a, h));
    bool tiny = a < 0x1p-100f;
    float scale = tiny ? 0.f : 1 / a;
    lane = KVC_WIDE_AGAIN(lane);
    EACH_PART(k, 0, dim / 16)
    {
        x[k] *= scale;
        if (16 * k + lane < used) p += x[k] * x[k];
    }
    p = kvc_half_sum(p);
    float rms = sqrtf(p / (float)used), steps[2] = {tiny ? 0.f : 1 / rms, tiny ? 0.f : 1 / (KVC_FINE * rms)};
    lane = KVC_WIDE_AGAIN(lane);
    EACH_PART(k, 0, dim / 16)
    {
        int d = 16 * k + lane;
        bool two = d < fine;
        float half = two ? 8.f : 2.f, q = kvc_floor(kvc_clamp(x[k] * (two ? steps[1] : steps[0]), -half, half - 0.5f));
        float level = (q + 0.5f) * (two ? KVC_FINE : 1.f);
        int code = (int)(q + half);
        if (d < used) den += level * level;
        if (d < used) codes[d] = (uint8_t)(tiny ? 2 : two ? code >> 2 : code);
        if (two) codes[used + d] = (uint8_t)(tiny ? 2 : code & 3);
    }
    den = kvc_half_sum(den);
    return tiny ? 0 : kvc_scale_to_f16(sqrtf(p / den) * a);
}

/* Encodes row x (overwritten) of token t: codes to `codes` [dim], metadata to planes of `stride` elements at meta. */
KVC_DEVICE void kvc_half_encode(int format, float *x, int64_t dim, uint8_t *codes, uint8_t *meta, int64_t t,
                                int64_t stride, int64_t step)
{
    kvc_traits f = kvc_format_traits(format);
    int parts = (int)(dim / 16), each = f.coding == KVC_CODING_UINT ? 2 : 1, lane = kvc_half_lane();
    int group = f.group ? f.group / 16 : parts;
    uint8_t code[KVC_PARTS];
    if (f.coding == KVC_CODING_SPREAD) {
        uint16_t scale = kvc_half_spread(x, (int)dim, codes);
        if (lane == 0) *(uint16_t *)(meta + 2 * t * step) = scale;
        return;
    }
    KVC_ONCE for (int k0 = 0; k0 < parts; k0 += group)
    {
        uint16_t stored[2];
        kvc_half_codes(f, x, dim, k0, k0 + group, code, stored);
        KVC_UNROLL for (int i = 0; i < 2; i++) if (i < each && lane == 0)
        {
            int64_t at = (k0 / group * each + i) * stride + t * step;
            if (kvc_meta_size(f) == 2)
                *(uint16_t *)(meta + 2 * at) = stored[i];
            else
                meta[at] = (uint8_t)stored[i];
        }
    }
    EACH_PART(k, 0, parts) codes[16 * k + lane] = code[k];
}

/* ---------------------------------------------------------------- decoding */

/* An element as stored in its tile: bits of a raw number, or a code. */
KVC_DEVICE uint32_t kvc_cell(int key, int bits, int dim, const uint8_t *tile, int t, int d)
{
    if (bits == 32) return *(const uint32_t *)(tile + 4 * (key ? d * KVC_TILE + t : t * dim + d));
    if (bits == 16)
        return *(const uint16_t *)(tile + (key ? 4 * (d / 2 * KVC_TILE + t) + 2 * (d & 1)
                                               : 4 * (t / 2 * dim + d) + 2 * (t & 1)));
    int b = bits == 3 ? 2 : bits, x = key ? d : t, period = key ? dim * b / 8 : 2 * b, plane = x / period,
        r = x % period;
    int at = key ? 4 * (r / 4 * KVC_TILE + t) + (r & 3) : 4 * (r / 4 * dim + d) + (r & 3);
    uint32_t code = (uint32_t)tile[at] >> (b * plane) & ((1u << b) - 1);
    if (bits == 3) code |= ((uint32_t)tile[4 * dim + at % (2 * dim)] >> (2 * plane + (at >= 2 * dim)) & 1) << 2;
    return code;
}

KVC_DEVICE float kvc_raw_value(int format, uint32_t cell)
{
    return format == KVC_RAW_F32   ? kvc_f32_of_bits(cell)
           : format == KVC_RAW_F16 ? kvc_f16_to_f32((uint16_t)cell)
                                   : kvc_bf16_to_f32((uint16_t)cell);
}

KVC_DEVICE float kvc_level(int coding, int bits, uint32_t code)
{
    if (coding == KVC_CODING_INT) return (float)((int)code - (1 << (bits - 1)));
    if (coding == KVC_CODING_MID || coding == KVC_CODING_SPREAD) return (float)code - (float)((1 << bits) - 1) / 2;
    if (coding == KVC_CODING_E4M3) return kvc_e4m3_to_f32((uint8_t)code);
    if (coding == KVC_CODING_E5M2) return kvc_e5m2_to_f32((uint8_t)code);
    if (coding == KVC_CODING_UINT) return (float)code;
    if (coding == KVC_CODING_LLOYD) return (float)kvc_lloyd_level(bits, (int)code);
    int m = code & 7; /* 0, .5, 1, 1.5, 2, 3, 4, 6 */
    float level = m < 4 ? (float)m * .5f : m == 4 ? 2.f : m == 5 ? 3.f : m == 6 ? 4.f : 6.f;
    return code & 8 ? -level : level;
}

KVC_DEVICE float kvc_scale_value(int scale, const uint8_t *at)
{
    if (scale == KVC_SCALE_E4M3) return kvc_e4m3_to_f32(*at);
    if (scale == KVC_SCALE_E8M0) return kvc_f32_of_bits(*at ? (uint32_t)*at << 23 : 1u << 22);
    return kvc_f16_to_f32(*(const uint16_t *)at);
}

/* As kvc_join. */
KVC_DEVICE float kvc_joined(float high, float low) { return 4 * KVC_FINE * high + KVC_FINE * low; }

/* Decodes token t of a side like the CPU, in the order of kvc_half_rotate. */
KVC_DEVICE void kvc_half_decode(const kvc_side *side, int64_t t, float *x)
{
    kvc_traits f = kvc_format_traits(side->format);
    int dim = (int)side->dim, parts = dim / 16, lane = kvc_half_lane(), group = f.group ? f.group : dim;
    int64_t size = kvc_meta_size(f), P = side->tokens;
    const uint8_t *tile = side->tiles + t / KVC_TILE * kvc_tile_bytes(side->format, dim);
    const uint8_t *by_dim = side->meta + kvc_token_meta_bytes(f, side->key, dim, P);
    EACH_PART(k, 0, parts)
    {
        int d = 16 * k + lane;
        uint32_t cell = kvc_cell(side->key, f.bits, dim, tile, (int)(t % KVC_TILE), d);
        if (f.coding == KVC_CODING_RAW) {
            x[k] = kvc_raw_value(side->format, cell);
        } else if (side->key && f.keys == KVC_KEYS_CHANNEL) {
            x[k] = (float)cell * kvc_scale_value(f.scale, by_dim + 2 * d);
            x[k] += kvc_scale_value(f.scale, by_dim + 2 * (dim + d));
        } else {
            int64_t each = f.coding == KVC_CODING_UINT ? 2 : 1, plane = d / group * each;
            x[k] = kvc_level(f.coding, f.bits, cell) * kvc_scale_value(f.scale, side->meta + size * (plane * P + t));
            if (each == 2) x[k] += kvc_scale_value(f.scale, side->meta + size * ((plane + 1) * P + t));
        }
    }
    lane = KVC_WIDE_AGAIN(lane);
    if (f.rotated == KVC_DIGITS) EACH_PART(k, 0, parts)
        {
            int d = 16 * k + lane, low = dim - dim / 4 + d;
            if (d >= dim - dim / 4) x[k] = 0;
            if (d >= dim / 4) continue;
            float level = kvc_level(f.coding, f.bits, kvc_cell(side->key, f.bits, dim, tile, (int)(t % KVC_TILE), low));
            x[k] = kvc_joined(x[k], level * kvc_scale_value(f.scale, side->meta + 2 * t));
        }
    if (f.rotated == KVC_ROTATED) kvc_half_rotate(x, dim);
    if (side->key && f.keys == KVC_KEYS_CENTRED)
        EACH_PART(k, 0, parts) x[k] += kvc_scale_value(f.scale, by_dim + 2 * (16 * k + lane));
}

/* ---------------------------------------------------------------- dense rows */

KVC_DEVICE float kvc_element(const uint8_t *row, kvc_dtype dtype, int64_t d)
{
    return dtype == KVC_F32   ? ((const float *)row)[d]
           : dtype == KVC_F16 ? kvc_f16_to_f32(((const uint16_t *)row)[d])
                              : kvc_bf16_to_f32(((const uint16_t *)row)[d]);
}

/* The number; 0 (and a flag) for NaN and Inf, which must not affect other tokens of the page. */
KVC_DEVICE float kvc_finite(float x, uint32_t *flags, uint32_t bit)
{
    if ((kvc_f32_bits(x) & 0x7f800000) != 0x7f800000) return x;
    kvc_flag(flags, bit ? bit : (uint32_t)KVC_FLAG_FINITE);
    return 0;
}

KVC_DEVICE void kvc_put_element(uint8_t *row, kvc_dtype dtype, int64_t d, float x)
{
    if (dtype == KVC_F32)
        ((float *)row)[d] = x;
    else if (dtype == KVC_F16)
        ((uint16_t *)row)[d] = kvc_f32_to_f16(kvc_saturate(x, 65504));
    else
        ((uint16_t *)row)[d] = kvc_f32_to_bf16(kvc_saturate(x, 0x1.fep127f));
}

#endif
