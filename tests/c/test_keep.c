/* test_keep.c - queries of policies about stored tokens, compared with loops over all pairs of tokens. */
#include "harness.h"
#include "keep.h"
#include "table/table.h"

#include <math.h>

enum { B = 3, H = 4, N = 90, RUNS = 4 };

/* row, start and end of padding */
static const int64_t RUN[RUNS][3] = {{0, 3, 6}, {0, 40, 41}, {2, 0, 9}, {2, 60, 600}};

/* As from kvc_table_tokens: `heads` lines per row, seven eighths of it tokens, in random order. */
typedef struct stored {
    int32_t slots[B * H * N];
    int64_t positions[B * H * N], newest[B];
} stored;

static int64_t position(int64_t b, int64_t slot)
{
    int64_t before = slot;
    for (int i = 0; i < RUNS; i++)
        for (int64_t pad = RUN[i][1]; RUN[i][0] == b && pad < RUN[i][2]; pad++) before -= pad < slot;
    return before;
}

static bool is_pad(int64_t b, int64_t slot) { return position(b, slot + 1) == position(b, slot); }

static void scatter(stored *x, int64_t heads, int64_t apart)
{
    for (int64_t line = 0; line < B * heads; line++) {
        int32_t *slots = x->slots + line * N;
        int64_t b = line / heads, taken = 0;
        for (int i = 0; i < N; i++) slots[i] = -1;
        for (int64_t slot = 0; taken < 7 * N / 8; slot += apart) { /* at any index */
            int64_t i = random_below(N);
            while (slots[i] >= 0) i = (i + 1) % N;
            if (!is_pad(b, slot)) slots[i] = (int32_t)slot, taken++;
        }
        for (int64_t i = 0; i < N; i++) x->positions[line * N + i] = slots[i] < 0 ? -1 : position(b, slots[i]);
        x->newest[b] = position(b, N / 2 * apart);
    }
}

static void test_tokens(void)
{
    static stored want;
    static int32_t slots[B * H * N];
    static int64_t positions[B * H * N];
    for (int64_t heads = 1; heads <= H; heads += H - 1) {
        scatter(&want, heads, 1);
        int64_t rows[2 * B * H];
        for (int64_t i = 0; i < B * heads; i++) rows[2 * i] = N - 5, rows[2 * i + 1] = 11 + i;
        kvc_table t = {.batch = B, .table_heads = heads, .rows = rows, .slots = want.slots, .slot_capacity = N};
        kvc_table_tokens(&t, RUN[0], RUNS, N, slots, positions);
        for (int64_t i = 0; i < B * heads * N; i++) {
            bool there = i % N < N - 5 && want.slots[i] >= 0; /* nothing is stored past a row's last token */
            CHECK(slots[i] == (there ? want.slots[i] : -1) && positions[i] == (there ? want.positions[i] : -1));
        }
        t.slots = NULL;
        kvc_table_tokens(&t, NULL, 0, N, slots, positions);
        for (int64_t i = 0; i < B * heads * N; i++)
            CHECK(slots[i] == (i % N < N - 5 ? 11 + i / N + i % N : -1) && positions[i] == slots[i]);
        kvc_table_tokens(&t, RUN[0], RUNS, N, slots, positions);
        for (int64_t i = 0; i < B * heads * N; i++)
            CHECK(slots[i] < 0 ? positions[i] == -1 : positions[i] == position(i / N / heads, slots[i]));
    }
}

static void test_means(void)
{
    static stored x;
    static float scores[B * H * (N + 3)], out[B * H * N];
    int64_t real[B] = {N, 7, 2 * N};
    for (int i = 0; i < B * H * (N + 3); i++) scores[i] = (float)random_below(1000);
    for (int64_t heads = 1; heads <= H; heads += H - 1) {
        scatter(&x, heads, 1);
        kvc_table t = {
            .batch = B, .table_heads = heads, .spec = {.heads = H}, .scores = scores, .score_capacity = N + 3};
        OK(kvc_table_means(&t, x.positions, real, N, out));
        for (int64_t i = 0; i < B * H * N; i++) {
            int64_t b = i / N / H, at = x.positions[(heads == 1 ? b : i / N) * N + i % N];
            double queries = real[b] - at < 1 ? 1 : (double)(real[b] - at);
            double want = at < 0 ? 0 : scores[i / N * (N + 3) + i % N] / queries;
            CHECK(fabs(out[i] - want) <= 1e-6 * want);
        }
        FAILS(KVC_E_VALUE, "keeps scores", kvc_table_means(&t, x.positions, real, N + 4, out));
        t.scores = NULL;
        FAILS(KVC_E_VALUE, "keeps scores", kvc_table_means(&t, x.positions, real, N, out));
    }
}

static void test_smoothed(int64_t heads, int64_t apart, int64_t kernel, bool largest)
{
    static stored s;
    static float x[B * H * N], out[B * H * N];
    scatter(&s, heads, apart);
    for (int i = 0; i < B * H * N; i++) x[i] = (float)random_below(1000) - 300;
    kvc_tokens lines = {B, H, heads, N, s.slots, s.positions};
    int64_t n = 1;
    for (kvc_status status = KVC_E_MEMORY; status != KVC_OK; n++) {
        kvc_alloc_fail_at(n);
        status = kvc_smooth(&lines, x, s.newest, kernel, largest, out);
        kvc_alloc_fail_at(0);
        CHECK(status == KVC_OK || (status == KVC_E_MEMORY && n < 9));
    }
    for (int64_t r = 0; r < B * H; r++) {
        const int32_t *slots = s.slots + (heads == 1 ? r / H : r) * N;
        const int64_t *positions = s.positions + (heads == 1 ? r / H : r) * N;
        for (int64_t i = 0; i < N; i++) {
            double sum = 0, most = -INFINITY;
            for (int64_t j = 0; j < N && slots[i] >= 0; j++) {
                int64_t between = 0; /* tokens from i to j, in slot order */
                for (int64_t m = 0; m < N; m++)
                    between += slots[m] >= 0 && (slots[m] < slots[i] ? slots[m] >= slots[j] : slots[m] <= slots[j]) &&
                               slots[m] != slots[i];
                if (slots[j] < 0 || between > kernel / 2) continue;
                double y = positions[j] < s.newest[r / H] ? x[r * N + j] : 0;
                sum += y, most = y > most ? y : most;
            }
            double want = slots[i] < 0 ? 0 : largest ? most : sum / (double)kernel;
            CHECK(fabs(out[r * N + i] - want) <= 1e-3);
        }
    }
    FAILS(KVC_E_VALUE, "odd number", kvc_smooth(&lines, x, s.newest, kernel - 1, largest, out));
    FAILS(KVC_E_VALUE, "odd number", kvc_smooth(&lines, x, s.newest, -1, largest, out));
}

/* heads: number of separate decisions per row, each head or 1 for all; there are as many lines. */
static void test_kept(int64_t heads, int64_t line_heads, int64_t sinks, bool protects)
{
    static stored s;
    static float scores[B * H * N];
    static uint8_t protect[B * H * N], keep[B * H * N];
    int64_t budget[B * H];
    scatter(&s, line_heads, 2);
    for (int i = 0; i < B * H * N; i++)
        scores[i] = (float)random_below(heads == 1 ? 3000 : 9), protect[i] = !random_below(20);
    for (int64_t r = 0; r < B * heads; r++) budget[r] = r == 1 ? 0 : r == 2 ? 2 * N : 30 + r;
    kvc_tokens lines = {B, heads, line_heads, N, s.slots, s.positions};
    kvc_keep_args args = {H, sinks, scores, protects ? protect : NULL, budget, s.newest};
    kvc_alloc_fail_at(1);
    FAILS(KVC_E_MEMORY, "out of memory", kvc_keep_tokens(&lines, &args, keep));
    kvc_alloc_fail_at(0);
    OK(kvc_keep_tokens(&lines, &args, keep));
    for (int64_t r = 0; r < B * heads; r++) {
        int64_t b = r / heads, line = (line_heads == 1 ? b : r) * N;
        double score[N];
        bool sure[N];
        for (int64_t i = 0; i < N; i++) {
            int64_t at = s.positions[line + i];
            score[i] = scores[r * N + i];
            if (heads == 1) {
                score[i] = 0;
                for (int64_t h = 0; h < H; h++) score[i] += scores[(b * H + h) * N + i];
            }
            sure[i] = at >= 0 && (at < sinks || at >= s.newest[b] || (protects && protect[r * N + i]));
        }
        for (int64_t i = 0; i < N; i++) {
            int64_t before = 0; /* number of better tokens than i */
            for (int64_t j = 0; j < N; j++)
                before +=
                    s.slots[line + j] >= 0 && j != i &&
                    (sure[j] || score[j] > score[i] || (score[j] == score[i] && s.slots[line + j] > s.slots[line + i]));
            CHECK(keep[r * N + i] == (s.slots[line + i] >= 0 && (sure[i] || before < budget[r])));
        }
    }
    s.slots[0] = 0, s.positions[0] = sinks, s.newest[0] = 10 * N, scores[0] = NAN;
    args.protect = NULL;
    FAILS(KVC_E_VALUE, "NaN", kvc_keep_tokens(&lines, &args, keep));
}

void test_keep(void)
{
    test_tokens();
    test_means();
    test_smoothed(1, 1, 5, false);
    test_smoothed(H, 3, 1, true);
    test_smoothed(H, 60000, 7, true); /* slots of more than one radix digit */
    test_smoothed(1, 1, 2 * N + 1, false);
    for (int protects = 0; protects < 2; protects++) {
        test_kept(H, H, 4, protects);
        test_kept(H, 1, 0, protects);
        test_kept(1, 1, 4, protects);
    }
}
