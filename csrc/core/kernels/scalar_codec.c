/* scalar_codec.c - rows to codes and scales: the reference for all other levels and for CUDA.
 *
 * Rounding rules: fp32, each operation rounded separately (no FMA), IEEE division and square root; sums over D as 16
 * lane-strided partial sums and one tree; Walsh-Hadamard levels ascending. Codes are computed with the scale as
 * stored. */
#ifndef __clang__
#pragma GCC optimize("no-tree-vectorize")
#endif
#define ROTATE kvc_scalar_rotate
#include "rows.h"

void kvc_scalar_encode(int format, float *rows, int64_t n, int64_t dim, const float *feedback, uint8_t *codes,
                       uint8_t *meta)
{
    kvc_encode_rows(format, rows, n, dim, feedback, codes, meta);
}

void kvc_scalar_rotate(float *rows, int64_t n, int64_t dim)
{
    int64_t block = kvc_block(dim);
    float norm = (float)(1 / sqrt((double)block));
    for (float *x = rows; x < rows + n * dim; x += block) {
        for (int64_t h = 1; h < block; h *= 2)
            for (int64_t j = 0; j < block; j += 2 * h)
                for (int64_t d = j; d < j + h; d++) {
                    float a = x[d], b = x[d + h];
                    x[d] = a + b;
                    x[d + h] = a - b;
                }
        for (int64_t d = 0; d < block; d++) x[d] *= norm;
    }
}
