/* floats.h - conversions between fp32 and small floats by integer arithmetic (round to nearest even, exact subnormals,
 * independent of the floating-point control register), and setting that register for codecs. */
#ifndef KVC_FLOATS_H
#define KVC_FLOATS_H

#include "page.h" /* KVC_INLINE: also used by CUDA */

#include <string.h>

KVC_INLINE uint32_t kvc_f32_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

KVC_INLINE float kvc_f32_of_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* which ? a : b without a branch, so that loops vectorize. */
KVC_INLINE uint32_t kvc_select(int which, uint32_t a, uint32_t b)
{
    uint32_t mask = (uint32_t)-which;
    return (a & mask) | (b & ~mask);
}

/* m / 2^s, rounded to nearest even; 1 <= s <= 31, m <= 2^31. */
KVC_INLINE uint32_t kvc_round_shift(uint32_t m, uint32_t s) { return (m + (1u << (s - 1)) - 1 + (m >> s & 1)) >> s; }

/* Magnitude bits `a` of an fp32 number in units of 2^-unit, rounded; for results below 2^23. */
KVC_INLINE uint32_t kvc_f32_to_units(uint32_t a, uint32_t unit)
{
    uint32_t below = 149 - unit - (a >> 23); /* shift - 1; larger shifts, also from inputs that are too large, give 0 */
    return kvc_round_shift((a & 0x7fffff) | 0x800000, (below < 30 ? below : 30) + 1);
}

KVC_INLINE float kvc_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 0x3ff;
    uint32_t normal = ((e + (e == 31 ? 224 : 112)) << 23) | m << 13;
    float tiny = (float)(int32_t)m * 0x1p-24f; /* exact, and not subnormal in fp32 */
    return kvc_f32_of_bits(sign | kvc_select(e == 0, kvc_f32_bits(tiny), normal));
}

/* IEEE: overflow gives Inf, NaN stays NaN. */
KVC_INLINE uint16_t kvc_f32_to_f16(float x)
{
    uint32_t u = kvc_f32_bits(x), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (a >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    uint32_t h = a >= 0x38800000 ? kvc_round_shift(a - 0x38000000, 13) : kvc_f32_to_units(a, 24);
    return (uint16_t)(sign | h);
}

KVC_INLINE float kvc_bf16_to_f32(uint16_t h) { return kvc_f32_of_bits((uint32_t)h << 16); }

KVC_INLINE uint16_t kvc_f32_to_bf16(float x)
{
    uint32_t u = kvc_f32_bits(x);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* e4m3fn: no Inf; 0x7f and 0xff are NaN. */
KVC_INLINE float kvc_e4m3_to_f32(uint8_t c)
{
    uint32_t sign = (uint32_t)(c & 0x80) << 24, e = c >> 3 & 15, m = c & 7;
    uint32_t normal = (c & 0x7f) == 0x7f ? 0x7fc00000 : (e + 120) << 23 | m << 20;
    float tiny = (float)(int32_t)m * 0x1p-9f;
    return kvc_f32_of_bits(sign | kvc_select(e == 0, kvc_f32_bits(tiny), normal));
}

/* Saturates at 448; NaN counts as 448, so no code is NaN. */
KVC_INLINE uint8_t kvc_f32_to_e4m3(float x)
{
    uint32_t u = kvc_f32_bits(x), sign = u >> 24 & 0x80, a = u & 0x7fffffff;
    if (a > 0x43e00000) a = 0x43e00000;
    uint32_t c = kvc_select(a >= 0x3c800000, kvc_round_shift(a - 0x3c000000, 20), kvc_f32_to_units(a, 9));
    return (uint8_t)(sign | c);
}

/* e5m2: the upper byte of an fp16. */
KVC_INLINE float kvc_e5m2_to_f32(uint8_t c)
{
    uint32_t sign = (uint32_t)(c & 0x80) << 24, e = c >> 2 & 31, m = c & 3;
    uint32_t normal = ((e + (e == 31 ? 224 : 112)) << 23) | m << 21;
    float tiny = (float)(int32_t)m * 0x1p-16f;
    return kvc_f32_of_bits(sign | kvc_select(e == 0, kvc_f32_bits(tiny), normal));
}

/* Saturates at 57344; NaN counts as 57344, so no code is NaN or Inf. */
KVC_INLINE uint8_t kvc_f32_to_e5m2(float x)
{
    uint32_t u = kvc_f32_bits(x), sign = u >> 24 & 0x80, a = u & 0x7fffffff;
    if (a > 0x47600000) a = 0x47600000;
    uint32_t c = kvc_select(a >= 0x38800000, kvc_round_shift(a - 0x38000000, 21), kvc_f32_to_units(a, 16));
    return (uint8_t)(sign | c);
}

/* A positive scale as stored: never Inf or 0. */
KVC_INLINE uint16_t kvc_scale_to_f16(float x)
{
    uint16_t h = kvc_f32_to_f16(x < 65504 ? x : 65504);
    return h ? h : 1;
}

KVC_INLINE float kvc_clamp(float x, float low, float high)
{
    x = x > low ? x : low; /* NaN becomes low */
    return x < high ? x : high;
}

/* Clamps to [-most, most]; NaN stays NaN. */
KVC_INLINE float kvc_saturate(float x, float most)
{
    x = x < -most ? -most : x;
    return x > most ? most : x;
}

/* Between begin and end, fp32 arithmetic rounds to nearest even and keeps subnormals, so that stored bytes do not
 * depend on the host program's settings. */
static inline uint32_t kvc_fp_begin(void)
{
    uint32_t old = 0;
#if defined(__x86_64__)
    __asm__ volatile("stmxcsr %0" : "=m"(old) : : "memory");
    uint32_t now = old & ~0xe040u; /* FTZ, rounding control, DAZ */
    __asm__ volatile("ldmxcsr %0" : : "m"(now) : "memory");
#elif defined(__aarch64__)
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr) : : "memory");
    old = (uint32_t)fpcr;
    fpcr &= ~(uint64_t)0x05c80003; /* AHP, FZ, rounding mode, FZ16, AH, FIZ */
    if (old != (uint32_t)fpcr)
        __asm__ volatile("msr fpcr, %0" : : "r"(fpcr) : "memory"); /* serializing, hence conditional */
#endif
    return old;
}

static inline void kvc_fp_end(uint32_t old)
{
#if defined(__x86_64__)
    __asm__ volatile("ldmxcsr %0" : : "m"(old) : "memory");
#elif defined(__aarch64__)
    if (old & 0x05c80003) __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)old) : "memory");
#else
    (void)old;
#endif
}

#endif
