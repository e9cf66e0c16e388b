/* system.c - system.h for Linux and macOS. The only file of the core that depends on the OS (CPU
 * features: levels.c). */
#include "system.h"

#include <stddef.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

int64_t kvc_system_page(void) { return sysconf(_SC_PAGESIZE); }

int64_t kvc_system_memory(void) { return sysconf(_SC_PHYS_PAGES) * kvc_system_page(); }

int64_t kvc_system_space(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) || limit.rlim_cur > INT64_MAX) return INT64_MAX;
    return (int64_t)limit.rlim_cur;
}

void *kvc_system_reserve(int64_t bytes)
{
    int64_t page = kvc_system_page(), size = (bytes + page - 1) / page * page;
    uint8_t *base =
        mmap(NULL, (size_t)(size + KVC_HUGE_PAGE), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return NULL;
    int64_t skip = (int64_t)(-(uintptr_t)base % KVC_HUGE_PAGE);
    if (skip) munmap(base, (size_t)skip);
    munmap(base + skip + size, (size_t)(KVC_HUGE_PAGE - skip));
    return base + skip;
}

void kvc_system_release(void *base, int64_t bytes) { munmap(base, (size_t)bytes); }

bool kvc_system_use(void *at, int64_t bytes) { return mprotect(at, (size_t)bytes, PROT_READ | PROT_WRITE) == 0; }

void kvc_system_give_back(void *at, int64_t bytes)
{
#if defined(__APPLE__) /* MADV_DONTNEED does not release memory on macOS */
    madvise(at, (size_t)bytes, MADV_FREE);
#else
    madvise(at, (size_t)bytes, MADV_DONTNEED);
#endif
}

bool kvc_system_renew(void *at, int64_t bytes)
{
#if defined(__linux__)
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (mmap(at, (size_t)bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, -1, 0) != MAP_FAILED) return true;
    /* The old mapping may already be gone; reserve the range only if nothing else was mapped there meanwhile. */
    void *hole = mmap(at, (size_t)bytes, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
    if (hole == at) return false;
    if (hole != MAP_FAILED) munmap(hole, (size_t)bytes); /* kernels without MAP_FIXED_NOREPLACE treat `at` as a hint */
#else
    (void)at, (void)bytes;
#endif
    return true;
}

void kvc_system_expect_much(void *at, int64_t bytes, bool much)
{
#if defined(MADV_HUGEPAGE)
    madvise(at, (size_t)bytes, much ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
    (void)at, (void)bytes, (void)much;
#endif
}
