/* decode.c - the cache of one layer in C: appends to int8 pages, attends, evicts (H2O) and frees them.
 *
 *     make lib && cc examples/c/decode.c -Ibuild/c/include build/c/libkvcompress.a -lm -lpthread -o decode && ./decode
 *
 * The output of attention is compared with attention in double precision over the original K and V. */
#include <kvcompress/keep.h>
#include <kvcompress/kvc.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { H = 2, G = 4, D = 64, PROMPT = 1000, STEPS = 200, BUDGET = 256, RECENT = 64, PAGE = 64, SINKS = 4 };
enum { MOST = PROMPT + STEPS };

static float keys[H][MOST][D], values[H][MOST][D]; /* all appended tokens, by slot */

static void check(kvc_status status)
{
    if (status == KVC_OK) return;
    fprintf(stderr, "kvcompress: %s\n", kvc_error());
    exit(1);
}

static float random_normal(void)
{
    double u = (rand() + 1.0) / (RAND_MAX + 2.0), v = (rand() + 1.0) / (RAND_MAX + 2.0);
    return (float)(sqrt(-2 * log(u)) * cos(2 * M_PI * v));
}

/* Appends T tokens (slots seen..) and attends with the last one; adds its attention to the table's scores (H2O). */
static void step(kvc_table *t, int64_t T, const float *q, float *out)
{
    static float k[H][MOST][D], v[H][MOST][D], lse[H * G], accumulated[H][MOST];
    int64_t first = t->seen;
    for (int h = 0; h < H; h++) {
        memcpy(k[h], keys[h][first], (size_t)T * sizeof k[h][0]);
        memcpy(v[h], values[h][first], (size_t)T * sizeof v[h][0]);
    }
    check(kvc_table_plan(t, T, NULL));
    kvc_attend_args a = {.store = kvc_table_store(t),
                         .query_heads = H * G,
                         .Tq = 1,
                         .T = T,
                         .seen = first,
                         .scale = 1 / sqrtf(D),
                         .lse = lse,
                         .accumulated = accumulated[0],
                         .accumulated_width = MOST};
    a.q = (kvc_dense){(void *)q, {H * G * D, D, D}, KVC_F32};
    a.k = (kvc_dense){k, {H * MOST * D, MOST * D, D}, KVC_F32};
    a.v = (kvc_dense){v, {H * MOST * D, MOST * D, D}, KVC_F32};
    a.out = (kvc_dense){out, {H * G * D, D, D}, KVC_F32};
    a.seals = kvc_table_seals(t, &a.n_seals);
    kvc_status status = kvc_attend(&a);
    if (status != KVC_OK) kvc_table_rollback(t); /* no token was stored */
    check(status);
    kvc_table_commit(t);
    for (int h = 0; h < H; h++)
        for (int64_t i = 0; i < t->rows[t->table_heads == H ? 2 * h : 0]; i++)
            t->scores[h * t->score_capacity + i] += accumulated[h][i];
}

/* Slot of a head's i-th stored token; -1: dead. */
static int32_t slot_of(const kvc_table *t, int h, int64_t i)
{
    int64_t line = t->table_heads == H ? h : 0;
    return t->slots ? t->slots[line * t->slot_capacity + i] : (int32_t)(t->rows[2 * line + 1] + i);
}

/* Each head keeps the BUDGET tokens with the most attention, including the sinks and the RECENT newest. */
static void evict(kvc_table *t)
{
    static float scores[H][MOST];
    static int32_t slots[H][MOST];
    static uint8_t protect[H][MOST], keep[H][MOST];
    int64_t budget[H], n, heads;
    for (int h = 0; h < H; h++) {
        int64_t stored = t->rows[t->table_heads == H ? 2 * h : 0];
        budget[h] = BUDGET;
        for (int64_t i = 0; i < MOST; i++) {
            slots[h][i] = i < stored ? slot_of(t, h, i) : -1;
            scores[h][i] = i < stored ? t->scores[h * t->score_capacity + i] : 0;
            protect[h][i] = slots[h][i] >= 0 && (slots[h][i] < SINKS || slots[h][i] >= t->seen - RECENT);
        }
    }
    check(kvc_choose(scores[0], slots[0], protect[0], budget, H, MOST, keep[0]));
    check(kvc_table_plan_evict(t, keep[0], NULL, H, MOST));
    const kvc_move *moves = kvc_table_moves(t, &n, &heads);
    kvc_store store = kvc_table_store(t);
    store.table_heads = heads == H ? 1 : H; /* after the eviction */
    kvc_status status = kvc_compact(&store, moves, n, NULL);
    if (status != KVC_OK) kvc_table_rollback(t);
    check(status);
    kvc_table_commit(t);
}

/* Maximum error of `out` relative to attention over the original K and V of the stored tokens. */
static double error_of(const kvc_table *t, const float *q, const float *out)
{
    double worst = 0, largest = 0;
    for (int hq = 0; hq < H * G; hq++) {
        int h = hq / G;
        int64_t stored = t->rows[t->table_heads == H ? 2 * h : 0];
        double sum = 0, want[D] = {0};
        for (int64_t i = 0; i < stored; i++) {
            int32_t slot = slot_of(t, h, i);
            double score = 0;
            if (slot < 0) continue;
            for (int d = 0; d < D; d++) score += (double)q[hq * D + d] * keys[h][slot][d];
            double p = exp(score / sqrt(D));
            sum += p;
            for (int d = 0; d < D; d++) want[d] += p * values[h][slot][d];
        }
        for (int d = 0; d < D; d++) {
            worst = fmax(worst, fabs(out[hq * D + d] - want[d] / sum));
            largest = fmax(largest, fabs(want[d] / sum));
        }
    }
    return worst / largest;
}

static void report(const char *when, const kvc_table *t, double error)
{
    kvc_table_stats s;
    kvc_table_get_stats(t, &s);
    long long bytes = (long long)(s.sealed_bytes + s.open_bytes + s.sink_bytes);
    long long dense = (long long)(s.seen * H * 2 * D * 4);
    printf("%-14s seen %4lld, kept %4lld tokens: %7lld bytes, in fp32 %7lld; error of attention %.1e\n", when,
           (long long)s.seen, (long long)s.kept, bytes, dense, error);
}

int main(void)
{
    static float q[H * G * D], out[H * G * D];
    kvc_pool *pool;
    kvc_table *table;
    kvc_spec spec = {.heads = H,
                     .key_dim = D,
                     .value_dim = D,
                     .page_size = PAGE,
                     .sinks = SINKS,
                     .raw = KVC_RAW_F32,
                     .key = KVC_INT8,
                     .value = KVC_INT8};
    const char *isa;
    double error, worst = 0;
    for (int h = 0; h < H; h++)
        for (int i = 0; i < MOST * D; i++) {
            keys[h][0][i] = random_normal();
            values[h][0][i] = random_normal();
        }
    check(kvc_isa(&isa));
    printf("kernels: %s\n", isa);
    check(kvc_pool_new(64 << 20, &pool));
    check(kvc_table_new(pool, &spec, 1, &table));
    check(kvc_table_keep_scores(table, true));
    for (int64_t n = PROMPT; table->seen < MOST; n = 1) {
        for (int i = 0; i < H * G * D; i++) q[i] = random_normal();
        step(table, n, q, out);
        error = error_of(table, q, out);
        worst = fmax(worst, error);
        if (n > 1 || table->seen == MOST) report(n > 1 ? "prompt" : "last step", table, error);
        if (table->seen % 64 == 0 || n > 1) evict(table);
        if (n > 1) report("after eviction", table, error);
    }
    kvc_table_free(table);
    kvc_pool_release(pool);
    printf("worst error %.1e, blocks left %lld\n", worst, (long long)kvc_alloc_live());
    return worst > 3e-2 || kvc_alloc_live() != 0;
}
