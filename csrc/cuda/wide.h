/* wide.h - entry points for heads of more than KVC_CUDA_DIM dims: the same functions with kernels for rows of up to
 * KVC_MAX_DIM (wide.cu), and separate attention kernels (attend_wide.cu), which also support latents of any width. */
#ifndef KVC_WIDE_H
#define KVC_WIDE_H

#include "device.cuh"

static inline int64_t kvc_widest(const kvc_store *s) { return s->key_dim > s->value_dim ? s->key_dim : s->value_dim; }
static inline bool kvc_is_wide(const kvc_attend_args *a) { return a->latent || kvc_widest(&a->store) > KVC_CUDA_DIM; }
/* Dims of the output. */
KVC_INLINE int64_t kvc_sum_dim(const kvc_attend_args *a) { return a->latent ? a->store.key_dim : a->store.value_dim; }

#define KVC_WIDE_ROWS 8 /* query rows per block */

extern "C" {
int kvc_attend_wide_launch(const kvc_call *call, bool attends, void *stream);
int kvc_write_launch(const kvc_call *call, int64_t items, void *stream);
int kvc_write_launch_wide(const kvc_call *call, int64_t items, void *stream);
int kvc_read_wide(const kvc_store *store, int64_t width, const kvc_dense *k, const kvc_dense *v, const kvc_cuda *on);
int kvc_score_tokens_wide(const kvc_store *store, int kind, int64_t width, float *out, const kvc_cuda *on);
int kvc_compact_wide(const kvc_store *store, const kvc_move *moves, int64_t n, const kvc_cuda *on);
int kvc_pack_wide(int key, int value, const kvc_dense *k, const kvc_dense *v, int64_t B, int64_t H, int64_t T,
                  int64_t key_dim, int64_t value_dim, int64_t page_size, uint8_t *pages, const kvc_cuda *on);
int kvc_quantize_wide(int format, kvc_dtype dtype, const void *x, int64_t n, int64_t D, uint8_t *codes, uint8_t *scales,
                      const kvc_cuda *on);
int kvc_store_tokens_wide(const kvc_store_args *args, const kvc_cuda *on);
int kvc_dequantize_wide(int format, const uint8_t *codes, const uint8_t *scales, int64_t n, int64_t D, float *x,
                        const kvc_cuda *on);
}

#endif
