/* avx2_affine.c - affine.h for avx2: codes are widened to 16 bits and multiplied by vpmaddwd, as int8 in avx2_qk.c and
 * avx2_pv.c. */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx2,fma,f16c")
#include "lanes_avx2.h"

#include "avx2.h"
#include "avx2_weights.h"

INLINE float sum_of(vf x) { return kvc_sum(_mm256_add_ps(x.a, x.b)); }
/* For non-negative numbers. */
INLINE float most_of(vf x) { return kvc_grown(_mm256_castps_si256(_mm256_max_ps(x.a, x.b))); }

/* Sum of the integers of q's dims [d, d + n). */
INLINE int32_t group_sum(const kvc_query_form *f, int64_t row, int64_t dim, int64_t d, int64_t n)
{
    if (n == dim) return f->sum[row];
    __m128i x = _mm_setzero_si128();
    for (int64_t i = d; i < d + n; i += 8) { /* half of the dims is a multiple of 8 */
        const int8_t *at = (i < dim / 2 ? f->hi + 2 * i : f->lo + 2 * (i - dim / 2)) + row * dim;
        x = _mm_add_epi32(x, _mm_madd_epi16(_mm_loadu_si128((const __m128i *)(const void *)at), _mm_set1_epi16(1)));
    }
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}

INLINE void key_tiles(int BITS, int NR, int NT, const kvc_affine *x, const kvc_query_form *f, int64_t row0,
                      const float sums[KVC_ROWS][KVC_MAX_GROUPS], const int32_t offset[KVC_ROWS][KVC_MAX_GROUPS],
                      const float *base, int64_t tile, float *s, int64_t ld)
{
    const __m256i byte = _mm256_set1_epi16(255);
    int64_t dim = x->dim, half = dim / 2;
    const uint8_t *at = x->words + tile * KVC_TILE * dim;
    __m256 out[4][2]; /* tokens 0-7, 8-15 */
    (void)BITS, (void)NT;
    EACH (r, NR) out[r][0] = out[r][1] = _mm256_setzero_ps(); /* in units of the row's step */
    for (int64_t g = 0, j = 0; j < dim; g++) {
        __m256i sum[4][2];
        EACH (r, NR) sum[r][0] = sum[r][1] = _mm256_set1_epi32(-offset[r][g]);
        for (int64_t end = j + x->group; j < end; j += 4, at += 4 * KVC_TILE) {
            const int8_t *q = (j < half ? f->hi + 2 * j : f->lo + 2 * (j - half)) + row0 * dim;
            __m256i v = kvc_load(at), w = kvc_load(at + 32);
            kvc_prefetch(at, 0, x->ahead);
            __m256i a = _mm256_and_si256(v, byte), b = _mm256_and_si256(w, byte);
            EACH (r, NR) {
                __m256i y = kvc_two(q + r * dim);
                sum[r][0] = kvc_dot(sum[r][0], a, y);
                sum[r][1] = kvc_dot(sum[r][1], b, y);
            }
            a = _mm256_srli_epi16(v, 8), b = _mm256_srli_epi16(w, 8);
            EACH (r, NR) {
                __m256i y = kvc_two(q + r * dim + 4);
                sum[r][0] = kvc_dot(sum[r][0], a, y);
                sum[r][1] = kvc_dot(sum[r][1], b, y);
            }
        }
        EACH (h, 2) {
            int64_t t = g * x->page_size + tile * KVC_TILE + 8 * h;
            __m256 scale = _mm256_loadu_ps(x->scale + t), middle = _mm256_loadu_ps(x->middle + t);
            EACH (r, NR) {
                if (!x->symmetric) out[r][h] = _mm256_fmadd_ps(middle, _mm256_set1_ps(sums[r][g]), out[r][h]);
                out[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][h]), scale, out[r][h]);
            }
        }
    }
    EACH (r, NR)
        EACH (h, 2)
            _mm256_storeu_ps(s + r * ld + tile * KVC_TILE + 8 * h,
                             _mm256_fmadd_ps(out[r][h], _mm256_set1_ps(f->step[row0 + r]), _mm256_set1_ps(base[r])));
}

/* 16 dims from d0. */
INLINE void value_dims(int BITS, bool BYTE, int NR, int NC, const kvc_affine *x, const weights *w, const float *middle,
                       int64_t n, int64_t d0, float *o)
{
    const uint8_t *line = x->words + d0 * ((n + 3) / 4 * 4); /* to prefetch */
    int64_t dim = x->dim;
    const __m256i byte = _mm256_set1_epi16(255);
    __m256i sum[4][2];
    (void)BITS, (void)BYTE, (void)NC;
    EACH (r, NR) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
    for (int64_t t = 0; t < n; t += 4) {
        const uint8_t *at = x->words + t * dim + d0 * 4;
        __m256i u = kvc_load(at), v = kvc_load(at + 32);
        kvc_prefetch(line, t / 4, x->ahead);
        __m256i a = _mm256_and_si256(u, byte), b = _mm256_and_si256(v, byte);
        EACH (r, NR) {
            __m256i y = kvc_two(w->z[r] + t);
            sum[r][0] = kvc_dot(sum[r][0], a, y);
            sum[r][1] = kvc_dot(sum[r][1], b, y);
        }
        a = _mm256_srli_epi16(u, 8), b = _mm256_srli_epi16(v, 8);
        EACH (r, NR) {
            __m256i y = kvc_two(w->z[r] + t + 2);
            sum[r][0] = kvc_dot(sum[r][0], a, y);
            sum[r][1] = kvc_dot(sum[r][1], b, y);
        }
    }
    EACH (r, NR)
        EACH (h, 2) {
            float *to = o + r * dim + d0 + 8 * h;
            __m256 y = _mm256_add_ps(_mm256_loadu_ps(to), _mm256_set1_ps(middle[r]));
            __m256i z = _mm256_sub_epi32(sum[r][h], _mm256_set1_epi32(kvc_times(x->centre, w->sum[r])));
            y = _mm256_fmadd_ps(_mm256_cvtepi32_ps(z), _mm256_set1_ps(w->step[r]), y);
            _mm256_storeu_ps(to, y);
        }
}

#define PLANES false
#define COARSE false
#define NAME(function) kvc_avx2_##function
#include "levels.h"
#define KVC_LEVEL kvc_kernels_avx2
#define KEY_TILES 1, 1, 1
#define VALUE_BLOCKS 1, 1, 1
#include "affine.h"
KVC_TARGET_END
#endif
