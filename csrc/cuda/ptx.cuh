/* ptx.cuh - everything that kernels need from the hardware. No other file in csrc/cuda uses instructions, builtin
 * variables or runtime calls directly, so the sources also compile for the host: with KVC_HOST_TWIN these functions are
 * those of tests/cuda_host/twin.h, which runs the threads of a block as fibers.
 *
 * Fragments, with g = lane / 4, t = lane % 4 (PTX ISA, "Matrix fragments for mma.m16n8k16"):
 *     A a[0]: row g, k t-th word; a[1]: row g + 8; a[2], a[3]: the same rows, word t + 4   (2 elements)
 *     B b[0]: column g, word t; b[1]: word t + 4
 *     D d[0], d[1]: row g, columns 2t, 2t + 1; d[2], d[3]: row g + 8
 * The order of the elements of k is arbitrary as long as A and B agree, so the words of a page are used unchanged. */
#ifndef KVC_PTX_CUH
#define KVC_PTX_CUH

#include "base/floats.h"
#include "page.h"

#include <math.h>
#include <stddef.h>

#define KVC_ROOM (99 * 1024) /* shared memory that every architecture lets a block have */

typedef struct kvc_quad {
    uint32_t w[4];
} kvc_quad;

#ifdef KVC_HOST_TWIN
#include "twin.h"
#else

#include <cuda_runtime.h>

#define KVC_DEVICE static __device__ __forceinline__
#define KVC_UNROLL _Pragma("unroll")
#define KVC_ONCE _Pragma("unroll 1")
/* A kernel takes one struct, by value, called `a`; `threads` of its block, `blocks` wanted on a multiprocessor. */
#define KVC_KERNEL(name, type, threads, blocks)                                                                        \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ type a)
#define KVC_DECLARE_KERNEL(name, type) extern "C" __global__ void name(const type a)
extern __shared__ __align__(128) uint8_t kvc_shared[];

KVC_DEVICE int kvc_thread(void) { return (int)threadIdx.x; }
KVC_DEVICE int kvc_threads(void) { return (int)blockDim.x; }
KVC_DEVICE int64_t kvc_block_x(void) { return blockIdx.x; }
KVC_DEVICE int64_t kvc_block_y(void) { return blockIdx.y; }
KVC_DEVICE int64_t kvc_block_z(void) { return blockIdx.z; }

KVC_DEVICE void kvc_barrier(void) { __syncthreads(); }
KVC_DEVICE void kvc_warp_barrier(void) { __syncwarp(); }
/* Memory fence: what the thread wrote is visible to the device before what it writes afterwards; and likewise for
 * reads. */
KVC_DEVICE void kvc_fence(void) { __threadfence(); }
KVC_DEVICE bool kvc_warp_any(bool x) { return __any_sync(0xffffffff, x); }
/* x, but as a number that the compiler does not know: what depends on it is computed again, not kept in registers. */
KVC_DEVICE int kvc_again(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}
KVC_DEVICE uint32_t kvc_warp_most(uint32_t x) { return __reduce_max_sync(0xffffffff, x); }
KVC_DEVICE uint32_t kvc_shuffle(uint32_t x, int lane) { return __shfl_sync(0xffffffff, x, lane); }
KVC_DEVICE uint32_t kvc_shuffle_xor(uint32_t x, int mask) { return __shfl_xor_sync(0xffffffff, x, mask); }
KVC_DEVICE void kvc_atomic_or(uint32_t *at, uint32_t x) { atomicOr(at, x); }
KVC_DEVICE void kvc_atomic_and(uint32_t *at, uint32_t x) { atomicAnd(at, x); }
KVC_DEVICE uint32_t kvc_atomic_add(uint32_t *at, uint32_t x) { return atomicAdd(at, x); }
/* Increments, or wraps to 0 at `last`; returns the previous value. */
KVC_DEVICE uint32_t kvc_atomic_turn(uint32_t *at, uint32_t last) { return atomicInc(at, last); }
KVC_DEVICE uint32_t kvc_atomic_exchange(uint32_t *at, uint32_t x) { return atomicExch(at, x); }

/* Loads 16 bytes that are not read again soon. */
KVC_DEVICE kvc_quad kvc_load_stream(const void *at)
{
    kvc_quad q;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(q.w[0]), "=r"(q.w[1]), "=r"(q.w[2]), "=r"(q.w[3])
                 : "l"(at));
    return q;
}
/* The same for memory that the block itself may have written. */
KVC_DEVICE kvc_quad kvc_load_written(const void *at)
{
    kvc_quad q;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(q.w[0]), "=r"(q.w[1]), "=r"(q.w[2]), "=r"(q.w[3])
                 : "l"(at)
                 : "memory");
    return q;
}
/* Loads 8 (4) bytes that are not written during the kernel. */
KVC_DEVICE uint64_t kvc_load_pair(const void *at)
{
    uint64_t x;
    asm("ld.global.nc.u64 %0, [%1];" : "=l"(x) : "l"(at));
    return x;
}
KVC_DEVICE uint32_t kvc_load_word(const void *at)
{
    uint32_t x;
    asm("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(at));
    return x;
}
KVC_DEVICE kvc_quad kvc_load_quad(const void *at)
{
    uint4 x = *(const uint4 *)at;
    return (kvc_quad){{x.x, x.y, x.z, x.w}};
}
KVC_DEVICE void kvc_store_quad(void *at, kvc_quad q) { *(uint4 *)at = make_uint4(q.w[0], q.w[1], q.w[2], q.w[3]); }
/* Prefetches `bytes` (a multiple of 64) to L2. Called by the whole warp. */
KVC_DEVICE void kvc_prefetch(const uint8_t *at, int64_t bytes, int lane)
{
#if __CUDA_ARCH__ >= 900
    /* by one lane, in a form the compiler recognizes as such: otherwise it loops over lanes */
    asm volatile(
        "{.reg .pred one; elect.sync _|one, 0xffffffff; @one cp.async.bulk.prefetch.L2.global [%0], %1;}" ::"l"(
            __cvta_generic_to_global(at)),
        "r"((uint32_t)bytes)
        : "memory");
#else
    for (int64_t i = 128 * lane; i < bytes; i += 128 * 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(at + i));
#endif
}

/* Asynchronously copies 16 bytes from global to shared memory, through L1 (.ca), which requests full lines from L2;
 * bypassing it (.cg) made int8 1.24 times slower on an H200. */
KVC_DEVICE void kvc_copy_quad(void *to, const void *at)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
                 "l"(__cvta_generic_to_global(at))
                 : "memory");
}
/* Closes a group of copies; kvc_copies_wait waits for all groups of the thread but the last. */
KVC_DEVICE void kvc_copies_end(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
KVC_DEVICE void kvc_copies_wait(void) { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

KVC_DEVICE float kvc_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* Two floats as fp16 or bf16, the first in the low half. */
KVC_DEVICE uint32_t kvc_pack_f16(float a, float b)
{
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
    return y;
}
KVC_DEVICE uint32_t kvc_pack_bf16(float a, float b)
{
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
    return y;
}
/* Bytes 0, 1 (or 2, 3) of a word of e4m3 as two fp16, times 2^-8 if `KVC_E4M3_UNIT` is 256. */
#if __CUDA_ARCH__ >= 890
#define KVC_E4M3_UNIT 1.f
KVC_DEVICE uint32_t kvc_e4m3_pair(uint32_t w, int high)
{
    uint32_t y;
    uint16_t x = (uint16_t)(w >> (16 * high));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(x));
    return y;
}
#else
#define KVC_E4M3_UNIT 256.f
KVC_DEVICE uint32_t kvc_e4m3_pair(uint32_t w, int high)
{
    uint32_t x = __byte_perm(w, 0, high ? 0x3424 : 0x1404); /* each byte to the upper half of 16 bits */
    return (x & 0x80008000) | (x >> 1 & 0x3f803f80);
}
#endif
KVC_DEVICE uint32_t kvc_e5m2_pair(uint32_t w, int high) { return __byte_perm(w, 0, high ? 0x3424 : 0x1404); }

/* The low (or high) fp16 of a word as a float. */
KVC_DEVICE float kvc_widen(uint32_t w, int high)
{
    float y;
    uint16_t x = (uint16_t)(w >> (16 * high));
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
/* Byte permutation: selects bytes of x (0 to 3) and y (4 to 7) by the digits of `select`, lowest first. */
KVC_DEVICE uint32_t kvc_bytes(uint32_t x, uint32_t y, uint32_t select) { return __byte_perm(x, y, select); }
/* x - y, two fp16 each. */
KVC_DEVICE uint32_t kvc_less_pair(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y ^ 0x80008000));
    return z;
}
/* x * y, and x * y + z with a single rounding; two fp16 each, including subnormals. */
KVC_DEVICE uint32_t kvc_times_pair(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}
KVC_DEVICE uint32_t kvc_times_pair_more(uint32_t x, uint32_t y, uint32_t z)
{
    uint32_t sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(z));
    return sum;
}
/* x * the low (or high) half of y. */
KVC_DEVICE uint32_t kvc_times_half(uint32_t x, uint32_t y, int high)
{
    uint32_t z;
    if (high)
        asm("{.reg .b16 l, h; .reg .b32 d; mov.b32 {l, h}, %2; mov.b32 d, {h, h}; mul.rn.f16x2 %0, %1, d;}"
            : "=r"(z)
            : "r"(x), "r"(y));
    else
        asm("{.reg .b16 l, h; .reg .b32 d; mov.b32 {l, h}, %2; mov.b32 d, {l, l}; mul.rn.f16x2 %0, %1, d;}"
            : "=r"(z)
            : "r"(x), "r"(y));
    return z;
}
/* Maximum of two fp16 each. */
KVC_DEVICE uint32_t kvc_most_pair(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("max.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}
/* The same for bf16 or fp16; NaN propagates. */
KVC_DEVICE uint32_t kvc_top_pair(const bool bf16, uint32_t x, uint32_t y)
{
    uint32_t z;
    if (bf16)
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    else
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}
/* 8 x 8 transpose: lane 4g + t has elements 2t, 2t + 1 of row g, afterwards of column g. */
KVC_DEVICE uint32_t kvc_transpose(uint32_t x)
{
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

#define KVC_MMA(name, type, number, letter, shape)                                                                     \
    KVC_DEVICE void kvc_mma_##name(number d[4], const uint32_t a[4], const uint32_t b[2])                              \
    {                                                                                                                  \
        asm("mma.sync.aligned." shape " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                         \
            : "+" letter(d[0]), "+" letter(d[1]), "+" letter(d[2]), "+" letter(d[3])                                   \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                       \
    }
KVC_MMA(f16, F16, float, "f", "m16n8k16.row.col.f32.f16.f16.f32")
KVC_MMA(bf16, BF16, float, "f", "m16n8k16.row.col.f32.bf16.bf16.f32")
#undef KVC_MMA
/* d = c + a b */
KVC_DEVICE void kvc_mma_f16_from(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

/* Returns 0 or the runtime's error. A kernel's shared memory limit is always set to the same value, because threads may
 * launch it concurrently. */
static inline int kvc_launch(const void *kernel, const void *argument, int64_t x, int64_t y, int64_t z, int threads,
                             int64_t shared, void *stream)
{
    void *arguments[1] = {(void *)argument};
    if (x * y * z == 0) return 0;
    if (shared > 48 * 1024) {
        int status = (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, KVC_ROOM);
        if (status) return status;
    }
    return (int)cudaLaunchKernel(kernel, dim3((unsigned)x, (unsigned)y, (unsigned)z), dim3((unsigned)threads),
                                 arguments, (size_t)shared, (cudaStream_t)stream);
}
static inline int kvc_fill(void *at, int byte, int64_t bytes, void *stream)
{
    return bytes ? (int)cudaMemsetAsync(at, byte, (size_t)bytes, (cudaStream_t)stream) : 0;
}
#define KVC_LAUNCH(kernel, argument, x, y, z, threads, shared, stream)                                                 \
    kvc_launch((const void *)(kernel), argument, x, y, z, threads, shared, stream)

#endif

KVC_DEVICE int kvc_lane(void) { return kvc_thread() & 31; }
KVC_DEVICE int kvc_warp(void) { return kvc_thread() >> 5; }
/* Maximum of non-negative floats. */
KVC_DEVICE float kvc_warp_max(float x) { return kvc_f32_of_bits(kvc_warp_most(kvc_f32_bits(x))); }
KVC_DEVICE float kvc_shuffle_f(float x, int lane) { return kvc_f32_of_bits(kvc_shuffle(kvc_f32_bits(x), lane)); }
KVC_DEVICE float kvc_shuffle_xor_f(float x, int mask)
{
    return kvc_f32_of_bits(kvc_shuffle_xor(kvc_f32_bits(x), mask));
}

#endif
