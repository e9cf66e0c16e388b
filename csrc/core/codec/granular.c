/* granular.c - quantization with any granularity, for analysis and other engines: plain loops over the index space [B,
 * H, T, D / n, n], where n dims share a scale. Scales are indexed by the first four; reduced dims (such as one scale
 * for all heads) have stride 0. A row's bytes equal those of the page format of the same name.
 *
 * Cost: x is read three times (finite check, extremes, codes), in total about 20 ns per element and thread. */
#include "codec.h"
#include "base/dtype.h"
#include "granular.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

static const kvc_scheme_info schemes[KVC_SCHEMES] = {
#define KVC_SCHEME(ID, name, bits, coding, scale, group, about)                                                        \
    {name, about, bits, KVC_CODING_##coding, KVC_SCALE_##scale, group},
#include "schemes.def"
#undef KVC_SCHEME
};

const kvc_scheme_info *kvc_scheme_get(int scheme)
{
    return scheme >= 0 && scheme < KVC_SCHEMES ? &schemes[scheme] : NULL;
}

/* Whether B, H, T have scales of their own. */
static const bool kept[KVC_BYS][3] = {
    [KVC_BY_TENSOR] = {0, 0, 0}, [KVC_BY_HEAD] = {0, 1, 0},    [KVC_BY_TOKEN] = {1, 0, 1},
    [KVC_BY_ROW] = {1, 1, 1},    [KVC_BY_CHANNEL] = {0, 1, 0}, [KVC_BY_GROUP] = {1, 1, 1}};

kvc_status kvc_grain_check(const kvc_grain *g, kvc_grain_sizes *sizes)
{
    const kvc_scheme_info *f = kvc_scheme_get(g->scheme);
    KVC_CHECK(f, KVC_E_VALUE, "scheme: expected a code from 0 to %d, got %d; see schemes()", KVC_SCHEMES - 1,
              g->scheme);
    KVC_CHECK(g->by >= 0 && g->by < KVC_BYS && g->packing >= 0 && g->packing < KVC_PACKINGS, KVC_E_VALUE,
              "%s: expected a granularity code below %d and a packing code below %d, got %d and %d", f->name, KVC_BYS,
              KVC_PACKINGS, g->by, g->packing);
    KVC_CHECK(g->B > 0 && g->H > 0 && g->T > 0 && g->D > 0, KVC_E_VALUE,
              "%s: x: expected at least one element, got [%lld, %lld, %lld, %lld]", f->name, (long long)g->B,
              (long long)g->H, (long long)g->T, (long long)g->D);
    KVC_CHECK(g->packing == KVC_PACK_PLANES || f->bits == 4 || f->bits == 2, KVC_E_VALUE,
              "%s: packing: expected planes, got an interleaved one; only 4 and 2 bits have that", f->name);
    int multiple = f->bits == 3 ? 8 : 8 / f->bits; /* each plane must consist of whole bytes */
    KVC_CHECK(g->D % multiple == 0, KVC_E_VALUE, "%s: expected a last dimension that is a multiple of %d, got %lld",
              f->name, multiple, (long long)g->D);
    KVC_CHECK(g->by != KVC_BY_GROUP || (g->group > 0 && g->D % g->group == 0), KVC_E_VALUE,
              "%s: group: expected a divisor of the last dimension %lld, got %lld", f->name, (long long)g->D,
              (long long)g->group);
    KVC_CHECK(!f->group || (g->by == KVC_BY_GROUP && g->group == f->group), KVC_E_VALUE,
              "%s: granularity: expected group:%d, which this scheme is made of", f->name, f->group);
    sizes->dims = g->by == KVC_BY_CHANNEL ? 1 : g->by == KVC_BY_GROUP ? g->group : g->D;
    const int64_t whole[3] = {g->B, g->H, g->T};
    for (int i = 0; i < 3; i++) sizes->scales[i] = kept[g->by][i] ? whole[i] : 1;
    sizes->scales[3] = g->D / sizes->dims;
    sizes->count = sizes->scales[0] * sizes->scales[1] * sizes->scales[2] * sizes->scales[3];
    sizes->row_bytes = g->D * f->bits / 8;
    sizes->scale_bytes = f->scale == KVC_SCALE_F16 ? 2 : 1;
    return KVC_OK;
}

typedef struct job {
    kvc_grain g;
    kvc_grain_sizes sizes;
    const kvc_scheme_info *f;
    const kvc_dense *x;
    float factor;
    const uint8_t *codes, *scales;
    const uint16_t *zeros; /* NULL if the scheme is symmetric */
    struct {
        uint8_t *codes, *scales;
        uint16_t *zeros;
    } to; /* the same, writable */
    float *out;
    atomic_llong bad; /* first row with NaN or Inf; the number of rows if there is none */
} job;

static void run(const kvc_exec *exec, int64_t n, void (*body)(int64_t, int64_t, void *), job *j)
{
    if (exec && exec->run)
        exec->run(n, body, j);
    else
        body(0, n, j);
}

/* ---------------------------------------------------------------- indexing */

static const uint8_t *row_at(const kvc_dense *x, int64_t b, int64_t h, int64_t t)
{
    int64_t at = b * x->stride[0] + h * x->stride[1] + t * x->stride[2];
    return (const uint8_t *)x->data + at * (x->dtype == KVC_F32 ? 4 : 2);
}

static float element(const uint8_t *row, kvc_dtype dtype, int64_t d)
{
    float x;
    uint16_t h;
    if (dtype == KVC_F32) return memcpy(&x, row + 4 * d, sizeof x), x;
    memcpy(&h, row + 2 * d, sizeof h);
    return dtype == KVC_F16 ? kvc_f16_to_f32(h) : kvc_bf16_to_f32(h);
}

/* Index of the first scale of row r of [B, H, T]. */
static int64_t scale_at(const job *j, int64_t r)
{
    const int64_t *n = j->sizes.scales, t = r % j->g.T, h = r / j->g.T % j->g.H, b = r / j->g.T / j->g.H;
    /* NOLINTNEXTLINE: kvc_grain_check ensures that all sizes are at least 1 */
    return ((b % n[0] * n[1] + h % n[1]) * n[2] + t % n[2]) * n[3];
}

/* Position of a field of `bits` bits (a divisor of 8) for dim d within a row of D codes. */
typedef struct place {
    int64_t byte;
    int shift;
} place;

static place place_of(int bits, int packing, int64_t D, int64_t d)
{
    int64_t n = 8 / bits, period = D / n;
    if (packing == KVC_PACK_PLANES) return (place){d % period, bits * (int)(d / period)};
    return (place){d / n, bits * (int)(packing == KVC_PACK_LOW_FIRST ? d % n : n - 1 - d % n)};
}

/* The row must be zero-initialized. */
static void put_code(const job *j, uint8_t *row, int64_t d, int code)
{
    int bits = j->f->bits, most = bits == 3 ? 2 : bits;
    place low = place_of(most, j->g.packing, j->g.D, d);
    row[low.byte] |= (uint8_t)((code & ((1 << most) - 1)) << low.shift);
    if (bits == 3) {
        place high = place_of(1, KVC_PACK_PLANES, j->g.D, d);
        row[j->g.D / 4 + high.byte] |= (uint8_t)(code >> 2 << high.shift);
    }
}

static uint8_t get_code(const job *j, const uint8_t *row, int64_t d)
{
    int bits = j->f->bits, most = bits == 3 ? 2 : bits;
    place low = place_of(most, j->g.packing, j->g.D, d);
    int code = row[low.byte] >> low.shift & ((1 << most) - 1);
    if (bits == 3) {
        place high = place_of(1, KVC_PACK_PLANES, j->g.D, d);
        code |= (row[j->g.D / 4 + high.byte] >> high.shift & 1) << 2;
    }
    return (uint8_t)code;
}

/* ---------------------------------------------------------------- scales */

static float stored_scale(const job *j, int64_t i)
{
    return kvc_scale_value(j->f->scale, j->scales + i * j->sizes.scale_bytes) * j->factor;
}

static float stored_zero(const job *j, int64_t i) { return j->zeros ? kvc_f16_to_f32(j->zeros[i]) : 0; }

static uint16_t saturated_f16(float x) { return kvc_f32_to_f16(kvc_clamp(x, -65504, 65504)); }

/* Stores a scale: 0 (or the smallest value) if `none`; otherwise rounded to nearest, but not to 0 on underflow, and
 * clamped to the largest value. Powers of two are rounded down. */
static void put_scale(const job *j, int64_t i, float scale, bool none)
{
    uint8_t *at = j->to.scales + i * j->sizes.scale_bytes;
    if (j->f->scale == KVC_SCALE_F16) {
        uint16_t h = none ? 0 : kvc_scale_to_f16(scale);
        memcpy(at, &h, sizeof h);
    } else if (j->f->scale == KVC_SCALE_E4M3) {
        uint8_t e4m3 = kvc_f32_to_e4m3(scale);
        *at = none ? 0 : e4m3 ? e4m3 : 1;
    } else {
        uint32_t exponent = none ? 0 : kvc_f32_bits(scale) >> 23;
        *at = (uint8_t)(exponent < 1 ? 1 : exponent > 253 ? 253 : exponent); /* so that 1 / scale is a normal number */
    }
}

/* Stores the scale (and zero point) for values from low to high. */
static void put_range(const job *j, int64_t i, float low, float high)
{
    float a = -low > high ? -low : high, top = (float)((1 << (j->f->bits - 1)) - 1);
    switch (j->f->coding) {
    case KVC_CODING_UINT:
        j->to.zeros[i] = saturated_f16(low);
        a = high - kvc_f16_to_f32(j->zeros[i]);
        put_scale(j, i, a / (2 * top + 1), !(a > 0));
        break;
    case KVC_CODING_INT: put_scale(j, i, a / top, !(a > 0)); break;
    case KVC_CODING_E4M3: put_scale(j, i, a / 448, !(a > 0)); break;
    case KVC_CODING_E5M2: put_scale(j, i, a / 57344, !(a > 0)); break;
    default: /* e2m1: map absmax to 6, or (OCP MX 1.0, section 6.3) use its exponent minus 2 */
        put_scale(j, i, j->f->scale == KVC_SCALE_E4M3 ? a / 6 / j->factor : a * 0.25f, !(a > 0));
    }
}

/* Computes scales [begin, end) of [B or 1, H or 1, T or 1], each over all elements it is reduced over. */
static void find_scales(int64_t begin, int64_t end, void *context)
{
    enum { BLOCK = 64 }; /* number of scales at a time; fits the stack */
    job *j = context;
    const int64_t *n = j->sizes.scales, dims = j->sizes.dims;
    const int64_t whole[3] = {j->g.B, j->g.H, j->g.T};
    float low[BLOCK], high[BLOCK];
    uint32_t guard = kvc_fp_begin();
    for (int64_t i = begin; i < end; i++) {
        const int64_t at[3] = {i / n[2] / n[1], i / n[2] % n[1], i % n[2]};
        int64_t first[3], last[3];
        for (int k = 0; k < 3; k++) {
            first[k] = n[k] == whole[k] ? at[k] : 0;
            last[k] = n[k] == whole[k] ? at[k] + 1 : whole[k];
        }
        for (int64_t g0 = 0; g0 < n[3]; g0 += BLOCK) {
            int64_t groups = n[3] - g0 < BLOCK ? n[3] - g0 : BLOCK;
            for (int64_t g = 0; g < groups; g++) {
                low[g] = INFINITY;
                high[g] = -INFINITY;
            }
            for (int64_t b = first[0]; b < last[0]; b++)
                for (int64_t h = first[1]; h < last[1]; h++)
                    for (int64_t t = first[2]; t < last[2]; t++) {
                        const uint8_t *row = row_at(j->x, b, h, t);
                        for (int64_t g = 0, d = g0 * dims; g < groups; g++)
                            for (int64_t past = d + dims; d < past; d++) {
                                float x = element(row, j->x->dtype, d);
                                low[g] = x < low[g] ? x : low[g];
                                high[g] = x > high[g] ? x : high[g];
                            }
                    }
            for (int64_t g = 0; g < groups; g++) put_range(j, i * n[3] + g0 + g, low[g], high[g]);
        }
    }
    kvc_fp_end(guard);
}

static kvc_status take_scales(const job *j, const float *scale, const float *zero)
{
    KVC_CHECK(scale && (zero != NULL) == (j->zeros != NULL), KVC_E_VALUE, "%s: expected %s, got %s", j->f->name,
              j->zeros ? "scale and zero" : "scale alone, for it is symmetric",
              !scale ? "zero alone"
              : zero ? "both"
                     : "scale alone");
    uint32_t guard = kvc_fp_begin();
    int64_t i = 0;
    for (; i < j->sizes.count; i++) {
        if (!(scale[i] >= 0 && scale[i] < INFINITY) || (zero && !isfinite(zero[i]))) break;
        put_scale(j, i, scale[i], !(scale[i] > 0));
        if (zero) j->to.zeros[i] = saturated_f16(zero[i]);
    }
    kvc_fp_end(guard);
    KVC_CHECK(i == j->sizes.count, KVC_E_VALUE,
              "%s: scale, zero: expected finite scales of at least 0 and finite zero points, got %g, %g", j->f->name,
              (double)scale[i], zero ? (double)zero[i] : 0.);
    return KVC_OK;
}

/* ---------------------------------------------------------------- codes */

/* Nearest integer, ties to even, for |x| <= 2^22. */
static int nearest(float x) { return (int)((x + 12582912.f) - 12582912.f); }

static int code_of(const kvc_scheme_info *f, float y)
{
    float top = (float)((1 << (f->bits - 1)) - 1), m = fabsf(y);
    switch (f->coding) {
    case KVC_CODING_INT: return nearest(kvc_clamp(y, -top, top)) + (1 << (f->bits - 1));
    case KVC_CODING_UINT: return nearest(kvc_clamp(y, 0, 2 * top + 1));
    case KVC_CODING_E4M3: return kvc_f32_to_e4m3(y);
    case KVC_CODING_E5M2: return kvc_f32_to_e5m2(y);
    default: /* e2m1, ties to the even code */
        return ((m > .25f) + (m >= .75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.f)) |
               (int)(kvc_f32_bits(y) >> 28 & 8);
    }
}

static void check_rows(int64_t begin, int64_t end, void *context)
{
    job *j = context;
    for (int64_t r = begin; r < end; r++) {
        int64_t t = r % j->g.T, h = r / j->g.T % j->g.H, b = r / j->g.T / j->g.H;
        if (kvc_row_finite(row_at(j->x, b, h, t), j->x->dtype, j->g.D)) continue;
        long long first = atomic_load(&j->bad);
        while (r < first && !atomic_compare_exchange_weak(&j->bad, &first, r)) continue;
        return;
    }
}

static void encode_rows(int64_t begin, int64_t end, void *context)
{
    job *j = context;
    uint32_t guard = kvc_fp_begin();
    memset(j->to.codes + begin * j->sizes.row_bytes, 0, (size_t)((end - begin) * j->sizes.row_bytes));
    for (int64_t r = begin; r < end; r++) {
        const uint8_t *x = row_at(j->x, r / j->g.T / j->g.H, r / j->g.T % j->g.H, r % j->g.T);
        uint8_t *codes = j->to.codes + r * j->sizes.row_bytes;
        int64_t at = scale_at(j, r), dims = j->sizes.dims;
        for (int64_t g = 0, d = 0; g < j->sizes.scales[3]; g++) {
            float scale = stored_scale(j, at + g), zero = stored_zero(j, at + g), inverse = scale > 0 ? 1 / scale : 0;
            bool none = j->f->coding == KVC_CODING_E4M3 && !(scale > 0); /* as in pages: no sign either */
            for (int64_t past = d + dims; d < past; d++)
                put_code(j, codes, d, none ? 0 : code_of(j->f, (element(x, j->x->dtype, d) - zero) * inverse));
        }
    }
    kvc_fp_end(guard);
}

static void decode_rows(int64_t begin, int64_t end, void *context)
{
    job *j = context;
    float levels[256];
    uint32_t guard = kvc_fp_begin();
    for (int c = 0; c < 1 << j->f->bits; c++) levels[c] = kvc_level_of(j->f->coding, j->f->bits, (uint8_t)c);
    for (int64_t r = begin; r < end; r++) {
        const uint8_t *codes = j->codes + r * j->sizes.row_bytes;
        float *out = j->out + r * j->g.D;
        int64_t at = scale_at(j, r), dims = j->sizes.dims;
        for (int64_t g = 0, d = 0; g < j->sizes.scales[3]; g++) {
            float scale = stored_scale(j, at + g), zero = stored_zero(j, at + g);
            if (j->zeros)
                for (int64_t past = d + dims; d < past; d++) out[d] = levels[get_code(j, codes, d)] * scale + zero;
            else
                for (int64_t past = d + dims; d < past; d++) out[d] = levels[get_code(j, codes, d)] * scale;
        }
    }
    kvc_fp_end(guard);
}

#if __GNUC__ >= 10 && !defined(__clang__) /* kvc_grain_check rejected unknown schemes */
#pragma GCC diagnostic ignored "-Wanalyzer-null-dereference"
#endif
static kvc_status start(job *j, const kvc_grain *grain, float factor)
{
    KVC_TRY(kvc_grain_check(grain, &j->sizes));
    j->g = *grain;
    j->f = kvc_scheme_get(grain->scheme);
    if (j->f->coding != KVC_CODING_UINT) j->zeros = NULL;
    j->factor = factor;
    KVC_CHECK(factor == 1 || j->f->scale == KVC_SCALE_E4M3, KVC_E_VALUE,
              "%s: tensor_scale: expected none, got %g; only nvfp4 has a second level", j->f->name, (double)factor);
    KVC_CHECK(factor >= 0x1p-100f && factor <= 0x1p117f, KVC_E_VALUE,
              "%s: tensor_scale: expected a number from 2^-100 to 2^117, got %g", j->f->name, (double)factor);
    return KVC_OK;
}

kvc_status kvc_quantize_by(const kvc_grain *grain, const kvc_dense *x, const float *scale, const float *zero,
                           float factor, uint8_t *codes, uint8_t *scales, uint16_t *zeros, const kvc_exec *exec)
{
    job j = {.x = x, .codes = codes, .scales = scales, .zeros = zeros, .to = {codes, scales, zeros}};
    KVC_TRY(start(&j, grain, factor));
    KVC_TRY(kvc_dtype_check(x->dtype, "quantize_by: x"));
    int64_t rows = grain->B * grain->H * grain->T;
    atomic_init(&j.bad, rows);
    run(exec, rows, check_rows, &j);
    long long bad = atomic_load(&j.bad);
    KVC_CHECK(bad == rows, KVC_E_VALUE,
              "%s: x: expected finite numbers, got NaN or Inf at sequence %lld, head %lld, token %lld", j.f->name,
              bad / grain->T / grain->H, bad / grain->T % grain->H, bad % grain->T);
    if (scale || zero)
        KVC_TRY(take_scales(&j, scale, zero));
    else
        run(exec, j.sizes.scales[0] * j.sizes.scales[1] * j.sizes.scales[2], find_scales, &j);
    run(exec, rows, encode_rows, &j);
    return KVC_OK;
}

kvc_status kvc_dequantize_by(const kvc_grain *grain, const uint8_t *codes, const uint8_t *scales, const uint16_t *zeros,
                             float factor, float *x, const kvc_exec *exec)
{
    job j = {.codes = codes, .scales = scales, .zeros = zeros, .out = x};
    KVC_TRY(start(&j, grain, factor));
    run(exec, grain->B * grain->H * grain->T, decode_rows, &j);
    return KVC_OK;
}
