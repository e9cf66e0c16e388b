/* avx2_tile.c - tile.h for avx2. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#pragma GCC optimize("fp-contract=off") /* before immintrin.h: its mul and add are plain C operators */
#include "lanes_avx2.h"
#include "tile.h"

const kvc_tile_kernels kvc_avx2_tile = KVC_TILE_TABLE;
#endif
