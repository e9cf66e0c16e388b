/* avx2_tile.c - tile.h for avx2. */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx2,fma,f16c")
#include "lanes_avx2.h"
#include "tile.h"

const kvc_tile_kernels kvc_avx2_tile = KVC_TILE_TABLE;
KVC_TARGET_END
#endif
