/* scalar_codec.c - rows to codes and scales: the oracle for every other level and for CUDA.
 *
 * The arithmetic rule: fp32, each operation rounded by itself (no FMA), IEEE division and square root; sums over D as
 * 16 lane-strided partials and one tree; Walsh-Hadamard levels ascending. Codes are made with the scale as stored. */
#pragma GCC optimize("no-tree-vectorize")
#pragma GCC optimize("fp-contract=off")
#include "../floats.h"
#include "kernels.h"

#include <math.h>

static float absmax(const float *x, int64_t dim)
{
    float a = 0;
    for (int64_t d = 0; d < dim; d++) {
        float y = fabsf(x[d]);
        if (y > a) a = y;
    }
    return a;
}

static float tree_sum(float *p)
{
    for (int h = 8; h > 0; h /= 2)
        for (int i = 0; i < h; i++) p[i] += p[i + h];
    return p[0];
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

/* x becomes its rotation, scaled to absmax 1 beforehand. Grid of step 0.33 rms, centred between levels; the gain is
 * the least-squares fit of the row to its own levels. */
static void encode_int4(float *x, int64_t dim, uint8_t *codes, uint16_t *gain)
{
    float a = absmax(x, dim), p[16] = {0}, num[16] = {0}, den[16] = {0};
    if (a < 0x1p-100f) {
        memset(codes, 8, (size_t)dim);
        *gain = 0;
        return;
    }
    float scale = 1 / a;
    for (int64_t d = 0; d < dim; d++) x[d] *= scale;
    kvc_scalar_rotate(x, 1, dim);
    for (int64_t d = 0; d < dim; d++) p[d % 16] += x[d] * x[d];
    float r = sqrtf(tree_sum(p) / (float)dim), inverse = 1 / (0.33f * r);
    for (int64_t d = 0; d < dim; d++) {
        float q = kvc_clamp(floorf(x[d] * inverse), -8, 7), level = q + 0.5f;
        num[d % 16] += x[d] * level;
        den[d % 16] += level * level;
        codes[d] = (uint8_t)((int)q + 8);
    }
    float g = tree_sum(num);
    *gain = kvc_scale_to_f16(g / tree_sum(den) * a);
}

void kvc_scalar_encode(int format, float *rows, int64_t n, int64_t dim, uint8_t *codes, uint16_t *scales)
{
    uint32_t guard = kvc_fp_begin();
    for (int64_t i = 0; i < n; i++) {
        float *x = rows + i * dim;
        if (format == KVC_INT8)
            encode_int8(x, dim, codes + i * dim, scales + i);
        else if (format == KVC_FP8_E4M3)
            encode_fp8_e4m3(x, dim, codes + i * dim, scales + i);
        else
            encode_int4(x, dim, codes + i * dim, scales + i);
    }
    kvc_fp_end(guard);
}

void kvc_scalar_rotate(float *rows, int64_t n, int64_t dim)
{
    float norm = (float)(1 / sqrt((double)dim));
    for (int64_t i = 0; i < n; i++) {
        float *x = rows + i * dim;
        for (int64_t h = 1; h < dim; h *= 2)
            for (int64_t j = 0; j < dim; j += 2 * h)
                for (int64_t d = j; d < j + h; d++) {
                    float a = x[d], b = x[d + h];
                    x[d] = a + b;
                    x[d + h] = a - b;
                }
        for (int64_t d = 0; d < dim; d++) x[d] *= norm;
    }
}
