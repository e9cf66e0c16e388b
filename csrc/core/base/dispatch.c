/* dispatch.c - selects the kernel level, once per process. */
#include "dispatch.h"
#include "base/status.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static const kvc_kernels *available[KVC_MAX_LEVELS + 1]; /* best level last, NULL-terminated */
static const kvc_kernels *chosen;                        /* NULL: KVCOMPRESS_ISA is invalid */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void choose(void)
{
    const char *wanted = getenv("KVCOMPRESS_ISA");
    int n = 0;
    for (const kvc_level *level = kvc_levels; level->kernels && n < KVC_MAX_LEVELS; level++)
        if (level->usable()) available[n++] = level->kernels;
    if (!wanted || !*wanted)
        chosen = available[n - 1];
    else
        for (int i = 0; i < n; i++)
            if (!strcmp(wanted, available[i]->name)) chosen = available[i];
}

const kvc_kernels *kvc_kernels_get(void)
{
    pthread_once(&once, choose);
    return chosen;
}

const char *kvc_isa_available(int i)
{
    pthread_once(&once, choose);
    return i >= 0 && i < KVC_MAX_LEVELS && available[i] ? available[i]->name : NULL;
}

kvc_status kvc_isa(const char **name)
{
    const kvc_kernels *kernels = kvc_kernels_get();
    int best = 0;
    while (available[best + 1]) best++;
    KVC_CHECK(kernels, KVC_E_VALUE,
              "KVCOMPRESS_ISA: expected a level that is compiled in and runs on this CPU "
              "(best: %s), got '%s'; unset it to take the best",
              available[best]->name, getenv("KVCOMPRESS_ISA") ? getenv("KVCOMPRESS_ISA") : "");
    *name = kernels->name;
    return KVC_OK;
}
