/* kernels.h - the codec kernels in the tables of the levels (see kvc_kernels in dispatch.h). Arguments must pass
 * kvc_format_check: dim is a multiple of 16 up to KVC_MAX_DIM. */
#ifndef KVC_KERNELS_H
#define KVC_KERNELS_H

#include "base/dispatch.h"

/* Block size of the rotation of a row: the largest power of two that divides dim. */
static inline int64_t kvc_block(int64_t dim) { return dim & -dim; }

void kvc_scalar_encode(int format, float *rows, int64_t n, int64_t dim, const float *feedback, uint8_t *codes,
                       uint8_t *meta);
void kvc_scalar_rotate(float *rows, int64_t n, int64_t dim);

#if defined(__x86_64__)
void kvc_avx512_encode(int format, float *rows, int64_t n, int64_t dim, const float *feedback, uint8_t *codes,
                       uint8_t *meta);
void kvc_avx512_rotate(float *rows, int64_t n, int64_t dim);
void kvc_avx2_encode(int format, float *rows, int64_t n, int64_t dim, const float *feedback, uint8_t *codes,
                     uint8_t *meta);
void kvc_avx2_rotate(float *rows, int64_t n, int64_t dim);
extern const kvc_tile_kernels kvc_avx512_tile, kvc_avx2_tile;
#elif defined(__aarch64__)
void kvc_neon_encode(int format, float *rows, int64_t n, int64_t dim, const float *feedback, uint8_t *codes,
                     uint8_t *meta);
void kvc_neon_rotate(float *rows, int64_t n, int64_t dim);
extern const kvc_tile_kernels kvc_neon_tile;
#endif

#endif
