/* avx512_affine.c - affine.h for avx512: two limbs and vpdpbusd, as int8 in avx512_qk.c and avx512_pv.c. */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")
#include "lanes_avx512.h"

#include "avx512_weights.h"

#include "avx512_ints.h"

INLINE float sum_of(vf x) { return _mm512_reduce_add_ps(x); }
INLINE float most_of(vf x) { return _mm512_reduce_max_ps(x); }

/* Sum of the integers of q's dims [d, d + n). */
INLINE int32_t group_sum(const kvc_query_form *f, int64_t row, int64_t dim, int64_t d, int64_t n)
{
    if (n == dim) return f->sum[row];
    const __m128i one = _mm_set1_epi8(1);
    __m128i hi = _mm_setzero_si128(), lo = hi;
    for (int64_t i = row * dim + d; i < row * dim + d + n; i += 16) {
        hi = _mm_dpbusd_epi32(hi, one, _mm_loadu_si128((const __m128i *)(f->hi + i)));
        lo = _mm_dpbusd_epi32(lo, one, _mm_loadu_si128((const __m128i *)(f->lo + i)));
    }
    __m128i x = _mm_add_epi32(_mm_slli_epi32(hi, 7), lo);
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}

INLINE void key_tiles(int BITS, int NR, int NT, const kvc_affine *x, const kvc_query_form *f, int64_t row0,
                      const float sums[KVC_ROWS][KVC_MAX_GROUPS], const int32_t offset[KVC_ROWS][KVC_MAX_GROUPS],
                      const float *base, int64_t tile0, float *s, int64_t ld)
{
    int64_t dim = x->dim, bytes = KVC_TILE * dim * BITS / 8;
    const uint8_t *k = x->words + tile0 * bytes;
    __m512 out[4][4];
    EACH (r, NR)
        EACH (t, NT) out[r][t] = _mm512_setzero_ps(); /* in units of the row's step */
    for (int64_t g = 0, j = 0; j < dim; g++) {
        __m512i dots[4][4];
        int32_t start[4];
        EACH (r, NR) start[r] = offset[r][g];
        kvc_key_dots(BITS, 2, NR, NT, k, dim, j * BITS / 8, (j + x->group) * BITS / 8, f->hi + row0 * dim,
                     f->lo + row0 * dim, start, x->ahead, dots);
        j += x->group;
        EACH (t, NT) {
            int64_t at = g * x->page_size + (tile0 + t) * KVC_TILE;
            __m512 scale = _mm512_loadu_ps(x->scale + at), middle = _mm512_loadu_ps(x->middle + at);
            EACH (r, NR) {
                if (!x->symmetric) out[r][t] = _mm512_fmadd_ps(middle, _mm512_set1_ps(sums[r][g]), out[r][t]);
                out[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][t]), scale, out[r][t]);
            }
        }
    }
    EACH (r, NR)
        EACH (t, NT)
            _mm512_storeu_ps(s + r * ld + (tile0 + t) * KVC_TILE,
                             _mm512_fmadd_ps(out[r][t], _mm512_set1_ps(f->step[row0 + r]), _mm512_set1_ps(base[r])));
}

/* NC blocks of 16 dims from d0. */
INLINE void value_dims(int BITS, bool BYTE, int NR, int NC, const kvc_affine *x, const weights *w, const float *middle,
                       int64_t n, int64_t d0, float *o)
{
    int64_t dim = x->dim;
    __m512i dots[4][4];
    kvc_value_dots(BITS, BYTE, NR, NC, x->words, dim, n, d0, w, x->ahead, dots);
    EACH (r, NR)
        EACH (c, NC) {
            float *to = o + r * dim + d0 + 16 * c;
            __m512 y = _mm512_add_ps(_mm512_loadu_ps(to), _mm512_set1_ps(middle[r]));
            __m512i z = _mm512_sub_epi32(dots[r][c], _mm512_set1_epi32(kvc_times(x->centre, w->sum[r])));
            _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(z), _mm512_set1_ps(w->step[r]), y));
        }
}

#define PLANES true
#define COARSE true
#define NAME(function) kvc_avx512_##function
#include "levels.h"
#define KVC_LEVEL kvc_kernels_avx512
#define KEY_TILES 4, 4, 2
#define VALUE_BLOCKS 4, 4, 2
#include "affine.h"
KVC_TARGET_END
#endif
