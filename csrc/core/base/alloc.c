#include "alloc.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define POISON_MOST ((int64_t)64 << 20) /* larger blocks are not filled: they are expected to stay sparse */

static atomic_llong countdown; /* 0: off; n: the n-th allocation from now fails */
static atomic_llong live;
static atomic_bool poisoned;

void kvc_alloc_fail_at(int64_t n) { atomic_store(&countdown, n); }

void kvc_alloc_poison(bool on) { atomic_store(&poisoned, on); }

void kvc_alloc_fresh(void *block, int64_t bytes)
{
    if (atomic_load_explicit(&poisoned, memory_order_relaxed) && bytes <= POISON_MOST)
        memset(block, 0xff, (size_t)bytes);
}

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
    KVC_CHECK(block, KVC_E_MEMORY, "out of memory: needed %lld bytes", (long long)bytes);
    atomic_fetch_add(&live, 1);
    kvc_alloc_fresh(block, bytes);
    memcpy(out, &block, sizeof block);
    return KVC_OK;
}

void kvc_free(void *block)
{
    if (block) atomic_fetch_sub(&live, 1);
    free(block);
}

kvc_status kvc_grow(void *array, int64_t n, int64_t *capacity, int64_t size)
{
    void *old, *bigger;
    if (n < *capacity) return KVC_OK;
    int64_t wanted = *capacity ? *capacity * 2 : 16;
    memcpy(&old, array, sizeof old);
    KVC_TRY(kvc_alloc(wanted, size, &bigger));
    if (n) memcpy(bigger, old, (size_t)(n * size));
    memset((char *)bigger + n * size, 0, (size_t)((wanted - n) * size));
    kvc_free(old);
    memcpy(array, &bigger, sizeof bigger);
    *capacity = wanted;
    return KVC_OK;
}

/* ---------------------------------------------------------------- workspace */

/* Precedes each workspace block, KVC_ALIGN bytes before it. */
typedef struct header {
    int64_t bytes;
} header;

typedef struct cache {
    header *block[KVC_SCRATCH_BLOCKS];
} cache;

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void drop(void *context)
{
    cache *c = context;
    for (int i = 0; i < KVC_SCRATCH_BLOCKS; i++) free(c->block[i]);
    free(c);
}

static void make_key(void) { pthread_key_create(&key, drop); }

#if __GNUC__ >= 10 && !defined(__clang__) /* stored in the thread-specific key, which -fanalyzer does not track */
#pragma GCC diagnostic ignored "-Wanalyzer-malloc-leak"
#endif

/* The calling thread's cache; NULL if it cannot be allocated. */
static cache *own_cache(void)
{
    pthread_once(&once, make_key);
    cache *c = pthread_getspecific(key);
    if (!c && (c = calloc(1, sizeof *c)) && pthread_setspecific(key, c)) {
        free(c);
        c = NULL;
    }
    return c;
}

kvc_status kvc_scratch(int64_t count, int64_t size, void *out)
{
    cache *c = own_cache();
    int64_t bytes;
    bool known = !__builtin_mul_overflow(count, size, &bytes) && bytes >= 0 && bytes <= INT64_MAX - 2 * KVC_ALIGN;
    int best = -1;
    for (int i = 0; known && c && i < KVC_SCRATCH_BLOCKS; i++)
        if (c->block[i] && c->block[i]->bytes >= bytes && (best < 0 || c->block[i]->bytes < c->block[best]->bytes))
            best = i;
    if (best < 0) {
        header *fresh;
        KVC_TRY(kvc_alloc(known ? bytes + KVC_ALIGN : count, known ? 1 : size, &fresh));
        fresh->bytes = bytes; /* NOLINT: allocated by kvc_alloc */
        *(void **)out = (uint8_t *)fresh + KVC_ALIGN;
        return KVC_OK;
    }
    KVC_CHECK(!kvc_alloc_must_fail(), KVC_E_MEMORY, "out of memory: needed %lld bytes", (long long)bytes);
    atomic_fetch_add(&live, 1);
    *(void **)out = (uint8_t *)c->block[best] + KVC_ALIGN;
    kvc_alloc_fresh(*(void **)out, bytes);
    c->block[best] = NULL;
    return KVC_OK;
}

void kvc_scratch_free(void *block)
{
    if (!block) return;
    header *h = (header *)(void *)((uint8_t *)block - KVC_ALIGN);
    cache *c = own_cache();
    int least = 0;
    for (int i = 0; c && i < KVC_SCRATCH_BLOCKS; i++)
        if (!c->block[i] || (c->block[least] && c->block[i]->bytes < c->block[least]->bytes)) least = i;
    if (c && h->bytes <= KVC_SCRATCH_BYTES && (!c->block[least] || c->block[least]->bytes < h->bytes)) {
        header *old = c->block[least];
        c->block[least] = h;
        h = old;
    }
    atomic_fetch_sub(&live, 1);
    free(h);
}
