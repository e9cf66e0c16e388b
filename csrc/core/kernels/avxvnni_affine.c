/* avxvnni_affine.c - affine.h for avxvnni: two limbs and vpdpbusd, as int8 in avxvnni.c. */
#include "levels.h"
#ifdef KVC_HAS_AVXVNNI
#include "target.h"
KVC_TARGET("avx2,fma,f16c")
#define KVC_LIMBS
#include "lanes_avx2.h"

#include "avx2.h"

#include "avxvnni_ints.h"

INLINE float sum_of(vf x) { return kvc_sum(_mm256_add_ps(x.a, x.b)); }
/* For non-negative numbers. */
INLINE float most_of(vf x) { return kvc_grown(_mm256_castps_si256(_mm256_max_ps(x.a, x.b))); }

/* Sum of the integers of q's dims [d, d + n). */
INLINE int32_t group_sum(const kvc_query_form *f, int64_t row, int64_t dim, int64_t d, int64_t n)
{
    if (n == dim) return f->sum[row];
    int32_t sum = 0;
    for (int64_t i = row * dim + d; i < row * dim + d + n; i++) sum += 128 * f->hi[i] + f->lo[i];
    return sum;
}

INLINE void key_tiles(int BITS, int NR, int NT, const kvc_affine *x, const kvc_query_form *f, int64_t row0,
                      const float sums[KVC_ROWS][KVC_MAX_GROUPS], const int32_t offset[KVC_ROWS][KVC_MAX_GROUPS],
                      const float *base, int64_t tile0, float *s, int64_t ld)
{
    int64_t dim = x->dim;
    const uint8_t *k = x->words + tile0 * (KVC_TILE * dim * BITS / 8);
    __m256 out[4][4][2]; /* tokens 0-7, 8-15 */
    EACH (r, NR)
        EACH (t, NT) out[r][t][0] = out[r][t][1] = _mm256_setzero_ps(); /* in units of the row's step */
    for (int64_t g = 0, j = 0; j < dim; g++) {
        __m256i dots[4][4][2];
        int32_t start[4];
        EACH (r, NR) start[r] = offset[r][g];
        kvc_key_dots(BITS, 2, NR, NT, k, dim, j * BITS / 8, (j + x->group) * BITS / 8, f->hi + row0 * dim,
                     f->lo + row0 * dim, start, x->ahead, dots);
        j += x->group;
        EACH (t, NT)
            EACH (h, 2) {
                int64_t at = g * x->page_size + (tile0 + t) * KVC_TILE + 8 * h;
                __m256 scale = _mm256_loadu_ps(x->scale + at), middle = _mm256_loadu_ps(x->middle + at);
                EACH (r, NR) {
                    if (!x->symmetric) out[r][t][h] = _mm256_fmadd_ps(middle, _mm256_set1_ps(sums[r][g]), out[r][t][h]);
                    out[r][t][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r][t][h]), scale, out[r][t][h]);
                }
            }
    }
    EACH (r, NR)
        EACH (t, NT)
            EACH (h, 2)
                _mm256_storeu_ps(
                    s + r * ld + (tile0 + t) * KVC_TILE + 8 * h,
                    _mm256_fmadd_ps(out[r][t][h], _mm256_set1_ps(f->step[row0 + r]), _mm256_set1_ps(base[r])));
}

/* NC blocks of 16 dims from d0. */
INLINE void value_dims(int BITS, bool BYTE, int NR, int NC, const kvc_affine *x, const weights *w, const float *middle,
                       int64_t n, int64_t d0, float *o)
{
    int64_t dim = x->dim;
    __m256i dots[4][4][2];
    (void)BYTE;
    kvc_value_dots(BITS, false, NR, NC, x->words, dim, n, d0, w, x->ahead, dots);
    EACH (r, NR)
        EACH (c, NC)
            EACH (h, 2) {
                float *to = o + r * dim + d0 + 16 * c + 8 * h;
                __m256 y = _mm256_add_ps(_mm256_loadu_ps(to), _mm256_set1_ps(middle[r]));
                __m256i z = _mm256_sub_epi32(dots[r][c][h], _mm256_set1_epi32(kvc_times(x->centre, w->sum[r])));
                _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(z), _mm256_set1_ps(w->step[r]), y));
            }
}

#define PLANES true
#define COARSE false
#define NAME(function) kvc_avxvnni_##function
#define KVC_LEVEL kvc_kernels_avxvnni
#define KEY_TILES 4, 2, 1
#define VALUE_BLOCKS 4, 2, 1
#include "affine.h"
KVC_TARGET_END
#endif
