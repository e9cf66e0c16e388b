/* scalar_codec.c - rows to codes and scales: the oracle for every other level and for CUDA.
 *
 * The arithmetic rule: fp32, each operation rounded by itself (no FMA), IEEE division and square root; sums over D as
 * 16 lane-strided partials and one tree; Walsh-Hadamard levels ascending. Codes are made with the scale as stored. */
#pragma GCC optimize("no-tree-vectorize")
#pragma GCC optimize("fp-contract=off")
#define ROTATE kvc_scalar_rotate
#include "rows.h"

static float absmax(const float *x, int64_t dim)
{
    float a = 0;
    for (int64_t d = 0; d < dim; d++) {
        float y = fabsf(x[d]);
        if (y > a) a = y;
    }
    return a;
}

static void encode_int8(const float *x, int64_t dim, uint8_t *codes, uint16_t *scale)
{
    float a = absmax(x, dim);
    *scale = a > 0 ? kvc_scale_to_f16(a / 127) : 0;
    float inverse = a > 0 ? 1 / kvc_f16_to_f32(*scale) : 0;
    for (int64_t d = 0; d < dim; d++) codes[d] = (uint8_t)((int)kvc_clamp(rintf(x[d] * inverse), -127, 127) + 128);
}

static void encode_fp8_e4m3(const float *x, int64_t dim, uint8_t *codes, uint16_t *scale)
{
    float a = absmax(x, dim);
    *scale = a > 0 ? kvc_scale_to_f16(a / 448) : 0;
    if (!(a > 0)) {
        memset(codes, 0, (size_t)dim);
        return;
    }
    float inverse = 1 / kvc_f16_to_f32(*scale);
    for (int64_t d = 0; d < dim; d++) codes[d] = kvc_f32_to_e4m3(x[d] * inverse);
}

void kvc_scalar_encode(int format, float *rows, int64_t n, int64_t dim, uint8_t *codes, uint8_t *meta)
{
    uint32_t guard = kvc_fp_begin();
    if (format != KVC_INT8 && format != KVC_FP8_E4M3)
        kvc_encode_rows(format, rows, n, dim, codes, meta);
    else
        for (int64_t i = 0; i < n; i++) {
            uint16_t scale;
            if (format == KVC_INT8)
                encode_int8(rows + i * dim, dim, codes + i * dim, &scale);
            else
                encode_fp8_e4m3(rows + i * dim, dim, codes + i * dim, &scale);
            memcpy(meta + 2 * i, &scale, sizeof scale);
        }
    kvc_fp_end(guard);
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
