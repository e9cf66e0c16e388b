/* tile_rotate.h - the orthonormal Walsh-Hadamard transform of 16 tokens at once, a lane each: the same additions in
 * the same order as scalar_codec.c, none of them across lanes.
 *
 * Cost: two passes over x in L1, levels 1 to 8 and the rest; log2(block) + 1 instructions per 16 elements and twice a
 * load and a store. */
#ifndef KVC_TILE_ROTATE_H
#define KVC_TILE_ROTATE_H

#include "kernels.h"

#include <math.h>

/* n and h are constants where these are inlined; v stays in registers only if no loop is left. */
INLINE void level(int n, int h, vf *v)
{
#pragma GCC unroll 16
    for (int p = 0; p < n / 2; p++) {
        int i = p / h * 2 * h + p % h;
        vf a = v[i], b = v[i + h];
        v[i] = f_add(a, b);
        v[i + h] = f_sub(a, b);
    }
}

INLINE void levels(int n, vf *v)
{
    if (n > 1) level(n, 1, v);
    if (n > 2) level(n, 2, v);
    if (n > 4) level(n, 4, v);
    if (n > 8) level(n, 8, v);
}

/* Levels from 16 up of one block, n vectors 16 dims apart; n is a constant where this is inlined. */
INLINE void upper_levels(int n, float *x, vf norm)
{
    for (int k = 0; k < LANES; k++) {
        vf v[16];
        for (int i = 0; i < n; i++) v[i] = f_load(x + (i * 16 + k) * LANES);
        levels(n, v);
        for (int i = 0; i < n; i++) f_store(x + (i * 16 + k) * LANES, f_mul(v[i], norm));
    }
}

/* x [dim][16] in place, in blocks of the largest power of two in dim; each element is first multiplied by `scale`. */
static void rotate_tile(float *x, int64_t dim, vf scale)
{
    int64_t block = kvc_block(dim);
    vf norm = f_all((float)(1 / sqrt((double)block)));
    for (float *at = x; at < x + dim * LANES; at += 16 * LANES) {
        vf v[16];
        for (int i = 0; i < 16; i++) v[i] = f_mul(f_load(at + i * LANES), scale);
        levels(16, v);
        for (int i = 0; i < 16; i++) f_store(at + i * LANES, v[i]);
    }
    for (float *at = x; at < x + dim * LANES; at += block * LANES) switch (block) {
        case 16: upper_levels(1, at, norm); break;
        case 32: upper_levels(2, at, norm); break;
        case 64: upper_levels(4, at, norm); break;
        case 128: upper_levels(8, at, norm); break;
        default: upper_levels(16, at, norm);
        }
}

#endif
