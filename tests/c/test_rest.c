/* test_rest.c - everything except pages and attention: selection of tokens, quantization with any granularity, codes of
 * other engines, transfers between memories, limits of pools. */
#include "granular.h"
#include "keep.h"
#include "play.h"

#include "transfer.h"

#include <math.h>

/* Of the candidates a, b among n: whether a is the better one. */
static bool goes_first(const float *scores, const int32_t *slots, int64_t a, int64_t b)
{
    if (scores[a] != scores[b]) return scores[a] > scores[b];
    return slots[a] != slots[b] ? slots[a] > slots[b] : a < b;
}

/* Each head's best `floor` tokens, then the best of all heads, by counting better ones. */
static void check_shared(const float *scores, const int32_t *slots, const uint8_t *protect, int64_t total,
                         int64_t floor, int64_t heads, int64_t n)
{
    int64_t want[3] = {0}, got[3], left = total;
    static bool rest[300];
    for (int64_t h = 0; h < heads; h++) {
        int64_t sure = 0;
        for (int64_t i = h * n; i < (h + 1) * n; i++) sure += slots[i] >= 0 && protect && protect[i];
        want[h] = sure;
        for (int64_t i = h * n; i < (h + 1) * n; i++) {
            int64_t before = 0;
            bool may = slots[i] >= 0 && !(protect && protect[i]);
            for (int64_t j = h * n; j < (h + 1) * n; j++)
                before += slots[j] >= 0 && !(protect && protect[j]) && goes_first(scores, slots, j, i);
            rest[i] = may && before >= floor - sure;
            want[h] += may && !rest[i];
        }
        left -= want[h];
    }
    for (int64_t i = 0; i < heads * n; i++) {
        int64_t before = 0;
        for (int64_t j = 0; j < heads * n; j++) before += rest[j] && goes_first(scores, slots, j, i);
        want[i / n] += rest[i] && before < left;
    }
    OK(kvc_share(scores, slots, protect, &total, &floor, 1, heads, n, got));
    CHECK(memcmp(got, want, (size_t)heads * sizeof *got) == 0);
}

/* The budget's best by a plain sort. */
static void test_choice(void)
{
    enum { LINES = 6, N = 300 };
    static float scores[LINES * N];
    static int32_t slots[LINES * N];
    static uint8_t protect[LINES * N], keep[LINES * N];
    int64_t budget[LINES], shared[LINES];
    for (int64_t i = 0; i < LINES * N; i++) {
        scores[i] = (float)random_below(40); /* ties */
        slots[i] = random_below(9) ? (int32_t)(i % N) : -1;
        protect[i] = random_below(30) == 0;
    }
    for (int64_t r = 0; r < LINES; r++) budget[r] = r == 5 ? 0 : r == 4 ? 1000 : 20 + 40 * r;
    OK(kvc_choose(scores, slots, protect, budget, LINES, N, keep));
    for (int64_t r = 0; r < LINES; r++) {
        int64_t kept = 0, sure = 0, live = 0;
        for (int64_t i = r * N; i < (r + 1) * N; i++) {
            kept += keep[i], live += slots[i] >= 0, sure += slots[i] >= 0 && protect[i];
            CHECK(slots[i] >= 0 ? keep[i] || !protect[i] : !keep[i]);
            for (int64_t j = r * N; j < (r + 1) * N; j++) /* no kept token is worse than an evicted one */
                if (keep[i] && !protect[i] && slots[j] >= 0 && !keep[j])
                    CHECK(scores[i] > scores[j] || (scores[i] == scores[j] && slots[i] > slots[j]));
        }
        int64_t want = budget[r] > sure ? budget[r] : sure;
        CHECK(kept == (want < live ? want : live));
    }
    int64_t total[2] = {200, 150}, floors[2] = {20, 0}, sum[2] = {0};
    OK(kvc_share(scores, slots, protect, total, floors, 2, 3, N, shared));
    for (int i = 0; i < 6; i++) CHECK(shared[i] >= floors[i / 3] && (sum[i / 3] += shared[i]) >= 0);
    CHECK(sum[0] == total[0] && sum[1] == total[1]);
    for (int64_t floor = 0; floor < 120; floor += 3) /* no more than a line has, in the end */
        for (int64_t all = 0; all < 2000; all += 1 + 2 * all)
            check_shared(scores, slots, floor % 2 ? protect : NULL, all, floor, 3, 100);
    for (int64_t i = 0; i < 100; i++) scores[i] -= 50; /* a head that gets only its protected tokens */
    slots[5] = 5, protect[5] = 1;
    check_shared(scores, slots, protect, 60, 0, 3, 100);
    budget[2] = -1;
    FAILS(KVC_E_VALUE, "row 2", kvc_choose(scores, slots, protect, budget, LINES, N, keep));
    budget[0] = -1;
    FAILS(KVC_E_VALUE, "row 0", kvc_choose(scores, slots, protect, budget, LINES, N, keep));
    budget[0] = 20;
    budget[2] = 1, slots[7] = 3, scores[7] = NAN;
    FAILS(KVC_E_VALUE, "NaN at token 7 of row 0", kvc_choose(scores, slots, NULL, budget, LINES, N, keep));
    FAILS(KVC_E_VALUE, "NaN", kvc_share(scores, slots, NULL, total, floors, 2, 3, N, shared));
    scores[7] = 0;
    for (int n = 1; n < 3; n++) {
        kvc_alloc_fail_at(n);
        FAILS(KVC_E_MEMORY, "out of memory", kvc_share(scores, slots, NULL, total, floors, 2, 3, N, shared));
    }
    kvc_alloc_fail_at(1);
    FAILS(KVC_E_MEMORY, "out of memory", kvc_choose(scores, slots, NULL, budget, LINES, N, keep));
    kvc_alloc_fail_at(0);
}

/* Every scheme, granularity and packing has an error of at most a step; shapes are as described in kvc.h. */
static void test_granularities(void)
{
    enum { B = 2, H = 2, T = 5, D = 64, N = B * H * T * D };
    static float x[N], y[N];
    static uint8_t codes[N], scales[4 * N];
    static uint16_t zeros[N];
    for (int i = 0; i < N; i++) x[i] = random_number(KVC_F32);
    kvc_dense dense = {x, {H * T * D, T * D, D}, KVC_F32};
    int checked = 0;
    for (int scheme = 0; scheme < KVC_SCHEMES; scheme++)
        for (int by = 0; by < KVC_BYS; by++)
            for (int packing = 0; packing < KVC_PACKINGS; packing++) {
                const kvc_scheme_info *info = kvc_scheme_get(scheme);
                kvc_grain g = {scheme, by, packing, info->group ? info->group : 32, B, H, T, D};
                kvc_grain_sizes sizes;
                if (kvc_grain_check(&g, &sizes) != KVC_OK) continue;
                CHECK(sizes.count == sizes.scales[0] * sizes.scales[1] * sizes.scales[2] * sizes.scales[3]);
                CHECK(sizes.row_bytes == D * info->bits / 8);
                OK(kvc_quantize_by(&g, &dense, NULL, NULL, 1, codes, scales, zeros, checked % 2 ? &in_threads : NULL));
                OK(kvc_dequantize_by(&g, codes, scales, zeros, 1, y, NULL));
                fold(codes, B * H * T * sizes.row_bytes), fold(y, sizeof y);
                double off = 0, all = 0;
                for (int i = 0; i < N; i++)
                    off += ((double)x[i] - y[i]) * ((double)x[i] - y[i]), all += (double)x[i] * x[i];
                CHECK(sqrt(off / all) < (info->bits >= 8 ? .06 : info->bits == 4 ? .3 : info->bits == 3 ? .5 : 1.1));
                checked++;
            }
    CHECK(checked > 40 && !kvc_scheme_get(-1) && !kvc_scheme_get(KVC_SCHEMES));
    kvc_grain bad = {0, KVC_BYS, 0, 32, B, H, T, D};
    kvc_grain_sizes sizes;
    CHECK(kvc_grain_check(&bad, &sizes) == KVC_E_VALUE);
    bad.by = 0, bad.T = 0;
    CHECK(kvc_grain_check(&bad, &sizes) == KVC_E_VALUE);
    bad.T = T, bad.scheme = -1;
    CHECK(kvc_grain_check(&bad, &sizes) == KVC_E_VALUE);
    bad.scheme = 0, x[77] = NAN;
    CHECK(kvc_quantize_by(&bad, &dense, NULL, NULL, 1, codes, scales, zeros, NULL) == KVC_E_VALUE);
    FAILS(KVC_E_VALUE, "tensor_scale", kvc_quantize_by(&bad, &dense, NULL, NULL, 2, codes, scales, zeros, NULL));
}

/* Codes of another engine are copied unchanged; codes that are not numbers are rejected. */
static void test_foreign_codes(void)
{
    enum { H = 2, T = 32, D = 32 };
    static uint8_t codes[H * T * D], pages[1 << 16];
    static uint16_t scales[H * T];
    uint8_t *at = pages + (64 - (uintptr_t)pages % 64) % 64;
    for (int i = 0; i < H * T * D; i++) codes[i] = (uint8_t)random_below(124); /* numbers in every coding */
    for (int i = 0; i < H * T; i++) scales[i] = 0x3c00;                        /* 1 */
    kvc_coded x = {codes, {H * T * D, T * D, D}, scales};
    static const int formats[] = {KVC_INT8, KVC_FP8_E4M3, KVC_FP8_E5M2};
    for (int f = 0; f < 3; f++) {
        int format = formats[f];
        int64_t bytes = kvc_page_bytes(format, format, D, D, 16);
        OK(kvc_pack_codes(format, format, &x, &x, 1, H, T, D, D, 16, at, f ? &in_threads : NULL));
        for (int t = 0; t < T; t++)
            for (int side = 0; side < 2; side++) {
                double row[KVC_MAX_DIM];
                ref_page_row(at + (t / 16 * H + 1) * bytes, side, format, format, D, D, 16, t % 16, row);
                for (int d = 0; d < D; d++) {
                    uint8_t code = codes[(T + t) * D + d];
                    double want = format == KVC_INT8       ? code - 128.0
                                  : format == KVC_FP8_E4M3 ? -1
                                                           : ref_half((uint16_t)(code << 8));
                    if (want != -1) CHECK(row[d] == want);
                }
            }
    }
    FAILS(KVC_E_VALUE, "k", kvc_pack_codes(KVC_INT4, KVC_INT8, &x, &x, 1, H, T, D, D, 16, at, NULL));
    codes[70] = 0x7f;
    CHECK(kvc_pack_codes(KVC_FP8_E4M3, KVC_FP8_E4M3, &x, &x, 1, H, T, D, D, 16, at, NULL) == KVC_E_VALUE);
    codes[70] = 0, scales[3] = 0x7c00;
    CHECK(kvc_pack_codes(KVC_INT8, KVC_INT8, &x, &x, 1, H, T, D, D, 16, at, NULL) == KVC_E_VALUE);
    scales[3] = 0xbc00;
    CHECK(kvc_pack_codes(KVC_INT8, KVC_INT8, &x, &x, 1, H, T, D, D, 16, at, NULL) == KVC_E_VALUE);
}

/* Compared with float64; contiguous rows or not, full vectors of columns and remainders. */
static void test_mapped_heads(void)
{
    enum { B = 2, H = 3, MOST = 160 };
    static float x[B * 2 * H * 5 * MOST], by[H * MOST * MOST], out[B * 2 * H * 5 * MOST];
    static const int dims[] = {1, 16, 40, 64, 160};
    for (int i = 0; i < B * 2 * H * 5 * MOST; i++) x[i] = (float)((uint32_t)i * 2654435761u % 2001) / 500 - 2;
    for (int i = 0; i < H * MOST * MOST; i++) by[i] = (float)((uint32_t)i * 2246822519u % 2003) / 500 - 2;
    for (int k = 0; k < 5; k++)
        for (int T = 1; T <= 5; T++) {
            int D = dims[k];
            kvc_dense rows = {x, {2 * H * T * D, D, 2 * H * D}, KVC_F32}; /* [B, T, Hq, D] */
            OK(kvc_map_heads(&rows, B, 2 * H, T, D, by, H, out, KVC_F32, k ? &in_threads : NULL));
            for (int i = 0; i < B * 2 * H * T * D; i++) {
                int b = i / (2 * H * T * D), h = i / (T * D) % (2 * H), t = i / D % T;
                const float *row = x + ((b * T + t) * 2 * H + h) * D;
                double want = 0;
                for (int d = 0; d < D; d++) want += (double)row[d] * by[(h / 2 * D + d) * D + i % D];
                CHECK(fabs(out[i] - want) < 1e-5 * (D + 4));
            }
        }
    kvc_dense rows = {x, {H * 16, 16, 16}, KVC_F32};
    FAILS(KVC_E_VALUE, "divides 3 heads", kvc_map_heads(&rows, 1, H, 1, 16, by, 2, out, KVC_F32, NULL));
    FAILS(KVC_E_VALUE, "1 to 576 dims", kvc_map_heads(&rows, 1, H, 1, 577, by, H, out, KVC_F32, NULL));
    OK(kvc_map_heads(&rows, 1, H, 0, 16, by, H, NULL, KVC_F32, NULL));
}

/* Non-finite numbers are found anywhere, with their location; invalid dims and page sizes are rejected. */
static void test_refused_pages(void)
{
    enum { B = 2, H = 2, T = KVC_MAX_PAGE, D = 32, N = B * H * T * D };
    static uint16_t k[N], scales[B * H * T];
    static uint8_t v[N], pages[1 << 19];
    char place[64];
    kvc_dense x = {k, {H * T * D, D, H * D}, KVC_F16}; /* [B, T, H, D] */
    kvc_coded y = {v, {H * T * D, D, H * D}, scales};  /* except its scales */
    for (int64_t i = 0; i < B * H * T; i += 37) {
        int64_t b = i / T / H, h = i / T % H, t = i % T, at = ((b * T + t) * H + h) * D + i % D;
        snprintf(place, sizeof place, "sequence %d, head %d, token %d", (int)b, (int)h, (int)t);
        k[at] = 0xfc00;
        FAILS(KVC_E_VALUE, place, kvc_pack(KVC_INT8, KVC_RAW_F16, &x, &x, B, H, T, D, D, 16, pages, NULL));
        k[at] = 0, v[at] = 0x7f;
        FAILS(KVC_E_VALUE, place, kvc_pack_codes(KVC_INT8, KVC_FP8_E4M3, &y, &y, B, H, T, D, D, 16, pages, NULL));
        v[at] = 0, scales[i] = 0x7c00;
        FAILS(KVC_E_VALUE, place, kvc_pack_codes(KVC_INT8, KVC_INT8, &y, &y, B, H, T, D, D, 16, pages, NULL));
        scales[i] = 0;
    }
    for (int64_t size = -16; size <= KVC_MAX_PAGE + 16; size += 8) {
        bool may = size > 0 && size <= KVC_MAX_PAGE && size % 16 == 0;
        int64_t n = may && T % size ? size : T; /* full pages */
        kvc_status all = kvc_pack(KVC_INT4, KVC_INT8, &x, &x, 1, H, n, D, D, size, pages, &in_threads);
        CHECK((all == KVC_OK) == may);
        CHECK((kvc_pack_codes(KVC_INT8, KVC_INT8, &y, &y, 1, H, n, D, D, size, pages, NULL) == KVC_OK) == may);
        CHECK(!may || kvc_pack(KVC_INT4, KVC_INT8, &x, &x, 1, H, n - 1, D, D, size, pages, NULL) == KVC_E_VALUE);
    }
    for (int side = 0; side < 2; side++) {
        int64_t dk = side ? D : D - 2, dv = side ? D - 2 : D;
        CHECK(kvc_pack(KVC_INT8, KVC_INT8, &x, &x, 1, H, T, dk, dv, 16, pages, NULL) == KVC_E_VALUE);
        CHECK(kvc_pack_codes(KVC_INT8, KVC_INT8, &y, &y, 1, H, T, dk, dv, 16, pages, NULL) == KVC_E_VALUE);
    }
    x.dtype = KVC_BF16;
    FAILS(KVC_E_TYPE, "float16", kvc_pack(KVC_INT8, KVC_RAW_F16, &x, &x, 1, H, T, D, D, 16, pages, NULL));
}

/* Norms of K and V rows, compared with their values. */
static void test_scores(void)
{
    enum { T = 70, D = 32, H = 2 };
    static float got[H * T], back[2][H * T * D];
    kvc_pool *pool;
    play p;
    kvc_spec s = {H, D, D, 16, 4, 0, KVC_RAW_F32, KVC_INT4, KVC_INT8, false};
    OK(kvc_pool_new(16 * MB, &pool));
    play_open(&p, pool, &s, 1, 1, T);
    kvc_store store = kvc_table_store(p.t);
    kvc_alloc_fail_at(2); /* the first is the copy of the table, the second the workspace of rows */
    OK(kvc_score_tokens(&store, KVC_KEY_NORM, 0, NULL, NULL)); /* without tokens no row is visited */
    kvc_alloc_fail_at(0);
    play_step(&p, &(step){.T = T});
    store = kvc_table_store(p.t);
    kvc_alloc_fail_at(2);
    CHECK(kvc_score_tokens(&store, KVC_KEY_NORM, T, got, NULL) == KVC_E_MEMORY);
    kvc_alloc_fail_at(0);
    kvc_dense k = {back[0], {H * T * D, T * D, D}, KVC_F32}, v = {back[1], {H * T * D, T * D, D}, KVC_F32};
    OK(kvc_read(&store, T, &k, &v, NULL));
    for (int kind = 0; kind < KVC_TOKEN_SCORES; kind++) {
        OK(kvc_score_tokens(&store, kind, T, got, kind ? &in_threads : NULL));
        for (int h = 0; h < H; h++) {
            double mean[D] = {0}, size = 0;
            const float *rows = back[kind == KVC_VALUE_NORM] + h * T * D;
            for (int pass = 0; pass < 2; pass++)
                for (int t = 0; t < T; t++) {
                    double norm = 0, dot = 0;
                    for (int d = 0; d < D; d++) norm += (double)rows[t * D + d] * rows[t * D + d];
                    for (int d = 0; d < D; d++) {
                        if (pass == 0) mean[d] += rows[t * D + d] / sqrt(norm);
                        dot += mean[d] * rows[t * D + d] / sqrt(norm);
                    }
                    if (pass == 0) continue;
                    if (t == 0)
                        for (int d = 0; d < D; d++) size += mean[d] * mean[d];
                    double want = kind == KVC_KEY_COSINE ? dot / sqrt(size) : sqrt(norm);
                    CHECK(fabs(got[h * T + t] - want) <= 1e-4 * (1 + want));
                }
        }
    }
    CHECK(kvc_score_tokens(&store, KVC_TOKEN_SCORES, T, got, NULL) == KVC_E_VALUE);
    kvc_alloc_fail_at(1);
    CHECK(kvc_score_tokens(&store, KVC_KEY_NORM, T, got, NULL) == KVC_E_MEMORY);
    kvc_alloc_fail_at(1);
    CHECK(kvc_read(&store, T, &k, &v, NULL) == KVC_E_MEMORY);
    kvc_alloc_fail_at(0);
    play_close(&p);
    kvc_pool_release(pool);
}

/* Evicted tokens that still have a place give 0; others the value of their row. */
static void test_scores_after_evictions(bool ragged)
{
    enum { T = 70, D = 32, H = 3, B = 2 };
    static float got[B * H * T];
    kvc_pool *pool;
    play p;
    kvc_spec s = {H, D, D, 16, 4, 0, KVC_RAW_F32, KVC_INT8, KVC_INT8, false};
    OK(kvc_pool_new(16 * MB, &pool));
    play_open(&p, pool, &s, B, 1, T + 1);
    play_step(&p, &(step){.T = T});
    play_evict(&p, 5, ragged, -1);
    kvc_store store = kvc_table_store(p.t);
    int64_t gone = 0;
    for (int kind = KVC_KEY_NORM; kind <= KVC_VALUE_NORM; kind++) {
        OK(kvc_score_tokens(&store, kind, T, got, NULL));
        for (int64_t r = 0; r < B * H; r++) {
            int64_t b = r / H, h = r % H, line = play_line(p.t, b, h);
            for (int64_t i = 0; i < store.rows[2 * line]; i++) {
                double row[KVC_MAX_DIM], norm = 0;
                if (play_slot(p.t, line, i) < 0)
                    gone++;
                else
                    play_row(&p, play_entry(&p, b, h, i), h, i, kind == KVC_KEY_NORM, row);
                for (int d = 0; d < D && play_slot(p.t, line, i) >= 0; d++) norm += row[d] * row[d];
                CHECK(fabs(got[r * T + i] - sqrt(norm)) <= 1e-4 * (1 + sqrt(norm)));
            }
        }
    }
    CHECK(gone > 0);
    play_close(&p);
    kvc_pool_release(pool);
}

/* Pieces are copied out and back; the checksum detects any changed or moved word. */
static void test_pieces(void)
{
    static _Alignas(64) uint8_t arena[64 * 40], out[64 * 40], back[64 * 40];
    const kvc_piece pieces[] = {{64 * 3, 64 * 5}, {64 * 20, 64}, {0, 128}};
    int64_t bytes = 64 * 8;
    for (size_t i = 0; i < sizeof arena; i++) arena[i] = (uint8_t)random_below(256);
    OK(kvc_pieces_check(pieces, 3, sizeof arena, bytes));
    FAILS(KVC_E_VALUE, "", kvc_pieces_check(pieces, 3, sizeof arena, bytes + 64));
    FAILS(KVC_E_VALUE, "", kvc_pieces_check(pieces, 3, 64 * 20, bytes));
    FAILS(KVC_E_VALUE, "", kvc_pieces_check(&(kvc_piece){-64, 64}, 1, sizeof arena, 64));
    FAILS(KVC_E_VALUE, "", kvc_pieces_check(&(kvc_piece){64, -64}, 1, sizeof arena, -64));
    FAILS(KVC_E_VALUE, "", kvc_pieces_check(&(kvc_piece){7, 64}, 1, sizeof arena, 64));
    uint64_t sum = kvc_gather(arena, pieces, 3, out);
    CHECK(!memcmp(out, arena + 64 * 3, 64 * 5) && !memcmp(out + 64 * 5, arena + 64 * 20, 64) &&
          !memcmp(out + 64 * 6, arena, 128));
    CHECK(kvc_checksum(out, bytes) == sum && kvc_scatter(back, pieces, 3, out) == sum);
    CHECK(!memcmp(back + 64 * 20, arena + 64 * 20, 64) && !memcmp(back, arena, 128));
    for (int64_t i = 0; i < bytes; i++) {
        out[i] ^= 16;
        CHECK(kvc_checksum(out, bytes) != sum);
        out[i] ^= 16;
    }
    memcpy(back, out + 64, 64), memcpy(out + 64, out, 64), memcpy(out, back, 64);
    CHECK(kvc_checksum(out, bytes) != sum);
}

/* A limit on the extent: freed space is reused, more is refused. */
static void test_limit(void)
{
    kvc_pool *pool;
    int64_t offset[64], more;
    OK(kvc_pool_new(64 * MB, &pool));
    for (int i = 0; i < 8; i++) OK(kvc_pool_alloc(pool, MB, &offset[i]));
    int64_t extent = kvc_pool_extent(pool);
    FAILS(KVC_E_VALUE, "at least the extent", kvc_pool_limit(pool, extent - 1));
    OK(kvc_pool_limit(pool, extent + MB));
    int n = 8;
    while (n < 64 && kvc_pool_alloc(pool, MB, &offset[n]) == KVC_OK) n++;
    CHECK(n == extent / MB + 1 && kvc_pool_extent(pool) == extent + MB);
    FAILS(KVC_E_MEMORY, "pool is full", kvc_pool_alloc(pool, 64, &more));
    kvc_pool_unref(pool, offset[0]);
    OK(kvc_pool_alloc(pool, MB / 2, &offset[0]));
    OK(kvc_pool_limit(pool, 1024 * MB));
    OK(kvc_pool_alloc(pool, 32 * MB, &more));
    kvc_pool_unref(pool, more);
    while (n--) kvc_pool_unref(pool, offset[n]);
    OK(kvc_pool_check(pool));
    kvc_pool_release(pool);
}

void test_rest(void)
{
    test_limit();
    test_pieces();
    test_choice();
    test_granularities();
    test_foreign_codes();
    test_mapped_heads();
    test_refused_pages();
    test_scores();
    for (int ragged = 0; ragged < 2; ragged++) test_scores_after_evictions(ragged);
}
