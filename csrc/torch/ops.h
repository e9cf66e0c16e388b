/* ops.h - arguments of a boxed kernel. The stack owns what it holds: kvc_op_run takes the input handles,
 * frees them whatever happens, and hands over the outputs or raises. */
#ifndef KVC_OPS_H
#define KVC_OPS_H

#include "kvc.h"
#include "varlen.h"
#include "shim.h"

#define KVC_OP_ARGS 23
#define KVC_OP_OUTS 3

typedef enum kvc_scalar {
    KVC_T_F32 = 0,
    KVC_T_F16,
    KVC_T_BF16,
    KVC_T_U8,
    KVC_T_I32,
    KVC_T_I64,
    KVC_T_BOOL,
    KVC_T_OTHER
} kvc_scalar;

/* A tensor argument. For an empty tensor only the sizes are meaningful. */
typedef struct kvc_tensor {
    void *data;
    int64_t dim, numel;
    const int64_t *size, *stride; /* size[i] for i < dim */
    kvc_scalar type;
} kvc_tensor;

typedef struct kvc_frame {
    const struct kvc_op *op;
    kvc_tensor tensor[KVC_OP_ARGS]; /* by position in the schema; unset for scalars */
    int64_t integer[KVC_OP_ARGS];
    double real[KVC_OP_ARGS];
    AtenTensorHandle out[KVC_OP_OUTS];
    int n_out;
    bool cuda;             /* the tensors are on a GPU, and so are outputs */
    int32_t device, index; /* torch's codes of the device */
} kvc_frame;

typedef struct kvc_op {
    const char *name, *schema, *kinds; /* kinds: T tensor, W one that the op writes, B blocks that it
                                       * writes, maybe of one pool, i int, f float */
    void (*boxed)(StableIValue *, uint64_t, uint64_t);
    kvc_status (*run)(kvc_frame *frame);
} kvc_op;

/* Defines and registers every op with the libtorch at `path`; Idempotent. NULL on success, else the reason. */
const char *kvc_ops_bind(const char *path);
/* Number of tensor handles held; 0 between calls. */
int64_t kvc_ops_handles(void);

void kvc_op_run(const kvc_op *op, StableIValue *stack);
/* A new contiguous tensor on the frame's device. */
kvc_status kvc_op_new(kvc_frame *frame, kvc_scalar type, int64_t dim, const int64_t *size, AtenTensorHandle *out);
void kvc_op_delete(AtenTensorHandle handle);
/* Adds a new contiguous output; *data is its memory. */
kvc_status kvc_op_output(kvc_frame *frame, kvc_scalar type, int64_t dim, const int64_t *size, void **data);
/* KVC_E_TYPE / KVC_E_VALUE unless argument i (called `name`) has this type (one of the bits 1 << kvc_scalar) and
 * rank; dim < 0: any rank. */
kvc_status kvc_op_expect(const kvc_frame *frame, int i, const char *name, unsigned types, int64_t dim);
/* The same for a contiguous tensor. */
kvc_status kvc_op_expect_contiguous(const kvc_frame *frame, int i, const char *name, unsigned types, int64_t dim);
/* KVC_E_VALUE for an op that has no kernels on a GPU. */
kvc_status kvc_op_on_cpu(const kvc_frame *frame);
/* Tensor i as a strided [B, H, T, D]; fails unless the last dim is contiguous. */
kvc_status kvc_op_dense(const kvc_frame *frame, int i, const char *name, kvc_dense *dense);

/* ops_cuda.c: finds the functions of the CUDA library at `library`, and torch's in the libtorch_cuda that is loaded from
 * `path`. NULL on success, else what is missing. */
const char *kvc_cuda_bind(const char *path, const char *library);
/* Error flags (kvc_cuda_flag) that kernels on device `index` have set since the last call, or -1 without kernels. Waits for
 * the device. */
kvc_status kvc_gpu_found(int index, int64_t *found);
/* The core's functions of these names, on the frame's GPU. */
/* seen, counters: of attend_step, else NULL. */
kvc_status kvc_gpu_attend(kvc_frame *frame, const kvc_attend_args *args, const int64_t *seen,
                          const kvc_tensor *counters, int64_t formats);
kvc_status kvc_gpu_attend_varlen(kvc_frame *frame, const kvc_varlen_args *args);
kvc_status kvc_gpu_store_tokens(kvc_frame *frame, const kvc_store_args *args);
kvc_status kvc_gpu_read(kvc_frame *frame, const kvc_store *store, int64_t width, const kvc_dense *k,
                        const kvc_dense *v);
kvc_status kvc_gpu_score_tokens(kvc_frame *frame, const kvc_store *store, int kind, int64_t width, float *out);
kvc_status kvc_gpu_compact(kvc_frame *frame, const kvc_store *store, const kvc_move *moves, int64_t n);
kvc_status kvc_gpu_choose(kvc_frame *frame, const float *scores, const int32_t *slots, const uint8_t *protect,
                          const int64_t *budget, int64_t lines, int64_t width, uint8_t *keep);
kvc_status kvc_gpu_pack(kvc_frame *frame, int key, int value, const kvc_dense *k, const kvc_dense *v,
                        const int64_t *size, int64_t page_size, uint8_t *pages);
kvc_status kvc_gpu_quantize(kvc_frame *frame, int format, kvc_dtype dtype, const void *x, int64_t n, int64_t D,
                            uint8_t *codes, uint8_t *scales);
kvc_status kvc_gpu_dequantize(kvc_frame *frame, int format, const uint8_t *codes, const uint8_t *scales, int64_t n,
                              int64_t D, float *x);

#define KVC_T_FLOATS (1u << KVC_T_F32 | 1u << KVC_T_F16 | 1u << KVC_T_BF16)
extern const kvc_exec kvc_op_exec; /* torch's thread pool */

kvc_status kvc_op_quantize(kvc_frame *), kvc_op_dequantize(kvc_frame *), kvc_op_pack(kvc_frame *),
    kvc_op_map_heads(kvc_frame *), kvc_op_quantize_by(kvc_frame *), kvc_op_dequantize_by(kvc_frame *),
    kvc_op_pack_codes(kvc_frame *), kvc_op_read(kvc_frame *), kvc_op_attend(kvc_frame *),
    kvc_op_attend_step(kvc_frame *), kvc_op_accumulate_attention(kvc_frame *), kvc_op_select(kvc_frame *),
    kvc_op_compact(kvc_frame *), kvc_op_share(kvc_frame *), kvc_op_score_tokens(kvc_frame *),
    kvc_op_attend_feedback(kvc_frame *), kvc_op_attend_varlen(kvc_frame *), kvc_op_store_tokens(kvc_frame *);

#endif
