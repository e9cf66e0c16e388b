/* avx512_panel.c - a page of latents for many query rows. Codes are unpacked to bytes once per page instead of once per
 * 4 rows, in the layout of the products, which are then bound by vpdpbusd: 64 multiply-adds each, twice that with a
 * second limb.
 *
 *   64 tokens, 512 + 64 dims, per row     vpdpbusd     other instructions, about
 *   scores, two limbs of q (one)          1152 (576)   50, with a centroid 100
 *   sums, coarse weights (two limbs)      512 (1024)   32; sums to memory 130; digits 10 */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")
#include "lanes_avx512.h"
#include "tile_codes.h"

#include "avx512_ints.h"
#include "base/util.h"

/* ---------------------------------------------------------------- packing */

/* Codes as unsigned operands; as_signed: as signed operands, minus their middle (twice that if below 8 bits). */
INLINE __m512i as_unsigned(int KIND, __m512i w)
{
    if (KIND != KVC_LLOYD4) return w;
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)kvc_lloyd4_codes)), w);
}
INLINE __m512i as_signed(int KIND, __m512i w)
{
    if (KIND == 8 || KIND == KVC_LLOYD4) return _mm512_xor_si512(as_unsigned(KIND, w), _mm512_set1_epi8((char)128));
    return _mm512_sub_epi8(_mm512_add_epi8(w, w), _mm512_set1_epi8((char)((1 << KIND) - 1)));
}

INLINE void pack_bytes(int KIND, const kvc_side *side, int64_t n, bool sums, uint8_t *room)
{
    int64_t dim = side->dim, tiles = kvc_ceil_div(n, KVC_TILE), bytes = kvc_tile_bytes(side->format, dim);
    uint32_t room_of_codes[MAX_WORDS];
    for (int64_t tile = 0; tile < tiles; tile++) {
        const uint8_t *from = side->tiles + tile * bytes;
        const uint8_t *codes = from; /* int8 K is already in this layout */
        if (KIND != 8 || !side->key) {
            get_codes(side->key, KIND == KVC_LLOYD4 ? 4 : KIND, dim, from, room_of_codes);
            codes = (const uint8_t *)room_of_codes;
        }
        for (int64_t j = 0; !sums && j < dim / 4; j++)
            i_store(room + (tile * dim / 4 + j) * 64, as_unsigned(KIND, i_load(codes + 64 * j)));
        for (int64_t d = 0; sums && d < dim; d += LANES) {
            int64_t first = d / KVC_PANEL_DIMS * KVC_PANEL_DIMS, width = kvc_min(KVC_PANEL_DIMS, dim - first);
            uint8_t *to = room + first * tiles * KVC_TILE + 4 * (4 * tile * width + d - first);
            vi v[4]; /* v[s]: tokens 4s .. 4s + 3 of 16 dims */
            for (int k = 0; k < 4; k++) v[k] = i_turn(as_signed(KIND, i_load(codes + 64 * (d / 4 + k))));
            i_quarters(v);
            for (int s = 0; s < 4; s++) i_store(to + 4 * s * width, v[s]);
        }
    }
}

bool kvc_avx512_panel_pack(const kvc_side *side, int64_t n, bool sums, uint8_t *room, kvc_panel *to)
{
    kvc_traits f = kvc_format_traits(side->format);
    int64_t tokens = kvc_token_meta_bytes(f, side->key, side->dim, side->page_size);
    *to = (kvc_panel){f.bits, side->dim, room, side->meta, NULL, NULL};
    if (side->key && f.keys == KVC_KEYS_CENTRED) to->centroid = side->meta + tokens;
    switch (side->format) {
    case KVC_INT8:
        if (side->key && !sums)
            to->words = side->tiles;
        else
            pack_bytes(8, side, n, sums, room);
        break;
    case KVC_INT4: pack_bytes(4, side, n, sums, room); break;
    case KVC_INT3: pack_bytes(3, side, n, sums, room); break;
    case KVC_INT2: pack_bytes(2, side, n, sums, room); break;
    case KVC_INT4_LLOYD:
        to->kind = KVC_LLOYD4;
        pack_bytes(KVC_LLOYD4, side, n, sums, room);
        break;
    default: return false;
    }
    return true;
}

/* ---------------------------------------------------------------- scores */

INLINE void score_tiles(int KIND, int LIMBS, int NR, int NT, const kvc_panel *k, const kvc_query_form *f, int64_t row0,
                        int64_t tile0, const float *centre, bool add, float *s, int64_t ld)
{
    const int8_t *hi = (LIMBS == 2 ? f->hi : f->one) + row0 * k->dim, *lo = f->lo + row0 * k->dim;
    const int32_t *sum = (LIMBS == 2 ? f->sum : f->one_sum) + row0;
    __m512i dots[4][4];
    kvc_key_dots(8, LIMBS, NR, NT, k->words + tile0 * KVC_TILE * k->dim, k->dim, 0, k->dim, hi, lo, NULL, 0, dots);
    EACH (t, NT) {
        __m512 scale = kvc_scales(k->scale, (tile0 + t) * KVC_TILE);
        EACH (r, NR) {
            float *to = s + r * ld + (tile0 + t) * KVC_TILE;
            __m512 x = kvc_mid_score(KIND, LIMBS, dots[r][t], scale, f->step[row0 + r], sum[r], centre[r]);
            _mm512_storeu_ps(to, add ? _mm512_add_ps(x, _mm512_loadu_ps(to)) : x);
        }
    }
}

/* Tiles are the outer loop, so that a tile stays in L1 for all rows. */
INLINE void score_rows(int KIND, int LIMBS, const kvc_panel *k, const kvc_query *query, int64_t row0, int64_t rows,
                       int64_t n_tiles, bool add, const float *centre, float *s, int64_t ld)
{
    const kvc_query_form *f = query->form;
    const int NT = LIMBS == 2 ? 2 : 4;
    for (int64_t at = 0; at < n_tiles;) {
        bool many = at + NT <= n_tiles;
        for (int64_t r = 0; r < rows; r += KVC_ROWS) {
#define CALL(NR, NT) score_tiles(KIND, LIMBS, NR, NT, k, f, row0 + r, at, centre + r, add, s + r * ld, ld)
            switch (4 * many + kvc_min(KVC_ROWS, rows - r)) {
            case 1: CALL(1, 1); break;
            case 2: CALL(2, 1); break;
            case 3: CALL(3, 1); break;
            case 4: CALL(4, 1); break;
            case 5: CALL(1, NT); break;
            case 6: CALL(2, NT); break;
            case 7: CALL(3, NT); break;
            default: CALL(4, NT);
            }
#undef CALL
        }
        at += many ? NT : 1;
    }
}

INLINE void scores(int KIND, const kvc_panel *k, const kvc_query *query, int64_t row0, int64_t rows, int64_t n_tiles,
                   bool add, float *s, int64_t ld)
{
    float centre[KVC_WIDE] = {0};
    for (int64_t r = 0; k->centroid && r < rows; r += KVC_ROWS) {
        float some[KVC_ROWS];
        int64_t n = kvc_min(KVC_ROWS, rows - r);
        if (n == KVC_ROWS) {
            kvc_dot_centroid(4, k->centroid, query, row0 + r, some);
            memcpy(centre + r, some, sizeof some);
            continue;
        }
        for (int64_t i = 0; i < n; i++) {
            kvc_dot_centroid(1, k->centroid, query, row0 + r + i, some);
            centre[r + i] = some[0];
        }
    }
    if (KIND != 8 && kvc_one_limb(KIND, 2 * KVC_NOISE, k->scale, query, row0, rows, n_tiles))
        score_rows(KIND, 1, k, query, row0, rows, n_tiles, add, centre, s, ld);
    else
        score_rows(KIND, 2, k, query, row0, rows, n_tiles, add, centre, s, ld);
}

void kvc_avx512_panel_qk(const kvc_panel *k, const kvc_query *query, int64_t row0, int64_t rows, int64_t n_tiles,
                         bool add, float *s, int64_t ld)
{
    switch (k->kind) {
    case 8: scores(8, k, query, row0, rows, n_tiles, add, s, ld); break;
    case 4: scores(4, k, query, row0, rows, n_tiles, add, s, ld); break;
    case 3: scores(3, k, query, row0, rows, n_tiles, add, s, ld); break;
    case 2: scores(2, k, query, row0, rows, n_tiles, add, s, ld); break;
    default: scores(KVC_LLOYD4, k, query, row0, rows, n_tiles, add, s, ld);
    }
}

/* ---------------------------------------------------------------- sums */

/* Weights of `part` consecutive tokens share a step, relative to the largest of them. For int8 codes with 8-bit weights
 * a part has 32 tokens: rounding n weights to steps of most / 255 adds n * (most / 255)^2 * c^2 / 12 to the variance of
 * the sums, while the rounding of the codes contributes the sum of the squared weights / 12. c, the deviation of the
 * codes, is 127 / 3.4 for a row of 512 Gaussian numbers. If one token has all the weight, the ratio is 0.7 for 32
 * tokens and 1.4 for 64; it decreases as more tokens share the weight. For 4-bit codes c is 3. */
enum { PART = 32 };
typedef struct digits {
    _Alignas(64) uint8_t hi[KVC_WIDE][KVC_MAX_PAGE], lo[KVC_WIDE][KVC_MAX_PAGE];
    float step[KVC_MAX_PAGE / PART][KVC_WIDE], all[KVC_WIDE]; /* all: the sum of a row's weights */
    int64_t part;
} digits;

/* Inputs of the sums, each pointing to the first row. */
typedef struct weighed {
    const uint8_t *hi, *lo;
    const float *step, *keep, *all; /* keep: NULL if the rows have no contribution yet */
    int64_t n, part;
} weighed;

/* Sums over NC blocks of 16 dims of a block of `width`, from `words` on. They stay in registers for all parts; int8
 * would otherwise access memory twice. All loops are unrolled, because gcc would otherwise keep the sums on the
 * stack. */
#define CELLS                                                                                                          \
    KVC_UNROLL                                                                                                         \
    EACH (r, NR) KVC_UNROLL                                                                                            \
    EACH (c, NC)
INLINE void sum_dims(bool COARSE, int NR, int NC, const uint8_t *words, int64_t width, const weighed *w,
                     const float *mean, float *const *o)
{
    const uint8_t *hi = w->hi, *lo = w->lo;
    const float *step = w->step;
    __m512 sum[4][4];
    if (w->keep)
        CELLS sum[r][c] = _mm512_mul_ps(_mm512_set1_ps(w->keep[r]), _mm512_loadu_ps(o[r] + 16 * c));
    else
        CELLS sum[r][c] = _mm512_setzero_ps();
    if (mean) CELLS sum[r][c] = _mm512_fmadd_ps(_mm512_set1_ps(w->all[r]), _mm512_loadu_ps(mean + 16 * c), sum[r][c]);
    for (int64_t left = w->n; left > 0; left -= w->part, step += KVC_WIDE) {
        __m512i dot[4][4], low[4][4];
        CELLS dot[r][c] = low[r][c] = _mm512_setzero_si512();
        for (int64_t t = kvc_min(w->part, left); t > 0; t -= 4, words += 4 * width, hi += 4, lo += 4) {
            __m512i v[4];
            KVC_UNROLL
            EACH (c, NC) v[c] = _mm512_loadu_si512(words + 64 * c);
            CELLS
            {
                dot[r][c] = kvc_dp(dot[r][c], kvc_word(hi + r * KVC_MAX_PAGE), v[c]);
                if (!COARSE) low[r][c] = kvc_dp(low[r][c], kvc_word(lo + r * KVC_MAX_PAGE), v[c]);
            }
        }
        CELLS
        {
            if (!COARSE) dot[r][c] = _mm512_add_epi32(_mm512_slli_epi32(dot[r][c], 7), low[r][c]);
            sum[r][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][c]), _mm512_set1_ps(step[r]), sum[r][c]);
        }
    }
    CELLS _mm512_storeu_ps(o[r] + 16 * c, sum[r][c]);
}

/* Sums of KVC_ROWS rows for a block of KVC_PANEL_DIMS. Separate functions with opaque pointers: if gcc computes the
 * pointers from one row, it runs out of registers, and moves from xmm registers delay the products. */
#define OPAQUE(x) __asm__("" : "+r"(x))
INLINE void sum_block(bool COARSE, const uint8_t *words, const weighed *w, const float *mean, int64_t dim, float *o)
{
    const int NC = 2;
    float *to[4] = {o, o + dim, o + 2 * dim, o + 3 * dim};
    for (int64_t d = 0; d < KVC_PANEL_DIMS; d += 16 * NC) {
        KVC_UNROLL
        EACH (r, 4) OPAQUE(to[r]);
        sum_dims(COARSE, KVC_ROWS, NC, words + 4 * d, KVC_PANEL_DIMS, w, mean ? mean + d : NULL, to);
        KVC_UNROLL
        EACH (r, 4) to[r] += 16 * NC;
    }
}
static __attribute__((noinline)) void sum_coarse(const uint8_t *words, const weighed *w, const float *mean, int64_t dim,
                                                 float *o)
{
    sum_block(true, words, w, mean, dim, o);
}
static __attribute__((noinline)) void sum_fine(const uint8_t *words, const weighed *w, const float *mean, int64_t dim,
                                               float *o)
{
    sum_block(false, words, w, mean, dim, o);
}

/* The same for fewer rows and dims. */
INLINE void sum_rest(bool COARSE, int64_t rows, int64_t width, const uint8_t *words, const weighed *w,
                     const float *mean, int64_t dim, float *o)
{
    float *to[4] = {o, o + dim, o + 2 * dim, o + 3 * dim};
    for (int64_t d = 0; d < width; d += 16, words += 64, mean += mean ? 16 : 0) {
        switch (rows) {
        case 1: sum_dims(COARSE, 1, 1, words, width, w, mean, to); break;
        case 2: sum_dims(COARSE, 2, 1, words, width, w, mean, to); break;
        case 3: sum_dims(COARSE, 3, 1, words, width, w, mean, to); break;
        default: sum_dims(COARSE, 4, 1, words, width, w, mean, to);
        }
        EACH (r, 4) to[r] += 16;
    }
}

/* Digits of rows [r, r + some), and their sums if there is a mean. */
INLINE void weigh_panel(const kvc_panel *v, const float *p, int64_t ld, int64_t r, int64_t some, int64_t n, bool coarse,
                        digits *w)
{
    int32_t sums[KVC_ROWS];
    for (int64_t t = 0; t < n; t += w->part) {
        digits_of to = {w->hi[r] + t, w->lo[r] + t, KVC_MAX_PAGE, w->step[t / PART] + r, sums};
        if (some == KVC_ROWS && w->part == PART && t + 2 * PART <= n) {
            weigh_page(2, p + r * ld + t, ld, v->scale + 2 * t, true, to, w->step[t / PART + 1] + r);
            t += PART;
        } else {
            weigh(p + r * ld + t, ld, some, v->scale + 2 * t, kvc_min(w->part, n - t), coarse, to);
        }
    }
    for (int64_t i = r; i < r + some; i++) {
        __m512 all = _mm512_setzero_ps();
        for (int64_t t = 0; t < n; t += w->part) w->step[t / PART][i] *= kvc_middle_unit(v->kind);
        for (int64_t t = 0; v->mean && t < n; t += KVC_TILE) all = _mm512_add_ps(all, _mm512_loadu_ps(p + i * ld + t));
        w->all[i] = v->mean ? _mm512_reduce_add_ps(all) : 0;
    }
}

void kvc_avx512_panel_pv(const kvc_panel *v, const float *p, int64_t ld, int64_t rows, int64_t n, bool coarse,
                         const float *keep, float *o)
{
    int64_t n16 = kvc_ceil_div(n, KVC_TILE) * KVC_TILE;
    digits w; /* 8 KiB, deliberately not initialized */
    w.part = coarse && v->kind == 8 ? PART : n16;
    for (int64_t r = 0; r < rows; r += KVC_ROWS) weigh_panel(v, p, ld, r, kvc_min(KVC_ROWS, rows - r), n, coarse, &w);
    for (int64_t first = 0; first < v->dim; first += KVC_PANEL_DIMS) {
        int64_t width = kvc_min(KVC_PANEL_DIMS, v->dim - first);
        const uint8_t *words = v->words + first * n16;
        const float *mean = v->mean ? v->mean + first : NULL;
        for (int64_t r = 0; r < rows; r += KVC_ROWS) {
            weighed x = {w.hi[r], w.lo[r], w.step[0] + r, keep ? keep + r : NULL, w.all + r, n16, w.part};
            float *to = o + r * v->dim + first;
            if (rows - r >= KVC_ROWS && width == KVC_PANEL_DIMS)
                (coarse ? sum_coarse : sum_fine)(words, &x, mean, v->dim, to);
            else if (coarse)
                sum_rest(true, rows - r, width, words, &x, mean, v->dim, to);
            else
                sum_rest(false, rows - r, width, words, &x, mean, v->dim, to);
        }
    }
}

const kvc_panel_kernels kvc_avx512_panel = {kvc_avx512_panel_pack, kvc_avx512_panel_qk, kvc_avx512_panel_pv};
KVC_TARGET_END
#endif
