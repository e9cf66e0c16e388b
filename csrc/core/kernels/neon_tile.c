/* neon_tile.c - tile.h for NEON. */
#if defined(__aarch64__)
#include "lanes_neon.h"
#include "neon.h"
#include "tile.h"

const kvc_tile_kernels kvc_neon_tile = KVC_TILE_TABLE;
#endif
