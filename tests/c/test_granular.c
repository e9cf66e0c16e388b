/* test_granular.c - quantization with any granularity, compared with a reference that maps each element to its scale:
 * codes, scales and zero points at the locations described in kvc.h, given scales, strides, and invalid arguments. */
#include "base/floats.h"
#include "granular.h"
#include "play.h"

#include <math.h>

enum { B = 2, H = 3, T = 5, D = 96, N = B * H * T * D }; /* more channels than a block of the kernel */

/* The index of the scale of element i of [B, H, T, D]. */
static int64_t scale_of(const kvc_grain *g, int64_t i)
{
    int64_t d = i % D, t = i / D % T, h = i / D / T % H, b = i / D / T / H;
    switch (g->by) {
    case KVC_BY_TENSOR: return 0;
    case KVC_BY_HEAD: return h;
    case KVC_BY_TOKEN: return b * T + t;
    case KVC_BY_ROW: return (b * H + h) * T + t;
    case KVC_BY_CHANNEL: return h * D + d;
    default: return i / g->group;
    }
}

/* The bits of dim d in planes of `bits` bits. */
static int plane(const uint8_t *row, int bits, int64_t d)
{
    int64_t run = D * bits / 8;
    return row[d % run] >> (int)(d / run) * bits & ((1 << bits) - 1);
}

static int code_of(const kvc_grain *g, int bits, const uint8_t *codes, int64_t i)
{
    const uint8_t *row = codes + i / D * (D * bits / 8);
    int64_t d = i % D, n = 8 / bits;
    if (bits == 3) return plane(row, 2, d) | plane(row + D / 4, 1, d) << 2;
    if (g->packing == KVC_PACK_PLANES) return plane(row, bits, d);
    int64_t at = g->packing == KVC_PACK_LOW_FIRST ? d % n : n - 1 - d % n;
    return row[d / n] >> (int)at * bits & ((1 << bits) - 1);
}

/* The value of a stored scale. */
static double scale_at(const kvc_scheme_info *f, const uint8_t *scales, int64_t i)
{
    if (f->scale == KVC_SCALE_E4M3) return kvc_e4m3_to_f32(scales[i]);
    return f->scale == KVC_SCALE_E8M0 ? ldexp(1, scales[i] - 127)
                                      : kvc_f16_to_f32(((const uint16_t *)(const void *)scales)[i]);
}

typedef struct stored {
    uint8_t codes[N];
    _Alignas(4) uint8_t scales[4 * N];
    uint16_t zeros[N];
} stored;

/* Maximum distance from x in the scheme: half a step of a grid, half the gap of small floats. */
static double room(const kvc_scheme_info *f, double scale, double x)
{
    switch (f->coding) {
    case KVC_CODING_INT:
    case KVC_CODING_UINT: return .5 * scale;
    case KVC_CODING_E4M3: return fmax(fabs(x) / 16, scale / 1024);
    case KVC_CODING_E5M2: return fmax(fabs(x) / 8, scale / 131072);
    default: return f->scale == KVC_SCALE_E8M0 ? 2 * scale : scale;
    }
}

/* The codes of x follow from the extremes found for each scale; the dequantized y follows from the codes. */
static void check_stored(const kvc_grain *g, const float *x, const float *own, const stored *s, const float *y)
{
    const kvc_scheme_info *f = kvc_scheme_get(g->scheme);
    static float low[N], high[N];
    for (int64_t i = 0; i < N; i++) low[i] = INFINITY, high[i] = -INFINITY;
    for (int64_t i = 0; i < N; i++) {
        int64_t at = scale_of(g, i);
        low[at] = fminf(low[at], x[i]), high[at] = fmaxf(high[at], x[i]);
    }
    double levels = (1 << f->bits) - 1, top = f->coding == KVC_CODING_E4M3   ? 448
                                              : f->coding == KVC_CODING_E5M2 ? 57344
                                              : f->coding == KVC_CODING_E2M1 ? 6
                                                                             : (1 << (f->bits - 1)) - 1;
    for (int64_t i = 0; i < N; i++) {
        int64_t at = scale_of(g, i);
        double scale = scale_at(f, s->scales, at), zero = 0, want = fmax(high[at], -low[at]) / top;
        if (f->coding == KVC_CODING_UINT) {
            zero = kvc_f16_to_f32(s->zeros[at]);
            want = (high[at] - zero) / levels;
            CHECK(fabs(zero - (own ? -8 : low[at])) <= (own ? 0 : fabs(low[at]) / 2048));
        }
        if (own) want = own[at];
        if (f->scale == KVC_SCALE_E8M0)
            CHECK(scale == ldexp(1, (int)floor(log2(want * 6)) - 2));
        else
            CHECK(fabs(scale - want) <= want / (f->scale == KVC_SCALE_E4M3 ? 15 : 2000) + 0x1p-25);
        CHECK(fabs((double)x[i] - y[i]) <= room(f, scale, x[i]) * 1.001 + 1e-6);
        int code = code_of(g, f->bits, s->codes, i);
        double level = f->coding == KVC_CODING_INT ? code - (1 << (f->bits - 1)) : code;
        if (f->coding == KVC_CODING_INT || f->coding == KVC_CODING_UINT)
            CHECK(fabs(zero + scale * level - y[i]) <= 1e-6 * (fabs(zero) + fabs(y[i])));
    }
}

/* Every grain, for three dtypes and another layout: the same bytes. */
static int check_grain(const kvc_grain *g, void *const x[3])
{
    static stored s, other;
    static float y[N], own[N], zero[N];
    kvc_grain_sizes sizes;
    const kvc_scheme_info *f = kvc_scheme_get(g->scheme);
    bool may = (g->packing == KVC_PACK_PLANES || f->bits == 4 || f->bits == 2) &&
               (!f->group || (g->by == KVC_BY_GROUP && g->group == f->group));
    CHECK((kvc_grain_check(g, &sizes) == KVC_OK) == may);
    if (!may) return 0;
    int64_t count = scale_of(g, N - 1) + 1;
    CHECK(sizes.count == count && sizes.row_bytes == D * f->bits / 8);
    kvc_dense dense = {x[KVC_F32], {H * T * D, T * D, D}, KVC_F32};
    memset(&s, 0xff, sizeof s);
    OK(kvc_quantize_by(g, &dense, NULL, NULL, 1, s.codes, s.scales, s.zeros, NULL));
    for (int64_t i = count * sizes.scale_bytes; i < (int64_t)sizeof s.scales; i++) CHECK(s.scales[i] == 0xff);
    OK(kvc_dequantize_by(g, s.codes, s.scales, s.zeros, 1, y, &in_threads));
    check_stored(g, x[KVC_F32], NULL, &s, y);
    for (int dtype = 0; dtype < 3; dtype++) {
        kvc_dense turned = {x[dtype], {H * T * D, D, H * D}, (kvc_dtype)dtype}; /* [B, T, H, D] */
        if (dtype == KVC_F32) turned = dense;
        memset(&other, 0xff, sizeof other);
        OK(kvc_quantize_by(g, &turned, NULL, NULL, 1, other.codes, other.scales, other.zeros, &in_threads));
        CHECK(memcmp(&s, &other, sizeof s) == 0);
    }
    if (f->scale != KVC_SCALE_F16 || f->coding >= KVC_CODING_E4M3) return 1;
    for (int64_t i = 0; i < count; i++) own[i] = 9.f / (float)((1 << (f->bits - 1)) - 1), zero[i] = -8;
    float *zeros = f->coding == KVC_CODING_UINT ? zero : NULL;
    OK(kvc_quantize_by(g, &dense, own, zeros, 1, s.codes, s.scales, s.zeros, NULL));
    OK(kvc_dequantize_by(g, s.codes, s.scales, s.zeros, 1, y, NULL));
    check_stored(g, x[KVC_F32], own, &s, y);
    static const float bad[] = {-1, NAN, INFINITY};
    for (int i = 0; i < 3; i++) {
        float was = own[count - 1];
        own[count - 1] = bad[i];
        CHECK(kvc_quantize_by(g, &dense, own, zeros, 1, s.codes, s.scales, s.zeros, NULL) == KVC_E_VALUE);
        own[count - 1] = was;
    }
    CHECK(kvc_quantize_by(g, &dense, own, zeros ? NULL : zero, 1, s.codes, s.scales, s.zeros, NULL) == KVC_E_VALUE);
    CHECK(kvc_quantize_by(g, &dense, NULL, zero, 1, s.codes, s.scales, s.zeros, NULL) == KVC_E_VALUE);
    if (zeros) {
        zero[count - 1] = -INFINITY;
        CHECK(kvc_quantize_by(g, &dense, own, zeros, 1, s.codes, s.scales, s.zeros, NULL) == KVC_E_VALUE);
    }
    return 1;
}

/* Given scales at the limits of the scale's format. */
static void test_given_ends(void)
{
    static const struct {
        int scheme;
        float given;
        uint32_t stored;
    } ends[] = {{KVC_SCHEME_MXFP4, 0x1p-140f, 1},  {KVC_SCHEME_MXFP4, 0x1p-126f, 1},
                {KVC_SCHEME_MXFP4, 0x1p126f, 253}, {KVC_SCHEME_MXFP4, 0x1.8p127f, 253},
                {KVC_SCHEME_MXFP4, 3, 128},        {KVC_SCHEME_NVFP4, 0x1p-20f, 1},
                {KVC_SCHEME_NVFP4, 1e9f, 0x7e},    {KVC_SCHEME_INT8, 0x1p-40f, 1},
                {KVC_SCHEME_INT8, 1e9f, 0x7bff},   {KVC_SCHEME_INT8, 1, 0x3c00}};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        float x[32] = {0};
        uint8_t codes[32];
        int group = kvc_scheme_get(ends[i].scheme)->group;
        kvc_grain g = {ends[i].scheme, KVC_BY_GROUP, 0, group ? group : 32, 1, 1, 1, group ? group : 32};
        kvc_dense dense = {x, {32, 32, 32}, KVC_F32};
        uint16_t scale = 0;
        OK(kvc_quantize_by(&g, &dense, &ends[i].given, NULL, 1, codes, (uint8_t *)&scale, NULL, NULL));
        CHECK(scale == ends[i].stored);
    }
}

static void test_dims(void)
{
    static const int multiple[9] = {[2] = 4, [3] = 8, [4] = 2, [8] = 1};
    kvc_grain_sizes sizes;
    for (int scheme = 0; scheme < KVC_SCHEMES; scheme++) {
        const kvc_scheme_info *f = kvc_scheme_get(scheme);
        for (int64_t dim = 1; dim < 100; dim++) {
            kvc_grain g = {scheme, f->group ? KVC_BY_GROUP : KVC_BY_ROW, 0, f->group, 1, 1, 1, dim};
            bool may = dim % multiple[f->bits] == 0 && (!f->group || dim % f->group == 0);
            CHECK((kvc_grain_check(&g, &sizes) == KVC_OK) == may);
        }
    }
    for (int64_t group = -1; group < 70; group++) { /* checked only if it is used */
        kvc_grain g = {0, KVC_BY_GROUP, 0, group, 1, 1, 1, 64};
        CHECK((kvc_grain_check(&g, &sizes) == KVC_OK) == (group > 0 && 64 % group == 0));
        g.by = KVC_BY_ROW;
        OK(kvc_grain_check(&g, &sizes));
    }
}

/* e2m1 has 0, .5, 1, 1.5, 2, 3, 4, 6; ties go to the even code. */
static void test_ties(void)
{
    static const float x[16] = {6,     .25f,  .75f,   1.25f,  1.75f, 2.5f,  3.5f, 5,
                                -.25f, -.75f, -1.25f, -1.75f, -2.5f, -3.5f, -5,   -6};
    static const float want[16] = {6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, -6};
    float y[16], near[16];
    uint8_t codes[8], scale;
    kvc_grain g = {KVC_SCHEME_NVFP4, KVC_BY_GROUP, 0, 16, 1, 1, 1, 16};
    for (int side = -1; side <= 1; side++) {
        for (int i = 0; i < 16; i++) near[i] = side && fabsf(x[i]) < 6 ? x[i] * (1 + (float)side / 64) : x[i];
        kvc_dense dense = {near, {16, 16, 16}, KVC_F32};
        OK(kvc_quantize_by(&g, &dense, NULL, NULL, 1, codes, &scale, NULL, NULL));
        OK(kvc_dequantize_by(&g, codes, &scale, NULL, 1, y, NULL));
        for (int i = 0; i < 16; i++) {
            CHECK(side || y[i] == want[i]);
            CHECK(fabsf(y[i] - near[i]) <= (fabsf(x[i]) < 2   ? .25f
                                            : fabsf(x[i]) < 4 ? .5f
                                                              : 1.f) +
                                               (side ? .0f : 1e-6f));
        }
    }
}

void test_granular(void)
{
    static float whole[N];
    static uint16_t half[2][N];
    for (int64_t i = 0; i < N; i++) {
        whole[i] = random_number(KVC_BF16); /* that fp16 has too, but for the smallest */
        if (fabsf(whole[i]) < 1e-3f) whole[i] = 0;
        int64_t d = i % D, t = i / D % T, h = i / D / T % H, b = i / D / T / H, at = ((b * T + t) * H + h) * D + d;
        half[0][at] = kvc_f32_to_f16(whole[i]), half[1][at] = kvc_f32_to_bf16(whole[i]);
    }
    void *x[3] = {[KVC_F32] = whole, [KVC_F16] = half[0], [KVC_BF16] = half[1]};
    int checked = 0;
    for (int scheme = 0; scheme < KVC_SCHEMES; scheme++)
        for (int by = 0; by < KVC_BYS; by++)
            for (int packing = 0; packing < KVC_PACKINGS; packing++)
                for (int64_t group = 16; group <= 32; group += 16)
                    checked += check_grain(&(kvc_grain){scheme, by, packing, group, B, H, T, D}, x);
    CHECK(checked > 100);
    test_dims();
    test_ties();
    test_given_ends();
    kvc_dense dense = {whole, {H * T * D, T * D, D}, KVC_F32};
    static stored s;
    whole[((1 * H + 2) * T + 3) * D + 63] = -INFINITY;
    FAILS(KVC_E_VALUE, "sequence 1, head 2, token 3",
          kvc_quantize_by(&(kvc_grain){0, KVC_BY_HEAD, 0, 0, B, H, T, D}, &dense, NULL, NULL, 1, s.codes, s.scales,
                          s.zeros, &in_threads));
}
