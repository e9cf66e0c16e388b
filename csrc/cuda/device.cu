/* device.cu - data kept per GPU: its number of multiprocessors, and two words: flags that kernels set, and a copy of
 * those that were fetched. Created at the first call on a device. */
#include "kvc_cuda.h"

#ifndef KVC_VERSION /* set by build_cuda.py */
#define KVC_VERSION "unnamed"
#endif

extern "C" int kvc_cuda_abi(void) { return KVC_CUDA_ABI; }
extern "C" const char *kvc_cuda_version(void) { return KVC_VERSION; }

#ifndef KVC_HOST_TWIN
#include <cuda_runtime.h>
#include <pthread.h>
#include <stdio.h>

#define DEVICES 64
#ifndef KVC_BUILT_FOR /* set by build_cuda.py */
#define KVC_BUILT_FOR "unnamed architectures"
#endif

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    int processors, shared;
    uint32_t *flags;
} devices[DEVICES];

/* Allocates and synchronizes; neither may be captured. */
static int prepare(int device, void *stream)
{
    void *words = NULL;
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    int status = (int)cudaStreamIsCapturing((cudaStream_t)stream, &capture);
    if (status) return status;
    if (capture != cudaStreamCaptureStatusNone) return KVC_CUDA_CAPTURE;
    status = (int)cudaDeviceGetAttribute(&devices[device].processors, cudaDevAttrMultiProcessorCount, device);
    if (!status)
        status =
            (int)cudaDeviceGetAttribute(&devices[device].shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    if (!status) status = (int)cudaMalloc(&words, 2 * sizeof(uint32_t));
    if (!status) status = (int)cudaMemset(words, 0, 2 * sizeof(uint32_t));
    if (!status) devices[device].flags = (uint32_t *)words;
    return status;
}

extern "C" int kvc_cuda_begin(int device, kvc_cuda *on)
{
    if (device < 0 || device >= DEVICES) return (int)cudaErrorInvalidDevice;
    pthread_mutex_lock(&lock);
    int status = devices[device].flags ? 0 : prepare(device, on->stream);
    on->processors = devices[device].processors;
    on->shared = devices[device].shared;
    on->flags = devices[device].flags;
    pthread_mutex_unlock(&lock);
    return status;
}

extern "C" int kvc_cuda_found(int device, uint32_t *flags)
{
    static pthread_mutex_t asking = PTHREAD_MUTEX_INITIALIZER;
    kvc_cuda on = {};
    int status = kvc_cuda_begin(device, &on);
    if (status) return status;
    pthread_mutex_lock(&asking); /* the second word is shared by all callers */
    status = (int)cudaDeviceSynchronize();
    if (!status) status = kvc_cuda_take(on.flags, on.flags + 1, &on);
    if (!status) status = (int)cudaMemcpy(flags, on.flags + 1, sizeof *flags, cudaMemcpyDeviceToHost);
    pthread_mutex_unlock(&asking);
    return status;
}

/* If the code does not match the driver or device, adds their versions: the driver's message does not
 * always have them. */
static const char *with_device(int status)
{
    static __thread char text[512];
    const char *what = cudaGetErrorString((cudaError_t)status);
    if (status != cudaErrorInsufficientDriver && status != cudaErrorNoKernelImageForDevice &&
        status != cudaErrorUnsupportedPtxVersion && status != cudaErrorInvalidDeviceFunction)
        return what;
    int driver = 0, runtime = 0, device = 0, major = 0, minor = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    char gpu[300] = "no device to be asked";
    struct cudaDeviceProp properties;
    if (!cudaGetDevice(&device) && !cudaGetDeviceProperties(&properties, device)) {
        major = properties.major, minor = properties.minor;
        snprintf(gpu, sizeof gpu, "%s, sm_%d%d", properties.name, major, minor);
    }
    snprintf(text, sizeof text, "%s (driver for CUDA %d.%d; %s); kvcompress was built with CUDA %d.%d for %s", what,
             driver / 1000, driver % 1000 / 10, gpu, runtime / 1000, runtime % 1000 / 10, KVC_BUILT_FOR);
    return text;
}
#endif

extern "C" const char *kvc_cuda_text(int status)
{
    if (status == KVC_CUDA_ALIGNMENT)
        return "expected an arena aligned to 64 bytes and a workspace aligned to 256, got another address; clone the "
               "tensor";
    if (status == KVC_CUDA_CAPTURE)
        return "the first use of a device prepares it, which a CUDA graph cannot capture; call "
               "kvcompress.ops.check(device) "
               "before the capture begins";
#ifndef KVC_HOST_TWIN
    return with_device(status);
#else
    return "a status of the CUDA runtime";
#endif
}
