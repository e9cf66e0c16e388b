/* amx.h - the tile registers of AMX: 8 tiles of 16 rows of 64 bytes, in the same configuration for all kernels. A
 * product adds to 16 x 16 sums: A [16 rows][64 bytes], B [16 words][16 lanes]; a word has 4 bytes (or 2 bf16), which
 * are multiplied by 4 (2) of a row of A. A K tile of 64 bytes per token, and 16 words of V of 16 dims, are such a B as
 * stored in pages.
 *
 * q and the weights are split into two parts (two limbs, or bf16 and its remainder). These are two matrices A, and the
 * sums of both are stored. For a block of up to KVC_AMX_HALF query rows both parts are in one A, the second one
 * KVC_AMX_HALF rows below the first.
 *
 * Measured on Granite Rapids, cycles: a product 17 (the 16 rows of another B have to be loaded; fewer rows of A save
 * nothing), a load from L1 9, from L2 24, a store 17, of which products hide all but 3.
 *
 * KVC_AMX_MODEL replaces the instructions by plain C after Intel's pseudocode (SDM vol. 2, TDPBSSD..., TDPBF16PS,
 * TILELOADD), for machines without AMX. */
#ifndef KVC_AMX_H
#define KVC_AMX_H

#include "target.h"
#ifdef KVC_AMX_MODEL
KVC_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512bf16,f16c,fma")
#else
KVC_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512bf16,f16c,fma,amx-tile,amx-int8,amx-bf16")
#endif
#include "attend_kernels.h"

#define KVC_AMX_BYTES 64            /* a row of a tile register */
#define KVC_AMX_HALF (KVC_WIDE / 2) /* rows */

#ifdef KVC_AMX_MODEL
void kvc_amx_load(int tile, const void *at, int64_t stride);
void kvc_amx_store(int tile, void *at, int64_t stride);
void kvc_amx_zero(int tile);
void kvc_amx_bytes(int c, int a, int b, bool signed_a);
void kvc_amx_bf16(int c, int a, int b);
void kvc_amx_configure(const void *config);
void kvc_amx_release(void);
#else
/* Register numbers are constants. */
#define kvc_amx_load(tile, at, stride) _tile_loadd(tile, at, stride)
#define kvc_amx_store(tile, at, stride) _tile_stored(tile, at, stride)
#define kvc_amx_zero(tile) _tile_zero(tile)
#define kvc_amx_bytes(c, a, b, signed_a)                                                                               \
    do {                                                                                                               \
        if (signed_a)                                                                                                  \
            _tile_dpbsud(c, a, b);                                                                                     \
        else                                                                                                           \
            _tile_dpbuud(c, a, b);                                                                                     \
    } while (0)
#define kvc_amx_bf16(c, a, b) _tile_dpbf16ps(c, a, b)
#define kvc_amx_configure(config) _tile_loadconfig(config)
#define kvc_amx_release() _tile_release()
#endif

/* Prefetches lines [first, first + n) of the page that is `ahead` bytes after this one (0: none). Must be inlined: gcc
 * treats a function that only prefetches as free of side effects and removes its calls. */
INLINE void kvc_amx_fetch(const uint8_t *at, int64_t first, int64_t n, ptrdiff_t ahead)
{
    for (int64_t i = first; i < first + n; i++) kvc_prefetch(at, i, ahead);
}

/* Codes are converted to `size` bytes each, a tile of K or 16 dims of V at a time, before the previous ones are
 * multiplied: conversions, products and prefetches overlap, and tile registers do not wait for stores. They are kept in
 * `wide` if more rows follow; otherwise two buffers take turns, which stay in L1. */
INLINE bool kvc_amx_once(int64_t rows, bool ready) { return rows < KVC_WIDE && !ready; }
/* K tile t. */
INLINE uint8_t *kvc_amx_key_at(const kvc_qk_args *args, int64_t t, int64_t size)
{
    return args->wide + (kvc_amx_once(args->rows, args->ready) ? t % 2 : t) * KVC_TILE * args->query->dim * size;
}
/* V's 16 dims from d on, of KVC_WIDE_STEP tokens from t on; its rows are kvc_amx_value_stride words apart. */
INLINE int64_t kvc_amx_value_stride(const kvc_pv_args *args)
{
    return kvc_amx_once(args->rows, args->ready) ? KVC_TILE : args->dim;
}
INLINE uint8_t *kvc_amx_value_at(const kvc_pv_args *args, int64_t t, int64_t d, int64_t size)
{
    if (kvc_amx_once(args->rows, args->ready)) return args->wide + d / KVC_TILE % 2 * KVC_WIDE_STEP * KVC_TILE * size;
    return args->wide + t * args->dim * size + d * 4;
}

#endif
