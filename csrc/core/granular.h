/* granular.h - quantization of dense tensors with any granularity, without pages. */
#ifndef KVC_GRANULAR_H
#define KVC_GRANULAR_H

#include "kvc.h"

#ifdef KVC_EXPORT
#pragma GCC visibility push(default)
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* The elements of [B, H, T, D] that share a scale: all; a head over all sequences; a token over its heads; a row; a channel
 * (dim of a head) over all sequences and tokens; a group of dims of a row. */
enum kvc_by { KVC_BY_TENSOR, KVC_BY_HEAD, KVC_BY_TOKEN, KVC_BY_ROW, KVC_BY_CHANNEL, KVC_BY_GROUP, KVC_BYS };
/* Order of codes of fewer than 8 bits in a row, n = 8 / bits per byte: byte j holds dims j, j + D/n, .. (lowest bits
 * first), or dims n*j, n*j + 1, .. with the first in the lowest bits, or in the highest. 3 bits: planes only, the low
 * two bits of all dims, then the third bits. */
enum kvc_packing { KVC_PACK_PLANES, KVC_PACK_LOW_FIRST, KVC_PACK_HIGH_FIRST, KVC_PACKINGS };

enum kvc_scheme {
#define KVC_SCHEME(ID, name, bits, coding, scale, group, about) KVC_SCHEME_##ID,
#include "schemes.def"
#undef KVC_SCHEME
    KVC_SCHEMES
};

typedef struct kvc_scheme_info {
    const char *name, *about;
    int bits, coding, scale, group; /* enum kvc_coding, enum kvc_scale; group as in schemes.def */
} kvc_scheme_info;

typedef struct kvc_grain {
    int scheme, by, packing;
    int64_t group;      /* dims that share a scale (KVC_BY_GROUP) */
    int64_t B, H, T, D; /* all at least 1 */
} kvc_grain;

/* Shapes and sizes for a grain. */
typedef struct kvc_grain_sizes {
    int64_t scales[4];         /* [B or 1, H or 1, T or 1, scales of a row]; zero points too */
    int64_t count;             /* of scales */
    int64_t row_bytes;         /* codes of a row */
    int64_t scale_bytes, dims; /* bytes of a scale (zero points have 2); dims that share one */
} kvc_grain_sizes;

/* NULL for an unknown code. */
const kvc_scheme_info *kvc_scheme_get(int scheme);
/* KVC_E_VALUE, with the reason, for an invalid grain. */
kvc_status kvc_grain_check(const kvc_grain *grain, kvc_grain_sizes *sizes);

/* Quantizes x to contiguous codes [B, H, T, row_bytes], scales (fp16, or bits of e4m3 or e8m0) and fp16 zero points
 * (asymmetric schemes: the value of code 0). `scale` and `zero`: NULL, or fp32 in the shape of the scales, used instead of
 * those computed from x and rounded to the stored dtype; a scale of 0 makes all values `zero`. `factor` multiplies every
 * scale (nvfp4's second level; else 1). KVC_E_VALUE for NaN or Inf in x, before anything is written. */
kvc_status kvc_quantize_by(const kvc_grain *grain, const kvc_dense *x, const float *scale, const float *zero,
                           float factor, uint8_t *codes, uint8_t *scales, uint16_t *zeros, const kvc_exec *exec);
/* Dequantizes to contiguous fp32 [B, H, T, D]. */
kvc_status kvc_dequantize_by(const kvc_grain *grain, const uint8_t *codes, const uint8_t *scales, const uint16_t *zeros,
                             float factor, float *x, const kvc_exec *exec);

#ifdef __cplusplus
}
#endif
#ifdef KVC_EXPORT
#pragma GCC visibility pop
#endif

#endif
