/* dotprod.c - the dotprod level (Armv8.2 with FEAT_DotProd: Neoverse N1, Apple M1, Cortex-A55 and A76 and later): SDOT,
 * four byte products per lane. Floats as in neon. */
#include "levels.h"
#ifdef KVC_HAS_DOTPROD
#include "target.h"
KVC_TARGET("arch=armv8.2-a+dotprod")
#include "neon.h"

#define ISA(name) kvc_dotprod_##name
#define LEVEL kvc_kernels_dotprod
#define BIAS 128
#define CODES(w) veorq_u8(w, vdupq_n_u8(128))
#define DOT(sum, codes, digits, lane) vdotq_laneq_s32(sum, vreinterpretq_s8_u8(codes), digits, lane)
#define UDOT(sum, codes, digits, lane)                                                                                 \
    vreinterpretq_s32_u32(vdotq_laneq_u32(vreinterpretq_u32_s32(sum), codes, vreinterpretq_u8_s8(digits), lane))
#include "neon_ints.h"

const kvc_kernels kvc_kernels_dotprod = {.name = "dotprod", KVC_NEON_TABLE(dotprod, neon)};
KVC_TARGET_END
#endif
