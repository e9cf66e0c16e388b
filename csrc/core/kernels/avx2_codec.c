/* avx2_codec.c - scalar_codec.c with 8 lanes: two vectors are its 16 partial sums, so every bit is the same. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#pragma GCC optimize("fp-contract=off") /* before immintrin.h: its mul and add are plain C operators */
#define ROTATE kvc_avx2_rotate
#include "rows.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define MAX_VECTORS (KVC_MAX_DIM / 8)

INLINE __m256 splat(float x) { return _mm256_set1_ps(x); }
INLINE __m256 magnitude(__m256 x) { return _mm256_andnot_ps(splat(-0.f), x); }

/* x > low ? x : low, so that NaN gives low, as kvc_clamp does. */
INLINE __m256 clamp(__m256 x, float low, float high)
{
    return _mm256_min_ps(_mm256_max_ps(x, splat(low)), splat(high));
}

/* 16 codes, of a and b. */
INLINE void store_codes(uint8_t *codes, __m256i a, __m256i b)
{
    __m256i w = _mm256_packs_epi32(a, b); /* a0-3 b0-3 | a4-7 b4-7 */
    __m128i x = _mm_packus_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
    _mm_storeu_si128((__m128i *)(void *)codes, _mm_shuffle_epi32(x, 0xd8));
}

INLINE float absmax(const float *x, int64_t dim)
{
    __m256 a = _mm256_setzero_ps();
    for (int64_t d = 0; d < dim; d += 8) a = _mm256_max_ps(magnitude(_mm256_loadu_ps(x + d)), a);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

/* Of 16 partial sums: p[i] += p[i + 8], then + 4, + 2, + 1. */
INLINE float tree_sum(const __m256 *p)
{
    __m256 a = _mm256_add_ps(p[0], p[1]);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

INLINE __m256i to_int8(__m256 x, __m256 inverse)
{
    __m256 y = clamp(_mm256_mul_ps(x, inverse), -127, 127);
    return _mm256_add_epi32(_mm256_cvtps_epi32(y), _mm256_set1_epi32(128));
}

static void encode_int8(const float *x, int64_t dim, uint8_t *codes, uint16_t *scale)
{
    float a = absmax(x, dim);
    *scale = a > 0 ? kvc_scale_to_f16(a / 127) : 0;
    __m256 inverse = splat(a > 0 ? 1 / kvc_f16_to_f32(*scale) : 0);
    for (int64_t d = 0; d < dim; d += 16)
        store_codes(codes + d, to_int8(_mm256_loadu_ps(x + d), inverse), to_int8(_mm256_loadu_ps(x + d + 8), inverse));
}

/* fp32 to e4m3: the mantissa rounded as an integer; below 2^-6 adding 2^14 leaves multiples of 2^-9. */
INLINE __m256i to_e4m3(__m256 x)
{
    __m256 a = _mm256_min_ps(magnitude(x), splat(448)), tiny = _mm256_cmp_ps(a, splat(0x1p-6f), _CMP_LT_OQ);
    __m256i u = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(u, 20), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7ffff - 0x3c000000)), odd);
    __m256i small = _mm256_castps_si256(_mm256_add_ps(a, splat(0x1p14f)));
    small = _mm256_and_si256(small, _mm256_set1_epi32(15));
    __m256i code = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 20), small, _mm256_castps_si256(tiny));
    __m256i sign = _mm256_srli_epi32(_mm256_castps_si256(x), 24);
    return _mm256_or_si256(code, _mm256_and_si256(sign, _mm256_set1_epi32(0x80)));
}

static void encode_fp8_e4m3(const float *x, int64_t dim, uint8_t *codes, uint16_t *scale)
{
    float a = absmax(x, dim);
    *scale = a > 0 ? kvc_scale_to_f16(a / 448) : 0;
    if (!(a > 0)) {
        memset(codes, 0, (size_t)dim);
        return;
    }
    __m256 inverse = splat(1 / kvc_f16_to_f32(*scale));
    for (int64_t d = 0; d < dim; d += 16)
        store_codes(codes + d, to_e4m3(_mm256_mul_ps(_mm256_loadu_ps(x + d), inverse)),
                    to_e4m3(_mm256_mul_ps(_mm256_loadu_ps(x + d + 8), inverse)));
}

/* One level inside a vector: lanes of `upper` (a constant) get partner - x, the others x + partner. */
#define BUTTERFLY(x, partner, upper) _mm256_blend_ps(_mm256_add_ps(x, partner), _mm256_sub_ps(partner, x), upper)

/* Orthonormal Walsh-Hadamard transform of NV vectors; NV is a constant where this is inlined. */
INLINE void transform(int NV, __m256 *v, float norm)
{
    for (int i = 0; i < NV; i++) {
        v[i] = BUTTERFLY(v[i], _mm256_permute_ps(v[i], 0xb1), 0xaa);
        v[i] = BUTTERFLY(v[i], _mm256_permute_ps(v[i], 0x4e), 0xcc);
        v[i] = BUTTERFLY(v[i], _mm256_permute2f128_ps(v[i], v[i], 1), 0xf0);
    }
    for (int h = 1; h < NV; h *= 2)
        for (int j = 0; j < NV; j += 2 * h)
            for (int i = j; i < j + h; i++) {
                __m256 a = v[i], b = v[i + h];
                v[i] = _mm256_add_ps(a, b);
                v[i + h] = _mm256_sub_ps(a, b);
            }
    for (int i = 0; i < NV; i++) v[i] = _mm256_mul_ps(v[i], splat(norm));
}

INLINE void rotate(int NV, float *rows, int64_t n)
{
    float norm = (float)(1 / sqrt(8.0 * NV));
    __m256 v[MAX_VECTORS];
    for (; n > 0; n--, rows += 8 * NV) {
        for (int i = 0; i < NV; i++) v[i] = _mm256_loadu_ps(rows + 8 * i);
        transform(NV, v, norm);
        for (int i = 0; i < NV; i++) _mm256_storeu_ps(rows + 8 * i, v[i]);
    }
}

INLINE void encode_int4(int NV, float *x, uint8_t *codes, uint16_t *gain)
{
    float norm = (float)(1 / sqrt(8.0 * NV)), a = absmax(x, 8 * NV);
    const __m256 zero = _mm256_setzero_ps();
    __m256 v[MAX_VECTORS], p[2] = {zero, zero}, num[2] = {zero, zero}, den[2] = {zero, zero};
    if (a < 0x1p-100f) {
        memset(codes, 8, 8 * (size_t)NV);
        *gain = 0;
        return;
    }
    float scale = 1 / a;
    for (int i = 0; i < NV; i++) v[i] = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), splat(scale));
    transform(NV, v, norm);
    for (int i = 0; i < NV; i++) {
        p[i & 1] = _mm256_add_ps(p[i & 1], _mm256_mul_ps(v[i], v[i]));
        _mm256_storeu_ps(x + 8 * i, v[i]);
    }
    float r = sqrtf(tree_sum(p) / (float)(8 * NV)), inverse = 1 / (0.33f * r);
    for (int i = 0; i < NV; i += 2) {
        __m256i code[2];
        for (int h = 0; h < 2; h++) {
            __m256 q = clamp(_mm256_floor_ps(_mm256_mul_ps(v[i + h], splat(inverse))), -8, 7);
            __m256 level = _mm256_add_ps(q, splat(0.5f));
            num[h] = _mm256_add_ps(num[h], _mm256_mul_ps(v[i + h], level));
            den[h] = _mm256_add_ps(den[h], _mm256_mul_ps(level, level));
            code[h] = _mm256_add_epi32(_mm256_cvtps_epi32(q), _mm256_set1_epi32(8));
        }
        store_codes(codes + 8 * i, code[0], code[1]);
    }
    *gain = kvc_scale_to_f16(tree_sum(num) / tree_sum(den) * a);
}

void kvc_avx2_encode(int format, float *rows, int64_t n, int64_t dim, uint8_t *codes, uint8_t *meta)
{
    bool int4 = format == KVC_INT4 && dim >= 32 && dim == kvc_block(dim);
    uint32_t guard = kvc_fp_begin();
    if (format != KVC_INT8 && format != KVC_FP8_E4M3 && !int4)
        kvc_encode_rows(format, rows, n, dim, codes, meta);
    else
        for (int64_t i = 0; i < n; i++, rows += dim, codes += dim) {
            uint16_t scale;
            if (format == KVC_INT8)
                encode_int8(rows, dim, codes, &scale);
            else if (format == KVC_FP8_E4M3)
                encode_fp8_e4m3(rows, dim, codes, &scale);
            else if (dim == 32)
                encode_int4(4, rows, codes, &scale);
            else if (dim == 64)
                encode_int4(8, rows, codes, &scale);
            else if (dim == 128)
                encode_int4(16, rows, codes, &scale);
            else
                encode_int4(32, rows, codes, &scale);
            kvc_put16(meta + 2 * i, scale);
        }
    kvc_fp_end(guard);
}

void kvc_avx2_rotate(float *rows, int64_t n, int64_t dim)
{
    int64_t block = kvc_block(dim);
    n *= dim / block;
    if (block == 16)
        rotate(2, rows, n);
    else if (block == 32)
        rotate(4, rows, n);
    else if (block == 64)
        rotate(8, rows, n);
    else if (block == 128)
        rotate(16, rows, n);
    else
        rotate(32, rows, n);
}
#endif
