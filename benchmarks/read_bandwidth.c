/* read_bandwidth.c - how fast this machine reads memory: one stream a thread, wide loads, sums that cannot be skipped; and the
 * clock of the core it runs on.
 * Built on demand by benchmarks/common.py. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

typedef int64_t wide __attribute__((vector_size(64)));

typedef struct part {
    const char *data;
    size_t bytes;
    int64_t sum;
    int cpu;
    pthread_t thread;
} part;

static void *sum_part(void *context)
{
    part *p = context;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((unsigned)p->cpu, &one);
    if (p->cpu)
        sched_setaffinity(0, sizeof one, &one); /* where OpenMP binds threads they would inherit the caller's core */
    wide a[4] = {{0}};
    for (size_t i = 0; i + 256 <= p->bytes; i += 256)
        for (int k = 0; k < 4; k++) a[k] += *(const wide *)(const void *)(p->data + i + 64 * k);
    a[0] += a[1] + a[2] + a[3];
    for (int k = 0; k < 8; k++) p->sum += a[0][k];
    return NULL;
}

/* Reads `bytes` (data aligned to 64) once with `threads` threads; the sum, so that nothing is left out. */
int64_t read_all(const char *data, size_t bytes, int threads)
{
    part parts[256] = {{0}};
    int64_t sum = 0;
    size_t share = bytes / (size_t)threads / 256 * 256;
    if (threads < 1 || threads > 256) return 0;
    for (int t = 0; t < threads; t++) {
        parts[t].data = data + (size_t)t * share;
        parts[t].bytes = share;
        parts[t].cpu = t;
        if (t) pthread_create(&parts[t].thread, NULL, sum_part, &parts[t]);
    }
    sum_part(&parts[0]);
    for (int t = 1; t < threads; t++) pthread_join(parts[t].thread, NULL);
    for (int t = 0; t < threads; t++) sum += parts[t].sum;
    return sum;
}

/* GHz: 2048 additions that wait for each other take a cycle each; the best of many tries, since others may interrupt. */
double core_ghz(void)
{
    double best = 0;
    uint64_t x = 1;
    for (int k = 0; k < 2000; k++) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        for (int i = 0; i < 2048; i++) {
            x += 1;
            __asm__ volatile("" : "+r"(x)); /* or the compiler adds them up */
        }
        clock_gettime(CLOCK_MONOTONIC, &b);
        double ns = (double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec);
        if (2048 / ns > best) best = 2048 / ns;
    }
    return best;
}
