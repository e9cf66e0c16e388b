/* test_attend.c - calls of kvc_attend in emulated layers, with every format and kind of mask, and through evictions. */
#include "play.h"

#include <math.h>

static kvc_spec spec_of(int64_t heads, int64_t key_dim, int64_t value_dim, int64_t page, int64_t sinks, int raw,
                        int key, int value)
{
    return (kvc_spec){heads, key_dim, value_dim, page, sinks, 0, raw, key, value, false};
}

/* A prompt, steps, a chunk, steps; then a crop. */
static void every_format(kvc_pool *pool, int format)
{
    play p;
    bool raw = kvc_format_is_raw(format);
    kvc_spec s = spec_of(2, 64, 64, 32, 4, raw ? format : KVC_RAW_F32, format, format);
    play_open(&p, pool, &s, 1, 2, 200);
    p.loud = format % 2 ? 0 : 20;
    play_step(&p, &(step){.T = 70});
    play_step(&p, &(step){.T = 1, .accumulated = true, .wild = format % 2});
    play_step(&p, &(step){.T = 30, .accumulated = true, .given = p.loud == 0, .exec = &in_threads});
    play_step(&p, &(step){.T = 3, .out = KVC_BF16, .wild = true, .accumulated = true});
    play_crop(&p, 90);
    play_step(&p, &(step){.T = 2, .out = KVC_F16});
    play_close(&p);
}

/* Windows, chunks, softcaps, attention sinks' logits and padding, with odd dims and two formats. */
static void every_mask(kvc_pool *pool, const kvc_spec *s, int64_t window, int64_t group)
{
    play p;
    play_open(&p, pool, s, 2, group, 220);
    play_step(&p, &(step){.T = 37, .pads = true, .window = window, .accumulated = true});
    if (window < 0)
        play_step(&p, &(step){.T = 0, .queries = 37, .window = window}); /* also from before a row's first token */
    play_step(&p, &(step){.T = 1, .window = window, .softcap = 5, .aux = true, .accumulated = true});
    play_step(&p, &(step){.T = 50, .queries = 5, .window = window, .aux = true});
    play_step(&p, &(step){.T = 0, .queries = 3, .window = window, .wild = true});
    play_step(&p, &(step){.T = 20, .queries = -1, .pads = true});
    play_step(&p, &(step){.T = 40,
                          .pads = true,
                          .window = window,
                          .exec = &in_threads,
                          .accumulated = true,
                          .softcap = 30,
                          .given = window < 0});
    for (int i = 0; i < 4; i++)
        play_step(&p, &(step){.T = 1, .window = window, .accumulated = i % 2, .failures = i == 3});
    play_close(&p);
}

/* So many columns that a sequence is split into runs, and weights are coarse. */
static void long_sequence(kvc_pool *pool, int key, int value)
{
    play p;
    kvc_spec s = spec_of(1, 64, 64, 16, 4, KVC_RAW_F32, key, value);
    play_open(&p, pool, &s, 1, 5, 1240);
    play_step(&p, &(step){.T = 1100, .queries = 2, .exec = &in_threads});
    play_step(&p, &(step){.T = 1, .accumulated = true, .exec = &in_threads, .wild = true});
    play_step(&p, &(step){.T = 17, .accumulated = true, .window = 700, .given = true});
    play_step(&p, &(step){.T = 1, .failures = true, .accumulated = true});
    play_evict(&p, 5, false, -1);
    play_step(&p, &(step){.T = 1, .accumulated = true});
    play_close(&p);
}

static void evictions(kvc_pool *pool, const kvc_spec *s, bool ragged, int32_t to)
{
    play p;
    play_open(&p, pool, s, 2, 3, 400);
    if (ragged) play_keep_scores(&p);
    play_step(&p, &(step){.T = 90, .queries = ragged ? 0 : 9, .pads = ragged, .accumulated = true});
    for (int round = 0; round < 5; round++) {
        play_evict(&p, round == 3 ? 1 : 6, ragged && round > 0, round % 2 ? to : -1);
        play_step(&p, &(step){.T = 1, .accumulated = true, .failures = round == 2});
        play_step(&p, &(step){.T = 40, .queries = 7, .window = round == 2 ? 64 : 0, .exec = &in_threads});
        if (round == 1) play_crop(&p, p.t->seen - 5);
    }
    play_close(&p);
}

/* The only page is full, and stays closed. */
static void one_full_page(kvc_pool *pool, int key, int value)
{
    play p;
    kvc_spec s = spec_of(2, 32, 32, 16, 0, KVC_RAW_F32, key, value);
    play_open(&p, pool, &s, 1, 2, 100);
    play_step(&p, &(step){.T = 20}); /* which seals it */
    play_crop(&p, 16);
    play_evict(&p, 4, false, -1);
    play_step(&p, &(step){.T = 1, .accumulated = true});
    play_step(&p, &(step){.T = 40});
    play_evict(&p, 0, false, -1); /* evicts everything, including raw pages */
    play_step(&p, &(step){.T = 3});
    play_close(&p);
}

/* A prompt of T tokens, then n equal steps. */
static void alike(kvc_pool *pool, const kvc_spec *s, int64_t group, int64_t T, int n, step how)
{
    play p;
    play_open(&p, pool, s, 1, group, T + n * how.T + 20);
    play_step(&p, &(step){.T = T});
    for (int i = 0; i < n; i++) play_step(&p, &how);
    play_close(&p);
}

/* Tokens are appended directly to sealed pages; the first call fills whole pages. No table has a raw page. */
static void direct(kvc_pool *pool, int raw, int key, int value)
{
    play p;
    kvc_spec s = {2, 32, 32, 16, 0, 0, raw, key, value, true};
    play_open(&p, pool, &s, 1, 2, 120);
    play_step(&p, &(step){.T = 48, .accumulated = true});
    play_step(&p, &(step){.T = 1});
    play_step(&p, &(step){.T = 47});
    play_close(&p);
}

/* The same call in one thread and in two is bit-identical. */
static void same_in_threads(kvc_pool *pool)
{
    kvc_spec s = spec_of(4, 64, 64, 16, 0, KVC_RAW_F32, KVC_INT8, KVC_INT4);
    play p;
    play_open(&p, pool, &s, 2, 2, 400);
    play_step(&p, &(step){.T = 380, .queries = 1});
    enum { Q = 2 * 8 * 64 };
    static float q[Q], out[2][Q], lse[2][16];
    for (int i = 0; i < Q; i++) q[i] = random_number(KVC_F32);
    for (int i = 0; i < 2; i++) {
        kvc_attend_args a = {
            .store = kvc_table_store(p.t), .q = {q, {512, 64, 64}, KVC_F32}, .query_heads = 8, .Tq = 1};
        a.seen = p.t->seen, a.scale = .125f, a.lse = lse[i];
        a.out = (kvc_dense){out[i], {512, 64, 64}, KVC_F32};
        if (i) a.exec = in_threads;
        OK(kvc_attend(&a));
    }
    CHECK(!memcmp(out[0], out[1], sizeof out[0]) && !memcmp(lse[0], lse[1], sizeof lse[0]));
    q[64 + 5] = NAN; /* of one row only */
    q[3 * 64] = INFINITY;
    kvc_attend_args a = {.store = kvc_table_store(p.t), .q = {q, {512, 64, 64}, KVC_F32}, .query_heads = 8, .Tq = 1};
    a.seen = p.t->seen, a.scale = .125f, a.lse = lse[1];
    a.out = (kvc_dense){out[1], {512, 64, 64}, KVC_F32};
    static float accumulated[2 * 4 * 400];
    a.accumulated = accumulated, a.accumulated_width = 400;
    OK(kvc_attend(&a));
    for (int r = 0; r < 16; r++) {
        bool bad = r == 1 || r == 3;
        CHECK(bad == (isnan(lse[1][r]) != 0));
        for (int d = 0; d < 64; d++)
            CHECK(bad ? isnan(out[1][r * 64 + d]) != 0 : out[1][r * 64 + d] == out[0][r * 64 + d]);
    }
    for (int h = 0; h < 8; h++) {
        double sum = 0;
        for (int i = 0; i < 400; i++) sum += accumulated[h * 400 + i];
        CHECK(fabs(sum - (h < 2 ? 1 : 2)) < 1e-2); /* a row of NaN adds nothing */
    }
    play_close(&p);
}

void test_attention(void)
{
    kvc_pool *pool;
    OK(kvc_pool_new(256 * MB, &pool));
    for (int format = 0; format < KVC_FORMATS; format++) every_format(pool, format);
    const kvc_spec specs[] = {
        spec_of(2, 48, 80, 16, 0, KVC_RAW_BF16, KVC_INT8, KVC_INT4),
        spec_of(1, 128, 32, 64, 20, KVC_RAW_F16, KVC_INT4, KVC_FP8_E4M3),
        spec_of(2, 64, 64, 16, 3, KVC_RAW_F32, KVC_RAW_F32, KVC_RAW_F32),
        spec_of(1, 32, 32, 32, 5, KVC_RAW_F16, KVC_KIVI2, KVC_MXFP4),
        {2, 32, 64, 32, 4, 0, KVC_RAW_F32, KVC_INT8, KVC_FP8_E4M3, true},
        {1, 64, 32, 16, 2, 40, KVC_RAW_BF16, KVC_INT8_ASYM, KVC_INT2, false},
        spec_of(1, 96, 32, 64, 0, KVC_RAW_BF16, KVC_INT8, KVC_INT8),
        spec_of(1, 32, 32, 128, 0, KVC_RAW_F32, KVC_INT4, KVC_INT8),
    };
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        if (i % 2) every_mask(pool, &specs[i], 0, 1 + (int64_t)i);
        every_mask(pool, &specs[i], i % 2 ? 24 : -32, 1 + (11 - (int64_t)i) % 6);
    }
    long_sequence(pool, KVC_INT4, KVC_INT4);
    long_sequence(pool, KVC_RAW_F32, KVC_INT2);
    const kvc_spec evicted[] = {
        spec_of(2, 32, 48, 16, 4, KVC_RAW_F32, KVC_INT8, KVC_INT4),
        spec_of(2, 64, 64, 32, 4, KVC_RAW_F16, KVC_INT4, KVC_INT8),
        spec_of(2, 32, 32, 16, 0, KVC_RAW_BF16, KVC_RAW_BF16, KVC_RAW_BF16),
        spec_of(3, 32, 32, 16, 20, KVC_RAW_F32, KVC_INT4_G32, KVC_KIVI4),
        spec_of(1, 32, 32, 128, 0, KVC_RAW_F32, KVC_INT8, KVC_INT8), /* more slots than bits in a word */
    };
    for (size_t i = 0; i < sizeof evicted / sizeof *evicted; i++) {
        int32_t to = KVC_INT4_TOKEN << 8 | KVC_INT2_ASYM;
        evictions(pool, &evicted[i], false, i == 2 ? -1 : to);
        evictions(pool, &evicted[i], true, -1);
    }
    one_full_page(pool, KVC_INT8, KVC_INT4_TOKEN);
    one_full_page(pool, KVC_INT4, KVC_INT8);
    kvc_spec plain = spec_of(1, 32, 32, 128, 0, KVC_RAW_F32, KVC_INT8, KVC_INT8); /* rows with adjacent slots */
    /* across a word of the mask */
    alike(pool, &plain, 2, 90, 3, (step){.T = 5, .queries = 2, .window = 50, .accumulated = true});
    kvc_spec sealed = spec_of(1, 32, 32, 16, 0, KVC_RAW_F32, KVC_INT8, KVC_INT4);
    alike(pool, &sealed, 1, 40, 10, (step){.T = 6, .pads = true, .accumulated = true});
    kvc_spec widest = spec_of(1, KVC_MAX_DIM, 512, 16, 0, KVC_RAW_BF16, KVC_INT4, KVC_INT4);
    alike(pool, &widest, 2, 36, 2, (step){.T = 1, .softcap = .5f});
    direct(pool, KVC_RAW_BF16, KVC_INT8, KVC_INT8);
    direct(pool, KVC_RAW_F16, KVC_INT8_ASYM, KVC_FP8_E5M2);
    same_in_threads(pool);
    kvc_pool_stats left;
    kvc_pool_get_stats(pool, &left);
    CHECK(left.slots == 0);
    kvc_pool_release(pool);
}
