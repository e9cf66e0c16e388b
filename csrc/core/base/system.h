/* system.h - system calls of the core beyond C and pthreads: address space and memory. */
#ifndef KVC_SYSTEM_H
#define KVC_SYSTEM_H

#include <stdbool.h>
#include <stdint.h>

/* System page size; size of physical memory. In bytes. */
int64_t kvc_system_page(void);
int64_t kvc_system_memory(void);
/* Address space limit of the process in bytes, INT64_MAX if there is none. */
int64_t kvc_system_space(void);
#define KVC_HUGE_PAGE ((int64_t)2 << 20) /* of x86-64, and of aarch64 with pages of 4 KiB */
/* Reserves address space without memory, aligned to a huge page; NULL on failure. */
void *kvc_system_reserve(int64_t bytes);
void kvc_system_release(void *base, int64_t bytes);
/* Makes a part of it accessible; memory is committed on first touch. */
bool kvc_system_use(void *at, int64_t bytes);
/* Releases its memory, at once or when the system needs it. The content is then undefined. */
void kvc_system_give_back(void *at, int64_t bytes);
/* Releases the page tables, too, of memory that was returned in parts, so that huge pages can be used again. Returns
 * false if the range is lost. */
bool kvc_system_renew(void *at, int64_t bytes);
/* Requests huge pages where supported, or small pages again. */
void kvc_system_expect_much(void *at, int64_t bytes, bool much);

#endif
