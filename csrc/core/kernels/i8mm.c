/* i8mm.c - the i8mm level (Armv8.6 or FEAT_I8MM: Neoverse V1, V2 and N2, Apple M2 on): USDOT takes codes as they are
 * stored, unsigned. Floats are neon's. */
#include "levels.h"
#ifdef KVC_HAS_DOTPROD
#include "target.h"
KVC_TARGET("arch=armv8.2-a+dotprod+i8mm")
#include "neon.h"

#define ISA(name) kvc_i8mm_##name
#define LEVEL kvc_kernels_i8mm
#define BIAS 0
#define CODES(w) (w)
/* USDOT by element takes the elements from its signed operand. */
#define DOT(sum, codes, digits, lane) vusdotq_laneq_s32(sum, codes, digits, lane)
#include "neon_ints.h"

const kvc_kernels kvc_kernels_i8mm = {.name = "i8mm", KVC_NEON_TABLE(i8mm)};
KVC_TARGET_END
#endif
