/* avx512.c - the avx512 level: its table, online softmax, limbs of q. Requires F, BW, VL, DQ, VNNI. */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")
#include "base/floats.h"
#include "avx512.h"
#include "levels.h"
#include "accumulated.h"

#include <float.h>
#include <math.h>

/* exp(x) for x up to KVC_SLACK (and -inf, NaN), as 2^floor(y) * 2^f. Relative error < 3e-7 + 6e-8 * |x|; of 2^f alone
 * 1e-7 (degree 5, minimax with 2^0 = 1). */
INLINE __m512 exp_ps(__m512 x)
{
    __m512 y = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    __m512 f = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* y - floor(y); 0 for -inf */
    __m512 p = _mm512_set1_ps(.00186713005f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(.00901703071f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(.0557999127f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(.240164444f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(.693151295f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1));
    return _mm512_scalef_ps(p, y); /* p * 2^floor(y) */
}

/* tanh(x) = sign(x) * (1 - e) / (1 + e), e = exp(-2 |x|); near 0, where that cancels, an odd polynomial. */
INLINE __m512 tanh_ps(__m512 x)
{
    __m512 a = _mm512_abs_ps(x), square = _mm512_mul_ps(x, x);
    __m512 e = exp_ps(_mm512_mul_ps(a, _mm512_set1_ps(-2)));
    __m512 far = _mm512_div_ps(_mm512_sub_ps(_mm512_set1_ps(1), e), _mm512_add_ps(_mm512_set1_ps(1), e));
    far = _mm512_or_ps(far, _mm512_and_ps(x, _mm512_set1_ps(-0.f)));
    __m512 near = _mm512_fmadd_ps(square, _mm512_set1_ps(-17.f / 315), _mm512_set1_ps(2.f / 15));
    near = _mm512_fmadd_ps(square, near, _mm512_set1_ps(-1.f / 3));
    near = _mm512_fmadd_ps(_mm512_mul_ps(square, near), x, x);
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, _mm512_set1_ps(.15f), _CMP_LT_OQ), far, near);
}

INLINE __mmask16 mask_of(const uint64_t *visible, int64_t t) { return (__mmask16)(visible[t / 64] >> (t % 64)); }

/* The rows are interleaved so that their dependency chains overlap and one reduction serves all. */
INLINE void softmax_rows(int NR, bool ALL, float *s, int64_t ld, int64_t n16, const uint64_t (*visible)[KVC_WORDS],
                         float softcap, float *m, float *l, float *keep)
{
    const __m512 none = _mm512_set1_ps(-INFINITY);
    __m512 most[4] = {none, none, none, none}, sum[4];
    float tops[4];
    for (int64_t t = 0; t < n16; t += 16)
        EACH (r, NR) {
            __mmask16 mask = ALL ? 0xffff : mask_of(visible[r], t);
            __m512 x = ALL ? _mm512_loadu_ps(s + r * ld + t) : _mm512_mask_loadu_ps(none, mask, s + r * ld + t);
            if (softcap > 0) {
                __m512 y = tanh_ps(_mm512_div_ps(x, _mm512_set1_ps(softcap)));
                x = _mm512_mask_mul_ps(x, mask, y, _mm512_set1_ps(softcap));
                _mm512_storeu_ps(s + r * ld + t, x);
            }
            most[r] = _mm512_max_ps(x, most[r]); /* ignores NaN */
        }
    __mmask8 rows = (__mmask8)((1 << NR) - 1);
    __m128 top, total, old = NR == 4 ? _mm_loadu_ps(m) : _mm_maskz_loadu_ps(rows, m);
    KVC_JOIN_LANES(_mm256_max_ps, _mm_max_ps, most, top);
    top = _mm_max_ps(top, _mm_set1_ps(-FLT_MAX)); /* avoids -inf - -inf, which is NaN */
    top = _mm_mask_mov_ps(old, _mm_cmp_ps_mask(top, _mm_add_ps(old, _mm_set1_ps(KVC_SLACK)), _CMP_GT_OQ), top);
    _mm_storeu_ps(tops, top);
    EACH (r, 4) sum[r] = _mm512_setzero_ps();
    for (int64_t t = 0; t < n16; t += 16)
        EACH (r, NR) {
            __m512 x = _mm512_sub_ps(_mm512_loadu_ps(s + r * ld + t), _mm512_set1_ps(tops[r]));
            x = ALL ? exp_ps(x) : _mm512_maskz_mov_ps(mask_of(visible[r], t), exp_ps(x));
            _mm512_storeu_ps(s + r * ld + t, x);
            sum[r] = _mm512_add_ps(sum[r], x);
        }
    KVC_JOIN_LANES(_mm256_add_ps, _mm_add_ps, sum, total);
    __m128 factor = _mm512_castps512_ps128(exp_ps(_mm512_castps128_ps512(_mm_sub_ps(old, top))));
    __m128 sums = NR == 4 ? _mm_loadu_ps(l) : _mm_maskz_loadu_ps(rows, l);
    sums = _mm_add_ps(_mm_mul_ps(sums, factor), total);
    __mmask8 nan = _mm_cmp_ps_mask(total, total, _CMP_UNORD_Q);
    factor = _mm_mask_mov_ps(factor, nan, total);
    if (NR == 4) { /* loads after a masked store cannot use store forwarding */
        _mm_storeu_ps(l, sums);
        _mm_storeu_ps(m, top);
        _mm_storeu_ps(keep, factor);
        return;
    }
    _mm_mask_storeu_ps(l, rows, sums);
    _mm_mask_storeu_ps(m, rows, top);
    _mm_mask_storeu_ps(keep, rows, factor);
}

/* Fast path for a full page and four rows, if no row's m changes: it need not wait for the page's largest scores.
 * Returns false if one does. */
INLINE bool softmax_page(float *s, int64_t ld, const float *m, float *l, float *keep)
{
    __m512 sum[4];
    __m128 total;
    __mmask16 over = 0;
    EACH (r, 4) {
        const float *x = s + r * ld;
        __m512 a = _mm512_max_ps(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16));
        __m512 b = _mm512_max_ps(_mm512_loadu_ps(x + 32), _mm512_loadu_ps(x + 48));
        over |= _mm512_cmp_ps_mask(_mm512_max_ps(a, b), _mm512_set1_ps(m[r] + KVC_SLACK), _CMP_GT_OQ);
    }
    over |= _mm_cmp_ps_mask(_mm_loadu_ps(m), _mm_set1_ps(-FLT_MAX), _CMP_LT_OQ); /* also -inf */
    if (over) return false;
    EACH (r, 4) {
        __m512 top = _mm512_set1_ps(m[r]), p[4];
        EACH (t, 4) {
            p[t] = exp_ps(_mm512_sub_ps(_mm512_loadu_ps(s + r * ld + 16 * t), top));
            _mm512_storeu_ps(s + r * ld + 16 * t, p[t]);
        }
        sum[r] = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(p[0], p[1]), p[2]), p[3]);
    }
    KVC_JOIN_LANES(_mm256_add_ps, _mm_add_ps, sum, total);
    _mm_storeu_ps(l, _mm_add_ps(_mm_loadu_ps(l), total));
    _mm_storeu_ps(keep, _mm_mask_mov_ps(_mm_set1_ps(1), _mm_cmp_ps_mask(total, total, _CMP_UNORD_Q), total));
    return true;
}

void kvc_avx512_softmax(float *s, int64_t ld, int64_t rows, int64_t n16, const uint64_t (*visible)[KVC_WORDS],
                        float softcap, float *m, float *l, float *keep)
{
    uint64_t all = ~0ull;
    for (int64_t r = 0; r < rows && n16 == 64; r++) all &= visible[r][0];
    if (rows == 4 && n16 == 64 && all == ~0ull && !(softcap > 0)) { /* a full page at decode */
        if (!softmax_page(s, ld, m, l, keep)) softmax_rows(4, true, s, ld, 64, visible, 0, m, l, keep);
        return;
    }
    switch (rows) {
    case 1: softmax_rows(1, false, s, ld, n16, visible, softcap, m, l, keep); break;
    case 2: softmax_rows(2, false, s, ld, n16, visible, softcap, m, l, keep); break;
    case 3: softmax_rows(3, false, s, ld, n16, visible, softcap, m, l, keep); break;
    default: softmax_rows(4, false, s, ld, n16, visible, softcap, m, l, keep);
    }
}

void kvc_avx512_factors(float *m, const float *lse, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 some = (__mmask16)(n - i >= 16 ? 0xffffu : (1u << (n - i)) - 1);
        __m512 x = _mm512_sub_ps(_mm512_maskz_loadu_ps(some, m + i), _mm512_maskz_loadu_ps(some, lse + i));
        _mm512_mask_storeu_ps(m + i, some, exp_ps(_mm512_min_ps(x, _mm512_setzero_ps())));
    }
}

void kvc_avx512_limbs(const kvc_query_form *form, int64_t rows, int64_t dim)
{
    for (int64_t r = 0; r < rows; r++) {
        const float *q = form->q + r * dim;
        __m512i most = _mm512_setzero_si512(), total = most, ones = most; /* compared as integers: NaN > Inf > finite */
        for (int64_t d = 0; d < dim; d += 16)
            most = _mm512_max_epu32(most, _mm512_castps_si512(_mm512_abs_ps(_mm512_loadu_ps(q + d))));
        float top = kvc_f32_of_bits(_mm512_reduce_max_epu32(most)), factor = top > KVC_TINY ? KVC_P_LIMIT / top : 0;
        if (!(top < INFINITY)) {
            memset(form->hi + r * dim, 0, (size_t)dim);
            memset(form->lo + r * dim, 0, (size_t)dim);
            if (form->one) memset(form->one + r * dim, 0, (size_t)dim);
            form->step[r] = NAN;
            form->sum[r] = 0;
            if (form->one) form->one_sum[r] = 0;
            continue;
        }
        for (int64_t d = 0; d < dim; d += 16) {
            __m512i z = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(q + d), _mm512_set1_ps(factor)));
            total = _mm512_add_epi32(total, z);
            _mm_storeu_si128((__m128i *)(form->hi + r * dim + d), _mm512_cvtepi32_epi8(_mm512_srai_epi32(z, 7)));
            _mm_storeu_si128((__m128i *)(form->lo + r * dim + d),
                             _mm512_cvtepi32_epi8(_mm512_and_si512(z, _mm512_set1_epi32(127))));
            __m512i one = _mm512_srai_epi32(_mm512_add_epi32(z, _mm512_set1_epi32(64)), 7);
            ones = _mm512_add_epi32(ones, one);
            if (form->one) _mm_storeu_si128((__m128i *)(form->one + r * dim + d), _mm512_cvtepi32_epi8(one));
        }
        if (form->one) form->one_sum[r] = _mm512_reduce_add_epi32(ones);
        form->step[r] = top / KVC_P_LIMIT;
        form->sum[r] = _mm512_reduce_add_epi32(total);
    }
}

const kvc_kernels kvc_kernels_avx512 = {.name = "avx512", KVC_AVX512_TABLE, KVC_OWN_KERNELS(KVC_ENTRY, avx512)};
KVC_TARGET_END
#endif
