/* ops_cuda.c - ops on a GPU. The CUDA library is loaded at run time when the ops are bound, like torch. Each call uses
 * torch's current stream of the tensors' device, a device guard, and a workspace from torch's caching allocator, which
 * is released as soon as the call is queued: later users are ordered after it on the stream. */
#include "kvc_cuda.h"
#include "ops.h"
#include "attend/attend.h"
#include "base/status.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#ifndef KVC_VERSION
#define KVC_VERSION "unnamed"
#endif
#define KVC_CUDA_FUNCTIONS(FN)                                                                                         \
    FN(kvc_cuda_abi)                                                                                                   \
    FN(kvc_cuda_version)                                                                                               \
    FN(kvc_cuda_begin)                                                                                                 \
    FN(kvc_cuda_found)                                                                                                 \
    FN(kvc_cuda_text)                                                                                                  \
    FN(kvc_cuda_workspace)                                                                                             \
    FN(kvc_cuda_attend)                                                                                                \
    FN(kvc_cuda_varlen_workspace)                                                                                      \
    FN(kvc_cuda_attend_varlen)                                                                                         \
    FN(kvc_cuda_store_tokens)                                                                                          \
    FN(kvc_cuda_read)                                                                                                  \
    FN(kvc_cuda_compact)                                                                                               \
    FN(kvc_cuda_pack)                                                                                                  \
    FN(kvc_cuda_score_tokens)                                                                                          \
    FN(kvc_cuda_choose)                                                                                                \
    FN(kvc_cuda_quantize)                                                                                              \
    FN(kvc_cuda_dequantize)

#define OLD_DRIVER 35 /* cudaErrorInsufficientDriver */
#define MEMBER(name) __typeof__(&name) name;
#define TORCH_MEMBER(result, name, arguments, since) result(*name) arguments;
typedef struct library {
    KVC_CUDA_FUNCTIONS(MEMBER)
    KVC_CUDA_SHIM_FUNCTIONS(TORCH_MEMBER)
} library;
#undef MEMBER
#undef TORCH_MEMBER

static library gpu;
static bool bound;

const char *kvc_cuda_bind(const char *path, const char *ours)
{
    static char text[512];
    library found;
    void *torch = dlopen(path, RTLD_LAZY | RTLD_NOLOAD), *kernels = dlopen(ours, RTLD_NOW | RTLD_LOCAL);
    if (!torch || !kernels) {
        snprintf(text, sizeof text, "expected %s, got: %s", torch ? ours : "libtorch_cuda loaded; import torch first",
                 torch ? dlerror() : path);
        return text;
    }
#define FIND(handle, name)                                                                                             \
    {                                                                                                                  \
        at = dlsym(handle, #name);                                                                                     \
        if (!at) {                                                                                                     \
            snprintf(text, sizeof text, "expected the function " #name ", %s has none",                                \
                     handle == torch ? path : ours);                                                                   \
            return text;                                                                                               \
        }                                                                                                              \
        memcpy(&found.name, &at, sizeof at);                                                                           \
    }
#define FIND_OURS(name) FIND(kernels, name)
#define FIND_TORCHS(result, name, arguments, since) FIND(torch, name)
    int (*abi)(void) = NULL; /* checked first: another ABI version may have other functions */
    void *at = dlsym(kernels, "kvc_cuda_abi");
    memcpy(&abi, &at, sizeof abi);
    if (!abi || abi() != KVC_CUDA_ABI) {
        char got[32] = "one without a number";
        if (abi) snprintf(got, sizeof got, "%d", abi());
        snprintf(text, sizeof text,
                 "expected CUDA kernels with interface %d, %s has %s; install kvcompress-cuda==" KVC_VERSION
                 ", or build both again",
                 KVC_CUDA_ABI, ours, got);
        return text;
    }
    KVC_CUDA_FUNCTIONS(FIND_OURS)
    if (strcmp(found.kvc_cuda_version(), KVC_VERSION) != 0) {
        snprintf(text, sizeof text,
                 "expected CUDA kernels of kvcompress " KVC_VERSION ", %s is of %s; install "
                 "kvcompress-cuda==" KVC_VERSION ", or build both again",
                 ours, found.kvc_cuda_version());
        return text;
    }
    KVC_CUDA_SHIM_FUNCTIONS(FIND_TORCHS)
#undef FIND
    gpu = found; /* the libraries stay loaded */
    bound = true;
    return NULL;
}

kvc_status kvc_gpu_found(int index, int64_t *found)
{
    uint32_t flags = 0;
    CUDAGuardHandle guard;
    *found = -1;
    if (!bound) return KVC_OK;
    KVC_CHECK(!gpu.aoti_torch_create_cuda_guard(index, &guard), KVC_E_VALUE, "no device cuda:%d", index);
    int status = gpu.kvc_cuda_found(index, &flags);
    gpu.aoti_torch_delete_cuda_guard(guard);
    KVC_CHECK(!status, KVC_E_VALUE, "cuda:%d: %s (status %d)%s", index, gpu.kvc_cuda_text(status), status,
              status == OLD_DRIVER ? "; update the driver, or build kvcompress with an older CUDA" : "");
    *found = flags;
    return KVC_OK;
}

typedef struct call {
    kvc_cuda on;
    CUDAGuardHandle guard;
    AtenTensorHandle room;
} call;

static kvc_status outcome(const kvc_frame *f, int status)
{
    KVC_CHECK(status == 0, KVC_E_VALUE, "%s: CUDA: %s", f->op->name, gpu.kvc_cuda_text(status));
    return KVC_OK;
}

/* Begins a call on tensors with heads of at most `dim` dims. */
static kvc_status begin(kvc_frame *f, int64_t dim, call *c)
{
    KVC_CHECK(dim <= KVC_MAX_DIM, KVC_E_VALUE, "%s: expected head dims up to %d, got %lld", f->op->name, KVC_MAX_DIM,
              (long long)dim);
    memset(c, 0, sizeof *c);
    KVC_CHECK(
        bound, KVC_E_VALUE,
        "%s: expected the CUDA kernels for tensors on a GPU, this build has none; build with KVCOMPRESS_CUDA=all, or "
        "move the tensors with .cpu()",
        f->op->name);
    KVC_CHECK(!gpu.aoti_torch_create_cuda_guard(f->index, &c->guard), KVC_E_VALUE, "%s: no device cuda:%d", f->op->name,
              f->index);
    int status = gpu.aoti_torch_get_current_cuda_stream(f->index, &c->on.stream);
    if (!status) status = gpu.kvc_cuda_begin(f->index, &c->on);
    if (status) gpu.aoti_torch_delete_cuda_guard(c->guard);
    return outcome(f, status);
}

static int64_t widest(const kvc_store *s) { return s->key_dim > s->value_dim ? s->key_dim : s->value_dim; }

static kvc_status end(kvc_frame *f, call *c, int status)
{
    if (c->room) kvc_op_delete(c->room);
    gpu.aoti_torch_delete_cuda_guard(c->guard);
    return outcome(f, status);
}

/* Allocates a workspace of `bytes`; ends the call if that fails. */
static kvc_status take_room(kvc_frame *f, call *c, int64_t bytes)
{
    void *room = NULL;
    kvc_status status = bytes ? kvc_op_new(f, KVC_T_U8, 1, &bytes, &c->room) : KVC_OK;
    if (status != KVC_OK) {
        gpu.aoti_torch_delete_cuda_guard(c->guard);
        return status;
    }
    if (c->room) kvc_torch.aoti_torch_get_data_ptr(c->room, &room);
    c->on.workspace = room;
    return KVC_OK;
}

kvc_status kvc_gpu_attend(kvc_frame *f, const kvc_attend_args *args, const int64_t *seen, const kvc_tensor *counters,
                          int64_t formats)
{
    call c;
    KVC_TRY(kvc_scores_check(args->window, args->scale, args->softcap, f->op->name));
    KVC_TRY(begin(f, widest(&args->store), &c));
    c.on.formats = (uint32_t)formats;
    c.on.seen = seen;
    if (counters && counters->numel <= INT32_MAX) {
        c.on.done = counters->data;
        c.on.done_words = (int32_t)counters->numel;
    }
    KVC_TRY(take_room(f, &c, gpu.kvc_cuda_workspace(args, &c.on)));
    return end(f, &c, gpu.kvc_cuda_attend(args, &c.on));
}

/* Begins a call on an engine's blocks. */
static kvc_status begin_blocks(kvc_frame *f, const kvc_blocks *b, int64_t dim, call *c)
{
    KVC_TRY(begin(f, dim, c));
    c->on.formats = 1u << b->key | 1u << b->value;
    return KVC_OK;
}

kvc_status kvc_gpu_attend_varlen(kvc_frame *f, const kvc_varlen_args *args)
{
    call c;
    KVC_TRY(begin_blocks(f, &args->cache, args->key_dim > args->value_dim ? args->key_dim : args->value_dim, &c));
    KVC_TRY(take_room(f, &c, gpu.kvc_cuda_varlen_workspace(args, &c.on)));
    return end(f, &c, gpu.kvc_cuda_attend_varlen(args, &c.on));
}

kvc_status kvc_gpu_store_tokens(kvc_frame *f, const kvc_store_args *args)
{
    call c;
    KVC_TRY(begin_blocks(f, &args->cache, args->key_dim > args->value_dim ? args->key_dim : args->value_dim, &c));
    return end(f, &c, gpu.kvc_cuda_store_tokens(args, &c.on));
}

/* Calls `what` with the call's kvc_cuda as last argument. */
#define ON_GPU(dim, what, ...)                                                                                         \
    call c;                                                                                                            \
    KVC_TRY(begin(f, dim, &c));                                                                                        \
    return end(f, &c, gpu.what(__VA_ARGS__, &c.on));

kvc_status kvc_gpu_read(kvc_frame *f, const kvc_store *store, int64_t width, const kvc_dense *k,
                        const kvc_dense *v){ON_GPU(widest(store), kvc_cuda_read, store, width, k, v)}

kvc_status kvc_gpu_score_tokens(kvc_frame *f, const kvc_store *store, int kind, int64_t width,
                                float *out){ON_GPU(widest(store), kvc_cuda_score_tokens, store, kind, width, out)}

kvc_status kvc_gpu_compact(kvc_frame *f, const kvc_store *store, const kvc_move *moves,
                           int64_t n){ON_GPU(widest(store), kvc_cuda_compact, store, moves, n)}

kvc_status kvc_gpu_choose(kvc_frame *f, const float *scores, const int32_t *slots, const uint8_t *protect,
                          const int64_t *budget, int64_t lines, int64_t width,
                          uint8_t *keep){ON_GPU(0, kvc_cuda_choose, scores, slots, protect, budget, lines, width, keep)}

kvc_status kvc_gpu_pack(kvc_frame *f, int key, int value, const kvc_dense *k, const kvc_dense *v, const int64_t *size,
                        int64_t page_size,
                        uint8_t *pages){ON_GPU(size[3] > size[4] ? size[3] : size[4], kvc_cuda_pack, key, value, k, v,
                                               size[0], size[1], size[2], size[3], size[4], page_size, pages)}

kvc_status
    kvc_gpu_quantize(kvc_frame *f, int format, kvc_dtype dtype, const void *x, int64_t n, int64_t D, uint8_t *codes,
                     uint8_t *scales){ON_GPU(D, kvc_cuda_quantize, format, dtype, x, n, D, codes, scales)}

kvc_status kvc_gpu_dequantize(kvc_frame *f, int format, const uint8_t *codes, const uint8_t *scales, int64_t n,
                              int64_t D, float *x)
{
    ON_GPU(D, kvc_cuda_dequantize, format, codes, scales, n, D, x)
}
