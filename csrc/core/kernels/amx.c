/* amx.c - the amx level: avx512bf16, with AMX tiles from the number of query rows at which they are faster. Sapphire
 * Rapids and later. */
#include "levels.h"
#ifdef KVC_HAS_AMX
#include "amx.h"

#include "avx512.h"
#include "accumulated.h"

#ifndef KVC_AMX_MODEL
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM of <asm/prctl.h>, for */
#define TILE_DATA 18              /* XFEATURE_XTILEDATA */

bool kvc_amx_usable(void)
{
    const unsigned all = 1u << 22 | 1u << 24 | 1u << 25; /* AMX-BF16, AMX-TILE, AMX-INT8 */
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & all) == all &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#else
bool kvc_amx_usable(void) { return true; }
#endif

static void begin(void)
{
    static _Alignas(64) const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    kvc_amx_configure(&config);
}

static void end(void) { kvc_amx_release(); }

/* Rows: see amx_ints.c and amx_floats.c. */
static const kvc_wide_kernels wide = {.begin = begin,
                                      .end = end,
                                      .rows = {[KVC_RAW_BF16] = 5,
                                               [KVC_FP8_E4M3] = 2,
                                               [KVC_FP8_E5M2] = 2,
                                               [KVC_INT8] = 5,
                                               [KVC_INT4] = 5,
                                               [KVC_INT2] = 5,
                                               [KVC_CAL2] = 5},
                                      KVC_AMX_KERNELS(KVC_ENTRY, amx)};

const kvc_kernels kvc_kernels_amx = {.name = "amx",
                                     .wide = &wide,
                                     .halves = kvc_avx512bf16_halves,
                                     KVC_AVX512_TABLE,
                                     KVC_COMMON_KERNELS(KVC_ENTRY, avx512) KVC_BF16_KERNELS(KVC_ENTRY, avx512bf16)};
KVC_TARGET_END
#endif
