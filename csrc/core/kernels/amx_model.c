/* amx_model.c - the tile instructions in plain C, for tests on machines without them (see amx.h). */
#ifdef KVC_AMX_MODEL
#include "amx.h"

#include "base/floats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 16

static _Thread_local struct {
    bool configured;
    uint8_t tile[8][ROWS][KVC_AMX_BYTES];
} state;

/* Without a configuration, the processor faults. */
static void check(void)
{
    if (!state.configured) abort();
}

void kvc_amx_configure(const void *config)
{
    const uint8_t *c = config;
    for (int i = 0; i < 8; i++) /* assumed by the kernels */
        if (c[0] != 1 || c[16 + 2 * i] != KVC_AMX_BYTES || c[17 + 2 * i] || c[48 + i] != ROWS) abort();
    memset(&state, 0, sizeof state);
    state.configured = true;
}

void kvc_amx_release(void) { memset(&state, 0, sizeof state); }

void kvc_amx_load(int tile, const void *at, int64_t stride)
{
    check();
    for (int r = 0; r < ROWS; r++) memcpy(state.tile[tile][r], (const uint8_t *)at + r * stride, KVC_AMX_BYTES);
}

void kvc_amx_store(int tile, void *at, int64_t stride)
{
    check();
    for (int r = 0; r < ROWS; r++) memcpy((uint8_t *)at + r * stride, state.tile[tile][r], KVC_AMX_BYTES);
}

void kvc_amx_zero(int tile)
{
    check();
    memset(state.tile[tile], 0, sizeof state.tile[tile]);
}

void kvc_amx_bytes(int c, int a, int b, bool signed_a)
{
    check();
    for (int m = 0; m < ROWS; m++)
        for (int n = 0; n < 16; n++) {
            uint32_t sum; /* wraps */
            memcpy(&sum, state.tile[c][m] + 4 * n, 4);
            for (int k = 0; k < KVC_AMX_BYTES; k++) {
                int x = state.tile[a][m][k];
                if (signed_a) x = (int8_t)x;
                sum += (uint32_t)(x * state.tile[b][k / 4][4 * n + k % 4]);
            }
            memcpy(state.tile[c][m] + 4 * n, &sum, 4);
        }
}

/* Subnormal inputs and results are flushed to 0. */
static float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

static float element(int tile, int row, int i)
{
    uint16_t x;
    memcpy(&x, state.tile[tile][row] + 2 * i, 2);
    return flush(kvc_bf16_to_f32(x));
}

void kvc_amx_bf16(int c, int a, int b)
{
    check();
    for (int m = 0; m < ROWS; m++)
        for (int n = 0; n < 16; n++) {
            float even = 0, odd = 0, sum;
            for (int k = 0; k < KVC_AMX_BYTES / 4; k++) {
                even = flush(fmaf(element(a, m, 2 * k), element(b, k, 2 * n), even));
                odd = flush(fmaf(element(a, m, 2 * k + 1), element(b, k, 2 * n + 1), odd));
            }
            memcpy(&sum, state.tile[c][m] + 4 * n, 4);
            sum = flush(flush(sum) + flush(even + odd));
            memcpy(state.tile[c][m] + 4 * n, &sum, 4);
        }
}
KVC_TARGET_END
#endif
