/* avx512_tile.c - tile.h for avx512. */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")
#include "lanes_avx512.h"
#include "tile.h"

const kvc_tile_kernels kvc_avx512_tile = KVC_TILE_TABLE;
KVC_TARGET_END
#endif
