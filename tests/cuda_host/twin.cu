/* twin.cu - blocks as fibers: a scheduler, meetings of lanes, and shared memory between guards. Compiled as C++ because
 * .cu sources are; written as C. */
#include "kvc_cuda.h"
#include "ptx.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define ASAN(x) x
#else
#define ASAN(x)
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define STACK (256 << 10)
#define GUARD 4096
#define MOST 1024
#define COPIES 128

enum state { READY, MEETING, AT_BARRIER, DONE };

typedef struct fiber {
    enum state state;
    void *stack, *sp;
#if !defined(__x86_64__)
    ucontext_t context;
#endif
    uint32_t in[10], out[4];
    struct {
        uint8_t *to;
        const uint8_t *at;
        int bytes, group;
    } copies[COPIES]; /* pending, oldest first */
    int n_copies, group;
} fiber;

typedef struct meeting {
    int arrived;
    enum twin_op op;
} meeting;

int twin_thread, twin_threads;
int64_t twin_block[3];
uint8_t *kvc_shared;
static fiber fibers[MOST];
static meeting meetings[MOST / 32];
static void *scheduler_sp;
static void (*entry)(const void *);
static const void *entry_argument;
static const char *kernel_name = "?";
/* order of blocks, warps and lanes: 0 ascending, 1 descending, else the seed of a random one */
static uint32_t order, chance;
static const void *call_stream; /* the stream that all work of a call must be queued on */

static const char *const op_names[] = {"a warp barrier", "any",      "a shuffle",   "a xor shuffle",
                                       "mma f16",        "mma bf16", "mma u8 x s8", "mma u8 x u8"};

__attribute__((noreturn)) static void die(const char *what)
{
    fprintf(stderr, "cuda twin: %s, block %lld,%lld,%lld, thread %d: %s\n", kernel_name, (long long)twin_block[0],
            (long long)twin_block[1], (long long)twin_block[2], twin_thread, what);
    abort();
}

extern "C" void twin_set_order(uint32_t wanted) { order = chance = wanted; }
static void turns(int *list, int n)
{
    for (int i = 0; i < n; i++) list[i] = order == 1 ? n - 1 - i : i;
    for (int i = n - 1; i > 0 && order > 1; i--) {
        chance = chance * 1664525 + 1013904223;
        int k = (int)((chance >> 16) % (uint32_t)(i + 1)), other = list[k];
        list[k] = list[i], list[i] = other;
    }
}
void twin_set_stream(const void *stream) { call_stream = stream; }
void twin_on(const void *stream)
{
    if (stream != call_stream) die("work on another stream than the call's");
}

/* ---------------------------------------------------------------- context switches */

#if defined(__x86_64__)
extern "C" void twin_switch(void **save, void *to);
__asm__(".text\n.globl twin_switch\n.hidden twin_switch\ntwin_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
#else
static ucontext_t scheduler_context;
#endif

static void to_scheduler(void)
{
    fiber *me = &fibers[twin_thread];
    ASAN(void *fake; __sanitizer_start_switch_fiber(me->state == DONE ? NULL : &fake, NULL, 0));
#if defined(__x86_64__)
    twin_switch(&me->sp, scheduler_sp);
#else
    swapcontext(&me->context, &scheduler_context);
#endif
    ASAN(__sanitizer_finish_switch_fiber(fake, NULL, NULL));
}

static void run_fiber(void)
{
    ASAN(__sanitizer_finish_switch_fiber(NULL, NULL, NULL));
    entry(entry_argument);
    if (fibers[twin_thread].n_copies) die("an asynchronous copy that nobody waited for");
    fibers[twin_thread].state = DONE;
    to_scheduler();
}

static void resume(int i)
{
    twin_thread = i;
    ASAN(void *fake; __sanitizer_start_switch_fiber(&fake, fibers[i].stack, STACK));
#if defined(__x86_64__)
    twin_switch(&scheduler_sp, fibers[i].sp);
#else
    swapcontext(&scheduler_context, &fibers[i].context);
#endif
    ASAN(__sanitizer_finish_switch_fiber(fake, NULL, NULL));
}

static void start(fiber *f)
{
    f->state = READY;
    f->n_copies = f->group = 0;
    /* A finished fiber leaves its last frames, and their red zones, behind. */
    ASAN(if (f->stack) __asan_unpoison_memory_region(f->stack, STACK));
    if (!f->stack) {
        f->stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (f->stack == MAP_FAILED) die("no memory for a stack");
        mprotect(f->stack, 4096, PROT_NONE);
    }
#if defined(__x86_64__)
    void **sp = (void **)((char *)f->stack + STACK - 64);
    *--sp = NULL; /* functions start with the stack 8 bytes off a multiple of 16 */
    *--sp = (void *)run_fiber;
    for (int i = 0; i < 6; i++) *--sp = NULL;
    f->sp = sp;
#else
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack;
    f->context.uc_stack.ss_size = STACK;
    f->context.uc_link = NULL;
    makecontext(&f->context, run_fiber, 0);
#endif
}

/* ---------------------------------------------------------------- meetings */

static float element(uint32_t word, int i, enum twin_op op)
{
    uint16_t h = (uint16_t)(word >> 16 * i);
    return op == TWIN_F16 ? kvc_f16_to_f32(h) : kvc_bf16_to_f32(h);
}

/* The sum of n numbers, the last of which is the accumulator: aligned to the largest, truncated one bit below a float's
 * precision, then converted to float, rounding toward 0. This is the behaviour of tensor cores of sm_80, for 8 products
 * at a time (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021); later ones keep a bit
 * more. */
static float add_up(const double *x, int n)
{
    double most = 0, plain = 0, sum = 0;
    for (int i = 0; i < n; i++) plain += x[i], most = fmax(most, fabs(x[i]));
    if (!isfinite(plain) || most == 0) return (float)plain;
    uint64_t bits;
    memcpy(&bits, &most, sizeof bits);
    /* the last bit that is kept, and its reciprocal */
    uint64_t last = ((bits >> 52) - 24) << 52, inverted = (2046ull << 52) - last;
    double unit, inverse;
    memcpy(&unit, &last, sizeof unit);
    memcpy(&inverse, &inverted, sizeof inverse);
    for (int i = 0; i < n; i++) sum += (double)(int64_t)(x[i] * inverse) * unit;
    float f = (float)sum;
    return isfinite(f) && fabs((double)f) > fabs(sum) ? kvc_f32_of_bits(kvc_f32_bits(f) - 1) : f;
}

/* D = A B + C by PTX's fragment tables. For words 0..7 of k, word w of A's row r is a[r / 8 + 2 * (w / 4)] of lane r %
 * 8 * 4 + w % 4. */
static void multiply(fiber *lane, enum twin_op op)
{
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < 8; c++) {
            fiber *at = &lane[r % 8 * 4 + c / 2];
            int slot = r / 8 * 2 + c % 2;
            float sum = kvc_f32_of_bits(at->in[6 + slot]);
            for (int half = 0; half < 2; half++) {
                double x[9];
                for (int w = 0; w < 4; w++) {
                    uint32_t a = lane[r % 8 * 4 + w].in[r / 8 + 2 * half], b = lane[c * 4 + w].in[4 + half];
                    for (int i = 0; i < 2; i++) x[2 * w + i] = (double)element(a, i, op) * element(b, i, op);
                }
                x[8] = sum;
                sum = add_up(x, 9);
            }
            at->out[slot] = kvc_f32_bits(sum);
        }
}

static void conclude(fiber *lane, enum twin_op op)
{
    uint32_t any = 0;
    for (int i = 0; i < 32; i++) any |= lane[i].in[0];
    for (uint32_t i = 0; i < 32 && op <= TWIN_XOR; i++) {
        uint32_t from = op == TWIN_SHUFFLE ? lane[i].in[1] : op == TWIN_XOR ? i ^ lane[i].in[1] : i;
        if (from >= 32) die("a shuffle from no lane");
        lane[i].out[0] = op == TWIN_ANY ? any != 0 : lane[from].in[0];
    }
    if (op > TWIN_XOR) multiply(lane, op);
}

void twin_meet(enum twin_op op, const uint32_t *in, int n_in, uint32_t *out, int n_out)
{
    fiber *me = &fibers[twin_thread], *lane = &fibers[twin_thread / 32 * 32];
    meeting *m = &meetings[twin_thread / 32];
    if (m->arrived && m->op != op) {
        fprintf(stderr, "cuda twin: lanes meet %s and %s\n", op_names[m->op], op_names[op]);
        die("lanes of a warp diverge");
    }
    m->op = op;
    if (n_in) memcpy(me->in, in, sizeof *in * (size_t)n_in);
    if (++m->arrived < 32) {
        me->state = MEETING;
        to_scheduler();
    } else {
        conclude(lane, op);
        m->arrived = 0;
        for (int i = 0; i < 32; i++) lane[i].state = READY;
    }
    if (n_out) memcpy(out, me->out, sizeof *out * (size_t)n_out);
}

void twin_block_barrier(void)
{
    fibers[twin_thread].state = AT_BARRIER;
    to_scheduler();
}

void twin_touch(const uint8_t *at, int64_t bytes)
{
    if (bytes <= 0 || bytes % 16 || (uintptr_t)at % 16)
        die("a prefetch of a size or at an address that is no multiple of 16");
    volatile uint8_t x = at[0];
    x = at[bytes - 1];
    (void)x;
}

/* Bytes copied asynchronously since the last call. */
static int64_t copied;
void twin_copy(void *to, const void *at, int bytes)
{
    fiber *me = &fibers[twin_thread];
    if ((uintptr_t)to % (uintptr_t)bytes || (uintptr_t)at % (uintptr_t)bytes) die("a misaligned asynchronous copy");
    if (order & 1) { /* as early as possible: detects data that is still read there */
        memcpy(to, at, (size_t)bytes), copied += bytes;
        return;
    }
    if (me->n_copies == COPIES) die("more asynchronous copies on their way than the twin keeps");
    me->copies[me->n_copies].to = (uint8_t *)to, me->copies[me->n_copies].at = (const uint8_t *)at;
    me->copies[me->n_copies].bytes = bytes, me->copies[me->n_copies++].group = me->group;
}
extern "C" int64_t twin_copied(void)
{
    int64_t bytes = copied;
    copied = 0;
    return bytes;
}
void twin_copies_end(void) { fibers[twin_thread].group++; }
void twin_copies_wait(void)
{
    fiber *me = &fibers[twin_thread];
    int made = 0;
    for (; made < me->n_copies && me->copies[made].group < me->group - 1; made++)
        memcpy(me->copies[made].to, me->copies[made].at, (size_t)me->copies[made].bytes),
            copied += me->copies[made].bytes;
    me->n_copies -= made;
    memmove(me->copies, me->copies + made, (size_t)me->n_copies * sizeof *me->copies);
}

/* ---------------------------------------------------------------- launch */

static void run_warp(int w)
{
    fiber *lane = &fibers[w * 32];
    int list[32];
    for (bool ran = true; ran;) {
        ran = false;
        turns(list, 32);
        for (int i = 0; i < 32; i++) {
            int k = list[i];
            if (lane[k].state != READY) continue;
            resume(w * 32 + k);
            ran = true;
        }
    }
    if (meetings[w].arrived) {
        fprintf(stderr, "cuda twin: %d of 32 lanes reach %s\n", meetings[w].arrived, op_names[meetings[w].op]);
        die("lanes of a warp diverge");
    }
}

static void run_block(void)
{
    for (int i = 0; i < twin_threads; i++) start(&fibers[i]);
    for (;;) {
        int done = 0, list[MOST / 32];
        turns(list, twin_threads / 32);
        for (int w = 0; w < twin_threads / 32; w++) run_warp(list[w]);
        for (int i = 0; i < twin_threads; i++) done += fibers[i].state == DONE;
        if (done == twin_threads) return;
        if (done) die("a barrier that some threads have passed by returning");
        for (int i = 0; i < twin_threads; i++) fibers[i].state = READY;
    }
}

void twin_threads_are(const char *kernel, int threads)
{
    kernel_name = kernel;
    if (twin_threads > threads) die("more threads than the kernel's bounds");
}

static twin_launcher *launcher;
void twin_set_launcher(twin_launcher *to) { launcher = to; }

int twin_launch(void (*kernel)(const void *), const char *name, const void *argument, int64_t bytes, int64_t x,
                int64_t y, int64_t z, int threads, int64_t shared, const void *stream)
{
    if (x * y * z == 0) return 0;
    twin_on(stream);
    if (threads % 32 || threads > MOST || x * y * z > INT32_MAX || y > 65535 || z > 65535 || bytes > 4096 ||
        shared > 99 * 1024) {
        fprintf(stderr,
                "cuda twin: %lld x %lld x %lld blocks of %d threads, %lld bytes of argument, %lld of shared memory\n",
                (long long)x, (long long)y, (long long)z, threads, (long long)bytes, (long long)shared);
        die("a launch that no GPU takes");
    }
    const int64_t grid[3] = {x, y, z};
    if (launcher && launcher(name, argument, bytes, grid, threads, shared)) return 0;
    uint8_t *block = (uint8_t *)aligned_alloc(128, (size_t)((shared + 2 * GUARD + 127) / 128 * 128));
    twin_threads = threads;
    entry = kernel;
    entry_argument = argument;
    kvc_shared = block + GUARD;
    const int blocks = (int)(x * y * z);
    int *list = (int *)malloc((size_t)blocks * sizeof *list);
    turns(list, blocks);
    for (int n = 0; n < blocks; n++) {
        twin_block[0] = list[n] % x, twin_block[1] = list[n] / x % y, twin_block[2] = list[n] / (x * y);
        memset(block, 0xa5, GUARD);
        memset(kvc_shared, 0xff, (size_t)shared);
        memset(kvc_shared + shared, 0xa5, GUARD);
        ASAN(__asan_poison_memory_region(block, GUARD));
        ASAN(__asan_poison_memory_region(kvc_shared + shared, GUARD));
        run_block();
        ASAN(__asan_unpoison_memory_region(block, (size_t)(shared + 2 * GUARD)));
        for (int i = 0; i < GUARD; i++)
            if (block[i] != 0xa5 || kvc_shared[shared + i] != 0xa5) die("shared memory written out of bounds");
    }
    free(list);
    free(block);
    return 0;
}

/* For callers that declare the structs themselves. */
extern "C" int twin_args_bytes(void) { return sizeof(kvc_attend_args) << 16 | sizeof(kvc_cuda); }
extern "C" int twin_engine_bytes(void) { return sizeof(kvc_varlen_args) << 16 | sizeof(kvc_store_args); }
