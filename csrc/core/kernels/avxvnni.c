/* avxvnni.c - the avxvnni level: avx2, with vpdpbusd for integer codes (Alder Lake and later, without AVX-512). Integer
 * sums are exact, so scores equal those of every level. Instructions per 32 bytes of K or V and row, plus those shared
 * by the rows (in parentheses: avx2):
 *    int8       2 vpdpbusd, 1 vpbroadcastd (4, 2 + 2)
 *    int4       4, 2 + 6 (8, 2 + 7); one limb 2, 1 + 3 (5 + 3)
 *    int2       8, 4 + 14 (16, 4 + 15); one limb 4, 2 + 7 (9 + 7)
 *    int4_lloyd as int4, and 2 vpshufb shared per pass
 *    int3       as int2 + 40, and 32 bytes more per 64 */
#include "levels.h"
#ifdef KVC_HAS_AVXVNNI
#include "target.h"
KVC_TARGET("avx2,fma,f16c")
#define KVC_LIMBS
#include "avx2_scores.h"

#include "avxvnni_ints.h"

#include "accumulated.h"

/* ---------------------------------------------------------------- K: NT tiles */

INLINE void rows_of(int NR, __m256i dots[4][4][2], int t, __m256i sum[4][2])
{
    EACH (r, NR)
        EACH (h, 2) sum[r][h] = dots[r][t][h];
}

INLINE void key_tiles(int KIND, int LIMBS, int NR, int NT, const kvc_qk_args *args, int64_t tile0, const float *centre)
{
    const kvc_query_form *f = args->query->form;
    int64_t dim = args->query->dim, row0 = args->row0;
    const int8_t *hi = (LIMBS == 2 ? f->hi : f->one) + row0 * dim;
    const int32_t *q_sum = (LIMBS == 2 ? f->sum : f->one_sum) + row0;
    __m256i dots[4][4][2], sum[4][2];
    kvc_key_dots(KIND, LIMBS, NR, NT, args->tiles + tile0 * kvc_kind_bytes(KIND, dim), dim, 0,
                 dim * kvc_plane_bits(KIND) / 8, hi, f->lo + row0 * dim, NULL, args->ahead, dots);
    EACH (t, NT) {
        rows_of(NR, dots, t, sum);
        if (KIND == 8)
            int8_scores(NR, sum, args, tile0 + t);
        else
            mid_scores(KIND, NR, sum, args->meta, q_sum, f->step + row0, LIMBS == 2 ? 1 : 128, tile0 + t, centre,
                       args->s, args->ld);
    }
}

INLINE void qk(int KIND, const kvc_qk_args *args)
{
    float centre[KVC_ROWS];
    if (KIND != 8) dot_centroid(args->meta + 2 * args->page_size, args->query, args->row0, args->rows, centre);
    if (KIND != 8 && one_limb(KIND, args->meta, args->query, args->row0, args->rows, args->n_tiles)) {
#define CALL(NR, N) key_tiles(KIND, 1, NR, N, args, at, centre)
        KVC_BY_ROWS(CALL, args->rows, args->n_tiles, 1, 4, 2, 1)
#undef CALL
        return;
    }
#define CALL(NR, N) key_tiles(KIND, 2, NR, N, args, at, centre)
    KVC_BY_ROWS(CALL, args->rows, args->n_tiles, 1, 4, 2, 1)
#undef CALL
}

/* ---------------------------------------------------------------- V: NC blocks of 16 dims from d0 */

INLINE void value_dims(int KIND, bool COARSE, int NR, int NC, const kvc_pv_args *args, const weights *w, int64_t d0)
{
    __m256i dots[4][4][2], sum[4][2];
    kvc_value_dots(KIND, COARSE, NR, NC, args->tiles, args->dim, args->n, d0, w, args->ahead, dots);
    EACH (c, NC) {
        rows_of(NR, dots, c, sum);
        add_codes(KIND, NR, sum, w, args->dim, d0 + 16 * c, args->o);
    }
}

INLINE void pv(int KIND, const kvc_pv_args *args)
{
    weights w;
    bool coarse = KIND != 8 && args->digits == KVC_P_BYTE;
    to_integers(&w, args->p, args->ld, args->rows, args->meta, args->n, coarse ? 255 : KVC_P_LIMIT);
    if (coarse) {
        if (KIND == KVC_LLOYD4) memset(w.sum, 0, sizeof w.sum); /* levels are signed here */
#define CALL(NR, N) value_dims(KIND, KIND != 8, NR, N, args, &w, at)
        KVC_BY_ROWS(CALL, args->rows, args->dim, 16, 4, 2, 1)
#undef CALL
        return;
    }
#define CALL(NR, N) value_dims(KIND, false, NR, N, args, &w, at)
    KVC_BY_ROWS(CALL, args->rows, args->dim, 16, 4, 2, 1)
#undef CALL
}

#define ENTRY_POINTS(name, KIND)                                                                                       \
    void kvc_avxvnni_qk_##name(const kvc_qk_args *args) { qk(KIND, args); }                                            \
    void kvc_avxvnni_pv_##name(const kvc_pv_args *args) { pv(KIND, args); }
ENTRY_POINTS(int8, 8)
ENTRY_POINTS(int4, 4)
ENTRY_POINTS(int4_lloyd, KVC_LLOYD4)
ENTRY_POINTS(int3, 3)
ENTRY_POINTS(int2, 2)

/* ---------------------------------------------------------------- q */

static void limbs(const kvc_query_form *form, int64_t rows, int64_t dim) { kvc_limbs(false, form, rows, dim); }

const kvc_kernels kvc_kernels_avxvnni = {.name = "avxvnni",
                                         .encode = kvc_avx2_encode,
                                         .rotate = kvc_avx2_rotate,
                                         .limbs = limbs,
                                         .softmax = kvc_avx2_softmax,
                                         .factors = kvc_avx2_factors,
                                         .keep = kvc_keep,
                                         .sum_rows = kvc_sum_rows,
                                         .affine = kvc_avxvnni_affine,
                                         .qk_affine = kvc_avxvnni_qk_affine,
                                         .pv_affine = kvc_avxvnni_pv_affine,
                                         .tile = &kvc_avx2_tile,
                                         KVC_FLOAT_KERNELS(KVC_ENTRY, avx2) KVC_BF16_KERNELS(KVC_ENTRY, avx2)
                                             KVC_INT_KERNELS(KVC_ENTRY, avxvnni)};
KVC_TARGET_END
#endif
