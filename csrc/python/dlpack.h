/* dlpack.h - the part of DLPack's C exchange API (version 1, since DLPack 1.3) that we use. It gives access to tensors
 * without torch's dispatcher; torch.Tensor provides the functions. A test checks these structs against torch's copy of
 * dlpack.h. */
#ifndef KVC_DLPACK_H
#define KVC_DLPACK_H

#include <stdint.h>

#define KVC_DL_VERSION 1
enum { KVC_DL_CPU = 1, KVC_DL_CUDA = 2 };
enum { KVC_DL_FLOAT = 2, KVC_DL_BFLOAT = 4 };

typedef struct kvc_dl_tensor {
    void *data;
    int32_t device_type, device_id, ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* in elements */
    uint64_t byte_offset;
} kvc_dl_tensor;

typedef struct kvc_dl_managed {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct kvc_dl_managed *self);
    uint64_t flags;
    kvc_dl_tensor tensor;
} kvc_dl_managed;

typedef struct kvc_dl_exchange {
    uint32_t major, minor;
    struct kvc_dl_exchange *older;
    int (*allocate)(kvc_dl_tensor *like, kvc_dl_managed **out, void *context,
                    void (*failed)(void *context, const char *kind, const char *message));
    int (*from_object)(void *object, kvc_dl_managed **out);
    int (*to_object)(kvc_dl_managed *tensor, void **object); /* takes ownership of the tensor */
    int (*describe)(void *object, kvc_dl_tensor *tensor);    /* borrows the object; may be NULL */
    int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
} kvc_dl_exchange;

#endif
