/* device.cu - what is kept for each GPU: its count of multiprocessors, and the word of flags that kernels set. Both are made at
 * the first call on a device, which must not be one that a CUDA graph captures. */
#include "kvc_cuda.h"

#ifndef KVC_HOST_TWIN
#include <cuda_runtime.h>
#include <pthread.h>

#define DEVICES 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    int processors;
    uint32_t *flags;
} devices[DEVICES];

extern "C" int kvc_cuda_begin(int device, kvc_cuda *on)
{
    int status = 0;
    if (device < 0 || device >= DEVICES) return (int)cudaErrorInvalidDevice;
    pthread_mutex_lock(&lock);
    if (!devices[device].flags) {
        void *word = NULL;
        status = (int)cudaDeviceGetAttribute(&devices[device].processors, cudaDevAttrMultiProcessorCount, device);
        if (!status) status = (int)cudaMalloc(&word, sizeof(uint32_t));
        if (!status) status = (int)cudaMemset(word, 0, sizeof(uint32_t));
        if (!status) devices[device].flags = (uint32_t *)word;
    }
    pthread_mutex_unlock(&lock);
    on->processors = devices[device].processors;
    on->flags = devices[device].flags;
    return status;
}

extern "C" int kvc_cuda_found(int device, uint32_t *flags)
{
    kvc_cuda on;
    int status = kvc_cuda_begin(device, &on);
    if (!status) status = (int)cudaDeviceSynchronize();
    if (!status) status = (int)cudaMemcpy(flags, on.flags, sizeof *flags, cudaMemcpyDeviceToHost);
    if (!status && *flags) status = (int)cudaMemset(on.flags, 0, sizeof *flags);
    return status;
}

extern "C" const char *kvc_cuda_text(int status) { return cudaGetErrorString((cudaError_t)status); }
#endif
