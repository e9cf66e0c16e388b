#include "alloc.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static atomic_llong countdown; /* 0: off; n: the n-th allocation from now fails */
static atomic_llong live;

void kvc_alloc_fail_at(int64_t n) { atomic_store(&countdown, n); }

int64_t kvc_alloc_live(void) { return atomic_load(&live); }

bool kvc_alloc_must_fail(void) { return atomic_load(&countdown) > 0 && atomic_fetch_sub(&countdown, 1) == 1; }

kvc_status kvc_alloc(int64_t count, int64_t size, void *out)
{
    void *block = NULL;
    int64_t bytes;
    memset(out, 0, sizeof block);
    KVC_CHECK(count >= 0 && size >= 0 && !__builtin_mul_overflow(count, size, &bytes) && bytes <= INT64_MAX - KVC_ALIGN,
              KVC_E_MEMORY, "out of memory: %lld x %lld bytes is more than can be addressed", (long long)count,
              (long long)size);
    if (!kvc_alloc_must_fail()) block = aligned_alloc(KVC_ALIGN, (size_t)kvc_align(bytes ? bytes : 1));
    KVC_CHECK(block, KVC_E_MEMORY, "out of memory: wanted %lld bytes", (long long)bytes);
    atomic_fetch_add(&live, 1);
    memcpy(out, &block, sizeof block);
    return KVC_OK;
}

void kvc_free(void *block)
{
    if (block) atomic_fetch_sub(&live, 1);
    free(block);
}
