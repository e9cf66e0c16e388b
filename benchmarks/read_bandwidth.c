/* read_bandwidth.c - how fast this machine reads memory: one stream a thread, wide loads, sums that cannot be skipped; and the
 * clock of the core it runs on.
 * Built on demand by benchmarks/common.py. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

typedef int64_t wide __attribute__((vector_size(64)));
/* torch_parallel_for of torch's stable ABI. */
typedef int32_t parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void *), void *);

enum { LINE = 256 };

typedef struct reading {
    const char *data;
    atomic_llong sum;
} reading;

static void sum_lines(int64_t begin, int64_t end, void *context)
{
    reading *r = context;
    wide a[4] = {{0}};
    long long sum = 0;
    for (int64_t i = begin; i < end; i++)
        for (int k = 0; k < 4; k++) a[k] += *(const wide *)(const void *)(r->data + i * LINE + 64 * k);
    a[0] += a[1] + a[2] + a[3];
    for (int k = 0; k < 8; k++) sum += a[0][k];
    atomic_fetch_add(&r->sum, sum);
}

/* Reads `bytes` (data aligned to 64) once with torch's threads, those that the measured ops have; the sum, so that nothing is
 * left out. */
int64_t read_all(const char *data, size_t bytes, parallel_for *run)
{
    reading r = {data, 0};
    run(0, (int64_t)(bytes / LINE), 1, sum_lines, &r);
    return r.sum;
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
