/* copy_bandwidth.c - memcpy with a share of the bytes for each thread. Built on demand by benchmarks/common.py. */
#include <pthread.h>
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
        if (t) pthread_create(&parts[t].thread, NULL, copy_part, &parts[t]);
    }
    copy_part(&parts[0]);
    for (int t = 1; t < threads; t++) pthread_join(parts[t].thread, NULL);
}
