/* shim.h - the functions of libtorch's stable C ABI that we use. Torch's own headers are C++, so the functions are
 * declared here; a test checks these declarations against torch's. They are looked up by name when the ops are bound
 * (shim.c), not by the linker, so the extension builds and loads without torch. */
#ifndef KVC_SHIM_H
#define KVC_SHIM_H

#include <stdbool.h>
#include <stdint.h>

#ifndef KVC_SHIM_TYPES /* the drift test includes torch's own */
typedef uint64_t StableIValue;
typedef struct AtenTensorOpaque *AtenTensorHandle;
typedef struct TorchLibraryOpaque *TorchLibraryHandle;
typedef int32_t AOTITorchError;
typedef struct CUDAGuardOpaque *CUDAGuardHandle;
#endif

/* FN(return type, name, arguments, first torch release that has it) */
#define KVC_SHIM_FUNCTIONS(FN)                                                                                         \
    FN(AOTITorchError, aoti_torch_library_init_def, (const char *, const char *, uint32_t, TorchLibraryHandle *),      \
       "2.9")                                                                                                          \
    FN(AOTITorchError, aoti_torch_library_init_impl,                                                                   \
       (const char *, const char *, const char *, uint32_t, TorchLibraryHandle *), "2.9")                              \
    FN(AOTITorchError, aoti_torch_library_def, (TorchLibraryHandle, const char *), "2.9")                              \
    FN(AOTITorchError, torch_library_impl,                                                                             \
       (TorchLibraryHandle, const char *, void (*)(StableIValue *, uint64_t, uint64_t), uint64_t), "2.10")             \
    FN(AOTITorchError, torch_parallel_for, (int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void *), void *),    \
       "2.10")                                                                                                         \
    FN(AOTITorchError, aoti_torch_get_data_ptr, (AtenTensorHandle, void **), "2.9")                                    \
    FN(AOTITorchError, aoti_torch_get_dim, (AtenTensorHandle, int64_t *), "2.9")                                       \
    FN(AOTITorchError, aoti_torch_get_sizes, (AtenTensorHandle, int64_t **), "2.9")                                    \
    FN(AOTITorchError, aoti_torch_get_strides, (AtenTensorHandle, int64_t **), "2.9")                                  \
    FN(AOTITorchError, aoti_torch_get_dtype, (AtenTensorHandle, int32_t *), "2.9")                                     \
    FN(AOTITorchError, aoti_torch_get_device_type, (AtenTensorHandle, int32_t *), "2.9")                               \
    FN(AOTITorchError, aoti_torch_empty_strided,                                                                       \
       (int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, AtenTensorHandle *), "2.9")              \
    FN(AOTITorchError, aoti_torch_delete_tensor_object, (AtenTensorHandle), "2.9")                                     \
    FN(void, aoti_torch_check, (bool, const char *, const char *, uint32_t, const char *), "2.9")                      \
    FN(AOTITorchError, aoti_torch_get_device_index, (AtenTensorHandle, int32_t *), "2.9")                              \
    FN(int32_t, aoti_torch_device_type_cuda, (void), "2.9")                                                            \
    FN(int32_t, aoti_torch_device_type_cpu, (void), "2.9")                                                             \
    FN(int32_t, aoti_torch_dtype_float32, (void), "2.9")                                                               \
    FN(int32_t, aoti_torch_dtype_float16, (void), "2.9")                                                               \
    FN(int32_t, aoti_torch_dtype_bfloat16, (void), "2.9")                                                              \
    FN(int32_t, aoti_torch_dtype_uint8, (void), "2.9")                                                                 \
    FN(int32_t, aoti_torch_dtype_int32, (void), "2.9")                                                                 \
    FN(int32_t, aoti_torch_dtype_int64, (void), "2.9")                                                                 \
    FN(int32_t, aoti_torch_dtype_bool, (void), "2.9")

/* The functions of libtorch_cuda. */
#define KVC_CUDA_SHIM_FUNCTIONS(FN)                                                                                    \
    FN(AOTITorchError, aoti_torch_create_cuda_guard, (int32_t, CUDAGuardHandle *), "2.9")                              \
    FN(AOTITorchError, aoti_torch_delete_cuda_guard, (CUDAGuardHandle), "2.9")                                         \
    FN(AOTITorchError, aoti_torch_get_current_cuda_stream, (int32_t, void **), "2.9")

#ifndef KVC_SHIM_TYPES
#define KVC_SHIM_MEMBER(result, name, arguments, since) result(*name) arguments;
typedef struct kvc_shim {
    KVC_SHIM_FUNCTIONS(KVC_SHIM_MEMBER)
} kvc_shim;
#undef KVC_SHIM_MEMBER

/* All members set after kvc_shim_bind. */
extern kvc_shim kvc_torch;

/* Finds every function in the libtorch_cpu that is already loaded from `path`. NULL on success, else what is missing. */
const char *kvc_shim_bind(const char *path);
#endif

#endif
