/* twin.h - the host implementation of csrc/cuda/ptx.cuh: the threads of a block run as fibers in this process.
 * Undefined behaviour of a GPU ends the program with a message: a warp primitive that not all 32 lanes reach, or not
 * the same one; a barrier when some threads have returned; shared memory written out of bounds. Shared memory is
 * initialized with NaN. Included by ptx.cuh only. */
#ifndef KVC_TWIN_H
#define KVC_TWIN_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define KVC_DEVICE static inline __attribute__((unused))
#define KVC_UNROLL
#define KVC_ONCE
#define KVC_DECLARE_KERNEL(name, type) extern "C" void name(const void *argument)
#define KVC_KERNEL(name, type, threads, blocks)                                                                        \
    static void name##_body(const type &a);                                                                            \
    extern "C" void name(const void *argument)                                                                         \
    {                                                                                                                  \
        twin_threads_are(#name, threads);                                                                              \
        name##_body(*(const type *)argument);                                                                          \
    }                                                                                                                  \
    static void name##_body(const type &a)
#define TWIN_NAME(kernel) #kernel /* behind KVC_LAUNCH, so that wide.cu's names are seen */
#define KVC_LAUNCH(kernel, argument, x, y, z, threads, shared, stream)                                                 \
    twin_launch(kernel, TWIN_NAME(kernel), argument, sizeof *(argument), x, y, z, threads, shared, stream)

enum twin_op { TWIN_BARRIER, TWIN_ANY, TWIN_SHUFFLE, TWIN_XOR, TWIN_F16, TWIN_BF16 };

extern "C" {
extern int twin_thread, twin_threads;
extern int64_t twin_block[3];
extern uint8_t *kvc_shared;
int twin_launch(void (*kernel)(const void *), const char *name, const void *argument, int64_t bytes, int64_t x,
                int64_t y, int64_t z, int threads, int64_t shared, const void *stream);
/* Runs kernels instead of the twin; 0: the twin does. */
typedef int twin_launcher(const char *name, const void *argument, int64_t bytes, const int64_t grid[3], int threads,
                          int64_t shared);
void twin_set_launcher(twin_launcher *launcher);
/* Work on any other stream ends the program. */
void twin_set_stream(const void *stream);
void twin_on(const void *stream);
void twin_threads_are(const char *kernel, int threads);
void twin_block_barrier(void);
/* A meeting of all lanes of a warp: each passes `in` words, `op` combines them, and each gets `out` words. */
void twin_meet(enum twin_op op, const uint32_t *in, int n_in, uint32_t *out, int n_out);
void twin_touch(const uint8_t *at, int64_t bytes);
void twin_copy(void *to, const void *at, int bytes);
void twin_copies_end(void);
void twin_copies_wait(void);
}

#define KVC_E4M3_UNIT 256.f

static inline __attribute__((unused)) int kvc_fill(void *at, int byte, int64_t bytes, void *stream)
{
    twin_on(stream);
    if (bytes) memset(at, byte, (size_t)bytes);
    return 0;
}

KVC_DEVICE int kvc_thread(void) { return twin_thread; }
KVC_DEVICE int kvc_threads(void) { return twin_threads; }
KVC_DEVICE int64_t kvc_block_x(void) { return twin_block[0]; }
KVC_DEVICE int64_t kvc_block_y(void) { return twin_block[1]; }
KVC_DEVICE int64_t kvc_block_z(void) { return twin_block[2]; }
KVC_DEVICE void kvc_barrier(void) { twin_block_barrier(); }
KVC_DEVICE void kvc_warp_barrier(void) { twin_meet(TWIN_BARRIER, NULL, 0, NULL, 0); }
KVC_DEVICE bool kvc_warp_any(bool x)
{
    uint32_t in = x, out;
    twin_meet(TWIN_ANY, &in, 1, &out, 1);
    return out;
}
KVC_DEVICE uint32_t kvc_shuffle(uint32_t x, int lane)
{
    uint32_t in[2] = {x, (uint32_t)lane}, out;
    twin_meet(TWIN_SHUFFLE, in, 2, &out, 1);
    return out;
}
KVC_DEVICE uint32_t kvc_shuffle_xor(uint32_t x, int mask)
{
    uint32_t in[2] = {x, (uint32_t)mask}, out;
    twin_meet(TWIN_XOR, in, 2, &out, 1);
    return out;
}
KVC_DEVICE int kvc_again(int x) { return x; }
KVC_DEVICE uint32_t kvc_warp_most(uint32_t x)
{
    uint32_t most = x;
    for (int h = 16; h > 0; h /= 2) {
        uint32_t other = kvc_shuffle_xor(most, h);
        if (other > most) most = other;
    }
    return most;
}
KVC_DEVICE uint32_t kvc_transpose(uint32_t x)
{
    int g = twin_thread >> 2 & 7, t = twin_thread & 3, half = 16 * (g & 1);
    uint32_t first = kvc_shuffle(x, 8 * t + g / 2), second = kvc_shuffle(x, 8 * t + 4 + g / 2);
    return (first >> half & 0xffff) | second >> half << 16;
}
KVC_DEVICE void kvc_fence(void) {}
KVC_DEVICE void kvc_atomic_or(uint32_t *at, uint32_t x) { *at |= x; }
KVC_DEVICE void kvc_atomic_and(uint32_t *at, uint32_t x) { *at &= x; }
KVC_DEVICE uint32_t kvc_atomic_exchange(uint32_t *at, uint32_t x)
{
    uint32_t old = *at;
    *at = x;
    return old;
}
KVC_DEVICE uint32_t kvc_atomic_turn(uint32_t *at, uint32_t last)
{
    uint32_t old = *at;
    *at = old >= last ? 0 : old + 1;
    return old;
}
KVC_DEVICE uint32_t kvc_atomic_add(uint32_t *at, uint32_t x)
{
    uint32_t old = *at;
    *at = old + x;
    return old;
}

/* 16-byte loads require alignment on a GPU. */
KVC_DEVICE kvc_quad kvc_load_quad(const void *at)
{
    kvc_quad q;
    if ((uintptr_t)at % 16) __builtin_trap();
    memcpy(&q, at, sizeof q);
    return q;
}
KVC_DEVICE kvc_quad kvc_load_stream(const void *at) { return kvc_load_quad(at); }
KVC_DEVICE kvc_quad kvc_load_written(const void *at) { return kvc_load_quad(at); }
#define TWIN_LOAD(name, type)                                                                                          \
    KVC_DEVICE type kvc_load_##name(const void *at)                                                                    \
    {                                                                                                                  \
        type x;                                                                                                        \
        if ((uintptr_t)at % sizeof x) __builtin_trap();                                                                \
        memcpy(&x, at, sizeof x);                                                                                      \
        return x;                                                                                                      \
    }
TWIN_LOAD(pair, uint64_t)
TWIN_LOAD(word, uint32_t)
#undef TWIN_LOAD
KVC_DEVICE void kvc_store_quad(void *at, kvc_quad q)
{
    if ((uintptr_t)at % 16) __builtin_trap();
    memcpy(at, &q, sizeof q);
}
KVC_DEVICE void kvc_prefetch(const uint8_t *at, int64_t bytes, int lane)
{
    if (lane == 0) twin_touch(at, bytes);
}
/* Asynchronous copies are made as late as possible, when they are waited for; at once if the order of lanes is odd. */
KVC_DEVICE void kvc_copy_quad(void *to, const void *at) { twin_copy(to, at, 16); }
KVC_DEVICE void kvc_copies_end(void) { twin_copies_end(); }
KVC_DEVICE void kvc_copies_wait(void) { twin_copies_wait(); }
KVC_DEVICE float kvc_exp2(float x) { return exp2f(x); }
KVC_DEVICE uint32_t kvc_pack_f16(float a, float b) { return kvc_f32_to_f16(a) | (uint32_t)kvc_f32_to_f16(b) << 16; }
KVC_DEVICE uint32_t kvc_pack_bf16(float a, float b) { return kvc_f32_to_bf16(a) | (uint32_t)kvc_f32_to_bf16(b) << 16; }
KVC_DEVICE uint32_t kvc_e5m2_pair(uint32_t w, int high)
{
    w >>= 16 * high;
    return (w & 0xff) << 8 | (w & 0xff00) << 16;
}
KVC_DEVICE uint32_t kvc_e4m3_pair(uint32_t w, int high)
{
    uint32_t x = kvc_e5m2_pair(w, high);
    return (x & 0x80008000) | (x >> 1 & 0x3f803f80);
}

KVC_DEVICE float kvc_widen(uint32_t w, int high) { return kvc_f16_to_f32((uint16_t)(w >> 16 * high)); }
KVC_DEVICE uint32_t kvc_bytes(uint32_t x, uint32_t y, uint32_t select)
{
    uint64_t both = (uint64_t)y << 32 | x;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) out |= (uint32_t)(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
    return out;
}
KVC_DEVICE uint32_t kvc_less_pair(uint32_t x, uint32_t y)
{
    return kvc_pack_f16(kvc_widen(x, 0) - kvc_widen(y, 0), kvc_widen(x, 1) - kvc_widen(y, 1));
}
KVC_DEVICE uint32_t kvc_times_pair(uint32_t x, uint32_t y)
{
    return kvc_pack_f16(kvc_widen(x, 0) * kvc_widen(y, 0), kvc_widen(x, 1) * kvc_widen(y, 1));
}
KVC_DEVICE uint32_t kvc_times_half(uint32_t x, uint32_t y, int high)
{
    return kvc_times_pair(x, (y >> 16 * high & 0xffff) * 0x10001);
}
KVC_DEVICE uint32_t kvc_most_pair(uint32_t x, uint32_t y)
{
    return kvc_pack_f16(fmaxf(kvc_widen(x, 0), kvc_widen(y, 0)), fmaxf(kvc_widen(x, 1), kvc_widen(y, 1)));
}
/* For non-negative numbers, bits compare like numbers; NaN compares above all others. */
KVC_DEVICE uint32_t kvc_top_pair(const bool bf16, uint32_t x, uint32_t y)
{
    uint32_t low = (x & 0xffff) > (y & 0xffff) ? x : y, high = x >> 16 > y >> 16 ? x : y;
    (void)bf16;
    return (low & 0xffff) | (high & 0xffff0000);
}
/* Exact in 53 bits; the intermediate float keeps the bit that the second rounding needs, except for ties of ties. */
KVC_DEVICE uint32_t kvc_times_pair_more(uint32_t x, uint32_t y, uint32_t z)
{
    double low = (double)kvc_widen(x, 0) * kvc_widen(y, 0) + kvc_widen(z, 0);
    double high = (double)kvc_widen(x, 1) * kvc_widen(y, 1) + kvc_widen(z, 1);
    return kvc_pack_f16((float)low, (float)high);
}

#define TWIN_MMA(name, op, number)                                                                                     \
    KVC_DEVICE void kvc_mma_##name(number d[4], const uint32_t a[4], const uint32_t b[2])                              \
    {                                                                                                                  \
        uint32_t in[10];                                                                                               \
        memcpy(in, a, 16);                                                                                             \
        memcpy(in + 4, b, 8);                                                                                          \
        memcpy(in + 6, d, 16);                                                                                         \
        twin_meet(op, in, 10, (uint32_t *)d, 4);                                                                       \
    }
TWIN_MMA(f16, TWIN_F16, float)
TWIN_MMA(bf16, TWIN_BF16, float)
#undef TWIN_MMA
KVC_DEVICE void kvc_mma_f16_from(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4])
{
    memcpy(d, c, 16);
    kvc_mma_f16(d, a, b);
}

#endif
