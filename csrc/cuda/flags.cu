/* flags.cu - moves the flag bits set by kernels to a word that the host reads. One atomic exchange, because a kernel on
 * another stream may set more bits. */
#include "kvc_cuda.h"
#include "ptx.cuh"

typedef struct kvc_take_call {
    uint32_t *flags, *found;
} kvc_take_call;

KVC_KERNEL(kvc_take_kernel, kvc_take_call, 32, 1)
{
    if (kvc_thread() == 0) *a.found = kvc_atomic_exchange(a.flags, 0);
}

extern "C" int kvc_cuda_take(uint32_t *flags, uint32_t *found, const kvc_cuda *on)
{
    kvc_take_call call = {flags, found};
    return KVC_LAUNCH(kvc_take_kernel, &call, 1, 1, 1, 32, 0, on->stream);
}
