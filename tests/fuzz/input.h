/* input.h - shared by the fuzz targets: numbers from the fuzzer's bytes, exact buffers, kernel levels by index.
 *
 * A target is LLVMFuzzerTestOneInput. Each includes dispatch.c, so that the level can be changed. */
#ifndef KVC_INPUT_H
#define KVC_INPUT_H

#include "../../csrc/core/base/dispatch.c"
#include "../c/harness.h"

#include "codec/codec.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct input {
    const uint8_t *at, *end;
} input;

static inline uint8_t byte(input *in) { return in->at < in->end ? *in->at++ : 0; }
static inline int64_t below(input *in, int64_t n) { return byte(in) % n; }

/* Mostly small; sometimes values that break arithmetic. */
static inline int64_t number(input *in)
{
    static const int64_t odd[] = {-1,
                                  -2,
                                  INT32_MAX,
                                  INT32_MIN,
                                  INT64_MAX,
                                  INT64_MIN,
                                  (int64_t)1 << 31,
                                  (int64_t)1 << 62,
                                  UINT32_MAX,
                                  -((int64_t)1 << 33),
                                  255,
                                  256,
                                  257,
                                  1023};
    int n = sizeof odd / sizeof *odd, b = byte(in);
    return b < 256 - n ? b : odd[b - 256 + n];
}

static inline float real_number(input *in)
{
    uint32_t bits = 0;
    for (int i = 0; i < 4; i++) bits = bits << 8 | byte(in);
    return bits & 1 ? (float)(int32_t)bits / 0x1p28f : kvc_f32_of_bits(bits); /* half of them are moderate */
}

/* An exact buffer of `bytes`, aligned to 64, so that sanitizers see an overrun. Filled with the input, repeatedly. */
static inline uint8_t *filled(input *in, int64_t bytes)
{
    const uint8_t *from = in->at;
    uint8_t *p = aligned_alloc(64, (size_t)kvc_align(bytes ? bytes : 1));
    CHECK(p);
    memset(p, 0, (size_t)kvc_align(bytes ? bytes : 1));
    for (int64_t i = 0; i < bytes && from < in->end; i++) p[i] = from[i % (in->end - from)];
    return p;
}

/* Selects the i-th level of this machine; false past the last. */
static inline bool use_level(int i)
{
    if (!kvc_isa_available(i)) return false;
    chosen = available[i];
    return true;
}

static inline int64_t a_dim(input *in)
{
    static const int64_t dims[] = {16, 32, 48, 64, 80, 96, 128, 256};
    return dims[below(in, 8)];
}

#endif
