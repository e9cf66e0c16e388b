/* test_edges.c - limits of kvc_attend: the last valid value of each argument, and results that must never occur. */
#include "play.h"

#include <math.h>

static kvc_spec spec_of(int64_t heads, int64_t sinks, int raw, int key, int value)
{
    return (kvc_spec){heads, 32, 32, 16, sinks, 0, raw, key, value, false};
}

/* Items one after the other, in reverse order. */
static void backwards(int64_t n, void (*body)(int64_t, int64_t, void *), void *context)
{
    for (int64_t i = n - 1; i >= 0; i--) body(i, i + 1, context);
}

/* ---------------------------------------------------------------- where it is not finite */

static void not_finite(const kvc_dense *x, int64_t at, bool nan)
{
    static const uint16_t bits[][2] = {{0, 0}, {0xfc00, 0x7e00}, {0xff80, 0x7fc0}};
    if (x->dtype == KVC_F32)
        ((float *)x->data)[at] = nan ? NAN : -INFINITY;
    else
        ((uint16_t *)x->data)[at] = bits[x->dtype][nan];
}

/* The lowest sequence, head and token, and k before v, whatever the layout and whichever thread finds them first. */
static void test_not_finite(kvc_pool *pool)
{
    static const kvc_exec in_reverse = {backwards};
    enum { T = 130, H = 2, D = 32 };
    for (int round = 0; round < 24; round++) {
        play p;
        kvc_spec s = spec_of(H, 4, KVC_RAW_F32 + round / 8, KVC_INT8, KVC_INT8);
        play_open(&p, pool, &s, 2, 1, 200);
        kvc_attend_args a = play_plan_call(&p, T, 2, round % 2);
        uint8_t *real = play_room(2 * T, 1);
        int64_t lowest = 2 * H * T;
        bool in_k = false;
        for (int i = 0; i < 2 * T; i++) real[i] = random_below(3) > 0;
        for (int i = 0; i < 5; i++) {
            int64_t b = random_below(2), h = random_below(H), t = random_below(3) ? random_below(T) : T - 1;
            bool k = round % 3 == 0 && i > 2;
            const kvc_dense *x = k ? &a.k : &a.v;
            not_finite(x, play_at(x, b, h, t) + (i % 2 ? D - 1 : i % 4 ? 0 : random_below(D)), i % 3);
            int64_t rank = (b * H + h) * T + t;
            if (round % 4 >= 2 && !real[b * T + t]) continue; /* padding is not checked */
            if (k > in_k || (k == in_k && rank < lowest)) lowest = rank, in_k = k;
        }
        if (round % 4 >= 2) {
            kvc_table_rollback(p.t);
            OK(kvc_table_plan(p.t, T, real));
            a.real = real, a.store = kvc_table_store(p.t);
            a.seals = kvc_table_seals(p.t, &a.n_seals);
        }
        if (round % 5) a.exec = round % 5 < 3 ? in_reverse : in_threads;
        char text[200];
        snprintf(
            text, sizeof text,
            "attend: %s: expected finite numbers, got NaN or Inf at sequence %d, head %d, token %d; nothing was stored",
            in_k ? "k" : "v", (int)(lowest / T / H), (int)(lowest / T % H), (int)(lowest % T));
        int64_t live = kvc_alloc_live();
        if (lowest == 2 * H * T)
            OK(kvc_attend(&a));
        else
            FAILS(KVC_E_VALUE, text, kvc_attend(&a));
        CHECK(kvc_alloc_live() == live && (lowest == 2 * H * T || isnan(a.lse[0])));
        kvc_table_rollback(p.t);
        play_end_call(&a);
        free(real);
        play_close(&p);
    }
}

/* ---------------------------------------------------------------- the last valid values */

static void test_limits(kvc_pool *pool)
{
    play p;
    kvc_spec s = spec_of(2, 2, KVC_RAW_F32, KVC_INT8, KVC_INT8);
    play_open(&p, pool, &s, 2, 1, 80);
    play_step(&p, &(step){.T = 40});
    kvc_attend_args good = play_plan_call(&p, 1, 41, false);
#define TAKES(change)                                                                                                  \
    do {                                                                                                               \
        kvc_attend_args a = good;                                                                                      \
        int64_t rows[4];                                                                                               \
        memcpy(rows, a.store.rows, sizeof rows);                                                                       \
        a.store.rows = rows;                                                                                           \
        change;                                                                                                        \
        OK(kvc_attend(&a));                                                                                            \
    } while (0)
    int32_t slots[80];
    float *accumulated = play_poison(2 * 2 * 41, sizeof *accumulated);
    for (int i = 0; i < 80; i++) slots[i] = i % 40;
    TAKES((void)0);
    TAKES(a.seen = INT32_MAX - 1);
    TAKES(rows[1] = INT32_MAX);
    TAKES(a.window = -INT32_MAX);
    TAKES(a.window = INT64_MAX / 2);
    TAKES((a.store.slots = slots, a.store.slot_capacity = 40));
    TAKES((a.accumulated = accumulated, a.accumulated_width = 41));
    kvc_attend_args none = good; /* without sequences, only the limits are checked */
    none.store.batch = 0, none.n_seals = 0;
    TAKES((a = none, a.seen = 0, a.T = INT32_MAX));
    TAKES((a = none, a.store.heads = INT32_MAX, a.query_heads = INT32_MAX));
    TAKES((a = none, a.store.heads = 1));
    TAKES((a = none, a.store.columns = 0));
    TAKES((a = none, a.store.key_dim = 1, a.store.value_dim = 1));
    TAKES((a = none, a.store.key_dim = KVC_MAX_DIM, a.store.value_dim = KVC_MAX_DIM));
    TAKES((a = none, a.store.page_size = KVC_MAX_PAGE, a.store.sinks = KVC_MAX_PAGE));
    TAKES((a = none, a.store.page_size = KVC_TILE, a.store.sinks = 0));

    /* The arena may end with the last page. */
    int64_t end = 0, used = 4, B = p.batch;
    for (int64_t b = 0; b < B; b++)
        for (int64_t c = 0; c < used; c++) {
            int64_t e = p.t->entries[b * p.t->columns + c];
            int64_t bytes = 2 * kvc_page_bytes(kvc_entry_key(e), kvc_entry_value(e), 32, 32, 16);
            if (kvc_entry_offset(e) + bytes > end) end = kvc_entry_offset(e) + bytes;
        }
    TAKES(a.store.arena_bytes = end);
    good.store.arena_bytes = end - 1;
    FAILS(KVC_E_VALUE, "inside the arena", kvc_attend(&good));
    free(accumulated);
    kvc_table_rollback(p.t);
    play_check(&p);
    play_end_call(&good);
    play_close(&p);
}

/* A sink page is laid out for its own number of tokens, even if all pages have one format. */
static void test_sink_page(kvc_pool *pool)
{
    play p;
    kvc_spec s = spec_of(1, 20, KVC_RAW_F32, KVC_RAW_F32, KVC_RAW_F32);
    play_open(&p, pool, &s, 2, 1, 80);
    play_step(&p, &(step){.T = 60});
    kvc_attend_args a = play_plan_call(&p, 1, 1, false);
    int64_t columns = a.store.columns, page = kvc_page_bytes(KVC_RAW_F32, KVC_RAW_F32, 32, 32, 16);
    int64_t *table = play_own_table(&a);
    table[columns] = kvc_entry(a.store.arena_bytes - page, KVC_RAW_F32, KVC_RAW_F32);
    FAILS(KVC_E_VALUE, "(column 0)", kvc_attend(&a));
    table[columns] = p.t->entries[columns];
    table[columns + 1] = kvc_entry(a.store.arena_bytes - page, KVC_RAW_F32, KVC_RAW_F32);
    OK(kvc_attend(&a));
    table[columns + 1] += 1 << 16;
    FAILS(KVC_E_VALUE, "(column 1)", kvc_attend(&a));
    kvc_table_rollback(p.t);
    free(table);
    play_end_call(&a);
    play_close(&p);
}

/* What a column accepts: formats that take single tokens anywhere, others only if the call fills the page from its
 * first token. */
static void test_targets(kvc_pool *pool)
{
    play p;
    kvc_spec s = spec_of(2, 2, KVC_RAW_F32, KVC_INT8, KVC_INT8);
    play_open(&p, pool, &s, 1, 1, 80);
    play_step(&p, &(step){.T = 40}); /* columns from 2, 18, 34, 50, 66 */
    static const struct {
        int64_t T, column;
        int key, value;
        const char *text; /* NULL: accepted */
    } cases[] = {
        {1, 3, KVC_INT8, KVC_FP8_E5M2, NULL},
        {1, 3, KVC_INT4_TOKEN, KVC_INT8, "column 3 that takes single tokens, got int4_token, int8"},
        {10, 3, KVC_INT8, KVC_INT2, "column 3 that takes single tokens, got int8, int2"},
        {25, 4, KVC_INT4, KVC_INT8, "column 4 that takes single tokens"},
        {26, 4, KVC_INT4, KVC_INT4, NULL},
        {27, 4, KVC_KIVI2, KVC_INT2, NULL},
        {1, 3, KVC_RAW_F16, KVC_INT8, "raw page at column 3"},
        {1, 3, KVC_INT8, KVC_RAW_BF16, "raw page at column 3"},
        {1, 3, KVC_INT8, KVC_RAW_F32, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvc_attend_args a = play_plan_call(&p, cases[i].T, 1, false);
        int64_t *table = play_own_table(&a);
        int64_t at = kvc_entry_offset(table[cases[i].column]);
        int64_t room, bytes = 2 * kvc_page_bytes(KVC_RAW_F32, KVC_RAW_F32, 32, 32, 16); /* enough for all */
        OK(kvc_pool_alloc(pool, bytes, &room));
        memset(kvc_pool_base(pool) + room, 0, (size_t)bytes);
        table[cases[i].column] = kvc_entry(room, cases[i].key, cases[i].value);
        a.store.arena_bytes = kvc_pool_extent(pool);
        bool other = cases[i].text && !strncmp(cases[i].text, "raw", 3);
        if (!cases[i].text)
            OK(kvc_attend(&a));
        else
            FAILS(other ? KVC_E_TYPE : KVC_E_VALUE, cases[i].text, kvc_attend(&a));
        const char *name = kvc_format_get(kvc_format_is_raw(cases[i].key) ? cases[i].key : cases[i].value)->name;
        char dtype[100];
        snprintf(dtype, sizeof dtype, "(%s), got %s", name, kvc_format_get(KVC_RAW_F32)->name);
        if (other) CHECK(strstr(kvc_error(), dtype));
        kvc_pool_unref(pool, room);
        CHECK(at != room);
        kvc_table_rollback(p.t);
        free(table);
        play_end_call(&a);
    }
    play_check(&p);
    play_close(&p);
}

/* ---------------------------------------------------------------- results */

/* Every page is sealed and none is raw (with sinks, only their page): the kernels' inputs are those of
 * one format only. */
static void test_sealed_alone(kvc_pool *pool, int64_t sinks, int key, int value)
{
    play p;
    kvc_spec s = spec_of(2, sinks, KVC_RAW_BF16, key, value);
    uint8_t keep[60] = {0};
    int64_t n, heads, closed = sinks + 32;
    int k_dims = kvc_format_get(key)->dim_multiple, v_dims = kvc_format_get(value)->dim_multiple;
    s.key_dim = s.key_dim > k_dims ? s.key_dim : k_dims;
    s.value_dim = s.value_dim > v_dims ? s.value_dim : v_dims;
    play_open(&p, pool, &s, 1, 3, 100);
    play_step(&p, &(step){.T = closed + 21});
    memset(keep, 1, (size_t)closed);
    for (int64_t h = 0; h < 2; h++) memset(p.live + h * p.capacity + closed, 0, 21);
    OK(kvc_table_plan_evict(p.t, keep, NULL, 1, closed + 21));
    kvc_table_moves(p.t, &n, &heads);
    CHECK(n == 0);
    kvc_table_commit(p.t);
    CHECK(p.t->rows[0] == closed);
    play_step(&p, &(step){.T = 0, .queries = 2, .accumulated = true});
    play_step(&p, &(step){.T = 0, .queries = 1, .accumulated = true, .wild = true});
    play_close(&p);
}

/* Decoded values beyond the range of fp16 are clamped to its largest number. */
static void test_largest(kvc_pool *pool)
{
    play p;
    kvc_spec s = spec_of(1, 0, KVC_RAW_F16, KVC_INT8, KVC_INT8);
    play_open(&p, pool, &s, 1, 1, 100);
    kvc_attend_args a = play_plan_call(&p, 53, 1, false);
    for (int64_t i = 0; i < 53 * 32; i++) ref_put(KVC_F16, a.v.data, i, i % 2 ? 65504.f : -65504.f);
    OK(kvc_attend(&a));
    kvc_table_commit(p.t);
    play_end_call(&a);
    double row[KVC_MAX_DIM];
    play_row(&p, play_entry(&p, 0, 0, 3), 0, 3, 0, row);
    CHECK(row[1] > 65520); /* otherwise nothing is tested */
    a = play_plan_call(&p, 0, 20, false);
    OK(kvc_attend(&a));
    for (int64_t i = 0; i < 20 * 32; i++)
        CHECK(fabs(ref_element(KVC_F16, a.out.data, i) - (i % 2 ? 65504 : -65504)) <= 32);
    kvc_table_rollback(p.t);
    play_end_call(&a);
    play_close(&p);
}

/* Scores that overflow in either direction: NaN for that query, no effect on the accumulated attention of others. */
static void test_overflow(kvc_pool *pool, float q)
{
    play p;
    kvc_spec s = spec_of(1, 0, KVC_RAW_F32, KVC_RAW_F32, KVC_INT8);
    float accumulated[100];
    play_open(&p, pool, &s, 1, 1, 100);
    kvc_attend_args a = play_plan_call(&p, 40, 3, false);
    for (int64_t i = 0; i < 40 * 32; i++) ((float *)a.k.data)[i] = ((float *)a.v.data)[i] = 1;
    for (int64_t d = 0; d < 32; d++) ((float *)a.q.data)[32 + d] = q;
    memset(accumulated, 0xff, sizeof accumulated);
    a.accumulated = accumulated, a.accumulated_width = 100;
    OK(kvc_attend(&a));
    CHECK(isnan(a.lse[1]) && fabs(a.lse[0] - log(38)) < 1e-5 && fabs(a.lse[2] - log(40)) < 1e-5);
    for (int64_t d = 0; d < 32; d++)
        CHECK(isnan(((float *)a.out.data)[32 + d]) && fabsf(((float *)a.out.data)[64 + d] - 1) < .02f);
    for (int i = 0; i < 100; i++) CHECK(fabs(accumulated[i] - (i < 38 ? 1. / 38 : 0) - (i < 40 ? 1. / 40 : 0)) < 1e-6);
    kvc_table_rollback(p.t);
    play_end_call(&a);
    play_close(&p);
}

/* Only some tokens of a page are moved: the rest is filled with copies. K is re-encoded and V copied as codes; then
 * vice versa. */
static void test_parts(kvc_pool *pool)
{
    for (int way = 0; way < 2; way++) {
        play p;
        kvc_spec s = spec_of(2, 0, KVC_RAW_F32, KVC_INT8, KVC_INT8);
        play_open(&p, pool, &s, 1, 1, 100);
        play_step(&p, &(step){.T = 53});
        int64_t from = play_entry(&p, 0, 0, 16), at, H = 2;
        int key = way ? KVC_INT8 : KVC_INT4, value = way ? KVC_INT4 : KVC_INT8;
        OK(kvc_pool_alloc(pool, H * kvc_page_bytes(key, value, 32, 32, 16), &at));
        memset(kvc_pool_base(pool) + at, 0xff, (size_t)(H * kvc_page_bytes(key, value, 32, 32, 16)));
        int64_t to = kvc_entry(at, key, value);
        const kvc_move moves[] = {{0, from, 2, to, 5, 16}, {0, from, 9, to, 3, 16}, {0, from, 15, to, 15, 16}};
        kvc_store store = kvc_table_store(p.t);
        store.batch = 0;
        OK(kvc_compact(&store, moves, 3, &in_threads));
        for (int64_t h = 0; h < H; h++)
            for (int i = 0; i < 3; i++)
                for (int side = 0; side < 2; side++) {
                    double was[KVC_MAX_DIM], is[KVC_MAX_DIM], off = 0, all = 0;
                    const uint8_t *page = kvc_pool_base(pool) + at + h * kvc_page_bytes(key, value, 32, 32, 16);
                    play_row(&p, from, h, 16 + moves[i].from_token, side, was);
                    ref_page_row(page, side, key, value, 32, 32, 16, moves[i].to_token, is);
                    for (int d = 0; d < 32; d++) off += (is[d] - was[d]) * (is[d] - was[d]), all += was[d] * was[d];
                    CHECK(side == way ? off == 0 : off < .09 * all && off > 0); /* bounds as in test_codec.c */
                }
        kvc_pool_unref(pool, at);
        play_close(&p);
    }
}

/* A call with nothing to do allocates only its rows and the copy of the table. */
static void test_idle(kvc_pool *pool)
{
    play p;
    kvc_spec s = spec_of(1, 0, KVC_RAW_F32, KVC_INT8, KVC_INT8);
    play_open(&p, pool, &s, 1, 1, 100);
    play_step(&p, &(step){.T = 40});
    kvc_attend_args a = play_plan_call(&p, 0, 0, false);
    kvc_alloc_fail_at(3);
    OK(kvc_attend(&a));
    kvc_alloc_fail_at(0);
    kvc_table_rollback(p.t);
    play_end_call(&a);
    play_close(&p);
}

void test_edges(void)
{
    kvc_pool *pool;
    OK(kvc_pool_new(64 * MB, &pool));
    test_not_finite(pool);
    test_limits(pool);
    test_sink_page(pool);
    test_targets(pool);
    for (int format = KVC_RAW_BF16 + 1; format < KVC_FORMATS; format++) {
        test_sealed_alone(pool, 0, format, KVC_INT8);
        test_sealed_alone(pool, 0, KVC_INT8, format);
        test_sealed_alone(pool, 0, format, format);
    }
    test_sealed_alone(pool, 4, KVC_INT8, KVC_INT8); /* except the sinks, which are raw */
    test_largest(pool);
    test_overflow(pool, 3e38f);
    test_overflow(pool, -3e38f);
    test_idle(pool);
    test_parts(pool);
    kvc_pool_stats left;
    kvc_pool_get_stats(pool, &left);
    CHECK(left.slots == 0);
    kvc_pool_release(pool);
}
