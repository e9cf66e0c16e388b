/* avx512_codec.c - scalar_codec.c with 16 lanes: the lanes are its 16 partial sums, so every bit is the same. */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")
#pragma GCC optimize("fp-contract=off") /* before immintrin.h: its mul and add are plain C operators */
#define ROTATE kvc_avx512_rotate
#include "rows.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define MAX_VECTORS (KVC_MAX_DIM / 16)

INLINE __m512 splat(float x) { return _mm512_set1_ps(x); }

/* x > low ? x : low, so that NaN gives low, as kvc_clamp does. */
INLINE __m512 clamp(__m512 x, float low, float high)
{
    return _mm512_min_ps(_mm512_max_ps(x, splat(low)), splat(high));
}

INLINE void store_codes(uint8_t *codes, __m512i x) { _mm_storeu_si128((__m128i *)codes, _mm512_cvtepi32_epi8(x)); }

INLINE float absmax(const float *x, int64_t dim)
{
    __m512 a = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += 16) a = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(x + d)), a);
    return _mm512_reduce_max_ps(a);
}

/* p[i] += p[i + 8], then + 4, + 2, + 1. */
INLINE float tree_sum(__m512 p)
{
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(p), _mm512_extractf32x8_ps(p, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

static void encode_int8(const float *x, int64_t dim, uint8_t *codes, uint16_t *scale)
{
    float a = absmax(x, dim);
    *scale = a > 0 ? kvc_scale_to_f16(a / 127) : 0;
    __m512 inverse = splat(a > 0 ? 1 / kvc_f16_to_f32(*scale) : 0);
    for (int64_t d = 0; d < dim; d += 16) {
        __m512 y = clamp(_mm512_mul_ps(_mm512_loadu_ps(x + d), inverse), -127, 127);
        store_codes(codes + d, _mm512_add_epi32(_mm512_cvtps_epi32(y), _mm512_set1_epi32(128)));
    }
}

/* fp32 to e4m3: the mantissa rounded as an integer; below 2^-6 adding 2^14 leaves multiples of 2^-9. */
INLINE __m512i to_e4m3(__m512 x)
{
    __m512 a = _mm512_min_ps(_mm512_abs_ps(x), splat(448));
    __m512i u = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(u, 20), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7ffff - 0x3c000000)), odd);
    __m512i small = _mm512_castps_si512(_mm512_add_ps(a, splat(0x1p14f)));
    small = _mm512_and_si512(small, _mm512_set1_epi32(15));
    __m512i code = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, splat(0x1p-6f), _CMP_LT_OQ),
                                           _mm512_srli_epi32(rounded, 20), small);
    __m512i sign = _mm512_srli_epi32(_mm512_castps_si512(x), 24);
    return _mm512_or_si512(code, _mm512_and_si512(sign, _mm512_set1_epi32(0x80)));
}

static void encode_fp8_e4m3(const float *x, int64_t dim, uint8_t *codes, uint16_t *scale)
{
    float a = absmax(x, dim);
    *scale = a > 0 ? kvc_scale_to_f16(a / 448) : 0;
    if (!(a > 0)) {
        memset(codes, 0, (size_t)dim);
        return;
    }
    __m512 inverse = splat(1 / kvc_f16_to_f32(*scale));
    for (int64_t d = 0; d < dim; d += 16)
        store_codes(codes + d, to_e4m3(_mm512_mul_ps(_mm512_loadu_ps(x + d), inverse)));
}

/* One level inside a vector: lanes of `upper` get partner - x, the others x + partner. */
INLINE __m512 butterfly(__m512 x, __m512 partner, __mmask16 upper)
{
    return _mm512_mask_sub_ps(_mm512_add_ps(x, partner), upper, partner, x);
}

/* Orthonormal Walsh-Hadamard transform of NV vectors; NV is a constant where this is inlined. */
INLINE void transform(int NV, __m512 *v, float norm)
{
    for (int i = 0; i < NV; i++) {
        v[i] = butterfly(v[i], _mm512_permute_ps(v[i], 0xb1), 0xaaaa);
        v[i] = butterfly(v[i], _mm512_permute_ps(v[i], 0x4e), 0xcccc);
        v[i] = butterfly(v[i], _mm512_shuffle_f32x4(v[i], v[i], 0xb1), 0xf0f0);
        v[i] = butterfly(v[i], _mm512_shuffle_f32x4(v[i], v[i], 0x4e), 0xff00);
    }
    for (int h = 1; h < NV; h *= 2)
        for (int j = 0; j < NV; j += 2 * h)
            for (int i = j; i < j + h; i++) {
                __m512 a = v[i], b = v[i + h];
                v[i] = _mm512_add_ps(a, b);
                v[i + h] = _mm512_sub_ps(a, b);
            }
    for (int i = 0; i < NV; i++) v[i] = _mm512_mul_ps(v[i], splat(norm));
}

INLINE void rotate(int NV, float *rows, int64_t n)
{
    float norm = (float)(1 / sqrt(16.0 * NV));
    __m512 v[MAX_VECTORS];
    for (; n > 0; n--, rows += 16 * NV) {
        for (int i = 0; i < NV; i++) v[i] = _mm512_loadu_ps(rows + 16 * i);
        transform(NV, v, norm);
        for (int i = 0; i < NV; i++) _mm512_storeu_ps(rows + 16 * i, v[i]);
    }
}

INLINE void encode_int4(int NV, float *x, uint8_t *codes, uint16_t *gain)
{
    float norm = (float)(1 / sqrt(16.0 * NV)), a = absmax(x, 16 * NV);
    __m512 v[MAX_VECTORS], p = _mm512_setzero_ps(), num = p, den = p;
    if (a < 0x1p-100f) {
        memset(codes, 8, 16 * (size_t)NV);
        *gain = 0;
        return;
    }
    float scale = 1 / a;
    for (int i = 0; i < NV; i++) v[i] = _mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), splat(scale));
    transform(NV, v, norm);
    for (int i = 0; i < NV; i++) {
        p = _mm512_add_ps(p, _mm512_mul_ps(v[i], v[i]));
        _mm512_storeu_ps(x + 16 * i, v[i]);
    }
    float r = sqrtf(tree_sum(p) / (float)(16 * NV)), inverse = 1 / (0.33f * r);
    for (int i = 0; i < NV; i++) {
        __m512 q = _mm512_roundscale_ps(_mm512_mul_ps(v[i], splat(inverse)), 9); /* floor */
        q = clamp(q, -8, 7);
        __m512 level = _mm512_add_ps(q, splat(0.5f));
        num = _mm512_add_ps(num, _mm512_mul_ps(v[i], level));
        den = _mm512_add_ps(den, _mm512_mul_ps(level, level));
        store_codes(codes + 16 * i, _mm512_add_epi32(_mm512_cvtps_epi32(q), _mm512_set1_epi32(8)));
    }
    *gain = kvc_scale_to_f16(tree_sum(num) / tree_sum(den) * a);
}

void kvc_avx512_encode(int format, float *rows, int64_t n, int64_t dim, uint8_t *codes, uint8_t *meta)
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
                encode_int4(2, rows, codes, &scale);
            else if (dim == 64)
                encode_int4(4, rows, codes, &scale);
            else if (dim == 128)
                encode_int4(8, rows, codes, &scale);
            else
                encode_int4(16, rows, codes, &scale);
            kvc_put16(meta + 2 * i, scale);
        }
    kvc_fp_end(guard);
}

void kvc_avx512_rotate(float *rows, int64_t n, int64_t dim)
{
    int64_t block = kvc_block(dim);
    n *= dim / block;
    if (block == 16)
        rotate(1, rows, n);
    else if (block == 32)
        rotate(2, rows, n);
    else if (block == 64)
        rotate(4, rows, n);
    else if (block == 128)
        rotate(8, rows, n);
    else
        rotate(16, rows, n);
}
#endif
