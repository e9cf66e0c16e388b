/* test_args.c - invalid calls of the core are rejected before anything is written. */
#include "granular.h"
#include "play.h"

#include <math.h>

typedef struct good {
    play p;
    kvc_attend_args a;
    int64_t seals[2];
    float q[64], k[64], v[64], out[64], lse[4], accumulated[400];
    uint8_t real[2];
} good;

/* A valid call: 2 sequences of 40 tokens, 2 heads of 16 dims, one more token. */
static void open_good(good *g, kvc_pool *pool)
{
    kvc_spec s = {2, 16, 16, 16, 2, 0, KVC_RAW_F32, KVC_INT8, KVC_INT4, false};
    memset(g, 0, sizeof *g);
    play_open(&g->p, pool, &s, 2, 1, 60);
    play_step(&g->p, &(step){.T = 40});
    OK(kvc_table_plan(g->p.t, 1, NULL));
    g->a = (kvc_attend_args){
        .store = kvc_table_store(g->p.t), .query_heads = 2, .Tq = 1, .T = 1, .seen = 40, .scale = .25f};
    g->a.q = (kvc_dense){g->q, {32, 16, 16}, KVC_F32};
    g->a.k = (kvc_dense){g->k, {32, 16, 16}, KVC_F32};
    g->a.v = (kvc_dense){g->v, {32, 16, 16}, KVC_F32};
    g->a.out = (kvc_dense){g->out, {32, 16, 16}, KVC_F32};
    g->a.lse = g->lse;
    g->a.seals = kvc_table_seals(g->p.t, &g->a.n_seals);
    for (int i = 0; i < 64; i++) g->q[i] = g->k[i] = g->v[i] = .5f;
    OK(kvc_attend(&g->a));
}

/* Applies `change` to the call `a`, its store `s` and copies of its tables, expects the error, and
 * restores everything. */
#define BAD(status, text, change)                                                                                      \
    do {                                                                                                               \
        kvc_attend_args a = g.a;                                                                                       \
        kvc_store *s = &a.store;                                                                                       \
        int64_t rows[4], table[2 * 64];                                                                                \
        memcpy(rows, s->rows, sizeof rows);                                                                            \
        memcpy(table, s->table, (size_t)(2 * s->columns) * 8);                                                         \
        s->rows = rows, s->table = table;                                                                              \
        change;                                                                                                        \
        FAILS(status, text, kvc_attend(&a));                                                                           \
        CHECK(kvc_alloc_live() == live);                                                                               \
    } while (0)

static void test_attend_args(kvc_pool *pool)
{
    static good g;
    open_good(&g, pool);
    int64_t live = kvc_alloc_live(), extent = g.a.store.arena_bytes;
    int32_t slots[4] = {0};
    BAD(KVC_E_VALUE, "seen from 0", a.T = -1);
    BAD(KVC_E_VALUE, "seen from 0", a.seen = -1);
    BAD(KVC_E_VALUE, "seen from 0", a.T = (int64_t)INT32_MAX + 1);
    BAD(KVC_E_VALUE, "2^31 slots", a.seen = INT32_MAX);
    BAD(KVC_E_VALUE, "no more queries than slots", a.Tq = -1);
    BAD(KVC_E_VALUE, "no more queries than slots", a.Tq = 42);
    BAD(KVC_E_VALUE, "multiple of 2 KV heads", a.query_heads = 0);
    BAD(KVC_E_VALUE, "multiple of 2 KV heads", a.query_heads = 3);
    BAD(KVC_E_TYPE, "attend: q: expected a dtype", a.q.dtype = (kvc_dtype)30); /* ggml's bf16 */
    BAD(KVC_E_TYPE, "attend: k: expected a dtype", a.k.dtype = a.v.dtype = (kvc_dtype)30);
    BAD(KVC_E_TYPE, "attend: out: expected a dtype", a.out.dtype = (kvc_dtype)-1);
    BAD(KVC_E_TYPE, "one dtype for both", a.v.dtype = KVC_F16);
    BAD(KVC_E_VALUE, "softcap", a.softcap = -1);
    BAD(KVC_E_VALUE, "softcap", a.softcap = NAN);
    BAD(KVC_E_VALUE, "a window", a.window = -(int64_t)INT32_MAX - 1);
    BAD(KVC_E_VALUE, "at least 1 head", s->heads = 0);
    BAD(KVC_E_VALUE, "at least 1 head", (s->heads = (int64_t)INT32_MAX + 1, a.query_heads = s->heads));
    BAD(KVC_E_VALUE, "at least 1 head", s->batch = -1);
    BAD(KVC_E_VALUE, "at least 1 head", s->columns = -1);
    BAD(KVC_E_VALUE, "head dims", s->key_dim = 0);
    BAD(KVC_E_VALUE, "head dims", s->key_dim = KVC_MAX_DIM + 1);
    BAD(KVC_E_VALUE, "head dims", s->value_dim = 0);
    BAD(KVC_E_VALUE, "head dims", s->value_dim = KVC_MAX_DIM + 1);
    BAD(KVC_E_VALUE, "1 or H=2 rows", s->table_heads = 3);
    BAD(KVC_E_VALUE, "page_size", s->page_size = 0);
    BAD(KVC_E_VALUE, "page_size", s->page_size = 24);
    BAD(KVC_E_VALUE, "page_size", s->page_size = 272);
    BAD(KVC_E_VALUE, "sinks", s->sinks = -1);
    BAD(KVC_E_VALUE, "sinks", s->sinks = KVC_MAX_DIM + 1);
    BAD(KVC_E_VALUE, "rows: expected a length", rows[0] = -1);
    BAD(KVC_E_VALUE, "tokens in row 1", rows[2] = 100000);
    BAD(KVC_E_VALUE, "tokens in row 1", (s->batch = 1, s->table_heads = 2, rows[2] = 100000));
    BAD(KVC_E_VALUE, "rows: expected a first slot", rows[1] = -1);
    BAD(KVC_E_VALUE, "first slot from 0 to 2^31, got 2147483648 in row 1", rows[3] = (int64_t)INT32_MAX + 1);
    BAD(KVC_E_VALUE, "slots: expected at least 40", (s->slots = slots, s->slot_capacity = 2));
    BAD(KVC_E_VALUE, "names none", table[0] = KVC_NONE);
    BAD(KVC_E_VALUE, "names none", table[2] = kvc_entry(0, KVC_FORMATS, KVC_INT4));
    BAD(KVC_E_VALUE, "names none", table[2] = kvc_entry(0, KVC_INT8, KVC_FORMATS));
    BAD(KVC_E_VALUE, "names none", table[1] = table[1] | INT64_MIN);
    BAD(KVC_E_VALUE, "multiple of 32", table[1] = kvc_entry(0, KVC_MXFP4, KVC_INT8));
    BAD(KVC_E_VALUE, "multiple of 32", table[1] = kvc_entry(0, KVC_INT8, KVC_INT4_G32));
    BAD(KVC_E_VALUE, "inside the arena", table[1] = kvc_entry(extent, KVC_INT8, KVC_INT4));
    BAD(KVC_E_VALUE, "inside the arena", table[2] = kvc_entry(extent - 64, KVC_INT8, KVC_INT4));
    BAD(KVC_E_VALUE, "inside the arena", table[0] = kvc_entry(extent - 64, KVC_RAW_F32, KVC_RAW_F32));
    BAD(KVC_E_VALUE, "inside the arena", table[s->columns + 3] = kvc_entry(extent, KVC_RAW_F32, KVC_RAW_F32));
    BAD(KVC_E_VALUE, "plan the append first", (a.T = 1, s->columns = 3, rows[0] = rows[2] = 34, s->batch = 1));
    BAD(KVC_E_VALUE, "attention: expected a width of at least 41",
        (a.accumulated = g.accumulated, a.accumulated_width = 40));
    BAD(KVC_E_TYPE, "the dtype of the raw page", (a.k.dtype = KVC_BF16, a.v.dtype = KVC_BF16));
    BAD(KVC_E_VALUE, "only written whole", table[3] = kvc_entry(0, KVC_INT4, KVC_INT8));
    BAD(KVC_E_VALUE, "only written whole", table[3] = kvc_entry(0, KVC_INT8, KVC_INT4));
    int64_t raw = g.a.store.table[3], sealed = g.a.store.table[1];
    BAD(KVC_E_VALUE, "seals", (a.seals = (int64_t[]){sealed, sealed}, a.n_seals = 1));
    BAD(KVC_E_VALUE, "seals", (a.seals = (int64_t[]){KVC_NONE, sealed}, a.n_seals = 1));
    BAD(KVC_E_VALUE, "where to seal it, got entries",
        (a.seals = (int64_t[]){raw, kvc_entry(0, KVC_INT8, KVC_INT8), raw, kvc_entry(0, KVC_RAW_F16, KVC_INT8)},
         a.n_seals = 2));
    BAD(KVC_E_VALUE, "share no bytes",
        (a.seals = (int64_t[]){raw, kvc_entry(kvc_entry_offset(raw) + 64, KVC_INT8, KVC_INT8)}, a.n_seals = 1));
    BAD(KVC_E_VALUE, "seals", (a.seals = (int64_t[]){raw, kvc_entry(0, KVC_RAW_F16, KVC_INT8)}, a.n_seals = 1));
    BAD(KVC_E_VALUE, "seals", (a.seals = (int64_t[]){raw, kvc_entry(0, KVC_INT8, KVC_RAW_BF16)}, a.n_seals = 1));
    BAD(KVC_E_VALUE, "seals", (a.seals = (int64_t[]){kvc_entry(0, KVC_RAW_F32, KVC_INT8), sealed}, a.n_seals = 1));
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        float *at[] = {&g.k[35], &g.v[63]}, was = .5f;
        *at[0] = bad[i];
        BAD(KVC_E_VALUE, "attend: k: expected finite numbers, got NaN or Inf at sequence 1, head 0, token 0", (void)s);
        *at[0] = was;
        *at[1] = bad[i];
        BAD(KVC_E_VALUE, "attend: v: expected finite numbers, got NaN or Inf at sequence 1, head 1, token 0", (void)s);
        g.real[0] = 1; /* padding is not checked */
        kvc_attend_args a = g.a;
        a.real = g.real;
        OK(kvc_attend(&a));
        *at[1] = was;
    }
    OK(kvc_attend(&g.a));
    kvc_table_rollback(g.p.t);
    play_check(&g.p);
    play_close(&g.p);
}

/* No queries, no tokens, no sequences: not an error. */
static void test_nothing(kvc_pool *pool)
{
    static good g;
    open_good(&g, pool);
    kvc_attend_args a = g.a;
    a.T = a.Tq = 0, a.n_seals = 0;
    OK(kvc_attend(&a));
    a.store.batch = 0;
    a.T = a.Tq = 1;
    OK(kvc_attend(&a));
    kvc_table_rollback(g.p.t);
    play_close(&g.p);
}

static void test_compact_args(kvc_pool *pool)
{
    static good g;
    open_good(&g, pool);
    kvc_store s = kvc_table_store(g.p.t);
    const int64_t *table = g.p.t->entries;
    int64_t raw = table[3], sealed = table[1], other = kvc_entry(kvc_entry_offset(sealed), KVC_INT4, KVC_INT4);
    const struct {
        kvc_move move;
        const char *text;
    } bad[] = {
        {{0, sealed, 0, sealed, 1, 17}, "pages of 16 tokens"},
        {{0, KVC_NONE, 0, sealed, 1, 16}, "moves: from"},
        {{0, sealed, 0, KVC_NONE, 1, 16}, "moves: to"},
        {{0, sealed, -2, sealed, 1, 16}, "tokens from 0 to 15"},
        {{0, sealed, 16, sealed, 1, 16}, "tokens from 0 to 15"},
        {{0, sealed, 0, sealed, -1, 16}, "tokens from 0 to 15"},
        {{0, sealed, 0, sealed, 16, 16}, "tokens from 0 to 15"},
        {{0, sealed, -1, other, 0, 16}, "pages of one format"},
        {{0, sealed, -1, sealed, 0, 16}, "share no bytes"},
        {{0, sealed, -1, kvc_entry(kvc_entry_offset(sealed) + 64, kvc_entry_key(sealed), kvc_entry_value(sealed)), 0,
          16},
         "share no bytes"},
        {{0, sealed, 0, raw, 0, 16}, "single tokens to a quantized one"},
        {{0, kvc_entry(s.arena_bytes, KVC_INT8, KVC_INT8), 0, sealed, 0, 16}, "inside the arena"},
    };
    s.batch = 0;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kvc_move good = {0, sealed, 1, sealed, 1, 16}, last[2] = {good, bad[i].move}, first[2] = {bad[i].move, good};
        FAILS(KVC_E_VALUE, bad[i].text, kvc_compact(&s, last, 2, NULL));
        FAILS(KVC_E_VALUE, bad[i].text, kvc_compact(&s, first, 2, NULL));
    }
    OK(kvc_compact(&s, NULL, 0, NULL));
    int64_t bytes =
        s.heads * kvc_page_bytes(kvc_entry_key(sealed), kvc_entry_value(sealed), s.key_dim, s.value_dim, 16);
    int64_t beside = kvc_entry(kvc_entry_offset(sealed) + bytes, kvc_entry_key(sealed), kvc_entry_value(sealed));
    uint8_t *both = s.arena + kvc_entry_offset(sealed), *was = malloc((size_t)bytes * 2);
    memcpy(was, both, (size_t)bytes * 2);
    for (int i = 0; i < 2; i++) { /* adjacent is not overlapping */
        kvc_move there = {0, i ? beside : sealed, -1, i ? sealed : beside, 0, 16};
        OK(kvc_compact(&s, &there, 1, NULL));
        CHECK(!memcmp(both, both + bytes, (size_t)bytes) && !memcmp(both, was, (size_t)bytes));
    }
    memcpy(both, was, (size_t)bytes * 2);
    free(was);
    FAILS(KVC_E_VALUE, "width", kvc_read(&s, -1, NULL, NULL, NULL));
    kvc_dense even = {.dtype = KVC_F32}, odd = {.dtype = (kvc_dtype)30};
    FAILS(KVC_E_TYPE, "read: v", kvc_read(&s, 0, &even, &odd, NULL));
    kvc_table_rollback(g.p.t);
    play_check(&g.p);
    play_close(&g.p);
}

/* Codecs name the invalid argument. */
static void test_codec_args(void)
{
    float x[32] = {0};
    uint8_t codes[64], scales[64];
    FAILS(KVC_E_VALUE, "quantized format", kvc_quantize(KVC_RAW_F16, KVC_F32, x, 1, 16, codes, scales, NULL));
    FAILS(KVC_E_VALUE, "multiple of 16", kvc_quantize(KVC_INT8, KVC_F32, x, 1, 24, codes, scales, NULL));
    FAILS(KVC_E_VALUE, "code from 0", kvc_dequantize(-1, codes, scales, 1, 16, x, NULL));
    FAILS(KVC_E_VALUE, "code from 0", kvc_dequantize(KVC_FORMATS, codes, scales, 1, 16, x, NULL));
    kvc_dense d = {x, {16, 16, 16}, KVC_F32};
    CHECK(kvc_page_bytes(KVC_INT8, KVC_FORMATS, 16, 16, 16) == 0 && strstr(kvc_error(), "format"));
    CHECK(kvc_page_bytes(KVC_INT8, -1, 16, 16, 16) == 0 && kvc_page_bytes(KVC_INT8, KVC_INT8, 16, 0, 16) == 0);
    CHECK(kvc_page_bytes(KVC_INT8, KVC_INT8, 16, 16, 24) == 0 && strstr(kvc_error(), "page_size"));
    FAILS(KVC_E_VALUE, "page_size", kvc_pack(KVC_INT8, KVC_INT8, &d, &d, 1, 1, 24, 16, 16, 24, codes, NULL));
    FAILS(KVC_E_VALUE, "T", kvc_pack(KVC_INT8, KVC_INT8, &d, &d, 1, 1, 24, 16, 16, 16, codes, NULL));
    kvc_dense even = {x, {0, 0, 0}, KVC_F32}, odd = {x, {0, 0, 0}, (kvc_dtype)30};
    FAILS(KVC_E_TYPE, "pack: v: expected a dtype",
          kvc_pack(KVC_INT8, KVC_INT8, &even, &odd, 1, 1, 16, 16, 16, 16, codes, NULL));
    FAILS(KVC_E_TYPE, "pack: k: expected a dtype",
          kvc_pack(KVC_RAW_F32, KVC_INT8, &odd, &even, 1, 1, 16, 16, 16, 16, codes, NULL));
    FAILS(KVC_E_TYPE, "quantize: x", kvc_quantize(KVC_INT8, odd.dtype, d.data, 1, 16, codes, codes, NULL));
    FAILS(KVC_E_TYPE, "map_heads: out", kvc_map_heads(&d, 1, 1, 1, 16, d.data, 1, codes, odd.dtype, NULL));
    FAILS(KVC_E_TYPE, "quantize_by: x",
          kvc_quantize_by(&(kvc_grain){0, KVC_BY_HEAD, 0, 0, 1, 1, 1, 16}, &odd, NULL, NULL, 1, codes, codes, NULL,
                          NULL));
    FAILS(KVC_E_TYPE, "expected float16", kvc_pack(KVC_RAW_F16, KVC_INT8, &d, &d, 1, 1, 16, 16, 16, 16, codes, NULL));
    CHECK(!kvc_format_get(-1) && !kvc_format_get(KVC_FORMATS) && kvc_format_bits(KVC_FORMATS) == 0);
}

void test_arguments(void)
{
    kvc_pool *pool;
    OK(kvc_pool_new(64 * MB, &pool));
    test_attend_args(pool);
    test_nothing(pool);
    test_compact_args(pool);
    test_codec_args();
    kvc_pool_release(pool);
}
