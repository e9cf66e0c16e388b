/* accumulated.h - storing the softmax weights of a page, and summing them over rows, for accumulated attention.
 * Compiled by every level after its target and shared headers. Cost per register of weights: a conversion and a store;
 * later a conversion and a multiply-add. */
#ifndef KVC_ACCUMULATED_H
#define KVC_ACCUMULATED_H

#include "base/dispatch.h"
#include "base/floats.h"
/* Stores the weights of a tile. */
#if defined(KVC_AVX512_H)
typedef __m512 kvc_some;
static inline kvc_some kvc_some_halves(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
static inline kvc_some kvc_some_add(kvc_some sum, kvc_some x, float factor)
{
    return _mm512_fmadd_ps(x, _mm512_set1_ps(factor), sum);
}
static inline void kvc_some_store(float *to, kvc_some x) { _mm512_storeu_ps(to, x); }
static inline void kvc_some_keep(const float *p, uint16_t *to)
{
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtps_ph(_mm512_loadu_ps(p), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(KVC_AVX2_H)
typedef struct kvc_some {
    __m256 x[2];
} kvc_some;
static inline kvc_some kvc_some_halves(const uint16_t *p)
{
    const __m128i *at = (const __m128i *)(const void *)p;
    return (kvc_some){{_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))}};
}
static inline kvc_some kvc_some_add(kvc_some sum, kvc_some x, float factor)
{
    __m256 f = _mm256_set1_ps(factor);
    return (kvc_some){{_mm256_fmadd_ps(x.x[0], f, sum.x[0]), _mm256_fmadd_ps(x.x[1], f, sum.x[1])}};
}
static inline void kvc_some_store(float *to, kvc_some x)
{
    _mm256_storeu_ps(to, x.x[0]);
    _mm256_storeu_ps(to + 8, x.x[1]);
}
static inline void kvc_some_keep(const float *p, uint16_t *to)
{
    __m128i *at = (__m128i *)(void *)to;
    _mm_storeu_si128(at, _mm256_cvtps_ph(_mm256_loadu_ps(p), _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(at + 1, _mm256_cvtps_ph(_mm256_loadu_ps(p + 8), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(KVC_NEON_H)
typedef struct kvc_some {
    float32x4_t x[4];
} kvc_some;
static inline kvc_some kvc_some_halves(const uint16_t *p)
{
    kvc_some y;
    for (int i = 0; i < 4; i++) y.x[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
    return y;
}
static inline kvc_some kvc_some_add(kvc_some sum, kvc_some x, float factor)
{
    for (int i = 0; i < 4; i++) sum.x[i] = vfmaq_n_f32(sum.x[i], x.x[i], factor);
    return sum;
}
static inline void kvc_some_store(float *to, kvc_some x)
{
    for (int i = 0; i < 4; i++) vst1q_f32(to + 4 * i, x.x[i]);
}
static inline void kvc_some_keep(const float *p, uint16_t *to)
{
    for (int i = 0; i < 4; i++) vst1_u16(to + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(p + 4 * i))));
}
#else
typedef struct kvc_some {
    float x[KVC_TILE];
} kvc_some;
static inline kvc_some kvc_some_halves(const uint16_t *p)
{
    kvc_some y;
    for (int i = 0; i < KVC_TILE; i++) y.x[i] = kvc_f16_to_f32(p[i]);
    return y;
}
static inline kvc_some kvc_some_add(kvc_some sum, kvc_some x, float factor)
{
    for (int i = 0; i < KVC_TILE; i++) sum.x[i] += x.x[i] * factor;
    return sum;
}
static inline void kvc_some_store(float *to, kvc_some x) { memcpy(to, x.x, sizeof x.x); }
static inline void kvc_some_keep(const float *p, uint16_t *to)
{
    for (int i = 0; i < KVC_TILE; i++) to[i] = kvc_f32_to_f16(p[i]);
}
#endif

/* See kvc_kernels. */
static void kvc_keep(const float *p, int64_t ld, int64_t rows, int64_t n16, uint16_t *to, int64_t to_ld)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < n16; t += KVC_TILE) kvc_some_keep(p + r * ld + t, to + r * to_ld + t);
}

static void kvc_sum_halves(const uint16_t *p, int64_t ld, int64_t rows, int64_t n16, const float *factor, float *to)
{
    for (int64_t t = 0; t < n16; t += KVC_TILE) {
        kvc_some sum = {0};
        for (int64_t r = 0; r < rows; r++) sum = kvc_some_add(sum, kvc_some_halves(p + r * ld + t), factor[r]);
        kvc_some_store(to + t, sum);
    }
}

/* Four rows at a time, so that the sum stays in a register. */
static void kvc_sum_floats(const float *p, int64_t ld, int64_t rows, int64_t n16, const float *factor,
                           float *restrict to)
{
    int64_t r = 0;
    for (int64_t t = 0; t < n16; t++) to[t] = 0;
    for (; r + 4 <= rows; r += 4, p += 4 * ld) {
        const float *b = p + ld, *c = b + ld, *d = c + ld;
        float f = factor[r], g = factor[r + 1], h = factor[r + 2], k = factor[r + 3];
        for (int64_t t = 0; t < n16; t++) to[t] += (p[t] * f + b[t] * g) + (c[t] * h + d[t] * k);
    }
    for (; r < rows; r++, p += ld)
        for (int64_t t = 0; t < n16; t++) to[t] += p[t] * factor[r];
}

static void kvc_sum_rows(const void *p, bool half, int64_t ld, int64_t rows, int64_t n16, const float *factor,
                         float *to)
{
    if (half)
        kvc_sum_halves(p, ld, rows, n16, factor, to);
    else
        kvc_sum_floats(p, ld, rows, n16, factor, to);
}

#endif
