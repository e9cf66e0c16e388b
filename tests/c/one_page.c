/* one_page.c - runs a level's attention kernels on one page of 64 tokens and 4 query rows, to count instructions: see
 * tests/support/aarch64_budgets.py. Usage: one_page LEVEL FORMAT CALLS. */
#include "base/dispatch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 64, DIM = 128, ROWS = KVC_ROWS };

static _Alignas(64) uint8_t tiles[2 * TOKENS * DIM], meta[4 * (TOKENS + DIM)];
static _Alignas(64) float q[ROWS * DIM], p[ROWS * TOKENS], s[ROWS * TOKENS], o[ROWS * DIM], step[ROWS];
static _Alignas(64) int8_t limbs[2 * ROWS * DIM], one[ROWS * DIM];
static _Alignas(64) uint16_t half[ROWS * DIM], rest[ROWS * DIM];
static int32_t sum[ROWS], one_sum[ROWS], low_sum[ROWS];

static int format_of(const char *name)
{
#define KVC_FORMAT(ID, text, bits, coding, scale, group, keys, rotated, dim_multiple, about)                           \
    if (!strcmp(name, text)) return KVC_##ID;
#include "formats.def"
#undef KVC_FORMAT
    return -1;
}

int main(int argc, char **argv)
{
    const kvc_kernels *kernels = NULL;
    for (const kvc_level *level = kvc_levels; argc == 4 && level->kernels; level++)
        if (!strcmp(level->kernels->name, argv[1])) kernels = level->kernels;
    int format = argc == 4 ? format_of(argv[2]) : -1;
    if (!kernels || format < 0 || !kernels->qk[format]) return fprintf(stderr, "expected LEVEL FORMAT CALLS\n"), 2;
    for (size_t i = 0; i < sizeof tiles; i++) tiles[i] = (uint8_t)(i * 37 % 120); /* no NaN */
    for (size_t i = 0; i < sizeof meta; i++) meta[i] = i % 2 ? 0x3c : 0;          /* ones in fp16 */
    for (int i = 0; i < ROWS * DIM; i++) q[i] = (float)(i % 17) - 8;
    for (int i = 0; i < ROWS * TOKENS; i++) p[i] = (float)(i % 13 + 1) / 13;
    kvc_query_form form = {
        .q = q, .hi = limbs, .lo = limbs + ROWS * DIM, .step = step, .sum = sum, .one = one, .one_sum = one_sum};
    form.low_sum = low_sum, form.half = half, form.rest = rest, form.unit = 1;
    kernels->limbs(&form, ROWS, DIM);
    if (kernels->halves) form.whole = kernels->halves(&form, ROWS, DIM);
    kvc_query query = {.rows = ROWS, .dim = DIM, .forms = {form}};
    for (int i = 1; i < KVC_SPACES; i++) query.forms[i] = form;
    query.form = &query.forms[0];
    kvc_qk_args k = {tiles, meta, &query, 0, ROWS, TOKENS, TOKENS / KVC_TILE, 0, s, TOKENS, NULL, false, ROWS};
    kvc_pv_args v = {tiles, meta, p, TOKENS, ROWS, DIM, TOKENS, TOKENS, KVC_P_BF16, 0, o, NULL, false, ROWS};
    for (int i = 0, calls = atoi(argv[3]); i < calls; i++) {
        kernels->qk[format](&k);
        kernels->pv[format](&v);
    }
    return 0;
}
