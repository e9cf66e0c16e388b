/* pages.c - pages of arbitrary bytes in any formats: reading them and attention must not fail and must not depend on
 * the level, and reading must agree with reference.h. */
#include "input.h"

#include "../c/reference.h"

#include <math.h>

enum { H = 2, PAGES = 2 };

/* Encoders write none; with one, weights times scales have both signs, which integer kernels do not support. */
static bool negative_scale(const uint8_t *meta, int format, bool key, int64_t dim, int64_t P)
{
    kvc_traits f = kvc_format_traits(format);
    bool channels = key && f.keys == KVC_KEYS_CHANNEL;
    int64_t planes = channels ? 2 : kvc_meta_planes(f, dim), n = channels ? dim : P, size = kvc_meta_size(f);
    bool found = false;
    if (kvc_format_is_raw(format) || f.scale == KVC_SCALE_E8M0) return false;
    for (int64_t p = 0; p < planes; p += f.coding == KVC_CODING_UINT ? 2 : 1)
        for (int64_t i = 0; i < n; i++) found |= meta[(p * n + i + 1) * size - 1] >> 7;
    return found;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, data + size};
    int key = (int)below(&in, KVC_FORMATS), value = (int)below(&in, KVC_FORMATS);
    int64_t Dk = a_dim(&in), Dv = a_dim(&in), P = 16 * (1 + below(&in, 4)), T = P * PAGES - below(&in, 17),
            G = 1 + below(&in, 6);
    if (kvc_format_check(key, Dk) != KVC_OK || kvc_format_check(value, Dv) != KVC_OK) return 0;
    int64_t bytes = kvc_page_bytes(key, value, Dk, Dv, P), n[2] = {H * T * Dk, H * T * Dv};
    uint8_t *arena = filled(&in, bytes * H * PAGES);
    int64_t entries[1 + PAGES] = {KVC_NONE, kvc_entry(0, key, value), kvc_entry(H * bytes, key, value)},
                        rows[2] = {T, 0};
    kvc_store s = {arena, bytes * H * PAGES, entries, rows, NULL, 0, 1, H, 1, 1 + PAGES, Dk, Dv, P, 0};
    float *x[2], *first[2], *q = calloc((size_t)(H * G * Dk), 4), *out = calloc((size_t)(H * G * Dv), 4), lse[H * 6];
    float *out0 = calloc((size_t)(H * G * Dv), 4);
    for (int i = 0; i < 2; i++) x[i] = malloc((size_t)n[i] * 4), first[i] = malloc((size_t)n[i] * 4);
    bool tame = true;
    kvc_layout l = kvc_page_layout(key, value, Dk, Dv, P);
    for (int64_t i = 0; i < H * PAGES; i++)
        tame &= !negative_scale(arena + i * bytes + l.k_meta, key, true, Dk, P) &&
                !negative_scale(arena + i * bytes + l.v_meta, value, false, Dv, P);
    for (int level = 0; use_level(level); level++) {
        kvc_dense k = {x[0], {H * T * Dk, T * Dk, Dk}, KVC_F32}, v = {x[1], {H * T * Dv, T * Dv, Dv}, KVC_F32};
        OK(kvc_read(&s, T, &k, &v, NULL));
        for (int i = 0; i < 2; i++)
            for (int64_t j = 0; j < n[i]; j++) {
                if (level == 0) tame &= fabsf(x[i][j]) < 30;
                int format = i ? value : key; /* codes or scales are e4m3, whose NaN is 480 on some levels */
                bool e4m3 = format == KVC_FP8_E4M3 || kvc_format_traits(format).scale == KVC_SCALE_E4M3;
                if (level) CHECK(x[i][j] == first[i][j] || (isnan(first[i][j]) && (e4m3 || isnan(x[i][j]))));
            }
        for (int i = 0; level == 0 && i < 2; i++) memcpy(first[i], x[i], (size_t)n[i] * 4);
        for (int64_t j = 0; j < H * G * Dk; j++) q[j] = (float)(j * 7 % 13 - 6) / 4;
        kvc_attend_args a = {.store = s, .query_heads = H * G, .Tq = 1, .seen = T, .scale = .125f, .lse = lse};
        a.q = (kvc_dense){q, {H * G * Dk, Dk, Dk}, KVC_F32};
        a.out = (kvc_dense){out, {H * G * Dv, Dv, Dv}, KVC_F32};
        OK(kvc_attend(&a));
        double most = 0, off = 0;
        for (int64_t j = 0; j < H * G * Dv; j++) {
            if (level == 0) out0[j] = out[j];
            off = fmax(off, fabs((double)out[j] - out0[j]));
        }
        for (int64_t j = 0; tame && j < n[1]; j++) most = fmax(most, fabs(x[1][j]));
        /* With moderate values: 8-bit q may change scores, and so weights, by some hundredths. */
        if (tame) CHECK(off <= .3 * most + 1e-25); /* smaller values are 0 in integer kernels */
    }
    for (int64_t j = 0; j < H * T; j++)
        for (int side = 0; side < 2; side++) {
            double row[KVC_MAX_DIM], most = 0;
            int64_t h = j / T, t = j % T, dim = side ? Dv : Dk;
            ref_page_row(arena + (t / P * H + h) * bytes, !side, key, value, Dk, Dv, P, t % P, row);
            for (int64_t d = 0; d < dim; d++) most = fmax(most, fabs(row[d]));
            for (int64_t d = 0; tame && d < dim; d++)
                CHECK(fabs(first[side][(h * T + t) * dim + d] - row[d]) <= 3e-6 * most);
        }
    free(arena), free(q), free(out), free(out0);
    for (int i = 0; i < 2; i++) free(x[i]), free(first[i]);
    return 0;
}
