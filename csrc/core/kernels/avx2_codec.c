/* avx2_codec.c - scalar_codec.c with 8 lanes. Two vectors hold its 16 partial sums, so results are bit-identical. */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx2,fma,f16c")
#define ROTATE kvc_avx2_rotate
#include "rows.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define MAX_VECTORS (KVC_MAX_DIM / 8)

INLINE __m256 splat(float x) { return _mm256_set1_ps(x); }

/* One level within a vector: lanes in `upper` (a constant) become partner - x, the others x + partner. */
#define BUTTERFLY(x, partner, upper) _mm256_blend_ps(_mm256_add_ps(x, partner), _mm256_sub_ps(partner, x), upper)

/* Orthonormal Walsh-Hadamard transform of NV vectors; NV is a compile-time constant once inlined. */
INLINE void transform(int NV, __m256 *v, float norm)
{
    for (int i = 0; i < NV; i++) {
        v[i] = BUTTERFLY(v[i], _mm256_permute_ps(v[i], 0xb1), 0xaa);
        v[i] = BUTTERFLY(v[i], _mm256_permute_ps(v[i], 0x4e), 0xcc);
        v[i] = BUTTERFLY(v[i], _mm256_permute2f128_ps(v[i], v[i], 1), 0xf0);
    }
    for (int h = 1; h < NV; h *= 2)
        for (int j = 0; j < NV; j += 2 * h)
            for (int i = j; i < j + h; i++) {
                __m256 a = v[i], b = v[i + h];
                v[i] = _mm256_add_ps(a, b);
                v[i + h] = _mm256_sub_ps(a, b);
            }
    for (int i = 0; i < NV; i++) v[i] = _mm256_mul_ps(v[i], splat(norm));
}

INLINE void rotate(int NV, float *rows, int64_t n)
{
    float norm = (float)(1 / sqrt(8.0 * NV));
    __m256 v[MAX_VECTORS];
    for (; n > 0; n--, rows += 8 * NV) {
        for (int i = 0; i < NV; i++) v[i] = _mm256_loadu_ps(rows + 8 * i);
        transform(NV, v, norm);
        for (int i = 0; i < NV; i++) _mm256_storeu_ps(rows + 8 * i, v[i]);
    }
}

void kvc_avx2_encode(int format, float *rows, int64_t n, int64_t dim, const float *feedback, uint8_t *codes,
                     uint8_t *meta)
{
    kvc_encode_rows(format, rows, n, dim, feedback, codes, meta);
}

void kvc_avx2_rotate(float *rows, int64_t n, int64_t dim)
{
    int64_t block = kvc_block(dim);
    n *= dim / block;
    if (block == 16)
        rotate(2, rows, n);
    else if (block == 32)
        rotate(4, rows, n);
    else if (block == 64)
        rotate(8, rows, n);
    else if (block == 128)
        rotate(16, rows, n);
    else if (block == 256)
        rotate(32, rows, n);
    else
        rotate(64, rows, n);
}
KVC_TARGET_END
#endif
