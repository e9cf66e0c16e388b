/* test_codec.c - every format, both sides, pages and standalone rows, compared with float64; bytes
 * that never change. */
#include "play.h"

#include "base/floats.h"
#include "codec/codec.h"

#include <math.h>

static const int64_t DIMS[] = {16, 32, 64, 96, 128, 256};

/* Unusual fp32 settings of the host: rounding up, flushed subnormals. Neither bytes nor the settings may change. */
static void strange_floats(bool on)
{
#if defined(__x86_64__)
#ifdef KVC_VALGRIND /* which supports only the rounding mode */
    enum { STRANGE = 0x4000, USUAL = 0, BITS = 0x6000 };
#else
    enum { STRANGE = 0xc040, USUAL = 0, BITS = 0xe040 };
#endif
    static const unsigned bits = BITS;
    CHECK((__builtin_ia32_stmxcsr() & bits) == (on ? USUAL : STRANGE));
    __builtin_ia32_ldmxcsr((__builtin_ia32_stmxcsr() & ~bits) | (on ? STRANGE : USUAL));
#else
    (void)on;
#endif
}

static bool takes(int format, int64_t dim) { return kvc_format_check(format, dim) == KVC_OK; }

/* Rows of every magnitude, some with outliers, zeros, constants. `tame`: within the range of fp16. */
static void fill(float *x, int64_t n, int64_t dim, bool tame)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < dim; d++) {
            float r = random_number(KVC_F32), size = ldexpf(1, (int)(i % 5) * (tame ? 2 : 12) - (tame ? 4 : 30));
            x[i * dim + d] = i % 7 == 3    ? (d % 3 ? 0 : -0.f)
                             : i % 11 == 5 ? .75f
                                           : r * size * (d == 5 && i % 3 == 0 ? 20 : 1);
        }
}

/* No element is off by more than half a step of its grid, or clipped at the last level. */
static void check_page(const uint8_t *page, int format, int64_t dim, int64_t size, const float *given, int key_side)
{
    double row[KVC_MAX_DIM], half[KVC_MAX_DIM];
    kvc_traits f = kvc_format_traits(format);
    for (int64_t t = 0; t < size; t++) {
        double off = 0, all = 0;
        ref_page_row(page, key_side, format, format, dim, dim, size, t, row);
        ref_page_steps(page, key_side, format, format, dim, dim, size, t, half);
        for (int64_t d = 0; d < dim; d++) {
            double want = given[t * dim + d], error = fabs(row[d] - want);
            off += error * error, all += want * want;
            if (f.rotated) continue;
            bool block = f.coding == KVC_CODING_E2M1; /* a rounded scale may be one step too small */
            double ends = block                                                        ? .34 * fabs(want)
                          : f.coding == KVC_CODING_E4M3 || f.coding == KVC_CODING_E5M2 ? 1e-3 * fabs(want)
                                                                                       : 0;
            double scale = 2e-3 * fabs(want) + 1e-3 * half[d]; /* stored in 11 bits */
            CHECK(error <= half[d] + ends + scale + 1e-7);
        }
        /* After a rotation, the grid clips the tails: the row is close, but not each element (except short rows, and
         * rows with a single nonzero element). For cal2, which drops dims that are like the others here, the norm of
         * the rest is preserved. */
        bool flat = given[t * dim] == given[t * dim + 1];
        double most = f.rotated == KVC_DIGITS ? 1.5 : f.bits == 4 ? .3 : f.bits == 3 ? .5 : .8;
        if (f.rotated && !key_side && !flat) CHECK(sqrt(off) <= most * sqrt(all));
    }
}

static double page_error(const uint8_t *page, int format, int64_t dim, int64_t size, const float *given)
{
    double row[KVC_MAX_DIM], off = 0, all = 0;
    for (int64_t t = 0; t < size; t++) {
        ref_page_row(page, 1, format, format, dim, dim, size, t, row);
        for (int64_t d = 0; d < dim; d++) {
            off += (row[d] - given[t * dim + d]) * (row[d] - given[t * dim + d]);
            all += (double)given[t * dim + d] * given[t * dim + d];
        }
    }
    return sqrt(off / all);
}

/* Tokens moved to other places of another page keep their exact values. */
static void check_copies(uint8_t *page, int format, int64_t dim, int64_t size)
{
    uint8_t *other = calloc(1, (size_t)kvc_page_bytes(format, format, dim, dim, size));
    double was[KVC_MAX_DIM], is[KVC_MAX_DIM];
    for (int key = 0; key < 2; key++) {
        if (key && kvc_format_traits(format).keys != KVC_KEYS_TOKEN) continue;
        kvc_side from = kvc_page_side(page, key, format, format, dim, dim, size);
        kvc_room to = kvc_page_room(other, key, format, format, dim, dim, size);
        for (int64_t t = 0; t < size; t++) kvc_copy_token(&from, t, &to, (5 * t + 3) % size);
        for (int64_t t = 0; t < size; t++) {
            ref_page_row(page, key, format, format, dim, dim, size, t, was);
            ref_page_row(other, key, format, format, dim, dim, size, (5 * t + 3) % size, is);
            CHECK(!memcmp(was, is, (size_t)dim * sizeof *is));
        }
    }
    free(other);
}

static void test_pages(int format, int64_t dim, int64_t size, const kvc_exec *exec)
{
    enum { B = 1, H = 2, PAGES = 2 };
    int64_t T = PAGES * size, n = B * H * T * dim, bytes = kvc_page_bytes(format, format, dim, dim, size);
    float *k = malloc((size_t)n * 4), *v = malloc((size_t)n * 4), *back[2];
    uint8_t *pages = calloc(1, (size_t)(bytes * H * PAGES) + 64), *at = pages + (64 - (uintptr_t)pages % 64) % 64;
    fill(k, B * H * T, dim, true);
    fill(v, B * H * T, dim, true);
    for (int64_t i = 0; i < n; i++) {
        k[i] += i % dim == 7 ? 9 : 0;               /* which centring removes */
        k[i] *= i % dim == 3 ? 1.f / (1 << 12) : 1; /* a channel of small values */
    }
    kvc_dense kd = {k, {H * T * dim, T * dim, dim}, KVC_F32}, vd = {v, {H * T * dim, T * dim, dim}, KVC_F32};
    strange_floats(true);
    OK(kvc_pack(format, format, &kd, &vd, B, H, T, dim, dim, size, at, exec));
    strange_floats(false);
    fold(at, bytes * H * PAGES);
    if (dim <= 64) check_copies(at, format, dim, size);
    int64_t entries[1 + PAGES] = {KVC_NONE}, rows[2] = {T, 0};
    for (int p = 0; p < PAGES; p++) {
        entries[1 + p] = kvc_entry(p * H * bytes, format, format);
        for (int h = 0; h < H; h++) {
            const float *given = k + (h * T + p * size) * dim;
            check_page(at + (p * H + h) * bytes, format, dim, size, given, 1);
            check_page(at + (p * H + h) * bytes, format, dim, size, v + (h * T + p * size) * dim, 0);
            double most = kvc_format_rotated(format) == KVC_DIGITS ? 1 : .5;
            if (kvc_format_rotated(format))
                CHECK(page_error(at + (p * H + h) * bytes, format, dim, size, given) < most);
        }
    }
    kvc_store store = {at, bytes * H * PAGES, entries, rows, NULL, 0, 1, H, 1, 1 + PAGES, dim, dim, size, 0};
    for (int i = 0; i < 2; i++) back[i] = malloc((size_t)n * 4);
    kvc_dense kb = {back[0], {H * T * dim, T * dim, dim}, KVC_F32},
              vb = {back[1], {H * T * dim, T * dim, dim}, KVC_F32};
    strange_floats(true);
    OK(kvc_read(&store, T, &kb, &vb, exec));
    strange_floats(false);
    for (int64_t i = 0; i < 2 * H * T; i++) {
        double row[KVC_MAX_DIM], most = 0;
        int64_t h = i / 2 / T, t = i / 2 % T;
        ref_page_row(at + (t / size * H + h) * bytes, i % 2, format, format, dim, dim, size, t % size, row);
        const float *got = back[!(i % 2)] + (h * T + t) * dim;
        for (int64_t d = 0; d < dim; d++) most = fmax(most, fabs(row[d]));
        for (int64_t d = 0; d < dim; d++) CHECK(fabs(got[d] - row[d]) <= 2e-6 * most);
        fold(got, 4 * dim);
    }
    free(k), free(v), free(back[0]), free(back[1]), free(pages);
}

static void test_rows(int format, int64_t dim)
{
    enum { N = 33 };
    kvc_traits f = kvc_format_traits(format);
    int64_t bytes = dim * f.bits / 8, meta = kvc_meta_planes(f, dim) * kvc_meta_size(f);
    float *x = malloc(N * (size_t)dim * 4), *y = malloc(N * (size_t)dim * 4);
    uint8_t *codes = malloc(N * (size_t)bytes), *scales = malloc(N * (size_t)meta);
    fill(x, N, dim, false);
    for (int64_t d = 0; d < dim; d++)
        x[9 * dim + d] = d % 2 ? 0x1p-100f : -0x1p-100f; /* smaller values count as 0 in rotated formats */
    strange_floats(true);
    OK(kvc_quantize(format, KVC_F32, x, N, dim, codes, scales, NULL));
    strange_floats(false);
    OK(kvc_dequantize(format, codes, scales, N, dim, y, &in_threads));
    fold(codes, N * bytes), fold(scales, N * meta), fold(y, N * dim * 4);
    for (int64_t i = 0; i < N; i++) {
        double row[KVC_MAX_DIM], most = 0;
        ref_quantized_row(format, codes + i * bytes, scales + i * meta, dim, row);
        for (int64_t d = 0; d < dim; d++) most = fmax(most, fabs(row[d]));
        for (int64_t d = 0; d < dim; d++) CHECK(fabs(y[i * dim + d] - row[d]) <= 2e-6 * most);
    }
    x[3 * dim + 1] = NAN;
    FAILS(KVC_E_VALUE, "row 3", kvc_quantize(format, KVC_F32, x, N, dim, codes, scales, NULL));
    x[2 * dim] = -INFINITY;
    FAILS(KVC_E_VALUE, "row 2", kvc_quantize(format, KVC_F32, x, N, dim, codes, scales, NULL));
    free(x), free(y), free(codes), free(scales);
}

/* The conversions by integer arithmetic: every small float, and every boundary between two. */
static void test_floats(void)
{
    for (uint32_t h = 0; h < 65536; h++) {
        double x = ref_half((uint16_t)h);
        if (isnan(x)) continue;
        CHECK(kvc_f16_to_f32((uint16_t)h) == x && kvc_f32_to_f16((float)x) == h);
        double up = h & 0x7fff ? ref_half((uint16_t)(h - 1)) : 0, middle = (x + up) / 2; /* ties go to the even one */
        if (h & 0x7fff) CHECK(kvc_f32_to_f16((float)middle) == (h & 1 ? h - 1 : h));
        if (h & 0x7fff) CHECK(kvc_f32_to_f16(nextafterf((float)middle, (float)x)) == h);
    }
    CHECK(kvc_f32_to_f16(65520) == 0x7c00 && kvc_f32_to_f16(-65519) == 0xfbff &&
          (kvc_f32_to_f16(NAN) & 0x7e00) == 0x7e00);
    for (uint32_t c = 0; c < 256; c++) {
        if ((c & 0x7f) < 0x7f) CHECK(kvc_f32_to_e4m3(kvc_e4m3_to_f32((uint8_t)c)) == c);
        if ((c & 0x7f) < 0x7c) CHECK(kvc_f32_to_e5m2(kvc_e5m2_to_f32((uint8_t)c)) == c);
    }
    CHECK(isnan(kvc_e4m3_to_f32(0x7f)) && kvc_f32_to_e4m3(1e9f) == 0x7e && kvc_f32_to_e4m3(NAN) == 0x7e);
    CHECK(kvc_f32_to_e5m2(-INFINITY) == 0xfb && kvc_f32_to_e5m2(NAN) == 0x7b && kvc_f32_to_bf16(1) == 0x3f80);
    CHECK(kvc_f32_to_bf16(NAN) != 0x7f80 && kvc_f32_to_bf16(kvc_f32_of_bits(0x3f808000)) == 0x3f80);
    CHECK(kvc_f32_to_bf16(kvc_f32_of_bits(0x3f818000)) == 0x3f82);
}

/* Large enough for the codes and metadata of a page, for a tile and its rows, and for the centroid. */
static void test_scratch(void)
{
    for (int format = KVC_RAW_BF16 + 1; format < KVC_FORMATS; format++)
        for (int64_t dim = 16; dim <= KVC_MAX_DIM; dim += 16)
            for (int64_t page = KVC_TILE; page <= KVC_MAX_PAGE; page += KVC_TILE) {
                kvc_traits f = kvc_format_traits(format);
                int64_t row = dim + kvc_meta_planes(f, dim) * kvc_meta_size(f);
                int64_t room = 4 * kvc_codec_scratch(dim, page);
                CHECK(room >= page * row && room >= KVC_TILE * (row + 4 * dim));
                CHECK(4 * kvc_page_scratch(dim, page) >= room + 4 * page * dim);
            }
}

/* A row of cal2 with a single nonzero element, including the first. */
static void test_lone_elements(void)
{
    enum { DIM = 64, SIZE = 16 };
    _Alignas(64) uint8_t page[16384] = {0};
    float rows[SIZE * DIM] = {0};
    double row[KVC_MAX_DIM];
    kvc_dense x = {rows, {SIZE * DIM, SIZE * DIM, DIM}, KVC_F32};
    CHECK(kvc_page_bytes(KVC_CAL2, KVC_CAL2, DIM, DIM, SIZE) <= (int64_t)sizeof page);
    for (int t = 0; t < SIZE; t++) rows[t * DIM + t] = 3;
    OK(kvc_pack(KVC_CAL2, KVC_CAL2, &x, &x, 1, 1, SIZE, DIM, DIM, SIZE, page, NULL));
    for (int t = 0; t < SIZE; t++) {
        ref_page_row(page, 0, KVC_CAL2, KVC_CAL2, DIM, DIM, SIZE, t, row);
        CHECK(row[t] > 1);
    }
}

void test_codecs(void)
{
    test_lone_elements();
    test_floats();
    test_scratch();
    for (int format = 0; format < KVC_FORMATS; format++)
        for (size_t i = 0; i < sizeof DIMS / sizeof *DIMS; i++) {
            if (!takes(format, DIMS[i])) continue;
            if (!kvc_format_is_raw(format)) test_rows(format, DIMS[i]);
            /* pack requires their own dtype: test_attend */
            if (format == KVC_RAW_F16 || format == KVC_RAW_BF16) continue;
            test_pages(format, DIMS[i], i % 2 ? 16 : 48, i % 2 ? &in_threads : NULL);
        }
}
