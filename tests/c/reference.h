/* reference.h - an independent implementation of the stored formats and attention, in float64 and from page.h only; it
 * uses none of the library's arithmetic. */
#ifndef KVC_REFERENCE_H
#define KVC_REFERENCE_H

#include "kvc.h"

#include <math.h>
#include <string.h>

static inline double ref_power_of_two(int e) /* ldexp is slow */
{
    double x;
    uint64_t bits = (uint64_t)(1023 + e) << 52;
    return *(double *)memcpy(&x, &bits, sizeof x);
}

/* Small floats by definition: `code` is sign, exponent, mantissa. */
static inline double ref_small_float(unsigned code, int exponent, int mantissa, int bias)
{
    int e = (int)(code >> mantissa) & ((1 << exponent) - 1), tiny = e == 0;
    double units = (double)((code & ((1u << mantissa) - 1)) + ((unsigned)!tiny << mantissa));
    double x = units * ref_power_of_two(e + tiny - bias - mantissa);
    return code >> (exponent + mantissa) & 1 ? -x : x;
}

static inline double ref_half(uint16_t h) { return (h & 0x7c00) == 0x7c00 ? NAN : ref_small_float(h, 5, 10, 15); }

static inline double ref_element(kvc_dtype dtype, const void *array, int64_t i)
{
    uint32_t bits;
    uint16_t h;
    float x;
    if (dtype == KVC_F32) {
        memcpy(&x, (const float *)array + i, sizeof x);
        return x;
    }
    memcpy(&h, (const uint16_t *)array + i, sizeof h);
    if (dtype == KVC_F16) return ref_half(h);
    bits = (uint32_t)h << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Stores `x` to element i of an array; x must be representable in the dtype. */
static inline void ref_put(kvc_dtype dtype, void *array, int64_t i, float x)
{
    uint32_t bits;
    int e;
    memcpy(&bits, &x, sizeof bits);
    uint16_t h = (uint16_t)(bits >> 16);
    if (dtype == KVC_F16) {
        double m = frexp(fabs((double)x), &e); /* in [.5, 1) */
        h = (uint16_t)((x == 0 ? 0 : (e + 14) << 10 | ((int)(m * 2048) & 0x3ff)) | (signbit(x) ? 0x8000 : 0));
    }
    if (dtype == KVC_F32)
        memcpy((float *)array + i, &x, sizeof x);
    else
        memcpy((uint16_t *)array + i, &h, sizeof h);
}

/* Token t of one side of a page, [dim]. */
void ref_page_row(const uint8_t *page, int key_side, int key, int value, int64_t key_dim, int64_t value_dim,
                  int64_t page_size, int64_t t, double *row);
/* Half a step of the grid that token t's elements were rounded to, [dim]: the maximum error. */
void ref_page_steps(const uint8_t *page, int key_side, int key, int value, int64_t key_dim, int64_t value_dim,
                    int64_t page_size, int64_t t, double *half_step);
/* Rows of the standalone ops: packed codes and their metadata. */
void ref_quantized_row(int format, const uint8_t *codes, const uint8_t *meta, int64_t dim, double *row);

/* One query over the n tokens that it sees: out [value_dim] and the log of the sum of exp(scores); weights [n]. */
typedef struct ref_tokens {
    int64_t n, key_dim, value_dim;
    const double *k, *v; /* [n][key_dim], [n][value_dim] */
    const bool *sees;    /* [n] */
} ref_tokens;
double ref_attend(const ref_tokens *tokens, const double *q, double scale, double softcap, const float *aux,
                  double *out, double *weights);

#endif
