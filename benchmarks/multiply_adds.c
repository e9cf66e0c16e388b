/* multiply_adds.c - how many multiply-adds a second this machine's vector units do: dot products of 8-bit integers (VNNI) and of
 * bf16, on registers alone, so that nothing waits for memory. 0 where the machine has none.
 * Built on demand by benchmarks/common.py. */
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>

enum { CHAINS = 12, ROUNDS = 4000000 }; /* more chains than a unit has stages; longer than a thread's start */

/* Of this thread: what else runs on its core does not count. */
static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int32_t sink[64];

static int integers(void)
{
#ifdef __AVX512VNNI__
    __m512i a[CHAINS], x = _mm512_set1_epi8((char)sink[0]), y = _mm512_set1_epi8((char)sink[1]);
    for (int k = 0; k < CHAINS; k++) a[k] = _mm512_setzero_si512();
    for (int i = 0; i < ROUNDS; i++) {
        for (int k = 0; k < CHAINS; k++) a[k] = _mm512_dpbusd_epi32(a[k], x, y);
        __asm__ volatile("" : "+v"(x), "+v"(y));
    }
    for (int k = 0; k < CHAINS; k++) sink[2 + k] += _mm512_reduce_add_epi32(a[k]);
    return 64;
#else
    return 0;
#endif
}

static int halves(void)
{
#ifdef __AVX512BF16__
    __m512 a[CHAINS];
    __m512bh x = (__m512bh)_mm512_set1_epi16((short)sink[0]), y = (__m512bh)_mm512_set1_epi16((short)sink[1]);
    for (int k = 0; k < CHAINS; k++) a[k] = _mm512_setzero_ps();
    for (int i = 0; i < ROUNDS; i++) {
        for (int k = 0; k < CHAINS; k++) a[k] = _mm512_dpbf16_ps(a[k], x, y);
        __asm__ volatile("" : "+v"(x), "+v"(y));
    }
    for (int k = 0; k < CHAINS; k++) sink[2 + k] += (int32_t)_mm512_reduce_add_ps(a[k]);
    return 32;
#else
    return 0;
#endif
}

typedef struct part {
    int cpu, halves;
    double rate;
    pthread_t thread;
} part;

static void *run(void *context)
{
    part *p = context;
    cpu_set_t before, one;
    CPU_ZERO(&one);
    CPU_SET((unsigned)p->cpu, &one);
    sched_getaffinity(0, sizeof before, &before);
    sched_setaffinity(0, sizeof one, &one); /* two of them must not meet on one core */
    double start = now();
    int lanes = p->halves ? halves() : integers();
    p->rate = (double)lanes * CHAINS * ROUNDS / (now() - start);
    sched_setaffinity(0, sizeof before, &before);
    return NULL;
}

/* Multiply-adds a second of `threads` cores together. */
double multiply_adds(int of_halves, int threads)
{
    part parts[256] = {{0}};
    double sum = 0;
    if (threads < 1 || threads > 256) return 0;
    for (int t = 0; t < threads; t++) {
        parts[t] = (part){.cpu = t, .halves = of_halves};
        if (t) pthread_create(&parts[t].thread, NULL, run, &parts[t]);
    }
    run(&parts[0]);
    for (int t = 1; t < threads; t++) pthread_join(parts[t].thread, NULL);
    for (int t = 0; t < threads; t++) sum += parts[t].rate;
    return sum;
}
