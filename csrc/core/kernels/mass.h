/* mass.h - sums of weights over rows, written once in plain C and compiled by every level behind its target pragma.
 * Cost: a load and a multiply-add for every 16 (8) weights, a store for every 16 (8) tokens. */
#ifndef KVC_MASS_H
#define KVC_MASS_H

#include "../dispatch.h"

/* See kvc_kernels. Rows in fours, so that a sum stays in its register. */
static void kvc_mass_sum(const float *p, int64_t ld, int64_t rows, int64_t n, const float *factor, float *restrict to)
{
    int64_t r = 0;
    for (int64_t t = 0; t < n; t++) to[t] = 0;
    for (; r + 4 <= rows; r += 4, p += 4 * ld) {
        const float *b = p + ld, *c = b + ld, *d = c + ld;
        float f = factor[r], g = factor[r + 1], h = factor[r + 2], k = factor[r + 3];
        for (int64_t t = 0; t < n; t++) to[t] += (p[t] * f + b[t] * g) + (c[t] * h + d[t] * k);
    }
    for (; r < rows; r++, p += ld)
        for (int64_t t = 0; t < n; t++) to[t] += p[t] * factor[r];
}

#endif
