/* tile_rotate.h - the orthonormal Walsh-Hadamard transform of 16 tokens at once, one per lane. Additions and their
 * order are those of scalar_codec.c; none are across lanes.
 *
 * Cost: two passes over x in L1 (levels 1 to 8, and the rest); log2(block) + 1 instructions per 16 elements, and a load
 * and a store per pass. */
#ifndef KVC_TILE_ROTATE_H
#define KVC_TILE_ROTATE_H

#include "kernels.h"

#include <math.h>

/* n and h are compile-time constants once inlined; v stays in registers only if all loops are unrolled. */
INLINE void level(int n, int h, vf *v)
{
#pragma GCC unroll 32
    for (int p = 0; p < n / 2; p++) {
        int i = p / h * 2 * h + p % h;
        vf a = v[i], b = v[i + h];
        v[i] = f_add(a, b);
        v[i + h] = f_minus(a, b);
    }
}

INLINE void levels(int n, vf *v)
{
    if (n > 1) level(n, 1, v);
    if (n > 2) level(n, 2, v);
    if (n > 4) level(n, 4, v);
    if (n > 8) level(n, 8, v);
    if (n > 16) level(n, 16, v);
}

/* Applied to the transform when it is stored. */
typedef struct after {
    const float *add; /* [dim] added to each token, or NULL */
    vf *squares;      /* [16] sums of squares over d % 16, or NULL */
} after;

/* Levels from 16 up of the block at dim d0: n vectors, 16 dims apart; n is a compile-time constant once inlined. */
INLINE void upper_levels(int n, float *x, int64_t d0, vf norm, after then)
{
    for (int k = 0; k < LANES; k++) {
        float *at = x + (d0 + k) * LANES;
        vf v[32], sum = f_all(0);
#pragma GCC unroll 32
        for (int i = 0; i < n; i++) v[i] = f_load(at + i * 16 * LANES);
        levels(n, v);
        if (then.squares) sum = then.squares[k];
#pragma GCC unroll 32
        for (int i = 0; i < n; i++) {
            vf y = f_mul(v[i], norm);
            if (then.squares) sum = f_add(sum, f_mul(y, y));
            f_store(at + i * 16 * LANES, then.add ? f_add(y, f_all(then.add[d0 + k + 16 * i])) : y);
        }
        if (then.squares) then.squares[k] = sum;
    }
}

/* Transforms x [dim][16] in place, in blocks of the largest power of two that divides dim. Elements are first
 * multiplied by `scale`. */
INLINE void rotate_tile(float *x, int64_t dim, vf scale, after then)
{
    int64_t block = kvc_block(dim);
    vf norm = f_all((float)(1 / sqrt((double)block)));
    for (float *at = x; at < x + dim * LANES; at += 16 * LANES) {
        vf v[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) v[i] = f_mul(f_load(at + i * LANES), scale);
        levels(16, v);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) f_store(at + i * LANES, v[i]);
    }
    for (int64_t d = 0; d < dim; d += block) switch (block) {
        case 16: upper_levels(1, x, d, norm, then); break;
        case 32: upper_levels(2, x, d, norm, then); break;
        case 64: upper_levels(4, x, d, norm, then); break;
        case 128: upper_levels(8, x, d, norm, then); break;
        case 256: upper_levels(16, x, d, norm, then); break;
        default: upper_levels(32, x, d, norm, then);
        }
}

#endif
