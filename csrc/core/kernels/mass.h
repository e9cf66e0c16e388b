/* mass.h - weights of a page that are kept, and their sums over rows; compiled by every level behind its target pragma.
 * Cost: for every 8 weights a conversion and a store; back, a conversion and a multiply-add. */
#ifndef KVC_MASS_H
#define KVC_MASS_H

#include "../dispatch.h"
#include "../floats.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

/* Eight weights. */
#if defined(__F16C__)
typedef __m256 kvc_eight;
static inline kvc_eight kvc_eight_halves(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}
static inline kvc_eight kvc_eight_add(kvc_eight sum, kvc_eight x, float factor)
{
    return _mm256_fmadd_ps(x, _mm256_set1_ps(factor), sum);
}
static inline void kvc_eight_store(float *to, kvc_eight x) { _mm256_storeu_ps(to, x); }
static inline void kvc_eight_keep(const float *p, uint16_t *to)
{
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_cvtps_ph(_mm256_loadu_ps(p), _MM_FROUND_TO_NEAREST_INT));
}
#else
typedef struct kvc_eight {
    float x[8];
} kvc_eight;
static inline kvc_eight kvc_eight_halves(const uint16_t *p)
{
    kvc_eight y;
    for (int i = 0; i < 8; i++) y.x[i] = kvc_f16_to_f32(p[i]);
    return y;
}
static inline kvc_eight kvc_eight_add(kvc_eight sum, kvc_eight x, float factor)
{
    for (int i = 0; i < 8; i++) sum.x[i] += x.x[i] * factor;
    return sum;
}
static inline void kvc_eight_store(float *to, kvc_eight x) { memcpy(to, x.x, sizeof x.x); }
static inline void kvc_eight_keep(const float *p, uint16_t *to)
{
    for (int i = 0; i < 8; i++) to[i] = kvc_f32_to_f16(p[i]);
}
#endif

/* See kvc_kernels. */
static void kvc_keep(const float *p, int64_t ld, int64_t rows, int64_t n16, uint16_t *to, int64_t to_ld)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < n16; t += 8) kvc_eight_keep(p + r * ld + t, to + r * to_ld + t);
}

static void kvc_mass_halves(const uint16_t *p, int64_t ld, int64_t rows, int64_t n16, const float *factor, float *to)
{
    for (int64_t t = 0; t < n16; t += 16) {
        kvc_eight a = {0}, b = {0};
        for (int64_t r = 0; r < rows; r++) {
            a = kvc_eight_add(a, kvc_eight_halves(p + r * ld + t), factor[r]);
            b = kvc_eight_add(b, kvc_eight_halves(p + r * ld + t + 8), factor[r]);
        }
        kvc_eight_store(to + t, a);
        kvc_eight_store(to + t + 8, b);
    }
}

/* Rows in fours, so that a sum stays in its register. */
static void kvc_mass_floats(const float *p, int64_t ld, int64_t rows, int64_t n16, const float *factor,
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

static void kvc_mass_sum(const void *p, bool half, int64_t ld, int64_t rows, int64_t n16, const float *factor,
                         float *to)
{
    if (half)
        kvc_mass_halves(p, ld, rows, n16, factor, to);
    else
        kvc_mass_floats(p, ld, rows, n16, factor, to);
}

#endif
