/* neon_codec.c - scalar_codec.c, arranged for auto-vectorization: all loops run over independent lanes. */
#if defined(__aarch64__)
#define ROTATE kvc_neon_rotate
#include "rows.h"

/* One level of the transform: sums and differences of elements h apart. */
static inline void level(float *x, int64_t block, int64_t h)
{
    for (int64_t j = 0; j < block; j += 2 * h)
        for (int64_t d = j; d < j + h; d++) {
            float a = x[d], b = x[d + h];
            x[d] = a + b;
            x[d + h] = a - b;
        }
}

void kvc_neon_encode(int format, float *rows, int64_t n, int64_t dim, const float *feedback, uint8_t *codes,
                     uint8_t *meta)
{
    kvc_encode_rows(format, rows, n, dim, feedback, codes, meta);
}

void kvc_neon_rotate(float *rows, int64_t n, int64_t dim)
{
    int64_t block = kvc_block(dim);
    float norm = (float)(1 / sqrt((double)block));
    for (float *x = rows; x < rows + n * dim; x += block) {
        level(x, block, 1), level(x, block, 2), level(x, block, 4), level(x, block, 8); /* the block is at least 16 */
        for (int64_t h = 16; h < block; h *= 2) level(x, block, h);
        for (int64_t d = 0; d < block; d++) x[d] *= norm;
    }
}
#endif
