/* i8mm.c - the i8mm level (Armv8.6 or FEAT_I8MM: Neoverse V1, V2 and N2, Apple M2 and later): USMMLA, sixteen byte
 * products per pair of lanes, takes the unsigned codes as stored. All of these CPUs have BF16, too: i8mm_floats.c. */
#include "levels.h"
#ifdef KVC_HAS_DOTPROD
#include "target.h"
KVC_TARGET("arch=armv8.2-a+dotprod+i8mm+bf16")
#include "neon.h"

#define ISA(name) kvc_i8mm_##name
#define LEVEL kvc_kernels_i8mm
#define BIAS 0
#define CODES(w) (w)
#define MMLA(sum, codes, digits) vusmmlaq_s32(sum, codes, digits)
#include "neon_ints.h"

const kvc_kernels kvc_kernels_i8mm = {.name = "i8mm", .halves = kvc_i8mm_halves, KVC_NEON_TABLE(i8mm, i8mm)};
KVC_TARGET_END
#endif
