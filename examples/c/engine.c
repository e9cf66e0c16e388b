/* engine.c - an engine with its own blocks, in C: requests of different lengths, chunked prefill together with decode steps,
 * one call of attention per step; K in int8 and V in int4, residual tokens raw in one more block per request.
 *
 *     make lib && cc examples/c/engine.c -Ibuild/c/include build/c/libkvcompress.a -lm -lpthread -o engine && ./engine
 *
 * The output of attention is compared with attention in double precision over the original K and V. */
#include <kvcompress/varlen.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { H = 2, G = 4, D = 64, PAGE = 64, PAGES = 2, BLOCKS = 18, WIDTH = 8, SLOTS = 4, CHUNK = 150, BUDGET = 256 };
enum { REQUESTS = 12, MOST = 700 };

typedef struct request {
    int prompt, answer, done; /* tokens: of the prompt, to generate, stored */
    int blocks[WIDTH], held;
    int raw; /* block of its residual tokens */
    float k[H][MOST][D], v[H][MOST][D];
} request;

static struct {
    uint8_t *memory; /* of all blocks */
    int64_t bytes;
    int free[BLOCKS], left;
} pool;

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

/* Allocates blocks for `tokens` tokens; returns 0 and changes nothing if there are not enough. */
static int give_blocks(request *r, int tokens)
{
    int need = (tokens + PAGES * PAGE - 1) / (PAGES * PAGE), raw = r->held == 0;
    if (need - r->held + raw > pool.left) return 0;
    if (raw) r->raw = pool.free[--pool.left];
    while (r->held < need) r->blocks[r->held++] = pool.free[--pool.left];
    return 1;
}

static void take_blocks(request *r)
{
    while (r->held) pool.free[pool.left++] = r->blocks[--r->held];
    pool.free[pool.left++] = r->raw;
}

/* Error of the output for a request's token at slot `at`, relative to the norm of attention over the
 * original K and V. */
static double error_of(const request *r, int at, const float *q, const float *out)
{
    double error = 0, all = 0;
    for (int hq = 0; hq < H * G; hq++) {
        double sum = 0, want[D] = {0};
        for (int t = 0; t <= at; t++) {
            double score = 0;
            for (int d = 0; d < D; d++) score += (double)q[hq * D + d] * r->k[hq / G][t][d];
            double p = exp(score / sqrt(D));
            sum += p;
            for (int d = 0; d < D; d++) want[d] += p * r->v[hq / G][t][d];
        }
        for (int d = 0; d < D; d++) {
            error += pow(out[hq * D + d] - want[d] / sum, 2);
            all += pow(want[d] / sum, 2);
        }
    }
    return sqrt(error / all);
}

/* A step of the running requests, with new[i] tokens each. Returns the maximum error. */
static double step(request **run, const int *new, int n, const kvc_geometry *g)
{
    static float q[BUDGET][H * G][D], k[BUDGET][H][D], v[BUDGET][H][D], out[BUDGET][H * G][D];
    static int32_t starts[SLOTS + 1], ends[SLOTS], table[SLOTS][WIDTH], raw[SLOTS], flags[SLOTS];
    int tokens = 0;
    for (int i = 0; i < n; i++) {
        request *r = run[i];
        for (int j = 0; j < new[i]; j++, tokens++)
            for (int h = 0; h < H * G; h++)
                for (int d = 0; d < D; d++) {
                    q[tokens][h][d] = random_normal();
                    if (h >= H) continue;
                    k[tokens][h][d] = r->k[h][r->done + j][d] = random_normal();
                    v[tokens][h][d] = r->v[h][r->done + j][d] = random_normal();
                }
        starts[i + 1] = tokens;
        ends[i] = r->done += new[i];
        for (int c = 0; c < r->held; c++) table[i][c] = r->blocks[c];
        raw[i] = r->raw;
    }
    kvc_varlen_args a = {.cache = {.data = pool.memory,
                                   .blocks = BLOCKS,
                                   .bytes = PAGES * g->page_bytes,
                                   .stride = pool.bytes,
                                   .pages = PAGES,
                                   .key = KVC_INT8,
                                   .value = KVC_INT4,
                                   .table = table[0],
                                   .table_width = WIDTH,
                                   .table_stride = WIDTH},
                         .batch = n,
                         .tokens = tokens,
                         .heads = H,
                         .query_heads = H * G,
                         .key_dim = D,
                         .value_dim = D,
                         .page_size = PAGE,
                         .query_start = starts,
                         .seq_lens = ends,
                         .scale = 1 / sqrtf(D),
                         .flags = flags};
    a.residual = a.cache; /* the same memory: a block is used for either */
    a.residual.bytes = g->residual_bytes, a.residual.pages = 1;
    a.residual.key = a.residual.value = KVC_RAW_F32;
    a.residual.table = raw, a.residual.table_width = a.residual.table_stride = 1;
    a.q = (kvc_dense){q, {0, D, H * G * D}, KVC_F32};
    a.k = (kvc_dense){k, {0, D, H * D}, KVC_F32};
    a.v = (kvc_dense){v, {0, D, H * D}, KVC_F32};
    a.out = (kvc_dense){out, {0, D, H * G * D}, KVC_F32};
    check(kvc_attend_varlen(&a));
    double worst = 0;
    for (int i = 0; i < n; i++) { /* the last token of each */
        int at = starts[i + 1] - 1;
        worst = fmax(worst, error_of(run[i], ends[i] - 1, q[at][0], out[at][0]));
        if (flags[i]) exit(1); /* NaN in k or v */
    }
    return worst;
}

int main(void)
{
    static request all[REQUESTS], *run[SLOTS];
    kvc_geometry g;
    double worst = 0;
    int running = 0, next = 0, steps = 0, mixed = 0, waited = 0, waiting = -1, tokens = 0;
    check(kvc_page_geometry(KVC_INT8, KVC_INT4, KVC_RAW_F32, H, D, D, PAGE, &g));
    pool.bytes = PAGES * g.page_bytes > g.residual_bytes ? PAGES * g.page_bytes : g.residual_bytes;
    pool.memory = aligned_alloc(64, (size_t)(BLOCKS * pool.bytes));
    if (!pool.memory) return 1;
    while (pool.left < BLOCKS) pool.free[pool.left] = pool.left, pool.left++;
    for (int i = 0; i < REQUESTS; i++) all[i].prompt = 20 + rand() % 500, all[i].answer = 1 + rand() % 150;
    while (running || next < REQUESTS) {
        int new[SLOTS], room = BUDGET, chunks = 0;
        while (running < SLOTS && next < REQUESTS) {
            request *r = &all[next];
            if (!give_blocks(r, r->prompt + r->answer)) {
                waited += waiting != next, waiting = next;
                break;
            }
            run[running++] = r, next++;
        }
        for (int i = 0; i < running; i++) { /* a chunk of the prompt, or the next token */
            int left = run[i]->prompt - run[i]->done;
            new[i] = left <= 0 ? 1 : left < CHUNK ? left : CHUNK;
            if (new[i] > room - (running - 1 - i)) new[i] = room - (running - 1 - i);
            room -= new[i], tokens += new[i], chunks += left > 0;
        }
        worst = fmax(worst, step(run, new, running, &g));
        steps++, mixed += chunks && chunks < running;
        for (int i = running - 1; i >= 0; i--)
            if (run[i]->done == run[i]->prompt + run[i]->answer) take_blocks(run[i]), run[i] = run[--running];
    }
    printf("%d requests, %d tokens in %d steps, %d of them mixed; %d had to wait for blocks\n", REQUESTS, tokens, steps,
           mixed, waited);
    printf("a page takes %lld bytes, raw %lld; worst error %.1e, blocks left %d of %d\n", (long long)g.page_bytes,
           (long long)g.residual_bytes, worst, pool.left, BLOCKS);
    free(pool.memory);
    return worst > 0.15 || pool.left != BLOCKS;
}
