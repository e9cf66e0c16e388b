/* affine.h - attention on integer formats that have no kernels of their own (see kvc_affine): unpacks the codes to
 * bytes (formats with one group per row stay packed if the level's kernels take planes), converts scales and zero
 * points to floats, and multiplies as for int8. Included by <isa>_affine.c after the target pragma and lanes_<isa>.h,
 * and after its definitions of NAME, PLANES, COARSE, key_tiles, value_dims, group_sum, weigh_by, sum_of and most_of.
 *
 *   score[t] = sum over groups g of scale[g][t] * (q_g . (code - centre)) + value[g][t] of the centre * sum(q_g)
 *   o[d]    += sum over t of (p[t] * scale[g][t]) * (code - centre) + sum over t of p[t] * value[g][t] of the centre
 *
 * Scales per channel (kivi) are multiplied into q instead; the page's mean and zero points per channel become a
 * constant. Cost in addition to int8's: a load, 1 to 3 instructions and a store per 64 codes; a fused multiply-add per
 * group, tile and row (K); limbs of p per group (V). */
#ifndef KVC_AFFINE_H
#define KVC_AFFINE_H

#include "tile_scale.h"

#define BY_ROWS(...) KVC_BY_ROWS(__VA_ARGS__)

/* Twice the value of an e2m1 code, plus 12. */
static const uint8_t e2m1_codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

void NAME(affine)(const kvc_side *side, int64_t n, ptrdiff_t ahead, uint8_t *words, kvc_affine *to)
{
    kvc_traits f = kvc_format_traits(side->format);
    int64_t D = side->dim, P = side->page_size, tiles = (n + KVC_TILE - 1) / KVC_TILE;
    int64_t bytes = kvc_tile_bytes(side->format, D), groups = f.group ? D / f.group : 1;
    int64_t plane = kvc_meta_size(f) * P, each = f.coding == KVC_CODING_UINT ? 2 : 1;
    to->dim = D;
    to->group = D / groups;
    to->page_size = P;
    to->symmetric = each == 1 || (side->key && f.keys == KVC_KEYS_CHANNEL);
    const uint8_t *table = f.coding == KVC_CODING_E2M1    ? e2m1_codes
                           : f.coding == KVC_CODING_LLOYD ? kvc_lloyd4_codes
                                                          : NULL;
    bool as_stored = f.bits == 8 || (PLANES && groups == 1 && !table);
    to->bits = as_stored ? f.bits : 8;
    to->words = as_stored ? side->tiles : words;
    to->centre = f.coding == KVC_CODING_E2M1 ? 12 : f.coding == KVC_CODING_LLOYD ? 128 : 1 << (f.bits - 1);
    to->coarse = f.bits < 8 && groups > 1;
    to->ahead = as_stored ? ahead : 0;
    const vi mask = i_all(f.bits == 4 ? 0x0f0f0f0f : 0x03030303);
    for (int64_t tile = 0; !as_stored && tile < tiles; tile++, words += KVC_TILE * D)
        for (int64_t at = 0; at < bytes; at += 64) { /* plane p follows plane p - 1 */
            const uint8_t *from = side->tiles + tile * bytes + at;
            vi w = i_load(from);
            kvc_prefetch(from, 0, ahead);
            for (int64_t p = 0; p < 8 / f.bits; p++, w = f.bits == 4 ? i_right(w, 4) : i_right(w, 2)) {
                vi code = i_and(w, mask);
                if (table) code = i_look_up(table, code);
                i_store(words + p * bytes + at, code);
            }
        }
    bool channel = side->key && f.keys == KVC_KEYS_CHANNEL;
    for (int64_t g = 0; g < groups; g++)
        for (int64_t t = 0; t < tiles * KVC_TILE; t += KVC_TILE) {
            const uint8_t *meta = side->meta + g * each * plane + t * kvc_meta_size(f);
            vf scale = channel ? f_all(1) : load_scale(f.scale, meta);
            if (f.coding == KVC_CODING_E2M1) scale = f_mul(scale, f_all(.5f));
            vf middle = f_all(0);
            if (each == 2 && !channel) middle = f_fma(scale, f_all((float)to->centre), h_load(meta + plane));
            f_store(to->scale + g * P + t, scale);
            f_store(to->middle + g * P + t, middle);
        }
    for (int64_t g = 0; g < groups; g++)
        for (int64_t t = n; t < tiles * KVC_TILE; t++) to->scale[g * P + t] = to->middle[g * P + t] = 0;
}

/* q for a page whose K has scales and zero points per channel: form = limbs of q * scale, base = q . middles. */
typedef struct channel_query {
    float q[KVC_ROWS * KVC_MAX_DIM], step[KVC_ROWS];
    int8_t limbs[2 * KVC_ROWS * KVC_MAX_DIM];
    int32_t sum[KVC_ROWS];
} channel_query;

void NAME(qk_affine)(const kvc_side *side, const kvc_affine *x, const kvc_query *query, int64_t row0, int64_t rows,
                     int64_t n_tiles, float *s, int64_t ld)
{
    kvc_traits f = kvc_format_traits(side->format);
    int64_t D = side->dim;
    const kvc_query_form *form = query->form;
    const uint8_t *by_dim = side->meta + kvc_token_meta_bytes(f, 1, D, side->page_size);
    float base[KVC_ROWS], sums[KVC_ROWS][KVC_MAX_GROUPS];
    int32_t offset[KVC_ROWS][KVC_MAX_GROUPS];
    channel_query c;
    kvc_query_form own = {.q = c.q, .hi = c.limbs, .lo = c.limbs + KVC_ROWS * D, .step = c.step, .sum = c.sum};
    for (int64_t r = 0; r < rows; r++) {
        const float *plain = query->forms[KVC_PLAIN].q + (row0 + r) * D, *q = form->q + (row0 + r) * D;
        vf dot = f_all(0);
        if (f.keys == KVC_KEYS_CENTRED)
            for (int64_t d = 0; d < D; d += KVC_TILE) dot = f_fma(f_load(plain + d), h_load(by_dim + 2 * d), dot);
        if (f.keys == KVC_KEYS_CHANNEL)
            for (int64_t d = 0; d < D; d += KVC_TILE) {
                vf scale = h_load(by_dim + 2 * d);
                vf middle = f_fma(scale, f_all((float)x->centre), h_load(by_dim + 2 * (D + d)));
                dot = f_fma(f_load(q + d), middle, dot);
                f_store(c.q + r * D + d, f_mul(f_load(q + d), scale));
            }
        base[r] = sum_of(dot);
        for (int64_t d = 0; d < D && !x->symmetric; d += x->group) {
            vf sum = f_load(q + d);
            for (int64_t i = KVC_TILE; i < x->group; i += KVC_TILE) sum = f_add(sum, f_load(q + d + i));
            sums[r][d / x->group] = sum_of(sum);
        }
    }
    if (f.keys == KVC_KEYS_CHANNEL) {
        KVC_LEVEL.limbs(&own, rows, D);
        form = &own;
        row0 = 0;
    }
    for (int64_t r = 0; r < rows; r++) {   /* sums in units of the row's step, as the dots are */
        float step = form->step[row0 + r]; /* 1 / step of a row treated as zero may overflow; NaN stays NaN */
        float unit = step <= KVC_TINY / KVC_P_LIMIT ? 0 : 1 / step;
        for (int64_t g = 0; g * x->group < D; g++) {
            offset[r][g] = x->centre * group_sum(form, row0 + r, D, g * x->group, x->group);
            if (!x->symmetric) sums[r][g] *= unit;
        }
    }
#define KEYS(BITS, NR, N) key_tiles(BITS, NR, N, x, form, row0, sums, offset, base, at, s, ld)
#define KEYS8(NR, N) KEYS(8, NR, N)
#define KEYS4(NR, N) KEYS(4, NR, N)
#define KEYS2(NR, N) KEYS(2, NR, N)
    if (!PLANES || x->bits == 8) {
        BY_ROWS(KEYS8, rows, n_tiles, 1, KEY_TILES)
    } else if (x->bits == 4) {
        BY_ROWS(KEYS4, rows, n_tiles, 1, KEY_TILES)
    } else {
        BY_ROWS(KEYS2, rows, n_tiles, 1, KEY_TILES)
    }
}

void NAME(pv_affine)(const kvc_affine *x, const float *p, int64_t ld, int64_t rows, int64_t n, kvc_digits digits,
                     float *o)
{
    bool coarse = COARSE && digits == KVC_P_BYTE && x->coarse;
    float middle[KVC_ROWS], largest[KVC_ROWS];
    weights w;
    for (int64_t r = 0; r < rows; r++) {
        vf most = f_all(0);
        for (int64_t t = 0; t < n; t += KVC_TILE) most = f_max(f_load(p + r * ld + t), most);
        largest[r] = most_of(most);
    }
    for (int64_t d = 0; d < x->dim; d += x->group) {
        const float *scales = x->scale + d / x->group * x->page_size,
                    *middles = x->middle + d / x->group * x->page_size;
        for (int64_t r = 0; r < rows; r++) {
            vf sum = f_all(0);
            for (int64_t t = 0; t < n && !x->symmetric; t += KVC_TILE)
                sum = f_fma(f_load(p + r * ld + t), f_load(middles + t), sum);
            middle[r] = x->symmetric ? 0 : sum_of(sum);
        }
        weigh_by(&w, p, ld, rows, n, scales, largest, coarse);
#define VALUES(BITS, BYTE, NR, N) value_dims(BITS, BYTE, NR, N, x, &w, middle, n, d + at, o)
#define VALUES8(NR, N) VALUES(8, false, NR, N)
#define VALUES4(NR, N) VALUES(4, false, NR, N)
#define VALUES2(NR, N) VALUES(2, false, NR, N)
#define COARSE8(NR, N) VALUES(8, true, NR, N) /* for formats with groups, which are unpacked */
        if (coarse) {
            BY_ROWS(COARSE8, rows, x->group, 16, VALUE_BLOCKS)
        } else if (!PLANES || x->bits == 8) {
            BY_ROWS(VALUES8, rows, x->group, 16, VALUE_BLOCKS)
        } else if (x->bits == 4) {
            BY_ROWS(VALUES4, rows, x->group, 16, VALUE_BLOCKS)
        } else {
            BY_ROWS(VALUES2, rows, x->group, 16, VALUE_BLOCKS)
        }
    }
}

#endif
