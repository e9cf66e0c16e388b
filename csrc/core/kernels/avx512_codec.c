/* avx512_codec.c - scalar_codec.c with 16 lanes, one for each of its partial sums, so results are bit-identical. */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")
#define ROTATE kvc_avx512_rotate
#include "rows.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define MAX_VECTORS (KVC_MAX_DIM / 16)

INLINE __m512 splat(float x) { return _mm512_set1_ps(x); }

/* One level within a vector: lanes in `upper` become partner - x, the others x + partner. */
INLINE __m512 butterfly(__m512 x, __m512 partner, __mmask16 upper)
{
    return _mm512_mask_sub_ps(_mm512_add_ps(x, partner), upper, partner, x);
}

/* Orthonormal Walsh-Hadamard transform of NV vectors; NV is a compile-time constant once inlined. */
INLINE void transform(int NV, __m512 *v, float norm)
{
    for (int i = 0; i < NV; i++) {
        v[i] = butterfly(v[i], _mm512_permute_ps(v[i], 0xb1), 0xaaaa);
        v[i] = butterfly(v[i], _mm512_permute_ps(v[i], 0x4e), 0xcccc);
        v[i] = butterfly(v[i], _mm512_shuffle_f32x4(v[i], v[i], 0xb1), 0xf0f0);
        v[i] = butterfly(v[i], _mm512_shuffle_f32x4(v[i], v[i], 0x4e), 0xff00);
    }
    for (int h = 1; h < NV; h *= 2)
        for (int j = 0; j < NV; j += 2 * h)
            for (int i = j; i < j + h; i++) {
                __m512 a = v[i], b = v[i + h];
                v[i] = _mm512_add_ps(a, b);
                v[i + h] = _mm512_sub_ps(a, b);
            }
    for (int i = 0; i < NV; i++) v[i] = _mm512_mul_ps(v[i], splat(norm));
}

INLINE void rotate(int NV, float *rows, int64_t n)
{
    float norm = (float)(1 / sqrt(16.0 * NV));
    __m512 v[MAX_VECTORS];
    for (; n > 0; n--, rows += 16 * NV) {
        for (int i = 0; i < NV; i++) v[i] = _mm512_loadu_ps(rows + 16 * i);
        transform(NV, v, norm);
        for (int i = 0; i < NV; i++) _mm512_storeu_ps(rows + 16 * i, v[i]);
    }
}

void kvc_avx512_encode(int format, float *rows, int64_t n, int64_t dim, const float *feedback, uint8_t *codes,
                       uint8_t *meta)
{
    kvc_encode_rows(format, rows, n, dim, feedback, codes, meta);
}

void kvc_avx512_rotate(float *rows, int64_t n, int64_t dim)
{
    int64_t block = kvc_block(dim);
    n *= dim / block;
    if (block == 16)
        rotate(1, rows, n);
    else if (block == 32)
        rotate(2, rows, n);
    else if (block == 64)
        rotate(4, rows, n);
    else if (block == 128)
        rotate(8, rows, n);
    else if (block == 256)
        rotate(16, rows, n);
    else
        rotate(32, rows, n);
}
KVC_TARGET_END
#endif
