/* neon_ints.c - the neon level, for every aarch64 CPU: byte products to 16 bits, added in pairs to 32. */
#if defined(__aarch64__)
#include "target.h"
#include "neon.h"

#define ISA(name) kvc_neon_##name
#define LEVEL kvc_kernels_neon
#define BIAS 128
#define CODES(w) veorq_u8(w, vdupq_n_u8(128))
#define DOT(sum, codes, digits, lane) dot4(sum, codes, vdupq_laneq_s32(vreinterpretq_s32_s8(digits), lane))
#define UDOT(sum, codes, digits, lane) udot4(sum, codes, vdupq_laneq_s32(vreinterpretq_s32_s8(digits), lane))

/* Sums of two products stay below 2^15: 2 * 128 * 127. */
INLINE int32x4_t dot4(int32x4_t sum, uint8x16_t codes, int32x4_t digits)
{
    int8x16_t c = vreinterpretq_s8_u8(codes), d = vreinterpretq_s8_s32(digits);
    int16x8_t low = vmull_s8(vget_low_s8(c), vget_low_s8(d)), high = vmull_high_s8(c, d);
    return vpadalq_s16(sum, vpaddq_s16(low, high));
}

/* Below 2^16. */
INLINE int32x4_t udot4(int32x4_t sum, uint8x16_t codes, int32x4_t digits)
{
    uint8x16_t d = vreinterpretq_u8_s32(digits);
    uint16x8_t low = vmull_u8(vget_low_u8(codes), vget_low_u8(d)), high = vmull_high_u8(codes, d);
    return vreinterpretq_s32_u32(vpadalq_u16(vreinterpretq_u32_s32(sum), vpaddq_u16(low, high)));
}

#include "neon_ints.h"

const kvc_kernels kvc_kernels_neon = {.name = "neon", KVC_NEON_TABLE(neon, neon)};
#endif
