/* page_cycles.c - times the attention kernels of a level on one page of 64 tokens x 128 dims in L1, for 1 to 16 query rows:
 * cycles of K's scores / of V's sums, each the best of 7 times CALLS. 4-bit and 2-bit pages take one limb of q and coarse
 * weights, as in long sequences. Usage: page_cycles LEVEL. */
#include "base/dispatch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TOKENS = 64, DIM = 128, ROWS = KVC_WIDE, CALLS = 4000, TURNS = 7 };

static _Alignas(64) uint8_t tiles[2 * TOKENS * DIM], room[2 * TOKENS * DIM], meta[4 * (TOKENS + DIM)];
static _Alignas(64) float q[ROWS * DIM], p[ROWS * TOKENS], s[ROWS * TOKENS], o[ROWS * DIM], step[ROWS];
static _Alignas(64) int8_t limbs[2 * ROWS * DIM], one[2 * ROWS * DIM];
static _Alignas(64) uint16_t half[2 * ROWS * DIM];
static int32_t sum[ROWS], one_sum[ROWS], low_sum[ROWS];

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Cycles a second, by a chain of multiplications of three cycles each: additions may take none. */
static double clock_rate(void)
{
    uint64_t x = 3;
    double begin = now();
    for (int i = 0; i < 100000000; i++) {
        x *= x;
        __asm__ volatile("" : "+r"(x));
    }
    return 3e8 / (now() - begin);
}

static bool is_wide(const kvc_kernels *kernels, int format, int rows)
{
    return kernels->wide && kernels->wide->qk[format] && rows >= kernels->wide->rows[format];
}

/* Best seconds of a call for all rows, of K's kernel (key) or V's. */
static double seconds(const kvc_kernels *kernels, int format, bool key, const kvc_query *query, int rows)
{
    bool wide = is_wide(kernels, format, rows);
    int at_once = wide ? ROWS : KVC_ROWS;
    kvc_digits digits = kvc_format_rotated(format) ? KVC_P_BYTE : KVC_P_BF16;
    double best = 1e9;
    for (int turn = 0; turn < TURNS; turn++) {
        double begin = now();
        for (int call = 0; call < CALLS; call++)
            for (int r = 0; r < rows; r += at_once) {
                int n = rows - r < at_once ? rows - r : at_once;
                kvc_qk_args k = {tiles, meta,           query,  r,    n,     TOKENS, TOKENS / KVC_TILE,
                                 0,     s + r * TOKENS, TOKENS, room, false, rows};
                kvc_pv_args v = {tiles,  meta, p + r * TOKENS, TOKENS, n,     DIM, TOKENS, TOKENS,
                                 digits, 0,    o + r * DIM,    room,   false, rows};
                if (key)
                    (wide ? kernels->wide->qk[format] : kernels->qk[format])(&k);
                else
                    (wide ? kernels->wide->pv[format] : kernels->pv[format])(&v);
            }
        double took = (now() - begin) / CALLS;
        best = took < best ? took : best;
    }
    return best;
}

int main(int argc, char **argv)
{
    const struct {
        const char *name;
        int format;
    } formats[] = {{"raw_bf16", KVC_RAW_BF16},
                   {"int8", KVC_INT8},
                   {"fp8_e4m3", KVC_FP8_E4M3},
                   {"int4", KVC_INT4},
                   {"int2", KVC_INT2}};
    const kvc_kernels *kernels = NULL;
    for (const kvc_level *level = kvc_levels; argc == 2 && level->kernels; level++)
        if (!strcmp(level->kernels->name, argv[1]) && level->usable()) kernels = level->kernels;
    if (!kernels) return fprintf(stderr, "expected a LEVEL that this CPU has\n"), 2;
    for (size_t i = 0; i < sizeof tiles; i++) tiles[i] = (uint8_t)(i * 37 % 120); /* no NaN */
    for (size_t i = 0; i < sizeof meta; i++) meta[i] = i % 2 ? 0x3c : 0;          /* ones in fp16 */
    for (int i = 0; i < ROWS * DIM; i++) q[i] = (float)(i % 17 - 8) * 1e-6f;      /* one limb adds no noise */
    for (int i = 0; i < ROWS * TOKENS; i++) p[i] = (float)(i % 13 + 1) / 13;
    double rate = clock_rate();
    printf("%s, cycles of a page, K / V; %.2f GHz\n%-10s", kernels->name, rate * 1e-9, "rows");
    for (int rows = 1; rows <= ROWS; rows *= 2) printf("%16d", rows);
    if (kernels->wide) kernels->wide->begin();
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        printf("\n%-10s", formats[i].name);
        for (int rows = 1; rows <= ROWS; rows *= 2) {
            int padded = rows <= ROWS / 2 ? ROWS / 2 : ROWS; /* see kvc_wide_kernels */
            kvc_query_form form = {.q = q,
                                   .hi = limbs,
                                   .lo = limbs + padded * DIM,
                                   .step = step,
                                   .sum = sum,
                                   .one = one,
                                   .one_sum = one_sum,
                                   .low_sum = low_sum,
                                   .half = half,
                                   .rest = half + padded * DIM,
                                   .unit = 1};
            kernels->limbs(&form, rows, DIM);
            if (kernels->halves) kernels->halves(&form, rows, DIM);
            form.whole = true; /* as q of bf16 is */
            kvc_query query = {.rows = rows, .dim = DIM, .coarse = true};
            for (int space = 0; space < KVC_SPACES; space++) query.forms[space] = form;
            query.form = query.forms;
            printf("%8.0f / %5.0f", rate * seconds(kernels, formats[i].format, true, &query, rows),
                   rate * seconds(kernels, formats[i].format, false, &query, rows));
        }
    }
    puts("");
    if (kernels->wide) kernels->wide->end();
    return 0;
}
