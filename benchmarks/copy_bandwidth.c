/* copy_bandwidth.c - memcpy with a share of the bytes for each thread; thread t > 0 stays on CPU t, as OMP_PROC_BIND
 * does with torch's. Built on demand by benchmarks/common.py. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <string.h>

typedef struct part {
    char *to;
    const char *from;
    size_t bytes;
    pthread_t thread;
} part;

static void *copy_part(void *context)
{
    part *p = context;
    memcpy(p->to, p->from, p->bytes);
    return NULL;
}

void copy_all(char *to, const char *from, size_t bytes, int threads)
{
    part parts[256];
    if (threads < 1 || threads > 256) return;
    size_t share = bytes / (size_t)threads / 64 * 64;
    for (int t = 0; t < threads; t++) {
        size_t at = (size_t)t * share;
        parts[t] = (part){.to = to + at, .from = from + at, .bytes = t + 1 < threads ? share : bytes - at};
        if (!t) continue;
        cpu_set_t cpu;
        CPU_ZERO(&cpu);
        CPU_SET(t, &cpu);
        pthread_create(&parts[t].thread, NULL, copy_part, &parts[t]);
        pthread_setaffinity_np(parts[t].thread, sizeof cpu, &cpu);
    }
    copy_part(&parts[0]);
    for (int t = 1; t < threads; t++) pthread_join(parts[t].thread, NULL);
}
