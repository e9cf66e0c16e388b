/* avx512_panel.c - a page of latents against many query rows: codes become bytes once a page, not once for 4 rows, and lie as
 * they are multiplied. Products are bound by vpdpbusd then: 64 multiply-adds each, twice where a limb has a second.
 *
 *   64 tokens, 512 + 64 dims, per row     vpdpbusd     the rest, about
 *   scores, two limbs of q (one)          1152 (576)   50, with a centroid 100
 *   sums, coarse weights (two limbs)      512 (1024)   32 sums to memory: 130; digits 10 */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")
#include "lanes_avx512.h"
#include "tile_codes.h"

#include "avx512_ints.h"
#include "base/util.h"

/* ---------------------------------------------------------------- packing */

/* Codes as the unsigned operand; as the signed one, less their middle (twice that of fewer bits). */
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
        const uint8_t *codes = from; /* K's bytes lie so */
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

/* Tiles outside, so that those at hand stay in L1 for all rows. */
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

/* Weights of `part` tokens have a step, relative to the largest of them. Bytes have 32 to a part where 8 bits do: rounding
 * n weights to steps of most / 255 adds n * (most / 255)^2 * c^2 / 12 to the variance of the sums, what the codes' own rounding
 * gives them is the weights' squares / 12, and c, the codes' deviation, is 127 / 3.4 in a row of 512 Gaussian numbers: with
 * one token that has all the weight 0.7 of it for 32, 1.4 for 64, less the more tokens share it. Of 4 bits c is 3. */
enum { PART = 32 };
typedef struct digits {
    _Alignas(64) uint8_t hi[KVC_WIDE][KVC_MAX_PAGE], lo[KVC_WIDE][KVC_MAX_PAGE];
    float step[KVC_MAX_PAGE / PART][KVC_WIDE], all[KVC_WIDE]; /* all: the sum of a row's weights */
    const float *keep;
    int64_t n, part;
} digits;

/* Adds a part's dots to sums, whose first part brings `keep` and the mean. Unrolled, or else gcc has `dot` in memory. */
INLINE void add_sums(bool FIRST, int NR, int NC, __m512i dot[4][4], const digits *w, int64_t part, int64_t row0,
                     const float *mean, int64_t dim, float *o)
{
    KVC_UNROLL
    EACH (r, NR) {
        const __m512 step = _mm512_set1_ps(w->step[part][row0 + r]), keep = _mm512_set1_ps(w->keep[row0 + r]);
        KVC_UNROLL
        EACH (c, NC) {
            float *to = o + r * dim + 16 * c;
            __m512 x = _mm512_loadu_ps(to);
            if (FIRST) x = _mm512_mul_ps(x, keep);
            if (mean) x = _mm512_fmadd_ps(_mm512_set1_ps(w->all[row0 + r]), _mm512_loadu_ps(mean + 16 * c), x);
            _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][c]), step, x));
        }
    }
}

/* NC blocks of 16 dims of a block of `width`, from `words` on. */
INLINE void sum_dims(bool COARSE, int NR, int NC, const uint8_t *words, int64_t width, const digits *w, int64_t row0,
                     const float *mean, int64_t dim, float *o)
{
    for (int64_t from = 0; from < w->n; from += w->part) {
        __m512i dot[4][4], low[4][4];
        EACH (r, NR)
            EACH (c, NC) dot[r][c] = low[r][c] = _mm512_setzero_si512();
        for (int64_t t = from; t < kvc_min(from + w->part, w->n); t += 4, words += 4 * width) {
            __m512i v[4];
            EACH (c, NC) v[c] = _mm512_loadu_si512(words + 64 * c);
            EACH (r, NR) {
                __m512i hi = kvc_word(w->hi[row0 + r] + t);
                EACH (c, NC) dot[r][c] = kvc_dp(dot[r][c], hi, v[c]);
                if (COARSE) continue;
                __m512i lo = kvc_word(w->lo[row0 + r] + t);
                EACH (c, NC) low[r][c] = kvc_dp(low[r][c], lo, v[c]);
            }
        }
        if (!COARSE)
            EACH (r, NR)
                EACH (c, NC) dot[r][c] = _mm512_add_epi32(_mm512_slli_epi32(dot[r][c], 7), low[r][c]);
        if (from)
            add_sums(false, NR, NC, dot, w, from / PART, row0, NULL, dim, o);
        else if (mean)
            add_sums(true, NR, NC, dot, w, 0, row0, mean, dim, o);
        else
            add_sums(true, NR, NC, dot, w, 0, row0, NULL, dim, o);
    }
}

/* Rows [r, r + 4) of up to NC blocks of 16 dims. */
INLINE void sum_group(bool COARSE, const kvc_panel *v, const digits *w, int64_t r, int64_t rows, int64_t first,
                      float *o)
{
    const int NC = COARSE ? 4 : 2;
    int64_t width = kvc_min(KVC_PANEL_DIMS, v->dim - first);
    for (int64_t d = 0, many; d < width; d += many ? NC * 16 : 16) {
        const uint8_t *words = v->words + first * w->n + d * 4;
        const float *mean = v->mean ? v->mean + first + d : NULL;
        many = d + NC * 16 <= width;
#define CALL(NR, NC) sum_dims(COARSE, NR, NC, words, width, w, r, mean, v->dim, o + r * v->dim + first + d)
        switch (4 * many + rows) {
        case 1: CALL(1, 1); break;
        case 2: CALL(2, 1); break;
        case 3: CALL(3, 1); break;
        case 4: CALL(4, 1); break;
        case 5: CALL(1, NC); break;
        case 6: CALL(2, NC); break;
        case 7: CALL(3, NC); break;
        default: CALL(4, NC);
        }
#undef CALL
    }
}

/* Digits of rows [r, r + some), and their sums where there is a mean. */
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
    digits w = {.keep = keep, .n = n16, .part = coarse && v->kind == 8 ? PART : n16};
    for (int64_t r = 0; r < rows; r += KVC_ROWS) weigh_panel(v, p, ld, r, kvc_min(KVC_ROWS, rows - r), n, coarse, &w);
    for (int64_t first = 0; first < v->dim; first += KVC_PANEL_DIMS)
        for (int64_t r = 0; r < rows; r += KVC_ROWS)
            if (coarse)
                sum_group(true, v, &w, r, kvc_min(KVC_ROWS, rows - r), first, o);
            else
                sum_group(false, v, &w, r, kvc_min(KVC_ROWS, rows - r), first, o);
}

const kvc_panel_kernels kvc_avx512_panel = {kvc_avx512_panel_pack, kvc_avx512_panel_qk, kvc_avx512_panel_pv};
KVC_TARGET_END
#endif
