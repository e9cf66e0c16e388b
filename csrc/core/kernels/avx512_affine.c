/* avx512_affine.c - affine.h for avx512: two limbs and vpdpbusd, as int8 in avx512_qk.c and avx512_pv.c. */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")
#include "lanes_avx512.h"

#include "avx512.h"
#include "avx512_weights.h"

INLINE float sum_of(vf x) { return _mm512_reduce_add_ps(x); }

/* Sum of the integers that stand for q's dims [d, d + n). */
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

INLINE void key_tiles(int NR, int NT, const kvc_affine *x, const kvc_query_form *f, int64_t row0,
                      const float sums[KVC_ROWS][KVC_MAX_GROUPS], const float offset[KVC_ROWS][KVC_MAX_GROUPS],
                      const float *base, int64_t tile0, float *s, int64_t ld)
{
    int64_t dim = x->dim, bytes = KVC_TILE * dim;
    const uint8_t *k = x->words + tile0 * bytes;
    __m512 out[4][4];
    EACH (r, NR)
        EACH (t, NT) out[r][t] = _mm512_set1_ps(base[r]);
    for (int64_t g = 0, j = 0; j < dim; g++) {
        __m512i hi[4][4], lo[4][4];
        EACH (r, NR)
            EACH (t, NT) hi[r][t] = lo[r][t] = _mm512_setzero_si512();
        for (int64_t end = j + x->group; j < end; j += 4)
            EACH (t, NT) {
                const uint8_t *at = k + t * bytes + j * KVC_TILE;
                __m512i w = _mm512_loadu_si512(at);
                if (x->ahead) _mm_prefetch((const char *)at + x->ahead, _MM_HINT_T0);
                EACH (r, NR) {
                    hi[r][t] = _mm512_dpbusd_epi32(hi[r][t], w, kvc_word(f->hi + (row0 + r) * dim + j));
                    lo[r][t] = _mm512_dpbusd_epi32(lo[r][t], w, kvc_word(f->lo + (row0 + r) * dim + j));
                }
            }
        EACH (t, NT) {
            int64_t at = g * x->page_size + (tile0 + t) * KVC_TILE;
            __m512 scale = _mm512_loadu_ps(x->scale + at), middle = _mm512_loadu_ps(x->middle + at);
            EACH (r, NR) {
                __m512i dot = _mm512_add_epi32(_mm512_slli_epi32(hi[r][t], 7), lo[r][t]);
                __m512 y = _mm512_mul_ps(scale, _mm512_set1_ps(f->step[row0 + r]));
                out[r][t] = _mm512_fmadd_ps(middle, _mm512_set1_ps(sums[r][g]), out[r][t]);
                __m512 z = _mm512_sub_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(offset[r][g]));
                out[r][t] = _mm512_fmadd_ps(z, y, out[r][t]);
            }
        }
    }
    EACH (r, NR)
        EACH (t, NT) _mm512_storeu_ps(s + r * ld + (tile0 + t) * KVC_TILE, out[r][t]);
}

/* NC blocks of 16 dims from d0. */
INLINE void value_dims(int NR, int NC, const kvc_affine *x, const weights *w, const float *middle, int64_t n,
                       int64_t d0, bool coarse, float *o)
{
    int64_t dim = x->dim;
    __m512i hi[4][4], lo[4][4];
    EACH (r, NR)
        EACH (c, NC) hi[r][c] = lo[r][c] = _mm512_setzero_si512();
    for (int64_t t = 0; t < n; t += 4)
        EACH (c, NC) {
            const uint8_t *at = x->words + t * dim + (d0 + 16 * c) * 4;
            __m512i v = _mm512_loadu_si512(at);
            if (x->ahead) _mm_prefetch((const char *)at + x->ahead, _MM_HINT_T0);
            EACH (r, NR) {
                if (coarse) { /* weights of 8 bits are the unsigned operand */
                    lo[r][c] = _mm512_dpbusd_epi32(lo[r][c], kvc_word(w->hi[r] + t), v);
                    continue;
                }
                hi[r][c] = _mm512_dpbusd_epi32(hi[r][c], v, kvc_word(w->hi[r] + t));
                lo[r][c] = _mm512_dpbusd_epi32(lo[r][c], v, kvc_word(w->lo[r] + t));
            }
        }
    EACH (r, NR)
        EACH (c, NC) {
            __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(hi[r][c], 7), lo[r][c]);
            float *to = o + r * dim + d0 + 16 * c;
            __m512 y = _mm512_add_ps(_mm512_loadu_ps(to), _mm512_set1_ps(middle[r]));
            __m512 z = _mm512_sub_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(x->centre * (float)w->sum[r]));
            _mm512_storeu_ps(to, _mm512_fmadd_ps(z, _mm512_set1_ps(w->step[r]), y));
        }
}

#define NAME(function) kvc_avx512_##function
#define KVC_LEVEL kvc_kernels_avx512
#define KEY_TILES 4, 4, 2
#define VALUE_BLOCKS 4, 4, 2
#include "affine.h"
#endif
