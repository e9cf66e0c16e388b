/* asked.c - counts the memory that a process requests: preloaded, read by asked.py. Requests to malloc and related
 * functions count before they are granted, so that failed ones are included; so do writable mappings, unless they only
 * reserve addresses. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

static atomic_llong live, most;

static void note(long long bytes)
{
    long long now = atomic_load(&live) + bytes, old = atomic_load(&most);
    while (now > old && !atomic_compare_exchange_weak(&most, &old, now)) {}
}

static void *given(void *p)
{
    if (p) atomic_fetch_add(&live, (long long)malloc_usable_size(p));
    return p;
}

long long asked_live(void) { return atomic_load(&live); }

/* The peak since the last call, above what is live now. */
void asked_reset(void) { atomic_store(&most, atomic_load(&live)); }

long long asked_most(void) { return atomic_load(&most); }

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static size_t times(size_t n, size_t size)
{
    size_t bytes;
    return __builtin_mul_overflow(n, size, &bytes) || bytes > INT64_MAX ? INT64_MAX / 2 : bytes;
}

void *malloc(size_t size)
{
    note((long long)times(size, 1));
    return given(__libc_malloc(size));
}

void *calloc(size_t n, size_t size)
{
    note((long long)times(n, size));
    return given(__libc_calloc(n, size));
}

void free(void *p)
{
    if (p) atomic_fetch_sub(&live, (long long)malloc_usable_size(p));
    __libc_free(p);
}

void *realloc(void *p, size_t size)
{
    long long old = p ? (long long)malloc_usable_size(p) : 0;
    note((long long)times(size, 1) - old);
    void *q = __libc_realloc(p, size);
    if (q || (p && !size)) atomic_fetch_add(&live, (q ? (long long)malloc_usable_size(q) : 0) - old);
    return q;
}

void *memalign(size_t to, size_t size)
{
    note((long long)times(size, 1));
    return given(__libc_memalign(to, size));
}

void *aligned_alloc(size_t to, size_t size) { return memalign(to, size); }

int posix_memalign(void **out, size_t to, size_t size)
{
    void *p = memalign(to, size);
    if (!p) return ENOMEM;
    *out = p;
    return 0;
}

static void *(*real_mmap)(void *, size_t, int, int, int, off_t);

void *mmap(void *at, size_t size, int protection, int flags, int file, off_t from)
{
    if (!real_mmap) *(void **)&real_mmap = dlsym(RTLD_NEXT, "mmap");
    if ((protection & PROT_WRITE) && (flags & MAP_ANONYMOUS) && !(flags & MAP_NORESERVE)) note((long long)size);
    return real_mmap(at, size, protection, flags, file, from);
}
