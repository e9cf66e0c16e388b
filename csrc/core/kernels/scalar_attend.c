/* scalar_attend.c - reference implementation of the attention kernels: decodes each token as the codec does and sums in
 * plain fp32. It shares no shortcuts with the vector levels. */
#ifndef __clang__
#pragma GCC optimize("no-tree-vectorize")
#endif
#include "codec/codec.h"
#include "page.h"
#include "attend_kernels.h"
#include "levels.h"
#include "accumulated.h"

#include <float.h>
#include <math.h>

static void qk(int format, kvc_qk_args args)
{
    int64_t dim = args.query->dim;
    kvc_side side = {format, 1, dim, args.page_size, args.tiles, args.meta};
    float k[KVC_MAX_DIM];
    for (int64_t t = 0; t < args.n_tiles * KVC_TILE; t++) {
        kvc_decode(&side, t, 1, k);
        for (int64_t r = 0; r < args.rows; r++) {
            const float *q = args.query->forms[KVC_PLAIN].q + (args.row0 + r) * dim;
            float sum = 0;
            for (int64_t d = 0; d < dim; d++) sum += q[d] * k[d];
            args.s[r * args.ld + t] = sum;
        }
    }
}

static void pv(int format, kvc_pv_args args)
{
    int64_t dim = args.dim;
    kvc_side side = {format, 0, dim, args.page_size, args.tiles, args.meta};
    float v[KVC_MAX_DIM];
    for (int64_t t = 0; t < args.n; t++) {
        kvc_decode(&side, t, 1, v);
        if (kvc_format_rotated(format) ==
            KVC_DIGITS) /* o is in a transformed space; any o that transforms back to the right result will do */
            for (int64_t d = 0; d < dim / 4; d++) v[d] /= 4 * KVC_FINE;
        else if (kvc_format_rotated(format))
            kvc_kernels_get()->rotate(v, 1, dim);
        for (int64_t r = 0; r < args.rows; r++)
            for (int64_t d = 0; d < dim; d++) args.o[r * dim + d] += args.p[r * args.ld + t] * v[d];
    }
}

static float softmax_row(float *s, int64_t n16, const uint64_t *visible, float softcap, float *m, float *l)
{
    float top = *m > -FLT_MAX ? *m : -FLT_MAX, sum = 0;
    for (int64_t t = 0; t < n16; t++) {
        bool sees = visible[t / 64] >> (t % 64) & 1;
        if (!sees)
            s[t] = -INFINITY;
        else if (softcap > 0)
            s[t] = softcap * tanhf(s[t] / softcap);
        if (s[t] > top) top = s[t];
    }
    for (int64_t t = 0; t < n16; t++) {
        s[t] = expf(s[t] - top);
        sum += s[t];
    }
    float keep = top == *m ? 1 : expf(*m - top);
    *l = *l * keep + sum;
    *m = top;
    return isnan(sum) ? sum : keep;
}

static void softmax(float *s, int64_t ld, int64_t rows, int64_t n16, const uint64_t (*visible)[KVC_WORDS],
                    float softcap, float *m, float *l, float *keep)
{
    for (int64_t r = 0; r < rows; r++) keep[r] = softmax_row(s + r * ld, n16, visible[r], softcap, m + r, l + r);
}

static void factors(float *m, const float *lse, int64_t n)
{
    for (int64_t i = 0; i < n; i++) m[i] = expf(fminf(m[i] - lse[i], 0));
}

#define KVC_FORMAT(ID, name, bits, coding, scale, group, keys, rotated, dim_multiple, about)                           \
    static void qk_##ID(const kvc_qk_args *args) { qk(KVC_##ID, *args); }                                              \
    static void pv_##ID(const kvc_pv_args *args) { pv(KVC_##ID, *args); }
#include "formats.def"
#undef KVC_FORMAT

const kvc_kernels kvc_kernels_scalar = {
    .name = "scalar",
    .encode = kvc_scalar_encode,
    .rotate = kvc_scalar_rotate,
    .limbs = NULL, /* uses q directly */
    .softmax = softmax,
    .factors = factors,
    .keep = kvc_keep,
    .sum_rows = kvc_sum_rows,
#define KVC_FORMAT(ID, name, bits, coding, scale, group, keys, rotated, dim_multiple, about) .qk[KVC_##ID] = qk_##ID,
#include "formats.def"
#undef KVC_FORMAT
#define KVC_FORMAT(ID, name, bits, coding, scale, group, keys, rotated, dim_multiple, about) .pv[KVC_##ID] = pv_##ID,
#include "formats.def"
#undef KVC_FORMAT
};
