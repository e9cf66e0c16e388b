/* system.h - what the core asks of the system beyond C and pthreads: address space and memory for it. */
#ifndef KVC_SYSTEM_H
#define KVC_SYSTEM_H

#include <stdbool.h>
#include <stdint.h>

/* Bytes that the system gives and takes at least; bytes of the machine's memory. */
int64_t kvc_system_page(void);
int64_t kvc_system_memory(void);
/* Bytes of address space that the process may have, INT64_MAX if nothing limits it. */
int64_t kvc_system_space(void);
#define KVC_HUGE_PAGE ((int64_t)2 << 20) /* of x86-64, and of aarch64 with pages of 4 KiB */
/* Address space without memory, at a multiple of a huge page; or NULL. */
void *kvc_system_reserve(int64_t bytes);
void kvc_system_release(void *base, int64_t bytes);
/* Makes a part of it usable; memory comes with the first touch. */
bool kvc_system_use(void *at, int64_t bytes);
/* Its memory goes back, or may be taken when the system needs it; what it holds is undefined then. */
void kvc_system_give_back(void *at, int64_t bytes);
/* Of memory that was given back in parts: its page tables too, without which huge pages fit again. False if it cannot be
 * used any more. */
bool kvc_system_renew(void *at, int64_t bytes);
/* Asks for huge pages, where there are any; or for small ones again. */
void kvc_system_expect_much(void *at, int64_t bytes, bool much);

#endif
